"""What would happen: the same Pool and Scheduler on a simulated clock, with a table of hardware speeds. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from heapq import heappop, heappush
from itertools import islice
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from polymodel.config import EngineConfig, LanePolicy, PoolPolicy, is_number
from polymodel.errors import InvalidRequest, PinnedNoRoom, TooLarge, UnknownModel
from polymodel.events import Event, Kind
from polymodel.ledger import format_bytes
from polymodel.pool import Pool, Resident
from polymodel.schedule import Scheduler, Work

Weights = int | Mapping[Hashable, int]  # a model's bytes, or its pieces, of which several models' equal ones count once
Measure = Literal["ttft", "tpot", "latency", "longest_gap"]
MEASURES: tuple[Measure, ...] = get_args(Measure)

DEFAULTS = EngineConfig()


def _is_whole(value: Any, least: float = 0) -> bool:
    return is_number(value, int) and value >= least


# ---- hardware ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds that turn bytes and operations into seconds."""

    name: str
    memory_bandwidth: float  # bytes a second
    memory_efficiency: float  # of that, in a decode step
    flops: float  # operations a second
    flops_efficiency: float  # of that, in a prefill
    host_bandwidth: float  # bytes a second from pinned host memory to the device
    disk_bandwidth: float  # bytes a second from a file to the device
    step_overhead: float  # seconds that a forward takes beside

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidRequest(f"Hardware.name must be text, got {self.name!r}")
        for speed in fields(self)[1:]:
            if not is_number(value := getattr(self, speed.name)) or not value > 0:
                raise InvalidRequest(f"Hardware.{speed.name} must be a number above 0, got {value!r}")

    @classmethod
    def from_json(cls, path: str | Path) -> Hardware:
        """Measured speeds by the names of the fields; what a file leaves out is as in `H200`."""
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{path}: no hardware description: {error}") from error
        known = [speed.name for speed in fields(cls)]
        if not isinstance(values, dict) or not values.keys() <= set(known):
            raise InvalidRequest(f"{path}: expected an object with some of {', '.join(known)}, got {values!r:.200}")
        return replace(H200, **{"name": Path(path).stem, **values})

    def decode_seconds(self, weight_bytes: float, kv_bytes: float) -> float:
        """A decode step: weights and keys and values stream through once."""
        return (weight_bytes + kv_bytes) / (self.memory_bandwidth * self.memory_efficiency) + self.step_overhead

    def prefill_seconds(self, params: float, tokens: int) -> float:
        """A chunk of prompts: a multiplication and an addition a parameter and token."""
        return 2 * params * tokens / (self.flops * self.flops_efficiency) + self.step_overhead

    def page_in_seconds(self, num_bytes: int, from_host: bool) -> float:
        return num_bytes / (self.host_bandwidth if from_host else self.disk_bandwidth)


H200 = Hardware(
    name="H200",
    memory_bandwidth=4.8e12,
    memory_efficiency=0.80,
    flops=989e12,
    flops_efficiency=0.45,
    host_bandwidth=50e9,
    disk_bandwidth=6e9,
    step_overhead=4e-4,
)


# ---- residency ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageIn:
    """What a model's way to the device takes: who leaves, and the bytes that must move."""

    victims: list[str]
    from_host: int
    from_disk: int

    @property
    def num_bytes(self) -> int:
        return self.from_host + self.from_disk

    def seconds(self, hardware: Hardware) -> float:
        return hardware.page_in_seconds(self.from_host, True) + hardware.page_in_seconds(self.from_disk, False)


