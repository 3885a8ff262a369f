from __future__ import annotations

import asyncio
from pathlib import Path

from postbus.kernel import SystemTopics
from tests.kernel.kernel_kit import KernelKit, write_extension


def agent(page: Path) -> str:
    return f"""
        import asyncio

        class Worker:
            def __init__(self):
                self.began, self.go = asyncio.Event(), asyncio.Event()
                self.seen = []

            async def invoke(self, task, context):
                self.seen.append((context.invocation_id, context.attempt))
                self.began.set()
                await self.go.wait()
                with open("{page}", "a") as page:
                    page.write(f"{{context.attempt}}\\n")
                return f"answer {{context.attempt}}"
    """


MANIFEST = "events: {subscribes: [{topic: job.new, handler: invoke_agent}]}\n"


async def test_an_agent_killed_at_work_answers_once_after_the_restart(extensions: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    write_extension(extensions, "worker", agent(page), MANIFEST)
    async with KernelKit(extensions) as kit:
        first = kit.kernel.instance("worker")
        await kit.kit.publish("job.new", {"prompt": "go"}, correlation_id="c1")
        async with asyncio.timeout(60):
            await first.began.wait()
        await kit.crash()
        second = kit.kernel.instance("worker")
        second.go.set()
        await kit.kit.until(lambda: bool(second.seen))
        await kit.settle()
        assert second.seen == [(first.seen[0][0], 2)]
        told = await kit.events(SystemTopics.USER_NOTIFY)
        assert [(event.payload, event.correlation_id) for event in told] == [({"text": "answer 2"}, "c1")]
        assert page.read_text() == "2\n"


async def test_an_answer_that_was_given_is_not_given_in_other_words(extensions: Path, tmp_path: Path) -> None:
    write_extension(extensions, "worker", agent(tmp_path / "page"), MANIFEST)
    async with KernelKit(extensions) as kit:
        kit.kernel.instance("worker").go.set()
        await kit.publish("job.new", {"prompt": "go"})
        await kit.crash()
        kit.kernel.instance("worker").go.set()
        await kit.kit.bus.reset("worker.invoke_agent", "earliest")  # as if the end of the work had not been recorded
        await kit.settle()
        assert len(kit.kernel.instance("worker").seen) == 1
        assert await kit.payloads(SystemTopics.USER_NOTIFY) == [{"text": "answer 1"}]
