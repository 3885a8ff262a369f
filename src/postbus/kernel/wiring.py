"""What a manifest's ``events.subscribes`` means: the kernel's own handlers on topics that an extension names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from postbus.kernel.contract import AgentProvider
from postbus.kernel.identity import stable_id
from postbus.kernel.templates import describe, render
from postbus.model import Reject, Trust
from postbus.topics import matches

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from postbus.kernel.contract import AgentResponse
    from postbus.kernel.entry import Entry
    from postbus.kernel.manifest import EventSubscribeDeclaration
    from postbus.kernel.router import MessageRouter
    from postbus.kernel.settings import Settings
    from postbus.model import Event

    Handler = Callable[[Event], Awaitable[None]]

__all__ = ["prompt_of", "wire"]


class Invoker(Protocol):
    """What a wired handler needs of the kernel."""

    router: MessageRouter
    settings: Settings

    async def invoke_agent(
        self,
        prompt: str,
        *,
        caller: str,
        agent: str | None = None,
        channel_id: str | None = None,
        session_id: str | None = None,
    ) -> AgentResponse:
        """Have an agent answer."""


def wire(kernel: Invoker, entry: Entry, everybody: Iterable[Entry]) -> None:
    """Subscribe what a manifest declares; raises ``InvalidFile`` for what cannot work."""
    assert entry.file is not None  # noqa: S101 - only what was loaded is wired
    assert entry.context is not None  # noqa: S101 - as above
    limits = kernel.settings.kernel
    for index, declared in enumerate(entry.file.manifest.events.subscribes):
        if declared.handler == "notify_user":
            handler = _notifier(kernel, entry.id)
            entry.context.subscribe_event(declared.topic, handler, name="notify_user")
        elif declared.handler == "invoke_agent":
            _check_invoker(entry, index, declared, everybody)
            entry.context.subscribe_event(
                declared.topic,
                _invoker(kernel, entry.id, declared),
                name="invoke_agent",
                concurrency=1,  # its session works on one thing at a time anyway
                timeout=limits.agent_timeout_s + limits.approval_ttl_s,  # a human may have to allow something
            )
        elif declared.topic not in {topic for topic, _ in entry.context.subscriptions}:
            entry.warnings.append(f"{declared.topic} is declared as custom, but the code does not subscribe to it")


def _check_invoker(entry: Entry, index: int, declared: EventSubscribeDeclaration, everybody: Iterable[Entry]) -> None:
    assert entry.file is not None  # noqa: S101 - only what was loaded is wired
    where = ("events", "subscribes", index, "handler")
    if not isinstance(entry.instance, AgentProvider):
        raise entry.file.refuse("handler: invoke_agent needs an extension that is an agent", *where)
    if declared.prompt_template is not None:
        return
    for other in everybody:
        for published in () if other.file is None else other.file.manifest.events.publishes:
            if published.trust is Trust.UNTRUSTED and matches(declared.topic, published.topic):
                message = f"{published.topic} carries text from outside: handler: invoke_agent needs a prompt_template"
                raise entry.file.refuse(message, *where)


def _notifier(kernel: Invoker, extension_id: str) -> Handler:
    async def notify_user(event: Event) -> None:
        payload = event.payload
        text = payload.get("text") if isinstance(payload, dict) else None
        if not isinstance(text, str):
            raise Reject('handler notify_user needs {"text": "…"}')
        native_id = stable_id("notify", event.id, extension_id)
        await kernel.router.notify_user(text, source=extension_id, native_id=native_id)

    return notify_user


def _invoker(kernel: Invoker, extension_id: str, declared: EventSubscribeDeclaration) -> Handler:
    async def invoke_agent(event: Event) -> None:
        prompt = prompt_of(event, declared.prompt_template)
        channel = _channel(event)
        answer = await kernel.invoke_agent(
            prompt, caller=extension_id, agent=extension_id, channel_id=channel, session_id=f"event:{extension_id}"
        )
        if answer.text:
            native_id = stable_id("answer", event.id, extension_id, declared.topic)
            await kernel.router.notify_user(answer.text, channel, source=extension_id, native_id=native_id)

    return invoke_agent


def prompt_of(event: Event, template: str | None) -> str:
    """Return the prompt an event makes: by its template, or its own ``prompt`` if it is trusted, or what it says.

    Raises ``Reject`` for an untrusted event without a template.
    """
    if template is not None:
        return render(template, event)
    if event.trust != Trust.TRUSTED.value:
        raise Reject(f"{event.topic} came from outside: it reaches a prompt through a prompt_template only")
    payload = event.payload
    prompt = payload.get("prompt") if isinstance(payload, dict) else None
    return prompt if isinstance(prompt, str) and prompt else describe(event)


def _channel(event: Event) -> str | None:
    """Return the channel an event names; text from outside chooses none."""
    payload: Any = event.payload
    named = payload.get("channel_id") if isinstance(payload, dict) else None
    return named if isinstance(named, str) and event.trust == Trust.TRUSTED.value else None
