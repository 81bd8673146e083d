"""How far two models' prefixes are the same, from digests of the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny import write_tiny, write_tokenizer

from polymodel import Engine, Verdict, can_share
from polymodel.checkpoint import open_checkpoint
from polymodel.config import Weights
from polymodel.packing import plan_weights
from polymodel.residency import Hosted

ROPE = {"rope_type": "default", "rope_theta": 5e4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_tiny(tmp_path_factory.mktemp("share"), "llama"))


def host(path: Path, weights: Weights = "file") -> Hosted:
    """Known and not loaded: a verdict needs digests only."""
    checkpoint = open_checkpoint(path)
    plan = plan_weights(checkpoint, weights, 511)
    fields = {"layout": None} if "layout" in Hosted.__dataclass_fields__ else {}
    return Hosted("m", checkpoint, plan, 511, **fields)  # type: ignore[arg-type]


def verdict(one: Path, other: Path, weights: Weights = "file", others: Weights = "file") -> Verdict:
    found = can_share(host(one, weights), host(other, others))
    back = can_share(host(other, others), host(one, weights))
    assert (found.layers, found.num_layers, found.proof) == (back.layers, back.num_layers, back.proof)
    return found


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
    assert (found.layers, found.num_layers, found.reason) == (3, 3, "equal")
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
    assert bool(found) == (layer > 0) and not found.is_full
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
    reason = verdict(path, other).reason
    for axis in (
        "tokenizer: ",
        "layer 0: rope ",
        "norm_eps: 1e-06 against 0.0001",
        "num_kv_heads: 2 against 4",
        "weights: ",
    ):
        assert axis in reason, reason
    assert reason.count("; ") == 4


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
