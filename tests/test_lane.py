"""The lane: whoever joins, leaves, gives way, fails or waits, each request gets the tokens that it gets alone."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import write_tiny, write_tokenizer
from torch import Tensor

from polymodel import Engine, EngineConfig, errors
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.config import LANE_POLICIES, PREEMPTIONS, Draft
from polymodel.events import LETTERS, chrome_trace, timeline
from polymodel.model import Model, Panel
from polymodel.residency import model_nbytes
from polymodel.sample import Sampler, Sampling
from polymodel.schedule import jain
from polymodel.sequence import Drafts
from polymodel.sequence import Sequence as Request

PROMPTS = [
    torch.randint(3, 259, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (7, 70, 1, 120, 50)
]
MODELS = ("llama", "qwen3", "gemma3")
NUM_NEW = 24
PLAIN: dict[str, Any] = {"max_new_tokens": NUM_NEW, "stop_at_eos": False, "draft": None}
UNCACHED = EngineConfig(prefix_cache=False, kv_borrows=False)
PATIENCE = 60.0  # seconds until a thread counts as stuck
Paths = dict[str, Path]
Alone = dict[tuple[str, int], list[int]]  # (model, prompt) -> tokens


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the module's fixtures, as for its tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    root = tmp_path_factory.mktemp("lane")
    paths = {name: write_tokenizer(write_tiny(root / name, name)) for name in MODELS}
    paths["other"] = write_tokenizer(write_tiny(root / "other", "llama", 1))
    return paths


@pytest.fixture(scope="module")
def alone(paths: Paths) -> Alone:
    """What a request gives that has the engine for itself."""
    tokens = {}
    with Engine(kv_budget="16MiB", config=UNCACHED) as engine:
        for name in (*MODELS, "other"):
            engine.add(name, paths[name])
            for i in range(len(PROMPTS)):
                tokens[name, i] = generate(engine, name, i)
    assert all(len(out) == NUM_NEW and len(set(out)) >= 4 for out in tokens.values())
    return tokens


def submit(engine: Engine, name: str, i: int, **options: Any) -> Request:
    return engine.submit(name, prompt_ids=PROMPTS[i], **PLAIN | options)


def generate(engine: Engine, name: str, i: int, **options: Any) -> list[int]:
    return engine.generate(name, prompt_ids=PROMPTS[i], **PLAIN | options).tokens


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output for request in requests]


def assert_idle(engine: Engine) -> None:
    """Nothing in flight, and no byte held that should not be."""
    with engine.lane.exclusive():
        engine.arena.check()
        engine.residency.check()
        engine.prefixes.check()
        assert not engine.lane.live and not engine.ledger.of("host_kv") and not engine.ledger.of("draft_kv")
        assert engine.residency.host.budget == engine.residency.host_budget
        inside = [hosted.model for hosted in engine.residency.hosted.values() if hosted.model is not None]
        assert engine.ledger.total("weights") == model_nbytes(*inside)
        engine.prefixes.drop("default")
        assert engine.arena.num_pages_used == 0 and not bool(engine.arena.bytes.any())


@pytest.fixture
def engine(paths: Paths) -> Iterator[Engine]:
    with Engine(kv_budget="16MiB", config=UNCACHED) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture
def held(engine: Engine) -> Iterator[None]:
    """The test drives the lane itself, turn by turn."""
    with engine.lane.exclusive():
        yield


@contextmanager
def few_pages(engine: Engine, count: int, *names: str) -> Iterator[None]:
    """Leave this many pages of each of these models' geometries."""
    taken = []
    with engine.lane.exclusive():
        layouts = dict.fromkeys(engine.residency[name].layout for name in names)
        for layout in layouts:  # each has a superblock before the first one takes all
            taken.append((layout, engine.arena.allocate(layout, 1)))
        for layout in layouts:
            taken.append((layout, engine.arena.allocate(layout, engine.arena.num_free(layout))))
        for layout, pages in taken[len(layouts) :]:
            engine.arena.release(layout, [pages.pop() for _ in range(count)])
    yield
    with engine.lane.exclusive():
        for layout, pages in taken:
            engine.arena.release(layout, pages)


def in_threads(*jobs: Callable[[], object], timeout: float = PATIENCE) -> list[Any]:
    """What each returns; nobody is stuck."""
    results: list[Any] = [None] * len(jobs)
    failed: list[BaseException] = []

    def work(i: int, job: Callable[[], object]) -> None:
        try:
            results[i] = job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=each, daemon=True) for each in enumerate(jobs)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    if failed:
        raise failed[0]
    return results


def wait_until(done: Callable[[], bool], timeout: float = PATIENCE) -> None:
    until = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < until, "it does not come to pass"
        time.sleep(0.002)


# ---- the same tokens ---------------------------------------------------------------------------------


def random_engine(rng: random.Random, paths: Paths, **config: Any) -> Engine:
    settings = EngineConfig(
        prefix_cache=rng.random() < 0.5,
        kv_borrows=False,
        lane_policy=rng.choice(LANE_POLICIES),
        preemption=rng.choice(PREEMPTIONS),
        host_budget=rng.choice((0, 200_000, 4 << 20)),
        quantum=rng.choice((1, 3, 8)),
        prefill_chunk=rng.choice((5, 40, 512)),
        max_batch=rng.choice((1, 2, 64)),
        max_wait=rng.choice((None, 0.0, 0.05)),
        **config,
    )
    engine = Engine(kv_budget="16MiB", config=settings)
    for name in MODELS:
        engine.add(name, paths[name])
    engine.add("q4", paths["llama"], weights="q4")
    if rng.random() < 0.4:  # some have to make room for each other
        engine.budget = engine.ledger.total("weights") * 2 // 3
    return engine


def random_request(rng: random.Random, engine: Engine, **options: Any) -> tuple[tuple[str, int], Request]:
    key = rng.choice(MODELS), rng.randrange(len(PROMPTS))
    options |= {"priority": rng.choice((0, 0, 1)), "max_new_tokens": rng.choice((1, 4, 9, NUM_NEW))}
    if key[0] == "llama":
        options["draft"] = rng.choice((None, "q4"))
    return key, submit(engine, *key, **options)


def assert_own_tokens(requests: Sequence[tuple[tuple[str, int], Request]], alone: Alone) -> None:
    for key, request in requests:
        assert request.error is None, request.error
        expected = alone[key][: request.max_new_tokens]
        if request.finish_reason == "cancelled":
            assert request.output == expected[: len(request.output)]
        else:
            assert (request.finish_reason, request.output) == ("length", expected)


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 80))]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_joins_leaves_and_gives_way_between_turns_keeps_its_own_tokens(
    paths: Paths, alone: Alone, seed: int
) -> None:
    rng, requests = random.Random(seed), []
    with random_engine(rng, paths) as engine:
        with engine.lane.exclusive(), few_pages(engine, 4, *MODELS):
            for _ in range(60):
                action = rng.random()
                if action < 0.3:
                    requests.append(random_request(rng, engine))
                elif action < 0.36 and requests:
                    engine.cancel(rng.choice(requests)[1])
                else:
                    engine.lane.turn()
                engine.residency.check()
            engine.run()
            assert_own_tokens(requests, alone)
            assert engine.max_concurrent_decode() <= 1
            preempted = sum(request.num_preempted for _, request in requests)
            assert preempted == len(engine.events.of("preempt"))
        assert_idle(engine)


