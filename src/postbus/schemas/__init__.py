"""JSON Schemas bound to streams, checked at the publish edge."""

from __future__ import annotations

from postbus.schemas.document import Document, Issue
from postbus.schemas.registry import Binding, BindReport, Refused, Schemas, SchemaVersion

__all__ = ["BindReport", "Binding", "Document", "Issue", "Refused", "SchemaVersion", "Schemas"]
