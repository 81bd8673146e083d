"""How a model's matrices are stored and multiplied: formats, layouts, and exact bytes before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch

from csrc_triton import cpu, launch, t64
from csrc_triton.fused import num_distances
from csrc_triton.quant import DENSE, QTensor, cat_rows, dense, dequantize, quantize
from polymodel.checkpoint import Checkpoint
from polymodel.config import WEIGHTS, Weights
from polymodel.errors import InvalidRequest

GPU_GROUP = 128  # of weights="q4" on a GPU: exact integers in the MMA, one float32 scale a block


@dataclass(frozen=True, slots=True)
class Matrix:
    """One packed matrix to be: where its rows come from, how they are stored, how they are multiplied."""

    sources: tuple[str, ...]  # canonical tensor names, stacked by rows
    shape: tuple[int, int]
    fmt: str  # what the values are rounded to; a file's own format where they are not
    scheme: str  # csrc_triton.cpu scheme; on a GPU a layout of csrc_triton.t64, or "dense"
    nbytes: int  # exact, less what the embedding's own storage serves


@dataclass(frozen=True, slots=True)
class Piece:
    """What is loaded as one and in memory once: the same in two models if name, `how` and the sources' bytes are."""

    sources: tuple[str, ...]  # canonical tensor names
    how: tuple[object, ...]  # what decides its bits beside the sources
    nbytes: int  # exact


@dataclass(frozen=True, slots=True)
class WeightPlan:
    weights: Weights
    dtype: torch.dtype  # of activations and dense matrices
    matrices: dict[str, Matrix]
    embed_fmt: str
    pieces: dict[str, Piece]  # everything the model will hold, by name; a rope table's is its RopeConfig as text

    @property
    def nbytes(self) -> int:
        """Of everything the model will hold, exact."""
        return sum(piece.nbytes for piece in self.pieces.values())

    def stored(self, at: str) -> str:
        """How the matrices whose names begin so are stored and multiplied."""
        inside = ((name, m) for name, m in self.matrices.items() if name.startswith(at))
        return ", ".join(f"{name.removeprefix(at)} {m.fmt} {m.scheme}" for name, m in inside)


def plan_weights(
    checkpoint: Checkpoint, weights: Weights, max_position: int, device: torch.device | str = "cpu"
) -> WeightPlan:
    """Formats, schemes and exact bytes, from the headers alone."""
    if weights not in WEIGHTS:
        raise InvalidRequest(f"weights={weights!r}, expected one of {', '.join(WEIGHTS)}")
    config, info, device = checkpoint.config, checkpoint.tensors, torch.device(device)
    planner = (
        _GpuPlanner(checkpoint, weights, device) if launch.kernels_run_on(device) else _Planner(checkpoint, weights)
    )
    matrices: dict[str, Matrix] = {}
    for i in range(config.num_layers):
        matrices |= planner.layer(f"layers.{i}.")
    embed_fmt = _embed_format(info["embed"].kind, weights)
    matrices["head"] = planner.head(embed_fmt)
    pieces = _pieces(checkpoint, matrices, embed_fmt, planner.dtype, num_distances(max_position))
    return WeightPlan(weights, planner.dtype, matrices, embed_fmt, pieces)


def _pieces(
    checkpoint: Checkpoint, matrices: dict[str, Matrix], embed_fmt: str, dtype: torch.dtype, distances: int
) -> dict[str, Piece]:
    config, info = checkpoint.config, checkpoint.tensors
    embed_nbytes = storage_nbytes(info["embed"].shape, embed_fmt, info["embed"].nbytes)
    pieces = {"embed": Piece(("embed",), (embed_fmt,), embed_nbytes)}
    for name, m in matrices.items():
        embedding = (embed_fmt,) if m.sources == ("embed",) else ()  # a tied head is packed from it as it is stored
        pieces[name] = Piece(m.sources, (m.fmt, m.scheme, str(dtype), *embedding), m.nbytes)
    vectors: dict[str, tuple[str, ...]] = {name: (name,) for name in info if name.endswith("norm")}
    if config.qkv_bias:
        for i in range(config.num_layers):
            vectors[f"layers.{i}.qkv_bias"] = tuple(f"layers.{i}.{part}_bias" for part in "qkv")
    for name, sources in vectors.items():
        pieces[name] = Piece(sources, (), sum(4 * info[source].shape[1] for source in sources))
    for i in range(config.num_layers):
        pieces[str(config.layer_rope(i))] = Piece((), (config.head_dim, distances), 4 * config.head_dim * distances)
    return pieces


def compute_dtype(weights: Weights, device: torch.device) -> torch.dtype:
    """Of activations, dense matrices, keys and values. Kernels executed on a CPU take float32, as its own path does."""
    return torch.float32 if weights == "f32" or device.type == "cpu" else torch.bfloat16


def _embed_format(kind: str, weights: Weights) -> str:
    if weights == "file":
        return kind.lower()
    return weights if weights in ("f32", "bf16") else "q8"


def storage_nbytes(shape: tuple[int, int], fmt: str, file_nbytes: int) -> int:
    n, k = shape
    return {"f32": 4 * n * k, "bf16": 2 * n * k, "q8": n * k + 4 * n}.get(fmt, file_nbytes)


