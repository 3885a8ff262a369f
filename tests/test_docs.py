"""Documentation is part of the product: what exists is documented, and what is documented runs."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

import postbus
import postbus.cli
import postbus.kernel
import postbus.model
from tools import reference

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TIMEOUT_S = 180

# --- what exists is documented ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cli.md", "http.md", "python.md"])
def test_reference_is_up_to_date(name: str) -> None:
    assert (reference.FOLDER / name).read_text(encoding="utf-8") == reference.pages()[name], "run `make docs`"


def undocumented_commands(root: Any) -> list[str]:
    """Commands, and parameters of commands, that have no help text of their own."""
    missing = []
    for path, command in reference.commands(root, "postbus"):
        if not command.help:
            missing.append(path)
        missing += [
            f"{path} {parameter.opts[0]}"
            for parameter in command.params
            if not getattr(parameter, "hidden", False) and not getattr(parameter, "help", None)
        ]
    return missing


def test_every_command_and_option_is_documented() -> None:
    root = typer.main.get_command(postbus.cli.app)
    page = (reference.FOLDER / "cli.md").read_text(encoding="utf-8")
    assert undocumented_commands(root) == []
    assert [path for path, _ in reference.commands(root, "postbus") if f"## `{path}`\n" not in page] == []


def undocumented_names(*modules: Any) -> list[str]:
    """Public classes and functions without a docstring of their own."""
    values = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    return [
        name
        for name, value in values.items()
        if (isinstance(value, type) or inspect.isroutine(value)) and not vars(value).get("__doc__", value.__doc__)
    ]


def test_every_public_name_is_documented() -> None:
    page = (reference.FOLDER / "python.md").read_text(encoding="utf-8")
    assert undocumented_names(postbus, postbus.model, postbus.kernel) == []
    public = (*postbus.__all__, *postbus.model.__all__, *postbus.kernel.__all__)
    names = {name for name in public if not name.startswith("_")}
    assert [name for name in sorted(names) if f"### `{name}`\n" not in page] == []


def test_every_setting_is_documented() -> None:
    """A setting is an environment variable: every POSTBUS_… that the source names is in README or docs."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    settings = set(re.findall(r"\bPOSTBUS_[A-Z][A-Z_]*\b", sources))
    assert [setting for setting in sorted(settings) if setting not in pages] == []


def test_what_is_undocumented_is_found() -> None:
    app = typer.Typer(add_completion=False)

    @app.callback()
    def root() -> None:
        """Say what it is."""

    @app.command()
    def silent(count: int = typer.Option(1)) -> None: ...

    class Silent: ...

    module = type(sys)("module")
    module.__dict__.update(__all__=["Silent", "silent", "Path"], Silent=Silent, silent=silent, Path=Path)
    assert undocumented_commands(typer.main.get_command(app)) == ["postbus silent", "postbus silent --count"]
    assert undocumented_names(module) == ["module.Silent", "module.silent"]


# --- what is documented runs ------------------------------------------------------------------------------------------

FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
NOT_RUN = re.compile(r"<!-- not run: \S[^\n]*-->\s*\Z")


@dataclass(frozen=True)
class Snippet:
    line: int
    language: str
    body: str

    def commands(self) -> list[str]:
        """The lines that call postbus, without their prompt; a backslash at the end joins the next line to it."""
        lines = self.body.replace("\\\n", "").splitlines()
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ postbus ")]


def snippets(text: str) -> list[Snippet]:
    """The fenced blocks of a page that are to be run."""
    return [
        Snippet(text.count("\n", 0, match.start()) + 1, match["language"], match["body"])
        for match in FENCE.finditer(text)
        if not NOT_RUN.search(text[: match.start()])
    ]


def found(*languages: str) -> dict[str, list[Snippet]]:
    """Page -> its snippets in one of these languages, for pages that have any."""
    pages = {page.relative_to(ROOT).as_posix(): snippets(page.read_text(encoding="utf-8")) for page in PAGES}
    chosen = {name: [part for part in parts if part.language in languages] for name, parts in pages.items()}
    return {name: parts for name, parts in chosen.items() if parts}


