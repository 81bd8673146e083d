"""Whose turn it is: byte shares, bounded waits, every policy's order, and the plan that needs no clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymodel.config import LANE_POLICIES
from polymodel.errors import InvalidRequest
from polymodel.events import max_concurrent
from polymodel.schedule import (
    Request,
    Scheduler,
    Stats,
    Step,
    Work,
    decode_bandwidth_bytes,
    jain,
    next_decoder,
    plan_events,
    schedule,
)

GB = 10**9
SIZES = {"0.6b": 270_000_000, "1.7b": 3_400_000_000, "8b": 16 * GB, "32b": 32 * GB}  # bytes of a decode step
BANDWIDTH = 3.84e12  # bytes a second
QUANTUM = 8
WEIGHTS = [  # and turns
    ({}, 1000),
    ({"0.6b": 1, "1.7b": 2, "8b": 3, "32b": 4}, 1000),
    ({"0.6b": 0.1, "32b": 10}, 1000),
    ({"0.6b": 4}, 5000),  # of 118 small turns to a large one, 1,000 make two rounds
    ({"0.6b": 100, "1.7b": 100, "8b": 0.5}, 5000),
]


def names(models: Iterable[str]) -> list[Work]:
    """Work of these models, in order of arrival, of which none has waited."""
    return [Work(name, 0.0, number) for number, name in enumerate(models)]


def picks(policy: str, *ready: str) -> list[str | None]:
    """What is picked while the models named in each string have work."""
    scheduler = Scheduler(policy)
    return [scheduler.pick(names(text), 0.0) for text in ready]


@dataclass
class Lane:
    """A lane whose models always have one request each: turns, the clock, and what fits into memory."""

    scheduler: Scheduler
    sizes: dict[str, int]
    room: float = inf  # bytes of weights
    now: float = 0.0
    since: dict[str, float] = field(default_factory=dict)
    resident: list[str] = field(default_factory=list)  # least recently used first
    swaps: int = 0

    def turn(self, active: Sequence[str]) -> str:
        self.since = {name: self.since.get(name, self.now) for name in active}
        away = {name: self.sizes[name] for name in active if self.room < inf and name not in self.resident}
        work = [Work(name, self.since[name], i, page_in_bytes=away.get(name, 0)) for i, name in enumerate(active)]
        chosen = self.scheduler.pick(work, self.now)
        assert chosen in active
        if chosen in away:
            while sum(self.sizes[name] for name in [*self.resident, chosen]) > self.room:
                self.resident.pop(0)
            self.swaps += 1
            self.now += 1.0
            self.scheduler.swapped(1.0)
            self.scheduler.charge(chosen, away[chosen])
        self.resident = [*(name for name in self.resident if name != chosen), chosen]
        for _ in range(QUANTUM):
            self.scheduler.charge(chosen, self.sizes[chosen])
        self.now += QUANTUM * self.sizes[chosen] / BANDWIDTH
        self.since[chosen] = self.now
        return chosen


# byte-drr


@pytest.mark.parametrize(("weights", "turns"), WEIGHTS)
def test_shares_of_bytes_follow_the_weights_whatever_the_sizes(weights: dict[str, float], turns: int) -> None:
    lane = Lane(Scheduler(weights=weights, max_wait=inf), SIZES)
    for _ in range(turns):
        lane.turn(list(SIZES))
    shares, total = lane.scheduler.shares(), sum(weights.get(name, 1) for name in SIZES)
    for name, streamed in shares.items():
        assert abs(streamed / sum(shares.values()) - weights.get(name, 1) / total) < 0.05
    level = {name: streamed / weights.get(name, 1) for name, streamed in shares.items()}
    for one, other in combinations(SIZES, 2):
        one_turn_each = sum(QUANTUM * SIZES[name] / weights.get(name, 1) for name in (one, other))
        assert abs(level[one] - level[other]) <= one_turn_each


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_two_models_with_work_drift_apart_by_more_than_a_turn_of_each(data: st.DataObject) -> None:
    """Also while others come and go: over every stretch of time in which both have work."""
    weights = {name: data.draw(st.sampled_from([0.25, 1.0, 3.0])) for name in "abcd"}
    costs = {name: data.draw(st.sampled_from([1, 7, 50, 400])) for name in "abcd"}
    scheduler, streamed = Scheduler(weights=weights, max_wait=inf), dict.fromkeys("abcd", 0)
    most = {name: costs[name] / weights[name] for name in "abcd"}
    extremes: dict[tuple[str, str], tuple[float, float]] = {}
    dice = random.Random(data.draw(st.integers(0, 1 << 30)))
    active = set("abcd")
    for _ in range(150):
        if dice.random() < 0.3:
            active ^= {dice.choice("abcd")}
        for pair in combinations("abcd", 2):
            if not active.issuperset(pair):
                extremes.pop(pair, None)
                continue
            apart = streamed[pair[0]] / weights[pair[0]] - streamed[pair[1]] / weights[pair[1]]
            low, high = extremes.get(pair, (apart, apart))
            extremes[pair] = low, high = min(low, apart), max(high, apart)
            assert high - low <= (most[pair[0]] + most[pair[1]]) * (1 + 1e-9)
        chosen = scheduler.pick([Work(name, 0.0, i) for i, name in enumerate("abcd") if name in active], 0.0)
        if chosen is not None:
            cost = dice.randint(1, costs[chosen])
            scheduler.charge(chosen, cost)
            streamed[chosen] += cost


@pytest.mark.parametrize("idle_turns", [1, 10, 3000])
def test_a_model_that_returns_starts_level_however_long_it_was_idle(idle_turns: int) -> None:
    lane = Lane(Scheduler(), {"a": 1, "b": 1})
    for _ in range(4):
        lane.turn("ab")
    for _ in range(idle_turns):
        lane.turn("a")
    assert [lane.turn("ab") for _ in range(6)] == list("bababa")


def test_going_idle_does_not_cancel_a_debt_and_a_lane_that_was_idle_owes_nobody() -> None:
    scheduler = Scheduler()
    scheduler.charge("big", 100)

    def turns(count: int) -> int:
        """Turns of the small one before the big one's."""
        done = 0
        while scheduler.pick(names(["small", "big"]), 0.0) == "small" and done < count:
            scheduler.charge("small", 10)
            done += 1
        return done

    for _ in range(4):
        assert scheduler.pick([Work("small", 0.0, 0)], 0.0) == "small"
        scheduler.charge("small", 10)
    assert turns(99) == 6  # of the ten that the big turn was worth, four ran while its model was idle
    scheduler.charge("big", 100)
    assert scheduler.pick([], 0.0) is None
    assert turns(1) == 1
    assert scheduler.pick(names(["small", "big"]), 0.0) == "big"


