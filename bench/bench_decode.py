"""A decode step of the demo model on this CPU: how long it takes at a batch size, and what of it is Python.

    pip install '.[bench]' && polymodel pull smollm2 && pytest bench/bench_decode.py [--benchmark-json FILE]

A step is one forward of a pending token for each of B sequences, and the choice of the next tokens. `extra_info` has
tokens per second, their ratio to B = 1 and the number of torch calls; of a model of as many layers that are narrow,
whose products do not hide it, also the milliseconds of Python: CPU time of the step less that of the same torch calls
replayed one after another, the least of each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import demo_model
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from polymodel import Engine
from polymodel.config import Weights
from polymodel.kv import PageList
from polymodel.model import Panel, forward
from polymodel.sample import greedy

BATCHES = (1, 2, 4, 8, 16, 32, 64)
PROMPT = 16  # tokens of a sequence before the first step
ROUNDS = 15
NARROW = {  # the demo model's layers and heads
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Step = Callable[[], object]


class Recorder(TorchFunctionMode):
    """The torch calls made inside, in order; what only reads a tensor's metadata is Python's own."""

    METADATA = ("__get__", "__len__", "dim", "numel", "is_contiguous", "stride", "element_size", "data_ptr", "size")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in self.METADATA:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def torch_calls(step: Step) -> list[Call]:
    """What a step asks of torch."""
    with Recorder() as recorder:
        step()
    return recorder.calls


def python_seconds(step: Step, repetitions: int = ROUNDS) -> float:
    """CPU time of this thread in a step, less that of its torch calls alone; interleaved, the least of each."""
    calls = torch_calls(step)

    @torch.inference_mode()
    def replay() -> None:
        for func, args, kwargs in calls:
            func(*args, **kwargs)

    def seconds(run: Step) -> float:
        start = time.thread_time()
        run()
        return time.thread_time() - start

    both = [(seconds(step), seconds(replay)) for _ in range(repetitions)]
    whole, torch_alone = (min(column) for column in zip(*both, strict=True))
    return whole - torch_alone


class Decoder:
    """B sequences of a hosted model, and their next step."""

    def __init__(self, engine: Engine, name: str, batch: int) -> None:
        model = engine.residency[name].model
        assert model is not None
        self.model, self.arena = model, engine.arena
        self.lists = [PageList(self.arena, model.layout) for _ in range(batch)]
        self.tokens = [[1000 + i] for i in range(batch)]
        for i, pages in enumerate(self.lists):
            ids = [1000 + 7 * j + i for j in range(PROMPT)]
            forward(model, self.arena, Panel([pages], [ids], "none"))

    def step(self) -> None:
        logits = forward(self.model, self.arena, Panel(self.lists, self.tokens))
        self.tokens = [[token] for token in greedy(logits)]

    def free(self) -> None:
        for pages in self.lists:
            pages.free()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    path = demo_model()
    with Engine(budget="1GiB", kv_budget="512MiB") as engine:
        for weights in ("q8", "w8a8"):
            engine.add(weights, path, weights=weights)
        yield engine


def write_narrow(folder: Path) -> Path:
    """A model of NARROW with random weights, as a safetensors folder."""
    random = torch.Generator().manual_seed(0)
    shapes = {"self_attn.q_proj": (576, 64), "self_attn.k_proj": (192, 64), "self_attn.v_proj": (192, 64)}
    shapes |= {"self_attn.o_proj": (64, 576), "mlp.gate_proj": (1536, 64), "mlp.up_proj": (1536, 64)}
    shapes |= {"mlp.down_proj": (64, 1536)}
    tensors = {
        "model.embed_tokens.weight": torch.randn(4096, 64, generator=random),
        "model.norm.weight": torch.ones(64),
    }
    for i in range(30):
        at = f"model.layers.{i}."
        tensors |= {f"{at}{name}.weight": 0.05 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
        tensors |= {f"{at}{name}.weight": torch.ones(64) for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(NARROW))
    return folder


ALONE: dict[Weights, float] = {}  # tokens per second at B = 1


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("weights", ["q8", "w8a8"])
def test_step(benchmark: Any, engine: Engine, weights: Weights, batch: int) -> None:
    decoder = Decoder(engine, weights, batch)
    benchmark.pedantic(decoder.step, rounds=ROUNDS, warmup_rounds=2)
    rate = batch / benchmark.stats.stats.min
    alone = ALONE.setdefault(weights, rate) if batch == 1 else ALONE.get(weights)
    benchmark.extra_info |= {
        "tokens_per_second": rate,
        "ratio_to_one": rate / alone if alone else None,
        "torch_calls": len(torch_calls(decoder.step)),
    }
    decoder.free()


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("weights", ["q8", "w8a8"])
def test_python(benchmark: Any, tmp_path: Path, weights: Weights, batch: int) -> None:
    with Engine(budget="1GiB", kv_budget="512MiB") as engine:
        engine.add("narrow", write_narrow(tmp_path), weights=weights)
        decoder = Decoder(engine, "narrow", batch)
        benchmark.pedantic(decoder.step, rounds=ROUNDS, warmup_rounds=2)
        benchmark.extra_info |= {
            "torch_calls": len(torch_calls(decoder.step)),
            "python_ms": 1e3 * python_seconds(decoder.step, 40),
        }
        decoder.free()
