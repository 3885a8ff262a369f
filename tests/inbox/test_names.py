"""One tenant's subscription ids: a handler cannot take over the subscription of an inbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from postbus.bus import EventBus
from postbus.clock import SystemClock
from postbus.inbox import Inboxes, Target
from postbus.model import Conflict

TENANT = "local.default"


async def test_a_handler_does_not_take_over_an_inbox_subscription(tmp_path: Path) -> None:
    bus = EventBus(tmp_path, tenant=TENANT)
    log = await bus.open()
    inboxes = Inboxes(log, SystemClock())
    await inboxes.create_agent(TENANT, "alpha", (Target(kind="pull"),))
    made, _ = await inboxes.subscribe(TENANT, "alpha", "order.*", id="orders")
    bus.subscribe("order.*", lambda _event: None, "orders")
    with pytest.raises(Conflict, match="another kind"):
        await bus.start()
    assert (await inboxes.agents.subscription(TENANT, "orders")).agent == made.agent
    await bus.stop()
