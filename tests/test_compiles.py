"""Kernels compiled for GPUs that are not here, and what the compile check says of them and of wrong ones."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from unittest import mock

import compile_check
import pytest
import sass
import torch
from compile_check import Case, attention_case, check, matmul_case, page_loop
from dryrun import Launch, dryrun

from csrc_triton import attention
from csrc_triton.attention import page_table, paged_attention
from csrc_triton.attention_plan import make_plan
from csrc_triton.fused import rope_table
from csrc_triton.launch import OPTIONS, TILES, jit, tile_table, tiles_from, tl
from csrc_triton.pages import KVLayout, append_kv, commit_path, copy_pages
from csrc_triton.qmatmul import matmul

pytestmark = pytest.mark.aot
CASES = compile_check.cases()
EVERY = 24  # of the cases, by turns, in the default run
EVERY_ATTENTION = 106


def sampled() -> list[object]:
    """Every case; all but one in EVERY, and the first of each kind of launch, are slow."""
    seen: set[str] = set()
    params = []
    for i, case in enumerate(CASES):
        kind = case.name.split()[0]
        quick = i % (EVERY_ATTENTION if kind == "attention" else EVERY) == 0 or kind not in seen
        seen.add(kind)
        params.append(pytest.param(case, id=case.label, marks=[] if quick else pytest.mark.slow))
    return params


@pytest.mark.parametrize("case", sampled())
def test_a_kernel_compiles_to_what_the_design_promises(case: Case) -> None:
    result = check(case)
    compile_check.compare_limits([result], compile_check.load_limits())
    assert not result.problems


@pytest.mark.parametrize(
    "fmt",
    [pytest.param(fmt, marks=[] if i == 0 else pytest.mark.slow) for i, fmt in enumerate(compile_check.FORMATS)],
)
def test_decode_and_prefill_fold_a_block_by_the_same_operations(fmt: str) -> None:
    cases = [matmul_case(fmt, 90, 16), matmul_case(fmt, 90, 512)]
    results = [check(case) for case in cases]
    compile_check.compare_sums(cases, results)
    assert not any("folds a block" in problem for result in results for problem in result.problems)
    assert len({result.sums for result in results}) == 1 and results[0].sums


def test_other_operations_are_another_fingerprint() -> None:
    sums = [check(matmul_case(fmt, 90, 16)).sums for fmt in ("q4", "q4_0")]
    assert sums[0] != sums[1]  # with a scale on the block, and without


@pytest.mark.parametrize(
    ("arch", "rows"),
    [
        pytest.param(arch, rows, marks=[] if (i + j) % 3 == 0 else pytest.mark.slow)
        for i, arch in enumerate((86, 89, 100, 120))
        for j, rows in enumerate((16, 64, 512))
    ],
)
def test_other_architectures_take_a_table_that_fits_them(arch: int, rows: int) -> None:
    """The dry run refuses what the loader would: too much shared memory, too many threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the table is another's is said once a process
        tile_table(arch)
    for fmt in ("q4", "q8_0", "bf16"):
        with dryrun(arch) as launches:
            matmul(torch.zeros(rows, 1024, dtype=torch.bfloat16), compile_check.weight(fmt, 4))
        assert launches and all(launch.shared <= sass.LIMITS[arch].shared_per_block for launch in launches)


# ---- attention ---------------------------------------------------------------------------------------


def test_every_row_of_an_attention_tile_goes_through_the_same_operations() -> None:
    """What the check demands of 32 rows is twice what it demands of 16, but for the steps across the warps."""
    for word, dim in (("bf16", 64), ("int8", 128), ("fp16", 256)):
        few, many = (page_loop(word, dim, rows, capped=True).operations for rows in (16, 32))
        across = {"max": 2, "shfl": 2}
        assert {name: 2 * n - across.get(name, 0) for name, n in few.items()} == many


def constants_of(launch: Launch) -> tuple[object, ...]:
    """Rows and variant of an attention launch."""
    names = launch.kernel.src.fn.arg_names
    known = {names[path[0]]: value for path, value in launch.kernel.src.constants.items() if len(path) == 1}
    return known["ROWS"], known["WHOLE"], known["SHARED"], known["SHAPE"].windowed


