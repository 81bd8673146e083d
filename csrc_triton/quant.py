"""Quantised weights: y = x @ W.T, where W = (codes - offset) * scale + bias, by groups along K.

Memory, layout "rows": row r of W is row r of every part but "perm", so row slices are views.
  dense  {"weight": [N, K]}
  q4     {"codes": uint8 [N, ceil(K / 2)], "scale": f32 [N, G], and at most one of
         "zero": f32 [N, G], "zero_point": uint8 [N, G]}
         byte b holds column 2b in its low nibble and 2b + 1 in its high one; the offset is 8,
         or 0 with a zero, which is the bias: the weight of code 0, or the integer zero point
  q8     {"codes": int8 [N, K], "scale": f32 [N, G], "zero": f32 [N, G] if asymmetric}, offset 0
  GGUF   {"blocks": uint8 [N, row bytes]}, the bytes of the file, little endian
  any    {"perm": int32 [K]} with act-order: column i of the parts is column perm[i] of W
Promise: GGUF weights stay as they are, and `dequantize` is the gguf package's, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Block(NamedTuple):
    """One block of a GGUF format."""

    ggml_type: int
    weights: int
    nbytes: int
    group: int
    offset: int = 0


DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
GGUF = {
    "f32": Block(0, 1, 4, 0),
    "f16": Block(1, 1, 2, 0),
    "bf16": Block(30, 1, 2, 0),
    "q4_0": Block(2, 32, 18, 32, 8),
    "q4_1": Block(3, 32, 20, 32),
    "q5_0": Block(6, 32, 22, 32, 16),
    "q5_1": Block(7, 32, 24, 32),
    "q8_0": Block(8, 32, 34, 32),
    "q4_k": Block(12, 256, 144, 32),
    "q5_k": Block(13, 256, 176, 32),
    "q6_k": Block(14, 256, 210, 16),
}
# codes of ours by (format, symmetric): least and most before an offset, and the offset
BOUNDS = {
    ("q4", True): (-8, 7, 8),
    ("q4", False): (0, 15, 0),
    ("q8", True): (-127, 127, 0),
    ("q8", False): (-128, 127, 0),
}
# symmetric scales of smaller groups are float16 numbers, for layouts that store them in 16 bits
WIDE_GROUP = 128
SMALLEST_F16 = 2.0**-24
SIX_BITS = ("q5_0", "q5_1", "q5_k", "q6_k")
EIGHT_BITS = ("q8", "q8_0")
# rows of a tile, by the packed layouts whose parts have a row for each tile
TILE_ROWS = {"t64": 64, "t64-int8": 64}
# weights per step on a CPU: temporaries stay in cache, and small beside the result
CHUNK = 1 << 19


@dataclass(frozen=True, eq=False)
class QTensor:
    """A weight [N, K]; y = x @ dequantize(q).T."""

    fmt: str  # a key of GGUF, or ours: "q4", "q8"
    shape: tuple[int, int]  # (N, K)
    group: int  # weights along K that share a scale; K when a row has one; 0 when dense
    segments: int  # K segments of the summation order; a row slice keeps those of the whole weight
    layout: str  # "rows", or the name of a packed layout of one device
    parts: Mapping[str, Tensor]

    @classmethod
    def from_gguf(cls, raw: Tensor, ggml_type: str | int, shape: Sequence[int]) -> QTensor:
        """The bytes of a GGUF tensor of N rows and K columns, kept as they are (no copy)."""
        n, k = _check_shape(shape)
        fmt, form = _gguf_form(ggml_type)
        if k % form.weights:
            raise ValueError(f"{fmt} {(n, k)}: expected K in multiples of {form.weights}")
        row_bytes = k // form.weights * form.nbytes
        if raw.dtype != torch.uint8 or tuple(raw.shape) not in ((n, row_bytes), (n * row_bytes,)):
            got = f"{tuple(raw.shape)} {raw.dtype}"
            raise ValueError(f"{fmt} {n}x{k}: expected uint8 [{n}, {row_bytes}] or flat, got {got}")
        raw = raw.contiguous().view(n, row_bytes)
        if fmt in DENSE:
            if raw.storage_offset() % form.nbytes or raw.data_ptr() % form.nbytes:
                raw = raw.clone()
            return dense(raw.view(DENSE[fmt]))
        return cls(fmt, (n, k), form.group, num_segments(n, k), "rows", {"blocks": raw})

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    def to(self, device: torch.device | str) -> QTensor:
        check_plain(self, "move")
        return replace(self, parts={name: part.to(device) for name, part in self.parts.items()})

    def rows(self, rows: slice) -> QTensor:
        """A view of some rows, which computes the same bits as those rows of the whole.

        Of a layout in tiles the first row must be a tile's first.
        """
        size = TILE_ROWS.get(self.layout, 1)
        if size == 1:
            _check_rows_layout(self)
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise ValueError(f"expected a slice of rows with step 1, got {rows!r}")
        start, stop, _ = rows.indices(self.shape[0])
        if start >= stop:
            raise ValueError(f"no row of {self.shape} is in {rows!r}")
        if start % size:
            raise ValueError(f"{self.layout!r} has tiles of {size} rows: {rows!r} of {self.shape} starts inside one")
        return _map_rows(self, stop - start, lambda part: part[start // size : math.ceil(stop / size)])

    __getitem__ = rows


from_gguf = QTensor.from_gguf


class Codes(NamedTuple):
    """The integer view of a weight: codes * scale + bias, with one scale (and bias) per group."""

    codes: Tensor  # [N, K] uint8 or int8
    scale: Tensor  # [N, G] f32
    bias: Tensor | None  # [N, G] f32
    group: int


def num_segments(n: int, k: int) -> int:
    """Into how many segments K is cut when a weight [n, k] is multiplied (ties round to even)."""
    n, k = _check_shape((n, k))
    return max(1, min(round(264 / math.ceil(n / 64)), math.ceil(k / 128)))


def dense(w: Tensor) -> QTensor:
    """A float weight as a QTensor, without a copy."""
    n, k = _check_weight(w, tuple(DENSE.values()))
    fmt = next(name for name, dtype in DENSE.items() if dtype == w.dtype)
    return QTensor(fmt, (n, k), 0, num_segments(n, k), "rows", {"weight": w.detach()})


def quantize(w: Tensor, fmt: str, group: int | None = 128, symmetric: bool = True, *, clip_search: int = 0) -> QTensor:
    """Round w to "q4" or "q8"; codes are (w - zero) / scale rounded to nearest, ties to even.

    A group of None, 0 or at least K is a whole row; the last group of a row may be short. No weight
    moves by more than |scale| / 2 (symmetric q4 scales may be negative). A zero group has scale 0.
    Symmetric scales of groups below 128 that are no whole row are float16 numbers, rounded away from
    zero, unless above its range or below its smallest; all others are float32.

    clip_search: how many narrower ranges to try per group (asymmetric: per end), down to half of it; that of
    the least squared error is kept, the widest on ties. Weights beyond it move by more than |scale| / 2.
    """
    if (fmt, symmetric) not in BOUNDS:
        raise ValueError(f"{fmt!r} symmetric={symmetric}: expected 'q4' or 'q8', symmetric or not")
    if group is not None and (not isinstance(group, int) or group < 0):
        raise ValueError(f"group {group!r}: expected a positive integer, or None for a whole row")
    if not isinstance(clip_search, int) or clip_search < 0:
        raise ValueError(f"clip_search {clip_search!r}: expected a count of ranges to try, or 0")
    n, k = _check_weight(w, (*DENSE.values(), torch.float64))
    group = min(group or k, k)
    num_groups = math.ceil(k / group)
    width, dtype = (math.ceil(k / 2), torch.uint8) if fmt == "q4" else (k, torch.int8)
    ints = torch.empty(n, width, dtype=dtype, device=w.device)
    scale = torch.empty(n, num_groups, dtype=torch.float32, device=w.device)
    parts = {"codes": ints, "scale": scale}
    if not symmetric:
        parts["zero"] = torch.empty_like(scale)
    grid = _Grid(fmt, symmetric, symmetric and group < min(WIDE_GROUP, k))
    for rows in _row_chunks(n, k):
        x = w[rows].float()
        if k % group:
            # repeats a weight of the short group, whose scale it cannot change
            x = F.pad(x, (0, num_groups * group - k), mode="replicate")
        x = x.reshape(-1, num_groups, group)
        low, high = x.aminmax(dim=-1, keepdim=True)
        if clip_search:
            low, high = _search_clip(x, low, high, grid, clip_search, k % group or group)
        step, zero = grid.fit(low, high)
        scale[rows] = step.squeeze(-1)
        if zero is not None:
            parts["zero"][rows] = zero.squeeze(-1)
        offset = grid.bounds[2]
        x = grid.round(x, step, zero).add_(offset).to(ints.dtype).flatten(1)[:, :k]
        ints[rows] = pack_nibbles(x, offset) if fmt == "q4" else x
    # a NaN or an infinity reaches the scale of its group
    if not scale.isfinite().all():
        raise ValueError(f"weight {(n, k)}: NaN, infinite, or a group spans more than float32")
    return QTensor(fmt, (n, k), group, num_segments(n, k), "rows", parts)


def pack_nibbles(codes: Tensor, fill: int = 8) -> Tensor:
    """uint8 [N, K] of 0..15 -> the codes of "q4" [N, ceil(K / 2)], with fill in the high nibble of an odd end."""
    even, odd = F.pad(codes, (0, codes.shape[1] % 2), value=fill).unflatten(1, (-1, 2)).unbind(-1)
    return (even | (odd << 4)).contiguous()


def dequantize(q: QTensor) -> Tensor:
    """W as float32 [N, K], columns in W's order; an f32 weight is returned as it is, not copied."""
    _check_rows_layout(q)
    if q.fmt in DENSE:
        return q.parts["weight"].float()
    perm = q.parts["perm"].long() if "perm" in q.parts else None
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for rows in _row_chunks(*q.shape):
        piece, group = q[rows], q.group
        w = out[rows] if perm is None else torch.empty_like(out[rows])
        ints, offset, scale, bias = _unpack(piece)
        zero_point = piece.parts.get("zero_point")
        w.copy_(ints)
        if offset:
            w -= offset
        if zero_point is not None:
            bias = None  # its bias rounds once more than the difference of two integers does
        if q.shape[1] % group:
            # a short last group: one scale per weight
            group_of = torch.arange(q.shape[1], device=q.device) // group
            scale, bias, group = scale[:, group_of], bias if bias is None else bias[:, group_of], 1
            zero_point = zero_point if zero_point is None else zero_point[:, group_of]
        grouped = w.view(w.shape[0], -1, group)
        if zero_point is not None:
            grouped -= zero_point.unsqueeze(-1)
        # two roundings, as in the gguf package: never fused
        grouped *= scale.unsqueeze(-1)
        if bias is not None:
            grouped += bias.unsqueeze(-1)
        if perm is not None:
            out[rows].index_copy_(1, perm, w)
    return out


