"""What a result is held to: no worse than torch, or the same bits; and random weights to hold it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from csrc_triton import cpu, launch, t64
from csrc_triton.quant import DENSE, GGUF, QTensor, dense, from_gguf, quantize, with_perm

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
        import gguf  # the tests on a GPU do without

        raw = torch.from_numpy(gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[fmt.upper()]))
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


# ---- kernels ------------------------------------------------------------------------------------------

# a name of `kind_of_weight` for every way that a kernel reads a weight, and a few more ways to store one
KINDS = (
    *("q4/128", "q4/256", "q4/row", "q4/32", "q4/64", "q4/96", "q4/64 perm", "q4/128 zero", "q4/row zero"),
    *("q4/64 zero", "q4/128 zero f32", "q4/32 bias", "q4/64 bias", "q4/128 bias", "q4/row bias"),
    *("q8/row", "q8/128", "q8/32", "q8/32 bias", "q8/row bias", "q8/128 perm"),
    *(fmt for fmt in GGUF if fmt not in DENSE),
)
# one for each form (t64.Form), dense last
FORM_KINDS = (
    *("q4/128", "q4/row", "q4/128 zero", "q4/row zero", "q4/32 bias", "q4/64 bias", "q4/128 bias"),
    *("q8/row", "q8/128", "q8/32 bias", "q8/row bias"),
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "dense"),
)


def kind_of_weight(kind: str, n: int, k: int, seed: int = 0) -> QTensor:
    """A weight in storage layout: a format of GGUF, or ours as "format/group", with
    "bias" (asymmetric), "zero" (integer zero points, float16 scales unless "f32") or "perm" (act-order).
    """
    name, _, rest = kind.partition("/")
    if kind == "dense":
        return random_weight("f32", n, k, seed)
    if not rest:
        return random_weight(kind, n, k, seed, size=0.1)
    size, *extra = rest.split()
    gen = torch.Generator().manual_seed(seed)
    q = quantize(torch.randn(n, k, generator=gen), name, None if size == "row" else int(size), "bias" not in extra)
    if "zero" in extra:
        scale = q.parts["scale"]
        points = torch.randint(0, 17, scale.shape, generator=gen).to(torch.uint8)
        scale = scale if "f32" in extra else scale.half().float()
        q = replace(q, parts={**q.parts, "scale": scale, "zero_point": points})
    return with_perm(q, torch.randperm(k, generator=gen).int()) if "perm" in extra else q


def fitting_k(kind: str, k: int) -> int:
    """k, or the next number of columns that the kind can store."""
    step = GGUF[kind].weights if kind in GGUF else int(kind.split("/")[1].split()[0]) if "perm" in kind else 1
    return -(-k // step) * step


def strided(x: Tensor, gap: int = 8) -> Tensor:
    """x in rows further apart, with NaN around each."""
    wide = torch.full((x.shape[0] + 1, x.shape[1] + gap), float("nan"), dtype=x.dtype)
    rows = wide[1:, : x.shape[1]]
    return rows.copy_(x)


@contextmanager
def one_tile(rows: int, cols: int) -> Iterator[None]:
    """Every launch of a matmul is cut so, whatever the tables say."""
    with mock.patch.object(launch, "tile_for", lambda *_: launch.Tile(rows, cols, warps=4, stages=2)):
        yield


def kernel_weight(kind: str, n: int, k: int, dtype: torch.dtype, seed: int = 0, segments: int = 0) -> QTensor:
    """A weight as the kernels take it with activations of a dtype, K cut into so many segments."""
    q = kind_of_weight(kind, n, k, seed)
    q = dense(q.parts["weight"].to(dtype)) if kind == "dense" else t64.pack_t64(q)
    return replace(q, segments=segments) if segments else q


def scattered(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Activations of very different sizes, so that another order of a sum is another sum."""
    return strided((torch.randn(m, k) * torch.randn(m, k).mul(2).exp() / 8).to(dtype))


def assert_kernel_no_worse(
    run: Callable[..., Tensor], kind: str, m: int, n: int, k: int, dtype: torch.dtype, added: bool = False
) -> None:
    """A matmul launcher against float64; `added`: with a bias and a residual."""
    k = fitting_k(kind, k)
    w = kernel_weight(kind, n, k, dtype)
    weight = w.parts["weight"].float() if kind == "dense" else t64.dequantize_t64(w)
    x = strided(torch.randn(m, k).to(dtype))
    more = {"bias": torch.randn(n).to(dtype), "residual": strided(torch.randn(m, n).to(dtype))} if added else {}
    y = run(x, w, **more)
    assert (tuple(y.shape), y.dtype) == ((m, n), dtype)
    exact = x.double() @ weight.double().T
    plain = x @ weight.to(dtype).T
    for term in more.values():
        exact, plain = exact + term.double(), plain + term
    # in last places of the largest result: few results of torch's may all happen to be exact but for their own
    # rounding; and torch adds float32 in several short sums, the kernels 128 columns in a row
    slack = 4.0 if dtype == torch.float32 else 0.5 if m * n < 100 else 0.0
    slack *= torch.finfo(dtype).eps * _largest(exact)
    assert_no_worse(y, exact, plain, slack)
