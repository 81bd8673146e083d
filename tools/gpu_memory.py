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

TOOLS = ("memcheck", "racecheck")
FOUND = 86  # exit status of a checker that found something
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


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
            run.row(f"interpreter's check: {name}", "nothing found", "nothing found", True)
        return
    path = checker()
    for tool in TOOLS:
        if path is None:
            run.row(tool, "absent: compute-sanitizer is neither on PATH nor under CUDA_HOME")
            continue
        command = [path, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, str(Path(__file__))]
        share = run.left() if tool == TOOLS[-1] else run.left() / 2
        log, code = finished(command, share, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        run.found[tool] = log[-3000:]
        run.row(tool, *judged(log, code))


def judged(log: str, code: int | None) -> tuple[str, str, bool | None]:
    """Value, target and whether it holds, of a checker's output; what ran out of time or did not run holds nothing."""
    target, count = "nothing found", SUMMARY.search(log)
    if code is None:
        return "out of time", target, None
    if count is None:
        return f"did not run: {(log.strip().splitlines() or ['no output'])[-1][:120]}", target, None
    if int(count[1]) or code == FOUND:
        return f"{count[1]} found", target, False
    if code:
        return f"exit {code}: {(log.strip().splitlines() or [''])[-1][:120]}", target, False
    return "nothing found", target, True


if __name__ == "__main__":
    for case in CASES.values():
        case("cuda")
    torch.cuda.synchronize()
