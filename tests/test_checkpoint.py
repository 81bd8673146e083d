from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from tiny import ARCHS, tiny_model, write_tiny, write_tiny_gguf

from polymodel.checkpoint import PULLABLE, Checkpoint, cache_dir, open_checkpoint, resolve
from polymodel.config import RopeConfig, tensor_shapes
from polymodel.errors import (
    CorruptCheckpoint,
    FetchFailed,
    InvalidRequest,
    PolymodelError,
    UnsupportedModel,
)
from polymodel.header import BLOCKS

Files = Callable[[str, str], Path]

# canonical name -> transformers' name, written out once more on purpose
LLAMA_SOURCES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers.2.attn_norm": "model.layers.2.input_layernorm.weight",
    "layers.2.q": "model.layers.2.self_attn.q_proj.weight",
    "layers.2.k": "model.layers.2.self_attn.k_proj.weight",
    "layers.2.v": "model.layers.2.self_attn.v_proj.weight",
    "layers.2.o": "model.layers.2.self_attn.o_proj.weight",
    "layers.2.mlp_norm": "model.layers.2.post_attention_layernorm.weight",
    "layers.2.gate": "model.layers.2.mlp.gate_proj.weight",
    "layers.2.up": "model.layers.2.mlp.up_proj.weight",
    "layers.2.down": "model.layers.2.mlp.down_proj.weight",
}
QWEN2_SOURCES = LLAMA_SOURCES | {
    f"layers.2.{part}_bias": f"model.layers.2.self_attn.{part}_proj.bias" for part in "qkv"
}
QWEN3_SOURCES = LLAMA_SOURCES | {
    f"layers.2.{part}_norm": f"model.layers.2.self_attn.{part}_norm.weight" for part in "qk"
}
GEMMA_SOURCES = QWEN3_SOURCES | {
    "layers.2.post_attn_norm": "model.layers.2.post_attention_layernorm.weight",
    "layers.2.mlp_norm": "model.layers.2.pre_feedforward_layernorm.weight",
    "layers.2.post_mlp_norm": "model.layers.2.post_feedforward_layernorm.weight",
}
del GEMMA_SOURCES["head"]
SOURCES = {
    "llama": LLAMA_SOURCES,
    "mistral": LLAMA_SOURCES,
    "qwen2": QWEN2_SOURCES,
    "qwen3": QWEN3_SOURCES,
    "gemma3": GEMMA_SOURCES,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """(format, arch) -> a tiny checkpoint, made once; tests that change one copy it first."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def make(format: str, arch: str) -> Path:
        if (format, arch) not in made:
            write = write_tiny if format == "safetensors" else write_tiny_gguf
            made[format, arch] = write(root / f"{arch}.{format}", arch)
        return made[format, arch]

    return make


@pytest.fixture
def edited(files: Files, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a safetensors checkpoint with keys of config.json changed, or removed by ...."""

    def edit(arch: str, **changes: Any) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(files("safetensors", arch), folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return edit


def floats(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint.raw(name).view(torch.float32)


# ---- what is read ----


@pytest.mark.parametrize("arch", ARCHS)
def test_safetensors_config_is_the_transformers_config(files: Files, arch: str) -> None:
    config = open_checkpoint(files("safetensors", arch)).config
    hf = tiny_model(arch).config
    assert config.arch == {"mistral": "llama"}.get(arch, arch)
    assert (config.vocab_size, config.hidden_size) == (300, 64)
    assert config.intermediate_size == hf.intermediate_size
    assert config.num_layers == hf.num_hidden_layers
    assert (config.num_heads, config.num_kv_heads) == (4, hf.num_key_value_heads)
    assert config.head_dim == (32 if arch in ("qwen3", "gemma3") else 16)
    assert (config.max_context, config.norm_eps) == (512, 1e-6)
    assert config.tied_head == (arch == "gemma3")
    assert (config.bos_id, config.eos_ids) == (1, (2,))
    assert config.qkv_bias == (arch == "qwen2")
    assert config.qk_norm == (arch in ("qwen3", "gemma3"))
    assert config.num_params == sum(p.numel() for p in tiny_model(arch).parameters())


def test_gemma3_has_two_ropes_and_a_window_on_five_of_six_layers(files: Files) -> None:
    for format in ("safetensors", "gguf"):
        config = open_checkpoint(files(format, "gemma3")).config
        assert config.rope == RopeConfig(theta=1e6)
        assert config.rope_local == RopeConfig(theta=1e4)
        assert config.window == 8
        assert config.windowed_layers == (True, True, True, True, True, False, True)
        assert config.scale == pytest.approx(24**-0.5, rel=1e-6)
        assert (config.embed_scale, config.activation, config.post_norms) == (8, "gelu_tanh", True)


@pytest.mark.parametrize("arch", ARCHS)
def test_gguf_config_is_the_safetensors_config(files: Files, arch: str) -> None:
    ours = open_checkpoint(files("gguf", arch)).config
    theirs = open_checkpoint(files("safetensors", arch)).config
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)  # f32 in a GGUF
    for field in theirs.__slots__:
        if field in ("norm_eps", "attn_scale"):
            continue
        if arch == "mistral" and field in ("window", "windowed_layers"):
            continue  # converters do not store it
        assert getattr(ours, field) == getattr(theirs, field), field


@pytest.mark.parametrize("arch", ARCHS)
def test_safetensors_raw_is_what_transformers_saved(files: Files, arch: str) -> None:
    weights = tiny_model(arch).state_dict()
    with open_checkpoint(files("safetensors", arch)) as checkpoint:
        assert checkpoint.tensors.keys() == tensor_shapes(checkpoint.config).keys()
        for name, source in SOURCES[arch].items():
            assert checkpoint.tensors[name].source == source
        for name, info in checkpoint.tensors.items():
            expected = weights[info.source].reshape(info.shape)
            if arch == "gemma3" and name.endswith("norm"):
                expected = expected + 1
            assert torch.equal(floats(checkpoint, name), expected), name
            assert (info.kind, info.nbytes) == ("F32", expected.nbytes)
        body = files("safetensors", arch) / "model.safetensors"
        header = struct.unpack("<Q", body.read_bytes()[:8])[0]
        assert checkpoint.nbytes == body.stat().st_size - 8 - header
        assert (checkpoint.format, checkpoint.metadata) == ("safetensors", {})


@pytest.mark.parametrize("arch", ARCHS)
def test_gguf_raw_is_what_safetensors_raw_is(files: Files, arch: str) -> None:
    ours, theirs = open_checkpoint(files("gguf", arch)), open_checkpoint(files("safetensors", arch))
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert ours.nbytes == theirs.nbytes
    for name in ours.tensors:
        assert torch.equal(ours.raw(name), theirs.raw(name)), name


def test_llama_gguf_rows_are_put_back_in_order(files: Files) -> None:
    checkpoint = open_checkpoint(files("gguf", "llama"))
    stored = {t.name: t.data for t in gguf.GGUFReader(files("gguf", "llama")).tensors}
    weights = tiny_model("llama").state_dict()
    for part in "qk":
        source = f"model.layers.1.self_attn.{part}_proj.weight"
        file_rows = torch.from_numpy(stored[f"blk.1.attn_{part}.weight"].copy())
        assert not torch.equal(file_rows, weights[source])
        assert torch.equal(floats(checkpoint, f"layers.1.{part}"), weights[source])


def test_whole_blocks_move_with_their_rows(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q4_1")
    weight = tiny_model("llama").state_dict()["model.layers.0.self_attn.k_proj.weight"]
    expected = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_1)
    with open_checkpoint(path) as checkpoint:
        assert np.array_equal(checkpoint.raw("layers.0.k").numpy(), expected)
        info = checkpoint.tensors["layers.0.k"]
        assert (info.kind, info.shape, info.nbytes) == ("Q4_1", (32, 64), 32 * 2 * 20)
        assert checkpoint.tensors["layers.0.down"].kind == "F16"  # 172 is no whole block


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_kind_is_handed_out_byte_for_byte(tmp_path: Path, kind: str) -> None:
    written: dict[str, np.ndarray] = {}
    path = write_random_gguf(tmp_path / "m.gguf", kind, written)
    with open_checkpoint(path) as checkpoint:
        for name, info in checkpoint.tensors.items():
            raw = checkpoint.raw(name)
            assert np.array_equal(raw.numpy().ravel(), written[info.source].view(np.uint8).ravel())
            assert (raw.shape[0], raw.numel()) == (info.shape[0], info.nbytes)
            assert raw.untyped_storage().nbytes() == raw.numel()  # of its own
        assert checkpoint.tensors["layers.0.gate"].kind == kind
        assert checkpoint.nbytes == sum(values.nbytes for values in written.values())


def write_random_gguf(path: Path, kind: str, written: dict[str, np.ndarray]) -> Path:
    """A qwen3 of one layer whose matrices are random bytes of one kind."""
    rng, quant = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in {
        "embedding_length": 256,
        "block_count": 1,
        "feed_forward_length": 512,
    }.items():
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_uint32("qwen3.context_length", 64)
    writer.add_uint32("qwen3.attention.head_count", 2)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    shapes = {"attn_q": (256, 256), "attn_k": (256, 256), "attn_v": (256, 256)}
    shapes |= {"attn_output": (256, 256), "ffn_gate": (512, 256), "ffn_up": (512, 256)}
    shapes |= {"ffn_down": (256, 512)}
    names = {f"blk.0.{part}.weight": shape for part, shape in shapes.items()}
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    for name, (rows, cols) in (names | {"token_embd.weight": (5, 256)}).items():
        written[name] = rng.integers(0, 256, (rows, cols // block * block_bytes), np.uint8)
        writer.add_tensor(name, written[name], raw_dtype=quant)
    norms = {"output_norm": 256, "blk.0.attn_norm": 256, "blk.0.ffn_norm": 256}
    norms |= {"blk.0.attn_q_norm": 128, "blk.0.attn_k_norm": 128}
    for name, size in norms.items():
        written[f"{name}.weight"] = rng.random(size, np.float32)
        writer.add_tensor(f"{name}.weight", written[f"{name}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_checkpoints_keep_their_bytes_and_gemma_norms_become_f32(tmp_path: Path, dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 1}
    folder = write_tiny(tmp_path / "m", "gemma3", dtype=dtype, **sizes)
    weights = tiny_model("gemma3", dtype=dtype, **sizes).state_dict()
    checkpoint = open_checkpoint(folder)
    embed = checkpoint.raw("embed").view(dtype)
    assert torch.equal(embed, weights["model.embed_tokens.weight"])
    norm = weights["model.layers.0.self_attn.q_norm.weight"]
    assert torch.equal(floats(checkpoint, "layers.0.q_norm")[0], norm.float() + 1)
    info = checkpoint.tensors["layers.0.q_norm"]
    assert (info.kind, info.nbytes) == ("F32", norm.nbytes)
    # as Gemma3TextScaledWordEmbedding rounds it
    assert checkpoint.config.embed_scale == torch.tensor(48**0.5).to(dtype).item() != 48**0.5


def test_shards_and_a_single_file_are_the_same_checkpoint(files: Files, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "sharded", "qwen2", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    single, sharded = open_checkpoint(files("safetensors", "qwen2")), open_checkpoint(folder)
    direct = open_checkpoint(files("safetensors", "qwen2") / "model.safetensors")
    assert single.config == sharded.config == direct.config
    assert single.tensors == sharded.tensors == direct.tensors
    for name in single.tensors:
        assert torch.equal(single.raw(name), sharded.raw(name))
        assert torch.equal(single.raw(name), direct.raw(name))


def test_a_tied_head_needs_no_tensor_and_an_unused_one_is_ignored(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "llama", tie_word_embeddings=True)
    assert "head" not in open_checkpoint(folder).tensors
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    assert open_checkpoint(folder).config.tied_head
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", tie_word_embeddings=True)
    assert open_checkpoint(path).config.tied_head


def test_gemma3_with_a_vision_tower_is_read_as_its_text_model(edited: Callable[..., Path]) -> None:
    folder = edited("gemma3")
    text = json.loads((folder / "config.json").read_text())
    plain = open_checkpoint(folder)
    expected = plain.raw("layers.6.q")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del text["eos_token_id"], text["rms_norm_eps"], text["tie_word_embeddings"]
    outer = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    (folder / "config.json").write_text(json.dumps(outer))
    (folder / "generation_config.json").unlink()
    for old in ("language_model.model.", "model.language_model."):
        moved = {name.replace("model.", old, 1): weight for name, weight in weights.items()}
        tower = "vision_tower.x.weight" if old[0] == "l" else "model.vision_tower.x.weight"
        moved[tower] = torch.zeros(3, dtype=torch.int64)
        safetensors.torch.save_file(moved, folder / "model.safetensors")
        checkpoint = open_checkpoint(folder)
        assert checkpoint.config.eos_ids == (1, 106)
        assert checkpoint.tensors.keys() == plain.tensors.keys()
        assert torch.equal(checkpoint.raw("layers.6.q"), expected)


def test_end_ids_are_those_of_both_configs(edited: Callable[..., Path], tmp_path: Path) -> None:
    folder = edited("llama", eos_token_id=[7, 3], bos_token_id=None)
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert open_checkpoint(folder).config.eos_ids == (3, 7, 9)
    assert open_checkpoint(folder).config.bos_id is None
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(edited("llama", eos_token_id=...)).config.eos_ids == (2,)
    keys = {"tokenizer.ggml.eot_token_id": 5}
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", keys=keys)
    assert open_checkpoint(path).config.eos_ids == (2, 5)


def test_left_out_keys_take_the_defaults_of_transformers(edited: Callable[..., Path]) -> None:
    folder = edited("llama", head_dim=..., rms_norm_eps=..., rope_parameters=...)
    config = open_checkpoint(folder).config
    assert (config.head_dim, config.norm_eps, config.rope.theta) == (16, 1e-6, 1e4)
    wide = write_tiny(folder.parent / "wide", "llama", num_key_value_heads=4)
    body = json.loads((wide / "config.json").read_text())
    del body["num_key_value_heads"], body["tie_word_embeddings"]
    (wide / "config.json").write_text(json.dumps(body))
    assert open_checkpoint(wide).config.num_kv_heads == 4
    assert not open_checkpoint(wide).config.tied_head


def test_windows_follow_the_config(edited: Callable[..., Path]) -> None:
    def windows(arch: str, **changes: Any) -> tuple[int | None, tuple[bool, ...]]:
        config = open_checkpoint(edited(arch, **changes)).config
        return config.window, config.windowed_layers

    assert windows("mistral") == (8, (True, True, True))
    assert windows("mistral", sliding_window=None) == (None, ())
    assert windows("mistral", sliding_window=...) == (4096, (True, True, True))
    assert windows("llama", sliding_window=8) == (None, ())
    sliding = {"use_sliding_window": True, "sliding_window": 16}
    for arch in ("qwen2", "qwen3"):
        assert windows(arch) == (None, ())
        ruled = sliding | {"layer_types": None, "max_window_layers": 1}
        assert windows(arch, **ruled) == (16, (False, True, True))
        listed = ["sliding_attention", "full_attention", "full_attention"]
        assert windows(arch, **sliding, layer_types=listed) == (16, (True, False, False))
    every = {"layer_types": ..., "sliding_window_pattern": 3}
    assert windows("gemma3", **every)[1] == (True, True, False, True, True, False, True)
    everything = {"layer_types": ["full_attention"] * 7}
    assert windows("gemma3", **everything) == (None, ())
    assert open_checkpoint(edited("gemma3", **everything)).config.rope_local is None


# ---- rotary embeddings ----

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LLAMA3_ROPE = RopeConfig(5e5, "llama3", 8.0, original_context=128)


def test_rope_scalings_of_old_and_new_configs(edited: Callable[..., Path]) -> None:
    def rope(**changes: Any) -> RopeConfig:
        return open_checkpoint(edited("llama", **changes)).config.rope

    old = {"rope_parameters": ..., "rope_theta": 500000.0}
    assert rope(**old) == RopeConfig(5e5)
    assert rope(**old, rope_scaling={"type": "linear", "factor": 4}) == RopeConfig(5e5, "linear", 4)
    assert rope(**old, rope_scaling=LLAMA3) == LLAMA3_ROPE
    assert rope(rope_parameters=LLAMA3 | {"rope_theta": 5e5}) == LLAMA3_ROPE
    assert rope(rope_parameters={"rope_theta": 7.5}) == RopeConfig(7.5)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention_factor": 1.5},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
        {"mscale": 0.7},
        {"factor": None, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    ],
)
def test_yarn_is_the_yarn_of_transformers(edited: Callable[..., Path], extra: dict[str, Any]) -> None:
    params = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    params |= {"original_max_position_embeddings": 128} | extra
    rope = open_checkpoint(edited("llama", rope_parameters=params)).config.rope
    config = tiny_model("llama").config
    config.rope_parameters = dict(params)
    yarn = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    assert rope.attention_factor == pytest.approx(yarn(config, "cpu")[1], abs=0)
    assert (rope.kind, rope.factor, rope.original_context) == ("yarn", 4.0, 128)
    assert rope.truncate == ("truncate" not in extra)
    assert (rope.beta_fast, rope.beta_slow) == ((16, 2) if "beta_fast" in extra else (32, 1))


def test_gemma3_scales_only_the_rope_of_its_full_layers(edited: Callable[..., Path]) -> None:
    old = {"rope_theta": 1e5, "rope_local_base_freq": 2e4, "rope_parameters": ...}
    linear = {"rope_type": "linear", "factor": 8.0}
    for changes in (
        old | {"rope_scaling": linear},
        {
            "rope_parameters": {
                "full_attention": linear | {"rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ):
        config = open_checkpoint(edited("gemma3", **changes)).config
        assert config.rope == RopeConfig(1e5, "linear", 8.0)
        assert config.rope_local == RopeConfig(2e4)


def test_rope_scalings_of_gguf(tmp_path: Path) -> None:
    def rope(arch: str = "llama", **keys: Any) -> RopeConfig:
        full = {f"{arch}.rope.scaling.{key}": value for key, value in keys.items()}
        path = write_tiny_gguf(tmp_path / "m.gguf", arch, keys=full)
        return open_checkpoint(path).config.rope

    assert rope(type="none", factor=2.0) == RopeConfig(1e4)
    assert rope(factor=2.0) == rope(type="linear", factor=2.0) == RopeConfig(1e4, "linear", 2.0)
    yarn = rope("qwen2", type="yarn", factor=4.0, original_context_length=128)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert (yarn.kind, yarn.factor, yarn.original_context) == ("yarn", 4.0, 128)
    yarn = rope(type="yarn", factor=4.0, attn_factor=0.5, yarn_beta_fast=16.0, yarn_beta_slow=2.0)
    assert yarn.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    assert (yarn.original_context, yarn.beta_fast, yarn.beta_slow) == (512, 16, 2)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_factors(tmp_path: Path, factor: float) -> None:
    params = LLAMA3 | {
        "factor": factor,
        "rope_theta": 5e5,
        "original_max_position_embeddings": 8192,
    }
    config = tiny_model("llama").config
    config.rope_parameters = dict(params)
    scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    path = tmp_path / "m.gguf"
    freqs = {"rope_freqs.weight": (plain / scaled).float().numpy()}
    write_tiny_gguf(path, "llama", extra=freqs, rope_parameters=params)
    rope = open_checkpoint(path).config.rope
    assert rope == RopeConfig(5e5, "llama3", factor, original_context=8192)

    freqs["rope_freqs.weight"][3] *= 1.1
    write_tiny_gguf(path, "llama", extra=freqs, rope_parameters=params)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight \[1.0.* no llama3 scaling"):
        open_checkpoint(path)
    write_tiny_gguf(path, "llama", extra={"rope_freqs.weight": np.ones(5, np.float32)})
    with pytest.raises(CorruptCheckpoint, match=r"\(5,\)\), expected F32 \(8,\)"):
        open_checkpoint(path)


# ---- refusals ----


@pytest.mark.parametrize(
    ("arch", "changes", "match"),
    [
        ("llama", {"model_type": "mixtral"}, "model_type 'mixtral'"),
        ("llama", {"model_type": ...}, "model_type ''"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not 'silu'"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["chunked"] * 3}, "'chunked'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2}},
            "keys cached earlier",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "longrope"}},
            "'longrope' changes angles with the leng",
        ),
        ("llama", {"rope_scaling": {"type": "mrope"}}, "rope scaling 'mrope' is not known"),
        ("qwen2", {"rope_parameters": {"full_attention": {"factor": 2}}}, "full_attention is"),
    ],
)
def test_unsupported_configs_are_refused(
    edited: Callable[..., Path], arch: str, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModel, match=match) as refusal:
        open_checkpoint(edited(arch, **changes))
    assert "config.json" in str(refusal.value)


@pytest.mark.parametrize(
    ("arch", "changes", "match"),
    [
        ("llama", {"hidden_size": "64"}, "hidden_size is '64', expected a whole number"),
        ("llama", {"hidden_size": True}, "hidden_size is True"),
        ("llama", {"hidden_size": 0}, "hidden_size is 0"),
        ("llama", {"hidden_size": ...}, "hidden_size is None"),
        ("llama", {"hidden_size": -64}, "hidden_size is -64"),
        ("llama", {"hidden_size": 64.0}, "hidden_size is 64.0"),
        ("llama", {"hidden_size": 66, "head_dim": None}, "hidden size is 66, expected a multiple"),
        ("llama", {"vocab_size": 10**30}, "vocab_size is 10"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("llama", {"num_hidden_layers": 4}, "9 tensors are missing, first 'model.layers.3"),
        (
            "llama",
            {"vocab_size": 301},
            r"embed_tokens.weight': shape is \(300, 64\), expected \(301",
        ),
        (
            "llama",
            {"num_attention_heads": 6},
            r"q_proj.weight.: shape is \(64, 64\), expected \(96, 64\)",
        ),
        ("llama", {"num_key_value_heads": 3}, "number of heads is 4, expected a multiple of the 3"),
        ("llama", {"head_dim": 15}, "head size is 15, expected an even number"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a finite number above 0"),
        ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ("llama", {"rms_norm_eps": math.inf}, "rms_norm_eps is inf"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0"),
        ("llama", {"rope_parameters": {"rope_theta": math.inf}}, "rope_theta is inf"),
        ("llama", {"rope_parameters": {"rope_theta": -1e4}}, "rope_theta is -10000.0"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters is \[1\], expected a table"),
        ("llama", {"rope_scaling": {"type": 3}}, "type is 3, expected text"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is None"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor is 1.0"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": None}}, "factor is None"),
        ("llama", {"model_type": ["llama"]}, "model_type is .*, expected text"),
        ("llama", {"attention_bias": False, "tie_word_embeddings": 1}, "true or false"),
        ("llama", {"eos_token_id": 300}, "eos_token_id is 300, expected token ids in 0..299"),
        ("llama", {"eos_token_id": [1, "2"]}, "eos_token_id is"),
        ("llama", {"bos_token_id": -1}, "bos_token_id is -1"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_window is None, expected a"),
        ("qwen2", {"use_sliding_window": True, "layer_types": []}, "layer_types is .*a list of 3"),
        ("gemma3", {"sliding_window": None}, "some layers are windowed"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "one table for each kind of layer"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (
            "gemma3",
            {"model_type": "gemma3", "text_config": 5},
            "text_config is 5, expected a table",
        ),
    ],
)
def test_contradictory_configs_are_refused(
    edited: Callable[..., Path], arch: str, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(CorruptCheckpoint, match=match) as refusal:
        open_checkpoint(edited(arch, **changes))
    assert "edited" in str(refusal.value)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"[1]", r"content is \[1\], expected a JSON object"),
        (b"{", "not readable as JSON"),
        (b"\xff\xfe\xff", "not readable as JSON"),
        (b"[" * 200_000, "not readable as JSON"),
        (b'{"a": 1, "a": 2}', "a key is there twice"),
        (b'{"hidden_size": ' + b"9" * 9999 + b"}", "not readable as JSON"),
        (b" " * (1 << 25) + b"{}", "expected at most 33554432 bytes"),
    ],
    ids=["list", "cut", "bytes", "deep", "twice", "digits", "long"],
)
def test_broken_json_is_refused(edited: Callable[..., Path], body: bytes, match: str) -> None:
    folder = edited("llama")
    (folder / "config.json").write_bytes(body)
    with pytest.raises(CorruptCheckpoint, match=match):
        open_checkpoint(folder)


def test_missing_files_are_named(edited: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nowhere.gguf: no such file"):
        open_checkpoint(tmp_path / "nowhere.gguf")
    folder = edited("llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"neither model.safetensors nor model.safetensors.in"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(InvalidRequest, match=r"config.json: cannot be read: No such file"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"a": "../model.safetensors"}, r"shard of 'a' is '../model.safetensors', expected"),
        ({"a": "/etc/model.safetensors"}, "beside it"),
        ({"a": "sub\\model.safetensors"}, "beside it"),
        ({"a": "config.json"}, "beside it"),
        ({"a": "\0.safetensors"}, "beside it"),
        ({"a": 3}, "shard of 'a' is 3"),
        ({"a": "gone.safetensors"}, "shard 'gone.safetensors' of 'a' is missing"),
        ([], "weight_map is .*, expected a table"),
        ({"a": "part.safetensors", "b": "twin.safetensors"}, "is in another shard too"),
        ({}, "30 tensors are missing"),
    ],
)
def test_index_names_files_beside_it_only(edited: Callable[..., Path], weight_map: Any, match: str) -> None:
    folder = edited("llama", num_hidden_layers=3)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    shutil.copy(folder / "part.safetensors", folder / "twin.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptCheckpoint, match=match):
        open_checkpoint(folder)


def safetensors_file(path: Path, header: Any, size: int = 64) -> None:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + bytes(size))


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"t": 5}, "'t': shape is None"),
        ({"t": entry(shape=[-1])}, r"shape is \[-1\], expected a list of sizes"),
        ({"t": entry(shape=["4"])}, "expected a list of sizes"),
        ({"t": entry(shape=7)}, "expected a list of sizes"),
        ({"t": entry(offsets=[16, 0])}, "expected two places in order"),
        ({"t": entry(offsets=[0, 1, 2])}, "expected two places in order"),
        ({"t": entry(offsets=[0.0, 16])}, "expected two places in order"),
        ({"t": entry(offsets=[0, 2**70])}, "ends at byte"),
        ({"t": entry(), "u": entry(offsets=[8, 24])}, "'u' overlaps 't' at byte"),
        ({"t": entry(dtype=3)}, "dtype is 3, expected text"),
        ({"t": entry()}, "30 tensors are missing"),
        (b'{"t": {}, "t": {}}', "a key is there twice"),
        (b"[" * 100_000, "not readable as JSON"),
    ],
)
def test_broken_safetensors_headers_are_refused(edited: Callable[..., Path], header: Any, match: str) -> None:
    folder = edited("llama")
    safetensors_file(folder / "model.safetensors", header)
    with pytest.raises(CorruptCheckpoint, match=match):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"", "the file is empty"),
        (b"\1\0", "header length"),
        (
            struct.pack("<Q", 2**60) + b"{}",
            "header length is 1152921504606846976, expected at most 2",
        ),
    ],
)
def test_cut_safetensors_files_are_refused(edited: Callable[..., Path], body: bytes, match: str) -> None:
    folder = edited("llama")
    (folder / "model.safetensors").write_bytes(body)
    with pytest.raises(CorruptCheckpoint, match=match):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda w: w.pop("lm_head.weight"), CorruptCheckpoint, "first 'lm_head.weight'"),
        (lambda w: w.update(x=torch.ones(2)), UnsupportedModel, "1 tensors, first 'x'"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            UnsupportedModel,
            "'model.norm.weight': type 'I8' is none of F32, F16, BF16",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(65)}),
            CorruptCheckpoint,
            r"'model.norm.weight': shape is \(65,\), expected \(1, 64\)",
        ),
    ],
)
def test_tensors_must_be_those_of_the_model(
    edited: Callable[..., Path], change: Any, error: type[Exception], match: str
) -> None:
    file = edited("llama") / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    change(weights)
    safetensors.torch.save_file(weights, file)
    with pytest.raises(error, match=match):
        open_checkpoint(file.parent)


