"""The attention kernels in the interpreter: values, the bits of a row in any company, and what must not be read.

Pages hold random numbers, or codes, put there directly: what lies in a page is a stored key, whatever it is. Every byte
that no token was stored in is NaN (of codes: 0xff, with scales of NaN), page id 0 included.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from checks import assert_close, assert_same_bits
from test_attention import CODED, EVICTED, PIECES, TRIMMED, Entry, canonical, plain_attention, rope, table_of
from test_attention import make as appended
from torch import Tensor

pytest.importorskip("triton")

from interpreter import interpreted

from csrc_triton import attention, launch
from csrc_triton.attention import (
    PageTable,
    attention_workspace_nbytes,
    paged_attention,
    paged_attention_ref,
    places_ref,
    read_ref,
)
from csrc_triton.attention_plan import Plan, make_plan
from csrc_triton.cpu import MIN_DISTANCE
from csrc_triton.cpu_attention import PAGE, Workspace
from csrc_triton.fused import RopeTable
from csrc_triton.pages import KVLayout, commit_path, copy_pages
from csrc_triton.tree import (
    Tree,
    computed_nodes,
    token_tree,
    tree_attention,
    tree_attention_ref,
    tree_attention_workspace_nbytes,
)
from polymodel.workloads.exact import pairwise

Listed = tuple[int, int, int, int]  # page id, position of slot 0, valid slots lo, hi
Part = tuple[int, int, int]  # sequence, first row, row behind the last
HALVES = (torch.bfloat16, torch.float16)
CODES = (torch.int8, torch.float8_e4m3fn)
DTYPES = (*HALVES, torch.float32, *CODES)
ALL_WHOLE, ALL_SPLIT = 10**9, 0


# ---- what is attended to -----------------------------------------------------------------------------


@dataclass
class Case:
    """Sequences in pages of one arena, and a query for every token."""

    layout: KVLayout
    arena: Tensor
    rope: RopeTable
    lists: list[list[Listed]]
    positions: list[list[int]]  # of each sequence's tokens, ascending
    q: list[Tensor]  # [L, Hq, D] of each sequence
    spare: list[int]  # ids of pages that are nobody's
    options: dict[str, Any]  # window, softcap, sinks
    out_dtype: torch.dtype | None  # of results; q's if None

    @property
    def scale(self) -> float:
        return self.layout.head_dim**-0.5

    def run(self, *parts: Part, layer: int = 0, **options: Any) -> list[Tensor]:
        """Rows [start, stop) of sequences, each seeing the tokens before `stop`, in one call."""
        y = self.attend(*self.inputs(*parts, layer=layer), **options)
        return list(y.split([stop - start for _, start, stop in parts]))

    def attend(self, *inputs: Any, **options: Any) -> Tensor:
        return paged_attention(*inputs, scale=self.scale, out=self.new_out(inputs[0]), **self.options, **options)

    def new_out(self, q: Tensor) -> Tensor:
        """NaN, for whoever writes not all of it."""
        return torch.full(q.shape, math.nan, dtype=self.out_dtype or q.dtype)

    def exact(self, *parts: Part, layer: int = 0) -> list[Tensor]:
        y = paged_attention_ref(*self.inputs(*parts, layer=layer), scale=self.scale, by_kernels=True, **self.options)
        return list(y.split([stop - start for _, start, stop in parts]))

    def inputs(self, *parts: Part, layer: int = 0) -> tuple[Any, ...]:
        q = torch.cat([self.q[s][start:stop] for s, start, stop in parts])
        row_pos = int32([p for s, start, stop in parts for p in self.positions[s][start:stop]])
        cu_rows = int32(np.cumsum([0, *(stop - start for _, start, stop in parts)]))
        table = garbage_behind(table_of([self.listed(s, stop) for s, _, stop in parts]))
        return q, self.arena, self.layout, layer, table, cu_rows, row_pos, self.rope

    def listed(self, s: int, stop: int) -> list[Listed]:
        """The entries of the first `stop` tokens."""
        last = self.positions[s][stop - 1]
        kept = [(page, base, lo, min(hi, last + 1 - base)) for page, base, lo, hi in self.lists[s]]
        return [entry for entry in kept if entry[3] > entry[2]]

    def fill(self, page: int, lo: int, hi: int, gen: torch.Generator) -> None:
        """Random keys and values, all layers."""
        for layer in range(self.layout.num_layers):
            view = self.layout.view(self.arena, layer)[page, :, :, lo:hi]
            if not self.layout.scaled:
                view.copy_(torch.randn(view.shape, generator=gen))
                continue
            codes = torch.randn(view.shape, generator=gen) * (30 if view.dtype == torch.int8 else 100)
            view.view(torch.int8).copy_(codes.clamp(-127, 127).round().to(view.dtype).view(torch.int8))
            scales = self.layout.scales(self.arena, layer)[page, :, :, lo:hi]
            scales.copy_(torch.rand(scales.shape, generator=gen) / (30 if view.dtype == torch.int8 else 100))

    def copy_rows(self, src: Sequence[tuple[int, int]], dst: Sequence[tuple[int, int]]) -> None:
        """Tokens, at (page id, slot), to other places."""
        (from_page, from_slot), (to_page, to_slot) = (torch.tensor(rows).T for rows in (src, dst))
        for layer in range(self.layout.num_layers):
            parts = [self.layout.view(self.arena, layer)]
            parts = [part.view(torch.int8) if self.layout.scaled else part for part in parts]
            if self.layout.scaled:
                parts.append(self.layout.scales(self.arena, layer))
            for part in parts:
                part[to_page, :, :, to_slot] = part[from_page, :, :, from_slot]


def int32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def garbage_behind(table: PageTable) -> PageTable:
    """Ids, bases and spans beyond n that name no memory, and that would be seen."""
    columns = torch.arange(table.ids.shape[1] + 2)
    wide = [torch.nn.functional.pad(t, (0, 2)) for t in (table.ids, table.base, table.span)]
    unused = columns >= table.n[:, None]
    for t, values in zip(wide, ((2**31 - 1, -(2**31)), (0, -63), (64 << 8, 64 << 8)), strict=True):
        t[unused] = torch.where(columns % 2 == 0, *values).int().expand_as(t)[unused]
    return PageTable(*wide, table.n)


def make(
    heads: tuple[int, int, int],
    sequences: Sequence[int | list[Entry]],
    dtype: torch.dtype = torch.bfloat16,
    *,
    q_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = torch.float32,
    shared: Mapping[int, tuple[int, int]] | None = None,
    table: RopeTable | None = None,
    layers: int = 1,
    order: int = 0,
    spare: int = 2,
    fill: bytes = b"\xff",
    seed: int = 0,
    **options: Any,
) -> Case:
    """Sequences are lengths, or lists of entries. shared: {sequence: (earlier one, entries that it begins with)}.

    The same seed puts the same tokens into the same entries, wherever `order` lays the pages. Results are float32
    unless told otherwise: a last rounding would hide differences.
    """
    hq, hkv, dim = heads
    gen = torch.Generator().manual_seed(seed)
    entries = [canonical(s) if isinstance(s, int) else s for s in sequences]
    layout = KVLayout(layers, hkv, dim, dtype, 4)
    count = sum(len(e) for e in entries) + spare
    superblocks = -(-(count + 1) // 4)
    arena = torch.frombuffer(bytearray(fill * (superblocks * 4 * layout.page_bytes // len(fill))), dtype=torch.uint8)
    pages = layout.page_ids(range(1, count + 1)).tolist()
    random.Random(order).shuffle(pages)
    if "sinks" in options and isinstance(options["sinks"], float):
        options["sinks"] = options["sinks"] * torch.randn(hq, generator=gen)
    case = Case(layout, arena, table or rope(dim), [], [], [], [], options, out_dtype)
    q_dtype = q_dtype or (torch.bfloat16 if layout.scaled else dtype)
    for s, spans in enumerate(entries):
        other, given = (shared or {}).get(s, (0, 0))
        listed = []
        for e, (base, lo, hi) in enumerate(spans):
            page = case.lists[other][e][0] if e < given else pages.pop()
            listed.append((page, base, lo, hi))
            if e >= given:
                case.fill(page, lo, hi, gen)
        case.lists.append(listed)
        case.positions.append([base + slot for base, lo, hi in spans for slot in range(lo, hi)])
        case.q.append(torch.randn(len(case.positions[-1]), hq, dim, generator=gen).to(q_dtype))
    case.spare = pages
    return case


# ---- how it is computed ------------------------------------------------------------------------------


@contextmanager
def ordered(arch: int = 90, *, races: bool = False) -> Iterator[None]:
    """The interpreter whose sums are those of the kernel's own order."""
    with interpreted(arch, races=races, sequential_dot=True), np.errstate(all="ignore"):
        yield


