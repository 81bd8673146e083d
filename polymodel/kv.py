"""KV pages: who owns which, and in what order a sequence reads them. The only file that knows page numbers.

A page holds 64 tokens of one model in every layer. All models share one arena of bytes, cut into
superblocks; a superblock serves one page geometry while any of its pages is in use. A sequence is a list
of entries (page id, position of slot 0, valid slots [lo, hi)), so every verb edits entries and moves no
bytes, but for the copy of a shared page before it is written, a band of layers taken from another model's
pages, and what goes to the host and back.

The hidden states that enter layer L (a boundary) may be kept with a page, in a page of the same arena: 64 rows,
one per slot, owned by the page it is attached to. They are the first to be given up.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csrc_triton.attention import PageTable
from csrc_triton.cpu_attention import Workspace
from csrc_triton.fused import FLOATS
from csrc_triton.pages import ID_BYTES, SCALE_BYTES, KVLayout, commit_path, copy_pages, equal_blocks, layer_view
from polymodel.config import PAGE_TOKENS
from polymodel.errors import Contaminated, CorruptSession, InvalidRequest, KVFull

BLOCK_ALIGN = max(ID_BYTES, mmap.PAGESIZE)  # of a superblock, whose memory can go back to the system
MIN_SUPERBLOCKS = 64  # a budget is cut into about this many, so that models of several geometries fit
IDS, BASE, SPAN = range(3)  # rows of a list's entries; a span is lo | hi << 8
NO_STATES: Mapping[int, int] = MappingProxyType({})
ONE = np.int32(1)  # of the owners' dtype, for which numpy's add.at is fast
PageIds = Sequence[int] | NDArray[np.int32]


class Arena:
    """One byte tensor; hands out zeroed pages and counts their owners.

    Where pages are lacking, `reclaimers` are asked in order to give back what they can spare. `nbytes` may be in use:
    at first num_bytes, then what `grow` and `shrink` make of it, up to the max_bytes that the tensor has. On a CPU the
    tensor's memory is committed when first touched; on a GPU at once, so there the two must be equal.
    """

    def __init__(
        self,
        num_bytes: int,
        superblock_bytes: int | None = None,
        device: torch.device | str = "cpu",
        max_bytes: int | None = None,
    ) -> None:
        size = superblock_bytes or max(num_bytes // MIN_SUPERBLOCKS, 4 << 20)
        self.superblock_bytes = -(-size // BLOCK_ALIGN) * BLOCK_ALIGN
        reserved = num_bytes if max_bytes is None else max_bytes
        least, most = num_bytes // self.superblock_bytes, reserved // self.superblock_bytes
        if least < 2:
            raise InvalidRequest(
                f"kv_budget of {num_bytes:,} bytes holds {least} superblocks of {self.superblock_bytes:,}; "
                "it needs at least 2, one of them the region of zeros"
            )
        virtual = torch.device(device).type == "cpu"
        if reserved < num_bytes or (reserved > num_bytes and not virtual):
            raise InvalidRequest(
                f"max_bytes of {reserved:,} for a kv_budget of {num_bytes:,} bytes on {device}, "
                f"expected {'at least as many' if virtual else 'as many, which are committed at once there'}"
            )
        self.bytes, self._memory = _zeros(most * self.superblock_bytes, torch.device(device))
        self.min_bytes = least * self.superblock_bytes
        self._common = list(range(most - 1, 0, -1))  # superblocks of no geometry; 0 stays zero
        self._beyond = most - least  # the first so many of these may not be used, and hold no memory
        self._free: dict[KVLayout, dict[int, list[int]]] = {}  # geometry -> its superblocks -> free page ids
        self._owners = np.zeros(self.max_bytes // ID_BYTES, dtype=np.int32)  # by page id: how many entries hold it
        self._views: dict[KVLayout, Workspace] = {}
        self.num_pages_used = 0
        self.bytes_copied = 0  # from page to page, ever
        self.reclaimers: list[Callable[[KVLayout, int], None]] = []  # release pages until `count` are free
        self._spare_only = False
        self._states: dict[int, dict[int, int]] = {}  # page -> boundary -> the state page attached to it
        self._state_layouts: dict[int, KVLayout] = {}  # of attached state pages
        self.state_bytes = 0  # of the state pages attached
        self.on_states: Callable[[], None] | None = None  # called when these have changed

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
        """What may be in use now."""
        return self.max_bytes - self._beyond * self.superblock_bytes

    @property
    def max_bytes(self) -> int:
        """What may ever be in use."""
        return self.bytes.nbytes

    @property
    def _num_spare(self) -> int:
        """Superblocks that any geometry may take."""
        return len(self._common) - self._beyond

    def grow(self, num_bytes: int) -> int:
        """Let so much more be in use, rounded up to superblocks, at most `max_bytes` in all; the bytes added."""
        self._refuse_negative("grow", num_bytes)
        count = min(-(-num_bytes // self.superblock_bytes), self._beyond)
        self._beyond -= count
        return count * self.superblock_bytes

    def shrink(self, num_bytes: int) -> int:
        """Take back what `grow` added: free superblocks, num_bytes of them or less; the bytes taken.

        Their memory goes back to the system.
        """
        self._refuse_negative("shrink", num_bytes)
        size = self.superblock_bytes
        count = min(min(num_bytes, self.nbytes - self.min_bytes) // size, self._num_spare)
        if self._memory is not None:
            for block in self._common[self._beyond : self._beyond + count]:
                self._memory.madvise(mmap.MADV_DONTNEED, block * size, size)
        self._beyond += count
        return count * size

    def _refuse_negative(self, name: str, num_bytes: int) -> None:
        if num_bytes < 0:
            raise InvalidRequest(f"{name}({num_bytes}): the arena has {self.nbytes:,} bytes, expected 0 or more")

    def num_free(self, layout: KVLayout) -> int:
        """Pages of this geometry that could be allocated now."""
        partial = sum(len(pages) for pages in self._free.get(layout, {}).values())
        return partial + self._num_spare * layout.pages_per_superblock

    def shortage(self, layout: KVLayout, count: int) -> int:
        """Bytes to add for `count` pages of this geometry to be free, 0 if they are."""
        missing = max(count - self.num_free(layout), 0)
        return -(-missing // layout.pages_per_superblock) * self.superblock_bytes

    def allocate(self, layout: KVLayout, count: int) -> list[int]:
        """Ids of `count` zeroed pages with one owner each, or KVFull and none is taken."""
        free = self.num_free(layout)
        for reclaim in () if self._spare_only else self.reclaimers:
            if count <= free:
                break
            reclaim(layout, count)
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
        self._owners[taken] = 1
        self.num_pages_used += count
        return taken

    @contextmanager
    def spare_only(self) -> Iterator[None]:
        """Allocations inside take what is free and reclaim nothing."""
        before, self._spare_only = self._spare_only, True
        try:
            yield
        finally:
            self._spare_only = before

    def _pages_of(self, block: int, layout: KVLayout) -> list[int]:
        first, step = block * self.superblock_bytes // ID_BYTES, layout.block_bytes // ID_BYTES
        return [first + i * step for i in range(layout.pages_per_superblock - 1, -1, -1)]

    def share(self, pages: PageIds) -> None:
        """One more owner for each."""
        ids = np.asarray(pages, dtype=np.intp)
        assert bool((self._owners[ids] > 0).all()), "a page to share has no owner"
        np.add.at(self._owners, ids, ONE)

    def num_owners(self, page: int) -> int:
        return int(self._owners[page]) if 0 <= page < len(self._owners) else 0

    def release(self, layout: KVLayout, pages: PageIds) -> None:
        """One owner less for each; the last one's page is zeroed before anybody sees it, its states go too."""
        ids = np.asarray(pages, dtype=np.intp)
        np.subtract.at(self._owners, ids, ONE)
        left = self._owners[ids]
        assert bool((left >= 0).all()), "a page to release has no owner"
        freed = list(dict.fromkeys(ids[left == 0].tolist()))
        if not freed:
            return
        self.num_pages_used -= len(freed)
        copy_pages(self.bytes, layout, [0] * len(freed), freed)
        blocks = self._free[layout]
        for page in freed:
            block = page * ID_BYTES // self.superblock_bytes
            blocks[block].append(page)
            if len(blocks[block]) == layout.pages_per_superblock:
                del blocks[block]
                self._common.append(block)
        if self._state_layouts:
            orphans = [self._states.pop(page) for page in freed if page in self._states]
            self._change_states(-sum(layout.page_bytes for page in freed if self._state_layouts.pop(page, None)))
            self._release_states(orphans)

    def copy_page(self, layout: KVLayout, src: int, dst: int) -> None:
        """All layers, counted."""
        copy_pages(self.bytes, layout, src, dst)
        self.bytes_copied += layout.page_bytes

    # ---- hidden states -------------------------------------------------------------------------------

    def state_layout(self, hidden_size: int, dtype: torch.dtype) -> KVLayout:
        """The geometry of pages that hold the hidden states, [64, hidden_size], of a page's tokens."""
        if hidden_size % 4 or dtype not in FLOATS:
            raise InvalidRequest(
                f"hidden states of {hidden_size} numbers of {dtype} cannot be kept, "
                "expected a multiple of 4 of float32, bfloat16 or float16"
            )
        return self.layout(1, 1, hidden_size // 2, dtype)

    @property
    def has_states(self) -> bool:
        return bool(self._states)

    @property
    def attached(self) -> list[int]:
        """State pages, as often as they are attached."""
        return [state for states in self._states.values() for state in states.values()]

    def states(self, page: int) -> Mapping[int, int]:
        """The state pages attached to a page, by boundary."""
        return self._states.get(page, NO_STATES)

    def attach(self, page: int, boundary: int, layout: KVLayout) -> int:
        """A new state page for a page at this boundary, or KVFull: nothing is reclaimed for it."""
        assert self.num_owners(page) and boundary not in self.states(page)
        with self.spare_only():
            (state,) = self.allocate(layout, 1)
        self._states.setdefault(page, {})[boundary] = state
        self._state_layouts[state] = layout
        self._change_states(layout.page_bytes)
        return state

    def attach_shared(self, page: int, boundary: int, layout: KVLayout, state: int) -> None:
        """A state page that another page has, for this one as well."""
        assert self.num_owners(page) and boundary not in self.states(page) and self._state_layouts[state] == layout
        self.share([state])
        self._states.setdefault(page, {})[boundary] = state

    def detach(self, page: int, boundaries: Iterable[int] | None = None) -> None:
        """Give up a page's state pages, all or those of some boundaries."""
        states = self._states.pop(page, {})
        gone = states if boundaries is None else {b: states.pop(b) for b in boundaries if b in states}
        if gone is not states and states:
            self._states[page] = states
        self._release_states([gone])

    def drop_states(self) -> int:
        """Give up all state pages; how many there were."""
        count, states = len(self._state_layouts), list(self._states.values())
        self._states.clear()
        self._release_states(states)
        return count

    def _release_states(self, attachments: Iterable[Mapping[int, int]]) -> None:
        by_layout: dict[KVLayout, list[int]] = {}
        for states in attachments:
            for state in states.values():
                by_layout.setdefault(self._state_layouts[state], []).append(state)
        for layout, pages in by_layout.items():
            self.release(layout, pages)

    def _change_states(self, num_bytes: int) -> None:
        self.state_bytes += num_bytes
        if num_bytes and self.on_states:
            self.on_states()

    def share_states(self, src: int, dst: int, most: float = math.inf) -> None:
        """Attach one page's states at the boundaries up to `most` to another page, in place of its own."""
        states = {boundary: state for boundary, state in self.states(src).items() if boundary <= most}
        self.detach(dst, [boundary for boundary in self.states(dst) if boundary <= most])
        for boundary, state in states.items():
            self.attach_shared(dst, boundary, self._state_layouts[state], state)

    def own_states(self, page: int, above: int = 0) -> None:
        """Before a page's states are written: copy those that other pages have, or give them up if there is no room."""
        for boundary, state in list(self.states(page).items()):
            if boundary > above and self.num_owners(state) > 1:
                layout = self._state_layouts[state]
                self.detach(page, [boundary])
                with suppress(KVFull):
                    self.copy_page(layout, state, self.attach(page, boundary, layout))

    def write_states(self, layout: KVLayout, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Store rows [n, hidden_size] in these slots of state pages; bits, whatever they mean."""
        self._state_rows(layout)[self._at(pages), self._at(slots)] = rows

    def read_states(self, layout: KVLayout, pages: Tensor, slots: Tensor) -> Tensor:
        """[n, hidden_size]."""
        return self._state_rows(layout)[self._at(pages), self._at(slots)]

    def _state_rows(self, layout: KVLayout) -> Tensor:
        """[ids, 64, hidden_size] over the arena."""
        size = layout.dtype.itemsize
        shape, strides = (layout.num_ids(self.bytes), PAGE_TOKENS), (ID_BYTES // size, 2 * layout.head_dim)
        return self.bytes.view(layout.dtype).as_strided((*shape, 2 * layout.head_dim), (*strides, 1))

    def _at(self, index: Tensor) -> Tensor:
        return index.to(self.bytes.device, torch.int64)

    # ---- pages to the host and back ------------------------------------------------------------------

    def read_pages(self, layout: KVLayout, pages: PageIds) -> Tensor:
        """A copy on the host, [num_layers, pages, block_bytes] uint8."""
        shape = (layout.num_layers, len(pages), layout.block_bytes)
        data = torch.empty(shape, dtype=torch.uint8, pin_memory=self.bytes.is_cuda)
        words, at = layout.blocks(self.bytes).view(torch.int64), self._at(torch.as_tensor(pages))
        for layer in range(layout.num_layers):
            data[layer].view(torch.int64).copy_(words[:, layer][at])
        return data

    def write_pages(self, layout: KVLayout, pages: PageIds, data: Tensor) -> None:
        """The bytes that `read_pages` gave, into different pages."""
        words, at = layout.blocks(self.bytes).view(torch.int64), self._at(torch.as_tensor(pages))
        for layer in range(layout.num_layers):
            words[:, layer][at] = data[layer].view(torch.int64).to(self.bytes.device)

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
        assert sorted(owned) == self._owners.nonzero()[0].tolist(), "owned pages are not those that superblocks lack"
        assert len(owned) == self.num_pages_used and not bool((self._owners < 0).any())
        assert sorted(blocks) == list(range(self.max_bytes // self.superblock_bytes)), (
            "a superblock is lost or listed twice"
        )
        assert self._beyond >= 0 and self._num_spare >= 0, "more superblocks are in use than may be"
        assert self.min_bytes <= self.nbytes
        uses = Counter(self.attached)
        assert uses == {page: self.num_owners(page) for page in self._state_layouts}, "a state page is not owned"
        assert all(states and self.num_owners(page) for page, states in self._states.items())
        assert self.state_bytes == sum(layout.page_bytes for layout in self._state_layouts.values())


def _zeros(num_bytes: int, device: torch.device) -> tuple[Tensor, mmap.mmap | None]:
    """Bytes, and the memory they lie in where parts of it can go back to the system."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device), None
    if sys.platform != "linux":  # numpy's zeros are committed when first touched, torch's at once
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)), None
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise InvalidRequest(f"{num_bytes:,} bytes of KV pages cannot be reserved: {error}") from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8), memory


