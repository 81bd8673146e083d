"""What to draft: measured costs and acceptance in, the plan of a round out. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, repeat
from math import inf, isfinite
from operator import itemgetter, mul

from polymodel.config import is_number
from polymodel.errors import InvalidRequest, brief

NUM_KEPT = 15  # last measurements of a bucket
EXACT = 32  # tokens up to which each count has a bucket of its own
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # draft lengths that are compared
UNLIKELY = 0.02  # survival below which a token is not worth the search
SHRINK = 3.0  # trials by which a position's rate is drawn to that of the position before
SEED_TRIALS = 4.0  # most evidence that a new record takes over from another


# ---- costs -------------------------------------------------------------------------------------------


class CostTable:
    """Seconds of one forward by tokens in flight.

    The last 15 measurements of a count are kept: up to 32 tokens of each count, beyond that of about 8 buckets an
    octave, each known by its largest count.
    """

    def __init__(self) -> None:
        self._measured: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._is_fixed = False
        self._counts: list[int] = []  # of tokens, rising
        self._seconds: list[float] = []  # never falling

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> CostTable:
        """A recorded table, tokens -> seconds, that no measurement changes."""
        table = cls()
        for tokens, value in seconds.items():
            _check_cost(tokens, value)
        table._medians = dict(seconds)
        table._is_fixed = True
        table._settle()
        return table

    def __eq__(self, other: object) -> bool:
        """Whether both tell the same seconds now."""
        return isinstance(other, CostTable) and self.as_dict() == other.as_dict()

    def __repr__(self) -> str:
        shown = ", ".join(f"{tokens}: {seconds:.3g}" for tokens, seconds in self.as_dict().items())
        return f"<seconds by tokens: {shown or 'none measured'}>"

    @property
    def is_known(self) -> bool:
        """Whether something was measured."""
        return bool(self._counts)

    def observe(self, tokens: int, seconds: float) -> None:
        """One forward of so many tokens took so long."""
        _check_cost(tokens, seconds)
        if self._is_fixed:
            return
        bucket = _bucket(tokens)
        values = self._measured.setdefault(bucket, deque(maxlen=NUM_KEPT))
        values.append(seconds)
        self._medians[bucket] = sorted(values)[(len(values) - 1) // 2]
        self._settle()

    def seconds(self, tokens: int) -> float:
        """What a forward of so many tokens takes; infinite as long as nothing was measured.

        A bucket's time is the lower median of its measurements, or that of a larger bucket if that is less: delays only
        ever add, so more tokens taking less time tell that the fewer were delayed. Linear between buckets; below the
        smallest, the smallest's; beyond the largest, linear with the slope from the largest bucket of at most half its
        tokens, or from the smallest there is, and flat if it is the only one.
        """
        counts, seconds = self._counts, self._seconds
        if not counts:
            return inf
        right = bisect_left(counts, tokens)
        if right == 0:
            return seconds[0]
        if right < len(counts):
            left = right - 1
        elif len(counts) == 1:
            return seconds[0]
        else:
            right = len(counts) - 1
            left = max(bisect_left(counts, counts[right] // 2 + 1) - 1, 0)
        slope = (seconds[right] - seconds[left]) / (counts[right] - counts[left])
        return seconds[right] + slope * (tokens - counts[right])

    def as_dict(self) -> dict[int, float]:
        """tokens -> seconds of the buckets, as `of` takes them."""
        return dict(zip(self._counts, self._seconds, strict=True))

    def _settle(self) -> None:
        self._counts = sorted(self._medians)
        least = accumulate((self._medians[count] for count in reversed(self._counts)), min)
        self._seconds = list(least)[::-1]


def _check_cost(tokens: int, seconds: float) -> None:
    if not (is_number(tokens, int) and tokens >= 1):
        raise InvalidRequest(f"a cost needs at least 1 token, got {brief(tokens)}")
    if not (is_number(seconds) and isfinite(seconds) and seconds >= 0):
        raise InvalidRequest(f"the cost of {tokens} tokens must be seconds from 0 on, got {brief(seconds)}")


def _bucket(tokens: int) -> int:
    if tokens <= EXACT:
        return tokens
    shift = (tokens - 1).bit_length() - 4
    return -(-tokens >> shift) << shift


# ---- acceptance --------------------------------------------------------------------------------------


class AcceptanceRates:
    """How often the token drafted at a position stood, given that all before it did; positions count from 0.

    Every observation first fades the evidence so far by `decay`. The prior is a rate and the trials it counts for, or
    another record, of which it takes over what at most 4 trials would tell; it fades like everything else. The defaults
    are those that lost least in simulation: a longer memory follows a change of the text later, a shorter one takes
    chance for change where drafting hardly pays.
    """

    def __init__(self, prior: tuple[float, float] | AcceptanceRates = (0.7, 1.0), decay: float = 0.95) -> None:
        if not (is_number(decay) and 0 < decay < 1):
            raise InvalidRequest(f"decay must be above 0 and below 1, got {brief(decay)}")
        self._decay = decay
        self._trials: list[float] = []  # faded
        self._stood: list[float] = []
        if isinstance(prior, AcceptanceRates):
            for trials, stood in zip(prior._trials, prior._stood, strict=True):
                share = min(1.0, SEED_TRIALS / trials) if trials else 0.0
                self._trials.append(trials * share)
                self._stood.append(stood * share)
            return
        rate, weight = prior
        if not (is_number(rate) and 0 <= rate <= 1 and is_number(weight) and 0 < weight < inf):
            raise InvalidRequest(f"a prior is a rate in [0, 1] and a weight above 0, got {brief(prior)}")
        self._trials.append(weight)
        self._stood.append(rate * weight)

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """A round drafted so many tokens, of which the first num_accepted stood."""
        if not 0 <= num_accepted <= num_proposed:
            raise InvalidRequest(f"accepted {num_accepted} of {num_proposed} drafted tokens")
        if num_proposed == 0:
            return
        num_tried = min(num_accepted + 1, num_proposed)
        self._fade(self._decay, num_tried)
        for position in range(num_tried):
            self._trials[position] += 1
            self._stood[position] += position < num_accepted

    def agree(self, num_right: int, num_seen: int) -> None:
        """Of num_seen tokens, each drafted after the verified ones before it, num_right were right.

        It counts for position 0, as num_seen single observations with the right ones evenly among them, and thereby for
        every position without newer evidence of its own.
        """
        if not 0 <= num_right <= num_seen:
            raise InvalidRequest(f"{num_right} of {num_seen} tokens agree")
        if num_seen == 0:
            return
        kept = self._decay**num_seen
        weight = (1 - kept) / (1 - self._decay)
        self._fade(kept, 1)
        self._trials[0] += weight
        self._stood[0] += weight * num_right / num_seen

    def rate(self, position: int) -> float:
        """Drawn to the rate of the position before as by 3 trials at it; without evidence, equal to it."""
        return next(islice(self._rates(), position, None))

    def survival(self, count: int) -> tuple[float, ...]:
        """For each of `count` positions the probability that it and all before it stand."""
        return tuple(accumulate(islice(self._rates(), count), mul))

    def _rates(self) -> Iterator[float]:
        rate = self._stood[0] / self._trials[0]
        yield rate
        for trials, stood in zip(self._trials[1:], self._stood[1:], strict=True):
            rate = (stood + SHRINK * rate) / (trials + SHRINK)
            yield rate
        yield from repeat(rate)

    def _fade(self, factor: float, num_positions: int) -> None:
        for counts in (self._trials, self._stood):
            counts[:] = [count * factor for count in counts]
            counts += [0.0] * (num_positions - len(counts))


# ---- the plan of a round -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """What one sequence may have drafted by one drafter."""

    drafter: str
    survival: tuple[float, ...]  # never rising: probability that each token and all before it stand; at most so many
    extra_seconds: float = 0.0  # of using it in this round, such as this round's share of catching up


@dataclass(frozen=True, slots=True)
class Plan:
    """A round of a batch: who drafts for each sequence and how many tokens ("" and 0: nobody)."""

    choices: tuple[tuple[str, int], ...]
    tokens: float  # expected
    seconds: float  # expected
    lead: str  # the drafter model that steps in this round, if any

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds if self.seconds else inf

    @property
    def arm(self) -> str | None:
        """What hysteresis holds on to: the drafter model, "" for drafts that cost no forward, None for no drafts."""
        return self.lead if any(count for _, count in self.choices) else None


NOTHING = Option("", ())


@dataclass(slots=True)
class _Drafts:
    """One drafter model's drafts beside the free ones: the best plan for each length its draft may have."""

    lead: str  # "": free drafts only
    own: Sequence[Option]  # what the lead offers each sequence
    free: Sequence[Option]
    step: Sequence[float]  # seconds of the lead's step by rows, from 0
    verify: Sequence[float]  # seconds of the target's forward by drafted tokens, from 0
    positions: list[tuple[float, int, int]] = field(init=False)  # minus survival, sequence, depth in the lead's or 0
    worth: list[list[float]] = field(init=False)  # expected accepted tokens of the lead's draft, by length
    free_worth: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.positions = [(-p, s, 0) for s, o in enumerate(self.free) for p in o.survival if p >= UNLIKELY]
        for s, option in enumerate(self.own):
            self.positions += [(-p, s, depth) for depth, p in enumerate(option.survival, 1) if p >= UNLIKELY]
        self.positions.sort(key=itemgetter(0))
        self.worth = [list(accumulate(option.survival, initial=0.0)) for option in self.own]
        self.free_worth = [sum(option.survival) for option in self.free]

    @property
    def lengths(self) -> list[int]:
        longest = max(len(option.survival) for option in self.own)
        if len(self.own) == 1:  # its tokens are tried one after the other anyway
            return [longest]
        return [longest, *(length for length in reversed(LENGTHS) if length < longest)]

    def beyond(self, bar: Plan, length: int) -> Plan:
        """The best plan where the lead drafts up to `length`, or `bar` where none is better."""
        worth = [row[min(length, len(row) - 1)] for row in self.worth]
        leads = [mine > free for mine, free in zip(worth, self.free_worth, strict=True)]
        all_tokens = len(leads) + sum(map(max, worth, self.free_worth))
        rows = [0] * (length + 1)  # of the lead's step at each depth
        kept: list[int] = []  # the sequence of each drafted token, the likeliest first
        users: set[int] = set()
        tokens, drafting = float(len(leads)), 0.0
        most, least, num_kept = bar.tokens, bar.seconds, 0
        step, forwards = self.step, iter(self.verify[1:])
        for survival, s, depth in self.positions:
            if depth > length or (depth > 0) != leads[s]:
                continue
            if (forward := next(forwards, None)) is None:
                break
            kept.append(s)
            tokens -= survival
            if depth:
                rows[depth] += 1
                drafting += step[rows[depth]] - step[rows[depth] - 1]
            if s not in users:
                users.add(s)
                drafting += (self.own if depth else self.free)[s].extra_seconds
            seconds = drafting + forward
            if tokens * least > most * seconds:
                most, least, num_kept = tokens, seconds, len(kept)
            elif all_tokens * least <= most * seconds:  # even all that is left at no cost would not do
                break
        if not num_kept:
            return bar
        counts = Counter(kept[:num_kept])
        options = [self.own[s] if lead else self.free[s] for s, lead in enumerate(leads)]
        choices = tuple((option.drafter, counts[s]) if s in counts else ("", 0) for s, option in enumerate(options))
        return Plan(choices, most, least, self.lead if any(leads[s] for s in counts) else "")


