"""Workloads with known integers, each a report whose numbers are gated by what must hold."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from polymodel.errors import InvalidRequest, PolymodelError
from polymodel.workloads import adversary, batch, exact, radix, session, simulated, speculation, switch
from polymodel.workloads.report import Report, Setting, Workload

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for part in (session, radix, batch, switch, exact, adversary, speculation, simulated)
    for workload in part.WORKLOADS
}


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of the report of a workload that raised."""

    workload: str
    error: str
    passed: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.workload}: error: {self.error}"


def run(names: Sequence[str], setting: Setting) -> Iterator[Report | Failed]:
    """The named workloads in turn, all if none is named. InvalidRequest names the choices."""
    for name in names:
        if name not in WORKLOADS:
            raise InvalidRequest(f"no workload is named {name!r}; there are {', '.join(WORKLOADS)}")
    return (_report(WORKLOADS[name], setting) for name in names or WORKLOADS)


def _report(workload: Workload, setting: Setting) -> Report | Failed:
    """An error that is raised on purpose ends this workload and not those after it."""
    try:
        return workload.run(setting)
    except PolymodelError as error:
        return Failed(workload.name, str(error))


def environment(device: torch.device) -> dict[str, str | int | None]:
    """What produced a report."""
    found: dict[str, str | int | None] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(["polymodel", *sys.argv[1:]]),
        "machine": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "polymodel": version("polymodel"),
        "commit": commit(),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        found["triton"] = version("triton")
    return found


def cpu_name() -> str:
    """Of this machine, with its cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def commit() -> str | None:
    """Of the checkout that runs; None where it is an installed copy."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return None