def test_bytes_may_be_charged_in_parts() -> None:
    whole, parts = Scheduler(), Scheduler()
    whole.charge("a", 12)
    for _ in range(4):
        parts.charge("a", 3)
    assert whole.shares() == parts.shares() == {"a": 12}
    for scheduler in (whole, parts):
        scheduler.charge("b", 11)
        assert scheduler.pick(names("ab"), 0.0) == "b"


def test_a_new_weight_counts_for_the_debt_that_is_there() -> None:
    scheduler = Scheduler()
    scheduler.charge("a", 300)
    scheduler.charge("b", 100)
    assert deepcopy(scheduler).pick(names("ab"), 0.0) == "b"
    scheduler.set_weight("a", 4)
    assert scheduler.pick(names("ab"), 0.0) == "a"


def test_the_lane_stays_with_residents_until_the_other_has_waited_too_long() -> None:
    scheduler, chosen = Scheduler(max_wait=10), []
    for now in range(14):
        work = [Work("resident", now, 0), Work("away", 0.0, 1, page_in_bytes=5)]
        chosen.append(scheduler.pick(work, now))
        scheduler.charge("resident", 1000)
    assert chosen == ["resident"] * 11 + ["away"] + ["resident"] * 2  # which comes in by that, and has had its turn
    assert scheduler.pick([Work("away", 14, 1, page_in_bytes=5)], 14) == "away"  # or until they have no work


