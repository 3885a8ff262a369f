"""A channel over HTTP: users say things with POST, answers are read by long poll or as server-sent events."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from postbus.kernel import Extension, Health, Invalid, read_config

from .app import Listener, make_app
from .outbox import Outbox
from .serving import Serving, is_loopback, listen

if TYPE_CHECKING:
    from postbus.kernel import ApprovalPrompt, ExtensionContext, OutgoingMessage, Receipt

    from .app import Decision, Said

__all__ = ["HttpChannel"]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it listens and which names it goes by. The token is in a variable; other machines need one."""

    channel_id: str = "http"
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 7780
    hosts: list[str] = []
    token_env: str | None = None


class HttpChannel(Extension):
    """Users who speak HTTP."""

    def __init__(self) -> None:
        self._config = Config()
        self._serving: Serving | None = None
        self._asked: dict[str, ApprovalPrompt] = {}
        self.listeners: set[Listener] = set()
        self.stopping = asyncio.Event()
        self.token: str | None = None
        self.hosts: frozenset[str] = frozenset()

    # --- life ---

    async def initialize(self, context: ExtensionContext) -> None:
        """Take the config and the messages of before."""
        self._context = context
        self._config = config = read_config(context.config, Config)
        self.hosts = frozenset(name.lower() for name in (*config.hosts, config.host))
        self.outbox = Outbox(context.data_dir / "messages.jsonl")

    async def start(self) -> None:
        """Listen; raises ``Invalid`` when it cannot, or would be open to other machines without a token."""
        config = self._config
        self.token = self._token()
        if self.token is None and not is_loopback(config.host):
            message = f"{config.host} can be reached from other machines: a token is needed"
            raise Invalid(message, hint="set token_env in its config, or host: 127.0.0.1")
        self._serving = Serving(make_app(self), listen(config.host, config.port))
        await self._serving.start()
        (self._context.data_dir / "port").write_text(f"{self._serving.port}\n", "ascii")
        self._context.logger.info("listening on http://%s:%d", config.host, self._serving.port)

    async def stop(self) -> None:
        """Tell readers that it ends, and end."""
        self.stopping.set()
        if self._serving is not None:
            await self._serving.stop()

    async def health(self) -> Health:
        """Say where it listens."""
        if self._serving is None:
            return Health(ok=False, detail="it does not listen")
        return Health(ok=True, detail=f"http://{self._config.host}:{self._serving.port}")

    def _token(self) -> str | None:
        name = self._config.token_env
        if name is None:
            return None
        token = os.environ.get(name)
        if not token:
            raise Invalid(f"the token is missing: {name} is not set")
        return token

    # --- the channel ---

    @property
    def channel_id(self) -> str:
        """The name of the channel."""
        return self._config.channel_id

    async def send(self, message: OutgoingMessage) -> None:
        """Put a message where its reader finds it, now or later."""
        self.outbox.add(message)

    async def send_delta(self, session_id: str, text: str) -> None:
        """Hand a piece of an answer to whoever listens."""
        for listener in self.listeners:
            if listener.session_id in (None, session_id):
                listener.add(text)

    async def show_approval(self, prompt: ApprovalPrompt) -> None:
        """Put a question where a human finds it."""
        self._asked[prompt.request_id] = prompt

    # --- for the routes ---

    async def take(self, said: Said) -> Receipt:
        """Take in what a user says."""
        return await self._context.receive(
            said.text, said.user_id, session_id=said.session_id, message_id=said.message_id
        )

    async def decide(self, request_id: str, decision: Decision) -> None:
        """Take in what a human decides."""
        await self._context.answer_approval(
            request_id, decision.user_id, approved=decision.approved, reason=decision.reason
        )
        self._asked.pop(request_id, None)

    def questions(self) -> list[ApprovalPrompt]:
        """Return the questions that wait for a human."""
        now_us = self._context.clock.now_us()
        self._asked = {name: asked for name, asked in self._asked.items() if asked.expires_at_us > now_us}
        return list(self._asked.values())
