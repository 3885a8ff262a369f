"""What an agent remembers, in its folder: the turns of each session, and how far each piece of work has come.

Work that is repeated after a crash finds its own steps here, so that the model is not asked again for what it has
answered, and a tool that was allowed is called with the same arguments.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Memory", "Turn", "Work"]

SESSIONS_MAX = 1_000
WORKS_MAX = 256


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked and what was answered."""

    id: str
    task: str
    answer: str


class Work:
    """The steps of one invocation, each kept as soon as it is taken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.steps: list[dict[str, Any]] = [step for step in _read(path) if isinstance(step, dict)]

    def add(self, step: dict[str, Any]) -> None:
        """Keep a step."""
        self.steps.append(step)
        _append(self._path, step)


class Memory:
    """The memory of one agent: the last ``turns_max`` turns of the sessions used last."""

    def __init__(self, folder: Path, turns_max: int) -> None:
        self._sessions = folder / "sessions"
        self._works = folder / "works"
        self._turns_max = turns_max
        self._known: OrderedDict[str, list[Turn]] = OrderedDict()
        for place in (self._sessions, self._works):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _prune(self._sessions, SESSIONS_MAX)
        _prune(self._works, WORKS_MAX)

    def turns(self, session_id: str) -> list[Turn]:
        """Return the turns of a session, oldest first."""
        if session_id not in self._known:
            self._known[session_id] = self._load(session_id)
            if len(self._known) > SESSIONS_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(session_id)
        return list(self._known[session_id])

    def add(self, session_id: str, turn: Turn) -> None:
        """Remember a turn; one that is known already is not remembered twice."""
        turns = self.turns(session_id)
        if self._turns_max == 0 or any(known.id == turn.id for known in turns):
            return
        _append(self._file(session_id), msgspec.to_builtins(turn))
        self._known[session_id] = [*turns, turn][-self._turns_max :]

    def forget(self, session_id: str) -> None:
        """Forget a session."""
        self._known.pop(session_id, None)
        self._file(session_id).unlink(missing_ok=True)

    def work(self, invocation_id: str) -> Work:
        """Return the steps of an invocation, which are there when it is repeated."""
        _prune(self._works, WORKS_MAX)
        return Work(self._works / f"{_name(invocation_id)}.jsonl")

    def _load(self, session_id: str) -> list[Turn]:
        path = self._file(session_id)
        rows = _read(path)
        found = []
        for row in rows:
            try:
                found.append(msgspec.convert(row, Turn))
            except msgspec.ValidationError:
                continue
        kept = found[-self._turns_max :] if self._turns_max else []
        if len(rows) > 2 * len(kept):  # rewritten now and then, so that it does not grow for ever
            fresh = path.with_suffix(".new")
            fresh.write_bytes(b"".join(msgspec.json.encode(turn) + b"\n" for turn in kept))
            fresh.replace(path)
        return kept

    def _file(self, session_id: str) -> Path:
        return self._sessions / f"{_name(session_id)}.jsonl"


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path) -> list[Any]:
    """Return the rows of a file; a last one that a crash cut short is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(msgspec.json.decode(line))
        except msgspec.DecodeError:
            continue
    return rows


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("ab") as file:
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(msgspec.json.encode(row) + b"\n")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _prune(folder: Path, most: int) -> None:
    """Remove the files that were not used for longest."""
    files = list(folder.glob("*.jsonl"))
    if len(files) > most:
        files.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in files[: len(files) - most]:
            path.unlink(missing_ok=True)
