"""polymodel, llama.cpp and transformers on this CPU: same weights, same prompts, same threads, one run, interleaved.

    pip install -c .ci/constraints.txt '.[compare,test]' && polymodel pull smollm2
    python bench/compare_cpu.py [--json FILE]

The weights are those of the demo model's Q4_1 file. llama.cpp reads it as it is and requantised to Q8_0 (or written out
in F32), transformers its float32 values; the gguf package writes these forms, once, beside the file's folder. We read
the file itself, with a weights option: "file", "f32", "q8", "w8a8", "q4". Keys and values are float32 in transformers
and here; llama.cpp's are float16, as it has them, beside all but its F32 form.

Three parts, of which each prints a table:

* tokens: greedy ones after texts, without a chat template or control tokens. Where two streams first differ, "margin"
  is the lead of our first choice over our second in logits, and "gap" its lead over the other side's token. "agreement"
  is how many tokens of the other side's streams are our choice too, after the same tokens before. In float32 a gap of
  0.001 voids the run; in other forms streams part, since llama.cpp quantises activations and our q8 rounds them to
  bfloat16, and only an agreement below "least" voids it.
* memory: of a process of its own with room for one request, which loads the model, prefills 512 tokens and decodes;
  over what it had with its libraries imported. Pages of mapped files count, where they are touched. "weights" and
  "kv reserved" are what our ledger holds; of the latter, what was not touched is not in memory.
* speed: all sides in turn, again and again, each round begun by another; the best of the repetitions, and as "spread"
  best / median - 1. Prefill and decode of one request are by each side's own clock; a batch counts from handing all
  requests in to the end of the last one. "changed" counts requests whose output another batch size changed; one of
  ours voids the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from compare_sides import CONTEXT, LLAMA_CPP, OURS, SIDES, TRANSFORMERS, Prompts, Worker, form_of
from harness import ROOT, console, cpu_name, environment, rows_table, write_json

from polymodel.checkpoint import cache_dir, open_checkpoint, resolve
from polymodel.errors import FetchFailed
from polymodel.tokenizer import Tokenizer

TEXTS = ROOT / "bench" / "prompts" / "speculation.json"
NUM_TEXTS = 40
PREFILL_TOKENS, PROMPT_TOKENS = 512, 16  # of what is timed: a prompt, and one that is decoded after
MAX_PROMPT = 96  # of the texts whose tokens are compared
WARM_TOKENS = 8
TOO_CLOSE = 1e-3  # in float32, below this lead in logits another choice is no error
BASE = "llama.cpp Q8_0"
DEFAULT_SIDES = tuple(side for side in SIDES if side not in ("llama.cpp F32", "q4"))
BATCHED = (BASE, TRANSFORMERS, "q8", "w8a8")
MB = 1e6

Row = dict[str, Any]
Texts = Mapping[str, list[int]]  # name -> token ids
Along = Sequence[Sequence[Any]]  # at each token of a stream: our choice, its margin, its lead over the stream's token


@dataclass(frozen=True)
class Pair:
    """Two sides that should say the same: `least` of the tokens, or all but close ones where it is 1."""

    ours: str
    theirs: str
    least: float

    @property
    def name(self) -> str:
        return f"{self.ours} along {self.theirs}"


PAIRS = (
    Pair("f32", TRANSFORMERS, 1.0),
    Pair("f32", "llama.cpp F32", 1.0),
    Pair("f32", "llama.cpp Q4_1", 0.85),
    Pair("file", "llama.cpp Q4_1", 0.85),
    Pair("q8", BASE, 0.85),
    Pair("w8a8", BASE, 0.8),
    Pair("q4", BASE, 0.6),
)


# ---- what is asked for -------------------------------------------------------------------------------


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Checked; SystemExit with a line of what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=[*DEFAULT_SIDES], metavar="SIDE", help=", ".join(SIDES))
    parser.add_argument("--prompts", type=int, default=8, help=f"texts whose tokens are compared, 1..{NUM_TEXTS}")
    parser.add_argument("--tokens", type=int, default=64, help="that follow a prompt, compared or timed")
    parser.add_argument("--repetitions", type=int, default=7, help="of prefill and decode")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32], help="requests at once")
    parser.add_argument("--batch-sides", nargs="+", metavar="SIDE", help=f"{', '.join(BATCHED)} where not given")
    parser.add_argument("--batch-tokens", type=int, default=32, help="that follow each of these")
    parser.add_argument("--batch-repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every side")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args(arguments)
    if args.batch_sides is None:
        args.batch_sides = [side for side in BATCHED if side in args.sides]
    if problem := _problem(args):
        raise SystemExit(f"compare_cpu.py: {problem}")
    return args


def _problem(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, or missing here."""
    if unknown := sorted({*args.sides, *args.batch_sides} - {*SIDES}):
        return f"unknown side {unknown[0]!r}; there are {', '.join(map(repr, SIDES))}"
    most = CONTEXT - PREFILL_TOKENS - 1
    ranges = {"prompts": NUM_TEXTS, "tokens": most, "batch_tokens": most, "threads": os.cpu_count() or 1}
    for name in ("prompts", "tokens", "batch_tokens", "repetitions", "batch_repetitions", "threads"):
        value, limit = getattr(args, name), ranges.get(name, 1000)
        if not 1 <= value <= limit:
            return f"--{name.replace('_', '-')} {value}, expected 1..{limit}"
    if wrong := [size for size in args.batches if not 1 <= size <= NUM_TEXTS]:
        return f"--batches {wrong[0]}, expected 1..{NUM_TEXTS}"
    pairs = chosen(args.sides)
    for side in args.sides:
        if not any(side in (pair.ours, pair.theirs) for pair in pairs):
            peers = [
                pair.theirs if side == pair.ours else pair.ours for pair in PAIRS if side in (pair.ours, pair.theirs)
            ]
            return (
                f"--sides: the tokens of {side!r} are checked by {' or '.join(map(repr, peers))}, expected one with it"
            )
    if absent := [side for side in args.batch_sides if side not in args.sides]:
        return f"--batch-sides: {absent[0]!r} is not among the sides"
    if args.json is not None and args.json.is_dir():
        return f"--json {args.json} is a folder, expected a file"
    needed = {"gguf": form_is_made(args.sides), "xllamacpp": any(side in LLAMA_CPP for side in args.sides)}
    needed["transformers"] = TRANSFORMERS in args.sides
    if missing := [name for name, is_needed in needed.items() if is_needed and find_spec(name) is None]:
        return f"no package {missing[0]!r} here: pip install '.[compare,test]'"
    return None


