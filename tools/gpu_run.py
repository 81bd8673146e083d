"""One run on a GPU: the machine and its ceilings, the hardware facts the promises rest on, the tests, the benches.

    python tools/gpu_run.py [--minutes 14] [--out DIR] [--only facts --only matmul]
    python tools/gpu_run.py --dry        no GPU: every section in small, by interpreter, dry run and static model

The sections come in order of importance, each in a process of its own, so that a fault or a hang costs one section.
DIR/results.json is written anew whenever something is known, and a table at the end says what held. Needs no network.

A section is an entry of SECTIONS: a name, its share of the time, and a function from a Run to rows of
{"what", "value", "target", "holds"}; whatever else it finds it puts into run.found.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("bench", "tests"))

import autotune
import bench_attention
import bench_matmul
import compile_check
import torch
import triton
import triton.language as tl
import typer
from dryrun import dryrun
from harness import (
    ROOT,
    Pages,
    console,
    copy_gbs,
    cublas_tflops,
    environment,
    gpu_folder,
    has_gpu,
    made_up_pages,
    made_up_rows,
    made_up_weight,
    rows_table,
    write_json,
)
from torch import Tensor

from csrc_triton import attention, launch, qgemm
from csrc_triton.attention import page_table, paged_attention
from csrc_triton.attention_plan import PAGE, make_plan
from csrc_triton.fused import rmsnorm
from csrc_triton.launch import OPTIONS
from csrc_triton.pages import commit_path, copy_pages
from csrc_triton.qgemm import prefill_gemm
from csrc_triton.qmatmul import dequant_matmul, matmul
from csrc_triton.tree import token_tree, tree_attention

DRY_ARCH = 90
COPY_GBS, CUBLAS_TFLOPS = 4300.0, 788.0  # of an H200
START_SECONDS = 15  # of a section's process

Row = dict[str, Any]


@dataclass(slots=True)
class Run:
    """What a section is given, and where it puts what it finds."""

    out: Path
    dry: bool
    deadline: float  # of time.monotonic()
    found: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    part: Path | None = None  # where to keep what is known so far

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def equal(self) -> str:
        return "equal bits (interpreter)" if self.dry else "equal bits"

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def row(self, what: str, value: Any, target: str | None = None, holds: bool | None = None) -> None:
        self.rows.append({"what": what, "value": value, "target": target, "holds": holds})
        self.save()

    def save(self) -> None:
        if self.part is not None:
            write_json(self.part, {"rows": self.rows, "found": self.found})

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Launches run: on the GPU, or in the interpreter."""
        if not self.dry:
            yield
            return
        from interpreter import interpreted

        with interpreted(DRY_ARCH, races=False, sequential_dot=True):
            yield


# ---- machine -------------------------------------------------------------------------------------------


def machine(run: Run) -> None:
    """Environment, and the ceilings that rates are compared with."""
    run.found |= environment()
    run.row("GPU", run.found["gpu"] or "none: dry run")
    if run.dry:
        return
    copy = run.found["copy GB/s"] = copy_gbs()
    run.row("copy, GB/s", copy, f"{COPY_GBS:.0f}", copy > 0.9 * COPY_GBS)
    tflops = run.found["cuBLAS TFLOP/s"] = cublas_tflops()
    run.row("cuBLAS bfloat16 8192^3, TFLOP/s", tflops, f"{CUBLAS_TFLOPS:.0f}", tflops > 0.9 * CUBLAS_TFLOPS)


# ---- facts: probes ---------------------------------------------------------------------------------------


