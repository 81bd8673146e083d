"""A session's verbs against a fresh session: the same logits and tokens, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tiny import write_tiny, write_tokenizer

from csrc_triton import cpu
from polymodel import Engine, EngineConfig, lane, prefill
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.errors import (
    Busy,
    Contaminated,
    CorruptSession,
    EngineClosed,
    Forgotten,
    InvalidRequest,
    KVFull,
    NonFiniteLogits,
    NotShareable,
    PromptTooLong,
    UnknownModel,
)
from polymodel.provisional import BufferSink
from polymodel.session import Session

IDS = torch.randint(3, 300, (150,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_tiny(tmp_path_factory.mktemp("session"), "llama"))


UNCACHED = EngineConfig(prefix_cache=False, kv_borrows=False)  # so that all is computed, and pages can be counted


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with Engine(kv_budget="16MiB", config=replace(UNCACHED, prefill_chunk=48)) as engine:
        engine.add("m", path)
        yield engine
        with engine.lane.exclusive():
            engine.residency.check()
            engine.arena.check()


@pytest.fixture
def held(engine: Engine) -> Iterator[None]:
    """The test drives the lane itself, turn by turn."""
    with engine.lane.exclusive():
        yield


def fresh(engine: Engine, ids: list[int]) -> Session:
    session = engine.session("m")
    session.append(ids)
    return session


def assert_equal(one: Session, other: Session) -> None:
    assert one.tokens == other.tokens and len(one) == len(one.pages) == len(other.pages)
    assert one.logits is not None and other.logits is not None and torch.equal(one.logits, other.logits)


def test_appending_in_parts_is_appending_at_once(engine: Engine) -> None:
    parts = engine.session("m")
    for part in (IDS[:1], IDS[1:64], IDS[64:65], IDS[65:]):
        logits = parts.append(part)
        assert logits.shape == (300,) and logits is parts.logits
    assert_equal(parts, fresh(engine, IDS))


def test_stepping_is_generating_is_the_engine(engine: Engine) -> None:
    session = fresh(engine, IDS[:20])
    steps = [session.step() for _ in range(30)]
    assert len(set(steps)) >= 20
    assert_equal(session, fresh(engine, IDS[:20] + steps))
    assert fresh(engine, IDS[:20]).generate(30) == steps
    assert engine.generate("m", prompt_ids=IDS[:20], max_new_tokens=30, stop_at_eos=False).tokens == steps


def test_generating_ends_with_a_stop_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = fresh(engine, IDS[:20]).generate(10)
    assert len(steps) == 10 and fresh(engine, IDS[:20]).generate(0) == []
    monkeypatch.setattr(engine["m"].tokenizer, "stop_ids", frozenset({steps[4]}))
    session = fresh(engine, IDS[:20])
    assert session.generate(10) == steps[: steps.index(steps[4]) + 1]
    assert len(session) == 20 + steps.index(steps[4]) + 1


@pytest.mark.usefixtures("held")
def test_a_clone_goes_its_own_way(engine: Engine) -> None:
    one = fresh(engine, IDS[:70])
    used = engine.arena.num_pages_used
    two = one.clone()
    assert engine.arena.num_pages_used == used
    assert_equal(one, two)
    two.append(IDS[100:110])
    one.append(IDS[70:80])
    assert_equal(one, fresh(engine, IDS[:80]))
    assert_equal(two, fresh(engine, IDS[:70] + IDS[100:110]))
    one.close()
    assert two.step() == fresh(engine, IDS[:70] + IDS[100:110]).step()


def test_a_clone_of_nothing_is_empty(engine: Engine) -> None:
    twin = engine.session("m").clone()
    assert (len(twin), twin.logits) == (0, None)
    assert torch.equal(twin.append(IDS[:5]), fresh(engine, IDS[:5]).logits)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 6, 22, 86, 149, 150])
def test_rolling_back_is_never_having_seen(engine: Engine, count: int) -> None:
    session = fresh(engine, IDS)
    session.rollback(count)
    assert len(session) == len(session.pages) == 150 - count
    if count < 150:
        assert_equal(session, fresh(engine, IDS[: 150 - count]))
    else:
        assert session.logits is None
    session.append(IDS[:9])
    assert_equal(session, fresh(engine, IDS[: 150 - count] + IDS[:9]))


def test_rolling_back_a_clone_leaves_the_other(engine: Engine) -> None:
    one = fresh(engine, IDS)
    two = one.clone()
    two.rollback(100)
    two.append(IDS[:30])
    assert_equal(two, fresh(engine, IDS[:50] + IDS[:30]))
    assert one.step() == fresh(engine, IDS).step()
    one.rollback(1)
    assert_equal(one, fresh(engine, IDS))


@pytest.mark.usefixtures("held")
def test_sessions_and_requests_interleave(engine: Engine) -> None:
    alone = engine.generate("m", prompt_ids=IDS[:10], max_new_tokens=20, stop_at_eos=False).tokens
    request = engine.submit("m", prompt_ids=IDS[:10], max_new_tokens=20, stop_at_eos=False)
    engine.lane.turn()
    session = fresh(engine, IDS[:33])
    engine.wait(request)
    assert request.output == alone
    assert_equal(session, fresh(engine, IDS[:33]))


def test_what_is_wrong_is_refused_and_changes_nothing(engine: Engine) -> None:
    empty = engine.session("m")
    with pytest.raises(InvalidRequest, match="step: the session is empty"):
        empty.step()
    session = fresh(engine, IDS[:5])
    logits = session.logits
    for ids, message in (
        ([], "the prompt is empty"),
        ([1, 300], "token 1 of the prompt is 300, expected an id in 0..299"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            session.append(ids)
    with pytest.raises(PromptTooLong, match="513 prompt tokens and 0 new ones make 513, the model's context is 512"):
        session.append([3] * 508)
    for count in (6, -1):
        with pytest.raises(InvalidRequest, match=f"rollback\\({count}\\): the session has 5 tokens"):
            session.rollback(count)
    with pytest.raises(UnknownModel, match="no model named 'x'; there are m"):
        engine.session("x")
    assert (session.tokens, len(session.pages)) == (IDS[:5], 5) and session.logits is logits
    session.append([3] * 507)
    assert len(session) == 512


def test_full_leaves_the_session_as_it_was(path: Path) -> None:
    """The first chunks of the prompt find room, a later one does not."""
    with Engine(kv_budget="8MiB", config=replace(UNCACHED, prefill_chunk=48)) as engine:
        engine.add("m", path)
        session, other = fresh(engine, IDS[:60]), fresh(engine, IDS[:60])
        filling = []
        while engine.arena.num_free(session.pages.layout) > 2:
            filling.append(fresh(engine, IDS[:5]))
        free = engine.arena.num_free(session.pages.layout)
        before = session.logits
        with pytest.raises(KVFull, match="KV pages"):
            session.append([7] * 300)
        assert engine.arena.num_free(session.pages.layout) == free
        assert session.tokens == IDS[:60] and session.logits is before
        assert_equal(session, other)
        filling[0].close()
        session.append([7] * 150)
        assert len(session) == 210


@pytest.mark.usefixtures("held")
def test_a_closed_session_gives_its_pages_back(engine: Engine) -> None:
    with engine.session("m") as session:
        session.append(IDS)
        assert engine.arena.num_pages_used == 3
    assert engine.arena.num_pages_used == 0 and not bool(engine.arena.bytes.any())
    assert (len(session), session.logits) == (0, None)


def test_numbers_that_are_none_are_an_error(engine: Engine) -> None:
    session = fresh(engine, IDS[:5])
    assert session.logits is not None
    session._logits = session.logits.clone()
    session._logits[17] = float("nan")
    with pytest.raises(NonFiniteLogits, match="m: a logit is NaN"):
        session.step()


# ---- quarantine, evict, repair ---------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "stop"), [(0, 150), (1, 150), (64, 150), (100, 150), (149, 150)])
def test_quarantine_is_never_having_seen(engine: Engine, start: int, stop: int) -> None:
    session = fresh(engine, IDS[:stop])
    session.quarantine(slice(start, None))
    assert len(session) == start and not session.is_contaminated
    session.append(IDS[20:29])
    assert_equal(session, fresh(engine, IDS[:start] + IDS[20:29]))


def test_quarantine_refuses_what_later_tokens_attended(engine: Engine) -> None:
    session = fresh(engine, IDS[:90])
    with pytest.raises(Contaminated, match=r"quarantine\(10, 20\): tokens 20\.\.89 attended the span"):
        session.quarantine(slice(10, 20))
    assert_equal(session, fresh(engine, IDS[:90]))
    session.quarantine(slice(90, 90))
    assert len(session) == 90


def test_quarantine_strikes_the_tokens_out_of_the_cache(path: Path) -> None:
    with Engine(kv_budget="16MiB") as engine:
        engine.add("m", path)
        session = fresh(engine, IDS[:120])
        assert engine.prefixes.peek(engine.prefixes.keys, IDS).length == 120
        session.quarantine(slice(50, 120))
        assert engine.prefixes.peek(engine.prefixes.keys, IDS).length == 50
        session.close()
        assert engine.prefixes.peek(engine.prefixes.keys, IDS).length == 50


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (10, 20), (0, 64), (64, 128), (30, 131)])
def test_evicting_late_is_not_never_having_seen_and_repairing_is(engine: Engine, start: int, stop: int) -> None:
    session, rest = fresh(engine, IDS), IDS[:start] + IDS[stop:]
    before = engine.arena.bytes.clone()
    session.evict(slice(start, stop))
    moved = (engine.arena.bytes != before).nonzero()[:, 0]
    zeroed = engine.arena.bytes[moved]
    assert not bool(zeroed.any()), "bytes were written that are not a freed page's zeros"
    assert session.tokens == rest and session.clean == start and session.is_contaminated
    assert session.receipt()["contaminated"] == f"from token {start}"
    never = fresh(engine, rest)
    session.append(IDS[3:9])
    never.append(IDS[3:9])
    assert session.logits is not None and never.logits is not None
    assert not torch.equal(session.logits, never.logits), "a late evict must show"
    session.repair()
    assert session.receipt()["contaminated"] == "no"
    assert_equal(session, never)
    session.repair()
    assert_equal(session, never)


def test_the_first_layer_of_the_survivors_does_not_remember(engine: Engine) -> None:
    """A key of layer 0 depends on its token alone; its slot turns it, so a whole page is evicted."""
    session = fresh(engine, IDS)
    session.evict(slice(0, 64))
    layout, pages, never = session.pages.layout, session.pages.pages, fresh(engine, IDS[64:])
    for layer, same in ((0, True), (1, False)):
        view = layout.view(engine.arena.bytes, layer)
        assert torch.equal(view[pages[0]], view[never.pages.pages[0]]) is same


def test_an_evict_up_to_the_end_is_exact(engine: Engine) -> None:
    session = fresh(engine, IDS)
    session.evict(slice(70, None))
    assert not session.is_contaminated
    assert_equal(session, fresh(engine, IDS[:70]))


def test_what_is_contaminated_stays_out_of_caches_files_and_other_sessions(path: Path, tmp_path: Path) -> None:
    with Engine(kv_budget="16MiB") as engine:
        engine.add("m", path)
        session = fresh(engine, IDS[:100])
        session.evict(slice(40, 60))
        session.append(IDS[100:130])
        session.generate(5)
        with pytest.raises(Contaminated, match="save: tokens are clean up to 40 of 115 only"):
            session.save(tmp_path / "file")
        with pytest.raises(Contaminated, match="clean up to token 40 of 115"):
            engine.session("m", prefix=session)
        cached = engine.prefixes.num_tokens
        session.close()
        assert engine.prefixes.num_tokens == cached and not (tmp_path / "file").exists()
        with Engine(kv_budget="16MiB") as other:
            other.add("m", path)
            ids = IDS[:40] + IDS[60:130]
            assert_equal(fresh(engine, ids), fresh(other, ids))


def test_a_contaminated_session_rolls_back_exactly_and_says_when_logits_are_gone(engine: Engine) -> None:
    session = fresh(engine, IDS)
    session.evict(slice(10, 20))
    twin = session.clone()
    kept = session.logits
    session.append([7, 8, 9])
    session.rollback(3)
    assert kept is not None and session.logits is None
    with pytest.raises(Contaminated, match="the logits after token 139 were not kept, and tokens are clean up to 10"):
        session.step()
    assert twin.logits is kept
    for one in (session, twin):
        one.append([5, 6])
    assert session.logits is not None and torch.equal(session.logits, twin.logits)  # type: ignore[arg-type]
    session.rollback(138)
    assert not session.is_contaminated
    assert_equal(session, fresh(engine, IDS[:4]))


@pytest.mark.parametrize("verb", ["evict", "quarantine"])
@pytest.mark.parametrize("span", [slice(-1, 3), slice(3, 2), slice(0, 151), slice(151, None), slice(0, 9, 2)])
def test_a_bad_span_is_refused_with_the_bounds(engine: Engine, verb: str, span: slice) -> None:
    session = fresh(engine, IDS)
    with pytest.raises(InvalidRequest, match=rf"{verb}\(.*\): the session has 150 tokens, expected a slice with 0"):
        getattr(session, verb)(span)
    assert_equal(session, fresh(engine, IDS))


def test_a_repair_without_room_changes_nothing(path: Path) -> None:
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine:
        engine.add("m", path)
        session = fresh(engine, IDS)
        session.evict(slice(5, 10))
        fillers = []
        while engine.arena.num_free(session.pages.layout) > 1:
            fillers.append(fresh(engine, IDS[:3]))
        before, logits, tokens = session.pages.entries.copy(), session.logits, list(session.tokens)
        with pytest.raises(KVFull):
            session.repair()
        assert (session.pages.entries == before).all() and session.logits is logits and session.tokens == tokens
        assert session.is_contaminated and engine.arena.num_free(session.pages.layout) == 1
        fillers[0].close()
        fillers[1].close()
        session.repair()
        assert_equal(session, fresh(engine, IDS[:5] + IDS[10:]))


def test_rolling_back_costs_no_forward_until_the_logits_are_asked_for(engine: Engine) -> None:
    session = fresh(engine, IDS)
    engine.events.clear()
    session.rollback(30)
    assert not len(engine.events)
    assert session.logits is not None and session.logits is session.logits
    assert [event.tokens for event in engine.events.of("decode")] == [1]


def test_logits_that_find_no_room_change_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = fresh(engine, IDS[:65])
    twin = session.clone()
    session.rollback(1)
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise KVFull("full")

        patch.setattr(type(engine.arena), "allocate", full)
        with pytest.raises(KVFull):
            session.step()
    assert len(session) == len(session.pages) == 64
    assert_equal(session, fresh(engine, IDS[:64]))
    assert_equal(twin, fresh(engine, IDS[:65]))


# ---- provisional spans -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("held")
def test_an_undecided_span_leaves_nothing_behind(engine: Engine) -> None:
    session = fresh(engine, IDS[:60])
    with session.provisional() as span:
        session.append(IDS[60:75])
        session.generate(3)
        assert session.num_open_spans == 1 and span.outcome == "open"
    assert (span.outcome, session.num_open_spans) == ("rolled back", 0)
    assert_equal(session, fresh(engine, IDS[:60]))


@pytest.mark.parametrize(("path_", "kept"), [(None, 15), (0, 0), (7, 7), ([0, 1, 2], 3), ([], 0)])
def test_a_promoted_span_keeps_its_path(engine: Engine, path_: Any, kept: int) -> None:
    session = fresh(engine, IDS[:60])
    with session.provisional() as span:
        session.append(IDS[60:75])
        span.promote(path_)
        span.promote(path_)
    assert span.outcome == "promoted"
    assert_equal(session, fresh(engine, IDS[: 60 + kept]))


def test_more_than_the_span_has_is_refused_and_it_stays_open(engine: Engine) -> None:
    session = fresh(engine, IDS[:60])
    with session.provisional() as span:
        session.append(IDS[60:75])
        with pytest.raises(InvalidRequest, match="16 tokens to keep, the span has 15"):
            span.promote(16)
        assert span.outcome == "open" and len(session) == 75
        span.promote()
    assert_equal(session, fresh(engine, IDS[:75]))


@pytest.mark.usefixtures("held")
def test_spans_nest_and_stay_right_when_something_before_them_is_evicted(engine: Engine) -> None:
    session = fresh(engine, IDS[:60])
    with session.provisional() as outer:
        session.append(IDS[60:70])
        with session.provisional() as inner:
            assert inner.parent == outer.epoch
            session.append(IDS[70:90])
            session.evict(slice(10, 15))
            session.evict(slice(60, 62))  # the outer span's own; the inner one, which began at 70, begins at 63
            inner.promote(8)
        outer.promote()
    assert session.tokens == IDS[:10] + IDS[15:65] + IDS[67:78] and session.num_open_spans == 0
    session = fresh(engine, IDS[:60])
    with session.provisional() as outer:
        session.append(IDS[60:70])
        session.evict(slice(10, 15))
        outer.rollback()
        outer.rollback()
    assert session.tokens == IDS[:10] + IDS[15:60]


def test_a_span_whose_last_token_before_it_goes_gives_no_stale_logits_back(engine: Engine) -> None:
    session = fresh(engine, IDS[:60])
    with session.provisional():
        session.append(IDS[60:70])
        session.rollback(15)
    assert_equal(session, fresh(engine, IDS[:55]))
    with session.provisional():
        session.append(IDS[60:70])
        session.evict(slice(50, 57))
    assert len(session) == 50
    assert_equal(session, fresh(engine, IDS[:50]))


def test_a_rollback_past_the_spans_start_empties_it(engine: Engine) -> None:
    session = fresh(engine, IDS[:60])
    with session.provisional() as span:
        session.append(IDS[60:70])
        session.rollback(20)
        span.promote()
    assert_equal(session, fresh(engine, IDS[:50]))


def test_sinks_decide_together(engine: Engine) -> None:
    class Refuses:
        def __init__(self, phase: str) -> None:
            self.phase = phase

        def open(self, epoch: int) -> None: ...
        def prepare(self, epoch: int, kept: int | None) -> None:
            self.raise_in("prepare")

        def commit(self, epoch: int) -> None:
            self.raise_in("commit")

        def rollback(self, epoch: int) -> None: ...
        def close(self, epoch: int) -> None: ...
        def raise_in(self, phase: str) -> None:
            if phase == self.phase:
                raise OSError(phase)

    for phase, after in (("prepare", "open"), ("commit", "rolled back")):
        session, buffer = fresh(engine, IDS[:60]), BufferSink[str]()
        with session.provisional(buffer, Refuses(phase)) as span:
            session.append(IDS[60:70])
            buffer.stage("sent")
            with pytest.raises(OSError, match=phase):
                span.promote(4)
            assert span.outcome == after
        assert_equal(session, fresh(engine, IDS[:60]))
        assert buffer.effects == []
    buffer = BufferSink[str]()
    with session.provisional(buffer) as span:
        buffer.stage("sent")
        span.promote()
    assert buffer.effects == ["sent"]


@pytest.mark.usefixtures("held")
def test_a_session_closed_inside_a_span_ends_it(engine: Engine) -> None:
    session = fresh(engine, IDS[:60])
    with session.provisional() as span:
        session.append(IDS[60:70])
        session.close()
    assert (span.outcome, len(session), session.num_open_spans) == ("rolled back", 0, 0)
    session = engine.session("m")
    with session.provisional() as span:
        session.append(IDS[:5])
        engine.drop_domain("default")
        with pytest.raises(Forgotten):
            span.promote()
    assert session.num_open_spans == 0
    session = fresh(engine, IDS[:60])
    with pytest.raises(RuntimeError, match="theirs"), session.provisional():
        session.append(IDS[60:70])
        raise RuntimeError("theirs")
    assert_equal(session, fresh(engine, IDS[:60]))


def test_repairing_inside_a_span_voids_the_logits_before_it(engine: Engine) -> None:
    session = fresh(engine, IDS[:20])
    session.evict(slice(3, 6))
    with session.provisional():
        session.repair()
        session.append(IDS[50:60])
    assert not session.is_contaminated
    assert_equal(session, fresh(engine, IDS[:3] + IDS[6:20]))


def test_a_span_rolls_back_wherever_the_pages_are_and_whatever_else_goes_on(path: Path) -> None:
    with Engine(kv_budget="8MiB") as engine:
        engine.add("m", path)
        session = fresh(engine, IDS[:20])
        with session.provisional():
            session.append(IDS[20:120])
            session.swap_out()
            fillers = []
            while engine.arena.num_free(session.pages.layout):
                fillers.append(engine.session("m", domain="other"))
                fillers[-1].append([3])
        assert session.is_swapped_out and len(session) == 20
        assert engine.ledger.total("host_kv") == session.pages.layout.page_bytes  # the rest is gone
        for filler in fillers:
            filler.close()
        engine.prefixes.clear()
        session.swap_in()
        with Engine(kv_budget="16MiB") as alone:
            alone.add("m", path)
            assert_equal(session, fresh(alone, IDS[:20]))
        with session.provisional(), session._alone("another thread's verb"):
            session._verb.release()
            session.append(IDS[20:120])
            session._verb.acquire()
        assert len(session) == 20 and engine.prefixes.num_tokens == 20
        with session.provisional():
            session.append(IDS[20:120])
            session.swap_out()
            assert session._swapped is not None
            session._swapped.data[0, 0, 5] ^= 1
            with pytest.raises(CorruptSession):
                raise_from_exit(session)
        with pytest.raises(Forgotten, match="a provisional span could not be rolled back"):
            session.step()
        session = fresh(engine, IDS[:20])
        with session.provisional():
            session.append(IDS[20:120])
            engine.close()
        assert len(session) == len(session.pages) == 20


def raise_from_exit(session: Session) -> None:
    """Decide the innermost span as leaving its block would."""
    session._spans._open[-1].rollback()


def test_what_is_made_of_provisional_tokens_reaches_no_cache(path: Path) -> None:
    with Engine(kv_budget="16MiB") as engine:
        engine.add("m", path)
        engine.add("same", path)
        session = fresh(engine, IDS[:20])
        with session.provisional():
            session.append(IDS[20:60])
            for made in (session.clone(), engine.session("same", prefix=session), session.clone().clone()):
                made.append(IDS[60:100])
                made.close()
        assert engine.prefixes.num_tokens == 20


@pytest.mark.usefixtures("held")
def test_what_is_provisional_reaches_no_file(engine: Engine, tmp_path: Path) -> None:
    session = fresh(engine, IDS[:20])
    with session.provisional() as span:
        session.append(IDS[20:60])
        twin = session.clone()
        for one in (session, twin):
            with pytest.raises(InvalidRequest, match="save: tokens of an open provisional span"):
                one.save(tmp_path / "file")
        span.promote()
    session.save(tmp_path / "file")
    with pytest.raises(InvalidRequest, match="no sink, it lacks open, prepare"), session.provisional(object()):  # type: ignore[arg-type]
        pass
    assert session.num_open_spans == 0


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("error", [RuntimeError("device"), KeyboardInterrupt()])
@pytest.mark.parametrize("count", [64, 65, 100])
def test_a_forward_that_fails_while_logits_come_back_loses_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException
) -> None:
    session = fresh(engine, IDS)
    session.rollback(150 - count)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise error

        for module in (prefill, lane):
            patch.setattr(module, "forward", fail)
        for act in (session.step, lambda: session.logits, lambda: session.append(IDS[:200])):
            with pytest.raises(type(error)):
                act()
    assert_equal(session, fresh(engine, IDS[:count]))


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", ["in the head", "after the forward"])
def test_an_error_late_in_a_step_leaves_the_session_as_it_was(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException, when: str
) -> None:
    session = fresh(engine, IDS[:64])
    rolled = fresh(engine, IDS[:70])
    rolled.rollback(6)
    with monkeypatch.context() as patch:
        if when == "in the head":
            matmul = cpu.matmul_cpu

            def fail(x: torch.Tensor, w: Any, *added: Any) -> torch.Tensor:
                if w.shape[0] == 300:
                    raise error
                return matmul(x, w, *added)

            patch.setattr(cpu, "matmul_cpu", fail)
        else:
            forward = prefill.forward

            def after(*args: Any) -> None:
                forward(*args)
                raise error

            for module in (prefill, lane):
                patch.setattr(module, "forward", after)
        for act in (session.step, rolled.step, lambda: session.append(IDS[:5]), lambda: rolled.logits):
            with pytest.raises(type(error)):
                act()
    for one in (session, rolled):
        assert_equal(one, fresh(engine, IDS[:64]))
        assert one.generate(5) == fresh(engine, IDS[:64]).generate(5)


def test_ids_may_come_from_another_session_of_another_engine_meanwhile(path: Path) -> None:
    """A generator that steps another engine's session is drawn before the lane is held: two cannot wait in a ring."""
    with Engine(kv_budget="16MiB") as one, Engine(kv_budget="16MiB") as other:
        sessions = []
        for engine in (one, other):
            engine.add("m", path)
            sessions.append((fresh(engine, IDS[:20]), fresh(engine, IDS[20:40])))
        (a, b), (c, d) = sessions
        threads = [
            threading.Thread(target=lambda: a.append(c.step() for _ in range(20))),
            threading.Thread(target=lambda: d.append(b.step() for _ in range(20))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert len(a) == len(d) == 40


def test_what_is_provisional_reaches_no_cache(path: Path) -> None:
    with Engine(kv_budget="16MiB") as engine:
        engine.add("m", path)
        session = fresh(engine, IDS[:60])
        with session.provisional() as span:
            session.append(IDS[60:130])
            assert engine.prefixes.peek(engine.prefixes.keys, IDS).length == 60
            span.promote(40)
        assert engine.prefixes.peek(engine.prefixes.keys, IDS).length == 100


@pytest.mark.usefixtures("held")
def test_no_span_is_open_after_a_generation(engine: Engine) -> None:
    engine.add("same", open_checkpoint(engine.residency["m"].checkpoint.path))
    request = engine.submit("m", prompt_ids=IDS[:20], max_new_tokens=20, stop_at_eos=False, draft="same")
    seen = set()
    while engine.lane.turn():
        seen.add(engine.lane.num_open_spans)
    assert seen == {0} and request.num_drafted > 0 and request.spans.num_open == 0


# ---- out of memory and back ------------------------------------------------------------------------------


@pytest.mark.usefixtures("held")
def test_swapping_out_and_in_is_bit_identical(engine: Engine) -> None:
    session, other = fresh(engine, IDS), fresh(engine, IDS[:70])
    before, used = session.pages.dump(), engine.arena.num_pages_used
    nbytes = session.swap_out()
    assert nbytes == 3 * session.pages.layout.page_bytes == engine.ledger.total("host_kv")
    assert engine.arena.num_pages_used == used - 3 and session.is_swapped_out and len(session) == 150
    assert session.swap_out() == 0
    assert session.receipt()["tokens"] == "150"
    other.append(IDS[70:])  # takes the freed pages
    session.swap_in()
    assert torch.equal(session.pages.dump(), before) and engine.ledger.total("host_kv") == 0
    assert not session.is_swapped_out
    assert_equal(session, other)


def test_any_verb_brings_a_session_back(engine: Engine) -> None:
    def evict(session: Session) -> None:
        session.evict(slice(3, 9))

    verbs: list[Callable[[Session], Any]] = [
        Session.step,
        lambda s: s.append([5]),
        lambda s: s.rollback(3),
        evict,
        Session.clone,
    ]
    for verb in verbs:
        session, never = fresh(engine, IDS[:100]), fresh(engine, IDS[:100])
        session.swap_out()
        verb(session)
        verb(never)
        assert session.tokens == never.tokens and len(session.pages) == len(never.pages)
        assert session.step() == never.step() and torch.equal(session.logits, never.logits)  # type: ignore[arg-type]
        session.close()


def test_a_contaminated_session_swaps_as_it_is(engine: Engine) -> None:
    session, never = fresh(engine, IDS), fresh(engine, IDS)
    for one in (session, never):
        one.evict(slice(5, 71))
    session.swap_out()
    assert session.clean == 5 and session.is_contaminated
    session.append([4])
    never.append([4])
    assert torch.equal(session.logits, never.logits)  # type: ignore[arg-type]
    assert session.clean == never.clean == 5


@pytest.mark.usefixtures("held")
def test_a_changed_byte_on_the_host_is_noticed(engine: Engine) -> None:
    session = fresh(engine, IDS)
    session.swap_out()
    assert session._swapped is not None
    session._swapped.data[1, 0, 77] ^= 1
    for _ in range(2):
        with pytest.raises(CorruptSession, match="digest"):
            session.step()
        assert session.is_swapped_out and engine.arena.num_pages_used == 0
    session._swapped.data[1, 0, 77] ^= 1
    session.swap_in()
    assert_equal(session, fresh(engine, IDS))


def test_swapping_in_without_room_changes_nothing(path: Path) -> None:
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine:
        engine.add("m", path)
        session = fresh(engine, IDS)
        session.swap_out()
        fillers = [engine.session("m") for _ in range(engine.arena.num_free(session.pages.layout) - 2)]
        for filler in fillers:
            filler.append([3])
        with pytest.raises(KVFull):
            session.swap_in()
        assert session.is_swapped_out
        for filler in fillers:
            filler.close()
        session.swap_in()
        assert_equal(session, fresh(engine, IDS))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 150])
