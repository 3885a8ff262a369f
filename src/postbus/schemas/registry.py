"""Schemas by subject and version, what they are bound to, and the one check that every publish goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import msgspec

from postbus import strict_json
from postbus.model import Conflict, Invalid, NotFound, SchemaConflict, SchemaMismatch
from postbus.schemas.document import BYTES_MAX, ISSUES_MAX, Document, Issue
from postbus.topics import check_id, check_stream_name

if TYPE_CHECKING:
    from postbus.log.sqlite import SqliteLog, Transaction

__all__ = ["SAMPLE", "BindReport", "Binding", "Refused", "SchemaVersion", "Schemas"]

SAMPLE: Final = 100
SAMPLE_MAX: Final = 10_000
COMPILED_MAX = 1_000
LOOK_S = 0.002  # how often to look whether another process has changed something
REFUSED_MAX = 10
UNBOUND = (".journal", "-dlq")

# A version, with whether it is still there.
NEXT = "SELECT IFNULL(max(version), 0) + 1 FROM schema_versions WHERE tenant = ? AND subject = ?"
ADD = "INSERT INTO schema_versions VALUES (?, ?, ?, ?, ?)"
ALL = """
    SELECT tenant, subject, version, document, created_at_us FROM schema_versions
    WHERE document IS NOT NULL AND (?1 IS NULL OR tenant = ?1) AND (?2 IS NULL OR subject = ?2)
    ORDER BY tenant, subject, version
"""
ONE = """
    SELECT tenant, subject, version, document, created_at_us FROM schema_versions
    WHERE tenant = ?1 AND subject = ?2 AND document IS NOT NULL AND (?3 IS NULL OR version = ?3)
    ORDER BY version DESC LIMIT 1
"""
ERASE = "UPDATE schema_versions SET document = NULL WHERE tenant = ? AND subject = ? AND version = ?"
# Bindings of streams that are there; one of a stream that was removed, or made again since, holds no more.
BINDINGS = """
    SELECT b.stream, b.tenant, b.subject, b.version, b.bound_at_us
    FROM schema_bindings b JOIN stream_registry s ON s.name = b.stream AND s.epoch = b.epoch AND NOT s.deleted
