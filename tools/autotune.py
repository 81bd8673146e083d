"""Choose tiles offline and write csrc_triton/tiles/sm_XX.json, or a table of your own.

    python tools/autotune.py                                     every kernel, for the GPU that is there
    python tools/autotune.py --kernel decode --weights q4 --shape 4096x4096 --out mine.json
    python tools/autotune.py --arch 90                           no GPU: ranked by the static model

A tile decides how a launch is cut, never what is added in which order, so it changes no bit: candidates that would
(other MMA, other fold, columns out of order) are refused, and a winner must give the default tile's bits and the
reference's values, on the GPU or in the interpreter, before it is written. Candidates that spill or ask for more
shared memory than the architecture has are refused too. With a GPU the rest are timed in CUDA graphs over weights
that together exceed L2; without one they are ranked by tools/roofline.py, and the table says so.

What was tried is kept beside the table until that is written, so a run that is cut short goes on where it stopped.
`csrc_triton.load_tiles(path)` takes a table from anywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("bench", "tests"))

import compile_check
import ir
import roofline
import torch
import triton
import typer
from dryrun import Launch, dryrun
from harness import (
    Pages,
    console,
    graph_us,
    has_gpu,
    made_up_pages,
    made_up_rows,
    made_up_weight,
    num_copies,
    num_layers,
    rows_at,
    rows_table,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from triton.errors import TritonError

from csrc_triton import attention, launch, t64
from csrc_triton.attention import paged_attention_ref
from csrc_triton.attention_plan import CHUNK, PAGE, make_plan
from csrc_triton.cpu_attention import Workspace
from csrc_triton.launch import Tile
from csrc_triton.qgemm import prefill
from csrc_triton.qmatmul import MAX_ROWS, decode, fold_bytes, matmul_bytes, matmul_ref, swiglu_matmul
from csrc_triton.quant import QTensor
from csrc_triton.w8a8 import w8a8_matmul, w8a8_matmul_bytes, w8a8_matmul_ref

MARGIN = {True: 0.01, False: 0.1}  # times closer than this are equal: measured, and of the model
USUAL_STAGES = 5
FINALISTS = 4  # candidates that are tried on more than one kind of weight
GAIN = 0.02  # a tile of a form's or shape's own must be this much faster than the more general one
# of results near 1, by root mean square
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
SHAPES = ((8192, 8192), (28672, 4096), (6144, 4096), (4096, 4096), (4096, 14336))
TIMED_SHAPES = 3  # of a kernel's shapes are timed, the first ones; the model takes them all
TIMED, STATIC = "timed", "static model, not timed"


# ---- what there is to tune -----------------------------------------------------------------------------


def form_name(w: QTensor) -> str:
    """As launchers name it when they look for a tile."""
    return "int8" if w.layout == "t64-int8" else "dense" if "weight" in w.parts else t64.form_of(w).name


def described(tunable: Tunable, w: QTensor, rows: int, tile: Tile) -> roofline.Launch:
    """Bytes and operations of a matmul of some rows, by formula."""
    (n, k), size = w.shape, {"bf16": 2, "int8": 1, "f32": 4}[tunable.product]
    blocks = -(-k // t64.COLS)
    splits = w.segments if tunable.splits and rows <= MAX_ROWS else 1
    out = 4 if tunable.product == "f32" else 2
    product_bytes = w8a8_matmul_bytes if size == 1 else partial(matmul_bytes, x_itemsize=size)
    nbytes = product_bytes(rows, n, k, w.nbytes, y_itemsize=out)
    return roofline.Launch(
        programs=-(-rows // tile.rows) * -(-n // tile.cols) * splits,
        blocks=blocks / splits,
        weight_block_bytes=w.nbytes / (-(-n // t64.ROWS) * blocks) * tile.cols / t64.ROWS,
        rows_block_bytes=min(rows, tile.rows) * t64.COLS * size,
        block_flops=2 * tile.rows * tile.cols * t64.COLS,
        dram_bytes=nbytes,
        kind=tunable.product,
        side_bytes=fold_bytes(rows, n, splits, out) if splits > 1 else 0,
        side_launches=int(splits > 1) + int(tunable.product == "int8"),
    )


def weight_copies(w: QTensor) -> list[QTensor]:
    """As many as together exceed L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    fresh = num_copies(w.nbytes, l2) - 1
    return [w] + [replace(w, parts={name: part.clone() for name, part in w.parts.items()}) for _ in range(fresh)]


