"""Who drafts for a request, and how much."""

from __future__ import annotations

from polymodel.errors import InvalidRequest, VocabMismatch
from polymodel.residency import Residency


def pick_drafter(choice: str | None, target: str, residency: Residency, multi_model: bool) -> str | None:
    """`choice` is a model's name, None for plain decoding, or "auto".

    "auto" decodes plainly: no cost of drafting has been measured yet that it could weigh against the gain.
    Raises VocabMismatch where the named model's tokens are not the target's.
    """
    if choice is None or choice == "auto" or not multi_model:
        return None
    if choice == target:
        raise InvalidRequest(f"draft={choice!r}: a model cannot draft for itself; name another one")
    ours, theirs = residency[target].tokenizer, residency[choice].tokenizer
    if ours.vocab_digest() != theirs.vocab_digest():
        first = ours.first_difference(theirs)
        raise VocabMismatch(f"{choice!r} cannot draft for {target!r}: their vocabularies differ, first at id {first}")
    return choice


def draft_length(max_draft: int, num_left: int) -> int:
    """Tokens worth drafting: the round yields one more than it accepts, and never more than are wanted."""
    return max(min(max_draft, num_left - 1), 0)
