from __future__ import annotations

import json
from typing import Any

import pytest

from postbus.inbox.replies import Replies
from postbus.log import SqliteLog
from postbus.model import Invalid
from postbus.sources import Sources
from postbus.testing import FakeClock
from tests.replies.conftest import REPO, TENANT
from tests.sources.conftest import Call, Reply, Web


class Issue:
    """The part of GitHub that takes replies."""

    def __init__(self, web: Web) -> None:
        self.comments: list[dict[str, Any]] = []
        self.lose_answers = 0
        self.web = web
        web.answer = self.answer

    def answer(self, call: Call) -> Reply:
        if call.headers.get("authorization") != "Bearer t0ken":
            return 401, {}, b'{"message": "Bad credentials"}'
        path = call.path.partition("?")[0].removeprefix(f"/repos/{REPO}/")
        if call.method == "GET":
            return 200, {}, json.dumps(self.comments).encode()
        if path.endswith(("/comments", "/replies")):
            made = {"id": len(self.comments) + 1, "html_url": f"https://c/{len(self.comments) + 1}"}
            self.comments.append(made | json.loads(call.body) | {"path": path})
            if self.lose_answers:
                self.lose_answers -= 1
                return 502, {}, b""
            return 201, {}, json.dumps(made).encode()
        if call.method == "DELETE" and path.endswith("missing"):
            return 404, {}, b'{"message": "Label does not exist"}'
        return 200, {}, json.dumps({"id": 1, "state": json.loads(call.body or b"{}").get("state")}).encode()


@pytest.fixture
async def issue(log: SqliteLog, web: Web, monkeypatch: pytest.MonkeyPatch) -> Issue:
    monkeypatch.setenv("MY_TOKEN", "t0ken")
    settings = {"repo": REPO, "base_url": web.url, "allow_private": True, "token_env": "MY_TOKEN"}
    await Sources(log, TENANT).add("repo", "github", settings)
    return Issue(web)


HANDLE = {"kind": "github", "source": "repo", "repo": REPO, "number": 7}


async def test_text_becomes_a_comment_with_a_mark(replies: Replies, issue: Issue) -> None:
    reply = await replies.send(HANDLE, "Thanks!")
    await replies.drain()
    assert (await replies.get(reply.id)).result == {"id": 1, "html_url": "https://c/1"}
    assert issue.comments[0]["body"] == f"Thanks!\n\n<!-- postbus:{reply.id} -->"
    assert issue.comments[0]["path"] == "issues/7/comments"
    await replies.send(HANDLE, {"n": 1})
    await replies.drain()
    assert issue.comments[1]["body"].startswith('```json\n{\n  "n": 1\n}\n```')


async def test_a_comment_whose_answer_was_lost_is_not_made_twice(
    replies: Replies, issue: Issue, clock: FakeClock
) -> None:
    issue.lose_answers = 1
    reply = await replies.send(HANDLE, "once")
    await replies.drain()
    assert (await replies.get(reply.id)).state == "accepted"
    clock.advance(11)
    await replies.drain()
    done = await replies.get(reply.id)
    assert (done.state, done.result) == ("sent", {"id": 1, "html_url": "https://c/1"})
    assert len(issue.comments) == 1


async def test_a_thread_of_a_review_gets_its_reply_there(replies: Replies, issue: Issue) -> None:
    handle = HANDLE | {"review_comment_id": 99}
    assert (await replies.actions(handle))[0].name == "review_reply"
    await replies.send(handle, "done")
    await replies.drain()
    assert issue.comments[0]["path"] == "pulls/7/comments/99/replies"


async def test_actions_have_schemas_and_are_invoked(replies: Replies, issue: Issue) -> None:
    actions = {action.name: action.schema for action in await replies.actions(HANDLE)}
    assert list(actions) == ["comment", "close", "reopen", "label"]
    assert actions["comment"]["properties"]["body"]["type"] == "string"
    assert actions["comment"]["required"] == ["body"]
    assert actions["close"]["properties"]["reason"]["enum"] == ["completed", "not_planned"]
    for name, arguments in (
        ("close", {"reason": "not_planned"}),
        ("reopen", {}),
        ("label", {"add": ["bug"], "remove": ["a/b", "missing"]}),
    ):
        reply = await replies.invoke(HANDLE, name, arguments)
        await replies.drain()
        assert (await replies.get(reply.id)).state == "sent"
    told = [(call.method, call.path.removeprefix(f"/repos/{REPO}/"), call.body) for call in issue.web.calls]
    assert told == [
        ("PATCH", "issues/7", b'{"state":"closed","state_reason":"not_planned"}'),
        ("PATCH", "issues/7", b'{"state":"open"}'),
        ("POST", "issues/7/labels", b'{"labels":["bug"]}'),
        ("DELETE", "issues/7/labels/a%2Fb", b""),
        ("DELETE", "issues/7/labels/missing", b""),
    ]


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ("merge", {}),
        ("review_reply", {"body": "x"}),
        ("comment", {}),
        ("comment", {"body": ""}),
        ("comment", {"body": 3}),
        ("comment", {"body": "x" * 70_000}),
        ("comment", {"body": "x", "more": 1}),
        ("close", {"reason": "because"}),
        ("label", {}),
        ("label", {"add": [""]}),
    ],
)
@pytest.mark.usefixtures("issue")
async def test_arguments_that_do_not_fit_are_refused(replies: Replies, action: str, arguments: Any) -> None:
    with pytest.raises(Invalid):
        await replies.invoke(HANDLE, action, arguments)
    assert await replies.find() == []


async def test_githubs_rate_limit_is_waited_for(replies: Replies, issue: Issue, clock: FakeClock) -> None:
    reset = str(int(clock.now_us() / 1e6) + 300)
    limits = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": reset}
    issue.web.answer = lambda _: (403, limits, b'{"message": "API rate limit exceeded"}')
    reply = await replies.send(HANDLE, "x")
    await replies.drain()
    clock.advance(290)
    assert await replies.drain() == 0
    issue.web.answer = issue.answer
    clock.advance(11)
    await replies.drain()
    assert (await replies.get(reply.id)).state == "sent"
