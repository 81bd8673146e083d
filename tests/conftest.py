"""Seed 0 and a fixed number of threads for every test; the demo model where it is at hand."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # threads that wait by spinning would take the other workers' cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from csrc_triton import launch
from polymodel.checkpoint import resolve
from polymodel.errors import FetchFailed

if "ttsem" in sys.modules:  # tools/sanitize.sh, where every tensor says that it is on a GPU, and no assembly runs
    launch.runs_kernel = lambda x: launch._on_cpu is not None
    launch.asm_arch = lambda arch: 0

TINY_THREADS, DEMO_THREADS = 1, 2  # a tiny model's products are shorter than waking a second thread


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-demo-model",
        action="store_true",
        help="fail, not skip, where the weights of `polymodel pull smollm2` are absent",
    )
    parser.addoption(
        "--stories260k",
        metavar="PATH",
        help="stories260K.bin of llama2.c, with tok512.bin beside it: a trained model of 1 MB, tested only where given",
    )
    parser.addoption(
        "--coder-pair",
        metavar=("TARGET", "DRAFTER"),
        nargs=2,
        help="GGUF files of Qwen2.5-Coder-1.5B and -0.5B, target and drafter of a slow test, skipped where absent",
    )


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """torch's thread count during a test; parametrise it indirectly (checks.ANY_THREADS) for others."""
    default = DEMO_THREADS if request.node.get_closest_marker("demo_model") else TINY_THREADS
    count, before = getattr(request, "param", default), torch.get_num_threads()
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New uninitialised memory holds NaN, so that reading it shows."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="session")
def demo_model_path(request: pytest.FixtureRequest) -> Path:
    """The pulled SmolLM2 file; mark tests that ask for it `demo_model`."""
    try:
        return resolve("smollm2")
    except FetchFailed as error:
        if request.config.getoption("--require-demo-model"):
            pytest.fail(str(error))
        pytest.skip(str(error))
