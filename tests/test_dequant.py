"""csrc_triton/dequant.py: every code, scale and byte, by inline assembly and by plain Triton, against exact numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from checks import FORM_KINDS, KINDS, assert_same_bits, fitting_k, kind_of_weight
from torch import Tensor

tl = pytest.importorskip("triton.language")

import triton  # noqa: E402
from interpreter import interpreted  # noqa: E402

from csrc_triton import dequant, quant, t64  # noqa: E402
from csrc_triton.dequant import _byte, _times_bytes, _times_half, int_planes, segment_range  # noqa: E402
from csrc_triton.launch import kernels_on_cpu  # noqa: E402
from csrc_triton.qgemm import written_out  # noqa: E402
from csrc_triton.quant import from_gguf  # noqa: E402
from csrc_triton.t64 import Form, dequantize_t64, form_of, pack_t64, unpack  # noqa: E402

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
# inline assembly of both architectures, and plain Triton
TWINS = (80, 90, 0)
WORDS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)  # every int16
# mantissa bits, the smallest exponent of a normal number
FLOAT_FORM = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float32: (23, -126)}


@triton.jit
def _int_planes_kernel(
    a_ptr, b_ptr, high_ptr, out_ptr, N: tl.constexpr, FORM: tl.constexpr, COUNT: tl.constexpr, ARCH: tl.constexpr
):
    i = tl.arange(0, N)
    codes = (tl.load(a_ptr + i), tl.load(b_ptr + i), tl.load(high_ptr + i))
    planes = int_planes(codes, FORM, out_ptr.dtype.element_ty, ARCH)
    for j in tl.static_range(0, COUNT):
        tl.store(out_ptr + j * N + i, planes[j])


@triton.jit
def _times_half_kernel(codes_ptr, d_ptr, out_ptr, N: tl.constexpr, C: tl.constexpr, ARCH: tl.constexpr):
    """Grid: runs of N scales. All C codes times each."""
    n, c = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, C)
    plane = tl.broadcast_to(tl.load(codes_ptr + c)[None, :], (N, C))
    product = _times_half(plane, tl.load(d_ptr + n), out_ptr.dtype.element_ty, ARCH)
    tl.store(out_ptr + n[:, None] * C + c[None, :], product)


@triton.jit
def _bytes_kernel(words_ptr, d_ptr, byte_ptr, out_ptr, N: tl.constexpr, SIGNED: tl.constexpr, ARCH: tl.constexpr):
    i = tl.arange(0, N)
    word = tl.load(words_ptr + i)
    tl.store(byte_ptr + i, _byte(word, 0, ARCH))
    tl.store(byte_ptr + N + i, _byte(word, 1, ARCH))
    tl.store(byte_ptr + 2 * N + i, _byte(word, 2, ARCH))
    tl.store(byte_ptr + 3 * N + i, _byte(word, 3, ARCH))
    products = _times_bytes(tl.load(d_ptr + i).to(tl.float32), word, SIGNED, ARCH)
    for j in tl.static_range(0, 4):
        tl.store(out_ptr + j * N + i, products[j])


@triton.jit
def _ranges_kernel(out_ptr, num_blocks, num_segments):
    s = tl.program_id(0)
    first, last = segment_range(s, num_blocks, num_segments)
    tl.store(out_ptr + 2 * s, first)
    tl.store(out_ptr + 2 * s + 1, last)


def planes_of(form: Form, codes: list[Tensor], dtype: torch.dtype, arch: int) -> Tensor:
    count = 8 if form.bits == 6 else 4
    out = torch.full((count, len(codes[0])), float("nan"), dtype=dtype)
    with interpreted(arch or 90, plain=arch == 0):
        _int_planes_kernel[(1,)](*codes, out, len(codes[0]), FORM=form, COUNT=count, ARCH=arch)
    return out


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 numbers to the nearest of dtype, ties to even, by their own quantum: no cast of torch's rounds here."""
    mantissa, smallest = FLOAT_FORM[dtype]
    exponent = torch.frexp(exact)[1] - 1
    quantum = torch.ldexp(torch.ones_like(exact), exponent.clamp(min=smallest) - mantissa)
    nearest = torch.round(exact / quantum) * quantum
    return torch.where(nearest.abs() > torch.finfo(dtype).max, exact.sign() * torch.inf, nearest)


