"""The sides of compare_cpu.py: llama.cpp, transformers and polymodel on forms of one GGUF file.

    python bench/compare_sides.py SIDE PATH THREADS SLOTS < REQUESTS

Each runs in a process of its own, since two runtimes in one would share, and fight over, one pool of threads. A request
is a line of JSON, {"verb": a method of Side, ..its arguments}, and so is the answer; the first answer is of loading.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from types import TracebackType
from typing import Any

CONTEXT = 640  # tokens a slot has room for, on every side
LLAMA_CPP = {"llama.cpp Q8_0": "Q8_0", "llama.cpp Q4_1": "", "llama.cpp F32": "F32"}  # form of the file, "": as it is
TRANSFORMERS = "transformers F32"
OURS = ("f32", "file", "q8", "w8a8", "q4")  # the weights option
SIDES = (*LLAMA_CPP, TRANSFORMERS, *OURS)

Prompts = Sequence[Sequence[int]]


# ---- forms of the file -------------------------------------------------------------------------------


def form_of(side: str, source: Path, cache: Path) -> Path:
    """What a side reads: the file itself, or its float32 values in another form, made once of each content."""
    form = LLAMA_CPP.get(side, "")
    if side != TRANSFORMERS and not form:
        return source
    with source.open("rb") as file:
        stem = f"{source.stem}-{hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    if side == TRANSFORMERS:
        return as_folder(source, cache / f"{stem}-f32")
    return requantise(source, cache / f"{stem}-{form.lower()}.gguf", form)


@contextmanager
def part_of(target: Path) -> Iterator[Path]:
    """What to write in its place; it gets the name in the end, or is removed where it did not come to that."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield part
        part.rename(target)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)


def requantise(source: Path, target: Path, form: str) -> Path:
    """Write a GGUF file with its matrices as Q8_0 or F32, once."""
    if target.exists():
        return target
    import gguf

    kind = gguf.GGMLQuantizationType[form]
    reader = gguf.GGUFReader(str(source))
    with part_of(target) as part:
        writer = gguf.GGUFWriter(str(part), reader.fields["general.architecture"].contents())
        for key, fact in reader.fields.items():
            if key.startswith("GGUF.") or key == "general.architecture":
                continue
            if fact.types[0] == gguf.GGUFValueType.ARRAY:
                writer.add_array(key, fact.contents())
            else:
                writer.add_key_value(key, fact.contents(), fact.types[0])
        for tensor in reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            if values.ndim == 1:
                writer.add_tensor(tensor.name, values)
            else:
                writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return target


