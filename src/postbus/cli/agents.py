"""The commands of agents: who has an inbox, where it is woken, and what comes in."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from postbus.cli import output
from postbus.cli.desk import at_desk, decoded, own
from postbus.cli.options import DATA, TENANT, ApiKey, Data, Json, Tenant, Url, Yes, age_of, examples, start_of
from postbus.model import Start, instant
from postbus.topics import check_id, check_pattern

if TYPE_CHECKING:
    from postbus.cli.desk import Desk

__all__ = ["AgentName", "commands"]

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus agents create ann
        $ postbus agents subscribe ann 'order.*'
        $ postbus agents list --json
        """
    ),
)
AgentName = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")]
SubscriptionName = Annotated[str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription's id.")]


@commands.callback()
def agents() -> None:
    """Agents: each has one inbox, subscriptions that fill it, and targets at which it is woken.

    Inboxes are filled by whatever runs on the data folder: `postbus serve`, or `postbus inbox watch` for as long as it
    does.
    """


# --- agents -----------------------------------------------------------------------------------------------------------


def _targets(
    webhook: str | None, secret_env: str | None, command: str | None, tmux: str | None, target: list[str]
) -> list[dict[str, Any]]:
    """Return the targets that options name; each needs an id of its own when there are several."""
    found: list[dict[str, Any]] = []
    if webhook is not None:
        found.append({"kind": "webhook", "url": webhook} | ({} if secret_env is None else {"secret_env": secret_env}))
    elif secret_env is not None:
        raise typer.BadParameter("goes with --webhook", param_hint="'--secret-env'")
    if command is not None:
        try:
            found.append({"kind": "command", "argv": shlex.split(command)})
        except ValueError as error:
            raise typer.BadParameter(f"{command!r}: {error}", param_hint="'--command'") from error
    if tmux is not None:
        found.append({"kind": "tmux", "pane": tmux})
    for one in found if len(found) > 1 else []:
        one["id"] = one["kind"]
    return [*found, *(decoded(text, "--target") for text in target)]


@commands.command(
    epilog=examples(
        """
        $ postbus agents create ann
        $ postbus agents create ann --webhook https://example.com/wake --secret-env ANN_SECRET
        $ postbus agents create bob --command 'python wake_bob.py'
        $ postbus agents create cat --target '{"kind": "tmux", "pane": "cat:0.0", "min_unacked": 5}'
        """
    )
)
def create(
    agent: AgentName,
    *,
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Wake it by a signed POST to this address.")
    ] = None,
    secret_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable with the secret that signs it.")
    ] = None,
    command: Annotated[str | None, typer.Option(metavar="WORDS", help="Wake it by running this program.")] = None,
    tmux: Annotated[str | None, typer.Option(metavar="PANE", help="Wake it by typing into this tmux pane.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(metavar="JSON", help="A target with all its settings; repeatable.")
    ] = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Make an agent with an empty inbox; without a target it is never woken and asks by itself."""
    check_id(agent, "agent")
    namespace, name = tenant.split(".")
    targets = _targets(webhook, secret_env, command, tmux, target or [])
    body = {"id": agent, "namespace": namespace, "tenant": name} | ({"targets": targets} if targets else {})
    made = at_desk(lambda desk: desk.ask("POST", "/agents", body), data, url, api_key, create=True)
    if json:
        output.document(made)
    else:
        output.say(f"made {agent}, woken by {_kinds(made)}")


def _kinds(agent: dict[str, Any]) -> str:
    return ", ".join(target["kind"] for target in agent["targets"])


@commands.command(
    "list",
    epilog=examples(
        """
        $ postbus agents list
        $ postbus agents list --tenant acme.prod --json
        """
    ),
)
def list_(
    *, tenant: Tenant = TENANT, data: Data = DATA, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """List the agents of a tenant and how many items wait in their inboxes."""
    namespace, name = tenant.split(".")

    async def work(desk: Desk) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        query: dict[str, Any] = {"namespace": namespace, "tenant": name, "limit": 1000}
        while True:
            page = await desk.ask("GET", "/agents", query=query)
            found += page["agents"]
            if page["next"] is None:
                return found
            query["after"] = page["next"]

    found = at_desk(work, data, url, api_key)
    if json:
        output.document({"agents": found})
    elif found:
        rows = [(agent["id"], agent["unacked"], _kinds(agent), agent["created_at"][:19] + "Z") for agent in found]
        output.table(("AGENT", "UNACKED", "WOKEN BY", "MADE"), rows)
    else:
        output.note("no agents yet; `postbus agents create` makes one")


@commands.command(
    epilog=examples(
        """
        $ postbus agents show ann
        $ postbus agents show ann --json
        """
    )
)
def show(
    agent: AgentName,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show an agent and its subscriptions."""

    async def work(desk: Desk) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for parts in ((), ("subscriptions",)):
            found |= await desk.ask("GET", own(tenant, "agents", agent, *parts))
        return found

    found = at_desk(work, data, url, api_key)
    if json:
        output.document(found)
        return
    output.say(f"{agent} of {tenant}: {output.count(found['unacked'], 'item')} not acked")
    for target in found["targets"]:
        facts = [f"{name}={value}" for name, value in target.items() if name != "kind"]
        output.say(f"  woken by {target['kind']} {' '.join(facts)}".rstrip())
    for one in found["subscriptions"]:
        output.say(f"  subscribed to {_asked(one)} as {one['id']}")


@commands.command(
    epilog=examples(
        """
        $ postbus agents remove ann
        $ postbus agents remove ann --yes
        """
    )
)
def remove(
    agent: AgentName,
    *,
    yes: Yes = False,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Remove an agent with its inbox, subscriptions and timers. Events stay in the log."""
    path = own(tenant, "agents", agent)
    found = at_desk(lambda desk: desk.ask("GET", path), data, url, api_key)
    if not yes:
        output.confirm(f"Remove {agent} and its inbox with {output.count(found['unacked'], 'unacked item')}?")
    at_desk(lambda desk: desk.ask("DELETE", path), data, url, api_key)
    if json:
        output.document({"removed": found})
    else:
        output.say(f"removed {agent}")


@commands.command(
    epilog=examples(
        """
        $ postbus agents targets ann
        $ postbus agents targets ann --json
        """
    )
)
def targets(
    agent: AgentName,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show how an agent's targets stand, and how many wakes were made and avoided."""
    found = at_desk(lambda desk: desk.ask("GET", own(tenant, "agents", agent, "targets")), data, url, api_key)
    if json:
        output.document(found)
        return
    rows = [
        (
            one["id"],
            one["kind"],
            one["state"],
            one["items"],
            one["wakes"],
            sum(one["avoided"].values()),
            one["why"] or "-",
        )
        for one in found["targets"]
    ]
    output.table(("TARGET", "KIND", "STATE", "ITEMS", "WAKES", "AVOIDED", "WHY"), rows, cut=True)


@commands.command(
    epilog=examples(
        """
        $ postbus agents revive ann
        $ postbus agents revive ann webhook
        """
    )
)
def revive(
    agent: AgentName,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The target's id.")] = "default",
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Put a target that went offline back to work."""
    path = own(tenant, "agents", agent, "targets", target, "revive")
    done = at_desk(lambda desk: desk.ask("POST", path), data, url, api_key)
    if json:
        output.document(done)
    else:
        output.say(f"{target} is back" if done["revived"] else f"{target} was not offline")


# --- subscriptions ----------------------------------------------------------------------------------------------------


def _asked(one: dict[str, Any]) -> str:
    return f"{one['pattern']} with {msgspec.json.encode(one['filter']).decode()}" if one["filter"] else one["pattern"]


def _start(start: Start) -> dict[str, Any]:
    facts = {"offset": start.offset, "time": None if start.time_us is None else instant(start.time_us)}
    return {"policy": start.policy} | {name: value for name, value in facts.items() if value is not None}


@commands.command(
    epilog=examples(
        """
        $ postbus agents subscribe ann 'order.*'
        $ postbus agents subscribe ann 'issue.>' --filter '{"metadata": {"repo": "a/b"}}' --start earliest
        $ postbus agents subscribe ann 'issue.*' --digest-by metadata.resource
        $ postbus agents subscribe ann 'run.*' --until-event '{"payload": {"state": "done"}}' --grace 10m
        """
    )
)
def subscribe(
    agent: AgentName,
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="Topics: * is one token, > one or more at the end.")
    ],
    *,
    name: Annotated[str | None, typer.Option("--id", metavar="ID", help="What to call it. Default: made up.")] = None,
    filter_: Annotated[
        str | None, typer.Option("--filter", metavar="JSON", help="Only events that it matches; see `filter test`.")
    ] = None,
    start: Annotated[
        str, typer.Option(metavar="START", help="earliest, latest, an instant, or an offset of one stream.")
    ] = "latest",
    digest_by: Annotated[
        str | None, typer.Option(metavar="PATH", help="Put bursts together by this, as in metadata.resource.")
    ] = None,
    digest_window: Annotated[str, typer.Option(metavar="AGE", help="How long a burst is collected.")] = "30s",
    digest_items: Annotated[int, typer.Option(help="How many items show it without waiting.")] = 20,
    until: Annotated[str | None, typer.Option(metavar="INSTANT", help="When it ends.")] = None,
    until_event: Annotated[
        str | None, typer.Option(metavar="JSON", help="It ends after an event that this filter matches.")
    ] = None,
    grace: Annotated[str, typer.Option(metavar="AGE", help="How long it goes on after that event.")] = "0s",
    engine: Annotated[
        Literal["live", "spark"] | None, typer.Option(help="Who fills the inbox; without it the tenant's.")
    ] = None,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Have events that match go to an agent's inbox, each once however many subscriptions match it."""
    check_pattern(pattern)
    body: dict[str, Any] = {"pattern": pattern, "start": _start(start_of(start, "--start"))}
    if engine is not None:
        body["engine"] = engine
    if name is not None:
        body["id"] = name
    if filter_ is not None:
        body["filter"] = decoded(filter_, "--filter")
    if digest_by is not None:
        window_s = age_of(digest_window, "--digest-window")
        body["digest"] = {"by": digest_by, "window_s": window_s, "items": digest_items}
    if until is not None or until_event is not None:
        ends: dict[str, Any] = {"grace_s": age_of(grace, "--grace")}
        ends |= {} if until is None else {"at": until}
        ends |= {} if until_event is None else {"on_terminal": decoded(until_event, "--until-event")}
        body["cleanup"] = ends
    path = own(tenant, "agents", agent, "subscriptions")
    made = at_desk(lambda desk: desk.ask("POST", path, body), data, url, api_key)
    if json:
        output.document(made)
    else:
        output.say(f"subscribed {agent} to {_asked(made)} as {made['id']}")


@commands.command(
    epilog=examples(
        """
        $ postbus agents subscriptions ann
        $ postbus agents subscriptions ann --json
        """
    )
)
def subscriptions(
    agent: AgentName,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List the subscriptions of an agent."""
    path = own(tenant, "agents", agent, "subscriptions")
    found = at_desk(lambda desk: desk.ask("GET", path), data, url, api_key)
    if json:
        output.document(found)
    elif found["subscriptions"]:
        rows = [
            (
                one["id"],
                one["pattern"],
                one["start"]["policy"],
                one["engine"],
                (one["ends_at"] or "never")[:19],
                _asked(one),
            )
            for one in found["subscriptions"]
        ]
        output.table(("SUBSCRIPTION", "PATTERN", "START", "ENGINE", "ENDS", "ASKS FOR"), rows, cut=True)
    else:
        output.note(f"{agent} is subscribed to nothing; `postbus agents subscribe` changes that")


@commands.command(
    epilog=examples(
        """
        $ postbus agents unsubscribe ann ann.3f2a
        """
    )
)
def unsubscribe(
    agent: AgentName,
    subscription: SubscriptionName,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """End a subscription; the items it brought stay."""
    path = own(tenant, "agents", agent, "subscriptions", subscription)
    at_desk(lambda desk: desk.ask("DELETE", path), data, url, api_key)
    if json:
        output.document({"unsubscribed": subscription})
    else:
        output.say(f"ended {subscription}")


@commands.command(
    epilog=examples(
        """
        $ postbus agents reset ann orders --start earliest
        $ postbus agents reset ann orders --start 2026-01-31T12:00:00Z
        """
    )
)
def reset(
    agent: AgentName,
    subscription: SubscriptionName,
    *,
    start: Annotated[str, typer.Option(metavar="START", help="earliest, latest, an instant, or an offset.")],
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Move a subscription; items that an inbox was given once are never given again, not even acked ones."""
    path = own(tenant, "agents", agent, "subscriptions", subscription, "reset")
    body = {"start": _start(start_of(start, "--start"))}
    moved = at_desk(lambda desk: desk.ask("POST", path, body), data, url, api_key)
    if json:
        output.document(moved)
    else:
        output.say(f"moved {subscription} to {start}")


@commands.command(
    epilog=examples(
        """
        $ postbus agents lag ann orders
        """
    )
)
def lag(
    agent: AgentName,
    subscription: SubscriptionName,
    *,
    tenant: Tenant = TENANT,
    data: Data = DATA,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show how many events a subscription has not looked at yet, by topic."""
    path = own(tenant, "agents", agent, "subscriptions", subscription, "lag")
    found = at_desk(lambda desk: desk.ask("GET", path), data, url, api_key)
    if json:
        output.document(found)
    else:
        output.table(("TOPIC", "LAG"), [(one["topic"], one["lag"]) for one in found["topics"]])
