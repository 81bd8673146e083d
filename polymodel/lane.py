"""The one decode loop: whose turn, prefill, draft, verify, accept, commit. Only the lane issues forwards."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from polymodel.accept import accept_chain
from polymodel.config import EngineConfig
from polymodel.control import draft_length
from polymodel.draft import draft_chain, settle
from polymodel.errors import EngineClosed, KVFull, NonFiniteLogits, QueueFull
from polymodel.events import Events
from polymodel.kv import Arena
from polymodel.model import Model, Panel, forward
from polymodel.prefill import prefill, take_chunk
from polymodel.residency import Residency
from polymodel.sample import greedy
from polymodel.schedule import RoundRobin
from polymodel.sequence import Sequence, State


class Lane:
    """A turn is one model and all its ready sequences. Whoever waits for a request drives the lane, one at a time."""

    def __init__(self, config: EngineConfig, residency: Residency, arena: Arena, events: Events) -> None:
        self.config = config
        self.residency = residency
        self.arena = arena
        self.events = events
        self.lock = threading.RLock()
        self.live: list[Sequence] = []
        self.is_closed = False
        self._policy = RoundRobin()

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
            self.live.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        with self.lock:
            sequence.finish("cancelled")
            self._drop_finished()

    def close(self) -> None:
        """Fail what is still running; nothing can be submitted afterwards."""
        with self.lock:
            self.is_closed = True
            for sequence in self.live:
                sequence.finish("error", EngineClosed("the engine was closed"))
            self.live.clear()

    def turn(self) -> bool:
        """One model's turn: a chunk of prompts, then a quantum of decode steps. False if there was no work."""
        with self.lock:
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
        chunk = take_chunk([s for s in mine if s.state is State.WAITING], self.config.prefill_chunk)
        if not chunk:
            return
        try:
            self._fill(name, model, chunk)
        except KVFull:
            self._free_drafts()
            for sequence, ids in chunk:  # one by one, so that only those fail that are too long for what is left
                try:
                    self._fill(name, model, [(sequence, ids)])
                except KVFull as error:
                    sequence.finish("error", error)

    def _fill(self, name: str, model: Model, chunk: list[tuple[Sequence, list[int]]]) -> None:
        with self.events.span("prefill", name, tokens=sum(len(ids) for _, ids in chunk), sequences=len(chunk)):
            prefill(model, self.arena, chunk)

    def _free_drafts(self) -> bool:
        """Give up all drafters' pages, and what targets reserved for drafts; whether there were any."""
        drafted = [s for s in self.live if s.draft_pages is not None and s.draft_pages.nbytes]
        for sequence in drafted:
            settle(sequence, 0)
            sequence.pages.rollback(0)
        return bool(drafted)

    def _decode(self, name: str, model: Model, ready: list[Sequence], drafting: bool = True) -> None:
        """One round: draft, verify every sequence's [pending, drafts] in one forward, accept, commit."""
        drafts = [self._draft(sequence) if drafting else [] for sequence in ready]
        panel = Panel(
            [s.pages for s in ready],
            [[s.tokens[-1], *draft] for s, draft in zip(ready, drafts, strict=True)],
            "all" if any(drafts) else "last",
        )
        try:
            with self.events.span("decode", name, tokens=sum(len(ids) for ids in panel.ids), sequences=len(ready)):
                chosen = greedy(forward(model, self.arena, panel))
        except KVFull as error:
            if self._free_drafts():
                return self._decode(name, model, ready, drafting=False)
            ready[-1].finish("error", error)  # the youngest makes room; the others go on in the next step
            return
        start = 0
        for sequence, draft in zip(ready, drafts, strict=True):
            self._commit(sequence, draft, chosen[start : start + len(draft) + 1])
            start += len(draft) + 1

    def _draft(self, sequence: Sequence) -> list[int]:
        name, count = sequence.drafter, draft_length(self.config.draft_tokens, sequence.num_left)
        if name is None or not count or not self.residency.is_resident(name):
            return []
        if len(sequence.tokens) + count > self.residency[name].config.max_context:
            return []
        with ExitStack() as stack:
            drafter = stack.enter_context(self.residency.lease(name))
            stack.enter_context(self.events.span("draft", name, tokens=count, sequences=1))
            try:
                return draft_chain(drafter, self.arena, sequence, count)
            except KVFull:  # drafts are the first thing given up
                settle(sequence, 0)
            except NonFiniteLogits:
                sequence.drop_drafter()
            return []

    def _commit(self, sequence: Sequence, draft: list[int], target: list[int]) -> None:
        """Keep the accepted rows, drop the others by a shorter length, emit the tokens."""
        verdict = accept_chain(draft, target)
        sequence.num_forwards += 1
        if draft:
            sequence.num_drafted += len(draft)
            sequence.num_accepted += verdict.num_accepted
            histogram = sequence.acceptance_histogram
            histogram += [0] * (verdict.num_accepted + 1 - len(histogram))
            histogram[verdict.num_accepted] += 1
        sequence.pages.rollback(verdict.num_rejected)
        settle(sequence, len(sequence.pages))
        sequence.emit(target[: verdict.num_advanced])
