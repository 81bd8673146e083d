"""Rows of numbers, the gates that decide whether they may be believed, and what workloads run on."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from polymodel.config import PAGE_TOKENS, EngineConfig, ModelConfig, Weights
from polymodel.engine import Engine
from polymodel.kv import MIN_SUPERBLOCKS
from polymodel.selfcheck import write_random_model
from polymodel.sim import aligned

Source = Literal["measured", "counted", "simulated"]
Size = Literal["small", "full"]


@dataclass(frozen=True, slots=True)
class Gate:
    """An invariant of the numbers; where it does not hold, none of the report's counts."""

    what: str
    value: Any
    expected: str
    holds: bool

    def __str__(self) -> str:
        value = cell(self.value)
        expected = "" if value == self.expected else f", expected {self.expected}"
        return f"{'holds' if self.holds else 'FAILS'}  {self.what}: {value}{expected}"


@dataclass(slots=True)
class Report:
    """Of one workload. Rows of one kind have the same keys; times are in the unit that their keys end with."""

    workload: str
    source: Source
    shape: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.gates) and all(gate.holds for gate in self.gates)

    def equal(self, what: str, value: Any, expected: Any) -> None:
        """A gate: exactly this value."""
        self.gates.append(Gate(what, value, cell(expected), bool(value == expected)))

    def that(self, what: str, value: Any, expected: str, holds: bool) -> None:
        """A gate: what is expected said in words."""
        self.gates.append(Gate(what, value, expected, bool(holds)))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        """For people: a table for each kind of row, then the gates."""
        shape = ", ".join(f"{key} {cell(value)}" for key, value in self.shape.items())
        lines = [f"{self.workload} ({self.source}{f': {shape}' if shape else ''})"]
        for keys, rows in groupby(self.rows, key=tuple):
            table = [[key.replace("_", " ") for key in keys], *([cell(row[key]) for key in keys] for row in rows)]
            lines += [*(f"  {line.rstrip()}" for line in aligned(table)), ""]
        return "\n".join([*lines, *(f"  {gate}" for gate in self.gates)])


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(of)}" for key, of in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value)) or "none"
    return str(value)


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a workload runs on, and how long."""

    model: Path | None = None  # None: the random model of `polymodel.selfcheck`
    size: Size = "small"
    weights: Weights = "file"
    device: str = "auto"
    repetitions: int = 3  # of what is timed
    seconds: float | None = None  # that it may take, where a workload can do less (batch, switch); None: no limit
    progress: Callable[[str], None] = to_stderr

    @contextmanager
    def source(self) -> Iterator[Path]:
        """The checkpoint to add to engines."""
        if self.model is not None:
            yield self.model
            return
        with TemporaryDirectory() as folder:
            write_random_model(Path(folder))
            yield Path(folder)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    about: str  # in one line
    run: Callable[[Setting], Report]


# ---- what workloads share ----------------------------------------------------------------------------


def open_engine(setting: Setting, config: ModelConfig, kv_tokens: int, **options: Any) -> Engine:
    """With room for so many tokens of the model in pages, and for any weights."""
    kv_budget = 2 * (kv_tokens // PAGE_TOKENS + MIN_SUPERBLOCKS) * page_bytes(config)
    return Engine(setting.device, budget="1024GiB", kv_budget=max(kv_budget, 16 << 20), config=EngineConfig(**options))


def device_of(setting: Setting) -> torch.device:
    """Where its engines are; InvalidRequest where there is no such device."""
    with Engine(setting.device, kv_budget="16MiB") as engine:
        return engine.device


def page_bytes(config: ModelConfig) -> int:
    """Of a page of the model in float32, the most that it takes."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * PAGE_TOKENS


def lcg(count: int, seed: int, vocab: int) -> list[int]:
    """Token ids of a linear congruential generator: the same everywhere."""
    state, ids = 2463534242 + seed, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        ids.append(state % vocab)
    return ids


def next_id(token: int, vocab: int) -> int:
    """What is said after a token where a workload prescribes the tokens."""
    return (token * 48271 + 1) % vocab


class Watch:
    """Seconds by part of a run, to the end of what a device does in it."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[part] += time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Limit:
    """Seconds from now on; None: without end."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._start = time.perf_counter()

    @property
    def used(self) -> float:
        return time.perf_counter() - self._start


def spread(times: Sequence[float]) -> float | None:
    """How much longer the median took than the least, as a part of it; None for less than two repetitions."""
    return median(times) / min(times) - 1 if len(times) > 1 else None
