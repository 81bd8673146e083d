"""A saved session as one safetensors file: tokens, their KV pages, the logits after the last, and what made them."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from csrc_triton.pages import KVLayout
from polymodel.config import PAGE_TOKENS, KVKey
from polymodel.errors import CorruptSession, InvalidRequest, NotShareable

FORMAT, VERSION = "polymodel session", "1"
AXES = tuple(KVKey.__slots__)
GEOMETRY = ("num_layers", "num_kv_heads", "head_dim", "dtype", "block_bytes")
FIELDS = {"format", "version", *AXES, *GEOMETRY, "num_tokens", "digest"}
TENSORS = {"tokens": ("I32", 1), "data": ("U8", 3), "logits": ("F32", 1)}  # dtype in the file, number of sizes
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class SavedSession:
    key: KVKey  # of the domain, a digest
    layout: KVLayout  # without its place in an arena
    tokens: list[int]
    data: Tensor  # [num_layers, pages, block_bytes] uint8: canonical pages
    logits: Tensor | None  # [vocab_size] float32, after the last token


def write_session(
    path: str | os.PathLike[str], key: KVKey, layout: KVLayout, tokens: list[int], data: Tensor, logits: Tensor | None
) -> None:
    """Write the file anew, or leave the old one as it was. Slots of `data` beyond the tokens must be zeros."""
    path = Path(path)
    if not tokens:
        raise InvalidRequest(f"{path}: the session has no tokens, expected at least one to save")
    if not 0 <= min(tokens) <= max(tokens) < 1 << 31:
        raise InvalidRequest(f"{path}: token ids are {min(tokens)}..{max(tokens)}, expected 0..{(1 << 31) - 1}")
    shape = [layout.num_layers, _num_pages(len(tokens)), layout.block_bytes]
    if data.dtype != torch.uint8 or list(data.shape) != shape:
        raise InvalidRequest(
            f"{path}: data is {data.dtype} {list(data.shape)}, expected torch.uint8 {shape} for {len(tokens)} tokens"
        )
    if logits is not None and (logits.dtype != torch.float32 or logits.ndim != 1 or not logits.numel()):
        raise InvalidRequest(
            f"{path}: logits are {logits.dtype} {list(logits.shape)}, expected torch.float32 [vocab_size]"
        )
    tensors = {"tokens": torch.tensor(tokens, dtype=torch.int32), "data": data.cpu().contiguous()}
    if logits is not None:
        tensors["logits"] = logits.cpu().contiguous()
    metadata = {"format": FORMAT, "version": VERSION, "num_tokens": str(len(tokens)), **_facts(key, layout)}
    metadata["digest"] = _digest(metadata, tensors)
    try:
        with tempfile.TemporaryDirectory(prefix=".session-", dir=path.parent) as folder:
            whole = Path(folder, "whole")
            save_file(tensors, whole, metadata)
            with whole.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(whole, path)
    except (OSError, SafetensorError) as error:
        raise InvalidRequest(f"{path}: cannot be written: {error}") from error


def read_session(path: str | os.PathLike[str], key: KVKey, layout: KVLayout, vocab_size: int) -> SavedSession:
    """What was written, every byte of it checked, if its key and geometry are these."""
    path = Path(path)
    metadata, tensors = _read_file(path)
    if (got := metadata.pop("digest")) != (expected := _digest(metadata, tensors)):
        raise _corrupt(path, "digest", got, f"{expected}, that of the content")
    wanted = _facts(key, layout)
    if others := [name for name in wanted if metadata[name] != wanted[name]]:
        each = (f"{name} ({reprlib.repr(metadata[name])}, here {wanted[name]!r})" for name in others)
        raise NotShareable(f"{path}: saved with another {', '.join(each)}")
    tokens: list[int] = tensors["tokens"].tolist()
    logits = tensors.get("logits")
    if logits is not None and len(logits) != vocab_size:
        raise _corrupt(path, "shape of logits", list(logits.shape), f"[{vocab_size}]")
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise _corrupt(path, f"token {i}", token, f"an id in 0..{vocab_size - 1}")
    saved = KVKey(**{axis: metadata[axis] for axis in AXES})
    return SavedSession(saved, replace(layout, pages_per_superblock=1), tokens, tensors["data"], logits)


def _read_file(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors that agree with each other; copies, as what is mapped would change with the file."""
    try:
        with path.open("rb"), safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            if not {"tokens", "data"} <= set(names) <= set(TENSORS):
                raise _corrupt(path, "list of tensors", names, "tokens, data and at most logits")
            metadata: dict[str, str] = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in names}
            _check_header(path, metadata, {name: (x.get_dtype(), x.get_shape()) for name, x in slices.items()})
            return metadata, {name: file.get_tensor(name).clone() for name in names}
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CorruptSession(f"{path}: not a whole safetensors file: {error}") from error


def _check_header(path: Path, metadata: Mapping[str, str], stored: Mapping[str, tuple[str, list[int]]]) -> None:
    for field, expected in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(field) != expected:
            raise _corrupt(path, field, metadata.get(field), repr(expected))
    if wrong := sorted(metadata.keys() ^ FIELDS):
        raise _corrupt(path, "list of missing and unknown fields", wrong, "none")
    for name, (dtype, shape) in stored.items():
        if (dtype, len(shape)) != TENSORS[name] or 0 in shape:
            expected = "{} with {} sizes, none of them 0".format(*TENSORS[name])
            raise _corrupt(path, name, f"{dtype} {shape}", expected)
    num_tokens, (num_layers, pages, block_bytes) = stored["tokens"][1][0], stored["data"][1]
    sizes = {"num_tokens": num_tokens, "num_layers": num_layers, "block_bytes": block_bytes}
    for field, size in sizes.items():
        if metadata[field] != str(size):
            raise _corrupt(path, field, metadata[field], f"{size}, as in the tensors")
    if pages != _num_pages(num_tokens):
        raise _corrupt(path, "pages of data", pages, f"{_num_pages(num_tokens)} for {num_tokens} tokens")


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


def _facts(key: KVKey, layout: KVLayout) -> dict[str, str]:
    """What must be equal for the pages to be of use; the domain's name is nobody else's business."""
    domain = hashlib.blake2b(key.domain.encode(), digest_size=DIGEST_BYTES).hexdigest()
    geometry = {name: str(getattr(layout, name)).removeprefix("torch.") for name in GEOMETRY}
    return asdict(replace(key, domain=domain)) | geometry


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Of all metadata but the digest, and of every tensor's shape and bytes."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    digest = hashlib.blake2b(json.dumps([metadata, shapes], sort_keys=True).encode(), digest_size=DIGEST_BYTES)
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().data)
    return digest.hexdigest()


def _corrupt(path: Path, field: str, got: object, expected: str) -> CorruptSession:
    return CorruptSession(f"{path}: {field} is {reprlib.repr(got)}, expected {expected}")