@contextmanager
def cut(longest_whole: int | None = None, rows: int | None = None, arch: int = 90) -> Iterator[list[Plan]]:
    """Plans with the chunks that a whole tile may have, and tiles of so many rows; -> the plans made."""
    made: list[Plan] = []

    def plan(*args: Any, **kwargs: Any) -> Plan:
        made.append(make_plan(*args, **{**kwargs, "longest_whole": longest_whole}))
        return made[-1]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(attention, "make_plan", plan))
        if rows is not None:
            tile = {"rows": rows, "cols": 64, "warps": 4, "stages": 2}
            stack.enter_context(launch.tiles_from({"arch": arch, "tiles": {"attention": {"16": tile}}}))
        yield made


def in_torch(case: Case, *parts: Part, layer: int = 0) -> list[Tensor]:
    """Row by row in the dtypes that the kernels round to, with one sum over all keys."""
    q, arena, layout, _, table, cu_rows, row_pos, turns = case.inputs(*parts, layer=layer)
    out = case.new_out(q)
    for s in range(len(parts)):
        page, slot, base = places_ref(table, s)
        keys, values = read_ref(arena, layout, layer, page, slot, turns, True)
        scales = torch.ones(values.shape[:2])
        if layout.scaled:
            scales = layout.scales(arena, layer)[page, 1, :, slot]
            values = values / scales.double()[..., None]
        for r in range(int(cu_rows[s]), int(cu_rows[s + 1])):
            out[r] = row_in_torch(case, q[r], int(row_pos[r]), keys.float(), values.float(), scales, slot, base)
    return list(out.split([stop - start for _, start, stop in parts]))


def row_in_torch(
    case: Case, q: Tensor, position: int, keys: Tensor, values: Tensor, scales: Tensor, slot: Tensor, base: Tensor
) -> Tensor:
    """q [Hq, D] over keys, values [n, Hkv, D] and scales of values [n, Hkv], at slots of pages that begin at base."""
    window, softcap, sinks = (case.options.get(name) for name in ("window", "softcap", "sinks"))
    dtype = q.dtype if case.layout.scaled else case.layout.dtype
    behind = position - base - slot
    seen = (behind >= 0) & (behind < (window or math.inf))
    if not seen.any():
        return torch.zeros(q.shape)
    block = position - position % PAGE
    query = turned(q.float(), position % PAGE, case.rope, case.rope.factor)
    score = torch.empty(q.shape[0], int(seen.sum()))
    keys, values, scales, base = keys[seen], values[seen], scales[seen], base[seen]
    for start in base.unique().tolist():
        at = base == start
        each = turned(query, block - start, case.rope).to(dtype).float()
        grouped = each.unflatten(0, (keys.shape[1], -1))
        score[:, at] = (grouped @ keys[at].permute(1, 2, 0)).flatten(0, 1)
    score = score * case.scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    largest = score.amax(1, keepdim=True)
    weight = torch.exp(score - largest)
    total = weight.to(dtype).float().sum(1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None] - largest)
    scaled = (weight.unflatten(0, (keys.shape[1], -1)) * scales.T[:, None]).to(dtype).float()
    y = scaled @ values.transpose(0, 1)
    return y.flatten(0, 1) / total


