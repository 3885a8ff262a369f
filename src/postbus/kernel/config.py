"""The config of an extension as a record of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from postbus.model import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["read_config"]

Kind = TypeVar("Kind", bound=msgspec.Struct)


def read_config(config: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """Return a config as a record; raises ``Invalid`` with what is wrong with it and the keys there are."""
    try:
        return msgspec.convert(dict(config), kind)
    except msgspec.ValidationError as error:
        fields = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        raise Invalid(f"the config is wrong: {error}", hint=f"it has {fields}") from None
