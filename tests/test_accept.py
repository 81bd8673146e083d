"""What stands of a draft, and whole runs against a target that is a pure function of the tokens before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymodel.accept import Accepted, accept_chain, accept_tree, expected_tokens
from polymodel.errors import InvalidRequest

IDS = st.lists(st.integers(0, 3), max_size=8)
TREES = IDS.flatmap(lambda ids: st.tuples(st.just(ids), st.tuples(*(st.integers(-1, i - 1) for i in range(len(ids))))))


# ---- chains


@pytest.mark.parametrize(
    ("draft", "target", "accepted", "advanced", "rejected"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 4, 0),
        ([1, 2, 3], [1, 2, 3], 3, 3, 0),
        ([1, 9, 9], [1, 2, 3], 1, 2, 2),
        ([9, 9, 9], [1, 2, 3], 0, 1, 3),
        ([], [7], 0, 1, 0),
        ([], [], 0, 0, 0),
        ([9, 2, 3], [1, 2, 3, 4], 0, 1, 3),  # a late agreement is none
        ([1, 2, 3], [1], 1, 1, 2),
    ],
)
def test_the_longest_agreeing_prefix_stands(
    draft: list[int], target: list[int], accepted: int, advanced: int, rejected: int
) -> None:
    verdict = accept_chain(draft, target)
    assert verdict.path == tuple(range(accepted))
    assert (verdict.num_accepted, verdict.num_advanced, verdict.num_rejected) == (accepted, advanced, rejected)
    assert verdict.next == (target[accepted] if advanced > accepted else None)


@given(IDS, IDS)
def test_what_is_emitted_is_what_the_target_chose(draft: list[int], target: list[int]) -> None:
    verdict = accept_chain(draft, target)
    assert verdict.num_accepted + verdict.num_rejected == len(draft)
    assert target[: verdict.num_accepted] == draft[: verdict.num_accepted]
    assert verdict.num_advanced == verdict.num_accepted + (verdict.num_accepted < len(target))
    if verdict.num_accepted < min(len(draft), len(target)):
        assert draft[verdict.num_accepted] != target[verdict.num_accepted]


# ---- trees

#        pending
#       0:5   1:6
#        |    2:7  3:8
#       4:9         5:9
BRANCHED = ([5, 6, 7, 8, 9, 9], [-1, -1, 1, 1, 0, 3])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ([6, 0, 8, 0, 9, 0, 3], Accepted((1, 3, 5), 3, 3)),
        ([6, 0, 7, 4, 0, 0, 0], Accepted((1, 2), 4, 4)),
        ([5, 9, 0, 0, 0, 2, 0], Accepted((0, 4), 4, 2)),
        ([9, 9, 9, 9, 9, 9, 9], Accepted((), 6, 9)),  # the right token in the wrong place
        ([], Accepted((), 6, None)),
        ([6, 0], Accepted((1,), 5, None)),  # node 1 was not verified
        ([6, 0, 8], Accepted((1, 3), 4, None)),
    ],
)
def test_a_tree_is_walked_along_the_targets_choices(target: list[int], expected: Accepted) -> None:
    assert accept_tree(*BRANCHED, target) == expected


def test_the_first_of_equal_siblings_is_taken() -> None:
    assert accept_tree([7, 5, 5, 1], [-1, -1, -1, 2], [5, 0, 1, 1, 0]) == Accepted((1,), 3, 1)


def test_nothing_drafted_and_nothing_verified_is_all_zeros() -> None:
    assert accept_tree([], [], []) == Accepted((), 0, None) and Accepted((), 0, None).num_advanced == 0
    assert accept_tree([], [], [4]) == Accepted((), 0, 4)


@given(TREES, st.lists(st.integers(0, 3), max_size=10))
def test_every_node_is_accepted_or_rejected_and_the_path_is_one(
    tree: tuple[list[int], tuple[int, ...]], target: list[int]
) -> None:
    ids, parents = tree
    verdict = accept_tree(ids, parents, target)
    assert verdict.num_accepted + verdict.num_rejected == len(ids)
    last = -1
    for node in verdict.path:
        assert parents[node] == last and ids[node] == target[1 + last]
        last = node
    assert verdict.next == (target[1 + last] if 1 + last < len(target) else None)
    if verdict.next is not None:
        assert not any(parent == last and ids[i] == verdict.next for i, parent in enumerate(parents))


@given(IDS, IDS)
def test_a_chain_is_the_tree_without_branches(draft: list[int], target: list[int]) -> None:
    assert accept_tree(draft, [i - 1 for i in range(len(draft))], target) == accept_chain(draft, target)


@pytest.mark.parametrize(
    ("ids", "parents", "message"),
    [
        ([1, 2], [-1], "2 drafted tokens needs as many parents, got 1"),
        ([1], [-1, 0], "1 drafted tokens needs as many parents, got 2"),
        ([1], [0], "node 0's parent is 0"),  # itself
        ([1, 1, 1], [-1, 2, 1], "node 1's parent is 2"),  # a cycle
        ([1, 1], [-1, -2], "node 1's parent is -2"),
        ([1, 1], [-1, 5], "node 1's parent is 5"),
        ([1, 1], [-1, False], "node 1's parent is False"),
        ([1], [None], "node 0's parent is None"),
    ],
)
def test_parents_that_are_no_tree_are_refused(ids: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        accept_tree(ids, parents, [1, 1, 1, 1])


# ---- a target that is a pure function


def choice(tokens: Sequence[int]) -> int:
    """Of 64 tokens, never 0."""
    return 1 + (31 * tokens[-1] + 7 * len(tokens) + 13) % 63


def plain(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choice(tokens))
    return tokens[len(prompt) :]


Tree = tuple[list[int], list[int]]
Drafter = Callable[[list[int]], Tree]
PROMPT = [3, 1, 4, 1, 5]


def chain(ids: list[int]) -> Tree:
    return ids, [i - 1 for i in range(len(ids))]


def drafter(length: int, num_right: int) -> Drafter:
    """Chains of which the first num_right tokens are right and all others wrong."""

    def draft(tokens: list[int]) -> Tree:
        right = plain(tokens, length)
        return chain([token if i < num_right else token % 63 + 1 for i, token in enumerate(right)])

    return draft


def decoys(depth: int, width: int) -> Drafter:
    """At each level wrong tokens first and the right one last; the next level is below the right one."""

    def draft(tokens: list[int]) -> Tree:
        ids, parents, below = [], [], -1
        for right in plain(tokens, depth):
            ids += [*((right + i) % 63 + 1 for i in range(width - 1)), right]
            parents += [below] * width
            below = len(ids) - 1
        return ids, parents

    return draft


@dataclass
class Lazy(Sequence[int]):
    """The target's choices, each computed when it is read, and which rows were."""

    tokens: list[int]
    ids: list[int]
    parents: list[int]
    read: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids) + 1

    @overload
    def __getitem__(self, row: int) -> int: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[int]: ...
    def __getitem__(self, row: int | slice) -> int | Sequence[int]:
        assert isinstance(row, int)
        self.read.append(row)
        path, node = [], row - 1
        while node >= 0:
            path.append(self.ids[node])
            node = self.parents[node]
        return choice(self.tokens + path[::-1])


