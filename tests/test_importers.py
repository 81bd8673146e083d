"""csrc_triton/importers.py: AWQ and GPTQ tensors packed here from known integers, in plain loops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks import assert_same_bits
from safetensors.torch import save_file
from torch import Tensor

from csrc_triton.cpu import matmul_cpu, pack
from csrc_triton.files import load_qtensors, save_qtensors
from csrc_triton.importers import from_awq, from_gptq, load_awq_layer, load_gptq_layer
from csrc_triton.quant import (
    QTensor,
    cat_rows,
    codes,
    dequantize,
    num_segments,
    permute_input,
    reference_matmul,
    take_rows,
)

# [N, K, group]; the last one is a whole row
SHAPES = [(8, 32, 32), (40, 256, 32), (64, 384, 64), (24, 256, 128), (16, 40, 40)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def word(nibbles: list[int]) -> int:
    """Eight numbers, the first in the lowest bits, as the int32 with those bits."""
    bits = sum(number << (4 * i) for i, number in enumerate(nibbles))
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def across(numbers: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """[A, B] -> int32 [A, B / 8]: eight neighbours of a row a word, in some order."""
    rows = [[word([row[i + j] for j in order]) for i in range(0, len(row), 8)] for row in numbers.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


def down(numbers: Tensor) -> Tensor:
    """[A, B] -> int32 [A / 8, B]: eight neighbours of a column a word."""
    return across(numbers.T).T.contiguous()


def awq(numbers: Tensor) -> Tensor:
    return across(numbers, (0, 2, 4, 6, 1, 3, 5, 7))


class Layer:
    """Integers q [K, N], zero points [G, N] and scales [G, N], and the groups of the columns."""

    def __init__(self, n: int, k: int, group: int, zero: int | None = None, order: str = "plain") -> None:
        gen, num_groups = seeded(n + k), k // group
        self.group = group
        self.q = torch.randint(0, 16, (k, n), generator=gen)
        # a zero point less one is stored, so the largest of a nibble is 15
        self.zeros = torch.randint(1, 16, (num_groups, n), generator=gen)
        if zero is not None:
            self.zeros[:] = zero
        self.scales = (torch.randn(num_groups, n, generator=gen) / 50).half()
        self.g_idx = torch.arange(k) // group
        if order == "act":
            self.g_idx = self.g_idx[torch.randperm(k, generator=gen)]

    def weight(self) -> Tensor:
        """(q - z) * s [N, K]: each column's group, looked up in g_idx."""
        return ((self.q - self.zeros[self.g_idx]).float() * self.scales[self.g_idx].float()).T

    def as_awq(self) -> dict[str, Tensor]:
        return {"qweight": awq(self.q), "qzeros": awq(self.zeros), "scales": self.scales}

    def as_gptq(self, less: int = 1) -> dict[str, Tensor]:
        parts = {"qweight": down(self.q), "qzeros": across(self.zeros - less), "scales": self.scales}
        return parts | {"g_idx": self.g_idx.int()}


def assert_same(q: QTensor, layer: Layer) -> None:
    k, n = layer.q.shape
    assert (q.fmt, q.shape, q.group, q.layout) == ("q4", (n, k), layer.group, "rows")
    assert q.segments == num_segments(n, k)
    assert_same_bits(dequantize(q), layer.weight())
    assert torch.equal(take_rows(q, [n - 1, 0, 0]), layer.weight()[[n - 1, 0, 0]])
    assert all(part.is_contiguous() for part in q.parts.values())


@pytest.mark.parametrize("zero", [None, 8])
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_awq_weights_are_the_integers_less_zero_times_scale(n: int, k: int, group: int, zero: int | None) -> None:
    layer = Layer(n, k, group, zero)
    q = from_awq(**layer.as_awq(), group=group)
    assert_same(q, layer)
    assert set(q.parts) == {"codes", "scale"} | ({"zero_point"} if zero is None else set())
    assert torch.equal(codes(q).codes, layer.q.T.to(torch.uint8))


@pytest.mark.parametrize("order", ["plain", "act"])
@pytest.mark.parametrize("zero", [None, 8])
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_gptq_weights_are_the_integers_less_zero_times_scale(
    n: int, k: int, group: int, zero: int | None, order: str
) -> None:
    layer = Layer(n, k, group, zero, order)
    q = from_gptq(**layer.as_gptq())
    assert_same(q, layer)
    in_order = bool((layer.g_idx.diff() >= 0).all())
    assert ("perm" in q.parts, "zero_point" in q.parts) == (not in_order, zero is None)
    as_they_are = from_gptq(**layer.as_gptq(less=0), zeros_plus_one=False)
    assert all(torch.equal(q.parts[name], part) for name, part in as_they_are.parts.items())


