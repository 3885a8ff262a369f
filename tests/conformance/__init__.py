"""One suite per protocol, as a library: each kind declares its features and passes the whole of it."""

import pytest

# The suites are imported, not collected, so pytest has to be told to explain their asserts.
for _module in (
    "broker",
    "log_append",
    "log_concurrency",
    "log_consumers",
    "log_cursors",
    "log_identity",
    "log_interference",
    "log_partitions",
    "log_read",
    "log_restart",
    "log_retention",
    "log_start",
    "log_streams",
    "log_suite",
):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")
