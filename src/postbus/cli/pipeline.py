"""The commands of the data pipeline on Spark, put together in the order in which help shows them."""

from __future__ import annotations

from postbus.cli import pipeline_archive, pipeline_feed, pipeline_look  # noqa: F401 - they add their commands
from postbus.cli.pipeline_options import Master, Memory, Remote, Ui, commands

__all__ = ["Master", "Memory", "Remote", "Ui", "commands"]
