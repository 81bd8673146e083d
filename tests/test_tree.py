"""csrc_triton/tree.py: what a tree is, where its nodes stand, and that a node is plain decoding of its path.

Unless a test says otherwise every byte of the arena that no token was stored in is NaN, page id 0 apart.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from test_attention import EVICTED, FAR, PIECES, SLACK, TRIMMED, Case, Entry, make, rope, table_of
from torch import Tensor

from csrc_triton.attention import PageTable, paged_attention
from csrc_triton.cpu_attention import PAGE, Workspace
from csrc_triton.pages import append_kv
from csrc_triton.tree import (
    Tree,
    TreeError,
    computed_nodes,
    rotation_slots,
    tails,
    token_tree,
    tree_attention,
    tree_attention_ref,
)

BRANCHES = [-1, 0, 0, 1, 1, 2, -1, 6, 7, 7, 3]  # two roots, five leaves, five levels
CHAIN = list(range(-1, 8))
NO_COMMITTED: list[Entry] = []


def random_parents(num_nodes: int, seed: int = 0) -> list[int]:
    """Deep and wide ones, in any order that puts parents first."""
    rng = random.Random(seed)
    return [rng.randint(max(-1, i - rng.choice([1, 1, 2, 8])), i - 1) for i in range(num_nodes)]


@dataclass
class Drafted:
    """Committed sequences and a tree behind each; nodes lie in scratch pages, in no order."""

    case: Case
    trees: list[Tree]
    q: Tensor  # [T, Hq, D]
    k: Tensor
    v: Tensor
    table: PageTable
    page: Tensor  # [T] int32
    slot: Tensor
    scratch: list[int]  # pages for plain decoding

    def run(self, **options: Any) -> Tensor:
        return tree_attention(
            self.q, self.case.arena, self.case.layout, 0, self.table, self.trees, self.page, self.slot,
            self.case.rope, **{"scale": self.case.scale, **options},
        )  # fmt: skip

    def exact(self, **options: Any) -> Tensor:
        return tree_attention_ref(
            self.q, self.case.arena, self.case.layout, 0, self.table, [t.parent.tolist() for t in self.trees],
            self.page, self.slot, self.case.rope, scale=self.case.scale, **options,
        )  # fmt: skip

    def rows(self, s: int) -> slice:
        start = sum(len(t.parent) for t in self.trees[:s])
        return slice(start, start + len(self.trees[s].parent))

    def store(self) -> None:
        at = rotation_slots(self.table, self.trees)
        case = self.case
        append_kv(self.k, self.v, case.arena, case.layout, 0, self.page, self.slot, at, case.rope)

    def grown(self, steps: Sequence[Sequence[int]], **options: Any) -> Tensor:
        """Rows of trees that grow: step by step, up to so many nodes each. What is not stored yet is NaN."""
        case, out = self.case, torch.full_like(self.q, math.nan)
        case.layout.blocks(case.arena)[self.page.unique().long()] = 0xFF
        stored = [0] * len(self.trees)
        for ends in steps:
            parents = [t.parent[:end].tolist() for t, end in zip(self.trees, ends, strict=True)]
            trees = [token_tree(parent, n) for parent, n in zip(parents, stored, strict=True)]
            every = torch.cat([torch.arange(self.rows(s).start, self.rows(s).start + n) for s, n in enumerate(ends)])
            rows = every[computed_nodes(trees)]
            append_kv(
                self.k[rows], self.v[rows], case.arena, case.layout, 0,
                self.page[rows], self.slot[rows], rotation_slots(self.table, trees), case.rope,
            )  # fmt: skip
            given = self.q[rows], case.arena, case.layout, 0, self.table
            places = self.page[every], self.slot[every], case.rope
            out[rows] = tree_attention(*given, trees, *places, scale=case.scale, **options)
            exact = tree_attention_ref(*given, parents, *places, scale=case.scale, num_stored=stored, **options)
            assert (out[rows] - exact).abs().max() < SLACK
            stored = list(ends)
        return out

    def decoded(self, s: int, **options: Any) -> Tensor:
        """Rows of a sequence's nodes, every path stored as decoding would, every node a row of a list of its own."""
        case, nodes = self.case, self.rows(s)
        committed = list(zip(case.pages[s], *zip(*case.entries[s], strict=True), strict=True)) if case.pages[s] else []
        out = torch.empty_like(self.q[nodes])
        for path in self.trees[s].paths:
            path = path[path >= 0].tolist()
            entries = list(committed)
            blocks = case.layout.blocks(case.arena)
            fresh = list(self.scratch)
            if entries and entries[-1][3] < PAGE:
                blocks[fresh[0]] = blocks[entries[-1][0]]
                entries[-1] = (fresh.pop(0), *entries[-1][1:])
            lists, places = [], []
            for _ in path:
                if not entries or entries[-1][3] == PAGE:
                    base = entries[-1][1] + PAGE if entries else 0
                    entries.append((fresh.pop(0), base, 0, 0))
                page, base, lo, hi = entries[-1]
                places.append((page, hi, base + hi))
                entries[-1] = (page, base, lo, hi + 1)
                lists.append(list(entries))
            rows = nodes.start + torch.tensor(path)
            page, slot, pos = torch.tensor(places, dtype=torch.int32).t().contiguous()
            append_kv(self.k[rows], self.v[rows], case.arena, case.layout, 0, page, slot, slot, case.rope)
            cu_rows = torch.arange(len(path) + 1, dtype=torch.int32)
            out[path] = paged_attention(
                self.q[rows], case.arena, case.layout, 0, table_of(lists), cu_rows, pos, case.rope,
                scale=case.scale, **options,
            )  # fmt: skip
        return out

    def check(self, what: str = "", **options: Any) -> Tensor:
        """Every node is plain decoding of its path."""
        y = self.run(**options)
        for s in range(len(self.trees)):
            assert_same_bits(y[self.rows(s)], self.decoded(s, **options), f"{what} sequence {s}")
        return y


