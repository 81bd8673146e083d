"""Kernels executed on the CPU: Triton's interpreter, with what it gets wrong repaired and what it lets pass refused.

    with interpreted(90):
        y = launcher(x_on_cpu, ...)

Repaired: bfloat16 and fp8 (the stock interpreter computes on their bit patterns), rounding of casts, fma (one
rounding), tf32 operands, inline assembly (see ptx.py). Refused with `KernelFault`: a lane outside the tensor it
addresses or off its own alignment, two programs that meet in memory without an atomic, two lanes of a store that
disagree. A masked lane without `other` is undefined, and here NaN. int32 overflow and a failed `tl.device_assert`
raise as well.

TRITON_INTERPRET stays unset: kernels remain compilable JIT functions, and everything replaced here is put
back on leaving. One thread, one `interpreted()` at a time, CPU tensors alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import triton.language as tl
from ptx import fma, run_elementwise
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from csrc_triton.launch import kernels_on_cpu

SMALL_FLOATS = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
}
SHADOW_ALIGN = 16  # bytes; no element is larger
NOBODY, SEVERAL = -1, -2  # in place of a program's number
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
REWRITTEN: dict[Callable[..., Any], Callable[..., Any]] = {}  # kernels' Python functions, parsed once a process
TF32_MASK = np.uint32(0xFFFFE000)  # the MMA ignores the low 13 bits of a float32


class KernelFault(Exception):
    """A kernel touched memory in a way that a GPU would not report."""


@contextmanager
def interpreted(
    arch: int = 90, *, races: bool = True, sequential_dot: bool = False, plain: bool = False
) -> Iterator[None]:
    """Launches on CPU tensors run here, with the tiles and instructions of an architecture; plain: no assembly.

    With `sequential_dot`, tl.dot adds product after product in ascending k to the accumulator it is given, each
    product and each sum rounded to float32: results then depend on the kernel's own order of operations alone.
    """
    if "ttsem" in sys.modules:  # tools/sanitize.sh: launches are executed from the compiler's own IR
        if sequential_dot:
            pytest.skip("ttsem adds up products in an order of its own")
        with kernels_on_cpu(arch, plain=True):
            yield
        return
    with ExitStack() as stack:
        builder = Builder(races, sequential_dot)
        functions = Functions(stack)

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(stock, "_get_np_dtype", numpy_type)
        replace(stock, "interpreter_builder", builder)
        replace(stock, "interpreter_semantic", TritonSemantic(builder))
        replace(stock.InterpretedFunction, "rewritten_fn", REWRITTEN)
        replace(TritonSemantic, "binary_op_sanitize_overflow_impl", _refuse_overflow)
        replace(TritonSemantic, "broadcast_impl_value", _broadcast)
        replace(tl.core, "_type_for_tuple_values", _type_of_values)
        # once for all launches; the stock interpreter does it anew for each and leaves what device functions patched
        language = stock._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        stack.callback(language.restore)
        replace(stock, "_patch_lang", lambda fn: SimpleNamespace(restore=lambda: None))
        # a block of one zero is not False: tl.load asks `if other`
        replace(tl.tensor, "__bool__", lambda self: self.type.is_block() or bool(self.handle.data))
        # the stock one calls int() on a one-element array, which NumPy 2.4 refuses
        replace(tl.tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))
        replace(stock.GridExecutor, "__call__", _launch(stock.GridExecutor.__call__, builder))
        replace(JITFunction, "run", lambda self, *args, **kwargs: functions.kernel(self).run(*args, **kwargs))
        replace(JITFunction, "__call__", lambda self, *args, **kwargs: functions.rewritten(self)(*args, **kwargs))
        stack.enter_context(kernels_on_cpu(arch, plain=plain))
        yield


def _refuse_overflow(_: Any, x: Any, y: Any, operation: Callable[..., Any]) -> None:
    """The stock check takes ten tensor operations, twice as long as all the rest of an integer operation."""
    ty = x.type.scalar
    if ty.int_bitwidth < 64:
        result = OPERATIONS[operation.__name__](x.handle.data.astype(np.int64), y.handle.data.astype(np.int64))
        fits = (result >= ty.get_int_min_value()) & (result <= ty.get_int_max_value())
        assert fits.all(), f"int{ty.int_bitwidth} overflow detected for operation {operation.__name__}"


_stock_broadcast = TritonSemantic.broadcast_impl_value


def _broadcast(self: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """The stock one broadcasts blocks of equal shapes as well."""
    if x.type.is_block() and y.type.is_block() and x.type.shape.values == y.type.shape.values:
        return x, y
    return _stock_broadcast(self, x, y)


_stock_type_of_values = tl.core._type_for_tuple_values


def _type_of_values(values: Any, fields: Any = None) -> Any:
    """The stock one writes a shape's type out anew for every tensor."""
    sizes = tuple(value.value if type(value) is tl.constexpr else value for value in values)
    if fields is None and all(type(size) is int for size in sizes):
        return _type_of_sizes(sizes)
    return _stock_type_of_values(values, fields)


