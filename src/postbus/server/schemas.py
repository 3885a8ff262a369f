"""``/schemas``: JSON Schemas by subject and version; ``/topics/…/schema``: what a topic's payloads must match."""

from __future__ import annotations

from datetime import datetime
from itertools import groupby
from typing import Annotated

import msgspec

from postbus.model import Invalid, NotFound, instant
from postbus.schemas import BindReport, SchemaVersion
from postbus.schemas.registry import SAMPLE, SAMPLE_MAX
from postbus.server.publish import outside
from postbus.server.routes import (
    Call,
    Named,
    Route,
    Scope,
    named_topic,
    tenant_in_body,
    tenant_in_path,
    tenant_in_query,
)

__all__ = ["ROUTES"]

SUBJECT = "/v1/bus/schemas/{namespace}/{tenant}/{subject}"
TOPIC = "/v1/bus/topics/{namespace}/{tenant}/{name}/schema"
PAGE_MAX = 1_000
VERSION_MAX = 2**53 - 1
VERSION_DIGITS = 16
LATEST = "latest"

_ANY_SCHEMA = msgspec.Meta(
    extra_json_schema={"type": ["object", "boolean"]}, description="A JSON Schema, draft 2020-12."
)
SchemaText = Annotated[msgspec.Raw, _ANY_SCHEMA]
Version = Annotated[int, msgspec.Meta(ge=1, le=VERSION_MAX)]


class CreateSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schema to be kept as the next version of its subject."""

    namespace: str
    tenant: str
    subject: str
    schema: SchemaText


class SchemaView(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a schema; never changed."""

    namespace: str
    tenant: str
    subject: str
    version: int
    created_at: datetime
    schema: SchemaText


class SubjectView(msgspec.Struct, frozen=True, kw_only=True):
    """A subject and its versions."""

    namespace: str
    tenant: str
    subject: str
    versions: list[int]
    latest: int


class SubjectViews(msgspec.Struct, frozen=True):
    """Subjects by tenant and name. ``next``: give it as ``after`` to see more."""

    subjects: list[SubjectView]
    next: str | None = None


class SubjectsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which subjects to list."""

    namespace: str | None = None
    tenant: str | None = None
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 100


class BindSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a topic is to be bound to.

    The latest ``sample`` events of each partition are checked first: with ``dry_run`` that is all, with ``force`` what
    they are does not matter.
    """

    subject: str
    version: Annotated[Version | None, msgspec.Meta(description="Without it: the latest.")] = None
    dry_run: bool = False
    force: bool = False
    sample: Annotated[int, msgspec.Meta(ge=0, le=SAMPLE_MAX)] = SAMPLE


class BindingView(msgspec.Struct, frozen=True, kw_only=True):
    """What the payloads of a topic must match."""

    topic: str
    subject: str
    version: int
    bound_at: datetime


# --- the handlers -----------------------------------------------------------------------------------------------------


def _topic(call: Call) -> Named:
    return named_topic("{namespace}.{tenant}.{name}".format(**call.path))


def _own_topic(call: Call) -> Named:
    return outside(_topic(call))


def _view(found: SchemaVersion) -> SchemaView:
    namespace, tenant = found.tenant.split(".")
    return SchemaView(
        namespace=namespace,
        tenant=tenant,
        subject=found.subject,
        version=found.version,
        created_at=instant(found.created_at_us),
        schema=msgspec.Raw(found.document),
    )


def _subject(versions: list[SchemaVersion]) -> SubjectView:
    first, last = versions[0], versions[-1]
    namespace, tenant = first.tenant.split(".")
    numbers = [found.version for found in versions]
    return SubjectView(namespace=namespace, tenant=tenant, subject=first.subject, versions=numbers, latest=last.version)


def _version(call: Call) -> int | None:
    """Return the version in the path; None for the latest."""
    text: str = call.path["version"]
    if text == LATEST:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > VERSION_DIGITS:
        raise Invalid("the version is a number or latest")
    return int(text)


async def create_schema(call: Call) -> SchemaView:
    """Keep a schema as the next version of its subject."""
    body: CreateSchema = call.body
    return _view(await call.hub.schemas.add(call.tenant or "", body.subject, bytes(body.schema)))


