"""A batch against its rows alone: the same logits, tokens, keys and values, bit for bit; all rows or none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from smollm import demo_engine, hosted
from tiny import write_tiny, write_tokenizer
from torch import Tensor

from polymodel import Batch, Engine, EngineConfig, Session, lane
from polymodel.batch import row_macs
from polymodel.config import Weights
from polymodel.errors import (
    Busy,
    Contaminated,
    EngineClosed,
    Forgotten,
    InvalidRequest,
    KVFull,
    NonFiniteLogits,
    PolymodelError,
    PromptTooLong,
    UnknownModel,
)
from polymodel.model import Panel
from polymodel.workloads.exact import pairwise

ARCHS = ("llama", "qwen2", "qwen3", "gemma3")
WEIGHTS: tuple[Weights, ...] = ("f32", "q8", "q4", "w8a8")
SIZES = (1, 2, 3, 5, 8, 16, 64)
UNCACHED = EngineConfig(prefix_cache=False, kv_borrows=False)  # so that all is computed, and pages can be counted
IDS = torch.randint(3, 259, (4000,), generator=torch.Generator().manual_seed(5)).tolist()
RAGGED = (3, 64, 1, 70, 33)


def prompts_of(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    return [IDS[seed + 37 * i : seed + 37 * i + length] for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("batch")
    return {arch: write_tokenizer(write_tiny(root / arch, arch)) for arch in ARCHS}


@pytest.fixture
def engine(paths: dict[str, Path]) -> Iterator[Engine]:
    with Engine(kv_budget="32MiB", config=replace(UNCACHED, prefill_chunk=48)) as engine:
        engine.add("m", paths["llama"])
        yield engine
        with engine.lane.exclusive():
            engine.residency.check()
            engine.arena.check()


@pytest.fixture
def held(engine: Engine) -> Iterator[None]:
    """The test drives the lane itself, turn by turn."""
    with engine.lane.exclusive():
        yield


@pytest.fixture
def small(paths: dict[str, Path]) -> Iterator[Engine]:
    """An engine with few pages."""
    with Engine(kv_budget="8MiB", config=replace(UNCACHED, prefill_chunk=48)) as engine:
        engine.add("m", paths["llama"])
        yield engine
        with engine.lane.exclusive():
            engine.arena.check()


def fresh(engine: Engine, ids: Sequence[int], name: str = "m") -> Session:
    session = engine.session(name)
    session.append(ids)
    return session


def batch_of(engine: Engine, prompts: Sequence[Sequence[int]], name: str = "m") -> Batch:
    batch = engine.batch(name, len(prompts))
    batch.prefill_each(prompts)
    return batch


def state(session: Session) -> tuple[list[int], int, Tensor, Tensor | None]:
    """What a refused or foreign verb must leave."""
    entries = [] if session.is_contaminated else session.pages.dump()
    return list(session.tokens), session.clean, torch.as_tensor(entries), session._logits


def states(batch: Batch) -> list[tuple[list[int], int, Tensor, Tensor | None]]:
    return [state(row) for row in batch]


def assert_untouched(session: Session, before: tuple[list[int], int, Tensor, Tensor | None], what: object = "") -> None:
    tokens, clean, data, logits = before
    assert (session.tokens, session.clean, len(session.pages)) == (tokens, clean, len(tokens)), what
    assert session._logits is logits and (session.is_contaminated or torch.equal(session.pages.dump(), data)), what
    session.pages.check()


def assert_equal(row: Session, alone: Session, what: object = "") -> None:
    assert row.tokens == alone.tokens and len(row) == len(row.pages) == len(alone.pages), what
    assert row.logits is not None and alone.logits is not None
    assert_same_bits(row.logits, alone.logits, str(what))
    assert torch.equal(row.pages.dump(), alone.pages.dump()), what


# ---- the same bits -----------------------------------------------------------------------------------


def assert_steps(engine: Engine, name: str, size: int, num_steps: int) -> None:
    """Rows at ragged positions, with the tokens that the recipe gives."""
    prompts = prompts_of(RAGGED[i % 5] + i // 5 for i in range(size))
    batch = engine.batch(name, size)
    singles = [fresh(engine, ids, name) for ids in prompts]
    assert_same_bits(batch.prefill_each(prompts), torch.stack([s.logits for s in singles if s.logits is not None]))
    for step in range(num_steps):
        ids = [(step * 53 + i * 17 + 1) % 250 + 3 for i in range(size)]
        logits = batch.step(ids)
        assert logits.shape == (size, engine[name].config.vocab_size) and logits.dtype == torch.float32
        for i, (row, single) in enumerate(zip(batch, singles, strict=True)):
            single.append([ids[i]])
            assert row.logits is not None and torch.equal(logits[i], row.logits)
            if size < 16 or i % 9 == 0 or step == num_steps - 1:
                assert_equal(row, single, f"step {step}, row {i} of {size}")
    assert len(logits.unique(dim=0)) == size


QUICK = pairwise({"arch": ARCHS, "weights": WEIGHTS, "size": SIZES[:-1]})
FULL = [{"arch": arch, "weights": weights, "size": size} for arch in ARCHS for weights in WEIGHTS for size in SIZES]
WIDE = [{"arch": "llama", "weights": "q8", "size": 64}]
CASES = [pytest.param(*c.values(), marks=[] if c in QUICK + WIDE else pytest.mark.slow) for c in FULL]


@pytest.mark.parametrize(("arch", "weights", "size"), CASES)
def test_a_step_is_every_rows_own(paths: dict[str, Path], arch: str, weights: Weights, size: int) -> None:
    with Engine(kv_budget="64MiB", config=UNCACHED) as engine, engine.lane.exclusive():
        engine.add(arch, paths[arch], weights=weights)
        assert_steps(engine, arch, size, 2)


@pytest.mark.parametrize("arch", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_weights_that_run_row_by_row_step_the_same(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setattr("csrc_triton.cpu.probe", lambda *a: False)
    with Engine(kv_budget="32MiB", config=UNCACHED) as engine, engine.lane.exclusive():
        engine.add(arch, paths[arch], weights="q8")
        assert next(iter(engine.table()))["row_by_row"]
        assert_steps(engine, arch, 5, 2)


@pytest.mark.demo_model
@pytest.mark.parametrize("weights", ["file", *(pytest.param(w, marks=pytest.mark.slow) for w in WEIGHTS)])
def test_the_demo_model_steps_the_same(demo_model_path: Path, weights: Weights) -> None:
    hosted(demo_model_path, weights)
    engine = demo_engine(demo_model_path)
    with engine.lane.exclusive():
        rows, alone = batch_of(engine, prompts_of((5, 17, 66)), weights), prompts_of((5, 17, 66))
        for step in range(2):
            rows.step([30 + step, 40 + step, 50 + step])
        for i, row in enumerate(rows):
            single = engine.session(weights)
            single.append([*alone[i], 10 * i + 30])
            single.append([10 * i + 31])
            assert_equal(row, single, i)
            single.close()
        rows.close()


@pytest.mark.parametrize("lengths", [(1, 7, 64, 65, 130, 33), (128, 5), (49, 49, 49), (7, 7, 7, 7)])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_prompts_of_any_lengths_prefill_as_alone(paths: dict[str, Path], arch: str, lengths: tuple[int, ...]) -> None:
    """In chunks of 48, so that some prompts take several forwards, shared with the others' beginnings."""
    prompts = prompts_of(lengths)
    with Engine(kv_budget="32MiB", config=replace(UNCACHED, prefill_chunk=48)) as engine, engine.lane.exclusive():
        engine.add("m", paths[arch])
        batch = engine.batch("m", len(prompts))
        logits = batch.prefill_each(prompts)
        events = engine.events.of("prefill")
        assert max(event.tokens for event in events) == min(48, sum(lengths)) and sum(lengths) == sum(
            event.tokens for event in events
        )
        for i, ids in enumerate(prompts):
            alone = fresh(engine, ids)
            assert_equal(batch[i], alone, i)
            assert torch.equal(logits[i], batch[i].logits)  # type: ignore[arg-type]
        more = prompts_of(reversed(lengths), seed=900)
        batch.prefill_each(more)
        for i, ids in enumerate(prompts):
            assert_equal(batch[i], fresh(engine, ids + more[i]), i)


