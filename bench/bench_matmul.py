"""Quantised matmul on a GPU beside cuBLAS and the kernels of others, and on a CPU beside torch's float32.

    python bench/bench_matmul.py [--weights q4 --shape 8192x8192 --rows 1] [--minutes 8] [--json FILE]
    pytest bench/bench_matmul.py [--benchmark-json FILE]                              (needs '.[bench]')

Without a GPU the first prints what the static model expects, the second measures the CPU path: the least of rounds that
take turns with F.linear on the same weight in float32, over copies that exceed the last cache where there are few rows.
On a GPU times are medians of CUDA-graph replays over copies of the weight that together exceed L2, in microseconds.
    bytes  = matmul_bytes                           GB/s = bytes / time, and as a share of the measured copy
    flops  = matmul_flops                           TFLOP/s = flops / time, and as a share of bfloat16 8192^3 in cuBLAS
    floor  = bytes at the copy's rate or flops at cuBLAS', whichever takes longer; x floor = time / floor
    scratch = time where the weight is written out in bfloat16 first (qgemm.SCRATCH_ROWS), from 2,048 rows
    x      = time of cuBLAS on the bfloat16 weight / time
    tax    = time of our segments / time of the best number of segments for that shape, less 1: what it costs that
             the order of summation follows the weight alone
Every kernel is checked against float64 before it is timed. Peers (torch's int4 and int8 kernels, gemlite, humming)
run beside ours where they can be imported, on weights of the same size that they quantise themselves; a peer that
fails says why once. Targets are those of an H200.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tools"))

import pytest
import torch
import torch.nn.functional as F
import typer
from harness import (
    console,
    copy_gbs,
    cpu_beside_torch,
    cublas_tflops,
    environment,
    floor_columns,
    graph_us,
    has_gpu,
    installed,
    last_cache_bytes,
    made_up_rows,
    made_up_weight,
    num_copies,
    printed_after,
    rows_table,
    show,
    write_json,
)
from torch import Tensor

from csrc_triton import cpu, qgemm
from csrc_triton.qmatmul import MAX_ROWS, matmul, matmul_bytes, matmul_flops, matmul_ref
from csrc_triton.quant import QTensor, dequantize, quantize
from csrc_triton.w8a8 import w8a8_matmul, w8a8_matmul_ref

# [N, K]: o, qkv, gate and up, down of an 8B model; a square one of a 70B model; up and head of SmolLM2 135M
SHAPES = ((8192, 8192), (28672, 4096), (4096, 4096), (6144, 4096), (4096, 14336), (576, 1536), (49152, 576))
ROWS = (1, 16, 64, 2048, 4, 32, 256, 1024, 4096)  # most telling first
WEIGHTS = ("q4", "q8-row")  # kinds of harness.made_up_weight
PEER_ROWS = (1, 16, 64, 1024)
TAX_ROWS = (1, 16)
TAX_SEGMENTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
STATIC_ARCH = 90
SCRATCH_ROWS = 2048
MODEL = "static model, not measured"


@dataclass(frozen=True, slots=True)
class Target:
    """What an H200 should reach: at most `us`, at least `times_cublas`."""

    weights: str
    shapes: tuple[tuple[int, int], ...]  # empty: all of at least 4096 x 4096
    least: int  # rows
    most: int
    us: float | None = None
    times_cublas: float | None = None


TARGETS = (
    Target("q4", ((8192, 8192),), 1, 16, us=11.5),
    Target("q4", ((28672, 4096),), 1, 16, us=18.0),
    Target("q4", ((4096, 4096),), 1, 16, us=4.0),
    Target("q4", ((8192, 8192),), 64, 64, times_cublas=2.0),
    Target("q4", ((8192, 8192), (28672, 4096)), 1, 1, times_cublas=3.0),
    Target("q8-row", ((8192, 8192),), 1, 16, us=19.5),
    Target("q4", (), 1024, 2047, times_cublas=0.60),
    Target("q4", (), 2048, 8192, times_cublas=0.75),
)
TAX_TARGET = 0.03


def target_of(weights: str, n: int, k: int, m: int) -> str | None:
    """The targets of a case in words: "11.5 us, 3.00x"."""
    found = []
    for t in TARGETS:
        fits = (n, k) in t.shapes if t.shapes else min(n, k) >= 4096
        if t.weights == weights and fits and t.least <= m <= t.most:
            found += [f"{t.us} us"] if t.us else []
            found += [f"{t.times_cublas:.2f}x"] if t.times_cublas else []
    return ", ".join(found) or None


# ---- formulas ------------------------------------------------------------------------------------------


def figures(m: int, n: int, k: int, weight_nbytes: int, us: float, copy_gbs: float, tflops: float) -> dict[str, Any]:
    """Rates of a time: bandwidth where that should bound it, operations above; and the floor by the machine's rates."""
    row: dict[str, Any] = {"bytes": matmul_bytes(m, n, k, weight_nbytes), "flops": matmul_flops(m, n, k)}
    row |= floor_columns(us, row["bytes"], row["flops"], copy_gbs, tflops)
    if m <= MAX_ROWS:
        row["GB/s"] = row["bytes"] / us / 1e3
    else:
        row["TFLOP/s"] = row["flops"] / us / 1e6
    return row


