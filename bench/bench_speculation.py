"""What speculation saves on the demo model: 40 prompts of 8 kinds, each decoded plainly and with drafters.

    pip install '.[bench]' && polymodel pull smollm2
    python bench/bench_speculation.py [--weights file] [--tokens 64] [--kinds ...] [--repetitions 3] [--json FILE]
    python bench/bench_speculation.py --recorded [--json FILE]
    python bench/bench_speculation.py --record-costs
    pytest bench/bench_speculation.py [--benchmark-json FILE]

Arms: n-gram lookup and the target's q4 twin with 4 tokens a round, "auto", and on one prompt of each kind a drafter
that is always wrong. A stream that is not the plain one, or a target forward more than plain decoding makes, voids the
numbers: exit status 1.

Counts and seconds are measured; seconds are those of decoding, the arms in turn, the least of the repetitions, as
ratios to plain decoding in the same run. "E measured" is tokens per target forward in the rounds that drafted, "E
closed form" the sum of a^i for i in 0..4 (Leviathan et al. 2023) with a as measured: how often a drafted token stood
given that all before it did.

With --recorded, "auto" decides by cost tables that do not change, and a clock adds the table's seconds for every
forward that was made. One table was measured on a CPU by --record-costs; the other is simulated, of a larger model on a
GPU by its data sheet, while acceptance stays the demo model's. What lookup and Python take is in neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ROOT, console, cpu_name, demo_model, environment, rows_table, write_json

from polymodel import Draft, Engine, Output
from polymodel.accept import expected_tokens
from polymodel.config import LowBit, Weights
from polymodel.control import CostTable
from polymodel.events import Event
from polymodel.output import Metrics
from polymodel.selfcheck import Scripted
from polymodel.sim import H200, Hardware
from polymodel.workloads import adversary
from polymodel.workloads.exact import Reference, reference
from polymodel.workloads.report import Report
from polymodel.workloads.simulated import GB, KINDS

PROMPTS = ROOT / "bench" / "prompts" / "speculation.json"
COSTS = ROOT / "bench" / "results" / "cpu-epyc-avx2" / "costs.json"
MAX_PROMPT = 400  # tokens
TARGET, TWIN = "target", "target:q4"
TWIN_WEIGHTS: LowBit = "q4"
K = 4
ARMS: dict[str, Draft | str | None] = {  # plain decoding first
    "plain": None,
    "ngram": Draft("ngram", tokens=K),
    "auto": "auto",
    "twin": Draft("twin", tokens=K),
}
COPYING = ("summarising", "code editing")
MIN_SAVED, MIN_WALL, MIN_RECORDED = 1.2, 0.93, 0.98
SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128, 256)  # tokens of a timed forward
ROUNDS = 9  # forwards of each size
LARGE = KINDS["8B"]  # of the simulated table
Q4_BITS = 4.5  # a weight, with a float16 scale for 32
ALL = "all kinds"
COLUMNS = (
    *("what", "tokens", "forwards", "forwards/token", "forwards saved", "acceptance rate", "mean acceptance length"),
    *("E measured", "E closed form", "x plain, wall", "rounds by accepted tokens"),
)
RECORDED_COLUMNS = ("costs", "what", "plain s", "auto s", "x plain, by the table")

Prompts = dict[str, list[list[int]]]  # kind -> token ids
Trial = tuple[list[Metrics], list[Metrics]]  # the repetitions of one prompt: an arm's, and plain decoding's
Played = tuple[list[Output], list[Event]]
Row = dict[str, Any]


# ---- runs --------------------------------------------------------------------------------------------


def new_engine(weights: Weights, costs: Mapping[str, CostTable] | None = None) -> Engine:
    """With the demo model and its twin."""
    engine = Engine(budget="2GiB", kv_budget="256MiB", costs=costs)
    engine.add(TARGET, "smollm2", weights=weights, twin=TWIN_WEIGHTS)
    return engine


def texts() -> dict[str, list[str]]:
    """Kind -> prompts."""
    found: dict[str, list[str]] = json.loads(PROMPTS.read_text())
    return found


def read_prompts(engine: Engine, kinds: Iterable[str]) -> Prompts:
    """Kind -> the prompts' token ids, by the target's chat template."""
    template = engine[TARGET].tokenizer.apply_chat_template
    prompts = {
        kind: [template([{"role": "user", "content": text}], add_generation_prompt=True) for text in texts()[kind]]
        for kind in kinds
    }
    longest = max(len(ids) for some in prompts.values() for ids in some)
    if longest > MAX_PROMPT:
        raise SystemExit(f"a prompt has {longest} tokens, expected at most {MAX_PROMPT}")
    return prompts


def generate(engine: Engine, ids: list[int], tokens: int, draft: Draft | str | None) -> Output:
    return engine.generate(TARGET, prompt_ids=ids, max_new_tokens=tokens, draft=draft)


def checked(arm: str, out: Output, plain: Output) -> Output:
    """The output; raises SystemExit where it is not plain decoding's, or took more target forwards."""
    if out.tokens != plain.tokens:
        at = next((i for i, (a, b) in enumerate(zip(out.tokens, plain.tokens, strict=False)) if a != b), "the end")
        raise SystemExit(f"VOID: {arm} differs from plain decoding at output token {at}")
    ours, theirs = (o.metrics.num_target_forwards for o in (out, plain))
    if ours > theirs:
        raise SystemExit(f"VOID: {arm} made {ours} target forwards, plain decoding {theirs}")
    return out


