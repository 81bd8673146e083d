"""Row-wise operations between the matmuls, and the rotary tables.

    rmsnorm   y = x / sqrt(mean(x^2) + eps) * weight            (Zhang and Sennrich 2019)
    rope      R(d): (a, b) -> (a cos - b sin, b cos + a sin) on the halves of a head,
              angle d * inv_freq[j] of pair j                    (Su et al. 2021, half-split form)
    swiglu    y = silu(gate) * up, or gelu_tanh(gate) * up       (Shazeer 2020)

Layout: rows are contiguous; a rope table holds one row a distance, distance -63 first.
Promise: row r of an output depends on row r of the inputs alone, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.cpu import MIN_DISTANCE


@dataclass(frozen=True)
class RopeTable:
    """Rotations by distance. One table per distinct base and scaling."""

    cos: Tensor  # [num_distances, rot_dim / 2] float32; row i is distance i + MIN_DISTANCE
    sin: Tensor  # the same shape
    rot_dim: int  # leading dims of a head that rotate; the rest pass through
    factor: float = 1.0  # YaRN's attention factor, once on q and once on k

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    @property
    def max_position(self) -> int:
        return self.cos.shape[0] + MIN_DISTANCE - 1


def rope_table(inv_freq: Sequence[float] | Tensor, max_position: int, *, factor: float = 1.0) -> RopeTable:
    """Tables for distances -63..max_position, computed in float64 and rounded once to float32.

    inv_freq: rot_dim / 2 angular frequencies in radians per token, scaling already applied.
    """
    freq = torch.as_tensor(inv_freq, dtype=torch.float64)
    if freq.ndim != 1 or freq.numel() == 0:
        raise ValueError(f"rope_table: inv_freq must be a non-empty vector, got shape {tuple(freq.shape)}")
    if max_position < 0:
        raise ValueError(f"rope_table: max_position must be >= 0, got {max_position}")
    distance = torch.arange(MIN_DISTANCE, max_position + 1, dtype=torch.float64)
    angle = distance[:, None] * freq[None, :]
    return RopeTable(angle.cos().float(), angle.sin().float(), 2 * freq.numel(), factor)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x [M, K] float32, weight [K] float32 -> [M, K]; with a residual, normalises x + residual."""
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"rmsnorm: x {tuple(x.shape)} must be [M, K] and weight {tuple(weight.shape)} [K]")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"rmsnorm: residual {tuple(residual.shape)} must have x's shape {tuple(x.shape)}")
    cpu.refuse_grad("rmsnorm", x, weight, residual)
    cpu.refuse_device("rmsnorm", x)
    return cpu.rmsnorm_cpu(x, weight, eps, residual)


def rmsnorm_ref(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The definition in float64."""
    wide = x.double() if residual is None else x.double() + residual.double()
    return wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def swiglu(gate_up: Tensor, activation: str = "silu", block: int = 64) -> Tensor:
    """gate_up [M, 2F], gate and up in alternating blocks of `block` columns -> act(gate) * up [M, F].

    The last block of each may be short when block does not divide F.
    """
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"swiglu: activation must be 'silu' or 'gelu_tanh', got {activation!r}")
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"swiglu: gate_up must be [M, 2F], got {tuple(gate_up.shape)}")
    cpu.refuse_grad("swiglu", gate_up)
    cpu.refuse_device("swiglu", gate_up)
    return cpu.swiglu_cpu(gate_up, activation, block)


def swiglu_ref(gate_up: Tensor, activation: str = "silu", block: int = 64) -> Tensor:
    """The definition in float64."""
    gate, up = cpu.split_gate_up(gate_up.double(), block)
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def argmax(logits: Tensor) -> Tensor:
    """logits [M, V] -> ids [M] int64, ties to the lowest id. A row with a NaN gives -1."""
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"argmax: logits must be [M, V] with V > 0, got {tuple(logits.shape)}")
    cpu.refuse_grad("argmax", logits)
    cpu.refuse_device("argmax", logits)
    return cpu.argmax_cpu(logits)


def argmax_ref(logits: Tensor) -> Tensor:
    """The definition, row by row in Python."""
    out = []
    for row in logits.tolist():
        nan = any(value != value for value in row)
        out.append(-1 if nan else row.index(max(row)))
    return torch.tensor(out, dtype=torch.int64)
