"""Few-shot, chat, tree of thought and agents: what of their prompts a prefix cache need not compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from polymodel.checkpoint import open_checkpoint
from polymodel.config import DEFAULT_DOMAIN, PAGE_TOKENS
from polymodel.engine import Engine
from polymodel.prefix import common_length
from polymodel.workloads.report import Report, Setting, Watch, Workload, lcg, open_engine, spread

Prompts = list[list[int]]
MODEL = "m"


def segment(count: int, seed: int, vocab: int, sibling: int = 0) -> list[int]:
    """Tokens of their own; those of different siblings differ in the first one."""
    return [sibling, *lcg(count - 1, seed, vocab)]


def few_shot(vocab: int, examples: int = 256, question: int = 16, count: int = 16) -> Prompts:
    """Questions after the same examples."""
    shots = segment(examples, 1001, vocab)
    return [shots + segment(question, 2000 + i, vocab, i) for i in range(count)]


def multi_turn(vocab: int, base: int = 64, turn: int = 32, turns: int = 8) -> Prompts:
    """A conversation, each of whose prompts is the last one and more."""
    prompts = [segment(base, 3001, vocab)]
    for t in range(1, turns):
        prompts.append(prompts[-1] + segment(turn, 3100 + t, vocab))
    return prompts


def tree_of_thought(vocab: int, root: int = 64, steps: Sequence[int] = (16, 16, 16), fan_out: int = 3) -> Prompts:
    """A prompt for each leaf of a tree, whose edges are steps of so many tokens."""
    prompts = []
    for path in product(range(fan_out), repeat=len(steps)):
        ids, seed = segment(root, 4001, vocab), 4001
        for level, (step, choice) in enumerate(zip(steps, path, strict=True)):
            seed = (seed * 7919 + 131 * choice + 17 * level + 1) & 0x7FFFFFFF
            ids += segment(step, seed, vocab, choice)
        prompts.append(ids)
    return prompts


def agents(vocab: int, system: int = 128, step: int = 24, count: int = 5, turns: int = 6) -> Prompts:
    """Agents of one system prompt that take turns; each prompt is the agent's last one and a step."""
    histories = [segment(system, 5001, vocab) for _ in range(count)]
    prompts = []
    for turn in range(turns):
        for agent in range(count):
            histories[agent] = histories[agent] + segment(step, 5100 + 97 * agent + turn, vocab, agent)
            prompts.append(histories[agent])
    return prompts


WAYS: dict[str, Callable[[int], Prompts]] = {
    "few-shot": few_shot,
    "multi-turn": multi_turn,
    "tree of thought": tree_of_thought,
    "agents": agents,
}
# prompt tokens and those of them that are computed: 88.2, 79.5, 77.2 and 86.7 % are cached
KNOWN = {"few-shot": (4352, 512), "multi-turn": (1408, 288), "tree of thought": (3024, 688), "agents": (6360, 848)}
BOUND = 1.5  # tokens that the small cache holds, by those of the longest prompt
KNOWN_BOUND = {"as they come": 2408, "by prefix": 848}  # tokens computed: 62.1 and 86.7 % are cached


def num_computed(prompts: Prompts, page: int = 1) -> int:
    """Tokens that a boundless cache leaves to compute, if it shares runs of whole pages."""
    count = 0
    for i, ids in enumerate(prompts):
        common = max((common_length(ids[:-1], other) for other in prompts[:i]), default=0)
        count += len(ids) - common // page * page
    return count


def num_declared(prompts: Prompts) -> int:
    """Tokens that are computed where only the prefix of all prompts is declared as shared."""
    common = min(common_length(prompts[0], ids) for ids in prompts)
    return common + sum(len(ids) - common for ids in prompts)


def run_radix(setting: Setting) -> Report:
    """W3. Each way through an engine with a prefix cache and one without: tokens computed, and the same logits."""
    with setting.source() as path, open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        ways = {way: make(config.vocab_size) for way, make in WAYS.items()}
        report = Report("radix", "measured", {"vocab": config.vocab_size, "weights": setting.weights})
        room = max(sum(map(len, prompts)) for prompts in ways.values())

        def hosting(**options: Any) -> Engine:
            engine = open_engine(setting, config, room, **options)
            engine.add(MODEL, path, weights=setting.weights)
            return engine

        with hosting() as cached, hosting(prefix_cache=False) as plain:
            for way, prompts in ways.items():
                setting.progress(f"radix: {way}")
                _run_way(report, way, prompts, cached, plain, setting.repetitions)
        prompts = ways["agents"]
        bound = int(BOUND * max(map(len, prompts)))
        for order, sequence in (("as they come", prompts), ("by prefix", sorted(prompts))):
            setting.progress(f"radix: a cache of {bound} tokens, agents {order}")
            with hosting(prefix_tokens=bound) as engine:
                run(engine, sequence)
                computed = num_prefilled(engine)
            report.equal(f"agents {order}, a cache of {bound} tokens: tokens computed", computed, KNOWN_BOUND[order])
            report.rows.append({"agents": order, "cache_tokens": bound} | _rates(prompts, computed))
    return report


def run(engine: Engine, prompts: Prompts) -> list[Tensor]:
    """One prompt after another, each in a session that is closed again; the logits after each."""
    logits = []
    engine.events.clear()
    for ids in prompts:
        with engine.session(MODEL) as session:
            logits.append(session.append(ids))
    return logits


def num_prefilled(engine: Engine) -> int:
    """Tokens that went through a prefill since `run` began."""
    return sum(event.tokens for event in engine.events.of("prefill"))


def _run_way(report: Report, way: str, prompts: Prompts, cached: Engine, plain: Engine, repetitions: int) -> None:
    total, expected = KNOWN[way]
    watches: dict[str, list[float]] = {"cached": [], "plain": []}
    computed: set[int] = set()
    num_differing = 0
    for _ in range(repetitions):
        logits = {}
        for name, engine in (("plain", plain), ("cached", cached)):
            watch = Watch(engine.device)
            with watch.of("all"):
                logits[name] = run(engine, prompts)
            watches[name].append(watch.seconds["all"])
        computed.add(num_prefilled(cached))
        cached.drop_domain(DEFAULT_DOMAIN)
        num_differing += sum(not torch.equal(*both) for both in zip(logits["cached"], logits["plain"], strict=True))
    report.equal(f"{way}: prompt tokens", sum(map(len, prompts)), total)
    report.equal(f"{way}: tokens computed", sorted(computed), [expected])
    report.equal(f"{way}: logits that differ from those without a cache", num_differing, 0)
    report.rows.append(
        {"way": way, "prompts": len(prompts)}
        | _rates(prompts, max(computed))
        | {
            "hit_rate_in_whole_pages": 1 - num_computed(prompts, PAGE_TOKENS) / total,
            "hit_rate_if_declared": 1 - num_declared(prompts) / total,
            "ms": 1e3 * min(watches["cached"]),
            "spread": spread(watches["cached"]),
            "ms_without": 1e3 * min(watches["plain"]),
            "spread_without": spread(watches["plain"]),
            "times_faster": min(watches["plain"]) / min(watches["cached"]),
        }
    )


def _rates(prompts: Prompts, computed: int) -> dict[str, Any]:
    total = sum(map(len, prompts))
    rates = {"hit_rate": 1 - computed / total, "times_less": total / computed}
    return {"tokens": total, "computed": computed} | rates


WORKLOADS = (Workload("radix", "few-shot, chat, tree of thought and agents through the prefix cache", run_radix),)