# ---- peers: a dense weight -> copies of it in their format, and a call on one ------------------------------

Peer = Callable[[Tensor], Callable[[Tensor], Tensor]]


def _tinygemm(w: Tensor) -> Callable[[Tensor], Tensor]:
    """torch's int4, groups of 128: w is about (code - 8) * scale."""
    n, k = w.shape
    scale = w.view(n, -1, 128).abs().amax(2) / 7
    codes = ((w.view(n, -1, 128) / scale[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8).view(n, k)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    scale_and_zero = torch.stack((scale, torch.zeros_like(scale)), 2).transpose(0, 1).contiguous().bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, 128, scale_and_zero)


def _int8pack(w: Tensor) -> Callable[[Tensor], Tensor]:
    scale = w.abs().amax(1) / 127
    codes, scale = (w / scale[:, None]).round().to(torch.int8), scale.bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scale)


@cache
def _gemlite_loaded() -> Any:
    import gemlite
    import gemlite.helper

    configs = Path(gemlite.__file__).parent / "configs"
    if "H200" in torch.cuda.get_device_name():  # it knows no H200 by name, and would tune for minutes
        gemlite.load_config(str(configs / "h100.json"))
    gemlite.set_autotune("fast")
    return gemlite.helper


def _gemlite4(w: Tensor) -> Callable[[Tensor], Tensor]:
    helper, grouped = _gemlite_loaded(), w.float().view(w.shape[0], -1, 128)
    scale = grouped.abs().amax(2, keepdim=True) / 7
    codes = (grouped / scale + 8).round().clamp(0, 15).to(torch.uint8).view(w.shape)
    scale = scale.squeeze(2).bfloat16()
    made = helper.A16W4_HQQ_INT(device=w.device, dtype=torch.bfloat16)
    return made.from_weights(codes, scale, torch.full_like(scale, 8)).forward


def _gemlite8(w: Tensor) -> Callable[[Tensor], Tensor]:
    return _gemlite_loaded().A16W8_INT8(device=w.device, dtype=torch.bfloat16).from_weights(w).forward


def _humming(bits: int, invariant: bool = False) -> Peer:
    def make(w: Tensor) -> Callable[[Tensor], Tensor]:
        from humming.layer import HummingLayer, HummingLayerMethod

        n, k = w.shape
        config = {"dtype": f"int{bits}", "group_size": 128 if bits == 4 else 0}
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16).cuda()
        layer.load_from_unquantized(w)
        layer.transform()
        if not invariant:
            return layer
        compute = {"use_batch_invariant": True}
        return lambda x: HummingLayerMethod.forward_layer(layer, x, compute_config=compute)

    return make


