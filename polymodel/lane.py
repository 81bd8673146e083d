"""The one decode loop: whose turn, prefill, draft, verify, accept, commit. Only the lane issues forwards."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Protocol

from torch import Tensor

from csrc_triton.pages import KVLayout
from polymodel.accept import accept_chain
from polymodel.config import DEFAULT_DOMAIN, EngineConfig
from polymodel.control import draft_length
from polymodel.draft import draft_chain, settle
from polymodel.errors import EngineClosed, KVFull, NonFiniteLogits, QueueFull
from polymodel.events import Events, Kind
from polymodel.kv import Arena
from polymodel.model import Model, Panel, forward
from polymodel.prefill import Prefill, Rows, next_rows, prefill
from polymodel.provisional import Provisional
from polymodel.residency import Residency
from polymodel.sample import greedy
from polymodel.schedule import RoundRobin
from polymodel.sequence import Context, PagesSink, Sequence, State


class Holder(Protocol):
    """A request or a session: tokens that can be forgotten."""

    @property
    def model(self) -> str: ...
    @property
    def domain(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    def strike(self, why: str) -> None: ...


class Lane:
    """A turn is one model and all its ready sequences. Whoever waits for a request drives the lane, one at a time."""

    def __init__(self, config: EngineConfig, residency: Residency, arena: Arena, events: Events) -> None:
        self.config = config
        self.residency = residency
        self.arena = arena
        self.events = events
        self.lock = threading.RLock()
        self.live: list[Sequence] = []
        self.sessions: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.session_numbers = count()
        self.orphans: deque[tuple[Context, str]] = deque()  # of sessions that nobody closed, and their ledger's names
        self.is_closed = False
        self._cancelled: list[Sequence] = []  # in the midst of something
        self.prefill = Prefill(config, residency, arena, events)
        self._policy = RoundRobin()
        arena.reclaimers += [self._give_up_drafts, self._give_up_states, self.prefill.cache.reclaim]

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineClosed("the engine is closed")

    def submit(self, sequence: Sequence) -> None:
        with self.lock:
            self.check_open()
            if len(self.live) >= self.config.max_queue:
                raise QueueFull(
                    f"{len(self.live)} requests are waiting or running, max_queue is {self.config.max_queue}"
                )
            sequence.on_done = self.prefill.retire
            self.live.append(sequence)

    def extend(self, context: Context, kind: Kind, other: Context | None = None) -> Tensor | None:
        """Bring all tokens of a context into its pages; logits [vocab] after the last, if that was computed.

        A prefill takes over what is cached, or what the other context holds of the same tokens; an error leaves the
        pages with the tokens they had. A decode is one forward.
        """
        with self.lock, self._work(), self.residency.lease(context.model) as model:
            self.check_open()
            before, counts = len(context.pages), (context.num_cached, context.num_resumed)
            logits: Tensor | None = None
            try:
                if other is not None:
                    self.prefill.take(context, other)
                elif kind == "prefill":
                    self.prefill.begin(context)
                while len(context.pages) < len(context.tokens):
                    rows = next_rows(context, self.config.prefill_chunk)
                    logits = prefill(model, self.arena, [rows], self.events, context.model, kind)
            except BaseException:
                if kind == "prefill":
                    context.pages.rollback(len(context.pages) - before)
                context.num_cached, context.num_resumed = counts
                raise
            finally:
                context.resume_until = 0
            return None if logits is None else logits[0]

    def cancel(self, sequence: Sequence) -> None:
        """End a request; later, if this thread is in the midst of the lane's work, as when its collector calls."""
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            self._cancelled.append(sequence)
            return
        with self.lock:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.finish("cancelled")
        self._drop_finished()

    def forget(self, name: str, tokens: list[int], domain: str, keep: int = 0) -> int:
        """Strike out what begins with these tokens, cached or live, for all models of this vocabulary; cached tokens.

        Requests fail with Forgotten, and so do the later verbs of sessions.
        """
        with self.lock:
            vocabulary = self.vocabulary(name)
            for one in self._holders(domain):
                if one.tokens[: len(tokens)] == tokens and self.vocabulary(one.model) in ("", vocabulary):
                    one.strike(f"its first {len(tokens)} tokens were forgotten")
            self._drop_finished()
            return self.prefill.forget(name, tokens, domain, keep)

    def drop_domain(self, domain: str) -> int:
        """Free what is cached for a domain, and end its requests and sessions; cached tokens."""
        with self.lock:
            for one in self._holders(domain):
                one.strike(f"the domain {domain!r} was dropped")
            self._drop_finished()
            return self.prefill.cache.drop(domain)

    def vocabulary(self, name: str) -> str:
        """Digest of a model's vocabulary, "" if the model is gone or has none."""
        return self.prefill.key(name, DEFAULT_DOMAIN).tokenizer if name in self.residency.hosted else ""

    def remove(self, name: str) -> None:
        """End what a model's requests and sessions do, and let nobody draft by it."""
        with self.lock:
            for request in list(self.live):
                if request.model == name:
                    self._end(request)
                elif request.drafter == name:
                    request.drop_drafter()
            for session in list(self.sessions):
                if session.model == name:
                    session.strike(f"the model {name!r} was removed")

    def _holders(self, domain: str) -> list[Holder]:
        everyone: list[Holder] = [*self.live, *self.sessions]
        return [one for one in everyone if one.domain == domain]

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Clear up before and after: what sessions left that are gone, and what was to be cancelled meanwhile."""
        self._clear_up()
        try:
            yield
        finally:
            self._clear_up()

    def _clear_up(self) -> None:
        """A collector only appends to these lists, whatever it interrupts."""
        while self.orphans:
            context, owner = self.orphans.popleft()
            self.prefill.drop(context)
            self.residency.ledger.set("host_kv", owner, 0)
        while self._cancelled:
            self._end(self._cancelled.pop())

    def close(self) -> None:
        """Fail what is still running; nothing can be submitted afterwards."""
        with self.lock:
            self.is_closed = True
            for sequence in self.live:
                sequence.finish("error", EngineClosed("the engine was closed"))
            self.live.clear()

    def turn(self) -> bool:
        """One model's turn: a chunk of prompts, then a quantum of decode steps. False if there was no work."""
        with self.lock, self._work():
            name = self._policy.pick(list(dict.fromkeys(s.model for s in self.live)))
            if name is None:
                return False
            mine = [s for s in self.live if s.model == name]
            try:
                with self.residency.lease(name) as model, self.events.span("turn", name, sequences=len(mine)):
                    self._prefill(name, model, mine)
                    for _ in range(self.config.quantum):
                        ready = [s for s in mine if s.state is State.READY][: self.config.max_batch]
                        if not ready:
                            break
                        self._decode(name, model, ready)
            except Exception as error:  # the turn's requests carry it to their owners
                for sequence in mine:
                    sequence.finish("error", error)
            self._drop_finished()
            return True

    def _drop_finished(self) -> None:
        self.live = [s for s in self.live if not s.is_over]

    def _prefill(self, name: str, model: Model, mine: list[Sequence]) -> None:
        waiting = [s for s in mine if s.state is State.WAITING]
        chunk = self.prefill.next_chunk(waiting, self.live, self.config.prefill_chunk)
        if not chunk:
            return
        try:
            self.prefill.run(model, name, chunk)
        except KVFull:
            for rows in chunk:  # one by one, so that only those fail that are too long for what is left
                self._prefill_alone(name, model, rows)

    def _prefill_alone(self, name: str, model: Model, rows: Rows) -> None:
        sequence = rows.context
        assert isinstance(sequence, Sequence)
        if sequence.state is not State.WAITING:
            return
        try:
            self.prefill.run(model, name, [next_rows(sequence, len(rows.ids))])
        except KVFull as error:
            sequence.finish("error", error)

    def _give_up_drafts(self, layout: KVLayout, count: int) -> None:
        """The first thing given up when pages run short: what drafters hold."""
        for sequence in self.live:
            settle(sequence, 0)

    def _give_up_states(self, layout: KVLayout, count: int) -> None:
        self.arena.drop_states()

    def _decode(self, name: str, model: Model, ready: list[Sequence], drafting: bool = True) -> None:
        """One round: draft, verify every sequence's [pending, drafts] in one forward, accept, commit."""
        for sequence in ready:
            if (excess := len(sequence.pages) - len(sequence.tokens) + 1) > 0:
                sequence.pages.rollback(excess)  # of a round that was interrupted before it gave tokens
        with ExitStack() as stack:
            spans = [self._open_span(sequence, stack) if drafting else None for sequence in ready]
            drafts = [self._draft(sequence) if drafting else [] for sequence in ready]
            panel = Panel(
                [s.pages for s in ready],
                [[s.tokens[-1], *draft] for s, draft in zip(ready, drafts, strict=True)],
                "all" if any(drafts) else "last",
            )
            try:
                tokens, layers = sum(len(ids) for ids in panel.ids), model.config.num_layers
                with self.events.span("decode", name, tokens=tokens, sequences=len(ready), layers=layers):
                    chosen = greedy(forward(model, self.arena, panel))
            except KVFull as error:
                full = error
            else:
                start = 0
                for sequence, draft, span in zip(ready, drafts, spans, strict=True):
                    self._commit(sequence, draft, chosen[start : start + len(draft) + 1], span)
                    start += len(draft) + 1
                return
        if any(drafts):
            self._decode(name, model, ready, drafting=False)
        else:
            ready[-1].finish("error", full)  # the youngest makes room; the others go on in the next step

    def _open_span(self, sequence: Sequence, stack: ExitStack) -> Provisional | None:
        """What a round with drafts writes: the pending token and they, in the target's pages and the drafter's."""
        if sequence.draft_pages is None:
            return None
        sinks = [PagesSink(pages, len(sequence.pages)) for pages in (sequence.pages, sequence.draft_pages)]
        return stack.enter_context(sequence.spans.open(sinks))

    @property
    def num_open_spans(self) -> int:
        return sum(sequence.spans.num_open for sequence in self.live)

    def _draft(self, sequence: Sequence) -> list[int]:
        name, count = sequence.drafter, draft_length(self.config.draft_tokens, sequence.num_left)
        if name is None or not count or not self.residency.is_resident(name):
            return []
        if len(sequence.tokens) + count > self.residency[name].config.max_context:
            return []
        with ExitStack() as stack:
            drafter = stack.enter_context(self.residency.lease(name))
            stack.enter_context(self.events.span("draft", name, tokens=count, sequences=1))
            stack.enter_context(self.arena.spare_only())
            try:
                return draft_chain(drafter, self.arena, sequence, count)
            except KVFull:  # drafts are the first thing given up
                settle(sequence, 0)
            except NonFiniteLogits:
                sequence.drop_drafter()
            return []

    def _commit(self, sequence: Sequence, draft: list[int], target: list[int], span: Provisional | None) -> None:
        """Keep the accepted rows, drop the others by a shorter length, emit the tokens."""
        verdict = accept_chain(draft, target)
        sequence.num_forwards += 1
        if draft:
            sequence.num_drafted += len(draft)
            sequence.num_accepted += verdict.num_accepted
            histogram = sequence.acceptance_histogram
            histogram += [0] * (verdict.num_accepted + 1 - len(histogram))
            histogram[verdict.num_accepted] += 1
        if span is not None:
            span.promote(1 + verdict.num_accepted)
        sequence.emit(target[: verdict.num_advanced])