@pytest.mark.parametrize(
    ("arch", "keys", "error", "match"),
    [
        ("llama", {"general.type": "adapter"}, UnsupportedModel, "general.type is 'adapter'"),
        ("llama", {"split.count": 2}, UnsupportedModel, "split.count is 2"),
        ("llama", {"llama.expert_count": 8}, UnsupportedModel, "llama.expert_count is 8"),
        ("llama", {"llama.attention.causal": False}, UnsupportedModel, "causal is false"),
        ("llama", {"llama.attention.scale": 0.1}, UnsupportedModel, "llama.attention.scale is 0.1"),
        ("llama", {"llama.attention.sliding_window": 64}, UnsupportedModel, "sliding_window is 64"),
        ("llama", {"llama.rope.dimension_count": 8}, UnsupportedModel, "dimension_count is 8"),
        ("llama", {"llama.attention.value_length": 8}, UnsupportedModel, "value_length is 8"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, UnsupportedModel, "changes angles"),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, UnsupportedModel, "softcapping is 30"),
        ("llama", {"llama.block_count": None}, CorruptCheckpoint, "llama.block_count is None"),
        (
            "llama",
            {"llama.block_count": 4},
            CorruptCheckpoint,
            "9 tensors are missing, first 'blk.3",
        ),
        ("llama", {"llama.block_count": "3"}, CorruptCheckpoint, "llama.block_count is '3'"),
        ("llama", {"llama.embedding_length": 0}, CorruptCheckpoint, "embedding_length is 0"),
        ("llama", {"llama.attention.head_count": [4, 4, 4]}, CorruptCheckpoint, r"\[4, 4, 4\]"),
        ("llama", {"llama.attention.head_count_kv": 3}, CorruptCheckpoint, "multiple of the 3"),
        ("llama", {"llama.rope.freq_base": math.nan}, CorruptCheckpoint, "freq_base is nan"),
        (
            "llama",
            {"llama.attention.layer_norm_rms_epsilon": 0.0},
            CorruptCheckpoint,
            "epsilon is 0.0, expected a finite number above 0",
        ),
        ("llama", {"general.alignment": 48}, CorruptCheckpoint, "alignment is 48"),
        ("llama", {"tokenizer.ggml.eos_token_id": 300}, CorruptCheckpoint, "expected token ids in"),
        ("gemma3", {"gemma3.attention.sliding_window": None}, CorruptCheckpoint, "window is None"),
    ],
)
def test_gguf_metadata_is_checked(
    tmp_path: Path, arch: str, keys: dict[str, Any], error: type[Exception], match: str
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", arch, keys=keys)
    with pytest.raises(error, match=match) as refusal:
        open_checkpoint(path)
    assert str(path) in str(refusal.value)


def test_gguf_tensors_must_be_those_of_the_model(tmp_path: Path) -> None:
    path, ones = tmp_path / "m.gguf", np.ones(4, np.float32)
    write_tiny_gguf(path, "qwen2", extra={"blk.0.attn_q.scale": ones})
    with pytest.raises(UnsupportedModel, match=r"first 'blk.0.attn_q.scale', are no qwen2's"):
        open_checkpoint(path)
    write_tiny_gguf(path, "qwen2", extra={"rope_freqs.weight": ones})
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight"):
        open_checkpoint(path)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf_file(
    keys: bytes = b"",
    num_keys: int = 0,
    tensors: bytes = b"",
    num_tensors: int = 0,
    version: int = 3,
    magic: bytes = b"GGUF",
) -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys) + keys + tensors


