"""KV pages: who owns which, and in what order a sequence reads them. The only file that knows page numbers.

A page holds 64 tokens of one model in every layer. All models share one arena of bytes, cut into
superblocks; a superblock serves one page geometry while any of its pages is in use. A sequence is a list
of entries (page id, position of slot 0, valid slots [lo, hi)), so every verb edits entries and moves no
bytes, but for the copy of a shared page before it is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csrc_triton.attention import PageTable
from csrc_triton.cpu_attention import Workspace
from csrc_triton.pages import ID_BYTES, KVLayout, commit_path, copy_pages, layer_view
from polymodel.config import PAGE_TOKENS
from polymodel.errors import InvalidRequest, KVFull

MIN_SUPERBLOCKS = 64  # a budget is cut into about this many, so that models of several geometries fit
IDS, BASE, SPAN = range(3)  # rows of a list's entries; a span is lo | hi << 8


class Arena:
    """One byte tensor of a fixed size; hands out zeroed pages and counts their owners."""

    def __init__(self, num_bytes: int, superblock_bytes: int | None = None, device: torch.device | str = "cpu") -> None:
        size = superblock_bytes or max(num_bytes // MIN_SUPERBLOCKS, 4 << 20)
        self.superblock_bytes = -(-size // ID_BYTES) * ID_BYTES
        count = num_bytes // self.superblock_bytes
        if count < 2:
            raise InvalidRequest(
                f"kv_budget of {num_bytes:,} bytes holds {count} superblocks of {self.superblock_bytes:,}; "
                "it needs at least 2, one of them the region of zeros"
            )
        self.bytes = _zeros(count * self.superblock_bytes, torch.device(device))
        self._common = list(range(count - 1, 0, -1))  # superblocks of no geometry; 0 stays zero
        self._free: dict[KVLayout, dict[int, list[int]]] = {}  # geometry -> its superblocks -> free page ids
        self._owners: dict[int, int] = {}  # page id -> how many entries hold it
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
        partial = sum(len(pages) for pages in self._free.get(layout, {}).values())
        return partial + len(self._common) * layout.pages_per_superblock

    def allocate(self, layout: KVLayout, count: int) -> list[int]:
        """Ids of `count` zeroed pages with one owner each, or KVFull and nothing changed."""
        free = self.num_free(layout)
        if count > free:
            raise KVFull(
                f"{count} KV pages of {layout.page_bytes:,} bytes wanted, {free} free; "
                f"the KV budget is {self.nbytes:,} bytes with {self.num_pages_used} pages in use"
            )
        blocks = self._free.setdefault(layout, {})
        taken: list[int] = []
        for pages in blocks.values():
            while pages and len(taken) < count:
                taken.append(pages.pop())
        while len(taken) < count:
            block = self._common.pop()
            pages = blocks[block] = self._pages_of(block, layout)
            while pages and len(taken) < count:
                taken.append(pages.pop())
        self._owners.update(dict.fromkeys(taken, 1))
        return taken

    def _pages_of(self, block: int, layout: KVLayout) -> list[int]:
        first, step = block * self.superblock_bytes // ID_BYTES, layout.block_bytes // ID_BYTES
        return [first + i * step for i in range(layout.pages_per_superblock - 1, -1, -1)]

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for each."""
        for page in pages:
            self._owners[page] += 1

    def num_owners(self, page: int) -> int:
        return self._owners.get(page, 0)

    def release(self, layout: KVLayout, pages: Sequence[int]) -> None:
        """One owner less for each; the last one's page is zeroed before anybody else sees it."""
        freed = []
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                del self._owners[page]
                freed.append(page)
        if not freed:
            return
        copy_pages(self.bytes, layout, [0] * len(freed), freed)
        blocks = self._free[layout]
        for page in freed:
            block = page * ID_BYTES // self.superblock_bytes
            blocks[block].append(page)
            if len(blocks[block]) == layout.pages_per_superblock:
                del blocks[block]
                self._common.append(block)

    def check(self) -> None:
        """Owned pages + free pages + common superblocks = everything, and no page is two things."""
        owned: list[int] = []
        blocks = [0, *self._common]
        for layout, free in self._free.items():
            for block, pages in free.items():
                every = set(self._pages_of(block, layout))
                assert len(set(pages)) == len(pages) < len(every) and set(pages) <= every
                owned += every - set(pages)
            blocks += free
        assert sorted(owned) == sorted(self._owners), "owned pages are not those that superblocks lack"
        assert all(count > 0 for count in self._owners.values())
        assert sorted(blocks) == list(range(self.nbytes // self.superblock_bytes)), (
            "a superblock is lost or listed twice"
        )


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # numpy's zeros are committed when first touched, torch's at once
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))


