"""What benches gave, kept in a file and compared with a later run; and the machine's name for the folder."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import harness
import plots
import records

pytest_plugins = ["pytester"]
INFO = {"tokens": 17728, "ids": [1, 2], "x torch": 2.0, "us": 5.0, "arms": {"D": {"prefill": 25920}}, "what": "a word"}


def recorded(seconds: tuple[float, ...] = (1.0, 1.1, 1.2, 1.3, 1.4), **info: Any) -> dict[str, Any]:
    return records.row_of("test_x[1]", seconds, INFO | info)


# ---- rows --------------------------------------------------------------------------------------------


def test_a_row_has_the_least_the_median_and_the_spread_but_for_the_slowest_tenth() -> None:
    row = records.row_of("test_x", [float(n) for n in range(20, 0, -1)], {})
    assert (row["min"], row["median"], row["spread"], row["rounds"]) == (1.0, 10.5, 17.0, 20)
    few = ([3.0], [3.0, 4.0], [3.0, 4.0, 9.0], [1.0, *[2.0] * 7, 9.0], [1.0, *[2.0] * 8, 9.0])
    assert [records.row_of("test_x", seconds, {})["spread"] for seconds in few] == [None, 1.0, 6.0, 8.0, 1.0]


def test_a_median_agrees_where_it_lies_in_the_recorded_spread() -> None:
    before = records.row_of("test_x[1]", [1.0 + n / 100 for n in range(10)], {})  # to 1.08
    for median, agrees in ((1.08, True), (1.0, True), (1.09, False), (0.99, False)):
        time, *rest = records.compare(records.row_of("test_x[1]", [median] * 3, {}), before)
        assert (time.agrees, time.must, rest) == (agrees, False, [])
        assert time.ratio == pytest.approx(median / before["median"])


@pytest.mark.parametrize("rounds", [2, 3, 9])
def test_few_rounds_agree_with_themselves(rounds: int) -> None:
    row = records.row_of("test_x[1]", [1.0 + n for n in range(rounds)], {"x torch": 2.0})
    assert [c.agrees for c in records.compare(row, row)] == [True, True]


def test_of_what_was_taken_once_no_agreement_is_told_but_that_of_counts() -> None:
    shown = [c.row()["within"] for c in records.compare(recorded(tokens=3), recorded((1.0,)))]
    assert shown == ["once", "CHANGED", "once"]


def test_counts_must_be_equal_and_ratios_and_times_only_inform() -> None:
    same = list(records.compare(recorded(), recorded()))
    assert [(c.what, c.agrees) for c in same] == [("median ms", True), ("x torch", True)]
    for change in ({"tokens": 17729}, {"ids": [1, 3]}, {"arms": {"D": {"prefill": 25919}}}, {"tokens": 17728.5}):
        wrong = [c for c in records.compare(recorded(**change), recorded()) if c.must]
        assert [c.agrees for c in wrong] == [False], change
    gone = records.row_of("test_x[1]", [1.0], {key: value for key, value in INFO.items() if key != "arms"})
    assert [(c.what, c.now) for c in records.compare(gone, recorded()) if c.must] == [("arms: D: prefill", None)]
    slow = list(records.compare(recorded((50.0,), **{"x torch": 0.1, "us": 500.0, "what": "another"}), recorded()))
    assert [c.agrees for c in slow] == [False, False] and not any(c.must for c in slow)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "bench_x.json"
    assert records.read(path) == "nothing recorded"
    records.write(path, "pytest bench", {"cpu": "some"}, [recorded()])
    assert records.read(path) == records.Record("pytest bench", {"cpu": "some"}, {"test_x[1]": recorded()})
    assert json.loads(path.read_text())["command"] == "pytest bench"


def test_rows_of_a_record_are_named_that_did_not_run_and_kept_with_the_run_that_gave_them() -> None:
    old = records.Record("pytest -k x", {"date": "yesterday", "commit": "c0", "cpu": "some"}, {"test_x[1]": recorded()})
    new = records.row_of("test_y", [1.0, 2.0], {})
    assert records.compare_all([new], old.rows) == ([], ["test_y"], ["test_x[1]"])
    (kept,) = old.kept(["test_x[1]", "test_gone"])
    assert kept == recorded() | {"earlier": {"command": "pytest -k x", "date": "yesterday", "commit": "c0"}}
    again = records.Record("pytest", {}, {"test_x[1]": kept})
    assert again.kept(["test_x[1]"]) == [kept] and again.kept([]) == []


def test_what_else_differs_from_the_record_is_named() -> None:
    before = {"cpu": "some", "threads": 2, "versions": {"torch": "2"}, "date": "yesterday"}
    assert records.changes(before | {"date": "today"}, before) == []
    assert records.changes(before | {"threads": 1}, before) == ["threads now 1, recorded 2"]


@pytest.mark.parametrize("content", ["{}", "[]", '{"command": "", "environment": {}, "rows": {"a": 1}}', '{"benchm'])
def test_files_of_another_form_are_not_compared(tmp_path: Path, content: str) -> None:
    (tmp_path / "bench_x.json").write_text(content)
    assert isinstance(why := records.read(tmp_path / "bench_x.json"), str)
    assert "another form" in why or "no JSON" in why


# ---- runs --------------------------------------------------------------------------------------------

ROWS = """
import pytest

