"""Floors of these kernels and of a decode step made of them, and how long a kernel should take by the static model.

    python tools/roofline.py --model 8B --weights q4 --gpu "H200 SXM" --batch 1 8 64 --context 4096 [--draft K] [--json]

Needs no GPU. The floor of a kernel, from the bytes and operations that are declared beside it in csrc_triton:

    floor = max(bytes / copy bandwidth, flops / MMA rate)

and of a step the sum over these kernels, one after the other, and a launch's time for each: weights, and keys and
values of all sequences, are read once; activations count as if each went through memory. Launches are those of a CUDA
graph, which the engine does not capture, so that its steps of few rows take longer. `step_floor` and `prefill_floor`
give the floors to Python.

The static model, for a kernel whose binary is at hand:

    time = launch + fill + (memory^4 + l2^4 + issue^4 + mma^4)^(1/4)

each part the time it would need alone, the power mean letting the slowest rule and the next count a little. It ranks
tiles and says what bounds a kernel. Neither is a measurement, and whatever prints them says so.

Units: bytes, microseconds, GB/s (1e9 bytes), TFLOP/s, GHz.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Annotated, Any

import sass
import torch
import typer

from csrc_triton.attention import attention_bytes, attention_flops, slot_nbytes, visible_pairs
from csrc_triton.attention_plan import CHUNK, PAGE
from csrc_triton.fused import argmax_bytes, quantize_rows_bytes, rmsnorm_bytes, swiglu_bytes
from csrc_triton.pages import KVLayout, append_kv_bytes
from csrc_triton.qmatmul import MAX_ROWS, matmul_bytes, matmul_flops, swiglu_matmul_bytes
from csrc_triton.quant import num_segments
from csrc_triton.t64 import packed_nbytes
from csrc_triton.w8a8 import w8a8_matmul_bytes
from polymodel.checkpoint import open_checkpoint, resolve
from polymodel.config import EngineConfig, ModelConfig, RopeConfig
from polymodel.errors import PolymodelError
from polymodel.packing import GPU_GROUP, plan_weights

SCHEDULERS = 4  # of a multiprocessor; each issues one warp instruction a cycle
BLOCK = 128  # columns of the weight in one iteration of a main loop
SM_BYTES = 64  # a cycle from L2 into one multiprocessor
POWER = 4
IPC_OF_ONE_WARP = 0.4  # instructions a cycle that a scheduler gets out of one warp; an estimate
GB = 10**9
PARTS = ("memory", "l2", "issue", "mma")
L2_LATENCY_US = 0.3  # of a load and the few operations on it; an estimate
FOLD_AHEAD = 4  # states that attention's fold fetches together


# ---- GPUs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the models need to know of a GPU. Only `copy_gbs` and `tflops` of an H200 were measured."""

    name: str
    arch: int
    sms: int
    clock_ghz: float
    copy_gbs: float  # read plus written by a large copy
    memory_bytes: int  # by the data sheet
    l2_bytes: int
    l2_gbs: float  # read
    tflops: Mapping[str, float]  # of products by the type of their operands: what the best library reaches
    latency_us: float  # from device memory, under load
    launch_us: float  # from one kernel of a graph to the next
    source: str


