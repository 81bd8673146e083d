"""The one-command GPU run: what of it can be checked without a GPU."""

from __future__ import annotations

import ast
import itertools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.language")

import bench_attention
import bench_matmul
import cut_model
import gpu_exact
import gpu_facts
import gpu_memory
import gpu_model
import gpu_plots
import gpu_run
import gpu_section
import gpu_values
import harness
import typer
from gpu_section import Process, Run, Stopped
from tiny import write_tiny_gguf
from typer.testing import CliRunner, Result

from csrc_triton import attention, launch
from polymodel import Engine, Session
from polymodel.checkpoint import open_checkpoint
from polymodel.config import EngineConfig

pytestmark = pytest.mark.filterwarnings("ignore:no tile table for sm_:UserWarning")
HERE = {"status": "done", "rows": []}


def invoke(out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(gpu_run.app, ["--dry", "--out", str(out), *arguments])


def sections_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())["sections"]


def dry(folder: Path, **changes: Any) -> Run:
    return replace(Run(folder, folder, True, time.monotonic() + 600), **changes)


def row(what: str, holds: bool | None) -> dict[str, Any]:
    return {"what": what, "value": "", "target": None, "holds": holds}


# ---- the whole run -----------------------------------------------------------------------------------


@pytest.mark.aot
def test_a_dry_run_goes_through_every_section_and_all_holds(tmp_path: Path) -> None:
    done = invoke(tmp_path)
    assert done.exit_code == 0, done.output
    sections = sections_of(tmp_path)
    assert list(sections) == [*(s.name for s in gpu_run.SECTIONS), "plots"]
    for name, section in sections.items():
        assert section["status"] == "done" and section["rows"], name
        assert name in done.output
        assert all(found["holds"] is not False for found in section["rows"]), name
    for section in gpu_run.SECTIONS:
        if section.name.startswith(("exact", "values")):
            assert [found["what"] for found in sections[section.name]["rows"]] == list(section.expected)
    said = [found["what"] for found in sections["model"]["rows"]]
    assert said == ["file: logits", "file: tokens", *gpu_model.PROMISES]
    assert done.output.rstrip().endswith(" hold, 0 do not; not judged: 0")
    assert set(sections["facts"]["found"]["probes"].values()) == {None}
    launch.check_tiles(json.loads((tmp_path / "sm_90.json").read_text()), "")
    assert len(list(tmp_path.iterdir())) <= 8


@pytest.mark.skipif(harness.has_gpu(), reason="there is one")
def test_without_a_gpu_the_run_asks_for_one() -> None:
    done = CliRunner().invoke(gpu_run.app, [])
    assert done.exit_code == 2 and "--dry" in done.output


def test_unknown_sections_and_folders_without_wheels_are_refused(tmp_path: Path) -> None:
    assert "unknown section ['speeed']" in invoke(tmp_path, "--only", "speeed").output
    done = invoke(tmp_path, "--only", "machine", "--wheels", str(tmp_path))
    assert done.exit_code == 2 and "no wheels in" in done.output


def test_some_sections_join_what_is_known(tmp_path: Path) -> None:
    harness.write_json(tmp_path / "results.json", {"command": "", "dry": True, "sections": {"exact": HERE}})
    assert invoke(tmp_path, "--only", "machine").exit_code == 0
    assert list(sections_of(tmp_path)) == ["exact", "machine", "plots"]
    assert [s.name for s in gpu_run._named_by("values")] == ["values-matmul", "values-attention"]


def test_judges_go_together_and_what_times_goes_alone() -> None:
    groups = [[s.name for s in group] for group in gpu_run.steps(gpu_run.SECTIONS)]
    judges = ["exact-matmul", "exact-attention", "exact-tiles", "values-matmul", "values-attention", "model"]
    assert groups[0] == ["machine"] and groups[1] == ["facts", *judges, "selfcheck", "memory", "tests"]
    assert all(len(group) == 1 for group in groups[2:])


@pytest.mark.parametrize("left", [30, 100, 200, 490])
def test_shares_of_the_time_add_up_to_what_there_is(left: float) -> None:
    """Though every section takes all that it gets; with little time the first ones get it."""
    groups, each, rest = list(gpu_run.steps(gpu_run.SECTIONS)), [], left
    for i in range(len(groups)):
        each.append(gpu_run.seconds_for(groups[i:], rest))
        rest -= each[-1] or 0
    assert each[0] is not None and each == sorted(each, key=lambda seconds: seconds is None)
    assert 0 <= rest < gpu_run.START_SECONDS + gpu_run.MIN_SECONDS
    if left == 490:
        assert None not in each and rest == pytest.approx(0) and each[1] > 150


def test_the_time_of_a_run_begins_with_its_process() -> None:
    start = time.monotonic()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert abs(gpu_section.born(process.pid) - start) < 1
        process.kill()
    assert 0 < start - gpu_section.born() <= gpu_section.MAX_START_SECONDS


# ---- what goes wrong ---------------------------------------------------------------------------------


def only(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Run], None], name: str = "exact", expected: tuple[str, ...] = ()
) -> None:
    monkeypatch.setattr(gpu_run, "SECTIONS", (gpu_run.Section(name, run, 1, is_judge=True, expected=expected),))


