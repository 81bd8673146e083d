"""csrc_triton/qmatmul.py and qgemm.py: y = x @ W.T with what follows it, one row's bits at any count of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from checks import (
    ANY_THREADS,
    FORMATS,
    ROWS,
    SCHEMES,
    assert_close,
    assert_no_worse,
    assert_same_bits,
    fitting_k,
    kernel_weight,
    kind_of_weight,
    one_tile,
    random_weight,
    scattered,
    strided,
)
from interpreter import interpreted
from torch import Tensor

from csrc_triton import qmatmul
from csrc_triton.cpu import checked, pack
from csrc_triton.fused import argmax_ref, new_rows, rmsnorm, swiglu, swiglu_ref
from csrc_triton.launch import kernels_on_cpu
from csrc_triton.qgemm import prefill_gemm
from csrc_triton.qmatmul import (
    MAX_ROWS,
    dequant_matmul,
    lm_head_argmax,
    matmul,
    matmul_ref,
    matmul_rmsnorm,
    matmul_workspace_nbytes,
    swiglu_matmul,
)
from csrc_triton.quant import QTensor, dense, interleave_rows, quantize
from csrc_triton.t64 import dequantize_t64, pack_gate_up, pack_t64

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
        ("bias elsewhere", r"bias must be .* \[64\] on meta", lambda: {"bias": torch.zeros(64, device="meta")}),
        ("a weight elsewhere", "x is on cpu and the weight on meta",
         lambda: {"w": torch.empty(64, 256, device="meta")}),
        ("out_dtype of integers", "out_dtype must be bfloat16, float16 or float32, got torch.int8",
         lambda: {"out_dtype": torch.int8}),
        ("a weight not packed", r"weight \(64, 256\) is in layout 'rows'; pack it", lambda: {"w": stored("f32")}),
    ]  # fmt: skip


@pytest.mark.parametrize("run", [matmul, dequant_matmul, prefill_gemm])
@pytest.mark.parametrize(("what", "match", "make"), bad_calls(), ids=[what for what, _, _ in bad_calls()])
def test_refuses(what: str, match: str, make: Callable[[], dict[str, Any]], run: Callable[..., Tensor]) -> None:
    arguments = {"x": torch.randn(3, 256), "w": packed("f32"), **make()}
    with pytest.raises(ValueError, match=match):
        run(arguments.pop("x"), arguments.pop("w"), **arguments)


def test_swiglu_matmul_refuses_on_a_cpu_what_it_refuses_on_a_gpu() -> None:
    x, w = torch.randn(3, 256), packed("f32")
    with pytest.raises(ValueError, match="activation must be 'silu' or 'gelu_tanh', got 'relu'"):
        swiglu_matmul(x, w, activation="relu")
    with pytest.raises(ValueError, match=r"weight \[64, 256\] in blocks of 0: expected \[2F, K\] and at least 1"):
        swiglu_matmul(x, w, block=0)
    with pytest.raises(ValueError, match=r"weight \[3, 256\] in blocks of 64: expected \[2F, K\]"):
        swiglu_matmul(x, dense(torch.randn(3, 256)))


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


# ---- kernels: gate and up ----------------------------------------------------------------------------
# values and bits of a plain matmul are in test_qgemm.py


def gate_and_up(kind: str, f: int, k: int, segments: int) -> tuple[QTensor, list[QTensor]]:
    """Packed together, and each alone with the same segments."""
    halves = [kind_of_weight(kind, f, k, seed) for seed in (1, 2)]
    return replace(pack_gate_up(*halves), segments=segments), [replace(pack_t64(q), segments=segments) for q in halves]


def swiglu_of_parts(x: Tensor, halves: list[QTensor], activation: str) -> Tensor:
    """Two matmuls, then the kernel that swiglu is."""
    f = halves[0].shape[0]
    gate_up = new_rows((x.shape[0], 2 * f), x.dtype, x.device)
    gate_up[:, :f], gate_up[:, f:] = (matmul(x, half) for half in halves)
    return swiglu(gate_up, activation, f)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("kind", "dtype", "arch", "activation", "f", "m", "segments"),
    [
        ("q4_0", torch.bfloat16, 90, "silu", 64, 17, 1),
        ("q4/128", torch.float16, 80, "gelu_tanh", 70, 5, 1),
        ("q6_k", torch.bfloat16, 80, "silu", 1, 3, 1),
        ("q4/128 zero", torch.bfloat16, 90, "gelu_tanh", 70, 3, 2),
        ("q8/row", torch.float16, 90, "silu", 100, 2, 3),
        ("q4/32 bias", torch.float32, 90, "silu", 70, 2, 1),
        ("q4_k", torch.float32, 80, "gelu_tanh", 64, 3, 2),
        ("q4/128", torch.bfloat16, 90, "silu", 70, 65, 2),
    ],
)
def test_swiglu_matmul_is_matmul_then_swiglu(
    kind: str, dtype: torch.dtype, arch: int, activation: str, f: int, m: int, segments: int
) -> None:
    k = fitting_k(kind, 128 * segments)
    both, halves = gate_and_up(kind, f, k, segments)
    x = strided((torch.randn(m, k) / 8).to(dtype))
    workspace = torch.full((matmul_workspace_nbytes(m, both, dtype),), 255, dtype=torch.uint8)
    tile = one_tile(16 if m < 17 else 64, 128)
    with interpreted(arch, sequential_dot=True), tile, np.errstate(all="ignore"):
        y = swiglu_matmul(x, both, activation=activation)
        assert (tuple(y.shape), y.dtype) == ((m, f), dtype)
        assert_same_bits(y, swiglu_of_parts(x, halves, activation))
        assert_same_bits(swiglu_matmul(x, both, activation=activation, workspace=workspace), y)
        assert_same_bits(swiglu_matmul(x[m - 1 :], both, activation=activation), y[m - 1 :], "the last row alone")
    gate, up = dequantize_t64(both).split(f)
    exact, plain = (
        swiglu_ref(torch.cat((x.to(t) @ gate.to(t).T, x.to(t) @ up.to(t).T), 1), activation, f)
        for t in (torch.float64, dtype)
    )
    assert_no_worse(y, exact, plain.to(dtype), 2 * torch.finfo(dtype).eps * exact.abs().max().item())


def test_gate_and_up_have_a_warp_group_whatever_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two warps wgmma would give way to another MMA, whose sums have another order."""
    seen, constants = [], qmatmul.kernel_constants

    def noted(x: Tensor, w: QTensor, form: Any, tile: Any) -> dict[str, Any]:
        seen.append(tile)
        return constants(x, w, form, tile)

    monkeypatch.setattr(qmatmul, "kernel_constants", noted)
    both, _ = gate_and_up("q4/128", 64, 128, 1)
    for cols, warps in ((64, 8), (128, 4), (256, 4)):
        with interpreted(), one_tile(16, cols):
            swiglu_matmul(torch.zeros(1, 128).bfloat16(), both)
        assert (seen[-1].cols, seen[-1].warps) == (128, warps)


