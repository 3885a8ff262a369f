from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest

from postbus.log import SqliteLog
from postbus.model import Conflict, Invalid, Unauthenticated
from postbus.sources import SourceHost, Sources
from tests.sources import github_server as gh
from tests.sources.conftest import TENANT, Web, events

SINCE = "2026-03-01T00:00:00Z"
ALL = ["issues", "comments", "pulls", "review_comments", "reviews", "runs"]


@pytest.fixture
def github(web: Web) -> gh.Github:
    return gh.Github(web)


@pytest.fixture
async def add(sources: Sources, github: gh.Github) -> Any:
    async def register(name: str = "repo", **settings: Any) -> None:
        given = {"repo": gh.REPO, "base_url": github.web.url, "allow_private": True, "since": SINCE}
        await sources.add(name, "github", given | settings)

    return register


async def natives(log: SqliteLog, name: str = "repo") -> list[str | None]:
    return [event.native_id for event in await events(log, name)]


def at(minute: int) -> str:
    return f"2026-03-02T10:{minute:02d}:00Z"


async def test_everything_that_is_watched_becomes_events_in_one_shape(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any
) -> None:
    github.issues = [gh.issue(1, at(1)), gh.issue(2, "2026-02-01T00:00:00Z")]
    github.pulls = [gh.pull(5, at(2)), gh.pull(4, "2026-02-01T00:00:00Z")]
    github.comments = [gh.comment(1, 1, at(3))]
    github.review_comments = [gh.review_comment(2, 5, at(4), in_reply_to_id=77)]
    github.reviews = {5: [gh.review(1, at(5)), gh.review(0, "2026-02-01T00:00:00Z")]}
    github.runs = [gh.run(1, at(6), pull_requests=[{"number": 5}])]
    await add()
    assert (await host.poll(TENANT, "repo")).error is None
    found = {event.topic: event for event in await events(log, "repo")}
    assert len(found) == len(await events(log, "repo")) == 6
    first = found["github.issues"]
    assert first.metadata == {
        "repo": gh.REPO,
        "number": 1,
        "author": "ada",
        "action": "opened",
        "mentions": ["bob", "ada-l"],
        "url": f"https://github.com/{gh.REPO}/issues/1",
        "resource": f"{gh.REPO}#1",
        "title": "Issue 1",
        "state": "open",
        "labels": ["bug"],
    }
    assert (first.variant, first.key, first.trust) == ("opened", f"{gh.REPO}#1", "untrusted")
    assert first.payload == github.issues[0]
    assert first.occurred_at.isoformat() == "2026-03-02T10:01:00+00:00"
    handle = {"kind": "github", "source": "repo", "repo": gh.REPO}
    assert first.delivery_handle == handle | {"number": 1}
    assert found["github.issue_comment"].delivery_handle == handle | {"number": 1}
    thread = found["github.pull_request_review_comment"]
    assert thread.delivery_handle == handle | {"number": 5, "review_comment_id": 77}
    assert found["github.pull_request_review"].metadata["state"] == "approved"
    assert found["github.workflow_run"].metadata["conclusion"] == "success"
    assert found["github.workflow_run"].metadata["resource"] == f"{gh.REPO}#5"


async def test_nothing_new_is_asked_for_by_etag_and_brings_nothing(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any
) -> None:
    github.issues = [gh.issue(1, at(1))]
    github.pulls = [gh.pull(5, at(2))]
    github.runs = [gh.run(1, at(6))]
    await add(watch=ALL)
    for _ in range(3):
        assert (await host.poll(TENANT, "repo")).error is None
    before = github.unchanged
    turn = await host.poll(TENANT, "repo")
    assert turn.receipts == []
    assert github.unchanged - before == len(ALL)
    assert len(await events(log, "repo")) == 3


