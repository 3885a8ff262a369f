"""Who fills an inbox: what a subscription says, else what was said for its tenant, else the live pump."""

from __future__ import annotations

from pathlib import Path

import pytest

from postbus.clock import SystemClock
from postbus.inbox import Inboxes, Target
from postbus.log import SqliteLog
from postbus.model import Invalid

ONE, OTHER = "acme.eu", "acme.us"


async def test_a_tenant_has_an_engine_for_those_that_do_not_say(tmp_path: Path) -> None:
    log = SqliteLog.open(tmp_path / "store")
    try:
        inboxes = Inboxes(log, SystemClock())
        for tenant in (ONE, OTHER):
            await inboxes.create_agent(tenant, "ann", (Target(kind="pull"),))
            assert (await inboxes.subscribe(tenant, "ann", "a.*", id="first"))[0].engine == "live"
        assert await inboxes.hand_over_all(ONE, "spark") == ["first"]
        assert await inboxes.hand_over_all(ONE, "spark") == []
        with pytest.raises(Invalid, match="no engine is called 'fast'"):
            await inboxes.hand_over_all(ONE, "fast")  # type: ignore[arg-type]
        made, _ = await inboxes.subscribe(ONE, "ann", "a.*", id="second")
        assert made.engine == "spark"
        assert (await inboxes.agents.subscription(ONE, "second")).engine == "spark"
        assert (await inboxes.subscribe(ONE, "ann", "a.*", id="third", engine="live"))[0].engine == "live"
        assert (await inboxes.subscribe(OTHER, "ann", "a.*", id="second"))[0].engine == "live"
        assert {one.id: one.engine for one in await inboxes.agents.subscriptions(ONE)} == {
            "first": "spark",
            "second": "spark",
            "third": "live",
        }
        assert await inboxes.hand_over_all(ONE, "live") == ["first", "second"]
        assert (await inboxes.subscribe(ONE, "ann", "a.*", id="fourth"))[0].engine == "live"
    finally:
        await log.close()
