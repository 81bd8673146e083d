"""Four ways to prompt through the prefix cache, beside an engine without one, on the demo model.

    pip install '.[bench]' && polymodel pull smollm2 && pytest bench/bench_radix.py [--benchmark-json FILE]

A round is all prompts of a way, one after another, the cache empty at the start; in turns with the engine without one.
Tokens computed and the logits after each prompt are checked first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import demo_model

from polymodel import Engine
from polymodel.checkpoint import open_checkpoint
from polymodel.config import DEFAULT_DOMAIN
from polymodel.workloads.radix import KNOWN, MODEL, WAYS, num_prefilled, run
from polymodel.workloads.report import Setting, Watch, open_engine

ROUNDS = 2
Engines = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def engines(device: str) -> Iterator[Engines]:
    """With a prefix cache, and without."""
    path, setting = demo_model(), Setting(device=device)
    with (
        open_checkpoint(path) as checkpoint,
        open_engine(setting, checkpoint.config, 4096) as cached,
        open_engine(setting, checkpoint.config, 512, prefix_cache=False) as plain,
    ):
        for engine in (cached, plain):
            engine.add(MODEL, path)
        yield cached, plain


@pytest.mark.parametrize("way", WAYS)
def test_way(benchmark: Any, engines: Engines, way: str) -> None:
    cached, plain = engines
    prompts = WAYS[way](cached[MODEL].config.vocab_size)
    total, expected = KNOWN[way]
    assert all(map(torch.equal, run(cached, prompts), run(plain, prompts)))
    assert (sum(map(len, prompts)), num_prefilled(cached)) == (total, expected)
    watch = Watch(cached.device)
    without: list[float] = []

    def timed(engine: Engine) -> float:
        before = watch.seconds["all"]
        with watch.of("all"):
            run(engine, prompts)
        return watch.seconds["all"] - before

    def setup() -> None:
        cached.drop_domain(DEFAULT_DOMAIN)
        without.append(timed(plain))

    benchmark.pedantic(lambda: timed(cached), setup=setup, rounds=ROUNDS)
    benchmark.extra_info |= {
        "tokens": total,
        "computed": expected,
        "times faster than without": min(without) / benchmark.stats.stats.min,
    }
