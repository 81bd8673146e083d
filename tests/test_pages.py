"""csrc_triton/pages.py: where keys and values lie, what append_kv stores, how pages and rows are copied.

On a CPU a key's two halves alternate in its page; kernels store one after the other.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import ANY_THREADS, assert_close, assert_same_bits
from dryrun import Launch, dryrun
from interpreter import interpreted
from ir import Module, narrow_products
from ptx import fma
from torch import Tensor
from triton.compiler.errors import CompilationError

from csrc_triton.cpu import MIN_DISTANCE, half_split
from csrc_triton.cpu_attention import CODE_MAX, PAGE, Workspace, largest_stored
from csrc_triton.fused import RopeTable, rope_table
from csrc_triton.launch import OPTIONS, jit, tl
from csrc_triton.pages import (
    FP8_ARCH,
    ID_BYTES,
    KVLayout,
    append_kv,
    append_kv_ref,
    codes_ref,
    commit_path,
    copy_pages,
    model_order,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALED = (torch.int8, torch.float8_e4m3fn)
ALL_DTYPES = DTYPES + SCALED
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
ON_KERNELS = pytest.mark.parametrize("on_kernels", [False, True], ids=("cpu", "kernel"))


@contextmanager
def either(on_kernels: bool) -> Iterator[None]:
    with interpreted(90) if on_kernels else nullcontext(), np.errstate(all="ignore"):
        yield


def rope(rot_dim: int, factor: float = 1.0) -> RopeTable:
    return rope_table([10000 ** (-2 * j / rot_dim) for j in range(rot_dim // 2)], 64, factor=factor)


def new_arena(layout: KVLayout, superblocks: int = 3) -> tuple[Tensor, list[int]]:
    """An arena with a region of zeros before its superblocks, and the ids of all pages."""
    size = layout.pages_per_superblock * layout.page_bytes
    arena = torch.zeros((superblocks + 1) * size, dtype=torch.uint8)
    step = layout.block_bytes // ID_BYTES
    first = [s * size // ID_BYTES for s in range(1, superblocks + 1)]
    return arena, [f + i * step for f in first for i in range(layout.pages_per_superblock)]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned_arena(layout: KVLayout, superblocks: int = 3) -> tuple[Tensor, list[int]]:
    """new_arena, every byte of it random."""
    arena, ids = new_arena(layout, superblocks)
    return torch.randint(0, 256, arena.shape, dtype=torch.uint8), ids


def numbers(view: Tensor) -> Tensor:
    """A view of pages as what can be indexed, assigned and compared whatever the dtype."""
    return view.view(torch.int8) if view.element_size() == 1 else view


# ---- where things lie --------------------------------------------------------------------------------


def test_layout_counts_bytes() -> None:
    layout = KVLayout(30, 3, 64, torch.bfloat16, pages_per_superblock=7)
    assert layout.block_bytes == 2 * 3 * 64 * 64 * 2 == 49152
    assert layout.layer_stride == 7 * 49152
    assert layout.page_bytes == 30 * 49152
    assert layout.extent == 29 * 7 * 49152 + 49152
    # 2 * 1 * 64 * 10 * 4 = 5120, of which the second 4096 are part empty
    assert KVLayout(1, 1, 10, torch.float32).block_bytes == 8192
    assert KVLayout(1, 1, 8, torch.float32).block_bytes == 4096
    assert KVLayout(2, 1, 2, torch.float16).block_bytes == 4096
    # a scale of 4 bytes for each of 2 * 3 * 64 tokens' heads
    for dtype in SCALED:
        layout = KVLayout(30, 3, 64, dtype)
        assert layout.scaled and layout.head_bytes == 64 * 64 + 64 * 4 == 4352
        assert layout.block_bytes == 28672 >= 2 * 3 * 4352 > 28672 - 4096
    assert not KVLayout(30, 3, 64, torch.float16).scaled and KVLayout(30, 3, 64, torch.float16).head_bytes == 8192


@pytest.mark.parametrize("pages", [1, 4])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_page_ids(num_layers: int, pages: int) -> None:
    layout = KVLayout(num_layers, 2, 80, torch.int8, pages)
    _, ids = new_arena(layout)
    every = range(pages, 4 * pages)  # the first superblock is the region of zeros
    assert layout.page_ids(every).tolist() == ids
    assert_same_bits(layout.page_ids(torch.tensor([list(every)])), torch.tensor([ids], dtype=torch.int32))
    assert int(layout.page_ids(pages)) == ids[0] and int(layout.page_ids(0)) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.float8_e5m2])
def test_a_layout_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"dtype is {dtype}, expected float32, bfloat16, float16, int8 or float8_e4m3"):
        KVLayout(1, 1, 8, dtype)


def test_a_layout_refuses_odd_heads() -> None:
    for dim in (0, 7):
        with pytest.raises(ValueError, match=f"head_dim is {dim}, expected an even number"):
            KVLayout(1, 1, dim, torch.float32)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize(("heads", "dim", "pages"), [(3, 64, 4), (1, 10, 3), (2, 80, 1), (1, 8, 5)])
def test_views_of_pages_and_layers_are_disjoint(heads: int, dim: int, pages: int, dtype: torch.dtype) -> None:
    layout = KVLayout(3, heads, dim, dtype, pages)
    arena, ids = new_arena(layout)
    places = [(layer, page) for layer in range(layout.num_layers) for page in ids]
    for value, (layer, page) in enumerate(places):
        view = layout.view(arena, layer)
        assert view.shape[1:] == (2, heads, PAGE, dim) and view.dtype == dtype
        numbers(view)[page] = value + 1  # small integers: exact in every dtype
        if layout.scaled:
            assert layout.scales(arena, layer).shape[1:] == (2, heads, PAGE)
            layout.scales(arena, layer)[page] = -value - 1
    for value, (layer, page) in enumerate(places):
        assert bool((numbers(layout.view(arena, layer))[page] == value + 1).all()), (layer, page)
        if layout.scaled:
            assert bool((layout.scales(arena, layer)[page] == -value - 1).all()), (layer, page)
    # id 0 has no page, and its zeros are as large as a page
    assert not arena[: layout.extent].any()


def test_address_is_id_and_layer_stride() -> None:
    layout = KVLayout(3, 2, 16, torch.float32, 4)
    arena, ids = new_arena(layout)
    for layer in range(3):
        view = layout.view(arena, layer)
        for page in ids:
            at = page * ID_BYTES + layer * layout.layer_stride
            assert view[page].data_ptr() - arena.data_ptr() == at
            assert layout.blocks(arena)[page, layer].data_ptr() - arena.data_ptr() == at
            assert (
                view[page, 1, 1, 63, 15].data_ptr() - view[page].data_ptr() == (((1 * 2 + 1) * 64 + 63) * 16 + 15) * 4
            )


@pytest.mark.parametrize("dtype", SCALED)
def test_address_of_codes_and_scales(dtype: torch.dtype) -> None:
    layout = KVLayout(3, 2, 10, dtype, 4)
    arena, ids = new_arena(layout)
    for layer in range(3):
        start = arena.data_ptr() + ids[2] * ID_BYTES + layer * layout.layer_stride
        head = start + (1 * 2 + 1) * (64 * 10 + 64 * 4)
        assert layout.view(arena, layer)[ids[2], 1, 1, 63, 9].data_ptr() == head + 63 * 10 + 9
        assert layout.scales(arena, layer)[ids[2], 1, 1, 63].data_ptr() == head + 64 * 10 + 63 * 4
    assert head + layout.head_bytes <= start + layout.block_bytes


def test_last_id_ends_with_the_arena() -> None:
    layout = KVLayout(3, 2, 16, torch.float32, 4)
    arena, ids = new_arena(layout)
    assert (
        len(layout.blocks(arena))
        == layout.num_ids(arena)
        == (arena.numel() - layout.extent) // ID_BYTES + 1
        == ids[-1] + 1
    )
    for layer in range(3):
        end = layout.view(arena, layer)[-1].data_ptr() + layout.block_bytes
        assert end <= arena.data_ptr() + arena.numel()


def test_an_arena_may_be_part_of_a_tensor() -> None:
    layout = KVLayout(2, 1, 8, torch.float32)
    whole = torch.zeros(16 * ID_BYTES, dtype=torch.uint8)
    arena = whole[4 * ID_BYTES :]
    layout.view(arena, 1)[2] = 1.0
    assert (
        not whole[: 7 * ID_BYTES].any() and whole[7 * ID_BYTES : 8 * ID_BYTES].any() and not whole[8 * ID_BYTES :].any()
    )
    assert layout.blocks(arena)[2, 1].any()


def test_view_refuses() -> None:
    layout = KVLayout(2, 1, 8, torch.float32)
    arena, _ = new_arena(layout)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=rf"layer {layer} is not in 0\.\.1"):
            layout.view(arena, layer)
    with pytest.raises(ValueError, match=r"must be uint8 and hold at least 8192 bytes, got torch\.float32"):
        layout.view(arena.view(torch.float32), 0)
    with pytest.raises(ValueError, match=r"hold at least 8192 bytes, got torch\.uint8 with 4096"):
        layout.view(arena[:4096], 1)
    with pytest.raises(ValueError, match=r"hold at least 8192 bytes, got torch\.uint8 with 4096"):
        layout.blocks(arena[:4096])
    with pytest.raises(ValueError, match=r"scales: pages of torch\.float32 have none"):
        layout.scales(arena, 0)
    with pytest.raises(ValueError, match=r"scales: layer 2 is not in 0\.\.1"):
        KVLayout(2, 1, 8, torch.int8).scales(arena, 2)


# ---- append_kv ---------------------------------------------------------------------------------------


def halves(x: Tensor, rot_dim: int) -> tuple[Tensor, Tensor]:
    """The pairs of a head: what rotates half with half, and so the rest."""
    half, mid = rot_dim // 2, (rot_dim + x.shape[-1]) // 2
    return (
        torch.cat((x[..., :half], x[..., rot_dim:mid]), -1),
        torch.cat((x[..., half:rot_dim], x[..., mid:]), -1),
    )


def in_order(stored: Tensor, rot_dim: int, on_kernels: bool, is_codes: bool = False) -> Tensor:
    """A stored key [..., D] in the order of a model's heads."""
    if on_kernels and not is_codes:
        stored = torch.stack(stored.chunk(2, -1), -1).flatten(-2)
    return half_split(stored, rot_dim)


