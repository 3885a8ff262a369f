"""The command that makes a new extension, with a test that passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from postbus.cli import output
from postbus.cli.options import Json, examples
from postbus.model import Conflict, Invalid, StorageError

__all__ = ["commands"]

NAME = re.compile("[a-z][a-z0-9_]{0,39}")
RESERVED = {"kernel"}

commands = typer.Typer()

MANIFEST = """\
id: {name}
name: {title}
description: Counts the words of notes, and offers that to agents as a tool.
entrypoint: main:{kind}

# What the code finds in context.config; `extensions: {{{name}: ...}}` in the settings is laid over it.
config:
  greeting: Counted

events:
  publishes:
    - topic: {name}.counted
      description: How many words a note has
      schema:
        type: object
        required: [words]
        properties: {{words: {{type: integer, minimum: 0}}}}
  subscribes:
    - topic: {name}.note
      handler: custom        # subscribed to in the code below
"""

MAIN = '''\
"""{title}: counts the words of notes."""

from postbus.kernel import Event, Extension, ExtensionContext, ToolCall, ToolSpec

COUNT = ToolSpec(
    name="{name}_count",
    description="Count the words of a text.",
    parameters={{
        "type": "object",
        "properties": {{"text": {{"type": "string"}}}},
        "required": ["text"],
        "additionalProperties": False,
    }},
    needs_approval=False,  # True: a human is asked before each call
)


class {kind}(Extension):
    """What is subscribed to here is handled at least once: a handler may see an event again after a crash."""

    async def initialize(self, context: ExtensionContext) -> None:
        self._context = context
        context.subscribe_event("{name}.note", self._on_note)

    async def _on_note(self, event: Event) -> None:
        words = len(str(event.payload.get("text", "")).split())
        # With a native id of the event's own, a repetition publishes nothing new.
        await self._context.emit("{name}.counted", {{"words": words}}, native_id=f"counted:{{event.id}}")

    def get_tools(self) -> list[ToolSpec]:
        return [COUNT]

    async def call_tool(self, call: ToolCall) -> dict[str, object]:
        return {{"said": self._context.config["greeting"], "words": len(call.arguments["text"].split())}}
'''

TEST = '''\
"""Runs {title} on a bus in memory whose clock is the test's: nothing waits for real time."""

import asyncio
from pathlib import Path

from postbus.kernel import Kernel
from postbus.testing import BusKit

HERE = Path(__file__).parent


def test_a_note_is_counted() -> None:
    async def run() -> None:
        async with BusKit() as kit, Kernel(kit.bus, HERE.parent) as kernel:
            (status,) = [one for one in kernel.report().extensions if one.id == "{name}"]
            assert status.state == "running", status.reason
            await kit.publish("{name}.note", {{"text": "one two three"}})
            await kit.settle()
            counted = [event.payload for event in await kit.events() if event.topic == "{name}.counted"]
            assert counted == [{{"words": 3}}]
            answer = await kernel.call_tool("{name}_count", {{"text": "a b"}}, caller="test")
            assert answer == {{"said": "Counted", "words": 2}}

    asyncio.run(run())


if __name__ == "__main__":
    test_a_note_is_counted()
'''


@commands.command(
    rich_help_panel="Extensions",
    epilog=examples(
        """
        $ postbus new-extension word_count
        $ postbus new-extension word_count --extensions ./extensions
        """
    ),
)
def new_extension(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its id: lower case letters, digits and _.")],
    *,
    extensions: Annotated[
        Path, typer.Option("--extensions", metavar="DIR", help="The folder of extensions to make it in.")
    ] = Path("extensions"),
    json: Json = False,
) -> None:
    """Make an extension that works, with a test: a manifest, a handler, a tool.

    Nothing that exists is overwritten. `postbus host --extensions DIR` runs it.
    """
    if not NAME.fullmatch(name) or name in RESERVED:
        raise Invalid(f"{name!r} is no name", hint="lower case letters, digits and _, at most 40, a letter first")
    folder = extensions / name
    title = name.replace("_", " ").capitalize()
    words = {"name": name, "title": title, "kind": "".join(part.capitalize() for part in name.split("_"))}
    files = {"manifest.yaml": MANIFEST, "main.py": MAIN, f"test_{name}.py": TEST}
    try:
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text.format(**words), encoding="utf-8")
    except FileExistsError:
        raise Conflict(f"{folder} is there already", hint="choose another name") from None
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}") from error
    if json:
        output.document({"id": name, "folder": str(folder), "files": list(files)})
        return
    output.say(f"made {folder}: {', '.join(files)}")
    output.say(f"test  python {folder / f'test_{name}.py'}")
    output.say(f"run   postbus host --extensions {extensions}")