class PageList:
    """One sequence's pages for one model, in order.

    Entry e holds the positions base + lo .. base + hi - 1 in slots lo .. hi - 1 of its page, without gaps; the last
    entry may be filled to slot 63. A clean list is canonical: entry i starts at 64 i, and lo = 0. Only `evict` makes
    other lists. What `reserve` made writable stays so until the next rollback, evict or clone.
    """

    def __init__(self, arena: Arena, layout: KVLayout) -> None:
        self.arena = arena
        self.layout = layout
        self.length = 0  # tokens whose keys and values are stored
        self.clean = 0  # tokens [0, clean) are what a fresh prefill of them would be
        self.reserved = 0  # tokens after these that may be written
        self._entries = np.zeros((3, 8), dtype=np.int32)
        self._size = 0

    def __len__(self) -> int:
        return self.length

    @property
    def entries(self) -> NDArray[np.int32]:
        """[3, E]: page id, position of slot 0, lo | hi << 8; hi is where the next entry takes over, 64 in the last."""
        return self._entries[:, : self._size]

    @property
    def pages(self) -> list[int]:
        """Page ids in order, those of reserved pages last."""
        ids: list[int] = self.entries[IDS].tolist()
        return ids

    @property
    def nbytes(self) -> int:
        return self._size * self.layout.page_bytes

    @property
    def _end(self) -> int:
        """The position after the last entry's slot 63."""
        return int(self._entries[BASE, self._size - 1]) + PAGE_TOKENS if self._size else 0

    def num_entries(self, stop: int) -> int:
        """Entries that hold the tokens [0, stop), for length <= stop <= length + reserved."""
        room = self._end - stop  # entries after the last token's are whole pages
        assert room >= 0
        return self._size - room // PAGE_TOKENS

    def reserve(self, count: int) -> None:
        """Make the next `count` tokens writable: allocate pages, and copy the last one if it has other owners.

        KVFull leaves the list as it was.
        """
        wanted = max(-(-(self.length + count - self._end) // PAGE_TOKENS), 0)
        begun = self._begun
        shared = [page for page in self._entries[IDS, begun].tolist() if count and self.arena.num_owners(page) > 1]
        if wanted or shared:
            fresh = self.arena.allocate(self.layout, wanted + len(shared))
            for page in shared:
                self._entries[IDS, begun] = copy = fresh.pop()
                copy_pages(self.arena.bytes, self.layout, page, copy)
            self.arena.release(self.layout, shared)
            self._extend(fresh)
        self.reserved = max(self.reserved, count)

    @property
    def _begun(self) -> slice:
        """The entry that holds the last token, if there is room for another in it."""
        last = self.num_entries(self.length) - 1
        has_room = last >= 0 and int(self._entries[BASE, last]) + PAGE_TOKENS > self.length
        return slice(last, last + 1) if has_room else slice(0)

    def _extend(self, pages: Sequence[int]) -> None:
        """Whole pages after the last entry."""
        new = np.empty((3, len(pages)), dtype=np.int32)
        new[IDS] = pages
        new[BASE] = self._end + PAGE_TOKENS * np.arange(len(pages))
        new[SPAN] = PAGE_TOKENS << 8
        self._replace(self._size, new)

    def _replace(self, first: int, entries: NDArray[np.int32]) -> None:
        """These in place of all entries from `first` on."""
        size, capacity = first + entries.shape[1], self._entries.shape[1]
        if size > capacity:
            self._entries = np.pad(self._entries, ((0, 0), (0, max(size, 2 * capacity) - capacity)))
        self._entries[:, first:size] = entries
        self._size = size

    def places(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Page ids and slots, int32, of the tokens [start, stop), reserved ones included."""
        assert 0 <= start <= stop <= self.length + self.reserved
        ids, base, span = self.entries
        position = np.arange(start, stop, dtype=np.int32)
        entry = np.searchsorted(base + (span & 255), position, side="right") - 1
        return torch.from_numpy(ids[entry]), torch.from_numpy(position - base[entry])

    def commit(self, count: int) -> None:
        """The next `count` reserved tokens have been stored."""
        assert 0 <= count <= self.reserved
        if self.clean == self.length:
            self.clean += count
        self.length += count
        self.reserved -= count

    @contextmanager
    def scratch(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Page ids and slots, int32, of `count` tree nodes in zeroed pages, given back at the end of the block."""
        pages = self.arena.allocate(self.layout, -(-count // PAGE_TOKENS))
        try:
            node = torch.arange(count, dtype=torch.int32)
            yield torch.tensor(pages, dtype=torch.int32)[node // PAGE_TOKENS], node % PAGE_TOKENS
        finally:
            self.arena.release(self.layout, pages)

    def commit_path(self, src: Tensor) -> None:
        """Copy accepted nodes, src [n, 2] int32 (page id, slot), into the next n reserved places and commit them."""
        count = len(src)
        dst = torch.stack(self.places(self.length, self.length + count), dim=1)
        commit_path(self.arena.bytes, self.layout, src, dst)
        self.commit(count)

    def rollback(self, count: int) -> None:
        """Drop the last `count` tokens: a shorter length, and pages that hold nothing any more go back. Exact."""
        if not 0 <= count <= self.length:
            raise InvalidRequest(f"rollback({count}): the sequence has {self.length} tokens, expected 0..{self.length}")
        self.length -= count
        self.clean = min(self.clean, self.length)
        self.reserved = 0
        keep = self._size
        while keep and self._first(keep - 1) >= self.length:
            keep -= 1
        dropped = self.entries[IDS, keep:].tolist()
        self._size = keep
        if keep:
            self._trim(keep - 1, PAGE_TOKENS)
        self.arena.release(self.layout, dropped)

    def _first(self, entry: int) -> int:
        """Position of an entry's first token."""
        return int(self._entries[BASE, entry]) + (int(self._entries[SPAN, entry]) & 255)

    def _trim(self, entry: int, hi: int) -> None:
        self._entries[SPAN, entry] = int(self._entries[SPAN, entry]) & 255 | hi << 8

    def evict(self, start: int, stop: int) -> None:
        """Drop the tokens [start, stop) and move the later ones up. No bytes move, and pages wholly inside go back.

        Later tokens have attended what is gone: the list is clean up to `start` only, unless the span ends the list.
        """
        if not 0 <= start <= stop <= self.length:
            raise InvalidRequest(
                f"evict({start}, {stop}): the sequence has {self.length} tokens, "
                f"expected 0 <= start <= stop <= {self.length}"
            )
        if start == stop:
            return
        if stop == self.length:
            return self.rollback(stop - start)
        ids, base, span = self.entries
        first = base + (span & 255)
        head = int(np.searchsorted(first, start))  # entries that begin before the span
        tail = int(np.searchsorted(first, stop, side="right")) - 1  # the entry that goes on after it
        dropped, split = ids[head:tail].tolist(), ids[tail:head].tolist()
        rest = self.entries[:, tail:].copy()
        rest[SPAN, 0] = (stop - base[tail]) | (span[tail] >> 8 << 8)
        rest[BASE] -= stop - start
        self._replace(head, rest)
        if head:
            self._trim(head - 1, start - int(self._entries[BASE, head - 1]))
        self.arena.share(split)  # the span lies within one entry, whose page now occurs twice
        self.arena.release(self.layout, dropped)
        self.length -= stop - start
        self.clean = min(self.clean, start)
        self.reserved = 0

    def clone(self) -> PageList:
        """A list of the same pages; whoever writes first into a shared page copies that page."""
        twin = PageList(self.arena, self.layout)
        twin._replace(0, self.entries[:, : self.num_entries(self.length)])
        twin.length, twin.clean = self.length, self.clean
        self.arena.share(twin.pages)
        self.reserved = 0
        return twin

    def free(self) -> None:
        """Give every page back; the list is empty afterwards and may be used again."""
        self.rollback(self.length)

    def check(self) -> None:
        """Entries follow each other in position, the clean part is canonical, and what is writable has one owner."""
        ids, base, span = self.entries
        lo, hi = span & 255, span >> 8
        assert bool(((lo >= 0) & (lo < hi) & (hi <= PAGE_TOKENS)).all())
        assert np.array_equal(base + lo, [0, *(base + hi)[:-1]][: self._size]), "entries leave gaps or overlap"
        assert not self._size or hi[-1] == PAGE_TOKENS
        assert 0 <= self.clean <= self.length <= self.length + self.reserved <= self._end
        used, clean = self.num_entries(self.length), -(-self.clean // PAGE_TOKENS)
        assert used == int((base + lo < self.length).sum())
        assert np.array_equal(base[:clean], PAGE_TOKENS * np.arange(clean)) and not lo[:clean].any()
        assert all(self.arena.num_owners(page) >= count for page, count in Counter(self.pages).items())
        writable = ids[used:].tolist() + (ids[self._begun].tolist() if self.reserved else [])
        assert all(self.arena.num_owners(page) == 1 for page in writable)
        slot, (pages, page) = np.arange(PAGE_TOKENS), np.unique(ids, return_inverse=True)
        uses = np.zeros((len(pages), PAGE_TOKENS), dtype=np.int32)
        np.add.at(uses, page, (slot >= lo[:, None]) & (slot < hi[:, None]))
        assert not (uses > 1).any(), "two tokens in one slot"


def check_lists(arena: Arena, lists: Sequence[PageList], scratch: Sequence[int] = ()) -> None:
    """These lists and scratch pages are all of the arena's owners, so slots are disjoint unless shared."""
    uses = Counter(page for pages in lists for page in pages.pages) + Counter(scratch)
    owners = {page: arena.num_owners(page) for page in uses}
    assert owners == uses and len(uses) == arena.num_pages_used


def pack_tables(lists: Sequence[PageList], counts: Sequence[int]) -> PageTable:
    """The page lists of one forward, each `counts[i]` reserved tokens longer than committed."""
    stop = np.array([pages.length + count for pages, count in zip(lists, counts, strict=True)], dtype=np.int32)
    used = np.array([pages.num_entries(n) for pages, n in zip(lists, stop.tolist(), strict=True)], dtype=np.int32)
    packed = np.zeros((3, len(lists), max(int(used.max(initial=1)), 1)), dtype=np.int32)
    for row, (pages, n) in enumerate(zip(lists, used.tolist(), strict=True)):
        packed[:, row, :n] = pages.entries[:, :n]
    some = used.nonzero()[0]
    last = used[some] - 1
    packed[SPAN, some, last] = (packed[SPAN, some, last] & 255) | ((stop[some] - packed[BASE, some, last]) << 8)
    return PageTable(*(torch.from_numpy(a) for a in (*packed, used)))


def pack_rows(lists: Sequence[PageList], counts: Sequence[int], table: PageTable) -> tuple[Tensor, Tensor, Tensor]:
    """Position, page id and slot, [T] int32 each, of the tokens that a forward with this packed table appends."""
    every, count = np.arange(len(lists), dtype=np.int32), np.array(counts, dtype=np.int32)
    length = np.array([pages.length for pages in lists], dtype=np.int32)
    tail = np.array([max(pages.num_entries(pages.length) - 1, 0) for pages in lists], dtype=np.int32)
    origin = table.base.numpy()[every, tail]  # after the last token's entry come whole pages
    row = np.repeat(every, count)
    position = np.arange(len(row), dtype=np.int32) + np.repeat(length - (count.cumsum(dtype=np.int32) - count), count)
    offset = position - origin[row]
    page = table.ids.numpy()[row, tail[row] + offset // PAGE_TOKENS]
    return torch.from_numpy(position), torch.from_numpy(page), torch.from_numpy(offset % PAGE_TOKENS)