def test_a_kernel_whose_bits_follow_its_company_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_exact.matmul
    monkeypatch.setattr(gpu_exact, "matmul", lambda x, w: right(x, w) * (1.0 if len(x) != 17 else 1.01))
    name = "a row's bits in any company"
    only(monkeypatch, partial(gpu_exact.exact, {name: gpu_exact.rows_alone}), expected=(name,))
    done = invoke(tmp_path)
    (found,) = sections_of(tmp_path)["exact"]["rows"]
    assert done.exit_code == 1 and found["what"] == name and found["holds"] is False
    assert found["value"].startswith("2 of 4 differ: q4, rows 49 to 66: ")


def test_a_kernel_with_wrong_values_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_values.rmsnorm
    monkeypatch.setattr(gpu_values, "rmsnorm", lambda x, w, eps: right(x, w, eps) * 1.01)
    kernels = {name: gpu_values.MATMUL[name] for name in ("rmsnorm", "swiglu")}
    only(monkeypatch, partial(gpu_values.values, kernels), "values")
    assert invoke(tmp_path).exit_code == 1
    norm, gate = sections_of(tmp_path)["values"]["rows"]
    assert norm["holds"] is False and norm["value"].startswith("1 of 3 cases wrong") and gate["holds"] is True


def test_a_number_that_is_none_is_wrong(tmp_path: Path) -> None:
    run = dry(tmp_path)
    gpu_values.values({"k": lambda run: iter([("nan", float("nan"), 1.0), ("fine", 0, 0)])}, run)
    assert run.rows[0]["holds"] is False and "nan of 1 allowed: nan" in run.rows[0]["value"]


def test_a_head_that_names_no_token_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_values, "lm_head_argmax", lambda x, w: torch.full((len(x),), -1))
    run = dry(tmp_path)
    gpu_values.values({"lm_head_argmax": gpu_values.head_argmax}, run)
    assert run.rows[0]["holds"] is False and "q8: tokens -1 to -1 of 300" in run.rows[0]["value"]


def test_a_check_that_fails_is_a_row_and_the_next_ones_are_run(tmp_path: Path) -> None:
    def fails(run: Run) -> Iterator[str | None]:
        yield None
        raise ValueError("page_table: no such page\nmore")

    run = dry(tmp_path)
    gpu_exact.exact({"a": fails, "b": lambda run: iter([None, None])}, run)
    assert [(found["what"], found["value"], found["holds"]) for found in run.rows] == [
        ("a", "failed: ValueError: page_table: no such page", False),
        ("b", "equal bits, 2 comparisons (interpreter)", True),
    ]


def test_a_lost_context_ends_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def check(run: Run) -> Iterator[str | None]:
        yield None
        lost()

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    run = dry(tmp_path, dry=False)
    with pytest.raises(gpu_section.ContextLost, match=r"CUDA context lost in a: RuntimeError: CUDA error"):
        gpu_exact.exact({"a": check, "b": lambda run: iter([None])}, run)
    assert [(found["what"], found["holds"]) for found in run.rows] == [("a", False)]


def test_what_was_not_compared_does_not_hold(tmp_path: Path) -> None:
    def outcomes(run: Run) -> Iterator[str | None]:
        yield None
        yield gpu_section.Skipped("Tile(x): OutOfResources")
        run.deadline = 0.0
        yield None
        yield "comes too late"

    run = dry(tmp_path)
    run.promise("nothing", iter([]))
    run.promise("skipped", iter([gpu_section.Skipped("Tile(y): too large"), None]))
    run.promise("whole", itertools.islice(outcomes(run), 3), total=3)
    run.promise("cut", outcomes(run), total=9)
    assert [(found["value"], found["holds"]) for found in run.rows] == [
        ("nothing compared", None),
        ("equal bits, 1 comparisons (interpreter); 1 skipped: Tile(y): too large", True),
        ("equal bits, 2 comparisons (interpreter); 1 skipped: Tile(x): OutOfResources", True),
        ("cut short after 1 of 9 comparisons, equal bits in these", None),
    ]


def test_what_was_compared_before_a_signal_is_told(tmp_path: Path) -> None:
    def outcomes() -> Iterator[str | None]:
        yield None
        signal.raise_signal(signal.SIGTERM)
        yield None

    run = dry(tmp_path)
    with pytest.raises(Stopped), gpu_section.stoppable():
        run.promise("p", outcomes())
    assert [(found["value"], found["holds"]) for found in run.rows] == [
        ("cut short after 1 comparisons, equal bits in these", None)
    ]


class OnHost(Run):
    """What a GPU would be given, with the launches left out."""

    device = "cpu"
    has_fp8 = True


