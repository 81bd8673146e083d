"""KV pages: where a key lies, how it is stored, how pages move.

    stored key = R(slot) k,  slot 0..63 within its page        stored value = v

Memory: one byte tensor, the arena. A page is 64 tokens of one model in every layer; its block of layer l
starts at byte id * 4096 + l * layer_stride and holds [k|v][kv head]{[slot][D], then 64 scales if scaled}. A key
knows its slot and not its position, so a page can stand anywhere in any sequence. Id 0 is a region of zeros.
Rotation turns pairs (a, b) of a key's numbers: kernels store a head as [a | b], which is the model's order where
all of it rotates; on a CPU a and b alternate. Pages of int8 and float8_e4m3fn hold codes: x is about
code * scale, scale = max|x| / 127 (448 for float8) of a token's head, float32; for kernels a and b of codes alternate,
and so do the halves of a value.
Promise: what is stored depends on the token's own key, value and slot alone, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from csrc_triton import cpu, cpu_attention
from csrc_triton.cpu_attention import CODE_MAX, PAGE, Workspace, largest_stored
from csrc_triton.fused import FLOATS, ROUND, ROW_BYTES, RopeTable, check_rope, row_at, turned, units
from csrc_triton.launch import OPTIONS, arch_of, constexpr, jit, runs_kernel, tl

ID_BYTES = 4096  # an id counts bytes in these units
SCALE_BYTES = torch.float32.itemsize
MAX_PIECE = 16384  # bytes of a block that a program copies
MAX_WORD = 8  # bytes
FP8_ARCH = 89  # the first whose float8_e4m3fn Triton compiles
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

BYTES_OF_ID = constexpr(ID_BYTES)
PAGE_SLOTS = constexpr(PAGE)
FIRST_DISTANCE = constexpr(cpu.MIN_DISTANCE)


@dataclass(frozen=True)
class KVLayout:
    """One model's pages in an arena."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of what is stored; int8 and float8_e4m3fn with a scale per token and head
    pages_per_superblock: int = 1  # order within a superblock is [layer][page]

    def __post_init__(self) -> None:
        if self.dtype not in (*FLOATS, *CODE_MAX):
            raise ValueError(
                f"KVLayout: dtype is {self.dtype}, expected float32, bfloat16, float16, int8 or float8_e4m3fn"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"KVLayout: head_dim is {self.head_dim}, expected an even number: keys turn in pairs")

    @property
    def scaled(self) -> bool:
        """Whether the pages hold codes, to be multiplied by a float32 scale per token and head."""
        return self.dtype in CODE_MAX

    @property
    def head_bytes(self) -> int:
        """The 64 keys, or values, of a head in one page, and their scales."""
        return PAGE * (self.head_dim * self.dtype.itemsize + (SCALE_BYTES if self.scaled else 0))

    @property
    def token_bytes(self) -> int:
        """Key, value and scales of a token in one layer."""
        return 2 * self.num_kv_heads * self.head_bytes // PAGE

    @property
    def block_bytes(self) -> int:
        """One page in one layer, keys and values, rounded up to 4096."""
        return -(-2 * self.num_kv_heads * self.head_bytes // ID_BYTES) * ID_BYTES

    @property
    def layer_stride(self) -> int:
        return self.pages_per_superblock * self.block_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.block_bytes

    @property
    def extent(self) -> int:
        """Bytes from the start of a page's first block to the end of its last."""
        return (self.num_layers - 1) * self.layer_stride + self.block_bytes

    def page_ids(self, blocks: Tensor | Sequence[int] | int) -> Tensor:
        """Ids, int32, of pages by their number in an arena that holds nothing but this layout's superblocks."""
        number = torch.as_tensor(blocks, dtype=torch.int64)
        before = number // self.pages_per_superblock * self.pages_per_superblock * (self.num_layers - 1)
        return ((number + before) * (self.block_bytes // ID_BYTES)).int()

    def view(self, arena: Tensor, layer: int) -> Tensor:
        """[ids, 2, num_kv_heads, 64, head_dim] over the arena, indexed by page id; rows overlap."""
        ids = self._num_ids("view", arena, layer)
        size, head = self.dtype.itemsize, self.head_bytes // self.dtype.itemsize
        shape = (ids, 2, self.num_kv_heads, PAGE, self.head_dim)
        strides = (ID_BYTES // size, self.num_kv_heads * head, head, self.head_dim, 1)
        flat = arena.view(self.dtype)
        return flat.as_strided(shape, strides, flat.storage_offset() + layer * self.layer_stride // size)

    def scales(self, arena: Tensor, layer: int) -> Tensor:
        """[ids, 2, num_kv_heads, 64] float32 over the arena, as `view`: a value is code times scale."""
        if not self.scaled:
            raise ValueError(f"KVLayout.scales: pages of {self.dtype} have none, those of int8 and float8_e4m3fn do")
        ids = self._num_ids("scales", arena, layer)
        head = self.head_bytes // SCALE_BYTES
        strides = (ID_BYTES // SCALE_BYTES, self.num_kv_heads * head, head, 1)
        flat = arena.view(torch.float32)
        first = (layer * self.layer_stride + PAGE * self.head_dim) // SCALE_BYTES
        return flat.as_strided((ids, 2, self.num_kv_heads, PAGE), strides, flat.storage_offset() + first)

    def num_ids(self, arena: Tensor) -> int:
        """Ids whose blocks, all layers, end within the arena."""
        return self._num_ids("num_ids", arena, self.num_layers - 1)

    def _num_ids(self, name: str, arena: Tensor, layer: int) -> int:
        """Ids whose block of a layer ends within the arena."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"KVLayout.{name}: layer {layer} is not in 0..{self.num_layers - 1}")
        ids = (arena.numel() - layer * self.layer_stride - self.block_bytes) // ID_BYTES + 1
        if arena.dtype != torch.uint8 or ids <= 0:
            raise ValueError(
                f"KVLayout.{name}: arena must be uint8 and hold at least {self.extent} bytes, "
                f"got {arena.dtype} with {arena.numel()}"
            )
        return ids

    def blocks(self, arena: Tensor) -> Tensor:
        """[ids, num_layers, block_bytes] uint8 over the arena: all layers of a page at once."""
        return arena.as_strided(
            (self.num_ids(arena), self.num_layers, self.block_bytes), (ID_BYTES, self.layer_stride, 1)
        )


# ---- append_kv ---------------------------------------------------------------------------------------


@jit
def _saturated(x, LARGEST: tl.constexpr):
    """NaN stays NaN."""
    x = tl.where(x > LARGEST, LARGEST, x)
    return tl.where(x < -LARGEST, -LARGEST, x)


@jit
def _magnitude(x):
    """Bits of |x|, which sort as |x| does, NaN highest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _rounded(x, DTYPE: tl.constexpr):
    """float32 as it is stored; among codes a NaN, of a row with a NaN, gives 0: the row's scale tells."""
    if DTYPE == tl.int8:
        return ((tl.where(x == x, x, 0.0) + ROUND) - ROUND).to(tl.int8)
    if DTYPE == tl.float8e4nv:
        return tl.where(x == x, x, 0.0).to(DTYPE)
    return x.to(DTYPE)


@jit
def _store_heads(
    a,
    b,
    out_ptr,
    scale_ptr,
    head,
    col,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    LARGEST: tl.constexpr,
    CODE_MAX: tl.constexpr,
):
    """Both halves of a token's heads, [heads, D / 2] float32 each; pointers are those of the first head.

    Codes of the two halves alternate, so that one word of attention's kernel holds a pair.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    a, b = _saturated(a, LARGEST), _saturated(b, LARGEST)
    if scale_ptr is not None:
        largest = tl.max(tl.maximum(_magnitude(a), _magnitude(b)), 1).to(tl.float32, bitcast=True)
        tl.store(scale_ptr + head * (HEAD_BYTES // 4), tl.div_rn(largest, CODE_MAX), mask=head < HEADS)
        per_unit = tl.div_rn(CODE_MAX, largest)
        per_unit = tl.where(per_unit == float("inf"), 0.0, per_unit)[:, None]
        a, b = a * per_unit, b * per_unit
    heads_at = out_ptr + head[:, None] * (HEAD_BYTES * 8 // dtype.primitive_bitwidth)
    alive = (head < HEADS)[:, None]
    if scale_ptr is None:
        mask = alive & (col < HALF)[None, :]
        tl.store(heads_at + col[None, :], _rounded(a, dtype), mask=mask)
        tl.store(heads_at + HALF + col[None, :], _rounded(b, dtype), mask=mask)
    else:
        both = tl.arange(0, 2 * col.shape[0])[None, :]
        tl.store(heads_at + both, tl.interleave(_rounded(a, dtype), _rounded(b, dtype)), mask=alive & (both < 2 * HALF))


@jit(
    do_not_specialize=["k_stride", "v_stride", "layer_ids", "factor"],
    do_not_specialize_on_alignment=["page_id_ptr", "store_slot_ptr", "rot_slot_ptr"],
)
def _append_kernel(
    k_ptr,  # [T, HEADS, D]
    v_ptr,  # [T, HEADS, D]
    arena_ptr,  # of the dtype that pages hold
    scales_ptr,  # the arena as float32, or None
    page_id_ptr,  # [T] int32
    store_slot_ptr,  # [T] int32
    rot_slot_ptr,  # [T] int32
    cos_ptr,  # [distances, ROT_DIM / 2] float32
    sin_ptr,  # the same shape
    k_stride,
    v_stride,
    layer_ids,
    factor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROT_DIM: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    LARGEST: tl.constexpr,
    CODE_MAX: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Grid (T,): a program owns a token, all its heads."""
    token = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = arena_ptr.dtype.element_ty.primitive_bitwidth // 8
    half: tl.constexpr = D // 2
    turning: tl.constexpr = ROT_DIM // 2
    head, col = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_HALF)
    mask = (head < HEADS)[:, None] & (col < half)[None, :]
    rotates = col < turning
    first = col if ROT_DIM == D else tl.where(rotates, col, turning + col)
    second = col + (turning if ROT_DIM == D else tl.where(rotates, turning, half))
    k_ptr, v_ptr = row_at(k_ptr, token, k_stride), row_at(v_ptr, token, v_stride)
    a = tl.load(k_ptr + head[:, None] * D + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(k_ptr + head[:, None] * D + second[None, :], mask=mask, other=0.0).to(tl.float32)
    a, b = _saturated(a, LARGEST), _saturated(b, LARGEST)  # an infinity would turn into NaN
    v_ptrs = v_ptr + head[:, None] * D + col[None, :]
    v_first = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
    v_second = tl.load(v_ptrs + half, mask=mask, other=0.0).to(tl.float32)
    # a NaN times the weight 0 would reach rows that do not see it; a token with one has NaN in its key as well
    v_first, v_second = tl.where(v_first == v_first, v_first, 0.0), tl.where(v_second == v_second, v_second, 0.0)

    row = (tl.load(rot_slot_ptr + token).to(tl.int64) - FIRST_DISTANCE) * turning
    cos = (tl.load(cos_ptr + row + col, mask=rotates, other=0.0) * factor)[None, :]
    sin = (tl.load(sin_ptr + row + col, mask=rotates, other=0.0) * factor)[None, :]
    turned_a, turned_b = turned(a, b, cos, sin)
    if ROT_DIM != D:
        turned_a, turned_b = tl.where(rotates[None, :], turned_a, a), tl.where(rotates[None, :], turned_b, b)

    block = tl.load(page_id_ptr + token).to(tl.int64) + layer_ids
    slot = tl.load(store_slot_ptr + token)
    k_out = arena_ptr + block * (BYTES_OF_ID // size) + slot * D
    v_out = k_out + HEADS * (HEAD_BYTES // size)
    k_scale, v_scale = None, None
    if scales_ptr is not None:
        k_scale = scales_ptr + block * (BYTES_OF_ID // 4) + PAGE_SLOTS * D // 4 + slot
        v_scale = k_scale + HEADS * (HEAD_BYTES // 4)
    _store_heads(turned_a, turned_b, k_out, k_scale, head, col, HEADS, half, HEAD_BYTES, LARGEST, CODE_MAX)
    _store_heads(v_first, v_second, v_out, v_scale, head, col, HEADS, half, HEAD_BYTES, LARGEST, CODE_MAX)


def append_kv(
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    layout: KVLayout,
    layer: int,
    page_id: Tensor,
    store_slot: Tensor,
    rot_slot: Tensor,
    rope: RopeTable,
    *,
    workspace: Workspace | None = None,
) -> None:
    """Store T tokens: k, v [T, Hkv, D] (k normed, unrotated), page_id, store_slot, rot_slot [T] int32.

    Keys are rotated by rot_slot; numbers outside the layout's dtype saturate to its largest finite one (those of
    scaled layouts to bfloat16's), and a NaN among values is stored as 0. No two tokens share a place. k and v may be
    parts of one tensor: only their tokens' stride is free. Page ids and slots may be on the CPU, where they are
    checked; `workspace` remembers that and their copies.
    """
    cpu.refuse_grad("append_kv", k, v)
    want = (page_id.numel(), layout.num_kv_heads, layout.head_dim)
    for name, tensor in (("k", k), ("v", v)):
        if tuple(tensor.shape) != want:
            raise ValueError(f"append_kv: {name} is {tuple(tensor.shape)}, expected {want}")
    if store_slot.shape != page_id.shape or rot_slot.shape != page_id.shape:
        raise ValueError(
            f"append_kv: store_slot {tuple(store_slot.shape)} and rot_slot {tuple(rot_slot.shape)} must have "
            f"page_id's shape {tuple(page_id.shape)}"
        )
    if rope.rot_dim > layout.head_dim or rope.max_position < PAGE - 1:
        raise ValueError(
            f"append_kv: rope turns {rope.rot_dim} dims up to position {rope.max_position}, expected at most "
            f"{layout.head_dim} dims and at least {PAGE - 1}"
        )
    check_rope("append_kv", rope)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype not in FLOATS:
            raise ValueError(f"append_kv: {name} is {tensor.dtype}, expected float32, bfloat16 or float16")
    space = Workspace() if workspace is None else workspace
    space.begin("append", arena, page_id, store_slot, rot_slot)
    view = layer_view(arena, layout, layer, space)
    if runs_kernel(k):
        _launch_append(k, v, arena, layout, layer, (page_id, store_slot, rot_slot), rope, space)
        return
    cpu.refuse_device("append_kv", k)
    check_places(layout.num_ids(arena), (page_id, store_slot, rot_slot), space)
    scales = layer_scales(arena, layout, layer, space) if layout.scaled else None
    cpu_attention.append_kv_cpu(k, v, view, page_id, store_slot, rot_slot, rope, space, scales)


def check_places(num_ids: int, places: Sequence[Tensor], space: Workspace) -> None:
    """Refuse tokens that would lie outside the arena's pages, once a workspace; what is on a GPU is trusted."""
    if "places checked" in space or not places[0].numel():
        return
    limits = ((1, num_ids - 1), (0, PAGE - 1), (0, PAGE - 1))
    for name, place, (least, most) in zip(("page_id", "store_slot", "rot_slot"), places, limits, strict=True):
        if place.dtype != torch.int32 or not place.is_contiguous():
            raise ValueError(
                f"append_kv: {name} is {place.dtype} with strides {place.stride()}, expected contiguous int32"
            )
        if place.is_cpu and not least <= int(place.min()) <= int(place.max()) <= most:
            raise ValueError(
                f"append_kv: {name} is in {int(place.min())}..{int(place.max())}, expected {least}..{most}"
            )
    space["places checked"] = True


def check_heads(name: str, what: str, x: Tensor) -> None:
    """Refuse what kernels cannot load 16 bytes at a time: the heads of a token are one row."""
    step = x.stride(0) * x.element_size() if x.shape[0] > 1 else 0
    is_row = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    if x.dtype not in FLOATS or not is_row or step % ROW_BYTES or x.data_ptr() % ROW_BYTES:
        raise ValueError(
            f"{name}: {what} must be float32, bfloat16 or float16, its tokens' heads contiguous and starting at "
            f"multiples of {ROW_BYTES} bytes, got {x.dtype} with strides {x.stride()} and address {x.data_ptr():#x}"
        )


def check_arena(name: str, arena: Tensor, layout: KVLayout, x: Tensor) -> None:
    """Refuse an arena that kernels cannot address, or whose numbers x's GPU does not have."""
    if arena.device != x.device or not arena.is_contiguous() or arena.data_ptr() % ROW_BYTES:
        raise ValueError(
            f"{name}: arena must be contiguous, on {x.device} and aligned to {ROW_BYTES} bytes, "
            f"got strides {arena.stride()}, {arena.device} and address {arena.data_ptr():#x}"
        )
    if layout.dtype == torch.float8_e4m3fn and (arch := arch_of(x)) < FP8_ARCH:
        raise ValueError(f"{name}: pages of float8_e4m3fn need sm_{FP8_ARCH} or later, as sm_90 is, not sm_{arch}")


def _launch_append(
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    layout: KVLayout,
    layer: int,
    places: tuple[Tensor, Tensor, Tensor],
    rope: RopeTable,
    space: Workspace,
) -> None:
    check_heads("append_kv", "k", k)
    check_heads("append_kv", "v", v)
    check_arena("append_kv", arena, layout, k)
    num_tokens, heads, dim = k.shape
    if not num_tokens:
        return
    if "places" not in space:
        check_places(layout.num_ids(arena), places, space)
        space["places"] = [place.to(k.device, non_blocking=True) for place in places]
    block_heads, block_half = _power_of_two(heads), _power_of_two(dim // 2)
    _append_kernel[(num_tokens,)](
        *(k, v, arena.view(layout.dtype), arena.view(torch.float32) if layout.scaled else None),
        *(*space["places"], rope.cos, rope.sin, units(k), units(v)),
        layer * layout.layer_stride // ID_BYTES,
        float(rope.factor),
        HEADS=heads,
        D=dim,
        ROT_DIM=rope.rot_dim,
        HEAD_BYTES=layout.head_bytes,
        LARGEST=largest_stored(layout.dtype),
        CODE_MAX=CODE_MAX.get(layout.dtype, 1.0),
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=max(1, min(8, block_heads * block_half // (32 * max(8, ROW_BYTES // layout.dtype.itemsize)))),
        **OPTIONS,
    )


def _power_of_two(count: int) -> int:
    """The least one that is not below count."""
    return 1 << (count - 1).bit_length()


def append_kv_bytes(layout: KVLayout, tokens: int, itemsize: int = 2) -> int:
    """Bytes that storing tokens in one layer must move: keys and values read, numbers of so many bytes, and stored."""
    return tokens * (2 * layout.num_kv_heads * layout.head_dim * itemsize + layout.token_bytes)


def append_kv_ref(k: Tensor, v: Tensor, rot_slot: Tensor, rope: RopeTable) -> tuple[Tensor, Tensor]:
    """What append_kv stores, in float64: (rotated keys, half-split; values)."""
    half = rope.rot_dim // 2
    row = rot_slot.long() - cpu.MIN_DISTANCE
    cos, sin = (rope.factor * t[row].double()[:, None] for t in (rope.cos, rope.sin))
    a, b, rest = k.double().split((half, half, k.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1), v.double()


def model_order(
    keys: Tensor, values: Tensor, layout: KVLayout, rot_dim: int, by_kernels: bool
) -> tuple[Tensor, Tensor]:
    """Keys and values [..., D] as they are stored -> in the order of a model's heads."""
    if by_kernels and layout.scaled:
        values = torch.cat((values[..., ::2], values[..., 1::2]), -1)
    elif by_kernels:
        keys = torch.stack(keys.chunk(2, -1), -1).flatten(-2)
    return cpu.half_split(keys, rot_dim), values


def codes_ref(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows as a scaled layout stores them, in float64: (codes before rounding, scales); zeros have codes 0."""
    largest = x.double().abs().amax(-1)
    return (x.double() * CODE_MAX[dtype] / largest[..., None]).nan_to_num(0.0), largest / CODE_MAX[dtype]


# ---- copy_pages and commit_path ----------------------------------------------------------------------


@jit(do_not_specialize=["src_layer_ids", "dst_layer_ids"])
def _copy_kernel(
    arena_ptr,  # int32
    ids_ptr,  # [n, 2] int32: from, to
    src_layer_ids,
    dst_layer_ids,
    PIECE: tl.constexpr,
):
    """Grid (n, layers, pieces of a block): a program copies PIECE words."""
    pair = ids_ptr + tl.program_id(0).to(tl.int64) * 2
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    src = tl.load(pair).to(tl.int64) + layer * src_layer_ids
    dst = tl.load(pair + 1).to(tl.int64) + layer * dst_layer_ids
    words = tl.load(arena_ptr + src * (BYTES_OF_ID // 4) + word)
    tl.store(arena_ptr + dst * (BYTES_OF_ID // 4) + word, words)


@jit(do_not_specialize=["layer_ids"])
def _commit_kernel(
    arena_ptr,  # integers as wide as a row's bytes can be cut into
    scales_ptr,  # the arena as int32, or None
    rows_ptr,  # [n, 4] int32: page id and slot, from and to
    layer_ids,
    HEADS: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    ROW: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    """Grid (n, layers, 2): a program copies the keys, or the values, of one token in one layer."""
    size: tl.constexpr = arena_ptr.dtype.element_ty.primitive_bitwidth // 8
    row = rows_ptr + tl.program_id(0).to(tl.int64) * 4
    layer = tl.program_id(1).to(tl.int64) * layer_ids
    src, dst = tl.load(row).to(tl.int64) + layer, tl.load(row + 2).to(tl.int64) + layer
    src_slot, dst_slot = tl.load(row + 1), tl.load(row + 3)
    head, word = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_ROW)
    plane = tl.program_id(2) * HEADS + head
    at = plane[:, None] * (HEAD_BYTES // size) + word[None, :]
    mask = (head < HEADS)[:, None] & (word < ROW)[None, :]
    words = tl.load(arena_ptr + src * (BYTES_OF_ID // size) + src_slot * ROW + at, mask=mask)
    tl.store(arena_ptr + dst * (BYTES_OF_ID // size) + dst_slot * ROW + at, words, mask=mask)
    if scales_ptr is not None:
        scale_at = plane * (HEAD_BYTES // 4) + SCALES_AT
        scales = tl.load(scales_ptr + src * (BYTES_OF_ID // 4) + src_slot + scale_at, mask=head < HEADS)
        tl.store(scales_ptr + dst * (BYTES_OF_ID // 4) + dst_slot + scale_at, scales, mask=head < HEADS)


def equal_blocks(one: KVLayout, other: KVLayout) -> bool:
    """Whether the layouts' pages are the same in one layer."""
    return replace(one, num_layers=1, pages_per_superblock=1) == replace(other, num_layers=1, pages_per_superblock=1)


def copy_pages(
    arena: Tensor,
    layout: KVLayout,
    src: int | Sequence[int],
    dst: int | Sequence[int],
    *,
    num_layers: int | None = None,
    dst_layout: KVLayout | None = None,
) -> None:
    """Copy pages' bytes, all layers or the first num_layers, to other ids; no page is read and written.

    dst may be pages of another layout, with any number of layers of equal blocks.
    """
    from_ids, to_ids = (torch.as_tensor(ids, dtype=torch.int64).flatten().tolist() for ids in (src, dst))
    to = layout if dst_layout is None else dst_layout
    if not equal_blocks(layout, to):
        raise ValueError(f"copy_pages: blocks of {layout} to those of {to}, expected equal heads, head_dim and dtype")
    layers, most = layout.num_layers if num_layers is None else num_layers, min(layout.num_layers, to.num_layers)
    if not 1 <= layers <= most:
        raise ValueError(f"copy_pages: num_layers is {layers}, expected 1..{most}")
    if len(from_ids) != len(to_ids):
        raise ValueError(f"copy_pages: {len(from_ids)} pages to copy to {len(to_ids)}, expected as many")
    limits = layout.num_ids(arena), to.num_ids(arena)
    for a, b in zip(from_ids, to_ids, strict=True):
        if not (0 <= a < limits[0] and 0 < b < limits[1]):
            below = " and ".join(map(str, dict.fromkeys(limits)))
            raise ValueError(f"copy_pages: from {a} to {b}, expected ids below {below} and no write to 0, the zeros")
    _refuse_overlap("copy_pages", "page", from_ids, to_ids)
    if runs_kernel(arena):
        check_arena("copy_pages", arena, layout, arena)
        if from_ids:
            ids = torch.tensor([from_ids, to_ids], dtype=torch.int32).T.contiguous()
            piece = math.gcd(layout.block_bytes, MAX_PIECE)
            _copy_kernel[(len(from_ids), layers, layout.block_bytes // piece)](
                *(arena.view(torch.int32), ids.to(arena.device)),
                *(layout.layer_stride // ID_BYTES, to.layer_stride // ID_BYTES),
                PIECE=piece // 4,
                num_warps=4,
                **OPTIONS,
            )
        return
    cpu.refuse_device("copy_pages", arena)
    from_blocks, to_blocks = layout.blocks(arena), to.blocks(arena)
    for a, b in zip(from_ids, to_ids, strict=True):
        to_blocks[b, :layers].copy_(from_blocks[a, :layers])


def commit_path(
    arena: Tensor, layout: KVLayout, src: Tensor | Sequence[Sequence[int]], dst: Tensor | Sequence[Sequence[int]]
) -> None:
    """Copy tokens' keys, values and scales in all layers: src, dst [n, 2] (page id, slot); no row is read and written.

    A key moves as it is stored: a slot other than the one it was rotated for makes it another position's.
    """
    pairs = [torch.as_tensor(rows, dtype=torch.int32, device="cpu") for rows in (src, dst)]
    if any(rows.numel() and (rows.ndim != 2 or rows.shape[1] != 2) for rows in pairs) or len(pairs[0]) != len(pairs[1]):
        raise ValueError(
            f"commit_path: src {tuple(pairs[0].shape)} and dst {tuple(pairs[1].shape)} must both be [n, 2], "
            "page ids and slots"
        )
    from_rows, to_rows = ([tuple(row) for row in rows.tolist()] for rows in pairs)
    limit = layout.num_ids(arena)
    for a, b in zip(from_rows, to_rows, strict=True):
        if not (0 <= a[0] < limit and 0 < b[0] < limit and 0 <= a[1] < PAGE and 0 <= b[1] < PAGE):
            raise ValueError(
                f"commit_path: from {a} to {b}, expected ids below {limit}, slots below {PAGE} and no write to page 0, "
                "the zeros"
            )
    _refuse_overlap("commit_path", "row", from_rows, to_rows)
    if runs_kernel(arena):
        check_arena("commit_path", arena, layout, arena)
        if from_rows:
            _launch_commit(arena, layout, torch.cat(pairs, 1).to(arena.device))
        return
    cpu.refuse_device("commit_path", arena)
    if not from_rows:
        return
    (from_page, from_slot), (to_page, to_slot) = (rows.long().T for rows in pairs)
    for layer in range(layout.num_layers):
        parts = [layout.view(arena, layer).view(_WORDS[layout.dtype.itemsize])]
        if layout.scaled:
            parts.append(layout.scales(arena, layer))
        for part in parts:
            part[to_page, :, :, to_slot] = part[from_page, :, :, from_slot]


def copy_pages_bytes(layout: KVLayout, pages: int) -> int:
    """Bytes read and written by a copy of pages in all layers."""
    return 2 * pages * layout.page_bytes


def commit_path_bytes(layout: KVLayout, tokens: int) -> int:
    """Bytes read and written by a copy of tokens in all layers."""
    return 2 * tokens * layout.num_layers * layout.token_bytes


def _refuse_overlap(name: str, what: str, src: list[Any], dst: list[Any]) -> None:
    """What is written is written once and not read, whatever order the copies are made in."""
    written = set(dst)
    if len(written) < len(dst):
        raise ValueError(f"{name}: dst names a {what} twice, expected {len(dst)} different ones, got {dst}")
    if both := sorted(written & set(src)):
        raise ValueError(f"{name}: dst and src share {what} {both[0]}, expected none to be read and written")


def _launch_commit(arena: Tensor, layout: KVLayout, rows: Tensor) -> None:
    row_bytes = layout.head_dim * layout.dtype.itemsize
    word = math.gcd(row_bytes, MAX_WORD)
    heads, width = _power_of_two(layout.num_kv_heads), _power_of_two(row_bytes // word)
    _commit_kernel[(len(rows), layout.num_layers, 2)](
        *(arena.view(_WORDS[word]), arena.view(torch.int32) if layout.scaled else None, rows),
        layout.layer_stride // ID_BYTES,
        HEADS=layout.num_kv_heads,
        HEAD_BYTES=layout.head_bytes,
        ROW=row_bytes // word,
        SCALES_AT=PAGE * layout.head_dim // 4,
        BLOCK_HEADS=heads,
        BLOCK_ROW=width,
        num_warps=max(1, min(8, heads * width // 128)),
        **OPTIONS,
    )


# ---- views -------------------------------------------------------------------------------------------


def layer_view(arena: Tensor, layout: KVLayout, layer: int, workspace: Workspace | None) -> Tensor:
    """layout.view, remembered in the workspace."""
    return _remembered(("view", layer), lambda: layout.view(arena, layer), workspace)


def layer_scales(arena: Tensor, layout: KVLayout, layer: int, workspace: Workspace | None) -> Tensor:
    """layout.scales, remembered in the workspace."""
    return _remembered(("scales", layer), lambda: layout.scales(arena, layer), workspace)


def _remembered(key: Any, make: Callable[[], Tensor], workspace: Workspace | None) -> Tensor:
    if workspace is None:
        return make()
    if key not in workspace:
        workspace[key] = make()
    view: Tensor = workspace[key]
    return view
