"""4-bit AWQ and GPTQ tensors -> QTensor: W[n, k] = (q[n, k] - zero point) * scale, by groups along K.

Memory, for G groups (AWQ: of K / G neighbours each; GPTQ: column k is in group g_idx[k]):
           AWQ                          GPTQ
  qweight  int32 [K, N / 8]             int32 [K / 8, N]      eight numbers a word
  qzeros   int32 [G, N / 8]             int32 [G, N / 8]      zero points, eight a word
  scales   f16 [G, N]                   f16 [G, N]            bfloat16 and float32 are taken too
  word     nibble i is number AWQ_ORDER[i]   nibble i is number i     the lowest nibble is nibble 0
Promise: `dequantize` gives exactly (q - zero point) * scale, rounded once to float32.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from csrc_triton.quant import QTensor, num_segments, pack_nibbles, with_perm

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN_ORDER = tuple(range(8))
SYMMETRIC = 8  # the zero point that "q4" has without saying so
SCALES = (torch.float16, torch.bfloat16, torch.float32)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> QTensor:
    """The weight of one layer in AWQ's GEMM layout, its zero points kept as integers."""
    _check_words("from_awq", qweight=qweight, qzeros=qzeros)
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    if not isinstance(group, int) or group < 1 or k % group:
        raise ValueError(f"from_awq: {k} columns in groups of {group!r}: expected a whole number of them")
    _check_groups("from_awq", qzeros, scales, k // group, n)
    zeros = _nibbles(qzeros, AWQ_ORDER).flatten(1)
    return _stored("from_awq", _nibbles(qweight, AWQ_ORDER).flatten(1), zeros, scales, group)


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, zeros_plus_one: bool = True
) -> QTensor:
    """The weight of one layer in GPTQ's layout; columns out of order (act-order) become a perm.

    zeros_plus_one: qzeros hold zero points less one (checkpoint_format "gptq"), not as they are ("gptq_v2").
    """
    _check_words("from_gptq", qweight=qweight, qzeros=qzeros)
    k, n = 8 * qweight.shape[0], qweight.shape[1]
    _check_groups("from_gptq", qzeros, scales, qzeros.shape[0], n)
    group, perm = _column_order(g_idx, k, qzeros.shape[0])
    codes, zeros = _nibbles(qweight, PLAIN_ORDER), _nibbles(qzeros, PLAIN_ORDER).flatten(1)
    codes = codes.transpose(1, 2).flatten(0, 1)  # [K, N]
    if zeros_plus_one:
        if bool((zeros == 15).any()):
            raise ValueError(
                "from_gptq: a stored zero point is 15, which readers of this format take for 0, for 16, or for a "
                "carry; if the file stores zero points as they are, pass zeros_plus_one=False"
            )
        zeros = zeros + 1
    if perm is None:
        return _stored("from_gptq", codes, zeros, scales, group)
    return with_perm(_stored("from_gptq", codes[perm.long()], zeros, scales, group), perm)


def load_awq_layer(path: str | os.PathLike[str], prefix: str) -> QTensor:
    """The weight of the layer `prefix` ("model.layers.0.mlp.up_proj") of an AWQ safetensors file."""
    held = _read_layer(path, prefix, ("qweight", "qzeros", "scales"))
    _check_words("load_awq_layer", qweight=held["qweight"], qzeros=held["qzeros"])
    group = held["qweight"].shape[0] // held["qzeros"].shape[0]
    return from_awq(held["qweight"], held["qzeros"], held["scales"], group)


def load_gptq_layer(path: str | os.PathLike[str], prefix: str, *, zeros_plus_one: bool = True) -> QTensor:
    """The weight of the layer `prefix` ("model.layers.0.mlp.up_proj") of a GPTQ safetensors file."""
    held = _read_layer(path, prefix, ("qweight", "qzeros", "scales"), ("g_idx",))
    return from_gptq(held["qweight"], held["qzeros"], held["scales"], held.get("g_idx"), zeros_plus_one=zeros_plus_one)