def host_side(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(launch.Kernel, "run", lambda *args, **options: None)
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return OnHost(folder, folder, False, time.monotonic() + 600)


def test_the_trees_of_the_run_have_room_in_their_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = host_side(tmp_path, monkeypatch)
    monkeypatch.setattr(gpu_exact, "KINDS_OF_PAGES", ((torch.bfloat16, 64),))
    with launch.kernels_on_cpu(90):
        for prefix, outcomes in itertools.groupby(gpu_exact.tree_paths(run), key=lambda outcome: outcome is None):
            assert len(list(outcomes)) > len(gpu_exact.PREFIXES), prefix


@pytest.mark.slow
@pytest.mark.parametrize("section", [s for s in gpu_run.SECTIONS if s.name.startswith("exact")], ids=lambda s: s.name)
def test_the_host_accepts_what_a_gpu_is_asked(
    section: gpu_run.Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = host_side(tmp_path, monkeypatch)
    with launch.kernels_on_cpu(90):
        section.run(run)
    assert not [found for found in run.rows if found["value"].startswith("failed")]
    assert {found["what"] for found in run.rows} == set(section.expected)


def test_a_section_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Run) -> None:
        run.row("before", 1)
        raise RuntimeError("no such kernel\nmore")

    sections = (gpu_run.Section("exact", fail, 1, True), gpu_run.Section("values", lambda run: None, 1, True))
    monkeypatch.setattr(gpu_run, "SECTIONS", sections)
    assert invoke(tmp_path).exit_code == 1
    found = sections_of(tmp_path)
    assert found["exact"]["status"] == "failed: RuntimeError: no such kernel"
    assert found["exact"]["rows"][0]["what"] == "before" and found["values"]["status"] == "done"


def test_the_exit_status_is_that_of_values_and_bits_not_of_speed() -> None:
    def holds(name: str, holds: bool | None, status: str = "done") -> bool:
        return gpu_run.all_hold({"sections": {name: {"status": status, "rows": [row("w", holds)]}}})

    for judge in (section.name for section in gpu_run.SECTIONS if section.is_judge):
        assert holds(judge, True) and holds(judge, None) and not holds(judge, False)
    assert not gpu_run.all_hold(
        {"sections": {"matmul": {"status": "out of time", "rows": [], "found": {"void": {"x": "y"}}}}}
    )
    assert holds("matmul", False) and holds("exact-tiles", True, "out of time")
    assert not holds("matmul", True, "failed: x") and not holds("speed", None, "died with SIGSEGV: x")


def test_a_signal_leaves_a_whole_results_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(run: Run) -> None:
        run.row("before", 1)
        signal.raise_signal(signal.SIGTERM)
        run.row("after", 2)

    only(monkeypatch, interrupted)
    handler = signal.getsignal(signal.SIGTERM)
    done = invoke(tmp_path)
    assert done.exit_code == 128 + signal.SIGTERM and "stopped by SIGTERM" in done.output
    section = sections_of(tmp_path)["exact"]
    assert section["status"] == "stopped" and [found["what"] for found in section["rows"]] == ["before"]
    assert signal.getsignal(signal.SIGTERM) is handler


# ---- sections in processes of their own ----------------------------------------------------------------


def child(folder: Path, name: str, script: str, seconds: float = 30, expected: tuple[str, ...] = ()) -> gpu_run.Child:
    """A section whose process is a script; part: where it keeps what it finds."""
    part = folder / f"{name}.json"
    said = json.dumps({"rows": [row("before", True)], "found": {"n": 1}})
    code = f"import os, signal, subprocess, sys, time\npart, said = {str(part)!r}, {said!r}\n" + textwrap.dedent(script)
    process = Process([sys.executable, "-S", "-c", code], folder / f"{name}.log", seconds)
    return gpu_run.Child(gpu_run.Section(name, lambda run: None, 1, expected=expected), process, part)


def results_in(folder: Path) -> gpu_run.Results:
    return gpu_run.Results(folder / "results.json", {"sections": {}})


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_sections_that_hang_or_die_leave_what_they_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_section, "GRACE_SECONDS", 0.3)
    write = "open(part, 'w').write(said)\n"
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    helper = f"print(subprocess.Popen([sys.executable, '-S', '-c', {deaf + '; time.sleep(60)'!r}]).pid, flush=True)"
    children = [
        child(tmp_path, "hangs", f"{write}{deaf}\n{helper}\ntime.sleep(60)", 1.5),
        child(tmp_path, "dies", write + "os.abort()"),
        child(tmp_path, "fails", write + "print('x'); print('failed: ValueError: y'); sys.exit(1)"),
        child(tmp_path, "ends", write),
        child(tmp_path, "says nothing", "sys.exit(3)"),
    ]
    results, said = results_in(tmp_path), []
    start = time.monotonic()
    gpu_run.watch(children, results, said.append)
    assert time.monotonic() - start < 10
    found = sections_of(tmp_path)
    assert {name: section["status"] for name, section in found.items()} == {
        "hangs": "out of time",
        "dies": "died with SIGABRT: ",
        "fails": "failed: ValueError: y",
        "ends": "done",
        "says nothing": "died with exit 3: ",
    }
    for name in ("hangs", "dies", "fails", "ends"):
        assert found[name]["rows"] == [row("before", True)] and found[name]["found"] == {"n": 1}
    assert found["says nothing"]["rows"] == [] and len(said) == 5
    assert not is_running(int(found["hangs"]["log"].split()[0]))


