"""JSON Schemas: what is kept, what is refused, and that every publish goes through the one check."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus import EventBus
from postbus.model import Conflict, Invalid, InvalidSchema, LimitExceeded, NotFound, SchemaConflict, SchemaMismatch
from postbus.schemas import Document, Schemas

TENANT = "local.default"
ORDERS = "local.default.orders"
ORDER = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 0}}}
STRICT = ORDER | {"additionalProperties": False}


def issues(schema: Any, payload: Any) -> list[tuple[str, str]]:
    found = Document(msgspec.json.encode(schema)).issues(msgspec.json.encode(payload))
    return [(issue.pointer, issue.message) for issue in found]


# --- one schema -------------------------------------------------------------------------------------------------------


def test_issues_have_pointers_and_are_at_most_ten() -> None:
    schema = {"properties": {"a/b~": {"items": {"type": "string"}}}, "required": ["z"]}
    assert issues(schema, {"a/b~": ["x", 1], "z": 1}) == [("/a~1b~0/1", 'the value is not of type "string"')]
    assert issues(schema, {"a/b~": []}) == [("", '"z" is a required property')]
    assert len(issues(schema, {"a/b~": [1] * 50, "z": 1})) == 10
    assert issues(schema, {"z": 1}) == []


def test_an_issue_does_not_repeat_the_payload() -> None:
    ((_, message),) = issues({"type": "integer"}, "secret" * 1000)
    assert "secret" not in message
    ((_, message),) = issues({"enum": ["x" * 1000]}, 1)
    assert len(message) <= 300


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, 1, None),
        ({"type": "integer"}, 1.0, 1.5),
        ({"const": 2**70}, 2**70, 2**70 + 1),
        ({"maximum": 10}, 10, 10**400),
        ({"$defs": {"n": {"type": "null"}}, "items": {"$ref": "#/$defs/n"}}, [None], [1]),
        ({"$defs": {"n": {"$anchor": "here", "type": "null"}}, "items": {"$ref": "#here"}}, [None], [1]),
        ({"$id": "https://example.com/s", "items": {"$ref": "#"}, "type": "array"}, [[[]]], [[1]]),
        (
            {"$dynamicAnchor": "node", "type": "object", "additionalProperties": {"$dynamicRef": "#node"}},
            {"a": {}},
            {"a": 1},
        ),
        ({"prefixItems": [{"type": "string"}], "items": False}, ["a"], ["a", 1]),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1, "b": 1}, {"a": 1}),
        ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": True}}]}, {"a": 1}, {"b": 1}),
        ({"pattern": "^a+$"}, "aaa", "ab"),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "null"}, None, 1),
        ({"format": "email"}, "no email", None),
        ({"properties": {"$ref": {"type": "null"}}}, {"$ref": None}, {"$ref": "http://example.com"}),
        ({"const": {"$ref": "http://example.com"}}, {"$ref": "http://example.com"}, {}),
    ],
)
def test_draft_2020_12(schema: Any, good: Any, bad: Any) -> None:
    assert issues(schema, good) == []
    if bad is not None:
        assert issues(schema, bad) != []


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (1, "object or a boolean"),
        ([], "object or a boolean"),
        ({"type": "nonsense"}, "not valid at /type"),
        ({"minimum": "1"}, "not valid at /minimum"),
        ({"$ref": "http://example.com/schema.json"}, "leaves the document"),
        ({"$ref": "file:///etc/passwd"}, "leaves the document"),
        ({"$ref": "other.json"}, "leaves the document"),
        ({"items": [{"$ref": 1}]}, "not valid"),
        ({"$ref": 1}, "leaves the document"),
        ({"$dynamicRef": "https://example.com#a"}, "leaves the document"),
        ({"items": {"$id": "https://example.com/inner"}}, "only the top"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}}, "$ref": "#/$defs/a"}, "leads nowhere"),
        ({"$ref": "#nowhere"}, "leads nowhere"),
        ({"$ref": "#/allOf/1", "allOf": [True]}, "leads nowhere"),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, "another draft"),
        ({"$schema": "http://example.com/mine"}, "another draft"),
        ({"pattern": "("}, "not valid at /pattern"),
        ({"pattern": "(?=a)"}, "not valid at /pattern"),
        ({"pattern": r"(a)\1"}, "not valid at /pattern"),
        ({"patternProperties": {"(?!x)": True}}, "not valid"),
        ({"pattern": "((a{900}){900}){900}"}, "not valid at /pattern"),
    ],
)
def test_bad_schemas_are_refused(schema: Any, sentence: str) -> None:
    with pytest.raises(InvalidSchema, match=sentence):
        Document(msgspec.json.encode(schema))


@pytest.mark.parametrize("raw", [b"", b"{", b'{"a":1,"a":2}', b'{"maximum":NaN}', b"\xff", b"[" * 70 + b"]" * 70])
def test_what_is_not_strict_json_is_no_schema(raw: bytes) -> None:
    with pytest.raises(InvalidSchema, match="not JSON"):
        Document(raw)


def test_a_large_schema_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="262144"):
        Document(b'{"description": "' + b"x" * 300_000 + b'"}')


# --- schemas made to take long ----------------------------------------------------------------------------------------


def doubling(levels: int, wrap: Any) -> dict[str, Any]:
    """A schema of a few lines that unfolds to 2^levels."""
    definitions = {}
    for level in range(levels):
        again = {"$ref": f"#/$defs/a{level + 1}"}
        definitions[f"a{level}"] = wrap([again, dict(again)])
    return {"$defs": definitions | {f"a{levels}": {"type": "string"}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda two: {"anyOf": two},
        lambda two: {"allOf": two},
        lambda two: {"oneOf": two},
        lambda two: {"if": two[0], "else": two[1]},
        lambda two: {"properties": {"a": {"anyOf": two}}},
        lambda two: {"properties": {"a": two[0]}, "additionalProperties": two[1], "patternProperties": {"a": two[0]}},
        lambda two: {"not": {"not": {"anyOf": two}}},
        lambda two: {"dependentSchemas": {"a": two[0], "b": two[1]}},
        lambda two: {"items": {"allOf": two}},
    ],
)
def test_references_that_multiply_are_refused(wrap: Any) -> None:
    with pytest.raises(InvalidSchema, match=r"more than 5000 times"):
        Document(msgspec.json.encode(doubling(20, wrap)))
    Document(msgspec.json.encode(doubling(3, wrap)))


def test_long_chains_are_refused() -> None:
    chain = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(3_000)} | {"a3000": True}
    with pytest.raises(InvalidSchema, match="chain"):
        Document(msgspec.json.encode({"$defs": chain, "$ref": "#/$defs/a0"}))
    links = [{"$ref": f"#/$defs/a{number}"} for number in range(2_900, -1, -50)]
    with pytest.raises(InvalidSchema, match="chain"):
        Document(msgspec.json.encode({"$defs": chain, "allOf": links}))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"not": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
        {"$dynamicAnchor": "n", "anyOf": [{"$dynamicRef": "#n"}]},
    ],
)
def test_circles_end(schema: Any) -> None:
    assert len(issues(schema, {"a": 1})) <= 10


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}},
        {
            "type": "object",
            "allOf": [{"properties": {"a": {"$ref": "#"}}}, {"patternProperties": {"a": {"$ref": "#"}}}],
        },
        {"type": "object", "oneOf": [{"properties": {"a": {"$ref": "#"}}}, {"additionalProperties": {"$ref": "#"}}]},
    ],
)
def test_recursion_that_doubles_is_checked_and_not_listed(schema: Any) -> None:
    payload: Any = 1
    for _ in range(60):
        payload = {"a": payload}
    ((pointer, message),) = issues(schema, payload)
    assert (pointer, "too deeply nested" in message) == ("", True)
    assert issues(schema, {"a": {"a": 1}})[0][1] != message


def test_ordinary_recursion_says_where() -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}},
        "additionalProperties": False,
    }
    payload: Any = {"wrong": 1}
    for _ in range(50):
        payload = {"left": payload, "right": {}}
    assert [pointer for pointer, _ in issues(tree, payload)] == ["/left" * 50]


def test_a_great_many_faults_are_not_listed_one_by_one() -> None:
    found = issues({"items": {"type": "string"}}, [1] * 300_000)
    assert found == [("/0", 'the value is not of type "string"')]


def test_patterns_take_linear_time() -> None:
    assert issues({"pattern": "^(a+)+$"}, "a" * 900_000 + "b") != []
    assert issues({"pattern": "^(a|a)*b$"}, "a" * 900_000) != []


# --- versions and bindings --------------------------------------------------------------------------------------------


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EventBus]:
    bus = EventBus(tmp_path / "data")
    await bus.open()
    await bus.ensure_stream(ORDERS)
    yield bus
    await bus.stop()


@pytest.fixture
async def schemas(bus: EventBus) -> Schemas:
    return Schemas(await bus.open())


async def test_versions_count_up_and_numbers_are_never_used_again(schemas: Schemas) -> None:
    assert [(await schemas.add(TENANT, "order", ORDER)).version for _ in range(3)] == [1, 2, 3]
    await schemas.delete(TENANT, "order", 3)
    await schemas.delete(TENANT, "order", 1)
    assert (await schemas.add(TENANT, "order", ORDER)).version == 4
    assert [found.version for found in await schemas.find(TENANT, "order")] == [2, 4]
    assert (await schemas.show(TENANT, "order")).version == 4
    for version in (1, 3, 5, 0, -1):
        with pytest.raises(NotFound):
            await schemas.show(TENANT, "order", version)
        with pytest.raises(NotFound):
            await schemas.delete(TENANT, "order", version)
    with pytest.raises(NotFound):
        await schemas.show("local.other", "order")


async def test_a_schema_is_kept_byte_for_byte(schemas: Schemas) -> None:
    raw = b'{ "type" : "object" ,  "maxProperties": 1.0e1 }'
    await schemas.add(TENANT, "order", raw)
    assert (await schemas.show(TENANT, "order", 1)).document == raw


async def test_concurrent_adds_get_numbers_of_their_own(schemas: Schemas) -> None:
    made = await asyncio.gather(*(schemas.add(TENANT, "order", ORDER) for _ in range(20)))
    assert sorted(version.version for version in made) == list(range(1, 21))


@pytest.mark.parametrize(
    ("tenant", "subject"), [("local", "a"), ("a.b.c", "a"), (TENANT, ""), (TENANT, "a/b"), (TENANT, "a" * 121)]
)
async def test_bad_names_are_refused(schemas: Schemas, tenant: str, subject: str) -> None:
    with pytest.raises(Invalid):
        await schemas.add(tenant, subject, ORDER)
    assert await schemas.find() == []


async def test_a_bad_schema_takes_no_number(schemas: Schemas) -> None:
    with pytest.raises(InvalidSchema):
        await schemas.add(TENANT, "order", {"type": "nonsense"})
    assert (await schemas.add(TENANT, "order", ORDER)).version == 1


async def test_publish_is_checked_at_once_and_until_unbound(bus: EventBus, schemas: Schemas) -> None:
    await bus.publish(ORDERS, "shop", {"anything": 1})
    await schemas.add(TENANT, "order", ORDER)
    await schemas.bind(ORDERS, "order", force=True)
    receipt = await bus.publish(ORDERS, "shop", {"n": 1})
    with pytest.raises(SchemaMismatch, match="order version 1") as refusal:
        await bus.publish(ORDERS, "shop", {"n": -1})
    assert [issue.pointer for issue in refusal.value.issues] == ["/n"]
    with pytest.raises(SchemaMismatch):
        await bus.publish(ORDERS, "shop", b'{"n": "1"}')
    await bus.publish("orders.other", "shop", {"n": "free"})
    assert (await bus.publish(ORDERS, "shop", {"n": 2})).offset == receipt.offset + 1  # nothing was appended in between
    await schemas.unbind(ORDERS)
    await bus.publish(ORDERS, "shop", {"n": -1})
    with pytest.raises(NotFound):
        await schemas.unbind(ORDERS)


async def test_a_binding_survives_a_restart(tmp_path: Path) -> None:
    bus = EventBus(tmp_path / "data")
    await bus.ensure_stream(ORDERS)
    schemas = Schemas(await bus.open())
    await schemas.add(TENANT, "order", ORDER)
    await schemas.bind(ORDERS, "order", 1)
    await bus.stop()
    bus = EventBus(tmp_path / "data")
    with pytest.raises(SchemaMismatch):
        await bus.publish(ORDERS, "shop", {})
    await bus.publish(ORDERS, "shop", {"n": 1})
    await bus.stop()


OTHER = """
import asyncio, sys
from postbus.log import SqliteLog
from postbus.schemas import Schemas

