"""The promises of bits, by our kernels: what may not change a row's bits is changed, and the bits are compared.

A check is a name and a function from a Run to the outcomes of its comparisons: None, or what differs. Nothing is
compared but bits.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import autotune
import torch
import triton
from gpu_section import Outcome, Run, Skipped, differing
from harness import Pages, made_up_pages, made_up_rows, made_up_weight
from torch import Tensor

from csrc_triton import attention, launch, qgemm, t64, w8a8
from csrc_triton.attention import page_table, paged_attention
from csrc_triton.attention_plan import PAGE, make_plan
from csrc_triton.fused import argmax, rmsnorm, swiglu
from csrc_triton.pages import commit_path, copy_pages
from csrc_triton.qgemm import prefill_gemm
from csrc_triton.qmatmul import dequant_matmul, lm_head_argmax, matmul, matmul_rmsnorm, swiglu_matmul
from csrc_triton.quant import QTensor, quantize
from csrc_triton.tree import token_tree, tree_attention

Check = Callable[[Run], Iterator[Outcome]]


def _compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    count = sum(differing(a, b) for a, b in zip(found, expected, strict=True))
    return f"{name}: {count}" if count else None


# ---- matmul --------------------------------------------------------------------------------------------


def _shape(run: Run) -> tuple[int, int]:
    return (130, 256) if run.dry else (1024, 4096)


def _weights(run: Run) -> Iterator[tuple[str, Any, torch.dtype]]:
    """Name, weight, and dtype of the rows: every form that a kernel reads, and two of them with float16 rows."""
    kinds = ("q4", "w8a8") if run.dry else ("q4", "q4-zero", "q4_0", "q4_k", "q6_k", "q8", "q8-row", "w8a8", "dense")
    for kind in kinds:
        yield kind, made_up_weight(kind, *_shape(run), device=run.device), torch.bfloat16
    for kind in () if run.dry else ("q4", "q4_k", "dense"):
        name, dtype = f"{kind}, float16", torch.float16
        yield name, made_up_weight(kind, *_shape(run), device=run.device, dtype=dtype), dtype


def rows_alone(run: Run) -> Iterator[Outcome]:
    """A row alone, in a panel, at another place and in a prompt."""
    for name, w, dtype in _weights(run):
        x = made_up_rows(66 if run.dry else 1000, w.shape[1], dtype, device=run.device)
        whole = matmul(x, w)
        for m in (1, 17) if run.dry else (1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 128, 257):
            for first in (x.shape[0] - m,) if run.dry else (0, x.shape[0] - m):
                found, expected = matmul(x[first : first + m], w), whole[first : first + m]
                yield _compare(f"{name}, rows {first} to {first + m}", [found], [expected])
        if not run.dry:
            order = torch.randperm(x.shape[0], device=run.device)
            yield _compare(f"{name}, permuted", [matmul(x[order], w)], [whole[order]])


def split_or_folded(run: Run) -> Iterator[Outcome]:
    """Segments in programs of their own, beside segments folded in registers."""
    for name, w, dtype in _weights(run):
        x = made_up_rows(16, w.shape[1], dtype, device=run.device)
        if w.layout == "t64-int8":
            with mock.patch.object(w8a8, "SPLIT_ROWS", 0):
                folded = matmul(x, w)
            yield _compare(name, [matmul(x, w)], [folded])
        else:
            yield _compare(name, [dequant_matmul(x, w)], [prefill_gemm(x, w)])


def fused(run: Run) -> Iterator[Outcome]:
    """Gate, up and SwiGLU in one launch, a product and its norm, a head and its argmax, beside their parts."""
    f, k = (72, 256) if run.dry else (1000, 1024)
    a, b, head = (_stored(rows, k, run, seed) for seed, rows in enumerate((f, f, 2 * f)))
    both = t64.pack_gate_up(a, b)
    for segments in (2,) if run.dry else (1, 3):
        gate, up, head_w, pair = (replace(w, segments=segments) for w in (*map(t64.pack_t64, (a, b, head)), both))
        for m in (3,) if run.dry else (1, 16, 33, 64, 130):
            x, name = made_up_rows(m, k, device=run.device), f"{segments} segments, {m} rows"
            parts = torch.cat((matmul(x, gate), matmul(x, up)), 1)
            yield _compare(f"swiglu_matmul, {name}", [swiglu_matmul(x, pair)], [swiglu(parts, block=f)])
            logits = matmul(x, head_w, out_dtype=torch.float32)
            yield _compare(f"lm_head_argmax, {name}", [lm_head_argmax(x, head_w)], [argmax(logits)])
            if m <= 64:
                norm, residual = torch.rand(f, device=run.device), made_up_rows(m, f, device=run.device, seed=3)
                y, normed = matmul_rmsnorm(x, gate, norm, 1e-5, residual=residual)
                total = matmul(x, gate, residual=residual)
                yield _compare(f"matmul_rmsnorm, {name}", [y, normed], [total, rmsnorm(y, norm, 1e-5)])


def _stored(n: int, k: int, run: Run, seed: int) -> QTensor:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5
    return quantize(w, "q4", 128).to(run.device)


def _tiles(run: Run) -> list[tuple[autotune.Tunable, int, launch.Tile]]:
    """Kernel, bucket and candidate of up to 4 stages; more stages only prefetch further."""
    matmuls = [tunable for tunable in autotune.TUNABLES if tunable is not autotune.ATTENTION]
    every = [(t, bucket, tile) for t in matmuls for bucket in t.buckets for tile in t.tiles(bucket) if tile.stages <= 4]
    return every[:1] if run.dry else every


def other_tiles(run: Run) -> Iterator[Outcome]:
    """Every candidate of the tile tables, decode and prefill: 4 and 8 warps, 16 to 128 rows, 64 to 256 columns."""
    arch = launch.arch_of(torch.empty(1, device=run.device))
    for (tunable, bucket), group in itertools.groupby(_tiles(run), key=lambda case: case[:2]):
        x, w = tunable.operands(tunable.ranked[0], *_shape(run), bucket, run.device, 0)
        base = _with_tile(tunable, tunable.default, arch, x, w)
        for _, _, tile in group:
            name = f"{tunable.key}, {bucket} rows, {tile}"
            try:
                yield _compare(name, [_with_tile(tunable, tile, arch, x, w)], [base])
            except triton.errors.TritonError as error:  # too large for this GPU
                yield Skipped(f"{name}: {type(error).__name__}")


def _with_tile(tunable: autotune.Tunable, tile: launch.Tile, arch: int, x: Tensor, w: Any) -> Tensor:
    with launch.tiles_from(autotune.table_of(arch, tunable.key, tile)):
        return tunable.run(x, w)


def written_out(run: Run) -> Iterator[Outcome]:
    """The weight written out once and read from shared memory, beside the weight made in registers."""
    for name, w, dtype in _weights(run):
        if w.layout != "t64":
            continue
        x = made_up_rows(66 if run.dry else 2048, w.shape[1], dtype, device=run.device)
        direct = prefill_gemm(x, w)
        with mock.patch.object(qgemm, "SCRATCH_ROWS", x.shape[0]):
            yield _compare(name, [prefill_gemm(x, w)], [direct])


def repeated(run: Run) -> Iterator[Outcome]:
    """The same call 100 times, decode and prefill."""
    for name, w, dtype in _weights(run):
        for m in (2,) if run.dry else (16, 512):
            x = made_up_rows(m, w.shape[1], dtype, device=run.device)
            first = matmul(x, w)
            for i in range(1 if run.dry else 100):
                yield _compare(f"{name}, {m} rows, call {i}", [matmul(x, w)], [first])


# ---- attention -----------------------------------------------------------------------------------------

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


KINDS_OF_PAGES = ((torch.bfloat16, 128), (torch.int8, 128), (torch.float16, 64), (torch.float8_e4m3fn, 128))


def _made(run: Run, lengths: Sequence[int], kinds: int = len(KINDS_OF_PAGES), **options: Any) -> Iterator[Rows]:
    """Of the first kinds of pages that the GPU has; of small ones in a dry run."""
    kv_heads, heads = (1, 2) if run.dry else (8, 32)
    for dtype, dim in ((torch.bfloat16, 32),) if run.dry else KINDS_OF_PAGES[:kinds]:
        if dtype == torch.float8_e4m3fn and not run.has_fp8:
            continue
        pages = made_up_pages(lengths, kv_heads, dim, dtype=dtype, device=run.device, **options)
        of_q = torch.bfloat16 if pages.layout.scaled else dtype
        q = [
            made_up_rows(n, heads * dim, of_q, device=run.device, seed=s).view(n, heads, dim)
            for s, n in enumerate(lengths)
        ]
        yield Rows(f"{str(dtype).removeprefix('torch.')}-{dim}", pages, q)


def decode_chain_prompt(run: Run) -> Iterator[Outcome]:
    """A row decoded alone, in a batch, in a chain of 2 to 16, and in chunks of a prompt."""
    for rows in _made(run, (514,) if run.dry else EDGES):
        parts = [(s, n - 4, n) for s, n in enumerate(rows.pages.lengths)] if run.dry else rows.last
        whole = rows.attend(*parts)
        yield _compare(f"{rows.name}, other order", rows.attend(*parts[::-1])[::-1], whole)
        for count in (1, 3) if run.dry else (1, 2, 3, 4, 5, 7, 8, 16, 64, 100):
            for (s, first, end), expected in zip(parts, whole, strict=True):
                starts = range(first, end, count)
                if run.dry or count < 7:  # those about page and chunk edges, and the last
                    starts = [at for at in starts if at % PAGE in (0, PAGE - 1) or at + count >= end]
                for start in starts:
                    stop = min(start + count, end)
                    found = rows.attend((s, start, stop))
                    name = f"{rows.name}, sequence of {end}, rows {start} to {stop}"
                    yield _compare(name, found, [expected[start - first : stop - first]])
        for back in () if run.dry else (0, 1, 65):  # decode of the whole batch
            at = [(s, end - 1 - back, end - back) for s, first, end in parts if end - 1 - back >= first]
            expected = [whole[s][stop - 1 - parts[s][1] : stop - parts[s][1]] for s, _, stop in at]
            yield _compare(f"{rows.name}, batch {back} before the end", rows.attend(*at), expected)


def split_whole(run: Run) -> Iterator[Outcome]:
    """Every plan: chunks in programs of their own, or folded in one."""
    for rows in _made(run, (513,) if run.dry else EDGES):
        few = [(s, n - 1, n) for s, n in enumerate(rows.pages.lengths)]
        for parts in (few,) if run.dry else (few, rows.last):
            expected = rows.attend(*parts)
            for longest in (0, 10**9) if run.dry else (0, 1, 2, 8, 10**9):
                with mock.patch.object(attention, "make_plan", partial(make_plan, longest_whole=longest)):
                    yield _compare(f"{rows.name}, whole up to {longest}", rows.attend(*parts), expected)


def cascade_on_off(run: Run) -> Iterator[Outcome]:
    """Chunks that sequences share, read for all of them at once."""
    lengths, shared = ((513, 514), 8) if run.dry else ((4100, 4096, 5000, 7777, 4097, 4500, 4160), 64)
    for rows in _made(run, lengths, shared=shared):
        few = [(s, n - 1, n) for s, n in enumerate(lengths)]
        for parts in (few,) if run.dry else (few, rows.last):
            yield _compare(rows.name, rows.attend(*parts, cascade=False), rows.attend(*parts, cascade=True))


def attention_tiles(run: Run) -> Iterator[Outcome]:
    """16 and 32 rows a program, at every depth of the pipeline."""
    arch, tunable = launch.arch_of(torch.empty(1, device=run.device)), autotune.ATTENTION
    for rows in _made(run, (130,) if run.dry else EDGES, kinds=2):
        parts = [(0, 100, 130)] if run.dry else rows.last
        with launch.tiles_from(autotune.table_of(arch, tunable.key, tunable.default)):
            expected = rows.attend(*parts)
        for tile in [launch.Tile(32, 64, 4, 5)] if run.dry else tunable.tiles(32):
            name = f"{rows.name}, {tile}"
            try:
                with launch.tiles_from(autotune.table_of(arch, tunable.key, tile)):
                    found = rows.attend(*parts)
            except triton.errors.TritonError as error:  # too large for this GPU
                yield Skipped(f"{name}: {type(error).__name__}")
            else:
                yield _compare(name, found, expected)


def tree_paths(run: Run) -> Iterator[Outcome]:
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
                yield _compare(f"{rows.name}, prefix {prefix}", [found[nodes.to(q.device)]], [plain])


def _moved(pages: Pages, s: int, prefix: int, page: Tensor, slot: Tensor, fresh: Sequence[int]) -> Any:
    """The list of a sequence and a path of nodes behind it, whose rows are copied to fresh pages."""
    full, length = prefix // PAGE, prefix + len(page)
    ids = [*pages.table.ids[s, :full].tolist(), *fresh[: -(-length // PAGE) - full]]
    if prefix % PAGE:
        copy_pages(pages.arena, pages.layout, int(pages.table.ids[s, full]), ids[full])
    to = [(ids[at // PAGE], at % PAGE) for at in range(prefix, length)]
    commit_path(pages.arena, pages.layout, torch.stack((page, slot), 1), to)
    return page_table(torch.tensor([ids], dtype=torch.int32), torch.tensor([length], dtype=torch.int32))


def pages_elsewhere(run: Run) -> Iterator[Outcome]:
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
        yield _compare(rows.name, moved.attend(*parts), expected)


def attention_repeated(run: Run) -> Iterator[Outcome]:
    """The same call 100 times."""
    for rows in _made(run, (66,) if run.dry else EDGES):
        parts = [(0, 60, 66)] if run.dry else rows.last
        expected = rows.attend(*parts)
        for i in range(1 if run.dry else 100):
            yield _compare(f"{rows.name}, call {i}", rows.attend(*parts), expected)


# ---- the section ---------------------------------------------------------------------------------------

MATMUL: dict[str, Check] = {
    "a row's bits in any company": rows_alone,
    "segments split = folded": split_or_folded,
    "fused products = their parts": fused,
    "the same call again, the same bits": repeated,
    "written out = made in registers": written_out,
}
ATTENTION: dict[str, Check] = {
    "attention: alone = batch = chain = prompt": decode_chain_prompt,
    "attention: chunks split = folded": split_whole,
    "attention: tree = decoding of the path": tree_paths,
    "attention: cascade on = off": cascade_on_off,
    "attention: pages anywhere": pages_elsewhere,
    "attention: the same call again, the same bits": attention_repeated,
}
TILES: dict[str, Check] = {
    "attention: every tile, the same bits": attention_tiles,
    "every tile, 4 and 8 warps, the same bits": other_tiles,
}


def exact(checks: Mapping[str, Check], run: Run) -> None:
    """All checks, as far as the time goes."""
    for name, check in checks.items():
        if run.left() < 0:
            return
        total = len(_tiles(run)) if check is other_tiles else None
        run.attempt(name, partial(run.promise, name, check(run), total=total))