@pytest.mark.parametrize(
    ("sizes", "room"), [({"a": 16, "b": 16, "c": 16}, 32), ({"a": 8, "b": 16, "c": 32}, 48), ({"a": 30, "b": 4}, 33)]
)
def test_shares_are_even_where_not_all_fit_and_swaps_are_rare(sizes: dict[str, int], room: int) -> None:
    lane = Lane(Scheduler(), {name: size * GB for name, size in sizes.items()}, room=room * GB)
    for _ in range(6000):
        lane.turn(list(sizes))
    shares = lane.scheduler.shares()
    fair = sum(shares.values()) / len(sizes)
    assert all(abs(streamed - fair) < 0.05 * fair for streamed in shares.values()), shares
    assert lane.scheduler.jain() > 0.995
    assert lane.swaps * 1.0 < 0.25 * lane.now


def test_page_in_bytes_are_paid_from_what_the_model_saved_while_it_waited() -> None:
    scheduler = Scheduler(max_wait=10)
    for now in range(11):
        assert scheduler.pick([Work("a", now, 0), Work("b", 0.0, 1, page_in_bytes=60)], now) == "a"
        scheduler.charge("a", 10)
    assert scheduler.pick([Work("a", 11, 0), Work("b", 0.0, 1, page_in_bytes=60)], 11) == "b"
    scheduler.charge("b", 60 + 10)
    chosen = []
    for now in range(12, 20):
        model = scheduler.pick([Work("a", now, 0), Work("b", now, 1)], now)
        assert model is not None
        chosen.append(model)
        scheduler.charge(model, 10)
    assert "".join(chosen) == "bbbbaba" + "b"  # level at 110 bytes each, then in turn


def test_what_a_model_saved_is_nothing_to_a_newcomer() -> None:
    scheduler, chosen = Scheduler(), ""
    for _ in range(4):
        assert scheduler.pick([Work("a", 0.0, 0), Work("b", 0.0, 1, page_in_bytes=1)], 0.0) == "a"
        scheduler.charge("a", 10)
    for models in ["ab", *["abc"] * 8]:
        model = scheduler.pick(names(models), 0.0)
        assert model is not None
        chosen += model
        scheduler.charge(model, 10)
    assert chosen == "bbbcbacba"


# the other policies


def test_models_take_turns_in_the_order_of_their_first_work() -> None:
    assert picks("round-robin", *["bca"] * 7) == list("bcabcab")
    assert picks("round-robin", "ab", "abc", "abc", "abc") == list("abac")  # a newcomer waits for one round at most
    scheduler, work = Scheduler("round-robin"), names("abcd")[::-1]
    assert [scheduler.pick(work, 0.0) for _ in range(5)] == list("abcda")


def test_who_has_no_more_work_is_skipped_and_comes_back_last() -> None:
    assert picks("round-robin", "abc", "abc", "ac", "ac", "abc", "abc", "abc") == list("abcacab")


def test_in_round_robin_nobody_waits_longer_than_the_number_of_models() -> None:
    scheduler, waited = Scheduler("round-robin"), dict.fromkeys("abcde", 0)
    for step in range(100):
        ready = "".join(name for i, name in enumerate("abcde") if (step >> i) & 1 or name == "c")
        chosen = scheduler.pick(names(ready), 0.0)
        for name in waited:
            waited[name] = 0 if name == chosen or name not in ready else waited[name] + 1
        assert max(waited.values()) < len(waited)


def test_priority_then_deadline_then_first_come() -> None:
    work = [
        Work("late", 0.0, 0, priority=1, deadline=9.0),
        Work("soon", 0.0, 1, priority=1, deadline=5.0),
        Work("first", 0.0, 2),
        Work("urgent", 0.0, 4, priority=7),
        Work("second", 0.0, 3),
    ]
    order = []
    while work:
        order.append(Scheduler("priority").pick(work, 0.0))
        work = [item for item in work if item.model != order[-1]]
    assert order == ["urgent", "soon", "late", "first", "second"]


