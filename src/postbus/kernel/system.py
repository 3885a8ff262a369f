"""The kernel's handlers of the system topics: the way to the user, to the orchestrator, and to the vault."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from postbus.kernel.contract import OutgoingMessage, SecretDeclined, SecureChannel
from postbus.kernel.templates import MarkedPrompt, mark
from postbus.kernel.topics import MARKED, SystemTopics
from postbus.model import Invalid, Reject, RetryPolicy, Trust

if TYPE_CHECKING:
    from postbus.kernel.kernel import Kernel
    from postbus.kernel.topics import (
        AgentBackground,
        AgentTask,
        ExtensionError,
        SecureInputRequest,
        SessionCompleted,
        UserMessage,
        UserNotify,
    )
    from postbus.kernel.vault import Vault
    from postbus.model import Event

__all__ = ["System"]

logger = logging.getLogger("postbus.kernel")

# A channel may be away for a while, and what a user is told must arrive: about an hour.
PATIENT = RetryPolicy(max_attempts=20)
AGENT = RetryPolicy()
SORRY = "Sorry, that did not work, and it was set aside after several attempts. `postbus dlq list` shows why."

# Whether a publication of that identity is there already.
SAID = """
    SELECT EXISTS (SELECT 1 FROM identities i JOIN stream_registry s USING (stream_id)
                   WHERE s.name = ? AND NOT s.deleted AND i.native_id = ? AND i.variant = '')