def alternating(x: Tensor) -> Tensor:
    """[..., D], half after half -> the halves alternating."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def turned(k: Tensor, rot_slot: Tensor, table: RopeTable, on_kernels: bool) -> Tensor:
    """float32 keys as stored, [T, Hkv, D]: kernels round a product and a fused sum, the CPU all three steps."""
    row, half = rot_slot.long() - MIN_DISTANCE, table.rot_dim // 2
    cos, sin = (t[row][:, None] * table.factor for t in (table.cos, table.sin))
    a, b = halves(k.float(), table.rot_dim)
    x, y = a[..., :half], b[..., :half]
    if on_kernels:
        to_a, to_b = -(y * sin), x * sin
        x, y = (
            torch.from_numpy(fma(*(t.expand_as(x).numpy() for t in terms)))
            for terms in ((x, cos, to_a), (y, cos, to_b))
        )
    else:
        x, y = x * cos - y * sin, y * cos + x * sin
    a, b = torch.cat((x, a[..., half:]), -1), torch.cat((y, b[..., half:]), -1)
    return torch.cat((a, b), -1) if on_kernels else torch.stack((a, b), -1).flatten(-2)


def coded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """float32 rows as stored, and their scales."""
    x = x.clamp(-largest_stored(dtype), largest_stored(dtype))
    if dtype not in CODE_MAX:
        return x.to(dtype), None
    largest = x.abs().amax(-1)
    per_unit = (CODE_MAX[dtype] / largest.double()).float()  # rounding a double quotient again changes nothing
    per_unit = torch.where(per_unit == math.inf, 0.0, per_unit)
    codes = (x * per_unit[..., None]).nan_to_num(0.0).numpy()
    codes = np.rint(codes).astype(np.int8) if dtype == torch.int8 else codes.astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(codes.view(np.int8)), (largest.double() / CODE_MAX[dtype]).float()


def write(
    arena: Tensor, layout: KVLayout, layer: int, page: int, slot: int, plane: int, row: Tensor, scale: Tensor | None
) -> None:
    """One token of one head, by address; planes are the heads of keys, then those of values."""
    start = page * ID_BYTES + layer * layout.layer_stride + plane * layout.head_bytes
    size = row.numel() * row.element_size()
    arena[start + slot * size :][:size] = row.contiguous().view(torch.uint8)
    if scale is not None:
        arena[start + PAGE * size + slot * 4 :][:4] = scale.reshape(1).view(torch.uint8)


def append_by_address(
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    layout: KVLayout,
    layer: int,
    page: Tensor,
    slot: Tensor,
    rot_slot: Tensor,
    table: RopeTable,
    on_kernels: bool,
) -> None:
    """What append_kv is to do, bit for bit."""
    rows = torch.cat((turned(k, rot_slot, table, on_kernels), v.float()), 1)
    codes, scales = coded(rows, layout.dtype)
    if on_kernels and layout.scaled:
        codes = alternating(codes)
    for t in range(rows.shape[0]):
        for plane in range(rows.shape[1]):
            scale = None if scales is None else scales[t, plane]
            write(arena, layout, layer, int(page[t]), int(slot[t]), plane, codes[t, plane], scale)


def parts_of(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """k and v of [T, 3 * heads, D], as a model's one product gives them."""
    return qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]


