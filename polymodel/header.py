"""What both formats share: header fields with their types checked, and the tensors they declare."""

from __future__ import annotations

import math
import mmap
import os
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from polymodel.config import ModelConfig, tensor_shapes
from polymodel.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel

# storage kind -> (weights in a block, bytes of a block)
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20)}
BLOCKS |= {"Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)}
BLOCKS |= {"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# last part of a canonical tensor name -> (in a GGUF, in transformers), without .weight or .bias
PARTS = {
    "embed": ("token_embd", "embed_tokens"),
    "norm": ("output_norm", "norm"),
    "head": ("output", "lm_head"),
    "attn_norm": ("attn_norm", "input_layernorm"),
    "q": ("attn_q", "self_attn.q_proj"),
    "k": ("attn_k", "self_attn.k_proj"),
    "v": ("attn_v", "self_attn.v_proj"),
    "o": ("attn_output", "self_attn.o_proj"),
    "q_norm": ("attn_q_norm", "self_attn.q_norm"),
    "k_norm": ("attn_k_norm", "self_attn.k_norm"),
    "post_attn_norm": ("post_attention_norm", "post_attention_layernorm"),
    "mlp_norm": ("ffn_norm", "post_attention_layernorm"),  # not in gemma3, see safetensors.py
    "gate": ("ffn_gate", "mlp.gate_proj"),
    "up": ("ffn_up", "mlp.up_proj"),
    "down": ("ffn_down", "mlp.down_proj"),
    "post_mlp_norm": ("post_ffw_norm", "post_feedforward_layernorm"),
}

# no supported model comes near these; they bound the work that a false header can ask for
MAX_DIM = 1 << 24
MAX_LAYERS = 1 << 10
MAX_CONTEXT = 1 << 28
MAX_JSON_BYTES = 1 << 25


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was when it was opened. It is not held open: each read makes sure that it is still the same."""

    path: Path
    size: int
    device: int
    inode: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> File:
        try:
            with path.open("rb", buffering=0) as file:
                found = _identity(os.fstat(file.fileno()))
        except OSError as error:
            raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error
        if not found["size"]:
            raise CorruptCheckpoint(f"{path}: the file is empty")
        return cls(path.absolute(), **found)

    def read(self, start: int, nbytes: int) -> torch.Tensor:
        """The bytes from start on, uint8, in memory of their own."""
        data, done = torch.empty(nbytes, dtype=torch.uint8), 0
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(start)
                while done < nbytes and (count := file.readinto(data[done:].numpy().data)):
                    done += count
                self._check(os.fstat(file.fileno()))
        except OSError as error:
            raise CorruptCheckpoint(f"{self.path}: cannot be read any more: {error.strerror}") from error
        if done < nbytes:
            raise corrupt(self.path, "end of file", f"byte {start + done}", f"byte {start + nbytes} or later")
        return data

    def _check(self, stat: os.stat_result) -> None:
        for field, found in _identity(stat).items():
            if found != (expected := getattr(self, field)):
                raise corrupt(self.path, field, found, f"{expected}, as when it was opened")

    @contextmanager
    def mapped(self) -> Iterator[mmap.mmap]:
        """All of it, for as long as the block runs."""
        try:
            with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._check(os.fstat(file.fileno()))
                yield data
        except OSError as error:
            raise InvalidRequest(f"{self.path}: cannot be read: {error.strerror}") from error


def _identity(stat: os.stat_result) -> dict[str, int]:
    return {"size": stat.st_size, "device": stat.st_dev, "inode": stat.st_ino, "mtime_ns": stat.st_mtime_ns}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as its file declares it."""

    source: str
    kind: str  # the file's word for it
    shape: tuple[int, ...]  # outermost first
    file: File
    start: int  # first byte in it
    nbytes: int
    layout: Literal["plain", "interleaved", "minus one"] = "plain"

    def read(self) -> torch.Tensor:
        """Its bytes as they are in the file."""
        return self.file.read(self.start, self.nbytes)

    @property
    def raw_kind(self) -> str:
        return "F32" if self.layout == "minus one" else self.kind


def corrupt(where: object, field: str, value: object, expected: str) -> CorruptCheckpoint:
    # reprlib shows the beginning of what may be a list of a million
    return CorruptCheckpoint(f"{where}: {field} is {reprlib.repr(value)}, expected {expected}")


class Fields:
    """A header's values, their types checked. A key that is absent or null takes the default."""

    def __init__(self, where: object, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where, self.values, self.prefix = where, values, prefix

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def wrong(self, key: str, expected: str) -> CorruptCheckpoint:
        return corrupt(self.where, self.prefix + key, self.get(key), expected)

    def refuse(self, *keys: str) -> None:
        """UnsupportedModel if one of the keys is there and not zero, false or empty."""
        for key in keys:
            if value := self.get(key):
                found = f"{self.prefix}{key} is {reprlib.repr(value)}"
                raise UnsupportedModel(f"{self.where}: {found}, which is not supported")

    def count(self, key: str, default: int | None = None, most: int = MAX_DIM, least: int = 1) -> int:
        if (value := self.get(key)) is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"a whole number in {least}..{most}")
        return value

    def number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        if (value := self.get(key)) is None and default is not None:
            return default
        if type(value) not in (int, float) or not above < value < 1e38:
            raise self.wrong(key, f"a finite number above {above:g}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        if not isinstance(value := self.get(key), str | None):
            raise self.wrong(key, "text")
        return default if value is None else value

    def flag(self, key: str, default: bool = False) -> bool:
        if not isinstance(value := self.get(key), bool | None):
            raise self.wrong(key, "true or false")
        return default if value is None else value

    def table(self, key: str) -> dict[str, Any]:
        if not isinstance(value := self.get(key), dict | None):
            raise self.wrong(key, "a table")
        return value or {}

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise self.wrong(key, f"token ids in 0..{vocab_size - 1}")
        return ids


def check_layout(path: Path, tensors: Collection[Stored]) -> None:
    """Every tensor lies inside its file, and no two share a byte."""
    last_end, last = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        where = f"{path}: tensor {tensor.source!r}"
        end, size = tensor.start + tensor.nbytes, tensor.file.size
        if end > size:
            raise CorruptCheckpoint(f"{where} ends at byte {end}, the file at byte {size}")
        if tensor.start < last_end:
            raise CorruptCheckpoint(f"{where} overlaps {last!r} at byte {tensor.start}")
        last_end, last = end, tensor.source


def check_heads(where: object, config: ModelConfig) -> ModelConfig:
    """The same config, if its heads can be grouped and rotated."""
    if config.num_heads % config.num_kv_heads:
        expected = f"a multiple of the {config.num_kv_heads} KV heads"
        raise corrupt(where, "number of heads", config.num_heads, expected)
    if config.head_dim % 2:
        raise corrupt(where, "head size", config.head_dim, "an even number: RoPE turns pairs")
    return config


def derive_head_dim(fields: Fields, key: str, hidden: int, heads: int) -> int:
    """The head's size where the header gives it, otherwise an equal share of the hidden size."""
    if not (given := fields.count(key, 0)) and hidden % heads:
        raise corrupt(fields.where, "hidden size", hidden, f"a multiple of the {heads} heads")
    return given or hidden // heads


def claim(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, Stored],
    source_of: Callable[[str], str],
    is_harmless: Callable[[str], bool],
    kinds: Collection[str],
) -> dict[str, Stored]:
    """Canonical name -> stored tensor, once it is sure that the file holds exactly this model."""
    shapes = tensor_shapes(config)
    sources = {name: source_of(name) for name in shapes}
    if missing := [source for source in sources.values() if source not in tensors]:
        raise CorruptCheckpoint(f"{path}: {len(missing)} tensors are missing, first {missing[0]!r}")
    if extra := sorted(s for s in tensors.keys() - sources.values() if not is_harmless(s)):
        count, first = len(extra), extra[0]
        raise UnsupportedModel(f"{path}: {count} tensors, first {first!r}, are no {config.arch}'s")
    for name, source in sources.items():
        _check_tensor(f"{path}: tensor {source!r}", tensors[source], shapes[name], kinds)
    return {name: tensors[source] for name, source in sources.items()}


def _check_tensor(where: str, tensor: Stored, shape: tuple[int, int], kinds: Collection[str]) -> None:
    if tensor.kind not in kinds:
        raise UnsupportedModel(f"{where}: type {tensor.kind!r} is none of {', '.join(kinds)}")
    if shape not in (tensor.shape, (1, *tensor.shape)):
        raise corrupt(where, "shape", tensor.shape, f"{shape}")
    block, block_bytes = BLOCKS[tensor.kind]
    if shape[1] % block:
        raise corrupt(where, "row length", shape[1], f"whole {tensor.kind} blocks of {block}")
    if tensor.nbytes != (nbytes := shape[0] * shape[1] // block * block_bytes):
        raise corrupt(where, "size in bytes", tensor.nbytes, f"{nbytes}")


def source_name(name: str, layers: str, parts: Mapping[str, str]) -> str:
    """A tensor's name in its file: "layers.3.q_bias" -> layers + "3." + parts["q"] + ".bias"."""
    *at, part = name.split(".")
    suffix = ".bias" if part.endswith("_bias") else ".weight"
    stem = parts[part.removesuffix("_bias")] + suffix
    return f"{layers}{at[1]}.{stem}" if at else stem


def window_layers(fields: Fields, window: int | None, layers: list[bool]) -> tuple[int | None, tuple[bool, ...]]:
    """ModelConfig's window and windowed_layers; both empty where no layer has a window."""
    if not any(layers):
        return None, ()
    if window is None:
        raise fields.wrong("sliding_window", "a size, for some layers are windowed")
    return window, tuple(layers)


def refuse_rope(where: object, kind: str) -> UnsupportedModel:
    """The error for a scaling that is not one of RopeConfig's."""
    if kind in ("dynamic", "longrope", "su"):
        why = "changes angles with the length, so keys cached earlier would turn wrong"
    else:
        why = "is not known"
    return UnsupportedModel(f"{where}: rope scaling {kind!r} {why}")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor of q and k for a context `factor` times the original."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rounded_sqrt(value: int, dtype: torch.dtype) -> float:
    return torch.tensor(math.sqrt(value), dtype=dtype).item()