async def test_each_change_is_one_event(host: SourceHost, log: SqliteLog, github: gh.Github, add: Any) -> None:
    await add(watch=["issues", "pulls", "comments"])
    github.issues = [gh.issue(1, at(1))]
    github.pulls = [gh.pull(5, at(1))]
    github.comments = [gh.comment(1, 1, at(1))]
    await host.poll(TENANT, "repo")
    github.issues = [gh.issue(1, at(1)) | {"updated_at": at(2), "title": "new"}]
    github.pulls = [gh.pull(5, at(1)) | {"updated_at": at(3), "closed_at": at(3), "merged_at": at(3)}]
    github.comments = [gh.comment(1, 1, at(1)) | {"updated_at": at(4)}]
    await host.poll(TENANT, "repo")
    await host.poll(TENANT, "repo")
    found = [(event.topic.removeprefix("github."), event.variant) for event in await events(log, "repo")]
    assert sorted(found) == [
        ("issue_comment", "created"),
        ("issue_comment", "edited"),
        ("issues", "opened"),
        ("issues", "updated"),
        ("pull_request", "closed"),
        ("pull_request", "opened"),
    ]
    merged = next(event for event in await events(log, "repo") if event.variant == "closed")
    assert merged.metadata["state"] == "merged"


@pytest.mark.parametrize("same_instant", [False, True])
async def test_pages_are_all_read_in_order(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any, same_instant: bool
) -> None:
    github.per_page = 3
    github.issues = [gh.issue(n, at(1 if same_instant else n)) for n in range(1, 12)]
    github.comments = [gh.comment(n, 1, at(n)) for n in range(1, 9)]
    github.pulls = [gh.pull(n, at(n)) for n in range(1, 9)]
    github.runs = [gh.run(n, at(n)) for n in range(1, 9)]
    await add(watch=["issues", "comments", "pulls", "runs"])
    for _ in range(3):
        assert (await host.poll(TENANT, "repo")).error is None
    names = await natives(log)
    assert [name for name in names if str(name).startswith("issue:")] == [
        f"issue:{1000 + n}:{at(1 if same_instant else n)}" for n in range(1, 12)
    ]
    for kind, first in (("comment", 3000), ("pull", 2000)):
        own = [name for name in names if str(name).startswith(f"{kind}:")]
        assert own == [f"{kind}:{first + n}:{at(n)}" for n in range(1, 9)]
    assert len(names) == 11 + 8 * 3


async def test_pull_requests_in_the_list_of_issues_come_once(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any
) -> None:
    github.issues = [gh.issue(1, at(1)), gh.issue(5, at(1), pull_request={"url": "…"})]
    github.pulls = [gh.pull(5, at(1))]
    await add(watch=["issues", "pulls"])
    await host.poll(TENANT, "repo")
    assert await natives(log) == [f"issue:1001:{at(1)}", f"pull:2005:{at(1)}"]


async def test_a_run_is_followed_until_it_is_over(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any
) -> None:
    github.per_page = 2
    github.runs = [gh.run(1, at(1), "queued")]
    await add(watch=["runs"])
    await host.poll(TENANT, "repo")
    github.runs += [gh.run(n, at(n)) for n in range(2, 8)]
    github.runs[0] |= {"status": "in_progress"}
    await host.poll(TENANT, "repo")
    github.runs += [gh.run(n, at(n)) for n in range(8, 12)]
    github.runs[0] |= {"status": "completed", "conclusion": "failure"}
    await host.poll(TENANT, "repo")
    await host.poll(TENANT, "repo")
    first = [event for event in await events(log, "repo") if event.payload["id"] == 6001]
    assert [event.variant for event in first] == ["requested", "in_progress", "completed"]
    assert first[-1].metadata["conclusion"] == "failure"
    assert len(await events(log, "repo")) == 3 + 10


async def test_reviews_of_many_pull_requests_are_all_read(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any
) -> None:
    github.pulls = [gh.pull(n, at(n % 60)) for n in range(1, 71)]
    github.reviews = {n: [gh.review(n, at(n % 60))] for n in range(1, 71)}
    await add(watch=["reviews"])
    for _ in range(4):
        await host.poll(TENANT, "repo")
    assert len(set(await natives(log))) == len(await natives(log)) == 70


