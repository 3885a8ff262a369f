"""A notebook in one file: events of a small shop, looked at with Spark. Run it as it is."""

# %% A shop publishes, a bus handles.
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import functions as fn

from postbus import EventBus, Reject
from postbus.spark.jobs.archive import archive
from postbus.spark.jobs.report import report
from postbus.spark.jobs.verify import verify_lake
from postbus.spark.lake import Lake
from postbus.spark.matcher import Rule, matched
from postbus.spark.session import Settings, opened_session

ORDERS = 200
PLACE = Path(tempfile.mkdtemp(prefix="postbus-notebook-"))
DATA = PLACE / "data"


async def shop() -> None:
    """Publish orders; billing turns them into invoices and refuses a few."""
    bus = EventBus(DATA)
    done = 0

    @bus.on("order.*", subscriber_id="billing")
    async def billing(event: Any, ctx: Any) -> None:
        nonlocal done
        done += 1
        if event.payload["total"] < 0:
            raise Reject("no negative totals")
        await ctx.publish("invoice.made", event.payload)

    async with bus:
        for n in range(ORDERS):
            await bus.publish("order.paid", "shop", {"n": n, "total": n * 7 % 100 - 5}, key=f"customer-{n % 9}")
        while done < ORDERS:  # noqa: ASYNC110 - a short example
            await asyncio.sleep(0.05)


asyncio.run(shop())

with opened_session(Settings(master="local[2,4]", shuffle_partitions=2)) as spark:
    # %% The log is a table.
    events = spark.read.format("postbus").load(str(DATA))
    events.groupBy("topic").agg(fn.count("*").alias("events")).orderBy("topic").show()

    # %% Payloads are JSON; give them a shape.
    orders = events.where("topic = 'order.paid' and not endswith(stream, '-dlq')")
    shaped = orders.select("key", fn.from_json("payload", "n long, total double").alias("order"))
    shaped.groupBy("key").agg(fn.sum("order.total").alias("turnover")).orderBy(fn.desc("turnover")).show(3)

    # %% The filters of subscriptions, on all of history.
    big = matched(events, [Rule("big", "order.*", {"expr": "payload.total > 90"})])
    print("orders above 90:", big.count())

    # %% Keep it for good, and prove it.
    lake = Lake(str(PLACE / "lake"))
    print(archive(spark, str(DATA), lake))
    print("the archive holds:", verify_lake(spark, lake, str(DATA)).ok)

    # %% A page to look at.
    facts, page = report(spark, str(DATA), str(PLACE / "report"), title="The shop")
    print(f"{facts.events} events, {sum(row['events'] for row in facts.dead)} dead letters: {page}")