@triton.jit
def _probe_kernel(
    a_ptr,  # [M, K] bfloat16
    b_ptr,  # [N, K] bfloat16
    out_ptr,  # [M, N] float32
    zero,  # 0, which the compiler does not know
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    REGISTERS: tl.constexpr,
):
    """Grid (M / BM, N / BN). a . b^T as the matmul kernels sum: 128 columns afresh, folded by fma."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for kb in range(0, K, 128):
        k = kb + tl.arange(0, 128)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        if REGISTERS:  # what was computed on is no longer in shared memory
            a = (a.to(tl.int16, bitcast=True) ^ zero.to(tl.int16)).to(tl.bfloat16, bitcast=True)
        b = tl.load(b_ptr + n[None, :] * K + k[:, None])
        product = tl.dot(a, b, input_precision="ieee")
        acc = tl.fma(product, tl.full((BM, BN), 1.0, tl.float32), acc)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


@dataclass(frozen=True, slots=True)
class Probe:
    """One way to compute the same product."""

    rows: int  # of a: the M side of the instruction
    cols: int
    warps: int
    registers: bool  # a from registers, else from shared memory
    instruction: str  # on sm_90


PROBES = {
    "n64": Probe(64, 64, 4, True, "HGMMA"),
    "n16": Probe(64, 16, 4, True, "HGMMA"),
    "n32": Probe(64, 32, 4, True, "HGMMA"),
    "n128": Probe(64, 128, 4, True, "HGMMA"),
    "n64 from shared": Probe(64, 64, 4, False, "HGMMA"),
    "n128 from shared": Probe(64, 128, 4, False, "HGMMA"),
    "n64, 8 warps": Probe(128, 64, 8, True, "HGMMA"),
    "n128, 8 warps from shared": Probe(128, 128, 8, False, "HGMMA"),
    "mma.sync": Probe(64, 64, 2, False, "HMMA"),
}
BASE = "n64"
# fact -> the probes that must give the base's bits, and whether a promise rests on it
FACTS = {
    "wgmma n16 = n32 = n64 = n128": (("n16", "n32", "n128"), True),
    "A from registers = from shared memory": (("n64 from shared", "n128 from shared"), True),
    "4 = 8 warps": (("n64, 8 warps", "n128, 8 warps from shared"), True),
    "mma.sync = wgmma": (("mma.sync",), False),
}
SETS = ("normal", "wide", "steps", "cancelling", "subnormal", "ties")


def probe_operands(kind: str, m: int, n: int, k: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """a [m, k] and b [n, k] in bfloat16 whose sums differ when their order or their inner precision does."""
    gen = torch.Generator().manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, k, generator=gen)

    def exponent(rows: int, low: int, high: int) -> Tensor:
        return 2.0 ** torch.randint(low, high + 1, (rows, k), generator=gen)

    a, b = normal(m), normal(n)
    if kind == "wide":  # products over 80 binades
        a, b = a * exponent(m, -20, 20), b * exponent(n, -20, 20)
    elif kind == "steps":  # one large product among many that vanish beside it singly but not together
        a = a * torch.where(torch.arange(k) % 16 == seed % 16, 2.0**12, 2.0**-12)
    elif kind == "cancelling":  # large pairs whose sum is nothing, small ones between them
        large = normal(m) * 2.0**20
        a[:, 0::4], a[:, 2::4] = large[:, 0::4], -large[:, 0::4]
        b[:, 2::4] = b[:, 0::4]
    elif kind == "subnormal":  # products around the smallest normal float32
        a, b = a * exponent(m, -70, -60), b * exponent(n, -70, -60)
    elif kind == "ties":  # products half a unit in the last place of the sum so far
        a = torch.randint(1, 4, (m, k), generator=gen).float() * exponent(m, 0, 0)
        a[:, 0] = 2.0**12
        b = torch.where(torch.arange(k) == 0, 2.0**12, 0.5) * torch.randint(1, 4, (n, k), generator=gen).float()
    return a.bfloat16().to(device), b.bfloat16().to(device)


def run_probe(probe: Probe, a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=torch.float32, device=a.device)
    grid = (m // probe.rows, n // probe.cols)
    options = {"num_warps": probe.warps, "num_stages": 2, **OPTIONS}
    _probe_kernel[grid](a, b, out, 0, n, k, BM=probe.rows, BN=probe.cols, REGISTERS=probe.registers, **options)
    return out


def probe_problem(probe: Probe) -> str | None:
    """What a dry run finds that is not as the probe claims; None where it is what it is called."""
    with dryrun(DRY_ARCH) as launches:
        run_probe(probe, torch.empty(128, 256, dtype=torch.bfloat16), torch.empty(128, 256, dtype=torch.bfloat16))
    found = compile_check.Compiled(launches[0])
    products = [i for i in found.program.instructions if i.is_mma]
    size = f"64x{probe.cols}x16"
    if {i.name for i in products} != {probe.instruction}:
        return f"products by {sorted({i.name for i in products})}"
    if probe.instruction == "HGMMA" and not all(size in i.modifiers for i in products):
        return f"products of {sorted({'.'.join(i.modifiers) for i in products})}, expected {size}"
    if probe.instruction == "HGMMA" and any(dot.first_in_registers != probe.registers for dot in found.dots):
        return f"a {'not ' * probe.registers}from registers"
    return "; ".join(compile_check.check_layout(found, _CASE)) or None


_CASE = compile_check.Case("probe", DRY_ARCH, "_probe_kernel", lambda: None)


def differing(a: Tensor, b: Tensor) -> int:
    """Elements of unequal bits."""
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.contiguous().view(ints) != b.contiguous().view(ints)).sum())


def facts(run: Run) -> None:
    """The hardware facts, by probes and then by our kernels."""
    m, n, k = (128, 128, 256) if run.dry else (512, 128, 4096)
    wgmma = run.dry or torch.cuda.get_device_capability()[0] == 9
    probes = (
        PROBES if wgmma else {name: p for name, p in PROBES.items() if name in (BASE, "n16", "n128", "n64, 8 warps")}
    )
    if run.dry:
        probes = {name: PROBES[name] for name in (BASE, "n16", "n64 from shared", "mma.sync")}
        run.found["probes"] = {name: probe_problem(probe) for name, probe in probes.items()}
        good = not any(run.found["probes"].values())
        run.row("probes compile to what they claim", str(run.found["probes"]) if not good else "yes", "yes", good)
    counts: dict[str, dict[str, int]] = {name: {} for name in probes if name != BASE}
    with run.kernels():
        for kind in SETS[:1] if run.dry else SETS:
            for seed in range(1 if run.dry else 4):
                a, b = probe_operands(kind, m, n, k, run.device, seed)
                base = run_probe(probes[BASE], a, b)
                for name, of_set in counts.items():
                    of_set[kind] = of_set.get(kind, 0) + differing(run_probe(probes[name], a, b), base)
    run.found["differing from n64"] = counts
    for fact, (names, promised) in FACTS.items():
        there = [name for name in names if name in counts]
        if there:
            total = sum(sum(counts[name].values()) for name in there)
            value = run.equal if total == 0 else f"{total} elements differ"
            run.row(fact, value, "equal bits" if promised else "to be known", total == 0 if promised else None)
    for name, check in OURS.items():
        if run.left() < 0:
            return
        with run.kernels():
            problems = list(itertools.islice(check(run), 20))
        run.found[name] = problems or "equal bits"
        run.row(
            name, f"{len(problems)} differ: {problems[0]}" if problems else "equal bits", "equal bits", not problems
        )


# ---- facts: our kernels ------------------------------------------------------------------------------------


def _shape(run: Run) -> tuple[int, int]:
    return (130, 256) if run.dry else (1024, 4096)


def _kinds(run: Run) -> Sequence[str]:
    return ("q4",) if run.dry else ("q4", "q4-zero", "q4_0", "q4_k", "q6_k", "q8", "dense")


def rows_alone(run: Run) -> Iterator[str]:
    """A row alone, in a panel, at another place and in a prompt."""
    for kind in _kinds(run):
        w = made_up_weight(kind, *_shape(run), device=run.device)
        x = made_up_rows(66 if run.dry else 1000, w.shape[1], device=run.device)
        whole = matmul(x, w)
        for m in (1, 17) if run.dry else (1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 128, 257):
            for first in (0, x.shape[0] - m):
                if count := differing(matmul(x[first : first + m], w), whole[first : first + m]):
                    yield f"{kind}, rows {first} to {first + m}: {count}"
        if not run.dry:
            order = torch.randperm(x.shape[0], device=run.device)
            if count := differing(matmul(x[order], w), whole[order]):
                yield f"{kind}, permuted: {count}"


def other_tiles(run: Run) -> Iterator[str]:
    """Every candidate of the tile tables, decode and prefill: 4 and 8 warps, 16 to 128 rows, 64 to 256 columns."""
    arch = DRY_ARCH if run.dry else launch.arch_of(torch.empty(1, device="cuda"))
    matmuls = [tunable for tunable in autotune.TUNABLES if tunable is not autotune.ATTENTION]
    for tunable in matmuls[:1] if run.dry else matmuls:
        for bucket in tunable.buckets[:1] if run.dry else tunable.buckets:
            x, w = tunable.operands(tunable.ranked[0], *_shape(run), bucket, run.device, 0)
            base = _with_tile(tunable, tunable.default, arch, x, w)
            every = [t for t in tunable.tiles(bucket) if t.stages <= 4]
            for tile in every[:: len(every) // 2 or 1] if run.dry else every:
                try:
                    count = differing(_with_tile(tunable, tile, arch, x, w), base)
                except triton.errors.TritonError:
                    continue  # too large for this GPU
                if count:
                    yield f"{tunable.key}, {tile}: {count}"
                if run.left() < 0:
                    return


def _with_tile(tunable: autotune.Tunable, tile: launch.Tile, arch: int, x: Tensor, w: Any) -> Tensor:
    with launch.tiles_from(autotune.table_of(arch, tunable.key, tile)):
        return tunable.run(x, w)


def written_out(run: Run) -> Iterator[str]:
    """The weight written out once and read from shared memory, beside the weight made in registers."""
    if run.dry:
        return
    for kind in _kinds(run)[:-1]:
        w = made_up_weight(kind, *_shape(run), device=run.device)
        x = made_up_rows(2048, w.shape[1], device=run.device)
        direct = prefill_gemm(x, w)
        with mock.patch.object(qgemm, "SCRATCH_ROWS", x.shape[0]):
            if count := differing(prefill_gemm(x, w), direct):
                yield f"{kind}: {count}"


def split_or_folded(run: Run) -> Iterator[str]:
    """Segments in programs of their own, beside segments folded in registers."""
    for kind in _kinds(run):
        w = made_up_weight(kind, *_shape(run), device=run.device)
        x = made_up_rows(16, w.shape[1], device=run.device)
        if count := differing(dequant_matmul(x, w), prefill_gemm(x, w)):
            yield f"{kind}: {count}"


def repeated(run: Run) -> Iterator[str]:
    """The same call again and again, decode and prefill."""
    for kind in _kinds(run):
        w = made_up_weight(kind, *_shape(run), device=run.device)
        for m in (2,) if run.dry else (16, 512):
            x = made_up_rows(m, w.shape[1], device=run.device)
            first = matmul(x, w)
            for i in range(1 if run.dry else 100):
                if count := differing(matmul(x, w), first):
                    yield f"{kind}, {m} rows, call {i}: {count}"
                    break


# ---- facts: attention --------------------------------------------------------------------------------------

EDGES = (1, 63, 64, 65, 511, 512, 513, 1328, 4096, 9000)
PREFIXES = (0, 1, 63, 64, 448, 449, 463, 480, 497, 510, 511, 512, 1024, 2041)  # of trees


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences, and a query for every token."""

    name: str
    pages: Pages
    q: list[Tensor]

    def attend(self, *parts: tuple[int, int, int], **options: Any) -> list[Tensor]:
        """Rows start to stop of sequences, in one call."""
        q = torch.cat([self.q[s][start:stop] for s, start, stop in parts])
        return list(self.pages.attend(q, parts, **options).split([stop - start for _, start, stop in parts]))

    @property
    def last(self) -> list[tuple[int, int, int]]:
        """Up to 150 rows at the end of every sequence."""
        return [(s, max(0, length - 150), length) for s, length in enumerate(self.pages.lengths)]


