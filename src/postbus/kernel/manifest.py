"""The manifest of an extension: who it is, where its code is, what it publishes and subscribes to."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from postbus import strict_json
from postbus.kernel.strict_yaml import Document, InvalidFile, read_yaml
from postbus.kernel.templates import check_template
from postbus.kernel.topics import RECORDS
from postbus.model import Invalid, Trust
from postbus.schemas import Document as Schema
from postbus.topics import check_pattern, check_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "MANIFEST",
    "AgentConfig",
    "EventPublishDeclaration",
    "EventSubscribeDeclaration",
    "EventsConfig",
    "ExtensionManifest",
    "ManifestFile",
    "read_manifest",
]

MANIFEST = "manifest.yaml"
ID = re.compile("[a-z][a-z0-9_-]{0,59}")
ENTRYPOINT = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
RESERVED = {"kernel"}


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping without other keys than these."""


class EventPublishDeclaration(_Part, frozen=True, kw_only=True):
    """A topic an extension publishes on. ``trust``: ``untrusted`` if it carries text from outside."""

    topic: str
    description: str = ""
    schema: dict[str, Any] | None = None
    trust: Trust = Trust.TRUSTED


class EventSubscribeDeclaration(_Part, frozen=True, kw_only=True):
    """A topic or pattern an extension handles: the kernel does (``notify_user``, ``invoke_agent``) or its own code."""

    topic: str
    handler: Literal["notify_user", "invoke_agent", "custom"] = "custom"
    prompt_template: str | None = None


class EventsConfig(_Part, frozen=True, kw_only=True):
    """What an extension publishes and subscribes to."""

    publishes: list[EventPublishDeclaration] = []
    subscribes: list[EventSubscribeDeclaration] = []


class AgentConfig(_Part, frozen=True, kw_only=True):
    """An agent: ``orchestrator`` answers users, ``tool`` serves other agents."""

    integration_mode: Literal["orchestrator", "tool"] = "tool"
    model: str | None = None
    instructions: str = ""
    description: str = ""


class ExtensionManifest(_Part, frozen=True, kw_only=True):
    """What ``manifest.yaml`` says."""

    id: str
    name: str = ""
    description: str = ""
    version: str = ""
    entrypoint: str | None = None
    agent: AgentConfig | None = None
    depends_on: list[str] = []
    config: dict[str, Any] = {}
    events: EventsConfig = EventsConfig()

    def trust_of(self, topic: str) -> Trust:
        """Return how far an event of this extension on a topic can be trusted."""
        for declared in self.events.publishes:
            if declared.topic == topic:
                return declared.trust
        return Trust.TRUSTED


class ManifestFile:
    """A manifest, where it stands, and the schemas it declares by topic."""

    def __init__(self, manifest: ExtensionManifest, document: Document, path: Path) -> None:
        self.manifest = manifest
        self.path = path
        self.schemas: dict[str, Schema] = {}
        self._document = document

    @property
    def folder(self) -> Path:
        """The extension's folder."""
        return self.path.parent

    def refuse(self, message: str, *path: str | int, hint: str | None = None) -> InvalidFile:
        """Return the refusal of a part of it, with its file and line."""
        return self._document.refuse(message, path, hint=hint)

    @contextmanager
    def refusing(self, *path: str | int) -> Iterator[None]:
        """Turn a refusal of what is done inside into one of this part."""
        try:
            yield
        except Invalid as error:
            raise self.refuse(error.message, *path, hint=error.hint) from None


def read_manifest(path: Path) -> ManifestFile:
    """Read and check a manifest; raises ``InvalidFile`` with the file and the line."""
    document = read_yaml(path)
    if not isinstance(document.value, dict):
        raise document.refuse("a manifest is a mapping of keys to values")
    found = ManifestFile(document.convert(ExtensionManifest), document, path)
    _check_identity(found)
    _check_publishes(found)
    _check_subscribes(found)
    return found


def _check_identity(found: ManifestFile) -> None:
    manifest = found.manifest
    if not ID.fullmatch(manifest.id) or manifest.id in RESERVED:
        message = f"{manifest.id!r} is no id of an extension"
        raise found.refuse(message, "id", hint="lower case letters, digits, _ and -, at most 60, a letter first")
    if manifest.entrypoint is None and manifest.agent is None:
        raise found.refuse("there is neither an entrypoint nor an agent", hint="entrypoint: main:ClassName")
    if manifest.entrypoint is not None and not ENTRYPOINT.fullmatch(manifest.entrypoint):
        message = f"{manifest.entrypoint!r} is no entrypoint"
        raise found.refuse(message, "entrypoint", hint="it looks like main:ClassName, for a class in main.py")
    for index, name in enumerate(manifest.depends_on):
        if name in manifest.depends_on[:index]:
            raise found.refuse(f"{name} is there twice", "depends_on", index)


def _check_publishes(found: ManifestFile) -> None:
    seen = set()
    for index, declared in enumerate(found.manifest.events.publishes):
        where = ("events", "publishes", index)
        with found.refusing(*where, "topic"):
            check_topic(declared.topic)
        if declared.topic in seen:
            raise found.refuse(f"{declared.topic} is there twice", *where, "topic")
        seen.add(declared.topic)
        if declared.schema is not None:
            if declared.topic in RECORDS:
                raise found.refuse(f"the schema of {declared.topic} is the kernel's", *where, "schema")
            with found.refusing(*where, "schema"):
                found.schemas[declared.topic] = Schema(strict_json.encode(declared.schema))


def _check_subscribes(found: ManifestFile) -> None:
    for index, declared in enumerate(found.manifest.events.subscribes):
        where = ("events", "subscribes", index)
        with found.refusing(*where, "topic"):
            check_pattern(declared.topic)
        if declared.prompt_template is not None:
            if declared.handler != "invoke_agent":
                raise found.refuse("a prompt_template goes with handler: invoke_agent", *where, "prompt_template")
            with found.refusing(*where, "prompt_template"):
                check_template(declared.prompt_template)
