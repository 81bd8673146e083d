"""End to end on real weights: a model of tools/cut_model.py hosted on the GPU.

Its logits and tokens beside float32 on a CPU, the engine's promises bit by bit, and tokens a second. A dry run takes a
small random model and the CPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cut_model import MODEL, NUM_TOKENS, REFERENCE, Prompt, read_reference, write_reference
from gpu_section import Outcome, Run
from harness import ROOT
from torch import Tensor

from polymodel import Draft, Engine, Session
from polymodel.config import EngineConfig, Weights
from polymodel.errors import NotExact
from polymodel.selfcheck import write_random_model

FOLDER = ROOT / "build" / "smollm2-12"
WEIGHTS: tuple[Weights, ...] = ("file", "q8", "q4", "w8a8")
REFERENCE_OF = {"w8a8": "q8"}  # the rest is its own
# error of the logits at a position by root mean square, as a part of their spread; for 12 layers of SmolLM2 it is
# 0.01 to 0.03 by transformers in bfloat16, and 0.13 by our int8 activations on a CPU
TOLERANCE = {"file": 0.06, "q8": 0.06, "q4": 0.06, "w8a8": 0.25}
MARGIN = 2.0  # in such errors: a closer choice between two tokens may fall either way
CPU_GROUP = 32  # of weights="q4" on a CPU
KV_BUDGET = {True: "64MiB", False: "4GiB"}  # by whether the run is dry


@dataclass(frozen=True, slots=True)
class Model:
    """A model hosted with every kind of weights, each under its name."""

    engine: Engine
    prompts: list[Prompt]
    num_drafted: int  # tokens of a request that is drafted
    names: list[Weights] = field(default_factory=list)

    def ids(self, count: int, first: int = 0) -> list[int]:
        """Tokens of the prompts and of what follows them, again and again."""
        text = [token for prompt in self.prompts for token in (*prompt.ids, *prompt.tokens)]
        return list(itertools.islice(itertools.cycle(text), first, first + count))

    def after(self, name: str, ids: Sequence[int], size: int | None = None) -> Session:
        """A session that has taken the ids in chunks."""
        session = self.engine.session(name)
        for start in range(0, len(ids), size or len(ids)):
            session.append(ids[start : start + (size or len(ids))])
        return session


def folder_of(run: Run) -> Path | None:
    """Where the model lies; None where there is none. A dry run writes one."""
    if not run.dry:
        folder = run.model or FOLDER
        return folder if (folder / REFERENCE).exists() else None
    folder = run.scratch / "model"
    if not folder.exists():
        folder.mkdir(parents=True)
        write_random_model(folder)
        write_reference(folder, folder, prompts=("abcdefgh", "One, two"), count=4, group=CPU_GROUP)
    return folder


Promise = Callable[[Model, str], Iterator[Outcome]]


@contextmanager
def hosted(run: Run, folder: Path) -> Iterator[Model]:
    path = folder / MODEL if (folder / MODEL).exists() else folder
    config = EngineConfig(prefix_cache=False)  # everything is computed
    with Engine(device=run.device, budget="8GiB", kv_budget=KV_BUDGET[run.dry], config=config) as engine:
        made = Model(engine, read_reference(folder), 8 if run.dry else NUM_TOKENS)
        for weights in WEIGHTS[:1] if run.dry else WEIGHTS:
            add = partial(engine.add, weights, path, weights=weights, twin="q4" if weights != "q4" else "q8")
            run.attempt(f"{weights}: hosted", add, by_kernels=False)
            made.names.extend([weights] if weights in engine else [])
        yield made


def model(run: Run) -> None:
    """Values, then promises."""
    folder = folder_of(run)
    if folder is None:
        run.row("a model", f"absent: no {REFERENCE} in {run.model or FOLDER}; tools/cut_model.py makes it", "there")
        return
    with hosted(run, folder) as made:
        for name in made.names:
            run.attempt(f"{name}: logits", partial(compare, run, made, name), by_kernels=False)
        for promise, check in PROMISES.items():
            if run.left() < 0:
                return
            run.attempt(promise, partial(run.promise, promise, _all(made, check), "CPU"), by_kernels=False)


def judged() -> list[str]:
    """All that `model` judges on a GPU."""
    return [*(f"{name}: logits" for name in WEIGHTS), f"{WEIGHTS[0]}: tokens", *PROMISES]


def _all(made: Model, check: Promise) -> Iterator[Outcome]:
    for name in made.names:
        yield from (outcome and f"{name}: {outcome}" for outcome in check(made, name))


# ---- values --------------------------------------------------------------------------------------------


def relative(found: Tensor, exact: Tensor) -> float:
    """Error by root mean square as a part of the spread of the exact logits."""
    found, exact = found.double().cpu(), exact.double()
    return float((found - exact).norm() / (exact - exact.mean()).norm())


def compare(run: Run, made: Model, name: Weights) -> None:
    """Logits within the tolerance; of the file's weights every token too, after those of the reference."""
    worst, faults, close, count = 0.0, [], 0, 0
    for prompt in made.prompts:
        exact = prompt.logits[REFERENCE_OF.get(name, name)]
        with made.engine.session(name) as session:
            start = 0
            for position in prompt.positions:
                found = session.append(prompt.ids[start:position])
                if name == "file":
                    worst = max(worst, relative(found, exact[prompt.positions.index(position)]))
                start = position
            worst = max(worst, relative(found, exact[-1]))
            if name != "file":
                continue
            allowed = MARGIN * TOLERANCE[name] * float(exact[-1].std())
            for at, (token, margin) in enumerate(zip(prompt.tokens, prompt.margins, strict=True)):
                count += 1
                if (other := int(found.argmax())) != token:
                    close += margin <= allowed
                    faults += [f"token {at}: {other}, not {token} with margin {margin:.2f}"] * (margin > allowed)
                found = session.append([token])
    limit = TOLERANCE[name]
    run.row(f"{name}: logits", f"{worst:.4f} relative RMS", f"<= {limit}", worst <= limit)
    if name == "file":
        value = f"{count - close - len(faults)} of {count} equal, {close} by less than the tolerance"
        target = f"equal where the margin is over {MARGIN:.0f} tolerances"
        run.row(f"{name}: tokens", "; ".join([value, *faults[:3]]), target, not faults)


