"""Few rows times a weight (decode, verify), with what follows fused into it.

    y[m, :] = RN(RN32(x[m, :] . W^T + bias) + residual[m, :])

Memory: x, y and residual are rows; the weight is a QTensor packed for its device (`csrc_triton.pack`), or a dense
matrix. On a GPU a program takes 64 or 128 rows of the weight through one of its K segments (the weight tile is
the A operand of the MMA, tokens ride on N), writes float32 partial sums, and a second kernel adds the segments in
order and finishes. The order of every sum is the weight's (`dequant.segment_sum`, `QTensor.segments`).

Promise: row m of y equals the call on x[m : m + 1] alone, bit for bit, whatever M, and `prefill_gemm`'s row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from csrc_triton import cpu, launch, t64
from csrc_triton.dequant import cursor_at, finish, segment_range, segment_sum, store_tile
from csrc_triton.fused import (
    ACTIVATIONS,
    MAX_CHUNK,
    argmax,
    chunk_of,
    gated,
    inverse_rms,
    new_rows,
    rmsnorm,
    rmsnorm_bytes,
    row_at,
    row_options,
    store_norm,
    swiglu,
    units,
)
from csrc_triton.launch import Tile, jit, tl
from csrc_triton.operands import FLOATS, carve, check_matmul, kernel_constants, matmul_on_cpu, weight_args
from csrc_triton.qgemm import prefill, prefill_workspace_nbytes
from csrc_triton.quant import QTensor, dense, dequantize
from csrc_triton.t64 import ROWS
from csrc_triton.w8a8 import w8a8_matmul

MAX_ROWS = 64  # decode and verify panels; more rows are prefill_gemm's
REDUCE_COLS = 256  # columns of one program of the reduction


# ---- kernels -----------------------------------------------------------------------------------------


@jit(do_not_specialize=["M"])
def _dequant_matmul_kernel(
    x_ptr,  # [M, K]
    w,  # Weight
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N] or None
    y_ptr,  # [M, N]; partial sums [S, M, N] float32; "gated" [M, N / 2]; "top" [2, T, M]: values, ids
    M,
    N,
    K,
    num_segments,
    x_stride,
    residual_stride,
    FORM: tl.constexpr,
    OUT: tl.constexpr,  # "rows", "partial", "gated", "top"
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EVEN_K: tl.constexpr,
    JOIN: tl.constexpr,
    ARCH: tl.constexpr,
):
    """Grid: (column tiles, row tiles, segments). A program owns COLS columns of ROWS rows through one segment."""
    tile = tl.program_id(0).to(tl.int64) * (COLS // 64)
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    segment = tl.program_id(2)
    alive = tl.arange(0, ROWS) < M - first_row.to(tl.int32)
    at = cursor_at(w, tile, FORM, COLS)
    first, last = segment_range(segment, w.num_blocks, num_segments)
    x_ptr += first_row * x_stride
    total = segment_sum(x_ptr, x_stride, alive, K, at, first, last, FORM, ROWS, COLS, EVEN_K, JOIN, ARCH)
    if OUT == "rows":
        store_tile(total, y_ptr, bias_ptr, residual_ptr, residual_stride, tile, first_row, alive, N, COLS, ROWS)
    elif OUT == "partial":
        y_ptr += segment.to(tl.int64) * M * N
        store_tile(total, y_ptr, None, None, 0, tile, first_row, alive, N, COLS, ROWS)
    elif OUT == "gated":
        _store_gated(total, x_ptr.dtype.element_ty, y_ptr, tile, first_row, alive, N // 2, ACTIVATION, ROWS)
    else:
        _store_top(total, y_ptr, tile, first_row, alive, M, N, w.num_tiles, COLS, ROWS)


@jit
def _store_gated(
    total, DTYPE: tl.constexpr, y_ptr, tile, first_row, alive, F, ACTIVATION: tl.constexpr, ROWS: tl.constexpr
):
    """A tile of gate above its tile of up, [128, ROWS] -> act(gate) * up; both are read as rounded."""
    gate, up = tl.split(total.to(DTYPE).reshape(2, 64, ROWS).permute(1, 2, 0))
    y = gated(gate.to(tl.float32), up.to(tl.float32), ACTIVATION)
    f, m = tl.arange(0, 64), tl.arange(0, ROWS)
    start = tile // 2 * 64
    mask = (f < F - start.to(tl.int32))[:, None] & alive[None, :]
    out = y_ptr + first_row * F + start + ((m * F)[None, :] + f[:, None])
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _store_top(total, y_ptr, tile, first_row, alive, M, N, num_tiles, COLS: tl.constexpr, ROWS: tl.constexpr):
    """The largest logit of each row's tile and the lowest id that has it; a NaN counts as infinity with id -1."""
    n, m = tl.arange(0, COLS), tl.arange(0, ROWS)
    ids = tl.broadcast_to((tile.to(tl.int32) * 64 + n)[:, None], (COLS, ROWS))
    bad = total != total
    value = tl.where(ids < N, tl.where(bad, float("inf"), total), float("-inf"))
    ids = tl.where(ids < N, tl.where(bad, -1, ids), 2147483647)
    best = tl.max(value, axis=0)
    first = tl.min(tl.where(value == best[None, :], ids, 2147483647), axis=0)
    out = y_ptr + tile // (COLS // 64) * M + first_row + m
    size = (num_tiles + COLS // 64 - 1) // (COLS // 64) * M
    tl.store(out, best, mask=alive)
    tl.store(out + size, first.to(tl.float32, bitcast=True), mask=alive)


@jit(do_not_specialize=["M", "num_tiles"])
def _top_kernel(top_ptr, ids_ptr, M, num_tiles, BLOCK: tl.constexpr):
    """Grid: rows. top [2, tiles, M] -> the lowest id of the largest value, -1 where the row has a NaN."""
    m = tl.program_id(0)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, num_tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        mask = t < num_tiles
        value = tl.load(top_ptr + t * M + m, mask=mask, other=float("-inf"))
        id_ = tl.load(top_ptr + (num_tiles + t) * M + m, mask=mask, other=0.0).to(tl.int32, bitcast=True)
        id_ = tl.where(mask, id_, 2147483647)
        ids = tl.where(value > best, id_, tl.where(value == best, tl.minimum(id_, ids), ids))
        best = tl.maximum(value, best)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, ids, 2147483647), axis=0)
    tl.store(ids_ptr + m, first.to(tl.int64))