def test_swiglu_matmul_keeps_the_sign_of_zero() -> None:
    """A product too small for float32 is -0.0, and one segment is never added to 0.0."""
    gate, up = torch.zeros(64, 128), torch.zeros(64, 128)
    gate[:, 0], up[:, 1] = 1e-30, 1.0
    both = replace(pack_gate_up(quantize(gate, "q4"), quantize(up, "q4")), segments=1)
    x = torch.zeros(MAX_ROWS + 1, 128)
    x[:, 0], x[:, 1] = -1e-30, 1.0
    with interpreted():
        y = swiglu_matmul(x, both)
        assert y[0, 0] == 0 and y[0, 0].signbit()
        assert_same_bits(swiglu_matmul(x[:1], both), y[:1])


def test_swiglu_matmul_of_no_rows_and_its_refusals() -> None:
    both, halves = gate_and_up("q4/128", 70, 128, 1)
    x = torch.randn(3, 128).bfloat16()
    with interpreted():
        assert swiglu_matmul(x[:0], both).shape == (0, 70)
        for call, message in (
            (lambda: swiglu_matmul(x, halves[0]), "in layout 't64', expected 't64-glu'; pack gate and up with"),
            (lambda: swiglu_matmul(x, dense(torch.randn(4, 128))), "in layout 'rows', expected 't64-glu'"),
            (lambda: swiglu_matmul(x, both, activation="relu"), "activation must be 'silu' or 'gelu_tanh', got 'relu'"),
            (lambda: swiglu_matmul(x[:, :64], both), r"swiglu_matmul: x must be \[M, 128\]"),
            (lambda: matmul(x, both), "matmul: weight q4 .* is in layout 't64-glu', expected 't64'"),
        ):
            with pytest.raises(ValueError, match=message):
                call()


