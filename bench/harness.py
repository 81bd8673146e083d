"""What the benches share: made-up weights and pages, CUDA-graph timing with cold weights, the machine, and tables.

A kernel that reads its weight from a cache is not the kernel that decodes a model, so every timing goes round through
copies of the weight, or layers of pages, that together are larger than the last cache: on a GPU in one CUDA graph, of
which it gives the median of the replays, on a CPU in rounds that take turns with torch's own, the least of each.
"""

from __future__ import annotations

import json
import math
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from csrc_triton import launch, t64
from csrc_triton.attention import PageTable, page_table, paged_attention
from csrc_triton.attention_plan import PAGE
from csrc_triton.fused import RopeTable, rope_table
from csrc_triton.pages import KVLayout
from csrc_triton.quant import GGUF, QTensor, dense, from_gguf, num_segments, quantize
from polymodel.checkpoint import resolve
from polymodel.errors import FetchFailed
from polymodel.workloads import commit, cpu_name

ROOT = Path(__file__).resolve().parents[1]
MIN_COPIES, MAX_COPIES = 16, 512
MIN_CALLS, GRAPH_SECONDS = 64, 0.02  # of one graph at least, so that starting it does not count
MIN_REPLAYS, REPLAY_SECONDS = 7, 0.1
CPU_ROUNDS = 11
CACHE_SYSFS = Path("/sys/devices/system/cpu/cpu0/cache")

Call = Callable[[], object]


# ---- operands ----------------------------------------------------------------------------------------

# GGUF block formats -> where the float16 fields of a block lie, in bytes
F16_FIELDS: Mapping[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}
# what `made_up_weight` makes; "scratch" is a q4 weight written out in the compute dtype, its block scales kept, and
# any quantised kind with "-glu" behind it is one of gate and up
KINDS = ("q4", "q4-zero", "q4-bias", "q8", "q8-row", "w8a8", "dense", "scratch", *F16_FIELDS)