class _Planner:
    """For the CPU's schemes (csrc_triton.cpu)."""

    dtype = torch.float32

    def __init__(self, checkpoint: Checkpoint, weights: Weights) -> None:
        self.tensors, self.tied, self.weights = checkpoint.tensors, checkpoint.config.tied_head, weights

    def layer(self, at: str) -> dict[str, Matrix]:
        return {
            at + name: self.matrix(self.weights, tuple(at + part for part in parts))
            for name, parts in (("qkv", "qkv"), ("o", ("o",)), ("gate_up", ("gate", "up")), ("down", ("down",)))
        }

    def matrix(self, weights: Weights, sources: tuple[str, ...]) -> Matrix:
        shape, kinds = self.stacked(sources)
        if weights == "file":
            fmt = kinds.pop() if len(kinds) == 1 else "mixed"
            scheme = cpu.scheme_for(fmt, 32, shape)
        else:
            fmt, scheme = self.format_and_scheme(weights, shape)
        return Matrix(sources, shape, fmt, scheme, cpu.packed_nbytes(shape, scheme))

    def stacked(self, sources: tuple[str, ...]) -> tuple[tuple[int, int], set[str]]:
        infos = [self.tensors[name] for name in sources]
        return (sum(i.shape[0] for i in infos), infos[0].shape[1]), {i.kind.lower() for i in infos}

    def format_and_scheme(self, weights: Weights, shape: tuple[int, int]) -> tuple[str, str]:
        """A scheme that cannot take a shape gives way to half-precision panels of the same rounded values."""
        dense_scheme = cpu.scheme_for("f16", 0, shape)
        if weights == "q8":
            return "q8", "i8" if cpu.fits_int8(shape) else dense_scheme
        if weights == "q4":
            return "q4", "i4" if cpu.fits_int4(shape) else dense_scheme
        if weights == "w8a8":
            return "q8", "w8a8"
        return weights, "f32" if weights == "f32" else dense_scheme

    def head(self, embed_fmt: str) -> Matrix:
        matrix = self.matrix("q8" if self.weights == "q4" else self.weights, ("embed" if self.tied else "head",))
        (n, k), scheme = matrix.shape, matrix.scheme
        shared = scheme == "i8" or scheme == "f32" == embed_fmt or (scheme == "w8a8" and cpu.has_fast_int8())
        if not (self.tied and shared):
            return matrix
        served = (4 if matrix.fmt == "f32" else 1) * n * k
        return Matrix(matrix.sources, matrix.shape, matrix.fmt, scheme, matrix.nbytes - served)


class _GpuPlanner(_Planner):
    """For the T64 layout and dense matrices (csrc_triton.t64)."""

    def __init__(self, checkpoint: Checkpoint, weights: Weights, device: torch.device) -> None:
        super().__init__(checkpoint, weights)
        self.dtype = compute_dtype(weights, device)

    def layer(self, at: str) -> dict[str, Matrix]:
        """q, k and v of one format are one product; gate and up interleave where they have one format."""
        found = {}
        for _, run in groupby("qkv", key=lambda part: self.tensors[at + part].kind):
            parts = "".join(run)
            found[at + parts] = self.matrix(self.weights, tuple(at + part for part in parts))
        found[at + "o"] = self.matrix(self.weights, (at + "o",))
        found[at + "gate_up"] = self.matrix(self.weights, (at + "gate", at + "up"))
        return found | {at + "down": self.matrix(self.weights, (at + "down",))}

    def matrix(self, weights: Weights, sources: tuple[str, ...]) -> Matrix:
        shape, kinds = self.stacked(sources)
        fmt = weights if weights != "file" else kinds.pop() if len(kinds) == 1 else "mixed"
        fmt = "q8" if fmt == "w8a8" else fmt
        if fmt in DENSE or fmt == "mixed":
            nbytes = shape[0] * shape[1] * self.dtype.itemsize
            return Matrix(sources, shape, fmt, "dense", nbytes)
        layout = "t64-int8" if weights == "w8a8" else "t64-glu" if sources[0].endswith("gate") else "t64"
        group = {"q4": GPU_GROUP, "q8": 0}.get(fmt, 32)
        return Matrix(sources, shape, fmt, layout, t64.packed_nbytes(shape, fmt, group, layout))

    def head(self, embed_fmt: str) -> Matrix:
        return self.matrix("q8" if self.weights == "q4" else self.weights, ("embed" if self.tied else "head",))


# ---- packing -----------------------------------------------------------------------------------------


def pack_matrix(raws: list[QTensor], matrix: Matrix, dtype: torch.dtype, device: torch.device) -> QTensor:
    """A matrix from its sources as they are in the file, on the device; none stays a view of the file."""
    on_gpu = matrix.scheme in (*t64.LAYOUTS, "dense")
    as_filed = len({q.fmt for q in raws}) == 1 and raws[0].fmt == matrix.fmt
    if matrix.scheme == "t64-glu":
        gate, up = (q if as_filed else _rounded(dequantize(q), matrix.fmt, GPU_GROUP) for q in raws)
        return t64.pack_gate_up(gate.to(device), up.to(device))
    if matrix.scheme == "dense":
        return dense(torch.cat([dequantize(q).to(dtype) for q in raws]).to(device))
    if as_filed:
        q = cat_rows(raws) if len(raws) > 1 else raws[0]
    else:
        group = GPU_GROUP if on_gpu else 32
        q = _rounded(torch.cat([dequantize(q) for q in raws]), matrix.fmt, group)
    if on_gpu:
        return t64.pack_t64(q.to(device), matrix.scheme)
    packed = cpu.pack(q, matrix.scheme)
    if matrix.scheme == "f32" and len(raws) == 1 and raws[0].fmt == "f32":
        return replace(packed, parts={"weight": packed.parts["weight"].clone()})
    return packed


def _rounded(weight: torch.Tensor, fmt: str, group: int) -> QTensor:
    if fmt == "q8":
        return quantize(weight, "q8", group=None)
    if fmt == "q4":
        return quantize(weight, "q4", group=group)
    return dense(weight.bfloat16() if fmt == "bf16" else weight)
