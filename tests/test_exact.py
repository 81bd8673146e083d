"""Bits do not depend on company: the same request alone, in a batch, in chunks, token by token and with drafts.

Compared with torch.equal are the logits and the bytes of the keys and values, whole models, as they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from smollm import demo_engine, hosted
from tiny import write_tiny
from torch import Tensor

from polymodel import Engine
from polymodel.checkpoint import open_checkpoint
from polymodel.config import EngineConfig, Weights
from polymodel.events import Events
from polymodel.kv import Arena, PageList
from polymodel.ledger import Ledger
from polymodel.model import Model, Panel, forward
from polymodel.residency import Residency

SCHEMES: tuple[Weights, ...] = ("f32", "file", "q8", "q4", "w8a8")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "even": ("llama", {"hidden_size": 128, "intermediate_size": 192}),  # every dim a multiple of 64
    "odd": ("llama", {"intermediate_size": 172}),
    "qwen2": ("qwen2", {}),
    "gemma3": ("gemma3", {"num_hidden_layers": 6}),
}
LENGTHS = (3, 64, 66, 130)  # in one page, a whole one, two, three
QUICK = [("even", "file", 3), ("even", "q8", 2), ("even", "q4", 1), ("even", "w8a8", 3)]
QUICK += [("odd", "f32", 2), ("odd", "q8", 3), ("qwen2", "file", 2), ("gemma3", "f32", 3)]
EVERY = [(name, weights, count) for name in MODELS for weights in (*SCHEMES, "bf16") for count in (1, 2, 3)]
CASES = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in EVERY]
cases = pytest.mark.parametrize(("name", "weights", "threads"), CASES, indirect=["threads"])


@dataclass
class Subject:
    """A loaded model and what a request gives alone: its prompt in one forward."""

    model: Model
    arena: Arena
    prompts: list[list[int]]
    alone: list[Tensor] = field(default_factory=list)  # logits of all rows
    kv: list[Tensor] = field(default_factory=list)  # keys and values of all rows

    def fresh(self) -> PageList:
        return PageList(self.arena, self.model.layout)

    def run(self, lists: Sequence[PageList], ids: Sequence[Sequence[int]]) -> Tensor:
        return forward(self.model, self.arena, Panel(lists, ids, "all"))

    def stored(self, pages: PageList) -> Tensor:
        """[tokens, layers, k|v, kv heads, head dim]"""
        layers = [pages.layout.view(pages.arena.bytes, i)[pages.pages] for i in range(pages.layout.num_layers)]
        tokens = torch.stack(layers).permute(1, 4, 0, 2, 3, 5).flatten(0, 1)
        return tokens[: len(pages)].clone()

    def check(self, index: int, pages: PageList, logits: Tensor) -> None:
        assert torch.equal(logits, self.alone[index]), difference(logits, self.alone[index])
        stored = self.stored(pages)
        assert torch.equal(stored, self.kv[index]), difference(stored.flatten(1), self.kv[index].flatten(1))
        pages.free()


def difference(ours: Tensor, theirs: Tensor) -> str:
    rows = (ours != theirs).any(1).nonzero().flatten().tolist()
    return f"rows {rows} differ, by {float((ours - theirs).abs().max()):.2e} at most"


def load(path: Path, weights: Weights) -> tuple[Model, Arena]:
    arena = Arena(64 << 20, 8 << 20)
    model = Residency(2 << 30, arena, Ledger(), Events()).add("m", open_checkpoint(path), weights, False).model
    assert model is not None
    return model, arena


def make_subject(model: Model, arena: Arena, lengths: Sequence[int]) -> Subject:
    random = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=random).tolist() for n in lengths]
    subject = Subject(model, arena, prompts)
    for ids in prompts:
        pages = subject.fresh()
        subject.alone.append(subject.run([pages], [ids]))
        subject.kv.append(subject.stored(pages))
        pages.free()
    return subject


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models in bfloat16, so that "file" and "f32" are two things."""
    root = tmp_path_factory.mktemp("exact")
    for name, (arch, overrides) in MODELS.items():
        shape = {"num_hidden_layers": 2, "max_position_embeddings": 1024} | overrides
        write_tiny(root / name, arch, dtype=torch.bfloat16, **shape)
    return root


