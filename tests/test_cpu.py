"""csrc_triton/cpu.py: packing, schemes, the bits of rows, probes, rotation."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from checks import (
    ANY_THREADS,
    DEMO_SHAPES,
    FORMATS,
    ROWS,
    SCHEMES,
    assert_close,
    assert_no_worse,
    assert_same_bits,
    random_weight,
    takes_k,
)
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.cpu import MIN_DISTANCE, checked, matmul_cpu, pack, packed_nbytes, probe, scheme_for
from csrc_triton.fused import RopeTable, rope_table
from csrc_triton.quant import QTensor, codes, dense, dequantize, quantize, reference_matmul

ODD_SHAPES = ((33, 172), (1, 1), (40, 1041), (172, 64), (64, 192), (33, 64))
# what each scheme may lose of a product, by root mean square, on normally distributed weights: its weights rounded
# to 11 bits; to 1/127 of a row's largest, inputs to 8 bits; to 1/15 of a group's range; weights and inputs to int8
LOSS = {"f32": 1e-6, "f16": 5e-4, "i8": 1.5e-2, "i4": 0.15, "w8a8": 2e-2}
needs_panels = pytest.mark.skipif(not cpu.has_half_panels(), reason="this build of torch has no half-precision panels")
INT8_PATHS = pytest.mark.parametrize(
    "fast_int8", [True, pytest.param(False, marks=needs_panels)], ids=["codes", "panels"]
)


def fits(scheme: str, shape: tuple[int, int]) -> bool:
    return {"i8": cpu.fits_int8, "i4": cpu.fits_int4}.get(scheme, lambda _: True)(shape)


def cases(shapes: tuple[tuple[int, int], ...]) -> list[tuple[str, tuple[int, int]]]:
    return [
        (scheme, shape) for scheme, shape in itertools.product(SCHEMES, dict.fromkeys(shapes)) if fits(scheme, shape)
    ]


def by_shape(shapes: tuple[tuple[int, int], ...]) -> pytest.MarkDecorator:
    ids = [f"{scheme}-{n}x{k}" for scheme, (n, k) in cases(shapes)]
    return pytest.mark.parametrize(("scheme", "shape"), cases(shapes), ids=ids)


@functools.cache
def packed(scheme: str, shape: tuple[int, int], size: float = 1.0) -> QTensor:
    return pack(random_weight("f32", *shape, size=size), scheme)


def computed_weight(q: QTensor, scheme: str) -> Tensor:
    """The weight that a scheme multiplies by, float64: what is left of q after rounding."""
    w = dequantize(q)
    if scheme == "f32":
        return w.double()
    if scheme == "f16":
        exponent = torch.tensor(cpu.half_exponent(w))
        return torch.ldexp(torch.ldexp(w, exponent).half().double(), -exponent)
    if scheme == "i8":
        row = quantize(w, "q8", None)
        return row.parts["codes"].double() * row.parts["scale"].bfloat16().double()
    value, scale, bias, _ = codes(quantize(w, "q4", 32))
    low = (bias + 8 * scale).bfloat16().double()
    return (
        (value.double() - 8).unflatten(1, (-1, 32)) * scale.bfloat16().double()[..., None] + low[..., None]
    ).flatten(1)


# ---- packing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "scheme"),
    [
        ("f32", "f32"), ("f16", "f16"), ("bf16", "f16"), ("q8", "i8"), ("q8 group 32", "f16"), ("q8_0", "f16"),
        ("q4", "i4"), ("q4 zero", "i4"), ("q4_0", "i4"), ("q4_1", "i4"), ("q4_k", "i4"), ("q4 group 48", "f16"),
        ("q5_0", "f16"), ("q5_1", "f16"), ("q5_k", "f16"), ("q6_k", "f16"),
    ],
)  # fmt: skip
def test_scheme_follows_storage(fmt: str, scheme: str) -> None:
    q = random_weight(fmt, 64, 256)
    if scheme == "f16" and not cpu.has_half_panels():
        scheme = "f32"
    assert scheme_for(q.fmt, q.group, q.shape) == scheme
    assert pack(q).layout == f"cpu-{scheme}"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (33, 172), (33, 64), (64, 96), (65, 256), (64, 256)], ids=str)
def test_chosen_scheme_takes_the_shape(fmt: str, shape: tuple[int, int]) -> None:
    if not takes_k(fmt, shape[1]):
        pytest.skip("the format has no such rows")
    q, x = random_weight(fmt, *shape), torch.randn(3, shape[1])
    scheme = scheme_for(q.fmt, q.group, q.shape)
    assert fits(scheme, shape)
    # stored for the scheme, only the inputs' rounding to bfloat16 and that of a result and the scales is lost
    assert_close(matmul_cpu(x, pack(q)), reference_matmul(x, q), {"i8": 1e-2, "i4": 2e-2}.get(scheme, LOSS[scheme]))


def test_scheme_without_exact_half_panels_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "half_row_counts", lambda threads: ())
    assert scheme_for("bf16", 0, (64, 64)) == "f32"
    assert scheme_for("q6_k", 16, (64, 256)) == "f32"


@INT8_PATHS
@by_shape((*DEMO_SHAPES[1:], *ODD_SHAPES))
def test_packed_bytes_are_known_before(
    scheme: str, shape: tuple[int, int], fast_int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_fast_int8", lambda: fast_int8)
    q = pack(random_weight("f32", *shape), scheme)
    assert packed_nbytes(shape, scheme) == sum(part.nbytes for part in q.parts.values()) == q.nbytes


class _Malloc(ctypes.Structure):
    """struct mallinfo2 of glibc: bytes in use are `uordblks` of the heap and the mapped `hblkhd`."""

    _fields_: ClassVar = [(f"field{i}", ctypes.c_size_t) for i in range(4)]
    _fields_ += [("hblkhd", ctypes.c_size_t), ("usmblks", ctypes.c_size_t), ("fsmblks", ctypes.c_size_t)]
    _fields_ += [("uordblks", ctypes.c_size_t), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def allocated() -> int:
    """Bytes that malloc has handed out, mapped ones included."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this libc cannot say how much it handed out")
    libc.mallinfo2.restype = _Malloc
    now = libc.mallinfo2()
    return int(now.uordblks + now.hblkhd)