def take_rows(q: QTensor, ids: Tensor | Sequence[int]) -> Tensor:
    """dequantize(q)[ids] as float32 [len(ids), K], reading only those rows."""
    _check_rows_layout(q)
    index = torch.as_tensor(ids, device=q.device)
    if index.numel() == 0:
        return torch.empty(0, q.shape[1], dtype=torch.float32, device=q.device)
    if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"row ids {tuple(index.shape)} {index.dtype}: expected 1-d int32 or int64")
    low, high = (int(end) for end in index.aminmax())
    if low < 0 or high >= q.shape[0]:
        raise ValueError(f"row ids {low}..{high}: expected 0..{q.shape[0] - 1}")
    return dequantize(_map_rows(q, index.numel(), lambda part: part.index_select(0, index)))


def codes(q: QTensor) -> Codes:
    """The integers and scales behind a quantised weight, for repacking; with act-order, columns as stored."""
    if q.fmt in DENSE:
        raise ValueError(f"{q.fmt} {q.shape}: a dense weight has no codes")
    _check_rows_layout(q)
    pieces = [_unpack(q[rows]) for rows in _row_chunks(*q.shape)]
    ints, (offset, *_), scales, biases = zip(*pieces, strict=True)
    scale = torch.cat(scales)
    bias = None if biases[0] is None else torch.cat(biases)
    return Codes(torch.cat(ints), scale, -offset * scale if offset else bias, q.group)


