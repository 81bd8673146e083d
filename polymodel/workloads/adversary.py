"""Drafting by an adversary: a drafter that is wrong where it is told to be, beside plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

from polymodel.config import Draft
from polymodel.engine import Engine
from polymodel.output import Output
from polymodel.selfcheck import Scripted
from polymodel.workloads.exact import MODEL, Reference, differing, differing_tokens, reference
from polymodel.workloads.report import Report, Setting, Workload, spread

PROMPT_TOKENS = 40
MIN_DISTINCT = 4  # tokens of the output, or equality would say little
SMALL, FULL, FULL_OF_A_GIVEN_MODEL = (24, (4,)), (96, (1, 4, 16)), (48, (1, 4, 8))  # new tokens; tokens a round


@dataclass(frozen=True, slots=True)
class Adversary:
    """A drafter of `tokens` a round that is wrong at `wrong`, 0 the first, and if `on` after it as well."""

    tokens: int
    wrong: int
    on: bool

    def __str__(self) -> str:
        return f"wrong {'from' if self.on else 'at'} {self.wrong} of {self.tokens}"

    def draft(self, one: Reference, vocab_size: int) -> Draft:
        is_wrong = (lambda _, i: i >= self.wrong) if self.on else (lambda _, i: i == self.wrong)
        return Draft(Scripted(one.known, vocab_size, is_wrong), tokens=self.tokens)

    def rounds(self, num_new: int) -> list[tuple[int, int]]:
        """Drafted and accepted tokens of each round: as many as are right, and never more than are wanted."""
        left, found = num_new - 1, []  # the prefill gives the first token
        while left:
            drafted = min(self.tokens, left - 1)
            accepted = min(self.wrong, drafted)
            found.append((drafted, accepted))
            left -= accepted + 1
        return found


def adversaries(counts: tuple[int, ...]) -> Iterator[Adversary]:
    """Wrong at every place, and nowhere, which is at `tokens`."""
    for tokens in counts:
        for wrong in range(tokens + 1):
            yield Adversary(tokens, wrong, on=False)
            if wrong < tokens - 1:
                yield Adversary(tokens, wrong, on=True)


def run(setting: Setting) -> Report:
    """Each adversary in turn with plain decoding; seconds are the least of the repetitions, and gate nothing."""
    num_new, counts = SMALL if setting.size == "small" else FULL if setting.model is None else FULL_OF_A_GIVEN_MODEL
    with ExitStack() as stack:
        source = stack.enter_context(setting.source())
        engine = stack.enter_context(Engine(setting.device, budget="64GiB"))
        engine.add(MODEL, source, weights=setting.weights)
        vocab_size = engine[MODEL].config.vocab_size
        random = Random(2)
        prompt = [random.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        one = reference(engine, MODEL, prompt, _options(num_new), "reference")
        report = Report("adversary", "measured", {"prompt": PROMPT_TOKENS, "new_tokens": num_new})
        report.shape["tokens_a_round"] = counts
        report.shape |= {"weights": setting.weights, "repetitions": setting.repetitions}
        distinct = len(set(one.tokens))
        report.that("distinct tokens", distinct, f"at least {MIN_DISTINCT}", distinct >= MIN_DISTINCT)
        for adversary in adversaries(counts):
            setting.progress(f"adversary: {adversary}")
            compare(report, engine, MODEL, one, adversary, setting.repetitions)
    return report


def compare(report: Report, engine: Engine, model: str, one: Reference, adversary: Adversary, repetitions: int) -> None:
    """Add a row and its gates."""
    draft, num_new = adversary.draft(one, engine[model].config.vocab_size), len(one.tokens)
    arms: dict[str, list[Output]] = {"plain": [], "drafted": []}
    for _ in range(max(repetitions, 1)):
        for arm, outputs in arms.items():
            chosen = draft if arm == "drafted" else None
            outputs.append(engine.generate(model, prompt_ids=one.prompt, draft=chosen, domain=arm, **_options(num_new)))
    tokens = sum(differing_tokens(out.tokens, one.tokens) for out in arms["drafted"])
    with engine.session(model, domain="drafted") as session:  # what the request left in the cache
        session.append(one.known[:-1])
        kv, cached = differing(session.pages.dump(), one.kv), session.num_cached
    for arm in arms:
        engine.drop_domain(arm)
    plain, ours = (arms[arm][-1].metrics for arm in ("plain", "drafted"))
    seconds = {arm: [out.metrics.decode_seconds for out in outputs] for arm, outputs in arms.items()}
    rounds = adversary.rounds(num_new)
    drafting = [(drafted, accepted) for drafted, accepted in rounds if drafted]
    report.rows.append(
        {
            "adversary": str(adversary),
            "forwards": ours.num_target_forwards,
            "plain_forwards": plain.num_target_forwards,
            "drafted": ours.num_drafted,
            "accepted": ours.num_accepted,
            "rounds_rolled_back": sum(drafted > accepted for drafted, accepted in drafting),
            "plain_ms": 1e3 * min(seconds["plain"]),
            "drafted_ms": 1e3 * min(seconds["drafted"]),
            "times_plain": min(seconds["drafted"]) / min(seconds["plain"]),
            "spread": max((part for part in map(spread, seconds.values()) if part is not None), default=None),
        }
    )
    report.equal(f"{adversary}: tokens, and bytes of keys and values, that differ", (tokens, kv), (0, 0))
    report.equal(f"{adversary}: tokens whose pages are the request's own", cached, len(one.known) - 2)
    counted = ours.num_target_forwards, ours.num_drafted, ours.num_accepted
    expected = len(rounds), sum(drafted for drafted, _ in rounds), sum(accepted for _, accepted in rounds)
    report.equal(f"{adversary}: target forwards, drafted, accepted", counted, expected)
    by_accepted = Counter(accepted for _, accepted in drafting)
    histogram = {i: count for i, count in enumerate(ours.acceptance_histogram) if count}
    report.equal(f"{adversary}: rounds by accepted tokens", histogram, dict(sorted(by_accepted.items())))
    most = plain.num_target_forwards
    report.that(f"{adversary}: forwards", counted[0], f"at most {most}", counted[0] <= most == num_new - 1)


def _options(num_new: int) -> dict[str, Any]:
    return {"max_new_tokens": num_new, "stop_at_eos": False}


WORKLOADS = (Workload("adversary", "a drafter that is wrong at a chosen place of every round, beside plain", run),)
