from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from postbus.kernel.manifest import read_manifest
from postbus.kernel.strict_yaml import InvalidFile
from postbus.model import Trust

HEAD = "id: mail\nentrypoint: main:Mail\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "manifest.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_a_whole_manifest(tmp_path: Path) -> None:
    found = read_manifest(
        write(
            tmp_path,
            """\
            id: email_checker
            name: E-mail checker
            description: Looks into a maildir
            version: "1.0"
            entrypoint: parts.main:EmailChecker
            agent: {integration_mode: orchestrator, model: m, instructions: Be brief., description: Knows mail}
            depends_on: [scheduler]
            config: {maildir: ./mail, every_s: 5}
            events:
              publishes:
                - topic: email.received
                  description: Fires when a new email arrives
                  trust: untrusted
                  schema: {type: object, required: [subject]}
              subscribes:
                - {topic: "email.*", handler: invoke_agent, prompt_template: "Read {{ payload.subject }}"}
                - {topic: alert.urgent, handler: notify_user}
                - {topic: other}
            """,
        )
    )
    manifest = found.manifest
    assert (manifest.id, manifest.depends_on, manifest.config) == (
        "email_checker",
        ["scheduler"],
        {"maildir": "./mail", "every_s": 5},
    )
    assert manifest.agent is not None
    assert manifest.agent.integration_mode == "orchestrator"
    assert [one.handler for one in manifest.events.subscribes] == ["invoke_agent", "notify_user", "custom"]
    assert (manifest.trust_of("email.received"), manifest.trust_of("other")) == (Trust.UNTRUSTED, Trust.TRUSTED)
    assert [issue.pointer for issue in found.schemas["email.received"].issues(b"{}")] == [""]


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("", 1, "a manifest is a mapping"),
        ("- a\n", 1, "a manifest is a mapping"),
        ("name: x\nentrypoint: main:X\n", 1, "there is no key `id`"),
        ("id: a\nname: x\n", 1, "there is neither an entrypoint nor an agent"),
        ("id: Mail\nentrypoint: main:X\n", 1, "'Mail' is no id of an extension"),
        ("id: kernel\nentrypoint: main:X\n", 1, "'kernel' is no id"),
        ("id: a.b\nentrypoint: main:X\n", 1, "'a.b' is no id"),
        ("id: 5\nentrypoint: main:X\n", 1, "id: expected `str`, got `int`"),
        ("id: a\nentrypoint: ../evil:X\n", 2, "'../evil:X' is no entrypoint"),
        ("id: a\nentrypoint: main\n", 2, "'main' is no entrypoint"),
        (HEAD + "depend_on: [x]\n", 3, "there is no key 'depend_on'"),
        (HEAD + "depends_on: scheduler\n", 3, "depends_on: expected `array`"),
        (HEAD + "depends_on: [x, x]\n", 3, "x is there twice"),
        (HEAD + "events:\n  subscribes:\n    - topic: no\n", 5, "'no' is a boolean"),
        (HEAD + "events:\n  subscribes:\n    - topic: false\n", 5, "expected `str`, got `bool`"),
        (HEAD + "events:\n  subscribes:\n    - topic: a\n      handler: shout\n", 6, "handler: invalid value 'shout'"),
        (HEAD + "events:\n  subscribes:\n    - topic: a..b\n", 5, "a..b"),
        (HEAD + "events:\n  subscribes:\n    - {topic: a, handle: custom}\n", 5, "there is no key 'handle'"),
        (HEAD + "events:\n  subscribes:\n    - handler: custom\n", 5, "there is no key `topic`"),
        (HEAD + "events:\n  subscribes:\n    - topic: a\n      prompt_template: x\n", 6, "goes with handler"),
        (
            HEAD
            + "events:\n  subscribes:\n    - topic: a\n      handler: invoke_agent\n      prompt_template: '{{ x }}'\n",
            7,
            "there is no 'x' to fill in",
        ),
        (HEAD + "events:\n  publishes:\n    - topic: a.*\n", 5, "a.*"),
        (HEAD + "events:\n  publishes:\n    - topic: a\n    - topic: a\n", 6, "a is there twice"),
        (HEAD + "events:\n  publishes:\n    - topic: a\n      trust: maybe\n", 6, "trust: invalid value 'maybe'"),
        (HEAD + "events:\n  publishes:\n    - topic: a\n      schema: {type: 5}\n", 6, "schema"),
        (
            HEAD + "events:\n  publishes:\n    - topic: system.user.notify\n      schema: {}\n",
            6,
            "the schema of system.user.notify is the kernel's",
        ),
        ("id: a\nagent: {integration_mode: boss}\n", 2, "agent.integration_mode: invalid value 'boss'"),
        (HEAD + "config: [1]\n", 3, "config: expected `object`"),
    ],
)
def test_a_bad_manifest_is_refused_with_file_and_line(tmp_path: Path, text: str, line: int, sentence: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidFile) as caught:
        read_manifest(path)
    assert caught.value.where == f"{path}:{line}"
    assert sentence in caught.value.message