def cat_rows(weights: Sequence[QTensor]) -> QTensor:
    """One weight from several of the same K, format, group and perm: q, k and v in one matmul."""
    kinds = {(q.fmt, q.layout, q.shape[1], q.group, *q.parts, str(q.device)) for q in weights}
    if len(kinds) != 1:
        raise ValueError(f"cannot join {len(weights)} weights: expected one kind, got {kinds}")
    _check_rows_layout(weights[0])
    perm = weights[0].parts.get("perm")
    if perm is not None and any(q.parts["perm"] is not perm and not q.parts["perm"].equal(perm) for q in weights):
        raise ValueError(f"cannot join {len(weights)} weights: they take their columns in different orders")
    shape = (sum(q.shape[0] for q in weights), weights[0].shape[1])
    parts = {name: torch.cat([q.parts[name] for q in weights]) for name in weights[0].parts if name != "perm"}
    if perm is not None:
        parts["perm"] = perm
    return replace(weights[0], shape=shape, segments=num_segments(*shape), parts=parts)


def interleave_rows(a: QTensor, b: QTensor, block: int = 64) -> QTensor:
    """A block of rows of a, the same block of b, and so on; the last blocks may be short."""
    if a.shape != b.shape or block < 1:
        raise ValueError(f"{a.shape} and {b.shape} in blocks of {block}: expected equal shapes")
    return cat_rows([q[i : i + block] for i in range(0, a.shape[0], block) for q in (a, b)])