def test_a_saved_session_goes_on_where_it_was(engine: Engine, tmp_path: Path, count: int) -> None:
    session = fresh(engine, IDS[:count])
    session.save(tmp_path / "file")
    loaded = engine.session("m")
    loaded.load(tmp_path / "file")
    assert_equal(loaded, session)
    assert loaded.generate(10) == session.generate(10)


def test_a_file_holds_nothing_that_was_rolled_back(engine: Engine, tmp_path: Path) -> None:
    session, never = fresh(engine, IDS[:100]), fresh(engine, IDS[:70])
    session.rollback(30)
    for one, name in ((session, "one"), (never, "never")):
        assert one.logits is not None
        one.save(tmp_path / name)
    from safetensors.torch import load_file

    ours, theirs = load_file(tmp_path / "one"), load_file(tmp_path / "never")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_a_file_of_another_model_domain_or_thread_count_is_refused(engine: Engine, path: Path, tmp_path: Path) -> None:
    session = fresh(engine, IDS)
    session.save(tmp_path / "file")
    engine.add("other", perturbed(open_checkpoint(path), 2, 1))
    for other, axis in ((engine.session("other"), "band"), (engine.session("m", domain="x"), "domain")):
        with pytest.raises(NotShareable, match=axis):
            other.load(tmp_path / "file")
        assert len(other) == len(other.pages) == 0
    torch.set_num_threads(2)
    with pytest.raises(NotShareable, match="policy"):
        engine.session("m").load(tmp_path / "file")
    torch.set_num_threads(1)
    with pytest.raises(InvalidRequest, match="load: the session has 150 tokens, expected an empty one"):
        session.load(tmp_path / "file")
    raw = bytearray((tmp_path / "file").read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "broken").write_bytes(raw)
    with pytest.raises(CorruptSession, match="digest"):
        engine.session("m").load(tmp_path / "broken")
    with pytest.raises(InvalidRequest, match="none"):
        engine.session("m").load(tmp_path / "none")
    engine.remove("other")