# ---- codes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("offset", [0, 8])
def test_every_word_of_nibbles(offset: int, dtype: torch.dtype) -> None:
    form = Form(4, "half", 4, False, offset)
    u = WORDS.int() & 0xFFFF
    expected = torch.stack([(u >> 4 * j & 15) - offset for j in range(4)]).to(dtype)
    for arch in TWINS:
        assert_same_bits(planes_of(form, [WORDS, WORDS, WORDS], dtype, arch), expected, f"sm_{arch}")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("offset", [0, 16, 32])
def test_every_code_of_six_bits(offset: int, dtype: torch.dtype) -> None:
    """Every word of nibbles, every word of high bits, all 64 codes in each plane."""
    gen = torch.Generator().manual_seed(offset)
    other, third = (WORDS[torch.randperm(1 << 16, generator=gen)] for _ in range(2))
    form = Form(6, "half", 4, False, offset)
    a, b, h = (word.int() & 0xFFFF for word in (WORDS, other, third))
    low = [(w >> 4 * j) & 15 for w in (a, b) for j in range(4)]
    codes = torch.stack([nibble | (h >> 2 * p & 3) << 4 for p, nibble in enumerate(low)])
    assert all(plane.unique().numel() == 64 for plane in codes)
    for arch in TWINS:
        planes = planes_of(form, [WORDS, other, third], dtype, arch)
        assert_same_bits(planes, (codes - offset).to(dtype), f"sm_{arch}")


@pytest.mark.parametrize("dtype", HALVES)
def test_every_word_of_bytes(dtype: torch.dtype) -> None:
    other = WORDS.flip(0)
    bytes_ = [word.view(torch.int8).unflatten(0, (-1, 2)).unbind(1) for word in (WORDS, other)]
    expected = torch.stack([*bytes_[0], *bytes_[1]]).to(dtype)
    for arch in TWINS:
        planes = planes_of(Form(8, "half", 4, False, 0), [WORDS, other, WORDS], dtype, arch)
        assert_same_bits(planes, expected, f"sm_{arch}")