def test_fcfs_follows_the_arrival_of_requests() -> None:
    work = [Work("a", 0.0, 5), Work("b", 0.0, 3, priority=-1), Work("c", 0.0, 4, priority=9)]
    assert [Scheduler("fcfs").pick(work, 0.0) for _ in range(2)] == ["b", "b"]


def test_batch_by_model_stays_until_the_model_has_no_more_work_then_takes_the_oldest() -> None:
    scheduler = Scheduler("batch-by-model")

    def pick(now: float, **since: float) -> str | None:
        return scheduler.pick([Work(name, s, i) for i, (name, s) in enumerate(since.items())], now)

    assert pick(1, a=1, b=0) == "b"
    assert pick(2, a=1, b=2, c=0) == "b"
    assert pick(3, a=1, c=0.5) == "c"
    assert pick(4, a=1, c=4) == "c"
    assert pick(6.5, a=1, c=5) == "a"  # for longer than 5 seconds
    assert pick(7, a=7, c=5) == "a"  # and the lane stays where it is now
    assert scheduler.pick([], 8) is None
    assert pick(9, a=9, c=8) == "a"


def queue(policy: str, swap: float, rate: float, count: int = 2000) -> tuple[int, float]:
    """Swaps and mean latency of requests to four models of which one fits, each served for 0.8 s, one at a time."""
    dice, scheduler, now, loaded = random.Random(0), Scheduler(policy), 0.0, ""
    arrivals: list[tuple[float, str]] = []
    for _ in range(count):
        now += dice.expovariate(rate)
        arrivals.append((now, dice.choices("abcd", (50, 25, 15, 10))[0]))
    now, swaps, latency, waiting, coming = 0.0, 0, 0.0, [], list(enumerate(arrivals))
    while waiting or coming:
        while coming and (not waiting or coming[0][1][0] <= now):
            number, (arrival, model) = coming.pop(0)
            now = max(now, arrival)
            waiting.append((number, arrival, model))
        earliest = {model: (number, arrival) for number, arrival, model in reversed(waiting)}
        work = [Work(m, t, n, page_in_bytes=int(m != loaded)) for m, (n, t) in earliest.items()]
        chosen = scheduler.pick(work, now)
        assert chosen is not None
        if chosen != loaded:
            swaps, now, loaded = swaps + 1, now + swap, chosen
            scheduler.swapped(swap)
        now += 0.8
        number, arrival = earliest[chosen]
        latency += now - arrival
        waiting.remove((number, arrival, chosen))
    return swaps, latency / count


def test_batch_by_model_swaps_less_than_fcfs() -> None:
    (fcfs_swaps, fcfs), (swaps, mean) = (queue(policy, 7.0, 0.3) for policy in ("fcfs", "batch-by-model"))
    assert (fcfs_swaps, swaps) == (1309, 708)
    assert mean < 15.5 and fcfs > 50 * mean  # the lane that swaps more falls behind


# bounded waits


@dataclass
class Job:
    number: int
    model: str
    since: float  # of its arrival or its last service
    left: int  # turns
    priority: int
    deadline: float


