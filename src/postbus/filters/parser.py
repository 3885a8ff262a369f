"""The text of an expression becomes a tree, or is refused with the line and column where it goes wrong.

The grammar is that of CEL without unsigned numbers, bytes, messages and the macros that build lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

from postbus.filters.tokens import Token, refuse, tokens_of
from postbus.filters.tree import (
    Binary,
    Call,
    Choose,
    Field,
    Has,
    Index,
    ListOf,
    Literal,
    Logic,
    Loop,
    MapOf,
    Name,
    Negate,
    Node,
    Not,
)
from postbus.model import InvalidFilter

__all__ = ["DEPTH_MAX", "EXPR_CHARS_MAX", "NODES_MAX", "parse"]

EXPR_CHARS_MAX: Final = 4096
NODES_MAX: Final = 1000
DEPTH_MAX: Final = 48

N = TypeVar("N")
_INT_MAX = (1 << 63) - 1
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_RESERVED = frozenset(
    {"as", "break", "const", "continue", "else", "for", "function", "if", "import", "let", "loop", "package"}
    | {"namespace", "return", "var", "void", "while"}
)
_CALLABLE = "there are has, size, timestamp, startsWith, endsWith, contains, matches, exists and all"
_LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"==", "!=", "<", "<=", ">", ">=", "in"}),
    frozenset({"+", "-"}),
    frozenset({"*", "/", "%"}),
)
_FUNCTIONS = {"size": 1, "timestamp": 1, "matches": 2}
_METHODS = {"size": 0, "startsWith": 1, "endsWith": 1, "contains": 1, "matches": 1}
_LOOPS = {"exists": False, "all": True}
_LOOP_ARGUMENTS = 2


def parse(text: str) -> Node:
    """Return the tree of an expression; raises ``InvalidFilter`` with the position, also beyond the limits."""
    if len(text) > EXPR_CHARS_MAX:
        raise InvalidFilter(f"expr has {len(text)} characters; the limit is {EXPR_CHARS_MAX}")
    return _Parser(text).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = tokens_of(text)
        self._next = 0
        self._nodes = 0
        self._nesting = 0

    def whole(self) -> Node:
        """Parse everything there is."""
        if self._peek.kind == "end":
            refuse(self._text, self._peek.start, "the expression is empty")
        node = self._expression()
        if self._peek.kind != "end":
            self._unexpected()
        return node

    # --- tokens ---

    @property
    def _peek(self) -> Token:
        return self._tokens[self._next]

    def _take(self) -> Token:
        token = self._tokens[self._next]
        self._next += 1
        return token

    def _skip(self, kind: str) -> bool:
        if self._peek.kind != kind:
            return False
        self._next += 1
        return True

    def _expect(self, kind: str) -> Token:
        if self._peek.kind != kind:
            self._unexpected(f"{kind} is missing")
        return self._take()

    def _unexpected(self, message: str | None = None) -> NoReturn:
        token = self._peek
        shown = "the end" if token.kind == "end" else repr(self._text[token.start : token.end][:40])
        message = f"{shown} is not expected here" if message is None else f"{message} before {shown}"
        refuse(self._text, token.start, message)

    # --- nodes ---

    def _made(self, kind: Callable[..., N], at: int, start: int, parts: tuple[Node, ...], **facts: Any) -> N:
        """Make a node over its parts and hold it to the limits."""
        depth = 1 + max((part.depth for part in parts), default=0)
        self._nodes += 1
        if self._nodes > NODES_MAX:
            refuse(self._text, at, f"the expression has more than {NODES_MAX} parts")
        if depth > DEPTH_MAX:
            refuse(self._text, at, f"the expression is nested deeper than {DEPTH_MAX}")
        end = self._tokens[self._next - 1].end
        size = 1 + sum(part.size for part in parts)
        return kind(at=at, start=start, end=end, size=size, depth=depth, **facts)

    def _expression(self) -> Node:
        self._nesting += 1
        if self._nesting > DEPTH_MAX:
            refuse(self._text, self._peek.start, f"the expression is nested deeper than {DEPTH_MAX}")
        node = self._logic(both=False)
        if self._peek.kind == "?":
            at = self._take().start
            yes = self._logic(both=False)
            self._expect(":")
            no = self._expression()
            node = self._made(Choose, at, node.start, (node, yes, no), condition=node, yes=yes, no=no)
        self._nesting -= 1
        return node

    def _logic(self, *, both: bool) -> Node:
        operator = "&&" if both else "||"
        terms = [self._term(both=both)]
        at = self._peek.start
        while self._skip(operator):
            terms.append(self._term(both=both))
        if len(terms) == 1:
            return terms[0]
        return self._made(Logic, at, terms[0].start, tuple(terms), both=both, terms=tuple(terms))

    def _term(self, *, both: bool) -> Node:
        return self._binary(0) if both else self._logic(both=True)

    def _binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._peek.kind in _LEVELS[level]:
            token = self._take()
            right = self._binary(level + 1)
            left = self._made(
                Binary, token.start, left.start, (left, right), operator=token.kind, left=left, right=right
            )
        return left

    def _unary(self) -> Node:
        first = self._peek
        if first.kind not in {"!", "-"}:
            return self._member()
        count = 0
        while self._skip(first.kind):
            count += 1
        if self._peek.kind in {"int", "float"} and first.kind == "-":
            self._next -= 1  # the sign belongs to the number
            count -= 1
        if self._peek.kind == "!" or (
            self._peek.kind == "-" and self._tokens[self._next + 1].kind not in {"int", "float"}
        ):
            self._unexpected()
        value = self._member()
        if count % 2 == 0:  # as in CEL, pairs are nothing at all
            return value
        if first.kind == "!":
            return self._made(Not, first.start, first.start, (value,), value=value)
        return self._made(Negate, first.start, first.start, (value,), value=value)

    def _member(self) -> Node:
        node = self._primary()
        while True:
            if self._skip("."):
                node = self._selected(node)
            elif self._peek.kind == "[":
                at = self._take().start
                key = self._expression()
                self._expect("]")
                node = self._made(Index, at, node.start, (node, key), base=node, key=key)
            else:
                return node

    def _selected(self, base: Node) -> Node:
        token = self._peek
        if token.kind not in {"ident", "quoted"} or (token.kind == "ident" and token.value in _WORDS):
            self._unexpected("the name of a field is missing")
        self._take()
        if token.kind == "ident" and self._peek.kind == "(":
            return self._method(base, token)
        return self._made(Field, token.start, base.start, (base,), base=base, key=token.value)

    def _method(self, base: Node, name: Token) -> Node:
        arguments = self._arguments()
        if name.value in _LOOPS and len(arguments) == _LOOP_ARGUMENTS:
            variable, body = arguments
            if not isinstance(variable, Name):
                refuse(self._text, variable.start, f"{name.value}() wants the name of a variable first")
            every = _LOOPS[name.value]
            return self._made(
                Loop, name.start, base.start, (base, body), every=every, items=base, name=variable.name, body=body
            )
        if name.value in _LOOPS:
            refuse(self._text, name.start, f"{name.value}() wants a variable and a condition")
        if name.value not in _METHODS:
            refuse(self._text, name.start, f"there is no method {name.value}()", _CALLABLE)
        if len(arguments) != _METHODS[name.value]:
            refuse(
                self._text, name.start, f"{name.value}() wants {_METHODS[name.value]} arguments, not {len(arguments)}"
            )
        parts = (base, *arguments)
        return self._made(Call, name.start, base.start, parts, function=name.value, arguments=parts)

    def _arguments(self) -> list[Node]:
        self._expect("(")
        arguments: list[Node] = []
        if not self._skip(")"):
            arguments.append(self._expression())
            while self._skip(","):
                arguments.append(self._expression())
            self._expect(")")
        return arguments

    def _primary(self) -> Node:  # noqa: PLR0911 - a line for each kind
        token = self._take()
        if token.kind == "(":
            node = self._expression()
            self._expect(")")
            return node
        if token.kind == "[":
            return self._list(token)
        if token.kind == "{":
            return self._map(token)
        if token.kind == "ident":
            return self._name(token)
        if token.kind in {"int", "float", "-"}:
            return self._numeral(token)
        if token.kind == "string":
            return self._made(Literal, token.start, token.start, (), value=token.value)
        self._next -= 1
        return self._unexpected()

    def _numeral(self, token: Token) -> Node:
        number = self._take() if token.kind == "-" else token
        value = -number.value if token.kind == "-" else number.value
        if isinstance(value, int) and not -_INT_MAX - 1 <= value <= _INT_MAX:
            refuse(
                self._text,
                token.start,
                "the integer has more than 64 bits",
                "the payload part of a filter has no such limit",
            )
        return self._made(Literal, token.start, token.start, (), value=value)

    def _name(self, token: Token) -> Node:
        word = token.value
        if word in _WORDS:
            return self._made(Literal, token.start, token.start, (), value=_WORDS[word])
        if self._peek.kind == "(":
            return self._function(token)
        if word in _RESERVED:
            refuse(self._text, token.start, f"{word} is a reserved word")
        return self._made(Name, token.start, token.start, (), name=word)

    def _function(self, name: Token) -> Node:
        arguments = self._arguments()
        if name.value == "has":
            if len(arguments) != 1 or not isinstance(arguments[0], Field):
                refuse(self._text, name.start, "has() wants one field", "as in has(payload.name)")
            field = arguments[0]
            return self._made(Has, name.start, name.start, (field.base,), base=field.base, key=field.key)
        if name.value not in _FUNCTIONS:
            refuse(self._text, name.start, f"there is no function {name.value}()", _CALLABLE)
        if len(arguments) != _FUNCTIONS[name.value]:
            wanted = _FUNCTIONS[name.value]
            refuse(self._text, name.start, f"{name.value}() wants {wanted} arguments, not {len(arguments)}")
        parts = tuple(arguments)
        return self._made(Call, name.start, name.start, parts, function=name.value, arguments=parts)

    def _list(self, opening: Token) -> Node:
        items: list[Node] = []
        while not self._skip("]"):
            items.append(self._expression())
            if not self._skip(","):
                self._expect("]")
                break
        return self._made(ListOf, opening.start, opening.start, tuple(items), items=tuple(items))

    def _map(self, opening: Token) -> Node:
        pairs: list[tuple[Node, Node]] = []
        while not self._skip("}"):
            key = self._expression()
            self._expect(":")
            pairs.append((key, self._expression()))
            if not self._skip(","):
                self._expect("}")
                break
        parts = tuple(part for pair in pairs for part in pair)
        return self._made(MapOf, opening.start, opening.start, parts, pairs=tuple(pairs))
