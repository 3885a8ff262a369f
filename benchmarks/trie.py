"""The pattern trie with 10,000 patterns: topics it has not seen lately, and topics it has."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.harness import Contender, Options
from benchmarks.load import Stopwatch
from postbus.topics import PatternTrie

__all__ = ["TrieLookups"]

PATTERNS = 10_000
WORDS = 300


def _words(prefix: str) -> list[str]:
    return [f"{prefix}{number}" for number in range(WORDS)]


LEVELS = [["plugin", "agent", "source", "system"], _words("inbound"), _words("kind"), ["created", "changed", "gone"]]


def topics(count: int, seed: int) -> list[str]:
    """Return so many different topics of three or four tokens."""
    dice = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        tokens = [dice.choice(words) for words in LEVELS]
        found[".".join(tokens[: dice.choice((3, 4))])] = None
    return list(found)


def patterns(seed: int) -> list[str]:
    """Return 10,000 different patterns: half exact, a third with a ``*``, the rest ending in ``>``."""
    dice = random.Random(seed)
    found: dict[str, None] = {}
    for topic in topics(2 * PATTERNS, seed):
        tokens, kind = topic.split("."), dice.random()
        if kind > 0.83:
            tokens = [*tokens[: dice.choice((2, 3))][: len(tokens) - 1], ">"]
        elif kind > 0.5:
            tokens[dice.randrange(1, len(tokens))] = "*"
        found[".".join(tokens)] = None
        if len(found) == PATTERNS:
            break
    return list(found)


class TrieLookups(Contender):
    """Look-ups of a number of different topics in turn."""

    def __init__(self, name: str, options: Options, different: int) -> None:
        self.name = name
        self._options = options
        self._different = different

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        del folder
        self._trie: PatternTrie[int] = PatternTrie()
        for number, pattern in enumerate(patterns(1)):
            self._trie.add(pattern, number)
        assert len(self._trie) == PATTERNS
        self._topics = topics(self._different, 2)
        self._pass()

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        watch, asked = Stopwatch(), 0
        while not watch.over(self._options.round_s / 2):
            self._pass()
            asked += len(self._topics)
        rate = watch.rate(asked)
        found = sum(len(self._trie.match(topic)) for topic in self._topics)
        return {"lookups_s": rate["events_s"], "cpu_us": rate["cpu_us"], "values": found / len(self._topics)}

    def close(self) -> None:
        """See ``Contender.close``."""

    def _pass(self) -> None:
        match = self._trie.match
        for topic in self._topics:
            match(topic)
