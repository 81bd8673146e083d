"""Idle residents draft: a model proposes the next tokens of another model's sequence."""

from __future__ import annotations

from polymodel.kv import Arena
from polymodel.model import Model, Panel, forward
from polymodel.sample import greedy_one
from polymodel.sequence import Sequence


def draft_chain(model: Model, arena: Arena, sequence: Sequence, count: int) -> list[int]:
    """The drafter's own greedy continuation, `count` tokens.

    Its pages keep what they share with the sequence; tokens it has not seen come in one prefill-shaped chunk.
    """
    pages = sequence.draft_pages
    assert pages is not None
    missing = sequence.tokens[len(pages) :]
    drafted: list[int] = []
    while len(drafted) < count:
        logits = forward(model, arena, Panel([pages], [missing]))
        missing = [greedy_one(logits[0], "drafter")]
        drafted += missing
    return drafted


def settle(sequence: Sequence, num_verified: int) -> None:
    """Drop from the drafter's pages what the target did not keep: all but the sequence's first num_verified tokens."""
    pages = sequence.draft_pages
    if pages is not None and len(pages) > num_verified:
        pages.rollback(len(pages) - num_verified)
