"""The one decode loop: whose turn, prefill, draft, verify, accept, commit. Only the lane issues forwards.

It runs in a thread of its own while there is work. Requests and the feeds of sessions are handed to it from any
thread and join or leave between two of its steps. `exclusive` holds it still, and whoever holds it drives it himself.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from csrc_triton.cpu import release_threads
from csrc_triton.pages import KVLayout
from csrc_triton.tree import token_tree
from polymodel.accept import Accepted, accept_tree
from polymodel.config import DEFAULT_DOMAIN, PAGE_TOKENS, EngineConfig
from polymodel.control import CostTable
from polymodel.draft import Drafting, Part, Round
from polymodel.errors import (
    CorruptSession,
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    KVFull,
    QueueFull,
    UnknownModel,
    brief,
)
from polymodel.events import Events, Kind
from polymodel.kv import Arena
from polymodel.model import Model, Panel, commit_paths, forward
from polymodel.prefill import Prefill, Rows, next_rows
from polymodel.residency import Residency
from polymodel.sample import greedy, top1
from polymodel.schedule import Scheduler
from polymodel.schedule import Work as ModelWork
from polymodel.sequence import Context, Feed, Sequence, State, Work, fail_by_hook
from polymodel.trials import Trials

T = TypeVar("T")

LINGER = 2.0  # seconds that the thread stays without work
PATIENCE = 1.0  # seconds that it waits for who wants the lane
GLANCE = 50e-6  # seconds between two looks whether he has it


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
    """A turn is one model and all that waits for it: a chunk of prompts and up to a quantum of decode steps."""

    def __init__(
        self,
        config: EngineConfig,
        residency: Residency,
        arena: Arena,
        events: Events,
        costs: Mapping[str, CostTable] | None = None,
    ) -> None:
        self.config = config
        self.residency = residency
        self.arena = arena
        self.events = events
        self.scheduler = Scheduler(config.lane_policy, max_wait=config.max_wait)
        self.prefill = Prefill(config, residency, arena, events)
        self.drafting = Drafting(Trials(config, residency, arena, events, costs))
        self.prefill.on_forward = self.drafting.trials.observe_cost
        self.live: list[Work] = []  # appended to from any thread, under _wake_lock
        self.sessions: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.session_numbers = count()
        self.orphans: deque[tuple[Context, str]] = deque()  # of sessions that nobody closed, and their ledger's names
        self.is_closed = False
        self._lock = threading.RLock()  # held for a turn, and by who wants none
        # locks are entered as such: an interrupt cannot come between a condition's own Python and its lock
        self._wake_lock = threading.RLock()
        self._wake = threading.Condition(self._wake_lock)  # there is work, or the thread is to end
        self._guests: set[object] = set()  # who waits for the lock
        self._process = os.getpid()
        self._is_in_step = False
        self._ended: deque[tuple[Work, BaseException | None]] = deque()  # from outside; None: a cancelled request
        self._numbers = count()
        self._num_threads = torch.get_num_threads()
        self._thread: threading.Thread | None = None
        self._death: BaseException | None = None
        self._demote_at: float | None = None  # time.monotonic
        residency.on_swap = self.scheduler.swapped
        residency.reclaim_lent = self._return_weights
        arena.reclaimers += [self._give_up_drafts, self._give_up_states, self.prefill.cache.reclaim]
        if config.kv_borrows:
            arena.reclaimers.append(self._give_up_weights)
        self.prefill.cache.on_change = arena.on_states = self.account
        self.account()

    def account(self) -> None:
        """What the arena's bytes are for."""
        ledger, cached, states = self.residency.ledger, self.prefill.cache.nbytes, self.arena.state_bytes
        drafts = sum(r.drafts.nbytes for r in self.requests if r.drafts is not None)
        ledger.set("kv", "prefixes", cached)
        ledger.set("kv", "arena", self.arena.nbytes - cached - states - drafts)
        ledger.set("draft_kv", "arena", drafts)
        ledger.set("band_states", "arena", states)

    # ---- whoever calls

    def check_open(self) -> None:
        self._check_process()
        if self._death is not None:
            raise EngineClosed(f"the lane died of {self._death!r}") from self._death
        if self.is_closed:
            raise EngineClosed("the engine is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EngineClosed(f"the engine belongs to process {self._process}; a fork of it makes one of its own")

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; it joins between two steps."""
        sequence.on_done = self._retire
        with self._wake_lock:
            self.check_open()
            count = sum(not work.is_over for work in self.live)
            if count >= self.config.max_queue:
                raise QueueFull(f"{count} requests are waiting or running, max_queue is {self.config.max_queue}")
            self._enter(sequence)

    def _enter(self, work: Work) -> None:
        self._start_thread()
        work.number = next(self._numbers)
        self.live.append(work)
        self._num_threads = torch.get_num_threads()

    def _start_thread(self) -> None:
        """Where there is none; it begins once _wake_lock is let go."""
        if not self._is_held and self._thread is None and not self.is_closed:
            thread = threading.Thread(target=self._run, name="polymodel lane", daemon=True)
            thread.start()
            self._thread = thread
            atexit.register(self._stop)  # a thread inside torch must not outlive the interpreter
        self._wake.notify_all()

    def enter(self, feeds: Seq[Feed]) -> None:
        """Hand tokens in."""
        with self._wake_lock:
            self.check_open()
            for feed in feeds:
                self._enter(feed)

    def wait_for(self, feeds: Seq[Feed]) -> None:
        """Until the lane is through with them. An error of one, or an interrupted wait, ends the others as well."""
        try:
            for feed in feeds:
                self.wait(feed)
                if feed.error is not None:
                    raise feed.error
        except BaseException as error:
            self._ended.extend((feed, error) for feed in feeds)
            with self.exclusive():
                self._clear_up()
            raise

    def wait(self, work: Work) -> None:
        """Until it is over."""
        self.wait_until(work, lambda: work.is_over)

    def wait_until(self, work: Work, done: Callable[[], bool]) -> None:
        """Until the work has come so far. Whoever holds the lane drives it."""
        if not self._is_held:
            release_threads()
            return work.signal.wait(done)
        if self._is_in_step:
            raise InvalidRequest("a hook or a sink waits for the lane that runs it; hand the work in without waiting")
        while not done():
            if not self.turn() and not done():
                raise InvalidRequest("what is waited for is not this engine's work, which is all done")

    def cancel(self, sequence: Sequence) -> None:
        """End a request between two steps."""
        self.abandon(sequence)
        with self.exclusive():
            if not self._is_in_step:
                self._clear_up()

    def abandon(self, sequence: Sequence) -> None:
        """`cancel` that does not wait, for a garbage collector may call it anywhere."""
        sequence.is_cancelled = True
        self._ended.append((sequence, None))

    def refuse_in_step(self, verb: str) -> None:
        """InvalidRequest for a hook of the step that runs."""
        if self._is_held and self._is_in_step:
            raise InvalidRequest(f"{verb}: called by a hook of the lane that runs it")

    @property
    def _is_held(self) -> bool:
        """Whether this thread has the lane to itself."""
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]  # as threading.Condition asks

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The lane stands still, between two of its steps, while the block runs."""
        if self._is_held:
            yield
            return
        self._check_process()
        guest = object()
        self._guests.add(guest)
        try:
            with self._lock:
                self._guests.discard(guest)
                try:
                    self._clear_up()
                    yield
                    self._unblock()
                finally:
                    self._note_demotion()
        finally:
            self._guests.discard(guest)
            if self.live or self._demote_at is not None:
                with self._wake_lock:
                    self._start_thread()

    def close(self) -> None:
        """Fail what is still running; nothing can be handed in afterwards."""
        self.refuse_in_step("close")
        self._stop()
        with self.exclusive():
            self._fail_all(EngineClosed("the engine was closed"))

    def _stop(self) -> None:
        with self._wake_lock:
            self.is_closed = True
            self._wake.notify_all()
            thread = self._thread
        if thread is not None and not self._is_held and thread is not threading.current_thread():
            thread.join()

    # ---- what is given up on request

    def forget(self, name: str, tokens: list[int], domain: str, keep: int = 0) -> int:
        """Strike out what begins with these tokens, cached or live, for all models of this vocabulary; cached tokens.

        Requests fail with Forgotten, and so do the later verbs of sessions.
        """
        with self.exclusive():
            vocabulary = self.vocabulary(name)
            for one in self._holders(domain):
                if one.tokens[: len(tokens)] == tokens and self.vocabulary(one.model) in ("", vocabulary):
                    one.strike(f"its first {len(tokens)} tokens were forgotten")
            self._drop_finished()
            return self.prefill.forget(name, tokens, domain, keep)

    def drop_domain(self, domain: str) -> int:
        """Free what is cached for a domain, and end its requests and sessions; cached tokens."""
        with self.exclusive():
            for one in self._holders(domain):
                one.strike(f"the domain {domain!r} was dropped")
            self._drop_finished()
            return self.prefill.cache.drop(domain)

    def vocabulary(self, name: str) -> str:
        """Digest of a model's vocabulary, "" if the model is gone or has none."""
        return self.prefill.key(name, DEFAULT_DOMAIN).tokenizer if name in self.residency.hosted else ""

    def remove(self, name: str) -> None:
        """End what a model's requests and sessions do, and let nobody draft by it."""
        for request in self.requests:
            if request.model == name:
                request.finish("cancelled")
            elif request.drafts is not None:
                request.drafts.drop(name)
        for session in list(self.sessions):
            if session.model == name:
                session.strike(f"the model {name!r} was removed")
        self._drop_finished()
        self.scheduler.forget(name)
        self.drafting.forget(name)
        self.account()

    @property
    def requests(self) -> list[Sequence]:
        """Those that are not over, in order of arrival."""
        return [work for work in tuple(self.live) if isinstance(work, Sequence) and not work.is_over]

    def _holders(self, domain: str) -> list[Holder]:
        everyone: list[Holder] = [*self.requests, *self.sessions]
        return [one for one in everyone if one.domain == domain]

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._has_work():
                if torch.get_num_threads() != self._num_threads:
                    torch.set_num_threads(self._num_threads)
                self._let_in()
                self.turn()
        except BaseException as error:
            self._die(error)

    def _let_in(self) -> None:
        """Guests that wait come before the next turn; those who come meanwhile come after it."""
        waiting, until = set(self._guests), time.monotonic() + PATIENCE
        while waiting & self._guests:
            if time.monotonic() > until:  # its thread does not run, or was interrupted on its way out
                self._guests -= waiting
            time.sleep(GLANCE)

    def _has_work(self) -> bool:
        """Wait for some; False when the thread has ended, for want of it or because the lane is closed."""
        until = time.monotonic() + LINGER
        with self._wake_lock:
            while not self.is_closed:
                due, now = self._demote_at, time.monotonic()
                if self.live or (due is not None and due <= now):
                    return True
                if due is None and until <= now:
                    break
                release_threads()
                self._wake.wait((until if due is None else due) - now)
            self._thread = None
            atexit.unregister(self._stop)
            return False

    def _note_demotion(self) -> None:
        """Idle models leave the device in time, and the thread stays for those whose time comes."""
        keep = {work.context.model for work in self.live}
        left = None if self.is_closed else self.residency.demote_idle(keep=keep)
        self._demote_at = None if left is None else time.monotonic() + min(left, threading.TIMEOUT_MAX / 2)

    def _die(self, error: BaseException) -> None:
        """Nobody waits for a lane that is no more."""
        with self._wake_lock:
            self._death, self.is_closed, self._thread = error, True, None
            atexit.unregister(self._stop)
        failure = EngineClosed(f"the lane died of {error!r}")
        failure.__cause__ = error
        with self._lock:
            self._fail_all(failure)

    def _fail_all(self, error: EngineClosed) -> None:
        for work in list(self.live):
            try:
                work.fail(error)
            except BaseException as failure:  # whoever waits is told all the same
                work.error, work.state = failure, State.FAILED
                work.signal.notify()
        self._drop_finished()

    # ---- turns

    def turn(self) -> bool:
        """One model's turn. False if there was no work."""
        with self._lock:
            self._clear_up()
            try:
                works = self._model_works()
                name = self.scheduler.pick(works, time.perf_counter())
                if name is None:
                    return False
                self._take_turn(name, works)
                return True
            finally:
                self._clear_up()
                if not self.live:
                    self.scheduler.pick([], time.perf_counter())  # so that it forgets who streamed alone
                self._note_demotion()
                self.account()

    def _model_works(self) -> list[ModelWork]:
        """What each model has to do; those that gave way for want of pages do not count, unless nobody else is left."""
        works = [work for work in self.live if not work.blocked_by]
        if not works and self.live:
            self._unblock()
            works = [min(self.live, key=lambda w: w.rank)]
        by_model: dict[str, list[Work]] = {}
        for work in works:
            by_model.setdefault(work.context.model, []).append(work)
        found = [
            ModelWork(
                model=name,
                since=min(work.since for work in mine),
                number=min(work.number for work in mine),
                priority=max(work.priority for work in mine),
                deadline=min(work.deadline for work in mine),
                page_in_bytes=self.residency.page_in_bytes(name) if name in self.residency.hosted else 0,
            )
            for name, mine in by_model.items()
        ]
        if self.residency.is_loading:  # who has to be paged in would hold the lane until that is done
            return [work for work in found if not work.page_in_bytes] or found
        return found

    def _take_turn(self, name: str, works: list[ModelWork]) -> None:
        mine = self._mine(name)
        streamed = next(work.page_in_bytes for work in works if work.model == name)
        try:
            with self.residency.lease(name) as model, self.events.span("turn", name, sequences=len(mine)):
                weights = self.residency[name].plan.nbytes
                self._prefetch(works)
                room = self.config.prefill_chunk
                for work in mine:
                    if work.context.pages.layout != model.layout:  # handed in while the name passed to another model
                        work.fail(UnknownModel(f"the model {name!r} that the tokens were for was removed"))
                for step in range(self.config.quantum):
                    room -= (filled := self._fill(name, model, room))
                    ready = self._ready(name)
                    if ready:
                        streamed += self._decode(name, model, ready)
                    streamed += weights if filled else 0
                    self._clear_up()
                    if not (filled or ready or step):
                        for work in self._mine(name):
                            work.blocked_by = "prefill"
                    if not (filled or ready) or self._guests or self.is_closed:
                        break
        except Exception as error:  # the turn's requests carry it to their owners
            for work in self._mine(name):
                work.fail(error)
        if name in self.residency.hosted:  # a turn that found nothing to do costs one as well, so that others come
            self.scheduler.charge(name, streamed or self.residency[name].plan.nbytes)

    def _mine(self, name: str) -> list[Work]:
        """What waits for a model, first in line first."""
        mine = [w for w in self.live if w.context.model == name and not w.is_over and not w.blocked_by]
        return sorted(mine, key=lambda w: w.rank)

    def _ready(self, name: str) -> list[Work]:
        """Those who decode next: where they are too many for a batch, who was served longest ago."""
        ready, most = [w for w in self._mine(name) if w.state is State.READY], self.config.max_batch
        if len(ready) > most:
            ready = sorted(sorted(ready, key=lambda w: (-w.priority, w.served))[:most], key=lambda w: w.rank)
        return ready

    def _prefetch(self, works: list[ModelWork]) -> None:
        """Start to load the model whose turn comes next."""
        name = self.scheduler.upcoming(works, time.perf_counter() + self.scheduler.swap_seconds)
        if name is not None and name in self.residency.hosted and self.residency.page_in_bytes(name):
            self.residency.prefetch(name, keep=[work.model for work in works])

    def _clear_up(self) -> None:
        """Between two steps: end what was cancelled or is late, and give back what sessions left that are gone.

        A collector only appends to these lists, whatever it interrupts.
        """
        while self.orphans:
            context, owner = self.orphans.popleft()
            self.prefill.drop(context)
            self.residency.ledger.set("host_kv", owner, 0)
        while self._ended:
            work, error = self._ended.popleft()
            if error is not None:
                work.fail(error)
            elif isinstance(work, Sequence):
                work.finish("cancelled")
        now = time.perf_counter()
        for work in self.live:
            if work.deadline < now and not work.is_over:
                waited = f"{now - work.submitted:.3f} s after it was submitted"
                work.fail(DeadlineExceeded(f"{work.context.model}: the request's deadline passed, {waited}"))
        self._drop_finished()

    def _drop_finished(self) -> None:
        if any(work.is_over for work in self.live):
            with self._wake_lock:
                self.live = [work for work in self.live if not work.is_over]
            self._unblock()
            self.account()

    def _unblock(self, *, waits_for: tuple[str, ...] = ("pages", "prefill")) -> None:
        for work in self.live:
            if work.blocked_by in waits_for:
                work.blocked_by = ""

    # ---- prefill

    def _fill(self, name: str, model: Model, room: int) -> int:
        """A chunk of the prompts that wait, at most `room` tokens; how many it was."""
        waiting = [w for w in self._mine(name) if w.state is State.WAITING and self._resume(w)]
        chunk = self.prefill.next_chunk([w for w in waiting if w.state is State.WAITING], self.live, room)
        try:
            return self._forward_chunk(name, model, chunk)
        except KVFull:  # one by one, first in line first: each makes room for itself, or gives way
            return sum(self._fill_alone(name, model, rows) for rows in chunk)

    def _fill_alone(self, name: str, model: Model, rows: Rows) -> int:
        work = rows.work
        while work.state is State.WAITING and not work.blocked_by:
            try:
                return self._forward_chunk(name, model, [next_rows(work, len(rows.ids))])
            except KVFull as error:
                self._make_room(work, error)
        return 0

    def _forward_chunk(self, name: str, model: Model, chunk: list[Rows]) -> int:
        if not chunk:
            return 0
        with self._step(row.work for row in chunk):
            for complete, logits in self.prefill.run(model, name, chunk):
                for work in complete:
                    work.state = State.READY
                self._commit_all(model, complete, [Part() for _ in complete], logits)
        self._unblock(waits_for=("prefill",))
        return sum(len(rows.ids) for rows in chunk)

    @contextmanager
    def _step(self, works: Iterable[Work]) -> Iterator[None]:
        """A forward and what its logits lead to, on behalf of these."""
        now = time.perf_counter()
        for work in works:
            work.served = now
            if isinstance(work, Sequence) and not work.first_served:
                work.first_served = now
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    # ---- decode

    def _decode(self, name: str, model: Model, ready: list[Work], drafting: bool = True) -> int:
        """One round: draft, verify everybody's [pending, drafts] in one forward, accept, commit; bytes streamed."""
        for work in ready:
            context = work.context
            if (excess := len(context.pages) - len(context.tokens) + 1) > 0:
                context.pages.rollback(excess)  # of a round that was interrupted before it gave tokens
        with ExitStack() as stack:
            stack.enter_context(self._step(ready))
            ready, streamed = self._low_bit(name, ready) if drafting else (ready, 0)
            drafts = self.drafting.propose(name, ready, stack) if drafting else Round([Part() for _ in ready])
            streamed += drafts.streamed
            pairs = [(w, part) for w, part in zip(ready, drafts.parts, strict=True) if not w.is_over]
            ready, parts = [work for work, _ in pairs], [part for _, part in pairs]
            if not ready:
                return streamed
            is_drafted = any(part.proposal.ids for part in parts)
            kind: Kind = "verify" if is_drafted else "decode"
            start = time.perf_counter()
            try:
                with self.arena.spare_only() if is_drafted else nullcontext():  # nothing is given up for drafts
                    panel = self._panel(ready, parts, stack)
                    tokens, layers = sum(len(ids) for ids in panel.ids), model.config.num_layers
                    with self.events.span(kind, name, tokens=tokens, sequences=len(ready), layers=layers):
                        logits = forward(model, self.arena, panel)
                        chosen = self._choose(ready, logits)
            except KVFull:
                self.drafting.pause(ready)  # once more without drafts, or with room made for each
            else:
                seconds = time.perf_counter() - start
                self.drafting.trials.observe_cost(name, tokens, seconds)
                self.drafting.trials.earn(name, tokens, seconds)
                self._commit_all(model, ready, parts, logits, chosen, panel)
                read = sum(len(w.context.pages) for w in ready) * model.layout.page_bytes // PAGE_TOKENS
                return streamed + self.residency[name].plan.nbytes + read
        if is_drafted:
            return streamed + self._decode(name, model, ready, drafting=False)
        ready = self._with_room(ready)
        return streamed + (self._decode(name, model, ready, drafting=False) if ready else 0)

    def _panel(self, ready: Seq[Work], parts: Seq[Part], stack: ExitStack) -> Panel:
        """Everybody's pending token and drafts; if one is a tree, all are, and their nodes lie in scratch pages."""
        lists = [work.context.pages for work in ready]
        ids = [[w.context.tokens[-1], *part.proposal.ids] for w, part in zip(ready, parts, strict=True)]
        if all(part.proposal.is_chain for part in parts):
            return Panel(lists, ids, "all" if any(part.proposal.ids for part in parts) else "last")
        trees = [token_tree([-1, *(parent + 1 for parent in part.proposal.parents)]) for part in parts]
        nodes = stack.enter_context(lists[0].scratch(sum(map(len, ids))))
        return Panel(lists, ids, "all", trees=trees, nodes=nodes)

    def _low_bit(self, name: str, ready: list[Work]) -> tuple[list[Work], int]:
        """Let the twin decode for who asks for dynamic precision; those left for a full step, and bytes streamed."""
        twin = self.residency[name].twin
        asking = [w for w in ready if isinstance(w, Sequence) and w.precision is not None]
        if not asking or twin not in self.residency.hosted or not self.residency.is_resident(twin):
            return ready, 0
        done: list[Sequence] = []
        with self.residency.lease(twin) as model:
            panel = Panel([w.pages for w in asking], [[w.tokens[-1]] for w in asking], is_exact=False)
            try:
                layers = model.config.num_layers
                with self.events.span("decode", twin, tokens=len(asking), sequences=len(asking), layers=layers):
                    logits = forward(model, self.arena, panel)
                    sure = top1(logits)
            except KVFull:
                return ready, 0
        for work, (margin, prob) in zip(asking, sure, strict=True):
            gate = work.precision
            if gate is not None and margin >= gate.min_margin and prob >= gate.min_prob:
                done.append(work)
            else:
                work.pages.rollback(1)
                work.num_fallbacks += 1
        if done:
            rows = [i for i, work in enumerate(asking) if work in done]
            self._commit_all(model, done, [Part() for _ in done], logits[rows], is_twin=True)
        return [work for work in ready if work not in done], self.residency[twin].plan.nbytes

    def _with_room(self, ready: list[Work]) -> list[Work]:
        """Those whose next token has a place now: first in line first, each makes room for itself or gives way."""
        kept = []
        for work in ready:
            while work.state is State.READY and not work.blocked_by:
                try:
                    work.context.pages.reserve(1)
                except KVFull as error:
                    self._make_room(work, error)
                else:
                    kept.append(work)
                    break
        return [work for work in kept if work.state is State.READY]

    def _choose(self, works: Seq[Work], logits: Tensor) -> list[int]:
        """The argmax of each row [rows, vocab], if anybody's tokens are that."""
        return greedy(logits) if any(isinstance(work, Sequence) and work.is_argmax for work in works) else []

    def _commit_all(
        self,
        model: Model,
        works: Seq[Work],
        parts: Seq[Part],
        logits: Tensor,
        chosen: list[int] | None = None,
        panel: Panel | None = None,
        is_twin: bool = False,
    ) -> None:
        """Each its tokens, or its logits [rows, vocab]. Accepted nodes of trees get into the pages first.

        is_twin: the logits are those of a low-bit twin, to which dynamic precision has left the step.
        """
        ids = self._choose(works, logits) if chosen is None else chosen
        verdicts: list[Accepted | None] = []
        start = 0
        for work, part in zip(works, parts, strict=True):
            stop = start + 1 + len(part.proposal.ids)
            verdicts.append(self._verdict(work, part, logits[start:stop], ids[start:stop]))
            start = stop
        if panel is not None and panel.trees:
            paths: list[list[int]] = []
            for work, verdict in zip(works, verdicts, strict=True):
                path = () if verdict is None else verdict.path
                paths.append([] if work.is_over else [0, *(node + 1 for node in path)])
            commit_paths(model, self.arena, panel, paths)
        start = 0
        for work, part, verdict in zip(works, parts, verdicts, strict=True):
            if work.is_over:
                pass  # a hook has ended it
            elif isinstance(work, Feed):
                work.receive(logits[start] if len(logits) == 1 else logits[start].clone())
            elif isinstance(work, Sequence) and verdict is not None:
                work.num_low_bit += is_twin
                work.num_forwards += not is_twin and work.first_token > 0
                self._commit(work, part, verdict)
            start += 1 + len(part.proposal.ids)

    def _verdict(self, work: Work, part: Part, rows: Tensor, ids: list[int]) -> Accepted | None:
        """Which of a request's drafts stand; its own processor has the last word on every row that counts."""
        if not isinstance(work, Sequence) or work.is_over:
            return None
        proposal = part.proposal
        target: Seq[int | None] = ids if work.is_argmax else _Chosen(work, part, rows)
        try:
            return accept_tree(proposal.ids, proposal.parents, target)
        except BaseException as error:
            fail_by_hook(work, error)
            return None

    def _commit(self, sequence: Sequence, part: Part, verdict: Accepted) -> None:
        """Keep the accepted rows, drop the others by a shorter length, emit the tokens."""
        gained = [part.proposal.ids[node] for node in verdict.path]
        if verdict.next is not None:
            gained.append(verdict.next)
        gained = gained[: sequence.num_until_end(gained)]
        path = verdict.path[: len(gained)]
        self.drafting.settle(sequence, part, path, gained)
        if part.span is not None:
            part.span.promote(1 + len(path))
        sequence.emit(gained)

    # ---- drafts

    @property
    def num_open_spans(self) -> int:
        return sum(sequence.spans.num_open for sequence in self.requests)

    # ---- when pages run short, in this order

    def _give_up_drafts(self, layout: KVLayout, count: int) -> None:
        for sequence in sorted(self.requests, key=lambda r: r.rank, reverse=True):  # the last in line first
            if self.arena.num_free(layout) >= count:
                break
            if sequence.drafts is not None:
                sequence.drafts.free()
        self.account()

    def _give_up_states(self, layout: KVLayout, count: int) -> None:
        self.arena.drop_states()

    def _give_up_weights(self, layout: KVLayout, count: int) -> None:
        """The arena takes over bytes of idle weights."""
        short = self.arena.shortage(layout, count)
        if 0 < short <= min(self.arena.max_bytes - self.arena.nbytes, self.residency.lendable):
            keep = {work.context.model for work in self.live}
            self.arena.grow(self.residency.lend(short, keep))

    def _return_weights(self, num_bytes: int) -> int:
        """The arena gives back what it took over, in whole superblocks; bytes. Cold pages go before idle weights."""
        arena, size = self.arena, self.arena.superblock_bytes
        wanted = -(-num_bytes // size) * size
        returned = arena.shrink(wanted)
        layouts = {hosted.layout for hosted in self.residency.hosted.values()}
        for reclaim in (self._give_up_drafts, self._give_up_states, self.prefill.cache.reclaim):
            for layout in layouts:
                used = -1
                while returned < wanted and used != arena.num_pages_used:
                    used = arena.num_pages_used
                    reclaim(layout, arena.num_free(layout) + layout.pages_per_superblock)
                    returned += arena.shrink(wanted - returned)
        return returned

    def _make_room(self, work: Work, full: KVFull) -> None:
        """Preempt the last in line that holds pages and comes after this one; if there is none, this one gives way.

        Nobody gives way who is first of all: it fails. Nor does a session, which asked for its tokens now.
        """
        if self._preempt_last(after=work if isinstance(work, Sequence) else None):
            return
        if isinstance(work, Sequence) and any(w.rank < work.rank for w in self.requests if w is not work):
            if work.pages.pages:
                self._preempt(work)
            work.blocked_by = "pages"
        elif work.context.lease is not None:  # on cached pages that it may have copies of
            self.prefill.leave(work.context)
        else:
            work.fail(full)

    def with_room(self, act: Callable[[], T]) -> T:
        """Do this on a session's behalf: whoever is last in line makes room for its pages."""
        while True:
            try:
                return act()
            except KVFull:
                if self._is_in_step or not self._preempt_last():  # nobody's pages go in the middle of his round
                    raise

    def _preempt_last(self, after: Sequence | None = None) -> bool:
        """The last in line that holds pages, if it comes after this one; False if there is none."""
        last = max((r for r in self.requests if r.pages.pages), key=lambda r: r.rank, default=None)
        if last is None or (after is not None and last.rank <= after.rank):
            return False
        self._preempt(last)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a request's pages: to the host while its budget has room, else they are computed again. Same tokens."""
        sequence.num_preempted += 1
        sequence.pages.rollback(0)  # what is only reserved
        num_bytes = sequence.pages.nbytes
        with self.events.span("preempt", sequence.model, tokens=len(sequence.pages), sequences=1, num_bytes=num_bytes):
            self.prefill.leave(sequence)
            if sequence.drafts is not None:
                sequence.drafts.free()
            owner = _owner(sequence)
            if self.config.preemption == "swap" and self.residency.reserve_host(owner, num_bytes):
                try:
                    sequence.swapped = sequence.pages.swap_out()
                except (MemoryError, RuntimeError):  # the host has less memory than its budget says
                    self.residency.release_host(owner)
            if sequence.swapped is None:
                sequence.pages.free()
                sequence.has_begun = False
            sequence.resume_until = 0  # what a sibling gave beyond the tokens is not kept
        sequence.state = State.WAITING
        sequence.blocked_by = "pages"
        self._unblock(waits_for=("prefill",))  # nobody need wait for what it will not compute now

    def _retire(self, sequence: Sequence) -> None:
        """Before a request's pages go: what it computed is cached."""
        if sequence.swapped is not None:
            self.residency.release_host(_owner(sequence))
        self.prefill.retire(sequence)

    def _resume(self, work: Work) -> bool:
        """Bring a preempted request's pages back; False while there is no room for them."""
        if not isinstance(work, Sequence) or work.swapped is None:
            return True
        while not (work.blocked_by or work.is_over):
            try:
                with self.events.span("resume", work.model, sequences=1, num_bytes=work.swapped.nbytes):
                    work.pages.swap_in(work.swapped)
            except KVFull as error:
                self._make_room(work, error)
            except CorruptSession as error:
                work.fail(error)
            else:
                work.swapped = None
                self.residency.release_host(_owner(work))
                if len(work.pages) == len(work.tokens) - 1 and len(work.tokens) > work.num_prompt:
                    work.state = State.READY
                return True
        return False


class _Chosen(Seq["int | None"]):
    """The target's choice after each row of a proposal, made when it is asked for: only along what is accepted.

    None after what ends the request, so that a processor is not asked beyond.
    """

    def __init__(self, sequence: Sequence, part: Part, rows: Tensor) -> None:
        self._sequence, self._part, self._rows = sequence, part, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        sequence, proposal = self._sequence, self._part.proposal
        path = [proposal.ids[node] for node in proposal.path_of(row - 1)] if row else []
        so_far = sequence.tokens + path
        logits = self._rows[row]
        if sequence.logits_processor is not None:
            if path and (path[-1] in sequence.stop_ids or (sequence.stop and sequence.stop.would_find(path))):
                return None
            given = logits.clone()
            logits = _checked(sequence.logits_processor(so_far, given), given)
        if sequence.sampler.is_rejection and row < len(proposal.ids):
            probs = self._part.probs[row] if self._part.probs else None
            return sequence.sampler.accept(logits, so_far, proposal.ids[row], probs)
        return sequence.sampler.choose(logits, so_far)


def _checked(processed: object, logits: Tensor) -> Tensor:
    """What a logits_processor gave."""
    if not isinstance(processed, Tensor) or processed.shape != logits.shape:
        found = f"a tensor of {list(processed.shape)}" if isinstance(processed, Tensor) else brief(processed)
        raise InvalidRequest(f"logits_processor gave {found}, expected a tensor of {list(logits.shape)}")
    if bool(processed.isnan().any()):
        raise InvalidRequest("logits_processor gave a NaN")
    if float(processed.max()) == -math.inf:
        raise InvalidRequest("logits_processor forbids every token, expected it to leave one at least")
    return processed


def _owner(sequence: Sequence) -> str:
    """In the ledger."""
    return f"request {sequence.number}"
