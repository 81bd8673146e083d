"""What a verdict promises: models share the layers that compute the same bits, and it names all that forbids more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny, write_tokenizer

from csrc_triton.pages import KVLayout
from polymodel import Engine, EngineConfig, Verdict, can_share
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.engine import ModelHandle
from polymodel.errors import NotShareable
from polymodel.session import Session

IDS = torch.randint(3, 300, (150,), generator=torch.Generator().manual_seed(8)).tolist()
ROPE = {"rope_type": "default", "rope_theta": 5e4}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 1e4}
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_tiny(tmp_path_factory.mktemp("verdict"), "llama"))


@pytest.fixture(scope="module")
def engine(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """m, and what differs from it in one thing, or in all of them."""

    def folder(name: str) -> Path:
        return shutil.copytree(path, tmp_path_factory.mktemp(name) / "model")

    with Engine(kv_budget="32MiB", config=EngineConfig(prefix_cache=False)) as engine:
        engine.add("m", path)
        engine.add("equal", path)
        engine.add("tokenizer", write_tokenizer(folder("tokenizer"), merges=("a b",)))
        engine.add("rope", configured(folder("rope"), rope_parameters=ROPE))
        engine.add("norm_eps", configured(folder("eps"), rms_norm_eps=1e-4))
        for layer in range(NUM_LAYERS):
            engine.add(f"bit {layer}", flipped(folder("bit"), f"model.layers.{layer}.self_attn.k_proj.weight"))
        several = configured(write_tokenizer(folder("several"), merges=("a b",)), rope_parameters=ROPE)
        engine.add("several", flipped(several, "model.layers.1.mlp.down_proj.weight"))
        yield engine


def configured(folder: Path, **fields: Any) -> Path:
    """The same weights, read otherwise."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def flipped(folder: Path, tensor: str) -> Path:
    """One bit changed, in the exponent of a weight in the middle."""
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8 : 8 + length])[tensor]["data_offsets"]
    raw[8 + length + (start + stop) // 2 + 3] ^= 1
    file.write_bytes(raw)
    return folder


def fresh(engine: Engine, model: str, **options: Any) -> Session:
    session = engine.session(model, **options)
    session.append(IDS)
    return session


def equal_layers(one: Session, other: Session) -> list[bool]:
    """For each layer, whether every key and value of all tokens is the same in both."""
    ours, theirs = one.pages.dump(), other.pages.dump()
    return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]


def with_dtype(handle: ModelHandle, dtype: torch.dtype) -> ModelHandle:
    """The model with its keys and values stored in another dtype."""
    layout: KVLayout = replace(handle.hosted.layout, dtype=dtype)
    return replace(handle, hosted=replace(handle.hosted, layout=layout))


# ---- axes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "layers", "reason"),
    [
        ("tokenizer", 0, "tokenizer: vocabularies differ"),
        ("rope", 0, "layer 0: rope "),
        ("norm_eps", 0, "norm_eps: 1e-06 against 0.0001"),
        ("bit 0", 0, "weights: layer 0 differs"),
        ("bit 1", 1, "weights: layer 1 differs"),
        ("bit 2", 2, "weights: layer 2 differs"),
    ],
)
def test_every_axis_of_a_model_is_load_bearing(engine: Engine, other: str, layers: int, reason: str) -> None:
    """One thing that differs limits the share to the layers below it, is named, and makes another key."""
    found, key = can_share(engine["m"], engine[other]), engine.lane.prefill.key
    assert can_share(engine["m"], engine["equal"]).is_full
    assert (found.layers, found.num_layers, bool(found)) == (layers, NUM_LAYERS, layers > 0)
    assert found.reason.startswith(reason) and found.failed[0] == other.split()[0].replace("bit", "weights")
    assert key("m", "default") == key("equal", "default") != key(other, "default")
    if not found:
        with pytest.raises(NotShareable, match=reason):
            engine.session(other, prefix=fresh(engine, "m"))


