"""A publisher in a process of its own: appends numbered facts one by one and prints its receipts as JSON.

``python log_publisher.py URL STREAM FIRST COUNT``; the native ids are the numbers, so two publishers may overlap.
"""

from __future__ import annotations

import asyncio
import json
import sys

from postbus.log import open_log
from postbus.model import Draft


async def main(url: str, stream: str, first: int, count: int) -> None:
    log = await open_log(url)
    receipts = []
    for number in range(first, first + count):
        raw = json.dumps(number).encode()
        draft = Draft(topic="orders.created", source="suite", payload_json=raw, native_id=str(number))
        (receipt,) = await log.append(stream, [draft])
        receipts.append([number, receipt.partition, receipt.offset, receipt.duplicate])
    await log.close()
    sys.stdout.write(json.dumps(receipts))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
