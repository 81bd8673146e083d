"""T64: weights on a GPU, in tiles of 64 rows by 128 columns, each contiguous.

A QTensor of layout "t64" has, for T = ceil(N / 64) row tiles and B = ceil(K / 128) column blocks:
  codes  int16 [T, B, 64, 32], 4 bits: nibble j of element e is column 32 j + e of the block
         int16 [T, B, 2, 64, 16], 6 bits: nibble j of element e of half i is bits 0 to 3 of column 64 i + 16 j + e
         int16 [T, B, 2, 64, 32], 8 bits: the low byte of element e of half i is column 64 i + e, the high one
         column 64 i + 32 + e
         int8 [T, B, 64, 128] in layout "t64-int8": whole bytes in the order of the columns, for int8 MMA
  high   int16 [T, B, 64, 16], 6 bits: bits 2 p and 2 p + 1 of element e are bits 4 and 5 of column 16 p + e
  scale  by the form's scales,
    block  f32 [T, B, 64], or [T, 1, 64] where a row has one scale: applied to the sum of a block's exact integers
    zero   int32 [T, B or 1, 64]: the same as a float16 (low half) beside an integer zero point, as bfloat16
    half   int32 [T, B, 2, 64]: word w holds the float16 scales of groups 2 w (low half) and 2 w + 1 of 32 columns
    k      int32 [T, B, 2, 64]: bytes of word 0 are the scales of the four groups of 32, those of word 1 the mins
    k6     int32 [T, B, 2, 64]: signed byte i is the scale of group i of 16 columns
    float  f32 [T, B, G, 64]: one scale for each group of 128 / G columns
  extra  half and float: the bias, laid out as the scale; k and k6: int32 [T, ceil(B / 2), 64], float16 d (low half)
         and dmin of 256 columns
Rows past N, and groups of columns past K, have scale (and bias) 0: they multiply as exact zeros. The columns that
K's last group lacks hold the code of zero, or code 0 under a bias or a zero point; kernels read x as 0 there.

Layout "t64-glu" is the same with the row tiles of gate and up alternating, each padded to whole tiles.

Promise: packing loses nothing: `unpack` returns the same codes, scales and biases. Where a zero point does not fit
(groups below 128, a scale of more than 16 bits) it is the bias -zero * scale, exact for scales of 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from csrc_triton import cpu, launch, quant
from csrc_triton.quant import DENSE, EIGHT_BITS, SIX_BITS, QTensor

ROWS, COLS = 64, 128  # of a tile
CHUNK = 1 << 22  # weights packed at a time, which takes up to 16 bytes each
LAYOUTS = ("t64", "t64-glu", "t64-int8")


class Form(NamedTuple):
    """What a kernel knows of a weight when it is compiled."""

    bits: int  # of a code: 4, 6, 8; 0 for a dense weight
    scales: str  # "block", "zero", "half", "k", "k6", "float"; "dense"
    groups: int  # scales of a block and row; 0 where one scale serves the whole row
    extra: bool  # a bias, or d and dmin
    offset: int  # the code of weight zero

    @property
    def name(self) -> str:
        """As tile tables and reports call it."""
        if self.bits == 0:
            return "dense"
        groups = f"{self.groups}" if self.scales == "float" else "" if self.groups else "-row"
        return f"w{self.bits}-{self.scales}{groups}{'-bias' if self.extra and self.scales[0] != 'k' else ''}"


def form_of(q: QTensor) -> Form:
    """The form of a T64 or dense weight."""
    if q.fmt in DENSE:
        return Form(0, "dense", 1, False, 0)
    bits = 6 if q.fmt in SIX_BITS else 8 if q.fmt in EIGHT_BITS else 4
    scale, extra = q.parts["scale"], "extra" in q.parts
    if q.fmt == "q6_k":
        return Form(bits, "k6", 8, True, 32)
    if q.fmt in ("q4_k", "q5_k"):
        return Form(bits, "k", 4, True, 0)
    if scale.ndim == 3:
        zero = scale.dtype == torch.int32
        return Form(bits, "zero" if zero else "block", int(scale.shape[1] > 1), False, _offset(q.fmt, zero))
    if scale.dtype == torch.int32:
        return Form(bits, "half", 4, extra, _offset(q.fmt, extra))
    return Form(bits, "float", scale.shape[2], extra, _offset(q.fmt, extra))


def _offset(fmt: str, extra: bool) -> int:
    return 0 if extra or fmt in EIGHT_BITS else 16 if fmt in SIX_BITS else 8


# ---- packing -----------------------------------------------------------------------------------------


def pack(q: QTensor, scheme: str | None = None) -> QTensor:
    """Storage ("rows" layout) -> the layout that q's device computes with.

    On a GPU T64, or with scheme "w8a8" its int8 form; on a CPU `cpu.pack` and its schemes.
    """
    if q.layout != "rows":
        raise ValueError(f"pack: weight {q.fmt} {list(q.shape)} is in layout {q.layout!r}, expected 'rows'")
    if not launch.runs_kernel(next(iter(q.parts.values()))):
        return cpu.pack(q, scheme)
    if scheme not in (None, "w8a8"):
        raise ValueError(f"pack: scheme {scheme!r} is one of the CPU's; on a GPU expected None or 'w8a8'")
    return pack_t64(q, "t64-int8" if scheme == "w8a8" else "t64")


def pack_t64(q: QTensor, layout: str = "t64") -> QTensor:
    """Storage ("rows" layout) -> T64 on the same device; dense weights stay row-major and are returned as they are.

    "t64-int8" takes symmetric "q8" of one scale a row. ValueError where groups are no multiple of 32 columns.
    """
    if q.layout != "rows":
        raise ValueError(f"pack_t64: weight {q.shape} is in layout {q.layout!r}, expected 'rows'")
    if q.fmt in DENSE:
        return q
    if layout not in ("t64", "t64-int8"):
        raise ValueError(f"pack_t64: unknown layout {layout!r}, expected 't64' or 't64-int8'")
    kept = {"perm": q.parts["perm"]} if "perm" in q.parts else {}
    q = replace(q, parts={name: part for name, part in q.parts.items() if name != "perm"})
    if layout == "t64-int8":
        codes, _, scale, bias = quant._unpack(q)
        return replace(q, layout=layout, parts=_pack_int8(q, codes, scale, bias) | kept)
    step = ROWS * max(1, CHUNK // (ROWS * q.shape[1]))
    pieces = [_pack_rows(q[start : start + step]) for start in range(0, q.shape[0], step)]
    packed, scales, biases = zip(*pieces, strict=True)
    parts = {name: torch.cat([piece[name] for piece in packed]) for name in packed[0]}
    bias = None if biases[0] is None else torch.cat(biases)
    return replace(q, layout=layout, parts=parts | _pack_scales(q, torch.cat(scales), bias) | kept)


def _pack_rows(q: QTensor) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """The packed codes of some row tiles, and their scales and biases [n, G]."""
    codes, offset, scale, bias = quant._unpack(q)
    return _pack_codes(q.fmt, codes, offset), scale, bias


def packed_nbytes(shape: tuple[int, int], fmt: str, group: int = 32, layout: str = "t64") -> int:
    """Bytes of a packed weight, exact, before anything is packed; a t64-glu one has shape (2 F, K).

    For GGUF formats, and symmetric "q4" and "q8" in whole groups (of a multiple of 128, or 0 for a row).
    """
    n, k = shape
    blocks = -(-k // COLS)
    tiles = 2 * -(-n // 2 // ROWS) if layout == "t64-glu" else -(-n // ROWS)
    codes = 2048 * (4 if fmt in EIGHT_BITS else 3 if fmt in SIX_BITS else 2)
    if fmt in ("q4", "q8"):
        if group % COLS:
            raise ValueError(f"packed_nbytes: {fmt} groups of {group}: expected a multiple of {COLS}, or 0")
        scales = 4 * ROWS * (blocks if 0 < group < k else 1)
    elif fmt in ("q4_k", "q5_k", "q6_k"):
        scales = 8 * ROWS * blocks + 4 * ROWS * -(-blocks // 2)
    else:
        scales = 8 * ROWS * blocks * (2 if fmt in ("q4_1", "q5_1") else 1)
    return tiles * (codes * blocks + scales)


def pack_gate_up(gate: QTensor, up: QTensor) -> QTensor:
    """Gate and up [F, K] -> one weight [2 F, K] of layout "t64-glu", for `swiglu_matmul`."""
    if gate.shape != up.shape or gate.fmt in DENSE or gate.fmt != up.fmt:
        raise ValueError(
            f"pack_gate_up: {gate.fmt} {gate.shape} and {up.fmt} {up.shape}: expected one quantised format and shape"
        )
    a, b = pack_t64(gate), pack_t64(up)
    if form_of(a) != form_of(b):
        raise ValueError(f"pack_gate_up: gate is {form_of(a).name} and up {form_of(b).name}, expected equal forms")
    perms = [q.parts["perm"].tolist() if "perm" in q.parts else None for q in (a, b)]
    if perms[0] != perms[1]:
        raise ValueError(f"pack_gate_up: gate and up {gate.shape} take their columns in different orders")
    parts = {
        name: part if name == "perm" else torch.stack((part, b.parts[name]), dim=1).flatten(0, 1)
        for name, part in a.parts.items()
    }
    n, k = gate.shape
    return replace(a, shape=(2 * n, k), segments=quant.num_segments(2 * n, k), layout="t64-glu", parts=parts)


def num_tiles(q: QTensor) -> int:
    """Row tiles in memory."""
    return q.parts["codes"].shape[0]


def unpack(q: QTensor) -> tuple[Tensor, int, Tensor, Tensor | None]:
    """The inverse of packing: codes [N, K] as stored, offset, scale [N, G], and [N, G] or None:

    the bias or, where the form is "zero", the integer zero point. G is B * groups of the form, or 1.
    """
    form, n = form_of(q), q.shape[0]
    codes, (scale, extra) = _unpack_codes(q, form), _unpack_scales(q, form)
    if q.layout == "t64-glu":
        codes, scale = _gate_then_up(codes, n), _gate_then_up(scale, n)
        extra = None if extra is None else _gate_then_up(extra, n)
    return codes[:n, : q.shape[1]], form.offset, scale[:n], None if extra is None else extra[:n]


def dequantize_t64(q: QTensor) -> Tensor:
    """W as float32 [N, K], with the roundings of `quant.dequantize`; a t64-glu weight gives gate rows, then up rows."""
    form = form_of(q)
    codes, offset, scale, extra = unpack(q)
    group = torch.arange(q.shape[1], device=codes.device) * form.groups // COLS
    w = codes.float() - offset
    if extra is not None and form.scales == "zero":
        w = (w - extra[:, group]) * scale[:, group]
    else:
        w = w * scale[:, group]
        w = w if extra is None else w + extra[:, group]
    perm = q.parts.get("perm")
    return w if perm is None else torch.empty_like(w).index_copy_(1, perm.long(), w)


def unpacked(q: QTensor) -> QTensor:
    """T64 -> layout "rows" of "q4" or "q8", with equal integers, scales and biases."""
    form, (_, k) = form_of(q), q.shape
    ints, offset, scale, extra = unpack(q)
    at = torch.arange(0, k, q.group, device=scale.device) * form.groups // COLS
    fmt = "q4" if form.bits == 4 else "q8"
    coded = quant.pack_nibbles(ints.to(torch.uint8)) if fmt == "q4" else (ints.to(torch.int16) - offset).to(torch.int8)
    parts = {"codes": coded, "scale": scale[:, at].contiguous()}
    if extra is not None:
        whole = form.scales == "zero"
        parts["zero_point" if whole else "zero"] = extra[:, at].to(torch.uint8 if whole else torch.float32).contiguous()
    if "perm" in q.parts:
        parts["perm"] = q.parts["perm"]
    return replace(q, fmt=fmt, layout="rows", parts=parts)


def _gate_then_up(rows: Tensor, n: int) -> Tensor:
    """Alternating tiles [T * 64, c] -> all gate rows, all up rows [n, c]."""
    return rows.unflatten(0, (-1, 2, ROWS)).transpose(0, 1).flatten(1, 2)[:, : n // 2].flatten(0, 1)


def _tiles(x: Tensor, fill: int) -> Tensor:
    """[N, K] -> [T, 64, B, 128], padded with fill."""
    n, k = x.shape
    x = F.pad(x, (0, -k % COLS, 0, -n % ROWS), value=fill)
    return x.unflatten(0, (-1, ROWS)).unflatten(2, (-1, COLS))


def _rows(x: Tensor) -> Tensor:
    """[T, B, C, 64] -> [T * 64, B * C]"""
    return x.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)


def _pack_codes(fmt: str, codes: Tensor, offset: int) -> dict[str, Tensor]:
    if fmt in EIGHT_BITS:
        halves = _tiles(codes, 0).unflatten(3, (2, 2, 32))  # [T, 64, B, half, byte, 32]
        return {"codes": _copied(halves.permute(0, 2, 3, 1, 5, 4)).view(torch.int16).squeeze(-1)}
    if fmt == "q6_k":
        codes = (codes + 32).to(torch.uint8)
        offset = 32
    tiles = _tiles(codes, offset).to(torch.int32)  # [T, 64, B, 128]
    if fmt not in SIX_BITS:
        return {"codes": _bits(tiles.unflatten(3, (4, 32)).permute(3, 0, 2, 1, 4), 4)}
    planes = tiles.unflatten(3, (8, 16)).permute(3, 0, 2, 1, 4)  # [8, T, B, 64, 16]
    low = torch.stack([_bits(planes[i : i + 4] & 15, 4) for i in (0, 4)], dim=2)
    return {"codes": low, "high": _bits(planes >> 4, 2)}


def _bits(planes: Tensor, width: int) -> Tensor:
    """int32 [p, ...] of width bits -> int16 [...], plane i in bits [width i, width (i + 1))."""
    word = planes[0]
    for i in range(1, planes.shape[0]):
        word = word | (planes[i] << (width * i))
    return word.to(torch.int16).contiguous()


def _unpack_codes(q: QTensor, form: Form) -> Tensor:
    """[T * 64, B * 128]"""
    codes = q.parts["codes"]
    if q.layout == "t64-int8":
        return codes.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    if form.bits == 8:
        halves = codes.unsqueeze(-1).view(torch.int8)  # [T, B, half, 64, 32, byte]
        return halves.permute(0, 3, 1, 2, 5, 4).flatten(2).flatten(0, 1)
    nibbles = torch.stack([(codes >> (4 * j)) & 15 for j in range(4)], dim=-2)  # [T, B, (2,) 64, 4, 32 or 16]
    if form.bits == 6:
        nibbles = nibbles.transpose(2, 3).flatten(3, 4)  # [T, B, 64, 8, 16]
        high = torch.stack([(q.parts["high"] >> (2 * p)) & 3 for p in range(8)], dim=-2)
        nibbles = nibbles | (high << 4)
    return nibbles.transpose(1, 2).flatten(2).flatten(0, 1)


def _pack_scales(q: QTensor, scale: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    if q.fmt == "q6_k":
        return _pack_k6(q)
    if q.fmt in ("q4_k", "q5_k"):
        return _pack_k(q)
    n, k = q.shape
    zero = q.parts.get("zero_point")
    group = q.group
    whole = q.fmt not in quant.GGUF and (group >= k or group % COLS == 0)
    if whole and zero is not None and _is_half(scale):
        words = torch.stack((scale.half().view(torch.int16), zero.bfloat16().view(torch.int16)), dim=-1)
        return {"scale": _by_block(_copied(words).view(torch.int32).squeeze(-1), group, q.shape)}
    if whole and bias is None:
        return {"scale": _by_block(scale, group, q.shape)}
    width = COLS if whole else 64 if group % 64 == 0 else 32
    if not whole and group % width:
        raise ValueError(f"pack_t64: {q.fmt} {q.shape} with groups of {group}: expected a multiple of 32 columns")
    column_group = torch.arange(0, k, width, device=scale.device) // group
    values = [t[:, column_group] for t in (scale, bias) if t is not None]
    if width < COLS and (q.fmt in quant.GGUF or all(_is_half(t) for t in values)):
        if width == 64:
            values = [t.repeat_interleave(2, dim=1)[:, : -(-k // 32)] for t in values]
        packed = [_half_words(_grouped(t.half(), 4, n)) for t in values]
    else:
        packed = [_grouped(t, COLS // width, n) for t in values]
    return dict(zip(("scale", "extra"), packed, strict=False))


def _by_block(values: Tensor, group: int, shape: tuple[int, int]) -> Tensor:
    """[N, G] -> [T, B, 64], or [T, 1, 64] where a row has one value."""
    n, k = shape
    if group < k:
        values = values[:, torch.arange(0, k, COLS, device=values.device) // group]
    return _grouped(values, 1, n).squeeze(2)


def _grouped(values: Tensor, groups: int, n: int) -> Tensor:
    """[N, B * groups or less] -> [T, B, groups, 64], padded with 0."""
    values = F.pad(values, (0, -values.shape[1] % groups, 0, -n % ROWS))
    return values.unflatten(0, (-1, ROWS)).unflatten(2, (-1, groups)).permute(0, 2, 3, 1).contiguous()


def _half_words(values: Tensor) -> Tensor:
    """float16 [T, B, 4, 64] -> int32 [T, B, 2, 64]"""
    pairs = _copied(values.unflatten(2, (2, 2)).transpose(3, 4))  # [T, B, 2, 64, 2]
    return pairs.view(torch.int32).squeeze(-1)


def _copied(x: Tensor) -> Tensor:
    """Contiguous, with the strides that a view of another dtype needs (`contiguous` may keep odd ones of size 1)."""
    return x.clone(memory_format=torch.contiguous_format)


def _is_half(x: Tensor) -> bool:
    return bool((x.half().float() == x).all())


def _pack_k(q: QTensor) -> dict[str, Tensor]:
    blocks = q.parts["blocks"].unflatten(1, (-1, quant.GGUF[q.fmt].nbytes))
    scales, mins = (t.to(torch.uint8).unflatten(-1, (2, 4)) for t in quant._k_scales(blocks[..., 4:16]))
    words = _copied(torch.stack((scales, mins), dim=3)).view(torch.int32)  # [N, B / 2, 2, 2, 1]
    supers = _copied(blocks[..., :4]).view(torch.int32).squeeze(-1)
    return {"scale": _grouped(words.flatten(1), 2, q.shape[0]), "extra": _grouped(supers, 1, q.shape[0]).squeeze(2)}


def _pack_k6(q: QTensor) -> dict[str, Tensor]:
    blocks = q.parts["blocks"].unflatten(1, (-1, 210))
    words = _copied(blocks[..., 192:208]).view(torch.int32)  # [N, B / 2, 4]
    supers = _copied(blocks[..., 208:210]).view(torch.int16).to(torch.int32) & 0xFFFF
    return {
        "scale": _grouped(words.flatten(1), 2, q.shape[0]),
        "extra": _grouped(supers.flatten(1), 1, q.shape[0]).squeeze(2),
    }


def _pack_int8(q: QTensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    if q.fmt != "q8" or q.group < q.shape[1] or bias is not None:
        raise ValueError(f"pack_t64: t64-int8 takes symmetric q8 of one scale a row, got {q.fmt} groups of {q.group}")
    tiles = _tiles(codes, 0).permute(0, 2, 1, 3).contiguous()
    return {"codes": tiles, "scale": _by_block(scale, q.group, q.shape)}


def _unpack_scales(q: QTensor, form: Form) -> tuple[Tensor, Tensor | None]:
    """[T * 64, B * groups]; k scales are multiplied out."""
    scale, extra = q.parts["scale"], q.parts.get("extra")
    if form.scales == "zero":
        words = _rows(scale.unsqueeze(2)).unsqueeze(-1).view(torch.int16)
        return words[..., 0].view(torch.float16).float(), words[..., 1].view(torch.bfloat16).float()
    if form.scales == "block":
        return _rows(scale.unsqueeze(2)), None
    if form.scales == "float":
        return _rows(scale), None if extra is None else _rows(extra)
    if form.scales == "half":
        return _rows(_halves(scale)).float(), None if extra is None else _rows(_halves(extra)).float()
    assert extra is not None
    signed = torch.int8 if form.scales == "k6" else torch.uint8
    subs = scale.unsqueeze(-1).view(signed).permute(0, 1, 2, 4, 3)  # [T, B, 2, 4, 64]
    supers = extra.unsqueeze(-1).view(torch.float16).float().repeat_interleave(2, dim=1)[:, : scale.shape[1]]
    d, dmin = supers[..., 0].unsqueeze(2), supers[..., 1].unsqueeze(2)
    if form.scales == "k6":
        return _rows(d * subs.flatten(2, 3).float()), None
    return _rows(d * subs[:, :, 0].float()), -_rows(dmin * subs[:, :, 1].float())


def _halves(words: Tensor) -> Tensor:
    """int32 [T, B, 2, 64] -> float16 [T, B, 4, 64]"""
    return words.unsqueeze(-1).view(torch.float16).transpose(3, 4).flatten(2, 3)