class Tiers:
    """Where every model's weights are: on the device, in host memory, or in their files alone.

    The pinned are on the device from the start, then the `warm`, coldest first. Who makes room is in the host's memory
    whole or not at all: what others on the device hold of it takes room there too.
    """

    def __init__(
        self,
        models: Mapping[str, Weights],
        budget: int,
        host_budget: int = 0,
        policy: PoolPolicy = "lru",
        pinned: Collection[str] = (),
        warm: Collection[str] = (),
    ) -> None:
        for what, size in (("budget", budget), ("host_budget", host_budget)):
            if not _is_whole(size):
                raise InvalidRequest(f"{what} must be a whole number of bytes from 0 on, got {size!r}")
        self.pieces = {name: _pieces(name, weights) for name, weights in models.items()}
        self.device, self.host = Pool(budget, policy), Pool(host_budget, policy)
        for name in (*pinned, *warm):
            self.enter(name, name in pinned)

    def missing(self, name: str) -> tuple[int, int]:
        """Bytes to bring from host memory, and from the file."""
        if name in self.device:
            return 0, 0
        on_device, on_host = self.device.pieces(), self.host.pieces()
        absent = {key: size for key, size in self[name].items() if key not in on_device}
        from_host = sum(size for key, size in absent.items() if key in on_host)
        return from_host, sum(absent.values()) - from_host

    def __getitem__(self, name: str) -> dict[Hashable, int]:
        if name not in self.pieces:
            raise UnknownModel(f"no model named {name!r}; there are {', '.join(self.pieces) or 'none'}")
        return self.pieces[name]

    def enter(self, name: str, pinned: bool = False) -> PageIn:
        """Bring a model to the device, or count a use of one that is there."""
        if name in self.device:
            self.device.touch(name)
            return PageIn([], 0, 0)
        moved = self.missing(name)
        victims = self.device.admit(name, self[name], pinned)
        self.host.evict(name)
        for victim in victims:
            with suppress(TooLarge, PinnedNoRoom):
                self.host.admit(victim, self[victim])
        return PageIn(victims, *moved)


def _pieces(name: str, weights: Weights) -> dict[Hashable, int]:
    pieces: dict[Hashable, int] = dict(weights) if isinstance(weights, Mapping) else {(name, None): weights}
    for size in pieces.values():
        if not _is_whole(size):
            raise InvalidRequest(f"model {name!r} cannot have {size!r} bytes, expected a whole number from 0 on")
    return pieces


