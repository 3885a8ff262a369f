"""Many filters over one event: only those are evaluated that the event's topic and values do not rule out.

Registrations are grouped by pattern, patterns found by the trie. Within a pattern each filter is filed under one value
it cannot match without (``payload.type`` is ``"push"``), or under each of several of which it needs one, chosen so that
few others are filed there; the event's own values then lead to the candidates. Filters with the same text are evaluated
once, however many registered them.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import msgspec

from postbus.filters.filter import Filter
from postbus.filters.shortcuts import MISSING, Term, keys_of, scalar_key
from postbus.filters.view import STEPS_MAX, Fault, View
from postbus.model import Event
from postbus.topics import PatternTrie, check_pattern

__all__ = ["FilterIndex"]

T = TypeVar("T", bound=Hashable)
Path = tuple[str, ...]
ALTERNATIVES_MAX = 64
PLANS_MAX = 1_000
_SEQUENCE = operator.itemgetter(0)


class _Group(Generic[T]):
    """Registrations under one pattern whose filters say the same."""

    __slots__ = ("filter", "members", "places")

    def __init__(self, first: Filter) -> None:
        self.filter = first
        self.members: dict[T, tuple[int, Filter]] = {}
        self.places: list[tuple[Path, tuple[Any, ...]]] = []


class _Bucket(Generic[T]):
    """The groups of one pattern: by the value they are filed under, or in ``rest`` when there is none."""

    __slots__ = ("files", "groups", "rest", "spread")

    def __init__(self) -> None:
        self.groups: dict[bytes, _Group[T]] = {}
        self.files: dict[Path, dict[Any, dict[int, _Group[T]]]] = {}
        self.rest: dict[int, _Group[T]] = {}
        self.spread = 0  # groups that are filed under several paths, and may be found under each

    def file(self, group: _Group[T]) -> None:
        """File a group under the need whose terms the fewest others are filed under."""
        best: tuple[int, int] | None = None
        for need in group.filter.needs:
            if sum(len(term.values) for term in need) <= ALTERNATIVES_MAX:
                places = _places(need)
                crowd = max(len(self.files.get(path, {}).get(key, ())) for path, keys in places for key in keys)
                rank = (crowd, sum(path not in self.files for path, _ in places))  # fewer paths are fewer look-ups
                if best is None or rank < best:
                    best, group.places = rank, places
        if best is None:
            self.rest[id(group)] = group
        self.spread += len(group.places) > 1
        for path, keys in group.places:
            files = self.files.setdefault(path, {})
            for key in keys:
                files.setdefault(key, {})[id(group)] = group

    def unfile(self, group: _Group[T]) -> None:
        """Take a group out."""
        self.rest.pop(id(group), None)
        self.spread -= len(group.places) > 1
        for path, keys in group.places:
            files = self.files[path]
            for key in keys:
                del files[key][id(group)]
                if not files[key]:
                    del files[key]
            if not files:
                del self.files[path]


class _Plan(Generic[T]):
    """The buckets of the patterns that one topic matches, joined so that each path of an event is followed once."""

    __slots__ = ("lookups", "rests", "spread")

    def __init__(self, buckets: list[_Bucket[T]]) -> None:
        self.rests = [bucket.rest for bucket in buckets if bucket.rest]
        self.spread = any(bucket.spread for bucket in buckets)
        files: dict[Path, list[dict[Any, dict[int, _Group[T]]]]] = {}
        for bucket in buckets:
            for path, filed in bucket.files.items():
                files.setdefault(path, []).append(filed)
        self.lookups = [(path[0], path[1:], filed) for path, filed in files.items()]

    def candidates(self, view: View) -> list[_Group[T]]:  # noqa: C901 - written out: it runs for every event
        """Return the groups that the event's values do not rule out, each once."""
        found: list[_Group[T]] = []
        for rest in self.rests:
            found += rest.values()
        for variable, fields, filed in self.lookups:
            actual = getattr(view, variable)
            for field in fields:
                if actual.__class__ is not dict:
                    actual = MISSING
                    break
                actual = actual.get(field, MISSING)
            if actual.__class__ is list:
                for files in filed:
                    found += _filed_under_any(view, files, actual)
            elif actual.__class__ is dict:
                for files in filed:
                    found += _filed_under_keys(files, actual)
            elif actual is not MISSING:
                key = (actual.__class__ is bool, actual)
                for files in filed:
                    if key in files:
                        found += files[key].values()
        return list(dict.fromkeys(found)) if self.spread else found


