"""One request: its tokens, its pages, its state and what it cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from polymodel.errors import NonFiniteLogits
from polymodel.kv import PageList


class State(Enum):
    WAITING = "waiting"  # prompt not yet in the pages
    READY = "ready"  # one token pending, everything before it in the pages
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False)
class Sequence:
    """`tokens` is prompt and output; all of it but the last token (the pending one) gets into the pages."""

    model: str
    tokens: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int]
    pages: PageList
    drafter: str | None = None
    draft_pages: PageList | None = None
    state: State = State.WAITING
    finish_reason: str = ""  # "stop", "length", "cancelled" or "error"
    error: BaseException | None = None
    num_prompt: int = 0
    num_forwards: int = 0  # target forwards after the prefill
    num_drafted: int = 0
    num_accepted: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # rounds by number of accepted tokens
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    finished: float = 0.0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_left(self) -> int:
        """New tokens it may still produce."""
        return self.max_new_tokens - (len(self.tokens) - self.num_prompt)

    @property
    def is_over(self) -> bool:
        return self.state in (State.DONE, State.FAILED)

    def emit(self, ids: list[int]) -> None:
        """Take new tokens up to a stop token or the limit; what lies beyond is not the request's.

        -1 in a token's place, for logits with a NaN, ends the request with NonFiniteLogits.
        """
        now = time.perf_counter()
        for token in ids:
            if not self.first_token:
                self.first_token = now
            if token < 0:
                return self.finish("error", NonFiniteLogits.of(self.model))
            self.tokens.append(token)
            if token in self.stop_ids:
                return self.finish("stop")
            if self.num_left <= 0:
                return self.finish("length")

    def drop_drafter(self) -> None:
        """Go on without drafts."""
        self.drafter = None
        if self.draft_pages is not None:
            self.draft_pages.free()

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End it, once, and give the pages back."""
        if self.is_over:
            return
        self.state = State.FAILED if error is not None else State.DONE
        self.finish_reason, self.error, self.finished = reason, error, time.perf_counter()
        self.pages.free()
        self.drop_drafter()
