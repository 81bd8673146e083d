"""What drafting costs and yields: the record of it, and trials that take a hundredth of the time it decodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny

from polymodel.checkpoint import open_checkpoint
from polymodel.config import Draft, EngineConfig
from polymodel.control import AcceptanceRates, CostTable
from polymodel.errors import InvalidRequest, KVFull, UnknownModel
from polymodel.events import Event, Events
from polymodel.growth import Ranks
from polymodel.kv import Arena, PageList
from polymodel.ledger import Ledger
from polymodel.model import Panel, forward
from polymodel.residency import Residency
from polymodel.sample import Sampler, Sampling
from polymodel.sequence import Drafts
from polymodel.sequence import Sequence as Request
from polymodel.trials import EXPLORED, JUDGED, MOST_STALE, SHADOW, STALE, TIMED_ROWS, TIMES, Trials

RANDOM = torch.randint(3, 300, (80,), generator=torch.Generator().manual_seed(8)).tolist()
FLAT, STEP = {1: 1.0}, {1: 0.01}
RISING = {1: 1.0, 2: 1.125, 3: 1.25, 5: 1.5, 9: 2.0, 17: 3.0}
Costs = Mapping[str, Mapping[int, float]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the module's fixtures, as for its tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Clock(Events):
    """A forward takes what its model's table says, and nothing else takes any time."""

    def __init__(self, costs: Costs) -> None:
        self.now = 0.0
        self.tables = {name: CostTable.of(table) for name, table in costs.items()}
        super().__init__(clock=lambda: self.now)

    def record(self, event: Event) -> None:
        super().record(event)
        if event.kind in ("measure", "shadow"):
            self.now += self.tables[event.model].seconds(event.tokens)


@dataclass
class Bench:
    """Trials of models on a clock of their own.

    "m", "same" (as m), "other", "wide" (with twice the bytes), "deep" (of another page layout), "few" (without the last
    ten embedding rows).
    """

    trials: Trials
    clock: Clock

    def request(self, tokens: Sequence[int], *names: str) -> Request:
        """One that has drafted with the named models."""
        hosted = self.trials.residency["m"]
        pages = PageList(self.trials.arena, hosted.layout)
        sampler, drafts = Sampler(Sampling(), 1), Drafts(spec=Draft(), names=[], is_auto=True, pages={})
        limits: dict[str, Any] = {"max_new_tokens": 9, "stop_ids": frozenset()}
        made = Request(
            model="m",
            domain="",
            tokens=list(tokens),
            pages=pages,
            hosted=hosted,
            sampler=sampler,
            drafts=drafts,
            **limits,
        )
        for name in names:
            self.trials.rates("m", drafts, name)
        return made

    def decode(self, target: str = "m") -> None:
        """A round of the target's, of a token."""
        seconds = self.clock.tables[target].seconds(1)
        self.clock.now += seconds
        self.trials.observe_cost(target, 1, seconds)
        self.trials.earn(target, 1, seconds)

    def earn(self, rounds: int, target: str = "m") -> None:
        """By rounds of a token that take a second each."""
        for _ in range(rounds):
            self.trials.earn(target, 1, 1.0)

    def explore(self, mates: Sequence[str] = (), tokens: Sequence[int] = tuple(RANDOM), target: str = "m") -> int:
        return self.trials.explore(target, mates, [self.request(tokens)])

    @property
    def log(self) -> list[tuple[str, str, int]]:
        return [(event.kind, event.model, event.tokens) for event in self.clock]

    @property
    def spent(self) -> float:
        return sum(event.tokens and self.clock.tables[event.model].seconds(event.tokens) for event in self.clock)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Residency:
    """What holds the models; each test has its own events and pages to count."""
    root, arena = tmp_path_factory.mktemp("trials"), Arena(16 << 20, 2 << 20)
    residency = Residency(1 << 30, arena, Ledger(), Events(), share=False)
    paths: dict[str, Path] = {name: write_tiny(root / name, "llama", i) for i, name in enumerate(("m", "other"))}
    paths["wide"] = write_tiny(root / "wide", "llama", 2, intermediate_size=688)
    paths["deep"] = write_tiny(root / "deep", "llama", 3, num_hidden_layers=4)
    paths["few"] = write_tiny(root / "few", "llama", 4, vocab_size=290)
    paths["same"] = paths["m"]
    for name in ("m", "same", "other", "wide", "deep", "few"):
        residency.add(name, open_checkpoint(paths[name]), "f32", False)
    return residency


Make = Callable[..., Bench]


