"""Pages and their owners: a state machine over one arena with lists of four geometries, and the rules one by one."""

from __future__ import annotations

import mmap
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from csrc_triton.attention import page_table, paged_attention
from csrc_triton.fused import rope_table
from csrc_triton.pages import KVLayout, append_kv
from polymodel.errors import Contaminated, CorruptSession, InvalidRequest, KVFull
from polymodel.kv import Arena, PageList, Swapped, append_nodes, check_lists, pack_rows, pack_tables

SUPERBLOCK = 128 << 10
# layers, kv heads, head dim, dtype: 4, 2, 8 and 2 pages a superblock; small and tall have equal blocks
SMALL, LARGE, CODES = (2, 1, 32, torch.float32), (3, 2, 16, torch.float32), (2, 3, 16, torch.int8)
TALL = (3, 1, 32, torch.float32)
GEOMETRIES = (SMALL, LARGE, CODES, TALL)
HIDDEN = 8
BOUNDARIES = (1, 2)


def new_arena(superblocks: int = 6, most: int | None = None) -> Arena:
    return Arena(superblocks * SUPERBLOCK, SUPERBLOCK, max_bytes=None if most is None else most * SUPERBLOCK)


def states_of(arena: Arena) -> KVLayout:
    return arena.state_layout(HIDDEN, torch.float32)


def new_list(
    arena: Arena, geometry: tuple[int, int, int, torch.dtype], *values: int, keep: tuple[int, ...] = ()
) -> PageList:
    pages = PageList(arena, arena.layout(*geometry), keep, states_of(arena))
    store(pages, values)
    return pages


def write(pages: PageList, places: tuple[Tensor, Tensor], values: Sequence[int], first_layer: int = 0) -> None:
    """Every number of a token's keys and values in every layer is its value; or its scale is, and the codes follow."""
    numbers, layout = torch.tensor(values, dtype=torch.float32)[:, None, None], pages.layout
    for layer in range(first_layer, layout.num_layers):
        codes = layout.view(pages.arena.bytes, layer)
        if layout.scaled:
            layout.scales(pages.arena.bytes, layer)[places[0], :, :, places[1]] = numbers
        codes[places[0], :, :, places[1]] = coded(numbers[..., None], layout).to(layout.dtype)


def coded(numbers: Tensor, layout: KVLayout) -> Tensor:
    return numbers % 100 + 1 if layout.scaled else numbers


def write_states(pages: PageList, values: Sequence[int], first_layer: int = 0) -> None:
    """Every number of a token's hidden state is its value and its boundary's eighth."""
    places = pages.place_states(len(pages), len(pages) + len(values), first_layer)
    for boundary, (rows, ids, slots) in places.items():
        numbers = torch.tensor(values, dtype=torch.float32)[rows] + boundary / 8
        pages.arena.write_states(states_of(pages.arena), ids, slots, numbers[:, None].expand(-1, HIDDEN))


def store(pages: PageList, values: Sequence[int], first_layer: int = 0) -> None:
    """Append tokens as a forward does."""
    pages.reserve(len(values))
    write(pages, pages.places(len(pages), len(pages) + len(values)), values, first_layer)
    write_states(pages, values, first_layer)
    pages.commit(len(values))


def kept_states(pages: PageList, boundary: int) -> dict[int, int]:
    """Position -> the value in its hidden state, of all tokens that have one."""
    arena, found = pages.arena, {}
    for page, base, span in pages.entries[:, : pages.num_entries(len(pages))].T.tolist():
        if boundary in arena.states(page):
            first, stop = base + (span & 255), min(base + (span >> 8), len(pages))
            ids, slots = pages.states_at(boundary, first, stop)
            rows = arena.read_states(states_of(arena), ids, slots) - boundary / 8
            assert bool((rows == rows[:, :1]).all())
            found |= zip(range(first, stop), rows[:, 0].tolist(), strict=True)
    return found


def stored(pages: PageList) -> list[int]:
    """The values read back through the list's table; every layer, head and dim must say the same."""
    table, layout = pack_tables([pages], [0]), pages.layout
    entries = list(zip(*(t[0].tolist() for t in (table.ids, table.base, table.span)), strict=True))[: int(table.n)]
    spans = [(page, base, span & 255, span >> 8) for page, base, span in entries]
    assert [base + slot for _, base, lo, hi in spans for slot in range(lo, hi)] == list(range(len(pages)))
    places = [(page, slot) for page, _, lo, hi in spans for slot in range(lo, hi)]
    page, slot = torch.tensor(places, dtype=torch.int32).view(-1, 2).unbind(1)
    assert all(torch.equal(a, b) for a, b in zip(pages.places(0, len(pages)), (page, slot), strict=True))
    layers = [layout.view(pages.arena.bytes, i)[page, :, :, slot].float() for i in range(layout.num_layers)]
    numbers = torch.stack(layers, 1).flatten(1)
    values = numbers[:, :1]
    if layout.scaled:
        scales = [layout.scales(pages.arena.bytes, i)[page, :, :, slot] for i in range(layout.num_layers)]
        tokens = torch.stack(scales, 1).flatten(1)
        values = tokens[:, :1]
        assert bool((tokens == values).all())
    assert bool((numbers == coded(values, layout)).all())
    return [int(value) for value in values[:, 0]]


def unowned(arena: Arena, lists: Sequence[PageList]) -> Tensor:
    """The arena with the pages of these lists and attached state pages blanked out."""
    rest = arena.bytes.clone()
    states = states_of(arena).blocks(rest)
    for page in arena.attached:
        states[page].zero_()
    for pages in lists:
        blocks = pages.layout.blocks(rest)
        for page in pages.pages:
            blocks[page].zero_()
    return rest


def state(arena: Arena, lists: Sequence[PageList]) -> object:
    """All that a refused call must leave as it was, bytes included."""
    entries = [(pages.entries.tolist(), len(pages), pages.clean, pages.reserved) for pages in lists]
    every = [page for pages in lists for page in pages.pages]
    owners = {page: (arena.num_owners(page), dict(arena.states(page))) for page in every}
    free = [arena.num_free(arena.layout(*geometry)) for geometry in GEOMETRIES]
    return entries, owners, free, arena.nbytes, arena.num_pages_used, arena.bytes.numpy().tobytes()


COUNT = st.one_of(st.integers(1, 5), st.integers(0, 200))


