"""What drafting saves: a few prompts, each decoded plainly and with drafters in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from polymodel.accept import expected_tokens
from polymodel.config import Draft
from polymodel.engine import Engine
from polymodel.output import Metrics, Output
from polymodel.workloads.exact import MIN_DISTINCT, MODEL, differing_tokens, hosting
from polymodel.workloads.report import Report, Setting, Workload, spread

K = 4  # tokens a round
ARMS: dict[str, Draft | str | None] = {  # plain decoding first
    "plain": None,
    "ngram": Draft("ngram", tokens=K),
    "auto": "auto",
    "twin": Draft("twin", tokens=K),
}
ALL = "all kinds"
NEW_TOKENS = {"small": 32, "full": 64}
PROMPTS = {
    "code editing": "Rename `x` to `total` and repeat the function: def add(items):\n    x = 0\n"
    "    for item in items:\n        x = x + item\n    return x",
    "copying": "Repeat this list word by word: a red apple, a green pear, a red plum, a green lime, a red cherry.",
    "question": "Why is the sky blue in the day and red in the evening?",
    "story": "Tell the story of a lighthouse keeper who finds a letter in a bottle.",
}

Trial = tuple[list[Metrics], list[Metrics]]  # the repetitions of one prompt: an arm's, and plain decoding's


def summary(kind: str, arm: str, trials: Sequence[Trial]) -> dict[str, Any]:
    """What an arm did on some prompts, beside plain decoding of the same ones.

    Tokens are those after the first, which the prefill gives. The closed form is of drafts of K tokens each, by how
    often a drafted token stood given that all before it did. Seconds are of decoding, the least of the repetitions.
    """
    last = [(runs[-1], plain[-1]) for runs, plain in trials]
    ours = [metrics for metrics, _ in last]
    tokens, forwards = sum(m.num_output_tokens - 1 for m in ours), sum(m.num_target_forwards for m in ours)
    drafted, accepted = sum(m.num_drafted for m in ours), sum(m.num_accepted for m in ours)
    drafters = [drafter for m in ours for drafter in m.drafters.values()]
    rounds = sum(drafter.num_rounds for drafter in drafters)
    positions = [position for drafter in drafters for position in drafter.acceptance_profile]
    reached = sum(position["proposed"] for position in positions)
    acceptance = sum(position["accepted"] for position in positions) / reached if reached else None
    histogram: Counter[int] = Counter()
    for m in ours:
        histogram.update(dict(enumerate(m.acceptance_histogram)))
    seconds, plain_seconds = (
        [[metrics.decode_seconds for metrics in trial[side]] for trial in trials] for side in (0, 1)
    )
    spreads = [spread([sum(times) for times in zip(*side, strict=True)]) for side in (seconds, plain_seconds)]
    return {
        "kind": kind,
        "arm": arm,
        "prompts": len(trials),
        "tokens": tokens,
        "forwards": forwards,
        "forwards_a_token": forwards / tokens,
        "forwards_saved": sum(plain.num_target_forwards for _, plain in last) / forwards,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": tokens / forwards,
        "acceptance": acceptance,
        "e_measured": 1 + accepted / rounds if rounds else None,
        "e_closed_form": expected_tokens(K, acceptance) if acceptance is not None and arm != "auto" else None,
        "rounds_by_accepted": [histogram[i] for i in range(max(histogram, default=-1) + 1)],
        "speedup": sum(map(min, plain_seconds)) / sum(map(min, seconds)),
        "speedup_first": sum(s[0] for s in plain_seconds) / sum(s[0] for s in seconds),
        "spread": max((part for part in spreads if part is not None), default=None),
        "seconds": seconds,
        "plain_seconds": plain_seconds,
    }


def run(setting: Setting) -> Report:
    """Every prompt by every arm in turn, again and again."""
    num_new = NEW_TOKENS[setting.size]
    with ExitStack() as stack:
        engine = hosting(setting, stack)
        prompts = {kind: _encode(engine, text) for kind, text in PROMPTS.items()}
        shape: dict[str, Any] = {"prompts": {kind: len(ids) for kind, ids in prompts.items()}, "new_tokens": num_new}
        shape |= {"tokens_a_round": K, "weights": setting.weights, "repetitions": setting.repetitions}
        report = Report("speculation", "measured", shape)
        outputs: dict[tuple[str, str], list[Output]] = {(kind, arm): [] for kind in prompts for arm in ARMS}
        for repetition in range(setting.repetitions):
            for (kind, arm), found in outputs.items():
                setting.progress(f"speculation: {kind}, {arm}, repetition {repetition + 1} of {setting.repetitions}")
                options: dict[str, Any] = {"max_new_tokens": num_new, "stop_at_eos": False, "draft": ARMS[arm]}
                found.append(engine.generate(MODEL, prompt_ids=prompts[kind], **options))
    _add_rows(report, outputs)
    return report


def _encode(engine: Engine, text: str) -> list[int]:
    tokenizer = engine[MODEL].tokenizer
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)


def _add_rows(report: Report, outputs: Mapping[tuple[str, str], Sequence[Output]]) -> None:
    """A row for each arm and kind, and for all kinds; every repetition is gated, not only the last."""
    plain = {kind: found for (kind, arm), found in outputs.items() if arm == "plain"}
    distinct = len({token for found in plain.values() for token in found[0].tokens})
    report.that("distinct tokens", distinct, f"at least {MIN_DISTINCT}", distinct >= MIN_DISTINCT)
    drafted = accepted = 0
    for arm in ARMS:
        ours = {kind: outputs[kind, arm] for kind in plain}
        pairs = [(out, plain[kind][0]) for kind, found in ours.items() for out in found]
        differ = sum(differing_tokens(out.tokens, expected.tokens) for out, expected in pairs)
        report.equal(f"{arm}: tokens that differ from plain decoding's", differ, 0)
        most = max(out.metrics.num_target_forwards - len(expected.tokens) + 1 for out, expected in pairs)
        report.that(f"{arm}: target forwards beyond a token each, at most", most, "0 at most", most <= 0)
        metrics = [out.metrics for out, _ in pairs]
        found = [
            (m.num_target_forwards + m.num_accepted, sum(m.acceptance_histogram), _weighted(m.acceptance_histogram))
            for m in metrics
        ]
        wanted = [(m.num_output_tokens - 1, m.num_draft_rounds, m.num_accepted) for m in metrics]
        what = f"{arm}: outputs whose tokens are not its forwards and accepted tokens, or whose rounds are not"
        report.equal(what, sum(a != b for a, b in zip(found, wanted, strict=True)), 0)
        if arm == "plain":
            continue
        if arm != "auto":
            drafted += sum(m.num_drafted for m in metrics)
            accepted += sum(m.num_accepted for m in metrics)
        trials = {kind: (_metrics(found), _metrics(plain[kind])) for kind, found in ours.items()}
        for kind in (*trials, ALL):
            row = summary(kind, arm, list(trials.values()) if kind == ALL else [trials[kind]])
            report.rows.append({name: value for name, value in row.items() if not name.endswith("seconds")})
    report.that("drafted tokens accepted", accepted, f"some of {drafted:,}, not all", 0 < accepted < drafted)


def _metrics(outputs: Sequence[Output]) -> list[Metrics]:
    return [out.metrics for out in outputs]


def _weighted(histogram: Sequence[int]) -> int:
    return sum(i * count for i, count in enumerate(histogram))


WORKLOADS = (
    Workload("speculation", "forwards and time that n-grams, the low-bit twin and auto save, beside plain", run),
)
