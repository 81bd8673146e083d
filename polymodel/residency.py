"""Which weights are in memory: loads a model under the budget, gives it up, loads it again."""

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
from csrc_triton.quant import QTensor, dense, dequantize, quantize
from polymodel.checkpoint import Checkpoint
from polymodel.config import PAGE_TOKENS, ModelConfig, Weights
from polymodel.errors import DuplicateId, EmptyId, Leased, UnknownModel
from polymodel.events import Events
from polymodel.kv import Arena
from polymodel.ledger import Ledger
from polymodel.model import Layer, Model, rope_tables
from polymodel.packing import Matrix, WeightPlan, compute_dtype, pack_matrix, plan_weights
from polymodel.pool import Pool
from polymodel.share import band_digests
from polymodel.tokenizer import Tokenizer

Progress = Callable[[int, int], None]  # done, of


# ---- loading -----------------------------------------------------------------------------------------


def load_model(
    hosted: Hosted,
    device: torch.device,
    settle: Callable[[str, QTensor], QTensor],
    progress: Progress | None = None,
) -> Model:
    """Read, round and pack every tensor; `settle` has the last word on each packed matrix. No file stays mapped."""
    checkpoint, plan, config = hosted.checkpoint, hosted.plan, hosted.config
    embed = _load_storage(checkpoint, "embed", plan.embed_fmt).to(device)
    layers = []
    for i in range(config.num_layers):
        layers.append(_load_layer(checkpoint, plan, f"layers.{i}.", device, settle))
        if progress is not None:
            progress(i + 1, config.num_layers + 1)
    head = settle("head", _load_head(checkpoint, plan, embed, device))
    if progress is not None:
        progress(config.num_layers + 1, config.num_layers + 1)
    norm = _load_vector(checkpoint, "norm").to(device)
    ropes = rope_tables(config, hosted.max_position, device)
    return Model(config, plan.dtype, embed, layers, norm, head, ropes, hosted.layout)


def _load_layer(
    checkpoint: Checkpoint,
    plan: WeightPlan,
    at: str,
    device: torch.device,
    settle: Callable[[str, QTensor], QTensor],
) -> Layer:
    def vector(name: str) -> Tensor | None:
        return _load_vector(checkpoint, at + name).to(device) if at + name in checkpoint.tensors else None

    def norm(name: str) -> Tensor:
        return _load_vector(checkpoint, at + name).to(device)

    def matrix(name: str) -> QTensor:
        return settle(at + name, _load_matrix(checkpoint, plan.matrices[at + name], plan.dtype, device))

    biases = [bias for bias in map(vector, ("q_bias", "k_bias", "v_bias")) if bias is not None]
    return Layer(
        attn_norm=norm("attn_norm"),
        qkv=tuple(matrix(name) for name in ("qkv", "qk", "q", "kv", "k", "v") if at + name in plan.matrices),
        qkv_bias=torch.cat(biases) if biases else None,
        q_norm=vector("q_norm"),
        k_norm=vector("k_norm"),
        o=matrix("o"),
        post_attn_norm=vector("post_attn_norm"),
        mlp_norm=norm("mlp_norm"),
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


def _load_matrix(checkpoint: Checkpoint, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> QTensor:
    return pack_matrix([_raw(checkpoint, name) for name in matrix.sources], matrix, dtype, device)


def _load_head(checkpoint: Checkpoint, plan: WeightPlan, embed: QTensor, device: torch.device) -> QTensor:
    matrix = plan.matrices["head"]
    if matrix.sources != ("embed",):
        return _load_matrix(checkpoint, matrix, plan.dtype, device)
    if matrix.scheme in cpu.SCHEMES:
        return cpu.pack(embed, matrix.scheme)
    return pack_matrix([embed], matrix, plan.dtype, device)


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
            value = getattr(layer, part.name)
            for one in value if isinstance(value, tuple) else (value,):
                add(one)
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

    def __init__(
        self, budget: int, arena: Arena, ledger: Ledger, events: Events, device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
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
        dtype = compute_dtype(weights, self.device)
        layout = self.arena.layout(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
        capacity = self.arena.nbytes // layout.page_bytes * PAGE_TOKENS
        max_position = min(config.max_context, capacity) - 1
        plan = plan_weights(checkpoint, weights, max_position, self.device)
        hosted = Hosted(name, checkpoint, plan, max_position, layout)
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
                loaded = load_model(hosted, self.device, settle, progress)
                hosted.model, hosted.notes = loaded, notes
        except BaseException:
            self.pool.evict(hosted.name)
            raise
        hosted.num_loads += 1
        self.ledger.set("weights", hosted.name, hosted.plan.nbytes)
        return hosted.model

    def _settle(self, notes: list[str], name: str, q: QTensor) -> QTensor:
        """A packed matrix as it may run here: each shape is probed once a process; notes what runs row by row.

        Kernels hold by construction and are not probed.
        """
        if not q.layout.startswith("cpu-"):
            return q
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
