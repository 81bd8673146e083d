"""What the prefix cache promises, counted in tokens computed: the work that is saved, and that nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny, write_tokenizer

from polymodel import Engine, EngineConfig
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.engine import Output
from polymodel.errors import Forgotten
from polymodel.prefix import PrefixStats
from polymodel.workloads.radix import few_shot, tree_of_thought


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_tiny(tmp_path_factory.mktemp("radix"), "llama"))


@pytest.fixture(scope="module")
def uncached(path: Path) -> Iterator[Engine]:
    """Each of its runs computes everything."""
    with new_engine(path, prefix_cache=False) as engine:
        yield engine


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with new_engine(path) as engine:
        yield engine
        engine.prefixes.check()
        engine.arena.check()


def new_engine(path: Path, **config: Any) -> Engine:
    engine = Engine(kv_budget="16MiB", config=EngineConfig(**config))
    engine.add("m", path)
    return engine


def text(name: int, count: int) -> list[int]:
    """Tokens of their own: texts of different names differ in the first one already."""
    return [3 + name, *torch.randint(3, 300, (count - 1,), generator=torch.Generator().manual_seed(name)).tolist()]


def run(engine: Engine, ids: list[int], max_new_tokens: int = 1, **options: Any) -> Output:
    options = {"draft": None, "stop_at_eos": False} | options
    return engine.generate("m", prompt_ids=ids, max_new_tokens=max_new_tokens, **options)


def num_computed(engine: Engine) -> int:
    """Prompt tokens that went through a forward."""
    return sum(event.tokens for event in engine.events.of("prefill"))


def assert_computed(engine: Engine, uncached: Engine, prompts: list[list[int]], count: int) -> None:
    """One request after another: the tokens of engines that compute everything, for so many computed ones."""
    outputs = [run(engine, ids).tokens for ids in prompts]
    assert num_computed(engine) == count
    uncached.events.clear()
    assert outputs == [run(uncached, ids).tokens for ids in prompts]
    assert num_computed(uncached) == sum(map(len, prompts)) > count


# ---- the work of four ways to prompt ---------------------------------------------------------------------


def test_few_shot(engine: Engine, uncached: Engine) -> None:
    """Five questions after the same 64 tokens of examples: the examples are computed once, and one edge is cut."""
    prompts = few_shot(300, examples=64, question=8, count=5)
    assert_computed(engine, uncached, prompts, 64 + 5 * 8)
    assert (engine.prefixes.stats.tokens_matched, engine.prefixes.stats.splits) == (4 * 64, 1)


def test_multi_turn(engine: Engine, uncached: Engine) -> None:
    """Each turn of a conversation computes its own tokens, and one of the answer before: nothing was after that yet."""
    history, naive = text(0, 50), 0
    for turn in range(4):
        naive += len(history)
        answer = run(engine, history, 12).tokens
        assert answer == run(uncached, history, 12).tokens
        history = history + answer + text(1 + turn, 20)
    assert (num_computed(engine), naive) == (50 + 3 * (1 + 20), 50 + 82 + 114 + 146)


def test_tree_of_thought(engine: Engine, uncached: Engine) -> None:
    """Three thoughts with three continuations each compute every edge of the tree once."""
    prompts = tree_of_thought(300, root=96, steps=(24, 16))
    assert_computed(engine, uncached, prompts, 96 + 3 * 24 + 9 * 16)


def test_agents(engine: Engine, uncached: Engine) -> None:
    """Four agents of one system prompt, each with a role, in turns: roles and observations are computed once."""
    histories = [text(0, 128) + text(1 + agent, 32) for agent in range(4)]
    naive = 0
    for turn in range(3):
        for agent, history in enumerate(histories):
            history += text(10 + 4 * turn + agent, 10)
            naive += len(history)
            answer = run(engine, history, 6).tokens
            assert answer == run(uncached, history, 6).tokens
            history += answer
    assert (num_computed(engine), naive) == (128 + 4 * (32 + 10) + 2 * 4 * (1 + 10), 4 * (170 + 186 + 202))


# ---- the same bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [8, 64, 70])
def test_reuse_through_a_split_equals_recompute(engine: Engine, uncached: Engine, shared: int) -> None:
    """What is taken over from the middle of an edge gives every key and value, and every logit, of a full prefill."""
    run(engine, text(0, 150))
    prompt = text(0, 150)[:shared] + text(1, 30)
    ours, theirs = engine.session("m"), uncached.session("m")
    for session in (ours, theirs):
        session.append(prompt)
    assert (ours.num_cached, theirs.num_cached, engine.prefixes.stats.splits) == (shared, 0, 1)
    assert torch.equal(ours.pages.dump(), theirs.pages.dump())
    assert torch.equal(ours.append(text(2, 5)), theirs.append(text(2, 5)))
    assert ours.generate(8) == theirs.generate(8)


def test_drafting_changes_no_hit(path: Path) -> None:
    """With a drafter and without, the same tokens are cached, found and said."""
    found = []
    for drafter in (None, "drafter"):
        with new_engine(path) as engine:
            engine.add("drafter", perturbed(open_checkpoint(path), 1, 1))
            first = run(engine, text(0, 90), 12, draft=drafter)
            second = run(engine, text(0, 90) + first.tokens + text(1, 30), 12, draft=drafter)
            assert (first.metrics.num_drafted > 0) is (drafter is not None)
            stats = engine.prefixes.stats
            found.append((first.tokens, second.tokens, second.metrics.num_cached_tokens, stats.tokens, stats.pages))
    assert found[0] == found[1] and found[0][2] == 90 + 11


# ---- who is in it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flight", "computed"), [(32, 101), (1000, 200)])
def test_concurrent_double_insert(path: Path, flight: int, computed: int) -> None:
    """Two equal prompts in flight at once, one waiting for the other or not, are stored once and forgotten for good."""
    with new_engine(path, prefix_flight=flight) as engine, engine.lane.exclusive():
        requests = [
            engine.submit("m", prompt_ids=text(0, 100), max_new_tokens=1, stop_at_eos=False, draft=None)
            for _ in range(2)
        ]
        engine.run()
        assert requests[0].output == requests[1].output and num_computed(engine) == computed
        stats = engine.prefixes.stats
        assert (stats.tokens, stats.nodes, stats.leaves, stats.leases) == (100, 1, 1, 0)
        assert stats.pages == engine.arena.num_pages_used == 2
        engine.prefixes.check()
        assert engine.forget("m", prompt_ids=text(0, 100)[:1]) == 100
        assert engine.prefixes.num_tokens == engine.arena.num_pages_used == 0


def test_inserts_from_many_threads(engine: Engine, uncached: Engine) -> None:
    """Threads that ask for the same and for like prompts at once get their tokens, and leave one tree and no lease."""
    prompts = [text(0, 60) + text(1 + i % 3, 20) for i in range(9)]
    outputs: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        outputs[i] = run(engine, prompts[i]).tokens

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [run(uncached, ids).tokens for ids in prompts[:3]]
    assert [outputs[i] for i in range(9)] == 3 * expected
    stats = engine.prefixes.stats
    assert (stats.tokens, stats.leaves, stats.leases) == (60 + 3 * 20, 3, 0)


def test_a_lease_is_respected(path: Path) -> None:
    """What a live session goes on from stays cached whatever else comes; when it is closed, it goes in its turn."""
    with new_engine(path, prefix_tokens=150) as engine:
        session = engine.session("m")
        session.append(text(0, 100))
        for i in range(1, 4):
            run(engine, text(i, 90))
        assert engine.prefixes.stats.evictions == 3
        assert run(engine, text(0, 100)).metrics.num_cached_tokens == 99
        session.close()
        for i in range(1, 4):
            run(engine, text(i, 90))
        assert run(engine, text(0, 100)).metrics.num_cached_tokens == 0
        engine.prefixes.check()


def test_policy_eviction_reaches_forks(engine: Engine) -> None:
    """Forgetting a prefix ends every fork of it, live or leased, gives the pages back, and spares a sibling."""
    session, sibling = engine.session("m"), engine.session("m")
    session.append(text(0, 70) + text(1, 30))
    sibling.append(text(0, 70) + text(2, 30))
    fork = session.clone().clone()
    fork.append(text(3, 10))
    assert engine.forget("m", prompt_ids=text(0, 70) + text(1, 1)) == 30 + 10
    for lost in (session, fork):
        with pytest.raises(Forgotten, match="append: its first 71 tokens were forgotten"):
            lost.append([7])
    assert run(engine, text(0, 70) + text(1, 30)).metrics.num_cached_tokens == 70
    assert run(engine, text(0, 70) + text(2, 30)).metrics.num_cached_tokens == 99
    assert len(sibling.generate(3)) == 3
    sibling.close()
    engine.forget("m", prompt_ids=text(0, 1))
    assert engine.arena.num_pages_used == 0


def test_statistics(engine: Engine) -> None:
    """Lookups are hits and two kinds of misses, and tokens, nodes and pages are those that are there."""
    run(engine, text(0, 100))  # nothing is there
    run(engine, text(0, 80) + text(1, 20))  # 80 tokens are
    run(engine, text(0, 7) + text(2, 20))  # too few to be worth a copy, but the edge is cut where it enters
    engine.warm("m", prompt_ids=text(3, 64))
    run(engine, text(0, 100))
    page = engine.residency["m"].layout.page_bytes
    expected = PrefixStats(
        lookups=5,
        hits=2,
        no_prefix=2,
        too_short=1,
        tokens_wanted=99 + 99 + 26 + 63 + 99,
        tokens_matched=80 + 99,
        evictions=0,
        policy_evictions=0,
        splits=2,
        warm_tokens=64,
        nodes=6,  # 0..6, 7..79 and three ends, and what was prefetched
        leaves=4,
        leases=0,
        tokens=100 + 20 + 20 + 64,
        pages=5,  # two of the first, its second copied for the other end, one of the short match, one prefetched
        nbytes=5 * page,
        max_depth=100,
    )
    assert astuple(engine.prefixes.stats) == astuple(expected)
    engine.forget("m", prompt_ids=text(0, 80))
    after = engine.prefixes.stats
    assert (after.evictions, after.policy_evictions, after.splits) == (0, 3, 2)
    assert (after.tokens, after.nodes, after.pages) == (7 + 20 + 64, 3, 2)