def _by_data_sheet(
    name: str, arch: int, sms: int, clock: float, gbs: float, l2_mib: int, l2_gbs: float, tflops: tuple[float, ...]
) -> Gpu:
    """Of 24 GB. tflops: bfloat16, int8 and float32, dense. Nine tenths of bandwidth and MMA rates, as others reach."""
    bf16, int8 = round(0.9 * tflops[0]), round(0.9 * tflops[1])
    return Gpu(
        name=name,
        arch=arch,
        sms=sms,
        clock_ghz=clock,
        copy_gbs=round(0.9 * gbs),
        memory_bytes=24 * GB,
        l2_bytes=l2_mib << 20,
        l2_gbs=l2_gbs,
        tflops={"bf16": bf16, "bf16 by warp": bf16, "int8": int8, "f32": tflops[2]},
        latency_us=0.7,
        launch_us=1.3,
        source="data sheet; 90 % of its bandwidth, bfloat16 and int8 rates; latencies and L2 bandwidth estimated",
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="A100 SXM 80 GB",
            arch=80,
            sms=108,
            clock_ghz=1.41,
            copy_gbs=1750,
            memory_bytes=80 * GB,
            l2_bytes=40 << 20,
            l2_gbs=4500,
            tflops={"bf16": 270, "bf16 by warp": 270, "int8": 500, "f32": 19.5},
            latency_us=0.7,
            launch_us=1.3,
            source="data sheet (SMs, clock, memory, L2 size, float32), 86 % of its bandwidth and bfloat16 rate, 80 % "
            "of its int8 rate; latencies and L2 bandwidth estimated",
        ),
        Gpu(
            name="RTX 3090",
            arch=86,
            sms=82,
            clock_ghz=1.70,
            copy_gbs=830,
            memory_bytes=24 * GB,
            l2_bytes=6 << 20,
            l2_gbs=2000,
            tflops={"bf16": 65, "bf16 by warp": 65, "int8": 250, "f32": 35},
            latency_us=0.7,
            launch_us=1.3,
            source="data sheet (SMs, clock, memory, L2 size, float32), about 90 % of its bandwidth and MMA rates; "
            "latencies and L2 bandwidth estimated",
        ),
        Gpu(
            name="H200 SXM",
            arch=90,
            sms=132,
            clock_ghz=1.75,
            copy_gbs=4300,
            memory_bytes=141 * GB,
            l2_bytes=60 << 20,
            l2_gbs=7000,
            tflops={"bf16": 788, "bf16 by warp": 490, "int8": 1500, "f32": 60},
            latency_us=0.8,
            launch_us=1.2,
            source="measured (copy, bfloat16 8192^3 in cuBLAS, SMs, L2 size); data sheet (memory; of float32 "
            "90 %); others estimated",
        ),
        Gpu(
            name="H100 SXM",
            arch=90,
            sms=132,
            clock_ghz=1.75,
            copy_gbs=3000,
            memory_bytes=80 * GB,
            l2_bytes=50 << 20,
            l2_gbs=7000,
            tflops={"bf16": 788, "bf16 by warp": 490, "int8": 1500, "f32": 60},
            latency_us=0.8,
            launch_us=1.2,
            source="data sheet (SMs, memory, L2 size, 3.35 TB/s, of which 90 %, as measured on an H200); all else as "
            "of an H200",
        ),
        _by_data_sheet("A10", 86, 72, 1.695, 600, 6, 2000, (125, 250, 31.2)),
        _by_data_sheet("L4", 89, 58, 2.04, 300, 48, 2500, (121, 242, 30.3)),
        _by_data_sheet("RTX 4090", 89, 128, 2.52, 1008, 72, 5000, (165.2, 660.6, 82.6)),
    )
}
# architecture -> the GPU that the static model takes for it
MODELLED = {gpu.arch: gpu for gpu in map(GPUS.__getitem__, ("A100 SXM 80 GB", "RTX 3090", "H200 SXM"))}