def most_overtakes(
    scheduler: Scheduler, max_wait: float, jobs: list[Job], seconds: Callable[[], float], batch: int
) -> int:
    """Serve all jobs; how often one at most, having waited for max_wait, saw a turn of only younger ones end.

    Under byte-drr a model's jobs wait since its last turn.
    """
    now, overtakes, most = 0.0, Counter[int](), 0
    turned: dict[str, float] = {}
    coming = sorted(jobs, key=lambda job: job.since)
    waiting: list[Job] = []
    turns = 0
    while coming or waiting:
        while coming and (not waiting or coming[0].since <= now):
            now = max(now, coming[0].since)
            waiting.append(coming.pop(0))
        by_model: dict[str, list[Job]] = {}
        for job in sorted(waiting, key=lambda job: (job.since, job.number)):
            by_model.setdefault(job.model, []).append(job)
        work = [
            Work(
                model,
                min(job.since for job in mine),
                min(job.number for job in mine),
                max(job.priority for job in mine),
                min(job.deadline for job in mine),
                page_in_bytes=turns % 3 if model > "b" else 0,
            )
            for model, mine in by_model.items()
        ]
        chosen = scheduler.pick(work, now)
        assert chosen in by_model
        served = by_model[chosen][:batch]
        by_turn = set(by_model) if scheduler.policy == "byte-drr" else set()
        start = now
        now += seconds()
        scheduler.charge(chosen, 1 + turns % 7)
        for job in waiting:
            since = max(job.since, turned.get(job.model, 0.0)) if job.model in by_turn else job.since
            if job.model != chosen and now - since > max_wait and all(since < one.since for one in served):
                overtakes[job.number] += 1
                most = max(most, overtakes[job.number])
        turned[chosen] = start
        for job in by_model[chosen] if chosen in by_turn else served:
            overtakes[job.number] = 0
        for job in served:
            job.since, job.left = now, job.left - 1
        waiting = [job for job in waiting if job.left]
        turns += 1
    return most


@pytest.mark.parametrize("policy", LANE_POLICIES)
@pytest.mark.parametrize("max_wait", [0.0, 3.0, 25.0])
def test_a_flood_of_what_the_policy_prefers_overtakes_once_at_most(policy: str, max_wait: float) -> None:
    assert most_overtakes(Scheduler(policy, max_wait=max_wait), max_wait, flood(), lambda: 0.7, 4) <= 1
    if policy in ("priority", "fcfs", "batch-by-model"):
        assert most_overtakes(Scheduler(policy, max_wait=inf), 3.0, flood(), lambda: 0.7, 4) > 50


def flood() -> list[Job]:
    """Two models' requests that every policy would rather serve, and a few of others."""
    preferred = [Job(i, "a" if i % 3 else "b", i * 0.5, 3, 9, i) for i in range(120)]
    return [
        Job(-1, "a", 0.0, 200, 9, 0.0),
        *preferred,
        *(Job(1000 + i, n, i, 2, 0, inf) for i, n in enumerate("ccdde")),
    ]