GEOMETRIES = [(2, 64, 64), (1, 8, 8), (3, 80, 80), (1, 256, 256), (2, 96, 24), (1, 128, 128), (1, 10, 4), (3, 6, 6)]
KERNEL_GEOMETRIES = [g for g in GEOMETRIES if g[0] * g[1] * 2 % 16 == 0]  # tokens start at multiples of 16 bytes
APPENDS = [(False, *g) for g in GEOMETRIES] + [(True, *g) for g in KERNEL_GEOMETRIES]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize(("on_kernels", "heads", "dim", "rot_dim"), APPENDS)
def test_append_kv(on_kernels: bool, heads: int, dim: int, rot_dim: int, dtype: torch.dtype) -> None:
    """Every byte of the arena: those of the tokens by the definition, the others as they were."""
    layout, table = KVLayout(2, heads, dim, dtype, 2), rope(rot_dim, factor=1.25)
    arena, ids = poisoned_arena(layout)
    page = int32(*(ids[i] for i in (3, 3, 0, 5, 0, 1)))
    slot, rot_slot = int32(0, 63, 7, 1, 8, 30), int32(0, 63, 7, 62, 8, 5)
    qkv = torch.randn(6, 3 * heads, dim).to(DTYPES[GEOMETRIES.index((heads, dim, rot_dim)) % 3 if on_kernels else 0])
    k, v = parts_of(qkv, heads)
    expected, before = arena.clone(), qkv.clone()
    with either(on_kernels):
        append_kv(k, v, arena, layout, 1, page, slot, rot_slot, table)
    append_by_address(k, v, expected, layout, 1, page, slot, rot_slot, table, on_kernels)
    assert_same_bits(arena, expected)
    assert_same_bits(qkv, before)

    keys, values = append_kv_ref(k, v, rot_slot, table)
    where = (page.long(), slice(None), slice(None), slot.long())
    stored = layout.view(arena, 1)[where].double()  # [T, 2, Hkv, D]
    got = in_order(stored[:, 0], rot_dim, on_kernels, layout.scaled), stored[:, 1]
    if on_kernels and layout.scaled:
        got = got[0], torch.cat((got[1][..., ::2], got[1][..., 1::2]), -1)
    for x, again in zip(got, model_order(*stored.unbind(1), layout, rot_dim, on_kernels), strict=True):
        assert_same_bits(x.contiguous(), again.contiguous())
    if not layout.scaled:  # rotation in float32, then one rounding to the pages' dtype
        for x, exact in zip(got, (keys, values), strict=True):
            assert (x - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()
        return
    scales = layout.scales(arena, 1)[where].unbind(1)
    for x, scale, exact in zip(got, scales, (keys, values), strict=True):
        codes, exact_scale = codes_ref(exact, dtype)
        torch.testing.assert_close(scale.double(), exact_scale, rtol=2.0**-21, atol=0)
        slack = CODE_MAX[dtype] * 2.0**-20
        half_step = 0.5 if dtype == torch.int8 else codes.abs().clamp(min=2.0**-6) * 2.0**-4
        assert ((x - codes).abs() <= half_step + slack).all()
        assert (x.abs().amax(-1) == CODE_MAX[dtype]).all(), "the largest number of a head has the largest code"
    assert_same_bits(scales[1], (v.float().abs().amax(-1).double() / CODE_MAX[dtype]).float())


def test_append_kv_reference_is_a_rotation() -> None:
    table, k = rope(8), torch.randn(3, 1, 8)
    keys, _ = append_kv_ref(k, k, int32(0, 5, 63), table)
    pair = torch.complex(k[..., :4].double(), k[..., 4:].double())
    freq = torch.tensor([10000 ** (-j / 4) for j in range(4)], dtype=torch.float64)
    turned = pair * torch.exp(1j * torch.tensor([0, 5, 63])[:, None, None] * freq)
    assert_close(keys, torch.cat((turned.real, turned.imag), -1), 1e-7)


COMPANY = [
    (3, 64, 64, torch.float32),
    (1, 8, 8, torch.bfloat16),
    (1, 80, 80, torch.float32),
    (1, 256, 256, torch.float16),
]
COMPANY += [(1, 96, 24, torch.float32), (5, 10, 4, torch.float16), (5, 64, 64, torch.float32)]
COMPANY += [(3, 64, 64, torch.int8), (1, 10, 4, torch.int8), (1, 80, 80, torch.float8_e4m3fn)]


@ANY_THREADS
@pytest.mark.parametrize(("heads", "dim", "rot_dim", "dtype"), COMPANY)
def test_a_tokens_bits_do_not_depend_on_company(
    heads: int, dim: int, rot_dim: int, dtype: torch.dtype, threads: int
) -> None:
    """All 430 at once (more than torch gives one thread), by 64 and by sevens, and some alone."""
    layout, table, num = KVLayout(1, heads, dim, dtype), rope(rot_dim, factor=1.1), 430
    k, v, slot = torch.randn(num, heads, dim), torch.randn(num, heads, dim), torch.arange(num, dtype=torch.int32) % PAGE
    arena, ids = new_arena(layout, superblocks=7)
    page = torch.tensor(ids, dtype=torch.int32)[torch.arange(num) // PAGE]

    def append(to: Tensor, rows: Tensor) -> None:
        append_kv(k[rows], v[rows], to, layout, 0, page[rows], slot[rows], slot[rows], table)

    every = torch.arange(num)
    append(arena, every)
    for pieces in (every.split(64), every.split(7), every[::19].split(1)):
        other = torch.zeros_like(arena)
        for rows in pieces:
            append(other, rows)
        rows = torch.cat(pieces)
        where = page[rows].long(), slice(None), slice(None), slot[rows].long()
        views = [layout.view]
        if layout.scaled:
            views.append(layout.scales)
        for view in views:
            assert_same_bits(view(other, 0)[where], view(arena, 0)[where], f"by {len(pieces[0])}")


@pytest.mark.parametrize(("dtype", "source"), [(torch.bfloat16, torch.bfloat16), (torch.int8, torch.float32)])
def test_a_kernels_token_does_not_depend_on_company_or_address(dtype: torch.dtype, source: torch.dtype) -> None:
    """Alone, two at a time, last to first, from rows further apart, in another page and layer."""
    heads, dim, num = 2, 80, 7
    layout, table = KVLayout(2, heads, dim, dtype, 3), rope(dim, factor=1.1)
    arena, ids = poisoned_arena(layout)
    qkv = torch.randn(num, 3 * heads, dim).to(source)
    rot_slot = torch.arange(num, dtype=torch.int32) * 9
    slot = torch.arange(num, dtype=torch.int32)

    def stored(rows: Tensor, x: Tensor, page: int, layer: int) -> list[Tensor]:
        k, v = parts_of(x, heads)
        to = arena.clone()
        places = torch.full((len(rows),), page, dtype=torch.int32), slot[: len(rows)] + 5
        with either(True):
            append_kv(k[rows], v[rows], to, layout, layer, *places, rot_slot[rows], table)
        views = [layout.view(to, layer), *([layout.scales(to, layer)] if layout.scaled else [])]
        return [view[page, :, :, 5 : 5 + len(rows)].movedim(2, 0) for view in views]

    every = torch.arange(num)
    whole = stored(every, qkv, ids[4], 1)
    wide = torch.full((num, 3 * heads + 1, dim), math.nan, dtype=source)
    wide[:, : 3 * heads] = qkv
    cases = [(every[i : i + 1], qkv, ids[0], 1) for i in (0, 6)]
    cases += [(every[2:4], qkv, ids[8], 0), (every.flip(0), qkv, ids[4], 1), (every, wide[:, : 3 * heads], ids[1], 0)]
    for rows, x, page, layer in cases:
        for got, expected in zip(stored(rows, x, page, layer), whole, strict=True):
            assert_same_bits(got, expected[rows], f"tokens {rows.tolist()}")


@ON_KERNELS
def test_layers_share_a_workspace(on_kernels: bool) -> None:
    layout, table = KVLayout(2, 2, 64, torch.int8, 2), rope(64)
    (arena, ids), k, v = poisoned_arena(layout), torch.randn(2, 3, 2, 64), torch.randn(2, 3, 2, 64)
    other, page, slot, space = arena.clone(), int32(ids[1], ids[1], ids[2]), int32(4, 5, 0), Workspace()
    with either(on_kernels):
        for layer in range(2):
            append_kv(k[layer], v[layer], arena, layout, layer, page, slot, slot, table, workspace=space)
            append_kv(k[layer], v[layer], other, layout, layer, page, slot, slot, table)
    assert_same_bits(arena, other)


@ON_KERNELS
@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_saturate(dtype: torch.dtype, num: int, on_kernels: bool) -> None:
    """So that a later token's value, weighted by zero, cannot make an earlier row NaN."""
    layout = KVLayout(1, 1, 8, dtype)
    arena, ids = new_arena(layout)
    v = torch.tensor([math.inf, -math.inf, 3e38, -3e38, 65504.0, 1e5, 1.0, 0.0]).view(1, 1, 8).repeat(num, 1, 1)
    page, slot = int32(*[ids[0]] * num), torch.arange(num, dtype=torch.int32)
    with either(on_kernels):
        append_kv(torch.zeros(num, 1, 8), v, arena, layout, 0, page, slot, slot, rope(8))
    largest = torch.finfo(dtype).max
    got = layout.view(arena, 0)[ids[0], 1, 0, :num].float()
    assert got.isfinite().all()
    assert_same_bits(got, v[:, 0].clamp(-largest, largest).to(dtype).float())


@ON_KERNELS
@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_saturate(dtype: torch.dtype, num: int, on_kernels: bool) -> None:
    """A key may grow by rotation; it stays finite and keeps its direction's signs."""
    layout = KVLayout(1, 1, 8, dtype)
    arena, ids = new_arena(layout)
    largest = torch.finfo(dtype).max
    page, slot = int32(*[ids[0]] * num), torch.arange(num, dtype=torch.int32)
    k = torch.full((num, 1, 8), largest)
    with either(on_kernels):
        append_kv(k, k, arena, layout, 0, page, slot, torch.ones_like(slot), rope(8))
    keys = in_order(layout.view(arena, 0)[page.long(), 0, :, slot.long()], 8, on_kernels).float()
    exact = append_kv_ref(k, k, torch.ones_like(slot), rope(8))[0].clamp(-largest, largest)
    assert keys.isfinite().all() and exact.abs().max() == largest
    assert_close(keys, exact, ROUNDING[dtype])


@ON_KERNELS
@pytest.mark.parametrize("dtype", SCALED)
def test_scaled_numbers_saturate(dtype: torch.dtype, on_kernels: bool) -> None:
    """Code times scale is finite, of the largest numbers too."""
    layout = KVLayout(1, 1, 8, dtype)
    arena, ids = new_arena(layout)
    v = torch.tensor([math.inf, -math.inf, 1e38, -1e38, 65504.0, 1.0, 0.0, -0.0]).view(1, 1, 8)
    k = torch.full((1, 1, 8), torch.finfo(torch.float32).max)
    with either(on_kernels):
        append_kv(k, v, arena, layout, 0, int32(ids[0]), int32(2), int32(1), rope(8))
    codes, scales = layout.view(arena, 0)[ids[0], :, 0, 2].float(), layout.scales(arena, 0)[ids[0], :, 0, 2]
    keys, values = model_order(*(codes * scales[:, None]), layout, 8, on_kernels)
    assert keys.isfinite().all() and values.isfinite().all()
    largest = torch.finfo(torch.bfloat16).max
    assert_close(values, v[0, 0].clamp(-largest, largest).double(), 0.02)
    exact = append_kv_ref(k, v, int32(1), rope(8))[0].clamp(-largest, largest)
    assert_close(keys[None, None], exact, 0.05)


@ON_KERNELS
def test_a_workspace_of_other_tokens_begins_anew(on_kernels: bool) -> None:
    layout, table = KVLayout(1, 2, 8, torch.float32), rope(8)
    arena, ids = new_arena(layout)
    other, space = arena.clone(), Workspace()
    for num in (1, 70, 3):
        token = torch.arange(num, dtype=torch.int32)
        page, k = int32(*ids)[(token // PAGE).long()], torch.randn(num, 2, 8)
        with either(on_kernels):
            for to, workspace in ((arena, space), (other, None)):
                append_kv(k, k, to, layout, 0, page, token % PAGE, token % PAGE, table, workspace=workspace)
        assert_same_bits(arena, other)


@ON_KERNELS
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_nan_stays_with_its_token_and_head(dtype: torch.dtype, on_kernels: bool) -> None:
    layout = KVLayout(1, 2, 8, dtype)
    arena, ids = new_arena(layout)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    k[0, 1, 5], v[1, 0, 2] = math.nan, math.nan
    page, slot = int32(ids[0], ids[0]), int32(6, 7)
    with either(on_kernels):
        append_kv(k, v, arena, layout, 0, page, slot, slot, rope(8))
    stored = layout.view(arena, 0)[ids[0], :, :, 6:8].float()  # [2, Hkv, T, D]
    _, values = model_order(stored[0], stored[1], layout, 8, on_kernels)
    assert values[0, 1, 2] == 0 and values[0, 1].count_nonzero() == 7, "a value's NaN is 0"
    if layout.scaled:
        scales = layout.scales(arena, 0)[ids[0], :, :, 6:8]
        assert not stored[0, 1, 0].any(), "codes of a key with a NaN"
        assert scales.isnan().nonzero().tolist() == [[0, 1, 0]]
        return
    lost = stored.isnan()
    assert in_order(lost[0, 1, 0].float(), 8, on_kernels).nonzero().flatten().tolist() == [1, 5]  # the pair
    assert lost.sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_leaves_what_does_not_rotate(dtype: torch.dtype) -> None:
    """Bit for bit, -0.0 beside an infinity as well."""
    layout = KVLayout(1, 1, 16, dtype)
    arena, ids = new_arena(layout)
    k = torch.randn(1, 1, 16).to(dtype)
    k[..., 8], k[..., 12], k[..., 15] = -0.0, -1.0, math.inf
    with either(True):
        append_kv(k, k, arena, layout, 0, int32(ids[0]), int32(0), int32(63), rope(8, factor=3.0))
    keys = in_order(layout.view(arena, 0)[ids[0], 0, :, 0], 8, True)
    largest = torch.finfo(dtype).max
    assert_same_bits(keys[:, 8:], k[0, :, 8:].clamp(-largest, largest))


@ON_KERNELS
def test_codes_round_ties_to_even(on_kernels: bool) -> None:
    rows = {
        torch.int8: ([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], [127, 0, 2, 2, 0, -2, -2, 126]),
        torch.float8_e4m3fn: (
            [448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, 400.0, -432.0],  # 2^-9 is its smallest
            [448, 16, 20, -16, 0, 2.0**-8, 384, -448],
        ),
    }
    for dtype, (row, expected) in rows.items():
        layout = KVLayout(1, 1, 8, dtype)
        arena, ids = new_arena(layout)
        v = torch.tensor(row).view(1, 1, 8)
        with either(on_kernels):
            append_kv(v, v, arena, layout, 0, int32(ids[0]), int32(0), int32(0), rope(8))
        stored = layout.view(arena, 0)[ids[0], :, 0, 0].float()
        assert model_order(*stored, layout, 8, on_kernels)[1].tolist() == expected
        assert layout.scales(arena, 0)[ids[0], 1, 0, 0] == 1.0


@ON_KERNELS
def test_codes_take_one_rounding_to_the_inverse_of_a_unit(on_kernels: bool) -> None:
    """Numbers next to a tie, chosen so that a second rounding would show."""
    largest = torch.rand(20000) + 1
    x = largest / 127 * (torch.randint(0, 127, (20000,)) + 0.5)
    once, twice = (127.0 / largest.double()).float(), (1.0 / largest.double()).float() * 127.0
    shows = ((x * once).round() != (x * twice).round()).nonzero()[:6, 0]
    assert len(shows) == 6
    v = torch.zeros(1, 6, 2)
    v[0, :, 0], v[0, :, 1] = largest[shows], x[shows]
    v = torch.cat((v, torch.zeros(1, 6, 2)), 2)
    layout = KVLayout(1, 6, 4, torch.int8)
    arena, ids = new_arena(layout)
    with either(on_kernels):
        append_kv(v, v, arena, layout, 0, int32(ids[0]), int32(0), int32(0), rope(4))
    stored = model_order(*layout.view(arena, 0)[ids[0], :, :, 0].float(), layout, 4, on_kernels)[1]
    assert_same_bits(stored[:, 1].contiguous(), (x * once)[shows].round())


@ON_KERNELS
@pytest.mark.parametrize("dtype", SCALED)
def test_rows_too_small_for_an_inverse_have_codes_of_zero(dtype: torch.dtype, on_kernels: bool) -> None:
    layout = KVLayout(1, 1, 8, dtype)
    arena, ids = new_arena(layout)
    v = torch.zeros(3, 1, 8)
    v[1, 0, 3], v[2, 0, 3] = -1e-44, 2.0**-112
    slot = int32(0, 1, 2)
    with either(on_kernels):
        append_kv(v, v, arena, layout, 0, int32(*ids[:1] * 3), slot, slot, rope(8))
    _, codes = model_order(*layout.view(arena, 0)[ids[0], :, 0, :3].float(), layout, 8, on_kernels)
    scales = layout.scales(arena, 0)[ids[0], 1, 0, :3]
    assert not codes[:2].any() and codes[2, 3] == CODE_MAX[dtype]
    assert_same_bits(scales, (v[:, 0].abs().amax(1).double() / CODE_MAX[dtype]).float())


@ON_KERNELS
def test_append_kv_needs_no_tokens(on_kernels: bool) -> None:
    layout = KVLayout(1, 2, 8, torch.float32)
    arena, _ = new_arena(layout)
    none = int32()
    with either(on_kernels):
        append_kv(torch.empty(0, 2, 8), torch.empty(0, 2, 8), arena, layout, 0, none, none, none, rope(8))
    assert not arena.any()


@ON_KERNELS
def test_append_kv_refuses(on_kernels: bool) -> None:
    layout, table = KVLayout(1, 2, 8, torch.float32), rope(8)
    arena, ids = new_arena(layout)
    k, page, slot = torch.randn(3, 2, 8), int32(*ids), int32(0, 1, 2)

    def refused(message: str, k: Tensor = k, v: Tensor = k, table: RopeTable = table, **places: Tensor) -> None:
        at = {"page_id": page, "store_slot": slot, "rot_slot": slot} | places
        with pytest.raises(ValueError, match=message), either(on_kernels):
            append_kv(k, v, arena, layout, 0, rope=table, **at)

    for bad in (k[:2], k[:, :1], k[..., :6], k[0]):
        refused(r"k is \(.*\), expected \(3, 2, 8\)", k=bad)
        refused(r"v is \(.*\), expected \(3, 2, 8\)", v=bad)
    refused(
        r"store_slot \(2,\) and rot_slot \(3,\) must have page_id's shape \(3,\)",
        store_slot=slot[:2],
    )
    refused("requires grad", k=k.clone().requires_grad_())
    refused("requires grad", v=k.clone().requires_grad_())
    refused(r"page_id is in \d+\.\.1\d+, expected 1\.\.6", page_id=page + 10**6)
    refused(r"page_id is in 0\.\.6, expected 1\.\.6", page_id=int32(0, *ids[1:]))
    refused(r"page_id is in -1\.\.6", page_id=int32(-1, *ids[1:]))
    refused(r"store_slot is in 0\.\.64, expected 0\.\.63", store_slot=int32(0, 1, 64))
    refused(r"rot_slot is in -1\.\.1, expected 0\.\.63", rot_slot=int32(0, 1, -1))
    refused(r"page_id is torch\.int64 with strides \(1,\), expected contiguous int32", page_id=page.long())
    refused(r"rot_slot is torch\.int32 with strides \(2,\)", rot_slot=torch.zeros(3, 2, dtype=torch.int32)[:, 0])
    refused(r"rope turns 16 dims up to position \d+, expected at most 8 dims and at least 63", table=rope(16))
    refused("up to position 62", table=RopeTable(table.cos[:126], table.sin[:126], 8))
    with pytest.raises(ValueError, match=r"layer 1 is not in 0\.\.0"):
        append_kv(k, k, arena, layout, 1, page, slot, slot, table)
    assert not arena.any()


def test_append_kv_kernel_refuses_what_it_cannot_load_16_bytes_at_a_time() -> None:
    layout, table = KVLayout(1, 2, 8, torch.float32), rope(8)
    arena, ids = new_arena(layout)
    k, page, slot = torch.randn(3, 2, 8), int32(*ids), int32(0, 1, 2)
    apart, wide = torch.zeros(3, 3, 8)[:, ::2], torch.zeros(3, 17)[:, :16].view(3, 2, 8)
    moved, turned = torch.zeros(49)[1:].view(3, 2, 8), torch.zeros(3, 8, 2).transpose(1, 2)
    with pytest.raises(ValueError, match=r"v is torch.float64, expected float32, bfloat16 or float16"):
        append_kv(k, k.double(), arena, layout, 0, page, slot, slot, table)
    with pytest.raises(ValueError, match=r"rope tables must be contiguous float32, got torch.float64"):
        append_kv(k, k, arena, layout, 0, page, slot, slot, replace(table, cos=table.cos.double()))
    for bad in (apart, wide, moved, turned):
        for k_, v_, name in ((bad, k, "k"), (k, bad, "v")):
            strides = re.escape(str(bad.stride()))
            message = rf"append_kv: {name} must be .* got {bad.dtype} with strides {strides} and address 0x"
            with pytest.raises(ValueError, match=message), either(True):
                append_kv(k_, v_, arena, layout, 0, page, slot, slot, table)
    with pytest.raises(ValueError, match="arena must be contiguous, on cpu and aligned to 16 bytes"), either(True):
        append_kv(k, k, torch.zeros(1 << 16, dtype=torch.uint8)[4:], layout, 0, page, slot, slot, table)
    assert not arena.any()


@jit
def _fp8_kernel(x_ptr, out_ptr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, tl.load(x_ptr).to(tl.float8e4nv))


@pytest.mark.aot
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_fp8_pages_are_refused_where_the_compiler_has_no_fp8(arch: int) -> None:
    x, out = torch.zeros(1), torch.zeros(1).to(torch.float8_e4m3fn)
    layout = KVLayout(1, 1, 16, torch.float8_e4m3fn)
    arena, ids = new_arena(layout)
    one, k = int32(1), torch.zeros(1, 1, 16)
    if arch >= FP8_ARCH:
        with dryrun(arch) as launches:
            _fp8_kernel[(1,)](x, out, **OPTIONS)
            append_kv(k, k, arena, layout, 0, int32(ids[0]), one, one, rope(16))
        assert len(launches) == 2
        return
    with pytest.raises(CompilationError), dryrun(arch):
        _fp8_kernel[(1,)](x, out, **OPTIONS)
    message = f"float8_e4m3fn need sm_89 or later, as sm_90 is, not sm_{arch}"
    with pytest.raises(ValueError, match=message), dryrun(arch):
        append_kv(k, k, arena, layout, 0, int32(ids[0]), one, one, rope(16))


# ---- copy_pages --------------------------------------------------------------------------------------


def copied(arena: Tensor, layout: KVLayout, pairs: list[tuple[int, int]], num_layers: int) -> Tensor:
    """The arena after copies of pages, by address."""
    after = arena.clone()
    for src, dst in pairs:
        for layer in range(num_layers):
            at = layer * layout.layer_stride
            block = arena[src * ID_BYTES + at :][: layout.block_bytes]
            after[dst * ID_BYTES + at :][: layout.block_bytes] = block
    return after


@ON_KERNELS
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"), [(1, 10, torch.float32), (2, 80, torch.int8), (1, 8, torch.float16)]
)
def test_copy_pages_copies_all_layers_and_nothing_else(
    heads: int, dim: int, dtype: torch.dtype, on_kernels: bool
) -> None:
    layout = KVLayout(3, heads, dim, dtype, 4)
    arena, ids = poisoned_arena(layout)
    arena[: layout.extent] = 0
    for src, dst in ((ids[1], ids[2]), (ids[5], ids[0]), (0, ids[3])):
        expected = copied(arena, layout, [(src, dst)], 3)
        with either(on_kernels):
            copy_pages(arena, layout, src, dst)
        assert_same_bits(arena, expected)
    src, dst = [ids[0], ids[7], ids[0]], [ids[6], ids[1], ids[11]]
    for num_layers in (1, 2, None):
        expected = copied(arena, layout, list(zip(src, dst, strict=True)), num_layers or 3)
        with either(on_kernels):
            copy_pages(arena, layout, src, dst, num_layers=num_layers)
        assert_same_bits(arena, expected)
    with either(on_kernels):
        copy_pages(arena, layout, [], [])
    assert_same_bits(arena, expected)


@ON_KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_copy_pages_copies_a_band_between_layouts_of_other_depth(dtype: torch.dtype, on_kernels: bool) -> None:
    deep, flat = KVLayout(3, 2, 20, dtype, 4), KVLayout(2, 2, 20, dtype, 6)
    for layout, other in ((deep, flat), (flat, deep)):
        for num_layers in (1, 2):
            arena, ids = poisoned_arena(deep)
            src, dst = [ids[0], 0], [ids[5], ids[1]]
            expected = arena.clone()
            for a, b in zip(src, dst, strict=True):
                for layer in range(num_layers):
                    block = arena[a * ID_BYTES + layer * layout.layer_stride :][: layout.block_bytes]
                    expected[b * ID_BYTES + layer * other.layer_stride :][: layout.block_bytes] = block
            assert layout.layer_stride != other.layer_stride and not torch.equal(expected, arena)
            with either(on_kernels):
                copy_pages(arena, layout, src, dst, num_layers=num_layers, dst_layout=other)
            assert_same_bits(arena, expected)


@ON_KERNELS
def test_copy_pages_refuses_layouts_of_other_blocks_or_too_few_layers(on_kernels: bool) -> None:
    layout = KVLayout(3, 2, 8, torch.float32)
    arena, ids = poisoned_arena(layout)
    before, last = arena.clone(), layout.num_ids(arena)
    for message, other, num_layers in (
        *(
            (r"blocks of KVLayout.* to those of KVLayout.*, expected equal heads", replace(layout, **other), None)
            for other in ({"num_kv_heads": 1}, {"head_dim": 16}, {"dtype": torch.float16})
        ),
        (r"num_layers is 3, expected 1\.\.2", replace(layout, num_layers=2), None),
        (r"num_layers is 4, expected 1\.\.3", replace(layout, num_layers=4), 4),
    ):
        with pytest.raises(ValueError, match=message), either(on_kernels):
            copy_pages(arena, layout, ids[0], ids[1], num_layers=num_layers, dst_layout=other)
    deeper = replace(layout, num_layers=4)
    message = f"from {ids[0]} to {last - 1}, expected ids below {last} and {deeper.num_ids(arena)} and no write"
    with pytest.raises(ValueError, match=message), either(on_kernels):
        copy_pages(arena, layout, ids[0], last - 1, dst_layout=deeper)
    with pytest.raises(ValueError, match=f"dst and src share page {ids[0]}"), either(on_kernels):
        copy_pages(arena, layout, ids[0], ids[0], num_layers=1, dst_layout=deeper)
    assert_same_bits(arena, before)


@ON_KERNELS
def test_copy_pages_refuses(on_kernels: bool) -> None:
    layout = KVLayout(2, 1, 8, torch.float32)
    arena, ids = poisoned_arena(layout)
    before = arena.clone()

    def refused(src: int | list[int], dst: int | list[int], message: str, num_layers: int | None = None) -> None:
        with pytest.raises(ValueError, match=message), either(on_kernels):
            copy_pages(arena, layout, src, dst, num_layers=num_layers)
        assert_same_bits(arena, before)

    for src, dst in ((ids[0], 0), (ids[0], ids[-1] + 1), (ids[-1] + 1, ids[0]), (-1, ids[0]), (ids[0], -1)):
        refused(src, dst, f"from {src} to {dst}, expected ids below {ids[-1] + 1}")
        refused([ids[1], src], [ids[2], dst], f"from {src} to {dst}, expected ids below {ids[-1] + 1}")
    refused(ids[:2], ids[2:3], "2 pages to copy to 1, expected as many")
    refused([ids[0], ids[0]], [ids[1], ids[1]], "dst names a page twice, expected 2 different ones")
    refused(ids[:2], ids[1:3], f"dst and src share page {ids[1]}")
    refused(ids[0], ids[0], f"dst and src share page {ids[0]}")
    for num_layers in (0, 3):
        refused(ids[0], ids[1], rf"num_layers is {num_layers}, expected 1\.\.2", num_layers)


# ---- commit_path -------------------------------------------------------------------------------------


@ON_KERNELS
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 10), (1, 96)])
def test_commit_path_copies_rows_and_nothing_else(heads: int, dim: int, dtype: torch.dtype, on_kernels: bool) -> None:
    """Keys, values and scales of a token, all heads and layers."""
    layout = KVLayout(2, heads, dim, dtype, 3)
    arena, ids = poisoned_arena(layout)
    src = [[ids[4], 0], [ids[4], 63], [ids[7], 12], [ids[4], 0]]
    dst = [[ids[0], 63], [ids[4], 1], [ids[4], 2], [ids[8], 0]]
    expected, size = arena.clone(), dim * dtype.itemsize
    for (src_page, src_slot), (dst_page, dst_slot) in zip(src, dst, strict=True):
        for layer in range(2):
            for plane in range(2 * heads):
                start = src_page * ID_BYTES + layer * layout.layer_stride + plane * layout.head_bytes
                row = arena[start + src_slot * size :][:size]
                scale = arena[start + PAGE * size + src_slot * 4 :][:4].view(torch.float32) if layout.scaled else None
                write(expected, layout, layer, dst_page, dst_slot, plane, row, scale)
    with either(on_kernels):
        commit_path(arena, layout, torch.tensor(src, dtype=torch.int32), dst)
    assert_same_bits(arena, expected)
    with either(on_kernels):
        commit_path(arena, layout, [], [])
        commit_path(arena, layout, int32().view(0, 2), int32().view(0, 2))
    assert_same_bits(arena, expected)