@pytest.mark.parametrize(
    ("verb", "argument"),
    [
        ("rollback", 1.5),
        ("rollback", 2.0),
        ("rollback", "1"),
        ("evict", 5),
        ("evict", slice(1.5, None)),
        ("evict", slice("a", 3)),
        ("quarantine", (1, 2)),
        ("append", 7),
        ("append", "abc"),
        ("append", {3}),
        ("append", {3: 4}),
        ("append", [True]),
        ("append", [2.0]),
        ("append", [None]),
        ("append", torch.tensor([1.5])),
    ],
)
def test_arguments_of_another_kind_are_refused_and_change_nothing(engine: Engine, verb: str, argument: Any) -> None:
    session = fresh(engine, IDS[:70])
    with pytest.raises(InvalidRequest):
        getattr(session, verb)(argument)
    assert_equal(session, fresh(engine, IDS[:70]))


def test_numbers_of_other_libraries_are_numbers(engine: Engine) -> None:
    for ids in (torch.tensor(IDS[:70]), np.array(IDS[:70], dtype=np.int16), tuple(IDS[:70]), iter(IDS[:70])):
        session = engine.session("m")
        session.append(ids)  # type: ignore[arg-type]
        session.rollback(np.int64(3))  # type: ignore[arg-type]
        session.evict(slice(np.int32(60), None))
        assert_equal(session, fresh(engine, IDS[:60]))
        assert all(type(token) is int for token in session.tokens)


