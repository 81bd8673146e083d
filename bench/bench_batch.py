"""The batch curve of the demo model: greedy steps of B sequences at once, beside one session that steps by itself.

    pip install '.[bench]' && polymodel pull smollm2 && pytest bench/bench_batch.py [--benchmark-json FILE]

The first, the middle and the last row are checked first: tokens and last logits are those of a session alone. A round
is 16 steps after prompts of 16 tokens, in turns with those of the session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness import demo_model

from polymodel.batch import Batch
from polymodel.checkpoint import open_checkpoint
from polymodel.workloads.batch import MODEL, ON_CPU, Curve, point
from polymodel.workloads.report import Setting, open_engine

STEPS, ROUNDS = 16, 5


@pytest.fixture(scope="module")
def curve(device: str) -> Iterator[Curve]:
    path = demo_model()
    options: dict[str, Any] = {"prefix_cache": False, "max_batch": ON_CPU[-1]}
    with (
        open_checkpoint(path) as checkpoint,
        open_engine(Setting(device=device), checkpoint.config, 64 * ON_CPU[-1], **options) as engine,
    ):
        engine.add(MODEL, path)
        yield Curve(engine, checkpoint.config.vocab_size, STEPS)


@pytest.mark.parametrize("size", ON_CPU)
def test_steps(benchmark: Any, curve: Curve, size: int) -> None:
    assert curve.num_differing(size) == (0, 0)
    alone: list[float] = []
    open_batches: list[Batch] = []

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        while open_batches:
            open_batches.pop().close()
        alone.append(curve.alone(0)[0])
        batch, logits = curve.begin(size)
        open_batches.append(batch)
        return (batch, logits), {}

    benchmark.pedantic(curve.steps, setup=setup, rounds=ROUNDS)
    open_batches.pop().close()
    shown = point(size, STEPS, [benchmark.stats.stats.min], min(alone) / STEPS)
    for key in ("batch", "reps", "spread"):  # which the row has
        del shown[key]
    benchmark.extra_info |= shown | {"baseline_b1_ms_per_tok": 1e3 * min(alone) / STEPS}