# ---- plan --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model's part of a Plan."""

    name: str
    num_bytes: int
    requests: int
    misses: int
    evictions: int
    loaded_bytes: int
    stall_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a trace of requests would find in memory; simulated."""

    policy: PoolPolicy
    budget: int
    hardware: str
    models: tuple[ModelPlan, ...]  # by their first request; then who was only given up
    resident: tuple[str, ...]  # at the end
    optimal_misses: int  # of giving up who is needed again last, the larger first: a bound where models are of one size

    @property
    def requests(self) -> int:
        return sum(model.requests for model in self.models)

    @property
    def misses(self) -> int:
        return sum(model.misses for model in self.models)

    @property
    def hits(self) -> int:
        return self.requests - self.misses

    @property
    def evictions(self) -> int:
        return sum(model.evictions for model in self.models)

    @property
    def loaded_bytes(self) -> int:
        return sum(model.loaded_bytes for model in self.models)

    @property
    def stall_seconds(self) -> float:
        """That requests wait for page-ins, one after another."""
        return sum(model.stall_seconds for model in self.models)

    @property
    def miss_rate(self) -> float:
        return self.misses / self.requests if self.requests else 0.0

    @property
    def regret(self) -> int:
        """Misses beyond those that a look ahead would leave."""
        return self.misses - self.optimal_misses

    def as_dict(self) -> dict[str, Any]:
        totals = ("requests", "hits", "misses", "miss_rate", "evictions", "loaded_bytes", "stall_seconds", "regret")
        return {"simulated": True, **asdict(self), **{name: getattr(self, name) for name in totals}}

    def __str__(self) -> str:
        rows = [("model", "bytes", "requests", "misses", "evictions", "loaded", "stall s")]
        for m in self.models:
            counts = (str(m.requests), str(m.misses), str(m.evictions))
            rows.append((m.name, format_bytes(m.num_bytes), *counts, *_moved(m.loaded_bytes, m.stall_seconds)))
        counts = (str(self.requests), str(self.misses), str(self.evictions))
        rows.append(("total", "", *counts, *_moved(self.loaded_bytes, self.stall_seconds)))
        return "\n".join(
            [
                f"simulated: {self.policy} under {format_bytes(self.budget)} on {self.hardware}",
                *aligned(rows),
                f"miss rate {self.miss_rate:.1%}; with a look ahead {self.optimal_misses} misses, regret {self.regret}",
            ]
        )


def _moved(num_bytes: int, seconds: float) -> tuple[str, str]:
    return format_bytes(num_bytes), f"{seconds:.2f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line a row, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{{:{'>' if i else '<'}{width}}}" for i, width in enumerate(widths)]
    return ["  ".join(formats).format(*row) for row in rows]


def read_trace(lines: Iterable[str]) -> list[str | tuple[float, str]]:
    """A name a line, or a JSON object a line with "model" and perhaps "time" in seconds; empty lines are skipped."""
    trace: list[str | tuple[float, str]] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line.startswith("{"):
            trace += [line] if line else []
            continue
        try:
            entry = json.loads(line)
            name, seconds = entry["model"], float(entry.get("time", 0.0))
            if not (isinstance(name, str) and name and isfinite(seconds)):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            expected = 'expected "model", a name, and perhaps "time", seconds'
            raise InvalidRequest(f"line {number} of the trace, {line!r:.100}: {expected}") from error
        trace.append((seconds, name))
    return trace


def plan(
    models: Mapping[str, Weights],
    trace: Iterable[str | tuple[float, str]],
    budget: int,
    *,
    policy: PoolPolicy = "lru",
    pinned: Collection[str] = (),
    warm: Collection[str] = (),
    hardware: Hardware = H200,
    host_budget: int = 0,
) -> Plan:
    """Replay a trace of names, or of (seconds, name) in order, through the pool; nothing is loaded.

    The pinned are on the device from the start, then the `warm`, coldest first; neither counts.
    """
    tiers = Tiers(models, budget, host_budget, policy, pinned, warm)
    names = [entry if isinstance(entry, str) else entry[1] for entry in trace]
    optimal = _farthest_misses(tiers, names, budget, pinned, warm)
    requests, misses, evictions, loaded = Counter(names), Counter[str](), Counter[str](), Counter[str]()
    stalls = dict.fromkeys(models, 0.0)
    for name in names:
        misses[name] += name not in tiers.device
        page_in = tiers.enter(name)
        evictions.update(page_in.victims)
        loaded[name] += page_in.num_bytes
        stalls[name] += page_in.seconds(hardware)
    rows = tuple(
        ModelPlan(
            name, sum(tiers[name].values()), requests[name], misses[name], evictions[name], loaded[name], stalls[name]
        )
        for name in dict.fromkeys((*names, *evictions))
    )
    return Plan(policy, tiers.device.budget, hardware.name, rows, tuple(tiers.device.names()), optimal)


class _Farthest(Pool):
    """Gives up who is needed again last, the larger first (Belady 1966); it has to be told when that is."""

    def __init__(self, budget: int, next_use: dict[str, float]) -> None:
        super().__init__(budget)
        self.next_use = next_use  # model -> place in the trace; whoever is in none is not needed again

    def _rank(self, resident: Resident) -> tuple[float, int, str]:
        return -self.next_use.get(resident.name, inf), -resident.num_bytes, resident.name


def _farthest_misses(
    tiers: Tiers, names: list[str], budget: int, pinned: Collection[str], warm: Collection[str]
) -> int:
    upcoming: list[float] = []
    next_use: dict[str, float] = {}
    for i in reversed(range(len(names))):
        upcoming.append(next_use.get(names[i], inf))
        next_use[names[i]] = i
    pool = _Farthest(budget, next_use)
    for name in (*pinned, *warm):
        pool.admit(name, tiers[name], name in pinned)
    misses = 0
    for name in names:
        misses += name not in pool
        next_use[name] = upcoming.pop()
        pool.admit(name, tiers[name])
    return misses


# ---- the lane ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Simulated:
    """A model by what its forwards take."""

    weights: Weights
    params: float
    kv_bytes_per_token: int = 0

    def __post_init__(self) -> None:
        if not (is_number(self.params) and self.params >= 0 and _is_whole(self.kv_bytes_per_token)):
            raise InvalidRequest(f"a simulated model needs params from 0 on and whole bytes a token, got {self}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, for which model, how long its prompt and its output are."""

    seconds: float
    model: str
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    deadline: float = inf  # seconds on the same clock

    def __post_init__(self) -> None:
        comes = is_number(self.seconds) and 0 <= self.seconds < inf
        if not (comes and _is_whole(self.prompt_tokens, 1) and _is_whole(self.output_tokens, 1)):
            raise InvalidRequest(f"an arrival needs seconds from 0 on and at least 1 token each way (int), got {self}")
        if not (_is_whole(self.priority, -inf) and is_number(self.deadline)):
            raise InvalidRequest(f"an arrival needs a whole number as priority and seconds as deadline, got {self}")