KINDS_OF_PAGES = ((torch.bfloat16, 128), (torch.int8, 128), (torch.float16, 64))


def _made(run: Run, lengths: Sequence[int], kinds: int = len(KINDS_OF_PAGES), **options: Any) -> Iterator[Rows]:
    """Of the first kinds of pages; of small ones in a dry run."""
    kv_heads, heads = (1, 2) if run.dry else (8, 32)
    for dtype, dim in ((torch.bfloat16, 32),) if run.dry else KINDS_OF_PAGES[:kinds]:
        pages = made_up_pages(lengths, kv_heads, dim, dtype=dtype, device=run.device, **options)
        of_q = torch.bfloat16 if pages.layout.scaled else dtype
        q = [
            made_up_rows(n, heads * dim, of_q, device=run.device, seed=s).view(n, heads, dim)
            for s, n in enumerate(lengths)
        ]
        yield Rows(f"{str(dtype).removeprefix('torch.')}-{dim}", pages, q)


def _compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> Iterator[str]:
    if count := sum(differing(a, b) for a, b in zip(found, expected, strict=True)):
        yield f"{name}: {count}"


def decode_chain_prompt(run: Run) -> Iterator[str]:
    """A row decoded alone, in a batch, in a chain of 2 to 16, and in chunks of a prompt."""
    for rows in _made(run, (514,) if run.dry else EDGES):
        parts = [(s, n - 4, n) for s, n in enumerate(rows.pages.lengths)] if run.dry else rows.last
        whole = rows.attend(*parts)
        yield from _compare(f"{rows.name}, other order", rows.attend(*parts[::-1])[::-1], whole)
        for count in (1, 3) if run.dry else (1, 2, 3, 4, 5, 7, 8, 16, 64, 100):
            for (s, first, end), expected in zip(parts, whole, strict=True):
                starts = range(first, end, count)
                if run.dry or count < 7:  # those about page and chunk edges, and the last
                    starts = [at for at in starts if at % PAGE in (0, PAGE - 1) or at + count >= end]
                for start in starts:
                    stop = min(start + count, end)
                    found = rows.attend((s, start, stop))
                    name = f"{rows.name}, sequence of {end}, rows {start} to {stop}"
                    yield from _compare(name, found, [expected[start - first : stop - first]])
        for back in () if run.dry else (0, 1, 65):  # decode of the whole batch
            at = [(s, end - 1 - back, end - back) for s, first, end in parts if end - 1 - back >= first]
            expected = [whole[s][stop - 1 - parts[s][1] : stop - parts[s][1]] for s, _, stop in at]
            yield from _compare(f"{rows.name}, batch {back} before the end", rows.attend(*at), expected)


