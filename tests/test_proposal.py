"""Trees of drafted tokens: what a drafter gave, several chains merged, and the tree that promises most."""

from __future__ import annotations

import random
from itertools import combinations
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymodel.accept import check_tree
from polymodel.errors import InvalidRequest
from polymodel.proposal import Proposal, best_tree, checked, merge

PARENTS = st.integers(0, 9).flatmap(lambda count: st.tuples(*(st.integers(-1, i - 1) for i in range(count))))
SURVIVAL = st.lists(st.floats(0, 1), max_size=5).map(lambda values: sorted(values, reverse=True))
CHAINS = st.lists(
    SURVIVAL.flatmap(lambda s: st.tuples(st.lists(st.integers(0, 2), min_size=len(s), max_size=len(s)), st.just(s))),
    max_size=4,
)


# ---- proposals


def test_a_chain_knows_its_depth_and_who_drafted_it() -> None:
    chain = Proposal.chain([5, 6, 7], "small")
    assert chain == Proposal((5, 6, 7), (-1, 0, 1), (("small",),) * 3)
    assert chain.is_chain and chain.depth == len(chain) == 3 and chain.path_of(2) == (0, 1, 2)


def test_nothing_drafted_is_a_chain_of_depth_0() -> None:
    assert Proposal.none().is_chain and Proposal.none().depth == len(Proposal.none()) == 0
    assert Proposal.none() == Proposal.chain([], "small")


def test_a_tree_knows_its_depth_and_paths() -> None:
    tree = Proposal((1, 2, 3, 4), (-1, -1, 0, 2), (("a",),) * 4)
    assert not tree.is_chain and tree.depth == 3
    assert [tree.path_of(node) for node in range(4)] == [(0,), (1,), (0, 2), (0, 2, 3)]


def test_a_proposal_that_is_no_tree_or_names_too_few_drafters_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="node 1's parent is 1"):
        Proposal((1, 2), (-1, 1), (("a",), ("a",)))
    with pytest.raises(InvalidRequest, match="2 drafted tokens name drafters for 1"):
        Proposal((1, 2), (-1, 0), (("a",),))


# ---- what a drafter gave


@pytest.mark.parametrize("beyond", [10, -1, 10**30])
def test_a_chain_is_cut_at_the_first_id_that_is_none_of_the_vocabulary(beyond: int) -> None:
    assert checked([0, 9, beyond, 4], None, 10) == ((0, 9), (-1, 0))


@pytest.mark.parametrize("wrong", [3.0, "3", None, True, [7, 8], torch.tensor([3, 4]), np.float32(3)])
def test_what_is_no_integer_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match=r"ids must be integers, got .*; a tree is \(ids, parents\)"):
        checked([0, 9, wrong, 4], None, 10)  # type: ignore[list-item]


def test_in_a_tree_such_a_node_goes_with_everything_below_it() -> None:
    assert checked([1, 99, 3, 4, 5, 6], [-1, -1, 1, 0, 2, 3], 10) == ((1, 4, 6), (-1, 0, 1))


@pytest.mark.parametrize(
    "ids", [np.array([3, 4]), torch.tensor([3, 4]), (i for i in (3, 4)), [torch.tensor(3), np.int8(4)]]
)
def test_ids_may_be_what_counts_as_integers(ids: object) -> None:
    got = checked(ids, None, 10)
    assert got == ((3, 4), (-1, 0)) and all(type(token) is int for token in got[0])
    assert checked([3, 4], np.array([-1, -1]), 10) == ((3, 4), (-1, -1))


@pytest.mark.parametrize(
    ("ids", "parents", "message"),
    [
        ([1, 2], [-1], "as many parents, got 1"),
        ([1, 2], [-1, 1], "node 1's parent is 1"),
        ([99, 2], [-1, 1], "node 1's parent is 1"),
        ([1, 2], [-1, 0.0], r"parents must be integers, got 0\.0"),
        (None, None, "ids must be a list of integers, got None"),
        (torch.tensor(3), None, "ids must be a list of integers, got tensor"),
        ([1], 0, "parents must be a list of integers, got 0"),
    ],
)
def test_what_is_no_tree_is_refused(ids: object, parents: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        checked(ids, parents, 10)


@settings(max_examples=50)
@given(PARENTS, st.data())
def test_exactly_the_nodes_whose_path_is_valid_stay(parents: tuple[int, ...], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-2, 12), min_size=len(parents), max_size=len(parents)))
    tree = Proposal(tuple(ids), parents, (("a",),) * len(ids))
    kept_ids, kept_parents = checked(ids, parents, 10)
    check_tree(len(kept_ids), kept_parents)
    paths = [[ids[i] for i in tree.path_of(node)] for node in range(len(ids))]
    kept = Proposal(kept_ids, kept_parents, (("a",),) * len(kept_ids))
    assert [[kept_ids[i] for i in kept.path_of(node)] for node in range(len(kept))] == [
        path for path in paths if all(0 <= token < 10 for token in path)
    ]


# ---- chains merged


def test_one_chain_stays_a_chain() -> None:
    assert merge([("a", [5, 6, 5], [0.9, 0.5, 0.4])], 8) == Proposal.chain([5, 6, 5], "a")
    assert merge([("a", [5, 6, 5], [0.9, 0.5, 0.4])], 2) == Proposal.chain([5, 6], "a")
    assert merge([], 8) == merge([("a", [], [])], 8) == merge([("a", [1], [1.0])], 0) == Proposal.none()


