"""Writes docs/reference/: every command, every HTTP route and every public name of the package.

`make docs` runs it; tests/test_docs.py fails when the files are not what it would write.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer.main

import postbus
import postbus.cli
import postbus.kernel
import postbus.model
from postbus.server.openapi import document
from postbus.server.table import ROUTES

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


def http_reference(api: dict[str, Any]) -> str:
    """The page of the HTTP routes, from the OpenAPI document."""
    schemas = api["components"]["schemas"]
    parts = ["# HTTP", NOTE, "The same as OpenAPI: `/openapi.json` of a running server; for people: `/docs`."]
    used: dict[str, None] = {}
    meanings: dict[str, str] = {}
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            parts += [f"## `{method.upper()} {path}`", f"{route['summary']}. {route.get('description', '')}".strip()]
            rows = [[f"`{part['name']}`", part["in"], _kind(part["schema"], used)] for part in route["parameters"]]
            parts.append(_table(["parameter", "in", "type"], rows))
            if "requestBody" in route:
                body = route["requestBody"]["content"]["application/json"]["schema"]
                parts.append(f"Body: {_kind(body, used)}.")
            parts.append(_answers(route["responses"], used, meanings))
    parts += ["## Refusals", _table(["status", "meaning"], [[str(key), meanings[key]] for key in sorted(meanings)])]
    parts.append("## Bodies")
    shown: set[str] = set()
    while waiting := [name for name in used if name not in shown]:
        for name in waiting:  # their fields may name others
            shown.add(name)
            schema = schemas[name]
            required = set(schema.get("required", ()))
            rows = [
                [f"`{field}`", _kind(one, used), _given(field, one, required), one.get("description", "")]
                for field, one in schema.get("properties", {}).items()
            ]
            parts += [f"### `{name}`", schema.get("description", ""), _table(["field", "type", "default", ""], rows)]
            if "enum" in schema:
                parts.append(" ".join(f"`{value}`" for value in schema["enum"]))
    return _page(parts)


def _answers(responses: dict[str, Any], used: dict[str, None], meanings: dict[str, str]) -> str:
    """What a route answers, in one line; what its refusals mean is noted."""
    refusals = {status: answer["description"] for status, answer in responses.items() if status >= "400"}
    meanings.update(refusals)
    for status, answer in responses.items():
        if status not in refusals:
            content = answer.get("content", {})
            bodies = [_kind(one["schema"], used) if media.endswith("json") else media for media, one in content.items()]
            return f"Answers {status}{''.join(f' with {body}' for body in bodies)}. Refuses with {', '.join(refusals)}."
    return ""


def _given(field: str, schema: dict[str, Any], required: set[str]) -> str:
    return "required" if field in required else f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _kind(schema: dict[str, Any], used: dict[str, None]) -> str:
    """A JSON Schema in words; the names of other bodies are links, and noted."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        used[name] = None
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(one, used) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array" and "items" in schema:
        return f"list of {_kind(schema['items'], used)}"
    return " or ".join(kind) if isinstance(kind, list) else str(schema.get("format", kind))


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _page(parts: list[str]) -> str:
    return "\n\n".join(part.rstrip() for part in parts if part.strip()) + "\n"


def pages() -> dict[str, str]:
    """File name -> what docs/reference has to hold now."""
    return {
        "cli.md": cli_reference(typer.main.get_command(postbus.cli.app)),
        "http.md": http_reference(document(ROUTES)),
        "python.md": python_reference(postbus, postbus.model, postbus.kernel),
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
