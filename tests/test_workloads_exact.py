"""The exactness matrix and the adversary: what they cover, that they pass here, and that they notice what is broken."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
import torch

from csrc_triton.pages import KVLayout
from polymodel.engine import Request
from polymodel.kv import Arena
from polymodel.workloads import adversary, exact
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


def garble_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that drafted."""
    emit = Request.emit

    def garbled(self: Request, ids: list[int]) -> None:
        emit(self, [*ids[:-1], (ids[-1] + (self.num_drafted > 0 and len(ids) == self.num_left)) % 256])

    monkeypatch.setattr(Request, "emit", garbled)


# ---- the matrix --------------------------------------------------------------------------------------


def test_the_small_matrix_has_every_two_values_of_two_axes_together() -> None:
    found = list(exact.covering(SMALL))
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
    rows = {row["decode"]: row for row in report.rows}
    assert set(rows) == set(DECODES)
    for case in QUICK:
        row = rows[case.decode]
        assert row["tokens"] == 20 * case.rows and row["logits_bytes"] and row["kv_bytes"]
        assert bool(row["cached"]) == (case.prefix != "miss")
        assert bool(row["drafted"]) == (case.decode != "plain") and row["accepted"] <= row["drafted"]


def test_drafts_that_change_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    garble_the_last_token(monkeypatch)
    report = exact.run(QUIET, [Case("chain 5", 2, "hit", None, 0.0)])
    assert [what.split(",")[0] for what in failing(report)] == ["tokens that differ"]


def test_pages_that_are_not_copied_before_they_are_written_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def halfway(self: Arena, layout: KVLayout, src: int, dst: int) -> None:
        self.write_pages(layout, [dst], self.read_pages(layout, [src]).roll(1, 0))

    monkeypatch.setattr(Arena, "copy_page", halfway)
    report = exact.run(QUIET, [Case("plain", 2, "clone", None, 0.0)])
    assert any(what.startswith("kv bytes that differ") for what in failing(report))


def test_a_matrix_that_drafts_nothing_wrong_or_decodes_nothing_together_is_void(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact.Scripted, "propose", lambda self, tokens, count: self.known[len(tokens) :][:count])
    report = exact.run(QUIET, [Case("chain 5", 1, "hit", None, 0.0)])
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
