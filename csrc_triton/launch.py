"""What every launch shares: where a tensor's kernel runs, the tiles of its architecture, the pinned compiler options.

Kernels run on CUDA tensors. `kernels_on_cpu(arch)` lets them take CPU tensors too, for what executes or
compiles kernels without a GPU: the interpreter of the tests, the dry run of the compile check.

Promise: a tile says how a kernel is cut (rows, columns, warps, stages), never what it adds up in which order,
so no table changes a bit.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language
except ImportError:  # Triton is a Linux package; the CPU path does without
    triton = None

tl: Any = triton and triton.language
# a * b + c keeps its two roundings unless the kernel says fma
OPTIONS: Mapping[str, Any] = {"enable_fp_fusion": False}
TILES = Path(__file__).parent / "tiles"
MIN_ARCH = 80  # bf16 MMA and cp.async
# smaller tiles miss rows of the weight, or the MMA whose order of sums the others have
MIN_TILE = {"rows": 16, "cols": 64, "warps": 4}

_on_cpu: int | None = None  # the architecture whose kernels CPU tensors get, None outside `kernels_on_cpu`
_plain = False  # kernels keep to plain Triton, without inline assembly
_tables: dict[int, Mapping[str, Any]] = {}


if triton is not None:

    class Kernel(triton.JITFunction):  # type: ignore[misc]  # Triton ships no types
        """Launched on the device of its first tensor, as torch's operators are; Triton itself takes the current one."""

        def run(self, *args: Any, **options: Any) -> Any:
            for arg in args:
                if isinstance(arg, Tensor):
                    if arg.is_cuda and (index := arg.get_device()) != torch.cuda.current_device():
                        with torch.cuda.device(index):
                            return super().run(*args, **options)
                    break
            return super().run(*args, **options)


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """triton.jit, or the plain function where there is no Triton."""
    if fn is None:
        return lambda f: jit(f, **options)
    return fn if triton is None else Kernel(fn, **options)


def constexpr(value: Any) -> Any:
    """A module constant that kernels may read."""
    return value if tl is None else tl.constexpr(value)


def constexpr_function(fn: Callable[..., Any]) -> Any:
    """A Python function that kernels call while they are compiled."""
    return fn if triton is None else triton.constexpr_function(fn)


@contextlib.contextmanager
def kernels_on_cpu(arch: int, *, plain: bool = False) -> Iterator[None]:
    """CPU tensors take the kernels of an architecture (80, 90, ...); plain: without its inline assembly."""
    global _on_cpu, _plain
    before = _on_cpu, _plain
    _on_cpu, _plain = arch, plain
    try:
        yield
    finally:
        _on_cpu, _plain = before


def runs_kernel(x: Tensor) -> bool:
    """Whether a launcher given x launches its kernel (else it runs the CPU path)."""
    return x.is_cuda or _on_cpu is not None


def kernels_run_on(device: torch.device) -> bool:
    """Whether tensors on a device get the kernels."""
    return device.type == "cuda" or _on_cpu is not None


def arch_of(x: Tensor) -> int:
    """Compute capability of x's device, times ten: 80, 86, 89, 90, 100, 120."""
    if _on_cpu is not None and not x.is_cuda:
        return _on_cpu
    return _device_arch(x.device.index or 0)


def asm_arch(arch: int) -> int:
    """The architecture whose instructions a kernel may name; 0 for none."""
    return 0 if _plain else arch


def joins_planes(arch: int) -> bool:
    """Whether a block of weights goes into one MMA (wgmma), not into one a plane (mma.sync, whose operand layout
    would follow the joining)."""
    return 90 <= arch < 120


@cache
def _device_arch(index: int) -> int:
    if triton is None:
        raise RuntimeError("kernels need Triton, which is not installed")
    major, minor = torch.cuda.get_device_capability(index)
    arch = 10 * major + minor
    if torch.version.hip or arch < MIN_ARCH:
        name = torch.cuda.get_device_name(index)
        raise RuntimeError(f"{name} (compute capability {major}.{minor}): kernels need an NVIDIA GPU of 8.0 or later")
    return arch


def triton_dtype(dtype: torch.dtype) -> Any:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