def made_up_weight(
    kind: str,
    n: int,
    k: int,
    *,
    device: torch.device | str = "cpu",
    seed: int | None = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> QTensor:
    """A packed weight [n, k] whose products with normal rows are near 1; without a seed its memory is left as it is.

    Its tiles of 64 rows are copies of a few: as many bytes, made in no time. dtype is that of dense weights.
    """
    if kind in ("dense", "scratch"):
        return _made_up_dense(kind, n, k, device, seed, dtype)
    if kind.endswith("-glu"):
        stored = _stored(kind.removesuffix("-glu"), k, seed or 0)
        few, count = t64.pack_gate_up(stored, stored), 2 * -(-n // 2 // t64.ROWS)
    else:
        few = t64.pack_t64(_stored(kind, k, seed or 0), "t64-int8" if kind == "w8a8" else "t64")
        count = -(-n // t64.ROWS)
    if seed is None:
        parts = {name: part.new_empty(count, *part.shape[1:], device=device) for name, part in few.parts.items()}
    else:
        which = torch.randint(0, _FEW, (count,), generator=torch.Generator().manual_seed(seed))
        parts = {name: part.to(device)[which.to(device)] for name, part in few.parts.items()}
    return replace(few, shape=(n, k), segments=num_segments(n, k), parts=parts)


_FEW = 4  # tiles of rows


def _stored(kind: str, k: int, seed: int) -> QTensor:
    """A few tiles of rows, in storage layout."""
    gen = torch.Generator().manual_seed(seed)
    n = _FEW * t64.ROWS
    if kind in F16_FIELDS:
        block = GGUF[kind]
        k_whole = -(-k // block.weights) * block.weights
        raw = torch.randint(0, 256, (n, k_whole // block.weights, block.nbytes), dtype=torch.uint8, generator=gen)
        spread = 2.0 ** (int(kind[1]) + 5 * kind.endswith("_k"))  # of codes times sub-scales
        for at in F16_FIELDS[kind]:
            scale = (torch.rand(n, raw.shape[1], 1, generator=gen) + 0.5) * (4 / (spread * math.sqrt(k)))
            raw[..., at : at + 2] = scale.half().view(torch.uint8)
        if k_whole != k:
            raise ValueError(f"{kind}: K = {k}, expected a multiple of {block.weights}")
        return from_gguf(raw.flatten(1), kind, (n, k))
    w = torch.randn(n, k, generator=gen) / math.sqrt(k)
    if kind == "q4-bias":
        return quantize(w, "q4", 32, symmetric=False)
    if kind != "q4-zero":
        return quantize(w, kind[:2] if kind != "w8a8" else "q8", None if kind in ("q8-row", "w8a8") else 128)
    stored = quantize(w, "q4", 128)
    zero = torch.randint(0, 16, stored.parts["scale"].shape, dtype=torch.uint8, generator=gen)
    parts = {"codes": stored.parts["codes"], "scale": stored.parts["scale"].half().float(), "zero_point": zero}
    return replace(stored, parts=parts)


def _made_up_dense(
    kind: str, n: int, k: int, device: torch.device | str, seed: int | None, dtype: torch.dtype
) -> QTensor:
    tiles, blocks = -(-n // t64.ROWS), -(-k // t64.COLS)
    if kind == "dense":
        w = torch.empty(n, k, dtype=dtype, device=device)
        if seed is not None:
            w.normal_(0, 1 / math.sqrt(k), generator=torch.Generator(device).manual_seed(seed))
        return dense(w)
    w = torch.empty(tiles * t64.ROWS, blocks * t64.COLS, dtype=dtype, device=device)
    scale = torch.empty(tiles, blocks, t64.ROWS, dtype=torch.float32, device=device)
    if seed is not None:
        gen = torch.Generator(device).manual_seed(seed)
        w.copy_(torch.randint(-8, 8, w.shape, dtype=torch.int8, device=device, generator=gen))
        scale.uniform_(0.5, 1.5, generator=gen).mul_(0.25 / math.sqrt(k))
    return QTensor("q4", (n, k), 128, num_segments(n, k), "rows", {"weight": w, "scale": scale})


def made_up_rows(
    m: int, k: int, dtype: torch.dtype = torch.bfloat16, *, device: torch.device | str = "cpu", seed: int | None = 1
) -> Tensor:
    """Activations [m, k], normal; not initialised without a seed."""
    if seed is None:
        return torch.empty(m, k, dtype=dtype, device=device)
    return torch.randn(m, k, device=device, generator=torch.Generator(device).manual_seed(seed)).to(dtype)


def num_copies(nbytes: int, cache_bytes: int, least: int = MIN_COPIES) -> int:
    """Copies of a weight that together are twice the cache, on a GPU at least 16."""
    return min(max(least, -(-2 * cache_bytes // max(nbytes, 1))), MAX_COPIES)


def cold_calls(run: Callable[..., object], inputs: Sequence[Tensor], nbytes: int, cache_bytes: int) -> list[Call]:
    """Calls on copies of the inputs, each with its own result, so that none reads or overwrites what is in the cache;
    nbytes: what one call reads and writes."""
    copies = [tuple(t.clone() for t in inputs) for _ in range(num_copies(nbytes, cache_bytes))]
    results: list[object] = [None] * len(copies)

    def call(number: int) -> None:
        results[number] = run(*copies[number])

    return [partial(call, number) for number in range(len(copies))]


# ---- sequences -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pages:
    """Sequences in an arena of their own; all layers have the same page lists."""

    layout: KVLayout
    arena: Tensor
    table: PageTable  # in host memory
    lengths: tuple[int, ...]
    spare: Tensor  # ids of pages that are in no list
    rope: RopeTable

    def lists(self, parts: Sequence[tuple[int, int, int]]) -> PageTable:
        stops = torch.tensor([stop for _, _, stop in parts], dtype=torch.int32)
        return page_table(self.table.ids[[s for s, _, _ in parts]], stops)

    def attend(self, q: Tensor, parts: Sequence[tuple[int, int, int]], layer: int = 0, **options: Any) -> Tensor:
        """Rows at positions start to stop of sequences whose lists end there; parts: (sequence, start, stop)."""
        return paged_attention(
            *(q, self.arena, self.layout, layer, self.lists(parts), *rows_at(parts), self.rope),
            **{"scale": self.layout.head_dim**-0.5, **options},
        )


def rows_at(parts: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """cu_rows and row_pos of rows at positions start to stop of sequences."""
    counts = torch.tensor([0, *(stop - start for _, start, stop in parts)])
    positions = [torch.arange(start, stop, dtype=torch.int32) for _, start, stop in parts]
    return counts.cumsum(0).int(), torch.cat(positions)


def made_up_pages(
    lengths: Sequence[int],
    kv_heads: int,
    dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 1,
    shared: int = 0,
    spare: int = 0,
    device: torch.device | str = "cpu",
    seed: int | None = 0,
) -> Pages:
    """Sequences whose first `shared` pages are the same ones, in shuffled pages of numbers near 1; without a seed the
    arena is left as it is."""
    own = [max(0, -(-length // PAGE) - shared) for length in lengths]
    count = 1 + shared + sum(own) + spare  # the first is the zeros
    layout = KVLayout(layers, kv_heads, dim, dtype, pages_per_superblock=count)
    arena = torch.empty(count * layout.page_bytes, dtype=torch.uint8, device=device)
    if seed is not None:
        _fill(arena, layout, count, seed)
    order = 1 + torch.randperm(count - 1, generator=torch.Generator().manual_seed(seed or 0))
    ids = layout.page_ids(order)
    table = torch.zeros(len(lengths), max(1, *(shared + n for n in own)), dtype=torch.int32)
    table[:, :shared] = ids[:shared]
    for s, (pages, end) in enumerate(zip(own, torch.tensor(own).cumsum(0).tolist(), strict=True)):
        table[s, shared : shared + pages] = ids[shared + end - pages : shared + end]
    lists = page_table(table, torch.tensor(lengths, dtype=torch.int32))
    inv_freq = [10000 ** (-2 * j / dim) for j in range(dim // 2)]
    rope = rope_table(inv_freq, max(*lengths, PAGE) + PAGE)  # trees stand behind the last token
    rope = replace(rope, cos=rope.cos.to(device), sin=rope.sin.to(device))
    return Pages(layout, arena, lists, tuple(lengths), ids[shared + sum(own) :], rope)


def _fill(arena: Tensor, layout: KVLayout, count: int, seed: int) -> None:
    gen = torch.Generator(arena.device).manual_seed(seed)
    if not layout.scaled:
        arena.view(layout.dtype).normal_(generator=gen)
        arena[: layout.block_bytes] = 0
        return
    if layout.dtype == torch.int8:
        arena.view(torch.int8).random_(-127, 128, generator=gen)
    else:  # without those of NaN
        arena.random_(0, 0x7F, generator=gen)
        arena.bitwise_or_(torch.empty_like(arena).random_(0, 2, generator=gen) << 7)
    ids = layout.page_ids(list(range(count))).long().to(arena.device)
    for layer in range(layout.num_layers):
        scales = layout.scales(arena, layer)
        fresh = torch.rand(count, *scales.shape[1:], generator=gen, device=arena.device)
        scales[ids] = (fresh + 0.5) / 70


def num_layers(nbytes: int, least: int = 500 << 20) -> int:
    """Layers of so many bytes that together are as many as a model's, and more than L2."""
    return max(1, -(-least // max(nbytes, 1)))


# ---- timing ------------------------------------------------------------------------------------------


def graph_us(calls: Sequence[Call], *, seconds: float = REPLAY_SECONDS) -> float:
    """Microseconds a call: median over the replays of one CUDA graph that makes the calls in turn."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # compiles, and allocates what is kept
            call()
        once = _event_ms(calls[0]) / 1e3
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    rounds = max(1, math.ceil(min(MIN_CALLS, GRAPH_SECONDS / once) / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    count = rounds * len(calls)
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < MIN_REPLAYS or (time.perf_counter() - start < seconds and len(times) < 100):
        times.append(_event_ms(graph.replay) * 1e3 / count)
    return statistics.median(times)


def _event_ms(run: Call) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def recorded(call: Call) -> list[Call]:
    """The launches of our kernels that a call makes, to be made again without its work on the host."""
    launches: list[Call] = []
    run = launch.Kernel.run

    def note(kernel: Any, *args: Any, **options: Any) -> Any:
        launches.append(lambda: run(kernel, *args, **options))
        return run(kernel, *args, **options)

    with mock.patch.object(launch.Kernel, "run", note):
        call()
    return launches


def copy_gbs(nbytes: int = 2**30) -> float:
    """Bytes read plus bytes written, in GB/s, of a copy within device memory."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    us = graph_us([lambda: target.copy_(source)] * 4)
    return 2 * nbytes / us / 1e3


def cublas_tflops(size: int = 8192) -> float:
    """TFLOP/s of a square bfloat16 product in torch."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    us = graph_us([lambda: torch.mm(a, b)] * 4)
    return 2 * size**3 / us / 1e6


def floor_columns(us: float, nbytes: int, flops: int, copy_gbs: float, tflops: float) -> dict[str, float]:
    """What the bytes or the operations take at least at these rates, and how far from it a time is."""
    floor = max(nbytes / copy_gbs / 1e3, flops / tflops / 1e6)
    return {"floor us": floor, "x floor": us / floor}


def cpu_beside_torch(
    benchmark: Any, ours: Sequence[Call], torchs: Sequence[Call], *, rounds: int = CPU_ROUNDS
) -> dict[str, Any]:
    """Microseconds a call of ours and of torch's, the least of rounds that take turns, each of all the calls.

    The benchmark's own times are those of our rounds.
    """
    times: tuple[list[float], list[float]] = ([], [])

    def timed(calls: Sequence[Call], kept: list[float]) -> None:
        start = time.perf_counter()
        for call in calls:
            call()
        kept.append(1e6 * (time.perf_counter() - start) / len(calls))

    with torch.inference_mode():
        benchmark.pedantic(
            timed, args=(ours, times[0]), setup=lambda: timed(torchs, times[1]), rounds=rounds, warmup_rounds=1
        )
    us, torch_us = min(times[0]), min(times[1])
    return {"us": us, "torch us": torch_us, "x torch": torch_us / us, "calls": len(ours)}


# ---- the machine -------------------------------------------------------------------------------------


def has_gpu() -> bool:
    return torch.cuda.is_available()


def environment(device: str = "cuda") -> dict[str, Any]:
    """What produces a result on a device."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in ("torch", "triton", "gemlite", "humming-kernels", "vllm")},
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "commit": commit(),
        "gpu": None,
    }
    if device != "cpu" and has_gpu():
        p = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": p.name,
            "arch": 10 * p.major + p.minor,
            "sms": p.multi_processor_count,
            "memory_bytes": p.total_memory,
            "l2_bytes": p.L2_cache_size,
            "cuda": torch.version.cuda,
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "clocks": _first_line("nvidia-smi", "--query-gpu=clocks.max.sm,clocks.max.mem", "--format=csv,noheader"),
        }
    return found


def gpu_folder(gpu: str | None) -> str:
    """Name of a GPU's folder under bench/results: "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", (gpu or "no-gpu").lower()).strip("-")


def cpu_folder(name: str, capability: str) -> str:
    """Name of a CPU's folder under bench/results: "cpu-epyc-avx2" of an "AMD EPYC, 2 cores" with AVX2."""
    name = re.sub(r"\((R|TM)\)|@.*|,.*|\d+-core|\b(AMD|Intel|CPU|Processor)\b", " ", name, flags=re.IGNORECASE)
    return "-".join(["cpu", *re.findall(r"[a-z0-9]+", f"{name} {capability}".lower())])


def machine_folder(device: str = "cpu") -> str:
    """Name under bench/results of the folder of what this machine measures on a device."""
    if device != "cpu":
        return gpu_folder(torch.cuda.get_device_name())
    return cpu_folder(cpu_name(), torch.backends.cpu.get_cpu_capability())


def last_cache_bytes() -> int:
    """The largest cache of this CPU; where Linux does not tell, 32 MiB."""
    sizes = [path.read_text().strip() for path in CACHE_SYSFS.glob("index*/size")]
    return max((int(size[:-1]) << (10 if size[-1] == "K" else 20) for size in sizes), default=32 << 20)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


# ---- results -----------------------------------------------------------------------------------------

LEFT = ("weights", "shape", "what", "bound", "kernel", "scheme", "bench")  # columns of words


def rows_table(title: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    """A table of some columns of rows; numbers by their size, nothing where a row has no value."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right")
    for row in rows:
        table.add_row(*(escape(shown(row.get(column))) for column in columns))
    return table


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = next(
            (digits for least, digits in ((1000, "0f"), (100, "1f"), (0.1, "2f")) if abs(value) >= least), "2g"
        )
        return f"{value:.{digits}}"
    return str(value)


@contextmanager
def printed_after(config: pytest.Config, title: str, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Rows that a module's benches collect, whose table is printed when all are measured."""
    rows: list[dict[str, Any]] = []
    yield rows
    if rows:
        show(config, [rows_table(title, rows, columns)])


def show(config: pytest.Config, tables: Iterable[Any]) -> None:
    """Print in the middle of a pytest run."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        screen = console()
        screen.print()
        for table in tables:
            screen.print(table)


def console() -> Console:
    """As wide as its tables where the output is no terminal."""
    made = Console()
    return made if made.is_terminal else Console(width=200, soft_wrap=True)


def write_json(path: Path, content: Any) -> None:
    """At once, so that a run cut short leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(path)


def demo_model() -> Path:
    """The pulled demo model; the bench is skipped where it is absent."""
    try:
        return resolve("smollm2")
    except FetchFailed as error:
        pytest.skip(str(error))
