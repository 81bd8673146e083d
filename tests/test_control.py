"""Costs, acceptance, and the plan of a round; the closed loop on a simulated clock with scripted acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import inf, nan
from statistics import fmean

import pytest

from polymodel.control import AcceptanceRates, CostTable, Option, Plan, Throttle, depth_gate, plan_round
from polymodel.errors import InvalidRequest

CPU = {1: 24.0, 2: 30.0, 3: 30.0, 5: 43.0, 9: 58.0, 16: 85.0}  # ms of a target's forward, by tokens
GPU = {1: 1.0, 100: 1.05, 200: 2.0}  # flat while weights are what streams
STEP = {1: 0.1, 100: 0.105}  # of a drafter a tenth of the target
FREE: dict[str, CostTable | None] = {"lookup": None}


def one_free(*survival: float) -> list[list[Option]]:
    return [[Option("lookup", survival)]]


# ---- costs


def test_seconds_are_linear_between_what_was_measured_and_flat_below_it() -> None:
    table = CostTable.of({2: 10.0, 4: 20.0, 8: 24.0})
    assert [table.seconds(n) for n in (1, 2, 3, 4, 6, 8)] == [10, 10, 15, 20, 22, 24]


def test_beyond_the_largest_the_slope_over_the_last_half_goes_on() -> None:
    assert CostTable.of({1: 1.0, 8: 15.0, 9: 16.0, 15: 29.0, 16: 31.0}).seconds(18) == 31 + 2 * (31 - 15) / (16 - 8)
    assert CostTable.of({1: 1.0, 8: 15.0, 15: 20.0, 16: 31.0}).seconds(18) == 31 + 2 * (31 - 15) / (16 - 8)
    assert CostTable.of({2: 10.0, 3: 11.0}).seconds(10) == 18
    assert CostTable.of({4: 10.0}).seconds(400) == 10


def test_a_time_is_the_median_of_the_last_fifteen() -> None:
    table = CostTable()
    for seconds in [*range(1, 101), 1000, 1000]:
        table.observe(3, float(seconds))
    assert table.seconds(3) == 95  # of 88..100 and twice 1000
    table.observe(4, 99.0)
    table.observe(4, 500.0)
    assert table.seconds(4) == 99  # of two the lower: delays only ever add


def test_more_tokens_in_less_time_correct_the_time_of_fewer() -> None:
    table = CostTable.of({1: 10.0, 2: 90.0, 4: 12.0, 8: 20.0})
    assert table.as_dict() == {1: 10.0, 2: 12.0, 4: 12.0, 8: 20.0}


def test_counts_are_exact_up_to_32_and_then_share_eight_buckets_an_octave() -> None:
    table = CostTable()
    for tokens in range(1, 257):
        table.observe(tokens, float(tokens))
    buckets = list(table.as_dict())
    assert buckets == [*range(1, 33), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16)]
    assert table.as_dict()[72] == 68  # the lower median of 65..72
    values = [table.seconds(n) for n in range(1, 300)]
    assert values == sorted(values)


def test_a_table_without_measurements_is_unknown_and_a_recorded_one_never_changes() -> None:
    table = CostTable()
    assert not table.is_known and table.seconds(1) == inf and table.as_dict() == {}
    table.observe(1, 2.0)
    assert table.is_known and table.seconds(1) == 2
    recorded = CostTable.of({1: 5.0})
    recorded.observe(1, 2.0)
    assert recorded.seconds(1) == 5 and recorded.as_dict() == {1: 5.0}
    assert CostTable.of(table.as_dict()).seconds(1) == 2


@pytest.mark.parametrize(
    ("tokens", "seconds", "given"),
    [(0, 1.0, "0"), (True, 1.0, "True"), (1.5, 1.0, "1.5"), (1, -1.0, "-1.0"), (1, nan, "nan"), (1, inf, "inf")],
)
def test_a_cost_that_cannot_be_is_refused_and_changes_nothing(tokens: int, seconds: float, given: str) -> None:
    table = CostTable()
    with pytest.raises(InvalidRequest, match=f"got {given}$"):
        table.observe(tokens, seconds)
    with pytest.raises(InvalidRequest, match=f"got {given}$"):
        CostTable.of({tokens: seconds})
    assert not table.is_known


# ---- acceptance


def test_a_position_counts_only_where_all_before_it_stood() -> None:
    rates = AcceptanceRates((0.5, 1.0), decay=0.5)
    rates.observe(4, 2)  # positions 0 and 1 stood, 2 fell, 3 was never tried
    assert rates.rate(0) == 1.25 / 1.5
    assert rates.rate(1) == (1 + 3 * rates.rate(0)) / 4
    assert rates.rate(2) == (0 + 3 * rates.rate(1)) / 4
    assert rates.rate(3) == rates.rate(2) == rates.rate(50)


def test_survival_is_the_product_of_the_rates() -> None:
    rates = AcceptanceRates((0.5, 2.0))
    assert rates.survival(3) == (0.5, 0.25, 0.125)
    assert rates.survival(0) == ()
    rates.observe(2, 1)
    assert rates.survival(2) == (rates.rate(0), rates.rate(0) * rates.rate(1))


def test_old_evidence_fades_by_the_decay_with_every_round() -> None:
    rates = AcceptanceRates((1.0, 2.0), decay=0.5)
    rates.observe(1, 0)
    assert rates.rate(0) == 1 / 2
    rates.observe(0, 0)  # nothing drafted, nothing learned
    assert rates.rate(0) == 1 / 2
    rates.observe(1, 0)
    assert rates.rate(0) == 0.5 / 2
    for _ in range(60):
        rates.observe(1, 1)
    assert rates.rate(0) == pytest.approx(1)


def test_agreement_counts_like_as_many_single_rounds_and_reaches_every_position() -> None:
    rates, single = AcceptanceRates(), AcceptanceRates()
    rates.observe(2, 2)
    single.observe(2, 2)
    rates.agree(5, 5)
    for _ in range(5):
        single.observe(1, 1)
    assert rates.rate(0) == pytest.approx(single.rate(0), rel=1e-12)
    before = [rates.rate(i) for i in range(3)]
    rates.agree(0, 8)
    assert rates.rate(0) < 0.7 * before[0] and rates.rate(2) < 0.8 * before[2]
    rates.agree(0, 0)
    rates.agree(1000, 1000)
    assert rates.rate(9) == pytest.approx(1)


def test_another_record_seeds_a_new_one_with_little_weight() -> None:
    pair = AcceptanceRates()
    for _ in range(50):
        pair.observe(3, 2)
    session = AcceptanceRates(pair)
    assert session.rate(0) == pytest.approx(pair.rate(0)) and session.rate(2) < pair.rate(1) / 2
    session.observe(1, 0)
    assert pair.rate(0) > 0.99 and session.rate(0) == pytest.approx(3.8 / 4.8, abs=0.01)


@pytest.mark.parametrize(
    "call",
    [
        lambda rates: rates.observe(2, 3),
        lambda rates: rates.observe(-1, -1),
        lambda rates: rates.agree(3, 2),
        lambda _: AcceptanceRates((1.5, 1.0)),
        lambda _: AcceptanceRates((0.5, 0.0)),
        lambda _: AcceptanceRates(decay=1.0),
    ],
)
def test_impossible_evidence_is_refused_and_changes_nothing(call: Callable[[AcceptanceRates], object]) -> None:
    rates = AcceptanceRates()
    with pytest.raises(InvalidRequest, match=r"\d"):
        call(rates)
    assert rates.rate(0) == 0.7


# ---- the plan of a round


def test_drafts_where_it_pays_and_no_further() -> None:
    verify = CostTable.of(CPU)
    plan = plan_round(verify, 1, one_free(0.9, 0.81, 0.5, 0.1), FREE)
    assert plan.choices == (("lookup", 2),) and (plan.lead, plan.arm) == ("", "")
    assert plan.tokens == pytest.approx(2.71) and plan.seconds == 30
    assert plan_round(verify, 1, one_free(0.24, 0.01), FREE).choices == (("", 0),)


def test_plain_decoding_wins_ties() -> None:
    plan = plan_round(CostTable.of({1: 1.0, 2: 1.5}), 1, one_free(0.5), FREE)
    assert plan == Plan((("", 0),), 1.0, 1.0, "") and plan.arm is None


def test_nothing_is_drafted_without_options_or_costs() -> None:
    verify = CostTable.of(GPU)
    assert plan_round(verify, 2, [[], []], {}).choices == (("", 0), ("", 0))
    assert plan_round(verify, 0, [], {}).choices == ()
    assert plan_round(CostTable(), 1, one_free(1.0), FREE).choices == (("", 0),)
    assert plan_round(verify, 1, [[Option("small", (1.0,))]], {"small": CostTable()}).choices == (("", 0),)
    assert plan_round(verify, 1, one_free(1.0), FREE, max_nodes=0).choices == (("", 0),)


def test_a_drafter_models_steps_are_charged_as_deep_as_it_drafts() -> None:
    plan = plan_round(CostTable.of(GPU), 1, [[Option("small", (0.9, 0.8, 0.05))]], {"small": CostTable.of(STEP)})
    assert plan.choices == (("small", 2),) and plan.lead == "small"
    assert plan.seconds == pytest.approx(0.2 + CostTable.of(GPU).seconds(3)) and plan.tokens == pytest.approx(2.7)


def test_a_step_drafts_for_all_sequences_that_are_still_drafting() -> None:
    step = CostTable.of({1: 0.1, 2: 0.15, 3: 0.18})
    options = [[Option("small", (0.9,) * n)] for n in (1, 2, 2)]
    plan = plan_round(CostTable.of({1: 1.0}), 3, options, {"small": step})
    assert plan.choices == (("small", 1), ("small", 2), ("small", 2))
    assert plan.seconds == pytest.approx(1 + 0.18 + 0.15)


def test_a_short_draft_for_all_is_weighed_against_a_long_one_for_the_likeliest() -> None:
    options = [[Option("small", (0.9, 0.6))], [Option("small", (0.5,))]]
    plan = plan_round(CostTable.of({1: 1.0}), 2, options, {"small": CostTable.of({1: 0.3})})
    assert plan.choices == (("small", 1), ("small", 1))  # 3.4 tokens in 1.3 s, not 4 in 1.6 s


def test_a_catch_up_is_charged_once_and_only_if_used() -> None:
    small = {"small": CostTable.of(STEP)}
    cheap, dear = Option("small", (0.9, 0.9), 0.3), Option("small", (0.9, 0.9), 9.0)
    plan = plan_round(CostTable.of({1: 1.0}), 1, [[cheap]], small)
    assert plan.choices == (("small", 2),) and plan.seconds == pytest.approx(1.5)
    assert plan_round(CostTable.of({1: 1.0}), 1, [[dear]], small).arm is None


def test_each_sequence_takes_the_better_of_its_free_drafts_and_the_leads() -> None:
    steps = {"lookup": None, "small": CostTable.of(STEP)}
    options = [
        [Option("lookup", (0.9, 0.9, 0.9)), Option("small", (0.8, 0.6))],
        [Option("lookup", (0.3,)), Option("small", (0.9, 0.8))],
        [],
    ]
    plan = plan_round(CostTable.of({1: 1.0}), 3, options, steps)
    assert plan.choices == (("lookup", 3), ("small", 2), ("", 0)) and plan.lead == "small"
    assert plan.tokens == pytest.approx(3 + 2.7 + 1.7) and plan.seconds == pytest.approx(1.2)


def test_the_likeliest_tokens_of_all_sequences_share_the_budget_of_nodes() -> None:
    options = [[Option("lookup", (0.9, 0.5, 0.4))], [Option("lookup", (0.8, 0.7, 0.3))]]
    plan = plan_round(CostTable.of({1: 1.0}), 2, options, FREE, max_nodes=4)
    assert plan.choices == (("lookup", 2), ("lookup", 2))


def test_a_big_batch_drafts_less_than_a_small_one() -> None:
    verify = CostTable.of({1: 1.0, 64: 1.1, 128: 2.0, 256: 4.0})
    lengths = []
    for batch in (1, 16, 32, 64):
        plan = plan_round(verify, batch, [[Option("lookup", (0.7, 0.5, 0.35, 0.25))]] * batch, FREE)
        lengths.append(sum(count for _, count in plan.choices) / batch)
    assert lengths[0] == 4 and lengths == sorted(lengths, reverse=True) and lengths[-1] < 1


def best_of_all(
    verify: CostTable, num_rows: int, options: Sequence[Sequence[Option]], steps: Mapping[str, CostTable | None]
) -> float:
    """The best rate over every choice of every sequence with one drafter model at most."""
    choices = [[("", ())] + [(o.drafter, o.survival[:n]) for o in mine for n in range(1, 5)] for mine in options]
    best = 0.0
    for chosen in product(*choices):
        models = {name for name, _ in chosen if steps.get(name)}
        if len(models) > 1:
            continue
        drafted = [survival for _, survival in chosen]
        seconds = verify.seconds(num_rows + sum(map(len, drafted)))
        for name in models:
            depths = [len(survival) for drafter, survival in chosen if drafter == name]
            table = steps[name]
            assert table is not None
            seconds += sum(table.seconds(sum(depth > k for depth in depths)) for k in range(max(depths)))
        best = max(best, (len(options) + sum(map(sum, drafted))) / seconds)
    return best


def test_no_other_choice_of_a_single_sequence_is_better_and_few_of_two() -> None:
    draw = random.Random(0)
    steps = {"lookup": None, "a": CostTable.of({1: 0.1, 2: 0.12}), "b": CostTable.of({1: 0.3, 2: 0.31})}
    verify = CostTable.of({1: 1.0, 2: 1.1, 3: 1.3, 5: 1.5, 9: 2.5})
    shares = []
    for case in range(60):
        options = [
            [Option(name, tuple(sorted((draw.random() ** 0.5 for _ in range(4)), reverse=True))) for name in steps]
            for _ in range(1 + case % 2)
        ]
        plan = plan_round(verify, len(options), options, steps)
        shares.append(plan.rate / best_of_all(verify, len(options), options, steps))
        assert shares[-1] > (0.97 if case % 2 else 1 - 1e-12)
    assert max(shares) < 1 + 1e-12


def test_another_arm_must_promise_more_than_going_on() -> None:
    verify = CostTable.of({1: 1.0, 2: 1.25})
    plain = plan_round(verify, 1, one_free(0.0), FREE)
    assert plan_round(verify, 1, one_free(0.27), FREE).arm == ""
    assert plan_round(verify, 1, one_free(0.27), FREE, plain).arm is None
    assert plan_round(verify, 1, one_free(0.30), FREE, plain).arm == ""
    assert plan_round(verify, 1, one_free(0.27), FREE, plain, hysteresis=0.0).arm == ""


def test_drafting_goes_on_while_it_is_not_worse_than_plain_and_stops_at_once_then() -> None:
    verify = CostTable.of({1: 1.0, 2: 1.25})
    drafting = plan_round(verify, 1, one_free(0.9), FREE)
    assert plan_round(verify, 1, one_free(0.26), FREE, drafting).arm == ""
    assert plan_round(verify, 1, one_free(0.24), FREE, drafting).arm is None


def test_a_drafter_is_not_swapped_for_one_that_is_hardly_better() -> None:
    verify, steps = CostTable.of({1: 1.0}), {"a": CostTable.of({1: 0.1}), "b": CostTable.of({1: 0.1})}

    def plan(a: float, b: float, previous: Plan | None = None) -> Plan:
        return plan_round(verify, 1, [[Option("a", (a,)), Option("b", (b,))]], steps, previous)

    first = plan(0.80, 0.70)
    assert first.lead == "a" and plan(0.80, 0.84).lead == "b"
    assert plan(0.80, 0.84, first).lead == "a"
    assert plan(0.80, 0.86, first).lead == "b"


# ---- the closed loop on a clock

Script = Iterator[float]  # for each round the probability that a drafted token stands


def always(rate: float) -> Script:
    while True:
        yield rate


def phases(*rates: float, length: int = 150) -> Script:
    for rate in rates:
        for _ in range(length):
            yield rate
    yield from always(rates[-1])


class Loop:
    """One sequence decoded by plan_round, with what stands drawn from a script and every second of a table counted."""

    def __init__(self, verify: CostTable, script: Script, seed: int, step: CostTable | None = None, often: float = 1.0):
        self.verify, self.script, self.step, self.often = verify, script, step, often
        self.name = "small" if step else "lookup"
        self.draw = random.Random(seed)
        self.rates = AcceptanceRates()
        self.plan: Plan | None = None
        self.plans: list[Plan] = []
        self.seconds = 0.0
        self.tokens = 0
        self.unseen = 0  # verified tokens that a drafter model has not seen
        self.right = 0

    def round(self, fixed: int | None = None) -> None:
        rate = next(self.script)
        offered = self.draw.random() < self.often
        longest = (16 if fixed is None else fixed) if offered else 0
        stands = [self.draw.random() < rate for _ in range(16)]
        options = [[Option(self.name, self.rates.survival(longest))]]
        if fixed is None:
            self.plan = plan_round(self.verify, 1, options, {self.name: self.step}, self.plan)
            count = self.plan.choices[0][1]
            self.plans.append(self.plan)
        else:
            count = longest
        num_accepted = [*stands[:count], False].index(False)
        self.seconds += self.verify.seconds(1 + count) + (count * self.step.seconds(1) if self.step else 0.0)
        self.tokens += num_accepted + 1
        self.rates.observe(count, num_accepted)
        if not count and offered:
            self.shadow(stands[0])

    def shadow(self, is_right: bool) -> None:
        """Compares what would have been drafted with the verified token; a drafter model does it 32 tokens a pass."""
        if not self.step:
            self.rates.agree(is_right, 1)
            return
        self.unseen += 1
        self.right += is_right
        if self.unseen == 32:
            self.seconds += self.step.seconds(self.unseen)
            self.rates.agree(self.right, self.unseen)
            self.unseen = self.right = 0

    def run(self, num_tokens: int, fixed: int | None = None) -> float:
        """Tokens a second, of at least so many, over those of plain decoding."""
        while self.tokens < num_tokens:
            self.round(fixed)
        return self.tokens / self.seconds * self.verify.seconds(1)


WORKLOADS: dict[str, tuple[Callable[[], Script], float]] = {
    "always right": (lambda: always(1.0), 1.0),
    "never right": (lambda: always(0.0), 1.0),
    "hardly worth it": (lambda: always(0.3), 1.0),
    "just not worth it": (lambda: always(0.15), 1.0),
    "half right": (lambda: always(0.5), 1.0),
    "mostly right": (lambda: always(0.9), 1.0),
    "good, bad, good": (lambda: phases(0.95, 0.0, 0.95, length=60), 1.0),
    "bad, good, bad": (lambda: phases(0.0, 0.95, 0.0, length=60), 1.0),
    "seldom offered": (lambda: always(0.9), 0.2),
}
MACHINES = {"cpu, free lookup": (CPU, None), "gpu, drafter of a tenth": (GPU, STEP)}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_loop_is_never_slower_than_plain_and_close_to_the_best_fixed_length(workload: str, machine: str) -> None:
    script, often = WORKLOADS[workload]
    costs, steps = MACHINES[machine]
    verify, step = CostTable.of(costs), CostTable.of(steps) if steps else None

    def mean(fixed: int | None) -> float:
        runs = (Loop(verify, script(), seed, step, often) for seed in range(4))
        return fmean(loop.run(250 if often == 1 else 750, fixed) for loop in runs)

    speed, best = mean(None), max(mean(length) for length in (0, 1, 2, 4, 8, 16))
    assert speed >= 0.98, f"{speed:.3f}x plain"
    assert speed >= 0.9 * best, f"{speed:.3f}x plain, a fixed length {best:.3f}x"


@pytest.mark.parametrize("machine", MACHINES)
def test_drafting_stops_in_a_bad_phase_and_returns_after_it(machine: str) -> None:
    costs, steps = MACHINES[machine]
    loop = Loop(CostTable.of(costs), phases(1.0, 0.0, 1.0, length=100), 0, CostTable.of(steps) if steps else None)
    for _ in range(300):
        loop.round()
    drafted = [plan.choices[0][1] for plan in loop.plans]
    assert min(drafted[1:100]) >= 4 and not any(drafted[160:200]) and min(drafted[240:]) >= 8


# ---- named policies


def fill(throttle: Throttle, num_accepted: int, num_proposed: int, count: int) -> list[tuple[int, str]]:
    return [throttle.record(num_accepted, num_proposed) for _ in range(count)]


def test_the_throttle_waits_for_a_full_window_and_holds_between_low_and_high() -> None:
    throttle = Throttle()
    assert throttle.length == 4
    assert fill(throttle, 2, 4, 4) == [(4, "warmup")] * 3 + [(4, "hold")]


def test_the_throttle_shrinks_and_stops_at_the_third_low_round_on_end() -> None:
    throttle = Throttle()
    assert fill(throttle, 0, 4, 7)[3:] == [(3, "shrink"), (2, "shrink"), (0, "stop"), (0, "stop")]
    assert throttle.length == 0


def test_the_throttle_does_not_shrink_below_the_floor() -> None:
    throttle = Throttle(floor=2, start=3, stop_streak=4, step=2)
    assert fill(throttle, 0, 4, 7)[3:] == [(2, "shrink"), (2, "shrink"), (2, "shrink"), (0, "stop")]


def test_the_throttle_grows_to_the_most() -> None:
    throttle = Throttle(most=6)
    assert fill(throttle, 4, 4, 7)[3:] == [(5, "grow"), (6, "grow"), (6, "grow"), (6, "grow")]


def test_a_good_round_breaks_the_streak_and_a_stopped_throttle_resumes_at_the_floor() -> None:
    throttle = Throttle(window=1)
    assert fill(throttle, 0, 4, 2) == [(3, "shrink"), (2, "shrink")]
    assert fill(throttle, 4, 4, 1) == [(3, "grow")]
    assert fill(throttle, 0, 4, 3) == [(2, "shrink"), (1, "shrink"), (0, "stop")]
    assert fill(throttle, 2, 4, 1) == [(0, "hold")]
    assert fill(throttle, 0, 4, 1) == [(0, "stop")]
    assert fill(throttle, 4, 4, 2) == [(1, "resume"), (2, "grow")]


@pytest.mark.parametrize(("num_accepted", "num_proposed"), [(0, 0), (-1, 4), (5, 4), (0, -1)])
def test_a_degenerate_round_is_as_if_it_had_not_been(num_accepted: int, num_proposed: int) -> None:
    throttle = Throttle()
    fill(throttle, 4, 4, 3)
    assert throttle.record(num_accepted, num_proposed) == (0, "degenerate")
    assert throttle.length == 4 and throttle.record(4, 4) == (5, "grow")


def test_the_throttles_limits_count_as_in_between() -> None:
    assert fill(Throttle(window=1), 3, 10, 1) == fill(Throttle(window=1), 7, 10, 1) == [(4, "hold")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"step": True}, "step must be at least 1, got True"),
        ({"low": 0.8}, "got 0.8 and 0.7"),
        ({"start": 9}, "got 1, 9, 8"),
    ],
)
def test_a_throttle_that_cannot_be_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Throttle(**arguments)


@pytest.mark.parametrize(
    ("predicted", "observed", "depth"),
    [
        ([0.9, 0.9, 0.9, 0.9], [], 2),  # .85, .7225, .614, .522
        ([0.9, 0.9, 0.9, 0.9], [0.9, None, 0.86], 2),
        ([0.9, 0.9, 0.9, 0.9], [0.9, 0.9, 0.8], 6),  # one prediction does not hold: the fallback
        ([0.9, 0.9], [0.9, 0.9, 0.9], 6),  # nor is one of nothing
        ([1.0] * 9, [], 6),
        ([0.5, 1.0], [], 0),
        ([], [], 0),
    ],
)
def test_the_depth_gate_trusts_predictions_that_observation_bears_out(
    predicted: list[float], observed: list[float | None], depth: int
) -> None:
    assert depth_gate(predicted, observed, error_bound=0.05, threshold=0.65, fallback=6, budget=8) == depth
    assert depth_gate(predicted, observed, error_bound=0.05, threshold=0.65, fallback=6, budget=1) == min(depth, 1)
    assert depth_gate(predicted, observed, error_bound=0.05, threshold=0.65, fallback=6, budget=-1) == 0
