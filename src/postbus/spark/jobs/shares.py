"""The part of ``materialize`` that runs in tasks: a share of the log is read, matched by its cohort, and put on pages.

Everything travels as data. The matching is the live pump's own: the same cohort, the same matches.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from postbus.inbox.agents import Digest, InboxSubscription
from postbus.inbox.cohort import Cohort, Member
from postbus.inbox.door import Match
from postbus.spark.extent import Extent
from postbus.spark.matcher import NEEDED, events_of
from postbus.spark.reading import Range, read_range
from postbus.spark.schema import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Page", "Share", "Work", "halves", "pages", "pages_here"]

PAGE_KIND = pa.schema([("page", pa.binary())])
_EVENT = [COLUMNS[name] for name in NEEDED]


class Share(msgspec.Struct, frozen=True):
    """Offsets ``start`` up to ``end`` of a partition, to be matched by one of the cohorts."""

    cohort: int
    extent: Extent
    start: int
    end: int


class Work(msgspec.Struct, frozen=True):
    """One job: subscriptions with their agents' numbers, cohorts of them, and the shares of each task in order.

    A cohort is made of numbers of subscriptions, each with the place of its cursor. A page ends after so many matches,
    and so does a task: its last page says how far it came.
    """

    data: str
    subscriptions: list[tuple[InboxSubscription, int]]
    cohorts: list[list[tuple[int, int]]]
    tasks: list[list[Share]]
    page_matches: int
    task_matches: int


class Page(msgspec.Struct, frozen=True, array_like=True):
    """What a cohort's agents are owed of the offsets ``start`` up to ``end``, and the subscriptions that end there.

    A match is kept as its offset, the number of its kind (all that matches have in common) and its resource. ``errors``
    counts the events for which a subscription's filter had no value.
    """

    cohort: int
    start: int
    end: int
    kinds: list[tuple[int, tuple[str, ...], str, Digest | None]]
    found: list[tuple[int, int, str | None]]
    ended: list[tuple[int, str]]
    errors: dict[str, int] = {}

    @property
    def matches(self) -> list[Match]:
        """The matches in order of their offsets."""
        return [Match(offset, *self.kinds[kind], resource) for offset, kind, resource in self.found]


def pages(spark: SparkSession, work: Work) -> DataFrame:
    """Return the pages of a job, one in a row, in the order of its tasks and shares."""
    raw = msgspec.json.encode(work)
    count = len(work.tasks)
    return spark.range(0, count, 1, count).mapInArrow(lambda batches: _run(batches, raw), "page binary")


def pages_here(work: Work) -> list[Page]:
    """Return the pages of a job whose shares only this machine can read."""
    return [page for task in work.tasks for share in task for page in _pages(work, share)]


def halves(page: Page) -> tuple[Page, Page]:
    """Return a page of several events as two."""
    middle = (page.start + page.end) // 2
    return (
        msgspec.structs.replace(
            page,
            end=middle,
            found=[each for each in page.found if each[0] < middle],
            ended=[each for each in page.ended if each[0] < middle],
        ),
        msgspec.structs.replace(
            page,
            start=middle,
            errors={},
            found=[each for each in page.found if each[0] >= middle],
            ended=[each for each in page.ended if each[0] >= middle],
        ),
    )


def _run(batches: Iterator[pa.RecordBatch], raw: bytes) -> Iterator[pa.RecordBatch]:
    work = msgspec.json.decode(raw, type=Work)
    encode = msgspec.msgpack.Encoder().encode
    left = work.task_matches
    for batch in batches:
        for share in chain.from_iterable(work.tasks[number] for number in batch.column("id").to_pylist()):
            for page in _pages(work, share) if left > 0 else ():
                yield pa.RecordBatch.from_pylist([{"page": encode(page)}], schema=PAGE_KIND)
                left -= len(page.found)
                if left <= 0:
                    break  # and not return: Spark waits for a task that leaves its input unread


def _pages(work: Work, share: Share) -> Iterator[Page]:
    cohort = Cohort(share.extent.stream, share.start)
    for number, saved in work.cohorts[share.cohort]:
        cohort.add(Member(*work.subscriptions[number]), saved)
    start = share.start
    kinds: dict[tuple[int, tuple[str, ...], str, Digest | None], int] = {}
    found: list[tuple[int, int, str | None]] = []
    ended: list[tuple[int, str]] = []
    for batch in read_range(work.data, Range(share.extent, share.start, share.end), _EVENT):
        for event in events_of(batch):
            matches, last = cohort.match(event)
            if not matches:
                continue
            for offset, agent_no, names, reason, digest, resource in matches:
                kind = kinds.setdefault((agent_no, names, reason, digest), len(kinds))
                found.append((offset, kind, resource))
            ended += [(event.offset, member.subscription.id) for member in last]
            if len(found) >= work.page_matches:
                yield Page(share.cohort, start, event.offset + 1, list(kinds), found, ended, _errors(cohort))
                start, kinds, found, ended = event.offset + 1, {}, [], []
    if start < share.end:
        yield Page(share.cohort, start, share.end, list(kinds), found, ended, _errors(cohort))


def _errors(cohort: Cohort) -> dict[str, int]:
    """Return the errors since the last time."""
    found = {}
    for name, member in cohort.members.items():
        if member.filter.errors:
            found[name] = member.filter.errors
            member.filter.errors = 0
    return found
