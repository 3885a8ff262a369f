"""The agent of a manifest that has no code: a model on any server that speaks the OpenAI chat completions API."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from postbus import strict_json
from postbus.kernel.completions import Answer, Completions, ToolRequest
from postbus.kernel.config import read_config
from postbus.kernel.contract import AgentResponse, Health
from postbus.kernel.memory import Memory, Turn
from postbus.kernel.topics import SystemTopics
from postbus.model import Invalid, NotFound, PostbusError, Refused, StorageError, Trust

if TYPE_CHECKING:
    from postbus.kernel.context import ExtensionContext
    from postbus.kernel.contract import AgentInvocationContext, ToolSpec
    from postbus.kernel.manifest import AgentConfig, ManifestFile
    from postbus.kernel.memory import Work
    from postbus.kernel.settings import Settings
    from postbus.model import Event

__all__ = ["ModelConfig", "OpenAIAgent", "make_agent"]

RESULT_CHARS_MAX = 100_000


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``config`` of such an agent; what is left out comes from the settings' ``models``.

    ``api_key_channel``: the channel on which the user is asked for ``api_key_secret`` if it is not in the vault.
    """

    base_url: Annotated[str, Meta(min_length=1)] | None = None
    model: Annotated[str, Meta(min_length=1)] | None = None
    api_key_env: str | None = None
    api_key_secret: str | None = None
    api_key_channel: str | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    instructions: str | None = None
    temperature: float | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool = True
    attempts: Annotated[int, Meta(ge=1, le=10)] = 4
    tool_rounds: Annotated[int, Meta(ge=1, le=100)] = 16
    history_turns: Annotated[int, Meta(ge=0, le=1000)] = 20


def make_agent(file: ManifestFile, settings: Settings) -> OpenAIAgent:
    """Return the agent a manifest describes; raises ``InvalidFile`` when its config is wrong or no model is named."""
    manifest, models = file.manifest, settings.models
    with file.refusing("config"):
        given = read_config({**manifest.config, **settings.extensions.get(manifest.id, {})}, ModelConfig)
    agent = manifest.agent
    assert agent is not None  # noqa: S101 - a manifest without code has an agent
    model = given.model or agent.model or models.model
    if model is None:
        hint = "name one under agent.model, or for all agents in the settings under models.model"
        raise file.refuse("no model is named", "agent", hint=hint)
    own_key = given.api_key_env or given.api_key_secret
    return OpenAIAgent(
        msgspec.structs.replace(
            given,
            base_url=given.base_url or models.base_url,
            model=model,
            api_key_env=given.api_key_env if own_key else models.api_key_env,
            api_key_secret=given.api_key_secret if own_key else models.api_key_secret,
            timeout_s=given.timeout_s or models.timeout_s,
            instructions=_instructions(given, agent),
        )
    )


def _instructions(given: ModelConfig, agent: AgentConfig) -> str:
    return agent.instructions if given.instructions is None else given.instructions


