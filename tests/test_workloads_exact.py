"""The exactness matrix, the adversary and speculation: what they cover, that they pass, and what they notice."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from csrc_triton.pages import KVLayout
from polymodel.engine import Engine, Request
from polymodel.kv import Arena
from polymodel.output import Output
from polymodel.prefill import Prefill
from polymodel.selfcheck import write_random_model
from polymodel.session import Session
from polymodel.workloads import adversary, exact, speculation
from polymodel.workloads.adversary import Adversary
from polymodel.workloads.exact import FULL, PREFIXES, SMALL, Case, differing
from polymodel.workloads.report import Report, Setting

# forwards of a model this small only wait for a second thread
pytestmark = pytest.mark.parametrize("threads", [1], indirect=True)

QUIET = Setting(repetitions=1, progress=lambda line: None)
DECODES = ("plain", "chain 1", "chain 5", "tree", "twin chain", "twin tree", "chain 16")
QUICK = [
    Case(decode, rows, prefix, chunk, temperature)
    for decode, prefix, rows, chunk, temperature in zip(
        DECODES, PREFIXES, (3, 1, 2, 3, 2, 3, 2), (7, 1, 64, None, 7, 64, None), (0.0, 1.0) * 4, strict=False
    )
]


def failing(report: Report) -> list[str]:
    return [gate.what for gate in report.gates if not gate.holds]


def short_run(monkeypatch: pytest.MonkeyPatch, setting: Setting, *cases: Case) -> Report:
    """Beside fewer references."""
    monkeypatch.setattr(exact, "LENGTHS", (24, 50, 66))
    monkeypatch.setattr(exact, "TEMPERATURES", tuple({0.0, *(case.temperature for case in cases)}))
    return exact.run(setting, cases or None)


def garble_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that drafted."""
    emit = Request.emit

    def garbled(self: Request, ids: list[int]) -> None:
        emit(self, [*ids[:-1], (ids[-1] + (self.num_drafted > 0 and len(ids) == self.num_left)) % 256])

    monkeypatch.setattr(Request, "emit", garbled)


# ---- the matrix --------------------------------------------------------------------------------------


def test_the_small_matrix_has_every_two_values_of_two_axes_together() -> None:
    found = exact.pairwise(SMALL)
    for a, b in combinations(SMALL, 2):
        assert {(choice[a], choice[b]) for choice in found} == set(product(SMALL[a], SMALL[b]))
    assert len(found) < 60 and exact.cases("small") == exact.cases("small")
    assert max(case.rows for case in exact.cases("small")) == 64


def test_the_full_matrix_compares_a_hundred_thousand_tokens_and_every_decode_after_every_prefix() -> None:
    cases = exact.cases("full")
    assert sum(case.rows for case in cases) * exact.NEW_TOKENS >= 100_000
    assert {(case.decode, case.prefix) for case in cases} == set(product(FULL["decode"], FULL["prefix"]))
    assert {f"chain {k}" for k in range(1, 17)} < {case.decode for case in cases}


def test_bytes_that_differ_are_counted_whatever_they_mean() -> None:
    ours = torch.tensor([0.0, 1.0, float("nan")])
    assert differing(ours, ours.clone()) == 0
    assert differing(ours, torch.tensor([-0.0, 1.0, float("nan")])) == 1
    assert differing(ours, ours[:2]) == 12


@pytest.mark.slow
def test_the_small_matrix_passes() -> None:
    report = exact.run(QUIET)
    assert report.passed, failing(report)


def test_each_prefix_and_each_way_to_decode_gives_the_bits_of_one_request_alone() -> None:
    report = exact.run(QUIET, QUICK)
    assert report.passed, failing(report)
    rows = {row["decode"]: row for row in report.rows if "decode" in row}
    taken = {row["prefix"]: row for row in report.rows if "prefix" in row}
    assert (set(rows), set(taken)) == (set(DECODES), set(PREFIXES))
    assert all(bool(row["cached"]) == (prefix != "miss") for prefix, row in taken.items())
    assert (taken["page out"]["page_ins"], taken["swap"]["swapped_rows"]) == (1, 2)
    assert sum(row["argmax_requests"] for row in rows.values()) == 5  # of 9 greedy ones
    for case in QUICK:
        row = rows[case.decode]
        assert row["tokens"] == 20 * case.rows and row["logits_bytes"] and row["kv_bytes"]
        assert bool(row["drafted"]) == (case.decode != "plain") and row["accepted"] <= row["drafted"]


