"""Who drafts when nobody is named, on a clock of recorded costs; dynamic precision, twins, replays and metrics."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model, write_tiny, write_tokenizer
from torch import Tensor

from polymodel import Draft, DynamicPrecision, Engine, EngineConfig, errors
from polymodel.control import CostTable
from polymodel.draft import PROBE
from polymodel.engine import Options, Output
from polymodel.events import Event
from polymodel.kv import PageList
from polymodel.model import Panel, forward
from polymodel.output import Metrics
from polymodel.residency import model_nbytes
from polymodel.sequence import Sequence as Request
from polymodel.trials import SHADOW

UNCACHED = EngineConfig(prefix_cache=False, kv_borrows=False)
PROMPT = torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(70)).tolist()
PLAIN: dict[str, Any] = {"max_new_tokens": 24, "stop_at_eos": False, "draft": None}
Paths = dict[str, Path]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the module's fixtures, as for its tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Random models ("words" with another vocabulary, "padded" with more embedding rows), and models that only count.

    All but "words" have the same tokens; "few" has fewer embedding rows.
    """
    root = tmp_path_factory.mktemp("auto")
    names = "m", "other", "words"
    folders = {name: write_tiny(root / name, "llama", i, num_hidden_layers=2) for i, name in enumerate(names)}
    paths = {name: write_tokenizer(folders[name], merges=("a b",) if name == "words" else ()) for name in names}
    for name in COUNTERS:
        paths[name] = write_counter(root / name, COUNTERS[name])
    paths["few"] = write_counter(root / "few", counted, vocab_size=270)
    paths["padded"] = write_tokenizer(write_tiny(root / "padded", "llama", num_hidden_layers=2, vocab_size=310))
    return paths


# ---- models that count, on a simulated clock

LOOP = range(250, 260)  # counted round and round; other ids up to the last and then from 3 on
COUNT = range(3, 250)


def counted(token: int) -> int:
    """What comes after a token."""
    if token in LOOP:
        return LOOP[(token + 1 - LOOP.start) % len(LOOP)]
    return token + 1 if token + 1 in COUNT else COUNT.start


def half_wrong(token: int) -> int:
    """Right up to 100, and from 200 on."""
    return counted(token) if token < 100 or token >= 200 else 300 - token


COUNTERS: dict[str, Callable[[int], int]] = {
    "count": counted,
    "half": half_wrong,
    "wrong": lambda token: token + 2,
}


def count_from(start: int, number: int) -> list[int]:
    tokens = [start]
    while len(tokens) <= number:
        tokens.append(counted(tokens[-1]))
    return tokens[1:]


def write_counter(folder: Path, after: Callable[[int], int], vocab_size: int = 300) -> Path:
    """A llama of one layer that adds nothing to the embedding: the next token depends on the last one alone."""
    model = tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=False, vocab_size=vocab_size)
    embed, head = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        embed.div_(embed.norm(dim=1, keepdim=True))
        model.model.norm.weight.fill_(1.0)
        for matrix in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            matrix.weight.zero_()
        head.zero_()
        for token in range(COUNT.start, LOOP.stop):
            head[after(token)] += embed[token]
    model.save_pretrained(folder)
    return write_tokenizer(folder)


CPU = {1: 24.0, 2: 30.0, 3: 30.0, 5: 43.0, 9: 58.0, 17: 90.0, 33: 150.0, 65: 260.0}
GPU = {1: 1.0, 100: 1.05, 200: 2.0}
LINEAR = {1: 1.0, 64: 64.0}


def share(costs: dict[int, float], part: float) -> dict[int, float]:
    return {tokens: seconds * part for tokens, seconds in costs.items()}


class Clock:
    """Every forward takes what its model's table says, and nothing else takes any time."""

    def __init__(self, engine: Engine, costs: dict[str, dict[int, float]]) -> None:
        self.now = 0.0
        self.costs = {name: CostTable.of(table) for name, table in costs.items()}
        self.seconds: dict[str, float] = {}  # by kind of event
        self.log: list[Event] = []
        engine.events.record = self._record  # type: ignore[method-assign]

    def _record(self, event: Event) -> None:
        self.log.append(event)
        if event.kind in ("prefill", "decode", "verify", "draft", "shadow", "measure"):
            seconds = self.costs[event.model].seconds(event.tokens)
            self.seconds[event.kind] = self.seconds.get(event.kind, 0.0) + seconds
            self.now += seconds

    def num(self, *kinds: str) -> int:
        return sum(event.kind in kinds for event in self.log)

    @property
    def tried(self) -> float:
        """Seconds that went into trials, as a part of those that the target decoded."""
        trials = self.seconds.get("shadow", 0.0) + self.seconds.get("measure", 0.0)
        return trials / (self.seconds.get("decode", 0.0) + self.seconds.get("verify", 0.0))


@dataclass
class Simulation:
    engine: Engine
    clock: Clock

    def run(self, tokens: list[int], count: int = 200, **options: Any) -> tuple[Request, float]:
        """A request and the seconds it took."""
        (request,), seconds = self.run_all([tokens], count, **options)
        return request, seconds

    def run_all(self, prompts: Sequence[list[int]], count: int = 200, **options: Any) -> tuple[list[Request], float]:
        start = self.clock.now
        made = {"max_new_tokens": count, "draft": "auto"} | options
        requests = [self.engine.submit("count", prompt_ids=ids, **PLAIN | made) for ids in prompts]
        self.engine.run()
        for request in requests:
            if request.error is not None:
                raise request.error
        return requests, self.clock.now - start

    def plain_seconds(self, tokens: list[int], count: int = 200) -> float:
        table = self.clock.costs["count"]
        return table.seconds(len(tokens)) + (count - 1) * table.seconds(1)


@pytest.fixture
def simulate(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Simulation]]:
    """Make an engine of counting models on a clock of its own; the test holds its lane."""
    engines: list[Engine] = []

    def make(costs: dict[str, dict[int, float]], is_given: bool = True, **config: Any) -> Simulation:
        given = {name: CostTable.of(table) for name, table in costs.items()} if is_given else None
        engine = Engine(kv_budget="16MiB", config=replace(UNCACHED, **config), costs=given)
        engines.append(engine)
        for name in costs:
            if ":" not in name:
                twin: Any = "q8" if f"{name}:q8" in costs else None
                engine.add(name, paths[name.removesuffix(" again")], twin=twin)
        engine.lane._lock.acquire()
        clock = Clock(engine, costs)
        monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
        return Simulation(engine, clock)

    yield make
    monkeypatch.undo()
    for engine in engines:
        engine.lane._lock.release()
        engine.close()


