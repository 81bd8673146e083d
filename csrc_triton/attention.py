"""Attention of rows over their sequences' pages: decode, chain verify and prefill are one operation.

    out[r] = softmax(scale * q[r] . K^T) V   over the keys that row r sees:
    position of key <= position of row, and less than `window` behind it

Memory: keys and values lie in pages (csrc_triton.pages), keys rotated by slot. A sequence is a list of
entries (page id, position of slot 0, valid slots [lo, hi)); the query carries the distance.
Promise: a row's bits depend on its own query, position and page list, not on the rows, sequences or
chunks beside it, nor on where its pages lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.cpu import PAGE, Workspace
from csrc_triton.fused import RopeTable
from csrc_triton.pages import KVLayout, layer_view


@dataclass(frozen=True)
class PageTable:
    """The page lists of B sequences, E entries wide."""

    ids: Tensor  # [B, E] int32; 0 in unused entries
    base: Tensor  # [B, E] int32, position of slot 0
    span: Tensor  # [B, E] int32, valid slots lo | hi << 8
    n: Tensor  # [B] int32, entries in use


def page_table(block_table: Tensor, lengths: Tensor) -> PageTable:
    """An ordinary block table as page lists: block_table [B, E] int32 page ids, lengths [B] int32 tokens."""
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
    workspace: Workspace | None = None,
) -> Tensor:
    """q [T, Hq, D] float32, normed and unrotated -> [T, Hq, D] float32.

    Rows of sequence s are q[cu_rows[s] : cu_rows[s + 1]]; cu_rows [B + 1] int32; row_pos [T] int32 positions.
    A row that sees no key gives zeros. `workspace` keeps what the layers of one forward share.
    """
    cpu.refuse_grad("paged_attention", q)
    if q.ndim != 3 or q.shape[2] != layout.head_dim or q.shape[1] % layout.num_kv_heads:
        raise ValueError(
            f"paged_attention: q is {tuple(q.shape)}, "
            f"expected [T, a multiple of {layout.num_kv_heads}, {layout.head_dim}]"
        )
    if workspace is None or "rows checked" not in workspace:
        _check_rows(q.shape[0], table, cu_rows, row_pos)
        if workspace is not None:
            workspace["rows checked"] = True
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1, got {window}")
    view = layer_view(arena, layout, layer, workspace)
    cpu.refuse_device("paged_attention", q)
    return cpu.paged_attention_cpu(
        q, view, table, cu_rows, row_pos, rope, scale=scale, window=window, workspace=workspace
    )


def _check_rows(num_rows: int, table: PageTable, cu_rows: Tensor, row_pos: Tensor) -> None:
    num_seqs = table.n.numel()
    if cu_rows.numel() != num_seqs + 1 or int(cu_rows[-1]) != num_rows or row_pos.numel() != num_rows:
        raise ValueError(
            f"paged_attention: {num_seqs} sequences and {num_rows} rows need cu_rows of {num_seqs + 1} "
            f"ending at {num_rows} and as many positions; got {cu_rows.tolist()} and {row_pos.numel()}"
        )


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
) -> Tensor:
    """The definition in float64, row by row: gather, rotate by distance, softmax."""
    view = layout.view(arena, layer)
    ratio = q.shape[1] // layout.num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    for s in range(table.n.numel()):
        for r in range(int(cu_rows[s]), int(cu_rows[s + 1])):
            p = int(row_pos[r])
            keys, values = [], []
            for e in range(int(table.n[s])):
                base, span = int(table.base[s, e]), int(table.span[s, e])
                for slot in range(span & 255, span >> 8):
                    behind = p - base - slot
                    if behind >= 0 and (window is None or behind < window):
                        stored = cpu.half_split(view[int(table.ids[s, e]), 0, :, slot].double(), rope.rot_dim)
                        keys.append(_turned(stored, base - p, rope))
                        values.append(view[int(table.ids[s, e]), 1, :, slot].double())
            if not keys:
                continue
            k, v = torch.stack(keys, 1), torch.stack(values, 1)  # [Hkv, n, D]
            query = q[r].double() * torch.tensor(
                [rope.factor] * rope.rot_dim + [1.0] * (layout.head_dim - rope.rot_dim)
            )
            query = query.view(-1, ratio, layout.head_dim)
            weight = torch.softmax(query @ k.transpose(1, 2) * scale, -1)
            out[r] = (weight @ v).reshape(q.shape[1:])
    return out


def _turned(k: Tensor, distance: int, rope: RopeTable) -> Tensor:
    """Rotate a slot-rotated key on by a distance of either sign, exactly enough for a reference."""
    half = rope.rot_dim // 2
    row = abs(distance) - cpu.MIN_DISTANCE
    cos, sin = rope.cos[row].double(), rope.sin[row].double() * (1 if distance >= 0 else -1)
    a, b, rest = k.split((half, half, k.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
