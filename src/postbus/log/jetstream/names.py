"""What things are called on a NATS server, and how the JetStream streams are made.

A partition is one JetStream stream. Its events come in on subjects with a pass in them (``put``), are kept on subjects
without it (``log``) and announced once they are kept (``new``); other writers may use ``add``. Changing the pass shuts
out whatever is still on its way, see ``gates.py``.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any, Final

import msgspec

from postbus.model import Invalid, Stream

__all__ = ["FIRST_PASS", "Names", "identity_hash", "pass_of"]

FIRST_PASS: Final = "0"  # noqa: S105 - a part of a subject
NAME_CHARS_MAX: Final = 180  # of the 255 that a folder's name may have
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)


class Names(msgspec.Struct, frozen=True):
    """All names under one prefix."""

    prefix: str
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be a part of a subject."""
        if not _PREFIX.fullmatch(self.prefix):
            raise Invalid(f"the prefix is 1 to 32 of A-Z a-z 0-9 _ -, not {self.prefix!r}")

    # --- JetStream streams --------------------------------------------------------------------------------------------

    @property
    def registry(self) -> str:
        """The JetStream stream that knows all streams."""
        return f"{self.prefix}=registry"

    def partition(self, stream: Stream, partition: int) -> str:
        """The JetStream stream of a partition."""
        return f"{self.prefix}={_tag(stream.name)}={stream.epoch}={partition}"

    def identities(self, stream: Stream) -> str:
        """The JetStream stream with the identities that a partition cannot decide alone."""
        return f"{self.prefix}={_tag(stream.name)}={stream.epoch}=id"

    # --- subjects -----------------------------------------------------------------------------------------------------

    def record(self, name: str) -> str:
        """Where the registry keeps a stream."""
        return f"{self.prefix}.registry.{name}"

    def identity(self, stream: Stream, identity: str) -> str:
        """Where an identity is kept apart from its event."""
        return f"{self.prefix}.id.{stream.name}.{stream.epoch}.{identity}"

    def put(self, stream: Stream, partition: int, current: str) -> str:
        """Where events go in, with the pass that is valid now."""
        return f"{self.prefix}.put.{stream.name}.{stream.epoch}.{partition}.{current}"

    def kept(self, stream: Stream, partition: int) -> str:
        """Where events are kept."""
        return f"{self.prefix}.log.{stream.name}.{stream.epoch}.{partition}"

    def new(self, stream: Stream, partition: int) -> str:
        """Where events are announced."""
        return f"{self.prefix}.new.{stream.name}.{stream.epoch}.{partition}"

    def add(self, stream: Stream, partition: int) -> str:
        """Where other writers may put messages."""
        return f"{self.prefix}.add.{stream.name}.{stream.epoch}.{partition}"

    # --- how they are made --------------------------------------------------------------------------------------------

    def registry_config(self) -> dict[str, Any]:
        """The registry: one message for each name."""
        return self._config(self.registry, [f"{self.prefix}.registry.>"], max_msgs_per_subject=1)

    def identities_config(self, stream: Stream) -> dict[str, Any]:
        """Identities: one message for each; read from the leader only, a copy that lags would forget."""
        subject = self.identity(stream, "*")
        return self._config(self.identities(stream), [subject], max_msgs_per_subject=1, allow_direct=False)

    def partition_config(self, stream: Stream, partition: int) -> dict[str, Any]:
        """A partition: nothing is removed by the server itself, and no single message by anybody."""
        return self._config(
            self.partition(stream, partition),
            self.subjects(stream, partition, FIRST_PASS),
            # With any pass: what was let in with the last one may be stored after the pass was changed.
            subject_transform={
                "src": f"{self.put(stream, partition, '*')}.>",
                "dest": f"{self.kept(stream, partition)}.>",
            },
            republish={"src": ">", "dest": f"{self.new(stream, partition)}.>", "headers_only": True},
            deny_delete=True,
            allow_atomic=True,
            metadata={"postbus": f"{stream.name} {partition}"},
        )

    def subjects(self, stream: Stream, partition: int, current: str) -> list[str]:
        """Where a partition takes messages from, while this pass is valid."""
        return [f"{self.put(stream, partition, current)}.>", self.add(stream, partition)]

    def _config(self, name: str, subjects: list[str], **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "subjects": subjects,
            "storage": "file",
            "retention": "limits",
            "discard": "new" if "max_msgs_per_subject" not in more else "old",
            "num_replicas": self.replicas,
            "allow_direct": True,
            "max_age": 0,
            "duplicate_window": 120_000_000_000 if self.replicas > 1 else 100_000_000,
            **more,
        }


def pass_of(config: dict[str, Any]) -> str:
    """Return the pass that a partition's configuration says is valid."""
    put: str = config["subjects"][0]
    return put.split(".")[-2]


def identity_hash(native_id: str, variant: str) -> str:
    """Return an identity as a token of a subject."""
    return sha256(f"{len(native_id)}:{native_id}{variant}".encode()).hexdigest()[:32]


def _tag(name: str) -> str:
    if len(name) <= NAME_CHARS_MAX:
        return name.replace(".", "=")
    return f"={sha256(name.encode()).hexdigest()[:40]}"