def split_whole(run: Run) -> Iterator[str]:
    """Every plan: chunks in programs of their own, or folded in one."""
    for rows in _made(run, (513,) if run.dry else EDGES):
        few = [(s, n - 1, n) for s, n in enumerate(rows.pages.lengths)]
        for parts in (few,) if run.dry else (few, rows.last):
            expected = rows.attend(*parts)
            for longest in (0, 10**9) if run.dry else (0, 1, 2, 8, 10**9):
                with mock.patch.object(attention, "make_plan", partial(make_plan, longest_whole=longest)):
                    yield from _compare(f"{rows.name}, whole up to {longest}", rows.attend(*parts), expected)


def cascade_on_off(run: Run) -> Iterator[str]:
    """Chunks that sequences share, read for all of them at once."""
    lengths, shared = ((513, 514), 8) if run.dry else ((4100, 4096, 5000, 7777, 4097, 4500, 4160), 64)
    for rows in _made(run, lengths, shared=shared):
        few = [(s, n - 1, n) for s, n in enumerate(lengths)]
        for parts in (few,) if run.dry else (few, rows.last):
            yield from _compare(rows.name, rows.attend(*parts, cascade=False), rows.attend(*parts, cascade=True))


def attention_tiles(run: Run) -> Iterator[str]:
    """16 and 32 rows a program, at every depth of the pipeline."""
    arch = DRY_ARCH if run.dry else launch.arch_of(torch.empty(1, device="cuda"))
    tunable = autotune.ATTENTION
    for rows in _made(run, (130,) if run.dry else EDGES, kinds=2):
        parts = [(0, 100, 130)] if run.dry else rows.last
        tiles = [tunable.default, launch.Tile(32, 64, 4, 5)] if run.dry else [tunable.default, *tunable.tiles(32)]
        expected: list[Tensor] = []
        for tile in tiles:
            try:
                with launch.tiles_from(autotune.table_of(arch, tunable.key, tile)):
                    found = rows.attend(*parts)
            except triton.errors.TritonError:
                continue  # too large for this GPU
            expected = expected or found
            yield from _compare(f"{rows.name}, {tile}", found, expected)


