"""The checks pass on a sound engine and fail on one that breaks its promise."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from csrc_triton.pages import KVLayout
from polymodel import Engine
from polymodel import selfcheck as checks
from polymodel.engine import Request
from polymodel.kv import Arena
from polymodel.model import Model
from polymodel.pool import Pool
from polymodel.prefill import Prefill
from polymodel.residency import Hosted, Residency
from polymodel.selfcheck import Scripted, selfcheck, write_random_model
from polymodel.session import Session

# forwards of a model this small only wait for a second thread
pytestmark = pytest.mark.parametrize("threads", [1], indirect=True)


def test_every_check_passes_on_a_random_model() -> None:
    found = list(selfcheck())
    assert len(found) == 10 and all(check.passed for check in found), found


def test_a_checkpoint_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model(tmp_path, seed=3)
    only(monkeypatch, "company")
    assert all(check.passed for check in selfcheck(str(tmp_path)))


def test_a_scripted_drafter_is_wrong_where_it_is_told_to_be() -> None:
    known = [3, 9, 4, 0]
    always = Scripted(known, 10, lambda at, i: True)
    assert [always.propose(known[:n], 3) for n in (1, 2, 4)] == [[0, 5, 1], [5, 1], []]
    assert Scripted(known, 10, lambda at, i: at == 2).propose(known[:1], 3) == [9, 5, 0]
    assert Scripted(known, 10, lambda at, i: i == 1).propose(known[:1], 2) == [9, 5]


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Run these checks, after that of the budget, which makes room for them."""
    chosen = [getattr(checks, f"check_{name}") for name in ("budget", *names)]
    monkeypatch.setattr(checks, "CHECKS", [check for check in checks.CHECKS if check in chosen])


def failed(monkeypatch: pytest.MonkeyPatch, target: type, name: str, value: object, *names: str) -> list[str]:
    """Names of the checks that fail, of those that are named, with something else in a part's place."""
    only(monkeypatch, *names)
    monkeypatch.setattr(target, name, value)
    return [check.name for check in selfcheck() if not check.passed]


def test_overlapping_decodes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    names = failed(monkeypatch, Engine, "max_concurrent_decode", lambda _: 2, "lane")
    assert any("one decode at a time" in name for name in names)


def test_a_pinned_model_that_makes_room_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Pool.admit

    def unpinned(self: Pool, name: str, weights: int | dict[Hashable, int], pinned: bool = False) -> list[str]:
        return admit(self, name, weights, False)

    assert any("the pinned one stays" in name for name in failed(monkeypatch, Pool, "admit", unpinned, "many"))


def test_a_pool_that_gives_up_the_latest_first_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is the same pool's, so what is known of the ten models decides."""
    latest = lambda self, resident: (0.0, -resident.stamp, resident.name)  # noqa: E731
    assert any("Ten small models" in name for name in failed(monkeypatch, Pool, "_rank", latest, "many"))


def test_any_error_fails_its_check_and_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Session, ids: list[int]) -> Tensor:
        raise ZeroDivisionError("in a kernel")

    only(monkeypatch, "chunks", "reload")
    monkeypatch.setattr(Session, "append", broken)
    found = list(selfcheck())
    assert [check.passed for check in found] == [True, False, True]
    assert found[1].detail == "ZeroDivisionError: in a kernel"


def test_every_engine_of_the_checks_is_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "many")
    begin, devices = Engine.__init__, []

    def noted(self: Engine, device: str = "auto", *args: Any, **options: Any) -> None:
        devices.append(device)
        begin(self, device, *args, **options)

    monkeypatch.setattr(Engine, "__init__", noted)
    assert all(check.passed for check in selfcheck(device="cpu")) and devices == ["cpu"] * 3


def test_a_quarantine_that_leaves_a_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    quarantine = Session.quarantine

    def short(self: Session, span: slice) -> None:
        quarantine(self, slice(span.start + 1, span.stop))

    assert any("as if never seen" in name for name in failed(monkeypatch, Session, "quarantine", short, "quarantine"))


def test_an_eviction_that_cleans_by_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a session that repairs at once equals one that never saw the span, and the check says so."""
    evict = Session.evict

    def repaired(self: Session, span: slice) -> None:
        evict(self, span)
        self.repair()

    assert any("evicted later: not" in name for name in failed(monkeypatch, Session, "evict", repaired, "quarantine"))


def test_a_drafter_that_changes_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = Request.emit

    def garbled(self: Request, ids: list[int]) -> None:
        emit(self, [(token + 1) % 256 if self.num_drafted else token for token in ids])

    names = failed(monkeypatch, Request, "emit", garbled, "drafts", "adversary")
    assert any("4-bit twin" in name for name in names) and any("adversary" in name for name in names)


def test_layers_that_are_taken_over_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Arena.write_states

    def rounded(self: Arena, layout: KVLayout, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        write(self, layout, pages, slots, rows.bfloat16().to(rows.dtype))

    monkeypatch.setattr(Prefill, "_is_proved", lambda *_: True)
    assert any("goes on from" in name for name in failed(monkeypatch, Arena, "write_states", rounded, "share"))


def test_weights_that_change_when_loaded_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bring_in = Residency._bring_in

    def other(self: Residency, hosted: Hosted, pinned: bool) -> Model:
        model = bring_in(self, hosted, pinned)
        model.norm.mul_(hosted.num_loads)
        return model

    assert any("loaded again" in name for name in failed(monkeypatch, Residency, "_bring_in", other, "reload"))
