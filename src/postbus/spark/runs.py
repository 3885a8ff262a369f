"""Records of the pipeline's runs: events on ``pipeline.run.started``, ``.finished`` and ``.failed`` in the journal."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from postbus.clock import SystemClock
from postbus.envelope import draft
from postbus.log import open_log
from postbus.model import PostbusError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["TOPICS", "recorded"]

TOPICS = "pipeline.run.*"
SOURCE = "pipeline"


@asynccontextmanager
async def recorded(data: str, job: str, asked: dict[str, Any], *, tenant: str) -> AsyncIterator[dict[str, Any]]:
    """Record a run from its beginning to its end; what the body puts into the dictionary is what came of it."""
    clock = SystemClock()
    run, began = clock.new_id(), clock.monotonic_s()
    found: dict[str, Any] = {}
    facts = {"run": run, "job": job, "asked": asked}
    await _record(data, tenant, "started", run, facts)
    try:
        yield found
    except BaseException as error:
        said = error.message if isinstance(error, PostbusError) else type(error).__name__
        await _record(data, tenant, "failed", run, facts | {"error": said, "seconds": clock.monotonic_s() - began})
        raise
    await _record(data, tenant, "finished", run, facts | {"result": found, "seconds": clock.monotonic_s() - began})


async def _record(data: str, tenant: str, what: str, run: str, facts: dict[str, Any]) -> None:
    log = await open_log(data)
    try:
        stream = f"{tenant}.journal"
        await log.ensure_stream(stream)
        await log.append(stream, [draft(f"pipeline.run.{what}", SOURCE, facts, correlation_id=run)])
    finally:
        await log.close()
