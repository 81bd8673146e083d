"""csrc_triton/qgemm.py, and the promise it shares with qmatmul: a row has the bits of the call on that row alone."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from checks import (
    FORM_KINDS,
    assert_kernel_no_worse,
    assert_same_bits,
    fitting_k,
    kernel_weight,
    kind_of_weight,
    one_tile,
    scattered,
    strided,
)
from torch import Tensor

tl = pytest.importorskip("triton.language")

import triton  # noqa: E402
from interpreter import KernelFault, interpreted  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from csrc_triton import launch, qgemm, qmatmul, t64  # noqa: E402
from csrc_triton.dequant import segment_sum  # noqa: E402
from csrc_triton.launch import kernels_on_cpu  # noqa: E402
from csrc_triton.qgemm import prefill_gemm, prefill_workspace_nbytes  # noqa: E402
from csrc_triton.qmatmul import MAX_ROWS, dequant_matmul, matmul, matmul_workspace_nbytes  # noqa: E402
from csrc_triton.quant import QTensor, dense, quantize  # noqa: E402
from polymodel.workloads.exact import pairwise  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65, 130, 257)
TILES = ((16, 64), (32, 128), (64, 256), (128, 128), (16, 512))
RUNS = {"decode": dequant_matmul, "prefill": prefill_gemm, "either": matmul}


@contextmanager
def exact_sums(**options: bool) -> Iterator[None]:
    """Kernels whose results depend on their own order of operations alone."""
    with interpreted(sequential_dot=True, **options):
        yield


# ---- values ------------------------------------------------------------------------------------------


def value_cases() -> list[dict]:
    """By kind: every two of the other choices meet, and every count of rows comes up."""
    axes = {"kind": FORM_KINDS, "dtype": FLOATS, "arch": (80, 90), "shape": ((1, 65), (130, 1), (65, 300))}
    cases = pairwise({**axes, "run": tuple(RUNS), "added": (False, True)})
    for i, case in enumerate(cases):
        rows = [m for m in ROWS if m <= MAX_ROWS or case["run"] != "decode"]
        case["m"] = rows[i % len(rows)]
    return cases


def check_values(
    kind: str, dtype: torch.dtype, arch: int, shape: tuple[int, int], m: int, run: str, added: bool
) -> None:
    n, k = shape
    # one program does it all where the table would take hundreds; tables are tried below
    with kernels_on_cpu(arch), one_tile(min(256, max(16, 1 << (m - 1).bit_length())), 1024 if n > 64 else 64):
        assert_kernel_no_worse(RUNS[run], kind, m, n, k, dtype, added)


@pytest.mark.parametrize("kind", FORM_KINDS)
def test_no_worse_than_torch(kind: str) -> None:
    with interpreted():
        for case in value_cases():
            if case["kind"] == kind:
                check_values(**case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", FORM_KINDS)
def test_no_worse_than_torch_at_any_count_of_rows(kind: str, dtype: torch.dtype) -> None:
    with interpreted():
        for arch, m, shape in product((80, 90), ROWS, ((65, 130), (130, 65))):
            check_values(kind, dtype, arch, shape, m, "decode" if m <= MAX_ROWS else "either", added=False)
            check_values(kind, dtype, arch, shape, m, "prefill", added=True)


@pytest.mark.parametrize(
    ("kind", "n", "k", "m"),
    [
        pytest.param("q4_0", 49152, 64, 2, marks=pytest.mark.slow),
        ("q8/128", 576, 1536, 3),
        pytest.param("q4_k", 1536, 1536, 33, marks=pytest.mark.slow),
        pytest.param("q4/128 zero", 1, 49152, 2, marks=pytest.mark.slow),
        pytest.param("q6_k", 65, 49152, 3, marks=pytest.mark.slow),
        pytest.param("dense", 49152, 576, 2, marks=pytest.mark.slow),
    ],
)
def test_no_worse_than_torch_at_the_shapes_of_models(kind: str, n: int, k: int, m: int) -> None:
    with interpreted(), one_tile(64, 8192 if n > 8192 else 1024):
        for run in (dequant_matmul, prefill_gemm):
            assert_kernel_no_worse(run, kind, m, n, k, torch.bfloat16)


@pytest.mark.parametrize("arch", [80, 90])
def test_tiles_of_the_tables(arch: int) -> None:
    with interpreted(arch):
        for run, kind, m, n, dtype in (
            (dequant_matmul, "q4/128", 17, 70, torch.bfloat16),
            (dequant_matmul, "q6_k", 33, 130, torch.float16),
            (dequant_matmul, "q4_k", 3, 70, torch.float32),
            (prefill_gemm, "q4_0", 70, 200, torch.bfloat16),
            (prefill_gemm, "dense", 70, 70, torch.float16),
            (prefill_gemm, "q8/row", 33, 70, torch.float32),
        ):
            assert_kernel_no_worse(run, kind, m, n, 200, dtype)


# ---- a row's bits ------------------------------------------------------------------------------------


def exact_cases() -> list[dict]:
    """Every two ways of cutting meet, with a kind of weight each."""
    axes = {"tile": TILES, "m": (2, 5, 17, 40), "dtype": FLOATS, "arch": (80, 90), "segments": (1, 2)}
    cases = pairwise({**axes, "scratch": (False, True)})
    assert len(cases) >= len(FORM_KINDS)
    return [{"kind": FORM_KINDS[i % len(FORM_KINDS)], **case} for i, case in enumerate(cases)]


def check_rows(
    kind: str,
    dtype: torch.dtype,
    arch: int,
    segments: int,
    tile: tuple[int, int],
    m: int,
    scratch: bool,
    k: int = 140,
    quick: bool = True,
) -> None:
    """Many rows by one kernel, some by the other, one alone: the same bits, with bias and residual."""
    w = kernel_weight(kind, 70, fitting_k(kind, k), dtype, segments=segments)
    x, bias = scattered(m, w.shape[1], dtype), torch.randn(70)
    residual = strided(torch.randn(m, 70).to(dtype))

    def run(function: Callable[..., Tensor], rows: slice) -> Tensor:
        return function(x[rows], w, bias=bias, residual=residual[rows])

    # the last row, and one in the middle of a panel
    alone = [slice(m - 1, m), slice(m // 3, m // 3 + 1)][: 1 if quick else 2]
    with kernels_on_cpu(arch):
        with one_tile(16, 128):
            expected = [run(dequant_matmul, row) for row in alone]
        with one_tile(*tile), pytest.MonkeyPatch.context() as patch:
            if scratch:
                patch.setattr(qgemm, "SCRATCH_ROWS", 2)
            many = run(prefill_gemm, slice(None))
            panel = slice(m // 2, m // 2 + MAX_ROWS)
            if not (quick and scratch):
                assert_same_bits(run(dequant_matmul, panel), many[panel], "a panel")
    for row, y in zip(alone, expected, strict=True):
        assert y.isfinite().all()
        assert_same_bits(y, many[row], f"{row}")


@pytest.mark.parametrize("kind", FORM_KINDS)
def test_a_row_has_the_bits_of_its_own_call(kind: str) -> None:
    with exact_sums():
        for case in exact_cases():
            if case["kind"] == kind:
                check_rows(**case)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORM_KINDS)
def test_a_row_has_the_bits_of_its_own_call_however_it_is_cut(kind: str) -> None:
    axes = {"dtype": FLOATS, "arch": (80, 90), "segments": (1, 2, 3), "tile": TILES, "m": (3, 33, 65, 130)}
    with exact_sums():
        for case in pairwise({**axes, "scratch": (False, True)}):
            check_rows(kind, **case, k=300, quick=False)


def test_uneven_segments() -> None:
    """Five blocks in two to four segments."""
    with exact_sums():
        for segments, kind, dtype in (
            (2, "q4/128", torch.bfloat16),
            (3, "dense", torch.float32),
            (4, "q8_0", torch.half),
        ):
            check_rows(kind, dtype, 90, segments, (16, 128), 3, scratch=False, k=600)


def test_more_rows_than_a_panel_and_more_tiles_than_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten row tiles in groups of 8, or of 3, by two column tiles: the order of programs alone."""
    w, x = kernel_weight("q4/128", 120, 128, torch.bfloat16), scattered(150, 128, torch.bfloat16)
    with exact_sums(), one_tile(16, 64):
        y = prefill_gemm(x, w)
        monkeypatch.setattr(qgemm, "GROUP", 3)
        assert_same_bits(prefill_gemm(x, w), y)
        for r in (63, 64, 149):
            assert_same_bits(matmul(x[r : r + 1], w), y[r : r + 1], f"row {r}")