@pytest.fixture(scope="module")
def made() -> dict[Any, Subject]:
    return {}


@pytest.fixture
def subject(folder: Path, made: dict[Any, Subject], name: str, weights: Weights, threads: int) -> Subject:
    """Loaded with the thread count that the test has."""
    key = name, weights, threads
    if key not in made:
        made[key] = make_subject(*load(folder / name, weights), LENGTHS)
    return made[key]


def assert_chunks(subject: Subject, index: int, size: int) -> None:
    pages, ids = subject.fresh(), subject.prompts[index]
    parts = [subject.run([pages], [ids[i : i + size]]) for i in range(0, len(ids), size)]
    subject.check(index, pages, torch.cat(parts))


@cases
def test_in_a_ragged_batch(subject: Subject) -> None:
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        lists = [subject.fresh() for _ in order]
        logits = subject.run(lists, [subject.prompts[i] for i in order])
        for i, pages, rows in zip(order, lists, logits.split([LENGTHS[i] for i in order]), strict=True):
            subject.check(i, pages, rows)


@cases
@pytest.mark.parametrize("size", [1, 7, 64])
def test_in_chunks(subject: Subject, size: int) -> None:
    assert_chunks(subject, 2 if size == 1 else 3, size)


@cases
def test_decoding_in_a_batch_that_others_join_and_leave(subject: Subject) -> None:
    """Each step appends one token to those sequences that have begun and have not ended."""
    lists, rows = [subject.fresh() for _ in LENGTHS], [[] for _ in LENGTHS]  # type: list[PageList], list[list[Tensor]]
    for i, start in enumerate((0, 41, 58, 120)):  # prefilled so far, then token by token
        if start:
            rows[i].append(subject.run([lists[i]], [subject.prompts[i][:start]]))
    for step in range(27):
        now = [i for i in range(4) if step >= i and len(lists[i]) < LENGTHS[i]]
        if now:
            logits = subject.run([lists[i] for i in now], [[subject.prompts[i][len(lists[i])]] for i in now])
            for i, row in zip(now, logits.split(1), strict=True):
                rows[i].append(row)
    for i, pages in enumerate(lists):
        subject.check(i, pages, torch.cat(rows[i]))


@cases
def test_with_drafts_that_are_rolled_back(subject: Subject) -> None:
    """Two sequences verify panels of [pending, drafts]; what is wrong from some place on is dropped."""
    lists, rows = [subject.fresh() for _ in range(2)], [[], []]  # type: list[PageList], list[list[Tensor]]
    chosen = (1, 3)
    for pages, out, i in zip(lists, rows, chosen, strict=True):
        out.append(subject.run([pages], [subject.prompts[i][:50]]))
    turn = 0
    while any(len(pages) < LENGTHS[i] for pages, i in zip(lists, chosen, strict=True)):
        now = [k for k, i in enumerate(chosen) if len(lists[k]) < LENGTHS[i]]
        panels, good = [], []
        for k in now:
            ids, at = subject.prompts[chosen[k]], len(lists[k])
            right = ids[at : at + 1 + (turn + k) % 5]
            panels.append(right + [9] * (5 - len(right)))
            good.append(len(right))
        logits = subject.run([lists[k] for k in now], panels)
        for k, count, part in zip(now, good, logits.split([5] * len(now)), strict=True):
            lists[k].rollback(5 - count)
            rows[k].append(part[:count])
        turn += 1
    for k, i in enumerate(chosen):
        subject.check(i, lists[k], torch.cat(rows[k]))


@cases
def test_after_a_clone_and_a_rollback(subject: Subject) -> None:
    pages, ids = subject.fresh(), subject.prompts[3]
    first = subject.run([pages], [ids[:100]])
    twin = pages.clone()
    subject.run([twin], [[5] * 40])
    twin.rollback(70)
    again = subject.run([twin], [ids[70:]])
    rest = subject.run([pages], [ids[100:]])
    subject.check(3, twin, torch.cat((first[:70], again)))
    subject.check(3, pages, torch.cat((first, rest)))


