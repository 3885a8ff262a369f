"""API keys: who calls, for which tenant, and what that caller may do.

A key reads ``pb_<id>_<secret>``; the secret is 128 random bits and only its SHA-256 is kept. Without any key the server
has one trusted local operator who may use every tenant; from the first key on, a key is needed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from postbus.envelope import check_source
from postbus.model import Forbidden, Invalid, NotFound, Unauthenticated
from postbus.store.database import connect
from postbus.topics import check_pattern, check_stream_name, matches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.clock import Clock
    from postbus.log import SqliteLog

__all__ = ["Caller", "Grant", "Key", "KeyRing", "Scope", "create_key", "list_keys", "revoke_key", "rotate_key"]

KEY = re.compile(r"pb_([0-9a-f]{12})_([0-9a-f]{32})", re.ASCII)
EVERYTHING = ">"
NAME_CHARS_MAX = 120
CACHED_MAX = 10_000

COLUMNS = "key_id, tenant, name, grants, source, trusted, created_at_us, expires_at_us, revoked_at_us"
FIND = f"SELECT secret_hash, {COLUMNS} FROM api_keys WHERE key_id = ?"  # noqa: S608 - constants only
LIST = f"SELECT {COLUMNS} FROM api_keys ORDER BY created_at_us, key_id"  # noqa: S608 - constants only
ANY = "SELECT EXISTS (SELECT 1 FROM api_keys)"
SAVE = "INSERT INTO api_keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)"
REVOKE = "UPDATE api_keys SET revoked_at_us = ? WHERE key_id = ? AND revoked_at_us IS NULL"
EXPIRE = "UPDATE api_keys SET expires_at_us = min(IFNULL(expires_at_us, ?1), ?1) WHERE key_id = ?2"


class Scope(StrEnum):
    """What a key may do. ``admin`` may do everything that its pattern covers."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    ACK = "ack"
    ADMIN = "admin"


