"""Delivery handles and what can be done through each kind of them."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Literal

import msgspec

from postbus import strict_json
from postbus.inbox.replies.rules import ReplyRules
from postbus.model import Invalid
from postbus.outside import check_url
from postbus.topics import check_id, check_topic

__all__ = [
    "Action",
    "Handle",
    "actions_of",
    "check_arguments",
    "default_action",
    "lane_of",
    "parse_handle",
]

REPO = re.compile(r"[A-Za-z0-9-]{1,39}/(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}")
ARGUMENTS_MAX = 64
SYSTEM = "system"
Body = Annotated[str, msgspec.Meta(min_length=1, max_length=60_000)]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Number = Annotated[int, msgspec.Meta(ge=1)]


# --- handles ----------------------------------------------------------------------------------------------------------


class GithubHandle(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="github"):
    """An issue or pull request of a repository that a source of the tenant reads; perhaps a thread of a review."""

    source: str
    repo: str
    number: Number
    review_comment_id: Number | None = None


class WebhookHandle(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="webhook"):
    """An address that takes JSON. ``source``: the source that named it, with its rules and its secret."""

    url: str
    source: str | None = None


class BusHandle(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="bus"):
    """A topic of the tenant."""

    topic: str
    correlation_id: str | None = None


class CommandHandle(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="command"):
    """A program of this machine that the operator allowed."""

    argv: tuple[str, ...]


Handle = GithubHandle | WebhookHandle | BusHandle | CommandHandle


def parse_handle(given: Any, rules: ReplyRules) -> Handle:
    """Return a delivery handle, or refuse one through which nothing can be sent."""
    if given is None:
        raise Invalid("there is no delivery handle: the event asks for no reply")
    try:
        handle: Handle = msgspec.convert(given, Handle)
    except msgspec.ValidationError as error:
        raise Invalid(f"delivery handle: {error}") from None
    match handle:
        case GithubHandle():
            check_id(handle.source, "source id")
            if not REPO.fullmatch(handle.repo):
                raise Invalid(f"delivery handle: {handle.repo[:60]!r} is not owner/name")
        case WebhookHandle():
            # A private address may still be allowed by the source that named it; that is judged when it is called.
            check_url(handle.url, allow_private=rules.allow_private or handle.source is not None)
        case BusHandle():
            check_topic(handle.topic)
            if handle.topic.split(".")[0] == SYSTEM:
                raise Invalid("delivery handle: topics of the system take no replies")
        case CommandHandle():
            _check_command(handle, rules)
    return handle


def _check_command(handle: CommandHandle, rules: ReplyRules) -> None:
    if not 1 <= len(handle.argv) <= ARGUMENTS_MAX or any("\0" in word for word in handle.argv):
        raise Invalid(f"delivery handle: argv names a program and up to {ARGUMENTS_MAX - 1} arguments")
    if handle.argv[0] not in rules.commands:
        raise Invalid(
            f"delivery handle: the program {handle.argv[0][:100]!r} is not allowed",
            hint="the operator names those that are in POSTBUS_REPLY_COMMANDS",
        )


def lane_of(tenant: str, handle: Handle) -> bytes:
    """Return what replies through one handle have in common: they go out one after the other."""
    return hashlib.sha256(tenant.encode() + b"\n" + msgspec.json.encode(handle, order="sorted")).digest()


# --- actions ----------------------------------------------------------------------------------------------------------


class _Text(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: Body


class _Close(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Literal["completed", "not_planned"] = "completed"


class _Nothing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Label(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    add: Annotated[list[Label], msgspec.Meta(max_length=50)] = []
    remove: Annotated[list[Label], msgspec.Meta(max_length=50)] = []


class _Payload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    payload: Any


class Action(msgspec.Struct, frozen=True):
    """Something that can be done through a handle; ``schema`` is the JSON Schema of its arguments."""

    name: str
    description: str
    schema: dict[str, Any]


class _Kind(msgspec.Struct, frozen=True):
    description: str
    arguments: type[msgspec.Struct]


_GITHUB = {
    "comment": _Kind("Comment on the issue or pull request.", _Text),
    "close": _Kind("Close it.", _Close),
    "reopen": _Kind("Open it again.", _Nothing),
    "label": _Kind("Add and remove labels.", _Label),
}
_THREAD = {"review_reply": _Kind("Reply in the thread of the review.", _Text)}
_ACTIONS: dict[type[Handle], dict[str, _Kind]] = {
    GithubHandle: _GITHUB,
    WebhookHandle: {"post": _Kind("Post JSON to the address.", _Payload)},
    BusHandle: {"publish": _Kind("Publish JSON on the topic.", _Payload)},
    CommandHandle: {"run": _Kind("Run the program with JSON on its standard input.", _Payload)},
}


def _kinds(handle: Handle) -> dict[str, _Kind]:
    threaded = isinstance(handle, GithubHandle) and handle.review_comment_id is not None
    return (_THREAD if threaded else {}) | _ACTIONS[type(handle)]


def actions_of(handle: Handle) -> list[Action]:
    """Return what can be done through a handle; the first one is what ``send`` does."""
    return [Action(name, kind.description, _schema(kind.arguments)) for name, kind in _kinds(handle).items()]


def _schema(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    (_, components) = msgspec.json.schema_components([arguments])
    found: dict[str, Any] = components[arguments.__name__]
    return {name: value for name, value in found.items() if name != "title"}


def _kind(handle: Handle, name: str) -> _Kind:
    kinds = _kinds(handle)
    if name not in kinds:
        raise Invalid(f"nothing called {name[:60]!r} can be done here", hint=f"one of {', '.join(kinds)}")
    return kinds[name]


def check_arguments(handle: Handle, name: str, given: Any) -> dict[str, Any]:
    """Return the arguments of an action with its defaults, or refuse them."""
    kind = _kind(handle, name)
    try:
        checked = msgspec.convert(given, kind.arguments)
    except msgspec.ValidationError as error:
        raise Invalid(f"arguments of {name}: {error}") from None
    if isinstance(checked, _Label) and not checked.add and not checked.remove:
        raise Invalid("arguments of label: nothing to add or remove")
    values: dict[str, Any] = msgspec.structs.asdict(checked)
    strict_json.encode(values)
    return values


def default_action(handle: Handle, payload: Any) -> tuple[str, dict[str, Any]]:
    """Return what ``send`` does with a payload: text is said as it is, other values are shown as JSON."""
    name = next(iter(_kinds(handle)))
    if not isinstance(handle, GithubHandle):
        return name, {"payload": payload}
    if isinstance(payload, dict) and set(payload) == {"body"}:
        return name, payload
    if isinstance(payload, str):
        return name, {"body": payload}
    text = msgspec.json.format(strict_json.encode(payload), indent=2).decode()
    return name, {"body": f"```json\n{text}\n```"}