def test_the_random_runs_meet_preemption_in_both_ways(paths: Paths) -> None:
    """Or the test above shows little."""
    kinds = set()
    for preemption in PREEMPTIONS:
        config = replace(UNCACHED, preemption=preemption, host_budget=4 << 20)
        with Engine(kv_budget="8MiB", config=config) as engine, engine.lane.exclusive():
            engine.add("llama", paths["llama"])
            with few_pages(engine, 4, "llama"):
                requests = [submit(engine, "llama", i) for i in (4, 4, 4)]
                engine.run()
            assert sum(request.num_preempted for request in requests) > 0
            kinds.add(bool(engine.events.of("resume")))
    assert kinds == {True, False}


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_what_is_handed_in_from_threads_keeps_its_own_tokens(paths: Paths, alone: Alone, seed: int) -> None:
    rng = random.Random(seed)
    with random_engine(rng, paths) as engine:
        with few_pages(engine, 4, *MODELS):

            def caller(seed: int) -> list[tuple[tuple[str, int], Request]]:
                own, requests = random.Random(seed), []
                for _ in range(6):
                    requests.append(random_request(own, engine))
                    time.sleep(own.choice((0, 0, 0.005, 0.02)))
                    if own.random() < 0.2:
                        engine.cancel(own.choice(requests)[1])
                for _, request in requests:
                    engine.wait(request)
                return requests

            requests = in_threads(*(lambda n=n: caller(100 * seed + n) for n in range(4)))
            assert_own_tokens(list(itertools.chain(*requests)), alone)
        assert engine.max_concurrent_decode() == 1
        assert_idle(engine)


def test_a_late_one_joins_the_running_batch_within_a_turn_and_leaves_at_once(
    engine: Engine, paths: Paths, alone: Alone
) -> None:
    engine.add("llama", paths["llama"])
    late: list[Request] = []

    def hook(token: int) -> None:
        if first.num_left == NUM_NEW - 3:
            late.append(submit(engine, "llama", 2, max_new_tokens=3))

    with engine.lane.exclusive():
        first = submit(engine, "llama", 0, on_token=hook)
        engine.lane.turn()
    engine.run()
    assert outputs([first, *late]) == [alone["llama", 0], alone["llama", 2][:3]]
    sizes = [event.sequences for event in engine.events.of("decode")]
    assert sizes[:6] == [1, 1, 2, 2, 1, 1] and len(sizes) == NUM_NEW - 1
    turn = engine.events.of("turn")[0]
    joined = engine.events.of("prefill")[1]
    assert turn.start < joined.start < joined.stop < turn.stop


@pytest.mark.demo_model
def test_the_real_model_decodes_a_crowd_as_it_decodes_one(demo_model_path: Path) -> None:
    with Engine(kv_budget="256MiB", host_budget="64MiB", config=UNCACHED) as engine:
        engine.add("m", demo_model_path)
        ids = engine["m"].tokenizer.encode("The capital of France is Paris, and the capital of Germany is Berlin. " * 5)
        options: dict[str, Any] = {"max_new_tokens": 8, "stop_at_eos": False, "draft": None}
        prompts = [ids[:60], ids[5:66]]  # each comes to need a second page
        expected = [engine.generate("m", prompt_ids=prompt, **options).tokens for prompt in prompts]
        with few_pages(engine, 3, "m"):
            with engine.lane.exclusive():
                requests = [engine.submit("m", prompt_ids=prompt, **options) for prompt in prompts]
            engine.run()
            assert outputs(requests) == expected
            assert [request.num_preempted for request in requests] == [0, 1]
            assert max(event.sequences for event in engine.events.of("decode")) == 2
        assert_idle(engine)


# ---- when pages run short ------------------------------------------------------------------------------


@pytest.mark.parametrize("asker", ["session", "decode"])
def test_pages_are_reclaimed_in_the_order_of_the_design(paths: Paths, alone: Alone, asker: str) -> None:
    """Drafts, hidden states, cold prefixes, idle weights, the youngest request; then KVFull for the one who asks."""
    with Engine(kv_budget="16MiB") as probe:
        size = probe.add("idle", paths["other"]).nbytes
    config = EngineConfig(budget=(4 << 20) + 2 * size, kv_budget=12 << 20, host_budget=4 << 20, quantum=1)
    with Engine(config=config) as engine, engine.lane.exclusive():
        engine.add("idle", paths["other"])
        engine.add("llama", paths["llama"])
        engine.add("same", paths["llama"])
        engine.add("sibling", perturbed(open_checkpoint(paths["llama"]), 2, 1))
        arena, layout = engine.arena, engine.residency["llama"].layout
        key = engine.lane.prefill.key("llama", "default")
        generate(engine, "llama", 3)  # cached, with hidden states
        young = submit(engine, "llama", 2, draft="same", priority=-1, max_new_tokens=60)
        while not young.num_drafted:
            engine.lane.turn()
        assert young.drafts is not None
        young.drafts.names.clear()  # its pages stay, and it stays in its first one
        taken: list[int] = []
        session = engine.session("llama")
        fresh = itertools.cycle(range(3, 259))

        def leave(count: int) -> None:
            """Nobody can have more than so many pages without asking."""
            with arena.spare_only():
                taken.extend(arena.allocate(layout, arena.num_free(layout)))
            arena.release(layout, [taken.pop() for _ in range(count)])

        def ask() -> None:
            """For one page more than there is."""
            if asker == "session":
                leave(0)
                session.append([next(fresh) for _ in range(64)])
            else:
                leave(1)
                ids = [next(fresh) for _ in range(64)]
                engine.generate("llama", prompt_ids=ids, **PLAIN | {"max_new_tokens": 2})
                engine.prefixes.forget(key, ids)

        def holds() -> dict[str, bool]:
            return {
                "drafts": bool(young.drafts and young.drafts.pages["same"].pages),
                "states": arena.state_bytes > 0,
                "prefixes": engine.prefixes.peek([key], PROMPTS[3]).length > 0,
                "idle": engine.residency.is_resident("idle"),
                "young": bool(young.pages.pages),
            }

        order = list(holds())
        assert all(holds().values())
        for count, name in enumerate(order, 1):
            while holds()[name]:  # a step gives back a page, or many
                ask()
                assert not any(holds()[gone] for gone in order[: count - 1])
            assert [name for name in order if not holds()[name]] == order[:count]
            kinds = ("kv", "draft_kv", "band_states")
            assert sum(engine.ledger.total(kind) for kind in kinds) == arena.nbytes
            assert engine.ledger.total("weights") <= engine.residency.pool.budget
        assert engine.residency.lent == arena.nbytes - arena.min_bytes == 4 << 20
        assert engine.residency.pool.budget == 2 * size and young.num_preempted == 1
        arena.release(layout, taken)
        taken.clear()
        engine.run()
        assert young.output[:NUM_NEW] == alone["llama", 2] and len(young.output) == 60
        engine.prefixes.drop("default")
        tokens = list(session.tokens)
        with pytest.raises(errors.KVFull, match=r"[12] KV pages of 49,152 bytes wanted, 0 free"):
            ask()
        assert session.tokens == tokens and not engine.lane.live
        arena.release(layout, taken)
        session.close()
        engine.prefixes.drop("default")
        assert generate(engine, "idle", 0) == alone["other", 0]
        generate(engine, "sibling", 2)
        assert engine.residency.lent == 0 and arena.nbytes == arena.min_bytes
        assert {name for name in ("idle", "sibling", "llama", "same") if engine.residency.is_resident(name)} >= {
            "idle",
            "sibling",
        }
        assert_idle(engine)


