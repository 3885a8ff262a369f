from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command_line import ORDERS, Run, process
from tests.cli.places import place, served

__all__ = ["place", "served"]

ORDER = '{"type": "object", "required": ["n"]}'


@pytest.fixture
def orders(place: Run, tmp_path: Path) -> Run:
    run = place
    run("topics", "create", "orders")
    run("append", "orders", '{"n": 1}')
    (tmp_path / "order.json").write_text(ORDER)
    run("schemas", "add", "order", "--file", "order.json")
    return run


def test_versions(orders: Run) -> None:
    done = orders("schemas", "add", "order", "--file", "order.json", "--json").json
    assert (done["subject"], done["version"], done["schema"]["required"]) == ("order", 2, ["n"])
    assert orders("schemas", "show", "order").out == f"{ORDER}\n"
    assert orders("schemas", "show", "order", "--version", "1", "--json").json["version"] == 1
    assert orders("schemas", "delete", "order", "2", "--json").json["deleted"] is True
    orders("schemas", "delete", "order", "2", code=4)
    orders("schemas", "show", "order", "--version", "2", code=4)
    assert orders("schemas", "list", "--json").json == {
        "subjects": [{"subject": "order", "versions": [1], "bound": {}}]
    }
    assert orders("schemas", "list", "--tenant", "local.other").out == ""


def test_bind_and_unbind(orders: Run) -> None:
    orders("schemas", "bind", "orders", "order")
    assert "orders (1)" in orders("schemas", "list").out
    done = orders("publish", ORDERS, "{}", "--json", code=2)
    assert done.error["code"] == "schema_mismatch"
    assert done.error["issues"] == [
        {"pointer": "", "message": '"n" is a required property', "schema_pointer": "/required"}
    ]
    orders("schemas", "delete", "order", "1", code=5)
    assert orders("schemas", "unbind", "orders", "--json").json == {"stream": ORDERS, "bound": False}
    orders("publish", ORDERS, "{}")
    orders("schemas", "unbind", "orders", code=4)


def test_a_dry_run_shows_what_would_have_been_refused(orders: Run) -> None:
    assert orders("schemas", "bind", "orders", "order", "--dry-run").out == ""
    orders("append", "orders", "{}")
    done = orders("schemas", "bind", "orders", "order", "--dry-run", code=5)
    assert done.out == f'{ORDERS}/0/1  top: "n" is a required property\n'
    assert "1 of the latest 2 events" in done.err
    report = orders("schemas", "bind", "orders", "order", "--dry-run", "--json", code=5).json
    assert (report["bound"], report["checked"], report["refused_count"]) == (False, 2, 1)
    orders("schemas", "bind", "orders", "order", code=5)
    orders("publish", ORDERS, "{}")
    orders("schemas", "bind", "orders", "order", "--force")
    orders("publish", ORDERS, "{}", code=2)


def test_stdin(orders: Run, data: Path) -> None:
    assert orders("schemas", "add", "other", ORDER).out == "other version 1\n"
    done = process("schemas", "add", "order", "-", "--data", str(data), given=b"true")
    assert done.stdout == b"order version 2\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["add", "order", "--file", "missing.json"], 6),
        (["add", "a/b", "--file", "order.json"], 2),
        (["add", "order", "--file", "order.json", "--tenant", "nobody"], 2),
        (["add", "order"], 2),
        (["add", "order", "{}", "--file", "order.json"], 2),
        (["bind", "missing", "order"], 4),
        (["bind", "orders", "missing"], 4),
        (["bind", "journal", "order"], 2),
        (["bind", "orders", "order", "--version", "0"], 2),
        (["show", "missing"], 4),
    ],
)
def test_refusals(orders: Run, words: list[str], code: int) -> None:
    orders("schemas", *words, code=code)


def test_a_bad_schema_is_refused(orders: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"$ref": "http://example.com"}')
    done = orders("schemas", "add", "order", "--file", "bad.json", "--json", code=2)
    assert done.error["code"] == "invalid_schema"
