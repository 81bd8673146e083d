"""Which models stay resident under a byte budget. Decides only; residency.py moves the bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from polymodel.errors import EmptyId, Leased, PinnedNoRoom, TooLarge, UnknownModel


@dataclass(slots=True)
class Resident:
    name: str
    num_bytes: int
    pinned: bool = False
    leases: int = 0
    stamp: int = field(default=0, compare=False)  # logical time of last use

    @property
    def is_movable(self) -> bool:
        return not self.pinned and not self.leases


class Pool:
    """Least recently used goes first, ties by name; pinned and leased models never. 0 <= used <= budget."""

    def __init__(self, budget: int) -> None:
        self.budget = max(budget, 0)
        self._residents: dict[str, Resident] = {}
        self._clock = 0

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
        return sum(r.num_bytes for r in self._residents.values())

    def names(self) -> list[str]:
        return sorted(self._residents)

    def admit(self, name: str, num_bytes: int, pinned: bool = False) -> list[str]:
        """Make room and enter the model; names given up, in that order. An error changes nothing.

        A resident name counts as a use: its bytes and pin stay as they are.
        """
        victims = self._victims_for(name, num_bytes)
        if name in self._residents:
            self.touch(name)
            return []
        for victim in victims:
            del self._residents[victim]
        self._residents[name] = Resident(name, max(num_bytes, 0), pinned)
        self.touch(name)
        return victims

    def check_admission(self, name: str, num_bytes: int) -> None:
        """Raise what `admit` would, and change nothing."""
        self._victims_for(name, num_bytes)

    def _victims_for(self, name: str, num_bytes: int) -> list[str]:
        if not name:
            raise EmptyId("a model needs a name, got ''")
        if name in self._residents:
            return []
        num_bytes = max(num_bytes, 0)
        if num_bytes > self.budget:
            raise TooLarge(f"model {name!r} needs {num_bytes:,} bytes, the whole budget is {self.budget:,}")
        return self._coldest(num_bytes, self.budget, f"model {name!r} needs {num_bytes:,} bytes")

    def _coldest(self, need: int, budget: int, what: str) -> list[str]:
        excess = self.used + need - budget
        victims: list[str] = []
        for resident in sorted(self._residents.values(), key=lambda r: (r.stamp, r.name)):
            if excess <= 0:
                break
            if resident.is_movable:
                victims.append(resident.name)
                excess -= resident.num_bytes
        if excess > 0:
            held = sum(r.num_bytes for r in self._residents.values() if not r.is_movable)
            raise PinnedNoRoom(f"{what}, but {held:,} of the budget of {budget:,} bytes are pinned or in use")
        return victims

    def touch(self, name: str) -> bool:
        if name not in self._residents:
            return False
        self._clock += 1
        self._residents[name].stamp = self._clock
        return True

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
        victims = self._coldest(0, budget, "the new budget")
        for victim in victims:
            del self._residents[victim]
        self.budget = budget
        return victims

    def check(self) -> None:
        """The invariant, for tests."""
        assert 0 <= self.used <= self.budget
        assert all(r.leases >= 0 for r in self._residents.values())
