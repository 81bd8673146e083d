"""Every kernel compiled for sm_80 and sm_90 without a GPU, and what is promised of it checked in the binary.

    python tools/compile_check.py [--arch 90] [--only attention] [--json FILE] [--update]

A case is a launch of real host code with what its kernel may use. Registers, shared memory and instructions per
weight are compared with tools/compile_limits.json as well: a regression fails, `--update` writes what was measured.

Instructions per weight: those in the main loop that turn codes into operands (DEQUANT: logic, shifts, conversions and
arithmetic, but no moves, integer adds or uniform instructions), less one FFMA or FADD per accumulator register and
fold, over the weights that the loop turns, counted once however many warps turn them. Shifts and logic of addresses
are counted in: a few in a hundred, and no compiler output tells them apart.

Attention kernels owe the float operations of a tile of keys exactly (`PageLoop.operations`): each row goes through
the same tree, whatever the rows of a tile.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import ir
import sass
import torch
import triton
import typer
from dryrun import Launch, dryrun
from rich.console import Console
from rich.table import Table
from triton.errors import TritonError

from csrc_triton import attention, qgemm, t64
from csrc_triton.attention import page_table, paged_attention, tile_kind
from csrc_triton.attention_plan import make_plan
from csrc_triton.fused import rope_table
from csrc_triton.launch import tile_for
from csrc_triton.pages import FP8_ARCH, KVLayout, append_kv, commit_path, copy_pages
from csrc_triton.qmatmul import lm_head_argmax, matmul, swiglu_matmul
from csrc_triton.quant import GGUF, QTensor, dense, from_gguf, quantize
from csrc_triton.tree import token_tree, tree_attention
from csrc_triton.w8a8 import w8a8_matmul

LIMITS_FILE = Path(__file__).with_name("compile_limits.json")
LIMITED = ("registers", "shared", "per_weight")
SLACK = 0.01  # of instructions per weight
DEQUANT = frozenset(
    (
        *("LOP3", "SHF", "SHL", "SHR", "PRMT", "SGXT", "BFE", "FSEL"),
        *("HADD2", "HMUL2", "HFMA2", "FADD", "FMUL", "FFMA"),
        *("F2F", "F2FP", "F2I", "I2F", "I2FP", "I2I"),
    )
)
CONVERSIONS = frozenset(("I2F", "I2FP", "I2I"))
ATOMICS = frozenset(("ATOM", "ATOMG", "ATOMS", "RED", "REDG"))
SUM_COLUMNS = 64  # of the product with ones that attention kernels sum a row's weights by
MMA_OF = {("float", True): "HGMMA", ("float", False): "HMMA", ("int8", True): "IGMMA", ("int8", False): "IMMA"}


@dataclass(frozen=True, slots=True)
class PageLoop:
    """What an attention kernel does with one tile of keys, a page or half of one."""

    rows: int  # BLOCK_M
    half: int  # pairs of a head, padded
    part: int  # columns of a piece of values, padded
    pieces: int  # of a value: two halves where pages hold codes
    keys: int
    element: str  # of what is copied: "bf16", "f16", "f32", or "i16" of two codes
    copy_bytes: int = 16  # of a thread; fewer only where a head's halves start at no multiple of 16
    buffers: int = 2  # tiles of keys and values in shared memory
    capped: bool = False
    warps: int = 4

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Shapes in shared memory: keys as halves or as words of both, and values."""
        return [(self.half, self.keys)] * (1 if self.element == "i16" else 2) + [(self.keys, self.part)]

    @property
    def tile_bytes(self) -> int:
        return sum(a * b for a, b in self.tiles) * int(self.element.lstrip("bfi")) // 8

    @property
    def mma(self) -> int:
        """Instructions of a warp: scores of both halves, row sums, values; 16 rows, 8 columns, 16 products each."""
        scores = 2 * self.half // 16 * self.keys // 8
        values = self.keys // 16 * (self.part * self.pieces + SUM_COLUMNS) // 8
        return self.rows // 16 * (scores + values) // self.warps

    @property
    def repeated_mma(self) -> int:
        """Those that ptxas may leave out, and does on sm_90: a warp's columns of the row sums repeat each other."""
        return self.rows // 16 * self.keys // 16 * (SUM_COLUMNS // 8 // self.warps - 1)

    @property
    def operations(self) -> dict[str, int]:
        """PTX of a thread. A score's row lies in four lanes of each warp: so many of its scores are a thread's own, two
        steps go across lanes, and one per doubling across the warps, for all rows at once."""
        rows = self.rows // 8
        scores = rows * self.keys // (4 * self.warps)
        pairs = self.rows * self.half // self.threads
        columns = self.rows * (self.part * self.pieces + SUM_COLUMNS) // self.threads
        across = int(math.log2(self.warps))
        capped = scores * self.capped
        return {
            "ex2": scores + rows + capped,
            "max": scores + 2 * rows + across,
            "shfl": 2 * rows + across,
            "fma": 2 * pairs + columns,
            "mul": 2 * pairs + scores * (3 if self.pieces == 2 else 1) + 8 * capped,
            "sub": pairs + scores + rows + capped,
            "add": 5 * capped,
            "div": capped,
        }


