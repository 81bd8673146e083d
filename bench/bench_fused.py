"""Row-wise kernels on a GPU: time, bytes moved and GB/s of each, beside the same in PyTorch.

    pip install '.[bench]' && pytest bench/bench_fused.py [--benchmark-json FILE]

Bytes are those of the inputs and outputs, once. Each kernel is checked against its reference first. A measurement
is the median of replays of a CUDA graph of many launches (harness.graph_us), so that the host does not count; inputs of
up to the size of the L2 cache are read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import graph_us
from torch import Tensor

from csrc_triton.cpu import split_gate_up
from csrc_triton.fused import (
    add_rmsnorm,
    add_rmsnorm_ref,
    argmax,
    argmax_ref,
    quantize_rows,
    quantize_rows_ref,
    rmsnorm,
    rmsnorm_quantize,
    rmsnorm_quantize_ref,
    rmsnorm_ref,
    swiglu,
    swiglu_ref,
    top_k,
    top_k_ref,
)

ROWS = (1, 16, 64, 4096)
WIDTHS = (576, 4096)  # of SmolLM2 135M and of an 8B model
LOGITS = ((1, 49152), (64, 49152), (1, 131072), (64, 131072))
EPS = 1e-5

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are timed on a CUDA device, and there is none"),
]


@dataclass(frozen=True)
class Case:
    inputs: Callable[[int, int], tuple[Tensor, ...]]  # of rows and width
    kernel: Callable[..., Any]
    torch: Callable[..., Any]  # the same in PyTorch
    ref: Callable[..., Any]


def _rows(m: int, k: int) -> Tensor:
    return torch.randn(m, k, dtype=torch.bfloat16, device="cuda")


def _torch_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.float().abs().amax(1, keepdim=True)
    return (x.float() * (127 / largest)).round().to(torch.int8), largest / 127


def _torch_swiglu(x: Tensor) -> Tensor:
    gate, up = split_gate_up(x, 64)
    return F.silu(gate) * up


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


CASES = {
    "rmsnorm": Case(
        lambda m, k: (_rows(m, k), _rows(1, k)[0]),
        lambda x, w: rmsnorm(x, w, EPS),
        _norm,
        lambda x, w: rmsnorm_ref(x, w, EPS),
    ),
    "add_rmsnorm": Case(
        lambda m, k: (_rows(m, k), _rows(m, k), _rows(1, k)[0]),
        lambda x, r, w: add_rmsnorm(x, r, w, EPS),
        lambda x, r, w: (x + r, _norm(x + r, w)),
        lambda x, r, w: add_rmsnorm_ref(x, r, w, EPS),
    ),
    "quantize_rows": Case(lambda m, k: (_rows(m, k),), quantize_rows, _torch_quantize, quantize_rows_ref),
    "rmsnorm_quantize": Case(
        lambda m, k: (_rows(m, k), _rows(1, k)[0]),
        lambda x, w: rmsnorm_quantize(x, w, EPS),
        lambda x, w: _torch_quantize(_norm(x, w)),
        lambda x, w: rmsnorm_quantize_ref(x, w, EPS),
    ),
    "swiglu": Case(lambda m, k: (_rows(m, 2 * k),), swiglu, _torch_swiglu, swiglu_ref),
}
LOGIT_CASES = {
    "argmax": Case(lambda m, v: (_rows(m, v).float(),), argmax, lambda x: x.argmax(1), argmax_ref),
    "top_k": Case(
        lambda m, v: (_rows(m, v).float(),), lambda x: top_k(x, 64), lambda x: x.topk(64), lambda x: top_k_ref(x, 64)
    ),
}


@pytest.fixture(scope="module")
def report(pytestconfig: pytest.Config) -> Iterator[list[str]]:
    """Lines to print when all is measured."""
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}"]
    lines.append(f"{'kernel':20}{'rows':>6}{'width':>8}{'bytes':>14}{'us':>10}{'GB/s':>8}{'x torch':>9}")
    yield lines
    reporter: Any = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    reporter.write_line("\n" + "\n".join(lines))


def _tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _check(case: Case, inputs: tuple[Tensor, ...]) -> int:
    """Compare the first rows with the reference; returns the bytes that a launch moves."""
    outputs = _tensors(case.kernel(*inputs))
    few = [t[:2].cpu() if t.ndim == 2 else t.cpu() for t in inputs]
    for actual, exact in zip(outputs, _tensors(case.ref(*few)), strict=True):
        error = (actual[:2].cpu().double() - exact.double()).abs().max().item()
        if actual.dtype == torch.int64:
            allowed = 0.0
        elif actual.dtype == torch.int8:  # the reference does not round its codes, and is given the exact norm
            allowed = 0.5 + 127 * 2.0**-7
        else:
            allowed = 2.0**-7 * exact.double().abs().max().item()
        assert error <= allowed, f"error {error:.3g}, expected at most {allowed:.3g}"
    return sum(t.nbytes for t in (*inputs, *outputs))


def _measure(benchmark: Any, report: list[str], name: str, case: Case, m: int, width: int) -> None:
    torch.manual_seed(0)
    inputs = case.inputs(m, width)
    nbytes = _check(case, inputs)
    us, torch_us = (graph_us([lambda f=f: f(*inputs)]) for f in (case.kernel, case.torch))

    def once() -> None:
        case.kernel(*inputs)
        torch.cuda.synchronize()

    rate = nbytes / us / 1e3
    # the graph's time; the benchmark's own is that of one call from the host
    benchmark.extra_info.update(bytes=nbytes, us=us, gb_per_s=rate, times_torch=torch_us / us)
    benchmark.pedantic(once, rounds=20, warmup_rounds=3)
    report.append(f"{name:20}{m:6}{width:8}{nbytes:14,}{us:10.2f}{rate:8.0f}{torch_us / us:9.2f}")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("m", ROWS)
def test_rows(benchmark: Any, report: list[str], name: str, m: int, width: int) -> None:
    _measure(benchmark, report, name, CASES[name], m, width)


@pytest.mark.parametrize("name", LOGIT_CASES)
@pytest.mark.parametrize(("m", "vocab"), LOGITS)
def test_logits(benchmark: Any, report: list[str], name: str, m: int, vocab: int) -> None:
    _measure(benchmark, report, name, LOGIT_CASES[name], m, vocab)
