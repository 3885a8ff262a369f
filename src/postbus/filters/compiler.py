"""A checked tree becomes closures over a view; nothing of it is ever executed as code.

``&&`` and ``||`` are CEL's: an error on one side does not matter when the other side decides, in whichever order they
stand. Comparisons with a literal and paths of fields have closures of their own, because most filters are made of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import re2  # type: ignore[import-untyped]

from postbus.filters.checker import VARIABLES
from postbus.filters.tokens import refuse
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
from postbus.filters.values import (
    SHIFT,
    add,
    arithmetic,
    contained,
    equal,
    indexed,
    kind,
    negated,
    ordered,
    seconds_or_text,
    size,
)
from postbus.filters.view import Fault, View

__all__ = ["FAULTS", "PATTERN_CHARS_MAX", "Evaluate", "compiled"]

PATTERN_CHARS_MAX: Final = 256
PROGRAM_MAX: Final = 10_000
PATTERN_MEMORY = 1 << 20
PATTERN_SHIFT = 6  # steps of the pattern's program over the text that are worth one of ours, in bits

Evaluate: TypeAlias = Callable[[View], Any]
# A missing field and a field of what has no fields come as Python's own errors: no check slows the good case.
FAULTS = (Fault, KeyError, TypeError)

_VARIABLES: dict[str, Evaluate] = {name: operator.attrgetter(name) for name in VARIABLES}


_METHODS: dict[str, Callable[[str, str], bool]] = {
    "startsWith": lambda text, part: text.startswith(part),
    "endsWith": lambda text, part: text.endswith(part),
    "contains": lambda text, part: part in text,
}


def compiled(text: str, tree: Node) -> Evaluate:
    """Return the function of a checked tree; raises ``InvalidFilter`` for a bad pattern. It raises one of FAULTS."""
    return _Compiler(text).function(tree, frozenset())


class _Compiler:
    def __init__(self, text: str) -> None:
        self._text = text

    def function(self, node: Node, scope: frozenset[str]) -> Evaluate:  # noqa: C901, PLR0911, PLR0912 - as there
        """Return the function of one node; ``scope`` names the variables of the loops around it."""
        match node:
            case Literal():
                value = node.value
                return lambda _: value
            case Name():
                return self._name(node, scope)
            case Field():
                return self._path(node, scope)
            case Has():
                return _has(self.function(node.base, scope), node.key)
            case Index():
                return self._index(node, scope)
            case Call():
                return self._call(node, scope)
            case Logic():
                return _chain(tuple(self.function(term, scope) for term in node.terms), decisive=not node.both)
            case Not():
                return _negation(self.function(node.value, scope))
            case Negate():
                value_of = self.function(node.value, scope)
                return lambda view: negated(value_of(view))
            case Binary():
                return self._binary(node, scope)
            case Choose():
                parts = (node.condition, node.yes, node.no)
                return _choice(*(self.function(part, scope) for part in parts))
            case ListOf():
                items = [self.function(item, scope) for item in node.items]
                return lambda view: [item(view) for item in items]
            case MapOf():
                pairs = [(self.function(key, scope), self.function(value, scope)) for key, value in node.pairs]
                return lambda view: _map(view, pairs)
            case Loop():
                body = self.function(node.body, scope | {node.name})
                return _loop(self.function(node.items, scope), node.name, body, node.body.size, every=node.every)

    def _name(self, node: Name, scope: frozenset[str]) -> Evaluate:
        name = node.name
        if name in scope:
            return lambda view: view.locals[name]
        return _VARIABLES[name]

    def _path(self, node: Field, scope: frozenset[str]) -> Evaluate:
        """Read fields in one go: subscripts raise by themselves where there is no such field."""
        keys = [node.key]
        base = node.base
        while isinstance(base, Field):
            keys.append(base.key)
            base = base.base
        start = self.function(base, scope)
        first, *rest = reversed(keys)
        if isinstance(base, Name) and base.name == "payload" and "payload" not in scope:
            if not rest:
                return lambda view: view.payload[first]
            if len(rest) == 1:
                second = rest[0]
                return lambda view: view.payload[first][second]
        if not rest:
            return lambda view: start(view)[first]

        def read(view: View) -> Any:
            value = start(view)[first]
            for key in rest:
                value = value[key]
            return value

        return read

    def _index(self, node: Index, scope: frozenset[str]) -> Evaluate:
        base, key = self.function(node.base, scope), self.function(node.key, scope)
        if isinstance(node.key, Literal) and isinstance(node.key.value, str):
            name = node.key.value
            return lambda view: base(view)[name]
        return lambda view: indexed(base(view), key(view))

    def _call(self, node: Call, scope: frozenset[str]) -> Evaluate:
        first, *others = (self.function(argument, scope) for argument in node.arguments)
        name = node.function
        if name == "size":
            return lambda view: size(first(view))
        if name == "timestamp":
            return lambda view: seconds_or_text(first(view))
        if name == "matches":
            return self._matches(first, node.arguments[1])
        method = _METHODS[name]
        second = others[0]

        def call(view: View) -> bool:
            one, other = first(view), second(view)
            if one.__class__ is not str or other.__class__ is not str:
                raise Fault(f"{name}() wants strings, not {kind(one)} and {kind(other)}")
            view.spend(len(one) >> SHIFT)
            return method(one, other)

        return call

    def _matches(self, subject: Evaluate, pattern: Node) -> Evaluate:
        if not isinstance(pattern, Literal) or not isinstance(pattern.value, str):
            refuse(self._text, pattern.start, "the pattern of matches() must be written out as a string")
        if len(pattern.value) > PATTERN_CHARS_MAX:
            length = len(pattern.value)
            message = f"the pattern has {length} characters; the limit is {PATTERN_CHARS_MAX}"
            refuse(self._text, pattern.start, message)
        options = re2.Options()
        options.log_errors = False
        options.never_capture = True
        options.max_mem = PATTERN_MEMORY
        try:
            found = re2.compile(pattern.value, options)
        except re2.error as error:
            reason = error.args[0]
            reason = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
            refuse(self._text, pattern.start, f"the pattern is not valid: {reason}", "patterns are in RE2's syntax")
        program = found.programsize
        if program > PROGRAM_MAX:
            refuse(self._text, pattern.start, "the pattern is too large", "count fewer repetitions, or use * and +")

        def match(view: View) -> bool:
            text = subject(view)
            if text.__class__ is not str:
                raise Fault(f"matches() wants a string, not {kind(text)}")
            raw = text.encode()
            view.spend(len(raw) * program >> PATTERN_SHIFT)
            return found.search(raw) is not None

        return match

    def _binary(self, node: Binary, scope: frozenset[str]) -> Evaluate:
        left, right = self.function(node.left, scope), self.function(node.right, scope)
        symbol = node.operator
        if symbol in {"==", "!="}:
            return _equality(node, left, right, same=symbol == "==")
        if symbol == "in":
            return _membership(node, left, right)
        if symbol == "+":
            return lambda view: add(view, left(view), right(view))
        if symbol in {"-", "*", "/", "%"}:
            return lambda view: arithmetic(symbol, left(view), right(view))
        return _comparison(node, left, right)


# --- logic ------------------------------------------------------------------------------------------------------------


def _chain(terms: tuple[Evaluate, ...], *, decisive: bool) -> Evaluate:
    """Return the decisive value if any term gives it, raise if one failed and none did, else the other value."""
    other = not decisive

    def evaluate(view: View) -> Any:
        failure: BaseException | None = None
        try:
            for term in terms:
                try:
                    value = term(view)
                except FAULTS as error:
                    failure = error
                    continue
                if value is decisive:
                    return decisive
                if value is not other:
                    failure = Fault(f"a bool is wanted, not a value of type {kind(value)}")
            if failure is not None:
                raise failure
            return other
        finally:
            failure = None  # or it and this frame would hold each other until the collector comes

    return evaluate


def _bool(value: Any) -> bool:
    if value.__class__ is bool:
        return value is True
    raise Fault(f"a bool is wanted, not a value of type {kind(value)}")


def _negation(value_of: Evaluate) -> Evaluate:
    return lambda view: not _bool(value_of(view))


def _choice(condition: Evaluate, yes: Evaluate, no: Evaluate) -> Evaluate:
    return lambda view: yes(view) if _bool(condition(view)) else no(view)


def _loop(items: Evaluate, name: str, body: Evaluate, cost: int, *, every: bool) -> Evaluate:
    decisive = not every

    def evaluate(view: View) -> bool:
        values = items(view)
        if values.__class__ is not list and values.__class__ is not dict:
            raise Fault(f"a value of type {kind(values)} has no elements")
        scope, failure = view.locals, None
        hidden = name in scope
        before = scope.get(name)
        try:
            for value in values:
                view.spend(cost)
                scope[name] = value
                try:
                    if _bool(body(view)) is decisive:
                        return decisive
                except FAULTS as error:
                    failure = error
            if failure is not None:
                raise failure
            return every
        finally:
            failure = None  # as above
            if hidden:
                scope[name] = before
            else:
                scope.pop(name, None)

    return evaluate


# --- fields and maps --------------------------------------------------------------------------------------------------


def _has(base: Evaluate, key: str) -> Evaluate:
    def evaluate(view: View) -> bool:
        value = base(view)
        if value.__class__ is not dict:
            raise Fault(f"a value of type {kind(value)} has no fields")
        return key in value

    return evaluate


def _map(view: View, pairs: list[tuple[Evaluate, Evaluate]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key_of, value_of in pairs:
        key, value = key_of(view), value_of(view)
        if key.__class__ is not str:
            raise Fault(f"the key of a map is a string, not a value of type {kind(key)}")
        if key in made:
            raise Fault(f"the map has the key {key!r} twice")
        made[key] = value
    return made


# --- comparisons ------------------------------------------------------------------------------------------------------


def _equality(node: Binary, left: Evaluate, right: Evaluate, *, same: bool) -> Evaluate:
    for side, value_of in ((node.right, left), (node.left, right)):
        if isinstance(side, Literal):
            return _equality_with(value_of, side.value, same=same)
    return lambda view: equal(view, left(view), right(view)) is same


def _equality_with(value_of: Evaluate, literal: Any, *, same: bool) -> Evaluate:
    if literal is None or literal is True or literal is False:
        return lambda view: (value_of(view) is literal) is same
    if literal.__class__ is str:
        return (lambda view: value_of(view) == literal) if same else (lambda view: value_of(view) != literal)

    def evaluate(view: View) -> bool:
        value = value_of(view)
        return (value == literal and value.__class__ is not bool) is same

    return evaluate


def _comparison(node: Binary, left: Evaluate, right: Evaluate) -> Evaluate:
    symbol, literal = node.operator, node.right
    if isinstance(literal, Literal) and literal.value.__class__ in {int, float}:
        bound = literal.value
        compare: Callable[[Any, Any], bool] = {
            "<": operator.lt,
            "<=": operator.le,
            ">": operator.gt,
            ">=": operator.ge,
        }[symbol]

        def evaluate(view: View) -> bool:
            value = left(view)
            if value.__class__ is int or value.__class__ is float:
                return compare(value, bound)
            raise Fault(f"{symbol} cannot compare values of types {kind(value)} and {kind(bound)}")

        return evaluate
    return lambda view: ordered(view, symbol, left(view), right(view))


def _membership(node: Binary, left: Evaluate, right: Evaluate) -> Evaluate:
    if isinstance(node.right, ListOf) and all(
        isinstance(item, Literal) and isinstance(item.value, str) for item in node.right.items
    ):
        strings = frozenset(item.value for item in node.right.items if isinstance(item, Literal))

        def evaluate(view: View) -> bool:
            value = left(view)
            return value.__class__ is str and value in strings

        return evaluate
    return lambda view: contained(view, left(view), right(view))
