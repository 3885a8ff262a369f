"""The demo: the scene on a live display, or line by line where there is no terminal."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, deque
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postbus.cli import output
from postbus.cli.options import CLOCK, TENANT, Json, examples
from postbus.cli.output import count, short
from postbus.cli.scene import LENGTH_S, SUBSCRIBERS, Picture, Scene, Screen
from postbus.model import Conflict
from postbus.store import Folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from rich.console import Console, RenderableType

    from postbus.bus.stats import SubscriptionState
    from postbus.model import Event

__all__ = ["commands"]

FAST_S = 3.0
EVENTS_SHOWN = 5
ROWS_MIN = 20
WIDTH_MAX = 80
COLUMNS_MIN = 70
FRAMES_A_SECOND = 10
MOODS = {"": "cyan", "good": "green", "bad": "red", "stopped": "yellow"}

commands = typer.Typer()


@commands.command(
    rich_help_panel="Start here",
    epilog=examples(
        """
        $ postbus demo
        $ postbus demo --data ./demo-data --seconds 60
        """
    ),
)
def demo(
    *,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="A new data folder. Default: a temporary one.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="About how long it takes.")] = LENGTH_S,
    fast: Annotated[bool, typer.Option("--fast", help=f"The same as --seconds {FAST_S:g}.")] = False,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Then take the events through Spark: to a lake, and into a report.")
    ] = False,
    json: Json = False,
) -> None:
    """Show Postbus at work: a small live scene that stops by itself.

    Emails arrive for an assistant. Three subscribers work on them; one fails, is retried and gives up; the program is
    stopped and started again with a fix; what had failed is replayed. The data stays, to be looked at afterwards.
    """
    if data is not None and Folder(data).exists():
        raise Conflict(f"{data} holds a store already", hint="name a new folder; the demo makes it")
    folder = Path(tempfile.mkdtemp(prefix="postbus-")) if data is None else data
    length_s = FAST_S if fast else seconds
    try:
        scene, picture = _play(folder, length_s, as_json=json)
    except BaseException:
        if data is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if json:
        output.document(_facts(scene, picture, folder))
        return
    if pipeline:
        _pipeline(folder)
    output.say("")
    output.say("That was it. The data is still there to look at; try next:")
    following = _next(folder, scene.poison_id)
    width = max(len(command) for command, _ in following)
    lines = [f"  {command:<{width}}  # {why}" for command, why in following]
    if max(map(len, lines)) > shutil.get_terminal_size().columns:
        lines = [f"  {command}" for command, _ in following]
    for line in lines:
        output.say(line)


def _pipeline(folder: Path) -> None:
    """Run two jobs on what the scene left, as anyone would; without Spark or Java they say what to install."""
    lake, page = str(folder / "lake"), str(folder / "report")
    output.say("")
    output.say("Now the same events on Spark: copied to a lake of Parquet files, then into a page with plots.")
    for words in (("archive", "--lake", lake), ("report", "--out", page)):
        output.say(f"$ postbus pipeline {' '.join(words)}")
        command = [sys.executable, "-m", "postbus", "pipeline", *words, "--data", str(folder)]
        if subprocess.run(command, check=False).returncode:  # noqa: S603 - this program itself
            return


def _play(folder: Path, length_s: float, *, as_json: bool) -> tuple[Scene, Picture]:
    screen, context = _screen(as_json=as_json)
    scene = Scene(folder, screen, CLOCK, length_s)

    async def run() -> Picture:
        with context, _hushed():
            return await scene.play()

    return scene, asyncio.run(run())


def _screen(*, as_json: bool) -> tuple[Screen, AbstractContextManager[Any]]:
    from rich.console import Console  # noqa: PLC0415 - as in output.py
    from rich.live import Live  # noqa: PLC0415

    if as_json:
        return Silence(), nullcontext()
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal or console.height < ROWS_MIN or console.width < COLUMNS_MIN:
        return Lines(), nullcontext()
    stage = Stage(console)
    return stage, Live(stage, console=console, refresh_per_second=FRAMES_A_SECOND)


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep the library's log off the screen: the scene tells the same in its own words."""
    logger = logging.getLogger("postbus")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


# --- afterwards -------------------------------------------------------------------------------------------------------


def _next(folder: Path, poison_id: str) -> list[tuple[str, str]]:
    program, place = _program(), _near(folder)
    story = short(poison_id, TENANT)
    return [
        (f"{program} tail --data {place}", "all of it"),
        (f"{program} trace {story} --data {place}", "one story"),
        (f"{program} dlq list --all --data {place}", "the dead"),
        (f"{program} stats --data {place}", "numbers"),
        (f"{program} verify --data {place}", "the proof"),
    ]


def _program() -> str:
    """Return how this program can be called again from where the user is."""
    called = Path(sys.argv[0])
    found = shutil.which("postbus")
    if called.name != "postbus" or (found and Path(found).resolve() == called.resolve()):
        return "postbus"
    return _near(called)


def _near(path: Path) -> str:
    """Return a path as it is shortest from here."""
    full = path.absolute()
    near = full.relative_to(Path.cwd()) if full.is_relative_to(Path.cwd()) else full
    return min(str(path), str(near), key=len)