# ---- the static model ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the compiler made of the kernel with the main loop. Per block: in one iteration over 128 columns, or over a
    page of keys and values."""

    arch: int
    registers: int
    shared: int  # bytes a thread block
    warps: int
    stages: int
    blocks_per_sm: int
    instructions: float  # that a warp issues per block
    per_weight: float | None  # dequantisation instructions per weight


@dataclass(frozen=True, slots=True)
class Launch:
    """How often and on what the kernel runs. Bytes and operations are those of its formulas, not of the binary."""

    programs: int
    blocks: float  # iterations of a program
    weight_block_bytes: float  # of a program's share of the weight, per block
    rows_block_bytes: float  # of its activations, per block
    block_flops: float  # of a program per block, padding included
    dram_bytes: float  # at least moved through device memory
    kind: str  # a key of Gpu.tflops
    side_bytes: float = 0  # through L2 by the kernels around it (fold, quantisation of rows, writing out)
    side_launches: int = 0
    side_us: float = 0  # that they wait for loads one after the other


@dataclass(frozen=True, slots=True)
class Prediction:
    us: float
    bound: str  # the largest part; "latency" where fill and launches outweigh them
    parts: Mapping[str, float]  # us each alone


def bytes_in_flight(kernel: Kernel, launch: Launch, gpu: Gpu) -> float:
    """Weight bytes under way at once on one multiprocessor: all stages but the one that is being used."""
    ahead = min(max(kernel.stages - 1, 1), max(launch.blocks, 1))
    return _resident(kernel, launch, gpu) * ahead * launch.weight_block_bytes


def _resident(kernel: Kernel, launch: Launch, gpu: Gpu) -> int:
    """Thread blocks that a multiprocessor works on at once."""
    return min(kernel.blocks_per_sm, -(-launch.programs // gpu.sms))


def predict(kernel: Kernel, launch: Launch, gpu: Gpu) -> Prediction:
    """Microseconds of a launch and of the small kernels around it."""
    busiest = -(-launch.programs // gpu.sms) * launch.blocks  # blocks of the fullest multiprocessor
    busy = min(launch.programs, gpu.sms)
    in_flight = bytes_in_flight(kernel, launch, gpu)
    issued = SCHEDULERS * gpu.clock_ghz * min(1.0, IPC_OF_ONE_WARP * _resident(kernel, launch, gpu) * kernel.warps / 4)
    reach = min(gpu.copy_gbs, busy * in_flight / gpu.latency_us / 1e3) if in_flight else 1e-9
    block_bytes = launch.weight_block_bytes + launch.rows_block_bytes
    through_l2 = launch.programs * launch.blocks * block_bytes / gpu.l2_gbs
    into_one = busiest * block_bytes / (SM_BYTES * gpu.clock_ghz)
    parts = {
        "memory": launch.dram_bytes / reach / 1e3,
        "l2": max(through_l2, into_one) / 1e3,
        "issue": busiest * kernel.warps * kernel.instructions / (issued * 1e3),
        "mma": busiest * launch.block_flops / (gpu.tflops[launch.kind] / gpu.sms * 1e6),
    }
    main = sum(part**POWER for part in parts.values()) ** (1 / POWER)
    side = max(launch.side_bytes / gpu.l2_gbs / 1e3, launch.side_us) + launch.side_launches * gpu.launch_us
    waves = -(-launch.programs // (gpu.sms * max(kernel.blocks_per_sm, 1)))
    fill = gpu.latency_us * (1 + 0.25 * (waves - 1))  # later waves start while others end
    rest = gpu.launch_us + fill + side
    bound = "latency" if rest > main else max(PARTS, key=lambda part: parts[part])
    return Prediction(rest + main, bound, parts)


def kernel_of(compiled: Any, stages: int) -> Kernel:
    """From a `compile_check.Compiled`. Its main loop is that with the matrix products, else that with most FFMA."""
    launch, used = compiled.launch, compiled.resources
    per_weight = None
    if compiled.loops:
        loop = max(compiled.loops, key=lambda loop: loop.mma)
        instructions = len(loop.instructions) / loop.blocks
        per_weight = loop.per_weight if compiled.weights_per_block else None
    else:
        loops: Sequence[Sequence[sass.Instruction]] = compiled.program.loops
        instructions = float(len(max(loops, key=lambda body: sum(i.name == "FFMA" for i in body), default=())))
    blocks = sass.occupancy(launch.arch, used.registers, launch.shared, launch.warps)
    return Kernel(launch.arch, used.registers, launch.shared, launch.warps, stages, blocks, instructions, per_weight)


# ---- the static model of attention -----------------------------------------------------------------------


def attention_launch(
    items: int, pages: int, *, tile_rows: int, kv_heads: int, dim: int, token_bytes: int, dram_bytes: float
) -> Launch:
    """Items that read so many pages between them, each for a tile of rows; a block is a page of one head.

    Pages that several items read come through L2 as often. Dims are padded, and row sums are a product with 64 columns.
    """
    padded = max(32, 1 << (dim - 1).bit_length())
    return Launch(
        programs=items * kv_heads,
        blocks=pages / items,
        weight_block_bytes=PAGE * token_bytes / kv_heads,
        rows_block_bytes=2 * 4 * dim / 2,  # cosines and sines of the page's distance
        block_flops=2 * tile_rows * PAGE * (2 * padded + 64),
        dram_bytes=dram_bytes,
        kind="bf16 by warp",
    )


def with_fold(launch: Launch, slots: int, most: int, heads: int, dim: int) -> Launch:
    """And the kernel that folds the states that so many slots hold, at most `most` of a row one after the other."""
    waits = -(-most // FOLD_AHEAD) * L2_LATENCY_US
    return replace(launch, side_bytes=2 * sum(slot_nbytes(slots, heads, dim)), side_launches=1, side_us=waits)


def attention_kernel(launch: Any, stages: int) -> Kernel:
    """From a `dryrun.Launch` of a kernel that goes through pages. A page's number and its keys and values pass through
    two stages each, so that five stages have one page under way besides the one in use."""
    program = sass.Program.of(launch.asm["cubin"])
    loop = max(program.main_loops or program.loops, key=len)
    blocks = sass.occupancy(launch.arch, launch.registers, launch.shared, launch.warps)
    buffers = max(1, (stages - 1) // 2)
    return Kernel(
        launch.arch, launch.registers, launch.shared, launch.warps, buffers, blocks, page_instructions(loop), None
    )


def page_instructions(loop: Sequence[sass.Instruction]) -> float:
    """Of a warp in one iteration; what it jumps over but for the last page of a chunk counts by its share."""
    jumped = 0
    for i in loop:
        target = int(i.operands.split()[-1], 16) if i.name == "BRA" and i.predicate else 0
        jumped = max(jumped, sum(i.address < other.address < target for other in loop))
    return len(loop) - jumped * (1 - 1 / CHUNK)


# ---- floors --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Floor:
    """Floor of a kernel."""

    us: float
    bound: str  # "memory" or "mma"
    nbytes: int
    flops: int


def floor(nbytes: int, flops: int, gpu: Gpu, kind: str = "bf16") -> Floor:
    """bytes / copy bandwidth or flops / MMA rate, whichever is larger; kind: a key of `Gpu.tflops`."""
    memory, mma = nbytes / gpu.copy_gbs / 1e3, flops / gpu.tflops[kind] / 1e6
    return Floor(max(memory, mma), "memory" if memory >= mma else "mma", nbytes, flops)


@dataclass(frozen=True, slots=True)
class Matmul:
    """A product of a layer by its weight [n, k]."""

    n: int
    k: int
    nbytes: int  # as packed
    layout: str  # of csrc_triton.t64, or "dense"

    def splits(self, rows: int) -> bool:
        """Whether segments are programs of their own, and folded by a second kernel."""
        return num_segments(self.n, self.k) > 1 and rows <= MAX_ROWS

    def num_launches(self, rows: int) -> int:
        """The product, its fold, and the quantisation of x."""
        return 1 + self.splits(rows) + (self.layout == "t64-int8")


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model with weights of some format, as far as a forward's floor depends on it."""

    name: str
    weights: str
    config: ModelConfig
    layers: tuple[Mapping[str, tuple[Matmul, ...]], ...]  # of each: "qkv", "o", "gate_up", "down"
    head: Matmul

    @property
    def weight_bytes(self) -> int:
        """That a forward reads: of the embedding a few rows alone."""
        return self.head.nbytes + sum(m.nbytes for layer in self.layers for some in layer.values() for m in some)

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in all layers, bfloat16."""
        return self.config.num_layers * _pages(self.config).token_bytes


def _shape(
    layers: int, hidden: int, heads: int, kv_heads: int, inter: int, vocab: int, tied: bool, qk_norm: bool
) -> ModelConfig:
    return ModelConfig(
        arch="qwen3" if qk_norm else "llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inter,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        max_context=1 << 17,
        norm_eps=1e-6,
        rope=RopeConfig(1e6),
        qk_norm=qk_norm,
        tied_head=tied,
    )


MODELS = {  # sizes as in their config.json, Qwen3's and at last Llama 3.1's; context, eps and rope are stand-ins
    "0.6B": _shape(28, 1024, 16, 8, 3072, 151936, True, True),
    "1.7B": _shape(28, 2048, 16, 8, 6144, 151936, True, True),
    "4B": _shape(36, 2560, 32, 8, 9728, 151936, True, True),
    "8B": _shape(36, 4096, 32, 8, 12288, 151936, False, True),
    "14B": _shape(40, 5120, 40, 8, 17408, 151936, False, True),
    "32B": _shape(64, 5120, 64, 8, 25600, 151936, False, True),
    "70B": _shape(80, 8192, 64, 8, 28672, 128256, False, False),
}
FORMATS = ("q4", "q8", "w8a8", "bf16")  # of these; of a checkpoint also as it is filed
FILE_FORMATS = ("file", *FORMATS)


def _pages(config: ModelConfig) -> KVLayout:
    return KVLayout(1, config.num_kv_heads, config.head_dim, torch.bfloat16)


@cache
def decoder(model: str, weights: str = "q4") -> Decoder:
    """model: a key of MODELS, a pulled model's name, or the path of a checkpoint, whose headers are read.

    ValueError for an unknown model or format, with those there are.
    """
    if model in MODELS:
        if weights not in FORMATS:
            raise ValueError(f"weights {weights!r}: of {model} there are {', '.join(FORMATS)}")
        return _built_in(model, weights)
    try:
        checkpoint = open_checkpoint(resolve(model))
    except PolymodelError as error:
        raise ValueError(f"model {model!r}: {error}; built in are {', '.join(MODELS)}") from error
    with checkpoint:
        if weights not in FILE_FORMATS:
            raise ValueError(f"weights {weights!r}: of a checkpoint there are {', '.join(FILE_FORMATS)}")
        plan = plan_weights(checkpoint, weights, PAGE, "cuda")
        found: list[dict[str, tuple[Matmul, ...]]] = [{} for _ in range(checkpoint.config.num_layers)]
        made = {name: Matmul(*m.shape, m.nbytes, m.scheme) for name, m in plan.matrices.items()}
        for name, matmul in made.items():
            if name != "head":
                _, layer, part = name.split(".")
                part = "qkv" if part in ("q", "k", "v", "qk", "kv", "qkv") else part
                found[int(layer)][part] = (*found[int(layer)].get(part, ()), matmul)
        return Decoder(model, weights, checkpoint.config, tuple(found), made["head"])


def _built_in(name: str, weights: str) -> Decoder:
    config = MODELS[name]
    hidden, inter, q_rows = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim

    def matmul(n: int, k: int, weights: str = weights, gate_up: bool = False) -> Matmul:
        if weights == "bf16":
            return Matmul(n, k, 2 * n * k, "dense")
        layout = "t64-int8" if weights == "w8a8" else "t64-glu" if gate_up else "t64"
        fmt, group = ("q4", GPU_GROUP) if weights == "q4" else ("q8", 0)
        return Matmul(n, k, packed_nbytes((n, k), fmt, group, layout), layout)

    layer = {
        "qkv": (matmul(q_rows + 2 * config.num_kv_heads * config.head_dim, hidden),),
        "o": (matmul(hidden, q_rows),),
        "gate_up": (matmul(2 * inter, hidden, gate_up=True),),
        "down": (matmul(hidden, inter),),
    }
    head = matmul(config.vocab_size, hidden, "q8" if weights == "q4" else weights)
    return Decoder(name, weights, config, (layer,) * config.num_layers, head)


def gpu_named(name: str) -> Gpu:
    """ValueError for an unknown one, with those there are."""
    if name not in GPUS:
        raise ValueError(f"GPU {name!r}: known are {', '.join(GPUS)}")
    return GPUS[name]


STEP_PARTS = ("qkv", "o", "gate_up", "down", "attention", "norms", "head", "launches")


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Floor of a forward, or of those of a prompt, by formula."""

    parts: Mapping[str, float]  # us, by STEP_PARTS
    shares: Mapping[str, float]  # us by what they wait for: "weights", "kv", "activations", "mma", "launches"
    tokens: int  # new ones: of a prompt those that are stored, else at most those that are decided
    nbytes: int
    flops: int
    num_launches: int
    fits: bool  # the GPU's memory holds the weights, and keys and values of all tokens

    @property
    def us(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """What most of the time is waited for."""
        return max(self.shares, key=lambda share: self.shares[share])

    @property
    def tokens_per_second(self) -> float:
        return 1e6 * self.tokens / self.us


@dataclass(slots=True)
class _Sum:
    gpu: Gpu
    parts: Counter[str] = field(default_factory=Counter)
    shares: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    flops: int = 0
    num_launches: int = 0

    def kernel(
        self, part: str, nbytes: int, flops: int = 0, *, weights: int = 0, kv: int = 0, kind: str = "bf16"
    ) -> None:
        """weights, kv: those of the bytes that are of weights, or of keys and values read."""
        least = floor(nbytes, flops, self.gpu, kind)
        self.parts[part] += least.us
        if least.bound == "mma":
            self.shares["mma"] += least.us
        else:
            for share, some in (("weights", weights), ("kv", kv), ("activations", nbytes - weights - kv)):
                self.shares[share] += least.us * some / nbytes
        self.nbytes += nbytes
        self.flops += flops

    def launches(self, count: int) -> None:
        us = count * self.gpu.launch_us
        self.parts["launches"] += us
        self.shares["launches"] += us
        self.num_launches += count

    def matmul(self, part: str, m: Matmul, rows: int, y_itemsize: int = 2) -> None:
        flops = matmul_flops(rows, m.n, m.k)
        if m.layout == "t64-int8":
            self.kernel(part, quantize_rows_bytes(rows, m.k))
            nbytes = w8a8_matmul_bytes(rows, m.n, m.k, m.nbytes, y_itemsize)
            self.kernel(part, nbytes, flops, weights=m.nbytes, kind="int8")
        elif part == "gate_up" and m.layout == "t64-glu" and rows <= MAX_ROWS:
            nbytes = swiglu_matmul_bytes(rows, m.n // 2, m.k, m.nbytes)
            self.kernel(part, nbytes, flops, weights=m.nbytes)
        else:
            self.kernel(part, matmul_bytes(rows, m.n, m.k, m.nbytes, 2, y_itemsize), flops, weights=m.nbytes)
        self.launches(m.num_launches(rows))

    def total(self, tokens: int, held: int) -> StepFloor:
        """held: bytes that are in the GPU's memory."""
        parts, fits = {part: self.parts[part] for part in STEP_PARTS}, held <= self.gpu.memory_bytes
        return StepFloor(parts, dict(self.shares), tokens, self.nbytes, self.flops, self.num_launches, fits)


def _add_forward(total: _Sum, model: Decoder, sequences: int, rows: int, length: int, logits: int) -> None:
    """Of the last `rows` of `length` tokens of each sequence; logits: rows of a sequence that have them."""
    config, layout = model.config, _pages(model.config)
    hidden, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    count = sequences * rows
    total.kernel("norms", rmsnorm_bytes(count, hidden))
    total.launches(2)  # and the embedding
    for i, layer in enumerate(model.layers):
        for part, some in layer.items():
            for m in some:
                total.matmul(part, m, count)
        if layer["gate_up"][0].layout != "t64-glu" or count > MAX_ROWS:
            total.kernel("gate_up", swiglu_bytes(count, config.intermediate_size))
            total.launches(1)
        if config.qk_norm:
            total.kernel("norms", rmsnorm_bytes(count * heads, dim))
            total.kernel("norms", rmsnorm_bytes(count * kv_heads, dim))
            total.launches(2)
        total.kernel("attention", append_kv_bytes(layout, count))
        window = config.layer_window(i)
        seen = length if window is None else min(length, window + rows - 1)
        pairs = sequences * visible_pairs(length, rows, window)
        nbytes = attention_bytes(sequences * seen, layout.token_bytes, count, heads, dim)
        kv = sequences * seen * layout.token_bytes
        total.kernel("attention", nbytes, attention_flops(pairs, heads, dim), kv=kv)
        total.launches(2)
        for part in ("o", "down"):
            # in the launch of the product's fold where there is one
            total.kernel("norms", rmsnorm_bytes(count, hidden))
            product = layer[part][0]
            total.launches(int(not product.splits(count) or product.layout == "t64-int8" or config.post_norms))
            if config.post_norms:
                total.kernel("norms", rmsnorm_bytes(count, hidden))
                total.launches(2)
    if logits:
        total.matmul("head", model.head, sequences * logits, 4)
        total.kernel("head", argmax_bytes(sequences * logits, config.vocab_size))
        total.launches(2)


def step_floor(
    model: str | Decoder, weights: str, gpu: str | Gpu, batch: int, context: int, *, drafts: int = 0
) -> StepFloor:
    """Of a step that decodes a token of each of `batch` sequences of `context` tokens, that one included.

    drafts: as many drafted tokens a sequence are verified in the same forward; `tokens` counts all as accepted.
    ValueError for what is not known, with the choices.
    """
    _check(batch=batch, context=context)
    _check(0, drafts=drafts)
    made = _decoder_of(model, weights)
    total = _Sum(gpu_named(gpu) if isinstance(gpu, str) else gpu)
    _add_forward(total, made, batch, 1 + drafts, context + drafts, 1 + drafts)
    return total.total(batch * (1 + drafts), made.weight_bytes + batch * (context + drafts) * made.token_bytes)


def prefill_floor(
    model: str | Decoder, weights: str, gpu: str | Gpu, tokens: int, *, chunk: int = EngineConfig().prefill_chunk
) -> StepFloor:
    """Of a prompt of so many tokens, in chunks, to its first logits."""
    _check(tokens=tokens, chunk=chunk)
    made = _decoder_of(model, weights)
    total = _Sum(gpu_named(gpu) if isinstance(gpu, str) else gpu)
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        _add_forward(total, made, 1, end - start, end, int(end == tokens))
    return total.total(tokens, made.weight_bytes + tokens * made.token_bytes)


def _decoder_of(model: str | Decoder, weights: str) -> Decoder:
    if isinstance(model, str):
        return decoder(model, weights)
    if model.weights != weights:
        raise ValueError(f"weights {weights!r}: the decoder of {model.name} was made with {model.weights!r}")
    return model


def _check(least: int = 1, /, **counts: int) -> None:
    for name, count in counts.items():
        if count < least:
            raise ValueError(f"{name} is {count}, expected at least {least}")


# ---- the command ---------------------------------------------------------------------------------------

FLOOR = "floor by formula, not measured"
DOES_NOT_FIT = "does not fit"


def rows_of(made: Decoder, gpu: Gpu, batches: Sequence[int], context: int, draft: int) -> Iterator[dict[str, Any]]:
    """A row for each batch, and with drafts one more for the step that verifies them."""
    for batch in batches:
        for drafts in dict.fromkeys((0, draft)):
            found = step_floor(made, made.weights, gpu, batch, context, drafts=drafts)
            row = {"batch": batch, "drafts": drafts, "step ms": found.us / 1e3, "tokens/s": found.tokens_per_second}
            yield row | {"bound": found.bound, "fits": found.fits, "parts us": found.parts}


def _print(made: Decoder, gpu: Gpu, context: int, rows: Sequence[Mapping[str, Any]], prefill: StepFloor) -> None:
    from rich.console import Console
    from rich.table import Table

    screen = Console()
    screen = screen if screen.is_terminal else Console(width=200)
    title = f"{made.name}, {made.weights}, {gpu.name}, context {context}: {FLOOR}; us but for the step"
    table = Table(title=title, title_justify="left")
    columns = ("batch", *(["drafts"] if any(row["drafts"] for row in rows) else []), *STEP_PARTS)
    for column in (*columns, "step ms", "tokens/s", "bound"):
        table.add_column(column, justify="left" if column == "bound" else "right")
    for row in rows:
        counts = [str(row[column]) for column in columns if column in row]
        us = [f"{row['parts us'][part]:.1f}" for part in STEP_PARTS]
        rate = f"{row['tokens/s']:.0f}" if row["fits"] else DOES_NOT_FIT
        table.add_row(*counts, *us, f"{row['step ms']:.3f}", rate, row["bound"])
    screen.print(table)
    if any(row["drafts"] for row in rows):
        screen.print("with drafts: all accepted, their drafting free")
    rate = f"{prefill.tokens_per_second:.0f} tokens/s" if prefill.fits else DOES_NOT_FIT
    screen.print(f"prefill of {context} tokens: {prefill.us / 1e3:.2f} ms, {rate}")
    screen.print(f"weights {made.weight_bytes / 1e9:.3f} GB a step; keys and values {made.token_bytes} bytes a token")
    rates = f"copy {gpu.copy_gbs:.0f} GB/s, bfloat16 {gpu.tflops['bf16']:.0f} TFLOP/s"
    screen.print(f"{gpu.name}: {gpu.memory_bytes / GB:.0f} GB, {rates}; {gpu.source}")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    more: Annotated[
        list[int] | None, typer.Argument(metavar="[BATCH]...", help="further batches", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}, a pulled model, or a checkpoint's path")] = "8B",
    weights: Annotated[str, typer.Option(help=f"{', '.join(FORMATS)}; of a checkpoint also file")] = "q4",
    gpu: Annotated[str, typer.Option(help=", ".join(GPUS))] = "H200 SXM",
    batch: Annotated[list[int] | None, typer.Option(help="sequences in a step; others may follow: 1 8 64")] = None,
    context: Annotated[int, typer.Option(help="tokens of each sequence")] = 4096,
    draft: Annotated[int, typer.Option(help="also the step that verifies so many drafted tokens a sequence")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Floors of a decode step and of a prompt, part by part."""
    batches = (*(batch or ()), *(more or ())) or (1, 8, 64)
    try:
        made, found = decoder(model, weights), gpu_named(gpu)
        rows = list(rows_of(made, found, batches, context, draft))
        prefill = prefill_floor(made, weights, found, context)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not as_json:
        _print(made, found, context, rows, prefill)
        return
    content = {"source": FLOOR, "model": made.name, "weights": made.weights, "gpu": asdict(found), "context": context}
    content |= {"weight_bytes": made.weight_bytes, "kv_token_bytes": made.token_bytes, "rows": rows}
    content["prefill"] = {"ms": prefill.us / 1e3, "tokens/s": prefill.tokens_per_second}
    content["prefill"] |= {"bound": prefill.bound, "fits": prefill.fits}
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    app()
