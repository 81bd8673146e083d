"""Eight-bit weights times eight-bit activations: integer sums, exact in any order.

    y[m, n] = RN(RN32(sum_k a[m, k] b[n, k]) s[m] t[n] + bias[n]) + residual[m, n])

a, s = `quantize_rows(x)`: one scale a row of x. b, t: a "q8" weight of one scale a row, packed as "t64-int8".
Memory: sums are int32, which 127 * 127 * K fits up to K = 133,152.

Promise: row m depends on row m of x alone, whatever the tiles, the segments or the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csrc_triton import launch, t64
from csrc_triton.dequant import finish, segment_range
from csrc_triton.fused import quantize_rows
from csrc_triton.launch import jit, tl
from csrc_triton.operands import carve, check_matmul, matmul_on_cpu
from csrc_triton.quant import QTensor

MAX_COLUMNS = (2**31 - 1) // 127**2
SPLIT_ROWS = 64  # up to here the segments run in programs of their own
FOLD_COLS = 256  # columns of one program of the fold


@jit
def _rescale(total, row_scale, col_scale):
    """Two roundings after the conversion's, in this order."""
    return total.to(tl.float32) * row_scale * col_scale


@jit(do_not_specialize=["M"])
def _w8a8_kernel(
    a_ptr,  # [M, K] int8
    a_scale_ptr,  # [M] float32
    b_ptr,  # [T, B, 64, 128] int8
    b_scale_ptr,  # [T, 1, 64] float32
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N] or None
    y_ptr,  # [M, N]; partial sums [S, M, N] int32 where SPLIT
    M,
    N,
    K,
    num_tiles,
    num_blocks,
    num_segments,
    a_stride,
    residual_stride,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Grid: (column tiles, row tiles, segments, or 1). A program owns COLS columns of ROWS rows of a segment."""
    tile = tl.program_id(0).to(tl.int64) * (COLS // 64)
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    segment = tl.program_id(2)
    first, last = segment_range(segment, num_blocks, num_segments if SPLIT else 1)
    n, m, k = tl.arange(0, COLS), tl.arange(0, ROWS), tl.arange(0, 128)
    alive = m < M - first_row.to(tl.int32)
    there = n < N - tile.to(tl.int32) * 64
    row_tile = tl.minimum(n // 64, num_tiles - 1 - tile.to(tl.int32))
    b_at = (row_tile * num_blocks * 8192 + n % 64 * 128)[:, None] + k[None, :]
    b_ptr += tile * num_blocks * 8192
    a_at = (m * a_stride)[None, :] + k[:, None]
    a_ptr += first_row * a_stride
    total = tl.zeros((COLS, ROWS), tl.int32)
    for kb in range(first, last):
        b = tl.load(b_ptr + kb * 8192 + b_at, eviction_policy="evict_first")
        mask = alive[None, :] if EVEN_K else alive[None, :] & (k < K - kb * 128)[:, None]
        a = tl.load(a_ptr + kb * 128 + a_at, mask=mask, other=0)
        total = tl.dot(b, a, total, out_dtype=tl.int32)
    mask = there[:, None] & alive[None, :]
    at = first_row * N + tile * 64 + ((m * N)[None, :] + n[:, None])
    if SPLIT:
        tl.store(y_ptr + segment.to(tl.int64) * M * N + at, total, mask=mask)
    else:
        col_scale = tl.load(b_scale_ptr + tile * 64 + row_tile * 64 + n % 64)
        row_scale = tl.load(a_scale_ptr + first_row + m, mask=alive, other=0.0)
        y = _rescale(total, row_scale[None, :], col_scale[:, None])
        if bias_ptr is not None:
            bias_ptr += tile * 64
        if residual_ptr is not None:
            residual_ptr += first_row * residual_stride + tile * 64
        columns = tl.broadcast_to(n[:, None], (COLS, ROWS))
        y = finish(y, bias_ptr, residual_ptr, columns, (m * residual_stride)[None, :] + n[:, None], mask)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["M"])
def _fold_int_kernel(
    partial_ptr,  # [S, M, N] int32
    a_scale_ptr,  # [M] float32
    b_scale_ptr,  # [N or more] float32
    bias_ptr,
    residual_ptr,
    y_ptr,  # [M, N]
    M,
    N,
    num_segments,
    residual_stride,
    BLOCK: tl.constexpr,
):
    """Grid: (column blocks, rows)."""
    m = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    total = tl.zeros((BLOCK,), tl.int32)
    step = M.to(tl.int64) * N
    for s in range(0, num_segments):
        total += tl.load(partial_ptr + s * step + m * N + n, mask=mask, other=0)
    y = _rescale(total, tl.load(a_scale_ptr + m), tl.load(b_scale_ptr + n, mask=mask, other=0.0))
    if residual_ptr is not None:
        residual_ptr += m * residual_stride
    y = finish(y, bias_ptr, residual_ptr, n, n, mask)
    tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=mask)


def w8a8_matmul(
    x: Tensor,
    w: QTensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """x [M, K], any M, w [N, K] packed with scheme "w8a8" -> [M, N] in out_dtype (x's dtype by default).

    Arguments as `dequant_matmul`'s; on a GPU rows of x start at multiples of 16 bytes. ValueError for anything else,
    and for K above 133,152.
    """
    if not launch.runs_kernel(x):
        if w.layout not in ("cpu-w8a8", "cpu-w8a8-rows"):
            raise ValueError(f"w8a8_matmul: weight {list(w.shape)} is in layout {w.layout!r}; pack it with 'w8a8'")
        return matmul_on_cpu("w8a8_matmul", x, w, bias, residual, out_dtype)
    x, w = check_matmul("w8a8_matmul", x, w, bias, residual, out_dtype, layout="t64-int8")
    (m, k), n = x.shape, w.shape[0]
    if k > MAX_COLUMNS:
        raise ValueError(
            f"w8a8_matmul: weight {list(w.shape)}: sums of more than {MAX_COLUMNS} products overflow int32"
        )
    y = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    if m == 0:
        return y
    codes, scale = quantize_rows(x)
    split = w.segments > 1 and m <= SPLIT_ROWS
    sums = carve(workspace, (w.segments, m, n), torch.int32, x, "w8a8_matmul") if split else y
    tile = launch.tile_for(launch.arch_of(x), "w8a8", "int8", n, k, m)
    tiles, blocks = w.parts["codes"].shape[:2]
    stride = 0 if residual is None else residual.stride(0)
    _w8a8_kernel[(-(-n // tile.cols), -(-m // tile.rows), w.segments if split else 1)](
        codes,
        scale,
        w.parts["codes"],
        w.parts["scale"],
        None if split else bias,
        None if split else residual,
        sums,
        m,
        n,
        k,
        tiles,
        blocks,
        w.segments,
        codes.stride(0),
        stride,
        SPLIT=split,
        ROWS=tile.rows,
        COLS=tile.cols,
        EVEN_K=k % t64.COLS == 0,
        **tile.options,
    )
    if split:
        _fold_int_kernel[(-(-n // FOLD_COLS), m)](
            sums,
            scale,
            w.parts["scale"],
            bias,
            residual,
            y,
            m,
            n,
            w.segments,
            stride,
            BLOCK=FOLD_COLS,
            num_warps=4,
            **launch.OPTIONS,
        )
    return y


def w8a8_workspace_nbytes(m: int, w: QTensor) -> int:
    """Bytes of scratch that `w8a8_matmul` of m rows takes on a GPU."""
    return 4 * w.segments * m * w.shape[0] if w.segments > 1 and m <= SPLIT_ROWS else 0


def w8a8_matmul_bytes(m: int, n: int, k: int, weight_nbytes: int, y_itemsize: int = 2) -> int:
    """Bytes that the product must move: the weight as packed, codes and scales of x, y; see `quantize_rows_bytes`."""
    return weight_nbytes + m * (k + 4) + m * n * y_itemsize


def w8a8_matmul_ref(x: Tensor, w: QTensor) -> Tensor:
    """The definition in float64, on a packed or stored weight, from the rounded activations."""
    codes, scale = quantize_rows(x.float() if not launch.runs_kernel(x) else x)
    values = t64.dequantize_t64(w) if w.layout == "t64-int8" else w.parts["codes"].double() * w.parts["scale"].double()
    return codes.double() * scale.double()[:, None] @ values.double().T
