"""What a node does with events for the remote inside its own transactions, in which the remote has no part."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from postbus.log.sqlite.doors import Transaction
from postbus.model import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.model import Draft, Receipt

__all__ = ["Outlet", "OutletTransaction", "stays_here"]

# The streams that belong to one node, because they change with its rows: dead letters, messages, the spool's own.
OWN_SUFFIX = "-dlq"
OWN_LEAVES = ("spool", "inbox-messages")


@lru_cache(1024)
def stays_here(stream: str) -> bool:
    """Say whether a stream belongs to the node and is not on the remote."""
    leaf = stream.rpartition(".")[2]
    return leaf.endswith(OWN_SUFFIX) or leaf in OWN_LEAVES


class Outlet(Protocol):
    """Who carries events to the remote, also while it cannot be reached."""

    async def append(self, stream: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """Hand events to the remote, or keep them for it; see ``Log.append``."""

    def keep(self, tx: Transaction, stream: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """Keep events for the remote inside an open transaction."""

    def kept(self) -> None:
        """Say that a transaction with events for the remote was committed."""

    async def stop(self) -> None:
        """Carry nothing any more; what is kept stays kept. Idempotent."""


class OutletTransaction(Transaction):
    """A transaction whose appends to streams of the remote are kept for it, since the remote has no part in it."""

    outlet: Outlet | None = None
    keeps = False

    def append(self, name: str, drafts: Sequence[Draft]) -> list[Receipt]:
        """Append events as ``Log.append`` does, or keep them until the remote has them."""
        if stays_here(name):
            return super().append(name, drafts)
        if self.outlet is None:
            message = f"nothing carries what is kept for {name} to the remote"
            raise StorageError(message, hint="open the log through a bus or a server")
        self.stream(name)
        self.keeps = True
        return self.outlet.keep(self, name, drafts)
