"""csrc_triton/attention.py: values against the definition, and one row's bits in any company.

Unless a test says otherwise every byte of the arena that no token was stored in is NaN, page id 0 apart.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import ANY_THREADS, assert_close, assert_no_worse, assert_same_bits
from torch import Tensor

from csrc_triton.attention import PageTable, page_table, paged_attention, paged_attention_ref
from csrc_triton.cpu_attention import KEY_CHUNK, PAGE, Workspace, key_tails, padded_keys
from csrc_triton.fused import RopeTable, rope_table
from csrc_triton.pages import ID_BYTES, KVLayout, append_kv

Entry = tuple[int, int, int]  # position of slot 0, valid slots lo, hi
FAR = 64 * 1000
GEOMETRIES = [
    (4, 4, 8),
    (4, 4, 64),
    (8, 2, 64),
    (5, 1, 80),
    (9, 3, 64),
    (9, 3, 96),
    (14, 2, 64),
    (8, 2, 128),
    (5, 1, 256),
]
LENGTHS = (1, 63, 64, 65, 511, 512, 513, 700, 1328)
WINDOWS = (None, 1, 63, 64, 65, 128)


@functools.cache
def rope(rot_dim: int, factor: float = 1.0, max_position: int = 2048) -> RopeTable:
    return rope_table(inverse_frequencies(rot_dim), max_position, factor=factor)


def inverse_frequencies(rot_dim: int) -> Tensor:
    return 10000 ** (-2 * torch.arange(rot_dim // 2, dtype=torch.float64) / rot_dim)


@dataclass
class Case:
    """Random sequences and the pages that hold them, in an order of their own."""

    q: list[Tensor]  # [L, Hq, D] of each sequence
    k: list[Tensor]  # [L, Hkv, D]
    v: list[Tensor]
    positions: list[list[int]]  # of each sequence's tokens, ascending
    entries: list[list[Entry]]
    pages: list[list[int]]  # page ids of each sequence
    arena: Tensor
    layout: KVLayout
    rope: RopeTable
    scale: float
    spare: list[int]  # pages that are nobody's

    def run(self, *parts: tuple[int, int, int], space: Workspace | None = None, **options: Any) -> list[Tensor]:
        """Rows [start, stop) of sequences, each seeing the tokens before `stop`, in one call."""
        q, table, cu_rows, row_pos = self.inputs(*parts)
        y = paged_attention(
            q, self.arena, self.layout, 0, table, cu_rows, row_pos, self.rope,
            scale=self.scale, workspace=space, **options,
        )  # fmt: skip
        return list(y.split([stop - start for _, start, stop in parts]))

    def exact(self, *parts: tuple[int, int, int], **options: Any) -> list[Tensor]:
        q, table, cu_rows, row_pos = self.inputs(*parts)
        y = paged_attention_ref(
            q, self.arena, self.layout, 0, table, cu_rows, row_pos, self.rope, scale=self.scale, **options
        )
        return list(y.split([stop - start for _, start, stop in parts]))

    def inputs(self, *parts: tuple[int, int, int]) -> tuple[Tensor, PageTable, Tensor, Tensor]:
        q = torch.cat([self.q[s][start:stop] for s, start, stop in parts])
        row_pos = torch.tensor(
            [p for s, start, stop in parts for p in self.positions[s][start:stop]], dtype=torch.int32
        )
        cu_rows = torch.tensor([0, *(stop - start for _, start, stop in parts)]).cumsum(0).int()
        lists = []
        for s, _, stop in parts:
            last = self.positions[s][stop - 1]
            kept = [
                (i, base, lo, min(hi, last + 1 - base))
                for i, base, lo, hi in zip(self.pages[s], *zip(*self.entries[s], strict=True), strict=True)
            ]
            lists.append([entry for entry in kept if entry[3] > entry[2]])
        return q, table_of(lists), cu_rows, row_pos


def table_of(lists: Sequence[Sequence[tuple[int, int, int, int]]]) -> PageTable:
    """Lists of (page id, base, lo, hi), padded with whatever a table may hold beyond n."""
    width = max(len(entries) for entries in lists)
    ids, base, span = (torch.full((len(lists), width), value, dtype=torch.int32) for value in (0, 64, 64 << 8))
    for s, entries in enumerate(lists):
        for e, (page, start, lo, hi) in enumerate(entries):
            ids[s, e], base[s, e], span[s, e] = page, start, lo | hi << 8
    return PageTable(ids, base, span, torch.tensor([len(entries) for entries in lists], dtype=torch.int32))


def canonical(length: int, first: int = 0) -> list[Entry]:
    return [(first + b, 0, min(PAGE, length - b)) for b in range(0, length, PAGE)]


def make(
    heads: tuple[int, int, int],
    sequences: Sequence[int | list[Entry]],
    *,
    table: RopeTable | None = None,
    dtype: torch.dtype = torch.float32,
    fill: float = math.nan,
    shuffle: bool = True,
    seed: int = 0,
    spare: int = 2,
) -> Case:
    """Sequences are lengths, or lists of entries; the same seed gives the same tokens whatever else differs."""
    hq, hkv, dim = heads
    table, gen = table or rope(dim), torch.Generator().manual_seed(seed)
    entries = [canonical(s) if isinstance(s, int) else s for s in sequences]
    num_pages = sum(len(e) for e in entries)
    layout = KVLayout(1, hkv, dim, dtype)
    step = layout.block_bytes // ID_BYTES
    arena = torch.empty((num_pages + spare + 1) * layout.block_bytes, dtype=torch.uint8)
    arena.view(torch.float32 if layout.scaled else dtype).fill_(fill)
    arena[: layout.block_bytes] = 0
    order = [step * (i + 1) for i in range(num_pages + spare)]
    if shuffle:
        random.Random(seed).shuffle(order)
    case = Case([], [], [], [], entries, [], arena, layout, table, dim**-0.5, order)
    for spans in entries:
        case.pages.append([order.pop() for _ in spans])
        place = [
            (page, base, slot)
            for page, (base, lo, hi) in zip(case.pages[-1], spans, strict=True)
            for slot in range(lo, hi)
        ]
        case.positions.append([base + slot for _, base, slot in place])
        for rows, count in ((case.q, hq), (case.k, hkv), (case.v, hkv)):
            rows.append(torch.randn(len(place), count, dim, generator=gen))
        page, slot = (torch.tensor([p[i] for p in place], dtype=torch.int32) for i in (0, 2))
        append_kv(case.k[-1], case.v[-1], arena, layout, 0, page, slot, slot, table)
    return case


def plain_attention(case: Case, s: int, rows: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Rows of a sequence without pages: rotate by position, mask, softmax."""
    pos = torch.tensor(case.positions[s])
    rot_dim, half = case.rope.rot_dim, case.rope.rot_dim // 2
    angle = pos[:, None, None] * inverse_frequencies(rot_dim)
    cos, sin = (case.rope.factor * t.to(dtype) for t in (angle.cos(), angle.sin()))

    def rotated(x: Tensor) -> Tensor:
        a, b = x[..., :half].to(dtype), x[..., half:rot_dim].to(dtype)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rot_dim:].to(dtype)), -1)

    q, k, v = rotated(case.q[s])[rows], rotated(case.k[s]), case.v[s].to(dtype)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
    behind = pos[rows, None] - pos
    seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    weight = (q @ k.transpose(1, 2) * case.scale).masked_fill(~seen, -math.inf).softmax(-1)
    return (weight @ v).transpose(0, 1)