# ---- kernels: the largest logit ----------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("kind", "dtype", "vocab", "m", "segments", "cols"),
    [
        ("q8/row", torch.bfloat16, 200, 3, 1, 64),
        ("q6_k", torch.float16, 131, 17, 1, 128),
        ("q4_0", torch.float32, 67, 2, 1, 64),
        ("dense", torch.bfloat16, 130, 3, 1, 64),
        ("q4/128", torch.bfloat16, 67, 3, 2, 128),
        ("q4/64 perm", torch.bfloat16, 66, 3, 2, 128),
        ("q8/128 perm", torch.bfloat16, 66, 3, 1, 128),
        ("q4_1", torch.float16, 65, 70, 1, 128),
    ],
)
def test_lm_head_argmax_is_the_argmax_of_the_logits(
    kind: str, dtype: torch.dtype, vocab: int, m: int, segments: int, cols: int
) -> None:
    w = kernel_weight(kind, vocab, fitting_k(kind, 128 * segments), dtype, segments=segments)
    x = strided(torch.randn(m, w.shape[1]).to(dtype))
    x[1, 7] = float("nan")
    with interpreted(90, sequential_dot=True), one_tile(32 if m < 33 else 128, cols):
        ids, logits = lm_head_argmax(x, w), matmul(x, w, out_dtype=torch.float32)
        assert ids.dtype == torch.int64 and ids.tolist() == argmax_ref(logits).tolist()
        assert ids[1] == -1 and len(set(ids.tolist())) > 1
        assert lm_head_argmax(x[2 : m - 1 or None], w).tolist() == ids[2 : m - 1 or None].tolist()
    assert lm_head_of_zero_rows(x, w) == []


def lm_head_of_zero_rows(x: Tensor, w: QTensor) -> list[int]:
    with interpreted():
        return lm_head_argmax(x[:0], w).tolist()


@pytest.mark.parametrize("segments", [1, 2])
def test_ties_go_to_the_lowest_id(segments: int) -> None:
    """Equal rows of the weight in one tile and in others; all logits equal; infinities; NaN beside them."""
    rows = torch.randn(200, 256).sign()
    rows[[3, 70, 71, 150]] = rows[[199, 3, 3, 3]]
    rows[3] = rows[70] = rows[71] = rows[150] = rows[199].clone()
    q = replace(pack_t64(quantize(rows, "q8", None)), segments=segments)
    x = torch.stack((rows[3], torch.zeros(256), rows[100], -rows[199])).bfloat16()
    weight = torch.zeros(130, 128)
    weight[[40, 90, 129], 0] = 1e38
    weight[[10, 80], 1] = 1e38
    w = replace(dense(weight), segments=1)
    big = torch.zeros(5, 128)
    big[0, 0] = big[1, 1] = big[2, 0] = 1e10  # +inf at 40, 90, 129 and at 10, 80
    big[3, 0] = -1e10  # -inf there, 0 elsewhere
    big[4] = float("-inf")  # all NaN or -inf
    with interpreted(90, sequential_dot=True), np.errstate(all="ignore"), one_tile(16, 64):
        assert lm_head_argmax(x, q).tolist() == [
            3,
            0,
            100,
            *argmax_ref(matmul(x[3:], q, out_dtype=torch.float32)).tolist(),
        ]
        assert lm_head_argmax(big, w).tolist() == [40, 10, 40, 0, -1]


def test_tiles_of_a_vocabulary_larger_than_a_block() -> None:
    """2,500 tiles, 1,024 at a time: ties among tiles of different blocks, a NaN in the last, nothing but -inf."""
    values, ids = torch.zeros(4, 2500), torch.arange(2500).mul(64).int().repeat(4, 1)
    values[0, [700, 1724, 2499]] = 5.0
    values[1, [2400, 1376, 352]] = 5.0
    values[2, 2499], ids[2, 2499] = float("inf"), -1
    values[3] = float("-inf")
    top = torch.stack((values.T, ids.view(torch.float32).T)).contiguous()
    found = torch.full((4,), -7)
    with interpreted():
        qmatmul._top_kernel[(4,)](top, found, 4, 2500, BLOCK=1024)
    assert found.tolist() == [700 * 64, 352 * 64, -1, 0]


