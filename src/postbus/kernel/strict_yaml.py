"""A strict reader of small YAML files: plain values only, and every refusal names the file and the line.

Refused: aliases and anchors, tags, merge keys, duplicate keys, several documents, more than 64 KiB, deep nesting, and
plain words that YAML takes for something else than they look like (``no``, ``1:30``, ``2026-01-31``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml  # type: ignore[import-untyped]
from yaml.resolver import Resolver  # type: ignore[import-untyped]

from postbus.model import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BYTES_MAX", "DEPTH_MAX", "Document", "InvalidFile", "parse_yaml", "read_yaml"]

BYTES_MAX = 64 * 1024
DEPTH_MAX = 32
# The C parser where there is one; both refuse the same.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
INT = re.compile("-?(?:0|[1-9][0-9]{0,17})")
FLOAT = re.compile("-?(?:0|[1-9][0-9]*)(?:[.][0-9]+)?(?:[eE][-+]?[0-9]{1,3})?")
BOOLS = {"true": True, "false": False}
NULLS = {"", "~", "null"}
PATH = re.compile(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]")
PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<where>(?:key in )?\$[^`]*)`)?$", re.DOTALL)
FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`")

Path_ = tuple[str | int, ...]


class InvalidFile(Invalid):
    """A file is refused; ``file`` and ``line`` (from 1) say where."""

    code = "invalid_file"

    def __init__(self, message: str, *, file: str, line: int | None = None, hint: str | None = None) -> None:
        self.file = file
        self.line = line
        super().__init__(f"{self.where}: {message}", hint=hint)
        self.reason = message

    @property
    def where(self) -> str:
        """The file, and the line when it is known."""
        return self.file if self.line is None else f"{self.file}:{self.line}"


class Document:
    """A value, and the line in its file of every part of it."""

    def __init__(self, value: Any, lines: dict[Path_, int], file: str) -> None:
        self.value = value
        self.file = file
        self._lines = lines

    def line(self, path: Path_ = ()) -> int:
        """Return the line of a part, or of the nearest part around it that is there."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def refuse(self, message: str, path: Path_ = (), *, hint: str | None = None) -> InvalidFile:
        """Return the refusal of a part."""
        return InvalidFile(message, file=self.file, line=self.line(path), hint=hint)

    def convert(self, kind: type[Any]) -> Any:
        """Return the value as a record; raises ``InvalidFile``."""
        try:
            return msgspec.convert(self.value, kind)
        except msgspec.ValidationError as error:
            raise self._explain(str(error)) from None

    def _explain(self, text: str) -> InvalidFile:
        found = PLACE.match(text)
        what, where = (found["what"], found["where"] or "$") if found else (text, "$")
        path: Path_ = tuple(int(index) if index.isdigit() else name or index for name, index in PATH.findall(where))
        shown = ".".join(str(part) for part in path)
        unknown = FIELD.search(what)
        if unknown:
            name = unknown["name"]
            return self.refuse(f"there is no key {name!r}{f' in {shown}' if shown else ''}", (*path, name))
        what = what.replace("Object missing required field", "there is no key")
        what = what.replace("Expected", "expected").replace("Invalid enum", "invalid")
        return self.refuse(f"{shown}: {what}" if shown else what, path)


def read_yaml(path: Path) -> Document:
    """Read a file; raises ``InvalidFile``."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(BYTES_MAX + 1)
    except OSError as error:
        raise InvalidFile(f"cannot be read: {error.strerror}", file=str(path)) from None
    return parse_yaml(raw, str(path))


def parse_yaml(raw: bytes, file: str) -> Document:
    """Read a text; raises ``InvalidFile``."""
    if len(raw) > BYTES_MAX:
        raise InvalidFile(f"is larger than {BYTES_MAX // 1024} KiB", file=file)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InvalidFile("is not UTF-8", file=file, line=line) from None
    try:
        return _Reader(file, yaml.parse(text, Loader=LOADER)).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"is no YAML: {error.problem or error.context}"
        raise InvalidFile(message, file=file, line=None if mark is None else mark.line + 1) from None
    except yaml.YAMLError as error:  # a character that YAML does not have
        position = getattr(error, "position", None)
        message = f"is no YAML: {getattr(error, 'reason', None) or str(error).splitlines()[0]}"
        at = text.count("\n", 0, position) + 1 if isinstance(position, int) else None
        raise InvalidFile(message, file=file, line=at) from None


class _Reader:
    """Builds a value from the events of the parser, which never goes deeper than it may."""

    def __init__(self, file: str, events: Iterator[yaml.Event]) -> None:
        self._file = file
        self._events = events
        self._lines: dict[Path_, int] = {}
        self._resolver = Resolver()

    def document(self) -> Document:
        value: Any = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._refusal("there is more than one document", event)
            elif isinstance(event, yaml.NodeEvent):
                value = self._value(event, ())
        return Document(value, self._lines, self._file)

    def _value(self, event: yaml.Event, path: Path_) -> Any:
        self._check(event, path)
        self._lines[path] = event.start_mark.line + 1
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        return self._mapping(path)

    def _sequence(self, path: Path_) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            found.append(self._value(event, (*path, len(found))))
        return found

    def _mapping(self, path: Path_) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            self._check(event, path)
            key = self._scalar(event) if isinstance(event, yaml.ScalarEvent) else None
            if not isinstance(key, str):
                raise self._refusal("a key is a text", event, hint="put it in quotes")
            if key in found:
                raise self._refusal(f"the key {key!r} is there twice", event)
            line = event.start_mark.line + 1
            found[key] = self._value(next(self._events), (*path, key))
            self._lines[*path, key] = line
        return found

    def _check(self, event: yaml.Event, path: Path_) -> None:
        """Refuse what no plain value has."""
        if isinstance(event, yaml.AliasEvent):
            raise self._refusal(f"aliases are not allowed (*{event.anchor})", event)
        if event.anchor is not None:
            raise self._refusal(f"anchors are not allowed (&{event.anchor})", event)
        if event.tag is not None:
            raise self._refusal(f"tags are not allowed ({event.tag})", event)
        if len(path) >= DEPTH_MAX and isinstance(event, yaml.CollectionStartEvent):
            raise self._refusal(f"it is nested deeper than {DEPTH_MAX}", event)

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        text: str = event.value
        if not event.implicit[0]:  # quoted, or a block
            return text
        kind = self._resolver.resolve(yaml.ScalarNode, text, (True, False)).rpartition(":")[2]
        if kind == "str":
            return text
        if kind == "null" and text in NULLS:
            return None
        if kind == "bool" and text.lower() in BOOLS:
            return BOOLS[text.lower()]
        if kind == "int" and INT.fullmatch(text):
            return int(text)
        if kind == "float" and FLOAT.fullmatch(text):
            return float(text)
        what = {"bool": "a boolean", "null": "nothing", "merge": "a merge key", "timestamp": "a date"}
        message = f"{text!r} is {what.get(kind, 'a number')} in YAML and may not be written like this"
        raise self._refusal(message, event, hint="put it in quotes if it is a text")

    def _refusal(self, message: str, event: yaml.Event, *, hint: str | None = None) -> InvalidFile:
        return InvalidFile(message, file=self._file, line=event.start_mark.line + 1, hint=hint)
