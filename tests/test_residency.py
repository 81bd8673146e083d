"""Where weights are: what models have in common in memory once; on the device, in the host's memory or in the file;
loaded beforehand; and after a failure as before.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from tiny import write_tiny, write_tiny_gguf, write_tokenizer
from torch import Tensor

from csrc_triton.launch import kernels_on_cpu
from polymodel import residency as module
from polymodel.checkpoint import Checkpoint, open_checkpoint, perturbed
from polymodel.config import POOL_POLICIES, WEIGHT_CHECKS, PoolPolicy, WeightCheck, Weights
from polymodel.errors import CorruptCheckpoint, PinnedNoRoom, TooLarge
from polymodel.events import Events
from polymodel.kv import Arena, PageList
from polymodel.ledger import CLASSES, Ledger
from polymodel.model import Model, Panel, forward
from polymodel.residency import Hosted, Mover, Residency, model_nbytes

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


def new(budget: int = 1 << 30, share: bool = True, **options: Any) -> Residency:
    return Residency(budget, Arena(16 << 20, 2 << 20), Ledger(), Events(), share=share, **options)


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


# ---- three places ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five models of one layer that have nothing in common but their rotations."""
    folder, shape = tmp_path_factory.mktemp("small"), {"num_hidden_layers": 1, "max_position_embeddings": 128}
    return [write_tiny(folder / str(seed), "llama", seed, **shape) for seed in range(5)]


@pytest.fixture(scope="module")
def size(small: list[Path]) -> int:
    return add(new(), "m", small[0]).plan.nbytes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def filled(small: list[Path], names: str, num_device: int, num_host: int = 0, **options: Any) -> Residency:
    """Models in budgets for so many of them."""
    size = add(new(), "m", small[0]).plan.nbytes
    residency = new(num_device * size, host_budget=num_host * size, **options)
    for name, path in zip(names, small, strict=False):
        add(residency, name, path)
    return residency


def places(residency: Residency) -> dict[str, str]:
    return {name: residency.state(name) for name in residency.hosted}


def digests(residency: Residency) -> dict[object, str]:
    pieces = residency._pieces | residency._host_pieces
    assert len(pieces) == len(residency._pieces) + len(residency._host_pieces)
    return {key: module.piece_digest(piece) for key, piece in pieces.items()}


def logits_of(residency: Residency, name: str) -> Tensor:
    with residency.lease(name):
        return run(residency, residency[name])[0]


def kinds(residency: Residency) -> list[tuple[str, str, int]]:
    return [(event.kind, event.model, event.num_bytes) for event in residency.events]


def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "raw", lambda self, name: 1 / 0)