class Grant(msgspec.Struct, frozen=True):
    """A scope over the topics of a pattern, which is matched with full names ``namespace.tenant.name``."""

    scope: Scope
    pattern: str = EVERYTHING


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is shown: everything but the secret."""

    id: str
    tenant: str | None
    name: str
    grants: tuple[Grant, ...]
    source: str | None
    trusted: bool
    created_at_us: int
    expires_at_us: int | None
    revoked_at_us: int | None


class Caller(NamedTuple):
    """Who calls. Without a key: the local operator, for any tenant and with every scope."""

    key_id: str | None = None
    tenant: str | None = None
    grants: tuple[Grant, ...] = (Grant(Scope.ADMIN),)
    source: str | None = None
    trusted: bool = True

    def may(self, scope: Scope, topic: str | None = None) -> bool:
        """Say whether a grant covers the scope for the topic, or for any topic at all when none is given."""
        return any(
            grant.scope in (scope, Scope.ADMIN)
            and (topic is None or grant.pattern == EVERYTHING or matches(grant.pattern, topic))
            for grant in self.grants
        )

    def check(self, scope: Scope, topic: str | None = None) -> None:
        """Refuse what ``may`` denies."""
        if not self.may(scope, topic):
            where = "" if topic is None else f" for {topic}"
            raise Forbidden(
                f"this key does not have the scope {scope}{where}", hint="ask the operator for one that has"
            )


OPERATOR = Caller()


class KeyRing:
    """Answers who calls. Changes of other processes count from the next request on."""

    def __init__(self, log: SqliteLog, clock: Clock) -> None:
        self._clock = clock
        self._db = connect(log.store.folder, write=False)
        self._version = -1
        self._found: dict[str, tuple[bytes, Key] | None] = {}
        self._needed = False
        self._looked = False

    @property
    def needed(self) -> bool:
        """Whether any key was ever made, so that callers need one."""
        self._look()
        return self._needed

    def caller(self, authorization: bytes | None) -> Caller:
        """Return who sends this ``Authorization`` header; raises ``Unauthenticated``."""
        self._look()
        if authorization is None:
            if self._needed:
                raise Unauthenticated("a key is needed", hint="send Authorization: Bearer pb_...")
            return OPERATOR
        kind, _, text = authorization.decode("latin-1").partition(" ")
        found = KEY.fullmatch(text.strip()) if kind.lower() == "bearer" else None
        if found is None:
            raise Unauthenticated("the Authorization header holds no key", hint="send Authorization: Bearer pb_...")
        known = self._find(found[1])
        hashed = hashlib.sha256(found[2].encode()).digest()
        if known is None or not hmac.compare_digest(known[0], hashed):
            raise Unauthenticated("this key is not known here")
        key = known[1]
        if key.revoked_at_us is not None:
            raise Unauthenticated("this key was revoked")
        if key.expires_at_us is not None and self._clock.now_us() >= key.expires_at_us:
            raise Unauthenticated("this key has expired")
        return Caller(key.id, key.tenant, key.grants, key.source, key.trusted)

    def close(self) -> None:
        """Let go of the connection."""
        self._db.close()

    def _look(self) -> None:
        """Read again what changed. Once per turn of the loop is enough: what came in during it was read before it."""
        if self._looked:
            return
        self._looked = True
        asyncio.get_running_loop().call_soon(self._turn)
        version = int(self._db.execute("PRAGMA data_version").get)
        if version != self._version:
            self._version = version
            self._found.clear()
            self._needed = bool(self._db.execute(ANY).get)

    def _turn(self) -> None:
        self._looked = False

    def _find(self, key_id: str) -> tuple[bytes, Key] | None:
        if key_id not in self._found:
            row = self._db.execute(FIND, (key_id,)).get
            if len(self._found) >= CACHED_MAX:
                self._found.clear()
            self._found[key_id] = None if row is None else (row[0], _key(row[1:]))
        return self._found[key_id]


def _key(row: Sequence[Any]) -> Key:
    key_id, tenant, name, grants, source, trusted, created, expires, revoked = row
    return Key(
        id=key_id,
        tenant=tenant,
        name=name,
        grants=msgspec.json.decode(grants, type=tuple[Grant, ...]),
        source=source,
        trusted=bool(trusted),
        created_at_us=created,
        expires_at_us=expires,
        revoked_at_us=revoked,
    )


# --- what an operator does with them ----------------------------------------------------------------------------------


async def create_key(
    log: SqliteLog,
    clock: Clock,
    *,
    tenant: str | None,
    grants: Sequence[Grant],
    name: str = "",
    source: str | None = None,
    trusted: bool = False,
    expires_at_us: int | None = None,
) -> tuple[Key, str]:
    """Make a key and return it with its text, which can never be shown again. Raises ``Invalid``."""
    if tenant is not None:
        check_stream_name(f"{tenant}.journal")
    if not grants:
        raise Invalid("a key needs at least one scope", hint="publish, subscribe, ack or admin")
    for grant in grants:
        check_pattern(grant.pattern)
    if source is not None:
        check_source(source)
    if len(name) > NAME_CHARS_MAX or not name.isprintable():
        raise Invalid(f"a key's name is one line of at most {NAME_CHARS_MAX} characters")
    now = clock.now_us()
    if expires_at_us is not None and expires_at_us <= now:
        raise Invalid("the key would have expired already")
    key = Key(
        id=clock.new_id()[:12],
        tenant=tenant,
        name=name,
        grants=tuple(grants),
        source=source,
        trusted=trusted,
        created_at_us=now,
        expires_at_us=expires_at_us,
        revoked_at_us=None,
    )
    secret = clock.new_id()
    await log.store.write(lambda db: db.execute(SAVE, _row(key, secret)))
    return key, f"pb_{key.id}_{secret}"


async def list_keys(log: SqliteLog) -> list[Key]:
    """Return every key, also revoked and expired ones, by age."""
    return await log.store.read(lambda db: [_key(row) for row in db.execute(LIST)])


async def revoke_key(log: SqliteLog, clock: Clock, key_id: str) -> bool:
    """End a key from the next request on; False when it was revoked before. Raises ``NotFound``."""
    now = clock.now_us()

    def revoke(db: Any) -> bool:
        _known(db, key_id)
        db.execute(REVOKE, (now, key_id))
        return bool(db.changes())

    return await log.store.write(revoke, grows=False)


async def rotate_key(log: SqliteLog, clock: Clock, key_id: str, grace_s: float = 0.0) -> tuple[Key, str]:
    """Make a key that may do the same, and end the old one after the grace; one transaction.

    Raises ``NotFound``, and ``Invalid`` for a key that was revoked.
    """
    secret, new_id, now = clock.new_id(), clock.new_id()[:12], clock.now_us()

    def rotate(db: Any) -> Key:
        old = _known(db, key_id)
        if old.revoked_at_us is not None:
            raise Invalid(f"key {key_id} was revoked", hint="make a new one with `postbus keys create`")
        new = msgspec.structs.replace(old, id=new_id, created_at_us=now)
        db.execute(SAVE, _row(new, secret))
        if grace_s > 0:
            db.execute(EXPIRE, (now + int(grace_s * 1e6), key_id))
        else:
            db.execute(REVOKE, (now, key_id))
        return new

    key = await log.store.write(rotate)
    return key, f"pb_{key.id}_{secret}"


def _known(db: Any, key_id: str) -> Key:
    row = db.execute(FIND, (key_id,)).get
    if row is None:
        raise NotFound(f"there is no key {key_id}", hint="see `postbus keys list`")
    return _key(row[1:])


def _row(key: Key, secret: str) -> tuple[Any, ...]:
    grants = msgspec.json.encode(key.grants).decode()
    hashed = hashlib.sha256(secret.encode()).digest()
    facts = (key.tenant, key.name, grants, key.source, int(key.trusted), key.created_at_us, key.expires_at_us)
    return (key.id, hashed, *facts)
