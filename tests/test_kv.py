"""Pages and their owners: a state machine over one arena with lists of two geometries, and the rules one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from csrc_triton.attention import page_table
from csrc_triton.pages import KVLayout
from polymodel.errors import InvalidRequest, KVFull
from polymodel.kv import Arena, PageList, pack_tables

SUPERBLOCK = 128 << 10
SMALL, LARGE = (2, 1, 32), (3, 2, 16)  # layers, kv heads, head dim: 4 and 2 pages a superblock


def new_arena(superblocks: int = 6) -> Arena:
    return Arena(superblocks * SUPERBLOCK, SUPERBLOCK)


def store(pages: PageList, values: list[int]) -> None:
    """Write tokens as a forward does; every number of a token's keys and values in every layer is its value."""
    start = len(pages)
    pages.reserve(len(values))
    for layer in range(pages.layout.num_layers):
        view = pages.layout.view(pages.arena.bytes, layer)
        for at, value in enumerate(values, start):
            view[pages.pages[at // 64], :, :, at % 64] = float(value)
    pages.commit(len(values))


def stored(pages: PageList) -> list[int]:
    """The values read back; every layer, head and dim must say the same."""
    if not len(pages):
        return []
    layers = [pages.layout.view(pages.arena.bytes, i)[pages.pages] for i in range(pages.layout.num_layers)]
    tokens = torch.cat([t.permute(0, 3, 1, 2, 4).reshape(len(pages.pages) * 64, -1) for t in layers], 1)[: len(pages)]
    assert bool((tokens == tokens[:, :1]).all())
    return [int(value) for value in tokens[:, 0]]


def unowned(arena: Arena, lists: list[PageList]) -> Tensor:
    """The arena with the pages of these lists blanked out."""
    rest = arena.bytes.clone()
    for pages in lists:
        blocks = pages.layout.blocks(rest)
        for page in pages.pages:
            blocks[page].zero_()
    return rest


class Pages(RuleBasedStateMachine):
    """Up to six lists of two geometries; each is compared with a plain list of what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = new_arena()
        self.layouts = [self.arena.layout(*SMALL), self.arena.layout(*LARGE)]
        self.lists: list[tuple[PageList, list[int]]] = []
        self.next_value = 1

    def pick(self, index: int) -> tuple[PageList, list[int]]:
        return self.lists[index % len(self.lists)]

    @precondition(lambda self: len(self.lists) < 6)
    @rule(kind=st.integers(0, 1))
    def create(self, kind: int) -> None:
        self.lists.append((PageList(self.arena, self.layouts[kind]), []))

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), count=st.one_of(st.integers(1, 5), st.integers(0, 200)))
    def append(self, index: int, count: int) -> None:
        pages, values = self.pick(index)
        new = list(range(self.next_value, self.next_value + count))
        before = self.snapshot(pages)
        try:
            store(pages, new)
        except KVFull:
            assert self.snapshot(pages) == before
            return
        values += new
        self.next_value += count

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), count=st.integers(0, 200))
    def reserve_only(self, index: int, count: int) -> None:
        """A forward that failed before its commit."""
        pages, _ = self.pick(index)
        before = self.snapshot(pages)
        try:
            pages.reserve(count)
        except KVFull:
            assert self.snapshot(pages) == before

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), count=st.one_of(st.integers(0, 5), st.integers(0, 300)))
    def rollback(self, index: int, count: int) -> None:
        pages, values = self.pick(index)
        if count > len(values):
            before = self.snapshot(pages)
            with pytest.raises(InvalidRequest, match=f"rollback\\({count}\\): the sequence has {len(values)} tokens"):
                pages.rollback(count)
            assert self.snapshot(pages) == before
            return
        pages.rollback(count)
        del values[len(values) - count :]
        assert len(pages.pages) == -(-len(values) // 64)

    @precondition(lambda self: 0 < len(self.lists) < 6)
    @rule(index=st.integers(0, 5))
    def clone(self, index: int) -> None:
        pages, values = self.pick(index)
        used = self.arena.num_pages_used
        self.lists.append((pages.clone(), list(values)))
        assert self.arena.num_pages_used == used

    @precondition(lambda self: self.lists)
    @rule(index=st.integers(0, 5), forget=st.booleans())
    def free(self, index: int, forget: bool) -> None:
        pages, values = self.pick(index)
        pages.free()
        values.clear()
        if forget:
            self.lists.pop(index % len(self.lists))

    def snapshot(self, pages: PageList) -> object:
        owners = {page: self.arena.num_owners(page) for other, _ in self.lists for page in other.pages}
        free = [self.arena.num_free(layout) for layout in self.layouts]
        return list(pages.pages), len(pages), owners, free, self.arena.num_pages_used

    @invariant()
    def everything_holds(self) -> None:
        self.arena.check()
        owners: dict[int, int] = {}
        for pages, values in self.lists:
            pages.check()
            assert len(pages) == len(values) and stored(pages) == values
            for page in pages.pages:
                owners[page] = owners.get(page, 0) + 1
        assert owners == {page: self.arena.num_owners(page) for page in owners}
        assert self.arena.num_pages_used == len(owners)
        assert not bool(unowned(self.arena, [pages for pages, _ in self.lists]).any())

    def teardown(self) -> None:
        for pages, _ in self.lists:
            pages.free()
        self.arena.check()
        assert self.arena.num_pages_used == 0 and not bool(self.arena.bytes.any())
        assert [self.arena.num_free(layout) for layout in self.layouts] == [20, 10]


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_the_next_write_into_a_shared_page_copies_it() -> None:
    arena = new_arena()
    one = PageList(arena, arena.layout(*SMALL))
    store(one, list(range(1, 101)))
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
    arena = new_arena()
    one = PageList(arena, arena.layout(*SMALL))
    store(one, list(range(1, 129)))
    two = one.clone()
    two.rollback(70)
    store(two, [777] * 10)
    assert stored(one) == list(range(1, 129))
    assert stored(two) == [*range(1, 59), *[777] * 10]


def test_a_whole_page_that_ends_at_its_boundary_is_not_copied() -> None:
    arena = new_arena()
    one = PageList(arena, arena.layout(*SMALL))
    store(one, [1] * 64)
    two = one.clone()
    store(two, [2])
    assert two.pages[0] == one.pages[0] and arena.num_pages_used == 2


def test_a_freed_page_is_zero_before_anyone_sees_it() -> None:
    arena = new_arena()
    one = PageList(arena, arena.layout(*LARGE))
    store(one, [5] * 130)
    assert bool(arena.bytes.any())
    one.rollback(100)
    assert bool(arena.bytes.any()) and not bool(unowned(arena, [one]).any())
    one.free()
    assert not bool(arena.bytes.any())


def test_full_changes_nothing_and_says_how_much_was_wanted() -> None:
    arena = new_arena(3)
    one, two = (PageList(arena, arena.layout(*SMALL)) for _ in range(2))
    store(one, [1] * (64 * 7))
    twin = one.clone()
    store(two, [2] * 64)
    before = arena.bytes.clone()
    with pytest.raises(KVFull, match=r"1 KV pages of 32,768 bytes wanted, 0 free.* 393,216 bytes with 8 pages in use"):
        two.reserve(1)
    twin.rollback(1)
    with pytest.raises(KVFull):
        twin.reserve(1)  # needs a copy of the shared last page
    assert (len(one), len(two), two.pages) == (448, 64, [two.pages[0]]) and twin.pages == one.pages
    assert torch.equal(arena.bytes, before)
    arena.check()
    two.free()
    twin.reserve(1)
    assert twin.pages[:-1] == one.pages[:-1] and twin.pages[-1] != one.pages[-1]


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
    arena = new_arena(8)
    lists = [PageList(arena, arena.layout(*shape)) for shape in (SMALL, LARGE, (1, 1, 64), (5, 1, 8)) for _ in range(2)]
    for value, pages in enumerate(lists, 1):
        store(pages, [value] * 70)
    assert [set(stored(pages)) for pages in lists] == [{value} for value in range(1, 9)]
    assert not bool(arena.bytes[:SUPERBLOCK].any())  # page 0 stays zero
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


def test_commit_asks_for_reserved_pages() -> None:
    arena = new_arena()
    pages = PageList(arena, arena.layout(*SMALL))
    with pytest.raises(AssertionError):
        pages.commit(1)
    pages.reserve(64)
    with pytest.raises(AssertionError):
        pages.commit(65)
    pages.commit(64)
    assert (len(pages), pages.nbytes) == (64, 32768)


def test_tables_are_those_of_ordinary_block_tables() -> None:
    arena = new_arena()
    layout = arena.layout(*SMALL)
    lists = [PageList(arena, layout) for _ in range(4)]
    for pages, length in zip(lists, (130, 0, 64, 3), strict=True):
        store(pages, [1] * length)
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


def test_a_layout_fills_its_superblock() -> None:
    layout = new_arena().layout(*SMALL)
    assert layout == KVLayout(2, 1, 32, torch.float32, 4)
    assert layout.page_bytes * layout.pages_per_superblock == SUPERBLOCK
