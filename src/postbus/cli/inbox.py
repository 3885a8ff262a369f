"""The commands of an inbox: read, ack, wait, watch, send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus.cli import output
from postbus.cli.agents import AgentName
from postbus.cli.desk import Fill, at_desk, decoded, own
from postbus.cli.options import DATA, TENANT, ApiKey, Data, Json, Tenant, Url, address_of, age_of, examples

if TYPE_CHECKING:
    from postbus.cli.desk import Desk

__all__ = ["commands"]

POLL_MS = 30_000
SHOWN_CHARS_MAX = 2_000

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus inbox wait ann --timeout 60s
        $ postbus inbox read ann
        $ postbus inbox ack ann --through itm_7
        $ postbus inbox send ann 'look at order 17'
        """
    ),
)
After = Annotated[str | None, typer.Option(metavar="ITEM", help="Only what follows this item.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many items at most.")]


@commands.callback()
def inbox() -> None:
    """An agent's inbox: what it is owed, in order, until it is acked.

    On a data folder, reading first brings the inboxes up to date, and waiting and watching fill them as they go.
    """


def _line(item: dict[str, Any]) -> str:
    """Return an item on one line."""
    if item["expired"]:
        return f"{item['id']}  expired"
    payload = msgspec.json.encode(item["payload"]).decode()
    if len(payload) > SHOWN_CHARS_MAX:
        payload = f"{payload[:SHOWN_CHARS_MAX]}… (--json shows all)"
    acked = "  acked" if item["acked_at"] else ""
    return f"{item['id']}  {item['occurred_at'][:19]}Z  {item['topic']}  source={item['source']}{acked}  {payload}"


def _show(items: list[dict[str, Any]]) -> None:
    for item in items:
        output.say(_line(item))


