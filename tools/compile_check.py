"""Every kernel compiled for sm_80 and sm_90 without a GPU, and what the design promises of it checked in the binary.

    python tools/compile_check.py [--arch 90] [--only decode] [--json FILE] [--update]

A case is a launch of real host code with what its kernel may use. Registers, shared memory and instructions per
weight are compared with tools/compile_limits.json as well: a regression fails, `--update` writes what was measured.

Instructions per weight: those in the main loop that turn codes into operands (DEQUANT: logic, shifts, conversions and
arithmetic, but no moves, integer adds or uniform instructions), less one FFMA or FADD per accumulator register and
fold, over the weights that the loop turns, counted once however many warps turn them. Shifts and logic of addresses
are counted in: a few in a hundred, and no compiler output tells them apart.
"""

from __future__ import annotations

import json
import sys
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

from csrc_triton import qgemm, t64
from csrc_triton.qmatmul import lm_head_argmax, matmul, swiglu_matmul
from csrc_triton.quant import GGUF, QTensor, dense, from_gguf, quantize
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
MMA_OF = {("float", True): "HGMMA", ("float", False): "HMMA", ("int8", True): "IGMMA", ("int8", False): "IMMA"}


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
    same_sums_as: str | None = None  # a case of the same architecture that folds a block by the same operations

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
    return ir.narrow_products(kernel.ttir.text) if case.wide_addresses else []


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
    counts: dict[str, int]  # instructions of the main loop
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
        return Result(case.name, case.arch, 0, 0, 0, 0, {}, None, {}, "", [f"{type(error).__name__}: {error}"])
    loop = max(kernel.loops, key=lambda loop: loop.mma, default=None) if case.mma != "none" else None
    count = loop.counts if loop else sass.counts(kernel.program.instructions)
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
        dict(sorted(count.items())),
        kernel.fingerprint.digest if kernel.fingerprint.block else "",
        [problem for one in CHECKS for problem in one(kernel, case)],
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
    return found


def _check_number(number: int) -> Result:
    return check(cases()[number])


def check_all(chosen: list[Case], jobs: int) -> list[Result]:
    if jobs == 1 or len(chosen) < 2:
        return [check(case) for case in chosen]
    labels = [case.label for case in cases()]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_check_number, [labels.index(case.label) for case in chosen]))


def table(results: Iterable[Result]) -> Table:
    columns = ("case", "arch", "regs", "shared", "blocks/SM", "products", "instr/weight", "loads", "sums", "")
    out = Table(*columns, title=f"kernels compiled by Triton {triton.__version__}")
    for r in results:
        loads = " ".join(
            f"{name} {r.counts[name]}" for name in ("LDGSTS.128", "LDG", "LDSM", "LDS") if r.counts.get(name)
        )
        products = " ".join(f"{count} {name}" for name, count in r.mma.items())
        weight = "" if r.per_weight is None else f"{r.per_weight:.2f}"
        verdict = "[red]fails" if r.problems else "[green]holds"
        numbers = (str(r.registers), str(r.shared), str(r.blocks_per_sm), products, weight, loads, r.sums, verdict)
        out.add_row(r.case, str(r.arch), *numbers)
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
    """Compile the kernels and check what the design promises of them."""
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
