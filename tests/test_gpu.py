"""What only a GPU can show: the kernels as compiled, by value and by their bits. tools/gpu_run.py runs these."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import assert_no_worse, assert_same_bits, random_weight
from torch import Tensor

from csrc_triton import qgemm, t64
from csrc_triton.cpu import pack as pack_for_cpu
from csrc_triton.fused import add_rmsnorm, argmax, quantize_rows, rmsnorm, rmsnorm_ref, swiglu, swiglu_ref, top_k
from csrc_triton.launch import kernels_on_cpu
from csrc_triton.linear import QLinear
from csrc_triton.qgemm import prefill_gemm
from csrc_triton.qmatmul import (
    dequant_matmul,
    lm_head_argmax,
    matmul,
    matmul_ref,
    matmul_rmsnorm,
    matmul_workspace_nbytes,
    swiglu_matmul,
)
from csrc_triton.quant import QTensor, dense, quantize
from csrc_triton.w8a8 import w8a8_matmul

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FORMATS = ("q4 128", "q4", "q4 zero", "q8", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "dense")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65, 130, 257)


def weight(fmt: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> QTensor:
    if fmt == "dense":
        return dense(torch.randn(n, k, dtype=dtype, device="cuda"))
    stored = quantize(torch.randn(n, k), "q4", 128) if fmt == "q4 128" else random_weight(fmt, n, k)
    return t64.pack_t64(stored.to("cuda"))


def rows(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, k, device="cuda").to(dtype)


def table(q: QTensor) -> Tensor:
    return q.parts["weight"].float() if "weight" in q.parts else t64.dequantize_t64(q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_values(fmt: str, dtype: torch.dtype) -> None:
    """No worse than torch in the same dtype, for every count of rows."""
    for n, k in ((130, 512), (1536, 1024)):
        w, x = weight(fmt, n, k, dtype), rows(max(ROWS), k, dtype)
        exact, same = matmul_ref(x, w), x @ table(w).to(dtype).T
        for m in ROWS:
            assert_no_worse(matmul(x[:m], w), exact[:m], same[:m], slack=float(exact.abs().max()) * 1e-6)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (65, 65), (576, 1536), (300, 576)])
def test_odd_shapes(n: int, k: int) -> None:
    w = t64.pack_t64(quantize(torch.randn(n, k), "q4", 128).to("cuda"))
    for m in (1, 17, 130):
        x = rows(m, k)
        same = x @ table(w).bfloat16().T
        assert_no_worse(matmul(x, w), matmul_ref(x, w), same, slack=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_rows_bits_are_its_own(fmt: str, dtype: torch.dtype) -> None:
    w, x = weight(fmt, 320, 1024, dtype), rows(257, 1024, dtype)
    whole = matmul(x, w)
    assert len(whole.unique()) > 1000
    for m in ROWS:
        assert_same_bits(matmul(x[:m], w), whole[:m], f"{m} rows")
    for r in (0, 63, 64, 128, 256):
        assert_same_bits(dequant_matmul(x[r : r + 1], w), whole[r : r + 1], f"row {r}")
    order = torch.randperm(257, device="cuda")
    assert_same_bits(matmul(x[order], w), whole[order])
    for _ in range(20):
        assert_same_bits(matmul(x[:16], w), whole[:16])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("fmt", FORMATS[:-1])
def test_assembly_is_its_plain_twin(fmt: str, dtype: torch.dtype) -> None:
    w, x = weight(fmt, 192, 512), rows(70, 512, dtype)
    fast = matmul(x[:5], w), matmul(x, w)
    with kernels_on_cpu(90, plain=True):
        plain = matmul(x[:5], w), matmul(x, w)
    for a, b in zip(fast, plain, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("fmt", ["q4 128", "q4_0", "q4_k", "q8"])
def test_written_out_or_made_in_registers(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = weight(fmt, 320, 1024), rows(2048, 1024)
    direct = prefill_gemm(x, w)
    monkeypatch.setattr(qgemm, "SCRATCH_ROWS", 2048)
    assert_same_bits(prefill_gemm(x, w), direct)
    assert_same_bits(matmul(x[:9], w), direct[:9])


@pytest.mark.parametrize("segments", [1, 4])
def test_fused_products_are_their_parts(segments: int) -> None:
    gate, up = (quantize(torch.randn(200, 512), "q4", 128).to("cuda") for _ in range(2))
    both, x = replace(t64.pack_gate_up(gate, up), segments=segments), rows(70, 512)
    a, b = (replace(t64.pack_t64(q), segments=segments) for q in (gate, up))
    expected = swiglu(torch.cat((matmul(x, a), matmul(x, b)), 1), block=200)
    assert_same_bits(swiglu_matmul(x, both).contiguous(), expected.contiguous())
    assert_same_bits(swiglu_matmul(x[:5], both).contiguous(), expected[:5].contiguous())
    head = replace(t64.pack_t64(quantize(torch.randn(1000, 512), "q8", None).to("cuda")), segments=segments)
    assert_same_bits(lm_head_argmax(x[:33], head), argmax(matmul(x[:33], head, out_dtype=torch.float32)))
    norm, residual = torch.rand(200, device="cuda"), rows(6, 200)
    y, normed = matmul_rmsnorm(x[:6], a, norm, 1e-5, residual=residual)
    assert_same_bits(y.contiguous(), matmul(x[:6], a, residual=residual))
    assert_same_bits(normed, rmsnorm(y, norm, 1e-5))


def test_eight_bit_products_are_the_cpus() -> None:
    stored, x = quantize(torch.randn(96, 576), "q8", None), torch.randn(70, 576)
    w = t64.pack_t64(stored.to("cuda"), "t64-int8")
    on_cpu = w8a8_matmul(x, pack_for_cpu(stored, "w8a8"))
    assert_same_bits(w8a8_matmul(x.cuda(), w).cpu(), on_cpu)
    assert_same_bits(w8a8_matmul(x[:3].cuda(), w).cpu(), on_cpu[:3])


@pytest.mark.parametrize("width", [64, 576, 4096, 12000])
def test_row_kernels(width: int) -> None:
    x, residual, norm = rows(33, width), rows(33, width), torch.rand(width, device="cuda")
    wide = rmsnorm_ref(x, norm, 1e-5)
    assert_no_worse(rmsnorm(x, norm, 1e-5), wide, wide.bfloat16())
    stream, normed = add_rmsnorm(x, residual, norm, 1e-5)
    assert_same_bits(stream, x + residual)
    assert_same_bits(normed, rmsnorm(stream, norm, 1e-5))
    assert_same_bits(rmsnorm(x[7:8], norm, 1e-5), rmsnorm(x, norm, 1e-5)[7:8])
    exact = swiglu_ref(x)
    assert_no_worse(swiglu(x), exact, exact.bfloat16(), slack=1e-3)
    codes, scale = quantize_rows(x)
    assert ((codes * scale[:, None] - x.float()).abs() <= scale[:, None] * 0.51).all()
    logits = rows(5, width, torch.float32)
    values, ids = top_k(logits, 8)
    assert_same_bits(values, logits.sort(1, descending=True).values[:, :8].contiguous())
    assert_same_bits(ids[:, 0], argmax(logits))
    assert_same_bits(ids[:, 0], logits.argmax(1))


def test_in_a_graph() -> None:
    w, x = weight("q4 128", 1024, 1024), rows(4, 1024)
    space = torch.empty(matmul_workspace_nbytes(4, w), dtype=torch.uint8, device="cuda")
    expected = matmul(x, w, workspace=space)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = matmul(x, w, workspace=space)
    x.copy_(rows(4, 1024))
    graph.replay()
    assert_same_bits(y, matmul(x, w))
    assert not torch.equal(y, expected)


def test_a_layer() -> None:
    linear = torch.nn.Linear(1024, 512, device="cuda", dtype=torch.bfloat16)
    layer, x = QLinear.from_linear(linear), rows(70, 1024)
    with torch.no_grad():
        y = layer(x)
        assert (y - linear(x)).norm() < 0.2 * linear(x).norm()
        for m in (0, 33, 69):
            assert_same_bits(layer(x[m : m + 1]), y[m : m + 1])
        compiled = torch.compile(layer)
        assert_same_bits(compiled(x), y)
