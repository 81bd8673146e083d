"""Cached prefixes: what is found, which pages answer, who goes first, and a state machine with real page lists."""

from __future__ import annotations

import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, takewhile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from csrc_triton.pages import ID_BYTES, KVLayout
from polymodel.config import EVICTIONS, PAGE_TOKENS, Eviction, KVKey
from polymodel.errors import InvalidRequest, KVFull
from polymodel.kv import Arena, PageList, check_lists
from polymodel.prefix import Lease, Match, PrefixCache, common_length

SUPERBLOCK = 32 << 10  # 8 pages of the geometry SMALL, 4 of WIDE
SMALL, WIDE = (1, 1, 2, torch.float32), (2, 1, 2, torch.float32)
PAGE_BYTES = 4096
KEY = KVKey("band", "tokenizer", "rope", "policy", "domain")
UNBOUNDED = 1 << 40


def new_cache(
    max_tokens: int | None = None, *, max_bytes: int = UNBOUNDED, policy: Eviction = "lru", superblocks: int = 64
) -> PrefixCache:
    arena = Arena(superblocks * SUPERBLOCK, SUPERBLOCK)
    return PrefixCache(arena, max_bytes=max_bytes, max_tokens=max_tokens, policy=policy)


def small(cache: PrefixCache) -> KVLayout:
    return cache.arena.layout(*SMALL)


def values(tokens: Sequence[int]) -> list[float]:
    """What the keys of these tokens hold: a number that depends on all tokens up to each."""
    digest, found = 0, []
    for token in tokens:
        digest = zlib.crc32(token.to_bytes(4, "little"), digest)
        found.append(float(digest % (1 << 24)))
    return found


def store(pages: PageList, tokens: Sequence[int]) -> None:
    """Go on with the last of these tokens, as a forward does."""
    start, stop = len(pages), len(tokens)
    pages.reserve(stop - start)
    page, slot = pages.places(start, stop)
    numbers = torch.tensor(values(tokens)[start:])[:, None, None, None]
    for layer in range(pages.layout.num_layers):
        pages.layout.view(pages.arena.bytes, layer)[page, :, :, slot] = numbers
    pages.commit(stop - start)


def stored(arena: Arena, layout: KVLayout, pages: Sequence[int], length: int) -> list[float]:
    """What canonical pages hold; every layer and number must say the same."""
    found: list[Tensor] = []
    for layer in range(layout.num_layers):
        slots = layout.view(arena.bytes, layer)[torch.tensor(pages, dtype=torch.int64)]  # [E, 2, Hkv, 64, D]
        found += slots.permute(1, 2, 4, 0, 3).reshape(-1, len(pages) * PAGE_TOKENS)[:, :length]
    assert all(torch.equal(row, found[0]) for row in found)
    return [float(x) for x in found[0]]


def begin(cache: PrefixCache, tokens: Sequence[int], keys: Sequence[KVKey] = (KEY,)) -> tuple[Match, PageList]:
    """Match, take the pages over and prefill the rest."""
    match = cache.match(keys, tokens)
    pages = PageList(cache.arena, small(cache))
    pages.splice(match.pages, match.length)
    store(pages, tokens)
    return match, pages


def enter(cache: PrefixCache, tokens: Sequence[int], key: KVKey = KEY, *, warm: bool = False) -> Lease:
    """Insert a sequence whose pages nobody else holds afterwards."""
    pages = PageList(cache.arena, small(cache))
    store(pages, tokens)
    lease = cache.insert(key, pages.layout, tokens, pages.pages, warm=warm)
    pages.free()
    return lease


def serve(cache: PrefixCache, tokens: Sequence[int], key: KVKey = KEY) -> int:
    """One request from start to end; tokens matched."""
    match, pages = begin(cache, tokens, [key])
    lease = cache.insert(key, pages.layout, tokens, pages.pages, match.lease)
    pages.free()
    cache.release(lease)
    return match.length


def found(cache: PrefixCache, tokens: Sequence[int], key: KVKey = KEY) -> int:
    return cache.peek([key], tokens).length


