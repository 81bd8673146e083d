"""Drafts of a model: chains are its own plain decoding, and every node of a tree is that of its path.

Compared with torch.equal are logits and the bytes of keys and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path

import pytest
import torch
from checks import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import load
from tiny import write_tiny
from torch import Tensor

from polymodel.config import Weights
from polymodel.growth import RANK_RATES, Line, Ranks, Tree, grow_chains, grow_trees, read, tree_shape
from polymodel.kv import Arena, PageList, check_lists
from polymodel.model import Model, Panel, forward
from polymodel.proposal import best_tree, checked
from polymodel.sample import Probs, Sampler, Sampling

VOCAB = 300
IDS = torch.randint(3, VOCAB, (200,), generator=torch.Generator().manual_seed(6)).tolist()
LENGTHS = (1, 62, 9, 130, 64)  # a page ends within a draft, with the pending token, and behind it
SAMPLED = Sampling(temperature=0.8, seed=7)
REJECTION = replace(SAMPLED, acceptance="rejection", top_k=50)
PENALISED = Sampling(repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={9: 8.0})


@dataclass
class Drafter:
    """A model, and a record of its forwards."""

    model: Model
    arena: Arena
    panels: list[Panel] = field(default_factory=list)
    rows: dict[PageList, list[Tensor]] = field(default_factory=dict)  # logits of every row over trees
    bad: int = -1  # after this token all logits are NaN

    def run(self, panel: Panel) -> Tensor:
        self.panels.append(panel)
        logits = forward(self.model, self.arena, panel)
        last = [ids[-1] for ids in panel.ids] if panel.wanted == "last" else [i for ids in panel.ids for i in ids]
        logits = logits.masked_fill((torch.tensor(last) == self.bad)[:, None], nan)
        if panel.trees:
            parts = logits.split([len(ids) for ids in panel.ids])
            for pages, part in zip(panel.lists, parts, strict=True):
                self.rows.setdefault(pages, []).extend(part)
        return logits

    def pages(self, tokens: Sequence[int] = ()) -> PageList:
        """A new list of these tokens, stored by one forward."""
        pages = PageList(self.arena, self.model.layout)
        if tokens:
            forward(self.model, self.arena, Panel([pages], [tokens], "none"))
        return pages

    def line(
        self,
        tokens: list[int],
        count: int,
        sampling: Sampling | None = None,
        num_read: int = 0,
        vocab_size: int = VOCAB,
    ) -> Line:
        """num_read: tokens that the drafter's pages hold already."""
        sampler = Sampler(sampling or Sampling(), len(tokens))
        return Line(list(tokens), sampler, self.pages(tokens[:num_read]), True, count, vocab_size)

    def decoded(self, line: Line, count: int) -> tuple[list[int], list[Probs | None]]:
        """What plain decoding by the drafter gives, token by token in a fresh list, and what each was drawn from."""
        pages, sampler = PageList(self.arena, self.model.layout), Sampler(line.sampler.sampling, len(line.tokens))
        tokens, found = list(line.tokens), []
        for _ in range(count):
            logits = forward(self.model, self.arena, Panel([pages], [tokens[len(pages) :]]))[0]
            token, probs = sampler.draft(logits, tokens)
            if sampler.sampling.is_argmax:
                assert token == int(logits.argmax())
            tokens.append(token)
            found.append(probs)
        pages.free()
        return tokens[len(line.tokens) :], found

    def assert_stored(self, pages: PageList, tokens: Sequence[int], what: str = "") -> None:
        """As plain decoding of the tokens stores them."""
        expected = self.pages(tokens)
        assert (len(pages), pages.clean) == (len(tokens), len(tokens)), what
        assert_same_bits(pages.dump(), expected.dump(), what)
        expected.free()
        pages.check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


def drafter_of(folder: Path, arch: str, weights: Weights = "f32") -> Drafter:
    path = folder / arch
    if not path.exists():
        write_tiny(path, arch)
    return Drafter(*load(path, weights))


@pytest.fixture
def llama(folder: Path) -> Drafter:
    return drafter_of(folder, "llama")


def free(drafter: Drafter, lines: Sequence[Line]) -> None:
    """All pages are those of the lines' lists."""
    check_lists(drafter.arena, [line.pages for line in lines])
    for line in lines:
        line.pages.free()
    assert drafter.arena.num_pages_used == 0
    drafter.arena.check()


