"""Few rows times a packed weight (decode, verify), with what follows fused into it.

    y[m, :] = x[m, :] . W^T (+ bias) (+ residual)

Memory: x and y are float32 rows; the weight is a QTensor in its device's layout (csrc_triton.cpu.pack).
Promise: row m of y equals the call on x[m : m + 1] alone, bit for bit, whatever M.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.quant import QTensor

MAX_ROWS = 64  # decode and verify panels; more rows are prefill_gemm's


def dequant_matmul(
    x: Tensor,
    w: QTensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    workspace: Tensor | None = None,
) -> Tensor:
    """x [M, K] float32 with M in 0..64, w packed [N, K] -> [M, N]; bias [N]; residual [M, N] added last."""
    if x.ndim == 2 and x.shape[0] > MAX_ROWS:
        raise ValueError(f"dequant_matmul: {x.shape[0]} rows, expected at most {MAX_ROWS}; use matmul or prefill_gemm")
    return matmul(x, w, bias=bias, residual=residual, out_dtype=out_dtype, workspace=workspace)


def matmul(
    x: Tensor,
    w: QTensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    workspace: Tensor | None = None,
) -> Tensor:
    """dequant_matmul for any number of rows. The CPU needs no workspace."""
    if not _fits(x, w, bias, residual):
        check_matmul("matmul", x, w, bias, residual)
    if x.shape[0] == 0:
        return x.new_empty(0, w.shape[0], dtype=out_dtype)
    y = cpu.matmul_cpu(x, w, bias, residual)
    return y if out_dtype is torch.float32 else y.to(out_dtype)


def matmul_ref(x: Tensor, w: QTensor, *, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The definition in float64, on a weight in its storage layout."""
    from csrc_triton.quant import reference_matmul

    y = reference_matmul(x, w)
    if bias is not None:
        y = y + bias.double()
    return y if residual is None else y + residual.double()


def swiglu_matmul(x: Tensor, w: QTensor, *, activation: str = "silu", block: int = 64) -> Tensor:
    """x [M, K], w [2F, K] with gate and up rows in alternating blocks -> act(gate) * up [M, F]."""
    return cpu.swiglu_cpu(matmul(x, w), activation, block)


def lm_head_argmax(x: Tensor, w: QTensor) -> Tensor:
    """x [M, K], w [vocab, K] -> the id of each row's largest logit, ties to the lowest, [M] int64."""
    return cpu.argmax_cpu(matmul(x, w))


def _fits(x: Tensor, w: QTensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Whether `check_matmul` has nothing to say, in a few hundred nanoseconds."""
    good = x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() and x.ndim == 2 and x.shape[1] == w.shape[1]
    if residual is not None:
        good = good and residual.dtype is torch.float32 and residual.is_contiguous()
        good = good and residual.shape == (x.shape[0], w.shape[0])
    return good and bias is None and not torch.is_grad_enabled()


def check_matmul(name: str, x: Tensor, w: QTensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """Refuse what the product would misread, naming shape, dtype and what was expected."""
    cpu.refuse_grad(name, x, bias, residual)
    cpu.refuse_device(name, x)
    n, k = w.shape

    def expect(what: str, tensor: Tensor, shape: tuple[Any, ...]) -> None:
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {what} must be contiguous float32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
                f"{'' if tensor.is_contiguous() else ', not contiguous'}"
            )

    expect("x", x, (x.shape[0] if x.ndim == 2 else "M", k))
    if bias is not None:
        expect("bias", bias, (n,))
    if residual is not None:
        expect("residual", residual, (x.shape[0], n))