@given(
    policy=st.sampled_from(LANE_POLICIES),
    max_wait=st.sampled_from([0.0, 1.0, 7.5]),
    jobs=st.lists(
        st.tuples(
            st.sampled_from("abcde"),
            st.floats(0, 40, width=16),
            st.integers(1, 12),
            st.integers(0, 2),
            st.sampled_from([1.0, 30.0, inf]),
        ),
        max_size=25,
    ),
    seed=st.integers(0, 1 << 30),
    batch=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_after_max_wait_a_request_is_overtaken_once_at_most(
    policy: str, max_wait: float, jobs: list[tuple[str, float, int, int, float]], seed: int, batch: int
) -> None:
    dice = random.Random(seed)
    numbered = [Job(i, *job) for i, job in enumerate(sorted(jobs, key=lambda job: (job[1], job[0])))]
    assert (
        most_overtakes(
            Scheduler(policy, max_wait=max_wait), max_wait, numbered, lambda: dice.choice([0.25, 1.0, 4.0]), batch
        )
        <= 1
    )


def test_nobody_starves_under_priority() -> None:
    scheduler, last, gap = Scheduler("priority", max_wait=2.0), 0.0, 0.0
    for turn in range(1000):
        now = turn * 0.1
        if scheduler.pick([Work("high", now, 0, priority=9), Work("low", last, 1)], now) == "low":
            gap, last = max(gap, now - last), now
    assert 2.0 < gap < 2.2 and last > 97


def test_of_those_that_waited_too_long_the_oldest_goes_first() -> None:
    for policy in LANE_POLICIES:
        work = [Work("a", 3.0, 0, priority=9), Work("b", 1.0, 2, page_in_bytes=1), Work("c", 1.0, 1, priority=-9)]
        scheduler = Scheduler(policy, max_wait=5.0)
        assert scheduler.pick(work, 6.5) == "c"
        assert scheduler.pick([work[0], work[1]], 6.5) == "b"
        assert scheduler.pick([work[0], replace(work[1], since=6.5)], 8.5) == "a"


def test_max_wait_is_five_seconds_or_twelve_swaps_unless_it_is_given() -> None:
    scheduler = Scheduler()
    assert (scheduler.max_wait, scheduler.swap_seconds) == (5.0, 0.0)
    scheduler.swapped(0.25)
    assert (scheduler.max_wait, scheduler.swap_seconds) == (5.0, 0.25)
    scheduler.swapped(4.25)
    assert scheduler.swap_seconds == 1.25  # a quarter of the way
    assert scheduler.max_wait == 15.0
    for _ in range(50):
        scheduler.swapped(2.0)
    assert scheduler.max_wait == pytest.approx(24.0, rel=1e-4)
    given = Scheduler(max_wait=0.0)
    given.swapped(9.0)
    assert (given.max_wait, given.swap_seconds) == (0.0, 9.0)


# in every policy

works = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(
        st.floats(0, 20, width=16),
        st.integers(0, 50),
        st.integers(-1, 1),
        st.floats(0, 20, width=16),
        st.integers(0, 2),
    ),
    max_size=6,
).map(lambda found: [Work(name, *rest) for name, rest in found.items()])


@given(policy=st.sampled_from(LANE_POLICIES), rounds=st.lists(works, max_size=12), seed=st.integers(0, 1 << 30))
@settings(max_examples=50, deadline=None)
def test_a_pick_has_work_and_depends_on_no_order_and_on_no_look_ahead(
    policy: str, rounds: list[list[Work]], seed: int
) -> None:
    dice, one, other = random.Random(seed), Scheduler(policy, max_wait=9.0), Scheduler(policy, max_wait=9.0)
    for now, work in enumerate(rounds):
        chosen = one.pick(work, now)
        assert (chosen in {item.model for item in work}) if work else chosen is None
        before = deepcopy(vars(other))
        other.upcoming(work, now)
        assert vars(other) == before
        assert other.pick(dice.sample(work, len(work)), now) == chosen
        if chosen is not None:
            num_bytes = dice.randint(0, 1000)
            one.charge(chosen, num_bytes)
            other.charge(chosen, num_bytes)
            rest = [item for item in work if item.model != chosen]
            later = now + dice.randint(0, 9)
            assert one.upcoming(work, later) == deepcopy(one).pick(rest, later)
    assert one.shares() == other.shares()
    assert one.shares().keys() == {item.model for work in rounds for item in work}


def test_upcoming_is_the_next_of_the_others() -> None:
    scheduler = Scheduler()
    work = [Work("a", 0.0, 0), Work("b", 0.0, 1, page_in_bytes=7), Work("c", 0.0, 2, page_in_bytes=9)]
    assert scheduler.upcoming([], 0.0) is None
    assert scheduler.pick(work, 0.0) == "a"
    assert scheduler.upcoming(work, 0.0) == "b"
    assert scheduler.upcoming([*work, Work("d", 0.0, 3)], 0.0) == "d"
    assert scheduler.upcoming([work[0], work[1], replace(work[2], since=-6.0)], 0.0) == "c"
    assert scheduler.upcoming(work[:1], 0.0) is None


@pytest.mark.parametrize("policy", LANE_POLICIES)
def test_a_model_that_was_forgotten_leaves_no_trace(policy: str) -> None:
    scheduler, fresh = Scheduler(policy), Scheduler(policy)
    for one in (scheduler, fresh):
        assert one.pick(names("a"), 0.0) == "a"
        one.charge("a", 3)
    before = deepcopy(vars(fresh))
    scheduler.set_weight("b", 5)
    scheduler.charge("b", 100)
    scheduler.forget("b")
    assert vars(scheduler) == before
    scheduler.forget("a")
    scheduler.forget("never seen")
    assert scheduler.shares() == {} and scheduler.jain() == 1.0
    assert scheduler.upcoming(names("a"), 0.0) == "a"


