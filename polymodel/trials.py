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
from polymodel.sample import Sampler, greedy
from polymodel.sequence import Drafts, Sequence

AUTO_FACTOR = 4  # "auto" may draft so many times EngineConfig.draft_tokens
EXPLORED = 0.01  # of the time that decoding takes goes into timing forwards and trying drafters
TIMED_ROWS = (2, 3, 5, 9, 17)  # rows of a forward whose time decides how much to draft
TIMES = 3  # that each of these is timed at least
SHADOW = 48  # known tokens on which a drafter is tried
JUDGED = 32  # and the last of them, which count
STALE = 64  # rounds after which it is tried again; twice as many each time, until it drafts
MOST_STALE = 64 * STALE
WORTH = 1.05  # a drafter is tried if it could be so many times as fast were it always right


UNKNOWN = CostTable.of({})


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
        self.costs = {name: table for name, table in (costs or {}).items() if table.is_known}
        self.pairs: dict[tuple[str, str], AcceptanceRates] = {}  # by target and drafter: what a new session begins with
        self.ranks: dict[tuple[str, str], list[Ranks]] = {}  # of trees, by target and drafter, and by depth
        self._is_given = frozenset(self.costs)
        self._credit: defaultdict[str, float] = defaultdict(float)  # seconds, by target
        self._timed: Counter[tuple[str, int]] = Counter()  # forwards by model and rows
        self._tried: dict[tuple[str, str], int] = {}  # by target and drafter: the round of the last trial
        self._waits: dict[tuple[str, str], int] = {}  # and rounds until the next one
        self._rounds: Counter[str] = Counter()

    # ---- the record

    def cost(self, name: str) -> CostTable:
        """Of a model, unknown until a forward of it has been timed."""
        return self.costs.get(name, UNKNOWN)

    def observe_cost(self, name: str, tokens: int, seconds: float) -> None:
        """A forward through all layers took so long."""
        if name not in self._is_given:
            self.costs.setdefault(name, CostTable()).observe(tokens, seconds)
            self._timed[name, tokens] += 1

    def pair(self, target: str, key: str) -> AcceptanceRates:
        return self.pairs.setdefault((target, key), AcceptanceRates())

    def rates(self, target: str, drafts: Drafts, key: str) -> AcceptanceRates:
        """This session's; it begins with what other sessions of the pair have shown."""
        if key not in drafts.rates:
            drafts.rates[key] = AcceptanceRates(prior=self.pair(target, key))
        return drafts.rates[key]

    def observe(self, target: str, drafts: Drafts, key: str, num_proposed: int, num_accepted: int) -> None:
        self._waits.pop((target, key), None)
        self.rates(target, drafts, key).observe(num_proposed, num_accepted)
        self.pair(target, key).observe(num_proposed, num_accepted)

    def forget(self, name: str) -> None:
        """A model is gone, and what was learnt of it."""
        records: tuple[dict[Any, Any], ...] = self.pairs, self.ranks, self._tried, self._waits, self._timed
        for record in records:
            for key in [key for key in record if name in key]:
                del record[key]
        if name not in self._is_given:
            self.costs.pop(name, None)
        self._credit.pop(name, None)
        del self._rounds[name]

    # ---- trials

    def earn(self, target: str, tokens: int, seconds: float) -> None:
        """A round of so many tokens was decoded in so long."""
        self._credit[target] += self._price(target, tokens, seconds) * EXPLORED

    def _price(self, name: str, tokens: int, seconds: float) -> float:
        """By the given table, if there is one: what it decides does not depend on the clock then."""
        return self.cost(name).seconds(tokens) if name in self._is_given else seconds

    def explore(self, target: str, mates: Seq[str], sequences: Seq[Sequence]) -> int:
        """The next trial, once there is credit for it and if pages are to spare; bytes streamed."""
        self._rounds[target] += 1
        if not self.cost(target).is_known:
            return 0
        for name, tokens, expected, act in self._next(target, mates, sequences):
            if expected > self._credit[target]:
                break
            start = time.perf_counter()
            try:
                with self.arena.spare_only():
                    if not act():
                        continue
            except KVFull:
                continue
            self._credit[target] -= self._price(name, tokens, time.perf_counter() - start)
            return self.residency[name].plan.nbytes
        return 0

    def _next(
        self, target: str, mates: Seq[str], sequences: Seq[Sequence]
    ) -> Iterator[tuple[str, int, float, Callable[[], bool]]]:
        """What would be learnt: which model runs over how many tokens, the seconds it should take, and the act itself.

        The act says whether there was something to learn from. First come what a step of each drafter costs and whether
        it is ever right, then how the target's time grows with the rows of a forward, then whether drafters that were
        wrong still are.
        """
        table, mates = self.cost(target), sorted(mates, key=lambda name: self._tried.get((target, name), -1))
        for name in mates:
            if not self.cost(name).is_known:
                share = self.residency[name].plan.nbytes / self.residency[target].plan.nbytes
                yield name, 1, table.seconds(1) * share, partial(self._time, name, 1)
        due = [name for name in mates if self._is_due(target, name) and self._could_gain(target, name)]
        trials = [
            (name, SHADOW, self.cost(name).seconds(SHADOW), partial(self._attempt, target, name, sequences))
            for name in due
        ]
        num_new = sum((target, name) not in self._tried for name in due)
        yield from trials[:num_new]
        rows = min(TIMED_ROWS, key=lambda rows: self._timed[target, rows])
        if target not in self._is_given and self._timed[target, rows] < TIMES:
            yield target, rows, table.seconds(rows), partial(self._time, target, rows)
        yield from trials[num_new:]

    def _could_gain(self, target: str, name: str) -> bool:
        """Whether it would be worth it were it always right."""
        ours, step = self.cost(target), self.cost(name).seconds(1)
        lengths = range(1, self.config.draft_tokens * AUTO_FACTOR + 1)
        best = max((length + 1) / (length * step + ours.seconds(length + 1)) for length in lengths)
        return best * ours.seconds(1) > WORTH

    def _is_due(self, target: str, name: str) -> bool:
        last = self._tried.get((target, name))
        return last is None or self._rounds[target] - last > self._waits.get((target, name), STALE)

    def _attempt(self, target: str, name: str, sequences: Seq[Sequence]) -> bool:
        records = [s.drafts.rates[name] for s in sequences if s.drafts is not None and name in s.drafts.rates]
        longest = max(sequences, key=lambda sequence: len(sequence.tokens))
        return self.attempt(target, name, longest.tokens, records, longest.sampler)

    def attempt(
        self,
        target: str,
        name: str,
        tokens: Seq[int],
        records: Seq[AcceptanceRates] = (),
        sampler: Sampler | None = None,
    ) -> bool:
        """What a drafter would have said on the last tokens that are known: no forward of the target.

        False where there are too few that it can read. records: of sessions, that learn it beside the pair. sampler: of
        the session whose tokens they are.
        """
        pair, known = (target, name), tokens[-SHADOW:]
        if len(known) < 2 or not self.can_read(name, target, known):
            return False
        pages = PageList(self.arena, self.residency[name].layout)
        try:
            with self.residency.lease(name) as model:
                num_read, layers = len(known) - 1, model.config.num_layers
                with self.events.span("shadow", name, tokens=num_read, sequences=1, layers=layers):
                    logits = forward(model, self.arena, Panel([pages], [known[:-1]], "all"))[-JUDGED:]
                    said = self._said(logits, tokens, sampler)
        finally:
            pages.free()
        self._tried[pair] = self._rounds[target]
        self._waits[pair] = min(2 * self._waits[pair], MOST_STALE) if pair in self._waits else STALE
        right = sum(a == b for a, b in zip(said, known[-len(said) :], strict=True))
        for rates in (self.pair(*pair), *records):
            rates.agree(right, len(said))
        return True

    def _said(self, logits: Tensor, tokens: Seq[int], sampler: Sampler | None) -> list[int]:
        """What a drafter would have proposed in the place of each of the last tokens, by its logits [n, vocab]."""
        if sampler is None or sampler.sampling.is_argmax:
            return greedy(logits)
        first = len(tokens) - len(logits)
        return [sampler.draft(row, tokens[:at])[0] for at, row in enumerate(logits, first)]

    def can_read(self, name: str, target: str, tokens: Seq[int], start: int = 0) -> bool:
        """Whether a drafter has rows for the target's tokens from start on: padding rows may differ in number."""
        rows = self.residency[name].config.vocab_size
        return rows >= self.residency[target].config.vocab_size or max(tokens[start:], default=0) < rows

    # ---- timing

    def measure(self, name: str, counts: Seq[int], repetitions: int) -> None:
        """Time forwards of so many rows, interleaved. InvalidRequest for what cannot be timed."""
        most = self.residency[name].max_position + 1
        if not counts:
            raise InvalidRequest("measure_costs: no rows, expected numbers of rows to time")
        for rows in counts:
            if not (is_number(rows, int) and 1 <= rows <= most):
                raise InvalidRequest(f"measure_costs: {brief(rows)} rows, expected a number in 1..{most}")
        if not (is_number(repetitions, int) and repetitions >= 1):
            raise InvalidRequest(f"measure_costs: {brief(repetitions)} repetitions, expected a number of at least 1")
        for _ in range(repetitions):
            for rows in counts:
                self._time(name, rows)

    def _time(self, name: str, rows: int) -> bool:
        """One forward of so many rows, in pages of no request."""
        pages = PageList(self.arena, self.residency[name].layout)
        try:
            with self.residency.lease(name) as model:
                start = time.perf_counter()
                with self.events.span("measure", name, tokens=rows, sequences=1, layers=model.config.num_layers):
                    synchronize(forward(model, self.arena, Panel([pages], [[0] * rows], "all")))
                self.observe_cost(name, rows, time.perf_counter() - start)
            return True
        finally:
            pages.free()


def synchronize(logits: Tensor) -> None:
    """So that seconds are those of the work, not of its launches."""
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