# ---- one verb at a time ----------------------------------------------------------------------------------


def test_a_second_verb_is_busy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = fresh(engine, IDS[:20])
    begun, go_on = threading.Event(), threading.Event()
    forward = lane.forward

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return forward(*args)

    monkeypatch.setattr(lane, "forward", slow)
    thread = threading.Thread(target=session.generate, args=(3,))
    thread.start()
    assert begun.wait(10)
    verbs: list[Callable[[], Any]] = [
        session.step,
        session.clone,
        session.swap_out,
        session.close,
        lambda: session.append([4]),
        lambda: session.rollback(1),
        lambda: session.evict(slice(0, 1)),
    ]
    for verb in verbs:
        with pytest.raises(Busy, match="the session is running another verb"):
            verb()
    go_on.set()
    thread.join()
    assert len(session) == 23
    session.close()


class Interrupted(BaseException):
    """As KeyboardInterrupt, but for pytest."""


def interrupt(owner: object, patch: pytest.MonkeyPatch, where: str, what: str) -> None:
    """Raise in place of a method, or after it."""
    method = getattr(owner, what)

    def interrupted(arg: Any) -> None:
        if where == "after":
            method(arg)
        raise Interrupted

    patch.setattr(owner, what, interrupted)


VERBS: dict[str, Callable[[Session], Any]] = {
    "append": lambda s: s.append(IDS[70:80]),
    "step": Session.step,
    "generate": lambda s: s.generate(4),
    "logits": lambda s: s.logits,
    "repair": Session.repair,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("where", "what"),
    [("after", "enter"), ("before", "_end"), ("before", "wait_for"), ("before", "wait"), ("after", "wait")],
)
@pytest.mark.usefixtures("held")
def test_an_interrupted_verb_leaves_tokens_and_logits_that_belong_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, verb: str, where: str, what: str
) -> None:
    """Wherever the lane was with it, and whatever it does before the next verb."""
    session = fresh(engine, IDS[:75])
    if verb == "repair":
        session.evict(slice(2, 7))
    else:
        session.rollback(5)
        if verb != "logits":
            assert session.logits is not None
    expected = list(session.tokens)
    with monkeypatch.context() as patch:
        interrupt(session if what == "_end" else engine.lane, patch, where, what)
        with pytest.raises(Interrupted):
            VERBS[verb](session)
    while engine.lane.turn():
        pass
    session.rollback(0)
    assert session.tokens[: len(expected)] == expected and len(session) - len(expected) in (0, 1, 4, 10)
    if what in ("wait", "wait_for") and where == "before":
        assert session.tokens == expected
    if verb == "repair":
        session.repair()
    assert_equal(session, fresh(engine, session.tokens))
    session.append([9])
    assert_equal(session, fresh(engine, session.tokens))
    tokens = list(session.tokens)
    assert session.generate(2) == fresh(engine, tokens).generate(2)
    session.close()
    engine.lane.turn()  # gives back what sessions left that are gone
    assert engine.arena.num_pages_used == 0