@dataclass
class Run:
    output: list[int] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    evicted: int = 0

    @property
    def mean(self) -> float:
        return len(self.output) / self.rounds


def run(draft: Drafter, count: int = 24, max_draft: int = 99, stop: int | None = None) -> Run:
    """Drafts, verifies and accepts until `count` tokens or the stop token are out."""
    record = Run()
    while len(record.output) < count and stop not in record.output:
        tokens = PROMPT + record.output
        ids, parents = (nodes[:max_draft] for nodes in draft(tokens))
        target = Lazy(tokens, ids, parents)
        verdict = accept_tree(ids, parents, target)
        assert target.read == [0, *(1 + node for node in verdict.path)]  # each row on the path once, and no other
        if parents == chain(ids)[1]:
            assert accept_chain(ids, Lazy(tokens, ids, parents)) == verdict
        assert verdict.next is not None
        emitted = [*(ids[node] for node in verdict.path), verdict.next][: count - len(record.output)]
        record.output += emitted[: emitted.index(stop) + 1] if stop in emitted else emitted
        record.rounds += 1
        record.drafted += len(ids)
        record.accepted += verdict.num_accepted
        record.evicted += verdict.num_rejected
    assert record.output == plain(PROMPT, len(record.output))
    assert record.accepted + record.evicted == record.drafted
    return record