Simulate = Callable[..., Simulation]


def drafters(request: Request) -> dict[str, int]:
    """Tokens by who drafted them."""
    assert request.drafts is not None
    return {name: record.num_drafted for name, record in request.drafts.records.items() if record.num_drafted}


def test_nothing_is_drafted_or_tried_where_drafting_cannot_pay(simulate: Simulate) -> None:
    sim = simulate({"count": LINEAR, "count again": share(LINEAR, 0.01)})
    for start in (3, LOOP.start):
        request, seconds = sim.run([start], 60)
        assert request.output == count_from(start, 60) and request.num_drafted == 0
        assert seconds == pytest.approx(60.0)
    assert sim.clock.num("draft", "verify", "shadow", "measure") == 0 and sim.clock.num("decode") == 118


@pytest.mark.parametrize("costs", [CPU, GPU])
def test_text_that_repeats_itself_is_looked_up_and_other_text_is_not(
    simulate: Simulate, costs: dict[int, float]
) -> None:
    sim = simulate({"count": costs})
    request, seconds = sim.run([LOOP.start], 60)
    assert request.output == count_from(LOOP.start, 60) and set(drafters(request)) == {"ngram"}
    assert seconds < 0.6 * sim.plain_seconds([LOOP.start], 60)
    assert request.num_accepted > 0.9 * request.num_drafted and request.num_forwards < 30
    request, seconds = sim.run([3], 60)
    assert request.output == count_from(3, 60) and request.num_drafted == 0
    assert seconds == pytest.approx(sim.plain_seconds([3], 60))


def test_a_drafter_is_tried_on_known_tokens_before_it_drafts_and_at_no_forward_of_the_target(
    simulate: Simulate,
) -> None:
    sim = simulate({"count": GPU, "count again": share(GPU, 0.02)})
    request, seconds = sim.run([3], 80)
    assert request.output == count_from(3, 80) and set(drafters(request)) == {"count again"}
    assert request.num_accepted == request.num_drafted > 60 and seconds < 0.4 * sim.plain_seconds([3], 80)
    kinds = [event.kind for event in sim.clock.log]
    assert kinds.index("shadow") < kinds.index("draft")
    before = kinds[: kinds.index("shadow")]
    assert before.count("decode") >= 2 and "verify" not in before  # it had to be earned
    (shadow,) = (event for event in sim.clock.log if event.kind == "shadow")
    assert shadow.model == "count again" and shadow.tokens == before.count("decode") + 1
    assert sim.clock.num("decode", "verify") == request.num_forwards
    assert sim.clock.num("prefill") == 1 and sim.clock.tried <= 0.01
    again, seconds = sim.run([3], 80)  # what the first has shown is known to the second
    assert again.num_drafted > request.num_drafted and again.num_forwards < request.num_forwards
    assert sim.clock.num("shadow") == 1


def test_a_twin_is_tried_and_drafts_like_any_other(simulate: Simulate) -> None:
    sim = simulate({"count": GPU, "count:q8": share(GPU, 0.02)})
    request, seconds = sim.run([3], 120)
    assert request.output == count_from(3, 120) and set(drafters(request)) == {"count:q8"}
    assert seconds < 0.5 * sim.plain_seconds([3], 120) and sim.clock.tried <= 0.01
    assert request.drafts is not None and not request.drafts.pages


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.1}], ids=["greedy", "penalised"])
def test_a_drafter_without_a_row_for_a_token_of_the_text_is_not_used(
    simulate: Simulate, options: dict[str, float]
) -> None:
    """It is tried once the token lies further back than a trial reads, and drafts for a text without it."""
    sim = simulate({"count": GPU, "few": share(GPU, 0.02)})
    request, _ = sim.run([280, 3], 100, **options)
    assert request.output == count_from(3, 100) and request.num_drafted == 0
    kinds = [event.kind for event in sim.clock.log]
    assert kinds.count("shadow") == 1 and kinds[: kinds.index("shadow")].count("decode") >= SHADOW - 2
    request, _ = sim.run([3], 40, **options)
    assert request.output == count_from(3, 40) and set(drafters(request)) == {"few"}


def test_a_drafter_that_turns_bad_is_left_and_comes_back(simulate: Simulate) -> None:
    """Right before 100 and from 200 on: left after drafts that get shorter and shorter, and back after a trial."""
    sim = simulate({"count": GPU, "half": share(GPU, 0.05)})
    at: dict[int, int] = {}  # token -> events before it
    request, _ = sim.run([3], 243, on_token=lambda token: at.setdefault(token, len(sim.clock.log)))
    assert request.output == count_from(3, 243)

    def kinds(start: int, stop: int) -> list[str]:
        return [event.kind for event in sim.clock.log[at[start] : at[stop]]]

    assert "verify" in kinds(20, 100) and "decode" not in kinds(20, 100)
    assert kinds(100, 150).count("verify") < 45 and "verify" not in kinds(150, 200)
    assert "shadow" in kinds(101, 200)  # which finds it as wrong as it is
    assert kinds(200, 246).count("decode") <= 30 and "verify" in kinds(200, 246) and "decode" not in kinds(238, 246)
    assert request.num_accepted > 97 and sim.clock.tried <= 0.01


def test_lookup_that_misled_is_heeded_again_once_it_is_right(simulate: Simulate) -> None:
    """While it is not verified, what it finds is compared with what comes."""
    sim = simulate({"count": CPU})

    def first_misleading(tokens: list[int], logits: Tensor) -> Tensor:
        if len(tokens) < 60:
            return _misleading(tokens, logits)
        logits[LOOP[len(tokens) % 10]] += 1e6
        return logits

    at: list[int] = []
    options = {"on_token": lambda _: at.append(len(sim.clock.log)), "logits_processor": first_misleading}
    request, _ = sim.run([3, 200, 201], 137, draft=Draft(max_n=2), **options)  # matches of other lengths count anew
    assert request.output[57:] == [LOOP[n % 10] for n in range(60, 140)]
    kinds = [event.kind for event in sim.clock.log]
    assert "verify" not in kinds[at[30] : at[57]] and kinds[at[110] :].count("decode") <= 1