@dataclass(frozen=True, slots=True)
class Case:
    """A launch, and what the kernel it is about may use."""

    name: str
    arch: int
    kernel: str  # the function's name; the launch may start others as well
    launch: Callable[[], object]  # host code on CPU tensors
    registers: int = 255
    shared: int | None = None  # bytes; the architecture's limit where not given
    per_weight: float | None = None  # dequantisation instructions per weight; None: the kernel turns none
    mma: Literal["float", "int8", "none"] = "float"
    sync: bool = False  # products by warp even on sm_90: a tile of fewer than 64 rows
    # of one block of the main loop:
    plain_loads: int = 0  # LDG: scales fetched by hand
    narrow_copies: int = 0  # LDGSTS of fewer than 128 bits: of activations or scales
    narrow_weights: int = 0  # loads of code tiles by fewer than 128 bits, or by no asynchronous copy
    lds: int = 0
    ldsm: int = 0
    sts: int = 0  # outside the products
    wide_addresses: bool = True  # refuse 32-bit products of run-time values in addresses
    loaded_products: int | None = None  # 32-bit products of loaded values in addresses, of slots and distances alone
    same_sums_as: str | None = None  # a case of the same architecture that folds a block by the same operations
    pages: PageLoop | None = None  # of an attention kernel

    @property
    def label(self) -> str:
        return f"{self.name} sm_{self.arch}"


