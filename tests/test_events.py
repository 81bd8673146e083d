from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator

import pytest

from polymodel.events import Event, Events, chrome_trace, max_concurrent


@pytest.fixture
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def decode(*intervals: tuple[float, float]) -> list[Event]:
    return [Event("decode", "m", start, stop) for start, stop in intervals]


@pytest.mark.parametrize(
    ("intervals", "most"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 1), (1, 2), (2, 3)], 1),  # ends that touch do not overlap
        ([(1, 2), (0, 1)], 1),
        ([(0, 2), (1, 3)], 2),
        ([(0, 10), (1, 2), (3, 4)], 2),
        ([(0, 10), (1, 5), (4, 6), (5, 7)], 3),
        ([(0, 1), (0, 1), (0, 1)], 3),
        ([(0, 3), (1, 2), (2, 3), (2.5, 4)], 3),
    ],
)
def test_overlap_is_counted_from_the_intervals(intervals: list[tuple[float, float]], most: int) -> None:
    assert max_concurrent(decode(*intervals)) == most
    assert max_concurrent(decode(*intervals[::-1])) == most


def test_a_span_records_what_happened_inside() -> None:
    events = Events()
    with events.span("prefill", "a", tokens=7, sequences=2), events.span("decode", "b", num_bytes=9):
        pass
    inner, outer = events
    assert (inner.kind, inner.model, inner.num_bytes) == ("decode", "b", 9)
    assert (outer.kind, outer.model, outer.tokens, outer.sequences) == ("prefill", "a", 7, 2)
    assert outer.start <= inner.start <= inner.stop <= outer.stop
    assert events.of("decode") == [inner] and len(events) == 2
    events.clear()
    assert list(events) == []


def test_what_raises_is_not_recorded() -> None:
    events = Events()
    with pytest.raises(KeyError), events.span("decode", "a"):
        raise KeyError
    assert len(events) == 0


def test_only_the_last_events_are_kept() -> None:
    events = Events(keep=3)
    for i in range(5):
        with events.span("turn", "a", tokens=i):
            pass
    assert [event.tokens for event in events] == [2, 3, 4]


def test_reading_while_another_thread_records(switching_often: None) -> None:
    events, done = Events(keep=50), threading.Event()

    def record() -> None:
        while not done.is_set():
            with events.span("decode", "a"):
                pass

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(2000):
            assert max_concurrent(events) <= 1
    finally:
        done.set()
        thread.join()


def test_chrome_trace_has_every_event_in_microseconds() -> None:
    events = [Event("decode", "a", 1.5, 1.75, tokens=3, sequences=2), Event("admit", "b", 2.0, 2.0, num_bytes=10)]
    first, second = json.loads(chrome_trace(events))["traceEvents"]
    assert (first["name"], first["tid"], first["ph"]) == ("decode", "a", "X")
    assert (first["ts"], first["dur"]) == (1_500_000, 250_000)
    assert first["args"] == {"tokens": 3, "sequences": 2, "bytes": 0, "layers": 0}
    assert (second["dur"], second["args"]["bytes"]) == (0, 10)