# ---- promises ------------------------------------------------------------------------------------------


def _different(what: str, found: Tensor | None, expected: Tensor | None) -> str | None:
    return what if found is None or expected is None or not torch.equal(found, expected) else None


def alone_or_together(made: Model, name: str) -> Iterator[Outcome]:
    """Eight prompts of different lengths, prefilled and decoded together and alone."""
    prompts = [made.ids(5 + 9 * i, 11 * i) for i in range(8)]
    with made.engine.batch(name, len(prompts)) as batch:
        steps = [batch.prefill_each(prompts)]
        for _ in range(3):
            steps.append(batch.step(steps[-1].argmax(1).tolist()))
    for i, ids in enumerate(prompts):
        with made.engine.session(name) as session:
            logits = session.append(ids)
            for step in steps:
                yield _different(f"row {i} of {len(prompts)}", step[i], logits)
                logits = session.append([int(logits.argmax())])


def chunks(made: Model, name: str) -> Iterator[Outcome]:
    """A prompt whole, and in chunks of 64, 7 and 1."""
    ids = made.ids(150)
    with made.after(name, ids) as whole:
        for size in (64, 7, 1):
            with made.after(name, ids, size) as other:
                yield _different(f"chunks of {size}", other.logits, whole.logits)
                yield _different(f"pages of chunks of {size}", other.pages.dump(), whole.pages.dump())


DRAFTS: tuple[Any, ...] = ("twin", "ngram", Draft("twin", tokens=4, width=3), Draft(("ngram", "twin"), tokens=6))


