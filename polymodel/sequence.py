"""What the lane works on: a request (Sequence), or tokens that a session hands in (Feed); each with its Context."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from torch import Tensor

from polymodel.config import Draft, Drafter, DynamicPrecision
from polymodel.control import AcceptanceRates, Throttle
from polymodel.errors import Forgotten, NonFiniteLogits
from polymodel.events import Kind
from polymodel.kv import PageList, Swapped
from polymodel.lookup import Lookup
from polymodel.prefix import Lease
from polymodel.provisional import Spans
from polymodel.residency import Hosted
from polymodel.sample import Sampler
from polymodel.stop import StopStrings

LogitsProcessor = Callable[[list[int], Tensor], Tensor]  # tokens so far, logits [vocab] float32 -> logits [vocab]


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


class Signal:
    """Tells those who wait, in threads or event loops, that something has changed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # entered as such, lest an interrupt leaves it held
        self._condition = threading.Condition(self._lock)
        self._listeners: list[Callable[[], None]] = []

    def notify(self) -> None:
        with self._lock:
            self._condition.notify_all()
        for listener in tuple(self._listeners):
            listener()

    def wait(self, done: Callable[[], bool]) -> None:
        with self._lock:
            self._condition.wait_for(done)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """The listener is called after every change, by whoever makes it; it must not raise."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


class State(Enum):
    WAITING = "waiting"  # some tokens before the last are not yet in the pages
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
class Work:
    """What waits for the lane, in order of priority, then deadline, then arrival."""

    number: int = -1  # in order of arrival
    priority: int = 0  # larger goes first
    deadline: float = math.inf  # time.perf_counter
    state: State = State.WAITING
    error: BaseException | None = None
    signal: Signal = field(default_factory=Signal)
    submitted: float = field(default_factory=time.perf_counter)
    served: float = 0.0  # when it was last part of a forward
    blocked_by: Literal["", "pages", "prefill"] = ""  # what it waits for: pages, or another prompt's prefill

    @property
    def context(self) -> Context:
        raise NotImplementedError

    @property
    def rank(self) -> tuple[int, float, int]:
        """Smaller goes first, and is the last to be preempted."""
        return -self.priority, self.deadline, self.number

    @property
    def since(self) -> float:
        """Since when it has waited."""
        return self.served or self.submitted

    @property
    def is_over(self) -> bool:
        return self.state in (State.DONE, State.FAILED)

    def fail(self, error: BaseException) -> None:
        raise NotImplementedError


@dataclass(eq=False)
class DraftRecord:
    """What one drafter did for one request."""

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_catch_up: int = 0  # tokens that it read because it had not drafted from the start
    seconds: float = 0.0
    num_absent: int = 0  # rounds in which it was not in memory
    error: str = ""  # that ended its drafting
    positions: list[list[int]] = field(default_factory=list)  # proposed and accepted by position, if it got there

    def count(self, num_drafted: int, num_accepted: int, reached: int, stood: int) -> None:
        """A round: tokens that were verified, and how many of its first positions were judged and stood."""
        self.num_rounds += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.positions += [[0, 0] for _ in range(reached - len(self.positions))]
        for i in range(reached):
            self.positions[i][0] += 1
            self.positions[i][1] += i < stood

    def profile(self) -> list[dict[str, float]]:
        """Of each position: how often all before it stood, how often it stood then too, and the rate."""
        return [
            {"position": i, "proposed": proposed, "accepted": accepted, "rate": accepted / proposed}
            for i, (proposed, accepted) in enumerate(self.positions)
        ]


@dataclass(eq=False, kw_only=True)
class Drafts:
    """Who may draft for a request, and what has been learnt of them."""

    spec: Draft
    names: list[str]  # in order; of models, "ngram", and of the user's own
    is_auto: bool
    pages: dict[str, PageList]  # of models; a twin has none, it drafts in the target's
    own: dict[str, Drafter] = field(default_factory=dict)
    lookup: Lookup | None = None
    rates: dict[str, AcceptanceRates] = field(default_factory=dict)
    records: dict[str, DraftRecord] = field(default_factory=dict)
    throttles: dict[str, Throttle] = field(default_factory=dict)
    num_idle: Counter[str] = field(default_factory=Counter)  # rounds since a throttle let its drafter draft
    untested: tuple[str, int, list[int]] | None = None  # what was looked up but not verified: for whom, where, what
    paused_until: int = 0  # forwards before models draft again, since pages ran short

    @property
    def makes_trees(self) -> bool:
        return self.spec.width > 1 or len(self.names) > 1

    def record(self, name: str) -> DraftRecord:
        return self.records.setdefault(name, DraftRecord())

    @property
    def nbytes(self) -> int:
        return sum(pages.nbytes for pages in self.pages.values())

    def free(self) -> None:
        """Give the drafters' pages back; they can catch up again."""
        for pages in self.pages.values():
            pages.free()

    def drop(self, name: str) -> None:
        """Go on without this drafter."""
        if name in self.names:
            self.names.remove(name)
        if name in self.pages:
            self.pages.pop(name).free()


