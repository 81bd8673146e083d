"""The checks pass on a sound engine and fail on one that breaks its promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from csrc_triton.pages import KVLayout
from polymodel import Engine
from polymodel.engine import Request
from polymodel.kv import Arena
from polymodel.model import Model
from polymodel.prefill import Prefill
from polymodel.residency import Hosted, Residency
from polymodel.selfcheck import selfcheck, write_random_model

# forwards of a model this small only wait for a second thread
pytestmark = pytest.mark.parametrize("threads", [1], indirect=True)


def test_every_check_passes_on_a_random_model() -> None:
    checks = list(selfcheck())
    assert len(checks) == 7 and all(check.passed for check in checks), checks


def test_a_checkpoint_can_be_given(tmp_path: Path) -> None:
    write_random_model(tmp_path, seed=3)
    assert all(check.passed for check in selfcheck(str(tmp_path)))


def failed(monkeypatch: pytest.MonkeyPatch, target: type, name: str, value: object) -> Iterator[str]:
    monkeypatch.setattr(target, name, value)
    return (check.name for check in selfcheck() if not check.passed)


def test_overlapping_decodes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    names = failed(monkeypatch, Engine, "max_concurrent_decode", lambda _: 2)
    assert any("one decode at a time" in name for name in names)


def test_a_drafter_that_changes_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = Request.emit

    def garbled(self: Request, ids: list[int]) -> None:
        emit(self, [(token + 1) % 256 if self.num_drafted else token for token in ids])

    assert any("Drafted" in name for name in failed(monkeypatch, Request, "emit", garbled))


def test_layers_that_are_taken_over_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Arena.write_states

    def rounded(self: Arena, layout: KVLayout, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        write(self, layout, pages, slots, rows.bfloat16().to(rows.dtype))

    monkeypatch.setattr(Prefill, "_is_proved", lambda *_: True)
    assert any("goes on from" in name for name in failed(monkeypatch, Arena, "write_states", rounded))


def test_weights_that_change_when_loaded_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bring_in = Residency._bring_in

    def other(self: Residency, hosted: Hosted, pinned: bool) -> Model:
        model = bring_in(self, hosted, pinned)
        model.norm.mul_(hosted.num_loads)
        return model

    assert any("loaded again" in name for name in failed(monkeypatch, Residency, "_bring_in", other))