def tree_paths(run: Run) -> Iterator[str]:
    """Every node of a tree beside plain decoding of its path, its keys and values moved to where that puts them."""
    rng = random.Random(0)
    for rows in _made(run, (505,) if run.dry else PREFIXES, spare=4 * len(PREFIXES)):
        p, count = rows.pages, 4 if run.dry else 40
        parents = [[rng.randint(max(-1, i - rng.choice((1, 2, 8))), i - 1) for i in range(count)] for _ in p.lengths]
        trees = [token_tree(parent) for parent in parents]
        spare = p.spare.tolist()
        page = torch.tensor([spare[s] for s in range(len(trees)) for _ in range(count)], dtype=torch.int32)
        slot = torch.randperm(PAGE, generator=torch.Generator().manual_seed(0))[:count].int().repeat(len(trees))
        like = rows.q[-1]
        q = made_up_rows(count * len(trees), like[0].numel(), like.dtype, device=run.device).view(-1, *like.shape[1:])
        scale = p.layout.head_dim**-0.5
        found = tree_attention(q, p.arena, p.layout, 0, p.table, trees, page, slot, p.rope, scale=scale)
        for s, prefix in enumerate(p.lengths):
            for path in trees[s].paths:
                nodes = s * count + torch.from_numpy(path[path >= 0]).long()
                table = _moved(p, s, prefix, page[nodes], slot[nodes], spare[len(trees) :])
                cu_rows, at = torch.tensor([0, len(nodes)]).int(), torch.arange(prefix, prefix + len(nodes)).int()
                plain = paged_attention(
                    *(q[nodes.to(q.device)], p.arena, p.layout, 0, table, cu_rows, at, p.rope), scale=scale
                )
                yield from _compare(f"{rows.name}, prefix {prefix}", [found[nodes.to(q.device)]], [plain])


