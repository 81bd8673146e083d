"""Whose turn it is on the lane, and a plan of turns that needs no clock. Pure: names and numbers in, a name out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal

from polymodel.config import LANE_POLICIES, is_number
from polymodel.errors import InvalidRequest, brief
from polymodel.events import Event, max_concurrent

MIN_WAIT = 5.0  # seconds; the least max_wait unless one is given
WAIT_SWAPS = 12  # page-ins as long as a max_wait
NEW_SWAP = 0.25  # weight of the newest page-in in the running mean


@dataclass(frozen=True, slots=True)
class Work:
    """What a model could do in a turn now. Who cannot be served, as for want of pages, is not in it."""

    model: str
    since: float  # seconds; since when its longest waiting request has had no service
    number: int  # of its earliest request, in order of arrival
    priority: int = 0  # its highest; larger goes first
    deadline: float = inf  # its earliest
    page_in_bytes: int = 0  # 0: resident


class Scheduler:
    """Picks one model of those that have work, by a named policy.

    In every policy work that has waited for longer than `max_wait` goes first, the oldest of it first. So from then on
    nothing younger overtakes it but the turn in flight, whatever priorities and weights say. Under byte-drr a model
    waits for its next turn only: who floods the lane with old requests gets no more than his share of it, and a lane
    that falls behind does not spend its time on paging. Apart from that:

    * byte-drr: bytes streamed follow the weights, page-in bytes included, and residents go before models that must be
      paged in. Deficit round robin (Shreedhar and Varghese, 1995) in its surplus form, as a turn's bytes are known only
      after it: a turn leaves a debt, rounds pay every model that has work in proportion to its weight, and who is out
      of debt comes next. Rounds take no time here, so the first to be out of debt is that of the least debt over
      weight, and models of all sizes alternate as finely as their turns allow. While a model waits to be paged in it
      saves up, and the page-in is paid from that; an idle one pays back its debt as others stream, and saves nothing.
    * round-robin: whose turn is longest ago; newcomers come last.
    * priority: highest priority, then earliest deadline, then first come.
    * fcfs: the model of the request that came first.
    * batch-by-model: stays with a model as long as it has work, then goes on to the longest waiting.
    """

    def __init__(
        self, policy: str = "byte-drr", *, weights: Mapping[str, float] | None = None, max_wait: float | None = None
    ) -> None:
        if policy not in LANE_POLICIES:
            raise InvalidRequest(f"lane policy {policy!r}, expected one of {', '.join(LANE_POLICIES)}")
        if max_wait is not None and not max_wait >= 0:
            raise InvalidRequest(f"max_wait must be seconds from 0 on, or None, got {max_wait!r}")
        self.policy = policy
        self.swap_seconds = 0.0  # running mean of page-ins
        self._max_wait = max_wait
        self._weights: dict[str, float] = {}
        for model, weight in (weights or {}).items():
            self.set_weight(model, weight)
        self._streamed: dict[str, int] = {}  # of every model that ever had work
        self._debts: dict[str, float] = {}  # bytes; negative is what a model saved while it waited to be paged in
        self._places: dict[str, int] = {}  # of models with work; grows with the time of their last turn
        self._num_places = 0
        self._turned: dict[str, float] = {}  # model -> seconds, when its last turn began
        self._current: str | None = None

    @property
    def max_wait(self) -> float:
        return max(MIN_WAIT, WAIT_SWAPS * self.swap_seconds) if self._max_wait is None else self._max_wait

    def pick(self, work: Sequence[Work], now: float) -> str | None:
        """The model whose turn comes now, None if no model has work."""
        if not work:
            self._debts.clear()  # who streams on an idle lane takes nothing from anyone
            self._places.clear()
            return None
        self._deal(work)
        chosen = self._first(work, now)
        with_work = {item.model for item in work}
        self._places = {model: place for model, place in self._places.items() if model in with_work}
        for item in sorted(work, key=lambda item: (item.number, item.model)):
            self._streamed.setdefault(item.model, 0)
            if item.model not in self._places:
                self._to_end(item.model)
        self._to_end(chosen)
        self._current, self._turned[chosen] = chosen, now
        return chosen

    def upcoming(self, work: Sequence[Work], now: float) -> str | None:
        """Who would be picked if the model of the last turn had no more work: whom to prefetch. Changes nothing."""
        others = [item for item in work if item.model != self._current]
        return self._first(others, now) if others else None

    def charge(self, model: str, num_bytes: int) -> None:
        """Bytes that a model streamed, weights of a page-in included."""
        if num_bytes < 0:
            raise InvalidRequest(f"{model}: streamed bytes must be at least 0, got {num_bytes}")
        self._streamed[model] = self._streamed.get(model, 0) + num_bytes
        self._debts[model] = self._debts.get(model, 0.0) + num_bytes

    def swapped(self, seconds: float) -> None:
        """A page-in took so long."""
        if not (isfinite(seconds) and seconds >= 0):
            raise InvalidRequest(f"a page-in must take seconds from 0 on, got {seconds!r}")
        self.swap_seconds += (NEW_SWAP if self.swap_seconds else 1.0) * (seconds - self.swap_seconds)

    def set_weight(self, model: str, weight: float) -> None:
        """A model's share of the bytes is in proportion to its weight; 1 unless set."""
        check_weight(f"{model}: a lane weight", weight)
        self._weights[model] = float(weight)

    def forget(self, model: str) -> None:
        """A model is gone: its weight, its debt and what it streamed."""
        for known in (self._weights, self._streamed, self._debts, self._places, self._turned):
            known.pop(model, None)
        if self._current == model:
            self._current = None

    def shares(self) -> dict[str, int]:
        """Bytes streamed by every model that ever had work."""
        return dict(self._streamed)

    def jain(self) -> float:
        """Jain's index of the shares over their weights: 1 where they follow the weights."""
        return jain([streamed / self._weight(model) for model, streamed in self._streamed.items()])

    def _weight(self, model: str) -> float:
        return self._weights.get(model, 1.0)

    def _level(self, model: str) -> float:
        return self._debts.get(model, 0.0) / self._weight(model)

    def _first(self, work: Sequence[Work], now: float) -> str:
        if overdue := [item for item in work if now - self._since(item) > self.max_wait]:
            return min(overdue, key=lambda item: (self._since(item), item.number, item.model)).model
        return min(work, key=lambda item: (self._rank(item), item.number, item.model)).model

    def _since(self, item: Work) -> float:
        if self.policy == "byte-drr":
            return max(item.since, self._turned.get(item.model, item.since))
        return item.since

    def _rank(self, item: Work) -> tuple[float, ...]:
        place = self._places.get(item.model, inf)
        match self.policy:
            case "byte-drr":
                return (item.page_in_bytes > 0, self._level(item.model), place)
            case "round-robin":
                return (place,)
            case "priority":
                return (-item.priority, item.deadline)
            case "batch-by-model":
                return (item.model != self._current, item.since)
        return ()  # fcfs

    def _deal(self, work: Sequence[Work]) -> None:
        """The rounds that bring the first model that needs no page-in out of debt."""
        ready = [item for item in work if not item.page_in_bytes] or work
        rounds = max(0.0, min(self._level(item.model) for item in ready))
        with_work = {item.model for item in work}
        left = {
            model: self._debts.get(model, 0.0) - rounds * self._weight(model)
            for model in self._debts.keys() | with_work
        }
        self._debts = {model: debt for model, debt in left.items() if model in with_work or debt > 0}

    def _to_end(self, model: str) -> None:
        self._places[model] = self._num_places
        self._num_places += 1