def turned(q: Tensor, distance: int, turns: RopeTable, factor: float = 1.0) -> Tensor:
    half = turns.rot_dim // 2
    cos, sin = (factor * t[distance - MIN_DISTANCE] for t in (turns.cos, turns.sin))
    a, b, rest = q.split((half, half, q.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def relative_errors(y: Tensor, exact: Tensor) -> Tensor:
    """Of every row and head, its error's norm in that of the exact one."""
    assert y.shape == exact.shape and exact.dtype == torch.float64
    size = exact.norm(dim=-1)
    return (y.double() - exact).norm(dim=-1) / size.where(size > 0, 1.0)


def assert_values(case: Case, ys: Sequence[Tensor], *parts: Part, layer: int = 0) -> None:
    exact, plain = (torch.cat(list(run(*parts, layer=layer))) for run in (case.exact, partial(in_torch, case)))
    assert_no_worse_rows(case, torch.cat(list(ys)), exact, plain)


def assert_no_worse_rows(case: Case, y: Tensor, exact: Tensor, plain: Tensor) -> None:
    """The worst row's relative error is at most 1.5 times that of a plain run in torch, rounded to the same dtypes.

    float32 has a slack besides: torch adds up in several sums, the interpreter in one of at most 64 products a page,
    and a capped score 1 - 2 / (exp(2 x) + 1) has an absolute error of some last places of 1, times the cap.
    """
    slack = 0.0
    if (case.q[0].dtype if case.layout.scaled else case.layout.dtype) == torch.float32:
        slack = 2.0**-23 * (8 + 4 * case.options.get("softcap", 0.0))
    error, allowed = relative_errors(y, exact).max().item(), 1.5 * relative_errors(plain, exact).max().item() + slack
    assert error <= allowed, f"relative error {error:.3g} against float64, expected at most {allowed:.3g}"


def variants(axes: Mapping[str, Sequence[Any]], some: int) -> list[Any]:
    """Few of all choices, every two values together at least once: as many by default as told, which have every value
    about as often, and the rest if asked for."""
    chosen = [c for c in pairwise(axes) if not (c.get("arch") == 80 and c.get("dtype") == torch.float8_e4m3fn)]
    names = ["-".join(str(v).removeprefix("torch.") for v in c.values()) for c in chosen]
    waiting, default, met = list(range(len(chosen))), set(), Counter[tuple[str, str]]()
    for _ in range(min(some, len(chosen))):
        best = min(waiting, key=lambda i: sum(met[axis, str(value)] for axis, value in chosen[i].items()))
        waiting.remove(best)
        default.add(best)
        met.update((axis, str(value)) for axis, value in chosen[best].items())
    marks = [() if i in default else (pytest.mark.slow,) for i in range(len(chosen))]
    return [pytest.param(c, id=name, marks=m) for c, name, m in zip(chosen, names, marks, strict=True)]


def slow(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


# ---- values ------------------------------------------------------------------------------------------

WINDOWS = (None, 1, 63, 64, 65, 128)
KINDS_OF_SCORE: tuple[dict[str, Any], ...] = ({}, {"softcap": 50.0}, {"softcap": 2.0}, {"sinks": 2.0})
SHORT = {
    "heads": ((4, 4), (8, 2), (5, 1), (9, 3), (14, 2), (32, 8)),
    "dim": (8, 64, 80, 96, 128, 256),
    "length": (1, 63, 64, 65),
    "window": WINDOWS,
    "kind": KINDS_OF_SCORE,
    "dtype": DTYPES,
    "arch": (90, 80),
}
LONG = {
    "heads": ((5, 1), (2, 1), (1, 1)),
    "dim": SHORT["dim"],
    "length": (511, 512, 513, 1328, 2011),
    "window": WINDOWS,
    "kind": KINDS_OF_SCORE,
    "dtype": DTYPES,
}


def assert_values_of(chosen: Mapping[str, Any], *, beside: int = 0, races: bool = False) -> None:
    """The last rows of a sequence, and of a shorter one beside it."""
    heads, length = (*chosen["heads"], chosen["dim"]), chosen["length"]
    lengths = [length, beside] if beside else [length]
    case = make(heads, lengths, chosen["dtype"], out_dtype=None, window=chosen["window"], **chosen["kind"])
    parts = [(s, max(0, n - 2), n) for s, n in enumerate(lengths)]
    with interpreted(chosen.get("arch", 90), races=races), cut(ALL_WHOLE if races else None):
        y = case.run(*parts)
    assert_values(case, y, *parts)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("chosen", variants(SHORT, 14))
def test_values_of_short_sequences(chosen: dict[str, Any]) -> None:
    assert_values_of(chosen, beside=2, races=chosen["dim"] <= 80)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("chosen", variants(LONG, 5))
def test_values_of_long_sequences(chosen: dict[str, Any]) -> None:
    assert_values_of(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("length", [*SHORT["length"], *LONG["length"]])
@pytest.mark.parametrize("dim", SHORT["dim"])
@pytest.mark.parametrize("heads", SHORT["heads"], ids=str)
def test_values_everywhere(heads: tuple[int, int], dim: int, length: int) -> None:
    rng = random.Random(f"{heads}{dim}{length}")
    chosen = {axis: rng.choice(SHORT[axis]) for axis in ("window", "kind", "dtype")}
    assert_values_of({"heads": heads, "dim": dim, "length": length, **chosen}, beside=rng.randint(1, 200))


@pytest.mark.parametrize("entries", [EVICTED, TRIMMED, PIECES], ids=["evicted", "trimmed", "pieces"])
@pytest.mark.parametrize("window", [None, *slow(40)])
def test_values_on_lists_that_are_not_canonical(entries: list[Entry], window: int | None) -> None:
    case = make((2, 1, 16), [entries], torch.float16, window=window)
    num = len(case.q[0])
    parts = [(0, 0, 3), (0, num - 20, num)]
    with ordered(races=True):
        for part in parts:
            y = case.run(part)
            assert_values(case, y, part)
            assert_same_bits(case.run((0, part[2] - 1, part[2]))[0], y[0][-1:])


@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.bfloat16, torch.int8], ids=str)
def test_values_at_the_largest_distances(dtype: torch.dtype) -> None:
    """Of a list that ends at position 131071; its first page stands 131008 from the last row's block."""
    entries = [(0, 0, 64), (64, 0, 64), (65536 - 20, 20, 64), (131072 - 64, 0, 64)]
    case = make((2, 1, 32), [entries, canonical(100, 131072 - 128)], dtype, table=rope(32, max_position=131072))
    parts = [(0, 234, 236), (0, 70, 72), (1, 98, 100)]
    with ordered(races=True):
        y = case.run(*parts)
        assert_values(case, y, *parts)
        assert_same_bits(y[0], case.run(parts[0])[0])


# error by root mean square of a number rounded, relative to numbers of size 1: codes as in test_attention; else half a
# last place, evenly distributed
ROUNDING = {
    **CODED,
    torch.bfloat16: 2.0**-8 / math.sqrt(12),
    torch.float16: 2.0**-11 / math.sqrt(12),
    torch.float32: 2.0**-23,
}


@pytest.mark.parametrize(
    ("heads", "dtype", "rot_dim", "factor", "window"),
    [
        pytest.param((2, 1, 16), torch.float32, 8, 1.3, None, marks=pytest.mark.slow),
        ((4, 2, 24), torch.bfloat16, 8, 1.2, 40),
        pytest.param((2, 1, 64), torch.float16, 64, 1.0, None, marks=pytest.mark.slow),
        ((2, 1, 64), torch.int8, 64, 1.1, None),
        pytest.param((2, 1, 64), torch.float8_e4m3fn, 32, 1.0, 65, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_of_what_was_appended(
    heads: tuple[int, int, int], dtype: torch.dtype, rot_dim: int, factor: float, window: int | None
) -> None:
    """Against attention without pages, of the numbers that were given: rotation in parts, and YaRN's factor, once each.

    The bound: a score, of size 1, has the errors of a rounded query, of the key and twice of the rotation; then come a
    value's, a weight's and a result's.
    """
    with interpreted(90), np.errstate(all="ignore"):
        case = appended(heads, [72], table=rope(rot_dim, factor), dtype=dtype)
        rows = torch.tensor([0, 1, 63, 64, 70, 71])
        y = torch.cat([case.run((0, r, r + 1), window=window)[0] for r in rows.tolist()])
    exact = plain_attention(case, 0, rows, window, torch.float64)
    compute = torch.float32 if case.layout.scaled else dtype  # of the query that it was given
    assert_close(y, exact, factor**2 * math.sqrt(2 * ROUNDING[dtype] ** 2 + 5 * ROUNDING[compute] ** 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rot_dim", "factor"), [(8, 1.0), (16, 1.4), (24, 0.7)])
def test_values_with_partial_rotation_and_yarns_factor(rot_dim: int, factor: float, dtype: torch.dtype) -> None:
    case = make((2, 1, 24), [130], dtype, table=rope(rot_dim, factor))
    with ordered(races=True):
        y = case.run((0, 60, 66))
    assert_values(case, y, (0, 60, 66))


def test_a_query_of_another_dtype_is_rounded_once() -> None:
    """And results have its dtype unless `out` has another."""
    case = make((2, 1, 16), [70], torch.bfloat16, q_dtype=torch.float32, out_dtype=torch.float16)
    inputs = case.inputs((0, 60, 70))
    with ordered(races=True):
        y = paged_attention(*inputs, scale=case.scale)
        assert y.dtype == torch.float32
        half = case.run((0, 60, 70))
        assert_values(case, half, (0, 60, 70))
        assert_same_bits(half[0], y.half())
        out = torch.full((10, 4, 16), math.nan)[:, 1:3]
        assert paged_attention(*inputs, scale=case.scale, out=out) is out
    assert_same_bits(out.contiguous(), y)


# ---- the bits of a row -------------------------------------------------------------------------------

# few heads and short queries, as the order of sums does not know how many there are
HEADS = ((2, 1, 16), (2, 2, 8), (5, 1, 24), (4, 2, 64), (2, 1, 80), (2, 1, 128), (1, 1, 256))
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "window 1": {"window": 1},
    "window 63": {"window": 63},
    "window 64": {"window": 64},
    "window 65": {"window": 65},
    "window 128": {"window": 128},
    "window 500": {"window": 500},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": 2.0},
    "all of it": {"window": 300, "softcap": 50.0, "sinks": 2.0},
}
AXES = {"heads": HEADS, "dtype": DTYPES, "options": tuple(OPTIONS), "arch": (90, 80)}


def make_variant(chosen: Mapping[str, Any], sequences: Sequence[int | list[Entry]], **more: Any) -> Case:
    return make(chosen["heads"], sequences, chosen["dtype"], **OPTIONS[chosen["options"]], **more)


def assert_rows(case: Case, expected: Tensor, first: int, ys: Sequence[Tensor], *parts: Part) -> None:
    """Rows of sequence 0 among the results of parts are those expected of it from `first` on."""
    for y, (s, start, stop) in zip(ys, parts, strict=True):
        if s == 0:
            assert_same_bits(y, expected[start - first : stop - first], f"rows {start}..{stop} in {parts}")


@pytest.mark.parametrize("chosen", variants(AXES, 2))
def test_a_row_has_its_bits_in_any_company(chosen: dict[str, Any]) -> None:
    """Alone, in a chain over a chunk's edge, in a batch; split or whole; in tiles of 16 or 32."""
    case = make_variant(chosen, [515, 70, EVICTED])
    first, num = 507, 515
    batch = [(1, 68, 70), (0, first, num), (2, 60, 63)]
    with ordered(chosen["arch"], races=True):
        whole = case.run((0, first, num))[0]
        assert_values(case, [whole], (0, first, num))
        for part in ((0, 511, 512), (0, 512, 513), (0, 510, 514)):
            assert_rows(case, whole, first, case.run(part), part)
        together = []
        for longest, rows in ((ALL_WHOLE, 16), (ALL_SPLIT, 32)):
            with cut(longest, rows, chosen["arch"]):
                together.append(case.run(*batch))
            assert_rows(case, whole, first, together[-1], *batch)
        assert_values(case, together[0], *batch)
        for a, b in zip(*together, strict=True):
            assert_same_bits(a, b, "split and whole")


@pytest.mark.parametrize("edge", [64, *slow(512)])
def test_a_chain_of_any_length_is_decode(edge: int) -> None:
    case = make((3, 1, 16), [edge + 17], torch.float16)
    with ordered(), cut(ALL_WHOLE):
        alone = torch.cat([case.run((0, p, p + 1))[0] for p in range(edge - 16, edge + 16)])
        assert_values(case, [alone], (0, edge - 16, edge + 16))
        for count in range(1, 17, 3 if edge == 64 else 1):
            part = (0, edge - count % 5 - count // 2, edge - count % 5 - count // 2 + count)
            assert_rows(case, alone, edge - 16, case.run(part), part)


@pytest.mark.parametrize(
    "options",
    [{"window": 100}, *slow({}, {"softcap": 5.0, "sinks": 1.0})],
    ids=str,
)
def test_prefill_in_chunks_is_prefill(options: dict[str, Any]) -> None:
    case = make((1, 1, 8), [548], torch.float16, **options)
    first, num = 478, 548
    with ordered(races=bool(options)), cut(ALL_WHOLE):
        whole = case.run((0, first, num))[0]
        assert_values(case, [whole], (0, first, num))
        for size, start, stop in ((1, 511, 513), (7, 505, 519), (40, first, num), (64, first, num)):
            edges = [*range(start, stop, size), stop]
            parts = [(0, a, b) for a, b in itertools.pairwise(edges)]
            rows = torch.cat([case.run(part)[0] for part in parts])
            assert_same_bits(rows, whole[start - first : stop - first], f"chunks of {size}")
    with ordered(), cut(ALL_SPLIT):
        assert_same_bits(case.run((0, 500, 520))[0], whole[22:42], "split")


def test_prefill_from_the_start_is_token_by_token() -> None:
    case = make((2, 1, 8), [80])
    with ordered(races=True):
        whole = case.run((0, 0, 80))[0]
        assert_values(case, [whole], (0, 0, 80))
        rows = [case.run((0, p, p + 1))[0] for p in range(58, 70)]
    assert_same_bits(torch.cat(rows), whole[58:70])


# 1 goes on from two chunks of 0, 2 from one; 3 is alone, and 4 has less than a chunk with the others
BRANCHING: list[int | list[Entry]] = [1027, 1060, 520, 70, 330]
BRANCHES_OF = {1: (0, 16), 2: (0, 8), 4: (0, 5)}


@pytest.mark.parametrize(
    ("heads", "dtype", "options"),
    [
        ((2, 1, 16), torch.bfloat16, {}),
        pytest.param((2, 1, 8), torch.float32, {"softcap": 3.0, "sinks": 2.0}, marks=pytest.mark.slow),
        pytest.param((5, 1, 24), torch.int8, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_read_together_changes_nothing(
    heads: tuple[int, int, int], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    case = make(heads, BRANCHING, dtype, shared=BRANCHES_OF, **options)
    counts = (1, 2, 2, 1, 1)
    parts = [(s, len(q) - count, len(q)) for s, (q, count) in enumerate(zip(case.q, counts, strict=True))]
    with ordered(races=True):
        with cut(ALL_WHOLE) as plans:
            together = case.run(*parts, cascade=True)
        assert {(int(a), int(b)) for a, b in plans[-1].shared.items[:, 2:]} == {(0, 8), (8, 16)}
        assert_values(case, together, *parts)
        with cut(ALL_WHOLE) as plans:
            for y, expected in zip(case.run(*parts, cascade=False), together, strict=True):
                assert_same_bits(y, expected, "without sharing")
        assert not len(plans[-1].shared.items)
    with ordered(), cut(ALL_WHOLE, 32):
        for y, i in zip(case.run(parts[2], parts[1], cascade=True), (2, 1), strict=True):
            assert_same_bits(y, together[i], f"{parts[i]} in other company")


def test_rows_of_one_tile_may_stand_in_different_blocks() -> None:
    """A shared tile's rows have each its own distance to a page."""
    case = make((1, 1, 16), [600, 530, 700], torch.float32, shared={1: (0, 8), 2: (0, 8)})
    parts = [(0, 540, 545), (1, 529, 530), (2, 640, 647)]
    with ordered(races=True), cut(ALL_WHOLE) as plans:
        together = case.run(*parts)
        assert len(plans[-1].shared.rows) == 1
        assert_values(case, together, *parts)
        assert_same_bits(torch.cat(case.run(*parts, cascade=False)), torch.cat(together))


@pytest.mark.parametrize("dtype", [*slow(torch.float16), torch.float8_e4m3fn], ids=str)
def test_where_pages_lie_changes_nothing(dtype: torch.dtype) -> None:
    cases = [make((2, 1, 16), [200, 70], dtype, order=order, layers=2) for order in (0, 1)]
    assert cases[0].lists != cases[1].lists
    parts = [(1, 60, 70), (0, 190, 200)]
    with ordered(races=True):
        for layer in (0, 1):
            a, b = (case.run(*parts, layer=layer) for case in cases)
            assert_values(cases[0], a, *parts, layer=layer)
            assert_same_bits(torch.cat(a), torch.cat(b))


@pytest.mark.parametrize("dtype", [*slow(torch.bfloat16), torch.int8], ids=str)
def test_copies_of_pages_and_rows_serve_as_well(dtype: torch.dtype) -> None:
    """Rollback: pages that still hold the tokens taken back. Clone: copied pages. Commit: rows that lay elsewhere."""
    case = make((2, 1, 16), [140, 64], dtype, layers=2, spare=3)
    part = (0, 125, 135)
    with ordered(races=True):
        expected = case.run(part, layer=1)[0]
        assert_values(case, [expected], part, layer=1)
        pages = [entry[0] for entry in case.lists[0]]
        copy_pages(case.arena, case.layout, pages, case.spare)
        case.lists[0] = [(page, *entry[1:]) for page, entry in zip(case.spare, case.lists[0], strict=True)]
        for page in pages:
            case.layout.blocks(case.arena)[page] = 0xFF
        assert_same_bits(case.run(part, layer=1)[0], expected, "clone")
        scratch = [(case.lists[1][0][0], slot) for slot in random.Random(1).sample(range(PAGE), 7)]
        committed = [(case.spare[2], slot) for slot in range(7)]
        commit_path(case.arena, case.layout, committed, scratch)
        case.layout.blocks(case.arena)[case.spare[2]] = 0xFF
        commit_path(case.arena, case.layout, scratch, committed)
        assert_same_bits(case.run(part, layer=1)[0], expected, "commit")


# ---- the bits of a node ------------------------------------------------------------------------------

BRANCHES = [-1, 0, 0, 1, -1, 4, 3, 6]  # two roots, three leaves, five levels
CHAIN = list(range(-1, 5))
NO_COMMITTED: list[Entry] = []


def random_parents(num_nodes: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(max(-1, i - rng.choice([1, 1, 1, 3, 8])), i - 1) for i in range(num_nodes)]


@dataclass
class Drafted:
    """Committed sequences, and behind each a tree whose nodes lie in scratch pages, in no order."""

    case: Case
    trees: list[Tree]
    q: Tensor  # [T, Hq, D]
    places: list[tuple[int, int]]  # of the nodes: page id, slot

    def table(self, *seqs: int) -> PageTable:
        lists = [self.case.lists[s] for s in seqs]
        table = table_of([entries or [(0, 0, 0, 0)] for entries in lists])
        return garbage_behind(replace(table, n=int32([len(entries) for entries in lists])))

    def rows(self, s: int) -> slice:
        start = sum(len(t.parent) for t in self.trees[:s])
        return slice(start, start + len(self.trees[s].parent))

    def inputs(self, *seqs: int) -> tuple[Any, ...]:
        rows = [r for s in seqs for r in range(self.rows(s).start, self.rows(s).stop)]
        page, slot = int32([self.places[r] for r in rows]).T.contiguous()
        chosen = [self.trees[s] for s in seqs]
        return self.q[rows], self.case.arena, self.case.layout, 0, self.table(*seqs), chosen, page, slot, self.case.rope

    def run(self, *seqs: int, **options: Any) -> list[Tensor]:
        seqs = seqs or tuple(range(len(self.trees)))
        inputs, case = self.inputs(*seqs), self.case
        y = tree_attention(*inputs, scale=case.scale, out=case.new_out(inputs[0]), **case.options, **options)
        return list(y.split([len(self.trees[s].parent) for s in seqs]))

    def exact(self) -> Tensor:
        inputs = list(self.inputs(*range(len(self.trees))))
        inputs[5] = [t.parent.tolist() for t in self.trees]
        return tree_attention_ref(*inputs, scale=self.case.scale, by_kernels=True, **self.case.options)

    def path_as_case(self, s: int, path: list[int]) -> Case:
        """A sequence as plain decoding of a path would leave it; `path` are its last tokens."""
        case, nodes = self.case, self.rows(s)
        arena, listed, positions = case.arena.clone(), list(case.lists[s]), list(case.positions[s])
        after = replace(case, arena=arena)
        spare = list(case.spare)
        if listed and listed[-1][3] < PAGE:  # clone the page that is written to
            page, (old, *span) = spare.pop(), listed[-1]
            case.layout.blocks(arena)[page] = case.layout.blocks(arena)[old]
            listed[-1] = (page, *span)
        q = [case.q[s]]
        for node in path:
            if not listed or listed[-1][3] == PAGE:
                listed.append((spare.pop(), listed[-1][1] + PAGE if listed else 0, 0, 0))
            page, base, lo, hi = listed[-1]
            after.copy_rows([self.places[nodes.start + node]], [(page, hi)])
            listed[-1] = (page, base, lo, hi + 1)
            positions.append(base + hi)
            q.append(self.q[nodes.start + node][None])
        return replace(after, lists=[listed], positions=[positions], q=[torch.cat(q)])

    def check(self, *, leaves: int = 10**9) -> list[Tensor]:
        """Nodes are plain decoding of their paths: those of the first leaves as chains, and the last one alone."""
        ys = self.run()
        self.assert_values(torch.cat(ys))
        for s, y in enumerate(ys):
            paths = [[n for n in path if n >= 0] for path in self.trees[s].paths.tolist()]
            for leaf, path in enumerate(paths[:leaves]):
                own = [n for n in path if self.trees[s].owner[n] == leaf]
                end, decoded = len(self.case.positions[s]) + len(path), self.path_as_case(s, path)
                rows = decoded.run((0, end - len(own), end))[0]
                assert_same_bits(y[own], rows, f"sequence {s}, leaf {leaf}: {path}")
            if leaves > 1 or s == 0:
                assert_same_bits(y[path[-1:]], decoded.run((0, end - 1, end))[0], f"sequence {s}, {path[-1]} alone")
        return ys

    def assert_values(self, y: Tensor) -> None:
        """As of rows; the plain run in torch has every path as a sequence of its own."""
        exact, plain = self.exact(), torch.empty_like(y)
        for s, t in enumerate(self.trees):
            for path in t.paths.tolist():
                path = [n for n in path if n >= 0]
                decoded, end = self.path_as_case(s, path), len(self.case.positions[s]) + len(path)
                plain[self.rows(s)][path] = in_torch(decoded, (0, end - len(path), end))[0]
        assert_no_worse_rows(self.case, y, exact, plain)


def draft(
    heads: tuple[int, int, int],
    sequences: Sequence[int | list[Entry]],
    parents: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.bfloat16,
    *,
    size: float = 6.0,
    **options: Any,
) -> Drafted:
    """size: of the nodes' keys beside those of committed tokens; a key that leaks takes much of the weight."""
    pages = [-(-len(p) // PAGE) for p in parents]
    case = make(heads, sequences, dtype, spare=sum(pages) + 3, **options)
    rng, gen = random.Random(0), torch.Generator().manual_seed(1)
    places = []
    for p, count in zip(parents, pages, strict=True):
        scratch = [case.spare.pop() for _ in range(count)]
        places += rng.sample(list(itertools.product(scratch, range(PAGE))), len(p))
    for page, slot in places:
        case.fill(page, slot, slot + 1, gen)
        stored = case.layout.scales(case.arena, 0) if case.layout.scaled else case.layout.view(case.arena, 0)
        stored[page, 0, :, slot] *= size
    q_dtype = torch.bfloat16 if case.layout.scaled else dtype
    q = torch.randn(len(places), heads[0], heads[2], generator=gen).to(q_dtype)
    return Drafted(case, [token_tree(p) for p in parents], q, places)


@pytest.mark.parametrize(
    ("prefix", "window"),
    [(0, None), (63, None), (60, 3), (126, 64)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((1, None), (64, None), (0, 1))],
)
def test_a_node_is_decoding_of_its_path(prefix: int, window: int | None) -> None:
    with ordered(races=True):
        draft((2, 1, 16), [prefix or NO_COMMITTED], [BRANCHES], window=window).check()


@pytest.mark.parametrize("prefix", [509, 512, *slow(448, 511)])
def test_a_node_is_decoding_of_its_path_at_a_chunks_edge(prefix: int) -> None:
    """The tail goes on in the unfinished chunk of the last full page, and may close it; or begins a chunk."""
    with ordered(races=prefix == 509), cut(ALL_WHOLE):
        draft((1, 1, 16), [prefix], [BRANCHES]).check(leaves=2)


@pytest.mark.parametrize("prefix", [449, 510, *slow(470, 491, 1023, 1024)])
def test_a_node_is_decoding_of_its_path_in_a_window(prefix: int) -> None:
    """A window's first entry lies in the tail's chunk or in the one before."""
    with ordered(), cut(ALL_WHOLE):
        draft((2, 1, 16), [prefix], [random_parents(10, prefix)], torch.float32, window=90).check(leaves=2)


TREE_AXES = {
    "heads": HEADS[1:],
    "dtype": DTYPES,
    "options": tuple(OPTIONS),
    "sequences": ("60, none", "evicted, 64", "pieces, trimmed", "none, 3, 66"),
}
SEQUENCES: dict[str, list[int | list[Entry]]] = {
    "60, none": [60, NO_COMMITTED],
    "evicted, 64": [EVICTED, 64],
    "pieces, trimmed": [PIECES, TRIMMED],
    "none, 3, 66": [NO_COMMITTED, 3, 66],
}


@pytest.mark.parametrize("chosen", variants(TREE_AXES, 2))
def test_a_node_is_decoding_of_its_path_beside_other_trees(chosen: dict[str, Any]) -> None:
    sequences = SEQUENCES[chosen["sequences"]]
    parents = [random_parents(6, len(sequences) + i) for i in range(len(sequences))]
    drafted = draft(chosen["heads"], sequences, parents, chosen["dtype"], **OPTIONS[chosen["options"]])
    with ordered(races=True), cut(ALL_WHOLE):
        together = drafted.check(leaves=1)
        assert_same_bits(drafted.run(1)[0], together[1], "alone")
        with cut(None, 32):
            assert_same_bits(drafted.run(0)[0], together[0], "tiles of 32")


def test_a_chain_is_a_tree() -> None:
    drafted = draft((2, 1, 16), [505], [range(-1, 13)], torch.float16)
    with ordered(races=True), cut(ALL_WHOLE):
        decoded = drafted.path_as_case(0, list(range(14)))
        y = drafted.run()[0]
        drafted.assert_values(y)
        assert_same_bits(y, decoded.run((0, 505, 519))[0])


def test_trees_behind_shared_pages_read_them_together() -> None:
    drafted = draft((2, 1, 16), [530, 514], [BRANCHES, CHAIN], shared={1: (0, 8)})
    with ordered(races=True), cut(ALL_WHOLE):
        together = drafted.run(cascade=True)
        drafted.assert_values(torch.cat(together))
        assert_same_bits(torch.cat(drafted.run(cascade=False)), torch.cat(together))
        assert_same_bits(drafted.run(1)[0], together[1])


@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter's maximum, of rows that are all NaN
def test_siblings_that_would_win_change_nothing() -> None:
    """Whatever is no ancestor becomes NaN, or a key and value that would take all the weight."""
    drafted = draft((2, 1, 16), [62], [BRANCHES], torch.float32)
    case, t = drafted.case, drafted.trees[0]
    with ordered(races=True):
        expected = drafted.run()[0]
        drafted.assert_values(expected)
        view = case.layout.view(case.arena, 0)
        stored = [view[place[0], :, :, place[1]].clone() for place in drafted.places]
        for leaf, path in enumerate(t.paths.tolist()):
            path = [n for n in path if n >= 0]
            for node in path if leaf == 0 else path[-1:]:
                above = path[: path.index(node) + 1]
                for other in set(range(len(t.parent))) - set(above):
                    page, slot = drafted.places[other]
                    worst = math.nan if other not in path else 1e9  # what lies on the leaf's path is loaded, and masked
                    view[page, :, :, slot] = stored[other] * worst
                assert_same_bits(drafted.run()[0][node], expected[node], f"node {node}")
                for other, (page, slot) in enumerate(drafted.places):
                    view[page, :, :, slot] = stored[other]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.int8)], ids=str)
def test_a_tree_may_grow(dtype: torch.dtype) -> None:
    """A part at a time, some leaves without rows: the bits of the whole trees."""
    drafted = draft((2, 1, 16), [NO_COMMITTED, 63, 509], [BRANCHES, BRANCHES, CHAIN], dtype, window=70)
    case, stored, table = drafted.case, [0, 0, 0], drafted.table(0, 1, 2)
    nodes, blocks = int32(drafted.places), case.layout.blocks(case.arena)
    views = [case.layout.view, *([case.layout.scales] if case.layout.scaled else [])]
    with ordered(races=True):
        whole = torch.cat(drafted.run())
        kept = case.arena.clone()
        blocks[nodes[:, 0].unique().long()] = 0xFF
        for ends in ([1, 2, 1], [3, 5, 4], [8, 8, 6]):
            parents = [t.parent[:end].tolist() for t, end in zip(drafted.trees, ends, strict=True)]
            trees = [token_tree(parent, n) for parent, n in zip(parents, stored, strict=True)]
            every = torch.cat([8 * s + torch.arange(n) for s, n in enumerate(ends)])
            rows, (page, slot) = every[computed_nodes(trees)], nodes[every].T.contiguous()
            given = drafted.q[rows], case.arena, case.layout, 0, table, trees, page, slot, case.rope
            for at, node_slot in nodes[rows].tolist():
                for view in views:
                    view(case.arena, 0)[at, :, :, node_slot] = view(kept, 0)[at, :, :, node_slot]
            y = tree_attention(*given, scale=case.scale, out=case.new_out(given[0]), **case.options)
            assert_same_bits(y, whole[rows], f"nodes {rows.tolist()}")
            need = tree_attention_workspace_nbytes(drafted.q[rows], case.layout, table, trees, 70)
            assert 0 < need <= tree_attention_workspace_nbytes(drafted.q, case.layout, table, drafted.trees, 70)
            stored = ends


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, *range(448, 513), 1024])
def test_random_trees_behind_any_prefix(prefix: int) -> None:
    with ordered():
        draft((3, 1, 16), [prefix or NO_COMMITTED], [random_parents(40, prefix)]).check()


# ---- what must not be read, and what is not there ----------------------------------------------------

INF = {torch.bfloat16: b"\x80\x7f", torch.float16: b"\x00\x7c"}


def fill_of(name: str, dtype: torch.dtype) -> bytes:
    return {"NaN": b"\xff", "inf": INF.get(dtype, b"\0\0\x80\x7f"), "numbers": b"\x42"}[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, *slow(torch.float16, torch.float32, CODES[1])], ids=str)
def test_unused_slots_pages_and_scratch_change_nothing(dtype: torch.dtype) -> None:
    ys = []
    for name in ("NaN", "numbers" if dtype in CODES else "inf"):
        fill = fill_of(name, dtype)
        case = make((2, 1, 16), [EVICTED, PIECES], dtype, fill=fill, softcap=20.0)
        num = len(case.q[0])
        parts = [(0, num - 2, num), (1, 40, 42)]
        before, space = case.arena.clone(), Workspace()
        with ordered(races=name == "NaN"), cut(ALL_SPLIT):
            q, _, layout, _, table, cu_rows, row_pos, _ = case.inputs(*parts)
            need = attention_workspace_nbytes(q, layout, table, cu_rows, row_pos)
            assert need == 4 * len(q) * 2 * (16 + 2)
            space.scratch = torch.frombuffer(bytearray(fill * ((need + 64) // len(fill))), dtype=torch.uint8)
            behind = space.scratch[need:].clone()
            y = case.run(*parts, workspace=space)
        assert_values(case, y, *parts)
        assert_same_bits(space.scratch[need:], behind, "behind the slots")
        assert_same_bits(case.arena, before, "pages")
        ys.append(torch.cat(y))
    assert_same_bits(ys[1], ys[0])


@pytest.mark.parametrize("dtype", [*slow(torch.bfloat16), torch.int8], ids=str)
def test_unused_slots_of_trees_change_nothing(dtype: torch.dtype) -> None:
    ys = []
    for name in ("NaN", "inf") if dtype in HALVES else ("NaN", "numbers"):
        drafted = draft((2, 1, 16), [TRIMMED, NO_COMMITTED], [BRANCHES, CHAIN], dtype, fill=fill_of(name, dtype))
        space = Workspace()
        space.scratch = torch.full((1 << 16,), 0xFF, dtype=torch.uint8)
        with ordered(races=name == "NaN"):
            ys.append(torch.cat(drafted.run(workspace=space)))
        drafted.assert_values(ys[-1])
    assert_same_bits(ys[1], ys[0])


def test_tokens_that_a_row_cannot_see_change_nothing() -> None:
    """Of the same page: huge keys and values. Keys of NaN too, which are loaded and masked."""
    case = make((2, 1, 16), [100, EVICTED], torch.bfloat16)
    view, num = case.layout.view(case.arena, 0), len(case.q[1])
    parts = [(0, 66, 80), (1, num - 5, num)]
    with ordered(races=True):
        expected = case.run(*parts)
        assert_values(case, expected, *parts)
        view[case.lists[0][1][0], :, :, 16:36] = 1e38
        view[case.lists[0][1][0], 0, :, 36:] = math.nan
        for page, _, lo, hi in case.lists[1]:  # slots that an evict has cut away still hold what they held
            view[page, :, :, :lo] = -1e38
            view[page, :, :, hi:] = 1e38
        y = case.run(*parts)
    for a, b in zip(y, expected, strict=True):
        assert_same_bits(a, b)


def test_entries_without_tokens_change_nothing() -> None:
    case = make((2, 1, 16), [200])
    part = (0, 195, 200)
    with ordered(races=True):
        expected = case.run(part)[0]
        assert_values(case, [expected], part)
        full = case.lists[0]
        for at, (base, lo, hi) in ((0, (-63, 7, 7)), (2, (64, 64, 64)), (3, (192, 0, 0))):
            case.lists[0] = [*full[:at], (case.spare[0], base, lo, hi), *full[at:]]
            q, arena, layout, layer, table, *rest = case.inputs(part)
            table = garbage_behind(table_of([case.lists[0]]))
            assert table.n.tolist() == [5]
            y = case.attend(q, arena, layout, layer, table, *rest)
            assert_same_bits(y, expected, f"an entry {at}")


@pytest.mark.parametrize(
    ("longest", "options"),
    [
        (ALL_WHOLE, {}),
        (ALL_WHOLE, {"softcap": 5.0, "sinks": 2.0}),
        (ALL_SPLIT, {"window": 40}),
        pytest.param(ALL_WHOLE, {"window": 40}, marks=pytest.mark.slow),
        pytest.param(ALL_SPLIT, {}, marks=pytest.mark.slow),
        pytest.param(ALL_SPLIT, {"softcap": 5.0, "sinks": 2.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_that_see_nothing_are_zero(longest: int, options: dict[str, Any]) -> None:
    case = make((2, 1, 16), [TRIMMED, 70, 5], **options)
    parts = [(0, 0, 3), (1, 62, 66), (2, 4, 5)]
    with ordered(races=True), cut(longest):
        seen = case.run(*parts)
        assert_values(case, seen, *parts)
        q, arena, layout, layer, table, cu_rows, row_pos, turns = case.inputs(*parts)
        row_pos[1] = 68  # before the first key
        table.n[2] = 0
        if options.get("window"):
            row_pos[2] = 500  # far behind the last one
        y = case.attend(q, arena, layout, layer, table, cu_rows, row_pos, turns)
    assert_same_bits(y[1], torch.zeros_like(y[1]))
    assert_same_bits(y[7], torch.zeros_like(y[7]))
    assert_same_bits(y[0], seen[0][0])
    assert_same_bits(y[2], torch.zeros_like(y[2]) if options.get("window") else seen[0][2])
    assert_same_bits(y[3:7], seen[1])


def test_sequences_without_rows_and_calls_without_any() -> None:
    case = make((2, 1, 16), [70, 10, 130])
    parts = [(0, 69, 70), (1, 8, 10), (2, 125, 130)]
    q, arena, layout, layer, table, _, row_pos, turns = case.inputs(*parts)
    keep = torch.tensor([0, *range(3, 8)])
    with ordered(races=True):
        expected = case.run(parts[0], parts[2])
        assert_values(case, expected, parts[0], parts[2])
        for cu_rows, rows in (([0, 1, 1, 6], keep), ([0, 0, 0, 5], keep[1:]), ([0, 1, 1, 1], keep[:1])):
            at = (arena, layout, layer, table, int32(cu_rows), row_pos[rows], turns)
            y = case.attend(q[rows], *at)
            assert_same_bits(
                y, torch.cat(expected)[6 - len(rows) :] if 0 not in rows else torch.cat(expected)[: len(rows)]
            )
        y = case.attend(q[:0], arena, layout, layer, table, int32([0] * 4), row_pos[:0], turns)
    assert y.shape == (0, 2, 16)


def test_layers_share_a_plan_and_its_scratch() -> None:
    """Layers of one forward that differ in their window, or in what else a plan does not know."""
    case = make((2, 1, 16), [70, 10], layers=3)
    parts = [(0, 62, 66), (1, 9, 10)]
    q, arena, layout, _, table, cu_rows, row_pos, turns = case.inputs(*parts)
    space = Workspace()

    def run(layer: int, table: PageTable, turns: RopeTable = turns) -> Tensor:
        return case.attend(q, arena, layout, layer, table, cu_rows, row_pos, turns, workspace=space)

    with ordered(races=True), cut(ALL_SPLIT) as plans:
        for layer, options, made in ((0, {}, 1), (1, {"window": 40}, 1), (2, {}, 0), (2, {"softcap": 5.0}, 0)):
            case.options = options
            expected = case.run(*parts, layer=layer)
            assert_values(case, expected, *parts, layer=layer)
            before = len(plans)
            assert_same_bits(run(layer, table), torch.cat(expected))
            assert len(plans) - before == made
        before = len(plans)
        with pytest.raises(ValueError, match=r"rows are up to 64 from a page, the rope table ends at 63"):
            run(2, table, rope(16, max_position=63))
        assert_same_bits(run(2, replace(table)), torch.cat(expected))  # another forward's: planned anew
        assert len(plans) - before == 1


# ---- refusals ----------------------------------------------------------------------------------------


def misaligned(x: Tensor, by: int) -> Tensor:
    """A copy of x whose address is so many bytes off."""
    raw = torch.empty(x.nbytes + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + by
    return raw[start : start + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


def apart(q: Tensor) -> Tensor:
    """Heads that are not one row."""
    return torch.zeros(*q.shape[:2], q.shape[2] + 8, dtype=q.dtype)[..., : q.shape[2]]


def test_paged_attention_refuses() -> None:
    case = make((2, 1, 16), [70])
    names = ("q", "arena", "layout", "layer", "table", "cu_rows", "row_pos", "rope")
    good = dict(zip(names, case.inputs((0, 60, 70)), strict=True))
    q, table, arena, row_pos, cu_rows = (good[name] for name in ("q", "table", "arena", "row_pos", "cu_rows"))
    num_ids = case.layout.num_ids(arena)

    def changed(name: str, column: int, value: int) -> PageTable:
        field = getattr(table, name).clone()
        field[0, column] = value
        return replace(table, **{name: field})

    aligned = r"must be float32, bfloat16 or float16, its tokens' heads contiguous and starting at multiples of 16"
    scratch = Workspace()
    scratch.scratch = torch.zeros(64, dtype=torch.uint8)
    odd = Workspace()
    odd.scratch = misaligned(torch.zeros(1 << 16, dtype=torch.uint8), 4)
    floats = Workspace()
    floats.scratch = torch.zeros(1 << 16)
    turns = rope(16)
    short = replace(turns, cos=turns.cos[: 63 + 63], sin=turns.sin[: 63 + 63])
    for change, message in (
        ({"q": q[..., :8]}, r"q is \(10, 2, 8\), expected \[T, a multiple of 1, 16\]"),
        ({"q": q[0]}, r"q is \(2, 16\), expected"),
        ({"q": q.double()}, rf"q {aligned} bytes, got torch.float64"),
        ({"q": apart(q)}, rf"q {aligned} bytes, got torch.bfloat16 with strides \(48, 24, 1\)"),
        ({"q": misaligned(q, 8)}, rf"q {aligned} bytes, got torch.bfloat16 with strides \(32, 16, 1\) and address"),
        ({"q": torch.zeros(10, 36, dtype=q.dtype)[:, :32].unflatten(1, (2, 16))}, rf"q {aligned}"),
        ({"q": q.float().requires_grad_()}, "an input requires grad"),
        ({"sinks": torch.zeros(2).requires_grad_()}, "an input requires grad"),
        ({"out": torch.zeros(9, 2, 16)}, r"out is \(9, 2, 16\), expected q's \(10, 2, 16\)"),
        ({"out": torch.zeros(10, 32)}, r"out is \(10, 32\), expected q's \(10, 2, 16\)"),
        ({"out": torch.zeros(10, 2, 16, dtype=torch.float64)}, rf"out {aligned} bytes, got torch.float64"),
        ({"out": misaligned(q, 2)}, rf"out {aligned}"),
        ({"out": apart(q)}, rf"out {aligned}"),
        ({"layer": 1}, r"layer 1 is not in 0\.\.0"),
        ({"layer": -1}, r"layer -1 is not in 0\.\.0"),
        ({"arena": arena.int()}, r"arena must be uint8 and hold at least 4096 bytes"),
        ({"arena": arena[:4000]}, r"arena must be uint8 and hold at least 4096 bytes, got torch.uint8 with 4000"),
        ({"arena": misaligned(arena, 4)}, "arena must be contiguous, on cpu and aligned to 16 bytes"),
        ({"layout": KVLayout(1, 1, 12, q.dtype), "q": q[..., :12].contiguous()}, "head_dim is 12, .* multiples of 8"),
        (
            {
                "layout": KVLayout(1, 1, 264, torch.bfloat16),
                "q": torch.zeros(10, 2, 264),
                "arena": torch.zeros(1 << 18, dtype=torch.uint8),
            },
            "head_dim is 264, kernels take multiples of 8 up to 256",
        ),
        ({"rope": rope(32)}, r"rope turns 32 dims up to position \d+, expected at most 16"),
        ({"rope": short}, r"rows are up to 64 from a page, the rope table ends at 62"),
        ({"row_pos": row_pos + 2112}, rf"rows are up to 2176 from a page, the rope table ends at {turns.max_position}"),
        ({"table": changed("base", 0, -63), "rope": rope(16, max_position=63)}, "rows are up to 127 from a page"),
        ({"table": changed("base", 0, -64)}, r"positions of slot 0 from -63 on"),
        ({"table": changed("ids", 1, num_ids)}, rf"page ids are in .*, expected 0\.\.{num_ids - 1}"),
        ({"table": changed("ids", 0, -1)}, r"page ids are in -1\.\."),
        ({"table": changed("span", 1, 65 << 8)}, r"slots up to 65 from position 0 on, expected lo <= hi <= 64"),
        ({"table": changed("span", 1, 9 | 6 << 8)}, r"expected lo <= hi <= 64"),
        ({"row_pos": row_pos.float()}, r"row_pos is float32, expected int32"),
        ({"row_pos": row_pos - 61}, r"row positions start at -1, expected 0 or more"),
        ({"row_pos": row_pos[1:]}, r"need cu_rows of 2 ending at 9|q has 10 rows, expected one for each of 9"),
        ({"cu_rows": cu_rows - 1}, r"need cu_rows of 2 ending at 10, got"),
        ({"cu_rows": cu_rows[:1]}, r"need cu_rows of 2 ending at 10"),
        ({"cu_rows": int32([1, 10])}, r"cu_rows must start at 0 and not decrease, got \[1, 10\]"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"softcap": 0.0}, "softcap must be above 0 and finite, got 0.0"),
        ({"softcap": math.inf}, "softcap must be above 0 and finite, got inf"),
        ({"softcap": math.nan}, "softcap must be above 0 and finite, got nan"),
        ({"sinks": torch.zeros(3)}, r"sinks are torch.float32 \(3,\) .* expected contiguous float32 \(2,\)"),
        ({"sinks": torch.zeros(4)[::2]}, r"with strides \(2,\), expected contiguous"),
        ({"rope": replace(turns, cos=turns.cos.T.contiguous().T)}, r"rope tables must be contiguous float32"),
        ({"table": replace(table, n=table.n + 99)}, r"lists have 101\.\.101 entries, expected 0\.\.\d+"),
        ({"table": changed("base", 1, 0)}, r"the entries of a list must ascend in position"),
        ({"sinks": torch.zeros(2, dtype=torch.bfloat16)}, r"sinks are torch.bfloat16 \(2,\)"),
        ({"workspace": scratch}, r"workspace must be \d+ bytes, 16-byte aligned, got 64"),
        ({"workspace": odd}, r"workspace must be \d+ bytes, 16-byte aligned, got 65536"),
        ({"workspace": floats}, r"workspace must be contiguous uint8 on cpu, got torch.float32"),
    ):  # fmt: skip
        with ordered(races=True), cut(ALL_SPLIT), pytest.raises(ValueError, match=message):
            paged_attention(**{**good, "scale": 1.0, **change})


def test_pages_of_float8_need_an_architecture_that_has_it() -> None:
    case = make((2, 1, 16), [70], torch.float8_e4m3fn)
    with ordered(80), pytest.raises(ValueError, match="paged_attention: pages of float8_e4m3fn need sm_89 or later"):
        case.run((0, 60, 70))
    drafted = draft((2, 1, 16), [70], [CHAIN], torch.float8_e4m3fn)
    with ordered(80), pytest.raises(ValueError, match="tree_attention: pages of float8_e4m3fn need sm_89 or later"):
        drafted.run()


def test_tree_attention_refuses() -> None:
    drafted = draft((2, 1, 16), [70, 3], [BRANCHES, CHAIN])
    names = ("q", "arena", "layout", "layer", "table", "trees", "node_page", "node_slot", "rope")
    good = dict(zip(names, drafted.inputs(0, 1), strict=True))
    q, table, page, slot = (good[name] for name in ("q", "table", "node_page", "node_slot"))
    num_ids = drafted.case.layout.num_ids(drafted.case.arena)
    far = replace(table, base=table.base + 64 * 40)
    scratch = Workspace()
    scratch.scratch = torch.zeros(64, dtype=torch.uint8)
    for change, message in (
        ({"q": q[..., :8]}, r"tree_attention: q is \(14, 2, 8\), expected \[T, a multiple of 1, 16\]"),
        ({"q": q[1:]}, r"q has 13 rows, expected one for each of 14 positions"),
        ({"q": misaligned(q, 4)}, r"tree_attention: q must be float32, bfloat16 or float16"),
        ({"out": q[1:]}, r"tree_attention: out is \(13, 2, 16\), expected q's"),
        ({"node_page": page[1:]}, r"node_page is torch.int32 \(13,\) and node_slot torch.int32 \(14,\)"),
        ({"node_page": page.long()}, r"node_page is torch.int64"),
        ({"node_page": page + num_ids}, rf"nodes lie in pages up to \d+, expected below {num_ids}"),
        ({"node_page": page - num_ids}, r"pages from -\d+ on .* expected page ids from 0 on"),
        ({"node_slot": slot + 64}, r"slots \d+\.\.\d+, expected .* slots in 0\.\.63"),
        ({"node_slot": slot - 64}, r"slots in 0\.\.63"),
        ({"trees": good["trees"][:1]}, r"1 trees for 2 page lists"),
        ({"table": far}, r"rows are up to \d+ from a page, the rope table ends at"),
        ({"table": replace(table, ids=table.ids - 999)}, r"page ids are in"),
        ({"layer": 1}, r"layer 1 is not in"),
        ({"window": 0}, r"window must be at least 1"),
        ({"softcap": -1.0}, r"softcap must be above 0"),
        ({"sinks": torch.zeros(1)}, r"sinks are"),
        ({"workspace": scratch}, r"tree_attention: workspace must be \d+ bytes"),
    ):
        with ordered(races=True), pytest.raises(ValueError, match=message):
            tree_attention(**{**good, "scale": 1.0, **change})


def test_a_sink_may_be_infinite() -> None:
    """Minus infinity is none, and infinity leaves nothing for the keys, as on the CPU path."""
    case = make((2, 1, 16), [70])
    for longest in (ALL_WHOLE, ALL_SPLIT):
        with ordered(races=True), cut(longest):
            plain = case.run((0, 60, 70))[0]
            case.options["sinks"] = torch.tensor([-math.inf, math.inf])
            y = case.run((0, 60, 70))[0]
            del case.options["sinks"]
        assert_same_bits(y[:, 0], plain[:, 0])
        assert_same_bits(y[:, 1], torch.zeros_like(y[:, 1]))


@pytest.mark.parametrize("softcap", [0.5, 50.0, 1e3, 1e6])
def test_a_softcap_of_any_size_keeps_its_digits(softcap: float) -> None:
    """Where scores are small beside it, 1 - 2 / (exp(2 x) + 1) alone would lose the score."""
    case = make((2, 1, 16), [40], dtype=torch.float32, softcap=softcap)
    with ordered(races=True):
        y = case.run((0, 20, 40))[0]
    exact = case.exact((0, 20, 40))[0]
    assert relative_errors(y, exact).max() < 2e-6


def test_scratch_for_trees_is_as_large_as_is_said() -> None:
    drafted = draft((2, 1, 16), [130, 3], [BRANCHES, CHAIN])
    q, _, layout, _, table, trees, *_ = drafted.inputs(0, 1)
    with ordered(races=True), cut(ALL_SPLIT):
        need = tree_attention_workspace_nbytes(q, layout, table, trees)
        expected = drafted.run(0, 1)
        space = Workspace()
        space.scratch = torch.full((need,), 255, dtype=torch.uint8)
        for y, same in zip(drafted.run(0, 1, workspace=space), expected, strict=True):
            assert_same_bits(y, same)
        space = Workspace()
        space.scratch = torch.zeros(need - 1, dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"workspace must be {need} bytes"):
            drafted.run(0, 1, workspace=space)
    assert tree_attention_workspace_nbytes(q, layout, table, trees) == 0
