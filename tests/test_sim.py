"""Plans of residency and simulated lanes, against arithmetic by hand and figures that are known without them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from math import inf, isnan
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_tiny

from polymodel.checkpoint import Checkpoint, open_checkpoint, perturbed
from polymodel.config import LANE_POLICIES, POOL_POLICIES, LanePolicy, PoolPolicy
from polymodel.errors import InvalidRequest, PinnedNoRoom, PolymodelError, TooLarge, UnknownModel
from polymodel.events import Events, chrome_trace, max_concurrent, timeline
from polymodel.kv import Arena
from polymodel.ledger import Ledger
from polymodel.residency import Residency
from polymodel.sim import H200, Arrival, Hardware, Result, Simulated, Tiers, plan, read_trace, run

# bytes, operations and seconds that are easy to add up by hand
PLAIN = Hardware("plain", 100.0, 1.0, 2.0, 1.0, host_bandwidth=10.0, disk_bandwidth=5.0, step_overhead=0.5)


def refused(error: type[PolymodelError], call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), caught.value


# ---- hardware ----------------------------------------------------------------------------------------


def test_costs_follow_from_bytes_and_operations() -> None:
    assert H200.decode_seconds(16e9, 0) == pytest.approx(4.567e-3, rel=1e-3)
    assert H200.decode_seconds(64e9, 3.84e9) == pytest.approx(64e9 / 3.84e12 + 1e-3 + 4e-4)
    assert H200.prefill_seconds(8e9, 1000) == pytest.approx(16e12 / (989e12 * 0.45) + 4e-4)
    assert H200.page_in_seconds(32_000_000_000, from_host=True) == 0.64
    assert H200.page_in_seconds(32_000_000_000, from_host=False) == pytest.approx(5.333, rel=1e-3)


def test_measured_speeds_replace_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text('{"host_bandwidth": 55e9, "step_overhead": 1e-5}')
    assert Hardware.from_json(path) == replace(H200, name="box", host_bandwidth=55e9, step_overhead=1e-5)
    for text, part in (
        ('{"hbm": 1}', "'hbm'"),
        ('{"flops": 0}', "flops must be a number above 0, got 0"),
        ('{"flops": "1e12"}', "got '1e12'"),
        ('{"flops": NaN}', "got nan"),
        ('{"name": 5}', "name must be text, got 5"),
        ("[]", "an object"),
        ("{", "no hardware description"),
    ):
        path.write_text(text)
        refused(InvalidRequest, lambda: Hardware.from_json(path), part)
    refused(InvalidRequest, lambda: Hardware.from_json(tmp_path / "none"), "none")


# ---- plan --------------------------------------------------------------------------------------------

SIZES = {"a": 40, "b": 40, "c": 40, "d": 100}


def test_a_plan_counts_what_the_pool_would_do() -> None:
    found = plan(SIZES, ["a", "b", "a", "c", "a", "b"], 100, hardware=PLAIN)
    assert (found.requests, found.hits, found.misses, found.evictions) == (6, 2, 4, 2)
    assert (found.loaded_bytes, found.stall_seconds, found.miss_rate) == (160, 160 / 5, 4 / 6)
    assert found.resident == ("a", "b")
    assert [(m.name, m.num_bytes, m.requests, m.misses, m.evictions) for m in found.models] == [
        ("a", 40, 3, 1, 0),
        ("b", 40, 2, 2, 1),
        ("c", 40, 1, 1, 1),
    ]
    assert found == plan(SIZES, [(0.5 * i, name) for i, name in enumerate("abacab")], 100, hardware=PLAIN)


def test_a_plan_compares_itself_with_a_look_ahead() -> None:
    found = plan(SIZES, list("abcabcabc"), 80)  # the worst for the least recently used
    assert (found.misses, found.optimal_misses, found.regret) == (9, 6, 3)
    assert plan(SIZES, [], 80).miss_rate == 0


def test_pinned_and_warm_models_are_there_from_the_start_and_do_not_count() -> None:
    found = plan(SIZES, ["b", "c", "a"], 100, pinned=["a"], warm=["b", "c"])
    assert (found.misses, found.evictions, found.resident) == (2, 2, ("a", "c"))
    assert plan(SIZES, ["c", "a"], 100, pinned=["a"], warm=["b", "c"]).misses == 0
    assert plan(SIZES, ["b"], 100, warm=["a", "c"]).models[-1].name == "a"  # given up, and not in the trace


def test_pieces_in_common_are_loaded_once() -> None:
    models: dict[str, dict[Hashable, int]] = {"base": {"low": 60, "up": 20}, "tuned": {"low": 60, "other": 20}}
    found = plan(models, ["base", "tuned", "base"], 100)
    assert (found.misses, found.evictions, found.loaded_bytes) == (2, 0, 100)
    assert [m.loaded_bytes for m in found.models] == [80, 20]
    assert found.optimal_misses == 2


def test_what_made_room_comes_back_from_the_hosts_memory() -> None:
    def stall(host_budget: int, trace: str = "abcabc", budget: int = 80) -> float:
        return plan(SIZES, list(trace), budget, hardware=PLAIN, host_budget=host_budget).stall_seconds

    disk, host = 40 / 5, 40 / 10
    assert stall(0) == stall(39) == 6 * disk
    assert stall(40) == 3 * disk + 3 * host  # each comes back as the next one leaves
    assert stall(40, "abca", budget=40) == 4 * disk  # b drove a out of there too
    assert stall(80, "abca", budget=40) == 3 * disk + host
    assert stall(80, "abcba", budget=40) == 3 * disk + 2 * host  # what is back on the device takes no room there
    models: dict[str, dict[Hashable, int]] = {"base": {"low": 60, "up": 20}, "tuned": {"low": 60, "other": 20}}
    trace = ["base", "tuned", "x", "base"]  # of base only its own piece left at first
    for host_budget, seconds in ((79, 140 / 5), (80, 120 / 5 + 20 / 10)):  # all of base has to fit nevertheless
        found = plan(models | {"x": {"x": 20}}, trace, 100, hardware=PLAIN, host_budget=host_budget)
        assert (found.loaded_bytes, found.stall_seconds) == (80 + 20 + 20 + 20, seconds)


@pytest.fixture(scope="module")
def relatives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Two checkpoints that have nothing in common, and what was trained further from one of them: all, or the top."""
    folder, shape = tmp_path_factory.mktemp("relatives"), {"num_hidden_layers": 3, "max_position_embeddings": 128}
    base = write_tiny(folder / "base", "llama", **shape)
    other = write_tiny(folder / "other", "llama", 1, **shape | {"num_hidden_layers": 2})
    siblings = {f"from-{i}": perturbed(open_checkpoint(base), i, seed=0) for i in range(3)}
    return {"base": open_checkpoint(base), **siblings, "other": open_checkpoint(other)}


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 200))])
def test_a_plan_is_what_a_residency_does(relatives: dict[str, Checkpoint], seed: int) -> None:
    rng, arena, events = Random(seed), Arena(16 << 20, 2 << 20), Events()
    policy, pinned = rng.choice(POOL_POLICIES), ["base"] * (rng.random() < 0.3)
    size = Residency(1 << 30, arena, Ledger(), events).sized("m", relatives["base"], "file").plan.nbytes
    budget, host_budget = (int(size * rng.uniform(*most)) for most in ((1 + len(pinned), 3), (0, 2.5)))
    options: Any = {"host_budget": host_budget, "policy": policy}
    residency = Residency(1 << 30, arena, Ledger(), events, share=False, weight_check="off", **options)
    for name, checkpoint in relatives.items():
        residency.add(name, checkpoint, "file", False)
        residency.unload(name)
        residency.pool.forget(name)
    residency.resize(budget)
    for name in pinned:
        residency.set_pinned(name, True)
    models, trace = residency.plan_pieces(), rng.choices(list(relatives), k=25)
    tiers = Tiers(models, budget, host_budget, policy, pinned)
    misses, evictions, loaded = Counter[str](), Counter[str](), Counter[str]()
    for name in trace:
        assert (residency.pool.names(), residency.host.names()) == (tiers.device.names(), tiers.host.names())
        before = set(residency.pool.names())
        copied = sum(n for key, n in models[name].items() if key in residency._host_pieces)
        events.clear()
        with residency.lease(name):
            moved = [event.num_bytes for event in events.of("page_in")]
        page_in = tiers.enter(name)
        gone = before - set(residency.pool.names())
        assert (set(page_in.victims), page_in.num_bytes) == (gone, sum(moved))
        assert page_in.from_host == (copied if moved else 0)
        misses[name] += len(moved)
        evictions.update(gone)
        loaded[name] += sum(moved)
    found = plan(models, trace, budget, pinned=pinned, **options)
    assert [(m.misses, m.evictions, m.loaded_bytes) for m in found.models] == [
        (misses[m.name], evictions[m.name], loaded[m.name]) for m in found.models
    ]
    residency.check()