def progress(text: str) -> None:
    print(f"\r{text:60}", end="", file=sys.stderr, flush=True)


# ---- reports -----------------------------------------------------------------------------------------


def summary(kind: str, arm: str, trials: Sequence[Trial]) -> Row:
    """What an arm did on some prompts, beside plain decoding of the same ones.

    Tokens are those after the first, which the prefill gives. The closed form is of drafts of K tokens each.
    """
    last = [(runs[-1], plain[-1]) for runs, plain in trials]
    ours = [metrics for metrics, _ in last]
    tokens, forwards = sum(m.num_output_tokens - 1 for m in ours), sum(m.num_target_forwards for m in ours)
    drafted, accepted = sum(m.num_drafted for m in ours), sum(m.num_accepted for m in ours)
    drafters = [drafter for m in ours for drafter in m.drafters.values()]
    rounds = sum(drafter.num_rounds for drafter in drafters)
    positions = [position for drafter in drafters for position in drafter.acceptance_profile]
    reached = sum(position["proposed"] for position in positions)
    acceptance = sum(position["accepted"] for position in positions) / reached if reached else None
    histogram: Counter[int] = Counter()
    for m in ours:
        histogram.update(dict(enumerate(m.acceptance_histogram)))
    seconds, plain_seconds = (
        [[metrics.decode_seconds for metrics in trial[side]] for trial in trials] for side in (0, 1)
    )
    return {
        "what": f"{kind}, {arm}",
        "kind": kind,
        "arm": arm,
        "prompts": len(trials),
        "tokens": tokens,
        "forwards": forwards,
        "forwards/token": forwards / tokens,
        "forwards saved": sum(plain.num_target_forwards for _, plain in last) / forwards,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance rate": accepted / drafted if drafted else None,
        "mean acceptance length": tokens / forwards,
        "acceptance": acceptance,
        "E measured": 1 + accepted / rounds if rounds else None,
        "E closed form": expected_tokens(K, acceptance) if acceptance is not None and arm != "auto" else None,
        "x plain, wall": sum(map(min, plain_seconds)) / sum(map(min, seconds)),
        "x plain, first repetition": sum(s[0] for s in plain_seconds) / sum(s[0] for s in seconds),
        "rounds by accepted tokens": " ".join(str(histogram[i]) for i in range(max(histogram, default=-1) + 1)),
        "seconds": seconds,
        "plain seconds": plain_seconds,
    }


def gate(name: str, value: float, target: float) -> Row:
    return {"what": name, "value": value, "target": target, "holds": value >= target}


def gates(rows: Sequence[Row]) -> list[Row]:
    """What the rows should show, of the kinds that were run."""
    found = [
        gate(f"ngram saves forwards on {row['kind']}", row["forwards saved"], MIN_SAVED)
        for row in rows
        if row["arm"] == "ngram" and row["kind"] in COPYING
    ]
    autos = [row for row in rows if row["arm"] == "auto" and row["kind"] != ALL]
    for column in ("x plain, wall", "x plain, first repetition"):
        mean = statistics.geometric_mean(row[column] for row in autos)
        found.append(gate(f"auto {column}, geometric mean over kinds", mean, MIN_WALL))
    return found


