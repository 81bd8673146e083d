"""The CPU path: packed weights, matmul, row-wise operations and rotations, fast and exact.

    y[m, :] = x[m, :] . W^T

Plain torch changes a row's bits with the number of rows in the call. Everything here holds them still: the
row-tiled and packed forms below were measured to, `probe` checks each weight's shape on the machine at
hand, and a form that fails it runs row by row, which always holds.

    scheme   weights in memory                     activations   product
    f32      float32 [N, K]                        float32       one `mm` per tile of 16 rows (plain where exact)
    f16      half-precision panels (FBGEMM)        float32       rows padded to a count whose kernels agree
    i8       int8 [N, K], a scale a row            bfloat16      _weight_int8pack_mm
    i4       nibbles, scale and zero per 32        bfloat16      _weight_int4pack_mm_for_cpu
    w8a8     int8 [N, K], a scale a row            int8 a token  exact integer sums, whatever the order

Promise: row r of a result depends on row r alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from csrc_triton.quant import QTensor, codes, dequantize, permute_input, quantize

if TYPE_CHECKING:
    from csrc_triton.fused import RopeTable

SCHEMES = ("f32", "f16", "i8", "i4", "w8a8")
OMP_PAUSE_SOFT = 1  # of omp_pause_resource_t
ALIGNED = 64  # bytes, as torch allocates
ROW_TILE = 16  # rows of one product or attention tile; 4 and 8 do not agree with 16
VECTOR = 16  # complex64 numbers in one step of torch's widest loop
GRAIN = 32768  # elements from which torch shares an operation among its threads
MIN_DISTANCE = -63  # a query may stand up to 63 positions before its own page's first slot
PANEL = (16, 512)  # FBGEMM pads N and K of half-precision panels to multiples of these
INT8_MAX = 127
EXACT_K = 1040  # 127 * 127 * K stays below 2^24, so float32 sums of int8 products are exact integers
PROBE_ROWS = (1, 2, 15, 16, 17, 33, 64)


def refuse_grad(name: str, *tensors: Tensor | None) -> None:
    """Kernels are inference only."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(f"{name}: an input requires grad, but there is no backward; use torch.no_grad()")


def refuse_device(name: str, tensor: Tensor) -> None:
    """What is called runs on the CPU."""
    if not tensor.is_cpu:
        raise ValueError(f"{name}: no kernel for {tensor.device} in this version; move the tensors to the CPU")


def release_threads() -> None:
    """Give back the threads that torch keeps for the calling one; its next large operation makes new ones.

    GNU OpenMP lets threads spin between two parallel regions only while the process has no more of them than cores:
    the idle threads of a second caller make each region of the first sleep and wake, at half the speed.
    """
    if (pause := _openmp_pause()) is not None:
        pause(OMP_PAUSE_SOFT)


@functools.cache
def _openmp_pause() -> Callable[[int], int] | None:
    """omp_pause_resource_all (OpenMP 5.0) of the library that torch brings."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        with contextlib.suppress(OSError, AttributeError):
            pause: Callable[[int], int] = ctypes.CDLL(str(path)).omp_pause_resource_all
            return pause
    return None


# ---- packed weights ----------------------------------------------------------------------------------


class HalfPanels:
    """Half-precision panels owned by FBGEMM; opaque to torch, so their bytes are stated here."""

    def __init__(self, weight: Tensor) -> None:
        rows, cols = weight.shape
        self.handle = torch.ops.quantized.linear_prepack_fp16(weight, None)
        self.nbytes = half_nbytes(rows, cols)


@functools.cache
def _half_linear() -> Any:
    """FBGEMM's product without the Python that torch puts before it, which takes longer than a small product."""
    return torch.ops.quantized.linear_dynamic_fp16._op


def _half_mm(x: Tensor, handle: Any) -> Tensor:
    y: Tensor = _half_linear()(x, handle)
    return y


