"""GitHub's REST API in small: recorded shapes, pages by Link, ETags, limits of rate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.sources.conftest import Call, Reply, Web

REPO = "octo/hello"


def issue(number: int, at: str, **more: Any) -> dict[str, Any]:
    return {
        "id": 1000 + number,
        "node_id": "I_kw",
        "number": number,
        "title": f"Issue {number}",
        "user": {"login": "ada", "id": 1, "type": "User"},
        "labels": [{"id": 1, "name": "bug", "color": "f00"}],
        "state": "open",
        "body": "See @bob and @ada-l, not me@example.com or `@code`.",
        "html_url": f"https://github.com/{REPO}/issues/{number}",
        "created_at": at,
        "updated_at": at,
        "closed_at": None,
        **more,
    }


def pull(number: int, at: str, **more: Any) -> dict[str, Any]:
    return issue(number, at, id=2000 + number, merged_at=None, draft=False, head={"ref": "fix", "sha": "abc"}, **more)


def comment(number: int, on: int, at: str, **more: Any) -> dict[str, Any]:
    return {
        "id": 3000 + number,
        "user": {"login": "bob"},
        "body": "hi @ada",
        "issue_url": f"https://api.github.com/repos/{REPO}/issues/{on}",
        "html_url": f"https://github.com/{REPO}/issues/{on}#issuecomment-{number}",
        "created_at": at,
        "updated_at": at,
        **more,
    }


def review_comment(number: int, on: int, at: str, **more: Any) -> dict[str, Any]:
    made = comment(number, on, at, id=4000 + number, path="a.py", **more)
    return made | {"pull_request_url": f"https://api.github.com/repos/{REPO}/pulls/{on}"}


def review(number: int, at: str, state: str = "APPROVED") -> dict[str, Any]:
    return {"id": 5000 + number, "user": {"login": "eve"}, "body": "ok", "state": state, "submitted_at": at}


def run(number: int, at: str, status: str = "completed", **more: Any) -> dict[str, Any]:
    return {
        "id": 6000 + number,
        "name": "CI",
        "display_title": "Fix it",
        "status": status,
        "conclusion": "success" if status == "completed" else None,
        "run_attempt": 1,
        "actor": {"login": "ada"},
        "head_branch": "fix",
        "head_sha": "abc",
        "html_url": f"https://github.com/{REPO}/actions/runs/{number}",
        "pull_requests": [],
        "created_at": at,
        "updated_at": at,
        **more,
    }


def happened(number: int, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": str(7000 + number),
        "type": kind,
        "actor": {"id": 1, "login": "ada"},
        "repo": {"id": 1, "name": REPO},
        "payload": payload,
        "public": True,
        "created_at": "2026-03-01T10:00:00Z",
    }


class Github:
    """The state of a repository, and the answers to requests about it. ``refuse`` may answer instead."""

    def __init__(self, web: Web) -> None:
        self.web = web
        self.issues: list[dict[str, Any]] = []
        self.pulls: list[dict[str, Any]] = []
        self.comments: list[dict[str, Any]] = []
        self.review_comments: list[dict[str, Any]] = []
        self.reviews: dict[int, list[dict[str, Any]]] = {}
        self.runs: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.per_page = 100
        self.refuse: Callable[[Call], Reply | None] = lambda _: None
        self.headers: dict[str, str] = {}
        web.answer = self.answer

    @property
    def unchanged(self) -> int:
        """How many requests asked under a condition."""
        return sum("if-none-match" in call.headers for call in self.web.calls)

    def answer(self, call: Call) -> Reply:
        refused = self.refuse(call)
        if refused is not None:
            return refused
        parts = urlsplit(call.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        path = parts.path.removeprefix(f"/repos/{REPO}/")
        if path.startswith("actions/runs/"):
            found = [one for one in self.runs if str(one["id"]) == path.rsplit("/", 1)[1]]
            return (
                (200, self.headers, json.dumps(found[0]).encode()) if found else (404, {}, b'{"message":"Not Found"}')
            )
        listed = self._list(path, query)
        if listed is None:
            return 404, self.headers, b'{"message": "Not Found", "status": "404"}'
        return self._page(call, path, query, listed)

    def _list(self, path: str, query: dict[str, str]) -> list[dict[str, Any]] | None:
        if path.startswith("pulls/") and path.endswith("/reviews"):
            return self.reviews.get(int(path.split("/")[1]), [])
        found = {
            "issues": self.issues,
            "pulls": self.pulls,
            "issues/comments": self.comments,
            "pulls/comments": self.review_comments,
            "actions/runs": self.runs[::-1],
            "events": self.events[::-1],
        }.get(path)
        if found is not None and "sort" in query:
            since = query.get("since", "")
            found = [one for one in found if one["updated_at"] >= since]
            found = sorted(found, key=lambda one: one["updated_at"], reverse=query["direction"] == "desc")
        return found

    def _page(self, call: Call, path: str, query: dict[str, str], found: list[dict[str, Any]]) -> Reply:
        number = int(query.get("page", 1))
        size = min(self.per_page, int(query.get("per_page", 30)))
        page = found[(number - 1) * size : number * size]
        body = json.dumps({"total_count": len(found), "workflow_runs": page} if "runs" in path else page).encode()
        etag = f'W/"{hashlib.sha256(body).hexdigest()}"'
        headers = {"etag": etag, "content-type": "application/json; charset=utf-8", **self.headers}
        if call.headers.get("if-none-match") == etag:
            return 304, headers, b""
        if number * size < len(found):
            base = f"{self.web.url}{urlsplit(call.path).path}"
            rest = "".join(f"&{name}={value}" for name, value in query.items() if name != "page")
            headers["link"] = f'<{base}?page={number + 1}{rest}>; rel="next", <{base}?page=9{rest}>; rel="last"'
        return 200, headers, body
