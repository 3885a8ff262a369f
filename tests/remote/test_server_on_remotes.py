"""Tests of the service, run again on a log that is a copy of a remote: nothing about them changes."""

from __future__ import annotations

import pytest

from tests.remote.conftest import REMOTES
from tests.server.conftest import client, server, start_server
from tests.server.test_subscriptions import (
    test_a_long_poll_ends_with_an_event_or_with_its_time,
    test_after_a_restart_only_what_was_not_acked_comes_again,
    test_payload_bytes_come_out_as_they_went_in,
    test_pull_ack_nack_and_extend,
    test_reset,
    test_the_seed_word_for_word,
    test_unacked_events_come_again_and_end_as_dead_letters,
    test_where_a_subscription_starts,
)

__all__ = [
    "client",
    "server",
    "start_server",
    "test_a_long_poll_ends_with_an_event_or_with_its_time",
    "test_after_a_restart_only_what_was_not_acked_comes_again",
    "test_payload_bytes_come_out_as_they_went_in",
    "test_pull_ack_nack_and_extend",
    "test_reset",
    "test_the_seed_word_for_word",
    "test_unacked_events_come_again_and_end_as_dead_letters",
    "test_where_a_subscription_starts",
]

pytestmark = pytest.mark.parametrize("remote", REMOTES, indirect=True)
