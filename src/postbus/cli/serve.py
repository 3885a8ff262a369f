"""The command that serves a data folder over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from postbus import __version__
from postbus.broker import Bridge, Liveness
from postbus.broker.subjects import plugin_health
from postbus.cli import output
from postbus.cli.options import DATA, Data, Json, examples, folder_of, shown_place
from postbus.model import Durability, Invalid, NotFound, instant
from postbus.store.folder import Folder, ServeLock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from postbus.server.hub import Hub
    from postbus.server.serving import Serving

__all__ = ["commands"]

HOST, PORT = "127.0.0.1", 7766
PORT_MAX = 65_535
GRACE_S = 30
FILES_MAX = 1 << 20

commands = typer.Typer()


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the command was asked for."""

    data: str
    host: str
    port: int
    unix: str | None
    hosts: frozenset[str]
    origins: frozenset[str]
    durability: str
    grace_s: int
    broker: str | None
    plugins: tuple[str, ...]
    json: bool


@commands.command(
    rich_help_panel="Server",
    epilog=examples(
        """
        $ postbus serve
        $ postbus serve --data /var/lib/postbus --port 7766
        $ postbus serve --unix /run/postbus/socket
        $ postbus serve --host 0.0.0.0 --allow-host bus.example
        $ postbus serve --broker nats://127.0.0.1:4222 --plugin browser
        """
    ),
)
def serve(
    *,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = HOST,
    port: Annotated[int, typer.Option("--port", min=0, max=PORT_MAX, help="The port; 0 takes a free one.")] = PORT,
    unix: Annotated[
        str | None, typer.Option("--unix", metavar="PATH", help="Listen on this Unix socket instead of a port.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="A name this server goes by; repeatable.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", metavar="URL", help="An origin whose pages may call it; repeatable."),
    ] = None,
    durability: Annotated[
        str, typer.Option("--durability", help="full: survives a power cut. relaxed: survives a crash of the process.")
    ] = "full",
    grace: Annotated[int, typer.Option("--grace", min=1, help="Seconds that requests have to finish at the end.")] = (
        GRACE_S
    ),
    broker: Annotated[
        str | None,
        typer.Option("--broker", metavar="URL", help="A NATS server to hear plugins and `taskflow.resume` on."),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option("--plugin", metavar="NAME", help="A plugin that has to be well for /readyz; repeatable."),
    ] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request (never its payload).")] = False,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Serve the bus over HTTP, until SIGTERM or Ctrl-C.

    Without keys everybody on this machine is the operator, and only this machine is listened to. As soon as a key
    exists (`postbus keys create`), callers need one, and other addresses may be listened on.

    Logs go to stderr, as JSON when that is no terminal. At the end no new request is taken, those in flight are
    finished, readers of streams are told, and the store is closed. A second signal ends at once.
    """
    if durability not in {*Durability}:
        raise Invalid(f"durability is 'full' or 'relaxed', not {durability!r}")
    if plugin and broker is None:
        raise Invalid("plugins are heard of by a broker", hint="add --broker nats://HOST:4222")
    for name in plugin or ():
        plugin_health(name)
    wish = Wish(
        data=data,
        host=host,
        port=port,
        unix=unix,
        hosts=frozenset(name.lower() for name in allow_host or ()),
        origins=frozenset(origin.lower().rstrip("/") for origin in allow_origin or ()),
        durability=durability,
        grace_s=grace,
        broker=broker,
        plugins=tuple(plugin or ()),
        json=json,
    )
    log_to_stderr(access=access_log)
    _take_files()
    import uvloop  # noqa: PLC0415 - only this command needs it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(wish))


async def _serve(wish: Wish) -> None:
    from postbus.server.edge import Edge  # noqa: PLC0415 - only this command needs a web server
    from postbus.server.hub import Hub  # noqa: PLC0415
    from postbus.server.serving import Serving, listen, listen_unix  # noqa: PLC0415

    folder = Folder(folder_of(wish.data))
    folder.create()
    lock = ServeLock(folder)
    lock.acquire()
    try:
        hub = await Hub.open(wish.data, durability=wish.durability)
        try:
            made = listen_unix(wish.unix) if wish.unix is not None else listen(wish.host, wish.port)
            edge = Edge(hosts=wish.hosts | {wish.host.lower()}, origins=wish.origins)
            serving = Serving(hub, [made], edge=edge, grace_s=wish.grace_s)
            try:
                async with _heard(wish, hub):
                    await serving.start()
                    await _until_told(wish, hub, serving)
            finally:
                await serving.stop()
        finally:
            await hub.close()
    finally:
        lock.release()
    logging.getLogger("postbus.server").info("stopped")


@contextlib.asynccontextmanager
async def _heard(wish: Wish, hub: Hub) -> AsyncIterator[None]:
    """Listen to the broker, if there is one: to plugins for /readyz, and to what lets a flow go on."""
    if wish.broker is None:
        yield
        return
    try:
        from postbus.broker.nats import NatsBroker  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        raise NotFound("nats-py is not installed", hint="pip install 'postbus[nats]'") from error
    broker = NatsBroker(wish.broker)
    broker.breaker.listen(lambda change: hub.metrics.breaker(change.name, change.state))
    await broker.start()
    try:
        async with Liveness(broker) as liveness, Bridge(broker, hub.log):
            hub.troubles |= {name: partial(liveness.plugin_trouble, name) for name in wish.plugins}
            yield
    finally:
        await broker.close()


async def _until_told(wish: Wish, hub: Hub, serving: Serving) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def tell() -> None:
        if told.is_set():
            os._exit(130)  # asked twice: what is acknowledged is on disk, the rest is not waited for
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell)
    url = f"unix:{wish.unix}" if wish.unix is not None else f"http://{_shown(wish.host)}:{serving.port}"
    _announce(wish, url, keys=hub.keys.needed)
    await told.wait()
    logging.getLogger("postbus.server").info("stopping")


def _take_files() -> None:
    """Allow as many open connections as the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, FILES_MAX) if most > 0 else FILES_MAX, most))


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _announce(wish: Wish, url: str, *, keys: bool) -> None:
    logging.getLogger("postbus.server").info("serving on %s", url)
    if wish.json:
        output.document(
            {"url": url, "pid": os.getpid(), "data": shown_place(wish.data), "keys": keys, "version": __version__}
        )
        return
    output.say(f"Postbus {__version__} serves {shown_place(wish.data)} on {url}")
    if wish.unix is None:
        output.say(f"  docs  {url}/docs")
    who = "needed" if keys else "none yet: everybody on this machine is the operator (postbus keys create)"
    output.say(f"  keys  {who}")
    output.say("  stop  Ctrl-C")


# --- logs -------------------------------------------------------------------------------------------------------------


class _Lines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = {
            "at": instant(int(record.created * 1e6)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(facts, enc_hook=str).decode()


class _Text(logging.Formatter):
    """A line for people."""

    def format(self, record: logging.LogRecord) -> str:
        more = "".join(f" {name}={value}" for name, value in getattr(record, "facts", {}).items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower()} {record.getMessage()}{more}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return "\n".join(output.safe(part) for part in line.splitlines())


def log_to_stderr(*, access: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Text() if sys.stderr.isatty() else _Lines())
    root = logging.getLogger("postbus")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(logging.INFO)
    logging.getLogger("postbus.access").setLevel(logging.INFO if access else logging.WARNING)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).handlers[:] = [handler]
        logging.getLogger(name).propagate = False
        logging.getLogger(name).setLevel(logging.ERROR)
