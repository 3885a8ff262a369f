"""How far the log reaches: streams, partitions, first and next offsets, chains; read without ever blocking the bus."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.log.address import parse_address
from postbus.model import Invalid, NotFound
from postbus.store.database import connect
from postbus.store.folder import Folder
from postbus.topics import check_pattern, matches

if TYPE_CHECKING:
    from collections.abc import Iterator

    import apsw

__all__ = [
    "LOCAL",
    "Extent",
    "chain_through",
    "extents",
    "folder_of",
    "followed",
    "full_name",
    "reading",
    "remote_of",
]

LOCAL = "local.default"

# Every partition there is, with its beginning and its last event.
EXTENTS = """
    SELECT s.stream_id, s.name, s.epoch, p.partition, p.first_offset,
           IFNULL((SELECT max(e."offset") + 1 FROM events e
                   WHERE e.stream_id = p.stream_id AND e.partition = p.partition), p.first_offset)
    FROM stream_registry s JOIN partitions p USING (stream_id) WHERE NOT s.deleted ORDER BY s.name, p.partition
"""
CHAIN = 'SELECT chain FROM events WHERE stream_id = ? AND partition = ? AND "offset" = ?'
FOLLOWED = "SELECT value FROM store_facts WHERE name = 'upstream'"
BASE_CHAIN = "SELECT first_offset, base_chain FROM partitions WHERE stream_id = ? AND partition = ?"


class Extent(msgspec.Struct, frozen=True):
    """One partition: offsets ``first`` (the first retained) up to, not including, ``head``."""

    stream_id: int
    stream: str
    epoch: int
    partition: int
    first: int
    head: int

    @property
    def key(self) -> str:
        """What names the partition in offsets and manifests; the epoch shows once the stream was made again."""
        name = f"{self.stream}/{self.partition}"
        return f"{name}@{self.epoch}" if self.epoch else name


def folder_of(data: str) -> Folder:
    """Return the folder that a path or URL names (of a remote: of its copy); raises ``Invalid`` or ``NotFound``."""
    address = parse_address(data)
    if address.folder is None:
        raise Invalid("Spark cannot read memory:, it belongs to one process", hint="keep the log in a folder")
    folder = Folder(address.folder)
    if not folder.exists():
        raise NotFound(
            f"there is no store in {folder.path}",
            hint='name the data folder: the option "data", --data or POSTBUS_DATA',
        )
    return folder


def remote_of(data: str) -> str | None:
    """Return the remote that a URL names."""
    return parse_address(data).remote


def followed(data: str) -> str | None:
    """Return the remote that a URL names or that the folder follows."""
    remote = remote_of(data)
    if remote is not None:
        return remote
    with reading(folder_of(data)) as db:
        found: str | None = db.execute(FOLLOWED).get
        return found


def full_name(name: str) -> str:
    """Return a stream's name or pattern in full; a bare word is one of the local tenant."""
    return check_pattern(name if "." in name or name in {">", "*"} else f"{LOCAL}.{name}")


@contextmanager
def reading(folder: Folder) -> Iterator[apsw.Connection]:
    """Give a read-only connection in one snapshot."""
    db = connect(folder, write=False)
    try:
        db.execute("BEGIN")
        yield db
        db.execute("COMMIT")
    finally:
        db.close()


def extents(db: apsw.Connection, stream: str = ">", partition: int | None = None) -> list[Extent]:
    """Return the partitions of the streams that a name or pattern stands for, by name and number."""
    pattern = full_name(stream)
    found = [Extent(*row) for row in db.execute(EXTENTS)]
    return [each for each in found if matches(pattern, each.stream) and partition in {None, each.partition}]


def chain_through(db: apsw.Connection, extent: Extent, offset: int) -> bytes:
    """Return the chain after the event before ``offset``, which is what the event at ``offset`` builds on."""
    where = (extent.stream_id, extent.partition)
    row: Any = db.execute(BASE_CHAIN, where).get
    if row is not None and row[0] == offset:
        return bytes(row[1])
    chain = db.execute(CHAIN, (*where, offset - 1)).get
    if chain is None:
        raise NotFound(f"{extent.stream}/{extent.partition}/{offset - 1} is not in the log")
    return bytes(chain)
