"""Sessions, siblings, prompts, batches and switches on a random model: exact counts, and gates that notice."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polymodel.batch import Batch
from polymodel.checkpoint import open_checkpoint
from polymodel.config import PAGE_TOKENS, ModelConfig
from polymodel.errors import InvalidRequest
from polymodel.lane import Lane
from polymodel.prefill import Prefill
from polymodel.session import Session
from polymodel.workloads import batch, radix, session, switch
from polymodel.workloads.report import Report, Setting, lcg, spread

ALL = {w.name: w for module in (session, radix, batch, switch) for w in module.WORKLOADS}
ONCE = Setting(repetitions=1, progress=lambda line: None)
KNOWN: dict[str, Report] = {}


def report_of(name: str) -> Report:
    if name not in KNOWN:
        KNOWN[name] = ALL[name].run(ONCE)
    return KNOWN[name]


def failed(report: Report) -> set[str]:
    return {gate.what for gate in report.gates if not gate.holds}


def config_of_the_random_model() -> ModelConfig:
    with Setting().source() as path:
        return open_checkpoint(path).config


def rows(report: Report, key: str) -> dict[Any, dict[str, Any]]:
    """Those that have this column, by it."""
    return {row[key]: row for row in report.rows if key in row}


# ---- reports


def test_a_report_without_gates_or_with_one_that_fails_has_not_passed() -> None:
    report = Report("w", "counted", {})
    assert not report.passed
    report.equal("tokens", 5, 5)
    report.that("share", 0.25, "at most 0.5", True)
    assert report.passed and report.as_dict()["passed"]
    report.equal("layers", [3, 4], [3])
    assert not report.passed and failed(report) == {"layers"}


def test_a_report_is_printed_as_a_table_for_each_kind_of_row_and_its_gates() -> None:
    report = Report("w", "simulated", {"P": 2048})
    report.rows = [{"arm": "A", "num_tokens": 12345}, {"arm": "B", "num_tokens": 7}, {"x": 0.12345, "is_so": None}]
    report.equal("tokens", 5, 5)
    report.equal("models", ["m1"], [])
    assert str(report).splitlines() == [
        "w (simulated: P 2,048)",
        "  arm  num tokens",
        "  A        12,345",
        "  B             7",
        "",
        "  x      is so",
        "  0.123      -",
        "",
        "  holds  tokens: 5",
        "  FAILS  models: m1, expected none",
    ]


@pytest.mark.parametrize("name", ALL)
def test_every_gate_holds_and_the_report_is_plain_data(name: str) -> None:
    report = report_of(name)
    assert report.passed, str(report)
    assert report.workload == name and report.source == ("simulated" if name == "switch-h200" else "measured")
    again = json.loads(json.dumps(report.as_dict()))
    assert again["rows"] == report.rows and len(again["gates"]) == len(report.gates) >= 3
    assert str(report).count("holds") >= len(report.gates)


def test_the_spread_is_what_the_median_is_over_the_least_and_nothing_for_one_run() -> None:
    assert (spread([2.0, 3.0, 9.0]), spread([2.0, 3.0]), spread([2.0])) == (0.5, 0.25, None)
    assert rows(report_of("batch"), "batch")[1]["spread"] is None


@pytest.mark.parametrize("name", ["session", "siblings", "radix", "batch", "switch"])
@pytest.mark.parametrize("size", ["small", "full"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_asked_of_it(name: str, size: Any) -> None:
    with pytest.raises(InvalidRequest, match="device='cuda:9'"):
        ALL[name].run(replace(ONCE, device="cuda:9", size=size))


def test_progress_is_told_as_it_comes() -> None:
    lines: list[str] = []
    switch.run_switch(Setting(repetitions=2, progress=lines.append))
    assert lines == ["switch: run 1 of 2", "switch: run 2 of 2"]


def test_prescribed_tokens_are_those_of_the_generator() -> None:
    assert lcg(2, 0, 1000) == [227, 776]


# ---- sessions


def test_the_envelope_of_fifty_turns_and_five_agents() -> None:
    shape = session.ENVELOPE
    assert shape.context == 6784
    assert shape.prefill_tokens() == {"a": 1_100_000, "b": 25_920, "c": 17_728, "d": 17_977}
    rest = [(2048 + 96 * t) - (2048 + 96 * t - 64 - 1) // PAGE_TOKENS * PAGE_TOKENS for t in range(1, 50)]
    assert shape.in_whole_pages() == 2048 + 4 * PAGE_TOKENS + 5 * sum(rest)


def test_arms_prefill_what_the_formulas_say() -> None:
    report = report_of("session")
    shape = session.SHAPES["small"]
    counted = {"A": 3 * (128 + 148 + 168), "B": 3 * 128 + 3 * 2 * 16, "C": 128 + 96, "D": 128 + 96 + 2 + 6}
    assert {arm: row["prefill_tokens"] for arm, row in rows(report, "arm").items()} == counted
    assert report.shape == asdict(shape) | {"weights": "file", "runs": 1}
    here, envelope = rows(report, "shape").values()
    assert {arm.upper(): here[arm] for arm in "abcd"} == counted and here["shape"] == "this, counted"
    assert envelope["shape"] == "50 x 5 envelope, by formula" and envelope["b"] == 25_920
    assert envelope["a_over_c"] == pytest.approx(62.05, abs=0.005)
    assert envelope["b_over_c"] == pytest.approx(1.462, abs=0.0005)
    times = rows(report, "ratios_of")["total_ms"]
    arms = rows(report, "arm").values()
    totals = {row["arm"]: row["total_ms"] for row in arms}
    assert times["b_over_c"] == pytest.approx(totals["B"] / totals["C"])
    assert all(row["said_tok_per_sec"] == pytest.approx(1e3 * 36 / row["total_ms"]) for row in arms)


def test_a_cache_that_keeps_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefill, "keep", lambda *args, **options: None)
    report = session.run_session(ONCE)
    assert failed(report) == {"prefill tokens, D", "decode steps, D"}
    assert rows(report, "arm")["D"]["prefill_tokens"] == 3 * (128 + 148 + 168)  # as counted


def test_rows_that_decode_one_after_another_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "_ready", lambda self, name, ready=Lane._ready: ready(self, name)[:1])
    assert failed(session.run_session(ONCE)) == {"decode steps, C", "decode steps, D"}


def test_a_model_that_says_one_thing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "greedy", lambda logits: [7] * len(logits))
    assert {"distinct tokens that they choose", "runs of D that said other tokens than C's"} <= failed(
        session.run_session(ONCE)
    )


def test_a_prefix_is_cut_to_the_context_of_the_model() -> None:
    config = replace(config_of_the_random_model(), max_context=8192)
    whole = session.SIBLINGS["envelope"]["W2L"]
    shape = session.fitted(whole, config)
    assert (whole.context, shape.context, shape) == (8778, 8192, replace(whole, prefix=7606))
    assert session.fitted(session.ENVELOPE, config) == session.ENVELOPE
    with pytest.raises(InvalidRequest, match=r"P=2048 .* 6,784 tokens, too many for a context of 4,096"):
        session.fitted(session.ENVELOPE, replace(config, max_context=4096))


def test_a_clone_that_computes_its_prefix_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_prefix(prefix: Session, size: int) -> Batch:
        batch = Batch([prefix.clone() for _ in range(size)])
        for row in batch:
            row.rollback(1)
            row.append(prefix.tokens[-1:])
        return batch

    monkeypatch.setattr(Batch, "from_prefix", from_prefix)
    assert failed(session.run_session(ONCE)) == {"prefill tokens, C"}


def test_one_other_token_in_one_arm_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill_each = Batch.prefill_each
    monkeypatch.setattr(
        Batch, "prefill_each", lambda self, ids: prefill_each(self, [[(i[0] + 1) % 257, *i[1:]] for i in ids])
    )
    assert "last logits of B, C and D that differ from C's" in failed(session.run_session(ONCE))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["session", "siblings"])
def test_the_whole_envelope_is_counted(name: str) -> None:
    report = ALL[name].run(Setting(size="full", repetitions=1))
    assert report.passed, str(report)
    if name == "session":
        counted = {arm: row["prefill_tokens"] for arm, row in rows(report, "arm").items()}
        assert counted == {"A": 1_100_000, "B": 25_920, "C": 17_728, "D": 17_977}
    else:
        work = {(row["form"], row["models"]): row["token_layers"] // 4 for row in report.rows}
        same, band, unrelated = ([work[form, what] for form in ("W2", "W2L")] for what in ("same", "band", "unrelated"))
        assert (same, band, unrelated) == ([17_728, 11_072], [19_776, 19_264], [25_920, 43_840])


# ---- siblings


def test_siblings_prefill_only_the_layers_that_differ() -> None:
    report = report_of("siblings")
    work = {(row["form"], row["models"]): (row["token_layers"], row["apart"]) for row in report.rows}
    results, long_results = 5 * 2 * 16, 5 * 1 * 16
    assert work == {
        ("W2", "same"): (4 * (128 + results), 4 * (5 * 128 + results)),
        ("W2", "band"): (4 * (128 + results) + 4 * 128, 4 * (5 * 128 + results)),
        ("W2", "unrelated"): (4 * (5 * 128 + results), 4 * (5 * 128 + results)),
        ("W2L", "same"): (4 * (320 + long_results), 4 * (5 * 320 + long_results)),
        ("W2L", "band"): (4 * (320 + long_results) + 4 * 320, 4 * (5 * 320 + long_results)),
        ("W2L", "unrelated"): (4 * (5 * 320 + long_results), 4 * (5 * 320 + long_results)),
    }


@pytest.mark.parametrize(("form", "same", "band"), [("W2", 1.462, 1.311), ("W2L", 3.960, 2.276)])
def test_what_sharing_between_models_saves_at_24_of_32_layers(form: str, same: float, band: float) -> None:
    shape = session.SIBLINGS["envelope"][form]
    apart = shape.token_layers(32, 0)
    assert apart / shape.token_layers(32, 32) == pytest.approx(same, abs=0.0005)
    assert apart / shape.token_layers(32, 24) == pytest.approx(band, abs=0.0005)


def test_a_sibling_that_takes_nothing_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefill, "take_band", lambda *args: None)
    monkeypatch.setitem(session.SIBLINGS, "small", {"W2": session.Shape(2, 2, 64, 1, 8)})
    assert failed(session.run_siblings(ONCE)) == {"W2, band: token layers of the prefill"}


# ---- prompts


def test_the_four_ways_to_prompt_have_the_known_hit_rates() -> None:
    found = rows(report_of("radix"), "way")
    rates = {way: [round(100 * row[key], 1) for key in COLUMNS] for way, row in found.items()}
    assert rates == {
        "few-shot": [88.2, 88.2, 88.2],
        "multi-turn": [79.5, 72.7, 31.8],
        "tree of thought": [77.2, 55.0, 55.0],
        "agents": [86.7, 73.5, 58.4],
    }
    assert [(row["tokens"], row["computed"]) for row in found.values()] == [*radix.KNOWN.values()]


COLUMNS = ("hit_rate", "hit_rate_in_whole_pages", "hit_rate_if_declared")


def test_a_small_cache_holds_more_where_requests_come_by_prefix() -> None:
    found = rows(report_of("radix"), "agents")
    assert [(row["computed"], round(100 * row["hit_rate"], 1)) for row in found.values()] == [(2408, 62.1), (848, 86.7)]


def test_a_cache_that_loses_a_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Prefill.keep
    monkeypatch.setattr(
        Prefill, "keep", lambda self, context, *args, **options: keep(self, context, len(context.tokens) - 1)
    )
    wrong = failed(radix.run_radix(ONCE))
    assert {"multi-turn: tokens computed", "agents: tokens computed"} <= wrong
    assert not any("logits" in what for what in wrong)


# ---- batches


def test_the_batch_curve_has_a_point_for_each_size_beside_a_session_alone() -> None:
    report = report_of("batch")
    points = {row["batch"]: row for row in report.rows if "batch" in row and "peak" not in row}
    alone = rows(report, "baseline")["one session, step by step"]
    assert list(points) == [1, 2, 4, 8] and report.shape["left_out"] == {}
    for size, point in points.items():
        assert point["agg_tok_per_sec"] == pytest.approx(1e3 * size / point["step_ms"])
        assert point["per_user_ms_per_tok"] * point["agg_tok_per_sec"] == pytest.approx(1000)
        assert point["speedup_vs_b1"] == pytest.approx(point["agg_tok_per_sec"] / alone["baseline_b1_tok_per_sec"])
    peak = max(points.values(), key=lambda point: float(point["agg_tok_per_sec"]))
    assert rows(report, "peak") == {"most tokens a second": {"peak": "most tokens a second", **peak}}


def test_a_batch_stops_growing_where_time_or_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    report = batch.run_batch(replace(ONCE, repetitions=3, seconds=0.0))
    assert report.passed and report.shape["left_out"] == {"for time": [2, 4, 8]}
    assert [point["reps"] for point in rows(report, "batch").values()] == [1]

    class Gpu:  # its name, where everything else is the CPU's
        type = "cuda"

    config = config_of_the_random_model()
    row = 2 * batch.page_bytes(config) + 4 * batch.LOGITS * config.vocab_size
    monkeypatch.setattr(batch, "device_of", lambda setting: Gpu())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(3.5 * row / batch.MEMORY_SHARE), 0))
    report = batch.run_batch(ONCE)
    assert report.passed and report.shape["left_out"] == {"for memory": [4, 8]}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 0))
    with pytest.raises(InvalidRequest, match="1,000 bytes are free"):
        batch.run_batch(ONCE)


def test_a_row_that_is_not_what_a_session_gives_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Batch.step

    def last_row_off(self: Batch, ids: Any) -> torch.Tensor:
        logits = step(self, ids)
        logits[-1, 0] = torch.nextafter(logits[-1, 0], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(Batch, "step", last_row_off)
    assert failed(batch.run_batch(ONCE)) == {"sampled rows whose last logits differ from a session's alone"}


# ---- switches


def test_a_switch_needs_every_byte_of_what_is_not_on_the_device() -> None:
    report = switch.run_switch(replace(ONCE, repetitions=2))
    found = rows(report, "from")
    assert list(found) == ["device", "host", "disk", "cold"] and report.shape["file"] == "in the page cache"
    assert [row["bytes_needed"] for row in found.values()] == [0, *3 * [report.shape["bytes"]]]
    for state, row in found.items():
        load = row["first_token_ms"] - found["device"]["first_token_ms"]
        assert row["load_ms"] == (None if state == "device" else pytest.approx(load))
        moves = state in ("disk", "cold") and load > 0  # a CPU's model in host memory is where it is needed
        assert row["gb_per_sec"] == (pytest.approx(row["bytes_needed"] / load / 1e6) if moves else None)


def test_switches_are_repeated_as_long_as_there_is_time() -> None:
    report = switch.run_switch(replace(ONCE, repetitions=3, seconds=0.0))
    assert report.passed and report.shape["runs"] == 1


def test_a_model_that_was_not_sent_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch.Switcher, "send", lambda self, state: None)
    assert {"where the model was", "disk: bytes that were not there"} <= failed(switch.run_switch(ONCE))


def test_page_ins_of_an_h200_are_bytes_over_the_speed_of_its_link() -> None:
    found = {(row["model"], row["weights"]): row for row in report_of("switch-h200").rows}
    assert found["8B", "bf16"]["host_ms"] - found["8B", "bf16"]["device_ms"] == pytest.approx(320)
    assert found["32B", "8 bit"]["host_ms"] - found["32B", "8 bit"]["device_ms"] == pytest.approx(640)
    assert found["8B", "bf16"]["disk_ms"] - found["8B", "bf16"]["device_ms"] == pytest.approx(16e9 / 6e9 * 1e3)


# ---- benches


@pytest.mark.slow
@pytest.mark.demo_model
def test_a_row_of_each_bench_runs_on_the_demo_model(demo_model_path: Path, tmp_path: Path) -> None:
    benches = ("session.py::test_arm[D]", "session.py::test_first_token_after_a_prefix_of_another_model[same]")
    benches += ("radix.py::test_way[multi-turn]", "batch.py::test_steps[2]", "switch.py::test_first_token[host]")
    command = [sys.executable, "-m", "pytest", "-q", "--benchmark-min-rounds=1"]
    told = subprocess.run(
        [*command, "--record", "--results", str(tmp_path), *(f"bench/bench_{bench}" for bench in benches)],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-1000:]
    recorded = {path.stem: json.loads(path.read_text())["rows"] for path in tmp_path.rglob("*.json")}
    assert set(recorded) == {"bench_session", "bench_radix", "bench_batch", "bench_switch"}
    info = {row["name"]: row["extra_info"] for of in recorded.values() for row in of}
    assert info["test_arm[D]"]["prefill_tokens"] == 128 + 3 * 16 + 2 + 3
    assert info["test_steps[2]"]["decode_steps"] == 16 and info["test_first_token[host]"]["bytes_needed"] > 10**7
