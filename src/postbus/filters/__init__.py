"""Content filters: parse, check, compile, index. The one matcher there is."""

from __future__ import annotations

from postbus.filters.filter import Explanation, Filter, Reason, compile_filter
from postbus.filters.index import FilterIndex
from postbus.filters.view import View

__all__ = ["Explanation", "Filter", "FilterIndex", "Reason", "View", "compile_filter"]
