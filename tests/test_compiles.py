"""Kernels compiled for GPUs that are not here, and what the compile check says of them and of wrong ones."""

from __future__ import annotations

import warnings

import compile_check
import pytest
import sass
import torch
from compile_check import Case, check, matmul_case
from dryrun import dryrun

from csrc_triton.launch import OPTIONS, jit, tile_table, tl
from csrc_triton.qmatmul import matmul

pytestmark = pytest.mark.aot
CASES = compile_check.cases()
EVERY = 12  # of the cases, by turns, in the default run


def sampled() -> list[object]:
    """Every case; all but one in EVERY, and the first of each kind of launch, are slow."""
    seen: set[str] = set()
    params = []
    for i, case in enumerate(CASES):
        kind = case.name.split()[0]
        quick = i % EVERY == 0 or kind not in seen
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
