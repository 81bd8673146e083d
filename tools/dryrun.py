"""Launches without a GPU: `kernel[grid](...)` on CPU tensors compiles as for a chosen GPU, and runs nothing.

    with dryrun(90) as launches:
        launcher(x_on_cpu, ...)
    launches[0].kernel.asm["ptx"], launches[0].registers, launches[0].grid

The host code is the real one: integers that are multiples of 16 or equal to 1, alignment of pointers and compiler
options are what a launch would give the compiler, and a kernel that asks for more shared memory or threads than a
block may have raises OutOfResources, as the loader would. Launchers take their kernels (`kernels_on_cpu`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from sass import LIMITS, resources
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from csrc_triton.launch import kernels_on_cpu

MAX_THREADS = 1024  # of a block


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch that did not happen."""

    kernel: Any  # triton.compiler.CompiledKernel
    grid: tuple[int, int, int]
    arch: int

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def metadata(self) -> Any:
        return self.kernel.metadata

    @property
    def registers(self) -> int:
        return self.kernel.n_regs

    @property
    def shared(self) -> int:
        return self.metadata.shared

    @property
    def warps(self) -> int:
        return self.metadata.num_warps

    @property
    def asm(self) -> Any:
        """Texts by stage: ttir, ttgir, llir, ptx; bytes of the cubin."""
        return self.kernel.asm

    def __repr__(self) -> str:
        options = f"warps={self.warps} shared={self.shared} registers={self.registers}"
        return f"<{self.name} sm_{self.arch} grid={self.grid} {options}>"


@contextmanager
def dryrun(arch: int = 90) -> Iterator[list[Launch]]:
    """Yields the list that launches are noted in."""
    launches: list[Launch] = []
    dry = DryDriver(arch)
    kept: dict[int, tuple[JITFunction, Any]] = {}  # functions launched, with what the driver before had compiled
    run = JITFunction.run

    def compile_and_note(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in kept:
            kept[id(self)] = (self, self.device_caches)
            self.device_caches = defaultdict(self.create_binder)
        dry.launched = None
        kernel = run(self, *args, **kwargs)
        if dry.launched is not None:
            launches.append(Launch(kernel, dry.launched, arch))
            kernel.module = None  # nothing to unload
        return kernel

    with mock.patch.object(driver, "_active", dry), mock.patch.object(JITFunction, "run", compile_and_note):
        _forget_limits()
        try:
            with kernels_on_cpu(arch):
                yield launches
        finally:
            for function, cache in kept.values():
                function.device_caches = cache
            _forget_limits()


def _forget_limits() -> None:
    """The shared memory of device 0 is remembered, whichever driver answered."""
    getattr(triton.compiler.compiler.max_shared_mem, "cache_clear", lambda: None)()


class DryDriver(DriverBase):
    """Answers as a driver with one GPU of the architecture; loads and launches nothing."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.launched: tuple[int, int, int] | None = None  # the grid of the last launch
        self.utils = DryLoader(arch)

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        def launch(grid_x: int, grid_y: int, grid_z: int, *_: Any) -> None:
            self.launched = (grid_x, grid_y, grid_z)

        return launch

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self.arch, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("a dry run times nothing")

    def get_empty_cache_for_benchmark(self) -> None:
        return None

    def clear_cache(self, cache: Any) -> None:
        pass


class DryLoader:
    """The driver's loader of binaries."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": LIMITS[self.arch].shared_per_block, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, words of stack, threads: the handles are not 0 and mean nothing."""
        used = resources(cubin)
        return 1, 1, used.registers, used.stack // 4, MAX_THREADS

    def unload_module(self, module: Any) -> None:
        pass
