"""What a handler is called with: the event, or its payload as the type its first parameter is annotated with."""

from __future__ import annotations

import asyncio
import inspect
import typing
from typing import TYPE_CHECKING, Any

import msgspec

from postbus.model import Event, Invalid, Reject

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.bus.context import Context

    Bound = Callable[[Event, Context], Awaitable[Any]]

__all__ = ["bind", "name_of"]


def bind(handler: Callable[..., Any]) -> Bound:
    """Return the handler in the one form the bus calls.

    A handler takes the event (or its payload, by annotation: dict, list, msgspec Struct, dataclass, TypedDict, pydantic
    model) and, if it has a second parameter, the ``Context``. Plain functions run on a thread. A payload that is not of
    the annotated type is rejected, which makes it a dead letter at once. Raises ``Invalid`` for any other signature.
    """
    if not callable(handler):
        raise Invalid(f"a handler is a function, not {type(handler).__name__}")
    name = name_of(handler)
    try:
        parameters = [
            parameter
            for parameter in inspect.signature(handler).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
    except (TypeError, ValueError) as error:
        raise Invalid(f"the signature of handler {name} cannot be read") from error
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    if not parameters or (len(required) > 2 and not variadic):  # noqa: PLR2004 - event and context
        raise Invalid(f"handler {name} takes an event and at most a context, like `async def {name}(event, ctx)`")
    decode = _decoder(handler, parameters[0], name)
    with_context = len(required) == 2 or (len(parameters) > 1 and parameters[1].name in ("ctx", "context"))  # noqa: PLR2004 - event and context
    is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - its kind, not its presence

    async def call(event: Event, context: Context) -> Any:
        first = event if decode is None else decode(event)
        arguments = (first, context) if with_context else (first,)
        if is_async:
            return await handler(*arguments)
        return await asyncio.to_thread(handler, *arguments)

    return call


def name_of(handler: Callable[..., Any]) -> str:
    """Return a name for a handler, fit to be a subscriber id."""
    name = getattr(handler, "__qualname__", type(handler).__qualname__).replace("<locals>.", "")
    module = getattr(handler, "__module__", "") or ""
    full = f"{module}.{name}" if module not in ("", "__main__") else name
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in full)[-120:]


def _decoder(handler: Callable[..., Any], first: inspect.Parameter, name: str) -> Callable[[Event], Any] | None:
    wanted = _annotation(handler, first, name)
    if wanted in (Any, Event, inspect.Parameter.empty):
        return None
    validate = getattr(wanted, "model_validate_json", None)
    if validate is None:
        try:
            validate = msgspec.json.Decoder(wanted).decode
        except TypeError as error:
            raise Invalid(f"handler {name} asks for a {wanted!r}, which no payload can be") from error

    def decode(event: Event) -> Any:
        try:
            return validate(event.payload_json)
        except ValueError as error:  # msgspec's and pydantic's refusals are both of this kind
            raise Reject(f"the payload is no {getattr(wanted, '__name__', wanted)}: {error}") from error

    return decode


def _annotation(handler: Callable[..., Any], first: inspect.Parameter, name: str) -> Any:
    if first.annotation is first.empty or first.kind is first.VAR_POSITIONAL:
        return inspect.Parameter.empty
    if not isinstance(first.annotation, str):
        return first.annotation
    function = inspect.unwrap(getattr(handler, "__func__", handler))
    cells = getattr(function, "__closure__", None) or ()
    closure = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=False))
    try:
        return typing.get_type_hints(function, localns=closure).get(first.name, inspect.Parameter.empty)
    except (AttributeError, NameError, TypeError) as error:
        message = f"the annotation {first.annotation!r} of handler {name} cannot be resolved: {error}"
        raise Invalid(message, hint="define the type at the top of its module") from error
