"""Does this machine keep the promises? Small checks of budget, lane and bits on real forwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from polymodel.checkpoint import open_checkpoint, perturbed, resolve
from polymodel.config import Draft, EngineConfig
from polymodel.engine import Engine
from polymodel.errors import PolymodelError, TooLarge
from polymodel.header import PARTS, source_name
from polymodel.kv import PageList
from polymodel.model import Panel, forward
from polymodel.tokenizer_spec import BYTE_OF

NUM_TOKENS = 24  # new tokens a request
PROMPTS = ["The capital of France is", "One, two, three,", "Once upon a time there was a"]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    detail: str  # what was measured, or what went wrong


class Broken(Exception):
    """A promise that does not hold here."""


def selfcheck(source: str | None = None) -> Iterator[Check]:
    """One check after the other on a checkpoint, by path or name; on a small random model if none is given."""
    with _source(source) as path, Engine(budget="64GiB", config=EngineConfig(prefix_cache=False)) as engine:
        engine.add("one", path)
        engine.budget = engine["one"].nbytes
        for check in (check_budget, check_lane, check_company, check_chunks, check_share, check_drafts, check_reload):
            yield _run(check, engine, path)


def _run(check: Callable[[Engine, Path], str], engine: Engine, path: Path) -> Check:
    name = (check.__doc__ or "").removesuffix(".")
    try:
        return Check(name, True, check(engine, path))
    except (Broken, PolymodelError) as error:
        return Check(name, False, str(error))


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


def check_budget(engine: Engine, path: Path) -> str:
    """Three equal models in the memory of one, and a sibling in their place: never over the budget, nothing lost."""
    for name in ("two", "three"):
        engine.add(name, path)
    stored = engine.ledger.total("weights")
    _expect(stored == engine["one"].nbytes, f"three equal models take {stored:,} bytes, one {engine['one'].nbytes:,}")
    engine.add("sibling", perturbed(open_checkpoint(path), 0, seed=0))
    _expect(engine.ledger.total("weights") <= engine.budget, "over the budget after adding a sibling")
    states = [row["state"] for row in engine.table()]
    _expect(states == ["disk"] * 3 + ["device"], f"expected all but the sibling on disk, got {states}")
    engine.remove("sibling")
    engine.budget *= 3  # room for what the other checks add
    before = engine.budget, str(engine.table())
    with Engine(budget=engine["one"].nbytes - 1) as small:
        try:
            small.add("one", path)
        except TooLarge:
            _expect(not len(small.table()) and not small.ledger.total("weights"), "a refused model left a trace")
        else:
            raise Broken("a model larger than the budget was not refused")
    _expect(before == (engine.budget, str(engine.table())), "the table changed by itself")
    return f"three equal models in {stored:,} bytes, as much as the budget was"


def check_lane(engine: Engine, path: Path) -> str:
    """Requests for three models at once: one decode at a time, by the recorded intervals."""
    engine.events.clear()
    names = ["one", "two", "three"]
    requests = [engine.submit(n, p, max_new_tokens=NUM_TOKENS, stop_at_eos=False) for p in PROMPTS for n in names]
    engine.run()
    outputs = [engine.output(request).tokens for request in requests]
    _expect(all(len(tokens) == NUM_TOKENS for tokens in outputs), "a request did not run to its end")
    for i in range(0, len(outputs), len(names)):
        _expect(outputs[i] == outputs[i + 1] == outputs[i + 2], "equal models gave different tokens")
    most = engine.max_concurrent_decode()
    _expect(most == 1, f"{most} decodes overlapped")
    steps, turns = len(engine.events.of("decode", "verify")), len(engine.events.of("turn"))
    return f"{steps} decode steps, {turns} turns, at most {most} at once"


def check_company(engine: Engine, path: Path) -> str:
    """A sequence alone and in a batch: the same logits, bit for bit."""
    tokenizer = engine["one"].tokenizer
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    together = _logits(engine, prompts)
    alone = [_logits(engine, [ids])[0] for ids in prompts]
    _expect(bool(torch.isfinite(together).all()), "a logit is not finite")
    differing = [i for i, row in enumerate(alone) if not torch.equal(row, together[i])]
    _expect(not differing, f"sequences {differing} differ")
    return f"{len(prompts)} sequences, {together.shape[1]:,} logits each"


def _logits(engine: Engine, prompts: list[list[int]]) -> Tensor:
    """[len(prompts), vocab] after a prefill and one step of all prompts together."""
    with engine.lane.exclusive(), engine.residency.lease("one") as model:
        lists = [PageList(engine.arena, model.layout) for _ in prompts]
        try:
            forward(model, engine.arena, Panel(lists, [ids[:-1] for ids in prompts], "none"))
            return forward(model, engine.arena, Panel(lists, [ids[-1:] for ids in prompts]))
        finally:
            for pages in lists:
                pages.free()


def check_chunks(engine: Engine, path: Path) -> str:
    """A prompt whole, in chunks and token by token: the same logits, bit for bit."""
    ids = engine["one"].tokenizer.encode(" ".join(PROMPTS))
    logits = []
    for size in (len(ids), 7, 1):
        with engine.session("one") as session:
            for start in range(0, len(ids), size):
                last = session.append(ids[start : start + size])
            logits.append(last)
    _expect(all(torch.equal(logits[0], other) for other in logits), "the chunks show in the logits")
    return f"{len(ids)} tokens in chunks of {len(ids)}, 7 and 1"


def check_share(engine: Engine, path: Path) -> str:
    """A sibling that goes on from a model's prefix, and one that computes it: the same keys, values and logits."""
    if not engine.config.multi_model:
        return "sharing between models is off"
    half = engine["one"].config.num_layers // 2
    engine.add("sibling", perturbed(open_checkpoint(path), half, seed=1))
    ids = engine["one"].tokenizer.encode(" ".join(PROMPTS))
    with engine.session("one") as prefix, engine.session("sibling") as direct:
        prefix.append(ids)
        logits = direct.append(ids)
        with engine.session("sibling", prefix=prefix) as shared:
            _expect(shared.num_resumed == len(ids), f"{shared.num_resumed} of {len(ids)} tokens were taken over")
            _expect(torch.equal(shared.pages.dump(), direct.pages.dump()), "keys or values differ")
            _expect(shared.logits is not None and torch.equal(shared.logits, logits), "the logits differ")
    engine.remove("sibling")
    return f"{half} of {engine['one'].config.num_layers} layers of {len(ids)} tokens taken over"


