"""The settings of a host: a YAML file, overridden by the environment. Every key has its sentence here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from postbus.bus import EventBus
from postbus.kernel.strict_yaml import read_yaml
from postbus.model import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from postbus.clock import Clock
    from postbus.kernel.strict_yaml import Document

__all__ = [
    "EventBusSettings",
    "KernelSettings",
    "ModelSettings",
    "PipelineSettings",
    "SettingRow",
    "Settings",
    "make_bus",
    "read_settings",
    "setting_rows",
]

PREFIX = "POSTBUS"
LISTS = {"shipped", "disabled"}


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section: no other keys than these."""


class EventBusSettings(_Section, frozen=True, kw_only=True):
    """``event_bus``: the bus of the host."""

    db_path: Annotated[
        str,
        Meta(min_length=1, description="The data folder. In the file: relative to the folder that holds `config/`."),
    ] = "./postbus-data"
    tenant: Annotated[str, Meta(min_length=1, description="Whose journal.")] = "local.default"
    durability: Annotated[Literal["full", "relaxed"], Meta(description="What an acknowledged event survives.")] = "full"
    poll_interval: Annotated[
        float, Meta(gt=0, description="Seconds; a safety net only, since commits wake the dispatcher at once.")
    ] = 5.0
    batch_size: Annotated[int, Meta(ge=1, description="How many events a subscription reads at a time.")] = 100
    lease_s: Annotated[float, Meta(gt=0, description="How long a silent process keeps its place.")] = 30.0
    stop_grace_s: Annotated[float, Meta(ge=0, description="How long a stop waits for running handlers.")] = 30.0
    max_hops: Annotated[int, Meta(ge=1, description="How long a chain of derived events may become.")] = 32


class KernelSettings(_Section, frozen=True, kw_only=True):
    """``kernel``: who answers, who is loaded."""

    orchestrator: Annotated[
        str | None, Meta(description="The agent that answers users. Default: the one whose manifest says so.")
    ] = None
    default_channel: Annotated[
        str | None, Meta(description="Where notifications go before a user has spoken. Default: the first channel.")
    ] = None
    agent_timeout_s: Annotated[float, Meta(gt=0, description="How long an agent may work on one event.")] = 600.0
    approval_ttl_s: Annotated[float, Meta(gt=0, description="How long a human has to allow a tool call.")] = 3600.0
    step_timeout_s: Annotated[
        float, Meta(gt=0, description="How long an extension may take to initialise, to start, to stop, or to end.")
    ] = 60.0
    shipped: Annotated[list[str], Meta(description="Which of the extensions that come with Postbus are loaded.")] = []
    disabled: Annotated[list[str], Meta(description="Which extensions are not loaded.")] = []


class ModelSettings(_Section, frozen=True, kw_only=True):
    """``models``: the server that agents without code of their own use; any that speaks the OpenAI API."""

    base_url: Annotated[str, Meta(min_length=1, description="Where the API is.")] = "http://127.0.0.1:11434/v1"
    model: Annotated[str | None, Meta(description="The model, unless the manifest names one.")] = None
    api_key_env: Annotated[
        str | None, Meta(description="The environment variable that holds the API key, if one is needed.")
    ] = None
    api_key_secret: Annotated[str | None, Meta(description="The secret in the vault that is the API key.")] = None
    timeout_s: Annotated[float, Meta(gt=0, description="How long one answer may take.")] = 120.0


class PipelineSettings(_Section, frozen=True, kw_only=True):
    """``pipeline``: what `postbus pipeline` takes that the command line and its own variables do not say."""

    lake: Annotated[
        str,
        Meta(min_length=1, description="The archive. In the file: relative to the folder that holds `config/`."),
    ] = "./postbus-lake"
    master: Annotated[str, Meta(min_length=1, description="Which Spark runs the jobs.")] = "local[*,4]"
    remote: Annotated[str | None, Meta(description="A Spark Connect server instead, as in sc://host.")] = None
    memory: Annotated[str, Meta(min_length=1, description="Memory of Spark's driver.")] = "1g"