def test_a_plan_that_cannot_be_is_refused() -> None:
    refused(UnknownModel, lambda: plan(SIZES, ["a", "e"], 100), "'e'", "a, b, c, d")
    refused(UnknownModel, lambda: plan(SIZES, ["a"], 100, pinned=["e"]), "'e'")
    refused(InvalidRequest, lambda: plan({"a": -1}, ["a"], 100), "'a'", "-1 bytes")
    refused(InvalidRequest, lambda: plan({"a": {"x": 5, "y": -2}}, [], 100), "'a'", "-2 bytes")
    for size in ("3", 3.0, True, None):
        no_size: Any = size
        for weights in (no_size, {"x": 5, "y": no_size}):
            refused(InvalidRequest, lambda w=weights: plan({"a": w}, [], 100), f"'a' cannot have {size!r} bytes")
        refused(InvalidRequest, lambda n=no_size: plan(SIZES, [], n), "budget must be", f"got {size!r}")
        refused(
            InvalidRequest, lambda n=no_size: plan(SIZES, [], 9, host_budget=n), "host_budget must be", f"got {size!r}"
        )
    refused(TooLarge, lambda: plan(SIZES, ["a", "d"], 99), "'d'", "100", "99")
    refused(PinnedNoRoom, lambda: plan(SIZES, ["d"], 100, pinned=["a"]), "'d'", "40", "100")
    assert plan(SIZES, ["a"], 50).misses == 1  # d does not fit, and nobody asks for it


