"""The tree of an expression. ``&&`` and ``||`` chains are one node each; every node knows the text it came from."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "Binary",
    "Call",
    "Choose",
    "Field",
    "Has",
    "Index",
    "ListOf",
    "Literal",
    "Logic",
    "Loop",
    "MapOf",
    "Name",
    "Negate",
    "Node",
    "Not",
]


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    """``at`` is where errors point to, ``start`` and ``end`` the span of text, ``size`` and ``depth`` count nodes."""

    at: int
    start: int
    end: int
    size: int = 1
    depth: int = 1


class Literal(_Node, frozen=True):
    """A number, a string, a boolean or null."""

    value: str | int | float | bool | None


class Name(_Node, frozen=True):
    """A variable."""

    name: str


class Field(_Node, frozen=True):
    """``base.key``."""

    base: Node
    key: str


class Has(_Node, frozen=True):
    """``has(base.key)``."""

    base: Node
    key: str


class Index(_Node, frozen=True):
    """``base[key]``."""

    base: Node
    key: Node


class Call(_Node, frozen=True):
    """A function of its arguments; what a method is called on is the first."""

    function: str
    arguments: tuple[Node, ...]


class Logic(_Node, frozen=True):
    """A chain of ``&&`` (``both``) or of ``||``."""

    both: bool
    terms: tuple[Node, ...]


class Not(_Node, frozen=True):
    """``!value``."""

    value: Node


class Negate(_Node, frozen=True):
    """``-value``."""

    value: Node


class Binary(_Node, frozen=True):
    """A comparison, ``in``, or arithmetic."""

    operator: str
    left: Node
    right: Node


class Choose(_Node, frozen=True):
    """``condition ? yes : no``."""

    condition: Node
    yes: Node
    no: Node


class ListOf(_Node, frozen=True):
    """``[a, b]``."""

    items: tuple[Node, ...]


class MapOf(_Node, frozen=True):
    """``{"a": b}``."""

    pairs: tuple[tuple[Node, Node], ...]


class Loop(_Node, frozen=True):
    """``items.exists(name, body)``, or ``items.all(name, body)`` (``every``)."""

    every: bool
    items: Node
    name: str
    body: Node


Node: TypeAlias = (
    Literal | Name | Field | Has | Index | Call | Logic | Not | Negate | Binary | Choose | ListOf | MapOf | Loop
)