def _misleading(tokens: list[int], logits: Tensor) -> Tensor:
    """A text in which what followed the last two tokens before never follows them again."""
    step, number = len(tokens) % 3, len(tokens) // 3
    logits[200 if step == 0 else 201 if step == 1 else 3 + number % 190] += 1e6
    return logits


SETS = {
    "cpu, alone": {"count": CPU},
    "cpu, a wrong one and a dear one": {"count": CPU, "wrong": share(CPU, 0.1), "count again": share(CPU, 0.9)},
    "gpu, right, half and wrong": {
        "count": GPU,
        "half": share(GPU, 0.1),
        "wrong": share(GPU, 0.1),
        "count again": share(GPU, 0.15),
    },
}
TEXTS: dict[str, tuple[list[int], int, dict[str, Any]]] = {  # prompt, tokens, options
    "counting": ([3], 120, {}),
    "a loop": ([LOOP.start], 120, {}),
    "far": ([150], 120, {}),
    "misleading, after all that": ([3, 200, 201], 300, {"logits_processor": _misleading}),
}


@pytest.mark.parametrize(
    ("costs", "part"),
    [
        ("cpu, a wrong one and a dear one", 0.6),
        ("gpu, right, half and wrong", 0.5),
        *(pytest.param(costs, 1.0, marks=pytest.mark.slow) for costs in SETS),
    ],
)
def test_auto_is_never_slower_than_plain_by_more_than_a_fiftieth(simulate: Simulate, costs: str, part: float) -> None:
    """On every text, beginning with nothing known and then with what the others have left."""
    sim = simulate(SETS[costs])
    ratios = {}
    for name, (prompt, count, options) in TEXTS.items():
        count = int(count * part)
        request, seconds = sim.run(prompt, count, **options)
        if not options:
            assert request.output == count_from(prompt[-1], count)
        ratios[name] = sim.plain_seconds(prompt, count) / seconds
    print(costs, {name: round(ratio, 3) for name, ratio in ratios.items()}, f"tried {sim.clock.tried:.4f}")
    assert min(ratios.values()) >= 0.98 and sim.clock.tried <= 0.01
    assert ratios["a loop"] > 1.5


def test_a_batch_drafts_for_those_whose_drafts_pay(simulate: Simulate) -> None:
    sim = simulate({"count": CPU})
    requests, _ = sim.run_all([[LOOP.start], [3], [LOOP.start + 4], [90]], 60)
    for request, start in zip(requests, (LOOP.start, 3, LOOP.start + 4, 90), strict=True):
        assert request.output == count_from(start, 60)
    assert [bool(drafters(request)) for request in requests] == [True, False, True, False]


def test_costs_that_are_given_stay_and_others_are_measured(simulate: Simulate) -> None:
    sim = simulate({"count": GPU, "count again": share(GPU, 0.02)})
    tables = {name: table.as_dict() for name, table in sim.engine.costs.items()}
    assert tables == {"count": GPU, "count again": share(GPU, 0.02)}
    sim.run([LOOP.start], 60)
    assert sim.engine.measure_costs("count", rows=(1, 7), repetitions=1).as_dict() == GPU
    assert {name: table.as_dict() for name, table in sim.engine.costs.items()} == tables


def test_measured_costs_are_those_of_the_clock(simulate: Simulate) -> None:
    sim = simulate({"count": CPU, "half": GPU}, is_given=False)
    assert sim.engine.costs == {}
    table = sim.engine.measure_costs("count", rows=(1, 2, 5, 17), repetitions=2)
    assert table.as_dict() == pytest.approx({n: CPU[n] for n in (1, 2, 5, 17)})
    assert [event.tokens for event in sim.clock.log] == [1, 2, 5, 17] * 2
    assert {(event.kind, event.model) for event in sim.clock.log} == {("measure", "count")}
    assert list(sim.engine.costs) == ["count"] and sim.engine.arena.num_pages_used == 0
    request, _ = sim.run([LOOP.start], 60)
    assert drafters(request) and sim.engine.costs["count"].as_dict()[1] == pytest.approx(24.0)


