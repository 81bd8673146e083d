"""May model B use what model A prefilled? Decided from digests of the weights themselves."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Protocol

from torch import Tensor

from polymodel.checkpoint import Checkpoint, TensorInfo
from polymodel.config import KVKey, ModelConfig
from polymodel.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel

HASHING_THREADS = 4  # hashlib holds no lock while it reads a tensor


class Banded(Protocol):
    """A model whose lower layers can be compared with another's."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def vocab_digest(self) -> str: ...
    @property
    def band_digests(self) -> tuple[str, ...]: ...


class Shareable(Banded, Protocol):
    """What a verdict is made from: a model, and where and for whom it runs."""

    @property
    def name(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def domain(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    layers: int  # lower layers whose keys and values are bit-identical for equal tokens
    num_layers: int  # of the smaller model
    reason: str  # every axis that failed, or "equal"
    proof: str  # digest of the longest common band, "" if there is none
    failed: tuple[str, ...] = ()  # names of those axes

    @property
    def is_full(self) -> bool:
        return self.layers == self.num_layers > 0

    def __bool__(self) -> bool:
        return self.layers > 0


# ---- digests -----------------------------------------------------------------------------------------


def tensor_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Canonical tensor name -> digest of its kind, shape and bytes."""

    def digest(name: str) -> str:
        return tensor_digest(checkpoint.tensors[name], checkpoint.raw(name))

    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(checkpoint.tensors, pool.map(digest, checkpoint.tensors), strict=True))


def tensor_digest(info: TensorInfo, data: Tensor) -> str:
    """Of one tensor as `Checkpoint.raw` gave it."""
    running = hashlib.blake2b(f"{info.kind} {info.shape}".encode(), digest_size=16)
    running.update(data.numpy().data)
    return running.hexdigest()


def band_digests(
    checkpoint: Checkpoint, embed: str, layers: Sequence[str] = (), tensors: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Digest L covers the embedding, layers 0..L-1 and every scalar that enters them; L in 0..num_layers.

    embed and layers: how the embedding and each layer's matrices are stored and multiplied.
    tensors: the checkpoint's tensor_digests, where they are known already.
    """
    config, tensors = checkpoint.config, tensors or tensor_digests(checkpoint)
    parts: list[list[str]] = [[] for _ in range(config.num_layers)]
    for name in sorted(tensors):
        if name.startswith("layers."):
            parts[int(name.split(".")[1])] += [name, tensors[name]]
    running = hashlib.blake2b(json.dumps([embed, _scalars(config), tensors["embed"]]).encode(), digest_size=16)
    digests = [running.hexdigest()]
    for i, part in enumerate(parts):
        turns = repr((config.layer_window(i), config.layer_rope(i)))
        running.update(json.dumps([turns, layers[i] if layers else "", *part]).encode())
        digests.append(running.hexdigest())
    return tuple(digests)


def band_digest(model: Banded, num_layers: int) -> str:
    """Digest of the embedding and the lowest num_layers layers."""
    if not 0 <= num_layers <= model.config.num_layers:
        raise InvalidRequest(f"band_digest: num_layers={num_layers}, expected 0..{model.config.num_layers}")
    return model.band_digests[num_layers]


def rope_digest(config: ModelConfig) -> str:
    """Of every layer's rotation."""
    ropes = [asdict(config.layer_rope(i)) for i in range(config.num_layers)]
    return hashlib.blake2b(json.dumps([config.head_dim, ropes]).encode(), digest_size=16).hexdigest()


def kv_key(model: Banded, policy: str, domain: str) -> KVKey:
    """What a model's keys and values are stored under; policy is the digest of what else decides their bits."""
    return KVKey(model.band_digests[-1], _vocabulary(model), rope_digest(model.config), policy, domain)


def _vocabulary(model: Banded) -> str:
    """Digest of its tokenizer; "" where the checkpoint has none that can be read, so that it takes ids alone."""
    try:
        return model.vocab_digest
    except (CorruptCheckpoint, UnsupportedModel):
        return ""


def _scalars(config: ModelConfig) -> dict[str, object]:
    """Every config field that enters all layers alike; a layer's own window and rope are digested with its weights."""
    per_layer = {"rope", "rope_local", "window", "windowed_layers"}
    elsewhere = {"num_layers", "max_context", "tied_head", "bos_id", "eos_ids", "vocab_size"}
    return {name: value for name, value in asdict(config).items() if name not in per_layer | elsewhere}


# ---- verdicts ----------------------------------------------------------------------------------------


def common_layers(a: Banded, b: Banded) -> int:
    """How many lower layers compute the same bits in both; 0 where their vocabularies differ."""
    if _scalars(a.config) != _scalars(b.config):  # seen without reading a weight
        return 0
    layers = max(_common_digests(a, b) - 1, 0)
    return layers if layers and _vocabulary(a) == _vocabulary(b) else 0


def can_share(a: Shareable, b: Shareable) -> Verdict:
    """How many lower layers of a prefix computed by `a` hold for `b`, and why not more; both as `eng[name]` gives."""
    for model in (a, b):
        if not hasattr(model, "band_digests"):
            raise InvalidRequest(f"can_share: expected models as eng['a'] gives them, got a {type(model).__name__}")
    failed: dict[str, str] = {}
    if _vocabulary(a) != _vocabulary(b):
        failed["tokenizer"] = "vocabularies differ"
    for axis, ours, theirs in (
        ("policy", a.policy, b.policy),
        ("dtype", a.kv_dtype, b.kv_dtype),
        ("domain", a.domain, b.domain),
    ):
        if ours != theirs:
            failed[axis] = f"{ours!r} against {theirs!r}"
    forbids = bool(failed)
    scalars = _scalars(b.config)
    failed |= {k: f"{v!r} against {scalars[k]!r}" for k, v in _scalars(a.config).items() if v != scalars[k]}
    depth = min(a.config.num_layers, b.config.num_layers)
    per_layer = dict(_first_differences(a.config, b.config, depth))
    reasons = [f"{axis}: {why}" for axis, why in failed.items()] + list(per_layer.values())
    axes = [*failed, *per_layer]
    same = _common_digests(a, b)
    if same == 0:
        reasons.append("weights: the embeddings, or how they are stored, differ")
        axes.append("weights")
    elif same <= depth and not any(why.startswith(f"layer {same - 1}:") for why in per_layer.values()):
        reasons.append(f"weights: layer {same - 1} differs")
        axes.append("weights")
    layers = 0 if forbids else max(same - 1, 0)
    proof = a.band_digests[layers] if layers else ""
    return Verdict(layers, depth, "; ".join(reasons) or "equal", proof, tuple(axes))


def _common_digests(a: Banded, b: Banded) -> int:
    """How many band digests agree, from the embedding's up."""
    pairs = list(zip(a.band_digests, b.band_digests, strict=False))
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))


def _first_differences(a: ModelConfig, b: ModelConfig, depth: int) -> Iterator[tuple[str, str]]:
    """The lowest layer whose window differs, and the lowest whose rope does."""
    for name in ("window", "rope"):
        for layer in range(depth):
            ours, theirs = (getattr(config, f"layer_{name}")(layer) for config in (a, b))
            if ours != theirs:
                yield name, f"layer {layer}: {name} {ours} against {theirs}"
                break
