"""csrc_triton/t64.py: packing loses nothing, takes the bytes it says, and lies in memory as its docstring has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import FORM_KINDS, KINDS, assert_same_bits, fitting_k, kind_of_weight
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from csrc_triton import quant, t64
from csrc_triton.files import load_qtensors, save_qtensors
from csrc_triton.launch import kernels_on_cpu
from csrc_triton.quant import DENSE, GGUF, QTensor, dense, dequantize, num_segments
from csrc_triton.t64 import COLS, ROWS, dequantize_t64, form_of, pack, pack_gate_up, pack_t64, unpack

SHAPES = ((1, 1), (65, 65), (70, 576), (64, 128), (130, 130), (3, 700))
# bytes of the scales, and of what lies beside them, of a tile of 64 rows and 128 columns
SCALE_BYTES = {"block": 256, "zero": 256, "half": 512, "k": 512, "k6": 512}


def cases() -> list[tuple[str, int, int]]:
    return [(kind, n, k) for kind in KINDS for n, k in sorted({(n, fitting_k(kind, k)) for n, k in SHAPES})]


def by_column(values: Tensor | None, group: int, k: int) -> Tensor | None:
    return None if values is None else values[:, torch.arange(k) // group]


def assert_same_weight(kind: str, actual: Tensor, stored: Tensor) -> None:
    """Equal bits. Where a zero point became the bias -zero * scale, zeros lose their sign, and under a scale of more
    than 16 bits, which no importer makes, bias and product are each rounded.
    """
    if kind == "q4/128 zero f32":
        assert (actual - stored).abs().max() <= 2.0**-22 * stored.abs().max()
    elif kind == "q4/64 zero":
        assert torch.equal(actual, stored)
    else:
        assert_same_bits(actual, stored, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_loses_nothing(kind: str) -> None:
    for _, n, k in (case for case in cases() if case[0] == kind):
        q = kind_of_weight(kind, n, k)
        packed = pack_t64(q)
        assert (packed.layout, packed.shape, packed.group, packed.segments) == ("t64", q.shape, q.group, q.segments)
        ints, offset, scale, bias = quant._unpack(q)
        got_ints, got_offset, got_scale, got_bias = unpack(packed)
        assert torch.equal(got_ints.int() - got_offset, ints.int() - offset)
        width = COLS // form_of(packed).groups if form_of(packed).groups else k
        assert_same_bits(by_column(got_scale, width, k), by_column(scale, q.group, k))
        if form_of(packed).scales == "zero":
            bias = q.parts["zero_point"].float()
        assert (got_bias is None) == (bias is None)
        if bias is not None:
            assert_same_bits(by_column(got_bias, width, k), by_column(bias, q.group, k))
        if "perm" in q.parts:
            assert torch.equal(packed.parts["perm"], q.parts["perm"])


@pytest.mark.parametrize("kind", KINDS)
def test_packing_a_few_rows_at_a_time_is_packing_them_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = kind_of_weight(kind, 200, fitting_k(kind, 300))
    whole = pack_t64(q)
    monkeypatch.setattr(t64, "CHUNK", 1)
    in_steps = pack_t64(q)
    assert whole.parts.keys() == in_steps.parts.keys()
    for name, part in whole.parts.items():
        assert_same_bits(in_steps.parts[name], part, name)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantizes_as_the_storage_does(kind: str) -> None:
    for _, n, k in (case for case in cases() if case[0] == kind):
        q = kind_of_weight(kind, n, k)
        assert_same_weight(kind, dequantize_t64(pack_t64(q)), dequantize(q))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in GGUF and GGUF[kind].group])
def test_any_scale_of_a_file_survives(kind: str) -> None:
    """Every byte and every finite float16 field, subnormal, huge and negative ones too."""
    form = GGUF[kind]
    gen = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (70, 4, form.nbytes), generator=gen, dtype=torch.uint8)
    for at in (208,) if kind == "q6_k" else (0,) if kind in ("q4_0", "q5_0", "q8_0") else (0, 2):
        raw[..., at + 1] = torch.where(raw[..., at + 1] & 0x7C == 0x7C, raw[..., at + 1] ^ 0x40, raw[..., at + 1])
    q = QTensor.from_gguf(raw.flatten(1), kind, (70, 4 * form.weights))
    assert_same_bits(dequantize_t64(pack_t64(q)), dequantize(q))


@pytest.mark.parametrize("kind", KINDS)
def test_nbytes_follows_from_the_shape(kind: str) -> None:
    for _, n, k in (case for case in cases() if case[0] == kind):
        q = pack_t64(kind_of_weight(kind, n, k))
        form, tiles, blocks = form_of(q), -(-n // 64), -(-k // 128)
        scaled = blocks if form.groups else 1
        if form.scales == "float":
            scales = 256 * form.groups * tiles * scaled * (1 + form.extra)
        else:
            scales = SCALE_BYTES[form.scales] * tiles * scaled * (1 + (form.extra and form.scales == "half"))
        if form.scales in ("k", "k6"):
            scales += 256 * tiles * -(-blocks // 2)
        perm = 4 * k if "perm" in q.parts else 0
        assert q.nbytes == 1024 * form.bits * tiles * blocks + scales + perm


def test_nbytes_of_known_weights() -> None:
    """Bits a weight: 4.25 and 4.5 as in the storage, 6.5625 for 6.5625 in a file, 8.5 for 8.5."""
    bits = {"q4/128": 4.25, "q4/128 zero": 4.25, "q4/32": 4.5, "q4_0": 4.5, "q4_1": 5, "q4_k": 4.625, "q5_0": 6.5}
    bits |= {"q6_k": 6.625, "q8/128": 8.25, "q8_0": 8.5, "q4/32 bias": 6}
    for kind, each in bits.items():
        assert pack_t64(kind_of_weight(kind, 128, 512)).nbytes * 8 == each * 128 * 512, kind


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_groups_past_the_end_are_exact_zeros(kind: str) -> None:
    q = pack_t64(kind_of_weight(kind, 70, k := fitting_k(kind, 130)))
    tiles, blocks = q.parts["codes"].shape[:2]
    parts = {name: part for name, part in q.parts.items() if name != "perm"}
    whole = dequantize_t64(replace(q, shape=(tiles * ROWS, blocks * COLS), parts=parts))
    assert not whole[70:].any()
    form = form_of(q)
    if form.extra or form.scales == "zero":  # of a group that ends before K's end, nothing is zero but what x has
        k = -(-k // (COLS // form.groups)) * (COLS // form.groups) if form.groups else blocks * COLS
    assert not whole[:, k:].any()


# ---- places in memory --------------------------------------------------------------------------------


def test_four_bits_lie_where_the_docstring_says() -> None:
    q = kind_of_weight("q4_0", 130, 256)
    ints, packed = quant._unpack(q)[0], pack_t64(q)
    codes = packed.parts["codes"]
    assert (codes.dtype, tuple(codes.shape)) == (torch.int16, (3, 2, 64, 32))
    for n, k in ((0, 0), (1, 33), (63, 127), (64, 128), (129, 255), (100, 70)):
        block, j, e = k // 128, k % 128 // 32, k % 32
        assert int(codes[n // 64, block, n % 64, e]) >> (4 * j) & 15 == int(ints[n, k])


def test_six_bits_lie_where_the_docstring_says() -> None:
    for kind in ("q5_0", "q6_k"):
        q = kind_of_weight(kind, 130, 512)
        ints = quant._unpack(q)[0].int() + (32 if kind == "q6_k" else 0)
        codes, high = (pack_t64(q).parts[name] for name in ("codes", "high"))
        assert tuple(codes.shape) == (3, 4, 2, 64, 16) and tuple(high.shape) == (3, 4, 64, 16)
        for n, k in ((0, 0), (1, 33), (63, 127), (64, 128), (129, 511), (100, 200)):
            half, j, e, p = k % 128 // 64, k % 64 // 16, k % 16, k % 128 // 16
            low = int(codes[n // 64, k // 128, half, n % 64, e]) >> (4 * j) & 15
            assert low | (int(high[n // 64, k // 128, n % 64, e]) >> (2 * p) & 3) << 4 == int(ints[n, k])


def test_eight_bits_lie_where_the_docstring_says() -> None:
    q = kind_of_weight("q8/row", 70, 300)
    codes = pack_t64(q).parts["codes"]
    whole = pack_t64(q, "t64-int8").parts["codes"]
    assert tuple(codes.shape) == (2, 3, 2, 64, 32) and tuple(whole.shape) == (2, 3, 64, 128)
    for n, k in ((0, 0), (1, 33), (63, 127), (64, 128), (69, 299), (40, 70)):
        half, byte, e = k % 128 // 64, k % 64 // 32, k % 32
        word = int(codes[n // 64, k // 128, half, n % 64, e])
        code = (word >> 8 * byte & 255 ^ 128) - 128
        assert code == int(whole[n // 64, k // 128, n % 64, k % 128]) == int(q.parts["codes"][n, k])


def test_scales_lie_where_the_docstring_says() -> None:
    q = kind_of_weight("q4/32", 70, 256)
    words = pack_t64(q).parts["scale"]
    for n, g in ((0, 0), (0, 1), (65, 6), (63, 7)):
        word = int(words[n // 64, g // 4, g % 4 // 2, n % 64])
        bits = int(q.parts["scale"][n, g].half().view(torch.int16)) & 0xFFFF
        assert word >> 16 * (g % 2) & 0xFFFF == bits
    q = kind_of_weight("q4/128 zero", 70, 256)
    words = pack_t64(q).parts["scale"]
    for n, g in ((0, 0), (65, 1)):
        word = torch.tensor([int(words[n // 64, g, n % 64])], dtype=torch.int32)
        scale, zero = word.view(torch.float16)[0], word.view(torch.bfloat16)[1]
        assert (float(scale), int(zero)) == (float(q.parts["scale"][n, g]), int(q.parts["zero_point"][n, g]))
    q = kind_of_weight("q4_k", 70, 512)
    scales, mins = quant._k_scales(q.parts["blocks"].unflatten(1, (-1, 144))[..., 4:16])
    words = pack_t64(q).parts["scale"]
    for n, g in ((0, 0), (0, 5), (69, 15)):
        for i, values in enumerate((scales, mins)):
            assert int(words[n // 64, g // 4, i, n % 64]) >> 8 * (g % 4) & 255 == int(values.flatten(1)[n, g])


# ---- gate and up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["q4/128", "q4/32", "q4/128 zero", "q4/64 perm", "q8/row", "q4_k", "q6_k"])
@pytest.mark.parametrize("f", [1, 64, 70])
def test_gate_and_up_alternate_by_tiles(kind: str, f: int) -> None:
    gate, up = (kind_of_weight(kind, f, 512, seed) for seed in (1, 2))
    if "perm" in kind:
        up = replace(up, parts={**up.parts, "perm": gate.parts["perm"]})
    both = pack_gate_up(gate, up)
    assert (both.layout, both.shape, both.segments) == ("t64-glu", (2 * f, 512), num_segments(2 * f, 512))
    assert_same_bits(dequantize_t64(both), torch.cat((dequantize(gate), dequantize(up))))
    a, b = pack_t64(gate), pack_t64(up)
    for name, part in both.parts.items():
        if name != "perm":
            assert torch.equal(part[::2], a.parts[name]) and torch.equal(part[1::2], b.parts[name])
    assert both.nbytes == a.nbytes + b.nbytes - (4 * 512 if "perm" in kind else 0)


# ---- rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_whole_tiles_is_a_view_of_its_rows(kind: str) -> None:
    q = kind_of_weight(kind, 200, fitting_k(kind, 200))
    packed, w = pack_t64(q), dequantize(q)
    for rows in (slice(None), slice(64), slice(64, 128), slice(128, None), slice(64, 131), slice(-72, -8)):
        piece = packed[rows]
        start, stop, _ = rows.indices(200)
        assert (piece.shape, piece.layout, piece.segments) == ((stop - start, q.shape[1]), "t64", packed.segments)
        assert_same_weight(kind, dequantize_t64(piece), w[start:stop])
        for name, part in piece.parts.items():
            assert part.is_contiguous()
            assert part.untyped_storage().data_ptr() == packed.parts[name].untyped_storage().data_ptr()
    assert_same_bits(dequantize_t64(packed[64:][64:70]), dequantize_t64(packed[128:134]))


def test_a_slice_is_what_its_rows_pack_to() -> None:
    q = kind_of_weight("q4/128", 200, 300)
    packed = pack_t64(q)
    assert num_segments(64, 300) == q.segments == 3
    for rows in (slice(64, 128), slice(64, 200)):
        alone = pack_t64(q[rows])
        assert all(torch.equal(part, alone.parts[name]) for name, part in packed[rows].parts.items())
    int8 = pack_t64(kind_of_weight("q8/row", 200, 300), "t64-int8")
    assert_same_bits(dequantize_t64(int8[64:100]), dequantize_t64(int8)[64:100])


def test_a_slice_keeps_the_segments_of_the_whole() -> None:
    packed = pack_t64(kind_of_weight("q4/128", 64 * 66, 512))
    assert packed.segments == 4 != num_segments(64 * 20, 128 * 64)
    assert replace(packed, segments=2)[64:128].segments == 2


@pytest.mark.parametrize(
    ("take", "message"),
    [
        (lambda q: q[1:], r"'t64' has tiles of 64 rows: slice\(1, None, None\) of \(200, 128\) starts inside one"),
        (lambda q: q[-64:], "starts inside one"),
        (lambda q: q[64:64], r"no row of \(200, 128\) is in slice"),
        (lambda q: q[64:192:2], "expected a slice of rows with step 1"),
        (lambda q: q[64], "expected a slice of rows with step 1, got 64"),
        (lambda q: replace(q, layout="t64-glu")[64:], "expected layout 'rows', got 't64-glu'"),
    ],
)
def test_other_slices_are_refused(take: Callable[[QTensor], QTensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take(pack_t64(kind_of_weight("q4/128", 200, 128)))


# ---- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_comes_back_from_a_file(kind: str, tmp_path: Path) -> None:
    q = kind_of_weight(kind, 130, fitting_k(kind, 200))
    packed = pack_t64(q)
    weights = {"w": packed, "slice": packed[64:], "both": pack_gate_up(q, q)}
    if kind == "q8/row":
        weights["int8"] = pack_t64(q, "t64-int8")
    save_qtensors(tmp_path / "weights", weights)
    loaded = load_qtensors(tmp_path / "weights")
    for name, weight in weights.items():
        got = loaded[name]
        assert replace(got, parts={}).__dict__ == replace(weight, parts={}).__dict__
        assert list(got.parts) == list(weight.parts)
        for part, tensor in weight.parts.items():
            assert got.parts[part].dtype == tensor.dtype and torch.equal(got.parts[part], tensor)
        assert_same_bits(dequantize_t64(got), dequantize_t64(weight))


# ---- the layout of a device, and refusals ------------------------------------------------------------


def test_pack_follows_the_device() -> None:
    q, w = kind_of_weight("q8/row", 70, 128), dense(torch.randn(3, 5))
    assert pack(q).layout == "cpu-i8"
    with kernels_on_cpu(90):
        assert pack(q).layout == "t64"
        assert pack(q, "w8a8").layout == "t64-int8"
        assert pack(w) is w
        with pytest.raises(ValueError, match="scheme 'i4' is one of the CPU's"):
            pack(q, "i4")
    assert pack_t64(q).to("meta").device == torch.device("meta")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pack_t64(kind_of_weight("q4/48", 4, 96)), r"q4 \(4, 96\) with groups of 48: expected a multiple"),
        (lambda: pack_t64(kind_of_weight("q8/16", 4, 96)), "q8 .* with groups of 16"),
        (lambda: pack(pack(kind_of_weight("q4/32", 64, 64))), r"\[64, 64\] is in layout 'cpu-i4', expected 'rows'"),
        (lambda: pack(QTensor("q4", (64, 64), 64, 1, "cpu-f16", {"panels": object()})), "layout 'cpu-f16', expected"),
        (lambda: pack_t64(pack_t64(kind_of_weight("q4/32", 4, 96))), r"\(4, 96\) is in layout 't64', expected 'rows'"),
        (lambda: pack_t64(kind_of_weight("q4/32", 4, 96), "t32"), "unknown layout 't32'"),
        (lambda: pack_t64(kind_of_weight("q4/32", 4, 96), "t64-int8"), "takes symmetric q8 .* got q4 groups of 32"),
        (lambda: pack_t64(kind_of_weight("q8/32", 4, 96), "t64-int8"), "got q8 groups of 32"),
        (lambda: pack_t64(kind_of_weight("q8/row bias", 4, 96), "t64-int8"), "takes symmetric q8"),
        (lambda: gate_up("q4/32", "q8/32"), r"q4 \(4, 128\) and q8 \(4, 128\): expected one quantised format"),
        (lambda: gate_up("q4/32", "q4/32", n=5), r"\(4, 128\) and q4 \(5, 128\)"),
        (lambda: gate_up("f32", "f32"), "expected one quantised format"),
        (lambda: gate_up("q4/128", "q4/32"), "gate is w4-block.* and up w4-half, expected equal forms"),
        (lambda: gate_up("q4/32", "q4/32 bias"), "gate is w4-half and up w4-float4-bias"),
        (lambda: gate_up("q4/64 perm", "q4/64 perm"), "take their columns in different orders"),
        (lambda: gate_up("q4/64 perm", "q4/64"), "take their columns in different orders"),
        (lambda: gate_up("q4/64", "q4/64 perm"), "take their columns in different orders"),
    ],
)  # fmt: skip
def test_refuses(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def gate_up(gate: str, up: str, n: int = 4) -> QTensor:
    return pack_gate_up(kind_of_weight(gate, 4, 128, 1), kind_of_weight(up, n, 128, 2))


def test_dense_weights_stay_as_they_are() -> None:
    for fmt in DENSE:
        q = kind_of_weight(fmt, 5, 7)
        assert pack_t64(q) is q
        assert form_of(q).bits == 0


def test_there_is_a_kind_for_every_form() -> None:
    forms = {form_of(pack_t64(kind_of_weight(kind, 2, fitting_k(kind, 300)))) for kind in KINDS}
    chosen = [form_of(pack_t64(kind_of_weight(kind, 2, fitting_k(kind, 300)))) for kind in FORM_KINDS]
    assert set(chosen[:-1]) == forms and chosen[-1].bits == 0
    assert len({form.name for form in chosen}) == len(chosen) == len(set(chosen))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in GGUF])
def test_a_format_of_files_has_one_form(kind: str) -> None:
    forms = {form_of(pack_t64(kind_of_weight(kind, 2, fitting_k(kind, k)))) for k in (1, 64, 200, 520)}
    assert len(forms) == 1


def tiled(kind: str) -> list[QTensor]:
    """A weight in each layout of tiles that takes its kind, of no whole number of them."""
    q = kind_of_weight(kind, 70, k := fitting_k(kind, 300))
    found = [pack_t64(q), pack_t64(q)[64:70], pack_gate_up(q, kind_of_weight(kind, 70, k))]
    return [*found, pack_t64(q, "t64-int8")] if kind == "q8/row" else found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DENSE])
def test_a_file_whose_parts_are_not_those_of_its_layout_is_refused(kind: str, tmp_path: Path) -> None:
    """A kernel takes the sizes of parts from the shape of the weight and reads what is there."""
    for q in tiled(kind):
        save_qtensors(tmp_path / "good", {"w": q})
        got = load_qtensors(tmp_path / "good")["w"]
        assert got.layout == q.layout and all(torch.equal(got.parts[name], part) for name, part in q.parts.items())
        with safe_open(tmp_path / "good", "pt") as file:
            metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  the file is no mapping
        for name in set(q.parts) - {"perm"}:
            part = tensors[f"w.{name}"]
            for bad in (part[:0], part[..., :1], part.flatten(), part.to(torch.float64), part[:, :0]):
                save_file(tensors | {f"w.{name}": bad.contiguous()}, tmp_path / "bad", metadata)
                with pytest.raises(ValueError, match="weight 'w', q"):
                    load_qtensors(tmp_path / "bad")


def test_parts_in_another_order_in_memory_are_refused(tmp_path: Path) -> None:
    q = pack_t64(kind_of_weight("q4/128", 128, 256))
    codes = q.parts["codes"].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="'codes' is not contiguous"):
        save_qtensors(tmp_path / "weights", {"w": replace(q, parts={**q.parts, "codes": codes})})