def gguf_tensor(name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        (b"", CorruptCheckpoint, "the file is empty"),
        (b"GG", CorruptCheckpoint, "header goes on for 4 bytes at 0, the file for 2"),
        (b"GGUF\3\0\0\0\1", CorruptCheckpoint, "header goes on for 8 bytes"),
        (gguf_file(magic=b"GGML"), CorruptCheckpoint, "magic is b'GGML'"),
        (gguf_file(version=2), UnsupportedModel, "version 0x2"),
        (gguf_file(version=3 << 24), UnsupportedModel, "version 0x3000000; only 3, little"),
        (gguf_file(num_keys=2**63), CorruptCheckpoint, "header goes on for 8 bytes"),
        (gguf_file(num_tensors=2**64 - 1), CorruptCheckpoint, "header goes on"),
        (
            gguf_file(struct.pack("<Q", 2**60), 1),
            CorruptCheckpoint,
            "for 1152921504606846976 bytes",
        ),
        (gguf_file(text(b"\xff") + bytes(8), 1), CorruptCheckpoint, "is b'.xff', expected UTF-8"),
        (
            gguf_file((text(b"k") + struct.pack("<IB", 0, 1)) * 2, 2),
            CorruptCheckpoint,
            "'k' is ther",
        ),
        (
            gguf_file(text(b"k") + struct.pack("<I", 13), 1),
            CorruptCheckpoint,
            "is 13, expected 0..12",
        ),
        (
            gguf_file(text(b"k") + struct.pack("<IIQ", 9, 9, 1), 1),
            UnsupportedModel,
            "array of arrays at byte",
        ),
        (
            gguf_file(text(b"k") + struct.pack("<IIQ", 9, 10, 2**61), 1),
            CorruptCheckpoint,
            "for 18446744073709551616 bytes",
        ),
        (
            gguf_file(text(b"k") + struct.pack("<IIQ", 9, 8, 2**60), 1),
            CorruptCheckpoint,
            "header goes on",
        ),
        (
            gguf_file(text(b"k") + struct.pack("<IIQQ", 9, 8, 2, 2**60), 1),
            CorruptCheckpoint,
            "header goes on",
        ),
        (
            gguf_file(tensors=text(b"t") + struct.pack("<I", 2**32 - 1), num_tensors=1),
            CorruptCheckpoint,
            "number of dimensions is 4294967295, expected 1..4",
        ),
        (
            gguf_file(tensors=gguf_tensor(dims=(2**64 - 1,) * 4), num_tensors=1),
            CorruptCheckpoint,
            "tensor 't' ends at byte",
        ),
        (
            gguf_file(tensors=gguf_tensor(dims=(4, 0)), num_tensors=1),
            CorruptCheckpoint,
            r"\(4, 0\)",
        ),
        (
            gguf_file(tensors=gguf_tensor(dims=(33,), kind=2), num_tensors=1),
            CorruptCheckpoint,
            "of 32",
        ),
        (
            gguf_file(tensors=gguf_tensor(kind=23), num_tensors=1),
            UnsupportedModel,
            r"23 \(IQ4_XS\)",
        ),
        (
            gguf_file(tensors=gguf_tensor(kind=99), num_tensors=1),
            UnsupportedModel,
            r"99 \(unknown\)",
        ),
        (
            gguf_file(tensors=gguf_tensor(offset=8), num_tensors=1),
            CorruptCheckpoint,
            "alignment 32",
        ),
        (gguf_file(tensors=gguf_tensor(offset=2**63), num_tensors=1), CorruptCheckpoint, "ends at"),
        (
            gguf_file(tensors=gguf_tensor() * 2, num_tensors=2),
            CorruptCheckpoint,
            "'t' is there twice",
        ),
        (
            gguf_file(tensors=gguf_tensor() + gguf_tensor(b"u"), num_tensors=2) + bytes(512),
            CorruptCheckpoint,
            "'u' overlaps 't' at byte",
        ),
        (gguf_file(), UnsupportedModel, "general.architecture ''"),
        (
            gguf_file(text(b"general.architecture") + struct.pack("<I", 8) + text(b"rwkv7"), 1),
            UnsupportedModel,
            "general.architecture 'rwkv7'",
        ),
    ],
)
def test_absurd_gguf_headers_are_refused_at_once(
    tmp_path: Path, body: bytes, error: type[Exception], match: str
) -> None:
    path = tmp_path / "absurd.gguf"
    path.write_bytes(body)
    start = time.perf_counter()
    with pytest.raises(error, match=match):
        open_checkpoint(path)
    assert time.perf_counter() - start < 0.5