def test_the_table_changes_no_bit() -> None:
    table = {"arch": 90, "tiles": {}}
    for name, (rows, cols, warps) in {
        "decode": (64, 128, 8),
        "prefill": (32, 64, 8),
        "prefill-fold": (16, 64, 4),
    }.items():
        table["tiles"][name] = {"1": {"rows": rows, "cols": cols, "warps": warps, "stages": 1}}
    w = {segments: kernel_weight("q4_1", 130, 256, torch.float16, segments=segments) for segments in (1, 2)}
    x = scattered(20, 256, torch.float16)
    with exact_sums():
        for q in w.values():
            before = [run(x, q) for run in (dequant_matmul, prefill_gemm)]
            with launch.tiles_from(table):
                assert launch.tile_for(90, "decode", "any", 1, 1, 1).cols == 128
                for y, run in zip(before, (dequant_matmul, prefill_gemm), strict=True):
                    assert_same_bits(run(x, q), y)


@pytest.mark.parametrize("kind", ["q4/128 zero", "q6_k", "dense"])
def test_rows_of_a_slice_of_the_weight(kind: str) -> None:
    k = fitting_k(kind, 140)
    w, x = kernel_weight(kind, 150, k, torch.bfloat16, segments=2), scattered(5, k, torch.bfloat16)
    ranges = ((64, 150), (128, 140)) if kind != "dense" else ((3, 70), (149, 150))
    with exact_sums(), one_tile(16, 256):
        whole = dequant_matmul(x, w)
        for run, (start, stop) in product((dequant_matmul, prefill_gemm), ranges):
            assert_same_bits(run(x, w[start:stop]), whole[:, start:stop], f"rows {start}:{stop}")


