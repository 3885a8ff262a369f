"""Generated requests from our own OpenAPI document: no 5xx, nothing undocumented, answers as described."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from postbus.server.openapi import document
from postbus.server.table import ROUTES
from tests.faults.campaign import FULL
from tests.server.conftest import RunningServer

EXAMPLES = 40 if FULL else 8

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = RunningServer(tmp_path_factory.mktemp("api"))
    for name in ("local.default.orders", "a.b.c"):
        server.topic(name)
        for number in range(3):
            body = {"topic": name, "payload": {"n": number}, "correlation_id": "0"}
            assert server.client.post("/v1/bus/publish", json=body).status_code == 200
    yield server
    server.stop()


API = schemathesis.openapi.from_dict(document(ROUTES)).exclude(path_regex="/subscribe/|/watch$")  # they do not end


@API.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=[*HealthCheck])
def test_what_the_document_says_is_so(case: Any, running: RunningServer) -> None:
    case.call_and_validate(base_url=running.url, checks=CHECKS)
