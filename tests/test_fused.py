"""csrc_triton/fused.py: rmsnorm, swiglu, argmax and rope tables, by value and by the bits of a row."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from checks import ANY_THREADS, assert_no_worse, assert_same_bits
from torch import Tensor

from csrc_triton.cpu import MIN_DISTANCE, split_gate_up
from csrc_triton.fused import argmax, argmax_ref, rmsnorm, rmsnorm_ref, rope_table, swiglu, swiglu_ref

ACTIVATIONS = ("silu", "gelu_tanh")


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


def test_argmax_refuses() -> None:
    for logits in (torch.randn(3), torch.randn(3, 0)):
        with pytest.raises(ValueError, match=r"must be \[M, V\] with V > 0"):
            argmax(logits)
    with pytest.raises(ValueError, match="requires grad"):
        argmax(torch.randn(2, 4, requires_grad=True))
    assert argmax(torch.randn(0, 4)).shape == (0,)


# ---- rope tables -------------------------------------------------------------------------------------


def test_rope_table_holds_every_distance() -> None:
    freq = [10000 ** (-2 * j / 16) for j in range(8)]
    table = rope_table(freq, 100, factor=1.25)
    assert (table.rot_dim, table.max_position, table.factor) == (16, 100, 1.25)
    assert table.cos.shape == table.sin.shape == (100 - MIN_DISTANCE + 1, 8)
    assert table.nbytes == 2 * 4 * table.cos.numel()
    for distance in (MIN_DISTANCE, -1, 0, 1, 100):
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
    assert rope_table([1.0], 0).max_position == 0
