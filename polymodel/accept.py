"""Which drafted tokens stand. Pure: ids in, counts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    num_accepted: int  # drafted tokens that equal what the target chose
    num_rejected: int
    num_advanced: int  # tokens gained: the accepted ones and the target's own next one, if it gave one


def accept_chain(draft: Sequence[int], target: Sequence[int]) -> Accepted:
    """The longest prefix of the draft that the target agrees with.

    target[i] is the target's choice after the context and draft[:i]; normally one longer than the draft.
    """
    count = 0
    while count < min(len(draft), len(target)) and draft[count] == target[count]:
        count += 1
    return Accepted(count, len(draft) - count, count + (count < len(target)))


def expected_tokens(num_drafted: int, acceptance: float) -> float:
    """Tokens a verify yields: sum of a^i for i in 0..K (Leviathan et al. 2023); a is clamped to [0, 1]."""
    a = min(max(acceptance, 0.0), 1.0)
    return 1.0 + sum(a**i for i in range(1, num_drafted + 1))
