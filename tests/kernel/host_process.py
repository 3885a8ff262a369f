"""A host in a process of its own, which says ``ready`` once everything hangs in the air, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from postbus.bus import EventBus
from postbus.kernel import Kernel
from tests.kernel.kernel_kit import holds


async def main(data: Path, extensions: Path) -> None:
    async with Kernel(EventBus(data), extensions) as kernel:
        desk, bank = kernel.instance("desk"), kernel.instance("bank")
        await kernel.schedules.create("once.due", {}, made_by="test", delay_s=0.01)
        desk.answers.append("hush hush")
        await bank.ctx.request_secret("pin", "PIN?", "desk")
        await holds(lambda: bank.told)
        await desk.ctx.receive("ann", "me", message_id="m1")
        await holds(lambda: desk.asked)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