def test_without_costs_a_hundredth_of_the_time_goes_into_measuring_them(simulate: Simulate) -> None:
    sim = simulate({"count": GPU, "count again": share(GPU, 0.02)}, is_given=False)
    request, seconds = sim.run([3], 120)
    assert request.output == count_from(3, 120) and seconds <= sim.plain_seconds([3], 120) / 0.98
    assert sim.clock.num("measure") >= 1 and 0 < sim.clock.tried <= 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": (0,)}, r"measure_costs: 0 rows, expected a number in 1\.\.512"),
        ({"rows": (1, 513)}, r"measure_costs: 513 rows, expected a number in 1\.\.512"),
        ({"rows": (1.5,)}, r"measure_costs: 1\.5 rows"),
        ({"rows": 5}, "measure_costs: the rows are 5, expected a sequence of numbers of rows"),
        ({"rows": "12"}, "measure_costs: the rows are '12'"),
        ({"repetitions": 0}, "measure_costs: 0 repetitions, expected a number of at least 1"),
        ({"repetitions": None}, "measure_costs: None repetitions"),
    ],
)
def test_what_cannot_be_timed_is_refused(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    before = dict(engine.costs)
    with pytest.raises(errors.InvalidRequest, match=message):
        engine.measure_costs("other", **arguments)
    assert engine.costs == before


def test_measuring_a_model_that_is_not_there_is_refused(engine: Engine) -> None:
    with pytest.raises(errors.UnknownModel):
        engine.measure_costs("nobody")


def test_measuring_nothing_is_refused(paths: Paths) -> None:
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine:
        engine.add("m", paths["m"])
        with pytest.raises(errors.InvalidRequest, match="no rows"):
            engine.measure_costs("m", rows=())


def test_a_model_that_is_replaced_begins_anew(simulate: Simulate, paths: Paths) -> None:
    sim = simulate({"count": GPU, "count again": share(GPU, 0.02)})
    sim.run([3], 60)
    sim.engine.remove("count again")
    alone, _ = sim.run([3], 20)
    assert not drafters(alone) and alone.output == count_from(3, 20)
    sim.engine.add("count again", paths["wrong"])
    request, seconds = sim.run([3], 60)
    assert request.output == count_from(3, 60) and drafters(request).get("count again", 0) < 30
    assert sim.clock.num("shadow") >= 2 and seconds <= sim.plain_seconds([3], 60) / 0.98


@pytest.mark.parametrize("how", ["multi_model", "POLYMODEL"])
def test_one_switch_turns_drafting_off_and_the_tokens_stay(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "POLYMODEL":
        monkeypatch.setenv("POLYMODEL", " Off ")
    config = {} if how == "POLYMODEL" else {"multi_model": False}
    sim = simulate({"count": GPU, "count again": share(GPU, 0.02)}, **config)
    for draft in ("auto", "ngram", "count again", Draft(by="count again", width=2)):
        request, seconds = sim.run([LOOP.start], 15, draft=draft)
        assert request.output == count_from(LOOP.start, 15) and request.num_drafted == 0
        assert seconds == sim.plain_seconds([LOOP.start], 15)
    assert sim.clock.num("draft", "verify", "shadow", "measure") == 0
    with pytest.raises(errors.UnknownModel, match="nobody at all"):  # what is wrong is wrong all the same
        sim.run([LOOP.start], 15, draft="nobody at all")


def test_a_throttle_stops_a_drafter_that_is_always_wrong_and_lets_it_try_again_now_and_then(simulate: Simulate) -> None:
    sim = simulate({"count": GPU, "wrong": GPU})
    request, _ = sim.run([3], 60, draft=Draft(by="wrong", tokens=8, policy="throttle"))
    assert request.output == count_from(3, 60)
    num_probes = (59 - 6) // PROBE
    assert request.num_drafted == 4 * 4 + 3 + 2 + num_probes and request.num_draft_rounds == 6 + num_probes
    assert request.num_forwards == 59


# ---- an engine of random models, in real time


@pytest.fixture(scope="module")
def engine(paths: Paths) -> Iterator[Engine]:
    with Engine(kv_budget="16MiB", config=EngineConfig(kv_borrows=False)) as engine:
        engine.add("m", paths["m"], twin="q4")
        engine.add("other", paths["other"])
        yield engine


def generate(engine: Engine, **options: Any) -> Output:
    return engine.generate("m", **{"prompt_ids": PROMPT} | PLAIN | options)


# ---- dynamic precision


@dataclass
class Run:
    tokens: list[int]
    logits: list[Tensor]  # that each of them was chosen from
    pages: Tensor  # what is stored, [layers, tokens, ...]
    clean: int
    num_low_bit: int
    num_fallbacks: int


def stored(engine: Engine, pages: PageList) -> Tensor:
    at, slots = torch.tensor(pages.pages), torch.arange(len(pages))
    views = [pages.layout.view(engine.arena.bytes, layer) for layer in range(pages.layout.num_layers)]
    return torch.stack([view[at[slots // 64], :, :, slots % 64] for view in views])


def by_hand(engine: Engine, gate: DynamicPrecision, prompt: list[int], count: int) -> Run:
    """The twin first, in the target's pages; where it is not sure, the target itself."""
    run = Run([], [], torch.empty(0), len(prompt), 0, 0)
    with engine.lane.exclusive(), engine.residency.lease("m") as target, engine.residency.lease("m:q4") as twin:
        pages = PageList(engine.arena, target.layout)
        (logits,) = forward(target, engine.arena, Panel([pages], [prompt]))
        while True:
            run.logits.append(logits)
            run.tokens.append(int(logits.argmax()))
            if len(run.tokens) == count:
                break
            (logits,) = forward(twin, engine.arena, Panel([pages], [run.tokens[-1:]]))
            best, second = logits.double().topk(2).values
            prob = float(logits.double().softmax(0).amax())
            if float(best - second) >= gate.min_margin and prob >= gate.min_prob:
                run.num_low_bit += 1
                continue
            run.num_fallbacks += 1
            pages.rollback(1)
            (logits,) = forward(target, engine.arena, Panel([pages], [run.tokens[-1:]]))
            run.clean += run.num_low_bit == 0
        run.pages = stored(engine, pages)
        pages.free()
    return run


def by_engine(engine: Engine, gate: DynamicPrecision | None, prompt: list[int], count: int, **options: Any) -> Run:
    logits: list[Tensor] = []
    seen: list[tuple[Tensor, int]] = []

    def record(tokens: list[int], row: Tensor) -> Tensor:
        logits.append(row.clone())
        return row

    def look(token: int) -> None:
        if not request.num_left:
            seen.append((stored(engine, request.pages), request.pages.clean))

    with engine.lane.exclusive():
        made = PLAIN | {"max_new_tokens": count, "precision": gate, "on_token": look, "logits_processor": record}
        request = engine.submit("m", prompt_ids=prompt, **made | options)
        engine.run()
    ((pages, clean),) = seen
    return Run(request.output, logits, pages, clean, request.num_low_bit, request.num_fallbacks)


@pytest.mark.parametrize("gate", ["open", "shut", "margin", "probability", "impossible probability"])
def test_steps_of_either_precision_are_those_of_a_run_by_hand(engine: Engine, gate: str) -> None:
    """Tokens, logits, stored keys and values, and the counts."""
    prompt = [*PROMPT[:40], len(gate)]  # not a prefix that another test has cached
    rows = torch.stack(by_hand(engine, DynamicPrecision(), prompt, 20).logits)
    best, second = rows.topk(2).values.unbind(1)
    policy = {
        "open": DynamicPrecision(),
        "shut": DynamicPrecision(min_margin=math.inf),
        "margin": DynamicPrecision(min_margin=float((best - second).median())),
        "probability": DynamicPrecision(min_prob=float(rows.softmax(1).amax(1).median())),
        "impossible probability": DynamicPrecision(min_prob=1.0),
    }[gate]
    run, expected = by_engine(engine, policy, prompt, 20), by_hand(engine, policy, prompt, 20)
    assert run.tokens == expected.tokens
    assert (run.num_low_bit, run.num_fallbacks) == (expected.num_low_bit, expected.num_fallbacks)
    assert torch.equal(torch.stack(run.logits), torch.stack(expected.logits))
    assert torch.equal(run.pages, expected.pages) and run.clean == expected.clean
    plain = by_engine(engine, None, prompt, 20, domain="plain")
    if gate == "open":
        assert (run.num_low_bit, run.num_fallbacks, run.clean) == (19, 0, 41)
        assert run.tokens != plain.tokens and not torch.equal(run.pages, plain.pages)
    elif gate in ("shut", "impossible probability"):
        assert (run.num_low_bit, run.num_fallbacks, run.clean) == (0, 19, 60)
        assert run.tokens == plain.tokens and torch.equal(run.pages, plain.pages)
    else:
        assert run.num_low_bit >= 3 and run.num_fallbacks >= 3


def test_only_what_the_model_itself_has_stored_is_cached(engine: Engine) -> None:
    low, full = DynamicPrecision(), DynamicPrecision(min_margin=math.inf)
    for precision, domain, num_cached in ((low, "low", 70), (full, "full", 92), (None, "none", 92)):
        out = generate(engine, precision=precision, domain=domain)
        again = generate(engine, prompt_ids=PROMPT + out.tokens, domain=domain, max_new_tokens=1)
        assert again.metrics.num_cached_tokens == num_cached + (num_cached == 92)


def test_without_its_weights_there_the_twin_is_not_waited_for(engine: Engine) -> None:
    engine.unload("m:q4")
    before = engine.events.of("page_in", "admit")
    out = generate(engine, precision=DynamicPrecision())
    assert out.tokens == generate(engine).tokens and engine.events.of("page_in", "admit") == before
    assert (out.metrics.num_low_bit_steps, out.metrics.num_fallbacks) == (0, 0)
    engine.pin("m:q4")
    engine.unpin("m:q4")
    assert generate(engine, precision=DynamicPrecision()).metrics.num_low_bit_steps == 23


def test_low_bit_steps_beside_others_change_neither(engine: Engine) -> None:
    alone = generate(engine), generate(engine, precision=DynamicPrecision(), prompt_ids=PROMPT[:9])
    with engine.lane.exclusive():
        requests = [
            engine.submit("m", prompt_ids=ids, **PLAIN | options)
            for ids, options in (
                (PROMPT, {}),
                (PROMPT[:9], {"precision": DynamicPrecision()}),
                (PROMPT, {"draft": "twin"}),
                (PROMPT, {"precision": DynamicPrecision(min_margin=math.inf)}),
            )
        ]
        engine.run()
    assert [r.output for r in requests] == [alone[i].tokens for i in (0, 1, 0, 0)]
    assert [r.num_low_bit for r in requests] == [0, 23, 0, 0] and requests[2].num_drafted


def test_precision_is_refused_where_it_cannot_be_had(engine: Engine) -> None:
    gate = DynamicPrecision()
    for model, options, message in (
        ("other", {}, "precision: 'other' has no low-bit twin, expected one to be added with it"),
        ("m", {"draft": "twin"}, "precision= and draft=: give one of them"),
        ("m", {"draft": "ngram"}, "precision= and draft=: give one of them"),
        ("m", {"precision": 0.5}, r"precision=0\.5, expected a DynamicPrecision, or None"),
    ):
        with pytest.raises(errors.InvalidRequest, match=message):
            engine.submit(model, prompt_ids=PROMPT, **PLAIN | {"precision": gate} | options)
    assert not engine.lane.live
    auto = generate(engine, precision=gate, draft="auto")
    assert auto.metrics.num_low_bit_steps == 23 and not auto.metrics.drafters
    with pytest.raises(errors.InvalidRequest, match="dynamic precision, which promises no tokens"):
        engine.verify_exact(auto)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_margin": -1.0}, r"DynamicPrecision.min_margin=-1\.0, expected a number in 0..inf"),
        ({"min_margin": math.nan}, "DynamicPrecision.min_margin=nan"),
        ({"min_margin": True}, "DynamicPrecision.min_margin=True"),
        ({"min_prob": 1.5}, r"DynamicPrecision.min_prob=1\.5, expected a number in 0..1"),
        ({"min_prob": "x"}, "DynamicPrecision.min_prob='x'"),
    ],
)
def test_a_gate_that_is_no_number_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=message):
        DynamicPrecision(**values)


# ---- replays


def _no_nines(tokens: list[int], logits: Tensor) -> Tensor:
    logits[9::10] = -math.inf
    return logits


SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "seed": 7,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.001,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "logit_bias": {7: -math.inf, 60: 1.5},
}


def _cached(engine: Engine) -> tuple[int, ...]:
    stats = engine.prefixes.stats
    return stats.tokens, stats.nodes, stats.pages, stats.leases, stats.nbytes, engine.arena.num_pages_used


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft": "twin"},
        SAMPLED,
        SAMPLED | {"draft": Draft(by="twin", width=2)},
        {"logits_processor": _no_nines, "draft": "ngram"},
        {"stop_at_eos": True, "stop_ids": [5, 6]},
    ],
)
def test_a_replay_gives_the_same_tokens_and_leaves_nothing(engine: Engine, options: dict[str, Any]) -> None:
    out = generate(engine, **{"max_new_tokens": 10} | options)
    before = _cached(engine)
    engine.verify_exact(out)
    assert _cached(engine) == before
    other = (out.tokens[3] + 1) % 250
    with pytest.raises(errors.NotExact, match=f"^token 3 of the output is {other}, .* of 'm' gives {out.tokens[3]}$"):
        engine.verify_exact(replace(out, tokens=[*out.tokens[:3], other, *out.tokens[4:]]))
    assert _cached(engine) == before


