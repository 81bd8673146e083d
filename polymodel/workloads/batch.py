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
from polymodel.workloads.report import Report, Setting, Watch, Workload, lcg, open_engine, page_bytes, spread

MODEL = "m"
PROMPT = 16  # tokens of a sequence before the first step
SMALL, ON_CPU = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)
ON_GPU = (*ON_CPU, 128, 256, 512, 768, 896, 960, 1024)
MEMORY_SHARE = 0.5  # of a GPU's free memory that pages may take
MIN_DISTINCT = 3  # tokens that the sampled rows say, or their being equal proves nothing


def batches(setting: Setting, config: ModelConfig, num_steps: int) -> tuple[int, ...]:
    """Sizes to try: on a GPU, those whose pages fit in its memory."""
    if setting.size == "small":
        return SMALL
    if not setting.device.startswith("cuda"):
        return ON_CPU
    free, _ = torch.cuda.mem_get_info(torch.device(setting.device))
    fit = int(MEMORY_SHARE * free) // (2 * page_bytes(config) * -(-(PROMPT + num_steps) // PAGE_TOKENS))
    if fit < 1:
        raise InvalidRequest(f"batch: {free:,} bytes are free on {setting.device}, too few for the pages of a sequence")
    return tuple(size for size in ON_GPU if size <= fit)


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

    def steps(self, batch: Batch, logits: Tensor) -> tuple[list[list[int]], Tensor]:
        """Greedy steps: the rows' tokens, and the logits after the last."""
        steps = []
        for _ in range(self.num_steps):
            steps.append(greedy(logits))
            logits = batch.step(steps[-1])
        return [list(tokens) for tokens in zip(*steps, strict=True)], logits

    def together(self, size: int) -> tuple[float, list[list[int]], Tensor]:
        """Seconds of the steps of a batch, and what `steps` gives."""
        watch = Watch(self.engine.device)
        batch, logits = self.begin(size)
        with batch, watch.of("steps"):
            tokens, logits = self.steps(batch, logits)
        return watch.seconds["steps"], tokens, logits

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
    """Sizes in turns, `repetitions` times, each beside a session that decodes alone; sampled rows are compared."""
    num_steps = 4 if setting.size == "small" else 16
    with setting.source() as path, open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        sizes = batches(setting, config, num_steps)
        tokens = sizes[-1] * -(-(PROMPT + num_steps) // PAGE_TOKENS) * PAGE_TOKENS
        options = {"prefix_cache": False, "max_batch": sizes[-1]}
        with open_engine(setting, config, tokens, **options) as engine:
            engine.add(MODEL, path, weights=setting.weights)
            curve = Curve(engine, config.vocab_size, num_steps)
            report = Report("batch", "measured", {"prompt": PROMPT, "decode_steps": num_steps})
            _check(report, curve, sizes, setting.progress)
            times: dict[int, list[float]] = {size: [] for size in (0, *sizes)}  # 0: alone
            for repetition in range(setting.repetitions):
                setting.progress(f"batch: run {repetition + 1} of {setting.repetitions}")
                for size in sizes:
                    times[0].append(curve.alone(0)[0])
                    times[size].append(curve.together(size)[0])
            _rows(report, num_steps, times)
    return report


def _check(report: Report, curve: Curve, sizes: tuple[int, ...], progress: Callable[[str], None]) -> None:
    """The first, the middle and the last row of every size; then all of them are warm."""
    differing = []
    for size in sizes:
        progress(f"batch: checking {size}")
        differing.append(curve.num_differing(size))
    report.equal("sampled rows whose tokens differ from a session's alone", sum(row[0] for row in differing), 0)
    report.equal("sampled rows whose last logits differ from a session's alone", sum(row[1] for row in differing), 0)
    distinct = len({token for tokens, _ in curve.known.values() for token in tokens})
    report.that("distinct tokens that they say", distinct, f"at least {MIN_DISTINCT}", distinct >= MIN_DISTINCT)


def _rows(report: Report, num_steps: int, times: dict[int, list[float]]) -> None:
    alone = min(times[0]) / num_steps
    report.rows.append(
        {
            "baseline": "one session, step by step",
            "ms_per_tok": 1e3 * alone,
            "tok_per_sec": 1 / alone,
            "spread": spread(times[0]),
        }
    )
    points: list[dict[str, Any]] = []
    for size, seconds in times.items():
        if size:
            step = min(seconds) / num_steps
            points.append(
                {
                    "batch": size,
                    "decode_steps": num_steps,
                    "reps": len(seconds),
                    "step_ms": 1e3 * step,
                    "spread": spread(seconds),
                    "per_user_ms_per_tok": 1e3 * step,
                    "agg_tok_per_sec": size / step,
                    "speedup_vs_b1": size * alone / step,
                }
            )
    peak = max(points, key=lambda point: float(point["agg_tok_per_sec"]))
    report.rows += [*points, {"peak": peak["batch"], "agg_tok_per_sec": peak["agg_tok_per_sec"]}]


WORKLOADS = (Workload("batch", "decode steps of 1 to 64 sequences (1,024 on a GPU) beside a session alone", run_batch),)
