"""Weights that models have in common: in memory once, counted once, found at `add`; and nothing left of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from tiny import write_tiny, write_tiny_gguf, write_tokenizer
from torch import Tensor

from csrc_triton.launch import kernels_on_cpu
from polymodel import residency as module
from polymodel.checkpoint import Checkpoint, open_checkpoint, perturbed
from polymodel.config import Weights
from polymodel.errors import TooLarge
from polymodel.events import Events
from polymodel.kv import Arena, PageList
from polymodel.ledger import Ledger
from polymodel.model import Model, Panel, forward
from polymodel.residency import Hosted, Residency, model_nbytes

N = 3  # layers of a tiny llama
IDS = torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(0)).tolist()
MATRICES = ("qkv", "o", "gate_up", "down")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_tiny(tmp_path_factory.mktemp("residency"), "llama"))


@pytest.fixture
def inside() -> Iterator[Residency]:
    yield (residency := new())
    residency.check()


def new(budget: int = 1 << 30, share: bool = True) -> Residency:
    return Residency(budget, Arena(16 << 20, 2 << 20), Ledger(), Events(), share=share)


def add(residency: Residency, name: str, checkpoint: Checkpoint | Path, weights: Weights = "file") -> Hosted:
    source = open_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    hosted = residency.add(name, source, weights, False)
    residency.check()
    return hosted


def sibling(path: Path, first_layer: int, seed: int = 0) -> Checkpoint:
    return perturbed(open_checkpoint(path), first_layer, seed)


class Adapted(Checkpoint):
    """Another model but for some of its tensors, as with an adapter merged into them."""

    def __init__(self, base: Checkpoint, changed: set[str]) -> None:
        super().__init__(base.path, base.format, base.config, base.metadata, dict(base._stored))
        self._changed = changed

    def raw(self, name: str) -> Tensor:
        data = super().raw(name)
        return data.clone().bitwise_xor_(1) if name in self._changed else data


def resident(hosted: Hosted) -> Model:
    assert hosted.model is not None
    return hosted.model


def run(residency: Residency, hosted: Hosted) -> tuple[Tensor, list[Tensor]]:
    """Logits of all rows, and each layer's keys and values."""
    arena = residency.arena
    pages = PageList(arena, hosted.layout)
    logits = forward(resident(hosted), arena, Panel([pages], [IDS], "all"))
    kept = [hosted.layout.view(arena.bytes, i)[pages.entries[0]].clone() for i in range(hosted.config.num_layers)]
    pages.free()
    return logits, kept


def alone(checkpoint: Checkpoint | Path, weights: Weights = "file") -> Tensor:
    residency = new()
    return run(residency, add(residency, "m", checkpoint, weights))[0]


def parts(model: Model) -> dict[str, object]:
    """Every object that a model is made of, by its piece's name."""
    found: dict[str, object] = {"embed": model.embed, "norm": model.norm, "head": model.head}
    for i, layer in enumerate(model.layers):
        for part in fields(layer):
            value = getattr(layer, part.name)
            for one in value if isinstance(value, tuple) else (value,):
                found |= {f"layers.{i}.{part.name}": one} if one is not None else {}
        found[str(model.config.layer_rope(i))] = model.ropes[i]
    return found


def common(a: Hosted, b: Hosted) -> set[str]:
    """Names of the pieces that are one object in both."""
    ours, theirs = parts(resident(a)), parts(resident(b))
    assert ours.keys() == a.plan.pieces.keys() and theirs.keys() == b.plan.pieces.keys()
    return {name for name in ours.keys() & theirs.keys() if ours[name] is theirs[name]}


def bytes_of(hosted: Hosted, names: set[str]) -> int:
    return sum(hosted.plan.pieces[name].nbytes for name in names)


def state(residency: Residency) -> object:
    """Everything there is to a residency, but for the clock of its pool."""
    hosted = {
        name: (id(h), id(h.model), h.num_loads, h.notes, dict(h.partners), h.boundaries)
        for name, h in residency.hosted.items()
    }
    pieces = {key: id(piece) for key, piece in residency._pieces.items()}
    residents = [(r.name, r.pieces, r.pinned, r.leases) for r in residency.pool._residents.values()]
    return hosted, pieces, residents, residency.pool.used, residency.ledger.of("weights")


