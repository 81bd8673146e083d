"""A model proposes tokens for sequences of another one: chains, or trees level by level, for all of them at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from csrc_triton.tree import token_tree
from polymodel.kv import PageList, append_nodes
from polymodel.model import Panel
from polymodel.proposal import best_tree
from polymodel.sample import Probs, Sampler, greedy

RANK_RATES = tuple(0.6 * 0.3**rank for rank in range(16))  # of a tree before anything is known
RANK_WEIGHT = 4.0

Forward = Callable[[Panel], Tensor]  # the drafter's


@dataclass(eq=False)
class Line:
    """A chain on its way."""

    tokens: list[int]  # of the sequence, the pending one last
    sampler: Sampler
    pages: PageList  # the drafter's, or the target's own
    is_exact: bool  # what the drafter stores there is its own
    count: int  # tokens to propose
    vocab_size: int  # of the target
    chain: list[int] = field(default_factory=list)
    probs: list[Probs | None] = field(default_factory=list)  # what each of them was drawn from
    base: int = 0  # length of the pages up to the pending token
    is_sound: bool = True  # its logits were numbers

    def next_from(self, logits: Tensor, likeliest: int) -> bool:
        """Take the next token by logits over the target's vocabulary; whether another one is wanted."""
        token, probs = likeliest, None
        if not self.sampler.sampling.is_argmax:
            token, probs = self.sampler.draft(logits, self.tokens + self.chain)
        if token < 0:
            self.is_sound = False
            return False
        self.chain.append(token)
        self.probs.append(probs)
        return len(self.chain) < self.count


def read(lines: Seq[Line], forward: Forward) -> Tensor:
    """Every line's drafter reads what it has not seen, up to the pending token; logits [lines, vocab] after it."""
    logits = forward(_panel(lines, [line.tokens[len(line.pages) :] for line in lines]))
    for line in lines:
        line.base = len(line.pages)
    return logits


def grow_chains(lines: Seq[Line], logits: Tensor, forward: Forward) -> None:
    """logits [lines, vocab] after the pending tokens; a forward for each further token, of the lines that want one."""
    going = _take(lines, logits)
    while going:
        going = _take(going, forward(_panel(going, [line.chain[-1:] for line in going])))


def _panel(lines: Seq[Line], ids: Seq[list[int]]) -> Panel:
    return Panel([line.pages for line in lines], ids, is_exact=all(line.is_exact for line in lines))


def _take(lines: Seq[Line], logits: Tensor) -> list[Line]:
    """The lines that go on. A drafter's rows beyond the target's vocabulary count for nothing."""
    logits = logits[:, : lines[0].vocab_size].contiguous()
    likeliest = greedy(logits)
    return [line for line, row, token in zip(lines, logits, likeliest, strict=True) if line.next_from(row, token)]


# ---- trees -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Ranks:
    """At one depth of a drafter's trees: how often each of its likeliest tokens was right, of how many times."""

    seen: Counter[int] = field(default_factory=Counter)  # by rank
    right: Counter[int] = field(default_factory=Counter)

    def rates(self, width: int) -> list[float]:
        """Of the first ranks, beginning with what is expected before anything is known."""
        return [
            (self.right[rank] + rate * RANK_WEIGHT) / (self.seen[rank] + RANK_WEIGHT)
            for rank, rate in enumerate(RANK_RATES[:width])
        ]


def tree_shape(known: Seq[Ranks], depth: int, width: int, nodes: int) -> list[tuple[int, int]]:
    """The tree that promises most accepted tokens: of each node its parent and rank, level by level.

    Nodes of one parent stand together, by rank.
    """
    rates = [(known[level] if level < len(known) else Ranks()).rates(width) for level in range(depth)]
    shape = best_tree(rates, nodes)
    children: dict[int, list[int]] = {}
    for node, (parent, _) in enumerate(shape):
        children.setdefault(parent, []).append(node)
    made: list[tuple[int, int]] = []
    level = [(-1, -1)]  # nodes, and their numbers in the new order
    while level:
        below = []
        for node, number in level:
            for child in sorted(children.get(node, ()), key=lambda child: shape[child][1]):
                below.append((child, len(made)))
                made.append((number, shape[child][1]))
        level = below
    return made