@ON_KERNELS
def test_commit_path_refuses(on_kernels: bool) -> None:
    layout = KVLayout(2, 1, 8, torch.int8)
    arena, ids = poisoned_arena(layout)
    before, last, a, b = arena.clone(), ids[-1], ids[0], ids[1]

    def refused(src: list[list[int]], dst: list[list[int]], message: str) -> None:
        with pytest.raises(ValueError, match=message), either(on_kernels):
            commit_path(arena, layout, src, dst)
        assert_same_bits(arena, before)

    refused([[a, 1]], [[a, 2], [a, 3]], r"src \(1, 2\) and dst \(2, 2\) must both be \[n, 2\]")
    refused([[a, 1, 0]], [[a, 2, 0]], r"src \(1, 3\) and dst \(1, 3\) must both be \[n, 2\]")
    refused([a, 1], [a, 2], r"src \(2,\) and dst \(2,\) must both be \[n, 2\]")
    for src, dst in (
        ((last + 1, 0), (a, 0)),
        ((a, 0), (last + 1, 0)),
        ((-1, 0), (a, 0)),
        ((a, 64), (b, 0)),
        ((a, 0), (b, 64)),
        ((a, -1), (b, 0)),
        ((a, 0), (b, -1)),
        ((a, 0), (0, 0)),
    ):
        message = f"from {src} to {dst}, expected ids below {last + 1}, slots below 64 and no write to page 0"
        refused([[b, 9], list(src)], [[b, 8], list(dst)], re.escape(message))
    refused([[a, 0], [a, 1]], [[b, 3], [b, 3]], "dst names a row twice")
    refused([[a, 0], [a, 1]], [[a, 1], [b, 3]], re.escape(f"dst and src share row ({a}, 1)"))
    refused([[a, 0]], [[a, 0]], "dst and src share row")