def test_a_model_that_waits_for_its_first_turn_has_a_share_of_nothing() -> None:
    scheduler = Scheduler("fcfs", weights={"b": 2})
    assert scheduler.pick(names("abcd"), 0.0) == "a"
    scheduler.charge("a", 8)
    assert scheduler.shares() == {"a": 8, "b": 0, "c": 0, "d": 0} and scheduler.jain() == 0.25
    scheduler.charge("b", 16)
    assert scheduler.jain() == 0.5
    scheduler.charge("c", 8)
    scheduler.charge("d", 8)
    assert scheduler.jain() == 1.0


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (lambda s: Scheduler("lottery"), ("'lottery'", *LANE_POLICIES)),
        (lambda s: Scheduler(weights={"a": 1, "b": 0}), ("b", "above 0", "0")),
        (lambda s: Scheduler(max_wait=-1.0), ("max_wait", "-1.0")),
        (lambda s: Scheduler(max_wait=nan), ("max_wait", "nan")),
        (lambda s: s.set_weight("a", -2.0), ("a", "above 0", "-2.0")),
        (lambda s: s.set_weight("a", nan), ("a", "above 0", "nan")),
        (lambda s: s.set_weight("a", inf), ("a", "above 0", "inf")),
        (lambda s: s.charge("a", -1), ("a", "at least 0", "-1")),
        (lambda s: s.swapped(-0.5), ("from 0 on", "-0.5")),
        (lambda s: s.swapped(nan), ("from 0 on", "nan")),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    call: Callable[[Scheduler], object], texts: tuple[str, ...]
) -> None:
    scheduler = Scheduler(weights={"a": 2})
    scheduler.charge("a", 5)
    before = deepcopy(vars(scheduler))
    with pytest.raises(InvalidRequest) as caught:
        call(scheduler)
    assert all(text in str(caught.value) for text in texts), caught.value
    assert vars(scheduler) == before


@pytest.mark.parametrize(
    ("values", "index"),
    [([], 1.0), ([0, 0], 1.0), ([3], 1.0), ([2, 2, 2], 1.0), ([1, 0, 0, 0], 0.25), ([1, 3], 0.8), ([1e-200] * 3, 1.0)],
)
def test_jain_is_one_where_all_are_equal_and_one_over_n_where_one_has_all(values: list[float], index: float) -> None:
    assert jain(values) == pytest.approx(index)


# the plan without a clock


def weight_bytes(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inter: int) -> int:
    rows = (heads + 2 * kv_heads) * head_dim
    layer = rows * hidden + hidden * heads * head_dim + 3 * inter * hidden + 2 * hidden
    return 4 * (256 * hidden + layers * layer + hidden)