# ---- kernels: scratch and refusals -------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("run", [matmul, dequant_matmul])
def test_a_workspace_is_used_and_never_read(run: Callable[..., Tensor]) -> None:
    w, x = kernel_weight("q4_0", 70, 256, torch.bfloat16, segments=2), scattered(5, 256, torch.bfloat16)
    need = matmul_workspace_nbytes(5, w)
    assert need == 4 * 2 * 5 * 70 and matmul_workspace_nbytes(5, replace(w, segments=1)) == 0
    space = torch.full((need + 64,), 255, dtype=torch.uint8)
    with interpreted(sequential_dot=True), one_tile(16, 128):
        y = run(x, w)
        assert_same_bits(run(x, w, workspace=space), y)
        assert (space[need:] == 255).all() and (space[:need].view(torch.float32).isfinite()).all()
        assert_same_bits(run(x, w, workspace=space[16 : need + 16].unflatten(0, (2, -1))), y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda need: torch.empty(need - 1, dtype=torch.uint8), "workspace must be 2800 bytes, 16-byte .* got 2799"),
        (
            lambda need: torch.empty(need, dtype=torch.float32),
            "workspace must be contiguous uint8 on cpu, got .*float32",
        ),
        (lambda need: torch.empty(need + 1, dtype=torch.uint8)[1:], "16-byte aligned"),
        (lambda need: torch.empty(2 * need, dtype=torch.uint8)[::2], "workspace must be contiguous"),
        (lambda need: torch.empty(need, dtype=torch.uint8, device="meta"), "uint8 on cpu"),
    ],
)
def test_a_workspace_that_does_not_fit_is_refused(make: Callable[[int], Tensor], message: str) -> None:
    w, x = kernel_weight("q4_0", 70, 256, torch.bfloat16, segments=2), torch.randn(5, 256).bfloat16()
    with kernels_on_cpu(90), pytest.raises(ValueError, match=message):
        dequant_matmul(x, w, workspace=make(4 * 2 * 5 * 70))


def bad_kernel_calls() -> list[tuple[str, dict[str, Any]]]:
    x = torch.randn(3, 256).bfloat16()
    meta = torch.device("meta")
    return [
        (r"x must be \[M, 256\] in bfloat16, float16 or float32 .*, got \[3, 255\]", {"x": x[:, 1:]}),
        (r"x must be .* got \[256\] torch.bfloat16 with strides \[1\]", {"x": x[0]}),
        (r"x must be .* got \[1, 3, 256\]", {"x": x[None]}),
        (r"x must be .* got \[3, 256\] torch.float64", {"x": x.double()}),
        (r"x must be .* torch.int8", {"x": x.to(torch.int8)}),
        (r"x must be .* with contiguous rows, got \[3, 256\] torch.bfloat16 with strides \[1, 3\]",
         {"x": x.T.contiguous().T}),
        (r"x must be .* with strides \[512, 2\]", {"x": torch.randn(3, 512).bfloat16()[:, ::2]}),
        ("requires grad", {"x": x.clone().requires_grad_()}),
        ("requires grad", {"bias": torch.zeros(64, requires_grad=True)}),
        ("requires grad", {"residual": torch.zeros(3, 64, requires_grad=True)}),
        (r"weight torch.*requires grad|weight \(64, 256\) requires grad",
         {"w": torch.randn(64, 256).bfloat16().requires_grad_()}),
        ("x is on meta and the weight on cpu", {"x": x.to(meta)}),
        (r"bias must be \[64\] on cpu .* got \[63\] torch.float32 on cpu", {"bias": torch.zeros(63)}),
        (r"bias must be \[64\] .* got \[1, 64\]", {"bias": torch.zeros(1, 64)}),
        (r"bias must be .* torch.float64", {"bias": torch.zeros(64).double()}),
        (r"bias must be .* with strides \[2\]", {"bias": torch.zeros(128)[::2]}),
        (r"bias must be .* on meta", {"bias": torch.zeros(64, device=meta)}),
        (r"residual must be \[3, 64\] on cpu .* got \[1, 64\]", {"residual": torch.zeros(1, 64)}),
        (r"residual must be .* with strides \[1, 3\]", {"residual": torch.zeros(64, 3).T}),
        (r"residual must be .* torch.int32", {"residual": torch.zeros(3, 64).int()}),
        ("out_dtype must be bfloat16, float16 or float32, got torch.float64", {"out_dtype": torch.float64}),
        (r"weight q4_0 \[64, 256\] is in layout 'rows', expected 't64'; use csrc_triton.pack",
         {"w": kind_of_weight("q4_0", 64, 256)}),
        ("is in layout 'cpu-i8', expected 't64'", {"w": pack(kind_of_weight("q8/row", 64, 256))}),
        (r"dense weight must be torch.bfloat16 like x, .* got torch.float32", {"w": torch.zeros(64, 256)}),
        (r"dense weight must be .* with strides \[1, 64\]", {"w": torch.zeros(256, 64).bfloat16().T}),
        (r"torch.float64: expected one of", {"w": torch.zeros(64, 256).double()}),
    ]  # fmt: skip


