"""Who stays resident: order of giving up, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polymodel.config import POOL_POLICIES, PoolPolicy
from polymodel.errors import (
    DuplicateId,
    EmptyId,
    InvalidRequest,
    Leased,
    PinnedNoRoom,
    PolymodelError,
    TooLarge,
    UnknownModel,
)
from polymodel.pool import Pool, reload_seconds

HUGE = 2**63 - 1


def filled(budget: int, *models: tuple[str, int | dict[Hashable, int], bool], policy: PoolPolicy = "lru") -> Pool:
    pool = Pool(budget, policy)
    for name, num_bytes, pinned in models:
        pool.admit(name, num_bytes, pinned)
    return pool


def state(pool: Pool) -> object:
    """Everything there is to a pool, stamps and clock included."""
    residents = [
        (r.name, list(r.pieces.values()), r.pinned, r.leases, r.stamp, r.value) for r in pool._residents.values()
    ]
    return pool.budget, pool._clock, pool._floor, dict(pool._uses), residents


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
    pool.lease("a")
    pool.lease("a")
    refused(pool, PinnedNoRoom, lambda: pool.admit("c", 60), "60", "100")
    assert pool.admit("c", 40) == ["b"]
    refused(pool, Leased, lambda: pool.evict("a"), "2 leases")
    pool.release("a")
    refused(pool, PinnedNoRoom, lambda: pool.resize(59), "60", "59")
    pool.release("a")
    refused(pool, InvalidRequest, lambda: pool.release("a"), "0 leases")
    refused(pool, UnknownModel, lambda: pool.lease("b"), "'b' is not resident")
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


# ---- policies ----------------------------------------------------------------------------------------

ZOO = {f"m{i}": (107_136, 290_112, 624_896, 1_160_640)[i % 4] for i in range(10)}


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="pool policy 'fifo', expected one of lru, lru"):
        Pool(100, "fifo")  # type: ignore[arg-type]


def test_ten_models_in_the_budget_of_five_and_a_half() -> None:
    pool = Pool(sum(ZOO.values()) * 55 // 100)
    victims = {name: gone for name, size in ZOO.items() if (gone := pool.admit(name, size, pinned=name == "m0"))}
    assert victims == {"m6": ["m1", "m2"], "m7": ["m3"], "m9": ["m4"]}
    assert len(pool) == 6 and pool["m0"].pinned and pool.used <= pool.budget


@pytest.mark.parametrize(
    ("policy", "hits", "evictions", "warm"),
    [("lru", 29, 24, 2), ("lru+backout", 30, 20, 5), ("gdsf", 27, 26, 4)],
)
def test_hot_models_and_cold_ones_in_half_their_bytes(policy: PoolPolicy, hits: int, evictions: int, warm: int) -> None:
    pool = Pool(sum(ZOO.values()) // 2, policy)
    assert pool.budget // 1024 == 2325
    for name, size in ZOO.items():
        pool.admit(name, size, pinned=name == "m0")
    stream = [name for b in range(10) for name in (*(f"m{(b + j) % 4}" for j in range(4)), f"m{4 + b % 6}")]
    found, given_up = [], 0
    for name in stream:
        found.append(name in pool)
        given_up += len(pool.admit(name, ZOO[name]))
        pool.check()
    assert (len(found), sum(found), found.count(False), given_up) == (50, hits, 50 - hits, evictions)
    assert len(pool) == warm and pool["m0"].pinned


def test_backing_out_keeps_whoever_still_fits_the_hottest_first() -> None:
    small_ones_first = [("a", 20, False), ("b", 20, False), ("c", 60, False)]
    assert filled(100, *small_ones_first).admit("d", 60) == ["a", "b", "c"]
    assert filled(100, *small_ones_first, policy="lru+backout").admit("d", 60) == ["c"]
    assert filled(100, *small_ones_first, policy="lru+backout").admit("d", 61) == ["a", "c"]
    assert filled(100, *small_ones_first, policy="lru+backout").resize(60) == ["a", "b"]


def test_the_least_valuable_byte_goes_first() -> None:
    """Value: floor + uses x reload seconds a byte, the floor being the value of the last one given up."""
    pool = Pool(100, "gdsf", reload_seconds=lambda num_bytes: 10.0 + num_bytes)
    pool.admit("small", 10)
    pool.admit("large", 80)
    assert (pool["small"].value, pool["large"].value) == (20 / 10, 90 / 80)
    assert pool.admit("new", 20) == ["large"]  # although used later
    assert pool["new"].value == 1.125 + 30 / 20
    pool.touch("new")
    assert pool["new"].value == 1.125 + 2 * 30 / 20
    assert pool.admit("large", 80) == ["small"] and pool["large"].value == 2.0 + 2 * 90 / 80  # its use counts on
    pool.evict("large")
    pool.forget("large")
    pool.admit("large", 80)
    assert pool["large"].value == 2.0 + 90 / 80


def test_equal_values_go_by_the_last_use() -> None:
    pool = Pool(100, "gdsf")
    for name in ("b", "a", "c"):
        pool.admit(name, 30)
    assert pool.admit("d", 40) == ["b"]
    assert reload_seconds(50_000_000_000) == 1.05


def test_snapshots_bring_everything_back() -> None:
    pool = filled(100, ("b", 30, False), ("a", 30, True), ("c", 30, False), policy="gdsf")
    pool.touch("b")
    before, snapshot, held = copy.deepcopy(state(pool)), pool.snapshot(), pool["c"]
    for _ in range(2):  # a snapshot stays good
        pool["a"].pinned = False
        assert pool.resize(70) == ["a"]
        assert pool.admit("d", 40) == ["c"]
        pool.touch("d")
        pool.evict("b")
        pool.restore(snapshot)
        assert state(pool) == before and list(pool.charges()) == ["b", "a", "c"] and pool["c"] is held
    pool.check()


def test_restoring_leaves_leases_as_they_are() -> None:
    pool = filled(100, ("a", 30, False), ("b", 30, False))
    pool.lease("a")
    snapshot = pool.snapshot()
    pool.lease("a")
    pool.evict("b")
    pool.admit("b", 30)
    pool.lease("b")
    pool.restore(snapshot)
    assert (pool["a"].leases, pool["b"].leases) == (2, 1)
    pool.admit("c", 40)
    pool.lease("c")
    refused(pool, Leased, lambda: pool.restore(snapshot), "'c' has 1 leases")


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


def test_a_resident_name_with_other_pieces_is_refused() -> None:
    pool = filled(100, ("a", BASE, False), ("w", 5, False))
    assert pool.admit("a", dict(reversed(BASE.items()))) == [] and pool.admit("a", HUGE) == []
    for other, num_bytes in (
        (TUNED, 75),
        ({"all": 80}, 80),
        (BASE | {"upper": 19}, 79),
        ({}, 0),
        (BASE | {"huge": HUGE}, HUGE + 80),
    ):
        refused(pool, DuplicateId, lambda p=other: pool.admit("a", p), "80 bytes (", f"{num_bytes:,} bytes (")
        refused(pool, DuplicateId, lambda p=other: pool.check_admission("a", p), "80 bytes (")
    refused(pool, DuplicateId, lambda: pool.admit("w", BASE), "5 bytes (", "80 bytes (")


def test_a_piece_has_one_size() -> None:
    pool = filled(100, ("a", BASE, False))
    refused(pool, InvalidRequest, lambda: pool.admit("b", {"embed": 41}), "'embed' of 41 bytes is resident with 40")


SIZES: dict[Hashable, int] = {key: 1 + 7 * i % 23 for i, key in enumerate("pqrstuvw")}  # 1..22 bytes
NAMES = st.sampled_from("abcde")
PIECES = st.sets(st.sampled_from(sorted(SIZES, key=str)), min_size=1)


class PoolMachine(RuleBasedStateMachine):
    """A pool beside the plainest model of it: who holds which pieces, who was used when and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = 60
        self.held: dict[str, set[Hashable]] = {}  # in order of admission
        self.used: list[str] = []  # coldest first
        self.value: dict[str, float] = {}
        self.count: Counter[str] = Counter()
        self.floor = 0.0
        self.fixed: dict[str, str] = {}  # "pinned" or "leased"
        self.saved: tuple[object, ...] | None = None

    @initialize(policy=st.sampled_from(POOL_POLICIES))
    def start(self, policy: PoolPolicy) -> None:
        self.policy = policy
        self.pool = Pool(self.budget, policy, lambda num_bytes: 5 + 2 * num_bytes)

    def bytes_of(self, *sets: set[Hashable]) -> int:
        return sum(SIZES[key] for key in set().union(*sets))

    def expected(self, newcomer: set[Hashable], budget: int) -> list[str] | None:
        """Victims by giving up one after the other and counting anew; None where that does not help."""
        kept, victims = dict(self.held), []
        for name in sorted(self.used, key=self.value.__getitem__) if self.policy == "gdsf" else self.used:
            if self.bytes_of(newcomer, *kept.values()) <= budget:
                break
            if name not in self.fixed:
                victims.append(name)
                del kept[name]
        if self.bytes_of(newcomer, *kept.values()) > budget:
            return None
        for name in victims[::-1]:
            more = self.bytes_of(newcomer, self.held[name], *kept.values())
            free = more == self.bytes_of(newcomer, *kept.values())
            if free or (self.policy == "lru+backout" and more <= budget):
                victims.remove(name)
                kept[name] = self.held[name]
        return victims

    def give_up(self, victims: list[str]) -> None:
        for victim in victims:
            self.floor = max(self.floor, self.value[victim])
            del self.held[victim]
            self.used.remove(victim)

    def use(self, name: str) -> None:
        self.used = [other for other in self.used if other != name] + [name]
        self.count[name] += 1
        num_bytes = self.bytes_of(self.held[name])
        self.value[name] = self.floor + self.count[name] * ((5 + 2 * num_bytes) / num_bytes)

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
        before = copy.deepcopy(state(self.pool))
        allowed = self.tried(lambda: [str(self.pool.check_admission(name, pieces))]) is not None
        assert state(self.pool) == before
        victims = self.tried(lambda: self.pool.admit(name, pieces, pinned))
        assert allowed == (victims is not None)
        if name in self.held:
            assert victims == ([] if keys == self.held[name] else None)
            if victims is not None:
                self.use(name)
            return
        assert victims == self.expected(keys, self.budget)
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
            floor = self.floor
            self.give_up([name])
            self.floor = floor  # nobody had to make room
            self.fixed.pop(name, None)

    @rule(name=NAMES, kind=st.sampled_from(["pinned", "leased", "free"]))
    def fix(self, name: str, kind: str) -> None:
        if name in self.held:
            self.pool[name].pinned, self.pool[name].leases = kind == "pinned", int(kind == "leased")
            self.fixed.pop(name, None)
            self.fixed |= {name: kind} if kind != "free" else {}

    @rule()
    def snapshot(self) -> None:
        values = (self.budget, self.held, self.used, self.value, self.count, self.floor, self.fixed)
        self.saved = (state(self.pool), self.pool.snapshot(), copy.deepcopy(values))

    @precondition(lambda self: self.saved is not None and "leased" not in self.fixed.values())
    @rule()
    def restore(self) -> None:
        before, snapshot, values = self.saved
        if "leased" in values[-1].values():
            return
        self.pool.restore(snapshot)
        assert state(self.pool) == before
        self.budget, self.held, self.used, self.value, self.count, self.floor, self.fixed = copy.deepcopy(values)

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
