"""The bench of speculation: its prompts, and what it makes of runs and events."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import write_tiny, write_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import bench_speculation as bench
from bench_speculation import COPYING, TARGET, TWIN

from polymodel import Engine
from polymodel.checkpoint import open_checkpoint
from polymodel.control import CostTable
from polymodel.events import Event, Kind
from polymodel.sim import H200
from polymodel.tokenizer import Tokenizer
from polymodel.workloads.speculation import ALL, summary


def metrics(num_output_tokens: int, num_target_forwards: int, seconds: float, **drafted: Any) -> Any:
    defaults = {"num_drafted": 0, "num_accepted": 0, "acceptance_histogram": (), "drafters": {}}
    return SimpleNamespace(
        num_output_tokens=num_output_tokens,
        num_target_forwards=num_target_forwards,
        decode_seconds=seconds,
        **{**defaults, **drafted},
    )


def profile(*positions: tuple[int, int]) -> list[dict[str, int]]:
    return [{"position": i, "proposed": p, "accepted": a} for i, (p, a) in enumerate(positions)]


# ---- prompts -----------------------------------------------------------------------------------------


def test_there_are_five_different_prompts_of_each_of_eight_kinds() -> None:
    texts = bench.texts()
    assert [len(some) for some in texts.values()] == [5] * 8 and set(COPYING) < set(texts)
    assert len({text for some in texts.values() for text in some}) == 40
    assert all(80 <= len(text.split()) <= 250 for kind in COPYING for text in texts[kind])


@pytest.mark.demo_model
def test_a_prompt_has_at_most_400_tokens(demo_model_path: Path) -> None:
    with open_checkpoint(demo_model_path) as checkpoint:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata, str(demo_model_path))
        lengths = [len(tokenizer.encode(text)) for some in bench.texts().values() for text in some]
    assert max(lengths) <= bench.MAX_PROMPT - 64  # the chat template's own


# ---- reports -----------------------------------------------------------------------------------------


def test_a_summary_adds_prompts_up() -> None:
    drafter = SimpleNamespace(num_rounds=4, acceptance_profile=profile((4, 3), (3, 2), (2, 1), (1, 1)))
    drafted = {"num_drafted": 16, "num_accepted": 7, "acceptance_histogram": (2, 1, 1, 0, 1)}
    runs = [metrics(13, 5, seconds, drafters={"ngram": drafter}, **drafted) for seconds in (3.0, 2.0)]
    plain = [metrics(13, 12, seconds) for seconds in (4.0, 6.0)]
    nothing = [metrics(7, 6, seconds, acceptance_histogram=(6,)) for seconds in (1.0, 2.0)]
    plain_again = [metrics(7, 6, seconds) for seconds in (2.0, 1.0)]
    row = summary("chat", "ngram", [(runs, plain), (nothing, plain_again)])
    acceptance = 7 / (4 + 3 + 2 + 1)
    closed_form = (1 - acceptance**5) / (1 - acceptance)
    expected = {
        "kind": "chat",
        "arm": "ngram",
        "prompts": 2,
        "tokens": 18,
        "forwards": 11,
        "forwards_a_token": 11 / 18,
        "forwards_saved": 18 / 11,
        "acceptance_rate": 7 / 16,
        "mean_acceptance_length": 18 / 11,
        "acceptance": acceptance,
        "e_measured": 1 + 7 / 4,
        "e_closed_form": pytest.approx(closed_form),
        "speedup": (4.0 + 1.0) / (2.0 + 1.0),
        "speedup_first": (4.0 + 2.0) / (3.0 + 1.0),
        "rounds_by_accepted": [8, 1, 1, 0, 1],
        "spread": pytest.approx(6.5 / 6.0 - 1),
    }
    assert {name: row[name] for name in expected} == expected


def test_a_summary_of_no_drafts_has_no_acceptance() -> None:
    row = summary("chat", "auto", [([metrics(7, 6, 1.0)], [metrics(7, 6, 1.0)])])
    assert [row[name] for name in ("acceptance_rate", "e_measured", "e_closed_form", "spread")] == [None] * 4


def test_gates_are_those_that_the_rows_can_show() -> None:
    def row(kind: str, arm: str, saved: float, wall: float) -> bench.Row:
        times = {"speedup": wall, "speedup_first": wall / 2, "spread": 0.5}
        return {"kind": kind, "arm": arm, "forwards_saved": saved, **times}

    rows = [row("chat", "ngram", 1.0, 1.0), row("summarising", "ngram", 1.25, 1.0), row(ALL, "ngram", 1.1, 1.0)]
    rows += [row("chat", "auto", 1.0, 2.0), row("summarising", "auto", 1.0, 0.5), row(ALL, "auto", 1.0, 0.1)]
    found = bench.gates(rows)
    assert [(gate["value"], gate["target"], gate["holds"]) for gate in found] == [
        (1.25, 1.2, True),
        (pytest.approx(1.0), 0.93, True),
        (pytest.approx(0.5), 0.93, False),
        (pytest.approx(0.75), 0.93, False),
    ]
    assert "summarising" in found[0]["what"] and "summarising, the worst kind" in found[3]["what"]


@pytest.mark.parametrize(("ratio", "status"), [(0.97, 1), (0.99, 0)])
def test_a_gate_that_fails_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratio: float, status: int
) -> None:
    row = {"what": "chat", "costs": "measured", "plain s": ratio, "auto s": 1.0, "x plain, by the table": ratio}
    monkeypatch.setattr(bench, "replay", lambda *_: [row])
    monkeypatch.setattr(sys, "argv", ["bench", "--recorded", "--json", str(tmp_path / "found.json")])
    try:
        bench.main()
        found = 0
    except SystemExit as error:
        found = error.code
    written = json.loads((tmp_path / "found.json").read_text())
    assert found == status and written["gates"][0]["holds"] == (not status)


def test_without_costs_of_this_machine_there_is_no_table_of_them(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no costs of this machine"):
        bench.tables(tmp_path / "costs.json")


def test_another_stream_or_a_forward_more_voids_the_numbers() -> None:
    def out(tokens: list[int], forwards: int) -> Any:
        return SimpleNamespace(tokens=tokens, metrics=SimpleNamespace(num_target_forwards=forwards))

    plain = out([5, 6, 7], 2)
    assert bench.checked("twin", same := out([5, 6, 7], 2), plain) is same
    with pytest.raises(SystemExit, match="VOID: twin differs from plain decoding at output token 1"):
        bench.checked("twin", out([5, 9, 7], 1), plain)
    with pytest.raises(SystemExit, match="VOID: twin differs from plain decoding at output token the end"):
        bench.checked("twin", out([5, 6], 1), plain)
    with pytest.raises(SystemExit, match="VOID: wrong made 3 target forwards, plain decoding 2"):
        bench.checked("wrong", out([5, 6, 7], 3), plain)


# ---- the clock ---------------------------------------------------------------------------------------


def test_the_clock_adds_every_forward_but_the_targets_prefills() -> None:
    costs = {TARGET: CostTable.of({1: 1.0, 5: 1.5}), TWIN: CostTable.of({1: 0.25, 64: 8.0})}

    def event(kind: Kind, model: str, tokens: int) -> Event:
        return Event(kind, model, 0.0, 1e6, tokens=tokens)

    events = [event("prefill", TARGET, 64), event("turn", TARGET, 0), event("prove", TARGET, 5)]
    assert bench.simulated_seconds(events, costs) == 0.0
    events += [event("decode", TARGET, 1), event("verify", TARGET, 5), event("draft", TWIN, 1)]
    assert bench.simulated_seconds(events, costs) == 1.0 + 1.5 + 0.25
    events += [event("shadow", TWIN, 64), event("prefill", TWIN, 64)]
    assert bench.simulated_seconds(events, costs) == 2.75 + 16.0


def test_a_simulated_forward_takes_as_long_as_its_bytes_or_its_operations() -> None:
    table = bench.roofline(H200, 16e9, 8e9)
    assert table.seconds(1) == table.seconds(96) == H200.decode_seconds(16e9, 0)
    assert table.seconds(256) == H200.prefill_seconds(8e9, 256) > 1.5 * table.seconds(1)


# ---- the whole of it ---------------------------------------------------------------------------------


def test_every_arm_runs_and_gives_the_plain_tokens(tmp_path: Path) -> None:
    folder = write_tokenizer(write_tiny(tmp_path, "llama"))
    with Engine(kv_budget="16MiB") as engine:
        engine.add(TARGET, folder, twin="q4")
        rows = bench.measure(engine, {"chat": [[5, 6, 7, 8] * 4, [9, 8, 7]]}, 8, 2)
    assert [(row["kind"], row["arm"]) for row in rows] == [
        (kind, arm) for arm in ("ngram", "auto", "twin", "wrong") for kind in ("chat", ALL)
    ]
    by_arm = {row["arm"]: row for row in rows if row["kind"] == ALL}
    assert [by_arm[arm]["prompts"] for arm in by_arm] == [2, 2, 2, 1]
    assert by_arm["twin"]["accepted"] > 0 and by_arm["twin"]["forwards_saved"] > 1.0
    assert by_arm["wrong"]["drafted"] > 0 == by_arm["wrong"]["accepted"]
    assert by_arm["wrong"]["forwards_saved"] == 1.0
    assert len(by_arm["ngram"]["seconds"]) == 2 and {len(some) for some in by_arm["ngram"]["seconds"]} == {2}
