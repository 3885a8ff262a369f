"""What GitHub says, in one shape: topic, action, identity, facts to filter by, and where a reply goes."""

from __future__ import annotations

import re
from typing import Any

import msgspec

__all__ = ["Shape", "comment", "happened", "hook", "issue", "pull", "review", "review_comment", "run"]

MENTION = re.compile(r"(?<![\w`/@-])@([A-Za-z0-9](?:[A-Za-z0-9-]{0,38}))(?![\w/-])")
MENTIONS_MAX = 50
NUMBER = re.compile(r"/(\d{1,18})$")
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
TOKEN = re.compile(r"[a-z][a-z0-9_]{0,60}")
TITLE_CHARS_MAX = 500


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """An event of GitHub before it is a draft. ``reply`` is what a delivery handle needs beside the source."""

    topic: str
    action: str
    native_id: str
    payload: Any
    metadata: dict[str, Any]
    occurred_at: str | None
    reply: dict[str, Any] | None


def _login(thing: Any) -> str:
    return str((thing or {}).get("login") or "")


def _shape(
    topic: str,
    action: str,
    native_id: str,
    payload: Any,
    *,
    repo: str,
    number: int | None,
    author: str,
    url: str,
    text: str,
    occurred_at: str | None,
    reply: dict[str, Any] | None = None,
    **more: Any,
) -> Shape:
    facts: dict[str, Any] = {
        "repo": repo,
        "number": number,
        "author": author,
        "action": action,
        "mentions": list(dict.fromkeys(MENTION.findall(text)))[:MENTIONS_MAX],
        "url": url,
        "resource": repo if number is None else f"{repo}#{number}",
        **more,
    }
    if reply is None and number is not None:
        reply = {"repo": repo, "number": number}
    metadata = {name: value for name, value in facts.items() if value is not None}
    return Shape(
        topic=f"github.{topic}",
        action=action,
        native_id=native_id,
        payload=payload,
        metadata=metadata,
        occurred_at=occurred_at,
        reply=reply,
    )


def issue(repo: str, item: dict[str, Any]) -> Shape:
    """An issue as a list shows it."""
    return _shape(
        "issues",
        _change(item),
        f"issue:{item['id']}:{item['updated_at']}",
        item,
        repo=repo,
        number=item["number"],
        author=_login(item.get("user")),
        url=item.get("html_url") or "",
        text=item.get("body") or "",
        occurred_at=item["updated_at"],
        title=(item.get("title") or "")[:TITLE_CHARS_MAX],
        state=item.get("state"),
        labels=[label.get("name") for label in item.get("labels") or [] if isinstance(label, dict)],
    )


def pull(repo: str, item: dict[str, Any]) -> Shape:
    """A pull request as a list shows it."""
    merged = item.get("merged_at") is not None
    return _shape(
        "pull_request",
        _change(item),
        f"pull:{item['id']}:{item['updated_at']}",
        item,
        repo=repo,
        number=item["number"],
        author=_login(item.get("user")),
        url=item.get("html_url") or "",
        text=item.get("body") or "",
        occurred_at=item["updated_at"],
        title=(item.get("title") or "")[:TITLE_CHARS_MAX],
        state="merged" if merged else item.get("state"),
        draft=bool(item.get("draft")),
        branch=(item.get("head") or {}).get("ref"),
        labels=[label.get("name") for label in item.get("labels") or [] if isinstance(label, dict)],
    )


def _change(item: dict[str, Any]) -> str:
    """Return what the last change was, as far as a list tells."""
    if item.get("closed_at") is not None and item["closed_at"] == item["updated_at"]:
        return "closed"
    return "opened" if item.get("created_at") == item["updated_at"] else "updated"


def comment(repo: str, item: dict[str, Any]) -> Shape:
    """A comment on an issue or pull request."""
    number = _number(item.get("issue_url"))
    return _shape(
        "issue_comment",
        "created" if item.get("created_at") == item["updated_at"] else "edited",
        f"comment:{item['id']}:{item['updated_at']}",
        item,
        repo=repo,
        number=number,
        author=_login(item.get("user")),
        url=item.get("html_url") or "",
        text=item.get("body") or "",
        occurred_at=item["updated_at"],
    )


