"""What a tenant may use: events per second, topics, subscriptions, SSE connections, retained bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from postbus.model import Invalid, QuotaExceeded
from postbus.topics import check_stream_name

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.log import SqliteLog

__all__ = ["EVERYBODY", "Quota", "Quotas", "list_quotas", "set_quota"]

EVERYBODY = "*"
FRESH_S = 1.0
LATER_S = 60.0

LIST = "SELECT tenant, quota FROM tenant_quotas ORDER BY tenant"
SAVE = "INSERT OR REPLACE INTO tenant_quotas VALUES (?, ?)"
FORGET = "DELETE FROM tenant_quotas WHERE tenant = ?"


class Quota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The bounds of one tenant; None means no bound."""

    publish_per_s: float | None = None
    topics: int | None = 10_000
    subscriptions: int | None = 10_000
    sse_connections: int | None = 1_000
    retained_bytes: int | None = None


class _Use:
    """What a tenant uses now: a bucket of publishes that fills with time, open connections, bytes."""

    def __init__(self, now_s: float) -> None:
        self.filled_at_s = now_s
        self.tokens: float | None = None
        self.connections = 0
        self.counted_at_s = float("-inf")
        self.counted_bytes = 0


class Quotas:
    """Counts what tenants use and refuses what is too much with ``QuotaExceeded`` (429) or ``TenantFull`` (507)."""

    def __init__(self, log: SqliteLog, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._known: dict[str, Quota] = {}
        self._read_at_s = float("-inf")
        self._uses: dict[str, _Use] = {}

    async def of(self, tenant: str) -> Quota:
        """Return a tenant's quota, at most a second old."""
        now = self._clock.monotonic_s()
        if now - self._read_at_s >= FRESH_S:
            self._read_at_s = now
            self._known = await list_quotas(self._log)
        return self._known.get(tenant) or self._known.get(EVERYBODY) or Quota()

    async def publish(self, tenant: str, events: int, size: int) -> None:
        """Count events about to be published."""
        if not self._known and self._clock.monotonic_s() - self._read_at_s < FRESH_S:
            return  # nobody has a quota of this kind
        quota = await self.of(tenant)
        if quota.publish_per_s is None and quota.retained_bytes is None:
            return
        use = self._use(tenant)
        if quota.retained_bytes is not None:
            await self._bytes(tenant, use, quota.retained_bytes, size)
        if quota.publish_per_s is not None:
            self._rate(tenant, use, quota.publish_per_s, events)
        use.counted_bytes += size

    def _rate(self, tenant: str, use: _Use, rate: float, events: int) -> None:
        now = self._clock.monotonic_s()
        burst = max(rate, 1.0)
        full = burst if use.tokens is None else use.tokens + (now - use.filled_at_s) * rate
        use.tokens, use.filled_at_s = min(full, burst), now
        # A batch larger than the bucket goes when the bucket is full, and leaves a debt.
        if use.tokens < min(events, burst):
            wait = (min(events, burst) - use.tokens) / rate
            message = f"{tenant} publishes more than {rate:g} events per second"
            raise QuotaExceeded(message, retry_after_s=wait)
        use.tokens -= events

    async def _bytes(self, tenant: str, use: _Use, most: int, size: int) -> None:
        now = self._clock.monotonic_s()
        if now - use.counted_at_s >= FRESH_S:
            use.counted_at_s = now
            names = [stream.name for stream in await self._log.streams() if stream.name.startswith(f"{tenant}.")]
            use.counted_bytes = sum([(await self._log.get_stream_stats(name)).bytes for name in names])
        if use.counted_bytes + size > most:
            message = f"{tenant} retains {use.counted_bytes} bytes of the {most} it may retain"
            raise TenantFull(message, retry_after_s=LATER_S)

    async def topics(self, tenant: str, have: int) -> None:
        """Refuse one more topic beyond the quota."""
        self._count(tenant, "topics", have, (await self.of(tenant)).topics)

    async def subscriptions(self, tenant: str, have: int) -> None:
        """Refuse one more subscription beyond the quota."""
        self._count(tenant, "subscriptions", have, (await self.of(tenant)).subscriptions)

    async def connect(self, tenant: str) -> None:
        """Count an SSE connection that opens; ``disconnect`` must follow when this returned."""
        most = (await self.of(tenant)).sse_connections
        use = self._use(tenant)
        self._count(tenant, "SSE connections", use.connections, most)
        use.connections += 1

    def disconnect(self, tenant: str) -> None:
        """Count an SSE connection that closed."""
        self._use(tenant).connections -= 1

    def connections(self) -> dict[str, int]:
        """Return the open SSE connections of each tenant that ever had one."""
        return {tenant: use.connections for tenant, use in self._uses.items()}

    @staticmethod
    def _count(tenant: str, what: str, have: int, most: int | None) -> None:
        if most is not None and have >= most:
            raise QuotaExceeded(f"{tenant} has {have} {what} of the {most} it may have", retry_after_s=LATER_S)

    def _use(self, tenant: str) -> _Use:
        use = self._uses.get(tenant)
        if use is None:
            use = self._uses[tenant] = _Use(self._clock.monotonic_s())
        return use


class TenantFull(QuotaExceeded):
    """A tenant retains as many bytes as it may."""

    code = "tenant_full"
    status = 507


async def list_quotas(log: SqliteLog) -> dict[str, Quota]:
    """Return the quotas that were set, by tenant."""
    rows = await log.store.read(lambda db: list(db.execute(LIST)))
    return {tenant: msgspec.json.decode(quota, type=Quota) for tenant, quota in rows}


async def set_quota(log: SqliteLog, tenant: str, quota: Quota | None) -> None:
    """Set a tenant's quota, or everybody's with ``*``; None takes it away. In force within a second."""
    if tenant != EVERYBODY:
        check_stream_name(f"{tenant}.journal")
    for name in quota.__struct_fields__ if quota is not None else ():
        value = getattr(quota, name)
        if value is not None and not (value > 0 if name == "publish_per_s" else value >= 0):
            raise Invalid(f"{name} must be a positive number")

    def save(db: Any) -> None:
        if quota is None:
            db.execute(FORGET, (tenant,))
        else:
            db.execute(SAVE, (tenant, msgspec.json.encode(quota).decode()))

    await log.store.write(save)
