"""Saved sessions: every byte comes back, and a file that is not whole, or not ours, is named and refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from csrc_triton.pages import KVLayout
from polymodel import session_file
from polymodel.config import KVKey
from polymodel.errors import CorruptSession, InvalidRequest, NotShareable
from polymodel.session_file import FIELDS, SavedSession, read_session, write_session

KEY = KVKey("band", "tokenizer", "rope", "policy", "alice")
LAYOUT = KVLayout(2, 1, 16, torch.float16, pages_per_superblock=3)
VOCAB = 1000


def data_of(num_tokens: int, layout: KVLayout = LAYOUT) -> Tensor:
    return torch.randint(0, 256, (layout.num_layers, -(-num_tokens // 64), layout.block_bytes), dtype=torch.uint8)


def saved(path: Path, num_tokens: int = 70, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (num_tokens,)).tolist()
    write_session(path, KEY, LAYOUT, tokens, data_of(num_tokens), torch.randn(VOCAB))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return saved(tmp_path / "one.session")


def read(path: Path, key: KVKey = KEY, layout: KVLayout = LAYOUT, vocab_size: int = VOCAB) -> SavedSession:
    return read_session(path, key, layout, vocab_size)


def rewrite(path: Path, change: Callable[[dict[str, str], dict[str, Tensor]], object], *, signed: bool = True) -> None:
    """Change what the file says; its digest follows if it is signed."""
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    change(metadata, tensors)
    if signed and metadata.pop("digest", None):
        metadata["digest"] = session_file._digest(metadata, tensors)
    save_file(tensors, path, metadata)


def refused(path: Path, *words: str, error: type[Exception] = CorruptSession, **other: Any) -> None:
    with pytest.raises(error) as caught:
        read(path, **other)
    assert all(word in str(caught.value) for word in (str(path), *words)), caught.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("num_tokens", "has_logits"), [(1, True), (64, False), (65, True), (200, True)])
def test_a_session_comes_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, num_tokens: int, has_logits: bool
) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    tokens, data = [(7 * i) % VOCAB for i in range(num_tokens)], data_of(num_tokens, layout)
    logits = torch.tensor([0.0, -0.0, float("inf"), 1e-45, 3.25]).repeat(VOCAB // 5) if has_logits else None
    write_session(tmp_path / "a", KEY, layout, tokens, data, logits)
    got = read_session(str(tmp_path / "a"), KEY, layout, VOCAB)
    assert got.tokens == tokens and torch.equal(got.data, data)
    assert got.layout == replace(layout, pages_per_superblock=1)
    if logits is None:
        assert got.logits is None
    else:
        assert got.logits is not None and torch.equal(got.logits.view(torch.int32), logits.view(torch.int32))


def test_the_domain_is_saved_as_a_digest(file: Path) -> None:
    key = read(file).key
    assert key.differences(KEY) == ["domain"] and len(key.domain) == 32
    assert b"alice" not in file.read_bytes()


def test_what_is_read_does_not_change_with_the_file(file: Path) -> None:
    got = read(file)
    before = got.data.clone()
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(got.data, before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": []}, ["no tokens"]),
        ({"tokens": [5, -1]}, ["-1..5"]),
        ({"tokens": [1 << 31]}, ["2147483648"]),
        ({"data": torch.zeros(2, 2, LAYOUT.block_bytes, dtype=torch.uint8)}, ["[2, 2, 4096]", "[2, 1, 4096]"]),
        ({"data": torch.zeros(2, 1, LAYOUT.block_bytes, dtype=torch.int8)}, ["torch.int8"]),
        ({"logits": torch.zeros(VOCAB, dtype=torch.float16)}, ["torch.float16"]),
        ({"logits": torch.zeros(1, VOCAB)}, ["[1, 1000]"]),
        ({"logits": torch.zeros(0)}, ["[0]"]),
    ],
)
def test_a_wrong_session_is_not_written(file: Path, change: dict[str, Any], words: list[str]) -> None:
    before = file.read_bytes()
    session: dict[str, Any] = {"tokens": [1, 2, 3], "data": data_of(3), "logits": None} | change
    with pytest.raises(InvalidRequest) as caught:
        write_session(file, KEY, LAYOUT, **session)
    assert all(word in str(caught.value) for word in words), caught.value
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be written"):
        saved(tmp_path / "nowhere" / "a")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        saved(tmp_path)
    refused(tmp_path / "nowhere" / "a", "cannot be read", error=InvalidRequest)
    refused(tmp_path, "cannot be read", error=InvalidRequest)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("bug"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", ["save_file", "half", "fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: BaseException
) -> None:
    before = file.read_bytes()

    def crash(*args: object) -> None:
        if at == "half":
            Path(str(args[1])).write_bytes(b"half")
        raise error

    monkeypatch.setattr(f"os.{at}" if at in ("fsync", "replace") else "polymodel.session_file.save_file", crash)
    with pytest.raises(InvalidRequest if isinstance(error, OSError) else type(error)):
        saved(file, seed=1)
    monkeypatch.undo()
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]
    saved(file, seed=1)
    assert file.read_bytes() != before and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_changed_or_missing_field_is_refused(file: Path, field: str) -> None:
    whole = file.read_bytes()
    rewrite(file, lambda metadata, _: metadata.update({field: "0"}), signed=False)
    refused(file, field if field in ("format", "version", "num_tokens", "num_layers", "block_bytes") else "digest")
    file.write_bytes(whole)
    rewrite(file, lambda metadata, _: metadata.pop(field), signed=False)
    refused(file, field)
    file.write_bytes(whole)
    rewrite(file, lambda metadata, _: metadata.update({field + "s": "0"}), signed=False)
    refused(file, f"unknown fields is ['{field}s']")


def test_an_unknown_version_is_named_before_its_fields(file: Path) -> None:
    rewrite(file, lambda metadata, _: metadata.update(version="2", more="fields"))
    refused(file, "version is '2', expected '1'")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m, t: t.pop("tokens"), ["list of tensors is ['data', 'logits'], expected tokens, data"]),
        (lambda m, t: t.pop("data"), ["list of tensors is ['logits', 'tokens']"]),
        (lambda m, t: t.update(extra=torch.zeros(1)), ["list of tensors is ['data', 'extra'"]),
        (lambda m, t: t.update(tokens=t["tokens"].long()), ["tokens is 'I64 [70]', expected I32 with 1 sizes"]),
        (lambda m, t: t.update(tokens=t["tokens"][None]), ["tokens is 'I32 [1, 70]'"]),
        (
            lambda m, t: t.update(tokens=t["tokens"][:0], data=t["data"][:, :0]),
            ["data is 'U8 [2, 0, 4096]'", "none of them 0"],
        ),
        (lambda m, t: t.update(tokens=t["tokens"][1:]), ["num_tokens is '70', expected 69"]),
        (lambda m, t: m.update(num_tokens="070"), ["num_tokens is '070', expected 70"]),
        (lambda m, t: m.update(num_tokens="-1"), ["num_tokens is '-1', expected 70"]),
        (lambda m, t: t.update(data=t["data"].view(torch.int8)), ["data is 'I8 [2, 2, 4096]', expected U8"]),
        (lambda m, t: t.update(data=t["data"][:, :1].clone()), ["pages of data is 1, expected 2 for 70 tokens"]),
        (lambda m, t: t.update(data=t["data"][:1].clone()), ["num_layers is '2', expected 1"]),
        (lambda m, t: t.update(data=t["data"][..., 1:].clone()), ["block_bytes is '4096', expected 4095"]),
        (lambda m, t: t.update(logits=t["logits"].double()), ["logits is 'F64 [1000]', expected F32"]),
        (lambda m, t: t.update(logits=t["logits"][1:]), ["shape of logits is [999], expected [1000]"]),
        (lambda m, t: t["tokens"].__setitem__(69, VOCAB), ["token 69 is 1000, expected an id in 0..999"]),
        (lambda m, t: t["tokens"].__setitem__(3, -1), ["token 3 is -1"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_signed_file_that_contradicts_itself_is_refused(
    file: Path, change: Callable[[dict[str, str], dict[str, Tensor]], object], words: list[str]
) -> None:
    rewrite(file, change)
    refused(file, *words)


def test_a_file_of_other_tensors_is_not_a_session(file: Path) -> None:
    save_file({"weight": torch.zeros(3)}, file)
    refused(file, "list of tensors is ['weight']")
    save_file({"tokens": torch.zeros(3), "data": torch.zeros(3)}, file)
    refused(file, "format is None, expected 'polymodel session'")


def test_logits_taken_out_are_missed(file: Path) -> None:
    rewrite(file, lambda _, tensors: tensors.pop("logits"), signed=False)
    refused(file, "digest")


def test_a_truncated_file_is_refused_wherever_it_ends(file: Path) -> None:
    whole = file.read_bytes()
    size, header = len(whole), 8 + int.from_bytes(whole[:8], "little")
    ends = {*range(0, header + 9, 7), 7, 8, header - 1, header, header + 1, *range(header, size, 997), size - 1}
    for end in sorted(ends):
        file.write_bytes(whole[:end])
        refused(file, "not a whole safetensors file")
    file.write_bytes(whole)
    assert len(read(file).tokens) == 70


@pytest.mark.parametrize("extra", [b"\0", b"x" * 4096])
def test_trailing_bytes_are_refused(file: Path, extra: bytes) -> None:
    file.write_bytes(file.read_bytes() + extra)
    refused(file, "not a whole safetensors file")


def test_a_flipped_bit_is_found_wherever_it_is(file: Path) -> None:
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    bits = [8 * at + (at * 5 + 3) % 8 for at in range(header)]
    bits += range(8 * header, 8 * len(whole), 997)
    for bit in bits:
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        refused(file)


def headed(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


HUGE = 1 << 60


@pytest.mark.parametrize(
    "content",
    [
        b"",
        HUGE.to_bytes(8, "little") + b"{}",
        b"\xff" * 64,
        headed({}),
        headed([]),
        headed(b"[" * 100_000),
        headed({"__metadata__": {"format": 1}}),
        headed({"__metadata__": None, "tokens": None}),
        headed({"data": {"dtype": "U8", "shape": [HUGE], "data_offsets": [0, HUGE]}}),
        headed({"data": {"dtype": "U8", "shape": [HUGE, 1 << 8], "data_offsets": [0, 0]}}),
        headed({"data": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"1"),
        headed({"data": {"dtype": "U8", "shape": [2], "data_offsets": [2, 0]}}, b"12"),
        headed({"data": {"dtype": "U9", "shape": [2], "data_offsets": [0, 2]}}, b"12"),
        headed(
            {
                "__metadata__": {"format": "polymodel session", "version": "1"},
                "data": {"dtype": "U8", "shape": [HUGE, 0, 4], "data_offsets": [0, 0]},
                "tokens": {"dtype": "F8_E8M0", "shape": [0, HUGE], "data_offsets": [0, 0]},
            }
        ),
        headed(
            {
                "__metadata__": dict.fromkeys(sorted(FIELDS), str(HUGE))
                | {"format": "polymodel session", "version": "1"},
                "data": {"dtype": "U8", "shape": [HUGE, 0, 4], "data_offsets": [0, 0]},
                "tokens": {"dtype": "I32", "shape": [HUGE], "data_offsets": [0, 4]},
            },
            b"1234",
        ),
    ],
    ids=lambda content: repr(content[8:60]),
)
def test_a_header_that_lies_fails_fast(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    start = time.perf_counter()
    refused(tmp_path / "a")
    assert time.perf_counter() - start < 1


AXES = ["band", "tokenizer", "rope", "policy", "domain"]


@pytest.mark.parametrize("axes", [*([axis] for axis in AXES), ["band", "domain"], ["tokenizer", "rope"], AXES])
def test_every_axis_that_differs_is_named(file: Path, axes: list[str]) -> None:
    with pytest.raises(NotShareable) as caught:
        read(file, replace(KEY, **dict.fromkeys(axes, "foreign")))
    named = str(caught.value).partition("saved with another ")[2]
    assert [axis for axis in (*AXES, *session_file.GEOMETRY) if f"{axis} (" in named] == axes
    assert "foreign" in named or axes == ["domain"]
    assert "alice" not in named


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 3}, ["num_layers ('2', here '3')"]),
        ({"num_kv_heads": 2}, ["num_kv_heads ('1', here '2')", "block_bytes ('4096', here '8192')"]),
        ({"head_dim": 8}, ["head_dim ('16', here '8')"]),
        ({"dtype": torch.bfloat16}, ["dtype ('float16', here 'bfloat16')"]),
    ],
)
def test_another_geometry_is_refused(file: Path, change: dict[str, Any], named: list[str]) -> None:
    refused(file, *named, error=NotShareable, layout=replace(LAYOUT, **change))
    refused(
        file, "policy (", *named, error=NotShareable, key=replace(KEY, policy="x"), layout=replace(LAYOUT, **change)
    )


def test_pages_may_lie_elsewhere_in_the_arena(file: Path) -> None:
    layout = replace(LAYOUT, pages_per_superblock=17)
    assert len(read_session(file, KEY, layout, VOCAB).tokens) == 70


def test_another_model_is_named_before_its_vocabulary(file: Path) -> None:
    refused(file, "tokenizer (", error=NotShareable, key=replace(KEY, tokenizer="x"), vocab_size=10)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(headed)))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    refused(tmp_path / "a")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1700), st.integers(0, 40), st.binary(min_size=1, max_size=40))
def test_a_spliced_header_is_refused_or_says_the_same(file: Path, at: int, cut: int, patch: bytes) -> None:
    whole = file.read_bytes()
    (file.parent / "b").write_bytes(whole[:at] + patch + whole[at + cut :])
    try:
        got = read(file.parent / "b")
    except CorruptSession:
        return
    assert torch.equal(got.data, read(file).data) and got.tokens == read(file).tokens
