"""safetensors folders, as transformers writes them -> config, stored tensors."""

from __future__ import annotations

import json
import re
import reprlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polymodel.config import Arch, ModelConfig, RopeConfig
from polymodel.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from polymodel.header import (
    DTYPES,
    MAX_CONTEXT,
    MAX_JSON_BYTES,
    MAX_LAYERS,
    PARTS,
    Fields,
    File,
    Stored,
    check_heads,
    check_layout,
    claim,
    corrupt,
    derive_head_dim,
    refuse_rope,
    rounded_sqrt,
    source_name,
    window_layers,
    yarn_mscale,
)

ARCHS: dict[str, Arch] = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
ARCHS |= {"qwen3": "qwen3", "gemma3": "gemma3", "gemma3_text": "gemma3"}

# what transformers takes for a key that is left out; sizes where published files leave them out
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}
DEFAULTS["mistral"] = DEFAULTS["llama"] | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
DEFAULTS["qwen3"] = DEFAULTS["qwen2"] | {"head_dim": 128}
DEFAULTS["gemma3_text"] = DEFAULTS["gemma3"]

# prefix of the decoder's tensors -> prefix of the head; those in the middle have a vision tower
PREFIXES = {"model.": "", "language_model.model.": "language_model."}
PREFIXES |= {"model.language_model.": "", "": ""}


def read_safetensors(path: Path) -> tuple[ModelConfig, dict[str, Stored]]:
    """Config, and canonical name -> stored tensor, of a folder or of a file beside config.json."""
    folder = path if path.is_dir() else path.parent
    outer = _read_json(folder / "config.json")
    tensors = _read_shards(path)
    prefix = next((p for p in PREFIXES if p + "embed_tokens.weight" in tensors), "model.")
    parts = {part: names[1] for part, names in PARTS.items()}
    parts |= {"embed": prefix + parts["embed"], "norm": prefix + parts["norm"]}
    parts["head"] = PREFIXES[prefix] + parts["head"]
    embed, head = (tensors.get(parts[part] + ".weight") for part in ("embed", "head"))
    config = _read_config(folder, outer, embed, has_head=head is not None)
    if config.arch == "gemma3":
        parts["mlp_norm"] = "pre_feedforward_layernorm"

    def is_harmless(source: str) -> bool:
        is_unused_head = config.tied_head and head is not None and source == head.source
        is_vision = re.match(r"(model\.)?(vision_tower|multi_modal_projector)\.", source)
        is_expected_vision = is_vision is not None and outer["model_type"] == "gemma3"
        return is_unused_head or is_expected_vision or source.endswith("rotary_emb.inv_freq")

    def source_of(name: str) -> str:
        return source_name(name, prefix + "layers.", parts)

    stored = claim(folder, config, tensors, source_of, is_harmless, DTYPES)
    if config.arch == "gemma3":
        for name in stored:
            if name.endswith("norm"):
                stored[name] = replace(stored[name], layout="minus one")
    return config, stored


def _read_shards(path: Path) -> dict[str, Stored]:
    """The tensors of all files of a checkpoint, by their names in the files."""
    tensors: dict[str, Stored] = {}
    for shard in _find_shards(path):
        held = _read_header(shard)
        if twice := sorted(held.keys() & tensors.keys()):
            raise CorruptCheckpoint(f"{shard}: tensor {twice[0]!r} is in another shard too")
        tensors |= held
    return tensors


