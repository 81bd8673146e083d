"""polymodel against llama.cpp on this CPU: same weights, same prompts, same threads, one run, interleaved.

    pip install '.[compare,test]' && polymodel pull smollm2 && python bench/compare_cpu.py [--batch 16] [--json FILE]

llama.cpp runs the Q8_0 form of the demo model (requantised here from the same float weights by the gguf
package), polymodel the q8 and w8a8 forms. Each number is the best of the repetitions; the spread is
(median - best) / best. Both sides decode the same number of tokens after the same prompt. With --batch B, "batch" is
decoding of B such requests at once, in tokens of all of them per second of the slowest one's decoding.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

LLAMA = "llama.cpp Q8_0"
KINDS = ("decode", "prefill", "batch")
PROMPT_TOKENS, PREFILL_TOKENS, DECODE_TOKENS = 16, 512, 64
TARGETS = {
    ("q8", "decode"): 0.5,
    ("q8", "prefill"): 0.7,
    ("w8a8", "decode"): 0.65,
    ("w8a8", "prefill"): 1.8,
    ("w8a8", "batch"): 1.2,
}
BATCH_GAIN = 4.0  # target: w8a8 at a batch of 16, over one request


def requantise(source: Path, target: Path) -> Path:
    """Write the Q8_0 form of a GGUF file, once."""
    if target.exists():
        return target
    import gguf

    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(target.with_suffix(".tmp")), "llama")
    for key, fact in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if fact.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, fact.contents())
        else:
            writer.add_key_value(key, fact.contents(), fact.types[0])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".tmp").rename(target)
    return target


def prompt(length: int, number: int = 0) -> list[int]:
    return list(range(1000 + number, 1000 + number + length))


def llama_cpp(path: str, threads: int, batch: int) -> Callable[[str], float]:
    """Tokens per second of llama.cpp, by its own timings."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel = 1024 * batch, batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def timings(ids: list[int], num_new: int) -> dict[str, float]:
        request = {"prompt": ids, "n_predict": num_new, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        return dict(server.handle_completions(request)["timings"])

    def run(kind: str) -> float:
        if kind == "prefill":
            return timings(prompt(PREFILL_TOKENS), 1)["prompt_per_second"]
        if kind == "decode":
            return timings(prompt(PROMPT_TOKENS), DECODE_TOKENS)["predicted_per_second"]
        prompts = [prompt(PROMPT_TOKENS, i) for i in range(batch)]
        with ThreadPoolExecutor(batch) as pool:
            rates = pool.map(lambda ids: timings(ids, DECODE_TOKENS)["predicted_per_second"], prompts)
            return batch * min(rates)

    return run


def ours(path: str, threads: int, weights: str, batch: int) -> Callable[[str], float]:
    """Tokens per second of polymodel, by the request's own metrics."""
    import polymodel as pm

    engine = pm.Engine(config=pm.EngineConfig(threads=threads, prefix_cache=False))
    engine.add("model", path, weights=weights)

    def metrics(ids: list[int], num_new: int) -> Any:
        return engine.generate("model", prompt_ids=ids, max_new_tokens=num_new, stop_at_eos=False).metrics

    def run(kind: str) -> float:
        if kind == "prefill":
            return PREFILL_TOKENS / metrics(prompt(PREFILL_TOKENS), 1).time_to_first_token
        if kind == "decode":
            return metrics(prompt(PROMPT_TOKENS), DECODE_TOKENS + 1).tokens_per_second
        prompts = [prompt(PROMPT_TOKENS, i) for i in range(batch)]
        with ThreadPoolExecutor(batch) as pool:
            rates = pool.map(lambda ids: metrics(ids, DECODE_TOKENS + 1).tokens_per_second, prompts)
            return batch * min(rates)

    return run


def work(side: str, path: str, threads: int, batch: int) -> None:
    """A side in a process of its own: kinds come in on stdin, one a line, tokens per second go out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp writes its log to stdout
    run = llama_cpp(path, threads, batch) if side == LLAMA else ours(path, threads, side, batch)
    for line in sys.stdin:
        print(run(line.strip()), file=answers, flush=True)


def start(side: str, path: Path, threads: int, batch: int) -> Callable[[str], float]:
    """Two runtimes in one process would share, and fight over, one pool of threads."""
    command = [sys.executable, __file__, "--worker", side, str(path), str(threads), str(batch)]
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    assert worker.stdin is not None and worker.stdout is not None
    atexit.register(worker.kill)
    into, out = worker.stdin, worker.stdout

    def ask(kind: str) -> float:
        print(kind, file=into, flush=True)
        answer = out.readline()
        if not answer:
            raise SystemExit(f"the {side} worker died; try `{' '.join(command)}` by hand")
        return float(answer)

    return ask


def load_and_peak(path: Path) -> dict[str, float]:
    """Seconds to load the demo model and peak memory beside the ledger, in a process of its own."""
    code = (
        "import resource, sys, time, json, torch, polymodel as pm\n"
        "with pm.Engine() as eng:\n"
        "    start = time.perf_counter()\n"
        "    eng.add('m', sys.argv[1])\n"
        "    seconds = time.perf_counter() - start\n"
        "    eng.generate('m', 'Hello', max_new_tokens=16)\n"
        "    ledger = eng.ledger.total()\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "print(json.dumps({'load_seconds': seconds, 'peak_bytes': peak, 'ledger_bytes': ledger}))\n"
    )
    runs = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        runs.append(json.loads(out.stdout.splitlines()[-1]))
    return dict(min(runs, key=lambda run: float(run["load_seconds"])))


def measure(
    sides: dict[str, Callable[[str], float]], kinds: Sequence[str], repetitions: int
) -> dict[str, dict[str, list[float]]]:
    """Every side and kind in turn, again and again; the first round warms up and is dropped."""
    seen: dict[str, dict[str, list[float]]] = {side: {kind: [] for kind in kinds} for side in sides}
    for round_ in range(repetitions + 1):
        for kind in kinds:
            for side, run in sides.items():
                value = run(kind)
                if round_:
                    seen[side][kind].append(value)
        print(f"\r{round_}/{repetitions} rounds", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--weights", nargs="+", default=["q8", "w8a8", "file", "q4"])
    parser.add_argument("--batch", type=int, default=1, help="also decode so many requests at once")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--worker", nargs=4, metavar=("SIDE", "PATH", "THREADS", "BATCH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker[0], args.worker[1], int(args.worker[2]), int(args.worker[3]))

    import torch
    from harness import cpu_name

    from polymodel.checkpoint import cache_dir, resolve

    path, threads = resolve("smollm2"), torch.get_num_threads()
    facts = load_and_peak(path)
    sides = {LLAMA: start(LLAMA, requantise(path, cache_dir() / "smollm2-q8_0.gguf"), threads, args.batch)}
    sides |= {weights: start(weights, path, threads, args.batch) for weights in args.weights}
    kinds = KINDS if args.batch > 1 else KINDS[:2]
    seen = measure(sides, kinds, args.repetitions)
    result: dict[str, Any] = {
        "command": " ".join(["python", "bench/compare_cpu.py", *sys.argv[1:]]),
        "machine": cpu_name(),
        "threads": threads,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: version(name) for name in ("torch", "xllamacpp")} | {"python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
        "shapes": {
            "prefill": PREFILL_TOKENS,
            "decode": f"{DECODE_TOKENS} tokens after {PROMPT_TOKENS}",
            "batch": args.batch,
        },
        "load": facts,
        "rows": [],
    }
    base = seen[LLAMA]
    print(f"{'side':16} {'kind':8} {'tok/s':>8} {'spread':>7} {'x llama.cpp':>12} {'target':>7}")
    for side, by_kind in seen.items():
        for kind, values in by_kind.items():
            best = max(values)
            ratio, target = best / max(base[kind]), TARGETS.get((side, kind))
            spread = best / statistics.median(values) - 1
            result["rows"].append(
                {"side": side, "kind": kind, "tokens_per_second": best, "spread": spread, "ratio": ratio, "all": values}
            )
            print(f"{side:16} {kind:8} {best:8.1f} {spread:7.1%} {ratio:12.2f} {target or '':>7}")
        if args.batch > 1:
            gain = max(by_kind["batch"]) / max(by_kind["decode"])
            target = f", target {BATCH_GAIN}" if (side, args.batch) == ("w8a8", 16) else ""
            result["batch_gain"] = result.get("batch_gain", {}) | {side: gain}
            print(f"{side:16} batch of {args.batch}: {gain:.1f} x one request{target}")
    slack = (facts["peak_bytes"] - 1.3 * facts["ledger_bytes"]) / 1e6
    peak = facts["peak_bytes"] / 1e6
    print(f"load {facts['load_seconds']:.2f} s; peak memory {peak:.0f} MB, 1.3 x ledger {slack:+.0f} MB")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