def test_what_a_section_did_not_reach_is_named(tmp_path: Path) -> None:
    died = child(tmp_path, "facts", "open(part, 'w').write(said); os.abort()", expected=("before", "b", "c"))
    results = results_in(tmp_path)
    gpu_run.watch([died], results, lambda line: None)
    _, *rows = results.content["sections"]["facts"]["rows"]
    assert [(found["what"], found["value"], found["holds"]) for found in rows] == [
        ("b", "not reached", None),
        ("c", "not reached", None),
    ]
    results.content["sections"]["facts"]["rows"][0] |= {"target": "equal bits"}
    assert gpu_run.verdict(results.content) == "1 hold, 0 do not; not judged: 2 (b, c)"


def test_what_a_section_finds_is_in_the_results_while_it_runs_and_stays_when_the_run_is_stopped(tmp_path: Path) -> None:
    waits = "open(part, 'w').write(said)\nwhile 'before' not in open(results).read(): time.sleep(0.05)\n"
    script = (
        f"results = {str(tmp_path / 'results.json')!r}\n{waits}os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    )
    running = child(tmp_path, "exact", script)
    with pytest.raises(Stopped, match="SIGTERM"), gpu_section.stoppable():
        gpu_run.watch([running], results_in(tmp_path), lambda line: None)
    section = sections_of(tmp_path)["exact"]
    assert section["status"] == "stopped" and section["rows"] == [row("before", True)]
    assert running.process.is_over()


def test_a_section_runs_in_a_process_of_its_own_and_needs_no_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-S: what an editable install leaves in the site folder is not there."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.setenv("PYTHONPATH", sysconfig.get_paths()["purelib"])
    monkeypatch.setattr(gpu_section, "ROOT", tmp_path)  # and neither the folder nor the variable leads there
    shared = Run(tmp_path, tmp_path, False, time.monotonic() + 200)
    gpu_run.run_on_gpu(
        gpu_run.SECTIONS[:1], results_in(tmp_path), shared, ["--dry", "--commit", "abc"], lambda line: None
    )
    section = sections_of(tmp_path)["machine"]
    assert section["status"] == "done", section
    assert section["rows"][0]["value"] == section["found"]["commit"] == "abc" and section["found"]["versions"]["torch"]


def test_no_section_starts_without_time_for_it(tmp_path: Path) -> None:
    shared = Run(tmp_path, tmp_path, False, time.monotonic() + 20)
    gpu_run.run_on_gpu(gpu_run.SECTIONS[:2], results_in(tmp_path), shared, [], lambda line: None)
    found = sections_of(tmp_path)
    assert {section["status"] for section in found.values()} == {"no time left"}
    assert [row["what"] for row in found["facts"]["rows"]] == gpu_facts.fact_names()


def test_judges_share_the_cores_and_children_find_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, Any]] = []

    def started(command: list[str], log: Path, seconds: float, environment: dict[str, str]) -> Process:
        script = "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ['PYTHONPATH'])"
        return Process([sys.executable, "-S", "-c", script], log, 20, environment)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(gpu_run, "Process", started)
    right = gpu_run._conclude
    monkeypatch.setattr(
        gpu_run, "_conclude", lambda c, *rest: (seen.append((c.section.is_judge, c.process.log)), right(c, *rest))
    )
    shared = Run(tmp_path, tmp_path, False, time.monotonic() + 100)
    gpu_run.run_on_gpu(gpu_run.SECTIONS[:2], results_in(tmp_path), shared, [], lambda line: None)
    assert [(judge, log.split()[0]) for judge, log in seen] == [(False, "None"), (True, "2")]
    assert all(log.split()[1].split(os.pathsep)[-1] == str(harness.ROOT) for _, log in seen)


# ---- peers and pictures --------------------------------------------------------------------------------


def write_wheel(folder: Path, package: str, version: str) -> Path:
    name = package.replace("-", "_")
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "carried = True\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_carried_peers_are_installed_for_the_run_and_absent_ones_are_named(tmp_path: Path) -> None:
    folder, out = tmp_path / "wheels", tmp_path / "out"
    folder.mkdir()
    good = write_wheel(folder, "humming-kernels", "0.1.20")
    (folder / "gemlite-0.6.0-py3-none-any.whl").write_text("no zip")
    paths = list(sys.path)
    assert invoke(out, "--only", "machine", "--wheels", str(folder)).exit_code == 0
    assert sys.path == paths
    sections = sections_of(out)
    installed = {found["what"]: found["value"] for found in sections["wheels"]["rows"]}
    assert installed.pop(good.name) == "installed" and next(iter(installed.values())).startswith("refused: ")
    said = {found["what"]: found["value"] for found in sections["machine"]["rows"]}
    assert said["peers here"] == "humming-kernels 0.1.20"
    assert said["peers absent, not compared with"] == "gemlite 0.6.0.post2, vllm 0.11.0"


CANNED = {
    "machine": {"found": {"gpu": "NVIDIA H200", "date": "2026-01-01", "versions": {"torch": "2.11.0"}}},
    "attention": {"found": {"copy GB/s": 4300.0, "rows": [{"what": "decode 32x4096", "GB/s": 3700.0, "us": 145.0}]}},
    "matmul": {
        "found": {
            "copy GB/s": 4300.0,
            "rows": [
                {"weights": "q4", "M": m, "shape": "8192x8192", "us": 11.0, "cuBLAS us": 33.0, "bytes": 34_600_000}
                for m in (1, 16)
            ],
        }
    },
    "workloads": {
        "found": {
            "batch": {
                "rows": [
                    {"baseline": "one session, step by step", "baseline_b1_tok_per_sec": 250.0},
                    *({"batch": size, "agg_tok_per_sec": rate} for size, rate in ((1, 300.0), (8, 2000.0))),
                    {"peak": "most tokens a second", "batch": 8, "agg_tok_per_sec": 2000.0},
                ]
            }
        }
    },
}


