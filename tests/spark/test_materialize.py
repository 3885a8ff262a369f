"""Spark fills inboxes: beside the live pump, in turns with it, and whatever others do to the store meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postbus.bus import EventBus
from postbus.cli import spark_bars
from postbus.clock import SystemClock
from postbus.envelope import draft
from postbus.inbox import Cleanup, Inboxes
from postbus.inbox.pump import ATTEMPTS
from postbus.log import SqliteLog
from postbus.model import Draft, Invalid, NotFound, OffsetOutOfRange, Start, StartPolicy, StreamSettings
from postbus.spark.jobs import materialize as job
from postbus.spark.jobs.materialize import Materialized, backfill, materialize
from postbus.spark.session import Settings
from tests.spark.mail import EARLIEST, TENANT, Mail
from tests.spark.test_pipeline_commands import Commands

JOURNAL = f"{TENANT}.journal"
PATIENCE_S = 120.0


@pytest.fixture
def mail(tmp_path: Path) -> Mail:
    made = Mail(tmp_path / "data")
    made.agent()
    return made


def orders(count: int, first: int = 0) -> list[Draft]:
    return [draft(("order.paid", "user.seen")[n % 2], "shop", {"n": n}) for n in range(first, first + count)]


def serve(spark: SparkSession, mail: Mail, **options: Any) -> Materialized:
    return asyncio.run(materialize(spark, str(mail.data), **options))


@asynccontextmanager
async def opened(mail: Mail) -> AsyncIterator[Inboxes]:
    log = SqliteLog.open(mail.data)
    inboxes = Inboxes(log, SystemClock())
    try:
        yield inboxes
    finally:
        await inboxes.stop()
        await log.close()


@asynccontextmanager
async def following(spark: SparkSession, mail: Mail) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(materialize(spark, str(mail.data), follow=True, stop=stop))
    try:
        yield
    finally:
        stop.set()
        await task


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while not await holds():
        assert loop.time() < deadline, "it never happens"
        await asyncio.sleep(0.05)


async def lags(inboxes: Inboxes, *names: str) -> int:
    return sum([lag.total for name in names for lag in await inboxes.lag(TENANT, name)])


# --- once -------------------------------------------------------------------------------------------------------------


def test_only_subscriptions_of_its_engine_and_cursors_from_what_was_read(spark: SparkSession, mail: Mail) -> None:
    mail.agent("bob")
    mail.subscribe("order.*", "orders")
    mail.subscribe("nobody.>", "nothing")
    mail.subscribe(">", "live", "bob", engine="live")
    mail.append(orders(40), JOURNAL)
    seen: list[tuple[int, int]] = []
    done = serve(spark, mail, progress=lambda *at: seen.append(at))
    assert (done.events, done.matches, done.jobs) == (40, 20, 1)
    assert (seen[0], seen[-1]) == ((0, 40), (40, 40))
    assert mail.inbox() == list(range(0, 40, 2))
    assert (mail.place("orders"), mail.place("nothing"), mail.place("live")) == (40, 40, 0)
    assert mail.inbox("bob") == []
    mail.pump()
    assert mail.inbox("bob") == list(range(40))
    assert mail.inbox() == list(range(0, 40, 2)), "the pump left the others alone"
    assert serve(spark, mail) == Materialized(events=0, matches=0, jobs=0)


def test_streams_made_later_partitions_and_other_tenants(spark: SparkSession, mail: Mail) -> None:
    mail.agent("ann", "acme.eu")
    mail.subscribe(f"{TENANT}.wide", "wide")
    mail.subscribe(">", "theirs", tenant="acme.eu")
    mail.stream(f"{TENANT}.wide", partitions=3)
    mail.append([draft("a", "s", n, key=f"k{n}") for n in range(90)], f"{TENANT}.wide")
    mail.append(orders(5), "acme.eu.journal")
    mail.append(orders(5), JOURNAL)
    serve(spark, mail, tenant="acme.eu")
    assert (len(mail.inbox(tenant="acme.eu")), mail.inbox()) == (5, [])
    serve(spark, mail)
    assert len(mail.inbox()) == 90
    ends = [mail.place("wide", f"{TENANT}.wide", partition) for partition in range(3)]
    assert sum(ends) == 90
    assert min(ends) > 0


def test_chosen_subscriptions_and_what_is_refused(spark: SparkSession, mail: Mail, tmp_path: Path) -> None:
    mail.subscribe("order.*", "one")
    mail.subscribe("user.*", "two")
    mail.subscribe("user.*", "live", engine="live")
    mail.append(orders(10), JOURNAL)
    serve(spark, mail, tenant=TENANT, subscriptions=["two"])
    assert (mail.place("one"), mail.place("two")) == (0, 10)
    before = mail.all()
    with pytest.raises(NotFound, match="no inbox subscription three"):
        serve(spark, mail, tenant=TENANT, subscriptions=["one", "three"])
    with pytest.raises(Invalid, match="live is served by the live pump"):
        serve(spark, mail, tenant=TENANT, subscriptions=["live"])
    with pytest.raises(Invalid, match="named within a tenant"):
        serve(spark, mail, subscriptions=["one"])
    with pytest.raises(NotFound, match="there is no store"):
        asyncio.run(materialize(spark, str(tmp_path / "nowhere")))
    with pytest.raises(NotFound, match="no inbox subscription three"):
        asyncio.run(backfill(spark, str(mail.data), TENANT, ["one", "three"]))
    with pytest.raises(Invalid, match="no engine is called 'steam'"):
        mail.hand_over("one", "steam")  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        mail.hand_over("three", "live")
    assert mail.all() == before


def test_a_subscription_that_is_over_is_not_served(spark: SparkSession, mail: Mail) -> None:
    mail.subscribe(">", "short", cleanup=Cleanup(on_terminal={"payload": {"n": 3}}, grace_s=0))
    mail.append(orders(4), JOURNAL)
    serve(spark, mail)
    mail.append(orders(4, first=4), JOURNAL)
    serve(spark, mail)
    assert mail.inbox() == [0, 1, 2, 3]


def test_many_matches_stop_a_task_early_and_nothing_is_skipped(
    spark: SparkSession, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "TASK_MATCHES", 50)
    monkeypatch.setattr(job, "PAGE_MATCHES", 20)
    monkeypatch.setattr(job, "TASK_MIN", 100)
    monkeypatch.setattr(job, "SHARE_MIN", 100)
    mail.subscribe(">", "all")
    mail.append(orders(400), JOURNAL)
    done = serve(spark, mail)
    assert done.jobs > 1
    assert done.events == 400
    assert mail.inbox() == list(range(400))


# --- with others ------------------------------------------------------------------------------------------------------


async def test_it_follows_the_log_beside_the_live_pump(spark: SparkSession, mail: Mail) -> None:
    async with opened(mail) as inboxes, following(spark, mail):
        await inboxes.start()
        await inboxes.subscribe(TENANT, "ann", "order.*", id="spark", engine="spark")
        await inboxes.subscribe(TENANT, "ann", ">", id="live")
        for n in range(0, 60, 10):
            await inboxes.log.append(JOURNAL, orders(10, first=n))
            await asyncio.sleep(0.1)

        async def served() -> bool:
            return await lags(inboxes, "spark", "live") == 0

        await until(served)
        items = await inboxes.items.read(TENANT, "ann", limit=100)
    assert sorted(item.event.offset for item in items if item.event is not None) == list(range(60))
    for item in items:
        assert item.event is not None
        both = item.event.offset % 2 == 0
        assert set(item.matched_by) == ({"spark", "live"} if both else {"live"})


def test_handed_over_again_and_again_under_traffic_nothing_is_lost_or_twice(spark: SparkSession, mail: Mail) -> None:
    count = 600
    asyncio.run(in_turns(spark, mail, count))
    assert sorted(mail.inbox()) == list(range(count))
    matched = {row[5]: row[6] for row in mail.all()["items"]}
    assert all(("orders" in names) == (offset % 2 == 0) and "all" in names for offset, names in matched.items())


async def in_turns(spark: SparkSession, mail: Mail, count: int) -> None:
    async with opened(mail) as inboxes, following(spark, mail):
        await inboxes.start()
        await inboxes.subscribe(TENANT, "ann", ">", id="all", start=EARLIEST)
        await inboxes.subscribe(TENANT, "ann", "order.*", id="orders", start=EARLIEST, engine="spark")
        for turn, n in enumerate(range(0, count, 50)):
            await inboxes.log.append(JOURNAL, orders(50, first=n))
            moved = await inboxes.hand_over(TENANT, "all", ("spark", "live")[turn % 2])
            assert moved.engine == ("spark", "live")[turn % 2]
            await asyncio.sleep(0.25)

        async def served() -> bool:
            return await lags(inboxes, "all", "orders") == 0

        await until(served)


def test_a_backfill_serves_a_long_history_and_then_the_pump_goes_on(spark: SparkSession, mail: Mail) -> None:
    count = 3_000
    mail.append(orders(count), JOURNAL)
    mail.subscribe("order.*", "late", engine="live")
    done = asyncio.run(backfill(spark, str(mail.data), TENANT, ["late"]))
    assert (done.events, done.matches) == (count, count // 2)
    asyncio.run(goes_on(mail, count))
    assert mail.inbox() == list(range(0, count + 10, 2))


async def goes_on(mail: Mail, count: int) -> None:
    async with opened(mail) as inboxes:
        assert (await inboxes.agents.subscription(TENANT, "late")).engine == "live"
        await inboxes.start()
        await inboxes.log.append(JOURNAL, orders(10, first=count))

        async def served() -> bool:
            return await lags(inboxes, "late") == 0

        await until(served)


# --- what happens between reading and delivering ----------------------------------------------------------------------


def between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], *, before: bool = False) -> None:
    """Have something happen once, after Spark has matched (or before) and before anything of it is delivered."""
    real, acts = job._collected, [act]

    def collected(*work: Any) -> Any:  # runs in a thread of its own
        if before and acts:
            acts.pop()()
        found = real(*work)
        if acts:
            acts.pop()()
        return found

    monkeypatch.setattr(job, "_collected", collected)


def call(mail: Mail, act: Callable[[Inboxes], Awaitable[Any]]) -> None:
    async def work(log: SqliteLog) -> None:
        await act(Inboxes(log, SystemClock()))

    mail.run(work)


def test_a_reset_in_between_is_never_undone(spark: SparkSession, mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    mail.append(orders(30), JOURNAL)
    mail.subscribe(">", "all", start=Start(policy=StartPolicy.AT_OFFSET, offset=10))
    between(monkeypatch, lambda: call(mail, lambda inboxes: inboxes.reset(TENANT, "all", EARLIEST)))
    serve(spark, mail)
    assert mail.inbox() == list(range(30)), "in the order of the log"


def test_who_unsubscribes_in_between_gets_nothing(
    spark: SparkSession, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    mail.agent("bob")
    mail.subscribe(">", "all")
    mail.subscribe(">", "gone", "bob")
    mail.append(orders(30), JOURNAL)
    between(monkeypatch, lambda: call(mail, lambda inboxes: inboxes.unsubscribe(TENANT, "gone")))
    serve(spark, mail)
    assert mail.inbox() == list(range(30))
    assert mail.inbox("bob") == []


def test_an_agent_removed_in_between(spark: SparkSession, mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    mail.agent("bob")
    mail.subscribe(">", "all")
    mail.subscribe(">", "gone", "bob")
    mail.append(orders(30), JOURNAL)
    between(monkeypatch, lambda: call(mail, lambda inboxes: inboxes.remove_agent(TENANT, "bob")))
    serve(spark, mail)
    assert mail.inbox() == list(range(30))
    assert len(mail.all()["items"]) == 30


def test_retention_that_is_quicker(spark: SparkSession, mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{TENANT}.short"
    mail.run(lambda log: log.ensure_stream(name, StreamSettings(retention_beats_consumers=True)))
    mail.append(orders(30), name)
    mail.subscribe(name, "all")
    between(monkeypatch, lambda: mail.trim(12, name), before=True)
    serve(spark, mail)
    assert mail.inbox() == list(range(12, 30))
    assert mail.place("all", name) == 30


def test_a_stream_deleted_in_between(spark: SparkSession, mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{TENANT}.short"
    mail.append(orders(30), name)
    mail.append(orders(6), JOURNAL)
    mail.subscribe(name, "short")
    mail.subscribe(">", "all")
    between(monkeypatch, lambda: mail.run(lambda log: log.delete_stream(name)))
    serve(spark, mail)
    assert mail.inbox() == list(range(6))


# --- waves ------------------------------------------------------------------------------------------------------------


def small_waves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have a wave for every twenty events, and return what is done: a wave begins, is over, is delivered in part."""
    told: list[str] = []
    real, deliver = job._collected, job._Run._deliver

    def collected(*work: Any) -> Any:
        told.append("begun")
        return real(*work)

    async def delivered(run: Any, group: Any, page: Any) -> None:
        await deliver(run, group, page)
        told.append("delivered")

    for name, value in (("TASK_MIN", 10), ("TASK_MAX", 10)):
        monkeypatch.setattr(job, name, value)
    monkeypatch.setattr(job, "_collected", collected)
    monkeypatch.setattr(job._Run, "_deliver", delivered)
    return told