@pytest.mark.parametrize("run", [matmul, dequant_matmul, prefill_gemm])
@pytest.mark.parametrize("number", range(len(bad_kernel_calls())))
def test_kernels_refuse(number: int, run: Callable[..., Tensor]) -> None:
    message, wrong = bad_kernel_calls()[number]
    arguments = {"x": torch.randn(3, 256).bfloat16(), "w": kernel_weight("q4_0", 64, 256, torch.bfloat16), **wrong}
    with kernels_on_cpu(90), pytest.raises(ValueError, match=message):
        run(arguments.pop("x"), arguments.pop("w"), **arguments)


def test_kernels_refuse_by_name_and_count() -> None:
    w = kernel_weight("q4_0", 64, 256, torch.bfloat16)
    with kernels_on_cpu(90):
        for name, call in (("matmul", matmul), ("prefill_gemm", prefill_gemm), ("lm_head_argmax", lm_head_argmax)):
            with pytest.raises(ValueError, match=f"^{name}: x must be"):
                call(torch.randn(3, 255), w)
        with pytest.raises(ValueError, match="65 rows, expected at most 64; use matmul or prefill_gemm"):
            dequant_matmul(torch.empty(65, 256).bfloat16(), w)


def test_grad_is_refused_by_kernels_only_where_it_would_be_recorded() -> None:
    w, x = kernel_weight("q4_0", 64, 128, torch.bfloat16), torch.randn(2, 128).bfloat16().requires_grad_()
    with interpreted(), torch.no_grad():
        assert_same_bits(matmul(x, w), matmul(x.detach(), w))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("kind", "n", "m", "segments"),
    [("q4_0", 70, 3, 2), ("dense", 65, 5, 2), ("q8/row", 64, 2, 1), ("q4/128", 67, 65, 2)],
)
def test_matmul_rmsnorm_is_matmul_then_rmsnorm(kind: str, n: int, m: int, segments: int) -> None:
    w, x = kernel_weight(kind, n, 256, torch.bfloat16, segments=segments), scattered(m, 256, torch.bfloat16)
    weight, bias, residual = torch.randn(n).bfloat16(), torch.randn(n), strided(torch.randn(m, n).bfloat16())
    with interpreted(sequential_dot=True), one_tile(64, 128):
        y, normed = matmul_rmsnorm(x, w, weight, 1e-5, bias=bias, residual=residual)
        plain = matmul(x, w, bias=bias, residual=residual)
        assert_same_bits(y, plain)
        assert_same_bits(normed, rmsnorm(new_rows((m, n), torch.bfloat16, "cpu").copy_(plain), weight, 1e-5))
        one = matmul_rmsnorm(x[1:2], w, weight, 1e-5, bias=bias, residual=residual[1:2])
        assert_same_bits(one[1], normed[1:2])


@pytest.mark.parametrize(
    ("weight", "got"),
    [
        (torch.ones(63), r"torch.float32 \[63\] on cpu"),
        (torch.ones(64, 2)[:, 0], r"torch.float32 \[64\] on cpu"),
        (torch.ones(64, dtype=torch.int32), r"torch.int32 \[64\] on cpu"),
        (torch.ones(64, device="meta"), r"torch.float32 \[64\] on meta"),
    ],
)
def test_matmul_rmsnorm_refuses_a_norm_that_a_kernel_would_misread(weight: Tensor, got: str) -> None:
    w, x = kernel_weight("q4/128", 64, 256, torch.bfloat16, segments=2), torch.zeros(2, 256).bfloat16()
    with interpreted(), pytest.raises(ValueError, match=rf"must be contiguous floats \[64\] on cpu, got {got}"):
        matmul_rmsnorm(x, w, weight, 1e-5)