def test_every_axis_of_where_and_for_whom_it_runs_is_load_bearing(engine: Engine) -> None:
    """Another policy, dtype or domain shares nothing of equal weights."""
    ours = engine["m"]
    others = {
        "policy": replace(ours, policy="another"),
        "dtype": with_dtype(ours, torch.bfloat16),
        "domain": replace(ours, domain="theirs"),
    }
    assert can_share(ours, ours).is_full
    for axis, theirs in others.items():
        found = can_share(ours, theirs)
        assert (found.layers, found.proof, found.failed) == (0, "", (axis,)) and found.reason.startswith(f"{axis}: ")


def test_several_at_once_are_all_named(engine: Engine) -> None:
    """A verdict does not stop at the first axis that failed."""
    theirs = replace(with_dtype(engine["several"], torch.bfloat16), policy="another", domain="theirs")
    found = can_share(engine["m"], theirs)
    assert not found and found.failed == ("tokenizer", "policy", "dtype", "domain", "rope")
    assert [why.split(": ")[0] for why in found.reason.split("; ")] == [*found.failed[:4], "layer 0"]
    assert can_share(engine["several"], engine["m"]).failed == ("tokenizer", "rope")


# ---- what is behind a verdict ----------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["equal", "bit 0", "bit 1", "bit 2"])
def test_a_verdicts_layers_are_those_of_equal_bits(engine: Engine, other: str) -> None:
    """After the same prompt, keys and values are equal in exactly the layers that the verdict says."""
    layers = can_share(engine["m"], engine[other]).layers
    assert layers == (NUM_LAYERS if other == "equal" else int(other.split()[1]))
    assert equal_layers(fresh(engine, "m"), fresh(engine, other)) == [i < layers for i in range(NUM_LAYERS)]


def test_a_change_within_a_layer_counts_from_its_first_bit(engine: Engine, path: Path, tmp_path: Path) -> None:
    """What a layer computes after its keys and values is the next one's; the verdict is the layer that changed."""
    other = flipped(shutil.copytree(path, tmp_path / "down"), "model.layers.1.mlp.down_proj.weight")
    with Engine(kv_budget="16MiB", config=EngineConfig(prefix_cache=False)) as theirs:
        theirs.add("down", other)
        assert can_share(engine["m"], theirs["down"]).layers == 1
        assert equal_layers(fresh(engine, "m"), fresh(theirs, "down")) == [True, True, False]


def test_a_rope_counts_from_the_first_layer_that_turns_by_it(tmp_path: Path) -> None:
    """Of gemma3's two thetas the one of layer 5 differs: the layers below are shared, and their bits are equal."""
    with Engine(kv_budget="16MiB", config=EngineConfig(prefix_cache=False)) as engine:
        for name, theta in (("m", 1e6), ("other", 5e5)):
            ropes = {"sliding_attention": LOCAL_ROPE, "full_attention": {"rope_type": "default", "rope_theta": theta}}
            engine.add(name, write_tokenizer(write_tiny(tmp_path / name, "gemma3", rope_parameters=ropes)))
        found = can_share(engine["m"], engine["other"])
        assert (found.layers, found.num_layers, found.failed) == (5, 7, ("rope",))
        assert found.reason.startswith("layer 5: rope ")
        assert equal_layers(fresh(engine, "m"), fresh(engine, "other")) == [True] * 5 + [False] * 2


def test_what_is_shared_is_what_the_verdict_says(path: Path, engine: Engine) -> None:
    """A prefix goes over in as many layers as were judged equal, and gives the bits of a full prefill."""
    with Engine(kv_budget="32MiB") as sharing:
        sharing.add("m", path)
        for layers in (1, 2):
            sharing.add(f"from {layers}", perturbed(open_checkpoint(path), layers, 1))
        prefix = fresh(sharing, "m")
        for layers in (1, 2):
            assert can_share(sharing["m"], sharing[f"from {layers}"]).layers == layers
            session = sharing.session(f"from {layers}", prefix=prefix)
            assert session._context.num_token_layers == len(IDS) * (NUM_LAYERS - layers)
            with Engine(kv_budget="16MiB") as alone:
                alone.add("other", perturbed(open_checkpoint(path), layers, 1))
                never = fresh(alone, "other")
                assert torch.equal(session.pages.dump(), never.pages.dump())
                assert torch.equal(session.logits, never.logits)  # type: ignore[arg-type]