def attend(batch: int, rows: int, width: int, layer: int, window: int | None, longest_whole: int | None) -> None:
    layout = KVLayout(4, 1, 64, torch.bfloat16)
    arena = torch.zeros(2 * layout.page_bytes, dtype=torch.uint8)
    ids = layout.page_ids([0, *[1] * (width - 1)]).repeat(batch, 1)
    length = max(rows, 64 * width - 100)
    table = page_table(ids, torch.full((batch,), min(length, 64 * width), dtype=torch.int32))
    cu_rows, row_pos = (
        torch.arange(batch + 1, dtype=torch.int32) * rows,
        torch.arange(length - rows, length, dtype=torch.int32).repeat(batch),
    )
    with mock.patch.object(attention, "make_plan", partial(make_plan, longest_whole=longest_whole)):
        paged_attention(
            torch.zeros(batch * rows, 4, 64, dtype=torch.bfloat16), arena, layout, layer, table, cu_rows, row_pos,
            rope_table([1.0] * 32, 2048), scale=0.125, window=window,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "longest_whole"),
    [
        (90, None),
        pytest.param(90, 0, marks=pytest.mark.slow),
        pytest.param(90, 10**9, marks=pytest.mark.slow),
        pytest.param(80, None, marks=pytest.mark.slow),
    ],
)
def test_no_count_of_rows_sequences_or_pages_compiles_another_attention_kernel(
    arch: int, longest_whole: int | None
) -> None:
    """Rows a tile, the variant and whether there is a window do; so few binaries serve every launch of a model."""
    with dryrun(arch) as launches:
        for batch, rows, width, layer, window in (
            (1, 1, 1, 0, None),
            (1, 1, 17, 1, None),
            (3, 2, 16, 3, None),
            (64, 1, 17, 3, None),
            (1, 5, 16, 1, None),
            (3, 16, 1, 0, None),
            (1, 17, 17, 3, None),
            (3, 64, 16, 1, None),
            (1, 1, 16, 1, 1),
            (3, 1, 17, 3, 64),
            (64, 2, 1, 0, 64),
        ):
            attend(batch, rows, width, layer, window, longest_whole)
    mains = [launch for launch in launches if launch.name == "_attention_kernel"]
    assert {launch.name for launch in launches} == {"_attention_kernel", "_fold_kernel"}
    assert len({launch.kernel.hash for launch in mains}) == len({constants_of(launch) for launch in mains}) > 3
    folds = {(launch.kernel.hash, str(launch.kernel.src.constants)) for launch in launches if launch not in mains}
    assert len({kernel for kernel, _ in folds}) == len({constants for _, constants in folds})


def test_no_count_of_tokens_or_layers_compiles_another_kernel_for_pages() -> None:
    layout = KVLayout(4, 2, 64, torch.bfloat16)
    arena = torch.zeros(64 * layout.page_bytes, dtype=torch.uint8)
    with dryrun(90) as launches:
        for tokens, layer, wide, factor in ((1, 0, 2, 1.0), (16, 1, 3, 1.5), (17, 3, 32, 1.0)):
            k = torch.zeros(tokens, wide, 64, dtype=torch.bfloat16)[:, :2]
            slot = torch.arange(tokens, dtype=torch.int32)
            places = torch.stack((layout.page_ids([1]).repeat(tokens), slot, slot))
            append_kv(k, k, arena, layout, layer, *places, rope_table([1.0] * 32, 64, factor=factor))
            src, dst = (layout.page_ids(range(a, a + tokens)) for a in (1, 32))
            copy_pages(arena, layout, src.tolist(), dst.tolist(), num_layers=layer + 1)
            commit_path(arena, layout, torch.stack((src, slot), 1), torch.stack((dst, slot), 1))
    assert len(launches) == 9
    assert len({launch.kernel.hash for launch in launches}) == 3


def test_float8_pages_are_refused_where_the_gpu_has_no_such_numbers() -> None:
    with pytest.raises(ValueError, match="sm_89 or later"):
        check(attention_case("whole", "fp8", 128, 80))
    with pytest.raises(ValueError, match="sm_89 or later"), dryrun(80):
        compile_check._append("fp8", 128, 128)


# ---- the checks find what they are for ---------------------------------------------------------------


@jit
def _wrong_kernel(x_ptr, w_ptr, y_ptr, n, CHAIN: tl.constexpr, ATOMIC: tl.constexpr, CONVERT: tl.constexpr):
    row, col, k = tl.arange(0, 64), tl.arange(0, 16), tl.arange(0, 64)
    acc = tl.zeros((64, 16), tl.float32)
    for block in range(n):
        w = tl.load(w_ptr + block * 4096 + row[:, None] * 64 + k[None, :])
        if CONVERT:
            w = (w.to(tl.int16, bitcast=True) & 15).to(tl.bfloat16)
        x = tl.load(x_ptr + block * 64 + col[None, :] * n * 64 + k[:, None])
        acc = tl.dot(w, x, acc) if CHAIN else tl.fma(tl.dot(w, x), 1.0, acc)
    out = y_ptr + row[:, None] * 16 + col[None, :]
    if ATOMIC:
        tl.atomic_add(out, acc)
    else:
        tl.store(out, acc)


