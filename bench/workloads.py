"""Workloads of many models, and what the simulated pool and lane make of them beside known baselines. Needs no GPU.

    python bench/workloads.py

Popularity (Zipf, alone or in bursts), arrivals (Azure's traces of 2023 by their figures), a queue in which every
change of model costs seconds, a lane with a chat, agents and a flood of prompts, and a stream of hot and cold models.
Every draw follows from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from polymodel.config import LANE_POLICIES, POOL_POLICIES, LanePolicy, PoolPolicy
from polymodel.sim import H200, Arrival, Hardware, Measure, Plan, Result, Simulated, aligned, plan, run

GB = 10**9

# ---- popularity --------------------------------------------------------------------------------------

# copies, bytes and parameters in billions, bytes of keys and values a token: bf16, and int8 where the model is large
KINDS = {
    "0.6B": (8, 1.2, 0.6, 28 * 2 * 1024 * 2),
    "1.7B": (6, 3.4, 1.7, 28 * 2 * 1024 * 2),
    "4B": (5, 8.0, 4.0, 36 * 2 * 1024 * 2),
    "8B": (4, 16.0, 8.0, 36 * 2 * 1024 * 2),
    "32B": (1, 32.0, 32.0, 64 * 2 * 1024 * 2),
}
FLEET = {
    f"{kind}-{i}": Simulated(int(size * GB), params * 1e9, kv_bytes)
    for kind, (copies, size, params, kv_bytes) in KINDS.items()
    for i in range(copies)
}
ZOO = {name: one.weights for name, one in FLEET.items()}
ZOO_BUDGET = 100 * GB
ALPHAS = (0.7, 0.9, 1.3, 2.1)
BURST_MODELS, BURST_REQUESTS = 6, 200  # that are asked for at a time; requests until others are, in the mean
# misses in percent by the pool's arithmetic done without it: alone (lru, gdsf, farthest next use), in bursts (lru)
KNOWN_MISSES = {
    0.7: ((35.5, 28.9, 19.5), 1.2),
    0.9: ((29.0, 23.5, 16.5), 1.4),
    1.3: ((17.0, 14.1, 10.8), 0.8),
    2.1: ((3.9, 3.1, 2.6), 0.4),
}


def popularity(alpha: float, num_requests: int, seed: int, bursts: bool = False) -> list[str]:
    """Names from the zoo: the i-th most popular model, whichever it is, in proportion to i ** -alpha.

    In bursts, some models are drawn so, and for a while all requests go to them.
    """
    rng, names = np.random.default_rng(seed), list(ZOO)
    ranks = (np.arange(len(names)) + 1.0) ** -alpha
    chances = np.empty(len(names))
    chances[rng.permutation(len(names))] = ranks / ranks.sum()
    if not bursts:
        return [names[i] for i in rng.choice(len(names), num_requests, p=chances)]
    drawn: list[int] = []
    while len(drawn) < num_requests:
        models = rng.choice(len(names), BURST_MODELS, replace=False, p=chances)
        length = rng.geometric(1 / BURST_REQUESTS)
        drawn += rng.choice(models, length, p=chances[models] / chances[models].sum()).tolist()
    return [names[i] for i in drawn[:num_requests]]


def popularity_plans(
    policy: PoolPolicy, alpha: float, num_requests: int, seeds: int, bursts: bool = False
) -> list[Plan]:
    """The zoo in its budget, a plan a seed."""
    traces = (popularity(alpha, num_requests, seed, bursts) for seed in range(seeds))
    return [plan(ZOO, trace, ZOO_BUDGET, policy=policy) for trace in traces]


def stream() -> tuple[dict[str, int], list[str]]:
    """Ten models of four sizes, and 50 requests: in each round four hot models and a cold one."""
    sizes = {f"m{i}": (107_136, 290_112, 624_896, 1_160_640)[i % 4] for i in range(10)}
    rounds = [[*(f"m{(b + j) % 4}" for j in range(4)), f"m{4 + b % 6}"] for b in range(10)]
    return sizes, [name for names in rounds for name in names]


# ---- arrivals ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic:
    """Gamma gaps between requests, and lognormal lengths, each by its mean and what else fixes its shape."""

    gap_mean: float  # seconds
    gap_cv: float  # standard deviation over mean; 1 is a Poisson process
    prompt: tuple[float, float]  # tokens: mean, median
    output: tuple[float, float]


# Azure's public LLM inference traces of 2023: 8,819 requests in 57 minutes, 19,366 in 58
CODE = Traffic(57 * 60 / 8819, 13.0, (2048, 1469), (27.9, 13))
CONVERSATION = Traffic(58 * 60 / 19366, 1.09, (1155, 1020), (211, 129))


def arrivals(
    traffic: Traffic, models: Sequence[str], num_requests: int, seed: int, slower: float = 1.0
) -> list[Arrival]:
    """Requests for the models, each twice as popular as the next; gaps may be stretched."""
    rng = np.random.default_rng(seed)
    shape = traffic.gap_cv**-2
    times = np.cumsum(rng.gamma(shape, slower * traffic.gap_mean / shape, num_requests))
    chances = 0.5 ** np.arange(len(models))
    chosen = rng.choice(len(models), num_requests, p=chances / chances.sum())
    prompts, outputs = (_lengths(rng, *length, num_requests) for length in (traffic.prompt, traffic.output))
    return [Arrival(float(t), models[m], p, o) for t, m, p, o in zip(times, chosen, prompts, outputs, strict=True)]


TRACED = ("4B-0", "8B-0", "1.7B-0", "0.6B-0")  # the models of a trace, the most popular first


def traced_lane(requests: Sequence[Arrival], lane_policy: LanePolicy) -> Result:
    """Of the traced models' 29 GB, 20 fit on the device; who makes room comes back from host memory."""
    return run(requests, FLEET, budget=20 * GB, host_budget=200 * GB, lane_policy=lane_policy)