async def main() -> None:
    log = SqliteLog.open(sys.argv[1])
    schemas = Schemas(log)
    if sys.argv[2] == "bind":
        await schemas.add("local.default", "order", {"required": ["n"]})
        await schemas.bind("local.default.orders", "order")
    else:
        await schemas.unbind("local.default.orders")
    await log.close()

asyncio.run(main())
"""


async def test_what_another_process_binds_holds_here_at_once(bus: EventBus, tmp_path: Path) -> None:
    def other(verb: str) -> None:
        subprocess.run([sys.executable, "-c", OTHER, str(tmp_path / "data"), verb], check=True, timeout=60)

    await bus.publish(ORDERS, "shop", {"n": 1})
    await asyncio.to_thread(other, "bind")
    with pytest.raises(SchemaMismatch):
        await bus.publish(ORDERS, "shop", {})
    await asyncio.to_thread(other, "unbind")
    await bus.publish(ORDERS, "shop", {})


async def test_binding_looks_at_the_latest_events_first(bus: EventBus, schemas: Schemas) -> None:
    for number in range(30):
        await bus.publish(ORDERS, "shop", {"n": number - 15})
    await schemas.add(TENANT, "order", ORDER)
    report = await schemas.bind(ORDERS, "order", dry_run=True)
    assert (report.bound, report.version, report.checked, report.refused_count) == (False, 1, 30, 15)
    assert [each.id for each in report.refused] == [f"{ORDERS}/0/{offset}" for offset in range(10)]
    assert report.refused[0].issues[0].pointer == "/n"
    with pytest.raises(SchemaConflict, match="15 of the latest 30 events") as refusal:
        await schemas.bind(ORDERS, "order")
    assert refusal.value.issues[0].items() >= {"id": f"{ORDERS}/0/0", "pointer": "/n"}.items()
    await bus.publish(ORDERS, "shop", {"n": -1})  # it is not bound
    report = await schemas.bind(ORDERS, "order", sample=15, force=True)
    assert (report.bound, report.checked, report.refused_count) == (True, 15, 1)
    with pytest.raises(SchemaMismatch):
        await bus.publish(ORDERS, "shop", {"n": -1})
    assert (await schemas.bind(ORDERS, "order", sample=0)).checked == 0


async def test_a_bound_version_cannot_be_deleted(schemas: Schemas) -> None:
    for _ in range(2):
        await schemas.add(TENANT, "order", ORDER)
    await schemas.bind(ORDERS, "order", 1)
    with pytest.raises(Conflict, match=ORDERS):
        await schemas.delete(TENANT, "order", 1)
    await schemas.bind(ORDERS, "order", 2)
    await schemas.delete(TENANT, "order", 1)
    with pytest.raises(Conflict):
        await schemas.delete(TENANT, "order", 2)


async def test_what_cannot_be_bound(bus: EventBus, schemas: Schemas) -> None:
    await schemas.add(TENANT, "order", ORDER)
    await schemas.add("local.other", "theirs", ORDER)
    await bus.publish("a.b", "shop", {})
    for stream, subject, version, error in (
        ("local.default.missing", "order", 1, NotFound),
        (ORDERS, "order", 2, NotFound),
        (ORDERS, "theirs", 1, NotFound),
        (ORDERS, "missing", None, NotFound),
        ("orders", "order", 1, Invalid),
        (f"{TENANT}.journal", "order", 1, Invalid),
        (f"{ORDERS}-dlq", "order", 1, Invalid),
    ):
        with pytest.raises(error):
            await schemas.bind(stream, subject, version)
    with pytest.raises(Invalid, match="sample"):
        await schemas.bind(ORDERS, "order", sample=-1)
    assert await schemas.bindings() == {}


async def test_a_stream_that_is_made_again_is_free(bus: EventBus, schemas: Schemas) -> None:
    await schemas.add(TENANT, "order", ORDER)
    await schemas.bind(ORDERS, "order")
    await (await bus.open()).delete_stream(ORDERS)
    await schemas.delete(TENANT, "order", 1)
    await bus.ensure_stream(ORDERS)
    await bus.publish(ORDERS, "shop", {"free": True})
    assert await schemas.bindings() == {}


async def test_a_change_during_publishes_never_leaves_an_old_binding_behind(bus: EventBus, schemas: Schemas) -> None:
    await schemas.add(TENANT, "order", ORDER)
    for _ in range(10):
        await asyncio.gather(
            schemas.bind(ORDERS, "order", force=True, sample=0),
            *(bus.publish(ORDERS, "shop", {"n": 1}) for _ in range(5)),
        )
        with pytest.raises(SchemaMismatch):
            await bus.publish(ORDERS, "shop", {})
        await asyncio.gather(schemas.unbind(ORDERS), *(bus.publish(ORDERS, "shop", {"n": 1}) for _ in range(5)))
        await bus.publish(ORDERS, "shop", {})


# --- whatever comes ---------------------------------------------------------------------------------------------------

KEYWORDS = [
    "type", "properties", "items", "allOf", "anyOf", "not", "if", "$ref", "$defs", "$anchor", "$id", "pattern", "enum",
    "prefixItems", "patternProperties", "required", "minimum", "dependentSchemas", "additionalProperties", "$schema",
    "$dynamicRef", "unevaluatedItems", "contains", "multipleOf", "$vocabulary", "format", "const", "maxLength",
]  # fmt: skip
ATOMS = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1.5,
        2**70,
        "",
        "a",
        "#",
        "#a",
        "#/$defs/a",
        "#/properties/a",
        "#/%",
        "a+",
        "(",
        "object",
    ]
)
ANYTHING = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a", "b"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None)
@given(ANYTHING, ANYTHING)
def test_any_json_is_a_schema_or_refused(schema: Any, payload: Any) -> None:
    raw = msgspec.json.encode(payload)
    try:
        document = Document(msgspec.json.encode(schema))
    except InvalidSchema:
        return
    assert len(document.issues(raw)) <= 10