def test_strides_change_no_bit() -> None:
    w, x = kernel_weight("q4_0", 70, 160, torch.bfloat16), torch.randn(5, 160).bfloat16()
    matrix = kernel_weight("dense", 70, 160, torch.bfloat16).parts["weight"]
    residual = torch.randn(5, 70).bfloat16()
    with exact_sums(), one_tile(16, 128):
        for weight, same, gap in ((w, w, 8), (matrix, strided(matrix), 1), (matrix, dense(strided(matrix, 3)), 8)):
            for run in (dequant_matmul, prefill_gemm):  # with a gap of 1, odd rows start off 16 bytes
                y = run(x, weight, residual=residual)
                assert_same_bits(run(strided(x, gap), same, residual=strided(residual, gap)), y)
        assert_same_bits(matmul(x[:1].expand(3, -1), w), matmul(x[:1], w).expand(3, -1))
        assert_same_bits(matmul(x[::2], w), matmul(x, w)[::2])


def test_a_weight_written_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float16
    monkeypatch.setattr(qgemm, "SCRATCH_ROWS", 20)
    w, x = kernel_weight("q4/128", 130, 300, dtype), scattered(20, 300, dtype)
    need = prefill_workspace_nbytes(20, w, dtype)
    assert need == 2 * 192 * 384 and prefill_workspace_nbytes(19, w, dtype) == 0
    assert matmul_workspace_nbytes(20, w, dtype) == 4 * 3 * 20 * 130  # few rows: their partial sums
    assert matmul_workspace_nbytes(5, torch.zeros(64, 256)) == 4 * 2 * 5 * 64
    int8 = t64.pack_t64(quantize(torch.ones(64, 256), "q8", None), "t64-int8")
    assert matmul_workspace_nbytes(4096, int8) == 0
    workspace = torch.full((need + 16,), 255, dtype=torch.uint8)
    with exact_sums():
        alone = dequant_matmul(x[7:8], w)
        for space in (None, workspace, workspace[: need - 1]):
            with counted_launches() as launches:
                y = prefill_gemm(x, w, workspace=space)
            assert len(launches) == (1 if space is not None and space.nbytes < need else 2)
            assert_same_bits(y[7:8], alone)
    assert (workspace[need:] == 255).all() and (workspace[:need] != 255).any()


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    launches: list[str] = []
    run = JITFunction.run

    def note(self: JITFunction, *args: object, **kwargs: object) -> object:
        launches.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", note)
        yield launches


