"""csrc_triton/attention_plan.py: every row reads every entry that it may see once, and every state has its slot."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csrc_triton.attention import PageTable
from csrc_triton.attention_plan import (
    CHUNK,
    NO_ROW,
    PAGE,
    Groups,
    Lists,
    Plan,
    Room,
    Tiles,
    find_groups,
    make_plan,
    make_tree_plan,
    rows_of,
)
from csrc_triton.tree import tails, token_tree

PLENTY = Room(programs=12, slots=10**9)
Entry = tuple[int, int, int, int]  # page id, position of slot 0, valid slots lo, hi


def lists_of(sequences: Sequence[Sequence[Entry]]) -> Lists:
    """Padded with entries that would be seen."""
    width = max(len(s) for s in sequences) + 1
    ids, base, span = (np.full((len(sequences), width), fill, np.int32) for fill in (-1, 0, 64 << 8))
    for s, entries in enumerate(sequences):
        for e, (page, start, lo, hi) in enumerate(entries):
            ids[s, e], base[s, e], span[s, e] = page, start, lo | hi << 8
    return Lists(ids, base, span, np.array([len(s) for s in sequences], np.int32))


def canonical(length: int, pages: Sequence[int]) -> list[Entry]:
    return [(pages[b // PAGE], b, 0, min(PAGE, length - b)) for b in range(0, length, PAGE)]


@dataclass
class Batch:
    """Sequences and rows of them."""

    lists: Lists
    seq: np.ndarray  # [T]
    position: np.ndarray  # [T]

    def groups(self, window: int | None) -> Groups:
        return find_groups(self.lists, self.seq, self.position, window)

    def visible(self, window: int | None) -> np.ndarray:
        """[T, E]: whether a row sees a token of an entry."""
        first, last = self.lists.first[self.seq], self.lists.end[self.seq] - 1
        lowest = np.full(len(self.seq), -(2**31)) if window is None else self.position - window + 1
        return (
            self.lists.used[self.seq] & (first <= self.position[:, None]) & (last >= lowest[:, None]) & (first <= last)
        )


@st.composite
def batches(draw: st.DrawFn, most_rows: int = 90) -> Batch:
    """Lists with holes and trimmed entries, some of which begin as an earlier one does; chains and scattered rows."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    sequences: list[list[Entry]] = []
    next_page = 1
    for _ in range(draw(st.integers(1, 6))):
        entries = (
            list(rng.choice(sequences)[: rng.choice([5, 8, 16, 17, 24])]) if sequences and rng.random() < 0.6 else []
        )
        base = entries[-1][1] + entries[-1][3] if entries else rng.choice([0, 0, 0, -20, 64000])
        for _ in range(rng.choice([0, 1, 3, 8, 9, 20])):
            lo, hi = sorted(rng.sample(range(PAGE + 1), 2)) if rng.random() < 0.2 else (0, PAGE)
            base = max(base - lo, 1 - PAGE)
            entries.append((next_page, base, lo, hi))
            base, next_page = base + hi, next_page + 1
        sequences.append(entries)
    lists = lists_of(sequences)
    seq, position = [], []
    for s, entries in enumerate(sequences):
        end = entries[-1][1] + entries[-1][3] if entries else 1
        count = rng.choice([0, 1, 1, 2, 5, 16, 70])
        if rng.random() < 0.8:
            rows = [p for p in range(end - count, end) if p >= 0]
        else:
            rows = [rng.randint(0, end + 100) for _ in range(count)]
        rows = rows[: most_rows - len(position)]
        seq += [s] * len(rows)
        position += rows
    return Batch(lists, np.array(seq, np.int64), np.array(position, np.int64))


