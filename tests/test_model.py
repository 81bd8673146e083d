"""Logits against transformers in float32 on tiny random models of every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import ARCHS, read_tiny_gguf, tiny_model, write_tiny, write_tiny_gguf
from torch import Tensor

from csrc_triton.quant import dequantize, quantize
from polymodel.checkpoint import open_checkpoint
from polymodel.config import Weights
from polymodel.errors import KVFull
from polymodel.events import Events
from polymodel.kv import Arena, PageList
from polymodel.ledger import Ledger
from polymodel.model import Model, Panel, forward
from polymodel.residency import Residency

# largest |difference| of a logit over the logits' standard deviation, which is 0.4 to 5; 4e-5 was measured
CLOSE = 1e-4  # of the logits' spread; float32 sums in another order came to 6.3e-5 at most
IDS = torch.randint(3, 300, (90,), generator=torch.Generator().manual_seed(5)).tolist()
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}


def load(path: Path, weights: Weights = "f32") -> tuple[Model, Arena]:
    arena = Arena(16 << 20, 2 << 20)
    hosted = Residency(1 << 30, arena, Ledger(), Events()).add("m", open_checkpoint(path), weights, False)
    assert hosted.model is not None
    return hosted.model, arena


def logits(path: Path, weights: Weights = "f32", ids: Sequence[int] = IDS) -> Tensor:
    model, arena = load(path, weights)
    return forward(model, arena, Panel([PageList(arena, model.layout)], [ids], "all"))


@torch.inference_mode()
def wanted(model: Any, ids: Sequence[int] = IDS) -> Tensor:
    model.config._attn_implementation = "eager"
    return model.float()(torch.tensor([ids])).logits[0]


def assert_close(ours: Tensor, theirs: Tensor, close: float = CLOSE) -> None:
    worst, spread = float((ours - theirs).abs().max()), float(theirs.std())
    assert worst < close * spread and spread > 0.3, (worst, spread)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of the difference over that of the logits."""
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("arch", ARCHS)
def test_float32_logits_are_those_of_transformers(tmp_path: Path, arch: str) -> None:
    path, theirs = write_tiny(tmp_path, arch), wanted(tiny_model(arch))
    assert_close(logits(path), theirs)
    assert torch.equal(logits(path), logits(path, "file"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_half_precision_files_compute_with_their_exact_weights(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    path = write_tiny(tmp_path, arch, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if arch == "gemma3":  # the scale of the embedding is rounded to the checkpoint's dtype
        model.model.embed_tokens.embed_scale = torch.tensor(64**0.5, dtype=dtype).float()
    theirs = wanted(model)
    assert_close(logits(path, "f32"), theirs)
    assert_close(logits(path, "file"), theirs)


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rms_norm_eps": 0.1, "num_key_value_heads": 4, "head_dim": 8}),
        ("llama", {"num_key_value_heads": 1, "num_hidden_layers": 1}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("gemma3", {"sliding_window": 70, "query_pre_attn_scalar": 100}),
        ("gemma3", {"rms_norm_eps": 0.1}),
    ],
)
def test_what_a_config_says_is_done(tmp_path: Path, arch: str, overrides: dict[str, Any]) -> None:
    assert_close(logits(write_tiny(tmp_path, arch, **overrides)), wanted(tiny_model(arch, **overrides)))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "default", "rope_theta": 500.0},
        LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        YARN,
        YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
        YARN | {"rope_theta": 10.0, "beta_slow": 0.02},  # the range ends beyond the last pair
        YARN | {"attention_factor": 0.8},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    ],
    ids=lambda rope: "-".join([rope["rope_type"], *list(rope)[4:]]),
)
def test_rope_scalings(tmp_path: Path, rope: dict[str, Any]) -> None:
    overrides = {"rope_parameters": rope, "head_dim": 32}
    theirs = wanted(tiny_model("llama", **overrides))
    assert distance(wanted(tiny_model("llama", head_dim=32)), theirs) > 0.03  # it makes a difference
    assert_close(logits(write_tiny(tmp_path, "llama", **overrides)), theirs)


def test_gemma3_layers_have_two_ropes(tmp_path: Path) -> None:
    full = {"rope_type": "linear", "rope_theta": 3e3, "factor": 8.0}
    overrides = {
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 40.0}}
    }
    assert_close(logits(write_tiny(tmp_path, "gemma3", **overrides)), wanted(tiny_model("gemma3", **overrides)))


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_prompt_longer_than_a_chunk_of_keys(tmp_path: Path, arch: str) -> None:
    ids = torch.randint(3, 300, (600,), generator=torch.Generator().manual_seed(6)).tolist()
    overrides = {"max_position_embeddings": 600}
    ours = logits(write_tiny(tmp_path, arch, **overrides), ids=ids)
    # transformers' angles are float32: at position 600 they are off by 2e-5 (1e-4 was measured)
    assert_close(ours, wanted(tiny_model(arch, **overrides), ids), 2e-4)