async def test_the_rest_comes_from_the_events_without_what_a_list_covers(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any
) -> None:
    github.per_page = 2
    github.events = [
        gh.happened(1, "PushEvent", {"ref": "refs/heads/main", "size": 1}),
        gh.happened(2, "IssuesEvent", {"action": "opened", "issue": gh.issue(1, at(1))}),
        gh.happened(3, "WatchEvent", {"action": "started"}),
        gh.happened(
            4,
            "PullRequestReviewCommentEvent",
            {"action": "created", "comment": {"id": 9, "body": "@ada"}, "pull_request": {"number": 5}},
        ),
    ]
    await add(watch=["issues", "events"])
    await host.poll(TENANT, "repo")
    github.events.append(gh.happened(5, "ReleaseEvent", {"action": "published", "release": {"html_url": "https://r"}}))
    await host.poll(TENANT, "repo")
    found = await events(log, "repo")
    assert [(event.topic, event.native_id) for event in found] == [
        ("github.push", "event:7001"),
        ("github.watch", "event:7003"),
        ("github.pull_request_review_comment", "event:7004"),
        ("github.release", "event:7005"),
    ]
    assert found[0].metadata["branch"] == "refs/heads/main"
    assert found[2].delivery_handle == {
        "kind": "github",
        "source": "repo",
        "repo": gh.REPO,
        "number": 5,
        "review_comment_id": 9,
    }
    assert found[3].metadata["url"] == "https://r"


# --- limits and failures ----------------------------------------------------------------------------------------------


async def due_in_s(sources: Sources, log: SqliteLog) -> float:
    due = (await sources.get("repo")).next_due_at_us
    assert due is not None
    return (due - log.store.clock.now_us()) / 1e6


@pytest.mark.parametrize("status", [403, 429])
async def test_a_used_up_rate_limit_waits_for_its_reset(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any, sources: Sources, status: int
) -> None:
    reset = int(log.store.clock.now_us() / 1e6) + 600
    limits = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(reset)}
    github.refuse = lambda _: (status, limits, b'{"message": "API rate limit exceeded for 1.2.3.4"}')
    await add()
    assert "rate limit" in str((await host.poll(TENANT, "repo")).error)
    assert 590 < await due_in_s(sources, log) <= 600
    assert len(github.web.calls) == 1


async def test_a_secondary_limit_waits_as_long_as_it_says(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any, sources: Sources
) -> None:
    github.refuse = lambda _: (403, {"retry-after": "77"}, b'{"message": "You have exceeded a secondary rate limit"}')
    await add()
    await host.poll(TENANT, "repo")
    assert 70 < await due_in_s(sources, log) <= 77


async def test_the_last_request_of_a_window_is_not_followed_by_another(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any, sources: Sources
) -> None:
    reset = int(log.store.clock.now_us() / 1e6) + 600
    github.headers = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(reset)}
    github.issues = [gh.issue(1, at(1))]
    await add(watch=["issues", "pulls", "runs"])
    turn = await host.poll(TENANT, "repo")
    assert (turn.error, len(turn.receipts), len(github.web.calls)) == (None, 1, 1)
    assert 590 < await due_in_s(sources, log) <= 600


async def test_a_plain_403_is_no_rate_limit(host: SourceHost, github: gh.Github, add: Any) -> None:
    github.refuse = lambda _: (403, {"x-ratelimit-remaining": "50"}, b'{"message": "Resource not accessible"}')
    await add()
    assert "403" in str((await host.poll(TENANT, "repo")).error)


async def test_a_failing_server_keeps_what_was_read_before_and_loses_nothing(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any, sources: Sources
) -> None:
    github.per_page = 2
    github.issues = [gh.issue(n, at(n)) for n in range(1, 6)]
    github.pulls = [gh.pull(n, at(n)) for n in range(1, 6)]
    github.refuse = lambda call: (502, {}, b"<html>bad gateway</html>") if "pulls?page=2" in call.path else None
    await add(watch=["issues", "pulls"])
    turn = await host.poll(TENANT, "repo")
    assert str(turn.error).startswith("pulls: GitHub answered 502")
    assert len(turn.receipts) == 5
    assert (await sources.get("repo")).failures == 1
    github.refuse = lambda _: None
    await host.poll(TENANT, "repo")
    assert len(await natives(log)) == 10
    assert (await sources.get("repo")).last_error is None