# ---- scales ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "arch"), [(torch.bfloat16, 90), (torch.bfloat16, 0), (torch.float16, 90)])
def test_every_code_times_every_float16_is_rounded_once(dtype: torch.dtype, arch: int) -> None:
    """All finite scales and codes -32..31: the exact product, to nearest even. Zeros may differ in sign (the split
    sums +0 and -0), which no sum shows: it starts at +0.
    """
    d = WORDS.view(torch.float16)
    d = torch.where(d.isfinite(), d, 0.0)
    codes = torch.arange(-32, 32).to(dtype)
    out = torch.full((len(d), 64), float("nan"), dtype=dtype)
    with interpreted(90), np.errstate(all="ignore"):
        _times_half_kernel[(4,)](codes, d, out, len(d) // 4, 64, ARCH=arch)
    exact = d.double()[:, None] * codes.double()[None, :]
    assert torch.equal(exact.float().double(), exact)  # so that the cast from float32 is the one rounding
    wrong = out != exact.float().to(dtype)
    assert not wrong.any(), f"{int(wrong.sum())} products, the first {wrong.nonzero()[0].tolist()}"
    some = slice(None, None, 17)
    assert torch.equal(out[some].double(), rounded(exact[some], dtype))
    assert (out.double() != exact).double().mean() > 0.3  # most products do round


def test_rounding_is_not_that_of_a_scale_rounded_first() -> None:
    """What the split avoids: RN(q * RN(d)) differs for a good part of all products."""
    d = torch.linspace(0.5, 1, 997).half()
    exact = rounded(7 * d.double(), torch.bfloat16)
    assert (exact != (7 * d.bfloat16()).double()).double().mean() > 0.2


@pytest.mark.parametrize("signed", [False, True])
def test_every_byte_times_a_scale_is_exact(signed: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    count = 1 << 13
    bytes_ = torch.stack([torch.arange(count) % 256, *torch.randint(0, 256, (3, count), generator=gen)], 1)
    bytes_ = torch.cat([bytes_.roll(j, 1) for j in range(4)])  # every byte in every place
    words = bytes_.to(torch.uint8).view(torch.int32).flatten()
    d = WORDS[torch.randperm(1 << 16, generator=gen)[: len(words)]].view(torch.float16)
    d = torch.where(d.isfinite(), d, 1.0)
    values = bytes_.to(torch.uint8).view(torch.int8).double() if signed else bytes_.double()
    for arch in TWINS:
        raw, out = (torch.full((4, len(words)), float("nan")) for _ in range(2))
        with interpreted(90):
            _bytes_kernel[(1,)](words, d, raw, out, len(words), SIGNED=signed, ARCH=arch)
        assert torch.equal(raw, (bytes_.T + 2**23).float())
        assert torch.equal(out.double(), d.double() * values.T)


# ---- a whole tile ------------------------------------------------------------------------------------


def operands(q: quant.QTensor, dtype: torch.dtype, arch: int) -> Tensor:
    """What the MMA reads of a packed weight; inside `interpreted`."""
    with kernels_on_cpu(arch or 90, plain=arch == 0), np.errstate(all="ignore"):
        return written_out(q, torch.empty(0, dtype=dtype), None).parts["weight"][: q.shape[0], : q.shape[1]]


def expected_operands(q: quant.QTensor, dtype: torch.dtype) -> Tensor:
    """RN(dequantize(q)), or the exact integers that block scales multiply later; columns as stored."""
    form = form_of(q)
    if form.scales in ("block", "zero"):
        codes, offset, _, zero = unpack(q)
        group = torch.arange(q.shape[1]) * form.groups // t64.COLS
        return (codes.float() - offset - (0 if zero is None else zero[:, group])).to(dtype)
    parts = {name: part for name, part in q.parts.items() if name != "perm"}
    return rounded(dequantize_t64(replace(q, parts=parts)).double(), dtype).to(dtype)


@pytest.mark.parametrize("kind", FORM_KINDS[:-1])
def test_operands_are_the_rounded_weight_in_both_twins(kind: str) -> None:
    q = pack_t64(kind_of_weight(kind, 60, fitting_k(kind, 130), seed=5))
    with interpreted():
        for i, dtype in enumerate(FLOATS):
            expected = expected_operands(q, dtype)
            assert expected.isfinite().all() and expected.unique().numel() > 8
            # one of the assemblies, which the tests above compare, and plain Triton
            for arch in (TWINS[(i + len(kind)) % 2], 0):
                assert torch.equal(operands(q, dtype, arch), expected), f"{dtype} sm_{arch}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_operands_of_larger_weights(kind: str) -> None:
    q = pack_t64(kind_of_weight(kind, 130, fitting_k(kind, 700), seed=6))
    with interpreted():
        for dtype, arch in itertools.product(FLOATS, TWINS):
            assert torch.equal(operands(q, dtype, arch), expected_operands(q, dtype)), f"{dtype} sm_{arch}"


@pytest.mark.parametrize("fmt", [fmt for fmt, form in quant.GGUF.items() if form.group])
def test_scales_of_any_size(fmt: str) -> None:
    """Random float16 fields: subnormal, negative, so large that float16 weights are infinite."""
    form = quant.GGUF[fmt]
    gen = torch.Generator().manual_seed(2)
    k = 256
    raw = torch.randint(0, 256, (64, k // form.weights, form.nbytes), generator=gen, dtype=torch.uint8)
    for at in (208,) if fmt == "q6_k" else (0,) if fmt in ("q4_0", "q5_0", "q8_0") else (0, 2):
        raw[..., at + 1] = torch.where(raw[..., at + 1] & 0x7C == 0x7C, raw[..., at + 1] ^ 0x40, raw[..., at + 1])
    q = pack_t64(from_gguf(raw.flatten(1), fmt, (64, k)))
    with interpreted():
        for dtype in HALVES:
            expected = expected_operands(q, dtype)
            for arch in (90, 0):
                assert torch.equal(operands(q, dtype, arch), expected), f"{dtype} sm_{arch}"
    assert expected.isinf().any() and expected.isfinite().any()


# ---- segments ----------------------------------------------------------------------------------------


def test_segments_cover_the_blocks_once_in_order() -> None:
    with interpreted(90):
        for blocks in (1, 2, 5, 7, 24):
            for segments in {1, 2, 3, blocks} & set(range(1, blocks + 1)):
                out = torch.full((segments, 2), -1, dtype=torch.int32)
                _ranges_kernel[(segments,)](out, blocks, segments)
                expected = [[s * blocks // segments, (s + 1) * blocks // segments] for s in range(segments)]
                assert out.tolist() == expected
                assert [kb for first, last in expected for kb in range(first, last)] == list(range(blocks))
                assert all(first < last for first, last in expected)


@triton.constexpr_function
def _magic_without_offset(dtype, value):
    return "0x43004300"


def test_the_interpreter_runs_the_assembly_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twins are compared, not one of them with itself."""
    form, codes = Form(4, "half", 4, False, 8), [WORDS] * 3
    monkeypatch.setattr(dequant, "_magic", _magic_without_offset)
    assert not torch.equal(planes_of(form, codes, torch.bfloat16, 90), planes_of(form, codes, torch.bfloat16, 0))
