"""Attention of a token tree's nodes over what is committed and their own ancestors: verification of drafts.

    out[i] = softmax(scale * q[i] . K^T) V   over the committed keys and those of i's ancestors and i itself

A tree is parent[P], -1 for a child of the committed tail; a node at depth d stands at position prefix + d. Nodes lie
anywhere in scratch pages, their keys rotated for the slot they would have in plain decoding (`rotation_slots`). The
first num_stored nodes were computed before: they have no rows, their descendants read their keys and values.

Memory: pages as in csrc_triton.pages. Committed pages serve all nodes. Every leaf has a tail of its own: the slots of
the entry that plain decoding of its path would write to, and of the next one. A node takes the result of the first
leaf whose path holds it.
Promise: a node's bits are those of paged_attention over the list that plain decoding of its path would give.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from csrc_triton import cpu_attention
from csrc_triton.attention import (
    AttentionCall,
    DevicePlan,
    PageTable,
    attention_bytes,
    check_attention,
    check_cpu,
    check_lists,
    check_reach,
    lists_of,
    places_ref,
    read_ref,
    row_ref,
    slot_nbytes,
    tile_of,
    turned_ref,
    upload,
)
from csrc_triton.attention_plan import CHUNK, Lists, TreePlan, make_tree_plan
from csrc_triton.attention_tile import (
    NEAREST,
    ONES,
    SLOTS,
    State,
    attend,
    head_units,
    load_keys,
    load_query,
    load_slot,
    load_values,
    new_state,
    row_sums,
    store_slot,
    turns_at,
)
from csrc_triton.cpu_attention import PAGE, Workspace
from csrc_triton.fused import RopeTable, units
from csrc_triton.launch import constexpr, jit, runs_kernel, tl
from csrc_triton.pages import ID_BYTES, KVLayout, layer_view

MAX_NODES = 256
MAX_LEVELS = 64

CHUNK_ENTRIES = constexpr(CHUNK)
ID_UNIT = constexpr(ID_BYTES)


class TreeError(ValueError):
    """`parent` describes no tree that can be verified."""


@dataclass(frozen=True, eq=False)
class Tree:
    """A token tree, checked. All arrays are int32."""

    parent: np.ndarray  # [P], -1 for a child of the committed tail
    depth: np.ndarray  # [P], 0 for such a child
    leaves: np.ndarray  # [L] nodes without children, ascending
    paths: np.ndarray  # [L, num_levels] nodes from the root to each leaf, then -1
    owner: np.ndarray  # [P] the first leaf, by its index in `leaves`, whose path holds the node
    num_stored: int = 0  # so many first nodes lie in their places already and have no rows

    @property
    def num_rows(self) -> int:
        return len(self.parent) - self.num_stored

    @property
    def num_levels(self) -> int:
        return self.paths.shape[1]


def token_tree(parent: Sequence[int] | Tensor, num_stored: int = 0) -> Tree:
    """parent[i] < i names the node before i, or -1; at most 256 nodes in at most 64 levels.

    num_stored: the first nodes' keys and values lie in their places already; the others are the tree's rows.
    """
    if isinstance(parent, Tensor) and parent.ndim != 1:
        raise TreeError(f"token_tree: parent is {tuple(parent.shape)}, expected [P]")
    parents = [operator.index(p) for p in (parent.tolist() if isinstance(parent, Tensor) else parent)]
    if not 1 <= len(parents) <= MAX_NODES:
        raise TreeError(f"token_tree: {len(parents)} nodes, expected 1..{MAX_NODES}")
    if not 0 <= num_stored < len(parents):
        raise TreeError(f"token_tree: num_stored is {num_stored}, expected 0..{len(parents) - 1}")
    depths: list[int] = []
    for node, above in enumerate(parents):
        if not -1 <= above < node:
            raise TreeError(_refusal(parents, node))
        depths.append(depths[above] + 1 if above >= 0 else 0)
        if depths[node] >= MAX_LEVELS:
            raise TreeError(
                f"token_tree: node {node} stands in level {depths[node] + 1}, expected at most {MAX_LEVELS}"
            )
    up, depth = (np.array(values, dtype=np.int32) for values in (parents, depths))
    leaves = np.setdiff1d(np.arange(len(up), dtype=np.int32), up)
    paths = _paths(up, depth, leaves)
    owner = np.full(len(up), len(leaves), dtype=np.int32)
    leaf, _ = on_path = np.nonzero(paths >= 0)
    np.minimum.at(owner, paths[on_path], leaf)
    return Tree(up, depth, leaves, paths, owner, num_stored)


def computed_nodes(trees: Sequence[Tree]) -> Tensor:
    """Those that have rows, [T] int64: their numbers among all nodes of all trees."""
    start, found = 0, []
    for tree in trees:
        end = start + len(tree.parent)
        found.append(torch.arange(start + tree.num_stored, end))
        start = end
    return torch.cat(found)


def _refusal(parents: list[int], node: int) -> str:
    above = parents[node]
    if not -1 <= above < len(parents):
        return f"token_tree: node {node} has parent {above}, expected -1 or an earlier node, of {len(parents)}"
    at = above
    for _ in parents:  # back at the node within as many steps, or not at all
        if at == node:
            return f"token_tree: node {node} has parent {above} and lies on a cycle, expected -1 or an earlier node"
        if not 0 <= at < len(parents):
            break
        at = parents[at]
    return f"token_tree: node {node} has parent {above}, an edge forward, expected -1 or an earlier node"


def _paths(parent: np.ndarray, depth: np.ndarray, leaves: np.ndarray) -> np.ndarray:
    paths = np.full((len(leaves), int(depth.max()) + 1), -1, dtype=np.int32)
    row, node = np.arange(len(leaves)), leaves
    while len(node):
        paths[row, depth[node]] = node
        node = parent[node]
        row, node = row[node >= 0], node[node >= 0]
    return paths


# ---- tails -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tails:
    """What every leaf of a batch of trees reads behind its sequence's full pages. All tensors are int32.

    A leaf's list is the first `entry` entries of its sequence, then tile 0 with slot 0 at position `base`, then tile 1.
    """

    seq: Tensor  # [leaves] the sequence of a leaf
    entry: Tensor  # [leaves] entries before the tail
    base: Tensor  # [leaves] position of the tail's slot 0
    page: Tensor  # [leaves, 2, 64] where a slot's key and value lie, committed ones too; -1 where there is none
    slot: Tensor  # [leaves, 2, 64]
    position: Tensor  # [T] of a computed node
    leaf: Tensor  # [T] the leaf whose row is kept


def tails(table: PageTable, trees: Sequence[Tree], node_page: Tensor, node_slot: Tensor) -> Tails:
    """The tails of all leaves, sequence by sequence; everything lies in host memory.

    node_page, node_slot: of all nodes, stored ones included.
    """
    seq, position = _positions(table, trees)
    *starts, num_nodes = itertools.accumulate((len(t.parent) for t in trees), initial=0)
    if not node_page.shape == node_slot.shape == (num_nodes,) or {node_page.dtype, node_slot.dtype} != {torch.int32}:
        raise ValueError(
            f"tree_attention: node_page is {node_page.dtype} {tuple(node_page.shape)} and node_slot {node_slot.dtype} "
            f"{tuple(node_slot.shape)}, expected int32 {(num_nodes,)} for the nodes of {len(trees)} trees"
        )
    if not (int(node_page.min()) >= 0 and 0 <= int(node_slot.min()) and int(node_slot.max()) < PAGE):
        raise ValueError(
            f"tree_attention: nodes lie in pages from {int(node_page.min())} on and slots {int(node_slot.min())}.."
            f"{int(node_slot.max())}, expected page ids from 0 on and slots in 0..{PAGE - 1}"
        )
    start = _tail_starts(table)
    counts = [len(t.leaves) for t in trees]
    leaf_seq = np.repeat(np.arange(len(trees)), counts)
    node_start, leaf_start = np.array(starts)[leaf_seq], np.cumsum([0, *counts[:-1]])
    page, slot = (np.full((len(leaf_seq), 2 * PAGE), -1, dtype=np.int32) for _ in range(2))
    at = np.arange(2 * PAGE)
    used = start.hi[leaf_seq, None]
    row, column = np.nonzero((at >= start.lo[leaf_seq, None]) & (at < used))
    page[row, column], slot[row, column] = start.page[leaf_seq[row]], column
    paths = np.concatenate(
        [np.pad(t.paths, ((0, 0), (0, MAX_LEVELS - t.num_levels)), constant_values=-1) for t in trees]
    )
    row, level = np.nonzero(paths >= 0)
    column, node = used[row, 0] + level, node_start[row] + paths[row, level]
    page[row, column], slot[row, column] = node_page.numpy()[node], node_slot.numpy()[node]
    leaf = np.concatenate([t.owner[t.num_stored :] for t in trees]) + leaf_start[seq]
    shape = (-1, 2, PAGE)
    fields = (
        leaf_seq,
        start.entry[leaf_seq],
        start.base[leaf_seq],
        page.reshape(shape),
        slot.reshape(shape),
        position,
        leaf,
    )
    return Tails(*(torch.from_numpy(a.astype(np.int32)) for a in fields))


def rotation_slots(table: PageTable, trees: Sequence[Tree]) -> Tensor:
    """The slot that every computed node would have in plain decoding, [T] int32: what append_kv rotates its key by."""
    seq, position = _positions(table, trees)
    return torch.from_numpy((position - _tail_starts(table).base[seq]) % PAGE)


@dataclass(frozen=True, eq=False)
class _TailStarts:
    """Of every sequence: the entry where its next token goes, and that entry's committed slots."""

    entry: np.ndarray  # [B] its index in the list
    base: np.ndarray  # [B] position of its slot 0
    page: np.ndarray  # [B]
    lo: np.ndarray  # [B]; lo = hi = 0 in a new entry
    hi: np.ndarray  # [B]


