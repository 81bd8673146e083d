"""Who stays resident: order of giving up, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polymodel.errors import EmptyId, Leased, PinnedNoRoom, PolymodelError, TooLarge, UnknownModel
from polymodel.pool import Pool

HUGE = 2**63 - 1


def filled(budget: int, *models: tuple[str, int | dict[Hashable, int], bool]) -> Pool:
    pool = Pool(budget)
    for name, num_bytes, pinned in models:
        pool.admit(name, num_bytes, pinned)
    return pool


def state(pool: Pool) -> object:
    """Everything there is to a pool, stamps and clock included."""
    residents = [(r.name, list(r.pieces.values()), r.pinned, r.leases, r.stamp) for r in pool._residents.values()]
    return pool.budget, pool._clock, residents


def refused(pool: Pool, error: type[Exception], call: Callable[[], object], *numbers: str) -> None:
    """The call raises `error` with these numbers in its text and changes nothing at all."""
    before = copy.deepcopy(state(pool))
    with pytest.raises(error) as caught:
        call()
    assert all(number in str(caught.value) for number in numbers), caught.value
    assert state(pool) == before


def test_admits_within_the_budget() -> None:
    pool = Pool(100)
    assert pool.admit("a", 40) == [] and pool.admit("b", 60) == []
    assert (pool.used, len(pool), pool.names()) == (100, 2, ["a", "b"])
    assert "a" in pool and "c" not in pool
    assert pool["b"].num_bytes == 60
    with pytest.raises(UnknownModel, match=r"'c' is not resident; resident are .*'a', 'b'"):
        pool["c"]
    pool.check()


def test_the_least_recently_used_goes_first() -> None:
    pool = filled(100, ("a", 40, False), ("b", 40, False))
    assert pool.touch("a")
    assert pool.admit("c", 40) == ["b"]
    assert pool.names() == ["a", "c"]


def test_gives_up_several_in_order_and_no_more_than_needed() -> None:
    pool = filled(100, ("a", 30, False), ("b", 30, False), ("c", 30, False))
    assert pool.admit("d", 60) == ["a", "b"]
    assert (pool.names(), pool.used) == (["c", "d"], 90)


def test_equal_stamps_go_by_name() -> None:
    pool = filled(90, ("b", 30, False), ("a", 30, False), ("c", 30, False))
    for name in pool.names():
        pool[name].stamp = 7
    assert pool.admit("d", 60) == ["a", "b"]


def test_pinned_is_never_given_up() -> None:
    pool = filled(100, ("p", 60, True), ("x", 30, False))
    refused(pool, PinnedNoRoom, lambda: pool.admit("y", 60), "60", "100")
    assert pool.admit("y", 40) == ["x"]
    assert pool.names() == ["p", "y"]
    pool["p"].pinned = False
    assert pool.admit("z", 100) == ["p", "y"]


def test_leased_is_never_given_up_and_counts_as_in_use() -> None:
    pool = filled(100, ("a", 60, False), ("b", 30, False))
    pool["a"].leases += 1
    refused(pool, PinnedNoRoom, lambda: pool.admit("c", 60), "60", "100")
    assert pool.admit("c", 40) == ["b"]
    refused(pool, Leased, lambda: pool.evict("a"), "1 leases")
    refused(pool, PinnedNoRoom, lambda: pool.resize(59), "60", "59")
    pool["a"].leases -= 1
    assert pool.evict("a")


def test_what_cannot_fit_is_refused_unchanged() -> None:
    pool = filled(100, ("a", 40, False))
    refused(pool, TooLarge, lambda: pool.admit("b", 101), "101", "100")
    refused(pool, TooLarge, lambda: pool.admit("b", HUGE), f"{HUGE:,}")
    assert pool.admit("b", 100) == ["a"]


def test_readmitting_is_a_touch() -> None:
    pool = filled(100, ("a", 40, False), ("b", 40, False))
    assert pool.admit("a", 99, pinned=True) == []
    assert (pool["a"].num_bytes, pool["a"].pinned, pool.used) == (40, False, 80)
    assert pool.admit("a", HUGE) == []
    assert pool.admit("c", 40) == ["b"]


def test_an_empty_name_is_refused_before_anything_else() -> None:
    pool = filled(100, ("a", 40, False))
    refused(pool, EmptyId, lambda: pool.admit("", 10))
    refused(pool, EmptyId, lambda: pool.admit("", HUGE))


def test_bytes_and_budget_below_zero_are_zero() -> None:
    pool = Pool(-5)
    assert pool.budget == 0
    assert pool.admit("free", 0) == [] and pool.admit("negative", -3) == []
    assert (pool.used, len(pool)) == (0, 2)
    refused(pool, TooLarge, lambda: pool.admit("a", 1))
    pool.check()


@pytest.mark.parametrize(
    ("name", "num_bytes", "error"),
    [
        ("a", 10, None),  # resident: a touch
        ("a", HUGE, None),  # resident comes before too large
        ("new", 0, None),
        ("new", 20, None),
        ("new", 40, None),  # b makes room
        ("new", 41, PinnedNoRoom),
        ("new", 101, TooLarge),
        ("new", HUGE, TooLarge),
        ("", HUGE, EmptyId),  # empty comes before too large
    ],
)
def test_checking_an_admission_changes_nothing(name: str, num_bytes: int, error: type[Exception] | None) -> None:
    pool = filled(100, ("a", 60, True), ("b", 20, False))
    before = copy.deepcopy(state(pool))
    if error is None:
        pool.check_admission(name, num_bytes)
        assert state(pool) == before
        pool.admit(name, num_bytes)
    else:
        refused(pool, error, lambda: pool.check_admission(name, num_bytes))
        refused(pool, error, lambda: pool.admit(name, num_bytes))
    pool.check()


def test_never_over_the_budget_on_a_fixed_sequence() -> None:
    pool, evicted = Pool(256), []
    for i, size in enumerate((100, 90, 80, 30, 120, 256, 10, 20, 200, 60, 150, 5, 128, 128, 1)):
        evicted += pool.admit(f"m{i:02}", size)
        assert 0 <= pool.used <= pool.budget
        pool.check()
    assert evicted == [f"m{i:02}" for i in range(len(evicted))] and len(evicted) == 13
    assert (pool.names(), pool.used) == (["m13", "m14"], 129)


def test_touch_and_evict_say_whether_the_model_was_there() -> None:
    pool = filled(100, ("a", 40, True))
    assert not pool.touch("b") and not pool.evict("b")
    assert pool.touch("a") and pool.evict("a")  # on request even a pinned one goes
    assert len(pool) == pool.used == 0


def test_shrinking_gives_up_the_coldest_in_order() -> None:
    pool = filled(100, ("a", 30, False), ("p", 20, True), ("b", 30, False), ("c", 20, False))
    pool.touch("a")
    assert pool.resize(120) == [] and pool.resize(100) == []
    assert pool.resize(60) == ["b", "c"]
    assert (pool.budget, pool.used, pool.names()) == (60, 50, ["a", "p"])
    refused(pool, PinnedNoRoom, lambda: pool.resize(19), "20", "19")
    refused(pool, PinnedNoRoom, lambda: pool.resize(-1), "20", "0")
    assert pool.resize(20) == ["a"]
    pool["p"].pinned = False
    assert pool.resize(-1) == ["p"]
    assert pool.budget == pool.used == 0


OPERATIONS = st.tuples(
    st.sampled_from(("admit", "check", "touch", "evict", "resize", "pin", "lease")),
    st.sampled_from("abcdef"),
    st.integers(-10, 130),
    st.booleans(),
)


@given(st.lists(OPERATIONS, max_size=40))
def test_any_sequence_keeps_the_invariant_and_errors_change_nothing(
    operations: list[tuple[str, str, int, bool]],
) -> None:
    pool = Pool(100)
    for verb, name, number, flag in operations:
        before = copy.deepcopy(state(pool))
        held = {r.name: r.num_bytes for r in pool._residents.values() if not r.is_movable}
        try:
            match verb:
                case "admit":
                    victims = pool.admit(name, number, flag)
                    assert not held.keys() & set(victims)
                    assert name in pool
                case "check":
                    pool.check_admission(name, number)
                    assert state(pool) == before
                case "touch":
                    pool.touch(name)
                case "evict":
                    pool.evict(name)
                case "resize":
                    assert not held.keys() & set(pool.resize(number))
                case "pin" if name in pool:
                    pool[name].pinned = flag
                case "lease" if name in pool:
                    pool[name].leases = int(flag)
        except (TooLarge, PinnedNoRoom, Leased):
            assert state(pool) == before
        pool.check()


# ---- pieces ------------------------------------------------------------------------------------------

BASE: dict[Hashable, int] = {"embed": 40, "lower": 20, "upper": 20}
TUNED: dict[Hashable, int] = {"embed": 40, "lower": 20, "other": 15}


def test_a_piece_of_several_models_counts_once() -> None:
    pool = filled(100, ("a", BASE, False), ("b", TUNED, False))
    assert pool.used == 95 and (pool["a"].num_bytes, pool["b"].num_bytes) == (80, 75)
    assert pool.pieces() == BASE | TUNED
    assert pool.shared_bytes("a") == pool.shared_bytes("b") == 60
    assert pool.admit("c", BASE) == [] and pool.used == 95
    assert pool.shared_bytes("a") == 80
    pool.check()


def test_a_piece_is_charged_to_the_model_that_has_been_in_longest() -> None:
    pool = filled(200, ("b", TUNED, False), ("a", BASE, False), ("c", 7, False), ("d", BASE, False))
    assert pool.charges() == {"b": 75, "a": 20, "c": 7, "d": 0}
    pool.touch("a")
    pool.evict("b")
    assert pool.charges() == {"a": 80, "c": 7, "d": 0}
    pool.evict("a")
    assert pool.charges() == {"c": 7, "d": 80} and sum(pool.charges().values()) == pool.used


def test_models_given_by_their_bytes_share_nothing() -> None:
    pool = filled(100, ("a", 40, False), ("b", 40, False))
    assert pool.used == 80 and pool.shared_bytes("a") == 0
    assert pool.admit("c", 40) == ["a"]


def test_only_missing_pieces_need_room() -> None:
    pool = filled(100, ("a", BASE, True), ("x", 5, True))
    assert pool.admit("b", TUNED) == [] and pool.used == 100
    refused(pool, PinnedNoRoom, lambda: pool.admit("c", BASE | {"more": 16}), "96", "80 of them", "85", "100")
    refused(pool, TooLarge, lambda: pool.admit("c", BASE | {"more": 21}), "101", "100")


def test_only_bytes_that_are_really_freed_make_room() -> None:
    pool = filled(100, ("a", BASE, False), ("b", TUNED, True))
    assert pool.admit("c", 20) == ["a"]  # frees "upper" alone
    assert pool.used == 95
    refused(pool, PinnedNoRoom, lambda: pool.admit("d", 26), "26", "75", "100")


def test_what_a_newcomer_takes_over_is_not_freed() -> None:
    pool = filled(100, ("a", BASE, False), ("x", 20, False))
    assert pool.admit("b", TUNED) == ["a"]
    assert pool.used == 95
    pool = filled(100, ("a", BASE, False), ("x", 20, False))
    assert pool.admit("b", {"embed": 40, "lower": 20, "other": 30}) == ["a", "x"]


def test_a_model_that_would_free_nothing_stays() -> None:
    pool = filled(100, ("copy", BASE, False), ("x", 20, False), ("a", BASE, True))
    assert pool.admit("y", 20) == ["x"]
    assert pool.names() == ["a", "copy", "y"]


def test_copies_go_together_when_only_that_makes_room() -> None:
    pool = filled(100, ("a", BASE, False), ("b", BASE, False), ("x", 20, False))
    assert pool.admit("y", 40) == ["a", "b"]
    assert pool.names() == ["x", "y"] and pool.used == 60
    pool = filled(100, ("a", BASE, False), ("b", BASE, False))
    assert pool.resize(79) == ["a", "b"]


def test_copies_are_refused_together_when_one_is_in_use() -> None:
    pool = filled(100, ("a", BASE, False), ("b", BASE, False))
    pool["b"].leases = 1
    refused(pool, PinnedNoRoom, lambda: pool.admit("y", 40), "40", "80", "100")
    refused(pool, PinnedNoRoom, lambda: pool.resize(79), "80", "79")


def test_a_total_that_cannot_fit_is_known_without_its_pieces() -> None:
    pool = filled(100, ("a", BASE, False))
    pool.check_total("b", 100)
    pool.check_total("a", HUGE)  # resident comes before too large
    refused(pool, TooLarge, lambda: pool.check_total("b", 101), "101", "100")
    refused(pool, EmptyId, lambda: pool.check_total("", 1))


SIZES: dict[Hashable, int] = {key: 1 + 7 * i % 23 for i, key in enumerate("pqrstuvw")}  # 1..22 bytes
NAMES = st.sampled_from("abcde")
PIECES = st.sets(st.sampled_from(sorted(SIZES, key=str)), min_size=1)


class PoolMachine(RuleBasedStateMachine):
    """A pool beside the plainest model of it: who holds which pieces, who was used when."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.budget = Pool(60), 60
        self.held: dict[str, set[Hashable]] = {}  # in order of admission
        self.used: list[str] = []  # coldest first
        self.fixed: dict[str, str] = {}  # "pinned" or "leased"

    def bytes_of(self, *sets: set[Hashable]) -> int:
        return sum(SIZES[key] for key in set().union(*sets))

    def expected(self, newcomer: set[Hashable], budget: int) -> list[str] | None:
        """Victims by giving up one after the other and counting anew; None where that does not help."""
        kept, victims = dict(self.held), []
        for name in self.used:
            if self.bytes_of(newcomer, *kept.values()) <= budget:
                break
            if name not in self.fixed:
                victims.append(name)
                del kept[name]
        if self.bytes_of(newcomer, *kept.values()) > budget:
            return None
        stays = newcomer.union(*kept.values())
        return [name for name in victims if not self.held[name] <= stays]

    def give_up(self, victims: list[str]) -> None:
        for victim in victims:
            del self.held[victim]
            self.used.remove(victim)

    def use(self, name: str) -> None:
        self.used = [other for other in self.used if other != name] + [name]

    def tried(self, call: Callable[[], list[str]]) -> list[str] | None:
        """Names given up; None for a refusal, which changes nothing."""
        before = copy.deepcopy(state(self.pool))
        try:
            return call()
        except PolymodelError:
            assert state(self.pool) == before
            return None

    @rule(name=NAMES, keys=PIECES, pinned=st.booleans())
    def admit(self, name: str, keys: set[Hashable], pinned: bool) -> None:
        pieces = {key: SIZES[key] for key in sorted(keys, key=str)}
        if name in self.held:
            assert self.pool.admit(name, pieces, pinned) == []
            self.use(name)
            return
        victims = self.expected(keys, self.budget)
        assert self.tried(lambda: self.pool.admit(name, pieces, pinned)) == victims
        if victims is not None:
            self.give_up(victims)
            self.held[name] = keys
            self.use(name)
            self.fixed |= {name: "pinned"} if pinned else {}

    @rule(budget=st.integers(10, 90))
    def resize(self, budget: int) -> None:
        victims = self.expected(set(), budget)
        assert self.tried(lambda: self.pool.resize(budget)) == victims
        if victims is not None:
            self.give_up(victims)
            self.budget = budget

    @rule(name=NAMES)
    def touch(self, name: str) -> None:
        assert self.pool.touch(name) == (name in self.held)
        if name in self.held:
            self.use(name)

    @rule(name=NAMES)
    def evict(self, name: str) -> None:
        if self.fixed.get(name) == "leased":
            assert self.tried(lambda: [str(self.pool.evict(name))]) is None
            return
        assert self.pool.evict(name) == (name in self.held)
        if name in self.held:
            self.give_up([name])
            self.fixed.pop(name, None)

    @rule(name=NAMES, kind=st.sampled_from(["pinned", "leased", "free"]))
    def fix(self, name: str, kind: str) -> None:
        if name in self.held:
            self.pool[name].pinned, self.pool[name].leases = kind == "pinned", int(kind == "leased")
            self.fixed.pop(name, None)
            self.fixed |= {name: kind} if kind != "free" else {}

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        assert self.pool.names() == sorted(self.held) and self.fixed.keys() <= self.held.keys()
        assert self.pool.used == self.bytes_of(*self.held.values()) <= self.budget
        seen: set[Hashable] = set()
        for name, keys in self.held.items():
            others = set().union(*(k for other, k in self.held.items() if other != name))
            assert self.pool.shared_bytes(name) == self.bytes_of(keys & others)
            assert self.pool.charges()[name] == self.bytes_of(keys - seen)
            seen |= keys


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
