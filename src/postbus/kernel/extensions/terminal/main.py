"""A channel on the terminal that the host runs in: what is typed goes to the agent, answers are printed."""

from __future__ import annotations

import asyncio
import getpass
import signal
from typing import TYPE_CHECKING

import msgspec

from postbus.kernel import Extension, PostbusError, SecretDeclined, read_config

from .screen import Screen, safe
from .shown import Shown

if TYPE_CHECKING:
    from postbus.kernel import ApprovalPrompt, ExtensionContext, OutgoingMessage, SecureInputRequest

__all__ = ["Terminal"]

ARGUMENTS_CHARS_MAX = 20_000
STDIN, STDOUT = 0, 1
HELP = """\
What you type goes to the agent. Lines that begin with / are for this terminal:
  /allow N           allow the tool call with that number, once
  /deny N [reason]   do not allow it
  /quit              stop the host (as Ctrl-D)
  //text             say /text to the agent
"""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of the channel, who sits at the terminal, and what is shown when it is the user's turn."""

    channel_id: str = "terminal"
    user_id: str | None = None
    prompt: str = "> "


class Terminal(Extension):
    """One user at one terminal."""

    def __init__(self) -> None:
        self._config = Config()
        self._streamed = ""
        self._asked: list[str] = []
        self._asking = asyncio.Lock()

    # --- life ---

    async def initialize(self, context: ExtensionContext) -> None:
        """Take the config and what was shown before, and greet."""
        self._context = context
        self._config = read_config(context.config, Config)
        self._user = self._config.user_id or getpass.getuser()
        self._shown = Shown(context.data_dir / "shown")
        self._screen = Screen(STDIN, STDOUT)
        if self._screen.is_terminal:  # before anything else is said: answers to what was asked before come soon
            await self._screen.write("Type to talk to the agent; /help says what else there is.\n")
            await self._turn()

    async def start(self) -> None:
        """Begin to read."""
        self._screen.open()

    async def stop(self) -> None:
        """Read no more."""
        self._screen.close()
        if self._screen.is_terminal:
            await self._screen.write("\n")

    # --- what the user says ---

    @property
    def channel_id(self) -> str:
        """The name of the channel."""
        return self._config.channel_id

    async def run_background(self) -> None:
        """Hand on what is typed, until the end of it."""
        while (line := await self._screen.line()) is not None:
            text = line.strip()
            try:
                if text.startswith("/") and not text.startswith("//"):
                    await self._command(text)
                elif text:
                    await self._context.receive(text.removeprefix("/") if text.startswith("//") else text, self._user)
            except PostbusError as error:
                await self._say(f"not taken: {error.message}{f' ({error.hint})' if error.hint else ''}")
            await self._turn()
        if self._screen.is_terminal:  # Ctrl-D: whoever leaves the chat ends it
            signal.raise_signal(signal.SIGTERM)

    async def _command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        number, _, reason = rest.strip().partition(" ")
        if word in ("/allow", "/deny") and number.isdecimal() and 1 <= int(number) <= len(self._asked):
            approved = word == "/allow"
            request = self._asked[int(number) - 1]
            await self._context.answer_approval(request, self._user, approved=approved, reason=reason.strip() or None)
            await self._say("allowed" if approved else "denied")
        elif word in ("/allow", "/deny"):
            await self._say(f"{word} needs the number of a question, as in {word} 1")
        elif word == "/quit":
            signal.raise_signal(signal.SIGTERM)
        elif word == "/help":
            await self._screen.write(HELP, fresh_line=True)
        else:
            await self._say(f"there is no {word}; /help says what there is, //… sends a text that begins with /")

    # --- what the user sees ---

    async def send(self, message: OutgoingMessage) -> None:
        """Print a message, once."""
        if message.id in self._shown:
            return
        streamed, self._streamed = self._streamed, ""
        if streamed and streamed == message.text:
            await self._screen.write("\n")
        else:
            await self._screen.write("\n" if streamed else "")
            await self._say(message.text)
        self._shown.add(message.id)
        await self._turn()

    async def send_delta(self, session_id: str, text: str) -> None:  # noqa: ARG002 - there is one user here
        """Print a piece of an answer where it can be seen growing."""
        if self._screen.is_terminal:
            first = not self._streamed
            self._streamed += text
            await self._screen.write(safe(text), fresh_line=first)

    async def read_secret(self, request: SecureInputRequest) -> str:
        """Ask for a secret and do not show it."""
        if not self._screen.is_terminal:
            raise SecretDeclined("this is no terminal: what is typed here could be seen")
        async with self._asking:
            value = await self._screen.read_unseen(f"{safe(request.prompt)} (not shown; empty to decline):")
            await self._turn()
        if not value:
            raise SecretDeclined("the user gave none")
        return value

    async def show_approval(self, prompt: ApprovalPrompt) -> None:
        """Ask whether a tool may be called, once per question."""
        if prompt.request_id in self._asked:
            return
        self._asked.append(prompt.request_id)
        number = len(self._asked)
        arguments = msgspec.json.encode(prompt.arguments).decode()
        if len(arguments) > ARGUMENTS_CHARS_MAX:
            left = len(arguments) - ARGUMENTS_CHARS_MAX
            arguments = f"{arguments[:ARGUMENTS_CHARS_MAX]}… and {left} characters that are not shown"
        await self._say(
            f"[{number}] May {prompt.tool_name} of {prompt.server_alias} be called with\n    {arguments}\n"
            f"    /allow {number}  or  /deny {number} [reason]"
        )
        await self._turn()

    async def _say(self, text: str) -> None:
        await self._screen.write(f"{safe(text)}\n", fresh_line=True)

    async def _turn(self) -> None:
        if self._screen.is_terminal and not self._streamed:
            await self._screen.write(self._config.prompt)
