"""Many rows times a packed or dense weight (prefill): the same bits a row as csrc_triton.qmatmul.

    y[m, :] = x[m, :] . W^T (+ bias) (+ residual)

Promise: row m equals dequant_matmul(x[m : m + 1]), bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csrc_triton.qmatmul import matmul
from csrc_triton.quant import QTensor


def prefill_gemm(
    x: Tensor,
    w: QTensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    workspace: Tensor | None = None,
) -> Tensor:
    """x [M, K] float32, any M, w packed [N, K] -> [M, N]; bias [N]; residual [M, N] added last."""
    return matmul(x, w, bias=bias, residual=residual, out_dtype=out_dtype, workspace=workspace)
