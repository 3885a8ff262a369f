"""The OpenAPI document, generated from the route table."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.server.errors import ErrorBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.server.routes import Route

__all__ = ["document", "statuses"]

PARAMETER = re.compile(r"{([a-z_]+)(?::[a-z]+)?}")
MEANINGS = {
    200: "Done.",
    201: "Made.",
    204: "Done; there is nothing to say.",
    400: "The request breaks a rule that the message names; nothing was changed.",
    401: "A key is needed, or this one is not valid.",
    403: "The key has no such scope, or the host or origin is not let in.",
    404: "There is no such thing for this caller.",
    408: "The body did not arrive in time.",
    409: "It exists already, or something else stands in the way.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "A quota is used up; see Retry-After.",
    503: "The store cannot do this now; see Retry-After.",
    507: "There is no room: the disk is full, or what the tenant may retain.",
}
BASE = "#/components/schemas/"


def statuses(route: Route) -> frozenset[int]:
    """Return every status a route can give: its own, and those that come with its shape."""
    found = {route.status, 400, 403, *route.errors}
    if not route.public:
        found |= {401, 503}
    if route.body is not None:
        found |= {408, 413, 415}
    if "{" in route.path or not route.public:
        found.add(404)
    return frozenset(found)


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes."""
    kinds = [kind for route in routes for kind in (route.body, route.response, route.query) if kind is not None]
    unique = list({id(kind): kind for kind in (*kinds, ErrorBody)}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template=BASE + "{name}")
    known = {id(kind): schema for kind, schema in zip(unique, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, known, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Postbus",
            "version": version("postbus"),
            "description": "The durable event bus with inboxes for AI agents.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "pb_<id>_<secret>"}},
        },
    }


def _operation(route: Route, known: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "_", f"{route.method} {route.path}".lower()).strip("_")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": _parameters(route, known, components),
        "responses": {str(status): _response(route, status, known) for status in sorted(statuses(route))},
    }
    if not route.public:
        operation["security"] = [{"key": []}, {}]
        operation["description"] = f"Scope: {route.scope}." if route.scope is not None else "Any key."
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": known[id(route.body)]}},
        }
    return operation


def _parameters(route: Route, known: dict[int, Any], components: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in PARAMETER.findall(route.path)
    ]
    if route.query is not None:
        schema = components[known[id(route.query)]["$ref"].removeprefix(BASE)]
        required = set(schema.get("required", ()))
        for name, one in schema["properties"].items():
            found.append({"name": name, "in": "query", "required": name in required, "schema": _plain(one)})
    return found


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a query parameter: leaving it out is how it is null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    return kinds[0] if len(kinds) == 1 else {key: value for key, value in schema.items() if value is not None}


def _response(route: Route, status: int, known: dict[int, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": MEANINGS[status]}
    if status != route.status:
        answer["content"] = {"application/json": {"schema": known[id(ErrorBody)]}}
    elif route.response is not None:
        answer["content"] = {route.media: {"schema": known[id(route.response)]}}
    elif route.media != "application/json":
        answer["content"] = {route.media: {"schema": {"type": "string"}}}
    if status in (429, 503, 507):
        answer["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return answer
