"""The adapter of the kind ``github``: what it watches, how far it has read, and its webhooks."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlencode

import msgspec

from postbus import strict_json
from postbus.envelope import parse_instant
from postbus.model import Conflict, Draft, Invalid, PostbusError, Unreachable, instant
from postbus.outside import check_url
from postbus.sources.contract import Common, Polled, Received, made
from postbus.sources.github import shapes
from postbus.sources.github.api import Api
from postbus.sources.webhook import EVENT, check_github, check_secret_env, secret_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from postbus.clock import Clock
    from postbus.model import Source

__all__ = ["GithubSettings", "GithubSource"]

REPO = re.compile(r"[A-Za-z0-9-]{1,39}/[A-Za-z0-9._-]{1,100}")
PER_PAGE = 100
INTERVAL_S, BARE_INTERVAL_S = 60.0, 600.0
PAGES_MAX = 10
REVIEWED_MAX = 30
OPEN_RUNS_MAX = 50
Watch = Literal["issues", "comments", "pulls", "review_comments", "reviews", "runs", "events"]
# What the repository's events repeat of what a list brings sooner and whole.
COVERED = {
    "issues": "github.issues",
    "comments": "github.issue_comment",
    "pulls": "github.pull_request",
    "review_comments": "github.pull_request_review_comment",
    "reviews": "github.pull_request_review",
}
Item = dict[str, Any]
Place = dict[str, Any]


class GithubSettings(Common, frozen=True, kw_only=True):
    """``repo``: owner/name. ``watch``: what to look at; empty: only webhooks. ``since``: how far back to begin.

    ``token_env`` and ``webhook_secret_env`` name environment variables. With ``events`` everything else that happens
    comes too (pushes, releases, stars), minutes later.
    """

    repo: str
    watch: tuple[Watch, ...] = ("issues", "comments", "pulls", "review_comments", "reviews", "runs")
    token_env: str | None = None
    webhook_secret_env: str | None = None
    since: str | None = None
    base_url: str = "https://api.github.com"
    interval_s: Annotated[float, msgspec.Meta(ge=1)] | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=300)] = 30.0
    allow_private: bool = False


class GithubSource:
    """Polls lists from where it has read, by ETag; each change of a thing is one event. Also takes webhooks."""

    def __init__(self, source: Source, settings: GithubSettings, clock: Clock) -> None:
        self._source = source
        self._settings = settings
        self._clock = clock
        self._api = Api(
            settings.base_url,
            settings.token_env,
            clock,
            allow_private=settings.allow_private,
            timeout_s=settings.timeout_s,
        )
        # Without a token GitHub allows 60 requests an hour.
        default_s = INTERVAL_S if settings.token_env is not None else BARE_INTERVAL_S
        self.interval_s = settings.interval_s or default_s

    @staticmethod
    def check(settings: GithubSettings) -> None:
        """Refuse settings that could never work."""
        if not REPO.fullmatch(settings.repo) or settings.repo.endswith(("/.", "/..")):
            raise Invalid(f"repo {settings.repo[:60]!r} is not owner/name")
        check_url(settings.base_url, allow_private=settings.allow_private)
        for name in (settings.token_env, settings.webhook_secret_env):
            if name is not None:
                check_secret_env(name)
        if settings.since is not None:
            parse_instant(settings.since)
        if not settings.watch and settings.webhook_secret_env is None:
            raise Invalid("nothing is watched", hint="give watch, or webhook_secret_env for webhooks only")

    # --- webhooks ---

    def receive(self, headers: Mapping[str, str], body: bytes) -> Received:
        """See ``Receiver.receive``."""
        if self._settings.webhook_secret_env is None:
            raise Conflict(f"{self._source.id} takes no webhooks", hint="it needs webhook_secret_env")
        name, digest = check_github(headers, body, secret_of(self._settings.webhook_secret_env))
        item, kind = strict_json.parse(body), headers.get("x-github-event", "")
        if not isinstance(item, dict) or not EVENT.fullmatch(kind):
            raise Invalid("this is no call of GitHub's webhooks")
        repo = (item.get("repository") or {}).get("full_name", self._settings.repo)
        if repo.lower() != self._settings.repo.lower():
            raise Invalid(f"the call is about another repository than {self._settings.repo}")
        return Received(drafts=[self._draft(shapes.hook(kind, name, self._settings.repo, item), body)], digest=digest)

    # --- polling ---

    async def poll(self, checkpoint: Any) -> Polled:
        """See ``Poller.poll``; what was read before something went wrong is kept."""
        settings = self._settings
        began = settings.since or f"{instant(self._source.created_at_us):%Y-%m-%dT%H:%M:%SZ}"
        places: dict[str, Place] = dict((checkpoint or {}).get("places", {}))
        drafts: list[Draft] = []
        again, wait_s = False, None
        problem: str | None = None
        self._api.begin()
        for name in settings.watch:
            if self._api.used_up:
                break
            read = self._readers()[name]
            try:
                found, place = await read(dict(places.get(name) or {"cursor": _canonical(began)}))
                drafts += [self._draft(shape) for shape in found]
            except PostbusError as error:
                problem, wait_s = f"{name}: {error.message}", getattr(error, "retry_after_s", None)
                break
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                problem = f"{name}: GitHub's answer is not as expected ({type(error).__name__}: {error})"
                continue
            again = bool(place.pop("more", False)) or again
            places[name] = place
        if problem is None and self._api.wait_s is not None:
            again, wait_s = False, max(self._api.wait_s, self.interval_s)
        kept = {"places": places}
        return Polled(drafts=drafts, checkpoint=kept, again=again and problem is None, problem=problem, wait_s=wait_s)

    def _readers(self) -> dict[str, Callable[[Place], Awaitable[tuple[list[shapes.Shape], Place]]]]:
        return {
            "issues": self._issues,
            "comments": self._comments,
            "pulls": self._pulls,
            "review_comments": self._review_comments,
            "reviews": self._reviews,
            "runs": self._runs,
            "events": self._events,
        }

    def _draft(self, shape: shapes.Shape, body: bytes | None = None) -> Draft:
        handle = None if shape.reply is None else {"kind": "github", "source": self._source.id, **shape.reply}
        return made(
            self._source,
            self._settings,
            shape.topic,
            shape.payload if body is None else body,
            native_id=shape.native_id,
            variant=shape.action,
            metadata=shape.metadata,
            occurred_at=shape.occurred_at,
            delivery_handle=handle,
            key=shape.metadata["resource"],
        )

    # --- lists that can be asked for what changed since ---

    async def _issues(self, place: Place) -> tuple[list[shapes.Shape], Place]:
        found, place = await self._since("issues", {"state": "all"}, place)
        return [shapes.issue(self._settings.repo, item) for item in found if "pull_request" not in item], place

    async def _comments(self, place: Place) -> tuple[list[shapes.Shape], Place]:
        found, place = await self._since("issues/comments", {}, place)
        return [shapes.comment(self._settings.repo, item) for item in found], place

    async def _review_comments(self, place: Place) -> tuple[list[shapes.Shape], Place]:
        found, place = await self._since("pulls/comments", {}, place)
        return [shapes.review_comment(self._settings.repo, item) for item in found], place

    async def _since(self, path: str, query: dict[str, str], place: Place) -> tuple[list[Item], Place]:
        """Read what changed at or after the cursor, oldest first, and move the cursor to the last change.

        The next page is asked for by its cursor: while pages are turned, what changes moves to the end, and pages by
        number would pass something over. Only a page full of one instant is turned by its link.
        """
        order = {"sort": "updated", "direction": "asc", "per_page": str(PER_PAGE)}
        url = self._url(path, query | order | {"since": place["cursor"]})
        page = await self._api.get(url, place.get("etag") if place.get("url") == url else None)
        if page.value is None:
            return [], place
        found: list[Item] = list(page.value)
        new: Place = {"cursor": place["cursor"], "url": url, "etag": page.etag}
        for _ in range(PAGES_MAX):
            if not page.value:
                break
            last = str(page.value[-1]["updated_at"])
            moved, new["cursor"] = last > new["cursor"], max(last, new["cursor"])
            if page.next is None:
                break
            url = self._url(path, query | order | {"since": last}) if moved else page.next
            page = await self._api.get(url)
            found += page.value or []
        else:
            new["more"] = True
        if new["cursor"] != place["cursor"]:
            new |= {"url": None, "etag": None}
        return found, new

    # --- lists with the newest first ---

    async def _pulls(self, place: Place) -> tuple[list[shapes.Shape], Place]:
        found, place = await self._updated_pulls(place)
        return [shapes.pull(self._settings.repo, item) for item in found], place

    async def _updated_pulls(self, place: Place) -> tuple[list[Item], Place]:
        """Return the pull requests that changed at or after the cursor, oldest change first."""
        query = {"state": "all", "sort": "updated", "direction": "desc", "per_page": str(PER_PAGE)}
        pages = await self._newest("pulls", query, place, lambda item: item["updated_at"] < place["cursor"])
        if pages is None:
            return [], place
        found, etag = pages
        changed = [item for item in reversed(found) if item["updated_at"] >= place["cursor"]]
        cursor = max([place["cursor"], *(item["updated_at"] for item in changed)])
        return changed, {"cursor": cursor, "etag": etag}

    async def _reviews(self, place: Place) -> tuple[list[shapes.Shape], Place]:
        """Read the reviews of pull requests that changed; a review changes its pull request."""
        changed, new = await self._updated_pulls(place)
        if len(changed) > REVIEWED_MAX:
            cut = changed[REVIEWED_MAX - 1]["updated_at"]
            changed = [item for item in changed if item["updated_at"] <= cut]
            new = {"cursor": cut, "more": cut > place["cursor"]}
        found: list[shapes.Shape] = []
        began = str(place.get("began", place["cursor"]))
        for item in changed:
            number = int(item["number"])
            url: str | None = self._url(f"pulls/{number}/reviews", {"per_page": str(PER_PAGE)})
            while url is not None:
                page = await self._api.get(url)
                submitted = [one for one in page.value or [] if str(one.get("submitted_at") or "") >= began]
                found += [shapes.review(self._settings.repo, number, one) for one in submitted]
                url = page.next
        return found, new | {"began": began}

    async def _runs(self, place: Place) -> tuple[list[shapes.Shape], Place]:
        """Read the newest runs, and those that were not over last time and have left the page."""
        began = str(place.get("began", place["cursor"]))
        pages = await self._newest(
            "actions/runs", {"per_page": str(PER_PAGE)}, place, lambda item: item["created_at"] < place["cursor"]
        )
        if pages is None:
            return [], place
        found = [item for item in pages[0] if item["created_at"] >= began]
        seen = {item["id"] for item in found}
        gone = [int(number) for number in place.get("open", []) if number not in seen]
        found += [(await self._api.get(self._url(f"actions/runs/{number}", {}))).value for number in gone]
        still = [item["id"] for item in found if item.get("status") != "completed"][:OPEN_RUNS_MAX]
        cursor = max([place["cursor"], *(str(item["created_at"]) for item in found)])
        new = {"cursor": cursor, "began": began, "etag": pages[1], "open": still}
        return [shapes.run(self._settings.repo, item) for item in reversed(found)], new

    async def _events(self, place: Place) -> tuple[list[shapes.Shape], Place]:
        last = int(place.get("last", 0))
        pages = await self._newest("events", {"per_page": str(PER_PAGE)}, place, lambda item: int(item["id"]) <= last)
        if pages is None:
            return [], place
        items, etag = pages
        covered = {COVERED[name] for name in self._settings.watch if name in COVERED}
        found = [shapes.happened(self._settings.repo, item) for item in reversed(items)]
        new = {"cursor": place["cursor"], "etag": etag, "last": max([last, *(int(item["id"]) for item in items)])}
        return [shape for shape in found if shape.topic not in covered], new

    async def _newest(
        self, path: str, query: dict[str, str], place: Place, known: Callable[[Item], bool]
    ) -> tuple[list[Item], str | None] | None:
        """Read pages until one holds something known; None when nothing changed since the ETag."""
        page = await self._api.get(self._url(path, query), place.get("etag"))
        if page.value is None:
            return None
        if page.poll_interval_s is not None:
            self._api.wait_s = max(self._api.wait_s or 0.0, page.poll_interval_s)
        etag, found = page.etag, _items(page.value)
        for _ in range(PAGES_MAX - 1):
            if page.next is None or any(known(item) for item in found):
                break
            page = await self._api.get(page.next)
            found += _items(page.value)
        return found, etag

    def _url(self, path: str, query: dict[str, str]) -> str:
        return f"/repos/{self._settings.repo}/{path}" + (f"?{urlencode(query)}" if query else "")


def _items(value: Any) -> list[Item]:
    found = value.get("workflow_runs") if isinstance(value, dict) else value
    if not isinstance(found, list):
        raise Unreachable("GitHub's answer is no list")
    return list(found)


def _canonical(text: str) -> str:
    return f"{instant(parse_instant(text)):%Y-%m-%dT%H:%M:%SZ}"
