"""The batch curve: decode steps of B sequences at once, beside one session that steps by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polymodel.batch import Batch
from polymodel.checkpoint import open_checkpoint
from polymodel.config import PAGE_TOKENS, ModelConfig
from polymodel.engine import Engine
from polymodel.errors import InvalidRequest
from polymodel.sample import greedy
from polymodel.workloads.report import (
    Limit,
    Report,
    Setting,
    Watch,
    Workload,
    device_of,
    lcg,
    open_engine,
    page_bytes,
    spread,
)

MODEL = "m"
PROMPT = 16  # tokens of a sequence before the first step
SMALL, ON_CPU = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)
ON_GPU = (*ON_CPU, 128, 256, 512, 768, 896, 960, 1024)
MEMORY_SHARE = 0.5  # of a GPU's free memory that pages and logits may take; the rest is for the weights
LOGITS = 4  # tensors [B, vocab] in float32 at a time: a step's, its rows, those of before and what is made of them
MIN_DISTINCT = 3  # tokens that the sampled rows say, or their being equal proves nothing


def num_fitting(device: torch.device, config: ModelConfig, num_steps: int) -> int:
    """Sequences whose pages and logits fit in a GPU's free memory."""
    free, _ = torch.cuda.mem_get_info(device)
    pages = 2 * page_bytes(config) * -(-(PROMPT + num_steps) // PAGE_TOKENS)  # as `open_engine` reserves them
    count = int(MEMORY_SHARE * free) // (pages + 4 * LOGITS * config.vocab_size)
    if count < 1:
        raise InvalidRequest(f"batch: {free:,} bytes are free on {device}, too few for one sequence")
    return count


class Curve:
    """Batches of one hosted model."""

    def __init__(self, engine: Engine, vocab: int, num_steps: int) -> None:
        self.engine, self.vocab, self.num_steps = engine, vocab, num_steps
        self.known: dict[int, tuple[list[int], Tensor]] = {}  # by row, of a session alone

    def prompt(self, row: int) -> list[int]:
        return lcg(PROMPT, row, self.vocab)

    def alone(self, row: int) -> tuple[float, list[int], Tensor]:
        """Seconds of the steps of one session, its tokens, and the logits after the last."""
        watch = Watch(self.engine.device)
        with self.engine.session(MODEL) as session:
            session.append(self.prompt(row))
            with watch.of("steps"):
                tokens = [session.step() for _ in range(self.num_steps)]
            assert session.logits is not None
            return watch.seconds["steps"], tokens, session.logits

    def begin(self, size: int) -> tuple[Batch, Tensor]:
        """A batch that has read its prompts, and the logits after them."""
        batch = self.engine.batch(MODEL, size)
        return batch, batch.prefill_each(self.prompt(row) for row in range(size))

    def steps(self, batch: Batch, logits: Tensor) -> tuple[float, list[list[int]], Tensor]:
        """Greedy steps: their seconds, the rows' tokens, and the logits after the last."""
        steps, watch = [], Watch(self.engine.device)
        with watch.of("steps"):
            for _ in range(self.num_steps):
                steps.append(greedy(logits))
                logits = batch.step(steps[-1])
        return watch.seconds["steps"], [list(tokens) for tokens in zip(*steps, strict=True)], logits

    def together(self, size: int) -> tuple[float, list[list[int]], Tensor]:
        """`steps` of a new batch."""
        batch, logits = self.begin(size)
        with batch:
            return self.steps(batch, logits)

    def num_differing(self, size: int) -> tuple[int, int]:
        """Sampled rows of a batch whose tokens, and whose last logits, are not those of a session alone."""
        _, tokens, logits = self.together(size)
        other_tokens = other_logits = 0
        for row in {0, size // 2, size - 1}:
            if row not in self.known:
                self.known[row] = self.alone(row)[1:]
            other_tokens += tokens[row] != self.known[row][0]
            other_logits += not torch.equal(logits[row], self.known[row][1])
        return other_tokens, other_logits


def run_batch(setting: Setting) -> Report:
    """Sizes in turns, `repetitions` times, each beside a session that decodes alone; sampled rows are compared.

    Sizes whose pages do not fit are left out; so are, where there is a limit of seconds, those from the first on
    without which half of it would be gone in checks, and the repetitions that it has no room for.
    """
    limit = Limit(setting.seconds)
    num_steps = 4 if setting.size == "small" else 16
    with setting.source() as path, open_checkpoint(path) as checkpoint:
        config, device = checkpoint.config, device_of(setting)
        wanted = SMALL if setting.size == "small" else ON_GPU if device.type == "cuda" else ON_CPU
        fit = num_fitting(device, config, num_steps) if device.type == "cuda" else wanted[-1]
        sizes = [size for size in wanted if size <= fit]
        tokens = sizes[-1] * -(-(PROMPT + num_steps) // PAGE_TOKENS) * PAGE_TOKENS
        options = {"prefix_cache": False, "max_batch": sizes[-1]}
        with open_engine(setting, config, tokens, **options) as engine:
            engine.add(MODEL, path, weights=setting.weights)
            curve = Curve(engine, config.vocab_size, num_steps)
            report = Report("batch", "measured", {"prompt": PROMPT, "decode_steps": num_steps})
            report.shape |= {"weights": setting.weights, "device": str(engine.device)}
            checked = _check(report, curve, sizes, limit, setting.progress)
            left_out = {"for memory": wanted[len(sizes) :], "for time": sizes[len(checked) :]}
            report.shape["left_out"] = {why: list(of) for why, of in left_out.items() if of}
            times: dict[int, list[float]] = {size: [] for size in (0, *checked)}  # 0: alone
            turn = 0.0
            for repetition in range(setting.repetitions):
                if repetition and limit.used + turn > limit.seconds:
                    break
                setting.progress(f"batch: run {repetition + 1} of {setting.repetitions}")
                before = limit.used
                for size in checked:
                    times[0].append(curve.alone(0)[0])
                    times[size].append(curve.together(size)[0])
                turn = limit.used - before
            _rows(report, num_steps, times)
    return report


def _check(report: Report, curve: Curve, sizes: list[int], limit: Limit, progress: Callable[[str], None]) -> list[int]:
    """The first, the middle and the last row of every size; then all of them are warm. The sizes that were checked."""
    checked: list[int] = []
    differing = []
    last = 0.0
    curve.together(sizes[0])  # what is compiled or measured at a first use is not a size's own time
    for size in sizes:
        if checked and limit.used + last > limit.seconds / 2:
            break
        progress(f"batch: checking {size}")
        before = limit.used
        differing.append(curve.num_differing(size))
        checked.append(size)
        last = limit.used - before
    report.equal("sampled rows whose tokens differ from a session's alone", sum(row[0] for row in differing), 0)
    report.equal("sampled rows whose last logits differ from a session's alone", sum(row[1] for row in differing), 0)
    distinct = len({token for tokens, _ in curve.known.values() for token in tokens})
    report.that("distinct tokens that they say", distinct, f"at least {MIN_DISTINCT}", distinct >= MIN_DISTINCT)
    return checked


def _rows(report: Report, num_steps: int, times: dict[int, list[float]]) -> None:
    alone = min(times[0]) / num_steps
    report.rows.append(
        {
            "baseline": "one session, step by step",
            "baseline_b1_ms_per_tok": 1e3 * alone,
            "baseline_b1_tok_per_sec": 1 / alone,
            "spread": spread(times[0]),
        }
    )
    points = [point(size, num_steps, times[size], alone) for size in times if size]
    peak = max(points, key=lambda one: float(one["agg_tok_per_sec"]))
    report.rows += [*points, {"peak": "most tokens a second", **peak}]


def point(size: int, num_steps: int, seconds: list[float], alone: float) -> dict[str, Any]:
    """Of the curve, from the seconds of all steps by repetition, and those of one step of a session alone."""
    step = min(seconds) / num_steps
    return {
        "batch": size,
        "decode_steps": num_steps,
        "reps": len(seconds),
        "step_ms": 1e3 * step,
        "spread": spread(seconds),
        "per_user_ms_per_tok": 1e3 * step / size,
        "agg_tok_per_sec": size / step,
        "speedup_vs_b1": size * alone / step,
    }


WORKLOADS = (Workload("batch", "decode steps of 1 to 64 sequences (1,024 on a GPU) beside a session alone", run_batch),)