def draft(
    heads: tuple[int, int, int],
    sequences: Sequence[int | list[Entry]],
    parents: Sequence[Sequence[int]],
    *,
    size: float = 1.0,
    seed: int = 0,
    **options: Any,
) -> Drafted:
    """size: of the nodes' keys, beside 1 of the committed ones."""
    num_scratch = sum(-(-len(p) // PAGE) for p in parents)
    case = make(heads, sequences, spare=num_scratch + 2, seed=seed, **options)
    trees = [token_tree(p) for p in parents]
    gen, rng = torch.Generator().manual_seed(seed + 1), random.Random(seed)
    total = sum(len(p) for p in parents)
    q, k, v = (torch.randn(total, count, heads[2], generator=gen) for count in (heads[0], heads[1], heads[1]))
    places = []
    for p in parents:
        pages = [case.spare.pop() for _ in range(-(-len(p) // PAGE))]
        places += rng.sample(list(itertools.product(pages, range(PAGE))), len(p))
    page, slot = torch.tensor(places, dtype=torch.int32).unbind(1)
    committed = [
        [(page, *entry) for page, entry in zip(pages, entries, strict=True)]
        for pages, entries in zip(case.pages, case.entries, strict=True)
    ]
    table = table_of([entries or [(0, 0, 0, 0)] for entries in committed])
    table.n[:] = torch.tensor([len(entries) for entries in committed])
    drafted = Drafted(case, trees, q, size * k, v, table, page.contiguous(), slot.contiguous(), case.spare)
    drafted.store()
    return drafted


def assert_values(drafted: Drafted, slack: float = SLACK, **options: Any) -> None:
    error = (drafted.run(**options) - drafted.exact(**options)).abs().max().item()
    assert error < slack, f"error {error:.3g} against float64, expected at most {slack:.3g}"


# ---- trees -------------------------------------------------------------------------------------------


def test_a_tree_knows_its_depths_leaves_paths_and_owners() -> None:
    t = token_tree(BRANCHES)
    assert t.depth.tolist() == [0, 1, 1, 2, 2, 2, 0, 1, 2, 2, 3]
    assert t.leaves.tolist() == [4, 5, 8, 9, 10]
    assert t.num_levels == 4
    assert t.paths.tolist() == [[0, 1, 4, -1], [0, 2, 5, -1], [6, 7, 8, -1], [6, 7, 9, -1], [0, 1, 3, 10]]
    assert t.owner.tolist() == [0, 0, 1, 4, 0, 1, 2, 2, 2, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_paths_climb_from_every_leaf(seed: int) -> None:
    parents = random_parents(60, seed)
    t = token_tree(torch.tensor(parents))
    assert t.leaves.tolist() == [i for i in range(60) if i not in parents]
    for leaf, path in zip(t.leaves.tolist(), t.paths.tolist(), strict=True):
        climbed = [leaf]
        while parents[climbed[-1]] >= 0:
            climbed.append(parents[climbed[-1]])
        assert path == climbed[::-1] + [-1] * (t.num_levels - len(climbed))
    for node in range(60):
        assert t.depth[node] == (t.depth[parents[node]] + 1 if parents[node] >= 0 else 0)
        assert t.owner[node] == next(i for i, path in enumerate(t.paths.tolist()) if node in path)


@pytest.mark.parametrize(
    ("parent", "message"),
    [
        ([], r"0 nodes, expected 1\.\.256"),
        ([-1] * 257, r"257 nodes, expected 1\.\.256"),
        ([-2], r"node 0 has parent -2, expected -1 or an earlier node, of 1"),
        ([-1, 0, 3], r"node 2 has parent 3, expected -1 or an earlier node, of 3"),
        ([-1, 1], r"node 1 has parent 1 and lies on a cycle"),
        ([-1, 2, 3, 1], r"node 1 has parent 2 and lies on a cycle"),
        ([-1, 2, 0], r"node 1 has parent 2, an edge forward"),
        ([-1, 2, 3, 2], r"node 1 has parent 2, an edge forward"),
        (list(range(-1, 64)), r"node 64 stands in level 65, expected at most 64"),
        (torch.zeros(2, 2, dtype=torch.int32), r"parent is \(2, 2\), expected \[P\]"),
    ],
    ids=str,
)
def test_what_is_no_tree_is_refused(parent: Any, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        token_tree(parent)
    for num_stored in (-1, 3, 4):
        with pytest.raises(TreeError, match=rf"num_stored is {num_stored}, expected 0\.\.2"):
            token_tree([-1, 0, 0], num_stored)
    assert issubclass(TreeError, ValueError)


def test_the_largest_trees_pass() -> None:
    assert token_tree(list(range(-1, 63))).num_levels == 64
    assert len(token_tree([-1] * 256).leaves) == 256
    assert token_tree([*range(-1, 63), *range(62, 254)][:64] + [62] * 192).num_levels == 64


# ---- tails -------------------------------------------------------------------------------------------


def test_tails_lay_committed_slots_and_paths_into_two_tiles() -> None:
    lists = [[(40, 0, 0, 64), (41, 64, 3, 62)], [(50, 0, 0, 64)], []]
    table = table_of([*lists[:2], [(0, 0, 0, 0)]])
    table.n[2] = 0
    parents = [[-1, 0, 1, 0], [-1, 0], [-1, -1]]
    page, slot = (torch.arange(first, first + 8, dtype=torch.int32) for first in (70, 20))
    t = tails(table, [token_tree(p) for p in parents], page, slot)
    assert t.seq.tolist() == [0, 0, 1, 2, 2]
    assert t.entry.tolist() == [1, 1, 1, 0, 0]
    assert t.base.tolist() == [64, 64, 64, 0, 0]
    assert t.position.tolist() == [126, 127, 128, 127, 64, 65, 0, 0]
    assert t.leaf.tolist() == [0, 0, 0, 1, 2, 2, 3, 4]
    expected_page, expected_slot = torch.full((5, 128), -1), torch.full((5, 128), -1)
    expected_page[:2, 3:62], expected_slot[:2, 3:62] = 41, torch.arange(3, 62)
    for leaf, at, nodes in ((0, 62, [0, 1, 2]), (1, 62, [0, 3]), (2, 0, [4, 5]), (3, 0, [6]), (4, 0, [7])):
        for i, node in enumerate(nodes):
            expected_page[leaf, at + i], expected_slot[leaf, at + i] = 70 + node, 20 + node
    assert torch.equal(t.page.flatten(1), expected_page.int())
    assert torch.equal(t.slot.flatten(1), expected_slot.int())
    assert t.page.shape == t.slot.shape == (5, 2, 64)
    assert {x.dtype for x in vars(t).values()} == {torch.int32}
    assert rotation_slots(table, [token_tree(p) for p in parents]).tolist() == [62, 63, 0, 63, 0, 1, 0, 0]


def test_rows_are_those_of_nodes_that_are_not_stored() -> None:
    table = table_of([[(40, 0, 0, 62)], [(50, 0, 0, 64)]])
    trees = [token_tree([-1, 0, 1, 0], 2), token_tree([-1, 0, 0], 1)]
    page, slot = (torch.arange(first, first + 7, dtype=torch.int32) for first in (70, 20))
    t = tails(table, trees, page, slot)
    assert [tree.num_rows for tree in trees] == [2, 2]
    assert computed_nodes(trees).tolist() == [2, 3, 5, 6]
    assert t.position.tolist() == [64, 63, 65, 65]
    assert t.leaf.tolist() == [0, 1, 2, 3]
    assert rotation_slots(table, trees).tolist() == [0, 63, 1, 1]
    whole = tails(table, [token_tree(tree.parent.tolist()) for tree in trees], page, slot)
    assert all(torch.equal(getattr(t, name), getattr(whole, name)) for name in ("seq", "entry", "base", "page", "slot"))


# ---- values ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "options",
    [{}, *({"window": w} for w in (1, 63, 64, 65, 128)), {"softcap": 50.0}, {"softcap": 5.0, "window": 65}],
    ids=str,
)
@pytest.mark.parametrize("heads", [(4, 4, 8), (9, 3, 64), (8, 2, 128), (5, 1, 80)], ids=str)
def test_values(heads: tuple[int, int, int], options: dict[str, Any]) -> None:
    assert_values(draft(heads, [130, NO_COMMITTED, 63], [BRANCHES, CHAIN, random_parents(12)]), **options)


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_values_with_sinks(softcap: float | None) -> None:
    drafted = draft((8, 2, 64), [100, NO_COMMITTED], [BRANCHES, CHAIN])
    for sinks in (torch.randn(8), torch.full((8,), 30.0), torch.full((8,), -30.0)):
        assert_values(drafted, sinks=sinks, softcap=softcap)


@pytest.mark.parametrize("entries", [EVICTED, TRIMMED, PIECES], ids=["evicted", "trimmed", "pieces"])
def test_values_behind_lists_that_are_not_canonical(entries: list[Entry]) -> None:
    drafted = draft((4, 2, 16), [entries, entries], [BRANCHES, random_parents(40)])
    for window in (None, 1, 20, 64):
        assert_values(drafted, window=window)


def test_values_far_from_the_start() -> None:
    table = rope(64, max_position=131072)
    last = [(131072 - 64 * i, 0, 64) for i in range(4, 1, -1)] + [(131072 - 64, 0, 30)]
    assert_values(draft((4, 2, 64), [last, [(FAR, 0, 64)]], [BRANCHES, BRANCHES], table=table))


def test_values_with_yarn_factor_and_partial_rotation() -> None:
    assert_values(draft((4, 2, 80), [100], [random_parents(20)], table=rope(20, 1.3)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float16], ids=str)
def test_values_of_other_dtypes(dtype: torch.dtype) -> None:
    """The reference reads the same codes, so no more than float32's roundings is between them."""
    drafted = draft((8, 2, 64), [130, 63], [BRANCHES, random_parents(12)], dtype=dtype)
    assert_values(drafted)
    assert_values(drafted, window=65, softcap=50.0, sinks=torch.randn(8))


# ---- exact -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "step"), [(1, 1), (3, 7)], indirect=["threads"])
def test_a_node_is_decoding_of_its_path_behind_any_prefix(threads: int, step: int) -> None:
    """Every rest of the last page, and of the last chunk; the trees of several prefixes in one call."""
    prefixes = [0, 1, 63, 64, *range(448, 513, step), 1024]
    for i in range(0, len(prefixes), 5):
        some = prefixes[i : i + 5]
        parents = [random_parents(14, p) for p in some]
        draft((3, 1, 16), [p or NO_COMMITTED for p in some], parents, size=20.0).check(f"prefixes {some}")


SINKS = torch.tensor([0.3, -2.0, 4.0])


@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "threads"),
    [
        *((window, None, None, i % 2 * 2 + 1) for i, window in enumerate((None, 1, 63, 64, 65, 128, 600))),
        (None, 50.0, None, 1),
        (None, 50.0, None, 3),
        (None, None, SINKS, 1),
        (65, 2.0, SINKS, 3),
    ],
    indirect=["threads"],
)
def test_a_node_is_decoding_of_its_path(
    window: int | None, softcap: float | None, sinks: Tensor | None, threads: int
) -> None:
    prefixes: list[int | list[Entry]] = [NO_COMMITTED, 64, 500, 511, 512, 700]
    parents = [random_parents(20, i) for i in range(6)]
    draft((3, 1, 64), prefixes, parents, size=20.0).check(window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("threads", [2, 3], indirect=True)
def test_a_node_is_decoding_of_its_path_with_more_threads(threads: int) -> None:
    drafted = draft((9, 3, 64), [500, 63], [BRANCHES, BRANCHES], size=20.0)
    drafted.check()
    drafted.check(softcap=30.0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_node_is_decoding_of_its_path_in_other_dtypes(dtype: torch.dtype) -> None:
    drafted = draft((4, 2, 64), [NO_COMMITTED, 63, 505], [random_parents(20, i) for i in range(3)], dtype=dtype)
    drafted.check()
    drafted.check(window=64, softcap=30.0, sinks=torch.randn(4))


@pytest.mark.parametrize("window", [None, 40, 64])
@pytest.mark.parametrize("entries", [EVICTED, TRIMMED, PIECES], ids=["evicted", "trimmed", "pieces"])
def test_a_node_is_decoding_of_its_path_behind_other_lists(entries: list[Entry], window: int | None) -> None:
    draft((4, 2, 64), [entries, 70, entries], [random_parents(20, i) for i in range(3)]).check(window=window)


@pytest.mark.parametrize("dim", [8, 80, 128, 256])
def test_a_node_is_decoding_of_its_path_at_any_head_dim(dim: int) -> None:
    drafted = draft((4, 2, dim), [60, 510], [random_parents(16), BRANCHES])
    drafted.check()
    drafted.check(softcap=20.0)


def test_the_widest_and_the_deepest_tree() -> None:
    wide = [-1] * 100 + list(range(100)) + [7] * 56
    deep = [*range(-1, 63), *range(0, 60, 10)]
    draft((3, 1, 16), [510, 511, 448], [wide, deep, deep]).check()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "threads"), [(i, i % 3 + 1) for i in range(9)], indirect=["threads"])
def test_random_trees(seed: int, threads: int) -> None:
    rng = random.Random(seed)
    heads = rng.choice([(9, 3, 64), (4, 4, 80), (8, 2, 128), (14, 2, 64)])
    prefixes = [rng.randint(1, 1300) for _ in range(3)]
    drafted = draft(heads, prefixes, [random_parents(rng.randint(1, 90), rng.random()) for _ in prefixes], size=20.0)
    drafted.check()
    drafted.check(window=64, softcap=30.0)
    drafted.check(window=rng.randint(1, 800))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.int8, {"window": 3}),
        (torch.float32, {"window": 64, "sinks": SINKS[[0, 1, 2, 0]]}),
        (torch.int8, {"softcap": 9.0}),
    ],
)
def test_a_tree_may_grow(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Level by level, node by node, or a part at a time, where some leaves have no rows: the bits of the whole tree."""
    levels = [-1, -1, 0, 0, 1, 2, 2, 4, 5, 6, 7, 7]
    prefixes: list[int | list[Entry]] = [NO_COMMITTED, 63, 64, 511, 60, TRIMMED]
    drafted = draft((4, 2, 16), prefixes, [levels, BRANCHES, levels, levels, CHAIN, BRANCHES], dtype=dtype)
    whole = drafted.check(**options)
    counts = [len(t.parent) for t in drafted.trees]
    for steps in (
        [[2, 1, 2, 2, 1, 1], [5, 3, 5, 5, 2, 3], [8, 6, 8, 8, 3, 7], counts],
        [*([i] * len(counts) for i in range(1, 8)), counts],
        [[n - 1 for n in counts], counts],
    ):
        assert_same_bits(drafted.grown(steps, **options), whole, str(steps))


@pytest.mark.parametrize("options", [{}, {"window": 70}, {"softcap": 20.0}], ids=str)
def test_a_chain_is_a_tree(options: dict[str, Any]) -> None:
    drafted = draft((9, 3, 64), [500, 62], [range(-1, 30), CHAIN])
    case = drafted.case
    y = drafted.run(**options)
    for s, prefix in ((0, 500), (1, 62)):
        entries = [(page, *entry) for page, entry in zip(case.pages[s], case.entries[s], strict=True)]
        rows, count = drafted.rows(s), len(drafted.trees[s].parent)
        hi = entries[-1][3]
        entries[-1] = (*entries[-1][:3], min(PAGE, hi + count))
        if hi + count > PAGE:
            entries.append((drafted.scratch[0], entries[-1][1] + PAGE, 0, hi + count - PAGE))
        pos = torch.arange(prefix, prefix + count, dtype=torch.int32)
        page = torch.tensor([entries[p // PAGE][0] for p in pos.tolist()], dtype=torch.int32)
        at = (case.arena, case.layout, 0)
        append_kv(drafted.k[rows], drafted.v[rows], *at, page, pos % PAGE, pos % PAGE, case.rope)
        cu_rows = torch.tensor([0, count], dtype=torch.int32)
        chain = paged_attention(
            drafted.q[rows], *at, table_of([entries]), cu_rows, pos, case.rope, scale=case.scale, **options
        )
        assert_same_bits(y[rows], chain)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_siblings_and_descendants_change_nothing(softcap: float | None) -> None:
    """Keys that would take all the weight, values that would show; on paths of others NaN too."""
    t = token_tree(BRANCHES)
    drafted = draft((4, 2, 16), [100], [BRANCHES])
    k, v, expected = drafted.k, drafted.v, drafted.run(softcap=softcap)
    for leaf, path in enumerate(t.paths):
        path = torch.from_numpy(path[path >= 0]).long()
        off_path = torch.ones(len(BRANCHES), 1, 1, dtype=torch.bool).index_fill_(0, path, False)
        drafted.k, drafted.v = k.masked_fill(off_path, math.nan), v.masked_fill(off_path, math.nan)
        drafted.store()
        own = path[t.owner[path] == leaf]
        assert_same_bits(drafted.run(softcap=softcap)[own], expected[own], "NaN")
        for node in path.tolist():
            above = torch.ones(len(BRANCHES), 1, 1, dtype=torch.bool).index_fill_(0, path[: t.depth[node] + 1], False)
            drafted.k, drafted.v = k.where(~above, 1e9 * k), v.masked_fill(above, math.inf)
            drafted.store()
            assert_same_bits(drafted.run(softcap=softcap)[node], expected[node], "huge")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_unused_slots_and_pages_change_nothing(dtype: torch.dtype) -> None:
    runs = []
    for fill in (math.nan, 0.0, math.inf, 3.0):
        drafted = draft((4, 2, 16), [EVICTED, 70, NO_COMMITTED], [BRANCHES, CHAIN, BRANCHES], dtype=dtype, fill=fill)
        runs.append(drafted.run())
    assert runs[0].isfinite().all()
    for y in runs[1:]:
        assert_same_bits(y, runs[0])


def test_a_batch_is_each_alone_wherever_nodes_lie() -> None:
    parents = [random_parents(n, n) for n in (1, 9, 30)]
    together = draft((8, 2, 64), [40, 512, 130], parents)
    y = together.run()
    for s in range(3):
        rows = together.rows(s)
        alone = tree_attention(
            together.q[rows], together.case.arena, together.case.layout, 0,
            PageTable(*(t[s : s + 1] for t in vars(together.table).values())), [together.trees[s]],
            together.page[rows], together.slot[rows], together.case.rope, scale=together.case.scale,
        )  # fmt: skip
        assert_same_bits(alone, y[rows])
    assert_same_bits(draft((8, 2, 64), [40, 512, 130], parents, shuffle=False).run(), y)


def test_layers_share_a_workspace() -> None:
    drafted = draft((4, 2, 16), [100, 30], [BRANCHES, CHAIN])
    space = Workspace()
    for options in ({}, {"window": 30}, {"softcap": 3.0}, {"window": 30, "sinks": torch.randn(4)}):
        expected = drafted.run(**options)
        for _ in range(2):
            assert_same_bits(drafted.run(workspace=space, **options), expected)
    out = torch.empty_like(expected)
    assert drafted.run(out=out, **options) is out
    assert_same_bits(out, expected)


# ---- refusals ----------------------------------------------------------------------------------------


def test_tree_attention_refuses() -> None:
    drafted = draft((4, 2, 16), [70, 3], [BRANCHES, CHAIN])
    q, page, trees = drafted.q, drafted.page, drafted.trees
    for name, bad, message in (
        ("q", q[..., :8], r"tree_attention: q is \(20, 4, 8\), expected \[T, a multiple of 2, 16\]"),
        ("q", q[1:], r"q has 19 rows, expected one for each of 20 positions"),
        (
            "page",
            page[1:],
            r"node_page is torch.int32 \(19,\) and node_slot torch.int32 \(20,\), expected int32 \(20,\)",
        ),
        ("page", page.long(), r"node_page is torch.int64"),
        ("trees", trees[:1], r"1 trees for 2 page lists"),
        ("trees", [token_tree(BRANCHES, 4), trees[1]], r"q has 20 rows, expected one for each of 16 positions"),
        ("q", q.clone().requires_grad_(), r"requires grad"),
    ):
        before = getattr(drafted, name)
        setattr(drafted, name, bad)
        with pytest.raises(ValueError, match=message):
            drafted.run()
        setattr(drafted, name, before)
    for options, message in (
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"softcap": 0.0}, "softcap must be above 0 and finite, got 0.0"),
        ({"sinks": torch.zeros(3)}, r"sinks are torch.float32 \(3,\) .* expected contiguous float32 \(4,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            drafted.run(**options)
