"""The suite "inbox": many filters over one event, and events through the pump into inboxes."""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import AsyncContender, Contender, Measure, Missing, Options, Race
from benchmarks.load import Stopwatch
from postbus.clock import SystemClock
from postbus.envelope import draft
from postbus.filters import Filter, FilterIndex, View, compile_filter
from postbus.inbox import Inboxes, Target
from postbus.log.sqlite import SqliteLog
from postbus.model import Event, Start, StartPolicy
from postbus.topics import matches

__all__ = ["races"]

TENANT = "bench.default"
JOURNAL = f"{TENANT}.journal"
EARLIEST = Start(policy=StartPolicy.EARLIEST)
KINDS = ["issue", "pull", "review", "comment", "workflow"]
ACTIONS = ["opened", "closed", "created", "edited", "failed"]


def rules(count: int, seed: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """Return so many (pattern, filter) pairs of the kinds people write: by repository, number, author, mention."""
    dice = random.Random(seed)
    made: list[tuple[str, dict[str, Any]]] = []
    for _ in range(count):
        repo, number = f"org/repo{dice.randrange(400)}", dice.randrange(2_000)
        kind, author = dice.choice(KINDS), f"user{dice.randrange(500)}"
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("github.>", {"metadata": {"repo": repo}}),
            (f"github.{kind}.*", {"metadata": {"repo": repo}, "payload": {"number": number}}),
            ("github.>", {"payload": {"number": [number, number + 1, number + 2]}, "metadata": {"repo": repo}}),
            (f"github.{kind}.failed", {"expr": f'metadata.repo == "{repo}" && payload.number > 1000'}),
            ("github.>", {"metadata": {"author": author}}),
            ("github.*.created", {"expr": f'"{author}" in payload.mentions'}),
            ("github.*.*", {"expr": f'metadata.author == "{author}" || payload.number == {number}'}),
        ]
        made.append(dice.choice(kinds))
    return made


def events(count: int, seed: int = 2) -> list[Event]:
    """Return so many events with a 500-byte payload."""
    dice = random.Random(seed)
    made = []
    for offset in range(count):
        payload = {
            "number": dice.randrange(2_000),
            "mentions": [f"user{dice.randrange(500)}" for _ in range(dice.randrange(3))],
            "text": "x" * 420,
        }
        metadata = {"repo": f"org/repo{dice.randrange(400)}", "author": f"user{dice.randrange(500)}"}
        topic = f"github.{dice.choice(KINDS)}.{dice.choice(ACTIONS)}"
        body, about = msgspec.json.encode(payload), msgspec.json.encode(metadata)
        made.append(Event(JOURNAL, 0, offset, topic, "bench", "", None, body, about, None, None, None, None, 0, 0))
    return made


class _Matching(Contender):
    """Matches the same events against the same rules, one event after the other."""

    def __init__(self, name: str, options: Options, count: int, turn_events: int) -> None:
        self.name = name
        self._options = options
        self._count = count
        self._turn = turn_events

    def open(self, folder: Path) -> None:
        """See ``Contender.open``."""
        del folder
        self._rules = rules(self._count)
        self._events = events(self._turn)
        self.prepare()
        self.match(self._events[0])

    def prepare(self) -> None:
        """Compile the rules."""

    @abstractmethod
    def match(self, event: Event) -> int:
        """Return how many rules match."""

    def run(self) -> dict[str, float]:
        """See ``Contender.run``."""
        watch, seen, found = Stopwatch(), 0, 0
        while not watch.over(self._options.round_s / 2) or seen < len(self._events):
            for event in self._events:
                found += self.match(event)
            seen += len(self._events)
        rate = watch.rate(seen)
        return rate | {"rules_s": rate["events_s"] * self._count, "found": found / seen}

    def close(self) -> None:
        """See ``Contender.close``."""


class Index(_Matching):
    """Our index."""

    def prepare(self) -> None:
        """Compile the rules."""
        self._index: FilterIndex[int] = FilterIndex()
        for number, (pattern, spec) in enumerate(self._rules):
            self._index.add(number, pattern, compile_filter(spec))

    def match(self, event: Event) -> int:
        """Return how many rules match."""
        return len(self._index.match(event))


class Naive(_Matching):
    """The loop over every rule with our own compiled filters, everything of the event decoded once."""

    def prepare(self) -> None:
        """Compile the rules."""
        self._compiled: list[tuple[str, Filter]] = [(pattern, compile_filter(spec)) for pattern, spec in self._rules]

    def match(self, event: Event) -> int:
        """Return how many rules match."""
        view = View(event)
        return sum(matches(pattern, event.topic) and rule.matches(view) for pattern, rule in self._compiled)


def as_cel(spec: dict[str, Any]) -> str:
    """Return a filter as one CEL expression, for engines that know nothing else."""
    parts = []
    for part in ("metadata", "payload"):
        for name, wanted in spec.get(part, {}).items():
            text = msgspec.json.encode(wanted).decode()
            parts.append(f"{part}.{name} in {text}" if isinstance(wanted, list) else f"{part}.{name} == {text}")
    if "expr" in spec:
        parts.append(f"({spec['expr']})")
    return " && ".join(parts) or "true"


