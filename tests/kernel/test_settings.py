from __future__ import annotations

from pathlib import Path

import pytest

from postbus import EventBus, Invalid
from postbus.kernel import Settings, make_bus, read_settings
from postbus.kernel.settings import setting_rows
from postbus.kernel.strict_yaml import InvalidFile

PAGE = Path(__file__).parents[2] / "docs/guides/host-settings.md"


def write(folder: Path, text: str) -> Path:
    path = folder / "config" / "settings.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_means_the_defaults(tmp_path: Path) -> None:
    assert read_settings(None, {}) == Settings()
    assert read_settings(write(tmp_path, ""), {}) == Settings()
    assert read_settings(write(tmp_path, "# nothing\nkernel:\n"), {}) == Settings()


def test_the_seeds_section_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path, "event_bus:\n  db_path: sandbox/data/event_journal.db\n  poll_interval: 5.0\n  batch_size: 3\n"
    )
    bus = read_settings(path, {}).event_bus
    assert (bus.poll_interval, bus.batch_size, bus.max_hops) == (5.0, 3, 32)
    assert bus.db_path == str(tmp_path / "sandbox/data/event_journal.db")


async def test_the_bus_is_made_where_the_settings_say(tmp_path: Path) -> None:
    settings = read_settings(write(tmp_path, "event_bus: {db_path: data, durability: relaxed}\n"), {})
    bus = make_bus(settings)
    assert isinstance(bus, EventBus)
    receipt = await bus.publish("a.b", "test", {})
    await bus.stop()
    assert receipt.durability == "relaxed"
    assert (tmp_path / "data").is_dir()


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("event_buss: {}\n", 1, "there is no key 'event_buss'"),
        ("event_bus:\n  poll_intervall: 1\n", 2, "there is no key 'poll_intervall' in event_bus"),
        ("event_bus:\n  poll_interval: 0\n", 2, "event_bus.poll_interval: expected `float` > 0"),
        ("event_bus:\n  batch_size: many\n", 2, "event_bus.batch_size: expected `int`, got `str`"),
        ("event_bus:\n  batch_size: 1.5\n", 2, "event_bus.batch_size"),
        ("event_bus:\n  durability: some\n", 2, "event_bus.durability: invalid value 'some'"),
        ("event_bus: 5\n", 1, "event_bus: expected `object`, got `int`"),
        ("kernel:\n  shipped: terminal\n", 2, "kernel.shipped: expected `array`, got `str`"),
        ("extensions:\n  mail: 5\n", 2, "the settings of mail are a mapping"),
        ("- a\n", 1, "expected `object`, got `array`"),
    ],
)
def test_what_there_is_not_is_refused_with_file_and_line(tmp_path: Path, text: str, line: int, sentence: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidFile) as caught:
        read_settings(path, {})
    assert caught.value.where == f"{path}:{line}"
    assert sentence in caught.value.message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="cannot be read"):
        read_settings(tmp_path / "none.yaml", {})


def test_the_environment_beats_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "event_bus: {poll_interval: 2, batch_size: 7}\nextensions: {mail: {every_s: 5}}\n")
    environ = {
        "POSTBUS_EVENT_BUS_POLL_INTERVAL": "0.5",
        "POSTBUS_EVENT_BUS_DB_PATH": "/elsewhere",
        "POSTBUS_KERNEL_SHIPPED": "terminal, echo",
        "POSTBUS_KERNEL_ORCHESTRATOR": "echo",
        "POSTBUS_DATA": "is another command's",
        "PATH": "/bin",
    }
    settings = read_settings(path, environ)
    assert (settings.event_bus.poll_interval, settings.event_bus.batch_size) == (0.5, 7)
    assert settings.event_bus.db_path == "/elsewhere"
    assert (settings.kernel.shipped, settings.kernel.orchestrator) == (["terminal", "echo"], "echo")
    assert settings.extensions == {"mail": {"every_s": 5}}


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("POSTBUS_EVENT_BUS_SPEED", "1", "there is no setting POSTBUS_EVENT_BUS_SPEED"),
        ("POSTBUS_KERNEL_", "1", "there is no setting POSTBUS_KERNEL_"),
        ("POSTBUS_EVENT_BUS_BATCH_SIZE", "many", "POSTBUS_EVENT_BUS_BATCH_SIZE: "),
        ("POSTBUS_EVENT_BUS_BATCH_SIZE", "0", "POSTBUS_EVENT_BUS_BATCH_SIZE: "),
        ("POSTBUS_MODELS_TIMEOUT_S", "-1", "POSTBUS_MODELS_TIMEOUT_S: "),
    ],
)
def test_a_variable_that_is_no_setting_is_refused(variable: str, value: str, sentence: str) -> None:
    with pytest.raises(Invalid) as caught:
        read_settings(None, {variable: value})
    assert caught.value.message.startswith(sentence)


def test_every_key_is_documented() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = list(setting_rows())
    assert {row.section for row in rows} == {"event_bus", "kernel", "models", "pipeline"}
    assert [
        row for row in rows if f"| `{row.key}` | `{row.variable}` |" not in page or row.description not in page
    ] == []
