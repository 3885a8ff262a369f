from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no bug: how long an example took says nothing.
settings.register_profile("postbus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("postbus")

# In the background of a shell SIGINT is ignored, and so it would be by every process that a test wants to interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What only one worker may run comes first, the longest before the rest, so that none is left alone with it."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        folder = item.nodeid.partition("/")[2].partition("/")[0]
        return folder != "spark", item.get_closest_marker("xdist_group") is None

    items.sort(key=place)
    for item in items:
        _name(item, grouped=getattr(config.option, "loadgroup", False))


def _name(item: pytest.Item, *, grouped: bool) -> None:
    """Give a test the name that plugins gave it where pytest 9.2 no longer looks.

    Schemathesis adds the operation: without it xdist takes them all for one test and runs one. Xdist adds the group
    (its issue 1386): without it every worker gets some of it.
    """
    known = getattr(item, "_id", None)
    if known is None or item.parent is None:
        return
    name = f"{item.parent.nodeid}::{item.name}"
    groups = {str(mark.args[0]) for mark in item.iter_markers("xdist_group")} if grouped else set()
    if groups:
        name += "@" + "_".join(sorted(groups))
    if name != item.nodeid:
        item._id = type(known).parse(name)  # there is no public way
