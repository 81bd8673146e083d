"""Pages and their owners: a state machine over one arena with lists of three geometries, and the rules one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from csrc_triton.attention import page_table, paged_attention
from csrc_triton.fused import rope_table
from csrc_triton.pages import KVLayout, append_kv
from polymodel.errors import InvalidRequest, KVFull
from polymodel.kv import Arena, PageList, check_lists, pack_rows, pack_tables

SUPERBLOCK = 128 << 10
# layers, kv heads, head dim, dtype: 4, 2 and 8 pages a superblock
SMALL, LARGE, CODES = (2, 1, 32, torch.float32), (3, 2, 16, torch.float32), (2, 3, 16, torch.int8)
GEOMETRIES = (SMALL, LARGE, CODES)


def new_arena(superblocks: int = 6) -> Arena:
    return Arena(superblocks * SUPERBLOCK, SUPERBLOCK)


def new_list(arena: Arena, geometry: tuple[int, int, int, torch.dtype], *values: int) -> PageList:
    pages = PageList(arena, arena.layout(*geometry))
    store(pages, values)
    return pages


def write(pages: PageList, places: tuple[Tensor, Tensor], values: Sequence[int]) -> None:
    """Every number of a token's keys and values in every layer is its value; or its scale is, and the codes follow."""
    numbers, layout = torch.tensor(values, dtype=torch.float32)[:, None, None], pages.layout
    for layer in range(layout.num_layers):
        codes = layout.view(pages.arena.bytes, layer)
        if layout.scaled:
            layout.scales(pages.arena.bytes, layer)[places[0], :, :, places[1]] = numbers
        codes[places[0], :, :, places[1]] = coded(numbers[..., None], layout).to(layout.dtype)


def coded(numbers: Tensor, layout: KVLayout) -> Tensor:
    return numbers % 100 + 1 if layout.scaled else numbers


def store(pages: PageList, values: Sequence[int]) -> None:
    """Append tokens as a forward does."""
    pages.reserve(len(values))
    write(pages, pages.places(len(pages), len(pages) + len(values)), values)
    pages.commit(len(values))


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
    """The arena with the pages of these lists blanked out."""
    rest = arena.bytes.clone()
    for pages in lists:
        blocks = pages.layout.blocks(rest)
        for page in pages.pages:
            blocks[page].zero_()
    return rest


def state(arena: Arena, lists: Sequence[PageList]) -> object:
    """All that a refused call must leave as it was, bytes included."""
    entries = [(pages.entries.tolist(), len(pages), pages.clean, pages.reserved) for pages in lists]
    owners = {page: arena.num_owners(page) for pages in lists for page in pages.pages}
    free = [arena.num_free(arena.layout(*geometry)) for geometry in GEOMETRIES]
    return entries, owners, free, arena.num_pages_used, arena.bytes.numpy().tobytes()


COUNT = st.one_of(st.integers(1, 5), st.integers(0, 200))


class Pages(RuleBasedStateMachine):
    """Up to six lists of three geometries; each is compared with a plain list of what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = new_arena()
        self.lists: list[tuple[PageList, list[int]]] = []
        self.clean: dict[PageList, int] = {}
        self.next_value = 1

    def pick(self, index: int) -> tuple[PageList, list[int]]:
        return self.lists[index % len(self.lists)]

    def new_values(self, count: int) -> list[int]:
        self.next_value += count
        return list(range(self.next_value - count, self.next_value))

    def state(self) -> object:
        return state(self.arena, [pages for pages, _ in self.lists])

    def try_or_unchanged(self, act: Callable[[], None]) -> bool:
        before = self.state()
        try:
            act()
        except KVFull:
            assert self.state() == before
            return False
        return True

    def extend(self, pages: PageList, values: list[int], new: list[int]) -> None:
        if self.clean[pages] == len(values):
            self.clean[pages] += len(new)
        values += new

    @precondition(lambda self: len(self.lists) < 6)
    @rule(kind=st.integers(0, 2))
    def create(self, kind: int) -> None:
        pages = PageList(self.arena, self.arena.layout(*GEOMETRIES[kind]))
        self.lists.append((pages, []))
        self.clean[pages] = 0

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
                check_lists(self.arena, [pages for pages, _ in self.lists], page.unique().tolist())
                pages.commit_path(torch.stack((page[path], slot[path]), 1))

        if not self.try_or_unchanged(lambda: pages.reserve(len(path))):
            return
        if self.try_or_unchanged(round_trip):
            self.extend(pages, values, [drafted[node] for node in path])
        if not path:
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
        self.lists.append((twin, list(values)))
        self.clean[twin] = self.clean[pages]
        assert self.arena.num_pages_used == used

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
        check_lists(self.arena, [pages for pages, _ in self.lists])
        for pages, values in self.lists:
            pages.check()
            assert len(pages) == len(values) and stored(pages) == values and pages.clean == self.clean[pages]
        assert not bool(unowned(self.arena, [pages for pages, _ in self.lists]).any())

    def teardown(self) -> None:
        for pages, _ in self.lists:
            pages.free()
        self.arena.check()
        assert self.arena.num_pages_used == 0 and not bool(self.arena.bytes.any())
        assert [self.arena.num_free(self.arena.layout(*geometry)) for geometry in GEOMETRIES] == [20, 10, 40]


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestPagesAtLength(Pages.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=400, stateful_step_count=50, deadline=None)


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
        pages.commit_path(torch.stack((page[path], slot[path]), 1))
        pages.commit_path(torch.empty(0, 2, dtype=torch.int32))
    assert stored(pages) == [*range(1, 61), 1003, 1069, 1005, 1064, 1063] and stored(twin) == list(range(1, 61))
    assert (pages.reserved, pages.clean) == (1, 65)
    check_lists(arena, [pages, twin])
    with pages.scratch(1) as (page, slot), pytest.raises(AssertionError):
        pages.commit_path(torch.stack((page, slot), 1).repeat(2, 1))


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
    assert [set(stored(pages)) for pages in lists] == [{value} for value in range(1, 11)]
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
    del arena._owners[pages.pages[0]]
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


def test_a_layout_fills_its_superblock() -> None:
    layout = new_arena().layout(*SMALL)
    assert layout == KVLayout(2, 1, 32, torch.float32, 4)
    assert layout.page_bytes * layout.pages_per_superblock == SUPERBLOCK
