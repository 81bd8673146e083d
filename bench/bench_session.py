"""Agents that share a prompt, in four arms; and five models that have layers in common, on the demo model.

    pip install '.[bench]' && polymodel pull smollm2 && pytest bench/bench_session.py [--benchmark-json FILE]

Each arm's prefilled tokens and last logits are checked before it is timed, in turns with arm C (the prompt once, clones
in a batch); A is one agent's prefill. The time of a sibling is that to its first token after a prefix that another
model has read. `polymodel bench MODEL --workload session --size full` runs whole sessions.
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


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    path = demo_model()
    with open_checkpoint(path) as checkpoint, open_engine(Setting(), checkpoint.config, 4096) as engine:
        engine.add(MODEL, path)
        yield Runner(engine, Script(SHAPE, checkpoint.config.vocab_size))


@pytest.mark.parametrize("arm", ["A", "B", "C", "D"])
def test_arm(benchmark: Any, runner: Runner, arm: str) -> None:
    run = {"A": runner.naive, "B": runner.persistent, "C": runner.cloned, "D": runner.requests}[arm]
    found, reference = run(), runner.cloned()
    tokens = found.prefill_tokens * (SHAPE.agents if arm == "A" else 1)
    assert tokens == SHAPE.prefill_tokens()[arm.lower()]
    assert all(map(torch.equal, found.logits, reference.logits)) and len(found.logits) == (1 if arm == "A" else 3)
    runs: dict[str, list[Arm]] = {"this": [], "C": []}
    benchmark.pedantic(
        lambda: runs["this"].append(run()), setup=lambda: runs["C"].append(runner.cloned()), rounds=ROUNDS
    )
    best = {name: min(of, key=lambda one: one.total) for name, of in runs.items()}
    benchmark.extra_info |= {
        "prefill_tokens": tokens,
        **{f"{part}_ms": 1e3 * seconds for part, seconds in best["this"].seconds.items()},
    }
    if arm != "A":
        benchmark.extra_info["times C"] = best["this"].total / best["C"].total


@pytest.fixture(scope="module")
def siblings() -> Iterator[Engine]:
    path = demo_model()
    with (
        open_checkpoint(path) as checkpoint,
        open_engine(Setting(), checkpoint.config, 4096, prefix_cache=False) as engine,
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

    checked = Agents(siblings, ["first", model], script, is_shared=model != "unrelated")
    checked.warm()
    checked.run()
    shared = {"same": num_layers, "band": SHARED, "unrelated": 0}[model]
    assert checked.token_layers == shape.token_layers(num_layers, shared) and not checked.differing
    apart: list[float] = []

    def setup() -> None:
        with siblings.session(model) as direct, checked.timed(apart):
            direct.append(script.prefix)

    with siblings.session("first") as first:
        first.append(script.prefix)
        benchmark.pedantic(lambda: checked.follow(model, first).close(), setup=setup, rounds=ROUNDS)
    benchmark.extra_info |= {
        "token_layers": checked.token_layers,
        "token_layers_apart": shape.token_layers(num_layers, 0),
        "times faster than computed": min(apart) / benchmark.stats.stats.min,
    }
