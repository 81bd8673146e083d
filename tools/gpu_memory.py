"""Every kernel once on small tensors, for a memory checker.

    compute-sanitizer --tool memcheck python tools/gpu_memory.py

The section runs this under compute-sanitizer's memcheck and racecheck where there is one. A dry run has the
interpreter's own check instead: no lane outside the tensor that it addresses, no two programs that meet in memory.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_section import Run, finished
from harness import made_up_pages, made_up_rows, made_up_weight

from csrc_triton.fused import argmax, quantize_rows, rmsnorm, swiglu, top_k
from csrc_triton.pages import append_kv, commit_path, copy_pages
from csrc_triton.qmatmul import lm_head_argmax, matmul, swiglu_matmul
from csrc_triton.tree import token_tree, tree_attention

# options of each; torch asks for what a driver may not have, which is no error of a kernel
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
FOUND = 86  # exit status of a checker that found something
SUMMARY = re.compile(
    r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)(?: displayed \((\d+) errors?, (\d+) warnings?\))?"
)


def products(device: str) -> None:
    """Shapes that are no multiples of a tile, few rows and many."""
    small = device == "cpu"
    for kind in ("w8a8",) if small else ("q4", "q4_k", "q8-row", "w8a8", "dense"):
        w = made_up_weight(kind, 130, 512, device=device)
        for m in (3,) if small else (3, 66):
            matmul(made_up_rows(m, 512, device=device), w)
    x = made_up_rows(3, 512, device=device)
    swiglu_matmul(x, made_up_weight("q4-glu", 144, 512, device=device))
    lm_head_argmax(x, made_up_weight("q8", 130, 512, device=device))


def attention(device: str) -> None:
    """Decode, a prompt and a tree, over pages that are partly filled; pages copied and rows moved."""
    small = device == "cpu"
    for dtype in (torch.int8,) if small else (torch.bfloat16, torch.int8):
        pages = made_up_pages((66, 130 if small else 514), 1, 32, dtype=dtype, device=device, spare=2)
        of_q = torch.bfloat16
        for parts in ([(s, n - 1, n) for s, n in enumerate(pages.lengths)], [(0, 40, 66)]):
            count = sum(stop - start for _, start, stop in parts)
            pages.attend(made_up_rows(count, 64, of_q, device=device).view(count, 2, 32), parts)
        page, slot = pages.spare[:1].repeat(6).int(), torch.arange(6, dtype=torch.int32)
        k = made_up_rows(6, 32, of_q, device=device).view(6, 1, 32)
        append_kv(k, k, pages.arena, pages.layout, 0, page, slot, slot, pages.rope)
        q = made_up_rows(6, 64, of_q, device=device).view(6, 2, 32)
        trees = [token_tree([-1, 0, 0]), token_tree([-1, 0, 1])]
        tree_attention(q, pages.arena, pages.layout, 0, pages.table, trees, page, slot, pages.rope, scale=0.2)
        first, other = int(pages.spare[0]), int(pages.spare[1])
        copy_pages(pages.arena, pages.layout, first, other)
        commit_path(pages.arena, pages.layout, [(first, 3)], [(other, 63)])


def rows(device: str) -> None:
    x = made_up_rows(3, 584, device=device)
    rmsnorm(x, torch.ones(584, device=device), 1e-5)
    swiglu(x)
    quantize_rows(x)
    logits = x.float()
    argmax(logits)
    top_k(logits, 5)


TARGET = "no errors"
CASES: dict[str, Callable[[str], None]] = {"products": products, "attention": attention, "rows": rows}


def checker() -> str | None:
    """compute-sanitizer on PATH or under CUDA_HOME."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")


def memory(run: Run) -> None:
    """A row for each tool; without a checker it says so."""
    if run.dry:
        for name, case in CASES.items():
            with run.kernels(races=True):
                case("cpu")
            run.row(f"interpreter's check: {name}", TARGET, TARGET, True)
        return
    path = checker()
    for i, (tool, options) in enumerate(TOOLS.items()):
        if path is None:
            run.row(tool, "absent: compute-sanitizer is neither on PATH nor under CUDA_HOME", TARGET)
            continue
        command = [path, "--tool", tool, *options, "--error-exitcode", str(FOUND), sys.executable, str(Path(__file__))]
        share = run.left() / (len(TOOLS) - i)
        log, code = finished(command, share, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        run.found[tool] = log[-3000:]
        run.row(tool, *judged(log, code))


def judged(log: str, code: int | None) -> tuple[str, str, bool | None]:
    """Value, target and whether it holds, of a checker's output: no errors; warnings are told.

    What ran out of time or did not run holds nothing.
    """
    last, summary = (log.strip().splitlines() or ["no output"])[-1][:120], SUMMARY.search(log)
    if code is None:
        return "out of time", TARGET, None
    if summary is None:
        return f"did not run: {last}", TARGET, None
    errors, warnings = int(summary[2] or 0) if summary[3] else int(summary[1]), int(summary[3] or 0)
    told = f", {warnings} warnings" * bool(warnings)
    if errors:
        return f"{errors} errors{told}", TARGET, False
    if code and not (code == FOUND and warnings):
        return f"exit {code}: {last}", TARGET, False
    return f"no errors{told}", TARGET, True


if __name__ == "__main__":
    for case in CASES.values():
        case("cuda")
    torch.cuda.synchronize()
