"""The log's conformance suite: a kind of log is one that passes ``LogConformance``.

A kind subclasses it, declares ``features`` and ``open``; pytest collects the subclass. See ``test_log_kinds.py``.
"""

from __future__ import annotations

from tests.conformance.log_append import AppendRules
from tests.conformance.log_concurrency import ConcurrencyRules
from tests.conformance.log_consumers import ConsumerRules
from tests.conformance.log_cursors import CursorRules
from tests.conformance.log_identity import IdentityRules
from tests.conformance.log_interference import InterferenceRules
from tests.conformance.log_partitions import PartitionRules
from tests.conformance.log_read import ReadRules
from tests.conformance.log_restart import RestartRules
from tests.conformance.log_retention import RetentionRules
from tests.conformance.log_start import StartRules
from tests.conformance.log_streams import StreamRules
from tests.conformance.log_suite import LogFeatures

__all__ = ["LogConformance", "LogFeatures"]


class LogConformance(
    StreamRules,
    AppendRules,
    IdentityRules,
    ReadRules,
    PartitionRules,
    ConsumerRules,
    StartRules,
    CursorRules,
    RetentionRules,
    ConcurrencyRules,
    InterferenceRules,
    RestartRules,
):
    """Every rule of the log contract."""