def test_a_replay_ends_where_the_request_did(engine: Engine) -> None:
    text = engine["m"].tokenizer.decode
    whole = generate(engine)
    stop = next(c for c in whole.text[4:] if c.isascii() and c.isprintable())
    out = generate(engine, stop=stop)
    assert out.finish_reason == "stop" and stop in text(out.tokens)
    engine.verify_exact(out)
    engine.verify_exact(replace(out, tokens=out.tokens[:2]))  # what a request was cancelled at
    engine.verify_exact(replace(out, tokens=[]))
    longer = [*out.tokens, 5]
    with pytest.raises(errors.NotExact, match=rf"token {len(out.tokens)} of the output is 5, .* the end \(stop\)"):
        engine.verify_exact(replace(out, tokens=longer))


def test_a_replay_is_refused_where_no_tokens_were_promised(engine: Engine) -> None:
    out = generate(engine)
    rejection = generate(engine, temperature=1.0, draft="twin", acceptance="rejection")
    with pytest.raises(errors.InvalidRequest, match="acceptance='rejection', which promises no tokens"):
        engine.verify_exact(rejection)
    with pytest.raises(errors.InvalidRequest, match="threads is '1', was '2': other bits"):
        engine.verify_exact(replace(out, receipt=out.receipt | {"threads": "2"}))
    torch.set_num_threads(2)
    with pytest.raises(errors.InvalidRequest, match="threads is '2', was '1': other bits"):
        engine.verify_exact(out)
    torch.set_num_threads(1)
    engine.verify_exact(out)
    with pytest.raises(errors.InvalidRequest, match="expected an output, as `generate` gives, got 'out'"):
        engine.verify_exact("out")  # type: ignore[arg-type]
    with pytest.raises(errors.UnknownModel):
        engine.verify_exact(replace(out, model="nobody"))