def _places(need: tuple[Term, ...]) -> list[tuple[Path, tuple[Any, ...]]]:
    """Return each path of a need once, with the keys to be filed under there."""
    found: dict[Path, dict[Any, None]] = {}
    for term in need:
        found.setdefault(term.path, {}).update(dict.fromkeys(map(scalar_key, term.values)))
    return [(path, tuple(keys)) for path, keys in found.items()]


def _filed_under_keys(files: dict[Any, dict[int, _Group[T]]], actual: dict[str, Any]) -> list[_Group[T]]:
    """Return the groups filed under any key of a dict: ``"a" in payload`` looks for those."""
    if len(actual) > len(files):
        keys = [key for key in files if key[1].__class__ is str and key[1] in actual]
    else:
        keys = [key for name in actual if (key := (False, name)) in files]
    found: dict[int, _Group[T]] = {}
    for key in keys:
        found.update(files[key])
    return list(found.values())


def _filed_under_any(view: View, files: dict[Any, dict[int, _Group[T]]], actual: list[Any]) -> list[_Group[T]]:
    view.steps = STEPS_MAX
    try:
        keys = keys_of(view, actual)
    except Fault:  # more values than a filter may look through: leave it to each filter to say so
        return list({name: group for groups in files.values() for name, group in groups.items()}.values())
    found: dict[int, _Group[T]] = {}
    for key in keys & files.keys() if len(keys) > len(files) else [key for key in keys if key in files]:
        found.update(files[key])
    return list(found.values())


class FilterIndex(Generic[T]):
    """Registrations of ids under a pattern with a filter; ``match`` finds the ids for an event.

    An id may be registered under several patterns, once under each. For one thread at a time.
    """

    def __init__(self) -> None:
        self._trie: PatternTrie[str] = PatternTrie()
        self._buckets: dict[str, _Bucket[T]] = {}
        self._groups: dict[T, dict[str, bytes]] = {}
        self._plans: dict[tuple[str, ...], _Plan[T]] = {}
        self._sequence = 0

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._groups)

    def add(self, name: T, pattern: str, filter_: Filter) -> None:
        """Register an id, in place of what it had under this pattern. Raises ``Invalid`` for a bad pattern."""
        check_pattern(pattern)
        self.remove(name, pattern)
        bucket = self._buckets.get(pattern)
        if bucket is None:
            bucket = self._buckets[pattern] = _Bucket()
            self._trie.add(pattern, pattern)
        text = msgspec.json.encode(filter_.spec, order="deterministic")
        group = bucket.groups.get(text)
        self._plans.clear()
        if group is None:
            group = bucket.groups[text] = _Group(filter_)
            bucket.file(group)
        self._sequence += 1
        group.members[name] = (self._sequence, filter_)
        self._groups.setdefault(name, {})[pattern] = text

    def remove(self, name: T, pattern: str | None = None) -> bool:
        """Forget an id, or its registration under one pattern; False when there was none."""
        known = self._groups.get(name, {})
        patterns = list(known) if pattern is None else [pattern] if pattern in known else []
        if patterns:
            self._plans.clear()
        for each in patterns:
            text = known.pop(each)
            bucket = self._buckets[each]
            group = bucket.groups[text]
            del group.members[name]
            if not group.members:
                del bucket.groups[text]
                bucket.unfile(group)
            if not bucket.groups:
                del self._buckets[each]
                self._trie.remove(each, each)
        if not known:
            self._groups.pop(name, None)
        return bool(patterns)

    def match(self, event: Event | View) -> list[T]:
        """Return the ids whose pattern and filter match, each once, in the order they were registered.

        A filter that is ruled out without being evaluated counts no error for the event.
        """
        view = event if isinstance(event, View) else View(event)
        patterns = self._trie.match(view.topic)
        found: list[tuple[int, T]] = []
        for group in (self._plans.get(patterns) or self._plan(patterns)).candidates(view):
            outcome = group.filter.outcome(view)
            if outcome:
                found += [(sequence, name) for name, (sequence, _) in group.members.items()]
            elif outcome is None:
                for _, each in group.members.values():
                    each.errors += 1
        if len(found) > 1:
            found.sort(key=_SEQUENCE)
        names = [name for _, name in found]
        return names if len(patterns) < 2 else list(dict.fromkeys(names))  # noqa: PLR2004 - of one pattern no id is twice

    def _plan(self, patterns: tuple[str, ...]) -> _Plan[T]:
        if len(self._plans) >= PLANS_MAX:
            self._plans.clear()
        plan = self._plans[patterns] = _Plan([self._buckets[pattern] for pattern in patterns])
        return plan