@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_a_prompt_that_goes_on_from_a_siblings_layers_may_give_way(paths: Paths, preemption: Any) -> None:
    """In the midst of what it takes over."""
    config = EngineConfig(kv_borrows=False, prefill_chunk=32, quantum=1, preemption=preemption, host_budget=4 << 20)
    with Engine(kv_budget="16MiB", config=config) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        engine.add("sibling", perturbed(open_checkpoint(paths["llama"]), 2, 1))
        session = engine.session("sibling", domain="elsewhere")
        session.append(PROMPTS[3])
        expected = session.generate(NUM_NEW)
        session.close()
        generate(engine, "llama", 3)
        request = submit(engine, "sibling", 3)
        while not request.num_resumed:
            engine.lane.turn()
        assert 0 < len(request.pages) < request.resume_until
        engine.lane._preempt(request)
        engine.run()
        assert request.error is None and request.output == expected and request.num_preempted == 1
        engine.drop_domain("elsewhere")
        assert_idle(engine)


@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_nobody_waits_for_the_prefill_of_one_who_gave_way(paths: Paths, alone: Alone, preemption: Any) -> None:
    """The first in line would share the prompt of one that has lost its pages, and there is room for one only."""
    config = EngineConfig(kv_borrows=False, prefill_chunk=40, quantum=1, preemption=preemption, host_budget=4 << 20)
    with Engine(kv_budget="8MiB", config=config) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        leader = submit(engine, "llama", 3)
        engine.lane.turn()
        assert len(leader.pages) == 40
        engine.lane._preempt(leader)
        with few_pages(engine, 0, "llama"):
            first = submit(engine, "llama", 3, priority=1)
            for _ in range(8):
                engine.lane.turn()
            assert isinstance(first.error, errors.KVFull) and isinstance(leader.error, errors.KVFull)
        assert_idle(engine)


def test_a_requests_own_lease_does_not_stand_in_its_way(paths: Paths, alone: Alone) -> None:
    """It came back from the host to pages of its own, and the cached ones of its prompt are still there."""
    config = EngineConfig(kv_borrows=False, quantum=1, prefill_chunk=64, host_budget=4 << 20)
    with Engine(kv_budget="8MiB", config=config) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        with few_pages(engine, 4, "llama"):
            request = submit(engine, "llama", 3)
            engine.lane.turn()
            engine.lane._preempt(request)
            engine.run()
            assert request.error is None and request.output == alone["llama", 3]
        assert_idle(engine)


def test_a_drop_of_what_a_closed_session_held_is_not_waited_for(paths: Paths) -> None:
    """Pages of a session that nobody closed are free for the next verb, though no turn comes between."""
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine:
        engine.add("llama", paths["llama"])
        with few_pages(engine, 2, "llama"):
            one, other = engine.session("llama"), engine.session("llama")
            other.append([5])
            other.swap_out()
            one.append(PROMPTS[1])
            del one
            gc.collect()
            other.swap_in()
            assert other.tokens == [5]
            other.close()


# ---- whose turn ----------------------------------------------------------------------------------------