def chosen(sides: Sequence[str]) -> list[Pair]:
    return [pair for pair in PAIRS if pair.ours in sides and pair.theirs in sides]


def form_is_made(sides: Sequence[str]) -> bool:
    """Whether a side reads another form of the file."""
    return any(LLAMA_CPP.get(side) or side == TRANSFORMERS for side in sides)


def read_texts(tokenizer: Tokenizer) -> Texts:
    """All of them: the first of each kind, then the second of each kind, and so on."""
    kinds: dict[str, list[str]] = json.loads(TEXTS.read_text())
    rounds = zip(*kinds.values(), strict=True)
    return {
        f"{kind} {number}": tokenizer.encode(text)
        for number, some in enumerate(rounds, 1)
        for kind, text in zip(kinds, some, strict=True)
    }


# ---- tokens and memory -------------------------------------------------------------------------------


def compared(pair: Pair, names: Sequence[str], ours: Prompts, theirs: Prompts, along: Sequence[Along]) -> Row:
    """How far two sides agree; SystemExit where our streams are not what our logits along the other's say."""
    divergences: list[Row] = []
    steps: list[tuple[bool, float]] = []  # whether a token of theirs is our choice; the gap
    for name, own, other, found in zip(names, ours, theirs, along, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), None)
        end = len(other) if at is None else at + 1
        if list(own[:end]) != [choice for choice, _, _ in found[:end]]:
            raise SystemExit(f"VOID: {pair.ours} after {name!r}: a request's tokens are not those of a session")
        if at is not None:
            where = {"what": pair.name, "prompt": name, "position": at, "ours": own[at], "theirs": other[at]}
            divergences.append({**where, "margin": found[at][1], "gap": found[at][2]})
        steps += [(choice == token, gap) for token, (choice, _, gap) in zip(other, found, strict=True)]
    agreement, gap = sum(same for same, _ in steps) / len(steps), max(gap for _, gap in steps)
    return {
        "what": pair.name,
        "streams": len(names),
        "same": len(names) - len(divergences),
        "tokens": len(steps),
        "agreement": agreement,
        "least": pair.least,
        "largest gap": gap,
        "holds": gap < TOO_CLOSE if pair.least == 1 else agreement >= pair.least,
        "divergences": divergences,
    }


def listen(
    paths: Mapping[str, Path], texts: Texts, control_tokens: Sequence[int], args: argparse.Namespace
) -> list[Row]:
    """Rows of the pairs whose tokens are compared; one side after the other, alone."""
    prompts = {name: ids[:MAX_PROMPT] for name, ids in list(texts.items())[: args.prompts]}
    given: Any = {"prompts": [*prompts.values()], "banned": control_tokens}
    streams: dict[str, list[list[int]]] = {}
    pairs: list[Row] = []
    for side, path in paths.items():
        progress(f"tokens: {side}")
        with Worker(side, path, args.threads, len(prompts) if side in OURS else 1) as worker:
            streams[side] = worker.ask("streams", count=args.tokens, **given)
            if short := [name for name, some in zip(prompts, streams[side], strict=True) if len(some) < args.tokens]:
                raise SystemExit(f"VOID: {side} after {short[0]!r}: fewer than {args.tokens} tokens")
            for pair in [pair for pair in chosen(args.sides) if pair.ours == side]:
                theirs = streams[pair.theirs]
                along = worker.ask("along", streams=theirs, **given)
                pairs.append(compared(pair, [*prompts], streams[side], theirs, along))
    return pairs


