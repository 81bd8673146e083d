"""Pictures of a results.json: decode attention, matmul beside cuBLAS and the floor, tokens a second by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Results = Mapping[str, Any]


def _found(results: Results, section: str) -> Mapping[str, Any]:
    return results["sections"].get(section, {}).get("found", {})


def _source(results: Results) -> str:
    machine = _found(results, "machine")
    versions = machine.get("versions", {})
    gpu = "dry run: static model, and a random model on a CPU" if results["dry"] else machine.get("gpu")
    return f"{gpu}, torch {versions.get('torch')}, {machine.get('date')}"


def attention(results: Results, axes: Any) -> bool:
    """Bars of the decode cases, and the copy that they are held to."""
    found = _found(results, "attention")
    rows = [row for row in found.get("rows", ()) if row["what"].startswith("decode") and "GB/s" in row]
    if not rows:
        return False
    axes.barh([row["what"] for row in rows][::-1], [row["GB/s"] for row in rows][::-1], color="C0")
    if "copy GB/s" in found:
        axes.axvline(found["copy GB/s"], color="C3", label="copy within the GPU")
        axes.legend()
    axes.set(title="decode attention", xlabel="GB/s of keys and values")
    return True


def matmul(results: Results, axes: Any) -> bool:
    """q4 by shape at one row: ours, cuBLAS on bfloat16, and the bytes at the speed of the copy."""
    found = _found(results, "matmul")
    rows = [row for row in found.get("rows", ()) if row["M"] == 1 and row["weights"] == "q4"]
    if not rows:
        return False
    series = [("ours", [row["us"] for row in rows])]
    if all("cuBLAS us" in row for row in rows):
        series.append(("cuBLAS, bfloat16", [row["cuBLAS us"] for row in rows]))
    if "copy GB/s" in found:
        series.append(("floor: bytes at the copy's speed", [row["bytes"] / found["copy GB/s"] / 1e3 for row in rows]))
    width = 0.8 / len(series)
    for i, (name, times) in enumerate(series):
        axes.bar([x + (i - (len(series) - 1) / 2) * width for x in range(len(rows))], times, width, label=name)
    axes.set_xticks(range(len(rows)), [row["shape"] for row in rows])
    axes.set(title="q4 matrix times one row", ylabel="microseconds")
    axes.legend()
    return True


def batch(results: Results, axes: Any) -> bool:
    """Tokens a second of all sequences together, beside a session that decodes alone."""
    rows = _found(results, "workloads").get("batch", {}).get("rows", ())
    points = [row for row in rows if "batch" in row and "peak" not in row]
    if not points:
        return False
    alone = next(row["baseline_b1_tok_per_sec"] for row in rows if "baseline_b1_tok_per_sec" in row)
    axes.plot([row["batch"] for row in points], [row["agg_tok_per_sec"] for row in points], marker="o", label="a batch")
    axes.axhline(alone, color="C3", label="one session, step by step")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(title="decode of the cut model", xlabel="sequences", ylabel="tokens/s")
    axes.legend()
    return True


PLOTS: Mapping[str, Callable[[Results, Any], bool]] = {"attention": attention, "matmul": matmul, "batch": batch}


def draw(results: Results, folder: Path) -> list[str]:
    """Names of the files written; what the results lack is not drawn. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    written = []
    for name, plot in PLOTS.items():
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        if plot(results, axes):
            figure.supxlabel(_source(results), x=1.0, ha="right", fontsize=7, color="grey")
            figure.savefig(folder / f"{name}.png", dpi=120)
            written.append(f"{name}.png")
    return written
