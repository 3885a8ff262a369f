"""Probes, metrics and pages: ``/healthz``, ``/readyz``, ``/metrics``, ``/openapi.json``, ``/docs``, ``/``."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import HTMLResponse, Response

from postbus.bus.outlet import outlet_of
from postbus.server.errors import Refusal
from postbus.server.metrics import render
from postbus.server.routes import Call, Route

if TYPE_CHECKING:
    from starlette.responses import Response as Page

__all__ = ["ROUTES"]

INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the server is. ``remote``: whether events go straight to the remote log (``closed``) or wait on disk."""

    status: str
    remote: str | None = None


async def healthz(_: Call) -> Health:
    """Say that the process answers."""
    return Health("ok")


async def readyz(call: Call) -> Health:
    """Say whether events can be published and read."""
    writer = call.log.store.writer
    if call.hub.stopping.is_set():
        raise Refusal(503, "stopping", "the server is stopping", headers={"retry-after": "5"})
    if writer.failed:
        raise Refusal(503, "storage_failed", "a write failed; the store is read-only", headers={"retry-after": "5"})
    if writer.full:
        raise Refusal(503, "storage_full", "the disk is full; appends are refused", headers={"retry-after": "5"})
    unwell = sorted(plugin for plugin, trouble in call.hub.troubles.items() if trouble())
    if unwell:
        message = f"silent or not well: {', '.join(unwell)}"
        raise Refusal(503, "plugin_unwell", message, headers={"retry-after": "5"})
    await call.log.store.read(lambda db: db.execute("SELECT 1").get)
    outlet = outlet_of(call.log)
    return Health("ready", None if outlet is None else outlet.state)


async def metrics(call: Call) -> Page:
    """Show the numbers of the caller's tenant, or of all of them to the operator."""
    return Response(await render(call.hub, call.caller.tenant), media_type=TEXT)


async def openapi(call: Call) -> bytes:
    """Show what this server offers, as OpenAPI 3.1."""
    return call.hub.openapi


@cache
def _page(name: str) -> tuple[str, dict[str, str]]:
    """Return a page with headers that let it run exactly the scripts and styles it came with."""
    text = (resources.files("postbus.server") / "static" / name).read_text(encoding="utf-8")
    policy = ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"]
    for kind, inside in INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        policy.append(f"{kind}-src 'sha256-{digest}'")
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
    }
    return text, headers


async def docs(_: Call) -> Page:
    """Show the routes to people."""
    text, headers = _page("docs.html")
    return HTMLResponse(text, headers=headers)


async def index(_: Call) -> Page:
    """Say what this is."""
    text, headers = _page("index.html")
    return HTMLResponse(text, headers=headers)


ROUTES = (
    Route(
        method="GET", path="/healthz", handler=healthz, summary="Is the process there?", tag="server", response=Health
    ),
    Route(
        method="GET",
        path="/readyz",
        handler=readyz,
        summary="Can events be published and read?",
        tag="server",
        response=Health,
        errors=(503,),
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=metrics,
        summary="The numbers, for Prometheus",
        tag="server",
        any_key=True,
        media="text/plain",
    ),
    Route(
        method="GET",
        path="/openapi.json",
        handler=openapi,
        summary="This document",
        tag="server",
        response=dict[str, Any],
    ),
    Route(method="GET", path="/docs", handler=docs, summary="The routes, for people", tag="server", media="text/html"),
    Route(method="GET", path="/", handler=index, summary="What this is", tag="server", media="text/html"),
)