def half_nbytes(rows: int, cols: int) -> int:
    n, k = (-(-size // pad) * pad for size, pad in zip((rows, cols), PANEL, strict=True))
    return n * k * 2


def scheme_for(fmt: str, group: int, shape: tuple[int, int], symmetric: bool = True) -> str:
    """The scheme that loses least among those of about the storage's size."""
    if fmt == "f32":
        return "f32"
    if fmt == "q8" and symmetric and group >= shape[1] and fits_int8(shape):
        return "i8"
    if fmt in ("q4", "q4_0", "q4_1", "q4_k") and group == 32 and fits_int4(shape):
        return "i4"
    return "f16" if half_row_counts(torch.get_num_threads()) else "f32"


def fits_int8(shape: tuple[int, int]) -> bool:
    """_weight_int8pack_mm reads past the end of other shapes."""
    return shape[1] % 64 == 0


def fits_int4(shape: tuple[int, int]) -> bool:
    return shape[0] % 64 == 0 and shape[1] % 64 == 0


def packed_nbytes(shape: tuple[int, int], scheme: str) -> int:
    """Bytes of a packed weight, exact, before anything is packed; the order of act-order columns comes on top."""
    n, k = shape
    if scheme == "f32":
        return 4 * n * k
    if scheme == "f16":
        return half_nbytes(n, k)
    if scheme == "i8":
        return n * k + 2 * n
    if scheme == "i4":
        return n * k // 2 + 4 * n * (k // 32)
    if scheme == "w8a8":
        panels = sum(half_nbytes(n, b - a) for a, b in exact_segments(k))
        return 4 * n + (n * k if has_fast_int8() else panels)
    raise ValueError(f"packed_nbytes: unknown scheme {scheme!r}, expected one of {SCHEMES}")


def pack(q: QTensor, scheme: str | None = None) -> QTensor:
    """Storage ("rows" layout) -> the layout this CPU computes with. Values may round; `quant` keeps none.

    Columns are in W's order, but in q's with act-order and nibbles, which keep their groups and so the perm.
    """
    if q.layout != "rows":
        raise ValueError(f"pack: weight {q.shape} is in layout {q.layout!r}, expected 'rows'")
    scheme = scheme or scheme_for(q.fmt, q.group, q.shape, "zero" not in q.parts)
    if scheme not in _PACKERS:
        raise ValueError(f"pack: unknown scheme {scheme!r}, expected one of {SCHEMES}")
    return replace(q, layout=f"cpu-{scheme}", parts=_PACKERS[scheme](q))


def _pack_f32(q: QTensor) -> dict[str, Any]:
    return {"weight": q.parts["weight"] if q.fmt == "f32" else dequantize(q)}


def _pack_f16(q: QTensor) -> dict[str, Any]:
    weight = dequantize(q)
    parts: dict[str, Any] = {}
    exponent = half_exponent(weight)
    if exponent:
        weight = torch.ldexp(weight, torch.tensor(exponent))
        parts["rescale"] = torch.tensor(2.0**-exponent)
    return parts | {"panels": HalfPanels(weight)}


def half_exponent(weight: Tensor) -> int:
    """The power of two that brings a weight into half precision's range; 0 where it already fits."""
    largest = float(weight.abs().max())
    if largest == 0.0 or 2.0**-6 <= largest < 2.0**15:
        return 0
    return 14 - math.frexp(largest)[1]


def _int8_rows(q: QTensor) -> QTensor:
    """q with integers alone and a scale a row, columns in W's order."""
    is_stored = q.fmt == "q8" and q.group >= q.shape[1] and not q.parts.keys() & {"zero", "perm"}
    return q if is_stored else quantize(dequantize(q), "q8", group=None)


def _pack_i8(q: QTensor) -> dict[str, Any]:
    if not fits_int8(q.shape):
        raise ValueError(f"pack: scheme 'i8' needs K divisible by 64, got weight {q.shape}")
    row = _int8_rows(q)
    return {"codes": row.parts["codes"], "scale": row.parts["scale"].flatten().bfloat16()}


def _pack_i4(q: QTensor) -> dict[str, Any]:
    if not fits_int4(q.shape):
        raise ValueError(f"pack: scheme 'i4' needs N and K divisible by 64, got weight {q.shape}")
    if q.fmt not in ("q4", "q4_0", "q4_1", "q4_k") or q.group != 32:
        q = quantize(dequantize(q), "q4", group=32)
    value, scale, bias, _ = codes(q)
    if bias is None:  # signed codes -8..7; the kernel takes unsigned ones
        value, bias = value + 8, torch.zeros_like(scale)
    else:
        bias = bias + 8 * scale  # the kernel computes (code - 8) * scale + bias
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(value.to(torch.int32), 1)
    both = torch.stack((scale.t(), bias.t()), dim=-1).bfloat16().contiguous()
    perm = {"perm": q.parts["perm"]} if "perm" in q.parts else {}
    return {"nibbles": packed, "scale_bias": both} | perm


def _pack_w8a8(q: QTensor) -> dict[str, Any]:
    row = _int8_rows(q)
    scale = row.parts["scale"].flatten().clone()
    if has_fast_int8():
        return {"codes": row.parts["codes"], "scale": scale}
    wide = row.parts["codes"].float()
    segments = exact_segments(q.shape[1])
    return {"scale": scale} | {f"panels{i}": HalfPanels(wide[:, a:b].contiguous()) for i, (a, b) in enumerate(segments)}


_PACKERS: dict[str, Callable[[QTensor], dict[str, Any]]] = {
    "f32": _pack_f32,
    "f16": _pack_f16,
    "i8": _pack_i8,
    "i4": _pack_i4,
    "w8a8": _pack_w8a8,
}


@functools.cache
def exact_segments(k: int) -> tuple[tuple[int, int], ...]:
    """K cut into equal runs whose int8 dot products are exact in float32."""
    count = -(-k // EXACT_K)
    edges = [k * i // count for i in range(count + 1)]
    return tuple(itertools.pairwise(edges))


# ---- what this machine's torch holds still -----------------------------------------------------------


def has_half_panels() -> bool:
    """Whether this torch build multiplies half-precision panels at all (x86 builds with FBGEMM do)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@functools.cache
def has_fast_int8() -> bool:
    """Whether torch._int_mm beats half panels here. Both give the same integers, so speed may decide."""
    if not has_half_panels():
        return True
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (64, 512), dtype=torch.int8, generator=gen)
    w = torch.randint(-127, 128, (512, 512), dtype=torch.int8, generator=gen)
    panels = HalfPanels(w.float()).handle
    want = x.double() @ w.t().double()
    if not torch.equal(torch._int_mm(x, w.t()).double(), want):
        return False

    def seconds(run: Callable[[], Tensor]) -> float:
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - start)
        return best

    return seconds(lambda: torch._int_mm(x, w.t())) < seconds(lambda: _half_mm(x.float(), panels))


@functools.cache
def half_row_counts(threads: int) -> tuple[int, ...]:
    """Row counts 1..base whose half-panel kernels agree, base last; multiples of base agree too. () if none.

    FBGEMM cuts the rows of a call into kernels of a few rows; those of one or two rows sum in another order.
    """
    if not has_half_panels():
        return ()
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(384, 320, generator=gen)
    panels = HalfPanels(torch.randn(96, 320, generator=gen)).handle
    for base in (6, 12, 14, 16, 24):
        tile = torch.cat([_half_mm(x[i : i + base], panels) for i in range(0, 384 - base + 1, base)])
        counts = [base * m for m in (2, 3, 4, 5, 7, 8, 10, 13, 20, 21, 22) if base * m <= tile.shape[0]]
        if all(torch.equal(_half_mm(x[:m], panels), tile[:m]) for m in counts):
            few = [m for m in range(1, base) if torch.equal(_half_mm(x[:m], panels), tile[:m])]
            return (*few, base)
    return ()


def half_rows(m: int) -> int:
    """The row count to pad m rows to."""
    counts = half_row_counts(torch.get_num_threads())
    base = counts[-1]
    return next((c for c in counts if c >= m), -(-m // base) * base)


def probe(q: QTensor, rows: Iterable[int] = PROBE_ROWS) -> bool:
    """Whether a packed weight gives row r the same bits in calls of every row count."""
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(max(rows), q.shape[1], generator=gen)
    watched = sorted({r for m in rows for r in (0, m // 2, m - 1)})
    alone = {r: matmul_cpu(x[r : r + 1], q) for r in watched}
    for m in rows:
        y = matmul_cpu(x[:m], q)
        if not all(torch.equal(y[r : r + 1], alone[r]) for r in watched if r < m):
            return False
    return True


def checked(q: QTensor) -> QTensor:
    """The packed weight itself where `probe` passes, else the same weight run row by row.

    float32 weights first try one plain product (it holds where MKL runs in its strict mode).
    """
    rows = PROBE_ROWS if q.shape[0] * q.shape[1] < 1 << 23 else (1, 2, 16, 17)
    if q.layout == "cpu-f32" and probe(plain := replace(q, layout="cpu-f32-plain"), (1, 2, 3, 4, 15, 16, 33, 64)):
        return plain
    return q if probe(q, rows) else replace(q, layout=q.layout + "-rows")


# ---- matmul ------------------------------------------------------------------------------------------


def matmul_cpu(x: Tensor, q: QTensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [M, K] float32, q packed -> [M, N] float32; bias [N], then residual [M, N], each added with one rounding."""
    run = _PRODUCTS.get(q.layout)
    x = permute_input(x, q)
    if run is not None:
        y = run(x, q.parts)
    elif q.layout.endswith("-rows") and q.layout[:-5] in _PRODUCTS:
        one = _PRODUCTS[q.layout[:-5]]
        y = torch.cat([one(x[r : r + 1], q.parts) for r in range(x.shape[0])])
    else:
        raise ValueError(
            f"matmul: weight {q.shape} is in layout {q.layout!r}; pack it for the CPU first (csrc_triton.pack)"
        )
    if bias is not None:
        y = y.add_(bias)
    return y if residual is None else y.add_(residual)


def _mm_f32(x: Tensor, parts: Any) -> Tensor:
    weight = parts["weight"].t()
    m = x.shape[0]
    padded = -(-m // ROW_TILE) * ROW_TILE
    if padded != m:
        x = F.pad(x, (0, 0, 0, padded - m))
    elif x.data_ptr() % ALIGNED:  # with three threads and more, MKL's order of an odd last column follows the address
        x = x.clone()
    if padded == ROW_TILE:
        return _mm(x, weight)[:m]
    y = x.new_empty(padded, weight.shape[1])
    for start in range(0, padded, ROW_TILE):
        torch.mm(x[start : start + ROW_TILE], weight, out=y[start : start + ROW_TILE])
    return y[:m]


def _mm_f32_plain(x: Tensor, parts: Any) -> Tensor:
    return _mm(x, parts["weight"].t())


def _mm(x: Tensor, weight: Tensor) -> Tensor:
    """torch.mm; autocast would round its operands, but not those of a product that is given its result."""
    if torch.is_autocast_enabled("cpu"):
        return torch.mm(x, weight, out=x.new_empty(x.shape[0], weight.shape[1]))
    return torch.mm(x, weight)


def _mm_f16(x: Tensor, parts: Any) -> Tensor:
    m = x.shape[0]
    padded = half_rows(m)
    if padded != m:
        x = F.pad(x, (0, 0, 0, padded - m))
    y = _half_mm(x, parts["panels"].handle)[:m]
    return y.mul_(parts["rescale"]) if "rescale" in parts else y


def _mm_i8(x: Tensor, parts: Any) -> Tensor:
    return torch._weight_int8pack_mm(x.bfloat16(), parts["codes"], parts["scale"]).float()


def _mm_i4(x: Tensor, parts: Any) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), parts["nibbles"], 32, parts["scale_bias"]).float()


def quantize_rows_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] float32 -> (integers -127..127 as float32 [M, K], scale [M, 1]).

    A row of zeros, or so small that 127 over its largest is no float32, has integers 0.
    """
    largest = x.abs().amax(1, keepdim=True)
    inverse = largest.reciprocal().mul_(INT8_MAX).nan_to_num_(math.nan, 0.0)
    return torch.mul(x, inverse).round_(), largest.div_(INT8_MAX)


def _mm_w8a8(x: Tensor, parts: Any) -> Tensor:
    integers, scale = quantize_rows_cpu(x)
    if "codes" in parts:
        total = torch._int_mm(integers.to(torch.int8), parts["codes"].t()).float()
    elif "panels1" not in parts:
        total = _half_mm(integers, parts["panels0"].handle)
    else:
        total = _segmented_integers(integers, parts)
    return total.mul_(scale).mul_(parts["scale"])


def _segmented_integers(integers: Tensor, parts: Any) -> Tensor:
    segments = exact_segments(integers.shape[1])
    sums = [_half_mm(integers[:, a:b], parts[f"panels{i}"].handle) for i, (a, b) in enumerate(segments)]
    if len(sums) == 2:  # one rounding of an exact sum, as in the conversion of an int32 one
        return sums[0].add_(sums[1])
    return functools.reduce(torch.add, (s.double() for s in sums)).float()


_PRODUCTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "cpu-f32": _mm_f32,
    "cpu-f32-plain": _mm_f32_plain,
    "cpu-f16": _mm_f16,
    "cpu-i8": _mm_i8,
    "cpu-i4": _mm_i4,
    "cpu-w8a8": _mm_w8a8,
}


# ---- row-wise ----------------------------------------------------------------------------------------


def rmsnorm_cpu(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x [..., K] float32 -> x / rms(x) * weight, over the last dim."""
    if residual is not None:
        x = x + residual
    total = torch.mul(x, x).sum(-1, keepdim=True)
    scale = torch.addcdiv(_number(eps), total, _number(x.shape[-1])).rsqrt_()  # eps + total / K, each rounded
    return torch.mul(x, scale).mul_(weight)


@functools.cache
def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def split_gate_up(gate_up: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """[M, 2F] in alternating blocks of `block` columns (the last pair may be short) -> gate, up [M, F]."""
    m, twice = gate_up.shape
    full = twice // (2 * block) * block
    pairs = gate_up[:, : 2 * full].unflatten(1, (-1, 2, block)) if full else gate_up.new_empty(m, 0, 2, block)
    gate, up = pairs[:, :, 0].reshape(m, full), pairs[:, :, 1].reshape(m, full)
    if 2 * full == twice:
        return gate, up
    rest = gate_up[:, 2 * full :].chunk(2, dim=1)
    return torch.cat((gate, rest[0]), 1), torch.cat((up, rest[1]), 1)


def swiglu_cpu(gate_up: Tensor, activation: str = "silu", block: int = 64) -> Tensor:
    """torch's silu and gelu treat a vector's last elements apart; exp, tanh and arithmetic do not."""
    half = gate_up.shape[1] // 2
    gate, up = (gate_up[:, :half], gate_up[:, half:]) if block >= half else split_gate_up(gate_up, block)
    if activation == "silu":
        y = torch.neg(gate).exp_().add_(1.0)
        return torch.div(gate, y, out=y).mul_(up)
    y = gate * gate
    y.mul_(gate).mul_(0.044715).add_(gate).mul_(math.sqrt(2 / math.pi)).tanh_().add_(1.0)
    return y.mul_(gate).mul_(0.5).mul_(up)


def argmax_cpu(logits: Tensor) -> Tensor:
    """torch promises no order among ties; the lowest index equal to the maximum does. NaN gives -1."""
    row, column = (logits == logits.amax(1, keepdim=True)).nonzero().unbind(1)
    nothing = column.new_full((logits.shape[0],), -1)
    return nothing.scatter_reduce_(0, row, column, "amin", include_self=False)


# ---- rotary ------------------------------------------------------------------------------------------
# A head is turned as D / 2 complex numbers: one product, whose roundings must not depend on an element's
# place. Queries and stored keys therefore have the two halves of a head interleaved, here and in the pages.


def pairs(x: Tensor, rot_dim: int) -> Tensor:
    """x [..., D] half-split -> complex64 [..., D / 2]; what does not rotate is paired half with half too."""
    half = rot_dim // 2
    if rot_dim == x.shape[-1]:
        return torch.complex(x[..., :half], x[..., half:])
    mid = (rot_dim + x.shape[-1]) // 2
    first = torch.cat((x[..., :half], x[..., rot_dim:mid]), -1)
    return torch.complex(first, torch.cat((x[..., half:rot_dim], x[..., mid:]), -1))


def from_pairs(z: Tensor) -> Tensor:
    """complex64 [..., D / 2] -> float32 [..., D], real and imaginary parts alternating; a view."""
    return torch.view_as_real(z).flatten(-2)


def half_split(x: Tensor, rot_dim: int) -> Tensor:
    """The inverse order: interleaved [..., D], as keys are stored, -> half-split [..., D]."""
    a, b, half = x[..., ::2], x[..., 1::2], rot_dim // 2
    return torch.cat((a[..., :half], b[..., :half], a[..., half:], b[..., half:]), -1)


def rotation(rope: RopeTable, distance: Tensor, head_dim: int, factor: float = 1.0) -> Tensor:
    """distance [T] int64 -> complex64 [T, head_dim / 2]."""
    row = distance - MIN_DISTANCE
    cos, sin = (t.index_select(0, row) * factor for t in (rope.cos, rope.sin))  # indexing would wrap below -63
    turn = torch.complex(cos, sin)
    return F.pad(turn, (0, (head_dim - rope.rot_dim) // 2), value=1.0)


@functools.cache
def has_unfused_complex() -> bool:
    """Whether torch's complex product rounds every step in whole vectors, as real arithmetic does."""
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, dtype=torch.complex64, generator=gen) for _ in range(2))
    return torch.equal(a * b, _turned(a, b))


def turn_(z: Tensor, turn: Tensor) -> Tensor:
    """z * turn in place, every step rounded.

    torch's product fuses steps in what a vector leaves over at the end of a head or of a thread's share, so it
    serves only where nothing is left over.
    """
    size, threads = z.numel(), torch.get_num_threads()
    split = () if size < GRAIN else range(2, threads + 1)
    if z.shape[-1] % VECTOR == 0 and all(size % (VECTOR * n) == 0 for n in split) and has_unfused_complex():
        return z.mul_(turn)
    return z.copy_(_turned(z, turn))


def _turned(z: Tensor, turn: Tensor) -> Tensor:
    real, imag = z.real * turn.real - z.imag * turn.imag, z.imag * turn.real + z.real * turn.imag
    return torch.complex(real, imag)