@pytest.mark.parametrize("size", ["a"])
def test_x(benchmark, size, device):
    benchmark.extra_info["tokens"] = {tokens}
    benchmark.extra_info["on"] = device
    benchmark.pedantic(lambda: sum(range(1000)), rounds=5)

@pytest.mark.gpu
def test_on_a_gpu(benchmark):
    benchmark.pedantic(lambda: None, rounds=2)
"""
MORE = (
    ROWS
    + """
def test_y(benchmark):
    benchmark.extra_info["tokens"] = 1
    benchmark.pedantic(lambda: None, rounds=2)
"""
)
NAMED = {"test_x[a]", "test_y"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of xdist takes no times."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def plugin() -> ModuleType:
    """bench/conftest.py, under a name of its own: this folder has a conftest too."""
    spec = importlib.util.spec_from_file_location("bench_conftest", harness.ROOT / "bench" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(pytester: pytest.Pytester, bench: str, *arguments: str, gpu: bool = False) -> tuple[int, str]:
    pytester.makepyfile(bench_x=bench)
    sys.modules.pop("bench_x", None)
    conftest = plugin()
    vars(conftest).update(
        has_gpu=lambda: gpu,
        machine_folder=lambda device: f"some-{device}",
        environment=lambda device: {"threads": 2, "gpu": "some" if device == "cuda" else None},
    )
    chosen = [] if any("bench_x.py" in argument for argument in arguments) else ["bench_x.py"]
    done = pytester.runpytest(*chosen, "--results=kept", *arguments, plugins=[conftest])
    return int(done.ret), done.stdout.str() + done.stderr.str()


def kept(pytester: pytest.Pytester, device: str = "cpu") -> dict[str, Any]:
    """What is recorded, its rows by name."""
    record: dict[str, Any] = json.loads((pytester.path / "kept" / f"some-{device}" / "bench_x.json").read_text())
    return record | {"rows": {row["name"]: row for row in record["rows"]}}


def test_a_recorded_run_agrees_with_itself_and_a_changed_count_fails(pytester: pytest.Pytester) -> None:
    code, text = run(pytester, ROWS.format(tokens=7))
    assert code == 0 and "bench_x.json: nothing recorded" in text
    code, text = run(pytester, ROWS.format(tokens=7), "--record", "--benchmark-json=also.json")
    assert code == 0 and "bench_x.json: 1 rows written" in text
    also = json.loads((pytester.path / "also.json").read_text())
    assert also["benchmarks"][0]["extra_info"] == {"tokens": 7, "on": "cpu"}
    record = kept(pytester)
    assert record["command"].startswith("pytest bench_x.py --results=kept --record --benchmark-json=also.json")
    assert record["environment"] == {"threads": 2, "gpu": None}
    assert [(name, row["rounds"], row["extra_info"]["tokens"]) for name, row in record["rows"].items()] == [
        ("test_x[a]", 5, 7)
    ]

    code, text = run(pytester, ROWS.format(tokens=7))
    assert code == 0 and "│ test_x[a] │ median ms" in text and "CHANGED" not in text
    code, text = run(pytester, ROWS.format(tokens=8))
    assert code == 1 and "CHANGED" in text and "a count differs" in text
    code, text = run(pytester, ROWS.format(tokens=8), "--record")
    assert code == 0 and run(pytester, ROWS.format(tokens=8))[0] == 0


def test_a_file_whose_bench_failed_is_not_recorded(pytester: pytest.Pytester) -> None:
    failing = ROWS.format(tokens=7) + "\ndef test_wrong(benchmark):\n    benchmark(lambda: None)\n    assert False\n"
    code, text = run(pytester, failing, "--record", "--benchmark-max-time=0.01")
    assert code == 1 and "not written" in text and not (pytester.path / "kept").exists()


@pytest.mark.parametrize("chosen", [["-k", "test_x"], ["bench_x.py::test_x"]], ids=" ".join)
def test_some_rows_of_a_file_are_recorded_beside_the_others(pytester: pytest.Pytester, chosen: list[str]) -> None:
    run(pytester, MORE.format(tokens=7), "--record")
    before = kept(pytester)
    code, text = run(pytester, MORE.format(tokens=8), "--record", *chosen)
    record = kept(pytester)
    assert code == 0 and "1 rows written, 1 kept" in text and set(record["rows"]) == NAMED
    assert record["rows"]["test_x[a]"]["extra_info"]["tokens"] == 8 and "earlier" not in record["rows"]["test_x[a]"]
    assert record["rows"]["test_y"].pop("earlier")["command"] == before["command"] != record["command"]
    assert record["rows"]["test_y"] == before["rows"]["test_y"]
    code, text = run(pytester, MORE.format(tokens=8), *chosen)
    assert code == 0 and "bench_x: not run: test_y" in text


def test_rows_of_benches_that_are_gone_go_and_those_of_another_machine_are_not_mixed_in(
    pytester: pytest.Pytester,
) -> None:
    run(pytester, MORE.format(tokens=7), "--record")
    path = pytester.path / "kept" / "some-cpu" / "bench_x.json"
    record = json.loads(path.read_text())
    record["environment"]["threads"] += 1
    path.write_text(json.dumps(record))
    code, text = run(pytester, MORE.format(tokens=8), "--record", "-k", "test_x")
    assert code == 1 and "not written, not all of its rows ran, and threads now" in text
    assert json.loads(path.read_text()) == record
    code, text = run(pytester, ROWS.format(tokens=8), "--record")
    assert code == 0 and set(kept(pytester)["rows"]) == {"test_x[a]"}


def test_what_ran_on_a_gpu_lies_in_its_folder_and_what_ran_on_the_cpu_beside_it_does_not(
    pytester: pytest.Pytester,
) -> None:
    code, _ = run(pytester, MORE.format(tokens=7), "--record", gpu=True)
    cpu, cuda = kept(pytester), kept(pytester, "cuda")
    assert code == 0 and set(cpu["rows"]) == NAMED and cpu["rows"]["test_x[a]"]["extra_info"]["on"] == "cpu"
    assert (cpu["environment"]["gpu"], cuda["environment"]["gpu"]) == (None, "some")
    assert set(cuda["rows"]) == {"test_on_a_gpu"}
    run(pytester, MORE.format(tokens=7), "--record", "--device=cuda", gpu=True)
    assert set(kept(pytester, "cuda")["rows"]) == {"test_x[a]", "test_on_a_gpu"}
    assert kept(pytester, "cuda")["rows"]["test_x[a]"]["extra_info"]["on"] == "cuda"


def test_a_device_that_is_not_there_ends_the_run(pytester: pytest.Pytester) -> None:
    code, text = run(pytester, ROWS.format(tokens=7), "--device=cuda")
    assert code == pytest.ExitCode.USAGE_ERROR and "there is no CUDA device" in text


# ---- the machine -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability", "folder"),
    [
        ("AMD EPYC, 2 cores", "AVX2", "cpu-epyc-avx2"),
        ("AMD EPYC 7B13 64-Core Processor, 8 cores", "AVX512", "cpu-epyc-7b13-avx512"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, 4 cores", "AVX512", "cpu-xeon-platinum-8481c-avx512"),
        ("aarch64", "DEFAULT", "cpu-aarch64-default"),
    ],
)
def test_a_cpus_folder_has_its_name_and_what_torch_makes_of_it(name: str, capability: str, folder: str) -> None:
    assert harness.cpu_folder(name, capability) == folder


def test_an_environment_names_what_decides_a_time() -> None:
    found = harness.environment()
    assert found["cpu"] == harness.cpu_name() and found["threads"] >= 1 and found["cpu_capability"]
    assert found["versions"]["torch"] and found["date"]
    assert harness.gpu_folder("NVIDIA H200") == "nvidia-h200"


def test_what_a_cpu_measures_is_not_said_to_be_of_the_gpu_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "has_gpu", lambda: True)
    monkeypatch.setattr(harness.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert harness.environment("cpu")["gpu"] is None
    assert harness.machine_folder().startswith("cpu-") and harness.machine_folder("cuda") == "nvidia-h200"


def test_a_time_is_shown_beside_its_floor() -> None:
    assert harness.floor_columns(20.0, 43_000_000, 0, 4300, 788) == {"floor us": 10.0, "x floor": 2.0}
    assert harness.floor_columns(20.0, 1, 7_880_000_000, 4300, 788)["x floor"] == 2.0


def test_calls_that_should_find_nothing_in_the_cache_have_inputs_and_results_of_their_own() -> None:
    x = harness.torch.ones(64)
    places: list[int] = []

    def add(a: Any, b: Any) -> Any:
        out = a + b
        places.extend(t.data_ptr() for t in (a, b, out))
        assert out.sum() == 128
        return out

    calls = harness.cold_calls(add, (x, x), 768, 32 * 768)
    for call in calls:
        call()
    assert len(calls) == 64 and len({*places}) == 3 * 64


class Pedantic:
    """As pytest-benchmark's fixture, without the report."""

    def pedantic(self, run: Callable[..., Any], *, args: Any, setup: Callable[[], None], **counts: int) -> None:
        for _ in range(counts["rounds"] + counts["warmup_rounds"]):
            setup()
            run(*args)


def test_torch_and_ours_take_turns() -> None:
    order: list[str] = []
    row = harness.cpu_beside_torch(Pedantic(), [lambda: order.append("a")] * 2, [lambda: order.append("b")], rounds=3)
    assert order == ["b", "a", "a"] * 4  # one round to warm up
    assert row["calls"] == 2 and row["x torch"] == row["torch us"] / row["us"]


def test_the_readmes_pictures_are_drawn_from_the_records(tmp_path: Path) -> None:
    for name in ("compare_cpu", "speculation", "workloads"):
        shutil.copy(plots.FOLDER / f"{name}.json", tmp_path)
    plots.draw(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["agents.png", "batch.png", "drafting.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    assert all((plots.FOLDER / path.name).is_file() for path in tmp_path.glob("*.png"))