PEERS: Mapping[str, Mapping[str, Peer]] = {
    "q4": {
        "torch int4": _tinygemm,
        "gemlite": _gemlite4,
        "humming": _humming(4),
        "humming invariant": _humming(4, True),
    },
    "q8-row": {"torch int8": _int8pack, "gemlite": _gemlite8, "humming": _humming(8)},
}


# first word of a peer -> package, at the version that it was written against; the others are torch's own
PACKAGES: Mapping[str, tuple[str, str]] = {
    "gemlite": ("gemlite", "0.6.0.post2"),
    "humming": ("humming-kernels", "0.1.20"),
}


def importable(peer: str) -> bool:
    package, _ = PACKAGES.get(peer.split()[0], ("torch", ""))
    return installed(package) is not None


# ---- measurement ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Machine:
    """Ceilings that rates are compared with."""

    copy_gbs: float
    tflops: float
    l2_bytes: int

    @classmethod
    def measured(cls) -> Machine:
        return cls(copy_gbs(), cublas_tflops(), torch.cuda.get_device_properties(0).L2_cache_size)


class Weights:
    """One kind and shape on the GPU: our copies, the bfloat16 ones of cuBLAS, and those of peers, made when asked."""

    def __init__(self, kind: str, n: int, k: int, l2_bytes: int) -> None:
        self.kind, self.n, self.k = kind, n, k
        self.l2_bytes = l2_bytes
        first = made_up_weight(kind, n, k, device="cuda")
        count = num_copies(first.nbytes, l2_bytes)
        self.ours = [first] + [
            replace(first, parts={name: part.clone() for name, part in first.parts.items()}) for _ in range(count - 1)
        ]
        self.failed: dict[str, str] = {}  # peers, and why
        self._peers: dict[str, list[Callable[[Tensor], Tensor]]] = {}

    @property
    def run(self) -> Callable[[Tensor, QTensor], Tensor]:
        return w8a8_matmul if self.kind == "w8a8" else matmul

    def check(self, m: int) -> None:
        """Some rows against float64: the result is rounded once to bfloat16."""
        rows = min(m, 64)
        x, w = made_up_rows(m, self.k, device="cuda"), self.ours[0]
        reference = w8a8_matmul_ref if self.kind == "w8a8" else matmul_ref
        exact = reference(x[:rows], w)
        error = (self.run(x, w)[:rows].double() - exact).norm() / exact.norm()
        if not error <= 6e-3:
            raise AssertionError(f"{self.kind} {self.n}x{self.k}, {m} rows: relative error {error:.2g} against float64")

    def time(self, m: int, segments: int | None = None) -> float:
        x = made_up_rows(m, self.k, device="cuda")
        weights = self.ours if segments is None else [replace(w, segments=segments) for w in self.ours]
        return graph_us([lambda w=w: self.run(x, w) for w in weights])

    def scratch(self, m: int) -> float | None:
        """With the weight written out first; None for few rows."""
        if self.kind in ("w8a8", "dense") or m < SCRATCH_ROWS:
            return None
        with mock.patch.object(qgemm, "SCRATCH_ROWS", m):
            return self.time(m)

    def cublas(self, m: int) -> float:
        """torch.mm on the bfloat16 weight."""
        if "cublas" not in self._peers:
            count = num_copies(2 * self.n * self.k, self.l2_bytes)
            first = torch.randn(self.k, self.n, device="cuda", dtype=torch.bfloat16).T.contiguous()
            dense = [first] + [first.clone() for _ in range(count - 1)]
            self._peers["cublas"] = [lambda x, w=w: torch.mm(x, w.T) for w in dense]
        x = made_up_rows(m, self.k, device="cuda")
        return graph_us([lambda f=f: f(x) for f in self._peers["cublas"]])

    def peer(self, name: str, m: int) -> float | None:
        """None where the peer fails, once and for all."""
        if name in self.failed:
            return None
        try:
            if name not in self._peers:
                w = torch.randn(self.n, self.k, device="cuda", dtype=torch.bfloat16) / math.sqrt(self.k)
                self._peers[name] = [PEERS[self.kind][name](w) for _ in self.ours]
            x = made_up_rows(m, self.k, device="cuda")
            return graph_us([lambda f=f: f(x) for f in self._peers[name]])
        except Exception as error:  # a peer's failure is a result
            self.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            self._peers.pop(name, None)
            torch.cuda.synchronize()
            return None