# ---- tests that can fail -----------------------------------------------------------------------------


@triton.jit
def _last_two_swapped(s, num_blocks, num_segments):
    """Segment ranges of which the last two change places."""
    s = tl.where(s == num_segments - 1, num_segments - 2, tl.where(s == num_segments - 2, num_segments - 1, s))
    return s * num_blocks // num_segments, (s + 1) * num_blocks // num_segments


@triton.jit
def _backwards(
    x_ptr,
    x_stride,
    alive,
    k,
    at,
    first,
    last,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EVEN_K: tl.constexpr,
    JOIN: tl.constexpr,
    ARCH: tl.constexpr,
):
    """A segment's blocks from the last to the first."""
    acc = tl.zeros((COLS, ROWS), tl.float32)
    for i in range(first, last):
        kb = last - 1 - (i - first)
        acc += segment_sum(x_ptr, x_stride, alive, k, at, kb, kb + 1, FORM, ROWS, COLS, EVEN_K, JOIN, ARCH)
    return acc


@triton.jit
def _forwards(
    x_ptr,
    x_stride,
    alive,
    k,
    at,
    first,
    last,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EVEN_K: tl.constexpr,
    JOIN: tl.constexpr,
    ARCH: tl.constexpr,
):
    """The same, in order: what `segment_sum` does."""
    acc = tl.zeros((COLS, ROWS), tl.float32)
    for kb in range(first, last):
        acc += segment_sum(x_ptr, x_stride, alive, k, at, kb, kb + 1, FORM, ROWS, COLS, EVEN_K, JOIN, ARCH)
    return acc


