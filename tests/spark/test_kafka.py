"""A log on Kafka through Spark's own Kafka source: row for row what our reader gives, or a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from postbus.clock import SystemClock
from postbus.envelope import draft
from postbus.log.kafka import Kafka
from postbus.log.kafka.names import topic_of
from postbus.log.kafka.records import HOLE, REPEAT, Looked, record_of
from postbus.model import Draft, Invalid, NotFound, OffsetOutOfRange, Stream, StreamSettings
from postbus.spark import frames
from postbus.spark import kafka as own
from postbus.spark.errors import told
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.verify import verify_lake
from postbus.spark.kafka import SETTING, has_connector, log_frame
from postbus.spark.lake import Lake
from postbus.spark.schema import EVENT_SCHEMA
from tests.services import fresh_prefix, running, running_kafka
from tests.spark.office import ORDERS, sample
from tests.spark.test_remote import Remote
from tests.upstream.secure import WHO, SecureKafka

T = TypeVar("T")
PATIENCE_S = 60.0
NOW_US = 1_700_000_000_000_000


class Broker:
    """A log on the real broker, with a hand for what only others write."""

    def __init__(self) -> None:
        server = running_kafka()
        self.address, self.prefix = server.address, fresh_prefix()
        self.url = f"{server.url}/{self.prefix}"

    def run(self, call: Callable[[Kafka], Coroutine[Any, Any, T]]) -> T:
        async def work() -> T:
            client = Kafka(self.address, self.prefix, answer_s=PATIENCE_S)
            try:
                return await call(client)
            finally:
                await client.close()

        return asyncio.run(work())

    def stream(self, name: str = ORDERS, partitions: int = 1) -> Stream:
        return self.run(lambda client: client.ensure_stream(name, StreamSettings(partitions=partitions)))

    def append(self, stream: Stream, *drafts: Draft, partition: int | None = None) -> None:
        ids = [SystemClock().new_id() for _ in drafts]
        self.run(lambda client: client.append(stream, drafts, ids, NOW_US, partition))

    def extents(self, stream: Stream) -> list[tuple[int, int]]:
        return self.run(lambda client: client.extents(stream))

    def trim(self, stream: Stream, before: int, partition: int = 0) -> None:
        self.run(lambda client: client.trim(stream, partition, before))

    def foreign(self, stream: Stream, partition: int, *bodies: bytes | None, **more: Any) -> None:
        writer = Producer({"bootstrap.servers": self.address})
        for body in bodies:
            writer.produce(topic_of(self.prefix, stream), body, partition=partition, **more)
        assert writer.flush(PATIENCE_S) == 0

    def late(self, stream: Stream, partition: int, one: Draft, looked: Looked) -> None:
        """Append as a publisher does that had looked only so far."""
        made = record_of(topic_of(self.prefix, stream), partition, one, "late", NOW_US, looked)
        _, _, body, headers, key = made
        self.foreign(stream, partition, body, headers=headers, key=key)

    def transaction(self, stream: Stream, partition: int, *bodies: bytes, commit: bool = True) -> None:
        """Let somebody write in a transaction, whose end takes an offset that has no record."""
        before = self.extents(stream)[partition][1]
        writer = Producer({"bootstrap.servers": self.address, "transactional.id": fresh_prefix()})
        writer.init_transactions(PATIENCE_S)
        writer.begin_transaction()
        for body in bodies:
            writer.produce(topic_of(self.prefix, stream), body, partition=partition)
        writer.flush(PATIENCE_S)
        (writer.commit_transaction if commit else writer.abort_transaction)(PATIENCE_S)
        wanted = before + len(bodies)  # the mark is written a moment after the answer
        assert self.run(lambda client: client.wait(stream, partition, wanted, PATIENCE_S))


@pytest.fixture
def broker(connector: list[Path]) -> Broker:
    assert connector
    return Broker()


@pytest.fixture
def mixed(broker: Broker) -> Stream:
    """Everything that a topic of ours can hold, in three partitions, one of them trimmed."""
    stream = broker.stream(partitions=3)
    broker.append(stream, *map(sample, range(60)))
    big = {f"h{number}": "ü" * 1000 for number in range(20)}
    broker.append(stream, draft("order.big", "shop", {"n": 1}, headers=big, native_id="big"), partition=0)
    broker.foreign(stream, 0, b'{"theirs": 1}', b"\xff not JSON", None, b"", timestamp=1_600_000_000_000)
    broker.foreign(stream, 1, b"{}", headers=[("postbus", b"nonsense"), ("postbus", b"[1]")], key=b"\xff")
    broker.foreign(stream, 1, b"{}", headers={"postbus": None})
    same = draft("order.paid", "shop", {"n": "same"}, native_id="same")
    at = broker.extents(stream)[0][1]
    broker.append(stream, same, sample(1), partition=0)
    broker.late(stream, 0, same, Looked(at, at))
    broker.transaction(stream, 0, b'"in a transaction"')
    broker.transaction(stream, 0, b'"given up"', commit=False)
    broker.append(stream, *map(sample, range(100, 110)), partition=0)
    broker.transaction(stream, 2, b'"the last"')
    broker.trim(stream, 4, partition=1)
    broker.append(broker.stream("local.default.snake_case"), sample(0), sample(1))
    return stream


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, frame.collect()))


def both(spark: SparkSession, broker: Broker, **options: Any) -> list[tuple[Any, ...]]:
    """Return the rows, which are the same from both readers."""
    theirs = log_frame(spark, broker.url, kafka_reader="spark", **options)
    ours = log_frame(spark, broker.url, kafka_reader="postbus", **options)
    assert theirs.schema == ours.schema
    found = rows(theirs)
    assert found == rows(ours)
    return found


def test_both_readers_give_the_same_rows(spark: SparkSession, broker: Broker, mixed: Stream) -> None:
    found = both(spark, broker)
    extents = broker.extents(mixed)
    assert extents[1][0] == 4
    assert len(found) == sum(end - first for first, end in extents) + 2
    topics = [row[EVENT_SCHEMA.names.index("topic")] for row in found]
    assert (topics.count(HOLE), topics.count(REPEAT), topics.count("order.big")) == (3, 1, 1)
    assert topics.count(ORDERS) == 9  # what others wrote
    big = next(row for row in found if row[EVENT_SCHEMA.names.index("native_id")] == "big")
    assert len(big[EVENT_SCHEMA.names.index("headers")].encode()) > 32 * 1024


def test_slices_with_nothing_but_marks(spark: SparkSession, broker: Broker) -> None:
    """Nothing of a task's range may be there but the end of a transaction, and a repeat's first in another task."""
    stream = broker.stream()
    broker.append(stream, sample(1))
    broker.transaction(stream, 0, b'"theirs"')
    same = draft("order.paid", "shop", {}, native_id="same")
    broker.append(stream, same, sample(3))
    broker.late(stream, 0, same, Looked(3, 3))
    found = both(spark, broker, eventsPerTask=1)
    topics = [row[EVENT_SCHEMA.names.index("topic")] for row in found]
    assert topics == ["order.sent", ORDERS, HOLE, "order.paid", "order.paid", REPEAT]
    broker.trim(stream, 2)
    assert len(both(spark, broker)) == 4
    assert len(both(spark, broker, startingOffset=2, endingOffset=3)) == 1


def test_options_hold_for_both(spark: SparkSession, broker: Broker, mixed: Stream) -> None:
    key = f"{mixed.name}/0"
    some = both(spark, broker, stream="orders", partition=0, topic="order.*", startingOffset={key: 3})
    assert 0 < len(some) < len(both(spark, broker, stream="orders", partition=0))
    assert len(both(spark, broker, startingOffset={key: 3}, endingOffset={key: 7})) == 4
    assert both(spark, broker, startingOffset={key: 3}, endingOffset={key: 3}) == []
    few = log_frame(spark, broker.url, kafka_reader="spark", schema=StructType(EVENT_SCHEMA.fields[3:5]))
    asked = few.where("topic = 'order.paid' AND offset > 5")
    ours = log_frame(spark, broker.url, kafka_reader="postbus").select("offset", "topic")
    assert rows(asked) == rows(ours.where("topic = 'order.paid' AND offset > 5")) != []


def test_what_cannot_be_read_is_one_sentence(spark: SparkSession, broker: Broker, office: Any) -> None:
    stream = broker.stream()
    broker.append(stream, *map(sample, range(20)))
    for options, kind, words in (
        ({"stream": "nothing"}, Invalid, "there is no stream local.default.nothing"),
        ({"startingOffset": 21}, OffsetOutOfRange, "startingOffset is 21"),
        ({"nonsense": 1}, Invalid, "there is no option 'nonsense'"),
    ):
        with pytest.raises(kind, match=words):
            log_frame(spark, broker.url, kafka_reader="spark", **options)
    with pytest.raises(Invalid, match="the reader of Kafka is 'fast'"):
        log_frame(spark, broker.url, kafka_reader="fast")
    office.fill(3)
    with pytest.raises(Invalid, match="cannot read"):
        log_frame(spark, str(office.data), kafka_reader="spark")
    assert log_frame(spark, str(office.data)).count() == 3
    planned = log_frame(spark, broker.url, kafka_reader="spark")
    broker.trim(stream, 8)
    with pytest.raises(OffsetOutOfRange, match="retention has removed"), told():
        planned.collect()
    planned = log_frame(spark, broker.url, kafka_reader="spark")
    broker.run(lambda client: client.delete_stream(stream.name))
    with pytest.raises(NotFound, match="was deleted while it was read"), told():
        planned.collect()


def test_the_setting_chooses(spark: SparkSession, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.append(broker.stream(), sample(0))

    def reads() -> str:
        plan = log_frame(spark, broker.url)._jdf.queryExecution().toString()
        return "spark" if "MapInArrow" in plan else "postbus"

    assert has_connector(spark)
    try:
        assert reads() == "spark"
        spark.conf.set(SETTING, "postbus")
        assert reads() == "postbus"
        spark.conf.set(SETTING, "spark")
        assert reads() == "spark"
        monkeypatch.setattr(own, "FORMAT", "nothing.of.that.name")
        with pytest.raises(NotFound, match="its connector is not on the class path"):
            log_frame(spark, broker.url)
        spark.conf.set(SETTING, "auto")
        assert reads() == "postbus"
    finally:
        spark.conf.unset(SETTING)


def test_jobs_whose_tasks_are_elsewhere_use_it(
    spark: SparkSession, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks here could read the node's copy; told that they are elsewhere, they read Kafka."""
    node = Remote(broker.url, tmp_path / "node")
    stream = broker.stream(partitions=2)
    broker.append(stream, *map(sample, range(50)))
    broker.transaction(stream, 1, b'"theirs"')
    node.fill(5, "local.default.orders-dlq")
    monkeypatch.setattr(frames, "is_local", lambda _spark: False)
    lake = Lake(str(tmp_path / "lake"))
    done = archive(spark, node.url, lake, batch_events=30)
    assert (done.events, done.batches) == (57, 2)
    found = verify_lake(spark, lake, node.url)
    assert (found.ok, found.events) == (True, 57)


def test_a_kafka_that_wants_tls_and_a_password_is_read_both_ways(spark: SparkSession) -> None:
    server = running(SecureKafka)
    papers, prefix = server.papers, fresh_prefix()
    tls = f"tls={papers.authority}&cert={papers.client}&key={papers.client_key}"

    async def fill() -> None:
        client = Kafka(server.address, prefix, answer_s=PATIENCE_S)
        stream = await client.ensure_stream(ORDERS)
        drafts = [draft("orders.made", "shop", {"n": number}) for number in range(20)]
        await client.append(stream, drafts, [SystemClock().new_id() for _ in drafts], NOW_US)
        await client.close()

    asyncio.run(fill())
    try:
        for who, more in ((WHO, "&sasl=SCRAM-SHA-512"), ("plain:plain", "")):
            url = f"kafka://{who}@{server.secure}/{prefix}?{tls}{more}"
            for reader in ("spark", "postbus"):
                rows = log_frame(spark, url, kafka_reader=reader).select("offset", "payload").collect()
                assert sorted((row.offset, row.payload) for row in rows) == [(n, f'{{"n":{n}}}') for n in range(20)]
    finally:
        server.kill()
