"""Extensions that work at set times: the kernel calls ``execute`` by their schedule, and tells the user what it says.

Nothing is kept: fire times that pass while the kernel does not run are not made up for. What must not be missed is a
schedule of the scheduler extension.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from postbus.bus.context import current
from postbus.kernel.contract import ExtensionState, SchedulerProvider
from postbus.kernel.entrypoint import describe_error
from postbus.kernel.topics import SystemTopics
from postbus.model import Invalid, PostbusError
from postbus.schedule import FIELDS, schedule

if TYPE_CHECKING:
    from postbus.kernel.kernel import Kernel

__all__ = ["Crons", "cron_of"]

logger = logging.getLogger("postbus.kernel")

MINUTE_US = 60_000_000


class Crons:
    """See ``KernelPart``. Once a minute it looks who is due, so that a reloaded extension counts from then on."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._looking: asyncio.Task[None] | None = None
        self._working: dict[str, asyncio.Task[None]] = {}
        self._wrong: dict[str, str] = {}

    def wire(self) -> None:
        """See ``KernelPart.wire``; it handles no topic."""

    async def start(self) -> None:
        """See ``KernelPart.start``."""
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def stop(self) -> None:
        """See ``KernelPart.stop``."""
        tasks = [*self._working.values(), *([] if self._looking is None else [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        current.set(None)
        clock = self._kernel.clock
        through_us = clock.now_us()
        while True:
            await clock.sleep((MINUTE_US - clock.now_us() % MINUTE_US) / 1e6)
            now_us = clock.now_us()
            # After a sleep of the machine, or a jump of the clock, only the last minute counts.
            for extension_id, provider in self._providers().items():
                fire_us = await self._due(extension_id, provider, max(through_us, now_us - MINUTE_US), now_us)
                if fire_us is not None:
                    self._begin(extension_id, provider, fire_us)
            through_us = now_us

    def _providers(self) -> dict[str, SchedulerProvider]:
        return {
            entry.id: entry.instance
            for entry in self._kernel.loader.entries.values()
            if entry.state is ExtensionState.RUNNING and isinstance(entry.instance, SchedulerProvider)
        }

    async def _due(self, extension_id: str, provider: SchedulerProvider, after_us: int, now_us: int) -> int | None:
        """Return the fire time that has come; a schedule that makes no sense is told of, once."""
        text = ""
        try:
            text = str(provider.get_schedule())
            cron, zone = cron_of(text)
            following = schedule(None, None, cron, zone, 0)(after_us)
        except Exception as error:  # noqa: BLE001 - it is somebody else's code; the reason is told
            if self._wrong.get(extension_id) != text:
                self._wrong[extension_id] = text
                await self._tell(extension_id, "schedule", error)
            return None
        self._wrong.pop(extension_id, None)
        return following if following is not None and following <= now_us else None

    def _begin(self, extension_id: str, provider: SchedulerProvider, fire_us: int) -> None:
        if extension_id in self._working:
            logger.warning("%s still works on its last fire time; this one is passed over", extension_id)
            return
        work = self._execute(extension_id, provider, fire_us)
        task = asyncio.get_running_loop().create_task(work)
        self._working[extension_id] = task
        task.add_done_callback(lambda _: self._working.pop(extension_id, None))

    async def _execute(self, extension_id: str, provider: SchedulerProvider, fire_us: int) -> None:
        try:
            said = await provider.execute()
            text = _text_of(said)
            if text is not None:
                native_id = f"cron:{extension_id}:{fire_us}"
                await self._kernel.router.notify_user(text, source=extension_id, native_id=native_id)
        except Exception as error:  # noqa: BLE001 - it is somebody else's code; the reason is told
            await self._tell(extension_id, "execute", error)

    async def _tell(self, extension_id: str, stage: str, error: Exception) -> None:
        """Publish what went wrong; the extension goes on, and so does its schedule."""
        reason = describe_error(error)
        payload = {"extension_id": extension_id, "stage": stage, "reason": reason}
        try:
            await self._kernel.bus.publish(SystemTopics.EXTENSION_ERROR, "kernel", payload)
        except PostbusError as refused:
            logger.warning("the error of %s could not be published: %s (%s)", extension_id, reason, refused.message)


def cron_of(text: str) -> tuple[str, str]:
    """Return the five fields and the zone of a provider's schedule; raises ``Invalid``."""
    words = text.split()
    if len(words) not in (FIELDS, FIELDS + 1):
        raise Invalid(f"{text[:60]!r} is no schedule", hint="five cron fields, and a time zone behind them")
    return " ".join(words[:FIELDS]), words[FIELDS] if len(words) > FIELDS else "UTC"


def _text_of(said: Any) -> str | None:
    if said is None:
        return None
    text = said.get("text") if isinstance(said, dict) else None
    if text is not None and not isinstance(text, str):
        raise Invalid("execute returns None or a dict whose text is a text")
    if not isinstance(said, dict):
        raise Invalid(f"execute returns None or a dict, not {type(said).__name__}")
    return text or None