@dataclass(frozen=True, slots=True)
class Tunable:
    """A kernel with entries in the tile table. Others join by adding theirs to TUNABLES.

    What is tuned is a matmul of a weight [n, k] of some kind; for attention the kind is that of pages, n sequences have
    k tokens each, and the rows are those of a sequence.
    """

    key: str  # in the table
    kernel: str  # the function that the tile cuts, as launches name it
    buckets: tuple[int, ...]  # rows up to which an entry holds; the last also stands for more
    tiles: Callable[[int], Iterable[Tile]]  # candidates of a bucket
    default: Tile  # whose bits the others must give
    ranked: tuple[str, ...]  # kinds of weight that decide between candidates
    kinds: tuple[str, ...]  # all that the tile must serve
    operands: Callable[[str, int, int, int, str, int | None], tuple[Tensor, Any]]  # kind, n, k, rows, device, seed
    run: Callable[[Tensor, Any], Tensor]
    reference: Callable[[Tensor, Any], Tensor]
    shapes: tuple[tuple[int, int], ...] = SHAPES
    product: str = "bf16"  # a key of roofline.Gpu.tflops
    splits: bool = False  # segments of up to 64 rows run in programs of their own
    by_warp: bool = False  # products by mma.sync even on sm_90
    also: tuple[Callable[[Tensor, Any], Tensor], ...] = ()  # other runs that the tile must serve
    # on a GPU and in the interpreter: n and k that results are checked on, odd ones
    checked: tuple[tuple[int, int], tuple[int, int]] = ((4032, 4096), (130, 512))
    form: Callable[[Any], str] = form_name
    copies: Callable[[Any], Sequence[Any]] = weight_copies  # together larger than L2
    describe: Callable[..., roofline.Launch] = described  # as `described`
    kernel_of: Callable[[compile_check.Compiled, int], roofline.Kernel] = roofline.kernel_of

    def product_of(self, kind: str) -> str:
        return "f32" if kind.startswith("f32") else self.product


def _grid(
    rows: Sequence[int], cols_warps: Sequence[tuple[int, int]], stages: Sequence[int]
) -> Callable[[int], list[Tile]]:
    return lambda bucket: [
        Tile(r, c, w, s) for r in rows for c, w in cols_warps for s in stages if r <= max(bucket, 16)
    ]


def _decode_tiles(bucket: int) -> list[Tile]:
    shapes = [(64, 4), (128, 4), (128, 8)] + [(64, 8)] * (bucket == 64)
    return [Tile(bucket, cols, warps, stages) for cols, warps in shapes for stages in (3, 4, 5, 6)]


def _prefill_tiles(bucket: int) -> list[Tile]:
    shapes = [(64, 128, 8), (64, 256, 8), (128, 64, 8), (128, 128, 8), (64, 64, 4)]
    if bucket <= 128:
        shapes += [(64, 128, 4)]
    return [Tile(rows, cols, warps, stages) for rows, cols, warps in shapes for stages in (2, 3, 4)]


QUANTISED = ("q4", "q4-zero", "q4-bias", "q8", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")


def _operands(
    dtype: torch.dtype = torch.bfloat16, segments: int | None = None
) -> Callable[[str, int, int, int, str, int | None], tuple[Tensor, QTensor]]:
    """Made-up weight and rows; segments: as many whatever the shape."""

    def make(kind: str, n: int, k: int, rows: int, device: str, seed: int | None) -> tuple[Tensor, QTensor]:
        w = made_up_weight(kind, n, k, device=device, seed=seed, dtype=dtype)
        x = made_up_rows(rows, k, dtype, device=device, seed=None if seed is None else seed + 1)
        count = 1 if kind.endswith("-glu") else segments  # the fused epilogue is that of one segment
        return x, w if count is None else replace(w, segments=count)

    return make


def _decode(x: Tensor, w: QTensor) -> Tensor:
    return swiglu_matmul(x, w) if w.layout == "t64-glu" else decode(x, w, None, None, x.dtype, None)


def _prefill(x: Tensor, w: QTensor) -> Tensor:
    """Straight from the codes, however many rows."""
    return prefill(x, w, None, None, x.dtype, torch.empty(0, dtype=torch.uint8, device=x.device))


def _reference(x: Tensor, w: QTensor) -> Tensor:
    if "weight" in w.parts and "scale" in w.parts:  # written out
        scale = w.parts["scale"].transpose(1, 2).flatten(0, 1).repeat_interleave(t64.COLS, dim=1)
        dense = w.parts["weight"].double() * scale
        return x.double() @ dense[: w.shape[0], : w.shape[1]].T
    return matmul_ref(x, w)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of sequences' pages, and what calls on all of them share."""

    pages: Pages
    parts: tuple[tuple[int, int, int], ...]  # as in Pages.attend
    spaces: dict[Any, Workspace] = field(default_factory=dict)  # by plan
    layer: int = 0


PAGE_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "int8": torch.int8, "f32": torch.float32}
HEADS, KV_HEADS = 32, 8


