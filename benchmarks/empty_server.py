"""The ceiling of the server: the same stack answering a route that does nothing but read and write JSON."""

from __future__ import annotations

import sys

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


class Asked(msgspec.Struct):
    """What a publisher sends."""

    topic: str
    payload: msgspec.Raw


class Answered(msgspec.Struct):
    """As much as a publisher gets."""

    id: str
    topic: str
    partition: int
    offset: int
    duplicate: bool
    produced_at: str


_decode = msgspec.json.Decoder(Asked).decode
_encode = msgspec.json.Encoder().encode


async def empty(request: Request) -> Response:
    """Read the body, answer, and do nothing."""
    asked = _decode(await request.body())
    answer = Answered(f"{asked.topic}/0/1", asked.topic, 0, 1, False, "2026-01-01T00:00:00Z")
    return Response(_encode(answer), media_type="application/json")


if __name__ == "__main__":
    app = Starlette(routes=[Route("/v1/bus/publish", empty, methods=["POST"])])
    uvicorn.run(app, port=int(sys.argv[1]), loop="uvloop", http="httptools", log_config=None, access_log=False)