@pytest.fixture
def make(home: Residency, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """costs: what forwards take; given: names whose tables are given to the trials."""

    def bench(costs: Costs, given: Sequence[str] = (), **config: Any) -> Bench:
        clock = Clock(costs)
        monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
        tables = {name: clock.tables[name] for name in given}
        return Bench(Trials(EngineConfig(**config), home, home.arena, clock, tables), clock)

    yield bench
    assert home.arena.num_pages_used == 0 and not home.pool["m"].leases
    home.arena.check()


@pytest.fixture(scope="module")
def greedy(home: Residency) -> list[int]:
    """A few tokens and sixty that "m" decodes after them."""
    tokens, pages = RANDOM[:5], PageList(home.arena, home["m"].layout)
    with home.lease("m") as model:
        while len(tokens) < 65:
            logits = forward(model, home.arena, Panel([pages], [tokens[len(pages) :]]))
            tokens.append(int(logits[0].argmax()))
    pages.free()
    assert len(set(tokens)) > 20
    return tokens


# ---- the record --------------------------------------------------------------------------------------


def test_costs_are_kept_by_model_and_given_ones_never_change(make: Make, home: Residency) -> None:
    """A table that was measured elsewhere and given is a given one as well."""
    bench = make({"m": FLAT, "same": STEP}, given=["same"])
    trials = bench.trials
    trials.observe_cost("m", 1, 2.0)
    trials.observe_cost("m", 4, 5.0)
    for tokens in (1, 7):
        trials.observe_cost("same", tokens, 9.0)
    assert trials.cost("m").as_dict() == {1: 2.0, 4: 5.0} and trials.cost("same").as_dict() == STEP
    assert not trials.cost("other").is_known and list(trials.costs) == ["same", "m"]
    trials.measure("same", (1, 3), 2)
    assert bench.log == [("measure", "same", rows) for rows in (1, 3, 1, 3)] and trials.cost("same").as_dict() == STEP
    measured = CostTable()
    measured.observe(1, 2.0)
    trials = Trials(EngineConfig(), home, home.arena, Events(), {"m": measured})
    trials.observe_cost("m", 1, 3.0)
    trials.observe_cost("m", 2, 3.0)
    assert trials.cost("m") is measured and measured.as_dict() == {1: 2.0}


def test_a_given_table_that_is_unknown_is_measured_like_any_other(make: Make, home: Residency) -> None:
    trials = Trials(EngineConfig(), home, home.arena, Events(), {"m": CostTable(), "same": CostTable.of(STEP)})
    trials.observe_cost("m", 1, 2.0)
    trials.observe_cost("same", 1, 2.0)
    assert trials.cost("m").as_dict() == {1: 2.0} and trials.cost("same").as_dict() == STEP
    trials.forget("m")
    trials.forget("same")
    assert not trials.cost("m").is_known and trials.cost("same").as_dict() == STEP


def test_a_session_begins_with_what_others_have_shown_and_all_learn(make: Make) -> None:
    trials = make({}).trials
    first, second, third = (Drafts(spec=Draft(), names=[], is_auto=True, pages={}) for _ in range(3))
    fresh = AcceptanceRates().rate(0)
    for _ in range(20):
        trials.observe("m", first, "other", 4, 0)
    assert trials.rates("m", first, "other").rate(0) == trials.pair("m", "other").rate(0) < 0.05
    assert trials.rates("m", second, "other").rate(0) == pytest.approx(trials.pair("m", "other").rate(0))
    assert trials.rates("m", second, "other") is second.rates["other"]
    before = second.rates["other"].rate(0)
    trials.observe("m", first, "other", 4, 4)
    assert second.rates["other"].rate(0) == before  # it has begun, and learns from its own rounds
    assert trials.rates("m", third, "other").rate(0) == pytest.approx(trials.pair("m", "other").rate(0))
    trials.observe("m", second, "other", 1, 1)
    assert second.rates["other"].rate(0) > trials.pair("m", "other").rate(0)  # a session follows its own text faster
    assert trials.rates("m", second, "same").rate(0) == trials.rates("same", third, "m").rate(0) == fresh


# ---- what a drafter would have said ------------------------------------------------------------------


def says(home: Residency, name: str, tokens: Sequence[int]) -> list[int]:
    """Its greedy token after each of these."""
    pages = PageList(home.arena, home[name].layout)
    with home.lease(name) as model:
        ids: list[int] = forward(model, home.arena, Panel([pages], [tokens], "all")).argmax(1).tolist()
    pages.free()
    return ids


@pytest.mark.parametrize("length", [2, 3, 20, 33, 48, 65])
def test_a_trial_counts_how_many_of_the_last_known_tokens_a_drafter_foresees(
    make: Make, home: Residency, greedy: list[int], length: int
) -> None:
    """By hand, on text of the target's of which every third token is replaced."""
    tokens = [token if i % 3 else RANDOM[i] for i, token in enumerate(greedy[-length:])]
    known = tokens[-SHADOW:]
    for name in ("same", "other"):
        bench = make({name: STEP}, given=[name])
        bench.trials.attempt("m", name, tokens)
        said = says(home, name, known[:-1])[-JUDGED:]
        right = [a == b for a, b in zip(said, known[-len(said) :], strict=True)]
        expected = AcceptanceRates()
        expected.agree(sum(right), len(right))
        assert bench.trials.pair("m", name).survival(5) == expected.survival(5)
        assert bench.log == [("shadow", name, min(length, SHADOW) - 1)]


def test_a_drafter_that_is_the_target_is_always_right_on_its_text(make: Make, greedy: list[int]) -> None:
    bench = make({"same": STEP, "other": STEP}, given=["same", "other"])
    for name in ("same", "other"):
        bench.trials.attempt("m", name, greedy[:SHADOW])
    right, wrong = AcceptanceRates(), AcceptanceRates()
    right.agree(JUDGED, JUDGED)
    wrong.agree(0, JUDGED)
    assert bench.trials.pair("m", "same").rate(0) == right.rate(0) > 0.95
    assert wrong.rate(0) <= bench.trials.pair("m", "other").rate(0) < 0.3
    assert ("same", "m") not in bench.trials.pairs


def test_what_lies_further_back_is_not_read(make: Make, greedy: list[int]) -> None:
    rates = []
    for tokens in (greedy, greedy[-SHADOW:], [9] * 500 + greedy[-SHADOW:]):
        bench = make({"same": STEP}, given=["same"])
        bench.trials.attempt("m", "same", tokens)
        rates.append(bench.trials.pair("m", "same").rate(0))
    assert len(set(rates)) == 1


def test_the_sessions_that_use_a_drafter_learn_from_its_trial(make: Make, greedy: list[int]) -> None:
    bench = make({"m": FLAT, "same": STEP}, given=["m", "same"])
    users, others = [bench.request(greedy[:n], "same") for n in (30, 65, 40)], bench.request(greedy[:12], "other")
    plain = bench.request(RANDOM)
    plain.drafts = None
    bench.earn(2000)
    before = [request.drafts.rates["same"].rate(0) for request in users if request.drafts]
    bench.trials.explore("m", ["same"], [users[0], others, users[1], users[2]])
    after = [request.drafts.rates["same"].rate(0) for request in users if request.drafts]
    assert bench.log == [("shadow", "same", 47)]  # on the longest text
    assert before == [AcceptanceRates().rate(0)] * 3 and after == [bench.trials.pair("m", "same").rate(0)] * 3
    assert others.drafts is not None and list(others.drafts.rates) == ["other"]
    bench.trials._tried.clear()
    assert bench.trials.explore("m", ["same"], [plain]) > 0 and len(bench.log) == 2


SAMPLED = Sampling(temperature=1.5, seed=3)


@pytest.fixture(scope="module")
def sampled(home: Residency) -> list[int]:
    """A prompt of five tokens and sixty that "m" draws after them."""
    tokens, pages, sampler = RANDOM[:5], PageList(home.arena, home["m"].layout), Sampler(SAMPLED, 5)
    with home.lease("m") as model:
        while len(tokens) < 65:
            logits = forward(model, home.arena, Panel([pages], [tokens[len(pages) :]]))
            tokens.append(sampler.choose(logits[0], tokens))
    pages.free()
    return tokens


def test_where_the_session_draws_what_a_drafter_would_have_drawn_is_compared(make: Make, sampled: list[int]) -> None:
    """With the noise of the same places: a model like the target is always right on a text that it reads whole."""
    right = AcceptanceRates()
    right.agree(JUDGED, JUDGED)
    rates = {}
    for name, sampling in (("drawn", SAMPLED), ("seed", Sampling(temperature=1.5, seed=4)), ("argmax", Sampling())):
        bench = make({"same": STEP}, given=["same"])
        bench.trials.attempt("m", "same", sampled[:SHADOW], sampler=Sampler(sampling, 5))
        rates[name] = bench.trials.pair("m", "same").rate(0)
        assert bench.log == [("shadow", "same", SHADOW - 1)]
    assert rates["drawn"] == right.rate(0) and max(rates["seed"], rates["argmax"]) < 0.6


def test_noise_is_that_of_a_tokens_place_in_the_whole_text(make: Make, home: Residency, sampled: list[int]) -> None:
    """By hand, of a text longer than what is read, and of a drafter that draws something else."""
    known, sampler = sampled[-SHADOW:], Sampler(SAMPLED, 5)
    for name in ("same", "other"):
        pages = PageList(home.arena, home[name].layout)
        with home.lease(name) as model:
            logits = forward(model, home.arena, Panel([pages], [known[:-1]], "all"))[-JUDGED:]
        pages.free()
        first = len(sampled) - JUDGED
        said = [sampler.choose(row, sampled[: first + i]) for i, row in enumerate(logits)]
        expected = AcceptanceRates()
        expected.agree(sum(a == b for a, b in zip(said, sampled[first:], strict=True)), JUDGED)
        bench = make({name: STEP}, given=[name])
        bench.trials.attempt("m", name, sampled, sampler=sampler)
        assert bench.trials.pair("m", name).rate(0) == expected.rate(0)


def test_a_round_tries_a_drafter_as_the_session_of_the_longest_text_samples(make: Make, sampled: list[int]) -> None:
    bench = make({"m": FLAT, "same": STEP}, given=["m", "same"])
    drawing, other = bench.request(sampled[:SHADOW]), bench.request(RANDOM[:20])
    drawing.sampler = Sampler(SAMPLED, 5)
    bench.earn(100)
    assert bench.trials.explore("m", ["same"], [other, drawing]) > 0
    right = AcceptanceRates()
    right.agree(JUDGED, JUDGED)
    assert bench.trials.pair("m", "same").rate(0) == right.rate(0)


def test_a_drafter_without_a_row_for_a_token_is_not_tried_on_it(make: Make) -> None:
    """Nothing is read and nothing learnt; a padding token further back than a trial reads does no harm."""
    readable = [token % 290 for token in RANDOM]
    bench = make({"few": STEP, "m": STEP}, given=["few"])
    for at in (-1, -2, -SHADOW):
        tokens = [*readable]
        tokens[at] = 290
        bench.trials.attempt("m", "few", tokens)
    assert bench.log == [] and bench.trials.pairs == {}
    tokens = [*readable]
    tokens[-SHADOW - 1] = 299
    bench.trials.attempt("m", "few", tokens)
    assert bench.log == [("shadow", "few", 47)] and list(bench.trials.pairs) == [("m", "few")]
    bench.trials.attempt("few", "m", RANDOM)  # a drafter with more rows than the target reads everything
    assert len(bench.log) == 2


def test_what_a_drafter_penalises_it_may_have_no_row_for(make: Make) -> None:
    """Penalties count the whole text, the trial reads the last of it."""
    tokens = [299] + [token % 290 for token in RANDOM]
    bench = make({"few": STEP}, given=["few"])
    sampling = Sampling(repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={299: 5.0})
    bench.trials.attempt("m", "few", tokens, sampler=Sampler(sampling, 1))
    assert bench.log == [("shadow", "few", 47)]


def test_a_drafter_can_read_what_it_has_rows_for(make: Make) -> None:
    trials = make({}).trials
    assert trials.can_read("few", "m", [3, 289]) and not trials.can_read("few", "m", [3, 290, 5])
    assert not trials.can_read("few", "m", [299, 5], 0) and trials.can_read("few", "m", [299, 5], 1)
    assert trials.can_read("few", "m", [299], 1) and trials.can_read("few", "m", [])
    assert trials.can_read("m", "few", [299]) and trials.can_read("other", "m", [299])


@pytest.mark.parametrize("tokens", [[], [5]])
def test_where_nothing_is_known_nothing_is_read(make: Make, tokens: list[int]) -> None:
    bench = make({"same": STEP}, given=["same"])
    bench.trials.attempt("m", "same", tokens)
    assert bench.log == [] and bench.trials.pairs == {}


# ---- which trial comes next --------------------------------------------------------------------------


def test_first_steps_of_mates_are_timed_then_mates_tried_then_the_targets_rows_timed_each_as_often(make: Make) -> None:
    bench = make({"m": FLAT, "same": STEP, "other": STEP})
    assert bench.explore(["same", "other"]) == 0 and bench.log == []  # nothing is known of the target
    bench.trials.observe_cost("m", 1, 1.0)
    bench.earn(2000)
    streamed = [bench.explore(["same", "other"]) for _ in range(20)]
    mates = [(kind, name, tokens) for kind, tokens in (("measure", 1), ("shadow", 47)) for name in ("same", "other")]
    assert bench.log == mates + [("measure", "m", rows) for rows in TIMED_ROWS * TIMES]
    names = [name for _, name, _ in bench.log]
    assert streamed == [bench.trials.residency[name].plan.nbytes for name in names] + [0]
    assert bench.trials.cost("m").as_dict() == dict.fromkeys((1, *TIMED_ROWS), 1.0)
    assert bench.trials.cost("other").as_dict() == pytest.approx(STEP)


def test_the_targets_rows_are_timed_before_a_drafter_is_tried_again(make: Make) -> None:
    bench = make({"m": FLAT, "same": STEP, "other": STEP}, given=["same", "other"])
    bench.trials.observe_cost("m", 1, 1.0)
    bench.trials.attempt("m", "same", RANDOM)
    for _ in range(2 * STALE):  # with nothing to spend
        assert bench.explore(["same"]) == 0
    bench.earn(2000)
    for _ in range(20):
        bench.explore(["same", "other"])
    timed = [("measure", "m", rows) for rows in TIMED_ROWS * TIMES]
    assert bench.log[1:] == [("shadow", "other", 47), *timed, ("shadow", "same", 47)]


def test_of_drafters_to_try_again_the_one_tried_least_recently_comes_first(make: Make) -> None:
    mates = ["same", "other", "wide"]
    bench = make({"m": FLAT} | dict.fromkeys(mates, STEP), given=["m", *mates])
    for name in ("wide", "same", "other"):
        bench.trials.attempt("m", name, RANDOM)
        bench.explore()
    for _ in range(STALE):
        bench.explore(mates)
    bench.earn(100)
    for _ in range(5):
        bench.explore(mates)
    assert [name for _, name, _ in bench.log] == ["wide", "same", "other"] * 2


def test_forwards_that_rounds_have_timed_are_not_timed_again(make: Make) -> None:
    bench = make({"m": RISING})
    for rows in (1, 5, 5, 5, 2, 17):
        bench.trials.observe_cost("m", rows, RISING[rows])
    bench.earn(2000)
    for _ in range(20):
        bench.explore()
    assert [rows for _, _, rows in bench.log] == [3, 9, 2, 3, 9, 17, 2, 3, 9, 17]


def test_of_given_tables_no_forward_is_timed(make: Make) -> None:
    bench = make({"m": FLAT, "same": STEP, "other": STEP}, given=["m", "same"])
    bench.earn(200)
    for _ in range(5):
        bench.explore(["same", "other"])
    assert bench.log == [("measure", "other", 1), ("shadow", "same", 47), ("shadow", "other", 47)]
    assert bench.trials.cost("m").as_dict() == FLAT and bench.trials.cost("same").as_dict() == STEP


@pytest.mark.parametrize(("step", "draft_tokens", "is_tried"), [(0.95, 8, True), (0.96, 8, False), (0.95, 1, False)])
def test_a_drafter_is_tried_only_if_it_could_gain_were_it_always_right(
    make: Make, step: float, draft_tokens: int, is_tried: bool
) -> None:
    """Four times draft_tokens in a row: 33 / (32 * 0.95 + 1) is 1.051, 33 / (32 * 0.96 + 1) is 1.040."""
    bench = make({"m": FLAT, "same": {1: step}}, given=["m", "same"], draft_tokens=draft_tokens)
    bench.earn(2000)
    bench.explore(["same"])
    assert [kind for kind, _, _ in bench.log] == ["shadow"] * is_tried


def test_where_verifying_costs_as_much_as_decoding_nothing_is_tried(make: Make) -> None:
    linear = {1: 1.0, 2: 2.0, 33: 33.0}
    bench = make({"m": linear, "same": {1: 1e-6}}, given=["m", "same"])
    bench.earn(2000)
    assert bench.explore(["same"]) == 0 and bench.log == []


def test_a_drafter_is_tried_again_after_twice_as_many_rounds_each_time(make: Make) -> None:
    """Rounds of other targets do not count."""
    bench = make({"m": FLAT, "other": FLAT, "same": STEP}, given=["m", "other", "same"])
    for target in ("m", "other"):
        bench.earn(1000, target)
    done = [bool(bench.explore(["same"])) for _ in range(7 * STALE + 4)]
    assert [i for i, tried in enumerate(done) if tried] == [0, STALE + 1, 3 * STALE + 2, 7 * STALE + 3]
    assert bench.explore(["same"], target="other") > 0
    assert not any(bench.explore(["same"], target="other") for _ in range(STALE))
    assert bench.explore(["same"]) == 0 and bench.explore(["same"], target="other") > 0
    bench.trials.attempt("other", "same", RANDOM)  # that counts as well, whoever asks for it
    assert not any(bench.explore(["same"], target="other") for _ in range(4 * STALE))
    assert bench.explore(["same"], target="other") > 0


def test_rounds_between_trials_are_no_more_than_so_many(make: Make) -> None:
    bench = make({"m": FLAT, "same": STEP}, given=["m", "same"])
    bench.earn(2000)
    request = [bench.request(RANDOM[:5])]
    done = [bool(bench.trials.explore("m", ["same"], request)) for _ in range(64 * 192)]
    tried = [i for i, was_tried in enumerate(done) if was_tried]
    waits = [after - before - 1 for before, after in pairwise(tried)]
    assert waits == [STALE * 2**i for i in range(7)] + [MOST_STALE] and MOST_STALE == STALE * 2**6


def test_a_drafter_that_drafts_is_waited_for_no_longer_than_at_first(make: Make) -> None:
    """Whatever its drafts were worth; those of another pair do not count."""
    bench = make({"m": FLAT, "same": STEP}, given=["m", "same"])
    bench.earn(1000)
    (drafts,) = [one for one in [bench.request(RANDOM).drafts] if one is not None]

    def wait() -> int:
        """Rounds until the next trial."""
        return next(i for i in range(MOST_STALE) if bench.explore(["same"]))

    assert [wait() for _ in range(4)] == [0, STALE, 2 * STALE, 4 * STALE]
    bench.trials.observe("m", drafts, "ngram 3", 4, 4)
    bench.trials.observe("same", drafts, "same", 4, 4)
    assert wait() == 8 * STALE
    bench.trials.observe("m", drafts, "same", 4, 0)
    assert [wait() for _ in range(3)] == [STALE, STALE, 2 * STALE]
    bench.trials.forget("same")  # its waits go with it
    assert [wait() for _ in range(2)] == [0, STALE]


# ---- what it may take --------------------------------------------------------------------------------


def test_a_trial_waits_until_it_is_earned_and_is_paid_for(make: Make) -> None:
    """A hundredth of what was decoded; every target has an account of its own."""
    bench = make({"m": FLAT, "same": {1: 0.5}, "other": FLAT}, given=["m", "same", "other"])
    bench.earn(1000, "other")
    bench.earn(49)
    assert bench.explore(["same"]) == 0
    bench.earn(2)
    assert bench.explore(["same"]) > 0 and bench.clock.now == 0.5
    for _ in range(STALE):
        assert bench.explore(["same"]) == 0
    bench.earn(48)
    assert bench.explore(["same"]) == 0
    bench.earn(2)
    assert bench.explore(["same"]) > 0


def test_what_is_earned_and_paid_goes_by_given_tables_whatever_the_clock_says(make: Make) -> None:
    """So the same tables decide the same on any machine."""
    for slow in (1.0, 1e-3, 1e3):
        bench = make({"m": {1: 1.0, 4: 2.0}, "same": {1: 0.5}, "other": {1: 0.25}}, given=["m", "same"])
        bench.clock.tables["same"] = CostTable.of({1: 0.5 * slow})
        for _ in range(49):
            bench.trials.earn("m", 1, slow)
        assert bench.explore(["same"]) == 0
        bench.trials.earn("m", 4, slow)
        assert bench.explore(["same"]) > 0 and bench.clock.now == 0.5 * slow
        assert bench.trials._credit["m"] == pytest.approx(0.01)


def test_what_is_earned_and_paid_without_given_tables_goes_by_the_clock(make: Make) -> None:
    bench = make({"m": FLAT, "same": {1: 0.5}})
    bench.trials.observe_cost("m", 1, 1.0)
    bench.trials.observe_cost("same", 1, 0.1)
    bench.trials.earn("m", 1, 20.0)
    assert bench.trials._credit["m"] == pytest.approx(0.2)
    assert bench.explore(["same"]) > 0 and bench.log == [("shadow", "same", 47)]
    assert bench.trials._credit["m"] == pytest.approx(0.2 - 0.5)


def test_what_is_too_dear_now_is_waited_for_and_no_other_taken(make: Make) -> None:
    bench = make({"m": FLAT, "wide": {1: 0.25}, "same": {1: 0.01}}, given=["m", "wide", "same"])
    bench.earn(20)
    assert bench.explore(["wide", "same"]) == 0 and bench.log == []
    assert bench.explore(["same", "wide"]) > 0 and bench.log == [("shadow", "same", 47)]


def test_a_model_that_was_never_timed_is_expected_to_take_its_share_of_bytes(make: Make, home: Residency) -> None:
    share = home["wide"].plan.nbytes / home["m"].plan.nbytes
    assert share > 1.5
    bench = make({"m": FLAT, "wide": {1: 3.0}}, given=["m"])
    bench.earn(int(100 * share))
    assert bench.explore(["wide"]) == 0
    bench.earn(1)
    assert bench.explore(["wide"]) == home["wide"].plan.nbytes and bench.log == [("measure", "wide", 1)]
    assert bench.trials.cost("wide").as_dict() == {1: 3.0}


def test_what_took_longer_than_expected_is_earned_before_anything_else(make: Make) -> None:
    bench = make({"m": FLAT, "same": {1: 5.0}, "other": STEP}, given=["m", "other"])
    bench.earn(101)
    assert bench.explore(["same"]) > 0 and bench.clock.now == 5.0
    bench.earn(399)
    assert bench.explore(["other"]) == 0
    bench.earn(2)
    assert bench.explore(["other"]) > 0


@pytest.mark.parametrize(("costs", "num_rounds"), [(FLAT, 1700), (RISING, 2900)], ids=["flat", "rising"])
def test_a_hundredth_of_the_time_at_most_goes_into_trials(
    make: Make, costs: Mapping[int, float], num_rounds: int
) -> None:
    """At any moment, but for what a forward took beyond what was expected. Until all is known, what may be spent is."""
    mates = {"same": {1: 0.125}, "other": {1: 0.25}, "wide": {1: 0.125}}
    bench = make({"m": costs, **mates})
    requests, beyond = [bench.request(RANDOM)], [0.0]
    for decoded in range(1, num_rounds + 1):
        bench.decode()
        bench.trials.explore("m", list(mates), requests)
        beyond.append(bench.spent - EXPLORED * decoded)
    assert max(beyond) <= (1e-6 if costs == FLAT else RISING[17] - RISING[1])
    assert bench.spent > 0.9 * EXPLORED * num_rounds
    kinds = [kind for kind, _, _ in bench.log]
    assert kinds.count("measure") == len(TIMED_ROWS) * TIMES + 3 and kinds.count("shadow") >= 3


def test_no_mate_waits_for_ever_behind_those_before_it(make: Make) -> None:
    """Though trying the first ones again and again would take all that is earned."""
    mates = {"same": {1: 0.5}, "other": {1: 0.5}, "wide": {1: 0.75}}
    bench = make({"m": FLAT, **mates}, given=["m", "same", "other", "wide"])
    requests = [bench.request(RANDOM)]
    for _ in range(600):
        bench.decode()
        bench.trials.explore("m", list(mates), requests)
    tried = [name for _, name, _ in bench.log]
    assert len(tried) >= 8 and set(tried[:3]) == set(mates)
    assert max(map(tried.count, mates)) - min(map(tried.count, mates)) <= 1


# ---- where pages are lacking -------------------------------------------------------------------------


def test_where_no_page_is_to_spare_nothing_is_tried_and_nothing_taken(make: Make, home: Residency) -> None:
    """Nobody is asked to give pages back, and what is not done costs nothing."""
    bench = make({"m": FLAT, "same": {1: 0.5}}, given=["m"])
    arena, asked = home.arena, []
    hoard = PageList(arena, home["m"].layout)
    hoard.reserve(arena.num_free(home["m"].layout) * 64)
    arena.reclaimers.append(lambda layout, count: asked.append(count))
    bench.earn(1000)
    try:
        used = arena.num_pages_used
        assert bench.explore(["same"]) == 0  # timing
        bench.trials.observe_cost("same", 1, 0.5)
        assert bench.explore(["same"]) == 0  # a trial
        assert bench.log == [] and asked == [] and arena.num_pages_used == used
        assert bench.trials.pairs == {} and bench.trials._credit["m"] == pytest.approx(10.0)
        with pytest.raises(KVFull):
            bench.trials.measure("same", (1,), 1)
        assert asked and arena.num_pages_used == used
    finally:
        arena.reclaimers.pop()
        hoard.unreserve()
    bench.trials._tried.clear()
    assert bench.explore(["same"]) > 0 and bench.log == [("shadow", "same", 47)]


def test_where_one_trial_finds_no_page_the_next_is_made(make: Make, home: Residency) -> None:
    """Pages of "deep" are of another size, and the only one left is not. What was not done costs nothing."""
    bench = make({"m": FLAT, "deep": {1: 0.25}, "same": {1: 0.5}}, given=["m", "deep", "same"])
    arena, layout = home.arena, home["m"].layout
    assert home["deep"].layout != layout
    hoard = PageList(arena, layout)
    hoard.reserve((arena.num_free(layout) - 1) * 64)
    bench.earn(100)
    try:
        assert bench.explore(["deep", "same"]) == home["same"].plan.nbytes
        assert bench.log == [("shadow", "same", 47)] and bench.trials._credit["m"] == pytest.approx(0.5)
        assert list(bench.trials.pairs) == [("m", "same")]
    finally:
        hoard.unreserve()


def test_an_error_under_a_trial_leaves_no_page_and_no_lease(make: Make, home: Residency) -> None:
    bench = make({"m": FLAT, "same": STEP}, given=["m", "same"])
    with pytest.raises(ValueError, match="row ids"):
        bench.trials.attempt("m", "same", [5, 300, 6])
    with pytest.raises(UnknownModel, match="nobody"):
        bench.trials.attempt("m", "nobody", RANDOM)
    assert home.arena.num_pages_used == 0 and bench.log == [] and bench.trials.pairs == {}


# ---- a model that goes -------------------------------------------------------------------------------


def test_what_was_learnt_of_a_model_goes_with_it_and_of_others_stays(make: Make) -> None:
    bench = make({"m": FLAT, "same": STEP, "other": STEP}, given=["other"])
    trials = bench.trials
    trials.observe_cost("m", 1, 1.0)
    trials.observe_cost("same", 1, 0.01)
    pairs = [("m", "same"), ("same", "m"), ("m", "other"), ("other", "m"), ("m", "ngram 3"), ("same", "ngram 3")]
    for target, name in pairs:
        trials.pair(target, name)
        trials.ranks[target, name] = [Ranks()]
    for target in ("m", "same"):
        bench.earn(2000, target)
    trials.attempt("m", "same", RANDOM)
    trials.attempt("m", "other", RANDOM)
    trials.forget("same")
    kept = [pair for pair in pairs if "same" not in pair]
    assert list(trials.pairs) == list(trials.ranks) == kept and list(trials.costs) == ["other", "m"]
    assert bench.explore(["other"], target="same") == 0  # of its own forwards nothing is known
    bench.clock.clear()
    seen = [bench.explore(["other", "same"]) and bench.log[-1] for _ in range(18)]
    expected = [("measure", "m", rows) for rows in TIMED_ROWS * TIMES]
    assert seen == [("measure", "same", 1), ("shadow", "same", 47), *expected, 0]  # "other" was tried, and is known
    trials.forget("other")
    assert trials.cost("other").as_dict() == STEP
    trials.forget("nobody at all")
    trials.forget("m")
    assert list(trials.pairs) == list(trials.ranks) == []


def test_a_target_that_was_forgotten_has_nothing_to_spend_and_times_its_forwards_anew(make: Make) -> None:
    bench = make({"m": FLAT})
    bench.trials.observe_cost("m", 1, 1.0)
    bench.earn(2000)
    for _ in range(4):
        bench.explore()
    bench.trials.forget("m")
    assert bench.explore() == 0 and not bench.trials.cost("m").is_known
    bench.trials.observe_cost("m", 1, 1.0)
    assert bench.explore() == 0
    bench.earn(2000)
    for _ in range(20):
        bench.explore()
    assert [rows for _, _, rows in bench.log] == [*TIMED_ROWS[:4], *TIMED_ROWS * TIMES]


# ---- timing on demand --------------------------------------------------------------------------------


def test_forwards_are_timed_in_turn_in_pages_of_their_own(make: Make, home: Residency) -> None:
    bench = make({"m": RISING})
    bench.trials.measure("m", (17, 1, 5), 3)
    assert bench.log == [("measure", "m", rows) for rows in (17, 1, 5) * 3]
    assert bench.trials.cost("m").as_dict() == pytest.approx({rows: RISING[rows] for rows in (1, 5, 17)})
    assert {event.layers for event in bench.clock} == {3} and bench.trials._credit == {}
    longest = home["m"].max_position + 1
    bench.trials.measure("m", (longest,), 1)
    with pytest.raises(InvalidRequest, match=rf"{longest + 1} rows, expected a number in 1\.\.{longest}"):
        bench.trials.measure("m", (1, longest + 1), 1)
    assert len(bench.log) == 10  # refused before anything ran
