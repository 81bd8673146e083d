"""Provisional spans: kept by every sink or dropped by every sink, whatever fails and in whatever order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymodel.errors import InvalidRequest
from polymodel.provisional import BufferSink, Provisional, Sink, Spans

PHASES = ("open", "prepare", "commit", "rollback", "close")


class Broken(Exception):
    """What a sink raises here."""


class Tokens:
    """The smallest sink: a list that is cut."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.starts: dict[int, int] = {}
        self.stops: dict[int, int] = {}

    def open(self, epoch: int) -> None:
        self.starts[epoch] = len(self.tokens)

    def prepare(self, epoch: int, kept: int | None) -> None:
        size = len(self.tokens) - self.starts[epoch]
        if kept is not None and kept > size:
            raise InvalidRequest(f"{kept} of {size} tokens")
        self.stops[epoch] = self.starts[epoch] + (size if kept is None else kept)

    def commit(self, epoch: int) -> None:
        del self.tokens[self.stops[epoch] :]

    def rollback(self, epoch: int) -> None:
        del self.tokens[self.starts[epoch] :]

    def close(self, epoch: int) -> None:
        del self.starts[epoch]
        self.stops.pop(epoch, None)


class Watched:
    """A sink whose calls are logged, and that raises once it is told where."""

    def __init__(self, sink: Sink, name: str, log: list[str]) -> None:
        self.sink, self.name, self.log = sink, name, log
        self.breaks_before: set[str] = set()
        self.breaks_after: set[str] = set()

    def _call(self, phase: str, call: Callable[[], None]) -> None:
        self.log.append(f"{phase} {self.name}")
        if phase in self.breaks_before:
            raise Broken(f"before {phase} {self.name}")
        call()
        if phase in self.breaks_after:
            raise Broken(f"after {phase} {self.name}")

    def open(self, epoch: int) -> None:
        self._call("open", lambda: self.sink.open(epoch))

    def prepare(self, epoch: int, kept: int | None) -> None:
        self._call("prepare", lambda: self.sink.prepare(epoch, kept))

    def commit(self, epoch: int) -> None:
        self._call("commit", lambda: self.sink.commit(epoch))

    def rollback(self, epoch: int) -> None:
        self._call("rollback", lambda: self.sink.rollback(epoch))

    def close(self, epoch: int) -> None:
        self._call("close", lambda: self.sink.close(epoch))