TRACES = st.lists(st.sampled_from("abcde"), max_size=12)


@given(TRACES, st.integers(1, 5), st.sampled_from(POOL_POLICIES))
@settings(deadline=None, max_examples=60)
def test_no_policy_beats_the_look_ahead_where_models_are_of_one_size(
    trace: list[str], slots: int, policy: PoolPolicy
) -> None:
    sizes = dict.fromkeys("abcde", 10)
    found = plan(sizes, trace, 10 * slots, policy=policy)
    assert found.optimal_misses == fewest_misses(trace, slots) <= found.misses
    assert found.hits + found.misses == len(trace) and found.loaded_bytes == 10 * found.misses
    assert found.misses - found.evictions == len(found.resident)
    if policy == "lru":
        assert plan(sizes, trace, 10 * slots + 10).misses <= found.misses


def fewest_misses(trace: list[str], slots: int) -> int:
    """By trying everything."""
    states: dict[frozenset[str], int] = {frozenset(): 0}
    for name in trace:
        after: dict[frozenset[str], int] = {}
        for held, misses in states.items():
            for kept in [held] if name in held or len(held) < slots else [held - {victim} for victim in held]:
                now = kept | {name}
                after[now] = min(after.get(now, len(trace)), misses + (name not in held))
        states = after
    return min(states.values())


def test_a_plan_prints_as_a_table_that_says_it_is_simulated() -> None:
    found = plan({"a": 1 << 30, "longer": 1 << 20}, ["a", "longer", "a"], 1 << 30, hardware=PLAIN)
    assert str(found).splitlines() == [
        "simulated: lru under 1.00 GiB on plain",
        "model      bytes  requests  misses  evictions    loaded       stall s",
        "a       1.00 GiB         2       2          1  2.00 GiB  429496729.60",
        "longer   1.0 MiB         1       1          1   1.0 MiB     209715.20",
        "total                    3       3          2  2.00 GiB  429706444.80",
        "miss rate 100.0%; with a look ahead 3 misses, regret 0",
    ]
    facts = json.loads(json.dumps(found.as_dict()))
    assert facts["simulated"] and facts["misses"] == 3 and facts["models"][1]["name"] == "longer"


