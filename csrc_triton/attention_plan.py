"""How the rows of an attention call are cut into tiles, and which program reads which pages: host work, once a forward.

A tile is up to BLOCK_M rows (token, head of a group) that read one page list and whose positions lie in one block of
64. An item is a tile and a run of list entries, done by one program a kv head. A tile that sees few chunks is one item
("whole"), which folds its chunks itself; of a tile that sees many each chunk is an item ("split"), which leaves its
state in a slot, and the slots are folded afterwards. Sequences that begin with the same chunks may read them together
("shared", cascade): tiles of rows of several sequences, each chunk an item.

Promise: a plan says where and when a chunk's state is made, never which products are summed in which order, so that
no plan changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PAGE = 64
CHUNK = 8  # list entries whose states are kept apart until they are folded
NO_ROW = -1
FAR = np.iinfo(np.int32).max
WHOLE_ROWS = 64  # what traffic for a row's states weighs against waiting: see `_is_split`


@dataclass(frozen=True, slots=True)
class Lists:
    """The page lists of B sequences on the host, [B, E] int32 each; nothing is visible in entries from n on."""

    ids: np.ndarray
    base: np.ndarray
    span: np.ndarray
    n: np.ndarray  # [B]

    @property
    def used(self) -> np.ndarray:
        return np.arange(self.ids.shape[1]) < self.n[:, None]

    @property
    def first(self) -> np.ndarray:
        """[B, E] position of an entry's first token; far away where there is no entry."""
        return np.where(self.used, self.base + (self.span & 255), FAR)

    @property
    def end(self) -> np.ndarray:
        """[B, E] position behind an entry's last token."""
        return np.where(self.used, self.base + (self.span >> 8), FAR)


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: np.ndarray  # [tiles, BLOCK_M] int32: token * ratio + head in its group, or NO_ROW
    items: np.ndarray  # [items, 4] int32: tile, sequence whose list is read, first entry, entry behind the last


@dataclass(frozen=True, slots=True)
class Plan:
    """What the launches of one forward share."""

    whole: Tiles
    split: Tiles
    shared: Tiles
    merged: np.ndarray  # [tokens] int32 whose slots are folded
    slots: np.ndarray  # [T, 3] int32: the slot that chunk 0 of the list has or would have, first slot, how many
    num_slots: int