@cases
def test_wherever_the_pages_lie(subject: Subject) -> None:
    """Other pages, in another order, with other sequences' bytes between them."""
    blocks = [subject.fresh() for _ in range(5)]
    for pages in blocks:
        subject.run([pages], [[7] * 64])
    blocks[0].free()
    blocks[2].free()
    pages = subject.fresh()
    logits = subject.run([pages], [subject.prompts[3]])
    assert pages.pages != sorted(pages.pages)
    subject.check(3, pages, logits)
    for other in blocks:
        other.free()


@cases
def test_after_its_model_left_and_came_back(subject: Subject, folder: Path, name: str, weights: Weights) -> None:
    """A session whose model is unloaded between its verbs; its pages stay."""
    ids, config = subject.prompts[3], EngineConfig(prefix_cache=False)
    with Engine(kv_budget="16MiB", config=config) as engine, engine.lane.exclusive():
        engine.add("m", folder / name, weights=weights)
        session = engine.session("m")
        for start, stop in ((0, 70), (70, 129), (129, 130)):
            engine.unload("m")
            assert not engine.residency.is_resident("m")
            assert torch.equal(session.append(ids[start:stop]), subject.alone[3][stop - 1])
        assert torch.equal(subject.stored(session.pages), subject.kv[3])


@cases
def test_the_rows_do_differ(subject: Subject) -> None:
    """The negative control: equal garbage would be equal."""
    for logits, kv in zip(subject.alone, subject.kv, strict=True):
        assert bool(logits.isfinite().all()) and len(logits.unique(dim=0)) == len(logits)
        assert len(kv.flatten(1).unique(dim=0)) == len(kv)
    pages, ids = subject.fresh(), list(subject.prompts[3])
    ids[0] += 1 if ids[0] < 299 else -1
    changed = subject.run([pages], [ids])
    window = subject.model.config.window
    reach = 130 if window is None else 1 + (window - 1) * subject.model.config.num_layers
    assert not torch.equal(changed[min(reach, 130) - 1], subject.alone[3][min(reach, 130) - 1])
    pages.free()


CHUNKED = [("even", "f32", 2), ("odd", "q8", 3), ("even", "w8a8", 1)]


@pytest.mark.parametrize(("name", "weights", "threads"), CHUNKED, indirect=["threads"])
def test_across_the_chunk_of_keys(folder: Path, name: str, weights: Weights, threads: int) -> None:
    """512 keys are where the attention folds its running softmax."""
    subject = make_subject(*load(folder / name, weights), (530, 515))
    for size in (500, 129):
        assert_chunks(subject, 0, size)
    lists = [subject.fresh() for _ in range(2)]
    parts = subject.run(lists, [subject.prompts[0][:509], subject.prompts[1][:508]]).split((509, 508))
    rows = [[part] for part in parts]
    for at in range(7):  # token by token over the edge, two sequences on different sides of it
        step = subject.run(lists, [[subject.prompts[0][509 + at]], [subject.prompts[1][508 + at]]])
        rows[0].append(step[:1])
        rows[1].append(step[1:])
    subject.check(1, lists[1], torch.cat(rows[1]))
    rows[0].append(subject.run(lists[:1], [subject.prompts[0][516:]]))
    subject.check(0, lists[0], torch.cat(rows[0]))


@pytest.mark.demo_model
@pytest.mark.parametrize(
    "weights", ["file", *(pytest.param(other, marks=pytest.mark.slow) for other in SCHEMES if other != "file")]
)
def test_the_demo_model(demo_model_path: Path, weights: Weights) -> None:
    model = hosted(demo_model_path, weights).model
    assert model is not None
    subject = make_subject(model, demo_engine(demo_model_path).arena, (5, 12, 67))
    lists = [subject.fresh() for _ in range(3)]
    for i, (pages, rows) in enumerate(zip(lists, subject.run(lists, subject.prompts).split((5, 12, 67)), strict=True)):
        subject.check(i, pages, rows)
    pages, ids = subject.fresh(), subject.prompts[2]
    parts = [subject.run([pages], [part]) for part in (ids[:7], ids[7:60], ids[60:61], ids[61:62], ids[62:63])]
    drafted = subject.run([pages], [[*ids[63:66], 9, 9]])
    pages.rollback(2)
    parts += [drafted[:3], subject.run([pages], [ids[66:]])]
    subject.check(2, pages, torch.cat(parts))