def _moved(pages: Pages, s: int, prefix: int, page: Tensor, slot: Tensor, fresh: Sequence[int]) -> Any:
    """The list of a sequence and a path of nodes behind it, whose rows are copied to fresh pages."""
    full, length = prefix // PAGE, prefix + len(page)
    ids = [*pages.table.ids[s, :full].tolist(), *fresh[: -(-length // PAGE) - full]]
    if prefix % PAGE:
        copy_pages(pages.arena, pages.layout, int(pages.table.ids[s, full]), ids[full])
    to = [(ids[at // PAGE], at % PAGE) for at in range(prefix, length)]
    commit_path(pages.arena, pages.layout, torch.stack((page, slot), 1), to)
    return page_table(torch.tensor([ids], dtype=torch.int32), torch.tensor([length], dtype=torch.int32))


def pages_elsewhere(run: Run) -> Iterator[str]:
    """The same pages, copied to other places."""
    lengths = (130, 65) if run.dry else EDGES
    total = sum(-(-n // PAGE) for n in lengths)
    for rows in _made(run, lengths, spare=total):
        parts = [(s, n - 1, n) for s, n in enumerate(lengths)]
        expected, p = rows.attend(*parts), rows.pages
        used = p.table.ids > 0
        ids = p.table.ids.clone()
        ids[used] = p.spare
        copy_pages(p.arena, p.layout, p.table.ids[used].tolist(), p.spare.tolist())
        moved = replace(rows, pages=replace(p, table=replace(p.table, ids=ids)))
        yield from _compare(rows.name, moved.attend(*parts), expected)


def attention_repeated(run: Run) -> Iterator[str]:
    """The same call again and again."""
    for rows in _made(run, (66,) if run.dry else EDGES):
        parts = [(0, 60, 66)] if run.dry else rows.last
        expected = rows.attend(*parts)
        for i in range(1 if run.dry else 100):
            yield from _compare(f"{rows.name}, call {i}", rows.attend(*parts), expected)


OURS: dict[str, Callable[[Run], Iterator[str]]] = {
    "a row's bits in any company": rows_alone,
    "segments split = folded": split_or_folded,
    "100 calls, the same bits": repeated,
    "attention: alone = batch = chain = prompt": decode_chain_prompt,
    "attention: chunks split = folded": split_whole,
    "attention: tree = decoding of the path": tree_paths,
    "attention: cascade on = off": cascade_on_off,
    "attention: every tile, the same bits": attention_tiles,
    "attention: pages anywhere": pages_elsewhere,
    "attention: 100 calls, the same bits": attention_repeated,
    "written out = made in registers": written_out,
    "every tile, the same bits": other_tiles,
}


# ---- tests -----------------------------------------------------------------------------------------------


def tests(run: Run) -> None:
    """`pytest -m gpu`; in a dry run only the tests that there would be."""
    files = [str(p) for p in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in p.read_text()]
    run.found["files"] = [Path(file).name for file in files]
    if run.dry:
        run.row("test files with GPU tests", len(files))
        return
    if not files:
        run.row("GPU tests", "none", None, None)
        return
    report = run.out / "gpu-tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", "-p", "no:cacheprovider"]
    log, code = _finished([*command, *files], run.left())
    run.found |= {"exit": code, "log": log[-6000:]}
    if not report.exists():
        run.row("pytest -m gpu", "out of time" if code is None else f"exit {code}", "all pass", False)
        return
    suite = next(ElementTree.parse(report).iter("testsuite"))
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{c.get('classname')}::{c.get('name')}" for c in suite.iter("testcase") if len(c) and c[0].tag != "skipped"
    ]
    run.found |= {"counts": count, "failed": failed}
    bad = count["failures"] + count["errors"]
    passed = count["tests"] - bad - count["skipped"]
    run.row(
        "pytest -m gpu", f"{passed} pass, {bad} fail, {count['skipped']} skipped", "all pass", bad == 0 and passed > 0
    )


def _finished(command: Sequence[str], seconds: float) -> tuple[str, int | None]:
    """Output and exit status; None where time ran out."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            code: int | None = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=max(seconds, 1), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        output.seek(0)
        return output.read(), code


# ---- benches ---------------------------------------------------------------------------------------------


def matmul_bench(run: Run) -> None:
    """bench/bench_matmul.py: ours, cuBLAS and peers, what is most telling first."""
    if run.dry:
        run.found |= bench_matmul.static(("q4",), ((4096, 4096),), (1,))
        run.row(f"q4 4096x4096, 1 row, us ({bench_matmul.MODEL})", run.found["rows"][0]["us"])
        return

    def progress(result: dict[str, Any]) -> None:
        run.found |= result
        run.save()

    result = bench_matmul.measure(deadline=run.deadline, progress=progress)
    run.found |= result
    for row in result["rows"]:
        if row["target"]:
            value = f"{row['us']:.2f} us, {row['x cuBLAS']:.2f}x"
            run.row(f"{row['weights']} {row['shape']}, {row['M']} rows", value, row["target"], meets(row))
    if result["tax"]:
        worst = max(result["tax"], key=lambda row: row["tax %"])
        value = f"{worst['tax %']:.1f} % ({worst['weights']} {worst['shape']}, {worst['M']} rows)"
        holds = worst["tax %"] <= 100 * bench_matmul.TAX_TARGET
        run.row("a fixed order of summation costs at most", value, worst["target"], holds)


def meets(row: Row) -> bool:
    """Whether a measured row meets all its targets."""
    parts = str(row["target"]).split(", ")
    return all(
        row["us"] <= float(part[:-3]) if part.endswith(" us") else row["x cuBLAS"] >= float(part[:-1]) for part in parts
    )


def attention_bench(run: Run) -> None:
    """bench/bench_attention.py: decode, prompts, chains, trees, cascades and page moves, the most telling first."""
    if run.dry:
        few = [case for case in bench_attention.CASES if case.name == bench_attention.LLAMA]
        run.found |= bench_attention.static(few)
        row = run.found["rows"][0]
        run.row(f"{row['what']}, us ({bench_attention.MODEL})", row["us"], row["target"], row["holds"])
        return

    def progress(result: dict[str, Any]) -> None:
        run.found |= result
        run.save()

    result = bench_attention.measure(deadline=run.deadline, progress=progress)
    run.found |= result
    for row in result["rows"]:
        if "target" in row:
            rates = (("GB/s", "{:.0f} GB/s"), ("TFLOP/s", "{:.0f} TFLOP/s"), ("x base", "{:.2f}x"))
            shown = [text.format(row[name]) for name, text in rates if name in row]
            run.row(row["what"], ", ".join([f"{row['us']:.1f} us", *shown]), row["target"], row["holds"])
    if result["tax"]:
        worst = max(result["tax"], key=lambda row: row["tax %"])
        holds = worst["tax %"] <= 100 * bench_attention.TAX_TARGET
        run.row("our plans cost at most", f"{worst['tax %']:.1f} % ({worst['what']})", worst["target"], holds)


def fused_bench(run: Run) -> None:
    """bench/bench_fused.py: the row-wise kernels beside torch."""
    if run.dry:
        with dryrun(DRY_ARCH) as launches:
            rmsnorm(made_up_rows(2, 576), torch.ones(576, dtype=torch.bfloat16), 1e-5)
        run.row("rmsnorm compiles, registers", launches[0].registers)
        return
    report = run.out / "fused.json"
    command = [sys.executable, "-m", "pytest", "-q", "bench/bench_fused.py", f"--benchmark-json={report}"]
    log, code = _finished([*command, "-m", "", "-p", "no:cacheprovider"], run.left())
    run.found |= {"exit": code, "log": log[-3000:]}
    if not report.exists():
        run.row("bench_fused", "out of time" if code is None else f"exit {code}", None, False)
        return
    made = json.loads(report.read_text())["benchmarks"]
    run.found["rows"] = [{"name": b["name"], **b["extra_info"]} for b in made]
    ratios = [b["extra_info"]["times_torch"] for b in made if "times_torch" in b["extra_info"]]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        run.row(f"row-wise kernels, x torch ({len(ratios)} cases)", f"{mean:.2f}, least {min(ratios):.2f}")


def tiles(run: Run) -> None:
    """tools/autotune.py with the time that is left; go on with --only tiles."""
    if run.dry:
        few = autotune.TUNABLES[0].tiles(16)[:2]
        cut = replace(autotune.TUNABLES[0], buckets=(16,), tiles=lambda bucket: few, ranked=("q4",), kinds=("q4",))
        written = autotune.make_table(DRY_ARCH, None, run.out / f"sm_{DRY_ARCH}.json", (cut,))
        run.row("a tile table is written", "yes" if written else "no", "yes", written)
        return
    arch = launch.arch_of(torch.empty(1, device="cuda"))
    path, name = run.out / f"sm_{arch}.json", torch.cuda.get_device_name()
    written = autotune.make_table(arch, name, path, minutes=run.left() / 60)
    run.row("tile table", str(path) if written else "out of time; --only tiles goes on")


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    run: Callable[[Run], None]
    minutes: float  # at most


SECTIONS = (
    Section("machine", machine, 0.5),
    Section("facts", facts, 4),
    Section("tests", tests, 4),
    Section("attention", attention_bench, 4),
    Section("matmul", matmul_bench, 6),
    Section("fused", fused_bench, 1.5),
    Section("tiles", tiles, 10),
)


# ---- the run ---------------------------------------------------------------------------------------------


def run_section(section: Section, run: Run) -> str:
    """ "done", or what went wrong."""
    try:
        section.run(run)
    except Exception as error:  # the other sections go on
        status = f"failed: {type(error).__name__}: {error}".splitlines()[0][:300]
    else:
        status = "done" if run.left() > 0 else "cut short"
    run.save()
    return status


def in_process_of_its_own(section: Section, out: Path, seconds: float) -> tuple[dict[str, Any], str]:
    """What the section left behind, and its status; one that hangs or dies leaves what it had."""
    part = out / f"{section.name}.part.json"
    part.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--section", section.name, "--out", str(out), "--minutes", str(seconds / 60)]
    log, code = _finished(command, seconds + START_SECONDS)
    known = json.loads(part.read_text()) if part.exists() else {"rows": [], "found": {}}
    part.unlink(missing_ok=True)
    if code == 0:
        return known, "done"
    return known | {"log": log[-3000:]}, "out of time" if code is None else log.strip().splitlines()[-1][:300]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(help="in all")] = 14,
    dry: Annotated[bool, typer.Option("--dry", help="no GPU: everything in small")] = False,
    out: Annotated[Path | None, typer.Option(help="folder; bench/results/<gpu> where not given")] = None,
    only: Annotated[list[str] | None, typer.Option(help="only these sections")] = None,
    section: Annotated[str | None, typer.Option(hidden=True, help="run this section here")] = None,
) -> None:
    """Run the sections and write results.json."""
    start = time.monotonic()
    if not dry and not has_gpu():
        raise typer.BadParameter("no CUDA device; --dry goes through the sections without one")
    names = [s.name for s in SECTIONS]
    if unknown := {*(only or ()), *([section] if section else ())} - set(names):
        raise typer.BadParameter(f"unknown section {sorted(unknown)}; there are {names}")
    if out is None:
        name = None if dry else torch.cuda.get_device_name()
        out = Path(tempfile.mkdtemp(prefix="gpu_run-")) if dry else ROOT / "bench" / "results" / gpu_folder(name)
    out.mkdir(parents=True, exist_ok=True)
    deadline = start + 60 * minutes
    if section is not None:
        chosen = next(s for s in SECTIONS if s.name == section)
        status = run_section(chosen, Run(out, dry, deadline, part=out / f"{section}.part.json"))
        if status.startswith("failed"):
            print(status)
            raise typer.Exit(1)
        return
    path = out / "results.json"
    command = " ".join(["python", "tools/gpu_run.py", *sys.argv[1:]])
    results: dict[str, Any] = {"command": command, "dry": dry, "sections": {}}
    if only and path.exists():
        results = json.loads(path.read_text()) | {"command": command}
    screen = console()
    for s in SECTIONS:
        if only and s.name not in only:
            continue
        began, left = time.monotonic(), deadline - time.monotonic()
        if left < 2 * START_SECONDS and not dry:
            results["sections"].setdefault(s.name, {"status": "no time left", "rows": []})
            continue
        if dry:
            run = Run(out, dry, deadline)
            status = run_section(s, run)
            known = {"rows": run.rows, "found": run.found}
        else:
            known, status = in_process_of_its_own(s, out, min(left - START_SECONDS, 60 * s.minutes))
        seconds = round(time.monotonic() - began, 1)
        results["sections"][s.name] = {"status": status, "seconds": seconds, **known}
        write_json(path, results)
        screen.print(f"{s.name}: {status}, {seconds} s", highlight=False, markup=False)
    write_json(path, results)
    screen.print(rows_table(f"{command}: {path}", summary(results), ("section", "what", "value", "target", "holds")))
    raise typer.Exit(int(not all_hold(results)))


def summary(results: dict[str, Any]) -> list[Row]:
    found = []
    for name, section in results["sections"].items():
        rows = section["rows"] if section["status"] == "done" else [*section["rows"], {"what": section["status"]}]
        found += [{"section": name, **row} for row in rows]
    return found


def all_hold(results: dict[str, Any]) -> bool:
    """Facts and tests; a missed target of speed is no failure."""
    rows = [row for name in ("facts", "tests") for row in results["sections"].get(name, {"rows": []})["rows"]]
    failed = any(s["status"].startswith("failed") for s in results["sections"].values())
    return not failed and all(row["holds"] is not False for row in rows)


if __name__ == "__main__":
    app()
