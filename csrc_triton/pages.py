"""KV pages: where a key lies, how it is stored, how pages move.

    stored key = R(slot) k,  slot 0..63 within its page        stored value = v

Memory: one byte tensor, the arena. A page is 64 tokens of one model in every layer; its block of layer l
starts at byte id * 4096 + l * layer_stride and holds [k|v][kv head][slot][D]; on a CPU the two halves of
a key are interleaved. A key knows its slot and not its position, so a page can stand anywhere in any
sequence. Id 0 is a region of zeros.
Promise: what is stored depends on the token's own key, value and slot alone, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.cpu import PAGE, Workspace
from csrc_triton.fused import RopeTable

ID_BYTES = 4096  # an id counts bytes in these units


@dataclass(frozen=True)
class KVLayout:
    """One model's pages in an arena."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    pages_per_superblock: int = 1  # order within a superblock is [layer][page]

    @property
    def block_bytes(self) -> int:
        """One page in one layer, keys and values, rounded up to 4096."""
        raw = 2 * self.num_kv_heads * PAGE * self.head_dim * self.dtype.itemsize
        return -(-raw // ID_BYTES) * ID_BYTES

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

    def view(self, arena: Tensor, layer: int) -> Tensor:
        """[ids, 2, num_kv_heads, 64, head_dim] over the arena, indexed by page id; rows overlap."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"KVLayout.view: layer {layer} is not in 0..{self.num_layers - 1}")
        size = self.dtype.itemsize
        ids = (arena.numel() - layer * self.layer_stride - self.block_bytes) // ID_BYTES + 1
        if arena.dtype != torch.uint8 or ids <= 0:
            raise ValueError(
                f"KVLayout.view: arena must be uint8 and hold at least {self.extent} bytes, "
                f"got {arena.dtype} with {arena.numel()}"
            )
        head = PAGE * self.head_dim
        shape = (ids, 2, self.num_kv_heads, PAGE, self.head_dim)
        strides = (ID_BYTES // size, self.num_kv_heads * head, head, self.head_dim, 1)
        flat = arena.view(self.dtype)
        return flat.as_strided(shape, strides, flat.storage_offset() + layer * self.layer_stride // size)

    def blocks(self, arena: Tensor) -> Tensor:
        """[ids, num_layers, block_bytes] uint8 over the arena: all layers of a page at once."""
        ids = (arena.numel() - self.extent) // ID_BYTES + 1
        return arena.as_strided((ids, self.num_layers, self.block_bytes), (ID_BYTES, self.layer_stride, 1))


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
    """Store T tokens: k, v [T, Hkv, D] float32 (k normed, unrotated), page_id, store_slot, rot_slot [T] int32.

    Keys are rotated by rot_slot; values outside the layout's dtype saturate to its largest finite number.
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
    view = layer_view(arena, layout, layer, workspace)
    cpu.refuse_device("append_kv", k)
    cpu.append_kv_cpu(k, v, view, page_id, store_slot, rot_slot, rope, workspace)


def append_kv_ref(k: Tensor, v: Tensor, rot_slot: Tensor, rope: RopeTable) -> tuple[Tensor, Tensor]:
    """What append_kv stores, in float64: (rotated keys, half-split; values)."""
    half = rope.rot_dim // 2
    row = rot_slot.long() - cpu.MIN_DISTANCE
    cos, sin = (rope.factor * t[row].double()[:, None] for t in (rope.cos, rope.sin))
    a, b, rest = k.double().split((half, half, k.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1), v.double()


def copy_pages(arena: Tensor, layout: KVLayout, src: int, dst: int) -> None:
    """Copy one page's bytes, all layers, to another id."""
    blocks = layout.blocks(arena)
    if not (0 <= src < len(blocks) and 0 < dst < len(blocks)):
        raise ValueError(
            f"copy_pages: from {src} to {dst}, expected ids below {len(blocks)} and no write to 0, the zeros"
        )
    blocks[dst].copy_(blocks[src])


def layer_view(arena: Tensor, layout: KVLayout, layer: int, workspace: Workspace | None) -> Tensor:
    """layout.view, remembered in the workspace."""
    if workspace is None:
        return layout.view(arena, layer)
    key = ("view", layer)
    if key not in workspace:
        workspace[key] = layout.view(arena, layer)
    view: Tensor = workspace[key]
    return view