def with_perm(q: QTensor, perm: Tensor) -> QTensor:
    """Act-order: the weight W with W[:, perm[i]] = column i of q, so that groups may take any columns."""
    _check_rows_layout(q)
    if "perm" in q.parts:
        raise ValueError(f"{q.fmt} {q.shape}: its columns have an order already")
    q = replace(q, parts={**q.parts, "perm": perm.to(q.device)})
    if problem := perm_problem(q):
        raise ValueError(f"{q.fmt} {q.shape}: {problem}")
    return q


def permute_input(x: Tensor, q: QTensor) -> Tensor:
    """The columns of x [..., K] in the order that q stores its own: x itself without act-order."""
    perm = q.parts.get("perm")
    return x if perm is None else x.index_select(-1, perm)


def reference_matmul(x: Tensor, q: QTensor) -> Tensor:
    """x @ W.T in float64: the definition that kernels are measured against."""
    return x.double() @ dequantize(q).double().T


def _unpack(q: QTensor) -> tuple[Tensor, int, Tensor, Tensor | None]:
    """Codes [n, K], offset, scale [n, G] and bias [n, G] or None; columns as stored."""
    n, k = q.shape
    if q.fmt == "q8":
        return q.parts["codes"], 0, q.parts["scale"], q.parts.get("zero")
    if q.fmt == "q4":
        packed, scale, zero = q.parts["codes"], q.parts["scale"], q.parts.get("zero")
        ints = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :k]
        if "zero_point" in q.parts:
            zero = q.parts["zero_point"] * -scale
        return ints, 8 if zero is None else 0, scale, zero
    form = GGUF[q.fmt]
    blocks = q.parts["blocks"].unflatten(1, (-1, form.nbytes))  # [n, B, bytes]
    scale, bias = _f16(blocks, 208 if q.fmt == "q6_k" else 0), None
    if q.fmt in ("q4_0", "q4_1", "q5_0", "q5_1"):
        ints = _planes(blocks[..., -16:], 4)
        if q.fmt in ("q5_0", "q5_1"):
            # bit i of the word before the nibbles belongs to weight i
            ints = _join(ints, _planes(blocks[..., -20:-16], 1).transpose(-1, -2))
        if q.fmt in ("q4_1", "q5_1"):
            bias = _f16(blocks, 2).flatten(1)
    elif q.fmt == "q8_0":
        ints = blocks[..., 2:].contiguous().view(torch.int8)
    elif q.fmt == "q6_k":
        low = _planes(blocks[..., :128].unflatten(-1, (2, 64)), 4)
        high = _planes(blocks[..., 128:192].unflatten(-1, (2, 32)), 2)
        ints = _join(low, high).view(torch.int8) - 32
        scale = scale * blocks[..., 192:208].contiguous().view(torch.int8).float()
    else:
        ints = _planes(blocks[..., -128:].unflatten(-1, (4, 32)), 4)
        if q.fmt == "q5_k":
            ints = _join(ints, _planes(blocks[..., 16:48], 1))
        scales, mins = _k_scales(blocks[..., 4:16])
        scale, bias = scale * scales, -(_f16(blocks, 2) * mins).flatten(1)
    return ints.reshape(n, k), form.offset, scale.flatten(1), bias