def test_three_models_decode_in_six_steps_and_stream_4120_kilobytes() -> None:
    models = {"a": (48, 3, 3, 1, 16, 96), "b": (32, 2, 2, 1, 16, 64), "c": (64, 4, 4, 2, 16, 128)}
    requests = [Request(name, 22, 4, priority=3 - i, number=i) for i, name in enumerate(models)]
    steps, stats = schedule(requests, quantum=2)
    assert stats == Stats(prefill_tokens=66, decode_tokens=12, decode_steps=6, max_concurrent_decode=1)
    assert stats.tokens_per_step == 2.0
    assert steps[:3] == [Step(name, "prefill", 22) for name in "abc"]
    assert steps[3:] == [Step(name, "decode", 2) for name in "abcabc"]
    num_bytes = decode_bandwidth_bytes(steps, {name: weight_bytes(*shape) for name, shape in models.items()})
    assert (num_bytes, num_bytes // 1024) == (4_219_648, 4120)


def test_decode_turns_alternate_and_no_token_is_lost() -> None:
    steps, stats = schedule([Request("a", 100, 5, number=0), Request("b", 200, 3, number=1)], quantum=2)
    assert (stats.prefill_tokens, stats.decode_tokens, stats.max_concurrent_decode) == (300, 8, 1)
    assert [(s.model, s.tokens) for s in steps if s.phase == "decode"] == [
        ("a", 2),
        ("b", 2),
        ("a", 2),
        ("b", 1),
        ("a", 1),
    ]


def test_an_empty_plan_and_a_quantum_below_one() -> None:
    assert schedule([], 4) == ([], Stats(0, 0, 0, 0)) and Stats(0, 0, 0, 0).tokens_per_step == 0.0
    for quantum in (0, -3):
        steps, stats = schedule([Request("a", 0, 3)], quantum)
        assert steps == [Step("a", "decode", 1)] * 3 and stats == Stats(0, 3, 3, 1)
    assert schedule([Request("a", 7, 0)], 1) == ([Step("a", "prefill", 7)], Stats(7, 0, 0, 0))


@given(
    st.lists(
        st.builds(Request, st.sampled_from("abc"), *[st.integers(0, 9)] * 2, st.integers(0, 2), st.integers(0, 4))
    ),
    st.integers(-1, 5),
)
@settings(max_examples=40, deadline=None)
def test_a_plan_holds_every_token_once_in_one_order(requests: list[Request], quantum: int) -> None:
    steps, stats = schedule(requests, quantum)
    for phase in ("prefill", "decode"):
        asked, planned = Counter[str](), Counter[str]()
        for request in requests:
            asked[request.model] += getattr(request, phase)
        for step in steps:
            planned[step.model] += step.tokens * (step.phase == phase)
        assert +asked == +planned
    assert all(0 < step.tokens <= max(quantum, 1) for step in steps if step.phase == "decode")
    assert stats.max_concurrent_decode == (1 if any(request.decode for request in requests) else 0)
    assert sorted(steps, key=lambda step: step.phase != "prefill") == steps
    assert schedule(requests, quantum) == (steps, stats)


def test_a_plan_lies_on_a_time_line_end_to_end() -> None:
    events = plan_events([Step("a", "prefill", 3), Step("a", "decode", 2), Step("b", "decode", 1)])
    assert [(e.kind, e.model, e.start, e.stop, e.tokens) for e in events] == [
        ("prefill", "a", 0, 3, 3),
        ("decode", "a", 3, 5, 2),
        ("decode", "b", 5, 6, 1),
    ]
    assert max_concurrent(events) == 1


def test_who_decodes_next() -> None:
    requests = [
        Request("done", 5, 0, priority=9),
        Request("b", 0, 1, priority=1, number=4),
        Request("late", 0, 1, priority=2, number=7),
        Request("z", 0, 1, priority=2, number=3),
        Request("y", 0, 1, priority=2, number=3),
    ]
    assert next_decoder(requests) == 4
    assert next_decoder(requests, resident={"z", "late"}) == 3
    assert next_decoder(requests, resident=["b", "done"]) == 1
    assert next_decoder(requests, resident=[]) == next_decoder(requests[:1]) == next_decoder([]) == -1


def test_bandwidth_counts_decode_tokens_of_known_models() -> None:
    steps = [
        Step("big", "prefill", 99),
        Step("big", "decode", 4),
        Step("small", "decode", 10),
        Step("unknown", "decode", 5),
    ]
    assert decode_bandwidth_bytes(steps, {"big": 10**6, "small": 10**4}) == 4 * 10**6 + 10 * 10**4


@pytest.mark.parametrize(("prefill", "decode"), [(-1, 0), (0, -1)])
def test_a_request_of_fewer_than_no_tokens_is_refused(prefill: int, decode: int) -> None:
    with pytest.raises(InvalidRequest, match=f"a: .*prefill={prefill}, decode={decode}"):
        Request("a", prefill, decode)