class Trio:
    """Three watched lists of tokens and one owner's spans over them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.lists = [Tokens(1, 2) for _ in "abc"]
        self.a, self.b, self.c = self.sinks = [
            Watched(tokens, name, self.log) for tokens, name in zip(self.lists, "abc", strict=True)
        ]
        self.spans = Spans()

    def open(self, *tokens: int) -> Provisional:
        span = self.spans.open(self.sinks)
        self.write(*tokens)
        self.log.clear()
        return span

    def write(self, *tokens: int) -> None:
        for one in self.lists:
            one.tokens += tokens

    @property
    def tokens(self) -> list[int]:
        first, *others = [one.tokens for one in self.lists]
        assert all(other == first for other in others)
        return first

    def is_closed(self) -> bool:
        return self.spans.num_open == 0 and not any(one.starts or one.stops for one in self.lists)


@pytest.mark.parametrize(
    ("path", "kept"),
    [(None, [3, 4, 5]), (0, []), (2, [3, 4]), (3, [3, 4, 5]), ([], []), ([0], [3]), ((0, 1, 2), [3, 4, 5])],
)
def test_a_promoted_span_keeps_its_path(path: Sequence[int] | int | None, kept: list[int]) -> None:
    trio = Trio()
    with trio.open(3, 4, 5) as span:
        span.promote(path)
        assert (span.outcome, trio.tokens) == ("promoted", [1, 2, *kept])
    assert trio.tokens == [1, 2, *kept] and trio.is_closed()


def test_a_span_rolled_back_leaves_what_was_there_before() -> None:
    trio = Trio()
    span = trio.open(3, 4, 5)
    assert (span.outcome, trio.spans.num_open) == ("open", 1)
    span.rollback()
    assert (span.outcome, trio.tokens) == ("rolled back", [1, 2]) and trio.is_closed()


@pytest.mark.parametrize("path", [-1, [1], [0, 2], [0, 0], [1, 0], [0, 1, 1]])
def test_a_path_that_is_not_the_first_tokens_is_refused(path: Sequence[int] | int) -> None:
    trio = Trio()
    span = trio.open(3, 4, 5)
    with pytest.raises(InvalidRequest) as caught:
        span.promote(path)
    assert str(path) in str(caught.value)
    assert (span.outcome, trio.tokens, trio.log) == ("open", [1, 2, 3, 4, 5], [])


def test_all_prepare_then_all_commit_then_all_close() -> None:
    trio = Trio()
    trio.open().promote()
    assert trio.log == [f"{phase} {name}" for phase in ("prepare", "commit", "close") for name in "abc"]


def test_a_rollback_runs_backwards_and_then_all_close() -> None:
    trio = Trio()
    trio.open().rollback()
    assert trio.log == [*("rollback c", "rollback b", "rollback a"), *("close a", "close b", "close c")]


def test_a_sink_that_does_not_prepare_leaves_the_span_open() -> None:
    trio = Trio()
    span = trio.open(3, 4)
    trio.lists[1].tokens.pop()
    with pytest.raises(InvalidRequest, match="2 of 1 tokens"):
        span.promote(2)
    assert trio.log == ["prepare a", "prepare b"]
    assert (span.outcome, trio.spans.num_open) == ("open", 1)
    assert [one.tokens for one in trio.lists] == [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4]]
    span.promote(1)
    assert trio.tokens == [1, 2, 3] and trio.is_closed()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_sink_that_does_not_commit_rolls_all_of_them_back(name: str, when: str) -> None:
    trio = Trio()
    span = trio.open(3, 4)
    getattr(getattr(trio, name), f"breaks_{when}").add("commit")
    with pytest.raises(Broken, match=f"{when} commit {name}"):
        span.promote(1)
    assert trio.log[-6:] == [*("rollback c", "rollback b", "rollback a"), *("close a", "close b", "close c")]
    assert (span.outcome, trio.tokens) == ("rolled back", [1, 2]) and trio.is_closed()


def test_the_error_of_a_commit_carries_those_of_its_compensation() -> None:
    trio = Trio()
    span = trio.open(3)
    trio.b.breaks_before.add("commit")
    trio.c.breaks_after.add("rollback")
    trio.a.breaks_after.add("close")
    with pytest.raises(Broken, match="before commit b") as caught:
        span.promote()
    notes = caught.value.__notes__
    assert len(notes) == 2 and "after rollback c" in notes[0] and "after close a" in notes[1]
    assert trio.tokens == [1, 2] and trio.is_closed()


def test_every_sink_is_rolled_back_though_others_raise() -> None:
    trio = Trio()
    span = trio.open(3)
    for sink in (trio.a, trio.c):
        sink.breaks_after.add("rollback")
    with pytest.raises(Broken, match="after rollback c") as caught:
        span.rollback()
    assert len(caught.value.__notes__) == 1 and "after rollback a" in caught.value.__notes__[0]
    assert trio.tokens == [1, 2] and trio.is_closed()


def test_a_sink_that_does_not_close_leaves_the_span_promoted() -> None:
    trio = Trio()
    span = trio.open(3)
    trio.a.breaks_after.add("close")
    with pytest.raises(Broken, match="after close a"):
        span.promote()
    assert (span.outcome, trio.tokens) == ("promoted", [1, 2, 3]) and trio.is_closed()


def test_opening_is_all_or_nothing() -> None:
    trio = Trio()
    trio.b.breaks_before.add("open")
    with pytest.raises(Broken, match="before open b"):
        trio.spans.open(trio.sinks)
    assert trio.log == ["open a", "open b", "rollback a", "close a"]
    assert trio.tokens == [1, 2] and trio.is_closed()


def test_a_sink_named_twice_is_refused() -> None:
    trio = Trio()
    with pytest.raises(InvalidRequest, match="one of 4 sinks is there twice"):
        trio.spans.open([*trio.sinks, trio.a])
    assert trio.log == [] and trio.is_closed()


def test_deciding_again_is_nothing_and_otherwise_is_refused() -> None:
    trio = Trio()
    kept = trio.open(3)
    kept.promote()
    trio.write(4)
    trio.log.clear()
    kept.promote(0)
    with pytest.raises(InvalidRequest, match="rollback: the span of epoch 0 was promoted already"):
        kept.rollback()
    dropped = trio.open(5)
    dropped.rollback()
    trio.log.clear()
    dropped.rollback()
    with pytest.raises(InvalidRequest, match="promote: the span of epoch 1 was rolled back already"):
        dropped.promote()
    assert (trio.tokens, trio.log) == ([1, 2, 3, 4], []) and trio.is_closed()


def test_spans_nest_and_no_epoch_is_used_twice() -> None:
    trio = Trio()
    outer = trio.open(3)
    first = trio.open(4)
    first.rollback()
    second = trio.open(5)
    assert [(span.epoch, span.parent) for span in (outer, first, second)] == [(0, None), (1, 0), (2, 0)]
    assert trio.spans.num_open == 2
    second.promote()
    outer.promote()
    assert trio.tokens == [1, 2, 3, 5] and trio.is_closed()


def test_an_outer_span_is_not_promoted_before_the_inner_one() -> None:
    trio = Trio()
    outer, inner = trio.open(3), trio.open(4)
    with pytest.raises(InvalidRequest, match="epoch 1 is still open inside epoch 0"):
        outer.promote()
    assert (outer.outcome, inner.outcome, trio.log) == ("open", "open", [])
    inner.promote()
    outer.promote()
    assert trio.tokens == [1, 2, 3, 4] and trio.is_closed()


def test_an_outer_rollback_takes_the_inner_spans_with_it() -> None:
    trio = Trio()
    outer, kept = trio.open(3), trio.open(4)
    kept.promote()
    inner = trio.open(5)
    innermost = trio.open(6)
    for sink in trio.sinks:
        sink.breaks_after.add("rollback")
    with pytest.raises(Broken) as caught:
        outer.rollback()
    assert [span.outcome for span in (outer, kept, inner, innermost)] == [
        *("rolled back", "promoted", "rolled back", "rolled back")
    ]
    assert [note.split(",")[0] for note in caught.value.__notes__] == ["epoch 3"] * 2 + ["epoch 2"] * 3 + [
        "epoch 0"
    ] * 3
    assert trio.tokens == [1, 2] and trio.is_closed()


def test_a_block_left_undecided_rolls_back() -> None:
    trio = Trio()
    with trio.open(3) as outer, trio.open(4) as inner:
        pass
    assert (outer.outcome, inner.outcome, trio.tokens) == ("rolled back", "rolled back", [1, 2]) and trio.is_closed()


def test_an_error_leaves_its_block_rolled_back_and_goes_on() -> None:
    trio = Trio()
    trio.b.breaks_after.add("rollback")
    with pytest.raises(KeyError, match="user") as caught, trio.open(3):
        raise KeyError("user")
    assert len(caught.value.__notes__) == 1 and "after rollback b" in caught.value.__notes__[0]
    assert trio.tokens == [1, 2] and trio.is_closed()


def test_a_rollback_that_fails_at_the_end_of_a_block_is_raised() -> None:
    trio = Trio()
    trio.b.breaks_after.add("rollback")
    with pytest.raises(Broken, match="after rollback b"), trio.open(3):
        pass
    assert trio.tokens == [1, 2] and trio.is_closed()


def test_staged_effects_are_seen_after_the_outermost_promote() -> None:
    sink, spans = BufferSink[str](), Spans()
    with pytest.raises(InvalidRequest, match=r"stage\('early'\): no span is open"):
        sink.stage("early")
    with spans.open([sink]) as outer:
        sink.stage("mail")
        with spans.open([sink]) as inner:
            sink.stage("print")
            inner.promote()
        with spans.open([sink]):
            sink.stage("dropped")
        assert sink.effects == []
        sink.stage("ring")
        outer.promote(0)
    assert sink.effects == ["mail", "print", "ring"]
    with spans.open([sink]):
        sink.stage("dropped")
        with spans.open([sink]) as inner:
            sink.stage("dropped too")
            inner.promote()
    assert sink.effects == ["mail", "print", "ring"] and spans.num_open == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_effects_seen_too_early_are_taken_back(depth: int) -> None:
    sink, spans, log = BufferSink[str](), Spans(), list[str]()
    late = Watched(Tokens(), "late", log)
    late.breaks_before.add("commit")
    outer = [spans.open([sink]) for _ in range(1, depth)]
    for _ in outer:
        sink.stage("kept")
    with spans.open([sink, late]) as span:
        sink.stage("dropped")
        with pytest.raises(Broken):
            span.promote()
    for other in outer:
        other.promote()
    assert sink.effects == ["kept"] * len(outer) and spans.num_open == 0


STEPS = st.one_of(
    st.tuples(st.just("open"), st.just(0)),
    st.tuples(st.just("write"), st.integers(1, 3)),
    st.tuples(st.just("promote"), st.one_of(st.none(), st.integers(0, 4))),
    st.tuples(st.just("rollback"), st.integers(0, 3)),
    st.tuples(st.just("break"), st.tuples(st.integers(0, 3), st.sampled_from(PHASES), st.booleans())),
)


@given(st.lists(STEPS, max_size=40))
def test_sinks_agree_whatever_fails(steps: list[tuple[str, object]]) -> None:
    """Against a list of tokens and a list of effects, cut where a span began."""
    trio, buffer = Trio(), BufferSink[int]()
    sinks = [*trio.sinks, Watched(buffer, "buffer", trio.log)]
    stack: list[tuple[Provisional, int, int]] = []
    tokens, effects, visible = [1, 2], list[int](), list[int]()
    next_token = 3

    def broken(*phases: str) -> bool:
        return any((sink.breaks_before | sink.breaks_after) & set(phases) for sink in sinks)

    def raises_if(fails: bool) -> AbstractContextManager[object]:
        return pytest.raises(Broken) if fails else nullcontext()

    def dropped(first: int) -> None:
        _, num_tokens, num_effects = stack[first]
        del stack[first:], tokens[num_tokens:], effects[num_effects:]

    for verb, value in [*steps, ("rollback", 0)]:
        match verb, value:
            case "break", (int(i), str(phase), bool(is_late)):
                # a sink that refuses has changed nothing; one that fails to drop or to forget has done so
                is_late = is_late if phase == "commit" else phase in ("rollback", "close")
                (sinks[i].breaks_after if is_late else sinks[i].breaks_before).add(phase)
                continue
            case "write", int(count):
                for _ in range(count):
                    trio.write(next_token)
                    tokens.append(next_token)
                    if stack:
                        buffer.stage(next_token)
                        effects.append(next_token)
                    next_token += 1
            case "open", _:
                with raises_if(broken("open")):
                    stack.append((trio.spans.open(sinks), len(tokens), len(effects)))
            case "promote", (None | int()) as path if stack:
                span, num_tokens, _ = stack[-1]
                if len(stack) > 1:
                    with pytest.raises(InvalidRequest, match=f"epoch {span.epoch} is still open"):
                        stack[0][0].promote()
                if broken("prepare") or (path or 0) > len(tokens) - num_tokens:
                    with pytest.raises((Broken, InvalidRequest)):
                        span.promote(path)
                elif broken("commit"):
                    with pytest.raises(Broken):
                        span.promote(path)
                    dropped(len(stack) - 1)
                else:
                    with raises_if(broken("close")):
                        span.promote(path)
                    del stack[-1], tokens[len(tokens) if path is None else num_tokens + path :]
                    assert span.outcome == "promoted"
            case "rollback", int(depth) if stack:
                first = min(depth, len(stack) - 1)
                with raises_if(broken("rollback", "close")):
                    stack[first][0].rollback()
                dropped(first)
        for sink in sinks:
            sink.breaks_before.clear()
            sink.breaks_after.clear()
        if not stack:
            visible = list(effects)
        assert (trio.tokens, buffer.effects, trio.spans.num_open) == (tokens, visible, len(stack))
    assert trio.is_closed() and not buffer._open
