"""What the matmul launchers share: checks, the CPU path, scratch, and what a kernel is told of a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from csrc_triton import cpu, launch, t64
from csrc_triton.dequant import Weight
from csrc_triton.launch import Tile
from csrc_triton.quant import DENSE, QTensor, dense, permute_input
from csrc_triton.t64 import ROWS, Form

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def matmul_on_cpu(
    name: str,
    x: Tensor,
    w: QTensor | Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    if isinstance(w, Tensor):
        if w.device != x.device:
            raise ValueError(f"{name}: x is on {x.device} and the weight on {w.device}")
        w = cpu.pack(dense(w))
    if not _fits_cpu(x, w, bias, residual):
        _check_cpu(name, x, w, bias, residual)
    _check_out_dtype(name, out_dtype)
    if x.shape[0] == 0:
        return x.new_empty(0, w.shape[0], dtype=out_dtype or x.dtype)
    y = cpu.matmul_cpu(x, w, bias, residual)
    return y if out_dtype is None or out_dtype is torch.float32 else y.to(out_dtype)


def _fits_cpu(x: Tensor, w: QTensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Whether `_check_cpu` has nothing to say, in a few hundred nanoseconds."""
    good = x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() and x.ndim == 2 and x.shape[1] == w.shape[1]
    if residual is not None:
        good = good and residual.dtype is torch.float32 and residual.is_contiguous()
        good = good and residual.shape == (x.shape[0], w.shape[0])
    return good and bias is None and not torch.is_grad_enabled()


def _check_cpu(name: str, x: Tensor, w: QTensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """Refuse what the product would misread, naming shape, dtype and what was expected."""
    cpu.refuse_grad(name, x, bias, residual)
    cpu.refuse_device(name, x)
    n, k = w.shape

    def expect(what: str, tensor: Tensor, shape: tuple[Any, ...]) -> None:
        fits = tensor.dtype == torch.float32 and tuple(tensor.shape) == shape and tensor.is_contiguous()
        if not fits or not tensor.is_cpu:
            raise ValueError(
                f"{name}: {what} must be contiguous float32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
                f"{'' if tensor.is_contiguous() else ', not contiguous'}"
                f"{'' if tensor.is_cpu else f' on {tensor.device}'}"
            )

    expect("x", x, (x.shape[0] if x.ndim == 2 else "M", k))
    if bias is not None:
        expect("bias", bias, (n,))
    if residual is not None:
        expect("residual", residual, (x.shape[0], n))


def check_matmul(
    name: str,
    x: Tensor,
    w: QTensor | Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
    layout: str = "t64",
) -> tuple[Tensor, QTensor]:
    """Refuse what a kernel would misread; -> x with act-order applied, and the weight as a QTensor."""
    w = dense(w) if isinstance(w, Tensor) else w
    n, k = w.shape
    cpu.refuse_grad(name, x, bias, residual)
    if x.ndim != 2 or x.shape[1] != k or x.dtype not in FLOATS or (x.numel() and x.stride(1) != 1 and k > 1):
        raise ValueError(
            f"{name}: x must be [M, {k}] in bfloat16, float16 or float32 with contiguous rows, "
            f"got {list(x.shape)} {x.dtype} with strides {list(x.stride())}"
        )
    if w.layout != ("rows" if w.fmt in DENSE and layout == "t64" else layout):
        raise ValueError(
            f"{name}: weight {w.fmt} {list(w.shape)} is in layout {w.layout!r}, expected {layout!r}; "
            f"{'pack gate and up with csrc_triton.pack_gate_up' if layout == 't64-glu' else 'use csrc_triton.pack'}"
        )
    if "weight" in w.parts and (w.parts["weight"].dtype != x.dtype or w.parts["weight"].stride(1) != 1):
        raise ValueError(
            f"{name}: dense weight must be {x.dtype} like x, with contiguous rows, got {w.parts['weight'].dtype} "
            f"with strides {list(w.parts['weight'].stride())}"
        )
    if w.device != x.device:
        raise ValueError(f"{name}: x is on {x.device} and the weight on {w.device}")
    _check_out_dtype(name, out_dtype)
    _check_added(name, "bias", bias, (n,), x)
    _check_added(name, "residual", residual, (x.shape[0], n), x)
    return permute_input(x, w), w


def _check_out_dtype(name: str, out_dtype: torch.dtype | None) -> None:
    if out_dtype is not None and out_dtype not in FLOATS:
        raise ValueError(f"{name}: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")


def _check_added(name: str, what: str, tensor: Tensor | None, shape: tuple[int, ...], x: Tensor) -> None:
    if tensor is None:
        return
    rows_fit = tensor.numel() == 0 or tensor.stride(-1) == 1 or shape[-1] == 1
    if tuple(tensor.shape) != shape or tensor.dtype not in FLOATS or tensor.device != x.device or not rows_fit:
        raise ValueError(
            f"{name}: {what} must be {list(shape)} on {x.device} with contiguous rows, "
            f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device} with strides {list(tensor.stride())}"
        )


def weight_args(w: QTensor) -> Weight:
    n, k = w.shape
    if "weight" in w.parts:
        matrix, blocks = w.parts["weight"], -(-k // t64.COLS)
        return Weight(matrix, None, w.parts.get("scale"), None, n, -(-n // ROWS), blocks, matrix.stride(0))
    codes, scale = w.parts["codes"], w.parts["scale"]
    return Weight(codes, w.parts.get("high"), scale, w.parts.get("extra"), n, codes.shape[0], codes.shape[1], 0)


def kernel_constants(x: Tensor, w: QTensor, form: Form, tile: Tile) -> dict[str, Any]:
    arch = launch.arch_of(x)
    return {
        "FORM": form,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "EVEN_K": w.shape[1] % t64.COLS == 0,
        "JOIN": launch.joins_planes(arch) and x.dtype != torch.float32,
        "ARCH": launch.asm_arch(arch),
        **tile.options,
    }


def carve(workspace: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, x: Tensor, name: str) -> Tensor:
    """A tensor at the start of the caller's scratch, or a new one where there is none."""
    if workspace is None:
        return torch.empty(shape, dtype=dtype, device=x.device)
    count = torch.Size(shape).numel()
    need = count * dtype.itemsize
    if workspace.dtype != torch.uint8 or workspace.device != x.device or not workspace.is_contiguous():
        raise ValueError(f"{name}: workspace must be contiguous uint8 on {x.device}, got {workspace.dtype}")
    if workspace.nbytes < need or workspace.data_ptr() % 16:
        raise ValueError(f"{name}: workspace must be {need} bytes, 16-byte aligned, got {workspace.nbytes}")
    return workspace.flatten()[:need].view(dtype).view(shape)
