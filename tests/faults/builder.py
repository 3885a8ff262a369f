"""Builds a varied store and kills itself: ``python -m tests.faults.builder FOLDER CHECKPOINTED ROWS``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import apsw

from postbus.log.sqlite import SqliteLog
from postbus.store.database import connect
from tests.faults.scene import JOURNAL, fact, facts, varied


async def main(folder: str, checkpointed: str, rows: str) -> None:
    log = SqliteLog.open(folder)
    await varied(log, int(rows))
    if int(checkpointed):
        other = connect(log.store.folder)
        other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        other.close()
        await log.append(JOURNAL, facts(20, correlation_id="recent"))
    await log.append(JOURNAL, [fact("last", native_id="last", topic="topic.last")])
    await log.ensure_consumer(JOURNAL, "late")
    await log.commit(JOURNAL, "reader", int(rows) + 5)
    await log.projections.catch_up()
    await log.append(JOURNAL, facts(3, correlation_id="unprojected"))
    await log.commit(JOURNAL, "reader", int(rows) + 6)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
