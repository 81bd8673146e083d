"""Drafts what followed the last tokens when they occurred before: n-gram lookup (Saxena 2023). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from polymodel.config import is_number
from polymodel.errors import InvalidRequest, brief

LONGEST = 8  # tokens of an n-gram
MOST_NEW = 4096  # tokens that are indexed in one call; what is left is in the next ones


class _Index:
    """Where each n-gram of a text ended last, of those that something follows. The text may grow."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(min_n, max_n + 1)
        self._max_n = max_n
        self._ends: dict[tuple[int, ...], int] = {}
        self.num_tokens = 0

    def grow(self, tokens: Sequence[int], most: int) -> None:
        """Index at most so many tokens that are new."""
        stop = min(len(tokens), self.num_tokens + most)
        for end in range(max(self.num_tokens, 1), stop):
            window = tuple(tokens[max(end - self._max_n, 0) : end])
            for n in self._sizes:
                if n > end:
                    break
                self._ends[window[-n:]] = end
        self.num_tokens = stop

    def end(self, gram: tuple[int, ...]) -> int | None:
        return self._ends.get(gram)


class Lookup:
    """The lookup drafter of one sequence: an n-gram is min_n to max_n tokens, 1 <= min_n <= max_n <= 8."""

    def __init__(self, min_n: int = 2, max_n: int = 5, references: Sequence[Sequence[int]] = ()) -> None:
        for name, n in (("min_n", min_n), ("max_n", max_n)):
            if not (is_number(n, int) and 1 <= n <= LONGEST):
                raise InvalidRequest(f"Lookup.{name} must be an integer in 1..{LONGEST}, got {brief(n)}")
        if min_n > max_n:
            raise InvalidRequest(f"Lookup.min_n must be at most max_n, got {min_n} and {max_n}")
        self._sizes = range(max_n, min_n - 1, -1)
        self._own = _Index(min_n, max_n)
        self._references: list[tuple[Sequence[int], _Index]] = []
        for reference in references:
            text = tuple(reference)
            self._references.append((text, _Index(min_n, max_n)))
            self._references[-1][1].grow(text, len(text))

    def for_another(self) -> Lookup:
        """The drafter of another sequence, on the same index of the same references."""
        other = Lookup(self._sizes[-1], self._sizes[0])
        other._references = self._references
        return other

    def propose(self, tokens: Sequence[int], count: int) -> tuple[list[int], int]:
        """Up to `count` tokens that may follow `tokens`, and the length n of the n-gram they follow from, 0 for none.

        The longest suffix that occurred before counts, in `tokens` rather than in a reference, in an earlier reference
        rather than in a later one, and there the last occurrence. One in `tokens` goes on through what is proposed, so
        a loop repeats. Costs O(n) for each token that is new since the last call; tokens taken back cost all anew.
        """
        if len(tokens) < self._own.num_tokens:
            self._own = _Index(self._sizes[-1], self._sizes[0])
        self._own.grow(tokens, MOST_NEW)
        if count <= 0:
            return [], 0
        for n in self._sizes:
            if n > len(tokens):
                continue
            gram = tuple(tokens[len(tokens) - n :])
            if (end := self._own.end(gram)) is not None:
                period = len(tokens) - end
                followed = list(tokens[end : end + count])
                return [followed[i % period] for i in range(count)], n
            for text, known in self._references:
                if (end := known.end(gram)) is not None:
                    return list(text[end : end + count]), n
        return [], 0