def test_traces_are_names_or_json_lines() -> None:
    lines = ["a\n", "", '  {"model": "b", "time": 1.5}', '{"model": "c"}', "d e "]
    assert read_trace(lines) == ["a", (1.5, "b"), (0.0, "c"), "d e"]
    no_names = [f'{{"model": {name}}}' for name in ("null", "5", '""')]
    no_times = [f'{{"model": "a", "time": {time}}}' for time in ('"late"', '"nan"', "NaN", "null", "9" * 400)]
    for line in ("{", '{"time": 1}', *no_names, *no_times):
        refused(InvalidRequest, lambda text=line: read_trace(["a", text]), "line 2", line[:90])


def test_importing_the_simulation_loads_no_torch() -> None:
    code = "import sys, polymodel.sim; print([name for name in ('torch', 'numpy', 'triton') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---- the lane ----------------------------------------------------------------------------------------

FLEET = {"a": Simulated(100, 1.0), "b": Simulated(50, 1.0, kv_bytes_per_token=1)}


def simulate(*requests: Arrival, **options: Any) -> Result:
    return run(requests, FLEET, **{"budget": 150, "hardware": PLAIN} | options)


def kinds(result: Result, *wanted: str) -> list[tuple[str, str, int]]:
    return [(e.kind, e.model, e.tokens) for e in result.events if e.kind in wanted]


def test_a_request_alone_takes_page_in_prefill_and_a_step_a_token() -> None:
    result = simulate(Arrival(2.0, "a", prompt_tokens=10, output_tokens=4))
    (one,) = result.served
    page_in, prefill, step = 100 / 5, 2 * 10 / 2 + 0.5, 100 / 100 + 0.5
    assert one.ttft == page_in + prefill and one.latency == one.ttft + 3 * step
    assert (one.tpot, one.longest_gap) == (step, step)
    assert result.seconds == 2 + one.latency and (result.swaps, result.misses, result.loaded_bytes) == (1, 1, 100)
    assert result.shares == {"a": 100 + 100 + 3 * 100}
    assert kinds(result, "page_in", "prefill", "decode", "turn") == [
        *(("page_in", "a", 0), ("prefill", "a", 10), ("decode", "a", 3), ("turn", "a", 0))
    ]


def test_a_chunk_of_few_tokens_takes_as_long_as_its_weights() -> None:
    (one,) = simulate(Arrival(0.0, "a", 1, 1), warm=["a"], hardware=replace(PLAIN, flops=1e9)).served
    assert one.ttft == one.latency == 100 / 100 + 0.5


def test_sequences_of_one_model_share_its_stream() -> None:
    result = simulate(*(Arrival(0.0, "b", 5, 9) for _ in range(4)), warm=["b"])
    # the first of 8 steps reads 4 x 6 tokens of keys and values, the last 4 x 13
    assert result.shares == {"b": 50 + 8 * 50 + 4 * sum(range(6, 14))}
    assert kinds(result, "decode") == [("decode", "b", 32)]
    (turn,) = [event for event in result.events if event.kind == "turn"]
    assert turn.sequences == 4 and turn.stop == pytest.approx(20.5 + 8 * 0.5 + (8 * 50 + 4 * 76) / 100)


def test_prompts_come_in_chunks_and_turns_in_quanta() -> None:
    result = simulate(Arrival(0.0, "a", 25, 7), Arrival(0.0, "b", 2, 3), prefill_chunk=10, quantum=2, warm=["a", "b"])
    assert kinds(result, "prefill", "decode") == [
        *(("prefill", "a", 10), ("prefill", "b", 2), ("decode", "b", 2)),
        *(("prefill", "a", 10), ("prefill", "a", 5)),
        *[("decode", "a", 2)] * 3,
    ]
    together = simulate(Arrival(0.0, "a", 7, 1), Arrival(0.0, "a", 7, 1), prefill_chunk=10)
    assert [(e.tokens, e.sequences) for e in together.events if e.kind == "prefill"] == [(10, 2), (4, 1)]