@dataclass(frozen=True, eq=False)
class Swapped:
    """A list's tokens on the host, pages whole."""

    layout: KVLayout
    entries: NDArray[np.int32]  # the list's, their pages by number in data
    length: int
    clean: int
    data: Tensor  # [num_layers, pages, block_bytes] uint8
    digest: str  # of all this

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def cut(self, length: int) -> Swapped:
        """Its first `length` tokens; CorruptSession if its bytes have changed."""
        self.check()
        entries = self.entries
        first = entries[BASE] + (entries[SPAN] & 255)
        entries = entries[:, : int(np.searchsorted(first, length))].copy()
        entries[SPAN, -1:] = entries[SPAN, -1:] & 255 | PAGE_TOKENS << 8
        pages, entries[IDS] = np.unique(entries[IDS], return_inverse=True)
        data = self.data[:, torch.from_numpy(pages.astype(np.int64))]
        cut = replace(self, entries=entries, length=length, clean=min(self.clean, length), data=data)
        return replace(cut, digest=cut.expected_digest)

    def check(self) -> None:
        if (digest := self.expected_digest) != self.digest:
            raise CorruptSession(f"the digest of {self.length} swapped-out tokens is {digest}, was {self.digest}")

    @property
    def expected_digest(self) -> str:
        facts = repr((self.layout, self.entries.tolist(), self.length, self.clean)).encode()
        key = hashlib.blake2b(facts).digest()
        return hashlib.blake2b(self.data.numpy().data, digest_size=16, key=key).hexdigest()


