"""What a session promises about its keys and values: each docstring is a promise, its test the proof.

Equal means every bit of every layer's keys and values, the logits, and the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny, write_tokenizer
from torch import Tensor

from polymodel import Engine, EngineConfig
from polymodel.errors import InvalidRequest
from polymodel.model import forward
from polymodel.session import Session

LAYERS = {"llama": 3, "mistral": 3, "qwen3": 3, "gemma3": 7}
# nothing remembers what a token attended: one layer, or one that sees the token alone below one of another theta
SHALLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 1": ("llama", {}),
    "mistral 1": ("mistral", {}),
    "qwen3 1": ("qwen3", {}),
    "gemma3 1 local": ("gemma3", {"layer_types": ["sliding_attention"]}),
    "gemma3 2": (
        "gemma3",
        {"num_hidden_layers": 2, "sliding_window": 1, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
IDS = torch.randint(3, 300, (200,), generator=torch.Generator().manual_seed(8)).tolist()
PREFIX, POISON, QUERY = IDS[:70], IDS[70:90], IDS[90:100]
every_model = pytest.mark.parametrize("model", LAYERS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """All models; it caches nothing, so each run computes everything."""
    with Engine(kv_budget="32MiB", config=EngineConfig(prefix_cache=False)) as engine:
        for arch in LAYERS:
            engine.add(arch, new_model(tmp_path_factory, arch))
        for name, (arch, fields) in SHALLOW.items():
            engine.add(name, new_model(tmp_path_factory, arch, seed=1, **{"num_hidden_layers": 1, **fields}))
        yield engine
        engine.arena.check()


def new_model(tmp_path_factory: pytest.TempPathFactory, arch: str, **fields: Any) -> Path:
    return write_tokenizer(write_tiny(tmp_path_factory.mktemp(arch), arch, **fields))


def fresh(engine: Engine, model: str, ids: list[int]) -> Session:
    """A session that saw these tokens and no others."""
    session = engine.session(model)
    session.append(ids)
    return session


def logits(session: Session) -> Tensor:
    assert session.logits is not None
    return session.logits


def keys_and_values(session: Session, layer: int) -> Tensor:
    """[2, kv heads, tokens, head dim], in the order of the tokens; keys as stored, turned by their slots."""
    page, slot = session.pages.places(0, len(session))
    view = session.pages.layout.view(session.pages.arena.bytes, layer)
    return view[page, :, :, slot].movedim(0, 2)


def assert_equal(one: Session, other: Session, more: int = 1) -> None:
    """Equal now, and for some tokens more, which both sessions have afterwards."""
    assert one.tokens == other.tokens
    assert torch.equal(one.pages.dump(), other.pages.dump())
    assert torch.equal(logits(one), logits(other))
    assert [one.step() for _ in range(more)] == [other.step() for _ in range(more)]
    assert torch.equal(logits(one), logits(other))


def num_computed(engine: Engine, act: Callable[[], object]) -> int:
    """Prompt tokens that went through a forward meanwhile."""
    engine.events.clear()
    act()
    return sum(event.tokens for event in engine.events.of("prefill"))


# ---- clone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_clone_independent(engine: Engine, model: str) -> None:
    """Neither of two clones can ever see what the other one does, though they begin in the same pages."""
    parent = fresh(engine, model, IDS[:100])
    twin = parent.clone()
    assert twin.pages.pages == parent.pages.pages
    before = parent.pages.dump()
    twin.append(IDS[120:150])
    assert torch.equal(parent.pages.dump(), before) and not torch.equal(twin.pages.dump()[:, :2], before)
    parent.append(IDS[100:110])
    assert_equal(parent, fresh(engine, model, IDS[:110]))
    assert_equal(twin, fresh(engine, model, IDS[:100] + IDS[120:150]))


def test_clone_reserve(engine: Engine) -> None:
    """Room made in a clone changes neither its length nor its contents, and is there when it is needed."""
    parent = fresh(engine, "llama", IDS[:70])
    twin, before = parent.clone(), parent.pages.dump()
    twin.pages.reserve(100)
    assert (len(twin.pages), twin.pages.reserved, len(twin.pages.pages)) == (70, 100, 3)
    assert torch.equal(twin.pages.dump(), before) and torch.equal(parent.pages.dump(), before)
    used = engine.arena.num_pages_used
    twin.append(IDS[70:170])
    assert engine.arena.num_pages_used == used
    assert_equal(twin, fresh(engine, "llama", IDS[:170]))
    assert_equal(parent, fresh(engine, "llama", IDS[:70]))


# ---- evict -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [slice(-1, 3), slice(5, 4), slice(0, 101), slice(101, None)])
def test_evict_bounds(engine: Engine, span: slice) -> None:
    """A span that is not there is refused with the bounds, an empty one does nothing, and both change no bit."""
    session = fresh(engine, "llama", IDS[:100])
    entries, before = session.pages.entries.tolist(), session.pages.dump()
    with pytest.raises(
        InvalidRequest, match=r"the session has 100 tokens, expected a slice with 0 <= start <= stop <= 100"
    ):
        session.evict(span)
    session.evict(slice(40, 40))
    assert session.pages.entries.tolist() == entries and torch.equal(session.pages.dump(), before)
    assert session.tokens == IDS[:100] and not session.is_contaminated


@every_model
def test_evict_tail_equals_never_saw(engine: Engine, model: str) -> None:
    """Evicting the last tokens, before anything attended them, is never having seen them."""
    session, never = fresh(engine, model, PREFIX + POISON), fresh(engine, model, PREFIX)
    assert not torch.equal(logits(session), logits(never))
    session.evict(slice(len(PREFIX), None))
    assert not session.is_contaminated
    assert_equal(session, never)


@every_model
def test_evict_middle_moves_no_key(engine: Engine, model: str) -> None:
    """Evicting a page in the middle writes no byte of the survivors.

    Below all attention, in layer 0, their keys are those of a session that never saw the page; above, they remember.
    """
    session, never = fresh(engine, model, IDS[:150]), fresh(engine, model, IDS[:64] + IDS[128:150])
    before = [keys_and_values(session, layer) for layer in range(LAYERS[model])]
    session.evict(slice(64, 128))
    assert session.tokens == never.tokens and session.clean == 64
    for layer, seen in enumerate(before):
        assert torch.equal(keys_and_values(session, layer), torch.cat((seen[:, :, :64], seen[:, :, 128:]), dim=2))
        assert torch.equal(keys_and_values(session, layer), keys_and_values(never, layer)) is (layer == 0)


@pytest.mark.parametrize("model", SHALLOW)
@pytest.mark.parametrize(
    ("start", "stop", "length"), [(64, 128, 130), (0, 64, 70), (0, 1, 7), (63, 65, 68), (137, 141, 144), (2, 140, 145)]
)
def test_evict_middle_single_rotation(engine: Engine, model: str, start: int, stop: int, length: int) -> None:
    """Survivors stand at their new positions as if they had been written there, whatever the layer's theta.

    Where nothing remembers the span, the next token's logits are those of a session that never saw it: bit for bit
    after whole pages, else but for the rounding of keys that stay in their old slots.
    """
    session, rest = fresh(engine, model, IDS[:length]), IDS[:start] + IDS[stop:length]
    kept, never = session.clone(), fresh(engine, model, rest)
    session.evict(slice(start, stop))
    for one in (session, kept, never):
        one.append([IDS[150]])
    error, scale = (logits(session) - logits(never)).abs().max(), logits(never).abs().max()
    assert error == 0 if start % 64 == stop % 64 == 0 else error < 2e-6 * scale
    assert (logits(kept) - logits(never)).abs().max() > 1e-3 * scale, "the span did not matter"


@every_model
def test_evict_too_late_differs(engine: Engine, model: str) -> None:
    """Evicting what later tokens attended is not never having seen it, and the session says from where."""
    session, never = fresh(engine, model, PREFIX + POISON + QUERY), fresh(engine, model, PREFIX + QUERY)
    session.evict(slice(len(PREFIX), len(PREFIX) + len(POISON)))
    assert session.tokens == never.tokens
    assert session.is_contaminated and session.receipt()["contaminated"] == "from token 70"
    for one in (session, never):
        one.append(IDS[100:104])
    assert not torch.equal(logits(session), logits(never))


@every_model
def test_repair(engine: Engine, model: str) -> None:
    """Repairing computes again what attended the span, and no more; then the session equals one that never saw it."""
    session = fresh(engine, model, PREFIX + POISON + QUERY)
    session.evict(slice(len(PREFIX), len(PREFIX) + len(POISON)))
    assert num_computed(engine, session.repair) == len(QUERY)
    assert not session.is_contaminated and num_computed(engine, session.repair) == 0
    assert_equal(session, fresh(engine, model, PREFIX + QUERY))


@every_model
def test_quarantine_equals_never_saw(engine: Engine, model: str) -> None:
    """Tokens quarantined as soon as they were written change nothing that follows, though kept they would."""
    session, poisoned = fresh(engine, model, PREFIX), fresh(engine, model, PREFIX + POISON + QUERY)
    session.append(POISON)
    session.quarantine(slice(len(PREFIX), None))
    session.append(QUERY)
    never = fresh(engine, model, PREFIX + QUERY)
    assert poisoned.generate(8) != never.clone().generate(8)
    assert_equal(session, never, more=8)


# ---- reuse -----------------------------------------------------------------------------------------------


@every_model
def test_prefix_reuse_equals_recompute(engine: Engine, model: str) -> None:
    """A clone of a prefix and then the suffix is the full prefill, and computes the suffix alone."""
    prefix, other = fresh(engine, model, PREFIX), fresh(engine, model, POISON)
    reuse = engine.session(model, prefix=prefix)
    for session in (clone := prefix.clone(), reuse):
        assert num_computed(engine, lambda session=session: session.append(QUERY)) == len(QUERY)  # type: ignore[misc]
    other.append(QUERY)
    assert not torch.equal(logits(other), logits(clone))
    assert_equal(clone, fresh(engine, model, PREFIX + QUERY), more=8)
    assert_equal(reuse, fresh(engine, model, PREFIX + QUERY))
    assert prefix.tokens == PREFIX


def test_non_prefix_refused(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A span computed after one context is no hit after another, nor after none: its keys are not the same."""
    a, b, c = IDS[:64], IDS[64:128], IDS[128:192]
    after_a, after_c = (keys_and_values(fresh(engine, "llama", before + b), 1)[:, :, 64:] for before in (a, c))
    assert not torch.equal(after_a, after_c)
    with Engine(kv_budget="16MiB") as cached:
        cached.add("llama", new_model(tmp_path_factory, "llama"))
        cached.session("llama").append(a + b)
        for ids, num_cached in ((b, 0), (c + b, 0), (a + b, 127)):
            session = cached.session("llama")
            session.append(ids)
            assert session.num_cached == num_cached
            assert_equal(session, fresh(engine, "llama", ids))


