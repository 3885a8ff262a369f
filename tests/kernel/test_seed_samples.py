"""The samples of the two documents this kernel is built from, as they stand there; only the package's name differs."""

from __future__ import annotations

from pathlib import Path

from postbus.kernel import AgentInvocationContext, ExtensionState, Settings, SystemTopics
from postbus.kernel.contract import AgentProvider
from postbus.kernel.manifest import (
    EventPublishDeclaration,
    EventsConfig,
    EventSubscribeDeclaration,
    ManifestFile,
    read_manifest,
)
from tests.kernel.kernel_kit import ECHO, KernelKit, write_extension

PUBLISHER_YAML = """\
# Publisher example (e.g. email_checker)
events:
  publishes:
    - topic: email.received
      description: "Fires when a new email arrives in the inbox"
"""

NOTIFIER_YAML = """\
# Subscriber example (e.g. notification handler)
events:
  subscribes:
    - topic: user.notify
      handler: notify_user
"""

CUSTOM_YAML = """\
# Subscriber example (e.g. agent that processes emails)
events:
  subscribes:
    - topic: email.received
      handler: custom
"""

URGENT_YAML = """\
events:
  subscribes:
    - topic: alert.urgent
      handler: notify_user
"""

REMINDER_YAML = """\
agent:
  integration_mode: tool
  model: gpt-5-mini
  instructions: |
    You handle reminders. When a reminder is due, respond with "Reminder: <text>"

events:
  subscribes:
    - topic: reminder.due
      handler: invoke_agent
"""

EMAIL_AGENT = """
import json

from postbus.kernel import Event, ExtensionContext


class Sample:
    async def initialize(self, context: ExtensionContext) -> None:
        context.subscribe_event("email.received", self._handle_email)

    async def _handle_email(self, event: Event) -> None:
        prompt = f"Analyze this email:\\n{json.dumps(event.payload, indent=2)}"
        await self._ctx.invoke_agent(prompt)


class EmailAgent(Sample):
    async def initialize(self, context: ExtensionContext) -> None:
        self._ctx = context
        await super().initialize(context)
"""

EMITTER = """
    from postbus.kernel import SystemTopics

    class Emitter:
        async def initialize(self, context):
            self._ctx = context

        async def start(self):
            await self._ctx.emit("task.received", {"text": "Summarize report"})
            await self._ctx.emit("alert", {"level": "warning"}, correlation_id="req-123")
            await self._ctx.emit(SystemTopics.USER_NOTIFY, {"text": "hello"})
"""

CHECKIN = """
class Checkin:
    async def initialize(self, context):
        self._ctx = context
        self._ctx.subscribe_event("checkin.started", self._on_checkin)

    async def _on_checkin(self, event):
        step = event.payload.get("step", 1)
        total = event.payload.get("total", 3)
        if step < total:
            # Use Scheduler extension's schedule_once tool for delayed events
            pass  # agent schedules via schedule_once tool
        self.seen = (step, total)
"""


class Reminders:
    """An agent that does what the sample's instructions say."""

    def __init__(self, instructions: str) -> None:
        self.instructions = instructions

    async def invoke(self, task: str, context: AgentInvocationContext) -> str:
        assert context.correlation_id
        return f"Reminder: {task}"


def reminders(file: ManifestFile, settings: Settings) -> AgentProvider:
    assert file.manifest.agent is not None
    assert settings.kernel.agent_timeout_s > 0
    return Reminders(file.manifest.agent.instructions)


def test_the_manifest_models_read_as_in_the_document(tmp_path: Path) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text("id: sample\nentrypoint: main:Sample\n" + PUBLISHER_YAML)
    declared = EventPublishDeclaration(
        topic="email.received", description="Fires when a new email arrives in the inbox"
    )
    assert read_manifest(path).manifest.events == EventsConfig(publishes=[declared])
    path.write_text("id: sample\nentrypoint: main:Sample\n" + CUSTOM_YAML)
    assert read_manifest(path).manifest.events.subscribes == [EventSubscribeDeclaration(topic="email.received")]


async def test_the_adrs_chain_from_a_published_mail_to_the_agent(extensions: Path) -> None:
    write_extension(extensions, "email_checker", "class Checker:\n    pass\n", PUBLISHER_YAML)
    write_extension(extensions, "email_agent", EMAIL_AGENT, CUSTOM_YAML)
    write_extension(extensions, "notifier", "class Notifier:\n    pass\n", NOTIFIER_YAML)
    write_extension(extensions, "echo", ECHO)
    async with KernelKit(extensions) as kit:
        assert {one.state for one in kit.kernel.report().extensions} == {ExtensionState.RUNNING}
        await kit.publish("email.received", {"subject": "Lunch"}, source="email_checker")
        [(task, context)] = kit.kernel.instance("echo").asked
        assert task == 'Analyze this email:\n{\n  "subject": "Lunch"\n}'
        assert context.caller == "email_agent"
        await kit.publish("user.notify", {"text": "you have mail"})
        assert await kit.payloads(SystemTopics.USER_NOTIFY) == [{"text": "you have mail"}]


async def test_the_guides_emits(extensions: Path) -> None:
    write_extension(extensions, "emitter", EMITTER)
    async with KernelKit(extensions) as kit:
        [task], [alert] = await kit.events("task.received"), await kit.events("alert")
        assert (task.source, task.payload) == ("emitter", {"text": "Summarize report"})
        assert (alert.payload, alert.correlation_id) == ({"level": "warning"}, "req-123")
        assert await kit.payloads(SystemTopics.USER_NOTIFY) == [{"text": "hello"}]


async def test_the_guides_subscription(extensions: Path) -> None:
    write_extension(extensions, "checkin", CHECKIN)
    async with KernelKit(extensions) as kit:
        await kit.publish("checkin.started", {"step": 2})
        assert kit.kernel.instance("checkin").seen == (2, 3)


async def test_the_guides_manifests(extensions: Path) -> None:
    write_extension(extensions, "urgent", "class Urgent:\n    pass\n", URGENT_YAML)
    write_extension(extensions, "reminder", None, REMINDER_YAML)
    async with KernelKit(extensions, agent_factory=reminders) as kit:
        await kit.publish("alert.urgent", {"text": "fire"})
        await kit.publish("reminder.due", {"prompt": "call mother"})
        assert await kit.payloads(SystemTopics.USER_NOTIFY) == [
            {"text": "fire"},
            {"text": "Reminder: call mother"},
        ]
        instructions = kit.kernel.instance("reminder").instructions
        assert instructions == 'You handle reminders. When a reminder is due, respond with "Reminder: <text>"\n'
