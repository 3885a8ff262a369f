"""The command that tells the story of a correlation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postbus.bus.trace import trace as trace_events
from postbus.cli import output
from postbus.cli.options import (
    DATA,
    TENANT,
    ApiKey,
    Data,
    Json,
    Tenant,
    Url,
    address_of,
    connected,
    examples,
    opened_store,
)
from postbus.cli.output import count, milliseconds, safe, short
from postbus.model import DeliveryStatus

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from postbus.bus.trace import Step, Trace, TracedDelivery

__all__ = ["commands"]

MARKS = {
    DeliveryStatus.DONE: ("✓", "green"),
    DeliveryStatus.FAILED: ("✗", "red"),
    DeliveryStatus.PROCESSING: ("▸", "cyan"),
    DeliveryStatus.PENDING: ("…", "yellow"),
}

commands = typer.Typer()


@commands.command(
    rich_help_panel="Bus",
    epilog=examples(
        """
        $ postbus trace conversation-7
        $ postbus trace journal/0/17 --json
        """
    ),
)
def trace(
    correlation_id: Annotated[
        str, typer.Argument(metavar="CORRELATION_ID", help="A correlation id, or the address of any of its events.")
    ],
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show which event led to which, how long each took, and what became of it for each subscriber.

    Each event stands below the one whose handler published it, with the time since the first event was appended. Below
    it its subscribers, with the time from the event's append until they were done with it.
    """

    async def run() -> Trace:
        if url is not None:
            async with connected(url, api_key, tenant) as server:
                return await server.story(address_of(correlation_id, tenant))
        async with opened_store(data) as log:
            return await trace_events(log, address_of(correlation_id, tenant), tenant)

    found = asyncio.run(run())
    if json:
        output.document(_facts(found))
        return
    for root in found.roots:
        output.draw(_tree(root, tenant))
    output.note(f"{count(found.events, 'event')} in {milliseconds(found.took_us)}, correlation {found.correlation_id}")
    if found.left_out:
        output.note(f"{count(found.left_out, 'event')} left out after the first ones")


# --- for programs -----------------------------------------------------------------------------------------------------


def _facts(found: Trace) -> dict[str, Any]:
    return {
        "correlation_id": found.correlation_id,
        "events": found.events,
        "left_out": found.left_out,
        "took_ms": found.took_us / 1000,
        "roots": [_step_facts(step) for step in found.roots],
    }


def _step_facts(step: Step) -> dict[str, Any]:
    event = step.event
    return {
        "id": event.id,
        "journal_id": step.journal_id,
        "topic": event.topic,
        "source": event.source,
        "caused_by": step.caused_by,
        "occurred_at": event.occurred_at,
        "created_at": event.created_at,
        "after_ms": step.after_us / 1000,
        "status": step.status,
        "deliveries": [
            {
                "subscription": delivery.subscription,
                "status": delivery.status,
                "attempts": delivery.attempts,
                "replays": delivery.replays,
                "took_ms": None if delivery.took_us is None else delivery.took_us / 1000,
                "error": delivery.error,
                "dead_letter": delivery.dead_letter,
            }
            for delivery in step.deliveries
        ],
        "children": [_step_facts(child) for child in step.children],
    }


# --- for people -------------------------------------------------------------------------------------------------------


def _tree(root: Step, tenant: str) -> Tree:
    from rich.tree import Tree  # noqa: PLC0415 - as in output.py

    top = Tree(_step_text(root, tenant, first=True))
    waiting = [(root, top)]
    while waiting:
        step, branch = waiting.pop()
        for delivery in step.deliveries:
            branch.add(_delivery_text(delivery, tenant))
        waiting += [(child, branch.add(_step_text(child, tenant, first=False))) for child in step.children]
    return top


def _step_text(step: Step, tenant: str, *, first: bool) -> Text:
    from rich.text import Text  # noqa: PLC0415 - as in output.py

    event = step.event
    when = f"{event.created_at:%Y-%m-%d %H:%M:%S}Z" if first else f"+{milliseconds(step.after_us)}"
    text = Text.assemble((event.topic, "bold cyan"), f"  {short(event.id, tenant)}", (f"  {when}", "dim"))
    text.append(f"  from {safe(event.source)}", "dim")
    if first and step.caused_by is not None:
        text.append(f"  caused by {safe(short(step.caused_by, tenant))}, which is not kept", "dim")
    if not step.deliveries:
        text.append("  nobody subscribes" if step.status is DeliveryStatus.DONE else f"  {step.status}", "dim")
    return text


def _delivery_text(delivery: TracedDelivery, tenant: str) -> Text:
    from rich.text import Text  # noqa: PLC0415 - as in output.py

    mark, style = MARKS[delivery.status]
    text = Text.assemble((f"{mark} ", style), safe(delivery.subscription), (f"  {delivery.status}", style))
    if delivery.took_us is not None:
        text.append(f" after {milliseconds(delivery.took_us)}")
    if delivery.attempts > 1:
        text.append(f", {delivery.attempts} attempts")
    if delivery.replays:
        text.append(f", {'replayed' if delivery.replays == 1 else f'replayed {delivery.replays} times'}")
    if delivery.error:
        text.append(f": {safe(delivery.error)}", style)
    if delivery.dead_letter is not None:
        text.append(f"  dead letter {short(delivery.dead_letter, tenant)}", "dim")
    return text
