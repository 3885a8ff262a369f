"""Lets Spark find the ``postbus`` data source by itself: it imports modules whose name begins with ``pyspark_``."""

from __future__ import annotations

from postbus.spark.source import PostbusDataSource as DefaultSource

__all__ = ["DefaultSource"]