# ---- stored once -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "weights"),
    [("llama", "file"), ("qwen2", "q8"), ("qwen3", "bf16"), ("gemma3", "q8"), ("gemma3", "f32"), ("gemma3", "w8a8")],
)
def test_equal_models_are_stored_once(inside: Residency, tmp_path: Path, arch: str, weights: Weights) -> None:
    path = write_tiny(tmp_path, arch)
    a, b = add(inside, "a", path, weights), add(inside, "b", path, weights)
    assert common(a, b) == a.plan.pieces.keys()
    nbytes = a.plan.nbytes
    assert model_nbytes(resident(a)) == model_nbytes(resident(a), resident(b)) == inside.pool.used == nbytes
    assert inside.ledger.of("weights") == {"a": nbytes}
    assert inside.shared_bytes("a") == inside.shared_bytes("b") == nbytes


@pytest.mark.parametrize("first", [0, 1, N - 1, N])
def test_siblings_store_their_changed_matrices_and_nothing_else(inside: Residency, path: Path, first: int) -> None:
    a, b = add(inside, "a", path), add(inside, "b", sibling(path, first))
    changed = {f"layers.{i}.{name}" for i in range(first, N) for name in MATRICES}
    assert common(a, b) == a.plan.pieces.keys() - changed
    assert inside.pool.used == a.plan.nbytes + bytes_of(b, changed) == model_nbytes(resident(a), resident(b))
    assert inside.shared_bytes("b") == b.plan.nbytes - bytes_of(b, changed)
    assert inside.ledger.of("weights").get("b", 0) == bytes_of(b, changed)


@pytest.mark.parametrize("first", [0, 1, N - 1, N])
def test_digests_are_equal_where_keys_and_values_are(inside: Residency, path: Path, first: int) -> None:
    a, b = add(inside, "a", path), add(inside, "b", sibling(path, first))
    (logits, ours), (others, theirs) = run(inside, a), run(inside, b)
    assert [torch.equal(x, y) for x, y in zip(ours, theirs, strict=True)] == [i < first for i in range(N)]
    assert [x == y for x, y in zip(a.band_digests, b.band_digests, strict=True)] == [i <= first for i in range(N + 1)]
    assert torch.equal(logits, others) == (first == N)
    assert_same_bits(logits, alone(path))
    assert_same_bits(others, alone(sibling(path, first)))


def test_adapters_of_the_upper_layers_store_these_alone(inside: Residency, path: Path) -> None:
    base = add(inside, "base", path)
    changed = {f"layers.{i}.{part}" for i in (1, 2) for part in "qv"}
    adapted = add(inside, "adapted", Adapted(open_checkpoint(path), changed))
    stacked = {"layers.1.qkv", "layers.2.qkv"}  # q, k and v are one matrix in memory
    assert common(base, adapted) == base.plan.pieces.keys() - stacked
    assert inside.pool.used == base.plan.nbytes + bytes_of(base, stacked)
    assert base.partners == {"adapted": 1} and adapted.boundaries == (1,)


def test_a_vector_is_a_piece_of_its_own(inside: Residency, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "qwen2")
    a, b = add(inside, "a", path), add(inside, "b", Adapted(open_checkpoint(path), {"layers.0.v_bias", "norm"}))
    assert a.plan.pieces.keys() - common(a, b) == {"layers.0.qkv_bias", "norm"}
    assert inside.pool.used == a.plan.nbytes + bytes_of(a, {"layers.0.qkv_bias", "norm"})
    assert_same_bits(run(inside, b)[0], alone(Adapted(open_checkpoint(path), {"layers.0.v_bias", "norm"})))


def test_other_formats_share_what_is_the_same_in_both(inside: Residency, path: Path) -> None:
    whole = add(inside, "file", path)
    dense = add(inside, "f32", path, "f32")
    assert common(whole, dense) == whole.plan.pieces.keys()  # the file is float32
    assert whole.band_digests == dense.band_digests
    rounded, w8a8 = add(inside, "q8", path, "q8"), add(inside, "w8a8", path, "w8a8")
    vectors = {name for name in whole.plan.pieces if "norm" in name or name.startswith("RopeConfig")}
    assert common(whole, rounded) == vectors
    assert common(rounded, w8a8) == vectors | {"embed"}
    digests = zip(rounded.band_digests, w8a8.band_digests, strict=True)
    assert [x == y for x, y in digests] == [True, False, False, False]  # one embedding, other products
    assert inside.pool.used == model_nbytes(*(resident(h) for h in inside.hosted.values()))


def test_a_tied_head_is_served_by_the_embedding_it_shares(inside: Residency, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "gemma3")
    a = add(inside, "a", path, "q8")
    b = add(inside, "b", Adapted(open_checkpoint(path), {"layers.0.o"}), "q8")
    head, embed = resident(b).head, resident(a).embed
    assert head is resident(a).head and head.parts["codes"].data_ptr() == embed.parts["codes"].data_ptr()
    before = run(inside, b)[0]
    inside.unload("a")
    assert inside.pool.used == b.plan.nbytes == model_nbytes(resident(b))
    assert_same_bits(run(inside, b)[0], before)


