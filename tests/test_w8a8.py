"""Eight-bit products: exact integers, so that row, tiles, segments and device do not show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import assert_no_worse, assert_same_bits
from interpreter import interpreted
from torch import Tensor

from csrc_triton import launch, t64
from csrc_triton.cpu import pack
from csrc_triton.launch import Tile
from csrc_triton.qmatmul import matmul
from csrc_triton.quant import QTensor, quantize
from csrc_triton.w8a8 import MAX_COLUMNS, w8a8_matmul, w8a8_matmul_ref, w8a8_workspace_nbytes

SHAPES = [(130, 576), (1, 16), (65, 200), (64, 128)]


def stored(n: int, k: int) -> QTensor:
    return quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n)), "q8", None)


def rows(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[m, k] whose rows start at multiples of 16 bytes, of very different sizes."""
    x = torch.randn(m, -(-k // 8) * 8, generator=torch.Generator().manual_seed(m)) * torch.logspace(-3, 3, m)[:, None]
    return x.to(dtype)[:, :k]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values(n: int, k: int, dtype: torch.dtype) -> None:
    q = stored(n, k)
    packed, x = t64.pack_t64(q, "t64-int8"), rows(5, k, dtype)
    bias, residual = torch.randn(n), torch.randn(5, n).to(dtype)
    with interpreted():
        y = w8a8_matmul(x, packed, bias=bias, residual=residual, out_dtype=torch.float32)
        exact = w8a8_matmul_ref(x, packed)
    exact = exact + bias.double() + residual.double()
    same_dtype = (exact - bias.double() - residual.double()).float() + bias + residual.float()
    assert_no_worse(y, exact, same_dtype, slack=float(exact.abs().max()) * 2**-22)  # two scales, a rounding each
    assert len(y.unique()) > 1


@pytest.mark.parametrize(
    ("segments", "tile"),
    [
        pytest.param(segments, tile, marks=[] if i == j else pytest.mark.slow)
        for i, segments in enumerate((1, 3, 5))
        for j, tile in enumerate(((16, 64), (32, 128), (128, 64)))
    ],
    ids=str,
)
def test_bits_depend_on_the_row_alone(segments: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = t64.pack_t64(stored(130, 576), "t64-int8"), rows(70, 576)
    with interpreted():
        alone = torch.cat([w8a8_matmul(x[r : r + 1], packed) for r in (0, 17, 69)])
        monkeypatch.setattr(launch, "tile_for", lambda *_: Tile(*tile, warps=4, stages=2))
        some = replace(packed, segments=segments)
        for m in (70, 18):
            y = w8a8_matmul(x[:m], some)
            assert_same_bits(y[[0, 17]], alone[:2])
        assert_same_bits(w8a8_matmul(x[53:], some)[-1:], alone[2:])
    assert len(alone.unique()) > 100


def test_the_gpu_has_the_cpus_integers() -> None:
    """Only the device's float32 rounding of scales could differ, and both round to nearest."""
    q, x = stored(96, 576), rows(6, 576, torch.float32)
    with interpreted():
        y = w8a8_matmul(x, t64.pack_t64(q, "t64-int8"))
    assert_same_bits(y, w8a8_matmul(x, pack(q, "w8a8")))


def test_matmul_takes_the_layout() -> None:
    packed, x = t64.pack_t64(stored(65, 200), "t64-int8"), rows(3, 200)
    with interpreted():
        assert_same_bits(matmul(x, packed), w8a8_matmul(x, packed))


def test_workspace_and_empty_input() -> None:
    packed, x = t64.pack_t64(stored(130, 576), "t64-int8"), rows(3, 576)
    size = w8a8_workspace_nbytes(3, packed)
    assert size == 4 * packed.segments * 3 * 130 and w8a8_workspace_nbytes(65, packed) == 0
    with interpreted():
        space = torch.full((size,), 255, dtype=torch.uint8)
        assert_same_bits(w8a8_matmul(x, packed, workspace=space), w8a8_matmul(x, packed))
        with pytest.raises(ValueError, match=f"workspace must be {size} bytes"):
            w8a8_matmul(x, packed, workspace=space[:-16])
        assert w8a8_matmul(x[:0], packed).shape == (0, 130)


def test_refusals() -> None:
    packed, x = t64.pack_t64(stored(65, 200), "t64-int8"), rows(3, 200)
    with interpreted():
        with pytest.raises(ValueError, match="layout 't64', expected 't64-int8'"):
            w8a8_matmul(x, t64.pack_t64(stored(65, 200)))
        with pytest.raises(ValueError, match=f"more than {MAX_COLUMNS} products overflow"):
            long = MAX_COLUMNS + 1
            w8a8_matmul(torch.zeros(1, long), replace(packed, shape=(65, long)))
        with pytest.raises(ValueError, match="requires grad"):
            w8a8_matmul(torch.zeros(1, 200, requires_grad=True), packed)
    with pytest.raises(ValueError, match="pack it with 'w8a8'"):
        w8a8_matmul(torch.zeros(1, 200), pack(stored(65, 200), "f32"))


def test_the_largest_sums_fit() -> None:
    """127 * 127 * K, in every product."""
    k = 1024
    q = quantize(torch.ones(64, k), "q8", None)
    with interpreted():
        y = w8a8_matmul(torch.ones(2, k), t64.pack_t64(q, "t64-int8"))
    assert torch.allclose(y, torch.full((2, 64), float(k)), rtol=1e-6)
