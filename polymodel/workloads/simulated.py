"""Workloads of many models in the simulated pool and lane, beside figures that are known without them. Needs no GPU.

Popularity (Zipf, alone or in bursts), arrivals (Azure's traces of 2023 by their figures), a queue in which every
change of model costs seconds, a lane with a chat, agents and a flood of prompts, and a stream of hot and cold models.
Every draw follows from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any

import numpy as np

from polymodel.config import LANE_POLICIES, POOL_POLICIES, LanePolicy, PoolPolicy
from polymodel.sim import H200, Arrival, Hardware, Plan, Result, Served, Simulated, plan, run
from polymodel.workloads.report import Report, Setting, Workload

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
ALPHAS = (0.7, 0.9, 1.3, 1.7, 2.1)  # 1.7 without known rates
BURST_MODELS, BURST_REQUESTS = 6, 200  # that are asked for at a time; requests until others are, in the mean
# misses in percent by the pool's arithmetic done without it: alone by lru, gdsf and a look ahead, in bursts by lru and
# a look ahead
KNOWN_MISSES = {
    0.7: ((35.5, 28.9, 19.5), (1.2, 0.9)),
    0.9: ((29.0, 23.5, 16.5), (1.4, 1.0)),
    1.3: ((17.0, 14.1, 10.8), (0.8, 0.6)),
    2.1: ((3.9, 3.1, 2.6), (0.4, 0.4)),
}
KNOWN_STALLS = {0.7: 54, 0.9: 44, 1.3: 27, 2.1: 6}  # milliseconds a request, alone, lru, weights from host memory
KNOWN_STREAM = {"lru": (29, 24), "lru+backout": (30, 20)}  # hits, evictions
KNOWN_LEFT = {"lru": (0.58, 2)}  # rate of hits, models on the device at the end


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


SLO_TTFT, SLO_TPOT = 2.0, 0.1  # seconds that a request may wait for its first token, and for each further one
TRACED = ("4B-0", "8B-0", "1.7B-0", "0.6B-0")  # the models of a trace, the most popular first


def traced_lane(requests: Sequence[Arrival], lane_policy: LanePolicy) -> Result:
    """Of the traced models' 29 GB, 20 fit on the device; who makes room comes back from host memory."""
    return run(requests, FLEET, budget=20 * GB, host_budget=200 * GB, lane_policy=lane_policy)


def is_in_time(one: Served) -> bool:
    """Whether a request's first token and the pace of the others attain the objective."""
    return one.ttft <= SLO_TTFT and one.tpot <= SLO_TPOT


def _lengths(rng: np.random.Generator, mean: float, median: float, num: int) -> list[int]:
    sigma = math.sqrt(2 * math.log(mean / median))
    return [max(1, round(length)) for length in rng.lognormal(math.log(median), sigma, num)]


# ---- lanes -------------------------------------------------------------------------------------------

SERVICE = 0.8  # seconds of a request in the swap queue
RATES, KNOWN_RATE = (0.1, 0.3, 0.6), 0.3  # requests a second
# at that rate, seconds of a swap -> mean latency first come first served, and batched by model; one seed of a queue
# without a lane
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


# ---- reports -----------------------------------------------------------------------------------------

POINTS = 0.1  # percentage points that a miss rate may lie from the known one
Row = dict[str, Any]


def _report(workload: str, **shape: Any) -> Report:
    return Report(workload, "simulated", {"hardware": f"{H200.name} by its data sheet", **shape})