def _facts(scene: Scene, picture: Picture, folder: Path) -> dict[str, Any]:
    return {
        "data": str(folder),
        "trace": scene.poison_id,
        "subscribers": [
            {
                "id": state.registered.id,
                "done": scene.done[state.registered.id],
                "failed_attempts": scene.failed[state.registered.id],
                "pending": state.pending,
                "dead": state.dead,
            }
            for state in picture.states
        ],
        "next": [command for command, _ in _next(folder, scene.poison_id)],
    }


# --- screens ----------------------------------------------------------------------------------------------------------


class Silence:
    """Shows nothing."""

    def say(self, sentence: str, *, mood: str = "") -> None:
        """See ``Screen.say``."""

    def happened(self, event: Event) -> None:
        """See ``Screen.happened``."""

    def look(self, picture: Picture) -> None:
        """See ``Screen.look``."""


class Lines:
    """One line for everything that happens, and where everybody is before each new sentence."""

    def __init__(self) -> None:
        self._start_s = CLOCK.monotonic_s()
        self._picture = Picture([], Counter(), Counter())

    def say(self, sentence: str, *, mood: str = "") -> None:  # noqa: ARG002 - no colours here
        """See ``Screen.say``."""
        for state in self._picture.states:
            todo, done = state.pending + state.running, self._picture.done[state.registered.id]
            facts = f"{todo} to do, {done} done, {state.waiting} to retry, {state.dead} dead"
            self._line(f"  {state.registered.id:<11} {facts}")
        self._line(f"--- {sentence}")

    def happened(self, event: Event) -> None:
        """See ``Screen.happened``."""
        self._line(f"{short(event.id, TENANT):<13} {event.topic:<15} {_summary(event)}")

    def look(self, picture: Picture) -> None:
        """See ``Screen.look``."""
        self._picture = picture

    def _line(self, text: str) -> None:
        output.say(f"{CLOCK.monotonic_s() - self._start_s:5.1f} s  {text}")


class Stage:
    """A live display: what happens now, where everybody is, the last events."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start_s = CLOCK.monotonic_s()
        self._sentence, self._mood = "", ""
        self._picture = Picture([], Counter(), Counter())
        self._events: deque[Event] = deque(maxlen=EVENTS_SHOWN)
        self._count = 0

    def say(self, sentence: str, *, mood: str = "") -> None:
        """See ``Screen.say``."""
        self._sentence, self._mood = sentence, mood

    def happened(self, event: Event) -> None:
        """See ``Screen.happened``."""
        self._events.append(event)
        self._count += 1

    def look(self, picture: Picture) -> None:
        """See ``Screen.look``."""
        self._picture = picture

    def __rich__(self) -> RenderableType:
        from rich.console import Group  # noqa: PLC0415 - as in output.py
        from rich.panel import Panel  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        style = MOODS[self._mood]
        closed = "office closed, " if self._mood == "stopped" else ""
        now = Panel(
            Text(self._sentence, style="bold"),
            title="postbus demo: emails for an assistant",
            title_align="left",
            subtitle=f"{closed}{CLOCK.monotonic_s() - self._start_s:.0f} s",
            subtitle_align="right",
            border_style=style,
            height=4,
            width=min(self._console.width, WIDTH_MAX),
        )
        heading = Text(f"\nthe last of {count(self._count, 'event')} in the log", style="dim")
        return Group(now, self._subscribers(), heading, *self._last_events())

    def _subscribers(self) -> RenderableType:
        from rich.table import Table  # noqa: PLC0415 - as in output.py

        drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("subscriber", "reads", "and"):
            drawn.add_column(column, no_wrap=True)
        for column in ("to do", "done", "retry", "dead"):
            drawn.add_column(column, justify="right", no_wrap=True, min_width=5)
        states = {state.registered.id: state for state in self._picture.states}
        for name, subscriber in SUBSCRIBERS.items():
            drawn.add_row(name, subscriber.pattern, subscriber.duty, *self._counts(name, states.get(name)))
        return drawn

    def _counts(self, name: str, state: SubscriptionState | None) -> list[RenderableType]:
        from rich.text import Text  # noqa: PLC0415 - as in output.py

        if state is None:
            return ["-"] * 4
        counts = (state.pending + state.running, self._picture.done[name], state.waiting, state.dead)
        styles = ("bold yellow", "green", "bold yellow", "bold red")
        return [Text(str(many), style if many else "dim") for many, style in zip(counts, styles, strict=True)]

    def _last_events(self) -> list[RenderableType]:
        from rich.text import Text  # noqa: PLC0415 - as in output.py

        rows: list[RenderableType] = []
        for event in reversed(self._events):
            row = Text(no_wrap=True, overflow="ellipsis")
            row.append(f"{short(event.id, TENANT):<13} ", "dim").append(f"{event.topic:<15} ", "cyan")
            rows.append(row.append(_summary(event)))
        return rows + [Text("")] * (EVENTS_SHOWN - len(rows))


def _summary(event: Event) -> str:
    facts = event.payload
    match event.topic:
        case "email.received":
            return f"{facts['from']}: {facts['subject']}"
        case "meeting.asked":
            return f"with {facts['with']} at {facts['time']}"
        case _:
            return f"to {facts['to']}: {facts['subject']}"