def test_a_batch_takes_the_urgent_first_and_no_more_than_it_may() -> None:
    requests = [Arrival(0.0, "a", 1, 1, priority=priority) for priority in (0, 1, 0, 1)]
    result = simulate(*requests, max_batch=2)
    assert [one.number for one in result.served] == [1, 3, 0, 2]
    soon = simulate(Arrival(0.0, "a", 1, 1), Arrival(0.0, "a", 1, 1, deadline=9.0), max_batch=1)
    assert [one.number for one in soon.served] == [1, 0]


def test_the_lane_knows_what_is_urgent_and_what_has_waited() -> None:
    def order(*requests: Arrival, **options: Any) -> list[int]:
        return [one.number for one in simulate(*requests, **{"warm": ["a", "b"]} | options).served]

    first = Arrival(0.0, "a", 1, 100)
    for second in (Arrival(0.0, "b", 1, 1, priority=1), Arrival(0.0, "b", 1, 1, deadline=9.0)):
        assert order(first, second, lane_policy="priority", max_wait=inf) == [1, 0]
        assert order(first, second, lane_policy="fcfs", max_wait=inf) == [0, 1]
    assert order(first, Arrival(2.0, "b", 1, 1), lane_policy="fcfs", max_wait=5.0) == [1, 0]  # decoding is no waiting
    requests = [Arrival(0.0, "ab"[i == 1], 1, 9) for i in range(5)]
    stays: dict[str, Any] = {"lane_policy": "batch-by-model", "budget": 100, "max_batch": 1, "warm": ()}
    assert order(*requests, **stays) == [0, 2, 3, 4, 1]  # a page-in takes 20 seconds, so 5 are no reason to leave
    assert order(*requests, **stays, max_wait=5.0) == [0, 1, 2, 3, 4]


def test_a_model_that_is_away_is_paged_in_and_another_one_leaves() -> None:
    requests = [Arrival(0.0, "a", 1, 1), Arrival(1.0, "b", 1, 1), Arrival(100.0, "a", 1, 1)]
    result = simulate(*requests, budget=149, host_budget=100, lane_policy="fcfs")
    assert [
        (e.kind, e.model, e.stop - e.start, e.num_bytes) for e in result.events if e.kind in ("page_in", "evict")
    ] == [
        ("page_in", "a", 20.0, 100),
        ("evict", "a", 0.0, 100),
        ("page_in", "b", 10.0, 50),
        ("evict", "b", 0.0, 50),
        ("page_in", "a", 10.0, 100),  # from the host's memory
    ]
    assert (result.swaps, result.misses, result.evictions, result.loaded_bytes) == (3, 3, 2, 250)


def test_the_clock_stops_where_it_is_told_to() -> None:
    result = simulate(*(Arrival(float(i), "a", 1, 1) for i in range(100)), warm=["a"], until=20.0)
    assert result.events[-1].start < 20 <= result.events[-1].stop == result.seconds and len(result.served) < 100
    assert (
        simulate(until=5.0).served == () and isnan(simulate().mean("ttft")) and isnan(simulate().percentile("ttft", 50))
    )


def test_events_can_be_measured_and_drawn_as_those_of_a_real_lane() -> None:
    result = simulate(*(Arrival(0.3 * i, "ab"[i % 2], 3, 9) for i in range(8)))
    assert max_concurrent(event for event in result.events if event.kind == "decode") == 1
    assert max_concurrent(event for event in result.events if event.kind == "turn") == 1
    assert timeline(result.events).startswith("a |") and json.loads(chrome_trace(result.events))["traceEvents"]
    assert json.loads(json.dumps(result.as_dict()))["simulated"] and len(result.of("a").served) == 4
    assert {event.model for event in result.of("a").events} == {"a"}


def test_a_run_in_which_nothing_is_over_is_json_too() -> None:
    for result in (simulate(), simulate(Arrival(0.0, "a", 1, 1)).of("b")):
        facts = json.loads(json.dumps(result.as_dict(), allow_nan=False))
        assert facts["requests"] == 0 and facts["ttft"] == dict.fromkeys(["mean", "p50", "p90", "p99"])