# ---- chains ------------------------------------------------------------------------------------------


def grown(drafter: Drafter, lines: Sequence[Line]) -> Sequence[Line]:
    grow_chains(lines, read(lines, drafter.run), drafter.run)
    return lines


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3"])
def test_chains_of_several_lines_are_greedy_decoding_of_each(folder: Path, arch: str) -> None:
    """Windows of 8 in mistral and gemma3. Lines want different numbers of tokens, and have read different parts."""
    drafter, counts = drafter_of(folder, arch), (4, 6, 1, 3, 5)
    read_before = (0, 61, 3, 0, 62)
    lines = [
        drafter.line(IDS[i : i + n], count, num_read=num_read)
        for i, (n, count, num_read) in enumerate(zip(LENGTHS, counts, read_before, strict=True))
    ]
    grown(drafter, lines)
    assert [sum(map(len, panel.ids)) for panel in drafter.panels] == [1 + 1 + 6 + 130 + 2, 4, 4, 3, 2, 1]
    for line, count in zip(lines, counts, strict=True):
        assert line.chain == drafter.decoded(line, count)[0] and line.probs == [None] * count
        assert line.base == len(line.tokens) and line.is_sound
        drafter.assert_stored(line.pages, line.tokens + line.chain[:-1], f"{len(line.tokens)} tokens")
    assert len({token for line in lines for token in line.chain}) > 10
    free(drafter, lines)


@pytest.mark.parametrize("sampling", [SAMPLED, REJECTION, PENALISED], ids=["sampled", "rejection", "penalised"])
def test_chains_are_drawn_as_the_request_samples_alone_and_in_company(llama: Drafter, sampling: Sampling) -> None:
    made = [(IDS[n : n + n % 40 + 1], n % 5 + 2) for n in LENGTHS]
    together = grown(llama, [llama.line(ids, count, sampling) for ids, count in made])
    alone = [grown(llama, [llama.line(ids, count, sampling)])[0] for ids, count in made]
    for one, other, (_, count) in zip(together, alone, made, strict=True):
        ids, probs = llama.decoded(one, count)
        assert one.chain == other.chain == ids
        for mine, same, expected in zip(one.probs, other.probs, probs, strict=True):
            assert (mine is None) == (expected is None) == (not one.sampler.is_rejection)
            if mine is not None and same is not None and expected is not None:
                assert torch.equal(mine, expected) and torch.equal(same, expected)
                assert int((mine > 0).sum()) <= 50
    assert together[4].chain != llama.decoded(llama.line(*made[4]), made[4][1])[0]
    free(llama, [*together, *alone])


def test_rows_beyond_the_targets_vocabulary_count_for_nothing(llama: Drafter) -> None:
    whole = llama.decoded(llama.line(IDS[:9], 8), 8)[0]
    cut = next(i for i in range(1, 8) if whole[i] > max(whole[:i]))
    for size, end in ((whole[cut], cut), (whole[0], 0), (300, 8)):
        (line,) = lines = grown(llama, [llama.line(IDS[:9], 8, vocab_size=size)])
        assert line.chain[:end] == whole[:end] and len(line.chain) == len(line.probs) == 8 and line.is_sound
        assert max(line.chain) < size and (end == 8 or line.chain[end] != whole[end])
        llama.assert_stored(line.pages, line.tokens + line.chain[:7])
        free(llama, lines)


@pytest.mark.parametrize("sampling", [None, SAMPLED, REJECTION], ids=["greedy", "sampled", "rejection"])
def test_logits_that_are_no_numbers_end_the_chain_and_no_other(llama: Drafter, sampling: Sampling | None) -> None:
    made = [(IDS[:9], 5), (IDS[20:50], 5), (IDS[60:62], 5)]
    wanted = [llama.decoded(llama.line(ids, count, sampling), count)[0] for ids, count in made]
    at = next(i for i in range(1, 4) if wanted[0][i] not in {*wanted[0][:i], *wanted[1], *wanted[2]})
    for bad, end in ((wanted[0][at], at + 1), (IDS[8], 0)):
        llama.bad = bad
        lines = grown(llama, [llama.line(ids, count, sampling) for ids, count in made])
        assert [line.is_sound for line in lines] == [False, True, True]
        assert [line.chain for line in lines] == [wanted[0][:end], *wanted[1:]]
        assert [len(line.probs) for line in lines] == [end, 5, 5]
        free(llama, lines)


