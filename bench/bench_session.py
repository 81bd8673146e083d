"""Agents that share a prompt, in four arms; and five models that have layers in common, on the demo model.

    pip install '.[bench]' && polymodel pull smollm2 && pytest bench/bench_session.py [--benchmark-json FILE]

Each arm's prefilled tokens, last logits and, of D, what was said are checked before it is timed, in turns with arm C
(the prompt once, clones in a batch). The clock is the arms' own, which stands still while tokens are counted and caches
dropped; A is one agent's prefill. The time of a sibling is that to its first token after a prefix that another model
has read, in turns with the same computed from nothing. `polymodel bench MODEL --workload session --size full` runs
whole sessions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import demo_model

from polymodel import Engine
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.workloads.report import Setting, open_engine
from polymodel.workloads.session import MODEL, Agents, Arm, Runner, Script, Shape

SHAPE = Shape(turns=2, agents=3, prefix=128, decode=8, result=16)
ROUNDS = 3
SHARED = 24  # of the demo model's 30 layers


class Clock:
    """Seconds that arms have taken so far, by their own watches."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


clock = Clock()


@pytest.fixture(scope="module")
def runner(device: str) -> Iterator[Runner]:
    path = demo_model()
    setting = Setting(device=device)
    with open_checkpoint(path) as checkpoint, open_engine(setting, checkpoint.config, 4096) as engine:
        engine.add(MODEL, path)
        yield Runner(engine, Script(SHAPE, checkpoint.config.vocab_size))


@pytest.mark.benchmark(timer=clock)
@pytest.mark.parametrize("arm", ["A", "B", "C", "D"])
def test_arm(benchmark: Any, runner: Runner, arm: str) -> None:
    run = {"A": runner.naive, "B": runner.persistent, "C": runner.cloned, "D": runner.requests}[arm]
    found, reference = run(), runner.cloned()
    tokens = found.prefill_tokens * (SHAPE.agents if arm == "A" else 1)
    assert tokens == SHAPE.prefill_tokens()[arm.lower()]
    assert all(map(torch.equal, found.logits, reference.logits)) and len(found.logits) == (1 if arm == "A" else 3)
    if arm == "D":
        assert found.said == [[said[turn] for said in runner.script.said] for turn in range(SHAPE.turns)]
    runs: dict[str, list[Arm]] = {"this": [], "C": []}

    def target() -> None:
        runs["this"].append(run())
        clock.seconds += runs["this"][-1].total

    benchmark.pedantic(target, setup=lambda: runs["C"].append(runner.cloned()), rounds=ROUNDS)
    best = {name: min(of, key=lambda one: one.total) for name, of in runs.items()}
    benchmark.extra_info |= {
        "prefill_tokens": tokens,
        **{f"{part}_ms": 1e3 * seconds for part, seconds in best["this"].seconds.items()},
    }
    if arm != "A":
        said = SHAPE.agents * SHAPE.turns * SHAPE.decode
        benchmark.extra_info |= {
            "said_tok_per_sec": said / best["this"].total,
            "times C": best["this"].total / best["C"].total,
        }


@pytest.fixture(scope="module")
def siblings(device: str) -> Iterator[Engine]:
    path = demo_model()
    with (
        open_checkpoint(path) as checkpoint,
        open_engine(Setting(device=device), checkpoint.config, 4096, prefix_cache=False) as engine,
    ):
        for name in ("first", "same"):
            engine.add(name, path)
        engine.add("band", perturbed(checkpoint, SHARED, seed=1))
        engine.add("unrelated", perturbed(checkpoint, 0, seed=2))
        yield engine


@pytest.mark.parametrize("model", ["same", "band", "unrelated"])
def test_first_token_after_a_prefix_of_another_model(benchmark: Any, siblings: Engine, model: str) -> None:
    num_layers = siblings[model].config.num_layers
    shape = Shape(turns=2, agents=2, prefix=128, decode=2, result=16)
    script = Script(shape, siblings[model].config.vocab_size)

    agents = Agents(siblings, ["first", model], script, is_shared=model != "unrelated")
    agents.run()
    shared = {"same": num_layers, "band": SHARED, "unrelated": 0}[model]
    assert agents.token_layers == shape.token_layers(num_layers, shared) and not agents.differing
    apart: list[float] = []

    def setup() -> None:
        with siblings.session(model) as direct, agents.timed(apart):
            direct.append(script.prefix)

    def target() -> None:
        with agents.timed(agents.waits):
            session = agents.follow(model, first)
        session.close()

    with siblings.session("first") as first:
        first.append(script.prefix)
        benchmark.pedantic(target, setup=setup, rounds=ROUNDS)
    benchmark.extra_info |= {
        "token_layers": agents.token_layers,
        "token_layers_apart": shape.token_layers(num_layers, 0),
        "times faster than computed": min(apart) / min(agents.waits),
    }