def plan_round(
    verify: CostTable,
    num_rows: int,
    options: Sequence[Sequence[Option]],
    steps: Mapping[str, CostTable | None],
    previous: Plan | None = None,
    hysteresis: float = 0.03,
    max_nodes: int = 256,
) -> Plan:
    """What to draft in a round so that expected tokens over expected seconds is largest.

    The target's forward verifies num_rows rows anyway, and beside them at most max_nodes drafted tokens. options[s] is
    what sequence s may choose from; every sequence yields one token without drafts. steps[drafter] is the cost of one
    step of a drafter model, which drafts one token for each of so many sequences, or None for a drafter that costs no
    forward. At most one model drafts, the lead. For each lead and each length its draft may have, every sequence takes
    the better of its free drafts and the lead's by expected tokens, and the likeliest tokens of all sequences are kept
    as far as they pay. A drafter model or target that was never measured drafts nothing and has nothing drafted.

    Plain decoding is always a candidate and wins ties. Where the best plan needs another drafter model than the round
    before, or drafts after a plain one, it must promise (1 + hysteresis) times what going on as before would; going
    back to plain decoding needs no more than being best.
    """
    plain = Plan((("", 0),) * len(options), float(len(options)), verify.seconds(num_rows), "")
    longest = sum(max((len(option.survival) for option in mine), default=0) for mine in options)
    if not verify.is_known or not longest:
        return plain
    free = [
        max((o for o in mine if steps[o.drafter] is None), key=lambda o: sum(o.survival), default=NOTHING)
        for mine in options
    ]
    costly = {o.drafter: table for mine in options for o in mine if (table := steps[o.drafter]) and table.is_known}
    forward = [verify.seconds(num_rows + count) for count in range(min(longest, max_nodes) + 1)]
    best: dict[str | None, Plan] = {None: plain}
    for lead, table in ({"": None} | costly).items():
        own = [next((option for option in mine if option.drafter == lead), NOTHING) for mine in options]
        step = [0.0, *(table.seconds(rows) for rows in range(1, len(own) + 1))] if table else []
        drafts = _Drafts(lead, own, free, step, forward)
        plan = plain
        for length in drafts.lengths:
            plan = drafts.beyond(plan, length)
        if plan.rate > best.get(plan.arm, plain).rate:
            best[plan.arm] = plan
    chosen = max(best.values(), key=lambda plan: plan.rate)
    before = best.get(previous.arm) if previous else None
    if before and chosen.rate < (1 + hysteresis) * before.rate:
        return before
    return chosen