def residency_report(setting: Setting) -> Report:
    """Hot and cold models in half their bytes, one of them pinned."""
    sizes, names = stream()
    half = sum(sizes.values()) // 2
    shape = {"models": len(sizes), "requests": len(names), "budget_kb": half // 1024, "pinned": "m0"}
    report = Report("residency", "simulated", shape)
    for policy in POOL_POLICIES:
        found = plan(sizes, names, half, policy=policy, pinned=("m0",), warm=tuple(sizes))
        row: Row = {"policy": policy, "hits": found.hits, "misses": found.misses, "evictions": found.evictions}
        report.rows.append(row | {"hit_rate": found.hits / found.requests, "final_warm": len(found.resident)})
        report.that(f"{policy}: the pinned model stays", ", ".join(found.resident), "m0 in it", "m0" in found.resident)
        if policy in KNOWN_STREAM:
            report.equal(f"{policy}: hits, evictions", (found.hits, found.evictions), KNOWN_STREAM[policy])
        if policy in KNOWN_LEFT:
            left = report.rows[-1]["hit_rate"], report.rows[-1]["final_warm"]
            report.equal(f"{policy}: hit rate, models left on the device", left, KNOWN_LEFT[policy])
    return report


def popularity_report(setting: Setting) -> Report:
    """Miss rates, moved bytes and stall, weights from host memory; small: one exponent."""
    num_requests, seeds = 6000, 3
    alphas = ALPHAS if setting.size == "full" else (0.9,)
    zoo_gb = sum(copies * size for copies, size, *_ in KINDS.values())
    shape = {"models": len(ZOO), "weight_gb": zoo_gb, "budget_gb": ZOO_BUDGET / GB, "requests": num_requests}
    report = _report("popularity", **shape, seeds=seeds)
    for bursts in (False, True):
        for alpha in alphas:
            setting.progress(f"popularity: alpha {alpha}{', in bursts' if bursts else ''}")
            rows = {
                policy: _popularity_row(alpha, policy, popularity_plans(policy, alpha, num_requests, seeds, bursts))
                for policy in POOL_POLICIES
            }
            report.rows += [{"requests": "in bursts" if bursts else "alone", **row} for row in rows.values()]
            if alpha not in KNOWN_MISSES:
                best = rows["lru"]["farthest_percent"]
                what = f"alpha {alpha}{' in bursts' if bursts else ''}: lru misses over a look ahead's"
                ratio = rows["lru"]["misses_percent"] / best
                report.that(what, round(ratio, 2), "1 to 2", 1 <= ratio <= 2)
                continue
            (lru, gdsf, farthest), in_bursts = KNOWN_MISSES[alpha]
            if bursts:
                what = f"alpha {alpha} in bursts"
                _near(report, f"{what}: lru misses, %", rows["lru"]["misses_percent"], in_bursts[0], 0.06)
                _near(report, f"{what}: misses of a look ahead, %", rows["lru"]["farthest_percent"], in_bursts[1], 0.06)
                continue
            _near(report, f"alpha {alpha}: lru misses, %", rows["lru"]["misses_percent"], lru)
            _near(report, f"alpha {alpha}: gdsf misses, %", rows["gdsf"]["misses_percent"], gdsf)
            _near(report, f"alpha {alpha}: misses of a look ahead, %", rows["lru"]["farthest_percent"], farthest)
            stall = rows["lru"]["stall_ms_a_request"]
            _near(report, f"alpha {alpha}: lru stall, ms a request", stall, KNOWN_STALLS[alpha], 0.5)
    return report


def _popularity_row(alpha: float, policy: PoolPolicy, plans: Sequence[Plan]) -> Row:
    """Means over the seeds."""
    requests = plans[0].requests

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(plans)

    loaded = mean([p.loaded_bytes for p in plans])
    return {
        "alpha": alpha,
        "policy": policy,
        "misses_percent": 100 * mean([p.miss_rate for p in plans]),
        "farthest_percent": 100 * mean([p.optimal_misses for p in plans]) / requests,
        "evictions": round(mean([p.evictions for p in plans])),
        "loaded_gb": loaded / GB,
        "stall_ms_a_request": 1e3 * loaded / H200.host_bandwidth / requests,
    }


def _near(report: Report, what: str, value: float, known: float, distance: float = POINTS) -> None:
    report.that(what, round(value, 2), f"{known} +- {distance}", abs(value - known) <= distance)


def arrivals_report(setting: Setting) -> Report:
    """Times of both traces under every lane policy."""
    num_requests = 2000 if setting.size == "full" else 300
    budget = "29 GB of weights in 20 GB, the rest in host memory"
    slo = f"ttft up to {SLO_TTFT} s, tpot up to {SLO_TPOT} s"
    report = _report("arrivals", models=TRACED, weights=budget, requests=num_requests, slo=slo)
    for trace, traffic in (("code", CODE), ("conversation", CONVERSATION)):
        _check_lengths(report, trace, traffic)
        requests = arrivals(traffic, TRACED, num_requests, seed=0)
        for policy in LANE_POLICIES:
            setting.progress(f"arrivals: {trace}, {policy}")
            result = traced_lane(requests, policy)
            row: Row = {"trace": trace, "lane": policy}
            for measure in ("ttft", "tpot", "latency"):
                row |= {f"{measure}_p{percent}_s": result.percentile(measure, percent) for percent in (50, 99)}
            row |= {"slo_attained_percent": 100 * sum(map(is_in_time, result.served)) / num_requests}
            report.rows.append(row | {"page_ins": result.swaps, "jain": result.jain})
            report.equal(f"{trace}, {policy}: requests served", len(result.served), num_requests)
            if policy == "byte-drr":
                most = num_requests // 10
                report.that(f"{trace}, {policy}: page-ins", result.swaps, f"below {most}", result.swaps < most)
    return report


def _check_lengths(report: Report, trace: str, traffic: Traffic) -> None:
    """Of many requests, so that the draw's own spread is small."""
    many = arrivals(traffic, TRACED, 20_000, seed=0)
    drawn = {"prompt": [one.prompt_tokens for one in many], "output": [one.output_tokens for one in many]}
    for kind, (mean, median) in (("prompt", traffic.prompt), ("output", traffic.output)):
        found = float(np.mean(drawn[kind])), float(np.median(drawn[kind]))
        is_near = abs(found[0] / mean - 1) <= 0.03 and abs(found[1] / median - 1) <= 0.03
        report.that(f"{trace}: mean and median {kind}", found, f"{mean}, {median} within 3 %", is_near)


def swap_queue_report(setting: Setting) -> Report:
    """Mean and 99th percentile of the latency, and page-ins a request, first come first served and by model."""
    num_requests = 2000
    policies: tuple[LanePolicy, ...] = ("fcfs", "batch-by-model")
    is_full = setting.size == "full"
    swaps, rates = (tuple(KNOWN_WAITS), RATES) if is_full else ((7.0,), (KNOWN_RATE,))
    report = Report("swap-queue", "simulated", {"models": 4, "fit": 1, "requests": num_requests, "service_s": SERVICE})
    for rate, swap in product(rates, swaps):
        seeds = 20 if is_full and rate == KNOWN_RATE else 3
        means = {}
        for policy, known in zip(policies, KNOWN_WAITS[swap], strict=True):
            what = f"{swap} s, {rate} requests a second, {policy}"
            setting.progress(f"swap-queue: {what}")
            results = [swap_queue(policy, swap, rate, num_requests, seed) for seed in range(seeds)]
            columns = [[r.mean("latency"), r.percentile("latency", 99), r.swaps / num_requests] for r in results]
            means[policy], p99, page_ins = (float(value) for value in np.mean(columns, 0))
            row = {"mean_s": means[policy], "p99_s": p99, "page_ins_a_request": page_ins}
            report.rows.append({"swap_s": swap, "requests_a_second": rate, "lane": policy, "seeds": seeds, **row})
            served = sum(len(result.served) for result in results)
            report.equal(f"{what}: requests served", served, seeds * num_requests)
            if rate != KNOWN_RATE:
                continue
            _near(report, f"{what}: mean latency of the first seed", columns[0][0], known, 0.06)
            if swap == max(KNOWN_WAITS):
                expected = {"fcfs": 0.67, "batch-by-model": 0.35}[policy]
                _near(report, f"{what}: page-ins a request, first seed", columns[0][2], expected, 0.01)
        if swap == max(KNOWN_WAITS) and rate == KNOWN_RATE:
            ratio = means["fcfs"] / means["batch-by-model"]
            report.that(f"{swap} s: first come over by model", round(ratio), "at least 50", ratio >= 50)
    return report


def mixed_lane_report(setting: Setting) -> Report:
    """What each model gets of the lane, and how long the chat waits between tokens."""
    report = _report("mixed-lane", weights="chat 8, each other 1", seconds=MIXED_SECONDS)
    policies: tuple[LanePolicy, ...] = LANE_POLICIES if setting.size == "full" else ("byte-drr", "round-robin")
    cases: list[tuple[LanePolicy, bool, float | None]] = [(policy, True, inf) for policy in policies]
    cases.append(("byte-drr", False, inf))
    if setting.size == "full":
        cases.append(("byte-drr", True, None))
    chats = {}
    for policy, flooded, max_wait in cases:
        setting.progress(f"mixed-lane: {policy}{', flooded' if flooded else ''}")
        result = mixed_lane(policy, flooded, max_wait)
        error, gap = share_error(result), result.of("chat").percentile("longest_gap", 100)
        p50, p99 = (1e3 * result.of("chat").percentile("tpot", percent) for percent in (50, 99))
        row: Row = {"lane": policy, "flooded": flooded, "max_wait": "none" if max_wait else "default"}
        row |= {"share_error_percent": 100 * error, "chat_tpot_p50_ms": p50, "chat_tpot_p99_ms": p99}
        report.rows.append(row | {"chat_longest_gap_ms": 1e3 * gap})
        if max_wait is None:
            continue
        chats[policy, flooded] = p99
        if policy == "byte-drr":
            what = f"{policy}, {'flooded' if flooded else 'not flooded'}"
            report.that(f"{what}: share error, %", round(100 * error, 1), "at most 5", error <= 0.05)
            report.that(f"{what}: the chat's longest gap, ms", round(1e3 * gap), "below 500", gap < 0.5)
            report.equal(f"{what}: page-ins", result.swaps, 0)
        if policy == "round-robin":
            report.that(f"{policy} does not share by weight: error, %", round(100 * error), "above 50", error > 0.5)
    ratio = chats["byte-drr", True] / chats["byte-drr", False]
    report.that("byte-drr: the chat's p99 beside the flood over without", round(ratio, 3), "below 1.25", ratio < 1.25)
    return report


WORKLOADS = (
    Workload("residency", "hot and cold models in half their bytes, beside known counts", residency_report),
    Workload(
        "popularity", "misses of 24 models under Zipf, alone and in bursts, beside known rates", popularity_report
    ),
    Workload("arrivals", "Azure's traces of 2023 by their figures, under every lane policy", arrivals_report),
    Workload("swap-queue", "four models of which one fits, first come or by model", swap_queue_report),
    Workload("mixed-lane", "a chat, three agents and a flood of prompts in one lane", mixed_lane_report),
)