def measured_row(weights: Weights, m: int, machine: Machine) -> dict[str, Any]:
    kind, n, k = weights.kind, weights.n, weights.k
    weights.check(m)
    us, cublas = weights.time(m), weights.cublas(m)
    tflops = machine.tflops * (2 if kind == "w8a8" else 1)  # int8 MMAs have twice the rate
    row = {"weights": kind, "shape": f"{n}x{k}", "M": m, "us": us}
    row |= figures(m, n, k, weights.ours[0].nbytes, us, machine.copy_gbs, tflops)
    row["% copy"] = 100 * row["GB/s"] / machine.copy_gbs if "GB/s" in row else None
    row["% cuBLAS"] = 100 * row["TFLOP/s"] / machine.tflops if "TFLOP/s" in row else None
    row |= {
        "scratch us": weights.scratch(m),
        "cuBLAS us": cublas,
        "x cuBLAS": cublas / us,
        "target": target_of(kind, n, k, m),
    }
    return row


def peer_columns(weights: Weights, m: int) -> dict[str, float | None]:
    names = [name for name in PEERS.get(weights.kind, {}) if importable(name)] if m in PEER_ROWS else []
    return {f"{name} us": weights.peer(name, m) for name in names}


def tax_row(weights: Weights, m: int) -> dict[str, Any]:
    """Ours beside the same kernel with every number of segments; those change bits, so nothing but this uses them."""
    most = -(-weights.k // 128)
    times = {s: weights.time(m, s) for s in sorted({*TAX_SEGMENTS, weights.ours[0].segments}) if s <= most}
    best = min(times, key=lambda s: times[s])
    ours = weights.ours[0].segments
    row = {"weights": weights.kind, "shape": f"{weights.n}x{weights.k}", "M": m}
    row |= {"segments": ours, "us": times[ours], "best segments": best, "best us": times[best]}
    return row | {"tax %": 100 * (times[ours] / times[best] - 1), "target": f"{100 * TAX_TARGET:.0f} %"}


def measure(
    weights: Sequence[str] = WEIGHTS,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rows: Sequence[int] = ROWS,
    *,
    deadline: float = math.inf,
    peers: bool = True,
    tax: bool = True,
    progress: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Everything that fits before the deadline of time.monotonic(): ours and cuBLAS, then peers, then the tax.

    progress sees each step. A row whose check fails has no numbers; it is named in "void".
    """
    machine = Machine.measured()
    result: dict[str, Any] = {"copy GB/s": machine.copy_gbs, "cuBLAS TFLOP/s": machine.tflops, "rows": [], "tax": []}
    result |= {"void": {}, "peers failed": {}, "complete": False}
    made: dict[tuple[str, int, int, int], dict[str, Any]] = {}  # rows that hold

    def of_ours(of: Weights, m: int) -> None:
        try:
            row = measured_row(of, m, machine)
        except Exception as error:
            torch.cuda.synchronize()  # raises too where nothing more can be measured
            result["void"][f"{of.kind} {of.n}x{of.k}, {m} rows"] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            result["rows"].append(row)
            made[of.kind, of.n, of.k, m] = row

    def of_peers(of: Weights, m: int) -> None:
        made[of.kind, of.n, of.k, m].update(peer_columns(of, m))
        result["peers failed"] |= {f"{name} {of.kind} {of.n}x{of.k}": why for name, why in of.failed.items()}

    def of_tax(of: Weights, m: int) -> None:
        result["tax"].append(tax_row(of, m))

    passes = [(of_ours, tuple(rows))]
    passes += [(of_peers, tuple(m for m in rows if m in PEER_ROWS))] if peers else []
    passes += [(of_tax, tuple(m for m in rows if m in TAX_ROWS))] if tax else []
    for number, (step, counts) in enumerate(passes):
        for kind, n, k in ((kind, n, k) for n, k in shapes for kind in weights):
            todo = [m for m in counts if number == 0 or (kind, n, k, m) in made]
            of = Weights(kind, n, k, machine.l2_bytes) if todo and time.monotonic() < deadline else None
            for m in todo:
                if of is None or time.monotonic() > deadline:
                    return result
                step(of, m)
                progress(result)
            del of
            torch.cuda.empty_cache()
    return result | {"complete": True}


# ---- the static model ------------------------------------------------------------------------------------


@cache
def _tunables() -> Mapping[str, Any]:
    from autotune import TUNABLES

    return {t.key: t for t in TUNABLES}


def static_row(kind: str, n: int, k: int, m: int, arch: int = STATIC_ARCH) -> dict[str, Any]:
    """What the static model expects of the table's tile for a case; nothing runs."""
    import roofline

    w, gpu = made_up_weight(kind, n, k, seed=None), roofline.MODELLED[arch]
    scratch = None
    if kind == "w8a8" or m <= MAX_ROWS:
        expected, kernel, tile = _expected("w8a8" if kind == "w8a8" else "decode", kind, w, m, arch)
    else:
        fold = "-fold" * (w.segments > 1)
        expected, kernel, tile = _expected(("dense" if kind == "dense" else "prefill") + fold, kind, w, m, arch)
        if kind != "dense" and m >= SCRATCH_ROWS:
            written = made_up_weight("scratch", n, k, seed=None)
            moved = qgemm.written_out_bytes(n, k, w.nbytes)
            product, _, _ = _expected("dense" + fold, "scratch", written, m, arch)
            scratch = product.us + moved / gpu.l2_gbs / 1e3 + gpu.launch_us
    row = {"weights": kind, "shape": f"{n}x{k}", "M": m, "us": expected.us}
    row |= figures(m, n, k, w.nbytes, expected.us, gpu.copy_gbs, gpu.tflops["int8" if kind == "w8a8" else "bf16"])
    row |= {"scratch us": scratch, "bound": expected.bound, "instr/weight": kernel.per_weight, "regs": kernel.registers}
    row |= {"blocks/SM": kernel.blocks_per_sm, "tile": f"{tile.rows}x{tile.cols}/{tile.warps}/{tile.stages}"}
    return row | {"target": target_of(kind, n, k, m), "source": MODEL}


def _expected(key: str, kind: str, w: QTensor, m: int, arch: int) -> tuple[Any, Any, Any]:
    """Prediction, kernel and tile of one entry of the tile table."""
    import autotune
    import roofline

    from csrc_triton import launch

    tunable, (n, k) = _tunables()[key], w.shape
    tile = launch.tile_for(arch, key, autotune.form_name(w), n, k, m)
    kernel = autotune.examined(tunable, kind, tile.rows, tile, arch)
    if isinstance(kernel, str):
        raise ValueError(f"{key}, {kind} {n}x{k}, {m} rows: {kernel}")
    return roofline.predict(kernel, autotune.described(tunable, w, m, tile), roofline.MODELLED[arch]), kernel, tile


def static(
    weights: Sequence[str], shapes: Sequence[tuple[int, int]], rows: Sequence[int], arch: int = STATIC_ARCH
) -> dict[str, Any]:
    made = [static_row(kind, n, k, m, arch) for n, k in shapes for kind in weights for m in rows]
    return {"source": MODEL, "arch": arch, "rows": made}


# ---- tables ------------------------------------------------------------------------------------------------

CASE = ("weights", "shape", "M")
COLUMNS = (
    *CASE,
    *("us", "floor us", "x floor", "GB/s", "% copy", "TFLOP/s", "% cuBLAS"),
    *("scratch us", "cuBLAS us", "x cuBLAS", "target"),
)
STATIC_COLUMNS = (
    *CASE,
    *("us", "floor us", "x floor", "GB/s", "TFLOP/s", "scratch us"),
    *("bound", "instr/weight", "regs", "blocks/SM", "tile", "target"),
)
TAX_COLUMNS = (*CASE, "segments", "us", "best segments", "best us", "tax %", "target")


def tables(result: Mapping[str, Any]) -> Iterator[Any]:
    rows: list[Mapping[str, Any]] = result["rows"]
    if result.get("source") == MODEL:
        import roofline

        gpu = roofline.MODELLED[result["arch"]].name
        yield rows_table(f"matmul: {MODEL} ({gpu}, sm_{result['arch']}); targets for an H200", rows, STATIC_COLUMNS)
        return
    peers = sorted({name for row in rows for name in row if name.endswith(" us")} - {*COLUMNS})
    ceilings = f"copy {result['copy GB/s']:.0f} GB/s, cuBLAS {result['cuBLAS TFLOP/s']:.0f} TFLOP/s"
    yield rows_table(f"matmul ({ceilings}); targets for an H200", rows, (*COLUMNS, *peers))
    if result["tax"]:
        yield rows_table("what a fixed order of summation costs in decode", result["tax"], TAX_COLUMNS)
    yield from (f"{name} failed: {why}" for name, why in result["peers failed"].items())
    yield from (f"void: {name}: {why}" for name, why in result.get("void", {}).items())


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    weights: Annotated[list[str] | None, typer.Option(help="kinds of weight; may be repeated")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="as 8192x8192; may be repeated")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="rows of x; may be repeated")] = None,
    minutes: Annotated[float, typer.Option(help="stop starting cases after this long")] = math.inf,
    peers: Annotated[bool, typer.Option(help="time other libraries too")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the results here")] = None,
) -> None:
    """Measure, or without a GPU print the static model."""
    shapes = [(int(n), int(k)) for n, k in (text.split("x") for text in shape)] if shape else SHAPES
    screen = console()
    if has_gpu():
        deadline = time.monotonic() + 60 * minutes
        result = measure(weights or WEIGHTS, shapes, rows or ROWS, deadline=deadline, peers=peers)
    else:
        screen.print(f"no CUDA device: {MODEL}")
        result = static(weights or WEIGHTS, shapes, rows or ROWS)
    for table in tables(result):
        screen.print(table)
    if json_file is not None:
        write_json(json_file, {"environment": environment(), "matmul": result})
    raise typer.Exit(int(bool(result.get("void"))))


