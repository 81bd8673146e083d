"""The sibling made from the same weights, and the demo on the real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny, write_tiny_gguf, write_tokenizer

from csrc_triton.quant import QTensor, dequantize
from polymodel import Engine, can_share
from polymodel.checkpoint import Checkpoint, open_checkpoint, perturbed
from polymodel.demo import ASKS, run_demo, show_nothing
from polymodel.errors import InvalidRequest
from polymodel.selfcheck import write_random_model
from polymodel.share import band_digests

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K_QUANTS = ["Q4_K", "Q5_K", "Q6_K"]


def values(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    info = checkpoint.tensors[name]
    return dequantize(QTensor.from_gguf(checkpoint.raw(name), info.kind, info.shape))


def is_upper_matrix(name: str, first: int) -> bool:
    part = name.split(".")
    return part[0] == "layers" and int(part[1]) >= first and not name.endswith(("norm", "bias"))


@pytest.mark.parametrize("kind", KINDS)
def test_only_upper_matrices_move_and_little(kind: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", kind=kind, intermediate_size=160)
    with open_checkpoint(path) as base:
        sibling = perturbed(base, 2, seed=1)
        assert sibling.tensors == base.tensors and sibling.config == base.config
        for name in base.tensors:
            ours, theirs = sibling.raw(name), base.raw(name)
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs) != is_upper_matrix(name, 2)
            change = (values(sibling, name) - values(base, name)).norm() / values(base, name).norm()
            assert (0.01 < change < 0.03) if is_upper_matrix(name, 2) else change == 0


@pytest.mark.parametrize("kind", K_QUANTS)
def test_the_scales_of_superblocks_move_too(kind: str, tmp_path: Path) -> None:
    # the gguf package does not quantise to these kinds: bytes of its choice of zeros, ours of scales
    from polymodel.checkpoint import SCALES, _scaled
    from polymodel.header import BLOCKS

    data = torch.zeros(4, BLOCKS[kind][1], dtype=torch.uint8)
    start, count = SCALES[kind]
    data[:, start : start + 2 * count] = torch.ones(4, count, dtype=torch.float16).view(torch.uint8)
    data[:, -1 if start == 0 else 0] = 0x51
    moved = _scaled(data.clone(), kind, torch.Generator().manual_seed(0))
    differs = (moved != data).any(0).nonzero().flatten().tolist()
    assert differs and set(differs) <= set(range(start, start + 2 * count))
    scales = moved[:, start : start + 2 * count].contiguous().view(torch.float16)
    assert ((scales - 1).abs() < 0.1).all() and torch.equal(scales[:, 0], scales[:, -1])


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    with open_checkpoint(write_tiny(tmp_path, "qwen2")) as base:
        one, same, other = (perturbed(base, 1, seed) for seed in (5, 5, 6))
        assert torch.equal(one.raw("layers.2.o"), same.raw("layers.2.o"))
        assert not torch.equal(one.raw("layers.2.o"), other.raw("layers.2.o"))
        base.close()
        assert torch.equal(one.raw("layers.2.o"), same.raw("layers.2.o")), "it stands on its own"


def test_digests_agree_up_to_the_first_changed_layer(tmp_path: Path) -> None:
    with open_checkpoint(write_tiny(tmp_path, "llama")) as base:
        for first in range(base.config.num_layers + 1):
            ours, theirs = band_digests(perturbed(base, first, 0), "file"), band_digests(base, "file")
            assert [a == b for a, b in zip(ours, theirs, strict=True)] == [i <= first for i in range(len(ours))]


def test_the_verdict_counts_the_equal_layers(tmp_path: Path) -> None:
    write_random_model(tmp_path)
    with Engine() as engine, open_checkpoint(tmp_path) as base:
        engine.add("one", tmp_path)
        engine.add("sibling", perturbed(base, 1, 0))
        verdict = can_share(engine["one"], engine["sibling"])
        assert (verdict.layers, verdict.num_layers) == (1, 2)


@pytest.mark.parametrize("first", [-1, 4])
def test_a_layer_that_is_not_there_is_refused(first: int, tmp_path: Path) -> None:
    with (
        open_checkpoint(write_tiny(tmp_path, "llama")) as base,
        pytest.raises(InvalidRequest, match=r"expected 0\.\.3"),
    ):
        perturbed(base, first, 0)


def demo_of(path: Path, num_shared: int) -> dict[str, Any]:
    demo = run_demo(path, "640MiB", 12, show_nothing)
    assert demo.is_good
    report = demo.as_dict()
    for ask, request in zip(ASKS, report["requests"], strict=True):
        assert request["model"] == ask.model and 0 < len(request["tokens"]) <= 12
    assert report["drafted_equals_plain"] and report["requests"][-1]["metrics"]["num_drafted"] > 0
    assert {turn["model"] for turn in report["turns"]} == {"smol", "smol-q4", "sibling"}
    metrics = [request["metrics"] for request in report["requests"]]
    rows = sum(one["num_target_forwards"] + one["num_drafted"] for one in metrics)  # the pending token and the drafts
    assert sum(turn["decode_rows"] for turn in report["turns"]) == rows
    assert sum(report["ledger"]["weights"].values()) <= report["budget"]
    layers = {tuple(verdict["models"]): verdict["layers"] for verdict in report["can_share"]}
    assert layers[("smol", "sibling")] == num_shared and layers[("smol", "smol-q4")] == 0
    return report


def test_the_demo_answers_and_measures(tmp_path: Path) -> None:
    settings = write_tokenizer(write_tiny(tmp_path, "llama", num_hidden_layers=5)) / "tokenizer_config.json"
    template = {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | template))
    demo_of(tmp_path, num_shared=4)


@pytest.mark.slow
@pytest.mark.demo_model
def test_the_demo_knows_the_capital_of_france(demo_model_path: Path) -> None:
    report = demo_of(demo_model_path, num_shared=24)
    assert all("Paris" in r["text"] for r in report["requests"] if "France" in r["prompt"])