def test_the_first_words_are_known_numbers() -> None:
    """Bits written by hand: AWQ's nibbles 0..7 are columns 0 2 4 6 1 3 5 7, GPTQ's are rows 0..7."""
    scales = torch.ones(1, 8, dtype=torch.float16)
    eights = torch.tensor([[-0x77777778]], dtype=torch.int32)  # 0x88888888
    q = from_awq(torch.tensor([[0x76543210]] * 8, dtype=torch.int32), eights, scales, 8)
    assert (dequantize(q)[:, 0] + 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    sevens = torch.tensor([[0x77777777]], dtype=torch.int32)
    q = from_gptq(torch.tensor([[0x76543210] * 8], dtype=torch.int32), sevens, scales)
    assert (dequantize(q)[0] + 8).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("zero", [0, 15, 16])
def test_zero_points_at_the_ends(zero: int) -> None:
    layer = Layer(16, 64, 32, zero)
    if zero < 16:
        assert_same(from_awq(**layer.as_awq(), group=32), layer)
        assert_same(from_gptq(**layer.as_gptq(less=0), zeros_plus_one=False), layer)
    if zero == 15:
        assert_same(from_gptq(**layer.as_gptq()), layer)
    if zero == 16:
        with pytest.raises(ValueError, match="a stored zero point is 15, which readers of this format take for"):
            from_gptq(**layer.as_gptq())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_are_widened_not_rounded(dtype: torch.dtype) -> None:
    layer = Layer(16, 64, 32)
    layer.scales = (torch.randn(2, 16, generator=seeded()) / 50).to(dtype)
    for q in (from_awq(**layer.as_awq(), group=32), from_gptq(**layer.as_gptq())):
        assert_same(q, layer)


@pytest.mark.parametrize("g_idx", [None, torch.zeros(64, dtype=torch.int32)])
def test_columns_without_groups_of_their_own_are_in_order(g_idx: Tensor | None) -> None:
    layer = Layer(16, 64, 32)
    q = from_gptq(**{**layer.as_gptq(), "g_idx": g_idx})
    assert_same(q, layer)
    assert "perm" not in q.parts


def test_columns_in_order_may_end_in_a_short_group() -> None:
    layer = Layer(16, 96, 32)
    layer.group, layer.g_idx = 64, torch.arange(96) // 64
    layer.zeros, layer.scales = layer.zeros[:2], layer.scales[:2]
    assert_same(from_gptq(**layer.as_gptq()), layer)


def test_columns_of_a_group_keep_their_order() -> None:
    layer = Layer(8, 64, 16, order="act")
    perm = from_gptq(**layer.as_gptq()).parts["perm"].tolist()
    assert perm == sorted(range(64), key=lambda column: (int(layer.g_idx[column]), column))


@pytest.mark.parametrize("scheme", ["f32", "i4", None])
@pytest.mark.parametrize("order", ["plain", "act"])
@pytest.mark.parametrize("zero", [None, 8])
def test_imported_weights_multiply_on_the_cpu(zero: int | None, order: str, scheme: str | None) -> None:
    layer = Layer(64, 128, 32, zero, order)
    q, x = from_gptq(**layer.as_gptq()), torch.randn(5, 128, generator=seeded())
    exact = x.double() @ layer.weight().double().T
    torch.testing.assert_close(reference_matmul(x, q), exact)
    # the inputs and the scales are rounded to bfloat16
    assert (matmul_cpu(x, pack(q, scheme)) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("order", ["plain", "act"])
def test_imported_weights_are_cut_joined_and_saved(order: str, tmp_path: Path) -> None:
    layer = Layer(40, 256, 32, order=order)
    q = from_gptq(**layer.as_gptq())
    assert torch.equal(dequantize(q[3:17]), layer.weight()[3:17])
    assert torch.equal(dequantize(cat_rows([q[:8], q[8:]])), layer.weight())
    save_qtensors(tmp_path / "weights", {"w": q})
    assert torch.equal(dequantize(load_qtensors(tmp_path / "weights")["w"]), layer.weight())
    assert_same_bits(permute_input(layer.weight(), q), layer.weight()[:, layer.g_idx.argsort(stable=True)])


def test_layers_are_found_by_prefix(tmp_path: Path) -> None:
    first, second = Layer(24, 64, 32), Layer(16, 128, 64, order="act")
    path = tmp_path / "model.safetensors"
    tensors = {f"a.q_proj.{name}": part.clone() for name, part in first.as_awq().items()}
    tensors |= {f"b.q_proj.{name}": part for name, part in second.as_gptq().items()}
    tensors |= {f"c.q_proj.{name}": part for name, part in first.as_gptq(less=0).items() if name != "g_idx"}
    save_file(tensors | {"b.q_proj.bias": torch.zeros(16)}, path)
    assert_same(load_awq_layer(path, "a.q_proj"), first)
    assert_same(load_gptq_layer(path, "b.q_proj"), second)
    assert_same(load_gptq_layer(path, "c.q_proj", zeros_plus_one=False), first)
    with pytest.raises(ValueError, match=r"model.safetensors: tensor 'a.k_proj.qweight' is missing"):
        load_awq_layer(path, "a.k_proj")
    with pytest.raises(ValueError, match=r"tensor 'a.qweight' is missing"):
        load_gptq_layer(path, "a")
    save_file(tensors | {"a.q_proj.qzeros": torch.tensor(1, dtype=torch.int32)}, path)
    with pytest.raises(ValueError, match=r"load_awq_layer: qzeros must be int32 of two sizes, got torch.int32 \[\]"):
        load_awq_layer(path, "a.q_proj")
    (tmp_path / "other").write_bytes(b"no such file")
    with pytest.raises(ValueError, match="other: no sound safetensors file"):
        load_gptq_layer(tmp_path / "other", "b.q_proj")


# mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"qweight": p["qweight"].long()}, r"from_awq: qweight must be int32 of two sizes, got torch.int64"),
        (lambda p: {"qweight": p["qweight"][0]}, r"qweight must be int32 of two sizes, got torch.int32 \[2\]"),
        (lambda p: {"qzeros": p["qzeros"].float()}, r"qzeros must be int32 of two sizes, got torch.float32"),
        (lambda p: {"qweight": p["qweight"][:0]}, r"qweight must be int32 of two sizes, got torch.int32 \[0, 2\]"),
        (lambda p: {"group": 48}, "from_awq: 64 columns in groups of 48: expected a whole number"),
        (lambda p: {"group": -1}, "64 columns in groups of -1: expected a whole number"),
        (lambda p: {"group": 32.0}, "64 columns in groups of 32.0: expected a whole number"),
        (lambda p: {"group": None}, "64 columns in groups of None: expected a whole number"),
        (lambda p: {"group": 16}, r"from_awq: qzeros must be \[4, 2\], got \[2, 2\]"),
        (lambda p: {"qzeros": p["qzeros"][:, :1]}, r"from_awq: qzeros must be \[2, 2\], got \[2, 1\]"),
        (lambda p: {"scales": p["scales"].T}, r"scales must be float16 \[2, 16\], got torch.float16 \[16, 2\]"),
        (lambda p: {"scales": p["scales"].int()}, r"scales must be float16 \[2, 16\], got torch.int32 \[2, 16\]"),
        (lambda p: {"scales": p["scales"] * torch.inf}, r"from_awq: a scale of the weight \(16, 64\) is NaN or inf"),
    ],
)
def test_wrong_awq_tensors_are_refused(change, message: str) -> None:
    good = Layer(16, 64, 32).as_awq() | {"group": 32}
    with pytest.raises(ValueError, match=message):
        from_awq(**{**good, **change(good)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"qweight": p["qweight"].short()}, "from_gptq: qweight must be int32 of two sizes, got torch.int16"),
        (lambda p: {"qweight": p["qweight"][:, :12]}, r"from_gptq: qzeros must be \[2, 1.5\], got \[2, 2\]"),
        (lambda p: {"qzeros": p["qzeros"][:1]}, r"from_gptq: scales must be float16 \[1, 16\], got .* \[2, 16\]"),
        (lambda p: {"qzeros": p["qzeros"].repeat(1, 2)}, r"from_gptq: qzeros must be \[2, 2\], got \[2, 4\]"),
        (lambda p: {"scales": p["scales"][:, :8]}, r"scales must be float16 \[2, 16\], got torch.float16 \[2, 8\]"),
        (lambda p: {"scales": p["scales"] * torch.nan}, "from_gptq: a scale of the weight .* is NaN or infinite"),
        (lambda p: {"g_idx": p["g_idx"][:63]}, r"g_idx must be int32 \[64\], got torch.int32 \[63\]"),
        (lambda p: {"g_idx": p["g_idx"].float()}, r"g_idx must be int32 \[64\], got torch.float32 \[64\]"),
        (lambda p: {"g_idx": p["g_idx"] - 1}, "from_gptq: 64 columns in 2 groups: g_idx holds -1..0, expected 0..1"),
        (lambda p: {"g_idx": p["g_idx"] + 1}, r"g_idx holds 1..2, expected 0..1"),
        (lambda p: {"g_idx": (torch.arange(64) < 30).int()}, "g_idx puts 30 to 34 columns in a group, expected 32 in"),
        (lambda p: {"g_idx": torch.ones(64, dtype=torch.int32)}, "g_idx puts 0 to 64 columns in a group"),
        (
            lambda p: (
                {"qweight": p["qweight"][:7], "g_idx": None, "qzeros": p["qzeros"].repeat(2, 1)[:3]}
                | {"scales": p["scales"].repeat(2, 1)[:3]}
            ),
            "from_gptq: 56 columns in 3 groups: expected groups of one size",
        ),
        (
            # the third group has no columns
            lambda p: {name: p[name].repeat(2, 1)[:3] for name in ("qzeros", "scales")},
            "from_gptq: 64 columns in 3 groups: g_idx puts 0 to 32 columns in a group, expected 21.3333 in each",
        ),
    ],
)
def test_wrong_gptq_tensors_are_refused(change, message: str) -> None:
    good = Layer(16, 64, 32).as_gptq()
    with pytest.raises(ValueError, match=message):
        from_gptq(**{**good, **change(good)})
