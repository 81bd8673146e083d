"""Whose turn it is on the lane. Pure: names in, a name out."""

from __future__ import annotations

from collections.abc import Sequence


class RoundRobin:
    """Models take turns in the order in which they first had work; a turn is `quantum` decode steps."""

    def __init__(self) -> None:
        self._order: list[str] = []  # whose turn is longest ago comes first

    def pick(self, ready: Sequence[str]) -> str | None:
        """The next of the models that have work, None if there is none."""
        if not ready:
            return None
        self._order = [name for name in self._order if name in ready] + [n for n in ready if n not in self._order]
        name = self._order.pop(0)
        self._order.append(name)
        return name
