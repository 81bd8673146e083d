"""KV pages: who owns which, and in what order a sequence reads them. The only file that knows page numbers.

A page holds 64 tokens of one model in every layer. All models share one arena of bytes, cut into
superblocks; a superblock serves one page geometry while any of its pages is in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from csrc_triton.attention import PageTable
from csrc_triton.cpu import Workspace
from csrc_triton.pages import ID_BYTES, KVLayout, copy_pages, layer_view
from polymodel.config import PAGE_TOKENS
from polymodel.errors import InvalidRequest, KVFull

MIN_SUPERBLOCKS = 64  # a budget is cut into about this many, so that models of several geometries fit


class Arena:
    """One byte tensor of a fixed size; hands out zeroed pages and counts their owners."""

    def __init__(self, num_bytes: int, superblock_bytes: int | None = None) -> None:
        size = superblock_bytes or max(num_bytes // MIN_SUPERBLOCKS, 4 << 20)
        self.superblock_bytes = -(-size // ID_BYTES) * ID_BYTES
        count = num_bytes // self.superblock_bytes
        if count < 2:
            raise InvalidRequest(
                f"kv_budget of {num_bytes:,} bytes holds {count} superblocks of {self.superblock_bytes:,}; "
                "it needs at least 2, one of them the region of zeros"
            )
        # numpy's zeros are committed when first touched, torch's at once
        self.bytes: Tensor = torch.from_numpy(np.zeros(count * self.superblock_bytes, dtype=np.uint8))
        self._common = list(range(count - 1, 0, -1))  # superblocks of no geometry; 0 stays zero
        self._free: dict[int, tuple[KVLayout, list[int]]] = {}  # superblock -> geometry, free page ids
        self._owners: dict[int, int] = {}  # page id -> lists that hold it
        self._views: dict[KVLayout, Workspace] = {}

    def layout(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> KVLayout:
        """The geometry of a model's pages in this arena."""
        one = KVLayout(num_layers, num_kv_heads, head_dim, dtype)
        count = self.superblock_bytes // one.page_bytes
        if count < 1:
            raise KVFull(
                f"a page of {PAGE_TOKENS} tokens takes {one.page_bytes:,} bytes, "
                f"a superblock has {self.superblock_bytes:,}; "
                f"raise kv_budget to at least {one.page_bytes * MIN_SUPERBLOCKS:,}"
            )
        return KVLayout(num_layers, num_kv_heads, head_dim, dtype, count)

    def workspace(self, layout: KVLayout) -> Workspace:
        """Scratch for one forward, the views of all layers already in it."""
        if layout not in self._views:
            self._views[layout] = Workspace()
            for layer in range(layout.num_layers):
                layer_view(self.bytes, layout, layer, self._views[layout])
        return Workspace(self._views[layout])

    @property
    def nbytes(self) -> int:
        return self.bytes.nbytes

    @property
    def num_pages_used(self) -> int:
        return len(self._owners)

    def num_free(self, layout: KVLayout) -> int:
        """Pages of this geometry that could be allocated now."""
        partial = sum(len(pages) for geometry, pages in self._free.values() if geometry == layout)
        return partial + len(self._common) * layout.pages_per_superblock

    def allocate(self, layout: KVLayout, count: int) -> list[int]:
        """Ids of `count` zeroed pages with one owner each, or KVFull and nothing changed."""
        free = self.num_free(layout)
        if count > free:
            raise KVFull(
                f"{count} KV pages of {layout.page_bytes:,} bytes wanted, {free} free; "
                f"the KV budget is {self.nbytes:,} bytes with {self.num_pages_used} pages in use"
            )
        return [self._allocate_one(layout) for _ in range(count)]

    def _allocate_one(self, layout: KVLayout) -> int:
        for geometry, pages in self._free.values():
            if geometry == layout and pages:
                page = pages.pop()
                break
        else:
            block = self._common.pop()
            first, step = block * self.superblock_bytes // ID_BYTES, layout.block_bytes // ID_BYTES
            pages = [first + i * step for i in range(layout.pages_per_superblock - 1, -1, -1)]
            self._free[block] = (layout, pages)
            page = pages.pop()
        self._owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more owner."""
        self._owners[page] += 1

    def num_owners(self, page: int) -> int:
        return self._owners.get(page, 0)

    def release(self, page: int, layout: KVLayout) -> None:
        """One owner less; the last one's page is zeroed before anybody else sees it."""
        self._owners[page] -= 1
        if self._owners[page]:
            return
        del self._owners[page]
        layout.blocks(self.bytes)[page].zero_()
        block = page * ID_BYTES // self.superblock_bytes
        pages = self._free[block][1]
        pages.append(page)
        if len(pages) == layout.pages_per_superblock:
            del self._free[block]
            self._common.append(block)

    def check(self) -> None:
        """Owned pages + free pages + common superblocks = everything, and no page is two things."""
        seen: set[int] = set(self._owners)
        assert all(count > 0 for count in self._owners.values())
        for block, (layout, pages) in self._free.items():
            first, step = block * self.superblock_bytes // ID_BYTES, layout.block_bytes // ID_BYTES
            every = {first + i * step for i in range(layout.pages_per_superblock)}
            owned = every & seen
            assert not owned & set(pages) and owned | set(pages) == every and len(pages) == len(set(pages))
            seen -= owned
        assert not seen, f"owned pages outside any superblock: {sorted(seen)}"
        assert len(self._common) + len(self._free) + 1 == self.nbytes // self.superblock_bytes