@dataclass(frozen=True, slots=True)
class Groups:
    """Tokens of one sequence whose positions lie in one block of 64, and what of their list they may see."""

    tokens: np.ndarray  # [T], group after group
    start: np.ndarray  # [groups] its first, as an index into tokens
    count: np.ndarray
    seq: np.ndarray
    first: np.ndarray  # list entry
    end: np.ndarray  # behind the last one

    def tokens_of(self, chosen: np.ndarray) -> np.ndarray:
        return self.tokens[_ranges(self.start[chosen], self.count[chosen])]

    @property
    def chunk(self) -> np.ndarray:
        return self.first // CHUNK

    @property
    def num_chunks(self) -> np.ndarray:
        return np.maximum(-(-self.end // CHUNK) - self.chunk, 0)


@dataclass(frozen=True, slots=True)
class Room:
    """What there is to do the work with."""

    programs: int  # that run at once, of one kv head
    slots: int  # of states that wait to be folded


def make_plan(
    lists: Lists,
    groups: Groups,
    *,
    ratio: int,
    block_m: int,
    room: Room,
    is_cascade: bool,
    shared_m: int | None = None,
    longest_whole: int | None = None,
) -> Plan:
    """shared_m: rows of a tile of several sequences, block_m where not given.

    longest_whole: chunks up to which a tile is one item; None: see `_is_split`.
    """
    own = groups.chunk  # first chunk that a group reads by itself
    shared = _no_tiles(block_m)
    if is_cascade:
        shared, own = _share(lists, groups, ratio, block_m, shared_m or block_m, room.slots)
    is_split = _is_split(groups, ratio, block_m, room) if longest_whole is None else groups.num_chunks > longest_whole
    is_split = is_split | (own > groups.chunk)
    counts = np.where(is_split, groups.num_chunks, 0)
    slots = _slots(groups, np.repeat(counts, groups.count))
    return Plan(
        _whole(groups, ~is_split, ratio, block_m),
        _split(groups, is_split, own, ratio, block_m),
        shared,
        np.flatnonzero(slots[:, 2]).astype(np.int32),
        slots,
        int(slots[:, 2].sum()),
    )


def _slots(groups: Groups, counts: np.ndarray) -> np.ndarray:
    """[T, 3] as in Plan; counts: slots of the tokens in the groups' order."""
    begin = np.cumsum(counts) - counts
    slots = np.empty((len(counts), 3), np.int32)
    slots[groups.tokens] = np.stack((begin - np.repeat(groups.chunk, groups.count), begin, counts), 1)
    return slots


def _is_split(groups: Groups, ratio: int, block_m: int, room: Room) -> np.ndarray:
    """Splitting balances programs but costs traffic for each row: a tile of many rows is split only if it is long
    beside what a program has to do on average, and the longest come first where slots are few."""
    chunks, rows = groups.num_chunks, groups.count * ratio
    tiles = -(-rows // block_m)
    average = (tiles * chunks).sum() / room.programs
    is_long = chunks > np.maximum(1, average * np.minimum(rows, block_m) / WHOLE_ROWS)
    order = np.argsort(-chunks, kind="stable")
    needed = np.cumsum((chunks * groups.count * is_long)[order])
    fits = np.empty(len(order), bool)
    fits[order] = needed <= room.slots
    return is_long & fits


def find_groups(lists: Lists, seq: np.ndarray, row_pos: np.ndarray, window: int | None) -> Groups:
    """All tokens [T], a group of each sequence and block of 64."""
    tokens, start, count = _runs(seq, row_pos // PAGE)
    heads = tokens[start]
    end, first = np.zeros((2, len(start)), np.int64)
    if len(start):
        sorted_pos = row_pos[tokens]
        end = (lists.first[seq[heads]] <= np.maximum.reduceat(sorted_pos, start)[:, None]).sum(1)
        if window is not None:
            lowest = np.minimum.reduceat(sorted_pos, start)
            first = np.minimum((lists.end[seq[heads]] <= (lowest - window + 1)[:, None]).sum(1), end)
    return Groups(tokens, start, count, seq[heads], first, end)


def _runs(major: np.ndarray, minor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens in the order of (major, minor), where each pair of these starts, and how many have it."""
    tokens = np.lexsort((minor, major))
    differs = (np.diff(major[tokens]) != 0) | (np.diff(minor[tokens]) != 0)
    start = np.concatenate(([0], np.flatnonzero(differs) + 1))[: len(tokens)]
    return tokens, start, np.diff(start, append=len(tokens))


def rows_of(tokens: np.ndarray, runs: np.ndarray, ratio: int, block_m: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens, in order, as tiles; runs: how many tokens go together, a new tile begins with each run.

    -> rows [tiles, block_m], and how many tiles each run has.
    """
    tiles = -(-runs * ratio // block_m)
    rows = np.full((int(tiles.sum()), block_m), NO_ROW, np.int32)
    flat = (tokens[:, None] * ratio + np.arange(ratio)).ravel()
    lengths = runs * ratio
    local = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first_tile = np.repeat(np.cumsum(tiles) - tiles, lengths)
    rows[first_tile + local // block_m, local % block_m] = flat
    return rows, tiles


def _whole(groups: Groups, chosen: np.ndarray, ratio: int, block_m: int) -> Tiles:
    """One item a tile, the longest first, so that no long one is left at the end."""
    count, seq, first, end = (a[chosen] for a in (groups.count, groups.seq, groups.first, groups.end))
    rows, tiles = rows_of(groups.tokens_of(chosen), count, ratio, block_m)
    items = np.stack([np.arange(len(rows)), *(np.repeat(a, tiles) for a in (seq, first, np.maximum(end, first)))], 1)
    return Tiles(rows, items[np.argsort(items[:, 2] - items[:, 3], kind="stable")].astype(np.int32))


def _split(groups: Groups, chosen: np.ndarray, own: np.ndarray, ratio: int, block_m: int) -> Tiles:
    """An item a tile and chunk; the tiles of a group follow each other, since they read the same pages."""
    count, seq, first, end, own = (a[chosen] for a in (groups.count, groups.seq, groups.first, groups.end, own))
    rows, tiles = rows_of(groups.tokens_of(chosen), count, ratio, block_m)
    return Tiles(rows, _chunk_items(np.cumsum(tiles) - tiles, tiles, seq, np.maximum(first, own * CHUNK), end))


def _chunk_items(
    tile: np.ndarray, tiles: np.ndarray, seq: np.ndarray, first: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Items of runs of `tiles` tiles from `tile` on, each run over entries [first, end) of a list, cut at chunks."""
    chunks = np.maximum(-(-end // CHUNK) - first // CHUNK, 0)
    run = np.repeat(np.arange(len(tile)), chunks)
    chunk = _ranges(first // CHUNK, chunks)
    a, b = np.maximum(chunk * CHUNK, first[run]), np.minimum((chunk + 1) * CHUNK, end[run])
    each = tiles[run]
    columns = (_ranges(tile[run], each), *(np.repeat(x, each) for x in (seq[run], a, b)))
    return np.stack(columns, 1).astype(np.int32)


# ---- trees -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Of nodes over committed entries, as split items, and then of every leaf's own nodes over its tail."""

    split: Tiles
    shared: Tiles
    tails: Tiles  # items [items, 5]: tile, leaf, entry of the tail, its pages, whether its chunk goes on
    slots: np.ndarray  # [T, 3]
    num_slots: int


def make_tree_plan(
    lists: Lists,  # entries before the tails
    position: np.ndarray,  # [T]
    leaf: np.ndarray,  # [T] that the node's result is of
    seq: np.ndarray,  # [leaves]
    base: np.ndarray,  # [leaves] position of the tail's slot 0
    *,
    ratio: int,
    block_m: int,
    window: int | None,
    is_cascade: bool,
    shared_m: int | None = None,
) -> TreePlan:
    groups = find_groups(lists, seq[leaf], position, window)
    own = groups.chunk
    shared = _no_tiles(block_m)
    if is_cascade:
        shared, own = _share(lists, groups, ratio, block_m, shared_m or block_m, None)
    every = np.ones(len(groups.start), bool)
    tokens, start, count = _runs(leaf, position // PAGE)
    leaves = leaf[tokens[start]]
    entry = lists.n[seq[leaves]]
    pages = 1 + (np.maximum.reduceat(position[tokens], start) - base[leaves]) // PAGE
    first = np.empty(len(tokens), np.int64)
    first[groups.tokens] = np.repeat(groups.first, groups.count)
    first = first[tokens[start]]
    rows, tiles = rows_of(tokens, count, ratio, block_m)
    goes_on = (entry % CHUNK != 0) & (first < entry)
    items = np.stack([np.arange(len(rows)), *(np.repeat(a, tiles) for a in (leaves, entry, pages, goes_on))], 1)
    last_chunk = np.empty(len(tokens), np.int64)
    last_chunk[tokens] = np.repeat((entry + pages - 1) // CHUNK, count)
    slots = _slots(groups, last_chunk[groups.tokens] + 1 - np.repeat(groups.chunk, groups.count))
    return TreePlan(
        _split(groups, every, own, ratio, block_m),
        shared,
        Tiles(rows, items.astype(np.int32)),
        slots,
        int(slots[:, 2].sum()),
    )


# ---- cascade -----------------------------------------------------------------------------------------


def _share(
    lists: Lists, groups: Groups, ratio: int, block_m: int, shared_m: int, num_slots: int | None
) -> tuple[Tiles, np.ndarray]:
    """Tiles of rows of several sequences over the chunks that their lists begin with alike, and the chunks from which
    on each group goes alone. Groups that fill a tile by themselves would save nothing, and those that share need slots
    for all their chunks."""
    own = groups.chunk
    rows, items, num_tiles = [], [], 0
    for members, first, end in _common(lists, groups, groups.count * ratio < shared_m):
        count = groups.count[members]
        together = -(-count.sum() * ratio // shared_m)
        saves = together < (-(-count * ratio // block_m)).sum() and len(np.unique(groups.seq[members])) > 1
        new = int(groups.num_chunks[members] @ count) if first == 0 else 0
        fits = num_slots is None or new <= num_slots
        if not (saves and fits and (own[members] == first).all()):
            continue
        tile_rows, tiles = rows_of(groups.tokens_of(members), count.sum(keepdims=True), ratio, shared_m)
        entries = np.array([first * CHUNK]), np.array([end * CHUNK])
        rows.append(tile_rows)
        items.append(_chunk_items(np.array([num_tiles]), tiles, groups.seq[members[:1]], *entries))
        num_tiles += len(tile_rows)
        num_slots = None if num_slots is None else num_slots - new
        own[members] = end
    return (Tiles(np.concatenate(rows), np.concatenate(items)) if rows else _no_tiles(shared_m)), own


def _no_tiles(block_m: int) -> Tiles:
    return Tiles(np.empty((0, block_m), np.int32), np.empty((0, 4), np.int32))


def _common(lists: Lists, groups: Groups, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
    """Groups [k >= 2] and the chunks [first, end) that their lists have in common, all of them visible; outer ones
    first."""
    full = groups.end // CHUNK  # chunks whose entries all lie within what a group may see
    waiting = [(np.flatnonzero(chosen), 0)]
    while waiting:
        members, first = waiting.pop()
        members = members[full[members] > first]
        if len(members) < 2:
            continue
        page = lists.ids[groups.seq[members], first * CHUNK]
        for alike in np.unique(page[_repeated(page)]):
            same = members[page == alike]
            end = _equal_chunks(lists, groups.seq[same], first, full[same])
            same, other = same[end > first], same[end <= first]
            waiting.append((other, first))
            if len(same) < 2:
                continue
            stop = int(end[end > first].min())
            yield same, first, stop
            waiting.append((same, stop))


def _repeated(x: np.ndarray) -> np.ndarray:
    """Which elements occur more than once."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return counts[inverse] > 1


def _equal_chunks(lists: Lists, seqs: np.ndarray, first: int, full: np.ndarray) -> np.ndarray:
    """[k] the chunk up to which each list is as that of the first sequence."""
    end = int(full[0])
    columns = slice(first * CHUNK, end * CHUNK)
    differ = np.zeros((len(seqs), end - first), bool)
    for part in (lists.ids, lists.base, lists.span):
        unequal = part[seqs, columns] != part[seqs[0], columns]
        differ |= unequal.reshape(len(seqs), end - first, CHUNK).any(2)
    return np.minimum(first + np.where(differ.any(1), differ.argmax(1), end - first), full)


def _ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """start[0], start[0] + 1, ... (count[0] numbers), then those of start[1], and so on."""
    total = np.cumsum(count)
    return np.arange(int(total[-1]) if len(total) else 0) - np.repeat(total - count - start, count)
