"""The engine: the same tokens in whatever company, budgets that hold, errors that leave everything as it was."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import safetensors.torch
import torch
from tiny import write_tiny, write_tokenizer

from polymodel import Engine, EngineConfig, can_share, errors
from polymodel.checkpoint import Checkpoint, open_checkpoint
from polymodel.engine import Options, Output
from polymodel.ledger import format_bytes
from polymodel.residency import model_nbytes
from polymodel.sequence import Sequence

PROMPTS = [
    torch.randint(3, 259, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (7, 70, 1, 130, 33)
]
Paths = dict[str, Path]
Alone = dict[tuple[str, int], list[int]]  # (model, prompt) -> tokens
MODELS = ("llama", "other", "qwen3", "gemma3")
UNCACHED = EngineConfig(prefix_cache=False, kv_borrows=False)  # so that all is computed, and pages can be counted
PLAIN: dict[str, Any] = {"max_new_tokens": 24, "stop_at_eos": False, "draft": None}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Tiny models; "other" is a llama with other random weights, "words" one with another vocabulary."""
    root = tmp_path_factory.mktemp("engine")
    kinds = {"llama": ("llama", 0), "other": ("llama", 1), "qwen3": ("qwen3", 0), "gemma3": ("gemma3", 0)}
    paths = {name: write_tokenizer(write_tiny(root / name, *kind)) for name, kind in kinds.items()}
    paths["short"] = write_tokenizer(write_tiny(root / "short", "llama", max_position_embeddings=64))
    paths["words"] = write_tokenizer(write_tiny(root / "words", "llama"), merges=("a b",))
    return paths


def assert_idle(engine: Engine) -> None:
    """Nothing in flight, nothing held that should not be."""
    with engine.lane.exclusive():
        _assert_idle(engine)


def _assert_idle(engine: Engine) -> None:
    engine.arena.check()
    engine.residency.check()
    assert (
        not engine.lane.live
        and engine.arena.num_pages_used == 0
        and not bool(engine.arena.bytes[: engine.arena.nbytes].any())
    )
    inside = [hosted.model for hosted in engine.residency.hosted.values() if hosted.model is not None]
    assert engine.ledger.total("weights") == model_nbytes(*inside)
    assert engine.ledger.of("kv") == {"arena": engine.arena.nbytes} and not engine.ledger.of("band_states")


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(kv_budget="16MiB", config=UNCACHED) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture
def held(engine: Engine) -> Iterator[None]:
    """The test drives the lane itself, turn by turn."""
    with engine.lane.exclusive():
        yield


@pytest.fixture(scope="module")
def alone(paths: Paths) -> Alone:
    """(model, prompt) -> tokens of a request that has the engine for itself."""
    tokens = {}
    for name in MODELS:
        with Engine(kv_budget="16MiB", config=UNCACHED) as engine:
            engine.add(name, paths[name])
            for i, ids in enumerate(PROMPTS):
                tokens[name, i] = engine.generate(name, prompt_ids=ids, **PLAIN).tokens
    assert all(len(out) == 24 and len(set(out)) >= 4 for out in tokens.values())
    return tokens


def snapshot(engine: Engine) -> object:
    """What a refused call must not change."""
    pool = engine.residency.pool
    residents = [(name, pool[name].num_bytes, pool[name].pinned, pool[name].leases) for name in pool.names()]
    loaded = {name: (hosted.model is not None, hosted.num_loads) for name, hosted in engine.residency.hosted.items()}
    requests = [(id(r), len(r.tokens), r.state) for r in engine.lane.live]
    return pool.budget, residents, loaded, engine.ledger.of("weights"), requests, engine.arena.num_pages_used


# ---- the same tokens ---------------------------------------------------------------------------------


