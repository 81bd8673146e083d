"""The hardware facts that the promises of bits rest on, by probes: one product, computed in every way that kernels may.

bfloat16 and float16 sums are compared bit by bit with those of one probe. Sums of int8 products are exact in any
order, so every probe is compared with the exact sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import compile_check
import torch
import triton
import triton.language as tl
from dryrun import dryrun
from gpu_section import DRY_ARCH, TO_BE_KNOWN, Run, differing
from torch import Tensor

from csrc_triton.launch import OPTIONS

# ---- probes --------------------------------------------------------------------------------------------


@triton.jit
def _probe_kernel(
    a_ptr,  # [M, K] bfloat16, float16 or int8
    b_ptr,  # [N, K]
    out_ptr,  # [M, N] float32, or int32 of int8
    zero,  # 0, which the compiler does not know
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    REGISTERS: tl.constexpr,
):
    """Grid (M / BM, N / BN). a . b^T as the matmul kernels sum: 128 columns afresh, folded by fma."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), out_ptr.dtype.element_ty)
    for kb in range(0, K, 128):
        k = kb + tl.arange(0, 128)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        if REGISTERS:  # what was computed on is no longer in shared memory
            ints = tl.int8 if a.dtype == tl.int8 else tl.int16
            a = (a.to(ints, bitcast=True) ^ zero.to(ints)).to(a.dtype, bitcast=True)
        b = tl.load(b_ptr + n[None, :] * K + k[:, None])
        if a.dtype == tl.int8:
            acc += tl.dot(a, b, out_dtype=tl.int32)
        else:
            product = tl.dot(a, b, input_precision="ieee")
            acc = tl.fma(product, tl.full((BM, BN), 1.0, tl.float32), acc)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


@dataclass(frozen=True, slots=True)
class Probe:
    """One way to compute the same product."""

    rows: int  # of a: the M side of the instruction
    cols: int
    warps: int
    registers: bool  # a from registers, else from shared memory
    by_group: bool = True  # by wgmma on sm_90, else by mma.sync

    def instruction(self, dtype: torch.dtype) -> str:
        """On sm_90."""
        return compile_check.MMA_OF["int8" if dtype == torch.int8 else "float", self.by_group]


