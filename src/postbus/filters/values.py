"""What the operators of an expression do with values: CEL's rules over decoded JSON.

A bool is never a number, an int and a double are equal when they are the same number, arithmetic stays within its type
and within 64 bits. Integers beyond 64 bits, which JSON may hold, compare exactly and cannot be calculated with. Every
function raises ``Fault`` where CEL has an error. Work that grows with the data is charged to the view.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any, Final

from postbus.envelope import parse_instant
from postbus.filters.view import Fault, View
from postbus.model import Invalid, instant

__all__ = ["add", "arithmetic", "contained", "equal", "indexed", "negated", "ordered", "seconds_or_text", "size"]

VALUE_SIZE_MAX: Final = 1 << 20
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
SHIFT = 6  # a step is worth this many bits of characters
CLASSES: dict[type, str] = {
    bool: "bool",
    int: "int",
    float: "double",
    str: "string",
    list: "list",
    dict: "map",
    type(None): "null",
    datetime: "timestamp",
}


def kind(value: Any) -> str:
    """Return the name of a value's type."""
    return CLASSES.get(type(value), type(value).__name__)


def equal(view: View, one: Any, other: Any) -> bool:
    """Say whether two values are the same value; values of different types are not, numbers excepted."""
    first, second = one.__class__, other.__class__
    if first is second:
        if first is list:
            view.spend(len(one))
            return len(one) == len(other) and all(equal(view, a, b) for a, b in zip(one, other, strict=True))
        if first is dict:
            view.spend(len(one))
            return len(one) == len(other) and all(
                key in other and equal(view, value, other[key]) for key, value in one.items()
            )
        if first is str:
            view.spend(len(one) >> SHIFT)
        return bool(one == other)
    if (first is int and second is float) or (first is float and second is int):
        return bool(one == other)
    return False


def ordered(view: View, operator: str, one: Any, other: Any) -> bool:
    """Compare two numbers, strings, bools or timestamps."""
    first, second = one.__class__, other.__class__
    numbers = (first is int or first is float) and (second is int or second is float)
    if not numbers and (first is not second or first not in {str, bool, datetime}):
        raise Fault(f"{operator} cannot compare values of types {kind(one)} and {kind(other)}")
    if first is str:
        view.spend(len(one) >> SHIFT)
    if operator == "<":
        return bool(one < other)
    if operator == "<=":
        return bool(one <= other)
    return bool(one > other) if operator == ">" else bool(one >= other)


def contained(view: View, item: Any, container: Any) -> bool:
    """Say whether a list holds a value, or a map a key."""
    if container.__class__ is list:
        view.spend(len(container))
        if item.__class__ is str:
            return item in container
        return any(equal(view, item, other) for other in container)
    if container.__class__ is dict:
        if item.__class__ is str:
            return item in container
        if item.__class__ in {int, float, bool}:
            return False
    raise Fault(f"a value of type {kind(item)} cannot be looked for in one of type {kind(container)}")


def indexed(base: Any, key: Any) -> Any:
    """Return an element of a list or the value under a key of a map."""
    if base.__class__ is dict:
        if key.__class__ is str and key in base:
            return base[key]
        raise Fault(f"there is no field {key!r}")
    if base.__class__ is not list:
        raise Fault(f"a value of type {kind(base)} has no elements")
    if key.__class__ is float and key.is_integer():
        key = int(key)
    if key.__class__ is not int:
        raise Fault(f"a list is indexed by an int, not by a value of type {kind(key)}")
    if not 0 <= key < len(base):
        raise Fault(f"there is no element {key} in a list of {len(base)}")
    return base[key]


def size(value: Any) -> int:
    """Return the number of characters, elements or keys."""
    if value.__class__ in {str, list, dict}:
        return len(value)
    raise Fault(f"a value of type {kind(value)} has no size")


def seconds_or_text(value: Any) -> datetime:
    """Return a timestamp from RFC 3339 text or from seconds since 1970."""
    if value.__class__ is datetime:
        return value
    try:
        if value.__class__ is str:
            return instant(parse_instant(value))
        if value.__class__ is int:
            return instant(value * 1_000_000)
    except (Invalid, ValueError, OverflowError, OSError) as error:
        raise Fault(f"this is no timestamp: {error}") from None
    raise Fault(f"a value of type {kind(value)} is no timestamp")


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _int64(value: int) -> int:
    if not INT_MIN <= value <= INT_MAX:
        raise Fault("an integer has more than 64 bits")
    return value


def negated(value: Any) -> Any:
    """Return the number with the other sign."""
    if value.__class__ is int:
        return -_int64(value) if value != INT_MIN else _int64(-value)
    if value.__class__ is float:
        return -value
    raise Fault(f"- wants a number, not a value of type {kind(value)}")


def add(view: View, one: Any, other: Any) -> Any:
    """Add numbers, or join strings or lists."""
    first = one.__class__
    if first is other.__class__ and first in {str, list}:
        length = len(one) + len(other)
        if length > VALUE_SIZE_MAX:
            raise Fault(f"a {kind(one)} of more than {VALUE_SIZE_MAX} is too large")
        view.spend(length >> (SHIFT if first is str else 3))
        return one + other
    return arithmetic("+", one, other)


def arithmetic(operator: str, one: Any, other: Any) -> Any:
    """Calculate with two ints or two doubles."""
    first = one.__class__
    if first is other.__class__:
        if first is int:
            return _int64(_integers(operator, _int64(one), _int64(other)))
        if first is float and operator != "%":
            return _doubles(operator, one, other)
    raise Fault(f"{operator} cannot be applied to values of types {kind(one)} and {kind(other)}")


def _integers(operator: str, one: int, other: int) -> int:
    if operator == "+":
        return one + other
    if operator == "-":
        return one - other
    if operator == "*":
        return one * other
    if other == 0:
        raise Fault("division by zero")
    quotient = abs(one) // abs(other)
    if (one < 0) != (other < 0):
        quotient = -quotient
    if operator == "/" or quotient > INT_MAX:  # as in CEL, the remainder fails where the division does
        return quotient
    return one - other * quotient


def _doubles(operator: str, one: float, other: float) -> float:
    if operator == "+":
        return one + other
    if operator == "-":
        return one - other
    if operator == "*":
        return one * other
    if other != 0:
        return one / other
    if one == 0 or math.isnan(one):
        return math.nan
    return math.copysign(math.inf, one) * math.copysign(1.0, other)
