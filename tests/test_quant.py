"""csrc_triton/quant.py: GGUF formats against the gguf package, ours against plain loops."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as GgmlType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from csrc_triton.cpu import matmul_cpu, pack
from csrc_triton.files import load_qtensors, save_qtensors
from csrc_triton.quant import (
    GGUF,
    QTensor,
    cat_rows,
    codes,
    dense,
    dequantize,
    from_gguf,
    interleave_rows,
    num_segments,
    permute_input,
    quantize,
    reference_matmul,
    take_rows,
    with_perm,
)

BLOCK_FORMATS = [fmt for fmt, form in GGUF.items() if form.group]
DENSE_FORMATS = [fmt for fmt, form in GGUF.items() if not form.group]
# where the float16 fields of a block start
F16_FIELDS = {fmt: (0,) if fmt in ("q4_0", "q5_0", "q8_0") else (0, 2) for fmt in BLOCK_FORMATS}
F16_FIELDS["q6_k"] = (208,)
SPECIAL_F16 = [0.0, -0.0, 2.0**-24, -(2.0**-24), 1e-6, -0.3, 1.0, 65504.0, -65504.0]
OURS = [("q4", True), ("q4", False), ("q8", True), ("q8", False)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_raw(fmt: str, n: int, k: int, seed: int = 0, special: bool = False) -> Tensor:
    """Random bytes, with finite float16 fields."""
    form, rng = GGUF[fmt], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, k // form.weights, form.nbytes), dtype=np.uint8)
    for at in F16_FIELDS[fmt]:
        if special:
            field = rng.choice(np.array(SPECIAL_F16), raw.shape[:2]).astype(np.float16)
        else:
            bits = rng.integers(0, 1 << 16, raw.shape[:2], dtype=np.uint16)
            field = np.where((bits & 0x7C00) == 0x7C00, bits ^ 0x4000, bits).view(np.float16)
        raw[..., at : at + 2] = field[..., None].view(np.uint8)
    return torch.from_numpy(raw.reshape(n, -1))


def oracle(raw: Tensor, fmt: str) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), GgmlType[fmt.upper()]))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def any_weight(fmt: str, n: int = 70, k: int = 256, seed: int = 0) -> QTensor:
    """A weight of any format; of ours, one whose last group is short where that may be."""
    w = torch.randn(n, k, generator=seeded(seed))
    if fmt in BLOCK_FORMATS:
        return from_gguf(random_raw(fmt, n, k, seed), fmt, (n, k))
    if fmt in DENSE_FORMATS:
        return dense(w.to({"f32": torch.float32, "f16": torch.float16}.get(fmt, torch.bfloat16)))
    if fmt.endswith("act-order"):
        return with_perm(quantize(w, fmt[:2], 64), torch.randperm(k, generator=seeded(k)).int())
    q = quantize(w, fmt[:2], group=96, symmetric=not fmt.endswith("asymmetric"))
    if fmt.endswith("zero point"):
        points = torch.randint(0, 17, q.parts["scale"].shape, generator=seeded(seed)).to(torch.uint8)
        return replace(q, parts={**q.parts, "zero_point": points})
    return q


ANY_FORMAT = [*GGUF, "q4", "q4 asymmetric", "q4 zero point", "q4 act-order", "q8", "q8 asymmetric", "q8 act-order"]


# GGUF


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_random_blocks_dequantize_like_the_gguf_package(fmt: str, special: bool) -> None:
    raw = random_raw(fmt, 97, 768, special=special)
    q = from_gguf(raw, fmt, (97, 768))
    assert (q.fmt, q.group, q.layout) == (fmt, GGUF[fmt].group, "rows")
    assert same_bits(dequantize(q), oracle(raw, fmt))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_every_byte_value_in_every_place(fmt: str) -> None:
    form = GGUF[fmt]
    raw = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, form.nbytes)
    for at in F16_FIELDS[fmt]:
        raw[:, at : at + 2] = torch.tensor([-0.37], dtype=torch.float16).view(torch.uint8)
    if fmt == "q6_k":
        # every pair of high bits with every nibble
        raw[:, 128:192] = (raw[:, 128:192] << 4) | (raw[:, 128:192] >> 4)
    q = from_gguf(raw, fmt, (256, form.weights))
    assert same_bits(dequantize(q), oracle(raw, fmt))
    assert codes(q).codes.unique().numel() == {"4": 16, "5": 32, "6": 64, "8": 256}[fmt[1]]


@settings(max_examples=25, deadline=None)
@given(fmt=st.sampled_from(BLOCK_FORMATS), n=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_any_bytes_dequantize_like_the_gguf_package(fmt: str, n: int, seed: int) -> None:
    raw = random_raw(fmt, n, 512, seed)
    assert same_bits(dequantize(from_gguf(raw.flatten(), fmt, (n, 512))), oracle(raw, fmt))


@pytest.mark.parametrize("fmt", DENSE_FORMATS)
def test_float_tensors_are_viewed_not_copied(fmt: str) -> None:
    weight = any_weight(fmt, 3, 5).parts["weight"]
    raw = weight.view(torch.uint8)
    q = from_gguf(raw, fmt, (3, 5))
    assert (q.fmt, q.group) == (fmt, 0)
    assert q.parts["weight"].data_ptr() == raw.data_ptr()
    assert same_bits(dequantize(q), oracle(raw, fmt))
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), raw.flatten()])[1:]
    assert same_bits(dequantize(from_gguf(shifted, fmt, (3, 5))), weight.float())


def test_blocks_are_kept_as_they_are() -> None:
    raw = random_raw("q4_k", 2, 512)
    q = QTensor.from_gguf(raw, "Q4_K", (2, 512))
    assert q.parts["blocks"].data_ptr() == raw.data_ptr()
    assert torch.equal(q.parts["blocks"], raw)


@pytest.mark.parametrize("fmt", GGUF)
def test_a_type_goes_by_name_or_number(fmt: str) -> None:
    block = GGUF[fmt]
    raw = torch.zeros(1, block.nbytes, dtype=torch.uint8)
    assert block.ggml_type == GgmlType[fmt.upper()]
    assert (block.weights, block.nbytes) == gguf.GGML_QUANT_SIZES[GgmlType[fmt.upper()]]
    for name in (fmt, fmt.upper(), block.ggml_type, GgmlType[fmt.upper()]):
        assert from_gguf(raw, name, (1, block.weights)).fmt == fmt


@pytest.mark.slow
@pytest.mark.demo_model
def test_a_real_file_dequantizes_like_the_gguf_package(demo_model_path: Path) -> None:
    tensors = [t for t in gguf.GGUFReader(demo_model_path).tensors if len(t.shape) == 2]
    smallest = {t.tensor_type: t for t in sorted(tensors, key=lambda t: -t.n_elements)}
    for tensor in smallest.values():
        k, n = (int(size) for size in tensor.shape)
        raw = torch.from_numpy(np.array(tensor.data[:512]))
        n = min(n, 512)
        q = from_gguf(raw, tensor.tensor_type, (n, k))
        assert same_bits(dequantize(q), oracle(raw, tensor.tensor_type.name))


# quantize


def round_out(scale: Tensor) -> Tensor:
    """The nearest float16 number that is no smaller in magnitude, if float16 reaches that far."""
    if not 2.0**-24 <= abs(scale) <= 65504:
        return scale
    half = np.float16(scale.item())
    if abs(float(half)) < abs(scale):
        half = np.nextafter(half, np.float16(math.copysign(np.inf, scale.item())))
    return torch.tensor(float(half))


def plain_quantize(w: Tensor, fmt: str, group: int, symmetric: bool) -> Tensor:
    """The rule in loops, one group at a time."""
    out = torch.empty(w.shape)
    for row, result in zip(w, out, strict=True):
        for start in range(0, len(row), group):
            x = row[start : start + group]
            result[start : start + group] = plain_group(x, x.min(), x.max(), fmt, symmetric, group < min(128, len(row)))
    return out


def plain_group(x: Tensor, low: Tensor, high: Tensor, fmt: str, symmetric: bool, is_half: bool) -> Tensor:
    """The weights x rounded in the range low..high."""
    zero, least, most = torch.tensor(0.0), -8, 7
    if not symmetric:
        least, most = (0, 15) if fmt == "q4" else (-128, 127)
        scale = (high - low) / (most - least)
        zero = low - least * scale
    elif fmt == "q8":
        scale, least, most = torch.max(high, -low) / 127, -127, 127
    else:
        up, down = torch.max(high / 7, low / -8), torch.max(high / 8, low / -7)
        scale = up if up <= down else -down
    if is_half and symmetric:
        scale = round_out(scale)
    if scale == 0:
        return zero.expand_as(x)
    return torch.round((x - zero) / scale).clamp(least, most) * scale + zero


@pytest.mark.parametrize(("fmt", "symmetric"), OURS)
@pytest.mark.parametrize("k", [1, 33, 65, 128, 200])
@pytest.mark.parametrize("group", [32, 64, 128, None])
def test_quantize_follows_the_plain_rule(fmt: str, symmetric: bool, k: int, group: int | None) -> None:
    w = torch.randn(5, k, generator=seeded(k))
    w[1] = 0
    w[2, : k // 2] = 0.25
    q = quantize(w, fmt, group, symmetric)
    size = min(group or k, k)
    num_groups = -(-k // size)
    assert (q.fmt, q.shape, q.group, q.layout) == (fmt, (5, k), size, "rows")
    assert q.segments == num_segments(5, k)
    assert q.parts["scale"].shape == (5, num_groups)
    assert q.parts["codes"].shape == (5, -(-k // 2) if fmt == "q4" else k)
    assert ("zero" in q.parts) == (not symmetric)
    assert torch.equal(dequantize(q), plain_quantize(w, fmt, size, symmetric))


@pytest.mark.parametrize(("fmt", "symmetric"), OURS)
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_no_weight_moves_by_more_than_half_a_step(fmt: str, symmetric: bool, group: int, shift: float) -> None:
    w = torch.randn(64, 200, generator=seeded()) ** 3 + shift
    q = quantize(w, fmt, group, symmetric)
    step = q.parts["scale"].abs().repeat_interleave(q.group, 1)[:, :200]
    eps = 4 * torch.finfo(torch.float32).eps * w.abs().amax()
    assert ((dequantize(q) - w).abs() <= step / 2 + eps).all()
    again = quantize(dequantize(q), fmt, group, symmetric)
    assert (dequantize(again) - dequantize(q)).abs().max() <= 2 * eps


def test_symmetric_q4_reaches_both_ends_with_the_smallest_step() -> None:
    w = torch.tensor([[-8.0, 7, 3, 0], [8, -7, 3, 0], [-7, 7, 3, 0], [7, -7, 0, 0]])
    q = quantize(w, "q4", None)
    assert torch.equal(q.parts["scale"].flatten(), torch.tensor([1.0, -1, 1, 1]))
    assert torch.equal(dequantize(q), w)


def test_ties_round_to_even() -> None:
    w = torch.tensor([[127.0, 0.5, 1.5, -0.5, -1.5, 2.5]])
    assert quantize(w, "q8", None).parts["codes"].tolist() == [[127, 0, 2, 0, -2, 2]]


@pytest.mark.parametrize("fmt", ["q4", "q8"])
@pytest.mark.parametrize("group", [1, 32, 64, 127])
def test_symmetric_scales_of_small_groups_are_float16_numbers(fmt: str, group: int) -> None:
    w = (torch.rand(40, 256, generator=seeded()) + 0.1) * torch.logspace(-2, 4, 40)[:, None]
    w[:, ::3] *= -1
    scale = quantize(w, fmt, group).parts["scale"]
    assert torch.equal(scale, scale.half().float())
    assert (scale == 0).sum() == 0


@pytest.mark.parametrize(("fmt", "steps"), [("q4", 7), ("q8", 127)])
def test_float16_scales_are_rounded_away_from_zero_and_never_to_zero_or_infinity(fmt: str, steps: int) -> None:
    halves = torch.tensor([2.0**-24, 3 * 2.0**-24, 2.0**-14, 0.1, 1.0, 1234.0, 65504.0]).half().float()
    want = torch.cat([halves * (1 - 2.0**-20), halves, halves[:-1] * (1 + 2.0**-20), torch.tensor([1e-9, 1e5, 2e36])])
    w = torch.zeros(len(want), 4)
    w[:, 0], w[:, 1] = want * steps, -want * steps
    scale = quantize(w, fmt, 2).parts["scale"][:, 0]
    assert torch.equal(scale, torch.stack([round_out(s) for s in (w[:, 0] / steps)]))
    assert (scale >= w[:, 0] / steps).all() and (scale > 0).all() and scale.isfinite().all()
    assert torch.equal(quantize(-w, fmt, 2).parts["scale"][:, 0].abs(), scale)


@pytest.mark.parametrize("fmt", ["q4", "q8"])
@pytest.mark.parametrize(("k", "group"), [(256, 128), (200, None), (96, 96), (33, 64)])
def test_scales_of_whole_rows_and_wide_groups_are_not_rounded(fmt: str, k: int, group: int | None) -> None:
    w = torch.randn(30, k, generator=seeded())
    scale = quantize(w, fmt, group).parts["scale"]
    assert (scale != scale.half().float()).any()


def test_asymmetric_q8_reaches_both_ends_from_the_middle() -> None:
    q = quantize(torch.tensor([[0.0, 255, 1, 127.5, 128.5]]), "q8", None, symmetric=False)
    assert q.parts["codes"].tolist() == [[-128, 127, -127, 0, 0]]
    assert (q.parts["scale"].item(), q.parts["zero"].item()) == (1.0, 128.0)


def test_the_even_column_is_the_low_nibble() -> None:
    w = torch.tensor([[0.0, 1, 15, 2, 5]])
    q = quantize(w, "q4", None, symmetric=False)
    assert q.parts["codes"].tolist() == [[0x10, 0x2F, 0x05]]
    assert q.parts["zero"].tolist() == [[0.0]]
    odd = quantize(torch.tensor([[7.0, -7, 1]]), "q4", None)
    assert odd.parts["codes"].tolist() == [[0x1F, 0x89]]


@pytest.mark.parametrize(("fmt", "symmetric"), OURS)
def test_zero_groups_have_scale_zero(fmt: str, symmetric: bool) -> None:
    w = torch.zeros(3, 70)
    w[1, 40] = 1e-45
    q = quantize(w, fmt, 32, symmetric)
    assert torch.equal(q.parts["scale"], torch.zeros(3, 3))
    assert torch.equal(codes(q).codes, torch.full_like(codes(q).codes, codes(q).codes[0, 0]))
    assert torch.equal(dequantize(q), torch.zeros(3, 70))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("fmt", "symmetric"), OURS)
def test_quantize_takes_any_float_and_any_stride(fmt: str, symmetric: bool, dtype: torch.dtype) -> None:
    w = torch.randn(65, 30, generator=seeded()).to(dtype)
    want = dequantize(quantize(w.T.float().contiguous(), fmt, 32, symmetric))
    assert torch.equal(dequantize(quantize(w.T, fmt, 32, symmetric)), want)


def test_large_weights_are_worked_on_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(23, 100, generator=seeded())
    whole = [quantize(w, fmt, 32, symmetric) for fmt, symmetric in OURS]
    monkeypatch.setattr("csrc_triton.quant.CHUNK", 250)
    for q, (fmt, symmetric) in zip(whole, OURS, strict=True):
        chunked = quantize(w, fmt, 32, symmetric)
        assert all(torch.equal(q.parts[name], chunked.parts[name]) for name in q.parts)
        assert torch.equal(codes(q).codes, codes(chunked).codes)
        assert torch.equal(dequantize(q), plain_quantize(w, fmt, 32, symmetric))


# clip_search


def group_errors(q: QTensor, w: Tensor) -> Tensor:
    off = F.pad((dequantize(q).double() - w.double()).square(), (0, -w.shape[1] % q.group))
    return off.unflatten(1, (-1, q.group)).sum(-1)


@pytest.mark.parametrize(("fmt", "symmetric"), OURS)
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_a_search_never_adds_to_the_error_of_a_group(
    fmt: str, symmetric: bool, group: int | None, shift: float
) -> None:
    w = torch.randn(40, 200, generator=seeded()) ** 3 + shift
    w[3] = 0
    w[4, 40:] = 0.25
    plain, searched = (quantize(w, fmt, group, symmetric, clip_search=steps) for steps in (0, 12))
    before, after = group_errors(plain, w), group_errors(searched, w)
    assert (after <= before * (1 + 1e-12)).all()
    assert after.sum() < before.sum()
    again = quantize(w, fmt, group, symmetric, clip_search=12)
    assert all(torch.equal(again.parts[name], part) for name, part in searched.parts.items())
    if symmetric and group in (32, 64):
        assert torch.equal(searched.parts["scale"], searched.parts["scale"].half().float())


@pytest.mark.parametrize(("fmt", "symmetric"), OURS)
def test_a_search_keeps_the_best_of_the_ranges(fmt: str, symmetric: bool) -> None:
    w, steps = torch.randn(6, 80, generator=seeded()) ** 3, 10
    q = quantize(w, fmt, 32, symmetric, clip_search=steps)
    cuts = [0.5 * (i / steps) ** 2 for i in range(steps + 1)]
    for row, errors in zip(w, group_errors(q, w), strict=True):
        for x, error in zip(row.split(32), errors, strict=True):
            low, high = x.min(), x.max()

            def loss(low: Tensor, high: Tensor, x: Tensor = x) -> float:
                return (plain_group(x, low, high, fmt, symmetric, True).double() - x).square().sum().item()

            if symmetric:
                least = min(loss(low - low * cut, high - high * cut) for cut in cuts)
            else:
                span = high - low
                start = min((low + span * cut for cut in cuts), key=lambda low: loss(low, high))
                least = min(loss(start, high - (high - start) * cut) for cut in cuts)
            assert error.item() == pytest.approx(least, rel=1e-9)


def test_a_search_works_in_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(23, 100, generator=seeded())
    whole = [quantize(w, fmt, 32, symmetric, clip_search=5) for fmt, symmetric in OURS]
    monkeypatch.setattr("csrc_triton.quant.CHUNK", 250)
    for q, (fmt, symmetric) in zip(whole, OURS, strict=True):
        chunked = quantize(w, fmt, 32, symmetric, clip_search=5)
        assert all(torch.equal(q.parts[name], chunked.parts[name]) for name in q.parts)


# codes


@pytest.mark.parametrize("fmt", [fmt for fmt in ANY_FORMAT if fmt not in DENSE_FORMATS])
def test_codes_times_scale_plus_bias_is_the_weight(fmt: str) -> None:
    q = any_weight(fmt)
    view = codes(q)
    assert view.codes.shape == q.shape
    assert view.group == q.group
    spread = [None, None]
    for i, per_group in enumerate((view.scale, view.bias)):
        if per_group is not None:
            assert per_group.dtype == torch.float32
            assert per_group.shape == (q.shape[0], -(-q.shape[1] // q.group))
            spread[i] = per_group.repeat_interleave(q.group, 1)[:, : q.shape[1]]
    scale, bias = spread
    w = view.codes.float() * scale
    # the largest term of the sum decides how far two roundings can part
    size = w.abs() if bias is None else torch.maximum(w.abs(), bias.abs())
    w = w if bias is None else w + bias
    stored = permute_input(dequantize(q), q)
    assert ((w - stored).abs() <= torch.finfo(torch.float32).eps * size).all()
    if fmt in BLOCK_FORMATS:
        assert torch.equal(w, dequantize(q))


def test_codes_of_each_format_have_their_range() -> None:
    fours = ("q4", "q4 asymmetric", "q4 zero point", "q4_0", "q4_1", "q4_k")
    ranges = dict.fromkeys(fours, (torch.uint8, 0, 15))
    ranges |= dict.fromkeys(("q5_0", "q5_1", "q5_k"), (torch.uint8, 0, 31))
    ranges |= {"q6_k": (torch.int8, -32, 31), "q8_0": (torch.int8, -128, 127)}
    ranges |= {"q8": (torch.int8, -127, 127), "q8 asymmetric": (torch.int8, -128, 127)}
    for fmt, (dtype, low, high) in ranges.items():
        view = codes(any_weight(fmt))
        assert (view.codes.dtype, int(view.codes.min()), int(view.codes.max())) == (
            dtype,
            low,
            high,
        )
        assert (view.bias is None) == (fmt in ("q6_k", "q8_0", "q8")), fmt


# rows


@pytest.mark.parametrize("fmt", ANY_FORMAT)
def test_taken_rows_are_those_of_the_whole(fmt: str) -> None:
    q = any_weight(fmt)
    whole = dequantize(q)
    for ids in ([0], [69, 3, 3, 0], list(range(70)) * 3):
        assert torch.equal(take_rows(q, ids), whole[ids])
        assert torch.equal(take_rows(q, torch.tensor(ids, dtype=torch.int32)), whole[ids])
    assert take_rows(q, []).shape == (0, 256)


@pytest.mark.parametrize("fmt", ANY_FORMAT)
def test_a_slice_of_rows_is_a_view_with_the_segments_of_the_whole(fmt: str) -> None:
    q = any_weight(fmt, 300, 512)
    part = q[37:-3]
    assert part.shape == (260, 512)
    assert part.segments == q.segments == num_segments(300, 512)
    assert num_segments(1, 512) == q.rows(slice(5, 6)).segments
    assert torch.equal(dequantize(part), dequantize(q)[37:-3])
    assert all(
        part.parts[name].untyped_storage().data_ptr() == q.parts[name].untyped_storage().data_ptr() for name in q.parts
    )


def test_a_slice_keeps_segments_its_own_shape_would_not_have() -> None:
    q = dense(torch.zeros(8192, 1024, dtype=torch.bfloat16))
    assert (q.segments, q[:64].segments, num_segments(64, 1024)) == (2, 2, 8)


def test_a_joined_weight_has_the_segments_of_its_own_shape() -> None:
    half = dense(torch.zeros(4096, 512, dtype=torch.bfloat16))
    joined = (cat_rows([half, half]), interleave_rows(half, half))
    assert (half.segments, *(q.segments for q in joined)) == (4, 2, 2)


@pytest.mark.parametrize("fmt", ANY_FORMAT)
def test_joined_rows_are_one_weight(fmt: str) -> None:
    parts = [any_weight(fmt, n, 256, seed=n) for n in (70, 1, 33)]
    q = cat_rows(parts)
    assert q.shape == (104, 256)
    assert q.segments == num_segments(104, 256)
    assert torch.equal(dequantize(q), torch.cat([dequantize(part) for part in parts]))
    once = sum(part.parts["perm"].nbytes for part in parts[1:] if "perm" in part.parts)
    assert q.nbytes == sum(part.nbytes for part in parts) - once


@pytest.mark.parametrize("fmt", ANY_FORMAT)
@pytest.mark.parametrize("n", [64, 128, 150])
def test_interleaved_rows_alternate_in_blocks(fmt: str, n: int) -> None:
    a, b = any_weight(fmt, n, seed=1), any_weight(fmt, n, seed=2)
    blocks = zip(dequantize(a).split(64), dequantize(b).split(64), strict=True)
    q = interleave_rows(a, b)
    assert torch.equal(dequantize(q), torch.cat([block for pair in blocks for block in pair]))
    assert (q.shape, q.segments) == ((2 * n, 256), num_segments(2 * n, 256))
    rows = torch.arange(2 * n)
    order = torch.cat([rows[:n].view(-1, 1), rows[n:].view(-1, 1)], dim=1).flatten()
    w = torch.cat([dequantize(a), dequantize(b)])
    assert torch.equal(dequantize(interleave_rows(a, b, block=1)), w[order])


def test_an_integer_zero_point_is_taken_off_before_the_scale() -> None:
    q = any_weight("q4 zero point", 9, 200)
    ints, points = codes(q).codes.double(), q.parts["zero_point"].double().repeat_interleave(96, 1)[:, :200]
    scale = q.parts["scale"].double().repeat_interleave(96, 1)[:, :200]
    # exact in float64, so this rounds once
    assert torch.equal(dequantize(q), ((ints - points) * scale).float())


# act-order


def test_columns_of_groups_are_put_back_in_their_places() -> None:
    w, perm = torch.randn(70, 256, generator=seeded()), torch.randperm(256, generator=seeded(1)).int()
    stored = quantize(w[:, perm.long()], "q4", 64)
    q = with_perm(stored, perm)
    whole = torch.empty(70, 256)
    whole[:, perm.long()] = dequantize(stored)
    assert torch.equal(dequantize(q), whole)
    assert (whole - w).abs().max() < (dequantize(stored) - w).abs().max()
    assert q.nbytes == stored.nbytes + 4 * 256
    x = torch.randn(3, 256, generator=seeded(2))
    assert torch.equal(permute_input(x, q), x[:, perm.long()])
    assert permute_input(x, stored) is x
    assert torch.equal(permute_input(x[0], q), x[0, perm.long()])
    torch.testing.assert_close(reference_matmul(permute_input(x, q), stored), reference_matmul(x, q))


@pytest.mark.parametrize("scheme", ["f32", "i8", "i4", "w8a8", None])
@pytest.mark.parametrize("fmt", ["q4", "q8"])
def test_a_packed_weight_takes_columns_in_the_order_of_its_input(fmt: str, scheme: str | None) -> None:
    w, perm = torch.randn(64, 256, generator=seeded()), torch.randperm(256, generator=seeded(1)).int()
    q = with_perm(quantize(w[:, perm.long()], fmt, 32 if fmt == "q4" else None), perm)
    packed, x = pack(q, scheme), torch.randn(5, 256, generator=seeded(2))
    assert ("perm" in packed.parts) == (packed.layout == "cpu-i4" and fmt == "q4")
    y, want = matmul_cpu(x, packed).double(), reference_matmul(x, q)
    assert (y - want).norm() < (0.15 if scheme == "i4" and fmt == "q8" else 0.02) * want.norm()
    rows = replace(packed, layout=f"{packed.layout}-rows")
    torch.testing.assert_close(matmul_cpu(x, rows), y.float())


@pytest.mark.parametrize("scheme", ["f32", "i8", "w8a8", None])
def test_asymmetric_q8_is_never_taken_for_symmetric(scheme: str | None) -> None:
    q = quantize(torch.randn(64, 128, generator=seeded()) + 2, "q8", None, symmetric=False)
    packed, x = pack(q, scheme), torch.randn(5, 128, generator=seeded(2))
    assert scheme is not None or packed.layout in ("cpu-f16", "cpu-f32")
    want = reference_matmul(x, q)
    assert (matmul_cpu(x, packed) - want).norm() < 0.02 * want.norm()


# files


@pytest.mark.parametrize("fmt", ANY_FORMAT)
def test_saved_weights_come_back_bit_for_bit(fmt: str, tmp_path: Path) -> None:
    q = any_weight(fmt, 70, 512)
    weights = {"whole": q, "a.part": q[3:9], "b": q[9:40], "": any_weight(fmt, 2, 512)}
    save_qtensors(tmp_path / "weights", weights)
    loaded = load_qtensors(tmp_path / "weights")
    assert list(loaded) == list(weights)
    for name, q in weights.items():
        got = loaded[name]
        assert replace(got, parts={}).__dict__ == replace(q, parts={}).__dict__
        assert list(got.parts) == list(q.parts)
        for part, tensor in q.parts.items():
            assert got.parts[part].dtype == tensor.dtype
            assert torch.equal(got.parts[part].view(torch.uint8), tensor.contiguous().view(torch.uint8))
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


@pytest.mark.parametrize("scheme", ["f32", "i8", "i4"])
def test_a_packed_layout_of_tensors_can_be_saved(scheme: str, tmp_path: Path) -> None:
    w = torch.randn(64, 128, generator=seeded())
    q = pack(with_perm(quantize(w, "q4", 32), torch.arange(127, -1, -1).int()), scheme)
    save_qtensors(tmp_path / "weights", {"w": q})
    got, x = load_qtensors(tmp_path / "weights")["w"], torch.randn(3, 128, generator=seeded())
    assert (got.layout, got.parts.keys()) == (f"cpu-{scheme}", q.parts.keys())
    assert torch.equal(matmul_cpu(x, got), matmul_cpu(x, q))


def test_loaded_weights_do_not_follow_the_file(tmp_path: Path) -> None:
    path, first, second = tmp_path / "weights", any_weight("q4", seed=1), any_weight("q4", seed=2)
    save_qtensors(path, {"w": first})
    loaded = load_qtensors(path)["w"]
    # as torch aligns its own memory, which a place in a file need not be
    assert all(part.data_ptr() % 64 == 0 for part in loaded.parts.values())
    save_qtensors(path, {"w": second})
    assert torch.equal(dequantize(loaded), dequantize(first))
    assert torch.equal(dequantize(load_qtensors(path)["w"]), dequantize(second))


@pytest.mark.parametrize("scheme", ["f32", "i8", "i4"])
def test_packed_parts_of_another_size_are_refused(scheme: str, tmp_path: Path) -> None:
    """torch reads past the end of some of them."""
    path, q = tmp_path / "weights", pack(quantize(torch.randn(64, 128, generator=seeded()), "q4", 32), scheme)
    for name, part in q.parts.items():
        for bad in (part[:0], part[: part.shape[0] // 2], part.flatten()[:-1], part.double()):
            save_qtensors(path, {"w": q})
            with safe_open(path, "pt") as file:
                metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            save_file(tensors | {f"w.{name}": bad.contiguous()}, path, metadata)
            with pytest.raises(ValueError, match=rf"'{name}' is torch\.\w+ \[.*\], expected"):
                load_qtensors(path)


def test_packed_shapes_that_torch_reads_past_are_refused(tmp_path: Path) -> None:
    parts = {"codes": torch.zeros(4, 96, dtype=torch.int8), "scale": torch.zeros(4, dtype=torch.bfloat16)}
    q = QTensor("q8", (4, 96), 96, 1, "cpu-i8", parts)
    with pytest.raises(ValueError, match="layout 'cpu-i8' needs multiples of 1 rows and 64 columns"):
        save_qtensors(tmp_path / "weights", {"w": q})


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    with pytest.raises(OSError):
        save_qtensors(tmp_path / "weights", {"w": any_weight("q4")})
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_panels_that_torch_cannot_see_are_not_saved_or_moved(tmp_path: Path) -> None:
    q = QTensor("bf16", (64, 64), 0, 1, "cpu-f16", {"panels": object()})
    with pytest.raises(ValueError, match=r"layout 'cpu-f16': cannot save 'w' with its 'panels', which is no tensor"):
        save_qtensors(tmp_path / "weights", {"w": q})
    with pytest.raises(ValueError, match="cannot move 'panels', which is no tensor"):
        q.to("cpu")
    assert not list(tmp_path.iterdir())


def test_contradictions_are_not_saved(tmp_path: Path) -> None:
    q = any_weight("q4", 4, 8)
    for wrong, message in (
        (
            replace(q, shape=(5, 8)),
            r"'w', q4 \(5, 8\): 'scale' is torch.float32 \[4, 1\], expected torch.float32 \[5, 1\]",
        ),
        (replace(q, fmt="q8"), r"'codes' is torch.uint8 \[4, 4\], expected torch.int8 \[4, 8\]"),
        (replace(q, parts={"codes": q.parts["codes"]}), r"parts \['codes'\], expected \['codes', 'scale'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            save_qtensors(tmp_path / "weights", {"w": wrong})
    assert not list(tmp_path.iterdir())


def spoil(path: Path, **changes: object) -> None:
    """Rewrite a saved file with other values in the metadata of its weight; None removes one."""
    with safe_open(path, "pt") as file:
        saved = json.loads(file.metadata()["qtensors"])
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    entry = {key: value for key, value in (saved["weights"]["w"] | changes).items() if value is not None}
    save_file(tensors, path, {"qtensors": json.dumps(saved | {"weights": {"w": entry}})})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": None}, "weight 'w' has no 'fmt'"),
        ({"fmt": "q5"}, "weight 'w' has 'fmt' 'q5'"),
        ({"fmt": ["q4"]}, r"weight 'w' has 'fmt' \['q4'\]"),
        ({"fmt": "q8"}, r"'codes' is torch.uint8 \[70, 128\], expected torch.int8 \[70, 256\]"),
        ({"fmt": "q4_0"}, "group 64, expected 32"),
        ({"fmt": "f32", "group": 0}, "act-order needs groups"),
        ({"shape": [70]}, r"weight 'w' has 'shape' \[70\]"),
        ({"shape": [70, 0]}, "has 'shape'"),
        ({"shape": [70, 256.0]}, "has 'shape'"),
        ({"shape": [71, 256]}, r"'scale' is torch.float32 \[70, 4\], expected torch.float32 \[71, 4\]"),
        ({"shape": [70, 128], "segments": 1}, r"perm must be int32 \[128\], got torch.int32 \[256\]"),
        ({"group": True}, "has 'group' True"),
        ({"group": 0}, "act-order needs groups"),
        ({"group": 96}, "the last of 96 columns is short"),
        ({"group": 128}, r"'scale' is torch.float32 \[70, 4\], expected torch.float32 \[70, 2\]"),
        ({"segments": 0}, "has 'segments' 0"),
        ({"segments": 3}, "3 segments, expected at most 2"),
        ({"layout": 1}, "has 'layout' 1"),
        ({"parts": []}, r"has 'parts' \[\]"),
        ({"parts": ["codes", "codes", "scale", "perm"]}, "has 'parts'"),
        ({"parts": ["codes", "scale", "perm", "zero"]}, "part 'zero' is missing"),
        ({"parts": ["codes", "scale"]}, "tensor 'w.perm' belongs to no weight"),
        ({"parts": ["codes", "perm"]}, r"parts \['codes'\], expected \['codes', 'scale'\]"),
    ],
)
def test_damaged_metadata_is_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_qtensors(path, {"w": any_weight("q4 act-order")})
    spoil(path)
    assert torch.equal(dequantize(load_qtensors(path)["w"]), dequantize(any_weight("q4 act-order")))
    spoil(path, **changes)
    with pytest.raises(ValueError, match=message):
        load_qtensors(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "metadata 'qtensors' is missing: not a file of save_qtensors"),
        ({"format": "pt"}, "metadata 'qtensors' is missing"),
        ({"qtensors": "{"}, "metadata 'qtensors' is not readable as JSON"),
        ({"qtensors": "[]"}, "metadata 'qtensors' holds no weights"),
        ({"qtensors": '{"version": 2, "weights": {}}'}, "is of version 2, expected 1"),
        ({"qtensors": '{"weights": {}}'}, "is of version None, expected 1"),
        ({"qtensors": '{"version": 1, "weights": {"w": 3}}'}, "weight 'w' has no 'fmt'"),
        ({"qtensors": '{"version": 1, "weights": {}}'}, "tensor 'w.codes' belongs to no weight"),
    ],
)
def test_foreign_files_are_refused(metadata: dict[str, str] | None, message: str, tmp_path: Path) -> None:
    save_file({"w.codes": torch.zeros(2)}, tmp_path / "weights", metadata)
    with pytest.raises(ValueError, match=message):
        load_qtensors(tmp_path / "weights")


def test_cut_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_qtensors(path, {"w": any_weight("q4")})
    whole = path.read_bytes()
    for size in (0, 7, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="no sound safetensors file"):
            load_qtensors(path)
    with pytest.raises(FileNotFoundError):
        load_qtensors(tmp_path / "absent")


# numbers


@pytest.mark.parametrize(
    ("n", "k", "segments"),
    [
        (4096, 4096, 4),
        (28672, 4096, 1),
        (576, 1536, 12),
        (960, 576, 5),
        (49152, 576, 1),
        (64, 128, 1),
        (1, 1, 1),
        (64, 129, 2),
        (1024, 4096, 16),  # 16.5, to even
        (3072, 4096, 6),  # 5.5, to even
        (33792, 4096, 1),  # 0.5 rounds to 0
    ],
)
def test_num_segments(n: int, k: int, segments: int) -> None:
    assert num_segments(n, k) == segments


def test_nbytes_is_exact() -> None:
    w = torch.zeros(10, 65)
    assert quantize(w, "q4", 32).nbytes == 10 * (33 + 4 * 3)
    assert quantize(w, "q4", 32, symmetric=False).nbytes == 10 * (33 + 8 * 3)
    assert quantize(w, "q8", None).nbytes == 10 * (65 + 4)
    assert dense(w.half()).nbytes == 10 * 65 * 2
    assert any_weight("q6_k", 3, 512).nbytes == 3 * 2 * 210
    assert any_weight("q4_0", 8, 64)[2:5].nbytes == 3 * 2 * 18
    assert quantize(w, "q8", 32, symmetric=False).nbytes == 10 * (65 + 8 * 3)
    assert any_weight("q4 zero point", 10, 192).nbytes == 10 * (96 + 5 * 2)
    assert any_weight("q4 act-order", 10, 128).nbytes == 10 * (64 + 4 * 2) + 4 * 128


def test_moving_keeps_every_part() -> None:
    q = quantize(torch.ones(2, 4), "q4", symmetric=False)
    moved = q.to("meta")
    assert moved.device == torch.device("meta")
    assert (q.device, moved.nbytes, moved.segments) == (torch.device("cpu"), q.nbytes, q.segments)


def test_reference_matmul_is_the_float64_product() -> None:
    q, x = any_weight("q4_k", 3), torch.randn(2, 256, generator=seeded())
    want = np.einsum("mk,nk->mn", x.double().numpy(), dequantize(q).double().numpy())
    torch.testing.assert_close(reference_matmul(x, q), torch.from_numpy(want), rtol=1e-12, atol=1e-9)


# mistakes

UP, DOWN = list(range(8)), list(range(7, -1, -1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: quantize(w, "q5"), r"'q5' symmetric=True: expected 'q4' or 'q8'"),
        (lambda w: quantize(w, "q4", clip_search=-1), "clip_search -1: expected a count"),
        (lambda w: quantize(w, "q4", clip_search=0.5), "clip_search 0.5: expected a count"),
        (lambda w: quantize(w, "q4", group=-1), "group -1: expected a positive integer"),
        (lambda w: quantize(w, "q4", group=32.0), "group 32.0: expected a positive integer"),
        (lambda w: quantize(w[0], "q4"), r"shape \(8,\): expected \(N, K\)"),
        (lambda w: quantize(w[:0], "q4"), r"shape \(0, 8\): expected .* at least 1"),
        (lambda w: quantize(w[:, :0], "q8"), r"shape \(4, 0\): expected .* at least 1"),
        (lambda w: quantize(w.int(), "q4"), r"weight \(4, 8\) torch.int32: expected one of"),
        (lambda w: quantize(w.clone().requires_grad_(), "q4"), "requires grad: inference only"),
        (lambda w: quantize(w.double() * 1e300, "q4"), r"\(4, 8\): NaN, infinite"),
        (
            lambda w: quantize(w.view(1, 32) * 3e38, "q4", symmetric=False),
            "spans more than float32",
        ),
        (lambda w: dense(w.double()), r"weight \(4, 8\) torch.float64: expected one of"),
        (lambda w: dense(w.clone().requires_grad_()), "inference only"),
        (lambda w: from_gguf(w, "Q2_K", (4, 8)), r"GGUF type 'Q2_K': expected one of F32 \(0\)"),
        (lambda w: from_gguf(w, 99, (4, 8)), "GGUF type 99: expected one of"),
        (lambda w: from_gguf(w, "f32", (4, 0)), r"shape \(4, 0\): expected"),
        (lambda w: from_gguf(w, "f32", (4, 2.5)), r"shape \(4, 2.5\): expected"),
        (lambda w: from_gguf(w, "f32", (4,)), r"shape \(4,\): expected"),
        (lambda w: from_gguf(w, "f32", (4, 8)), r"expected uint8 \[4, 32\] or flat, got \(4, 8\)"),
        (lambda w: from_gguf(w.byte(), "q8_0", (4, 32)), r"expected uint8 \[4, 34\] or flat, got"),
        (lambda w: from_gguf(w.byte(), "q4_k", (4, 128)), r"q4_k \(4, 128\): .* multiples of 256"),
        (lambda w: codes(dense(w)), r"f32 \(4, 8\): a dense weight has no codes"),
        (lambda w: take_rows(dense(w), [0, 4]), r"row ids 0..4: expected 0..3"),
        (lambda w: take_rows(dense(w), [-1]), r"row ids -1..-1: expected 0..3"),
        (lambda w: take_rows(dense(w), [[0]]), r"row ids \(1, 1\) torch.int64: expected 1-d"),
        (lambda w: take_rows(dense(w), [0.5]), r"torch.float32: expected 1-d int32 or int64"),
        (lambda w: dense(w)[2], "expected a slice of rows with step 1, got 2"),
        (lambda w: dense(w)[::2], "expected a slice of rows with step 1, got slice"),
        (lambda w: dense(w)[3:3], r"no row of \(4, 8\) is in slice\(3, 3, None\)"),
        (lambda w: cat_rows([]), "cannot join 0 weights: expected one kind"),
        (lambda w: cat_rows([dense(w), dense(w.half())]), "cannot join 2 weights: .*'f16'"),
        (lambda w: cat_rows([dense(w), dense(w[:, :4])]), "cannot join 2 weights"),
        (
            lambda w: cat_rows([quantize(w, "q4"), quantize(w, "q4", symmetric=False)]),
            "cannot join 2 weights: .*'zero'",
        ),
        (
            lambda w: cat_rows([quantize(w, "q8", 2), quantize(w, "q8", 4)]),
            "cannot join 2 weights",
        ),
        (
            lambda w: cat_rows([with_perm(quantize(w, "q4"), torch.tensor(p).int()) for p in (UP, DOWN)]),
            "cannot join 2 weights: they take their columns in different orders",
        ),
        (
            lambda w: cat_rows([quantize(w, "q4"), with_perm(quantize(w, "q4"), torch.tensor(UP).int())]),
            "cannot join 2 weights: .*'perm'",
        ),
        (
            lambda w: with_perm(quantize(w, "q4", 3), torch.tensor(UP).int()),
            r"q4 \(4, 8\): act-order needs whole groups, but the last of 3 columns is short",
        ),
        (lambda w: with_perm(dense(w), torch.tensor(UP).int()), "act-order needs groups, and a dense weight has"),
        (lambda w: with_perm(quantize(w, "q4"), torch.tensor(UP)), r"perm must be int32 \[8\], got torch.int64 \[8\]"),
        (lambda w: with_perm(quantize(w, "q4"), torch.arange(7).int()), r"perm must be int32 \[8\], got .* \[7\]"),
        (lambda w: with_perm(quantize(w, "q4"), torch.zeros(8).int()), "perm does not hold each of 0..7 once"),
        (
            lambda w: with_perm(with_perm(quantize(w, "q4"), torch.tensor(UP).int()), torch.tensor(UP).int()),
            "its columns have an order already",
        ),
        (lambda w: interleave_rows(dense(w), dense(w[:2])), r"\(2, 8\) .* expected equal shapes"),
        (lambda w: interleave_rows(dense(w), dense(w), block=0), "in blocks of 0"),
        (lambda w: num_segments(0, 5), r"shape \(0, 5\): expected"),
    ],
)
def test_a_mistake_is_a_value_error(call, message: str) -> None:
    w = torch.linspace(-1, 1, 32).view(4, 8)
    with pytest.raises(ValueError, match=message):
        call(w)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("fmt", "symmetric"), OURS)
@pytest.mark.parametrize("column", [0, 33, 64])
def test_weights_must_be_finite(fmt: str, symmetric: bool, bad: float, column: int) -> None:
    w = torch.randn(3, 65, generator=seeded())
    w[2, column] = bad
    with pytest.raises(ValueError, match=r"weight \(3, 65\): NaN, infinite"):
        quantize(w, fmt, 32, symmetric)


@pytest.mark.parametrize(
    "call",
    [dequantize, codes, lambda q: q[:2], lambda q: take_rows(q, [0]), lambda q: cat_rows([q])],
)
def test_a_packed_layout_is_refused(call) -> None:
    q = QTensor("q4", (4, 8), 8, 1, "t64-glu", {"codes": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"q4 \(4, 8\): expected layout 'rows', got 't64-glu'"):
        call(q)