class Pages(RuleBasedStateMachine):
    """Up to six lists of four geometries, and a cache of others to reclaim; each is compared with what was written.

    The arena has 5 to 8 superblocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arena = new_arena(5, 8)
        self.num_superblocks = 5
        self.lists: list[tuple[PageList, list[int]]] = []
        self.clean: dict[PageList, int] = {}
        self.swapped: list[tuple[Swapped, list[int]]] = []
        self.cache: list[tuple[PageList, list[int]]] = []
        self.next_value = 1
        self.arena.reclaimers.append(self.reclaim)

    def reclaim(self, layout: KVLayout, count: int) -> None:
        self.arena.check()
        while self.cache and self.arena.num_free(layout) < count:
            self.cache.pop(0)[0].free()

    @property
    def every(self) -> list[PageList]:
        return [pages for pages, _ in self.lists + self.cache]

    def add(self, pages: PageList, values: list[int]) -> None:
        self.lists.append((pages, values))
        self.clean[pages] = pages.clean

    def new_list(self, layout: KVLayout, keep: tuple[int, ...] = ()) -> PageList:
        return PageList(self.arena, layout, keep, states_of(self.arena))

    def pick(self, index: int) -> tuple[PageList, list[int]]:
        return self.lists[index % len(self.lists)]

    def new_values(self, count: int) -> list[int]:
        self.next_value += count
        return list(range(self.next_value - count, self.next_value))

    def state(self) -> object:
        return state(self.arena, self.every)

    def try_or_unchanged(self, act: Callable[[], None]) -> bool:
        before, cached = self.state(), len(self.cache)
        entries = [(pages.entries.tolist(), pages.reserved) for pages, _ in self.lists]
        try:
            act()
        except KVFull:
            assert entries == [(pages.entries.tolist(), pages.reserved) for pages, _ in self.lists]
            assert len(self.cache) < cached or self.state() == before
            return False
        return True

    def extend(self, pages: PageList, values: list[int], new: list[int]) -> None:
        if self.clean[pages] == len(values):
            self.clean[pages] += len(new)
        values += new

    @precondition(lambda self: len(self.lists) < 6)
    @rule(kind=st.integers(0, 3), keep=st.sampled_from([(), (1,), (1, 2)]))
    def create(self, kind: int, keep: tuple[int, ...]) -> None:
        self.add(self.new_list(self.arena.layout(*GEOMETRIES[kind]), keep), [])

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), count=COUNT)
    def append(self, index: int, count: int) -> None:
        pages, values = self.pick(index)
        new = self.new_values(count)
        if self.try_or_unchanged(lambda: pages.reserve(count)):
            store(pages, new)
            self.extend(pages, values, new)

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), count=COUNT)
    def reserve_only(self, index: int, count: int) -> None:
        """A forward that failed before its commit."""
        pages, _ = self.pick(index)
        self.try_or_unchanged(lambda: pages.reserve(count))

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), nodes=st.integers(1, 130), accepted=st.integers(0, 64), seed=st.integers(0, 9))
    def verify(self, index: int, nodes: int, accepted: int, seed: int) -> None:
        """A tree in scratch pages, of which some nodes in any order become the next tokens."""
        pages, values = self.pick(index)
        path = random.Random(seed).sample(range(nodes), min(nodes, accepted))
        drafted, used = self.new_values(nodes), self.arena.num_pages_used

        def round_trip() -> None:
            with pages.scratch(nodes) as (page, slot):
                assert len(set(zip(page.tolist(), slot.tolist(), strict=True))) == nodes
                assert not bool(pages.layout.blocks(self.arena.bytes)[page.unique()].any())
                write(pages, (page, slot), drafted)
                self.arena.check()
                check_lists(self.arena, self.every, page.unique().tolist())
                write_states(pages, [drafted[node] for node in path])
                append_nodes([pages], [torch.stack((page[path], slot[path]), 1)])

        if not self.try_or_unchanged(lambda: pages.reserve(len(path))):
            return
        if self.try_or_unchanged(round_trip):
            self.extend(pages, values, [drafted[node] for node in path])
        if not path and not self.cache:
            assert self.arena.num_pages_used == used

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), count=st.one_of(st.integers(0, 5), st.integers(0, 300)))
    def rollback(self, index: int, count: int) -> None:
        pages, values = self.pick(index)
        if count > len(values):
            before = self.state()
            with pytest.raises(InvalidRequest, match=f"rollback\\({count}\\): the sequence has {len(values)} tokens"):
                pages.rollback(count)
            assert self.state() == before
            return
        pages.rollback(count)
        del values[len(values) - count :]
        self.clean[pages] = min(self.clean[pages], len(values))
        assert len(pages.pages) == int(pack_tables([pages], [0]).n)  # nothing stays reserved

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), spans=st.lists(st.tuples(st.integers(0, 300), COUNT), min_size=1, max_size=4))
    def evict(self, index: int, spans: list[tuple[int, int]]) -> None:
        """Any spans of committed tokens; the tokens after one have seen it, unless it ends the list."""
        pages, values = self.pick(index)
        kept, before = set(pages.pages), self.arena.bytes.clone()
        for start, count in spans:
            start = start % (len(values) + 1)
            stop = min(start + count, len(values))
            pages.evict(start, stop)
            if start < stop:
                self.clean[pages] = min(self.clean[pages], start)
            del values[start:stop]
        assert set(pages.pages) <= kept
        blocks, old = pages.layout.blocks(self.arena.bytes), pages.layout.blocks(before)
        assert all(torch.equal(blocks[page], old[page]) for page in pages.pages)

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), start=st.integers(-3, 300), stop=st.integers(-3, 300))
    def evict_nonsense(self, index: int, start: int, stop: int) -> None:
        pages, values = self.pick(index)
        if 0 <= start <= stop <= len(values):
            return
        before = self.state()
        with pytest.raises(InvalidRequest, match=f"evict\\({start}, {stop}\\): the sequence has {len(values)} tokens"):
            pages.evict(start, stop)
        assert self.state() == before

    @precondition(lambda self: 0 < len(self.lists) < 6)
    @rule(index=st.integers(0, 5))
    def clone(self, index: int) -> None:
        pages, values = self.pick(index)
        used = self.arena.num_pages_used
        twin = pages.clone()
        assert self.arena.num_pages_used == used and twin.clean == self.clean[pages]
        self.add(twin, list(values))

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), count=st.integers(0, 300))
    def cache_prefix(self, index: int, count: int) -> None:
        """Something to reclaim."""
        pages, values = self.pick(index)
        twin = pages.clone()
        twin.rollback(max(len(values) - count, 0))
        self.cache.append((twin, values[:count]))
        if len(self.cache) > 4:
            self.cache.pop(0)[0].free()

    @precondition(lambda self: any(values for _, values in self.lists))
    @rule(index=st.integers(0, 5))
    def write_the_last_token_again(self, index: int) -> None:
        pages, values = self.pick(index)
        if self.clean[pages] < len(values):
            with pytest.raises(Contaminated, match="reopen"):
                pages.reopen()
        elif values and self.try_or_unchanged(pages.reopen):
            assert len(pages) == len(values) - 1
            store(pages, values[-1:])

    def take_from(self, source: int, index: int, count: int) -> tuple[PageList, list[int], PageList, int] | None:
        """Two lists, the one rolled back to where it is clean and starts like the other, and where to go on to."""
        (other, theirs), (pages, values) = self.pick(source), self.pick(index)
        common = min(len(values), len(theirs), self.clean[pages])
        while values[:common] != theirs[:common]:
            common -= 1
        if other is pages or other.clean < common:
            return None
        other.rollback(0)  # shared pages are no more writable
        pages.rollback(len(values) - common)
        del values[common:]
        self.clean[pages] = common
        return pages, values, other, min(common + count, other.clean)

    @precondition(lambda self: len(self.lists) > 1)
    @rule(source=st.integers(0, 5), index=st.integers(0, 5), count=st.integers(0, 300))
    def splice(self, source: int, index: int, count: int) -> None:
        if self.pick(source)[0].layout != self.pick(index)[0].layout:
            return
        if (taken := self.take_from(source, index, count)) is None:
            return
        pages, values, other, stop = taken
        copied = self.arena.bytes_copied
        pages.splice(other.pages[: -(-stop // 64)], stop)
        values[:] = self.pick(source)[1][:stop]
        self.clean[pages] = stop
        assert self.arena.bytes_copied == copied

    @precondition(lambda self: len(self.lists) > 1)
    @rule(
        source=st.integers(0, 5),
        index=st.integers(0, 5),
        count=st.integers(0, 300),
        num_layers=st.integers(1, 2),
        fails=st.booleans(),
    )
    def take_band(self, source: int, index: int, count: int, num_layers: int, fails: bool) -> None:
        """Some layers come from another model's pages, and a forward writes the others or fails."""
        if {self.pick(i)[0].layout.head_dim for i in (source, index)} != {32}:
            return
        if (taken := self.take_from(source, index, count)) is None:
            return
        pages, values, other, stop = taken
        reach: list[int] = []
        if not self.try_or_unchanged(
            lambda: reach.append(pages.take_band(other.pages, other.layout, num_layers, stop))
        ):
            return
        assert len(pages) == len(values) <= reach[0] <= max(stop, len(values)) and (
            reach[0] % 64 == 0 or reach[0] in (stop, len(pages))
        )
        if not fails:
            new = self.pick(source)[1][len(values) : reach[0]]
            assert pages.states_at(num_layers, len(pages), reach[0]) is not None
            store(pages, new, num_layers)
            self.extend(pages, values, new)

    @precondition(lambda self: self.lists and len(self.swapped) < 3)
    @rule(index=st.integers(0, 5))
    def swap_out(self, index: int) -> None:
        pages, values = self.pick(index)
        self.swapped.append((pages.swap_out(), list(values)))
        values.clear()
        self.clean[pages] = 0

    @precondition(lambda self: self.swapped and len(self.lists) < 6)
    @rule(breaks=st.booleans())
    def swap_in(self, breaks: bool) -> None:
        swapped, values = self.swapped[0]
        pages = self.new_list(swapped.layout)
        if breaks and values:
            before, broken = self.state(), replace(swapped, data=swapped.data ^ 1)
            with pytest.raises(CorruptSession):
                pages.swap_in(broken)
            assert self.state() == before and not pages.pages
        if self.try_or_unchanged(lambda: pages.swap_in(swapped)):
            self.swapped.pop(0)
            self.add(pages, values)
            assert pages.clean == swapped.clean

    @precondition(lambda self: 0 < len(self.lists) < 6)
    @rule(index=st.integers(0, 5))
    def dump_and_load(self, index: int) -> None:
        pages, values = self.pick(index)
        if self.clean[pages] < len(values):
            with pytest.raises(Contaminated):
                pages.dump()
            return
        twin = self.new_list(pages.layout)
        if self.try_or_unchanged(lambda: twin.load(pages.dump(), len(values))):
            self.add(twin, list(values))

    @property
    def num_used(self) -> int:
        """Superblocks that may not be taken away: that of zeros, and those of pages with an owner."""
        held = {page for pages in self.every for page in pages.pages} | set(self.arena.attached)
        return 1 + len({page * 4096 // SUPERBLOCK for page in held})

    @rule(num_bytes=st.integers(0, 4 * SUPERBLOCK))
    def grow(self, num_bytes: int) -> None:
        added = min(-(-num_bytes // SUPERBLOCK), 8 - self.num_superblocks)
        assert self.arena.grow(num_bytes) == added * SUPERBLOCK
        self.num_superblocks += added

    @rule(num_bytes=st.integers(0, 4 * SUPERBLOCK))
    def shrink(self, num_bytes: int) -> None:
        gone = min(num_bytes // SUPERBLOCK, self.num_superblocks - max(self.num_used, 5))
        assert self.arena.shrink(num_bytes) == gone * SUPERBLOCK
        self.num_superblocks -= gone

    @rule(kind=st.integers(0, 3), count=st.integers(0, 60))
    def grow_by_a_shortage(self, kind: int, count: int) -> None:
        layout = self.arena.layout(*GEOMETRIES[kind])
        shortage, free = self.arena.shortage(layout, count), self.arena.num_free(layout)
        assert (shortage == 0) == (count <= free)
        if 0 < shortage <= self.arena.max_bytes - self.arena.nbytes:
            assert self.arena.grow(shortage) == shortage
            assert count <= self.arena.num_free(layout) < count + layout.pages_per_superblock
            self.num_superblocks += shortage // SUPERBLOCK

    @rule()
    def drop_states(self) -> None:
        distinct = len(set(self.arena.attached))
        assert self.arena.drop_states() == distinct and not self.arena.has_states and self.arena.state_bytes == 0

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), forget=st.booleans())
    def free(self, index: int, forget: bool) -> None:
        pages, values = self.pick(index)
        pages.free()
        values.clear()
        self.clean[pages] = 0
        if forget:
            self.lists.pop(index % len(self.lists))

    @invariant()
    def everything_holds(self) -> None:
        self.arena.check()
        assert self.num_used * SUPERBLOCK <= self.arena.nbytes == self.num_superblocks * SUPERBLOCK
        check_lists(self.arena, self.every)
        for pages, values in self.lists + self.cache:
            pages.check()
            assert len(pages) == len(values) and stored(pages) == values
            for boundary in BOUNDARIES:
                assert all(values[at] == value for at, value in kept_states(pages, boundary).items())
        assert all(pages.clean == self.clean[pages] for pages, _ in self.lists)
        assert not bool(unowned(self.arena, self.every).any())

    def teardown(self) -> None:
        for pages in self.every:
            pages.free()
        self.arena.check()
        assert self.arena.num_pages_used == 0 and not bool(self.arena.bytes.any())
        self.arena.shrink(self.arena.nbytes)
        assert [self.arena.num_free(self.arena.layout(*geometry)) for geometry in GEOMETRIES] == [16, 8, 32, 8]


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestPagesAtLength(Pages.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=200, stateful_step_count=50, deadline=None)  # 10,000 steps, 50 s


# ---- owners ------------------------------------------------------------------------------------------


def test_the_next_write_into_a_shared_page_copies_it() -> None:
    arena = new_arena()
    one = new_list(arena, SMALL, *range(1, 101))
    two = one.clone()
    first, second = one.pages
    assert two.pages == [first, second] and arena.num_owners(second) == 2
    store(two, [777])
    assert two.pages[0] == first and two.pages[1] != second  # the full page stays shared
    assert [arena.num_owners(page) for page in (first, second, two.pages[1])] == [2, 1, 1]
    assert stored(one) == list(range(1, 101)) and stored(two) == [*range(1, 101), 777]
    store(one, [888])  # its only owner now, so in place
    assert one.pages == [first, second]
    assert stored(one)[-1] == 888 and stored(two)[-1] == 777


def test_rolling_back_into_a_shared_full_page_copies_it_before_the_next_write() -> None:
    one = new_list(new_arena(), SMALL, *range(1, 129))
    two = one.clone()
    two.rollback(70)
    store(two, [777] * 10)
    assert stored(one) == list(range(1, 129))
    assert stored(two) == [*range(1, 59), *[777] * 10]


def test_a_whole_page_that_ends_at_its_boundary_is_not_copied() -> None:
    arena = new_arena()
    one = new_list(arena, SMALL, *[1] * 64)
    two = one.clone()
    store(two, [2])
    assert two.pages[0] == one.pages[0] and arena.num_pages_used == 2


def test_a_clone_shares_no_reserved_page_and_ends_the_reservation() -> None:
    arena = new_arena()
    one = new_list(arena, SMALL, *[1] * 10)
    one.reserve(100)
    two = one.clone()
    assert (two.pages, two.reserved, one.reserved) == (one.pages[:1], 0, 0) and arena.num_pages_used == 2
    with pytest.raises(AssertionError):
        one.commit(1)
    one.reserve(100)
    assert one.pages[0] != two.pages[0] and arena.num_pages_used == 3


def test_a_freed_page_is_zero_before_anyone_sees_it() -> None:
    arena = new_arena()
    one = new_list(arena, LARGE, *[5] * 130)
    assert bool(arena.bytes.any())
    one.rollback(100)
    assert bool(arena.bytes.any()) and not bool(unowned(arena, [one]).any())
    one.free()
    assert not bool(arena.bytes.any())


def test_full_changes_nothing_and_says_how_much_was_wanted() -> None:
    arena = new_arena(3)
    one, two = new_list(arena, SMALL, *[1] * 64 * 7), new_list(arena, SMALL, *[2] * 64)
    twin = one.clone()
    before = state(arena, [one, two, twin])
    with pytest.raises(KVFull, match=r"1 KV pages of 32,768 bytes wanted, 0 free.* 393,216 bytes with 8 pages in use"):
        two.reserve(1)
    with pytest.raises(KVFull, match="2 KV pages"), two.scratch(65):
        pytest.fail("nothing to hand out")
    assert state(arena, [one, two, twin]) == before
    twin.rollback(1)
    before = state(arena, [one, two, twin])
    twin.reserve(0)
    with pytest.raises(KVFull):
        twin.reserve(1)  # needs a copy of the shared last page
    assert state(arena, [one, two, twin]) == before
    arena.check()
    two.free()
    twin.reserve(1)
    assert twin.pages[:-1] == one.pages[:-1] and twin.pages[-1] != one.pages[-1]


def test_only_reserved_places_are_handed_out_and_committed() -> None:
    pages = new_list(new_arena(), SMALL)
    for act in (lambda: pages.commit(1), lambda: pages.places(0, 1)):
        with pytest.raises(AssertionError):
            act()
    pages.reserve(65)
    pages.reserve(1)  # asks for nothing new
    assert (len(pages), pages.nbytes) == (0, 2 * 32768)
    pages.commit(64)
    for act in (lambda: pages.commit(2), lambda: pages.places(0, 66)):
        with pytest.raises(AssertionError):
            act()
    pages.rollback(0)
    assert (len(pages), pages.nbytes, pages.reserved) == (64, 32768, 0)


def test_the_last_token_can_be_written_again_in_a_page_of_ones_own() -> None:
    arena = new_arena()
    for length in (64, 65, 100):
        one = new_list(arena, SMALL, *range(1, length + 1))
        two = one.clone()
        two.reopen()
        assert (len(two), two.clean, two.reserved) == (length - 1, length - 1, 1)
        two.check()
        assert two.pages[:-1] == one.pages[:-1] and two.pages[-1] != one.pages[-1]
        two.commit(1)  # what is stored there stays
        assert stored(two) == stored(one) == list(range(1, length + 1)) and two.clean == length
        for pages in (one, two):
            pages.free()


# ---- reclaiming --------------------------------------------------------------------------------------


def test_reclaimers_are_asked_in_order_until_there_is_room() -> None:
    arena = new_arena(3)
    layout = arena.layout(*SMALL)
    caches = [[new_list(arena, SMALL, *[1] * 64) for _ in range(2)] for _ in range(3)]
    lists, asked = [new_list(arena, SMALL, *[1] * 64) for _ in range(2)], []

    def reclaimer(number: int) -> Callable[[KVLayout, int], None]:
        def reclaim(wanted: KVLayout, count: int) -> None:
            arena.check()
            assert wanted == layout
            asked.append((number, count))
            while caches[number] and arena.num_free(layout) < count:
                caches[number].pop().free()

        return reclaim

    arena.reclaimers += [reclaimer(number) for number in range(3)]
    lists[0].reserve(1)
    assert asked == [(0, 1)] and [len(cache) for cache in caches] == [1, 2, 2]
    with arena.spare_only(), arena.spare_only():
        pass
    with arena.spare_only():
        with arena.spare_only(), pytest.raises(KVFull):
            lists[1].reserve(1)
        with pytest.raises(KVFull):
            lists[1].reserve(1)
    assert len(asked) == 1
    lists[1].reserve(128)
    assert asked[1:] == [(0, 2), (1, 2)] and [len(cache) for cache in caches] == [0, 1, 2]
    with pytest.raises(KVFull, match="4 KV pages of 32,768 bytes wanted, 3 free"):
        lists[0].reserve(64 * 5)
    assert asked[3:] == [(0, 4), (1, 4), (2, 4)] and len(lists[0].pages) == 2
    arena.check()


def test_a_page_whose_other_owner_is_reclaimed_needs_no_copy() -> None:
    arena = new_arena(2)
    one = new_list(arena, SMALL, *range(1, 251))
    cached, copied = one.clone(), arena.bytes_copied
    arena.reclaimers.append(lambda layout, count: cached.free())
    store(one, [7])
    assert arena.bytes_copied == copied and stored(one) == [*range(1, 251), 7]
    cached = one.clone()
    one.rollback(0)
    with pytest.raises(KVFull):
        one.reserve(10)
    assert len(cached) == 0 and arena.num_owners(one.pages[-1]) == 1


# ---- splice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [0, 30, 64, 100, 128, 200])
@pytest.mark.parametrize("length", [200, 250, 256])
def test_splice_goes_on_in_another_lists_pages_and_moves_no_bytes(own: int, length: int) -> None:
    arena = new_arena(8)
    one, two = new_list(arena, SMALL, *range(1, 301)), new_list(arena, SMALL, *range(1, own + 1))
    keeper, mine = two.clone(), two.pages
    two.reserve(0)
    used = -(-length // 64)
    before, copied = arena.bytes.clone(), arena.bytes_copied
    two.splice(one.pages[:used], length)
    assert torch.equal(arena.bytes, before) and arena.bytes_copied == copied
    assert two.pages == [*mine[: own // 64], *one.pages[own // 64 : used]]
    assert (two.clean, two.reserved, stored(two)) == (length, 0, list(range(1, length + 1)))
    two.check()
    check_lists(arena, [one, two, keeper])
    store(two, [777])  # at most one page is copied
    assert arena.bytes_copied - copied == (one.layout.page_bytes if length % 64 else 0)
    assert stored(one) == list(range(1, 301)) and stored(two)[length:] == [777]


def test_splice_gives_reserved_pages_back() -> None:
    arena = new_arena(8)
    one, two = new_list(arena, SMALL, *range(1, 101)), new_list(arena, SMALL, *range(1, 11))
    two.reserve(300)
    two.splice(one.pages, 100)
    assert (
        two.pages == one.pages
        and two.reserved == 0
        and arena.num_pages_used == 2
        and not bool(unowned(arena, [one]).any())
    )


def test_splice_refuses_what_is_not_a_longer_clean_prefix() -> None:
    arena = new_arena(8)
    one, two = new_list(arena, SMALL, *range(1, 201)), new_list(arena, SMALL, *range(1, 101))
    before = state(arena, [one, two])
    for pages, length in ((one.pages[:2], 99), (one.pages, 128), (one.pages[:2], 129), (one.pages, -1)):
        with pytest.raises(InvalidRequest, match=rf"splice\({len(pages)} pages, {length}\): .* 100 tokens"):
            two.splice(pages, length)
    with pytest.raises(AssertionError, match="no owner"):
        two.splice([*one.pages[:3], one.pages[3] + 8], 200)
    assert state(arena, [one, two]) == before
    two.evict(10, 20)
    before = state(arena, [one, two])
    with pytest.raises(Contaminated, match="of the sequence's 90 tokens 10 are clean"):
        two.splice(one.pages, 200)
    assert state(arena, [one, two]) == before


# ---- hidden states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_are_kept_bit_for_bit_in_their_slots_alone(dtype: torch.dtype) -> None:
    arena = new_arena()
    layout, pages = arena.state_layout(36, dtype), new_list(arena, SMALL, *range(1, 129)).pages
    states = [arena.attach(page, 1, layout) for page in pages]
    bits = torch.randint(-128, 128, (70, 36 * dtype.itemsize), dtype=torch.int8)
    rows, place = bits.view(dtype), torch.randperm(128)[:70]  # NaN of all kinds among them
    ids, slots = torch.tensor(states, dtype=torch.int32)[place // 64], (place % 64).int()
    before = arena.bytes.clone()
    arena.write_states(layout, ids, slots, rows)
    assert torch.equal(arena.read_states(layout, ids, slots).view(torch.int8), bits)
    for page, slot, row in zip(ids.tolist(), slots.tolist(), bits, strict=True):
        before[page * 4096 + slot * bits.shape[1] :][: bits.shape[1]] = row.view(torch.uint8)
    assert torch.equal(arena.bytes, before)


def test_hidden_states_of_other_shapes_are_refused() -> None:
    for hidden, dtype in ((10, torch.float32), (8, torch.int8)):
        with pytest.raises(InvalidRequest, match=f"hidden states of {hidden} numbers of {dtype}"):
            new_arena().state_layout(hidden, dtype)


def test_a_page_gets_state_pages_when_its_first_slot_is_written() -> None:
    arena = new_arena()
    pages = new_list(arena, SMALL, *range(1, 11))
    pages.keep = (1, 2)  # too late for the first page
    pages.reserve(190)
    places = pages.place_states(10, 200)
    assert sorted(places) == [1, 2] and not arena.states(pages.pages[0])
    for boundary, (rows, ids, slots) in places.items():
        assert (rows.dtype, ids.dtype, slots.dtype) == (torch.int64, torch.int32, torch.int32)
        assert rows.tolist() == list(range(54, 190)) and slots.tolist() == [i % 64 for i in range(64, 200)]
        assert ids.tolist() == [arena.states(pages.pages[i // 64])[boundary] for i in range(64, 200)]
    assert pages.states_at(1, 63, 70) is None and pages.states_at(3, 64, 70) is None
    assert [t.tolist() for t in pages.states_at(2, 127, 129)] == [[places[2][1][i].item() for i in (63, 64)], [63, 0]]
    assert pages.place_states(10, 10) == pages.place_states(20, 64) == {}
    again = pages.place_states(64, 200)  # written anew: the same state pages
    assert all(torch.equal(again[boundary][1], places[boundary][1]) for boundary in (1, 2))
    assert list(pages.place_states(64, 200, 1)) == [2]
    assert arena.state_bytes == 6 * 4096


def test_without_room_no_states_are_kept_and_nothing_is_reclaimed() -> None:
    arena = new_arena(2)
    arena.reclaimers.append(lambda layout, count: pytest.fail("reclaimed"))
    one = new_list(arena, SMALL, *range(1, 101), keep=(1,))  # a superblock of its pages, none for states
    assert not arena.has_states and arena.state_bytes == 0
    with pytest.raises(KVFull):
        arena.attach(one.pages[0], 1, states_of(arena))
    arena.check()
    check_lists(arena, [one])


def test_state_pages_die_with_the_last_page_that_has_them() -> None:
    arena, changes = new_arena(), []
    arena.on_states = lambda: changes.append(arena.state_bytes)
    one = new_list(arena, SMALL, *range(1, 129), keep=(1,))
    two, state = new_list(arena, SMALL, *range(1, 65)), arena.states(one.pages[0])[1]
    arena.attach_shared(two.pages[0], 1, states_of(arena), state)
    twin = one.clone()
    one.free()
    assert arena.num_owners(state) == 2 and changes == [4096, 8192]
    twin.free()
    assert arena.num_owners(state) == 1 and arena.states(two.pages[0]) == {1: state} and changes == [4096, 8192, 4096]
    arena.check()
    check_lists(arena, [two])
    arena.detach(two.pages[0])
    arena.detach(two.pages[0])
    assert changes == [4096, 8192, 4096, 0] and not arena.has_states
    assert not bool(unowned(arena, [two]).any())


def test_all_states_can_be_given_up() -> None:
    arena = new_arena()
    one, two = (new_list(arena, shape, *range(1, 101), keep=(1, 2)) for shape in (SMALL, TALL))
    arena.attach(one.pages[0], 3, arena.state_layout(64, torch.bfloat16))
    assert arena.state_bytes == 8 * 4096 + 8192
    assert (arena.drop_states(), arena.state_bytes, arena.drop_states()) == (9, 0, 0)
    check_lists(arena, [one, two])
    assert not bool(unowned(arena, [one, two]).any())
    store(one, [7])  # its page has none from now on
    assert not arena.has_states


def test_the_copy_of_a_shared_page_has_copies_of_its_states() -> None:
    arena = new_arena()
    one = new_list(arena, SMALL, *range(1, 101), keep=(1, 2))
    two, copied = one.clone(), arena.bytes_copied
    assert (two.keep, two.state_layout) == (one.keep, one.state_layout)
    store(two, [777])
    assert arena.bytes_copied - copied == one.layout.page_bytes + 2 * 4096
    states = [arena.states(pages.pages[1]) for pages in (one, two)]
    assert not set(states[0].values()) & set(states[1].values())
    store(one, [888])
    for boundary in BOUNDARIES:
        assert [list(kept_states(pages, boundary).values())[63:] for pages in (one, two)] == [
            [*range(64, 101), 888],
            [*range(64, 101), 777],
        ]


def test_the_copy_of_a_shared_page_has_no_states_where_there_is_no_room() -> None:
    arena = new_arena(3)
    one = new_list(arena, SMALL, *range(1, 101), keep=(1,))
    two, fill = one.clone(), arena.allocate(states_of(arena), 30)
    two.reserve(1)
    assert arena.states(one.pages[1]) and not arena.states(two.pages[1])
    arena.check()
    arena.release(states_of(arena), fill)


# ---- take_band ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [SMALL, TALL], ids=["fewer layers", "more layers"])
@pytest.mark.parametrize(("own", "stop"), [(0, 200), (0, 192), (64, 200), (70, 200), (70, 128), (130, 140)])
def test_a_band_of_layers_is_copied_and_its_states_are_shared(
    geometry: tuple[int, int, int, torch.dtype], own: int, stop: int
) -> None:
    arena = new_arena(12)
    source = new_list(arena, TALL if geometry == SMALL else SMALL, *range(1, 251), keep=(1, 2))
    pages = new_list(arena, geometry, *range(1, own + 1), keep=(1, 2))
    before, copied = arena.bytes.clone(), arena.bytes_copied
    assert pages.take_band(source.pages, source.layout, 1, stop) == stop
    assert (len(pages), pages.reserved) == (own, stop - own)
    first, last = own // 64, -(-stop // 64)
    blocks, theirs = pages.layout.blocks(arena.bytes), source.layout.blocks(before)
    for page, other in zip(pages.pages[first:], source.pages[first:last], strict=False):
        assert torch.equal(blocks[page, 0], theirs[other, 0])
    for page in pages.pages[-(-own // 64) :]:
        assert not bool(blocks[page, 1:].any())
    tail = stop % 64 != 0
    assert arena.bytes_copied - copied == (last - first) * pages.layout.block_bytes + tail * 4096
    shared = [arena.states(a)[1] == arena.states(b)[1] for a, b in zip(pages.pages, source.pages, strict=False)]
    assert shared == [False] * first + [True] * (last - first - tail) + [False] * tail
    assert kept_states(source, 1) == {i: i + 1 for i in range(250)}
    store(pages, range(own + 1, stop + 1), 1)
    assert stored(pages) == list(range(1, stop + 1)) and kept_states(pages, 1) == {i: i + 1 for i in range(stop)}
    store(pages, [777] * 70)
    pages.rollback(stop + 70 - 100)
    store(pages, [888] * 20)  # into a page whose states may be the source's as well
    assert kept_states(pages, 1) == dict(enumerate([*range(1, 101), *[888] * 20]))
    assert kept_states(source, 1) == kept_states(source, 2) == {i: i + 1 for i in range(250)}
    arena.check()
    check_lists(arena, [source, pages])


def test_a_band_ends_at_the_first_page_without_states() -> None:
    arena = new_arena(12)
    source, pages = new_list(arena, SMALL, *range(1, 251), keep=(1, 2)), new_list(arena, TALL, *range(1, 71))
    arena.detach(source.pages[2], [1])
    assert pages.take_band(source.pages, source.layout, 1, 250) == 128
    pages.rollback(0)
    arena.detach(source.pages[1])
    before = state(arena, [source, pages])
    assert pages.take_band(source.pages, source.layout, 1, 250) == 70
    assert pages.take_band(source.pages, source.layout, 1, 60) == 70
    assert state(arena, [source, pages]) == before


def test_no_states_are_kept_of_layers_below_a_band() -> None:
    """The forward that goes on above it does not have them."""
    arena = new_arena(12)
    source, pages = (
        new_list(arena, TALL, *range(1, own + 1), keep=keep) for own, keep in ((250, (2,)), (70, (1, 2, 3)))
    )
    assert pages.take_band(source.pages, source.layout, 2, 200) == 200
    store(pages, range(71, 201), 2)
    assert [len(kept_states(pages, boundary)) for boundary in (1, 2)] == [64, 200]
    assert [sorted(arena.states(page)) for page in pages.pages] == [[1, 2, 3], [2, 3], [2, 3], [2, 3]]
    assert kept_states(pages, 2) == kept_states(pages, 3) == {i: i + 1 for i in range(200)}


def test_a_band_ends_before_a_partial_page_whose_states_find_no_room() -> None:
    arena = new_arena(4)
    source = new_list(arena, SMALL, *range(1, 101), keep=(1,))
    pages, fill = PageList(arena, arena.layout(*TALL)), arena.allocate(states_of(arena), 30)
    assert pages.take_band(source.pages, source.layout, 1, 100) == 64
    assert arena.states(pages.pages[0]) and not arena.states(pages.pages[1])
    assert not bool(pages.layout.blocks(arena.bytes)[pages.pages[1]].any())
    arena.release(states_of(arena), fill)


def test_states_that_are_reclaimed_for_a_band_are_not_taken() -> None:
    arena = new_arena(4)
    source = new_list(arena, SMALL, *range(1, 101), keep=(1,))
    other = new_list(arena, TALL, *[1] * 100)
    pages = PageList(arena, other.layout)
    arena.reclaimers += [lambda layout, count: arena.drop_states(), lambda layout, count: pytest.fail("enough")]
    assert pages.take_band(source.pages, source.layout, 1, 100) == 0
    assert not bool(pages.layout.blocks(arena.bytes)[pages.pages].any())
    arena.check()
    check_lists(arena, [source, other, pages])


def test_take_band_refuses() -> None:
    arena = new_arena(5)
    source, pages = new_list(arena, SMALL, *range(1, 201), keep=(1, 2)), new_list(arena, TALL, *range(1, 11))
    large = new_list(arena, LARGE, *range(1, 101))
    before = state(arena, [source, pages, large])
    for ids, layout, num_layers, message in (
        (large.pages, large.layout, 1, "1 layers of .*expected 1..3 layers with equal heads"),
        (source.pages, source.layout, 3, r"3 layers of .*expected 1\.\.2 layers"),
        (source.pages, source.layout, 0, r"0 layers of .*expected 1\.\.2 layers"),
        (source.pages[:3], source.layout, 1, "3 pages, expected one for every 64 of 200 tokens"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            pages.take_band(ids, layout, num_layers, 200)
    with pytest.raises(KVFull):
        pages.take_band(source.pages, source.layout, 1, 200)
    assert state(arena, [source, pages, large]) == before
    pages.evict(1, 2)
    with pytest.raises(Contaminated, match="take_band: of the sequence's 9 tokens 1 are clean"):
        pages.take_band(source.pages, source.layout, 1, 200)


# ---- to the host and back ----------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_list_comes_back_from_the_host_bit_for_bit(geometry: tuple[int, int, int, torch.dtype]) -> None:
    arena = new_arena(8)
    pages = new_list(arena, geometry, *range(1, 201), keep=(1,))
    layout = pages.layout
    pages.evict(10, 20)  # the first page is there twice
    blocks = layout.blocks(arena.bytes)
    blocks[pages.pages] = torch.randint(0, 256, blocks[pages.pages].shape, dtype=torch.uint8)
    pages.reserve(100)
    before, table = [blocks[page].clone() for page in pages.pages[:5]], pages.entries[1:, :5].tolist()
    swapped = pages.swap_out()
    assert (len(pages), pages.pages, arena.num_pages_used, swapped.nbytes) == (0, [], 0, 4 * layout.page_bytes)
    assert not bool(arena.bytes.any())
    other = new_list(arena, geometry, *[1] * 64)
    pages.swap_in(swapped)
    assert (len(pages), pages.clean, pages.reserved, pages.entries[1:].tolist()) == (190, 10, 0, table)
    assert pages.pages[0] == pages.pages[1] and arena.num_owners(pages.pages[0]) == 2
    assert all(torch.equal(blocks[page], bits) for page, bits in zip(pages.pages, before, strict=True))
    pages.check()
    check_lists(arena, [pages, other])


def test_an_empty_list_goes_to_the_host_and_back() -> None:
    pages = new_list(new_arena(), SMALL)
    pages.reserve(10)
    swapped = pages.swap_out()
    assert swapped.nbytes == 0 and pages.pages == []
    pages.swap_in(swapped)
    pages.load(pages.dump(), 0)
    assert len(pages) == 0


def test_swap_in_refuses() -> None:
    arena = new_arena(3)
    one, two = new_list(arena, SMALL, *range(1, 201)), new_list(arena, SMALL, *range(1, 11))
    swapped = one.swap_out()
    tall = PageList(arena, arena.layout(*TALL))
    entries = swapped.entries.copy()
    entries[2, 0] -= 256
    before = state(arena, [one, two, tall])
    with pytest.raises(InvalidRequest, match="swap_in: the sequence has 10 tokens, expected none"):
        two.swap_in(swapped)
    with pytest.raises(InvalidRequest, match=r"swap_in: pages of KVLayout.*expected those of KVLayout"):
        tall.swap_in(swapped)
    flipped = swapped.data.clone()
    flipped[1, 2, 77] ^= 16
    for wrong in ({"data": flipped}, {"entries": entries}, {"length": 199}, {"clean": 100}, {"digest": "0" * 128}):
        with pytest.raises(CorruptSession, match=r"the digest of [0-9]+ swapped-out tokens is"):
            one.swap_in(replace(swapped, **wrong))
    assert state(arena, [one, two, tall]) == before
    two.reserve(64 * 5)
    before = state(arena, [one, two, tall])
    with pytest.raises(KVFull, match="4 KV pages"):
        one.swap_in(swapped)
    assert state(arena, [one, two, tall]) == before
    two.free()
    one.swap_in(swapped)
    assert stored(one) == list(range(1, 201))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("length", [1, 64, 100])
def test_a_dump_holds_the_tokens_and_nothing_else(geometry: tuple[int, int, int, torch.dtype], length: int) -> None:
    arena = new_arena(12)
    pages, fresh = new_list(arena, geometry, *range(1, 201)), new_list(arena, geometry, *range(1, length + 1))
    pages.rollback(200 - length)
    pages.reserve(100)
    data, layout = pages.dump(), pages.layout
    assert data.shape == (layout.num_layers, -(-length // 64), layout.block_bytes)
    assert torch.equal(data, layout.blocks(arena.bytes)[fresh.pages].transpose(0, 1))
    twin = PageList(arena, layout)
    twin.reserve(1)
    twin.load(data, length)
    assert (stored(twin), twin.clean, twin.reserved) == (list(range(1, length + 1)), length, 0)
    check_lists(arena, [pages, fresh, twin])


def test_dump_and_load_refuse() -> None:
    arena = new_arena(3)
    one, two = new_list(arena, SMALL, *range(1, 201)), new_list(arena, SMALL)
    data = one.dump()
    with pytest.raises(InvalidRequest, match="load: the sequence has 200 tokens, expected none"):
        one.load(data, 200)
    one.reserve(64 * 3)
    before = state(arena, [one, two])
    with pytest.raises(KVFull, match="4 KV pages"):
        two.load(data, 200)
    for wrong, length in ((data, 192), (data, -1), (data[:1], 200), (data.int(), 200), (data[..., :-1], 200)):
        with pytest.raises(InvalidRequest, match=rf"load: torch\.\w+ \(.*\) for {length} tokens, expected torch.uint8"):
            two.load(wrong, length)
    assert state(arena, [one, two]) == before
    one.evict(60, 70)
    with pytest.raises(Contaminated, match="dump: of the sequence's 190 tokens 60 are clean"):
        one.dump()


# ---- costs -------------------------------------------------------------------------------------------


def test_the_verbs_of_a_list_cost_the_same_at_any_length() -> None:
    arena = Arena(64 << 20)
    lists, seconds = {}, {}
    for length in (1 << 10, 1 << 16):
        lists[length] = PageList(arena, arena.layout(1, 1, 2))
        lists[length].reserve(length)
        lists[length].commit(length)

    def timed(verb: str, length: int, act: Callable[[], PageList | None]) -> PageList | None:
        start = time.perf_counter()
        result = act()
        seconds.setdefault((verb, length), []).append(time.perf_counter() - start)
        return result

    for _ in range(31):
        for length, pages in lists.items():
            twin = timed("clone", length, pages.clone)
            timed("rollback", length, partial(twin.rollback, 100))
            timed("evict", length, partial(twin.evict, 100, 300))
            timed("evict within a page", length, partial(twin.evict, 1, 2))
            twin.free()
    for verb, length in seconds:
        short = statistics.median(seconds[verb, 1 << 10])
        assert statistics.median(seconds[verb, length]) <= 3 * short, (verb, length)


# ---- evict -------------------------------------------------------------------------------------------


def entries(pages: PageList) -> list[tuple[int, int, int]]:
    """(position of slot 0, lo, hi) of each entry."""
    return [(base, span & 255, span >> 8) for _, base, span in pages.entries.T.tolist()]


def test_evict_trims_the_boundary_entries_and_shifts_the_later_ones() -> None:
    arena = new_arena()
    pages = new_list(arena, SMALL, *range(1, 301))
    ids = pages.pages
    pages.evict(100, 222)  # from slot 36 of page 1 to slot 30 of page 3; page 2 lies inside
    assert (pages.pages, entries(pages)) == (
        [ids[0], ids[1], ids[3], ids[4]],
        [(0, 0, 64), (64, 0, 36), (70, 30, 64), (134, 0, 64)],
    )
    assert stored(pages) == [*range(1, 101), *range(223, 301)] and arena.num_owners(ids[2]) == 0
    pages.evict(10, 20)  # within page 0, which is now there twice
    assert pages.pages == [ids[0], ids[0], ids[1], ids[3], ids[4]] and arena.num_owners(ids[0]) == 2
    assert entries(pages)[:3] == [(0, 0, 10), (-10, 20, 64), (54, 0, 36)]
    pages.evict(0, 10)  # the first piece, whole
    assert pages.pages == [ids[0], ids[1], ids[3], ids[4]] and arena.num_owners(ids[0]) == 1
    assert entries(pages)[0] == (-20, 20, 64) and stored(pages) == [*range(21, 101), *range(223, 301)]
    pages.evict(40, 50)  # into page 1, which ends early already
    assert entries(pages)[:3] == [(-20, 20, 60), (34, 6, 36), (40, 30, 64)]
    assert stored(pages) == [*range(21, 61), *range(71, 101), *range(223, 301)]


@pytest.mark.parametrize(("start", "stop"), [(64, 128), (3, 5), (60, 70), (0, 1), (0, 250), (65, 199)])
def test_evict_moves_no_bytes(start: int, stop: int) -> None:
    arena = new_arena()
    pages = new_list(arena, SMALL, *range(1, 260))
    keeper = pages.clone()  # so that no page goes back, to be zeroed
    before = arena.bytes.clone()
    pages.evict(start, stop)
    assert torch.equal(arena.bytes, before)
    assert stored(pages) == [*range(1, start + 1), *range(stop + 1, 260)] and stored(keeper) == list(range(1, 260))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, 101), (101, 101), (100, 200)])
def test_a_span_that_is_not_there_is_refused_with_its_bounds(start: int, stop: int) -> None:
    arena = new_arena()
    pages = new_list(arena, SMALL, *range(1, 101))
    pages.reserve(70)
    before = state(arena, [pages])
    message = f"evict\\({start}, {stop}\\): the sequence has 100 tokens, expected 0 <= start <= stop <= 100"
    with pytest.raises(InvalidRequest, match=message):
        pages.evict(start, stop)
    for at in (0, 50, 100):
        pages.evict(at, at)
    assert state(arena, [pages]) == before


def test_an_evict_up_to_the_end_is_a_rollback() -> None:
    arena = new_arena()
    pages = new_list(arena, SMALL, *range(1, 201))
    twin = pages.clone()
    pages.evict(90, 200)
    twin.rollback(110)
    assert pages.entries.tolist() == twin.entries.tolist() and pages.clean == len(pages) == 90


def test_a_list_is_clean_up_to_where_something_was_evicted_and_clean_again_when_rolled_back_there() -> None:
    pages = new_list(new_arena(), SMALL, *range(1, 201))
    pages.evict(80, 90)
    assert (pages.clean, len(pages)) == (80, 190)
    store(pages, [7])
    pages.evict(120, 125)
    assert (pages.clean, pages.clone().clean) == (80, 80)
    pages.rollback(100)
    assert (pages.clean, len(pages)) == (80, 86)
    pages.rollback(6)
    store(pages, [8] * 80)
    assert pages.clean == len(pages) == 160 and entries(pages) == [(0, 0, 64), (64, 0, 64), (128, 0, 64)]
    pages.check()


def test_writing_into_a_page_that_a_list_holds_twice_copies_it() -> None:
    arena = new_arena()
    pages = new_list(arena, SMALL, *range(1, 51))
    (page,) = pages.pages
    pages.evict(10, 20)
    store(pages, [77] * 30)
    assert pages.pages[0] == page != pages.pages[1] and arena.num_owners(page) == 1
    assert entries(pages) == [(0, 0, 10), (-10, 20, 64), (54, 0, 64)]
    assert stored(pages) == [*range(1, 11), *range(21, 51), *[77] * 30]
    pages.rollback(60)
    store(pages, [88] * 60)  # after slot 9 of the first page again, over what was evicted
    assert entries(pages) == [(0, 0, 64), (64, 0, 64)] and stored(pages) == [*range(1, 11), *[88] * 60]


ROPE = rope_table(10000 ** (-2 * torch.arange(8, dtype=torch.float64) / 16), 1024)
SPANS = [
    [(64, 128), (0, 64)],
    [(128, 192), (64, 128)],
    [(10, 20), (15, 40)],
    [(1, 200), (3, 5)],
    [(63, 65), (62, 64)],
    [(0, 299), (0, 1)],
    [(130, 140), (120, 250)],
]  # fmt: skip


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_the_next_token_attends_as_if_the_survivors_had_been_written_at_their_new_positions(
    spans: list[tuple[int, int]], window: int | None
) -> None:
    arena = Arena(4 << 20, 1 << 20)
    layout = arena.layout(1, 2, 16)
    k, v, q = (torch.randn(310, heads, 16) for heads in (2, 2, 4))

    def append(pages: PageList, tokens: list[int]) -> None:
        start = len(pages)
        pages.reserve(len(tokens))
        page, slot = pages.places(start, start + len(tokens))
        append_kv(k[tokens], v[tokens], arena.bytes, layout, 0, page, slot, slot, ROPE)
        pages.commit(len(tokens))

    def attended(pages: PageList, token: int) -> Tensor:
        append(pages, [token])
        rows, last = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([len(pages) - 1], dtype=torch.int32)
        table = pack_tables([pages], [0])
        query = q[token : token + 1]
        return paged_attention(query, arena.bytes, layout, 0, table, rows, last, ROPE, scale=0.25, window=window)

    pages, tokens = PageList(arena, layout), list(range(300))
    append(pages, tokens)
    for token, (start, stop) in enumerate(spans, 300):
        pages.evict(start, stop)
        del tokens[start:stop]
        fresh = PageList(arena, layout)
        append(fresh, tokens)
        y, expected = attended(pages, token), attended(fresh, token)
        assert (y - expected).abs().max() < 2e-6 < expected.abs().max()
        tokens.append(token)


# ---- trees -------------------------------------------------------------------------------------------


def test_accepted_nodes_become_the_next_tokens() -> None:
    arena = new_arena()
    pages = new_list(arena, CODES, *range(1, 61))
    twin = pages.clone()
    pages.reserve(6)
    with pages.scratch(70) as (page, slot):
        assert arena.num_pages_used == 5  # the shared one, its copy, one for the depth and two for the nodes
        write(pages, (page, slot), range(1000, 1070))
        path = [3, 69, 5, 64, 63]
        append_nodes([pages], [torch.stack((page[path], slot[path]), 1)])
        append_nodes([pages], [torch.empty(0, 2, dtype=torch.int32)])
    assert stored(pages) == [*range(1, 61), 1003, 1069, 1005, 1064, 1063] and stored(twin) == list(range(1, 61))
    assert (pages.reserved, pages.clean) == (1, 65)
    check_lists(arena, [pages, twin])
    with pages.scratch(1) as (page, slot), pytest.raises(AssertionError):
        append_nodes([pages], [torch.stack((page, slot), 1).repeat(2, 1)])


def test_nodes_of_several_lists_are_appended_at_once() -> None:
    arena = new_arena()
    lists = [new_list(arena, SMALL, *range(1, n + 1)) for n in (3, 63, 64)]
    with lists[0].scratch(9) as (page, slot):
        write(lists[0], (page, slot), range(1000, 1009))
        nodes = torch.stack((page, slot), 1)
        for pages in lists:
            pages.reserve(3)
        append_nodes(lists, [nodes[[0, 2]], nodes[[3, 4, 5]], nodes[[]]])
    assert [stored(pages)[-3:] for pages in lists] == [[3, 1000, 1002], [1003, 1004, 1005], [62, 63, 64]]
    assert [(len(pages), pages.clean, pages.reserved) for pages in lists] == [(5, 5, 1), (66, 66, 0), (64, 64, 3)]


def test_what_is_not_clean_stays_so() -> None:
    pages = new_list(new_arena(), SMALL, 1, 2, 3)
    pages.reserve(4)
    for is_clean, clean in ((False, 3), (True, 3)):
        pages.commit(1, is_clean)
        assert pages.clean == clean
    pages.rollback(2)
    with pages.scratch(1) as (page, slot):
        pages.reserve(1)
        append_nodes([pages], [torch.stack((page, slot), 1)], False)
    assert (len(pages), pages.clean) == (4, 3)
    with pytest.raises(Contaminated):
        pages.dump()


def test_what_was_reserved_goes_back() -> None:
    arena = new_arena()
    pages = new_list(arena, SMALL, *range(1, 61))
    twin = pages.clone()
    pages.reserve(200)
    for count, entries in ((300, 5), (133, 4), (132, 3), (5, 2), (4, 1), (0, 1)):
        pages.unreserve(count)
        assert (pages.reserved, len(pages.pages)) == (min(count, 200), entries)
        pages.check()
    assert arena.num_pages_used == 2 and stored(pages) == stored(twin) == list(range(1, 61))
    pages.free()
    pages.reserve(1)
    pages.unreserve()
    assert pages.pages == []
    check_lists(arena, [pages, twin])


def test_boundaries_of_states_that_may_come_to_be_kept() -> None:
    pages = new_list(new_arena(), SMALL, *range(1, 61))
    pages.reserve(6)
    assert pages.state_boundaries(66) == set()
    pages.keep = (1,)
    assert pages.state_boundaries(60) == set() and pages.state_boundaries(61) == {1}
    pages.arena.attach(pages.pages[0], 2, states_of(pages.arena))
    assert pages.state_boundaries(61) == pages.state_boundaries(66) == {1, 2}
    store(pages, [61, 62, 63, 64])
    assert pages.state_boundaries(66) == {1}


def test_scratch_is_zeroed_and_goes_back_whatever_happens() -> None:
    arena = new_arena()
    pages = new_list(arena, SMALL, 1, 2)
    with pytest.raises(ZeroDivisionError), pages.scratch(130) as (page, slot):
        assert len(page.unique()) == 3 and slot.tolist() == [i % 64 for i in range(130)]
        write(pages, (page, slot), [9] * 130)
        check_lists(arena, [pages], page.unique().tolist())
        raise ZeroDivisionError
    check_lists(arena, [pages])
    assert not bool(unowned(arena, [pages]).any())
    with pages.scratch(0) as (page, slot):
        assert page.tolist() == slot.tolist() == [] and page.dtype == torch.int32


# ---- tables ------------------------------------------------------------------------------------------


def test_tables_are_those_of_ordinary_block_tables() -> None:
    arena = new_arena()
    lists = [new_list(arena, SMALL, *[1] * length) for length in (130, 0, 64, 3)]
    counts = [1, 5, 64, 0]
    for pages, count in zip(lists, counts, strict=True):
        pages.reserve(count)
    lists[3].reserve(100)  # pages that this forward does not use
    table = pack_tables(lists, counts)
    ids = torch.zeros(4, 3, dtype=torch.int32)
    for row, pages in enumerate(lists):
        used = -(-(len(pages) + counts[row]) // 64)
        ids[row, :used] = torch.tensor(pages.pages[:used], dtype=torch.int32)
    expected = page_table(ids, torch.tensor([131, 5, 128, 3], dtype=torch.int32))
    for name in ("ids", "base", "span", "n"):
        ours, theirs = getattr(table, name), getattr(expected, name)
        assert ours.dtype == torch.int32 and torch.equal(ours, theirs), name


def test_tables_of_evicted_lists_end_where_the_tokens_do() -> None:
    arena = new_arena()
    one, two = (new_list(arena, SMALL, *[1] * 200) for _ in range(2))
    one.evict(10, 90)
    two.evict(0, 3)
    table = pack_tables([one, two, PageList(arena, one.layout)], [0, 0, 0])
    assert table.n.tolist() == [4, 4, 0]
    assert table.base.tolist() == [[0, -16, 48, 112], [-3, 61, 125, 189], [0] * 4]
    assert table.span.tolist() == [
        [10 << 8, 26 | 64 << 8, 64 << 8, 8 << 8],
        [3 | 64 << 8, 64 << 8, 64 << 8, 8 << 8],
        [0] * 4,
    ]


def test_the_rows_of_a_forward_stand_at_their_lists_next_places() -> None:
    arena = new_arena()
    lists = [new_list(arena, CODES, *[1] * length) for length in (130, 0, 64, 3, 200)]
    lists[4].evict(150, 180)
    counts = [1, 70, 64, 0, 100]
    for pages, count in zip(lists, counts, strict=True):
        pages.reserve(count)
    rows = pack_rows(lists, counts, pack_tables(lists, counts))
    spans = [(len(pages), len(pages) + count) for pages, count in zip(lists, counts, strict=True)]
    places = [pages.places(*span) for pages, span in zip(lists, spans, strict=True)]
    expected = (
        torch.cat([torch.arange(*span, dtype=torch.int32) for span in spans]),
        torch.cat([page for page, _ in places]),
        torch.cat([slot for _, slot in places]),
    )
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours.dtype == theirs.dtype == torch.int32 and torch.equal(ours, theirs)


# ---- the arena ---------------------------------------------------------------------------------------


def test_a_superblock_serves_another_geometry_once_its_last_page_is_free() -> None:
    arena = new_arena(2)  # one superblock beside the zeros
    small, large = arena.layout(*SMALL), arena.layout(*LARGE)
    assert (arena.num_free(small), arena.num_free(large)) == (4, 2)
    one, two = PageList(arena, small), PageList(arena, large)
    store(one, [1] * 65)
    assert (arena.num_free(small), arena.num_free(large)) == (2, 0)
    with pytest.raises(KVFull):
        two.reserve(1)
    one.rollback(1)
    with pytest.raises(KVFull):
        two.reserve(1)
    one.free()
    assert (arena.num_free(small), arena.num_free(large)) == (4, 2)
    store(two, [7] * 65)
    assert stored(two) == [7] * 65
    arena.check()


def test_pages_of_all_geometries_lie_apart() -> None:
    arena = new_arena(10)
    others = [(1, 1, 64, torch.bfloat16), (5, 1, 8, torch.float32)]
    lists = [PageList(arena, arena.layout(*shape)) for shape in (*GEOMETRIES, *others) for _ in range(2)]
    for value, pages in enumerate(lists, 1):
        store(pages, [value] * 70)
    assert [set(stored(pages)) for pages in lists] == [{value} for value in range(1, 13)]
    assert not bool(arena.bytes[:SUPERBLOCK].any())  # page 0 stays zero
    arena.check()


def test_checks_notice_what_is_wrong() -> None:
    arena = new_arena()
    pages = new_list(arena, SMALL, *range(1, 201))
    twin = pages.clone()
    with pytest.raises(AssertionError):
        check_lists(arena, [pages])
    with pytest.raises(AssertionError):
        check_lists(arena, [pages, twin], [4096])
    check_lists(arena, [pages, twin])
    for row, entry, wrong in (
        (0, 1, 0),
        (0, 1, pages.pages[0]),
        (1, 1, 63),
        (2, 1, 63 << 8),
        (2, 3, 8 << 8),
        (2, 0, 0),
    ):
        right, pages.entries[row, entry] = int(pages.entries[row, entry]), wrong
        with pytest.raises(AssertionError):
            pages.check()
        pages.entries[row, entry] = right
    pages.reserved = 10  # the last page has two owners
    with pytest.raises(AssertionError):
        pages.check()
    pages.rollback(0)
    twin.evict(70, 80)
    twin.clean = 190
    with pytest.raises(AssertionError):
        twin.check()
    arena.share(pages.pages)
    with pytest.raises(AssertionError):
        check_lists(arena, [pages, twin])
    arena.release(pages.layout, [arena.allocate(pages.layout, 1)[0]])
    arena.check()
    arena._beyond = 5  # of 6 superblocks one is of zeros and one in use
    with pytest.raises(AssertionError, match="more superblocks are in use than may be"):
        arena.check()
    arena._beyond = 0
    arena._owners[pages.pages[0]] = 0
    with pytest.raises(AssertionError, match="owned pages"):
        arena.check()


def test_a_budget_too_small_for_pages_is_refused_with_its_numbers() -> None:
    with pytest.raises(InvalidRequest, match="131,072 bytes holds 1 superblocks of 131,072"):
        new_arena(1)
    with pytest.raises(KVFull, match=r"takes 2,097,152 bytes, a superblock has 131,072.*at least 134,217,728"):
        new_arena().layout(32, 2, 64)


def test_the_budget_is_what_is_allocated_at_most() -> None:
    for num_bytes in (8 << 20, 100_000_000, 256 << 20):
        arena = Arena(num_bytes)
        assert num_bytes - arena.superblock_bytes < arena.nbytes <= num_bytes


def test_an_arena_grows_by_whole_superblocks_up_to_what_it_reserved_and_shrinks_back() -> None:
    arena = new_arena(3, 6)
    layout = arena.layout(*SMALL)
    pages = new_list(arena, SMALL, *[1] * 64 * 8)
    assert (arena.nbytes, arena.min_bytes, arena.max_bytes) == (3 * SUPERBLOCK, 3 * SUPERBLOCK, 6 * SUPERBLOCK)
    assert [arena.shortage(layout, count) for count in (0, 1, 4, 5)] == [0, SUPERBLOCK, SUPERBLOCK, 2 * SUPERBLOCK]
    with pytest.raises(KVFull, match="1 KV pages of 32,768 bytes wanted, 0 free; the KV budget is 393,216 bytes with"):
        pages.reserve(1)
    assert (arena.grow(0), arena.grow(1), arena.num_free(layout)) == (0, SUPERBLOCK, 4)
    assert [arena.shortage(layout, count) for count in (4, 5)] == [0, SUPERBLOCK]
    pages.reserve(64 * 4)
    with pytest.raises(KVFull, match="the KV budget is 524,288 bytes with 12 pages in use"):
        pages.reserve(64 * 5)
    assert arena.shrink(6 * SUPERBLOCK) == 0  # all in use
    assert arena.grow(SUPERBLOCK + 1) == 2 * SUPERBLOCK and arena.grow(1) == 0 and arena.nbytes == arena.max_bytes
    assert arena.shrink(SUPERBLOCK - 1) == 0 and arena.shrink(2 * SUPERBLOCK - 1) == SUPERBLOCK
    assert arena.num_free(layout) == 4 and arena.shortage(layout, 100) == 24 * SUPERBLOCK  # more than there ever are
    pages.free()
    assert arena.shrink(6 * SUPERBLOCK) == 2 * SUPERBLOCK and arena.nbytes == arena.min_bytes
    assert arena.num_free(layout) == 8
    arena.check()


def test_a_reclaimer_may_grow_the_arena() -> None:
    arena = new_arena(2, 6)
    arena.reclaimers.append(lambda layout, count: arena.grow(arena.shortage(layout, count)) and None)
    pages = new_list(arena, SMALL, *range(1, 600))
    assert arena.nbytes == 4 * SUPERBLOCK and stored(pages) == list(range(1, 600))
    with arena.spare_only(), pytest.raises(KVFull):
        pages.reserve(64 * 3)
    with pytest.raises(KVFull, match="11 KV pages of 32,768 bytes wanted, 10 free; the KV budget is 786,432 bytes"):
        pages.reserve(64 * 11)
    arena.check()


def test_a_list_goes_on_in_what_an_arena_has_grown_by_with_the_same_bits() -> None:
    def attended(arena: Arena, pages: PageList, count: int) -> Tensor:
        layout, start = pages.layout, len(pages)
        k, v, q = (torch.randn(count, heads, 16) for heads in (2, 2, 4))
        pages.reserve(count)
        page, slot = pages.places(start, start + count)
        append_kv(k, v, arena.bytes, layout, 0, page, slot, slot, ROPE)
        pages.commit(count)
        rows, position = torch.tensor([0, count], dtype=torch.int32), torch.arange(start, start + count).int()
        table = pack_tables([pages], [0])
        return paged_attention(q, arena.bytes, layout, 0, table, rows, position, ROPE, scale=0.25)

    outputs = []
    for arena in (new_arena(2, 8), new_arena(8)):  # a superblock of pages, which is 8 here, and then more
        torch.manual_seed(0)
        pages = PageList(arena, arena.layout(1, 2, 16))
        outputs.append([attended(arena, pages, 450), attended(arena, pages, 1)])
        arena.grow(SUPERBLOCK)
        outputs[-1] += [attended(arena, pages, count) for count in (200, 1, 64)] + [pages.dump()]
    assert len(pages) == 716 > 8 * 64 and all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_what_an_arena_shrinks_by_goes_back_to_the_system_and_reads_as_zeros() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    arena = Arena(16 << 20, 4 << 20, max_bytes=1 << 30)
    assert resident() - before < 16 << 20  # what is reserved takes nothing
    kept, one = new_list(arena, SMALL, *range(1, 100)), new_list(arena, TALL)
    arena.grow(128 << 20)
    one.reserve(64 * arena.num_free(one.layout))
    one.free()
    assert resident() - before > 128 << 20  # zeroed and free, and still there
    blocks = arena.bytes.view(-1, 4 << 20)
    assert blocks.any(1).nonzero().tolist() == [[1]]
    blocks[2:36] = 1  # to show how many of the free ones go
    full = resident()
    assert arena.shrink(1 << 30) == 128 << 20
    assert full - resident() > 120 << 20 and stored(kept) == list(range(1, 100))
    assert int(blocks.any(1).sum()) == 3  # one in use, and two that may be
    one.reserve(64 * arena.num_free(one.layout))  # what is still there is used first
    used = {page * 4096 // (4 << 20) for page in kept.pages + one.pages}
    assert len(used) == 3 and blocks.any(1).nonzero().flatten().tolist() == sorted(used)
    arena.grow(128 << 20)
    assert full - resident() > 120 << 20


def test_bytes_that_cannot_be_reserved_or_moved_are_refused_with_their_numbers() -> None:
    with pytest.raises(
        InvalidRequest, match=r"max_bytes of 131,072 for a kv_budget of 786,432 bytes .* at least as many"
    ):
        new_arena(6, 1)
    with pytest.raises(InvalidRequest, match=r"max_bytes of 917,504 .* 786,432 bytes on cuda, expected as many"):
        Arena(6 * SUPERBLOCK, SUPERBLOCK, "cuda", 7 * SUPERBLOCK)
    with pytest.raises(InvalidRequest, match=f"{1 << 62:,} bytes of KV pages cannot be reserved"):
        Arena(1 << 62)
    arena = new_arena(2, 4)
    before = state(arena, [])
    for verb in (arena.grow, arena.shrink):
        with pytest.raises(
            InvalidRequest, match=rf"{verb.__name__}\(-1\): the arena has 262,144 bytes, expected 0 or more"
        ):
            verb(-1)
    assert state(arena, []) == before


def test_a_layout_fills_its_superblock() -> None:
    layout = new_arena().layout(*SMALL)
    assert layout == KVLayout(2, 1, 32, torch.float32, 4)
    assert layout.page_bytes * layout.pages_per_superblock == SUPERBLOCK
