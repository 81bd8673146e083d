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
ratios to plain decoding in the same run. "e_measured" is tokens per target forward in the rounds that drafted,
"e_closed_form" the sum of a^i for i in 0..4 (Leviathan et al. 2023) with a as measured: how often a drafted token stood
given that all before it did. A gate that does not hold is exit status 1 too.

With --recorded, "auto" decides by cost tables that do not change, and a clock adds the table's seconds for every
forward that was made. One table was measured on a CPU by --record-costs; the other is simulated, of a larger model on a
GPU by its data sheet, while acceptance stays the demo model's. What lookup and Python take is in neither.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, console, demo_model, environment, machine_folder, rows_table, write_json
from records import is_count

from polymodel import Draft, Engine, Output
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
from polymodel.workloads.speculation import ALL, ARMS, K, Trial, summary

PROMPTS = ROOT / "bench" / "prompts" / "speculation.json"
MAX_PROMPT = 400  # tokens
TARGET, TWIN = "target", "target:q4"
TWIN_WEIGHTS: LowBit = "q4"
COPYING = ("summarising", "code editing")
MIN_SAVED, MIN_WALL, MIN_RECORDED = 1.2, 0.93, 0.98
SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128, 256)  # tokens of a timed forward
ROUNDS = 9  # forwards of each size
LARGE = KINDS["8B"]  # of the simulated table
Q4_BITS = 4.5  # a weight, with a float16 scale for 32
COLUMNS = (
    *("kind", "arm", "tokens", "forwards", "forwards_a_token", "forwards_saved", "acceptance_rate"),
    *("mean_acceptance_length", "e_measured", "e_closed_form", "speedup", "spread", "rounds_by_accepted"),
)
RECORDED_COLUMNS = ("costs", "what", "plain s", "auto s", "x plain, by the table")

Prompts = dict[str, list[list[int]]]  # kind -> token ids
Played = tuple[list[Output], list[Event]]
Row = dict[str, Any]


# ---- runs --------------------------------------------------------------------------------------------


def new_engine(weights: Weights, costs: Mapping[str, CostTable] | None = None, device: str = "cpu") -> Engine:
    """With the demo model and its twin."""
    engine = Engine(device, budget="2GiB", kv_budget="256MiB", costs=costs)
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


def gate(name: str, value: float, target: float) -> Row:
    return {"what": name, "value": value, "target": target, "holds": value >= target}


def gates(rows: Sequence[Row]) -> list[Row]:
    """What the rows should show, of the kinds that were run."""
    found = [
        gate(f"ngram saves forwards on {row['kind']}", row["forwards_saved"], MIN_SAVED)
        for row in rows
        if row["arm"] == "ngram" and row["kind"] in COPYING
    ]
    autos = [row for row in rows if row["arm"] == "auto" and row["kind"] != ALL]
    for column in ("speedup", "speedup_first"):
        mean = statistics.geometric_mean(row[column] for row in autos)
        found.append(gate(f"auto {column}, geometric mean over kinds", mean, MIN_WALL))
    worst = min(autos, key=lambda row: row["speedup"])
    within = worst["speedup"] * (1 + (worst["spread"] or 0.0))
    found.append(gate(f"auto speedup on {worst['kind']}, the worst kind, with its spread", within, MIN_WALL))
    return found


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


def costs_path(device: str) -> Path:
    """Where a device's measured costs are recorded."""
    return ROOT / "bench" / "results" / machine_folder(device) / "costs.json"


def tables(path: Path) -> dict[str, dict[str, CostTable]]:
    """Label -> model -> its cost table; the measured ones from a file."""
    if not path.exists():
        raise SystemExit(f"there are no costs of this machine in {path}: record them with --record-costs")
    recorded = json.loads(path.read_text())
    _, size, params, _ = LARGE
    return {
        f"measured, {path.parent.name}": {
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


def replay(weights: Weights, kinds: Sequence[str], tokens: int, device: str) -> list[Row]:
    """Every kind by every table, plainly and by "auto"; for that in an engine of its own, which has learnt nothing."""
    rows = []
    with new_engine(weights, device=device) as engine:
        prompts = read_prompts(engine, kinds)
        plain = {kind: played(engine, kind, some, "plain", tokens) for kind, some in prompts.items()}
    for label, costs in tables(costs_path(device)).items():
        for kind, some in prompts.items():
            with new_engine(weights, costs, device) as engine:
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
def engine(device: str) -> Iterator[Engine]:
    demo_model()
    with new_engine("file", device=device) as engine:
        yield engine


@pytest.mark.parametrize("arm", ARMS)
def test_arm(benchmark: Any, engine: Engine, arm: str) -> None:
    """Checked first, then timed, plain decoding before each round. "auto" goes by times, so it gives no counts."""
    ids = read_prompts(engine, ["code editing"])["code editing"][1]
    checked(arm, generate(engine, ids, 32, ARMS[arm]), generate(engine, ids, 32, None))

    def once(one: str, found: list[Output]) -> None:
        found.append(generate(engine, ids, 32, ARMS[one]))

    plain: list[Output] = []
    ours: list[Output] = []
    benchmark.pedantic(once, args=(arm, ours), setup=lambda: once("plain", plain), rounds=3)
    trial = [checked(arm, out, plain[0]).metrics for out in ours], [out.metrics for out in plain]
    found = summary("code editing", arm, [trial])
    benchmark.extra_info |= {name: value for name, value in found.items() if arm != "auto" or not is_count(value)}


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
    parser.add_argument("--record-costs", action="store_true", help="measure and write this machine's costs.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    command = shlex.join(["python", "bench/bench_speculation.py", *sys.argv[1:]])
    result = {"command": command, **environment(args.device), "weights": args.weights, "twin": TWIN_WEIGHTS}
    if args.record_costs:
        with new_engine(args.weights, device=args.device) as engine:
            return write_json(costs_path(args.device), {**result, "costs": record_costs(engine)})
    if args.recorded:
        rows = replay(args.weights, args.kinds, args.tokens, args.device)
        show("by a table and a clock, not by time", rows, RECORDED_COLUMNS)
        by_table = "x plain, by the table"
        found = [gate(f"auto on {row['what']}, costs {row['costs']}", row[by_table], MIN_RECORDED) for row in rows]
    else:
        with new_engine(args.weights, device=args.device) as engine:
            rows = measure(engine, read_prompts(engine, args.kinds), args.tokens, args.repetitions)
        show(f"measured; only E closed form, of {K} tokens a round, is a formula", rows, COLUMNS)
        found = gates(rows)
    show("gates", found, ("what", "value", "target", "holds"))
    if args.json:
        write_json(args.json, {**result, "tokens": args.tokens, "rows": rows, "gates": found})
    if not all(row["holds"] for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