"""


class System:
    """See ``KernelPart``."""

    def __init__(self, kernel: Kernel, vault: Vault) -> None:
        self._kernel = kernel
        self._vault = vault

    def wire(self) -> None:
        """See ``KernelPart.wire``."""
        handle, limits = self._kernel.handle, self._kernel.settings.kernel
        # An agent may wait for a human to allow what it does: that takes none of its own time.
        agent_s = limits.agent_timeout_s + limits.approval_ttl_s
        handle(SystemTopics.USER_NOTIFY, self._notify, "notify", retry=PATIENT)
        handle(SystemTopics.USER_MESSAGE, self._message, "messages", retry=AGENT, timeout=agent_s)
        handle(SystemTopics.AGENT_TASK, self._task, "tasks", retry=AGENT, timeout=agent_s)
        handle(SystemTopics.AGENT_BACKGROUND, self._background, "background", retry=AGENT, timeout=agent_s)
        handle(SystemTopics.SECURE_INPUT_REQUEST, self._secret, "secrets", retry=AGENT, timeout=limits.approval_ttl_s)
        handle(SystemTopics.SESSION_COMPLETED, self._session, "sessions")
        handle(SystemTopics.EXTENSION_ERROR, self._extension_error, "errors")

    async def start(self) -> None:
        """See ``KernelPart.start``."""

    async def stop(self) -> None:
        """See ``KernelPart.stop``."""

    # --- the user ---

    async def _notify(self, event: Event, said: UserNotify) -> None:
        """Deliver a text by its channel. The event's id is the message's: a channel shows it once."""
        channel = self._kernel.router.choose(said.channel_id).channel_id
        whom = _whom(event)
        message = OutgoingMessage(
            id=event.id,
            text=said.text,
            channel_id=channel,
            user_id=whom.get("user_id"),
            session_id=whom.get("session_id"),
            correlation_id=event.correlation_id,
            trust=Trust(event.trust),
        )
        await self._kernel.router.deliver(message)

    async def _message(self, event: Event, said: UserMessage) -> None:
        """Have the orchestrator answer what a user said. Handled twice, it is answered once."""
        if not said.text.strip():
            return
        session = said.session_id or f"{said.channel_id}:{said.user_id}"
        whom = {"user_id": said.user_id, "session_id": session}
        prompt = _prompt(event, said.text, "Somebody outside says")
        await self._answer(event, prompt, said.channel_id, whom)

    # --- the orchestrator ---

    async def _task(self, event: Event, task: AgentTask) -> None:
        """Have the orchestrator do something, and tell the user what came of it."""
        prompt = _prompt(event, task.prompt, f"{event.source} asks, with text from outside")
        await self._answer(event, prompt, task.channel_id, _whom(event), task.correlation_id)

    async def _background(self, event: Event, task: AgentBackground) -> None:
        """Have the orchestrator do something that the user is not told of."""
        prompt = _prompt(event, task.prompt, f"{event.source} asks, with text from outside")
        await self._kernel.invoke_agent(
            prompt, caller=event.source, session_id=f"background:{event.source}", correlation_id=task.correlation_id
        )

    async def _answer(
        self,
        event: Event,
        prompt: str,
        channel: str | None,
        whom: dict[str, str],
        correlation: str | None = None,
    ) -> None:
        """Invoke the orchestrator and publish its answer, under the identity of the event it answers.

        An agent that fails is asked again; when it was asked often enough the user is told, and the event is dead.
        """
        kernel, native_id = self._kernel, f"answer:{event.id}"
        if await self._said(native_id):
            return
        try:
            answer = await kernel.invoke_agent(
                prompt,
                caller=event.source,
                channel_id=channel,
                session_id=whom.get("session_id"),
                user_id=whom.get("user_id"),
                correlation_id=correlation,
            )
        except Exception:
            if event.attempt >= AGENT.max_attempts:
                sorry = f"sorry:{event.id}"
                await kernel.router.notify_user(SORRY, channel, native_id=sorry, metadata=whom)
            raise
        if answer.text.strip():
            await kernel.router.notify_user(
                answer.text, channel, native_id=native_id, correlation_id=correlation, metadata=whom
            )

    async def _said(self, native_id: str) -> bool:
        log, journal = await self._kernel.bus.open(), self._kernel.bus.journal
        return bool(await log.store.read(lambda db: db.execute(SAID, (journal, native_id)).get))

    # --- secrets ---

    async def _secret(self, event: Event, asked: SecureInputRequest) -> None:
        """Have a channel ask for a secret and put it in the vault. Nothing but its handle goes any further."""
        try:
            channel = await self._secure_channel(event, asked)
            if channel is not None:
                await self._take(channel, event, asked)
        except SecretDeclined:
            await self._respond(event, asked, "declined")
        except Exception as error:
            if isinstance(error, Reject) or event.attempt >= AGENT.max_attempts:
                await self._respond(event, asked, "failed", str(error))
            raise
        else:
            await self._respond(event, asked, "stored")

    async def _secure_channel(self, event: Event, asked: SecureInputRequest) -> SecureChannel | None:
        """Return the channel to ask on; None when the secret is there already, in answer to this request.

        Raises ``Reject`` when it can never work, ``NotFound`` while the channel is not there.
        """
        try:
            if await self._vault.has(asked.secret_id, request=event.id):
                return None
            owner = await self._vault.owner_of(asked.secret_id)
        except Invalid as error:
            raise Reject(error.message) from None
        if owner not in (None, event.source):
            raise Reject(f"the secret {asked.secret_id} belongs to {owner}")
        channel = self._kernel.router.choose(asked.target_channel)
        if not isinstance(channel, SecureChannel):
            raise Reject(f"channel {asked.target_channel} cannot ask for a secret")
        return channel

    async def _take(self, channel: SecureChannel, event: Event, asked: SecureInputRequest) -> None:
        """Bring a secret from the user to the vault. Of what goes wrong only the kind is told: words may hold it."""
        try:
            value = await channel.read_secret(asked)
            await self._vault.put(asked.secret_id, value, owner=event.source, request=event.id)
        except SecretDeclined:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, its text goes nowhere
            kind = type(error).__name__
        else:
            return
        raise RuntimeError(f"channel {asked.target_channel} could not take the secret ({kind})")

    async def _respond(self, event: Event, asked: SecureInputRequest, status: str, reason: str | None = None) -> None:
        payload = {"secret_id": asked.secret_id, "status": status}
        if reason is not None:
            payload["reason"] = reason
        await self._kernel.bus.publish(
            SystemTopics.SECURE_INPUT_RESPONSE, "kernel", payload, native_id=f"secret:{event.id}:{status}"
        )

    # --- signals ---

    async def _session(self, event: Event, ended: SessionCompleted) -> None:
        """Note the end of a session; whoever keeps something for it subscribes to the topic as well."""
        logger.info("session %s ended (%s), says %s", ended.session_id, ended.reason, event.source)

    async def _extension_error(self, event: Event, failed: ExtensionError) -> None:
        """Say it in the log of the process: the event itself is what an operator searches for."""
        logger.warning("extension %s failed to %s (%s): %s", failed.extension_id, failed.stage, event.id, failed.reason)


def _prompt(event: Event, text: str, who: str) -> str:
    """Return what a trusted event says as it is, and what any other says as marked data."""
    if event.trust == Trust.TRUSTED.value:
        return text
    if event.metadata.get(MARKED) is True and event.topic != SystemTopics.USER_MESSAGE:
        return MarkedPrompt(text)
    return mark(who, text)


def _whom(event: Event) -> dict[str, str]:
    """Return the user and the session an event is for, as far as it says so."""
    said = {name: event.metadata.get(name) for name in ("user_id", "session_id")}
    return {name: value for name, value in said.items() if isinstance(value, str)}
