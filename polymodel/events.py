"""The record of what happened when: every admission, prefill chunk, decode step and eviction is one Event."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["admit", "evict", "turn", "prefill", "decode", "draft", "prove"]


@dataclass(frozen=True, slots=True)
class Event:
    kind: Kind
    model: str
    start: float  # seconds, time.perf_counter
    stop: float
    tokens: int = 0
    sequences: int = 0
    num_bytes: int = 0
    layers: int = 0  # that each of the tokens went through


class Events:
    """The last `keep` events, oldest first."""

    def __init__(self, keep: int = 100_000) -> None:
        self._log: deque[Event] = deque(maxlen=keep)

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._log))

    def __len__(self) -> int:
        return len(self._log)

    def clear(self) -> None:
        self._log.clear()

    @contextmanager
    def span(
        self, kind: Kind, model: str, *, tokens: int = 0, sequences: int = 0, num_bytes: int = 0, layers: int = 0
    ) -> Iterator[None]:
        """Record what happens inside; nothing is recorded if it raises."""
        start = time.perf_counter()
        yield
        self._log.append(Event(kind, model, start, time.perf_counter(), tokens, sequences, num_bytes, layers))

    def of(self, kind: Kind) -> list[Event]:
        return [event for event in self if event.kind == kind]


def max_concurrent(events: Iterable[Event]) -> int:
    """The largest number of these events' intervals that overlap at one moment; touching ends do not."""
    edges = sorted(edge for e in events for edge in ((e.start, 1), (e.stop, -1)))  # at one moment, ends come first
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def token_layers(events: Iterable[Event]) -> int:
    """The work of forwards: tokens times the layers that each went through."""
    return sum(event.tokens * event.layers for event in events)


def chrome_trace(events: Iterable[Event]) -> str:
    """The events as a Chrome trace (chrome://tracing, Perfetto): one row a model, microseconds."""
    rows = [
        {
            "name": e.kind,
            "ph": "X",
            "pid": 0,
            "tid": e.model,
            "ts": e.start * 1e6,
            "dur": (e.stop - e.start) * 1e6,
            "args": {"tokens": e.tokens, "sequences": e.sequences, "bytes": e.num_bytes, "layers": e.layers},
        }
        for e in events
    ]
    return json.dumps({"traceEvents": rows})