def test_a_drafter_reads_what_it_has_not_seen_and_no_more(llama: Drafter) -> None:
    """The next round goes on from where the last one's tokens stood."""
    line = grown(llama, [llama.line(IDS[:70], 4, num_read=50)])[0]
    chain, pages = line.chain, line.pages
    pages.rollback(len(pages) - (line.base + 2))  # two stood, and the target's own token came after them
    tokens = [*line.tokens, *chain[:2], 77]
    after = Line(tokens, Sampler(Sampling(), 70), pages, True, 3, VOCAB)
    grown(llama, [after])
    assert [panel.ids[0] for panel in llama.panels[:1]] == [IDS[50:70]]
    assert [panel.ids[0] for panel in llama.panels[4:]] == [[77], *([token] for token in after.chain[:2])]
    assert after.chain == llama.decoded(after, 3)[0]
    llama.assert_stored(pages, tokens + after.chain[:2])
    free(llama, [after])


@pytest.mark.parametrize("is_tree", [False, True])
def test_what_a_twin_writes_into_the_targets_pages_counts_as_nobodys(folder: Path, is_tree: bool) -> None:
    """The target's own tokens stay as they are, and what it writes over the twin's is what it would have written."""
    target, twin = drafter_of(folder, "llama"), drafter_of(folder, "llama", "q4")
    twin.arena = target.arena
    twin.model = replace(twin.model, layout=target.model.layout)
    tokens = [IDS[:63], IDS[30:45]]
    lists = [target.pages(ids[:-1]) for ids in tokens]
    before = [pages.dump() for pages in lists]
    lines = [
        Line(ids, Sampler(Sampling(), 3), pages, False, 4, VOCAB) for ids, pages in zip(tokens, lists, strict=True)
    ]
    with ExitStack() as stack:
        logits = read(lines, twin.run)
        if is_tree:
            grow_trees([Tree(line, tree_shape([], 4, 2, 8)) for line in lines], logits, twin.run, stack)
        else:
            grow_chains(lines, logits, twin.run)
    assert not any(panel.is_exact for panel in twin.panels)
    for pages, ids, data in zip(lists, tokens, before, strict=True):
        assert (len(pages), pages.clean) == (len(ids) + (0 if is_tree else 3), len(ids) - 1)
        pages.rollback(len(pages) - (len(ids) - 1))
        assert torch.equal(pages.dump(), data)
    verified = forward(target.model, target.arena, Panel(lists, [[ids[-1], 5, 6] for ids in tokens], "last"))
    for pages, ids, row in zip(lists, tokens, verified, strict=True):
        target.assert_stored(pages, [*ids, 5, 6])
        fresh = target.pages()
        assert_same_bits(row, forward(target.model, target.arena, Panel([fresh], [[*ids, 5, 6]]))[0])
        fresh.free()
    free(target, lines)


# ---- the shape of a tree -----------------------------------------------------------------------------


def ranks_of(num_seen: int, *right: int) -> Ranks:
    """Each rank was proposed so many times."""
    return Ranks(Counter(dict.fromkeys(range(len(RANK_RATES)), num_seen)), Counter(dict(enumerate(right))))


