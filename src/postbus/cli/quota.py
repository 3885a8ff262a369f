"""The commands of what each tenant may use of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from postbus.cli import output
from postbus.cli.keys import with_log
from postbus.cli.options import DATA, Data, Json, examples
from postbus.server.quotas import EVERYBODY, Quota, list_quotas, set_quota

if TYPE_CHECKING:
    from postbus.log import SqliteLog

__all__ = ["commands"]

NO_BOUND = "none"

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus quota list
        $ postbus quota set acme.prod --publish-per-s 100 --retained-bytes 1000000000
        $ postbus quota clear acme.prod
        """
    ),
)
WhichTenant = Annotated[str, typer.Argument(metavar="TENANT", help="As in local.default; * is everybody else.")]


@commands.callback()
def quota() -> None:
    """What a tenant may use of the server; more is refused with 429 or 507. In force within a second."""


def _whole(text: str | None, option: str) -> int | msgspec.UnsetType | None:
    if text is None:
        return msgspec.UNSET
    if text == NO_BOUND:
        return None
    if not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(f"{text!r} is neither a number nor {NO_BOUND}", param_hint=f"'{option}'")
    return int(text)


def _bound(name: str, meaning: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, metavar="N", help=f"{meaning}; {NO_BOUND}: no bound.")
    return option


@commands.command(
    "set",
    epilog=examples(
        """
        $ postbus quota set acme.prod --publish-per-s 100
        $ postbus quota set '*' --topics 50 --sse-connections 20
        """
    ),
)
def set_(
    tenant: WhichTenant,
    *,
    publish_per_s: Annotated[str | None, _bound("--publish-per-s", "Events published in a second")] = None,
    topics: Annotated[str | None, _bound("--topics", "Topics")] = None,
    subscriptions: Annotated[str | None, _bound("--subscriptions", "Subscriptions")] = None,
    sse_connections: Annotated[str | None, _bound("--sse-connections", "Open SSE connections")] = None,
    retained_bytes: Annotated[str | None, _bound("--retained-bytes", "Bytes of events kept")] = None,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Set bounds of a tenant; those that are not given stay as they are."""
    given = {
        "publish_per_s": _whole(publish_per_s, "--publish-per-s"),
        "topics": _whole(topics, "--topics"),
        "subscriptions": _whole(subscriptions, "--subscriptions"),
        "sse_connections": _whole(sse_connections, "--sse-connections"),
        "retained_bytes": _whole(retained_bytes, "--retained-bytes"),
    }

    async def work(log: SqliteLog) -> Quota:
        old = (await list_quotas(log)).get(tenant) or Quota()
        changes = {name: value for name, value in given.items() if value is not msgspec.UNSET}
        new = msgspec.structs.replace(old, **changes)
        await set_quota(log, tenant, new)
        return new

    made: Quota = with_log(data, work, create=True)
    _show({tenant: made}, as_json=json)


@commands.command(
    "list",
    epilog=examples(
        """
        $ postbus quota list
        """
    ),
)
def list_(*, data: Data = DATA, json: Json = False) -> None:
    """List the quotas that were set, and what holds for everybody else."""
    found: dict[str, Quota] = with_log(data, list_quotas)
    _show({EVERYBODY: Quota()} | found, as_json=json)


@commands.command(
    epilog=examples(
        """
        $ postbus quota clear acme.prod
        """
    )
)
def clear(tenant: WhichTenant, *, data: Data = DATA, json: Json = False) -> None:
    """Take away what was set for a tenant."""
    with_log(data, lambda log: set_quota(log, tenant, None))
    if json:
        output.document({"tenant": tenant})
    else:
        output.say(f"{tenant} has what everybody has")


def _show(found: dict[str, Quota], *, as_json: bool) -> None:
    if as_json:
        output.document({"quotas": {tenant: msgspec.structs.asdict(quota) for tenant, quota in found.items()}})
        return
    columns = ("TENANT", *(name.upper().replace("_", " ") for name in Quota.__struct_fields__))
    rows = [
        (tenant, *(NO_BOUND if value is None else f"{value:,}" for value in msgspec.structs.astuple(quota)))
        for tenant, quota in found.items()
    ]
    output.table(columns, rows)
