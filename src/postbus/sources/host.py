"""``SourceHost``: runs the sources side by side, each with its own pace, failures and checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from typing import TYPE_CHECKING, Any, Self

from postbus.delivery.backoff import retry_delay_s
from postbus.model import AlreadyServed, Conflict, NotFound, PostbusError, RetryPolicy
from postbus.sources.ingress import Ingress, Overtaken, Turn
from postbus.sources.kinds import make
from postbus.sources.registry import load, load_all

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from postbus.clock import Clock
    from postbus.log.sqlite import SqliteLog
    from postbus.model import Source
    from postbus.sources.ingress import Check

__all__ = ["SourceHost"]

logger = logging.getLogger("postbus.sources")

LOOK_S = 0.25
LOCK_S = 1.0
RESUME_S_MAX = 3600.0
WALL_STEP_S = 5.0
POLL_S_MAX = 3600.0
PATIENCE = RetryPolicy(backoff_s=1.0, backoff_s_max=300.0, jitter=0.2)
LOCK = "sources.lock"

Key = tuple[str, str]
Version = tuple[int, int]


class SourceHost:
    """Polls every running source of a tenant, or of all tenants; ``async with host:`` starts and stops it.

    Sources that are added, paused, resumed or removed meanwhile, in any process, are noticed within a moment. One
    process hosts the sources of a data folder; a second one is refused with ``AlreadyServed``.
    """

    def __init__(
        self,
        log: SqliteLog,
        clock: Clock,
        *,
        tenant: str | None = None,
        retry: RetryPolicy = PATIENCE,
        checks: tuple[Check, ...] = (),
        grace_s: float = 10.0,
    ) -> None:
        self._log = log
        self._clock = clock
        self._tenant = tenant
        self._retry = retry
        self._grace_s = grace_s
        self._ingress = Ingress(log, checks)
        self._stopping = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._lock = -1
        self._tasks: dict[Key, tuple[Version, asyncio.Task[None]]] = {}
        self._polling: dict[Key, asyncio.Lock] = {}

    # --- life ---

    async def start(self, *, wait: bool = False) -> None:
        """Host the sources from now on; raises ``AlreadyServed``, or with ``wait`` begins when the other one ends."""
        try:
            self._take_lock()
        except AlreadyServed:
            if not wait:
                raise
            logger.warning("another process hosts the sources; waiting for it to end")
        self._stopping.clear()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Start no poll any more, give those that run a moment, and end. Idempotent."""
        self._stopping.set()
        if self._watching is not None:
            await self._watching
            self._watching = None
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    # --- one turn ---

    async def poll(self, tenant: str, name: str) -> Turn:
        """Look at a source once, now, whether it is paused or not; raises ``NotFound``, ``Conflict``.

        A failure is recorded and returned, not raised.
        """
        source = await self._load(tenant, name)
        adapter = make(source, self._clock)
        if not hasattr(adapter, "poll"):
            raise Conflict(f"{name} is a {source.kind}: it is called from outside and not polled")
        return (await self._turn(adapter, source))[1]

    async def receive(self, tenant: str, name: str, headers: Mapping[str, str], body: bytes) -> Turn:
        """Take a call from outside for a source; names of headers are in lower case.

        Returns when its event is durable. Raises ``NotFound``, ``Conflict`` (paused, or of a kind that is not called),
        ``Unauthenticated``, ``Invalid``.
        """
        source = await self._load(tenant, name)
        adapter = make(source, self._clock)
        if not hasattr(adapter, "receive"):
            raise Conflict(f"{name} is a {source.kind}: nobody can call it")
        if source.paused:
            raise Conflict(f"{name} is paused", hint="call again later")
        return await self._ingress.take(source, adapter.receive(headers, body))

    async def _load(self, tenant: str, name: str) -> Source:
        return await self._log.store.read(lambda db: load(db, tenant, name))

    async def _turn(self, adapter: Any, source: Source) -> tuple[Source, Turn]:
        """Poll once and keep what came, or what went wrong; return the source as it was, too.

        Turns of one source wait for each other. Raises ``Overtaken`` when it was paused, removed or changed meanwhile.
        """
        async with self._polling.setdefault((source.tenant, source.id), asyncio.Lock()):
            before = await self._load(source.tenant, source.id)
            if _version(before) != _version(source):
                raise Overtaken(f"the source {source.id} was changed meanwhile")
            return before, await self._poll(adapter, before)

    async def _poll(self, adapter: Any, source: Source) -> Turn:
        try:
            async with asyncio.timeout(POLL_S_MAX):
                polled = await adapter.poll(source.checkpoint)
            wait_s = polled.wait_s
            if wait_s is None:
                failed = polled.problem is not None
                wait_s = self._patience_s(source) if failed else adapter.interval_s
            due_us = polled.due_at_us or self._clock.now_us() + round((0 if polled.again else wait_s) * 1e6)
            return await self._ingress.keep(source, polled, due_us)
        except Overtaken:
            raise
        except PostbusError as error:
            asked_s = getattr(error, "retry_after_s", None)
            message = error.message if error.hint is None else f"{error.message} ({error.hint})"
        except Exception as error:
            logger.exception("source %s of %s failed", source.id, source.tenant)
            asked_s, message = None, f"unexpected {type(error).__name__}: {error}"
        wait_s = max(self._patience_s(source), asked_s or 0.0)
        return await self._ingress.fail(source, message, self._clock.now_us() + round(wait_s * 1e6))

    def _patience_s(self, source: Source) -> float:
        return retry_delay_s(self._retry, source.failures + 1)

    # --- all of them ---

    async def _watch(self) -> None:
        """Have a task for every source that runs, and none for any other."""
        while self._lock < 0 and not await self._clock.wait(self._stopping, LOCK_S):
            with contextlib.suppress(AlreadyServed):
                self._take_lock()
        while not self._stopping.is_set():
            with contextlib.suppress(PostbusError):
                found = await self._log.store.read(lambda db: load_all(db, self._tenant))
                wanted = {(one.tenant, one.id): one for one in found if not one.paused}
                for key, (version, task) in list(self._tasks.items()):
                    source = wanted.get(key)
                    if source is None or _version(source) != version or task.done():
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                        del self._tasks[key]
                for key, source in wanted.items():
                    if key not in self._tasks:
                        task = asyncio.get_running_loop().create_task(self._run(source))
                        self._tasks[key] = (_version(source), task)
            await self._clock.wait(self._stopping, LOOK_S)

    async def _run(self, source: Source) -> None:
        """Poll one source again and again, each time from where the last turn that was kept has ended."""
        try:
            adapter = make(source, self._clock)
        except PostbusError as error:
            await self._ingress.fail(source, error.message, None)
            await self._stopping.wait()
            return
        if not hasattr(adapter, "poll"):
            await self._stopping.wait()
            return
        wait_s, until_us = 0.0, None
        if source.next_due_at_us is not None:  # it was polled before this process was there
            wait_s = min((source.next_due_at_us - self._clock.now_us()) / 1e6, RESUME_S_MAX)
        while not await self._pause(wait_s, until_us):
            try:
                before, turn = await self._turn(adapter, source)
            except (Overtaken, NotFound):
                return  # the watch looks what became of it
            except PostbusError as error:
                logger.info("source %s of %s: %s", source.id, source.tenant, error)
                wait_s, until_us = LOOK_S, None
                continue
            self._tell(before, turn)
            until_us = turn.due_at_us if turn.by_wall else None
            wait_s = 0.0 if turn.by_wall else turn.wait_s(self._clock.now_us())

    async def _pause(self, wait_s: float, until_us: int | None) -> bool:
        """Wait so long, or until an instant of the wall clock, which may jump; True when the host stops."""
        while until_us is not None and not self._stopping.is_set():
            left_s = (until_us - self._clock.now_us()) / 1e6
            if left_s <= 0:
                break
            await self._clock.wait(self._stopping, min(left_s, WALL_STEP_S))
        if wait_s > 0:
            await self._clock.wait(self._stopping, wait_s)
        return self._stopping.is_set()

    def _take_lock(self) -> None:
        path = self._log.store.folder.path / LOCK
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            message = "another process hosts the sources of this data folder"
            raise AlreadyServed(message, hint="stop it, or let it go on alone") from None
        self._lock = handle

    @staticmethod
    def _tell(before: Source, turn: Turn) -> None:
        if turn.error is not None and turn.error != before.last_error:
            logger.warning("source %s of %s: %s", before.id, before.tenant, turn.error)
        elif turn.error is None and before.failures:
            logger.info("source %s of %s works again", before.id, before.tenant)


def _version(source: Source) -> Version:
    """Return what tells a source from the one of the same id before it was changed, or removed and added again."""
    return source.revision, source.created_at_us
