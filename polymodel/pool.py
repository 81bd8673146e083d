"""Which models stay resident under a byte budget. Decides only; residency.py moves the bytes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from polymodel.config import POOL_POLICIES, PoolPolicy
from polymodel.errors import DuplicateId, EmptyId, InvalidRequest, Leased, PinnedNoRoom, TooLarge, UnknownModel

RELOAD_LATENCY, RELOAD_BANDWIDTH = 0.05, 50e9  # seconds, and bytes a second over PCIe 5 x16


def reload_seconds(num_bytes: int) -> float:
    """What it costs to bring a model back, where nobody has measured it."""
    return RELOAD_LATENCY + num_bytes / RELOAD_BANDWIDTH


@dataclass(slots=True)
class Resident:
    name: str
    pieces: dict[Hashable, int]  # key -> bytes; equal keys of several models are in memory once
    pinned: bool = False
    leases: int = 0
    stamp: int = field(default=0, compare=False)  # logical time of last use
    value: float = field(default=0.0, compare=False)  # under "gdsf", as of last use

    @property
    def num_bytes(self) -> int:
        return sum(self.pieces.values())

    @property
    def is_movable(self) -> bool:
        return not self.pinned and not self.leases


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool's state at one moment, for `Pool.restore`."""

    budget: int
    clock: int
    floor: float
    uses: dict[str, int]
    residents: tuple[tuple[Resident, bool, int, float], ...]  # with their pinned, stamp, value