def test_chains_share_what_they_have_in_common() -> None:
    merged = merge([("a", [5, 6, 7], [0.9, 0.5, 0.1]), ("b", [5, 8], [0.6, 0.55])], 8)
    assert merged.ids == (5, 8, 6, 7) and merged.parents == (-1, 0, 0, 2)
    assert merged.by == (("a", "b"), ("b",), ("a",), ("a",))


def test_a_node_that_several_propose_is_likelier_than_either_alone() -> None:
    chains = [("a", [1], [0.5]), ("b", [2], [0.6]), ("c", [1], [0.4])]  # 1 fails with 0.5 * 0.6
    assert merge(chains, 1) == Proposal((1,), (-1,), (("a", "c"),))


def test_ties_go_to_the_earlier_drafter() -> None:
    assert merge([("a", [1, 2], [0.5, 0.5]), ("b", [3, 4], [0.5, 0.5])], 3).ids == (1, 2, 3)


def test_survival_that_grows_is_held_down_and_two_chains_of_one_drafter_are_alternatives() -> None:
    assert merge([("a", [1, 2], [0.2, 0.9]), ("b", [3], [0.5])], 2).ids == (3, 1)
    merged = merge([("a", [1, 2], [0.6, 0.5]), ("a", [1, 3], [0.6, 0.1]), ("b", [4], [0.7])], 8)
    assert merged.ids == (4, 1, 2, 3) and merged.by == (("b",), ("a",), ("a",), ("a",))


def test_a_chain_with_too_few_probabilities_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'a' drafted 2 tokens with 1 probabilities"):
        merge([("a", [1, 2], [0.5])], 8)


@settings(max_examples=50)
@given(CHAINS, st.integers(0, 12))
def test_the_likeliest_nodes_stay_with_all_above_them(chains: list[tuple[list[int], list[float]]], most: int) -> None:
    failures: dict[tuple[int, ...], float] = {}
    for ids, survivals in chains:
        for end, survival in enumerate(survivals, 1):
            failures[tuple(ids[:end])] = failures.get(tuple(ids[:end]), 1.0) * (1 - survival)
    merged = merge([(str(i), *chain) for i, chain in enumerate(chains)], most)
    paths = [tuple(merged.ids[i] for i in merged.path_of(node)) for node in range(len(merged))]
    assert [failures[path] for path in paths] == sorted(failures.values())[:most]
    assert len(set(paths)) == len(paths) == min(most, len(failures))
    for path, names in zip(paths, merged.by, strict=True):
        assert names == tuple(str(i) for i, (ids, _) in enumerate(chains) if tuple(ids[: len(path)]) == path)


# ---- the tree that promises most


def products(tree: list[tuple[int, int]], rates: list[list[float]]) -> list[float]:
    values: list[float] = []
    depths: list[int] = []
    for parent, rank in tree:
        depths.append(0 if parent < 0 else depths[parent] + 1)
        values.append((1.0 if parent < 0 else values[parent]) * rates[depths[-1]][rank])
    return values


def exhaustive(rates: list[list[float]], most: int) -> float:
    """The best sum of path products over all sets of `most` nodes that hold every node's parent."""
    nodes = [()]
    for depth, row in enumerate(rates):
        nodes += [(*path, rank) for path in nodes if len(path) == depth for rank in range(len(row))]
    return max(
        sum(prod(rates[depth][rank] for depth, rank in enumerate(path)) for path in chosen)
        for count in range(most + 1)
        for chosen in combinations(nodes[1:], count)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_other_tree_promises_more(seed: int) -> None:
    draw = random.Random(seed)
    rates = [[round(draw.random() / 2, 2) for _ in range(2)] for _ in range(3)]
    for most in range(6):
        values = products(best_tree(rates, most), rates)
        assert sum(values) == pytest.approx(exhaustive(rates, most)) and values == sorted(values, reverse=True)


def test_the_expected_tokens_are_what_a_simulation_accepts() -> None:
    draw = random.Random(0)
    rates = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.1], [0.4, 0.2, 0.2]]
    tree = best_tree(rates, 8)
    accepted = 0
    for _ in range(20_000):
        right = [draw.choices([0, 1, 2, None], [*row, 1 - sum(row)])[0] for row in rates]
        at = -1
        for rank in right:
            if (at, rank) not in tree:
                break
            at = tree.index((at, rank))
            accepted += 1
    assert accepted / 20_000 == pytest.approx(sum(products(tree, rates)), rel=0.02)


def test_a_tree_is_a_chain_for_a_sure_drafter_and_wide_for_an_unsure_one() -> None:
    assert best_tree([[0.95, 0.03]] * 4, 4) == [(-1, 0), (0, 0), (1, 0), (2, 0)]
    assert best_tree([[0.4, 0.3, 0.2]] * 4, 3) == [(-1, 0), (-1, 1), (-1, 2)]
    assert best_tree([[0.1, 0.7], [0.5]], 3) == [(-1, 1), (0, 0), (-1, 0)]  # ranks need no order


def test_nodes_that_cannot_stand_and_depths_without_candidates_are_left_out() -> None:
    assert best_tree([[0.5, 0.0], [0.0]], 9) == [(-1, 0)]
    assert best_tree([[0.5], [], [0.9]], 9) == [(-1, 0)]
    assert best_tree([], 9) == best_tree([[0.5]], 0) == []


@pytest.mark.parametrize("rate", [1.01, -0.1, float("nan"), None, True])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(InvalidRequest, match=r"rates\[1\]\[0\] must be in \[0, 1\], got"):
        best_tree([[0.5], [rate]], 4)