@dataclass(slots=True)
class Served:
    """A request on its way, or done."""

    arrival: Arrival
    number: int  # in order of arrival
    since: float  # without service since
    num_prefilled: int = 0
    num_output: int = 0
    first: float = inf  # seconds, of its first token
    last: float = inf  # of its last one so far
    longest_gap: float = 0.0  # seconds between two of its tokens

    @property
    def is_over(self) -> bool:
        return self.num_output >= self.arrival.output_tokens

    @property
    def ttft(self) -> float:
        return self.first - self.arrival.seconds

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(self.arrival.output_tokens - 1, 1)

    @property
    def latency(self) -> float:
        return self.last - self.arrival.seconds

    def emit(self, count: int, start: float, stop: float) -> None:
        """Tokens that came evenly over a time."""
        if self.num_output:
            self.longest_gap = max(self.longest_gap, start + (stop - start) / count - self.last)
        else:
            self.first = stop
        self.num_output += count
        self.last = stop


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulated lane did; times are simulated seconds."""

    served: tuple[Served, ...]  # those that are over, in that order
    events: tuple[Event, ...]
    seconds: float
    swaps: int  # page-ins
    misses: int  # requests that came while their model was not on the device
    evictions: int
    loaded_bytes: int
    shares: dict[str, int]  # bytes streamed
    jain: float  # of the shares over the weights

    def of(self, *models: str) -> Result:
        """The requests and events of some models; the totals stay."""
        served = tuple(one for one in self.served if one.arrival.model in models)
        return replace(self, served=served, events=tuple(event for event in self.events if event.model in models))

    def values(self, measure: Measure) -> list[float]:
        """Of the requests that are over, ascending."""
        if measure not in MEASURES:
            raise InvalidRequest(f"measure {measure!r}, expected one of {', '.join(MEASURES)}")
        return sorted(getattr(one, measure) for one in self.served)

    def mean(self, measure: Measure) -> float:
        values = self.values(measure)
        return sum(values) / len(values) if values else math.nan

    def percentile(self, measure: Measure, percent: float) -> float:
        """With linear interpolation; nan where no request is over."""
        if not (is_number(percent) and 0 <= percent <= 100):
            raise InvalidRequest(f"a percentile must be of 0 to 100 percent, got {percent!r}")
        if not (values := self.values(measure)):
            return math.nan
        place = (len(values) - 1) * percent / 100
        low = values[math.floor(place)]
        return low + (values[math.ceil(place)] - low) * (place % 1)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, so with None for the times where no request is over."""
        found: dict[str, Any] = {"simulated": True, "requests": len(self.served)}
        for name in ("seconds", "swaps", "misses", "evictions", "loaded_bytes", "shares", "jain"):
            found[name] = getattr(self, name)
        for measure in MEASURES:
            values = {"mean": self.mean(measure)}
            values |= {f"p{percent}": self.percentile(measure, percent) for percent in (50, 90, 99)}
            found[measure] = values if self.served else dict.fromkeys(values)
        return found