def review_comment(repo: str, item: dict[str, Any]) -> Shape:
    """A comment on a line of a pull request; a reply goes into its thread."""
    number = _number(item.get("pull_request_url"))
    thread = item.get("in_reply_to_id") or item["id"]
    return _shape(
        "pull_request_review_comment",
        "created" if item.get("created_at") == item["updated_at"] else "edited",
        f"review_comment:{item['id']}:{item['updated_at']}",
        item,
        repo=repo,
        number=number,
        author=_login(item.get("user")),
        url=item.get("html_url") or "",
        text=item.get("body") or "",
        occurred_at=item["updated_at"],
        path=item.get("path"),
        reply=None if number is None else {"repo": repo, "number": number, "review_comment_id": thread},
    )


def review(repo: str, number: int, item: dict[str, Any]) -> Shape:
    """A review of a pull request."""
    return _shape(
        "pull_request_review",
        "submitted",
        f"review:{item['id']}:{item.get('submitted_at')}",
        item,
        repo=repo,
        number=number,
        author=_login(item.get("user")),
        url=item.get("html_url") or "",
        text=item.get("body") or "",
        occurred_at=item.get("submitted_at"),
        state=str(item.get("state") or "").lower(),
    )


def run(repo: str, item: dict[str, Any]) -> Shape:
    """A run of a workflow in one of its states."""
    pulls = item.get("pull_requests") or []
    status = str(item.get("status") or "")
    action = status if status in ("completed", "in_progress") else "requested"
    return _shape(
        "workflow_run",
        action,
        f"run:{item['id']}:{item.get('run_attempt', 1)}:{action}",
        item,
        repo=repo,
        number=pulls[0].get("number") if pulls else None,
        author=_login(item.get("actor")),
        url=item.get("html_url") or "",
        text="",
        occurred_at=item.get("updated_at"),
        title=(item.get("display_title") or "")[:TITLE_CHARS_MAX],
        workflow=item.get("name"),
        conclusion=item.get("conclusion"),
        branch=item.get("head_branch"),
        sha=item.get("head_sha"),
    )


def happened(repo: str, item: dict[str, Any]) -> Shape:
    """An entry of the repository's events."""
    kind = HUMP.sub("_", str(item.get("type") or "").removesuffix("Event")).lower()
    return _told(kind, f"event:{item['id']}", repo, item, item.get("payload") or {}, item.get("created_at"), "actor")


def hook(kind: str, delivery: str, repo: str, item: dict[str, Any]) -> Shape:
    """A call of GitHub's webhooks."""
    return _told(kind, delivery, repo, item, item, None, "sender")


def _told(
    kind: str, native_id: str, repo: str, item: dict[str, Any], facts: dict[str, Any], at: str | None, who: str
) -> Shape:
    """Shape what comes with its own kind and action, and the things it is about under their names."""
    thing = _first(facts, "comment", "review", "issue", "pull_request", "release")
    about = _first(facts, "issue", "pull_request")
    number = about.get("number", facts.get("number"))
    number = number if isinstance(number, int) else None
    reply = None
    if kind == "pull_request_review_comment" and number is not None and "id" in thing:
        reply = {"repo": repo, "number": number, "review_comment_id": thing.get("in_reply_to_id") or thing["id"]}
    return _shape(
        kind if TOKEN.fullmatch(kind) else "other",
        str(facts.get("action") or ""),
        native_id,
        item,
        repo=repo,
        number=number,
        author=_login(item.get(who)) or _login(thing.get("user")),
        url=str(thing.get("html_url") or about.get("html_url") or ""),
        text=str(thing.get("body") or ""),
        occurred_at=at,
        reply=reply,
        title=str(about.get("title") or "")[:TITLE_CHARS_MAX] or None,
        branch=facts.get("ref") if isinstance(facts.get("ref"), str) else None,
    )


def _first(facts: dict[str, Any], *names: str) -> dict[str, Any]:
    return next((facts[name] for name in names if isinstance(facts.get(name), dict)), {})


def _number(url: Any) -> int | None:
    found = NUMBER.search(str(url or ""))
    return int(found[1]) if found else None
