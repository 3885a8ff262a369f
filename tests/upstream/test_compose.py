"""``deploy/compose.yaml`` says what the tests run: the same servers, the same options, commands that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml  # type: ignore[import-untyped]  # it has no types of its own

import postbus.cli
from postbus.log.address import parse_address, parse_remote
from tests.services import running_nats
from tools.services import PROPERTIES, kafka_version

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose.yaml"
ALONE = {"log.cleaner.dedupe.buffer.size", "broker.session.timeout.ms", "broker.heartbeat.interval.ms"}
ALONE |= {"controlled.shutdown.enable", "offsets.topic.num.partitions", "transaction.state.log.num.partitions"}
ALONE |= {"share.coordinator.state.topic.num.partitions"}  # the tests' own: to start, notice and end sooner


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


def test_the_services_fit_together(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"postbus", "nats", "kafka"}
    assert {volume.partition(":")[0] for one in services.values() for volume in one["volumes"]} == set(
        compose["volumes"]
    )
    default = re.fullmatch(r"\$\{POSTBUS_LOG:-(.*)\}", services["postbus"]["environment"]["POSTBUS_DATA"])
    assert default is not None
    for url in (default[1], *re.findall(r"POSTBUS_LOG='([^']+)'", COMPOSE.read_text())):
        address = parse_address(url)
        assert address.remote is not None
        target = parse_remote(address.remote)
        assert target.address.partition(":")[0] in services
        assert address.folder == services["postbus"]["volumes"][0].partition(":")[2]


def test_the_command_exists(compose: dict[str, Any]) -> None:
    command, *words = compose["services"]["postbus"]["command"]
    root = typer.main.get_command(postbus.cli.app)
    known = {name for parameter in root.commands[command].params for name in parameter.opts}  # type: ignore[attr-defined]
    assert {word for word in words if word.startswith("--")} <= known
    assert compose["services"]["postbus"]["ports"] == [f"127.0.0.1:{words[3]}:{words[3]}"]


def test_nats_syncs_as_in_the_tests(compose: dict[str, Any], tmp_path: Path) -> None:
    text = compose["configs"]["nats"]["content"]
    binary, *_, config = running_nats().command()
    for wanted in re.findall(r"\w+_interval: \w+", Path(config).read_text()):
        assert wanted in text
    mine = tmp_path / "nats.conf"
    mine.write_text(text)
    checked = subprocess.run([binary, "-c", str(mine), "-t"], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "is valid" in checked.stdout + checked.stderr


def test_kafka_is_the_one_of_the_tests(compose: dict[str, Any]) -> None:
    kafka = compose["services"]["kafka"]
    assert kafka["image"] == f"apache/kafka:{kafka_version()}"
    mine = {name[6:].replace("_", ".").lower(): value for name, value in kafka["environment"].items()}
    theirs = dict(line.split("=", 1) for line in PROPERTIES.splitlines())
    places = {name for name, value in theirs.items() if "{" in value} | {"listener.security.protocol.map"}
    assert set(mine) == set(theirs) - ALONE
    assert {name: mine[name] for name in mine if name not in places} == {
        name: theirs[name] for name in mine if name not in places
    }