def _parse_json(where: object, body: bytes) -> dict[str, Any]:
    """A JSON object in which no key is there twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(values := dict(pairs)) < len(pairs):
            raise ValueError("a key is there twice")
        return values

    try:
        value = json.loads(body, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise corrupt(where, "content", value, "a JSON object")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise corrupt(path, "size", size, f"at most {MAX_JSON_BYTES} bytes")
        return _parse_json(path, path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error


def _find_shards(path: Path) -> list[Path]:
    """The .safetensors files of a checkpoint; an index may name files of its own folder only."""
    if path.is_file():
        return [path]
    if (single := path / "model.safetensors").is_file():
        return [single]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        raise InvalidRequest(f"{path}: holds neither model.safetensors nor {index.name}")
    shards = set()
    for source, name in Fields(index, _read_json(index)).table("weight_map").items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name, re.ASCII):
            raise corrupt(index, f"shard of {source!r}", name, "a .safetensors file beside it")
        if not (path / name).is_file():
            raise CorruptCheckpoint(f"{index}: shard {name!r} of {source!r} is missing")
        shards.add(path / name)
    return sorted(shards)


def _read_header(path: Path) -> dict[str, Stored]:
    """The header of one .safetensors file: tensors by their names in the file."""
    file = File.at(path)
    length = int.from_bytes(_read(file, 0, min(8, file.size)), "little")
    most = min(file.size - 8, MAX_JSON_BYTES)
    if length > most:
        raise corrupt(path, "header length", length, f"at most {max(most, 0)}")
    header = _parse_json(f"{path}: header", _read(file, 8, length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        fields = Fields(f"{path}: tensor {name!r}", entry if isinstance(entry, dict) else {})
        shape, offsets = fields.get("shape"), fields.get("data_offsets")
        if not _are_sizes(shape):
            raise fields.wrong("shape", "a list of sizes")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise fields.wrong("data_offsets", "two places in order")
        start, nbytes = 8 + length + offsets[0], offsets[1] - offsets[0]
        kind = fields.text("dtype", "")
        tensors[name] = Stored(name, kind, tuple(shape), file, start, nbytes)
    check_layout(path, tensors.values())
    return tensors


def _read(file: File, start: int, nbytes: int) -> bytes:
    return file.read(start, nbytes).numpy().tobytes()


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _read_config(folder: Path, outer: dict[str, Any], embed: Stored | None, has_head: bool) -> ModelConfig:
    where = folder / "config.json"
    top = Fields(where, outer)
    if (model_type := top.text("model_type", "")) not in ARCHS:
        raise UnsupportedModel(f"{where}: model_type {model_type!r} is not supported")
    given = outer
    if model_type == "gemma3":
        ties = {key: value for key, value in outer.items() if key == "tie_word_embeddings"}
        given = top.table("text_config") | ties
    arch, fields = ARCHS[model_type], Fields(where, DEFAULTS[model_type] | given)
    top.refuse("quantization_config")
    _refuse(fields, arch)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    window, windowed_layers = _windows(fields, model_type, num_layers)
    max_context = fields.count("max_position_embeddings", most=MAX_CONTEXT)
    rope, local = _ropes(fields, arch, max_context)
    vocab_size = fields.count("vocab_size")
    bos = fields.token_ids("bos_token_id", vocab_size)
    config = ModelConfig(
        arch=arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=derive_head_dim(fields, "head_dim", hidden, heads),
        max_context=max_context,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        rope_local=local if window and local != rope else None,
        window=window,
        windowed_layers=windowed_layers,
        qkv_bias=arch == "qwen2",
        qk_norm=arch in ("qwen3", "gemma3"),
        # a head that is missing although the config says it is there is an error, found later
        tied_head=fields.flag("tie_word_embeddings", not has_head),
        bos_id=bos[0] if bos else None,
        eos_ids=_eos_ids(folder, fields, top, vocab_size),
    )
    if arch == "gemma3":
        config = replace(
            config,
            attn_scale=fields.number("query_pre_attn_scalar") ** -0.5,
            post_norms=True,
            # transformers rounds the scale to the dtype of the embedding
            embed_scale=rounded_sqrt(hidden, DTYPES.get(embed.kind if embed else "", torch.float32)),
            activation="gelu_tanh",
        )
    return check_heads(where, config)


def _refuse(fields: Fields, arch: Arch) -> None:
    """UnsupportedModel for what changes the forward and is not implemented."""
    fields.refuse("mlp_bias", "final_logit_softcapping", "attn_logit_softcapping")
    fields.refuse("use_bidirectional_attention")
    if arch != "qwen2":  # whose biases are no choice; transformers ignores the key
        fields.refuse("attention_bias")
    key = "hidden_act"
    known: tuple[str, ...] = ("silu", "swish")
    if arch == "gemma3":
        key, known = "hidden_activation", ("gelu_pytorch_tanh",)
    if (activation := fields.text(key, known[0])) not in known:
        raise UnsupportedModel(f"{fields.where}: {key} {activation!r} is not {known[0]!r}")


def _windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and which layers have it, as transformers reads them."""
    if model_type == "llama":
        return None, ()
    is_qwen, kinds = model_type.startswith("qwen"), fields.get("layer_types")
    window = fields.count("sliding_window", 0, most=MAX_CONTEXT) or None
    if is_qwen and not fields.flag("use_sliding_window"):
        window = None
    if model_type == "mistral":
        layers = [window is not None] * num_layers
    elif kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.wrong("layer_types", f"a list of {num_layers}")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedModel(f"{fields.where}: layer type {reprlib.repr(kind)}")
        layers = [kind == "sliding_attention" for kind in kinds]
    elif is_qwen:
        first = fields.count("max_window_layers", least=0)
        layers = [window is not None and i >= first for i in range(num_layers)]
    else:
        pattern = fields.count("sliding_window_pattern")
        layers = [(i + 1) % pattern != 0 for i in range(num_layers)]
    return window_layers(fields, window, layers)