@pytest.mark.parametrize(
    ("weights", "most"),
    # float32 activations; bfloat16 ones cost 1 to 2 %, int8 ones (a scale a token) 3 to 5 %
    [("bf16", 1e-5), ("q8", 0.03), ("q4", 0.03), ("w8a8", 0.08)],
)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_converted_weights_are_the_rounded_ones(tmp_path: Path, arch: str, weights: Weights, most: float) -> None:
    path, model = write_tiny(tmp_path, arch), tiny_model(arch)
    before = wanted(tiny_model(arch))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.copy_(rounded(weight.detach(), "q8" if "embed" in name or "head" in name else weights, weights))
    ours, theirs = logits(path, weights), wanted(model)
    assert distance(ours, theirs) < most
    assert distance(ours, theirs) < 0.9 * distance(ours, before)  # nearer to the rounded model than to the real one


def rounded(weight: Tensor, kind: str, weights: Weights) -> Tensor:
    if weights == "bf16":
        return weight.bfloat16().float()
    return dequantize(quantize(weight, "q4", group=32) if kind == "q4" else quantize(weight, "q8", group=None))


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.mark.parametrize("arch", ARCHS)
def test_gguf_of_every_architecture(tmp_path: Path, arch: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", arch)
    overrides = {"sliding_window": None} if arch == "mistral" else {}  # a GGUF does not have it
    assert_close(logits(path), wanted(tiny_model(arch, **overrides)))


@pytest.mark.parametrize(
    ("kind", "arch", "most"),
    # half-precision panels of what is stored; 4-bit kinds with bfloat16 activations
    [("F16", "qwen3", 1e-5), ("BF16", "qwen3", 1e-5)]
    + [(kind, "qwen3", 2e-3) for kind in ("Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q6_K")]
    + [(kind, "qwen3", 0.02) for kind in ("Q4_0", "Q4_1", "Q4_K")]
    + [("Q4_1", "llama", 0.05), ("Q8_0", "gemma3", 2e-3)],
)
def test_quantised_gguf_against_its_dequantised_model(tmp_path: Path, kind: str, arch: str, most: float) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", arch, kind=kind, **WIDE)
    theirs = wanted(read_tiny_gguf(path, arch, **WIDE))
    assert_close(logits(path, "f32"), theirs)
    assert distance(logits(path, "file"), theirs) < most


def test_only_the_wanted_rows_have_logits(tmp_path: Path) -> None:
    model, arena = load(write_tiny(tmp_path, "llama"))
    one, two = (PageList(arena, model.layout) for _ in range(2))
    seen: list[tuple[int, int]] = []
    every = forward(model, arena, Panel([one, two], [IDS[:5], IDS[5:8]], "all"), lambda *done: seen.append(done))
    assert (every.shape, every.dtype, seen) == ((8, 300), torch.float32, [(1, 3), (2, 3), (3, 3)])
    for pages, count in ((one, 5), (two, 3)):
        assert len(pages) == count
        pages.rollback(count)
    last = forward(model, arena, Panel([one, two], [IDS[:5], IDS[5:8]]))
    assert torch.equal(last, every[[4, 7]])
    assert forward(model, arena, Panel([one, two], [[1], [2]], "none")).shape == (0, 300)
    assert (len(one), len(two)) == (6, 4)


def test_an_error_leaves_the_lengths(tmp_path: Path) -> None:
    model, _ = load(write_tiny(tmp_path, "llama"))
    arena = Arena(2 * 3 * model.layout.page_bytes, 3 * model.layout.page_bytes)
    layout = arena.layout(3, 2, 16)
    lists = [PageList(arena, layout) for _ in range(2)]
    small = replace(model, layout=layout)
    forward(small, arena, Panel(lists, [IDS[:60], IDS[:70]]))
    with pytest.raises(KVFull, match="1 KV pages"):
        forward(small, arena, Panel(lists, [IDS[:4], IDS[:70]]))
    assert [len(pages) for pages in lists] == [60, 70]
    with pytest.raises(RuntimeError, match="stop"):
        forward(small, arena, Panel(lists, [IDS[:4], IDS[:5]]), stop)
    assert [len(pages) for pages in lists] == [60, 70]
    arena.check()


def stop(done: int, of: int) -> None:
    if done == 2:
        raise RuntimeError("stop")
