"""Every kernel's values against float64, a row for each kernel: its largest error as a part of what is allowed.

Allowed is twice the largest error of the same operation in torch in the same dtype, or, for attention, a relative error
a row that the rounding of queries, weights and results explains. Copies and selections allow nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_section import TO_BE_KNOWN, Run, differing
from harness import KINDS, Pages, made_up_pages, made_up_rows, made_up_weight, rows_at
from torch import Tensor

from csrc_triton import t64
from csrc_triton.attention import paged_attention_ref, read_ref
from csrc_triton.attention_plan import PAGE
from csrc_triton.fused import (
    add_rmsnorm,
    add_rmsnorm_ref,
    argmax,
    quantize_rows,
    quantize_rows_ref,
    rmsnorm,
    rmsnorm_ref,
    swiglu,
    swiglu_ref,
    top_k,
)
from csrc_triton.pages import append_kv, append_kv_ref, commit_path, copy_pages
from csrc_triton.qgemm import prefill_gemm
from csrc_triton.qmatmul import dequant_matmul, lm_head_argmax, matmul_ref, swiglu_matmul
from csrc_triton.quant import QTensor
from csrc_triton.tree import rotation_slots, token_tree, tree_attention, tree_attention_ref
from csrc_triton.w8a8 import w8a8_matmul, w8a8_matmul_ref

Case = tuple[str, float, float]  # what, its largest error, what is allowed

QUANTISED = tuple(kind for kind in KINDS if kind not in ("w8a8", "dense", "scratch"))
ROWS = (1, 3, 16, 33, 64)
MANY_ROWS = (65, 130)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# of attention whose queries, weights and results are rounded once each
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
GEOMETRIES = ((4, 4, 64), (32, 8, 128), (5, 1, 80), (9, 3, 96), (8, 2, 256))  # heads of queries and keys, dim
FEW = GEOMETRIES[:2]
LENGTHS = (1, 63, 64, 65, 511, 512, 513, 1328)
# of what is stored, as a part of the number; of codes as a part of the row's largest
STEPS = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
CODES = {torch.int8: 1 / 200, torch.float8_e4m3fn: 1 / 20}


def largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def no_worse(what: str, found: Tensor, exact: Tensor, same: Tensor, slack: float = 0.0) -> Case:
    """At most twice the error of `same`, which torch computed in the same dtype, and a slack."""
    return what, largest(found.double() - exact), 2 * largest(same.double() - exact) + slack


def equal(what: str, found: Tensor, expected: Tensor) -> Case:
    return what, float(differing(found, expected)), 0.0


# ---- products ------------------------------------------------------------------------------------------

Multiply = Callable[[Tensor, QTensor], Tensor]


def products(run: Run, multiply: Multiply, rows: Sequence[int], kinds: Sequence[str]) -> Iterator[Case]:
    """All kinds with bfloat16 rows, a few with others."""
    n, k = (130, 256) if run.dry else (1536, 1024)
    few = [kind for kind in kinds if kind in ("q4", "q4_k", "q8", "dense")]
    chosen = [(kind, torch.bfloat16) for kind in (few[:2] if run.dry else kinds)]
    chosen += [(kind, dtype) for dtype in DTYPES[1:] for kind in few if not run.dry]
    for kind, dtype in chosen:
        w = made_up_weight(kind, n, k, device=run.device, dtype=dtype)
        table = w.parts["weight"].float() if kind == "dense" else t64.dequantize_t64(w)
        x = made_up_rows(max(rows), k, dtype, device=run.device)
        exact, same = matmul_ref(x, w), x @ table.to(dtype).T
        for m in rows[:1] if run.dry else rows:
            what = f"{kind}, {str(dtype).removeprefix('torch.')}, {m} rows"
            yield no_worse(what, multiply(x[:m], w), exact[:m], same[:m], largest(exact) * 1e-6)


def w8a8_product(run: Run) -> Iterator[Case]:
    """From the rounded activations: sums of int8 are exact, so the result is rounded once or twice."""
    w = made_up_weight("w8a8", *(130, 256) if run.dry else (1536, 1024), device=run.device)
    for m in (3,) if run.dry else (1, 16, 64, 65, 257):
        x = made_up_rows(m, w.shape[1], device=run.device)
        exact = w8a8_matmul_ref(x, w)
        yield no_worse(f"{m} rows", w8a8_matmul(x, w), exact, exact.bfloat16())


def swiglu_product(run: Run) -> Iterator[Case]:
    """Gate and up are rounded before SwiGLU: so they are in what it is compared with."""
    f, k = (72, 256) if run.dry else (1536, 1024)
    for kind in ("q4-glu",) if run.dry else ("q4-glu", "q4_1-glu", "q4_k-glu", "q8-glu"):
        w = made_up_weight(kind, 2 * f, k, device=run.device)
        table = t64.dequantize_t64(w)  # gate, then up
        for m in (3,) if run.dry else (1, 16, 64, 130):
            x = made_up_rows(m, k, device=run.device)
            exact = swiglu_ref(x.double() @ table.double().T, block=f)
            same = swiglu_ref((x @ table.bfloat16().T).double(), block=f).bfloat16()
            yield no_worse(f"{kind}, {m} rows", swiglu_matmul(x, w), exact, same, largest(exact) * 1e-3)


def head_argmax(run: Run) -> Iterator[Case]:
    """How far the chosen logit is below the largest; both are as wrong as rounding the weight makes them."""
    n, k = (300, 256) if run.dry else (49152, 576)
    for kind in ("q8",) if run.dry else ("q8", "q8-row", "q8_0", "q4", "dense"):
        w = made_up_weight(kind, n, k, device=run.device)
        table = w.parts["weight"] if kind == "dense" else t64.dequantize_t64(w).bfloat16()
        x = made_up_rows(3 if run.dry else 33, k, device=run.device)
        exact, same = matmul_ref(x, w), x.float() @ table.float().T
        ids = lm_head_argmax(x, w)
        if not ((ids >= 0) & (ids < n)).all():
            yield f"{kind}: tokens {int(ids.min())} to {int(ids.max())} of {n}", float("inf"), 0.0
            continue
        chosen = exact.gather(1, ids[:, None])[:, 0]
        yield kind, largest(exact.amax(1) - chosen), 2 * largest(same.double() - exact) + 1e-5 * largest(exact)


# ---- attention -----------------------------------------------------------------------------------------


def on_cpu(pages: Pages) -> Pages:
    rope = replace(pages.rope, cos=pages.rope.cos.cpu(), sin=pages.rope.sin.cpu())
    return replace(pages, arena=pages.arena.cpu(), rope=rope)


def _relative(what: str, found: Tensor, exact: Tensor) -> Case:
    size = exact.flatten(1).norm(dim=1).clamp_min(1e-30)
    return what, largest((found.double().cpu() - exact).flatten(1).norm(dim=1) / size), TOLERANCE[found.dtype]


def _queries(pages: Pages, count: int, heads: int) -> Tensor:
    dtype = torch.bfloat16 if pages.layout.scaled else pages.layout.dtype
    x = made_up_rows(count, heads * pages.layout.head_dim, dtype, device=pages.arena.device)
    return x.view(count, heads, -1)


def _heads(count: int, heads: int, dim: int, dtype: torch.dtype, run: Run, seed: int) -> Tensor:
    return made_up_rows(count, heads * dim, dtype, device=run.device, seed=seed).view(count, heads, dim)


def attention_of(
    dtype: torch.dtype, run: Run, variants: Sequence[dict[str, Any]] = ({},), geometries: Sequence[Any] = GEOMETRIES
) -> Iterator[Case]:
    """The last rows of sequences of many lengths."""
    if dtype == torch.float8_e4m3fn and not run.has_fp8:
        return
    lengths, rows = ((66,), 2) if run.dry else (LENGTHS, 2)
    for heads, kv_heads, dim in ((2, 1, 32),) if run.dry else geometries:
        pages = made_up_pages(lengths, kv_heads, dim, dtype=dtype, device=run.device)
        host = on_cpu(pages)
        parts = [(s, max(0, n - rows), n) for s, n in enumerate(lengths)]
        q = _queries(pages, sum(stop - start for _, start, stop in parts), heads)
        for options in variants:
            if options.get("sinks"):
                options = {"sinks": torch.randn(heads, generator=torch.Generator().manual_seed(0))}
            exact = paged_attention_ref(
                *(q.cpu(), host.arena, host.layout, 0, host.lists(parts), *rows_at(parts), host.rope),
                scale=dim**-0.5,
                by_kernels=True,
                **options,
            )
            there = {name: v.to(run.device) if name == "sinks" else v for name, v in options.items()}
            name = f"{heads}/{kv_heads} heads of {dim}" + "".join(f", {name}" for name in options)
            yield _relative(name, pages.attend(q, parts, **there), exact)


VARIANTS: tuple[dict[str, Any], ...] = (
    *({"window": window} for window in (1, 63, 64, 65, 128)),
    {"softcap": 5.0},
    {"sinks": True},
)


def attention_variants(run: Run) -> Iterator[Case]:
    """Windows, soft caps and sinks, of float and of coded pages."""
    for dtype in (torch.bfloat16, torch.int8):
        yield from attention_of(dtype, run, VARIANTS[1:2] if run.dry else VARIANTS, ((8, 2, 128),))


def prompt_attention(run: Run) -> Iterator[Case]:
    """Rows that begin in the middle of a page."""
    kv_heads, heads, dim, length = (1, 2, 32, 90) if run.dry else (2, 8, 128, 700)
    count = 40 if run.dry else 80
    for dtype in (torch.bfloat16,) if run.dry else (torch.bfloat16, torch.int8):
        pages = made_up_pages((length,), kv_heads, dim, dtype=dtype, device=run.device)
        host, parts = on_cpu(pages), [(0, length - count, length)]
        q = _queries(pages, count, heads)
        lists = (host.lists(parts), *rows_at(parts), host.rope)
        exact = paged_attention_ref(q.cpu(), host.arena, host.layout, 0, *lists, scale=dim**-0.5, by_kernels=True)
        yield _relative(f"{dtype}, {count} rows", pages.attend(q, parts), exact)


def trees(run: Run) -> Iterator[Case]:
    """Random trees behind prefixes about page and chunk edges; keys of nodes are large, so that a leak would show."""
    count, rng = (5, random.Random(0)) if run.dry else (24, random.Random(0))
    prefixes = (65,) if run.dry else (1, 63, 64, 448, 511, 512, 1328)
    kv_heads, heads, dim = (1, 2, 32) if run.dry else (2, 8, 128)
    for dtype in (torch.bfloat16,) if run.dry else (torch.bfloat16, torch.float16, torch.int8):
        pages = made_up_pages(prefixes, kv_heads, dim, dtype=dtype, device=run.device, spare=len(prefixes))
        parents = [[rng.randint(max(-1, i - rng.choice((1, 2, 8))), i - 1) for i in range(count)] for _ in prefixes]
        grown = [token_tree(parent) for parent in parents]
        q = _queries(pages, count * len(prefixes), heads)
        k, v = (
            made_up_rows(len(q), kv_heads * dim, q.dtype, device=run.device, seed=s).view(len(q), -1, dim)
            for s in (2, 3)
        )
        page = pages.spare.repeat_interleave(count).int()
        slot = torch.arange(count, dtype=torch.int32).repeat(len(prefixes)).flip(0).contiguous()
        append_kv(*(3 * k, v, pages.arena, pages.layout, 0, page, slot), rotation_slots(pages.table, grown), pages.rope)
        options = {"scale": dim**-0.5}
        found = tree_attention(q, pages.arena, pages.layout, 0, pages.table, grown, page, slot, pages.rope, **options)
        host = on_cpu(pages)
        exact = tree_attention_ref(
            *(q.cpu(), host.arena, host.layout, 0, host.table, parents, page, slot, host.rope),
            **options,
            by_kernels=True,
        )
        yield _relative(f"{dtype}", found, exact)


# ---- pages ---------------------------------------------------------------------------------------------

PAGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn)


def _page_dtypes(run: Run) -> Sequence[torch.dtype]:
    return PAGE_DTYPES[::3] if run.dry else PAGE_DTYPES if run.has_fp8 else PAGE_DTYPES[:-1]


def stored(run: Run) -> Iterator[Case]:
    """What is read back, as a part of what rounding to the pages' dtype explains."""
    count = 5 if run.dry else 100
    for dtype in _page_dtypes(run):
        for dim in (32,) if run.dry else (64, 96, 128):
            pages = made_up_pages((count,), 2, dim, dtype=dtype, device=run.device)
            kept = torch.bfloat16 if pages.layout.scaled else dtype
            k, v = (_heads(count, 2, dim, kept, run, seed) for seed in (2, 3))
            at = torch.arange(count, dtype=torch.int32)
            page, slot = pages.table.ids[0][at.long() // PAGE], at % PAGE
            append_kv(k, v, pages.arena, pages.layout, 0, page, slot, slot, pages.rope)
            host = on_cpu(pages)
            found = read_ref(host.arena, host.layout, 0, page.long(), slot.long(), host.rope, True)
            exact = append_kv_ref(k.cpu(), v.cpu(), slot, host.rope)
            for part, x, y in zip(("keys", "values"), found, exact, strict=True):
                allowed = y.abs() * STEPS[dtype] if dtype in STEPS else y.abs().amax(-1, keepdim=True) * CODES[dtype]
                yield f"{part}, {dtype}, {dim}", largest((x - y) / (allowed + 1e-6)), 1.0


def copies(run: Run) -> Iterator[Case]:
    for dtype in _page_dtypes(run):
        pages = made_up_pages((300,), 2, 32 if run.dry else 128, dtype=dtype, layers=2, spare=5, device=run.device)
        src, dst = pages.table.ids[0, :5].tolist(), pages.spare.tolist()
        copy_pages(pages.arena, pages.layout, src, dst)
        for layer in range(2):
            view = pages.layout.view(pages.arena, layer)
            yield equal(f"{dtype}, layer {layer}", view[dst].contiguous(), view[src].contiguous())
            if pages.layout.scaled:
                scales = pages.layout.scales(pages.arena, layer)
                yield equal(f"{dtype}, scales", scales[dst].contiguous(), scales[src].contiguous())


def commits(run: Run) -> Iterator[Case]:
    for dtype in _page_dtypes(run):
        pages = made_up_pages((130,), 2, 32 if run.dry else 128, dtype=dtype, layers=2, spare=1, device=run.device)
        at = [(int(pages.table.ids[0, i % 3]), 5 * i) for i in range(7)]
        to = [(int(pages.spare[0]), 60 - i) for i in range(7)]
        commit_path(pages.arena, pages.layout, at, to)
        for layer in range(2):
            for part in (pages.layout.view, *([pages.layout.scales] if pages.layout.scaled else [])):
                x = part(pages.arena, layer)
                there, here = (torch.stack([x[page, :, :, slot] for page, slot in places]) for places in (to, at))
                yield equal(f"{dtype}, layer {layer}", there, here)


# ---- rows ----------------------------------------------------------------------------------------------


def _widths(run: Run) -> Sequence[int]:
    return (72,) if run.dry else (64, 576, 4096, 12000)


def norms(run: Run) -> Iterator[Case]:
    for width in _widths(run):
        x, residual = (made_up_rows(9, width, device=run.device, seed=seed) for seed in (1, 2))
        weight = torch.rand(width, device=run.device)
        wide = rmsnorm_ref(x, weight, 1e-5)
        yield no_worse(f"rmsnorm, {width}", rmsnorm(x, weight, 1e-5), wide, wide.bfloat16())
        total, normed = add_rmsnorm(x, residual, weight, 1e-5)
        stream, exact = add_rmsnorm_ref(x, residual, weight, 1e-5)
        yield equal(f"sum, {width}", total, stream)
        yield no_worse(f"add_rmsnorm, {width}", normed, exact, exact.bfloat16())


def gates(run: Run) -> Iterator[Case]:
    for width in _widths(run):
        for activation in ("silu", "gelu_tanh"):
            x = made_up_rows(9, 2 * width, device=run.device)
            exact = swiglu_ref(x, activation)
            yield no_worse(f"{activation}, {width}", swiglu(x, activation), exact, exact.bfloat16(), 1e-3)


def codes(run: Run) -> Iterator[Case]:
    for width in _widths(run):
        x = made_up_rows(9, width, device=run.device)
        found, scale = quantize_rows(x)
        exact, exact_scale = quantize_rows_ref(x)
        yield f"codes, {width}", largest(found - exact), 0.501
        yield f"scales, {width}", largest(scale / exact_scale - 1), 2.0**-22


def choices(run: Run) -> Iterator[Case]:
    for width in _widths(run):
        logits = made_up_rows(5, width, torch.float32, device=run.device)
        sorted_values, order = logits.sort(dim=1, descending=True, stable=True)
        values, ids = top_k(logits, 8)
        yield equal(f"top_k, {width}", values, sorted_values[:, :8].contiguous())
        yield equal(f"ids of top_k, {width}", ids, order[:, :8].contiguous())
        yield equal(f"argmax, {width}", argmax(logits), order[:, 0].contiguous())
        level = torch.zeros_like(logits)
        yield equal(f"argmax of ties, {width}", argmax(level), torch.zeros_like(order[:, 0]))


# ---- the section ---------------------------------------------------------------------------------------

MATMUL: dict[str, Callable[[Run], Iterator[Case]]] = {
    "dequant_matmul": partial(products, multiply=dequant_matmul, rows=ROWS, kinds=QUANTISED),
    "dequant_matmul, dense": partial(products, multiply=dequant_matmul, rows=ROWS, kinds=("dense",)),
    "prefill_gemm": partial(products, multiply=prefill_gemm, rows=MANY_ROWS, kinds=QUANTISED),
    "prefill_gemm, dense": partial(products, multiply=prefill_gemm, rows=MANY_ROWS, kinds=("dense",)),
    "w8a8_matmul": w8a8_product,
    "swiglu_matmul": swiglu_product,
    "lm_head_argmax": head_argmax,
    "rmsnorm": norms,
    "swiglu": gates,
    "quantize_rows": codes,
    "argmax, top_k": choices,
}
ATTENTION: dict[str, Callable[[Run], Iterator[Case]]] = {
    "paged_attention, bfloat16": partial(attention_of, torch.bfloat16),
    "paged_attention, int8": partial(attention_of, torch.int8),
    "tree_attention": trees,
    "append_kv": stored,
    "copy_pages": copies,
    "commit_path": commits,
    "paged_attention, prompts": prompt_attention,
    "paged_attention, windows, soft caps, sinks": attention_variants,
    "paged_attention, fp8": partial(attention_of, torch.float8_e4m3fn, geometries=FEW),
    "paged_attention, float16": partial(attention_of, torch.float16, geometries=FEW),
    "paged_attention, float32": partial(attention_of, torch.float32, geometries=FEW),
}


def values(kernels: Mapping[str, Callable[[Run], Iterator[Case]]], run: Run) -> None:
    """A row for each kernel. What torch computes beside them sums in float32."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    for name, cases in kernels.items():
        if run.left() < 0:
            return
        run.attempt(name, partial(_judge, run, name, cases))


def _judge(run: Run, name: str, cases: Callable[[Run], Iterator[Case]]) -> None:
    found: list[Case] = []
    is_cut = False
    for case in cases(run):
        found.append(case)
        if is_cut := run.left() < 0:
            break
    if not found:
        run.row(name, "not on this GPU", TO_BE_KNOWN)
        return
    bad = [case for case in found if not case[1] <= case[2]]  # a NaN is bad too
    run.found[name] = [{"case": what, "error": error, "allowed": allowed} for what, error, allowed in found]
    what, error, allowed = max(bad or found, key=lambda case: case[1] / (case[2] or 1.0))
    value = f"{len(bad)} of {len(found)} cases wrong; error {error:.2g} of {allowed:.2g} allowed: {what}"
    holds = False if bad else None if is_cut else True
    run.row(name, f"cut short: {value}" if is_cut else value, "none wrong", holds)