# ---- provisional -----------------------------------------------------------------------------------------


def test_no_provisional_span_outlives_its_generation(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round writes in a span of its own, and none is open afterwards, drafted or not, also where a round fails."""
    open_spans: list[int] = []

    def watched(*args: Any) -> Tensor:
        open_spans.append(engine.lane.num_open_spans)
        if len(open_spans) > 6:
            raise OSError("broken")
        return forward(*args)

    options: dict[str, Any] = {"prompt_ids": IDS[:30], "max_new_tokens": 12, "stop_at_eos": False}
    session = fresh(engine, "llama", IDS[:30])
    expected = session.generate(12)
    assert session.num_open_spans == engine.lane.num_open_spans == 0
    drafted = engine.submit("llama", draft="qwen3", **options)
    engine.wait(drafted)
    assert drafted.output == expected and drafted.num_drafted > 0
    monkeypatch.setattr("polymodel.lane.forward", watched)
    failing = engine.submit("llama", draft="qwen3", **options)
    with pytest.raises(OSError, match="broken"):
        engine.wait(failing)
    assert open_spans == [1] * 7
    assert [request.spans.num_open for request in (drafted, failing)] == [0, 0] and engine.lane.num_open_spans == 0


def test_a_provisional_span_left_open_equals_never_saw(engine: Engine) -> None:
    """What is written in a span that nobody promotes is forgotten without a trace."""
    session = fresh(engine, "llama", PREFIX)
    with session.provisional():
        session.append(POISON)
        session.generate(4)
        assert session.num_open_spans == 1 and len(session) == 94
    assert session.num_open_spans == 0
    assert_equal(session, fresh(engine, "llama", PREFIX))
