"""What a model will weigh and how it is multiplied, on a CPU and, in the interpreter, by the kernels of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks import assert_same_bits
from interpreter import interpreted
from tiny import write_tiny, write_tiny_gguf, write_tokenizer
from torch import Tensor

from csrc_triton.launch import kernels_on_cpu
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.config import Weights
from polymodel.engine import Engine
from polymodel.events import Events
from polymodel.kv import Arena, PageList
from polymodel.ledger import Ledger
from polymodel.model import Panel, forward
from polymodel.packing import plan_weights
from polymodel.residency import Hosted, Residency, model_nbytes

WIDE = {"hidden_size": 256, "intermediate_size": 256}
SMALL = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 160, "vocab_size": 128}
IDS = [5, 17, 99, 3, 64, 120]


def host(path: Path, weights: Weights) -> tuple[Hosted, Arena]:
    arena = Arena(16 << 20, 2 << 20)
    return Residency(1 << 30, arena, Ledger(), Events()).add("m", open_checkpoint(path), weights, False), arena


def run(path: Path, weights: Weights, parts: list[list[int]]) -> list[Tensor]:
    """Logits of the parts' rows, each part a sequence of its own, all in one forward."""
    hosted, arena = host(path, weights)
    assert hosted.model is not None
    lists = [PageList(arena, hosted.layout) for _ in parts]
    return list(forward(hosted.model, arena, Panel(lists, parts, "all")).split([len(p) for p in parts]))


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        pytest.param(kind, weights, marks=[] if weights == "file" or i % 5 == j - 1 else pytest.mark.slow)
        for i, kind in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "F16", "F32"))
        for j, weights in enumerate(("file", "q4", "q8", "w8a8", "bf16", "f32"))
    ],
)
def test_planned_bytes_are_those_of_the_loaded_model(tmp_path: Path, kind: str, weights: Weights) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", kind=kind, **WIDE)
    with kernels_on_cpu(90):
        hosted, _ = host(path, weights)
    assert hosted.model is not None and hosted.plan.nbytes == model_nbytes(hosted.model)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_planned_bytes_of_odd_widths(tmp_path: Path, arch: str) -> None:
    path = write_tiny(tmp_path, arch, intermediate_size=172)
    for weights in ("q4", "q8", "w8a8", "bf16"):
        with kernels_on_cpu(90):
            hosted, _ = host(path, weights)
        assert hosted.model is not None and hosted.plan.nbytes == model_nbytes(hosted.model)


def test_a_gpu_multiplies_what_the_file_holds(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q4_1", **WIDE)
    with kernels_on_cpu(90):
        plan = plan_weights(open_checkpoint(path), "file", 63)
    assert {m.scheme for m in plan.matrices.values()} == {"t64", "t64-glu"}
    assert plan.matrices["layers.0.gate_up"].scheme == "t64-glu"
    on_cpu = plan_weights(open_checkpoint(path), "file", 63)
    assert {m.scheme for m in on_cpu.matrices.values()} <= {"i4", "f16", "f32"}


def test_a_model_of_mixed_formats_keeps_each(tmp_path: Path) -> None:
    """As in files whose value projection has more bits."""
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q4_0", **WIDE))
    other = open_checkpoint(write_tiny_gguf(tmp_path / "n.gguf", "llama", kind="Q8_0", **WIDE))
    checkpoint.tensors["layers.0.v"] = other.tensors["layers.0.v"]
    with kernels_on_cpu(90):
        plan = plan_weights(checkpoint, "file", 63)
    names = {n.removeprefix("layers.0."): m for n, m in plan.matrices.items() if n.startswith("layers.0.")}
    assert set(names) == {"qk", "v", "o", "gate_up", "down"}
    assert (names["qk"].fmt, names["v"].fmt) == ("q4_0", "q8_0")
    rows = sum(checkpoint.tensors[f"layers.0.{part}"].shape[0] for part in "qk")
    assert names["qk"].shape == (rows, 256)


@pytest.mark.parametrize(("kind", "weights"), [("Q8_0", "file"), ("F32", "w8a8")])
def test_logits_by_kernels(tmp_path: Path, kind: str, weights: Weights) -> None:
    """The same rounded weights on both paths, so that float32 sums alone differ; w8a8 is integers on both."""
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", kind=kind, **SMALL)
    reference = run(path, "f32" if weights == "file" else weights, [IDS])[0]
    with interpreted(races=False):
        ours = run(path, weights, [IDS])[0]
    assert (ours - reference).abs().max() < 1e-4 * reference.std() and reference.std() > 0.3


def test_rows_of_a_model_on_kernels_do_not_depend_on_company(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q8_0", **SMALL)
    with interpreted(races=False, sequential_dot=True):
        together = run(path, "file", [IDS, IDS[2:]])
        alone = [run(path, "file", [part])[0] for part in (IDS, IDS[2:])]
    for a, b in zip(together, alone, strict=True):
        assert_same_bits(a, b)
    assert not torch.equal(together[0][2:], together[1])


def test_an_engine_generates_by_kernels(tmp_path: Path) -> None:
    """Prefill, decode and chains of drafts, whole: the tokens of the CPU path, whose float32 sums round elsewhere."""
    path = write_tokenizer(write_tiny(tmp_path / "m", "llama", num_hidden_layers=1))

    def tokens(draft: str | None) -> list[int]:
        with Engine(budget=1 << 30, kv_budget=16 << 20) as engine:
            for name in ("m", "d"):
                engine.add(name, path)
            return engine.generate("m", prompt_ids=IDS, max_new_tokens=4, stop_at_eos=False, draft=draft).tokens

    expected = tokens(None)
    with interpreted(races=False):
        assert tokens(None) == tokens("d") == expected
    assert len(set(expected)) > 1


def test_a_sibling_goes_on_by_kernels(tmp_path: Path) -> None:
    """From the hidden states that the model kept, with the bits of the sibling's own prefill."""
    path = write_tokenizer(write_tiny(tmp_path / "m", "llama", num_hidden_layers=2))
    with interpreted(races=False, sequential_dot=True), Engine(budget=1 << 30, kv_budget=16 << 20) as engine:
        engine.add("m", path)
        engine.add("high", perturbed(open_checkpoint(path), 1, 0))
        one, direct = engine.session("m"), engine.session("high", domain="direct")
        one.append(IDS)
        logits = direct.append(IDS)
        two = engine.session("high", prefix=one)
        assert two.num_resumed == len(IDS) and len(engine.events.of("prove")) == 1
        assert_same_bits(two.pages.dump(), direct.pages.dump())
        assert two.logits is not None
        assert_same_bits(two.logits, logits)
        assert not torch.equal(two.pages.dump(), one.pages.dump())