def test_pictures_are_drawn_of_results_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.json"
    harness.write_json(path, {"dry": False, "sections": CANNED})
    done = CliRunner().invoke(gpu_run.app, ["--plots", str(path)])
    assert done.exit_code == 0 and done.output == "attention.png, matmul.png, batch.png\n"
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in gpu_plots.PLOTS)
    harness.write_json(path, {"dry": False, "sections": {"machine": CANNED["machine"]}})
    assert CliRunner().invoke(gpu_run.app, ["--plots", str(path)]).output == "nothing to draw\n"


def test_pictures_show_the_numbers_and_the_machine_that_made_them() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    results, axes = {"dry": False, "sections": CANNED}, figure.subplots(3)
    for plot, at in zip(gpu_plots.PLOTS.values(), axes, strict=True):
        assert plot(results, at)
    assert [bar.get_width() for bar in axes[0].patches] == [3700.0]
    assert [bar.get_height() for bar in axes[1].patches] == pytest.approx([11.0, 33.0, 34_600_000 / 4300 / 1e3])
    assert axes[2].lines[0].get_xydata().tolist() == [[1.0, 300.0], [8.0, 2000.0]]
    assert list(axes[2].lines[1].get_ydata()) == [250.0, 250.0]
    assert gpu_plots._source(results) == "NVIDIA H200, torch 2.11.0, 2026-01-01"
    assert gpu_plots._source({**results, "dry": True}).startswith("dry run: ")


def test_without_matplotlib_a_row_says_where_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert invoke(tmp_path, "--only", "machine").exit_code == 0
    (found,) = sections_of(tmp_path)["plots"]["rows"]
    assert found["value"] == f"no matplotlib here: python tools/gpu_run.py --plots {tmp_path / 'results.json'}"
    assert found["holds"] is None


# ---- the benches -----------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


def matmul_steps(monkeypatch: pytest.MonkeyPatch, wrong: int) -> list[tuple[str, int]]:
    """Steps of a measurement where the check of one count of rows fails, as they come."""
    steps: list[tuple[str, int]] = []

    def measured_row(of: Any, m: int, machine: Any) -> dict[str, Any]:
        steps.append(("ours", m))
        if m == wrong:
            raise AssertionError("relative error 1")
        return {"weights": "q4", "shape": "8192x8192", "M": m, "us": 10.0, "x cuBLAS": 3.5, "target": "11.5 us"}

    def peer_columns(of: Any, m: int) -> dict[str, Any]:
        return steps.append(("peers", m)) or {"torch int4 us": 12.0}

    def tax_row(of: Any, m: int) -> dict[str, Any]:
        steps.append(("tax", m))
        return {"weights": "q4", "shape": "8192x8192", "M": m, "tax %": float(m), "target": "3 %"}

    machine = SimpleNamespace(copy_gbs=1.0, tflops=1.0, l2_bytes=1)
    monkeypatch.setattr(bench_matmul.Machine, "measured", lambda: machine)
    monkeypatch.setattr(bench_matmul, "Weights", lambda kind, n, k, l2: SimpleNamespace(kind=kind, n=n, k=k, failed={}))
    for step in (measured_row, peer_columns, tax_row):
        monkeypatch.setattr(bench_matmul, step.__name__, step)
    return steps


@pytest.mark.usefixtures("no_gpu_calls")
def test_ours_are_timed_before_peers_and_a_failed_check_voids_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = matmul_steps(monkeypatch, wrong=16)
    measure = partial(bench_matmul.measure, ("q4",), ((8192, 8192), (4096, 4096)), (1, 16, 4))
    monkeypatch.setattr(bench_matmul, "measure", measure)
    run = dry(tmp_path, dry=False)
    with pytest.raises(RuntimeError, match=r"2 void rows: q4 8192x8192, 16 rows: AssertionError: relative error 1"):
        gpu_run.matmul_bench(run)
    assert steps == [("ours", m) for m in (1, 16, 4)] * 2 + [("peers", 1)] * 2 + [("tax", 1)] * 2
    assert [row["M"] for row in run.found["rows"]] == [1, 4] * 2 and run.found["rows"][0]["torch int4 us"] == 12.0
    assert [found["what"] for found in run.rows] == [
        "q4 8192x8192, 1 rows",
        "q4 8192x8192, 4 rows",
        "a fixed order of summation costs at most",
    ]


@pytest.mark.usefixtures("no_gpu_calls")
def test_what_a_bench_has_found_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul_steps(monkeypatch, wrong=0)
    monkeypatch.setattr(bench_matmul, "peer_columns", lambda of, m: signal.raise_signal(signal.SIGTERM))
    run = dry(tmp_path, dry=False)
    with pytest.raises(Stopped), gpu_section.stoppable():
        gpu_run.matmul_bench(run)
    assert run.rows[0]["what"] == "q4 8192x8192, 1 rows" and run.rows[0]["holds"]