def check_drafts(engine: Engine, path: Path) -> str:
    """Drafted by the 4-bit twin, as chains, trees and with lookup, and plain: the same tokens, drawn ones too."""
    engine.remove("three")
    engine.add("drafted", path, twin="q4")
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "stop_at_eos": False}
    plain = [engine.generate("one", prompt, draft=None, **options) for prompt in PROMPTS]
    num_drafted = num_accepted = 0
    for draft in (Draft("twin"), Draft("twin", width=2), Draft(("ngram", "twin"))):
        drafted = [engine.generate("drafted", prompt, draft=draft, **options) for prompt in PROMPTS]
        _expect([o.tokens for o in plain] == [o.tokens for o in drafted], f"{draft} changed the tokens")
        num_drafted += sum(o.metrics.num_drafted for o in drafted)
        num_accepted += sum(o.metrics.num_accepted for o in drafted)
    engine.verify_exact(engine.generate("drafted", PROMPTS[0], draft="twin", temperature=1.0, seed=1, **options))
    if not engine.config.multi_model:
        return "drafting between models is off"
    _expect(num_drafted > 0, "nothing was drafted")
    return f"{num_accepted} of {num_drafted} drafted tokens accepted"


def check_reload(engine: Engine, path: Path) -> str:
    """Given up and loaded again: the same logits, bit for bit."""
    prompts = [engine["one"].tokenizer.encode(PROMPTS[0])]
    before = _logits(engine, prompts)
    for name in ("one", "two"):  # what an equal model holds would not be loaded again
        engine.unload(name)
    _expect("one" not in engine.ledger.of("weights"), "unloading left bytes in the ledger")
    _expect(torch.equal(before, _logits(engine, prompts)), "the logits changed")
    return f"{engine['one'].nbytes:,} bytes given back and loaded again"


# ---- a model from nothing ----------------------------------------------------------------------------


@contextmanager
def _source(source: str | None) -> Iterator[Path]:
    if source is not None:
        yield resolve(source)
        return
    with TemporaryDirectory() as folder:
        write_random_model(Path(folder))
        yield Path(folder)


def write_random_model(folder: Path, seed: int = 0) -> None:
    """A llama of two layers with random weights, whose tokens are bytes, as a safetensors folder."""
    from safetensors.torch import save_file

    vocab = {piece: i for i, piece in enumerate(BYTE_OF)} | {"<|end|>": 256}
    fields = {
        "model_type": "llama",
        "vocab_size": len(vocab),
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 256,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": False}
    end = {"id": 256, "content": "<|end|>", "special": True, "normalized": False}
    end |= {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "added_tokens": [end],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file(_random_tensors(fields, seed), folder / "model.safetensors")


def _random_tensors(fields: dict[str, Any], seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden, inter, vocab = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    kv = hidden * fields["num_key_value_heads"] // fields["num_attention_heads"]
    shapes = {"embed": (vocab, hidden), "norm": (hidden,)}
    layer = {"attn_norm": (hidden,), "q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    layer |= {"mlp_norm": (hidden,), "gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    for i in range(fields["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{part}": shape for part, shape in layer.items()}
    parts = {part: names[1] for part, names in PARTS.items()}
    return {
        "model." + source_name(name, "layers.", parts): torch.randn(shape, generator=random) * 0.2 + ("norm" in name)
        for name, shape in shapes.items()
    }
