"""One forward over token trees: every node is plain decoding of its path, and a list that took a path is one that did.

Compared with torch.equal are logits, the bytes of keys and values, and the hidden states that lists keep.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from test_model import load
from tiny import ARCHS, write_tiny
from torch import Tensor

from csrc_triton.tree import token_tree
from polymodel.config import Weights
from polymodel.errors import Contaminated, KVFull
from polymodel.kv import Arena, PageList, check_lists
from polymodel.model import Model, Panel, commit_paths, forward, state_layout

VOCAB = 300
IDS = torch.randint(3, VOCAB, (700,), generator=torch.Generator().manual_seed(5)).tolist()
KEEP = (1, 2)
ONE, CHAIN, WIDE = [-1], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 1, 1, 2, 4, 7, 8]
SHAPES = (CHAIN, WIDE, ONE, [-1, 0, 0], [-1, 0, 1, 1, 2, 3, 3, 6])


@dataclass
class Subject:
    model: Model
    arena: Arena
    keep: tuple[int, ...] = ()

    def list_of(self, length: int) -> PageList:
        """A new list of the first `length` of IDS."""
        pages = PageList(self.arena, self.model.layout, self.keep, state_layout(self.model, self.arena))
        if length:
            forward(self.model, self.arena, Panel([pages], [IDS[:length]], "none"))
        return pages

    def states(self, pages: PageList) -> list[Tensor]:
        places = [pages.states_at(boundary, 0, len(pages)) for boundary in self.keep]
        assert None not in places, "states are lacking"
        return [self.arena.read_states(state_layout(self.model, self.arena), *place) for place in places if place]

    def assert_equal(self, pages: PageList, expected: PageList, what: str = "") -> None:
        assert (len(pages), pages.clean, pages.reserved) == (len(expected), expected.clean, 0), what
        assert_same_bits(pages.dump(), expected.dump(), what)
        for one, other in zip(self.states(pages), self.states(expected), strict=True):
            assert_same_bits(one, other, what)
        pages.check()


@dataclass
class Drafted:
    """A tree of tokens behind a list, and plain decoding of all of it: a list and logits for every node."""

    subject: Subject
    pages: PageList
    parent: Sequence[int]
    ids: list[int]
    plain: list[PageList] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        for token, above in zip(self.ids, self.parent, strict=True):
            pages = (self.pages if above < 0 else self.plain[above]).clone()
            panel = Panel([pages], [[token]])
            self.logits.append(forward(self.subject.model, self.subject.arena, panel))
            self.plain.append(pages)

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to this one; none for -1."""
        return [] if node < 0 else [*self.path(self.parent[node]), node]

    def after(self, node: int) -> PageList:
        return self.plain[node] if node >= 0 else self.pages

    def free(self) -> None:
        for pages in (self.pages, *self.plain):
            pages.free()


def draft(subject: Subject, lengths: Sequence[int], parents: Sequence[Sequence[int]], seed: int = 0) -> list[Drafted]:
    rng = random.Random(seed)
    return [
        Drafted(subject, subject.list_of(length), parent, [rng.randrange(3, VOCAB) for _ in parent])
        for length, parent in zip(lengths, parents, strict=True)
    ]


@contextmanager
def panel_over(drafts: Sequence[Drafted], lists: Sequence[PageList], **options: Any) -> Iterator[Panel]:
    """All nodes of all trees in one set of scratch pages."""
    with lists[0].scratch(sum(len(d.parent) for d in drafts)) as nodes:
        trees = [token_tree(d.parent) for d in drafts]
        yield Panel(lists, [d.ids for d in drafts], "all", trees=trees, nodes=nodes, **options)


def check(subject: Subject, drafts: Sequence[Drafted]) -> None:
    """Logits of all nodes; then every path of every tree, all trees at once, each time into clones of the lists."""
    model, arena = subject.model, subject.arena
    before = [(pages.dump(), subject.states(pages)) for pages in (d.pages for d in drafts)]
    expected = torch.cat([logits for d in drafts for logits in d.logits])
    for last in range(-1, max(len(d.parent) for d in drafts)):
        lists = [d.pages.clone() for d in drafts]
        ends = [last if last < len(d.parent) else -1 for d in drafts]
        with panel_over(drafts, lists) as panel:
            assert_same_bits(forward(model, arena, panel), expected, "logits")
            assert [len(pages) for pages in lists] == [len(d.pages) for d in drafts]
            commit_paths(model, arena, panel, [d.path(end) for d, end in zip(drafts, ends, strict=True)])
        for d, pages, end in zip(drafts, lists, ends, strict=True):
            subject.assert_equal(pages, d.after(end), f"{len(d.pages)} tokens, {d.parent}, node {end}")
            pages.free()
    for d, (data, states) in zip(drafts, before, strict=True):
        assert_same_bits(d.pages.dump(), data, "a clone's bytes")
        for one, other in zip(subject.states(d.pages), states, strict=True):
            assert_same_bits(one, other, "a clone's states")
    check_lists(arena, [pages for d in drafts for pages in (d.pages, *d.plain)])
    for d in drafts:
        d.free()
    assert arena.num_pages_used == 0
    arena.check()