@commands.command(
    epilog=examples(
        """
        $ postbus inbox read ann
        $ postbus inbox read ann --after itm_7 --limit 20
        $ postbus inbox read ann --acked --json
        """
    )
)
def read(
    agent: AgentName,
    *,
    after: After = None,
    limit: Limit = 100,
    acked: Annotated[bool, typer.Option("--acked", help="Acked items too; they are kept for a day.")] = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Print the items that are not acked, in their order. They stay until they are acked."""
    path = own(tenant, "agents", agent, "inbox")
    query = {"after": after, "limit": limit, "include_acked": "true" if acked else None}
    found = at_desk(lambda desk: desk.ask("GET", path, query=query), data, url, api_key, fill=Fill.FIRST)
    if json:
        output.document(found)
    elif found["items"]:
        _show(found["items"])
    else:
        output.note("nothing there")


@commands.command(
    epilog=examples(
        """
        $ postbus inbox ack ann itm_3 itm_5
        $ postbus inbox ack ann --through itm_7
        $ postbus inbox ack ann --all
        """
    )
)
def ack(
    agent: AgentName,
    items: Annotated[list[str] | None, typer.Argument(metavar="ITEM", help="Items or digests, by their ids.")] = None,
    *,
    through: Annotated[
        str | None, typer.Option(metavar="ITEM", help="Everything up to this item or digest, nothing that came later.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Everything that is there.")] = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Say that items are dealt with; prints how many became acked, 0 when they were before."""
    if bool(items) + (through is not None) + all_ != 1:
        raise typer.BadParameter("name items, or give --through or --all", param_hint="'ITEM'")
    body: dict[str, Any] = {"all": True} if all_ else {"through": through} if through is not None else {"items": items}
    path = own(tenant, "agents", agent, "inbox", "ack")
    done = at_desk(lambda desk: desk.ask("POST", path, body), data, url, api_key)
    if json:
        output.document(done)
    else:
        output.say(f"acked {output.count(done['acked'], 'item')}")


@commands.command(
    epilog=examples(
        """
        $ postbus inbox wait ann
        $ postbus inbox wait ann --timeout 10m --json
        """
    )
)
def wait(
    agent: AgentName,
    *,
    timeout: Annotated[str, typer.Option(metavar="AGE", help="How long to wait, as in 30s or 10m.")] = "30s",
    after: After = None,
    limit: Limit = 100,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Wait until something is not acked and print it; exit code 1 when the time is over first."""
    left_ms = int(age_of(timeout, "--timeout") * 1000)

    async def work(desk: Desk) -> Any:
        path, rest = own(tenant, "agents", agent, "inbox", "wait"), left_ms
        while True:
            step = min(rest, POLL_MS)
            query = {"timeout_ms": step, "after": after, "limit": limit}
            found = await desk.ask("GET", path, query=query, wait_s=step / 1000)
            rest -= step
            if found["items"] or rest <= 0:
                return found

    found = at_desk(work, data, url, api_key, fill=Fill.ON)
    if json:
        output.document(found)
    elif found["items"]:
        _show(found["items"])
    else:
        output.note(f"nothing came within {timeout}")
    if not found["items"]:
        raise typer.Exit(1)


@commands.command(
    epilog=examples(
        """
        $ postbus inbox watch ann
        $ postbus inbox watch ann --after itm_7 --json
        """
    )
)
def watch(
    agent: AgentName,
    *,
    after: After = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Print what is not acked, and then new items as they come, until it is interrupted; with `--json` one per line."""

    async def work(desk: Desk) -> None:
        path, place = own(tenant, "agents", agent, "inbox", "wait"), after
        while True:
            query = {"timeout_ms": POLL_MS, "after": place}
            found = await desk.ask("GET", path, query=query, wait_s=POLL_MS / 1000)
            for item in found["items"]:
                place = item["id"]
                if json:
                    output.document(item)
                else:
                    output.say(_line(item))

    at_desk(work, data, url, api_key, fill=Fill.ON)


@commands.command(
    epilog=examples(
        """
        $ postbus inbox send ann 'look at order 17'
        $ postbus inbox send ann '{"order": 17}' --value --sender bob
        """
    )
)
def send(
    agent: AgentName,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="The text.")],
    *,
    value: Annotated[bool, typer.Option("--value", help="The message is a JSON value, not text.")] = False,
    sender: Annotated[str | None, typer.Option(help="Who it says it is from. Default: operator.")] = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Put a message straight into an agent's inbox."""
    body: dict[str, Any] = {"message": decoded(message, "MESSAGE") if value else message}
    if sender is not None or url is None:
        body["sender"] = sender or "operator"
    path = own(tenant, "agents", agent, "inbox", "messages")
    sent = at_desk(lambda desk: desk.ask("POST", path, body), data, url, api_key)
    if json:
        output.document(sent)
    else:
        output.say(f"sent {sent['item']}; its receipts: postbus inbox receipts {sent['event']}")


@commands.command(
    epilog=examples(
        """
        $ postbus inbox entries ann
        """
    )
)
def entries(
    agent: AgentName,
    *,
    limit: Limit = 100,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Print the digests, and the items that are in none; acking a digest acks what it shows."""
    path = own(tenant, "agents", agent, "inbox", "entries")
    query = {"limit": limit}
    _show_entries(
        at_desk(lambda desk: desk.ask("GET", path, query=query), data, url, api_key, fill=Fill.FIRST), as_json=json
    )


@commands.command(
    epilog=examples(
        """
        $ postbus inbox flush ann
        """
    )
)
def flush(
    agent: AgentName,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show what waits in digests now, without waiting for their windows; prints the entries."""
    path = own(tenant, "agents", agent, "inbox", "flush")
    _show_entries(at_desk(lambda desk: desk.ask("POST", path), data, url, api_key, fill=Fill.FIRST), as_json=json)


def _show_entries(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.document(found)
        return
    for digest in found["digests"]:
        output.say(f"{digest['id']}  {digest['summary']}")
    _show(found["items"])
    if not found["digests"] and not found["items"]:
        output.note("nothing there")


@commands.command(
    epilog=examples(
        """
        $ postbus inbox receipts journal/0/17
        """
    )
)
def receipts(
    event: Annotated[str, typer.Argument(metavar="EVENT", help="An event's address, as publish and send print it.")],
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show how far an event has come in each inbox: accepted, delivered, read, acked, or expired."""
    path = f"/receipts/{address_of(event, tenant)}"
    found = at_desk(lambda desk: desk.ask("GET", path), data, url, api_key)
    if json:
        output.document(found)
    elif found["receipts"]:
        output.table(
            ("AGENT", "ITEM", "STATE"), [(one["agent"], one["item"], one["state"]) for one in found["receipts"]]
        )
    else:
        output.note("it is in no inbox")