def weigh(paths: Mapping[str, Path], texts: Texts, threads: int) -> list[Row]:
    """What each side takes for one request, alone."""
    rows = []
    for side, path in paths.items():
        progress(f"memory: {side}")
        with Worker(side, path, threads, 1) as worker:
            warm(worker, texts)
            rows.append(weight(side, path, worker.loaded, worker.ask("memory")))
    return rows


def warm(worker: Worker, texts: Texts) -> None:
    worker.ask("prefill", prompt=long_prompt(texts))
    worker.ask("decode", prompt=short_prompts(texts, 1)[0], count=WARM_TOKENS)


def weight(side: str, path: Path, loaded: Mapping[str, float], memory: Mapping[str, int]) -> Row:
    files = [path] if path.is_file() else [*path.iterdir()]
    return {
        "side": side,
        "file MB": sum(file.stat().st_size for file in files) / MB,
        "load s": loaded["load_seconds"],
        "over baseline MB": (memory["peak"] - loaded["baseline"]) / MB,
        "peak MB": memory["peak"] / MB,
        **{f"{kind} MB": size / MB for kind, size in memory.items() if kind != "peak"},
    }


# ---- speed -------------------------------------------------------------------------------------------


def long_prompt(texts: Texts) -> list[int]:
    return list(chain(*texts.values()))[:PREFILL_TOKENS]


def short_prompts(texts: Texts, count: int) -> list[list[int]]:
    """What the texts have in a row, cut to one length."""
    every = iter(chain(*texts.values()))
    return [list(islice(every, PROMPT_TOKENS)) for _ in range(count)]


def in_turn(workers: Mapping[str, Worker], round_: int) -> list[tuple[str, Worker]]:
    """Every round is begun by another side."""
    sides = [*workers.items()]
    first = round_ % len(sides) if sides else 0
    return sides[first:] + sides[:first]


def time_one(workers: Mapping[str, Worker], texts: Texts, args: argparse.Namespace) -> list[Row]:
    """Prefill and decode of one request."""
    long, (short,) = long_prompt(texts), short_prompts(texts, 1)
    seen: dict[tuple[str, str], list[float]] = {(side, kind): [] for side in workers for kind in ("prefill", "decode")}
    for round_ in range(args.repetitions):
        for side, worker in in_turn(workers, round_):
            progress(f"prefill and decode: {round_ + 1}/{args.repetitions}, {side}")
            seen[side, "prefill"].append(worker.ask("prefill", prompt=long))
            seen[side, "decode"].append(worker.ask("decode", prompt=short, count=args.tokens))
    return [{"side": side, "kind": kind, **rate(rates)} for (side, kind), rates in seen.items()]


def time_batches(workers: Mapping[str, Worker], texts: Texts, args: argparse.Namespace) -> list[Row]:
    """Requests at once; SystemExit where one of ours has other tokens than in another batch."""
    seen: dict[tuple[str, int], list[float]] = {(side, size): [] for side in workers for size in args.batches}
    changed = dict.fromkeys(seen, 0)
    outputs: dict[tuple[str, int], object] = {}  # of a side and prompt, in the first batch
    for round_ in range(args.batch_repetitions):
        for size in args.batches:
            for side, worker in in_turn(workers, round_):
                progress(f"batches: {round_ + 1}/{args.batch_repetitions}, {size} at once, {side}")
                answer = worker.ask("batch", prompts=short_prompts(texts, size), count=args.batch_tokens)
                seen[side, size].append(answer["rate"])
                for number, output in enumerate(answer["outputs"]):
                    is_other = outputs.setdefault((side, number), output) != output
                    changed[side, size] += is_other
                    if is_other and side in OURS:
                        raise SystemExit(f"VOID: {side}, {size} at once: request {number} has other tokens than before")
    return [
        {"side": side, "kind": "batch", "batch": size, **rate(rates), "changed": changed[side, size]}
        for (side, size), rates in seen.items()
    ]


