"""What an operator installs names what the server really has."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import typer.main

import postbus.cli
from postbus.model import Start, StartPolicy
from tests.server.conftest import RunningServer

DEPLOY = Path(__file__).parents[2] / "deploy"
TOPIC = "agents.demo.orders"


def test_the_board_shows_numbers_that_exist(server: RunningServer) -> None:
    server.topic(TOPIC)
    for _ in range(2):
        sent = {"topic": TOPIC, "payload": 1, "native_id": "n"}
        assert server.client.post("/v1/bus/publish", json=sent).status_code == 200
    server.call(server.hub.log.ensure_consumer(TOPIC, "reader", Start(policy=StartPolicy.EARLIEST)))
    metrics = server.hub.metrics
    for counter in (metrics.delivered, metrics.acked):
        counter.labels("agents.demo").inc()
    server.call(server.hub.quotas.connect("agents.demo"))
    text = server.client.get("/metrics").text
    names = set(re.findall(r"^(postbus_\w+)", text, re.MULTILINE)) | {"postbus_dlq_depth"}
    board = json.loads((DEPLOY / "grafana-board.json").read_text())
    shown = {name for panel in board["panels"] for target in panel["targets"]
             for name in re.findall(r"postbus_\w+", target["expr"])}  # fmt: skip
    assert shown <= names
    assert {"postbus_subscription_lag", "postbus_dlq_depth", "postbus_sse_connections"} <= shown
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_unit_starts_a_command_that_exists() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "postbus.service").read_text())
    _, command, *words = shlex.split(unit["Service"]["ExecStart"])
    root = typer.main.get_command(postbus.cli.app)
    found = root.commands[command]  # type: ignore[attr-defined]
    known = {name for parameter in found.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert unit["Service"]["KillSignal"] == "SIGTERM"