def test_rope_tables_of_another_length_are_others(inside: Residency, path: Path, tmp_path: Path) -> None:
    shorter = write_tokenizer(write_tiny(tmp_path, "llama", max_position_embeddings=128))
    a, b = add(inside, "a", path), add(inside, "b", shorter)
    rope = str(a.config.rope)
    assert common(a, b) == a.plan.pieces.keys() - {rope}
    assert a.partners == {"b": N} and a.boundaries == ()


def test_packed_for_kernels_weights_are_stored_once_too(inside: Residency, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q8_0", hidden_size=256, intermediate_size=256)
    with kernels_on_cpu(90):
        a = add(inside, "a", path)
        b = add(inside, "b", Adapted(open_checkpoint(path), {"layers.2.gate"}))
    assert a.plan.pieces.keys() - common(a, b) == {"layers.2.gate_up"}
    assert inside.pool.used == a.plan.nbytes + bytes_of(b, {"layers.2.gate_up"})
    assert inside.pool.used == model_nbytes(resident(a), resident(b))


def test_matrices_settled_for_other_threads_are_others(
    inside: Residency, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csrc_triton.cpu.probe", lambda *a: True)  # nothing is multiplied here
    a = add(inside, "a", path)
    torch.set_num_threads(2)
    b = add(inside, "b", path)
    assert not common(a, b) and inside.pool.used == a.plan.nbytes + b.plan.nbytes


def test_a_piece_is_as_it_settled(inside: Residency, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csrc_triton.cpu.probe", lambda *a: False)
    a, b = add(inside, "a", path), add(inside, "b", path)
    assert resident(b).layers[0].o.layout == "cpu-f32-rows" and common(a, b) == a.plan.pieces.keys()
    assert a.notes == b.notes == [f"layers.{i}.{name}" for i in range(N) for name in MATRICES] + ["head"]


# ---- coming and going --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 2, N])
@pytest.mark.parametrize("gone", ["a", "b"])
def test_giving_up_one_of_two_frees_what_is_its_own(inside: Residency, path: Path, first: int, gone: str) -> None:
    add(inside, "a", path), add(inside, "b", sibling(path, first))
    stays = inside["b" if gone == "a" else "a"]
    before, used, own = run(inside, stays)[0], inside.pool.used, inside[gone].plan.nbytes - inside.shared_bytes(gone)
    inside.unload(gone)
    inside.check()
    assert used - inside.pool.used == own and inside.pool.used == model_nbytes(resident(stays))
    assert inside.ledger.of("weights") == {stays.name: stays.plan.nbytes}
    assert inside.shared_bytes(gone) == inside.shared_bytes(stays.name) == 0
    assert_same_bits(run(inside, stays)[0], before)
    with inside.lease(gone):
        assert inside.pool.used == used == model_nbytes(*(resident(h) for h in inside.hosted.values()))
    assert len(common(inside["a"], inside["b"])) == len(stays.plan.pieces) - 4 * (N - first)


def test_a_newcomer_takes_over_what_its_victim_leaves(path: Path) -> None:
    a_alone = new()
    nbytes = add(a_alone, "a", path).plan.nbytes
    residency = new(nbytes)
    a = add(residency, "a", path)
    before = parts(resident(a))
    b = add(residency, "b", sibling(path, 2))
    assert a.model is None and residency.pool.used == nbytes
    after = parts(resident(b))
    assert {name for name in before if before[name] is not after[name]} == {f"layers.2.{name}" for name in MATRICES}
    assert_same_bits(run(residency, b)[0], alone(sibling(path, 2)))


def test_equal_models_fit_where_one_does(path: Path) -> None:
    nbytes = add(new(), "a", path).plan.nbytes
    residency = new(nbytes)
    for name in "abcd":
        add(residency, name, path)
    assert residency.pool.names() == list("abcd") and residency.pool.used == nbytes
    residency.remove("a")
    residency.check()
    assert residency.ledger.of("weights") == {"b": nbytes}
    assert residency.resize(nbytes - 1) == ["b", "c", "d"] and not residency._pieces
    residency.check()


def test_a_checkpoint_is_hashed_once(inside: Residency, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Checkpoint] = []

    def counting(checkpoint: Checkpoint) -> dict[str, str]:
        hashed.append(checkpoint)
        return digests(checkpoint)

    digests = module.tensor_digests
    monkeypatch.setattr(module, "tensor_digests", counting)
    a, b = add(inside, "a", path), add(inside, "b", sibling(path, 1))
    inside.unload("a")
    with inside.lease("a"):
        pass
    assert hashed == [a.checkpoint, b.checkpoint] and a.num_loads == 2 and a.partners == {"b": 1}


def test_what_cannot_fit_is_refused_before_a_byte_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tensor_digests", lambda checkpoint: 1 / 0)
    residency = new(1000)
    with pytest.raises(TooLarge, match=r"'a' needs [\d,]+ bytes, the whole budget is 1,000"):
        add(residency, "a", path)
    assert state(residency) == ({}, {}, [], 0, {})


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
@pytest.mark.parametrize("shares", [True, False])
def test_a_load_that_breaks_off_leaves_no_trace(
    inside: Residency, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, shares: bool
) -> None:
    a = add(inside, "a", path)
    before = state(inside)
    other = sibling(path, 1) if shares else open_checkpoint(write_tiny(tmp_path, "llama", seed=1))
    load = module._load_layer

    def breaks(checkpoint: Checkpoint, plan: Any, at: str, *rest: Any) -> Any:
        if at == "layers.1.":
            raise error
        return load(checkpoint, plan, at, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_load_layer", breaks)
        with pytest.raises(type(error)):
            inside.add("b", other, "file", False)
    inside.check()
    assert state(inside) == before
    b = add(inside, "b", other)
    assert (a.partners, b.partners) == (({"b": 1}, {"a": 1}) if shares else ({}, {}))
    assert_same_bits(run(inside, b)[0], alone(other))


def test_a_reload_that_breaks_off_leaves_the_others(
    inside: Residency, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = add(inside, "a", path), add(inside, "b", sibling(path, 2))
    inside.unload("b")
    before = state(inside)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_load_layer", lambda *rest: 1 / 0)
        with pytest.raises(ZeroDivisionError), inside.lease("b"):
            pass
    inside.check()
    assert state(inside) == before and a.partners == {"b": 2} and b.partners == {"a": 2}
    with inside.lease("b") as model:
        assert model.layers[1].o is resident(a).layers[1].o


# ---- partners ----------------------------------------------------------------------------------------


def test_partners_are_found_when_a_model_is_added_and_lost_when_one_is_removed(inside: Residency, path: Path) -> None:
    a = add(inside, "a", path)
    assert (a.partners, a.boundaries) == ({}, ())
    b, c, d = (add(inside, name, sibling(path, first)) for name, first in (("b", 1), ("c", 2), ("d", 0)))
    same = add(inside, "same", path)
    assert a.partners == {"b": 1, "c": 2, "same": 3} and a.boundaries == (1, 2)
    assert b.partners == {"a": 1, "c": 1, "same": 1} and b.boundaries == (1,)
    assert c.partners == {"a": 2, "b": 1, "same": 2} and c.boundaries == (1, 2)
    assert (d.partners, d.boundaries) == ({}, ())
    assert same.partners == {"a": 3, "b": 1, "c": 2} and same.boundaries == (1, 2)
    inside.unload("c")
    assert a.partners == {"b": 1, "c": 2, "same": 3}
    inside.remove("c")
    assert a.partners == {"b": 1, "same": 3} and a.boundaries == same.boundaries == (1,)
    inside.remove("b")
    assert (a.boundaries, same.boundaries) == ((), ()) and a.partners == {"same": 3}


def test_a_deeper_model_goes_on_from_all_layers_of_the_other(inside: Residency, path: Path, tmp_path: Path) -> None:
    deeper = write_tokenizer(write_tiny(tmp_path, "llama", num_hidden_layers=4))
    a, b = add(inside, "a", path), add(inside, "b", deeper)
    assert a.partners == {"b": 3} and b.partners == {"a": 3}
    assert a.boundaries == b.boundaries == (3,)


def test_models_of_other_vocabularies_are_no_partners(inside: Residency, path: Path, tmp_path: Path) -> None:
    words = write_tokenizer(write_tiny(tmp_path / "words", "llama"), merges=("a b",))
    bare = write_tiny(tmp_path / "bare", "llama")
    a, b, c = add(inside, "a", path), add(inside, "b", words), add(inside, "c", bare)
    assert not a.partners and not b.partners and not c.partners
    assert common(a, b) == common(a, c) == a.plan.pieces.keys()  # their weights are one nevertheless
    d = add(inside, "d", bare)
    assert c.partners == {"d": 3} and d.partners == {"c": 3}  # ids alone, and the same


def test_a_residency_that_shares_nothing_finds_no_partners(path: Path) -> None:
    residency = new(share=False)
    a, b = add(residency, "a", path), add(residency, "b", path)
    assert not a.partners and not b.partners and residency.pool.used == a.plan.nbytes