@pytest.mark.parametrize(
    ("draft", "rounds", "drafted", "evicted"),
    [
        (drafter(4, 4), 5, 20, 0),
        (drafter(4, 2), 8, 32, 16),  # two of four in every round
        (drafter(4, 0), 24, 96, 96),
        (drafter(0, 0), 24, 0, 0),
        (decoys(4, 3), 5, 60, 40),
    ],
    ids=["perfect", "partial", "wrong", "none", "decoys first"],
)
def test_rounds_and_evictions_of_whole_runs_are_exact(draft: Drafter, rounds: int, drafted: int, evicted: int) -> None:
    record = run(draft)
    assert (record.rounds, record.drafted, record.evicted) == (rounds, drafted, evicted)
    assert record.mean == 24 / rounds and len(set(record.output)) == 14


def test_the_mean_of_a_perfect_draft_of_k_is_k_plus_one() -> None:
    assert run(drafter(4, 4), 25).mean == run(decoys(4, 3), 25).mean == 5.0


def test_a_tree_finds_behind_decoys_what_the_chain_of_first_children_does_not() -> None:
    def first_children(tokens: list[int]) -> Tree:
        return chain(decoys(4, 3)(tokens)[0][::3])

    assert run(first_children).mean == 1.0


def test_a_cap_on_the_draft_is_one_on_the_round() -> None:
    record = run(drafter(4, 4), max_draft=2)
    assert (record.rounds, record.drafted, record.mean) == (8, 16, 3.0)
    assert run(decoys(4, 3), max_draft=3).mean == 2.0  # one level of three


def test_a_stop_token_ends_the_run_in_the_middle_of_what_was_accepted() -> None:
    stop = plain(PROMPT, 24)[7]  # the third token of the second round
    record = run(drafter(4, 4), stop=stop)
    assert record.output == plain(PROMPT, 8) and (record.rounds, record.accepted) == (2, 8)


def test_any_drafter_leaves_the_output_as_it_was() -> None:
    draw = random.Random(0)

    def draft(tokens: list[int]) -> Tree:
        right = plain(tokens, 9)
        ids = [draw.choice([right[i % 3], draw.randrange(64)]) for i in range(draw.randrange(9))]
        return ids, [draw.randrange(-1, i) for i in range(len(ids))]

    record = run(draft, 400)
    assert len(record.output) == 400 and record.accepted > 20 and record.evicted > 20


# ---- expected tokens


@pytest.mark.parametrize(
    ("count", "acceptance", "expected"),
    [
        (0, 0.9, 1),
        (3, 0, 1),
        (2, 1, 3),
        (1, 0.5, 1.5),
        (2, 0.5, 1.75),
        (4, 1, 5),
        (-2, 0.9, 1),
        (3, 7.0, 4),
        (3, -1.0, 1),
    ],
)
def test_expected_tokens(count: int, acceptance: float, expected: float) -> None:
    assert expected_tokens(count, acceptance) == expected


def test_expected_tokens_grow_with_acceptance_and_length() -> None:
    rates = [i / 100 for i in range(101)]
    for count in range(1, 9):
        values = [expected_tokens(count, a) for a in rates]
        assert values == sorted(values) and len(set(values)) == len(values)
        assert all(expected_tokens(count, a) < expected_tokens(count + 1, a) for a in rates[5:])
    assert min(a for a in rates if expected_tokens(4, a) >= 2) == pytest.approx(0.53, abs=0.011)
    assert min(a for a in rates if expected_tokens(4, a) >= 3) == pytest.approx(0.74, abs=0.011)