def _planes(packed: Tensor, bits: int) -> Tensor:
    """[..., b] bytes -> [..., 8 / bits, b]: their lowest bits, then the next ones."""
    packed = packed.contiguous()
    return torch.stack([(packed >> s) & ((1 << bits) - 1) for s in range(0, 8, bits)], dim=-2)


def _join(low: Tensor, high: Tensor) -> Tensor:
    return low.flatten(2) | (high.flatten(2) << 4)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[n, B, 12] bytes -> eight 6-bit scales and eight 6-bit mins, as float32 [n, B, 8]."""
    a, b, c = packed.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((a & 63, (c & 15) | ((a >> 2) & 48)), dim=-1)
    mins = torch.cat((b & 63, (c >> 4) | ((b >> 2) & 48)), dim=-1)
    return scales.float(), mins.float()


def _f16(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()  # [n, B, 1]


def _q4_scale(low: Tensor, high: Tensor) -> Tensor:
    """The smallest step, of either sign, whose -8..7 steps reach both ends."""
    # relative rms error on SmolLM2-135M's weights, groups of 32: this 0.0904; max|w| / 7 0.1043;
    # signed max / -8 (Q4_0's rule) 0.0898, but that moves clipped weights by a whole step
    positive = torch.maximum(high / 7, low / -8)
    negative = torch.maximum(high / 8, low / -7)
    return torch.where(positive <= negative, positive, -negative)


def _round_out_f16(step: Tensor) -> Tensor:
    """The next float16 number away from zero, as float32; unchanged beyond float16's largest and smallest."""
    half = step.half()
    # the next larger magnitude is the next integer, whatever the sign
    outer = (half.view(torch.int16) + (half.float().abs() < step.abs())).view(torch.float16).float()
    return torch.where(outer.isfinite() & (step.abs() >= SMALLEST_F16), outer, step)