# ---- twins


def test_a_twin_is_a_model_of_its_own_and_goes_with_its_model(paths: Paths) -> None:
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine:
        handle = engine.add("m", paths["m"], twin="q4")
        assert handle.name == "m" and list(engine) == ["m", "m:q4"]
        rows = {row["model"]: row for row in engine.table()}
        assert (rows["m"]["twin"], rows["m:q4"]["twin"], rows["m:q4"]["weights"]) == ("m:q4", "-", "q4")
        models = [one.model for one in engine.residency.hosted.values() if one.model is not None]
        assert len(models) == 2 and engine.ledger.total("weights") == model_nbytes(*models) > engine["m"].nbytes
        with pytest.raises(errors.DuplicateId):
            engine.add("m:q4", paths["other"])
        engine.remove("m")
        assert len(engine) == 0 and not engine.ledger.of("weights")
        engine.add("m", paths["m"], twin="q8")
        engine.remove("m:q8")
        assert list(engine) == ["m"]
        with pytest.raises(errors.InvalidRequest, match="draft='twin': 'm' has no low-bit twin"):
            engine.submit("m", prompt_ids=[5], draft="twin")
        with pytest.raises(errors.InvalidRequest, match="precision: 'm' has no low-bit twin"):
            engine.submit("m", prompt_ids=[5], precision=DynamicPrecision())
        assert engine.generate("m", prompt_ids=[5], max_new_tokens=3).metrics.num_drafted == 0


def _state(engine: Engine) -> Any:
    hosted = engine.residency.hosted
    return list(engine), engine.ledger.of("weights"), {name: one.twin for name, one in hosted.items()}, engine.costs


def test_a_twin_that_cannot_be_had_leaves_everything_as_it_was(paths: Paths) -> None:
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine:
        engine.add("x:q4", paths["other"])
        before, num_events = _state(engine), len(engine.events)
        with pytest.raises(errors.DuplicateId, match="'x:q4' is already there"):
            engine.add("x", paths["m"], twin="q4")
        wrong: list[Any] = ["q2", "file", "bf16", 4, True]
        for twin in wrong:
            with pytest.raises(errors.InvalidRequest, match=r"twin=.*, expected another one of q4, q8, w8a8, or None"):
                engine.add("x", paths["m"], twin=twin)
        with pytest.raises(errors.InvalidRequest, match="twin='q8' of weights='q8', expected another one"):
            engine.add("x", paths["m"], weights="q8", twin="q8")
        assert _state(engine) == before and len(engine.events) == num_events  # nothing was even read


def test_a_twin_without_room_brings_its_model_to_nothing(paths: Paths) -> None:
    """Too large by itself (a tiny model's codes are padded), or beside its model."""
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine:
        engine.add("m", paths["m"], twin="q4")
        size, twin_size = engine["m"].nbytes, engine["m:q4"].nbytes
    assert size < twin_size
    refused: list[tuple[int, type[Exception]]] = [
        (size + 1000, errors.TooLarge),
        (twin_size + 1000, errors.TooLarge),
    ]
    for budget, error in refused:
        with Engine(budget=budget, kv_budget="8MiB", config=UNCACHED) as engine:
            before = _state(engine)
            with pytest.raises(error, match="m:q4"):
                engine.add("m", paths["m"], twin="q4", pin=True)
            assert _state(engine) == before
            engine.residency.check()
            engine.add("m", paths["m"], pin=True)
            assert len(engine.generate("m", prompt_ids=[5], max_new_tokens=3).tokens) == 3


# ---- what is refused


class Silent:
    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"by": ()}, r"Draft.by=\(\), expected 'auto', 'ngram', 'twin', a model's name, an object with `propose`"),
        ({"by": 5}, "Draft.by=5"),
        ({"by": ("twin", 5)}, r"Draft.by=\('twin', 5\)"),
        ({"by": ("auto", "twin")}, "'auto' chooses by itself, expected it alone"),
        ({"tokens": 0}, r"Draft.tokens=0, expected a number in 1\.\.63"),
        ({"tokens": 64}, "Draft.tokens=64"),
        ({"tokens": True}, "Draft.tokens=True"),
        ({"by": "twin", "width": 17}, r"Draft.width=17, expected a number in 1\.\.16"),
        ({"by": "twin", "width": None}, "Draft.width=None"),
        ({"width": 2}, "Draft.width=2 by 'auto': one model drafts a tree, expected its name"),
        ({"by": ("twin", "ngram"), "width": 2}, "one model drafts a tree"),
        ({"nodes": 256}, r"Draft.nodes=256, expected a number in 1\.\.255"),
        ({"by": "ngram", "min_n": 0}, "Draft.min_n=0, max_n=5, expected 1 <= min_n <= max_n <= 8"),
        ({"by": "ngram", "min_n": 4, "max_n": 3}, "Draft.min_n=4, max_n=3"),
        ({"by": ("twin", "twin")}, "names a drafter twice"),
        ({"by": Silent}, "Draft.by=.*Silent.*, expected 'auto'"),
        ({"nodes": 6}, "Draft.policy and Draft.nodes are for drafters that are named"),
        ({"policy": "sometimes"}, "Draft.policy='sometimes', expected one of fixed, throttle, gate"),
    ],
)
def test_a_draft_that_makes_no_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=message):
        Draft(**values)


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        (5, errors.InvalidRequest, "draft: expected a model's name, 'auto', .*, a Draft or None, got 5"),
        ((), errors.InvalidRequest, r"Draft.by=\(\), expected 'auto'"),
        (("other", 5), errors.InvalidRequest, r"Draft.by=\('other', 5\)"),
        (("ngram", "m"), errors.InvalidRequest, "draft='m': a model cannot draft for itself"),
        (["ngram", "auto"], errors.InvalidRequest, "'auto' chooses by itself, expected it alone"),
        ("m", errors.InvalidRequest, "draft='m': a model cannot draft for itself"),
        ("nobody", errors.UnknownModel, "nobody"),
        (Draft(by=("other", "nobody")), errors.UnknownModel, "nobody"),
        (Draft(by="ngram", width=2), errors.InvalidRequest, "Draft.width=2: a model drafts a tree, .* not 'ngram'"),
        (Draft(by=Silent(), width=2), errors.InvalidRequest, "Draft.width=2: a model drafts a tree"),
    ],
)
def test_a_drafter_that_cannot_draft_is_refused_and_nothing_is_queued(
    engine: Engine, draft: Any, error: type[Exception], message: str
) -> None:
    with engine.lane.exclusive():
        used = engine.arena.num_pages_used
        with pytest.raises(error, match=message):
            engine.submit("m", prompt_ids=PROMPT, draft=draft)
        assert not engine.lane.live and engine.arena.num_pages_used == used


