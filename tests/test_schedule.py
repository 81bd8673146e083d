from __future__ import annotations

from polymodel.schedule import RoundRobin


def picks(policy: RoundRobin, *ready: str) -> list[str | None]:
    """What is picked while the models named in each string have work."""
    return [policy.pick(list(names)) for names in ready]


def test_models_take_turns_in_the_order_of_their_first_work() -> None:
    assert picks(RoundRobin(), *["bca"] * 7) == list("bcabcab")


def test_the_order_does_not_follow_the_order_of_requests() -> None:
    assert picks(RoundRobin(), "abc", "cba", "bca", "abc") == list("abca")


def test_nothing_ready_is_no_turn() -> None:
    policy = RoundRobin()
    assert picks(policy, "", "a", "", "a") == [None, "a", None, "a"]


def test_a_newcomer_waits_for_one_round_at_most() -> None:
    assert picks(RoundRobin(), "ab", "abc", "abc", "abc") == list("abac")


def test_who_has_no_more_work_is_skipped_and_comes_back_last() -> None:
    policy = RoundRobin()
    assert picks(policy, "abc", "abc", "ac", "ac", "abc", "abc", "abc") == list("abcacab")


def test_nobody_waits_longer_than_the_number_of_models() -> None:
    policy, waited = RoundRobin(), dict.fromkeys("abcde", 0)
    for step in range(100):
        ready = [name for i, name in enumerate("abcde") if (step >> i) & 1 or name == "c"]
        chosen = policy.pick(ready)
        for name in waited:
            waited[name] = 0 if name == chosen or name not in ready else waited[name] + 1
        assert max(waited.values()) < len(waited)
