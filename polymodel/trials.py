"""What drafting costs and yields here: forwards that are timed, drafters that are tried on tokens that are known."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polymodel.config import EngineConfig, is_number
from polymodel.control import AcceptanceRates, CostTable
from polymodel.errors import InvalidRequest, KVFull, brief
from polymodel.events import Events
from polymodel.growth import Ranks
from polymodel.kv import Arena, PageList
from polymodel.model import Panel, forward
from polymodel.residency import Residency
from polymodel.sample import greedy
from polymodel.sequence import Drafts, Sequence

AUTO_FACTOR = 4  # "auto" may draft so many times EngineConfig.draft_tokens
EXPLORED = 0.01  # of the time that decoding takes goes into timing forwards and trying drafters
TIMED_ROWS = (2, 3, 5, 9, 17)  # rows of a forward whose time decides how much to draft
TIMES = 3  # that each of these is timed at least
SHADOW = 48  # known tokens on which a drafter is tried
JUDGED = 32  # and the last of them, which count
STALE = 64  # rounds after which it is tried again
WORTH = 1.05  # a drafter is tried if it could be so many times as fast were it always right


class Trials:
    """The record of costs and acceptance, and what is done for it: for at most EXPLORED of the time that it decodes.

    costs: seconds of a model's forward by tokens in flight. Tables that are given are taken as they are.
    """

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
        self.costs: dict[str, CostTable] = dict(costs or {})
        self.pairs: dict[tuple[str, str], AcceptanceRates] = {}  # by target and drafter: what a new session begins with
        self.ranks: dict[tuple[str, str], list[Ranks]] = {}  # of trees, by target and drafter, and by depth
        self._is_given = frozenset(self.costs)
        self._credit: defaultdict[str, float] = defaultdict(float)  # seconds, by target
        self._timed: Counter[tuple[str, int]] = Counter()  # forwards by model and rows
        self._tried: dict[tuple[str, str], int] = {}  # by target and drafter: the round of the last trial
        self._rounds: Counter[str] = Counter()

    # ---- the record

    def cost(self, name: str) -> CostTable:
        return self.costs.setdefault(name, CostTable())

    def observe_cost(self, name: str, tokens: int, seconds: float) -> None:
        """A forward through all layers took so long."""
        if name not in self._is_given:
            self.cost(name).observe(tokens, seconds)
            self._timed[name, tokens] += 1

    def pair(self, target: str, key: str) -> AcceptanceRates:
        return self.pairs.setdefault((target, key), AcceptanceRates())

    def rates(self, target: str, drafts: Drafts, key: str) -> AcceptanceRates:
        """This session's; it begins with what other sessions of the pair have shown."""
        if key not in drafts.rates:
            drafts.rates[key] = AcceptanceRates(prior=self.pair(target, key))
        return drafts.rates[key]

    def observe(self, target: str, drafts: Drafts, key: str, num_proposed: int, num_accepted: int) -> None:
        self.rates(target, drafts, key).observe(num_proposed, num_accepted)
        self.pair(target, key).observe(num_proposed, num_accepted)

    def forget(self, name: str) -> None:
        """A model is gone, and what was learnt of it."""
        records: tuple[dict[Any, Any], ...] = self.pairs, self.ranks, self._tried, self._timed
        for record in records:
            for key in [key for key in record if name in key]:
                del record[key]
        if name not in self._is_given:
            self.costs.pop(name, None)
        self._credit.pop(name, None)
        del self._rounds[name]

    # ---- trials

    def earn(self, target: str, seconds: float) -> None:
        """So long it decoded."""
        self._credit[target] += seconds * EXPLORED

    def explore(self, target: str, mates: Seq[str], sequences: Seq[Sequence]) -> int:
        """The next trial, if there is credit for it and pages are to spare; bytes streamed."""
        self._rounds[target] += 1
        if not self.cost(target).is_known:
            return 0
        for name, seconds, act in self._next(target, mates, sequences):
            if seconds > self._credit[target]:
                break
            start = time.perf_counter()
            try:
                with self.arena.spare_only():
                    act()
            except KVFull:
                break
            self._credit[target] -= time.perf_counter() - start
            return self.residency[name].plan.nbytes
        return 0

    def _next(
        self, target: str, mates: Seq[str], sequences: Seq[Sequence]
    ) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """What would be learnt: which model runs, the seconds it should take, and the act itself."""
        table = self.cost(target)
        rows = min(TIMED_ROWS, key=lambda rows: self._timed[target, rows])
        if target not in self._is_given and self._timed[target, rows] < TIMES:
            yield target, table.seconds(rows), partial(self._time, target, rows)
        for name in mates:
            if not self.cost(name).is_known:
                share = self.residency[name].plan.nbytes / self.residency[target].plan.nbytes
                yield name, table.seconds(1) * share, partial(self._time, name, 1)
            elif self._could_gain(target, name) and self._is_stale(target, name):
                yield name, self.cost(name).seconds(SHADOW), partial(self._attempt, target, name, sequences)

    def _could_gain(self, target: str, name: str) -> bool:
        """Whether it would be worth it were it always right."""
        ours, step = self.cost(target), self.cost(name).seconds(1)
        lengths = range(1, self.config.draft_tokens * AUTO_FACTOR + 1)
        best = max((length + 1) / (length * step + ours.seconds(length + 1)) for length in lengths)
        return best * ours.seconds(1) > WORTH

    def _is_stale(self, target: str, name: str) -> bool:
        last = self._tried.get((target, name))
        return last is None or self._rounds[target] - last > STALE

    def _attempt(self, target: str, name: str, sequences: Seq[Sequence]) -> None:
        records = [s.drafts.rates[name] for s in sequences if s.drafts is not None and name in s.drafts.rates]
        longest = max((sequence.tokens for sequence in sequences), key=len)
        self.attempt(target, name, longest, records)

    def attempt(self, target: str, name: str, tokens: Seq[int], records: Seq[AcceptanceRates] = ()) -> None:
        """What a drafter would have said on the last tokens that are known: no forward of the target.

        records: of sessions, that learn it beside the pair.
        """
        self._tried[target, name] = self._rounds[target]
        known = tokens[-SHADOW:]
        if len(known) < 2:
            return
        pages = PageList(self.arena, self.residency[name].layout)
        try:
            with self.residency.lease(name) as model:
                num_read, layers = len(known) - 1, model.config.num_layers
                with self.events.span("shadow", name, tokens=num_read, sequences=1, layers=layers):
                    said = greedy(forward(model, self.arena, Panel([pages], [known[:-1]], "all")))[-JUDGED:]
        finally:
            pages.free()
        right = sum(a == b for a, b in zip(said, known[-len(said) :], strict=True))
        for rates in (self.pair(target, name), *records):
            rates.agree(right, len(said))

    # ---- timing

    def measure(self, name: str, counts: Seq[int], repetitions: int) -> None:
        """Time forwards of so many rows, interleaved. InvalidRequest for what cannot be timed."""
        most = self.residency[name].max_position + 1
        for rows in counts:
            if not (is_number(rows, int) and 1 <= rows <= most):
                raise InvalidRequest(f"measure_costs: {brief(rows)} rows, expected a number in 1..{most}")
        if not (is_number(repetitions, int) and repetitions >= 1):
            raise InvalidRequest(f"measure_costs: {brief(repetitions)} repetitions, expected a number of at least 1")
        for _ in range(repetitions):
            for rows in counts:
                self._time(name, rows)

    def _time(self, name: str, rows: int) -> None:
        """One forward of so many rows, in pages of no request."""
        pages = PageList(self.arena, self.residency[name].layout)
        try:
            with self.residency.lease(name) as model:
                start = time.perf_counter()
                with self.events.span("measure", name, tokens=rows, sequences=1, layers=model.config.num_layers):
                    synchronize(forward(model, self.arena, Panel([pages], [[0] * rows], "all")))
                self.observe_cost(name, rows, time.perf_counter() - start)
        finally:
            pages.free()


def synchronize(logits: Tensor) -> None:
    """So that seconds are those of the work, not of its launches."""
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
