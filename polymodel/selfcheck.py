"""Does this machine keep the promises? Small checks of budgets, the lane and bits on real forwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
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
from polymodel.sim import plan
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


class Scripted:
    """A drafter that knows what plain decoding chooses, and proposes another token wherever it is told to.

    is_wrong takes the token's place in the sequence and its place among those that are drafted together.
    """

    def __init__(self, known: Sequence[int], vocab_size: int, is_wrong: Callable[[int, int], bool]) -> None:
        self.known = known  # prompt and output of plain decoding
        self.vocab_size = vocab_size
        self.is_wrong = is_wrong

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        start = len(tokens)
        right = self.known[start : start + count]
        return [(token + self.is_wrong(start + i, i)) % self.vocab_size for i, token in enumerate(right)]


def selfcheck(source: str | None = None, device: str = "auto") -> Iterator[Check]:
    """One check after the other on a checkpoint, by path or name; on a small random model if none is given."""
    with _source(source) as path, Engine(device, budget="64GiB", config=EngineConfig(prefix_cache=False)) as engine:
        engine.add("one", path)
        engine.budget = engine["one"].nbytes
        for check in CHECKS:
            yield _run(check, engine, path)


def _run(check: Callable[[Engine, Path], str], engine: Engine, path: Path) -> Check:
    name = (check.__doc__ or "").removesuffix(".")
    try:
        return Check(name, True, check(engine, path))
    except (Broken, PolymodelError) as error:
        return Check(name, False, str(error))
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}")


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
    with Engine(str(engine.device), budget=engine["one"].nbytes - 1) as small:
        try:
            small.add("one", path)
        except TooLarge:
            _expect(not len(small.table()) and not small.ledger.total("weights"), "a refused model left a trace")
        else:
            raise Broken("a model larger than the budget was not refused")
    _expect(before == (engine.budget, str(engine.table())), "the table changed by itself")
    return f"three equal models in {stored:,} bytes, as much as the budget was"


MADE_ROOM = {"m6": ["m1", "m2"], "m7": ["m3"], "m9": ["m4"]}  # as ten models come, of which six then stay


def check_many(engine: Engine, path: Path) -> str:
    """Ten small models under 55 % of their bytes: never over the budget, the pinned one stays, all answer."""
    config = EngineConfig(prefix_cache=False)
    with TemporaryDirectory() as folder, Engine(str(engine.device), budget="1GiB", config=config) as many:
        names = [f"m{i}" for i in range(10)]
        for i, name in enumerate(names):
            (Path(folder) / name).mkdir()
            write_random_model(Path(folder) / name, seed=i, **_sizes_of(i))
        sizes = {}
        for name in names:
            sizes[name] = many.add(name, Path(folder) / name, weights="f32").nbytes
            many.remove(name)
        many.budget = sum(sizes.values()) * 55 // 100
        many.events.clear()
        room: dict[str, list[str]] = {}
        for name in names:
            before = len(many.events.of("evict"))
            many.add(name, Path(folder) / name, weights="f32", pin=name == "m0")
            _expect_within(many)
            if found := sorted(event.model for event in many.events.of("evict")[before:]):
                room[name] = found
        _expect(room == MADE_ROOM, f"as the models came, made room: {room}, expected {MADE_ROOM}")
        for name in names:
            out = many.generate(name, PROMPTS[0], max_new_tokens=4, stop_at_eos=False, draft=None)
            _expect(len(out.tokens) == 4, f"{name} gave {len(out.tokens)} tokens of 4")
            _expect_within(many)
        gone = sorted(event.model for event in many.events.of("evict"))
        planned = plan(many.residency.plan_pieces(), [*names, *names], many.budget, pinned=("m0",))
        expected = sorted(one.name for one in planned.models for _ in range(one.evictions))
        _expect(gone == expected, f"{gone} made room, expected {expected}")
        return f"{sum(sizes.values()):,} bytes of weights in {many.budget:,}, {len(gone)} evictions, as planned"


def _sizes_of(number: int) -> dict[str, int]:
    """Four sizes, over and over."""
    hidden = 32 + 16 * (number % 4)
    heads = {"num_attention_heads": hidden // 16, "num_key_value_heads": 1}
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2 + number % 4}
    return sizes | heads | {"max_position_embeddings": 64}


def _expect_within(engine: Engine) -> None:
    stored = engine.ledger.total("weights")
    _expect(stored <= engine.budget, f"{stored:,} bytes of weights under a budget of {engine.budget:,}")
    _expect("m0" in engine.ledger.of("weights"), "the pinned model left the device")


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


def check_quarantine(engine: Engine, path: Path) -> str:
    """Quarantined before anything attended it: as if never seen; evicted later: not, until it is repaired."""
    first, bad, rest = (engine["one"].tokenizer.encode(prompt) for prompt in PROMPTS)
    with engine.session("one") as never, engine.session("one") as struck, engine.session("one") as late:
        never.append(first)
        expected = never.append(rest)
        struck.append(first + bad)
        struck.quarantine(slice(len(first), None))
        _expect(torch.equal(struck.append(rest), expected), "the logits differ after a quarantine")
        _expect(torch.equal(struck.pages.dump(), never.pages.dump()), "keys or values differ after a quarantine")
        seen = late.append(first + bad + rest)
        late.evict(slice(len(first), len(first) + len(bad)))
        _expect(late.is_contaminated, "a late eviction left the session clean")
        _expect(not torch.equal(seen, expected), "what was seen does not show in the logits")
        token = int(expected.argmax())
        after, unseen = late.append([token]), never.append([token])
        _expect(not torch.equal(after, unseen), "a late eviction gave the logits of a session that never saw it")
        late.repair()
        _expect(late.logits is not None and torch.equal(late.logits, unseen), "the logits differ after a repair")
        _expect(torch.equal(late.pages.dump(), never.pages.dump()), "keys or values differ after a repair")
    return f"{len(bad)} of {len(first) + len(bad) + len(rest)} tokens struck"


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


def check_adversary(engine: Engine, path: Path) -> str:
    """Drafted by an adversary that is always wrong: the same tokens, no forward more, every draft rolled back."""
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "stop_at_eos": False}
    num_drafted, distinct = 0, set[int]()
    for prompt in PROMPTS[:2]:
        plain = engine.generate("one", prompt, draft=None, **options)
        wrong = Scripted(plain.prompt_ids + plain.tokens, engine["one"].config.vocab_size, lambda at, i: True)
        drafted = engine.generate("one", prompt, draft=Draft(wrong), **options)
        _expect(drafted.tokens == plain.tokens, "an adversary changed the tokens")
        ours, theirs = drafted.metrics, plain.metrics
        _expect(ours.num_accepted == 0 < ours.num_drafted, f"{ours.num_accepted} of {ours.num_drafted} were accepted")
        forwards = ours.num_target_forwards, theirs.num_target_forwards
        _expect(forwards[0] == forwards[1], f"{forwards[0]} target forwards, plain decoding made {forwards[1]}")
        num_drafted += ours.num_drafted
        distinct |= set(plain.tokens)
    _expect(len(distinct) > 1, "all tokens are the same one, so that equal ones say nothing")
    return f"{num_drafted} wrong tokens, none accepted, {len(distinct)} distinct tokens"


def check_reload(engine: Engine, path: Path) -> str:
    """Given up and loaded again: the same logits, bit for bit."""
    prompts = [engine["one"].tokenizer.encode(PROMPTS[0])]
    before = _logits(engine, prompts)
    for name in ("one", "two"):  # what an equal model holds would not be loaded again
        engine.unload(name)
    _expect("one" not in engine.ledger.of("weights"), "unloading left bytes in the ledger")
    _expect(torch.equal(before, _logits(engine, prompts)), "the logits changed")
    return f"{engine['one'].nbytes:,} bytes given back and loaded again"


CHECKS = (
    *(check_budget, check_many, check_lane, check_company, check_chunks, check_quarantine),
    *(check_share, check_drafts, check_adversary, check_reload),
)


# ---- a model from nothing ----------------------------------------------------------------------------


@contextmanager
def _source(source: str | None) -> Iterator[Path]:
    if source is not None:
        yield resolve(source)
        return
    with TemporaryDirectory() as folder:
        write_random_model(Path(folder))
        yield Path(folder)


def write_random_model(folder: Path, seed: int = 0, **sizes: int) -> None:
    """A llama with random weights, whose tokens are bytes, as a safetensors folder; sizes are fields of its config."""
    from safetensors.torch import save_file

    vocab = {piece: i for i, piece in enumerate(BYTE_OF)} | {"<|end|>": 256}
    fields: dict[str, Any] = {
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
    } | sizes
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
