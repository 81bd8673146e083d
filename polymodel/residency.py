"""Which weights are in memory: plans a model's bytes before loading, loads, packs, gives up, loads again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.pages import KVLayout
from csrc_triton.quant import QTensor, cat_rows, dense, dequantize, quantize
from polymodel.checkpoint import Checkpoint
from polymodel.config import PAGE_TOKENS, WEIGHTS, ModelConfig, Weights
from polymodel.errors import DuplicateId, EmptyId, InvalidRequest, Leased, UnknownModel
from polymodel.events import Events
from polymodel.kv import Arena
from polymodel.ledger import Ledger
from polymodel.model import Layer, Model, rope_tables
from polymodel.pool import Pool
from polymodel.share import band_digests
from polymodel.tokenizer import Tokenizer

Progress = Callable[[int, int], None]  # done, of


# ---- what a model will weigh -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Matrix:
    """One packed matrix to be: where its rows come from, how they are stored, how they are multiplied."""

    sources: tuple[str, ...]  # canonical tensor names, stacked by rows
    shape: tuple[int, int]
    fmt: str  # what the values are rounded to; a file's own format where they are not
    scheme: str  # csrc_triton.cpu scheme
    shares_embed: bool = False  # the scheme reads the embedding's own storage

    @property
    def nbytes(self) -> int:
        full = cpu.packed_nbytes(self.shape, self.scheme)
        if not self.shares_embed:
            return full
        return full - (4 if self.fmt == "f32" else 1) * self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    weights: Weights
    matrices: dict[str, Matrix]
    embed_fmt: str
    nbytes: int  # of everything the model will hold, exact


def plan_weights(checkpoint: Checkpoint, weights: Weights, max_position: int) -> WeightPlan:
    """Formats, schemes and exact bytes, from the headers alone."""
    if weights not in WEIGHTS:
        raise InvalidRequest(f"weights={weights!r}, expected one of {', '.join(WEIGHTS)}")
    config, info = checkpoint.config, checkpoint.tensors
    matrices = {}
    for i in range(config.num_layers):
        at = f"layers.{i}."
        for name, parts in (("qkv", "qkv"), ("o", ("o",)), ("gate_up", ("gate", "up")), ("down", ("down",))):
            matrices[at + name] = _plan_matrix(checkpoint, weights, tuple(at + part for part in parts))
    embed_fmt = _embed_format(info["embed"].kind, weights)
    matrices["head"] = _plan_head(checkpoint, weights, embed_fmt)
    vectors = sum(4 * t.shape[1] for name, t in info.items() if _is_vector(name))
    ropes = {config.layer_rope(i) for i in range(config.num_layers)}
    total = (
        vectors
        + storage_nbytes(info["embed"].shape, embed_fmt, info["embed"].nbytes)
        + sum(matrix.nbytes for matrix in matrices.values())
        + len(ropes) * 4 * config.head_dim * (max_position + 1 - cpu.MIN_DISTANCE)
    )
    return WeightPlan(weights, matrices, embed_fmt, total)


def _is_vector(name: str) -> bool:
    return name.endswith(("norm", "bias"))


def _plan_matrix(checkpoint: Checkpoint, weights: Weights, sources: tuple[str, ...]) -> Matrix:
    infos = [checkpoint.tensors[name] for name in sources]
    shape = (sum(i.shape[0] for i in infos), infos[0].shape[1])
    kinds = {i.kind.lower() for i in infos}
    if weights == "file":
        fmt = kinds.pop() if len(kinds) == 1 else "mixed"
        return Matrix(sources, shape, fmt, cpu.scheme_for(fmt, 32, shape))
    return Matrix(sources, shape, *_format_and_scheme(weights, shape))


def _format_and_scheme(weights: Weights, shape: tuple[int, int]) -> tuple[str, str]:
    """A scheme that cannot take a shape gives way to half-precision panels of the same rounded values."""
    dense_scheme = cpu.scheme_for("f16", 0, shape)
    if weights == "q8":
        return "q8", "i8" if cpu.fits_int8(shape) else dense_scheme
    if weights == "q4":
        return "q4", "i4" if cpu.fits_int4(shape) else dense_scheme
    if weights == "w8a8":
        return "q8", "w8a8"
    return weights, "f32" if weights == "f32" else dense_scheme


def _embed_format(kind: str, weights: Weights) -> str:
    if weights == "file":
        return kind.lower()
    return weights if weights in ("f32", "bf16") else "q8"


def _plan_head(checkpoint: Checkpoint, weights: Weights, embed_fmt: str) -> Matrix:
    tied = checkpoint.config.tied_head
    matrix = _plan_matrix(checkpoint, "q8" if weights == "q4" else weights, ("embed" if tied else "head",))
    shared = tied and (matrix.scheme == "i8" or matrix.scheme == "f32" == embed_fmt or _is_shared_w8a8(matrix))
    return Matrix(matrix.sources, matrix.shape, matrix.fmt, matrix.scheme, shared)


def _is_shared_w8a8(matrix: Matrix) -> bool:
    return matrix.scheme == "w8a8" and cpu.has_fast_int8()


def storage_nbytes(shape: tuple[int, int], fmt: str, file_nbytes: int) -> int:
    n, k = shape
    return {"f32": 4 * n * k, "bf16": 2 * n * k, "q8": n * k + 4 * n}.get(fmt, file_nbytes)


# ---- loading -----------------------------------------------------------------------------------------


def load_model(hosted: Hosted, settle: Callable[[str, QTensor], QTensor], progress: Progress | None = None) -> Model:
    """Read, round and pack every tensor; `settle` has the last word on each packed matrix. No file stays mapped."""
    checkpoint, plan, config = hosted.checkpoint, hosted.plan, hosted.config
    embed = _load_storage(checkpoint, "embed", plan.embed_fmt)
    layers = []
    for i in range(config.num_layers):
        layers.append(_load_layer(checkpoint, plan, f"layers.{i}.", settle))
        if progress is not None:
            progress(i + 1, config.num_layers + 1)
    head = settle("head", _load_head(checkpoint, plan.matrices["head"], embed))
    if progress is not None:
        progress(config.num_layers + 1, config.num_layers + 1)
    norm = _load_vector(checkpoint, "norm")
    return Model(config, embed, layers, norm, head, rope_tables(config, hosted.max_position), hosted.layout)


def _load_layer(checkpoint: Checkpoint, plan: WeightPlan, at: str, settle: Callable[[str, QTensor], QTensor]) -> Layer:
    def vector(name: str) -> Tensor | None:
        return _load_vector(checkpoint, at + name) if at + name in checkpoint.tensors else None

    def matrix(name: str) -> QTensor:
        return settle(at + name, _load_matrix(checkpoint, plan.matrices[at + name]))

    biases = [bias for bias in map(vector, ("q_bias", "k_bias", "v_bias")) if bias is not None]
    return Layer(
        attn_norm=_load_vector(checkpoint, at + "attn_norm"),
        qkv=matrix("qkv"),
        qkv_bias=torch.cat(biases) if biases else None,
        q_norm=vector("q_norm"),
        k_norm=vector("k_norm"),
        o=matrix("o"),
        post_attn_norm=vector("post_attn_norm"),
        mlp_norm=_load_vector(checkpoint, at + "mlp_norm"),
        gate_up=matrix("gate_up"),
        down=matrix("down"),
        post_mlp_norm=vector("post_mlp_norm"),
    )


def _load_vector(checkpoint: Checkpoint, name: str) -> Tensor:
    return dequantize(_raw(checkpoint, name)).flatten().clone()


def _raw(checkpoint: Checkpoint, name: str) -> QTensor:
    info = checkpoint.tensors[name]
    return QTensor.from_gguf(checkpoint.raw(name), info.kind, info.shape)


def _load_storage(checkpoint: Checkpoint, name: str, fmt: str) -> QTensor:
    raw = _raw(checkpoint, name)
    if fmt == "q8":
        return quantize(dequantize(raw), "q8", group=None)
    if fmt == "bf16":
        return dense(dequantize(raw).bfloat16())
    if fmt == "f32":
        return dense(dequantize(raw).clone())
    return replace(raw, parts={part: value.clone() for part, value in raw.parts.items()})


def _load_matrix(checkpoint: Checkpoint, matrix: Matrix) -> QTensor:
    raws = [_raw(checkpoint, name) for name in matrix.sources]
    if matrix.fmt == raws[0].fmt and len({q.fmt for q in raws}) == 1:
        q = cat_rows(raws) if len(raws) > 1 else raws[0]
    else:
        q = _rounded(torch.cat([dequantize(q) for q in raws]), matrix.fmt)
    packed = cpu.pack(q, matrix.scheme)
    if matrix.scheme == "f32" and len(raws) == 1 and raws[0].fmt == "f32":  # else it would be a view of the file
        packed = replace(packed, parts={"weight": packed.parts["weight"].clone()})
    return packed


def _rounded(weight: Tensor, fmt: str) -> QTensor:
    if fmt == "q8":
        return quantize(weight, "q8", group=None)
    if fmt == "q4":
        return quantize(weight, "q4", group=32)
    return dense(weight.bfloat16() if fmt == "bf16" else weight)


def _load_head(checkpoint: Checkpoint, matrix: Matrix, embed: QTensor) -> QTensor:
    if matrix.sources == ("embed",):
        return cpu.pack(embed, matrix.scheme)
    return _load_matrix(checkpoint, matrix)


def model_nbytes(model: Model) -> int:
    """Bytes a loaded model holds: every storage once, panels that torch does not see included."""
    seen: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, cpu.HalfPanels):
            seen[id(value)] = value.nbytes
        elif isinstance(value, QTensor):
            for part in value.parts.values():
                add(part)

    for layer in model.layers:
        for part in fields(layer):
            add(getattr(layer, part.name))
    for rope in model.ropes:
        add(rope.cos)
        add(rope.sin)
    for value in (model.embed, model.norm, model.head):
        add(value)
    return sum(seen.values())


# ---- who is in memory --------------------------------------------------------------------------------


@dataclass(eq=False)
class Hosted:
    """A model the engine knows, in memory or not."""

    name: str
    checkpoint: Checkpoint
    plan: WeightPlan
    max_position: int
    layout: KVLayout  # of its pages
    model: Model | None = None
    notes: list[str] = field(default_factory=list)  # matrices that run row by row here
    num_loads: int = 0

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @cached_property
    def tokenizer(self) -> Tokenizer:
        source = self.checkpoint
        if source.format == "gguf":
            return Tokenizer.from_gguf(source.metadata, str(source.path))
        return Tokenizer.from_folder(source.path if source.path.is_dir() else Path(source.path).parent)

    @cached_property
    def vocab_digest(self) -> str:
        return self.tokenizer.vocab_digest()

    @cached_property
    def band_digests(self) -> tuple[str, ...]:
        return band_digests(self.checkpoint, self.plan.weights)


class Residency:
    """Models under one budget of weight bytes. The least recently used idle one makes room; its file stays."""

    def __init__(self, budget: int, arena: Arena, ledger: Ledger, events: Events) -> None:
        self.pool = Pool(budget)
        self.arena = arena
        self.ledger = ledger
        self.events = events
        self.hosted: dict[str, Hosted] = {}
        self._probed: dict[tuple[object, ...], str] = {}

    def __getitem__(self, name: str) -> Hosted:
        if name not in self.hosted:
            raise UnknownModel(f"no model named {name!r}; there are {', '.join(self.hosted) or 'none'}")
        return self.hosted[name]

    def add(
        self, name: str, checkpoint: Checkpoint, weights: Weights, pinned: bool, progress: Progress | None = None
    ) -> Hosted:
        """Plan, make room, load. An error leaves no trace of the newcomer."""
        if not name:
            raise EmptyId("a model needs a name, got ''")
        if name in self.hosted:
            raise DuplicateId(f"a model named {name!r} is already there ({self.hosted[name].checkpoint.path})")
        config = checkpoint.config
        layout = self.arena.layout(config.num_layers, config.num_kv_heads, config.head_dim)
        capacity = self.arena.nbytes // layout.page_bytes * PAGE_TOKENS
        max_position = min(config.max_context, capacity) - 1
        hosted = Hosted(name, checkpoint, plan_weights(checkpoint, weights, max_position), max_position, layout)
        self.hosted[name] = hosted
        try:
            self._bring_in(hosted, pinned, progress)
        except BaseException:
            del self.hosted[name]
            raise
        return hosted

    def _bring_in(self, hosted: Hosted, pinned: bool, progress: Progress | None = None) -> Model:
        for victim in self.pool.admit(hosted.name, hosted.plan.nbytes, pinned):
            self._let_go(victim)
        try:
            with self.events.span("admit", hosted.name, num_bytes=hosted.plan.nbytes):
                notes: list[str] = []
                settle = partial(self._settle, notes)
                loaded = load_model(hosted, settle, progress)
                hosted.model, hosted.notes = loaded, notes
        except BaseException:
            self.pool.evict(hosted.name)
            raise
        hosted.num_loads += 1
        self.ledger.set("weights", hosted.name, hosted.plan.nbytes)
        return hosted.model

    def _settle(self, notes: list[str], name: str, q: QTensor) -> QTensor:
        """A packed matrix as it may run here: each shape is probed once a process; notes what runs row by row."""
        key = (q.layout, q.shape, "rescale" in q.parts, torch.get_num_threads())
        if key not in self._probed:
            self._probed[key] = cpu.checked(q).layout
        if self._probed[key].endswith("-rows"):
            notes.append(name)
        return replace(q, layout=self._probed[key])

    def _let_go(self, name: str) -> None:
        with self.events.span("evict", name, num_bytes=self.hosted[name].plan.nbytes):
            self.hosted[name].model = None
            gc.collect(0)
        self.ledger.set("weights", name, 0)

    @contextmanager
    def lease(self, name: str) -> Iterator[Model]:
        """The model, in memory for as long as the block runs."""
        hosted = self[name]
        model = hosted.model or self._bring_in(hosted, pinned=False)
        self.pool.touch(name)
        resident = self.pool[name]
        resident.leases += 1
        try:
            yield model
        finally:
            resident.leases -= 1

    def is_resident(self, name: str) -> bool:
        return self[name].model is not None

    def unload(self, name: str) -> None:
        """Give the weights' memory back; the model stays known and loads again when its turn comes."""
        self[name]
        if self.pool.evict(name):
            self._let_go(name)

    def remove(self, name: str) -> None:
        self.unload(name)
        self.hosted.pop(name).checkpoint.close()

    def set_pinned(self, name: str, pinned: bool) -> None:
        """Pinning a model that was given up brings it back first."""
        hosted = self[name]
        if hosted.model is None and pinned:
            self._bring_in(hosted, pinned)
        if hosted.model is not None:
            self.pool[name].pinned = pinned

    def resize(self, budget: int) -> list[str]:
        victims = self.pool.resize(budget)
        for victim in victims:
            self._let_go(victim)
        return victims

    def check(self) -> None:
        self.pool.check()
        inside: Sequence[str] = [name for name, hosted in self.hosted.items() if hosted.model is not None]
        assert sorted(inside) == self.pool.names()
        assert self.ledger.total("weights") == self.pool.used
        if any(self.pool[name].leases for name in inside):
            raise Leased("a lease is open outside a turn")
