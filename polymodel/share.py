"""May model B use what model A prefilled? Decided from digests of the weights themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

from polymodel.checkpoint import Checkpoint
from polymodel.config import ModelConfig


class Shareable(Protocol):
    """What a verdict is made from."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def vocab_digest(self) -> str: ...
    @property
    def band_digests(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    layers: int  # lower layers whose keys and values are bit-identical for equal tokens
    num_layers: int  # of the smaller model
    reason: str  # every axis that failed, or "equal"
    proof: str  # digest of the longest common band, "" if there is none

    @property
    def is_full(self) -> bool:
        return self.layers == self.num_layers > 0

    def __bool__(self) -> bool:
        return self.layers > 0


def band_digests(checkpoint: Checkpoint, weights: str) -> tuple[str, ...]:
    """Digest L covers the embedding, layers 0..L-1 and every scalar that enters them; L in 0..num_layers."""
    config = checkpoint.config
    running = hashlib.blake2b(json.dumps([weights, _scalars(config)]).encode(), digest_size=16)
    by_layer: dict[int, list[str]] = {-1: ["embed"]}
    for name in sorted(checkpoint.tensors):
        if name.startswith("layers."):
            by_layer.setdefault(int(name.split(".")[1]), []).append(name)
    digests = []
    for layer in range(-1, config.num_layers):
        if layer >= 0:
            running.update(f"{config.layer_window(layer)} {config.layer_rope(layer)}".encode())
        for name in by_layer[layer]:
            info = checkpoint.tensors[name]
            running.update(f"{name} {info.kind} {info.shape}".encode())
            running.update(checkpoint.raw(name).numpy().data)
        digests.append(running.hexdigest())
    return tuple(digests)


def _scalars(config: ModelConfig) -> dict[str, object]:
    """Every config field that enters all layers alike; a layer's own window and rope are digested with its weights."""
    per_layer = {"rope", "rope_local", "window", "windowed_layers"}
    elsewhere = {"num_layers", "max_context", "tied_head", "bos_id", "eos_ids", "vocab_size"}
    return {name: value for name, value in asdict(config).items() if name not in per_layer | elsewhere}


def _first_differences(a: ModelConfig, b: ModelConfig, depth: int) -> Iterator[str]:
    """The lowest layer whose window differs, and the lowest whose rope does."""
    for name in ("window", "rope"):
        for layer in range(depth):
            ours, theirs = (getattr(config, f"layer_{name}")(layer) for config in (a, b))
            if ours != theirs:
                yield f"layer {layer}: {name} {ours} against {theirs}"
                break


def can_share(a: Shareable, b: Shareable) -> Verdict:
    """How many lower layers of a prefix computed by `a` hold for `b`, and why not more."""
    failed = []
    if a.vocab_digest != b.vocab_digest:
        failed.append("tokenizer: vocabularies differ")
    ours, theirs = _scalars(a.config), _scalars(b.config)
    failed += [f"{k}: {ours[k]!r} against {theirs[k]!r}" for k in ours if ours[k] != theirs[k]]
    depth = min(a.config.num_layers, b.config.num_layers)
    per_layer = list(_first_differences(a.config, b.config, depth))
    failed += per_layer
    same = 0
    for one, other in zip(a.band_digests[: depth + 1], b.band_digests[: depth + 1], strict=True):
        if one != other:
            break
        same += 1
    if same == 0:
        failed.append("weights: the embeddings, or how they are stored, differ")
    elif same <= depth and not any(axis.startswith(f"layer {same - 1}:") for axis in per_layer):
        failed.append(f"weights: layer {same - 1} differs")
    layers = 0 if a.vocab_digest != b.vocab_digest else max(same - 1, 0)
    return Verdict(layers, depth, "; ".join(failed) or "equal", a.band_digests[layers] if layers else "")