def _sequences(kind: str, n: int, k: int, rows: int, device: str, seed: int | None) -> tuple[Tensor, Layer]:
    """The last tokens of n sequences of k, as many as are `rows` rows; kind: of the pages, "int8-128"."""
    word, dim = kind.split("-")[0], int(kind.split("-")[1])
    tokens, dtype = max(1, rows * KV_HEADS // HEADS), PAGE_DTYPES[word]
    layers = num_layers(2 * n * k * KV_HEADS * dim * dtype.itemsize) if device == "cuda" else 1
    pages = made_up_pages([k] * n, KV_HEADS, dim, dtype=dtype, layers=layers, device=device, seed=seed)
    q = made_up_rows(n * tokens, HEADS * dim, torch.bfloat16 if word == "int8" else dtype, device=device, seed=seed)
    return q.view(-1, HEADS, dim), Layer(pages, tuple((s, k - tokens, k) for s in range(n)))


def _attend(q: Tensor, w: Layer, *, longest_whole: int) -> Tensor:
    plan = longest_whole, attention.tile_of(q, w.pages.layout, len(q))
    space = w.spaces.setdefault(plan, Workspace())
    with mock.patch.object(attention, "make_plan", partial(make_plan, longest_whole=longest_whole)):
        return w.pages.attend(q, w.parts, w.layer, workspace=space)


def _attention_reference(q: Tensor, w: Layer) -> Tensor:
    p = w.pages
    rope = replace(p.rope, cos=p.rope.cos.cpu(), sin=p.rope.sin.cpu())
    exact = paged_attention_ref(
        *(q.cpu(), p.arena.cpu(), p.layout, w.layer, p.table, *rows_at(w.parts), rope),
        scale=p.layout.head_dim**-0.5,
        by_kernels=True,
    )
    return exact.to(q.device)


def _pages_form(w: Layer) -> str:
    return attention.tile_kind(w.pages.layout)


def _attention_described(tunable: Tunable, w: Layer, rows: int, tile: Tile) -> roofline.Launch:
    """With a program for each chunk."""
    layout, lengths = w.pages.layout, w.pages.lengths
    tokens = w.parts[0][2] - w.parts[0][1]
    tiles = -(-tokens * HEADS // KV_HEADS // tile.rows)
    chunks = [-(-length // (CHUNK * PAGE)) for length in lengths]
    work = roofline.attention_launch(
        tiles * sum(chunks),
        tiles * sum(-(-length // PAGE) for length in lengths),
        tile_rows=tile.rows,
        kv_heads=KV_HEADS,
        dim=layout.head_dim,
        token_bytes=layout.token_bytes,
        dram_bytes=sum(lengths) * layout.token_bytes,
    )
    if layout.dtype == torch.float32:
        work = replace(work, kind="f32")
    return roofline.with_fold(work, tokens * sum(chunks), max(chunks), HEADS, layout.head_dim)


_MATMUL: Mapping[str, Any] = {"reference": _reference}
TUNABLES = (
    Tunable(
        key="decode",
        kernel="_dequant_matmul_kernel",
        buckets=(16, 32, 64),
        tiles=_decode_tiles,
        default=Tile(16, 64, 4, 2),
        ranked=("q4", "q4_k"),
        kinds=(*QUANTISED, "dense", "q4-glu", "q4_k-glu", "q6_k-glu", "q8-glu"),
        operands=_operands(),
        run=_decode,
        splits=True,
        **_MATMUL,
    ),
    Tunable(
        key="decode-f32",
        kernel="_dequant_matmul_kernel",
        buckets=(16,),
        tiles=_grid((16,), ((64, 4), (64, 8)), (2, 3)),
        default=Tile(16, 64, 4, 2),
        ranked=("q4",),
        kinds=("q4", "q4-bias", "q8", "q4_k", "q6_k", "dense"),
        operands=_operands(torch.float32),
        run=_decode,
        shapes=((4096, 4096),),
        product="f32",
        splits=True,
        **_MATMUL,
    ),
    Tunable(
        key="prefill",
        kernel="_prefill_gemm_kernel",
        buckets=(128, 1024),
        tiles=_prefill_tiles,
        default=Tile(64, 128, 8, 2),
        ranked=("q4", "q4_k"),
        kinds=QUANTISED,
        operands=_operands(segments=1),
        run=_prefill,
        shapes=((28672, 4096),),
        **_MATMUL,
    ),
    Tunable(
        key="prefill-fold",
        kernel="_prefill_gemm_kernel",
        buckets=(128, 1024),
        tiles=_prefill_tiles,
        default=Tile(64, 128, 8, 2),
        ranked=("q4", "q4_k"),
        kinds=QUANTISED,
        operands=_operands(segments=3),
        run=_prefill,
        shapes=((8192, 8192), (6144, 4096), (4096, 4096)),
        **_MATMUL,
    ),
    Tunable(
        key="prefill-f32",
        kernel="_prefill_gemm_kernel",
        buckets=(64,),
        tiles=_grid((16, 32, 64), ((64, 4), (64, 8)), (2,)),
        default=Tile(16, 64, 4, 2),
        ranked=("q4",),
        kinds=("q4", "q4-bias", "q8", "q4_k", "q6_k", "dense"),
        operands=_operands(torch.float32, segments=3),
        run=_prefill,
        shapes=((4096, 4096),),
        product="f32",
        **_MATMUL,
    ),
    Tunable(
        key="dense",
        kernel="_prefill_gemm_kernel",
        buckets=(128, 1024),
        tiles=_prefill_tiles,
        default=Tile(64, 128, 8, 2),
        ranked=("scratch", "dense"),
        kinds=("scratch", "dense"),
        operands=_operands(segments=1),
        run=_prefill,
        shapes=((28672, 4096),),
        **_MATMUL,
    ),
    Tunable(
        key="dense-fold",
        kernel="_prefill_gemm_kernel",
        buckets=(128, 1024),
        tiles=_prefill_tiles,
        default=Tile(64, 128, 8, 2),
        ranked=("scratch", "dense"),
        kinds=("scratch", "dense"),
        operands=_operands(segments=3),
        run=_prefill,
        shapes=((8192, 8192), (6144, 4096), (4096, 4096)),
        **_MATMUL,
    ),
    Tunable(
        key="w8a8",
        kernel="_w8a8_kernel",
        buckets=(16, 64, 1024),
        tiles=lambda bucket: _decode_tiles(bucket) if bucket <= 64 else _prefill_tiles(bucket),
        default=Tile(16, 64, 4, 2),
        ranked=("w8a8",),
        kinds=("w8a8",),
        operands=_operands(),
        run=w8a8_matmul,
        reference=w8a8_matmul_ref,
        product="int8",
        splits=True,
    ),
    Tunable(
        key="attention",
        kernel="_attention_kernel",
        buckets=(16, 32),
        tiles=lambda bucket: [Tile(rows, 64, 4, s) for rows in (16, 32) if rows <= bucket for s in (3, 5, 7)],
        default=Tile(16, 64, 4, 5),
        ranked=("bf16-128", "bf16-64"),
        kinds=tuple(f"{kind}-{dim}" for kind in ("bf16", "f16", "int8", "f32") for dim in (128, 64, 256, 32)),
        operands=_sequences,
        run=partial(_attend, longest_whole=0),
        reference=_attention_reference,
        shapes=((32, 4096), (1, 32768)),
        product="bf16 by warp",
        by_warp=True,
        also=(partial(_attend, longest_whole=10**9),),
        checked=((3, 1100), (1, 520)),
        form=_pages_form,
        copies=lambda w: [replace(w, layer=layer) for layer in range(w.pages.layout.num_layers)],
        describe=_attention_described,
        kernel_of=lambda found, stages: roofline.attention_kernel(found.launch, stages),
    ),
)


def keeps_bits(tile: Tile) -> bool:
    """Whether wgmma takes the tile: 64 rows of the weight, a warpgroup, 16 rows of activations. mma.sync would too."""
    return all(getattr(tile, field) >= least for field, least in launch.MIN_TILE.items())


ATTENTION = next(tunable for tunable in TUNABLES if tunable.key == "attention")


def table_of(arch: int, key: str, tile: Tile) -> dict[str, Any]:
    """A table in which every launch of one kernel takes one tile."""
    return {"arch": arch, "tiles": {key: {"16": asdict(tile)}}}


# ---- one candidate -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate on one weight: its time, or why it is out."""

    us: float | None
    why: str  # the bound of the static model, or the reason of a refusal

    @property
    def good(self) -> bool:
        return self.us is not None


@dataclass(frozen=True, slots=True)
class Point:
    """Where a candidate is tried."""

    kind: str
    n: int
    k: int
    rows: int


def compiled(
    tunable: Tunable, point: Point, tile: Tile, arch: int, run: Callable[[Tensor, Any], Tensor] | None = None
) -> tuple[Launch, int]:
    """The launch that the tile cuts, as a dry run sees it, and how many there are around it."""
    x, w = tunable.operands(point.kind, point.n, point.k, point.rows, "cpu", None)
    with launch.tiles_from(table_of(arch, tunable.key, tile)), dryrun(arch) as launches:
        (run or tunable.run)(x, w)
    main = [found for found in launches if found.name == tunable.kernel]
    if len(main) != 1:
        raise ValueError(f"{tunable.key}: expected one launch of {tunable.kernel}, got {[f.name for f in launches]}")
    return main[0], len(launches) - 1


@cache
def examined(tunable: Tunable, kind: str, rows: int, tile: Tile, arch: int) -> roofline.Kernel | str:
    """What a candidate compiles to for the kernel's first shape, or why it may not be chosen."""
    if not keeps_bits(tile):
        return "another MMA: bits could change"
    kernels, problems = [], []
    for run in (tunable.run, *tunable.also):
        try:
            main, _ = compiled(tunable, Point(kind, *tunable.shapes[0], rows), tile, arch, run)
        except TritonError as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        found = compile_check.Compiled(main)
        kernels.append(tunable.kernel_of(found, tile.stages))
        problems += _problems(tunable, kind, tile, run, found)
    return "; ".join(problems) or kernels[0]


def _problems(
    tunable: Tunable, kind: str, tile: Tile, run: Callable[[Tensor, Any], Tensor], found: compile_check.Compiled
) -> list[str]:
    mma = {"bf16": "float", "bf16 by warp": "float", "int8": "int8"}.get(tunable.product_of(kind), "none")
    case = compile_check.Case(tunable.key, found.arch, tunable.kernel, lambda: None, mma=mma)
    checks = (compile_check.check_resources, compile_check.check_layout, compile_check.check_barrier)
    problems = [problem for check in checks for problem in check(found, case)]
    if tile != tunable.default:
        expected = _sums_of(tunable, kind, found.arch, run)
        if (digest := found.fingerprint.digest) != expected:
            problems.append(f"sums in another order: {digest} instead of {expected}")
    kinds = {i.name for i in found.program.instructions if i.is_mma}
    wanted = compile_check.MMA_OF.get((mma, found.arch == 90 and not tunable.by_warp))
    if mma != "none" and found.arch in (80, 86, 89, 90, 120) and kinds != {wanted}:
        problems.append(f"products by {', '.join(sorted(kinds))} instead of {wanted}")
    return problems


@cache
def _sums_of(tunable: Tunable, kind: str, arch: int, run: Callable[[Tensor, Any], Tensor]) -> str:
    """Digest of what the default tile adds up in which order."""
    main, _ = compiled(tunable, Point(kind, *tunable.shapes[0], tunable.buckets[0]), tunable.default, arch, run)
    return ir.fingerprint(main.asm["ttir"]).digest


def predicted(tunable: Tunable, point: Point, tile: Tile, kernel: roofline.Kernel) -> roofline.Prediction:
    """The static model's time of a candidate."""
    _, w = tunable.operands(point.kind, point.n, point.k, point.rows, "cpu", None)
    return roofline.predict(kernel, tunable.describe(tunable, w, point.rows, tile), roofline.MODELLED[kernel.arch])


def timed(tunable: Tunable, point: Point, tile: Tile, arch: int) -> float:
    """Microseconds on the GPU that is there."""
    x, first = tunable.operands(point.kind, point.n, point.k, point.rows, "cuda", 0)
    with launch.tiles_from(table_of(arch, tunable.key, tile)):
        return graph_us([partial(tunable.run, x, w) for w in tunable.copies(first)], seconds=0.03)


def check_winner(tunable: Tunable, kind: str, bucket: int, tile: Tile, arch: int, *, gpu: bool) -> str | None:
    """What is wrong with a tile's results, on the GPU or in the interpreter; None where nothing is.

    Values are held to the float64 reference, bits to those of the default tile, on odd sizes.
    """
    (n, k), device = tunable.checked[not gpu], "cuda" if gpu else "cpu"
    rows = bucket - 3 if gpu or bucket <= 64 else 130
    x, w = tunable.operands(kind, n, k, rows, device, 3)
    if not gpu and isinstance(w, QTensor) and w.segments > 2:
        w = replace(w, segments=2)
    for run in (tunable.run, *tunable.also):
        with nullcontext() if gpu else _interpreted(arch):
            results = []
            for cut in (tile, tunable.default):
                with launch.tiles_from(table_of(arch, tunable.key, cut)):
                    results.append(run(x, w))
            with launch.tiles_from(table_of(arch, tunable.key, tunable.default)):
                exact = tunable.reference(x, w)
        chosen, default = results
        ints = {2: torch.int16, 4: torch.int32}[chosen.element_size()]
        if not torch.equal(chosen.view(ints), default.view(ints)):
            differ = int((chosen.view(ints) != default.view(ints)).sum())
            return f"{differ} of {chosen.numel()} results differ in bits from those of the default tile"
        error = float((chosen.double() - exact).norm() / exact.norm())
        if not error <= (allowed := TOLERANCE[chosen.dtype]):
            return f"relative error {error:.2g} against float64, more than {allowed:.2g}"
    return None


def _interpreted(arch: int) -> Any:
    from interpreter import interpreted

    return interpreted(arch, races=False, sequential_dot=True)


# ---- a run ---------------------------------------------------------------------------------------------


class Journal:
    """Trials kept in a file, a line each, as they are made; those of other sources, compilers or GPUs do not count."""

    def __init__(self, path: Path, context: str) -> None:
        self.path = path
        self.context = context
        self.known: dict[str, Trial] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue  # cut short while it was written
                if entry["context"] == context:
                    self.known[entry["key"]] = Trial(entry["us"], entry["why"])

    def trial(self, key: str, make: Callable[[], Trial]) -> Trial:
        if key not in self.known:
            self.known[key] = trial = make()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"context": self.context, "key": key, **asdict(trial)}) + "\n")
        return self.known[key]


def source_digest() -> str:
    """Of the kernels and of what ranks them."""
    files = [*sorted(Path(launch.__file__).parent.glob("*.py")), Path(roofline.__file__), Path(__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


@dataclass(slots=True)
class Tuner:
    """Tries candidates and fills a table."""

    arch: int
    gpu: str | None  # its name; None: static model and interpreter
    journal: Journal
    deadline: float  # of time.monotonic()
    report: list[dict[str, Any]] = field(default_factory=list)

    def trial(self, tunable: Tunable, point: Point, tile: Tile) -> Trial:
        if time.monotonic() > self.deadline:
            raise TimeoutError
        key = f"{tunable.key} {point.kind} {point.n}x{point.k} {point.rows} {tile}"
        return self.journal.trial(key, lambda: self._try(tunable, point, tile))

    def _try(self, tunable: Tunable, point: Point, tile: Tile) -> Trial:
        kernel = examined(tunable, point.kind, point.rows, tile, self.arch)
        if isinstance(kernel, str):
            return Trial(None, kernel)
        if self.gpu is not None:
            return Trial(timed(tunable, point, tile, self.arch), TIMED)
        prediction = predicted(tunable, point, tile, kernel)
        return Trial(prediction.us, prediction.bound)

    def best(
        self, tunable: Tunable, kinds: Sequence[str], shapes: Sequence[tuple[int, int]], bucket: int
    ) -> list[tuple[float, Tile]]:
        """Candidates that no kind and shape refuses, by the geometric mean of their times, fastest first.

        The first kind tries all, each further one the best few that it takes.
        """
        candidates, limit = list(tunable.tiles(bucket)), None
        times: dict[Tile, list[float]] = {tile: [] for tile in candidates}
        means: dict[Tile, float] = {}
        for kind in kinds:
            means = {}
            for tile in candidates:
                if len(means) == limit:
                    break
                trials = [self.trial(tunable, Point(kind, n, k, bucket), tile) for n, k in shapes]
                good = [trial.us for trial in trials if trial.us is not None]
                if len(good) == len(trials):
                    times[tile] += good
                    means[tile] = statistics.geometric_mean(times[tile])
            candidates, limit = ordered(means, MARGIN[self.gpu is not None]), FINALISTS
        return [(means[tile], tile) for tile in candidates]

    def choose(
        self, tunable: Tunable, kinds: Sequence[str], shapes: Sequence[tuple[int, int]], bucket: int
    ) -> tuple[Tile, float]:
        """The fastest tile whose results hold."""
        ranked = self.best(tunable, kinds, shapes, bucket)
        for us, tile in ranked:
            problem = check_winner(tunable, kinds[0], bucket, tile, self.arch, gpu=self.gpu is not None)
            if problem is None:
                return tile, us
            self.note(tunable, bucket, tile, us, f"refused: {problem}")
        raise ValueError(f"{tunable.key}, {bucket} rows: no candidate of {len(set(tunable.tiles(bucket)))} holds")

    def shapes(self, tunable: Tunable) -> tuple[tuple[int, int], ...]:
        return tunable.shapes if self.gpu is None else tunable.shapes[:TIMED_SHAPES]

    def note(self, tunable: Tunable, bucket: int, tile: Tile, us: float, what: str, key: str = "") -> None:
        row = {"key": key or tunable.key, "rows": bucket, "us": us, "what": what}
        self.report.append(row | {"tile": f"{tile.rows}x{tile.cols}, {tile.warps} warps, {tile.stages} stages"})


def ordered(times: Mapping[Tile, float], margin: float) -> list[Tile]:
    """Fastest first; of those within the margin the narrowest, of equals the one with the usual number of stages."""
    if not times:
        return []
    limit = min(times.values()) * (1 + margin)

    def key(tile: Tile) -> tuple[float, ...]:
        us = times[tile]
        near = (0.0, tile.cols, tile.warps) if us <= limit else (us,)
        return (*near, round(math.log(us), 2), abs(tile.stages - USUAL_STAGES), -tile.stages)

    return sorted(times, key=key)


def tune(
    tuner: Tuner,
    tunables: Sequence[Tunable],
    weights: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    buckets: Sequence[int],
) -> Iterator[tuple[str, str, Tile]]:
    """Entries (key, bucket, tile). Named weights give entries of their forms, named shapes those of their shapes."""
    for tunable in tunables:
        for bucket in tunable.buckets:
            if buckets and bucket not in buckets:
                continue
            if not weights and not shapes:
                yield from _general(tuner, tunable, bucket)
            else:
                yield from _particular(tuner, tunable, bucket, weights, shapes)


def _general(tuner: Tuner, tunable: Tunable, bucket: int) -> Iterator[tuple[str, str, Tile]]:
    """One tile for the kernel; forms that it spills or overflows for, or on a GPU lose by it, get their own."""
    general, us = tuner.choose(tunable, tunable.ranked, tuner.shapes(tunable), bucket)
    tuner.note(tunable, bucket, general, us, "chosen")
    yield tunable.key, str(bucket), general
    n, k = tunable.shapes[0]
    forms: dict[str, list[str]] = {}
    for kind in tunable.kinds:
        forms.setdefault(tunable.form(tunable.operands(kind, n, k, 1, "cpu", None)[1]), []).append(kind)
    for form, kinds in forms.items():
        fits = all(tuner.trial(tunable, Point(kind, n, k, bucket), general).good for kind in kinds)
        if fits and (tuner.gpu is None or kinds[0] not in tunable.ranked):
            continue
        tile, us = tuner.choose(tunable, kinds, tuner.shapes(tunable), bucket)
        if fits:
            points = [Point(kind, *shape, bucket) for kind in kinds for shape in tuner.shapes(tunable)]
            trials = [tuner.trial(tunable, point, general).us for point in points]
            if us > (1 - GAIN) * statistics.geometric_mean([t for t in trials if t is not None]):
                continue
        tuner.note(tunable, bucket, tile, us, "chosen", f"{tunable.key}/{form}")
        yield f"{tunable.key}/{form}", str(bucket), tile


def _particular(
    tuner: Tuner, tunable: Tunable, bucket: int, weights: Sequence[str], shapes: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, str, Tile]]:
    for kind in weights or tunable.ranked:
        if kind not in tunable.kinds:
            continue
        for shape in shapes or [None]:
            tile, us = tuner.choose(tunable, (kind,), tuner.shapes(tunable) if shape is None else (shape,), bucket)
            _, w = tunable.operands(kind, *(shape or tunable.shapes[0]), 1, "cpu", None)
            key = f"{tunable.key}/{tunable.form(w)}" + ("" if shape is None else f"/{shape[0]}x{shape[1]}")
            tuner.note(tunable, bucket, tile, us, "chosen", key)
            yield key, str(bucket), tile


def fill_buckets(tiles: dict[str, dict[str, Any]]) -> None:
    """A form's or shape's entry replaces the more general one whole: give it the buckets it has none for."""
    for key in sorted(tiles, key=lambda key: key.count("/")):
        head, slash, _ = key.rpartition("/")
        while slash and head not in tiles:
            head, slash, _ = head.rpartition("/")
        if slash:
            tiles[key] = tiles[head] | tiles[key]


def table_text(table: Mapping[str, Any]) -> str:
    """JSON with a tile a line."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in table.items() if name != "tiles"]
    keys = []
    for key, buckets in table["tiles"].items():
        entries = [f"   {json.dumps(b)}: {json.dumps(buckets[b])}" for b in sorted(buckets, key=int)]
        keys.append(f"  {json.dumps(key)}: {{\n" + ",\n".join(entries) + "\n  }")
    return "\n".join(["{", *lines, ' "tiles": {', ",\n".join(keys), " }", "}"]) + "\n"


def make_table(
    arch: int,
    gpu: str | None,
    path: Path,
    tunables: Sequence[Tunable] = TUNABLES,
    weights: Sequence[str] = (),
    shapes: Sequence[tuple[int, int]] = (),
    buckets: Sequence[int] = (),
    minutes: float = 1e6,
    screen: Console | None = None,
) -> bool:
    """Write the table, or on running out of `minutes` only what was tried; whether the table was written.

    gpu: the name of the GPU to time on; None ranks by the static model. Entries for named weights, shapes, buckets or
    kernels join those of the table that is there; a whole run starts a new one.
    """
    screen = screen or console()
    if gpu is None:
        name = roofline.MODELLED[arch].name
        screen.print(f"no GPU: tiles of sm_{arch} are ranked by the static model of {name}, not timed")
    context = f"{source_digest()} triton {triton.__version__} {gpu or 'static'} sm_{arch}"
    tuner = Tuner(arch, gpu, Journal(path.with_name(path.name + ".trials"), context), time.monotonic() + 60 * minutes)
    stamp = f"{TIMED} on {gpu}" if gpu else STATIC
    fresh: dict[str, dict[str, Any]] = {}
    finished = True
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=screen) as progress:
        total = sum(not buckets or bucket in buckets for t in tunables for bucket in t.buckets)
        task, before = progress.add_task("tiles", total=total), None
        try:
            for key, rows, tile in tune(tuner, tunables, weights, shapes, buckets):
                fresh.setdefault(key, {})[rows] = asdict(tile)
                here = (key.split("/")[0], rows)
                progress.update(task, description=f"{here[0]}, {rows} rows", advance=int(here != before))
                before = here
        except TimeoutError:
            finished = False
    screen.print(rows_table(f"sm_{arch}: {stamp}", tuner.report, ("key", "rows", "tile", "us", "what")))
    if not finished:
        screen.print(f"out of time: nothing written to {path}; run the same command again to go on")
        return False
    whole = len(tunables) == len(TUNABLES) and not (weights or shapes or buckets)
    known = {} if whole else json.loads(path.read_text()) if path.exists() else launch.tile_table(arch)
    tiles = {key: dict(entries) for key, entries in known.get("tiles", {}).items()}
    for key, entries in fresh.items():
        tiles[key] = tiles.get(key, {}) | entries
    fill_buckets(tiles)
    sources = {key: known.get("sources", {}).get(key, known.get("source")) for key in tiles} | dict.fromkeys(
        fresh, stamp
    )
    table = {
        "arch": arch,
        "date": time.strftime("%Y-%m-%d"),
        "gpu": gpu,
        "triton": triton.__version__,
        "source": stamp if set(sources.values()) == {stamp} else "see sources",
        "sources": sources,
        "tiles": tiles,
    }
    if table["source"] == stamp:
        del table["sources"]
    launch.check_tiles(table, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table_text(table))
    tuner.journal.path.unlink(missing_ok=True)
    screen.print(f"{path}: {len(tiles)} keys")
    return True


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    arch: Annotated[int | None, typer.Option(help="as 80 or 90; that of the GPU where there is one")] = None,
    out: Annotated[Path | None, typer.Option(help="the table; the package's own where not given")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="only this key of the table; may be repeated")] = None,
    weights: Annotated[list[str] | None, typer.Option(help="entries for the form of this kind of weight only")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="entries for this weight shape only, as 4096x14336")] = None,
    bucket: Annotated[list[int] | None, typer.Option(help="only this bucket of rows")] = None,
    minutes: Annotated[float, typer.Option(help="stop after this long; run again to go on")] = 1e6,
    static: Annotated[bool, typer.Option("--static", help="rank by the static model though a GPU is there")] = False,
) -> None:
    """Choose tiles and write a table."""
    gpu = torch.cuda.get_device_name() if has_gpu() and not static else None
    if gpu is not None:
        major, minor = torch.cuda.get_device_capability()
        if arch not in (None, 10 * major + minor):
            raise typer.BadParameter(
                f"this GPU is sm_{major}{minor}; to rank for sm_{arch} without timing add --static"
            )
        arch = 10 * major + minor
    if arch is None:
        raise typer.BadParameter("no GPU here: name the architecture with --arch")
    if gpu is None and arch not in roofline.MODELLED:
        raise typer.BadParameter(
            f"the static model knows sm_{', sm_'.join(map(str, roofline.MODELLED))}, not sm_{arch}"
        )
    keys = [t.key for t in TUNABLES]
    if unknown := set(kernel or ()) - set(keys):
        raise typer.BadParameter(f"unknown kernel {sorted(unknown)}; there are {keys}")
    chosen = [t for t in TUNABLES if not kernel or t.key in kernel]
    shapes = [(int(n), int(k)) for n, k in (text.split("x") for text in shape or ())]
    path = out or launch.TILES / f"sm_{arch}.json"
    if not make_table(arch, gpu, path, chosen, weights or (), shapes, bucket or (), minutes):
        raise typer.Exit(3)


if __name__ == "__main__":
    app()
