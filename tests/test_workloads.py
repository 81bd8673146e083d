"""Sessions, siblings, prompts, batches and switches on a random model: exact counts, and gates that notice."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from polymodel.batch import Batch
from polymodel.config import PAGE_TOKENS
from polymodel.prefill import Prefill
from polymodel.session import Session
from polymodel.workloads import batch, radix, session, switch
from polymodel.workloads.report import Report, Setting, lcg

ALL = {w.name: w for module in (session, radix, batch, switch) for w in module.WORKLOADS}
ONCE = Setting(repetitions=1, progress=lambda line: None)
KNOWN: dict[str, Report] = {}


def report_of(name: str) -> Report:
    if name not in KNOWN:
        KNOWN[name] = ALL[name].run(ONCE)
    return KNOWN[name]


def failed(report: Report) -> set[str]:
    return {gate.what for gate in report.gates if not gate.holds}


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
    assert report.shape == asdict(shape) | {"runs": 1}
    envelope = rows(report, "prefill_tokens")["50 x 5 envelope"]
    assert envelope["a_over_c"] == pytest.approx(62.05, abs=0.005)
    assert envelope["b_over_c"] == pytest.approx(1.462, abs=0.0005)
    (times,) = (row for row in report.rows if "b_over_c" in row and "prefill_tokens" not in row)
    totals = {arm: row["total_ms"] for arm, row in rows(report, "arm").items()}
    assert times["b_over_c"] == pytest.approx(totals["B"] / totals["C"])


def test_a_cache_that_keeps_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefill, "keep", lambda *args, **options: None)
    assert failed(session.run_session(ONCE)) == {"prefill tokens, D"}


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
    points = rows(report, "batch")
    alone = rows(report, "baseline")["one session, step by step"]
    assert list(points) == [1, 2, 4, 8] and "decode_steps" in points[1]
    for size, point in points.items():
        assert point["agg_tok_per_sec"] == pytest.approx(1e3 * size / point["step_ms"])
        assert point["speedup_vs_b1"] == pytest.approx(point["agg_tok_per_sec"] / alone["tok_per_sec"])
    peak = max(points.values(), key=lambda point: float(point["agg_tok_per_sec"]))
    assert rows(report, "peak") == {peak["batch"]: {"peak": peak["batch"], "agg_tok_per_sec": peak["agg_tok_per_sec"]}}


def test_a_row_that_is_not_what_a_session_gives_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Batch.step

    def last_row_off(self: Batch, ids: Any) -> torch.Tensor:
        logits = step(self, ids)
        logits[-1, 0] = torch.nextafter(logits[-1, 0], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(Batch, "step", last_row_off)
    assert failed(batch.run_batch(ONCE)) == {"sampled rows whose last logits differ from a session's alone"}


# ---- switches


def test_a_switch_brings_in_every_byte_of_what_is_not_on_the_device() -> None:
    found = rows(report_of("switch"), "from")
    assert list(found) == ["device", "host", "disk", "cold"]
    nbytes = report_of("switch").shape["bytes"]
    assert [row["bytes"] for row in found.values()] == [0, nbytes, nbytes, nbytes]
    assert all(0 <= row["load_ms"] <= row["first_token_ms"] for row in found.values())


def test_a_model_that_was_not_sent_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch.Switcher, "send", lambda self, state: None)
    assert {"where the model was", "disk: bytes brought in"} <= failed(switch.run_switch(ONCE))


def test_page_ins_of_an_h200_are_bytes_over_the_speed_of_its_link() -> None:
    found = {(row["model"], row["weights"]): row for row in report_of("switch-h200").rows}
    assert found["8B", "bf16"]["host_ms"] - found["8B", "bf16"]["device_ms"] == pytest.approx(320)
    assert found["32B", "8 bit"]["host_ms"] - found["32B", "8 bit"]["device_ms"] == pytest.approx(640)
    assert found["8B", "bf16"]["disk_ms"] - found["8B", "bf16"]["device_ms"] == pytest.approx(16e9 / 6e9 * 1e3)
