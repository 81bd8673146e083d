"""Simulated workloads: every gate of their reports, what is drawn, and that a wrong number is noticed."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from polymodel.sim import Arrival, Served, run
from polymodel.workloads import simulated
from polymodel.workloads.report import Report, Setting
from polymodel.workloads.simulated import CODE, CONVERSATION, WORKLOADS, Traffic

QUIET = Setting(progress=lambda line: None)
RUNS = {workload.name: workload.run for workload in WORKLOADS}


def passed(report: Report) -> Report:
    assert report.passed and report.source == "simulated", [str(gate) for gate in report.gates if not gate.holds]
    return report


def test_misses_of_24_models_under_zipf_are_within_a_tenth_of_a_point_of_what_is_known() -> None:
    report = passed(RUNS["popularity"](QUIET))
    rows = {(row["requests"], row["policy"]): row for row in report.rows}
    assert rows["alone", "lru"]["misses_percent"] == pytest.approx(29.0, abs=0.1)
    assert rows["alone", "lru"]["stall_ms_a_request"] == pytest.approx(44, abs=0.5)
    assert rows["in bursts", "lru"]["misses_percent"] == pytest.approx(1.4, abs=0.1)
    assert len(report.gates) == 6


def test_hot_and_cold_models_as_known() -> None:
    report = passed(RUNS["residency"](QUIET))
    assert [(row["policy"], row["hits"], row["evictions"]) for row in report.rows[:2]] == [
        ("lru", 29, 24),
        ("lru+backout", 30, 20),
    ]
    assert (report.shape["budget_kb"], report.rows[0]["hit_rate"], report.rows[0]["final_warm"]) == (2325, 0.58, 2)


def test_a_swap_queue_batched_by_model_waits_a_fiftieth_of_fifo() -> None:
    report = passed(RUNS["swap-queue"](QUIET))
    fcfs, by_model = report.rows
    assert fcfs["mean_s"] > 50 * by_model["mean_s"] and by_model["mean_s"] <= 15.5
    assert fcfs["p99_s"] > fcfs["mean_s"] and by_model["page_ins_a_request"] < 0.36


def test_bytes_follow_the_weights_beside_a_flood_of_prompts() -> None:
    report = passed(RUNS["mixed-lane"](QUIET))
    rows = {(row["lane"], row["flooded"]): row for row in report.rows}
    assert rows["byte-drr", True]["share_error_percent"] <= 5 < rows["round-robin", True]["share_error_percent"]
    assert rows["byte-drr", True]["chat_tpot_p99_ms"] > rows["byte-drr", False]["chat_tpot_p99_ms"]


def test_a_lane_that_falls_behind_does_not_spend_its_time_on_paging() -> None:
    report = passed(RUNS["arrivals"](QUIET))
    page_ins = {(row["trace"], row["lane"]): row["page_ins"] for row in report.rows}
    assert page_ins["code", "byte-drr"] < 30 < page_ins["code", "round-robin"]
    in_time = [row["slo_attained_percent"] for row in report.rows]
    assert 0 <= min(in_time) < max(in_time) <= 100
    assert len(report.rows) == 10 and "ttft up to 2.0 s" in report.shape["slo"]


def test_a_request_is_in_time_by_its_first_token_and_by_the_pace_of_the_others() -> None:
    def is_in_time(first: float, last: float) -> bool:
        one = Served(Arrival(10.0, "a", 5, 11), 0, 10.0)
        one.first, one.last = 10 + first, 10 + last
        return simulated.is_in_time(one)

    assert is_in_time(2.0, 2.9) and not is_in_time(2.1, 2.9) and not is_in_time(2.0, 3.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_gate_holds_at_full_size(name: str) -> None:
    assert passed(RUNS[name](replace(QUIET, size="full"))).rows


def test_a_number_that_is_off_fails_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "KNOWN_STREAM", {"lru": (29, 23)})
    report = RUNS["residency"](QUIET)
    assert not report.passed and [gate.what for gate in report.gates if not gate.holds] == ["lru: hits, evictions"]
    near = Report("w", "simulated", {})
    simulated._near(near, "a rate", 3.05, 3.0)
    simulated._near(near, "a rate", 3.15, 3.0)
    assert [gate.holds for gate in near.gates] == [True, False]


# ---- what is drawn -----------------------------------------------------------------------------------


@pytest.mark.parametrize("traffic", [CODE, CONVERSATION])
def test_lengths_have_the_means_and_medians_of_the_traces(traffic: Traffic) -> None:
    requests = simulated.arrivals(traffic, ("a", "b"), 20_000, seed=0)
    for lengths, (mean, median) in (
        ([one.prompt_tokens for one in requests], traffic.prompt),
        ([one.output_tokens for one in requests], traffic.output),
    ):
        assert np.mean(lengths) == pytest.approx(mean, rel=0.03) and np.median(lengths) == pytest.approx(
            median, rel=0.03
        )
    assert sum(one.model == "a" for one in requests) / 20_000 == pytest.approx(2 / 3, abs=0.01)


def test_gaps_have_the_mean_and_the_spread_of_the_traces() -> None:
    for traffic, slower in ((CONVERSATION, 1.0), (replace(CODE, gap_cv=3.0), 2.0)):
        requests = simulated.arrivals(traffic, ("a",), 20_000, seed=1, slower=slower)
        gaps = np.diff([one.seconds for one in requests])
        assert gaps.mean() == pytest.approx(slower * traffic.gap_mean, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(traffic.gap_cv, rel=0.05)
    assert requests == simulated.arrivals(traffic, ("a",), 20_000, seed=1, slower=slower)


def test_the_lane_that_stays_with_a_model_swaps_least() -> None:
    requests = simulated.arrivals(CONVERSATION, ("8B-0", "4B-0"), 300, seed=0)
    swaps = {
        policy: run(requests, simulated.FLEET, budget=20 * simulated.GB, lane_policy=policy, max_wait=inf).swaps
        for policy in ("fcfs", "batch-by-model", "byte-drr")
    }
    assert swaps["batch-by-model"] < swaps["fcfs"] / 2