class _Grid(NamedTuple):
    """The numbers that a group of a format may hold, by the range they must reach."""

    fmt: str
    symmetric: bool
    half: bool  # whether steps are float16 numbers

    @property
    def bounds(self) -> tuple[int, int, int]:
        return BOUNDS[self.fmt, self.symmetric]

    def fit(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        """Step, and the weight of code 0 if asymmetric."""
        least, most, _ = self.bounds
        if not self.symmetric:
            step = (high - low) / (most - least)
            return step, low - least * step
        step = _q4_scale(low, high) if self.fmt == "q4" else torch.maximum(high, -low) / most
        return _round_out_f16(step) if self.half else step, None

    def round(self, x: Tensor, step: Tensor, zero: Tensor | None) -> Tensor:
        """The code of each weight before the offset, as float32."""
        x = x if zero is None else x - zero
        return (x / step.masked_fill(step == 0, 1)).round_().clamp_(*self.bounds[:2])

    def error(self, x: Tensor, low: Tensor, high: Tensor, last: int) -> Tensor:
        """Sum of squared errors of each group, in float64; the last group counts its first weights only."""
        step, zero = self.fit(low, high)
        w = self.round(x, step, zero).mul_(step)
        w = w if zero is None else w.add_(zero)
        off = w.double().sub_(x)
        off[:, -1, last:] = 0
        return off.square_().sum(-1, keepdim=True)


def _search_clip(x: Tensor, low: Tensor, high: Tensor, grid: _Grid, steps: int, last: int) -> tuple[Tensor, Tensor]:
    """The ends between which each group of x [n, G, group] is rounded with the least error.

    The ends of a symmetric group come nearer to zero together, those of an asymmetric one to each
    other, first the low one, then the high one from where the low one is best.
    """
    best = grid.error(x, low, high, last)
    for moves_low, moves_high in ((1, 1),) if grid.symmetric else ((1, 0), (0, 1)):
        first_low, first_high = low, high
        low_span, high_span = (low, high) if grid.symmetric else (low - high, high - low)
        for i in range(1, steps + 1):
            cut = 0.5 * (i / steps) ** 2  # finer near the whole range, where the best of 8 bits lies
            new_low = first_low - low_span * (cut * moves_low)
            new_high = first_high - high_span * (cut * moves_high)
            error = grid.error(x, new_low, new_high, last)
            is_better = error < best
            best = torch.where(is_better, error, best)
            low, high = torch.where(is_better, new_low, low), torch.where(is_better, new_high, high)
    return low, high


def _row_chunks(n: int, k: int) -> Iterator[slice]:
    step = max(1, CHUNK // k)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _gguf_form(ggml_type: str | int) -> tuple[str, Block]:
    name = ggml_type.lower() if isinstance(ggml_type, str) else None
    for fmt, form in GGUF.items():
        if name == fmt or ggml_type == form.ggml_type:
            return fmt, form
    known = ", ".join(f"{fmt.upper()} ({form.ggml_type})" for fmt, form in GGUF.items())
    raise ValueError(f"GGUF type {ggml_type!r}: expected one of {known}")


def _map_rows(q: QTensor, n: int, take: Callable[[Tensor], Tensor]) -> QTensor:
    """n rows of q: take of every part that has a row for each."""
    parts = {name: part if name == "perm" else take(part) for name, part in q.parts.items()}
    return replace(q, shape=(n, q.shape[1]), parts=parts)


def perm_problem(q: QTensor) -> str | None:
    """Why q's perm cannot be one; None where it can."""
    perm, k = q.parts["perm"], q.shape[1]
    if not q.group:
        return "act-order needs groups, and a dense weight has none"
    if k % q.group:
        return f"act-order needs whole groups, but the last of {q.group} columns is short"
    if perm.dtype != torch.int32 or tuple(perm.shape) != (k,):
        return f"perm must be int32 [{k}], got {perm.dtype} {list(perm.shape)}"
    if not perm.sort().values.equal(torch.arange(k, dtype=torch.int32, device=perm.device)):
        return f"perm does not hold each of 0..{k - 1} once"
    return None


def check_plain(q: QTensor, verb: str) -> None:
    for name, part in q.parts.items():
        if not isinstance(part, Tensor):
            raise ValueError(f"{q.fmt} {q.shape} in layout {q.layout!r}: cannot {verb} {name!r}, which is no tensor")


def _check_rows_layout(q: QTensor) -> None:
    if q.layout != "rows":
        raise ValueError(f"{q.fmt} {q.shape}: expected layout 'rows', got {q.layout!r}")


def _check_shape(shape: Sequence[int]) -> tuple[int, int]:
    sizes = tuple(shape)
    if len(sizes) != 2 or any(size < 1 or int(size) != size for size in sizes):
        raise ValueError(f"shape {sizes}: expected (N, K), both at least 1")
    return int(sizes[0]), int(sizes[1])


def _check_weight(w: Tensor, dtypes: Sequence[torch.dtype]) -> tuple[int, int]:
    if w.dtype not in dtypes:
        raise ValueError(f"weight {tuple(w.shape)} {w.dtype}: expected one of {list(dtypes)}")
    if w.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"weight {tuple(w.shape)} requires grad: inference only")
    return _check_shape(w.shape)