def run(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def paths(cache: PrefixCache) -> Iterator[tuple[KVKey, tuple[int, ...], Any]]:
    """Every node, with its key and all tokens from the root."""
    todo = [(key, (), child) for key, tree in cache._trees.items() for child in tree.children.values()]
    while todo:
        key, before, node = todo.pop()
        tokens = (*before, *node.edge)
        yield key, tokens, node
        todo += [(key, tokens, child) for child in node.children.values()]


def owners(arena: Arena) -> list[int]:
    return [arena.num_owners(page) for page in range(arena.nbytes // ID_BYTES)]


def state(cache: PrefixCache) -> object:
    """Everything there is to a cache, recency and owners included."""
    nodes = sorted((str(key), t, n.pages, n.since, n.hits, n.is_warm, n.leases) for key, t, n in paths(cache))
    return nodes, cache.stats, cache._clock, owners(cache.arena), cache.arena.bytes.numpy().tobytes()


# ---- what is found -----------------------------------------------------------------------------------


def test_a_match_ends_at_any_token() -> None:
    cache = new_cache()
    tokens = run(0, 150)
    enter(cache, tokens)
    enter(cache, [*tokens[:70], *run(500, 90)])
    for cut in range(151):
        match = cache.peek([KEY], [*tokens[:cut], 999])
        assert match.length == cut and len(match.pages) == -(-cut // PAGE_TOKENS)
        if cut:
            assert stored(cache.arena, small(cache), match.pages, cut) == values(tokens[:cut])
    assert cache.stats.splits == 1


def test_cutting_an_edge_within_a_page_leaves_the_page_to_the_lower_half() -> None:
    cache = new_cache()
    enter(cache, run(0, 200))
    page = cache.peek([KEY], run(0, 100)).pages[1]
    assert cache.arena.num_owners(page) == 1 and cache.nbytes == 4 * PAGE_BYTES
    enter(cache, [*run(0, 100), 999])
    assert cache.arena.num_owners(page) == 1 and cache.nbytes == 5 * PAGE_BYTES
    assert [cache.peek([KEY], run(0, n)).pages[1] for n in (80, 100, 200)] == [page] * 3
    enter(cache, [*run(0, 64), 999])  # at a page's end no page is cut
    assert cache.arena.num_owners(page) == 1 and cache.nbytes == 6 * PAGE_BYTES
    assert (cache.num_nodes, cache.num_tokens, cache.num_pages) == (5, 202, 6)
    cache.check()


def test_the_longest_match_of_several_keys_wins_and_the_first_on_a_tie() -> None:
    cache = new_cache()
    other = replace(KEY, domain="*")
    enter(cache, run(0, 30))
    enter(cache, run(0, 50), other)
    keys = [KEY, replace(KEY, domain="nobody"), other]
    assert [(m.length, m.key) for m in (cache.peek(keys, run(0, n)) for n in (20, 30, 31, 80))] == [
        *((20, KEY), (30, KEY), (31, other), (50, other))
    ]
    match = cache.match(keys, run(0, 80))
    assert (match.length, match.key, cache.stats.lookups, cache.stats.hits) == (50, other, 1, 1)


@pytest.mark.parametrize("field", ["band", "tokenizer", "rope", "policy", "domain"])
def test_keys_that_differ_in_any_field_never_match(field: str) -> None:
    cache = new_cache()
    enter(cache, run(0, 10))
    other = replace(KEY, **{field: "another"})
    assert found(cache, run(0, 10)) == 10
    assert found(cache, run(0, 10), other) == 0 == cache.match([other], run(0, 10)).length
    assert cache.forget(other, run(0, 10)) == 0
    assert list(cache._trees) == [KEY]


def test_peek_agrees_with_match_and_changes_nothing() -> None:
    cache = new_cache()
    enter(cache, run(0, 100))
    before = state(cache)
    peeked = cache.peek([KEY], run(0, 70))
    assert state(cache) == before and peeked.lease is None
    match = cache.match([KEY], run(0, 70))
    assert replace(match, lease=None) == peeked and match.length == 70 and match.lease is not None


def test_statistics_tell_no_shared_prefix_from_one_that_is_too_short() -> None:
    cache = new_cache()
    cache.min_match = 8
    enter(cache, run(0, 20))
    lengths = [cache.match([KEY], tokens).length for tokens in (run(100, 20), run(0, 7), run(0, 8), run(0, 30), [])]
    assert lengths == [0, 0, 8, 20, 0]
    stats = cache.stats
    assert (stats.lookups, stats.hits, stats.no_prefix, stats.too_short) == (5, 2, 2, 1)
    assert (stats.tokens_wanted, stats.tokens_matched) == (65, 28)
    assert stats.leases == 3  # the insert's, and one of each hit
    assert (stats.nodes, stats.leaves, stats.max_depth, stats.tokens, stats.pages) == (1, 1, 20, 20, 1)
    assert cache.peek([KEY], run(0, 7)) == Match(0, [], None, None)


def test_bad_arguments_are_refused_and_change_nothing() -> None:
    cache = new_cache()
    lease = enter(cache, run(0, 100))
    layout, wide = small(cache), cache.arena.layout(*WIDE)
    pages = cache.arena.allocate(layout, 2)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: cache.insert(KEY, layout, run(0, 129), pages, lease), "2 pages for 129 tokens, expected 3"),
        (lambda: cache.insert(KEY, layout, [], pages, lease), "2 pages for 0 tokens, expected 0"),
        (lambda: cache.insert(KEY, wide, run(0, 128), pages, lease), "num_layers=2.*expected this key's.*num_layers=1"),
        (lambda: cache.insert(KEY, layout, run(0, 128), [pages[0], 7], lease), r"nobody owns the pages \[7\]"),
        (lambda: cache.insert(KEY, layout, [1 << 31], pages[:1], lease), "integers below"),
        (lambda: cache.match([KEY], ["a"]), "integers below"),  # type: ignore[list-item]
        (lambda: cache.forget(KEY, [0.5]), "integers below"),  # type: ignore[list-item]
        (lambda: PrefixCache(cache.arena, max_bytes=0, policy="slru"), "'slru', expected one of lru, cost"),  # type: ignore[arg-type]
        (lambda: PrefixCache(cache.arena, max_bytes=0, min_match=0), "min_match is 0, expected at least 1"),
    ]
    before = state(cache)
    for call, message in calls:
        with pytest.raises(InvalidRequest, match=message):
            call()
        assert state(cache) == before
    cache.check()


def test_an_empty_sequence_leaves_no_tree() -> None:
    cache = new_cache()
    cache.release(cache.insert(KEY, small(cache), [], []))
    assert not cache._trees and cache.num_nodes == 0 == cache.forget(KEY, [])
    enter(cache, [1])
    assert cache.clear() == 1 and not cache._trees
    wide = cache.arena.layout(*WIDE)
    cache.insert(KEY, wide, [1], cache.arena.allocate(wide, 1))  # so the key may have another layout now
    assert cache.nbytes == 2 * PAGE_BYTES
    cache.check()


# ---- workloads ---------------------------------------------------------------------------------------


def few_shot() -> list[list[int]]:
    return [[*run(0, 256), *run(1000 * i + 1000, 16)] for i in range(16)]


def multi_turn() -> list[list[int]]:
    return [run(0, 64 + 32 * turn) for turn in range(8)]


def tree_of_thought() -> list[list[int]]:
    thirds = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    return [[*run(0, 64), *[100 + a] * 16, *[200 + b] * 16, *[300 + c] * 16] for a, b, c in thirds]


def agents() -> list[list[int]]:
    return [[*run(0, 128), *run(1000 * agent + 1000, 24 * turn)] for turn in range(1, 7) for agent in range(5)]


def rates(cache: PrefixCache) -> tuple[int, int, float, float]:
    """Tokens matched and wanted, percent, and how many times fewer were prefilled."""
    matched, wanted = cache.stats.tokens_matched, cache.stats.tokens_wanted
    return matched, wanted, round(100 * matched / wanted, 1), round(wanted / (wanted - matched), 2)


@pytest.mark.parametrize("policy", EVICTIONS)
@pytest.mark.parametrize(
    ("workload", "expected", "tokens"),
    [
        (few_shot, (3840, 4352, 88.2, 8.5), 512),
        (multi_turn, (1120, 1408, 79.5, 4.89), 288),
        (tree_of_thought, (2336, 3024, 77.2, 4.4), 688),
        (agents, (5512, 6360, 86.7, 7.5), 848),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_hit_rates_of_the_published_workloads(
    workload: Callable[[], list[list[int]]], expected: tuple[int, int, float, float], tokens: int, policy: Eviction
) -> None:
    cache = new_cache(policy=policy)
    for request in workload():
        serve(cache, request)
    assert rates(cache) == expected and cache.num_tokens == tokens
    cache.check()


@pytest.mark.parametrize(
    ("policy", "arrival", "expected"),
    [
        ("lru", list, (3952, 6360, 62.1, 2.64)),
        ("lru", sorted, (5512, 6360, 86.7, 7.5)),
        ("cost", list, (4264, 6360, 67.0, 3.03)),
        ("cost", sorted, (5512, 6360, 86.7, 7.5)),
    ],
)
def test_at_half_as_much_again_as_the_longest_request_order_decides(
    policy: Eviction, arrival: Callable[[list[list[int]]], list[list[int]]], expected: tuple[int, int, float, float]
) -> None:
    requests = agents()
    bound = max(map(len, requests)) * 3 // 2
    assert bound == 408
    cache = new_cache(bound, policy=policy)
    for request in arrival(requests):
        serve(cache, request)
        assert cache.num_tokens <= bound
    assert rates(cache) == expected


def test_few_shot_requests_cut_the_shared_part_off_once() -> None:
    cache = new_cache()
    assert [serve(cache, [*run(0, 64), *run(1000 * i + 1000, 8)]) for i in range(5)] == [0, 64, 64, 64, 64]
    assert (cache.stats.splits, cache.stats.tokens_matched, cache.num_tokens) == (1, 4 * 64, 64 + 5 * 8)


def test_turns_of_a_conversation_make_a_chain() -> None:
    cache = new_cache()
    assert [serve(cache, run(0, 10 * turn)) for turn in range(1, 6)] == [0, 10, 20, 30, 40]
    stats = cache.stats
    assert (stats.splits, stats.nodes, stats.leaves, stats.max_depth, stats.tokens) == (0, 5, 1, 50, 50)


def test_a_shared_preamble_is_in_memory_once() -> None:
    """608 occupied positions in 896 slots, where a copy of the prefix for each node would take 1376."""
    cache = new_cache()
    layout = small(cache)
    lists: list[PageList] = []
    copied = 128
    for i in range(6):
        tokens = [*run(0, 128), *run(1000 * i + 1000, 80)]
        match, pages = begin(cache, tokens)
        assert match.length == (128 if i else 0)
        before = cache.arena.bytes.clone()
        cache.release(cache.insert(KEY, layout, tokens, pages.pages, match.lease))
        assert cache.match([KEY], tokens).pages == pages.pages
        assert torch.equal(cache.arena.bytes, before)
        lists.append(pages)
        copied += len(tokens)
    assert (cache.stats.tokens_matched - 6 * 208, copied) == (640, 1376)
    assert (cache.num_tokens, cache.num_pages * PAGE_TOKENS, cache.nbytes) == (608, 896, 14 * PAGE_BYTES)
    assert cache.arena.num_pages_used == 14
    for pages in lists:
        pages.free()
    assert cache.arena.num_pages_used == 14 and cache.nbytes == 14 * layout.page_bytes
    assert cache.clear() == 608 and cache.arena.num_pages_used == 0 == cache.nbytes
    cache.arena.check()


# ---- boundary pages ----------------------------------------------------------------------------------


def assert_holds(cache: PrefixCache, tokens: Sequence[int], num_pages: int) -> list[int]:
    """All these tokens are cached, as they were stored, and so many pages are used in all; the tokens' pages."""
    match = cache.peek([KEY], tokens)
    assert match.length == len(tokens) and len(match.pages) == -(-len(tokens) // PAGE_TOKENS)
    assert stored(cache.arena, small(cache), match.pages, len(tokens)) == values(tokens)
    assert cache.num_pages == cache.arena.num_pages_used == num_pages
    assert cache.nbytes == cache.stats.nbytes == num_pages * PAGE_BYTES
    cache.check()
    cache.arena.check()
    return match.pages


@pytest.mark.parametrize("turn", [7, 40, 64, 100])
def test_a_conversation_takes_a_page_for_every_64_tokens_however_long_its_turns(turn: int) -> None:
    cache = new_cache()
    for length in range(turn, 401, turn):
        serve(cache, run(0, length))
        assert_holds(cache, run(0, length), -(-length // PAGE_TOKENS))
    for length in range(turn, 401 - turn, turn):
        assert_holds(cache, run(0, length), -(-(400 // turn * turn) // PAGE_TOKENS))
    for length in range(400 // turn * turn, 0, -turn):  # and as it is taken back
        assert_holds(cache, run(0, length), -(-length // PAGE_TOKENS))
        assert cache.forget(KEY, run(0, length)) == turn
    assert cache.arena.num_pages_used == 0


def test_the_first_child_answers_for_the_page_within_which_its_parent_ends() -> None:
    cache = new_cache()
    first, second, third = run(0, 40), run(0, 100), [*run(0, 40), *run(500, 10)]
    enter(cache, first)
    (own,) = assert_holds(cache, first, 1)
    enter(cache, second)  # its own first page, filled further
    (shared,) = assert_holds(cache, first, 2)
    assert shared != own and cache.arena.num_owners(own) == 0
    enter(cache, third)
    assert assert_holds(cache, first, 3) == [shared] == cache.peek([KEY], first[:9]).pages
    assert assert_holds(cache, second, 3)[0] == shared != assert_holds(cache, third, 3)[0]


def test_the_last_child_to_go_leaves_its_first_page_to_its_parent() -> None:
    cache = new_cache(160)
    serve(cache, run(0, 100))
    serve(cache, run(0, 150))
    first, second, _ = assert_holds(cache, run(0, 150), 3)
    lease = cache.match([KEY], run(0, 100)).lease
    serve(cache, run(500, 60))
    assert (cache.stats.evictions, found(cache, run(0, 150))) == (1, 100)
    assert assert_holds(cache, run(0, 100), 3) == [first, second]
    assert [cache.arena.num_owners(page) for page in (first, second)] == [1, 1]
    assert lease is not None
    cache.release(lease)
    assert serve(cache, run(0, 130)) == 100  # a new child, whose page takes its place
    assert assert_holds(cache, run(0, 130), 3)[1] != second and cache.arena.num_owners(second) == 0


@pytest.mark.parametrize("order", [*permutations(range(3))])
@pytest.mark.parametrize(("stop", "pages"), [(40, [3, 2, 1]), (63, [6, 4, 2]), (64, [4, 3, 2]), (100, [4, 3, 2])])
def test_children_may_go_in_any_order(stop: int, pages: list[int], order: tuple[int, ...]) -> None:
    """Each has its first page, that its parent needs, and one more if it crosses into it."""
    cache = new_cache()
    children = [[*run(0, stop), *run(1000 * i + 1000, 20)] for i in range(3)]
    serve(cache, run(0, stop))
    for tokens in children:
        serve(cache, tokens)
    for i, used in zip(order, pages, strict=True):
        for j in order[order.index(i) :]:
            assert_holds(cache, children[j], used)
        assert_holds(cache, run(0, stop), used)
        assert cache.forget(KEY, children[i]) == 20
    assert_holds(cache, run(0, stop), -(-stop // PAGE_TOKENS))
    assert cache.forget(KEY, run(0, 1)) == stop and cache.arena.num_pages_used == 0


@pytest.mark.parametrize("newcomer_first", [False, True])
@pytest.mark.parametrize("at", [1, 63, 64, 65, 100, 127, 129])
def test_what_is_above_a_cut_is_whole_whichever_half_or_newcomer_goes(at: int, newcomer_first: bool) -> None:
    cache = new_cache()
    serve(cache, run(0, 130))
    old = assert_holds(cache, run(0, 130), 3)
    serve(cache, [*run(0, at), 999])
    upper = -(-at // PAGE_TOKENS)
    assert assert_holds(cache, run(0, at), 4) == old[:upper]
    new = assert_holds(cache, [*run(0, at), 999], 4)
    if newcomer_first:
        assert cache.forget(KEY, [*run(0, at), 999]) == 1
        assert_holds(cache, run(0, 130), 3)
        assert cache.forget(KEY, run(0, at + 1)) == 130 - at
        assert assert_holds(cache, run(0, at), upper) == old[:upper]
    else:
        assert cache.forget(KEY, run(0, at + 1)) == 130 - at
        assert_holds(cache, [*run(0, at), 999], at // PAGE_TOKENS + 1)
        assert cache.forget(KEY, [*run(0, at), 999]) == 1
        assert assert_holds(cache, run(0, at), upper) == new[:upper]


def test_a_branch_that_goes_leaves_a_page_of_any_depth_to_what_is_above() -> None:
    """Nodes that end within the page in which they start have none, so it is a leaf's further down."""
    cache = new_cache()
    for length in (10, 20, 30):
        serve(cache, run(0, length))
    serve(cache, [*run(0, 30), 999])
    serve(cache, run(0, 90))
    assert [len(node.pages) for _, _, node in sorted(paths(cache), key=lambda path: path[1])] == [0, 0, 0, 2, 1]
    (page,) = assert_holds(cache, run(0, 30), 3)
    assert cache.forget(KEY, run(0, 20)) == 10 + 10 + 1 + 60
    assert assert_holds(cache, run(0, 10), 1) == [page]
    serve(cache, run(0, 90))
    assert cache.forget(KEY, run(0, 10)) == 90 and cache.arena.num_pages_used == 0
    cache.check()


def test_a_page_may_go_from_a_parent_to_its_child_and_back() -> None:
    """One that is entered again with more in it, and that the cache alone owns."""
    cache = new_cache()
    layout = small(cache)
    pages = cache.arena.allocate(layout, 1)
    lease = cache.insert(KEY, layout, run(0, 10), pages)
    cache.arena.release(layout, pages)
    for length in (20, 30):
        cache.insert(KEY, layout, run(0, length), pages, lease)
        assert (cache.arena.num_owners(pages[0]), cache.nbytes) == (1, PAGE_BYTES)
    for length in (30, 20):
        assert cache.forget(KEY, run(0, length)) == 10
        assert (cache.arena.num_owners(pages[0]), cache.nbytes) == (1, PAGE_BYTES)
        cache.check()
    assert cache.forget(KEY, run(0, 10)) == 10 and cache.arena.num_pages_used == 0 == cache.nbytes


def test_whoever_hears_that_a_boundary_page_gave_up_its_states_sees_the_bytes_that_are_told() -> None:
    """The arena says so in the middle of a call, after which the bytes may be what they were and nothing is told."""
    cache = new_cache(max_bytes=2 * PAGE_BYTES)
    states = cache.arena.state_layout(4, torch.float32)
    for tokens in (run(0, 40), run(500, 40)):
        serve(cache, tokens)
        cache.arena.attach(*cache.peek([KEY], tokens).pages, 1, states)
    seen: list[int] = []
    cache.on_change = cache.arena.on_states = lambda: seen.append(cache.nbytes)
    enter(cache, run(0, 50))  # in place of a page that had states
    assert cache.arena.state_bytes == states.page_bytes and seen == [2 * PAGE_BYTES]
    enter(cache, run(700, 40))  # the other one that had some is evicted for it
    assert cache.arena.state_bytes == 0 and seen == [2 * PAGE_BYTES] * 2
    assert (found(cache, run(500, 40)), cache.nbytes) == (0, 2 * PAGE_BYTES)
    cache.check()


# ---- merging -----------------------------------------------------------------------------------------


def test_two_requests_in_flight_with_one_suffix_are_merged() -> None:
    """Both looked up before either inserted: nothing is orphaned, and the second's pages are not held."""
    cache = new_cache()
    serve(cache, run(0, 70))
    tokens = run(0, 200)
    (one, first), (two, second) = begin(cache, tokens), begin(cache, tokens)
    assert one.length == two.length == 70
    leases = [cache.insert(KEY, first.layout, tokens, first.pages, one.lease)]
    kept = cache.nbytes
    leases.append(cache.insert(KEY, second.layout, tokens, second.pages, two.lease))
    assert (cache.num_tokens, cache.num_nodes, cache.nbytes) == (200, 2, kept)
    assert cache.peek([KEY], tokens).pages == first.pages
    assert [cache.arena.num_owners(page) for page in second.pages[1:]] == [1, 1, 1]
    assert cache.stats.leases == 2
    for lease in leases:
        cache.release(lease)
    assert cache.stats.leases == 0
    second.free()
    cache.check()
    assert cache.clear() == 200


def test_two_requests_in_flight_that_part_later_share_what_they_have_in_common() -> None:
    cache = new_cache()
    left, right = [*run(0, 90), *run(500, 20)], [*run(0, 90), *run(700, 20)]
    (one, first), (two, second) = begin(cache, left), begin(cache, right)
    cache.insert(KEY, first.layout, left, first.pages, one.lease)
    cache.insert(KEY, second.layout, right, second.pages, two.lease)
    assert (cache.num_tokens, cache.num_nodes, cache.stats.splits) == (130, 3, 1)
    for tokens in (left, right):
        assert stored(cache.arena, small(cache), cache.peek([KEY], tokens).pages, 110) == values(tokens)
    cache.check()


def test_inserting_what_is_there_moves_the_lease_and_nothing_else() -> None:
    cache = new_cache()
    lease = enter(cache, run(0, 100))
    assert enter(cache, run(0, 40)) is not lease
    assert (cache.num_nodes, cache.num_tokens, cache.nbytes, cache.stats.leases) == (1, 100, 2 * PAGE_BYTES, 2)
    pages = cache.arena.allocate(small(cache), 1)
    assert cache.insert(KEY, small(cache), run(500, 9), pages, lease) is lease
    assert [node.leases for _, _, node in sorted(paths(cache), key=lambda path: path[1])] == [1, 1]


# ---- eviction ----------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first() -> None:
    cache = new_cache(20)
    for start in (100, 200, 300):
        serve(cache, run(start, 10))
    assert [found(cache, run(start, 10)) for start in (100, 200, 300)] == [0, 10, 10]
    serve(cache, run(200, 10))
    serve(cache, run(400, 10))
    assert [found(cache, run(start, 10)) for start in (200, 300, 400)] == [10, 0, 10]
    assert (cache.stats.evictions, cache.num_tokens) == (2, 20)


def test_what_is_leased_stays_until_its_lease_ends() -> None:
    cache = new_cache(20)
    first, second = enter(cache, run(100, 10)), enter(cache, run(200, 10))
    cache.release(second)
    third = enter(cache, run(300, 10))
    assert [found(cache, run(start, 10)) for start in (100, 200, 300)] == [10, 0, 10]
    fourth = enter(cache, run(400, 10))
    assert cache.num_tokens == 30  # nothing may go
    cache.release(third)
    assert [found(cache, run(start, 10)) for start in (100, 300, 400)] == [10, 0, 10]
    assert cache.num_tokens == 20
    cache.release(first)
    cache.release(fourth)
    cache.check()


def test_a_lease_within_an_edge_keeps_the_pages_that_were_matched() -> None:
    cache = new_cache(100)
    serve(cache, run(0, 100))
    match = cache.match([KEY], run(0, 30))
    enter(cache, run(500, 90))
    assert found(cache, run(0, 100)) == 100
    assert match.lease is not None
    cache.release(match.lease)
    assert found(cache, run(0, 100)) == 0


def test_eviction_goes_up_a_branch_whose_leaves_are_gone() -> None:
    cache = new_cache(14)
    serve(cache, [*run(0, 8), *run(100, 3)])
    serve(cache, [*run(0, 8), *run(200, 3)])
    assert (cache.num_tokens, cache.num_nodes) == (14, 3)
    serve(cache, run(300, 14))
    assert (cache.num_tokens, cache.num_nodes, cache.stats.evictions) == (14, 1, 3)
    assert [found(cache, tokens) for tokens in (run(0, 8), run(300, 14))] == [0, 14]


def test_by_cost_what_is_used_often_outlives_what_is_recent() -> None:
    def survivors(policy: Eviction) -> list[int]:
        cache = new_cache(128, policy=policy)
        for tokens in (run(0, 64), run(0, 64), run(0, 64), run(100, 64), run(200, 64)):
            serve(cache, tokens)
        return [found(cache, run(start, 64)) for start in (0, 100, 200)]

    assert survivors("lru") == [0, 64, 64]
    assert survivors("cost") == [64, 0, 64]


def test_by_cost_few_tokens_in_a_page_go_before_many_and_old_favourites_age() -> None:
    cache = new_cache(max_bytes=2 * PAGE_BYTES, policy="cost")
    for tokens in (run(0, 64), run(100, 8)):
        serve(cache, tokens)
    serve(cache, run(200, 32))  # the 8 tokens are the cheapest to compute again
    assert [found(cache, run(start, 64)) for start in (0, 100, 200)] == [64, 0, 32]
    serve(cache, run(0, 64))
    for start in range(300, 900, 100):  # each victim raises the clock by what it was worth
        serve(cache, run(start, 64))
    assert found(cache, run(0, 64)) == 0
    assert cache.stats.evictions == 8 - cache.num_nodes + 1


@pytest.mark.parametrize("policy", EVICTIONS)
def test_many_sessions_stay_within_their_tokens(policy: Eviction) -> None:
    """And a victim is found without a search: nodes are looked at a few times each, however many there are."""

    class Counted(PrefixCache):
        looks = 0

        def _score(self, node: Any) -> float:
            self.looks += 1
            return super()._score(node)

    arena = Arena(16 * SUPERBLOCK, SUPERBLOCK)
    cache = Counted(arena, max_bytes=UNBOUNDED, max_tokens=256, policy=policy)
    pages = arena.allocate(small(cache), 1)
    for i in range(5000):
        tokens = [i % 3, i % 50, *[1000 + i] * (i % 13)]
        match = cache.match([KEY], tokens)
        cache.release(cache.insert(KEY, small(cache), tokens, pages, match.lease))
        assert cache.num_tokens <= 256 and cache.num_pages <= 1
    edges = sum(len(node.edge) for _, _, node in paths(cache))
    assert cache.num_tokens == edges <= 256 and cache.stats.leases == 0
    assert cache.stats.evictions > 2000 and cache.looks < 5 * 5000
    cache.check()


def test_the_bytes_counted_are_those_that_eviction_gives_back() -> None:
    """A chain of 20 turns in 7 pages; evicting 11 of them leaves the 3 that 180 tokens need, and the newcomer's."""
    cache = new_cache()
    for turn in range(1, 21):
        serve(cache, run(0, 20 * turn))
        assert cache.nbytes == cache.arena.num_pages_used * PAGE_BYTES
    assert (cache.num_tokens, cache.num_pages) == (400, 7)
    free = cache.arena.num_free(small(cache))
    cache.max_bytes = 4 * PAGE_BYTES
    serve(cache, [999])
    assert (cache.stats.evictions, found(cache, run(0, 400))) == (11, 180)
    assert cache.nbytes == 4 * PAGE_BYTES == cache.arena.num_pages_used * PAGE_BYTES
    assert cache.arena.num_free(small(cache)) == free + 3
    cache.check()


@pytest.mark.parametrize("policy", EVICTIONS)
def test_both_halves_of_a_cut_edge_keep_their_uses_and_go_in_their_turn(policy: Eviction) -> None:
    cache = new_cache(policy=policy)
    for _ in range(3):
        serve(cache, run(0, 64))
    cache.release(enter(cache, [*run(0, 32), 999]))  # without a lookup
    assert sorted((len(tokens), node.hits) for _, tokens, node in paths(cache)) == [(32, 2), (33, 0), (64, 2)]
    cache.check()
    cache.max_tokens = 33
    serve(cache, [500])
    assert (cache.num_tokens, cache.num_nodes, cache.stats.evictions) == (33, 2, 2)


def test_a_prefix_used_again_and_again_leaves_no_trail() -> None:
    cache = new_cache()
    for _ in range(200):
        serve(cache, run(0, 10))
    assert len(cache._heap) <= 2 + 64
    cache.check()


def test_no_room_at_all_keeps_nothing_but_what_is_leased() -> None:
    cache = new_cache(max_bytes=0)
    lease = enter(cache, run(0, 100))
    assert cache.nbytes == 2 * PAGE_BYTES
    cache.release(lease)
    assert cache.nbytes == 0 == cache.arena.num_pages_used


def test_reclaim_evicts_the_coldest_until_enough_is_free() -> None:
    cache = new_cache(superblocks=3)
    layout, wide = small(cache), cache.arena.layout(*WIDE)
    for start in range(0, 1600, 100):
        serve(cache, run(start, 64))
    assert cache.arena.num_free(layout) == 0
    cache.reclaim(layout, 3)
    assert cache.arena.num_free(layout) == 3 and cache.stats.evictions == 3
    assert [found(cache, run(start, 64)) for start in range(0, 500, 100)] == [0, 0, 0, 64, 64]
    cache.reclaim(layout, 3)
    assert cache.stats.evictions == 3
    cache.arena.reclaimers.append(cache.reclaim)
    cache.arena.release(layout, cache.arena.allocate(layout, 5))  # whoever lacks pages asks for them
    assert cache.stats.evictions == 5
    lease = cache.match([KEY], run(1500, 64)).lease
    cache.reclaim(wide, 100)  # another geometry needs whole superblocks; what is leased stays
    assert (cache.num_nodes, cache.arena.num_free(wide)) == (1, 4)
    assert lease is not None
    cache.check()


def test_what_was_prefetched_goes_first_until_it_is_used() -> None:
    cache = new_cache(30)
    serve(cache, run(100, 10))
    lease = enter(cache, run(200, 10), warm=True)
    enter(cache, run(300, 10), warm=True)
    cache.release(lease)
    assert (cache.stats.leases, cache.stats.warm_tokens, cache.num_tokens) == (0, 20, 30)
    assert serve(cache, run(300, 10)) == 10
    assert cache.stats.warm_tokens == 10
    serve(cache, run(400, 10))
    assert [found(cache, run(start, 10)) for start in (100, 200, 300, 400)] == [10, 0, 10, 10]
    enter(cache, run(500, 10), warm=True)  # no room but its own
    assert found(cache, run(500, 10)) == 0 == cache.stats.warm_tokens
    cache.check()


def test_prefetching_what_is_there_does_not_make_it_recent() -> None:
    cache = new_cache(30)
    for start in (100, 200, 300):
        serve(cache, run(start, 10))
    enter(cache, run(100, 10), warm=True)
    serve(cache, run(400, 10))
    assert [found(cache, run(start, 10)) for start in (100, 200)] == [0, 10]


def test_a_prefetched_edge_that_is_cut_is_promoted_where_it_was_used() -> None:
    cache = new_cache()
    enter(cache, run(0, 100), warm=True)
    enter(cache, [*run(0, 60), 999], warm=True)
    assert (cache.stats.warm_tokens, cache.stats.splits) == (101, 1)
    assert cache.match([KEY], run(0, 60)).length == 60
    assert cache.stats.warm_tokens == 41
    cache.check()


# ---- leases ------------------------------------------------------------------------------------------


def test_leases_are_as_many_as_live_requests() -> None:
    cache, rng = new_cache(300), random.Random(0)
    live: list[tuple[list[int], PageList, Lease]] = []
    for i in range(200):
        if len(live) > rng.randrange(8):
            _, pages, lease = live.pop(rng.randrange(len(live)))
            pages.free()
            cache.release(lease)
            cache.release(lease)
        else:
            tokens = [*run(1, rng.randrange(1, 50)), *[1000 + i] * rng.randrange(20)]
            match, pages = begin(cache, tokens)
            live.append((tokens, pages, cache.insert(KEY, pages.layout, tokens, pages.pages, match.lease)))
        assert cache.stats.leases == len(live)
        assert all(found(cache, tokens) == len(tokens) for tokens, _, _ in live)
        cache.check()
    assert cache.stats.evictions > 10


def test_a_lease_ends_once() -> None:
    cache = new_cache()
    one, two = enter(cache, run(0, 10)), enter(cache, run(0, 10))
    for _ in range(3):
        cache.release(one)
    assert cache.stats.leases == 1
    cache.release(two)
    assert cache.stats.leases == 0
    cold = cache.match([KEY], run(50, 10)).lease
    assert cold is not None and cache.stats.leases == 0
    cache.release(cold)


# ---- policy eviction ---------------------------------------------------------------------------------


def test_forgetting_spares_siblings_and_what_is_above() -> None:
    cache = new_cache()
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 4, 7, 8]):
        serve(cache, tokens)
    assert cache.forget(KEY, [1, 2, 3, 4]) == 4
    assert [found(cache, tokens) for tokens in ([1, 2, 3, 4], [1, 2, 5, 6])] == [2, 4]
    assert (cache.stats.policy_evictions, cache.stats.evictions, cache.num_tokens) == (2, 0, 4)
    cache.check()


FORGOTTEN = [(0, 0, 130), (1, 0, 0), (65, 0, 0), (130, 0, 0), (131, 0, 130), (131, 9, 130), (1, 1, 0), (2, 1, 1)]
FORGOTTEN += [(65, 64, 64), (66, 65, 65), (129, 90, 90), (130, 129, 129), (130, 999, 129)]


@pytest.mark.parametrize(("count", "keep", "left"), FORGOTTEN)
def test_forgetting_takes_the_edge_but_for_what_is_to_be_kept(count: int, keep: int, left: int) -> None:
    """Beyond the cached path nothing goes."""
    cache = new_cache()
    serve(cache, run(0, 130))
    assert cache.forget(KEY, run(0, count), keep) == 130 - left
    assert found(cache, run(0, 130)) == left == cache.num_tokens
    assert cache.forget(KEY, run(0, count), keep) == 0
    assert cache.arena.num_pages_used == cache.num_pages == -(-left // PAGE_TOKENS)
    assert cache.stats.policy_evictions == (left < 130)
    cache.check()


def test_forgetting_spares_a_path_that_ends_elsewhere() -> None:
    cache = new_cache()
    serve(cache, run(0, 50))
    assert cache.forget(KEY, [*run(0, 49), 999]) == 0 == cache.forget(KEY, [999])
    assert found(cache, run(0, 50)) == 50 and cache.stats.splits == 0


def test_forgetting_and_dropping_reach_what_is_leased() -> None:
    """The lease is on nothing then; its request may go on, enter what it has and end."""
    cache = new_cache()
    tokens = run(0, 100)
    match, pages = begin(cache, tokens)
    lease = cache.insert(KEY, pages.layout, tokens, pages.pages, match.lease)
    partial = cache.match([KEY], run(0, 80)).lease
    assert cache.forget(KEY, run(0, 50), 49) == 51
    assert (found(cache, tokens), cache.stats.leases) == (49, 0)
    assert stored(cache.arena, pages.layout, pages.pages, 100) == values(tokens)
    assert cache.insert(KEY, pages.layout, tokens, pages.pages, lease) is lease
    assert (found(cache, tokens), cache.stats.leases) == (100, 1)
    assert partial is not None
    cache.release(partial)
    assert cache.stats.leases == 1
    assert cache.drop(KEY.domain) == 100
    cache.release(lease)
    assert cache.stats.leases == 0 and cache.arena.num_pages_used == 2
    cache.check()


def test_what_was_removed_cannot_be_reached_nor_removed_again() -> None:
    cache = new_cache(100)
    lease = enter(cache, [*run(0, 50), *run(100, 10)])
    serve(cache, [*run(0, 50), *run(200, 10)])
    gone = [node for _, _, node in paths(cache)]
    assert cache.forget(KEY, run(0, 50)) == 70
    cache.release(lease)
    cache.reclaim(small(cache), 1 << 20)
    assert not any(node.is_alive or node.is_victim for node in gone) and cache.stats.evictions == 0
    assert found(cache, run(0, 50)) == 0 == cache.num_nodes
    cache.check()


def test_dropping_a_domain_frees_its_pages_and_only_those() -> None:
    cache = new_cache()
    mine, too, theirs = KEY, replace(KEY, band="another"), replace(KEY, domain="another")
    for key in (mine, too, theirs):
        serve(cache, run(0, 100), key)
        serve(cache, run(500, 10), key)
    kept = cache.peek([theirs], run(0, 100)).pages
    assert cache.nbytes == 9 * PAGE_BYTES
    assert cache.drop("domain") == 220 and cache.drop("domain") == 0
    assert cache.nbytes == 3 * PAGE_BYTES == cache.arena.num_pages_used * PAGE_BYTES
    assert [found(cache, run(0, 100), key) for key in (mine, too, theirs)] == [0, 0, 100]
    assert stored(cache.arena, small(cache), kept, 100) == values(run(0, 100))
    assert cache.clear() == 110 and cache.arena.num_pages_used == 0
    assert cache.stats.policy_evictions == 6
    cache.check()


def test_every_change_of_the_bytes_is_told_once() -> None:
    told: list[int] = []
    arena = Arena(16 * SUPERBLOCK, SUPERBLOCK)
    cache = PrefixCache(arena, max_bytes=3 * PAGE_BYTES, on_change=lambda: told.append(cache.nbytes // PAGE_BYTES))
    lease = enter(cache, run(0, 100))
    enter(cache, run(0, 50))
    cache.match([KEY], run(0, 70))
    cache.peek([KEY], run(0, 70))
    assert told == [2]
    big = enter(cache, run(500, 200))
    cache.release(lease)
    assert told == [2, 6]
    cache.release(big)
    assert told == [2, 6, 2]
    cache.forget(KEY, run(0, 65), 64)
    cache.drop("nobody")
    cache.reclaim(small(cache), 1)
    cache.clear()
    assert told == [2, 6, 2, 1, 0]


# ---- time --------------------------------------------------------------------------------------------


def test_at_ten_thousand_nodes_a_lookup_and_an_insert_take_a_few_walks_of_a_plain_trie() -> None:
    rng = random.Random(0)
    arena = Arena(4 * SUPERBLOCK, SUPERBLOCK)
    cache = PrefixCache(arena, max_bytes=UNBOUNDED)
    layout, trie = small(cache), {}
    pages = arena.allocate(layout, 2)

    def new_request(i: int) -> list[int]:
        return [i % 10, i // 10 % 10, i // 100 % 10, *rng.choices(range(50_000), k=97)]

    def walk(tokens: list[int]) -> None:
        at: dict[int, Any] = trie
        for token in tokens:
            at = at.setdefault(token, {})

    def match(tokens: list[int]) -> None:
        lease = cache.match([KEY], tokens).lease
        assert lease is not None
        cache.release(lease)

    def insert(tokens: list[int]) -> None:
        cache.release(cache.insert(KEY, layout, tokens, pages))

    known = [new_request(i) for i in range(9000)]
    for tokens in known:
        insert(tokens)
    assert cache.num_nodes >= 10_000
    best = dict.fromkeys((walk, match, insert), float("inf"))
    for tokens in known[:50]:
        walk(tokens)
    fresh = iter([new_request(i) for i in range(9 * 50)])
    for _ in range(9):
        for call in (walk, match):
            best[call] = min(best[call], _seconds(call, known[:50]))
        best[insert] = min(best[insert], _seconds(insert, [next(fresh) for _ in range(50)]))
    assert best[match] < 15 * best[walk] and best[insert] < 30 * best[walk]


def _seconds(call: Callable[[list[int]], None], requests: Sequence[list[int]]) -> float:
    start = time.perf_counter()
    for tokens in requests:
        call(tokens)
    return time.perf_counter() - start


# ---- everything at once ------------------------------------------------------------------------------

KEYS = [KEY, replace(KEY, domain="another"), replace(KEY, band="wide")]
Tokens = tuple[int, ...]
SEGMENT = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 40, 64, 65]))
TOKENS = st.lists(SEGMENT, min_size=1, max_size=4).map(lambda runs: tuple(t for t, count in runs for _ in range(count)))


class Watched(PrefixCache):
    """Every victim is the one that a search of all nodes would find."""

    def _evict(self) -> bool:
        victims = [node for node in self._nodes() if node.is_victim]
        coldest = min(victims, key=lambda node: (self._score(node), node.born), default=None)
        done = super()._evict()
        assert done == (coldest is not None) and not (coldest and coldest.is_alive)
        return done


@dataclass(eq=False)
class Request:
    key: KVKey
    tokens: Tokens
    pages: PageList
    lease: Lease
    leased: int  # tokens that must be there


def beginnings(sequences: Iterator[Tokens]) -> set[Tokens]:
    return {tokens[:n] for tokens in sequences for n in range(1, len(tokens) + 1)}


class Prefixes(RuleBasedStateMachine):
    """The model is, for each key, the set of all beginnings that are cached."""

    @initialize(policy=st.sampled_from(EVICTIONS), tokens=st.sampled_from([150, 500, 10_000]), pages=st.integers(3, 30))
    def create(self, policy: Eviction, tokens: int, pages: int) -> None:
        self.arena = Arena(5 * SUPERBLOCK, SUPERBLOCK)
        self.cache = Watched(self.arena, max_bytes=pages * PAGE_BYTES, max_tokens=tokens, policy=policy)
        self.model: dict[KVKey, set[Tokens]] = {key: set() for key in KEYS}
        self.requests: list[Request] = []

    def layout(self, key: KVKey) -> KVLayout:
        return self.arena.layout(*(WIDE if key.band == "wide" else SMALL))

    def pick(self, index: int) -> Request:
        return self.requests[index % len(self.requests)]

    def longest(self, key: KVKey, tokens: Tokens) -> int:
        cached = self.model[key]
        return sum(1 for _ in takewhile(lambda n: tokens[:n] in cached, range(1, len(tokens) + 1)))

    def cached(self, key: KVKey) -> set[Tokens]:
        return beginnings(tokens for of, tokens, _ in paths(self.cache) if of == key)

    def settle(self, evictions: int) -> None:
        """What is cached is what the model says, but for what was evicted for want of room."""
        for key in KEYS:
            cached = self.cached(key)
            assert cached <= self.model[key]
            if self.cache.stats.evictions == evictions:
                assert cached == self.model[key]
            self.model[key] = cached

    @precondition(lambda self: len(self.requests) < 5)
    @rule(key=st.sampled_from(KEYS), tokens=TOKENS, both=st.booleans())
    def start(self, key: KVKey, tokens: Tokens, both: bool) -> None:
        """Match, take over, prefill; where pages are short, reclaim, and give up if that is not enough."""
        keys = [key, KEYS[1]] if both and key is KEYS[0] else [key]
        peeked, evictions = self.cache.peek(keys, tokens), self.cache.stats.evictions
        match = self.cache.match(keys, tokens)
        assert replace(match, lease=None) == peeked and match.lease is not None
        lengths = [self.longest(key, tokens) for key in keys]
        assert match.length == max(lengths)
        assert match.key == (keys[lengths.index(match.length)] if match.length else None)
        pages = PageList(self.arena, self.layout(key))
        pages.splice(match.pages, match.length)
        request = Request(match.key or key, tokens, pages, match.lease, match.length)
        try:
            store(pages, tokens)
        except KVFull:
            self.cache.reclaim(pages.layout, len(tokens) // PAGE_TOKENS + 2)
            try:
                store(pages, tokens)
            except KVFull:
                pages.free()
                self.cache.release(match.lease)
                self.settle(evictions)
                return
        request.key = key
        if match.key != key:
            request.leased = 0  # in another tree
        self.requests.append(request)
        self.settle(evictions)

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 4), more=TOKENS)
    def go_on(self, index: int, more: Tokens) -> None:
        request = self.pick(index)
        tokens = (*request.tokens, *more)
        if len(tokens) > 400:
            return
        try:
            store(request.pages, tokens)
        except KVFull:
            return
        request.tokens = tokens

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 4), cut=st.one_of(st.just(0), st.integers(0, 200)), warm=st.booleans())
    def insert(self, index: int, cut: int, warm: bool) -> None:
        """All tokens of a request, or not the last few."""
        request, evictions = self.pick(index), self.cache.stats.evictions
        tokens = request.tokens[: max(len(request.tokens) - cut, 0)]
        pages = request.pages.pages[: -(-len(tokens) // PAGE_TOKENS)]
        before, held = self.arena.bytes.clone(), set(self.cache._holders)
        self.model[request.key] |= beginnings(iter([tokens]))
        lease = self.cache.insert(
            request.key, request.pages.layout, tokens, pages, None if warm else request.lease, warm=warm
        )
        if warm:
            self.cache.release(lease)
        else:
            assert lease is request.lease
            request.leased = len(tokens)
        self.settle(evictions)
        assert set(self.cache._holders) <= held | set(pages)
        if self.cache.stats.evictions == evictions:
            gone = [page for page in held - set(self.cache._holders) if not self.arena.num_owners(page)]
            assert len(gone) <= 1  # a boundary page
            for layer in range(request.pages.layout.num_layers):
                request.pages.layout.view(before, layer)[gone] = 0
            assert torch.equal(self.arena.bytes, before)

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 4))
    def insert_nonsense(self, index: int) -> None:
        request = self.pick(index)
        before = state(self.cache)
        with pytest.raises(InvalidRequest):
            self.cache.insert(request.key, request.pages.layout, request.tokens, request.pages.pages[1:], request.lease)
        assert state(self.cache) == before

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 4), twice=st.booleans())
    def finish(self, index: int, twice: bool) -> None:
        request, evictions = self.pick(index), self.cache.stats.evictions
        self.requests.remove(request)
        request.pages.free()
        for _ in range(1 + twice):
            self.cache.release(request.lease)
        self.settle(evictions)

    @rule(
        key=st.sampled_from(KEYS), tokens=TOKENS, index=st.integers(0, 4), cut=st.integers(0, 200), keep=st.booleans()
    )
    def forget(self, key: KVKey, tokens: Tokens, index: int, cut: int, keep: bool) -> None:
        if self.requests and index < 4:  # what is likely to be there
            key, tokens = self.pick(index).key, self.pick(index).tokens[: cut + 1]
        before, evictions, count = self.cached(key), self.cache.stats.evictions, self.cache.num_tokens
        freed = self.cache.forget(key, tokens, len(tokens) - 1 if keep else 0)
        doomed = {path for path in before if path[: len(tokens)] == tokens}
        gone = before - self.cached(key)
        if self.cache.stats.evictions == evictions:
            assert freed == len(gone) == count - self.cache.num_tokens
            for path in gone - doomed:  # only what these tokens alone had led to
                assert path == tokens[: len(path)]
                assert all(p in doomed or p == tokens[: len(p)] for p in before if p[: len(path)] == path)
        assert doomed <= gone and (freed > 0) == bool(doomed)
        self.model[key] -= gone
        self.reach_leases()
        self.settle(evictions)

    @rule(domain=st.sampled_from([*{key.domain for key in KEYS}, "nobody"]))
    def drop(self, domain: str) -> None:
        evictions, count = self.cache.stats.evictions, self.cache.num_tokens
        expected = sum(len(self.model[key]) for key in KEYS if key.domain == domain)
        assert self.cache.drop(domain) == expected == count - self.cache.num_tokens
        self.model |= {key: set() for key in KEYS if key.domain == domain}
        self.reach_leases()
        self.settle(evictions)

    def reach_leases(self) -> None:
        for request in self.requests:
            if request.lease._node and not request.lease._node.is_alive:
                request.leased = 0

    @rule(key=st.sampled_from(KEYS), count=st.integers(0, 12))
    def reclaim(self, key: KVKey, count: int) -> None:
        layout, evictions = self.layout(key), self.cache.stats.evictions
        before = self.arena.num_free(layout)
        self.cache.reclaim(layout, count)
        if before >= count:
            assert self.cache.stats.evictions == evictions
        elif self.arena.num_free(layout) < count:
            assert not any(node.is_victim for _, _, node in paths(self.cache))
        self.settle(evictions)

    @invariant()
    def everything_holds(self) -> None:
        cache, lists = self.cache, [request.pages for request in self.requests]
        cache.check()
        self.arena.check()
        check_lists(self.arena, lists, list(Counter(cache._holders).elements()))
        for key, tokens, _ in paths(cache):
            match = cache.peek([key], tokens)
            assert match.length == len(tokens)
            assert stored(self.arena, self.layout(key), match.pages, len(tokens)) == values(tokens)
        for request in self.requests:
            request.pages.check()
            assert cache.peek([request.key], request.tokens[: request.leased]).length == request.leased
        alive = [request.lease._node for request in self.requests if request.lease._node]
        assert cache.stats.leases == sum(node.is_alive for node in alive)

    def teardown(self) -> None:
        for request in self.requests:
            request.pages.free()
            self.cache.release(request.lease)
        assert self.cache.stats.leases == 0
        self.cache.clear()
        self.cache.check()
        self.arena.check()
        assert self.arena.num_pages_used == 0 == self.cache.nbytes and not bool(self.arena.bytes.any())


TestPrefixes = Prefixes.TestCase
TestPrefixes.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestPrefixesAtLength(Prefixes.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(
    ("one", "other", "length"), [([], [], 0), ([1], [2], 0), ([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 2, 4], 2)]
)
def test_common_length(one: list[int], other: list[int], length: int) -> None:
    assert common_length(one, other) == common_length(other, one) == common_length(other, [9, *one], 1) == length


@given(common=st.lists(st.integers(0, 2), max_size=40), rest=st.lists(st.integers(0, 2), max_size=5))
def test_common_length_of_any(common: list[int], rest: list[int]) -> None:
    assert common_length([*common, 7, *rest], [*common, 8]) == len(common)