# ---- compiled ----------------------------------------------------------------------------------------


def compiled(arch: int, layout: KVLayout, rot_dim: int, num: int = 5) -> list[Launch]:
    arena, ids = new_arena(layout, superblocks=2)
    k, v = parts_of(
        torch.zeros(num, 3 * layout.num_kv_heads, layout.head_dim, dtype=torch.bfloat16), layout.num_kv_heads
    )
    page, slot = int32(*ids[:1] * num), torch.arange(num, dtype=torch.int32)
    with dryrun(arch) as launches:
        append_kv(k, v, arena, layout, 1, page, slot, slot, rope(rot_dim))
        copy_pages(arena, layout, ids[:2], ids[2:4])
        commit_path(arena, layout, [[ids[0], 1]], [[ids[0], 2]])
    return launches


def factors_of_loaded(ttir: str) -> set[int]:
    """What numbers in memory, page ids and slots, are multiplied by in 32 bits."""
    module = Module(ttir)

    def is_loaded(value: str) -> bool:
        operation = module.definition.get(value)
        if operation is None or operation.name not in ("tt.load", "arith.addi"):
            return False
        return operation.name == "tt.load" or any(is_loaded(o) for o in operation.operands)

    found = set()
    for operation in module.operations:
        if operation.name == "arith.muli" and operation.type == "i32" and any(map(is_loaded, operation.operands)):
            (other,) = (o for o in operation.operands if not is_loaded(o))
            found.add(int(re.search(r"arith.constant (\d+)", module.definition[other].text)[1]))
    return found


