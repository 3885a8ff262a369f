"""Writes docs/reference/: every command of the command line and every public name of the package.

`make docs` runs it; tests/test_docs.py fails when the files are not what it would write.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer.main

import postbus
import postbus.cli
import postbus.model

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- written by `make docs`; edit the docstrings and the help texts instead -->"
LINE_WIDTH = 100
MODULE = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Z])")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that can be run, with its full path, in the order of the help screen; hidden ones are left out."""
    if command.hidden:
        return
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


def cli_reference(root: Any) -> str:
    """The page of the command line, from its Typer root command."""
    parts = ["# Command line", NOTE]
    for path, command in commands(root, "postbus"):
        parts += [f"## `{path}`", inspect.cleandoc(command.help or "")]
        # As text: they show what can be done, not one session that could be run from top to bottom.
        parts += [_parameters(command), (command.epilog or "").replace("```console", "```text")]
    return _page(parts)


def _parameters(command: Any) -> str:
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        option = parameter.param_type_name == "option"
        argument = parameter.metavar or parameter.name.upper()
        names = [*parameter.opts, *parameter.secondary_opts] if option else [argument]
        variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
        cells = [
            ", ".join(f"`{name}`" for name in names),
            "required" if parameter.required else _default(parameter.default),
            ", ".join(f"`{variable}`" for variable in variables),
            (getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " "),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    if not rows:
        return ""
    return "\n".join(["| parameter | default | variable | meaning |", "|---|---|---|---|", *rows])


def _default(value: Any) -> str:
    """The default of a parameter; that a flag is not given by default need not be said."""
    return "" if value is None or value is False or callable(value) else f"`{value}`"


def python_reference(*modules: ModuleType) -> str:
    """The page of the public names: those in the modules' ``__all__``, each under the first module that lists it."""
    parts, seen = ["# Python", NOTE], set()
    for module in modules:
        names = [name for name in module.__all__ if name not in seen and not name.startswith("_")]
        seen |= set(names)
        if names:
            parts += [f"## `{module.__name__}`", inspect.getdoc(module) or ""]
        for name in names:
            parts += [f"### `{name}`", *_entry(name, getattr(module, name))]
    return _page(parts)


def _entry(name: str, value: Any) -> Iterator[str]:
    members = vars(value) if isinstance(value, type) else {}
    enumeration = isinstance(value, type) and issubclass(value, enum.Enum)
    plain_error = isinstance(value, type) and issubclass(value, Exception) and "__init__" not in members
    if callable(value) and not enumeration and not plain_error:
        yield f"```text\n{_signature(name, value)}\n```"
    if callable(value):
        yield inspect.getdoc(value) or ""
    if enumeration:
        yield "\n".join(f"* `{member.name}` = `{member.value!r}`" for member in value)
    public = {key: member for key, member in members.items() if not key.startswith("_")}
    yield "\n".join(
        f"* `{key}`: {' '.join((inspect.getdoc(member) or '').split())}"
        for key, member in public.items()
        if isinstance(member, property)
    )
    for key, member in public.items():
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function):
            yield f"#### `{name}.{key}`"
            yield f"```text\n{_signature(key, function)}\n```"
            yield inspect.getdoc(function) or ""


def _signature(name: str, value: Any) -> str:
    """The call as one line, or one parameter a line when that is too long."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    texts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            texts.append("*")
        texts.append(_parameter(parameter))
    silent = isinstance(value, type) or signature.return_annotation is signature.empty
    returns = "" if silent else f" -> {_type(signature.return_annotation)}"
    short = f"{name}({', '.join(texts)}){returns}"
    if len(short) <= LINE_WIDTH:
        return short
    return "\n".join([f"{name}(", *(f"    {text}," for text in texts), f"){returns}"])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
    annotation = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
    default = parameter.default
    if default is parameter.empty:
        shown = ""
    elif isinstance(default, enum.Enum):
        shown = f" = {type(default).__name__}.{default.name}"
    else:
        shown = f" = {ADDRESS.sub('', repr(default))}"
    return f"{stars}{parameter.name}{annotation}{shown}"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return MODULE.sub("", text.replace("NoneType", "None"))


def _page(parts: list[str]) -> str:
    return "\n\n".join(part.rstrip() for part in parts if part.strip()) + "\n"


def pages() -> dict[str, str]:
    """File name -> what docs/reference has to hold now."""
    return {
        "cli.md": cli_reference(typer.main.get_command(postbus.cli.app)),
        "python.md": python_reference(postbus, postbus.model),
    }


def main() -> int:
    """Write the pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
