"""The system topics: their names, and the shape of what is published on each."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from postbus.model import Invalid

__all__ = [
    "MARKED",
    "RECORDS",
    "AgentBackground",
    "AgentTask",
    "ExtensionError",
    "ExtensionReload",
    "SecureInputRequest",
    "SecureInputResponse",
    "SessionCompleted",
    "SystemTopics",
    "ToolApprovalRequest",
    "ToolApprovalResponse",
    "TraceTopics",
    "UserMessage",
    "UserNotify",
    "check_payload",
    "payload_schema",
    "read_payload",
]


# In the metadata of a task: its prompt came out of a template, what is from outside is marked in it.
MARKED = "prompt_is_marked"


class SystemTopics:
    """The topics that always have a handler of the kernel."""

    USER_NOTIFY = "system.user.notify"
    AGENT_TASK = "system.agent.task"
    AGENT_BACKGROUND = "system.agent.background"
    USER_MESSAGE = "user.message"
    SESSION_COMPLETED = "session.completed"
    SECURE_INPUT_REQUEST = "system.channel.secure_input_request"
    SECURE_INPUT_RESPONSE = "system.channel.secure_input_response"
    TOOL_APPROVAL_REQUEST = "system.mcp.tool_approval_request"
    TOOL_APPROVAL_RESPONSE = "system.mcp.tool_approval_response"
    EXTENSION_ERROR = "system.extension.error"
    EXTENSION_RELOAD = "system.extension.reload"


class TraceTopics:
    """What the kernel records about agents and tools, under the correlation id of what set them off."""

    AGENT_INVOKED = "agent_invoked"
    AGENT_RESULT = "agent_result"
    AGENT_ERROR = "agent_error"
    TOOL_CALLED = "tool_called"
    TOOL_RESULT = "tool_result"


class _Payload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The payload of a system topic: no other keys than these."""


class UserNotify(_Payload, frozen=True, kw_only=True):
    """``system.user.notify``: deliver a text to the user."""

    text: str
    channel_id: str | None = None


class AgentTask(_Payload, frozen=True, kw_only=True):
    """``system.agent.task``: have the orchestrator answer, and tell the user."""

    prompt: str
    channel_id: str | None = None
    correlation_id: str | None = None


class AgentBackground(_Payload, frozen=True, kw_only=True):
    """``system.agent.background``: have the orchestrator work; the user is not told."""

    prompt: str
    correlation_id: str | None = None


class UserMessage(_Payload, frozen=True, kw_only=True):
    """``user.message``: what a user said on a channel. Without a session id, user and channel are the session."""

    text: str
    user_id: str
    channel_id: str
    session_id: str | None = None


class SessionCompleted(_Payload, frozen=True, kw_only=True):
    """``session.completed``: a session has ended."""

    session_id: str
    reason: str


class SecureInputRequest(_Payload, frozen=True, kw_only=True):
    """``system.channel.secure_input_request``: have a channel ask for a secret, which goes to the vault only."""

    secret_id: str
    prompt: str
    target_channel: str


class SecureInputResponse(_Payload, frozen=True, kw_only=True):
    """``system.channel.secure_input_response``: the secret is in the vault, or there will be none. Never its value."""

    secret_id: str
    status: Literal["stored", "declined", "failed"]
    reason: str | None = None


class ToolApprovalRequest(_Payload, frozen=True, kw_only=True):
    """``system.mcp.tool_approval_request``: have a human allow one call of a tool."""

    request_id: str
    tool_name: str
    arguments: dict[str, Any]
    server_alias: str
    channel_id: str | None = None


class ToolApprovalResponse(_Payload, frozen=True, kw_only=True):
    """``system.mcp.tool_approval_response``: what the human said."""

    request_id: str
    approved: bool
    reason: str | None = None


class ExtensionError(_Payload, frozen=True, kw_only=True):
    """``system.extension.error``: an extension failed, and where."""

    extension_id: str
    stage: str
    reason: str


class ExtensionReload(_Payload, frozen=True, kw_only=True):
    """``system.extension.reload``: load an extension anew in the host that runs."""

    extension_id: str


RECORDS: dict[str, type[_Payload]] = {
    SystemTopics.USER_NOTIFY: UserNotify,
    SystemTopics.AGENT_TASK: AgentTask,
    SystemTopics.AGENT_BACKGROUND: AgentBackground,
    SystemTopics.USER_MESSAGE: UserMessage,
    SystemTopics.SESSION_COMPLETED: SessionCompleted,
    SystemTopics.SECURE_INPUT_REQUEST: SecureInputRequest,
    SystemTopics.SECURE_INPUT_RESPONSE: SecureInputResponse,
    SystemTopics.TOOL_APPROVAL_REQUEST: ToolApprovalRequest,
    SystemTopics.TOOL_APPROVAL_RESPONSE: ToolApprovalResponse,
    SystemTopics.EXTENSION_ERROR: ExtensionError,
    SystemTopics.EXTENSION_RELOAD: ExtensionReload,
}


def read_payload(topic: str, payload: Any) -> Any:
    """Return the payload of a system topic as its record; raises ``Invalid`` with what is wrong with it."""
    try:
        return msgspec.convert(payload, RECORDS[topic])
    except msgspec.ValidationError as error:
        raise Invalid(f"this is no payload of {topic}: {error}", hint=_hint(topic)) from None


def check_payload(topic: str, payload: Any) -> None:
    """Refuse what a system topic does not take. Topics that are not the system's take anything.

    Raises ``Invalid``; also for a ``system.`` topic that does not exist.
    """
    if topic in RECORDS:
        read_payload(topic, payload)
    elif topic.startswith("system."):
        raise Invalid(f"{topic} is no system topic", hint=f"there are {', '.join(sorted(RECORDS))}")


def payload_schema(topic: str) -> dict[str, Any]:
    """Return the JSON Schema of what a system topic takes."""
    return msgspec.json.schema(RECORDS[topic])


def _hint(topic: str) -> str:
    fields = msgspec.structs.fields(RECORDS[topic])
    return "it has " + ", ".join(field.name if field.required else f"{field.name}?" for field in fields)