def run(
    requests: Iterable[Arrival],
    fleet: Mapping[str, Simulated],
    *,
    budget: int,
    policy: PoolPolicy = "lru",
    lane_policy: LanePolicy = "byte-drr",
    weights: Mapping[str, float] | None = None,
    max_wait: float | None = None,
    quantum: int = DEFAULTS.quantum,
    prefill_chunk: int = DEFAULTS.prefill_chunk,
    max_batch: int = DEFAULTS.max_batch,
    host_budget: int = 0,
    pinned: Collection[str] = (),
    warm: Collection[str] = (),
    hardware: Hardware = H200,
    until: float = inf,
) -> Result:
    """Serve the requests on one lane until all are over or the clock shows `until`.

    A turn is as the engine's: page the model in if it is not there, one chunk of its prompts, then up to `quantum`
    decode steps of all its sequences together. KV pages are not limited, and prefixes not shared.
    """
    for name, number in (("quantum", quantum), ("prefill_chunk", prefill_chunk), ("max_batch", max_batch)):
        if not _is_whole(number, 1):
            raise InvalidRequest(f"{name} must be a whole number from 1 on, got {number!r}")
    tiers = Tiers({name: one.weights for name, one in fleet.items()}, budget, host_budget, policy, pinned, warm)
    lane = _Lane(
        fleet,
        tiers,
        Scheduler(lane_policy, weights=weights, max_wait=max_wait),
        hardware,
        quantum,
        prefill_chunk,
        max_batch,
    )
    coming = deque(sorted(requests, key=lambda arrival: arrival.seconds))
    for arrival in coming:
        tiers[arrival.model]
    while lane.now < until:
        while coming and coming[0].seconds <= lane.now:
            lane.arrive(coming.popleft())
        if lane.turn():
            continue
        if not coming:
            break
        lane.now = coming[0].seconds
    return lane.result()


class _Queue:
    """The requests of one model: those in its batch, and those that wait to join it."""

    def __init__(self) -> None:
        self.batch: list[Served] = []
        self.waiting: dict[int, Served] = {}  # by number, so in order of arrival
        self._best: list[tuple[int, float, int]] = []  # heap

    def add(self, served: Served) -> None:
        self.waiting[served.number] = served
        heappush(self._best, (-served.arrival.priority, served.arrival.deadline, served.number))

    def join(self, max_batch: int) -> None:
        while self._best and len(self.batch) < max_batch:
            self.batch.append(self.waiting.pop(heappop(self._best)[-1]))

    def work(self, model: str, page_in_bytes: int) -> Work:
        candidates = [*self.batch, *islice(self.waiting.values(), 1)]
        best = [(-one.arrival.priority, one.arrival.deadline) for one in self.batch]
        best += [entry[:2] for entry in self._best[:1]]
        return Work(
            model,
            min(one.since for one in candidates),
            min(one.number for one in candidates),
            -min(priority for priority, _ in best),
            min(deadline for _, deadline in best),
            page_in_bytes,
        )


