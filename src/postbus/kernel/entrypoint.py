"""Loading the code of an extension: its folder is a package of its own, new for each loading, and not on the path."""

from __future__ import annotations

import importlib
import sys
import traceback
import types
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postbus.model import PostbusError

if TYPE_CHECKING:
    from postbus.kernel.manifest import ManifestFile

__all__ = ["describe_error", "forget_code", "load_class", "place_of"]

_numbers = count(1)


def load_class(file: ManifestFile) -> tuple[type[Any], str]:
    """Import the class an entrypoint names; return it and the name of its package.

    Raises ``InvalidFile`` when there is no such file or class, and whatever the code raises.
    """
    module_name, _, class_name = (file.manifest.entrypoint or "").partition(":")
    path = file.folder.joinpath(*module_name.split("."))
    if not path.with_suffix(".py").is_file() and not (path / "__init__.py").is_file():
        relative = f"{module_name.replace('.', '/')}.py"
        raise file.refuse(f"there is no {relative} for the entrypoint", "entrypoint")
    name = f"postbus_extension_{next(_numbers)}_{file.manifest.id.replace('-', '_')}"
    package = types.ModuleType(name)
    package.__path__ = [str(file.folder)]
    sys.modules[name] = package
    try:
        found = getattr(_import(f"{name}.{module_name}"), class_name, None)
    except BaseException:
        forget_code(name)
        raise
    if not isinstance(found, type):
        forget_code(name)
        raise file.refuse(f"there is no class {class_name} in {module_name}", "entrypoint")
    return found, name


def _import(name: str) -> types.ModuleType:
    # Compiled files are looked up by whole seconds and sizes: two quick edits would bring back the first.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    finally:
        sys.dont_write_bytecode = before


def forget_code(package: str) -> None:
    """Drop the modules of one loading."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def describe_error(error: BaseException) -> str:
    """Return what went wrong in one line."""
    if isinstance(error, PostbusError):
        text = getattr(error, "reason", None) or error.message
        return text if error.hint is None else f"{text} ({error.hint})"
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place_of(error: BaseException, folder: Path) -> str:
    """Return the file and line in an extension's folder where an error comes from; empty when it is not from there."""
    where = getattr(error, "where", None)
    if isinstance(where, str):
        return where
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename).is_relative_to(folder)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