def rows_by_item(tiles: Tiles) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows and the item, for each item."""
    return [(rows[rows != NO_ROW], item) for item in tiles.items for rows in [tiles.rows[item[0]]]]


def assert_covers(batch: Batch, plan: Plan, ratio: int, window: int | None) -> None:
    """Each (row, entry) that is seen is read by one item; none twice; each slot is one token's and chunk's."""
    covered = np.zeros((len(batch.seq), ratio, batch.lists.ids.shape[1]), int)
    written = np.zeros((plan.num_slots, ratio), int)
    stored = np.zeros((len(batch.seq), ratio), int)
    for kind, tiles in (("whole", plan.whole), ("split", plan.split), ("shared", plan.shared)):
        used = set(tiles.items[:, 0].tolist())  # of a tile whose chunks are all shared there is no split item
        assert used == set(range(len(tiles.rows))) or (kind == "split" and used < set(range(len(tiles.rows))))
        for rows, (_, listed, first, end) in rows_by_item(tiles):
            token, head = rows // ratio, rows % ratio
            assert len(rows) and len(set(rows)) == len(rows)
            for part in (batch.lists.ids, batch.lists.base, batch.lists.span):
                assert (part[batch.seq[token], first:end] == part[listed, first:end]).all()
            if kind != "shared":
                assert len({(batch.seq[t], batch.position[t] // PAGE) for t in token}) == 1, "one block of one sequence"
                assert batch.seq[token[0]] == listed
            np.add.at(covered, (token, head, slice(first, end)), 1)
            if kind == "whole":
                stored[token, head] += 1
                assert (plan.slots[token, 2] == 0).all()
                continue
            assert first // CHUNK == max(first, end - 1) // CHUNK, "one chunk"
            slot = plan.slots[token, 0] + first // CHUNK
            assert ((slot >= plan.slots[token, 1]) & (slot < plan.slots[token, 1:].sum(1))).all()
            np.add.at(written, (slot, head), 1)
    visible = batch.visible(window)[:, None]
    assert (covered <= 1).all() and (covered[np.broadcast_to(visible, covered.shape)] == 1).all()
    assert not covered[np.broadcast_to(~batch.lists.used[batch.seq][:, None], covered.shape)].any()
    assert (written == 1).all(), "all slots are written, once"
    assert plan.merged.tolist() == np.flatnonzero(plan.slots[:, 2]).tolist()
    stored[plan.merged] += 1
    assert (stored == 1).all(), "a row's result comes from one program"
    spans = sorted((first, first + count) for _, first, count in plan.slots[plan.merged].tolist())
    assert [a for a, _ in spans] == [0, *(b for _, b in spans)][: len(spans)] and sum(b - a for a, b in spans) == len(
        written
    )


@settings(max_examples=150, deadline=None)
@given(
    batch=batches(),
    ratio=st.sampled_from([1, 2, 3, 5, 7]),
    block_m=st.sampled_from([16, 32]),
    shared_m=st.sampled_from([None, 32]),
    window=st.sampled_from([None, None, 1, 63, 64, 65, 200, 1000]),
    is_cascade=st.booleans(),
    longest_whole=st.sampled_from([None, None, 0, 1, 2, 10**9]),
    programs=st.sampled_from([1, 12, 400]),
    slots=st.sampled_from([0, 5, 40, 10**9]),
)
def test_every_row_reads_what_it_sees_once(
    batch: Batch,
    ratio: int,
    block_m: int,
    shared_m: int | None,
    window: int | None,
    is_cascade: bool,
    longest_whole: int | None,
    programs: int,
    slots: int,
) -> None:
    groups = batch.groups(window)
    plan = make_plan(
        batch.lists,
        groups,
        ratio=ratio,
        block_m=block_m,
        room=Room(programs, slots),
        is_cascade=is_cascade and window is None,
        shared_m=shared_m,
        longest_whole=longest_whole,
    )
    assert_covers(batch, plan, ratio, window)
    if longest_whole is None:
        assert plan.num_slots <= slots
    if not (is_cascade and window is None):
        assert not len(plan.shared.rows)
        if longest_whole is not None:
            chunks = np.repeat(groups.num_chunks, groups.count)
            assert set(plan.merged) == set(groups.tokens[chunks > longest_whole])


def decode(lists: Lists, count: int = 1) -> Batch:
    """The last rows of every sequence."""
    end = lists.end[np.arange(len(lists.n)), lists.n - 1]
    seq = np.repeat(np.arange(len(end)), count)
    return Batch(lists, seq, end[seq] - count + np.tile(np.arange(count), len(end)))


def planned(batch: Batch, ratio: int = 1, room: Room = PLENTY, window: int | None = None, **options: object) -> Plan:
    settings = {"block_m": 16, "is_cascade": window is None, **options}
    plan = make_plan(batch.lists, batch.groups(window), ratio=ratio, room=room, **settings)
    assert_covers(batch, plan, ratio, window)
    return plan


def runs_of(tiles: Tiles) -> set[tuple[frozenset[int], int, int]]:
    """Rows, and the first and last chunk that they read."""
    chunks: dict[frozenset[int], list[int]] = {}
    for rows, (_, _, first, _) in rows_by_item(tiles):
        chunks.setdefault(frozenset(rows.tolist()), []).append(int(first) // CHUNK)
    return {(rows, min(c), max(c)) for rows, c in chunks.items()}


def test_sharing_has_levels() -> None:
    """0, 1 and 2 begin with three chunks; 0 and 1 go on for two; 3 shares one chunk with them; 4 less than one."""
    pages = iter(range(1, 1000))
    trunk = [next(pages) for _ in range(48)]

    def sequence(shared: int, more: int) -> list[Entry]:
        ids = trunk[:shared] + [next(pages) for _ in range(more)]
        return canonical(64 * len(ids) - 5, ids)

    lists = lists_of(
        [sequence(40, 2), sequence(40, 9), sequence(24, 8), sequence(8, 20), sequence(7, 5), sequence(0, 9)]
    )
    plan = planned(decode(lists))
    assert runs_of(plan.shared) == {
        (frozenset({0, 1, 2, 3}), 0, 0),
        (frozenset({0, 1, 2}), 1, 2),
        (frozenset({0, 1}), 3, 4),
    }
    assert {(rows, first) for rows, first, _ in runs_of(plan.split)} >= {(frozenset({3}), 1), (frozenset({2}), 3)}


def test_two_trunks_are_shared_apart() -> None:
    trunks = [list(range(1, 17)), list(range(101, 117))]
    sequences = [canonical(1024 + 30, [*trunks[s % 2], 200 + s]) for s in range(6)]
    plan = planned(decode(lists_of(sequences)))
    assert runs_of(plan.shared) == {(frozenset({0, 2, 4}), 0, 1), (frozenset({1, 3, 5}), 0, 1)}


def test_lists_that_differ_in_a_base_or_a_span_share_no_chunk() -> None:
    entries = canonical(600, range(1, 11))
    for e, other in ((3, (4, 192, 0, 63)), (7, (8, 449, 0, 64)), (0, (1, 0, 1, 64))):
        changed = [*entries[:e], other, *entries[e + 1 :]]
        assert not len(planned(decode(lists_of([entries, changed]))).shared.rows)
    assert len(planned(decode(lists_of([entries, entries]))).shared.rows) == 1


def test_rows_that_fill_their_tiles_are_not_read_together() -> None:
    """Nothing would be saved: as many tiles as before, and their states written out besides."""
    batch = decode(lists_of([canonical(64 * 9, range(1, 10)), canonical(64 * 9, [*range(1, 9), 20])]), count=16)
    assert not len(planned(batch).shared.rows)
    assert len(planned(batch, shared_m=32).shared.rows) == 1


def test_a_prefill_alone_is_not_split_by_sharing_with_itself() -> None:
    """Its groups begin with the same pages, and a tile saved is not worth the states of all of them."""
    lists = lists_of([canonical(4096, range(1, 65))])
    position = np.arange(2001, 4034)
    batch = Batch(lists, np.zeros(len(position), np.int64), position)
    assert not planned(batch, ratio=5, block_m=32, room=Room(396, 0)).num_slots


def test_long_tiles_are_split_where_programs_wait() -> None:
    lists = lists_of([canonical(64 * 64, range(1, 65)), canonical(64, [70]), canonical(70, [80, 81])])
    plan = planned(decode(lists), room=Room(100, 10**9))
    assert plan.merged.tolist() == [0] and len(plan.split.items) == 8
    assert len(plan.whole.items) == 2
    assert not planned(decode(lists), room=Room(100, 7)).num_slots
    assert planned(decode(lists), room=Room(100, 8)).num_slots == 8


def test_the_longest_come_first() -> None:
    lists = lists_of([canonical(64 * n, range(100 * n, 100 * n + n)) for n in (3, 30, 1, 17)])
    items = planned(decode(lists), longest_whole=10**9, is_cascade=False).whole.items
    assert (items[:, 3] - items[:, 2]).tolist() == [30, 17, 3, 1]


def test_a_window_skips_what_no_row_of_a_group_sees() -> None:
    lists = lists_of([canonical(64 * 20, range(1, 21))])
    batch = Batch(lists, np.zeros(3, np.int64), np.array([1000, 1001, 1002]))
    for window, first in ((1, 15), (41, 15), (42, 14), (105, 14), (106, 13), (2000, 0)):
        groups = batch.groups(window)
        assert (groups.first.tolist(), groups.end.tolist()) == ([first], [16]), window
        planned(batch, window=window, longest_whole=0)


def test_rows_of_a_run_fill_tiles_of_their_own() -> None:
    rows, tiles = rows_of(np.array([4, 7, 2]), np.array([2, 1]), 10, 16)
    assert tiles.tolist() == [2, 1]
    assert rows.tolist() == [
        [*range(40, 50), *range(70, 76)],
        [*range(76, 80), *[NO_ROW] * 12],
        [*range(20, 30), *[NO_ROW] * 6],
    ]


def test_no_rows_and_no_entries() -> None:
    lists = lists_of([[], canonical(10, [1])])
    none = Batch(lists, np.zeros(0, np.int64), np.zeros(0, np.int64))
    plan = planned(none)
    assert not len(plan.whole.items) and not len(plan.split.items) and plan.num_slots == 0
    plan = planned(Batch(lists, np.array([0, 1]), np.array([5, 5])), ratio=3)
    assert plan.whole.items[:, 1:].tolist() == [[1, 0, 1], [0, 0, 0]]


# ---- trees -------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prefixes=st.lists(
        st.one_of(st.sampled_from([0, 1, 63, 64, 448, 500, 511, 512, 1024]), st.integers(0, 1200)),
        min_size=1,
        max_size=3,
    ),
    ratio=st.sampled_from([1, 3, 5]),
    block_m=st.sampled_from([16, 32]),
    shared_m=st.sampled_from([None, 32]),
    window=st.sampled_from([None, None, 1, 64, 90, 600]),
    is_cascade=st.booleans(),
)
def test_every_node_reads_what_it_sees_once(
    seed: int,
    prefixes: list[int],
    ratio: int,
    block_m: int,
    shared_m: int | None,
    window: int | None,
    is_cascade: bool,
) -> None:
    """Committed entries by split and shared items; the partial one and ancestors by a leaf's tail."""
    rng = random.Random(seed)
    trunk = list(range(1, 30)) if rng.random() < 0.5 else None
    sequences, pages = [], iter(range(1000, 2000))
    for prefix in prefixes:
        own = [next(pages) for _ in range(20)]
        shared = rng.choice([0, 8, 16]) if trunk else 0
        sequences.append(canonical(prefix, [*trunk[:shared], *own] if trunk else own))
    counts = [rng.choice([1, 5, 30, 80]) for _ in prefixes]
    trees = [
        token_tree(
            [rng.randint(max(i // 60 * 60, i - rng.choice([1, 1, 1, 4])), i - 1) if i % 60 else -1 for i in range(n)]
        )
        for n in counts
    ]
    lists = lists_of(sequences)
    table = PageTable(*(torch.from_numpy(a) for a in (lists.ids, lists.base, lists.span, lists.n)))
    total = sum(counts)
    node_page = torch.arange(total, dtype=torch.int32) + 5000
    found = tails(table, trees, node_page, torch.zeros_like(node_page))
    seq, entry, base, page, _, position, leaf = (t.numpy() for t in vars(found).values())
    full = lists.n.copy()
    full[seq] = entry
    committed = replace(lists, n=full)
    plan = make_tree_plan(
        committed, position, leaf, seq, base,
        ratio=ratio, block_m=block_m, window=window, is_cascade=is_cascade and window is None, shared_m=shared_m,
    )  # fmt: skip
    batch = Batch(committed, seq[leaf], position)
    written = np.zeros((plan.num_slots, ratio), int)
    covered = np.zeros((total, ratio, lists.ids.shape[1]), int)
    for tiles in (plan.split, plan.shared):
        for rows, (_, listed, first, end) in rows_by_item(tiles):
            token, head = rows // ratio, rows % ratio
            assert first // CHUNK == max(first, end - 1) // CHUNK
            assert (lists.ids[batch.seq[token], first:end] == lists.ids[listed, first:end]).all()
            np.add.at(covered, (token, head, slice(first, end)), 1)
            np.add.at(written, (plan.slots[token, 0] + first // CHUNK, head), int(first < end))
    seen = np.broadcast_to(batch.visible(window)[:, None], covered.shape)
    assert (covered <= 1).all() and (covered[seen] == 1).all()
    assert (written <= 1).all()

    tailed = np.zeros((total, ratio), int)
    for rows, (_, of, at, num_pages, goes_on) in rows_by_item(plan.tails):
        token, head = rows // ratio, rows % ratio
        tailed[token, head] += 1
        assert (leaf[token] == of).all() and at == entry[of] and 1 <= num_pages <= 2
        assert len(set(position[token] // PAGE)) == 1
        slot = plan.slots[token, 0] + at // CHUNK
        assert (written[slot, head] == goes_on).all(), "goes on from a state that is there, and only then"
        for chunk in range(at // CHUNK, (at + num_pages - 1) // CHUNK + 1):
            written[plan.slots[token, 0] + chunk, head] = 1
        places = page[of].ravel()[: num_pages * PAGE]
        stands = base[of] + np.arange(len(places))
        s = seq[of]
        for t in token:
            read = {
                int(p): int(where) for where, p in zip(places, stands, strict=True) if where >= 0 and p <= position[t]
            }
            own = {p: p_page for p_page, b, lo, hi in sequences[s][entry[of] :] for p in range(b + lo, b + hi)}
            node, start = t, int(np.searchsorted(seq[leaf], s))
            while node >= start:
                own[int(position[node])] = 5000 + int(node)
                above = trees[s].parent[node - start]
                node = start + above if above >= 0 else -1
            assert read == own
    assert (tailed == 1).all() and (written == 1).all()
    ends = plan.slots[:, 1:].sum(1)
    assert (plan.slots[:, 2] >= 1).all() and int(plan.slots[:, 2].sum()) == plan.num_slots
    assert sorted(ends.tolist()) == np.cumsum(plan.slots[np.argsort(plan.slots[:, 1]), 2]).tolist()


@pytest.mark.parametrize("is_cascade", [False, True])
def test_trees_behind_one_trunk_share_its_chunks(is_cascade: bool) -> None:
    sequences = [canonical(530, [*range(1, 9), 20 + s]) for s in range(3)]
    lists = lists_of(sequences)
    committed = replace(lists, n=np.array([8, 8, 8], np.int32))
    leaves = np.arange(3)
    plan = make_tree_plan(
        committed, np.full(3, 530), leaves, leaves, np.full(3, 512),
        ratio=2, block_m=16, window=None, is_cascade=is_cascade,
    )  # fmt: skip
    assert len(plan.shared.items) == is_cascade and len(plan.split.items) == (0 if is_cascade else 3)
    assert plan.tails.items[:, 1:].tolist() == [[s, 8, 1, 0] for s in range(3)]