@cache
def _type_of_sizes(sizes: tuple[int, ...]) -> Any:
    return _stock_type_of_values(sizes)


class Functions:
    """The interpretable twins of JIT functions."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._twins: dict[Any, stock.InterpretedFunction] = {}

    def kernel(self, jitted: JITFunction) -> stock.InterpretedFunction:
        twin = self._twins.get(jitted.fn)
        if twin is None:
            twin = self._twins[jitted.fn] = stock.InterpretedFunction(jitted.fn)
            names = jitted.fn.__globals__
            added = {name: value for name, value in vars(stock).items() if name not in names}
            names |= added  # what a rewritten function asks for
            self._stack.callback(_forget, names, added)
        return twin

    def rewritten(self, jitted: JITFunction) -> Callable[..., Any]:
        return self.kernel(jitted).rewrite()


def _forget(names: dict[str, Any], added: dict[str, Any]) -> None:
    for name in added:
        names.pop(name, None)


def _launch(call: Callable[..., Any], builder: Builder) -> Callable[..., Any]:
    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        builder.memory = Memory.of(dict(zip(executor.arg_names, args, strict=False)) | kwargs, builder.races)
        try:
            return call(executor, *args, **kwargs)
        except stock.InterpreterError as error:
            if isinstance(error.__cause__, KernelFault):
                raise KernelFault(f"{error.__cause__} ({_place(executor.fn, error.__cause__)})") from error.__cause__
            raise

    return launch


def _place(kernel: Callable[..., Any], fault: KernelFault) -> str:
    """Kernel and line at which a fault arose."""
    file = kernel.__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(fault.__traceback__) if frame.filename == file]
    return f"{kernel.__name__}, {file.rsplit('/', 1)[-1]}:{lines[-1] if lines else '?'}"


# ---- numbers -----------------------------------------------------------------------------------------


_stock_numpy_type = cache(stock._get_np_dtype)


def numpy_type(ty: Any) -> np.dtype[Any]:
    """The NumPy type that computes as a Triton type does."""
    element = ty.element_ty if isinstance(ty, tl.block_type) else ty
    if isinstance(element, tl.pointer_type):
        return np.dtype(np.uint64)
    return SMALL_FLOATS.get(element.name) or _stock_numpy_type(element)


def _is_small(dtype: np.dtype[Any]) -> bool:
    return dtype in SMALL_FLOATS.values()


def cast(x: np.ndarray, target: np.dtype[Any], rounding: Any = None) -> np.ndarray:
    """Round to nearest even unless told otherwise; fp8 saturates, as cvt.rn.satfinite does."""
    if target == SMALL_FLOATS["bf16"] and rounding == ir.ROUNDING_MODE.RTZ:
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(target)
    if _is_small(target) and x.dtype != target:
        x = x.astype(np.float32)  # integers too: they reach small floats by way of float32
        if target.itemsize == 1:
            largest = float(ml_dtypes.finfo(target).max)
            x = np.where(np.isnan(x), x, np.clip(x, -largest, largest))
    elif _is_small(x.dtype):
        x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        return x.astype(target)


def _tf32(x: np.ndarray) -> np.ndarray:
    truncated = (np.ascontiguousarray(x).view(np.uint32) & TF32_MASK).view(np.float32)
    return np.where(np.isfinite(x), truncated, x)


def _sequential_dot(a: np.ndarray, b: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """acc + a . b, one product at a time in ascending k."""
    columns = np.ascontiguousarray(np.moveaxis(a, -1, 0))[..., None]  # [K, ..., M, 1]
    rows = np.ascontiguousarray(np.moveaxis(b, -2, 0))[..., None, :]  # [K, ..., 1, N]
    acc = acc.astype(np.float32)
    product = np.empty_like(acc)
    for column, row in zip(columns, rows, strict=True):
        np.multiply(column, row, out=product)
        acc += product
    return acc


class Builder(stock.InterpreterBuilder):
    """The operations of a running kernel; those that the stock interpreter gets wrong or does not check."""

    def __init__(self, races: bool, sequential_dot: bool) -> None:
        super().__init__()
        self.options = dataclasses.replace(self.options, debug=True)  # int32 overflow and device_assert raise
        self.races = races
        self.sequential_dot = sequential_dot
        self.memory = Memory([], races)

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        super().set_grid_idx(x, y, z)
        self.memory.enter((x, y, z), (x * self.grid_dim[1] + y) * self.grid_dim[2] + z)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        element = ptrs.get_element_ty()
        dtype = numpy_type(element)
        fill = _undefined(dtype) if other is None else other.data
        return stock.TensorHandle(self.memory.load(ptrs.data, mask.data, fill, dtype), element)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        self.memory.store(ptrs.data, value.data, mask.data)

    def create_atomic_rmw(self, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self.memory.check(ptr.data[mask.data], value.data.itemsize, "atomic")
        return super().create_atomic_rmw(op, ptr, value, mask, *rest)

    def create_atomic_cas(self, ptr: Any, expected: Any, value: Any, *rest: Any) -> Any:
        self.memory.check(ptr.data.reshape(-1), value.data.itemsize, "atomic")
        return super().create_atomic_cas(ptr, expected, value, *rest)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return stock.TensorHandle(cast(src.data, numpy_type(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding: Any) -> Any:
        return stock.TensorHandle(cast(src.data, numpy_type(dst_type), rounding), dst_type.scalar)

    def get_bf16(self, value: float) -> Any:
        return stock.TensorHandle(np.array([value], np.float32).astype(SMALL_FLOATS["bf16"]), tl.bfloat16)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype == np.float64:
            return super().create_fma(x, y, z)
        return stock.TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)

    def create_inline_asm(
        self, asm: str, constraints: str, values: list[Any], types: list[Any], is_pure: bool, pack: int
    ) -> Any:
        targets = [numpy_type(ty) for ty in types]
        outputs = run_elementwise(asm, constraints, [value.data for value in values], targets, pack)
        handles = [stock.TensorHandle(data, ty.scalar) for data, ty in zip(outputs, types, strict=True)]
        return SimpleNamespace(get_result=lambda i: handles[i])

    def create_dot(self, a: Any, b: Any, acc: Any, input_precision: Any, *_: Any) -> Any:
        return stock.TensorHandle(self._dot(a.data, b.data, acc.data, input_precision), acc.dtype.scalar)

    def _dot(self, a: np.ndarray, b: np.ndarray, acc: np.ndarray, input_precision: Any) -> np.ndarray:
        if acc.dtype.kind in "iu":  # float64 holds the sums exactly, and NumPy has no fast integer product
            return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(acc.dtype) + acc
        if acc.dtype == np.float64:
            return np.matmul(a, b) + acc
        x, y = a.astype(np.float32), b.astype(np.float32)
        if a.dtype == np.float32 and input_precision == ir.INPUT_PRECISION.TF32:
            x, y = _tf32(x), _tf32(y)
        with np.errstate(all="ignore"):
            if self.sequential_dot:
                return _sequential_dot(x, y, acc).astype(acc.dtype)
            return (np.matmul(x, y) + acc.astype(np.float32)).astype(acc.dtype)


# ---- memory ------------------------------------------------------------------------------------------


def _undefined(dtype: np.dtype[Any]) -> np.ndarray:
    """What a masked lane without `other` holds."""
    if dtype.kind == "b":
        return np.array(True)
    return np.frombuffer(b"\x55" * dtype.itemsize, dtype) if dtype.kind in "iu" else np.array(np.nan, dtype)


class Region:
    """Bytes [start, end) that a launch may touch, and which program touched each last."""

    def __init__(self, start: int, end: int, name: str) -> None:
        self.start, self.end, self.name = start, end, name
        self.origin = start - start % SHADOW_ALIGN
        self.writer: np.ndarray | None = None
        self.reader: np.ndarray | None = None

    def elements(self, dtype: np.dtype[Any]) -> np.ndarray:
        """The memory from `origin` on."""
        count = (self.end - self.origin) // dtype.itemsize
        size = count * dtype.itemsize
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.origin)).view(dtype)

    def shadow(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Last writer and reader of every byte, as rows of `size` bytes."""
        if self.writer is None or self.reader is None:
            count = -(-(self.end - self.origin) // SHADOW_ALIGN) * SHADOW_ALIGN
            self.writer, self.reader = np.full((2, count), NOBODY, np.int32)
        return self.writer.reshape(-1, size), self.reader.reshape(-1, size)


class Memory:
    """The tensors of one launch."""

    def __init__(self, regions: list[Region], races: bool) -> None:
        self.regions = regions
        self.starts = np.array([r.start for r in regions], np.uint64)
        self.ends = np.array([r.end for r in regions], np.uint64)
        self.races = races
        self.program: tuple[int, int, int] = (0, 0, 0)
        self.number = 0

    @classmethod
    def of(cls, arguments: dict[str, Any], races: bool) -> Memory:
        """Views that overlap count as one region."""
        regions: list[Region] = []
        for start, end, name in sorted(span for key, value in arguments.items() for span in _spans(key, value)):
            if regions and start < regions[-1].end:
                last = regions[-1]
                regions[-1] = Region(last.start, max(last.end, end), f"{last.name}/{name}")
            else:
                regions.append(Region(start, end, name))
        return cls(regions, races)

    def enter(self, program: tuple[int, int, int], number: int) -> None:
        self.program, self.number = program, number

    def load(self, ptrs: np.ndarray, mask: np.ndarray, fill: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        mask = np.broadcast_to(mask, ptrs.shape).astype(bool)  # a comparison of scalars is kept as int8
        out = np.empty(ptrs.shape, dtype) if mask.all() else np.broadcast_to(fill, ptrs.shape).astype(dtype)
        values = np.empty(np.count_nonzero(mask), dtype)
        for region, lanes, index in self.check(ptrs[mask], dtype.itemsize, "load"):
            values[lanes] = region.elements(dtype)[index]
            if self.races:
                self._note_read(region, index, dtype.itemsize)
        out[mask] = values
        return out

    def store(self, ptrs: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        mask = np.broadcast_to(mask, ptrs.shape).astype(bool)  # a comparison of scalars is kept as int8
        values = np.broadcast_to(value, ptrs.shape)[mask]
        for region, lanes, index in self.check(ptrs[mask], values.itemsize, "store"):
            elements = region.elements(values.dtype)
            elements[index] = values[lanes]
            if self.races:
                self._note_write(region, index, values.itemsize)
                if (elements[index].view(np.uint8) != values[lanes].view(np.uint8)).any():
                    raise KernelFault(
                        f"store: lanes of program {self.program} write different values to one place of {region.name}"
                    )

    def check(self, addresses: np.ndarray, size: int, what: str) -> Iterator[tuple[Region, Any, np.ndarray]]:
        """Per region touched: the lanes that touch it and their elements' places in it. All in bounds and aligned."""
        if not addresses.size:
            return iter(())
        home = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        outside = home < 0
        if self.regions:
            outside |= addresses + np.uint64(size) > self.ends[np.maximum(home, 0)]
        if outside.any():
            raise KernelFault(self._outside(addresses, outside, what))
        if (addresses % np.uint64(size)).any():
            raise KernelFault(f"{what}: program {self.program} addresses {size}-byte elements off their alignment")
        touched = np.unique(home) if home[0] != home[-1] or (home != home[0]).any() else home[:1]
        return iter([self._lanes(addresses, home, int(r), size, len(touched) == 1) for r in touched])

    def _lanes(
        self, addresses: np.ndarray, home: np.ndarray, number: int, size: int, alone: bool
    ) -> tuple[Region, Any, np.ndarray]:
        region = self.regions[number]
        lanes = slice(None) if alone else np.nonzero(home == number)[0]
        return region, lanes, ((addresses[lanes] - np.uint64(region.origin)) // np.uint64(size)).astype(np.int64)

    def _outside(self, addresses: np.ndarray, outside: np.ndarray, what: str) -> str:
        first = int(addresses[outside][0])
        lanes = f"{int(outside.sum())} of {addresses.size} active lanes out of bounds in program {self.program}"
        if not self.regions:
            return f"{what}: {lanes}; the launch has no tensor"
        near = min(self.regions, key=lambda r: max(r.start - first, first - r.end))
        return f"{what}: {lanes}; first at byte {first - near.start} of {near.name} ({near.end - near.start} bytes)"

    def _note_read(self, region: Region, index: np.ndarray, size: int) -> None:
        writer, reader = region.shadow(size)
        self._refuse(writer[index], f"reads {region.name} where", "wrote")
        last = reader[index]
        reader[index] = np.where((last == NOBODY) | (last == self.number), self.number, SEVERAL)

    def _note_write(self, region: Region, index: np.ndarray, size: int) -> None:
        writer, reader = region.shadow(size)
        self._refuse(writer[index], f"writes {region.name} where", "wrote")
        self._refuse(reader[index], f"writes {region.name} where", "read")
        writer[index] = self.number

    def _refuse(self, owners: np.ndarray, does: str, did: str) -> None:
        other = owners[(owners != NOBODY) & (owners != self.number)]
        if other.size:
            who = "several programs" if other[0] == SEVERAL else f"program number {other[0]}"
            raise KernelFault(f"race: program {self.program} {does} {who} {did}")


def _spans(name: str, value: Any) -> Iterator[tuple[int, int, str]]:
    """[start, end) of the tensors in an argument, from their first element to their last."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _spans(f"{name}[{i}]", part)
    elif hasattr(value, "base"):  # a descriptor, or a tensor read as another type
        yield from _spans(name, value.base)
    elif hasattr(value, "data_ptr") and value.numel():
        count = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        yield value.data_ptr(), value.data_ptr() + count * value.element_size(), name
