"""The comparison on a CPU: its arguments, the forms of a file, what it makes of tokens and rates."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from test_tokenizer import byte_level
from tiny import write_tiny_gguf

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import compare_cpu as bench
from compare_cpu import Pair, compared
from compare_sides import LLAMA_CPP, LlamaCpp, Polymodel, Transformers, Worker, as_folder, form_of, part_of, requantise

from polymodel.checkpoint import open_checkpoint
from polymodel.tokenizer import Tokenizer

EXACT, CLOSE = Pair("f32", "transformers F32", 1.0), Pair("q8", "llama.cpp Q8_0", 0.75)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "tiny.gguf"
    keys = byte_level()
    sizes = {"intermediate_size": 160, "vocab_size": len(keys["tokenizer.ggml.tokens"])}
    return write_tiny_gguf(path, "llama", kind="Q8_0", keys=keys, **sizes)


# ---- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sides", "q9"], "unknown side 'q9'; there are 'llama.cpp Q8_0', "),
        (["--sides", "q8", "transformers F32"], "'q8' are checked by 'llama.cpp Q8_0', expected one with it"),
        (["--sides", "f32"], "'transformers F32' or 'llama.cpp F32' or 'llama.cpp Q4_1', expected one with it"),
        (["--batch-sides", "q4"], "--batch-sides: 'q4' is not among the sides"),
        (["--prompts", "41"], "--prompts 41, expected 1..40"),
        (["--tokens", "0"], "--tokens 0, expected 1..127"),
        (["--batch-tokens", "128"], "--batch-tokens 128, expected 1..127"),
        (["--repetitions", "0"], "--repetitions 0, expected 1.."),
        (["--threads", "100000"], "--threads 100000, expected 1.."),
        (["--batches", "1", "64"], "--batches 64, expected 1..40"),
        (["--json", str(Path(__file__).parent)], "is a folder, expected a file"),
    ],
)
def test_wrong_arguments_end_it_with_a_line(arguments: list[str], problem: str) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.parsed(arguments)
    assert problem in str(ended.value) and "\n" not in str(ended.value)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name == "xllamacpp" else SimpleNamespace())
    with pytest.raises(SystemExit, match=r"no package 'xllamacpp' here: pip install '\.\[compare,test\]'"):
        bench.parsed([])
    assert bench.parsed(["--sides", "f32", "transformers F32"]).batch_sides == ["transformers F32"]


def test_every_side_is_checked_by_another() -> None:
    assert {side for pair in bench.PAIRS for side in (pair.ours, pair.theirs)} == {*bench.SIDES}
    assert all(pair.ours not in LLAMA_CPP and pair.theirs not in bench.OURS for pair in bench.PAIRS)


@pytest.mark.demo_model
def test_the_texts_are_forty_and_long_enough(demo_model_path: Path) -> None:
    with open_checkpoint(demo_model_path) as checkpoint:
        texts = bench.read_texts(Tokenizer.from_gguf(checkpoint.metadata, str(demo_model_path)))
    assert len(texts) == bench.NUM_TEXTS and list(texts)[8] == next(iter(texts)).replace("1", "2")
    assert len(bench.long_prompt(texts)) == bench.PREFILL_TOKENS
    short = bench.short_prompts(texts, bench.NUM_TEXTS)
    assert {len(ids) for ids in short} == {bench.PROMPT_TOKENS} and len({*map(tuple, short)}) == bench.NUM_TEXTS


# ---- forms of the file -------------------------------------------------------------------------------


def test_a_requantised_file_has_the_facts_and_the_rounded_values_and_is_written_once(
    tiny: Path, tmp_path: Path
) -> None:
    target = requantise(tiny, tmp_path / "q.gguf", "Q4_0")
    old, new = gguf.GGUFReader(tiny), gguf.GGUFReader(target)
    assert {k: f.contents() for k, f in old.fields.items()} == {k: f.contents() for k, f in new.fields.items()}
    for before, after in zip(old.tensors, new.tensors, strict=True):
        values = gguf.dequantize(before.data, before.tensor_type)
        if values.ndim == 2:
            values = gguf.dequantize(gguf.quantize(values, gguf.GGMLQuantizationType.Q4_0), after.tensor_type)
            assert after.tensor_type == gguf.GGMLQuantizationType.Q4_0
        assert after.name == before.name and np.array_equal(gguf.dequantize(after.data, after.tensor_type), values)
    written = target.stat()
    assert requantise(tiny, target, "Q8_0") == target and target.stat().st_mtime_ns == written.st_mtime_ns
    assert [path.name for path in tmp_path.iterdir()] == ["q.gguf"]


def test_a_form_is_made_anew_of_a_file_with_other_content(tiny: Path, tmp_path: Path) -> None:
    source = tmp_path / "smollm2.gguf"
    source.write_bytes(tiny.read_bytes())
    forms = [form_of(side, source, tmp_path) for side in (*LLAMA_CPP, "transformers F32", "q8")]
    assert forms[1] == forms[4] == source and len({*forms}) == 4 and all(path.exists() for path in forms)
    assert forms == [form_of(side, source, tmp_path) for side in (*LLAMA_CPP, "transformers F32", "q8")]
    source.write_bytes(tiny.read_bytes() + bytes(64))
    assert form_of("llama.cpp Q8_0", source, tmp_path) != forms[0]
    assert form_of("transformers F32", source, tmp_path) != forms[3]


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_was_not_written_to_the_end_leaves_nothing(tmp_path: Path, is_folder: bool) -> None:
    with pytest.raises(KeyboardInterrupt), part_of(tmp_path / "form") as part:
        part.mkdir() if is_folder else part.write_text("half")
        raise KeyboardInterrupt
    assert [*tmp_path.iterdir()] == []


def test_llama_cpp_keeps_no_prompts_and_is_asked_for_the_largest_logit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    seen: list[Any] = []
    server = SimpleNamespace(handle_completions=lambda request: seen.append(request) or {"choices": []})
    monkeypatch.setattr(xllamacpp, "Server", lambda params: seen.append(params) or server)
    LlamaCpp("some.gguf", 1, 3, "Q8_0").ask([5, 6], 4)
    params, request = seen
    assert (params.cache_ram_mib, params.n_parallel, params.cpuparams.n_threads) == (0, 3, 1)
    assert request == {"prompt": [5, 6], "n_predict": 4, "cache_prompt": False} | {
        "temperature": 0,
        "samplers": ["temperature"],
    }


def test_transformers_and_we_say_the_same_by_every_way_of_asking(tiny: Path, tmp_path: Path) -> None:
    folder = as_folder(tiny, tmp_path / "folder")
    assert as_folder(tiny, folder) == folder and len([*tmp_path.iterdir()]) == 1
    theirs, ours = Transformers(str(folder), threads=1), Polymodel(str(tiny), threads=1, slots=2, weights="f32")
    prompts, free = [[5, 6, 7, 8], [9, 10, 11, 12]], theirs.streams([[5, 6, 7, 8], [9, 10, 11, 12]], 12, [])
    banned = [free[0][0], free[1][3]]
    for ban in ([], banned):
        streams = theirs.streams(prompts, 12, ban)
        assert ours.streams(prompts, 12, ban) == streams and [len(stream) for stream in streams] == [12, 12]
        along = ours.along(prompts, streams, ban)
        assert [[choice for choice, _, _ in steps] for steps in along] == streams
        assert all(margin > 0 and gap == 0 for steps in along for _, margin, gap in steps)
    assert not {*banned} & {token for stream in streams for token in stream} and streams != free
    assert theirs.outputs(prompts, 12) == ours.outputs(prompts, 12) == free == ours.batch(prompts, 12)["outputs"]
    assert min(theirs.prefill([5] * 40), ours.prefill([5] * 40), theirs.decode([5], 4), ours.decode([5], 4)) > 0
    held = ours.memory()
    assert held["peak"] > held["weights"] > 256 * 64 * 4 and held["kv reserved"] > 0


def test_along_other_tokens_the_gap_is_what_they_lack(tiny: Path) -> None:
    ours = Polymodel(str(tiny), threads=1, slots=1, weights="f32")
    ((first, _),) = ours.streams([[5, 6, 7]], 2, [])
    (second,) = ours.streams([[5, 6, 7]], 1, [first])[0]
    (((own, margin, gap), _),) = ours.along([[5, 6, 7]], [[second, 3]], [])
    assert (own, margin) == (first, gap) and gap > 0


def test_a_worker_that_dies_is_named_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"llama\.cpp Q8_0 died at 'loading': .*; try `.*nothing\.gguf 1 2`"):
        Worker("llama.cpp Q8_0", tmp_path / "nothing.gguf", 1, 2)


# ---- tokens ------------------------------------------------------------------------------------------


def steps(*choices: tuple[int, float, float]) -> list[tuple[int, float, float]]:
    return [*choices]


def test_where_streams_part_both_tokens_and_our_margin_are_reported() -> None:
    theirs = [[1, 2, 3, 4], [5, 6, 7, 8]]
    ours = [[1, 2, 9, 9], [5, 6, 7, 8]]
    along = [
        steps((1, 2.0, 0.0), (2, 1.0, 0.0), (9, 0.25, 0.5), (4, 3.0, 0.0)),
        steps(*((token, 1.0, 0.0) for token in theirs[1])),
    ]
    row = compared(CLOSE, ["a", "b"], ours, theirs, along)
    assert row.pop("divergences") == [
        {"what": "q8 along llama.cpp Q8_0", "prompt": "a", "position": 2, "ours": 9, "theirs": 3}
        | {"margin": 0.25, "gap": 0.5}
    ]
    assert row == {"what": "q8 along llama.cpp Q8_0", "streams": 2, "same": 1, "tokens": 8, "agreement": 7 / 8} | {
        "least": 0.75,
        "largest gap": 0.5,
        "holds": True,
    }


@pytest.mark.parametrize(("pair", "gap", "holds"), [(EXACT, 9e-4, True), (EXACT, 1e-3, False), (CLOSE, 9.0, False)])
def test_what_is_exact_must_agree_but_for_ties_and_what_is_not_for_the_most_part(
    pair: Pair, gap: float, holds: bool
) -> None:
    along = [steps((1, 1.0, 0.0), (9, gap, gap), (8, gap, gap))]
    row = compared(pair, ["a"], [[1, 9, 7]], [[1, 2, 3]], along)
    assert (row["agreement"], row["holds"]) == (1 / 3, holds)


def test_agreement_at_its_floor_holds() -> None:
    along = [steps((1, 1.0, 0.0), (2, 1.0, 0.0), (3, 1.0, 0.0), (9, 1.0, 5.0))]
    assert compared(CLOSE, ["a"], [[1, 2, 3, 9]], [[1, 2, 3, 4]], along)["holds"]


@pytest.mark.parametrize("ours", [[1, 2, 3], [1, 4, 3], [2, 9, 3]], ids=["too equal", "another", "too early"])
def test_a_stream_that_our_own_logits_do_not_lead_to_voids_the_run(ours: list[int]) -> None:
    along = [steps((1, 1.0, 0.0), (9, 1.0, 1.0), (3, 1.0, 0.0))]
    with pytest.raises(SystemExit, match="VOID: q8 after 'a'"):
        compared(CLOSE, ["a"], [ours], [[1, 2, 3]], along)


# ---- rates -------------------------------------------------------------------------------------------


def test_a_rate_is_the_best_with_the_distance_of_the_median() -> None:
    assert bench.rate([8.0, 10.0, 5.0]) == {"tokens_per_second": 10.0, "spread": 0.25, "all": [8.0, 10.0, 5.0]}


def test_ratios_are_over_llama_cpp_in_the_same_row_and_over_the_smallest_batch() -> None:
    rates = {("llama.cpp Q8_0", 2): 8.0, ("llama.cpp Q8_0", 4): 10.0, ("w8a8", 2): 4.0, ("w8a8", 4): 12.0}
    rows: list[dict[str, Any]] = [
        {"side": side, "kind": "batch", "batch": size, "tokens_per_second": value}
        for (side, size), value in rates.items()
    ]
    rows.append({"side": "w8a8", "kind": "decode", "tokens_per_second": 3.0})
    found = bench.with_ratios(rows)
    assert [row["ratio"] for row in found] == [1.0, 1.0, 0.5, 1.2, None]
    assert [row.get("gain") for row in found] == [1.0, 1.25, 1.0, 3.0, None]


class Canned:
    """Answers of a worker whose second request says something else in a batch of two."""

    def ask(self, verb: str, prompts: list[list[int]], count: int) -> dict[str, Any]:
        return {"rate": 1.0, "outputs": [[number, len(prompts) if number else 0] for number in range(len(prompts))]}


def test_outputs_that_change_with_the_batch_are_counted_and_ours_void_the_run() -> None:
    args = SimpleNamespace(batches=[1, 2, 3], batch_repetitions=2, batch_tokens=1)
    texts = {str(i): [i] * 16 for i in range(3)}
    rows = bench.time_batches({"llama.cpp Q8_0": Canned()}, texts, args)
    assert [(row["batch"], row["changed"], row["all"]) for row in rows] == [
        (1, 0, [1.0, 1.0]),
        (2, 0, [1.0, 1.0]),
        (3, 2, [1.0, 1.0]),
    ]
    with pytest.raises(SystemExit, match="VOID: q8, 3 at once: request 1 has other tokens"):
        bench.time_batches({"q8": Canned()}, texts, args)


class Noted:
    """A worker that notes its name when it is asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def ask(self, verb: str, **arguments: object) -> Any:
        self.asked.append(self.name)
        return {"rate": 1.0, "outputs": []} if verb == "batch" else 1.0