@pytest.mark.usefixtures("held")
def test_a_rectangle_may_be_a_tensor(engine: Engine) -> None:
    ids = torch.tensor(IDS[:21]).view(3, 7)
    batch = engine.batch("m", 3)
    batch.prefill_each(ids)  # type: ignore[arg-type]
    batch.step(torch.tensor([5, 6, 7]))  # type: ignore[arg-type]
    for i, row in enumerate(batch):
        assert_equal(row, fresh(engine, [*ids[i].tolist(), 5 + i]))
        assert all(type(token) is int for token in row.tokens)


@pytest.mark.parametrize("length", [11, 64, 100])
@pytest.mark.usefixtures("held")
def test_rows_from_a_prefix_share_its_pages_until_they_write(engine: Engine, length: int) -> None:
    prefix = fresh(engine, IDS[:length])
    used, copied, before = engine.arena.num_pages_used, engine.arena.bytes_copied, state(prefix)
    num_forwards = len(engine.events.of("prefill"))
    batch = Batch.from_prefix(prefix, 4)
    assert (engine.arena.num_pages_used, engine.arena.bytes_copied) == (used, copied)
    assert len(engine.events.of("prefill")) == num_forwards
    assert all(row.pages.pages == prefix.pages.pages and row.logits is prefix.logits for row in batch)
    own = prompts_of((3, 9, 1, 60), seed=500)
    batch.prefill_each(own)
    partial = length % 64 > 0
    copies = (engine.arena.bytes_copied - copied) // prefix.pages.layout.page_bytes
    assert copies == 4 * partial, "each row copies the page that it goes on in, and no other"
    assert_untouched(prefix, before)
    for step in range(6):
        batch.step([20 + step + i for i in range(4)])
    for i, row in enumerate(batch):
        assert_equal(row, fresh(engine, IDS[:length] + own[i] + [20 + step + i for step in range(6)]), i)
        assert row.pages.pages[: length // 64] == prefix.pages.pages[: length // 64]
    batch.close()
    assert_untouched(prefix, before)


@pytest.mark.usefixtures("held")
def test_rows_that_the_prefix_cache_serves_are_the_same(paths: dict[str, Path], engine: Engine) -> None:
    with Engine(kv_budget="32MiB") as cached, cached.lane.exclusive():
        cached.add("m", paths["llama"])
        fresh(cached, IDS[:100]).close()
        cached.events.clear()
        prompts = [IDS[:100] + IDS[300:305], IDS[:70], IDS[700:720]]
        batch = batch_of(cached, prompts)
        assert [row.num_cached for row in batch] == [100, 69, 0]
        assert sum(event.tokens for event in cached.events.of("prefill")) == 5 + 1 + 20
        batch.step([5, 6, 7])
        for i, row in enumerate(batch):
            assert_equal(row, fresh(engine, [*prompts[i], 5 + i]), i)
        refused = cached.batch("m", 3)
        with pytest.raises(ZeroDivisionError):
            refused.generate(prompts, 3, pick=lambda row, logits: 7 // (2 - row))
        assert [(len(row), len(row.pages), row.num_cached) for row in refused] == [(0, 0, 0)] * 3


# ---- some of the rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("active", [(1, 0, 1, 0, 0), (0, 0, 0, 0, 1), (1, 1, 1, 1, 0)])
@pytest.mark.usefixtures("held")
def test_rows_that_are_not_active_are_untouched(engine: Engine, active: tuple[int, ...]) -> None:
    batch, ids = batch_of(engine, prompts_of(RAGGED)), [5, 6, 7, 8, 9]
    before, pages = states(batch), [row.pages.pages for row in batch]
    batch.step_active([t if on else 10**9 for t, on in zip(ids, active, strict=True)], [bool(on) for on in active])
    full = row_macs(engine["m"].config)
    assert batch.last_step_macs == sum(active) * full
    batch.last_step_macs = 0
    found = batch.step_active(ids, [bool(on) for on in active])
    assert batch.last_step_macs == sum(active) * full
    for i, (row, logits) in enumerate(zip(batch, found, strict=True)):
        assert (logits is not None) == bool(active[i])
        if logits is None:
            assert_untouched(row, before[i], i)
            assert row.pages.pages == pages[i]
        else:
            assert_equal(row, fresh(engine, [*before[i][0], ids[i], ids[i]]), i)
    assert [event.sequences for event in engine.events.of("decode")] == [sum(active)] * 2


@pytest.mark.usefixtures("held")
def test_all_active_is_a_step_and_none_active_is_nothing(engine: Engine) -> None:
    batch, other = batch_of(engine, prompts_of(RAGGED)), batch_of(engine, prompts_of(RAGGED))
    logits = batch.step_active([5, 6, 7, 8, 9], [True] * 5)
    assert torch.equal(torch.stack([row for row in logits if row is not None]), other.step([5, 6, 7, 8, 9]))
    assert batch.last_step_macs == other.last_step_macs == 5 * row_macs(engine["m"].config)
    before, num_events = states(batch), len(engine.events)
    assert batch.step_active([1, 2, 3, 4, 5], [False] * 5) == [None] * 5
    assert (batch.last_step_macs, len(engine.events)) == (0, num_events)
    for row, was in zip(batch, before, strict=True):
        assert_untouched(row, was)


def test_multiply_accumulates_are_those_of_the_matrices(engine: Engine) -> None:
    """3 layers x 64 x (2 x 4 x 16 + 2 x 2 x 16 + 3 x 172), and a head of 300 rows."""
    assert row_macs(engine["m"].config) == 3 * 64 * (128 + 64 + 516) + 64 * 300


# ---- generating --------------------------------------------------------------------------------------


def alone_of(engine: Engine, prompts: Sequence[list[int]], count: int, name: str = "m") -> list[list[int]]:
    return [fresh(engine, ids, name).generate(count) for ids in prompts]


def set_stops(engine: Engine, stops: Iterable[int], patch: pytest.MonkeyPatch, name: str = "m") -> None:
    patch.setattr(engine[name].tokenizer, "stop_ids", frozenset(stops))


def until(tokens: list[int], stops: Iterable[int]) -> list[int]:
    at = next((i for i, token in enumerate(tokens) if token in stops), len(tokens) - 1)
    return tokens[: at + 1]


@pytest.mark.parametrize("arch", ["llama", "gemma3", *(pytest.param(a, marks=pytest.mark.slow) for a in ARCHS[1:3])])
def test_generating_is_every_rows_own_and_early_ends_cost_nothing(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Some rows stop at once, some on the way, some never; each leaves the forwards when it stops."""
    prompts, count = prompts_of((4, 64, 6, 70, 5)), 12
    with Engine(kv_budget="32MiB", config=UNCACHED) as engine, engine.lane.exclusive():
        engine.add("m", paths[arch])
        set_stops(engine, (), monkeypatch)
        free = alone_of(engine, prompts, count)
        stops = {free[0][0], free[3][4]}
        expected = [until(tokens, stops) for tokens in free]
        lengths = sorted(map(len, expected))
        assert lengths[0] == 1 < lengths[-1] == count
        engine.events.clear()
        set_stops(engine, stops, monkeypatch)
        batch = engine.batch("m", 5)
        assert batch.generate(prompts, count) == expected
        rounds = [sum(len(tokens) > n for tokens in expected) for n in range(1, max(map(len, expected)))]
        assert [event.sequences for event in engine.events.of("decode")] == rounds, "a forward that nobody needed"
        for row, ids, tokens in zip(batch, prompts, expected, strict=True):
            assert len(row) == len(row.pages) == len(ids) + len(tokens) - 1
            assert_equal(row, fresh(engine, ids + tokens[:-1]))
        batch.step([tokens[-1] for tokens in expected])
        for row, ids, tokens in zip(batch, prompts, expected, strict=True):
            assert_equal(row, fresh(engine, ids + tokens))
        assert batch.generate([[9]] * 5, 6, stop_at_eos=False) == [
            _free(engine, ids + tokens + [9], 6) for ids, tokens in zip(prompts, expected, strict=True)
        ]


def _free(engine: Engine, ids: list[int], count: int) -> list[int]:
    """Greedy tokens, whatever stops."""
    session, out = fresh(engine, ids), []
    for _ in range(count):
        out.append(session.step())
    return out


@pytest.mark.demo_model
def test_the_demo_model_generates_the_same(demo_model_path: Path) -> None:
    hosted(demo_model_path, "file")
    engine = demo_engine(demo_model_path)
    asked = ("What is the capital of France?", "Say hello.")
    prompts = [
        engine["file"].tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in asked
    ]
    with engine.batch("file", 2) as batch:
        out = batch.generate(prompts, 12)
        lengths = [len(row) for row in batch]
    expected = [engine.generate("file", prompt_ids=ids, max_new_tokens=12, draft=None).tokens for ids in prompts]
    assert out == expected and "Paris" in engine["file"].tokenizer.decode(out[0])
    assert lengths == [len(ids) + len(tokens) - 1 for ids, tokens in zip(prompts, out, strict=True)]


@pytest.mark.usefixtures("held")
def test_stop_tokens_may_be_ignored(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(RAGGED)
    set_stops(engine, (), monkeypatch)
    free = alone_of(engine, prompts, 6)
    set_stops(engine, {tokens[0] for tokens in free}, monkeypatch)
    assert engine.batch("m", 5).generate(prompts, 6, stop_at_eos=False) == free
    assert engine.batch("m", 5).generate(prompts, 6) == [tokens[:1] for tokens in free]


@pytest.mark.usefixtures("held")
def test_one_new_token_is_the_prefills(engine: Engine) -> None:
    prompts = prompts_of(RAGGED)
    batch = engine.batch("m", 5)
    assert batch.generate(prompts, 1) == alone_of(engine, prompts, 1)
    assert [len(row) for row in batch] == list(RAGGED)
    assert len(engine.events.of("decode")) == 5, "those of the rows alone"


@pytest.mark.usefixtures("held")
def test_a_hook_picks_each_rows_tokens(engine: Engine) -> None:
    prompts, seen = prompts_of(RAGGED), []

    def pick(row: int, logits: Tensor) -> int:
        seen.append(row)
        assert logits.shape == (300,)
        return int(logits[row::5].argmax()) * 5 + row  # a row's ids are its number modulo 5

    batch = engine.batch("m", 5)
    out = batch.generate(prompts, 8, stop_at_eos=False, pick=pick)
    assert all(token % 5 == row for row, tokens in enumerate(out) for token in tokens)
    assert sorted(seen) == [row for row in range(5) for _ in range(8)]
    for row, (ids, tokens) in enumerate(zip(prompts, out, strict=True)):
        single = fresh(engine, ids)
        for i, token in enumerate(tokens):
            assert single.logits is not None and pick(row, single.logits) == token
            if i < 7:
                single.append([token])
        assert_equal(batch[row], single)


@pytest.mark.parametrize(
    ("gives", "error", "message"),
    [
        (lambda row, logits: 1 // 0, ZeroDivisionError, "by zero"),
        (lambda row, logits: 300, InvalidRequest, r"pick gave 300 for row 2, expected an id in 0\.\.299"),
        (lambda row, logits: -1, InvalidRequest, "pick gave -1 for row 2"),
        (lambda row, logits: True, InvalidRequest, "pick gave True for row 2"),
        (lambda row, logits: 1.0, InvalidRequest, r"pick gave 1\.0 for row 2"),
    ],
)
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.usefixtures("held")
def test_a_hook_that_fails_leaves_every_row_as_it_was(
    engine: Engine, gives: Callable[[int, Tensor], Any], error: type[BaseException], message: str, at: int
) -> None:
    batch = batch_of(engine, prompts_of(RAGGED))
    before, calls = states(batch), [0] * 5

    def pick(row: int, logits: Tensor) -> Any:
        calls[row] += 1
        return gives(row, logits) if row == 2 and calls[2] == at else 7

    with pytest.raises(error, match=message):
        batch.generate(prompts_of((3, 5, 70, 2, 1), seed=800), 6, pick=pick)
    for i, row in enumerate(batch):
        assert_untouched(row, before[i], i)
    assert_goes_on(engine, batch, before)


@pytest.mark.usefixtures("held")
def test_a_hook_that_ends_its_own_row_stays_ended(engine: Engine) -> None:
    batch = engine.batch("m", 2, domain="mine")

    def pick(row: int, logits: Tensor) -> int:
        engine.drop_domain("mine")
        return 7

    with pytest.raises(Forgotten, match="the domain 'mine' was dropped"):
        batch.generate([[5], [6]], 4, pick=pick)
    assert not engine.lane.live and [row.tokens for row in batch] == [[], []]


# ---- all rows or none --------------------------------------------------------------------------------


def assert_goes_on(engine: Engine, batch: Batch, before: Sequence[tuple[list[int], int, Tensor, Any]]) -> None:
    """The next step is the one that these rows take without what failed."""
    batch.step([11 + i for i in range(len(batch))])
    for i, row in enumerate(batch):
        assert_equal(row, fresh(engine, [*before[i][0], 11 + i]), i)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b: b.step([5, 6, 300, 8, 9]), InvalidRequest, r"token 0 of the prompt is 300, expected an id in 0\.\."),
        (lambda b: b.step([5, 6, 7, 8]), InvalidRequest, "step: 4 tokens for 5 rows, expected one for each"),
        (lambda b: b.step(5), InvalidRequest, "5, expected a sequence"),
        (lambda b: b.step("abcde"), InvalidRequest, "step: the tokens are 'abcde', expected a sequence of token ids"),
        (lambda b: b.step_active([5] * 5, "abcde"), InvalidRequest, "step_active: the flags are 'abcde'"),
        (lambda b: b.step([5, 6, None, 8, 9]), InvalidRequest, "is None"),
        (lambda b: b.step_active([5] * 4, [True] * 5), InvalidRequest, "step_active: 4 tokens for 5 rows"),
        (lambda b: b.step_active([5] * 5, [True] * 6), InvalidRequest, "step_active: 6 flags for 5 rows"),
        (lambda b: b.prefill_each([[3], [4], [5, -1], [6], [7]]), InvalidRequest, "token 1 of the prompt is -1"),
        (lambda b: b.prefill_each([[3], [4], [], [6], [7]]), InvalidRequest, "the prompt is empty"),
        (lambda b: b.prefill_each([[3]] * 4), InvalidRequest, "prefill_each: 4 prompts for 5 rows"),
        (lambda b: b.prefill_each("abcde"), InvalidRequest, "prefill_each: the prompts are 'abcde'"),
        (lambda b: b.prefill_each([[3], [4], 5, [6], [7]]), InvalidRequest, "the prompt is 5"),
        (lambda b: b.prefill_each([[3], [4], [5] * 512, [6], [7]]), PromptTooLong, "513 prompt tokens and 0 new"),
        (lambda b: b.generate([[3]] * 4, 3), InvalidRequest, "generate: 4 prompts for 5 rows"),
        (lambda b: b.generate([[3]] * 5, 0), InvalidRequest, "max_new_tokens=0, expected a number of at least 1"),
        (lambda b: b.generate([[3]] * 5, 1.5), InvalidRequest, r"max_new_tokens=1\.5"),
        (lambda b: b.generate([[3]] * 5, 3, pick=7), InvalidRequest, "pick=7, expected something to call"),
        (lambda b: b.generate([[3]] * 5, 443), PromptTooLong, "71 prompt tokens and 442 new ones make 513"),
    ],
)
@pytest.mark.usefixtures("held")
def test_what_is_wrong_in_one_row_is_refused_for_all(
    engine: Engine, call: Callable[[Any], Any], error: type[PolymodelError], message: str
) -> None:
    batch = batch_of(engine, prompts_of(RAGGED))
    before, num_events = states(batch), len(engine.events)
    with pytest.raises(error, match=message):
        call(batch)
    assert len(engine.events) == num_events and not engine.lane.live
    for i, row in enumerate(batch):
        assert_untouched(row, before[i], i)


def fill(engine: Engine, leave: int) -> list[Session]:
    """Sessions of a page each, so that `leave` are free."""
    layout = engine.residency["m"].layout
    return [fresh(engine, IDS[:1]) for _ in range(engine.arena.num_free(layout) - leave)]


@pytest.mark.parametrize("verb", ["step", "prefill_each", "generate"])
def test_no_room_for_one_row_leaves_all_as_they_were(small: Engine, verb: str) -> None:
    """Rows 0 and 2 find their pages; row 1 needs more than what is left, on the way where it can."""
    with small.lane.exclusive():
        batch = batch_of(small, prompts_of((5, 64, 60)))
        before, pages = states(batch), [row.pages.pages for row in batch]
        if verb == "step":
            fillers = fill(small, 0)
            run = lambda: batch.step([7, 8, 9])  # noqa: E731
        elif verb == "prefill_each":
            fillers = fill(small, 2)
            run = lambda: batch.prefill_each([[7], [8] * 200, [9] * 8])  # noqa: E731
        else:
            fillers = fill(small, 1)
            run = lambda: batch.generate([[7], [8], [9]], 70, stop_at_eos=False)  # noqa: E731
        free = small.arena.num_free(batch[0].pages.layout)
        with pytest.raises(KVFull, match="KV pages"):
            run()
        assert small.arena.num_free(batch[0].pages.layout) == free and not small.lane.live
        for i, row in enumerate(batch):
            assert_untouched(row, before[i], i)
            assert row.pages.pages == pages[i]
        for filler in fillers[:6]:
            filler.close()
        assert_goes_on(small, batch, before)


@pytest.mark.usefixtures("held")
def test_a_row_that_gives_no_numbers_fails_all(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(engine, prompts_of(RAGGED))
    before, forward, rounds = states(batch), lane.forward, [0]

    def spoiled(model: Any, arena: Any, panel: Panel) -> Tensor:
        logits = forward(model, arena, panel).clone()
        rounds[0] += 1
        if rounds[0] == 3:
            logits[3, 17] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(lane, "forward", spoiled)
        with pytest.raises(NonFiniteLogits, match="m: a logit is NaN"):
            batch.generate([[7]] * 5, 9, stop_at_eos=False)
    for i, row in enumerate(batch):
        assert_untouched(row, before[i], i)
    assert_goes_on(engine, batch, before)


class Interrupted(BaseException):
    """As KeyboardInterrupt, but for pytest."""


@pytest.mark.parametrize("where", ["enter", "wait", "settle"])
@pytest.mark.parametrize("verb", ["step", "prefill_each", "generate"])
def test_an_interrupted_verb_leaves_every_row_as_it_was(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str, verb: str
) -> None:
    """Before the rows were handed in, in the midst of the work, and when it is done but was not taken over."""
    batch = batch_of(engine, prompts_of(RAGGED))
    before, counts = states(batch), [(row.num_cached, row.num_resumed) for row in batch]
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: batch.step([7] * 5),
        "prefill_each": lambda: batch.prefill_each(prompts_of((3, 90, 5, 1, 64), seed=700)),
        "generate": lambda: batch.generate([[7]] * 5, 30, stop_at_eos=False),
    }
    with monkeypatch.context() as patch:
        if where == "enter":
            enter = engine.lane.enter

            def entered(feeds: Any) -> None:
                enter(feeds)
                if feeds[0].into is batch[2]._context:
                    raise Interrupted

            patch.setattr(engine.lane, "enter", entered)
        elif where == "wait":

            def waited(work: Any) -> None:
                raise Interrupted

            patch.setattr(engine.lane, "wait", waited)
        else:

            def settled() -> None:
                raise Interrupted

            patch.setattr(batch[3], "_settle", settled)
        with pytest.raises(Interrupted):
            calls[verb]()
    for i, row in enumerate(batch):
        assert_untouched(row, before[i], i)
    assert counts == [(row.num_cached, row.num_resumed) for row in batch]
    assert_goes_on(engine, batch, before)


def test_a_busy_row_refuses_the_batch_and_frees_the_others(engine: Engine) -> None:
    batch = batch_of(engine, prompts_of(RAGGED))
    before = states(batch)
    with batch[3]._alone("append"):
        for verb in (
            lambda: batch.step([7] * 5),
            lambda: batch.prefill_each([[7]] * 5),
            lambda: batch.generate([[7]] * 5, 3),
        ):
            with pytest.raises(Busy, match="the session is running another verb"):
                verb()
        for i in (0, 1, 2, 4):
            assert_untouched(batch[i], before[i], i)
        batch.step_active([7] * 5, [True, True, True, False, True])
        assert_untouched(batch[3], before[3])
    for i, row in enumerate(batch):
        assert_equal(row, fresh(engine, before[i][0] + [7] * (i != 3)))
    with batch[1]._alone("append"), pytest.raises(Busy, match="close"):
        batch.close()
    assert [len(row) for row in batch] == [0, 65, 0, 0, 0], "the others are closed all the same"
    batch.close()


@pytest.mark.usefixtures("held")
def test_a_row_that_was_forgotten_stops_the_batch(engine: Engine) -> None:
    """Before the verb, and in the midst of it by a hook."""
    batch = batch_of(engine, prompts_of(RAGGED))
    before = states(batch)

    def pick(row: int, logits: Tensor) -> int:
        if row == 4 and len(batch[4]) == RAGGED[4] + 3:
            batch[1].strike("its first 3 tokens were forgotten")
        return 7

    with pytest.raises(Forgotten, match="its first 3 tokens were forgotten"):
        batch.generate([[7]] * 5, 6, pick=pick)
    for verb in (
        lambda: batch.step([7] * 5),
        lambda: batch.prefill_each([[7]] * 5),
        lambda: batch.generate([[7]] * 5, 2),
    ):
        with pytest.raises(Forgotten, match="its first 3 tokens were forgotten"):
            verb()
    assert not len(batch[1]) and not batch[1].pages.pages
    others = [0, 2, 3, 4]
    for i in others:
        assert_untouched(batch[i], before[i], i)
    batch.step_active([7] * 5, [i != 1 for i in range(5)])
    for i in others:
        assert_equal(batch[i], fresh(engine, [*before[i][0], 7]), i)


# ---- rows are sessions ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("held")
def test_rows_take_verbs_of_their_own_between_the_steps(engine: Engine) -> None:
    prompts = prompts_of((70, 70, 70, 70, 70, 70))
    batch = batch_of(engine, prompts)
    expected = [list(ids) for ids in prompts]

    def step(token: int) -> None:
        logits = batch.step([token] * 6)
        for tokens in expected:
            tokens.append(token)
        assert logits.shape[0] == 6

    step(5)
    batch[1].rollback(9)
    del expected[1][-9:]
    batch[2].quarantine(slice(60, None))
    del expected[2][60:]
    batch[3].swap_out()
    twin = batch[4].clone()
    batch[5].evict(slice(3, 8))
    del expected[5][3:8]
    step(6)
    assert batch[5].is_contaminated and not batch[3].is_swapped_out
    assert not torch.equal(batch[5].logits, fresh(engine, expected[5]).logits)  # type: ignore[arg-type]
    twin.append([9])
    with batch[0].provisional():
        step(7)
    expected[0].pop()
    batch[5].repair()
    step(8)
    for i, row in enumerate(batch):
        assert_equal(row, fresh(engine, expected[i]), i)
    assert_equal(twin, fresh(engine, [*prompts[4], 5, 9]))


@pytest.mark.usefixtures("held")
def test_a_contaminated_row_steps_with_the_others_and_stays_so(engine: Engine) -> None:
    batch = batch_of(engine, prompts_of((70, 70)))
    single = fresh(engine, prompts_of((70, 70))[1])
    for one in (batch[1], single):
        one.evict(slice(2, 5))
    batch.step([5, 6])
    single.append([6])
    assert torch.equal(batch[1].logits, single.logits) and batch[1].clean == 2  # type: ignore[arg-type]
    with pytest.raises(Contaminated):
        batch[1].pages.dump()


@pytest.mark.usefixtures("held")
def test_a_batch_may_be_made_of_sessions_that_exist(engine: Engine) -> None:
    rows = [fresh(engine, ids) for ids in prompts_of((5, 66))]
    batch = Batch(rows)
    assert len(batch) == 2 and list(batch) == rows and batch[1] is rows[1] and batch.model == "m"
    batch.step([8, 9])
    assert_equal(rows[1], fresh(engine, prompts_of((5, 66))[1] + [9]))


@pytest.mark.usefixtures("held")
def test_what_is_no_batch_is_refused(engine: Engine, paths: dict[str, Path]) -> None:
    engine.add("other", paths["qwen3"])
    one, other = engine.session("m"), engine.session("other")
    with Engine(kv_budget="8MiB") as elsewhere:
        elsewhere.add("m", paths["llama"])
        rows: Any
        for rows in ([one, one], [one, other], [one, elsewhere.session("m")]):
            with pytest.raises(InvalidRequest, match="a batch is of different sessions of one model of one engine"):
                Batch(rows)
    for rows in ([], [7]):
        with pytest.raises(InvalidRequest, match="expected at least one session"):
            Batch(rows)
    size: Any
    for size in (0, -3, 1.5, "2"):
        with pytest.raises(InvalidRequest, match=f"a batch of {size!r} rows, expected a number of at least 1"):
            engine.batch("m", size)
        with pytest.raises(InvalidRequest, match=f"a batch of {size!r} rows"):
            Batch.from_prefix(one, size)
    with pytest.raises(UnknownModel, match="'x'"):
        engine.batch("x", 2)
    batch = engine.batch("other", 2)
    batch.prefill_each([[3], [4]])
    engine.remove("other")
    for verb in (
        lambda: batch.step([3, 4]),
        lambda: batch.generate([[3], [4]], 2),
        lambda: batch.prefill_each([[3], [4]]),
    ):
        with pytest.raises(Forgotten, match="the model 'other' was removed"):
            verb()
    with pytest.raises(Forgotten, match="the model 'other' was removed"):
        Batch.from_prefix(batch[0], 2)


def test_a_closed_batch_says_so_whatever_is_asked_of_it(engine: Engine) -> None:
    batch = batch_of(engine, prompts_of((5, 6)))
    assert repr(batch) == "<batch of 2 rows of 'm'>"
    batch[0].close()
    with pytest.raises(InvalidRequest, match="step: the session is closed"):
        batch.step([7, 7])
    batch.step_active([7, 7], [False, True])
    assert not batch.is_closed
    batch.close()
    for verb in (
        lambda: batch.step([7, 7]),
        lambda: batch.step_active([7, 7], [False, False]),
        lambda: batch.prefill_each([[7], [7]]),
        lambda: batch.generate([[7], [7]], 2),
        batch.__enter__,
    ):
        with pytest.raises(InvalidRequest, match=r"^\w+: the batch is closed"):
            verb()
    with pytest.raises(InvalidRequest, match="clone: the session is closed"):
        Batch.from_prefix(batch[0], 2)
    assert repr(batch) == "<batch of 2 rows of 'm', closed>"
    batch.close()


def test_a_row_that_is_not_there_is_an_index_error_with_the_number_of_rows(engine: Engine) -> None:
    with engine.batch("m", 2) as batch:
        assert batch[-1] is batch[1]
        with pytest.raises(IndexError, match="row 5 of a batch of 2 rows"):
            batch[5]


def test_a_closed_engine_runs_no_batch(paths: dict[str, Path]) -> None:
    engine = Engine(kv_budget="8MiB", config=UNCACHED)
    engine.add("m", paths["llama"])
    batch = batch_of(engine, prompts_of((5, 6)))
    engine.close()
    for verb in (
        lambda: batch.step([3, 4]),
        lambda: batch.generate([[3], [4]], 2),
        lambda: batch.prefill_each([[3], [4]]),
    ):
        with pytest.raises(EngineClosed):
            verb()
    with pytest.raises(EngineClosed):
        engine.batch("m", 2)
    batch.close()


@pytest.mark.usefixtures("held")
def test_leaving_a_batch_gives_its_pages_back(engine: Engine) -> None:
    with engine.batch("m", 3) as batch:
        batch.generate(prompts_of((5, 64, 70)), 4, stop_at_eos=False)
        assert engine.arena.num_pages_used == 5
    assert engine.arena.num_pages_used == 0 and [len(row) for row in batch] == [0, 0, 0]
    prefix = fresh(engine, IDS[:70])
    clones = [engine.arena.num_pages_used]
    Batch.from_prefix(prefix, 3).close()
    assert engine.arena.num_pages_used == clones[0]


def test_a_prefix_that_cannot_be_cloned_leaves_no_rows(engine: Engine) -> None:
    prefix = fresh(engine, IDS[:70])
    with prefix._alone("append"), pytest.raises(Busy):
        Batch.from_prefix(prefix, 3)
    assert len(list(engine.lane.sessions)) == 1
    prefix.close()


# ---- one weight stream -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "most", "streams"), [(8, 64, [8]), (8, 8, [8]), (8, 3, [3, 3, 2]), (5, 1, [1] * 5)])
def test_a_step_streams_the_weights_once_for_as_many_rows_as_a_batch_holds(
    paths: dict[str, Path], size: int, most: int, streams: list[int]
) -> None:
    with Engine(kv_budget="16MiB", config=replace(UNCACHED, max_batch=most)) as engine, engine.lane.exclusive():
        engine.add("m", paths["llama"])
        prompts = prompts_of(range(3, 3 + size))
        batch = batch_of(engine, prompts)
        engine.events.clear()
        batch.step([7] * size)
        assert [event.sequences for event in engine.events.of("decode")] == streams
        for i, row in enumerate(batch):
            assert_equal(row, fresh(engine, [*prompts[i], 7]), i)


@pytest.mark.usefixtures("held")
def test_requests_sessions_and_batches_decode_in_the_same_forwards(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stops(engine, (), monkeypatch)
    prompts = prompts_of((5, 66, 9, 30))
    expected = [fresh(engine, ids).generate(count) for ids, count in zip(prompts, (60, 3, 7, 7), strict=True)]
    request = engine.submit("m", prompt_ids=prompts[0], max_new_tokens=60)
    session, batch = fresh(engine, prompts[1]), batch_of(engine, prompts[2:])

    def streams(verb: Callable[[], object]) -> list[int]:
        """Rows of each forward of the verb's turn."""
        engine.events.clear()
        verb()
        return [event.sequences for event in engine.events.of("decode")]

    assert not request.is_over
    assert streams(lambda: session.generate(3))[:4] == [2, 2, 2, 1]
    assert streams(lambda: batch.step([tokens[0] for tokens in expected[2:]]))[:2] == [3, 1]
    feeding = streams(lambda: batch.generate([[tokens[1]] for tokens in expected[2:]], 5))
    assert feeding[:5] == [3, 3, 3, 3, 1], "one forward for the request and both rows"
    engine.wait(request)
    assert request.output == expected[0] and session.tokens == prompts[1] + expected[1]
    assert [row.tokens for row in batch] == [ids + t[:6] for ids, t in zip(prompts[2:], expected[2:], strict=True)]
    assert engine.max_concurrent_decode() == 1


def test_batches_of_several_threads_decode_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stops(engine, (), monkeypatch)
    prompts = prompts_of((5, 66, 9, 30, 12, 1))
    expected = alone_of(engine, prompts, 24)
    out: dict[int, Any] = {}

    def run(first: int) -> None:
        with engine.batch("m", 2) as batch:
            out[first] = batch.generate(prompts[first : first + 2], 24)

    engine.events.clear()
    with engine.lane.exclusive():  # all are handed in before the lane goes on
        threads = [threading.Thread(target=run, args=(first,)) for first in (0, 2)]
        for thread in threads:
            thread.start()
        request = engine.submit("m", prompt_ids=prompts[4], max_new_tokens=24)
    for thread in threads:
        thread.join(60)
    engine.wait(request)
    assert out == {0: expected[:2], 2: expected[2:4]} and request.output == expected[4]
    assert max(event.sequences for event in engine.events.of("decode")) >= 3 and engine.max_concurrent_decode() == 1
