"""What is drafted for one sequence in one round: a tree of tokens, and which drafters proposed each. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from operator import index
from typing import SupportsIndex

from polymodel.accept import check_tree
from polymodel.config import MAX_NODES, is_number
from polymodel.errors import InvalidRequest, brief


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens: ids[i] is below node parents[i] < i, or below the pending token where that is -1."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    by: tuple[tuple[str, ...], ...]  # for each node the drafters that proposed it, in order

    def __post_init__(self) -> None:
        check_tree(len(self.ids), self.parents)
        if len(self.by) != len(self.ids):
            raise InvalidRequest(f"{len(self.ids)} drafted tokens name drafters for {len(self.by)}")

    @classmethod
    def chain(cls, ids: Iterable[int], by: str) -> Proposal:
        ids = tuple(ids)
        return cls(ids, tuple(range(-1, len(ids) - 1)), ((by,),) * len(ids))

    @classmethod
    def none(cls) -> Proposal:
        return cls((), (), ())

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, count: int) -> Proposal:
        """Its first `count` nodes."""
        return Proposal(self.ids[:count], self.parents[:count], self.by[:count])

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.ids) - 1))

    @property
    def depth(self) -> int:
        """Levels below the pending token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    def path_of(self, node: int) -> tuple[int, ...]:
        """The nodes from the root down to this one."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))


def checked(
    ids: Iterable[SupportsIndex], parents: Iterable[SupportsIndex] | None, vocab_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids and parents that can be verified, of what a drafter gave: the first 255 nodes. No parents: a chain.

    A node whose id is not in 0..vocab_size - 1 goes, with everything below it; the others are renumbered.
    Raises InvalidRequest for what is no list of integers and for parents that are no tree.
    """
    tokens = _wholes("ids", ids)
    above = list(range(-1, len(tokens) - 1)) if parents is None else _wholes("parents", parents)
    check_tree(len(tokens), above)
    places = {-1: -1}  # node as given -> node as kept
    kept: list[tuple[int, int]] = []
    for node, (token, parent) in enumerate(zip(tokens, above, strict=True)):
        if parent in places and 0 <= token < vocab_size:
            places[node] = len(kept)
            kept.append((token, places[parent]))
    return tuple(token for token, _ in kept), tuple(parent for _, parent in kept)


def _wholes(name: str, given: Iterable[SupportsIndex]) -> list[int]:
    try:
        values = list(islice(given, MAX_NODES))
    except TypeError as error:
        raise InvalidRequest(f"a drafter's {name} must be a list of integers, got {brief(given)}") from error
    return [_whole(name, value) for value in values]


def _whole(name: str, value: SupportsIndex) -> int:
    """An int of what counts as one, as NumPy's and PyTorch's scalars do."""
    with suppress(TypeError, ValueError):
        if not isinstance(value, bool):
            return index(value)
    raise InvalidRequest(f"a drafter's {name} must be integers, got {brief(value)}; a tree is (ids, parents)")


class _Node:
    __slots__ = ("by", "children", "place", "token")

    def __init__(self, token: int) -> None:
        self.token = token
        self.by: dict[str, float] = {}  # drafter -> its survival
        self.children: dict[int, _Node] = {}
        self.place = -1

    @property
    def failure(self) -> float:
        return math.prod(1.0 - survival for survival in self.by.values())


def merge(chains: Sequence[tuple[str, Sequence[int], Sequence[float]]], max_nodes: int) -> Proposal:
    """Several drafters' chains as one tree of the at most `max_nodes` nodes that are likeliest to stand.

    A chain is its drafter's name, its ids and for each the probability in [0, 1] that it and all before it stand, which
    therefore never grows along it (one that does is held down). A node that several propose fails only where all of
    them do: 1 - prod(1 - s), as if they were independent. So it never exceeds its parent's, and the likeliest nodes
    form a tree by themselves. The likeliest come first; ties go to the earlier drafter.
    """
    root = _Node(-1)
    nodes: list[tuple[_Node, _Node]] = []  # a node and its parent, by drafter and then by depth
    for name, ids, survivals in chains:
        if len(ids) != len(survivals):
            raise InvalidRequest(f"{name!r} drafted {len(ids)} tokens with {len(survivals)} probabilities")
        at, bound = root, 1.0
        for token, survival in zip(ids, survivals, strict=True):
            bound = min(bound, max(survival, 0.0))
            parent, at = at, at.children.get(token) or _Node(token)
            if token not in parent.children:
                parent.children[token] = at
                nodes.append((at, parent))
            at.by[name] = max(at.by.get(name, 0.0), bound)
    nodes.sort(key=lambda pair: pair[0].failure)
    nodes = nodes[: max(max_nodes, 0)]
    for place, (node, _) in enumerate(nodes):
        node.place = place
    return Proposal(
        tuple(node.token for node, _ in nodes),
        tuple(parent.place for _, parent in nodes),
        tuple(tuple(node.by) for node, _ in nodes),
    )


def best_tree(rates: Sequence[Sequence[float]], max_nodes: int) -> list[tuple[int, int]]:
    """The tree with most expected accepted tokens: (parent, rank) of each node, parents first, the likeliest first.

    rates[depth][rank] is the probability that the rank-th candidate is right, given that the node above it is; it is
    assumed to depend on depth and rank alone. Ranks need no order. A tree's expected accepted tokens are the sum over
    its nodes of the rates' product along the path (Chen et al. 2024, Sequoia). A product never exceeds its parent's, so
    the largest max_nodes products form a tree, and no other tree sums to more: taking the largest next is optimal.
    Nodes that can never stand are left out. Raises InvalidRequest for a rate outside [0, 1].
    """
    for depth, row in enumerate(rates):
        for rank, rate in enumerate(row):
            if not (is_number(rate) and 0 <= rate <= 1):
                raise InvalidRequest(f"rates[{depth}][{rank}] must be in [0, 1], got {brief(rate)}")
    ranked = [sorted(enumerate(row), key=lambda pair: -pair[1]) for row in rates]
    waiting: list[tuple[float, int, int, int, float]] = []  # minus its product, number, depth, place, parent's product
    tree: list[tuple[int, int]] = []
    parents = [-1]

    def wait(parent: int, depth: int, place: int, above: float) -> None:
        if depth < len(ranked) and place < len(ranked[depth]) and (product := above * ranked[depth][place][1]) > 0:
            heappush(waiting, (-product, len(parents), depth, place, above))
            parents.append(parent)

    wait(-1, 0, 0, 1.0)
    while waiting and len(tree) < max_nodes:
        product, number, depth, place, above = heappop(waiting)
        tree.append((parents[number], ranked[depth][place][0]))
        wait(parents[number], depth, place + 1, above)
        wait(len(tree) - 1, depth + 1, 0, -product)
    return tree