@pytest.mark.parametrize("by", [("twin", "other"), ["ngram", "twin"], [Silent(), "other"], ["twin"]])
def test_several_drafters_are_named_without_more_words(engine: Engine, by: Any) -> None:
    draft = Draft(by=tuple(by))
    outs = [generate(engine, prompt_ids=PROMPT[:20], max_new_tokens=8, draft=one) for one in (by, draft, None)]
    assert outs[0].tokens == outs[1].tokens == outs[2].tokens
    mine, same = (out.metrics.drafters for out in outs[:2])
    assert mine.keys() == same.keys() >= {"twin": {"m:q4"}, "other": {"other"}}[by[-1]]
    assert [one.num_drafted for one in mine.values()] == [one.num_drafted for one in same.values()]
    assert Draft(by=by) == draft and Draft(by=by).drafters == tuple(by)


def test_references_are_kept_as_tuples_of_ints(engine: Engine) -> None:
    """Whatever sequences they come in, so that a Draft is a key."""
    texts: list[Any] = [[[5, 6], [7]], ((5, 6), [7]), (np.array([5, 6]), torch.tensor([7])), [range(5, 7), (7,)]]
    drafts = [Draft(by="ngram", references=given) for given in texts]
    assert set(drafts) == {Draft(by="ngram", references=((5, 6), (7,)))} and Draft().references == ()
    assert {type(token) for draft in drafts for text in draft.references for token in text} == {int}
    plain = generate(engine)
    quoted = generate(engine, draft=Draft(by="ngram", references=[PROMPT[-3:] + plain.tokens]))
    assert quoted.tokens == plain.tokens and quoted.metrics.num_accepted == quoted.metrics.num_drafted > 15


@pytest.mark.parametrize("texts", [5, None, "ab", ("ab",), (5, 6), ((5, "x"),), ((5.0,),), ((None,),)])
def test_references_that_are_no_texts_are_refused(texts: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"Draft.references=.*, expected token ids of texts"):
        Draft(by="ngram", references=texts)


@pytest.mark.parametrize("token", [-1, 300])
@pytest.mark.parametrize("by", ["ngram", "auto"])
def test_references_outside_of_the_targets_vocabulary_are_refused_when_submitted(
    engine: Engine, by: str, token: int
) -> None:
    draft = Draft(by=by, references=((5, 6), (299, 0, token)))
    with engine.lane.exclusive():
        with pytest.raises(errors.InvalidRequest, match=rf"Draft.references: token {token}, .* 0\.\.299 of 'm'"):
            engine.submit("m", prompt_ids=PROMPT, draft=draft)
        assert not engine.lane.live


@pytest.fixture(scope="module")
def padded(paths: Paths) -> Iterator[Engine]:
    """Its target has ten embedding rows more than the drafter, and the same tokens."""
    with Engine(kv_budget="16MiB", config=EngineConfig(kv_borrows=False)) as engine:
        engine.add("padded", paths["padded"])
        engine.add("m", paths["m"])
        yield engine


def count_drafts(engine: Engine, draft: Any, **options: Any) -> tuple[int, int]:
    """Tokens that the drafter "m" proposed and was read to, of a run whose tokens are those of plain decoding."""
    made = {"prompt_ids": PROMPT[:30], "max_new_tokens": 6} | options
    out, plain = (engine.generate("padded", **PLAIN | made | {"draft": by}) for by in (draft, None))
    assert out.tokens == plain.tokens
    record = out.metrics.drafters.get("m")
    return (record.num_drafted, record.num_catch_up) if record else (0, 0)


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("m", {}),
        ("m", {"temperature": 1.0, "seed": 5}),
        ("m", {"repetition_penalty": 1.2}),
        (Draft(by="m", width=2, tokens=3), {}),
        (("ngram", "m"), {}),
        (Draft(by="m", policy="throttle"), {}),
    ],
)
def test_a_drafter_does_not_draft_after_a_token_that_it_has_no_row_for(
    padded: Engine, draft: Any, options: dict[str, Any]
) -> None:
    assert count_drafts(padded, draft, **options)[0] > 0
    for at in (0, 29):
        prompt = [*PROMPT[:at], 305, *PROMPT[at:30]]
        assert count_drafts(padded, draft, prompt_ids=prompt, **options) == (0, 0)


@pytest.mark.parametrize("draft", ["m", Draft(by="m", width=2, tokens=3)], ids=["chain", "tree"])
def test_a_bias_on_a_token_that_a_drafter_has_no_row_for_does_it_no_harm(padded: Engine, draft: Any) -> None:
    assert count_drafts(padded, draft, logit_bias={305: -5.0})[0] > 0
    assert count_drafts(padded, draft, logit_bias={305: 100.0}) == (0, 0)  # every token is that one


