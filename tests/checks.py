"""What a result is held to: no worse than torch, or the same bits; and random weights to hold it with."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.quant import DENSE, GGUF, QTensor, dense, from_gguf, quantize

# one, a tile less one, a tile, a tile and one, and so on; 257 is over any block of rows
ROWS = (1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 130, 257)
# [N, K] of the demo model's matrices, and two odd ones of a tiny model
DEMO_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (172, 64), (64, 172))
SCHEMES = tuple(s for s in cpu.SCHEMES if s != "f16" or cpu.has_half_panels())
ANY_THREADS = pytest.mark.parametrize("threads", (1, 2, 3), indirect=True)
# a name of `random_weight`; ours by group, then every format of GGUF
FORMATS = ("q4", "q4 zero", "q4 group 48", "q8", "q8 group 32", *GGUF)
_F16_FIELDS = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}  # the gguf package quantises no k-quants


def assert_no_worse(actual: Tensor, exact: Tensor, same_dtype: Tensor, slack: float = 0.0) -> None:
    """The largest error is at most twice that of the same-dtype PyTorch operation, plus slack.

    `exact` is float64; `slack` is absolute, and the caller says why it is there.
    """
    assert actual.shape == exact.shape == same_dtype.shape and exact.dtype == torch.float64
    error, allowed = _largest(actual.double() - exact), 2 * _largest(same_dtype.double() - exact) + slack
    assert error <= allowed, f"error {error:.3g} against float64, expected at most {allowed:.3g}"


def assert_close(actual: Tensor, exact: Tensor, relative: float) -> None:
    """Error by root mean square, relative to the exact result; for schemes that round their operands."""
    assert actual.shape == exact.shape
    error, size = (actual.double() - exact).norm().item(), exact.double().norm().item()
    assert error <= relative * size, f"relative error {error / size if size else error:.3g}, expected {relative:.3g}"


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal shape, dtype and bits, the sign of zero and NaN included."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    differ = actual.contiguous().view(ints) != expected.contiguous().view(ints)
    if bool(differ.any()):
        first = tuple(int(i) for i in differ.nonzero()[0])
        pytest.fail(
            f"{what} {int(differ.sum())} of {differ.numel()} elements differ, first at {first}: "
            f"{actual[first].item()!r} is not {expected[first].item()!r}"
        )


def random_weight(fmt: str, n: int, k: int, seed: int = 0, size: float = 1.0) -> QTensor:
    """A weight of any format in its storage layout; size multiplies what can be multiplied."""
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=gen) * size
    if fmt in DENSE:
        return dense(w.to(DENSE[fmt]))
    if fmt.startswith("q4 ") or fmt == "q4":
        return quantize(w, "q4", 48 if fmt.endswith("48") else 32, symmetric=not fmt.endswith("zero"))
    if fmt.startswith("q8") and fmt != "q8_0":
        return quantize(w, "q8", 32 if fmt.endswith("32") else None)
    if fmt not in _F16_FIELDS:
        raw = torch.from_numpy(gguf.quants.quantize(w.numpy(), GgmlType[fmt.upper()]))
        return from_gguf(raw, fmt, (n, k))
    form, rng = GGUF[fmt], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, k // form.weights, form.nbytes), dtype=np.uint8)
    for at in _F16_FIELDS[fmt]:
        scale = (0.001 * size * rng.uniform(0.5, 1.0, raw.shape[:2])).astype(np.float16)
        raw[..., at : at + 2] = scale[..., None].view(np.uint8)
    return from_gguf(torch.from_numpy(raw.reshape(n, -1)), fmt, (n, k))


def takes_k(fmt: str, k: int) -> bool:
    """Whether a format can store rows of k weights."""
    return fmt not in GGUF or k % GGUF[fmt].weights == 0


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
