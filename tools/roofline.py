"""The static model: how long a kernel should take, from its binary and its bytes, on a machine that has no GPU.

    time = launch + fill + (memory^4 + l2^4 + issue^4 + mma^4)^(1/4)

each part the time it would need alone, the power mean letting the slowest rule and the next count a little. It ranks
tiles and says what bounds a kernel; it is no measurement, and whatever prints it says so.

Units: bytes, microseconds, GB/s (1e9 bytes), TFLOP/s, GHz.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sass

from csrc_triton.attention_plan import CHUNK, PAGE

SCHEDULERS = 4  # of a multiprocessor; each issues one warp instruction a cycle
BLOCK = 128  # columns of the weight in one iteration of a main loop
SM_BYTES = 64  # a cycle from L2 into one multiprocessor
POWER = 4
IPC_OF_ONE_WARP = 0.4  # instructions a cycle that a scheduler gets out of one warp; an estimate
PARTS = ("memory", "l2", "issue", "mma")
L2_LATENCY_US = 0.3  # of a load and the few operations on it; an estimate
FOLD_AHEAD = 4  # states that attention's fold fetches together


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the model needs to know of a GPU. Only `copy_gbs` and `tflops` of an H200 were measured."""

    name: str
    arch: int
    sms: int
    clock_ghz: float
    copy_gbs: float  # read plus written by a large copy
    l2_bytes: int
    l2_gbs: float  # read
    tflops: Mapping[str, float]  # of products by the type of their operands: what the best library reaches
    latency_us: float  # from device memory, under load
    launch_us: float  # from one kernel of a graph to the next
    source: str


GPUS = {
    gpu.arch: gpu
    for gpu in (
        Gpu(
            name="A100 SXM 80 GB",
            arch=80,
            sms=108,
            clock_ghz=1.41,
            copy_gbs=1750,
            l2_bytes=40 << 20,
            l2_gbs=4500,
            tflops={"bf16": 270, "bf16 by warp": 270, "int8": 500, "f32": 19.5},
            latency_us=0.7,
            launch_us=1.3,
            source="data sheet (SMs, clock, L2, float32); 86 % of its peak bandwidth and of its peak TFLOP/s; "
            "latencies and L2 estimated",
        ),
        Gpu(
            name="RTX 3090",
            arch=86,
            sms=82,
            clock_ghz=1.70,
            copy_gbs=830,
            l2_bytes=6 << 20,
            l2_gbs=2000,
            tflops={"bf16": 65, "bf16 by warp": 65, "int8": 250, "f32": 35},
            latency_us=0.7,
            launch_us=1.3,
            source="data sheet (SMs, clock, L2, float32); about 90 % of its peaks; latencies and L2 estimated",
        ),
        Gpu(
            name="H200 SXM",
            arch=90,
            sms=132,
            clock_ghz=1.75,
            copy_gbs=4300,
            l2_bytes=60 << 20,
            l2_gbs=7000,
            tflops={"bf16": 788, "bf16 by warp": 490, "int8": 1500, "f32": 60},
            latency_us=0.8,
            launch_us=1.2,
            source="measured (copy, bfloat16 8192^3 in cuBLAS, SMs, L2 size); data sheet (float32); others estimated",
        ),
    )
}


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


def matmul_bytes(m: int, n: int, k: int, weight_nbytes: int, x_itemsize: int = 2, y_itemsize: int = 2) -> int:
    """Bytes that y [m, n] = x [m, k] . w^T must move: the weight as packed, x and y once."""
    return weight_nbytes + m * k * x_itemsize + m * n * y_itemsize


def matmul_flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def fold_bytes(m: int, n: int, segments: int, y_itemsize: int = 2) -> int:
    """Bytes of partial sums read and of y written by the fold of a split product."""
    return m * n * (4 * segments + y_itemsize)


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


# ---- attention -----------------------------------------------------------------------------------------


def attention_bytes(tokens: int, token_bytes: int, rows: int, heads: int, dim: int, itemsize: int = 2) -> int:
    """Bytes that attention must move: the keys and values of so many different tokens, q and the result, once."""
    return tokens * token_bytes + 2 * rows * heads * dim * itemsize


def attention_flops(pairs: int, heads: int, dim: int) -> int:
    """Of so many pairs of a row and a key that it sees: two products a head."""
    return 4 * pairs * heads * dim


def visible_pairs(tokens: int, rows: int) -> int:
    """Pairs of a sequence's last rows and the keys that they see."""
    return rows * tokens - rows * (rows - 1) // 2


def slot_bytes(slots: int, heads: int, dim: int) -> int:
    """Bytes of states written by one kernel and read by the next."""
    return 2 * 4 * slots * heads * (dim + 2)


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
    return replace(launch, side_bytes=slot_bytes(slots, heads, dim), side_launches=1, side_us=waits)


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