# ---- pytest-benchmark ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    """Collects rows and prints their tables when all is measured."""
    machine = Machine.measured()
    result: dict[str, Any] = {"copy GB/s": machine.copy_gbs, "cuBLAS TFLOP/s": machine.tflops, "machine": machine}
    yield (result := result | {"rows": [], "tax": [], "peers failed": {}})
    show(pytestconfig, tables(result))


@lru_cache(maxsize=1)
def _weights(kind: str, n: int, k: int, l2_bytes: int) -> Weights:
    return Weights(kind, n, k, l2_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matmul(benchmark: Any, report: dict[str, Any], kind: str, n: int, k: int, m: int) -> None:
    weights = _weights(kind, n, k, report["machine"].l2_bytes)
    row = measured_row(weights, m, report["machine"]) | peer_columns(weights, m)
    report["rows"].append(row)
    if m in TAX_ROWS:
        report["tax"].append(tax_row(weights, m))
    report["peers failed"] |= weights.failed
    x = made_up_rows(m, k, device="cuda")

    def once() -> None:
        weights.run(x, weights.ours[0])
        torch.cuda.synchronize()

    benchmark.extra_info.update(row)  # the graph's time; the benchmark's own is that of one call from the host
    benchmark.pedantic(once, rounds=20, warmup_rounds=3)


# ---- the CPU path ----------------------------------------------------------------------------------------

# gate and up of the demo model, and its head
CPU_CASES = [(3072, 576, m) for m in (1, 16, 512)] + [(49152, 576, 1)]
# scheme of csrc_triton.cpu -> format of what it packs, and the error against float64 that it may have
CPU_SCHEMES: Mapping[str, tuple[str, float]] = {
    "i4": ("q4", 6e-3),
    "i8": ("q8", 6e-3),
    "w8a8": ("q8", 1e-5),  # beside the products of the rounded activations
    "f32": ("q8", 1e-5),
}
CPU_COLUMNS = ("scheme", "shape", "M", "us", "torch us", "x torch", "GB/s", "GFLOP/s", "error")


class CpuWeights:
    """One weight as a scheme packs it and as float32, in copies that exceed the last cache."""

    def __init__(self, scheme: str, n: int, k: int) -> None:
        fmt, self.allowed = CPU_SCHEMES[scheme]
        gen = torch.Generator().manual_seed(0)
        w = torch.randn(n, k, generator=gen) / math.sqrt(k)
        self.stored, self.scheme = quantize(w, fmt, 32 if fmt == "q4" else None), scheme
        dense = dequantize(self.stored)
        count = num_copies(cpu.packed_nbytes((n, k), scheme), last_cache_bytes(), least=1)
        self.ours = [cpu.pack(self.stored, scheme) for _ in range(count)]
        self.dense = [dense.clone() for _ in range(num_copies(dense.nbytes, last_cache_bytes(), least=1))]

    def check(self, x: Tensor) -> float:
        """Relative error of some rows."""
        rows = x[:64]
        exact = (w8a8_matmul_ref if self.scheme == "w8a8" else matmul_ref)(rows, self.stored)
        error = float((matmul(x, self.ours[0])[: len(rows)].double() - exact).norm() / exact.norm())
        if not error <= self.allowed:
            raise AssertionError(
                f"{self.scheme} {self.stored.shape}, {len(x)} rows: error {error:.2g} against float64, "
                f"expected at most {self.allowed:.2g}"
            )
        return error


@pytest.fixture(scope="module")
def cpu_rows(pytestconfig: pytest.Config) -> Iterator[list[dict[str, Any]]]:
    title = "matmul on the CPU; torch: F.linear on the same weight in float32"
    with printed_after(pytestconfig, title, CPU_COLUMNS) as rows:
        yield rows


@lru_cache(maxsize=1)
def _cpu_weights(scheme: str, n: int, k: int) -> CpuWeights:
    return CpuWeights(scheme, n, k)


@pytest.mark.parametrize(("n", "k", "m"), CPU_CASES)
@pytest.mark.parametrize("scheme", CPU_SCHEMES)
def test_cpu_matmul(benchmark: Any, cpu_rows: list[dict[str, Any]], scheme: str, n: int, k: int, m: int) -> None:
    weights, x = _cpu_weights(scheme, n, k), made_up_rows(m, k, torch.float32)
    error = weights.check(x)
    few = slice(None if m <= MAX_ROWS else 1)  # many rows read the weight from the cache
    ours = [partial(matmul, x, w) for w in weights.ours[few]]
    row: dict[str, Any] = cpu_beside_torch(benchmark, ours, [partial(F.linear, x, w) for w in weights.dense[few]])
    row |= {"bytes": matmul_bytes(m, n, k, weights.ours[0].nbytes, 4, 4), "flops": matmul_flops(m, n, k)}
    row |= {"GB/s": row["bytes"] / row["us"] / 1e3, "GFLOP/s": row["flops"] / row["us"] / 1e3, "error": error}
    benchmark.extra_info |= row
    cpu_rows.append({"scheme": scheme, "shape": f"{n}x{k}", "M": m} | row)


if __name__ == "__main__":
    app()
