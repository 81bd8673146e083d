"""The time to the first token of the demo model, from the device, host memory, its file, and added anew.

    pip install '.[bench]' && polymodel pull smollm2 && pytest bench/bench_switch.py [--benchmark-json FILE]

The file is in the page cache, and a CPU's memory is the host's, so that from there nothing is copied. Where the model
was, the bytes that came and the logits are checked first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import demo_model

from polymodel.checkpoint import open_checkpoint
from polymodel.workloads.report import Setting, open_engine
from polymodel.workloads.switch import MODEL, STATES, Switch, Switcher

ROUNDS = 5


@pytest.fixture(scope="module")
def switcher() -> Iterator[Switcher]:
    path = demo_model()
    with (
        open_checkpoint(path) as checkpoint,
        open_engine(Setting(), checkpoint.config, 64, prefix_cache=False, host_budget=1 << 40) as engine,
    ):
        yield Switcher(engine, path, "file", checkpoint.config.vocab_size)


@pytest.mark.parametrize("state", STATES)
def test_first_token(benchmark: Any, switcher: Switcher, state: str) -> None:
    before, nbytes = switcher.first_token(), switcher.engine[MODEL].nbytes
    switcher.send(state)
    assert switcher.state == state
    found = switcher.first_token()
    assert torch.equal(found.logits, before.logits) and found.num_bytes == (0 if state == "device" else nbytes)
    runs: list[Switch] = []
    benchmark.pedantic(lambda: runs.append(switcher.first_token()), setup=lambda: switcher.send(state), rounds=ROUNDS)
    best = min(runs, key=lambda run: run.seconds)
    benchmark.extra_info |= {"bytes": best.num_bytes, "load_ms": 1e3 * best.load_seconds}