# ---- named policies ----------------------------------------------------------------------------------


class Throttle:
    """A draft length that follows the acceptance of the last rounds alone; for who wants no cost tables.

    Acceptance below `low` shortens it by `step`, down to `floor`, and stops drafting where that was so `stop_streak`
    times on end; above `high` it grows by `step`, up to `most`, or starts again with `floor`.
    """

    def __init__(
        self,
        window: int = 4,
        low: float = 0.3,
        high: float = 0.7,
        floor: int = 1,
        most: int = 8,
        step: int = 1,
        stop_streak: int = 3,
        start: int = 4,
    ) -> None:
        for name, count in (("window", window), ("floor", floor), ("step", step), ("stop_streak", stop_streak)):
            if not (is_number(count, int) and count >= 1):
                raise InvalidRequest(f"Throttle.{name} must be at least 1, got {brief(count)}")
        if not 0 <= low <= high <= 1:
            raise InvalidRequest(f"Throttle needs 0 <= low <= high <= 1, got {brief(low)} and {brief(high)}")
        if not floor <= start <= most:
            raise InvalidRequest(f"Throttle needs floor <= start <= most, got {floor}, {brief(start)}, {brief(most)}")
        self.length = start  # of the next draft; 0: stopped
        self._low, self._high, self._floor, self._most, self._step = low, high, floor, most, step
        self._stop_streak, self._streak = stop_streak, 0
        self._rounds: deque[tuple[int, int]] = deque(maxlen=window)

    def record(self, num_accepted: int, num_proposed: int) -> tuple[int, str]:
        """Length of the next draft and why: "degenerate", "warmup", "shrink", "stop", "grow", "resume" or "hold".

        "degenerate" is a round without drafts, or with impossible counts: length 0, and as if it had not been.
        """
        if not 0 <= num_accepted <= num_proposed or num_proposed == 0:
            return 0, "degenerate"
        self._rounds.append((num_accepted, num_proposed))
        if len(self._rounds) < (self._rounds.maxlen or 0):
            return self.length, "warmup"
        rate = sum(accepted for accepted, _ in self._rounds) / sum(proposed for _, proposed in self._rounds)
        self._streak = self._streak + 1 if rate < self._low else 0
        if rate < self._low:
            if not self.length or self._streak >= self._stop_streak:
                self.length = 0
                return 0, "stop"
            self.length = max(self.length - self._step, self._floor)
            return self.length, "shrink"
        if rate <= self._high:
            return self.length, "hold"
        if not self.length:
            self.length = self._floor
            return self.length, "resume"
        self.length = min(self.length + self._step, self._most)
        return self.length, "grow"


def depth_gate(
    predicted: Sequence[float],
    observed: Sequence[float | None],
    error_bound: float,
    threshold: float,
    fallback: int,
    budget: int,
) -> int:
    """How deep to draft on predicted rates per position, if what was observed bears them out.

    The longest prefix on which the product of predicted - error_bound stays at `threshold` or above; `fallback` where
    an observed rate (None: not observed) is further than error_bound from its prediction, or has none. Never more than
    `fallback` or `budget`.
    """
    most = max(min(fallback, budget), 0)
    for position, rate in enumerate(observed):
        if rate is not None and not (position < len(predicted) and abs(rate - predicted[position]) <= error_bound):
            return most
    depth = 0
    for product in accumulate((max(rate - error_bound, 0.0) for rate in predicted), mul):
        if depth == most or product < threshold:
            break
        depth += 1
    return depth