def paths_of(shape: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Of each node the ranks from the root down."""
    paths: list[tuple[int, ...]] = []
    for parent, rank in shape:
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


def test_the_rates_of_ranks_begin_with_what_is_expected_and_follow_what_was_seen() -> None:
    assert Ranks().rates(3) == pytest.approx([0.6, 0.18, 0.054]) and Ranks().rates(3) == list(RANK_RATES[:3])
    assert ranks_of(6, 3, 0, 1).rates(4) == pytest.approx([5.4 / 10, 0.72 / 10, 1.216 / 10, 0.0648 / 10])
    assert ranks_of(1000, 100, 800).rates(2) == pytest.approx([0.102, 0.798], abs=2e-3)
    assert Ranks(Counter({0: 6}), Counter({0: 3})).rates(2) == pytest.approx([5.4 / 10, 0.18])  # 1 was never proposed
    assert Ranks().rates(0) == [] and len(Ranks().rates(16)) == 16
    assert ranks_of(10**6, 10**6).rates(1)[0] <= 1 and sum(Ranks().rates(16)) <= 1


def test_a_tree_of_an_unknown_drafter_by_hand() -> None:
    """Products 0.6, 0.36, 0.216, 0.18 below the root; then 0.1296, and 0.108 thrice."""
    assert tree_shape([], 3, 2, 4) == [(-1, 0), (-1, 1), (0, 0), (2, 0)]
    assert tree_shape([], 4, 2, 5) == [(-1, 0), (-1, 1), (0, 0), (2, 0), (3, 0)]
    assert tree_shape([], 4, 1, 9) == [(-1, 0), (0, 0), (1, 0), (2, 0)]
    assert tree_shape([], 2, 4, 1) == [(-1, 0)] and tree_shape([], 0, 4, 5) == tree_shape([], 2, 4, 0) == []


def test_a_trees_shape_follows_what_was_learnt_at_each_depth() -> None:
    sure, unsure, second = ranks_of(400, 400), ranks_of(400, 120, 110, 100), ranks_of(400, 0, 390)
    assert tree_shape([sure] * 3, 3, 3, 3) == [(-1, 0), (0, 0), (1, 0)]
    assert tree_shape([unsure] * 3, 3, 3, 3) == [(-1, 0), (-1, 1), (-1, 2)]
    assert tree_shape([second, sure], 2, 3, 2) == [(-1, 1), (0, 0)]
    assert tree_shape([sure, unsure], 2, 3, 4) == [(-1, 0), (0, 0), (0, 1), (0, 2)]
    assert tree_shape([sure], 2, 2, 3) == [(-1, 0), (0, 0), (0, 1)]  # the second depth is not known


KNOWN = st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), max_size=5)


@settings(max_examples=50)
@given(KNOWN, st.integers(0, 6), st.integers(1, 4), st.integers(0, 20))
def test_a_shape_is_the_best_tree_in_levels_with_siblings_together(
    counts: list[list[int]], depth: int, width: int, nodes: int
) -> None:
    known = [ranks_of(sum(row), *row) for row in counts]
    shape = tree_shape(known, depth, width, nodes)
    rates = [(known[level] if level < len(known) else Ranks()).rates(width) for level in range(depth)]
    assert sorted(paths_of(shape)) == sorted(paths_of(best_tree(rates, nodes)))
    assert len(shape) == min(nodes, sum(width**level for level in range(1, depth + 1)))
    depths = [len(path) for path in paths_of(shape)]
    assert depths == sorted(depths)
    assert shape == sorted(shape)  # level by level, the children of an earlier node come first, each by rank
    assert all(parent < node for node, (parent, _) in enumerate(shape))


# ---- trees -------------------------------------------------------------------------------------------


def trees_of(lines: Sequence[Line], shapes: Sequence[list[tuple[int, int]]]) -> list[Tree]:
    return [Tree(line, shape) for line, shape in zip(lines, shapes, strict=True)]


def grow(drafter: Drafter, trees: Sequence[Tree], stack: ExitStack) -> None:
    grow_trees(trees, read([tree.line for tree in trees], drafter.run), drafter.run, stack)


def path_of(tree: Tree, node: int) -> list[int]:
    """Nodes from the root down to this one; none for -1."""
    return [] if node < 0 else [*path_of(tree, tree.shape[node][0]), node]


def ids_of(tree: Tree, path: Sequence[int]) -> list[int]:
    return [tree.ids[node] for node in path]


def children_of(tree: Tree, node: int) -> list[int]:
    return [child for child, (parent, _) in enumerate(tree.shape) if parent == node]


def plain_logits(drafter: Drafter, tree: Tree) -> dict[int, Tensor]:
    """After the pending token (-1) and every computed node, from chains in fresh lists."""
    pages = drafter.pages()
    found = {-1: forward(drafter.model, drafter.arena, Panel([pages], [tree.line.tokens]))[0]}
    if tree.inner:
        paths = [path_of(tree, node) for node in tree.inner if not set(children_of(tree, node)) & {*tree.inner}]
        lists = [pages.clone() for _ in paths]
        rows = forward(drafter.model, drafter.arena, Panel(lists, [ids_of(tree, path) for path in paths], "all"))
        found |= zip((node for path in paths for node in path), rows, strict=True)
        for clone in lists:
            clone.free()
    pages.free()
    return found


def check_tree(drafter: Drafter, tree: Tree) -> None:
    """Each node's children are the likeliest tokens after plain decoding of its path, its logits the same bits."""
    assert len(tree.ids) == len(tree.shape) and tree.parents == [parent for parent, _ in tree.shape]
    assert sorted(tree.inner) == [node for node in range(len(tree.ids)) if children_of(tree, node)]
    assert tree.next_level == []
    plain = plain_logits(drafter, tree)
    for row, node in zip(drafter.rows.get(tree.line.pages, []), tree.inner, strict=True):
        assert_same_bits(row, plain[node], f"{len(tree.line.tokens)} tokens, node {node} of {tree.shape}")
    sampler = Sampler(tree.line.sampler.sampling, len(tree.line.tokens))
    for node in (-1, *tree.inner):
        tokens = tree.line.tokens + ids_of(tree, path_of(tree, node))
        first = sampler.draft(plain[node], tokens)[0]
        likely = [first, *(token for token in plain[node].argsort(descending=True).tolist() if token != first)]
        children = children_of(tree, node)
        assert ids_of(tree, children) == [likely[tree.shape[child][1]] for child in children]


def bushy(depth: int, width: int) -> list[tuple[int, int]]:
    """Each level is `width` nodes wide: the children of the first two nodes of the level before."""
    shape, level = [(-1, rank) for rank in range(width)], list(range(width))
    for _ in range(depth - 1):
        below = sorted((level[rank % 2 % len(level)], rank // 2) for rank in range(width))
        level = list(range(len(shape), len(shape) + width))
        shape += below
    return shape


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3"])
def test_every_level_of_trees_of_several_sequences_is_plain_decoding(folder: Path, arch: str) -> None:
    """Lengths, depths and widths differ, so trees end at different forwards."""
    drafter = drafter_of(folder, arch)
    shapes = [
        bushy(4, 3),
        tree_shape([], 6, 2, 12),
        bushy(1, 4),
        bushy(6, 1),
        tree_shape([ranks_of(9, 0, 8)], 3, 4, 10),
    ]
    lines = [drafter.line(IDS[i : i + n], 6, num_read=n // 2) for i, n in enumerate(LENGTHS)]
    trees = trees_of(lines, shapes)
    with ExitStack() as stack:
        grow(drafter, trees, stack)
        assert [len(panel.lists) for panel in drafter.panels] == [5, 4, 4, 3, 2, 2]
        for tree in trees:
            check_tree(drafter, tree)
            drafter.assert_stored(tree.line.pages, tree.line.tokens)  # the tree itself lies in scratch pages
    free(drafter, lines)


SIZES = [(depth, width) for depth in range(1, 7) for width in range(1, 5)]


@pytest.mark.parametrize("arch", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_trees_of_every_width_and_depth_grow_in_one_panel(folder: Path, arch: str) -> None:
    drafter = drafter_of(folder, arch)
    lines = [drafter.line(IDS[i : i + 1 + 5 * i], 6) for i in range(len(SIZES))]
    trees = trees_of(lines, [bushy(depth, width) for depth, width in SIZES])
    with ExitStack() as stack:
        grow(drafter, trees, stack)
        assert [len(panel.lists) for panel in drafter.panels] == [24, 20, 16, 12, 8, 4]
        for tree in trees:
            check_tree(drafter, tree)
    free(drafter, lines)


@pytest.mark.parametrize("sampling", [SAMPLED, REJECTION, PENALISED], ids=["sampled", "rejection", "penalised"])
def test_the_first_child_is_what_the_request_would_choose(llama: Drafter, sampling: Sampling) -> None:
    shapes = [bushy(4, 2), bushy(3, 4), tree_shape([], 4, 3, 9)]
    lines, greedy = ([llama.line(IDS[n : n + 20], 4, by) for n in (0, 25, 50)] for by in (sampling, None))
    trees, others = trees_of(lines, shapes), trees_of(greedy, shapes)
    with ExitStack() as stack:
        grow(llama, trees, stack)
        for tree in trees:
            check_tree(llama, tree)
            siblings = [ids_of(tree, children_of(tree, node)) for node in range(-1, len(tree.ids))]
            assert all(len(set(ids)) == len(ids) for ids in siblings)
        grow(llama, others, stack)
        assert all(tree.ids != other.ids for tree, other in zip(trees, others, strict=True))
    free(llama, [*lines, *greedy])


def test_siblings_of_equal_logits_are_different_tokens(llama: Drafter) -> None:
    line = llama.line(IDS[:3], 1)
    for logits in (torch.zeros(VOCAB), torch.zeros(VOCAB).index_fill_(0, torch.tensor([250, 260, 270]), 1.0)):
        tree = Tree(line, bushy(1, 4))
        tree.add({-1: logits})
        assert tree.ids[0] == int(logits.argmax()) and len(set(tree.ids)) == 4 and tree.next_level == []
        assert set(tree.ids[:3]) == {250, 260, 270} or not logits.any()


def test_ranks_that_a_shape_leaves_out_are_passed_over(llama: Drafter) -> None:
    tree = Tree(llama.line(IDS[:3], 2), [(-1, 1), (-1, 3), (0, 2)])
    tree.add({-1: torch.arange(10.0)})
    assert tree.ids == [8, 6] and tree.next_level == [0]
    tree.add({0: -torch.arange(10.0)})
    assert tree.ids == [8, 6, 2] and tree.next_level == []


def test_where_the_vocabulary_ends_no_token_stands(llama: Drafter) -> None:
    tree = Tree(llama.line(IDS[:3], 2), bushy(1, 5))
    tree.add({-1: torch.tensor([0.0, 2.0, 1.0])})
    assert tree.ids == [1, 2, 0, -1, -1]


@pytest.mark.parametrize("is_root", [False, True])
def test_where_logits_are_no_numbers_none_below_is_read_and_the_line_is_unsound(llama: Drafter, is_root: bool) -> None:
    """The rest of that tree, and other trees, are as they would have been."""

    def pair() -> list[Tree]:
        lines = [llama.line(IDS[:9], 4), llama.line(IDS[20:50], 4)]
        trees = trees_of(lines, [bushy(4, 2), bushy(3, 2)])
        with ExitStack() as stack:
            grow(llama, trees, stack)
        free(llama, lines)
        return trees

    sound, other = pair()
    assert sound.line.is_sound and other.line.is_sound
    at = -1 if is_root else next(node for node in sound.inner if sound.ids.count(sound.ids[node]) == 1)
    llama.bad = sound.line.tokens[-1] if is_root else sound.ids[at]
    assert llama.bad not in other.ids
    broken, same = pair()
    assert same.ids == other.ids and same.line.is_sound and not broken.line.is_sound
    below = {node for node in range(len(sound.ids)) if is_root or at in path_of(sound, node)[:-1]}
    assert any(set(children_of(sound, node)) for node in below)
    assert broken.ids == [-1 if node in below else token for node, token in enumerate(sound.ids)]
    assert broken.inner == [node for node in sound.inner if node not in below]
    assert len(checked(broken.ids, broken.parents, VOCAB)[0]) == len(sound.ids) - len(below)


def test_below_no_token_stands_none_and_its_siblings_grow_on(llama: Drafter) -> None:
    """Of a vocabulary of two the third child is no token; all that a shape wants below it comes at once."""
    tree = Tree(llama.line(IDS[:3], 3), [(-1, 0), (-1, 2), (0, 0), (1, 0), (1, 1), (3, 0), (2, 0)])
    tree.add({-1: torch.tensor([1.0, 2.0])})
    assert tree.ids == [1, -1] and tree.next_level == [0]
    tree.add({0: torch.tensor([3.0, 2.0])})
    assert tree.ids == [1, -1, 0, -1, -1, -1] and tree.next_level == [2] and tree.line.is_sound
    tree.add({2: torch.tensor([1.0, 2.0])})
    assert tree.ids == [1, -1, 0, -1, -1, -1, 1] and tree.next_level == []


# ---- after the verdict -------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "mistral"])
@pytest.mark.parametrize("shape", [bushy(4, 3), bushy(1, 2)], ids=["deep", "flat"])
def test_a_drafter_keeps_the_path_that_stood_as_if_it_had_decoded_it(
    folder: Path, arch: str, shape: list[tuple[int, int]]
) -> None:
    """Every path of trees at the ends of pages; leaves are not computed, and so not kept."""
    drafter = drafter_of(folder, arch)
    lines = [drafter.line(IDS[:n], 4) for n in (62, 9, 64)]
    trees = trees_of(lines, [shape] * len(lines))
    with ExitStack() as stack:
        grow(drafter, trees, stack)
        for tree in trees:
            pages, before = tree.line.pages, tree.line.pages.dump()
            for node in range(-1, len(shape)):
                path = path_of(tree, node)
                computed = [at for at in path if children_of(tree, at)]
                assert len(path) - len(computed) == (node >= 0 and not children_of(tree, node))
                clone, expected = pages.clone(), pages.clone()
                replace(tree, line=replace(tree.line, pages=clone)).keep(path)
                for token in ids_of(tree, computed):
                    forward(drafter.model, drafter.arena, Panel([expected], [[token]], "none"))
                assert (len(clone), clone.clean) == (len(expected), expected.clean), f"node {node}"
                assert_same_bits(clone.dump(), expected.dump(), f"node {node}")
                clone.check()
                for one in (clone, expected):
                    one.free()
            assert torch.equal(pages.dump(), before)
    free(drafter, lines)


def test_rounds_of_trees_read_only_what_is_new(llama: Drafter) -> None:
    """Round after round on what was kept: the leaf that stood, and the target's own token."""
    tokens, pages, num_read = IDS[:57], llama.pages(), 0
    for n, node in enumerate((10, 4, 0, -1, 11, 7)):
        line = Line(tokens, Sampler(Sampling(), 57), pages, True, 4, VOCAB)
        tree = Tree(line, bushy(4, 3))
        with ExitStack() as stack:
            llama.panels.clear()
            llama.rows.clear()
            grow(llama, [tree], stack)
            assert llama.panels[0].ids == [tokens[num_read:]]
            check_tree(llama, tree)
            path = path_of(tree, node)
            tree.keep(path)
        stood = [at for at in path if children_of(tree, at)]
        num_read = len(tokens) + len(stood)
        tokens = [*tokens, *ids_of(tree, path), IDS[100 + n]]
        assert len(pages) == num_read >= len(tokens) - 2
        pages.unreserve()
    llama.assert_stored(pages, tokens[:num_read])
    assert len(pages) > 64
    free(llama, [line])


def test_which_ranks_were_right_is_counted_by_depth(llama: Drafter) -> None:
    """As far as there were candidates, and no further than the first that was wrong; of those that were proposed."""
    tree = Tree(llama.line(IDS[:3], 3), [(-1, 0), (-1, 2), (0, 0), (0, 1), (3, 0)], [5, 6, 7, 8, 9])
    ranks: list[Ranks] = []

    def learnt(gained: list[int]) -> list[tuple[dict[int, int], dict[int, int]]]:
        tree.learn(ranks, gained)
        return [(dict(at.seen), dict(at.right)) for at in ranks]

    assert learnt([]) == []
    assert learnt([4, 7]) == [({0: 1, 2: 1}, {})]
    assert learnt([6, 7]) == [({0: 2, 2: 2}, {2: 1})]  # nothing was proposed below it
    assert learnt([5, 8, 9, 3]) == [({0: 3, 2: 3}, {2: 1, 0: 1}), ({0: 1, 1: 1}, {1: 1}), ({0: 1}, {0: 1})]
    assert learnt([5, 8]) == [({0: 4, 2: 4}, {2: 1, 0: 2}), ({0: 2, 1: 2}, {1: 2}), ({0: 1}, {0: 1})]
    assert learnt([5, 8, 7]) == [({0: 5, 2: 5}, {2: 1, 0: 3}), ({0: 3, 1: 3}, {1: 3}), ({0: 2}, {0: 1})]
    assert learnt([5, 9])[1:] == [({0: 4, 1: 4}, {1: 3}), ({0: 2}, {0: 1})]  # right one level early is wrong
    assert ranks[0].rates(3) == pytest.approx([(4 + 0.6 * 4) / 10, 0.18, (1 + 0.054 * 4) / 10])


def test_a_rank_that_was_not_proposed_keeps_what_is_expected_of_it(llama: Drafter) -> None:
    """So a first choice that is always wrong makes room for the others, which were never wrong."""
    known: list[Ranks] = []
    for _ in range(40):
        Tree(llama.line(IDS[:3], 1), [(-1, 0)], [5]).learn(known, [6])
    assert known[0].rates(3) == pytest.approx([0.6 * 4 / 44, 0.18, 0.054])
    assert tree_shape(known, 1, 3, 1) == [(-1, 1)]


def test_what_trees_teach_becomes_their_shape(llama: Drafter) -> None:
    """A drafter whose second choice is right after its first one, always."""
    shape, known = bushy(3, 4), list[Ranks]()
    tree = Tree(llama.line(IDS[:30], 3), shape, list(range(len(shape))))
    for _ in range(30):
        tree.learn(known, ids_of(tree, path_of(tree, shape.index((5, 1)))))
    assert tree_shape(known, 3, 4, 3) == [(-1, 0), (0, 1), (1, 1)]
