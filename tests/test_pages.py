"""csrc_triton/pages.py: where keys and values lie, what append_kv stores, how pages are copied."""

from __future__ import annotations

import math

import pytest
import torch
from checks import ANY_THREADS, assert_close, assert_same_bits
from torch import Tensor

from csrc_triton.cpu import PAGE, half_split
from csrc_triton.fused import RopeTable, rope_table
from csrc_triton.pages import ID_BYTES, KVLayout, append_kv, append_kv_ref, copy_pages

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "pages"), [(3, 64, 4), (1, 10, 3), (2, 80, 1), (1, 8, 5)])
def test_views_of_pages_and_layers_are_disjoint(heads: int, dim: int, pages: int, dtype: torch.dtype) -> None:
    layout = KVLayout(3, heads, dim, dtype, pages)
    arena, ids = new_arena(layout)
    value = 0
    for layer in range(layout.num_layers):
        view = layout.view(arena, layer)
        assert view.shape[1:] == (2, heads, PAGE, dim)
        for page in ids:
            value += 1
            view[page] = value  # small integers: exact in every dtype
    value = 0
    for layer in range(layout.num_layers):
        for page in ids:
            value += 1
            assert bool((layout.view(arena, layer)[page] == value).all()), (layer, page)
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


def test_last_id_ends_with_the_arena() -> None:
    layout = KVLayout(3, 2, 16, torch.float32, 4)
    arena, ids = new_arena(layout)
    assert len(layout.blocks(arena)) == (arena.numel() - layout.extent) // ID_BYTES + 1 == ids[-1] + 1
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


# ---- append_kv ---------------------------------------------------------------------------------------


def stored_keys(layout: KVLayout, arena: Tensor, layer: int, page: Tensor, slot: Tensor, rot_dim: int) -> Tensor:
    """[T, Hkv, D] in the order of a model's heads."""
    return half_split(layout.view(arena, layer)[page.long(), 0, :, slot.long()], rot_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "rot_dim"),
    [(2, 64, 64), (1, 8, 8), (3, 80, 80), (1, 256, 256), (2, 96, 24), (1, 10, 4), (3, 6, 6)],
)
def test_append_kv(heads: int, dim: int, rot_dim: int, dtype: torch.dtype) -> None:
    layout, table = KVLayout(2, heads, dim, dtype, 2), rope(rot_dim, factor=1.25)
    arena, ids = new_arena(layout)
    page = int32(*(ids[i] for i in (3, 3, 0, 5, 0, 1)))
    slot, rot_slot = int32(0, 63, 7, 1, 8, 30), int32(0, 63, 7, 62, 8, 5)
    k, v = torch.randn(6, heads, dim), torch.randn(6, heads, dim)
    before = k.clone(), v.clone()
    append_kv(k, v, arena, layout, 1, page, slot, rot_slot, table)
    keys, values = append_kv_ref(k, v, rot_slot, table)
    got = stored_keys(layout, arena, 1, page, slot, rot_dim).double()
    # rotation in float32, then one rounding to the pages' dtype
    assert (got - keys).abs().max() <= ROUNDING[dtype] * keys.abs().max()
    assert_same_bits(layout.view(arena, 1)[page.long(), 1, :, slot.long()], values.to(dtype))
    assert not layout.view(arena, 0)[ids].any(), "the other layer"
    view = layout.view(arena, 1)[ids].clone()
    for p, s in zip(page.tolist(), slot.tolist(), strict=True):
        view[ids.index(p), :, :, s] = 0
    assert not view.any(), "the other slots"
    assert_same_bits(k, before[0])
    assert_same_bits(v, before[1])


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
        assert_same_bits(layout.view(other, 0)[where], layout.view(arena, 0)[where], f"by {len(pieces[0])}")


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_saturate(dtype: torch.dtype, num: int) -> None:
    """So that a later token's value, weighted by zero, cannot make an earlier row NaN."""
    layout = KVLayout(1, 1, 8, dtype)
    arena, ids = new_arena(layout)
    v = torch.tensor([math.inf, -math.inf, 3e38, -3e38, 65504.0, 1e5, 1.0, 0.0]).view(1, 1, 8).repeat(num, 1, 1)
    page, slot = int32(*[ids[0]] * num), torch.arange(num, dtype=torch.int32)
    append_kv(torch.zeros(num, 1, 8), v, arena, layout, 0, page, slot, slot, rope(8))
    largest = torch.finfo(dtype).max
    got = layout.view(arena, 0)[ids[0], 1, 0, :num].float()
    assert got.isfinite().all()
    assert_same_bits(got, v[:, 0].clamp(-largest, largest).to(dtype).float())


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_saturate(dtype: torch.dtype, num: int) -> None:
    """A key may grow by rotation; it stays finite and keeps its direction's signs."""
    layout = KVLayout(1, 1, 8, dtype)
    arena, ids = new_arena(layout)
    largest = torch.finfo(dtype).max
    page, slot = int32(*[ids[0]] * num), torch.arange(num, dtype=torch.int32)
    k = torch.full((num, 1, 8), largest)
    append_kv(k, k, arena, layout, 0, page, slot, torch.ones_like(slot), rope(8))
    keys = stored_keys(layout, arena, 0, page, slot, 8).float()
    exact = append_kv_ref(k, k, torch.ones_like(slot), rope(8))[0].clamp(-largest, largest)
    assert keys.isfinite().all() and exact.abs().max() == largest
    assert_close(keys, exact, ROUNDING[dtype])


