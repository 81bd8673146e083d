"""Waiting prompts -> pages and first tokens, several sequences in one forward, in chunks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from polymodel.kv import Arena
from polymodel.model import Model, Panel, forward
from polymodel.sample import greedy
from polymodel.sequence import Sequence, State


def take_chunk(waiting: Seq[Sequence], max_tokens: int) -> list[tuple[Sequence, list[int]]]:
    """The next prompt tokens of the first sequences, at most max_tokens in all."""
    chunk, room = [], max_tokens
    for sequence in waiting:
        rest = sequence.tokens[len(sequence.pages) :][:room]
        if not rest:
            break
        chunk.append((sequence, rest))
        room -= len(rest)
    return chunk


def prefill(model: Model, arena: Arena, chunk: Seq[tuple[Sequence, list[int]]]) -> None:
    """One forward over a chunk; a sequence whose prompt is complete gets its first token and is ready."""
    ends = [len(sequence.pages) + len(ids) == sequence.num_prompt for sequence, ids in chunk]
    panel = Panel([s.pages for s, _ in chunk], [ids for _, ids in chunk], "last" if any(ends) else "none")
    logits = forward(model, arena, panel)
    complete = [i for i, is_end in enumerate(ends) if is_end]
    if not complete:
        return
    for i, token in zip(complete, greedy(logits[complete]), strict=True):
        chunk[i][0].state = State.READY
        chunk[i][0].emit([token])
