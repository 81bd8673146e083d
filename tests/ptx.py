"""The PTX of kernels' inline assembly, run on NumPy arrays: moves, shifts, logic and arithmetic of pairs of halves.

Every lane runs the instructions in order. An output written while an input is still to be read needs its early
clobber mark (`=&r`), as for a compiler that gives both one register.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
HALVES = {"bf16x2": BF16, "f16x2": np.dtype(np.float16)}
WORD = np.uint32

Words = np.ndarray  # uint32


def run_elementwise(
    asm: str, constraints: str, inputs: list[np.ndarray], outputs: list[np.dtype], pack: int
) -> list[np.ndarray]:
    """tl.inline_asm_elementwise: `pack` neighbours of each array share a 32-bit register."""
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    if any(pack * dtype.itemsize != 4 for dtype in [x.dtype for x in inputs] + outputs):
        raise NotImplementedError(
            f"{pack} elements of {[x.dtype for x in inputs]} and {outputs} fill no 32-bit register"
        )
    given = [np.ascontiguousarray(np.broadcast_to(x, shape)).reshape(-1).view(WORD) for x in inputs]
    registers = {f"${len(outputs) + i}": words for i, words in enumerate(given)}
    program = instructions(asm)
    _refuse_shared_registers(program, constraints.split(","), len(outputs))
    for opcode, target, *sources in program:
        registers[target] = execute(opcode, [_read(registers, source) for source in sources])
    words = (np.broadcast_to(registers[f"${i}"], given[0].shape) for i in range(len(outputs)))
    return [np.ascontiguousarray(w, WORD).view(dtype).reshape(shape) for w, dtype in zip(words, outputs, strict=True)]


def instructions(asm: str) -> list[list[str]]:
    """[opcode, target, source, ...] of each instruction."""
    lines = (line.strip() for line in re.split(r"[;{}\n]", asm))
    return [re.split(r"[\s,]+", line) for line in lines if line and not line.startswith(".reg")]


def _refuse_shared_registers(program: list[list[str]], constraints: list[str], num_outputs: int) -> None:
    inputs = {f"${i}" for i in range(num_outputs, len(constraints))}
    for i, constraint in enumerate(constraints[:num_outputs]):
        written = next((n for n, line in enumerate(program) if line[1] == f"${i}"), len(program))
        if "&" not in constraint and any(inputs & set(line[2:]) for line in program[written + 1 :]):
            raise ValueError(f"${i} is written before an input is last read; its constraint must be '=&r'")


def _read(registers: dict[str, Words], operand: str) -> Words:
    if operand in registers:
        return registers[operand]
    if not operand[0].isdigit() and operand[0] != "-":
        raise ValueError(f"register {operand} is read before it is written")
    return np.array([int(operand, 0) & 0xFFFFFFFF], WORD)


def execute(opcode: str, values: list[Words]) -> Words:
    name, *_, kind = opcode.split(".")
    if kind in HALVES and name in PAIRS:
        pairs = [np.ascontiguousarray(v).view(HALVES[kind]) for v in np.broadcast_arrays(*values)]
        return PAIRS[name](*pairs).astype(HALVES[kind]).view(WORD)
    if opcode not in WORDS:
        raise NotImplementedError(f"PTX instruction {opcode}")
    return WORDS[opcode](*values).astype(WORD)


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Any function of three bits; bit 4a + 2b + c of the table is its value."""
    result = np.zeros_like(a | b | c)
    for case in range(8):
        if int(table[0]) >> case & 1:
            result |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return result


def _prmt(a: Words, b: Words, selectors: Words) -> Words:
    """Four bytes chosen from those of b:a."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a | b)
    for i in range(4):
        which = int(selectors[0]) >> 4 * i & 15
        byte = (both >> np.uint64(8 * (which & 7)) & np.uint64(255)).astype(WORD)
        if which & 8:  # its sign, eight times
            byte = np.where(byte & 128, WORD(255), WORD(0))
        result |= byte << WORD(8 * i)
    return result


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z with one rounding, for floats of at most 32 bits."""
    with np.errstate(all="ignore"):
        product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)  # exact
        total = product + addend
        back = total - product
        exact_to_odd = _to_odd(total, (product - (total - back)) + (addend - back))
        if z.dtype == BF16 or z.dtype.itemsize == 1:
            single = exact_to_odd.astype(np.float32)
            return _to_odd(single, exact_to_odd - single).astype(z.dtype)
        return exact_to_odd.astype(z.dtype)


def _to_odd(rounded: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Of the two neighbours of rounded + error the one with an odd last bit, so that rounding again is harmless."""
    bits = rounded.view(np.int64 if rounded.itemsize == 8 else np.int32)
    inexact = np.isfinite(rounded) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (rounded > 0)
    step = np.where(inexact, np.where(away, 1, -1), 0).astype(bits.dtype)
    return (bits + step).view(rounded.dtype)


WORDS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "not.b32": lambda a: ~a,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
}
PAIRS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": fma,
}