@pytest.mark.usefixtures("no_gpu_calls")
def test_attention_cases_are_timed_before_other_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, str]] = []

    def measured_row(of: Any, times: dict[str, float], rates: Any) -> dict[str, Any]:
        steps.append(("ours", of.case.name))
        if of.case.name == "chain of 4":
            raise ValueError("no such page")
        times[of.case.name] = 100.0
        return {"what": of.case.name, "us": 100.0, "target": "<= 149 us", "holds": True}

    def peer_columns(case: Any, layers: int, failed: dict[str, str], names: tuple[str, ...]) -> dict[str, float]:
        steps.extend((name, case.name) for name in names if name in case.peers)
        return {f"{names[0]} us": 1.0}

    def tax_row(of: Any, us: float) -> dict[str, Any]:
        steps.append(("tax", of.case.name))
        return {"what": of.case.name, "tax %": 1.0, "target": "<= 5 %"}

    monkeypatch.setattr(bench_attention.Rates, "measured", lambda: SimpleNamespace(copy_gbs=1.0, tflops=1.0))
    monkeypatch.setattr(
        bench_attention, "Sequences", lambda case, device: SimpleNamespace(case=case, layers=1, time=lambda: 100.0)
    )
    for step in (measured_row, peer_columns, tax_row):
        monkeypatch.setattr(bench_attention, step.__name__, step)
    cases = bench_attention.CASES[:3]
    monkeypatch.setattr(bench_attention, "measure", partial(bench_attention.measure, cases))
    run = dry(tmp_path, dry=False)
    with pytest.raises(RuntimeError, match="1 void rows: chain of 4: ValueError: no such page"):
        gpu_run.attention_bench(run)
    first, second, third = (case.name for case in cases)
    ours = [("ours", first), ("torch", first), ("ours", second), ("torch", second), ("ours", third)]
    peers = [(name, case) for name in ("vLLM", "flex") for case in (first, second)]
    assert steps == [*ours, *peers, ("tax", first)]
    assert [found["what"] for found in run.rows] == [first, second, "our plans cost at most"]


# ---- facts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", gpu_facts.SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operands_of_the_probes_tell_orders_apart(kind: str, dtype: torch.dtype) -> None:
    """Summed backwards, some sums differ in bits: otherwise equal bits would say nothing."""
    a, b = gpu_facts.probe_operands(kind, 16, 16, 256, "cpu", dtype)
    assert a.isfinite().all() and b.isfinite().all()
    products = a.float()[:, None, :] * b.float()[None, :, :]
    forward, backward = torch.zeros(16, 16), torch.zeros(16, 16)
    for k in range(256):
        forward += products[..., k]
        backward += products[..., 255 - k]
    assert forward.isfinite().all() and gpu_section.differing(forward, backward) > 0


def test_operands_of_int8_reach_the_largest_sums() -> None:
    a, b = gpu_facts.probe_operands("largest", 4, 4, 256, "cpu", torch.int8)
    assert {*a.unique().tolist(), *b.unique().tolist()} == {-128, 127}
    a, _ = gpu_facts.probe_operands("any", 4, 4, 4096, "cpu", torch.int8)
    assert (a.min(), a.max()) == (-128, 127)


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("word", gpu_facts.DTYPES)
@pytest.mark.parametrize("name", gpu_facts.PROBES)
def test_probes_compile_to_what_they_claim(name: str, word: str) -> None:
    assert gpu_facts.probe_problem(gpu_facts.PROBES[name], gpu_facts.DTYPES[word]) is None


def test_every_fact_has_its_probes() -> None:
    named = {name for names, _ in gpu_facts.FACTS.values() for name in names} | {gpu_facts.BASE}
    assert named == set(gpu_facts.PROBES)
    instructions = {gpu_facts.PROBES[name].instruction(torch.int8) for name in ("n64", "mma.sync")}
    assert instructions == {"IGMMA", "IMMA"}


@pytest.mark.parametrize("word", gpu_facts.DTYPES)
def test_a_probe_that_differs_breaks_its_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    right = gpu_facts.run_probe

    def wrong(probe: gpu_facts.Probe, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return right(probe, a, b) + (probe.cols == 16)

    monkeypatch.setattr(gpu_facts, "run_probe", wrong)
    monkeypatch.setattr(gpu_facts, "DTYPES", {word: gpu_facts.DTYPES[word]})
    monkeypatch.setattr(gpu_facts, "_compiled", lambda run: None)
    run = dry(tmp_path)
    gpu_facts.facts(run)
    broken = [found for found in run.rows if found["holds"] is False]
    assert [found["what"] for found in broken] == [f"{word}: wgmma n16 = n32 = n64 = n128"]
    assert broken[0]["value"] == "4096 elements differ"


# ---- the memory checker ----------------------------------------------------------------------------------


RACES = "========= RACECHECK SUMMARY: "


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, ("no errors", True)),
        ("========= ERROR SUMMARY: 3 errors", 86, ("3 errors", False)),
        (RACES + "1 hazard displayed (1 error, 0 warnings)", 86, ("1 errors", False)),
        (RACES + "3 hazards displayed (1 error, 2 warnings)", 86, ("1 errors, 2 warnings", False)),
        (RACES + "2 hazards displayed (0 errors, 2 warnings)", 86, ("no errors, 2 warnings", True)),
        (RACES + "0 hazards displayed (0 errors, 0 warnings)", 0, ("no errors", True)),
        ("ValueError: x\n========= ERROR SUMMARY: 0 errors", 1, ("exit 1: ========= ERROR SUMMARY: 0 errors", False)),
        ("Device not supported", 1, ("did not run: Device not supported", None)),
        ("", None, ("out of time", None)),
    ],
)
def test_a_memory_checkers_output_is_judged(log: str, code: int | None, expected: tuple[str, bool | None]) -> None:
    value, _, holds = gpu_memory.judged(log, code)
    assert (value, holds) == expected


