"""The repaired interpreter computes what torch computes, refuses what a GPU would not report, and leaves no trace."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

tl = pytest.importorskip("triton.language")

import triton  # noqa: E402
from interpreter import KernelFault, interpreted  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime import interpreter as stock  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from csrc_triton.launch import OPTIONS, arch_of, runs_kernel  # noqa: E402

N = 256
MAGIC = tl.constexpr(0x4300)  # bf16 bits of 128.0; an integer below 128 in the low bits adds itself


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x - y)
    tl.store(out_ptr + 2 * N + i, x * y)
    tl.store(out_ptr + 3 * N + i, x * 1.5 + y)
    tl.store(out_ptr + 4 * N + i, tl.where(x < y, x, y))
    tl.store(out_ptr + 5 * N + i, tl.maximum(x, y))


@triton.jit
def _cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def _magic_kernel(codes_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    bits = (tl.load(codes_ptr + i).to(tl.int16) & 0x7F) | MAGIC
    tl.store(out_ptr + i, bits.to(tl.bfloat16, bitcast=True) - 136.0)


@triton.jit
def _asm_kernel(codes_ptr, out_ptr, N: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr):
    i = tl.arange(0, N)
    codes = tl.load(codes_ptr + i)
    low, high = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [codes], (tl.bfloat16, tl.bfloat16), True, 2)
    tl.store(out_ptr + i, low)
    tl.store(out_ptr + N + i, high)


@triton.jit
def _fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.fma(tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, acc_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    at = m[:, None] * N + n[None, :]
    a, b = tl.load(a_ptr + m[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * N + n[None, :])
    acc = tl.dot(a, b, tl.load(acc_ptr + at), input_precision="ieee", out_dtype=acc_ptr.dtype.element_ty)
    tl.store(out_ptr + at, acc)


@triton.jit
def _copy_kernel(x_ptr, out_ptr, n, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def _undefined_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n))


@triton.jit
def _read_after_write_kernel(x_ptr):
    tl.store(x_ptr + tl.program_id(0), tl.load(x_ptr + 1 - tl.program_id(0)))


@triton.jit
def _collide_kernel(out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i // 2, i)


@triton.jit
def _count_kernel(out_ptr):
    tl.atomic_add(out_ptr, 1)


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    assert a.dtype == b.dtype
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_bfloat16_arithmetic_is_that_of_torch() -> None:
    x, y = _randn(N, dtype=torch.bfloat16), _randn(N, dtype=torch.bfloat16)
    out = torch.empty(6, N, dtype=torch.bfloat16)
    with interpreted():
        _arithmetic_kernel[(1,)](x, y, out, N)
    expected = torch.stack((x + y, x - y, x * y, x * 1.5 + y, torch.where(x < y, x, y), torch.maximum(x, y)))
    assert _same_bits(out, expected)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.int8, torch.bfloat16),
        (torch.int32, torch.bfloat16),
        (torch.bfloat16, torch.int32),
        (torch.float32, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_casts_are_those_of_torch(source: torch.dtype, target: torch.dtype) -> None:
    x = (_randn(N) * 100).to(source)
    out = torch.empty(N, dtype=target)
    with interpreted():
        _cast_kernel[(1,)](x, out, N)
    assert _same_bits(out, x.to(target))


def test_float32_to_bfloat16_rounds_to_nearest_even() -> None:
    bits = torch.arange(N, dtype=torch.int32) * 0x4000 + 0x3F800000  # every fourth one is a tie
    edge = torch.tensor([3.4e38, -3.4e38, 1e-40, -0.0, math.inf, math.nan, 1e-45, 0.0])
    x = torch.cat((bits.view(torch.float32)[: N - 8], edge))
    out = torch.empty(N, dtype=torch.bfloat16)
    with interpreted():
        _cast_kernel[(1,)](x, out, N)
    assert torch.equal(out, x.bfloat16()) or torch.equal(out.nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))
    assert out[0] == 1.0 and out[2] == 1.0 and out[6] == 1.0 + 2**-6  # ties go to the even neighbour


def test_magic_numbers_turn_codes_into_exact_integers() -> None:
    codes = torch.arange(N, dtype=torch.uint8)
    out = torch.empty(N, dtype=torch.bfloat16)
    with interpreted():
        _magic_kernel[(1,)](codes, out, N)
    assert torch.equal(out, ((codes & 0x7F).float() - 8).bfloat16())


NIBBLES = """{ .reg .b32 t, m, c, one; mov.b32 m, 0x000f000f; mov.b32 c, 0xc308c308; mov.b32 one, 0x3f803f80;
lop3.b32 $0, $2, m, 0x43004300, 0xea; fma.rn.bf16x2 $0, $0, one, c;
shr.u32 t, $2, 4; lop3.b32 $1, t, m, 0x43004300, 0xea; sub.bf16x2 $1, $1, 0x43084308; }"""


def test_inline_assembly_runs() -> None:
    codes = torch.randint(0, 256, (N,), dtype=torch.int16)
    out = torch.empty(2, N, dtype=torch.bfloat16)
    with interpreted():
        _asm_kernel[(1,)](codes, out, N, NIBBLES, "=&r,=&r,r")
        with pytest.raises(stock.InterpreterError, match="must be '=&r'"):
            _asm_kernel[(1,)](codes, out, N, NIBBLES, "=r,=&r,r")
    assert torch.equal(out.float(), torch.stack((codes & 15, codes >> 4)).float() - 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fma_rounds_once(dtype: torch.dtype) -> None:
    x, y = _randn(N, dtype=dtype), _randn(N, dtype=dtype)
    z = -(x * y)  # what is left is the rounding error of the product
    z[::3] = _randn(N, dtype=dtype)[::3]
    if dtype is torch.float32:  # float64 rounds x * y + z to a tie of float32, and a second rounding would go up
        x[0], y[0], z[0] = 1 - 2**-23, 2**-24 + 2**-47, 1 + 2**-23
    out = torch.empty(N, dtype=dtype)
    with interpreted():
        _fma_kernel[(1,)](x, y, z, out, N)
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    ]
    for value, got in zip(exact, out, strict=True):
        neighbours = (
            got,
            torch.nextafter(got, got.new_tensor(math.inf)),
            torch.nextafter(got, got.new_tensor(-math.inf)),
        )
        error, *others = (abs(value - Fraction(n.item())) for n in neighbours)
        assert error <= min(others)


@pytest.mark.parametrize("sequential", [False, True])
def test_bfloat16_dot_is_that_of_torch(sequential: bool) -> None:
    a, b = (torch.randint(-8, 8, shape).bfloat16() for shape in ((16, 64), (64, 32)))
    acc, out = torch.ones(16, 32), torch.empty(16, 32)
    with interpreted(sequential_dot=sequential):
        _dot_kernel[(1,)](a, b, acc, out, 16, 32, 64)
    assert torch.equal(out, a.float() @ b.float() + 1)  # small integers: exact in any order


def test_int8_dot_is_exact() -> None:
    a, b = (torch.randint(-128, 128, shape).to(torch.int8) for shape in ((16, 64), (64, 32)))
    acc, out = torch.ones(16, 32, dtype=torch.int32), torch.empty(16, 32, dtype=torch.int32)
    with interpreted(sequential_dot=True):
        _dot_kernel[(1,)](a, b, acc, out, 16, 32, 64)
    assert torch.equal(out, a.int() @ b.int() + 1)


def test_sequential_dot_starts_from_the_accumulator_and_ascends() -> None:
    a, b, acc = _randn(16, 32), _randn(32, 16), _randn(16, 16)
    a[0, :3], b[:3, 0], acc[0, 0] = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([1e8, 1e8, 1.0]), 1.0
    a[0, 3:] = 0.0
    out = torch.empty(16, 16)
    with interpreted(sequential_dot=True):
        _dot_kernel[(1,)](a, b, acc, out, 16, 16, 32)
    expected = acc.clone()
    for k in range(32):
        expected = expected + a[:, k, None] * b[None, k]
    assert torch.equal(out, expected)
    assert out[0, 0] == 1.0  # ((1 + 1e8) - 1e8) + 1; any other order gives 2


def test_lanes_out_of_bounds_are_faults() -> None:
    x, out = _randn(64), torch.empty(64)
    with interpreted():
        _copy_kernel[(1,)](x, out, 64, 64, 64)
        assert torch.equal(x, out)
        with pytest.raises(
            KernelFault, match=r"load: 3 of 64 active lanes .* byte 244 of x_ptr \(244 bytes\).*_copy_kernel"
        ):
            _copy_kernel[(1,)](x[:61], out, 64, 64, 64)
        with pytest.raises(KernelFault, match=r"store: 1 of 63 active lanes .* of out_ptr \(248 bytes\)"):
            _copy_kernel[(1,)](x, out[:62], 63, 64, 64)
        with pytest.raises(KernelFault, match="out of bounds"):
            _copy_kernel[(1,)](x, out[:0], 63, 64, 64)


def test_misaligned_elements_are_faults() -> None:
    x = torch.zeros(65 * 4, dtype=torch.uint8)
    with interpreted(), pytest.raises(KernelFault, match="off their alignment"):
        _copy_kernel[(1,)](triton.reinterpret(x[1:257], tl.float32), torch.empty(64), 64, 64, 64)


def test_programs_that_meet_in_memory_are_faults() -> None:
    x, out = _randn(64), torch.empty(64)
    with interpreted():
        _copy_kernel[(2,)](x, out, 64, 32, 32)
        with pytest.raises(KernelFault, match=r"race: program \(1, 0, 0\) writes out_ptr where program number 0 wrote"):
            _copy_kernel[(2,)](x, out, 64, 16, 32)
        with pytest.raises(KernelFault, match=r"race: .* read"):
            _read_after_write_kernel[(2,)](torch.zeros(2))
        with pytest.raises(KernelFault, match="different values to one place"):
            _collide_kernel[(1,)](torch.zeros(8, dtype=torch.int32), 16)
        count = torch.zeros(1, dtype=torch.int32)
        _count_kernel[(3,)](count)
        assert count.item() == 3
    with interpreted(races=False):
        _copy_kernel[(2,)](x, out, 64, 16, 32)


def test_masked_lanes_without_other_are_undefined() -> None:
    out = torch.zeros(64)
    with interpreted():
        _undefined_kernel[(1,)](_randn(64), out, 60, 64)
    assert out[:60].isfinite().all() and out[60:].isnan().all()


def _patched_names() -> list[object]:
    places = (
        (stock, ("_get_np_dtype", "_patch_lang", "interpreter_builder", "interpreter_semantic")),
        (stock.GridExecutor, ("__call__",)),
        (stock.InterpretedFunction, ("rewritten_fn",)),
        (JITFunction, ("run", "__call__")),
        (tl, tuple(n for n in dir(tl) if not n.startswith("_"))),
        (tl.core, tuple(n for n in dir(tl.core) if not n.startswith("__"))),
        (tl.math, tuple(n for n in dir(tl.math) if not n.startswith("__"))),
        (tl.tensor, tuple(n for n in dir(tl.tensor) if n != "__class__")),
        (tl.dtype, ("to_ir",)),
    )
    return [getattr(owner, name) for owner, names in places for name in names]


def test_nothing_stays_patched_and_compiling_works_before_and_after(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"x_ptr": "*bf16", "out_ptr": "*fp32", "N": "constexpr"}
    source = ASTSource(_cast_kernel, signature, constexprs={"N": N})
    before, names = _patched_names(), set(globals())
    first = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=dict(OPTIONS))
    with pytest.raises(RuntimeError, match="out of the context"), interpreted():
        _cast_kernel[(1,)](_randn(N), torch.empty(N), N)
        assert runs_kernel(torch.empty(1)) and arch_of(torch.empty(1)) == 90
        raise RuntimeError("out of the context")
    assert not runs_kernel(torch.empty(1))
    assert all(a is b or a == b for a, b in zip(before, _patched_names(), strict=True)) and set(globals()) == names
    second = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(OPTIONS))
    assert first.asm["cubin"] and second.asm["cubin"]
