from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from postbus.model import NotFound
from postbus.spark.session import Settings, find_java, opened_session
from tests.spark.office import Office
from tools.services import Missing, connector_jars, fetch_connector

HERE = Path(__file__).parent
TEST_SETTINGS = Settings(master="local[2,4]", shuffle_partitions=2)

# Of what a JVM does in a life this short, compiling once more and collecting in parallel would be nearly half.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only one worker runs Spark; without Java a laptop skips, and CI fails."""
    here = [item for item in items if item.path.is_relative_to(HERE)]
    try:
        find_java()
        skip = None
    except NotFound as error:
        skip = None if os.environ.get("CI") == "true" else pytest.mark.skip(reason=f"{error.message}: {error.hint}")
    for item in here:
        item.add_marker(pytest.mark.xdist_group("spark"))
        if skip is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session of all tests here, with Spark's Kafka source when it was fetched."""
    try:
        more = {"spark.jars": ",".join(map(str, found_connector()))}
    except Missing:
        more = {}  # the tests that need it say so
    with opened_session(msgspec.structs.replace(TEST_SETTINGS, more=more)) as session:
        yield session


@pytest.fixture
def connector() -> list[Path]:
    """The jars of Spark's Kafka source; without them a laptop skips, and CI fails."""
    try:
        return found_connector()
    except Missing as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


def found_connector() -> list[Path]:
    if os.environ.get("CI") == "true":
        fetch_connector()
    return connector_jars()


@pytest.fixture
def office(tmp_path: Path) -> Office:
    """A store in a folder of its own, and short ways to fill it."""
    return Office(tmp_path / "data")
