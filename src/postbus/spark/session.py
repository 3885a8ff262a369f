"""The one place where a Spark session is configured: Java, the interpreter of the workers, every setting that matters.

A session is opened by a command and closed with it; nothing here runs when the module is imported.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from postbus.clock import SystemClock
from postbus.model import Invalid, NotFound, Unreachable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

__all__ = ["JAVA_MIN", "Settings", "cache_folder", "find_java", "opened_session", "require_pyspark"]

JAVA_MIN = 17
LOCAL = "local[*,4]"  # four attempts: a plain local[*] gives up on the first failure of a task
MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
ARROW_ROWS = 20_000
SETTLED_S = 20
DYING_S = 30.0
CONNECT_PORT = 15002
REACH_S = 10.0
_VERSION = re.compile(r'version "(\d+)')

# What holds for every session, also on a cluster and over Spark Connect.
SQL_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_ROWS),
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.streaming.checkpointFileManagerClass": MANAGER,
    "spark.sql.adaptive.enabled": "true",
}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a session is made. ``remote`` is a Spark Connect address and excludes ``master``."""

    master: str = LOCAL
    remote: str | None = None
    memory: str = "1g"
    ui: bool = False
    shuffle_partitions: int = 8
    more: dict[str, str] = {}


def require_pyspark() -> None:
    """Raise ``NotFound`` with the sentence that installs PySpark when it is not there."""
    try:
        import pyspark  # noqa: F401, PLC0415 - the base package works without it
    except ModuleNotFoundError:
        raise NotFound("PySpark is not installed", hint="pip install 'postbus[spark]'") from None


def find_java() -> tuple[str, int]:
    """Return the path of Java and its major version; raises ``NotFound`` with the sentence that installs it."""
    hint = "install Java 17 or newer, for example: apt-get install -y openjdk-17-jre-headless"
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"JAVA_HOME={home}" if home else "PATH"
        raise NotFound(f"Spark needs Java, and there is none on {where}", hint=hint)
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr  # noqa: S603 - found above
    except (OSError, subprocess.SubprocessError) as error:
        raise NotFound(f"Java at {java} does not run: {error}", hint=hint) from error
    found = _VERSION.search(said)
    major = int(found[1]) if found else 0
    if major < JAVA_MIN:
        raise NotFound(f"Spark needs Java {JAVA_MIN} or newer, and {java} is version {major}", hint=hint)
    return java, major