def test_an_absent_memory_checker_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "checker", lambda: None)
    run = dry(tmp_path, dry=False)
    gpu_memory.memory(run)
    assert [(found["what"], found["holds"]) for found in run.rows] == [("memcheck", None), ("racecheck", None)]
    assert all(found["value"].startswith("absent: ") for found in run.rows)


def test_a_memory_checker_runs_the_kernels_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text('#!/bin/sh\necho "$@"\necho "RACECHECK SUMMARY: 2 hazards displayed"\nexit 86\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    run = dry(tmp_path, dry=False)
    gpu_memory.memory(run)
    assert [found["holds"] for found in run.rows] == [False, False] and run.rows[0]["value"] == "2 errors"
    asked = f"--error-exitcode 86 {sys.executable} {gpu_memory.__file__}"
    assert f"--tool memcheck --report-api-errors no {asked}" in run.found["memcheck"]
    assert f"--tool racecheck {asked}" in run.found["racecheck"]


# ---- the tests -------------------------------------------------------------------------------------------

BY_WORKERS = """
[gw0] [ 25%] PASSED tests/test_gpu.py::test_values[dtype0-q4 128]
tests/test_gpu.py::test_values[dtype0-q8]
[gw1] [ 50%] FAILED tests/test_gpu.py::test_values[dtype0-q8]
[gw1] [ 75%] SKIPPED tests/test_gpu.py::test_on_a_device_that_is_not_current
[gw0] [100%] ERROR tests/test_gpu.py::test_a_layer
FAILED tests/test_gpu.py::test_values[dtype0-q8] - AssertionError
"""
ALONE = """
tests/test_gpu.py::test_values[dtype0-q4 128] PASSED                     [ 50%]
tests/test_gpu.py::test_on_a_device_that_is_not_current SKIPPED (nee...) [100%]
"""


def test_what_became_of_tests_is_read_from_their_output() -> None:
    outcomes = gpu_run.outcomes_of(BY_WORKERS)
    assert list(outcomes.values()) == ["PASSED", "FAILED", "SKIPPED", "ERROR"]
    assert outcomes["tests/test_gpu.py::test_values[dtype0-q4 128]"] == "PASSED"
    assert gpu_run.tests_judged(outcomes, BY_WORKERS, 1) == ("1 pass, 2 fail, 1 skipped", "all pass", False)
    assert gpu_run.tests_judged(outcomes, BY_WORKERS, None)[2] is False
    passed = gpu_run.outcomes_of(ALONE)
    assert gpu_run.tests_judged(passed, ALONE, 0) == ("1 pass, 0 fail, 1 skipped", "all pass", True)
    assert gpu_run.tests_judged(passed, ALONE, None) == ("out of time: 1 pass, 0 fail, 1 skipped", "all pass", None)
    assert gpu_run.tests_judged(passed, ALONE, 3)[2] is False and gpu_run.tests_judged({}, "no", 4)[2] is False
    assert gpu_run.tests_judged({}, "", 0)[2] is False


def test_the_tests_on_a_gpu_need_no_gguf() -> None:
    def imported(path: Path) -> set[str]:
        """By a module when it is imported, through modules beside it too."""
        found = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
                found |= {name.split(".")[0] for name in names}
        beside = [path.with_name(f"{name}.py") for name in found]
        return found.union(*(imported(other) for other in beside if other.exists()))

    for name in gpu_run.TEST_FILES:
        assert "gguf" not in imported(harness.ROOT / name)
    assert "gguf" in imported(Path(__file__))


# ---- the model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model and its reference, as a dry run has them."""
    folder = gpu_model.folder_of(dry(tmp_path_factory.mktemp("random")))
    assert folder is not None
    return folder


def assert_is_beginning(part_path: Path, whole_path: Path, layers: int) -> None:
    with open_checkpoint(whole_path) as whole, open_checkpoint(part_path) as part:
        assert part.config == replace(whole.config, num_layers=layers)
        assert list(part.metadata) and set(part.metadata) == set(whole.metadata)
        assert {key for key in whole.metadata if part.metadata[key] != whole.metadata[key]} == {"llama.block_count"}
        kept = [name for name in whole.tensors if not name.startswith("layers.") or int(name.split(".")[1]) < layers]
        assert set(part.tensors) == set(kept)
        for name in kept:
            assert part.tensors[name].kind == whole.tensors[name].kind
            assert torch.equal(part.raw(name), whole.raw(name)), name


def test_a_cut_model_is_the_first_layers_of_the_whole_one(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf", "llama", kind="Q8_0", keys={"general.tags": ["a", "b"]})
    cut_model.cut(whole, tmp_path / "part.gguf", 2)
    assert_is_beginning(tmp_path / "part.gguf", whole, 2)
    with pytest.raises(typer.BadParameter, match=r"--layers 4: .* has 3 layers"):
        cut_model.cut(whole, tmp_path / "part.gguf", 4)


@pytest.mark.slow
@pytest.mark.demo_model
def test_the_demo_model_is_cut_to_what_can_be_carried(demo_model_path: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cut_model.app, ["--out", str(tmp_path), "--source", str(demo_model_path)])
    assert done.exit_code == 0, done.output
    assert_is_beginning(tmp_path / cut_model.MODEL, demo_model_path, 12)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 60 * 2**20
    prompts = cut_model.read_reference(tmp_path)
    assert len(prompts) == len(cut_model.PROMPTS)
    with Engine(config=EngineConfig(prefix_cache=False)) as engine:
        made = gpu_model.Model(engine, prompts, 8)
        run = dry(tmp_path)
        for name in ("file", "q8", "w8a8"):  # a CPU's q4 has other groups
            engine.add(name, tmp_path / cut_model.MODEL, weights=name)
            gpu_model.compare(run, made, name)
    assert [found["holds"] for found in run.rows] == [True] * 4, run.rows


def test_references_are_what_float32_gives(random_model: Path) -> None:
    prompt = gpu_model.read_reference(random_model)[0]
    with Engine() as engine:
        engine.add("m", random_model, weights="f32")
        assert engine["m"].tokenizer.encode("abcdefgh") == prompt.ids and prompt.positions == [4, 8]
        with engine.session("m") as session:
            for position, logits in zip(prompt.positions, prompt.logits["file"], strict=True):
                assert torch.equal(session.append(prompt.ids[position - 4 : position]), logits)
            top = prompt.logits["file"][-1].topk(2)
            assert prompt.tokens[0] == top.indices[0] and prompt.margins[0] == top.values[0] - top.values[1]
            assert session.generate(4) == prompt.tokens
    assert not torch.equal(prompt.logits["q8"][-1], prompt.logits["q4"][-1])


@pytest.fixture
def hosted(random_model: Path, tmp_path: Path) -> Iterator[gpu_model.Model]:
    with gpu_model.hosted(dry(tmp_path), random_model) as made:
        yield made


def test_every_kind_of_weights_is_within_its_tolerance(
    hosted: gpu_model.Model, random_model: Path, tmp_path: Path
) -> None:
    run = dry(tmp_path)
    for name in gpu_model.WEIGHTS[1:]:
        hosted.engine.add(name, random_model, weights=name)
        gpu_model.compare(run, hosted, name)
    assert [found["holds"] for found in run.rows] == [True] * 3, run.rows


def test_logits_and_tokens_that_are_not_the_references_do_not_hold(hosted: gpu_model.Model, tmp_path: Path) -> None:
    prompt = hosted.prompts[0]
    logits = prompt.logits | {"file": prompt.logits["file"] * torch.tensor([[1.0], [1.2]])}
    close = replace(prompt, logits=logits, tokens=[prompt.tokens[0] ^ 1], margins=[0.0])
    far = replace(close, margins=[1e9])
    for prompts, expected in (([close], [False, True]), ([far], [False, False])):
        run = dry(tmp_path)
        gpu_model.compare(run, replace(hosted, prompts=prompts), "file")
        assert [found["holds"] for found in run.rows] == expected
    assert "token 0: " in run.rows[1]["value"]


@pytest.mark.parametrize("promise", [name for name in gpu_model.PROMISES if name != "drafted = plain"])
def test_a_promise_that_is_broken_is_found(
    hosted: gpu_model.Model, monkeypatch: pytest.MonkeyPatch, promise: str
) -> None:
    """Each third call of append takes another last token."""
    right, calls = Session.append, iter(range(10**6))
    assert set(gpu_model.PROMISES[promise](hosted, "file")) == {None}
    monkeypatch.setattr(Session, "append", lambda self, ids: right(self, [*ids[:-1], ids[-1] ^ (next(calls) % 3 == 2)]))
    assert any(gpu_model.PROMISES[promise](hosted, "file"))


def test_drafts_that_change_tokens_are_found(hosted: gpu_model.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Engine.generate

    def wrong(self: Engine, model: str, **options: Any) -> Any:
        made = right(self, model, **options)
        return replace(made, tokens=[*made.tokens[:-1], 7]) if options["draft"] == "ngram" else made

    monkeypatch.setattr(Engine, "generate", wrong)
    found = list(filter(None, gpu_model.drafted(hosted, "file")))
    assert len(found) == 2 and all(problem.startswith("ngram") for problem in found)


def test_an_absent_model_holds_nothing(tmp_path: Path) -> None:
    for section in (gpu_model.model, gpu_model.speed):
        run = dry(tmp_path, dry=False, model=tmp_path / "none")
        section(run)
        (found,) = run.rows
        assert found["value"].startswith("absent: ") and str(tmp_path / "none") in found["value"]
        assert found["holds"] is None