@dataclass(eq=False)
class Tree:
    """A tree as it grows: those of its nodes that have children are computed, in the drafter's scratch pages."""

    line: Line
    shape: list[tuple[int, int]]
    ids: list[int] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)  # computed nodes
    places: Tensor | None = None  # [n, 2] int32, page id and slot of those

    @property
    def parents(self) -> list[int]:
        return [parent for parent, _ in self.shape[: len(self.ids)]]

    @property
    def next_level(self) -> list[int]:
        """Nodes that are there, have children to come, and are not computed yet."""
        waiting = {parent for parent, _ in self.shape[len(self.ids) :] if 0 <= parent < len(self.ids)}
        return sorted(node for node in waiting.difference(self.inner) if self.ids[node] >= 0)

    def add(self, rows: Mapping[int, Tensor]) -> None:
        """The children of nodes whose logits [vocab] are known."""
        while len(self.ids) < len(self.shape):
            parent = self.shape[len(self.ids)][0]
            ranks = [rank for above, rank in self.shape if above == parent]
            if parent >= 0 and self.ids[parent] < 0:
                self.ids += [-1] * len(ranks)  # below no token stands none
                continue
            if parent not in rows:
                return
            likely = self._likeliest(rows[parent][: self.line.vocab_size], parent, max(ranks) + 1)
            self.ids += [likely[rank] for rank in ranks]

    def _likeliest(self, logits: Tensor, parent: int, count: int) -> list[int]:
        """The token that the drafter would choose below a node, then its likeliest others."""
        ids: list[int] = logits.topk(min(count, len(logits))).indices.tolist()
        sampler = self.line.sampler
        if sampler.sampling.is_argmax:
            (first,) = greedy(logits[None])
        else:
            first, _ = sampler.draft(logits, self.line.tokens + self._path(parent))
        if first < 0:
            self.line.is_sound = False
            return [-1] * count
        ids = [first, *(token for token in ids if token != first)]
        return ids + [-1] * (count - len(ids))  # a vocabulary of so few

    def _path(self, node: int) -> list[int]:
        ids: list[int] = []
        while node >= 0:
            ids.insert(0, self.ids[node])
            node = self.shape[node][0]
        return ids

    def learn(self, ranks: list[Ranks], gained: Seq[int]) -> None:
        """Which rank was right at each depth, by the tokens that stood."""
        parent = -1
        for depth, token in enumerate(gained):
            below = [i for i in range(len(self.ids)) if self.shape[i][0] == parent and self.ids[i] >= 0]
            children = {self.ids[i]: i for i in below}
            if not children:
                return
            if depth == len(ranks):
                ranks.append(Ranks())
            ranks[depth].seen.update(self.shape[child][1] for child in children.values())
            if token not in children:
                return
            parent = children[token]
            ranks[depth].right[self.shape[parent][1]] += 1

    def keep(self, path: Seq[int]) -> None:
        """Append the computed nodes that stand to the drafter's pages, so that it need not read them again."""
        kept = [self.inner.index(node) for node in path if node in self.inner]
        if kept and self.places is not None and len(self.line.pages) == self.line.base:  # or they were given up
            self.line.pages.reserve(len(kept))
            append_nodes([self.line.pages], [self.places[kept]])


def grow_trees(trees: Seq[Tree], logits: Tensor, forward: Forward, stack: ExitStack) -> None:
    """logits [trees, vocab] after the pending tokens; a forward for each further level. Scratch is the stack's."""
    sizes = [len({parent for parent, _ in tree.shape if parent >= 0}) for tree in trees]
    if sum(sizes):
        places = stack.enter_context(trees[0].line.pages.scratch(sum(sizes)))
        for tree, mine in zip(trees, torch.split(torch.stack(places, 1), sizes), strict=True):
            tree.places = mine
    for tree, row in zip(trees, logits, strict=True):
        tree.add({-1: row})
    while growing := [tree for tree in trees if tree.next_level]:
        levels = [tree.next_level for tree in growing]
        rows = iter(forward(_level(growing, levels)))
        for tree, level in zip(growing, levels, strict=True):
            tree.inner += level
            tree.add({node: next(rows) for node in level})


def _level(trees: Seq[Tree], levels: Seq[list[int]]) -> Panel:
    made, places = [], []
    for tree, level in zip(trees, levels, strict=True):
        nodes = tree.inner + level
        number = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        made.append(token_tree([number[tree.shape[node][0]] for node in nodes], num_stored=len(tree.inner)))
        assert tree.places is not None
        places.append(tree.places[: len(nodes)])
    page, slot = torch.cat(places).unbind(1)
    ids = [[tree.ids[node] for node in level] for tree, level in zip(trees, levels, strict=True)]
    lists, is_exact = [tree.line.pages for tree in trees], all(tree.line.is_exact for tree in trees)
    return Panel(lists, ids, "all", trees=made, nodes=(page.contiguous(), slot.contiguous()), is_exact=is_exact)
