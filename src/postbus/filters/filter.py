"""A content filter, ``{"metadata": {…}, "payload": {…}, "expr": "…"}``: all parts must hold, ``{}`` matches all."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from postbus import strict_json
from postbus.filters.checker import VARIABLES, check
from postbus.filters.compiler import FAULTS, Evaluate, compiled
from postbus.filters.parser import parse
from postbus.filters.shortcuts import MISSING, Check, Term, check_of, follow, terms_of
from postbus.filters.tree import Binary, Field, Index, ListOf, Literal, Logic, Name, Node
from postbus.filters.values import kind
from postbus.filters.view import STEPS_MAX, Fault, View
from postbus.model import Event, Invalid, InvalidFilter, LimitExceeded

__all__ = ["BYTES_MAX", "Explanation", "Filter", "Reason", "compile_filter"]

BYTES_MAX: Final = 64 * 1024
DEPTH_MAX: Final = 32
PARTS = ("metadata", "payload", "expr")
SHOWN_CHARS = 80


class Reason(msgspec.Struct, frozen=True):
    """One thing that a filter asks of an event: which part asks it, what, whether it holds, and what was found."""

    part: str
    wanted: str
    holds: bool
    found: str


class Explanation(msgspec.Struct, frozen=True):
    """Why an event matches or not. ``reasons`` is empty for the filter that matches all."""

    matches: bool
    reasons: tuple[Reason, ...]


def compile_filter(spec: dict[str, Any]) -> Filter:
    """Return the filter of a specification; raises ``InvalidFilter`` and says where in ``expr``."""
    if not isinstance(spec, dict):
        raise InvalidFilter(f"a filter must be a JSON object, not {type(spec).__name__}")
    for part in spec:
        if part not in PARTS:
            raise InvalidFilter(f"a filter has no part {part!r}", hint=f"the parts are {', '.join(PARTS)}")
    try:
        raw = strict_json.encode(spec, max_bytes=BYTES_MAX, max_depth=DEPTH_MAX)
    except LimitExceeded as error:
        raise InvalidFilter(f"the filter is too large: {error.message}") from None
    except Invalid as error:
        raise InvalidFilter(f"the filter is not JSON: {error.message}", hint=error.hint) from None
    return Filter(msgspec.json.decode(raw))


class Filter:
    """A compiled filter. ``errors`` counts the events for which the expression had no value; they did not match."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.errors = 0
        self._checks: list[tuple[str, Check]] = []
        self._needs: list[tuple[Term, ...]] = []
        for part in ("metadata", "payload"):
            if part in spec:
                if not isinstance(spec[part], dict):
                    raise InvalidFilter(f"the part {part} must be a JSON object, not {kind(spec[part])}")
                self._checks.append((part, check_of(spec[part])))
                self._needs += [(term,) for term in terms_of(spec[part], (part,))]
        self._text: str = spec.get("expr", "")
        self._tree: Node | None = None
        self._evaluate: Evaluate | None = None
        if "expr" in spec:
            if not isinstance(self._text, str):
                raise InvalidFilter(f"the part expr must be a string, not {kind(self._text)}")
            self._tree = parse(self._text)
            check(self._text, self._tree)
            self._evaluate = compiled(self._text, self._tree)
            self._needs += _needs(self._tree)

    @property
    def needs(self) -> tuple[tuple[Term, ...], ...]:
        """What no event can match without: of each need one of its terms; an index looks for these."""
        return tuple(self._needs)

    def matches(self, event: Event | View) -> bool:
        """Say whether the event matches; never raises. Give a ``View`` to share what is decoded with other filters."""
        outcome = self.outcome(event if event.__class__ is View else View(event))  # type: ignore[arg-type]
        if outcome is None:
            self.errors += 1
        return outcome is True

    def outcome(self, view: View) -> bool | None:
        """Say whether it matches, None when the expression has no value for it; counts nothing."""
        view.steps = STEPS_MAX
        try:
            for part, holds in self._checks:
                if not holds(view, view.payload if part == "payload" else view.metadata):
                    return False
            if self._evaluate is None:
                return True
            value = self._evaluate(view)
        except FAULTS:
            return None
        return value if value is True or value is False else None

    def explain(self, event: Event) -> Explanation:
        """Say why the event matches or not, term by term."""
        view = View(event)
        reasons: list[Reason] = []
        for part, _ in self._checks:
            actual = view.payload if part == "payload" else view.metadata
            reasons += _part_reasons(part, self.spec[part], actual, view)
        if self._tree is not None:
            both = isinstance(self._tree, Logic) and self._tree.both
            terms = self._tree.terms if isinstance(self._tree, Logic) and both else (self._tree,)
            reasons += [self._reason(term, view) for term in terms]
        return Explanation(self.outcome(View(event)) is True, tuple(reasons))

    def _reason(self, term: Node, view: View) -> Reason:
        view.steps = STEPS_MAX
        wanted = " ".join(self._text[term.start : term.end].split())
        try:
            value = compiled(self._text, term)(view)
        except KeyError as error:
            return Reason("expr", wanted, False, f"error: there is no field {error.args[0]!r}")
        except TypeError:
            return Reason("expr", wanted, False, "error: a field is asked of a value that has none")
        except Fault as error:
            return Reason("expr", wanted, False, f"error: {error}")
        found = str(value).lower() if isinstance(value, bool) else f"error: a value of type {kind(value)} is no bool"
        return Reason("expr", wanted, value is True, found)


