"""A subscriber in this process: its handlers by pattern, and the runner that calls them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.bus.context import Context, current
from postbus.bus.registry import whole
from postbus.delivery.dead import SUFFIX, bury, grave
from postbus.delivery.runner import Runner, RunnerSettings
from postbus.filters import compile_filter
from postbus.model import Ordering, Reject, Retry
from postbus.topics import PatternTrie, matches

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from postbus.bus.bus import EventBus
    from postbus.bus.registry import Registered
    from postbus.delivery.table import DeliveryTable
    from postbus.delivery.work import Work
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Draft, Event, Start

    Bound = Callable[[Event, Context], Awaitable[Any]]

__all__ = ["Subscriber"]


class Subscriber:
    """Handlers under one subscriber id, in the order they were registered."""

    def __init__(self, registered: Registered, start: Start | None, heads: dict[tuple[str, int], int]) -> None:
        self.registered = msgspec.structs.replace(registered, patterns=())
        self.start = start
        self.heads = heads
        self.placed = False
        self._filter = compile_filter(registered.filter) if registered.filter else None
        self._handlers: list[tuple[str, Bound]] = []
        self._trie: PatternTrie[int] = PatternTrie()
        self._wholes: dict[str, frozenset[int]] = {}
        self._runner: Runner | None = None
        self._calls: list[Bound] = []
        self._bus: EventBus | None = None
        self._log: SqliteLog | None = None
        self._middleware: list[Callable[..., Awaitable[Any]]] = []

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns it has handlers for."""
        return self.registered.patterns

    def agrees(self, other: Registered) -> bool:
        """Say whether another registration has the same settings."""
        return msgspec.structs.replace(other, patterns=()) == msgspec.structs.replace(self.registered, patterns=())

    def add(self, pattern: str, handler: Bound) -> None:
        """Add a handler behind the others."""
        self._handlers.append((pattern, handler))
        self._rebuild()

    def remove(self, pattern: str) -> None:
        """Remove the handlers of a pattern."""
        self._handlers = [entry for entry in self._handlers if entry[0] != pattern]
        self._rebuild()

    def _rebuild(self) -> None:
        trie: PatternTrie[int] = PatternTrie()
        for index, (pattern, _) in enumerate(self._handlers):
            trie.add(pattern, index)
        self._trie, self._wholes = trie, {}
        patterns = tuple(dict.fromkeys(pattern for pattern, _ in self._handlers))
        self.registered = msgspec.structs.replace(self.registered, patterns=patterns)
        self.wrap()

    def wants_topic(self, stream: str, topic: str) -> bool:
        """Say whether any handler may want an event of a stream on a topic."""
        return bool(self._trie.match(topic) or self._whole(stream))

    def wants(self, event: Event) -> bool:
        """Say whether any handler wants an event."""
        if not (self._trie.match(event.topic) or self._whole(event.stream)):
            return False
        return self._filter is None or self._filter.matches(event)

    def _whole(self, stream: str) -> frozenset[int]:
        """Return the handlers that want everything in a stream."""
        found = self._wholes.get(stream)
        if found is None:
            entries = enumerate(self._handlers)
            found = self._wholes[stream] = frozenset(i for i, (pattern, _) in entries if whole(pattern, stream))
        return found

    def reads(self, stream: str, journal: str, tenant: str) -> bool:
        """Say whether a stream can hold events for it: the journal, or a stream whose name a pattern matches.

        Dead-letter streams are read only by those who ask for exactly that one.
        """
        if stream == journal:
            return True
        if not stream.startswith(f"{tenant}."):
            return False
        if stream.endswith(SUFFIX):
            return stream in self.patterns
        return any(matches(pattern, stream) for pattern in self.patterns)

    def grave(self, stream: str) -> str:
        """Return the stream its dead letters from a stream go to."""
        return self.registered.dead_letter_stream or grave(stream)

    # --- running ---

    def run(
        self,
        bus: EventBus,
        log: SqliteLog,
        table: DeliveryTable,
        batch: int,
        lease_s: float,
        poll_s: float,
        middleware: list[Callable[..., Awaitable[Any]]],
    ) -> None:
        """Start calling the handlers. Idempotent."""
        if self._runner is not None:
            return
        self._bus, self._log, self._middleware = bus, log, middleware
        self.wrap()
        kept = self.registered
        settings = RunnerSettings(
            subscription=kept.id,
            retry=kept.retry,
            strict=kept.ordering is Ordering.STRICT,
            concurrency=kept.concurrency,
            timeout_s=kept.timeout_s,
            batch=batch,
            lease_s=lease_s,
            poll_s=poll_s,
            backlog_max=kept.max_backlog,
        )
        self._runner = Runner(settings, log, table, bus.clock, self.wants_topic, self.wants, self._handle, self._bury)
        self._runner.start()

    def add_lane(self, stream: str, partition: int) -> None:
        """Read one more partition."""
        if self._runner is not None:
            self._runner.add_lane(stream, partition)

    async def stop(self, grace_s: float) -> None:
        """Stop calling the handlers, letting those that run finish."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.stop(grace_s)

    async def refresh(self) -> None:
        """Look for events that were re-queued by somebody else."""
        if self._runner is not None:
            await self._runner.refresh()

    def runs(self, task: asyncio.Task[Any] | None) -> bool:
        """Say whether a task is one that calls the handlers."""
        return self._runner is not None and task in self._runner.tasks()

    @property
    def busy(self) -> bool:
        """Whether something is to be done that waits neither for time to pass nor for a handler."""
        return not self.placed or (self._runner is not None and self._runner.busy)

    @property
    def counts(self) -> dict[str, int]:
        """What this process did for it since it started."""
        runner = self._runner
        if runner is None:
            return dict.fromkeys(("handled", "failed", "dead", "dropped", "filter_errors", "running"), 0)
        return {
            "handled": runner.handled,
            "failed": runner.failed,
            "dead": runner.dead,
            "dropped": runner.dropped,
            "filter_errors": self._filter.errors if self._filter is not None else 0,
            "running": len(runner.running),
        }

    def wrap(self) -> None:
        """Put the middleware there is around every handler."""
        calls = [handler for _, handler in self._handlers]
        for around in reversed(self._middleware):
            calls = [_around(around, inner) for inner in calls]
        self._calls = calls

    async def _handle(self, event: Event, work: Work) -> None:
        if work.row is not None and self._filter is not None and not self._filter.matches(event):
            return  # recovered after a crash, where only its topic was looked at
        assert self._bus is not None  # noqa: S101 - set before the runner starts
        assert self._log is not None  # noqa: S101 - set before the runner starts
        context = Context(self._bus, self._log, event, self.registered.id)
        chosen = self._chosen(event)
        token = current.set(context)
        try:
            if len(chosen) == 1:
                await self._calls[chosen[0]](event, context)
            else:
                await self._all(chosen, event, context)
        finally:
            current.reset(token)

    def _chosen(self, event: Event) -> tuple[int, ...]:
        """Return the handlers of an event in the order they were registered."""
        chosen, streams = self._trie.match(event.topic), self._whole(event.stream)
        return tuple(sorted({*chosen, *streams})) if streams else chosen

    async def _all(self, chosen: tuple[int, ...], event: Event, context: Context) -> None:
        """Call several handlers one after the other; each runs, whatever the others did."""
        errors: list[Exception] = []
        for index in chosen:
            try:
                await self._calls[index](event, context)
            except Exception as error:  # noqa: BLE001 - judged below, once all have run
                errors.append(error)
        if not errors:
            return
        for kind in (Reject, Retry):
            for verdict in errors:
                if isinstance(verdict, kind):
                    raise verdict
        if len(errors) == 1:
            raise errors[0]
        raise ExceptionGroup("several handlers failed", errors)

    def _bury(self, event: Event, reason: str, attempts: int, error: str) -> tuple[str, Draft]:
        return self.grave(event.stream), bury(event, self.registered.id, reason, attempts, error)


def _around(around: Callable[..., Awaitable[Any]], inner: Bound) -> Bound:
    async def call(event: Event, context: Context) -> Any:
        return await around(event, context, partial(inner, event, context))

    return call