def _lengths(rng: np.random.Generator, mean: float, median: float, num: int) -> list[int]:
    sigma = math.sqrt(2 * math.log(mean / median))
    return [max(1, round(length)) for length in rng.lognormal(math.log(median), sigma, num)]


# ---- lanes -------------------------------------------------------------------------------------------

SERVICE = 0.8  # seconds of a request in the swap queue
# seconds of a swap -> mean latency first come first served, and batched by model; one seed of a queue without a lane
KNOWN_WAITS = {7.0: (2089.2, 14.3), 2.87: (9.7, 4.9), 0.64: (1.6, 1.5), 0.001: (0.9, 0.9)}
# a lane that takes SERVICE a request, whatever it is
DESK = Hardware("a desk", inf, 1.0, inf, 1.0, host_bandwidth=GB, disk_bandwidth=GB, step_overhead=SERVICE)


def swap_queue(lane_policy: LanePolicy, swap: float, rate: float, num_requests: int, seed: int) -> Result:
    """Four models, 50/25/15/10 %, of which one fits; requests one by one, each change of model for `swap` seconds."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, num_requests))
    models = rng.choice(4, num_requests, p=(0.5, 0.25, 0.15, 0.10))
    requests = [Arrival(float(t), f"m{m}", 1, 1) for t, m in zip(times, models, strict=True)]
    size = int(swap * GB)
    fleet = {f"m{m}": Simulated(size, 0) for m in range(4)}
    max_wait = max(5.0, 12 * swap)
    return run(requests, fleet, budget=size, lane_policy=lane_policy, max_wait=max_wait, max_batch=1, hardware=DESK)


MIXED_WEIGHTS = {"chat": 8.0, "agent-0": 1.0, "agent-1": 1.0, "agent-2": 1.0, "flood": 1.0}
MIXED_SECONDS = 60.0


def mixed_lane(lane_policy: LanePolicy, flooded: bool = True, max_wait: float | None = inf) -> Result:
    """A 32B chat, three small agents and a flood of 8K prompts for an 8B: all in memory, and never out of work.

    As work only grows, all of it would be older than any max_wait after a while, and then the oldest goes first under
    every policy but byte-drr.
    """
    fleet = {
        "chat": Simulated(64 * GB, 32e9, 64 * 2 * 1024 * 2),
        **{f"agent-{i}": FLEET["0.6B-0"] for i in range(3)},
        "flood": FLEET["8B-0"],
    }
    requests = [Arrival(0.0, name, 512, 256) for name in fleet if name != "flood" for _ in range(600)]
    requests += [Arrival(0.0, "flood", 8192, 16) for _ in range(600 if flooded else 0)]
    return run(
        requests,
        fleet,
        budget=ZOO_BUDGET,
        lane_policy=lane_policy,
        weights=MIXED_WEIGHTS,
        max_wait=max_wait,
        max_batch=8,
        warm=tuple(fleet),
        until=MIXED_SECONDS,
    )


def share_error(result: Result) -> float:
    """The largest relative error of a model's bytes against its weight, of models that had work."""
    total, weight = sum(result.shares.values()), sum(MIXED_WEIGHTS[name] for name in result.shares)
    return max(abs(held / total * weight / MIXED_WEIGHTS[name] - 1) for name, held in result.shares.items())


# ---- the table ---------------------------------------------------------------------------------------


def _show(title: str, *rows: Sequence[str]) -> None:
    print(f"\n{title}\n" + "\n".join(f"  {line}" for line in aligned(rows)))


