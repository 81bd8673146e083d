"""Workloads with known integers, each a report whose numbers are gated by what must hold."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from polymodel.errors import InvalidRequest
from polymodel.workloads import adversary, batch, exact, radix, session, simulated, switch
from polymodel.workloads.report import Report, Setting, Workload

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for part in (session, radix, batch, switch, exact, adversary, simulated)
    for workload in part.WORKLOADS
}


def run(names: Sequence[str], setting: Setting) -> Iterator[Report]:
    """The named workloads in turn, all if none is named. InvalidRequest names the choices."""
    for name in names:
        if name not in WORKLOADS:
            raise InvalidRequest(f"no workload is named {name!r}; there are {', '.join(WORKLOADS)}")
    return (WORKLOADS[name].run(setting) for name in names or WORKLOADS)


def environment(device: str = "auto") -> dict[str, str | int]:
    """What produced a report."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    found: dict[str, str | int] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": " ".join(["polymodel", *sys.argv[1:]]),
        "machine": f"{names[0]}, {len(names)} cores" if names else platform.processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "polymodel": version("polymodel"),
    }
    if device.startswith("cuda"):
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        found["triton"] = version("triton")
    return found
