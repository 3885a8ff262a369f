"""Finding extensions and loading their code, which needs no bus: ``postbus doctor`` does just this."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from postbus.kernel.contract import AgentProvider, ExtensionState
from postbus.kernel.entry import Entry
from postbus.kernel.entrypoint import forget_code, load_class
from postbus.kernel.graph import arrange
from postbus.kernel.manifest import MANIFEST, read_manifest
from postbus.model import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.kernel.manifest import ManifestFile
    from postbus.kernel.settings import Settings

__all__ = ["SHIPPED", "AgentFactory", "discover", "load_code", "load_entries", "order_entries"]

SHIPPED = Path(__file__).parent / "extensions"


class AgentFactory(Protocol):
    """Makes the agent of a manifest that has an ``agent`` and no code."""

    def __call__(self, file: ManifestFile, settings: Settings) -> AgentProvider:
        """Return the agent; raises ``Invalid`` when it cannot be made."""


def discover(folders: Sequence[Path], settings: Settings) -> dict[str, Entry]:
    """Return every extension in the folders, and the shipped ones the settings name, by id.

    One whose manifest is refused is there under the name of its folder, in error. Raises ``Invalid`` for a folder that
    is not there and for a shipped extension that does not exist.
    """
    found: dict[str, Entry] = {}
    for folder in (*_shipped(settings), *_within(folders)):
        entry = _read(folder)
        if entry.id in found:
            taken = found[entry.id].folder
            file, entry = entry.file, Entry(_free(folder.name, found), folder)
            reason = (
                f"the id {entry.id} is that of {taken}"
                if file is None
                else f"the id {file.manifest.id} is that of {taken}"
            )
            entry.mark_failed("discover", reason if file is None else file.refuse(reason, "id"))
        if entry.id in settings.kernel.disabled:
            entry.state, entry.reason = ExtensionState.DISABLED, "the settings disable it"
        found[entry.id] = entry
    return found


def _shipped(settings: Settings) -> list[Path]:
    there = {path.parent.name: path.parent for path in sorted(SHIPPED.glob(f"*/{MANIFEST}"))}
    for name in settings.kernel.shipped:
        if name not in there:
            raise Invalid(f"no extension {name} comes with Postbus", hint=f"there are {', '.join(there) or 'none'}")
    return [there[name] for name in dict.fromkeys(settings.kernel.shipped)]


def _within(folders: Sequence[Path]) -> list[Path]:
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise Invalid(f"there is no folder {folder}", hint="name the folder that holds the extensions")
        if (folder / MANIFEST).is_file():
            found.append(folder.resolve())
        else:
            found += [path.parent.resolve() for path in sorted(folder.glob(f"*/{MANIFEST}"))]
    return list(dict.fromkeys(found))


def _read(folder: Path) -> Entry:
    try:
        file = read_manifest(folder / MANIFEST)
    except Invalid as error:
        entry = Entry(folder.name, folder)
        entry.mark_failed("discover", error)
        return entry
    return Entry(file.manifest.id, folder, file)


def _free(name: str, taken: dict[str, Entry]) -> str:
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


def order_entries(entries: dict[str, Entry]) -> list[Entry]:
    """Return those that can run, each after what it depends on; the others are marked with the reason."""
    ordered, reasons = arrange({name: entry.depends_on for name, entry in entries.items()})
    for name, reason in reasons.items():
        entry = entries[name]
        if entry.alive:
            assert entry.file is not None  # noqa: S101 - what has no manifest is in error
            entry.mark_failed("discover", entry.file.refuse(reason, "depends_on"))
    for name in ordered:
        check_dependencies(entries[name], entries)
    return [entries[name] for name in ordered if entries[name].alive]


def check_dependencies(entry: Entry, entries: dict[str, Entry]) -> bool:
    """Say whether all it depends on is well; it is marked with the reason when not."""
    if not entry.alive:
        return False
    for name in entry.depends_on:
        other = entries.get(name)
        if other is None or not other.alive:
            state = (
                "is not there"
                if other is None
                else "is disabled"
                if other.state is ExtensionState.DISABLED
                else "failed"
            )
            because = f": {other.reason}" if other is not None and other.state is ExtensionState.ERROR else ""
            assert entry.file is not None  # noqa: S101 - what has no manifest is in error
            entry.mark_failed(
                "depends_on", entry.file.refuse(f"it depends on {name}, which {state}{because}", "depends_on")
            )
            return False
    return True


def load_entries(entries: dict[str, Entry], settings: Settings, factory: AgentFactory) -> list[Entry]:
    """Load the code of all that can run, and return them in the order of their dependencies."""
    ordered = order_entries(entries)
    for entry in ordered:
        if not check_dependencies(entry, entries):
            continue
        assert entry.file is not None  # noqa: S101 - as above
        try:
            entry.instance, entry.package = load_code(entry.file, settings, factory)
            entry.state = ExtensionState.LOADED
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is somebody else's code; the reason is kept
            entry.mark_failed("load", error)
    return ordered


def load_code(file: ManifestFile, settings: Settings, factory: AgentFactory) -> tuple[Any, str]:
    """Return a new instance of an extension and the name of its package; raises whatever its code raises."""
    if file.manifest.entrypoint is None:
        return factory(file, settings), ""
    kind, package = load_class(file)
    try:
        instance = kind()
    except BaseException:
        forget_code(package)
        raise
    if file.manifest.agent is not None and not isinstance(instance, AgentProvider):
        forget_code(package)
        raise file.refuse(f"there is an agent, but {kind.__name__} has no method invoke", "agent")
    return instance, package
