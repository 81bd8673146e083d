"""Row-wise kernels on a GPU, and their CPU path: time, bytes moved and GB/s of each, beside the same in PyTorch.

    pip install '.[bench]' && pytest bench/bench_fused.py [--benchmark-json FILE]

Bytes are those declared beside each kernel: inputs and outputs, once. Each is checked against its reference first. On
a GPU a measurement is the median of replays of a CUDA graph of many launches (harness.graph_us), so that the host does
not count; they go round through copies of inputs and results, 512 at most, that together are twice the L2 cache. The
floor is the bytes at the rate of a large copy. On a CPU it is the least of rounds that take turns with torch's own, at
the demo model's widths, everything in a cache as it is between two products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import cold_calls, copy_gbs, cpu_beside_torch, floor_columns, graph_us, printed_after
from torch import Tensor

from csrc_triton.cpu import split_gate_up
from csrc_triton.fused import (
    add_rmsnorm,
    add_rmsnorm_bytes,
    add_rmsnorm_ref,
    argmax,
    argmax_bytes,
    argmax_ref,
    quantize_rows,
    quantize_rows_bytes,
    quantize_rows_ref,
    rmsnorm,
    rmsnorm_bytes,
    rmsnorm_quantize,
    rmsnorm_quantize_bytes,
    rmsnorm_quantize_ref,
    rmsnorm_ref,
    swiglu,
    swiglu_bytes,
    swiglu_ref,
    top_k,
    top_k_bytes,
    top_k_ref,
)

ROWS = (1, 16, 64, 4096)
WIDTHS = (576, 4096)  # of SmolLM2 135M and of an 8B model
LOGITS = ((1, 49152), (64, 49152), (1, 131072), (64, 131072))
CPU_CASES = [
    *((name, m, 576) for name in ("rmsnorm", "add_rmsnorm", "quantize_rows", "rmsnorm_quantize") for m in (1, 64)),
    *(("swiglu", m, 1536) for m in (1, 64, 512)),
    *(("argmax", m, 49152) for m in (1, 16)),
    ("top_k", 16, 49152),
]
CPU_CALLS = 20  # of a round
TOP = 64
EPS = 1e-5
# of values, beside the largest; codes are not rounded in the reference, and get the exact norm
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20}


@dataclass(frozen=True)
class Case:
    inputs: Callable[[Rows, int, int], tuple[Tensor, ...]]  # of rows and width
    kernel: Callable[..., Any]
    torch: Callable[..., Any]  # the same in PyTorch
    ref: Callable[..., Any]
    nbytes: Callable[[int, int, int], int]  # of rows, width and itemsize


@dataclass(frozen=True)
class Rows:
    """Makes random rows."""

    device: str
    dtype: torch.dtype

    def __call__(self, m: int, k: int) -> Tensor:
        return torch.randn(m, k, device=self.device).to(self.dtype)


def _torch_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.float().abs().amax(1, keepdim=True)
    return (x.float() * (127 / largest)).round().to(torch.int8), largest / 127


def _torch_swiglu(x: Tensor) -> Tensor:
    gate, up = split_gate_up(x, 64)
    return F.silu(gate) * up


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _logits(rows: Rows, m: int, vocab: int) -> tuple[Tensor]:
    return (rows(m, vocab).float(),)


CASES = {
    "rmsnorm": Case(
        lambda rows, m, k: (rows(m, k), rows(1, k)[0]),
        lambda x, w: rmsnorm(x, w, EPS),
        _norm,
        lambda x, w: rmsnorm_ref(x, w, EPS),
        rmsnorm_bytes,
    ),
    "add_rmsnorm": Case(
        lambda rows, m, k: (rows(m, k), rows(m, k), rows(1, k)[0]),
        lambda x, r, w: add_rmsnorm(x, r, w, EPS),
        lambda x, r, w: (x + r, _norm(x + r, w)),
        lambda x, r, w: add_rmsnorm_ref(x, r, w, EPS),
        add_rmsnorm_bytes,
    ),
    "quantize_rows": Case(
        lambda rows, m, k: (rows(m, k),), quantize_rows, _torch_quantize, quantize_rows_ref, quantize_rows_bytes
    ),
    "rmsnorm_quantize": Case(
        lambda rows, m, k: (rows(m, k), rows(1, k)[0]),
        lambda x, w: rmsnorm_quantize(x, w, EPS),
        lambda x, w: _torch_quantize(_norm(x, w)),
        lambda x, w: rmsnorm_quantize_ref(x, w, EPS),
        rmsnorm_quantize_bytes,
    ),
    "swiglu": Case(lambda rows, m, f: (rows(m, 2 * f),), swiglu, _torch_swiglu, swiglu_ref, swiglu_bytes),
}
LOGIT_CASES = {
    "argmax": Case(_logits, argmax, lambda x: x.argmax(1), argmax_ref, lambda m, v, _: argmax_bytes(m, v)),
    "top_k": Case(
        _logits,
        lambda x: top_k(x, TOP),
        lambda x: x.topk(TOP),
        lambda x: top_k_ref(x, TOP),
        lambda m, v, _: top_k_bytes(m, v, TOP),
    ),
}
COLUMNS = ("kernel", "rows", "width", "bytes", "us", "floor us", "x floor", "GB/s", "torch us", "x torch")


def _tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def check(case: Case, inputs: tuple[Tensor, ...]) -> None:
    """Compare the first rows with the reference."""
    few = [t[:2].cpu() if t.ndim == 2 else t.cpu() for t in inputs]
    for actual, exact in zip(_tensors(case.kernel(*inputs)), _tensors(case.ref(*few)), strict=True):
        error = (actual[:2].cpu().double() - exact.double()).abs().max().item()
        rounding = ROUNDING[inputs[0].dtype]
        if actual.dtype == torch.int64:
            allowed = 0.0
        elif actual.dtype == torch.int8:
            allowed = 0.5 + 127 * rounding
        else:
            allowed = rounding * exact.double().abs().max().item()
        if not error <= allowed:
            raise AssertionError(f"error {error:.3g}, expected at most {allowed:.3g}")


# ---- on a GPU ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(pytestconfig: pytest.Config) -> Iterator[list[dict[str, Any]]]:
    title = f"row-wise kernels, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    with printed_after(pytestconfig, title, COLUMNS) as rows:
        yield rows


@pytest.fixture(scope="module")
def copy_rate() -> float:
    return copy_gbs()


def _measure(
    benchmark: Any, report: list[dict[str, Any]], copy_rate: float, name: str, case: Case, m: int, width: int
) -> None:
    torch.manual_seed(0)
    inputs = case.inputs(Rows("cuda", torch.bfloat16), m, width)
    check(case, inputs)
    nbytes = case.nbytes(m, width, 2)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    us, torch_us = (graph_us(cold_calls(f, inputs, nbytes, cache)) for f in (case.kernel, case.torch))
    floor = floor_columns(us, nbytes, 0, copy_rate, 1.0)

    def once() -> None:
        case.kernel(*inputs)
        torch.cuda.synchronize()

    # the graph's time; the benchmark's own is that of one call from the host
    row = {
        "bytes": nbytes,
        "us": us,
        **floor,
        "GB/s": nbytes / us / 1e3,
        "torch us": torch_us,
        "x torch": torch_us / us,
    }
    benchmark.extra_info |= row
    benchmark.pedantic(once, rounds=20, warmup_rounds=3)
    report.append({"kernel": name, "rows": m, "width": width} | row)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("m", ROWS)
def test_rows(benchmark: Any, report: Any, copy_rate: float, name: str, m: int, width: int) -> None:
    _measure(benchmark, report, copy_rate, name, CASES[name], m, width)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOGIT_CASES)
@pytest.mark.parametrize(("m", "vocab"), LOGITS)
def test_logits(benchmark: Any, report: Any, copy_rate: float, name: str, m: int, vocab: int) -> None:
    _measure(benchmark, report, copy_rate, name, LOGIT_CASES[name], m, vocab)


# ---- on a CPU ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu_rows(pytestconfig: pytest.Config) -> Iterator[list[dict[str, Any]]]:
    columns = [column for column in COLUMNS if "floor" not in column]
    with printed_after(pytestconfig, "row-wise operations on the CPU, float32", columns) as rows:
        yield rows


@pytest.mark.parametrize(("name", "m", "width"), CPU_CASES)
def test_cpu_rows(benchmark: Any, cpu_rows: list[dict[str, Any]], name: str, m: int, width: int) -> None:
    torch.manual_seed(0)
    case = (CASES | LOGIT_CASES)[name]
    inputs = case.inputs(Rows("cpu", torch.float32), m, width)
    check(case, inputs)
    ours, torchs = ([partial(f, *inputs)] * CPU_CALLS for f in (case.kernel, case.torch))
    row = cpu_beside_torch(benchmark, ours, torchs)
    row["bytes"] = case.nbytes(m, width, 4)
    row["GB/s"] = row["bytes"] / row["us"] / 1e3
    benchmark.extra_info |= row
    cpu_rows.append({"kernel": name, "rows": m, "width": width} | row)
