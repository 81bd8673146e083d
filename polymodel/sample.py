"""Logits -> tokens. Greedy: the largest logit, ties to the lowest id."""

from __future__ import annotations

from torch import Tensor

from csrc_triton.fused import argmax
from polymodel.errors import NonFiniteLogits


def greedy(logits: Tensor) -> list[int]:
    """logits [M, V] float32 -> M ids; -1 for a row with a NaN, which is that row's misfortune and no other's."""
    ids: list[int] = argmax(logits).tolist()
    return ids


def greedy_one(logits: Tensor, name: str) -> int:
    """logits [V] float32 -> id; `name` says whose they are, for the error."""
    (token,) = greedy(logits[None])
    if token < 0:
        raise NonFiniteLogits.of(name)
    return token
