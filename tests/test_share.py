"""How far two models' prefixes are the same, from digests of the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import pytest
from tiny import write_tiny, write_tiny_gguf, write_tokenizer

from polymodel import Engine, Verdict, can_share
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.config import KVKey, ModelConfig, Weights
from polymodel.errors import InvalidRequest
from polymodel.packing import plan_weights
from polymodel.residency import Hosted
from polymodel.share import band_digest, common_layers, kv_key, rope_digest, tensor_digests

ROPE = {"rope_type": "default", "rope_theta": 5e4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_tiny(tmp_path_factory.mktemp("share"), "llama"))


def host(path: Path, weights: Weights = "file") -> Hosted:
    """Known and not loaded: a verdict needs digests only."""
    checkpoint = open_checkpoint(path)
    plan = plan_weights(checkpoint, weights, 511)
    return Hosted("m", checkpoint, plan, 511, None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Shown:
    """A hosted model as an engine shows it."""

    hosted: Hosted
    policy: str = "policy"
    kv_dtype: str = "float32"
    domain: str = "default"
    name: str = "m"

    @property
    def config(self) -> ModelConfig:
        return self.hosted.config

    @property
    def vocab_digest(self) -> str:
        return self.hosted.vocab_digest

    @property
    def band_digests(self) -> tuple[str, ...]:
        return self.hosted.band_digests


def judge(one: Shown, other: Shown) -> Verdict:
    """The verdict, which is the same both ways, and agrees with the number that `add` finds."""
    found, back = can_share(one, other), can_share(other, one)
    assert (found.layers, found.num_layers, found.proof) == (back.layers, back.num_layers, back.proof)
    assert found.failed == back.failed and bool(found.failed) == (found.reason != "equal")
    if not {"policy", "dtype", "domain"} & set(found.failed):
        assert common_layers(one, other) == found.layers
    return found


def verdict(one: Path, other: Path, weights: Weights = "file", others: Weights = "file") -> Verdict:
    return judge(Shown(host(one, weights)), Shown(host(other, others)))


def flipped(path: Path, folder: Path, tensor: str) -> Path:
    """A copy with the lowest bit of one byte of a tensor changed."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8 : 8 + length])[tensor]["data_offsets"]
    raw[8 + length + (start + stop) // 2] ^= 1
    file.write_bytes(raw)
    return folder


def test_a_model_shares_all_layers_with_its_equal(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy")
    found = verdict(path, tmp_path / "copy")
    assert (found.layers, found.num_layers, found.reason, found.failed) == (3, 3, "equal", ())
    assert found and found.is_full
    assert found.proof == host(path).band_digests[3]


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("part", ["self_attn.k_proj", "mlp.down_proj", "input_layernorm"])
def test_one_changed_bit_limits_the_share_to_the_layers_below(
    path: Path, tmp_path: Path, layer: int, part: str
) -> None:
    other = flipped(path, tmp_path / "other", f"model.layers.{layer}.{part}.weight")
    found = verdict(path, other)
    assert (found.layers, found.num_layers, found.reason) == (layer, 3, f"weights: layer {layer} differs")
    assert bool(found) == (layer > 0) and not found.is_full and found.failed == ("weights",)
    assert found.proof == (host(path).band_digests[layer] if layer else "")


def test_the_embedding_is_below_every_layer(path: Path, tmp_path: Path) -> None:
    found = verdict(path, flipped(path, tmp_path / "other", "model.embed_tokens.weight"))
    assert not found and found.reason == "weights: the embeddings, or how they are stored, differ"


@pytest.mark.parametrize("tensor", ["model.norm.weight", "lm_head.weight"])
def test_what_lies_above_the_layers_does_not_matter(path: Path, tmp_path: Path, tensor: str) -> None:
    found = verdict(path, flipped(path, tmp_path / "other", tensor))
    assert found.is_full and found.reason == "equal"


def test_a_deeper_model_shares_with_its_lower_part(path: Path, tmp_path: Path) -> None:
    deeper = write_tokenizer(write_tiny(tmp_path / "deeper", "llama", num_hidden_layers=4))
    found = verdict(path, deeper)  # the same seed gives the same lower layers
    assert (found.layers, found.num_layers, found.reason) == (3, 3, "equal")
    assert len(host(deeper).band_digests) == 5


def test_another_weights_option_is_another_model(path: Path) -> None:
    found = verdict(path, path, "q8", "file")
    assert not found and found.reason == "weights: the embeddings, or how they are stored, differ"
    assert verdict(path, path, "q8", "q8").is_full


def test_another_rope_is_named(path: Path, tmp_path: Path) -> None:
    other = write_tokenizer(write_tiny(tmp_path / "other", "llama", rope_parameters=ROPE))
    found = verdict(path, other)
    assert not found and found.reason.startswith("layer 0: rope ") and "weights" not in found.reason
    assert "10000.0" in found.reason and "50000.0" in found.reason


def test_another_tokenizer_forbids_all(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "other")
    write_tokenizer(tmp_path / "other", merges=("a b",))
    found = verdict(path, tmp_path / "other")
    assert (found.layers, found.proof, found.reason) == (0, "", "tokenizer: vocabularies differ")


def test_every_axis_that_failed_is_named(path: Path, tmp_path: Path) -> None:
    other = write_tiny(
        tmp_path / "other", "llama", seed=1, rope_parameters=ROPE, rms_norm_eps=1e-4, num_key_value_heads=4
    )
    write_tokenizer(other, merges=("a b",))
    theirs = Shown(host(other), "another", "bfloat16", "theirs")
    found = judge(Shown(host(path)), theirs)
    reason = found.reason
    for axis in (
        "tokenizer: ",
        "policy: 'policy' against 'another'",
        "dtype: 'float32' against 'bfloat16'",
        "domain: 'default' against 'theirs'",
        "layer 0: rope ",
        "norm_eps: 1e-06 against 0.0001",
        "num_kv_heads: 2 against 4",
        "weights: ",
    ):
        assert axis in reason, reason
    assert reason.count("; ") == 7
    assert found.failed == ("tokenizer", "policy", "dtype", "domain", "num_kv_heads", "norm_eps", "rope", "weights")


@pytest.mark.parametrize(
    ("axis", "reason"),
    [
        ({"policy": "b"}, "policy: 'policy' against 'b'"),
        ({"kv_dtype": "bfloat16"}, "dtype: 'float32' against 'bfloat16'"),
        ({"domain": "b"}, "domain: 'default' against 'b'"),
    ],
)
def test_where_and_for_whom_a_model_runs_forbids_all(path: Path, axis: dict[str, str], reason: str) -> None:
    ours = Shown(host(path))
    found = judge(ours, replace(ours, **axis))  # type: ignore[arg-type]
    name = "dtype" if "kv_dtype" in axis else next(iter(axis))
    assert (found.layers, found.proof, found.reason, found.failed) == (0, "", reason, (name,))


@pytest.mark.parametrize(
    ("overrides", "failed"),
    [
        ({"rope_parameters": ROPE}, ("rope",)),
        ({"rms_norm_eps": 1e-4}, ("norm_eps", "weights")),
        ({"num_key_value_heads": 4}, ("num_kv_heads", "weights")),
    ],
)
def test_a_scalar_that_differs_is_an_axis_by_its_name(
    path: Path, tmp_path: Path, overrides: dict[str, object], failed: tuple[str, ...]
) -> None:
    found = verdict(path, write_tokenizer(write_tiny(tmp_path / "other", "llama", **overrides)))
    assert not found and found.failed == failed


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": 1e-4}, {"rope_parameters": ROPE}, {"head_dim": 32, "num_attention_heads": 2}]
)
def test_the_same_bytes_that_compute_something_else_share_nothing(
    path: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    shutil.copytree(path, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    change = change | ({"num_key_value_heads": 1} if "head_dim" in change else {})
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    ours, theirs = host(path).band_digests, host(tmp_path / "other").band_digests
    assert not set(ours[1:]) & set(theirs)
    assert not verdict(path, tmp_path / "other")


def test_what_the_layers_do_not_read_changes_no_digest(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    change = {"max_position_embeddings": 128, "eos_token_id": 7}
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert host(path).band_digests == host(tmp_path / "other").band_digests


def test_a_window_counts_from_the_first_layer_that_has_it(tmp_path: Path) -> None:
    def qwen(name: str, **overrides: object) -> Path:
        shape = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        return write_tokenizer(write_tiny(tmp_path / name, "qwen2", **shape | overrides))

    one = qwen("one")
    found = verdict(one, qwen("wider", sliding_window=16))
    assert (found.layers, found.reason) == (1, "layer 1: window 8 against 16")
    found = verdict(one, qwen("later", max_window_layers=2))
    assert (found.layers, found.reason) == (1, "layer 1: window 8 against None")


def test_digests_grow_from_the_embedding_up(path: Path) -> None:
    digests = host(path).band_digests
    assert len(digests) == 4 == len(set(digests))


def test_hosted_models_tell_their_digests(path: Path, tmp_path: Path) -> None:
    with Engine(kv_budget="16MiB") as engine:
        one = engine.add("one", path)
        two = engine.add("two", flipped(path, tmp_path / "other", "model.layers.2.self_attn.q_proj.weight"))
        assert can_share(one, two).layers == 2 and can_share(one, one).is_full


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_siblings_share_the_layers_below_the_first_that_changed(path: Path, first: int) -> None:
    ours = host(path)
    theirs = sibling(ours, first)
    found = judge(Shown(ours), Shown(theirs))
    assert (found.layers, found.is_full) == (first, first == 3)
    assert found.failed == (() if first == 3 else ("weights",))
    assert found.proof == (band_digest(ours, first) if first else "") and len(found.proof) == (32 if first else 0)


def sibling(hosted: Hosted, first_layer: int) -> Hosted:
    return Hosted("s", perturbed(hosted.checkpoint, first_layer, 0), hosted.plan, 511, hosted.layout)


def test_a_band_digest_is_of_so_many_layers(path: Path) -> None:
    hosted = host(path)
    assert [band_digest(hosted, n) for n in range(4)] == list(hosted.band_digests)
    for num_layers in (-1, 4):
        with pytest.raises(InvalidRequest, match=rf"num_layers={num_layers}, expected 0\.\.3"):
            band_digest(hosted, num_layers)


def test_a_tensor_digest_covers_kind_shape_and_bytes(path: Path, tmp_path: Path) -> None:
    ours = tensor_digests(open_checkpoint(path))
    assert ours.keys() == open_checkpoint(path).tensors.keys() and len(set(ours.values())) == len(ours)
    other = tensor_digests(open_checkpoint(flipped(path, tmp_path / "other", "model.layers.1.self_attn.k_proj.weight")))
    assert [name for name in ours if ours[name] != other[name]] == ["layers.1.k"]
    checkpoint = open_checkpoint(path)
    checkpoint.tensors["layers.0.q"] = replace(checkpoint.tensors["layers.0.q"], kind="F16")
    checkpoint.tensors["norm"] = replace(checkpoint.tensors["norm"], shape=(2, 32))
    others = tensor_digests(checkpoint)
    assert [name for name in ours if ours[name] != others[name]] == ["norm", "layers.0.q"]


def test_how_one_layers_matrix_is_multiplied_counts_from_this_layer(path: Path) -> None:
    hosted = host(path)
    matrices = hosted.plan.matrices
    for name, layer in (("layers.1.down", 1), ("layers.2.qkv", 2)):
        for change in ({"scheme": "i8"}, {"fmt": "q8"}):
            changed = matrices | {name: replace(matrices[name], **change)}
            other = Hosted("o", hosted.checkpoint, replace(hosted.plan, matrices=changed), 511, hosted.layout)
            assert common_layers(hosted, other) == layer
    other = Hosted("o", hosted.checkpoint, replace(hosted.plan, embed_fmt="q8"), 511, hosted.layout)
    assert not set(hosted.band_digests) & set(other.band_digests)


def test_another_architecture_is_told_by_its_scalars_alone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = host(write_tokenizer(write_tiny(tmp_path / "other", "qwen3")))
    monkeypatch.setattr(Hosted, "band_digests", property(lambda self: 1 / 0))
    assert common_layers(host(path), other) == 0


# ---- keys --------------------------------------------------------------------------------------------


def test_a_key_names_all_that_decides_keys_and_values(path: Path) -> None:
    hosted = host(path)
    key = kv_key(hosted, "policy", "domain")
    rope = rope_digest(hosted.config)
    assert key == KVKey(hosted.band_digests[-1], hosted.vocab_digest, rope, "policy", "domain")
    assert all(len(part) == 32 for part in (key.band, key.tokenizer, key.rope))


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda path, folder: flipped(path, folder, "model.layers.2.mlp.up_proj.weight"), ["band"]),
        (lambda path, folder: flipped(path, folder, "lm_head.weight"), []),
        (lambda path, folder: write_tokenizer(shutil.copytree(path, folder), merges=("a b",)), ["tokenizer"]),
        (lambda path, folder: write_tokenizer(write_tiny(folder, "llama", rope_parameters=ROPE)), ["band", "rope"]),
        (lambda path, folder: write_tokenizer(write_tiny(folder, "llama", head_dim=32)), ["band", "rope"]),
        (lambda path, folder: write_tiny(folder, "llama"), ["tokenizer"]),
    ],
)
def test_keys_differ_in_the_field_that_differs(
    path: Path, tmp_path: Path, make: Callable[[Path, Path], Path], fields: list[str]
) -> None:
    ours, theirs = kv_key(host(path), "p", "d"), kv_key(host(make(path, tmp_path / "other")), "p", "d")
    assert ours.differences(theirs) == fields


def test_a_checkpoint_without_a_tokenizer_has_a_key_for_its_ids(tmp_path: Path) -> None:
    bare, without = write_tiny(tmp_path / "bare", "llama"), write_tiny_gguf(tmp_path / "m.gguf", "llama")
    for found in (host(bare), host(without)):
        assert kv_key(found, "p", "d").tokenizer == ""
    (tmp_path / "bare" / "tokenizer.json").write_text("{")
    assert kv_key(host(bare), "p", "d").tokenizer == ""
    assert verdict(bare, bare).is_full


def test_ropes_of_windowed_layers_are_in_the_digest(tmp_path: Path) -> None:
    config = open_checkpoint(write_tiny(tmp_path, "gemma3")).config
    assert config.rope_local is not None
    others = [
        replace(config, rope_local=replace(config.rope_local, theta=5.0)),
        replace(config, rope=replace(config.rope, factor=2.0)),
        replace(config, head_dim=16),
        replace(config, windowed_layers=(False,) * config.num_layers),
    ]
    digests = [rope_digest(one) for one in (config, *others)]
    assert all(a != b for a, b in combinations(digests, 2))
    assert rope_digest(replace(config, norm_eps=1.0, max_context=7)) == digests[0]