def test_each_round_is_begun_by_another_side() -> None:
    args = SimpleNamespace(batches=[1], batch_repetitions=3, batch_tokens=1, repetitions=4, tokens=1)
    texts = {str(i): [i] * 16 for i in range(3)}
    asked: list[str] = []
    workers = {name: Noted(name, asked) for name in "abc"}
    bench.time_batches(workers, texts, args)
    assert "".join(asked) == "abcbcacab"
    asked.clear()
    bench.time_one(workers, texts, args)
    assert "".join(asked[::2]) == "abcbcacababc" == "".join(asked[1::2])


def test_batches_are_timed_three_times_where_nothing_is_said() -> None:
    assert bench.parsed(["--sides", "f32", "transformers F32"]).batch_repetitions == 3


@pytest.mark.slow
@pytest.mark.demo_model
def test_a_small_run_times_every_side(demo_model_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp")
    few = shlex.split("--repetitions 1 --tokens 8 --prompts 4 --batches 1 2 --batch-tokens 4 --batch-repetitions 1")
    bench.main([*few, "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert {row["side"] for row in found["rows"]} == {row["side"] for row in found["memory"]} == {*bench.DEFAULT_SIDES}
    assert {(row["kind"], row.get("batch")) for row in found["rows"]} == {
        ("prefill", None),
        ("decode", None),
        ("batch", 1),
        ("batch", 2),
    }
    assert all(row["tokens_per_second"] > 0 for row in found["rows"]) and all(row["holds"] for row in found["tokens"])
    assert found["tokens"][0]["what"] == "f32 along transformers F32" and found["tokens"][0]["same"] == 4
    kv = {row["side"]: row.get("kv reserved MB") for row in found["memory"]}
    assert kv["llama.cpp Q8_0"] is None and kv["q8"] == kv["f32"] < 80  # of one request
    files = {row["side"]: row["file MB"] for row in found["memory"]}
    assert files["q8"] < files["llama.cpp Q8_0"] < files["transformers F32"]
    out = capfd.readouterr().out
    assert all(title in out for title in ("first differences", "memory; load", "one request", "requests at once"))
