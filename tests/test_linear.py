"""csrc_triton/linear.py: a layer's values and bits, its state on every road, and the walk over a model."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import ANY_THREADS, assert_close, assert_same_bits, random_weight
from interpreter import interpreted
from safetensors.torch import load, save
from torch import Tensor, nn

from csrc_triton import cpu, linear
from csrc_triton.linear import QLinear, quantize_module
from csrc_triton.qmatmul import matmul
from csrc_triton.quant import dense, dequantize, quantize

N, K = 72, 260  # neither whole tiles nor whole blocks nor whole groups
README = (Path(linear.__file__).parent / "README.md").read_text()
FORMS = {
    "q4": ("q4", 128, True),
    "q4 group 32": ("q4", 32, True),
    "q4 zero": ("q4", 64, False),
    "q8": ("q8", None, True),
    "q8 zero": ("q8", 128, False),
}
GGUF = ("q4_0", "q4_1", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
ANY_FORM = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def made(form: str, n: int = N, k: int = K, bias: bool = True) -> QLinear:
    torch.manual_seed(1)
    return QLinear.from_linear(nn.Linear(k, n, bias=bias), *FORMS[form])


def saved(layer: nn.Module) -> dict[str, Tensor]:
    """Through the bytes of a safetensors file."""
    return load(save({name: part.contiguous() for name, part in layer.state_dict().items()}))


def held(layer: QLinear) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in layer.weight_as_stored().parts.items()}


# ---- the product -------------------------------------------------------------------------------------


@ANY_FORM
def test_a_layer_is_the_product_with_its_weight(form: str) -> None:
    fmt, group, symmetric = FORMS[form]
    float_layer = nn.Linear(K, N)
    layer = QLinear.from_linear(float_layer, fmt, group, symmetric)
    q = quantize(float_layer.weight.detach(), fmt, group, symmetric)
    assert_same_bits(layer.dequantize(), dequantize(q))
    for shape in ((K,), (1, K), (0, K), (2, 3, K), (2, 0, 3, K)):
        x = torch.randn(shape)
        y = layer(x)
        assert (y.shape, y.dtype) == ((*shape[:-1], N), torch.float32)
        assert_close(y, x.double() @ dequantize(q).double().T + float_layer.bias.double(), 1e-6)


@pytest.mark.parametrize(("fmt", "group", "scheme"), (("q8", None, "i8"), ("q4", 32, "i4"), ("q4", 128, "f32")))
def test_a_cpu_multiplies_by_the_form_that_fits(fmt: str, group: int | None, scheme: str) -> None:
    float_layer = nn.Linear(256, 64)
    layer, x = QLinear.from_linear(float_layer, fmt, group), torch.randn(5, 256)
    q = cpu.checked(cpu.pack(quantize(float_layer.weight.detach(), fmt, group), scheme))
    assert layer.pack().layout == q.layout
    assert_same_bits(layer(x), matmul(x, q, bias=float_layer.bias.detach()))


@ANY_THREADS
@ANY_FORM
def test_a_row_has_its_bits_in_any_company(form: str, threads: int) -> None:
    layer, x = made(form), torch.randn(70, K)
    whole = layer(x)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 27), slice(69, 70), slice(0, 64)):
        assert_same_bits(layer(x[rows]), whole[rows])
    assert_same_bits(layer(x.view(7, 10, K)), whole.view(7, 10, N))
    assert_same_bits(layer(x[5]), whole[5])


@pytest.mark.parametrize("scheme", ("f32", "plain", "i8", "i4"))
def test_autocast_changes_no_bit(scheme: str) -> None:
    """It would round the operands of some calls and not of others."""
    layer, x = made("q4", 64, 256), torch.randn(33, 256)
    if scheme == "plain":
        layer._ready = replace(layer.pack(), layout="cpu-f32-plain")
    else:
        layer.pack(scheme)
    expected = layer(x), layer(x[:1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for y, exact in zip((layer(x), layer(x[:1])), expected, strict=True):
            assert_same_bits(y, exact)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_cpu_computes_half_precision_in_float32(dtype: torch.dtype) -> None:
    layer, x = made("q4"), torch.randn(3, K).to(dtype)
    assert_same_bits(layer(x), layer(x.float()).to(dtype))
    layer.to(dtype)
    assert layer.bias is not None and layer.bias.dtype == dtype
    assert layer(x).dtype == dtype


def test_inputs_of_any_strides() -> None:
    layer, x = made("q4"), torch.randn(K, 6)
    assert_same_bits(layer(x.T), layer(x.T.contiguous()))
    bias = torch.randn(N, 2)[:, 0]
    assert_same_bits(QLinear(layer.weight_as_stored(), bias)(x.T), QLinear(layer.weight_as_stored(), bias + 0)(x.T))
    wide = torch.randn(4, 2 * K)
    assert_same_bits(layer(wide[:, ::2]), layer(wide[:, ::2].contiguous()))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_the_kernels_run_a_layer(dtype: torch.dtype) -> None:
    layer, x = made("q4"), torch.randn(2, 2, K).to(dtype)
    exact = x.double() @ layer.dequantize().double().T + layer.bias.double()
    with interpreted(90):
        y = layer(x)
        assert layer.weight_as_stored().layout == "t64"
        assert_same_bits(layer(x[1, 1]), y[1, 1])
    assert y.dtype == dtype
    assert_close(y, exact, {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-6}[dtype])


def test_bad_inputs_are_refused() -> None:
    layer = made("q4")
    for x, said in (
        (torch.randn(3, K + 1), f"x must be [..., {K}], got [3, {K + 1}]"),
        (torch.tensor(1.0), "got []"),
        (torch.randn(3, K).double(), "x must be float32, bfloat16 or float16, got torch.float64"),
        (torch.zeros(3, K, dtype=torch.int64), "got torch.int64"),
        (torch.empty(3, K, device="meta"), "x is on meta and the layer on cpu"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            layer(x)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"requires grad.*no_grad"):
        layer(torch.randn(3, K, requires_grad=True))


def test_bad_weights_are_refused() -> None:
    w = torch.randn(N, K)
    with pytest.raises(ValueError, match="expected a quantised one"):
        QLinear(dense(w))
    with pytest.raises(ValueError, match="in layout 'cpu-f32'"):
        QLinear(cpu.pack(quantize(w, "q4"), "f32"))
    with pytest.raises(ValueError, match="groups of 48 columns"):
        QLinear(quantize(w, "q4", 48))
    with pytest.raises(ValueError, match="groups of 48 columns"):
        QLinear.from_linear(nn.Linear(K, N), "q4", 48)
    with pytest.raises(ValueError, match=rf"bias must be floats \[{N}\]"):
        QLinear(quantize(w, "q4"), torch.randn(3))
    with pytest.raises(ValueError, match="'q5'"):
        QLinear.from_linear(nn.Linear(K, N), "q5")


def test_a_layer_says_what_it_is() -> None:
    assert repr(made("q4", bias=False)) == (
        f"QLinear(in_features={K}, out_features={N}, bias=False, fmt='q4', group=128)"
    )
    layer = made("q8")
    assert (layer.in_features, layer.out_features, len([*layer.parameters()])) == (K, N, 0)
    assert not hasattr(layer, "weight")
    with pytest.raises(AttributeError, match="no float `weight`"):
        _ = layer.weight


# ---- its state ---------------------------------------------------------------------------------------


@ANY_FORM
def test_a_state_dict_brings_back_the_bits(form: str) -> None:
    layer, x = made(form), torch.randn(3, K)
    y = layer(x)
    other = QLinear.from_linear(nn.Linear(K, N), "q4", 64)  # takes the format that it loads
    other(x)
    other.load_state_dict(saved(layer))
    assert_same_bits(other(x), y)
    assert repr(other) == repr(layer)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    third = made("q4")
    third.load_state_dict(torch.load(buffer, weights_only=True), assign=True)
    assert_same_bits(third(x), y)


def test_a_layer_on_the_meta_device_is_one_to_load_into() -> None:
    layer, x = nn.Sequential(made("q4 zero")), torch.randn(3, K)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(K, N))
    quantize_module(empty, "q4", 64, symmetric=False)
    assert {name: (t.shape, t.dtype) for name, t in empty.state_dict().items()} == {
        name: (t.shape, t.dtype) for name, t in layer.state_dict().items()
    }
    with pytest.raises(ValueError, match="meta device"):
        empty[0].pack()
    for assign in (False, True):
        loaded = copy.deepcopy(empty)
        loaded.load_state_dict(saved(layer), assign=assign)
        assert_same_bits(loaded(x), layer(x))


def test_a_loaded_layer_shares_no_memory_with_what_it_was_made_of() -> None:
    q, other = quantize(torch.randn(N, K), "q4"), made("q4", bias=False)
    layer, before = QLinear(q), dequantize(q)
    layer.load_state_dict(other.state_dict())
    assert_same_bits(dequantize(q), before)
    assert_same_bits(layer.dequantize(), other.dequantize())


@pytest.mark.parametrize("fmt", GGUF)
def test_weights_of_files_make_layers(fmt: str) -> None:
    q, x = random_weight(fmt, N, 256), torch.randn(3, 256)
    layer = QLinear(q)
    assert_same_bits(layer.dequantize(), dequantize(q))
    again = QLinear.from_linear(nn.Linear(256, N, bias=False))
    again.load_state_dict(saved(layer))
    assert_same_bits(again(x), layer(x))


@pytest.mark.parametrize("form", (*FORMS, *GGUF))
def test_a_move_to_a_gpu_and_back_keeps_values_and_bits(form: str) -> None:
    layer = made(form, 64, 256) if form in FORMS else QLinear(random_weight(form, 64, 256))
    x, values = torch.randn(3, 256), layer.dequantize()
    y = layer(x)
    with interpreted(90):
        layer.to("cpu").pack()
        assert layer.weight_as_stored().layout == "t64"
        state = saved(layer)
    assert_same_bits(layer.to("cpu").dequantize(), values)
    assert_same_bits(layer(x), y)
    fresh = QLinear.from_linear(nn.Linear(256, 64, bias=layer.bias is not None), "q8")
    fresh.load_state_dict(state)
    assert_same_bits(fresh(x), y)


def test_casts_leave_the_weight_alone() -> None:
    layer, x = made("q4 zero"), torch.randn(3, K)
    before, y = held(layer), layer(x)
    for cast in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float):
        cast(layer)
        for name, part in layer.weight_as_stored().parts.items():
            assert_same_bits(part, before[name])
    layer.load_state_dict({**layer.state_dict(), "bias": made("q4 zero").bias})
    assert_same_bits(layer(x), y)


@pytest.mark.parametrize("scheme", (None, "f32", "i8", "w8a8", *["f16"] * cpu.has_half_panels()))
def test_copies_and_pickles_of_a_used_layer(scheme: str | None) -> None:
    layer, x = made("q4", k=256), torch.randn(3, 256)
    y = layer(x)
    layer.pack(scheme)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert_same_bits(other(x), y)
        assert other.weight_as_stored().parts["codes"].data_ptr() != layer.weight_as_stored().parts["codes"].data_ptr()


def test_bad_state_dicts_are_refused() -> None:
    layer, other = made("q4"), made("q4", N + 1)
    good, values = layer.state_dict(), layer.dequantize()

    def refused(state: dict[str, Any], said: str) -> None:
        with pytest.raises(RuntimeError, match=said):
            layer.load_state_dict(state)
        assert_same_bits(layer.dequantize(), values)

    def header(**changes: object) -> dict[str, Tensor]:
        described = json.loads(bytes(good["_extra_state"].tolist()))
        described["weights"][""] |= changes
        return {**good, "_extra_state": torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)}

    refused(other.state_dict(), rf"weight is \[{N + 1}, {K}\], expected \[{N}, {K}\]")
    refused({name: t for name, t in good.items() if name != "scale"}, "part 'scale' of the weight is missing")
    refused(nn.Linear(K, N).state_dict(), "Missing key.*_extra_state")
    refused({**good, "_extra_state": torch.zeros(3, dtype=torch.uint8)}, "not readable")
    refused({**good, "_extra_state": torch.full((3,), 255, dtype=torch.uint8)}, "utf-8")
    refused({**good, "_extra_state": torch.zeros(3)}, "does not describe")
    refused({**good, "scale": good["scale"].half()}, "'scale' is torch.float16")
    refused({**good, "codes": good["codes"][:-1]}, "'codes' is")
    refused(header(fmt="q9"), "'fmt' 'q9'")
    refused(header(group=48), "48")
    refused(header(segments=99), "99 segments")
    refused(header(layout="t64"), "its scale is")
    refused(header(layout="cpu-f32"), "in layout 'cpu-f32'")
    refused(header(parts=["codes", "forward"]), "part 'forward' of the weight is missing")


@pytest.mark.parametrize("form", (*FORMS, *GGUF))
def test_parts_of_tiles_that_a_kernel_would_misread_are_refused(form: str) -> None:
    layer = made(form, 64, 256) if form in FORMS else QLinear(random_weight(form, 64, 256))
    with interpreted(90):
        layer.pack()
    state = layer.state_dict()
    layer.load_state_dict(state)
    for name in layer.weight_as_stored().parts:
        for bad in (state[name][:0], state[name][..., :1], state[name].flatten(), state[name].to(torch.float64)):
            with pytest.raises(RuntimeError, match="in layout 't64'"):
                layer.load_state_dict({**state, name: bad})


# ---- the walk ----------------------------------------------------------------------------------------


class Subclass(nn.Linear):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64)}) for _ in "ab")
        self.again = self.first
        self.sub = Subclass(64, 64)
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.again(self.first(self.embed(ids)))
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](x)))
        return self.head(self.sub(x))


def quantised(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, QLinear)}


UP_DOWN = {f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down")}


def test_every_linear_of_a_model_is_replaced() -> None:
    net, told = Net(), []
    exact, ids = copy.deepcopy(net).double(), torch.arange(6).view(2, 3)
    assert quantize_module(net, "q8", None, progress=lambda name, text: told.append((name, text))) is net
    assert quantised(net) == UP_DOWN | {"first", "again", "head"}
    assert net.again is net.first and type(net.sub) is Subclass and isinstance(net.embed, nn.Embedding)
    assert {name for name, _ in told} == UP_DOWN | {"first", "head"}
    assert ("head", "q8 32x64, 8,192 -> 2,176 bytes") in told
    assert_close(net(ids), exact(ids), 0.02)
    layer = net.first
    quantize_module(net)  # what is quantised stays as it is
    assert net.first is layer and layer.weight_as_stored().fmt == "q8"


def test_skipped_and_filtered_layers_stay() -> None:
    told: dict[str, str] = {}
    net = quantize_module(
        Net(), skip=("blocks.1", "again"), filter=lambda name, _: name != "head", progress=told.__setitem__
    )
    assert quantised(net) == {"blocks.0.up", "blocks.0.down"}
    assert told["head"] == told["first"] == told["blocks.1.up"] == "kept: not asked for"
    assert quantised(quantize_module(Net(), skip="blocks")) == {"first", "again", "head"}
    net = Net()
    net.more = net.blocks[0]  # a module under two names
    assert quantised(quantize_module(net, skip=["more.up"])) == UP_DOWN - {"blocks.0.up"} | {
        "more.down",
        "first",
        "again",
        "head",
    }
    with pytest.raises(ValueError, match=r"skip names \['block'\]"):
        quantize_module(Net(), skip=["block"])


def test_a_weight_that_another_module_uses_stays_shared() -> None:
    net = Net()
    net.head.weight = net.embed.weight
    with pytest.warns(UserWarning, match="head stays as it is: another module uses its weight too"):
        quantize_module(net)
    assert net.head.weight is net.embed.weight
    assert quantised(net) == UP_DOWN | {"first", "again"}
    net = Net()
    net.head.weight = net.embed.weight
    quantize_module(net, skip=["head"])  # asked for: no warning


def test_a_layer_with_hooks_stays() -> None:
    net = Net()
    net.head.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="head stays as it is: it has hooks"):
        quantize_module(net)
    assert "head" not in quantised(net)


def test_a_layer_that_cannot_be_made_changes_nothing() -> None:
    net = Net()
    net.blocks[1]["down"].weight[3, 5] = torch.nan
    before = {name: id(module) for name, module in net.named_modules()}
    with pytest.raises(ValueError, match=r"quantize_module: blocks\.1\.down: .*NaN"):
        quantize_module(net)
    assert {name: id(module) for name, module in net.named_modules()} == before
    with pytest.raises(ValueError, match=r"first: .*groups of 40"):
        quantize_module(net, group=40)
    with pytest.raises(ValueError, match="itself a Linear"):
        quantize_module(nn.Linear(64, 64))


def test_a_training_flag_and_a_dtype_carry_over() -> None:
    net = quantize_module(Net().bfloat16().eval())
    assert not net.first.training and net.first.bias.dtype == torch.bfloat16
    assert net(torch.arange(3)).dtype == torch.bfloat16


def test_a_model_s_state_dict_and_the_encoder_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True).eval()
    model = quantize_module(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), group=32)
    assert quantised(model) == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        x = torch.randn(2, 3, 64)
        y = model(x)
        other = quantize_module(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), group=32)
        other.load_state_dict(saved(model))
        assert_same_bits(other(x), y)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with pytest.raises(AttributeError, match="no float `weight`"):
        model(x)


# ---- compiled, and the page --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_a_compiled_model_has_the_same_bits(backend: str) -> None:
    net = quantize_module(
        nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 64)), group=32
    )
    x = torch.randn(9, 256)
    unpacked = torch.compile(copy.deepcopy(net), backend=backend)
    y = net(x)
    assert_same_bits(unpacked(x), y)
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    for rows in (slice(0, 9), slice(2, 4), slice(8, 9)):
        assert_same_bits(compiled(x[rows]), y[rows])
    torch.compiler.reset()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_page_runs(code: str) -> None:
    with torch.enable_grad():
        exec(compile(code, "README.md", "exec"), {})


def test_the_tests_the_page_names_are_there() -> None:
    named = set(re.findall(r"test_\w+\.py", README))
    assert named and all((Path(__file__).parent / name).is_file() for name in named)
