"""Who must come before whom: extensions in the order of their dependencies, and why some cannot come at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["arrange", "dependents"]


def arrange(needs: Mapping[str, Sequence[str]]) -> tuple[list[str], dict[str, str]]:
    """Return the ids in an order in which each comes after what it needs, and the reason of each that is in no order.

    Those without a reason to wait stand in the order given. Members of a cycle have a reason; what needs them stands in
    the order, behind them, since whether they run is known only later. Missing ones are reasons too.
    """
    reasons = {}
    for name, wanted in needs.items():
        missing = [other for other in wanted if other not in needs]
        if missing:
            reasons[name] = f"it depends on {missing[0]}, which is not there"
    for name in needs:
        circle = _circle(name, needs)
        if circle:
            reasons.setdefault(name, f"it depends on itself: {' → '.join(circle)}")
    ordered: list[str] = []
    left = dict.fromkeys(needs)
    while left:
        ready = [name for name in left if all(other not in left or other in reasons for other in needs[name])]
        # Whoever is in a circle has a reason, so somebody is always ready.
        first = next((name for name in ready if name not in reasons), None) or next(
            name for name in left if name in reasons
        )
        ordered.append(first)
        del left[first]
    return [name for name in ordered if name not in reasons], reasons


def dependents(name: str, needs: Mapping[str, Sequence[str]]) -> set[str]:
    """Return everybody who needs somebody, through others too."""
    found: set[str] = set()
    edge = {name}
    while edge:
        edge = {other for other, wanted in needs.items() if edge & set(wanted)} - found
        found |= edge
    return found


def _circle(name: str, needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the shortest way from somebody back to itself, or nothing."""
    paths = [[name]]
    seen = set()
    while paths:
        longer = []
        for path in paths:
            for other in needs.get(path[-1], ()):
                if other == name:
                    return [*path, name]
                if other not in seen:
                    seen.add(other)
                    longer.append([*path, other])
        paths = longer
    return []
