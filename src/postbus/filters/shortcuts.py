"""The ``metadata`` and ``payload`` parts of a filter: a value that is expected, compared with the one that is there.

* A dict is expected: a dict is there and every expected key matches in it; other keys do not matter. A key with dots is
  a path through dicts. What is missing matches nothing, not even null.
* A list is expected: a list is there and every expected element matches some element of it; or something else is there
  and some expected element matches it.
* Anything else is expected: it is there, or a list that holds it. Types count: ``1``, ``true`` and ``"1"`` are three
  values, ``1`` and ``1.0`` are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec

from postbus.filters.view import View

__all__ = ["Check", "Scalar", "Term", "check_of", "keys_of", "scalar_key", "terms_of"]

Check: TypeAlias = Callable[[View, Any], bool]
Scalar: TypeAlias = str | int | float | bool | None
MISSING = object()


class Term(msgspec.Struct, frozen=True):
    """One of the values is at ``path`` (variable and fields), in a list there, or a key of a dict there."""

    path: tuple[str, ...]
    values: tuple[Scalar, ...]


def scalar_key(value: Any) -> tuple[bool, Any]:
    """Return what stands for a scalar in sets and dicts, where ``True`` and ``1`` would be the same."""
    return (value.__class__ is bool, value)


def _is_scalar(value: Any) -> bool:
    return value.__class__ is not dict and value.__class__ is not list


def keys_of(view: View, actual: list[Any]) -> set[tuple[bool, Any]]:
    """Return the keys of all scalars that an expected scalar finds in a list: its own and those of lists in it."""
    view.spend(len(actual))
    found = set()
    for element in actual:
        if element.__class__ is list:
            view.spend(len(element))
            found.update([scalar_key(inner) for inner in element if _is_scalar(inner)])
        elif element.__class__ is not dict:
            found.add(scalar_key(element))
    return found


def check_of(expected: Any) -> Check:
    """Return the function that says whether a value is what is expected."""
    if expected.__class__ is dict:
        return _subset([(key.split("."), check_of(value)) for key, value in expected.items()])
    if expected.__class__ is not list:
        return _scalar(expected)
    if all(_is_scalar(element) for element in expected):
        return _scalars(frozenset(map(scalar_key, expected)))
    return _elements([check_of(element) for element in expected])


def follow(value: Any, path: Iterable[str]) -> Any:
    """Return what a path through dicts leads to, or MISSING."""
    for key in path:
        if value.__class__ is not dict:
            return MISSING
        value = value.get(key, MISSING)
    return value


def _subset(members: list[tuple[list[str], Check]]) -> Check:
    def check(view: View, actual: Any) -> bool:
        if actual.__class__ is not dict:
            return False
        for path, wanted in members:
            value = follow(actual, path)
            if value is MISSING or not wanted(view, value):
                return False
        return True

    return check


def _scalar(expected: Scalar) -> Check:
    is_bool = expected.__class__ is bool

    def check(view: View, actual: Any) -> bool:
        if actual.__class__ is list:
            view.spend(len(actual))
            return any(element == expected and (element.__class__ is bool) is is_bool for element in actual)
        return bool(actual == expected) and (actual.__class__ is bool) is is_bool

    return check


def _scalars(expected: frozenset[tuple[bool, Any]]) -> Check:
    def check(view: View, actual: Any) -> bool:
        if actual.__class__ is list:
            return expected.issubset(keys_of(view, actual))
        return actual.__class__ is not dict and scalar_key(actual) in expected

    return check


def _elements(checks: list[Check]) -> Check:
    def check(view: View, actual: Any) -> bool:
        if actual.__class__ is not list:
            return any(wanted(view, actual) for wanted in checks)
        for wanted in checks:
            view.spend(len(actual))
            if not any(wanted(view, element) for element in actual):
                return False
        return True

    return check


def terms_of(expected: dict[str, Any], path: tuple[str, ...]) -> list[Term]:
    """Return the terms that an index can look for."""
    found = []
    for key, value in expected.items():
        place = (*path, *key.split("."))
        if value.__class__ is dict:
            found += terms_of(value, place)
        elif value.__class__ is not list:
            found.append(Term(place, (value,)))
        elif value and all(_is_scalar(element) for element in value):
            found.append(Term(place, tuple(value)))
    return found