class OpenAIAgent:
    """Answers with a model: streams, uses the tools there are, and remembers the session."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._context: ExtensionContext | None = None
        self._api: Completions | None = None
        self._memory: Memory | None = None
        self._trouble: str | None = None

    # --- life ---

    async def initialize(self, context: ExtensionContext) -> None:
        """Take the context; a session that has ended is forgotten."""
        config = self._config
        assert config.base_url is not None  # noqa: S101 - filled in by make_agent
        assert config.timeout_s is not None  # noqa: S101 - as above
        self._context = context
        self._api = Completions(config.base_url, context.clock, timeout_s=config.timeout_s, attempts=config.attempts)
        self._memory = Memory(context.data_dir, config.history_turns)
        context.subscribe_event(SystemTopics.SESSION_COMPLETED, self._forget, name="memory")

    async def start(self) -> None:
        """Have the user asked for the API key, if it is to be in the vault and is not."""
        secret, channel = self._config.api_key_secret, self._config.api_key_channel
        if secret is None or channel is None or self._context is None:
            return
        try:
            await self._context.secret(secret)
        except NotFound:
            await self._context.request_secret(secret, f"API key for {self._config.base_url}", channel)

    async def destroy(self) -> None:
        """Close the connections."""
        if self._api is not None:
            await self._api.close()

    async def health(self) -> Health:
        """Say whether the last request was answered."""
        return Health(ok=self._trouble is None, detail=self._trouble or "")

    async def _forget(self, event: Event) -> None:
        if self._memory is not None:
            self._memory.forget(event.payload["session_id"])

    # --- answering ---

    async def invoke(self, task: str, context: AgentInvocationContext) -> AgentResponse:
        """Answer a task. Repeated after a crash it goes on where it was."""
        assert self._memory is not None  # noqa: S101 - the kernel initialises first
        task = str(task)  # exactly a text, whatever the kernel knows about it
        work = self._memory.work(context.invocation_id)
        names = {spec.name: spec for spec in context.tools}
        messages = self._beginning(task, context.session_id)
        for round_ in range(self._config.tool_rounds + 1):
            answer = await self._model_step(work, round_, messages, names, context)
            if not answer.calls:
                return self._finish(task, context, answer)
            messages.append(_assistant(answer))
            for call in answer.calls:
                result = await self._tool_step(work, round_, call, names, context)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        raise Refused(f"the model used tools more than {self._config.tool_rounds} times without an answer")

    def _beginning(self, task: str, session_id: str) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self._config.instructions:
            messages.append({"role": "system", "content": self._config.instructions})
        assert self._memory is not None  # noqa: S101 - as above
        for turn in self._memory.turns(session_id) if self._config.history_turns else ():
            messages.append({"role": "user", "content": turn.task})
            messages.append({"role": "assistant", "content": turn.answer})
        messages.append({"role": "user", "content": task})
        return messages

    async def _model_step(
        self,
        work: Work,
        round_: int,
        messages: list[dict[str, Any]],
        names: dict[str, ToolSpec],
        context: AgentInvocationContext,
    ) -> Answer:
        known = _step(work, "model", round_)
        if known is not None:
            return msgspec.convert(known["answer"], Answer)
        assert self._api is not None  # noqa: S101 - as above
        try:
            answer = await self._api.ask(self._body(messages, names), await self._key(), context.delta)
        except PostbusError as error:
            self._trouble = error.message
            raise
        self._trouble = None
        if not answer.calls and not answer.text.strip():
            raise Refused(f"the model answered nothing (finish_reason {answer.finish})")
        work.add({"step": "model", "id": round_, "answer": msgspec.to_builtins(answer)})
        return answer

    async def _tool_step(
        self, work: Work, round_: int, call: ToolRequest, names: dict[str, ToolSpec], context: AgentInvocationContext
    ) -> str:
        step_id = f"{round_}/{call.id}"
        known = _step(work, "tool", step_id)
        if known is not None:
            return str(known["result"])
        result = await _use(call, names, context)
        work.add({"step": "tool", "id": step_id, "result": result})
        return result

    def _body(self, messages: list[dict[str, Any]], names: dict[str, ToolSpec]) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {"model": config.model, "messages": messages, "stream": config.stream}
        if names:
            body["tools"] = [_tool(spec) for spec in names.values()]
        for name in ("temperature", "max_tokens"):
            if getattr(config, name) is not None:
                body[name] = getattr(config, name)
        return body

    async def _key(self) -> str | None:
        config = self._config
        if config.api_key_secret is not None:
            assert self._context is not None  # noqa: S101 - as above
            return await self._context.secret(config.api_key_secret)
        if config.api_key_env is None:
            return None
        key = os.environ.get(config.api_key_env)
        if not key:
            raise Invalid(f"the API key is missing: {config.api_key_env} is not set")
        return key

    def _finish(self, task: str, context: AgentInvocationContext, answer: Answer) -> AgentResponse:
        assert self._memory is not None  # noqa: S101 - as above
        if context.trust is Trust.TRUSTED:  # what came from outside stays out of later prompts
            self._memory.add(context.session_id, Turn(id=context.invocation_id, task=task, answer=answer.text))
        facts = {"model": self._config.model, "finish_reason": answer.finish, "usage": answer.usage}
        return AgentResponse(text=answer.text, metadata={name: value for name, value in facts.items() if value})


# --- tools ------------------------------------------------------------------------------------------------------------


def _tool(spec: ToolSpec) -> dict[str, Any]:
    function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    return {"type": "function", "function": function}


def _assistant(answer: Answer) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
    return {"role": "assistant", "content": answer.text or None, "tool_calls": calls}


async def _use(call: ToolRequest, names: dict[str, ToolSpec], context: AgentInvocationContext) -> str:
    """Call a tool and return what the model is told; that it failed or was not allowed is for the model to know too."""
    if call.name not in names:
        return f"error: there is no tool {call.name}"
    try:
        arguments = strict_json.parse(call.arguments.encode())
    except Invalid as error:
        return f"error: the arguments are no JSON: {error.message}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    try:
        result = await context.call_tool(call.name, arguments)
    except StorageError:
        raise
    except PostbusError as error:
        return f"error: {error.message}"
    except Exception as error:  # noqa: BLE001 - it is somebody else's code; the model is told
        return f"error: {type(error).__name__}: {error}"
    text = result if isinstance(result, str) else strict_json.encode(result).decode()
    return text if len(text) <= RESULT_CHARS_MAX else f"{text[:RESULT_CHARS_MAX]}… ({len(text)} characters)"


def _step(work: Work, kind: str, step_id: int | str) -> dict[str, Any] | None:
    return next((step for step in work.steps if step.get("step") == kind and step.get("id") == step_id), None)