@pytest.mark.parametrize("verb", ["append", "repair"])
@pytest.mark.usefixtures("held")
def test_a_span_that_is_dropped_when_the_lane_is_through_takes_the_logits_along(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    session, wait_for = fresh(engine, IDS[:60]), engine.lane.wait_for
    with session.provisional() as span:
        session.append(IDS[60:70])
        if verb == "repair":
            session.evict(slice(2, 7))

        def dropped(feeds: Any) -> None:
            """As another thread may, before the one that waited goes on."""
            wait_for(feeds)
            span.rollback()

        with monkeypatch.context() as patch:
            patch.setattr(engine.lane, "wait_for", dropped)
            VERBS[verb](session)
    tokens = IDS[:2] + IDS[7:60] if verb == "repair" else IDS[:60]
    assert session.tokens == tokens and not session.is_contaminated
    assert_equal(session, fresh(engine, tokens))
    assert session.step() == fresh(engine, tokens).step()


def test_a_session_that_could_not_go_on_from_another_is_empty_and_as_good_as_new(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(kv_budget="16MiB") as engine:
        engine.add("m", path)
        engine.add("sibling", perturbed(open_checkpoint(path), 2, 0))
        prefix, session = fresh(engine, IDS[:90]), engine.session("sibling")
        with prefix.provisional():
            prefix.append(IDS[90:100])
            with monkeypatch.context() as patch:
                interrupt(engine.lane, patch, "before", "wait")
                with pytest.raises(Interrupted):
                    session.continue_from(prefix)
        assert (len(session), len(session.pages), session.num_cached, session.logits) == (0, 0, 0, None)
        session.append(IDS[:70])
        key = engine.lane.prefill.key("sibling", session.domain)
        assert engine.prefixes.peek([key], IDS).length == 70, "nothing in it is provisional"
        message = "continue_from: the session has 70 tokens, expected an empty one"
        with pytest.raises(InvalidRequest, match=message):
            session.continue_from(prefix)
        with pytest.raises(InvalidRequest, match="continue_from: expected another session, of the same engine"):
            session.continue_from(session)
        assert session.tokens == IDS[:70]


def test_a_closed_session_says_so_whatever_is_asked_of_it(engine: Engine, tmp_path: Path) -> None:
    session, other = fresh(engine, IDS[:20]), engine.session("m")
    session.close()
    verbs: list[Callable[[], Any]] = [
        *(session.step, session.clone, session.swap_out, session.swap_in, session.repair, session.receipt),
        *(session.provisional().__enter__, session.__enter__),
        lambda: session.append([5]),
        lambda: session.generate(0),
        lambda: session.rollback(0),
        lambda: session.quarantine(slice(0, 0)),
        lambda: session.evict(slice(0, 0)),
        lambda: session.save(tmp_path / "file"),
        lambda: session.load(tmp_path / "file"),
        lambda: session.continue_from(other),
        lambda: other.continue_from(session),
        lambda: engine.session("m", prefix=session),
    ]
    for verb in verbs:
        with pytest.raises(InvalidRequest, match=r"^\w+: the session is closed"):
            verb()
    session.close()
    assert session.is_closed and not session.tokens and session.logits is None
    assert not other.is_closed and not other.tokens and not list(tmp_path.iterdir())


def test_a_session_shows_itself_in_a_line(engine: Engine) -> None:
    session = fresh(engine, IDS[:20])
    name = session._owner
    assert repr(session) == f"<{name} of 'm': 20 tokens>"
    session.evict(slice(3, 5))
    assert repr(session) == f"<{name} of 'm': 18 tokens, contaminated from 3>"
    session.rollback(15)
    session.swap_out()
    assert repr(session) == f"<{name} of 'm': 3 tokens, swapped out>"
    session.close()
    assert repr(session) == f"<{name} of 'm': 0 tokens, closed>"


def test_verbs_after_the_engine_is_closed(path: Path) -> None:
    engine = Engine(kv_budget="16MiB")
    engine.add("m", path)
    session = fresh(engine, IDS[:20])
    engine.close()
    for verb in (session.step, session.clone, session.swap_out, session.repair):
        with pytest.raises(EngineClosed):
            verb()
    session.close()


def test_removing_a_model_ends_its_sessions_and_another_of_its_name_has_nothing_of_it(
    path: Path, tmp_path: Path
) -> None:
    """Neither the old pages under the new weights, nor the old pages in the new model's cache."""
    other = write_tokenizer(write_tiny(tmp_path / "qwen3", "qwen3"))
    with Engine(kv_budget="16MiB") as engine:
        engine.add("m", path)
        session, closed = fresh(engine, IDS[:100]), fresh(engine, IDS[:90])
        with session.provisional() as span:
            session.append(IDS[100:110])
            engine.remove("m")
        assert span.outcome == "rolled back"
        for source in (path, perturbed(open_checkpoint(path), 1, 0), other):
            engine.add("m", source)
            with pytest.raises(Forgotten, match="step: the model 'm' was removed"):
                session.step()
            session.close()
            closed.close()
            with Engine(kv_budget="16MiB", config=UNCACHED) as alone:
                alone.add("m", source)
                expected = alone.generate("m", prompt_ids=IDS[:100], max_new_tokens=5).tokens
                engine.residency.check()
            if source is path:
                engine.prefixes.clear()
            out = engine.generate("m", prompt_ids=IDS[:100], max_new_tokens=5)
            assert out.tokens == expected and out.metrics.num_cached_tokens == 0
            engine.remove("m")


@pytest.mark.parametrize("verb", ["append", "step", "rollback", "evict", "quarantine", "repair", "clone", "swap_out"])
def test_verbs_against_whatever_forgets_ends_in_typed_errors_alone(path: Path, verb: str) -> None:
    """Threads act on a session while another one forgets its domain, again and again."""
    acts: dict[str, Callable[[Session], Any]] = {
        "append": lambda s: s.append(IDS[:3]),
        "step": Session.step,
        "rollback": lambda s: s.rollback(2),
        "evict": lambda s: s.evict(slice(2, 4)),
        "quarantine": lambda s: s.quarantine(slice(len(s) - 1, None)),
        "repair": Session.repair,
        "clone": Session.clone,
        "swap_out": Session.swap_out,
    }
    with Engine(kv_budget="16MiB") as engine:
        engine.add("m", path)
        errors: list[BaseException] = []
        for _ in range(8):
            session = engine.session("m", domain="a")
            session.append(IDS[:40])
            begun = threading.Event()

            def act(session: Session = session, begun: threading.Event = begun) -> None:
                begun.set()
                try:
                    for _ in range(6):
                        acts[verb](session)
                except (Forgotten, InvalidRequest, Contaminated):
                    pass
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=act)
            thread.start()
            begun.wait()
            engine.drop_domain("a")
            thread.join()
            session.close()
        assert not errors
        engine.lane.turn()
        engine.prefixes.clear()
        for left in list(engine.lane.sessions):
            left.close()
        assert engine.arena.num_pages_used == 0 and engine.ledger.total("host_kv") == 0
        engine.arena.check()


# ---- going on from another session -----------------------------------------------------------------------


def test_a_session_goes_on_from_another_ones_prefix(engine: Engine, path: Path) -> None:
    engine.add("same", path)
    engine.add("high", perturbed(open_checkpoint(path), 2, 1))
    one = fresh(engine, IDS)
    engine.events.clear()
    same, twin = engine.session("m", prefix=one), engine.session("same", prefix=one)
    assert (same.num_cached, twin.num_cached) == (150, 150) and not engine.events.of("prefill")
    for two in (same, twin):
        assert two.tokens == one.tokens and torch.equal(two.logits, one.logits)  # type: ignore[arg-type]
    high = engine.session("high", prefix=one)
    assert high.num_resumed == 150 and [e.layers for e in engine.events.of("prefill")] == [1] * 4
    direct = engine.session("high")
    direct.append(IDS)
    assert_equal(high, direct)
    with pytest.raises(NotShareable, match="domain"):
        engine.session("m", prefix=one, domain="another")
    engine.add("stranger", perturbed(open_checkpoint(path), 0, 1))
    with pytest.raises(NotShareable, match="weights: layer 0 differs"):
        engine.session("stranger", prefix=one)
    assert one.tokens == IDS


# ---- all verbs in any order ------------------------------------------------------------------------------


COUNT = st.one_of(st.integers(1, 6), st.integers(60, 70), st.integers(1, 140))


class Verbs(RuleBasedStateMachine):
    """Sessions of two models with a cache, against fresh sessions without: what is clean has the same bits."""

    folder: Path
    uncached: Engine
    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(kv_budget="20MiB", config=EngineConfig(prefill_chunk=50))
        self.engine.add("m", self.folder)
        self.engine.add("high", perturbed(open_checkpoint(self.folder), 2, 1))
        self.sessions: list[Session] = []
        self.seen = 0

    def pick(self, index: int) -> Session:
        return self.sessions[index % len(self.sessions)]

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(model=st.sampled_from(["m", "high"]), domain=st.sampled_from(["a", "b"]))
    def create(self, model: str, domain: str) -> None:
        self.sessions.append(self.engine.session(model, domain=domain))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), start=st.sampled_from([0, 0, 7, 90]), count=COUNT)
    def append(self, index: int, start: int, count: int) -> None:
        session = self.pick(index)
        if len(session) + count <= 300:
            session.append(IDS[start : start + count] or [3])

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), count=st.integers(0, 200))
    def rollback(self, index: int, count: int) -> None:
        self.pick(index).rollback(min(count, len(self.pick(index))))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), start=st.integers(0, 200), count=COUNT)
    def evict(self, index: int, start: int, count: int) -> None:
        session = self.pick(index)
        start = min(start, len(session))
        session.evict(slice(start, min(start + count, len(session))))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), count=COUNT)
    def quarantine(self, index: int, count: int) -> None:
        session = self.pick(index)
        session.quarantine(slice(max(len(session) - count, 0), None))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), verb=st.sampled_from(["repair", "swap_out", "swap_in", "step", "clone"]))
    def plain(self, index: int, verb: str) -> None:
        session = self.pick(index)
        if (verb == "step" and session.logits is None) or (verb == "clone" and len(self.sessions) > 3):
            return
        result = getattr(session, verb)()
        if verb == "clone":
            self.sessions.append(result)

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), count=COUNT, kept=st.integers(0, 140))
    def provisional(self, index: int, count: int, kept: int) -> None:
        session = self.pick(index)
        if len(session) + count <= 300:
            with session.provisional() as span:
                session.append(IDS[:count])
                if kept <= count:
                    span.promote(kept)

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), fail=st.booleans())
    def save_and_load(self, index: int, fail: bool) -> None:
        """Also a load that dies halfway, between the pages and the tokens."""
        session = self.pick(index)
        if session.is_contaminated or not session.tokens:
            return
        session.save(self.folder / "saved")
        loaded = self.engine.session(session.model, domain=session.domain)
        if fail:
            keep, loaded._keep = loaded._keep, lambda: 1 / 0  # type: ignore[method-assign, assignment]
            with pytest.raises(ZeroDivisionError):
                loaded.load(self.folder / "saved")
            loaded._keep = keep  # type: ignore[method-assign]
            assert not loaded.tokens and not len(loaded.pages)
            loaded.close()
        else:
            loaded.load(self.folder / "saved")
            self.sessions.append(loaded)
            self.close(len(self.sessions) - 1 if len(self.sessions) > 4 else index)

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3))
    def close(self, index: int) -> None:
        self.sessions.pop(index % len(self.sessions)).close()

    @rule(domain=st.sampled_from(["a", "b"]))
    def drop(self, domain: str) -> None:
        self.engine.drop_domain(domain)
        for session in [s for s in self.sessions if s.domain == domain]:
            self.sessions.remove(session)
            session.close()

    @rule(what=st.sampled_from(["states", "prefixes"]))
    def give_up(self, what: str) -> None:
        if what == "states":
            self.engine.arena.drop_states()
        else:
            self.engine.prefixes.reclaim(self.engine.residency["m"].layout, 1000)

    @invariant()
    def all_is_well(self) -> None:
        engine = self.engine
        engine.arena.check()
        engine.prefixes.check()
        for session in self.sessions:
            session.pages.check()
            assert session.num_open_spans == 0
            assert len(session) == (session._swapped or session.pages).length

    @invariant()
    def one_of_them_is_exact(self) -> None:
        """Compares one session a step with a fresh one: its clean tokens' keys and values."""
        self.seen += 1
        if not self.sessions or self.seen % 3:
            return
        session = self.pick(self.seen)
        if session.is_swapped_out or not session.clean:
            return
        pages = session.pages.clone()
        pages.rollback(len(session) - session.clean)
        direct = self.uncached.session(session.model)
        direct.append(session.tokens[: session.clean])
        assert torch.equal(pages.dump(), direct.pages.dump())
        pages.free()
        direct.close()

    def teardown(self) -> None:
        for session in self.sessions:
            session.close()
        self.engine.prefixes.clear()
        assert self.engine.arena.num_pages_used == 0
        self.engine.arena.check()
        self.engine.close()


@pytest.fixture(scope="module")
def uncached(path: Path) -> Iterator[Engine]:
    with Engine(kv_budget="16MiB", config=UNCACHED) as engine:
        engine.add("m", path)
        engine.add("high", perturbed(open_checkpoint(path), 2, 1))
        yield engine


@pytest.mark.parametrize(
    ("examples", "steps"), [(8, 25), pytest.param(50, 200, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_any_order_of_verbs_keeps_what_is_clean_exact(path: Path, uncached: Engine, examples: int, steps: int) -> None:
    class Machine(Verbs):
        folder = path

    Machine.uncached = uncached
    profile = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Machine, settings=profile)