def _part_reasons(part: str, expected: dict[str, Any], actual: Any, view: View, path: str = "") -> list[Reason]:
    """Give one reason per expected leaf."""
    if actual.__class__ is not dict:
        return [Reason(part, f"{path or part} is an object", False, _shown(actual))]
    reasons: list[Reason] = []
    for key, value in expected.items():
        place = f"{path}.{key}" if path else key
        found = follow(actual, key.split("."))
        if value.__class__ is dict and value and found is not MISSING:
            reasons += _part_reasons(part, value, found, view, place)
            continue
        view.steps = STEPS_MAX
        shown = "missing" if found is MISSING else _shown(found)
        try:
            holds = found is not MISSING and check_of(value)(view, found)
        except Fault as error:
            holds, shown = False, f"error: {error}"
        reasons.append(Reason(part, f"{place}: {_shown(value)}", holds, shown))
    return reasons


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


# --- what an index can look for ---------------------------------------------------------------------------------------


def _needs(tree: Node) -> list[tuple[Term, ...]]:
    """Return what must hold for the expression to be true: of each need one term at least."""
    nodes = tree.terms if isinstance(tree, Logic) and tree.both else (tree,)
    return [need for node in nodes if (need := _need(node))]


def _need(node: Node) -> tuple[Term, ...]:
    """Return terms of which one holds when the node is true; none when nothing is known."""
    if not isinstance(node, Logic):
        term = _term(node)
        return () if term is None else (term,)
    needs = [_need(each) for each in node.terms]
    if node.both:
        return min((need for need in needs if need), key=len, default=())
    return tuple(term for need in needs for term in need) if all(needs) else ()


def _term(node: Node) -> Term | None:
    if not isinstance(node, Binary):
        return None
    if node.operator == "in":
        if isinstance(node.right, ListOf):
            values = tuple(item.value for item in node.right.items if isinstance(item, Literal))
            path = _path(node.left)
            return Term(path, values) if path and len(values) == len(node.right.items) > 0 else None
        path = _path(node.right)
        return Term(path, (node.left.value,)) if path and isinstance(node.left, Literal) else None
    if node.operator == "==":
        for side, other in ((node.left, node.right), (node.right, node.left)):
            path = _path(side)
            if path and isinstance(other, Literal):
                return Term(path, (other.value,))
    return None


def _path(node: Node) -> tuple[str, ...]:
    """Return a variable and its fields as a path; empty for anything else."""
    keys: list[str] = []
    while True:
        if isinstance(node, Field):
            keys.append(node.key)
            node = node.base
        elif isinstance(node, Index) and isinstance(node.key, Literal) and isinstance(node.key.value, str):
            keys.append(node.key.value)
            node = node.base
        elif isinstance(node, Name) and node.name in VARIABLES and node.name != "occurred_at":
            return (node.name, *reversed(keys))
        else:
            return ()