def test_a_drafter_stops_where_the_target_says_a_token_that_it_has_no_row_for(padded: Engine) -> None:
    def padding_at_33(tokens: list[int], logits: Tensor) -> Tensor:
        if len(tokens) == 33:
            logits[305] += 1e6
        return logits

    drafted, _ = count_drafts(padded, Draft(by="m", tokens=2), logits_processor=padding_at_33)
    assert 2 <= drafted <= 2 * 3


BROKEN_REFERENCES: list[Any] = [((50_000, 7),), ((-3, 7),), (("x", "y"),), 5]


@pytest.mark.parametrize("texts", BROKEN_REFERENCES)
def test_references_that_hold_no_token_ids_are_refused(engine: Engine, texts: Any) -> None:
    (token,) = generate(engine, max_new_tokens=1).tokens
    if isinstance(texts, tuple):
        texts = tuple((PROMPT[-1], token, *text) for text in texts)
    with engine.lane.exclusive():
        bystander = engine.submit("m", prompt_ids=PROMPT, **PLAIN)
        with pytest.raises(errors.InvalidRequest, match="references"):
            engine.submit("m", prompt_ids=PROMPT, **PLAIN | {"draft": Draft(by="ngram", references=texts)})
        engine.run()
    assert bystander.error is None


def test_another_vocabulary_is_named_with_the_first_token_that_differs(paths: Paths) -> None:
    with Engine(kv_budget="8MiB", config=UNCACHED) as engine:
        engine.add("m", paths["m"])
        engine.add("words", paths["words"])
        with pytest.raises(errors.VocabMismatch, match=r"'words' cannot draft for 'm': .* differ, first at id 259$"):
            engine.submit("m", prompt_ids=PROMPT, draft="words")
        with pytest.raises(errors.VocabMismatch, match=r"first at id 259$"):
            engine.submit("words", prompt_ids=PROMPT, draft=Draft(by=("ngram", "m")))
        assert not engine.lane.live
        assert "words" not in engine.lane.drafting.mates("m")


# ---- what is reported


@pytest.mark.parametrize(
    "draft", ["twin", "other", "ngram", Draft(by="twin", width=3, tokens=4), Draft(by=("twin", "other"), tokens=3)]
)
def test_counts_of_drafts_add_up(engine: Engine, draft: Any) -> None:
    prompt = PROMPT[:20] * 3
    m = generate(engine, prompt_ids=prompt, draft=draft, max_new_tokens=20).metrics
    assert m.num_output_tokens == 20 and m.num_target_forwards + m.num_accepted == 19
    assert sum(m.acceptance_histogram) == m.num_draft_rounds <= m.num_target_forwards
    assert sum(i * count for i, count in enumerate(m.acceptance_histogram)) == m.num_accepted
    assert m.mean_acceptance_length == 19 / m.num_target_forwards
    assert m.draft_acceptance_rate == (m.num_accepted / m.num_drafted if m.num_drafted else 0.0)
    assert (m.num_low_bit_steps, m.num_fallbacks) == (0, 0)
    used = m.drafters.values()
    if not isinstance(draft, Draft) or isinstance(draft.by, str):
        assert sum(one.num_drafted for one in used) == m.num_drafted
        assert sum(one.num_accepted for one in used) == m.num_accepted
        assert sum(one.num_rounds for one in used) == m.num_draft_rounds
    else:
        assert set(m.drafters) == {"m:q4", "other"}
        assert max(one.num_drafted for one in used) <= m.num_drafted <= sum(one.num_drafted for one in used)
    for one in used:
        assert one.draft_acceptance_rate == (one.num_accepted / one.num_drafted if one.num_drafted else 0.0)
        assert one.seconds >= 0.0
        rows = one.acceptance_profile
        assert [row["position"] for row in rows] == list(range(len(rows)))
        for row in rows:
            assert row["rate"] == row["accepted"] / row["proposed"]
        for before, row in pairwise(rows):
            assert row["proposed"] <= before["accepted"]
        if rows:
            assert rows[0]["proposed"] == one.num_rounds
        if not isinstance(draft, Draft):
            assert sum(row["accepted"] for row in rows) == one.num_accepted
    if draft == "other":
        assert m.drafters["other"].num_catch_up == 60 + 1
    if draft == "twin":
        assert m.drafters["m:q4"].num_catch_up == 0 and 0 < m.num_accepted < m.num_drafted


def test_metrics_have_the_names_of_the_field(engine: Engine) -> None:
    names = {one.name for one in fields(Metrics)}
    expected = "num_drafted num_accepted draft_acceptance_rate mean_acceptance_length acceptance_histogram"
    assert names >= set(expected.split()) | {"num_draft_rounds", "num_target_forwards", "drafters", "tokens_per_second"}
    plain = generate(engine).metrics
    assert (plain.num_target_forwards, plain.mean_acceptance_length, plain.draft_acceptance_rate) == (23, 1.0, 0.0)
    assert plain.drafters == {} and plain.acceptance_histogram == ()


def test_a_report_is_plain_data(engine: Engine) -> None:
    out = generate(engine, draft="twin", **SAMPLED, logits_processor=_no_nines, max_new_tokens=8)
    report = json.loads(json.dumps(out.report()))
    assert set(report) == {"model", "prompt_ids", "tokens", "text", "finish_reason", "metrics", "receipt"}
    assert report["tokens"] == out.tokens and report["receipt"] == out.receipt == engine.receipt("m")
    assert report["metrics"]["drafters"]["m:q4"]["num_drafted"] == out.metrics.num_drafted
    assert set(report["metrics"]) == set(asdict(out.metrics))


def test_settings_are_options_that_give_the_same_again(engine: Engine) -> None:
    out = generate(engine, **SAMPLED, stop=["never said"], stop_ids=[8], logits_processor=_no_nines)
    options = out.settings.options()
    assert set(options) <= set(Options.__annotations__)
    assert {name: options[name] for name in SAMPLED} == SAMPLED and options["acceptance"] == "identity"
    assert (options["stop"], options["stop_ids"], options["stop_at_eos"]) == (("never said",), [8], False)
    again = generate(engine, **options)
    assert (again.tokens, again.text, again.settings) == (out.tokens, out.text, out.settings)
    ends = generate(engine, stop_at_eos=True, stop_ids=[8]).settings.options()["stop_ids"]
    assert ends == [2, 8]  # the end of the text is named as well
