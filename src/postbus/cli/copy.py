"""The command that copies a log to another place."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from postbus.cli import output
from postbus.cli.options import Json, examples
from postbus.cli.output import count
from postbus.log.address import parse_address

__all__ = ["commands"]

PLACE = "a folder, nats://HOST:PORT[/PREFIX] or kafka://HOST:PORT[/PREFIX]"

commands = typer.Typer()


@commands.command(
    rich_help_panel="Store",
    epilog=examples(
        """
        $ postbus copy ./postbus-data nats://127.0.0.1:4222
        $ postbus copy kafka://127.0.0.1:9092/orders ./orders
        """
    ),
)
def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help=f"The log: {PLACE}.")],
    target: Annotated[str, typer.Argument(metavar="TO", help=f"An empty place, or an unfinished copy: {PLACE}.")],
    *,
    json: Json = False,
) -> None:
    """Copy a log from one place to another, and compare both.

    Streams keep their settings, events their offsets, times and native ids. A copy that was broken off goes on when the
    command is given again. Dead letters, messages to agents, subscriptions and inboxes belong to a node: they go from
    folder to folder with `postbus backup`, and not to a remote.
    """
    from postbus.log.copying import copy_log  # noqa: PLC0415 - only this command needs it

    with output.stages(pace=True) as advance:
        done = asyncio.run(copy_log(parse_address(source), parse_address(target), advance))
    if json:
        output.document(msgspec.to_builtins(done))
        return
    for name in done.left_out:
        output.note(f"{name} stays on its node")
    there = f", {count(done.known, 'event')} there already" if done.known else ""
    output.say(
        f"copied {count(done.events, 'event')} of {count(done.streams, 'stream')}{there}; both sides are the same"
    )
