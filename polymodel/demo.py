"""The main job in one piece: three residents of one checkpoint, six prompts on the lane, and what it cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TextIO

from polymodel.checkpoint import Checkpoint, open_checkpoint, perturbed
from polymodel.config import Weights
from polymodel.console import follow, printable, progress, show_streams
from polymodel.engine import Engine, Output
from polymodel.ledger import format_bytes
from polymodel.share import can_share

CAPITAL, SEA = "What is the capital of France?", "Write one sentence about the sea."
SIBLING_SHARE = 0.8  # of the layers, from below, that the sibling leaves as they are


@dataclass(frozen=True, slots=True)
class Ask:
    model: str
    prompt: str
    draft: str | None = None

    @property
    def title(self) -> str:
        return f"{self.model}, drafted by {self.draft}" if self.draft else self.model


ASKS = (
    Ask("smol", CAPITAL),
    Ask("smol", SEA),
    Ask("smol-q4", CAPITAL),
    Ask("sibling", CAPITAL),
    Ask("sibling", SEA),
    Ask("smol", SEA, draft="smol-q4"),
)
PLAIN, DRAFTED = 1, 5  # the same model and prompt, without and with a drafter


def host(engine: Engine, path: Path) -> None:
    """The checkpoint as it is, its symmetric 4-bit twin, and a sibling that differs in the upper layers."""
    with open_checkpoint(path) as checkpoint:
        first = round(checkpoint.config.num_layers * SIBLING_SHARE)
        sibling = perturbed(checkpoint, first, seed=0)
    _add(engine, "smol", path, "file", "as in the file")
    _add(engine, "smol-q4", path, "q4", "symmetric 4 bit")
    _add(engine, "sibling", sibling, "file", f"layers {first} and up changed")


def _add(engine: Engine, name: str, source: Path | Checkpoint, weights: Weights, remark: str) -> None:
    with progress(f"loading {name}: {remark}") as bar:
        engine.add(name, source, weights=weights, progress=bar)
        engine[name].tokenizer.encode(CAPITAL)  # it is made on first use, and that is loading too


def run_demo(path: Path, budget: str, max_new_tokens: int, show: Callable[[Iterator[tuple[int, str]]], None]) -> Demo:
    """Host, ask, and hand the streamed pieces to `show` as they come."""
    with Engine(budget=budget) as engine:
        host(engine, path)
        engine.events.clear()  # what follows is about the lane
        start = time.perf_counter()
        requests = [
            engine.submit(
                ask.model,
                messages=[{"role": "user", "content": ask.prompt}],
                max_new_tokens=max_new_tokens,
                draft=ask.draft,
            )
            for ask in ASKS
        ]
        show(follow(engine, requests))
        seconds = time.perf_counter() - start
        with progress("comparing the weights of the three"):
            return Demo(engine, [engine.output(request) for request in requests], start, seconds)


class Demo:
    """What was asked, answered and measured."""

    def __init__(self, engine: Engine, outputs: list[Output], start: float, seconds: float) -> None:
        self.outputs, self.seconds = outputs, seconds
        self.num_tokens = sum(len(output.tokens) for output in outputs)
        self.is_lossless = outputs[PLAIN].tokens == outputs[DRAFTED].tokens
        self.max_concurrent_decode = engine.max_concurrent_decode()
        self.budget = engine.budget
        self.ledger = {kind: engine.ledger.of(kind) for kind in ("weights", "kv", "band_states")}
        self.table = str(engine.table())
        self.turns = [_turn(engine, turn, start) for turn in engine.events.of("turn")]
        self.verdicts = [
            {"models": [a, b]} | asdict(can_share(engine[a], engine[b]))
            for a, b in combinations(engine.residency.hosted, 2)
        ]

    @property
    def is_good(self) -> bool:
        return self.is_lossless and self.max_concurrent_decode == 1

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "requests": [
                {"model": ask.model, "prompt": ask.prompt, "draft": ask.draft}
                | {key: value for key, value in output.report().items() if key != "model"}
                for ask, output in zip(ASKS, self.outputs, strict=True)
            ],
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.num_tokens / self.seconds,
            "drafted_equals_plain": self.is_lossless,
            "max_concurrent_decode": self.max_concurrent_decode,
            "turns": self.turns,
            "budget": self.budget,
            "ledger": self.ledger,
            "can_share": self.verdicts,
        }

    def print(self, out: TextIO) -> None:
        """For people: the answers, then what they cost."""
        for part in (self._answers, self._ledger, self._turns, self._sharing, self._summary):
            print("\n".join(part()) + "\n", file=out)

    def _answers(self) -> Iterator[str]:
        for ask, output in zip(ASKS, self.outputs, strict=True):
            m = output.metrics
            yield f"[{ask.title}] {ask.prompt}"
            yield f"    {printable(output.text)}"
            cost = [f"{m.num_output_tokens} tokens", f"{m.tokens_per_second:.1f}/s"]
            cost += [f"first after {m.time_to_first_token:.2f} s"]
            if ask.draft:
                cost += [f"{m.num_accepted} of {m.num_drafted} drafted tokens accepted"]
            yield f"    ({', '.join(cost)})"

    def _ledger(self) -> Iterator[str]:
        yield self.table
        used = sum(self.ledger["weights"].values())
        yield f"weights {format_bytes(used)} of a budget of {format_bytes(self.budget)}"
        pages = sum(self.ledger["kv"].values()) + sum(self.ledger["band_states"].values())
        yield f"KV pages {format_bytes(pages)}, reserved for all models together"

    def _turns(self) -> Iterator[str]:
        yield "turns: who had the lane, and the rows of its forwards"
        yield f"  {'at':>6} {'for':>8}  {'model':8} {'sequences':>9} {'prefill':>7} {'decode':>6}"
        for turn in self.turns:
            at, duration = f"{turn['start']:.2f}s", f"{1000 * turn['seconds']:.0f}ms"
            rows = f"{turn['sequences']:9} {turn['prefill_rows']:7} {turn['decode_rows']:6}"
            yield f"  {at:>6} {duration:>8}  {turn['model']:8} {rows}"

    def _sharing(self) -> Iterator[str]:
        yield "can_share: lower layers whose keys and values are the same"
        for verdict in self.verdicts:
            a, b = verdict["models"]
            yield f"  {a} and {b}: {verdict['layers']} of {verdict['num_layers']} layers equal ({verdict['reason']})"

    def _summary(self) -> Iterator[str]:
        waits = [output.metrics.time_to_first_token for output in self.outputs]
        speed = self.num_tokens / self.seconds
        yield f"{self.num_tokens} tokens in {self.seconds:.2f} s: {speed:.1f} tokens/s over all requests"
        prompts, cached, resumed = (
            sum(getattr(output.metrics, f"num_{what}_tokens") for output in self.outputs)
            for what in ("prompt", "cached", "resumed")
        )
        yield f"{prompts} prompt tokens: {cached} taken over whole, {resumed} in the layers that two models share"
        yield f"time to first token: {min(waits):.2f} to {max(waits):.2f} s"
        yield f"drafted tokens equal plain tokens: {'yes' if self.is_lossless else 'NO'}"
        yield f"decode steps at one time, measured: at most {self.max_concurrent_decode}"


def _turn(engine: Engine, turn: Any, start: float) -> dict[str, Any]:
    """A turn with the rows of the forwards inside it."""

    def rows(*kinds: Any) -> int:
        return sum(e.tokens for e in engine.events.of(*kinds) if turn.start <= e.start and e.stop <= turn.stop)

    return {
        "model": turn.model,
        "start": turn.start - start,
        "seconds": turn.stop - turn.start,
        "sequences": turn.sequences,
        "prefill_rows": rows("prefill"),
        "decode_rows": rows("decode", "verify"),
    }


def show_on(out: TextIO) -> Callable[[Iterator[tuple[int, str]]], None]:
    """Stream every answer to `out` under its title."""
    titles = [f"{ask.title}: {ask.prompt}" for ask in ASKS]
    return lambda pieces: show_streams(titles, pieces, out)


def show_nothing(pieces: Iterator[tuple[int, str]]) -> None:
    """Only let the lane work."""
    print("answering ...", file=sys.stderr, flush=True)
    for _ in pieces:
        pass
