"""What is recorded, how much of it overlaps, and how it is drawn."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from itertools import count
from typing import get_args

import pytest

from polymodel.errors import InvalidRequest
from polymodel.events import LETTERS, Event, Events, Forward, Movement, chrome_trace, max_concurrent, timeline


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
        ([(5, 5), (5, 5)], 0),  # nor does what has no length
        ([(0, 10), (5, 5), (5, 5)], 1),
        ([(0, 5), (5, 5), (5, 10), (5, 7)], 2),
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


def test_time_is_the_clock_that_was_given() -> None:
    ticks = count(10.0, 0.5)
    events = Events(clock=lambda: next(ticks))
    with events.span("verify", "a", tokens=5):
        events.record(Event("evict", "b", 1.0, 2.0, num_bytes=3))
    assert list(events) == [Event("evict", "b", 1.0, 2.0, num_bytes=3), Event("verify", "a", 10.0, 10.5, tokens=5)]
    assert events.of("verify", "evict") == list(events) and events.of("decode") == []


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


def test_every_thread_may_record(switching_often: None) -> None:
    events = Events()

    def record(name: str) -> None:
        for i in range(500):
            with events.span("decode", name, tokens=i):
                pass

    threads = [threading.Thread(target=record, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in "abcd":
        assert [event.tokens for event in events if event.model == name] == list(range(500))


def test_a_timeline_has_a_row_a_model_and_a_letter_for_what_filled_a_column() -> None:
    drawn = [
        Event("turn", "b", 0.0, 4.5),
        Event("prefill", "b", 0.0, 1.0),
        Event("decode", "b", 1.0, 3.0),
        Event("verify", "b", 3.0, 3.75),
        Event("page_out", "b", 5.0, 6.0),
        Event("turn", "long", 4.5, 8.0),
        Event("page_in", "long", 5.0, 6.0),
        Event("draft", "long", 6.0, 6.25),
        Event("evict", "long", 8.0, 8.0),
    ]
    lines = [
        "b    |PPDDDDVV. OO    |",
        "long |         .IIG..E|",
        "     |0.00 s",
        ". turn  P prefill  D decode  V verify  G draft  I page_in  O page_out  E evict  (8.00 s)",
    ]
    assert timeline(drawn, width=16).splitlines() == lines
    assert timeline(reversed(drawn), width=16).splitlines() == lines


def test_a_timeline_of_one_event_of_one_moment_and_of_none() -> None:
    assert timeline([]) == "no events"
    assert timeline([Event("decode", "m", 5.0, 5.004)], width=60).splitlines() == [
        "m |" + "D" * 60 + "|",
        "  |0.00 ms                 |1.67 ms                 |3.33 ms",
        "D decode  (4.00 ms)",
    ]
    moment = [Event("admit", "m", 7.0, 7.0), Event("resume", "n", 7.0, 7.0)]
    assert timeline(moment, width=3).splitlines() == [
        "m |A  |",
        "n |R  |",
        "  |0.00 ms",
        "A admit  R resume  (0.00 ms)",
    ]


def test_a_timeline_keeps_its_width_whatever_it_draws() -> None:
    names = ["short", "a name that is longer than the margin can be"]
    events = [Event("decode", names[i % 2], i * 0.01, (i + 1) * 0.01) for i in range(100_000)]
    events.append(Event("preempt", "short", 504.0, 504.0))
    *rows, axis, legend = timeline(events, width=100).splitlines()
    assert rows[0] == f"{'short':24} |{'D' * 50}X{'D' * 49}|"
    assert rows[1] == f"{names[1][:24]} |{'D' * 100}|"
    assert axis.split() == ["|0.00", "s", "|250.00", "s", "|500.00", "s", "|750.00", "s"]
    assert legend == "D decode  X preempt  (1,000.00 s)"


def test_every_kind_has_a_letter_of_its_own() -> None:
    assert LETTERS.keys() == {"turn", *get_args(Forward), *get_args(Movement)}
    assert len({*LETTERS.values(), " ", "|"}) == len(LETTERS) + 2


def test_a_timeline_without_columns_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 1 column, got 0"):
        timeline([Event("turn", "a", 0.0, 1.0)], width=0)


def test_a_chrome_trace_names_its_rows_and_has_every_event_in_microseconds() -> None:
    events = [
        Event("decode", "a", 1.5, 1.75, tokens=3, sequences=2),
        Event("evict", "b", 2.0, 2.0, num_bytes=10),
        Event("prove", "a", 3.0, 3.5, layers=4),
    ]
    process, *rows, decode, evict, prove = json.loads(chrome_trace(events))["traceEvents"]
    assert (process["ph"], process["name"], process["args"]) == ("M", "process_name", {"name": "polymodel"})
    assert [(r["ph"], r["name"], r["tid"], r["args"]["name"]) for r in rows] == [
        ("M", "thread_name", 0, "a"),
        ("M", "thread_name", 1, "b"),
    ]
    assert decode == {
        **{"name": "decode", "ph": "X", "pid": 0, "tid": 0, "ts": 1_500_000, "dur": 250_000},
        "args": {"tokens": 3, "sequences": 2, "bytes": 0, "layers": 0},
    }
    assert (evict["ph"], evict["s"], evict["tid"], evict["args"]["bytes"]) == ("i", "t", 1, 10)
    assert (prove["tid"], prove["args"]["layers"]) == (0, 4)
    assert [e["ph"] for e in json.loads(chrome_trace([]))["traceEvents"]] == ["M"]
