"""What the pipeline shows on a terminal while it works: a line while Spark starts, bars with rate and time left."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from postbus.cli import output
from postbus.spark.errors import told
from postbus.spark.session import Settings, opened_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession
    from rich.progress import Task
    from rich.text import Text

__all__ = ["bar", "session", "spinner"]


@contextmanager
def session(settings: Settings) -> Iterator[SparkSession]:
    """Open a Spark session, saying so; what Spark raises comes out as one sentence."""
    with told():
        if settings.ui:
            output.note("starting Spark")
        with spinner("starting Spark") as done, opened_session(settings) as spark:
            done()
            if settings.ui and settings.remote is None:
                output.note(f"Spark's own page: {spark.sparkContext.uiWebUrl}")
            yield spark


@contextmanager
def spinner(text: str) -> Iterator[Callable[[], None]]:
    """Show that something is going on, until the function it gives is called."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415 - most commands draw nothing

    status = Console(stderr=True).status(text)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()


@contextmanager
def bar(label: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with how much is done, how fast, and how long it will take; gives the function (done, in all)."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415 - most commands draw nothing
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    class Rate(ProgressColumn):
        """How many a second."""

        def render(self, task: Task) -> Text:
            return Text(f"{int(task.speed):,} {unit}/s" if task.speed else "", style="dim")

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        Rate(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=1)
        yield lambda done, total: bars.update(task, completed=done, total=max(total, 1))
