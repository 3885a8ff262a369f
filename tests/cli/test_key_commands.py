from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command_line import Run


def test_a_key_is_made_listed_rotated_and_revoked(run: Run) -> None:
    scopes = ["--scope", "publish=acme.prod.orders", "--scope", "ack"]
    facts = ["--tenant", "acme.prod", "--expires", "90d", "--source", "shop"]
    made = run("keys", "create", "shop", *scopes, *facts, "--json").json
    assert re.fullmatch(r"pb_[0-9a-f]{12}_[0-9a-f]{32}", made["key"])
    listed = run("keys", "list", "--json").json["keys"]
    assert listed == [{name: value for name, value in made.items() if name != "key"}]
    assert listed[0]["scopes"] == ["publish=acme.prod.orders", "ack"]
    shown = run("keys", "list").out
    assert made["id"] in shown
    assert made["key"].rpartition("_")[2] not in shown
    rotated = run("keys", "rotate", made["id"], "--grace", "1h", "--json").json
    assert rotated["scopes"] == made["scopes"]
    assert rotated["key"] != made["key"]
    assert run("keys", "revoke", rotated["id"]).out == f"revoked {rotated['id']}\n"
    assert "before" in run("keys", "revoke", rotated["id"]).out
    assert [line.split()[3] for line in run("keys", "list").out.splitlines()[1:]] == ["valid", "revoked"]


def test_the_key_is_all_that_is_printed(run: Run) -> None:
    done = run("keys", "create", "--scope", "admin")
    assert re.fullmatch(r"pb_[0-9a-f]{12}_[0-9a-f]{32}\n", done.out)
    assert "cannot be shown again" in done.err


def test_a_key_of_the_operator_has_no_tenant(run: Run) -> None:
    assert run("keys", "create", "--scope", "admin", "--tenant", "*", "--json").json["tenant"] is None


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["create"], 2, "--scope"),
        (["create", "--scope", "write"], 2, "no scope"),
        (["create", "--scope", "publish=a..b"], 2, "empty token"),
        (["create", "--scope", "ack", "--tenant", "acme"], 2, "3 tokens"),
        (["create", "--scope", "ack", "--expires", "soon"], 2, "no age"),
        (["create", "--scope", "ack", "--source", "a b"], 2, "source"),
        (["revoke", "nothing"], 4, "no key"),
        (["rotate", "nothing"], 4, "no key"),
    ],
)
def test_what_is_wrong_is_refused(run: Run, words: list[str], code: int, says: str) -> None:
    run("keys", "create", "--scope", "admin")
    assert says in run("keys", *words, code=code).err
    assert len(run("keys", "list", "--json").json["keys"]) == 1


def test_nothing_is_listed_where_there_is_no_store(run: Run, data: Path) -> None:
    run("keys", "list", code=4)
    run("quota", "list", code=4)
    assert not data.exists()


def test_quotas_are_set_listed_and_cleared(run: Run) -> None:
    made = run("quota", "set", "acme.prod", "--publish-per-s", "100", "--topics", "none", "--json").json
    assert made["quotas"]["acme.prod"]["publish_per_s"] == 100
    assert made["quotas"]["acme.prod"]["topics"] is None
    again = run("quota", "set", "acme.prod", "--retained-bytes", "5", "--json").json["quotas"]["acme.prod"]
    assert again == made["quotas"]["acme.prod"] | {"retained_bytes": 5}
    listed = run("quota", "list", "--json").json["quotas"]
    assert listed["acme.prod"] == again
    assert listed["*"]["topics"] == 10_000
    assert "100" in run("quota", "list").out
    run("quota", "clear", "acme.prod")
    assert set(run("quota", "list", "--json").json["quotas"]) == {"*"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["acme", "--topics", "1"], "3 tokens"),
        (["a.b", "--topics", "-1"], "neither"),
        (["a.b", "--publish-per-s", "0"], "positive"),
    ],
)
def test_a_bad_quota_is_refused(run: Run, words: list[str], says: str) -> None:
    assert says in run("quota", "set", *words, code=2).err
