"""Which models stay resident under a byte budget. Decides only; residency.py moves the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from polymodel.errors import EmptyId, Leased, PinnedNoRoom, TooLarge, UnknownModel


@dataclass(slots=True)
class Resident:
    name: str
    pieces: dict[Hashable, int]  # key -> bytes; equal keys of several models are in memory once
    pinned: bool = False
    leases: int = 0
    stamp: int = field(default=0, compare=False)  # logical time of last use

    @property
    def num_bytes(self) -> int:
        return sum(self.pieces.values())

    @property
    def is_movable(self) -> bool:
        return not self.pinned and not self.leases


class Pool:
    """Least recently used goes first, ties by name; pinned and leased models never. 0 <= used <= budget.

    A model is its pieces, or one of its own where only its bytes are given. Pieces of several models count once.
    """

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

        A resident name counts as a use: its bytes and pin stay as they are.
        """
        pieces = _pieces(num_bytes)
        victims = self._victims_for(name, pieces)
        if name in self._residents:
            self.touch(name)
            return []
        for victim in victims:
            del self._residents[victim]
        self._residents[name] = Resident(name, pieces, pinned)
        self.touch(name)
        return victims

    def check_admission(self, name: str, num_bytes: int | Mapping[Hashable, int]) -> None:
        """Raise what `admit` would, and change nothing."""
        self._victims_for(name, _pieces(num_bytes))

    def check_total(self, name: str, num_bytes: int) -> None:
        """Raise what `admit` would whatever else is in memory."""
        if not name:
            raise EmptyId("a model needs a name, got ''")
        if name not in self._residents and num_bytes > self.budget:
            raise TooLarge(f"model {name!r} needs {num_bytes:,} bytes, the whole budget is {self.budget:,}")

    def _victims_for(self, name: str, pieces: dict[Hashable, int]) -> list[str]:
        total = sum(pieces.values())
        self.check_total(name, total)
        if name in self._residents:
            return []
        return self._coldest(pieces, self.budget, f"model {name!r} needs {total:,} bytes")

    def _coldest(self, newcomer: dict[Hashable, int], budget: int, what: str) -> list[str]:
        """Whom to give up so that the newcomer fits; nobody of whom every piece would stay."""
        owners = self._owners()
        excess = self.used - budget + sum(size for key, size in newcomer.items() if key not in owners)
        owners.update(newcomer.keys())
        chosen: list[Resident] = []
        for resident in sorted(self._residents.values(), key=lambda r: (r.stamp, r.name)):
            if excess <= 0:
                break
            if resident.is_movable:
                chosen.append(resident)
                owners.subtract(resident.pieces.keys())
                excess -= sum(size for key, size in resident.pieces.items() if not owners[key])
        if excess > 0:
            held: dict[Hashable, int] = {}
            for resident in self._residents.values():
                held |= {} if resident.is_movable else resident.pieces
            if shared := sum(size for key, size in newcomer.items() if key in held):
                what += f", {shared:,} of them in memory"
            in_use = sum(held.values())
            raise PinnedNoRoom(f"{what}, but {in_use:,} of the budget of {budget:,} bytes are pinned or in use")
        return [resident.name for resident in chosen if not all(owners[key] for key in resident.pieces)]

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
        victims = self._coldest({}, budget, "the new budget")
        for victim in victims:
            del self._residents[victim]
        self.budget = budget
        return victims

    def check(self) -> None:
        """The invariant, for tests."""
        pieces = self.pieces()
        assert 0 <= self.used <= self.budget
        assert all(pieces[key] == size for r in self._residents.values() for key, size in r.pieces.items())
        assert all(r.leases >= 0 for r in self._residents.values())


def _pieces(num_bytes: int | Mapping[Hashable, int]) -> dict[Hashable, int]:
    """Bytes alone are one piece that no other model can name."""
    if isinstance(num_bytes, int):
        num_bytes = {object(): num_bytes}
    return {key: max(size, 0) for key, size in num_bytes.items()}
