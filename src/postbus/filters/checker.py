"""Types are checked before an expression is ever evaluated, as far as they are known.

What comes out of ``payload`` or ``metadata`` is of a type nobody knows in advance (``dyn``) and fits everywhere; it is
checked when there is a value. The rules are those of CEL: the two sides of ``==`` must be able to be equal, numbers are
not mixed where both types are known.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

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

__all__ = ["VARIABLES", "check"]


class Type(msgspec.Struct, frozen=True):
    """A type by name; a list or map carries the type of its values."""

    name: str
    of: Type | None = None

    def __str__(self) -> str:
        return self.name if self.of is None else f"{self.name}({self.of})"


DYN = Type("dyn")
ANY = Type("anything")  # of the elements that an empty list does not have
BOOL, INT, DOUBLE, STRING = Type("bool"), Type("int"), Type("double"), Type("string")
NULL, TIMESTAMP = Type("null"), Type("timestamp")
UNKNOWN = (DYN, ANY)
ORDERED = (BOOL, INT, DOUBLE, STRING, TIMESTAMP)
OPERANDS: dict[str, tuple[str, ...]] = {
    "+": ("int", "double", "string", "list"),
    "-": ("int", "double"),
    "*": ("int", "double"),
    "/": ("int", "double"),
    "%": ("int",),
}
VARIABLES: dict[str, Type] = {
    "payload": DYN,
    "metadata": Type("map", DYN),
    "headers": Type("map", STRING),
    "topic": STRING,
    "variant": STRING,
    "source": STRING,
    "key": DYN,
    "occurred_at": TIMESTAMP,
}


def check(text: str, tree: Node) -> None:
    """Refuse an expression whose types cannot fit, or that cannot give a bool; points at the place."""
    result = _Checker(text).type_of(tree, VARIABLES)
    if result not in (BOOL, *UNKNOWN):
        refuse(text, tree.start, f"the expression gives a value of type {result}, not a bool")


def _fits(one: Type, other: Type) -> bool:
    """Say whether a value can be of both types."""
    if one in UNKNOWN or other in UNKNOWN:
        return True
    if one.of is not None and other.of is not None:
        return one.name == other.name and _fits(one.of, other.of)
    return one == other or {one, other} == {NULL, TIMESTAMP}


def _joined(one: Type, other: Type) -> Type:
    """Return the type of a value that may be of either."""
    if ANY in (one, other):
        return other if one == ANY else one
    if DYN in (one, other) or not _fits(one, other):
        return DYN
    if one.of is not None and other.of is not None:
        return Type(one.name, _joined(one.of, other.of))
    return other if one == NULL else one


class _Checker:
    def __init__(self, text: str) -> None:
        self._text = text

    def _refuse(self, node: Node, message: str, hint: str | None = None) -> NoReturn:
        refuse(self._text, node.at, message, hint)

    def type_of(self, node: Node, scope: dict[str, Type]) -> Type:  # noqa: C901, PLR0911, PLR0912 - a line for each kind
        """Return the type of a node, its parts checked first."""
        match node:
            case Literal():
                return _literal(node)
            case Name():
                return self._name(node, scope)
            case Field() | Has():
                return self._field(node, scope)
            case Index():
                return self._index(node, scope)
            case Call():
                return self._call(node, scope)
            case Logic():
                for term in node.terms:
                    self._bool(term, scope, "&&" if node.both else "||")
                return BOOL
            case Not():
                return self._bool(node.value, scope, "!")
            case Negate():
                return self._negated(node, scope)
            case Binary():
                return self._binary(node, scope)
            case Choose():
                return self._choice(node, scope)
            case ListOf():
                return self._list(node, scope)
            case MapOf():
                return self._map(node, scope)
            case Loop():
                return self._loop(node, scope)

    def _bool(self, node: Node, scope: dict[str, Type], what: str) -> Type:
        found = self.type_of(node, scope)
        if found not in (BOOL, *UNKNOWN):
            self._refuse(node, f"{what} wants a bool, not a value of type {found}")
        return BOOL

    def _name(self, node: Name, scope: dict[str, Type]) -> Type:
        if node.name not in scope:
            self._refuse(node, f"there is no variable {node.name}", f"variables are {', '.join(VARIABLES)}")
        return scope[node.name]

    def _field(self, node: Field | Has, scope: dict[str, Type]) -> Type:
        base = self.type_of(node.base, scope)
        if base not in UNKNOWN and base.name != "map":
            self._refuse(node, f"a value of type {base} has no fields")
        if isinstance(node, Has):
            return BOOL
        return base.of or DYN

    def _index(self, node: Index, scope: dict[str, Type]) -> Type:
        base, key = self.type_of(node.base, scope), self.type_of(node.key, scope)
        if base in UNKNOWN:
            return DYN
        wanted = {"list": INT, "map": STRING}.get(base.name)
        if wanted is None:
            self._refuse(node, f"a value of type {base} has no elements")
        if not _fits(key, wanted):
            self._refuse(node, f"a {base.name} is indexed by a value of type {wanted}, not {key}")
        return base.of or DYN

    def _call(self, node: Call, scope: dict[str, Type]) -> Type:
        types = [self.type_of(argument, scope) for argument in node.arguments]
        if node.function == "size":
            wanted: tuple[str, ...] = ("string", "list", "map")
        elif node.function == "timestamp":
            wanted = ("string", "int", "timestamp")
        else:
            wanted = ("string",)
        for argument, found in zip(node.arguments, types, strict=True):
            if found not in UNKNOWN and found.name not in wanted:
                self._refuse(argument, f"{node.function}() does not take a value of type {found}")
        return {"size": INT, "timestamp": TIMESTAMP}.get(node.function, BOOL)

    def _negated(self, node: Negate, scope: dict[str, Type]) -> Type:
        found = self.type_of(node.value, scope)
        if found not in (INT, DOUBLE, *UNKNOWN):
            self._refuse(node, f"- wants a number, not a value of type {found}")
        return found

    def _binary(self, node: Binary, scope: dict[str, Type]) -> Type:
        left, right = self.type_of(node.left, scope), self.type_of(node.right, scope)
        operator = node.operator
        if operator == "in":
            fits = right in UNKNOWN or (
                _fits(left, right.of or DYN) if right.name == "list" else right.name == "map" and _fits(left, STRING)
            )
        elif operator in {"==", "!="}:
            fits = _fits(left, right)
        elif operator in OPERANDS:
            fits = _fits(left, right) and all(
                side in UNKNOWN or side.name in OPERANDS[operator] for side in (left, right)
            )
        else:
            fits = _fits(left, right) and all(side in (*UNKNOWN, *ORDERED) for side in (left, right))
        if not fits:
            hint = "write 1.0 for 1 where a double is meant" if {left, right} == {INT, DOUBLE} else None
            self._refuse(node, f"{operator} cannot be applied to values of types {left} and {right}", hint)
        if operator not in OPERANDS:
            return BOOL
        if left in UNKNOWN or right in UNKNOWN:
            return right if left in UNKNOWN else left
        return _joined(left, right)

    def _choice(self, node: Choose, scope: dict[str, Type]) -> Type:
        self._bool(node.condition, scope, "?")
        yes, no = self.type_of(node.yes, scope), self.type_of(node.no, scope)
        if not _fits(yes, no):
            self._refuse(node, f"the two choices have types {yes} and {no}")
        return _joined(yes, no)

    def _list(self, node: ListOf, scope: dict[str, Type]) -> Type:
        of = ANY
        for item in node.items:
            of = _joined(of, self.type_of(item, scope))
        return Type("list", of)

    def _map(self, node: MapOf, scope: dict[str, Type]) -> Type:
        of = ANY
        for key, value in node.pairs:
            found = self.type_of(key, scope)
            if found not in (STRING, *UNKNOWN):
                self._refuse(key, f"the key of a map is a string, not a value of type {found}")
            of = _joined(of, self.type_of(value, scope))
        return Type("map", of)

    def _loop(self, node: Loop, scope: dict[str, Type]) -> Type:
        items = self.type_of(node.items, scope)
        if items not in UNKNOWN and items.of is None:
            self._refuse(node, f"a value of type {items} has no elements")
        element = items if items in UNKNOWN else STRING if items.name == "map" else items.of or DYN
        return self._bool(node.body, scope | {node.name: element}, "all()" if node.every else "exists()")


def _literal(node: Literal) -> Type:
    value = node.value
    if value is None:
        return NULL
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return INT
    return DOUBLE if isinstance(value, float) else STRING