@pytest.mark.parametrize(
    "answer",
    [
        (200, {}, b"not json"),
        (200, {}, b'{"message": "odd"}'),
        (200, {}, b'[{"id": 1}]'),
        (200, {}, b"[null]"),
        (301, {"location": "/repositories/1"}, b""),
        (404, {}, b'{"message": "Not Found"}'),
    ],
)
async def test_odd_answers_are_visible_and_crash_nothing(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any, answer: tuple[int, dict[str, str], bytes]
) -> None:
    github.refuse = lambda _: answer
    await add(watch=["issues"])
    turn = await host.poll(TENANT, "repo")
    assert str(turn.error).startswith("issues: ")
    assert "unexpected" not in str(turn.error)
    assert await events(log, "repo") == []


async def test_the_token_is_sent_from_the_environment_and_not_to_other_hosts(
    host: SourceHost, log: SqliteLog, github: gh.Github, add: Any, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(watch=["issues"], token_env="MY_TOKEN")  # noqa: S106 - a name
    assert "MY_TOKEN is not set" in str((await host.poll(TENANT, "repo")).error)
    assert github.web.calls == []
    monkeypatch.setenv("MY_TOKEN", "t0ken")
    link = {"link": '<http://127.0.0.2:1/steal?page=2>; rel="next"'}
    github.refuse = lambda _: (200, link, json.dumps([gh.issue(1, SINCE)]).encode())
    turn = await host.poll(TENANT, "repo")
    assert github.web.calls[0].headers["authorization"] == "Bearer t0ken"
    assert "leads away to 127.0.0.2" in str(turn.error)
    source = await sources.get("repo")
    kept = await log.store.read(lambda db: str(db.execute("SELECT * FROM sources").fetchall()))
    assert "t0ken" not in kept + str(source)


# --- webhooks ---------------------------------------------------------------------------------------------------------


def called(body: bytes, event: str) -> dict[str, str]:
    digest = hmac.new(b"s3cret", body, hashlib.sha256).hexdigest()
    return {"x-hub-signature-256": f"sha256={digest}", "x-github-delivery": "d-1", "x-github-event": event}


async def test_its_webhooks_have_the_same_shape(
    host: SourceHost, log: SqliteLog, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "s3cret")
    await add(watch=[], webhook_secret_env="HOOK")  # noqa: S106 - a name
    payload = {
        "action": "created",
        "issue": gh.issue(3, at(1)),
        "comment": {"id": 8, "body": "ping @ada", "html_url": "https://c", "user": {"login": "bob"}},
        "repository": {"full_name": gh.REPO},
        "sender": {"login": "bob"},
    }
    body = json.dumps(payload).encode()
    for _ in range(2):
        await host.receive(TENANT, "repo", called(body, "issue_comment"), body)
    (event,) = await events(log, "repo")
    assert (event.topic, event.variant, event.native_id) == ("github.issue_comment", "created", "d-1")
    assert event.payload_json == body
    facts = {name: event.metadata[name] for name in ("number", "author", "mentions", "url", "resource")}
    assert facts == {
        "number": 3,
        "author": "bob",
        "mentions": ["ada"],
        "url": "https://c",
        "resource": f"{gh.REPO}#3",
    }
    assert event.delivery_handle == {"kind": "github", "source": "repo", "repo": gh.REPO, "number": 3}
    with pytest.raises(Unauthenticated):
        await host.receive(TENANT, "repo", called(body, "issues") | {"x-hub-signature-256": "sha256=0"}, body)
    other = json.dumps({"repository": {"full_name": "mallory/repo"}}).encode()
    with pytest.raises(Invalid, match="another repository"):
        await host.receive(TENANT, "repo", called(other, "push"), other)


async def test_without_a_secret_nobody_can_call_it(host: SourceHost, add: Any) -> None:
    await add()
    with pytest.raises(Conflict):
        await host.receive(TENANT, "repo", called(b"{}", "push"), b"{}")


@pytest.mark.parametrize(
    "settings",
    [
        {"repo": "nope"},
        {"repo": "a/b/../../c"},
        {"repo": "a/b?x"},
        {"watch": ["everything"]},
        {"watch": []},
        {"since": "yesterday"},
        {"token_env": "a b"},
        {"base_url": "http://10.0.0.1", "allow_private": False},
        {"token": "in the clear"},
    ],
)
async def test_bad_settings_are_refused(add: Any, sources: Sources, settings: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        await add(**settings)
    assert await sources.all() == []
