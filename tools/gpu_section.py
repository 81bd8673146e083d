"""What the sections of tools/gpu_run.py share: what one is given, where it puts what it finds, and commands it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "bench", "tests"))

import torch
from harness import ROOT
from torch import Tensor

DRY_ARCH = 90
POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0  # between being asked to end and being killed
MAX_START_SECONDS = 30.0  # that imports may have taken, whatever a container's clock says
MAX_PROBLEMS = 20  # of a promise
TO_BE_KNOWN = "to be known"  # the target of what is no promise
NOT_REACHED = "not reached"

Row = dict[str, Any]


class Stopped(BaseException):
    """A signal asked the run to end."""


class ContextLost(RuntimeError):
    """A kernel left the GPU's context unusable: nothing more can be judged in this process."""


class Skipped(str):
    """In place of a comparison: why there is none."""

    __slots__ = ()


Outcome = str | Skipped | None  # of a comparison: None where bits are equal


def born(process: int | str = "self") -> float:
    """When a process began, of time.monotonic(): imports are a part of its time."""
    ticks = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - min(max(age, 0.0), MAX_START_SECONDS)


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
class _Seen:
    """Outcomes so far."""

    count: int = 0
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    is_cut: bool = False

    def add(self, outcome: Outcome) -> None:
        if isinstance(outcome, Skipped):
            self.skipped.append(outcome)
            return
        self.count += 1
        self.problems += [outcome] if outcome else []

    def judged(self, total: int | None, by: str) -> tuple[str, str, bool | None]:
        """Value, target and whether it holds."""
        if self.problems:
            value, holds = f"{len(self.problems)} of {self.count} differ: {self.problems[0]}", False
        elif self.is_cut:
            of = f" of {total}" if total else ""
            value, holds = f"cut short after {self.count}{of} comparisons, equal bits in these", None
        elif not self.count:
            value, holds = "nothing compared", None
        else:
            value, holds = f"equal bits, {self.count} comparisons{by}", True
        if few := self.skipped[:3]:
            value += f"; {len(self.skipped)} skipped: {', '.join(few)}" + ", ..." * (len(self.skipped) > len(few))
        return value, "equal bits", holds


@dataclass(slots=True)
class Run:
    """What a section is given, and where it puts what it finds."""

    out: Path  # of what stays
    scratch: Path  # of what does not
    dry: bool
    deadline: float  # of time.monotonic()
    model: Path | None = None  # a folder of tools/cut_model.py
    commit: str | None = None  # what runs, where there is no .git
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
        """One more; in the place of an earlier one about the same."""
        fresh = {"what": what, "value": value, "target": target, "holds": holds}
        at = next((i for i, row in enumerate(self.rows) if row["what"] == what), len(self.rows))
        self.rows[at : at + 1] = [fresh]
        self.save()

    def attempt(self, what: str, check: Callable[[], None], *, by_kernels: bool = True) -> None:
        """A check in whose place an exception is a row; ContextLost where the GPU is of no more use either."""
        try:
            with self.kernels() if by_kernels else nullcontext():
                check()
        except Exception as error:
            self.row(what, f"failed: {_in_short(error)}", "no exception", False)
            if self.dry:
                return
            try:
                torch.cuda.synchronize()
            except Exception:
                raise ContextLost(f"CUDA context lost in {what}: {_in_short(error)}") from error

    def promise(
        self, what: str, outcomes: Iterable[Outcome], by: str = "interpreter", total: int | None = None
    ) -> None:
        """Whether bits are equal, by as many comparisons as the time allows.

        by: what a dry run ran on; total: comparisons that there would be, where that is known.
        """
        seen = _Seen()
        try:
            for outcome in outcomes:
                seen.add(outcome)
                if len(seen.problems) == MAX_PROBLEMS:
                    break
                if self.left() < 0 and (total is None or seen.count + len(seen.skipped) < total):
                    seen.is_cut = True
                    break
        except BaseException:
            seen.is_cut = True
            raise
        finally:
            self.found[what] = {"comparisons": seen.count, "problems": seen.problems, "skipped": seen.skipped}
            self.row(what, *seen.judged(total, f" ({by})" * self.dry))

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


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


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
        paths = filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))  # needs no install
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
            )
        self.code: int | None = None  # None where time ran out

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def is_over(self) -> bool:
        self.code = self._process.poll()
        return self.code is not None or time.monotonic() > self._deadline

    def ask(self) -> None:
        """The whole group to end."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)

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
