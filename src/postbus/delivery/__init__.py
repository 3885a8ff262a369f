"""Delivery for one subscription: claim, lease, ack, retry, dead-letter."""

from postbus.delivery.backoff import retry_delay_s
from postbus.delivery.lane import Lane
from postbus.delivery.runner import Runner, RunnerSettings
from postbus.delivery.table import DeliveryTable, LaneKey, LaneState, Row, Settlement
from postbus.delivery.work import Outcome, Verdict, Work

__all__ = [
    "DeliveryTable",
    "Lane",
    "LaneKey",
    "LaneState",
    "Outcome",
    "Row",
    "Runner",
    "RunnerSettings",
    "Settlement",
    "Verdict",
    "Work",
    "retry_delay_s",
]
