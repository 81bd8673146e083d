"""A session's verbs against a fresh session: the same logits and tokens, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import write_tiny, write_tokenizer

from polymodel import Engine, EngineConfig
from polymodel.errors import InvalidRequest, KVFull, NonFiniteLogits, PromptTooLong, UnknownModel
from polymodel.session import Session

IDS = torch.randint(3, 300, (150,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_tiny(tmp_path_factory.mktemp("session"), "llama"))


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with Engine(kv_budget="16MiB", config=EngineConfig(prefill_chunk=48)) as engine:
        engine.add("m", path)
        yield engine
        engine.residency.check()
        engine.arena.check()


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
    with Engine(kv_budget="8MiB", config=EngineConfig(prefill_chunk=48)) as engine:
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


def test_a_closed_session_gives_its_pages_back(engine: Engine) -> None:
    with engine.session("m") as session:
        session.append(IDS)
        assert engine.arena.num_pages_used == 3
    assert engine.arena.num_pages_used == 0 and not bool(engine.arena.bytes.any())
    assert (len(session), session.logits) == (0, None)


def test_numbers_that_are_none_are_an_error(engine: Engine) -> None:
    session = fresh(engine, IDS[:5])
    assert session.logits is not None
    session.logits = session.logits.clone()
    session.logits[17] = float("nan")
    with pytest.raises(NonFiniteLogits, match="m: a logit is NaN"):
        session.step()