@needs_panels
@pytest.mark.parametrize("shape", [(8192, 1024), (4096, 576), (576, 1536), (33, 172), (1, 1)], ids=str)
def test_half_panels_take_the_bytes_they_state(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    before = allocated()
    panels = cpu.HalfPanels(weight)
    # malloc and the handle itself take a few kilobytes more
    assert panels.nbytes <= allocated() - before <= panels.nbytes + 16384


def test_zero_group_weights_pack_to_zero() -> None:
    for scheme, shape in cases(((64, 128),)):
        y = matmul_cpu(torch.randn(5, 128), pack(dense(torch.zeros(shape)), scheme))
        assert not y.any() and y.isfinite().all(), scheme


@pytest.mark.parametrize("size", [1e5, 1e-9, 1e-3, 3e4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_huge_and_tiny_weights(scheme: str, size: float) -> None:
    q, x = random_weight("f32", 64, 128, size=size), torch.randn(17, 128)
    assert_close(matmul_cpu(x, pack(q, scheme)), reference_matmul(x, q), LOSS[scheme])


def test_half_exponent_brings_weights_into_range() -> None:
    for largest in (1e-30, 1e-9, 2.0**-6 * 0.99, 2.0**15, 65504.0, 1e5, 1e30):
        exponent = cpu.half_exponent(torch.tensor([[0.0, -largest]]))
        assert 2.0**13 <= largest * 2.0**exponent < 2.0**14
    for largest in (0.0, 2.0**-6, 1.0, 2.0**15 * 0.99):
        assert cpu.half_exponent(torch.tensor([[largest, 0.0]])) == 0


@needs_panels
@pytest.mark.parametrize("top", [-40, -8, -6, 0, 14, 16, 30])
def test_half_panels_hold_bf16_weights_exactly(top: int) -> None:
    """Eleven binades below a largest weight of 2^-6 all 8 bits of a bfloat16 are there; elsewhere more."""
    w = torch.ldexp(torch.rand(48, 40) + 1.0, torch.randint(top - 10, top + 1, (48, 40)))
    w = (w * (torch.randint(0, 2, w.shape) * 2 - 1)).bfloat16()
    assert_same_bits(matmul_cpu(torch.eye(40), pack(dense(w), "f16")), w.float().t().contiguous())


def test_pack_refuses() -> None:
    q = random_weight("f32", 64, 64)
    with pytest.raises(ValueError, match="unknown scheme 'i5'"):
        pack(q, "i5")
    with pytest.raises(ValueError, match="unknown scheme 'i5'"):
        packed_nbytes((64, 64), "i5")
    with pytest.raises(ValueError, match="layout 'cpu-f32', expected 'rows'"):
        pack(pack(q))
    with pytest.raises(ValueError, match=r"'i8' needs K divisible by 64, got weight \(64, 172\)"):
        pack(random_weight("f32", 64, 172), "i8")
    for shape in ((64, 96), (33, 64)):
        with pytest.raises(ValueError, match="'i4' needs N and K divisible by 64"):
            pack(random_weight("f32", *shape), "i4")


def test_pack_leaves_storage_as_it_was() -> None:
    for fmt in ("f32", "bf16", "q4", "q8", "q4_1", "q6_k"):
        q = random_weight(fmt, 64, 256)
        before = {name: part.clone() for name, part in q.parts.items()}
        for scheme in SCHEMES:
            assert pack(q, scheme).shape == q.shape
        for name, part in q.parts.items():
            assert_same_bits(part, before[name], f"{fmt} {name}")


# ---- values ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_memory")
@by_shape((*ODD_SHAPES, (576, 576)))
def test_matmul_of_the_packed_weight(scheme: str, shape: tuple[int, int]) -> None:
    """Against float64 on the weight as the scheme rounds it, so that only the product's own error is left."""
    if scheme == "w8a8":
        pytest.skip("exact: test_w8a8_is_integer_arithmetic")
    q, p = random_weight("f32", *shape, seed=1), pack(random_weight("f32", *shape, seed=1), scheme)
    w, x = computed_weight(q, scheme), torch.randn(max(ROWS), shape[1])
    if scheme in ("i8", "i4"):
        x_used, out = x.bfloat16().float(), torch.bfloat16
    else:
        x_used, out = x, torch.float32
    exact, same_dtype = x_used.double() @ w.T, F.linear(x_used, w.float()).to(out)
    # FBGEMM adds K terms in one chain, MKL in several; two roundings of the largest sum of absolutes
    slack = 2.0**-22 * (x_used.abs() @ w.abs().float().T).max().item()
    for m in ROWS:
        assert_no_worse(matmul_cpu(x[:m], p), exact[:m], same_dtype[:m], slack)


@by_shape((*ODD_SHAPES, (576, 576)))
def test_scheme_loses_no_more_than_stated(scheme: str, shape: tuple[int, int]) -> None:
    if shape == (1, 1) and scheme == "f16":
        pytest.skip("one weight has no root mean square")
    q, x = random_weight("f32", *shape), torch.randn(64, shape[1])
    assert_close(matmul_cpu(x, packed(scheme, shape)), reference_matmul(x, q), LOSS[scheme])


def int8_product(x: Tensor, q: QTensor) -> Tensor:
    """w8a8 by its definition: integers summed in int64, one conversion, two scales."""
    row = quantize(dequantize(q), "q8", None)
    integers, scale = cpu.quantize_rows_cpu(x)
    total = integers.long() @ row.parts["codes"].long().T
    return total.float() * scale * row.parts["scale"].flatten()


@INT8_PATHS
@pytest.mark.parametrize("k", [1, 7, 172, 576, 1040, 1041, 1536, 4000])
def test_w8a8_is_integer_arithmetic(k: int, fast_int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every code at its largest, so that sums reach 127 * 127 * K; signs alike, alternating and random."""
    monkeypatch.setattr(cpu, "has_fast_int8", lambda: fast_int8)
    sign = torch.where(torch.rand(33, k) < 0.5, -1.0, 1.0)
    sign[0], sign[1], sign[2, ::2], sign[2, 1::2] = 1.0, -1.0, 1.0, -1.0
    # sums of one sign, odd and even: where segments were added with a rounding each, it would show
    large = 127.0 - torch.randint(0, 2, (2, 33, k))
    large[:, :, 0] = 127.0
    for w in (sign, torch.randn(33, k), large[0]):
        q = dense(w.contiguous())
        p = pack(q, "w8a8")
        assert ("codes" in p.parts) == fast_int8
        for x in (
            torch.cat((sign[:3], -sign[:2], torch.randn(12, k) * 10, torch.zeros(1, k))),
            large[1],
            sign[:1] * 3e-5,
        ):
            # as numbers: a sum of zeros may be -0.0 in panels
            assert torch.equal(matmul_cpu(x, p), int8_product(x, q))
    assert_same_bits(matmul_cpu(x, p), torch.cat([matmul_cpu(row[None], p) for row in x]))


def test_w8a8_segments_are_exact_and_whole() -> None:
    for k in (1, 2, 1039, 1040, 1041, 1536, 2080, 2081, 4000, 14336):
        segments = cpu.exact_segments(k)
        assert [a for a, _ in segments] == [0, *(b for _, b in segments[:-1])] and segments[-1][1] == k
        assert all(127 * 127 * (b - a) < 2**24 for a, b in segments)
        # two float32 sums of exact integers round once
        assert len(segments) == -(-k // cpu.EXACT_K)


def test_activations_quantise_to_the_nearest_integer() -> None:
    x = torch.randn(9, 65) * torch.logspace(-30, 30, 9)[:, None]
    x[3] = 0
    integers, scale = cpu.quantize_rows_cpu(x)
    exact = torch.nan_to_num(x.double() * 127 / x.double().abs().amax(1, keepdim=True))
    assert (integers - exact).abs().max() <= 0.5 + 1e-4 and integers.abs().max() == 127
    assert_close(scale, x.double().abs().amax(1, keepdim=True) / 127, 1e-7)
    assert not integers[3].any() and scale[3] == 0


@pytest.mark.parametrize("largest", [1e-45, 1e-39, 1e-37, 3.8e-37, 1e-36, 3e38])
def test_activations_of_any_size_quantise_to_finite_integers(largest: float) -> None:
    integers, scale = cpu.quantize_rows_cpu(torch.tensor([[largest, 0.0, -largest / 2]]))
    assert integers.isfinite().all() and scale.isfinite().all() and integers.abs().max() <= 127
    assert ((integers * scale)[0, 0] - largest).abs() <= max(0.01 * largest, 1e-36)


# ---- the bits of a row -------------------------------------------------------------------------------


def assert_rows_keep_bits(q: QTensor, rng: random.Random, most: int = 300) -> None:
    """Row r of a call of any row count, starting anywhere, equals the call on that row alone."""
    k = q.shape[1]
    # one element off, so that rows are not aligned
    x = torch.randn((most + 40) * k + 1)[1:].view(-1, k)
    x[7] *= 1e4
    alone = {}
    for m in (2, 16, 17, most, *(rng.randint(1, most) for _ in range(4))):
        start = rng.randint(0, 40)
        y = matmul_cpu(x[start : start + m], q)
        for r in {0, m // 2, m - 1, m // 16 * 16 - 1, rng.randrange(m)} - {-1}:
            if start + r not in alone:
                alone[start + r] = matmul_cpu(x[start + r : start + r + 1], q)
            assert_same_bits(y[r : r + 1], alone[start + r], f"row {r} of {m}")


def with_threads(shapes: tuple[tuple[int, int], ...]) -> list[Any]:
    """Every scheme and shape with one count of threads by turns; with the other two it is slow."""
    return [
        pytest.param(scheme, shape, threads, marks=[] if threads == i % 3 + 1 else pytest.mark.slow)
        for i, (scheme, shape) in enumerate(cases(shapes))
        for threads in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("scheme", "shape", "threads"), with_threads((*DEMO_SHAPES, *ODD_SHAPES)), indirect=["threads"], ids=str
)
def test_a_rows_bits_do_not_depend_on_company(scheme: str, shape: tuple[int, int], threads: int) -> None:
    """`checked` weights, as the engine uses them."""
    q = checked(packed(scheme, shape))
    assert_rows_keep_bits(q, random.Random(f"{scheme}{shape}{threads}"))


@ANY_THREADS
@pytest.mark.parametrize("scheme", sorted({"f32", "f16", "w8a8"} & {*SCHEMES}))
def test_padded_and_integer_schemes_need_no_fall_back(scheme: str, threads: int) -> None:
    """They hold by what they do with rows, on any machine; i8 and i4 rest on torch's kernels.

    A float32 weight of odd N and K does not: with three threads MKL sums its last columns by their row's address.
    """
    for shape in ((960, 576), (576, 1536), (172, 64), (64, 172), (33, 172 if scheme == "f32" else 1041)):
        assert not checked(packed(scheme, shape)).layout.endswith("-rows"), shape
        assert_rows_keep_bits(packed(scheme, shape), random.Random(threads), most=65)


def assert_every_count_holds(q: QTensor, counts: Iterable[int]) -> None:
    """A probe tries few counts of rows; where it passes, all must hold."""
    if not probe(q):
        pytest.skip("no promise to check: the engine runs this one row by row")
    x = torch.randn(max(counts), q.shape[1])
    alone = torch.cat([matmul_cpu(row[None], q) for row in x])
    for m in counts:
        assert_same_bits(matmul_cpu(x[:m], q), alone[:m], f"{m} rows")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_probe_speaks_for_every_count_of_rows(scheme: str) -> None:
    assert_every_count_holds(packed(scheme, (64, 192)), range(1, 51))


@pytest.mark.slow
@by_shape(DEMO_SHAPES)
def test_probe_speaks_for_every_count_of_rows_at_any_shape(scheme: str, shape: tuple[int, int]) -> None:
    assert_every_count_holds(packed(scheme, shape), ROWS)


@INT8_PATHS
def test_w8a8_has_the_same_bits_on_both_paths(fast_int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_fast_int8", lambda: fast_int8)
    for n, k in ((33, 172), (64, 1536), (16, 4000)):
        q = random_weight("q8", n, k)
        x = torch.randn(19, k, generator=torch.Generator().manual_seed(2))
        assert torch.equal(matmul_cpu(x, pack(q, "w8a8")), int8_product(x, q))


# ---- probes ------------------------------------------------------------------------------------------


def count_follower(x: Tensor, parts: dict[str, Tensor]) -> Tensor:
    return torch.mm(x, parts["weight"].t()) * (1.0 if len(x) < 33 else 1.0 + 2.0**-23)


def place_follower(x: Tensor, parts: dict[str, Tensor]) -> Tensor:
    y = torch.cat([torch.mm(row[None], parts["weight"].t()) for row in x])
    y[16:] *= 1.0 + 2.0**-23
    return y


@pytest.mark.parametrize("product", [count_follower, place_follower])
def test_probe_finds_a_product_that_is_not_row_wise(
    product: Callable[[Tensor, dict[str, Tensor]], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cpu._PRODUCTS, "cpu-test", product)
    q = replace(packed("f32", (96, 64)), layout="cpu-test")
    assert not probe(q)
    safe = checked(q)
    assert safe.layout == "cpu-test-rows" and probe(safe)
    assert_rows_keep_bits(safe, random.Random(0), most=65)
    x = torch.randn(35, 64)
    assert_close(matmul_cpu(x, safe), reference_matmul(x, random_weight("f32", 96, 64)), LOSS["f32"])


def test_probe_finds_plain_float32() -> None:
    """The negative control: torch's own float32 product, several shapes."""
    plain = [replace(packed("f32", shape), layout="cpu-f32-plain") for shape in DEMO_SHAPES]
    broken = [q for q in plain if not probe(q)]
    if not broken:
        pytest.skip("float32 products keep their rows' bits on this machine (MKL strict mode)")
    for q in broken:
        assert checked(replace(q, layout="cpu-f32")).layout == "cpu-f32"
        safe = checked(q)
        assert safe.layout == "cpu-f32-plain-rows"
        assert_rows_keep_bits(safe, random.Random(0), most=33)


def test_checked_takes_plain_float32_where_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu._PRODUCTS, "cpu-f32-plain", cpu._mm_f32)
    assert checked(packed("f32", (96, 64))).layout == "cpu-f32-plain"


@needs_panels
def test_half_rows_pad_to_a_count_that_agrees(threads: int) -> None:
    counts = cpu.half_row_counts(threads)
    assert counts and list(counts) == sorted(set(counts))
    for m in range(1, 400):
        padded = cpu.half_rows(m)
        assert padded >= m and (padded in counts or padded % counts[-1] == 0)


# ---- rotation ----------------------------------------------------------------------------------------


def rope(rot_dim: int, factor: float = 1.0, max_position: int = 600) -> RopeTable:
    return rope_table([10000 ** (-2 * j / rot_dim) for j in range(rot_dim // 2)], max_position, factor=factor)


def turned(x: Tensor, table: RopeTable, distance: Tensor, factor: float = 1.0) -> Tensor:
    """x [T, H, D] rotated by a distance [T] each, in the order of a model's heads."""
    turn = cpu.rotation(table, distance, x.shape[-1], factor)[:, None]
    return cpu.half_split(cpu.from_pairs(cpu.turn_(cpu.pairs(x, table.rot_dim), turn)), table.rot_dim)


HEADS = [(8, 8), (80, 80), (256, 256), (80, 20), (64, 32), (8, 2)]  # head_dim, rot_dim


@pytest.mark.parametrize("unfused", [True, False])
@pytest.mark.parametrize(("dim", "rot_dim"), HEADS)
def test_rotation_turns_pairs_of_halves(dim: int, rot_dim: int, unfused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_unfused_complex", lambda: unfused)
    distance = torch.tensor([MIN_DISTANCE, -1, 0, 1, 63, 600])
    x, half = torch.randn(6, 3, dim), rot_dim // 2
    y = turned(x, rope(rot_dim), distance, 1.25)
    pair = torch.complex(x[..., :half].double(), x[..., half:rot_dim].double())
    freq = torch.tensor([10000 ** (-2 * j / rot_dim) for j in range(half)], dtype=torch.float64)
    angle = distance[:, None, None] * freq
    exact = pair * torch.polar(torch.full_like(angle, 1.25), angle)
    # cosine and sine, the factor and the products are rounded to float32: below 4 units of the pair's length
    error = torch.complex(y[..., :half], y[..., half:rot_dim]) - exact
    assert error.abs().max() <= 4 * 2.0**-24 * 1.25 * pair.abs().max()
    assert_same_bits(y[..., rot_dim:].contiguous(), x[..., rot_dim:].contiguous())


@ANY_THREADS
@pytest.mark.parametrize(("dim", "rot_dim"), HEADS)
def test_rotation_keeps_a_rows_bits(dim: int, rot_dim: int, threads: int) -> None:
    table, distance, x = rope(rot_dim), torch.randint(MIN_DISTANCE, 600, (333,)), torch.randn(333, 3, dim)
    whole = turned(x, table, distance)
    for start, stop in ((0, 1), (5, 6), (1, 18), (7, 140), (300, 333)):
        rows = slice(start, stop)
        assert_same_bits(turned(x[rows], table, distance[rows]), whole[rows])
        assert_same_bits(turned(x[rows, 1:2], table, distance[rows]), whole[rows, 1:2].contiguous())


@pytest.mark.parametrize("distance", [MIN_DISTANCE - 1, 640])
def test_rotation_refuses_distances_that_are_not_in_the_table(distance: int) -> None:
    with pytest.raises(IndexError):
        cpu.rotation(rope(8), torch.tensor([distance]), 8)


def test_rotations_add_up() -> None:
    table, x = rope(64), torch.randn(5, 1, 64)

    def by(y: Tensor, distance: int) -> Tensor:
        return turned(y, table, torch.full((5,), distance))

    assert_close(by(by(x, 63), 500), by(x, 563).double(), 3e-7)
    assert_close(by(by(x, 63), -63), x.double(), 3e-7)


def test_threads_that_are_given_back_are_gone_and_come_again(threads: int) -> None:
    torch.set_num_threads(2)
    x = torch.randn(512, 512)
    before = torch.mm(x, x)
    count = len(os.listdir("/proc/self/task"))
    cpu.release_threads()
    assert len(os.listdir("/proc/self/task")) < count and torch.get_num_threads() == 2
    assert torch.equal(torch.mm(x, x), before)