PROBES = {
    "n64": Probe(64, 64, 4, True),
    "n16": Probe(64, 16, 4, True),
    "n32": Probe(64, 32, 4, True),
    "n128": Probe(64, 128, 4, True),
    "n64 from shared": Probe(64, 64, 4, False),
    "n128 from shared": Probe(64, 128, 4, False),
    "n64, 8 warps": Probe(128, 64, 8, True),
    "n128, 8 warps from shared": Probe(128, 128, 8, False),
    "mma.sync": Probe(64, 64, 2, False, by_group=False),
}
BASE = "n64"
# fact -> the probes that must give the base's bits, and whether a promise rests on it
FACTS = {
    "wgmma n16 = n32 = n64 = n128": (("n16", "n32", "n128"), True),
    "A from registers = from shared memory": (("n64 from shared", "n128 from shared"), True),
    "4 = 8 warps": (("n64, 8 warps", "n128, 8 warps from shared"), True),
    "mma.sync = wgmma": (("mma.sync",), False),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
ELSEWHERE = (BASE, "n16", "n128", "n64, 8 warps")  # those that say something where there is no wgmma
DRY = (BASE, "n16", "n64 from shared", "mma.sync")


def run_probe(probe: Probe, a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=torch.int32 if a.dtype == torch.int8 else torch.float32, device=a.device)
    grid = (m // probe.rows, n // probe.cols)
    options = {"num_warps": probe.warps, "num_stages": 2, **OPTIONS}
    _probe_kernel[grid](a, b, out, 0, n, k, BM=probe.rows, BN=probe.cols, REGISTERS=probe.registers, **options)
    return out


def probe_problem(probe: Probe, dtype: torch.dtype) -> str | None:
    """What a dry run finds that is not as the probe claims; None where it is what it is called."""
    with dryrun(DRY_ARCH) as launches:
        run_probe(probe, torch.empty(128, 256, dtype=dtype), torch.empty(128, 256, dtype=dtype))
    found = compile_check.Compiled(launches[0])
    products = [i for i in found.program.instructions if i.is_mma]
    size, expected = f"64x{probe.cols}x{32 if dtype == torch.int8 else 16}", probe.instruction(dtype)
    if {i.name for i in products} != {expected}:
        return f"products by {sorted({i.name for i in products})}, expected {expected}"
    if probe.by_group and not all(size in i.modifiers for i in products):
        return f"products of {sorted({'.'.join(i.modifiers) for i in products})}, expected {size}"
    if probe.by_group and any(dot.first_in_registers != probe.registers for dot in found.dots):
        return f"a {'not ' * probe.registers}from registers"
    if dtype == torch.int8:  # its sums are exact, whatever waits for them
        return None
    return "; ".join(compile_check.check_layout(found, _CASE)) or None


_CASE = compile_check.Case("probe", DRY_ARCH, "_probe_kernel", lambda: None)

# ---- operands ------------------------------------------------------------------------------------------

SETS = ("normal", "wide", "steps", "cancelling", "subnormal", "ties")
INT8_SETS = ("any", "largest")


@dataclass(frozen=True, slots=True)
class Range:
    """Powers of two that a dtype has room for."""

    wide: int
    large: int
    small: tuple[int, int]


# small: products around the smallest normal float32; of float16, whose products are far from it, subnormal operands
RANGES = {torch.bfloat16: Range(20, 20, (-70, -60)), torch.float16: Range(6, 8, (-18, -8))}


def probe_operands(
    kind: str, m: int, n: int, k: int, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """a [m, k] and b [n, k] whose sums differ when their order or their inner precision does."""
    gen = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        values = range(-128, 128) if kind == "any" else (-128, 127)
        a, b = (torch.tensor(values)[torch.randint(len(values), (rows, k), generator=gen)] for rows in (m, n))
        return a.to(dtype).to(device), b.to(dtype).to(device)
    reach = RANGES[dtype]

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, k, generator=gen)

    def power(rows: int, low: int, high: int) -> Tensor:
        return 2.0 ** torch.randint(low, high + 1, (rows, k), generator=gen)

    a, b = normal(m), normal(n)
    if kind == "wide":
        a, b = a * power(m, -reach.wide, reach.wide), b * power(n, -reach.wide, reach.wide)
    elif kind == "steps":  # one large product among many that vanish beside it singly but not together
        a = a * torch.where(torch.arange(k) % 16 == seed % 16, 2.0**12, 2.0**-12)
    elif kind == "cancelling":  # large pairs whose sum is nothing, small ones between them
        large = normal(m) * 2.0**reach.large
        a[:, 0::4], a[:, 2::4] = large[:, 0::4], -large[:, 0::4]
        b[:, 2::4] = b[:, 0::4]
    elif kind == "subnormal":
        a, b = a * power(m, *reach.small), b * power(n, *reach.small)
    elif kind == "ties":  # products half a unit in the last place of the sum so far
        a = torch.randint(1, 4, (m, k), generator=gen).float()
        a[:, 0] = 2.0**12
        b = torch.where(torch.arange(k) == 0, 2.0**12, 0.5) * torch.randint(1, 4, (n, k), generator=gen).float()
    return a.to(dtype).to(device), b.to(dtype).to(device)


# ---- the section ---------------------------------------------------------------------------------------


EXACT = "exact sums by wgmma n64"  # of int8


def fact_names() -> list[str]:
    """All that `facts` judges on a GPU."""
    return [f"{word}: {fact}" for word in DTYPES for fact in (*[EXACT][word != "int8" :], *FACTS)]


def facts(run: Run) -> None:
    """Every fact for every dtype."""
    wgmma = run.dry or torch.cuda.get_device_capability()[0] == 9
    names = DRY if run.dry else tuple(PROBES) if wgmma else ELSEWHERE
    if run.dry:
        _compiled(run)
    for word in DTYPES:
        if run.left() < 0:
            return
        run.attempt(f"{word}: probes", partial(_of_dtype, run, word, names))


def _of_dtype(run: Run, word: str, names: Sequence[str]) -> None:
    dtype = DTYPES[word]
    counts = probe_counts(run, dtype, {name: PROBES[name] for name in names})
    run.found[f"{word}: differing"] = counts
    if dtype == torch.int8:
        _fact(run, f"{word}: {EXACT}", (BASE,), True, counts)
    for fact, (probes, promised) in FACTS.items():
        _fact(run, f"{word}: {fact}", probes, promised or dtype == torch.int8, counts)


def _fact(
    run: Run, name: str, probes: tuple[str, ...], promised: bool, counts: Mapping[str, Mapping[str, int]]
) -> None:
    there = [probe for probe in probes if probe in counts]
    if not there:
        run.row(name, "not probed here", TO_BE_KNOWN)
        return
    total = sum(sum(counts[probe].values()) for probe in there)
    by = " (interpreter)" if run.dry else ""
    value = f"{total} elements differ" if total else f"equal bits{by}"
    run.row(name, value, "equal bits" if promised else TO_BE_KNOWN, total == 0 if promised else None)


def probe_counts(run: Run, dtype: torch.dtype, probes: Mapping[str, Probe]) -> dict[str, dict[str, int]]:
    """Probe -> kind of operands -> elements that differ: from the base, or of int8 from the exact sums."""
    m, n, k = (64, 64, 256) if run.dry else (512, 128, 4096)
    kinds = INT8_SETS if dtype == torch.int8 else SETS
    counts: dict[str, dict[str, int]] = {name: {} for name in probes if name != BASE or dtype == torch.int8}
    for kind in kinds[:1] if run.dry else kinds:
        for seed in range(1 if run.dry else 4):
            a, b = probe_operands(kind, m, n, k, run.device, dtype, seed)
            exact = dtype == torch.int8
            expected = (a.double() @ b.double().T).int() if exact else run_probe(probes[BASE], a, b)
            for name, of_kind in counts.items():
                of_kind[kind] = of_kind.get(kind, 0) + differing(run_probe(probes[name], a, b), expected)
    return counts


def _compiled(run: Run) -> None:
    """The base of two dtypes; a test compiles every probe."""
    problems = {f"{BASE}, {word}": probe_problem(PROBES[BASE], DTYPES[word]) for word in ("bfloat16", "int8")}
    run.found["probes"] = problems
    bad = {name: problem for name, problem in problems.items() if problem}
    run.row("probes compile to what they claim", str(bad) if bad else "yes", "yes", not bad)