def subject_of(folder: Path, arch: str, weights: Weights = "f32", keep: tuple[int, ...] = ()) -> Subject:
    path = folder / arch
    if not path.exists():
        write_tiny(path, arch, max_position_embeddings=1024)
    return Subject(*load(path, weights), keep)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def llama(folder: Path) -> Subject:
    return subject_of(folder, "llama")


# ---- logits and pages --------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_a_node_is_plain_decoding_of_its_path(folder: Path, arch: str) -> None:
    """Windows of 8 in mistral and gemma3, biases in qwen2, normed heads in qwen3 and gemma3."""
    subject = subject_of(folder, arch)
    check(subject, draft(subject, [63, 9, 64, 511, 60], SHAPES))


def test_nodes_in_int8(llama: Subject) -> None:
    layout = llama.arena.layout(3, 2, 16, torch.int8)
    coded = Subject(replace(llama.model, layout=layout), llama.arena)
    check(coded, draft(coded, [62, 64], [CHAIN, WIDE]))


def bushy(width: int, depth: int, seed: int) -> list[int]:
    """One root, and levels of so many nodes below any of the level before."""
    rng, parent, level = random.Random(seed), [-1], [0]
    for _ in range(depth - 1):
        above = sorted(rng.choices(level, k=width))
        level = list(range(len(parent), len(parent) + width))
        parent += above
    return parent


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["f32", "file", "bf16", "q8", "q4", "w8a8"])
@pytest.mark.parametrize(("arch", "threads"), [(a, i % 3 + 1) for i, a in enumerate(ARCHS)], indirect=["threads"])
def test_trees_of_any_width_and_depth(folder: Path, arch: str, weights: Weights, threads: int) -> None:
    lengths = [0, 1, 20, 58, *range(60, 67), 127, *range(506, 514), 576]
    subject = subject_of(folder, arch, weights, KEEP)
    for depth in range(1, 7):
        some = random.Random(depth).sample(lengths, 3)
        check(subject, draft(subject, some, [bushy(width, depth, depth) for width in (1, 2, 3)], depth))


@pytest.mark.parametrize("length", [2, pytest.param(62, marks=pytest.mark.slow)])
def test_a_node_is_plain_decoding_of_its_path_by_kernels(tmp_path: Path, length: int) -> None:
    pytest.importorskip("triton")
    from interpreter import interpreted

    path = write_tiny(tmp_path, "llama", num_hidden_layers=1, intermediate_size=64, num_attention_heads=2)
    with interpreted(races=False, sequential_dot=True):
        subject = Subject(*load(path), keep=(1,))
        drafts = draft(subject, [length], [[-1, 0, 0]])
        with panel_over(drafts, [drafts[0].pages]) as panel:
            assert_same_bits(forward(subject.model, subject.arena, panel), torch.cat(drafts[0].logits))
            commit_paths(subject.model, subject.arena, panel, [[0, 2]])
        subject.assert_equal(drafts[0].pages, drafts[0].after(2))


def test_trees_behind_nothing_and_across_a_chunk_of_keys(llama: Subject) -> None:
    check(llama, draft(llama, [0, 508, 512], [WIDE, CHAIN, WIDE], seed=1))


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_chain_of_appended_tokens_is_a_tree(folder: Path, arch: str) -> None:
    subject = subject_of(folder, arch)
    for length in (1, 510):
        (drafted,) = draft(subject, [length], [CHAIN])
        pages = drafted.pages.clone()
        logits = forward(subject.model, subject.arena, Panel([pages], [drafted.ids], "all"))
        subject.assert_equal(pages, drafted.after(5))
        assert_same_bits(logits, torch.cat(drafted.logits))
        pages.free()
        check(subject, [drafted])


def test_without_logits_the_nodes_are_stored_as_well(llama: Subject) -> None:
    drafts = draft(llama, [62], [WIDE])
    with panel_over(drafts, [drafts[0].pages]) as panel:
        assert forward(llama.model, llama.arena, replace(panel, wanted="none")).shape == (0, VOCAB)
        commit_paths(llama.model, llama.arena, panel, [drafts[0].path(9)])
    llama.assert_equal(drafts[0].pages, drafts[0].after(9))


