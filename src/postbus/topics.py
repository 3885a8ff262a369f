"""Topic grammar, pattern matching and the pattern trie.

A topic is 1 to 16 tokens of ``[A-Za-z0-9_-]{1,80}`` joined by dots, at most 512 characters, case-sensitive. A pattern
is a topic whose tokens may be ``*`` (exactly one token) and whose last token may be ``>`` (one or more tokens). Every
``check_*`` function returns the name as a plain string or refuses it with the sentence that fixes it. Names that were
accepted lately are remembered, so that checking one again costs a look-up; refusals are never remembered.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import lru_cache
from operator import itemgetter
from threading import Lock
from typing import Final, Generic, NoReturn, TypeVar

from postbus.model import Invalid, LimitExceeded

__all__ = [
    "ID_CHARS_MAX",
    "TOKENS_MAX",
    "TOKEN_CHARS_MAX",
    "TOPIC_CHARS_MAX",
    "PatternTrie",
    "check_id",
    "check_pattern",
    "check_stream_name",
    "check_topic",
    "matches",
]

TOKENS_MAX: Final = 16
TOKEN_CHARS_MAX: Final = 80
TOPIC_CHARS_MAX: Final = 512
ID_CHARS_MAX: Final = 120

_CHECKED_MAX = 16_384  # accepted names remembered per kind of name
_STREAM_TOKENS = 3
_ONE = "*"
_REST = ">"

_TOKEN = f"[A-Za-z0-9_-]{{1,{TOKEN_CHARS_MAX}}}"
_MORE = f"{{0,{TOKENS_MAX - 1}}}"
_TOKEN_RE = re.compile(_TOKEN, re.ASCII)
_TOPIC_RE = re.compile(rf"{_TOKEN}(?:\.{_TOKEN}){_MORE}", re.ASCII)
_PATTERN_RE = re.compile(rf"(?:(?:{_TOKEN}|\*)\.){_MORE}(?:{_TOKEN}|\*|>)", re.ASCII)
_STREAM_RE = re.compile(rf"{_TOKEN}\.{_TOKEN}\.{_TOKEN}", re.ASCII)
_ID_RE = re.compile(f"[A-Za-z0-9._-]{{1,{ID_CHARS_MAX}}}", re.ASCII)

_SHOWN_CHARS = 60


# --- names ------------------------------------------------------------------------------------------------------------


def check_topic(topic: str) -> str:
    """Return the topic, or refuse it: a wildcard, an empty token, another character or a size beyond the limits."""
    try:
        return _topic(topic)
    except TypeError:  # neither a string nor hashable
        _refuse_type("topic", topic)


def check_pattern(pattern: str) -> str:
    """Return the pattern, or refuse it by the rules of a topic with ``*`` as a token and ``>`` as the last one."""
    try:
        return _pattern(pattern)
    except TypeError:
        _refuse_type("pattern", pattern)


def check_stream_name(name: str) -> str:
    """Return the full name ``namespace.tenant.name`` of a stream, or refuse it."""
    try:
        return _stream_name(name)
    except TypeError:
        _refuse_type("stream name", name)


def check_id(value: str, what: str) -> str:
    """Return the id of a subscription, agent or source, or refuse it; ``what`` names it in the refusal."""
    try:
        return _id(value, what)
    except TypeError:
        _refuse_type(what, value)


@lru_cache(_CHECKED_MAX)
def _topic(topic: str) -> str:
    if not isinstance(topic, str):
        _refuse_type("topic", topic)
    if len(topic) > TOPIC_CHARS_MAX or not _TOPIC_RE.fullmatch(topic):
        _refuse_dotted("topic", topic)
    return str.__str__(topic)  # a plain string also when a StrEnum came in


@lru_cache(_CHECKED_MAX)
def _pattern(pattern: str) -> str:
    if not isinstance(pattern, str):
        _refuse_type("pattern", pattern)
    if len(pattern) > TOPIC_CHARS_MAX or not _PATTERN_RE.fullmatch(pattern):
        _refuse_dotted("pattern", pattern)
    return str.__str__(pattern)


@lru_cache(_CHECKED_MAX)
def _stream_name(name: str) -> str:
    if not isinstance(name, str):
        _refuse_type("stream name", name)
    if not _STREAM_RE.fullmatch(name):
        tokens = name.split(".", _STREAM_TOKENS)
        if len(tokens) != _STREAM_TOKENS:
            raise Invalid(
                f"stream name {_shown(name)} does not have exactly {_STREAM_TOKENS} tokens",
                hint="write namespace.tenant.name, for example local.default.journal",
            )
        for token in tokens:
            _check_token("stream name", name, token)
    return str.__str__(name)


@lru_cache(_CHECKED_MAX)
def _id(value: str, what: str) -> str:
    if not isinstance(value, str):
        _refuse_type(what, value)
    if not _ID_RE.fullmatch(value):
        if not value:
            raise Invalid(f"{what} is empty", hint=f"use 1 to {ID_CHARS_MAX} of A-Z a-z 0-9 . _ -")
        if len(value) > ID_CHARS_MAX:
            raise LimitExceeded(f"{what} {_shown(value)} has {len(value)} characters; the limit is {ID_CHARS_MAX}")
        raise Invalid(f"{what} {_shown(value)} may only hold the characters A-Z a-z 0-9 . _ -")
    return str.__str__(value)


# --- refusals ---------------------------------------------------------------------------------------------------------


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")


def _refuse_type(what: str, value: object) -> NoReturn:
    raise Invalid(f"{what} must be a string, not {type(value).__name__}") from None


def _check_token(what: str, name: str, token: str) -> None:
    if not token:
        raise Invalid(f"{what} {_shown(name)} has an empty token", hint="join the tokens by single dots")
    if len(token) > TOKEN_CHARS_MAX:
        raise LimitExceeded(f"{what} has a token of {len(token)} characters; the limit is {TOKEN_CHARS_MAX}")
    if not _TOKEN_RE.fullmatch(token):
        raise Invalid(
            f"{what} {_shown(name)} has the token {_shown(token)}; tokens may only hold the characters A-Z a-z 0-9 _ -"
        )


def _refuse_dotted(what: str, name: str) -> NoReturn:
    """Say which rule a topic or a pattern breaks; called only when it breaks one."""
    if not name:
        raise Invalid(f"{what} is empty", hint=f"write 1 to {TOKENS_MAX} tokens joined by dots")
    if len(name) > TOPIC_CHARS_MAX:
        raise LimitExceeded(f"{what} has {len(name)} characters; the limit is {TOPIC_CHARS_MAX}")
    tokens = name.split(".")
    if len(tokens) > TOKENS_MAX:
        raise LimitExceeded(f"{what} has {len(tokens)} tokens; the limit is {TOKENS_MAX}")
    for position, token in enumerate(tokens, start=1):
        if _ONE not in token and _REST not in token:
            _check_token(what, name, token)
        elif what == "topic":
            raise Invalid(f"topic {_shown(name)} has a wildcard", hint="wildcards are for subscribing, not publishing")
        elif token == _REST and position < len(tokens):
            raise Invalid(f"pattern {_shown(name)} has > before its end", hint="> may only be the last token")
        elif token not in {_ONE, _REST}:
            raise Invalid(
                f"pattern {_shown(name)} has a wildcard inside the token {_shown(token)}",
                hint="* and > stand for whole tokens, as in orders.*.created",
            )
    raise Invalid(f"{what} {_shown(name)} breaks the grammar of a {what}")  # pragma: no cover - the rules above are all


# --- matching ---------------------------------------------------------------------------------------------------------


def matches(pattern: str, topic: str) -> bool:
    """Say whether the pattern matches the topic. Both are checked first: a bad one is refused, never a silent no."""
    wanted = check_pattern(pattern).split(".")
    tokens = check_topic(topic).split(".")
    if wanted[-1] == _REST:
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
    elif len(tokens) != len(wanted):
        return False
    return all(want in (_ONE, token) for want, token in zip(wanted, tokens, strict=False))


T = TypeVar("T", bound=Hashable)


class _Node(Generic[T]):
    """A place in the trie: what ends here, what ends in ``>`` after here, and where each next token leads."""

    __slots__ = ("children", "star", "tail", "values")

    def __init__(self) -> None:
        self.children: dict[str, _Node[T]] = {}
        self.star: _Node[T] | None = None
        self.values: dict[T, int] = {}
        self.tail: dict[T, int] = {}

    def is_empty(self) -> bool:
        return not (self.children or self.values or self.tail or self.star)


class PatternTrie(Generic[T]):
    """Which values are registered under a pattern that matches a topic.

    A value is registered under any number of patterns, once under each. ``match`` gives every value once, ordered by
    the oldest of its matching registrations. The answers for hot topics are kept until the next add or remove.
    Readers in other threads are safe beside one thread that adds and removes: each sees the registrations before or
    after a change, and no answer from before it is kept.
    """

    CACHED_TOPICS_MAX = 8_192  # topics per generation of the cache; there are two generations
    CACHED_VALUES_MAX = 1 << 20  # values in one generation's answers, for patterns with very many values

    def __init__(self) -> None:
        self._exact: dict[str, dict[T, int]] = {}
        self._root: _Node[T] = _Node()
        self._sequence = 0
        self._size = 0
        self._hot: dict[str, tuple[T, ...]] = {}
        self._warm: dict[str, tuple[T, ...]] = {}
        self._hot_values = 0
        self._swap = Lock()

    def __len__(self) -> int:
        """Return the number of registrations."""
        return self._size

    def add(self, pattern: str, value: T) -> bool:
        """Register the value under the pattern; False when it already is, and nothing changes. Bad patterns refused."""
        entries = self._entries(check_pattern(pattern))
        if value in entries:
            return False
        entries[value] = self._sequence
        self._sequence += 1
        self._size += 1
        self._forget()
        return True

    def remove(self, pattern: str, value: T) -> bool:
        """Take the value away from under the pattern; False when it was not there."""
        pattern = check_pattern(pattern)
        path, entries = self._find(pattern)
        if entries is None or value not in entries:
            return False
        del entries[value]
        self._size -= 1
        if not entries:
            self._prune(pattern, path)
        self._forget()
        return True

    def match(self, topic: str) -> tuple[T, ...]:
        """Return the values for a topic in the order they were added. The topic is not checked: publishing did that."""
        hit = self._hot.get(topic)
        if hit is not None:
            return hit
        return self._match_cold(topic)

    def _match_cold(self, topic: str) -> tuple[T, ...]:
        # Taken before the trie is read: a change meanwhile swaps in a new cache and leaves this one to be thrown away.
        hot = self._hot
        result = self._warm.get(topic)
        if result is None:
            result = self._collect(topic)
        if len(hot) >= self.CACHED_TOPICS_MAX or self._hot_values >= self.CACHED_VALUES_MAX:
            with self._swap:
                if hot is self._hot:
                    self._warm, self._hot, self._hot_values = hot, {}, 0
        hot[topic] = result
        self._hot_values += len(result)
        return result

    def _collect(self, topic: str) -> tuple[T, ...]:
        exact = self._exact.get(topic)
        found = [] if exact is None else [exact]
        nodes = [self._root]
        for token in topic.split("."):
            following = []
            for node in nodes:
                if node.tail:
                    found.append(node.tail)
                child = node.children.get(token)
                if child is not None:
                    following.append(child)
                if node.star is not None:
                    following.append(node.star)
            nodes = following
            if not nodes:
                break
        found.extend([node.values for node in nodes if node.values])
        if len(found) < 2:  # noqa: PLR2004 - a single registry is already in order
            return tuple(found[0]) if found else ()
        pairs = [pair for entries in found for pair in list(entries.items())]
        pairs.sort(key=itemgetter(1))
        return tuple(dict.fromkeys([value for value, _ in pairs]))

    def _entries(self, pattern: str) -> dict[T, int]:
        """Return the registry of a pattern, made when it is missing."""
        if _ONE not in pattern and _REST not in pattern:
            return self._exact.setdefault(pattern, {})
        node = self._root
        for token in pattern.split("."):
            if token == _REST:
                return node.tail
            if token == _ONE:
                if node.star is None:
                    node.star = _Node()
                node = node.star
            else:
                node = node.children.setdefault(token, _Node())
        return node.values

    def _find(self, pattern: str) -> tuple[list[_Node[T]], dict[T, int] | None]:
        """Return the nodes on the way to a pattern's registry and the registry; None when the way ends early."""
        if _ONE not in pattern and _REST not in pattern:
            return [], self._exact.get(pattern)
        path = [self._root]
        for token in pattern.split("."):
            node = path[-1]
            if token == _REST:
                return path, node.tail
            following = node.star if token == _ONE else node.children.get(token)
            if following is None:
                return path, None
            path.append(following)
        return path, path[-1].values

    def _prune(self, pattern: str, path: list[_Node[T]]) -> None:
        """Drop what a removed pattern leaves empty, so that a churning trie does not grow."""
        if not path:
            del self._exact[pattern]
            return
        tokens = pattern.split(".")
        for depth in range(len(path) - 1, 0, -1):
            if not path[depth].is_empty():
                return
            parent, token = path[depth - 1], tokens[depth - 1]
            if token == _ONE:
                parent.star = None
            else:
                del parent.children[token]

    def _forget(self) -> None:
        with self._swap:
            self._hot, self._warm, self._hot_values = {}, {}, 0