def cache_folder() -> Path:
    """Return the folder for what can be made again: the class archive and Spark's log."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "postbus"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def opened_session(settings: Settings | None = None) -> Iterator[SparkSession]:
    """Open a session with the ``postbus`` source registered, and stop it at the end.

    Raises ``NotFound`` when Java or PySpark is missing, ``Invalid`` when Spark refuses the settings.
    """
    settings = settings or Settings()
    if settings.remote and settings.master != LOCAL:
        raise Invalid("--master and --remote exclude each other", hint="a Spark Connect server has its own master")
    require_pyspark()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # sockets that PySpark leaves to the collector
        spark = _remote(settings) if settings.remote else _classic(settings)
        try:
            from postbus.spark.source import PostbusDataSource  # noqa: PLC0415 - needs PySpark

            spark.dataSource.register(PostbusDataSource)
            yield spark
        finally:
            _stop(spark)


def _remote(settings: Settings) -> SparkSession:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - needs PySpark

    assert settings.remote is not None  # noqa: S101 - the caller looked
    _reach(settings.remote)
    try:
        spark = SparkSession.builder.remote(settings.remote).getOrCreate()
        for name, value in (SQL_SETTINGS | settings.more).items():
            if name != "spark.sql.streaming.checkpointFileManagerClass":
                spark.conf.set(name, value)
    except ImportError as error:
        message = f"Spark Connect needs packages that are not installed: {_reason(error)}"
        raise NotFound(message, hint="pip install 'pyspark[connect]'") from error
    except Exception as error:
        raise Invalid(f"Spark Connect at {settings.remote} cannot be used: {_reason(error)}") from error
    return spark


def _reach(url: str) -> None:
    """Raise ``Unreachable`` when nobody listens at a Spark Connect address; Spark itself would try for minutes."""
    parts = urlsplit(url.partition(";")[0])
    try:
        if parts.scheme != "sc" or not parts.hostname:
            raise Invalid(f"{url!r} is not the address of a Spark Connect server", hint="write sc://host:15002")
        socket.create_connection((parts.hostname, parts.port or CONNECT_PORT), REACH_S).close()
    except ValueError as error:
        raise Invalid(f"{url!r} is not the address of a Spark Connect server: {error}") from None
    except OSError as error:
        message = f"no Spark Connect server answers at {url}: {error.strerror or error}"
        raise Unreachable(message, hint="start one with sbin/start-connect-server.sh, or use --master") from None


def _classic(settings: Settings) -> SparkSession:
    from py4j.protocol import Py4JError  # noqa: PLC0415 - comes with PySpark
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - needs PySpark
    from pyspark.errors import PySparkException  # noqa: PLC0415
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if SparkContext._active_spark_context is not None:  # noqa: SLF001 - there is no public way to ask
        raise Invalid("a Spark session runs in this process already", hint="stop it first, or use it as it is")
    java, major = find_java()
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        os.environ.setdefault(name, sys.executable)
    conf = SparkConf(loadDefaults=False).setMaster(settings.master).setAppName("postbus")
    for name, value in _settings(settings, java, major).items():
        conf.set(name, value)
    said = cache_folder() / "spark.stderr"
    try:
        gateway = SparkContext._gateway  # noqa: SLF001 - a second session of a process goes on with its JVM
        if gateway is None:
            with said.open("wb") as handle:  # what the JVM and the workers print is for whoever looks for it
                gateway = launch_gateway(conf, {"stderr": handle})  # type: ignore[no-untyped-call]
        context = SparkContext(conf=conf, gateway=gateway)
        context.setLogLevel("ERROR")
    except (PySparkException, Py4JError, OSError) as error:
        first = _reason(error)
        hint = f"Spark's own words are in {said} and {said.with_name('spark.log')}"
        raise Invalid(f"Spark cannot be started with master {settings.master}: {first}", hint=hint) from error
    return SparkSession(context)


def _stop(spark: SparkSession) -> None:
    """Stop a session; one whose JVM was killed is forgotten, so that the next one starts a JVM of its own."""
    from py4j.protocol import Py4JError  # noqa: PLC0415 - comes with PySpark
    from pyspark import SparkContext  # noqa: PLC0415 - needs PySpark
    from pyspark.sql import SparkSession  # noqa: PLC0415

    gateway = SparkContext._gateway  # noqa: SLF001 - as above
    try:
        warnings.simplefilter("ignore", RuntimeWarning)  # that the JVM does not answer
        spark.stop()
    except (Py4JError, OSError):
        process = getattr(gateway, "proc", None)
        if process is None:
            raise
        process.wait(DYING_S)
        SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001
        SparkSession._instantiatedSession = SparkSession._activeSession = None  # noqa: SLF001


def _reason(error: Exception) -> str:
    """Return the one line of an error of Spark's that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.rpartition("Exception: ")[2] for line in lines if "Exception: " in line]
    return (causes or lines or [type(error).__name__])[0]


def _settings(settings: Settings, java: str, major: int) -> dict[str, str]:
    found = SQL_SETTINGS | {
        "spark.ui.enabled": str(settings.ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": settings.memory,
        "spark.sql.shuffle.partitions": str(settings.shuffle_partitions),
        "spark.driver.extraJavaOptions": " ".join(_java_options(java, major)),
    }
    if settings.master.startswith("local"):
        found |= {"spark.driver.host": "localhost", "spark.driver.bindAddress": "127.0.0.1"}
    return found | settings.more


def _java_options(java: str, major: int) -> list[str]:
    log4j = Path(__file__).with_name("log4j2.properties")
    return [
        "-Xss8m",  # the default is too small for Spark's own plans when it stops
        f"-Dlog4j2.configurationFile={log4j.as_uri()}",
        f"-Dpostbus.spark.log={cache_folder() / 'spark.log'}",
        "-Xlog:disable",
        "-Xlog:all=error:stderr",
        *_class_archive(java, major),
    ]


def _class_archive(java: str, major: int) -> list[str]:
    """Return the options that use the archive of loaded classes, or that make it when this session ends.

    It halves the start. A new one is written under the name of its process and takes its place at a later start, when
    it is surely whole.
    """
    from pyspark import __version__  # noqa: PLC0415 - needs PySpark

    kind = re.sub(r"[^A-Za-z0-9]+", "-", str(Path(java).resolve()))
    folder = cache_folder()
    archive = folder / f"spark-{__version__}-java-{major}{kind}.jsa"
    if not archive.exists():
        finished = [path for path in folder.glob(f"{archive.stem}.*.new") if _over(path)]
        if not finished:
            return [f"-XX:ArchiveClassesAtExit={archive.with_suffix(f'.{os.getpid()}.new')}"]
        finished[0].replace(archive)
        for path in finished[1:]:
            path.unlink(missing_ok=True)
    return [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto"]


def _over(path: Path) -> bool:
    """Say whether nobody writes this file any more."""
    stat = path.stat()
    return stat.st_size > 0 and SystemClock().now_us() / 1e6 - stat.st_mtime > SETTLED_S
