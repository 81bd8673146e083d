"""Many rows times a packed or dense weight (prefill): the same bits a row as csrc_triton.qmatmul.

    y[m, :] = RN(RN32(x[m, :] . W^T + bias) + residual[m, :])

A program takes all K segments of its tile and folds them in order in registers. Very many rows may multiply a weight
that was written out once in the compute dtype (exact integers where the form has block scales): the same operands in
the same order. It is off (SCRATCH_ROWS) until a GPU shows that it pays.

Promise: row m equals dequant_matmul(x[m : m + 1]), bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from csrc_triton import launch, t64
from csrc_triton.dequant import cursor_at, load_planes, load_word, segment_range, segment_sum, store_tile
from csrc_triton.launch import jit, tl
from csrc_triton.operands import carve, check_matmul, kernel_constants, matmul_on_cpu, weight_args
from csrc_triton.quant import QTensor
from csrc_triton.t64 import COLS, ROWS, Form

# rows from which a quantised weight is written out once in the compute dtype. None: never; tools/roofline.py expects
# 128 x 128 tiles of 16-bit weights to wait for L2 (1.8 times as long at 8192 x 8192), and no GPU has been asked yet
SCRATCH_ROWS: int | None = None
GROUP = 8  # row tiles that walk along the weight together, so that it is read from L2


@jit(do_not_specialize=["M"])
def _prefill_gemm_kernel(
    x_ptr,  # [M, K]
    w,  # Weight
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N] or None
    y_ptr,  # [M, N]
    M,
    N,
    K,
    num_segments,
    x_stride,
    residual_stride,
    FORM: tl.constexpr,
    FOLD: tl.constexpr,  # more than one segment
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EVEN_K: tl.constexpr,
    JOIN: tl.constexpr,
    ARCH: tl.constexpr,
):
    """Grid: tiles, GROUP row tiles at a time. A program owns COLS columns of ROWS rows, all of K."""
    pid = tl.program_id(0)
    num_cols, num_rows = tl.cdiv(N, COLS), tl.cdiv(M, ROWS)
    start = pid // (GROUP * num_cols) * GROUP
    height = tl.minimum(num_rows - start, GROUP)
    within = pid % (GROUP * num_cols)
    tile = (within // height).to(tl.int64) * (COLS // 64)
    first_row = (start + within % height).to(tl.int64) * ROWS
    alive = tl.arange(0, ROWS) < M - first_row.to(tl.int32)
    at = cursor_at(w, tile, FORM, COLS)
    x_ptr += first_row * x_stride
    if FOLD:
        total = tl.zeros((COLS, ROWS), tl.float32)
        for s in range(0, num_segments):
            first, last = segment_range(s, w.num_blocks, num_segments)
            total += segment_sum(x_ptr, x_stride, alive, K, at, first, last, FORM, ROWS, COLS, EVEN_K, JOIN, ARCH)
    else:
        total = segment_sum(x_ptr, x_stride, alive, K, at, 0, w.num_blocks, FORM, ROWS, COLS, EVEN_K, JOIN, ARCH)
    store_tile(total, y_ptr, bias_ptr, residual_ptr, residual_stride, tile, first_row, alive, N, COLS, ROWS)


@jit
def _write_out_kernel(w, out_ptr, FORM: tl.constexpr, ARCH: tl.constexpr):
    """Grid: (column blocks, row tiles). out: [T * 64, B * 128], the operands of the MMA."""
    kb = tl.program_id(0)
    tile = tl.program_id(1).to(tl.int64)
    at = cursor_at(w, tile, FORM, 64)
    planes = load_planes(at, kb, 128, load_word(at, kb, FORM), FORM, out_ptr.dtype.element_ty, True, ARCH)
    WIDTH: tl.constexpr = planes[0].shape[1]
    stride = w.num_blocks * 128
    to = (tl.arange(0, 64) * stride)[:, None] + tl.arange(0, WIDTH)[None, :]
    out_ptr += tile * 64 * stride + kb * 128
    for j in tl.static_range(0, 128 // WIDTH):
        tl.store(out_ptr + j * WIDTH + to, planes[j])


def prefill_gemm(
    x: Tensor,
    w: QTensor | Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """x [M, K], any M, w [N, K] -> [M, N]; arguments as `dequant_matmul`'s.

    From SCRATCH_ROWS rows a quantised weight is written out once into `prefill_workspace_nbytes` bytes of scratch. A
    smaller workspace does without, with the same bits.
    """
    if not launch.runs_kernel(x):
        return matmul_on_cpu("prefill_gemm", x, w, bias, residual, out_dtype)
    x, w = check_matmul("prefill_gemm", x, w, bias, residual, out_dtype)
    return prefill(x, w, bias, residual, out_dtype or x.dtype, workspace)


def prefill(
    x: Tensor,
    w: QTensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    workspace: Tensor | None,
) -> Tensor:
    """`prefill_gemm` of checked arguments."""
    (m, k), n = x.shape, w.shape[0]
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    if m == 0:
        return y
    scratch = prefill_workspace_nbytes(m, w, x.dtype)
    if scratch and (workspace is None or workspace.nbytes >= scratch):
        w = written_out(w, x, workspace)
    form, args = _form(w), weight_args(w)
    arch, fold = launch.arch_of(x), w.segments > 1
    kernel = (
        "prefill-f32" if x.dtype == torch.float32 else f"{'dense' if form.bits == 0 else 'prefill'}{'-fold' * fold}"
    )
    tile = launch.tile_for(arch, kernel, form.name, n, k, m)
    grid = (-(-n // tile.cols) * -(-m // tile.rows),)
    _prefill_gemm_kernel[grid](
        x,
        args,
        bias,
        residual,
        y,
        m,
        n,
        k,
        w.segments,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        FOLD=fold,
        GROUP=GROUP,
        **kernel_constants(x, w, form, tile),
    )
    return y


def prefill_workspace_nbytes(m: int, w: QTensor, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of scratch that `prefill_gemm` of m rows can use; 0 where it uses none."""
    if SCRATCH_ROWS is None or m < SCRATCH_ROWS or w.layout not in ("t64", "t64-glu") or dtype == torch.float32:
        return 0
    tiles, blocks = w.parts["codes"].shape[:2]
    return tiles * ROWS * blocks * COLS * dtype.itemsize


