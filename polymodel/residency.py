"""Which weights are in memory: loads a model under the budget, gives it up, loads it again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.fused import RopeTable
from csrc_triton.pages import KVLayout
from csrc_triton.quant import QTensor, dense, dequantize, quantize
from polymodel.checkpoint import Checkpoint
from polymodel.config import PAGE_TOKENS, ModelConfig, Weights
from polymodel.errors import DuplicateId, EmptyId, Leased, UnknownModel
from polymodel.events import Events
from polymodel.kv import Arena
from polymodel.ledger import Ledger
from polymodel.model import Layer, Model, rope_tables
from polymodel.packing import Matrix, Piece, WeightPlan, compute_dtype, pack_matrix, plan_weights
from polymodel.pool import Pool
from polymodel.share import band_digests, common_layers, tensor_digests
from polymodel.tokenizer import Tokenizer

T = TypeVar("T")
Progress = Callable[[int, int], None]  # done, of


# ---- loading -----------------------------------------------------------------------------------------


class Take(Protocol):
    """A piece by its name: the one that is in memory already, or else what `make` gives."""

    def __call__(self, name: str, make: Callable[[], T]) -> T: ...


def load_model(
    hosted: Hosted,
    device: torch.device,
    take: Take,
    settle: Callable[[QTensor], QTensor],
    progress: Progress | None = None,
) -> Model:
    """Read, round and pack what `take` asks for; `settle` has the last word on each matrix. No file stays mapped."""
    checkpoint, plan, config = hosted.checkpoint, hosted.plan, hosted.config

    def rope(i: int) -> RopeTable:
        return take(str(config.layer_rope(i)), lambda: rope_tables(config, hosted.max_position, device)[i])

    embed = take("embed", lambda: _load_storage(checkpoint, "embed", plan.embed_fmt).to(device))
    layers = []
    for i in range(config.num_layers):
        layers.append(_load_layer(checkpoint, plan, f"layers.{i}.", device, take, settle))
        if progress is not None:
            progress(i + 1, config.num_layers + 1)
    head = take("head", lambda: settle(_load_head(checkpoint, plan, embed, device)))
    if progress is not None:
        progress(config.num_layers + 1, config.num_layers + 1)
    norm = take("norm", lambda: _load_vectors(checkpoint, plan.pieces["norm"], device))
    ropes = [rope(i) for i in range(config.num_layers)]
    return Model(config, plan.dtype, embed, layers, norm, head, ropes, hosted.layout)


def _load_layer(
    checkpoint: Checkpoint,
    plan: WeightPlan,
    at: str,
    device: torch.device,
    take: Take,
    settle: Callable[[QTensor], QTensor],
) -> Layer:
    def vector(name: str) -> Tensor | None:
        return norm(name) if at + name in plan.pieces else None

    def norm(name: str) -> Tensor:
        return take(at + name, lambda: _load_vectors(checkpoint, plan.pieces[at + name], device))

    def matrix(name: str) -> QTensor:
        planned = plan.matrices[at + name]
        return take(at + name, lambda: settle(_load_matrix(checkpoint, planned, plan.dtype, device)))

    return Layer(
        attn_norm=norm("attn_norm"),
        qkv=tuple(matrix(name) for name in ("qkv", "qk", "q", "kv", "k", "v") if at + name in plan.matrices),
        qkv_bias=vector("qkv_bias"),
        q_norm=vector("q_norm"),
        k_norm=vector("k_norm"),
        o=matrix("o"),
        post_attn_norm=vector("post_attn_norm"),
        mlp_norm=norm("mlp_norm"),
        gate_up=matrix("gate_up"),
        down=matrix("down"),
        post_mlp_norm=vector("post_mlp_norm"),
    )


def _load_vectors(checkpoint: Checkpoint, piece: Piece, device: torch.device) -> Tensor:
    return torch.cat([dequantize(_raw(checkpoint, name)).flatten() for name in piece.sources]).to(device)


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


def model_nbytes(*models: Model) -> int:
    """Bytes that loaded models hold together: every storage once, panels that torch does not see included."""
    seen: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, cpu.HalfPanels):
            seen[id(value)] = value.nbytes
        elif isinstance(value, QTensor):
            for part in value.parts.values():
                add(part)

    for model in models:
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
    partners: dict[str, int] = field(default_factory=dict)  # other hosted model -> lower layers in common, at least one
    boundaries: tuple[int, ...] = ()  # layers whose input a partner goes on from

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
    def tensor_digests(self) -> dict[str, str]:
        return tensor_digests(self.checkpoint)

    @cached_property
    def band_digests(self) -> tuple[str, ...]:
        plan = self.plan
        layers = [plan.stored(f"layers.{i}.") for i in range(self.config.num_layers)]
        return band_digests(self.checkpoint, f"{plan.embed_fmt} {plan.dtype}", layers, self.tensor_digests)

    def piece_keys(self) -> dict[str, Hashable]:
        """Name -> what makes a piece the same as another model's; matrices settle by the number of threads."""
        digests, threads = self.tensor_digests, torch.get_num_threads()
        return {
            name: (name, piece.how, tuple(digests[source] for source in piece.sources), threads)
            for name, piece in self.plan.pieces.items()
        }


