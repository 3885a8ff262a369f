"""What runs the tests: none is taken for another, and those of a group stay together."""

from __future__ import annotations

import os
from collections import Counter

import pytest


def test_every_test_has_a_name_of_its_own(request: pytest.FixtureRequest) -> None:
    names = Counter(item.nodeid for item in request.session.items)
    assert [name for name, count in names.items() if count > 1] == [], "xdist runs one of them"


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="nothing is shared out: use -n 2 --dist loadgroup")
@pytest.mark.xdist_group("gate")
def test_the_group_of_a_test_is_part_of_its_name(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@gate")
    grouped = [item for item in request.session.items if item.get_closest_marker("xdist_group")]
    assert [item.nodeid for item in grouped if "@" not in item.nodeid.rpartition("]")[2]] == []
