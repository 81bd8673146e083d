"""One request: its tokens, its pages, its state and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from polymodel.errors import Forgotten, NonFiniteLogits
from polymodel.kv import PageList
from polymodel.prefix import Lease
from polymodel.provisional import Spans


class PagesSink:
    """A page list as a sink of provisional spans: the span's tokens are those from `start` on."""

    def __init__(self, pages: PageList, start: int) -> None:
        self.pages = pages
        self.start = start
        self.stop = start  # where what is prepared ends

    def open(self, epoch: int) -> None:
        """Nothing to remember but `start`."""

    def prepare(self, epoch: int, kept: int | None) -> None:
        self.stop = len(self.pages) if kept is None else self.start + kept

    def commit(self, epoch: int) -> None:
        self._cut(self.stop)

    def rollback(self, epoch: int) -> None:
        self._cut(self.start)

    def close(self, epoch: int) -> None:
        """Nothing to forget."""

    def _cut(self, length: int) -> None:
        """What was reserved beyond is given back as well."""
        self.pages.rollback(max(len(self.pages) - length, 0))


class State(Enum):
    WAITING = "waiting"  # prompt not yet in the pages
    READY = "ready"  # one token pending, everything before it in the pages
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False, kw_only=True)
class Context:
    """Tokens for one model, and the pages that hold the first of them."""

    model: str
    domain: str  # whose tokens they are: nothing cached passes from one domain to another
    tokens: list[int]
    pages: PageList
    lease: Lease | None = None  # on the cached prefix that it began with, or left
    has_begun: bool = False  # what was cached has been taken over
    resume_until: int = 0  # tokens before here have their keys and values below resume_layer, from a sibling
    resume_layer: int = 0
    num_cached: int = 0  # tokens whose pages were taken over
    num_resumed: int = 0  # tokens that went through the layers from resume_layer on only
    num_token_layers: int = 0  # tokens prefilled, times the layers that each went through


@dataclass(eq=False, kw_only=True)
class Sequence(Context):
    """`tokens` is prompt and output; all of it but the last token (the pending one) gets into the pages."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    drafter: str | None = None
    draft_pages: PageList | None = None
    on_done: Callable[[Sequence], None] | None = None  # its pages are still there
    state: State = State.WAITING
    finish_reason: str = ""  # "stop", "length", "cancelled" or "error"
    error: BaseException | None = None
    num_prompt: int = 0
    num_forwards: int = 0  # target forwards after the prefill
    num_drafted: int = 0
    num_accepted: int = 0
    spans: Spans = field(default_factory=Spans)  # the rounds in flight: what they wrote may be dropped
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

    def strike(self, why: str) -> None:
        self.finish("error", Forgotten(why))

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End it, once, and give the pages back."""
        if self.is_over:
            return
        self.state = State.FAILED if error is not None else State.DONE
        self.finish_reason, self.error, self.finished = reason, error, time.perf_counter()
        if self.on_done is not None:
            self.on_done(self)
        self.pages.free()
        self.drop_drafter()
