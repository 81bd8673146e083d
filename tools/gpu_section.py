"""What the sections of tools/gpu_run.py share: what one is given, where it puts what it finds, and commands it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("bench", "tests"))

import torch
from harness import ROOT
from torch import Tensor

DRY_ARCH = 90
POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0  # between being asked to end and being killed

Row = dict[str, Any]


class Stopped(BaseException):
    """A signal asked the run to end."""


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT raise Stopped here."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(slots=True)
class Run:
    """What a section is given, and where it puts what it finds."""

    out: Path  # of what stays
    scratch: Path  # of what does not
    dry: bool
    deadline: float  # of time.monotonic()
    model: Path | None = None  # a folder of tools/cut_model.py
    keep: Callable[[dict[str, Any]], None] = lambda known: None  # called with all that is known so far
    found: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def has_fp8(self) -> bool:
        return self.dry or torch.cuda.get_device_capability() >= (8, 9)

    @property
    def known(self) -> dict[str, Any]:
        return {"rows": self.rows, "found": self.found}

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def row(self, what: str, value: Any, target: str | None = None, holds: bool | None = None) -> None:
        self.rows.append({"what": what, "value": value, "target": target, "holds": holds})
        self.save()

    def promise(self, what: str, problems: Sequence[str], by: str = "interpreter") -> None:
        """Whether bits are equal: nothing but the problems speaks against it. by: what a dry run ran on."""
        self.found[what] = list(problems) or "equal bits"
        value = f"{len(problems)} differ: {problems[0]}" if problems else "equal bits" + f" ({by})" * self.dry
        self.row(what, value, "equal bits", not problems)

    def save(self) -> None:
        self.keep(self.known)

    @contextmanager
    def kernels(self, *, races: bool = False) -> Iterator[None]:
        """Launches run: on the GPU, or in the interpreter."""
        if not self.dry:
            yield
            return
        from interpreter import interpreted

        with interpreted(DRY_ARCH, races=races, sequential_dot=not races):
            yield


def differing(a: Tensor, b: Tensor) -> int:
    """Elements of unequal bits."""
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(ints) != b.contiguous().view(ints)).sum())


class Process:
    """A command in a process group of its own, its output in a file; it ends when its time is over."""

    def __init__(
        self, command: Sequence[str], log: Path, seconds: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log, self._deadline = log, time.monotonic() + max(seconds, 1.0)
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={**os.environ, **(environment or {})},
            )
        self.code: int | None = None  # None where time ran out

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def is_over(self) -> bool:
        self.code = self._process.poll()
        return self.code is not None or time.monotonic() > self._deadline

    def end(self) -> None:
        """The whole group: asked first, so that what it started in groups of their own ends as well."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)


def finished(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[str, int | None]:
    """Output and exit status of a command; None where time ran out."""
    with tempfile.TemporaryDirectory() as folder:
        process = Process(command, Path(folder) / "log", seconds, environment)
        try:
            while not process.is_over():
                time.sleep(POLL_SECONDS)
        finally:
            process.end()
        return process.log, process.code
