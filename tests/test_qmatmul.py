"""csrc_triton/qmatmul.py and qgemm.py: y = x @ W.T with what follows it, one row's bits at any count of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import ANY_THREADS, FORMATS, ROWS, SCHEMES, assert_close, assert_same_bits, random_weight
from torch import Tensor

from csrc_triton.cpu import checked, pack
from csrc_triton.fused import argmax_ref, swiglu_ref
from csrc_triton.qgemm import prefill_gemm
from csrc_triton.qmatmul import MAX_ROWS, dequant_matmul, lm_head_argmax, matmul, matmul_ref, swiglu_matmul
from csrc_triton.quant import QTensor, interleave_rows

# by root mean square, on normally distributed weights; a scheme may round a weight of any storage again:
# to float16; to 8 bits of its row's largest, with inputs in bfloat16; to 4 bits of its group's range; 8 bits both
LOSS = {"f32": 1e-6, "f16": 5e-4, "i8": 2e-2, "i4": 0.16, "w8a8": 2.5e-2}
# the scheme that a format is stored for loses no weight, only bfloat16 roundings of inputs, scales and results
OWN_LOSS = {"i8": 1e-2, "i4": 2e-2}


@functools.cache
def stored(fmt: str, n: int = 64, k: int = 256) -> QTensor:
    return random_weight(fmt, n, k, seed=3)


@functools.cache
def packed(fmt: str, scheme: str | None = None) -> QTensor:
    return checked(pack(stored(fmt), scheme))


@pytest.mark.parametrize("fmt", FORMATS)
def test_matmul_of_every_format(fmt: str) -> None:
    q, w = packed(fmt), stored(fmt)
    x, bias, residual = torch.randn(max(ROWS), 256), torch.randn(64), torch.randn(max(ROWS), 64)
    scheme = q.layout.removeprefix("cpu-").split("-")[0]
    loss = OWN_LOSS.get(scheme, LOSS[scheme])
    plain, exact = matmul(x, q), matmul_ref(x, w)
    assert_close(plain, exact, loss)
    assert_close(matmul(x, q, bias=bias, residual=residual), matmul_ref(x, w, bias=bias, residual=residual), loss)
    for m in ROWS:
        assert_same_bits(matmul(x[:m], q), plain[:m], f"{m} rows")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_matmul_by_any_scheme(fmt: str, scheme: str) -> None:
    x = torch.randn(17, 256)
    assert_close(matmul(x, pack(stored(fmt), scheme)), matmul_ref(x, stored(fmt)), LOSS[scheme])


def test_reference_is_the_sum_over_columns() -> None:
    q = stored("f32", 3, 5)
    x, bias, residual = torch.randn(2, 5), torch.randn(3), torch.randn(2, 3)
    w, y = q.parts["weight"], matmul_ref(x, q, bias=bias, residual=residual)
    for m in range(2):
        for n in range(3):
            total = sum(float(x[m, k]) * float(w[n, k]) for k in range(5)) + float(bias[n]) + float(residual[m, n])
            assert abs(float(y[m, n]) - total) < 1e-12


@ANY_THREADS
@pytest.mark.parametrize("fmt", ("f32", "bf16", "q8", "q4", "q4_1", "q6_k"))
def test_few_rows_and_many_have_the_same_bits(fmt: str, threads: int) -> None:
    q, x, residual = checked(pack(stored(fmt))), torch.randn(100, 256), torch.randn(100, 64)
    many = prefill_gemm(x, q, residual=residual)
    assert_same_bits(many, matmul(x, q, residual=residual))
    for m in (1, 5, 16, MAX_ROWS):
        assert_same_bits(dequant_matmul(x[:m], q, residual=residual[:m]), many[:m])
    for r in (0, 16, 63, 64, 99):
        row = slice(r, r + 1)
        assert_same_bits(dequant_matmul(x[row], q, residual=residual[row]), many[row])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bias_then_residual_each_with_one_rounding(scheme: str) -> None:
    q, x = packed("f32", scheme), torch.randn(18, 256)
    bias, residual = torch.randn(64), torch.randn(18, 64)
    before = residual.clone()
    y = matmul(x, q)
    assert_same_bits(matmul(x, q, bias=bias), y + bias)
    assert_same_bits(matmul(x, q, residual=residual), y + residual)
    assert_same_bits(matmul(x, q, bias=bias, residual=residual), y + bias + residual)
    assert_same_bits(residual, before, "the residual itself")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_rows(scheme: str) -> None:
    for q in (packed("f32", scheme), replace(packed("f32", scheme), layout=f"cpu-{scheme}-rows")):
        for run in (matmul, dequant_matmul, prefill_gemm):
            y = run(torch.empty(0, 256), q, bias=torch.zeros(64), residual=torch.empty(0, 64), out_dtype=torch.bfloat16)
            assert (tuple(y.shape), y.dtype) == ((0, 64), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_dtype_is_one_rounding_more(dtype: torch.dtype) -> None:
    q, x, residual = packed("bf16"), torch.randn(9, 256), torch.randn(9, 64)
    y = matmul(x, q, residual=residual, out_dtype=dtype)
    assert_same_bits(y, matmul(x, q, residual=residual).to(dtype))


def test_inputs_stay_as_they_were() -> None:
    x = torch.randn(17, 256)
    before = x.clone()
    for scheme in SCHEMES:
        matmul(x, packed("f32", scheme), bias=torch.ones(64), residual=torch.ones(17, 64))
        assert_same_bits(x, before, scheme)


# ---- what follows a matmul ---------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("block", [64, 96, 7])
def test_swiglu_matmul(activation: str, block: int) -> None:
    gate, up = random_weight("f32", 96, 64, seed=4), random_weight("f32", 96, 64, seed=5)
    x = torch.randn(33, 64) / 8
    both = interleave_rows(gate, up, block)
    y = swiglu_matmul(x, checked(pack(both)), activation=activation, block=block)
    # gate and up each to 1e-6 of their size, and the activation's slope is below 1.13
    assert_close(y, swiglu_ref(matmul_ref(x, both), activation, block), 4e-6)
    plain = (
        torch.nn.functional.silu
        if activation == "silu"
        else functools.partial(torch.nn.functional.gelu, approximate="tanh")
    )
    assert_close(y, plain(matmul_ref(x, gate)) * matmul_ref(x, up), 4e-6)
    for r in (0, 16, 32):
        one = swiglu_matmul(x[r : r + 1], checked(pack(both)), activation=activation, block=block)
        assert_same_bits(one, y[r : r + 1])


def test_lm_head_argmax() -> None:
    q, x = packed("q8"), torch.randn(20, 256)
    ids = lm_head_argmax(x, q)
    assert ids.dtype == torch.int64
    assert ids.tolist() == argmax_ref(matmul(x, q)).tolist()
    near = matmul_ref(x, stored("q8"))
    # bfloat16 logits of size 16 are 1/16 apart
    assert (near.max(1).values - near.gather(1, ids[:, None]).flatten()).max() < 0.5
    assert [int(lm_head_argmax(row[None], q)) for row in x] == ids.tolist()


# ---- refusals ----------------------------------------------------------------------------------------


def bad_calls() -> list[tuple[str, str, Callable[[], dict[str, Any]]]]:
    def wide() -> Tensor:
        return torch.randn(3, 512)[:, ::2]

    return [
        ("x of another width", r"x must be contiguous float32 \[3, 256\], got torch.float32 \[3, 255\]",
         lambda: {"x": torch.randn(3, 255)}),
        ("x flat", r"x must be contiguous float32 \['M', 256\], got torch.float32 \[256\]",
         lambda: {"x": torch.randn(256)}),
        ("x in bfloat16", r"x must be .* got torch.bfloat16", lambda: {"x": torch.randn(3, 256).bfloat16()}),
        ("x in float64", r"x must be .* got torch.float64", lambda: {"x": torch.randn(3, 256).double()}),
        ("x strided", r"x must be contiguous .*not contiguous", lambda: {"x": wide()}),
        ("bias of another width", r"bias must be contiguous float32 \[64\], got torch.float32 \[63\]",
         lambda: {"bias": torch.zeros(63)}),
        ("bias of a batch", r"bias must be contiguous float32 \[64\]", lambda: {"bias": torch.zeros(3, 64)}),
        ("bias in float16", r"bias must be .* got torch.float16", lambda: {"bias": torch.zeros(64).half()}),
        ("residual of one row", r"residual must be contiguous float32 \[3, 64\], got torch.float32 \[1, 64\]",
         lambda: {"residual": torch.zeros(1, 64)}),
        ("residual transposed", r"residual must be .*not contiguous", lambda: {"residual": torch.zeros(64, 3).T}),
        ("x that requires grad", "requires grad", lambda: {"x": torch.randn(3, 256, requires_grad=True)}),
        ("bias that requires grad", "requires grad", lambda: {"bias": torch.zeros(64, requires_grad=True)}),
        ("residual that requires grad", "requires grad", lambda: {"residual": torch.zeros(3, 64, requires_grad=True)}),
        ("a weight not packed", r"weight \(64, 256\) is in layout 'rows'; pack it", lambda: {"w": stored("f32")}),
    ]  # fmt: skip


@pytest.mark.parametrize("run", [matmul, dequant_matmul, prefill_gemm])
@pytest.mark.parametrize(("what", "match", "make"), bad_calls(), ids=[what for what, _, _ in bad_calls()])
def test_refuses(what: str, match: str, make: Callable[[], dict[str, Any]], run: Callable[..., Tensor]) -> None:
    arguments = {"x": torch.randn(3, 256), "w": packed("f32"), **make()}
    with pytest.raises(ValueError, match=match):
        run(arguments.pop("x"), arguments.pop("w"), **arguments)


def test_grad_is_refused_only_where_it_would_be_recorded() -> None:
    x = torch.randn(3, 256, requires_grad=True)
    with torch.no_grad():
        assert_same_bits(matmul(x, packed("f32")), matmul(x.detach(), packed("f32")))


def test_dequant_matmul_takes_no_more_than_its_rows() -> None:
    with pytest.raises(ValueError, match="65 rows, expected at most 64; use matmul or prefill_gemm"):
        dequant_matmul(torch.randn(MAX_ROWS + 1, 256), packed("f32"))


def test_device_without_a_kernel() -> None:
    with pytest.raises(ValueError, match="no kernel for meta in this version"):
        matmul(torch.empty(3, 256, device="meta"), packed("f32"))