@triton.jit
def _folded_backwards(ptrs, mask, M, N, num_segments, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    step = M.to(tl.int64) * N
    for i in range(0, num_segments):
        total += tl.load(ptrs + (num_segments - 1 - i) * step, mask=mask, other=0.0)
    return total


@pytest.mark.parametrize(
    ("module", "name", "mutant", "segments", "same"),
    [
        (qmatmul, "segment_range", _last_two_swapped, 3, False),
        (qgemm, "segment_range", _last_two_swapped, 3, False),
        (qmatmul, "segment_sum", _backwards, 1, False),
        (qgemm, "segment_sum", _backwards, 1, False),
        (qgemm, "segment_sum", _backwards, 4, True),  # a block a segment: no order to change
        (qgemm, "segment_sum", _forwards, 1, True),
        (qmatmul, "_folded", _folded_backwards, 3, False),
    ],
)
def test_another_order_is_other_bits(
    module: object, name: str, mutant: object, segments: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel's order changed under the other: the comparison of the tests above sees it."""
    w, x = kernel_weight("q4_0", 70, 512, torch.bfloat16, segments=segments), scattered(3, 512, torch.bfloat16)
    runs = {qmatmul: dequant_matmul, qgemm: prefill_gemm}
    with exact_sums(), one_tile(16, 128):
        right = [run(x, w, out_dtype=torch.float32) for run in runs.values()]
        assert_same_bits(*right)
        monkeypatch.setattr(module, name, mutant)
        wrong = runs[module](x, w, out_dtype=torch.float32)
    torch.testing.assert_close(wrong, right[0], rtol=1e-3, atol=1e-3)  # a sum of the same terms
    assert torch.equal(wrong, right[0]) == same


def test_other_segments_are_other_bits() -> None:
    x, w = scattered(3, 512, torch.bfloat16), kernel_weight("q4_0", 70, 512, torch.bfloat16, segments=4)
    with exact_sums(), one_tile(16, 128):
        results = [prefill_gemm(x, replace(w, segments=s), out_dtype=torch.float32) for s in (1, 2, 4)]
    assert not torch.equal(results[0], results[1])
    assert_same_bits(results[0], results[2], "four blocks one by one")


# ---- memory ------------------------------------------------------------------------------------------


def test_columns_past_k_are_not_read_as_weights() -> None:
    """x ends in the middle of a block and NaN follows; what the weight holds there does not matter."""
    for kind in ("q4/32 bias", "q4/128 zero", "q8/row", "dense"):
        w = kernel_weight(kind, 65, 130, torch.bfloat16)
        x = strided(torch.randn(3, 130).bfloat16())
        with interpreted(), one_tile(16, 128):
            for run in (dequant_matmul, prefill_gemm):
                y = run(x, w)
                assert y.isfinite().all()
                if kind != "dense":
                    spoiled = dict(w.parts)
                    spoiled["codes"] = w.parts["codes"].clone()
                    spoiled["codes"][:, 1, ..., 31:] = 0x7777  # the last columns of the last block
                    assert_same_bits(run(x, replace(w, parts=spoiled)), y)


def test_a_weight_that_is_too_short_is_a_fault() -> None:
    """The bounds check of the tests above can fail."""
    w = kernel_weight("q4/128", 130, 256, torch.bfloat16)
    short = replace(w, parts={**w.parts, "codes": w.parts["codes"][:, :1]})  # half of each tile
    with interpreted(), one_tile(16, 64), pytest.raises(KernelFault, match="out of bounds"):
        wrong = replace(short, parts={**short.parts, "codes": short.parts["codes"].expand(3, 2, 64, 32)})
        dequant_matmul(torch.randn(1, 256).bfloat16(), wrong)


def sparse(count: int) -> Tensor:
    """bfloat16 zeros in memory that is taken only where it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, 2 * count, flags=flags), dtype=torch.bfloat16)


def test_offsets_past_2_to_the_31() -> None:
    """Rows of x and of a residual, and of a dense weight, further apart than an int32 reaches."""
    pitch, rows = 1 << 22, (0, 511, 512, 599)
    # every lane of x is still in its tile's reach: 256 * 2^22 < 2^31
    wide = sparse(600 * pitch).as_strided((600, 128), (pitch, 1))
    x = torch.randn(4, 128).bfloat16()
    wide[list(rows)] = x
    w = kernel_weight("q4/128", 64, 128, torch.bfloat16)
    with interpreted(races=False), one_tile(256, 64):
        y = prefill_gemm(wide, w, residual=wide[:, :64])
        assert_same_bits(y[list(rows)], prefill_gemm(x, w, residual=x[:, :64].contiguous()))
    matrix = torch.randn(130, 128).bfloat16()
    far = sparse(600 * pitch).as_strided((130, 128), (1 << 24, 1))
    far.copy_(matrix)
    with interpreted(races=False), one_tile(16, 64):
        for run in (dequant_matmul, prefill_gemm):
            assert_same_bits(run(x, far), run(x, matrix))


# ---- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["q4_0", "dense"])
def test_one_rounding_at_the_end(kind: str) -> None:
    w, x = kernel_weight(kind, 65, 192, torch.bfloat16, segments=2), scattered(9, 192, torch.bfloat16)
    bias, residual = torch.randn(65), torch.randn(9, 65).half()
    with exact_sums(), one_tile(16, 128):
        for run in (dequant_matmul, prefill_gemm):
            total = run(x, w, out_dtype=torch.float32)
            assert_same_bits(run(x, w), total.bfloat16())
            assert_same_bits(run(x, w, bias=bias, out_dtype=torch.float16), (total + bias).half())
            for out_dtype in (torch.bfloat16, torch.float32):
                expected = (total + bias + residual.float()).to(out_dtype)
                assert_same_bits(run(x, w, bias=bias, residual=residual, out_dtype=out_dtype), expected)


def test_inputs_stay_as_they_were() -> None:
    w, x, residual = kernel_weight("q4_k", 65, 256, torch.bfloat16), torch.randn(3, 256).bfloat16(), torch.randn(3, 65)
    before = [t.clone() for t in (x, residual, *w.parts.values())]
    with interpreted(), one_tile(16, 128):
        for run in (dequant_matmul, prefill_gemm):
            run(x, w, residual=residual)
    for tensor, was in zip((x, residual, *w.parts.values()), before, strict=True):
        assert_same_bits(tensor, was)


def test_no_rows_give_no_rows() -> None:
    with interpreted():
        for run, kind in product(RUNS.values(), ("q4/128", "dense")):
            w = kernel_weight(kind, 70, 130, torch.float16)
            more = {"bias": torch.zeros(70), "residual": torch.zeros(0, 70)}
            y = run(torch.empty(0, 130).half(), w, **more, out_dtype=torch.float32)
            assert (tuple(y.shape), y.dtype) == ((0, 70), torch.float32)


def test_act_order_reads_columns_in_the_weights_order() -> None:
    q = kind_of_weight("q4/64 perm", 70, 192)
    x = scattered(3, 192, torch.bfloat16)
    stored = replace(q, parts={name: part for name, part in q.parts.items() if name != "perm"})
    with exact_sums(), one_tile(16, 128):
        for run in (dequant_matmul, prefill_gemm):
            assert_same_bits(run(x, t64.pack_t64(q)), run(x[:, q.parts["perm"].long()], t64.pack_t64(stored)))
            assert_kernel_no_worse(run, "q4/64 perm", 5, 70, 192, torch.bfloat16)


def test_a_packed_weight_of_another_shape_of_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`matmul` picks by the rows."""
    chosen: list[str] = []
    for name in ("decode", "prefill"):
        monkeypatch.setattr(qmatmul, name, lambda *args, name=name: chosen.append(name))
    w: QTensor = kernel_weight("q4/128", 70, 128, torch.bfloat16)
    with kernels_on_cpu(90):
        for m in (0, 1, MAX_ROWS, MAX_ROWS + 1, 5000):
            matmul(torch.empty(m, 128, dtype=torch.bfloat16), w)
    assert chosen == ["decode", "decode", "decode", "prefill", "prefill"]


def test_infinities_of_one_row_stay_in_it() -> None:
    w, x = kernel_weight("q4_0", 70, 160, torch.bfloat16), torch.randn(20, 160).bfloat16()
    bad = x.clone()
    bad[3], bad[7, 5] = float("nan"), float("inf")
    others = [r for r in range(20) if r not in (3, 7)]
    with exact_sums(), one_tile(16, 128), np.errstate(all="ignore"):
        for run in (dequant_matmul, prefill_gemm):
            y = run(bad, w)
            assert_same_bits(y[others], run(x, w)[others])
            assert y[3].isnan().all() and not y[7].isfinite().all()
