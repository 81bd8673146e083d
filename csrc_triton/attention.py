"""Attention of rows over their sequences' pages: decode, chain verify and prefill are one operation, and one kernel.

    out[r] = softmax(scale * q[r] . K^T) V   over the keys that row r sees:
    position of key <= position of row, and less than `window` behind it

Memory: keys and values lie in pages (csrc_triton.pages), keys rotated by slot. A sequence is a list of entries
(page id, position of slot 0, valid slots [lo, hi)); the query carries the distance. On a GPU a query is rotated by
R(p mod 64) once and, for every page, by R(p - p mod 64 - position of slot 0), in float32, and rounded to the compute
dtype once.
Promise: a row's bits depend on its own query, position and page list, not on the rows, sequences or chunks beside it,
nor on where its pages lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from csrc_triton import cpu, cpu_attention, launch
from csrc_triton.attention_plan import CHUNK, FAR, PAGE, Lists, Plan, Room, find_groups, make_plan
from csrc_triton.attention_tile import (
    Entries,
    Shape,
    Slots,
    Stored,
    Turns,
    attend,
    first_state,
    fold,
    head_units,
    load_keys,
    load_query,
    load_slot,
    load_values,
    new_state,
    row_sums,
    store_rows,
    store_slot,
    turns_at,
)
from csrc_triton.cpu_attention import Workspace
from csrc_triton.fused import RopeTable, check_rope, units
from csrc_triton.launch import OPTIONS, constexpr, jit, runs_kernel, tl
from csrc_triton.operands import carve
from csrc_triton.pages import ID_BYTES, KVLayout, check_arena, check_heads, layer_scales, layer_view, model_order

MAX_DIM = 256
MIN_HALF, MIN_PART = 16, 32  # columns of a product's operands; part: more than the rows of a tile, see ONES
OCCUPANCY = 3  # programs of a multiprocessor at once, as a plan counts them
CPU_MULTIPROCESSORS = 4  # in place of a GPU's, where kernels run on a CPU
MAX_SLOT_BYTES = 256 << 20
FOLD_OPTIONS = {"num_warps": 1, "num_stages": 1, **OPTIONS}
LOG2E = math.log2(math.e)

SLOTS = constexpr(PAGE)
ENTRIES = constexpr(CHUNK)
ID_UNIT = constexpr(ID_BYTES)
NEAREST = constexpr(cpu.MIN_DISTANCE)
AHEAD = constexpr(4)  # states of chunks that are fetched together


@dataclass(frozen=True)
class PageTable:
    """The page lists of B sequences, E entries wide."""

    ids: Tensor  # [B, E] int32; 0 in unused entries
    base: Tensor  # [B, E] int32, position of slot 0
    span: Tensor  # [B, E] int32, valid slots lo | hi << 8
    n: Tensor  # [B] int32, entries in use


def page_table(block_table: Tensor, lengths: Tensor) -> PageTable:
    """A block table as page lists, on the host: block_table [B, E] int32 page ids, lengths [B] int32 tokens."""
    block_table, lengths = block_table.cpu(), lengths.cpu()
    if block_table.ndim != 2 or lengths.shape != block_table.shape[:1]:
        raise ValueError(
            f"page_table: block_table {tuple(block_table.shape)} must be [B, E] and lengths {tuple(lengths.shape)} [B]"
        )
    used = (lengths + PAGE - 1) // PAGE
    if bool((lengths < 0).any()) or bool((used > block_table.shape[1]).any()):
        raise ValueError(
            f"page_table: lengths must be in 0..{block_table.shape[1] * PAGE}, "
            f"got {int(lengths.min())}..{int(lengths.max())}"
        )
    base = torch.arange(block_table.shape[1], dtype=torch.int32)[None] * PAGE
    hi = (lengths[:, None] - base).clamp(0, PAGE)
    live = hi > 0
    return PageTable((block_table * live).int(), (base * live).int().contiguous(), (hi << 8).int(), used.int())


# ---- kernels -----------------------------------------------------------------------------------------


@jit(do_not_specialize=["q_stride", "out_stride", "width", "layer", "window"])
def _attention_kernel(
    q_ptr,  # [T, heads, dim]
    stored,  # Stored
    entries,  # Entries
    rope,  # Turns
    rows_ptr,  # [tiles, ROWS] int32
    items_ptr,  # [items, 4] int32
    position_ptr,  # [T] int32
    slot_ptr,  # [T, 3] int32
    sinks_ptr,  # [heads] float32 or None
    out_ptr,  # [T, heads, dim]
    slots,  # Slots
    q_stride,
    out_stride,
    width,  # E
    layer,  # bytes from layer 0 to this one, in units of ids
    scale,
    cap,
    window,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    SHARED: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Grid (items, kv heads)."""
    HEAD: tl.constexpr = head_units(SHAPE)
    UNIT: tl.constexpr = ID_UNIT * 8 // stored.data.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = SHAPE.dim if SHAPE.codes == "" else SHAPE.dim // 2
    item = items_ptr + tl.program_id(0).to(tl.int64) * 4
    tile = tl.load(item).to(tl.int64)
    list_at = tl.load(item + 1).to(tl.int64) * width
    first = tl.load(item + 2)
    end = tl.load(item + 3)
    query = load_query(q_ptr, q_stride, rows_ptr + tile * ROWS, position_ptr, rope, SHARED, ROWS, SHAPE)
    heads_before = tl.program_id(1) * HEAD
    state = new_state(ROWS, SHAPE)
    total = first_state(sinks_ptr, query.head, query.alive, SHAPE)
    for t in range(first * SHAPE.tiles, end * SHAPE.tiles):
        at = list_at + t // SHAPE.tiles
        page = tl.load(entries.ids + at).to(tl.int64) + layer
        base = tl.load(entries.base + at)
        span = tl.load(entries.span + at)
        slot = tl.arange(0, SHAPE.keys) + t % SHAPE.tiles * SHAPE.keys
        valid = (slot >= (span & 255)) & (slot < (span >> 8))
        behind = query.position[:, None] - (base + slot)[None, :]
        seen = valid[None, :] & (behind >= 0)
        if SHAPE.windowed:
            seen = seen & (behind < window)
        # no row sees a page whose first position is more than 63 ahead of its block
        turns = turns_at(rope, tl.maximum(query.block - base, NEAREST), SHAPE)
        key = stored.data + (page * UNIT + heads_before) + slot * WIDTH
        k_scale = None
        v_scale = None
        if SHAPE.codes != "":
            scales = stored.scales + (page * (ID_UNIT // 4) + (heads_before + SLOTS * SHAPE.dim // 2) // 2) + slot
            k_scale = tl.load(scales)
            v_scale = tl.load(scales + SHAPE.kv_heads * (HEAD // 2), mask=valid, other=0.0)
        keys = load_keys(key, SHAPE)
        values = load_values(key + SHAPE.kv_heads * HEAD, valid, SHAPE)
        state = attend(state, query, turns, keys, values, k_scale, v_scale, seen, scale, cap, SHAPE)
        if WHOLE:
            if (t % SHAPE.chunk == SHAPE.chunk - 1) | (t == end * SHAPE.tiles - 1):
                total = fold(total, row_sums(state))
                state = new_state(ROWS, SHAPE)
    if WHOLE:
        store_rows(out_ptr, out_stride, total, query.token, query.head, query.alive, SHAPE)
    else:
        slot = tl.load(slot_ptr + query.token * 3, mask=query.alive, other=0).to(tl.int64) + first // ENTRIES
        store_slot(slots, slot, row_sums(state), query.head, query.alive, SHAPE)


@jit(do_not_specialize=["out_stride"])
def _fold_kernel(
    slots,  # Slots
    token_ptr,  # [tokens] int32
    slot_ptr,  # [T, 3] int32
    sinks_ptr,  # [heads] float32 or None
    out_ptr,  # [T, heads, dim]
    out_stride,
    SHAPE: tl.constexpr,
):
    """Grid (tokens, heads)."""
    token = tl.load(token_ptr + tl.program_id(0)).to(tl.int64)
    slot = tl.load(slot_ptr + token * 3 + 1).to(tl.int64)
    count = tl.load(slot_ptr + token * 3 + 2)
    one = tl.arange(0, 1)
    head = tl.program_id(1) + one
    total = first_state(sinks_ptr, head, head >= 0, SHAPE)
    for c in range(0, count, AHEAD):
        for i in tl.static_range(AHEAD):
            total = fold(total, load_slot(slots, slot + c + i, head, one + (c + i) < count, SHAPE))
    store_rows(out_ptr, out_stride, total, one + token, head, head >= 0, SHAPE)


# ---- launches ----------------------------------------------------------------------------------------


class DevicePlan(NamedTuple):
    """A plan, and what kernels read of it, on their device."""

    num_slots: int
    entries: Entries
    width: int  # of the lists
    position: Tensor  # [T]
    slots: Tensor  # [T, 3]
    merged: Tensor  # tokens whose slots are folded
    launches: tuple[tuple[Tensor, Tensor, bool, bool], ...]  # rows, items, WHOLE, SHARED

    @classmethod
    def of(cls, num_slots: int, lists: Lists, there: Sequence[Tensor], launches: Any) -> DevicePlan:
        """there: ids, base, span, positions, slots and merged tokens, and what follows them."""
        ids, base, span, position, slots, merged, *_ = there
        return cls(num_slots, Entries(ids, base, span), lists.ids.shape[1], position, slots, merged, launches)


def paged_attention(
    q: Tensor,
    arena: Tensor,
    layout: KVLayout,
    layer: int,
    table: PageTable,
    cu_rows: Tensor,
    row_pos: Tensor,
    rope: RopeTable,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cascade: bool = True,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """q [T, Hq, D], normed and unrotated -> [T, Hq, D] of q's dtype.

    Rows of sequence s are q[cu_rows[s] : cu_rows[s + 1]]; cu_rows [B + 1] int32; row_pos [T] int32 positions.
    softcap: a scaled score s becomes softcap * tanh(s / softcap); sinks [Hq] float32: exp(sink) joins the
    denominator of its head. A row that sees no key gives zeros. `workspace` keeps what the layers of one forward share.

    On a GPU q is bfloat16, float16 or float32, its rows 16-byte aligned; products are computed in the pages' dtype,
    of codes in bfloat16, or float32 like q. cascade: sequences whose lists begin with the same chunks read them
    together; the same bits. Lists, cu_rows and row_pos are read on the host when a workspace is first given them: pass
    CPU tensors, or a copy is awaited. On a CPU q is float32.
    """
    window = check_attention("paged_attention", q, layout, window, softcap, sinks, out)
    space = Workspace() if workspace is None else workspace
    space.begin("attention", arena, table, cu_rows, row_pos)
    if "rows" not in space:
        space["rows"] = _rows_of("paged_attention", arena, layout, table, cu_rows, row_pos)
    check_reach("paged_attention", q, len(space["rows"].position), space["rows"].farthest, rope)
    if not runs_kernel(q):
        view = layer_view(arena, layout, layer, space)
        check_cpu("paged_attention", q)
        y = cpu_attention.paged_attention_cpu(
            q, view, table, cu_rows, row_pos, rope,
            scale=scale, window=window, softcap=softcap, sinks=sinks,
            scales=layer_scales(arena, layout, layer, space) if layout.scaled else None, workspace=space,
        )  # fmt: skip
        return y if out is None else out.copy_(y)
    call = AttentionCall.of("paged_attention", q, arena, layout, layer, rope, scale, window, softcap, sinks, out, space)
    if q.shape[0]:
        made = _device_plan(call, space["rows"], cascade, space)
        slots = call.slots(made.num_slots, space)
        for rows, items, is_whole, is_shared in made.launches:
            call.run(rows, items, is_whole, is_shared, made, slots)
        call.fold(made.merged, made.slots, slots)
    return call.out


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The checked arguments of a launch."""

    name: str
    q: Tensor
    layout: KVLayout
    shape: Shape
    stored: Stored
    layer: int
    rope: RopeTable
    turns: Turns
    scale: float
    cap: float
    window: int | None
    sinks: Tensor | None
    out: Tensor

    @classmethod
    def of(
        cls,
        name: str,
        q: Tensor,
        arena: Tensor,
        layout: KVLayout,
        layer: int,
        rope: RopeTable,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor | None,
        space: Workspace,
    ) -> AttentionCall:
        stored = _stored(name, q, arena, layout, layer, space)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        for what, x in (("q", q), ("out", out)):
            check_heads(name, what, x)
        if layout.head_dim % 8 or layout.head_dim > MAX_DIM:
            raise ValueError(f"{name}: head_dim is {layout.head_dim}, kernels take multiples of 8 up to {MAX_DIM}")
        for what, other in (("rope", rope.cos), ("sinks", sinks), ("out", out)):
            if other is not None and other.device != q.device:
                raise ValueError(f"{name}: {what} is on {other.device}, expected {q.device} like q")
        if rope.rot_dim > layout.head_dim or rope.max_position < PAGE - 1:
            raise ValueError(
                f"{name}: rope turns {rope.rot_dim} dims up to position {rope.max_position}, expected at most "
                f"{layout.head_dim} dims and at least {PAGE - 1}"
            )
        shape = _shape_of(q, layout, rope, window is not None, softcap is not None)
        turns = Turns(rope.cos, rope.sin, None if rope.factor == 1.0 else rope.factor)
        factor, cap = scale * LOG2E, 0.0
        if softcap is not None:
            factor, cap = scale / softcap, softcap * LOG2E
        first = layer * layout.layer_stride // ID_BYTES
        return cls(name, q, layout, shape, stored, first, rope, turns, factor, cap, window, sinks, out)

    def slots(self, count: int, space: Workspace) -> Slots:
        """Scratch for so many slots: the caller's, or the workspace's own; all layers share it."""
        key = ("slots", count, self.q.shape[1:])
        if key not in space:
            sums, rest = slot_nbytes(count, *self.q.shape[1:])
            both = carve(space.scratch, ((sums + rest) // 4,), torch.float32, self.q, self.name)
            space[key] = Slots(both[: sums // 4], both[sums // 4 :])
        slots: Slots = space[key]
        return slots

    def run(self, rows: Tensor, items: Tensor, is_whole: bool, is_shared: bool, made: DevicePlan, slots: Slots) -> None:
        if not len(items):
            return
        tile = tile_of(self.q, self.layout, rows.shape[1])
        _attention_kernel[(len(items), self.shape.kv_heads)](
            *(self.q, self.stored, made.entries, self.turns, rows, items, made.position, made.slots, self.sinks),
            *(self.out, slots, units(self.q), units(self.out), made.width, self.layer),
            *(self.scale, self.cap, self.window or 0),
            ROWS=rows.shape[1],
            WHOLE=is_whole,
            SHARED=is_shared,
            SHAPE=self.shape,
            **tile.options,
        )

    def fold(self, tokens: Tensor, token_slots: Tensor, slots: Slots) -> None:
        if len(tokens):
            _fold_kernel[(len(tokens), self.q.shape[1])](
                *(slots, tokens, token_slots, self.sinks, self.out, units(self.out)), SHAPE=self.shape, **FOLD_OPTIONS
            )


def _stored(name: str, q: Tensor, arena: Tensor, layout: KVLayout, layer: int, space: Workspace) -> Stored:
    """The arena as kernels take it, checked once a workspace."""
    key = ("stored", layout)
    if key not in space:
        layout.num_ids(arena)
        check_arena(name, arena, layout, q)
        data = arena.view(torch.int16 if layout.scaled else layout.dtype)
        space[key] = Stored(data, arena.view(torch.float32) if layout.scaled else None)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"{name}: layer {layer} is not in 0..{layout.num_layers - 1}")
    stored: Stored = space[key]
    return stored


def slot_nbytes(count: int, heads: int, dim: int) -> tuple[int, int]:
    """Bytes of the sums, and of the largest scores and row sums, of so many slots."""
    return 4 * count * heads * dim, 8 * count * heads


def attention_bytes(tokens: int, token_bytes: int, rows: int, heads: int, dim: int, itemsize: int = 2) -> int:
    """Bytes that attention must move: keys and values of so many different tokens, q and the result, once.

    token_bytes: `KVLayout.token_bytes`.
    """
    return tokens * token_bytes + 2 * rows * heads * dim * itemsize


def attention_flops(pairs: int, heads: int, dim: int) -> int:
    """Of so many pairs of a row and a key that it sees: two products a head."""
    return 4 * pairs * heads * dim


def visible_pairs(tokens: int, rows: int, window: int | None = None) -> int:
    """Pairs of a sequence's last rows and the keys that they see."""
    if window is not None:
        return sum(min(window, tokens - row) for row in range(rows))
    return rows * tokens - rows * (rows - 1) // 2


def attention_workspace_nbytes(
    q: Tensor, layout: KVLayout, table: PageTable, cu_rows: Tensor, row_pos: Tensor, window: int | None = None
) -> int:
    """Bytes that `Workspace.scratch` needs for paged_attention of these rows on q's device; 0 on a CPU."""
    if not runs_kernel(q):
        return 0
    shape = _shape_of(q, layout, None, window is not None, False)
    seq = np.repeat(np.arange(table.n.numel()), np.diff(cu_rows.cpu().numpy()))
    plan = _plan(q, layout, shape, lists_of(table), seq, row_pos.cpu().numpy(), window, True)
    return sum(slot_nbytes(plan.num_slots, *q.shape[1:]))


@cache
def _shape(
    ratio: int,
    kv_heads: int,
    dim: int,
    turned: int,
    codes: str,
    dtype: torch.dtype,
    windowed: bool,
    capped: bool,
    arch: int,
) -> Shape:
    part = max(MIN_PART, 1 << ((dim // 2 if codes else dim) - 1).bit_length())
    keys = PAGE // 2 if dim > MAX_DIM // 2 else PAGE
    half = max(MIN_HALF, 1 << (dim // 2 - 1).bit_length())
    return Shape(
        ratio,
        kv_heads,
        dim,
        half,
        part,
        turned,
        codes,
        launch.triton_dtype(dtype),
        keys,
        PAGE // keys,
        CHUNK * PAGE // keys,
        windowed,
        capped,
        arch,
    )


def _shape_of(q: Tensor, layout: KVLayout, rope: RopeTable | None, windowed: bool, capped: bool) -> Shape:
    codes = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(layout.dtype, "")
    turned = layout.head_dim // 2 if rope is None else rope.rot_dim // 2
    dtype = layout.dtype
    if codes:  # a weight times a value's scale may be less than a float16 holds
        dtype = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    heads = layout.num_kv_heads
    arch = launch.asm_arch(launch.arch_of(q))
    return _shape(q.shape[1] // heads, heads, layout.head_dim, turned, codes, dtype, windowed, capped, arch)


def tile_kind(layout: KVLayout) -> str:
    """Key of a tile table: bits of a stored number and the padded head dim. A key's NxK is the very dim, twice."""
    return f"{8 * layout.dtype.itemsize}bit-{max(MIN_PART, 1 << (layout.head_dim - 1).bit_length())}"


def tile_of(q: Tensor, layout: KVLayout, rows: int) -> launch.Tile:
    dim = layout.head_dim
    return launch.tile_for(launch.arch_of(q), "attention", tile_kind(layout), dim, dim, rows)


def lists_of(table: PageTable) -> Lists:
    return Lists(*(t.cpu().numpy() for t in (table.ids, table.base, table.span, table.n)))


def _plan(
    q: Tensor,
    layout: KVLayout,
    shape: Shape,
    lists: Lists,
    seq: np.ndarray,
    row_pos: np.ndarray,
    window: int | None,
    cascade: bool,
) -> Plan:
    groups = find_groups(lists, seq, row_pos, window)
    most = int(groups.count.max(initial=1)) * shape.ratio
    programs = OCCUPANCY * _multiprocessors(q.device)
    room = Room(max(1, programs // shape.kv_heads), MAX_SLOT_BYTES // sum(slot_nbytes(1, *q.shape[1:])))
    return make_plan(
        lists,
        groups,
        ratio=shape.ratio,
        block_m=tile_of(q, layout, most).rows,
        room=room,
        is_cascade=cascade and window is None,
        shared_m=tile_of(q, layout, q.shape[0] * shape.ratio).rows,
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


class Rows(NamedTuple):
    """What a call's rows and lists are, checked, on the host."""

    lists: Lists
    seq: np.ndarray  # [T]
    position: np.ndarray  # [T]
    farthest: int  # distance from a row to a page


def _rows_of(name: str, arena: Tensor, layout: KVLayout, table: PageTable, cu_rows: Tensor, row_pos: Tensor) -> Rows:
    lists, ends, position = lists_of(table), cu_rows.cpu().numpy(), row_pos.cpu().numpy()
    if len(ends) != len(lists.n) + 1 or ends[-1] != len(position):
        raise ValueError(
            f"{name}: {len(lists.n)} sequences and {len(position)} positions need cu_rows of {len(lists.n) + 1} "
            f"ending at {len(position)}, got {ends.tolist()}"
        )
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise ValueError(f"{name}: cu_rows must start at 0 and not decrease, got {ends.tolist()}")
    farthest = check_lists(name, lists, layout.num_ids(arena), position)
    return Rows(lists, np.repeat(np.arange(len(ends) - 1), np.diff(ends)), position, farthest)


def _device_plan(call: AttentionCall, rows: Rows, cascade: bool, space: Workspace) -> DevicePlan:
    """The plan of these rows, made once a workspace for layers of one window; one upload."""
    key = ("attention plan", call.window, cascade, call.shape.ratio, call.layout)
    if key not in space:
        lists, seq, position, _ = rows
        plan = _plan(call.q, call.layout, call.shape, lists, seq, position, call.window, cascade)
        tiles = (plan.whole, plan.split, plan.shared)
        parts = [lists.ids, lists.base, lists.span, position, plan.slots, plan.merged]
        there = upload([*parts, *(x for t in tiles for x in (t.rows, t.items))], call.q.device)
        launches = zip(there[6::2], there[7::2], (True, False, False), (False, False, True), strict=True)
        space[key] = DevicePlan.of(plan.num_slots, lists, there, tuple(launches))
    made: DevicePlan = space[key]
    return made


def check_lists(name: str, lists: Lists, num_ids: int, position: np.ndarray) -> int:
    """Refuse lists that name pages outside the arena or do not ascend; -> the farthest that a row is from a page."""
    for what, x in {
        "ids": lists.ids,
        "base": lists.base,
        "span": lists.span,
        "n": lists.n,
        "row_pos": position,
    }.items():
        if x.dtype.kind != "i":
            raise ValueError(f"{name}: {what} is {x.dtype}, expected int32")
    if lists.n.size and not 0 <= lists.n.min() <= lists.n.max() <= lists.ids.shape[1]:
        raise ValueError(
            f"{name}: lists have {lists.n.min()}..{lists.n.max()} entries, expected 0..{lists.ids.shape[1]}"
        )
    used = lists.used
    ids, base = lists.ids[used], lists.base[used]
    if ids.size and not 0 <= ids.min() <= ids.max() < num_ids:
        raise ValueError(f"{name}: page ids are in {ids.min()}..{ids.max()}, expected 0..{num_ids - 1}")
    lo, hi = lists.span[used] & 255, lists.span[used] >> 8
    if ids.size and not (base.min() >= -PAGE + 1 and (lo <= hi).all() and hi.max() <= PAGE):
        raise ValueError(
            f"{name}: entries hold slots up to {hi.max()} from position {base.min()} on, expected lo <= hi <= {PAGE} "
            f"and positions of slot 0 from {1 - PAGE} on"
        )
    if (lists.first[:, 1:] < lists.end[:, :-1])[used[:, 1:]].any():
        raise ValueError(f"{name}: the entries of a list must ascend in position")
    if position.size and position.min() < 0:
        raise ValueError(f"{name}: row positions start at {position.min()}, expected 0 or more")
    return int(position.max(initial=0)) // PAGE * PAGE - int(base.min(initial=0))


def check_reach(name: str, q: Tensor, num_rows: int, farthest: int, rope: RopeTable) -> None:
    if q.shape[0] != num_rows:
        raise ValueError(f"{name}: q has {q.shape[0]} rows, expected one for each of {num_rows} positions")
    if farthest > rope.max_position:
        raise ValueError(f"{name}: rows are up to {farthest} from a page, the rope table ends at {rope.max_position}")
    check_rope(name, rope)


def check_cpu(name: str, q: Tensor) -> None:
    cpu.refuse_device(name, q)
    if q.dtype != torch.float32:
        raise ValueError(f"{name}: q is {q.dtype}, expected float32 on a CPU")


def upload(parts: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of int32 in one copy, each at a multiple of 16 bytes."""
    steps = [-(-part.size // 4) * 4 for part in parts]
    ends = np.cumsum(steps).tolist()
    packed = np.zeros(ends[-1], np.int32)
    for part, end, step in zip(parts, ends, steps, strict=True):
        packed[end - step : end - step + part.size] = part.ravel()
    there = torch.from_numpy(packed).to(device)
    return [
        there[end - step : end - step + part.size].view(part.shape)
        for part, end, step in zip(parts, ends, steps, strict=True)
    ]


def check_attention(
    name: str,
    q: Tensor,
    layout: KVLayout,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> int | None:
    """Refuse what any path would misread; -> the window, None where no position is that far."""
    cpu.refuse_grad(name, q, sinks)
    if q.ndim != 3 or q.shape[2] != layout.head_dim or q.shape[1] % layout.num_kv_heads:
        raise ValueError(
            f"{name}: q is {tuple(q.shape)}, expected [T, a multiple of {layout.num_kv_heads}, {layout.head_dim}]"
        )
    if out is not None and out.shape != q.shape:
        raise ValueError(f"{name}: out is {tuple(out.shape)}, expected q's {tuple(q.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"{name}: window must be at least 1, got {window}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{name}: softcap must be above 0 and finite, got {softcap}")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.dtype != torch.float32 or not sinks.is_contiguous()):
        raise ValueError(
            f"{name}: sinks are {sinks.dtype} {tuple(sinks.shape)} with strides {sinks.stride()}, expected contiguous "
            f"float32 {(q.shape[1],)}"
        )
    return window if window is None or window < FAR else None


# ---- reference ---------------------------------------------------------------------------------------


def paged_attention_ref(
    q: Tensor,
    arena: Tensor,
    layout: KVLayout,
    layer: int,
    table: PageTable,
    cu_rows: Tensor,
    row_pos: Tensor,
    rope: RopeTable,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    by_kernels: bool = False,
) -> Tensor:
    """The definition in float64, row by row: gather, rotate by distance, softmax.

    by_kernels: keys and values are stored in the order of the kernels.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    for s in range(table.n.numel()):
        page, slot, base = places_ref(table, s)
        keys, values = read_ref(arena, layout, layer, page, slot, rope, by_kernels)
        for r in range(int(cu_rows[s]), int(cu_rows[s + 1])):
            behind = int(row_pos[r]) - base - slot
            seen = (behind >= 0) & (behind < (window or math.inf))
            turned = turned_ref(keys[seen], base[seen] - int(row_pos[r]), rope)
            out[r] = row_ref(q[r], turned, values[seen], rope, scale, softcap, sinks)
    return out


def places_ref(table: PageTable, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a sequence's committed tokens: page, slot and position of the page's slot 0, [n] int64 each."""
    places = [
        (int(table.ids[s, e]), slot, int(table.base[s, e]))
        for e in range(int(table.n[s]))
        for slot in range(int(table.span[s, e]) & 255, int(table.span[s, e]) >> 8)
    ]
    page, slot, base = torch.tensor(places, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return page, slot, base


def read_ref(
    arena: Tensor, layout: KVLayout, layer: int, page: Tensor, slot: Tensor, rope: RopeTable, by_kernels: bool
) -> tuple[Tensor, Tensor]:
    """Keys, rotated by slot and half-split, and values at (page, slot): [n, Hkv, D] float64."""
    stored = layout.view(arena, layer)[page, :, :, slot].float().double()
    if layout.scaled:
        stored *= layout.scales(arena, layer)[page, :, :, slot].double()[..., None]
    keys, values = stored.unbind(1)
    return model_order(keys, values, layout, rope.rot_dim, by_kernels)


def turned_ref(k: Tensor, distance: Tensor, rope: RopeTable) -> Tensor:
    """Rotate slot-rotated keys [n, Hkv, D] on by distances [n] of either sign, exactly enough for a reference."""
    half = rope.rot_dim // 2
    row = distance.abs() - cpu.MIN_DISTANCE
    cos, sin = (t[row].double()[:, None] for t in (rope.cos, rope.sin))
    sin = sin * torch.where(distance < 0, -1, 1)[:, None, None]
    a, b, rest = k.split((half, half, k.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def row_ref(
    q: Tensor, keys: Tensor, values: Tensor, rope: RopeTable, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One row [Hq, D] over the keys that it sees, in the row's own frame -> [Hq, D] float64."""
    if not len(keys):
        return torch.zeros(q.shape, dtype=torch.float64)
    factor = torch.tensor([rope.factor] * rope.rot_dim + [1.0] * (q.shape[1] - rope.rot_dim), dtype=torch.float64)
    query = (q.double() * factor).unflatten(0, (keys.shape[1], -1))  # [Hkv, G, D]
    score = query @ keys.permute(1, 2, 0) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if sinks is not None:
        score = torch.cat((score, sinks.double().view(*query.shape[:2], 1)), -1)
    weight = torch.softmax(score, -1)[..., : len(keys)]
    return (weight @ values.transpose(0, 1)).flatten(0, 1)
