"""Which drafted tokens stand. Pure: ids in, counts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polymodel.config import is_number
from polymodel.errors import InvalidRequest, brief


@dataclass(frozen=True, slots=True)
class Accepted:
    """Drafted tokens that equal what the target chose, and what it chose after them."""

    path: tuple[int, ...]  # accepted nodes, from the root down
    num_rejected: int
    next: int | None  # the target's own next token; None where it gave none

    @property
    def num_accepted(self) -> int:
        return len(self.path)

    @property
    def num_advanced(self) -> int:
        """Tokens gained: the accepted ones and the target's own next one, if it gave one."""
        return len(self.path) + (self.next is not None)


def check_tree(num_nodes: int, parents: Sequence[int]) -> None:
    """Raises InvalidRequest unless every node's parent is an earlier node, or -1 for the token before the tree."""
    if len(parents) != num_nodes:
        raise InvalidRequest(f"a tree of {num_nodes} drafted tokens needs as many parents, got {len(parents)}")
    for node, parent in enumerate(parents):
        if not (is_number(parent, int) and -1 <= parent < node):
            raise InvalidRequest(f"node {node}'s parent is {brief(parent)}, expected -1 or an earlier node")


def accept_tree(ids: Sequence[int], parents: Sequence[int], target: Sequence[int | None]) -> Accepted:
    """The path on which every token is the target's choice after the one before it.

    ids[i] is a drafted token below node parents[i] < i, or below the pending token where that is -1. target[0] is the
    target's choice after the pending token and target[1 + i] that after node i. Of several children with the same token
    the first counts. Where the target is too short to tell what comes after a node, or says None, the path ends there
    without a next token. Only the target's length and the rows on the path are read, each row once and from the root
    down, so it may compute them when asked. Raises InvalidRequest for parents that are no tree.
    """
    check_tree(len(ids), parents)
    num_rows = len(target)
    choice = target[0] if num_rows else None
    path: list[int] = []
    last = -1
    for node, parent in enumerate(parents):  # a child comes after its parent: one pass sees the whole path
        if choice is None:
            break
        if parent == last and ids[node] == choice:
            path.append(node)
            last = node
            choice = target[node + 1] if node + 1 < num_rows else None
    return Accepted(tuple(path), len(ids) - len(path), choice)


def accept_chain(draft: Sequence[int], target: Sequence[int | None]) -> Accepted:
    """The longest prefix of the draft that the target agrees with.

    target[i] is the target's choice after the context and draft[:i]; normally one longer than the draft.
    """
    return accept_tree(draft, range(-1, len(draft) - 1), target)


def expected_tokens(num_drafted: int, acceptance: float) -> float:
    """Tokens a verify yields: sum of a^i for i in 0..K (Leviathan et al. 2023); a is clamped to [0, 1]."""
    a = min(max(acceptance, 0.0), 1.0)
    return 1.0 + sum(a**i for i in range(1, num_drafted + 1))