@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_those_of_numpy(percent: float) -> None:
    result = simulate(*(Arrival(0.4 * i, "a", 1 + i % 4, 2) for i in range(23)))
    latencies = [one.latency for one in result.served]
    assert result.percentile("latency", percent) == pytest.approx(np.percentile(latencies, percent))
    assert result.mean("latency") == pytest.approx(np.mean(latencies))


def test_measures_that_there_are_not_are_refused() -> None:
    for result in (simulate(), simulate(Arrival(0.0, "a", 1, 1))):
        for call in (result.values, result.mean, partial(result.percentile, percent=50)):
            refused(InvalidRequest, partial(call, "speed"), "'speed'", "ttft, tpot, latency, longest_gap")
        for percent in (-1, 101, float("nan"), "50", True):
            wrong: Any = percent
            refused(InvalidRequest, partial(result.percentile, "ttft", wrong), f"got {percent!r}")


def test_a_run_that_cannot_be_is_refused() -> None:
    one = Arrival(0.0, "a", 1, 1)
    refused(UnknownModel, lambda: simulate(replace(one, model="c")), "'c'", "a, b")
    refused(TooLarge, lambda: simulate(one, budget=99), "100", "99")
    refused(InvalidRequest, lambda: simulate(one, lane_policy="chaos"), "chaos", "byte-drr")
    refused(InvalidRequest, lambda: simulate(one, policy="chaos"), "chaos", "gdsf")
    for name in ("quantum", "prefill_chunk", "max_batch"):
        for value in (0, 1.5, "2", True):
            refused(InvalidRequest, lambda o=name, v=value: simulate(one, **{o: v}), name, f"got {value!r}")
    for name, values in (
        ("seconds", (-1.0, float("nan"), inf, "0", True)),
        ("prompt_tokens", (0, 1.5, "1", True)),
        ("output_tokens", (0, 2.0, None)),
    ):
        for value in values:
            changed: Any = {name: value}
            refused(InvalidRequest, lambda c=changed: replace(one, **c), "at least 1 token", f"{name}={value!r}")
    for changed in ({"priority": 0.5}, {"priority": True}, {"deadline": float("nan")}, {"deadline": "soon"}):
        refused(InvalidRequest, lambda c=changed: replace(one, **c), "priority", "deadline")
    for changed in ({"params": -1.0}, {"params": "8B"}, {"kv_bytes_per_token": 0.5}, {"kv_bytes_per_token": -1}):
        refused(InvalidRequest, lambda c=changed: replace(FLEET["a"], **c), "params", "bytes a token")


ARRIVALS = st.builds(
    Arrival,
    st.integers(0, 50).map(float),
    st.sampled_from("abc"),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(0, 2),
)


@given(
    st.lists(ARRIVALS, max_size=15), st.sampled_from(LANE_POLICIES), st.sampled_from(POOL_POLICIES), st.integers(1, 9)
)
@settings(deadline=None, max_examples=60)
def test_every_request_is_served_whole_and_every_byte_is_counted(
    requests: list[Arrival], lane_policy: LanePolicy, policy: PoolPolicy, quantum: int
) -> None:
    fleet = FLEET | {"c": Simulated(90, 2.0)}

    options: Any = {"policy": policy, "lane_policy": lane_policy, "quantum": quantum, "hardware": PLAIN}

    def once() -> Result:
        return run(requests, fleet, budget=150, prefill_chunk=16, max_batch=3, **options)

    result = once()
    assert result == once()
    assert sorted(one.number for one in result.served) == list(range(len(requests)))
    for one in result.served:
        assert one.num_prefilled == one.arrival.prompt_tokens and one.num_output == one.arrival.output_tokens
        assert one.arrival.seconds < one.first <= one.last <= result.seconds
    moved = [event for event in result.events if event.kind in ("page_in", "prefill", "decode")]
    for model, streamed in result.shares.items():
        assert streamed == sum(event.num_bytes for event in moved if event.model == model)
    tokens = sum(event.tokens for event in result.events if event.kind == "prefill")
    assert tokens == sum(arrival.prompt_tokens for arrival in requests)
    assert result.loaded_bytes == sum(event.num_bytes for event in moved if event.kind == "page_in")
    assert [a.stop <= b.start for a, b in itertools.pairwise(moved)].count(False) == 0
