"""Programs that users named: started without a shell, bounded in time and in what they may say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process, SubprocessStreamProtocol
from typing import TYPE_CHECKING

import msgspec

from postbus.model import Unreachable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Ended", "run_program"]

BYTES_MAX = 8 << 20
ERROR_BYTES_MAX = 2_000
BLOCK = 65_536


class Ended(msgspec.Struct, frozen=True):
    """How a program ended: its exit code, all it wrote, and the end of what it complained about."""

    code: int
    out: bytes
    err: str


async def run_program(
    argv: Sequence[str],
    *,
    given: bytes = b"",
    timeout_s: float = 30.0,
    bytes_max: int = BYTES_MAX,
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a program with these bytes on its standard input and return how it ended, whatever its exit code.

    Raises ``Unreachable`` when it cannot be started, takes too long or writes too much; then it is killed with
    everything it started in its process group.
    """
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(BLOCK, loop),
            *argv,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Unreachable(f"{argv[0]} cannot be started: {why}") from error
    child = Process(transport, protocol, loop)
    try:
        async with asyncio.timeout(timeout_s):
            _, out, err = await asyncio.gather(_give(child, given), _take(child, bytes_max), _complaints(child))
            return Ended(await child.wait(), out, err)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        transport.close()  # or what it wrote and nobody reads would keep the end from being seen
        await child.wait()
        if isinstance(error, TimeoutError):
            raise Unreachable(f"{argv[0]} took longer than {timeout_s:g} s") from None
        raise


async def _give(child: Process, given: bytes) -> None:
    assert child.stdin is not None  # noqa: S101 - a pipe
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read
        child.stdin.write(given)
        await child.stdin.drain()
    child.stdin.close()


async def _take(child: Process, bytes_max: int) -> bytes:
    assert child.stdout is not None  # noqa: S101 - a pipe
    taken = bytearray()
    while block := await child.stdout.read(BLOCK):
        taken += block
        if len(taken) > bytes_max:
            raise Unreachable(f"the program wrote more than {bytes_max} bytes")
    return bytes(taken)


async def _complaints(child: Process) -> str:
    assert child.stderr is not None  # noqa: S101 - a pipe
    last = b""
    while block := await child.stderr.read(BLOCK):
        last = (last + block)[-ERROR_BYTES_MAX:]
    return last.decode(errors="replace").strip()