class Compiled:
    """One kernel of a dry run, read."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.arch = launch.arch
        self.threads = 32 * launch.warps
        self.resources = sass.resources(launch.asm["cubin"])
        self.program = sass.Program.of(launch.asm["cubin"])
        self.ttir = ir.Module(launch.asm["ttir"])
        self.ttgir = ir.Module(launch.asm["ttgir"])

    @cached_property
    def fingerprint(self) -> ir.Fingerprint:
        return ir.fingerprint(self.ttir.text)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The main loop; more than one where the compiler splits off a remainder."""
        return tuple(Loop(self, instructions) for instructions in self.program.main_loops)

    @cached_property
    def page_operations(self) -> Counter[str]:
        return sass.ptx_counts(self.launch.asm["ptx"])

    @cached_property
    def page_loop(self) -> tuple[sass.Instruction, ...]:
        """The loop over tiles of keys; float32 takes no MMA that would tell."""
        return max(self.program.main_loops or self.program.loops, key=len)

    @cached_property
    def dots(self) -> list[ir.DotShape]:
        """Of one iteration of the main loop as written."""
        return [ir.dot_shape(o) for o in _main_dots(self.ttgir)]

    @cached_property
    def mma_per_block(self) -> int:
        """Instructions of a warp in one iteration as written."""
        return sum(ir.instructions_per_warp(shape, self.ttgir.text) for shape in self.dots)

    @cached_property
    def weights_per_block(self) -> int:
        """Elements of first operands that come out of registers: the weight tile."""
        return sum(shape.m * shape.k for shape in self.dots if shape.first_in_registers)

    @cached_property
    def sums(self) -> list[ir.DotShape]:
        """The first product of each sum of an iteration; those that follow go on from its result."""
        dots = _main_dots(self.ttir)
        results = {o.result for o in dots}
        return [ir.dot_shape(o) for o in dots if o.operands[2] not in results]

    @cached_property
    def folds_per_block(self) -> int:
        """Accumulator registers of a thread that an iteration's sums are added to."""
        return sum(max(1, shape.m * shape.n // self.threads) for shape in self.sums)

    @cached_property
    def fresh_per_block(self) -> int:
        """Instructions of a warp that start from zero, where all sums have one shape; else at least one."""
        if len({(shape.m, shape.n, shape.element) for shape in self.dots}) != 1:
            return 1
        steps = sum(shape.k_steps for shape in self.dots)
        return len(self.sums) * self.mma_per_block // steps


class Loop:
    """One main loop of a kernel."""

    def __init__(self, kernel: Compiled, instructions: tuple[sass.Instruction, ...]) -> None:
        self.instructions = instructions
        self.counts = sass.counts(instructions)
        self.mma = sum(i.is_mma for i in instructions)
        self.blocks = self.mma / kernel.mma_per_block  # iterations as written in one of the binary
        self.folds = self.blocks * kernel.folds_per_block
        turned = sum(i.name in DEQUANT or i.is_shift or i.is_choice for i in instructions) - self.folds
        weights = kernel.weights_per_block * self.blocks
        self.per_weight = turned * kernel.threads / weights if weights else 0.0


def _main_dots(module: ir.Module) -> list[ir.Operation]:
    loops = module.main_loops
    return [o for o in module.within(loops[0]) if o.name in ir.DOTS] if loops else []


# ---- checks: each takes a kernel and its case, and returns problems ------------------------------------


def check_resources(kernel: Compiled, case: Case) -> list[str]:
    """Nothing spills; registers and shared memory stay under their caps."""
    used, shared = kernel.resources, kernel.launch.shared
    spills = sum(i.name in ("LDL", "STL") for i in kernel.program.instructions)
    limit = case.shared if case.shared is not None else sass.LIMITS[kernel.arch].shared_per_block
    problems = []
    if used.stack or spills:
        problems.append(f"spills: {used.stack} bytes of stack, {spills} LDL and STL")
    if used.registers > case.registers:
        problems.append(f"{used.registers} registers, more than {case.registers}")
    if shared > limit:
        problems.append(f"{shared} bytes of shared memory, more than {limit}")
    return problems


def check_ptxas(kernel: Compiled, case: Case) -> list[str]:
    """ptxas has no warning to give: C7510 to C7519 say that products are serialised."""
    log = sass.ptxas_log(kernel.launch.asm["ptx"], kernel.arch)
    return [f"ptxas: {line.strip()}" for line in log.splitlines() if "warning" in line.lower() or "C75" in line]


def check_atomics(kernel: Compiled, case: Case) -> list[str]:
    found = sorted({i.name for i in kernel.program.instructions} & ATOMICS)
    return [f"atomics: {', '.join(found)}"] if found else []


def check_mma(kernel: Compiled, case: Case) -> list[str]:
    """The products are those of the architecture, all of one kind, as many as the tile needs, each block from zero."""
    if case.mma == "none":
        return []
    if not kernel.loops:
        return ["no loop with a matrix product"]
    expected = MMA_OF[case.mma, kernel.arch == 90 and not case.sync]
    kinds = {i.name for i in kernel.program.instructions if i.is_mma}
    problems = [] if kinds == {expected} else [f"products by {', '.join(sorted(kinds))} instead of {expected}"]
    for loop in kernel.loops:
        if loop.blocks != int(loop.blocks):
            problems.append(f"{loop.mma} {expected} in the main loop, not a multiple of {kernel.mma_per_block} a block")
        waits = sum(i.is_wait for i in loop.instructions)
        if waits > len(kernel.sums) * loop.blocks:
            problems.append(f"{waits} waits for products in the main loop, more than one for each sum of a block")
    return problems


def check_sums(kernel: Compiled, case: Case) -> list[str]:
    """Each block is a fresh sum, folded once per accumulator. Integer sums are exact in any order."""
    if case.mma != "float":
        return []
    problems = ["a matrix product goes on from the block before"] if kernel.fingerprint.chains_blocks else []
    for loop in kernel.loops:
        fresh, expected = sum(i.starts_sum for i in loop.instructions), kernel.fresh_per_block * loop.blocks
        if fresh < expected:
            problems.append(f"{fresh} products of the main loop start from zero, expected {expected:g}")
        folds = loop.counts["FFMA"] + loop.counts["FADD"]
        if folds < loop.folds:
            problems.append(f"{folds} FFMA and FADD for {loop.folds:g} accumulator folds")
    return problems


def check_loads(kernel: Compiled, case: Case) -> list[str]:
    """In the main loop global memory comes by 128-bit asynchronous copies, and nothing is written back to shared."""
    problems = []
    for loop in kernel.loops if case.mma != "none" else ():
        count, blocks = loop.counts, max(1.0, loop.blocks)
        narrow = count["LDGSTS"] - count["LDGSTS.128"]
        if not count["LDGSTS.128"] and not count["UTMALDG"]:
            problems.append("no 128-bit asynchronous copy in the main loop")
        for what, found, allowed in (
            ("LDG", count["LDG"], case.plain_loads),
            ("LDGSTS of fewer than 128 bits", narrow, case.narrow_copies),
            ("LDS", count["LDS"], case.lds),
            ("LDSM", count["LDSM"], case.ldsm),
            ("STS", count["STS"] + count["STSM"], case.sts),
        ):
            if found > allowed * blocks:
                problems.append(f"{found} {what} in the main loop, more than {allowed * blocks:g}")
        if len(weights := ir.narrow_weights(kernel.ttgir)) > case.narrow_weights:
            problems.extend(weights)
        products = [n for n, i in enumerate(loop.instructions) if i.is_mma]
        between = loop.instructions[products[0] : products[-1]]
        if any(i.name in ("STS", "STSM") for i in between):
            problems.append("STS between the first and the last product of the main loop")
    return problems


def check_dequant(kernel: Compiled, case: Case) -> list[str]:
    """Codes become operands in few instructions, without integer conversions."""
    if case.per_weight is None:
        return []
    problems = []
    for loop in kernel.loops:
        if loop.per_weight > case.per_weight:
            problems.append(f"{loop.per_weight:.2f} instructions per weight, more than {case.per_weight}")
        slow = sorted(name for name in CONVERSIONS if loop.counts[name])
        if slow:
            problems.append(f"{', '.join(slow)} in the main loop")
    return problems


def check_layout(kernel: Compiled, case: Case) -> list[str]:
    """Columns stay in their order, and no product still reads the registers that a loop fills anew."""
    widths = ir.warp_widths(kernel.ttgir.text)
    problems = [f"kWidth {sorted(widths)} of 16-bit operands, expected 2"] if widths - {2} else []
    return problems + [f"{where} with an operand in registers" for where in ir.pending_waits(kernel.ttgir)]


def check_barrier(kernel: Compiled, case: Case) -> list[str]:
    """With two warpgroups, all have their products done before a copy overwrites what they read."""
    if kernel.launch.warps <= 4:
        return []
    problems = []
    for loop in kernel.loops:
        waits = [n for n, i in enumerate(loop.instructions) if i.is_wait]
        if not waits:
            continue
        cycle = loop.instructions[waits[-1] :] + loop.instructions[: waits[-1]]
        copy = next((n for n, i in enumerate(cycle) if i.name in ("LDGSTS", "UTMALDG")), None)
        if copy is not None and not any(i.name == "BAR" and "SYNC" in i.modifiers for i in cycle[:copy]):
            problems.append("no BAR.SYNC between the last wait for products and the next copy")
    return problems


def check_addresses(kernel: Compiled, case: Case) -> list[str]:
    problems = ir.narrow_products(kernel.ttir.text) if case.wide_addresses else []
    loaded = ir.loaded_products(kernel.ttir.text) if case.loaded_products is not None else []
    return problems + (loaded if len(loaded) > (case.loaded_products or 0) else [])


# ---- checks of attention kernels ---------------------------------------------------------------------


def check_page_mma(kernel: Compiled, case: Case) -> list[str]:
    """Products by warp, the warps side by side along the columns, and no more of them than the tile needs."""
    pages = _pages(case)
    if case.mma == "none":
        return []
    layouts = set(re.findall(r"#ttg\.nvidia_mma<\{(.*?)\}>", kernel.ttgir.text))
    expected = rf"versionMajor = 2, .*warpsPerCTA = \[1, {pages.warps}\], instrShape = \[16, 8\]"
    problems = [] if len(layouts) == 1 and re.match(expected, *layouts) else [f"MMA layouts {sorted(layouts)}"]
    if "wgmma" in kernel.launch.asm["ptx"]:
        problems.append("products by warpgroup")
    if (found := kernel.page_operations["mma"]) != pages.mma:
        problems.append(f"{found} products a warp and tile, expected {pages.mma}")
    kinds = {i.name for i in kernel.program.instructions if i.is_mma}
    count = sum(i.is_mma for i in kernel.page_loop)
    if kinds != {"HMMA"} or not pages.mma - pages.repeated_mma <= count <= pages.mma:
        problems.append(f"{count} {', '.join(sorted(kinds))} in the loop, expected {pages.mma} HMMA")
    return problems


def check_operations(kernel: Compiled, case: Case) -> list[str]:
    """Float operations and shuffles of a tile are those of the law, which is the same for every row."""
    if kernel.fingerprint.chains_blocks:
        return ["a matrix product goes on from the tile before"]
    if case.mma == "none":
        return []
    found = kernel.page_operations
    wanted = _pages(case).operations
    return [f"{found[name]} {name} a tile, expected {count}" for name, count in wanted.items() if found[name] != count]


def check_buffers(kernel: Compiled, case: Case) -> list[str]:
    """Several tiles of keys and values lie in shared memory, and the copies of all but one are in flight."""
    pages = _pages(case)
    shapes = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x(\d+)x(\d+)x(\w+),", kernel.ttgir.text)
    enough = Counter(shape[1:] for shape in shapes if int(shape[0]) >= pages.buffers)
    missing = Counter((str(a), str(b), pages.element) for a, b in pages.tiles) - enough
    problems = [
        f"fewer than {pages.buffers} buffers of {'x'.join(tile)} in shared memory: {sorted(shapes)}" for tile in missing
    ]
    if kernel.launch.shared < pages.buffers * pages.tile_bytes:
        problems.append(f"{kernel.launch.shared} bytes of shared memory hold no {pages.buffers} tiles")
    pending = ir.pending_copies(kernel.ttgir)
    if pending < (pages.buffers - 1) * len(pages.tiles):
        problems.append(f"{pending} copies in flight behind the loop's wait, expected {len(pages.tiles)} or more")
    return problems


def check_page_copies(kernel: Compiled, case: Case) -> list[str]:
    """Keys and values come by asynchronous copies as wide as their rows allow; what is loaded plainly is counted."""
    pages = _pages(case)
    shapes = "|".join(f"{a}x{b}" for a, b in pages.tiles)
    problems = ir.narrow_tiles(kernel.ttgir, shapes, pages.element, pages.copy_bytes)
    count = sass.counts(kernel.page_loop)
    wide = pages.tile_bytes // (16 * pages.threads)
    if pages.copy_bytes == 16 and count["LDGSTS.128"] < wide:
        problems.append(f"{count['LDGSTS.128']} 128-bit copies in the loop, fewer than the {wide} of keys and values")
    for what, found, allowed in (
        ("LDG", count["LDG"], case.plain_loads),
        ("LDGSTS of fewer than 128 bits", count["LDGSTS"] - count["LDGSTS.128"], case.narrow_copies),
    ):
        if found > allowed:
            problems.append(f"{found} {what} in the loop, more than {allowed}")
    return problems


def _pages(case: Case) -> PageLoop:
    assert case.pages is not None
    return case.pages


CHECKS = (
    check_resources,
    check_ptxas,
    check_atomics,
    check_mma,
    check_sums,
    check_loads,
    check_dequant,
    check_layout,
    check_barrier,
    check_addresses,
)
ATTENTION_CHECKS = (
    check_resources,
    check_ptxas,
    check_atomics,
    check_page_mma,
    check_operations,
    check_buffers,
    check_page_copies,
    check_layout,
    check_addresses,
)


# ---- results -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    """What was measured of a case, and what is wrong with it."""

    case: str
    arch: int
    registers: int
    shared: int
    warps: int
    blocks_per_sm: int  # occupancy
    mma: dict[str, int]  # of the main loop
    per_weight: float | None
    instructions: int  # of the main loop, or of a kernel without products
    counts: dict[str, int]  # of these, by kind
    sums: str  # digest of the fingerprint
    problems: list[str]

    @property
    def label(self) -> str:
        return f"{self.case} sm_{self.arch}"


def compiled(case: Case) -> Compiled:
    """The kernel that a case is about."""
    with dryrun(case.arch) as launches:
        case.launch()
    found = {launch.kernel.hash: launch for launch in launches if launch.name == case.kernel}
    if len(found) != 1:
        names = [launch.name for launch in launches]
        raise ValueError(f"{case.label}: expected one kernel {case.kernel!r} among the launches, got {names}")
    return Compiled(next(iter(found.values())))


def check(case: Case) -> Result:
    try:
        kernel = compiled(case)
    except TritonError as error:
        return Result(case.name, case.arch, 0, 0, 0, 0, {}, None, 0, {}, "", [f"{type(error).__name__}: {error}"])
    loop = max(kernel.loops, key=lambda loop: loop.mma, default=None) if case.mma != "none" and not case.pages else None
    instructions = kernel.page_loop if case.pages else loop.instructions if loop else kernel.program.instructions
    count = sass.counts(instructions)
    registers, shared, warps = kernel.resources.registers, kernel.launch.shared, kernel.launch.warps
    return Result(
        case.name,
        case.arch,
        registers,
        shared,
        warps,
        sass.occupancy(case.arch, registers, shared, warps),
        {name: count[name] for name in sass.MMA if count[name]},
        round(loop.per_weight, 3) if loop and case.per_weight is not None else None,
        len(instructions),
        dict(sorted(count.items())),
        kernel.fingerprint.digest if kernel.fingerprint.block else "",
        [problem for one in (ATTENTION_CHECKS if case.pages else CHECKS) for problem in one(kernel, case)],
    )


def compare_sums(cases: Iterable[Case], results: Iterable[Result]) -> None:
    """Add a problem where two cases that should fold a block alike do not."""
    found = {result.label: result for result in results}
    for case in cases:
        if case.same_sums_as is None:
            continue
        mine, other = found[case.label], found.get(f"{case.same_sums_as} sm_{case.arch}")
        if other is not None and mine.sums != other.sums:
            mine.problems.append(f"folds a block by other operations than {case.same_sums_as}")


def compare_limits(results: Iterable[Result], limits: dict[str, Any]) -> None:
    """Add a problem where a case needs more than is recorded for this Triton."""
    if limits.get("triton") != triton.__version__:
        return
    for result in results:
        known = limits["cases"].get(result.label)
        if known is None:
            result.problems.append("no recorded limits; run with --update")
            continue
        for what in LIMITED:
            now, before = getattr(result, what), known.get(what)
            if now is not None and before is not None and now > before + (SLACK if what == "per_weight" else 0):
                result.problems.append(f"{what} {now} was {before}")


def load_limits() -> dict[str, Any]:
    return json.loads(LIMITS_FILE.read_text()) if LIMITS_FILE.exists() else {"triton": triton.__version__, "cases": {}}


def save_limits(results: Iterable[Result], *, everything: bool) -> None:
    """Record what was measured; of cases that were not run only where the Triton is the same and not all were."""
    limits = load_limits()
    keep = limits["cases"] if limits.get("triton") == triton.__version__ and not everything else {}
    measured = {r.label: {what: getattr(r, what) for what in LIMITED if getattr(r, what) is not None} for r in results}
    text = json.dumps({"triton": triton.__version__, "cases": dict(sorted((keep | measured).items()))}, indent=2)
    LIMITS_FILE.write_text(text + "\n")


# ---- the cases ---------------------------------------------------------------------------------------


# instructions per weight, by form: whole groups; symmetric groups of 32; six bits under 16 scales a block; else 6.0
PER_WEIGHT = {"w4-block": 2.1, "w4-zero": 2.1, "w8-block": 2.1, "w8-block-row": 2.1, "w4-half": 3.0, "w6-k6": 6.7}
# LDG of a block and row tile: block scales, fetched by hand
PLAIN_LOADS = {"block": 2, "zero": 2}
FORMATS = ("q4", "q4 zero point", "q4_0", "q4_1", "q4_k", "q4 zero", "q5_0", "q5_1", "q6_k", "q8", "q8_0")
ARCHS = (80, 90)
BUCKETS = (16, 32, 64)


@cache
def weight(fmt: str, segments: int) -> QTensor:
    """A packed weight [256, 1024] whose launches are those of a larger one."""
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    if fmt in ("bf16", "f32"):
        q = dense(w.bfloat16() if fmt == "bf16" else w)
    elif fmt in GGUF:
        form = GGUF[fmt]
        raw = torch.zeros(256, 1024 // form.weights * form.nbytes, dtype=torch.uint8)
        q = from_gguf(raw, fmt, (256, 1024))
    else:
        q = quantize(w, fmt[:2], None if fmt == "q8" else 128, symmetric=fmt != "q4 zero")
    if fmt == "q4 zero point":
        scale = q.parts["scale"].half().float()  # as importers have them
        zero = torch.full(scale.shape, 7, dtype=torch.uint8)
        q = replace(q, parts=q.parts | {"scale": scale, "zero_point": zero})
    return replace(t64.pack_t64(q), segments=segments)


def matmul_case(fmt: str, arch: int, rows: int, dtype: torch.dtype = torch.bfloat16, segments: int = 4) -> Case:
    """A product of `rows` rows: decode up to 64, prefill above."""
    form = t64.form_of(weight(fmt, segments)).name
    scales = form.split("-")[1] if "-" in form else form
    kind = "decode" if rows <= 64 else "prefill" if segments > 1 else "prefill one segment"
    word = str(dtype).removeprefix("torch.")
    name = f"{kind} {rows} {fmt}" + ("" if dtype == torch.bfloat16 else f" {word}")
    narrow = {"block": 0, "dense": 0, "zero": 2}.get(scales, 16)
    return Case(
        name,
        arch,
        "_dequant_matmul_kernel" if rows <= 64 else "_prefill_gemm_kernel",
        partial(_matmul, fmt, segments, rows, dtype),
        registers=255 if scales == "dense" else {16: 128, 32: 144, 64: 208}.get(rows, 255),
        per_weight=None if scales == "dense" or dtype == torch.float32 else PER_WEIGHT.get(form, 6.0),
        mma="none" if dtype == torch.float32 else "float",
        plain_loads=PLAIN_LOADS.get(scales, 0),
        narrow_copies=narrow + (8 if arch < 90 and rows == 16 else 0),
        lds=8 if scales == "block" else 32,
        ldsm=4 if arch >= 90 else 68,
        same_sums_as=f"decode 16 {fmt}" if rows != 16 and dtype == torch.bfloat16 else None,
    )


def _matmul(fmt: str, segments: int, rows: int, dtype: torch.dtype) -> None:
    matmul(torch.zeros(rows, 1024, dtype=dtype), weight(fmt, segments))


def _gated(rows: int, segments: int) -> None:
    half = quantize(torch.ones(128, 1024), "q4", 128)
    swiglu_matmul(
        torch.zeros(rows, 1024, dtype=torch.bfloat16), replace(t64.pack_gate_up(half, half), segments=segments)
    )


def _top(rows: int) -> None:
    lm_head_argmax(torch.zeros(rows, 1024, dtype=torch.bfloat16), weight("q8", 1))


def _int8(rows: int, segments: int) -> None:
    q = t64.pack_t64(quantize(torch.ones(256, 1024), "q8", None), "t64-int8")
    w8a8_matmul(torch.zeros(rows, 1024, dtype=torch.bfloat16), replace(q, segments=segments))


def _written_out(fmt: str, segments: int) -> None:
    with mock.patch.object(qgemm, "SCRATCH_ROWS", 4096):
        matmul(torch.zeros(4096, 1024, dtype=torch.bfloat16), weight(fmt, segments))


# ---- attention and pages

WORDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32, "int8": torch.int8}
WORDS["fp8"] = torch.float8_e4m3fn
KV_HEADS, RATIO = 2, 4
DIMS = (64, 80, 128, 256)
RARE_DIMS = (8, 32)
VARIANTS = ("whole", "split", "shared")
OPTIONAL = {"window": 64, "softcap": 50.0, "sinks": torch.zeros(KV_HEADS * RATIO)}


def _padded(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())


def page_loop(word: str, dim: int, rows: int, *, capped: bool = False) -> PageLoop:
    """Of a head's dim numbers in pages of a dtype."""
    size = WORDS[word].itemsize
    pieces = 2 if size == 1 else 1
    return PageLoop(
        rows,
        half=_padded(dim // 2, 16),
        part=_padded(dim // pieces, 32),
        pieces=pieces,
        keys=32 if dim > 128 else 64,
        element={"fp16": "f16", "int8": "i16", "fp8": "i16"}.get(word, word),
        copy_bytes=math.gcd(16, dim * size * pieces // 2),
        buffers=1 if word == "f32" else 2,
        capped=capped,
    )


def attention_case(variant: str, word: str, dim: int, arch: int, rows: int = 16, options: str = "") -> Case:
    """A variant of the attention kernel, or "tail" of a tree; options: of OPTIONAL, by name."""
    is_tail, codes = variant == "tail", WORDS[word].itemsize == 1
    alike = f"attention {'whole' if variant in ('whole', 'tail') else 'split'} 16 {word} {dim}"
    return Case(
        f"attention {variant} {rows} {word} {dim} {options}".rstrip(),
        arch,
        "_tail_kernel" if is_tail else "_attention_kernel",
        partial(_tree if is_tail else _attend, variant, word, dim, rows, options),
        mma="none" if word == "f32" else "float",
        sync=True,
        # ids, spans, bases and scales; a tail has an id for each slot, small heads short turns
        plain_loads=(48 if is_tail else 2) if word == "f32" else 1,
        narrow_copies=52
        if is_tail and word == "f32"
        else 32
        if is_tail
        else 16
        if dim in RARE_DIMS
        else 8
        if codes
        else 4,
        loaded_products=2 if is_tail else 1,
        same_sums_as=alike,
        pages=page_loop(word, dim, rows, capped="softcap" in options),
    )


def _attend(variant: str, word: str, dim: int, rows: int, options: str) -> None:
    """Rows of three sequences over one chunk, which they have in common."""
    layout, arena, q, rope = _paged(word, dim, 3 * _tokens(rows))
    table = page_table(layout.page_ids([*range(1, 9), 0]).repeat(3, 1), torch.full((3,), 512, dtype=torch.int32))
    cu_rows = torch.arange(4, dtype=torch.int32) * _tokens(rows)
    row_pos = torch.arange(512 - _tokens(rows), 512, dtype=torch.int32).repeat(3)
    longest = {"whole": 1, "split": 0, "shared": None}[variant]
    with mock.patch.object(attention, "make_plan", partial(make_plan, longest_whole=longest)):
        paged_attention(
            q, arena, layout, 1, table, cu_rows, row_pos, rope,
            scale=0.125, cascade=variant == "shared", **_chosen(options),
        )  # fmt: skip


def _tree(variant: str, word: str, dim: int, rows: int, options: str) -> None:
    """A chain of nodes behind one full page."""
    count = _tokens(rows)
    layout, arena, q, rope = _paged(word, dim, count)
    table = page_table(layout.page_ids([[1]]), torch.tensor([64], dtype=torch.int32))
    page, slot = layout.page_ids([2]).repeat(count), torch.arange(count, dtype=torch.int32)
    chain = token_tree(list(range(-1, count - 1)))
    tree_attention(q, arena, layout, 1, table, [chain], page, slot, rope, scale=0.125, **_chosen(options))


def _paged(word: str, dim: int, tokens: int) -> tuple[Any, ...]:
    """Layout, arena of nine pages, queries and rope table."""
    layout = KVLayout(2, KV_HEADS, dim, WORDS[word])
    arena = torch.zeros(9 * layout.page_bytes, dtype=torch.uint8)
    q = torch.zeros(tokens, KV_HEADS * RATIO, dim, dtype=WORDS[word] if WORDS[word].itemsize > 1 else torch.bfloat16)
    return layout, arena, q, rope_table([1.0] * (dim // 2), 512)


def _tokens(rows: int) -> int:
    """Of a sequence, such that its tiles have so many rows."""
    return 1 if rows == 16 else 5


def _chosen(options: str) -> dict[str, Any]:
    return {name: OPTIONAL[name] for name in options.split()}


def _append(word: str, dim: int, rot_dim: int) -> None:
    layout, arena, _, _ = _paged(word, dim, 1)
    x = torch.zeros(2, KV_HEADS, dim, dtype=torch.bfloat16)
    slot = torch.arange(2, dtype=torch.int32)
    append_kv(x, x, arena, layout, 1, layout.page_ids([1, 2]), slot, slot, rope_table([1.0] * (rot_dim // 2), 512))


def _copy() -> None:
    layout, arena, _, _ = _paged("bf16", 128, 1)
    copy_pages(arena, layout, layout.page_ids([1, 2]).tolist(), layout.page_ids([3, 4]).tolist())


def _commit(word: str, dim: int) -> None:
    layout, arena, _, _ = _paged(word, dim, 1)
    commit_path(arena, layout, [(int(layout.page_ids(1)), 0)], [(int(layout.page_ids(2)), 0)])


def attention_cases(arch: int) -> list[Case]:
    """Every variant of 16-bit and int8 pages, one by turns of others; options, trees and what moves pages sampled."""
    words = [word for word in WORDS if word != "fp8" or arch >= FP8_ARCH]
    found, turn = [], 0
    for word in words:
        for dim in (*DIMS, *RARE_DIMS):
            for rows in _row_tiles(arch, word, dim):
                turn += 1
                every = word in ("bf16", "int8") and dim in DIMS
                for variant in VARIANTS if every else VARIANTS[turn % 3 :][:1]:
                    found.append(attention_case(variant, word, dim, arch, rows))
                if dim in (64, 128):
                    found.append(attention_case("tail", word, dim, arch, rows))
    for variant, word, dim, options in (
        ("whole", "bf16", 128, "window"),
        ("split", "bf16", 64, "softcap"),
        ("shared", "int8", 128, "softcap sinks"),
        ("whole", "fp16", 80, "window softcap sinks"),
        ("tail", "bf16", 128, "window softcap"),
    ):
        found.append(attention_case(variant, word, dim, arch, options=options))
    for word, dim, options in (("bf16", 128, ""), ("int8", 64, "sinks"), ("f32", 256, ""), ("bf16", 80, "sinks")):
        launch = partial(_attend, "split", word, dim, 16, options)
        name = f"attention fold {word} {dim} {options}".rstrip()
        found.append(Case(name, arch, "_fold_kernel", launch, mma="none", loaded_products=0))
    for word, dim, rot_dim in [(word, 128, 128) for word in words] + [("bf16", 80, 32), ("int8", 64, 64)]:
        launch = partial(_append, word, dim, rot_dim)
        found.append(
            Case(f"append {word} {dim} rot {rot_dim}", arch, "_append_kernel", launch, mma="none", loaded_products=1)
        )
    found.append(Case("copy pages", arch, "_copy_kernel", _copy, mma="none", loaded_products=0))
    for word, dim in (("bf16", 128), ("int8", 80), ("f32", 64)):
        found.append(
            Case(
                f"commit {word} {dim}",
                arch,
                "_commit_kernel",
                partial(_commit, word, dim),
                mma="none",
                loaded_products=2,
            )
        )
    return found


def _row_tiles(arch: int, word: str, dim: int) -> list[int]:
    """BLOCK_M that the tile table has."""
    kind = tile_kind(KVLayout(1, 1, dim, WORDS[word]))
    return sorted({tile_for(arch, "attention", kind, dim, dim, rows).rows for rows in (16, 32)})


def cases() -> list[Case]:
    """Every kernel at the tiles of its table, on sm_80 and sm_90."""
    found = []
    for arch in ARCHS:
        for fmt in (*FORMATS, "bf16"):
            found += [matmul_case(fmt, arch, rows) for rows in BUCKETS]
            found += [matmul_case(fmt, arch, 512), matmul_case(fmt, arch, 1024, segments=1)]
        for fmt in ("q4", "q4_0", "q4_k", "q8_0"):
            found += [matmul_case(fmt, arch, rows, torch.float16) for rows in (16, 512)]
        found += [matmul_case(fmt, arch, rows, torch.float32) for fmt in ("q4", "q4_1") for rows in (16, 512)]
        found += [
            Case(
                f"gated {rows} q4",
                arch,
                "_dequant_matmul_kernel",
                partial(_gated, rows, 1),
                registers=255,
                per_weight=2.1,
                plain_loads=4,
                narrow_copies=4,
                lds=6,
                ldsm=68,
                same_sums_as="decode 16 q4",
            )
            for rows in BUCKETS
        ]
        found.append(
            Case(
                "top 16 q8",
                arch,
                "_dequant_matmul_kernel",
                partial(_top, 16),
                registers=128,
                per_weight=2.1,
                plain_loads=2,
                narrow_copies=4,
                lds=3,
                ldsm=16,
                same_sums_as="decode 16 q8",
            )
        )
        found += [
            Case(
                f"written out {fmt}",
                arch,
                "_prefill_gemm_kernel",
                partial(_written_out, fmt, 4),
                plain_loads=4,
                lds=3,
                ldsm=68,
            )
            for fmt in ("q4", "q4_1")
        ]
        found += [
            Case(
                f"w8a8 {rows}", arch, "_w8a8_kernel", partial(_int8, rows, 4), registers=255, mma="int8", lds=3, ldsm=68
            )
            for rows in (16, 64, 2048)
        ]
    return found + [case for arch in ARCHS for case in attention_cases(arch)]


def _check_number(number: int) -> Result:
    return check(cases()[number])


def check_all(chosen: list[Case], jobs: int) -> list[Result]:
    if jobs == 1 or len(chosen) < 2:
        return [check(case) for case in chosen]
    labels = [case.label for case in cases()]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_check_number, [labels.index(case.label) for case in chosen]))


def table(results: Iterable[Result]) -> Table:
    columns = ("case", "arch", "regs", "shared", "blocks/SM", "loop", "products", "instr/weight", "loads", "sums", "")
    out = Table(*columns, title=f"kernels compiled by Triton {triton.__version__}")
    for r in results:
        loads = " ".join(
            f"{name} {r.counts[name]}" for name in ("LDGSTS.128", "LDG", "LDSM", "LDS") if r.counts.get(name)
        )
        products = " ".join(f"{count} {name}" for name, count in r.mma.items())
        weight = "" if r.per_weight is None else f"{r.per_weight:.2f}"
        verdict = "[red]fails" if r.problems else "[green]holds"
        numbers = (str(n) for n in (r.arch, r.registers, r.shared, r.blocks_per_sm, r.instructions))
        out.add_row(r.case, *numbers, products, weight, loads, r.sums, verdict)
    return out


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    arch: Annotated[int | None, typer.Option(help="only this architecture, as 80 or 90")] = None,
    only: Annotated[str, typer.Option(help="only cases whose name contains this")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the results here")] = None,
    update: Annotated[bool, typer.Option("--update", help="record what was measured as the new limits")] = False,
    jobs: Annotated[int, typer.Option(help="processes")] = 2,
) -> None:
    """Compile the kernels and check what is promised of them."""
    console = Console(width=None if sys.stdout.isatty() else 160, soft_wrap=True)
    known = cases()
    chosen = [case for case in known if only in case.name and arch in (None, case.arch)]
    results = check_all(chosen, jobs)
    compare_sums(chosen, results)
    if update:
        save_limits(results, everything=len(chosen) == len(known))
    else:
        compare_limits(results, load_limits())
    console.print(table(results))
    for result in results:
        for problem in result.problems:
            console.print(f"{result.label}: {problem}", style="red", markup=False, highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    raise typer.Exit(any(result.problems for result in results))


if __name__ == "__main__":
    app()