def test_drafts_that_change_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    garble_the_last_token(monkeypatch)
    report = short_run(monkeypatch, QUIET, Case("chain 5", 2, "hit", None, 0.0))
    assert [what.split(",")[0] for what in failing(report)] == ["tokens that differ"]


def test_tokens_of_requests_without_a_logits_processor_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = Request.emit

    def garbled(self: Request, ids: list[int]) -> None:
        emit(self, [(token + self.is_argmax) % 256 for token in ids])

    monkeypatch.setattr(Request, "emit", garbled)
    report = short_run(monkeypatch, QUIET, Case("plain", 2, "miss", None, 0.0))
    assert any(what.startswith("tokens that differ, of 40") for what in failing(report))


@pytest.mark.parametrize(
    ("target", "name", "prefix", "noticed"),
    [
        (Prefill, "retire", "miss", "tokens whose pages are a request's own"),
        (Session, "swap_out", "swap", "swap: page-ins, rows swapped out"),
        (Engine, "unload", "page out", "page out: page-ins, rows swapped out"),
        (exact.Comparing, "__call__", "miss", "rows of logits compared"),
    ],
    ids=["cache", "swap", "page", "compare"],
)
def test_what_did_not_happen_is_not_taken_for_equal(
    monkeypatch: pytest.MonkeyPatch, target: type, name: str, prefix: str, noticed: str
) -> None:
    """A cache that keeps nothing, a swap and a page-out that move nothing, a look at logits that compares nothing."""
    idle = (lambda self, tokens, logits: logits) if name == "__call__" else (lambda self, *_: 0)
    monkeypatch.setattr(target, name, idle)
    report = short_run(monkeypatch, QUIET, Case("plain", 1, prefix, None, 1.0))
    assert failing(report) == [noticed]


def test_outputs_of_different_lengths_differ_where_only_one_goes_on() -> None:
    assert exact.differing_tokens([1, 2, 3], [1, 2, 3]) == 0
    assert exact.differing_tokens([1, 5], [1, 2, 3]) == exact.differing_tokens([1, 2, 3], [1, 5]) == 2


def test_a_full_matrix_of_a_given_model_ends_in_time_and_says_what_it_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_random_model(tmp_path)
    found = [Case("plain", rows, "miss", None, 0.0) for rows in (1, 2, 3)]
    monkeypatch.setattr(exact, "cases", lambda size: found[:1] if size == "small" else found)
    monkeypatch.setattr(exact, "MAX_SECONDS", 0.0)
    report = short_run(monkeypatch, replace(QUIET, size="full", model=tmp_path))
    assert report.passed, failing(report)
    assert (report.shape["cases"], report.shape["of"]) == (1, 3)


def test_pages_that_are_not_copied_before_they_are_written_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def halfway(self: Arena, layout: KVLayout, src: int, dst: int) -> None:
        self.write_pages(layout, [dst], self.read_pages(layout, [src]).roll(1, 0))

    monkeypatch.setattr(Arena, "copy_page", halfway)
    report = short_run(monkeypatch, QUIET, Case("plain", 2, "clone", None, 0.0))
    assert any(what.startswith("kv bytes that differ") for what in failing(report))


def test_a_matrix_that_drafts_nothing_wrong_or_decodes_nothing_together_is_void(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact.Scripted, "propose", lambda self, tokens, count: self.known[len(tokens) :][:count])
    report = short_run(monkeypatch, QUIET, Case("chain 5", 1, "hit", None, 0.0))
    assert failing(report) == ["drafted tokens accepted"]


# ---- the adversary -----------------------------------------------------------------------------------


def test_rounds_follow_from_where_the_drafter_is_wrong() -> None:
    assert Adversary(4, 0, on=False).rounds(6) == [(4, 0), (3, 0), (2, 0), (1, 0), (0, 0)]
    assert Adversary(4, 3, on=True).rounds(9) == [(4, 3), (3, 3)]
    assert Adversary(4, 4, on=False).rounds(10) == [(4, 4), (3, 3)]
    for one in adversary.adversaries((1, 4, 16)):
        assert sum(accepted + 1 for _, accepted in one.rounds(96)) == 95
    assert len(list(adversary.adversaries((4,)))) == 8


