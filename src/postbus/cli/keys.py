"""The commands of who may call the server: its keys."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postbus.cli import output
from postbus.cli.options import CLOCK, DATA, TENANT, Data, Json, age_of, examples, opened
from postbus.log import SqliteLog
from postbus.model import instant
from postbus.server.keys import Grant, Key, Scope, create_key, list_keys, revoke_key, rotate_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["commands"]

EVERY_TENANT = "*"

commands = typer.Typer(
    no_args_is_help=True,
    epilog=examples(
        """
        $ postbus keys create --scope publish --scope subscribe
        $ postbus keys list
        $ postbus keys revoke 0123456789ab
        """
    ),
)
KeyId = Annotated[str, typer.Argument(metavar="KEY", help="The key's id, as `postbus keys list` shows it.")]


@commands.callback()
def keys() -> None:
    """Who may call the server, for which tenant, and what each caller may do.

    From the first key on, `postbus serve` answers nobody without one. Changes count from the next request on.
    """


def with_log(data: str, work: Callable[[SqliteLog], Awaitable[Any]], *, create: bool = False) -> Any:
    """Open the log in the data folder for one piece of work."""

    async def run() -> Any:
        async with opened(data, create=create) as log:
            assert isinstance(log, SqliteLog)  # noqa: S101 - a data folder holds no other kind
            return await work(log)

    return asyncio.run(run())


def _grant(text: str) -> Grant:
    scope, _, pattern = text.partition("=")
    if scope not in {*Scope}:
        message = f"{scope!r} is no scope: publish, subscribe, ack or admin"
        raise typer.BadParameter(message, param_hint="'--scope'")
    return Grant(Scope(scope), pattern or ">")


@commands.command(
    epilog=examples(
        """
        $ postbus keys create --scope admin
        $ postbus keys create shop --tenant acme.prod --scope publish=acme.prod.orders --source shop
        $ postbus keys create worker --scope subscribe --scope ack --expires 90d
        $ postbus keys create prometheus --tenant '*' --scope admin
        """
    )
)
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it, for people.")] = "",
    *,
    scope: Annotated[
        list[str],
        typer.Option("--scope", metavar="SCOPE[=PATTERN]", help="publish, subscribe, ack or admin (all); repeatable."),
    ],
    tenant: Annotated[
        str, typer.Option("--tenant", metavar="NAME", help="Whose topics it sees; * makes a key of the operator.")
    ] = TENANT,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="AGE", help="When it ends, as in 12h or 90d. Default: never.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", help="What its events say they come from, whatever the caller says.")
    ] = None,
    trusted: Annotated[bool, typer.Option("--trusted", help="Mark its events as trusted text for agents.")] = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Make a key. It is shown once and cannot be shown again.

    A pattern restricts a scope to topics by their full names, as in publish=acme.prod.orders or ack='acme.prod.*'.
    """
    until = None if expires is None else CLOCK.now_us() + int(age_of(expires, "--expires") * 1e6)

    def work(log: SqliteLog) -> Awaitable[tuple[Key, str]]:
        return create_key(
            log,
            CLOCK,
            tenant=None if tenant == EVERY_TENANT else tenant,
            grants=[_grant(one) for one in scope],
            name=name,
            source=source,
            trusted=trusted,
            expires_at_us=until,
        )

    _show(*with_log(data, work, create=True), as_json=json)


@commands.command(
    "list",
    epilog=examples(
        """
        $ postbus keys list
        $ postbus keys list --json
        """
    ),
)
def list_(*, data: Data = DATA, json: Json = False) -> None:
    """List the keys, also those that have ended; secrets are not kept."""
    found: list[Key] = with_log(data, list_keys)
    if json:
        output.document({"keys": [_facts(key) for key in found]})
    elif found:
        rows = [
            (key.id, key.name, key.tenant or EVERY_TENANT, _state(key), _until(key), ", ".join(map(_scope, key.grants)))
            for key in found
        ]
        output.table(("KEY", "NAME", "TENANT", "STATE", "EXPIRES", "SCOPES"), rows)
    else:
        output.note("no keys: whoever reaches the server on this machine is the operator")


@commands.command(
    epilog=examples(
        """
        $ postbus keys revoke 0123456789ab
        """
    )
)
def revoke(key: KeyId, *, data: Data = DATA, json: Json = False) -> None:
    """End a key from the next request on."""
    revoked = with_log(data, lambda log: revoke_key(log, CLOCK, key))
    if json:
        output.document({"id": key, "revoked": revoked})
    else:
        output.say(f"revoked {key}" if revoked else f"{key} was revoked before")


@commands.command(
    epilog=examples(
        """
        $ postbus keys rotate 0123456789ab
        $ postbus keys rotate 0123456789ab --grace 1h
        """
    )
)
def rotate(
    key: KeyId,
    *,
    grace: Annotated[
        str | None, typer.Option("--grace", metavar="AGE", help="How long the old one goes on. Default: not at all.")
    ] = None,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Make a key that may do the same, and end the old one."""
    grace_s = 0.0 if grace is None else age_of(grace, "--grace")
    _show(*with_log(data, lambda log: rotate_key(log, CLOCK, key, grace_s)), as_json=json)


def _show(key: Key, text: str, *, as_json: bool) -> None:
    if as_json:
        output.document({**_facts(key), "key": text})
    else:
        output.say(text)
        output.note("keep it now: it is not stored and cannot be shown again")


def _scope(grant: Grant) -> str:
    return str(grant.scope) if grant.pattern == ">" else f"{grant.scope}={grant.pattern}"


def _state(key: Key) -> str:
    if key.revoked_at_us is not None:
        return "revoked"
    return "valid" if key.expires_at_us is None or key.expires_at_us > CLOCK.now_us() else "expired"


def _until(key: Key) -> str:
    return "never" if key.expires_at_us is None else f"{instant(key.expires_at_us):%Y-%m-%dT%H:%M:%SZ}"


def _facts(key: Key) -> dict[str, Any]:
    instants = {"created_at": key.created_at_us, "expires_at": key.expires_at_us, "revoked_at": key.revoked_at_us}
    return {
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "scopes": [_scope(grant) for grant in key.grants],
        "source": key.source,
        "trusted": key.trusted,
        **{name: None if value is None else instant(value) for name, value in instants.items()},
    }