class _Lane:
    """polymodel.lane with a clock that it moves itself."""

    def __init__(
        self,
        fleet: Mapping[str, Simulated],
        tiers: Tiers,
        scheduler: Scheduler,
        hardware: Hardware,
        quantum: int,
        prefill_chunk: int,
        max_batch: int,
    ) -> None:
        self.fleet, self.tiers, self.scheduler, self.hardware = fleet, tiers, scheduler, hardware
        self.quantum, self.prefill_chunk, self.max_batch = quantum, prefill_chunk, max_batch
        self.weight_bytes = {name: sum(tiers[name].values()) for name in fleet}
        self.now = 0.0
        self.queues: dict[str, _Queue] = {}
        self.events: list[Event] = []
        self.over: list[Served] = []
        self.num_arrived = self.swaps = self.misses = self.evictions = self.loaded_bytes = 0

    def arrive(self, arrival: Arrival) -> None:
        self.queues.setdefault(arrival.model, _Queue()).add(Served(arrival, self.num_arrived, arrival.seconds))
        self.num_arrived += 1
        self.misses += arrival.model not in self.tiers.device

    def turn(self) -> bool:
        """False if there was no work."""
        work = [queue.work(name, sum(self.tiers.missing(name))) for name, queue in self.queues.items()]
        if (name := self.scheduler.pick(work, self.now)) is None:
            return False
        start, queue = self.now, self.queues[name]
        self._page_in(name)
        queue.join(self.max_batch)
        size = len(queue.batch)
        self._prefill(name, queue.batch)
        self._decode(name, queue.batch)
        self._record("turn", name, start, sequences=size)
        self.over += [one for one in queue.batch if one.is_over]
        queue.batch = [one for one in queue.batch if not one.is_over]
        if not queue.batch and not queue.waiting:
            del self.queues[name]
        return True

    def _page_in(self, name: str) -> None:
        was_there, start = name in self.tiers.device, self.now
        page_in = self.tiers.enter(name)
        if was_there:
            return
        for victim in page_in.victims:
            self._record("evict", victim, start, num_bytes=self.weight_bytes[victim])
        seconds = page_in.seconds(self.hardware)
        self.now += seconds
        self._record("page_in", name, start, num_bytes=page_in.num_bytes)
        self.scheduler.swapped(seconds)
        self.scheduler.charge(name, page_in.num_bytes)
        self.swaps += 1
        self.evictions += len(page_in.victims)
        self.loaded_bytes += page_in.num_bytes

    def _prefill(self, name: str, batch: list[Served]) -> None:
        left = self.prefill_chunk
        chunk: list[Served] = []
        for one in batch:
            if tokens := min(left, one.arrival.prompt_tokens - one.num_prefilled):
                one.num_prefilled += tokens
                left -= tokens
                chunk.append(one)
        if not chunk:
            return
        start, tokens, weight_bytes = self.now, self.prefill_chunk - left, self.weight_bytes[name]
        seconds = self.hardware.prefill_seconds(self.fleet[name].params, tokens)
        self.now += max(seconds, self.hardware.decode_seconds(weight_bytes, 0))
        self.scheduler.charge(name, weight_bytes)
        self._record("prefill", name, start, tokens, len(chunk), weight_bytes)
        for one in chunk:
            one.since = self.now
            if one.num_prefilled == one.arrival.prompt_tokens:
                one.emit(1, start, self.now)

    def _decode(self, name: str, batch: list[Served]) -> None:
        """Steps between which nobody finishes are taken together."""
        left = self.quantum
        while left and (ready := [one for one in batch if one.num_output and not one.is_over]):
            steps = min(left, *(one.arrival.output_tokens - one.num_output for one in ready))
            tokens = sum(one.num_prefilled + one.num_output for one in ready) + len(ready) * (steps - 1) / 2
            start, step_bytes = self.now, self.weight_bytes[name] + int(tokens * self.fleet[name].kv_bytes_per_token)
            self.now += steps * self.hardware.decode_seconds(step_bytes, 0)
            self.scheduler.charge(name, steps * step_bytes)
            self._record("decode", name, start, steps * len(ready), len(ready), steps * step_bytes)
            for one in ready:
                one.since = self.now
                one.emit(steps, start, self.now)
            left -= steps

    def _record(
        self, kind: Kind, name: str, start: float, tokens: int = 0, sequences: int = 0, num_bytes: int = 0
    ) -> None:
        self.events.append(Event(kind, name, start, self.now, tokens, sequences, num_bytes))

    def result(self) -> Result:
        counts = (self.now, self.swaps, self.misses, self.evictions, self.loaded_bytes)
        return Result(tuple(self.over), tuple(self.events), *counts, self.scheduler.shares(), self.scheduler.jain())