@pytest.mark.aot
@pytest.mark.parametrize(
    ("arch", "heads", "dim", "rot_dim", "dtype"),
    [
        (80, 8, 128, 128, torch.bfloat16),
        (90, 8, 128, 128, torch.bfloat16),
        (80, 8, 128, 128, torch.int8),
        (90, 8, 128, 128, torch.float8_e4m3fn),
        (90, 32, 64, 64, torch.int8),
        (90, 3, 80, 80, torch.float32),
        (90, 2, 256, 64, torch.float16),
    ],
)
def test_kernels_compile(arch: int, heads: int, dim: int, rot_dim: int, dtype: torch.dtype) -> None:
    """No register spills; stores of 16 bytes, scales apart; offsets in 64 bits; no fused step but those written."""
    launches = compiled(arch, KVLayout(3, heads, dim, dtype, 4), rot_dim)
    assert {launch.name: launch.grid[:2] for launch in launches} == {
        "_append_kernel": (5, 1),
        "_copy_kernel": (2, 3),
        "_commit_kernel": (1, 3),
    }
    for launch in launches:
        assert launch.kernel.n_spills == 0 and launch.registers <= 96, f"{launch}"
        assert narrow_products(launch.asm["ttir"]) == []
        row = dim if launch.name == "_append_kernel" else dim * dtype.itemsize // 8  # slots alone are multiplied so
        assert factors_of_loaded(launch.asm["ttir"]) == ({row} if launch.name != "_copy_kernel" else set())
        stores = Counter(re.findall(r"\bst\.global(\S*)\s", launch.asm["ptx"]))
        if dtype in CODE_MAX and launch.name != "_copy_kernel":
            assert stores.pop(".b32") <= 2
        assert stores and set(stores) <= {".v4.b32", ".v2.b64"}, f"{launch}: {stores}"
    ptx = launches[0].asm["ptx"]
    assert len(re.findall(r"\bld\.global\.v4\.b32\s", ptx)) >= 4 or rot_dim < dim
    if dtype == torch.float8_e4m3fn:
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "e4m3x2.f16" not in ptx, "one rounding"