class Residency:
    """Models under one budget of weight bytes. The least recently used idle one makes room; its file stays.

    What models have in common is in memory once. share: find out at `add` which lower layers compute the same bits.
    """

    def __init__(
        self,
        budget: int,
        arena: Arena,
        ledger: Ledger,
        events: Events,
        device: torch.device | str = "cpu",
        share: bool = True,
    ) -> None:
        self.device = torch.device(device)
        self.pool = Pool(budget)
        self.arena = arena
        self.ledger = ledger
        self.events = events
        self.share = share
        self.hosted: dict[str, Hosted] = {}
        self._pieces: dict[Hashable, Any] = {}
        self._probed: dict[tuple[object, ...], str] = {}

    def __getitem__(self, name: str) -> Hosted:
        if name not in self.hosted:
            raise UnknownModel(f"no model named {name!r}; there are {', '.join(self.hosted) or 'none'}")
        return self.hosted[name]

    def add(
        self, name: str, checkpoint: Checkpoint, weights: Weights, pinned: bool, progress: Progress | None = None
    ) -> Hosted:
        """Plan, compare, make room, load. An error leaves no trace of the newcomer."""
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
        self.pool.check_total(name, plan.nbytes)  # before any weight is read
        partners = self._partners_of(hosted) if self.share else {}
        self.hosted[name] = hosted
        try:
            self._bring_in(hosted, pinned, progress)
        except BaseException:
            del self.hosted[name]
            raise
        hosted.partners = partners
        for partner, layers in partners.items():
            self.hosted[partner].partners[name] = layers
        self._set_boundaries()
        return hosted

    def _partners_of(self, hosted: Hosted) -> dict[str, int]:
        common = {name: common_layers(hosted, other) for name, other in self.hosted.items()}
        return {name: layers for name, layers in common.items() if layers}

    def _set_boundaries(self) -> None:
        """A partner that shares everything takes whole pages and goes on from no layer."""
        for hosted in self.hosted.values():
            depths = {(n, hosted.config.num_layers, self[p].config.num_layers) for p, n in hosted.partners.items()}
            hosted.boundaries = tuple(sorted({n for n, *both in depths if [n, n] != both}))

    def _bring_in(self, hosted: Hosted, pinned: bool, progress: Progress | None = None) -> Model:
        keys, planned = hosted.piece_keys(), hosted.plan.pieces
        for victim in self.pool.admit(hosted.name, {keys[name]: planned[name].nbytes for name in keys}, pinned):
            self._let_go(victim)
        self._balance()

        def take(name: str, make: Callable[[], T]) -> T:
            if keys[name] not in self._pieces:
                self._pieces[keys[name]] = make()
            piece: T = self._pieces[keys[name]]
            return piece

        try:
            with self.events.span("admit", hosted.name, num_bytes=hosted.plan.nbytes):
                model = load_model(hosted, self.device, take, self._settle, progress)
        except BaseException:
            self.pool.evict(hosted.name)
            self._balance()
            raise
        hosted.model = model
        hosted.notes = [name for name, q in model.weights() if q.layout.endswith("-rows")]
        hosted.num_loads += 1
        return model

    def _settle(self, q: QTensor) -> QTensor:
        """A packed matrix as it may run here: each shape is probed once a process.

        Kernels hold by construction and are not probed.
        """
        if not q.layout.startswith("cpu-"):
            return q
        key = (q.layout, q.shape, "rescale" in q.parts, torch.get_num_threads())
        if key not in self._probed:
            self._probed[key] = cpu.checked(q).layout
        return replace(q, layout=self._probed[key])

    def _let_go(self, name: str) -> None:
        with self.events.span("evict", name, num_bytes=self.hosted[name].plan.nbytes):
            self.hosted[name].model = None
            self._balance()
            gc.collect(0)

    def _balance(self) -> None:
        """Hold the pieces of residents and no others, and charge each to the resident that has been in longest."""
        held, charges = self.pool.pieces(), self.pool.charges()
        self._pieces = {key: piece for key, piece in self._pieces.items() if key in held}
        for name in (*self.ledger.of("weights"), *charges):
            self.ledger.set("weights", name, charges.get(name, 0))

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

    def shared_bytes(self, name: str) -> int:
        """Bytes of a model's weights that another one in memory holds too."""
        return self.pool.shared_bytes(name) if self.is_resident(name) else 0

    def unload(self, name: str) -> None:
        """Give the weights' memory back; the model stays known and loads again when its turn comes."""
        self[name]
        if self.pool.evict(name):
            self._let_go(name)

    def remove(self, name: str) -> None:
        self.unload(name)
        checkpoint = self.hosted.pop(name).checkpoint
        if all(hosted.checkpoint is not checkpoint for hosted in self.hosted.values()):
            checkpoint.close()
        for hosted in self.hosted.values():
            hosted.partners.pop(name, None)
        self._set_boundaries()

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
        assert self._pieces.keys() == self.pool.pieces().keys()
        assert self.ledger.of("weights") == {name: held for name, held in self.pool.charges().items() if held}
        assert self.ledger.total("weights") == self.pool.used
        if any(self.pool[name].leases for name in inside):
            raise Leased("a lease is open outside a turn")
