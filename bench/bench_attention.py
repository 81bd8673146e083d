"""Paged attention, tree verification and page moves beside torch's attention, on a GPU and on a CPU.

    python bench/bench_attention.py [--case "decode 32x4096"] [--minutes 6] [--json FILE] [--static]
    pytest bench/bench_attention.py [--benchmark-json FILE]                           (needs '.[bench]')

Without a GPU the first prints what the static model expects, the second measures the CPU path at the demo model's
heads: the least of rounds that take turns with torch's own, over layers of pages that exceed the last cache. On a GPU
times are medians of CUDA-graph replays, in microseconds, over layers of pages that together take 500 MB, so that keys
and values come from memory as a model's do. Plans are made once, as once a forward.
    bytes  = attention_bytes: every token once, however many rows see it, q and out
    flops  = attention_flops
    GB/s   = bytes / time, and as a share of the measured copy          TFLOP/s = flops / time
    floor  = bytes at the copy's rate or flops at cuBLAS', whichever takes longer; x floor = time / floor
    x base = time / time of the case named as base
    tax    = time of our plan / time of the best plan for that case, less 1: plans change no bit, so that this is what
             choosing well would gain; that chunks are 512 tokens for every case is not in it
Every case is checked against float64 before it is timed. Peers run beside ours where they can be imported, on as many
tokens and in bfloat16: torch's attention and flex_attention over contiguous keys and values, vLLM's Triton kernel over
pages. A peer that fails says why once. Targets are those of an H200.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tools"))

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import typer
from harness import (
    Call,
    Pages,
    console,
    copy_gbs,
    cpu_beside_torch,
    cublas_tflops,
    environment,
    floor_columns,
    graph_us,
    has_gpu,
    installed,
    last_cache_bytes,
    made_up_pages,
    num_layers,
    printed_after,
    recorded,
    rows_at,
    rows_table,
    show,
    write_json,
)
from torch import Tensor

from csrc_triton import attention
from csrc_triton import tree as trees
from csrc_triton.attention import (
    PageTable,
    attention_bytes,
    attention_flops,
    paged_attention_ref,
    visible_pairs,
)
from csrc_triton.attention_plan import PAGE, make_plan
from csrc_triton.cpu import MIN_DISTANCE
from csrc_triton.cpu_attention import Workspace
from csrc_triton.fused import RopeTable
from csrc_triton.launch import runs_kernel
from csrc_triton.pages import (
    KVLayout,
    append_kv,
    append_kv_bytes,
    append_kv_ref,
    commit_path,
    commit_path_bytes,
    copy_pages,
    copy_pages_bytes,
    model_order,
)
from csrc_triton.tree import Tree, token_tree, tree_attention, tree_attention_ref, tree_pairs

STATIC_ARCH = 90
MODEL = "static model, not measured"
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float32: 1e-5}  # of queries and results, by root mean square
TAX_PLANS = (0, 2, 4, 8, 16, 32, 10**9)  # chunks up to which a tile is one item
TAX_TARGET = 0.05
# eight roots, and two children of each node before the last ones: 64 nodes, 5 levels
TREE = [-1] * 8 + [(i - 8) // 2 for i in range(8, 64)]


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences, and rows at the end of each."""

    name: str
    lengths: tuple[int, ...]  # tokens of each sequence, its rows included
    rows: int = 1  # of a sequence
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16  # of the pages
    shared: int = 0  # tokens that all sequences begin with, in the same pages
    cascade: bool = True
    parent: tuple[int, ...] = ()  # the rows are nodes of such a tree behind each sequence's other tokens
    base: str | None = None  # the case that this one is compared with
    tax: bool = False  # try other plans
    peers: tuple[str, ...] = ()  # that have the case too

    @property
    def num_rows(self) -> int:
        return self.rows * len(self.lengths)

    @property
    def tokens(self) -> int:
        """Different ones."""
        return self.shared + sum(length - self.shared for length in self.lengths)

    @property
    def pairs(self) -> int:
        if self.parent:
            return sum(tree_pairs(length - self.rows, token_tree(self.parent)) for length in self.lengths)
        return sum(visible_pairs(length, self.rows) for length in self.lengths)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of queries and results."""
        return torch.float32 if self.dtype == torch.float32 else torch.bfloat16

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        return [(s, length - self.rows, length) for s, length in enumerate(self.lengths)]


# lengths from 256 to 16,384, as those of a server's users
RAGGED = tuple(int(256 * 64 ** (i / 31)) for i in range(32))
LLAMA = "decode 32x4096"
QUICK = ("torch", "vLLM")  # to start
ALL = (*QUICK, "flex")
CASES = (
    Case(LLAMA, (4096,) * 32, tax=True, peers=ALL),
    Case("prefill 16384", (16384,), rows=16384, peers=ALL),
    Case("chain of 4", (4096,) * 32, rows=4, base=LLAMA),
    Case("chain of 8", (4096,) * 32, rows=8, base=LLAMA, peers=QUICK),
    Case("chain of 64", (8234,) * 8, rows=64),
    Case("tree of 64", (8234,) * 8, rows=64, parent=tuple(TREE), base="chain of 64"),
    Case("decode 32x4096 int8", (4096,) * 32, dtype=torch.int8, base=LLAMA),
    Case("no cascade", (32768 + 256,) * 128, kv_heads=4, shared=32768, cascade=False),
    Case("cascade", (32768 + 256,) * 128, kv_heads=4, shared=32768, base="no cascade"),
    Case("decode 1x4096", (4096,), kv_heads=4, tax=True, peers=QUICK),
    Case("decode 1x65536", (65536,), kv_heads=4, tax=True, peers=QUICK),
    Case("decode 1x65536 int8", (65536,), kv_heads=4, dtype=torch.int8, base="decode 1x65536"),
    Case("decode 64x8192", (8192,) * 64, tax=True, peers=QUICK),
    Case("decode 32 ragged", RAGGED, tax=True),
    Case("prefill 2048", (2048,), rows=2048, peers=QUICK),
    Case("chain of 5", (4096,) * 32, rows=5, base=LLAMA),
    Case("chain of 6", (4096,) * 32, rows=6, base=LLAMA),
    Case("chain of 7", (4096,) * 32, rows=7, base=LLAMA),
)


@dataclass(frozen=True, slots=True)
class Target:
    """What an H200 should reach."""

    us: float | None = None  # at most
    gbs: float | None = None  # at least
    tflops: float | None = None  # at least
    times_base: float | None = None  # at most

    def __str__(self) -> str:
        parts = (("<= {:g} us", self.us), (">= {:g} GB/s", self.gbs), (">= {:g} TFLOP/s", self.tflops))
        found = [text.format(value) for text, value in parts if value is not None]
        return ", ".join(found + ([f"<= {self.times_base:.3g}x"] if self.times_base is not None else []))

    def holds(self, row: Mapping[str, Any]) -> bool | None:
        """None where the row lacks what is asked for."""
        asked = ((self.us, row.get("us"), 1), (self.gbs, row.get("GB/s"), -1), (self.tflops, row.get("TFLOP/s"), -1))
        pairs = [
            (limit, value, sign) for limit, value, sign in (*asked, (self.times_base, row.get("x base"), 1)) if limit
        ]
        if any(value is None for _, value, _ in pairs):
            return None
        return all(sign * value <= sign * limit for limit, value, sign in pairs)


TARGETS: Mapping[str, Target] = {
    LLAMA: Target(us=149, gbs=3600),
    "decode 64x8192": Target(gbs=3800),
    "decode 1x4096": Target(us=13),
    "decode 1x65536 int8": Target(us=40),
    "decode 32x4096 int8": Target(times_base=1 / 1.6),
    **{f"chain of {n}": Target(times_base=1.15) for n in (4, 5, 6, 7, 8)},
    "tree of 64": Target(times_base=1.3),
    "cascade": Target(times_base=1 / 8),
    "prefill 2048": Target(tflops=120),
    "prefill 16384": Target(tflops=120),
    "copy_pages": Target(gbs=3600),
    "commit_path": Target(gbs=3600),
}


# ---- formulas ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rates:
    """Ceilings that times are compared with."""

    copy_gbs: float
    tflops: float

    @classmethod
    def measured(cls) -> Rates:
        return cls(copy_gbs(), cublas_tflops())

    @classmethod
    def modelled(cls, arch: int) -> Rates:
        import roofline

        gpu = roofline.MODELLED[arch]
        return cls(gpu.copy_gbs, gpu.tflops["bf16"])


def case_bytes(case: Case) -> int:
    token_bytes = KVLayout(1, case.kv_heads, case.dim, case.dtype).token_bytes
    size = case.compute_dtype.itemsize
    return attention_bytes(case.tokens, token_bytes, case.num_rows, case.heads, case.dim, size)


def figures(case: Case, us: float, times: Mapping[str, float], rates: Rates) -> dict[str, Any]:
    """Rates of a time: operations of a prompt, bandwidth of the rest; times: those of the cases before."""
    row: dict[str, Any] = {"what": case.name, "us": us, "bytes": case_bytes(case)}
    row["flops"] = attention_flops(case.pairs, case.heads, case.dim)
    row |= floor_columns(us, row["bytes"], row["flops"], rates.copy_gbs, rates.tflops)
    if case.rows == case.lengths[0]:
        row["TFLOP/s"] = row["flops"] / us / 1e6
    else:
        row["GB/s"] = row["bytes"] / us / 1e3
        row["% copy"] = 100 * row["GB/s"] / rates.copy_gbs
    if case.base in times:
        row["x base"] = us / times[case.base]
        row["base"] = case.base
    return with_target(row)


def with_target(row: dict[str, Any]) -> dict[str, Any]:
    target = TARGETS.get(row["what"])
    return row if target is None else row | {"target": str(target), "holds": target.holds(row)}


# ---- a case's operands ---------------------------------------------------------------------------------


class Sequences:
    """A case's pages in as many layers as are told apart by L2, its rows, and calls on them."""

    def __init__(self, case: Case, device: str, *, layers: int | None = None, seed: int | None = 0) -> None:
        self.case = case
        nbytes = case_bytes(case) if layers is None else 0
        self.layers = num_layers(nbytes) if layers is None else layers
        prefix = [length - case.rows for length in case.lengths] if case.parent else case.lengths
        self.pages: Pages = made_up_pages(
            prefix,
            case.kv_heads,
            case.dim,
            dtype=case.dtype,
            layers=self.layers,
            shared=case.shared // PAGE,
            spare=len(prefix) * -(-case.rows // PAGE) if case.parent else 0,
            device=device,
            seed=seed,
        )
        self.q = torch.empty(case.num_rows, case.heads, case.dim, dtype=case.compute_dtype, device=device)
        if seed is not None:
            self.q.normal_(generator=torch.Generator(device).manual_seed(seed + 1))
        self.space = Workspace()
        self.table = self.pages.table
        self.cu_rows, self.row_pos = rows_at(case.parts)
        self.trees: list[Tree] = [token_tree(case.parent)] * len(prefix) if case.parent else []
        slot = torch.arange(case.rows, dtype=torch.int32).repeat(len(prefix))
        self.node_slot = slot % PAGE
        self.node_page = slot
        if case.parent:
            own = self.pages.spare.view(len(prefix), -1)  # pages that a sequence's nodes lie in
            self.node_page = own[torch.arange(case.num_rows) // case.rows, slot.long() // PAGE]

    def run(self, layer: int = 0) -> Tensor:
        p = self.pages
        options: dict[str, Any] = {"scale": self.case.dim**-0.5, "workspace": self.space, "cascade": self.case.cascade}
        if self.trees:
            places = self.node_page, self.node_slot
            return tree_attention(self.q, p.arena, p.layout, layer, self.table, self.trees, *places, p.rope, **options)
        return attention.paged_attention(
            self.q, p.arena, p.layout, layer, self.table, self.cu_rows, self.row_pos, p.rope, **options
        )

    @property
    def calls(self) -> list[Call]:
        return [partial(self.run, layer) for layer in range(self.layers)]

    def time(self) -> float:
        return graph_us(self.calls)

    def check(self) -> None:
        """A few rows of the last sequence against float64."""
        actual, exact = self._chosen()
        error = float((actual.double().cpu() - exact).norm() / exact.norm())
        if not error <= (allowed := TOLERANCE[self.case.compute_dtype]):
            raise AssertionError(
                f"{self.case.name}: relative error {error:.2g} against float64, expected at most {allowed:.2g}"
            )

    def _chosen(self) -> tuple[Tensor, Tensor]:
        case, p, s = self.case, self.pages, len(self.case.lengths) - 1
        one = replace(p.layout, num_layers=1)  # layer 0 lies in front
        arena = p.arena[: one.page_bytes * one.pages_per_superblock].cpu()
        rope = RopeTable(p.rope.cos.cpu(), p.rope.sin.cpu(), p.rope.rot_dim, p.rope.factor)
        table, first = p.lists([(s, 0, p.lengths[s])]), s * case.rows
        y, options = self.run(), {"scale": case.dim**-0.5, "by_kernels": runs_kernel(self.q)}
        if self.trees:  # the path of the last leaf, as a tree of its own
            path = torch.from_numpy(self.trees[s].paths[-1]).long() + first
            parents = [list(range(-1, len(path) - 1))]
            places = self.node_page[path], self.node_slot[path]
            q = self.q[path].cpu()
            return y[path], tree_attention_ref(q, arena, one, 0, table, parents, *places, rope, **options)
        rows = torch.tensor(sorted({first + case.rows // 2, first + case.rows - 1}))
        cu_rows = torch.tensor([0, len(rows)], dtype=torch.int32)
        q = self.q[rows].cpu()
        return y[rows], paged_attention_ref(q, arena, one, 0, table, cu_rows, self.row_pos[rows], rope, **options)


@contextmanager
def planned(longest_whole: int) -> Iterator[None]:
    """Tiles of up to so many chunks are one item, longer ones are split."""
    with mock.patch.object(attention, "make_plan", partial(make_plan, longest_whole=longest_whole)):
        yield


# ---- pages that move -----------------------------------------------------------------------------------

MOVE_LAYERS, MOVED_PAGES, MOVED_ROWS, APPENDED = 32, 32, 1024, 4096


def move_bytes() -> dict[str, int]:
    """Read plus written: by a model of 32 layers, 8 kv heads and 128 dims."""
    layout = KVLayout(MOVE_LAYERS, 8, 128, torch.bfloat16)
    return {
        "append_kv": append_kv_bytes(layout, APPENDED),
        "append_kv of 32": append_kv_bytes(layout, 32),
        "copy_pages": copy_pages_bytes(layout, MOVED_PAGES),
        "commit_path": commit_path_bytes(layout, MOVED_ROWS),
    }


def moves(device: str = "cuda", layers: int = MOVE_LAYERS, appended: int = APPENDED) -> dict[str, list[Call]]:
    """Calls of each; those of copies are launches alone, without the work on the host."""
    pages = made_up_pages([appended], 8, 128, layers=layers, spare=2 * MOVED_PAGES, device=device)
    arena, layout = pages.arena, pages.layout
    k, v = (torch.randn(appended, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    position = torch.arange(appended, dtype=torch.int32, device=device)
    page, slot = pages.table.ids[0].to(device)[position.long() // PAGE], position % PAGE

    def append(count: int, layer: int) -> None:
        at = page[:count], slot[:count], slot[:count]
        append_kv(k[:count], v[:count], arena, layout, layer, *at, pages.rope)

    src, dst = pages.spare.split(MOVED_PAGES)
    copy = recorded(lambda: copy_pages(arena, layout, src.tolist(), dst.tolist()))
    if any(not torch.equal(*(layout.blocks(arena)[int(ids[i])] for ids in (src, dst))) for i in (0, -1)):
        raise AssertionError("copy_pages: the pages differ from those that were copied")
    rows = torch.arange(MOVED_ROWS)
    nodes = torch.stack((src[rows // PAGE], rows % PAGE), 1).int()
    slots = torch.stack((dst[rows // PAGE], 7 * rows % PAGE), 1).int()
    commit = recorded(lambda: commit_path(arena, layout, nodes, slots))
    view = layout.view(arena, layers - 1)
    for (page_a, slot_a), (page_b, slot_b) in zip(nodes[[0, -1]].tolist(), slots[[0, -1]].tolist(), strict=True):
        if not torch.equal(view[page_a, :, :, slot_a], view[page_b, :, :, slot_b]):
            raise AssertionError("commit_path: the rows differ from those that were copied")
    return {
        "append_kv": [partial(append, appended, layer) for layer in range(layers)],
        "append_kv of 32": [partial(append, 32, layer) for layer in range(layers)],
        "copy_pages": copy,
        "commit_path": commit,
    }


def move_row(name: str, us: float, rates: Rates) -> dict[str, Any]:
    nbytes = move_bytes()[name]
    row = {"what": name, "us": us, "bytes": nbytes, "GB/s": nbytes / us / 1e3}
    return with_target(row | floor_columns(us, nbytes, 0, rates.copy_gbs, rates.tflops))


# ---- peers: a case -> calls on tokens of as many layers ------------------------------------------------

Peer = Callable[[Case, int], list[Call]]


def _contiguous(case: Case, layers: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """q [B, Hq, rows, D], and keys and values [B, Hkv, L, D] of each layer."""
    count, length = len(case.lengths), case.lengths[0]
    q = torch.randn(count, case.heads, case.rows, case.dim, device="cuda", dtype=torch.bfloat16)
    shape = (layers, 2, count, case.kv_heads, length, case.dim)
    return q, [(k, v) for k, v in torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()]


def _sdpa(case: Case, layers: int) -> list[Call]:
    from torch.nn.attention.bias import causal_lower_right

    q, stored = _contiguous(case, layers)
    options: dict[str, Any] = {"enable_gqa": True}
    if case.rows == case.lengths[0]:
        options["is_causal"] = True
    elif case.rows > 1:
        options["attn_mask"] = causal_lower_right(case.rows, case.lengths[0])
    return [partial(F.scaled_dot_product_attention, q, k, v, **options) for k, v in stored]


def _flex(case: Case, layers: int) -> list[Call]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, stored = _contiguous(case, layers)
    ahead = case.lengths[0] - case.rows

    def causal(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + ahead

    mask = create_block_mask(causal, None, None, case.rows, case.lengths[0], device="cuda")
    attend = torch.compile(flex_attention)
    return [partial(attend, q, k, v, block_mask=mask, enable_gqa=True) for k, v in stored]


VLLM = ("vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention")


def _vllm(case: Case, layers: int) -> list[Call]:
    """Its Triton kernel on pages [pages, slots, kv heads, D]."""
    module = next(import_module(name) for name in VLLM if _found(name))
    count, length = len(case.lengths), case.lengths[0]
    pages = count * -(-length // PAGE)
    shape = (layers, 2, pages, PAGE, case.kv_heads, case.dim)
    stored = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
    q = torch.randn(case.num_rows, case.heads, case.dim, device="cuda", dtype=torch.bfloat16)
    ones = torch.ones(count, case.kv_heads, device="cuda")
    known = {
        "q": q,
        "out": torch.empty_like(q),
        "cu_seqlens_q": torch.arange(count + 1, device="cuda", dtype=torch.int32) * case.rows,
        "max_seqlen_q": case.rows,
        "seqused_k": torch.full((count,), length, device="cuda", dtype=torch.int32),
        "max_seqlen_k": length,
        "softmax_scale": case.dim**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": torch.randperm(pages, device="cuda").int().view(count, -1),
        "softcap": 0,
        "q_descale": None,
        "k_descale": ones,
        "v_descale": ones,
    }
    wanted = inspect.signature(module.unified_attention).parameters
    arguments = {name: value for name, value in known.items() if name in wanted}
    return [partial(module.unified_attention, k=k, v=v, **arguments) for k, v in stored]


def _found(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True


PEERS: Mapping[str, Peer] = {"torch": _sdpa, "vLLM": _vllm, "flex": _flex}  # flex compiles longest


# peer -> package, at the version that it was written against; the others are torch's own
PACKAGES: Mapping[str, tuple[str, str]] = {"vLLM": ("vllm", "0.11.0")}


def importable(peer: str) -> bool:
    package, _ = PACKAGES.get(peer, ("torch", ""))
    return installed(package) is not None


def absent() -> list[str]:
    return [name for name in PEERS if not importable(name)]


# ---- measurement ---------------------------------------------------------------------------------------


def measured_row(made: Sequences, times: dict[str, float], rates: Rates) -> dict[str, Any]:
    made.check()
    us = times[made.case.name] = made.time()
    return figures(made.case, us, times, rates)


def peer_columns(
    case: Case, layers: int, failed: dict[str, str], peers: Sequence[str] = tuple(PEERS)
) -> dict[str, float]:
    found = {}
    for name in (name for name in peers if name in case.peers and importable(name)):
        try:
            found[f"{name} us"] = graph_us(PEERS[name](case, layers))
        except Exception as error:  # a peer's failure is a result
            failed[f"{name}, {case.name}"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return found


def tax_row(made: Sequences, us: float) -> dict[str, Any]:
    """Ours beside every other plan."""
    times = {}
    for longest in TAX_PLANS:
        made.space = Workspace()
        with planned(longest):
            times[longest] = made.time()
    made.space = Workspace()
    best = min(times, key=lambda longest: times[longest])
    row = {"what": made.case.name, "us": us, "best us": times[best], "split above, chunks": best}
    return row | {"tax %": 100 * max(0.0, us / times[best] - 1), "target": f"<= {100 * TAX_TARGET:.0f} %"}


def measure(
    cases: Sequence[Case] = CASES,
    *,
    deadline: float = math.inf,
    peers: bool = True,
    progress: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Everything that fits before the deadline of time.monotonic(): ours and torch's, other peers, then the tax.

    progress sees each step. A case whose check fails has no numbers; it is named in "void".
    """
    rates = Rates.measured()
    result: dict[str, Any] = {"copy GB/s": rates.copy_gbs, "cuBLAS TFLOP/s": rates.tflops, "rows": [], "tax": []}
    result |= {"void": {}, "peers failed": {}, "peers absent": absent(), "complete": False}
    times: dict[str, float] = {}
    made: dict[str, tuple[dict[str, Any], int]] = {}  # rows that hold, and the layers of each

    def is_over() -> bool:
        return time.monotonic() > deadline

    def of_peers(case: Case, names: Sequence[str]) -> None:
        row, layers = made[case.name]
        row |= peer_columns(case, layers, result["peers failed"], names)
        progress(result)

    @contextmanager
    def voided(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            torch.cuda.synchronize()  # raises too where nothing more can be measured
            result["void"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
            progress(result)

    for case in cases:
        if is_over():
            return result
        with voided(case.name):
            of = Sequences(case, "cuda")
            row = measured_row(of, times, rates)
            result["rows"].append(row)
            made[case.name] = row, of.layers
            progress(result)
        of = None
        torch.cuda.empty_cache()
        if peers and case.name in made and not is_over():
            of_peers(case, ("torch",))
    if len(cases) == len(CASES) and not is_over():
        with voided("pages that move"):
            result["rows"] += [move_row(name, graph_us(calls), rates) for name, calls in moves().items()]
            progress(result)
    for name in [name for name in PEERS if name != "torch"] if peers else ():
        for case in (case for case in cases if case.name in made and name in case.peers):
            if is_over():
                return result
            of_peers(case, (name,))
    for case in (case for case in cases if case.name in made and case.tax):
        if is_over():
            return result
        of = Sequences(case, "cuda")
        result["tax"].append(tax_row(of, of.time()))
        progress(result)
        torch.cuda.empty_cache()
    return result | {"complete": True}


# ---- the static model ------------------------------------------------------------------------------------


def static_row(case: Case, times: dict[str, float], arch: int = STATIC_ARCH) -> dict[str, Any]:
    """What the static model expects of a case with the plan and tiles that a GPU would take; nothing runs."""
    import roofline

    gpu = roofline.MODELLED[arch]
    us, launches, bounds, kernels = 0.0, 0, {}, []
    for kernel, work in expected(case, arch):
        prediction = roofline.predict(kernel, work, gpu)
        us += prediction.us
        bounds[prediction.us] = prediction.bound
        kernels.append(kernel)
        launches += 1 + work.side_launches
    times[case.name] = us
    first = max(kernels, key=lambda kernel: kernel.instructions)
    row = figures(case, us, times, Rates.modelled(arch)) | {
        "bound": bounds[max(bounds)],
        "instr/page": first.instructions,
    }
    row |= {"regs": first.registers, "blocks/SM": first.blocks_per_sm, "launches": launches}
    return row | {"source": MODEL}


def expected(case: Case, arch: int) -> list[tuple[Any, Any]]:
    """Kernel and work of every launch, the fold joined to the one before it."""
    import roofline
    from dryrun import dryrun

    made, plans = Sequences(case, "cpu", layers=1, seed=None), []

    def kept(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (plans.append(make(*args, **options)), plans[-1])[1]

    sms = roofline.MODELLED[arch].sms
    with (
        mock.patch.object(attention, "_multiprocessors", lambda device: sms),
        mock.patch.object(attention, "make_plan", kept(make_plan)),
        mock.patch.object(trees, "make_tree_plan", kept(trees.make_tree_plan)),
        dryrun(arch) as launches,
    ):
        made.run()
    plan = plans[0]
    parts = (plan.split, plan.shared, plan.tails) if case.parent else (plan.whole, plan.split, plan.shared)
    slots_of_row = int(plan.slots[:, 2].max(initial=0))
    found = []
    for tiles, launched in zip(
        (t for t in parts if len(t.items)), (x for x in launches if x.name != "_fold_kernel"), strict=True
    ):
        if case.parent and tiles is plan.tails:
            pages, tokens = int(tiles.items[:, 3].sum()), case.num_rows
        else:
            pages, tokens = _visits(tiles.items, made.table)
        rows = tiles.rows.shape[1]
        work = roofline.attention_launch(
            len(tiles.items),
            pages,
            tile_rows=rows,
            kv_heads=case.kv_heads,
            dim=case.dim,
            token_bytes=made.pages.layout.token_bytes,
            dram_bytes=tokens * made.pages.layout.token_bytes,
        )
        found.append([roofline.attention_kernel(launched, launched.metadata.num_stages), work])
    if plan.num_slots:
        found[-1][1] = roofline.with_fold(found[-1][1], plan.num_slots, slots_of_row, case.heads, case.dim)
    return [tuple(pair) for pair in found]


def _visits(items: np.ndarray, table: PageTable) -> tuple[int, int]:
    """Pages that items read, and tokens in different ones of them."""
    seen = np.zeros(table.ids.shape, bool)
    for s, first, end in np.unique(items[:, 1:], axis=0):
        seen[s, first:end] = True
    return int((items[:, 3] - items[:, 2]).sum()), PAGE * len(np.unique(table.ids.numpy()[seen]))


def static(cases: Sequence[Case] = CASES, arch: int = STATIC_ARCH) -> dict[str, Any]:
    import roofline

    times: dict[str, float] = {}
    rows = [static_row(case, times, arch) for case in cases]
    if len(cases) == len(CASES):
        gpu, rates = roofline.MODELLED[arch], Rates.modelled(arch)
        for name, nbytes in move_bytes().items():
            us = nbytes / gpu.copy_gbs / 1e3 + gpu.launch_us + gpu.latency_us
            rows.append(move_row(name, us, rates) | {"source": MODEL})
    return {"source": MODEL, "arch": arch, "rows": rows}


# ---- tables ------------------------------------------------------------------------------------------------

COLUMNS = ("what", "us", "floor us", "x floor", "GB/s", "% copy", "TFLOP/s", "x base", "base", "target", "holds")
STATIC_COLUMNS = (
    *("what", "us", "floor us", "x floor", "GB/s", "TFLOP/s", "bytes", "flops", "x base", "base", "bound"),
    *("instr/page", "regs", "blocks/SM", "launches", "target", "holds"),
)
TAX_COLUMNS = ("what", "us", "best us", "split above, chunks", "tax %", "target")


def tables(result: Mapping[str, Any]) -> Iterator[Any]:
    rows: list[Mapping[str, Any]] = result["rows"]
    if result.get("source") == MODEL:
        import roofline

        gpu = roofline.MODELLED[result["arch"]].name
        yield rows_table(f"attention: {MODEL} ({gpu}, sm_{result['arch']}); targets for an H200", rows, STATIC_COLUMNS)
        return
    peers = [f"{name} us" for name in PEERS if any(f"{name} us" in row for row in rows)]
    yield rows_table(f"attention (copy {result['copy GB/s']:.0f} GB/s); targets for an H200", rows, (*COLUMNS, *peers))
    if result["tax"]:
        yield rows_table("what our plan costs beside the best one", result["tax"], TAX_COLUMNS)
    if result["peers absent"]:
        yield f"not here: {', '.join(result['peers absent'])}"
    yield from (f"{name} failed: {why}" for name, why in result["peers failed"].items())
    yield from (f"void: {name}: {why}" for name, why in result.get("void", {}).items())


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    case: Annotated[list[str] | None, typer.Option(help="name of a case; may be repeated")] = None,
    minutes: Annotated[float, typer.Option(help="stop starting cases after this long")] = math.inf,
    peers: Annotated[bool, typer.Option(help="time other libraries too")] = True,
    static_only: Annotated[bool, typer.Option("--static", help="the static model though a GPU is there")] = False,
    arch: Annotated[int, typer.Option(help="of the static model: 80, 86 or 90")] = STATIC_ARCH,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the results here")] = None,
) -> None:
    """Measure, or without a GPU print the static model."""
    names = [c.name for c in CASES]
    if unknown := set(case or ()) - set(names):
        raise typer.BadParameter(f"unknown case {sorted(unknown)}; there are {names}")
    bases = {c.base for c in CASES if case and c.name in case}
    chosen = [c for c in CASES if not case or c.name in case or c.name in bases]
    screen = console()
    if has_gpu() and not static_only:
        result = measure(chosen, deadline=time.monotonic() + 60 * minutes, peers=peers)
    else:
        screen.print(MODEL if static_only else f"no CUDA device: {MODEL}")
        result = static(chosen, arch)
    for table in tables(result):
        screen.print(table)
    if json_file is not None:
        write_json(json_file, {"environment": environment(), "attention": result})
    raise typer.Exit(int(bool(result.get("void"))))


# ---- pytest-benchmark ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    """Collects rows and prints their tables when all is measured."""
    rates = Rates.measured()
    result: dict[str, Any] = {"copy GB/s": rates.copy_gbs, "cuBLAS TFLOP/s": rates.tflops, "rates": rates, "times": {}}
    yield (result := result | {"rows": [], "tax": [], "peers failed": {}, "peers absent": absent()})
    show(pytestconfig, tables(result))


@lru_cache(maxsize=1)
def _sequences(case: Case) -> Sequences:
    return Sequences(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention(benchmark: Any, report: dict[str, Any], case: Case) -> None:
    made = _sequences(case)
    row = measured_row(made, report["times"], report["rates"])
    if case.tax:
        report["tax"].append(tax_row(made, row["us"]))
    row |= peer_columns(case, made.layers, report["peers failed"])
    report["rows"].append(row)

    def once() -> None:
        made.run()
        torch.cuda.synchronize()

    benchmark.extra_info.update(row)  # the graph's time; the benchmark's own is that of one call from the host
    benchmark.pedantic(once, rounds=20, warmup_rounds=3)


@pytest.mark.gpu
def test_moves(benchmark: Any, report: dict[str, Any]) -> None:
    made = moves()
    rows = [move_row(name, graph_us(calls), report["rates"]) for name, calls in made.items()]
    report["rows"] += rows
    benchmark.extra_info.update({row["what"]: row for row in rows})
    benchmark.pedantic(lambda: (made["copy_pages"][0](), torch.cuda.synchronize()), rounds=20, warmup_rounds=3)


# ---- the CPU path --------------------------------------------------------------------------------------------

DEMO: dict[str, Any] = {"heads": 9, "kv_heads": 3, "dim": 64, "dtype": torch.float32}  # of SmolLM2 135M
CPU_CASES = (
    Case("decode 1x1024", (1024,), **DEMO),
    Case("decode 16x512", (512,) * 16, **DEMO),
    Case("chain of 5, 4x512", (512,) * 4, rows=5, **DEMO),
    Case("tree of 15, 1x1024", (1024,), rows=15, parent=(-1, -1, -1, *(i // 2 for i in range(12))), **DEMO),
    Case("prefill 512", (512,), rows=512, **DEMO),
)
CPU_APPENDED = (16, 512)  # tokens
CPU_COLUMNS = ("what", "us", "torch us", "x torch", "GB/s", "GFLOP/s")


@pytest.fixture(scope="module")
def cpu_rows(pytestconfig: pytest.Config) -> Iterator[list[dict[str, Any]]]:
    title = "attention on the CPU; torch: its own over contiguous keys and values, rotated beforehand"
    with printed_after(pytestconfig, title, CPU_COLUMNS) as rows:
        yield rows


def _sdpa_cpu(case: Case, layers: int) -> list[Call]:
    """Over as many keys and values, contiguous and rotated beforehand; a chain or a tree by a mask."""
    count, length = len(case.lengths), case.lengths[0]
    q = torch.randn(count, case.heads, case.rows, case.dim)
    stored = torch.randn(layers, 2, count, case.kv_heads, length, case.dim)
    options: dict[str, Any] = {"enable_gqa": True}
    if case.rows == length:
        options["is_causal"] = True
    elif case.rows > 1:
        seen = torch.ones(case.rows, length).tril(length - case.rows).bool()
        if case.parent:
            for node, parent in enumerate(case.parent):
                own = seen[node, length - case.rows :]
                own[:] = seen[parent, length - case.rows :] if parent >= 0 else False
                own[node] = True
        options["attn_mask"] = seen
    return [partial(F.scaled_dot_product_attention, q, k, v, **options) for k, v in stored]


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
def test_cpu_attention(benchmark: Any, cpu_rows: list[dict[str, Any]], case: Case) -> None:
    made = Sequences(case, "cpu", layers=num_layers(case_bytes(case), 2 * last_cache_bytes()))
    made.check()
    row = cpu_beside_torch(benchmark, made.calls, _sdpa_cpu(case, made.layers))
    row |= {"bytes": case_bytes(case), "flops": attention_flops(case.pairs, case.heads, case.dim)}
    row |= {"GB/s": row["bytes"] / row["us"] / 1e3, "GFLOP/s": row["flops"] / row["us"] / 1e3}
    benchmark.extra_info |= row
    cpu_rows.append({"what": case.name} | row)


@pytest.mark.parametrize("tokens", CPU_APPENDED)
def test_cpu_append(benchmark: Any, cpu_rows: list[dict[str, Any]], tokens: int) -> None:
    """Beside rotating the keys and copying both into a contiguous cache."""
    heads, dim = DEMO["kv_heads"], DEMO["dim"]
    pages = made_up_pages([tokens], heads, dim, dtype=torch.float32, layers=MOVE_LAYERS)
    k, v = torch.randn(2, tokens, heads, dim)
    position = torch.arange(tokens, dtype=torch.int32)
    page, slot, space = pages.table.ids[0][position.long() // PAGE], position % PAGE, Workspace()

    def append(layer: int) -> None:
        append_kv(k, v, pages.arena, pages.layout, layer, page, slot, slot, pages.rope, workspace=space)

    append(0)
    keys, values = pages.layout.view(pages.arena, 0)[page.long(), :, :, slot.long()].unbind(1)
    exact = append_kv_ref(k, v, slot, pages.rope)
    for actual, wanted in zip(model_order(keys, values, pages.layout, dim, False), exact, strict=True):
        if not (actual.double() - wanted).norm() <= 1e-6 * wanted.norm():
            raise AssertionError(f"append_kv of {tokens} tokens differs from what it should store, in float64")
    cache = torch.empty(MOVE_LAYERS, 2, heads, tokens, dim)
    cos, sin = (t[position.long() - MIN_DISTANCE].repeat(1, 2)[:, None] for t in (pages.rope.cos, pages.rope.sin))

    def copy(layer: int) -> None:
        a, b = k.chunk(2, -1)
        cache[layer, 0, :, position] = (k * cos + torch.cat((-b, a), -1) * sin).transpose(0, 1)
        cache[layer, 1, :, position] = v.transpose(0, 1)

    layers = range(MOVE_LAYERS)
    row = cpu_beside_torch(benchmark, [partial(append, i) for i in layers], [partial(copy, i) for i in layers])
    row["bytes"] = append_kv_bytes(pages.layout, tokens, 4)
    row["GB/s"] = row["bytes"] / row["us"] / 1e3
    benchmark.extra_info |= row
    cpu_rows.append({"what": f"append_kv {tokens}"} | row)


if __name__ == "__main__":
    app()
