"""Expressions and events made at random for the comparison with Google's CEL: mostly sensible, often slightly wrong."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from postbus.model import Event

__all__ = ["Maker", "event_of"]

NAMES = ("a", "b", "c", "d", "e")
STRINGS = ("", "a", "b", "ab", "é", "x.y", "1", "true", "😀")
NUMBERS = ("0", "1", "-1", "2", "3", "7", "9223372036854775807", "-9223372036854775808", "0x1F")
DOUBLES = ("0.0", "1.0", "-0.0", "0.5", "2.5", "1e3", "-1.5", "9223372036854775808.0", "9007199254740993.0")
PATTERNS = ("a", "^a", "b$", "[a-z]+", "a|b", ".", "^$", "\\\\d", "é", "(?i)A")
TOPICS = ("a.b", "order.paid")


def event_of(values: dict[str, Any]) -> Event:
    return Event(
        "local.default.journal",
        0,
        0,
        values["topic"],
        values["source"],
        values["variant"],
        values["key"],
        msgspec.json.encode(values["payload"]),
        msgspec.json.encode(values["metadata"]),
        msgspec.json.encode(values["headers"]),
        None,
        None,
        None,
        values["occurred_at_us"],
        0,
    )


class Maker:
    """A source of cases that is the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.scope: list[str] = []

    # --- events ---

    def scalar(self) -> Any:
        pick = self.random.randrange
        return self.random.choice(
            [
                None,
                True,
                False,
                pick(-3, 4),
                pick(-3, 4),
                self.random.choice([0.0, 1.0, -1.0, 0.5, 2.0, 1e300, 9007199254740992.0]),
                self.random.choice([2**63 - 1, -(2**63), 2**53 + 1, 10**15]),
                self.random.choice(STRINGS),
                self.random.choice(STRINGS),
            ]
        )

    def value(self, depth: int = 0) -> Any:
        kind = self.random.random()
        if depth < 3 and kind < 0.25:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        if depth < 3 and kind < 0.5:
            names = self.random.sample(NAMES, self.random.randrange(5))
            return {name: self.value(depth + 1) for name in names}
        return self.scalar()

    def variables(self) -> dict[str, Any]:
        choose = self.random.choice
        payload = {name: self.value(1) for name in NAMES if self.random.random() < 0.9}
        return {
            "payload": payload if self.random.random() < 0.95 else self.value(),
            "metadata": {name: self.value(1) for name in NAMES if self.random.random() < 0.5},
            "headers": {name: choose(STRINGS) for name in NAMES if self.random.random() < 0.5},
            "topic": choose(TOPICS),
            "variant": choose(STRINGS),
            "source": choose(("a", "github:a/b")),
            "key": choose((None, "a", "b")),
            "occurred_at_us": choose((0, 1_700_000_000_000_000, 1_700_000_000_500_000)),
        }

    # --- expressions ---

    def expression(self) -> str:
        self.scope = []
        return self.bool(self.random.choice((1, 2, 3, 4)))

    def any(self, depth: int) -> str:
        return self.random.choice((self.bool, self.number, self.double, self.string, self.list, self.map, self.dyn))(
            depth
        )

    def bool(self, depth: int) -> str:
        if depth <= 0:
            return self.random.choice(("true", "false", self.dyn(0), f"has({self.path()}.{self.random.choice(NAMES)})"))
        deeper = depth - 1
        return self.random.choice(
            (
                self.equality,
                self.equality,
                self.comparison,
                self.comparison,
                lambda d: f"({self.bool(d)} && {self.bool(d)})",
                lambda d: f"({self.bool(d)} || {self.bool(d)})",
                lambda d: f"{self.bool(d)} && {self.bool(d)} || {self.bool(d)}",
                lambda d: f"!({self.bool(d)})",
                lambda d: f"({self.bool(d)} ? {self.bool(d)} : {self.bool(d)})",
                self.membership,
                self.method,
                self.loop,
                self.dyn,
                lambda d: f"{self.any(d)} == {self.any(d)}",
            )
        )(deeper)

    def equality(self, depth: int) -> str:
        make = self.random.choice((self.number, self.double, self.string, self.list, self.map, self.dyn, self.bool))
        sides = [make(depth), self.dyn(depth) if self.random.random() < 0.6 else make(depth)]
        self.random.shuffle(sides)
        return f"{sides[0]} {self.random.choice(('==', '!='))} {sides[1]}"

    def comparison(self, depth: int) -> str:
        make = self.random.choice(
            (self.number, self.number, self.double, self.string, self.bool, self.moment, self.any)
        )
        sides = [make(depth), self.dyn(depth) if self.random.random() < 0.6 else make(depth)]
        self.random.shuffle(sides)
        return f"{sides[0]} {self.random.choice(('<', '<=', '>', '>='))} {sides[1]}"

    def membership(self, depth: int) -> str:
        return f"{self.any(depth)} in {self.random.choice((self.list, self.map, self.dyn))(depth)}"

    def method(self, depth: int) -> str:
        subject = self.random.choice((self.string, self.dyn))(depth)
        name = self.random.choice(("startsWith", "endsWith", "contains", "matches"))
        if name == "matches":
            return f'({subject}).matches("{self.random.choice(PATTERNS)}")'
        return f"({subject}).{name}({self.random.choice((self.string, self.dyn))(depth)})"

    def loop(self, depth: int) -> str:
        items = self.random.choice((self.list, self.dyn, self.dyn, self.map))(depth)
        name = self.random.choice(("x", "y", "payload"))
        self.scope.append(name)
        body = self.bool(depth)
        self.scope.pop()
        return f"({items}).{self.random.choice(('exists', 'all'))}({name}, {body})"

    def number(self, depth: int) -> str:
        if depth <= 0:
            return self.random.choice(NUMBERS)
        deeper = depth - 1
        return self.random.choice(
            (
                lambda _: self.random.choice(NUMBERS),
                lambda d: f"size({self.random.choice((self.string, self.list, self.map, self.dyn))(d)})",
                lambda d: (
                    f"({self.number(d)} {self.random.choice('+-*/%')} {self.random.choice((self.number, self.dyn))(d)})"
                ),
                lambda d: f"({self.dyn(d)} {self.random.choice('+-*/%')} {self.number(d)})",
                lambda d: f"-({self.number(d)})",
                lambda d: f"({self.bool(d)} ? {self.number(d)} : {self.random.choice((self.number, self.dyn))(d)})",
            )
        )(deeper)

    def double(self, depth: int) -> str:
        if depth <= 0 or self.random.random() < 0.4:
            return self.random.choice(DOUBLES)
        other = self.random.choice((self.double, self.dyn))(depth - 1)
        return f"({self.double(depth - 1)} {self.random.choice('+-*/')} {other})"

    def string(self, depth: int) -> str:
        if depth <= 0 or self.random.random() < 0.6:
            quoted = self.random.choice(STRINGS)
            return self.random.choice(
                (f'"{quoted}"', f"'{quoted}'", f"r'{quoted}'", f'"""{quoted}"""', "topic", "variant")
            )
        return f"({self.string(depth - 1)} + {self.random.choice((self.string, self.dyn))(depth - 1)})"

    def list(self, depth: int) -> str:
        if depth <= 0:
            return self.random.choice(("[1, 2]", '["a", "b"]', "[1, 'a', null]", "[true]", "[0.5]"))
        if self.random.random() < 0.2:
            return f"({self.list(depth - 1)} + {self.random.choice((self.list, self.dyn))(depth - 1)})"
        make = self.random.choice((self.number, self.string, self.dyn, self.any))
        return "[" + ", ".join(make(depth - 1) for _ in range(self.random.randrange(1, 4))) + "]"

    def map(self, depth: int) -> str:
        names = self.random.sample(NAMES, self.random.randrange(1, 3))
        return "{" + ", ".join(f'"{name}": {self.any(depth - 1)}' for name in names) + "}"

    def moment(self, _depth: int) -> str:
        texts = ("1970-01-01T00:00:00Z", "2023-11-14T22:13:20Z", "2023-11-14T23:13:20.5+01:00", "nonsense")
        return self.random.choice(("occurred_at", f'timestamp("{self.random.choice(texts)}")', "timestamp(1700000000)"))

    def path(self) -> str:
        variable = self.random.choice(("payload", "payload", "payload", "metadata", *self.scope, *self.scope))
        return variable + "".join(f".{self.random.choice(NAMES)}" for _ in range(self.random.random() < 0.12))

    def dyn(self, depth: int) -> str:
        choose = self.random.choice
        if depth > 0 and self.random.random() < 0.15:
            return f"{self.path()}[{choose((self.number, self.string, self.dyn, self.double))(depth - 1)}]"
        if self.random.random() < 0.1:
            return choose(("key", "headers.a", 'headers["b"]', "metadata.a", "null", *self.scope))
        return f"{self.path()}.{choose(NAMES)}"
