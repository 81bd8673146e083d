"""The record of what happened when: every turn, forward and movement of weights or pages is one Event."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, get_args

from polymodel.errors import InvalidRequest

# verify is a decode round with drafts; shadow, a drafter tried on tokens that are known; measure, a forward timed
Forward = Literal["prefill", "decode", "verify", "draft", "prove", "shadow", "measure"]
Movement = Literal["admit", "page_in", "page_out", "evict", "prefetch", "preempt", "resume"]
Kind = Literal["turn"] | Forward | Movement

LETTERS: dict[Kind, str] = {  # of the drawn timeline
    "turn": ".",
    "prefill": "P",
    "decode": "D",
    "verify": "V",
    "draft": "G",
    "prove": "C",
    "shadow": "S",
    "measure": "M",
    "admit": "A",
    "page_in": "I",
    "page_out": "O",
    "evict": "E",
    "prefetch": "F",
    "preempt": "X",
    "resume": "R",
}
_DEPTH = {"turn": 0, **dict.fromkeys(get_args(Forward), 1), **dict.fromkeys(get_args(Movement), 2)}
_NAME_WIDTH = 24
_TICK = 25  # columns between two labels of the time axis


@dataclass(frozen=True, slots=True)
class Event:
    kind: Kind
    model: str
    start: float  # seconds by the clock of its Events
    stop: float
    tokens: int = 0
    sequences: int = 0
    num_bytes: int = 0
    layers: int = 0  # that each of the tokens went through


class Events:
    """The last `keep` events, in the order in which they ended. Any thread may record and read."""

    def __init__(self, keep: int = 100_000, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._log: deque[Event] = deque(maxlen=keep)

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._log))

    def __len__(self) -> int:
        return len(self._log)

    def clear(self) -> None:
        self._log.clear()

    def record(self, event: Event) -> None:
        self._log.append(event)

    @contextmanager
    def span(
        self, kind: Kind, model: str, *, tokens: int = 0, sequences: int = 0, num_bytes: int = 0, layers: int = 0
    ) -> Iterator[None]:
        """Record what happens inside; nothing is recorded if it raises."""
        start = self.clock()
        yield
        self.record(Event(kind, model, start, self.clock(), tokens, sequences, num_bytes, layers))

    def of(self, *kinds: Kind) -> list[Event]:
        return [event for event in self if event.kind in kinds]


def max_concurrent(events: Iterable[Event]) -> int:
    """The largest number of these events' intervals that overlap at one moment.

    Ends that touch do not overlap, so an interval of no length overlaps nothing, and does not count.
    """
    edges = sorted(edge for e in events for edge in ((e.start, 1), (e.stop, -1)))  # at one moment, ends come first
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def token_layers(events: Iterable[Event]) -> int:
    """The work of forwards: tokens times the layers that each went through."""
    return sum(event.tokens * event.layers for event in events)


def timeline(events: Iterable[Event], width: int = 100) -> str:
    """The record as text: a row a model, a letter for what took most of a column's time, a legend and a time axis.

    A forward hides the turn it belongs to, and a movement of weights or pages hides both.
    """
    if width < 1:
        raise InvalidRequest(f"timeline: width must be at least 1 column, got {width}")
    if not (log := sorted(events, key=lambda event: event.start)):
        return "no events"
    origin = log[0].start
    span = max(event.stop for event in log) - origin
    scale = width / span if span else 0.0
    covered: dict[tuple[str, int], dict[Kind, float]] = {}  # model and column -> kind -> columns
    for event in log:
        start, stop = round((event.start - origin) * scale, 6), round((event.stop - origin) * scale, 6)
        first = min(int(start), width - 1)
        for column in range(first, max(first + 1, ceil(stop))):
            cell = covered.setdefault((event.model, column), {})
            cell[event.kind] = cell.get(event.kind, 0.0) + min(stop, column + 1) - max(start, column)
    models = dict.fromkeys(event.model for event in log)
    margin = min(max(map(len, models)), _NAME_WIDTH)
    lines = [
        f"{model[:margin]:{margin}} |{''.join(_letter(covered.get((model, i))) for i in range(width))}|"
        for model in models
    ]
    ticks = range(0, width if span else 1, _TICK)
    axis = "".join(f"|{_duration(tick * span / width, span)}".ljust(_TICK) for tick in ticks)
    kinds = {event.kind for event in log}
    legend = "  ".join(f"{letter} {kind}" for kind, letter in LETTERS.items() if kind in kinds)
    return "\n".join([*lines, f"{'':{margin}} {axis}".rstrip(), f"{legend}  ({_duration(span, span)})"])


def _letter(cell: dict[Kind, float] | None) -> str:
    return LETTERS[max(cell, key=lambda kind: (_DEPTH[kind], cell[kind]))] if cell else " "


def _duration(seconds: float, span: float) -> str:
    """In the unit that suits a span of time."""
    return f"{seconds:,.2f} s" if span >= 1 else f"{seconds * 1e3:.2f} ms"


def chrome_trace(events: Iterable[Event]) -> str:
    """The events as a Chrome trace (chrome://tracing, Perfetto): a named row a model, microseconds."""
    rows: dict[str, int] = {}
    entries: list[dict[str, Any]] = []
    for e in events:
        length = {"ph": "X", "dur": (e.stop - e.start) * 1e6} if e.stop > e.start else {"ph": "i", "s": "t"}
        args = {"tokens": e.tokens, "sequences": e.sequences, "bytes": e.num_bytes, "layers": e.layers}
        row = {"pid": 0, "tid": rows.setdefault(e.model, len(rows))}
        entries.append({"name": e.kind, "ts": e.start * 1e6, **row, **length, "args": args})
    names = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "polymodel"}},
        *({"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": m}} for m, row in rows.items()),
    ]
    return json.dumps({"traceEvents": names + entries})