@pytest.mark.aot
def test_one_binary_for_any_number_of_tokens() -> None:
    """Wherever their page ids, slots and rows lie, and in every layer."""
    layout = KVLayout(17, 2, 64, torch.bfloat16, 16)
    arena, ids = new_arena(layout, superblocks=1)
    qkv, wide = torch.zeros(64, 6, 64, dtype=torch.bfloat16), torch.zeros(64, 7, 64, dtype=torch.bfloat16)
    with dryrun(90) as launches:
        for layer, (start, stop) in enumerate(((0, 1), (1, 2), (0, 16), (3, 20), (0, 64))):
            for x in (qkv, wide):
                k, v = parts_of(x[start:stop, :6], 2)
                places = int32(*ids[:1] * 64)[start:stop], *[torch.arange(64, dtype=torch.int32)[start:stop]] * 2
                append_kv(k, v, arena, layout, 4 * layer, *places, rope(64))
    assert len(launches) == 10 and len({launch.kernel.hash for launch in launches}) == 1
    with dryrun(90) as launches:
        for num in (1, 2, 8):
            copy_pages(arena, layout, ids[:num], ids[8 : 8 + num])
            commit_path(arena, layout, [[ids[0], i] for i in range(num)], [[ids[1], i] for i in range(num)])
    assert Counter(launch.kernel.hash for launch in launches).most_common(1)[0][1] == 3