@jit(do_not_specialize=["M"])
def _fold_kernel(
    partial_ptr,  # [S, M, N] float32
    bias_ptr,
    residual_ptr,
    y_ptr,  # [M, N]; "gated" [M, F]
    M,
    N,
    F,
    num_segments,
    residual_stride,
    DTYPE: tl.constexpr,  # in which gate and up are rounded
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (column blocks, rows). Adds the segments in order, then finishes."""
    m = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if OUT == "rows":
        mask = n < N
        total = _folded(partial_ptr + m * N + n, mask, M, N, num_segments, BLOCK)
        if residual_ptr is not None:
            residual_ptr += m * residual_stride
        y = finish(total, bias_ptr, residual_ptr, n, n, mask)
        tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        mask = n < F
        gate = partial_ptr + m * N + n // 64 * 128 + n % 64
        a = _folded(gate, mask, M, N, num_segments, BLOCK).to(DTYPE)
        b = _folded(gate + 64, mask, M, N, num_segments, BLOCK).to(DTYPE)
        tl.store(
            y_ptr + m * F + n,
            gated(a.to(tl.float32), b.to(tl.float32), ACTIVATION).to(y_ptr.dtype.element_ty),
            mask=mask,
        )


@jit
def _folded(ptrs, mask, M, N, num_segments, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    step = M.to(tl.int64) * N
    for s in range(0, num_segments):
        total += tl.load(ptrs + s * step, mask=mask, other=0.0)
    return total


@jit(do_not_specialize=["M", "y_stride", "normed_stride"])
def _fold_norm_kernel(
    partial_ptr,  # [S, M, N] float32
    bias_ptr,
    residual_ptr,
    norm_ptr,  # [N]
    y_ptr,  # [M, N]
    normed_ptr,  # [M, N]
    M,
    num_segments,
    residual_stride,
    y_stride,  # in units of 16 bytes, as the next
    normed_stride,
    eps,
    N: tl.constexpr,
    CHUNK: tl.constexpr,  # at least N
):
    """Grid: rows. `_fold_kernel` of a whole row, and its RMSNorm."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, CHUNK)
    mask = n < N
    total = _folded(partial_ptr + m * N + n, mask, M, N, num_segments, CHUNK)
    if residual_ptr is not None:
        residual_ptr += m * residual_stride
    y = finish(total, bias_ptr, residual_ptr, n, n, mask).to(y_ptr.dtype.element_ty).to(tl.float32)
    inverse = inverse_rms(y, y_ptr, None, eps, N, CHUNK)
    store_norm(y, inverse, norm_ptr, row_at(y_ptr, m, y_stride), row_at(normed_ptr, m, normed_stride), n, N)


# ---- launchers ---------------------------------------------------------------------------------------


def dequant_matmul(
    x: Tensor,
    w: QTensor | Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """x [M, K] with M in 0..64, w [N, K] -> [M, N] in out_dtype (x's dtype by default).

    bias [N]; residual [M, N] is added last. On a GPU x is bfloat16, float16 or float32, its rows contiguous, and
    `workspace` a uint8 tensor of `matmul_workspace_nbytes` bytes, allocated here where it is None. On a CPU x is
    float32 and needs no workspace. ValueError for anything else, and for inputs that require grad.
    """
    if x.ndim == 2 and x.shape[0] > MAX_ROWS:
        raise ValueError(f"dequant_matmul: {x.shape[0]} rows, expected at most {MAX_ROWS}; use matmul or prefill_gemm")
    if not launch.runs_kernel(x):
        return matmul_on_cpu("dequant_matmul", x, w, bias, residual, out_dtype)
    x, w = check_matmul("dequant_matmul", x, w, bias, residual, out_dtype)
    return decode(x, w, bias, residual, out_dtype or x.dtype, workspace)


def decode(
    x: Tensor,
    w: QTensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    workspace: Tensor | None,
) -> Tensor:
    """`dequant_matmul` of checked arguments."""
    (m, _), n = x.shape, w.shape[0]
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    if m == 0:
        return y
    if w.segments == 1:
        _launch(x, w, y, bias, residual, "rows")
        return y
    partial = _partial(x, w, n, workspace)
    _launch(x, w, partial, None, None, "partial")
    _fold(partial, y, bias, residual, "rows", x.dtype)
    return y


def matmul_rmsnorm(
    x: Tensor,
    w: QTensor | Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-> y [M, N] = matmul(x, w, ...) in x's dtype, and rmsnorm(y, norm_weight, eps): the same bits, a launch less.

    norm_weight [N]; the launch is saved where up to 64 rows meet a weight of several segments.
    """
    n = w.shape[0]
    fused = launch.runs_kernel(x) and x.ndim == 2 and 0 < x.shape[0] <= MAX_ROWS and n <= MAX_CHUNK
    packed = dense(w) if isinstance(w, Tensor) else w
    if not fused or packed.segments == 1 or packed.layout == "t64-int8":
        y = matmul(x, w, bias=bias, residual=residual, workspace=workspace)
        return y, rmsnorm(_aligned_rows(y) if launch.runs_kernel(x) else y, norm_weight, eps)
    x, w = check_matmul("matmul_rmsnorm", x, w, bias, residual, None)
    fits = tuple(norm_weight.shape) == (n,) and norm_weight.is_contiguous() and norm_weight.dtype in FLOATS
    if not fits or norm_weight.device != x.device:
        raise ValueError(
            f"matmul_rmsnorm: norm_weight must be contiguous floats [{n}] on {x.device}, "
            f"got {norm_weight.dtype} {list(norm_weight.shape)} on {norm_weight.device}"
        )
    cpu.refuse_grad("matmul_rmsnorm", norm_weight)
    m, chunk = x.shape[0], chunk_of(n)
    partial = _partial(x, w, n, workspace)
    _launch(x, w, partial, None, None, "partial")
    y, normed = (new_rows((m, n), x.dtype, x.device) for _ in range(2))
    _fold_norm_kernel[(m,)](
        partial,
        bias,
        residual,
        norm_weight,
        y,
        normed,
        m,
        w.segments,
        0 if residual is None else residual.stride(0),
        units(y),
        units(normed),
        eps,
        N=n,
        CHUNK=chunk,
        **row_options(chunk),
    )
    return y, normed


def swiglu_matmul(
    x: Tensor,
    w: QTensor,
    *,
    activation: str = "silu",
    block: int = 64,
    workspace: Tensor | None = None,
) -> Tensor:
    """x [M, K], w [2F, K] of gate and up -> act(gate) * up [M, F] in x's dtype; any M.

    On a GPU w is a `pack_gate_up` weight; on a CPU its rows alternate in blocks of `block` gate and up rows. Gate and
    up are rounded to x's dtype first: the bits are those of a matmul followed by `swiglu`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"swiglu_matmul: activation must be 'silu' or 'gelu_tanh', got {activation!r}")
    if w.shape[0] % 2 or block < 1:
        raise ValueError(f"swiglu_matmul: weight {list(w.shape)} in blocks of {block}: expected [2F, K] and at least 1")
    if not launch.runs_kernel(x):
        return cpu.swiglu_cpu(matmul_on_cpu("swiglu_matmul", x, w, None, None, None), activation, block)
    x, w = check_matmul("swiglu_matmul", x, w, None, None, None, layout="t64-glu")
    m, f = x.shape[0], w.shape[0] // 2
    if m > MAX_ROWS or (w.segments == 1 and x.dtype == torch.float32):
        gate_up = (prefill if m > MAX_ROWS else decode)(x, whole_tiles(w), None, None, x.dtype, workspace)
        return swiglu(gate_up, activation)[:, :f]
    y = torch.empty(m, f, dtype=x.dtype, device=x.device)
    if m == 0:
        return y
    if w.segments == 1:
        _launch(x, w, y, None, None, "gated", activation)
        return y
    partial = _partial(x, w, t64.num_tiles(w) * ROWS, workspace)
    _launch(x, whole_tiles(w), partial, None, None, "partial")
    _fold(partial, y, None, None, "gated", x.dtype, activation)
    return y


def lm_head_argmax(x: Tensor, w: QTensor | Tensor, *, workspace: Tensor | None = None) -> Tensor:
    """x [M, K], w [vocab, K] -> the id of each row's largest logit, ties to the lowest, -1 for a NaN; [M] int64.

    Logits are float32 and, where the vocabulary is large enough to be one segment, never written.
    """
    if not launch.runs_kernel(x):
        return cpu.argmax_cpu(matmul_on_cpu("lm_head_argmax", x, w, None, None, None))
    x, w = check_matmul("lm_head_argmax", x, w, None, None, None)
    m = x.shape[0]
    if w.segments > 1 or m > MAX_ROWS or m == 0:
        logits = (prefill if m > MAX_ROWS else decode)(x, w, None, None, torch.float32, workspace)
        return argmax(_aligned_rows(logits))
    tile = _tile(x, w)
    programs = -(-w.shape[0] // tile.cols)
    top = torch.empty(2, programs, m, dtype=torch.float32, device=x.device)
    _launch(x, w, top, None, None, "top")
    ids = torch.empty(m, dtype=torch.int64, device=x.device)
    _top_kernel[(m,)](top, ids, m, programs, BLOCK=1024, num_warps=4, **launch.OPTIONS)
    return ids


def matmul_workspace_nbytes(m: int, w: QTensor | Tensor, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of scratch that a GPU's `matmul` and `swiglu_matmul` of m rows can use; dtype is x's."""
    w = dense(w) if isinstance(w, Tensor) else w
    if m > MAX_ROWS:
        return prefill_workspace_nbytes(m, w, dtype)
    columns = t64.num_tiles(w) * ROWS if w.layout == "t64-glu" else w.shape[0]
    return 4 * w.segments * m * columns if w.segments > 1 else 0


def matmul(
    x: Tensor,
    w: QTensor | Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """`dequant_matmul` for any number of rows: up to 64 by it, more by `prefill_gemm`, with the same bits.

    A weight packed with scheme "w8a8" goes to `w8a8_matmul`.
    """
    if not launch.runs_kernel(x):
        return matmul_on_cpu("matmul", x, w, bias, residual, out_dtype)
    if isinstance(w, QTensor) and w.layout == "t64-int8":
        return w8a8_matmul(x, w, bias=bias, residual=residual, out_dtype=out_dtype, workspace=workspace)
    x, w = check_matmul("matmul", x, w, bias, residual, out_dtype)
    if x.shape[0] <= MAX_ROWS:
        return decode(x, w, bias, residual, out_dtype or x.dtype, workspace)
    return prefill(x, w, bias, residual, out_dtype or x.dtype, workspace)


def matmul_bytes(m: int, n: int, k: int, weight_nbytes: int, x_itemsize: int = 2, y_itemsize: int = 2) -> int:
    """Bytes that y [m, n] = x [m, k] . w^T must move: the weight as packed, x and y once."""
    return weight_nbytes + m * k * x_itemsize + m * n * y_itemsize


def matmul_flops(m: int, n: int, k: int) -> int:
    """Multiplications and additions."""
    return 2 * m * n * k


def fold_bytes(m: int, n: int, segments: int, y_itemsize: int = 2) -> int:
    """Bytes of float32 partial sums read and of y written where the segments of a product are added."""
    return m * n * (4 * segments + y_itemsize)


def matmul_rmsnorm_bytes(m: int, n: int, k: int, weight_nbytes: int, itemsize: int = 2) -> int:
    """`matmul_bytes`, the residual and the norm's weight read, and the norm written."""
    return matmul_bytes(m, n, k, weight_nbytes, itemsize, itemsize) + rmsnorm_bytes(m, n, itemsize)


def swiglu_matmul_bytes(m: int, f: int, k: int, weight_nbytes: int, itemsize: int = 2) -> int:
    """The weight of gate and up as packed, x and y [m, f] once."""
    return matmul_bytes(m, f, k, weight_nbytes, itemsize, itemsize)


def lm_head_argmax_bytes(m: int, k: int, weight_nbytes: int, itemsize: int = 2) -> int:
    """The weight as packed, x, and int64 ids: no logits."""
    return weight_nbytes + m * (k * itemsize + 8)


def matmul_ref(x: Tensor, w: QTensor | Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The definition in float64, on a weight as stored or packed for a GPU."""
    dense_w = w if isinstance(w, Tensor) else t64.dequantize_t64(w) if w.layout in t64.LAYOUTS else dequantize(w)
    y = x.double() @ dense_w.double().T
    if bias is not None:
        y = y + bias.double()
    return y if residual is None else y + residual.double()


def whole_tiles(w: QTensor) -> QTensor:
    """A gate-and-up weight as the plain weight that its tiles are, padding rows included."""
    return replace(w, layout="t64", shape=(t64.num_tiles(w) * ROWS, w.shape[1]))


def _aligned_rows(y: Tensor) -> Tensor:
    """y, or a copy of it, with rows that row kernels take."""
    return y if y.shape[1] * y.element_size() % 16 == 0 else new_rows(y.shape, y.dtype, y.device).copy_(y)


def _tile(x: Tensor, w: QTensor) -> Tile:
    kernel = "decode-f32" if x.dtype == torch.float32 else "decode"
    return launch.tile_for(launch.arch_of(x), kernel, t64.form_of(w).name, *w.shape, x.shape[0])


def _launch(
    x: Tensor,
    w: QTensor,
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: str,
    activation: str = "silu",
) -> None:
    tile = _tile(x, w)
    if out == "gated":
        # gate and up beside each other: as many columns a warp as the table says
        tile = Tile(tile.rows, 2 * ROWS, max(4, tile.warps * 2 * ROWS // tile.cols), tile.stages)
    (m, k), n = x.shape, w.shape[0]
    args = weight_args(w)
    columns = args.num_tiles * ROWS if out == "gated" else n
    grid = (-(-columns // tile.cols), -(-m // tile.rows), w.segments if out == "partial" else 1)
    _dequant_matmul_kernel[grid](
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
        OUT=out,
        ACTIVATION=activation,
        **kernel_constants(x, w, t64.form_of(w), tile),
    )


def _partial(x: Tensor, w: QTensor, columns: int, workspace: Tensor | None) -> Tensor:
    """Float32 [S, M, columns] in the workspace."""
    shape = (w.segments, x.shape[0], columns)
    return carve(workspace, shape, torch.float32, x, "matmul")


def _fold(
    partial: Tensor,
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: str,
    dtype: torch.dtype,
    activation: str = "silu",
) -> None:
    segments, m, n = partial.shape
    _fold_kernel[(-(-y.shape[1] // REDUCE_COLS), m)](
        partial,
        bias,
        residual,
        y,
        m,
        n,
        y.shape[1],
        segments,
        0 if residual is None else residual.stride(0),
        DTYPE=launch.triton_dtype(dtype),
        OUT=out,
        ACTIVATION=activation,
        BLOCK=REDUCE_COLS,
        num_warps=4,
        **launch.OPTIONS,
    )