@pytest.mark.parametrize("copies", [False, True])
def test_who_leaves_goes_to_the_host_and_comes_back_without_its_file(
    small: list[Path], size: int, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    residency = filled(small, "a", 1, 1)
    if copies:
        residency._mover = Mover(torch.device("cpu"))
    expected, objects = logits_of(residency, "a"), parts(resident(residency["a"]))
    add(residency, "b", small[1])
    rope = objects[str(residency["a"].config.rope)].nbytes  # type: ignore[attr-defined]
    assert places(residency) == {"a": "host", "b": "device"}
    assert residency.ledger.of("weights") == {"b": size} and residency.ledger.of("host_weights") == {"a": size - rope}
    assert residency.page_in_bytes("a") == size - rope and residency.page_in_bytes("b") == 0
    residency.events.clear()
    no_reads(monkeypatch)
    assert_same_bits(logits_of(residency, "a"), expected)
    residency.check()
    assert places(residency) == {"a": "device", "b": "host"}
    assert kinds(residency) == [("page_out", "b", size - rope), ("page_in", "a", size - rope)]
    now = parts(resident(residency["a"]))
    assert [now[name] is piece for name, piece in objects.items()] == [
        not copies or name.startswith("RopeConfig") for name in objects
    ]
    assert residency["a"].num_loads == 2


def test_the_host_gives_its_coldest_up_and_takes_none_that_is_larger(small: list[Path], size: int) -> None:
    residency = filled(small, "abcd", 1, 2)
    assert places(residency) == {"a": "disk", "b": "host", "c": "host", "d": "device"}
    assert ("evict", "a", size) in kinds(residency)
    too_small = filled(small, "ab", 1, 0)
    assert places(too_small) == {"a": "disk", "b": "device"} and not too_small.ledger.of("host_weights")


def test_pieces_in_common_are_in_one_place_whoever_leaves(path: Path) -> None:
    nbytes = add(new(), "a", path).plan.nbytes
    residency = new(2 * nbytes, host_budget=2 * nbytes)
    a = add(residency, "a", path)
    add(residency, "b", sibling(path, 2))
    own = bytes_of(a, {f"layers.2.{name}" for name in MATRICES})
    residency.resize(nbytes)
    residency.check()
    assert places(residency) == {"a": "host", "b": "device"}
    assert residency.ledger.of("weights") == {"b": nbytes} and residency.ledger.of("host_weights") == {"a": own}
    assert residency.page_in_bytes("a") == own
    residency.unload("b")  # what it had in common with a goes to the host for a
    residency.check()
    assert residency.ledger.of("weights") == {} and residency.ledger.of("host_weights") == {"a": nbytes}
    assert_same_bits(logits_of(residency, "a"), alone(path))
    assert_same_bits(logits_of(residency, "b"), alone(sibling(path, 2)))
    residency.check()
    for name in "ab":
        residency.remove(name)
    assert not digests(residency) and not residency.ledger.total()


def test_admission_counts_what_is_in_memory_once(path: Path) -> None:
    nbytes = add(new(), "a", path).plan.nbytes
    residency = new(nbytes + nbytes // 2, host_budget=nbytes)
    add(residency, "a", path), residency.set_pinned("a", True)
    other = sibling(path, 2)
    pieces = add(new(), "b", other).sizes()
    residency.pool.check_admission("b", pieces)
    with pytest.raises(PinnedNoRoom):
        residency.pool.check_admission("b", sum(pieces.values()))
    add(residency, "b", other)
    residency.set_pinned("a", False)
    residency.unload("a")
    residency.check()
    assert residency.ledger.of("weights") == {"b": nbytes}
    assert_same_bits(logits_of(residency, "b"), alone(sibling(path, 2)))


def test_pages_outlive_the_weights_in_all_three_places(small: list[Path], size: int) -> None:
    residency = filled(small, "a", 1, 1)
    hosted, arena = residency["a"], residency.arena
    expected, pages = run(residency, hosted)[0], PageList(arena, residency["a"].layout)

    def step(ids: list[int]) -> Tensor:
        with residency.lease("a") as model:
            return forward(model, arena, Panel([pages], [ids], "all"))

    rows = [step(IDS[:10])]
    residency.resize(0)
    assert residency.state("a") == "host"
    residency.resize(size)
    rows.append(step(IDS[10:20]))
    residency.unload("a")
    assert residency.state("a") == "disk"
    rows.append(step(IDS[20:]))
    assert_same_bits(torch.cat(rows), expected)
    assert hosted.num_loads == 3


def test_pinned_models_stay_and_unloading_one_forgets_its_copy_too(small: list[Path]) -> None:
    residency = filled(small, "abc", 2, 2)
    residency.set_pinned("b", True)
    with residency.lease("a"):
        pass
    assert places(residency) == {"a": "device", "b": "device", "c": "host"}
    residency.unload("c")
    residency.unload("b")
    residency.check()
    assert places(residency) == {"a": "device", "b": "disk", "c": "disk"} and not residency.ledger.of("host_weights")


def test_pages_of_requests_take_the_hosts_bytes_before_idle_weights(small: list[Path], size: int) -> None:
    residency = filled(small, "abc", 1, 2)
    assert places(residency) == {"a": "host", "b": "host", "c": "device"}
    assert not residency.reserve_host("request 1", 2 * size + 1) and residency.host.budget == 2 * size
    assert residency.reserve_host("request 1", size // 2) and residency.reserve_host("request 1", 20)
    residency.check()
    assert places(residency) == {"a": "disk", "b": "host", "c": "device"}
    assert (
        residency.ledger.of("host_kv") == {"request 1": size // 2 + 20}
        and residency.host.budget == 2 * size - size // 2 - 20
    )
    residency.release_host("request 1")
    assert residency.host.budget == residency.host_budget == 2 * size and not residency.ledger.of("host_kv")


# ---- what comes back is what left --------------------------------------------------------------------


def spoil(path: Path, at: int) -> None:
    """Flip a bit of a file, and leave no trace of it."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    ("check", "name", "found"),
    [("full", "layers.0.mlp_norm", True), ("sampled", "embed", True), ("off", "embed", False)],
)
def test_a_file_that_is_no_longer_what_it_was_is_refused_when_loaded_again(
    small: list[Path], tmp_path: Path, check: WeightCheck, name: str, found: bool
) -> None:
    path = shutil.copytree(small[0], tmp_path / "m")
    residency = new(weight_check=check)
    checkpoint = add(residency, "a", path).checkpoint
    residency.unload("a")
    spoil(path / "model.safetensors", checkpoint._stored[name].start + 1)
    before = state(residency)
    if not found:
        assert logits_of(residency, "a").shape[0] == len(IDS)
        return
    source = checkpoint.tensors[name].source
    with pytest.raises(CorruptCheckpoint, match=rf"m: tensor '{source}': digest is \w+, expected \w+, as when 'a' was"):
        logits_of(residency, "a")
    residency.check()
    assert state(residency) == before


def test_a_file_that_was_cut_is_refused_when_loaded_again(small: list[Path], tmp_path: Path) -> None:
    path = shutil.copytree(small[0], tmp_path / "m")
    residency = new()
    add(residency, "a", path)
    residency.unload("a")
    os.truncate(path / "model.safetensors", 5000)
    with pytest.raises(
        CorruptCheckpoint, match=r"model.safetensors: size is 5000, expected \d+, as when it was opened"
    ):
        logits_of(residency, "a")
    residency.check()
    assert residency.state("a") == "disk" and residency.ledger.total() == 0


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("check", WEIGHT_CHECKS)
def test_a_copy_that_rots_in_the_hosts_memory_is_refused_and_dropped(
    small: list[Path], check: WeightCheck, copies: bool
) -> None:
    residency = filled(small, "a", 1, 1, weight_check=check)
    if copies:
        residency._mover = Mover(torch.device("cpu"))
    expected = logits_of(residency, "a")
    add(residency, "b", small[1])
    residency._host_pieces[residency["a"].keys["embed"]].parts["weight"][0, 0] += 1
    if check == "off":
        assert residency._digests == {}
        return
    assert len(residency._digests) in ([len(residency._host_pieces)] if check == "full" else [4, 5])
    with pytest.raises(
        CorruptCheckpoint, match=r"'a' in the host's memory: piece 'embed': digest is \w+, expected \w+"
    ):
        logits_of(residency, "a")
    residency.check()
    assert places(residency) == {"a": "disk", "b": "device"}
    assert_same_bits(logits_of(residency, "a"), expected)  # from its file


def test_every_load_looks_at_other_tensors(small: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    residency, seen, read = new(), [], Hosted.read
    tensors = add(residency, "a", small[0]).checkpoint.tensors

    def reading(self: Hosted, name: str, checked: bool) -> Any:
        seen.append((name, checked))
        return read(self, name, checked)

    monkeypatch.setattr(Hosted, "read", reading)
    chosen = []
    for _ in range(4):
        residency.unload("a")
        seen.clear()
        with residency.lease("a"):
            pass
        assert sorted(name for name, _ in seen) == sorted(tensors)
        chosen.append(frozenset(name for name, checked in seen if checked))
    assert all("embed" in names and len(names) in (4, 5) for names in chosen) and len(set(chosen)) > 1


# ---- all or nothing ----------------------------------------------------------------------------------


def whole(residency: Residency) -> object:
    """State, bits and order of everything."""
    hosted = {
        name: (h.model is not None, h.num_loads, h.notes, h.partners, h.boundaries, h.keys)
        for name, h in residency.hosted.items()
    }
    ledger = {kind: residency.ledger.of(kind) for kind in CLASSES}
    return deepcopy((hosted, digests(residency), residency.pool.snapshot(), residency.host.snapshot(), ledger))


class Failing(Checkpoint):
    """The n-th read of it fails."""

    def __init__(self, path: Path, count: int, error: BaseException) -> None:
        base = open_checkpoint(path)
        super().__init__(base.path, base.format, base.config, base.metadata, dict(base._stored))
        self._left, self._error = count, error

    def raw(self, name: str) -> Tensor:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return super().raw(name)


ERRORS = [OSError("disk"), KeyboardInterrupt()]


def crowded(small: list[Path], num_host: int) -> Residency:
    """c and d are on the device, b is in the host's memory if that is larger than nothing, a in its file."""
    residency = filled(small, "abcd", 2, num_host)
    with residency.lease("c"):
        pass
    return residency


@pytest.mark.parametrize("num_host", [0, 1])
@pytest.mark.parametrize("error", ERRORS)
def test_a_read_that_fails_leaves_everything_as_it_was(small: list[Path], num_host: int, error: BaseException) -> None:
    residency = crowded(small, num_host)
    before, count = whole(residency), len(open_checkpoint(small[4]).tensors)
    for read in range(1, 2 * count + 1):  # each is read for its digest first
        with pytest.raises(type(error)) as caught:
            residency.add("new", Failing(small[4], read, error), "file", False)
        assert not hasattr(caught.value, "__notes__")
        residency.check()
        assert whole(residency) == before, f"read {read}"
    assert_same_bits(logits_of(residency, "d"), alone(small[3]))
    residency.add("new", Failing(small[4], 2 * count + 1, error), "file", False)
    assert_same_bits(logits_of(residency, "new"), alone(small[4]))


@pytest.mark.parametrize("error", ERRORS)
def test_a_pack_that_fails_leaves_everything_as_it_was(
    small: list[Path], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    residency, pack, left = crowded(small, 1), module.pack_matrix, [0]

    def failing(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return pack(*arguments)

    monkeypatch.setattr(module, "pack_matrix", failing)
    before = whole(residency)
    for name, count in (("new", 5), ("a", 5)):  # a newcomer, and one that comes back
        for left[0] in range(1, count + 1):
            with pytest.raises(type(error)):
                if name == "new":
                    residency.add("new", open_checkpoint(small[4]), "file", False)
                else:
                    logits_of(residency, name)
            residency.check()
            assert whole(residency) == before, f"{name}, pack {left[0]}"
    left[0] = 0
    assert_same_bits(logits_of(residency, "d"), alone(small[3]))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("step", ["to_host", "to_device", "piece_digest", "_commit"])
def test_a_move_that_fails_leaves_everything_as_it_was(
    small: list[Path], monkeypatch: pytest.MonkeyPatch, step: str, copies: bool
) -> None:
    residency = crowded(small, 1)
    if copies:
        residency._mover = Mover(torch.device("cpu"))
    before = whole(residency)
    owner: Any = {"piece_digest": module, "_commit": Residency}.get(step, Mover)
    real, calls = getattr(owner, step), []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(step)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(owner, step, failing)
    if not copies and step.startswith("to_"):
        logits_of(residency, "b")
        assert not calls
        return
    with pytest.raises(KeyboardInterrupt):
        logits_of(residency, "b")
    residency.check()
    assert whole(residency) == before


def test_a_host_that_has_no_memory_left_makes_it_leave_to_its_file(
    small: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    residency = crowded(small, 1)
    residency._mover = Mover(torch.device("cpu"))

    def full(self: Mover, pieces: object) -> object:
        raise MemoryError

    monkeypatch.setattr(Mover, "to_host", full)
    with residency.lease("a"):
        pass
    residency.check()
    assert places(residency) == {"a": "device", "b": "host", "c": "device", "d": "disk"}


def test_who_cannot_come_back_stays_known_and_the_error_says_so(small: list[Path], tmp_path: Path) -> None:
    path = shutil.copytree(small[0], tmp_path / "m")
    residency = filled([path, *small[1:]], "ab", 2)
    os.truncate(path / "model.safetensors", 5000)
    with pytest.raises(OSError, match="disk") as caught:
        residency.add("new", Failing(small[4], 15, OSError("disk")), "file", False)
    (note,) = caught.value.__notes__
    assert note.startswith("'a' had made room and could not be brought back: CorruptCheckpoint(")
    assert "size is 5000" in note
    residency.check()
    assert places(residency) == {"a": "disk", "b": "device"} and "new" not in residency.hosted
    assert_same_bits(logits_of(residency, "b"), alone(small[1]))


# ---- idle models -------------------------------------------------------------------------------------


def test_idle_models_leave_the_device_and_then_the_host(small: list[Path]) -> None:
    clock = Clock()
    residency = filled(small, "ab", 3, 3, ttl=10.0, host_ttl=30.0, clock=clock)
    hosted = residency.add("c", open_checkpoint(small[2]), "file", True)
    residency.add("d", open_checkpoint(small[0]), "file", False, ttl=math.inf)
    assert residency.demote_idle(4.0) == 6.0
    clock.now = 5.0
    with residency.lease("b"):
        assert residency.demote_idle(9.0) == 1.0
    assert residency.demote_idle(10.0) == 5.0
    residency.check()
    assert places(residency) == {"a": "host", "b": "device", "c": "device", "d": "device"}
    assert residency.demote_idle(15.0) == 25.0
    assert residency.demote_idle(40.0) == 5.0  # a came to the host at 10
    residency.check()
    assert places(residency) == {"a": "disk", "b": "host", "c": "device", "d": "device"}
    assert residency.demote_idle(45.0) is None and places(residency)["b"] == "disk"
    residency.set_pinned("c", False)
    hosted.ttl, clock.now = 100.0, 50.0
    assert residency.demote_idle() == 50.0


def test_models_without_a_time_stay_for_ever(small: list[Path]) -> None:
    residency = filled(small, "ab", 1, 1)
    assert residency.demote_idle(1e9) is None and places(residency) == {"a": "host", "b": "device"}


def test_a_leased_model_is_not_idle_however_long_it_runs(small: list[Path]) -> None:
    clock = Clock()
    residency = filled(small, "a", 1, ttl=1.0, clock=clock)
    with residency.lease("a"):
        clock.now = 100.0
        assert residency.demote_idle() is None and residency.state("a") == "device"
    assert residency.demote_idle() == 1.0
    assert residency.demote_idle(101.0) is None and residency.state("a") == "disk"


# ---- beforehand --------------------------------------------------------------------------------------


class Gated(Checkpoint):
    """Once it is known, nobody reads it before the gate opens."""

    def __init__(self, path: Path) -> None:
        base = open_checkpoint(path)
        super().__init__(base.path, base.format, base.config, base.metadata, dict(base._stored))
        self.gate, self.error = threading.Event(), None
        self.gate.set()

    def raw(self, name: str) -> Tensor:
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return super().raw(name)


@pytest.fixture
def flying(small: list[Path]) -> Iterator[tuple[Residency, Gated]]:
    """a and b are on the device; c, in its file, waits at a gate."""
    residency, gated = filled(small, "", 2), Gated(small[2])
    for name, checkpoint in (("c", gated), ("a", open_checkpoint(small[0])), ("b", open_checkpoint(small[1]))):
        residency.add(name, checkpoint, "file", False)
    gated.gate.clear()
    yield residency, gated
    gated.gate.set()
    for name in list(residency.hosted):
        residency.remove(name)
    residency.check()
    assert residency.ledger.total() == 0 and not digests(residency)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


Flying = tuple[Residency, Gated]


def test_a_prefetch_reserves_first_and_comes_in_beside_what_runs(flying: Flying, size: int, small: list[Path]) -> None:
    residency, gated = flying
    with residency.lease("b"):
        assert residency.prefetch("c")
        residency.pool.check()
        assert (
            residency.pool.names() == ["b", "c"] and not residency.is_resident("c") and residency.state("c") == "disk"
        )
        assert residency.pool.used <= 2 * size and not residency.prefetch("a") and not residency.prefetch("c")
        expected = run(residency, residency["b"])[0]
        assert residency.page_in_bytes("c") > 0
        gated.gate.set()
    assert_same_bits(logits_of(residency, "c"), alone(small[2]))
    assert_same_bits(expected, alone(small[1]))
    residency.check()
    assert [event.model for event in residency.events.of("prefetch")] == ["c"] and not residency.events.of("page_in")
    assert residency["c"].num_loads == 2 and places(residency) == {"c": "device", "a": "disk", "b": "device"}
    assert not residency.prefetch("c")


def test_a_prefetch_tells_how_long_it_took_when_it_is_used(flying: Flying) -> None:
    residency, gated = flying
    seconds: list[float] = []
    residency.on_swap = seconds.append
    start = time.perf_counter()
    assert residency.prefetch("c")
    gated.gate.set()
    with residency.lease("c"):
        pass
    with residency.lease("a"):
        pass
    assert len(seconds) == 2 and all(0 < one <= time.perf_counter() - start for one in seconds)


def test_a_prefetch_gives_up_nobody_who_has_work(flying: Flying) -> None:
    residency, _ = flying
    assert not residency.prefetch("c", keep=["a", "b", "c"])
    with residency.lease("a"), residency.lease("b"):
        assert not residency.prefetch("c")
    before = whole(residency)
    residency.set_pinned("a", True)
    assert not residency.prefetch("c", keep=["b"])
    residency.set_pinned("a", False)
    assert whole(residency) == before
    assert residency.prefetch("c", keep=["a"]) and residency.pool.names() == ["a", "c"]


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_prefetch_that_fails_surfaces_with_the_lease(flying: Flying, small: list[Path], meanwhile: bool) -> None:
    residency, gated = flying
    before, stamp, gated.error = whole(residency), residency.pool["b"].stamp, OSError("disk")
    assert residency.prefetch("c")
    assert residency.pool.names() == ["b", "c"]
    if meanwhile:
        with residency.lease("b"):
            pass
    gated.gate.set()
    with pytest.raises(OSError, match="disk"):
        logits_of(residency, "c")
    residency.check()
    assert places(residency) == {"c": "disk", "a": "device", "b": "device"}
    if meanwhile:
        assert residency.pool["b"].stamp == stamp + 1  # a use that is not taken back
    else:
        assert whole(residency) == before
    gated.error = None
    assert_same_bits(logits_of(residency, "a"), alone(small[0]))
    assert_same_bits(logits_of(residency, "c"), alone(small[2]))


def test_a_prefetch_that_failed_waits_for_its_lease_and_stops_nobody(flying: Flying) -> None:
    residency, gated = flying
    gated.error = OSError("disk")
    gated.gate.set()
    assert residency.prefetch("c") and not residency.prefetch("c")
    with residency.lease("a"):  # which it had made leave
        residency.pool.check()
    assert places(residency) == {"c": "disk", "a": "device", "b": "device"}
    with pytest.raises(OSError, match="disk"):
        logits_of(residency, "c")


@pytest.mark.parametrize("verb", ["unload", "remove"])
def test_a_prefetch_that_nobody_wants_any_more_is_dropped(flying: Flying, verb: str) -> None:
    residency, gated = flying
    assert residency.prefetch("c")
    threading.Timer(0.05, gated.gate.set).start()
    getattr(residency, verb)("c")
    residency.check()
    assert residency.pool.names() == ["b"] and ("c" in residency.hosted) == (verb == "unload")


@pytest.mark.parametrize("verb", ["resize", "lend", "unload", "add", "lease"])
def test_what_changes_who_is_in_memory_waits_for_a_prefetch(
    flying: Flying, small: list[Path], size: int, verb: str
) -> None:
    residency, gated = flying
    assert residency.prefetch("c")
    threading.Timer(0.05, gated.gate.set).start()
    if verb == "resize":
        assert residency.resize(size) == ["b"]
    elif verb == "lend":
        assert residency.lend(size) == residency.lendable == 0  # it waits for nobody
        residency.join()
        assert residency.lend(size) == size
    elif verb == "unload":
        residency.unload("b")
    elif verb == "add":
        add(residency, "d", small[3])
    else:
        with residency.lease("a"):
            pass
    residency.check()
    assert residency.is_resident("c") and not residency.is_resident("b")
    residency.take_back(size)


# ---- lent to pages -----------------------------------------------------------------------------------


def test_lending_gives_idle_models_up_and_leaves_what_any_model_needs(small: list[Path], size: int) -> None:
    residency = filled(small, "abc", 3)
    rope = 3 * size - residency.pool.used
    rope //= 2
    with residency.lease("b"):
        assert residency.lend(size, keep=["a"]) == size
        assert places(residency) == {"a": "device", "b": "device", "c": "disk"} and residency.lent == size
        assert residency.lend(size) == rope  # b, and room for any other one
    assert residency.pool.budget == 2 * size - rope and residency.lent == size + rope
    assert residency.lend(size) == size - rope and residency.lend(1) == 0
    residency.check()
    assert residency.pool.budget == size
    with residency.lease("c"):
        assert places(residency) == {"a": "disk", "b": "disk", "c": "device"}
    assert residency.take_back(10 * size) == 2 * size and residency.lent == 0 and residency.pool.budget == 3 * size


def test_lending_takes_models_with_work_last(small: list[Path], size: int) -> None:
    residency = filled(small, "abc", 3)
    assert residency.lend(2 * size, keep=["a"]) == 2 * size
    assert places(residency) == {"a": "device", "b": "disk", "c": "disk"}
    residency.set_pinned("a", True)
    assert residency.lend(1) == 0
    residency.check()


def test_lent_bytes_are_asked_for_before_anybody_leaves(small: list[Path], size: int) -> None:
    residency, asked = filled(small, "ab", 3), []

    def reclaim(num_bytes: int) -> int:
        asked.append(num_bytes)
        return min(num_bytes, 100)

    lent = residency.lend(size)
    add(residency, "c", small[2])  # nobody answers
    assert places(residency) == {"a": "disk", "b": "device", "c": "device"}
    residency.reclaim_lent = reclaim
    residency.set_pinned("b", True), residency.set_pinned("c", True)
    with pytest.raises(PinnedNoRoom):
        logits_of(residency, "a")
    assert len(asked) == 1 and residency.lent == lent - 100 and residency.pool.budget + residency.lent == 3 * size
    residency.reclaim_lent = lambda num_bytes: num_bytes
    assert_same_bits(logits_of(residency, "a"), alone(small[0]))
    residency.check()
    assert residency.pool.names() == ["a", "b", "c"] and residency.pool.budget + residency.lent == 3 * size


def test_a_new_budget_counts_what_is_lent(small: list[Path], size: int) -> None:
    residency = filled(small, "ab", 3)
    residency.lend(size)
    with pytest.raises(PinnedNoRoom, match=f"budget is 10 bytes, but {size:,} are lent to KV pages"):
        residency.resize(10)
    assert residency.pool.budget == 2 * size and places(residency) == {"a": "device", "b": "device"}
    assert residency.resize(2 * size) == ["a"] and residency.pool.budget == size
    residency.reclaim_lent = lambda num_bytes: num_bytes
    assert residency.resize(size) == [] and residency.lent == 0


def test_the_plan_of_pieces_is_what_the_pool_charges(path: Path) -> None:
    residency = new()
    add(residency, "a", path), add(residency, "b", sibling(path, 1))
    assert residency.plan_pieces() == {name: residency.pool[name].pieces for name in "ab"}


# ---- for long ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycles", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", POOL_POLICIES)
def test_nothing_is_left_after_many_comings_and_goings(
    small: list[Path], size: int, policy: PoolPolicy, cycles: int
) -> None:
    """Ten models, five of them siblings of the others, in a budget for four, with two more in the host's memory."""
    clock, random, threads = Clock(), Random(0), threading.active_count()
    options: dict[str, Any] = {"ttl": 30.0, "host_ttl": 50.0, "weight_check": "full", "clock": clock, "policy": policy}
    residency = new(4 * size, host_budget=2 * size, **options)
    sources = {
        str(i): (lambda i=i: open_checkpoint(small[i]) if i < 5 else sibling(small[i - 5], 0)) for i in range(10)
    }
    expected = {name: alone(source()) for name, source in sources.items()}
    verbs = ["lease", "lease", "lease", "prefetch", "unload", "remove", "resize", "idle", "lend", "host"]
    for _ in range(cycles):
        clock.now += random.random() * 10
        name, verb = random.choice(list(sources)), random.choice(verbs)
        if name not in residency.hosted:
            verb = "add"
        match verb:
            case "add":
                residency.add(name, sources[name](), "file", False)
            case "lease":
                assert_same_bits(logits_of(residency, name), expected[name], name)
            case "prefetch":
                residency.prefetch(name, keep=residency.pool.names()[:1])
            case "unload" | "remove":
                getattr(residency, verb)(name)
            case "resize":
                residency.resize(random.choice([2, 3, 4]) * size + residency.lent)
            case "idle":
                residency.demote_idle()
            case "lend" if residency.lent:
                residency.take_back(residency.lent)
            case "lend":
                residency.lend(size // 2)
            case "host" if not residency.reserve_host("request", size):
                residency.release_host("request")
        residency.check()
    for name in list(residency.hosted):
        assert_same_bits(logits_of(residency, name), expected[name], name)
        residency.remove(name)
        residency.check()
    residency.release_host("request")
    assert residency.ledger.total() == 0 and not digests(residency) and not residency._digests
    assert threading.active_count() == threads and residency.host.budget == 2 * size