# ---- what is no hit --------------------------------------------------------------------------------------


def test_nothing_incomplete_is_a_hit(path: Path, tmp_path: Path) -> None:
    """A missing tokenizer is not any tokenizer, and layers without their hidden states are computed again."""
    shutil.copytree(path, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with Engine(kv_budget="32MiB") as engine:
        engine.add("m", path)
        engine.add("bare", tmp_path / "bare")
        engine.add("high", perturbed(open_checkpoint(path), 2, 1))
        prefix = fresh(engine, "m")
        found = can_share(engine["m"], engine["bare"])
        assert (found.layers, found.failed) == (0, ("tokenizer",))
        assert fresh(engine, "bare").num_cached == 0
        with pytest.raises(NotShareable, match="tokenizer"):
            engine.session("bare", prefix=prefix)
        resumed = engine.session("high", prefix=prefix)
        assert resumed.num_resumed == len(IDS)
        other = fresh(engine, "m", domain="other")
        assert engine.arena.drop_states() > 0
        whole = engine.session("high", prefix=other)
        assert (whole.num_resumed, whole._context.num_token_layers) == (0, len(IDS) * NUM_LAYERS)
        assert torch.equal(whole.pages.dump(), resumed.pages.dump())


@dataclass(frozen=True)
class Liar:
    """A model that shows another one's digests as its own."""

    model: ModelHandle
    band_digests: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_a_lying_digest_lifts_no_other_axis(engine: Engine) -> None:
    """Digests answer for weights and nothing else: another vocabulary, policy, dtype or domain forbids all."""

    def judged(theirs: ModelHandle) -> Verdict:
        return can_share(engine["m"], Liar(theirs, engine["m"].band_digests))

    assert judged(engine["bit 0"]).is_full, "the lie is believed where it can be"
    for theirs in (
        engine["tokenizer"],
        replace(engine["bit 0"], policy="another"),
        with_dtype(engine["bit 0"], torch.bfloat16),
        replace(engine["bit 0"], domain="theirs"),
    ):
        assert judged(theirs).layers == 0


def test_a_lying_digest_is_found_out_before_it_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower layers are taken over only after a trial gave the same bits, so digests that lie cost work and no bit."""
    with Engine(kv_budget="16MiB") as alone:
        alone.add("other", perturbed(open_checkpoint(path), 0, 1))
        never = fresh(alone, "other")
        monkeypatch.setattr("polymodel.residency.common_layers", lambda one, other: 2)
        with Engine(kv_budget="32MiB") as engine:
            engine.add("m", path)
            engine.add("other", perturbed(open_checkpoint(path), 0, 1))
            fresh(engine, "m")
            session = fresh(engine, "other")
            assert session.num_resumed == 0 and len(engine.events.of("prove")) == 1
            assert "2 with m (off: resuming at layer 2 changes bits" in str(engine.table())
            assert torch.equal(session.pages.dump(), never.pages.dump())


def test_polymodel_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """POLYMODEL=off shares nothing between models, equal ones neither; within one it still does. The tokens stay."""
    options: dict[str, Any] = {"prompt_ids": IDS, "max_new_tokens": 4, "stop_at_eos": False}
    costs = {}
    for value in ("", "off"):
        monkeypatch.setenv("POLYMODEL", value)
        with Engine(kv_budget="32MiB") as engine:
            engine.add("m", path)
            engine.add("equal", path)
            engine.add("high", perturbed(open_checkpoint(path), 2, 1))
            outputs = [engine.generate(model, draft=None, **options) for model in ("m", "equal", "high", "m")]
            costs[value] = [output.metrics.num_prefill_token_layers for output in outputs]
            tokens = [output.tokens for output in outputs]
            if value == "":
                expected = tokens
            assert tokens == expected and tokens[0] == tokens[1] == tokens[3]
    assert costs == {"": [450, 3, 150, 3], "off": [450, 450, 450, 3]}
