"""Tests of the bus, run again on a log that is a copy of a remote: nothing about them changes."""

from __future__ import annotations

import pytest

from tests.remote.conftest import REMOTES
from tests.test_bus import (
    test_a_bus_that_cannot_start_lets_go_of_everything,
    test_a_thousand_waiting_events_drain_well_below_the_poll_interval,
    test_an_event_published_by_a_handler_is_delivered_without_waiting,
    test_an_event_published_twice_under_its_own_id_is_delivered_once,
    test_an_idle_bus_is_woken_at_once,
    test_every_subscriber_of_a_topic_gets_every_event_once,
    test_publishing_works_before_start_and_after_stop,
    test_two_buses_of_one_process_share_a_store,
)
from tests.test_bus_places import (
    test_events_published_before_the_first_subscribe_are_delivered_while_pending,
    test_one_tenant_sees_nothing_of_another,
)
from tests.test_bus_streams import (
    test_a_stream_registered_by_somebody_else_is_noticed,
    test_a_stream_that_is_deleted_and_made_again_begins_anew,
    test_events_that_retention_removed_are_passed_over,
    test_partitions_keep_the_order_of_each_key_and_lose_nothing,
)

__all__ = [
    "test_a_bus_that_cannot_start_lets_go_of_everything",
    "test_a_stream_registered_by_somebody_else_is_noticed",
    "test_a_stream_that_is_deleted_and_made_again_begins_anew",
    "test_a_thousand_waiting_events_drain_well_below_the_poll_interval",
    "test_an_event_published_by_a_handler_is_delivered_without_waiting",
    "test_an_event_published_twice_under_its_own_id_is_delivered_once",
    "test_an_idle_bus_is_woken_at_once",
    "test_events_published_before_the_first_subscribe_are_delivered_while_pending",
    "test_events_that_retention_removed_are_passed_over",
    "test_every_subscriber_of_a_topic_gets_every_event_once",
    "test_one_tenant_sees_nothing_of_another",
    "test_partitions_keep_the_order_of_each_key_and_lose_nothing",
    "test_publishing_works_before_start_and_after_stop",
    "test_two_buses_of_one_process_share_a_store",
]

pytestmark = pytest.mark.parametrize("remote", REMOTES, indirect=True)
