"""Where each model's weights are: on the device, in the host's memory, or in their file; and how they come and go."""

from __future__ import annotations

import gc
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from random import Random
from traceback import clear_frames
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.fused import RopeTable
from csrc_triton.pages import KVLayout
from csrc_triton.quant import QTensor, dense, dequantize, quantize
from polymodel.checkpoint import Checkpoint
from polymodel.config import (
    PAGE_TOKENS,
    RESERVED_NAMES,
    WEIGHT_CHECKS,
    ModelConfig,
    PoolPolicy,
    WeightCheck,
    Weights,
    is_number,
)
from polymodel.errors import (
    CorruptCheckpoint,
    DuplicateId,
    EmptyId,
    InvalidRequest,
    Leased,
    PinnedNoRoom,
    TooLarge,
    UnknownModel,
    brief,
)
from polymodel.events import Events, Kind
from polymodel.kv import Arena
from polymodel.ledger import Ledger
from polymodel.model import Layer, Model, rope_tables
from polymodel.packing import Matrix, Piece, WeightPlan, compute_dtype, pack_matrix, plan_weights
from polymodel.pool import Pool, Snapshot
from polymodel.share import band_digests, common_layers, tensor_digest, tensor_digests
from polymodel.tokenizer import Tokenizer

SAMPLED = 4  # tensors of a load, or pieces that leave the device, that "sampled" looks at beside the embedding

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
LOOK_AGAIN = 0.05  # seconds
Progress = Callable[[int, int], None]  # done, of
Tier = Literal["device", "host", "disk"]


# ---- loading -----------------------------------------------------------------------------------------


class Read(Protocol):
    """A tensor of the checkpoint by its canonical name."""

    def __call__(self, name: str) -> QTensor: ...


class Take(Protocol):
    """A piece by its name: the one that is in memory already, or else what `make` gives."""

    def __call__(self, name: str, make: Callable[[], T]) -> T: ...


def load_model(
    hosted: Hosted,
    device: torch.device,
    read: Read,
    take: Take,
    settle: Callable[[QTensor], QTensor],
    progress: Progress | None = None,
) -> Model:
    """Read, round and pack what `take` asks for; `settle` has the last word on each matrix."""
    plan, config = hosted.plan, hosted.config

    def rope(i: int) -> RopeTable:
        return take(str(config.layer_rope(i)), lambda: rope_tables(config, hosted.max_position, device)[i])

    embed = take("embed", lambda: _load_storage(read, "embed", plan.embed_fmt).to(device))
    layers = []
    for i in range(config.num_layers):
        layers.append(_load_layer(read, plan, f"layers.{i}.", device, take, settle))
        if progress is not None:
            progress(i + 1, config.num_layers + 1)
    head = take("head", lambda: settle(_load_head(read, plan, embed, device)))
    if progress is not None:
        progress(config.num_layers + 1, config.num_layers + 1)
    norm = take("norm", lambda: _load_vectors(read, plan.pieces["norm"], device))
    ropes = [rope(i) for i in range(config.num_layers)]
    return Model(config, plan.dtype, embed, layers, norm, head, ropes, hosted.layout)


def _load_layer(
    read: Read, plan: WeightPlan, at: str, device: torch.device, take: Take, settle: Callable[[QTensor], QTensor]
) -> Layer:
    def vector(name: str) -> Tensor | None:
        return norm(name) if at + name in plan.pieces else None

    def norm(name: str) -> Tensor:
        return take(at + name, lambda: _load_vectors(read, plan.pieces[at + name], device))

    def matrix(name: str) -> QTensor:
        planned = plan.matrices[at + name]
        return take(at + name, lambda: settle(_load_matrix(read, planned, plan.dtype, device)))

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


def _load_vectors(read: Read, piece: Piece, device: torch.device) -> Tensor:
    return torch.cat([dequantize(read(name)).flatten() for name in piece.sources]).to(device)


def _load_storage(read: Read, name: str, fmt: str) -> QTensor:
    raw = read(name)
    if fmt == "q8":
        return quantize(dequantize(raw), "q8", group=None)
    if fmt == "bf16":
        return dense(dequantize(raw).bfloat16())
    return dense(dequantize(raw)) if fmt == "f32" else raw