class PageList:
    """One sequence's pages for one model, in order. Entry i starts at position 64 i and is full but for the last."""

    def __init__(self, arena: Arena, layout: KVLayout) -> None:
        self.arena = arena
        self.layout = layout
        self.pages: list[int] = []
        self.length = 0  # tokens whose keys and values are stored

    def __len__(self) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.layout.page_bytes

    def reserve(self, count: int) -> None:
        """Make the next `count` tokens writable: allocate pages, and copy a page that has other owners.

        KVFull leaves the list as it was.
        """
        first = self.length // PAGE_TOKENS
        wanted = -(-(self.length + count) // PAGE_TOKENS)
        shared = [i for i in range(first, len(self.pages)) if self.arena.num_owners(self.pages[i]) > 1]
        fresh = self.arena.allocate(self.layout, len(shared) + max(wanted - len(self.pages), 0))
        for i in shared:
            copy = fresh.pop()
            copy_pages(self.arena.bytes, self.layout, self.pages[i], copy)
            self.arena.release(self.pages[i], self.layout)
            self.pages[i] = copy
        self.pages += fresh

    def commit(self, count: int) -> None:
        """The next `count` reserved tokens have been stored."""
        assert self.length + count <= len(self.pages) * PAGE_TOKENS
        self.length += count

    def rollback(self, count: int) -> None:
        """Drop the last `count` tokens: a shorter length, and pages that hold nothing any more go back."""
        if not 0 <= count <= self.length:
            raise InvalidRequest(f"rollback({count}): the sequence has {self.length} tokens, expected 0..{self.length}")
        self.length -= count
        keep = -(-self.length // PAGE_TOKENS)
        while len(self.pages) > keep:
            self.arena.release(self.pages.pop(), self.layout)

    def clone(self) -> PageList:
        """A list of the same pages; whoever writes first into a shared page copies that page."""
        twin = PageList(self.arena, self.layout)
        twin.pages = list(self.pages)
        twin.length = self.length
        for page in twin.pages:
            self.arena.share(page)
        return twin

    def free(self) -> None:
        """Give every page back; the list is empty afterwards and may be used again."""
        self.length = 0
        while self.pages:
            self.arena.release(self.pages.pop(), self.layout)

    def check(self) -> None:
        assert self.length <= len(self.pages) * PAGE_TOKENS
        assert len(set(self.pages)) == len(self.pages)
        assert all(self.arena.num_owners(page) > 0 for page in self.pages)


def pack_tables(lists: Sequence[PageList], counts: Sequence[int]) -> PageTable:
    """The page lists of one forward, each `counts[i]` tokens longer than committed."""
    lengths = [pages.length + count for pages, count in zip(lists, counts, strict=True)]
    used = np.array([-(-n // PAGE_TOKENS) for n in lengths], dtype=np.int32)
    width = max(int(used.max(initial=1)), 1)
    ids = np.zeros((len(lists), width), dtype=np.int32)
    for row, (pages, n) in enumerate(zip(lists, used, strict=True)):
        ids[row, :n] = pages.pages[:n]
    base = np.arange(width, dtype=np.int32)[None] * PAGE_TOKENS
    hi = np.clip(np.array(lengths, dtype=np.int32)[:, None] - base, 0, PAGE_TOKENS)
    base = np.where(hi > 0, base, 0).astype(np.int32)
    return PageTable(*(torch.from_numpy(a) for a in (ids, base, hi << 8, used)))
