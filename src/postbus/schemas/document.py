"""One JSON Schema (draft 2020-12): checked before it is kept, compiled, and asked about payloads.

A schema stands alone: references stay within the document. Patterns run on an engine that takes linear time. How often
a schema can look at one place of a document is counted beforehand, so that neither a schema nor a payload can make a
check take long; where listing every fault would, only the first one or the fact is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import jsonschema_rs
import msgspec

from postbus import strict_json
from postbus.model import Invalid, InvalidSchema, LimitExceeded

__all__ = ["BYTES_MAX", "ISSUES_MAX", "Document", "Issue"]

BYTES_MAX: Final = 256 * 1024
DEPTH_MAX: Final = 64
ISSUES_MAX: Final = 10
CHAIN_MAX: Final = 100
LOOKS_MAX: Final = 5_000
LISTED_LOOKS_MAX: Final = 200_000
MESSAGE_CHARS_MAX = 300
PATTERN_BYTES_MAX = 4 << 20
DIALECTS = ("https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2020-12/schema#")

# Keywords that hold schemas: for the place itself, for one place below it each, or for any place below it.
HERE = ("not", "if", "then", "else")
HERE_LISTS = ("allOf", "anyOf", "oneOf")
BELOW_ALL = (
    "additionalProperties", "unevaluatedProperties", "propertyNames", "items", "contains", "unevaluatedItems",
)  # fmt: skip
REFERENCES = ("$ref", "$dynamicRef")


class Issue(msgspec.Struct, frozen=True):
    """One thing wrong with a payload: where (a JSON pointer), what, and which part of the schema says so."""

    pointer: str
    message: str
    schema_pointer: str = ""


class Document:
    """A schema that was found good. ``raw`` is its JSON as it came."""

    def __init__(self, raw: bytes) -> None:
        """Check and compile; raises ``InvalidSchema`` or ``LimitExceeded``, both with the sentence that fixes it."""
        if len(raw) > BYTES_MAX:
            raise LimitExceeded(f"the schema has {len(raw)} bytes; the limit is {BYTES_MAX}")
        try:
            schema = strict_json.parse(raw, max_bytes=BYTES_MAX, max_depth=DEPTH_MAX)
        except Invalid as error:
            raise InvalidSchema(f"the schema is not JSON: {error.message}") from None
        if not isinstance(schema, dict | bool):
            raise InvalidSchema("a schema is a JSON object or a boolean")
        self.raw = raw
        self._effort = _Effort(schema)
        try:
            self._validator = jsonschema_rs.Draft202012Validator(
                schema,
                mask="the value",
                offline=True,
                validate_formats=False,
                pattern_options=jsonschema_rs.RegexOptions(
                    size_limit=PATTERN_BYTES_MAX, dfa_size_limit=PATTERN_BYTES_MAX
                ),
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            _refuse(error)

    def issues(self, payload: bytes) -> list[Issue]:
        """Return what is wrong with a payload, at most ten things; nothing when it matches."""
        value = msgspec.json.decode(payload)
        if self._validator.is_valid(value):
            return []
        looks = self._effort.looks(_depth(value))
        if looks * (payload.count(b",") + payload.count(b":") + 1) <= LISTED_LOOKS_MAX:
            return [_issue(error) for error in islice(self._validator.iter_errors(value), ISSUES_MAX)]
        if looks <= LOOKS_MAX:
            try:
                self._validator.validate(value)
            except jsonschema_rs.ValidationError as error:
                return [_issue(error)]
        return [Issue("", "the payload does not match; it is too deeply nested for this schema to say where")]


def _refuse(error: Exception) -> NoReturn:
    path = _pointer(getattr(error, "instance_path", []))
    message = str(getattr(error, "message", error)).splitlines()[0][:MESSAGE_CHARS_MAX]
    kind = getattr(getattr(error, "kind", None), "name", "")
    hint = "patterns have no look-around and no back-references, and fewer repetitions" if "regex" in message else None
    where = f" at {path}" if path or kind else ""
    raise InvalidSchema(f"the schema is not valid{where}: {message}", hint=hint) from None


def _refuse_chain() -> NoReturn:
    raise InvalidSchema(f"the schema has a chain of more than {CHAIN_MAX} references and levels")


def _issue(error: jsonschema_rs.ValidationError) -> Issue:
    message = error.message
    if len(message) > MESSAGE_CHARS_MAX:
        message = message[: MESSAGE_CHARS_MAX - 1] + "…"
    return Issue(_pointer(error.instance_path), message, _pointer(error.schema_path))


def _pointer(path: list[str | int]) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def _depth(value: Any) -> int:
    """Return how deep a value is nested; level by level, so that nothing recurses."""
    level, depth = [value], 0
    while True:
        level = [item for item in level if isinstance(item, dict | list)]
        if not level or depth == DEPTH_MAX:
            return depth
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
        depth += 1


# --- how often a schema looks at one place ----------------------------------------------------------------------------


class _Effort:
    """How many schemas apply along one path from the root of a document down to a leaf, at the very most."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._anchors: dict[str, Any] = {}
        self._walk(root, top=True)
        # Schemas are told apart by identity: the tree is kept as long as this is.
        self._schemas: dict[int, dict[str, Any]] = {}
        self._counts: dict[int, tuple[int, int]] = {}
        self._levels: list[dict[int, int]] = []
        self._circular = False
        if self._count(root, frozenset())[0] > LOOKS_MAX:
            raise InvalidSchema(
                f"the schema can look at one place of a document more than {LOOKS_MAX} times",
                hint="its references multiply each other: have fewer alternatives that lead to the same place",
            )

    def looks(self, depth: int) -> int:
        """Return the number for documents nested that deep, with recursive references unfolded."""
        if not isinstance(self._root, dict) or not self._circular:
            return self._count(self._root, frozenset())[0]
        for _ in range(len(self._levels), depth + 1):
            below = self._levels[-1] if self._levels else None
            level: dict[int, int] = {}
            self._levels.append(level)
            for schema in self._schemas.values():
                self._unfold(schema, level, below, frozenset())
        return self._levels[depth][id(self._root)]

    def _count(self, schema: Any, above: frozenset[int]) -> tuple[int, int]:
        """Return the number without going round in circles, and how long the longest chain of schemas is.

        On circles the engine remembers what it has looked at.
        """
        if not isinstance(schema, dict):
            return 1, 1
        if id(schema) in above:
            self._circular = True
            return 1, 1
        if id(schema) not in self._counts:
            self._schemas[id(schema)] = schema
            inner = above | {id(schema)}
            if len(inner) > CHAIN_MAX:
                _refuse_chain()
            here, each, wide = (
                [self._count(part, inner) for part in parts]
                for parts in (self._here(schema), _each_below(schema), _all_below(schema))
            )
            chain = 1 + max((length for _, length in (*here, *each, *wide)), default=0)
            if chain > CHAIN_MAX:
                _refuse_chain()
            total = 1 + sum(count for count, _ in (*here, *wide)) + max((count for count, _ in each), default=0)
            self._counts[id(schema)] = (min(total, LOOKS_MAX + 1), chain)
        return self._counts[id(schema)]

    def _unfold(self, schema: Any, level: dict[int, int], below: dict[int, int] | None, above: frozenset[int]) -> int:
        """Return the number for one schema; circles on the spot end at once, others go as deep as the levels do."""
        if not isinstance(schema, dict) or id(schema) in above:
            return 1
        if id(schema) not in level:
            inner = above | {id(schema)}
            total = 1 + sum([self._unfold(part, level, below, inner) for part in self._here(schema)])
            if below is not None:
                total += max([below.get(id(part), 1) for part in _each_below(schema)], default=0)
                total += sum([below.get(id(part), 1) for part in _all_below(schema)])
            level[id(schema)] = min(total, LOOKS_MAX + 1)
        return level[id(schema)]

    def _here(self, schema: dict[str, Any]) -> Iterator[Any]:
        """Every schema that applies to the same place."""
        for keyword in HERE:
            if keyword in schema:
                yield schema[keyword]
        for keyword in HERE_LISTS:
            yield from _listed(schema, keyword)
        yield from _members(schema, "dependentSchemas")
        for keyword in REFERENCES:
            if keyword in schema:
                yield self._target(schema[keyword])

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            shown = str(reference)[:80]
            raise InvalidSchema(
                f"the reference {shown!r} leaves the document",
                hint="write references as #/$defs/name, within the schema",
            )
        fragment = unquote(reference[1:])
        if fragment and not fragment.startswith("/"):
            if fragment not in self._anchors:
                raise InvalidSchema(f"the reference {reference!r} leads nowhere")
            return self._anchors[fragment]
        found = self._root
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise InvalidSchema(f"the reference {reference!r} leads nowhere")
        return found

    def _walk(self, schema: Any, *, top: bool = False) -> None:
        """Collect anchors; refuse what reaches out of the document."""
        if not isinstance(schema, dict):
            return
        if top and schema.get("$schema", DIALECTS[0]) not in DIALECTS:
            raise InvalidSchema("the schema is of another draft", hint=f'leave $schema out, or write "{DIALECTS[0]}"')
        if not top and ("$id" in schema or "$schema" in schema):
            raise InvalidSchema("only the top of a schema may have $id and $schema")
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors[schema[keyword]] = schema
        below = [schema[keyword] for keyword in HERE if keyword in schema]
        below += [each for keyword in HERE_LISTS for each in _listed(schema, keyword)]
        below += [*_members(schema, "dependentSchemas"), *_members(schema, "$defs"), *_each_below(schema)]
        for each in (*below, *_all_below(schema)):
            self._walk(each)


def _members(schema: dict[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return list(found.values()) if isinstance(found, dict) else []


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _each_below(schema: dict[str, Any]) -> list[Any]:
    """Return schemas that each apply to a place of their own."""
    return [*_members(schema, "properties"), *_listed(schema, "prefixItems")]


def _all_below(schema: dict[str, Any]) -> list[Any]:
    """Return schemas that can all apply to the same place below."""
    found = [schema[keyword] for keyword in BELOW_ALL if keyword in schema]
    return [*found, *_members(schema, "patternProperties")]
