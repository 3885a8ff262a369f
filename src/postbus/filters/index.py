"""Many filters over one event: only those are evaluated that the event's topic and values do not rule out.

Registrations are grouped by pattern, patterns found by the trie. Within a pattern each filter is filed under one value
it cannot match without (``payload.type`` is ``"push"``), chosen so that few others are filed there; the event's own
values then lead to the candidates. Filters with the same text are evaluated once, however many registered them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import msgspec

from postbus.filters.filter import Filter
from postbus.filters.shortcuts import MISSING, follow, keys_of, scalar_key
from postbus.filters.view import STEPS_MAX, Fault, View
from postbus.model import Event
from postbus.topics import PatternTrie, check_pattern

__all__ = ["FilterIndex"]

T = TypeVar("T", bound=Hashable)
Path = tuple[str, ...]
ALTERNATIVES_MAX = 64
TOPIC: Path = ("topic",)


class _Group(Generic[T]):
    """Registrations under one pattern whose filters say the same."""

    __slots__ = ("filter", "members", "place")

    def __init__(self, first: Filter) -> None:
        self.filter = first
        self.members: dict[T, tuple[int, Filter]] = {}
        self.place: tuple[Path, tuple[Any, ...]] | None = None


class _Bucket(Generic[T]):
    """The groups of one pattern: by the value they are filed under, or in ``rest`` when there is none."""

    __slots__ = ("files", "groups", "rest")

    def __init__(self) -> None:
        self.groups: dict[bytes, _Group[T]] = {}
        self.files: dict[Path, dict[Any, dict[int, _Group[T]]]] = {}
        self.rest: dict[int, _Group[T]] = {}

    def file(self, group: _Group[T]) -> None:
        """File a group under the term that the fewest others are filed under."""
        best: tuple[tuple[int, bool], Path, tuple[Any, ...]] | None = None
        for term in group.filter.terms:
            if len(term.values) <= ALTERNATIVES_MAX:
                keys = tuple(dict.fromkeys(map(scalar_key, term.values)))
                files = self.files.get(term.path)
                crowd = 0 if files is None else max(len(files.get(key, ())) for key in keys)
                rank = (crowd, files is None)  # a path less is a look-up less for every event
                if best is None or rank < best[0]:
                    best = (rank, term.path, keys)
        if best is None:
            self.rest[id(group)] = group
            return
        _, path, keys = best
        group.place = (path, keys)
        files = self.files.setdefault(path, {})
        for key in keys:
            files.setdefault(key, {})[id(group)] = group

    def unfile(self, group: _Group[T]) -> None:
        """Take a group out."""
        if group.place is None:
            del self.rest[id(group)]
            return
        path, keys = group.place
        files = self.files[path]
        for key in keys:
            del files[key][id(group)]
            if not files[key]:
                del files[key]
        if not files:
            del self.files[path]

    def candidates(self, view: View) -> list[_Group[T]]:
        """Return the groups that the event's values do not rule out, each once."""
        found = list(self.rest.values())
        for path, files in self.files.items():
            actual = follow(getattr(view, path[0]), path[1:])
            if actual.__class__ is list:
                found += _filed_under_any(view, files, actual)
            elif actual is not MISSING and actual.__class__ is not dict:
                groups = files.get((actual.__class__ is bool, actual))
                if groups is not None:
                    found += groups.values()
        return found


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
        found: list[tuple[int, T]] = []
        patterns = self._trie.match(view.topic)
        for pattern in patterns:
            for group in self._buckets[pattern].candidates(view):
                outcome = group.filter.outcome(view)
                if outcome:
                    found += [(sequence, name) for name, (sequence, _) in group.members.items()]
                elif outcome is None:
                    for _, each in group.members.values():
                        each.errors += 1
        found.sort(key=lambda pair: pair[0])
        names = [name for _, name in found]
        return names if len(patterns) < 2 else list(dict.fromkeys(names))  # noqa: PLR2004 - of one pattern no id is twice