def wrong(arch: int, **flags: bool) -> Case:
    def launch() -> None:
        x, w = (torch.zeros(64 * 1024, dtype=torch.bfloat16) for _ in range(2))
        flags_ = {"CHAIN": False, "ATOMIC": False, "CONVERT": False, **flags}
        _wrong_kernel[(1,)](x, w, torch.zeros(1024), 16, **flags_, num_warps=4, num_stages=3, **OPTIONS)

    return Case("wrong", arch, "_wrong_kernel", launch, lds=99, ldsm=99, narrow_copies=99, per_weight=2.1)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"CHAIN": True}, "goes on from the block before"),
        ({"ATOMIC": True}, "atomics"),
        ({"CONVERT": True}, "instructions per weight"),
    ],
)
def test_the_check_reports_a_wrong_kernel(flags: dict[str, bool], problem: str) -> None:
    assert not any(problem in p for p in check(wrong(90)).problems)
    assert any(problem in p for p in check(wrong(90, **flags)).problems)


def test_a_regression_against_recorded_limits_is_a_problem() -> None:
    result = check(wrong(90))
    limits = {"triton": compile_check.triton.__version__, "cases": {"wrong sm_90": {"registers": 8, "shared": 10**6}}}
    compile_check.compare_limits([result], limits)
    assert [p for p in result.problems if p.startswith("registers")]


def test_too_few_stages_leave_one_tile_of_keys_in_shared_memory() -> None:
    table = json.loads((TILES / "sm_90.json").read_text())
    for key in [key for key in table["tiles"] if key.startswith("attention")]:
        table["tiles"][key] = {"16": {"rows": 16, "cols": 64, "warps": 4, "stages": 3}}
    with tiles_from(table):
        problems = check(attention_case("split", "bf16", 64, 90)).problems
    assert any("fewer than 2 buffers of 64x64xbf16" in p for p in problems) and any(
        "0 copies in flight" in p for p in problems
    )


@jit
def _wrong_pages_kernel(
    pages_ptr, ids_ptr, out_ptr, n, COLUMNS: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr
):
    """Row sums and values of an attention kernel, of pages [64, 64]."""
    row, key, d = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, 64)
    sums, acc = tl.zeros((16, COLUMNS), tl.float32), tl.zeros((16, 64), tl.float32)
    for t in range(n):
        page = tl.load(ids_ptr + t)
        if WIDE:
            page = page.to(tl.int64)
        at = pages_ptr + page * (4096 * STEP)
        keys = tl.load(at + key[None, :] * (64 * STEP) + d[:, None] * STEP)
        values = tl.load(at + key[:, None] * (64 * STEP) + d[None, :] * STEP)
        score = tl.dot((row[:, None] + d[None, :]).to(tl.bfloat16), keys)
        if SCALED:
            score = tl.exp2(score)
        weights = score.to(tl.bfloat16)
        sums = tl.fma(tl.dot(weights, tl.full((64, COLUMNS), 1.0, tl.bfloat16)), 1.0, sums)
        acc = tl.fma(tl.dot(weights, values), 1.0, acc)
    tl.store(out_ptr + row[:, None] * 64 + d[None, :], acc / tl.max(sums, 1)[:, None])


def wrong_pages(**flags: int) -> Case:
    def launch() -> None:
        pages, ids = torch.zeros(1 << 16, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32)
        flags_ = {"COLUMNS": 64, "STEP": 1, "WIDE": True, "SCALED": False, **flags}
        _wrong_pages_kernel[(1,)](pages, ids, torch.zeros(1024), 7, **flags_, num_warps=4, num_stages=5, **OPTIONS)

    right = attention_case("split", "bf16", 64, 90)
    return replace(right, kernel="_wrong_pages_kernel", launch=launch, loaded_products=0)


@pytest.fixture(scope="module")
def problems_without_flags() -> list[str]:
    """The kernel takes no maximum and turns no query, so that it is not free of problems."""
    return check(wrong_pages()).problems


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ({"COLUMNS": 16}, ["20 products a warp"]),
        ({"STEP": 2}, ["loaded without an asynchronous copy", "LDG in the loop"]),
        ({"WIDE": False}, ["in 32 bits"]),
        ({"SCALED": True}, ["8 ex2 a tile"]),
    ],
)
def test_the_check_reports_a_wrong_attention_kernel(
    flags: dict[str, int], problems: list[str], problems_without_flags: list[str]
) -> None:
    found = check(wrong_pages(**flags)).problems
    for problem in problems:
        assert any(problem in p for p in found) and not any(problem in p for p in problems_without_flags)


def test_a_tile_too_large_for_the_device_is_refused() -> None:
    from triton.errors import TritonError

    x = torch.zeros(1 << 20, dtype=torch.bfloat16)
    with pytest.raises(TritonError, match="shared memory"), dryrun(86):
        _large_kernel[(1,)](x, x, num_warps=4, num_stages=6, **OPTIONS)


@jit
def _large_kernel(x_ptr, y_ptr):
    i, j = tl.arange(0, 128), tl.arange(0, 128)
    acc = tl.zeros((128, 128), tl.float32)
    for block in range(8):
        x = tl.load(x_ptr + block * 16384 + i[:, None] * 128 + j[None, :])
        acc = tl.dot(x, tl.trans(x), acc)
    tl.store(y_ptr + i[:, None] * 128 + j[None, :], acc.to(tl.bfloat16))
