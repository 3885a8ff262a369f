"""Approvals: a human is asked before a tool runs, and the answer holds for this call, once, for a while.

The question is a row in the store, so that it outlives the process: whoever asks again after a restart, with the same
call, waits for the same answer. Only a channel that asked can hand in an answer, in the name of a human.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from postbus import strict_json
from postbus.bus.context import CAUSATION, current
from postbus.envelope import Limits, draft
from postbus.kernel.contract import ApprovalDecision, ApprovalPrompt, ApprovingChannel
from postbus.kernel.identity import stable_id
from postbus.kernel.patience import paused
from postbus.kernel.topics import SystemTopics, ToolApprovalRequest, ToolApprovalResponse
from postbus.model import Conflict, Forbidden, Invalid, NotFound, PostbusError, Reject, RetryPolicy, Trust, event_id

if TYPE_CHECKING:
    from postbus.kernel.contract import ChannelProvider, ToolCall
    from postbus.kernel.kernel import Kernel
    from postbus.log.sqlite import Transaction
    from postbus.model import Event

__all__ = ["Approvals", "digest_of"]

logger = logging.getLogger("postbus.kernel")

KERNEL = "kernel"
LOOK_S = 5.0
PATIENT = RetryPolicy(max_attempts=20)  # a channel may be away for a while
PRINCIPAL_CHARS_MAX = 200
REASON_CHARS_MAX = 2_000
KEPT_S = 30 * 86_400
PRUNE_S = 3600.0
LIMITS = Limits(correlation_id_bytes=512)

COLUMNS = """
    request_id, digest, tool_name, arguments, server_alias, channel_id, user_id, asked_by, correlation_id, state,
    principal, reason, expires_at_us
"""
FIND = f"SELECT {COLUMNS} FROM approvals WHERE tenant = ? AND request_id = ?"  # noqa: S608 - constants only
WAITING = f"SELECT {COLUMNS} FROM approvals WHERE tenant = ? AND state = 'pending' ORDER BY created_at_us"  # noqa: S608 - constants only
DUE = f"SELECT {COLUMNS} FROM approvals WHERE tenant = ? AND state = 'pending' AND expires_at_us <= ?"  # noqa: S608 - constants only
OPEN = """
    INSERT INTO approvals (tenant, request_id, digest, tool_name, arguments, server_alias, channel_id, user_id,
                           asked_by, correlation_id, state, created_at_us, expires_at_us)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'pending', ?, ?)
"""
PLACE = "UPDATE approvals SET channel_id = ? WHERE tenant = ? AND request_id = ? AND state = 'pending'"
SETTLE = """
    UPDATE approvals SET state = ?, principal = ?, reason = ?, answered_at_us = ?
    WHERE tenant = ? AND request_id = ? AND state = 'pending'
"""
SPEND = """
    UPDATE approvals SET state = 'spent', spent_at_us = ?
    WHERE tenant = ? AND request_id = ? AND state = 'approved' AND expires_at_us > ?
