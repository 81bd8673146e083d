"""What a compiled kernel is made of: instructions, loops, resources, occupancy and what ptxas says about it.

Reads cubins and PTX with the tools in the Triton wheel; needs no GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MMA = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA", "DMMA")
REGISTERS_PER_QUARTER = 16384  # a multiprocessor has four register files; a warp lives in one
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a multiprocessor of an architecture holds; bytes of shared memory."""

    shared_per_block: int
    shared: int
    warps: int
    blocks: int


LIMITS = {
    80: Limits(166912, 167936, 64, 32),
    86: Limits(101376, 102400, 48, 16),
    89: Limits(101376, 102400, 48, 24),
    90: Limits(232448, 233472, 64, 32),
    100: Limits(232448, 233472, 64, 32),
    120: Limits(101376, 102400, 48, 24),
}


@dataclass(frozen=True, slots=True)
class Resources:
    registers: int
    stack: int  # bytes; more than 0 where registers spill
    shared: int  # bytes, static
    local: int


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    predicate: str  # "@P0", "@!UP1" or ""
    name: str  # "LDGSTS"
    modifiers: tuple[str, ...]  # ("E", "BYPASS", "LTC128B", "128")
    operands: str

    @property
    def is_mma(self) -> bool:
        return self.name in MMA

    @property
    def starts_sum(self) -> bool:
        """An MMA that adds to zero rather than to its accumulator."""
        return self.is_mma and re.search(r"!UPT|\bRZ$", self.operands) is not None

    @property
    def is_wait(self) -> bool:
        """Waits for the products of a warpgroup."""
        return self.name == "WARPGROUP" and "DEPBAR" in self.modifiers

    @property
    def is_shift(self) -> bool:
        """A shift on the multiplier: IMAD.SHL, or IMAD.U32 by a power of two; not the moves written as IMAD."""
        return self.name == "IMAD" and self.modifiers[:1] in (("SHL",), ("U32",)) and "RZ, RZ" not in self.operands

    @property
    def is_choice(self) -> bool:
        """A choice between two values; one between a value and nothing is the size of a masked copy."""
        return self.name == "SEL" and "RZ" not in self.operands

    @property
    def bits(self) -> int:
        """Width of a memory access."""
        return next((int(m) for m in self.modifiers if m in ("64", "128")), 32)

    @property
    def registers(self) -> tuple[str, ...]:
        """Names of the general registers among the operands, the destination first."""
        return tuple(re.findall(r"\bR\d+\b|\bRZ\b", self.operands))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.predicate, ".".join((self.name, *self.modifiers)), self.operands)))


class Program:
    """The instructions of a cubin, in order."""

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        self.instructions = tuple(instructions)

    @classmethod
    def of(cls, cubin: bytes) -> Program:
        return cls(parse(_cuobjdump(cubin, "-sass")))

    @cached_property
    def loops(self) -> tuple[tuple[Instruction, ...], ...]:
        """Every [target, branch] of a backward branch, in order of their ends."""
        spans = []
        for branch in self.instructions:
            target = re.search(r"0x([0-9a-f]+)$", branch.operands) if branch.name == "BRA" else None
            if target and int(target[1], 16) < branch.address:
                spans.append((int(target[1], 16), branch.address))
        return tuple(
            tuple(i for i in self.instructions if a <= i.address <= b) for a, b in sorted(spans, key=lambda s: s[1])
        )

    @cached_property
    def main_loops(self) -> tuple[tuple[Instruction, ...], ...]:
        """The innermost loops that hold an MMA: one, or more where the compiler splits off a remainder."""
        busy = [loop for loop in self.loops if any(i.is_mma for i in loop)]
        return tuple(loop for loop in busy if not any(_inside(other, loop) for other in busy))


def _inside(inner: tuple[Instruction, ...], outer: tuple[Instruction, ...]) -> bool:
    within = outer[0].address <= inner[0].address and inner[-1].address <= outer[-1].address
    return within and len(inner) < len(outer)


def parse(listing: str) -> Iterator[Instruction]:
    """Instructions of a `cuobjdump -sass` listing."""
    for address, predicate, name, modifiers, operands in _LINE.findall(listing):
        yield Instruction(int(address, 16), predicate.strip(), name, tuple(modifiers.split(".")[1:]), operands)


def counts(instructions: Iterable[Instruction]) -> Counter[str]:
    """How often each instruction occurs; memory accesses wider than 32 bits also by width, as "LDGSTS.128"."""
    found: Counter[str] = Counter()
    for i in instructions:
        found[i.name] += 1
        if i.name in ("LDG", "LDGSTS", "LDS", "STS", "STG") and i.bits > 32:
            found[f"{i.name}.{i.bits}"] += 1
    return found


def ptx_counts(ptx: str) -> Counter[str]:
    """Float32 and matrix operations and shuffles, by first name, in the shortest loop of PTX that holds an MMA: the way
    through an iteration that leaves out what only some of them do."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {found[1]: n for n, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))}
    ends = ((n, re.search(r"\bbra\S*\s+(\$\w+);", line)) for n, line in enumerate(lines))
    loops = [lines[labels[found[1]] : n] for n, found in ends if found and labels[found[1]] < n]
    busy = [loop for loop in loops if any("mma.sync" in line for line in loop)]
    names = (re.match(r"(?:@!?%p\d+ )?\{?\s*([a-z]\w*)\S*", line) for line in min(busy, key=len, default=[]))
    return Counter(n[1] for n in names if n and (n[0].endswith(".f32") or n[1] == "shfl"))


def resources(cubin: bytes) -> Resources:
    listing = _cuobjdump(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", listing)
    if found is None:
        raise ValueError(f"no resource usage in {listing[:200]!r}")
    return Resources(*map(int, found.groups()))


def occupancy(arch: int, registers: int, shared: int, warps: int) -> int:
    """Blocks of a kernel that a multiprocessor holds at once; 0 where one does not fit."""
    limits = LIMITS[arch]
    if shared > limits.shared_per_block:
        return 0
    per_warp = -(-registers * 32 // 256) * 256  # registers are given out by 256
    by_registers = 4 * (REGISTERS_PER_QUARTER // per_warp) // warps if per_warp else limits.blocks
    by_shared = limits.shared // (shared + 1024)  # each block keeps 1 KiB for the system
    return min(by_registers, by_shared, limits.warps // warps, limits.blocks)


def ptxas_log(ptx: str, arch: int, *, fp_fusion: bool = False) -> str:
    """What ptxas says of a kernel under -v: resources, spills, and performance warnings such as C7510 to C7519."""
    suffix = "a" if arch >= 90 else ""
    flags = [] if fp_fusion else ["--fmad=false"]
    with _file(ptx.encode(), ".ptx") as source:
        command = [get_ptxas(arch).path, "-v", "-lineinfo", *flags, f"--gpu-name=sm_{arch}{suffix}", source]
        return subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=True).stderr


def _cuobjdump(cubin: bytes, option: str) -> str:
    environment = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"}  # it calls nvdisasm
    with _file(cubin, ".cubin") as path:
        command = [str(TOOLS / "cuobjdump"), option, path]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@contextmanager
def _file(content: bytes, suffix: str) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        yield file.name