def _load_matrix(read: Read, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> QTensor:
    return pack_matrix([read(name) for name in matrix.sources], matrix, dtype, device)


def _load_head(read: Read, plan: WeightPlan, embed: QTensor, device: torch.device) -> QTensor:
    matrix = plan.matrices["head"]
    if matrix.sources != ("embed",):
        return _load_matrix(read, matrix, plan.dtype, device)
    if matrix.scheme in cpu.SCHEMES:
        return cpu.pack(embed, matrix.scheme)
    return pack_matrix([embed], matrix, plan.dtype, device)


def model_nbytes(*models: Model) -> int:
    """Bytes that loaded models hold together: every storage once, panels that torch does not see included."""
    return pieces_nbytes(piece for model in models for piece in _pieces(model))


def _pieces(model: Model) -> Iterator[Any]:
    yield from (model.embed, model.norm, model.head, *model.ropes)
    for layer in model.layers:
        for part in fields(layer):
            value = getattr(layer, part.name)
            yield from value if isinstance(value, tuple) else () if value is None else (value,)


def pieces_nbytes(pieces: Iterable[Any]) -> int:
    """Bytes of the storages that loaded pieces hold together."""
    seen: dict[int, int] = {}
    for piece in pieces:
        for part in _parts(piece).values():
            if isinstance(part, cpu.HalfPanels):
                seen[id(part)] = part.nbytes
            else:
                seen[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(seen.values())


def _parts(piece: Any) -> Mapping[str, Any]:
    """A piece's tensors, and its panels that are opaque to torch."""
    if isinstance(piece, Tensor):
        return {"": piece}
    if isinstance(piece, RopeTable):
        return {"cos": piece.cos, "sin": piece.sin}
    parts: Mapping[str, Any] = piece.parts
    return parts


def _with_parts(piece: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(piece, Tensor):
        return parts[""]
    return replace(piece, **parts) if isinstance(piece, RopeTable) else replace(piece, parts=dict(parts))


def piece_digest(piece: Any) -> str:
    """Of its tensors' bytes; opaque panels are left out, for nothing can read them."""
    running = hashlib.blake2b(digest_size=16)
    for part in _parts(piece).values():
        if isinstance(part, Tensor):
            running.update(part.contiguous().flatten().view(torch.uint8).numpy().data)
    return running.hexdigest()


def _sampled(names: Mapping[K, str], check: WeightCheck, seed: str) -> set[K]:
    """Which tensors or pieces, each with its name, are compared with their digests."""
    if check != "sampled":
        return set(names) if check == "full" else set()
    order = sorted(names, key=lambda key: names[key])
    embedding = {key for key, name in names.items() if name == "embed"}
    return embedding | set(Random(seed).sample(order, min(SAMPLED, len(order))))


class Mover:
    """Copies pieces between a GPU's memory and pinned memory of the host, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, pieces: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Copies that are whole when this returns."""
        return self._copied(pieces, torch.device("cpu"), waits=True)

    def to_device(self, pieces: Mapping[Hashable, Any], waits: bool = False) -> dict[Hashable, Any]:
        """Copies that are whole for whatever the current stream does next; waits: when this returns."""
        return self._copied(pieces, self.device, waits)

    def _copied(self, pieces: Mapping[Hashable, Any], device: torch.device, waits: bool) -> dict[Hashable, Any]:
        made, ours, theirs = {}, [], []
        for key, piece in pieces.items():
            parts = dict(_parts(piece))
            for name, part in parts.items():
                if isinstance(part, Tensor):
                    pinned = self._stream is not None and device.type == "cpu"
                    theirs.append(part)
                    ours.append(torch.empty_like(part, device=device, pin_memory=pinned))
                    parts[name] = ours[-1]
            made[key] = _with_parts(piece, parts)
        if not ours:
            return made
        if self._stream is None:
            torch._foreach_copy_(ours, theirs)
        else:
            current, stream = torch.cuda.current_stream(self.device), self._stream
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                torch._foreach_copy_(ours, theirs, non_blocking=True)
                done = stream.record_event()
            if waits:
                done.synchronize()
            else:
                current.wait_event(done)
        return made


# ---- who is in memory --------------------------------------------------------------------------------


@dataclass(eq=False)
class Hosted:
    """A model the engine knows, in memory or not."""

    name: str
    checkpoint: Checkpoint
    plan: WeightPlan
    max_position: int
    layout: KVLayout  # of its pages
    ttl: float | None = None  # seconds idle before it leaves the device; None: as the residency says
    model: Model | None = None  # while it is on the device
    idle_since: float = 0.0
    is_adding: bool = False  # nobody sees it yet
    twin: str = ""  # name of the same model in fewer bits, added with it
    owns_checkpoint: bool = True  # which is closed with it
    notes: list[str] = field(default_factory=list)  # matrices that run row by row here
    num_loads: int = 0
    partners: dict[str, int] = field(default_factory=dict)  # other hosted model -> lower layers in common, at least one
    boundaries: tuple[int, ...] = ()  # layers whose input a partner goes on from
    keys: dict[str, Hashable] = field(default_factory=dict)  # of its pieces in memory; as they were when it was loaded
    _keys: dict[int, dict[str, Hashable]] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        return (
            f"<hosted {self.name!r}: {self.config.arch}, {self.config.num_layers} layers, {self.plan.nbytes:,} bytes>"
        )

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
        threads = torch.get_num_threads()
        if threads not in self._keys:
            digests = self.tensor_digests
            self._keys[threads] = {
                name: (name, piece.how, tuple(digests[source] for source in piece.sources), threads)
                for name, piece in self.plan.pieces.items()
            }
        return self._keys[threads]

    def sizes(self, keys: Mapping[str, Hashable] | None = None) -> dict[Hashable, int]:
        """Key -> bytes of its pieces."""
        return {key: self.plan.pieces[name].nbytes for name, key in (keys or self.piece_keys()).items()}

    def read(self, name: str, checked: bool) -> QTensor:
        """A tensor as it is in the file; checked: as it was the first time."""
        checkpoint, info = self.checkpoint, self.checkpoint.tensors[name]
        data = checkpoint.raw(name)
        if checked and (found := tensor_digest(info, data)) != (expected := self.tensor_digests[name]):
            where = f"{checkpoint.path}: tensor {info.source!r}"
            raise CorruptCheckpoint(f"{where}: digest is {found}, expected {expected}, as when {self.name!r} was added")
        return QTensor.from_gguf(data, info.kind, info.shape)


class _Cancelled(Exception):
    """A prefetch that nobody wants any more."""


class _Load:
    """One model on its way to the device. What it brings is nobody's until it is committed."""

    def __init__(self, hosted: Hosted, keys: dict[str, Hashable], origin: Tier = "disk") -> None:
        self.hosted, self.keys, self.origin = hosted, keys, origin
        self.old_keys = hosted.keys
        self.found: dict[Hashable, Any] = {}  # on the device already
        self.copies: dict[Hashable, Any] = {}  # in the host's memory
        self.staged: dict[Hashable, Any] = {}
        self.digests: dict[Hashable, str] = {}  # of those copies that are checked
        self.saved: tuple[Snapshot, ...] = ()  # of both pools, from before
        self.rotten: Hashable = None  # the copy that is no longer what it was
        self.model: Model | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.thread: threading.Thread | None = None
        self.is_cancelled = False
        self.done: deque[tuple[int, int]] = deque()  # parts, of how many; not yet shown

    @property
    def is_flying(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def join(self, progress: Progress | None = None) -> None:
        """Until all is read and packed, or has failed; progress is called by who waits."""
        cpu.release_threads()
        thread = self.thread
        while thread is not None:
            is_last = not thread.is_alive()  # before looking: nothing comes after it
            while progress is not None and self.done:
                progress(*self.done.popleft())
            if is_last:
                break
            thread.join(None if progress is None else LOOK_AGAIN)

    @property
    def num_bytes(self) -> int:
        """That have to be moved."""
        return sum(size for key, size in self.hosted.sizes(self.keys).items() if key not in self.found)


class Residency:
    """Models under one budget of weight bytes on the device, and another one in the host's memory.

    Who leaves the device goes to the host's memory if that has room, else only its file stays; what models have in
    common is in memory once. On a CPU both are the same memory, and only the budget that pays changes. All calls come
    from one thread at a time; the one thread of its own, which reads a newcomer or the next model, touches nothing but
    what is handed to it and the record of what was probed.

    share: find out at `add` which lower layers compute the same bits.
    ttl, host_ttl: seconds idle before a model leaves the device, and then the host's memory; None: never.
    weight_check: of what is loaded again, and of what comes back from the host's memory.
    """

    def __init__(
        self,
        budget: int,
        arena: Arena,
        ledger: Ledger,
        events: Events,
        device: torch.device | str = "cpu",
        share: bool = True,
        *,
        host_budget: int = 0,
        policy: PoolPolicy = "lru",
        ttl: float | None = None,
        host_ttl: float | None = None,
        weight_check: WeightCheck = "sampled",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if weight_check not in WEIGHT_CHECKS:
            raise InvalidRequest(f"weight_check={weight_check!r}, expected one of {', '.join(WEIGHT_CHECKS)}")
        self.device = torch.device(device)
        self.pool = Pool(budget, policy)
        self.host = Pool(host_budget, policy)
        self.host_budget = host_budget
        self.arena = arena
        self.ledger = ledger
        self.events = events
        self.share = share
        self.ttl, self.host_ttl, self.weight_check = ttl, host_ttl, weight_check
        self._models: dict[str, Hosted] = {}  # by name, those that are being added too
        self.lent = 0  # bytes of the budget that KV pages have taken over
        self.reclaim_lent: Callable[[int], int] | None = None  # asks the pages for bytes; how many they give back
        self.on_swap: Callable[[float], None] | None = None  # told the seconds that it took to bring a model back
        self._clock = clock
        self._mover = None if self.device.type == "cpu" else Mover(self.device)
        self._pieces: dict[Hashable, Any] = {}  # on the device
        self._host_pieces: dict[Hashable, Any] = {}  # in the host's memory, and in no other
        self._digests: dict[Hashable, str] = {}  # of the latter
        self._num_moves = 0
        self._flight: _Load | None = None  # the prefetch that is not committed yet
        self._probed: dict[tuple[object, ...], str] = {}

    def __getitem__(self, name: str) -> Hosted:
        hosted = self._models.get(name)
        if hosted is None or hosted.is_adding:
            raise UnknownModel(f"no model named {name!r}; there are {', '.join(self.hosted) or 'none'}")
        return hosted

    @property
    def hosted(self) -> dict[str, Hosted]:
        """By name, those that were added."""
        return {name: hosted for name, hosted in self._models.items() if not hosted.is_adding}

    # ---- models

    def add(
        self,
        name: str,
        checkpoint: Checkpoint,
        weights: Weights,
        pinned: bool,
        progress: Progress | None = None,
        *,
        ttl: float | None = None,
    ) -> Hosted:
        """Plan, compare, make room, load. An error leaves no trace of the newcomer.

        ttl: of this model, instead of the residency's; math.inf: it stays.
        """
        hosted = self.sized(name, checkpoint, weights, ttl)
        load = self.begin(hosted, pinned)
        try:
            load.join(progress)
        except BaseException as error:
            self.abort(hosted, error)
            raise
        return self.finish(load)

    def sized(self, name: str, checkpoint: Checkpoint, weights: Weights, ttl: float | None = None) -> Hosted:
        """A model that may be added, its bytes exact. Nothing has been read but headers, and nothing is changed."""
        if not isinstance(name, str) or not name.isprintable():
            raise InvalidRequest(f"a model's name must be text in one line, got {brief(name)}")
        if not name:
            raise EmptyId("a model needs a name, got ''")
        if name in RESERVED_NAMES:
            raise InvalidRequest(f"a model cannot be named {name!r}, which says who drafts: draft={name!r}")
        if ttl is not None and not (is_number(ttl) and ttl >= 0):
            raise InvalidRequest(f"ttl={brief(ttl)}, expected seconds from 0 on, or None")
        if name in self._models:
            raise DuplicateId(f"a model named {name!r} is already there ({self._models[name].checkpoint.path})")
        config = checkpoint.config
        dtype = compute_dtype(weights, self.device)
        layout = self.arena.layout(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
        capacity = self.arena.max_bytes // layout.page_bytes * PAGE_TOKENS
        max_position = min(config.max_context, capacity) - 1
        plan = plan_weights(checkpoint, weights, max_position, self.device)
        self._reclaim(plan.nbytes - self.pool.budget)
        self.pool.check_total(name, plan.nbytes)
        return Hosted(name, checkpoint, plan, max_position, layout, ttl)

    def compare(self, hosted: Hosted) -> None:
        """Read the file once for the digests that `begin` compares; changes nothing here, so any thread may do it."""
        hosted.piece_keys()
        if self.share:
            hosted.band_digests  # noqa: B018  # cached

    def begin(self, hosted: Hosted, pinned: bool = False) -> _Load:
        """Make room for a newcomer and start to load it; nobody else sees it. `join` it while others run."""
        if hosted.name in self._models:
            raise DuplicateId(f"a model named {hosted.name!r} was added meanwhile")
        self._land()
        self._models[hosted.name] = hosted
        hosted.is_adding = True
        try:
            load = self._reserve(hosted, pinned)
            self._take_off(load, "admit")
        except BaseException:
            del self._models[hosted.name]
            raise
        return load

    def finish(self, load: _Load) -> Hosted:
        """The newcomer is there, or the error that its load ended with is raised and all is as it was."""
        hosted = load.hosted
        if self._flight is load:
            try:
                self._land(hosted)
            except BaseException as error:
                load.error = error
        if load.error is not None:
            self._models.pop(hosted.name, None)
            raise load.error
        partners = self._partners_of(hosted) if self.share else {}
        hosted.partners = partners
        for partner, layers in partners.items():
            self[partner].partners[hosted.name] = layers
        hosted.is_adding = False
        self._set_boundaries()
        return hosted

    def abort(self, hosted: Hosted, error: BaseException) -> None:
        """Whoever adds it has failed, or was interrupted: no trace of the newcomer."""
        load = self._flight
        if self._models.get(hosted.name) is not hosted:
            return
        if load is not None and load.hosted is hosted:
            self._drop(load)
            self._roll_back(load, error)
        elif self.pool.evict(hosted.name):
            self._leave([hosted.name], to_host=False)
        else:
            self.host.evict(hosted.name)
            self._balance()
        self._forget(hosted.name)

    def _partners_of(self, hosted: Hosted) -> dict[str, int]:
        common = {name: common_layers(hosted, other) for name, other in self.hosted.items()}
        return {name: layers for name, layers in common.items() if layers}

    def _set_boundaries(self) -> None:
        """A partner that shares everything takes whole pages and goes on from no layer."""
        for hosted in self.hosted.values():
            depths = {(n, hosted.config.num_layers, self[p].config.num_layers) for p, n in hosted.partners.items()}
            hosted.boundaries = tuple(sorted({n for n, *both in depths if [n, n] != both}))

    @contextmanager
    def lease(self, name: str) -> Iterator[Model]:
        """The model, on the device for as long as the block runs."""
        hosted = self[name]
        if hosted.model is None:
            model = self._bring_in(hosted, pinned=False)
        else:
            model = hosted.model
            self.pool.touch(name)
        self.pool.lease(name)
        try:
            yield model
        finally:
            self.pool.release(name)
            hosted.idle_since = self._clock()

    def is_resident(self, name: str) -> bool:
        return self[name].model is not None

    def state(self, name: str) -> Tier:
        if self[name].model is not None:
            return "device"
        if self._flight is not None and self._flight.hosted.name == name:
            return self._flight.origin
        return "host" if name in self.host else "disk"

    def shared_bytes(self, name: str) -> int:
        """Bytes of a model's weights that another one on the device holds too."""
        return self.pool.shared_bytes(name) if self.is_resident(name) else 0

    def page_in_bytes(self, name: str) -> int:
        """Bytes that have to be moved before the model can run."""
        hosted, flight = self[name], self._flight
        if hosted.model is not None or (flight is not None and flight.hosted is hosted and flight.model is not None):
            return 0
        return sum(size for key, size in hosted.sizes().items() if key not in self._pieces)

    def plan_pieces(self) -> dict[str, dict[Hashable, int]]:
        """Model -> its pieces and their bytes, for `sim.plan`."""
        return {name: hosted.sizes() for name, hosted in self.hosted.items()}

    def unload(self, name: str) -> None:
        """Give all memory of the weights back; the model stays known and loads from its file when its turn comes."""
        hosted = self[name]
        flight = self._flight
        if flight is not None and flight.hosted is hosted:
            self._drop(flight)
        else:
            self._land()
        if self.pool.evict(name):
            self._leave([name], to_host=False)
        elif self.host.evict(name):
            self._move_out([name])

    def remove(self, name: str) -> None:
        self.unload(name)
        gone = self[name]
        self._forget(name)
        if gone.owns_checkpoint and all(hosted.checkpoint is not gone.checkpoint for hosted in self._models.values()):
            gone.checkpoint.close()

    def _forget(self, name: str) -> None:
        del self._models[name]
        for hosted in self._models.values():
            hosted.partners.pop(name, None)
            hosted.twin = "" if hosted.twin == name else hosted.twin
        self._set_boundaries()
        for pool in (self.pool, self.host):
            pool.forget(name)

    def set_pinned(self, name: str, pinned: bool) -> None:
        """Pinning a model that was given up brings it back first."""
        hosted = self[name]
        if hosted.model is None and pinned:
            self._bring_in(hosted, pinned)
        if hosted.model is not None:
            self.pool[name].pinned = pinned

    @property
    def is_loading(self) -> bool:
        """Whether a thread brings a model in: who changes what is in memory would have to wait for it."""
        return self._flight is not None and self._flight.is_flying

    def join(self) -> None:
        """Wait for that thread; from any thread, while the lane goes on."""
        if (flight := self._flight) is not None and flight.is_flying:
            flight.join()

    def demote_idle(self, now: float | None = None, keep: Collection[str] = ()) -> float | None:
        """Models that were idle for longer than their time leave the device, or the host's memory.

        Seconds until the next one could be due; None: nobody waits. Pinned and leased models stay, and those in
        `keep`, which are not idle.
        """
        now = self._clock() if now is None else now
        for name in keep:
            if name in self._models:
                self._models[name].idle_since = now
        for hosted in list(self._models.values()):
            if (left := self._time_left(hosted, now)) is not None and left <= 0:
                if self.is_loading:
                    return LOOK_AGAIN
                self._land()
                if self.pool.evict(hosted.name):
                    self._leave([hosted.name], now=now)
                elif self.host.evict(hosted.name):
                    self._move_out([hosted.name])
        waits = [self._time_left(hosted, now) for hosted in self._models.values()]
        return min((max(left, 0.0) for left in waits if left is not None), default=None)

    def _time_left(self, hosted: Hosted, now: float) -> float | None:
        ttl = None
        if hosted.model is not None and self.pool[hosted.name].is_movable:
            ttl = self.ttl if hosted.ttl is None else hosted.ttl
        elif hosted.name in self.host:
            ttl = self.host_ttl
        return None if ttl is None or ttl == float("inf") else hosted.idle_since + ttl - now

    # ---- budgets

    def resize(self, budget: int) -> list[str]:
        """Change the configured budget; names given up, in that order. What is lent is asked for first."""
        self._land()
        budget = max(budget, 0)
        self._reclaim(self.pool.budget + self.lent - budget)
        if budget < self.lent:
            raise PinnedNoRoom(f"the new budget is {budget:,} bytes, but {self.lent:,} are lent to KV pages")
        victims = self.pool.resize(budget - self.lent)
        self._leave(victims)
        return victims

    def lend(self, num_bytes: int, keep: Collection[str] = ()) -> int:
        """Give up to num_bytes of the budget away, and idle unpinned models where they are in the way; bytes lent.

        Models in `keep` go last. As much stays as any hosted model needs beside those that are pinned or leased.
        """
        lent = min(num_bytes, self.lendable)
        if lent > 0:
            self._land()
            held = self._held()
            target = self.pool.budget - lent
            wanted = {key: size for one in keep if one in self.pool for key, size in self.pool[one].pieces.items()}
            with self._protected(keep):
                victims = self.pool.resize(max(target, sum((held | wanted).values())))
            victims += self.pool.resize(target)
            self.lent += lent
            self._leave(victims)
        return max(lent, 0)

    @property
    def lendable(self) -> int:
        """Bytes that `lend` could give; none while a model is on its way."""
        if self.is_loading:
            return 0
        held = self._held()
        least = max((sum((held | hosted.sizes()).values()) for hosted in self._models.values()), default=0)
        return max(self.pool.budget - least, 0)

    def _held(self) -> dict[Hashable, int]:
        """Pieces of models that are pinned or leased."""
        held = (self.pool[name] for name in self.pool.names() if not self.pool[name].is_movable)
        return {key: size for resident in held for key, size in resident.pieces.items()}

    def take_back(self, num_bytes: int) -> int:
        """Raise the budget again by what is given back of the lent bytes; by how many."""
        num_bytes = max(min(num_bytes, self.lent), 0)
        self.lent -= num_bytes
        self.pool.budget += num_bytes
        return num_bytes

    def _reclaim(self, num_bytes: int) -> None:
        """Ask the KV pages for bytes that the pool lacks."""
        wanted = min(num_bytes, self.lent)
        if wanted > 0 and self.reclaim_lent is not None:
            self.take_back(self.reclaim_lent(wanted))

    def reserve_host(self, owner: str, num_bytes: int) -> bool:
        """Set bytes of the host's budget aside for pages; idle weights give way.

        False if there are too few, or a model is on its way.
        """
        if num_bytes > self.host.budget or self.is_loading:
            return False
        self._land()
        self._move_out(self.host.resize(self.host.budget - num_bytes))
        self.ledger.set("host_kv", owner, self.ledger.of("host_kv").get(owner, 0) + num_bytes)
        return True

    def release_host(self, owner: str) -> None:
        self.host.budget += self.ledger.of("host_kv").get(owner, 0)
        self.ledger.set("host_kv", owner, 0)

    # ---- coming

    def _bring_in(self, hosted: Hosted, pinned: bool) -> Model:
        """Reserve, load, commit. An error leaves everything as it was, and what made room is back."""
        start = time.perf_counter()
        load = self._land(hosted)
        if load is None:
            load = self._reserve(hosted, pinned)
            try:
                with self.events.span("page_in", hosted.name, num_bytes=load.num_bytes):
                    self._fetch(load)
                    self._commit(load)
            except BaseException as error:
                self._roll_back(load, error)
                raise
            load.seconds = time.perf_counter() - start
        if self.on_swap is not None:
            self.on_swap(load.seconds)
        assert hosted.model is not None
        return hosted.model

    def _reserve(self, hosted: Hosted, pinned: bool = False, keep: Collection[str] = ()) -> _Load:
        """The pool makes room, and who has to leaves."""
        load = _Load(hosted, hosted.piece_keys(), "disk" if hosted.is_adding else self.state(hosted.name))
        sizes, held = hosted.sizes(), self.pool.pieces()
        self._reclaim(self.pool.used + sum(sizes[key] for key in sizes.keys() - held.keys()) - self.pool.budget)
        load.saved = self.pool.snapshot(), self.host.snapshot()
        try:
            with self._protected(keep):
                victims = self.pool.admit(hosted.name, sizes, pinned)
            self.host.evict(hosted.name)
            self._leave(victims)
            self._gather(load)
        except (TooLarge, PinnedNoRoom):  # nothing has changed
            raise
        except BaseException as error:
            self._roll_back(load, error)
            raise
        return load

    @contextmanager
    def _protected(self, names: Collection[str]) -> Iterator[None]:
        """None of them is given up inside."""
        leased = [name for name in dict.fromkeys(names) if name in self.pool]
        for name in leased:
            self.pool.lease(name)
        try:
            yield
        finally:
            for name in leased:
                self.pool.release(name)

    def _gather(self, load: _Load) -> None:
        """Hand it what is in memory of its pieces."""
        self._balance()
        keys = load.keys.values()
        load.found = {key: self._pieces[key] for key in keys if key in self._pieces}
        load.copies = {key: self._host_pieces[key] for key in keys if key in self._host_pieces}
        load.digests = {key: self._digests[key] for key in load.copies if key in self._digests}

    def _fetch(self, load: _Load, progress: Progress | None = None, to_host: bool = False) -> None:
        """Everything that takes long. Touches nothing but `load`, so that a thread may do it."""
        hosted, staged = load.hosted, load.staged
        for key, expected in load.digests.items():
            if (found := piece_digest(load.copies[key])) != expected:
                load.rotten = key
                piece = next(name for name, one in load.keys.items() if one == key)
                where = f"{hosted.name!r} in the host's memory: piece {piece!r}"
                raise CorruptCheckpoint(f"{where}: digest is {found}, expected {expected}; the copy is dropped")
        in_thread = load.thread is not None
        copies = load.copies if to_host or self._mover is None else self._mover.to_device(load.copies, waits=in_thread)
        staged.update(copies)
        there = load.found.keys() | staged.keys()
        new = [name for name, key in load.keys.items() if key not in there]
        sources = {source: source for name in new for source in hosted.plan.pieces[name].sources}
        seed = f"{hosted.name} {hosted.num_loads}"
        checked = _sampled(sources, self.weight_check, seed) if hosted.num_loads else set()

        def read(name: str) -> QTensor:
            return hosted.read(name, name in checked)

        def take(name: str, make: Callable[[], T]) -> T:
            key = load.keys[name]
            if key in load.found:
                found: T = load.found[key]
                return found
            if key not in staged:
                piece = make()
                staged[key] = self._mover.to_host({key: piece})[key] if to_host and self._mover else piece
            made: T = staged[key]
            return made

        load.model = load_model(hosted, self.device, read, take, self._settle, progress)

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

    def _commit(self, load: _Load, num_loads: int = 1) -> None:
        hosted, model = load.hosted, load.model
        assert model is not None
        self._pieces |= load.staged
        hosted.keys, hosted.model = load.keys, model
        hosted.notes = [name for name, q in model.weights() if q.layout.endswith("-rows")]
        hosted.idle_since = self._clock()
        self._balance()
        hosted.num_loads += num_loads

    def _roll_back(self, load: _Load, error: BaseException) -> None:
        """As if the model had never been asked for: who made room is back where it was, or the error says why not."""
        clear_frames(error.__traceback__)  # they hold pieces
        load.staged.clear()
        load.hosted.model = load.model = None
        load.hosted.keys = load.old_keys
        for pool, saved in zip((self.pool, self.host), load.saved, strict=True):
            _rewind(pool, saved)
        if load.rotten is not None:
            for name in self.host.names():
                if load.rotten in self.host[name].pieces:
                    self.host.evict(name)
        self._balance()
        for pool in (self.host, self.pool):
            for name in pool.names():
                self._bring_back(self._models[name], pool, error)

    def _bring_back(self, hosted: Hosted, pool: Pool, error: BaseException) -> None:
        to_host = pool is self.host
        held = {*self._pieces, *self._host_pieces}
        if held.issuperset(hosted.keys.values()) if to_host else hosted.model is not None:
            return
        load = _Load(hosted, hosted.keys)
        try:
            self._gather(load)
            self._fetch(load, to_host=to_host)
            if to_host:
                self._host_pieces |= load.staged
                self._balance()
            else:
                self._commit(load, num_loads=0)
        except BaseException as reason:
            hosted.model = None
            pool.evict(hosted.name)
            self._balance()
            error.add_note(f"{hosted.name!r} had made room and could not be brought back: {reason!r}")

    # ---- coming beforehand

    def prefetch(self, name: str, keep: Collection[str] = ()) -> bool:
        """Start to bring a model in beside what runs; True if that began.

        It does only if nobody has to leave who is pinned, leased or in `keep`, and one at a time. `lease` waits for
        it; whatever else changes who is in memory does too.
        """
        hosted, flight = self[name], self._flight
        if flight is not None and (flight.hosted is hosted or flight.is_flying):
            return False
        self._land()
        if hosted.model is not None:
            return False
        try:
            load = self._reserve(hosted, keep=keep)
        except (TooLarge, PinnedNoRoom):
            return False
        self._take_off(load, "prefetch")
        return True

    def _take_off(self, load: _Load, kind: Kind) -> None:
        """Let a thread do what takes long."""
        name, threads = load.hosted.name, torch.get_num_threads()
        load.thread = threading.Thread(target=self._fly, args=(load, kind, threads), name=f"{kind} {name}")
        self._flight = load
        try:
            load.thread.start()
        except BaseException as error:
            self._flight = None
            self._roll_back(load, error)
            raise

    def _fly(self, load: _Load, kind: Kind, threads: int) -> None:
        def go_on(done: int, of: int) -> None:
            if load.is_cancelled:
                raise _Cancelled
            load.done.append((done, of))

        start = time.perf_counter()
        try:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            num_bytes = load.hosted.plan.nbytes if kind == "admit" else load.num_bytes
            with self.events.span(kind, load.hosted.name, num_bytes=num_bytes):
                self._fetch(load, go_on)
        except BaseException as error:
            load.error = error
        load.seconds = time.perf_counter() - start

    def _land(self, wanted: Hosted | None = None) -> _Load | None:
        """Wait for the prefetch in flight, if there is one, and commit it; it, if it is the wanted model's.

        What failed is rolled back, and raised if it is the wanted one's: otherwise its next lease tries again.
        """
        load = self._flight
        if load is None:
            return None
        assert load.thread is not None
        load.thread.join()
        self._flight = None
        try:
            if load.error is not None:
                raise load.error
            self._commit(load)
        except BaseException as error:
            self._roll_back(load, error)
            if load.error is None or load.hosted is wanted:
                raise
            return None
        return load if load.hosted is wanted else None

    def _drop(self, load: _Load) -> None:
        """Stop a prefetch; who made room for it stays where it is."""
        assert load.thread is not None
        load.is_cancelled = True
        load.thread.join()
        self._flight = None

    # ---- going

    def _leave(self, names: Sequence[str], to_host: bool = True, now: float | None = None) -> None:
        """The pool has given them up: to the host's memory where that has room, else only their files stay."""
        before, gone = self.host.snapshot(), []
        for name in names:
            hosted = self._models[name]
            hosted.model, hosted.idle_since = None, self._clock() if now is None else now
            try:
                gone += self.host.admit(name, hosted.sizes(hosted.keys)) if to_host else []
            except (TooLarge, PinnedNoRoom):
                continue
        try:
            self._move_out([*names, *gone])
        except (MemoryError, RuntimeError):  # no memory that could be pinned
            self.host.restore(before)
            self._move_out(names)

    def _move_out(self, names: Sequence[str]) -> None:
        """Move or drop what nobody else keeps of models that have left the device, or the host's memory."""
        moved, on_device = set(self.pool.pieces()), self._pieces.keys()
        with ExitStack() as stack:
            for name in dict.fromkeys(names):
                kind: Kind = "page_out" if name in self.host else "evict"
                sizes = self._models[name].sizes(self._models[name].keys)
                if kind == "page_out":
                    sizes = {key: size for key, size in sizes.items() if key in on_device and key not in moved}
                    moved |= sizes.keys()
                stack.enter_context(self.events.span(kind, name, num_bytes=sum(sizes.values())))
            self._balance()
            gc.collect(0)

    def _balance(self) -> None:
        """Hold the pieces of who is in memory and no others, each in one place: the device if anybody there has it.

        Each is charged to the one who has had it longest. What is in the host's memory and awaited on the device stays.
        """
        on_device, in_host = self.pool.pieces(), self.host.pieces()
        leaving = {key: piece for key, piece in self._pieces.items() if key not in on_device and key in in_host}
        self._host_pieces |= self._moved_out(leaving)
        self._pieces = {key: piece for key, piece in self._pieces.items() if key in on_device}
        self._host_pieces = {
            key: piece
            for key, piece in self._host_pieces.items()
            if key not in self._pieces and (key in on_device or key in in_host)
        }
        self._digests = {key: digest for key, digest in self._digests.items() if key in self._host_pieces}
        for name, num_bytes in _changed(self.ledger.of("weights"), self.pool.charges()):
            self.ledger.set("weights", name, num_bytes)
        for name, num_bytes in _changed(self.ledger.of("host_weights"), self._host_charges()):
            self.ledger.set("host_weights", name, num_bytes)

    def _moved_out(self, pieces: dict[Hashable, Any]) -> dict[Hashable, Any]:
        """Pieces as they lie in the host's memory, with digests of those that will be checked."""
        if pieces and self._mover is not None:
            pieces = self._mover.to_host(pieces)
        if pieces and self.weight_check != "off":
            self._num_moves += 1
            owners = [self._models[name].keys for name in self.host.names()]
            names = {key: name for keys in owners for name, key in keys.items() if key in pieces}
            for key in _sampled(names, self.weight_check, str(self._num_moves)):
                self._digests[key] = piece_digest(pieces[key])
        return pieces

    def _host_charges(self) -> dict[str, int]:
        charges: dict[str, int] = {}
        seen: set[Hashable] = set()
        for name in self.host.names():
            mine = self.host[name].pieces.keys() & self._host_pieces.keys() - seen
            charges[name] = sum(self.host[name].pieces[key] for key in mine)
            seen |= mine
        return charges

    def check(self) -> None:
        """The invariants, for tests."""
        flight = self._flight
        for pool in (self.pool, self.host):
            pool.check()
        inside: Sequence[str] = [name for name, hosted in self._models.items() if hosted.model is not None]
        assert sorted([*inside, *([flight.hosted.name] if flight else [])]) == self.pool.names()
        assert not set(self.pool.names()) & set(self.host.names())
        assert self.ledger.of("weights") == {name: held for name, held in self.pool.charges().items() if held}
        assert self.ledger.total("weights") == self.pool.used
        assert self.ledger.total("host_weights") <= self.host.used
        if flight is None:
            on_device = self.pool.pieces()
            assert self._pieces.keys() == on_device.keys()
            assert self._host_pieces.keys() == self.host.pieces().keys() - on_device.keys()
            held = pieces_nbytes([*self._pieces.values(), *self._host_pieces.values()])
            assert self.ledger.total("weights") + self.ledger.total("host_weights") == held
        if any(self.pool[name].leases for name in inside):
            raise Leased("a lease is open outside a turn")


def _rewind(pool: Pool, saved: Snapshot) -> None:
    """Back to a snapshot, but for the budget and for what others were used and pinned meanwhile."""
    budget, since = pool.budget, {name: pool[name] for name in pool.names()}
    uses = sorted((resident.stamp, name) for name, resident in since.items() if resident.stamp > saved.clock)
    pins = {name: resident.pinned for name, resident in since.items()}
    pool.restore(saved)
    pool.budget = budget
    for name in pins.keys() & set(pool.names()):
        pool[name].pinned = pins[name]
    for _, name in uses:
        pool.touch(name)


def _changed(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """What to set so that a ledger's class reads as `after`."""
    return ((name, after.get(name, 0)) for name in dict.fromkeys((*before, *after)))