def test_a_cut_gguf_names_the_tensor_that_is_cut(files: Files, tmp_path: Path) -> None:
    body = files("gguf", "llama").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(body[:-100])
    with pytest.raises(CorruptCheckpoint, match=r"tensor '.+' ends at byte .+, the file at byte"):
        open_checkpoint(tmp_path / "cut.gguf")


def test_alignment_is_honoured(files: Files, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen3", alignment=512)
    aligned, plain = open_checkpoint(path), open_checkpoint(files("gguf", "qwen3"))
    assert aligned.metadata["general.alignment"] == 512
    for name in plain.tensors:
        assert torch.equal(aligned.raw(name), plain.raw(name))


# ---- fuzzing ----


def damage(body: bytes, header: int, rng: random.Random) -> bytes:
    """One to four of: flip a bit, overwrite eight bytes, cut the end, repeat a piece."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(header, len(data)))
        match rng.randrange(5):
            case 0 | 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1, 7))
                data[at : at + 8] = struct.pack("<Q", number)
            case 3:
                del data[max(at, 1) :]
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 40)]
    return bytes(data)


def assert_opens_or_refuses(path: Path, what: str) -> None:
    start = time.perf_counter()
    try:
        with open_checkpoint(path) as checkpoint:
            dict(checkpoint.metadata)
            for name in checkpoint.tensors:
                checkpoint.raw(name)
    except PolymodelError as error:
        assert path.name in str(error), what
    except BaseException as error:
        raise AssertionError(f"{what}: {error!r}") from error
    assert time.perf_counter() - start < 2, what


SMALL = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_damaged_gguf_files_never_escape_the_typed_errors(tmp_path: Path, arch: str) -> None:
    path = write_tiny_gguf(tmp_path / "fuzz.gguf", arch, **SMALL)
    body, rng = path.read_bytes(), random.Random(0)
    header = body.rindex(b"attn_v.weight") + 200
    for case in range(400):
        path.write_bytes(damage(body, header, rng))
        assert_opens_or_refuses(path, f"case {case}")


@pytest.mark.parametrize("target", ["model.safetensors", "config.json", "generation_config.json"])
def test_damaged_folders_never_escape_the_typed_errors(tmp_path: Path, target: str) -> None:
    folder = write_tiny(tmp_path / "fuzz", "gemma3", **SMALL)
    body, rng = (folder / target).read_bytes(), random.Random(1)
    is_tensors = target == "model.safetensors"
    header = 8 + int.from_bytes(body[:8], "little") if is_tensors else len(body)
    for case in range(300):
        (folder / target).write_bytes(damage(body, header, rng))
        assert_opens_or_refuses(folder, f"case {case}")


def test_odd_config_values_never_escape_the_typed_errors(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "fuzz", "gemma3", **SMALL)
    config, rng = json.loads((folder / "config.json").read_text()), random.Random(2)
    odd = [None, True, 0, -1, 1, 2**31, 10**40, 1e300, math.nan, "", "64", [], [1], {}, {"a": 1}]
    for key in config:
        for value in odd:
            changed = config | {key: value, rng.choice(list(config)): rng.choice(odd)}
            (folder / "config.json").write_text(json.dumps(changed))
            assert_opens_or_refuses(folder, f"{key} = {value!r}")


# ---- metadata, names, life cycle ----


def test_metadata_is_decoded_when_asked_for(files: Files) -> None:
    path = files("gguf", "qwen2")
    with open_checkpoint(path) as checkpoint:
        metadata = checkpoint.metadata
    reader = gguf.GGUFReader(path)
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert list(metadata) == keys and len(metadata) == len(keys)
    for key in keys:
        assert metadata[key] == reader.fields[key].contents(), key
    assert metadata["tokenizer.ggml.tokens"] is metadata["tokenizer.ggml.tokens"]
    assert metadata.get("missing") is None


def test_metadata_that_is_not_utf8_is_refused_when_read(files: Files, tmp_path: Path) -> None:
    body = files("gguf", "qwen2").read_bytes().replace(b"<17>", b"<\xff7>")
    (tmp_path / "m.gguf").write_bytes(body)
    metadata = open_checkpoint(tmp_path / "m.gguf").metadata
    with pytest.raises(CorruptCheckpoint, match="expected UTF-8"):
        metadata["tokenizer.ggml.tokens"]


def test_a_vocabulary_of_260k_opens_in_half_a_second(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.tokens": [f"token-{i}" for i in range(262_144)],
        "tokenizer.ggml.scores": [0.0] * 262_144,
    }
    path, times = write_tiny_gguf(tmp_path / "m.gguf", "llama", keys=keys), []
    for _ in range(3):
        start = time.perf_counter()
        checkpoint = open_checkpoint(path)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == keys["tokenizer.ggml.tokens"]
    assert checkpoint.metadata["tokenizer.ggml.scores"] == keys["tokenizer.ggml.scores"]


def test_tensors_outlive_the_checkpoint_but_raw_does_not(files: Files) -> None:
    with open_checkpoint(files("gguf", "qwen3")) as checkpoint:
        kept = checkpoint.raw("layers.0.gate")
        copy = kept.clone()
        with pytest.raises(InvalidRequest, match=r"'layers.9.gate': the checkpoint has no such"):
            checkpoint.raw("layers.9.gate")
    assert torch.equal(kept, copy)
    with pytest.raises(InvalidRequest, match="the checkpoint is closed"):
        checkpoint.raw("layers.0.gate")


def test_writing_into_a_raw_tensor_never_reaches_the_file(files: Files) -> None:
    before = files("gguf", "qwen3").read_bytes()
    open_checkpoint(files("gguf", "qwen3")).raw("embed").zero_()
    assert files("gguf", "qwen3").read_bytes() == before


def test_an_open_checkpoint_holds_no_file_and_no_mapping(files: Files, tmp_path: Path) -> None:
    path = Path(shutil.copy(files("gguf", "qwen3"), tmp_path / "m.gguf"))
    with open_checkpoint(path) as checkpoint:
        kept = checkpoint.raw("embed")
        assert str(path) not in Path("/proc/self/maps").read_text()
        assert str(path) not in {os.readlink(at) for at in Path("/proc/self/fd").iterdir() if at.is_symlink()}
    assert kept.numel() == checkpoint.tensors["embed"].nbytes


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def lengthened(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(8))


def rewritten(path: Path) -> None:
    stat, body = path.stat(), path.read_bytes()
    path.write_bytes(body)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def replaced(path: Path) -> None:
    stat, other = path.stat(), path.with_suffix(".new")
    shutil.copy(path, other)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, path)


@pytest.mark.parametrize("format", ["gguf", "safetensors"])
@pytest.mark.parametrize(
    ("change", "field"), [(cut, "size"), (lengthened, "size"), (rewritten, "mtime_ns"), (replaced, "inode")]
)
def test_a_file_that_changed_since_it_was_opened_is_refused(
    files: Files, tmp_path: Path, format: str, change: Callable[[Path], None], field: str
) -> None:
    path = file = tmp_path / "m"
    if format == "gguf":
        shutil.copy(files(format, "qwen3"), path)
    else:
        file = shutil.copytree(files(format, "qwen3"), path) / "model.safetensors"
    checkpoint, before = open_checkpoint(path), file.stat()
    kept = checkpoint.raw("norm")
    change(file)
    names = {"size": "st_size", "mtime_ns": "st_mtime_ns", "inode": "st_ino"}
    now, then = (getattr(stat, names[field]) for stat in (file.stat(), before))
    for name in checkpoint.tensors:
        with pytest.raises(
            CorruptCheckpoint, match=f"{file}: {field} is {now}, expected {then}, as when it was opened"
        ):
            checkpoint.raw(name)
    assert kept.numel() == 4 * 64


def test_a_file_that_is_gone_is_refused(files: Files, tmp_path: Path) -> None:
    path = Path(shutil.copy(files("gguf", "qwen3"), tmp_path / "m.gguf"))
    checkpoint = open_checkpoint(path)
    path.unlink()
    with pytest.raises(CorruptCheckpoint, match="cannot be read any more: No such file"):
        checkpoint.raw("embed")
    with pytest.raises(CorruptCheckpoint, match="cannot be read any more: No such file"):
        checkpoint.metadata["tokenizer.ggml.tokens"]


def test_names_resolve_to_paths_or_to_the_cache(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    assert cache_dir() == Path.home() / ".cache" / "polymodel"
    with pytest.raises(InvalidRequest, match=r"'no/such' is no file, .* named model \(smollm2\)"):
        resolve("no/such")
    with pytest.raises(InvalidRequest, match="no file"):
        resolve("x" * 5000)
    with pytest.raises(FetchFailed, match=r"has 0 of 98362432 bytes; run `polymodel pull smollm2`"):
        resolve("smollm2", tmp_path)
    path = PULLABLE["smollm2"].path(tmp_path)
    assert path == tmp_path / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir()
    path.write_bytes(b"half")
    with pytest.raises(FetchFailed, match="has 4 of 98362432 bytes"):
        resolve("smollm2", tmp_path)
    with path.open("wb") as file:
        file.truncate(98362432)
    assert resolve("smollm2", tmp_path) == path
