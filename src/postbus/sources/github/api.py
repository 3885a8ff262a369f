"""GitHub's REST API as a reader needs it: conditional requests, pages, and its limits of rate."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from postbus import strict_json
from postbus.model import Invalid, Unreachable
from postbus.outside import rate_limit_s, refused, request
from postbus.sources.contract import NotReady

if TYPE_CHECKING:
    from postbus.clock import Clock
    from postbus.outside import Answer

__all__ = ["Api", "Page"]

OK, NOT_MODIFIED = 200, 304
RATE_S_MAX = 3700.0
BYTES_MAX = 32 << 20
DEPTH_MAX = 64
NEXT = re.compile(r'<([^<>]+)>\s*;[^,]*\brel="?next"?')


class Page:
    """One page of an answer. ``value`` None: unchanged since the ETag that was given."""

    def __init__(self, value: Any, answer: Answer) -> None:
        self.value = value
        self.etag = answer.headers.get("etag")
        found = NEXT.search(answer.headers.get("link", ""))
        self.next = found[1] if found else None
        self.poll_interval_s = _number(answer.headers.get("x-poll-interval"))


class Api:
    """Calls one API; the token is read from the environment each time and goes nowhere else."""

    def __init__(
        self, base_url: str, token_env: str | None, clock: Clock, *, allow_private: bool, timeout_s: float
    ) -> None:
        self._base = base_url.rstrip("/")
        self._token_env = token_env
        self._clock = clock
        self._allow_private = allow_private
        self._timeout_s = timeout_s
        self.wait_s: float | None = None
        self.used_up = False

    def begin(self) -> None:
        """Forget what the last round of requests was told."""
        self.wait_s, self.used_up = None, False

    async def get(self, url: str, etag: str | None = None) -> Page:
        """Return a page; raises ``Unreachable`` with when to come back, if GitHub says so."""
        url = url if url.startswith(("http://", "https://")) else self._base + url
        if urlsplit(url)[:2] != urlsplit(self._base)[:2]:
            raise Unreachable(f"GitHub's next page leads away to {urlsplit(url).netloc[:100]}")
        headers = {"accept": "application/vnd.github+json", "x-github-api-version": "2022-11-28"}
        if self._token_env is not None:
            token = os.environ.get(self._token_env, "").strip()
            if not token:
                raise NotReady(f"the environment variable {self._token_env} is not set")
            headers["authorization"] = f"Bearer {token}"
        if etag is not None:
            headers["if-none-match"] = etag
        answer = await request(
            "GET",
            url,
            headers=headers,
            allow_private=self._allow_private,
            timeout_s=self._timeout_s,
            bytes_max=BYTES_MAX,
        )
        self._mind_the_rate(answer)
        if answer.status == NOT_MODIFIED:
            return Page(None, answer)
        if answer.status != OK:
            raise refused(answer, "GitHub", self._clock.now_us())
        try:
            return Page(strict_json.parse(answer.body, max_bytes=BYTES_MAX, max_depth=DEPTH_MAX), answer)
        except Invalid as error:
            raise Unreachable(f"GitHub's answer is no JSON: {error.message}") from None

    def _mind_the_rate(self, answer: Answer) -> None:
        """Refuse what the limits refused, and remember when the last request of a window was used."""
        wait_s = rate_limit_s(answer, self._clock.now_us())
        if wait_s is not None:
            raise Unreachable(f"GitHub's rate limit is used up for {wait_s:.0f} s", retry_after_s=wait_s)
        reset = _number(answer.headers.get("x-ratelimit-reset"))
        if answer.headers.get("x-ratelimit-remaining") == "0" and reset is not None:
            left_s = max(reset - self._clock.now_us() / 1e6, 1.0)
            self.wait_s, self.used_up = min(left_s, RATE_S_MAX), True


def _number(text: str | None) -> float | None:
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= len("9999999999")):
        return None
    return float(text)