def rate(values: Sequence[float]) -> Row:
    """The best of the repetitions, and how far the median lies below it."""
    best = max(values)
    return {"tokens_per_second": best, "spread": best / statistics.median(values) - 1, "all": list(values)}


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Each rate over the base's in the same row, and over that of the side's smallest batch."""
    best = {(row["side"], row["kind"], row.get("batch")): row["tokens_per_second"] for row in rows}
    found = []
    for row in rows:
        side, kind, size, value = row["side"], row["kind"], row.get("batch"), row["tokens_per_second"]
        over = best.get((BASE, kind, size))
        row = {**row, "ratio": value / over if over else None}
        if size is not None:
            row["gain"] = value / best[side, kind, min(n for s, k, n in best if (s, k) == (side, kind))]
        found.append(row)
    return found


# ---- the run -----------------------------------------------------------------------------------------


def progress(text: str) -> None:
    print(f"\r{text:70}", end="" if text else "\r", file=sys.stderr, flush=True)


def show(title: str, rows: Sequence[Row], *names: str, **renamed: str) -> None:
    """A table of these fields, some of them under another name."""
    named = [{renamed.get(name, name): row.get(name) for name in names} for row in rows]
    console().print(rows_table(title, named, [renamed.get(name, name) for name in names]))


def origin(args: argparse.Namespace, arguments: Sequence[str]) -> Row:
    """What produced the numbers."""
    packages = ("torch", "xllamacpp", "transformers", "gguf")
    return {
        "command": shlex.join(["python", "bench/compare_cpu.py", *arguments]),
        "machine": cpu_name(),
        "threads": args.threads,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: version(name) for name in packages if find_spec(name)}
        | {"python": platform.python_version()},
        "commit": environment()["commit"],
        "date": time.strftime("%Y-%m-%d"),
        "shapes": {
            "tokens compared": f"{args.tokens} after up to {MAX_PROMPT} of each of {args.prompts} texts",
            "prefill": PREFILL_TOKENS,
            "decode": f"{args.tokens} tokens after {PROMPT_TOKENS}",
            "batch": f"{args.batch_tokens} tokens after {PROMPT_TOKENS}, prefills included",
            "keys and values": "float32; float16 in llama.cpp but for its F32 form",
        },
    }


def main(arguments: Sequence[str]) -> None:
    args, start = parsed(arguments), time.perf_counter()
    try:
        source = resolve("smollm2")
    except FetchFailed as error:
        raise SystemExit(f"compare_cpu.py: {error}") from None
    with open_checkpoint(source) as checkpoint:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata, str(source))
        vocab_size = checkpoint.config.vocab_size
    texts = read_texts(tokenizer)
    progress("forms of the file")
    paths = {side: form_of(side, source, cache_dir()) for side in SIDES if side in args.sides}
    result = origin(args, arguments)

    control_tokens = [token for token in range(vocab_size) if tokenizer.is_special(token)]
    pairs = listen(paths, texts, control_tokens, args)
    progress("")
    show("tokens", pairs, "what", "streams", "same", "tokens", "agreement", "least", "largest gap", "holds")
    divergences = [
        row | {whose: f"{row[whose]} {tokenizer.decode([row[whose]])!r}" for whose in ("ours", "theirs")}
        for pair in pairs
        for row in pair["divergences"]
    ]
    show("first differences", divergences, "what", "prompt", "position", "ours", "theirs", "margin", "gap")
    if void := [pair["what"] for pair in pairs if not pair["holds"]]:
        raise SystemExit(f"VOID: the tokens of {', '.join(void)} do not agree; nothing was timed")

    weighed = weigh(paths, texts, args.threads)
    slots = max(args.batches, default=1)
    with ExitStack() as stack:
        workers = {}
        for number, (side, path) in enumerate(paths.items()):
            progress(f"loading {side}")
            workers[side] = stack.enter_context(
                Worker(side, path, args.threads, slots if side in args.batch_sides else 1)
            )
            weighed[number]["load s"] = min(weighed[number]["load s"], workers[side].loaded["load_seconds"])
            warm(workers[side], texts)
        rows = time_one(workers, texts, args)
        rows += time_batches({side: workers[side] for side in paths if side in args.batch_sides}, texts, args)
    progress("")
    rows = with_ratios(rows)
    memory = dict.fromkeys(name for row in weighed for name in row)
    show("memory; load: the better of two", weighed, *memory, side="what")
    names = {"side": "what", "tokens_per_second": "tokens/s", "ratio": f"x {BASE}", "gain": "x smallest batch"}
    one, many = ([row for row in rows if (row["kind"] == "batch") == is_batch] for is_batch in (False, True))
    columns = ("tokens_per_second", "spread", "ratio")
    show("one request", one, "side", "kind", *columns, **names)
    if many:
        show("requests at once", many, "side", "batch", *columns, "gain", "changed", **names)
    print(f"{time.perf_counter() - start:.0f} s in all")
    if args.json:
        write_json(args.json, {**result, "memory": weighed, "tokens": pairs, "rows": rows})


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        progress("")
