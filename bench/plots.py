"""Pictures of recorded results, for the README.

    pip install '.[bench,notebooks]' && python bench/plots.py [bench/results/cpu-epyc-avx2]

Reads workloads.json, compare_cpu.json and speculation.json of the folder and writes batch.png, agents.png and
drafting.png beside them. Nothing is measured here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools" / "notebooks"))

from harness import ROOT
from pictures import Picture, bars, lines, stacked

FOLDER = ROOT / "bench" / "results" / "cpu-epyc-avx2"
BATCH_SIDES = ("llama.cpp Q8_0", "w8a8", "q8", "file")


def batch_curve(compared: dict[str, Any]) -> Picture:
    """Tokens a second of so many requests at once, of each side."""
    curves: dict[str, dict[float, float]] = {}
    for row in compared["rows"]:
        if row["kind"] == "batch" and row["side"] in BATCH_SIDES:
            curves.setdefault(row["side"], {})[row["batch"]] = row["tokens_per_second"]
    return lines("Tokens a second of requests at once, prefills included", curves, "requests", "tokens/s")


def agents(report: dict[str, Any]) -> Picture:
    """Where the time of a session of agents goes, by arm; A is modelled from one agent's prefill."""
    arms = [row for row in report["rows"] if "arm" in row]
    shown = []
    for row in arms:
        parts = {"prefill": row["prefill_ms"], "decode": row["decode_ms"]}
        if None in parts.values():
            parts = {"prefill and decode": row["total_ms"]}
        name = row["arm"] if row["live"] else f"{row['arm']} (modelled)"
        shown.append((name, {part: ms / 1e3 for part, ms in parts.items()}))
    shape = report["shape"]
    title = f"{shape['agents']} agents, {shape['turns']} turns, on a prompt of {shape['prefix']} tokens"
    return stacked(title, shown, "seconds")


def drafting(record: dict[str, Any]) -> Picture:
    """Target forwards saved, and time, beside plain decoding."""
    rows = [row for row in record["rows"] if row["arm"] == "auto" and row["kind"] != "all kinds"]
    columns = {"forwards saved": "forwards_saved", "times as fast": "speedup"}
    series = {name: {row["kind"]: row[column] for row in rows} for name, column in columns.items()}
    return bars('draft="auto" beside plain decoding', series, "", "times")


def draw(folder: Path) -> None:
    """Write the pictures of a folder's records."""
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("compare_cpu", "speculation")}
    reports = json.loads((folder / "workloads.json").read_text())["reports"]
    session = next(report for report in reports if report["workload"] == "session")
    pictures = {
        "batch": batch_curve(found["compare_cpu"]),
        "agents": agents(session),
        "drafting": drafting(found["speculation"]),
    }
    for name, picture in pictures.items():
        (folder / f"{name}.png").write_bytes(picture._repr_png_())


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
