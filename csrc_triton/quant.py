"""Quantised weights: y = x @ W.T, where W = (codes - offset) * scale + bias, by groups along K.

Memory, layout "rows": row r of W is row r of every part, so row slices are views.
  dense  {"weight": [N, K]}
  q4     {"codes": uint8 [N, ceil(K / 2)], "scale": f32 [N, G], "zero": f32 [N, G] if asymmetric}
         byte b holds column 2b in its low nibble and 2b + 1 in its high one;
         the offset is 8, or 0 with a zero, which is the bias: the weight of code 0
  q8     {"codes": int8 [N, K], "scale": f32 [N, G]}, offset 0
  GGUF   {"blocks": uint8 [N, row bytes]}, the bytes of the file, little endian
Promise: GGUF weights stay as they are, and `dequantize` is the gguf package's, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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

    def to_device(self, device: torch.device | str) -> QTensor:
        return replace(self, parts={name: part.to(device) for name, part in self.parts.items()})

    def rows(self, rows: slice) -> QTensor:
        """A view of some rows, which computes the same bits as those rows of the whole."""
        _check_rows_layout(self)
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise ValueError(f"expected a slice of rows with step 1, got {rows!r}")
        start, stop, _ = rows.indices(self.shape[0])
        if start >= stop:
            raise ValueError(f"no row of {self.shape} is in {rows!r}")
        parts = {name: part[start:stop] for name, part in self.parts.items()}
        return replace(self, shape=(stop - start, self.shape[1]), parts=parts)

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
    return QTensor(fmt, (n, k), 0, num_segments(n, k), "rows", {"weight": w})


def quantize(w: Tensor, fmt: str, group: int | None = 128, symmetric: bool = True) -> QTensor:
    """Round w to "q4" or "q8"; codes are (w - zero) / scale rounded to nearest, ties to even.

    A group of None, 0 or at least K is a whole row; the last group of a row may be short. No weight
    moves by more than |scale| / 2 (symmetric q4 scales may be negative). A zero group has scale 0.
    """
    if fmt not in ("q4", "q8") or (fmt == "q8" and not symmetric):
        raise ValueError(f"{fmt!r} symmetric={symmetric}: expected 'q4', or a symmetric 'q8'")
    if group is not None and (not isinstance(group, int) or group < 0):
        raise ValueError(f"group {group!r}: expected a positive integer, or None for a whole row")
    n, k = _check_weight(w, (*DENSE.values(), torch.float64))
    group = min(group or k, k)
    num_groups = math.ceil(k / group)
    width, dtype = (math.ceil(k / 2), torch.uint8) if fmt == "q4" else (k, torch.int8)
    ints = torch.empty(n, width, dtype=dtype, device=w.device)
    scale = torch.empty(n, num_groups, dtype=torch.float32, device=w.device)
    parts = {"codes": ints, "scale": scale}
    if not symmetric:
        parts["zero"] = torch.empty_like(scale)
    for rows in _row_chunks(n, k):
        x = w[rows].float()
        if k % group:
            # repeats a weight of the short group, whose scale it cannot change
            x = F.pad(x, (0, num_groups * group - k), mode="replicate")
        x = x.reshape(-1, num_groups, group)
        low, high = x.aminmax(dim=-1, keepdim=True)
        if not symmetric:
            step, bounds, offset = (high - low) / 15, (0, 15), 0
            parts["zero"][rows] = low.squeeze(-1)
            x = x - low
        elif fmt == "q4":
            step, bounds, offset = _q4_scale(low, high), (-8, 7), 8
        else:
            step, bounds, offset = torch.maximum(high, -low) / 127, (-127, 127), 0
        scale[rows] = step.squeeze(-1)
        x = (x / step.masked_fill(step == 0, 1)).round_().clamp_(*bounds).add_(offset)
        x = x.to(ints.dtype).flatten(1)[:, :k]
        if fmt == "q4":
            even, odd = F.pad(x, (0, k % 2), value=offset).unflatten(1, (-1, 2)).unbind(-1)
            x = even | (odd << 4)
        ints[rows] = x
    # a NaN or an infinity reaches the scale of its group
    if not scale.isfinite().all():
        raise ValueError(f"weight {(n, k)}: NaN, infinite, or a group spans more than float32")
    return QTensor(fmt, (n, k), group, num_segments(n, k), "rows", parts)


def dequantize(q: QTensor) -> Tensor:
    """W as float32 [N, K]; an f32 weight is returned as it is, not copied."""
    _check_rows_layout(q)
    if q.fmt in DENSE:
        return q.parts["weight"].float()
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for rows in _row_chunks(*q.shape):
        w, group = out[rows], q.group
        ints, offset, scale, bias = _unpack(q[rows])
        w.copy_(ints)
        if offset:
            w -= offset
        if q.shape[1] % group:
            # a short last group: one scale per weight
            group_of = torch.arange(q.shape[1], device=q.device) // group
            scale, bias, group = scale[:, group_of], bias if bias is None else bias[:, group_of], 1
        w = w.view(w.shape[0], -1, group)
        # two roundings, as in the gguf package: never fused
        w *= scale.unsqueeze(-1)
        if bias is not None:
            w += bias.unsqueeze(-1)
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
    parts = {name: part.index_select(0, index) for name, part in q.parts.items()}
    return dequantize(replace(q, shape=(index.numel(), q.shape[1]), parts=parts))


def codes(q: QTensor) -> Codes:
    """The integers and scales behind a quantised weight, for repacking."""
    if q.fmt in DENSE:
        raise ValueError(f"{q.fmt} {q.shape}: a dense weight has no codes")
    pieces = [_unpack(q[rows]) for rows in _row_chunks(*q.shape)]
    ints, (offset, *_), scales, biases = zip(*pieces, strict=True)
    scale = torch.cat(scales)
    bias = None if biases[0] is None else torch.cat(biases)
    return Codes(torch.cat(ints), scale, -offset * scale if offset else bias, q.group)


def cat_rows(weights: Sequence[QTensor]) -> QTensor:
    """One weight from several of the same K, format and group: q, k and v in one matmul."""
    kinds = {(q.fmt, q.layout, q.shape[1], q.group, *q.parts, str(q.device)) for q in weights}
    if len(kinds) != 1:
        raise ValueError(f"cannot join {len(weights)} weights: expected one kind, got {kinds}")
    _check_rows_layout(weights[0])
    shape = (sum(q.shape[0] for q in weights), weights[0].shape[1])
    parts = {name: torch.cat([q.parts[name] for q in weights]) for name in weights[0].parts}
    return replace(weights[0], shape=shape, segments=num_segments(*shape), parts=parts)


def interleave_rows(a: QTensor, b: QTensor, block: int = 64) -> QTensor:
    """A block of rows of a, the same block of b, and so on; the last blocks may be short."""
    if a.shape != b.shape or block < 1:
        raise ValueError(f"{a.shape} and {b.shape} in blocks of {block}: expected equal shapes")
    return cat_rows([q[i : i + block] for i in range(0, a.shape[0], block) for q in (a, b)])


def reference_matmul(x: Tensor, q: QTensor) -> Tensor:
    """x @ W.T in float64: the definition that kernels are measured against."""
    return x.double() @ dequantize(q).double().T


def _unpack(q: QTensor) -> tuple[Tensor, int, Tensor, Tensor | None]:
    """Codes [n, K], offset, scale [n, G] and bias [n, G] or None."""
    n, k = q.shape
    if q.fmt == "q8":
        return q.parts["codes"], 0, q.parts["scale"], None
    if q.fmt == "q4":
        packed, zero = q.parts["codes"], q.parts.get("zero")
        ints = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :k]
        return ints, 8 if zero is None else 0, q.parts["scale"], zero
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
    if w.requires_grad:
        raise ValueError(f"weight {tuple(w.shape)} requires grad: inference only")
    return _check_shape(w.shape)
