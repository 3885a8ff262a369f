"""Extensions, the shipped ones included, use the public names of ``postbus.kernel`` and nothing else of Postbus."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import postbus.kernel
from postbus.kernel.discovery import SHIPPED
from tests.test_docs import undocumented_names

ALLOWED = set(postbus.kernel.__all__)


def foreign_imports(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] == "postbus"]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("postbus"):
            names = {alias.name for alias in node.names}
            if node.module != "postbus.kernel" or not names <= ALLOWED:
                found.append(f"{node.module}: {', '.join(sorted(names))}")
    return found


@pytest.mark.parametrize("path", sorted(SHIPPED.rglob("*.py")), ids=lambda path: str(path.relative_to(SHIPPED)))
def test_a_shipped_extension_uses_public_names_only(path: Path) -> None:
    assert foreign_imports(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import postbus", 1),
        ("import postbus.bus.bus", 1),
        ("from postbus.model import Event", 1),
        ("from postbus.kernel import loader", 1),
        ("from postbus.kernel.context import ExtensionContext", 1),
        ("from postbus.kernel import Event, ExtensionContext\nfrom .sibling import x\nimport json", 0),
    ],
)
def test_a_foreign_import_is_found(source: str, count: int) -> None:
    assert len(foreign_imports(source)) == count


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(postbus.kernel.__all__) == sorted({*postbus.kernel.__all__})
    assert undocumented_names(postbus.kernel) == []
