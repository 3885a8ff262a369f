"""The kernel: extensions that emit, subscribe and serve agents, channels and tools, wired onto the durable bus.

Extensions import the names of this module and no others.
"""

from __future__ import annotations

from postbus.kernel.config import read_config
from postbus.kernel.context import ExtensionContext
from postbus.kernel.contract import (
    AgentDescription,
    AgentInvocationContext,
    AgentProvider,
    AgentResponse,
    ApprovalPrompt,
    ApprovingChannel,
    ChannelProvider,
    Extension,
    ExtensionState,
    ExtensionStatus,
    Health,
    KernelReport,
    OutgoingMessage,
    SchedulerProvider,
    SecretDeclined,
    SecureChannel,
    ServiceProvider,
    StreamingChannel,
    ToolCall,
    ToolDenied,
    ToolProvider,
    ToolSpec,
)
from postbus.kernel.kernel import Kernel, inspect_extensions
from postbus.kernel.router import MessageRouter
from postbus.kernel.settings import Settings, make_bus, read_settings
from postbus.kernel.tools import check_tool
from postbus.kernel.topics import SecureInputRequest, SystemTopics, TraceTopics
from postbus.model import (
    Conflict,
    Event,
    Forbidden,
    Invalid,
    NotFound,
    PostbusError,
    Receipt,
    Reject,
    Retry,
    RetryPolicy,
    Trust,
    Unreachable,
)

__all__ = [
    "AgentDescription",
    "AgentInvocationContext",
    "AgentProvider",
    "AgentResponse",
    "ApprovalPrompt",
    "ApprovingChannel",
    "ChannelProvider",
    "Conflict",
    "Event",
    "Extension",
    "ExtensionContext",
    "ExtensionState",
    "ExtensionStatus",
    "Forbidden",
    "Health",
    "Invalid",
    "Kernel",
    "KernelReport",
    "MessageRouter",
    "NotFound",
    "OutgoingMessage",
    "PostbusError",
    "Receipt",
    "Reject",
    "Retry",
    "RetryPolicy",
    "SchedulerProvider",
    "SecretDeclined",
    "SecureChannel",
    "SecureInputRequest",
    "ServiceProvider",
    "Settings",
    "StreamingChannel",
    "SystemTopics",
    "ToolCall",
    "ToolDenied",
    "ToolProvider",
    "ToolSpec",
    "TraceTopics",
    "Trust",
    "Unreachable",
    "check_tool",
    "inspect_extensions",
    "make_bus",
    "read_config",
    "read_settings",
]