async def list_subjects(call: Call) -> SubjectViews:
    """List subjects with their versions."""
    query: SubjectsQuery = call.query
    found = await call.hub.schemas.find(call.tenant)
    subjects = [_subject(list(versions)) for _, versions in groupby(found, lambda each: (each.tenant, each.subject))]
    names = {f"{each.namespace}.{each.tenant}/{each.subject}": each for each in subjects}
    listed = [name for name in names if query.after is None or name > query.after]
    page = listed[: query.limit]
    return SubjectViews([names[name] for name in page], page[-1] if len(listed) > len(page) else None)


async def show_subject(call: Call) -> SubjectView:
    """Show the versions of a subject."""
    found = await call.hub.schemas.find(call.tenant, call.path["subject"])
    if not found:
        raise NotFound(f"there is no schema {call.path['subject']}")
    return _subject(found)


async def show_schema(call: Call) -> SchemaView:
    """Show one version."""
    return _view(await call.hub.schemas.show(call.tenant or "", call.path["subject"], _version(call)))


async def delete_schema(call: Call) -> None:
    """Remove a version that is not bound."""
    version = _version(call)
    if version is None:
        raise Invalid("name the version that is to be removed", hint="latest may be another one by then")
    await call.hub.schemas.delete(call.tenant or "", call.path["subject"], version)


async def bind_schema(call: Call) -> BindReport:
    """Bind a topic to a version."""
    body: BindSchema = call.body
    return await call.hub.schemas.bind(
        call.topic or "", body.subject, body.version, dry_run=body.dry_run, force=body.force, sample=body.sample
    )


async def show_binding(call: Call) -> BindingView:
    """Show what a topic is bound to."""
    topic = call.topic or ""
    found = (await call.hub.schemas.bindings()).get(topic)
    if found is None:
        raise NotFound(f"{topic} is bound to no schema")
    return BindingView(topic=topic, subject=found.subject, version=found.version, bound_at=instant(found.bound_at_us))


async def unbind_schema(call: Call) -> None:
    """Let a topic take any payload again."""
    await call.hub.schemas.unbind(call.topic or "")


ROUTES = (
    Route(
        method="POST",
        path="/v1/bus/schemas",
        handler=create_schema,
        summary="Keep a JSON Schema as the next version of its subject",
        tag="schemas",
        scope=Scope.ADMIN,
        names=tenant_in_body,
        body=CreateSchema,
        response=SchemaView,
        status=201,
        errors=(507,),
    ),
    Route(
        method="GET",
        path="/v1/bus/schemas",
        handler=list_subjects,
        summary="List subjects with their versions",
        tag="schemas",
        scope=Scope.SUBSCRIBE,
        names=tenant_in_query,
        query=SubjectsQuery,
        response=SubjectViews,
    ),
    Route(
        method="GET",
        path=SUBJECT,
        handler=show_subject,
        summary="Show the versions of a subject",
        tag="schemas",
        scope=Scope.SUBSCRIBE,
        names=tenant_in_path,
        response=SubjectView,
    ),
    Route(
        method="GET",
        path=f"{SUBJECT}/{{version}}",
        handler=show_schema,
        summary="Show one version, or the latest",
        tag="schemas",
        scope=Scope.SUBSCRIBE,
        names=tenant_in_path,
        response=SchemaView,
    ),
    Route(
        method="DELETE",
        path=f"{SUBJECT}/{{version}}",
        handler=delete_schema,
        summary="Remove a version that is not bound",
        tag="schemas",
        scope=Scope.ADMIN,
        names=tenant_in_path,
        status=204,
        errors=(409,),
    ),
    Route(
        method="PUT",
        path=TOPIC,
        handler=bind_schema,
        summary="Bind a topic to a schema, or see what it would refuse",
        tag="schemas",
        scope=Scope.ADMIN,
        names=_own_topic,
        body=BindSchema,
        response=BindReport,
        errors=(409, 507),
    ),
    Route(
        method="GET",
        path=TOPIC,
        handler=show_binding,
        summary="Show what a topic is bound to",
        tag="schemas",
        scope=Scope.SUBSCRIBE,
        names=_topic,
        response=BindingView,
    ),
    Route(
        method="DELETE",
        path=TOPIC,
        handler=unbind_schema,
        summary="Let a topic take any payload again",
        tag="schemas",
        scope=Scope.ADMIN,
        names=_own_topic,
        status=204,
    ),
)