class Pool:
    """Which idle models make room for a newcomer; pinned and leased ones never do. 0 <= used <= budget.

    "lru": the least recently used goes first, ties by name. "lru+backout": then those stay after all who still fit, the
    hottest first. "gdsf": the least valuable byte goes first (Cherkasova 1998, greedy dual size frequency). Its
    value is the uses so far, those before the model left too, times the seconds that a byte takes to reload, plus the
    value of the last one given up.
    A model is its pieces, or one of its own where only its bytes are given. Pieces of several models count once.
    One thread at a time: the caller holds the lock.
    """

    def __init__(
        self, budget: int, policy: PoolPolicy = "lru", reload_seconds: Callable[[int], float] = reload_seconds
    ) -> None:
        if policy not in POOL_POLICIES:
            raise InvalidRequest(f"pool policy {policy!r}, expected one of {', '.join(POOL_POLICIES)}")
        self.budget = max(budget, 0)
        self.policy = policy
        self._reload_seconds = reload_seconds
        self._residents: dict[str, Resident] = {}
        self._clock = 0
        self._uses: dict[str, int] = {}  # of those that left too
        self._floor = 0.0  # value of the last one given up, so that uses of long ago fade

    def __contains__(self, name: str) -> bool:
        return name in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    def __getitem__(self, name: str) -> Resident:
        if name not in self._residents:
            raise UnknownModel(f"model {name!r} is not resident; resident are {self.names() or 'none'}")
        return self._residents[name]

    @property
    def used(self) -> int:
        return sum(self.pieces().values())

    def pieces(self) -> dict[Hashable, int]:
        """Every piece in memory and its bytes."""
        return {key: size for resident in self._residents.values() for key, size in resident.pieces.items()}

    def charges(self) -> dict[str, int]:
        """Model -> bytes, each piece's with the model that has been in longest; together they are `used`."""
        seen: set[Hashable] = set()
        charged = {}
        for name, resident in self._residents.items():
            charged[name] = sum(size for key, size in resident.pieces.items() if key not in seen)
            seen |= resident.pieces.keys()
        return charged

    def shared_bytes(self, name: str) -> int:
        """Bytes of a model that another one holds too."""
        owners = self._owners()
        return sum(size for key, size in self[name].pieces.items() if owners[key] > 1)

    def _owners(self) -> Counter[Hashable]:
        return Counter(key for resident in self._residents.values() for key in resident.pieces)

    def names(self) -> list[str]:
        return sorted(self._residents)

    def admit(self, name: str, num_bytes: int | Mapping[Hashable, int], pinned: bool = False) -> list[str]:
        """Make room and enter the model; names given up, in that order. An error changes nothing.

        A resident name counts as a use: its pin stays as it is, and named pieces must be those that are resident.
        """
        victims = self._victims_for(name, num_bytes)
        if name not in self._residents:
            self._give_up(victims)
            self._residents[name] = Resident(name, _pieces(num_bytes), pinned)
        self.touch(name)
        return victims

    def check_admission(self, name: str, num_bytes: int | Mapping[Hashable, int]) -> None:
        """Raise what `admit` would, and change nothing."""
        self._victims_for(name, num_bytes)

    def check_total(self, name: str, num_bytes: int) -> None:
        """Raise what `admit` would whatever else is in memory."""
        if not name:
            raise EmptyId("a model needs a name, got ''")
        if name not in self._residents and num_bytes > self.budget:
            raise TooLarge(f"model {name!r} needs {num_bytes:,} bytes, the whole budget is {self.budget:,}")

    def _victims_for(self, name: str, num_bytes: int | Mapping[Hashable, int]) -> list[str]:
        pieces = _pieces(num_bytes)
        total = sum(pieces.values())
        self.check_total(name, total)
        if name in self._residents:
            there = self._residents[name].pieces
            if isinstance(num_bytes, Mapping) and pieces != there:
                raise DuplicateId(f"model {name!r} is resident with {_describe(there)}, not with {_describe(pieces)}")
            return []
        held = self.pieces()
        for key, size in pieces.items():
            if held.get(key, size) != size:
                raise InvalidRequest(f"model {name!r}: piece {key!r} of {size:,} bytes is resident with {held[key]:,}")
        return self._victims(pieces, self.budget, f"model {name!r} needs {total:,} bytes")

    def _victims(self, newcomer: dict[Hashable, int], budget: int, what: str) -> list[str]:
        """Whom to give up so that the newcomer fits; nobody of whom every piece would stay."""
        owners = self._owners()
        excess = self.used - budget + sum(size for key, size in newcomer.items() if key not in owners)
        owners.update(newcomer.keys())
        chosen: list[Resident] = []
        for resident in sorted(self._residents.values(), key=self._rank):
            if excess <= 0:
                break
            if resident.is_movable:
                chosen.append(resident)
                owners.subtract(resident.pieces.keys())
                excess -= _missing(resident.pieces, owners)
        if excess > 0:
            held: dict[Hashable, int] = {}
            for resident in self._residents.values():
                held |= {} if resident.is_movable else resident.pieces
            if shared := sum(size for key, size in newcomer.items() if key in held):
                what += f", {shared:,} of them in memory"
            in_use = sum(held.values())
            raise PinnedNoRoom(f"{what}, but {in_use:,} of the budget of {budget:,} bytes are pinned or in use")
        for resident in chosen[::-1]:
            back = _missing(resident.pieces, owners)
            stays = all(owners[key] for key in resident.pieces)
            if stays or (self.policy == "lru+backout" and back <= -excess):
                chosen.remove(resident)
                owners.update(resident.pieces.keys())
                excess += back
        return [resident.name for resident in chosen]

    def _rank(self, resident: Resident) -> tuple[float, int, str]:
        """Who goes first has the smallest."""
        return resident.value, resident.stamp, resident.name

    def _give_up(self, victims: list[str]) -> None:
        for victim in victims:
            self._floor = max(self._floor, self._residents.pop(victim).value)

    def touch(self, name: str) -> bool:
        """Count a use; False if the model is not resident."""
        if name not in self._residents:
            return False
        self._clock += 1
        self._uses[name] = self._uses.get(name, 0) + 1
        resident = self._residents[name]
        resident.stamp = self._clock
        if self.policy == "gdsf":
            num_bytes = resident.num_bytes
            cost_per_byte = self._reload_seconds(num_bytes) / max(num_bytes, 1)
            resident.value = self._floor + self._uses[name] * cost_per_byte
        return True

    def lease(self, name: str) -> None:
        """Keep a resident model in memory until its `release`; they count."""
        self[name].leases += 1

    def release(self, name: str) -> None:
        if not self[name].leases:
            raise InvalidRequest(f"model {name!r} has 0 leases, so none can be released")
        self[name].leases -= 1

    def forget(self, name: str) -> None:
        """Forget the uses of a model that has left for good."""
        if name not in self._residents:
            self._uses.pop(name, None)

    def evict(self, name: str) -> bool:
        """Give up a model on request, pinned or not; a leased one is refused."""
        resident = self._residents.get(name)
        if resident is None:
            return False
        if resident.leases:
            raise Leased(f"model {name!r} has {resident.leases} leases: work in flight")
        del self._residents[name]
        return True

    def resize(self, budget: int) -> list[str]:
        """Change the budget; names given up, in that order. PinnedNoRoom leaves pool and budget as they were."""
        budget = max(budget, 0)
        victims = self._victims({}, budget, "the new budget")
        self._give_up(victims)
        self.budget = budget
        return victims

    def snapshot(self) -> Snapshot:
        """What `restore` brings back."""
        residents = tuple((r, r.pinned, r.stamp, r.value) for r in self._residents.values())
        return Snapshot(self.budget, self._clock, self._floor, dict(self._uses), residents)

    def restore(self, snapshot: Snapshot) -> None:
        """Take back every decision since, the uses too. Leases stay; who came since and is leased is a refusal."""
        leases = {resident.name: resident.leases for resident in self._residents.values() if resident.leases}
        if gone := leases.keys() - {resident.name for resident, *_ in snapshot.residents}:
            raise Leased(f"model {min(gone)!r} has {leases[min(gone)]} leases: work in flight")
        self.budget, self._clock, self._floor = snapshot.budget, snapshot.clock, snapshot.floor
        self._uses = dict(snapshot.uses)
        self._residents = {}
        for resident, pinned, stamp, value in snapshot.residents:
            resident.pinned, resident.stamp, resident.value = pinned, stamp, value
            resident.leases = leases.get(resident.name, 0)
            self._residents[resident.name] = resident

    def check(self) -> None:
        """The invariant, for tests."""
        pieces = self.pieces()
        assert 0 <= self.used <= self.budget
        assert all(pieces[key] == size for r in self._residents.values() for key, size in r.pieces.items())
        assert all(r.leases >= 0 for r in self._residents.values())


class _Whole:
    """Key of the one piece of a model that is known by its bytes alone: equal to no other."""

    def __repr__(self) -> str:
        return "whole"


def _pieces(num_bytes: int | Mapping[Hashable, int]) -> dict[Hashable, int]:
    if isinstance(num_bytes, int):
        num_bytes = {_Whole(): num_bytes}
    return {key: max(size, 0) for key, size in num_bytes.items()}


def _missing(pieces: Mapping[Hashable, int], owners: Counter[Hashable]) -> int:
    """Bytes of pieces that have no owner."""
    return sum(size for key, size in pieces.items() if not owners[key])


def _describe(pieces: Mapping[Hashable, int]) -> str:
    listed = repr(sorted((repr(key), size) for key, size in pieces.items()))
    return f"{sum(pieces.values()):,} bytes ({hashlib.blake2b(listed.encode(), digest_size=6).hexdigest()})"