def test_spark_goes_on_while_pages_are_delivered(
    spark: SparkSession, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    mail.append(orders(200), JOURNAL)
    mail.subscribe(">", "all")
    told = small_waves(monkeypatch)
    places: list[int] = []
    done = serve(spark, mail, progress=lambda at, _total: places.append(at))
    assert (done.events, done.jobs) == (200, 1)
    assert mail.inbox() == list(range(200))
    assert told.count("begun") == 10
    before = told[: told.index("delivered")].count("begun")
    assert before == job.WAVES_AHEAD, "several run before the first is delivered, and no more than that"
    assert told[-1] == "delivered"
    assert places == sorted(places)
    assert len(set(places)) > 10, "progress is seen as it comes"


def test_a_wave_that_fails_takes_nothing_away_and_nothing_is_run_behind_a_page_that_is_missing(
    spark: SparkSession, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    mail.append(orders(200), JOURNAL)
    mail.subscribe(">", "all")
    told = small_waves(monkeypatch)
    real, failing = job._collected, [2]

    def collected(session: Any, work: Any) -> Any:
        if failing and work.tasks[0][0].start == 40:
            failing.pop()
            raise OffsetOutOfRange("it was trimmed")
        return real(session, work)

    monkeypatch.setattr(job, "_collected", collected)
    done = serve(spark, mail)
    assert mail.inbox() == list(range(200))
    assert (done.events, done.jobs) == (200, 2)
    assert told.count("begun") < 10 + 8


# --- poison -----------------------------------------------------------------------------------------------------------

TRIGGER = """
    CREATE TRIGGER poison BEFORE INSERT ON inbox_rows
    WHEN NEW."offset" = 7 AND NEW.agent_no = (SELECT agent_no FROM agent_registry WHERE agent = 'bob')
    BEGIN SELECT RAISE(ABORT, 'this one cannot be put there'); END
"""


def alter(mail: Mail, statement: str) -> None:
    async def work(log: SqliteLog) -> None:
        await log.store.write(lambda db: db.execute(statement).get, grows=False)

    mail.run(work)


def test_an_item_that_cannot_be_made_is_dead_and_comes_back_when_it_is_replayed(
    spark: SparkSession, mail: Mail, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "postbus.inbox")
    monkeypatch.setattr(job, "RETRY_S", 0.01)
    mail.agent("bob")
    mail.subscribe(">", "a")
    mail.subscribe(">", "b", "bob")
    mail.append(orders(20), JOURNAL)
    alter(mail, TRIGGER)
    serve(spark, mail)
    assert mail.inbox() == list(range(20))
    assert mail.inbox("bob") == [n for n in range(20) if n != 7]
    assert (mail.place("a"), mail.place("b")) == (20, 20)

    async def look(log: SqliteLog) -> None:
        bus = EventBus(tenant=TENANT, clock=SystemClock(), log=log)
        await bus.open()
        (letter,) = await bus.dead_letters.find()
        assert (letter.origin_offset, letter.subscription, letter.reason) == (7, "b", "poison")
        assert letter.attempts == ATTEMPTS
        assert await bus.dead_letters.replay([letter]) == 1
        await bus.stop()

    mail.run(look)
    alter(mail, "DROP TRIGGER poison")
    serve(spark, mail)
    assert sorted(mail.inbox("bob")) == list(range(20))


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(
    spark: SparkSession, mail: Mail, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Commands:
    @contextmanager
    def shared(_settings: Settings) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(spark_bars, "opened_session", shared)
    monkeypatch.setenv("POSTBUS_DATA", str(mail.data))
    return Commands(capsys)


def test_run_hand_over_and_backfill_from_the_command_line(commands: Commands, mail: Mail) -> None:
    mail.subscribe("order.*", "orders")
    assert commands("run").out == "nothing is new\n"
    mail.append(orders(10), JOURNAL)
    assert commands("run").out == "read 11 events, 5 items for inboxes\n", "with the record of the run itself"
    assert commands("run", "--json").json == {"events": 0, "matches": 0, "jobs": 0, "filter_errors": {}}, (
        "its own records are no news"
    )
    assert mail.inbox() == list(range(0, 10, 2))
    commands("hand-over", "orders", "--to", "live")
    assert "served by the live pump" in commands("run", "orders", code=2).err
    mail.append(orders(10), JOURNAL)
    mail.pump()
    assert commands("hand-over", "orders", "--to", "spark", "--json").json["engine"] == "spark"
    mail.append(orders(10), JOURNAL)
    done = commands("backfill", "orders").out
    assert done == "read 11 events, 5 items for inboxes; the live bus goes on from there\n"
    assert len(mail.inbox()) == 15
    runs = commands("status", "--json").json["runs"]
    assert [(run["job"], run["state"]) for run in runs] == [("backfill", "finished"), ("run", "finished")]


def test_the_commands_refuse_in_one_sentence_and_change_nothing(commands: Commands, mail: Mail) -> None:
    mail.subscribe("order.*", "orders")
    before = mail.all()
    assert "no inbox subscription other" in commands("run", "other", code=4).err
    assert "no inbox subscription other" in commands("backfill", "orders", "other", code=4).err
    assert "no inbox subscription other" in commands("hand-over", "orders", "other", "--to", "live", code=4).err
    assert "named within a tenant" in commands("run", "orders", "--all-tenants", code=2).err
    commands("hand-over", "orders", "--to", "steam", code=2)
    assert mail.all() == before
    assert commands("run", "--all-tenants").out == "nothing is new\n"