def drafted(made: Model, name: str) -> Iterator[Outcome]:
    """By the twin, by lookup, as a tree and as both: tokens, greedy and drawn, and a replay."""
    ids = made.ids(40) * 2
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 1}):
        ask: dict[str, Any] = {"prompt_ids": ids, "max_new_tokens": made.num_drafted, "stop_at_eos": False, **options}
        plain = made.engine.generate(name, draft=None, **ask)
        for draft in DRAFTS:
            output = made.engine.generate(name, draft=draft, **ask)
            yield f"{draft}, {options}" if output.tokens != plain.tokens else None
        try:
            made.engine.verify_exact(output)
        except NotExact as error:
            yield str(error)
        else:
            yield None


def edited(made: Model, name: str) -> Iterator[Outcome]:
    """A clone, a rollback, and a span that is evicted and repaired, beside sessions that never saw it."""
    ids, more = made.ids(130), made.ids(20, 200)
    with made.after(name, ids) as session, made.after(name, ids + more) as longer:
        with session.clone() as twin:
            yield _different("clone", twin.append(more), longer.logits)
        session.append(made.ids(30, 300))
        session.rollback(30)
        yield _different("rollback", session.append(more), longer.logits)
    with made.after(name, ids) as session, made.after(name, ids[:20] + ids[50:]) as other:
        session.evict(slice(20, 50))
        session.repair()
        yield _different("evict and repair", session.logits, other.logits)
        yield _different("pages after a repair", session.pages.dump(), other.pages.dump())


def moved_out(made: Model, name: str) -> Iterator[Outcome]:
    """Pages to the host and back, then the weights out and loaded again."""
    ids, more = made.ids(100), made.ids(9, 120)
    with made.after(name, ids) as session, made.after(name, ids + more) as stayed:
        session.swap_out()
        session.swap_in()
        yield _different("pages", session.append(more), stayed.logits)
        for other in list(made.engine):  # what an equal matrix holds would not be loaded again
            made.engine.unload(other)
        session.rollback(len(more))
        yield _different("weights", session.append(more), stayed.logits)


PROMISES: dict[str, Promise] = {
    "alone = in a batch of 8": alone_or_together,
    "chunks of 1, 7, 64 = whole": chunks,
    "drafted = plain": drafted,
    "clone, rollback, evict and repair = never saw": edited,
    "out and back = stayed": moved_out,
}

# ---- speed ---------------------------------------------------------------------------------------------

REPETITIONS = 5  # of what is timed, after one that is not


def speed(run: Run) -> None:
    """Tokens a second: decode by batch, prefill by length; the median of repetitions, the least and the most."""
    folder = folder_of(run)
    if folder is None:
        run.row("a model", f"absent: no {REFERENCE} in {run.model or FOLDER}")
        return
    by = " (CPU, random model)" if run.dry else ""
    sizes, steps, count = ((1, 2), 2, 64) if run.dry else ((1, 8, 64), 64, 2048)
    with hosted(run, folder) as made:
        for name in made.names:
            for size in sizes:
                if run.left() < 0:
                    return
                rates = decode_rates(made, name, size, steps)
                run.found.setdefault("decode tokens/s", {}).setdefault(name, {})[str(size)] = rates
                run.row(f"{name}: decode, batch {size}, tokens/s{by}", in_words(rates))
            run.found.setdefault("prefill tokens/s", {})[name] = rates = prefill_rates(made, name, count)
            run.row(f"{name}: prefill of {count}, tokens/s{by}", in_words(rates))


def in_words(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"


def decode_rates(made: Model, name: str, size: int, steps: int) -> list[float]:
    """Of each repetition."""
    with made.engine.batch(name, size) as batch:
        logits, times = batch.prefill_each([made.ids(32, 7 * i) for i in range(size)]), []
        for _ in range(1 + REPETITIONS):
            start = time.perf_counter()
            for _ in range(steps):
                logits = batch.step(logits.argmax(1).tolist())
            int(logits[0, 0])  # waits for the last
            times.append(time.perf_counter() - start)
    return [size * steps / seconds for seconds in times[1:]]


def prefill_rates(made: Model, name: str, count: int) -> list[float]:
    times = []
    for i in range(1 + REPETITIONS):
        with made.engine.session(name) as session:
            start = time.perf_counter()
            int(session.append(made.ids(count, i)).argmax())  # waits for it
            times.append(time.perf_counter() - start)
    return [count / seconds for seconds in times[1:]]