def test_wrong_at_a_place_is_wrong_there_alone_and_wrong_from_it_is_so_to_the_end() -> None:
    one = exact.Reference([1, 2], [3, 4, 5, 6], [], torch.empty(0), torch.empty(0))

    def proposed(on: bool) -> Any:
        drafter: Any = Adversary(3, 1, on).draft(one, 10).by
        return drafter.propose([1, 2, 3], 3)

    assert (proposed(False), proposed(True)) == ([4, 6, 6], [4, 6, 7])


def test_an_adversary_changes_no_bit_and_costs_no_forward() -> None:
    report = adversary.run(QUIET)
    assert report.passed and report.source == "measured", failing(report)
    rows = {row["adversary"]: row for row in report.rows}
    always = rows["wrong from 0 of 4"]
    assert (always["forwards"], always["plain_forwards"], always["accepted"]) == (23, 23, 0)
    assert always["rounds_rolled_back"] == 22  # in the last round no token is left to draft
    assert rows["wrong at 4 of 4"]["rounds_rolled_back"] == 0 and rows["wrong at 4 of 4"]["forwards"] == 5
    assert all(row["times_plain"] > 0 for row in report.rows)


def test_an_adversary_that_gets_a_token_through_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adversary, "SMALL", (8, (1,)))
    garble_the_last_token(monkeypatch)
    report = adversary.run(QUIET)
    assert any("tokens, and bytes of keys and values" in what for what in failing(report))


# ---- speculation -------------------------------------------------------------------------------------


def short_speculation(monkeypatch: pytest.MonkeyPatch, repetitions: int = 1) -> Report:
    monkeypatch.setattr(speculation, "PROMPTS", {"copying": "one two, one two, one two,", "chat": "Why?"})
    monkeypatch.setattr(speculation, "NEW_TOKENS", {"small": 12})
    return speculation.run(replace(QUIET, repetitions=repetitions))


def test_every_arm_gives_the_plain_tokens_and_says_what_it_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    report = short_speculation(monkeypatch, 2)
    assert report.passed and report.source == "measured", failing(report)
    rows = {(row["arm"], row["kind"]): row for row in report.rows}
    assert set(rows) == set(product(("ngram", "auto", "twin"), ("copying", "chat", "all kinds")))
    twin = rows["twin", "all kinds"]
    assert twin["tokens"] == 22 == twin["forwards"] + twin["accepted"] and twin["forwards_saved"] > 1
    assert sum(i * rounds for i, rounds in enumerate(twin["rounds_by_accepted"])) == twin["accepted"]
    assert all(row["speedup"] > 0 and row["spread"] >= 0 for row in report.rows)


def test_an_arm_that_says_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    garble_the_last_token(monkeypatch)
    assert "twin: tokens that differ from plain decoding's" in failing(short_speculation(monkeypatch))


def test_a_round_that_is_not_counted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.output

    def uncounted(self: Engine, request: Request) -> Output:
        out = real(self, request)
        return replace(out, metrics=replace(out.metrics, num_target_forwards=out.metrics.num_target_forwards - 1))

    monkeypatch.setattr(Engine, "output", uncounted)
    assert [what.split(":")[0] for what in failing(short_speculation(monkeypatch))] == [
        "plain",
        "ngram",
        "auto",
        "twin",
    ]


# ---- the benches -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.demo_model
def test_rows_of_the_benches_run_and_are_recorded(demo_model_path: Path, tmp_path: Path) -> None:
    rows = ("exact.py::test_case[plain-1-miss]", "simulated.py::test_workload[residency]")
    rows += ("speculation.py::test_arm[auto]", "speculation.py::test_adversary[wrong at 0 of 4]")
    command = [sys.executable, "-m", "pytest", "-q", "--record", "--results", str(tmp_path)]
    root = Path(__file__).resolve().parents[1]
    told = subprocess.run(
        [*command, *(f"bench/bench_{row}" for row in rows)], cwd=root, capture_output=True, text=True, timeout=600
    )
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-1000:]
    recorded = {path.stem: json.loads(path.read_text())["rows"] for path in tmp_path.rglob("*.json")}
    info = {row["name"]: row["extra_info"] for rows in recorded.values() for row in rows}
    assert info["test_case[plain-1-miss]"]["tokens"] == 20
    assert info["test_workload[residency]"]["rows"]["lru"]["evictions"] == 24
    assert "speedup" in info["test_arm[auto]"] and "forwards" not in info["test_arm[auto]"]
    assert info["test_adversary[wrong at 0 of 4]"]["forwards"] == 23
