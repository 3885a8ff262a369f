"""The file list is the architecture: who may import whom, how long things may get, what the house forbids.

The tables below are the rules. Every checker takes one source file and returns its complaints, so that the second half
of this file can show, on small bad sources, that each of them is able to fail.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "src/postbus/"

# --- the tables -------------------------------------------------------------------------------------------------------

# What each room may import from the package. A room may always import itself. A new room needs a row here.
_CORE = {"model", "clock", "topics", "strict_json", "envelope"}
_EDGE = {"strict_json", "envelope"}
_BELOW_BUS = _CORE | {"filters", "store", "log", "schemas", "delivery", "broker"}
MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "clock": set(),
    "topics": {"model"},
    "strict_json": {"model"},
    "envelope": {"model", "topics", "strict_json", "clock"},
    "schedule": {"model", "envelope"},
    "filters": {"model", "topics"} | _EDGE,
    "store": {"model", "clock"},
    "log": {"model", "topics", "store", "clock", "strict_json", "envelope"},
    "schemas": {"model", "topics", "strict_json", "store", "log"},
    "delivery": {"model", "clock", "topics", "log", "store"},
    "broker": {"model", "clock", "topics", "store", "log", "delivery"} | _EDGE,
    "bus": _BELOW_BUS,
    "outside": {"model"},
    "inbox": {"model", "schedule", "filters", "store", "log", "bus", "outside", "clock", "topics", "delivery"} | _EDGE,
    "sources": {"model", "schedule", "bus", "inbox", "outside", "clock", "topics", "store", "log", "delivery"} | _EDGE,
    "kernel": {"model", "clock", "topics", "schedule", "log", "schemas", "bus", "outside"} | _EDGE,
    "server": {"model", "clock", "topics", "filters", "store", "log", "bus", "inbox", "sources", "schemas"} | _EDGE,
    "client": {"model", "clock"} | _EDGE,
    "mcp": {"model", "client"} | _EDGE,
    "spark": {"model", "clock", "topics", "filters", "store", "log", "schemas", "inbox"} | _EDGE,
    "testing": {"model", "clock", "delivery", "bus"} | _EDGE,
    "sync": {"model", "bus"},
    "__init__": _BELOW_BUS | {"bus", "inbox", "client"},
    "__main__": {"cli"},
}
MAY_IMPORT["cli"] = {*MAY_IMPORT}  # the command line may import anything

# Where each package from outside may be imported: path prefixes under src/postbus.
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "msgspec": ("",),
    "apsw": ("store/", "log/sqlite", "log/kafka/index", "delivery/", "broker/", "bus/", "inbox/", "sources/", "spark/"),
    "cronsim": ("schedule.py",),
    "httpx2": ("client", "outside/", "inbox/", "sources/", "kernel/"),
    "jsonschema_rs": ("schemas",),
    "prometheus_client": ("server/",),
    "re2": ("filters", "schemas"),
    "standardwebhooks": ("inbox/", "sources/"),
    "starlette": ("server/", "kernel/extensions/http/"),
    "uvicorn": ("server/", "cli/", "kernel/extensions/http/"),
    "uvloop": ("server/", "cli/"),
    "cryptography": ("kernel/vault",),
    "yaml": ("kernel/",),
    "typer": ("cli/",),
    "rich": ("cli/",),
    "nats": ("log/jetstream", "broker/nats"),
    "confluent_kafka": ("log/kafka",),
    "mcp": ("mcp.py", "kernel/extensions/mcp/"),
    "pyspark": ("spark/", "cli/pipeline", "cli/spark_bars"),
    "py4j": ("spark/",),
    "pyarrow": ("spark/",),
    "adbc_driver_sqlite": ("spark/",),
    "adbc_driver_manager": ("spark/",),
}
FORBIDDEN_STDLIB = {"sqlite3": "its SQLite is inside the range of a known WAL corruption bug; use apsw"}

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
# "path" or "path::Class.function" -> why it is longer than that. A reason that is no longer needed fails.
LONG: dict[str, str] = {
    "src/postbus/model.py": "every word in one place: records, enums and errors, no behaviour to split off",
}

# Time and ids come from clock.py. "path prefix::name" -> why not there. A reason that is no longer needed fails.
CLOCK = PACKAGE + "clock.py"
OWN_TIME: dict[str, str] = {
    "src/postbus/store/::random": "jitter of the busy handler, so that two processes do not retry in step",
    "src/postbus/delivery/backoff.py::random": "jitter of retries, so that failures do not come back in step",
}
TIME_CALLS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
ID_MODULES = {"uuid", "random", "secrets"}

FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers"}
UNFINISHED = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME")) + r")\b")

# --- one source file --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def inside(self) -> PurePosixPath:
        return PurePosixPath(self.path).relative_to(PACKAGE)

    @property
    def room(self) -> str:
        return self.inside.parts[0].removesuffix(".py")

    def imports(self) -> Iterator[tuple[int, str]]:
        """Every import as (line, absolute dotted name), wherever in the file it stands."""
        package = ("postbus", *self.inside.parts[:-1])
        for node in ast.walk(self.tree):
            match node:
                case ast.Import():
                    yield from ((node.lineno, alias.name) for alias in node.names)
                case ast.ImportFrom():
                    base = package[: len(package) - node.level + 1] if node.level else ()
                    module = ".".join((*base, *([node.module] if node.module else [])))
                    yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
                case ast.Call(
                    func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    yield node.lineno, name

    def functions(self) -> Iterator[tuple[str, int]]:
        """Every function as (qualified name, length in lines)."""

        def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
            for child in ast.iter_child_nodes(node):
                inner = prefix
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    inner = f"{prefix}{child.name}."
                    if not isinstance(child, ast.ClassDef):
                        yield prefix + child.name, (child.end_lineno or child.lineno) - child.lineno + 1
                yield from walk(child, inner)

        return walk(self.tree, "")


# --- the checkers -----------------------------------------------------------------------------------------------------


def wrong_room_imports(source: Source) -> list[str]:
    if source.room not in MAY_IMPORT:
        return [f"{source.path}: the room {source.room!r} has no row in MAY_IMPORT"]
    allowed = MAY_IMPORT[source.room] | {source.room}
    complaints = []
    for line, name in source.imports():
        top, _, rest = name.partition(".")
        if top == "postbus":
            target = rest.partition(".")[0]
            target = target if target in MAY_IMPORT else "__init__"
            if target not in allowed:
                complaints.append(f"{source.path}:{line}: {source.room} may not import {target} ({name})")
    return complaints


def wrong_outside_imports(source: Source) -> list[str]:
    complaints = []
    for line, name in source.imports():
        top = name.partition(".")[0]
        if top in FORBIDDEN_STDLIB:
            complaints.append(f"{source.path}:{line}: never import {top}: {FORBIDDEN_STDLIB[top]}")
        elif top != "postbus" and top not in sys.stdlib_module_names:
            prefixes = THIRD_PARTY.get(top, ())
            if not str(source.inside).startswith(prefixes):
                complaints.append(f"{source.path}:{line}: {top} may not be imported here")
    return complaints


def too_long(source: Source) -> list[str]:
    """What is longer than the house allows, as keys of LONG."""
    keys = [source.path] if len(source.text.splitlines()) > FILE_LINES_MAX else []
    return keys + [f"{source.path}::{name}" for name, length in source.functions() if length > FUNCTION_LINES_MAX]


def own_time(source: Source) -> list[tuple[str, str]]:
    """Time or ids made outside the clock, as (path, name)."""
    if source.path == CLOCK:
        return []
    imported = {name for _, name in source.imports()}
    names = {name.partition(".")[0] for name in imported} & ID_MODULES
    names |= {name for name in imported if name in TIME_CALLS}
    attributes = (ast.unparse(node) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute))
    names |= {call for attribute in attributes for call in TIME_CALLS if f".{attribute}".endswith(f".{call}")}
    return [(source.path, name) for name in sorted(names)]


def prints(source: Source) -> list[str]:
    if source.room == "cli":
        return []
    calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    return [
        f"{source.path}:{node.lineno}: print; only cli/ talks to the terminal"
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def bad_names(source: Source) -> list[str]:
    parts = PurePosixPath(source.path).with_suffix("").parts
    return [f"{source.path}: name it by its noun, not {part!r}" for part in parts if part in FORBIDDEN_NAMES]


def unfinished(source: Source) -> list[str]:
    lines = enumerate(source.text.splitlines(), 1)
    return [f"{source.path}:{number}: unfinished work" for number, line in lines if UNFINISHED.search(line)]


# --- the repository passes --------------------------------------------------------------------------------------------


def python_files(*folders: str) -> list[Source]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


PRODUCT = python_files("src/postbus")
EVERYTHING = PRODUCT + python_files("tests", "benchmarks", "tools")


@pytest.mark.parametrize("check", [wrong_room_imports, wrong_outside_imports, prints], ids=lambda check: check.__name__)
def test_product(check: Callable[[Source], list[str]]) -> None:
    assert [complaint for source in PRODUCT for complaint in check(source)] == []


@pytest.mark.parametrize("check", [bad_names, unfinished], ids=lambda check: check.__name__)
def test_everything(check: Callable[[Source], list[str]]) -> None:
    assert [complaint for source in EVERYTHING for complaint in check(source)] == []


def test_lengths_are_bounded_or_have_a_reason() -> None:
    assert {key for source in EVERYTHING for key in too_long(source)} == set(LONG)
    assert all(LONG.values())


def test_time_and_ids_come_from_the_clock_or_have_a_reason() -> None:
    used, complaints = set(), []
    for source in PRODUCT:
        for path, name in own_time(source):
            reasons = {key for key in OWN_TIME if key.endswith(f"::{name}") and path.startswith(key.split("::")[0])}
            used |= reasons
            if not reasons:
                complaints.append(f"{path}: {name} belongs in clock.py")
    assert complaints == []
    assert used == set(OWN_TIME), "a recorded reason is no longer needed"


def test_import_table_has_no_cycle_and_names_only_rooms() -> None:
    rooms = set(MAY_IMPORT)
    assert all(allowed <= rooms for allowed in MAY_IMPORT.values())
    left = {room: allowed - {room} for room, allowed in MAY_IMPORT.items()}
    while leaves := {room for room, allowed in left.items() if not allowed & set(left)}:
        left = {room: allowed for room, allowed in left.items() if room not in leaves}
    # cli may import anything and __main__ imports cli: the only circle, and nothing below can reach it.
    assert set(left) <= {"cli", "__main__"}


# --- every checker can fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("store/writer.py", "from postbus.log import Log"),
        ("store/writer.py", "from postbus import log"),
        ("store/writer.py", "import postbus.log.memory as memory"),
        ("store/writer.py", "from ..log import Log"),
        ("store/writer.py", "from .. import log"),
        ("store/writer.py", "from .. import Event"),
        ("store/deep/er.py", "from ...log.memory import MemoryLog"),
        ("store/__init__.py", "from ..log import Log"),
        ("topics.py", "from .store import Store"),
        ("topics.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from postbus.bus import EventBus"),
        ("topics.py", "def f():\n    import postbus.cli"),
        ("topics.py", "import importlib\nimportlib.import_module('postbus.bus')"),
        ("clock.py", "from postbus.model import Event"),
        ("surprise.py", "import json"),
    ],
)
def test_a_wrong_room_import_is_found(path: str, text: str) -> None:
    assert len(wrong_room_imports(Source(PACKAGE + path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("store/writer.py", "from postbus.model import Event\nfrom postbus.store.files import x\nfrom . import files"),
        ("store/writer.py", "from ..clock import Clock\nfrom .files import x"),
        ("cli/__init__.py", "from postbus import __version__\nfrom postbus.log import Log\nimport postbus.spark"),
        ("bus.py", "from .log.memory import MemoryLog\nfrom .envelope import draft"),
    ],
)
def test_a_right_room_import_passes(path: str, text: str) -> None:
    assert wrong_room_imports(Source(PACKAGE + path, text)) == []


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("model.py", "import sqlite3", 1),
        ("store/writer.py", "import sqlite3.dbapi2", 1),
        ("client.py", "import apsw", 1),
        ("log/memory.py", "from apsw import Connection", 1),
        ("store/writer.py", "from rich.table import Table", 1),
        ("model.py", "import requests", 1),
        ("log/sqlite.py", "import apsw, msgspec, json", 0),
        ("store/writer.py", "import apsw.ext", 0),
        ("cli/__init__.py", "import typer\nfrom rich.table import Table", 0),
    ],
)
def test_a_wrong_outside_import_is_found(path: str, text: str, count: int) -> None:
    assert len(wrong_outside_imports(Source(PACKAGE + path, text))) == count


def test_a_long_file_and_a_long_function_are_found() -> None:
    body = "        pass\n" * FUNCTION_LINES_MAX
    assert too_long(Source("a.py", "x = 1\n" * FILE_LINES_MAX)) == []
    assert too_long(Source("a.py", "x = 1\n" * (FILE_LINES_MAX + 1))) == ["a.py"]
    assert too_long(Source("a.py", f"class A:\n    async def b(self):\n{body}")) == ["a.py::A.b"]
    assert too_long(Source("a.py", f"if True:\n    def b():\n{body}")) == ["a.py::b"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import time\nx = time.time()", ["time.time"]),
        ("import time\nx = time.time_ns", ["time.time_ns"]),
        ("from time import time", ["time.time"]),
        ("import datetime\nx = datetime.datetime.now()", ["datetime.now"]),
        ("from datetime import datetime\nx = datetime.utcnow()", ["datetime.utcnow"]),
        ("from uuid import uuid4", ["uuid"]),
        ("import random, secrets", ["random", "secrets"]),
        ("import time\nx = time.monotonic()\ny = clock.now()", []),
    ],
)
def test_own_time_is_found(text: str, names: list[str]) -> None:
    assert [name for _, name in own_time(Source(PACKAGE + "bus.py", text))] == names
    assert own_time(Source(CLOCK, text)) == []


def test_a_print_is_found() -> None:
    assert len(prints(Source(PACKAGE + "bus.py", "def f():\n    print('x')"))) == 1
    assert prints(Source(PACKAGE + "cli/show.py", "print('x')")) == []


@pytest.mark.parametrize("path", ["src/postbus/utils.py", "src/postbus/store/helpers.py", "tests/helpers/log.py"])
def test_a_name_without_a_noun_is_found(path: str) -> None:
    assert len(bad_names(Source(path, ""))) == 1
    assert bad_names(Source("src/postbus/store/writer.py", "")) == []


def test_unfinished_work_is_found() -> None:
    assert len(unfinished(Source("a.py", "# TO" + "DO later"))) == 1
    assert len(unfinished(Source("a.py", "x = 1  # FIX" + "ME"))) == 1
    assert unfinished(Source("a.py", "x = 1  # done")) == []