def _ropes(fields: Fields, arch: Arch, max_context: int) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of the layers that see everything, and of those with a window."""
    where = f"{fields.where}: rope_parameters"
    given, scaling = fields.table("rope_parameters"), fields.table("rope_scaling")
    share = {"partial_rotary_factor": fields.number("partial_rotary_factor", 1.0)}
    if arch == "gemma3":
        nested = Fields(where, given)
        if not given.keys() <= {"full_attention", "sliding_attention"}:
            raise fields.wrong("rope_parameters", "one table for each kind of layer")
        full = {"rope_theta": fields.number("rope_theta", 1e6)} | nested.table("full_attention")
        local = {"rope_theta": fields.number("rope_local_base_freq", 1e4)}
        local |= nested.table("sliding_attention")
        return (
            _rope(Fields(where, share | full | scaling), max_context),
            _rope(Fields(where, share | local), max_context),
        )
    params = {"rope_theta": fields.number("rope_theta", 1e4)} | share | (scaling or given)
    # here alone the outer key wins, as in transformers
    if (original := fields.get("original_max_position_embeddings")) is not None:
        params["original_max_position_embeddings"] = original
    rope = _rope(Fields(where, params), max_context)
    return rope, rope


def _rope(fields: Fields, max_context: int) -> RopeConfig:
    """One table of rope parameters, with transformers' defaults."""
    kind = fields.text("rope_type", fields.text("type", "default"))
    if (share := fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"{fields.where}: partial_rotary_factor is {share}, not 1")
    fields.refuse("full_attention", "sliding_attention")
    plain = RopeConfig(theta=fields.number("rope_theta", above=1.0))
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, kind="linear", factor=fields.number("factor"))
    original = fields.count("original_max_position_embeddings", max_context, MAX_CONTEXT)
    if kind == "llama3":
        low = fields.number("low_freq_factor")
        return replace(
            plain,
            kind="llama3",
            factor=fields.number("factor"),
            original_context=original,
            low_freq_factor=low,
            high_freq_factor=fields.number("high_freq_factor", above=low),
        )
    if kind != "yarn":
        raise refuse_rope(fields.where, kind)
    factor = fields.number("factor", max_context / original)
    mscale, mscale_all = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    attention = yarn_mscale(factor)
    if mscale and mscale_all:
        attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=fields.number("attention_factor", attention),
        truncate=fields.flag("truncate", True),
    )


def _eos_ids(folder: Path, fields: Fields, top: Fields, vocab_size: int) -> tuple[int, ...]:
    """End ids of config.json and, where there is one, of generation_config.json."""
    sources = [fields, top]
    if (generation := folder / "generation_config.json").is_file():
        sources.append(Fields(generation, _read_json(generation)))
    ids = [i for source in sources for i in source.token_ids("eos_token_id", vocab_size)]
    return tuple(sorted(set(ids)))
