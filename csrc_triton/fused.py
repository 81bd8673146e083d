"""Row-wise operations between the matmuls, and the rotary tables.

    rmsnorm         y = x / sqrt(mean(x^2) + eps) * weight          (Zhang and Sennrich 2019)
    quantize_rows   codes = round(x * 127 / max|x|), scale = max|x| / 127, per row
    rope            R(d): (a, b) -> (a cos - b sin, b cos + a sin) on the halves of a head,
                    angle d * inv_freq[j] of pair j                  (Su et al. 2021, half-split form)
    swiglu          y = silu(gate) * up, or gelu_tanh(gate) * up     (Shazeer 2020)
    argmax, top_k   ties to the lowest id

Layout: the elements of a row are contiguous; on a GPU rows start at multiples of 16 bytes, those of results as
well (`new_rows`). A rope table holds one row a distance, distance -63 first. Kernels compute in float32 and round
once, on storing.
Promise: row r of an output depends on row r of the inputs alone, bit for bit. Sums run in an order that the width
alone decides, not the dtype, the alignment or the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.cpu import MIN_DISTANCE
from csrc_triton.launch import OPTIONS, constexpr, jit, runs_kernel, tl

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("silu", "gelu_tanh")
ROW_BYTES = 16  # rows start at multiples of this: one load of a thread
MIN_CHUNK, MAX_CHUNK = 128, 8192  # columns a program holds at a time
GLU_CHUNK = 1024
TOP_CHUNK = 4096  # logits that a program ranks
MAX_TOP_K = 128
MAX_CANDIDATES = 16384  # of a row, for the merge

HIGHEST_KEY, LOWEST_KEY = 2**31 - 1, -(2**31)  # of NaN: above the key of inf, or below that of -inf

ROUND = constexpr(1.5 * 2.0**23)  # added and subtracted: rounds |x| < 2^22 to the nearest even integer
INT8_MAX = constexpr(float(cpu.INT8_MAX))
TWICE_SQRT_2_PI = constexpr(2 * math.sqrt(2 / math.pi))
LAST_ID = constexpr(2**31 - 1)
FIRST_NAN = constexpr(HIGHEST_KEY)
NO_RANK = constexpr(-(2**63))


# ---- rope tables -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeTable:
    """Rotations by distance. One table per distinct base and scaling."""

    cos: Tensor  # [num_distances, rot_dim / 2] float32; row i is distance i + MIN_DISTANCE
    sin: Tensor  # the same shape
    rot_dim: int  # leading dims of a head that rotate; the rest pass through
    factor: float = 1.0  # YaRN's attention factor, once on q and once on k

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    @property
    def max_position(self) -> int:
        return self.cos.shape[0] + MIN_DISTANCE - 1


def num_distances(max_position: int) -> int:
    """Rows of a table: a query of the last page may be 63 further from a page than from its own first slot."""
    return (max_position | -MIN_DISTANCE) + 1 - MIN_DISTANCE


def rope_table(
    inv_freq: Sequence[float] | Tensor,
    max_position: int,
    *,
    factor: float = 1.0,
    device: torch.device | str = "cpu",
) -> RopeTable:
    """Tables for distances -63..max_position and to the end of its page, in float64 and rounded once to float32.

    inv_freq: rot_dim / 2 angular frequencies in radians per token, scaling already applied.
    """
    freq = torch.as_tensor(inv_freq, dtype=torch.float64)
    if freq.ndim != 1 or freq.numel() == 0:
        raise ValueError(f"rope_table: inv_freq must be a non-empty vector, got shape {tuple(freq.shape)}")
    if max_position < 0:
        raise ValueError(f"rope_table: max_position must be >= 0, got {max_position}")
    distance = torch.arange(MIN_DISTANCE, MIN_DISTANCE + num_distances(max_position), dtype=torch.float64)
    angle = distance[:, None] * freq[None, :]
    cos, sin = angle.cos().float().to(device), angle.sin().float().to(device)
    return RopeTable(cos, sin, 2 * freq.numel(), factor)


def check_rope(name: str, rope: RopeTable) -> None:
    """Refuse tables that kernels would misread."""
    for table in (rope.cos, rope.sin):
        if table.dtype != torch.float32 or not table.is_contiguous():
            raise ValueError(
                f"{name}: rope tables must be contiguous float32, got {table.dtype} with strides {table.stride()}"
            )


# ---- rows --------------------------------------------------------------------------------------------


def new_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Uninitialised [M, K] whose rows start at multiples of 16 bytes; contiguous where K allows."""
    num_rows, width = shape
    step = ROW_BYTES // dtype.itemsize
    return torch.empty(num_rows, -(-width // step) * step, dtype=dtype, device=device)[:, :width]


def check_rows(name: str, **tensors: Tensor | None) -> None:
    """Refuse what kernels cannot load 16 bytes at a time."""
    for label, x in tensors.items():
        if x is None:
            continue
        if x.dtype not in FLOATS:
            raise ValueError(f"{name}: {label} is {x.dtype}, expected float32, bfloat16 or float16")
        step = x.stride(0) * x.element_size() if x.shape[0] > 1 else 0
        if (x.stride(1) != 1 and x.shape[1] > 1) or step % ROW_BYTES or x.data_ptr() % ROW_BYTES:
            raise ValueError(
                f"{name}: rows of {label} must be contiguous and start at multiples of {ROW_BYTES} bytes, got strides "
                f"{x.stride()} of {x.element_size()} bytes and address {x.data_ptr():#x}"
            )


def units(x: Tensor | None) -> int:
    """Row stride in units of 16 bytes; see `row_at`."""
    return 0 if x is None else x.stride(0) * x.element_size() // ROW_BYTES


def chunk_of(width: int) -> int:
    """Columns that a program holds at a time, a power of two."""
    return min(max(1 << (width - 1).bit_length(), MIN_CHUNK), MAX_CHUNK)


def row_options(chunk: int) -> dict[str, object]:
    """16 elements a thread, or 32 in the longest chunks."""
    return {"num_warps": max(1, min(8, chunk // 512)), **OPTIONS}


@jit
def row_at(ptr, row, stride):
    """Start of a row; stride is in units of 16 bytes, so that the compiler sees how rows are aligned."""
    return ptr + row * (stride * (128 // ptr.dtype.element_ty.primitive_bitwidth))


@jit
def row_sum(x):
    """Sum of a power of two of numbers, neighbours first: ((x0 + x1) + (x2 + x3)) + ...

    tl.sum adds in an order that follows the layout, but of two numbers there is one sum. Call it after a loop, not
    in one that adds up the results: the compiler would move that addition before this one.
    """
    for _ in tl.static_range(16):
        if x.numel > 1:
            x = tl.sum(tl.reshape(x, (x.numel // 2, 2)), 1)
    return tl.sum(x, 0)


@jit
def turned(a, b, cos, sin):
    """The pair (a, b) rotated; two roundings a number, whatever the compiler would fuse."""
    return tl.fma(a, cos, -(b * sin)), tl.fma(b, cos, a * sin)


# ---- rmsnorm and rows of int8 ------------------------------------------------------------------------


@jit
def _stream(x_ptr, residual_ptr, cols, K: tl.constexpr):
    """Columns of x or, rounded as it is stored, of x + residual; in float32, zero from K on."""
    x = tl.load(x_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@jit
def inverse_rms(first, x_ptr, residual_ptr, eps, K: tl.constexpr, CHUNK: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a row; `first` is its first chunk."""
    total = first * first
    for start in range(CHUNK, K, CHUNK):
        x = _stream(x_ptr, residual_ptr, start + tl.arange(0, CHUNK), K)
        total = tl.fma(x, x, total)
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(row_sum(total), K) + eps))


@jit
def _scaled(x, inverse, weight_ptr, cols, K: tl.constexpr):
    return x * inverse * tl.load(weight_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)


@jit
def store_norm(x, inverse, weight_ptr, sum_ptr, out_ptr, cols, K: tl.constexpr):
    if sum_ptr is not None:
        tl.store(sum_ptr + cols, x.to(sum_ptr.dtype.element_ty), mask=cols < K)
    y = _scaled(x, inverse, weight_ptr, cols, K)
    tl.store(out_ptr + cols, y.to(out_ptr.dtype.element_ty), mask=cols < K)


@jit(do_not_specialize=["x_stride", "residual_stride", "sum_stride", "out_stride"])
def _rmsnorm_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [K]
    residual_ptr,  # [M, K], or None
    sum_ptr,  # [M, K] or None: x + residual
    out_ptr,  # [M, K]
    x_stride,
    residual_stride,
    sum_stride,
    out_stride,
    eps,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (M,): a program owns a row. Its first chunk stays in registers, the others are read twice."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr = row_at(x_ptr, row, x_stride)
    out_ptr = row_at(out_ptr, row, out_stride)
    if residual_ptr is not None:
        residual_ptr = row_at(residual_ptr, row, residual_stride)
    if sum_ptr is not None:
        sum_ptr = row_at(sum_ptr, row, sum_stride)
    lane = tl.arange(0, CHUNK)
    first = _stream(x_ptr, residual_ptr, lane, K)
    inverse = inverse_rms(first, x_ptr, residual_ptr, eps, K, CHUNK)
    store_norm(first, inverse, weight_ptr, sum_ptr, out_ptr, lane, K)
    for start in range(CHUNK, K, CHUNK):
        x = _stream(x_ptr, residual_ptr, start + lane, K)
        store_norm(x, inverse, weight_ptr, sum_ptr, out_ptr, start + lane, K)


@jit
def _to_quantize(x, inverse, weight_ptr, cols, DTYPE: tl.constexpr, K: tl.constexpr):
    """x or, where there is a weight, its norm, rounded as it would be stored."""
    if weight_ptr is not None:
        x = _scaled(x, inverse, weight_ptr, cols, K).to(DTYPE).to(tl.float32)
    return x


@jit
def _magnitude(x):
    """Bits of |x|, which sort as |x| does, NaN highest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _codes(x, per_unit):
    """NaN, of a row with a NaN or an infinity, gives 0: the row's scale tells."""
    x = x * per_unit
    return ((tl.where(x == x, x, 0.0) + ROUND) - ROUND).to(tl.int8)


@jit(do_not_specialize=["x_stride", "codes_stride"])
def _quantize_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [K] of an RMSNorm that comes first, or None
    codes_ptr,  # [M, K] int8
    scale_ptr,  # [M] float32
    x_stride,
    codes_stride,
    eps,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (M,): a program owns a row."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr = row_at(x_ptr, row, x_stride)
    codes_ptr = row_at(codes_ptr, row, codes_stride)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    lane = tl.arange(0, CHUNK)
    first = _stream(x_ptr, None, lane, K)
    inverse = 1.0
    if weight_ptr is not None:
        inverse = inverse_rms(first, x_ptr, None, eps, K, CHUNK)
    first = _to_quantize(first, inverse, weight_ptr, lane, dtype, K)
    largest = _magnitude(first)
    for start in range(CHUNK, K, CHUNK):
        x = _to_quantize(_stream(x_ptr, None, start + lane, K), inverse, weight_ptr, start + lane, dtype, K)
        largest = tl.maximum(largest, _magnitude(x))
    largest = tl.max(largest, 0).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + row, tl.div_rn(largest, INT8_MAX))
    per_unit = tl.div_rn(1.0, largest) * INT8_MAX
    per_unit = tl.where(per_unit == float("inf"), 0.0, per_unit)
    tl.store(codes_ptr + lane, _codes(first, per_unit), mask=lane < K)
    for start in range(CHUNK, K, CHUNK):
        x = _to_quantize(_stream(x_ptr, None, start + lane, K), inverse, weight_ptr, start + lane, dtype, K)
        tl.store(codes_ptr + start + lane, _codes(x, per_unit), mask=start + lane < K)


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [M, K], weight [K] -> [M, K] of out_dtype, x's unless given; with a residual, normalises x + residual.

    On a GPU that sum is rounded to x's dtype first, as the residual stream is stored.
    """
    _check_norm("rmsnorm", x, weight, residual)
    if runs_kernel(x):
        return _launch_rmsnorm("rmsnorm", x, weight, eps, residual, None, out_dtype)
    y = cpu.rmsnorm_cpu(x, weight, eps, residual)
    return y if out_dtype is None else y.to(out_dtype)


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """-> the new residual stream x + residual, in x's dtype, and its rmsnorm, in one launch."""
    _check_norm("add_rmsnorm", x, weight, residual)
    if runs_kernel(x):
        total = new_rows(x.shape, x.dtype, x.device)
        return total, _launch_rmsnorm("add_rmsnorm", x, weight, eps, residual, total, out_dtype)
    total = x + residual
    return total, rmsnorm(total, weight, eps, out_dtype=out_dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes -127..127 int8 [M, K], scale float32 [M]: x is about codes * scale, and 0 where scale is.

    A row so small that 127 over its largest is no float32 has codes 0; so has a row with a NaN or an infinity
    wherever a code would be NaN, and a scale that is not finite.
    """
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(f"quantize_rows: x {tuple(x.shape)} must be [M, K] with K > 0")
    cpu.refuse_grad("quantize_rows", x)
    if runs_kernel(x):
        check_rows("quantize_rows", x=x)
        return _launch_quantize(x, None, 0.0)
    cpu.refuse_device("quantize_rows", x)
    integers, scale = cpu.quantize_rows_cpu(x.float())
    return integers.nan_to_num_(0.0).to(torch.int8), scale.flatten()


def rmsnorm_quantize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """quantize_rows(rmsnorm(x, weight, eps)), bit for bit, in one launch."""
    _check_norm("rmsnorm_quantize", x, weight, None)
    if runs_kernel(x):
        return _launch_quantize(x, weight, eps)
    return quantize_rows(rmsnorm(x, weight, eps))


def _check_norm(name: str, x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"{name}: x {tuple(x.shape)} must be [M, K] and weight {tuple(weight.shape)} [K]")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{name}: residual {tuple(residual.shape)} must have x's shape {tuple(x.shape)}")
    cpu.refuse_grad(name, x, weight, residual)
    if not runs_kernel(x):
        cpu.refuse_device(name, x)
        return
    if residual is not None and residual.dtype != x.dtype:
        raise ValueError(f"{name}: residual is {residual.dtype}, expected x's {x.dtype}")
    check_rows(name, x=x, weight=weight[None], residual=residual)


def _launch_rmsnorm(
    name: str,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    total: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    out = new_rows(x.shape, out_dtype or x.dtype, x.device)
    check_rows(name, out=out)
    if out.numel():
        strides = [units(t) for t in (x, residual, total, out)]
        chunk = chunk_of(x.shape[1])
        grid = (x.shape[0],)
        _rmsnorm_kernel[grid](
            x, weight, residual, total, out, *strides, eps, K=x.shape[1], CHUNK=chunk, **row_options(chunk)
        )
    return out


def _launch_quantize(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    codes = new_rows(x.shape, torch.int8, x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if codes.numel():
        chunk = chunk_of(x.shape[1])
        _quantize_kernel[(x.shape[0],)](
            x, weight, codes, scale, units(x), units(codes), eps, K=x.shape[1], CHUNK=chunk, **row_options(chunk)
        )
    return codes, scale


def rmsnorm_bytes(m: int, k: int, itemsize: int = 2) -> int:
    """Bytes that a launch must move, numbers of so many bytes: x and weight read, y written."""
    return (2 * m + 1) * k * itemsize


def add_rmsnorm_bytes(m: int, k: int, itemsize: int = 2) -> int:
    """x, residual and weight read, the sum and its norm written."""
    return (4 * m + 1) * k * itemsize


def quantize_rows_bytes(m: int, k: int, itemsize: int = 2) -> int:
    """x read, codes and float32 scales written."""
    return m * k * itemsize + m * (k + 4)


def rmsnorm_quantize_bytes(m: int, k: int, itemsize: int = 2) -> int:
    """`quantize_rows_bytes`, and weight read."""
    return quantize_rows_bytes(m, k, itemsize) + k * itemsize


def rmsnorm_ref(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The definition in float64."""
    wide = x.double() if residual is None else x.double() + residual.double()
    return wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def add_rmsnorm_ref(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum in x's dtype, its norm in float64."""
    total = (x.float() + residual.float()).to(x.dtype)
    return total, rmsnorm_ref(total, weight, eps)


def quantize_rows_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in float64 -> codes before rounding, scale; rows of zeros have codes 0."""
    wide = x.double()
    largest = wide.abs().amax(1, keepdim=True)
    return (wide * cpu.INT8_MAX / largest).nan_to_num(0.0), largest[:, 0] / cpu.INT8_MAX


def rmsnorm_quantize_ref(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """quantize_rows_ref of the norm as it would be stored."""
    return quantize_rows_ref(rmsnorm_ref(x, weight, eps).to(x.dtype))


# ---- swiglu ------------------------------------------------------------------------------------------


@jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up of float32 numbers."""
    z = gate
    if ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        z = (gate + gate * gate * gate * 0.044715) * TWICE_SQRT_2_PI
    return tl.div_rn(gate, 1.0 + tl.exp(-z)) * up


@jit(do_not_specialize=["x_stride", "out_stride"])
def _swiglu_kernel(
    x_ptr,  # [M, 2F], gate and up in alternating blocks
    out_ptr,  # [M, F]
    x_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (M, F / CHUNK): a program owns a chunk of a row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    gate_cols = cols // BLOCK * (2 * BLOCK) + cols % BLOCK
    up_cols = gate_cols + BLOCK
    if F % BLOCK:  # the last block of each is short
        full = F // BLOCK * BLOCK
        gate_cols = tl.where(cols < full, gate_cols, full + cols)
        up_cols = tl.where(cols < full, up_cols, F + cols)
    x_ptr = row_at(x_ptr, row, x_stride)
    gate = tl.load(x_ptr + gate_cols, mask=cols < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + up_cols, mask=cols < F, other=0.0).to(tl.float32)
    y = gated(gate, up, ACTIVATION)
    tl.store(row_at(out_ptr, row, out_stride) + cols, y.to(out_ptr.dtype.element_ty), mask=cols < F)


def swiglu(gate_up: Tensor, activation: str = "silu", block: int = 64) -> Tensor:
    """gate_up [M, 2F], gate and up in alternating blocks of `block` columns -> act(gate) * up [M, F].

    The last block of each may be short when block does not divide F.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"swiglu: activation must be 'silu' or 'gelu_tanh', got {activation!r}")
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"swiglu: gate_up must be [M, 2F], got {tuple(gate_up.shape)}")
    cpu.refuse_grad("swiglu", gate_up)
    if not runs_kernel(gate_up):
        cpu.refuse_device("swiglu", gate_up)
        return cpu.swiglu_cpu(gate_up, activation, block)
    check_rows("swiglu", gate_up=gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = new_rows((num_rows, width), gate_up.dtype, gate_up.device)
    if out.numel():
        chunk = min(chunk_of(width), GLU_CHUNK)
        _swiglu_kernel[(num_rows, -(-width // chunk))](
            *(gate_up, out, units(gate_up), units(out)),
            ACTIVATION=activation,
            F=width,
            BLOCK=min(block, width),
            CHUNK=chunk,
            num_warps=max(1, chunk // 256),
            **OPTIONS,
        )
    return out


def swiglu_bytes(m: int, f: int, itemsize: int = 2) -> int:
    """Gate and up read, y [m, f] written."""
    return 3 * m * f * itemsize


def swiglu_ref(gate_up: Tensor, activation: str = "silu", block: int = 64) -> Tensor:
    """The definition in float64."""
    gate, up = cpu.split_gate_up(gate_up.double(), block)
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


# ---- argmax and top_k --------------------------------------------------------------------------------
# A rank is key << 32 | id ^ LAST_ID: larger logits first, then lower ids, and no two alike. So it does not matter
# in which order the largest is looked for.


@jit
def _key(x, NAN: tl.constexpr):
    """int32 that sorts as x does, -0.0 as 0.0, NaN as told."""
    x = x.to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN)


@jit(do_not_specialize=["stride", "k"])
def _top_of_chunk_kernel(
    logits_ptr,  # [M, V]
    ranks_ptr,  # [M, chunks, k] int64
    stride,
    k,
    NAN: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (M, chunks): a program finds the k highest ranks of its chunk."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(row_at(logits_ptr, row, stride) + ids, mask=ids < V, other=0.0)
    ranks = (_key(logits, NAN).to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64)
    ranks = tl.where(ids < V, ranks, NO_RANK)
    ranks_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * k
    for i in range(k):
        top = tl.max(ranks, 0)
        tl.store(ranks_ptr + i, top)
        ranks = tl.where(ranks == top, NO_RANK, ranks)


@jit(do_not_specialize=["stride", "k", "num_ranks"])
def _top_of_row_kernel(
    ranks_ptr,  # [M, num_ranks] int64
    logits_ptr,  # [M, V]
    ids_ptr,  # [M, k] int64
    values_ptr,  # [M, k] of the logits' dtype, or None
    stride,
    k,
    num_ranks,
    BLOCK: tl.constexpr,
):
    """Grid (M,): a program finds the k highest of a row's ranks."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    ranks = tl.load(ranks_ptr + row * num_ranks + lane, mask=lane < num_ranks, other=NO_RANK)
    for i in range(k):
        top = tl.max(ranks, 0)
        ranks = tl.where(ranks == top, NO_RANK, ranks)
        token = tl.where((top >> 32) == FIRST_NAN, -1, (top & 0xFFFFFFFF) ^ LAST_ID)
        tl.store(ids_ptr + row * k + i, token)
        if values_ptr is not None:
            tl.store(values_ptr + row * k + i, tl.load(row_at(logits_ptr, row, stride) + token))


def argmax(logits: Tensor, *, workspace: Tensor | None = None) -> Tensor:
    """logits [M, V] -> ids [M] int64, ties to the lowest id. A row with a NaN gives -1."""
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"argmax: logits must be [M, V] with V > 0, got {tuple(logits.shape)}")
    cpu.refuse_grad("argmax", logits)
    if runs_kernel(logits):
        return _launch_top("argmax", logits, 1, None, workspace)[:, 0]
    cpu.refuse_device("argmax", logits)
    return cpu.argmax_cpu(logits)


def top_k(logits: Tensor, k: int, *, workspace: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [M, V] -> the k <= 128 largest of a row [M, k] in descending order and their ids, int64.

    Equal logits (0.0 and -0.0 are) come in the order of their ids; NaN come last, in that order too.
    """
    if logits.ndim != 2 or not 1 <= k <= min(MAX_TOP_K, logits.shape[1]):
        raise ValueError(f"top_k: logits {tuple(logits.shape)} must be [M, V] and k={k} in 1..min(V, {MAX_TOP_K})")
    cpu.refuse_grad("top_k", logits)
    if runs_kernel(logits):
        values = torch.empty(logits.shape[0], k, dtype=logits.dtype, device=logits.device)
        return values, _launch_top("top_k", logits, k, values, workspace)
    cpu.refuse_device("top_k", logits)
    x = logits.float()
    values, ids = torch.topk(x, min(k + 1, x.shape[1]))
    ties = (values[:, 1:] == values[:, :-1]).any(1) | values.isnan().any(1)  # topk puts NaN first, and equals anyhow
    ids = ids[:, :k]
    if ties.any():
        ids[ties] = _ranked_top_k(x[ties], k)
    return logits.gather(1, ids), ids


def _ranked_top_k(x: Tensor, k: int) -> Tensor:
    """Ids by rank: no two are alike, as the id is the lower half of each."""
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    key = torch.where(x.isnan(), LOWEST_KEY, bits ^ ((bits >> 31) & HIGHEST_KEY)).long()
    ranks = (key << 32) | (torch.arange(x.shape[1]) ^ HIGHEST_KEY)
    return (torch.topk(ranks, k).values & 0xFFFFFFFF) ^ HIGHEST_KEY


def top_k_workspace_nbytes(num_rows: int, vocab: int, k: int = 1) -> int:
    """Scratch of a launch of top_k, or of argmax with k = 1; without a workspace it is allocated."""
    return num_rows * -(-vocab // TOP_CHUNK) * k * torch.int64.itemsize


def _launch_top(name: str, logits: Tensor, k: int, values: Tensor | None, workspace: Tensor | None) -> Tensor:
    check_rows(name, logits=logits)
    num_rows, vocab = logits.shape
    nbytes = top_k_workspace_nbytes(num_rows, vocab, k)
    if workspace is None:
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=logits.device)
    if workspace.nbytes < nbytes or workspace.data_ptr() % ROW_BYTES or not workspace.is_contiguous():
        raise ValueError(f"{name}: workspace of {workspace.nbytes} bytes, expected {nbytes} contiguous, aligned to 16")
    chunk = min(chunk_of(vocab), TOP_CHUNK)
    num_chunks = -(-vocab // chunk)
    num_ranks = num_chunks * k
    if num_ranks > MAX_CANDIDATES:
        raise ValueError(f"{name}: V={vocab} with k={k} leaves {num_ranks} candidates, at most {MAX_CANDIDATES}")
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    if num_rows:
        ranks = workspace.flatten().view(torch.uint8)[:nbytes].view(torch.int64)
        _top_of_chunk_kernel[(num_rows, num_chunks)](
            logits,
            ranks,
            units(logits),
            k,
            NAN=HIGHEST_KEY if values is None else LOWEST_KEY,
            V=vocab,
            CHUNK=chunk,
            **OPTIONS,
        )
        block = max(1 << (num_ranks - 1).bit_length(), MIN_CHUNK)
        warps = max(1, min(16, block // 512))
        _top_of_row_kernel[(num_rows,)](
            ranks, logits, ids, values, units(logits), k, num_ranks, BLOCK=block, num_warps=warps, **OPTIONS
        )
    return ids


def argmax_bytes(m: int, vocab: int, itemsize: int = 4) -> int:
    """Logits read, int64 ids written; candidates in between stay in the cache."""
    return m * (vocab * itemsize + 8)


def top_k_bytes(m: int, vocab: int, k: int, itemsize: int = 4) -> int:
    """Logits read, k values and int64 ids of a row written."""
    return m * (vocab * itemsize + k * (itemsize + 8))


def argmax_ref(logits: Tensor) -> Tensor:
    """The definition, row by row in Python."""
    out = []
    for row in logits.tolist():
        nan = any(value != value for value in row)
        out.append(-1 if nan else row.index(max(row)))
    return torch.tensor(out, dtype=torch.int64)


def top_k_ref(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The definition, row by row in Python."""
    order = []
    for row in logits.tolist():
        keys = [(1, 0.0, i) if value != value else (0, -value, i) for i, value in enumerate(row)]
        order.append([i for *_, i in sorted(keys)[:k]])
    ids = torch.tensor(order, dtype=torch.int64).view(-1, k)
    return logits.gather(1, ids), ids
