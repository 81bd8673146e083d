"""N-gram lookup: the longest suffix that occurred before, where it occurred last, and what followed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymodel.errors import InvalidRequest
from polymodel.lookup import MOST_NEW, Lookup

TEXT = st.lists(st.integers(0, 3), max_size=30)


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert Lookup().propose([7, 8, 9, 4, 5, 6, 1, 7, 8, 9], 3) == ([4, 5, 6], 3)


def test_distinct_tokens_propose_nothing() -> None:
    assert Lookup().propose(list(range(50)), 4) == ([], 0)
    assert Lookup().propose([], 4) == Lookup().propose([1], 4) == ([], 0)


def test_the_longest_suffix_counts_even_where_a_shorter_one_is_more_recent() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    assert Lookup(max_n=3).propose(tokens, 1) == ([4], 3)
    assert Lookup(max_n=2).propose(tokens, 1) == ([5], 2)
    assert Lookup(min_n=3, max_n=3).propose([2, 3, 5, 2, 3], 1) == ([], 0)


def test_the_most_recent_of_several_occurrences_counts() -> None:
    assert Lookup().propose([1, 2, 3, 1, 2, 4, 1, 2], 1) == ([4], 2)


def test_a_loop_repeats_beyond_the_end() -> None:
    assert Lookup().propose([5, 1, 2, 1, 2], 5) == ([1, 2, 1, 2, 1], 2)
    assert Lookup(min_n=1).propose([6, 6], 3) == ([6, 6, 6], 1)


def test_a_reference_is_looked_up_after_the_sequence_itself_and_ends_where_it_ends() -> None:
    lookup = Lookup(references=[[1, 2, 3, 4], [1, 2, 9, 9, 9]])
    assert lookup.propose([8, 1, 2], 9) == ([3, 4], 2)
    assert lookup.propose([8, 1, 2, 7, 1, 2], 2) == ([7, 1], 2)
    assert lookup.propose([8, 1, 2, 7, 1, 2, 9, 9], 9) == ([9], 4)  # of the second: 1 2 9 9, longer than its 9 9
    assert Lookup(references=[[1, 2]]).propose([1, 2], 3) == ([], 0)  # nothing follows it


def test_a_longer_match_in_a_reference_counts_more_than_a_shorter_one_in_the_sequence() -> None:
    assert Lookup(references=[[1, 2, 3, 4]]).propose([2, 3, 5, 1, 2, 3], 1) == ([4], 3)


def test_what_was_committed_since_is_looked_up_too() -> None:
    lookup, tokens = Lookup(), [1, 2, 3]
    assert lookup.propose(tokens, 2) == ([], 0)
    tokens += [4, 1, 2]
    assert lookup.propose(tokens, 2) == ([3, 4], 2)
    tokens += [3, 4, 1]
    assert lookup.propose(tokens, 2) == ([2, 3], 5)


def test_tokens_taken_back_are_forgotten() -> None:
    lookup = Lookup()
    assert lookup.propose([1, 2, 3, 1, 2], 1) == ([3], 2)
    assert lookup.propose([1, 2], 1) == ([], 0)
    assert lookup.propose([1, 2, 8, 1, 2], 1) == ([8], 2)


def test_nothing_is_proposed_where_nothing_is_wanted_but_the_tokens_are_learned() -> None:
    lookup = Lookup()
    assert lookup.propose([1, 2, 3, 4], 0) == ([], 0)
    assert lookup.propose([1, 2, 3, 4, 1, 2], 1) == ([3], 2)


def test_another_sequence_shares_the_references_and_nothing_else() -> None:
    first = Lookup(2, 4, references=[[1, 2, 3]])
    first.propose([7, 8, 9], 1)
    other = first.for_another()
    assert other.propose([1, 2], 1) == ([3], 2) and other.propose([5, 7, 8], 1) == ([], 0)
    assert other._references is first._references


def naive(tokens: Sequence[int], texts: list[list[int]], count: int, sizes: range) -> tuple[list[int], int]:
    for n in reversed(sizes):
        for text in [list(tokens), *texts]:
            for end in range(len(text) - 1, n - 1, -1):
                if n <= len(tokens) and text[end - n : end] == list(tokens)[-n:]:
                    proposed = text[end : end + count]
                    while text == list(tokens) and len(proposed) < count:
                        proposed.append((text + proposed)[end + len(proposed)])
                    return proposed, n
    return [], 0


@settings(max_examples=50)
@given(TEXT, st.lists(TEXT, max_size=2), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.data())
def test_growing_step_by_step_finds_what_a_search_of_everything_does(
    tokens: list[int], texts: list[list[int]], count: int, min_n: int, more: int, data: st.DataObject
) -> None:
    texts = [text for text in texts if text != tokens]
    lookup = Lookup(min_n, min_n + more, texts)
    at = 0
    while at < len(tokens):
        at = min(at + data.draw(st.integers(1, 5)), len(tokens))
        if tokens[:at] not in texts:
            assert lookup.propose(tokens[:at], count) == naive(
                tokens[:at], texts, count, range(min_n, min_n + more + 1)
            )


class Counted(list[int]):
    """A list that counts the items read."""

    num_read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        value = super().__getitem__(key)
        self.num_read += len(value) if isinstance(key, slice) else 1
        return value


def test_a_call_reads_as_many_tokens_as_are_new_and_not_all() -> None:
    tokens = Counted(range(10_000))
    lookup = Lookup()
    for _ in range(-(-len(tokens) // MOST_NEW)):  # a long text is indexed in several calls
        tokens.num_read = 0
        lookup.propose(tokens, 4)
        assert tokens.num_read <= 6 * MOST_NEW
    for token in range(10):
        tokens.append(token)
        tokens.num_read = 0
        lookup.propose(tokens, 4)
        assert tokens.num_read <= 30


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 5), r"Lookup.min_n must be an integer in 1\.\.8, got 0"),
        ((2, 9), r"Lookup.max_n must be an integer in 1\.\.8, got 9"),
        ((True, 5), "min_n must be an integer in .*, got True"),
        ((2, 2.5), r"max_n must be an integer in .*, got 2\.5"),
        ((4, 3), "min_n must be at most max_n, got 4 and 3"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Lookup(*sizes)