@pytest.fixture
def keys_read(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Forwards take no time and store nothing; bytes of keys and values that they would have read, by id(model)."""
    read: Counter[int] = Counter()

    def forward(model: Model, arena: Any, panel: Panel) -> Tensor:
        for pages, ids in zip(panel.lists, panel.ids, strict=True):
            pages.reserve(len(ids))
            pages.commit(len(ids))
            read[id(model)] += len(pages) * model.layout.page_bytes // 64
        return torch.zeros(len(panel.lists), model.config.vocab_size)

    monkeypatch.setattr("polymodel.lane.forward", forward)
    monkeypatch.setattr("polymodel.prefill.forward", forward)
    return read


@pytest.mark.parametrize("shares", [{}, {"qwen3": 2.0, "gemma3": 0.5, "w8": 3.0}])
def test_bytes_streamed_follow_the_shares_over_a_thousand_turns(
    paths: Paths, keys_read: Counter[int], shares: dict[str, float]
) -> None:
    config = replace(UNCACHED, quantum=1, max_wait=1e9)
    with Engine(kv_budget="64MiB", config=config) as engine, engine.lane.exclusive():
        for name in MODELS:
            engine.add(name, paths[name], lane_share=shares.get(name, 1.0))
        engine.add("w8", paths["llama"], weights="w8a8", lane_share=shares.get("w8", 1.0))
        names = (*MODELS, "w8")
        assert len({engine[name].nbytes for name in names}) == 4
        for name in names:
            for _ in range(3):
                engine.submit(name, prompt_ids=[5], **PLAIN | {"max_new_tokens": 511})
        while len(engine.events.of("turn")) < 1000:
            assert engine.lane.turn()
        streamed = {name: float(keys_read[id(engine.residency[name].model)]) for name in names}
        for event in engine.events.of("decode", "prefill"):
            streamed[event.model] += engine[event.model].nbytes
        per_share = [streamed[name] / shares.get(name, 1.0) for name in names]
        assert max(per_share) < 1.05 * min(per_share)
        assert jain(per_share) > 0.999 and engine.lane.scheduler.jain() > 0.999
        for request in engine.lane.requests:
            engine.cancel(request)
        assert_idle(engine)


@pytest.mark.usefixtures("held")
def test_who_had_an_idle_lane_alone_owes_nobody_for_it(engine: Engine, paths: Paths) -> None:
    for name in ("llama", "other"):
        engine.add(name, paths[name])
    submit(engine, "llama", 0)
    engine.run()
    engine.events.clear()
    for name in ("llama", "other"):
        submit(engine, name, 0)
    engine.lane.turn()
    assert [event.model for event in engine.events.of("turn")] == ["llama"]  # who came first
    engine.run()


@pytest.mark.usefixtures("keys_read")
@pytest.mark.parametrize("policy", LANE_POLICIES)
def test_who_has_waited_too_long_is_not_overtaken(paths: Paths, monkeypatch: pytest.MonkeyPatch, policy: Any) -> None:
    """Whatever priority, weight and order of arrival say."""
    now = itertools.count(1000)
    clock = SimpleNamespace(perf_counter=lambda: float(next(now)), monotonic=time.monotonic)
    config = replace(UNCACHED, lane_policy=policy, quantum=1, max_wait=40)
    with Engine(kv_budget="16MiB", config=config) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"], lane_share=1e6)
        engine.add("other", paths["other"], lane_share=1e-6)
        monkeypatch.setattr("polymodel.lane.time", clock)
        rivals = [engine.submit("llama", prompt_ids=[5], **PLAIN | {"max_new_tokens": 400, "priority": 9})]
        late = engine.submit("other", prompt_ids=[5], **PLAIN)
        for request in (*rivals, late):
            request.submitted = clock.perf_counter()
        overtaken = 0
        while not late.served:
            overdue = next(now) - late.submitted > 40
            engine.lane.turn()
            overtaken += overdue and not late.served
        assert overtaken <= 1
        if policy in ("priority", "fcfs", "batch-by-model"):  # which would never have come to it
            assert late.served - late.submitted > 40
        for request in engine.lane.requests:
            engine.cancel(request)
        assert_idle(engine)


@pytest.mark.usefixtures("held")
def test_priority_then_deadline_then_arrival_decide_who_is_first(engine: Engine, paths: Paths) -> None:
    engine.add("llama", paths["llama"])
    order: list[str] = []
    options = {"a": {}, "b": {"deadline": 500.0}, "c": {"priority": 1}, "d": {"deadline": 400.0}, "e": {"priority": 2}}
    for name, choice in options.items():
        submit(engine, "llama", 4, max_new_tokens=1, on_token=lambda _, name=name: order.append(name), **choice)
    engine.lane.config = replace(engine.lane.config, prefill_chunk=33)
    engine.run()
    assert order == ["e", "c", "d", "b", "a"]


def test_a_batch_is_no_larger_than_it_may_be_and_the_others_follow(paths: Paths, alone: Alone) -> None:
    with Engine(kv_budget="16MiB", config=replace(UNCACHED, max_batch=2)) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        requests = [submit(engine, "llama", i) for i in range(5)]
        engine.run()
        assert outputs(requests) == [alone["llama", i] for i in range(5)]
        assert {event.sequences for event in engine.events.of("decode")} == {1, 2}


# ---- deadlines, cancelling, the queue ------------------------------------------------------------------


@pytest.mark.usefixtures("held")
def test_a_deadline_ends_a_request_before_its_first_step_and_in_its_midst(
    engine: Engine, paths: Paths, alone: Alone
) -> None:
    engine.add("llama", paths["llama"])
    early, midst = submit(engine, "llama", 0, deadline=-1.0), submit(engine, "llama", 1, deadline=1e3)
    other = submit(engine, "llama", 0)
    engine.lane.turn()
    assert early.output == [] and isinstance(early.error, errors.DeadlineExceeded)
    midst.deadline = time.perf_counter()
    engine.run()
    assert midst.output == alone["llama", 1][: len(midst.output)] and 0 < len(midst.output) < NUM_NEW
    for late in (early, midst):
        with pytest.raises(TimeoutError, match=r"llama: the request's deadline passed, \d+\.\d{3} s after"):
            engine.wait(late)
    assert other.output == alone["llama", 0]


@pytest.mark.parametrize("end", ["cancel", "deadline", "remove", "drop", "close"])
@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_whoever_gave_way_can_end_without_coming_back(paths: Paths, preemption: Any, end: str) -> None:
    config = replace(UNCACHED, preemption=preemption, host_budget=4 << 20)
    with Engine(kv_budget="16MiB", config=config) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        request = submit(engine, "llama", 1)
        engine.lane.turn()
        engine.lane._preempt(request)
        assert engine.ledger.total("host_kv") == (49152 * 2 if preemption == "swap" else 0)
        if end == "cancel":
            engine.cancel(request)
        elif end == "deadline":
            request.deadline = 0.0
            engine.lane.turn()
        elif end == "remove":
            engine.remove("llama")
        elif end == "drop":
            engine.drop_domain("default")
        else:
            engine.close()
        assert request.is_over and not engine.events.of("resume")
        assert_idle(engine)


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("turns", range(4))
def test_cancelling_leaves_nothing_behind_whatever_the_state(
    engine: Engine, paths: Paths, alone: Alone, turns: int
) -> None:
    """Waiting, half prefilled, decoding, drafting."""
    engine.lane.config = replace(engine.lane.config, prefill_chunk=50, quantum=1)
    engine.add("llama", paths["llama"])
    engine.add("q4", paths["llama"], weights="q4")
    request, other = submit(engine, "llama", 1, draft="q4"), submit(engine, "llama", 0)
    for _ in range(turns):
        engine.lane.turn()
    assert request.state.value == ("waiting", "waiting", "ready", "ready")[turns]
    engine.cancel(request)
    assert request.finish_reason == "cancelled" and not request.pages.pages
    assert request.output == alone["llama", 1][: len(request.output)]
    engine.run()
    assert other.output == alone["llama", 0]


def test_a_full_queue_takes_again_once_one_is_through(paths: Paths, alone: Alone) -> None:
    with Engine(kv_budget="16MiB", config=replace(UNCACHED, max_queue=2)) as engine:
        engine.add("llama", paths["llama"])
        with engine.lane.exclusive():
            requests = [submit(engine, "llama", 0) for _ in range(2)]
            for call in (engine.submit, engine.generate, engine.stream):
                with pytest.raises(errors.QueueFull, match="max_queue is 2"):
                    call("llama", prompt_ids=[5])
        engine.wait(requests[0])
        engine.wait(requests[1])
        assert generate(engine, "llama", 4) == alone["llama", 4]
        assert_idle(engine)


# ---- processors and metrics ----------------------------------------------------------------------------


def test_a_processor_has_the_last_word_with_drafts_and_without(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    engine.add("q4", paths["llama"], weights="q4")

    def even(tokens: list[int], logits: Tensor) -> Tensor:
        logits[1::2] = -torch.inf
        return logits

    def spelled(tokens: list[int], logits: Tensor) -> Tensor:
        only = torch.full_like(logits, -torch.inf)
        only[10 + len(tokens) % 7] = 0.0
        return only

    for processor in (even, spelled):
        plain = generate(engine, "llama", 0, logits_processor=processor)
        requests = [
            submit(engine, "llama", 0, logits_processor=processor, draft="q4"),
            submit(engine, "llama", 1, draft="q4"),
            submit(engine, "llama", 1),
        ]
        engine.run()
        assert outputs(requests) == [plain, alone["llama", 1], alone["llama", 1]]
        assert requests[0].num_drafted > 0
        assert all(token % 2 == 0 for token in plain) or plain == [10 + (7 + i) % 7 for i in range(NUM_NEW)]
        assert plain != alone["llama", 0]


@pytest.mark.usefixtures("held")
def test_metrics_tell_waiting_from_working(paths: Paths, engine: Engine, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    request = submit(engine, "llama", 0)
    time.sleep(0.05)
    engine.lane.turn()
    engine.lane._preempt(request)
    engine.run()
    metrics = engine.output(request).metrics
    assert request.output == alone["llama", 0] and metrics.num_preemptions == 1
    assert 0.05 <= metrics.queue_seconds <= metrics.time_to_first_token
    assert metrics.num_target_forwards + 1 == metrics.num_output_tokens == NUM_NEW


# ---- threads -------------------------------------------------------------------------------------------


def test_eight_threads_of_all_kinds_get_what_they_get_alone(engine: Engine, paths: Paths, alone: Alone) -> None:
    for name in MODELS:
        engine.add(name, paths[name])
    text = {i: engine[MODELS[0]].tokenizer.decode(alone["llama", i]) for i in (0, 1)}
    busy = threading.Event()

    def stream() -> None:
        for i in (0, 1):
            pieces = engine.stream("llama", prompt_ids=PROMPTS[i], **PLAIN)
            assert "".join(pieces) == text[i]

    def batch() -> None:
        with engine.batch("qwen3", 3) as rows:
            assert rows.generate([PROMPTS[i] for i in range(3)], NUM_NEW, stop_at_eos=False) == [
                alone["qwen3", i] for i in range(3)
            ]

    def session() -> None:
        for i in (0, 4):
            with engine.session("gemma3") as one:
                one.append(PROMPTS[i])
                assert [one.step() for _ in range(NUM_NEW)] == alone["gemma3", i]
                one.rollback(3)

    def many() -> None:
        requests = [submit(engine, name, i) for name in MODELS for i in (2, 3)]
        for request in requests:
            engine.wait(request)
        assert outputs(requests) == [alone[name, i] for name in MODELS for i in (2, 3)]

    def single() -> None:
        for name in MODELS:
            assert generate(engine, name, 1) == alone[name, 1]

    def verbs() -> None:
        for turn in itertools.count():
            if busy.is_set():
                return
            name = MODELS[turn % 3]
            engine.unload(name)
            assert len(engine.table()) >= 3
            engine.forget(name, prompt_ids=[299, 298])
            engine.drop_domain("nobody")
            engine.pin(name)
            engine.unpin(name)
            engine.budget = engine.budget
            assert str(engine.plan([name] * 3))
            time.sleep(0.01)

    def models() -> None:
        while not busy.is_set():
            engine.add("passing", paths["other"])
            assert generate(engine, "passing", 0, max_new_tokens=2) == alone["other", 0][:2]
            engine.remove("passing")

    def workers() -> None:
        try:
            in_threads(stream, batch, session, many, single, single)
        finally:
            busy.set()

    in_threads(workers, verbs, models)
    assert engine.max_concurrent_decode() == 1
    forwards = sorted((e.start, e.stop) for e in engine.events.of("decode", "verify", "prefill", "draft"))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(forwards))


def test_a_reader_that_sleeps_stalls_nobody(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    sleeper = engine.stream("llama", prompt_ids=PROMPTS[0], **PLAIN)
    first = next(sleeper)
    assert generate(engine, "llama", 1) == alone["llama", 1]
    wait_until(lambda: not engine.lane.live)  # it is through, read or not
    assert first + "".join(sleeper) == engine["llama"].tokenizer.decode(alone["llama", 0])


def test_who_asks_again_and_again_does_not_stop_the_lane(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            engine.table()

    def work() -> float:
        try:
            start = time.monotonic()
            assert generate(engine, "llama", 0) == alone["llama", 0]
            return time.monotonic() - start
        finally:
            is_over.set()

    seconds = in_threads(work, *[ask] * 6)[0]
    assert seconds < 20  # at a step a second it would be 23


def test_asyncio_callers_share_the_lane_and_cancel_their_own(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    engine.add("gemma3", paths["gemma3"])

    async def read(i: int) -> str:
        return "".join([piece async for piece in engine.astream("llama", prompt_ids=PROMPTS[i], **PLAIN)])

    async def everything() -> None:
        tasks = [engine.agenerate(name, prompt_ids=PROMPTS[i], **PLAIN) for name in ("llama", "gemma3") for i in (0, 4)]
        *outs, text = await asyncio.gather(*tasks, read(1))
        assert [out.tokens for out in outs] == [alone[name, i] for name in ("llama", "gemma3") for i in (0, 4)]
        assert text == engine["llama"].tokenizer.decode(alone["llama", 1])
        slow = asyncio.create_task(
            engine.agenerate(
                "llama", prompt_ids=[5], **PLAIN | {"max_new_tokens": 500, "on_token": lambda _: time.sleep(0.01)}
            )
        )
        while not any(request.output for request in engine.lane.requests):
            await asyncio.sleep(0.001)
        (request,) = engine.lane.requests
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        while not request.is_over:
            await asyncio.sleep(0.001)
        assert request.finish_reason == "cancelled" and len(request.output) < 400
        with pytest.raises(errors.InvalidRequest, match="the prompt is empty"):
            await engine.agenerate("llama", prompt_ids=[])

        def fails(token: int) -> None:
            raise OSError("sink")

        with pytest.raises(OSError, match="sink"):
            await engine.agenerate("llama", prompt_ids=[5], on_token=fails)

    asyncio.run(asyncio.wait_for(everything(), PATIENCE))


def test_a_loop_that_closes_early_takes_its_request_along(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    options = PLAIN | {"max_new_tokens": 500, "on_token": lambda _: time.sleep(0.002)}

    async def begin() -> None:
        pieces = engine.astream("llama", prompt_ids=[5], **options)
        await anext(pieces)
        kept.append(pieces)

    kept: list[Any] = []
    asyncio.run(begin())
    (request,) = engine.lane.requests or [None]
    kept.clear()
    gc.collect()
    if request is not None:
        wait_until(lambda: request.is_over)
        assert request.finish_reason == "cancelled" and len(request.output) < 500
    assert generate(engine, "llama", 0) == alone["llama", 0]


# ---- what fails fails alone ----------------------------------------------------------------------------


def nan(tokens: list[int], logits: Tensor) -> Tensor:
    return torch.full_like(logits, torch.nan) if len(tokens) > 10 else logits


def raising(*_: object) -> Any:
    raise OSError("mine")


@pytest.mark.parametrize(
    ("hooks", "error"),
    [
        ({"on_token": raising}, OSError),
        ({"logits_processor": raising}, OSError),
        ({"logits_processor": nan}, errors.InvalidRequest),
        ({"logits_processor": lambda tokens, logits: logits[:7]}, errors.InvalidRequest),
        ({"logits_processor": lambda tokens, logits: None}, Exception),
    ],
)
@pytest.mark.parametrize("draft", [None, "q4"])
def test_a_hook_that_raises_fails_its_own_request(
    engine: Engine, paths: Paths, alone: Alone, hooks: dict[str, Any], error: type[Exception], draft: str | None
) -> None:
    engine.add("llama", paths["llama"])
    engine.add("q4", paths["llama"], weights="q4")
    with engine.lane.exclusive():
        requests = [
            submit(engine, "llama", 0),
            submit(engine, "llama", 0, draft=draft, **hooks),
            submit(engine, "llama", 1),
        ]
    engine.run()
    with pytest.raises(error):
        engine.wait(requests[1])
    assert outputs([requests[0], requests[2]]) == [alone["llama", 0], alone["llama", 1]]


def test_a_reader_that_raises_cancels_its_own_request(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    other = submit(engine, "llama", 1)
    with pytest.raises(KeyError):
        for _ in engine.stream("llama", prompt_ids=PROMPTS[0], **PLAIN):
            raise KeyError
    gc.collect()
    engine.run()
    assert other.output == alone["llama", 1]


def test_a_hook_may_hand_in_but_not_wait(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    session = engine.session("llama")
    refused: list[BaseException] = []
    handed_in: list[Request] = []

    def hook(token: int) -> None:
        if not handed_in:
            handed_in.append(submit(engine, "llama", 2))
            for wait in (
                lambda: generate(engine, "llama", 0),
                lambda: engine.wait(handed_in[0]),
                lambda: session.append([5]),
                lambda: next(engine.stream("llama", prompt_ids=[5])),
            ):
                with pytest.raises(errors.InvalidRequest, match="waits for the lane that runs it") as caught:
                    wait()
                refused.append(caught.value)

    assert generate(engine, "llama", 0, on_token=hook) == alone["llama", 0]
    engine.run()
    assert len(refused) == 4 and handed_in[0].output == alone["llama", 2] and session.tokens == []
    session.close()


def test_a_hook_may_end_others_of_its_step(engine: Engine, paths: Paths, alone: Alone) -> None:
    """A session, a request behind it and one before it, by forgetting, cancelling and dropping their domains."""
    engine.add("llama", paths["llama"])
    session = engine.session("llama", domain="theirs")
    session.append(PROMPTS[4])

    def hook(token: int) -> None:
        if len(ended.output) > 3 and not ended.is_over:
            engine.drop_domain("theirs")
            engine.cancel(cancelled)

    with engine.lane.exclusive():
        ended = submit(engine, "llama", 1, domain="theirs")
        request = submit(engine, "llama", 0, on_token=hook)
        cancelled = submit(engine, "llama", 2)
    with pytest.raises(errors.Forgotten, match="the domain 'theirs' was dropped"):
        session.generate(400)
    engine.run()
    assert request.output == alone["llama", 0] and session.tokens == []
    assert isinstance(ended.error, errors.Forgotten)
    assert cancelled.output == alone["llama", 2][: len(cancelled.output)]
    session.close()


@pytest.mark.usefixtures("held")
def test_a_hook_that_removes_its_own_model_is_refused_and_changes_nothing(
    engine: Engine, paths: Paths, alone: Alone
) -> None:
    engine.add("llama", paths["llama"])
    refused: list[BaseException] = []

    def hook(token: int) -> None:
        with pytest.raises(errors.Leased) as caught:
            engine.remove("llama")
        refused.append(caught.value)

    requests = [submit(engine, "llama", 0, on_token=hook), submit(engine, "llama", 1)]
    engine.run()
    assert outputs(requests) == [alone["llama", 0], alone["llama", 1]] and len(refused) == NUM_NEW


@pytest.mark.usefixtures("held")
def test_a_name_that_passes_to_another_model_takes_no_work_along(engine: Engine, paths: Paths, alone: Alone) -> None:
    """Of who was just handing it in: a request, and one that drafts by it."""
    engine.add("llama", paths["llama"])
    engine.add("m", paths["llama"])
    pages, hosted = engine.lane.prefill.new_pages("m"), engine.residency["m"]
    engine.remove("m")
    options: dict[str, Any] = {"domain": "d", "tokens": [5], "max_new_tokens": 3, "stop_ids": frozenset()}
    options["sampler"] = Sampler(Sampling(), 1)

    def drafts() -> Drafts:
        lists = {"m": engine.lane.prefill.new_pages("llama")}
        return Drafts(spec=Draft("m"), names=["m"], is_auto=False, pages=lists)

    late = Request(model="m", hosted=hosted, pages=pages, **options)
    engine.lane.submit(late)
    drafted = submit(engine, "llama", 0)
    drafted.drafts = drafts()
    other = submit(engine, "llama", 1)
    engine.lane.turn()
    engine.lane.turn()
    assert isinstance(late.error, errors.UnknownModel)
    engine.add("m", paths["gemma3"])
    again = Request(model="m", hosted=hosted, pages=engine.lane.prefill.new_pages("llama"), **options)
    engine.lane.submit(again)
    drafted.drafts = drafts()
    engine.run()
    assert isinstance(again.error, errors.UnknownModel)
    assert outputs([drafted, other]) == [alone["llama", 0], alone["llama", 1]] and drafted.num_drafted == 0


# ---- the end of a lane ---------------------------------------------------------------------------------


def test_a_lane_that_dies_tells_everybody_why(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(kv_budget="16MiB", config=UNCACHED)
    engine.add("llama", paths["llama"])
    cause, pick, dies = ZeroDivisionError("outside of any turn"), engine.lane.scheduler.pick, threading.Event()

    def picks(*args: Any) -> str | None:
        if dies.is_set():
            raise cause
        return pick(*args)

    monkeypatch.setattr(engine.lane.scheduler, "pick", picks)
    session = engine.session("llama")
    session.append([5])
    slow = {"max_new_tokens": 500, "on_token": lambda _: time.sleep(0.002)}

    def failure(call: Callable[[], object]) -> BaseException | None:
        with pytest.raises(errors.EngineClosed) as caught:
            call()
        return caught.value.__cause__

    def kill() -> None:
        wait_until(lambda: len(engine.lane.live) == 4)
        dies.set()

    causes = in_threads(
        lambda: failure(lambda: generate(engine, "llama", 0, **slow)),
        lambda: failure(lambda: list(engine.stream("llama", prompt_ids=[5], **PLAIN | slow))),
        lambda: failure(lambda: session.generate(500)),
        lambda: failure(lambda: asyncio.run(engine.agenerate("llama", prompt_ids=[5], **PLAIN | slow))),
        kill,
    )
    assert causes[:4] == [cause] * 4
    for call in (lambda: submit(engine, "llama", 0), lambda: session.append([5]), lambda: engine.session("llama")):
        assert failure(call) is cause
    session.close()
    engine.close()
    assert_idle(engine)


def test_closing_ends_who_runs_in_whatever_thread(paths: Paths) -> None:
    engine = Engine(kv_budget="16MiB", config=UNCACHED)
    engine.add("llama", paths["llama"])
    slow = {"max_new_tokens": 500, "on_token": lambda _: time.sleep(0.002)}
    session = engine.session("llama")
    session.append([5])

    def closed(call: Callable[[], object]) -> bool:
        with pytest.raises(errors.EngineClosed):
            call()
        return True

    def close() -> bool:
        wait_until(lambda: len(engine.lane.live) == 3)
        engine.close()
        return True

    assert all(
        in_threads(
            lambda: closed(lambda: generate(engine, "llama", 0, **slow)),
            lambda: closed(lambda: session.generate(500)),
            lambda: closed(lambda: list(engine.stream("llama", prompt_ids=[5], **PLAIN | slow))),
            close,
            close,
        )
    )
    engine.close()
    session.close()
    assert engine.lane._thread is None and not engine.residency.hosted
    assert_idle(engine)


def test_an_engine_that_is_dropped_leaves_no_thread(
    paths: Paths, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polymodel.lane.LINGER", 0.1)
    engine = Engine(kv_budget="16MiB", config=UNCACHED)
    engine.add("llama", paths["llama"])
    assert generate(engine, "llama", 0) == alone["llama", 0]
    thread, lane = engine.lane._thread, weakref.ref(engine.lane)
    assert thread is not None and thread.is_alive()
    del engine
    thread.join(PATIENCE)
    del thread
    gc.collect()
    assert lane() is None


def test_a_thread_that_cannot_start_refuses_the_request(engine: Engine, paths: Paths, alone: Alone) -> None:
    engine.add("llama", paths["llama"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising)
        with pytest.raises(OSError, match="mine"):
            submit(engine, "llama", 0)
    assert not engine.lane.live
    assert generate(engine, "llama", 0) == alone["llama", 0]


@pytest.mark.parametrize("waiter", ["request", "session", "stream"])
def test_an_interrupted_wait_cancels_what_it_waited_for(
    engine: Engine, paths: Paths, alone: Alone, waiter: str, request: pytest.FixtureRequest
) -> None:
    engine.add("llama", paths["llama"])
    main = threading.get_ident()
    count = itertools.count(1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupt(token: int) -> None:
        time.sleep(0.002)
        if next(count) == 12:
            signal.pthread_kill(main, signal.SIGINT)

    session = engine.session("llama")
    session.append(PROMPTS[0])
    sender = submit(engine, "llama", 2, max_new_tokens=60, on_token=interrupt)
    with pytest.raises(KeyboardInterrupt):
        if waiter == "session":
            session.generate(400)
        elif waiter == "request":
            generate(engine, "llama", 1, max_new_tokens=400)
        else:
            list(engine.stream("llama", prompt_ids=PROMPTS[1], **PLAIN | {"max_new_tokens": 400}))
    gc.collect()
    engine.wait(sender)
    assert sender.output[:NUM_NEW] == alone["llama", 2]
    wait_until(lambda: not engine.lane.live)
    session.rollback(len(session) - len(PROMPTS[0]))
    assert session.generate(NUM_NEW) == alone["llama", 0]
    session.close()
    assert generate(engine, "llama", 1) == alone["llama", 1]


EXIT = """
import sys, threading, time, torch
torch.set_num_threads(1)
from contextlib import suppress
from polymodel import Engine
from polymodel.errors import EngineClosed
engine = Engine(kv_budget="16MiB")
engine.add("m", sys.argv[1])
session = engine.session("m")
session.append([5, 6, 7])
begun = threading.Event()
engine.submit("m", prompt_ids=[5], max_new_tokens=500, stop_at_eos=False, on_token=lambda _: begun.set())
def wait():
    with suppress(EngineClosed):
        session.generate(500)
threading.Thread(target=wait, daemon=True).start()
begun.wait()
print("left", flush=True)
"""


def test_an_interpreter_leaves_in_the_midst_of_a_request(paths: Paths) -> None:
    run = subprocess.run(
        [sys.executable, "-c", EXIT, str(paths["llama"])],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "left\n", "")


# ---- models that come and go ---------------------------------------------------------------------------


def test_an_idle_model_leaves_in_time_and_comes_back_the_same(
    paths: Paths, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polymodel.lane.LINGER", 0.05)
    with Engine(kv_budget="16MiB", config=replace(UNCACHED, ttl=0.4)) as engine:
        engine.add("llama", paths["llama"])
        engine.add("pinned", paths["other"], pin=True)
        assert generate(engine, "llama", 0) == alone["llama", 0]
        thread = engine.lane._thread
        assert thread is not None and engine.residency.is_resident("llama")
        wait_until(lambda: not engine.residency.is_resident("llama"))
        thread.join(PATIENCE)  # it stayed for this, and there is nothing more to wait for
        assert engine.lane._thread is None and engine.residency.is_resident("pinned")
        (evict,) = engine.events.of("evict")
        assert evict.start - engine.events.of("turn")[-1].stop >= 0.39
        assert generate(engine, "llama", 0) == alone["llama", 0]
        assert_idle(engine)


def test_who_comes_next_is_loaded_while_another_runs(paths: Paths, alone: Alone) -> None:
    """In the place of one that nobody waits for; where there is none, nothing changes but that."""
    with Engine(kv_budget="16MiB", config=UNCACHED) as probe:
        size = {name: probe.add(name, paths[name]).nbytes for name in ("llama", "other", "qwen3")}
    prefetched = {}
    for room in ("llama", "qwen3"):
        budget = max(size.values()) + size[room] if room == "llama" else max(size.values())
        config = replace(UNCACHED, lane_policy="round-robin")
        with Engine(budget=budget, kv_budget="16MiB", config=config) as engine, engine.lane.exclusive():
            for name in ("llama", "other", "qwen3"):
                engine.add(name, paths[name])
            requests = [submit(engine, name, i) for i in (0, 1) for name in ("llama", "other")]
            while engine.lane.turn():
                assert engine.ledger.total("weights") <= budget
            assert outputs(requests) == [alone[name, i] for i in (0, 1) for name in ("llama", "other")]
            prefetched[room] = len(engine.events.of("prefetch"))
            assert_idle(engine)
    assert prefetched["llama"] > 0 == prefetched["qwen3"]


# ---- what there is to see ------------------------------------------------------------------------------


def test_every_kind_of_event_occurs_and_is_drawn(paths: Paths) -> None:
    with Engine(kv_budget="16MiB", config=UNCACHED) as probe:
        size = {name: probe.add(name, paths[name]).nbytes for name in ("llama", "other", "qwen3")}
    config = EngineConfig(host_budget=4 << 20, quantum=2, lane_policy="round-robin", kv_borrows=False)
    budget = 3 * size["llama"] + max(size.values())
    with Engine(budget=budget, kv_budget="16MiB", config=config) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        engine.add("q4", paths["llama"], weights="q4")
        engine.add("sibling", perturbed(open_checkpoint(paths["llama"]), 2, 1))
        engine.add("other", paths["other"])
        generate(engine, "llama", 3)
        generate(engine, "sibling", 3)  # takes layers over, once that is proved
        generate(engine, "llama", 0, draft="q4")
        engine.measure_costs("q4", [1], repetitions=1)
        engine.lane.drafting.trials.attempt("llama", "q4", PROMPTS[1])
        for name in ("q4", "sibling"):
            engine.unload(name)
        engine.add("qwen3", paths["qwen3"])
        request = submit(engine, "llama", 1)
        engine.lane.turn()
        engine.lane._preempt(request)
        for name in ("qwen3", "other", "sibling", "q4", "llama"):
            submit(engine, name, 1)
        engine.run()
        engine.budget = budget // 3
        generate(engine, "qwen3", 2)
        engine.unload("qwen3")
        generate(engine, "qwen3", 2)
        kinds = {event.kind for event in engine.events}
        assert kinds == set(LETTERS), set(LETTERS) - kinds
        drawn, traced = timeline(engine.events, 200), json.loads(chrome_trace(engine.events))["traceEvents"]
        assert all(f"{letter} {kind}" in drawn for kind, letter in LETTERS.items())
        assert {entry["name"] for entry in traced} >= kinds
        rows = {line.split("|")[0].strip() for line in drawn.splitlines()[:-2]}
        assert rows == {"llama", "q4", "sibling", "other", "qwen3"}


# ---- what others may do meanwhile ------------------------------------------------------------------------


def test_a_removed_models_output_and_its_cancelled_one_can_be_asked_for(
    engine: Engine, paths: Paths, alone: Alone
) -> None:
    engine.add("llama", paths["llama"])
    done = submit(engine, "llama", 0)
    engine.wait(done)
    with engine.lane.exclusive():
        running = submit(engine, "llama", 1)
        engine.lane.turn()
    engine.remove("llama")
    engine.wait(running)
    assert engine.output(done).tokens == alone["llama", 0]
    out = engine.output(running)
    assert out.finish_reason == "cancelled" and out.tokens == alone["llama", 1][: len(out.tokens)]


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
def test_no_exception_of_a_hook_reaches_the_lane(
    engine: Engine, paths: Paths, alone: Alone, error: BaseException
) -> None:
    def leave(*_: object) -> Any:
        raise error

    engine.add("llama", paths["llama"])
    with engine.lane.exclusive():
        mine, other = submit(engine, "llama", 0, on_token=leave), submit(engine, "llama", 1)
    with pytest.raises(type(error)):
        engine.wait(mine)
    engine.wait(other)
    with engine.batch("llama", 1) as batch, pytest.raises(type(error)):
        batch.generate([PROMPTS[0]], 3, pick=leave)
    assert other.output == alone["llama", 1] == generate(engine, "llama", 1)


def test_pages_that_rotted_on_the_host_fail_their_own_request(paths: Paths, alone: Alone) -> None:
    with Engine(kv_budget="8MiB", host_budget="4MiB", config=UNCACHED) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        with few_pages(engine, 7, "llama"):
            requests = [submit(engine, "llama", 1, max_new_tokens=70) for _ in range(3)]
            while requests[2].swapped is None:
                engine.lane.turn()
            requests[2].swapped.data.view(-1)[5] ^= 1
            with pytest.raises(errors.CorruptSession):
                engine.wait(requests[2])
            engine.run()
        assert requests[0].output[:NUM_NEW] == requests[1].output[:NUM_NEW] == alone["llama", 1]
        assert not engine.ledger.of("host_kv")


def test_a_session_that_comes_back_preempts_as_one_that_grows_does(paths: Paths, alone: Alone) -> None:
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine, engine.lane.exclusive():
        engine.add("llama", paths["llama"])
        with few_pages(engine, 6, "llama"):
            session = engine.session("llama")
            session.append(PROMPTS[3])
            session.swap_out()
            requests = [submit(engine, "llama", 1) for _ in range(3)]
            while not all(request.output for request in requests):
                engine.lane.turn()
            assert session.generate(NUM_NEW) == alone["llama", 3]
            session.close()
            engine.run()
            assert outputs(requests) == [alone["llama", 1]] * 3 and sum(r.num_preempted for r in requests) > 0


def test_a_session_is_not_kept_waiting_by_a_full_batch(paths: Paths) -> None:
    with Engine(kv_budget="8MiB", config=replace(UNCACHED, max_batch=2)) as engine:
        engine.add("llama", paths["llama"])
        session = engine.session("llama")
        session.append(PROMPTS[0])
        requests = [submit(engine, "llama", 0, max_new_tokens=400) for _ in range(4)]
        session.step()
        assert not any(request.is_over for request in requests)
        session.close()
        engine.lane.close()


def test_lent_bytes_come_back_from_cold_prefixes(paths: Paths) -> None:
    """A crowd needs more pages than the arena has; what it leaves in the cache lies all over what was lent."""
    dice = random.Random(0)
    config = EngineConfig(prefix_budget=1 << 40, prefill_chunk=1 << 15)
    with Engine(budget=12 << 20, kv_budget="8MiB", config=config) as engine:
        engine.add("llama", paths["llama"])
        with engine.lane.exclusive():
            prompts = [[dice.randrange(3, 259) for _ in range(300)] for _ in range(32)]
            requests = [engine.submit("llama", prompt_ids=ids, max_new_tokens=30, stop_at_eos=False) for ids in prompts]
            engine.run()
            assert all(len(request.output) == 30 for request in requests)
            assert engine.residency.lent >= 4 << 20 and engine.prefixes.nbytes > 4 << 20
        size = engine["llama"].nbytes
        engine.budget = 2 * size
        assert engine.residency.lent == 0 and engine.arena.nbytes == engine.arena.min_bytes
        assert engine.budget == 2 * size


def test_adding_a_model_waits_for_nobody_and_leaves_no_trace_of_those_that_go(paths: Paths, alone: Alone) -> None:
    with Engine(kv_budget="16MiB", config=UNCACHED) as engine:
        engine.add("llama", paths["llama"])
        seen: list[int] = []

        def look(done: int, of: int) -> None:
            seen.append(len(engine.table()))
            if done == 1:
                engine.remove("llama")  # a partner of the newcomer

        sibling = perturbed(open_checkpoint(paths["llama"]), 2, 1)
        engine.add("sibling", sibling, progress=look)
        assert seen[0] == 1 and set(seen[1:]) == {0}  # the newcomer is there when it is through
        assert engine.residency["sibling"].partners == {} and list(engine) == ["sibling"]
        engine.add("llama", paths["llama"])
        assert engine.residency["sibling"].partners == {"llama": 2}
        assert generate(engine, "llama", 0) == alone["llama", 0]
        with pytest.raises(errors.UnknownModel), engine.lane.exclusive():
            hosted = engine.residency.sized("next", open_checkpoint(paths["qwen3"]), "file")
            load = engine.residency.begin(hosted)
            try:
                engine.submit("next", prompt_ids=[5])
            finally:
                engine.residency.abort(hosted, OSError())
                load.join()
        assert_idle(engine)


def test_a_fork_is_told_to_make_an_engine_of_its_own(engine: Engine, paths: Paths, monkeypatch: Any) -> None:
    engine.add("llama", paths["llama"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(errors.EngineClosed, match="belongs to process"):
            generate(engine, "llama", 0)
        with pytest.raises(errors.EngineClosed, match="belongs to process"):
            engine.unload("llama")
