"""Stop strings over the tokens of a small vocabulary, against a search of the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_tokenizer

from polymodel.errors import InvalidRequest
from polymodel.stop import StopStrings
from polymodel.tokenizer import DecodeStream, Tokenizer

MERGES = ("a b", "ab c", "abc a", "b c", "c d", "a a", "Ċ Ċ", "Ġ a")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("stop"), merges=MERGES))


def ids(tokenizer: Tokenizer, *pieces: str | bytes) -> list[int]:
    """A token for each piece."""
    known = {tokenizer.token_bytes(at): at for at in range(tokenizer.vocab_size) if not tokenizer.is_special(at)}
    return [known[piece.encode() if isinstance(piece, str) else piece] for piece in pieces]


def shown(stops: StopStrings, tokens: list[int]) -> list[str]:
    """The text after every token, up to that which stops."""
    texts = []
    for token in tokens:
        is_found = stops.push(token)
        texts.append(stops.text)
        if is_found:
            break
    return texts


@pytest.mark.parametrize(
    ("stop", "pieces", "expected", "is_found"),
    [
        ("b", ["a", "b"], ["a", "a"], True),  # a token of its own
        ("bca", ["a", "b", "c", "a", "a"], ["a", "a", "a", "a"], True),  # over several
        ("b", ["c", "abca"], ["c", "ca"], True),  # inside of one
        ("abcd", ["abca", "bc", "d"], ["abc", "abc", "abc"], True),  # begins inside of one
        ("aab", ["a", "a", "a", "b"], ["", "", "a", "a"], True),  # after a false start that overlaps it
        ("abd", ["a", "b", "c", "d"], ["", "", "abc", "abcd"], False),
        (["cd", "bc"], ["a", "b", "cd"], ["a", "a", "a"], True),  # bc comes first in the text
        (["bc", "b"], ["a", "bc"], ["a", "a"], True),
        (["abc", "bb"], ["ab", "b"], ["", "a"], True),  # what hoped for one was part of another
        (["x"], ["ab", "c"], ["ab", "abc"], False),
        ([], ["ab", "c"], ["ab", "abc"], False),
        ("\n\n", ["a", "\n", "\n"], ["a", "a", "a"], True),
        (" a", [" a", "b"], [""], True),  # the space before the first token is part of the text
    ],
)
def test_text_is_shown_up_to_a_stop_string_or_what_may_become_one(
    tokenizer: Tokenizer, stop: Any, pieces: list[str], expected: list[str], is_found: bool
) -> None:
    stops = StopStrings(tokenizer, stop)
    assert shown(stops, ids(tokenizer, *pieces)) == expected
    assert stops.is_found is is_found


def test_characters_are_complete_before_they_count(tokenizer: Tokenizer) -> None:
    stops = StopStrings(tokenizer, ["é!", "€"])
    assert shown(stops, ids(tokenizer, *(bytes([b]) for b in "aéb€c".encode()))) == ["a", "a", "a", "aéb", *["aéb"] * 3]
    assert stops.is_found


def test_what_was_held_back_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    stops = StopStrings(tokenizer, "abcd")
    assert shown(stops, ids(tokenizer, "c", "abc", b"\xc3")) == ["c", "c", "c"]
    stops.flush()
    assert stops.text == "cabc\ufffd" and not stops.is_found
    stops.flush()
    assert stops.text == "cabc\ufffd"


def test_a_broken_character_at_the_end_may_be_a_stop_string(tokenizer: Tokenizer) -> None:
    stops = StopStrings(tokenizer, "a\ufffd")
    assert shown(stops, ids(tokenizer, "b", "a", b"\xc3")) == ["b", "b", "b"]
    stops.flush()
    assert stops.text == "b" and stops.is_found


def test_nothing_counts_after_the_stop_string(tokenizer: Tokenizer) -> None:
    stops = StopStrings(tokenizer, "b")
    a, b = ids(tokenizer, "a", "b")
    assert [stops.push(token) for token in (a, b, a)] == [False, True, True]
    stops.flush()
    assert stops.text == "a"


def test_control_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    stops = StopStrings(tokenizer, ["<s>", "bc"])
    assert shown(stops, [*ids(tokenizer, "b"), 1, *ids(tokenizer, "c")]) == ["", "", ""]
    assert stops.is_found


def test_what_would_come_is_not_taken(tokenizer: Tokenizer) -> None:
    stops = StopStrings(tokenizer, ["abcd", "é"])
    a, bc, d, c, *accent = ids(tokenizer, "a", "bc", "d", "c", b"\xc3", b"\xa9")
    assert stops.would_find([a, bc, d, c]) and not stops.would_find([a, bc]) and not stops.would_find([])
    assert stops.would_find([c, *accent]) and not stops.would_find([c, accent[0], a])
    assert (stops.text, stops.is_found) == ("", False)
    assert shown(stops, [c, a, bc]) == ["c", "c", "c"]
    assert stops.would_find([d]) and not stops.would_find([c, d])  # what is held back counts
    assert stops.text == "c" and not stops.push(c) and stops.text == "cabcc"
    assert not stops.push(accent[0])
    assert stops.would_find(accent[1:]) and not stops.would_find([a])  # half a character, too
    assert stops.push(accent[1]) and stops.text == "cabcc"
    assert stops.would_find([a])


def test_a_copy_of_a_stream_goes_on_by_itself(tokenizer: Tokenizer) -> None:
    space, *accent = ids(tokenizer, " a", b"\xc3", b"\xa9")
    stream = DecodeStream(tokenizer, skip_special=True, strip_space=True)
    early = stream.copy()
    assert stream.push(space) == early.push(space) == "a"  # each strips the first space of its own
    assert early.push(space) == " a" and stream.push(accent[0]) == ""
    late = stream.copy()
    assert late.push(accent[1]) == "é" and late.flush() == ""
    assert early.flush() == "" and stream.push(accent[1]) == "é"


@given(
    st.lists(st.sampled_from(["a", "b", "c", "ab", "abc", "abca", "bc", "aa"]), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_a_step_at_a_time_finds_what_a_search_of_the_text_finds(
    tokenizer: Tokenizer, pieces: list[str], wanted: list[str]
) -> None:
    stops, text, before = StopStrings(tokenizer, wanted), "", ""
    for token, piece in zip(ids(tokenizer, *pieces), pieces, strict=True):
        would_find = stops.would_find([token])
        is_found, text = stops.push(token), text + piece
        assert would_find is is_found
        starts = [text.find(stop) for stop in wanted if stop in text]
        assert is_found is bool(starts) and stops.text.startswith(before)
        before = stops.text
        hopes = [at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in wanted)]
        assert before == text[: min(starts or hopes or [len(text)])]
        if is_found:
            return
    stops.flush()
    assert stops.text == text


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ("", r"stop string 0 of 0 characters must be a string of 1\.\.256 characters, got ''"),
        (["a", ""], "stop string 1 of 0 characters"),
        ("a" * 257, "stop string 0 of 257 characters"),
        (["a"] * 17, "17 given, at most 16"),
        ([b"a"], "stop string 0 must be .*, got b'a'"),
        (b"ab", "stop string 0 must be .*, got 97"),
        ([1], "got 1"),
        (None, "a string or a list of strings, got None"),
        ({"a"}, "a string or a list of strings, got {'a'}"),
    ],
)
def test_what_is_no_stop_string_is_refused(tokenizer: Tokenizer, stops: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StopStrings(tokenizer, stops)


def test_the_most_that_is_allowed_is_taken(tokenizer: Tokenizer) -> None:
    long = ["a" * 255 + last for last in "bcdefghijklmnopq"]
    stops = StopStrings(tokenizer, long)
    assert stops.stops == tuple(long)
    tokens = ids(tokenizer, *["a"] * 300, "q")
    assert [stops.push(token) for token in tokens] == [False] * 300 + [True]
    assert stops.text == "a" * 45