class PageList:
    """One sequence's pages for one model, in order.

    Entry e holds the positions base + lo .. base + hi - 1 in slots lo .. hi - 1 of its page, without gaps; the last
    entry may be filled to slot 63. A clean list is canonical: entry i starts at 64 i, and lo = 0. Only `evict` makes
    other lists. What `reserve` made writable stays so until the next rollback, evict or clone, or until somebody else
    shares its page.
    """

    def __init__(
        self, arena: Arena, layout: KVLayout, keep: tuple[int, ...] = (), states: KVLayout | None = None
    ) -> None:
        assert states is not None or not keep
        self.arena = arena
        self.layout = layout
        self.keep = keep  # boundaries whose hidden states are kept with new pages
        self.state_layout = states
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
        if fresh := self._own(self._begun if count else slice(0), wanted):
            self._extend(fresh)
        self.reserved = max(self.reserved, count)

    @property
    def _begun(self) -> slice:
        """The entry that holds the last token, if there is room for another in it."""
        last = self.num_entries(self.length) - 1
        has_room = last >= 0 and int(self._entries[BASE, last]) + PAGE_TOKENS > self.length
        return slice(last, last + 1) if has_room else slice(0)

    def _own(self, entry: slice, wanted: int) -> list[int]:
        """Copy this entry's page if it has other owners; `wanted` new pages are allocated with it."""
        arena, shared = self.arena, self._shared(entry)
        if not (wanted or shared):
            return []
        try:
            fresh = arena.allocate(self.layout, wanted + len(shared))
        except KVFull:
            if self._shared(entry) == shared:
                raise
            fresh, shared = arena.allocate(self.layout, wanted), []  # the other owner has been reclaimed
        for page in shared:
            self._entries[IDS, entry] = copy = fresh.pop()
            arena.copy_page(self.layout, page, copy)
            arena.share_states(page, copy)
            arena.own_states(copy)
        arena.release(self.layout, shared)
        return fresh

    def _shared(self, entry: slice) -> list[int]:
        return [page for page in self._entries[IDS, entry].tolist() if self.arena.num_owners(page) > 1]

    def _extend(self, pages: PageIds) -> None:
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
        ids, base, _ = self.entries
        position = np.arange(start, stop, dtype=np.int32)
        entry = np.searchsorted(self._firsts, position, side="right") - 1
        return torch.from_numpy(ids[entry]), torch.from_numpy(position - base[entry])

    def place_states(self, start: int, stop: int, above: int = 0) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Where hidden states of the reserved tokens [start, stop), about to be written, are kept.

        By boundary: the tokens, int64 from start on, and their state pages and slots, int32. Pages that begin here get
        state pages for what is to be kept, if there is room; the others have what they got when they began. Boundaries
        up to `above` are left out: of them the states are in place.
        """
        assert self.length <= start <= stop <= self.length + self.reserved
        if start == stop or not (self.keep or self.arena.has_states):
            return {}
        runs: dict[int, list[tuple[int, int, int, int]]] = {}
        first, last = self.num_entries(start + 1) - 1, self.num_entries(stop)
        for page, base in self._entries[:SPAN, first:last].T.tolist():
            if base >= start:
                self._attach(page, above)
            self.arena.own_states(page, above)
            for boundary, state in self.arena.states(page).items():
                if boundary > above:
                    run = max(base, start), min(base + PAGE_TOKENS, stop), state, base
                    runs.setdefault(boundary, []).append(run)
        return {boundary: _places(found, start) for boundary, found in runs.items()}

    def _attach(self, page: int, above: int) -> None:
        for boundary in self.keep:
            if boundary > above and boundary not in self.arena.states(page) and self.state_layout is not None:
                with suppress(KVFull):
                    self.arena.attach(page, boundary, self.state_layout)

    def states_at(self, boundary: int, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """State pages and slots, int32, of the tokens [start, stop), reserved ones included; None if any is missing."""
        page, slot = self.places(start, stop)
        pages, which = np.unique(page.numpy(), return_inverse=True)
        states = [self.arena.states(page).get(boundary) for page in pages.tolist()]
        if None in states:
            return None
        return torch.from_numpy(np.array(states, dtype=np.int32)[which]), slot

    def state_boundaries(self, stop: int) -> set[int]:
        """Boundaries at which hidden states of the tokens from here to `stop`, reserved ones, may come to be kept."""
        if self.length == stop or not (self.keep or self.arena.has_states):
            return set()
        first, last = self.num_entries(self.length + 1) - 1, self.num_entries(stop)
        return {*self.keep}.union(*(self.arena.states(page) for page in self.pages[first:last]))

    def commit(self, count: int, is_clean: bool = True) -> None:
        """The next `count` reserved tokens have been stored; is_clean: as a fresh prefill of them would store them."""
        assert 0 <= count <= self.reserved
        if is_clean and self.clean == self.length:
            self.clean += count
        self.length += count
        self.reserved -= count

    def reopen(self) -> None:
        """Make the last token's place in a clean list writable again: it is a token shorter, and that one reserved.

        What is stored there stays until it is written. KVFull leaves the list as it was.
        """
        assert self.length
        self._refuse_unclean("reopen")
        last = self.num_entries(self.length) - 1
        self._own(slice(last, last + 1), 0)
        self.length -= 1
        self.clean = min(self.clean, self.length)
        self.reserved += 1

    @contextmanager
    def scratch(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Page ids and slots, int32, of `count` tree nodes in zeroed pages, given back at the end of the block.

        `append_nodes` copies accepted ones into the list.
        """
        pages = self.arena.allocate(self.layout, -(-count // PAGE_TOKENS))
        try:
            node = torch.arange(count, dtype=torch.int32)
            yield torch.tensor(pages, dtype=torch.int32)[node // PAGE_TOKENS], node % PAGE_TOKENS
        finally:
            self.arena.release(self.layout, pages)

    def rollback(self, count: int) -> None:
        """Drop the last `count` tokens: a shorter length, and pages that hold nothing any more go back. Exact."""
        if not 0 <= count <= self.length:
            raise InvalidRequest(f"rollback({count}): the sequence has {self.length} tokens, expected 0..{self.length}")
        self.length -= count
        self.clean = min(self.clean, self.length)
        self.unreserve()

    def unreserve(self, count: int = 0) -> None:
        """Give back what is reserved beyond `count` tokens."""
        self.reserved = min(self.reserved, count)
        keep = int(np.searchsorted(self._firsts, self.length + self.reserved))
        dropped = self.entries[IDS, keep:].copy()
        self._size = keep
        if keep:
            self._trim(keep - 1, PAGE_TOKENS)
        self.arena.release(self.layout, dropped)

    @property
    def _firsts(self) -> NDArray[np.int32]:
        """Positions of the entries' first tokens."""
        firsts: NDArray[np.int32] = self.entries[BASE] + (self.entries[SPAN] & 255)
        return firsts

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
        first = self._firsts
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
        twin = PageList(self.arena, self.layout, self.keep, self.state_layout)
        twin._replace(0, self.entries[:, : self.num_entries(self.length)])
        twin.length, twin.clean = self.length, self.clean
        self.arena.share(twin.entries[IDS])
        self.reserved = 0
        return twin

    def splice(self, pages: Sequence[int], length: int) -> None:
        """Go on as a list whose first `length` tokens lie in these canonical pages. No bytes move."""
        self._refuse_unclean("splice")
        if len(pages) != -(-length // PAGE_TOKENS) or length < self.length:
            raise InvalidRequest(
                f"splice({len(pages)} pages, {length}): expected at least the sequence's {self.length} tokens "
                f"and a page for every {PAGE_TOKENS} of them"
            )
        kept = self.length // PAGE_TOKENS
        self.arena.share(pages[kept:])
        dropped = self.entries[IDS, kept:].copy()
        self._size = kept
        self._extend(pages[kept:])
        self.length = self.clean = length
        self.reserved = 0
        self.arena.release(self.layout, dropped)

    def take_band(self, pages: Sequence[int], layout: KVLayout, num_layers: int, stop: int) -> int:
        """Reserve the tokens up to `stop` and copy their first layers from another model's canonical pages.

        The hidden states that leave these layers, and lower ones, are shared with their pages. The position up to
        which both are in place: a page whose states were not kept ends it. KVFull leaves the list as it was.
        """
        self._refuse_unclean("take_band")
        most = min(layout.num_layers, self.layout.num_layers)
        if not equal_blocks(layout, self.layout) or not 1 <= num_layers <= most:
            raise InvalidRequest(
                f"take_band: {num_layers} layers of {layout} for {self.layout}, expected 1..{most} layers "
                "with equal heads, head_dim and dtype"
            )
        if len(pages) * PAGE_TOKENS < stop:
            raise InvalidRequest(
                f"take_band: {len(pages)} pages, expected one for every {PAGE_TOKENS} of {stop} tokens"
            )
        if (reach := self._reach(pages, num_layers, stop)) == self.length:
            return self.length
        self.reserve(reach - self.length)
        if (reach := self._reach(pages, num_layers, reach)) == self.length:  # states have been reclaimed
            return self.length
        first, last = self.length // PAGE_TOKENS, -(-reach // PAGE_TOKENS)
        src, dst = list(pages[first:last]), self.pages[first:last]
        for page, copy in zip(src, dst, strict=True):
            self.arena.share_states(page, copy, num_layers)
        if reach % PAGE_TOKENS:
            self.arena.own_states(dst[-1])
            if num_layers not in self.arena.states(dst[-1]):
                reach = max(self.length, reach // PAGE_TOKENS * PAGE_TOKENS)
                del src[-1], dst[-1]
        copy_pages(self.arena.bytes, layout, src, dst, num_layers=num_layers, dst_layout=self.layout)
        self.arena.bytes_copied += len(src) * num_layers * layout.block_bytes
        return reach

    def _reach(self, pages: Sequence[int], boundary: int, stop: int) -> int:
        """The position after this list's length up to which all these canonical pages have states of the boundary."""
        page = self.length // PAGE_TOKENS
        while page * PAGE_TOKENS < stop and boundary in self.arena.states(pages[page]):
            page += 1
        return max(self.length, min(page * PAGE_TOKENS, stop))

    def _refuse_unclean(self, name: str) -> None:
        if self.clean < self.length:
            raise Contaminated(
                f"{name}: of the sequence's {self.length} tokens {self.clean} are clean; "
                f"those from {self.clean} on attended something that was evicted since"
            )

    def _refuse_tokens(self, name: str) -> None:
        if self.length:
            raise InvalidRequest(f"{name}: the sequence has {self.length} tokens, expected none")

    def swap_out(self) -> Swapped:
        """Move the tokens to the host; the list is empty afterwards."""
        entries = self.entries[:, : self.num_entries(self.length)].copy()
        pages, entries[IDS] = np.unique(entries[IDS], return_inverse=True)
        data = self.arena.read_pages(self.layout, pages)
        swapped = Swapped(self.layout, entries, self.length, self.clean, data, "")
        swapped = replace(swapped, digest=swapped.expected_digest)
        self.free()
        return swapped

    def swap_in(self, swapped: Swapped) -> None:
        """Move them back into this empty list, bit for bit."""
        self._refuse_tokens("swap_in")
        if swapped.layout != self.layout:
            raise InvalidRequest(f"swap_in: pages of {swapped.layout}, expected those of {self.layout}")
        swapped.check()
        pages = self._filled(swapped.data)
        entries = swapped.entries.copy()
        entries[IDS] = pages[entries[IDS]]
        self.arena.share(entries[IDS])
        self.arena.release(self.layout, pages)
        self.free()
        self._replace(0, entries)
        self.length, self.clean = swapped.length, swapped.clean

    def dump(self) -> Tensor:
        """A clean list's pages on the host, [num_layers, pages, block_bytes]; slots that hold no token are 0."""
        self._refuse_unclean("dump")
        layout, tail = self.layout, self.length % PAGE_TOKENS
        data = self.arena.read_pages(layout, self.entries[IDS, : self.num_entries(self.length)])
        if tail:
            size = layout.num_kv_heads * 2 * layout.head_bytes
            heads = data[:, -1, :size].view(layout.num_layers, -1, layout.head_bytes)
            row = layout.head_dim * layout.dtype.itemsize
            heads[..., tail * row : PAGE_TOKENS * row] = 0
            if layout.scaled:
                heads[..., PAGE_TOKENS * row + tail * SCALE_BYTES :] = 0
        return data

    def load(self, data: Tensor, length: int) -> None:
        """What `dump` gave, into this empty list."""
        self._refuse_tokens("load")
        shape = (self.layout.num_layers, -(-length // PAGE_TOKENS), self.layout.block_bytes)
        if length < 0 or data.dtype != torch.uint8 or tuple(data.shape) != shape:
            raise InvalidRequest(
                f"load: {data.dtype} {tuple(data.shape)} for {length} tokens, expected torch.uint8 {shape}"
            )
        pages = self._filled(data.contiguous())
        self.free()
        self._extend(pages)
        self.length = self.clean = length

    def _filled(self, data: Tensor) -> NDArray[np.int32]:
        """New pages with these bytes."""
        pages = np.array(self.arena.allocate(self.layout, data.shape[1]), dtype=np.int32)
        self.arena.write_pages(self.layout, pages, data)
        return pages

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


def _places(runs: Sequence[tuple[int, int, int, int]], start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens from start on, state pages and slots of runs of tokens: (first, stop, state page, position of slot 0)."""
    places = [(i - start, state, i - base) for first, stop, state, base in runs for i in range(first, stop)]
    row, page, slot = zip(*places, strict=True)
    return torch.tensor(row), torch.tensor(page, dtype=torch.int32), torch.tensor(slot, dtype=torch.int32)


def check_lists(arena: Arena, lists: Sequence[PageList], scratch: Sequence[int] = ()) -> None:
    """These lists, scratch and state pages are all of the arena's owners, so slots are disjoint unless shared."""
    uses = Counter(page for pages in lists for page in pages.pages) + Counter(scratch) + Counter(arena.attached)
    owners = {page: arena.num_owners(page) for page in uses}
    assert owners == uses and len(uses) == arena.num_pages_used


def append_nodes(lists: Sequence[PageList], paths: Sequence[Tensor], is_clean: bool = True) -> None:
    """Copy accepted tree nodes into each list's next reserved places and commit them; lists of one arena and layout.

    paths: for each list the nodes' [n, 2] int32 (page id, slot); is_clean: as in `PageList.commit`.
    """
    sizes = [(len(pages), len(path)) for pages, path in zip(lists, paths, strict=True)]
    dst = [torch.stack(pages.places(at, at + n), 1) for pages, (at, n) in zip(lists, sizes, strict=True)]
    commit_path(lists[0].arena.bytes, lists[0].layout, torch.cat(list(paths)), torch.cat(dst))
    for pages, path in zip(lists, paths, strict=True):
        pages.commit(len(path), is_clean)


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