def written_out_bytes(n: int, k: int, weight_nbytes: int, itemsize: int = 2) -> int:
    """Bytes that writing a weight out must move: it read as packed, whole tiles of numbers of so many bytes written."""
    return weight_nbytes + -(-n // ROWS) * ROWS * -(-k // COLS) * COLS * itemsize


def written_out(w: QTensor, x: Tensor, workspace: Tensor | None) -> QTensor:
    """The weight as the MMA reads it, dense in x's dtype, with its block scales where the form has them."""
    tiles, blocks = w.parts["codes"].shape[:2]
    form = t64.form_of(w)
    matrix = carve(workspace, (tiles * ROWS, blocks * COLS), x.dtype, x, "prefill_gemm")
    arch = launch.asm_arch(launch.arch_of(x))
    _write_out_kernel[(blocks, tiles)](weight_args(w), matrix, FORM=form, ARCH=arch, num_warps=4, **launch.OPTIONS)
    parts = {"weight": matrix}
    if form.scales == "block":
        parts["scale"] = w.parts["scale"]
    elif form.scales == "zero":
        parts["scale"] = w.parts["scale"].unsqueeze(-1).view(torch.float16)[..., 0].float()
    return replace(w, layout="rows", parts=parts)


def _form(w: QTensor) -> Form:
    if "weight" in w.parts:
        scale = w.parts.get("scale")
        return Form(0, "dense" if scale is None else "block", 0 if scale is None else int(scale.shape[1] > 1), False, 0)
    return t64.form_of(w)
