"""csrc_triton/ops.py: the functions as operators, with the functions' bits, for torch.compile."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import FORMATS, assert_same_bits, random_weight
from interpreter import interpreted
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from csrc_triton import cpu, fused, ops, qmatmul, t64, w8a8
from csrc_triton.quant import DENSE, QTensor, quantize

N, K = 64, 256
Call = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # operator, function, arguments
NAMES = ("matmul", "matmul dense", "swiglu_matmul", "lm_head_argmax", "w8a8_matmul")
NAMES += ("rmsnorm", "rmsnorm residual", "add_rmsnorm", "swiglu", "argmax")
BACKENDS = pytest.mark.parametrize("backend", ("eager", "aot_eager"))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@cache
def weights(on_gpu: bool) -> dict[str, QTensor]:
    """By operator; what a GPU multiplies by takes no kernel to make."""
    gen = torch.Generator().manual_seed(5)
    a, b = (0.1 * torch.randn(N, K, generator=gen) for _ in range(2))
    row = quantize(a, "q8", None)
    if on_gpu:
        gate_up = t64.pack_gate_up(quantize(a, "q4"), quantize(b, "q4"))
        return {"q4": t64.pack_t64(quantize(a, "q4")), "gate_up": gate_up, "w8a8": t64.pack_t64(row, "t64-int8")}
    q4 = cpu.checked(cpu.pack(quantize(a, "q4"), "f32"))
    return {"q4": q4, "gate_up": q4, "w8a8": QTensor("q8", (N, K), K, 2, "cpu-w8a8", int8_parts(row))}


def int8_parts(row: QTensor) -> dict[str, Tensor]:
    """The form of scheme w8a8 that is made of tensors, whichever is the faster one here."""
    return {"codes": row.parts["codes"], "scale": row.parts["scale"].flatten()}


def call(name: str, m: int, on_gpu: bool, dtype: torch.dtype = torch.float32) -> Call:
    w, x, residual = weights(on_gpu), torch.randn(m, K).to(dtype), torch.randn(m, K).to(dtype)
    bias, added = torch.randn(N).to(dtype), torch.randn(m, N).to(dtype)
    scale = torch.rand(K).to(dtype)
    return {
        "matmul": (ops.matmul, qmatmul.matmul, (x, w["q4"]), {"bias": bias, "residual": added}),
        "matmul dense": (ops.matmul, qmatmul.matmul, (x, torch.randn(N, K).to(dtype)), {"out_dtype": torch.float32}),
        "swiglu_matmul": (ops.swiglu_matmul, qmatmul.swiglu_matmul, (x, w["gate_up"]), {"activation": "gelu_tanh"}),
        "lm_head_argmax": (ops.lm_head_argmax, qmatmul.lm_head_argmax, (x, w["q4"]), {}),
        "w8a8_matmul": (ops.w8a8_matmul, w8a8.w8a8_matmul, (x, w["w8a8"]), {"bias": bias}),
        "rmsnorm": (ops.rmsnorm, fused.rmsnorm, (x, scale, 1e-5), {"out_dtype": torch.float16}),
        "rmsnorm residual": (ops.rmsnorm, fused.rmsnorm, (x, scale, 1e-5, residual), {}),
        "add_rmsnorm": (ops.add_rmsnorm, fused.add_rmsnorm, (x, residual, scale, 1e-5), {}),
        "swiglu": (ops.swiglu, fused.swiglu, (x, "silu", 64), {}),
        "argmax": (ops.argmax, fused.argmax, (x,), {}),
    }[name]


def assert_same(actual: Any, expected: Any) -> None:
    for a, b in zip(*(y if isinstance(y, tuple) else (y,) for y in (actual, expected)), strict=True):
        assert_same_bits(a, b)


class Recorder(TorchDispatchMode):
    """The operators that are called, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def recorded(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    with Recorder() as recorder:
        op(*args, **kwargs)
    return next(call for call in recorder.calls if call[0].namespace == "polymodel")


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_has_the_function_s_bits(name: str) -> None:
    for m in (1, 3, 70):
        op, function, args, kwargs = call(name, m, False)
        assert_same(op(*args, **kwargs), function(*args, **kwargs))


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_is_what_torch_expects_of_one(name: str) -> None:
    op, _, args, kwargs = call(name, 3, False)
    torch.library.opcheck(*recorded(op, args, kwargs))


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_around_a_kernel_is_what_torch_expects(name: str) -> None:
    with interpreted(90):
        op, function, args, kwargs = call(name, 2, True, torch.bfloat16)
        assert_same(op(*args, **kwargs), function(*args, **kwargs))
        torch.library.opcheck(*recorded(op, args, kwargs), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("width", (64, 60))
def test_fake_results_have_the_strides_of_padded_rows(width: int) -> None:
    with interpreted(90):
        x = fused.new_rows((3, 2 * width), torch.bfloat16, "cpu").fill_(1.0)
        weight = torch.ones(2 * width, dtype=torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(x)
            shapes = [(y.shape, y.stride(), y.dtype) for y in (ops.swiglu(fake), ops.rmsnorm(fake, weight, 1e-5))]
        assert shapes == [(y.shape, y.stride(), y.dtype) for y in (ops.swiglu(x), ops.rmsnorm(x, weight, 1e-5))]


def block(x: Tensor, norm: Tensor, w: QTensor, head: QTensor) -> tuple[Tensor, Tensor]:
    """Every operator and arithmetic of torch's own between them."""
    total, y = ops.add_rmsnorm(x * 2, x + 1, norm, 1e-5)
    gate_up = ops.matmul(y, w).repeat(1, 4)
    y = ops.rmsnorm(torch.cat((ops.swiglu(gate_up), gate_up[:, :128]), 1) + total, norm, 1e-5)
    return ops.lm_head_argmax(y, head), ops.swiglu_matmul(y, w) + 1


@pytest.mark.parametrize(
    "backend",
    (
        "eager",
        "aot_eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler for CPU code"),
        ),
    ),
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of inductor's own imports
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_has_the_same_bits(backend: str) -> None:
    norm, w = torch.rand(K), weights(False)["q4"]
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
    for m in (3, 7, 70):
        x = torch.randn(m, K)
        assert_same(compiled(x, norm, w, w), block(x, norm, w, w))


@pytest.mark.usefixtures("fresh_compiler")
@BACKENDS
def test_compiled_code_runs_kernels(backend: str) -> None:
    with interpreted(90):
        w, x = weights(True)["q4"], torch.randn(3, K).bfloat16()

        def step(x: Tensor) -> Tensor:
            return ops.matmul(ops.rmsnorm(x, x[0].contiguous(), 1e-5), w)

        assert_same(torch.compile(step, backend=backend, fullgraph=True)(x), step(x))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_weight_crosses_as_tensors_numbers_and_words(fmt: str) -> None:
    q = random_weight(fmt, N, K)
    weight = q if fmt in DENSE or fmt == "q4 group 48" else t64.pack_t64(q)
    again = ops.weight_of(*ops.described(weight))
    assert {**vars(again), "parts": None} == {**vars(weight), "parts": None} and list(again.parts) == list(weight.parts)
    assert all(again.parts[name] is part for name, part in weight.parts.items())


@pytest.mark.skipif(not cpu.has_half_panels(), reason="this build of torch has no half-precision panels")
def test_panels_cannot_cross() -> None:
    q = cpu.pack(random_weight("q4", N, K), "f16")
    with pytest.raises(ValueError, match=r"'cpu-f16': its 'panels'.*pack it with a scheme made of tensors"):
        ops.matmul(torch.randn(2, K), q)


@pytest.mark.usefixtures("fresh_compiler")
def test_inputs_that_require_grad_are_refused() -> None:
    w, x = weights(False)["q4"], torch.randn(2, K, requires_grad=True)
    with torch.enable_grad():
        with pytest.raises(ValueError, match="matmul: an input requires grad"):
            ops.matmul(x, w)
        with pytest.raises(Exception, match="matmul: an input requires grad"):
            torch.compile(lambda x: ops.matmul(x, w) * 2, backend="aot_eager")(x)


def test_bad_arguments_get_the_function_s_error() -> None:
    with pytest.raises(ValueError, match="x must be contiguous float32"):
        ops.matmul(torch.randn(2, K + 1), weights(False)["q4"])


def test_nothing_but_linear_imports_the_operators() -> None:
    root = Path(ops.__file__).parent.parent
    importing = re.compile(r"^\s*(from|import) csrc_triton.*\b(ops|linear)\b", re.MULTILINE)
    files = [path for package in ("csrc_triton", "polymodel") for path in sorted((root / package).glob("*.py"))]
    assert [path.name for path in files if importing.search(path.read_text())] == ["linear.py"]