@pytest.mark.parametrize("arch", ["mistral", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_list_goes_on_after_a_path(folder: Path, arch: str) -> None:
    """Round after round, the pages with other owners once in between."""
    subject = subject_of(folder, arch)
    pages, rng, lists = subject.list_of(55), random.Random(0), []
    for n in range(6):
        parent = [rng.randint(max(0, i - 3), i - 1) if i else -1 for i in range(8)]
        drafted = Drafted(subject, pages.clone(), parent, [rng.randrange(3, VOCAB) for _ in parent])
        with panel_over([drafted], [pages]) as panel:
            logits = forward(subject.model, subject.arena, panel)
            assert_same_bits(logits, torch.cat(drafted.logits))
            commit_paths(subject.model, subject.arena, panel, [drafted.path(7 - n % 3)])
        subject.assert_equal(pages, drafted.after(7 - n % 3))
        lists.append(drafted)
        if n % 2:
            lists.pop(0).free()
    assert len(pages) > 66


def test_a_list_that_lost_a_span_takes_a_path(llama: Subject) -> None:
    """It is not canonical, so nodes are rotated by other slots than their positions'."""
    lost = [llama.list_of(length) for length in (140, 30)]
    for pages in lost:
        pages.evict(5, 22)
    drafts = [Drafted(llama, pages, WIDE, IDS[20:30]) for pages in lost]
    lists = [pages.clone() for pages in lost]
    with panel_over(drafts, lists) as panel:
        assert_same_bits(forward(llama.model, llama.arena, panel), torch.cat([x for d in drafts for x in d.logits]))
        commit_paths(llama.model, llama.arena, panel, [d.path(9) for d in drafts])
    for d, pages in zip(drafts, lists, strict=True):
        assert (len(pages), pages.clean) == (len(d.after(9)), 5)
        next_logits = [forward(llama.model, llama.arena, Panel([p], [[7]])) for p in (pages, d.after(9))]
        assert_same_bits(*next_logits)


# ---- trees that grow ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["gemma3", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_tree_may_grow_level_by_level(folder: Path, arch: str) -> None:
    """Each forward computes a level more of every tree that has one."""
    subject = subject_of(folder, arch)
    model, arena = subject.model, subject.arena
    drafts = draft(subject, [62, 0, 509], [WIDE, [-1, 0, 0, 1, 2, 2, 3, 5], CHAIN])
    lists, stored = [d.pages.clone() for d in drafts], [0, 0, 0]
    starts = [0, 10, 18]
    with lists[0].scratch(24) as (page, slot):
        for ends in ([1, 1, 1], [4, 3, 2], [7, 6, 3], [8, 8, 4], [9, 9, 5], [10, 9, 6]):
            growing = [i for i in range(3) if stored[i] < min(ends[i], len(drafts[i].parent))]
            ends = [min(end, len(d.parent)) for end, d in zip(ends, drafts, strict=True)]
            nodes = torch.cat([torch.arange(starts[i], starts[i] + ends[i]) for i in growing])
            panel = Panel(
                [lists[i] for i in growing],
                [drafts[i].ids[stored[i] : ends[i]] for i in growing],
                "all",
                trees=[token_tree(drafts[i].parent[: ends[i]], stored[i]) for i in growing],
                nodes=(page[nodes], slot[nodes]),
            )
            expected = [row for i in growing for row in drafts[i].logits[stored[i] : ends[i]]]
            assert_same_bits(forward(model, arena, panel), torch.cat(expected), str(ends))
            stored = ends
        trees = [token_tree(d.parent, len(d.parent) - 1) for d in drafts]
        panel = Panel(lists, [d.ids[-1:] for d in drafts], trees=trees, nodes=(page, slot))
        commit_paths(model, arena, panel, [d.path(end) for d, end in zip(drafts, (9, 6, 3), strict=True)])
    for d, pages, end in zip(drafts, lists, (9, 6, 3), strict=True):
        subject.assert_equal(pages, d.after(end))


# ---- hidden states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_hidden_states_are_kept_as_decoding_keeps_them(folder: Path, arch: str) -> None:
    """Pages begin within a path, with it, and behind it."""
    subject = subject_of(folder, arch, keep=KEEP)
    check(subject, draft(subject, [62, 64, 0], SHAPES[:3]))


def test_a_list_that_keeps_nothing_goes_on_with_the_states_its_page_has(folder: Path) -> None:
    subject = subject_of(folder, "llama", keep=(2,))
    drafts = draft(subject, [10], [CHAIN])
    pages = drafts[0].pages.clone()
    pages.keep = ()
    with panel_over(drafts, [pages]) as panel:
        forward(subject.model, subject.arena, panel)
        assert list(panel.states) == [2] and panel.states[2].shape == (6, 64)
        commit_paths(subject.model, subject.arena, panel, [[0, 1, 2]])
    subject.assert_equal(pages, drafts[0].after(2))


def test_without_states_none_are_left(llama: Subject) -> None:
    drafts = draft(llama, [10], [CHAIN])
    with panel_over(drafts, [drafts[0].pages]) as panel:
        forward(llama.model, llama.arena, panel)
        assert panel.states == {}


def test_states_given_up_between_forward_and_commit_are_not_missed(folder: Path) -> None:
    subject = subject_of(folder, "llama", keep=KEEP)
    drafts = draft(subject, [10], [CHAIN])
    with panel_over(drafts, [drafts[0].pages]) as panel:
        forward(subject.model, subject.arena, panel)
        subject.arena.drop_states()
        commit_paths(subject.model, subject.arena, panel, [[0, 1, 2]])
    assert not subject.arena.has_states
    assert_same_bits(drafts[0].pages.dump(), drafts[0].after(2).dump())


def test_of_stored_nodes_no_states_are_known(folder: Path) -> None:
    subject = subject_of(folder, "llama", keep=KEEP)
    pages = subject.list_of(3)
    with pages.scratch(2) as nodes:
        for num_stored in (0, 1):
            trees = [token_tree([-1, 0][: num_stored + 1], num_stored)]
            panel = Panel([pages], [[7]], trees=trees, nodes=(nodes[0][: num_stored + 1], nodes[1][: num_stored + 1]))
            forward(subject.model, subject.arena, panel)
        with pytest.raises(AssertionError, match="states of stored nodes"):
            commit_paths(subject.model, subject.arena, panel, [[0, 1]])
    assert len(pages) == 3


# ---- what is not exact, and what is refused ----------------------------------------------------------


def test_what_is_not_exact_is_not_clean_and_leaves_no_states(folder: Path) -> None:
    subject = subject_of(folder, "llama", keep=KEEP)
    model, arena = subject.model, subject.arena
    chain, tree = subject.list_of(60), subject.list_of(60)
    (drafted,) = draft(subject, [60], [CHAIN])
    forward(model, arena, Panel([chain], [drafted.ids], is_exact=False))
    with panel_over([drafted], [tree], is_exact=False) as panel:
        forward(model, arena, panel)
        assert panel.states == {}
        commit_paths(model, arena, panel, [[0, 1, 2, 3, 4, 5]])
    for pages in (chain, tree):
        assert (len(pages), pages.clean) == (66, 60)
        assert [sorted(arena.states(page)) for page in pages.pages] == [[1, 2], []]
        with pytest.raises(Contaminated):
            pages.dump()
        forward(model, arena, Panel([pages], [[7]]))
        assert pages.clean == 60
        pages.rollback(7)
        forward(model, arena, Panel([pages], [drafted.ids], "none"))
        subject.assert_equal(pages, drafted.after(5), "decoded anew")


def test_a_forward_that_finds_no_room_changes_nothing(llama: Subject) -> None:
    page_bytes = llama.model.layout.page_bytes
    arena = Arena(2 * 8 * page_bytes, 8 * page_bytes)
    layout = arena.layout(3, 2, 16)
    small = Subject(replace(llama.model, layout=layout), arena)
    lists = [small.list_of(n) for n in (60, 63, 64)]
    lists[1].reserve(1)
    before = [pages.dump() for pages in lists]
    with lists[0].scratch(18) as nodes, lists[0].scratch(1):
        trees = [token_tree(CHAIN) for _ in lists]
        used = arena.num_pages_used
        with pytest.raises(KVFull, match="1 KV pages"):
            small.arena.allocate(layout, arena.num_free(layout) - 2)
            forward(small.model, arena, Panel(lists, [IDS[:6]] * 3, trees=trees, nodes=nodes))
        assert arena.num_free(layout) == 2
        assert [(len(pages), pages.reserved, len(pages.pages)) for pages in lists] == [
            (60, 0, 1),
            (63, 1, 1),
            (64, 0, 1),
        ]
        assert used + 1 <= arena.num_pages_used
    for pages, data in zip(lists, before, strict=True):
        assert_same_bits(pages.dump(), data)


@pytest.mark.parametrize("path", [[1], [0, 2], [0, 1, 1], [0, 1, 2, 0]], ids=str)
def test_what_is_no_path_is_refused_and_changes_nothing(llama: Subject, path: list[int]) -> None:
    drafts = draft(llama, [10, 10], [[-1, 0, 1]] * 2)
    with panel_over(drafts, lists := [d.pages for d in drafts]) as panel:
        forward(llama.model, llama.arena, panel)
        with pytest.raises(AssertionError, match="a path"):
            commit_paths(llama.model, llama.arena, panel, [[0], path])
    assert [len(pages) for pages in lists] == [10, 10]
