"""Tiny random models on disk, in both formats; transformers builds them and so is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

ARCHS = ("llama", "mistral", "qwen2", "qwen3", "gemma3")

_COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {"intermediate_size": 160}),
    "qwen3": ("Qwen3Config", {"intermediate_size": 160, "head_dim": 32}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "intermediate_size": 160,
            "head_dim": 32,
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
        },
    ),
}


def tiny_model(arch: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A transformers model for causal LM; overrides are fields of its config."""
    name, fields = _CONFIGS[arch]
    config = getattr(transformers, name)(**{**_COMMON, **fields, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, weight in sorted(model.named_parameters()):
            # a tied head behind gemma's scaled embedding would only repeat the input
            std = 0.05 if arch == "gemma3" and "embed" in path else 0.2
            weight.normal_(0.0, std, generator=generator)
            if "norm" in path and arch != "gemma3":  # gemma3 stores a norm's weight minus one
                weight.add_(1.0)
    return model.to(dtype)


def write_tiny(
    folder: str | Path,
    arch: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "1GB",
    **overrides: Any,
) -> Path:
    """Save tiny_model as a safetensors folder; the folder, for from_pretrained and ourselves."""
    model = tiny_model(arch, seed, dtype, **overrides)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)


def gguf_names(arch: str, num_layers: int) -> dict[str, str]:
    """transformers' tensor names -> GGUF's, by the gguf package's own map."""
    names = gguf.get_tensor_name_map(_gguf_arch(arch), num_layers)
    kinds = (".weight", ".bias")
    return {k + s: v + s for k, (_, v) in names.mapping.items() for s in kinds}


def write_tiny_gguf(
    path: str | Path,
    arch: str,
    seed: int = 0,
    kind: str = "F32",
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    alignment: int | None = None,
    **overrides: Any,
) -> Path:
    """Save tiny_model as llama.cpp's converter would; keys are added, or left out where None.

    Vectors are F32; matrices have the wanted kind, F16 where their rows are no whole blocks. For the
    K kinds, which the gguf package cannot write, they are random blocks of about the same spread.
    """
    model = tiny_model(arch, seed, **overrides)
    names = gguf_names(arch, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(Path(path), gguf.MODEL_ARCH_NAMES[_gguf_arch(arch)])
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in {**_gguf_keys(arch, model.config), **(keys or {})}.items():
        _add_key(writer, key, value)
    tied = model.config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = gguf_values(arch, model.config, name, weight).numpy()
        wanted = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
            wanted = gguf.GGMLQuantizationType.F16
        writer.add_tensor(names[name], _quantized(values, wanted), raw_dtype=wanted)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    if not kind.name.endswith("_K"):
        return gguf.quantize(values, kind)
    weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(abs(int(values.flat[0] * 1e6)))
    blocks = random.integers(0, 256, (values.size // weights, nbytes), dtype=np.uint8)
    halves = {"Q4_K": {0: 1e-3, 2: 7.5e-3}, "Q5_K": {0: 5e-4, 2: 7.5e-3}, "Q6_K": {208: 1.5e-4}}
    for at, scale in halves[kind.name].items():
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(values.shape[0], -1)


def read_tiny_gguf(path: str | Path, arch: str, **overrides: Any) -> Any:
    """The transformers model that a file of write_tiny_gguf holds, its weights as the gguf package reads them."""
    model = tiny_model(arch, **overrides)
    names = gguf_names(arch, model.config.num_hidden_layers)
    read = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    state = model.state_dict()
    for name, weight in state.items():
        if names[name] in read:
            values = torch.from_numpy(read[names[name]].reshape(weight.shape).copy())
            weight.copy_(_from_gguf(arch, model.config, name, values))
    model.load_state_dict(state)
    return model


def _from_gguf(arch: str, config: Any, name: str, values: torch.Tensor) -> torch.Tensor:
    """gguf_values undone."""
    if arch == "gemma3" and name.endswith("norm.weight"):
        return values - 1
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if arch in ("llama", "mistral") and name.endswith(f"{part}_proj.weight"):
            pairs = values.reshape(heads, -1, 2, values.shape[1])
            return pairs.swapaxes(1, 2).reshape(values.shape)
    return values


def write_tokenizer(folder: Path, vocab_size: int = 300, merges: tuple[str, ...] = ()) -> Path:
    """A byte-level tokenizer.json for a tiny model: <pad> <s> </s>, the 256 bytes, then the merges."""
    from polymodel.tokenizer_spec import BYTE_OF

    pieces = ["<pad>", "<s>", "</s>", *BYTE_OF, *(merge.replace(" ", "") for merge in merges)]
    assert len(pieces) <= vocab_size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": pieces[i], "special": True, **flags} for i in range(3)]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    vocab = {piece: i for i, piece in enumerate(pieces)}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": to_bytes,
        "decoder": to_bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": list(merges)},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def gguf_values(arch: str, config: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """What a GGUF has for a tensor of transformers: q and k of a llama permuted, gemma plus one."""
    if arch == "gemma3" and name.endswith("norm.weight"):
        return weight + 1
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if arch in ("llama", "mistral") and name.endswith(f"{part}_proj.weight"):
            halves = weight.reshape(heads, 2, -1, weight.shape[1])
            return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight


def _gguf_arch(arch: str) -> gguf.MODEL_ARCH:
    return gguf.MODEL_ARCH[{"mistral": "llama"}.get(arch, arch).upper()]


def _gguf_keys(arch: str, config: Any) -> dict[str, Any]:
    rope, head_dim = config.rope_parameters, getattr(config, "head_dim", None)
    theta = rope.get("full_attention", rope)["rope_theta"]
    at = gguf.MODEL_ARCH_NAMES[_gguf_arch(arch)]
    keys = {
        f"{at}.context_length": config.max_position_embeddings,
        f"{at}.embedding_length": config.hidden_size,
        f"{at}.block_count": config.num_hidden_layers,
        f"{at}.feed_forward_length": config.intermediate_size,
        f"{at}.attention.head_count": config.num_attention_heads,
        f"{at}.attention.head_count_kv": config.num_key_value_heads,
        f"{at}.attention.key_length": head_dim,
        f"{at}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{at}.rope.freq_base": theta,
        "tokenizer.ggml.tokens": [f"<{i}>" for i in range(config.vocab_size)],
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
    }
    if arch == "gemma3":
        keys[f"{at}.attention.sliding_window"] = config.sliding_window
        keys[f"{at}.attention.scale"] = float(config.query_pre_attn_scalar**-0.5)
    return keys


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