class GoogleCel(_Matching):
    """The loop over every rule with Google's CEL for Python."""

    def prepare(self) -> None:
        """Compile the rules."""
        try:
            from cel_expr_python import cel  # type: ignore[import-untyped]  # noqa: PLC0415 - a peer that need not be there
        except ImportError as error:
            raise Missing("cel-expr-python is not installed: it comes with the dev extra") from error
        env = cel.NewEnv(variables={"payload": cel.Type.DYN, "metadata": cel.Type.DYN})
        self._compiled = [(pattern, env.compile(as_cel(spec))) for pattern, spec in self._rules]

    def match(self, event: Event) -> int:
        """Return how many rules match."""
        data = {"payload": event.payload, "metadata": event.metadata}
        found = 0
        for pattern, rule in self._compiled:
            if matches(pattern, event.topic) and rule.eval(data=data).value() is True:
                found += 1
        return found


class Pumped(AsyncContender):
    """Events through the pump into inboxes: so many subscriptions, spread over so many agents."""

    def __init__(self, name: str, subscriptions: int, agents: int, appended: int, *, everything: bool = False) -> None:
        super().__init__(name)
        self._subscriptions = subscriptions
        self._agents = agents
        self._appended = appended
        self._everything = everything
        self._log: SqliteLog | None = None

    async def start(self, folder: Path) -> None:
        """See ``Contender.open``."""
        self._log = SqliteLog.open(folder / "store")
        self._inboxes = Inboxes(self._log, SystemClock())
        await self._log.ensure_stream(JOURNAL)
        for number in range(self._agents):
            await self._inboxes.create_agent(TENANT, f"agent{number}", (Target(kind="pull"),))
        made = [(">", {})] * self._subscriptions if self._everything else rules(self._subscriptions)
        await asyncio.gather(
            *(
                self._inboxes.subscribe(TENANT, f"agent{number % self._agents}", pattern, filter=spec, id=f"s{number}")
                for number, (pattern, spec) in enumerate(made)
            )
        )
        await self._inboxes.start()
        some = events(min(self._appended, 20_000))
        self._drafts = [
            draft(event.topic, "bench", event.payload_json, metadata=event.metadata)
            for event in (some * (self._appended // len(some) + 1))[: self._appended]
        ]
        await self.turn()

    async def turn(self) -> dict[str, float]:
        """See ``Contender.run``."""
        assert self._log is not None
        before = self._inboxes.pump.items
        await self._inboxes.pump.stop()
        for start in range(0, self._appended, 1000):
            await self._log.append(JOURNAL, self._drafts[start : start + 1000])
        head = (await self._log.get_stream_stats(JOURNAL)).partitions[0].high_water_mark
        watch = Stopwatch()
        await self._inboxes.pump.start()
        while any(cohort.offset < head for cohort in self._cohorts()):  # noqa: ASYNC110 - nobody tells a stopwatch
            await asyncio.sleep(0.002)
        rate = watch.rate(self._appended)
        items = self._inboxes.pump.items - before
        rate["item_us"] = 1e6 * self._appended / rate["events_s"] / max(items, 1)
        rate["items_s"] = 1e6 / rate["item_us"]
        rate["rules_s"] = rate["events_s"] * self._subscriptions
        return rate

    def _cohorts(self) -> list[Any]:
        return [cohort for channel in self._inboxes.pump._channels.values() for cohort in channel._cohorts]

    async def stop(self) -> None:
        """See ``Contender.close``."""
        if self._log is not None:
            await self._inboxes.stop()
            await self._log.close()


def races(options: Options) -> list[Race]:
    """Return the races of the suite."""
    return [_matching(options, 1_000), _matching(options, 10_000), _pump(options), _fanout(options)]


def _matching(options: Options, count: int) -> Race:
    index, naive, cel = f"index, {count:,} rules", f"loop, {count:,} rules", f"cel-expr-python, {count:,} rules"
    contenders: list[Contender] = [
        Index(index, options, count, options.pick(2_000, 200)),
        Naive(naive, options, count, options.pick(40, 4)),
        GoogleCel(cel, options, count, options.pick(10, 2)),
    ]
    measures = [
        Measure("matching", "events_s", index, naive, at_least=10 if count >= 10_000 else None),
        Measure("matching", "events_s", index, cel),
        Measure("rules evaluated", "rules_s", index, unit="rules/s"),
        Measure("rules evaluated", "rules_s", naive, unit="rules/s"),
        Measure("rules evaluated", "rules_s", cel, unit="rules/s"),
    ]
    return Race(
        f"rules{count}", f"500-byte events against {count:,} subscriptions of mixed kinds", contenders, measures
    )


def _pump(options: Options) -> Race:
    few, many = "1,000 subscriptions", "10,000 subscriptions"
    appended = options.pick(20_000, 1_000)
    contenders: list[Contender] = [
        Pumped(few, 1_000, 100, appended),
        Pumped(many, options.pick(10_000, 1_000), 100, appended),
    ]
    measures = [
        Measure("events through the pump", "events_s", many, few),
        Measure("items made", "items_s", many, few, "items/s"),
        Measure("rules evaluated", "rules_s", many, few, "rules/s"),
    ]
    return Race("pump", f"{appended:,} events into the inboxes of 100 agents, FULL", contenders, measures)


def _fanout(options: Options) -> Race:
    one, many = "1 inbox", "1,000 inboxes"
    contenders: list[Contender] = [
        Pumped(one, 1, 1, options.pick(100_000, 2_000), everything=True),
        Pumped(many, 1_000, 1_000, options.pick(200, 20), everything=True),
    ]
    measures = [Measure("cost of an item", "item_us", many, one, "µs", at_most=2)]
    return Race("fanout", "one stream feeding inboxes, each getting every event, FULL", contenders, measures)
