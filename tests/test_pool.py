"""Who stays resident: order of giving up, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymodel.errors import EmptyId, Leased, PinnedNoRoom, TooLarge, UnknownModel
from polymodel.pool import Pool

HUGE = 2**63 - 1


def filled(budget: int, *models: tuple[str, int, bool]) -> Pool:
    pool = Pool(budget)
    for name, num_bytes, pinned in models:
        pool.admit(name, num_bytes, pinned)
    return pool


def state(pool: Pool) -> object:
    """Everything there is to a pool, stamps and clock included."""
    residents = [(r.name, r.num_bytes, r.pinned, r.leases, r.stamp) for r in pool._residents.values()]
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