# a key is rotated twice instead of once, by tables in float32, and probabilities sum in chunks;
# results are weighted means of values of size 1, so this is some roundings of a score of size 4
SLACK = 2e-6


def assert_values(case: Case, s: int, window: int | None = None) -> Tensor:
    """All rows of a sequence, some forty of them compared."""
    num = len(case.q[s])
    y = case.run((s, 0, num), window=window)[0]
    rows = torch.tensor(sorted({*range(0, num, max(1, num // 32)), *range(min(num, 3)), num - 1}))
    exact, same_dtype = (plain_attention(case, s, rows, window, dtype) for dtype in (torch.float64, torch.float32))
    assert_no_worse(y[rows], exact, same_dtype, SLACK)
    return y


# ---- values ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", GEOMETRIES[1::3], ids=str)
def test_values_at_any_length(heads: tuple[int, int, int], length: int) -> None:
    assert_values(make(heads, [length]), 0)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", GEOMETRIES, ids=str)
def test_values_at_any_geometry_and_window(heads: tuple[int, int, int], window: int | None) -> None:
    case = make(heads, [300, 67])
    for s in (0, 1):
        assert_values(case, s, window)


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", (511, 700, 1328))
@pytest.mark.parametrize("heads", GEOMETRIES, ids=str)
def test_values_everywhere(heads: tuple[int, int, int], length: int, window: int | None) -> None:
    assert_values(make(heads, [length]), 0, window)


@pytest.mark.parametrize(
    ("heads", "rot_dim", "factor"), [((4, 2, 64), 64, 1.3), ((5, 1, 80), 20, 1.0), ((3, 3, 96), 24, 1.2)]
)
def test_values_with_yarn_factor_and_partial_rotation(heads: tuple[int, int, int], rot_dim: int, factor: float) -> None:
    assert_values(make(heads, [150], table=rope(rot_dim, factor)), 0)


@pytest.mark.parametrize("window", [None, 100])
def test_values_far_from_the_start(window: int | None) -> None:
    table = rope(64, max_position=FAR + 700)
    assert_values(make((4, 2, 64), [canonical(150, FAR), canonical(600, 64 * 3)], table=table), 0, window)


def test_values_at_the_largest_positions() -> None:
    table = rope(64, max_position=131072)
    assert_values(make((4, 2, 64), [canonical(200, 131072 - 256)], table=table), 0)


# an unaligned evict: two entries trimmed, later positions moved up; a list that starts late; and one in pieces
EVICTED: list[Entry] = [(0, 0, 64), (64, 0, 20), (54, 30, 64), (118, 0, 64), (182, 0, 11)]
TRIMMED: list[Entry] = [(64, 5, 64), (128, 0, 64), (192, 0, 64), (256, 0, 3)]
PIECES: list[Entry] = [(-30, 30, 50), (-5, 25, 26), (-42, 63, 64), (22, 0, 64), (86, 0, 1), (86, 1, 64)]
LONG: list[Entry] = [(b - 17, 17 if b == 0 else 0, 64) for b in range(0, 64 * 11, 64)]
LISTS = [EVICTED, TRIMMED, PIECES, LONG]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("entries", LISTS, ids=["evicted", "trimmed", "pieces", "long"])
def test_values_on_lists_that_are_not_canonical(entries: list[Entry], window: int | None) -> None:
    case = make((4, 2, 16), [entries])
    assert case.positions[0] == sorted(set(case.positions[0]))
    assert_values(case, 0, window)
    rows = (0, len(case.q[0]) - 3, len(case.q[0]))
    y, exact = case.run(rows, window=window)[0], case.exact(rows, window=window)[0]
    assert (y - exact).abs().max() < SLACK


@pytest.mark.parametrize(
    ("heads", "dtype"), [((4, 4, 8), torch.float32), ((9, 3, 64), torch.bfloat16), ((5, 1, 80), torch.float16)]
)
def test_values_of_what_the_pages_hold(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Against the definition on the arena itself, whatever the pages' dtype rounds; a ragged batch."""
    case = make(heads, [130, 1, 65, 550], dtype=dtype)
    parts = [(0, 126, 130), (1, 0, 1), (2, 63, 65), (3, 549, 550)]
    for window in (None, 63):
        for y, exact in zip(case.run(*parts, window=window), case.exact(*parts, window=window), strict=True):
            assert (y - exact).abs().max() < SLACK


def test_reference_is_plain_attention() -> None:
    case = make((4, 2, 16), [70, PIECES], table=rope(8, 1.2))
    for s, window in ((0, None), (0, 33), (1, None), (1, 33)):
        rows = torch.arange(len(case.q[s]) - 4, len(case.q[s]))
        exact = plain_attention(case, s, rows, window, torch.float64)
        # its pages and tables are float32
        assert (case.exact((s, len(case.q[s]) - 4, len(case.q[s])), window=window)[0] - exact).abs().max() < 1e-6


def test_scale_is_used() -> None:
    case = make((4, 2, 16), [70])
    assert_values(replace(case, scale=0.9), 0)


# ---- the bits of a row: alone, in a batch, in a chain, in chunks -------------------------------------

EDGES = (
    0,
    1,
    62,
    63,
    64,
    65,
    127,
    128,
    191,
    192,
    255,
    256,
    257,
    319,
    383,
    384,
    447,
    511,
    512,
    513,
    575,
    640,
    1023,
    1024,
    1025,
)
EXACT = [((9, 3, 64), None, 2), ((9, 3, 64), 64, 3), ((4, 4, 8), None, 3), ((5, 1, 80), 65, 2), ((14, 2, 64), None, 1)]
EXACT += [((8, 2, 128), 1, 3), ((5, 1, 256), None, 2), ((8, 2, 64), 300, 1), ((9, 3, 96), None, 3), ((4, 4, 64), 63, 2)]


def some_exact(offset: int, step: int = 3) -> pytest.MarkDecorator:
    """Every third of them, and all between the tests; the slow test has the full product."""
    some = EXACT[offset::step]
    return pytest.mark.parametrize(
        ("heads", "window", "threads"), some, indirect=["threads"], ids=[f"{h}-{w}-{t}" for h, w, t in some]
    )


@some_exact(0, step=1)
def test_decode_is_prefill(heads: tuple[int, int, int], window: int | None, threads: int) -> None:
    case = make(heads, [1040])
    whole = assert_values(case, 0, window)
    for p in EDGES:
        assert_same_bits(case.run((0, p, p + 1), window=window)[0], whole[p : p + 1], f"position {p}")


@some_exact(0)
def test_chunked_prefill_is_whole_prefill(heads: tuple[int, int, int], window: int | None, threads: int) -> None:
    case = make(heads, [530])
    whole = assert_values(case, 0, window)
    for size in (7, 64, 100, 129):
        edges = [*range(0, 530, size), 530]
        pieces = [case.run((0, a, b), window=window)[0] for a, b in itertools.pairwise(edges)]
        assert_same_bits(torch.cat(pieces), whole, f"chunks of {size}")


@pytest.mark.parametrize(("window", "threads"), [(None, 1), (50, 2), (None, 3)], indirect=["threads"])
def test_token_by_token_is_whole_prefill(window: int | None, threads: int) -> None:
    case = make((9, 3, 64), [140])
    rows = torch.cat([case.run((0, p, p + 1), window=window)[0] for p in range(140)])
    assert_same_bits(rows, assert_values(case, 0, window))


@some_exact(1)
def test_a_chain_is_decode(heads: tuple[int, int, int], window: int | None, threads: int) -> None:
    """1 to 16 rows over the edges of pages and of chunks of keys."""
    case = make(heads, [1050])
    alone = functools.cache(lambda p: case.run((0, p, p + 1), window=window)[0])
    for p, count in (
        (0, 16),
        (60, 5),
        (63, 2),
        (120, 16),
        (250, 9),
        (505, 16),
        (511, 3),
        (510, 2),
        (1020, 7),
        (1023, 15),
    ):
        chain = case.run((0, p, p + count), window=window)[0]
        for i in {0, 1, count // 2, count - 1}:
            assert_same_bits(chain[i : i + 1], alone(p + i), f"row {i} of {count} from {p}")


@some_exact(2)
def test_a_batch_is_each_alone(heads: tuple[int, int, int], window: int | None, threads: int) -> None:
    lengths = [1, 64, 65, 200, 512, 513, 700, 1030]
    case = make(heads, lengths)
    alone = functools.cache(lambda *part: case.run(part, window=window)[0])

    def check(*parts: tuple[int, int, int]) -> None:
        for y, part in zip(case.run(*parts, window=window), parts, strict=True):
            assert_same_bits(y, alone(*part), f"{part} in {parts}")

    last = [(s, n - 1, n) for s, n in enumerate(lengths)]
    check(*last)  # decode: groups of one to four sequences, with as many pages or not
    check(last[3], last[4])
    check(last[7], last[1], last[5], last[0], last[6])  # groups that are not neighbours
    check((3, 150, 200), last[4], (5, 500, 513), (2, 0, 65), last[6], (7, 900, 1030))  # decode, chains and prefill
    check((3, 100, 103), (6, 510, 513), (4, 509, 512), (7, 1020, 1023))  # chains of three
    check((4, 312, 512), (3, 0, 200), (6, 500, 700))  # prefill of 200 rows: two blocks of rows each
    assert_values(case, 6, window)


@pytest.mark.parametrize("heads", GEOMETRIES[::2], ids=str)
def test_where_pages_lie_changes_nothing(heads: tuple[int, int, int]) -> None:
    cases = [make(heads, [530, 70], shuffle=shuffle) for shuffle in (True, False)]
    assert cases[0].pages != cases[1].pages
    for parts in ([(0, 529, 530), (1, 69, 70)], [(0, 100, 530)], [(1, 0, 70)]):
        for a, b in zip(*(case.run(*parts) for case in cases), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("window", [None, 64, 700])
@pytest.mark.parametrize("entries", LISTS, ids=["evicted", "trimmed", "pieces", "long"])
def test_rows_on_lists_that_are_not_canonical(entries: list[Entry], window: int | None) -> None:
    case = make((9, 3, 64), [entries, 513])
    num = len(case.q[0])
    whole = assert_values(case, 0, window)
    for start, stop in ((num - 1, num), (num - 16, num), (20, 27), (5, num - 10)):
        assert_same_bits(case.run((0, start, stop), window=window)[0], whole[start:stop], f"{start}..{stop}")
        together = case.run((1, 500, 513), (0, start, stop), window=window)
        assert_same_bits(together[1], whole[start:stop], f"{start}..{stop} beside another")


def test_rows_far_from_the_start() -> None:
    table = rope(64, max_position=FAR + 700)
    case = make((9, 3, 64), [canonical(530, FAR), 530], table=table)
    whole = assert_values(case, 0)
    for start, stop in ((529, 530), (500, 516), (0, 7), (64, 128)):
        assert_same_bits(case.run((1, start, stop), (0, start, stop))[1], whole[start:stop])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "window", "threads"),
    [
        (heads, window, (i + i // len(WINDOWS)) % 3 + 1)
        for i, (heads, window) in enumerate(itertools.product(GEOMETRIES, WINDOWS))
    ],
    indirect=["threads"],
    ids=str,
)
def test_random_company(heads: tuple[int, int, int], window: int | None, threads: int) -> None:
    rng = random.Random(f"{heads}{window}{threads}")
    lengths = [rng.choice([*LENGTHS, rng.randint(1, 1100)]) for _ in range(6)]
    case = make(heads, lengths)
    whole = [case.run((s, 0, n), window=window)[0] for s, n in enumerate(lengths)]
    for _ in range(6):
        parts = []
        for s in rng.sample(range(6), rng.randint(1, 6)):
            stop = rng.randint(1, lengths[s])
            parts.append((s, max(0, stop - rng.choice([1, 1, 2, 3, 8, 16, 64, 100, 300])), stop))
        for y, (s, start, stop) in zip(case.run(*parts, window=window), parts, strict=True):
            assert_same_bits(y, whole[s][start:stop], f"{(s, start, stop)} in {parts}")


# ---- softcap, sinks, codes ---------------------------------------------------------------------------

SINKS = torch.tensor([0.0, 3.0, -2.0, 30.0, -math.inf, 1.0, 5.0, -1.0])
VARIANTS: dict[str, dict[str, Any]] = {
    "softcap 50": {"softcap": 50.0},
    "softcap 2": {"softcap": 2.0},
    "sinks": {"sinks": SINKS},
    "softcap and sinks": {"softcap": 50.0, "sinks": SINKS},
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_with_softcap_and_sinks(variant: str, window: int | None) -> None:
    for dim, entries in ((64, 600), (16, EVICTED)):
        case = make((8, 2, dim), [entries])
        num = len(case.q[0])
        parts = [
            (0, start, min(start + 6, num)) for start in (0, 62, 509, num - 3) if start < num
        ]  # 509: over a chunk's edge
        options = {"window": window, **VARIANTS[variant]}
        for y, exact in zip(case.run(*parts, **options), case.exact(*parts, **options), strict=True):
            assert (y - exact).abs().max() < SLACK


# error of a coded number by root mean square, for numbers of size 1: rounding to steps of a 127th of a row's largest,
# at most 4 here, or of an eighth of a number's power of two; a score (|q| scale = 1) and a value have it each
CODED = {torch.int8: 4 / 127 / math.sqrt(12), torch.float8_e4m3fn: 1 / 8 / math.sqrt(12)}


@pytest.mark.parametrize("dtype", CODED, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 8), (8, 2, 64), (5, 1, 80), (8, 2, 128)], ids=str)
def test_values_of_codes(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Against the same codes as close as float32 is; against the numbers that were coded by their rounding."""
    case, plain = make(heads, [300], dtype=dtype), make(heads, [300])
    parts = [(0, 0, 3), (0, 64, 66), (0, 290, 300)]
    for y, exact, uncoded in zip(case.run(*parts), case.exact(*parts), plain.exact(*parts), strict=True):
        assert (y - exact).abs().max() < SLACK
        assert_close(y, uncoded, math.sqrt(2) * CODED[dtype])
    for y, exact in zip(case.run(*parts, window=63), case.exact(*parts, window=63), strict=True):
        assert (y - exact).abs().max() < SLACK


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("softcap", "window", "sinks", "threads"),
    [(50.0, None, None, 1), (3.0, 65, SINKS, 3), (None, None, SINKS, 3), (None, 600, None, 1)],
    indirect=["threads"],
)
def test_softcap_sinks_and_codes_hold_rows_still(
    softcap: float | None, window: int | None, sinks: Tensor | None, threads: int, dtype: torch.dtype
) -> None:
    options = {"softcap": softcap, "window": window, "sinks": sinks}
    case = make((8, 2, 64), [530, 70, EVICTED], dtype=dtype)
    whole = case.run((0, 0, 530), **options)[0]
    for size in (7, 100):
        edges = [*range(400, 530, size), 530]
        pieces = [case.run((0, a, b), **options)[0] for a, b in itertools.pairwise(edges)]
        assert_same_bits(torch.cat(pieces), whole[400:], f"chunks of {size}")
    for p in (0, 63, 64, 448, 511, 512, 529):
        assert_same_bits(case.run((0, p, p + 1), **options)[0], whole[p : p + 1], f"position {p}")
    parts = [(1, 65, 70), (0, 500, 516), (2, 100, 105)]
    for y, part in zip(case.run(*parts, **options), parts, strict=True):
        assert_same_bits(y, case.run(part, **options)[0], f"{part} beside others")


def test_a_softcap_without_bounds_is_none() -> None:
    case = make((8, 2, 64), [600])
    assert (case.run((0, 500, 600), softcap=1e6)[0] - case.run((0, 500, 600))[0]).abs().max() < 1e-4


def test_a_sink_without_weight_is_none() -> None:
    case = make((8, 2, 64), [200])
    assert_same_bits(case.run((0, 0, 200), sinks=torch.full((8,), -math.inf))[0], case.run((0, 0, 200))[0])
    assert not case.run((0, 0, 200), sinks=torch.full((8,), math.inf))[0].any()


# ---- what must not be read, and what is not there ----------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("sequences", [[130, 70], [EVICTED, TRIMMED, PIECES]], ids=["canonical", "trimmed"])
def test_unused_slots_and_pages_change_nothing(sequences: list[int | list[Entry]], dtype: torch.dtype) -> None:
    cases = [make((4, 2, 16), sequences, fill=fill, dtype=dtype) for fill in (math.nan, 0.0, math.inf, 3.0)]
    parts = [(s, 3, len(q)) for s, q in enumerate(cases[0].q)]
    for softcap in (None, 20.0):
        first = cases[0].run(*parts, softcap=softcap)
        assert all(y.isfinite().all() for y in first)
        for case in cases[1:]:
            for y, expected in zip(case.run(*parts, softcap=softcap), first, strict=True):
                assert_same_bits(y, expected)


def test_entries_beyond_n_change_nothing() -> None:
    """Ids there name pages of NaN, and far positions."""
    case = make((4, 2, 16), [130, 70])
    q, table, cu_rows, row_pos = case.inputs((0, 120, 130), (1, 69, 70))
    wide = [
        F.pad(t, (0, 5), value=value)
        for t, value in ((table.ids, case.pages[0][0]), (table.base, 1), (table.span, 64 << 8))
    ]
    wide[0][1, 2:], wide[1][1, 2:], wide[2][1, 2:] = case.pages[0][1], 3, 64 << 8
    y = paged_attention(
        q, case.arena, case.layout, 0, PageTable(*wide, table.n), cu_rows, row_pos, case.rope, scale=case.scale
    )
    assert_same_bits(y, torch.cat(case.run((0, 120, 130), (1, 69, 70))))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_later_tokens_change_nothing(value: float) -> None:
    """A row's own tokens end before `stop`; what others of its page hold, huge values included, it cannot see."""
    case, other = make((4, 2, 16), [100]), make((4, 2, 16), [100])
    rows = torch.arange(80, 100, dtype=torch.int32)
    page = torch.full_like(rows, other.pages[0][1])
    slot = rows - 64
    append_kv(
        torch.full((20, 2, 16), 1e9),
        torch.full((20, 2, 16), value),
        other.arena,
        other.layout,
        0,
        page,
        slot,
        slot,
        other.rope,
    )
    assert_same_bits(other.run((0, 70, 80))[0], case.run((0, 70, 80))[0])
    assert_same_bits(other.run((0, 70, 100))[0][:10], case.run((0, 70, 80))[0])


def test_rows_that_see_nothing_are_zero() -> None:
    case = make((4, 2, 16), [TRIMMED, 70, 5])
    inputs = [(0, 0, 3), (1, 60, 70), (2, 4, 5)]
    q, table, cu_rows, row_pos = case.inputs(*inputs)
    seen = case.run(*inputs)
    row_pos[1] = 68  # before the first key
    n = table.n.clone()
    n[2] = 0
    y = paged_attention(
        q, case.arena, case.layout, 0, replace(table, n=n), cu_rows, row_pos, case.rope, scale=case.scale
    )
    assert not y[1].any() and not y[13].any()
    assert_same_bits(y[0], seen[0][0])
    assert_same_bits(y[2], seen[0][2])
    assert_same_bits(y[3:13], seen[1])
    row_pos[:3] += 500  # all keys out of the window
    y = paged_attention(q, case.arena, case.layout, 0, table, cu_rows, row_pos, case.rope, scale=case.scale, window=40)
    assert not y[:3].any() and y[3:].any()
    options = {"sinks": torch.randn(4), "softcap": 5.0}
    y = paged_attention(
        q, case.arena, case.layout, 0, table, cu_rows, row_pos, case.rope, scale=case.scale, window=40, **options
    )
    assert not y[:3].any() and y[3:].isfinite().all()


def test_sequences_without_rows_and_calls_without_any() -> None:
    case = make((4, 2, 16), [70, 10, 600])
    q, table, cu_rows, row_pos = case.inputs((0, 69, 70), (1, 9, 10), (2, 590, 600))
    cu_rows = torch.tensor([0, 1, 1, 11], dtype=torch.int32)
    keep = torch.tensor([0, *range(2, 12)])
    y = paged_attention(q[keep], case.arena, case.layout, 0, table, cu_rows, row_pos[keep], case.rope, scale=case.scale)
    assert_same_bits(y, torch.cat(case.run((0, 69, 70), (2, 590, 600))))
    y = paged_attention(
        q[:0], case.arena, case.layout, 0, table, torch.zeros(4, dtype=torch.int32), row_pos[:0], case.rope, scale=1.0
    )
    assert y.shape == (0, 4, 16)


def test_layers_share_a_workspace() -> None:
    """Layers of one model may differ in their window, in their rotation, or in both."""
    layout = KVLayout(4, 2, 16, torch.float32, 3)
    arena = torch.zeros(6 * layout.page_bytes, dtype=torch.uint8)
    ids = torch.tensor([[14, 12, 13]], dtype=torch.int32) * (layout.block_bytes // ID_BYTES)
    token = torch.arange(150, dtype=torch.int32)
    page, slot = ids[0][token.long() // PAGE], token % PAGE
    k, v, q = torch.randn(4, 150, 2, 16), torch.randn(4, 150, 2, 16), torch.randn(4, 150, 4, 16)
    table, cu_rows = page_table(ids, torch.tensor([150], dtype=torch.int32)), torch.tensor([0, 150], dtype=torch.int32)
    wide, narrow = rope(16), rope_table([1.0, 0.1, 0.01, 0.001], 200)
    layers = [(wide, None), (wide, 30), (narrow, 30), (narrow, None)]
    results = []
    for space in (Workspace(), None):
        y = []
        for layer, (table_of_layer, window) in enumerate(layers):
            at = (arena, layout, layer)
            append_kv(k[layer], v[layer], *at, page, slot, slot, table_of_layer, workspace=space)
            y.append(
                paged_attention(
                    q[layer], *at, table, cu_rows, token, table_of_layer, scale=0.25, window=window, workspace=space
                )
            )
        results.append(torch.stack(y))
    assert_same_bits(results[0], results[1])
    last = torch.tensor([0, 2], dtype=torch.int32)
    for layer, (table_of_layer, window) in enumerate(layers):
        at = (arena, layout, layer)
        exact = paged_attention_ref(
            q[layer, -2:], *at, table, last, token[-2:], table_of_layer, scale=0.25, window=window
        )
        assert (results[0][layer, -2:] - exact).abs().max() < SLACK


# ---- padded keys -------------------------------------------------------------------------------------


@ANY_THREADS
@pytest.mark.parametrize("dim", [8, 64, 80, 128])
def test_key_tails_agree_with_whole_chunks(dim: int, threads: int) -> None:
    """On fresh data, with other heads, rows and full chunks before the tail than the probe has."""
    rng, gen = random.Random(dim * threads), torch.Generator().manual_seed(99)
    tails = key_tails(dim, threads)
    assert tails[-1] == KEY_CHUNK and list(tails) == sorted(set(tails)) and all(t % PAGE == 0 for t in tails)
    for tail in tails[:-1]:
        for full in (0, KEY_CHUNK):
            heads, rows, used = rng.choice([1, 3]), 16 * rng.randint(1, 30), full + tail - rng.randint(0, 63)
            q = torch.randn(2, heads, rows, dim, generator=gen)
            k, v = torch.randn(2, 2, heads, full + KEY_CHUNK, dim, generator=gen)
            k[:, :, used:], v[:, :, used:] = 0, 0
            limit = torch.randint(1, used + 1, (2, 1, rows, 1), generator=gen)
            bias = torch.zeros(2, 1, rows, full + KEY_CHUNK).masked_fill_(
                torch.arange(full + KEY_CHUNK) >= limit, -math.inf
            )
            y = [
                F.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], attn_mask=bias[..., :n].contiguous())
                for n in (full + tail, full + KEY_CHUNK)
            ]
            assert_same_bits(y[0], y[1], f"{full} keys and a tail of {tail}")


def test_padded_keys_are_whole_chunks_and_a_tail(threads: int) -> None:
    tails = key_tails(64, threads)
    for keys in range(0, 1600):
        padded = padded_keys(keys, 64)
        assert padded >= max(keys, 1)
        assert padded % KEY_CHUNK in (0, *tails) and padded - max(keys, 1) < KEY_CHUNK


# ---- page tables and refusals ------------------------------------------------------------------------


def test_page_table_from_a_block_table() -> None:
    table = page_table(
        torch.tensor([[5, 9, 7], [3, 4, 6], [8, 8, 8]], dtype=torch.int32),
        torch.tensor([130, 64, 0], dtype=torch.int32),
    )
    assert table.n.tolist() == [3, 1, 0]
    assert table.ids.tolist() == [[5, 9, 7], [3, 0, 0], [0, 0, 0]]
    assert table.base.tolist() == [[0, 64, 128], [0, 0, 0], [0, 0, 0]]
    assert [[(s & 255, s >> 8) for s in row] for row in table.span.tolist()] == [
        [(0, 64), (0, 64), (0, 2)], [(0, 64), (0, 0), (0, 0)], [(0, 0)] * 3
    ]  # fmt: skip
    assert {t.dtype for t in (table.ids, table.base, table.span, table.n)} == {torch.int32}


def test_page_table_refuses() -> None:
    block_table = torch.zeros(2, 3, dtype=torch.int32)
    for lengths in ([193, 0], [-1, 5]):
        with pytest.raises(ValueError, match=r"lengths must be in 0..192, got"):
            page_table(block_table, torch.tensor(lengths, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"block_table \(2, 3\) must be \[B, E\] and lengths \(3,\) \[B\]"):
        page_table(block_table, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"block_table \(3,\) must be"):
        page_table(block_table[0], torch.zeros(1, dtype=torch.int32))


def test_paged_attention_refuses() -> None:
    case = make((4, 2, 16), [70])
    q, table, cu_rows, row_pos = case.inputs((0, 60, 70))

    def run(q: Tensor = q, cu_rows: Tensor = cu_rows, row_pos: Tensor = row_pos, **options: Any) -> None:
        paged_attention(q, case.arena, case.layout, 0, table, cu_rows, row_pos, case.rope, scale=1.0, **options)

    for bad in (q[..., :8], q[:, :3], q[0]):
        with pytest.raises(ValueError, match=r"q is \(.*\), expected \[T, a multiple of 2, 16\]"):
            run(q=bad)
    for name, bad in (("cu_rows", cu_rows[:1]), ("cu_rows", cu_rows - 1), ("row_pos", row_pos[1:])):
        with pytest.raises(ValueError, match=r"need cu_rows of 2 ending at|q has 10 rows, expected one for each of 9"):
            run(**{name: bad})
    for window in (0, -3):
        with pytest.raises(ValueError, match=f"window must be at least 1, got {window}"):
            run(window=window)
    with pytest.raises(ValueError, match=r"softcap must be above 0 and finite, got -1"):
        run(softcap=-1)
    for sinks in (torch.zeros(2), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(
            ValueError, match=r"sinks are torch.float\d\d \(\d,\) .* expected contiguous float32 \(4,\)"
        ):
            run(sinks=sinks)
    with pytest.raises(ValueError, match="requires grad"):
        run(q=q.clone().requires_grad_())
    with pytest.raises(ValueError, match="the rope table ends at"):
        run(row_pos=row_pos + 4096)
