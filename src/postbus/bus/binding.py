"""What a handler is called with: the event, or its payload as the type its first parameter is annotated with."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
import typing
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import msgspec
import msgspec.inspect

from postbus.model import Event, Invalid, Reject

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from postbus.bus.context import Context

    Bound = Callable[[Event, Context], Awaitable[Any]]

__all__ = ["bind", "name_of"]

THREADS_MAX = 64


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
        found = [*inspect.signature(handler).parameters.values()]
    except (TypeError, ValueError) as error:
        raise Invalid(f"the signature of handler {name} cannot be read") from error
    parameters = [one for one in found if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
    required = [
        one for one in found if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if not parameters or len(required) > 2 or any(one.kind is one.KEYWORD_ONLY for one in required):  # noqa: PLR2004 - event and context
        raise Invalid(f"handler {name} takes an event and at most a context, like `async def {name}(event, ctx)`")
    decode = _decoder(handler, parameters[0], name)
    with_context = len(required) == 2 or (len(parameters) > 1 and parameters[1].name in ("ctx", "context"))  # noqa: PLR2004 - event and context
    is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - its kind, not its presence
    # Threads of its own: plain functions that hang must not take those of other handlers.
    pool = None if is_async else ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="postbus-handler")

    async def call(event: Event, context: Context) -> Any:
        first = event if decode is None else decode(event)
        arguments = (first, context) if with_context else (first,)
        if pool is None:
            return await handler(*arguments)
        result = await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, handler, *arguments)
        return await result if inspect.isawaitable(result) else result

    return call


def name_of(handler: Callable[..., Any]) -> str:
    """Return a name for a handler, fit to be a subscriber id."""
    name = getattr(handler, "__qualname__", type(handler).__qualname__).replace("<locals>.", "")
    module = getattr(handler, "__module__", "") or ""
    full = f"{module}.{name}" if module not in ("", "__main__") else name
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in full)[
        -120:
    ]


def _decoder(handler: Callable[..., Any], first: inspect.Parameter, name: str) -> Callable[[Event], Any] | None:
    wanted = _annotation(handler, first, name)
    if wanted in (Any, Event, object, inspect.Parameter.empty):
        return None
    validate = getattr(wanted, "model_validate_json", None)
    if validate is None:
        try:
            if isinstance(msgspec.inspect.type_info(wanted), msgspec.inspect.CustomType):
                raise TypeError  # noqa: TRY301 - as a type that msgspec refuses by itself
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
    function: Any = handler
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, types.FunctionType | types.MethodType):
        function = type(function).__call__  # an object that can be called
    function = inspect.unwrap(getattr(function, "__func__", function))
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    closure = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True) if _filled(cell)}
    # Only the first parameter matters; names that exist for type checkers only may stand in the others.
    alone = types.SimpleNamespace(__annotations__={first.name: first.annotation})
    try:
        return typing.get_type_hints(alone, getattr(function, "__globals__", {}), closure)[first.name]
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        if first.annotation.rpartition(".")[2] == Event.__name__:
            return Event
        message = f"the annotation {first.annotation!r} of handler {name} cannot be resolved: {error}"
        raise Invalid(message, hint="define the type at the top of its module") from error


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
