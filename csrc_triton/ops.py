"""The public functions as operators `torch.ops.polymodel.*`, for torch.compile and torch.export.

    y = ops.matmul(x, w)        the bits of csrc_triton.matmul(x, w), eager or compiled

An operator takes tensors, so a weight crosses as its parts, its numbers and its words (`described`). Each
has a fake implementation with the exact shape, dtype and strides, and refuses inputs that require grad. Scratch is
allocated by the operator: there is no `workspace`.

Nothing else imports this file but `linear`: a call through torch's dispatcher costs microseconds, the functions
themselves cost none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from csrc_triton import cpu, fused, launch, qmatmul, w8a8
from csrc_triton.quant import QTensor

_LIBRARY = torch.library.Library("polymodel", "DEF")


def described(w: QTensor | Tensor) -> tuple[list[Tensor], list[int], str]:
    """A weight as its parts, its numbers (N, K, group, segments) and its words, format:layout:names of the parts.

    A dense matrix has no numbers and no words. A compiler may take numbers for symbols, so they stay out of the words.
    """
    if isinstance(w, Tensor):
        return [w], [], ""
    for name, part in w.parts.items():
        if not isinstance(part, Tensor):
            raise ValueError(
                f"weight {w.fmt} {list(w.shape)} in layout {w.layout!r}: its {name!r}, which are no tensor, cannot "
                "cross an operator; pack it with a scheme made of tensors: 'f32', 'i8' or 'i4'"
            )
    return list(w.parts.values()), [*w.shape, w.group, w.segments], f"{w.fmt}:{w.layout}:{','.join(w.parts)}"


def weight_of(parts: Sequence[Tensor], numbers: Sequence[int], words: str) -> Any:
    """The inverse of `described`: a QTensor or a Tensor."""
    if not words:
        return parts[0]
    fmt, layout, names = words.split(":")
    n, k, group, segments = numbers
    return QTensor(fmt, (n, k), group, segments, layout, dict(zip(names.split(","), parts, strict=True)))


# ---- the functions, through the operators ------------------------------------------------------------


def matmul(
    x: Tensor,
    w: QTensor | Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`qmatmul.matmul`, and so `dequant_matmul` and `prefill_gemm`, whose bits it has."""
    return torch.ops.polymodel.matmul.default(x, *described(w), bias, residual, out_dtype)


def swiglu_matmul(x: Tensor, w: QTensor, *, activation: str = "silu", block: int = 64) -> Tensor:
    return torch.ops.polymodel.swiglu_matmul.default(x, *described(w), activation, block)


def lm_head_argmax(x: Tensor, w: QTensor | Tensor) -> Tensor:
    return torch.ops.polymodel.lm_head_argmax.default(x, *described(w))