NAMES = {  # GGUF -> transformers
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FACTS = {  # transformers -> GGUF, behind "llama."
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def as_folder(source: Path, target: Path) -> Path:
    """Write a llama GGUF file's float32 values as a folder of transformers, once; by the gguf package, not by us."""
    if target.exists():
        return target
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(str(source))
    config: dict[str, Any] = {name: reader.fields[f"llama.{key}"].contents() for name, key in FACTS.items()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        *block, name, end = tensor.name.split(".")  # ["blk", "0"], "attn_q", "weight"
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name in heads:  # llama.cpp rotates neighbours, transformers the halves of a head
            values = values.view(heads[name], -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        state[".".join([*(("model.layers", block[1]) if block else ()), NAMES[name], end])] = values
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    config |= {"vocab_size": len(state["model.embed_tokens.weight"])}
    config |= {"tie_word_embeddings": "lm_head.weight" not in state}
    with part_of(target) as part:
        part.mkdir()
        save_file(state, part / "model.safetensors", {"format": "pt"})
        (part / "config.json").write_text(json.dumps(config))
    return target


# ---- in a worker -------------------------------------------------------------------------------------


class Side:
    """Greedy decoding by one runtime. Rates are tokens per second, by the runtime's own clock."""

    def streams(self, prompts: Prompts, count: int, banned: Sequence[int]) -> list[list[int]]:
        """The next `count` tokens of each prompt, none of them banned."""
        raise NotImplementedError

    def prefill(self, prompt: list[int]) -> float:
        raise NotImplementedError

    def decode(self, prompt: list[int], count: int) -> float:
        """Of the `count` tokens after the first."""
        raise NotImplementedError

    def outputs(self, prompts: Prompts, count: int) -> Sequence[object]:
        """`count` tokens, or their text, of prompts of one length, all at once; stop tokens end nothing."""
        raise NotImplementedError

    def batch(self, prompts: Prompts, count: int) -> dict[str, Any]:
        """Tokens of all requests per second from handing them in to the last one's end, prefills included."""
        start = time.perf_counter()
        outputs = self.outputs(prompts, count)
        return {"rate": len(prompts) * count / (time.perf_counter() - start), "outputs": outputs}

    def held(self) -> dict[str, int]:
        """Bytes that the runtime itself counts."""
        return {}

    def memory(self) -> dict[str, int]:
        """At most resident so far, and what the runtime itself counts, in bytes."""
        return {"peak": resident("VmHWM"), **self.held()}


class LlamaCpp(Side):
    def __init__(self, path: str, threads: int, slots: int, form: str) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel = CONTEXT * slots, slots
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_ram_mib = 0  # of prompts that were answered
        if form == "F32":
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self.server = xllamacpp.Server(params)

    def ask(self, prompt: Sequence[int], count: int, **options: object) -> dict[str, Any]:
        greedy = {"temperature": 0, "samplers": ["temperature"]}
        request = {"prompt": prompt, "n_predict": count, "cache_prompt": False, **greedy, **options}
        answer: dict[str, Any] = self.server.handle_completions(request)
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp: {answer}")
        return answer

    def streams(self, prompts: Prompts, count: int, banned: Sequence[int]) -> list[list[int]]:
        options: Any = {"logprobs": 1, "logit_bias": [[token, False] for token in banned]}  # False: never
        answers = [self.ask(prompt, count, **options)["choices"][0] for prompt in prompts]
        return [[token["id"] for token in answer["logprobs"]["content"]] for answer in answers]

    def prefill(self, prompt: list[int]) -> float:
        return float(self.ask(prompt, 1)["timings"]["prompt_per_second"])

    def decode(self, prompt: list[int], count: int) -> float:
        timings = self.ask(prompt, count + 1, ignore_eos=True)["timings"]
        return float(1e3 * count / timings["predicted_ms"])

    def outputs(self, prompts: Prompts, count: int) -> Sequence[object]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(lambda prompt: self.ask(prompt, count, ignore_eos=True), prompts)
            return [answer["choices"][0]["text"] for answer in answers]


class Transformers(Side):
    """A loop of forwards over its own cache."""

    def __init__(self, path: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def greedy(self, prompts: Prompts, count: int, banned: Sequence[int] = ()) -> tuple[list[list[int]], float, float]:
        """Tokens of prompts of one length; seconds of the prefill and of what follows."""
        import torch

        with torch.inference_mode():
            start = time.perf_counter()
            ids, cache, out = torch.tensor(prompts), None, []
            for at in range(count):
                step = self.model(ids, cache=cache, use_cache=True, logits_to_keep=1)
                step.logits[..., banned] = -math.inf
                ids, cache = step.logits[:, -1].argmax(-1, keepdim=True), step.cache
                out.append(ids)
                if at == 0:
                    first = time.perf_counter()
            return torch.cat(out, 1).tolist(), first - start, time.perf_counter() - first

    def streams(self, prompts: Prompts, count: int, banned: Sequence[int]) -> list[list[int]]:
        return [self.greedy([prompt], count, banned)[0][0] for prompt in prompts]

    def prefill(self, prompt: list[int]) -> float:
        return len(prompt) / self.greedy([prompt], 1)[1]

    def decode(self, prompt: list[int], count: int) -> float:
        return count / self.greedy([prompt], count + 1)[2]

    def outputs(self, prompts: Prompts, count: int) -> Sequence[object]:
        return self.greedy(prompts, count)[0]


class Polymodel(Side):
    """Requests by the public verbs, without drafting and without the prefix cache."""

    def __init__(self, path: str, threads: int, slots: int, weights: str) -> None:
        from polymodel import Engine, EngineConfig
        from polymodel.checkpoint import open_checkpoint

        with open_checkpoint(path) as checkpoint:
            of = checkpoint.config
        token_bytes = 2 * of.num_layers * of.num_kv_heads * of.head_dim * 4
        kv_budget = slots * CONTEXT * token_bytes + (16 << 20)  # and what rounding to superblocks takes
        config = EngineConfig(threads=threads, prefix_cache=False)
        self.engine = Engine(budget="4GiB", kv_budget=kv_budget, config=config)
        self.engine.add("model", path, weights=weights)  # type: ignore[arg-type]  # refused there, if unknown
        self.tokenizer = self.engine["model"].tokenizer  # read when asked for; llama.cpp reads its own too

    def requests(self, prompts: Prompts, count: int, banned: Sequence[int] = ()) -> list[Any]:
        """Outputs of prompts that are handed in at once."""
        options: Any = {"max_new_tokens": count, "stop_at_eos": False, "draft": None}
        options |= {"logit_bias": dict.fromkeys(banned, -math.inf)}
        asked = [self.engine.submit("model", prompt_ids=prompt, **options) for prompt in prompts]
        for request in asked:
            self.engine.wait(request)
        return [self.engine.output(request) for request in asked]

    def streams(self, prompts: Prompts, count: int, banned: Sequence[int]) -> list[list[int]]:
        return [out.tokens for out in self.requests(prompts, count, banned)]

    def prefill(self, prompt: list[int]) -> float:
        return float(len(prompt) / self.requests([prompt], 1)[0].metrics.time_to_first_token)

    def decode(self, prompt: list[int], count: int) -> float:
        return float(self.requests([prompt], count + 1)[0].metrics.tokens_per_second)

    def outputs(self, prompts: Prompts, count: int) -> Sequence[object]:
        return self.streams(prompts, count, ())

    def held(self) -> dict[str, int]:
        return {"weights": self.engine.ledger.total("weights"), "kv reserved": self.engine.ledger.total("kv")}

    def along(self, prompts: Prompts, streams: Prompts, banned: Sequence[int]) -> list[list[tuple[int, float, float]]]:
        """At every token of streams of one length, given to sessions: the own choice, its lead over the second in
        logits, and its lead over the stream's token."""
        found: list[list[tuple[int, float, float]]] = [[] for _ in prompts]
        with self.engine.batch("model", len(prompts)) as batch:
            logits = batch.prefill_each(prompts)
            for at, tokens in enumerate(zip(*streams, strict=True), 1):
                logits[:, banned] = -math.inf
                for row, token in enumerate(tokens):
                    own, (top, second) = int(logits[row].argmax()), logits[row].topk(2).values.tolist()
                    found[row].append((own, top - second, top - float(logits[row, token])))
                if at < len(streams[0]):
                    logits = batch.step(tokens)
        return found


def resident(field: str) -> int:
    """Bytes of this process in memory, mapped files included: "VmRSS" now, "VmHWM" at most."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def load(side: str, path: str, threads: int, slots: int) -> Side:
    if side in LLAMA_CPP:
        return LlamaCpp(path, threads, slots, LLAMA_CPP[side])
    return Transformers(path, threads) if side == TRANSFORMERS else Polymodel(path, threads, slots, side)


def packages(side: str) -> tuple[str, ...]:
    """What a side's process imports before its memory counts."""
    if side in LLAMA_CPP:
        return ("xllamacpp",)
    return ("torch", "transformers.models.llama.modeling_llama" if side == TRANSFORMERS else "polymodel")


def work(side: str, path: str, threads: int, slots: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp logs to stdout
    for package in packages(side):
        __import__(package)
    baseline, start = resident("VmRSS"), time.perf_counter()
    runs = load(side, path, threads, slots)
    answer: object = {"load_seconds": time.perf_counter() - start, "baseline": baseline}
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(runs, request.pop("verb"))(**request)
        print(json.dumps(answer), file=answers, flush=True)


# ---- in the comparison -------------------------------------------------------------------------------


class Worker:
    """A side in a process of its own; leaving the with-block ends it."""

    def __init__(self, side: str, path: Path, threads: int, slots: int) -> None:
        self.side = side
        self.command = [sys.executable, __file__, side, str(path), str(threads), str(slots)]
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # open as long as the worker is
        self.process = Popen(self.command, stdin=PIPE, stdout=PIPE, stderr=self.log, text=True)
        self.loaded: dict[str, float] = self.read("loading")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.end(seconds=0 if kind else 10)

    def end(self, seconds: float) -> None:
        """By itself, as its requests end; killed where it takes longer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(seconds)
        except TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def ask(self, verb: str, **arguments: object) -> Any:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # which reading explains
            print(json.dumps({"verb": verb, **arguments}), file=self.process.stdin, flush=True)
        return self.read(verb)

    def read(self, verb: str) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.log.seek(0)
        said = [line.strip() for line in self.log if line.strip()] or ["it said nothing"]
        self.end(seconds=0)
        raise SystemExit(f"the worker of {self.side} died at {verb!r}: {said[-1]}; try `{shlex.join(self.command)}`")


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