def origin() -> Row:
    """What produced a result."""
    return {
        "command": " ".join(["python", "bench/bench_speculation.py", *sys.argv[1:]]),
        "machine": cpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **environment(),
    }


def show(title: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    console().print(rows_table(title, rows, columns))


# ---- measured ----------------------------------------------------------------------------------------


def measure(engine: Engine, prompts: Prompts, tokens: int, repetitions: int) -> list[Row]:
    """Every prompt by every arm in turn, again and again; a row for each kind and arm, and for all kinds."""
    trials: list[tuple[str, str, Trial]] = []  # arm, kind
    wrong = Scripted([], engine[TARGET].config.vocab_size, lambda at, i: True)
    for kind, some in prompts.items():
        for number, ids in enumerate(some):
            arms = ARMS if number else {**ARMS, "wrong": Draft(wrong, tokens=K)}
            runs: dict[str, list[Metrics]] = {arm: [] for arm in arms}
            for repetition in range(repetitions):
                progress(f"{kind} {number + 1}/{len(some)}, repetition {repetition + 1}/{repetitions}")
                for arm, draft in arms.items():
                    out = generate(engine, ids, tokens, draft)
                    if arm == "plain":
                        plain, wrong.known = out, ids + out.tokens
                    runs[arm].append(checked(arm, out, plain).metrics)
            trials += [(arm, kind, (runs[arm], runs["plain"])) for arm in arms]
    progress("")
    return [
        summary(kind, arm, found)
        for arm in (*ARMS, "wrong")
        for kind in (*prompts, ALL)
        if arm != "plain" and (found := [trial for a, k, trial in trials if a == arm and kind in (k, ALL)])
    ]


# ---- by recorded costs -------------------------------------------------------------------------------


def simulated_seconds(events: Iterable[Event], costs: Mapping[str, CostTable]) -> float:
    """What the events' forwards take by the tables, but for the target's prefills."""
    return sum(
        costs[event.model].seconds(event.tokens)
        for event in events
        if event.kind in ("decode", "verify", "draft", "shadow", "measure")
        or (event.kind == "prefill" and event.model != TARGET)
    )


def roofline(hardware: Hardware, weight_bytes: float, params: float) -> CostTable:
    """Simulated: the weights stream through once, or the operations take longer."""
    return CostTable.of(
        {n: max(hardware.decode_seconds(weight_bytes, 0), hardware.prefill_seconds(params, n)) for n in SIZES}
    )


def tables() -> dict[str, dict[str, CostTable]]:
    """Label -> model -> its cost table."""
    recorded = json.loads(COSTS.read_text())
    _, size, params, _ = LARGE
    return {
        f"measured on {recorded['machine']}": {
            model: CostTable.of({int(n): s for n, s in seconds.items()}) for model, seconds in recorded["costs"].items()
        },
        f"simulated, {params:.0f}B and its {TWIN_WEIGHTS} twin on an {H200.name}": {
            TARGET: roofline(H200, size * GB, params * 1e9),
            TWIN: roofline(H200, params * 1e9 * Q4_BITS / 8, params * 1e9),
        },
    }


def played(engine: Engine, kind: str, some: Sequence[list[int]], arm: str, tokens: int) -> Played:
    """One kind of prompts by one arm."""
    engine.events.clear()
    outs = []
    for number, ids in enumerate(some, 1):
        progress(f"{kind}, {arm}, {number}/{len(some)}")
        outs.append(generate(engine, ids, tokens, ARMS[arm]))
    return outs, list(engine.events)


def replay(weights: Weights, kinds: Sequence[str], tokens: int) -> list[Row]:
    """Every kind by every table, plainly and by "auto"; for that in an engine of its own, which has learnt nothing."""
    rows = []
    with new_engine(weights) as engine:
        prompts = read_prompts(engine, kinds)
        plain = {kind: played(engine, kind, some, "plain", tokens) for kind, some in prompts.items()}
    for label, costs in tables().items():
        for kind, some in prompts.items():
            with new_engine(weights, costs) as engine:
                auto = played(engine, kind, some, "auto", tokens)
            for out, expected in zip(auto[0], plain[kind][0], strict=True):
                checked("auto", out, expected)
            before, after = (simulated_seconds(events, costs) for _, events in (plain[kind], auto))
            row = {"plain s": before, "auto s": after, "x plain, by the table": before / after}
            rows.append({"what": kind, "costs": label, **row})
    progress("")
    return rows


def record_costs(engine: Engine) -> dict[str, dict[int, float]]:
    """Model -> tokens of a forward -> seconds."""
    return {name: engine.measure_costs(name, SIZES, ROUNDS).as_dict() for name in (TARGET, TWIN)}


# ---- commands ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    demo_model()
    with new_engine("file") as engine:
        yield engine


@pytest.mark.parametrize("arm", ARMS)
def test_arm(benchmark: Any, engine: Engine, arm: str) -> None:
    ids = read_prompts(engine, ["code editing"])["code editing"][1]
    plain = generate(engine, ids, 32, None)
    out = benchmark.pedantic(lambda: generate(engine, ids, 32, ARMS[arm]), rounds=3, warmup_rounds=1)
    benchmark.extra_info |= summary("code editing", arm, [([checked(arm, out, plain).metrics], [plain.metrics])])


@pytest.fixture(scope="module")
def known(engine: Engine) -> Reference:
    """A prompt and what plain decoding makes of it."""
    ids = read_prompts(engine, ["code editing"])["code editing"][0]
    return reference(engine, TARGET, ids, {"max_new_tokens": 24, "stop_at_eos": False}, "adversary")


@pytest.mark.parametrize("adverse", list(adversary.adversaries((K,))), ids=str)
def test_adversary(benchmark: Any, engine: Engine, known: Reference, adverse: adversary.Adversary) -> None:
    """Checked: tokens, keys and values, and the forwards and accepted tokens of every round."""
    report = Report("adversary", "measured", {})
    adversary.compare(report, engine, TARGET, known, adverse, repetitions=1)
    assert report.passed, str(report)
    draft = adverse.draft(known, engine[TARGET].config.vocab_size)
    options: dict[str, Any] = {"max_new_tokens": len(known.tokens), "stop_at_eos": False, "draft": draft}
    benchmark.pedantic(lambda: engine.generate(TARGET, prompt_ids=known.prompt, **options), rounds=3, warmup_rounds=1)
    counts = ("forwards", "plain_forwards", "drafted", "accepted", "rounds_rolled_back")
    benchmark.extra_info |= {name: report.rows[0][name] for name in counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="file", help="of the target, as Engine.add takes them")
    parser.add_argument("--tokens", type=int, default=64, help="at most so many a prompt")
    parser.add_argument("--kinds", nargs="+", choices=list(texts()), default=list(texts()))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--recorded", action="store_true", help="by cost tables and a clock")
    parser.add_argument("--record-costs", action="store_true", help=f"measure and write {COSTS.relative_to(ROOT)}")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    result = {**origin(), "weights": args.weights, "twin": TWIN_WEIGHTS}
    if args.record_costs:
        with new_engine(args.weights) as engine:
            return write_json(COSTS, {**result, "costs": record_costs(engine)})
    if args.recorded:
        rows = replay(args.weights, args.kinds, args.tokens)
        show("by a table and a clock, not by time", rows, RECORDED_COLUMNS)
        by_table = "x plain, by the table"
        found = [gate(f"auto on {row['what']}, costs {row['costs']}", row[by_table], MIN_RECORDED) for row in rows]
    else:
        with new_engine(args.weights) as engine:
            rows = measure(engine, read_prompts(engine, args.kinds), args.tokens, args.repetitions)
        show(f"measured; only E closed form, of {K} tokens a round, is a formula", rows, COLUMNS)
        found = gates(rows)
    show("gates", found, ("what", "value", "target", "holds"))
    if args.json:
        write_json(args.json, {**result, "tokens": args.tokens, "rows": rows, "gates": found})


if __name__ == "__main__":
    main()
