"""The real servers that remote logs are tested on: one of each per pytest worker, started when first asked for.

In a conftest.py::

    from tests.services import kafka_server, nats_server  # noqa: F401 - fixtures

and a test takes ``kafka_server: KafkaServer`` or ``nats_server: NatsServer``. Both have

* ``address`` ("127.0.0.1:PORT") and ``url`` ("kafka://127.0.0.1:PORT", "nats://...");
* ``kill()`` (SIGKILL), ``start()`` on the same port and data, ``restart()`` = both, ``pause()``/``resume()`` (SIGSTOP,
  SIGCONT), ``stop()`` (in order), ``running``.

Servers are shared, so a test uses a prefix or stream names of its own (``fresh_prefix()``), and may leave a server
killed or paused: the fixture puts it right for the next test. Mark such tests with ``pytest.mark.xdist_group("kafka")``
(or "nats") so that only one worker has that server. Outside of fixtures use ``running_kafka()``/``running_nats()``.
A missing Java or missing jars skip on a laptop with the sentence that fixes it, and fail when CI=true.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tools.services import KafkaServer, Missing, NatsServer, Server, fetch_kafka

__all__ = [
    "KafkaServer",
    "NatsServer",
    "checked",
    "fresh_prefix",
    "kafka_server",
    "nats_server",
    "running",
    "running_kafka",
    "running_nats",
]

S = TypeVar("S", bound=Server)

_running: dict[type[Any], Server] = {}
_folders: list[str] = []
_prefixes = itertools.count()


def fresh_prefix() -> str:
    """Return a prefix that no other test of this worker uses."""
    return f"t{os.getpid()}-{next(_prefixes)}"


def running_kafka() -> KafkaServer:
    return running(KafkaServer)


def running_nats() -> NatsServer:
    return running(NatsServer)


@pytest.fixture
def kafka_server() -> KafkaServer:
    return running_kafka()


@pytest.fixture
def nats_server() -> NatsServer:
    return running_nats()


def running(kind: type[S]) -> S:
    """Return the one server of a kind, started when it does not run."""
    server = _running.get(kind)
    if server is None:
        server = _new(kind)
        _running[kind] = server
    assert isinstance(server, kind)
    if server.running:
        server.resume()
    else:
        server.kill()  # forget the process that ended
        server.start()
    return server


def _new(kind: type[S]) -> S:
    folder = tempfile.mkdtemp(prefix=f"postbus-{kind.__name__.lower()}-")
    _folders.append(folder)
    return checked(kind(Path(folder)))


def checked(server: S) -> S:
    """Return a server that could be started. Skips the test where something is missing, and fails it in CI."""
    try:
        if isinstance(server, KafkaServer) and os.environ.get("CI") == "true":
            fetch_kafka()
        server.command()
    except Missing as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    return server


def _stop_all() -> None:
    while _running:
        _, server = _running.popitem()
        server.kill()
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


atexit.register(_stop_all)
