from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymodel.accept import Accepted, accept_chain, expected_tokens

IDS = st.lists(st.integers(0, 3), max_size=8)


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
    assert accept_chain(draft, target) == Accepted(accepted, rejected, advanced)


@given(IDS, IDS)
def test_what_is_emitted_is_what_the_target_chose(draft: list[int], target: list[int]) -> None:
    verdict = accept_chain(draft, target)
    assert verdict.num_accepted + verdict.num_rejected == len(draft)
    assert target[: verdict.num_accepted] == draft[: verdict.num_accepted]
    assert verdict.num_advanced == verdict.num_accepted + (verdict.num_accepted < len(target))
    if verdict.num_accepted < min(len(draft), len(target)):
        assert draft[verdict.num_accepted] != target[verdict.num_accepted]


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