def _read_layer(
    path: str | os.PathLike[str], prefix: str, needed: Sequence[str], known: Sequence[str] = ()
) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            there = set(file.keys())
            if missing := [name for name in needed if f"{prefix}.{name}" not in there]:
                raise ValueError(f"{path}: tensor '{prefix}.{missing[0]}' is missing")
            names = [name for name in (*needed, *known) if f"{prefix}.{name}" in there]
            return {name: file.get_tensor(f"{prefix}.{name}") for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path}: no sound safetensors file: {error}") from error


def _nibbles(words: Tensor, order: Sequence[int]) -> Tensor:
    """int32 [A, B] -> uint8 [A, B, 8]: number order[i] of a word is its nibble i."""
    out = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    for i, number in enumerate(order):
        out[..., number] = (words >> (4 * i)) & 15
    return out


def _stored(name: str, codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> QTensor:
    """codes [K, N], zeros and scales [G, N] -> "q4"."""
    k, n = codes.shape
    if not bool(scales.isfinite().all()):
        raise ValueError(f"{name}: a scale of the weight {(n, k)} is NaN or infinite")
    parts = {"codes": pack_nibbles(codes.T), "scale": scales.T.float().contiguous()}
    if bool((zeros != SYMMETRIC).any()):
        parts["zero_point"] = zeros.T.contiguous()
    return QTensor("q4", (n, k), group, num_segments(n, k), "rows", parts)


def _column_order(g_idx: Tensor | None, k: int, num_groups: int) -> tuple[int, Tensor | None]:
    """Columns in a group, and their order where groups are not runs of neighbours."""
    where = f"from_gptq: {k} columns in {num_groups} groups"
    # some writers leave g_idx zero where columns are in order
    if g_idx is None or (g_idx.shape == (k,) and not bool(g_idx.any())):
        if k % num_groups:
            raise ValueError(f"{where}: expected groups of one size")
        return k // num_groups, None
    if g_idx.dtype not in (torch.int32, torch.int64) or tuple(g_idx.shape) != (k,):
        raise ValueError(f"{where}: g_idx must be int32 [{k}], got {g_idx.dtype} {list(g_idx.shape)}")
    low, high = (int(end) for end in g_idx.aminmax())
    if low < 0 or high >= num_groups:
        raise ValueError(f"{where}: g_idx holds {low}..{high}, expected 0..{num_groups - 1}")
    sizes = g_idx.bincount(minlength=num_groups)
    first = int(sizes[0])
    is_in_order = first and torch.equal(g_idx.long(), torch.arange(k, device=g_idx.device) // first)
    if is_in_order and -(-k // first) == num_groups:
        return first, None  # the last group may be short
    if k % num_groups or bool((sizes != k // num_groups).any()):
        few, many = (int(end) for end in sizes.aminmax())
        raise ValueError(f"{where}: g_idx puts {few} to {many} columns in a group, expected {k / num_groups:g} in each")
    return k // num_groups, g_idx.argsort(stable=True).int()


def _check_words(name: str, **words: Tensor) -> None:
    for what, tensor in words.items():
        if tensor.dtype != torch.int32 or tensor.ndim != 2 or not tensor.numel():
            raise ValueError(f"{name}: {what} must be int32 of two sizes, got {tensor.dtype} {list(tensor.shape)}")


def _check_groups(name: str, qzeros: Tensor, scales: Tensor, num_groups: int, n: int) -> None:
    if n % 8 or tuple(qzeros.shape) != (num_groups, n // 8):
        raise ValueError(f"{name}: qzeros must be [{num_groups}, {n / 8:g}], got {list(qzeros.shape)}")
    if tuple(scales.shape) != (num_groups, n) or scales.dtype not in SCALES:
        got = f"{scales.dtype} {list(scales.shape)}"
        raise ValueError(f"{name}: scales must be float16 [{num_groups}, {n}], got {got}")