def _tail_starts(table: PageTable) -> _TailStarts:
    n = table.n.numpy()
    row = np.arange(len(n))
    # an empty list's last entry is the column of zeros
    page, base, span = (np.pad(t.numpy(), ((0, 0), (0, 1)))[row, n - 1] for t in (table.ids, table.base, table.span))
    lo, hi = span & 255, span >> 8
    has_room = (n > 0) & (hi < PAGE)
    return _TailStarts(n - has_room, np.where(has_room, base, base + hi), page, lo * has_room, hi * has_room)


def _positions(table: PageTable, trees: Sequence[Tree]) -> tuple[np.ndarray, np.ndarray]:
    """Sequence and position of every computed node, [T] each."""
    if not trees or len(trees) != table.n.numel():
        raise ValueError(
            f"tree_attention: {len(trees)} trees for {table.n.numel()} page lists, expected one of each per sequence"
        )
    seq = np.repeat(np.arange(len(trees)), [t.num_rows for t in trees])
    start = _tail_starts(table)
    return seq, (start.base + start.hi)[seq] + np.concatenate([t.depth[t.num_stored :] for t in trees])


# ---- attention ---------------------------------------------------------------------------------------


@jit(do_not_specialize=["q_stride", "layer", "window"])
def _tail_kernel(
    q_ptr,  # [T, heads, dim]
    stored,  # Stored
    rope,  # Turns
    rows_ptr,  # [tiles, ROWS] int32
    items_ptr,  # [items, 5] int32
    page_ptr,  # [leaves, 2, 64] int32
    place_ptr,  # [leaves, 2, 64] int32, slots in those pages
    base_ptr,  # [leaves] int32
    position_ptr,  # [T] int32
    slot_ptr,  # [T, 3] int32
    slots,  # Slots
    q_stride,
    layer,  # bytes from layer 0 to this one, in units of ids
    scale,
    cap,
    window,
    ROWS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Grid (items, kv heads): nodes of one leaf go on from the state that the committed entries left in their slots."""
    HEAD: tl.constexpr = head_units(SHAPE)
    UNIT: tl.constexpr = ID_UNIT * 8 // stored.data.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = SHAPE.dim if SHAPE.codes == "" else SHAPE.dim // 2
    item = items_ptr + tl.program_id(0).to(tl.int64) * 5
    tile = tl.load(item).to(tl.int64)
    leaf = tl.load(item + 1).to(tl.int64)
    entry = tl.load(item + 2)
    pages = tl.load(item + 3)
    goes_on = tl.load(item + 4)
    query = load_query(q_ptr, q_stride, rows_ptr + tile * ROWS, position_ptr, rope, False, ROWS, SHAPE)
    heads_before = tl.program_id(1) * HEAD
    first_slot = tl.load(slot_ptr + query.token * 3, mask=query.alive, other=0).to(tl.int64)
    state = load_slot(slots, first_slot + entry // CHUNK_ENTRIES, query.head, query.alive & (goes_on != 0), SHAPE)
    state = State(state.m, tl.broadcast_to(state.sums[:, None], (ROWS, ONES)), state.acc)
    base = tl.load(base_ptr + leaf)
    for t in range(0, pages * SHAPE.tiles):
        slot = tl.arange(0, SHAPE.keys) + t * SHAPE.keys
        page = tl.load(page_ptr + leaf * (2 * SLOTS) + slot)
        place = tl.load(place_ptr + leaf * (2 * SLOTS) + slot)
        valid = page >= 0
        behind = query.position[:, None] - (base + slot)[None, :]
        seen = valid[None, :] & (behind >= 0)
        if SHAPE.windowed:
            seen = seen & (behind < window)
        page_base = base + t // SHAPE.tiles * SLOTS
        turns = turns_at(rope, tl.maximum(query.block - page_base, NEAREST), SHAPE)
        block = tl.maximum(page, 0).to(tl.int64) + layer
        place = tl.maximum(place, 0)
        key = stored.data + (block * UNIT + heads_before + place * WIDTH)
        k_scale = None
        v_scale = None
        if SHAPE.codes != "":
            scales = stored.scales + (block * (ID_UNIT // 4) + (heads_before + SLOTS * SHAPE.dim // 2) // 2 + place)
            k_scale = tl.load(scales)
            v_scale = tl.load(scales + SHAPE.kv_heads * (HEAD // 2), mask=valid, other=0.0)
        keys = load_keys(key, SHAPE)
        values = load_values(key + SHAPE.kv_heads * HEAD, valid, SHAPE)
        state = attend(state, query, turns, keys, values, k_scale, v_scale, seen, scale, cap, SHAPE)
        at = entry * SHAPE.tiles + t
        if (at % SHAPE.chunk == SHAPE.chunk - 1) | (t == pages * SHAPE.tiles - 1):
            store_slot(slots, first_slot + at // SHAPE.chunk, row_sums(state), query.head, query.alive, SHAPE)
            state = new_state(ROWS, SHAPE)


def tree_attention(
    q: Tensor,
    arena: Tensor,
    layout: KVLayout,
    layer: int,
    table: PageTable,
    trees: Sequence[Tree],
    node_page: Tensor,
    node_slot: Tensor,
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
    """q [T, Hq, D], normed and unrotated, the computed nodes of B trees in their order -> [T, Hq, D] of q's dtype.

    table: the committed lists of the B sequences; node_page, node_slot int32: where the keys and values of all nodes
    lie, stored ones included.
    Windows go by position. The rest is as in paged_attention; table, node_page and node_slot are read on the host.
    """
    window = check_attention("tree_attention", q, layout, window, softcap, sinks, out)
    space = Workspace() if workspace is None else workspace
    space.begin("attention", arena, table, *trees, node_page, node_slot)
    if "nodes" not in space:
        space["nodes"] = _nodes_of(arena, layout, table, trees, node_page, node_slot)
    nodes: Nodes = space["nodes"]
    check_reach("tree_attention", q, len(nodes.tails.position), nodes.farthest, rope)
    if runs_kernel(q):
        call = AttentionCall.of(
            "tree_attention", q, arena, layout, layer, rope, scale, window, softcap, sinks, out, space
        )
        _launch(call, nodes, cascade, space)
        return call.out
    view = layer_view(arena, layout, layer, space)
    check_cpu("tree_attention", q)
    y = cpu_attention.tree_attention_cpu(
        q, view, table, trees, nodes.tails, node_page, node_slot, rope,
        scale=scale, window=window, softcap=softcap, sinks=sinks,
        scales=layout.scales(arena, layer) if layout.scaled else None, workspace=space,
    )  # fmt: skip
    return y if out is None else out.copy_(y)


class Nodes(NamedTuple):
    """What a call's lists and trees are, checked, on the host."""

    lists: Lists
    tails: Tails
    farthest: int  # distance from a node to a page


def _nodes_of(
    arena: Tensor, layout: KVLayout, table: PageTable, trees: Sequence[Tree], node_page: Tensor, node_slot: Tensor
) -> Nodes:
    table = PageTable(*(t.cpu() for t in (table.ids, table.base, table.span, table.n)))
    lists, num_ids = lists_of(table), layout.num_ids(arena)
    found = tails(table, trees, node_page.cpu(), node_slot.cpu())
    if int(node_page.max()) >= num_ids:
        raise ValueError(f"tree_attention: nodes lie in pages up to {int(node_page.max())}, expected below {num_ids}")
    return Nodes(lists, found, check_lists("tree_attention", lists, num_ids, found.position.numpy()))


class DeviceTrees(NamedTuple):
    """A plan of trees, and what kernels read of it, on their device."""

    committed: DevicePlan
    rows: Tensor  # of the tails' tiles
    items: Tensor
    page: Tensor  # [leaves, 2, 64]
    slot: Tensor  # [leaves, 2, 64]
    base: Tensor  # [leaves]


def _launch(call: AttentionCall, nodes: Nodes, cascade: bool, space: Workspace) -> None:
    """Committed full pages once for all nodes, every leaf's tail once for its own, and the fold."""
    key = ("tree plan", call.window, cascade, call.shape.ratio, call.layout)
    if key not in space:
        space[key] = _device_plan(call, nodes, cascade)
    made: DeviceTrees = space[key]
    slots = call.slots(made.committed.num_slots, space)
    for rows, items, is_whole, is_shared in made.committed.launches:
        call.run(rows, items, is_whole, is_shared, made.committed, slots)
    tile = tile_of(call.q, call.layout, made.rows.shape[1])
    _tail_kernel[(len(made.items), call.shape.kv_heads)](
        *(call.q, call.stored, call.turns, made.rows, made.items, made.page, made.slot, made.base),
        *(made.committed.position, made.committed.slots, slots, units(call.q), call.layer),
        *(call.scale, call.cap, call.window or 0),
        ROWS=made.rows.shape[1],
        SHAPE=call.shape,
        **tile.options,
    )
    call.fold(made.committed.merged, made.committed.slots, slots)


def _device_plan(call: AttentionCall, nodes: Nodes, cascade: bool) -> DeviceTrees:
    lists, found, _ = nodes
    position = found.position.numpy()
    plan = _plan(call.q, call.layout, lists, found, call.window, cascade)
    parts = [lists.ids, lists.base, lists.span, position, plan.slots, np.arange(len(position), dtype=np.int32)]
    tiles = [x for t in (plan.split, plan.shared, plan.tails) for x in (t.rows, t.items)]
    tail = [found.page.numpy(), found.slot.numpy(), found.base.numpy()]
    there = upload([*parts, *tiles, *tail], call.q.device)
    launches = ((there[6], there[7], False, False), (there[8], there[9], False, True))
    committed = DevicePlan.of(plan.num_slots, lists, there, launches)
    return DeviceTrees(committed, *there[10:])


def _plan(q: Tensor, layout: KVLayout, lists: Lists, found: Tails, window: int | None, cascade: bool) -> TreePlan:
    ratio, seq, leaf = q.shape[1] // layout.num_kv_heads, found.seq.numpy(), found.leaf.numpy()
    full = lists.n.copy()
    full[seq] = found.entry.numpy()
    return make_tree_plan(
        replace(lists, n=full),
        found.position.numpy(),
        leaf,
        seq,
        found.base.numpy(),
        ratio=ratio,
        block_m=tile_of(q, layout, int(np.bincount(seq[leaf]).max()) * ratio).rows,
        window=window,
        is_cascade=cascade and window is None,
        shared_m=tile_of(q, layout, len(leaf) * ratio).rows,
    )


def tree_attention_workspace_nbytes(
    q: Tensor, layout: KVLayout, table: PageTable, trees: Sequence[Tree], window: int | None = None
) -> int:
    """Bytes that `Workspace.scratch` needs for tree_attention of these nodes on q's device; 0 on a CPU."""
    if not runs_kernel(q):
        return 0
    anywhere = torch.zeros(sum(len(t.parent) for t in trees), dtype=torch.int32)
    table = PageTable(*(t.cpu() for t in (table.ids, table.base, table.span, table.n)))
    found = tails(table, trees, anywhere, anywhere)
    return sum(slot_nbytes(_plan(q, layout, lists_of(table), found, window, True).num_slots, *q.shape[1:]))


def tree_attention_bytes(
    committed: int, nodes: int, token_bytes: int, rows: int, heads: int, dim: int, itemsize: int = 2
) -> int:
    """Bytes that verifying a tree must move: keys and values, those of its nodes too, q and the result, once."""
    return attention_bytes(committed + nodes, token_bytes, rows, heads, dim, itemsize)


def tree_pairs(committed: int, tree: Tree) -> int:
    """Pairs of a computed node and a key that it sees, as `attention_flops` takes them."""
    return tree.num_rows * committed + int((tree.depth[tree.num_stored :] + 1).sum())


def tree_attention_ref(
    q: Tensor,
    arena: Tensor,
    layout: KVLayout,
    layer: int,
    table: PageTable,
    parents: Sequence[Sequence[int]],
    node_page: Tensor,
    node_slot: Tensor,
    rope: RopeTable,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    by_kernels: bool = False,
    num_stored: Sequence[int] | None = None,
) -> Tensor:
    """The definition in float64, node by node: climb `parent`, gather, rotate by distance, softmax."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    start = row = 0
    for s, parent in enumerate(parents):
        page, slot, base = places_ref(table, s)
        prefix = int(base[-1] + slot[-1]) + 1 if len(base) else 0
        origin = int(base[-1]) if len(base) and slot[-1] < PAGE - 1 else prefix  # slot 0 of the page the nodes begin in
        for node in range(num_stored[s] if num_stored else 0, len(parent)):
            path = [node]
            while parent[path[0]] >= 0:
                path.insert(0, parent[path[0]])
            position = prefix + torch.arange(len(path))
            rows = start + torch.tensor(path)
            at = [torch.cat(pair) for pair in ((page, node_page[rows].long()), (slot, node_slot[rows].long()))]
            keys, values = read_ref(arena, layout, layer, at[0], at[1], rope, by_kernels)
            bases = torch.cat((base, origin + (position - origin) // PAGE * PAGE))
            behind = position[-1] - torch.cat((base + slot, position))
            seen = behind < (window or math.inf)
            turned = turned_ref(keys[seen], bases[seen] - position[-1], rope)
            out[row] = row_ref(q[row], turned, values[seen], rope, scale, softcap, sinks)
            row += 1
        start += len(parent)
    return out