def w8a8_matmul(
    x: Tensor,
    w: QTensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return torch.ops.polymodel.w8a8_matmul.default(x, *described(w), bias, residual, out_dtype)


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    return torch.ops.polymodel.rmsnorm.default(x, weight, eps, residual, out_dtype)


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    return torch.ops.polymodel.add_rmsnorm.default(x, residual, weight, eps, out_dtype)


def swiglu(gate_up: Tensor, activation: str = "silu", block: int = 64) -> Tensor:
    return torch.ops.polymodel.swiglu.default(gate_up, activation, block)


def argmax(logits: Tensor) -> Tensor:
    return torch.ops.polymodel.argmax.default(logits)


# ---- what the operators do, and the fake results -----------------------------------------------------


def _matmul(x, parts, numbers, words, bias, residual, out_dtype):
    return qmatmul.matmul(x, weight_of(parts, numbers, words), bias=bias, residual=residual, out_dtype=out_dtype)


def _w8a8_matmul(x, parts, numbers, words, bias, residual, out_dtype):
    return w8a8.w8a8_matmul(x, weight_of(parts, numbers, words), bias=bias, residual=residual, out_dtype=out_dtype)


def _fake_matmul(x, parts, numbers, words, bias, residual, out_dtype):
    cpu.refuse_grad("matmul", x, bias, residual)
    return x.new_empty(x.shape[0], _num_rows(parts, numbers), dtype=out_dtype or x.dtype)


def _swiglu_matmul(x, parts, numbers, words, activation, block):
    # of many rows the result may be columns of a wider matrix
    return qmatmul.swiglu_matmul(x, weight_of(parts, numbers, words), activation=activation, block=block).contiguous()


def _fake_swiglu_matmul(x, parts, numbers, words, activation, block):
    cpu.refuse_grad("swiglu_matmul", x)
    return x.new_empty(x.shape[0], _num_rows(parts, numbers) // 2)


def _lm_head_argmax(x, parts, numbers, words):
    return qmatmul.lm_head_argmax(x, weight_of(parts, numbers, words))


def _fake_lm_head_argmax(x, parts, numbers, words):
    cpu.refuse_grad("lm_head_argmax", x)
    return x.new_empty(x.shape[0], dtype=torch.int64)


def _rmsnorm(x, weight, eps, residual, out_dtype):
    return _as_new_rows(x, fused.rmsnorm(x, weight, eps, residual, out_dtype=out_dtype or x.dtype))


def _fake_rmsnorm(x, weight, eps, residual, out_dtype):
    cpu.refuse_grad("rmsnorm", x, weight, residual)
    return _new_rows(x, x.shape[1], out_dtype or x.dtype)


def _add_rmsnorm(x, residual, weight, eps, out_dtype):
    total, y = fused.add_rmsnorm(x, residual, weight, eps, out_dtype=out_dtype or x.dtype)
    return _as_new_rows(x, total), _as_new_rows(x, y)


def _fake_add_rmsnorm(x, residual, weight, eps, out_dtype):
    cpu.refuse_grad("add_rmsnorm", x, residual, weight)
    return _new_rows(x, x.shape[1], x.dtype), _new_rows(x, x.shape[1], out_dtype or x.dtype)


def _swiglu(gate_up, activation, block):
    return _as_new_rows(gate_up, fused.swiglu(gate_up, activation, block))


def _fake_swiglu(gate_up, activation, block):
    cpu.refuse_grad("swiglu", gate_up)
    return _new_rows(gate_up, gate_up.shape[1] // 2, gate_up.dtype)


def _fake_argmax(logits):
    cpu.refuse_grad("argmax", logits)
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _num_rows(parts: Sequence[Tensor], numbers: Sequence[int]) -> int:
    return numbers[0] if numbers else parts[0].shape[0]


def _new_rows(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """As the kernels allocate their results, whose rows are aligned; the CPU path has contiguous ones."""
    if launch.runs_kernel(x):
        return fused.new_rows((x.shape[0], width), dtype, x.device)
    return x.new_empty(x.shape[0], width, dtype=dtype)


def _as_new_rows(x: Tensor, y: Tensor) -> Tensor:
    return y if launch.runs_kernel(x) else y.contiguous()


# every argument is given, also one that has a default in Python: torch leaves defaults out of a call
def _define(signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = signature.partition("(")[0]
    # a plain kernel: torch.library.custom_op costs three times as much a call
    _LIBRARY.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"polymodel::{name}", fake, lib=_LIBRARY)


_WEIGHT = "Tensor x, Tensor[] parts, SymInt[] numbers, str words"
_ADDED = "Tensor? bias, Tensor? residual, ScalarType? out_dtype"
_GATED = "str activation, int block"
_NORM = "Tensor weight, float eps"
_define(f"matmul({_WEIGHT}, {_ADDED}) -> Tensor", _matmul, _fake_matmul)
_define(f"w8a8_matmul({_WEIGHT}, {_ADDED}) -> Tensor", _w8a8_matmul, _fake_matmul)
_define(f"swiglu_matmul({_WEIGHT}, {_GATED}) -> Tensor", _swiglu_matmul, _fake_swiglu_matmul)
_define(f"lm_head_argmax({_WEIGHT}) -> Tensor", _lm_head_argmax, _fake_lm_head_argmax)
_define(f"rmsnorm(Tensor x, {_NORM}, Tensor? residual, ScalarType? out_dtype) -> Tensor", _rmsnorm, _fake_rmsnorm)
_define(
    f"add_rmsnorm(Tensor x, Tensor residual, {_NORM}, ScalarType? out_dtype) -> (Tensor, Tensor)",
    _add_rmsnorm,
    _fake_add_rmsnorm,
)
_define(f"swiglu(Tensor gate_up, {_GATED}) -> Tensor", _swiglu, _fake_swiglu)
_define("argmax(Tensor logits) -> Tensor", fused.argmax, _fake_argmax)
