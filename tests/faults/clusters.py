"""Clusters of three servers on loopback, each a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.services import checked
from tools.services import KafkaServer, NatsServer, Server, free_port

__all__ = ["SERVERS", "cluster"]

SERVERS = 3


class NatsNode(NatsServer):
    """One of several NATS servers that know each other."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.route = free_port()
        self.more = ""

    def meet(self, number: int, others: list[NatsNode]) -> None:
        """Learn its name and who the others are."""
        routes = ", ".join(f'"nats://127.0.0.1:{node.route}"' for node in others)
        self.more = (
            f'server_name: "n{number}"\n'
            f'cluster {{ name: "postbus", listen: "127.0.0.1:{self.route}", routes: [{routes}], no_advertise: true }}\n'
        )

    def command(self) -> list[str]:
        """See ``Server.command``."""
        words = super().command()
        with Path(words[-1]).open("a", encoding="utf-8") as config:
            config.write(self.more)
        return words


class KafkaNode(KafkaServer):
    """One of several Kafka brokers, all of which may lead the others."""

    def meet(self, number: int, others: list[KafkaNode]) -> None:
        """Learn its number and who the others are."""
        voters = ",".join(f"{at + 1}@127.0.0.1:{node.controller_port}" for at, node in enumerate(others))
        changed = {
            "node.id": str(number + 1),
            "controller.quorum.voters": voters,
            "broker.session.timeout.ms": "3000",
            "controller.quorum.election.timeout.ms": "1000",
        }
        lines = self._settings.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.partition("=")[0] not in changed]
        kept += [f"{name}={value}" for name, value in changed.items()]
        self._settings.write_text("\n".join(kept) + "\n", encoding="utf-8")
        identity = self.folder / "data" / "meta.properties"
        identity.write_text(
            identity.read_text(encoding="ascii").replace("node.id=1", f"node.id={number + 1}"), encoding="ascii"
        )


@contextmanager
def cluster(kind: str, folder: Path) -> Iterator[list[Server]]:
    """Run three servers of a kind. Skips, or fails in CI, without what they need."""
    servers: list[Server]
    if kind == "nats":
        of_nats = [NatsNode(folder / f"{number}") for number in range(SERVERS)]
        for number, node in enumerate(of_nats):
            node.meet(number, of_nats)
        servers = [*of_nats]
    else:
        of_kafka = [KafkaNode(folder / f"{number}") for number in range(SERVERS)]
        for number, broker in enumerate(of_kafka):
            broker.meet(number, of_kafka)
        servers = [*of_kafka]
    try:
        with ThreadPoolExecutor(SERVERS) as pool:  # none answers before it has met another
            list(pool.map(lambda server: checked(server).start(), servers))
        yield servers
    finally:
        for server in servers:
            server.kill()