def test_generate_is_stream_is_session(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    out = engine.generate("m", "Hello wörld", max_new_tokens=40)
    assert out.prompt_ids == engine["m"].tokenizer.encode("Hello wörld")
    assert out.text == engine["m"].tokenizer.decode(out.tokens) and len(set(out.tokens)) >= 20
    pieces = list(engine.stream("m", "Hello wörld", max_new_tokens=40))
    assert "".join(pieces) == out.text and len(pieces) > 10
    tokenizer = engine["m"].tokenizer
    within = [n for n, token in enumerate(out.tokens, 1) if b"\xc2" <= tokenizer.token_bytes(token) < b"\xf5"]
    for count in within[:3]:  # the last token begins a character that never comes
        text = "".join(engine.stream("m", "Hello wörld", max_new_tokens=count))
        assert text == tokenizer.decode(out.tokens[:count]) and text.endswith("\N{REPLACEMENT CHARACTER}")
    assert len(within) >= 3
    with engine.session("m") as session:
        session.append(out.prompt_ids)
        assert session.generate(40) == out.tokens
    again = engine.generate("m", prompt_ids=out.prompt_ids, max_new_tokens=40)
    assert (again.tokens, again.text, again.receipt) == (out.tokens, out.text, out.receipt)


@pytest.mark.usefixtures("held")
def test_interleaved_models_give_the_tokens_they_give_alone(engine: Engine, paths: Paths, alone: Alone) -> None:
    for name in MODELS:
        engine.add(name, paths[name])
    requests = {}
    for i, ids in enumerate(PROMPTS):
        for name in MODELS:
            requests[name, i] = engine.submit(name, prompt_ids=ids, **PLAIN)
        engine.lane.turn()  # the next ones join what is already running
    engine.run()
    assert {key: request.output for key, request in requests.items()} == alone
    turns = [event.model for event in engine.events.of("turn")]
    assert len(set(turns)) == 4 and max(event.sequences for event in engine.events.of("decode")) == 5
    assert engine.max_concurrent_decode() == 1


@pytest.mark.parametrize(
    "config",
    [
        replace(UNCACHED, quantum=1, prefill_chunk=5, max_batch=2),
        replace(UNCACHED, quantum=3, prefill_chunk=64),
        pytest.param(replace(UNCACHED, quantum=100, prefill_chunk=1), marks=pytest.mark.slow),
    ],
)
def test_no_setting_of_the_lane_changes_tokens(paths: Paths, alone: Alone, config: EngineConfig) -> None:
    with Engine(kv_budget="16MiB", config=config) as engine:
        for name in ("llama", "gemma3"):
            engine.add(name, paths[name])
        requests = {
            (n, i): engine.submit(n, prompt_ids=PROMPTS[i], **PLAIN) for i in (1, 0, 2) for n in engine.residency.hosted
        }
        engine.run()
        assert all(request.output == alone[key] for key, request in requests.items())
        assert max(event.tokens for event in engine.events.of("prefill")) <= config.prefill_chunk
        assert max(event.sequences for event in engine.events.of("decode")) <= config.max_batch
        assert_idle(engine)


def test_streams_drawn_in_turns_lose_nothing(engine: Engine, paths: Paths) -> None:
    texts = {}
    for name in ("llama", "other"):
        engine.add(name, paths[name])
        texts[name] = engine.generate(name, "Hi", max_new_tokens=40).text
    streams = {name: engine.stream(name, "Hi", max_new_tokens=40) for name in texts}
    got = dict.fromkeys(texts, "")
    while streams:
        for name in list(streams):
            piece = next(streams[name], None)
            if piece is None:
                del streams[name]
            else:
                got[name] += piece
    assert got == texts


def test_a_stream_keeps_what_came_while_its_reader_was_away(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    text = engine.generate("m", "Hi", max_new_tokens=40).text
    stream = engine.stream("m", "Hi", max_new_tokens=40)
    first = next(stream)
    engine.run()  # someone else drives the lane to the end
    assert first + "".join(stream) == text


@pytest.mark.parametrize("drafter", ["q4", pytest.param("other", marks=pytest.mark.slow), "target"])
def test_drafted_tokens_are_the_plain_ones(engine: Engine, paths: Paths, drafter: str) -> None:
    """By its own 4-bit twin, by other random weights, and by itself under another name."""
    engine.add("m", paths["llama"])
    engine.add("d", paths["other" if drafter == "other" else "llama"], weights="q4" if drafter == "q4" else "file")
    options = PLAIN | {"max_new_tokens": 40}
    drafted = rejected = 0
    for ids in PROMPTS[:2]:
        plain = engine.generate("m", prompt_ids=ids, **options)
        out = engine.generate("m", prompt_ids=ids, **options | {"draft": "d"})
        assert out.tokens == plain.tokens and len(set(out.tokens)) >= 20
        m = out.metrics
        assert sum(m.acceptance_histogram) <= m.num_target_forwards <= plain.metrics.num_target_forwards == 39
        assert sum(i * n for i, n in enumerate(m.acceptance_histogram)) == m.num_accepted
        assert m.num_accepted + m.num_target_forwards == 39
        drafted, rejected = drafted + m.num_drafted, rejected + m.num_drafted - m.num_accepted
    if drafter == "target":
        assert (m.num_target_forwards, m.draft_acceptance_rate, m.acceptance_histogram) == (8, 1.0, (0, 0, 0, 1, 7))
    elif drafter == "q4":
        assert 0 < rejected < drafted
    else:
        assert rejected > 0.9 * drafted > 0


@pytest.mark.usefixtures("held")
def test_drafting_in_a_batch_of_both_kinds(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    engine.add("q4", paths["llama"], weights="q4")
    engine.add("bad", paths["other"])
    drafters = ("q4", None, "bad", "q4", "auto")
    requests = [
        engine.submit("llama", prompt_ids=ids, **PLAIN | {"draft": draft})
        for ids, draft in zip(PROMPTS, drafters, strict=True)
    ]
    engine.run()
    assert [request.output for request in requests] == [alone["llama", i] for i in range(5)]
    assert [bool(request.num_drafted) for request in requests] == [True, False, True, True, False]


def _num_rounds(engine: Engine) -> int:
    return len(engine.events.of("decode")) + len(engine.events.of("verify"))


def test_an_adversary_costs_no_more_forwards_than_plain(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    engine.add("bad", paths["other"])
    plain = engine.generate("m", prompt_ids=PROMPTS[1], **PLAIN)
    drafted = engine.generate("m", prompt_ids=PROMPTS[1], **PLAIN | {"draft": "bad"})
    assert drafted.tokens == plain.tokens and drafted.metrics.num_drafted > 60
    forwards = [out.metrics.num_target_forwards for out in (plain, drafted)]
    assert forwards[1] <= forwards[0] and _num_rounds(engine) == sum(forwards)


def test_multi_model_off_only_turns_drafting_off(paths: Paths, alone: Alone) -> None:
    with Engine(kv_budget="16MiB", config=replace(UNCACHED, multi_model=False)) as engine:
        engine.add("llama", paths["llama"])
        engine.add("q4", paths["llama"], weights="q4")
        out = engine.generate("llama", prompt_ids=PROMPTS[0], **PLAIN | {"draft": "q4"})
        assert out.tokens == alone["llama", 0] and out.metrics.num_drafted == 0


# ---- where a request ends ------------------------------------------------------------------------------


def test_one_token_is_the_prefills(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    engine.add("q4", paths["llama"], weights="q4")
    for draft in (None, "q4"):
        out = engine.generate("llama", prompt_ids=PROMPTS[0], max_new_tokens=1, stop_at_eos=False, draft=draft)
        assert (out.tokens, out.finish_reason) == (alone["llama", 0][:1], "length")
        assert (out.metrics.num_target_forwards, out.metrics.tokens_per_second) == (0, 0.0)
    assert not engine.events.of("decode")


@pytest.mark.parametrize("draft", [None, "q4", pytest.param("same", marks=pytest.mark.slow)])
def test_a_stop_token_ends_a_request_and_is_not_in_its_text(
    engine: Engine, paths: Paths, monkeypatch: pytest.MonkeyPatch, draft: str | None
) -> None:
    engine.add("m", paths["llama"])
    engine.add("q4", paths["llama"], weights="q4")
    engine.add("same", paths["llama"])
    tokenizer = engine["m"].tokenizer
    assert tokenizer.stop_ids == {2}
    free = engine.generate("m", prompt_ids=PROMPTS[0], max_new_tokens=30)
    for at in (0, 3, 10):  # the first token, and in the middle of what was drafted
        stop = free.tokens[at]
        monkeypatch.setattr(tokenizer, "stop_ids", frozenset({stop}))
        end = free.tokens.index(stop)
        out = engine.generate("m", prompt_ids=PROMPTS[0], max_new_tokens=30, draft=draft)
        assert (out.tokens, out.finish_reason) == (free.tokens[: end + 1], "stop")
        assert out.text == tokenizer.decode(free.tokens[:end])
        assert "".join(engine.stream("m", prompt_ids=PROMPTS[0], max_new_tokens=30, draft=draft)) == out.text
        ignored = engine.generate("m", prompt_ids=PROMPTS[0], max_new_tokens=30, draft=draft, stop_at_eos=False)
        assert (ignored.tokens, ignored.finish_reason) == (free.tokens, "length")


def test_the_context_is_used_to_its_last_token(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["short"])
    engine.add("d", paths["short"], weights="q4")
    plain = engine.generate("m", prompt_ids=PROMPTS[4], max_new_tokens=31, stop_at_eos=False)
    drafted = engine.generate("m", prompt_ids=PROMPTS[4], max_new_tokens=31, stop_at_eos=False, draft="d")
    assert len(plain.tokens) == 31 and drafted.tokens == plain.tokens


def test_a_drafter_with_a_shorter_context_stops_drafting(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    engine.add("short", paths["short"])
    for i in (1, 3, 4):  # beyond its context from the start, and on the way
        out = engine.generate("llama", prompt_ids=PROMPTS[i], **PLAIN | {"max_new_tokens": 48, "draft": "short"})
        assert out.tokens[:24] == alone["llama", i]
        assert (out.metrics.num_drafted > 0) == (i == 4)


# ---- cancelling, failing -------------------------------------------------------------------------------


@pytest.mark.usefixtures("held")
def test_a_stream_that_is_closed_frees_its_pages(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    engine.add("q4", paths["llama"], weights="q4")
    stream = engine.stream("m", "Hello", max_new_tokens=200, draft="q4")
    next(stream)
    assert engine.arena.num_pages_used == 2 and len(engine.lane.live) == 1
    stream.close()
    engine.run()  # at the lane's next step
    assert_idle(engine)


@pytest.mark.usefixtures("held")
def test_a_stream_that_is_never_read_is_cancelled_too(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    stream = engine.stream("m", "Hello", max_new_tokens=200)
    assert len(engine.lane.live) == 1
    stream.close()
    engine.run()
    assert_idle(engine)
    engine.stream("m", "Hello")  # dropped at once
    engine.run()
    assert_idle(engine)


@pytest.mark.usefixtures("held")
def test_cancelling_one_leaves_the_others(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    requests = [engine.submit("llama", prompt_ids=ids, **PLAIN) for ids in PROMPTS]
    engine.lane.turn()
    engine.lane.cancel(requests[1])
    engine.run()
    assert requests[1].finish_reason == "cancelled" and len(requests[1].output) < 24
    engine.lane.cancel(requests[0])  # too late: it is over, and stays what it was
    assert (requests[0].finish_reason, engine.output(requests[0]).tokens) == ("length", alone["llama", 0])
    assert [r.output for i, r in enumerate(requests) if i != 1] == [alone["llama", i] for i in range(5) if i != 1]


@pytest.mark.parametrize("host_budget", ["1MiB", "0"], ids=["swap", "recompute"])
def test_full_pages_preempt_the_youngest_and_everybody_ends_with_his_own_tokens(
    paths: Paths, alone: Alone, host_budget: str
) -> None:
    with Engine(kv_budget="8MiB", host_budget=host_budget, config=UNCACHED) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        with engine.session("llama") as hog:
            layout = hog.pages.layout
            hog.append([3])
            fillers = [engine.session("llama") for _ in range(engine.arena.num_free(layout) - 7)]
            for filler in fillers:
                filler.append([3])
            assert engine.arena.num_free(layout) == 7  # each of the three comes to need three
            requests = [
                engine.submit("llama", prompt_ids=PROMPTS[1], **PLAIN | {"max_new_tokens": 70}) for _ in range(3)
            ]
            engine.run()
            assert [request.num_preempted for request in requests] == [0, 0, 1]
            assert [request.finish_reason for request in requests] == ["length"] * 3
            assert requests[0].output == requests[1].output == requests[2].output
            assert requests[0].output[:24] == alone["llama", 1]
            assert len(engine.events.of("resume")) == (host_budget != "0") and not engine.ledger.of("host_kv")
            for filler in fillers:
                filler.close()
    assert engine.arena.num_pages_used == 0


def test_who_is_alone_and_too_long_fails_with_what_was_wanted(paths: Paths) -> None:
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine:
        engine.add("llama", paths["llama"])
        layout = engine.residency["llama"].layout
        fillers = [engine.session("llama") for _ in range(engine.arena.num_free(layout) - 2)]
        for filler in fillers:
            filler.append([3])
        with pytest.raises(errors.KVFull, match="KV pages of 49,152 bytes wanted, 0 free"):  # in the middle of a decode
            engine.generate("llama", prompt_ids=PROMPTS[1], **PLAIN | {"max_new_tokens": 70})
        for filler in fillers:
            filler.close()
        assert_idle(engine)


def test_drafts_give_way_before_a_request_fails(paths: Paths, alone: Alone) -> None:
    """With pages for the target alone, a drafted request still gives the plain tokens."""
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine:
        engine.add("llama", paths["llama"])
        engine.add("q4", paths["llama"], weights="q4")
        layout = engine.residency["llama"].layout
        fillers = [engine.session("llama") for _ in range(engine.arena.num_free(layout) - 2)]
        for filler in fillers:
            filler.append([3])
        # 33 tokens and 48 new ones: two pages in the end; the drafter takes the second one at first
        out = engine.generate("llama", prompt_ids=PROMPTS[4], **PLAIN | {"max_new_tokens": 48, "draft": "q4"})
        assert out.tokens[:24] == alone["llama", 4] and out.metrics.num_drafted > 0
        for filler in fillers:
            filler.close()
        assert_idle(engine)


def test_pages_reserved_for_drafts_go_to_who_needs_them_now(paths: Paths, alone: Alone) -> None:
    """Three pages for two requests, which decoding plainly need one and two at the time; drafts would need four."""
    with Engine(kv_budget="12MiB", config=UNCACHED) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        engine.add("qwen3", paths["qwen3"])
        prompts = [PROMPTS[3][:60], PROMPTS[3][:63]]
        limits = (30, 3)
        plain = [
            engine.generate("llama", prompt_ids=ids, max_new_tokens=n, stop_at_eos=False).tokens
            for ids, n in zip(prompts, limits, strict=True)
        ]
        other = engine.session("qwen3")
        other.append([3])  # the drafter's pages have a superblock of their own
        layout = engine.residency["llama"].layout
        fillers = [engine.session("llama") for _ in range(engine.arena.num_free(layout) - 3)]
        for filler in fillers:
            filler.append([3])
        requests = [
            engine.submit("llama", prompt_ids=ids, max_new_tokens=n, stop_at_eos=False, draft="qwen3")
            for ids, n in zip(prompts, limits, strict=True)
        ]
        engine.run()
        assert [request.output for request in requests] == plain
        assert requests[0].num_drafted > 0
        for session in (*fillers, other):
            session.close()
        assert_idle(engine)


def test_a_prompt_that_does_not_fit_the_pages_fails_alone(paths: Paths, alone: Alone) -> None:
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        layout = engine.residency["llama"].layout
        fillers = [engine.session("llama") for _ in range(engine.arena.num_free(layout) - 4)]
        for filler in fillers:
            filler.append([3])
        small = engine.submit("llama", prompt_ids=PROMPTS[0], **PLAIN)
        large = engine.submit("llama", prompt_ids=PROMPTS[3] * 3, **PLAIN)
        late = engine.submit("llama", prompt_ids=PROMPTS[4], **PLAIN)
        engine.run()
        assert (small.output, late.output) == (alone["llama", 0], alone["llama", 4])
        with pytest.raises(errors.KVFull):
            engine.wait(large)
        for filler in fillers:
            filler.close()
        assert_idle(engine)


def poisoned(path: Path, folder: Path, tensor: str, row: int) -> Path:
    """The model with NaN in one row of a tensor."""
    write_tokenizer(folder)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    tensors[tensor][row] = float("nan")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((path / "config.json").read_text())
    return folder


@pytest.mark.usefixtures("held")
def test_nan_weights_fail_their_own_requests(engine: Engine, paths: Paths, tmp_path: Path, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    engine.add("broken", poisoned(paths["llama"], tmp_path, "model.layers.1.mlp.up_proj.weight", 3))
    good, bad = (engine.submit(name, prompt_ids=PROMPTS[0], **PLAIN) for name in ("llama", "broken"))
    engine.run()
    assert good.output == alone["llama", 0]
    with pytest.raises(errors.NonFiniteLogits, match=r"broken.*NaN"):
        engine.wait(bad)
    with pytest.raises(errors.NonFiniteLogits):
        list(engine.stream("broken", prompt_ids=PROMPTS[0]))


@pytest.mark.usefixtures("held")
def test_a_nan_in_one_row_fails_that_request_only(engine: Engine, paths: Paths, tmp_path: Path, alone: Alone) -> None:
    """Token 299's embedding is NaN: who has it in the prompt fails, beside others in the same forwards."""
    assert not any(299 in tokens for tokens in (*PROMPTS, *alone.values()))
    engine.add("llama", poisoned(paths["llama"], tmp_path, "model.embed_tokens.weight", 299))
    prompts = [PROMPTS[0], [*PROMPTS[2], 299], PROMPTS[3], [299]]
    requests = [engine.submit("llama", prompt_ids=ids, **PLAIN) for ids in prompts]
    engine.run()
    assert [request.finish_reason for request in requests] == ["length", "error", "length", "error"]
    assert (requests[0].output, requests[2].output) == (alone["llama", 0], alone["llama", 3])


@pytest.mark.usefixtures("held")
def test_a_nan_that_comes_later_fails_that_request_only(
    engine: Engine, paths: Paths, tmp_path: Path, alone: Alone
) -> None:
    """The embedding of a token that only one request comes to choose is NaN; drafted or not."""
    victim, token = next(
        (i, token)
        for i in (0, 1)
        for token in alone["llama", i][4:20]
        if token not in {*alone["llama", 4], *PROMPTS[i], *PROMPTS[4]}
    )
    engine.add("llama", poisoned(paths["llama"], tmp_path, "model.embed_tokens.weight", token))
    engine.add("q4", paths["llama"], weights="q4")
    for draft in (None, "q4"):
        bad = engine.submit("llama", prompt_ids=PROMPTS[victim], **PLAIN | {"draft": draft})
        good = engine.submit("llama", prompt_ids=PROMPTS[4], **PLAIN | {"draft": draft})
        engine.run()
        assert good.output == alone["llama", 4]
        assert isinstance(bad.error, errors.NonFiniteLogits)
        until = alone["llama", victim][: alone["llama", victim].index(token) + 1]
        # drafted, the token is in the same forward as the one before it, and its keys are NaN there already
        assert bad.output in ([until] if draft is None else [until, until[:-1]])


def test_a_drafter_of_nan_changes_nothing(engine: Engine, paths: Paths, tmp_path: Path, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    engine.add("bad", poisoned(paths["llama"], tmp_path, "model.layers.0.self_attn.o_proj.weight", 0))
    out = engine.generate("llama", prompt_ids=PROMPTS[0], **PLAIN | {"draft": "bad"})
    assert out.tokens == alone["llama", 0]


@pytest.mark.usefixtures("held")
def test_an_error_in_one_turn_reaches_its_requests_only(
    engine: Engine, paths: Paths, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llama", "other"):
        engine.add(name, paths[name])
    broken = engine.residency["other"].model
    forward = __import__("polymodel.lane", fromlist=["forward"]).forward

    def fails(model: Any, *args: Any, **options: Any) -> Any:
        if model is broken:
            raise OSError("the disk is gone")
        return forward(model, *args, **options)

    requests = [engine.submit(name, prompt_ids=PROMPTS[0], **PLAIN) for name in ("other", "llama")]
    monkeypatch.setattr("polymodel.lane.forward", fails)
    engine.run()
    assert requests[1].output == alone["llama", 0]
    with pytest.raises(OSError, match="the disk is gone"):
        engine.wait(requests[0])


# ---- budgets -------------------------------------------------------------------------------------------


def sizes(paths: Paths) -> dict[str, int]:
    with Engine(kv_budget="16MiB", config=UNCACHED) as engine:
        return {name: engine.add(name, paths[name]).nbytes for name in MODELS}


def test_models_come_and_go_under_a_budget_and_give_the_same_tokens(paths: Paths, alone: Alone) -> None:
    size = sizes(paths)
    budget = size["gemma3"] + max(size["llama"], size["qwen3"])
    config = replace(UNCACHED, lane_policy="round-robin")  # which pays no heed to who is in memory
    with Engine(budget=budget, kv_budget="16MiB", config=config) as engine, engine.lane.exclusive():
        for name in MODELS:
            engine.add(name, paths[name])
            engine.residency.check()
        requests = {(n, i): engine.submit(n, prompt_ids=PROMPTS[i], **PLAIN) for i in range(3) for n in MODELS}
        while engine.lane.turn():
            engine.residency.check()
            assert engine.ledger.total("weights") <= budget
        assert all(request.output == alone[key] for key, request in requests.items())
        assert sum(engine.residency[name].num_loads for name in MODELS) > 6
        assert len(engine.events.of("evict")) >= 4
        assert_idle(engine)


def test_the_lane_goes_on_while_a_model_is_added(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    reading, go_on = threading.Event(), threading.Event()

    class Slow(Checkpoint):
        def raw(self, name: str) -> torch.Tensor:
            reading.set()
            assert go_on.wait(60)
            return super().raw(name)

    with open_checkpoint(paths["qwen3"]) as base:
        slow = Slow(base.path, base.format, base.config, base.metadata, base._stored)
        thread = threading.Thread(target=engine.add, args=("qwen3", slow))
        thread.start()
        assert reading.wait(60)
        out = engine.generate("llama", prompt_ids=PROMPTS[1], **PLAIN)
        assert out.tokens == alone["llama", 1] and thread.is_alive()
        go_on.set()
        thread.join(60)
        assert engine.generate("qwen3", prompt_ids=PROMPTS[1], **PLAIN).tokens == alone["qwen3", 1]


def test_the_ledger_is_what_the_models_hold(engine: Engine, paths: Paths) -> None:
    for weights in ("file", "f32", "bf16", "q8", "q4", "w8a8"):
        for name in ("llama", "gemma3"):
            handle = engine.add(f"{name}-{weights}", paths[name], weights=weights)
            model = engine.residency[handle.name].model
            assert model is not None and handle.nbytes == model_nbytes(model)
            shared = engine.residency.shared_bytes(handle.name)  # rotations, and what two options store alike
            assert engine.ledger.of("weights").get(handle.name, 0) == handle.nbytes - shared


@pytest.mark.usefixtures("held")
def test_unloading_and_loading_again_changes_no_token(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    request = engine.submit("llama", prompt_ids=PROMPTS[1], **PLAIN)
    engine.lane.turn()
    engine.unload("llama")
    assert engine.ledger.total("weights") == 0 and engine.table().rows[0]["state"] == "disk"
    engine.unload("llama")
    engine.wait(request)
    assert request.output == alone["llama", 1]
    assert engine.residency["llama"].num_loads == 2


def test_shrinking_the_budget_gives_up_the_coldest(engine: Engine, paths: Paths) -> None:
    for name in MODELS:
        engine.add(name, paths[name])
    engine.pin("llama")
    engine.generate("other", prompt_ids=[5], max_new_tokens=1, stop_at_eos=False)
    total = engine.ledger.total("weights")
    engine.budget = total
    assert engine.residency.pool.names() == sorted(MODELS)
    engine.budget = total - 1
    assert engine.residency.pool.names() == ["gemma3", "llama", "other"]
    before = snapshot(engine)
    with pytest.raises(errors.PinnedNoRoom, match=f"{engine['llama'].nbytes:,} of the budget of 1,000"):
        engine.budget = "1 KB"
    with pytest.raises(errors.InvalidRequest, match="'much' is not a size"):
        engine.budget = "much"
    assert snapshot(engine) == before
    engine.budget = engine["llama"].nbytes
    assert engine.residency.pool.names() == ["llama"]
    with pytest.raises(errors.PinnedNoRoom, match="'other' needs"):
        engine.generate("other", prompt_ids=[5], max_new_tokens=1, stop_at_eos=False)
    engine.unpin("llama")
    assert len(engine.generate("other", prompt_ids=[5], max_new_tokens=2, stop_at_eos=False).tokens) == 2


def test_pinning_brings_a_model_back_and_unpinning_does_not(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    engine.unload("m")
    engine.unpin("m")
    assert engine.table().rows[0]["state"] == "disk"
    engine.pin("m")
    assert (engine.table().rows[0]["state"], engine.table().rows[0]["pinned"]) == ("device", True)


def test_what_cannot_be_added_is_refused_with_its_numbers(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"], pin=True)
    nbytes = engine["m"].nbytes
    engine.budget = budget = nbytes * 3 // 2
    before = snapshot(engine)
    held = f"'n' needs {nbytes:,} bytes, [0-9,]+ of them in memory, but {nbytes:,} of the budget of {budget:,} bytes"
    with pytest.raises(errors.PinnedNoRoom, match=held):
        engine.add("n", paths["other"])
    large = rf"'g' needs [\d,]+ bytes, the whole budget is {budget:,}"
    with pytest.raises(errors.TooLarge, match=large):
        engine.add("g", paths["gemma3"], weights="w8a8")
    with pytest.raises(errors.DuplicateId, match="'m' is already there"):
        engine.add("m", paths["other"])
    with pytest.raises(errors.EmptyId):
        engine.add("", paths["other"])
    with pytest.raises(errors.InvalidRequest, match="weights='q3'"):
        engine.add("n", paths["other"], weights="q3")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidRequest, match="no file, no folder"):
        engine.add("n", "no/such/model")
    assert snapshot(engine) == before and "n" not in engine and "g" not in engine


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_a_load_that_fails_midway_leaves_everything(engine: Engine, paths: Paths, error: BaseException) -> None:
    engine.add("llama", paths["llama"])
    before, arena = snapshot(engine), engine.arena.bytes[: engine.arena.nbytes].clone()

    def stop(done: int, of: int) -> None:
        if done == 2:
            raise error

    with pytest.raises(type(error)):
        engine.add("n", paths["other"], progress=stop)
    assert snapshot(engine) == before and torch.equal(engine.arena.bytes[: engine.arena.nbytes], arena)
    engine.residency.check()
    checkpoint = open_checkpoint(paths["other"])
    with pytest.raises(type(error)):
        engine.add("n", checkpoint, progress=stop)
    assert len(engine.add("n", checkpoint).band_digests) == 4  # the caller's checkpoint is still open


def test_a_load_that_fails_after_an_eviction_leaves_the_evicted_loadable(paths: Paths, alone: Alone) -> None:
    size = sizes(paths)
    with Engine(budget=size["llama"] + 1, kv_budget="16MiB", config=UNCACHED) as engine:
        engine.add("llama", paths["llama"])
        with pytest.raises(OSError):
            engine.add("other", paths["other"], progress=fail)
        assert "other" not in engine
        engine.residency.check()
        assert engine.generate("llama", prompt_ids=PROMPTS[0], **PLAIN).tokens == alone["llama", 0]
        assert_idle(engine)


def fail(done: int, of: int) -> None:
    raise OSError("disk")


@pytest.mark.usefixtures("held")
def test_a_reload_that_fails_fails_its_requests_and_can_be_tried_again(
    engine: Engine, paths: Paths, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llama", "other"):
        engine.add(name, paths[name])
    engine.unload("llama")
    with monkeypatch.context() as patch:
        patch.setattr("polymodel.residency.load_model", lambda *a, **k: fail(0, 0))
        requests = [engine.submit(name, prompt_ids=PROMPTS[0], **PLAIN) for name in ("llama", "other")]
        engine.run()
        with pytest.raises(OSError):
            engine.wait(requests[0])
        assert requests[1].output == alone["other", 0]
        engine.residency.check()
    assert engine.generate("llama", prompt_ids=PROMPTS[0], **PLAIN).tokens == alone["llama", 0]


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt_ids": []}, errors.InvalidRequest, "the prompt is empty"),
        ({"prompt_ids": [5, -1]}, errors.InvalidRequest, r"token 1 of the prompt is -1, expected an id in 0\.\.299"),
        ({"prompt_ids": [300]}, errors.InvalidRequest, "token 0 of the prompt is 300"),
        ({"prompt_ids": ["a"]}, errors.InvalidRequest, "token 0 of the prompt is 'a'"),
        ({}, errors.InvalidRequest, "exactly one of prompt, prompt_ids and messages, got none"),
        ({"prompt": "a", "prompt_ids": [1]}, errors.InvalidRequest, r"got \['prompt', 'prompt_ids'\]"),
        ({"messages": [{"role": "user", "content": "hi"}]}, errors.InvalidRequest, "no chat template"),
        ({"prompt_ids": [1], "max_new_tokens": 0}, errors.InvalidRequest, "max_new_tokens=0"),
        (
            {"prompt_ids": [1], "temperature": "0"},
            errors.InvalidRequest,
            "temperature must be 0 .*, got '0'",
        ),
        ({"prompt_ids": [1], "deadline": float("nan")}, errors.InvalidRequest, "deadline=nan, expected seconds"),
        ({"prompt_ids": [1], "seed": 1.5}, errors.InvalidRequest, "seed must be an integer, got 1.5"),
        ({"prompt_ids": [1], "priority": True}, errors.InvalidRequest, "priority=True, expected an integer"),
        (
            {"prompt_ids": [1], "draft": False},
            errors.InvalidRequest,
            "draft: .* name, .*, a Draft or None, got False",
        ),
        ({"messages": "hi"}, errors.InvalidRequest, 'messages=\'hi\', expected a list of {"role": ..., "content"'),
        ({"messages": [{"role": "user"}]}, errors.InvalidRequest, 'expected a list of {"role"'),
        ({"prompt": ["a" * 500]}, errors.InvalidRequest, r"the prompt is \['a{115}\.\.\., expected text"),
        (
            {"prompt_ids": [3] * 500, "max_new_tokens": 13},
            errors.PromptTooLong,
            "500 prompt tokens and 13 new ones make 513",
        ),
        ({"prompt_ids": [1], "draft": "m"}, errors.InvalidRequest, "cannot draft for itself"),
        ({"prompt_ids": [1], "draft": "nobody"}, errors.UnknownModel, "'nobody'"),
        ({"prompt_ids": [1], "draft": "words"}, errors.VocabMismatch, "'words' cannot draft for 'm'.*first at id 259"),
        ({"model": "nobody", "prompt_ids": [1]}, errors.UnknownModel, "no model named 'nobody'; there are m, words"),
    ],
)
def test_a_wrong_request_is_refused_and_changes_nothing(
    engine: Engine, paths: Paths, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine.add("m", paths["llama"])
    engine.add("words", paths["words"])
    before = snapshot(engine)
    for call in (engine.generate, engine.submit, engine.stream):
        with pytest.raises(error, match=message):
            call(**{"model": "m"} | options)
    assert snapshot(engine) == before
    assert isinstance(error("x"), errors.PolymodelError)


def test_a_full_queue_refuses_and_takes_again_once_there_is_room(paths: Paths) -> None:
    with Engine(kv_budget="16MiB", config=replace(UNCACHED, max_queue=2)) as engine, engine.lane.exclusive():
        engine.add("m", paths["llama"])
        requests = [engine.submit("m", prompt_ids=[5, 6], **PLAIN) for _ in range(2)]
        before = snapshot(engine)
        with pytest.raises(errors.QueueFull, match="2 requests are waiting or running, max_queue is 2"):
            engine.submit("m", prompt_ids=[5, 6], **PLAIN)
        assert snapshot(engine) == before
        engine.lane.cancel(requests[0])
        engine.submit("m", prompt_ids=[5, 6], **PLAIN)
        engine.run()
        assert_idle(engine)


def test_an_engine_that_is_set_up_wrongly_says_so() -> None:
    with pytest.raises(errors.InvalidRequest, match="device='cuda'"):
        Engine(device="cuda")
    for wrong, message in (
        ({"device": 3}, "device=3, expected 'cpu'"),
        ({"config": {"max_batch": 8}}, r"config={'max_batch': 8}, expected an EngineConfig"),
        ({"budget": 1.5}, "budget=1.5, expected a number of bytes"),
        ({"host_budget": True}, "host_budget=True, expected a number of bytes"),
    ):
        with pytest.raises(errors.InvalidRequest, match=message):
            Engine(**wrong)
    with pytest.raises(errors.InvalidRequest, match="kv_budget: 'lots' is not a size"):
        Engine(kv_budget="lots")
    with pytest.raises(errors.InvalidRequest, match="it needs at least 2"):
        Engine(kv_budget=1)
    for field, value in (("quantum", 0), ("max_batch", -1), ("draft_tokens", 64), ("draft_tokens", 0)):
        with pytest.raises(errors.InvalidRequest, match=f"EngineConfig.{field} must be .* got {value}"):
            EngineConfig(**{field: value})
    for field in ("budget", "prefix_budget", "quantum"):
        with pytest.raises(errors.InvalidRequest, match=f"EngineConfig.{field} must be an integer, got '1GiB'"):
            EngineConfig(**{field: "1GiB"})


@pytest.mark.usefixtures("held")
def test_a_running_request_has_no_output_yet(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    request = engine.submit("m", prompt_ids=[5, 6], **PLAIN)
    with pytest.raises(errors.InvalidRequest, match="still running"):
        engine.output(request)
    engine.wait(request)
    assert isinstance(engine.output(request), Output)


def test_a_handle_where_a_name_belongs_is_refused_with_the_name_to_use(engine: Engine, paths: Paths) -> None:
    handle: Any = engine.add("m", paths["llama"])
    before = snapshot(engine)
    asking = (engine.generate, engine.submit, engine.stream, engine.share_prefix, engine.warm, engine.forget)
    naming = (engine.session, engine.receipt, engine.pin, engine.unpin, engine.unload, engine.remove)
    verbs: list[Callable[[], Any]] = [
        *(partial(verb, handle, "Hi") for verb in asking),
        *(partial(verb, handle) for verb in (*naming, engine.__getitem__, engine.__contains__)),
        lambda: engine.batch(handle, 2),
        lambda: asyncio.run(engine.agenerate(handle, "Hi")),
        lambda: asyncio.run(anext(engine.astream(handle, "Hi"))),
    ]
    for verb in verbs:
        with pytest.raises(errors.InvalidRequest, match="expected a model's name, got a ModelHandle; use 'm'"):
            verb()
    with pytest.raises(errors.InvalidRequest, match=r"draft: .*, a Draft or None, got a ModelHandle; use 'm'"):
        engine.submit("m", "Hi", draft=handle)
    with pytest.raises(errors.InvalidRequest, match="model: expected a model's name, got 7"):
        engine.session(7)  # type: ignore[arg-type]
    for call in (engine.wait, engine.cancel, engine.output):
        with pytest.raises(errors.InvalidRequest, match="expected a request, as `submit` gives, got 'm'"):
            call("m")  # type: ignore[operator]
    with pytest.raises(errors.InvalidRequest, match=r"can_share: expected models as eng\['a'\] gives them, got a str"):
        can_share("m", handle)  # type: ignore[arg-type]
    assert snapshot(engine) == before


def test_every_verb_takes_the_options_of_submit_and_names_itself_where_one_is_unknown(engine: Engine) -> None:
    explicit = inspect.signature(Engine.submit, eval_str=True).parameters
    assert {n: p.annotation for n, p in explicit.items() if p.kind is p.KEYWORD_ONLY} == get_type_hints(Options)
    wrong: dict[str, Any] = {"max_tokens": 5}
    for verb, call in (
        ("generate", lambda: engine.generate("m", "Hi", **wrong)),
        ("stream", lambda: engine.stream("m", "Hi", **wrong)),
        ("agenerate", lambda: asyncio.run(engine.agenerate("m", "Hi", **wrong))),
        ("astream", lambda: asyncio.run(anext(engine.astream("m", "Hi", **wrong)))),
    ):
        with pytest.raises(TypeError, match=rf"^{verb}\(\) got an unexpected option 'max_tokens'; .*max_new_tokens"):
            call()


def test_an_engine_is_the_names_of_its_models(engine: Engine, paths: Paths) -> None:
    assert (list(engine), len(engine), bool(engine)) == ([], 0, True)
    for name in ("b", "a"):
        engine.add(name, paths["llama"])
    assert (list(engine), len(engine), "a" in engine, "c" in engine) == (["b", "a"], 2, True, False)


@pytest.mark.usefixtures("held")
def test_what_an_engine_gives_shows_itself_in_a_line(engine: Engine, paths: Paths) -> None:
    handle = engine.add("m", paths["llama"])
    size = format_bytes(handle.nbytes)
    assert repr(handle) == f"<model 'm': llama, 3 layers, {size}, on the device>"
    request = engine.submit("m", prompt_ids=[5, 6, 7], **PLAIN)
    shown = f"<request {request.number} of 'm': "
    assert repr(request) == shown + "waiting, 3 prompt tokens, 0 of 24 new>"
    engine.wait(request)
    assert repr(request) == shown + "length, 3 prompt tokens, 24 of 24 new>"
    engine.unload("m")
    assert repr(handle) == f"<model 'm': llama, 3 layers, {size}, not on the device>"


# ---- removing, closing, threads ------------------------------------------------------------------------


@pytest.mark.usefixtures("held")
def test_removing_a_model_cancels_its_requests_only(engine: Engine, paths: Paths, alone: Alone) -> None:
    for name in ("llama", "other"):
        engine.add(name, paths[name])
    gone, kept = (engine.submit(name, prompt_ids=PROMPTS[0], **PLAIN) for name in ("other", "llama"))
    engine.lane.turn()
    engine.remove("other")
    assert gone.finish_reason == "cancelled" and "other" not in engine
    engine.run()
    assert kept.output == alone["llama", 0]
    with pytest.raises(errors.UnknownModel):
        engine.remove("other")
    engine.add("other", paths["gemma3"])
    assert engine.generate("other", prompt_ids=PROMPTS[0], **PLAIN).tokens == alone["gemma3", 0]


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("after", ["remove", "unload", "replace"])
def test_losing_the_drafter_midway_changes_nothing(engine: Engine, paths: Paths, alone: Alone, after: str) -> None:
    engine.add("llama", paths["llama"])
    engine.add("d", paths["llama"], weights="q4")
    request = engine.submit("llama", prompt_ids=PROMPTS[1], **PLAIN | {"draft": "d"})
    engine.lane.turn()
    assert request.num_drafted > 0 and not request.is_over
    engine.unload("d") if after == "unload" else engine.remove("d")
    if after == "replace":
        engine.add("d", paths["gemma3"])  # of another geometry
    drafted = request.num_drafted
    engine.wait(request)
    assert request.output == alone["llama", 1] and request.num_drafted == drafted
    assert after != "unload" or engine.table().rows[1]["state"] == "disk"  # it is not loaded in order to draft


def test_closing_fails_what_is_running_and_refuses_everything_after(paths: Paths) -> None:
    engine = Engine(kv_budget="16MiB", config=UNCACHED)
    engine.add("m", paths["llama"])
    with engine.lane.exclusive():
        request, waiting = (engine.submit("m", prompt_ids=ids, **PLAIN) for ids in PROMPTS[:2])
        stream, session = engine.stream("m", "Hi", max_new_tokens=99), engine.session("m")
        session.append([5, 6, 7])
        next(stream)
        engine.close()
    engine.close()
    for over in (request, waiting):
        with pytest.raises(errors.EngineClosed, match="the engine was closed"):
            engine.wait(over)
    with pytest.raises(errors.EngineClosed):
        list(stream)
    for call in (
        lambda: engine.generate("m", prompt_ids=[5]),
        lambda: engine.stream("m", "Hi"),
        lambda: engine.add("n", paths["other"]),
        lambda: engine.session("m"),
        lambda: session.append([5]),
    ):
        with pytest.raises(errors.EngineClosed, match="the engine is closed"):
            call()
    session.close()
    assert engine.ledger.total("weights") == 0 and not list(engine.table())
    assert_idle(engine)


def test_the_context_manager_closes_on_an_error_too(paths: Paths) -> None:
    with pytest.raises(KeyError), Engine(kv_budget="16MiB", config=UNCACHED) as engine:
        engine.add("m", paths["llama"])
        engine.submit("m", prompt_ids=[5], **PLAIN)
        raise KeyError
    assert_idle(engine)
    assert engine.lane.is_closed


def test_threads_generate_at_once_and_one_decodes_at_a_time(engine: Engine, paths: Paths, alone: Alone) -> None:
    for name in ("llama", "gemma3"):
        engine.add(name, paths[name])
    got: Alone = {}
    failed: list[BaseException] = []
    start = threading.Barrier(4)

    def work(name: str, prompts: tuple[int, ...]) -> None:
        try:
            start.wait()
            for i in prompts:
                got[name, i] = engine.generate(name, prompt_ids=PROMPTS[i], **PLAIN).tokens
        except BaseException as error:
            failed.append(error)

    jobs = [("llama", (0, 1)), ("llama", (3, 4)), ("gemma3", (0, 1)), ("gemma3", (3,))]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert got == {key: tokens for key, tokens in alone.items() if key in got} and len(got) == 7
    assert engine.max_concurrent_decode() == 1
    intervals = sorted((e.start, e.stop) for kind in ("decode", "prefill") for e in engine.events.of(kind))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(intervals))


def test_streams_in_two_threads_lose_nothing(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    texts = {prompt: engine.generate("m", prompt, max_new_tokens=40).text for prompt in ("Hi", "Hello there")}
    got: dict[str, str] = {}

    def read(prompt: str) -> None:
        got[prompt] = "".join(engine.stream("m", prompt, max_new_tokens=40))

    threads = [threading.Thread(target=read, args=(prompt,)) for prompt in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == texts


# ---- what there is to see ------------------------------------------------------------------------------


@pytest.mark.usefixtures("held")
def test_the_table_says_what_is_there(engine: Engine, paths: Paths) -> None:
    assert str(engine.table()) == "no models"
    engine.add("m", paths["llama"], pin=True)
    engine.add("q", paths["gemma3"], weights="q4")
    engine.unload("q")
    engine.submit("m", prompt_ids=[5], **PLAIN)
    one, two = engine.table()
    assert one.items() >= {"model": "m", "state": "device", "pinned": True, "requests": 1, "computed": "f32"}.items()
    assert two.items() >= {"arch": "gemma3", "layers": 7, "weights": "q4", "state": "disk", "pinned": False}.items()
    weights = safetensors.torch.load_file(paths["llama"] / "model.safetensors").values()
    assert one["params"] == sum(weight.numel() for weight in weights)
    assert one["shared_bytes"] == 0 and one["shares"] == []
    engine.add("same", paths["llama"])
    assert engine.table().rows[2]["shared_bytes"] == engine["same"].nbytes == engine.table().rows[0]["shared_bytes"]
    assert engine.table().rows[2]["shares"] == ["3 with m"]
    engine.remove("same")
    header, *rows = str(engine.table()).splitlines()
    assert header.split()[:3] == ["MODEL", "ARCH", "LAYERS"] and len(rows) == 2
    engine.run()


def test_metrics_and_receipts(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    engine.add("q", paths["llama"], weights="q8")
    out = engine.generate("m", prompt_ids=PROMPTS[0], **PLAIN)
    m = out.metrics
    assert (m.num_prompt_tokens, m.num_output_tokens, m.num_target_forwards, m.num_drafted) == (7, 24, 23, 0)
    assert m.time_to_first_token > 0 and m.decode_seconds > 0 and m.mean_acceptance_length == 1.0
    assert m.tokens_per_second == pytest.approx(23 / m.decode_seconds)
    assert out.receipt["threads"] == str(torch.get_num_threads()) and out.receipt["weights"] == "file"
    digests = {engine.receipt("m")["policy"], engine.receipt("q")["policy"]}
    torch.set_num_threads(torch.get_num_threads() + 1)  # the fixture restores it
    digests.add(engine.receipt("m")["policy"])
    assert len(digests) == 3


def test_events_tell_the_story_of_a_request(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    engine.generate("m", prompt_ids=PROMPTS[3], **PLAIN)
    (admit,) = engine.events.of("admit")
    assert admit.num_bytes == engine["m"].nbytes
    assert sum(event.tokens for event in engine.events.of("prefill")) == 130
    assert [event.tokens for event in engine.events.of("decode")] == [1] * 23
    assert engine.max_concurrent_decode() == 1


@pytest.mark.usefixtures("held")
def test_a_request_is_a_sequence(engine: Engine, paths: Paths) -> None:
    engine.add("m", paths["llama"])
    request = engine.submit("m", prompt_ids=[5, 6], **PLAIN)
    assert isinstance(request, Sequence) and request.output == [] and request.num_left == 24
    engine.run()
    assert request.tokens[:2] == [5, 6] and request.num_left == 0