"""
# What ended long ago.
PRUNE = "DELETE FROM approvals WHERE tenant = ? AND state <> 'pending' AND expires_at_us < ?"


class _Row(msgspec.Struct, frozen=True):
    """A question and what became of it."""

    request_id: str
    digest: str
    tool_name: str
    arguments: bytes
    server_alias: str
    channel_id: str | None
    user_id: str | None
    asked_by: str
    correlation_id: str | None
    state: str
    principal: str | None
    reason: str | None
    expires_at_us: int


def digest_of(tool_name: str, server_alias: str, arguments: dict[str, Any]) -> str:
    """Return what names a tool and its arguments exactly, whatever the order of the keys."""
    canonical = msgspec.json.encode([server_alias, tool_name, arguments], order="deterministic")
    return hashlib.sha256(canonical).hexdigest()


class Approvals:
    """See ``ApprovalGate`` and ``KernelPart``."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._news: dict[str, asyncio.Event] = {}
        self._shown_on: dict[str, ChannelProvider] = {}
        self._watching: asyncio.Task[None] | None = None
        self._stopped = False

    # --- life ---

    def wire(self) -> None:
        """See ``KernelPart.wire``."""
        handle = self._kernel.handle
        handle(SystemTopics.TOOL_APPROVAL_REQUEST, self._on_request, "approval_requests", retry=PATIENT)
        handle(SystemTopics.TOOL_APPROVAL_RESPONSE, self._on_response, "approval_responses")

    async def start(self) -> None:
        """See ``KernelPart.start``; what still waits is shown again."""
        await self._prune()
        await self._show_again()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """See ``KernelPart.stop``; whoever waits is interrupted, and asks again after the next start."""
        self._stopped = True
        for news in self._news.values():
            news.set()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    # --- asking ---

    async def ask(self, call: ToolCall) -> ApprovalDecision:
        """See ``ApprovalGate.ask``."""
        digest = digest_of(call.name, call.server_alias, call.arguments)
        request_id = stable_id("approval", call.id, digest)
        asked = ToolApprovalRequest(
            request_id=request_id,
            tool_name=call.name,
            arguments=call.arguments,
            server_alias=call.server_alias,
            channel_id=call.channel_id,
        )
        row = await self._open(asked, KERNEL, user_id=call.user_id, correlation_id=call.correlation_id)
        if row.state == "pending":
            await self._kernel.bus.publish(
                SystemTopics.TOOL_APPROVAL_REQUEST,
                KERNEL,
                msgspec.to_builtins(asked),
                row.correlation_id,
                native_id=f"approval:{request_id}",
                trust=call.trust,
            )
            with paused():
                row = await self._wait(request_id)
        # A used permission was one: whether it is still good for anything is for ``spend`` to say.
        status = "approved" if row.state == "spent" else row.state
        if row.state == "approved" and row.expires_at_us <= self._kernel.clock.now_us():
            status = "expired"
        return ApprovalDecision(request_id=request_id, status=status, principal=row.principal, reason=row.reason)

    async def spend(self, request_id: str) -> bool:
        """See ``ApprovalGate.spend``."""
        log, tenant = await self._kernel.bus.open(), self._kernel.bus.tenant
        now_us = self._kernel.clock.now_us()
        return bool(await log.transact(lambda tx: tx.run(SPEND, (now_us, tenant, request_id, now_us))))

    async def _wait(self, request_id: str) -> _Row:
        news = self._news.setdefault(request_id, asyncio.Event())
        try:
            while True:
                news.clear()
                row = await self._find(request_id)
                if row is None:
                    raise NotFound(f"the question {request_id} is gone")
                if row.state != "pending":
                    return row
                if self._stopped:  # not an Exception: no agent takes this for an answer
                    raise asyncio.CancelledError("the kernel stops")
                await self._kernel.clock.wait(news, LOOK_S)
        finally:
            self._news.pop(request_id, None)

    async def _open(
        self, asked: ToolApprovalRequest, asked_by: str, *, user_id: str | None, correlation_id: str | None
    ) -> _Row:
        """Return the question of that id; make it if it is new. Raises ``Conflict`` when it is about something else."""
        log, tenant = await self._kernel.bus.open(), self._kernel.bus.tenant
        digest = digest_of(asked.tool_name, asked.server_alias, asked.arguments)
        now_us = self._kernel.clock.now_us()
        expires_us = now_us + round(self._kernel.settings.kernel.approval_ttl_s * 1e6)
        values = (
            tenant,
            asked.request_id,
            digest,
            asked.tool_name,
            strict_json.encode(asked.arguments),
            asked.server_alias,
            asked.channel_id,
            user_id,
            asked_by,
            correlation_id,
            now_us,
            expires_us,
        )

        def get_or_make(tx: Transaction) -> _Row:
            where = (tenant, asked.request_id)
            if tx.db.execute(FIND, where).fetchone() is None:
                tx.db.execute(OPEN, values)
            return next(_Row(*row) for row in tx.db.execute(FIND, where))

        row = await log.transact(get_or_make, grows=True)
        if row.digest != digest:
            raise Conflict(f"the question {asked.request_id} is about another call")
        return row

    # --- showing ---

    async def _on_request(self, event: Event, asked: ToolApprovalRequest) -> None:
        """Show a question on its channel. An extension may ask one of its own; the answer is then an event for it."""
        row = await self._find(asked.request_id)
        if row is None or event.source != row.asked_by:
            if event.source == KERNEL or row is not None:
                raise Reject(f"the question {asked.request_id} was not asked by {event.source}")
            try:
                correlation = event.correlation_id or event.id
                row = await self._open(asked, event.source, user_id=None, correlation_id=correlation)
            except Conflict as error:
                raise Reject(error.message) from None
        if row.state == "pending" and row.expires_at_us > self._kernel.clock.now_us():
            await self._show(row)

    async def _show(self, row: _Row) -> None:
        channel = self._choose(row.channel_id)
        if not isinstance(channel, ApprovingChannel):
            reason = f"channel {channel.channel_id} cannot ask for approval"
            await self._settle(row, "denied", None, reason)
            return
        log, name = await self._kernel.bus.open(), channel.channel_id
        where = (name, self._kernel.bus.tenant, row.request_id)
        if row.channel_id != name and not await log.transact(lambda tx: tx.run(PLACE, where)):
            return  # settled meanwhile
        prompt = ApprovalPrompt(
            request_id=row.request_id,
            tool_name=row.tool_name,
            arguments=strict_json.parse(row.arguments),
            server_alias=row.server_alias,
            digest=row.digest,
            expires_at_us=row.expires_at_us,
            channel_id=name,
        )
        await channel.show_approval(prompt)

    async def _show_again(self) -> None:
        """Show what waits on channels that are new since the last look: after a restart, or the reload of one."""
        channels = self._kernel.router.channels
        fresh = {name for name, channel in channels.items() if self._shown_on.get(name) is not channel}
        self._shown_on = channels
        for row in await self._rows(WAITING) if fresh else ():
            new = row.channel_id is None or row.channel_id in fresh
            if new and row.expires_at_us > self._kernel.clock.now_us():
                try:
                    await self._show(row)
                except Exception as error:  # noqa: BLE001 - a channel that cannot show it now is tried again later
                    logger.warning("the question %s could not be shown again: %s", row.request_id, error)
                    self._shown_on.pop(row.channel_id or "", None)

    def _choose(self, channel_id: str | None) -> ChannelProvider:
        """Return the channel that was named; else the one in use if it can ask, else any that can."""
        chosen = self._kernel.router.choose(channel_id)
        if channel_id is None and not isinstance(chosen, ApprovingChannel):
            able = (one for one in self._kernel.router.channels.values() if isinstance(one, ApprovingChannel))
            return next(able, chosen)
        return chosen

    # --- answering ---

    async def answer(
        self, request_id: str, principal: str, channel_id: str, *, approved: bool, reason: str | None = None
    ) -> None:
        """See ``ApprovalGate.answer``."""
        self._check_principal(principal)
        if reason is not None and len(reason) > REASON_CHARS_MAX:
            raise Invalid(f"a reason has at most {REASON_CHARS_MAX} characters, not {len(reason)}")
        row = await self._find(request_id)
        if row is None:
            raise NotFound(f"nobody asked {request_id}")
        if row.channel_id != channel_id:
            raise Forbidden(f"{request_id} was not asked on channel {channel_id}")
        if row.user_id is not None and row.user_id != principal:
            raise Forbidden(f"{request_id} is for {row.user_id} to answer, not for {principal}")
        if row.state == "pending" and row.expires_at_us <= self._kernel.clock.now_us():
            await self._expire(row)
            row = await self._find(request_id) or row
        state = "approved" if approved else "denied"
        if row.state != "pending" or not await self._settle(row, state, principal, reason):
            row = await self._find(request_id) or row
            said = "it is too late: nobody answered in time" if row.state == "expired" else f"it is {row.state} already"
            raise Conflict(f"{request_id} cannot be answered any more, {said}")

    def _check_principal(self, principal: object) -> None:
        if not isinstance(principal, str) or not principal.strip() or len(principal) > PRINCIPAL_CHARS_MAX:
            raise Invalid(f"a principal is the name of a human, of 1 to {PRINCIPAL_CHARS_MAX} characters")
        if principal == KERNEL or principal in self._kernel.loader.entries:
            raise Forbidden(f"{principal} is no human: only a human can allow a call")

    async def _settle(self, row: _Row, state: str, principal: str | None, reason: str | None) -> bool:
        """End a question and publish its end, in one transaction; False when it had ended before."""
        log, bus = await self._kernel.bus.open(), self._kernel.bus
        said = ToolApprovalResponse(request_id=row.request_id, approved=state == "approved", reason=reason)
        metadata = {"digest": row.digest, "state": state, **({} if principal is None else {"principal": principal})}

        def write(tx: Transaction) -> bool:
            if not tx.run(SETTLE, (state, principal, reason, tx.now_us, bus.tenant, row.request_id)):
                return False
            asked = tx.identity(bus.journal, f"approval:{row.request_id}", "")
            cause = {} if asked is None else {CAUSATION: event_id(bus.journal, asked.partition, asked.offset)}
            made = draft(
                SystemTopics.TOOL_APPROVAL_RESPONSE,
                KERNEL,
                msgspec.to_builtins(said),
                correlation_id=row.correlation_id,
                native_id=f"approval:{row.request_id}:answer",
                metadata=metadata,
                system_headers=cause,
                limits=LIMITS,
            )
            tx.append(bus.journal, [made])
            return True

        settled = await log.transact(write, grows=True)
        self._tell(row.request_id)
        return settled

    async def _expire(self, row: _Row) -> None:
        await self._settle(row, "expired", None, "nobody answered in time")

    async def _on_response(self, event: Event, said: ToolApprovalResponse) -> None:
        """Wake whoever waits. What counts is the row: an event that somebody else published answers nothing."""
        row = await self._find(said.request_id)
        if row is None or event.source != KERNEL or event.trust != Trust.TRUSTED.value:
            raise Reject("an approval is answered by a human on a channel, not by an event")
        self._tell(said.request_id)

    def _tell(self, request_id: str) -> None:
        news = self._news.get(request_id)
        if news is not None:
            news.set()

    # --- time ---

    async def _watch(self) -> None:
        """End questions that nobody answered in time, and now and then forget old ones."""
        current.set(None)
        clock = self._kernel.clock
        pruned_s = clock.monotonic_s()
        while True:
            with contextlib.suppress(PostbusError):  # a full disk: the next look may find room
                for row in await self._rows(DUE, clock.now_us()):
                    await self._expire(row)
                await self._show_again()
                if clock.monotonic_s() - pruned_s >= PRUNE_S:
                    pruned_s = clock.monotonic_s()
                    await self._prune()
            await clock.sleep(LOOK_S)

    async def _prune(self) -> None:
        log, tenant = await self._kernel.bus.open(), self._kernel.bus.tenant
        old_us = self._kernel.clock.now_us() - KEPT_S * 1_000_000
        await log.transact(lambda tx: tx.run(PRUNE, (tenant, old_us)))

    # --- rows ---

    async def _find(self, request_id: str) -> _Row | None:
        found = await self._rows(FIND, request_id)
        return found[0] if found else None

    async def _rows(self, statement: str, *values: Any) -> list[_Row]:
        log, tenant = await self._kernel.bus.open(), self._kernel.bus.tenant
        return await log.store.read(lambda db: [_Row(*row) for row in db.execute(statement, (tenant, *values))])
