"""csrc_triton/fused.py: rows, on the CPU path and through kernels, by value and by their bits; rope tables."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import ANY_THREADS, assert_no_worse, assert_same_bits
from dryrun import Launch, dryrun
from interpreter import interpreted
from torch import Tensor

from csrc_triton.cpu import MIN_DISTANCE, quantize_rows_cpu, split_gate_up
from csrc_triton.fused import (
    ACTIVATIONS,
    FLOATS,
    MAX_CANDIDATES,
    MAX_CHUNK,
    MAX_TOP_K,
    TOP_CHUNK,
    add_rmsnorm,
    add_rmsnorm_ref,
    argmax,
    argmax_ref,
    chunk_of,
    new_rows,
    num_distances,
    quantize_rows,
    quantize_rows_ref,
    rmsnorm,
    rmsnorm_quantize,
    rmsnorm_quantize_ref,
    rmsnorm_ref,
    rope_table,
    row_sum,
    swiglu,
    swiglu_ref,
    top_k,
    top_k_ref,
    top_k_workspace_nbytes,
)
from csrc_triton.launch import OPTIONS, jit, tl

ANY_FLOAT = pytest.mark.parametrize("dtype", FLOATS, ids=("f32", "bf16", "f16"))
TWO_FLOATS = pytest.mark.parametrize("dtype", FLOATS[:2], ids=("f32", "bf16"))
ON_KERNELS = pytest.mark.parametrize("on_kernels", [False, True], ids=("cpu", "kernel"))


@contextmanager
def kernels() -> Iterator[None]:
    """Launchers take their kernels; infinities and NaN make no noise."""
    with interpreted(90), np.errstate(all="ignore"):
        yield


@contextmanager
def either(on_kernels: bool) -> Iterator[None]:
    with kernels() if on_kernels else nullcontext():
        yield


def rows_of(x: Tensor, extra: int = 0) -> Tensor:
    """x in rows that kernels take, `extra` times 16 bytes further apart than they need be; NaN between them."""
    step = 16 // x.element_size()
    pitch = (-(-x.shape[1] // step) + extra) * step
    padded = torch.full((x.shape[0] + 1, pitch), math.nan, dtype=x.dtype)
    padded[1:, : x.shape[1]] = x
    return padded[1:, : x.shape[1]]


def assert_rest_untouched(out: Tensor) -> None:
    """What lies between the rows of a result is as poisoned_memory left it."""
    rest = out.as_strided((out.shape[0], out.stride(0)), out.stride())[:, out.shape[1] :]
    if out.is_floating_point():
        assert rest.isnan().all()
    elif "ttsem" not in sys.modules:  # which poisons integers otherwise
        assert (rest == torch.iinfo(out.dtype).max).all()


def assert_rows_keep_bits(run: Callable[[slice], Tensor], num_rows: int, seed: int) -> None:
    """run(rows) equals those rows of run on all."""
    rng, whole = random.Random(seed), run(slice(0, num_rows))
    pieces = [(0, 1), (1, 2), (num_rows - 1, num_rows), (0, 16), (1, 18)]
    for _ in range(6):
        start = rng.randrange(num_rows)
        pieces.append((start, rng.randint(start + 1, num_rows)))
    for start, stop in pieces:
        assert_same_bits(run(slice(start, stop)), whole[start:stop], f"rows {start}..{stop} of {num_rows}")


# ---- rmsnorm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("width", [1, 7, 64, 172, 576, 577, 4096])
def test_rmsnorm(width: int, size: float) -> None:
    x, weight, residual = torch.randn(33, width) * size, torch.randn(width), torch.randn(33, width) * size
    x[5] = 0
    same_dtype = F.rms_norm(x, (width,), weight, 1e-5)
    # a rounding of the largest result, for where torch is lucky
    slack = 2.0**-23 * weight.abs().max().item() * width**0.5
    assert_no_worse(rmsnorm(x, weight, 1e-5), rmsnorm_ref(x, weight, 1e-5), same_dtype, slack)
    same_dtype = F.rms_norm(x + residual, (width,), weight, 1e-5)
    exact = rmsnorm_ref(x, weight, 1e-5, residual)
    assert_no_worse(rmsnorm(x, weight, 1e-5, residual), exact, same_dtype, slack)


def test_rmsnorm_reference() -> None:
    x, weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([1.0, -2.0])
    exact = [[3 / math.sqrt(12.5 + 1e-5), -8 / math.sqrt(12.5 + 1e-5)], [0.0, 0.0]]
    torch.testing.assert_close(rmsnorm_ref(x, weight, 1e-5), torch.tensor(exact, dtype=torch.float64))
    torch.testing.assert_close(rmsnorm_ref(x - 1, weight, 1e-5, torch.ones(2, 2)), rmsnorm_ref(x, weight, 1e-5))


@ANY_THREADS
@pytest.mark.parametrize("width", [1, 8, 31, 33, 64, 80, 172, 576, 577, 4864])
def test_rmsnorm_keeps_a_rows_bits(width: int, threads: int) -> None:
    x, weight, residual = torch.randn(300, width), torch.randn(width), torch.randn(300, width)
    assert_rows_keep_bits(lambda rows: rmsnorm(x[rows], weight, 1e-6), 300, width)
    assert_rows_keep_bits(lambda rows: rmsnorm(x[rows], weight, 1e-6, residual[rows]), 300, width)


def test_rmsnorm_leaves_its_inputs() -> None:
    x, weight, residual = torch.randn(3, 5), torch.randn(5), torch.randn(3, 5)
    before = [t.clone() for t in (x, weight, residual)]
    rmsnorm(x, weight, 1e-6, residual)
    for now, then in zip((x, weight, residual), before, strict=True):
        assert_same_bits(now, then)


def test_rmsnorm_refuses() -> None:
    x, weight = torch.randn(3, 5), torch.randn(5)
    with pytest.raises(ValueError, match=r"x \(5,\) must be \[M, K\]"):
        rmsnorm(x[0], weight, 1e-6)
    with pytest.raises(ValueError, match=r"weight \(4,\) \[K\]"):
        rmsnorm(x, weight[:4], 1e-6)
    with pytest.raises(ValueError, match=r"residual \(1, 5\) must have x's shape \(3, 5\)"):
        rmsnorm(x, weight, 1e-6, x[:1])
    for args in ((x.clone().requires_grad_(), weight), (x, weight.clone().requires_grad_())):
        with pytest.raises(ValueError, match="requires grad"):
            rmsnorm(*args, 1e-6)
    assert rmsnorm(x[:0], weight, 1e-6).shape == (0, 5)


@ANY_FLOAT
@pytest.mark.parametrize("width", [1, 17, 576, 1536, 4097])
def test_rmsnorm_kernel(width: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    x, residual = (rows_of(torch.randn(3, width).to(dtype)) for _ in range(2))
    x[1], residual[1] = 0, 0
    weight = torch.randn(width).to(dtype)
    with kernels():
        y = rmsnorm(x, weight, 1e-5)
        stream, normed = add_rmsnorm(x, residual, weight, 1e-5)
        alone = rmsnorm(x, weight, 1e-5, residual)
        wide = rmsnorm(x, weight, 1e-5, out_dtype=torch.float32)
    slack = 2.0**-23 * weight.abs().max().item() * width**0.5
    assert_no_worse(y, rmsnorm_ref(x, weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5), slack)
    exact_stream, exact = add_rmsnorm_ref(x, residual, weight, 1e-5)
    assert_same_bits(stream, exact_stream)
    assert_no_worse(normed, exact, F.rms_norm(exact_stream, (width,), weight, 1e-5), slack)
    assert_same_bits(alone, normed)
    assert_same_bits(wide.to(dtype), y)
    for out in (y, stream, normed, wide):
        assert_rest_untouched(out)


def test_rmsnorm_kernel_reads_the_rounded_sum() -> None:
    x, residual, weight = rows_of(torch.randn(4, 64).bfloat16()), rows_of(torch.randn(4, 64).bfloat16()), torch.ones(64)
    with kernels():
        stream, normed = add_rmsnorm(x, residual, weight, 1e-5)
        assert_same_bits(normed, rmsnorm(stream, weight, 1e-5))
        unrounded = rmsnorm(x.float() + residual.float(), weight, 1e-5, out_dtype=torch.bfloat16)
    assert not torch.equal(normed, unrounded)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dim, a power of two, neighbours first."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


@ANY_FLOAT
@pytest.mark.parametrize("width", [17, 576, MAX_CHUNK + 100])
def test_rmsnorm_kernel_adds_in_the_order_of_the_width(width: int, dtype: torch.dtype) -> None:
    """Chunk after chunk, lane by lane, then neighbours: whatever the dtype and where the row lies."""
    x, weight = torch.randn(2, width).to(dtype), torch.randn(width)
    padded = F.pad(x.float(), (0, -width % chunk_of(width))).unflatten(1, (-1, chunk_of(width)))
    total = padded[:, 0] * padded[:, 0]
    for i in range(1, padded.shape[1]):
        total = (padded[:, i].double().square() + total.double()).float()
    inverse = 1.0 / (tree_sum(total) / width + torch.tensor(1e-5)).double().sqrt().float()
    with kernels():
        for extra in (0, 3):
            y = rmsnorm(rows_of(x, extra), weight, 1e-5, out_dtype=torch.float32)
            assert_same_bits(y, x.float() * inverse[:, None] * weight)


def test_rmsnorm_kernel_adds_a_chunk_by_fma() -> None:
    """One rounding a square: rows of two numbers in one lane, chosen so that a second rounding would show."""
    width = MAX_CHUNK + 8
    a, b = torch.randn(2, 1000)
    fused, rounded = ((a * a).double() + b.double().square()).float(), a * a + b * b
    y, other = (a * (1.0 / (total / width).double().sqrt().float()) for total in (fused, rounded))
    shows = (y != other).nonzero()[:8, 0]
    assert len(shows) == 8
    x = torch.zeros(8, width)
    x[:, 0], x[:, MAX_CHUNK] = a[shows], b[shows]
    with kernels():
        assert_same_bits(rmsnorm(x, torch.ones(width), 0.0)[:, 0], y[shows])


@jit
def _row_sum_kernel(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, row_sum(tl.load(x_ptr + tl.arange(0, N))))


@pytest.mark.parametrize("size", [1, 2, 8, 128, MAX_CHUNK])
def test_row_sum(size: int, poisoned_memory: None) -> None:
    x = torch.randn(size) * 10 ** torch.randint(-4, 5, (size,))
    out = torch.empty(1)
    with kernels():
        _row_sum_kernel[(1,)](x, out, N=size, **OPTIONS)
    assert_same_bits(out[0], tree_sum(x))
    if size >= 128:
        assert out[0] != tree_sum(x.flip(0)[torch.randperm(size)]), "an order as good as any other tests nothing"


@ON_KERNELS
def test_add_rmsnorm(on_kernels: bool) -> None:
    x, residual, weight = (torch.randn(*shape) for shape in ((3, 64), (3, 64), (64,)))
    with either(on_kernels):
        stream, normed = add_rmsnorm(x, residual, weight, 1e-5)
        assert_same_bits(stream, x + residual)
        assert_same_bits(normed, rmsnorm(stream, weight, 1e-5))
        assert_same_bits(normed, rmsnorm(x, weight, 1e-5, residual))
        assert add_rmsnorm(x, residual, weight, 1e-5, out_dtype=torch.bfloat16)[1].dtype == torch.bfloat16


# ---- int8 rows ---------------------------------------------------------------------------------------


def special_rows(width: int) -> Tensor:
    """Random rows, zeros, ties, the very small, the very large, infinity and NaN, all exact in float16."""
    x = torch.randn(8, width)
    x[1] = 0
    x[2] = torch.arange(width) % 128 - 0.5
    x[2, 0] = 127
    x[3] *= 2.0**-20
    x[4] *= 2.0**10
    x[5, -1] = math.inf
    x[6, -1] = math.nan
    x[7], x[7, 0] = -0.0, -3
    return x.half().float()


@ON_KERNELS
@ANY_FLOAT
@pytest.mark.parametrize("width", [2, 17, 576, 4097])
def test_quantize_rows(width: int, dtype: torch.dtype, on_kernels: bool, poisoned_memory: None) -> None:
    x = rows_of(special_rows(width).to(dtype))
    with either(on_kernels):
        codes, scale = quantize_rows(x)
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
    finite = torch.tensor([0, 1, 2, 3, 4, 7])
    integers, same_scale = quantize_rows_cpu(x.float())
    assert_same_bits(codes[finite], integers[finite].to(torch.int8))
    assert_same_bits(scale[finite], same_scale.flatten()[finite])
    exact, exact_scale = quantize_rows_ref(x)
    assert ((codes - exact).abs()[finite] <= 0.5 + 127 * 2.0**-22).all()
    assert (codes.abs().amax(1)[finite] == torch.tensor([127, 0, 127, 127, 127, 127])).all()
    torch.testing.assert_close(scale[finite].double(), exact_scale[finite], rtol=2.0**-24, atol=0)
    assert scale[5] == math.inf and scale[6].isnan() and not codes[5].any() and not codes[6].any()
    assert_rest_untouched(codes)


def test_quantize_rows_rounds_ties_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    for on_kernels in (False, True):
        with either(on_kernels):
            assert quantize_rows(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


@ON_KERNELS
def test_quantize_rows_too_small_for_an_inverse(on_kernels: bool) -> None:
    x = torch.tensor([[2.0**-126, 0.0, -1e-44, 0.0], [2.0**-120, 0.0, 0.0, -(2.0**-121)]])
    with either(on_kernels):
        codes, scale = quantize_rows(x)
    assert codes.tolist() == [[0, 0, 0, 0], [127, 0, 0, -64]]
    assert (scale > 0).all()


@ON_KERNELS
@ANY_FLOAT
@pytest.mark.parametrize("width", [17, 576, MAX_CHUNK + 8])
def test_rmsnorm_quantize(width: int, dtype: torch.dtype, on_kernels: bool, poisoned_memory: None) -> None:
    x, weight = rows_of(special_rows(width)[[0, 1, 6]].to(dtype)), torch.randn(width).to(dtype)
    with either(on_kernels):
        codes, scale = rmsnorm_quantize(x, weight, 1e-5)
        same_codes, same_scale = quantize_rows(rmsnorm(x, weight, 1e-5))
    assert_same_bits(codes, same_codes)
    assert_same_bits(scale, same_scale)
    exact, exact_scale = rmsnorm_quantize_ref(x, weight, 1e-5)
    ulp = torch.finfo(dtype).eps  # the norm of x may be stored as a neighbour of the exact one
    assert ((codes - exact).abs()[:2] <= 0.5 + 127 * 2 * ulp).all() and codes[0].any()
    torch.testing.assert_close(scale[:2].double(), exact_scale[:2], rtol=2 * ulp, atol=0)
    assert scale[2].isnan()


@ON_KERNELS
def test_int8_rows_refuse(on_kernels: bool) -> None:
    x, weight = torch.randn(3, 4), torch.randn(4)
    with either(on_kernels):
        with pytest.raises(ValueError, match=r"x \(3, 0\) must be \[M, K\] with K > 0"):
            quantize_rows(x[:, :0])
        with pytest.raises(ValueError, match="quantize_rows: an input requires grad"):
            quantize_rows(x.clone().requires_grad_())
        with pytest.raises(ValueError, match=r"rmsnorm_quantize: x \(3, 4\) must be \[M, K\] and weight \(3,\)"):
            rmsnorm_quantize(x, weight[:3], 1e-5)
        codes, scale = rmsnorm_quantize(x[:0], weight, 1e-5)
    assert codes.shape == (0, 4) and scale.shape == (0,)


# ---- swiglu ------------------------------------------------------------------------------------------


def torch_swiglu(gate_up: Tensor, activation: str, block: int) -> Tensor:
    gate, up = split_gate_up(gate_up, block)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 31, 64, 172, 1536])
def test_swiglu(width: int, activation: str) -> None:
    gate_up = torch.randn(17, 2 * width) * 3
    for block in (64, width, 1, 5):
        exact, same_dtype = swiglu_ref(gate_up, activation, block), torch_swiglu(gate_up, activation, block)
        # exp and tanh to a unit in the last place, then four roundings
        slack = 2.0**-21 * exact.abs().max().item()
        assert_no_worse(swiglu(gate_up, activation, block), exact, same_dtype, slack)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_swiglu_far_out(activation: str) -> None:
    gate = torch.tensor([-1e30, -1e4, -100.0, -89.0, -20.0, -0.0, 0.0, 1e-30, 20.0, 100.0, 1e4, 1e12])
    y = swiglu(torch.cat((gate, torch.ones_like(gate)))[None], activation, block=len(gate))[0]
    exact = swiglu_ref(torch.cat((gate, torch.ones_like(gate)))[None], activation, block=len(gate))[0]
    assert y.isfinite().all()
    assert ((y - exact).abs() <= 1e-6 * exact.abs() + 1e-5).all()


def test_split_gate_up_undoes_the_interleaving() -> None:
    for width, block in ((64, 64), (172, 64), (10, 3), (10, 1), (10, 64), (128, 64), (1, 1)):
        gate, up = torch.randn(3, width), torch.randn(3, width)
        pieces = [t[:, i : i + block] for i in range(0, width, block) for t in (gate, up)]
        halves = split_gate_up(torch.cat(pieces, 1), block)
        assert_same_bits(halves[0].contiguous(), gate)
        assert_same_bits(halves[1].contiguous(), up)
        assert_same_bits(swiglu(torch.cat(pieces, 1), "silu", block), swiglu(torch.cat((gate, up), 1), "silu", width))


@ANY_THREADS
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 31, 172, 1536, 4864])
def test_swiglu_keeps_a_rows_bits(width: int, activation: str, threads: int) -> None:
    num_rows = 130 if width < 4000 else 40
    gate_up = torch.randn(num_rows, 2 * width) * 4
    for block in (64, width):
        assert_rows_keep_bits(lambda rows, block=block: swiglu(gate_up[rows], activation, block), num_rows, width)


def test_swiglu_refuses() -> None:
    with pytest.raises(ValueError, match="'silu' or 'gelu_tanh', got 'relu'"):
        swiglu(torch.randn(2, 4), "relu")
    with pytest.raises(ValueError, match=r"must be \[M, 2F\], got \(2, 5\)"):
        swiglu(torch.randn(2, 5))
    with pytest.raises(ValueError, match="requires grad"):
        swiglu(torch.randn(2, 4, requires_grad=True))
    assert swiglu(torch.randn(0, 4)).shape == (0, 2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@ANY_FLOAT
@pytest.mark.parametrize("width", [1, 172, 1536])
def test_swiglu_kernel(width: int, dtype: torch.dtype, activation: str, poisoned_memory: None) -> None:
    gate_up = rows_of((torch.randn(3, 2 * width) * 3).to(dtype))
    for block in (64, width, 5) if width == 172 else (64,):
        with kernels():
            y = swiglu(gate_up, activation, block)
        exact, same_dtype = swiglu_ref(gate_up, activation, block), torch_swiglu(gate_up, activation, block)
        # exp to two units in the last place, then three roundings
        slack = 2.0**-21 * exact.abs().max().item()
        assert_no_worse(y, exact, same_dtype, slack)
        assert_rest_untouched(y)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_swiglu_kernel_far_out(activation: str) -> None:
    gate = torch.tensor([-1e30, -1e4, -100.0, -89.0, -20.0, -0.0, 0.0, 1e-30, 20.0, 100.0, 1e4, 1e12])
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    with kernels():
        y = swiglu(gate_up, activation, block=len(gate))
    exact = swiglu_ref(gate_up, activation, block=len(gate))
    assert y.isfinite().all()
    assert ((y - exact).abs() <= 1e-6 * exact.abs() + 1e-5).all()


# ---- argmax ------------------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "rows",
    [
        [[0.0, 2.0, 1.0]],
        [[2.0, 2.0, 1.0], [1.0, 2.0, 2.0]],
        [[-INF, -INF], [-INF, -5.0], [INF, INF], [1.0, INF]],
        [[NAN, 1.0, 2.0], [2.0, 1.0, NAN]],
        [[0.0, NAN, 0.0, 0.0], [1.0, 2.0, 0.0, 2.0]],  # one row has no largest, the other two: as many as rows
        [[NAN, 1.0, 1.0], [INF, INF, 0.0], [0.0, 1.0, 1.0], [NAN, NAN, NAN]],
        [[-0.0, 0.0], [0.0, -0.0]],
        [[7.0]],
        [[1e-45, 0.0], [-1e-45, 0.0]],
    ],
)
def test_argmax(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows)
    ids = argmax(logits)
    assert ids.dtype == torch.int64 and ids.tolist() == argmax_ref(logits).tolist()
    assert [int(argmax(row[None])) for row in logits] == ids.tolist()
    with kernels():
        assert_same_bits(argmax(rows_of(logits)), ids)


def test_argmax_reference() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [NAN, 9.0, 0.0], [-INF, -INF, -INF]])
    assert argmax_ref(logits).tolist() == [1, -1, 0]


@ANY_THREADS
def test_argmax_of_many_ties(threads: int) -> None:
    """Bfloat16 logits tie often; so do more rows than one thread takes."""
    for num_rows, vocab in ((1, 50000), (5, 30001), (300, 97)):
        logits = torch.randn(num_rows, vocab).bfloat16().float()
        logits[0, vocab // 2 :] = logits[0].max()
        assert argmax(logits).tolist() == argmax_ref(logits).tolist()


@TWO_FLOATS
@pytest.mark.parametrize("vocab", [1, 17, TOP_CHUNK + 1, 49152])
def test_argmax_kernel(vocab: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    """A tie across all chunks, a NaN in the last, only a NaN, a largest in the last."""
    logits = torch.randn(4, vocab).to(dtype)
    logits[0, vocab // 2 :] = 9
    logits[1, -1] = logits[2] = math.nan
    logits[3, -1] = 9
    with kernels():
        ids = argmax(rows_of(logits))
    assert ids.dtype == torch.int64 and ids.tolist() == [vocab // 2, -1, -1, vocab - 1]


def test_argmax_refuses() -> None:
    for logits in (torch.randn(3), torch.randn(3, 0)):
        with pytest.raises(ValueError, match=r"must be \[M, V\] with V > 0"):
            argmax(logits)
    with pytest.raises(ValueError, match="requires grad"):
        argmax(torch.randn(2, 4, requires_grad=True))
    assert argmax(torch.randn(0, 4)).shape == (0,)


# ---- top_k -------------------------------------------------------------------------------------------


def assert_top_k(logits: Tensor, k: int, on_kernels: bool) -> None:
    with either(on_kernels):
        values, ids = top_k(logits, k)
    exact_values, exact_ids = top_k_ref(logits, k)
    assert_same_bits(ids, exact_ids)
    assert torch.equal(values.isnan(), exact_values.isnan())
    assert_same_bits(values[~values.isnan()], exact_values[~values.isnan()])


def test_top_k_reference() -> None:
    values, ids = top_k_ref(torch.tensor([[NAN, 1.0, -INF, 3.0, 1.0, NAN, -0.0, 0.0]]), 8)
    assert ids.tolist() == [[3, 1, 4, 6, 7, 2, 0, 5]]
    assert [str(v) for v in values[0].tolist()] == ["3.0", "1.0", "1.0", "-0.0", "0.0", "-inf", "nan", "nan"]


@ON_KERNELS
@pytest.mark.parametrize(
    "row",
    [
        [7.0],
        [1.0, 2.0, 2.0, 1.0, 2.0],
        [NAN, 1.0, NAN, 2.0],
        [NAN, NAN, NAN],
        [-INF, INF, NAN, -INF, INF],
        [-0.0, 0.0, -1e-45, 1e-45, -0.0],
    ],
)
def test_top_k(row: list[float], on_kernels: bool) -> None:
    logits = rows_of(torch.tensor([row, row[::-1]]))
    for k in range(1, len(row) + 1):
        assert_top_k(logits, k, on_kernels)


@ON_KERNELS
@pytest.mark.parametrize(
    ("vocab", "k", "dtype"),
    [
        (17, 17, torch.bfloat16),
        (17, 9, torch.float16),
        (130, MAX_TOP_K, torch.float32),
        (TOP_CHUNK + 1, 3, torch.bfloat16),
        (49152, 9, torch.float32),
    ],
)
def test_top_k_of_many_ties(vocab: int, k: int, dtype: torch.dtype, on_kernels: bool, poisoned_memory: None) -> None:
    logits = torch.randn(2, vocab).bfloat16().to(dtype)
    logits[0, vocab // 2 :] = logits[0].max()
    logits[1, ::3] = math.nan
    assert_top_k(rows_of(logits), k, on_kernels)


def test_top_k_where_few_are_left() -> None:
    """A last chunk of one id, rows of fewer numbers than k."""
    logits = torch.full((2, TOP_CHUNK + 1), math.nan)
    logits[0, -1] = -INF
    logits[1, 0] = -INF
    assert_top_k(rows_of(logits), 4, True)


def test_top_k_uses_the_workspace_it_is_given() -> None:
    logits = rows_of(torch.randn(2, TOP_CHUNK + 1))
    nbytes = top_k_workspace_nbytes(2, TOP_CHUNK + 1, 5)
    assert nbytes == 2 * 2 * 5 * 8
    workspace = torch.zeros(nbytes + 16, dtype=torch.uint8)
    with kernels():
        _, ids = top_k(logits, 5, workspace=workspace)
        assert workspace[:nbytes].view(2, -1).any(1).all() and not workspace[nbytes:].any()
        assert_same_bits(ids, top_k_ref(logits, 5)[1])
        for bad in (workspace[: nbytes - 1], workspace[1:]):
            with pytest.raises(ValueError, match=f"workspace of {bad.nbytes} bytes, expected {nbytes} contiguous"):
                top_k(logits, 5, workspace=bad)
        assert_same_bits(argmax(logits, workspace=workspace[:32]), argmax_ref(logits))


@ON_KERNELS
def test_top_k_refuses(on_kernels: bool) -> None:
    logits = torch.randn(2, 8)
    with either(on_kernels):
        for args in ((logits, 0), (logits, 9), (torch.randn(2, 200), MAX_TOP_K + 1), (logits[0], 1)):
            with pytest.raises(ValueError, match=r"must be \[M, V\] and k=\d+ in 1..min\(V, 128\)"):
                top_k(*args)
        with pytest.raises(ValueError, match="requires grad"):
            top_k(torch.randn(2, 4, requires_grad=True), 1)
        assert [t.shape for t in top_k(logits[:0], 2)] == [(0, 2), (0, 2)]


def test_top_k_kernel_refuses_more_than_it_can_merge() -> None:
    vocab = (MAX_CANDIDATES // MAX_TOP_K) * TOP_CHUNK + 1
    with kernels(), pytest.raises(ValueError, match=f"V={vocab} with k=128 leaves 16512 candidates, at most 16384"):
        top_k(torch.zeros(1, vocab), MAX_TOP_K)


# ---- rows of kernels ---------------------------------------------------------------------------------

ROW_KERNELS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "rmsnorm": lambda x: (rmsnorm(x, torch.linspace(-1, 1, x.shape[1]), 1e-5),),
    "add_rmsnorm": lambda x: add_rmsnorm(x, x, torch.linspace(-1, 1, x.shape[1]), 1e-5),
    "quantize_rows": quantize_rows,
    "rmsnorm_quantize": lambda x: rmsnorm_quantize(x, torch.linspace(-1, 1, x.shape[1]), 1e-5),
    "swiglu": lambda x: (swiglu(x),),
    "argmax": lambda x: (argmax(x),),
    "top_k": lambda x: top_k(x, 3),
}


@pytest.mark.parametrize(("width", "dtype"), [(18, torch.float32), (4098, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", ROW_KERNELS)
def test_kernels_keep_a_rows_bits(name: str, width: int, dtype: torch.dtype) -> None:
    """Alone, in company, at other strides; beside rows of NaN."""
    x, function = torch.randn(5, width).to(dtype), ROW_KERNELS[name]
    with kernels():
        whole = function(rows_of(x))
        for start, stop in ((0, 1), (4, 5), (1, 4)):
            for result, expected in zip(function(rows_of(x, extra=start)[start:stop]), whole, strict=True):
                assert_same_bits(result, expected[start:stop], f"rows {start}..{stop}")
        spoilt = rows_of(x)
        spoilt[1:] = math.nan
        for result, expected in zip(function(spoilt), whole, strict=True):
            assert_same_bits(result[:1], expected[:1])


@pytest.mark.parametrize("name", ROW_KERNELS)
def test_kernels_refuse_rows_off_their_alignment(name: str) -> None:
    function, aligned = ROW_KERNELS[name], torch.randn(4, 64)
    bad = {
        r"strides \(66, 1\) of 4 bytes": torch.randn(4, 66)[:, :64],
        r"strides \(1, 64\)": torch.randn(64, 64).T[:4],
        r"strides \(64, 1\) of 4 bytes and address 0x[0-9a-f]+[48c]$": torch.randn(5 * 64)[1:257].view(4, 64),
        "is torch.float64, expected float32, bfloat16 or float16": aligned.double(),
        "an input requires grad": aligned.clone().requires_grad_(),
    }
    with kernels():
        for match, x in bad.items():
            with pytest.raises(ValueError, match=f"{name}: .*{match}"):
                function(x)
        function(aligned)
        function(torch.randn(1, 66)[:, :64])  # one row has no stride
    for result in function(torch.randn(4, 66)[:, :64]):  # the CPU path takes any
        assert result.shape[0] == 4


def test_norm_kernels_refuse() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    with kernels():
        with pytest.raises(ValueError, match=r"residual is torch\.bfloat16, expected x's torch\.float32"):
            add_rmsnorm(x, x.bfloat16(), weight, 1e-5)
        with pytest.raises(ValueError, match="rows of residual must be contiguous"):
            rmsnorm(x, weight, 1e-5, torch.randn(3, 9)[:, :8])
        with pytest.raises(ValueError, match="rows of weight must be contiguous"):
            rmsnorm(x, torch.randn(9)[1:], 1e-5)
        with pytest.raises(ValueError, match=r"out is torch\.int8, expected float32"):
            rmsnorm(x, weight, 1e-5, out_dtype=torch.int8)


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int8))
def test_new_rows_are_aligned(dtype: torch.dtype) -> None:
    for width in (1, 16, 17, 172):
        x = new_rows((3, width), dtype, "cpu")
        assert x.shape == (3, width) and x.stride(1) == 1
        pitch = x.stride(0) * x.element_size()
        assert pitch % 16 == 0 and pitch - width * x.element_size() < 16


def compiled(arch: int) -> list[Launch]:
    x, weight = torch.empty(3, 1536, dtype=torch.bfloat16), torch.empty(1536, dtype=torch.bfloat16)
    with dryrun(arch) as launches:
        add_rmsnorm(x, x, weight, 1e-5)
        rmsnorm_quantize(x, weight, 1e-5)
        swiglu(x)
        top_k(torch.empty(3, 49152), 64)
    return launches


@pytest.mark.aot
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile(arch: int) -> None:
    """No register spills, all rows move 16 bytes at a time, and float sums are of two numbers."""
    launches = compiled(arch)
    grids = {launch.name: launch.grid for launch in launches}
    assert grids == {
        "_rmsnorm_kernel": (3, 1, 1),
        "_quantize_kernel": (3, 1, 1),
        "_swiglu_kernel": (3, 1, 1),
        "_top_of_chunk_kernel": (3, 12, 1),
        "_top_of_row_kernel": (3, 1, 1),
    }
    for launch in launches:
        assert launch.kernel.n_spills == 0 and launch.registers <= 96, f"{launch}"
        loads = re.findall(r" ld\.global(\S*) ", launch.asm["ptx"])
        if launch.name != "_top_of_row_kernel":  # reads what is left, an id at a time
            assert loads and set(loads) == {".v4.b32"}, f"{launch}: {loads}"
        sums = re.findall(r"\}\) : \(tensor<([0-9x]+)xf32", launch.asm["ttgir"])
        assert all(shape == "1" or shape.endswith("x2") for shape in sums), f"{launch}: {sums}"
        assert len(sums) == (12 if launch.name in ("_rmsnorm_kernel", "_quantize_kernel") else 0)


# ---- rope tables -------------------------------------------------------------------------------------


def test_rope_table_holds_every_distance() -> None:
    freq = [10000 ** (-2 * j / 16) for j in range(8)]
    table = rope_table(freq, 100, factor=1.25)
    assert (table.rot_dim, table.max_position, table.factor) == (16, 127, 1.25)  # to the end of the page of 100
    assert table.cos.shape == table.sin.shape == (127 - MIN_DISTANCE + 1, 8) == (num_distances(100), 8)
    assert table.nbytes == 2 * 4 * table.cos.numel()
    for distance in (MIN_DISTANCE, -1, 0, 1, 100, 127):
        row = distance - MIN_DISTANCE
        for j, f in enumerate(freq):
            assert table.cos[row, j].item() == torch.tensor(math.cos(distance * f)).item()
            assert table.sin[row, j].item() == torch.tensor(math.sin(distance * f)).item()


def test_rope_table_far_out_is_as_exact_as_near() -> None:
    """Angles are float64: a float32 angle of 131072 would be off by 0.008."""
    table = rope_table([1.0, 0.31], 131072)
    row = 131072 - MIN_DISTANCE
    for j, f in enumerate((1.0, 0.31)):
        assert abs(table.sin[row, j].item() - math.sin(131072 * f)) < 2.0**-24


def test_rope_table_refuses() -> None:
    with pytest.raises(ValueError, match="inv_freq must be a non-empty vector"):
        rope_table([], 10)
    with pytest.raises(ValueError, match=r"non-empty vector, got shape \(2, 2\)"):
        rope_table(torch.ones(2, 2), 10)
    with pytest.raises(ValueError, match="max_position must be >= 0, got -1"):
        rope_table([1.0], -1)
    assert rope_table([1.0], 0).max_position == 63