def test_append_kv_needs_no_tokens() -> None:
    layout = KVLayout(1, 2, 8, torch.float32)
    arena, _ = new_arena(layout)
    none = int32()
    append_kv(torch.empty(0, 2, 8), torch.empty(0, 2, 8), arena, layout, 0, none, none, none, rope(8))
    assert not arena.any()


def test_append_kv_refuses() -> None:
    layout, table = KVLayout(1, 2, 8, torch.float32), rope(8)
    arena, ids = new_arena(layout)
    k, page, slot = torch.randn(3, 2, 8), int32(*ids), int32(0, 1, 2)
    for bad in (k[:2], k[:, :1], k[..., :6], k[0]):
        with pytest.raises(ValueError, match=r"k is \(.*\), expected \(3, 2, 8\)"):
            append_kv(bad, k, arena, layout, 0, page, slot, slot, table)
        with pytest.raises(ValueError, match=r"v is \(.*\), expected \(3, 2, 8\)"):
            append_kv(k, bad, arena, layout, 0, page, slot, slot, table)
    with pytest.raises(ValueError, match=r"store_slot \(2,\) and rot_slot \(3,\) must have page_id's shape \(3,\)"):
        append_kv(k, k, arena, layout, 0, page, slot[:2], slot, table)
    with pytest.raises(ValueError, match=r"layer 1 is not in 0\.\.0"):
        append_kv(k, k, arena, layout, 1, page, slot, slot, table)
    for args in ((k.clone().requires_grad_(), k), (k, k.clone().requires_grad_())):
        with pytest.raises(ValueError, match="requires grad"):
            append_kv(*args, arena, layout, 0, page, slot, slot, table)
    with pytest.raises(IndexError):
        append_kv(k, k, arena, layout, 0, page + 10**6, slot, slot, table)
    assert not arena.any()


# ---- copy_pages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_pages_copies_one_page_in_all_layers(dtype: torch.dtype) -> None:
    layout = KVLayout(3, 1, 10, dtype, 4)
    arena, ids = new_arena(layout)
    arena[ids[0] * ID_BYTES :] = torch.randint(0, 256, (arena.numel() - ids[0] * ID_BYTES,)).to(torch.uint8)
    for src, dst in ((ids[1], ids[2]), (ids[5], ids[0]), (0, ids[3])):
        before = arena.clone()
        copy_pages(arena, layout, src, dst)
        expected = layout.blocks(before).clone()
        for page in ids:
            assert_same_bits(layout.blocks(arena)[page], expected[src if page == dst else page], f"page {page}")
        outside = torch.ones_like(arena, dtype=torch.bool)
        for layer in range(3):
            start = dst * ID_BYTES + layer * layout.layer_stride
            outside[start : start + layout.block_bytes] = False
        assert_same_bits(arena[outside], before[outside], "bytes of no page")


def test_copy_pages_refuses_what_is_no_page() -> None:
    layout = KVLayout(2, 1, 8, torch.float32)
    arena, ids = new_arena(layout)
    for src, dst in ((ids[0], 0), (ids[0], ids[-1] + 1), (ids[-1] + 1, ids[0]), (-1, ids[0]), (ids[0], -1)):
        with pytest.raises(ValueError, match=f"from {src} to {dst}, expected ids below {ids[-1] + 1}"):
            copy_pages(arena, layout, src, dst)