def fail_by_hook(work: Work, error: BaseException) -> None:
    """A user's own code has raised: its work ends with that and no other's; Ctrl-C is for whoever drives the lane."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    work.fail(error)


@dataclass(eq=False, kw_only=True)
class Sequence(Context, Work):
    """A request: `tokens` is prompt and output; all of it but the last token (the pending one) gets into the pages."""

    hosted: Hosted  # its model, which may be removed before its output is asked for
    max_new_tokens: int
    stop_ids: frozenset[int]
    sampler: Sampler
    stop: StopStrings | None = None
    drafts: Drafts | None = None
    precision: DynamicPrecision | None = None
    logits_processor: LogitsProcessor | None = None
    on_token: Callable[[int], None] | None = None
    on_done: Callable[[Sequence], None] | None = None  # its pages are still there
    swapped: Swapped | None = None  # its pages, if it was preempted by swapping
    is_cancelled: bool = False  # and over as soon as the lane gets to it
    finish_reason: str = ""  # "stop", "length", "cancelled" or "error"
    num_prompt: int = 0
    num_forwards: int = 0  # target forwards after the prefill
    num_drafted: int = 0
    num_accepted: int = 0
    num_draft_rounds: int = 0
    num_low_bit: int = 0  # steps that the low-bit twin did
    num_fallbacks: int = 0  # and those that it was not sure of
    num_preempted: int = 0
    spans: Spans = field(default_factory=Spans)  # the rounds in flight: what they wrote may be dropped
    acceptance_histogram: list[int] = field(default_factory=list)  # rounds by number of accepted tokens
    first_served: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    def __repr__(self) -> str:
        tokens = f"{self.num_prompt} prompt tokens, {len(self.tokens) - self.num_prompt} of {self.max_new_tokens} new"
        return f"<request {self.number} of {self.model!r}: {self.finish_reason or self.state.value}, {tokens}>"

    @property
    def context(self) -> Context:
        return self

    @property
    def output(self) -> list[int]:
        """The new tokens so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_left(self) -> int:
        """New tokens it may still produce."""
        return self.max_new_tokens - (len(self.tokens) - self.num_prompt)

    def num_until_end(self, ids: list[int]) -> int:
        """How many of these new tokens there are up to one that ends the request, itself included."""
        stop = None if self.stop is None else self.stop.copy()
        for count, token in enumerate(ids, 1):
            if token in self.stop_ids or (stop is not None and stop.push(token)):
                return count
        return len(ids)

    def emit(self, ids: list[int]) -> None:
        """Take new tokens up to a stop token or the limit; what lies beyond is not the request's.

        -1 in a token's place, for logits with a NaN, ends the request with NonFiniteLogits; a sink that raises, with
        what it raised.
        """
        now = time.perf_counter()
        for token in ids:
            if not self.first_token:
                self.first_token = now
            if token < 0:
                return self.fail(NonFiniteLogits.of(self.model))
            self.tokens.append(token)
            if self.on_token is not None:
                try:
                    self.on_token(token)
                except BaseException as error:
                    return fail_by_hook(self, error)
                if self.is_over or self.is_cancelled:  # by the hook
                    return
            if token in self.stop_ids or (self.stop is not None and self.stop.push(token)):
                return self.finish("stop")
            if self.num_left <= 0:
                return self.finish("length")
        self.signal.notify()

    @property
    def is_argmax(self) -> bool:
        """Whether its next token is the argmax of the logits as they are."""
        return self.sampler.sampling.is_argmax and self.logits_processor is None

    def strike(self, why: str) -> None:
        self.fail(Forgotten(why))

    def fail(self, error: BaseException) -> None:
        self.finish("error", error)

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End it, once, and give the pages back; it is over when that is done."""
        if self.is_over or self.finish_reason:
            return
        self.finish_reason, self.error, self.finished = reason, error, time.perf_counter()
        try:
            if self.on_done is not None:
                self.on_done(self)
            self.swapped = None
            if self.stop is not None:
                self.stop.flush()
            self.pages.free()
            if self.drafts is not None:
                self.drafts.free()
        finally:
            self.state = State.FAILED if error is not None else State.DONE
            self.signal.notify()


@dataclass(eq=False, kw_only=True)
class Feed(Work):
    """Tokens of a session on their way into its pages, and what is to be chosen after them.

    An error leaves the context with the tokens that were in its pages when the feed began, or last chose.
    """

    into: Context
    kind: Kind  # "prefill" takes over what is cached; "decode" is one token
    choose: Callable[[Tensor], int | None] | None = None  # logits [vocab] -> the next token, None: enough
    floor: int = -1  # tokens that stay whatever happens; -1: those in the pages now
    logits: Tensor | None = None  # [vocab] float32, after the last token

    def __post_init__(self) -> None:
        self.state = State.READY if self.kind == "decode" else State.WAITING
        if self.floor < 0:
            self.floor = len(self.into.pages)
        self._counts = self.into.num_cached, self.into.num_resumed

    @property
    def context(self) -> Context:
        return self.into

    def receive(self, logits: Tensor) -> None:
        """Logits after the last token, which is in the pages now."""
        self.logits, self.floor = logits, len(self.into.tokens)
        self._counts = self.into.num_cached, self.into.num_resumed
        try:
            token = None if self.choose is None else self.choose(logits)
        except BaseException as error:
            return fail_by_hook(self, error)
        if self.is_over:  # the hook has ended its own work
            return
        if token is None:
            return self._finish(State.DONE)
        self.into.tokens.append(token)
        self.state = State.READY

    def fail(self, error: BaseException) -> None:
        if self.is_over:
            return
        self.error = error
        if (excess := len(self.into.pages) - self.floor) > 0:
            self.into.pages.rollback(excess)
        del self.into.tokens[self.floor :]
        self.into.num_cached, self.into.num_resumed = self._counts
        self._finish(State.FAILED)

    def _finish(self, state: State) -> None:
        self.state = state
        self.into.resume_until = 0
        self.signal.notify()
