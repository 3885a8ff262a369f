"""Tests of the inboxes' pump, run again on a log that is a copy of a remote: nothing about them changes."""

from __future__ import annotations

import pytest

from tests.inbox.conftest import post
from tests.inbox.test_messages import test_messages_and_events_have_one_order
from tests.inbox.test_pump import (
    test_a_long_history_does_not_delay_who_has_caught_up,
    test_a_reset_gives_nothing_twice,
    test_a_stream_that_is_deleted_and_made_again_is_read_from_its_beginning,
    test_a_stream_that_is_made_later_is_read_from_its_beginning,
    test_all_partitions_are_read_and_each_key_stays_in_order,
    test_an_event_that_two_subscriptions_match_is_one_item,
    test_an_item_carries_the_facts_of_its_event_and_why_it_is_there,
    test_matching_events_become_items_in_order_and_others_do_not,
    test_stopping_saves_every_place,
    test_two_pumps_on_one_store_make_each_item_once,
)
from tests.remote.conftest import REMOTES

__all__ = [
    "post",
    "test_a_long_history_does_not_delay_who_has_caught_up",
    "test_a_reset_gives_nothing_twice",
    "test_a_stream_that_is_deleted_and_made_again_is_read_from_its_beginning",
    "test_a_stream_that_is_made_later_is_read_from_its_beginning",
    "test_all_partitions_are_read_and_each_key_stays_in_order",
    "test_an_event_that_two_subscriptions_match_is_one_item",
    "test_an_item_carries_the_facts_of_its_event_and_why_it_is_there",
    "test_matching_events_become_items_in_order_and_others_do_not",
    "test_messages_and_events_have_one_order",
    "test_stopping_saves_every_place",
    "test_two_pumps_on_one_store_make_each_item_once",
]

pytestmark = pytest.mark.parametrize("remote", REMOTES, indirect=True)