def check_weight(what: str, weight: float) -> None:
    """A model's share of the lane, beside the others'."""
    if not (is_number(weight) and 0 < weight < inf):
        raise InvalidRequest(f"{what} must be a finite number above 0, got {brief(weight)}")


def jain(values: Sequence[float]) -> float:
    """Fairness index of Jain, Chiu and Hawe (1984): 1 if all are equal, 1/n if one has everything."""
    if not (most := max(values, default=0.0)):
        return 1.0
    parts = [value / most for value in values]
    return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts))


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens to prefill and to decode; a higher priority goes first, then the lower number."""

    model: str
    prefill: int
    decode: int
    priority: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 0:
            raise InvalidRequest(
                f"{self.model}: tokens must be at least 0, got prefill={self.prefill}, decode={self.decode}"
            )


@dataclass(frozen=True, slots=True)
class Step:
    model: str
    phase: Literal["prefill", "decode"]
    tokens: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What a plan's steps amount to."""

    prefill_tokens: int
    decode_tokens: int
    decode_steps: int
    max_concurrent_decode: int

    @property
    def tokens_per_step(self) -> float:
        return self.decode_tokens / self.decode_steps if self.decode_steps else 0.0


def schedule(requests: Sequence[Request], quantum: int) -> tuple[list[Step], Stats]:
    """Every prefill, then rounds of up to `quantum` decode tokens a request, both in order of `next_decoder`."""
    quantum = max(quantum, 1)
    ordered = sorted(requests, key=_order)
    steps = [Step(request.model, "prefill", request.prefill) for request in ordered if request.prefill]
    for done in range(0, max((request.decode for request in ordered), default=0), quantum):
        steps += [
            Step(request.model, "decode", min(quantum, request.decode - done))
            for request in ordered
            if request.decode > done
        ]
    decodes = [event for event in plan_events(steps) if event.kind == "decode"]
    prefill_tokens = sum(step.tokens for step in steps if step.phase == "prefill")
    decode_tokens = sum(event.tokens for event in decodes)
    return steps, Stats(prefill_tokens, decode_tokens, len(decodes), max_concurrent(decodes))


def next_decoder(requests: Sequence[Request], resident: Collection[str] | None = None) -> int:
    """Index of the request that decodes next, of resident models only if they are given; -1 if there is none."""
    ready = [i for i, one in enumerate(requests) if one.decode > 0 and (resident is None or one.model in resident)]
    return min(ready, key=lambda i: _order(requests[i]), default=-1)


def plan_events(steps: Iterable[Step]) -> list[Event]:
    """The steps one after another on a time line, a second a token: a plan to be measured and drawn as what ran is."""
    events: list[Event] = []
    for step in steps:
        start = events[-1].stop if events else 0.0
        events.append(Event(step.phase, step.model, start, start + step.tokens, step.tokens, sequences=1))
    return events


def decode_bandwidth_bytes(steps: Iterable[Step], weights: Mapping[str, int]) -> int:
    """Bytes of weights that the decode steps stream, a model's once a token; 0 for a model that has none."""
    return sum(step.tokens * weights.get(step.model, 0) for step in steps if step.phase == "decode")


def _order(request: Request) -> tuple[int, int, str]:
    return -request.priority, request.number, request.model
