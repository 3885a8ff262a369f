"""The columns of an event in Spark: their names, their types, and where in the log's table they come from."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from postbus.model import Invalid

__all__ = ["COLUMNS", "EVENT_SCHEMA", "INSTANT", "Column", "chosen", "columns_table"]

INSTANT = pa.timestamp("us", tz="UTC")
BLOBS = frozenset({"payload", "metadata", "headers", "delivery_handle"})


class Column(NamedTuple):
    """One column: ``expression`` over the table of events (None: made from the partition), whether it may be null."""

    name: str
    kind: pa.DataType
    expression: str | None
    nullable: bool
    about: str

    @property
    def stored(self) -> pa.DataType:
        """The type of what the table holds."""
        if self.name in BLOBS:
            return pa.binary()
        return pa.string() if self.kind == pa.string() else pa.int64()


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("id", pa.string(), None, False, "the address `<stream>/<partition>/<offset>`"),
        Column("stream", pa.string(), None, False, "full name, `namespace.tenant.name`"),
        Column("partition", pa.int32(), None, False, "0-based"),
        Column("offset", pa.int64(), '"offset"', False, "position in the partition: 0-based, dense, never reused"),
        Column("topic", pa.string(), "topic", False, "dotted word"),
        Column("source", pa.string(), "source", False, "what produced it"),
        Column("variant", pa.string(), "variant", False, "empty when none was given"),
        Column("key", pa.string(), "key", True, "same key, same partition"),
        Column("payload", pa.string(), "payload", False, "JSON, byte for byte as it was published"),
        Column("metadata", pa.string(), "metadata", True, "JSON object"),
        Column("headers", pa.string(), "headers", True, "JSON object of strings"),
        Column("correlation_id", pa.string(), "correlation_id", True, "what belongs together"),
        Column("native_id", pa.string(), "native_id", True, "the publisher's own id: the idempotency key"),
        Column("delivery_handle", pa.string(), "delivery_handle", True, "JSON: where a reply goes"),
        Column("occurred_at", INSTANT, "IFNULL(occurred_at_us, created_at_us)", False, "when it happened"),
        Column("created_at", INSTANT, "created_at_us", False, "when it was appended"),
        Column("trust", pa.string(), "IFNULL(trust, 'trusted')", False, "`trusted` or `untrusted`"),
    )
}

_SPARK = {pa.string(): StringType(), pa.int32(): IntegerType(), pa.int64(): LongType(), INSTANT: TimestampType()}

EVENT_SCHEMA = StructType([StructField(each.name, _SPARK[each.kind], each.nullable) for each in COLUMNS.values()])


def chosen(schema: StructType) -> list[Column]:
    """Return the columns that a schema asks for, in its order and as nullable as it says.

    Raises ``Invalid`` for one that events do not have.
    """
    for field in schema:
        known = COLUMNS.get(field.name)
        if known is None:
            raise Invalid(f"events have no column {field.name!r}", hint=f"they have {', '.join(COLUMNS)}")
        if field.dataType != _SPARK[known.kind]:
            wanted = _SPARK[known.kind].simpleString()
            raise Invalid(f"the column {field.name} is of type {wanted}, not {field.dataType.simpleString()}")
    return [COLUMNS[field.name]._replace(nullable=field.nullable) for field in schema]


def columns_table() -> str:
    """Return the columns as a Markdown table, for the guide."""
    rows = [
        f"| `{each.name}` | {_SPARK[each.kind].simpleString()} | {'yes' if each.nullable else 'no'} | {each.about} |"
        for each in COLUMNS.values()
    ]
    return "\n".join(["| column | type | null | what |", "|---|---|---|---|", *rows])
