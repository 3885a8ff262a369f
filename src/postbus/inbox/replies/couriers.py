"""Carrying one reply to the far side: each kind of handle has its way. A courier may be asked again after a crash."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import msgspec
from standardwebhooks import Webhook

from postbus.inbox.replies.actions import CommandHandle, GithubHandle, WebhookHandle
from postbus.model import Invalid, Unreachable, instant
from postbus.outside import Answer, rate_limit_s, refused, request, run_program

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.clock import Clock
    from postbus.inbox.replies.actions import Handle
    from postbus.inbox.replies.rules import ReplyRules

    Settings = Callable[[str, str], Awaitable[dict[str, Any]]]
    """Gives the settings of a source of the tenant by id and kind; raises ``Invalid``."""

__all__ = ["Couriers", "Parcel"]

GITHUB = "https://api.github.com"
TIMEOUT_S = 20.0
RESULT_CHARS_MAX = 2_000
FIRST_OK, AFTER_OK = 200, 300
NOT_FOUND = 404


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be carried. ``attempt`` above 1: an earlier one may have arrived without our knowing."""

    delivery: str
    handle: Handle
    action: str
    arguments: dict[str, Any]
    attempt: int
    created_at_us: int


class Couriers:
    """Carries parcels of one tenant. Raises ``Unreachable``; ``permanent`` says that trying again is useless."""

    def __init__(self, clock: Clock, rules: ReplyRules, settings: Settings) -> None:
        self._clock = clock
        self._rules = rules
        self._settings = settings

    async def carry(self, parcel: Parcel) -> dict[str, Any]:
        """Carry one parcel and return what the far side said."""
        try:
            match parcel.handle:
                case GithubHandle():
                    return await self._github(parcel, parcel.handle)
                case WebhookHandle():
                    return await self._webhook(parcel, parcel.handle)
                case CommandHandle():
                    return await self._command(parcel, parcel.handle)
                case _:  # a reply on the bus is published when it is accepted
                    return {}
        except Invalid as error:
            raise Unreachable(error.message, hint=error.hint, permanent=True) from error

    # --- webhook ---

    async def _webhook(self, parcel: Parcel, handle: WebhookHandle) -> dict[str, Any]:
        private, secret_env = self._rules.allow_private, self._rules.secret_env
        if handle.source is not None:
            settings = await self._settings(handle.source, "webhook")
            if settings.get("reply_url") == handle.url:
                private = private or bool(settings.get("allow_private"))
                secret_env = settings["secret_env"]
        body = msgspec.json.encode(parcel.arguments["payload"])
        headers = {
            "content-type": "application/json",
            "idempotency-key": parcel.delivery,
            "webhook-id": parcel.delivery,
        }
        secret = os.environ.get(secret_env, "")
        if secret:
            at = instant(self._clock.now_us() // 1_000_000 * 1_000_000)
            key = secret if secret.startswith("whsec_") else secret.encode()
            headers["webhook-timestamp"] = str(int(at.timestamp()))
            headers["webhook-signature"] = Webhook(key).sign(parcel.delivery, at, body.decode())
        answer = await self._call("POST", handle.url, headers, body, "the webhook", allow_private=private)
        return {"status": answer.status, "body": answer.body[:RESULT_CHARS_MAX].decode(errors="replace")}

    async def _call(
        self, method: str, url: str, headers: dict[str, str], body: bytes | None, who: str, *, allow_private: bool
    ) -> Answer:
        answer = await request(
            method, url, headers=headers, body=body, allow_private=allow_private, timeout_s=TIMEOUT_S
        )
        wait_s = rate_limit_s(answer, self._clock.now_us())
        if wait_s is not None:
            raise Unreachable(f"{who} wants to be left alone for {wait_s:.0f} s", retry_after_s=wait_s)
        if not FIRST_OK <= answer.status < AFTER_OK:
            raise refused(answer, who, self._clock.now_us())
        return answer

    # --- command ---

    async def _command(self, parcel: Parcel, handle: CommandHandle) -> dict[str, Any]:
        if handle.argv[0] not in self._rules.commands:
            raise Invalid(f"the program {handle.argv[0][:100]!r} is not allowed")
        ended = await run_program(
            handle.argv,
            given=msgspec.json.encode(parcel.arguments["payload"]) + b"\n",
            timeout_s=TIMEOUT_S,
            environment={"POSTBUS_DELIVERY": parcel.delivery},
        )
        if ended.code:
            raise Unreachable(f"{handle.argv[0]} ended with exit code {ended.code}: {ended.err[-500:]}")
        return {"exit_code": 0, "output": ended.out[:RESULT_CHARS_MAX].decode(errors="replace")}

    # --- GitHub ---

    async def _github(self, parcel: Parcel, handle: GithubHandle) -> dict[str, Any]:
        settings = await self._settings(handle.source, "github")
        if settings["repo"].lower() != handle.repo.lower():
            raise Invalid(f"the source {handle.source} does not read {handle.repo}")
        place = _Repository(self._call, settings, handle)
        arguments = parcel.arguments
        match parcel.action:
            case "comment":
                return await place.say(f"issues/{handle.number}/comments", f"issues/{handle.number}/comments", parcel)
            case "review_reply":
                thread = f"pulls/{handle.number}/comments/{handle.review_comment_id}/replies"
                return await place.say(thread, f"pulls/{handle.number}/comments", parcel)
            case "close":
                change = {"state": "closed", "state_reason": arguments["reason"]}
                return await place.ask("PATCH", f"issues/{handle.number}", change)
            case "reopen":
                return await place.ask("PATCH", f"issues/{handle.number}", {"state": "open"})
            case _:
                return await place.label(arguments["add"], arguments["remove"])


class _Repository:
    """One repository with the token of its source, which is read when it is needed and sent nowhere else."""

    def __init__(self, call: Any, settings: dict[str, Any], handle: GithubHandle) -> None:
        self._call = call
        self._settings = settings
        self._handle = handle
        self._base = f"{str(settings.get('base_url', GITHUB)).rstrip('/')}/repos/{settings['repo']}"

    async def ask(self, method: str, path: str, value: Any = None) -> dict[str, Any]:
        """Make a request and return the parts of its answer that are worth keeping."""
        body = await self._request(method, path, value)
        found = body if isinstance(body, dict) else {}
        return {name: found[name] for name in ("id", "html_url", "state") if name in found}

    async def _request(self, method: str, path: str, value: Any = None) -> Any:
        headers = {
            "accept": "application/vnd.github+json",
            "content-type": "application/json",
            "x-github-api-version": "2022-11-28",
        }
        name = self._settings.get("token_env")
        token = os.environ.get(name, "").strip() if name else ""
        if not token:
            raise Unreachable(f"the source {self._handle.source} has no token to write with; set its token_env")
        headers["authorization"] = f"Bearer {token}"
        answer = await self._call(
            method,
            f"{self._base}/{path}",
            headers,
            None if value is None else msgspec.json.encode(value),
            "GitHub",
            allow_private=bool(self._settings.get("allow_private")),
        )
        try:
            return msgspec.json.decode(answer.body) if answer.body else None
        except msgspec.DecodeError:
            return None

    async def say(self, where: str, said: str, parcel: Parcel) -> dict[str, Any]:
        """Post a text once: it carries a mark, by which a later attempt finds that an earlier one arrived."""
        mark = f"<!-- postbus:{parcel.delivery} -->"
        if parcel.attempt > 1:
            since = f"{instant(parcel.created_at_us):%Y-%m-%dT%H:%M:%SZ}"
            query = urlencode({"since": since, "per_page": "100", "sort": "created", "direction": "desc"})
            for one in await self._request("GET", f"{said}?{query}") or []:
                if mark in str(one.get("body")):
                    return {"id": one.get("id"), "html_url": one.get("html_url")}
        return await self.ask("POST", where, {"body": f"{parcel.arguments['body']}\n\n{mark}"})

    async def label(self, add: list[str], remove: list[str]) -> dict[str, Any]:
        """Add labels, then remove others; one that is not there is removed already."""
        place = f"issues/{self._handle.number}/labels"
        if add:
            await self._request("POST", place, {"labels": add})
        for name in remove:
            try:
                await self._request("DELETE", f"{place}/{quote(name, safe='')}")
            except Unreachable as error:
                if f"answered {NOT_FOUND}" not in error.message:
                    raise
        return {"added": add, "removed": remove}
