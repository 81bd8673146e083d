"""The time to the first token of the demo model, from the device, host memory, its file, and added anew.

    pip install '.[bench]' && polymodel pull smollm2 && pytest bench/bench_switch.py [--benchmark-json FILE]

The file is in the page cache, and a CPU's memory is the host's, so that from there nothing is copied. Where the model
was, the bytes that were not there and the logits are checked first. In turns with a first token from the device; a load
is what it takes longer than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import demo_model

from polymodel.checkpoint import open_checkpoint
from polymodel.workloads.report import Setting, open_engine
from polymodel.workloads.switch import MODEL, STATES, Switcher

ROUNDS = 5


@pytest.fixture(scope="module")
def switcher(device: str) -> Iterator[Switcher]:
    path = demo_model()
    with (
        open_checkpoint(path) as checkpoint,
        open_engine(Setting(device=device), checkpoint.config, 64, prefix_cache=False, host_budget=1 << 40) as engine,
    ):
        yield Switcher(engine, path, "file", checkpoint.config.vocab_size)


@pytest.mark.parametrize("state", STATES)
def test_first_token(benchmark: Any, switcher: Switcher, state: str) -> None:
    before, nbytes = switcher.first_token(), switcher.engine[MODEL].nbytes
    switcher.send(state)
    assert switcher.state == state
    found = switcher.first_token()
    assert torch.equal(found.logits, before.logits) and found.num_bytes == (0 if state == "device" else nbytes)
    runs: dict[str, list[float]] = {"this": [], "device": []}

    def setup() -> None:
        runs["device"].append(switcher.first_token().seconds)
        switcher.send(state)

    benchmark.pedantic(lambda: runs["this"].append(switcher.first_token().seconds), setup=setup, rounds=ROUNDS)
    benchmark.extra_info["bytes_needed"] = found.num_bytes
    if state != "device":
        benchmark.extra_info["load_ms"] = 1e3 * (min(runs["this"]) - min(runs["device"]))