class Settings(_Section, frozen=True, kw_only=True):
    """All settings. ``extensions``: by the id of an extension, what is laid over its manifest's ``config``."""

    event_bus: EventBusSettings = EventBusSettings()
    kernel: KernelSettings = KernelSettings()
    models: ModelSettings = ModelSettings()
    pipeline: PipelineSettings = PipelineSettings()
    extensions: dict[str, dict[str, Any]] = {}


class SettingRow(msgspec.Struct, frozen=True):
    """One key, as the documentation shows it."""

    section: str
    key: str
    variable: str
    default: Any
    description: str


def setting_rows() -> Iterator[SettingRow]:
    """Return every key of every section with its environment variable, default and meaning."""
    for section, kind in _sections().items():
        for field in msgspec.structs.fields(kind):
            meta = next(part for part in get_args(field.type)[1:] if isinstance(part, Meta))
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            yield SettingRow(section, field.name, _variable(section, field.name), default, meta.description or "")


def read_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read a settings file, if one is named, and the environment over it.

    A missing section or key means its default. Raises ``InvalidFile`` with file and line for what the file has that
    there is not, and ``Invalid`` for such a variable.
    """
    settings = Settings() if path is None else _from_file(path)
    return _from_environment(settings, os.environ if environ is None else environ)


def make_bus(settings: Settings, clock: Clock | None = None) -> EventBus:
    """Return the bus the settings describe."""
    values = msgspec.structs.asdict(settings.event_bus)
    return EventBus(values.pop("db_path"), clock=clock, **values)


def _from_file(path: Path) -> Settings:
    document = read_yaml(path)
    if document.value is None:
        return Settings()
    # A section without any key is written like this: `kernel:`
    if isinstance(document.value, dict):
        document.value = {name: {} if value is None else value for name, value in document.value.items()}
        _check_extensions(document)
    settings: Settings = document.convert(Settings)
    root = path.parent.parent if path.parent.name == "config" else path.parent
    for section, key in (("event_bus", "db_path"), ("pipeline", "lake")):
        given = document.value.get(section, {}).get(key)
        if given is not None and given != "memory:" and "://" not in given:
            place = {key: str(root / Path(given).expanduser())}
            changed = msgspec.structs.replace(getattr(settings, section), **place)
            settings = msgspec.structs.replace(settings, **{section: changed})
    return settings


def _check_extensions(document: Document) -> None:
    found = document.value.get("extensions")
    for name, config in found.items() if isinstance(found, dict) else ():
        if not isinstance(config, dict):
            raise document.refuse(f"the settings of {name} are a mapping of keys to values", ("extensions", name))


def _from_environment(settings: Settings, environ: Mapping[str, str]) -> Settings:
    changes: dict[str, dict[str, Any]] = {}
    kinds = _sections()
    for variable, text in environ.items():
        for section, kind in kinds.items():
            if variable.startswith(_variable(section, "")):
                key = variable.removeprefix(_variable(section, "")).lower()
                changes.setdefault(section, {})[key] = _value(kind, variable, key, text)
    sections = {name: msgspec.structs.replace(getattr(settings, name), **keys) for name, keys in changes.items()}
    return msgspec.structs.replace(settings, **sections)


def _value(kind: type[_Section], variable: str, key: str, text: str) -> Any:
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    if key not in fields or variable != variable.upper():
        known = ", ".join(row.variable for row in setting_rows() if variable.startswith(_variable(row.section, "")))
        raise Invalid(f"there is no setting {variable}", hint=f"there are {known}")
    value: Any = [part.strip() for part in text.split(",") if part.strip()] if key in LISTS else text
    try:
        return msgspec.convert(value, fields[key], strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"{variable}: {error}") from None


def _sections() -> dict[str, type[_Section]]:
    return {
        "event_bus": EventBusSettings,
        "kernel": KernelSettings,
        "models": ModelSettings,
        "pipeline": PipelineSettings,
    }


def _variable(section: str, key: str) -> str:
    return f"{PREFIX}_{section}_{key}".upper()