# ---- tiles -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch is cut."""

    rows: int  # rows of x, or of a sequence, a program
    cols: int  # rows of the weight a program
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages, **OPTIONS}


def tile_for(arch: int, kernel: str, fmt: str, n: int, k: int, rows: int) -> Tile:
    """The table's tile of a kernel and weight format for a launch of `rows` rows.

    Keys run from "kernel/fmt/NxK" over "kernel/fmt" to "kernel"; each holds {row bucket: tile}, and the smallest
    bucket of at least `rows` is taken, else the largest.
    """
    buckets = _buckets(arch, kernel, fmt, n, k)
    for bucket, tile in buckets:
        if rows <= bucket:
            return tile
    return buckets[-1][1]


@cache
def _buckets(arch: int, kernel: str, fmt: str, n: int, k: int) -> tuple[tuple[int, Tile], ...]:
    """Row buckets and their tiles, ascending."""
    tiles = tile_table(arch)["tiles"]
    for key in (f"{kernel}/{fmt}/{n}x{k}", f"{kernel}/{fmt}", kernel):
        if key in tiles:
            return tuple(sorted(((int(b), Tile(**entry)) for b, entry in tiles[key].items()), key=lambda pair: pair[0]))
    raise ValueError(f"tile table of sm_{arch} has no {kernel!r}")


def tile_table(arch: int) -> Mapping[str, Any]:
    """The architecture's table; without one of its own that of the nearest older one with the same kind of MMA. Says
    so, once."""
    if arch not in _tables:
        known = (int(path.stem[3:]) for path in TILES.glob("sm_*.json"))
        nearest = max(a for a in known if a <= arch and joins_planes(a) == joins_planes(arch))
        if nearest != arch:
            warnings.warn(
                f"no tile table for sm_{arch}: taking sm_{nearest}'s; tools/autotune.py makes one", stacklevel=2
            )
        _tables[arch] = json.loads((TILES / f"sm_{nearest}.json").read_text())
    return _tables[arch]


def load_tiles(path: str | Path) -> int:
    """Use a table made by tools/autotune.py instead of the package's; returns the architecture it is for."""
    table = json.loads(Path(path).read_text())
    arch = check_tiles(table, str(path))
    _tables[arch] = table
    _buckets.cache_clear()
    return arch


@contextlib.contextmanager
def tiles_from(table: Mapping[str, Any]) -> Iterator[None]:
    """Launches take the tiles of a table that `check_tiles` accepts, in place of its architecture's."""
    arch = check_tiles(table, "tiles_from")
    before = dict(_tables)
    _tables[arch] = table
    _buckets.cache_clear()
    try:
        yield
    finally:
        _tables.clear()
        _tables.update(before)
        _buckets.cache_clear()


def check_tiles(table: Any, name: str) -> int:
    """Refuse a table that a launch would stumble over; returns its architecture."""
    if (
        not isinstance(table, dict)
        or not isinstance(table.get("arch"), int)
        or not isinstance(table.get("tiles"), dict)
    ):
        raise ValueError(f"{name}: expected {{'arch': int, 'tiles': {{...}}}}")
    for key, buckets in table["tiles"].items():
        if not isinstance(buckets, dict) or not buckets or not all(str(b).isdigit() for b in buckets):
            raise ValueError(f"{name}: {key}: expected {{row bucket: tile}}, got {buckets!r}")
        for bucket, entry in buckets.items():
            good = isinstance(entry, dict) and set(entry) == {"rows", "cols", "warps", "stages"}
            if not good or not all(isinstance(v, int) and v > 0 for v in entry.values()):
                raise ValueError(f"{name}: {key}/{bucket}: expected rows, cols, warps and stages, got {entry!r}")
            if any(math.log2(entry[field]) % 1 for field in ("rows", "cols", "warps")):
                raise ValueError(f"{name}: {key}/{bucket}: rows, cols and warps must be powers of two, got {entry!r}")
            if any(entry[field] < least for field, least in MIN_TILE.items()):
                least = "at least {rows} rows, {cols} cols and {warps} warps".format(**MIN_TILE)
                raise ValueError(f"{name}: {key}/{bucket}: expected {least}, got {entry!r}")
    return int(table["arch"])