def run(command: list[str], folder: Path) -> None:
    """Run as a newcomer would: in an empty folder, with the installed commands on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = os.environ | {"PATH": path, "POSTBUS_DATA": str(folder / "data")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"


PYTHON = [pytest.param(part, id=f"{name}:{part.line}") for name, parts in found("python").items() for part in parts]
CONSOLE = [pytest.param(name, parts, id=name) for name, parts in found("console", "sh").items()]


@pytest.mark.parametrize("snippet", PYTHON)
def test_python_snippet_runs(snippet: Snippet, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(snippet.body, encoding="utf-8")
    run([sys.executable, "-W", "error", "snippet.py"], tmp_path)


def needs_shell(command: str) -> bool:
    """Whether a shell would do more with a command than to split it into words."""
    words = list(shlex.shlex(command, posix=True, punctuation_chars=True))
    return "$" in command or "`" in command or any(set(word) <= set("();<>|&") for word in words if word)


@pytest.mark.parametrize(("page", "parts"), CONSOLE)
def test_console_snippets_run(page: str, parts: list[Snippet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's as a newcomer's shell runs them; those of the guides here, where a command costs no start of Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTBUS_DATA", str(tmp_path / "data"))
    for command in [command for part in parts for command in part.commands()]:
        if page == "README.md" or needs_shell(command):
            run(["sh", "-c", command], tmp_path)
        else:
            assert postbus.cli.main(shlex.split(command)[1:]) == 0, command


def test_commands_for_a_shell_are_told_from_others() -> None:
    plain = ["postbus append a '{\"b\": [1, 2]}'", "postbus tail 'a.>' --follow"]
    assert [command for command in plain if needs_shell(command)] == []
    shell = ["postbus tail > a", "postbus read a | wc -l", "postbus serve & sleep 1", "postbus $A"]
    assert [command for command in shell if not needs_shell(command)] == []


def test_snippets_are_found_and_can_fail(tmp_path: Path) -> None:
    page = (
        "```python\nraise SystemExit(3)\n```\n\n"
        "<!-- not run: needs a server -->\n\n```python\nskipped\n```\n\n"
        "```console\n$ postbus append a \\\n  '{}'\nappended\n$ make test\n```\n"
        "````text\n```python\nquoted\n```\n````\n"
    )
    python, console, text = snippets(page)
    assert (python.line, python.language, python.body) == (1, "python", "raise SystemExit(3)\n")
    assert console.commands() == ["postbus append a   '{}'"]
    assert (text.language, text.commands()) == ("text", [])
    with pytest.raises(AssertionError):
        run([sys.executable, "-c", python.body], tmp_path)


# --- nothing of the machine it was made on ----------------------------------------------------------------------------

# Joined here, so that this file does not name them either.
HOSTS = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("jfrog", "io"))]
MACHINE = re.compile("|".join([*map(re.escape, HOSTS), *(rf"(?<![\w./-])/{name}/" for name in ("work", "root"))]))
LEFT_BY_TOOLS = {".git", ".venv", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}


def shipped_files() -> list[Path]:
    """The files of the repository: what git would track, or everything that tools do not leave when there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not LEFT_BY_TOOLS.intersection(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


def machine_names(text: str) -> list[str]:
    return MACHINE.findall(text)


def test_no_file_names_a_package_index_or_a_path_of_one_machine() -> None:
    texts = {path: path.read_text(encoding="utf-8", errors="ignore") for path in shipped_files()}
    assert {str(path.relative_to(ROOT)): names for path, text in texts.items() if (names := machine_names(text))} == {}


def test_names_of_the_machine_are_found() -> None:
    assert machine_names("--index-url https://" + HOSTS[0] + "/simple")
    assert machine_names("cd " + "/" + "work" + "/main")
    assert machine_names("src/work/main and a network/root/x") == []
