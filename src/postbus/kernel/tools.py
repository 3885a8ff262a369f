"""The tools of all extensions, and the one way to call one: checked, approved where needed, and recorded."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import msgspec

from postbus import strict_json
from postbus.kernel.contract import ToolCall, ToolDenied, ToolSpec
from postbus.kernel.identity import stable_id
from postbus.kernel.topics import TraceTopics
from postbus.model import Invalid, NotFound, PostbusError, SchemaMismatch
from postbus.schemas import Document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from postbus.kernel.contract import ApprovalGate, ToolProvider
    from postbus.kernel.trace import Trace
    from postbus.kernel.usage import Usage

__all__ = ["Tools", "call_id", "check_tool"]

logger = logging.getLogger("postbus.kernel")

SCHEMAS_MAX = 512
NAME = re.compile("[A-Za-z0-9_-]{1,64}")


class Tools:
    """What agents can use. Names are unique: of two tools with one name, the one loaded first is there."""

    def __init__(self, trace: Trace, usage: Usage, approvals: Callable[[], ApprovalGate]) -> None:
        self._trace = trace
        self._usage = usage
        self._approvals = approvals
        self._providers: dict[str, ToolProvider] = {}
        self._schemas: dict[bytes, Document] = {}

    def attach(self, extension_id: str, provider: ToolProvider) -> tuple[str, ...]:
        """Add the tools of an extension and return their names; raises ``Invalid`` when one is no tool or is taken."""
        taken = {spec.name: owner for owner, spec in self._all()}
        names = []
        for spec in provider.get_tools():
            check_tool(spec)
            if spec.name in taken or spec.name in names:
                raise Invalid(f"the tool {spec.name} is provided by {taken.get(spec.name, extension_id)} already")
            names.append(spec.name)
        self._providers[extension_id] = provider
        return tuple(names)

    def detach(self, extension_id: str) -> None:
        """Remove the tools of an extension."""
        self._providers.pop(extension_id, None)

    def specs(self) -> tuple[ToolSpec, ...]:
        """Return the tools there are now."""
        found: dict[str, ToolSpec] = {}
        for _, spec in self._all():
            found.setdefault(spec.name, spec)
        return tuple(found.values())

    def _all(self) -> Iterator[tuple[str, ToolSpec]]:
        for extension_id, provider in self._providers.items():
            try:
                specs: list[Any] = list(provider.get_tools())
            except Exception:
                logger.exception("%s cannot say which tools it has", extension_id)
                continue
            yield from ((extension_id, spec) for spec in specs if isinstance(spec, ToolSpec))

    def _schema(self, spec: ToolSpec) -> Document:
        raw = strict_json.encode(spec.parameters)
        found = self._schemas.get(raw)
        if found is None:
            if len(self._schemas) >= SCHEMAS_MAX:
                self._schemas.clear()
            found = self._schemas[raw] = Document(raw)
        return found

    async def call(self, call: ToolCall) -> Any:
        """Run a tool and return its result, a JSON value.

        Raises ``NotFound``, ``SchemaMismatch`` for wrong arguments, ``ToolDenied``, and what the tool raises.
        """
        if call.name not in {spec.name for _, spec in self._all()}:
            await self._usage.back()
        owner, spec = self._find(call.name)
        raw = strict_json.encode(call.arguments)
        issues = self._schema(spec).issues(raw)
        if issues:
            message = f"these are no arguments of {call.name}: {issues[0].pointer or '/'} {issues[0].message}"
            raise SchemaMismatch(message, issues=issues)
        # A copy: what is allowed and what runs are the same arguments, whatever the caller does to its own meanwhile.
        own = {"arguments": strict_json.parse(raw), "extension_id": owner, "server_alias": spec.server_alias or owner}
        call = msgspec.structs.replace(call, **own)
        facts = {"call_id": call.id, "tool": call.name, "extension_id": owner, "session_id": call.session_id}
        asked = {"arguments": call.arguments, "needs_approval": spec.needs_approval}
        await self._trace.record(TraceTopics.TOOL_CALLED, {**facts, **asked}, call.correlation_id)
        try:
            if spec.needs_approval:
                await self._allow(call, self._approvals())
            with self._usage.calling(owner):
                result = await self._provider(owner, call).call_tool(call)
            strict_json.encode(result)
        except Exception as error:
            status = "denied" if isinstance(error, ToolDenied) else "failed"
            said = error.message if isinstance(error, PostbusError) else f"{type(error).__name__}: {error}"
            await self._trace.record(
                TraceTopics.TOOL_RESULT, {**facts, "status": status, "error": said}, call.correlation_id
            )
            raise
        await self._trace.record(
            TraceTopics.TOOL_RESULT, {**facts, "status": "ok", "result": result}, call.correlation_id
        )
        return result

    async def _allow(self, call: ToolCall, approvals: ApprovalGate) -> None:
        decision = await approvals.ask(call)
        if decision.status != "approved":
            reason = f": {decision.reason}" if decision.reason else ""
            raise ToolDenied(f"the call of {call.name} was not allowed ({decision.status}){reason}")
        if not await approvals.spend(decision.request_id):
            message = f"the permission to call {call.name} was used already; whether the tool ran is not known"
            raise ToolDenied(message)

    def _provider(self, owner: str, call: ToolCall) -> ToolProvider:
        """Return who runs a tool, which may have gone while a human was asked."""
        found = self._providers.get(owner)
        if found is None:
            raise NotFound(f"{owner}, which provides {call.name}, does not run any more")
        return found

    def _find(self, name: str) -> tuple[str, ToolSpec]:
        for owner, spec in self._all():
            if spec.name == name:
                return owner, spec
        hint = "the extension that provides it may have failed to load: see `postbus doctor`"
        raise NotFound(f"there is no tool {name}", hint=hint)


def call_id(invocation_id: str, name: str, arguments: dict[str, Any], turn: int) -> str:
    """Return the id of a call: the same tool and arguments in the same invocation, for the ``turn``-th time."""
    return stable_id("call", invocation_id, name, strict_json.encode(arguments).hex(), turn)


def check_tool(spec: ToolSpec) -> None:
    """Refuse a tool whose name no model can say, or whose parameters are no JSON Schema: ``Invalid``."""
    if not isinstance(spec, ToolSpec):
        raise Invalid(f"get_tools returns ToolSpecs, not {type(spec).__name__}")
    if not NAME.fullmatch(spec.name) or spec.name.startswith("ask_"):
        hint = "letters, digits, _ and -, at most 64; names that begin with ask_ stand for agents"
        raise Invalid(f"{spec.name!r} is no name of a tool", hint=hint)
    Document(strict_json.encode(spec.parameters))
