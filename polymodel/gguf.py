"""GGUF v3 files, as llama.cpp writes them -> config, metadata, stored tensors."""

from __future__ import annotations

import math
import mmap
import reprlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from polymodel.config import Arch, ModelConfig, RopeConfig
from polymodel.errors import CorruptCheckpoint, UnsupportedModel
from polymodel.header import (
    BLOCKS,
    MAX_CONTEXT,
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

GGML_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"}
GGML_TYPES |= {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 30: "BF16"}
# what else is in use, for the refusal's sake
GGML_TYPES |= {10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
GGML_TYPES |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 39: "MXFP4"}

# metadata type -> struct code; two types are not numbers
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
CODES |= {12: "d"}
STRING, ARRAY = 8, 9


def read_gguf(path: Path) -> tuple[ModelConfig, Mapping[str, Any], dict[str, Stored]]:
    """Config, metadata, and canonical name -> stored tensor, of a GGUF file."""
    metadata, tensors = _read_header(path)
    config = _read_config(path, metadata, tensors)
    parts = {part: names[0] for part, names in PARTS.items()}

    def is_harmless(source: str) -> bool:
        # the first is in the config already, the other llama.cpp ignores too
        is_freqs = source == "rope_freqs.weight" and config.arch == "llama"
        return is_freqs or source.endswith(".attn_rot_embd.weight")

    def source_of(name: str) -> str:
        return source_name(name, "blk.", parts)

    stored = claim(path, config, tensors, source_of, is_harmless, BLOCKS)
    if config.arch == "llama":
        for name in stored:
            if name.endswith((".q", ".k")):
                stored[name] = replace(stored[name], layout="interleaved")
    return config, metadata, stored


def _read_header(path: Path) -> tuple[_Metadata, dict[str, Stored]]:
    """The header of a GGUF v3: metadata, and tensors by their names in the file. It is mapped meanwhile, not after."""
    file = File.at(path)
    with file.mapped() as data:
        return _parse_header(file, _Cursor(path, data))


def _parse_header(file: File, cursor: _Cursor) -> tuple[_Metadata, dict[str, Stored]]:
    path = cursor.path
    if (magic := cursor.data[: cursor.step(4) + 4]) != b"GGUF":
        raise corrupt(path, "magic", magic, "b'GGUF'")
    if (version := cursor.u32()) != 3:
        raise UnsupportedModel(f"{path}: GGUF version {version:#x}; only 3, little endian, is read")
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    metadata = _Metadata(file, cursor, num_keys)
    align = Fields(path, metadata).count("general.alignment", 32, most=1 << 30)
    if align & (align - 1):
        raise corrupt(path, "general.alignment", align, "a power of two")
    tensors: dict[str, Stored] = {}
    for _ in range(num_tensors):
        tensor = _read_tensor(file, cursor, align)
        if tensor.source in tensors:
            raise CorruptCheckpoint(f"{path}: tensor {tensor.source!r} is there twice")
        tensors[tensor.source] = tensor
    data_start = -(-cursor.at // align) * align
    tensors = {name: replace(t, start=data_start + t.start) for name, t in tensors.items()}
    check_layout(path, tensors.values())
    return metadata, tensors


def _read_tensor(file: File, cursor: _Cursor, align: int) -> Stored:
    """One entry of the tensor table; its start is still relative to the data section."""
    source = cursor.string()
    where = f"{cursor.path}: tensor {source!r}"
    if not 1 <= (num_dims := cursor.u32()) <= 4:
        raise corrupt(where, "number of dimensions", num_dims, "1..4")
    dims: tuple[int, ...] = cursor.numbers("Q", num_dims)
    number, start = cursor.u32(), cursor.u64()
    kind = GGML_TYPES.get(number, "unknown")
    if kind not in BLOCKS:
        raise UnsupportedModel(f"{where}: type {number} ({kind}) is none of {', '.join(BLOCKS)}")
    block, block_bytes = BLOCKS[kind]
    if 0 in dims or dims[0] % block:
        raise corrupt(where, "shape", dims, f"positive sizes, rows of whole blocks of {block}")
    if start % align:
        raise corrupt(where, "offset", start, f"a multiple of the alignment {align}")
    nbytes = math.prod(dims) // block * block_bytes
    # trailing sizes of 1 say nothing
    while len(dims) > 1 and dims[-1] == 1:
        dims = dims[:-1]
    return Stored(source, kind, dims[::-1], file, start, nbytes)


def _read_config(path: Path, metadata: _Metadata, tensors: dict[str, Stored]) -> ModelConfig:
    top = Fields(path, metadata)
    arch = cast(Arch, top.text("general.architecture", ""))
    if arch not in ("llama", "qwen2", "qwen3", "gemma3"):
        raise UnsupportedModel(f"{path}: general.architecture {arch!r} is not supported")
    fields = Fields(path, metadata, arch + ".")
    _refuse(top, fields)
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    head_dim = derive_head_dim(fields, "attention.key_length", hidden, heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := fields.count(key, head_dim)) != head_dim:
            raise UnsupportedModel(f"{path}: {arch}.{key} is {size}, a head {head_dim}")
    if (embed := tensors.get("token_embd.weight")) is None:
        raise CorruptCheckpoint(f"{path}: tensor 'token_embd.weight' is missing")
    vocab_size = embed.shape[0]
    max_context = fields.count("context_length", most=MAX_CONTEXT)
    eos, eot, bos = (top.token_ids(f"tokenizer.ggml.{role}_token_id", vocab_size) for role in ("eos", "eot", "bos"))
    config = ModelConfig(
        arch=arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=fields.count("block_count", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=fields.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=max_context,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, max_context, _rope_factors(path, arch, head_dim, tensors)),
        qkv_bias=arch == "qwen2",
        qk_norm=arch in ("qwen3", "gemma3"),
        tied_head="output.weight" not in tensors,
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(sorted({*eos, *eot})),
    )
    if arch == "gemma3":
        config = _gemma(fields, config)
    else:
        fields.refuse("attention.scale")
        if fields.count("attention.sliding_window", 0, MAX_CONTEXT, least=0) < max_context:
            fields.refuse("attention.sliding_window")
    return check_heads(path, config)


def _refuse(top: Fields, fields: Fields) -> None:
    """UnsupportedModel for what changes the forward and is not implemented."""
    if (kind := top.text("general.type", "model")) != "model":
        raise UnsupportedModel(f"{top.where}: general.type is {kind!r}, not 'model'")
    if (parts := top.count("split.count", 1, least=0)) > 1:
        raise UnsupportedModel(f"{top.where}: split.count is {parts}; merge the parts first")
    if not fields.flag("attention.causal", True):
        raise UnsupportedModel(f"{top.where}: {fields.prefix}attention.causal is false")
    fields.refuse("expert_count", "attn_logit_softcapping", "final_logit_softcapping")
    fields.refuse("logit_scale", "residual_scale", "embedding_scale")
    fields.refuse("attention.clamp_kqv", "attention.max_alibi_bias")


def _gemma(fields: Fields, config: ModelConfig) -> ModelConfig:
    """gemma3's own scalars; most of them are in llama.cpp's code and not in the file."""
    pattern = fields.count("attention.sliding_window_pattern", 6)
    local = RopeConfig(theta=fields.number("rope.freq_base_swa", 1e4, above=1.0))
    window, layers = window_layers(
        fields,
        fields.count("attention.sliding_window", most=MAX_CONTEXT),
        [(i + 1) % pattern != 0 for i in range(config.num_layers)],
    )
    # the 27B, known by its depth, is the one size that does not scale by its head
    is_27b = config.num_layers == 62
    width = config.hidden_size / config.num_heads if is_27b else config.head_dim
    return replace(
        config,
        rope_local=local if window and local != config.rope else None,
        window=window,
        windowed_layers=layers,
        attn_scale=fields.number("attention.scale", width**-0.5),
        post_norms=True,
        embed_scale=rounded_sqrt(config.hidden_size, torch.float32),
        activation="gelu_tanh",
    )


def _rope(fields: Fields, max_context: int, factors: list[float] | None) -> RopeConfig:
    """The rope keys with llama.cpp's defaults; factors is rope_freqs.weight, where it is there."""
    rope = Fields(fields.where, fields.values, fields.prefix + "rope.")
    plain = RopeConfig(theta=rope.number("freq_base", 1e4, above=1.0))
    factor = rope.number("scaling.factor", rope.number("scale_linear", 1.0))
    kind = rope.text("scaling.type", "none" if factor == 1.0 else "linear")
    if factors is not None:
        if kind != "none":
            raise UnsupportedModel(f"{fields.where}: rope_freqs.weight beside {kind!r} scaling")
        return _llama3_rope(fields.where, plain, factors)
    if kind == "none":
        return plain
    if kind == "linear":
        return replace(plain, kind="linear", factor=factor)
    if kind != "yarn":
        raise refuse_rope(fields.where, kind)
    # releases of llama.cpp disagree on what these mean
    rope.refuse("scaling.yarn_log_multiplier", "scaling.yarn_attn_factor")
    if rope.number("scaling.yarn_ext_factor", 1.0) != 1.0:
        rope.refuse("scaling.yarn_ext_factor")
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        original_context=rope.count("scaling.original_context_length", max_context, MAX_CONTEXT),
        beta_fast=rope.number("scaling.yarn_beta_fast", 32.0),
        beta_slow=rope.number("scaling.yarn_beta_slow", 1.0),
        attention_factor=rope.number("scaling.attn_factor", 1.0) * yarn_mscale(factor),
    )


def _rope_factors(path: Path, arch: Arch, head_dim: int, tensors: dict[str, Stored]) -> list[float] | None:
    """rope_freqs.weight of a llama: what divides the frequency of each pair."""
    tensor, pairs = tensors.get("rope_freqs.weight"), head_dim // 2
    if tensor is None or arch != "llama":
        return None
    if (tensor.kind, tensor.shape) != ("F32", (pairs,)):
        raise corrupt(path, "rope_freqs.weight", (tensor.kind, tensor.shape), f"F32 ({pairs},)")
    factors: list[float] = tensor.read().view(torch.float32).tolist()
    return factors


def _llama3_rope(where: object, plain: RopeConfig, factors: list[float]) -> RopeConfig:
    """The llama3 scaling that has these factors, the only trace of it a converter leaves."""
    low, high, original, pairs = 1.0, 4.0, 8192, len(factors)
    for factor in (8.0, 32.0):
        expected = []
        for pair in range(pairs):
            turns = original / (2 * math.pi * plain.theta ** (pair / pairs))
            smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
            expected.append(1 / ((1 - smooth) / factor + smooth))
        if all(math.isclose(*pair, rel_tol=1e-3) for pair in zip(factors, expected, strict=True)):
            return replace(plain, kind="llama3", factor=factor, original_context=original)
    found = reprlib.repr(factors)
    raise UnsupportedModel(f"{where}: rope_freqs.weight {found} is no llama3 scaling by 8 or 32")


class _Cursor:
    """A place in a GGUF header; every step is checked against the end of its data."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, start: int = 0) -> None:
        self.path, self.data, self.at = path, data, 0
        self._start = start  # of data, in the file

    def step(self, nbytes: int) -> int:
        """Move on by nbytes; returns where they begin."""
        at, left = self.at, len(self.data) - self.at
        if nbytes > left:
            why = f"the header goes on for {nbytes} bytes at {at}, the file for {left}"
            raise CorruptCheckpoint(f"{self.path}: {why}")
        self.at += nbytes
        return at

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        at = self.step(struct.calcsize("<" + code) * count)
        return struct.unpack_from(f"<{count}{code}", self.data, at)

    def u32(self) -> int:
        return cast(int, self.numbers("I", 1)[0])

    def u64(self) -> int:
        return cast(int, self.numbers("Q", 1)[0])

    def string(self) -> str:
        nbytes = self.u64()
        at = self.step(nbytes)
        body = self.data[at : at + nbytes]
        try:
            return body.decode()
        except UnicodeDecodeError:
            raise corrupt(self.path, f"text at byte {self._start + at}", body, "UTF-8") from None

    def value(self, kind: int) -> Any:
        """A metadata value that skip() has passed before."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.numbers(CODES[kind], 1)[0]
        kind, count = self.u32(), self.u64()
        if kind == STRING:
            return [self.string() for _ in range(count)]
        return list(self.numbers(CODES[kind], count))

    def skip(self, kind: int) -> None:
        count = 1
        if kind == ARRAY:
            kind, count = self.u32(), self.u64()
        if kind == STRING:
            self._skip_strings(count)
        elif kind in CODES:
            self.step(struct.calcsize("<" + CODES[kind]) * count)
        elif kind == ARRAY:
            raise UnsupportedModel(f"{self.path}: array of arrays at byte {self.at}")
        else:
            raise corrupt(self.path, f"type of the value at byte {self.at}", kind, "0..12")

    def _skip_strings(self, count: int) -> None:
        # no call into our own code here: a vocabulary is a quarter of a million strings
        at, last, data = self.at, len(self.data) - 8, self.data
        unpack = struct.Struct("<Q").unpack_from
        while count and at <= last:
            at += 8 + unpack(data, at)[0]
            count -= 1
        self.step(at - self.at + 8 * count)


class _Metadata(Mapping[str, Any]):
    """Key -> value of a GGUF header, decoded when first asked for: a vocabulary is free until then.

    A value that is not UTF-8 raises CorruptCheckpoint at that moment.
    """

    def __init__(self, file: File, cursor: _Cursor, num_keys: int) -> None:
        self._file, self._path = file, cursor.path
        self._places: dict[str, tuple[int, int, int]] = {}  # key -> (type, first byte, end)
        self._values: dict[str, Any] = {}
        for _ in range(num_keys):
            key, kind = cursor.string(), cursor.u32()
            if key in self._places:
                raise CorruptCheckpoint(f"{cursor.path}: key {key!r} is there twice")
            start = cursor.at
            cursor.skip(kind)
            self._places[key] = (kind, start, cursor.at)

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            kind, start, end = self._places[key]
            body = self._file.read(start, end - start).numpy().tobytes()
            self._values[key] = _Cursor(self._path, body, start).value(kind)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