"""
BOUND_TO = BINDINGS + "WHERE b.tenant = ? AND b.subject = ? AND b.version = ? ORDER BY b.stream"
BIND = "INSERT OR REPLACE INTO schema_bindings VALUES (?, ?, ?, ?, ?, ?)"
UNBIND = "DELETE FROM schema_bindings WHERE stream = ?"


class SchemaVersion(msgspec.Struct, frozen=True):
    """One version of a subject of a tenant; never changed."""

    tenant: str
    subject: str
    version: int
    document: bytes
    created_at_us: int


class Binding(msgspec.Struct, frozen=True):
    """What the payloads of a stream must match."""

    stream: str
    tenant: str
    subject: str
    version: int
    bound_at_us: int


class Refused(msgspec.Struct, frozen=True):
    """An event that the schema would have refused."""

    id: str
    issues: tuple[Issue, ...]


class BindReport(msgspec.Struct, frozen=True):
    """What became of a binding: how many of the latest events do not match, and the first of them."""

    stream: str
    subject: str
    version: int
    bound: bool
    checked: int
    refused_count: int
    refused: tuple[Refused, ...]


class _Known:
    """What is known of one store without asking it; shared by all who share its log, so that a change holds at once."""

    def __init__(self) -> None:
        self.bound: dict[str, Binding] | None = None
        self.seen = -1
        self.changes = 0
        self.look_s = 0.0
        self.compiled: dict[tuple[str, str, int], Document] = {}


_known: WeakKeyDictionary[SqliteLog, _Known] = WeakKeyDictionary()


class Schemas:
    """The schemas of all tenants of one store."""

    def __init__(self, log: SqliteLog) -> None:
        self._log = log
        self._known = _known.setdefault(log, _Known())

    # --- publishing ---

    async def check(self, stream: str, payload: bytes) -> None:
        """Refuse a payload that does not match what its stream is bound to: ``SchemaMismatch`` with the issues."""
        known, now_s = self._known, self._log.store.clock.monotonic_s()
        if now_s >= known.look_s:
            known.look_s = now_s + LOOK_S
            self._log.store.writer.notice()
        bound = known.bound
        if bound is None or known.seen != self._log.foreign_changes:
            bound = await self._load()
        binding = bound.get(stream)
        if binding is None:
            return
        name = f"{binding.subject} version {binding.version}"
        issues = (await self._document(binding.tenant, binding.subject, binding.version)).issues(payload)
        if issues:
            first = issues[0]
            message = f"the payload does not match schema {name} of {stream}: {first.pointer or 'top'}: {first.message}"
            raise SchemaMismatch(message, issues=issues)

    async def _load(self) -> dict[str, Binding]:
        known = self._known
        seen, changes = self._log.foreign_changes, known.changes
        found = await self.bindings()
        if changes == known.changes:  # or it may be from before the change
            known.bound, known.seen = found, seen
        return found

    def _changed(self) -> None:
        self._known.changes += 1
        self._known.bound = None

    async def _document(self, tenant: str, subject: str, version: int) -> Document:
        """Return a compiled version; from memory, because versions never change."""
        compiled = self._known.compiled
        found = compiled.get((tenant, subject, version))
        if found is None:
            found = Document((await self.show(tenant, subject, version)).document)
            if len(compiled) >= COMPILED_MAX:
                del compiled[next(iter(compiled))]
            compiled[tenant, subject, version] = found
        return found

    # --- versions ---

    async def add(self, tenant: str, subject: str, schema: Any) -> SchemaVersion:
        """Keep a schema as the next version of its subject: one more than there ever was.

        ``schema``: bytes are JSON and are kept as they are; anything else is a value and is encoded. Raises
        ``InvalidSchema``.
        """
        check_stream_name(f"{tenant}.x")
        check_id(subject, "subject")
        raw = schema if isinstance(schema, bytes) else strict_json.encode(schema, max_bytes=BYTES_MAX)
        Document(raw)

        def write(tx: Transaction) -> SchemaVersion:
            version: int = tx.db.execute(NEXT, (tenant, subject)).get
            made = SchemaVersion(tenant, subject, version, raw, tx.now_us)
            tx.run(ADD, (tenant, subject, version, raw, tx.now_us))
            return made

        return await self._log.transact(write, grows=True)

    async def find(self, tenant: str | None = None, subject: str | None = None) -> list[SchemaVersion]:
        """Return all versions, of one tenant or subject, by name and number."""
        return await self._log.store.read(
            lambda db: [SchemaVersion(*row) for row in db.execute(ALL, (tenant, subject))]
        )

    async def show(self, tenant: str, subject: str, version: int | None = None) -> SchemaVersion:
        """Return one version, or the latest; raises ``NotFound``."""
        row = await self._log.store.read(lambda db: db.execute(ONE, (tenant, subject, version)).fetchone())
        if row is None:
            which = subject if version is None else f"{subject} version {version}"
            raise NotFound(f"there is no schema {which} of {tenant}")
        return SchemaVersion(*row)

    async def delete(self, tenant: str, subject: str, version: int) -> None:
        """Remove a version; its number is not used again. Raises ``NotFound``, ``Conflict`` while it is bound."""

        def write(tx: Transaction) -> None:
            if tx.db.execute(ONE, (tenant, subject, version)).fetchone() is None:
                raise NotFound(f"there is no schema {subject} version {version} of {tenant}")
            streams = [row[0] for row in tx.db.execute(BOUND_TO, (tenant, subject, version))]
            if streams:
                raise Conflict(
                    f"{subject} version {version} is bound to {', '.join(streams[:3])}", hint="unbind it first"
                )
            tx.run(ERASE, (tenant, subject, version))

        await self._log.transact(write)
        self._known.compiled.pop((tenant, subject, version), None)

    # --- bindings ---

    async def bindings(self) -> dict[str, Binding]:
        """Return what is bound, by stream."""
        return await self._log.store.read(lambda db: {row[0]: Binding(*row) for row in db.execute(BINDINGS)})

    async def bind(
        self,
        stream: str,
        subject: str,
        version: int | None = None,
        *,
        dry_run: bool = False,
        force: bool = False,
        sample: int = SAMPLE,
    ) -> BindReport:
        """Bind a stream to a version (default: the latest) of a subject of its tenant, in place of what held before.

        The latest ``sample`` events of each partition are checked first. When some do not match, nothing is bound and
        ``SchemaConflict`` says which, unless ``force``. ``dry_run`` only reports. Raises ``NotFound``, ``Invalid``.
        """
        check_stream_name(stream)
        if stream.endswith(UNBOUND):
            raise Invalid(
                f"{stream} takes events of many kinds", hint="bind a topic that is registered for its own events"
            )
        if not 0 <= sample <= SAMPLE_MAX:
            raise Invalid(f"the sample is 0 to {SAMPLE_MAX} events")
        tenant = stream.rpartition(".")[0]
        found = await self.show(tenant, subject, version)
        document = await self._document(tenant, subject, found.version)
        checked, refused = await self._try(stream, document, sample)
        report = BindReport(
            stream, subject, found.version, not dry_run, checked, len(refused), tuple(refused[:REFUSED_MAX])
        )
        if dry_run:
            return report
        if refused and not force:
            which = f"{subject} version {found.version}"
            message = f"{len(refused)} of the latest {checked} events of {stream} do not match {which}"
            issues = [{"id": each.id, **msgspec.structs.asdict(each.issues[0])} for each in refused[:ISSUES_MAX]]
            raise SchemaConflict(message, issues=issues, hint="see them with dry_run, or bind with force")

        def write(tx: Transaction) -> None:
            if tx.db.execute(ONE, (tenant, subject, found.version)).fetchone() is None:
                raise NotFound(f"there is no schema {subject} version {found.version} of {tenant}")
            epoch = tx.stream(stream).stream.epoch
            tx.run(BIND, (stream, epoch, tenant, subject, found.version, tx.now_us))

        await self._log.transact(write, grows=True)
        self._changed()
        return report

    async def unbind(self, stream: str) -> None:
        """Let a stream take any payload again; raises ``NotFound`` when it is not bound."""

        def write(tx: Transaction) -> None:
            tx.stream(stream)
            if not tx.run(UNBIND, (stream,)):
                raise NotFound(f"{stream} is bound to no schema")

        await self._log.transact(write)
        self._changed()

    async def _try(self, stream: str, document: Document, sample: int) -> tuple[int, list[Refused]]:
        """Check the latest events of each partition, in the order of their offsets."""
        stats = await self._log.get_stream_stats(stream)
        checked, refused = 0, list[Refused]()
        for part in stats.partitions:
            place = max(part.first_offset, part.high_water_mark - sample)
            while place < part.high_water_mark:
                events = await self._log.fetch(stream, part.partition, place, min(100, part.high_water_mark - place))
                if not events:
                    break
                place = events[-1].offset + 1
                checked += len(events)
                found = ((event.id, document.issues(event.payload_json)) for event in events)
                refused += [Refused(address, tuple(issues)) for address, issues in found if issues]
        return checked, refused