def show_popularity(num_requests: int = 6000, seeds: int = 3) -> None:
    head = ("requests", "alpha", *POOL_POLICIES, "farthest", "known lru", "gdsf", "farthest")
    rows: list[tuple[str, ...]] = [head]
    for bursts in (False, True):
        for alpha, (alone, in_bursts) in KNOWN_MISSES.items():
            plans = {policy: popularity_plans(policy, alpha, num_requests, seeds, bursts) for policy in POOL_POLICIES}
            rates = [sum(p.miss_rate for p in some) / seeds for some in plans.values()]
            rates.append(sum(p.optimal_misses for p in plans["lru"]) / seeds / num_requests)
            known = (str(in_bursts), "", "") if bursts else map(str, alone)
            kind = "in bursts" if bursts else "alone"
            rows.append((kind, str(alpha), *(f"{100 * rate:.1f}" for rate in rates), *known))
    _show(f"misses in %, 24 models of 166 GB in 100 GB, {num_requests} requests, {seeds} seeds", *rows)


def show_stream() -> None:
    sizes, names = stream()
    rows: list[tuple[str, ...]] = [("policy", "hits", "misses", "evictions", "known hits", "evictions")]
    for policy, known in zip(POOL_POLICIES, (("29", "24"), ("30", "20"), ("", "")), strict=True):
        p = plan(sizes, names, sum(sizes.values()) // 2, policy=policy, pinned=("m0",), warm=tuple(sizes))
        rows.append((policy, str(p.hits), str(p.misses), str(p.evictions), *known))
    _show("50 requests for hot and cold models in half their bytes; 31 hits are the most there can be", *rows)


def show_arrivals(num_requests: int = 2000) -> None:
    head = ("trace", "lane", "ttft s p50", "p99", "tpot s p50", "p99", "latency s p50", "p99", "page-ins")
    rows: list[tuple[str, ...]] = [head]
    for name, traffic in (("code", CODE), ("conversation", CONVERSATION)):
        requests = arrivals(traffic, TRACED, num_requests, seed=0)
        for policy in LANE_POLICIES:
            r = traced_lane(requests, policy)
            measures: tuple[Measure, ...] = ("ttft", "tpot", "latency")
            times = (f"{r.percentile(measure, percent):.3f}" for measure in measures for percent in (50, 99))
            rows.append((name, policy, *times, str(r.swaps)))
    _show(
        f"{num_requests} requests as Azure's in 2023 for four models, 29 GB in 20 GB, weights from host memory", *rows
    )


def show_swap_queue(num_requests: int = 2000, seeds: int = 20) -> None:
    rows: list[tuple[str, ...]] = [("swap s", "lane", "mean s", "p99 s", "page-ins a request", "known mean (1 seed)")]
    for swap, known in KNOWN_WAITS.items():
        policies: tuple[LanePolicy, ...] = ("fcfs", "batch-by-model")
        for policy, mean in zip(policies, known, strict=True):
            results = [swap_queue(policy, swap, 0.3, num_requests, seed) for seed in range(seeds)]
            columns = [[r.mean("latency"), r.percentile("latency", 99), r.swaps / num_requests] for r in results]
            rows.append((str(swap), policy, *(f"{value:.2f}" for value in np.mean(columns, 0)), str(mean)))
    _show(f"four models, one fits, 0.3 requests/s of {SERVICE} s, {num_requests} requests, {seeds} seeds", *rows)


def show_mixed_lane() -> None:
    rows: list[tuple[str, ...]] = [
        ("lane", "flood", "max wait", "share error %", "chat tpot ms p50", "p99", "longest gap ms")
    ]
    for policy, flooded, max_wait in (
        *((policy, True, inf) for policy in LANE_POLICIES),
        ("byte-drr", False, inf),
        ("byte-drr", True, None),
    ):
        result = mixed_lane(policy, flooded, max_wait)
        chat = result.of("chat")
        times = (chat.percentile("tpot", 50), chat.percentile("tpot", 99), chat.percentile("longest_gap", 100))
        numbers = (f"{100 * share_error(result):.1f}", *(f"{1e3 * seconds:.1f}" for seconds in times))
        rows.append((policy, "yes" if flooded else "no", "none" if max_wait else "default", *numbers))
    _show("a 32B chat of weight 8, three agents and a flood of 8K prompts of weight 1, all in memory", *rows)


def main() -> None:
    print(f"simulated, not measured: costs of {H200.name} by its data sheet")
    show_stream()
    show_popularity()
    show_swap_queue()
    show_arrivals()
    show_mixed_lane()


if __name__ == "__main__":
    main()
