"""The one-command GPU run: what of it can be checked without a GPU."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton.language")

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

from csrc_triton import launch
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
    for name, names in (("exact", gpu_exact.CHECKS), ("values", gpu_values.KERNELS)):
        assert [found["what"] for found in sections[name]["rows"]] == list(names)
    said = [found["what"] for found in sections["model"]["rows"]]
    assert said == ["file: logits, relative RMS", "file: tokens", *gpu_model.PROMISES]
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


def test_judges_go_together_and_what_times_goes_alone() -> None:
    groups = [[s.name for s in group] for group in gpu_run.steps(gpu_run.SECTIONS)]
    assert groups[:3] == [["machine"], ["facts", "exact", "values", "model", "memory", "tests"], ["speed"]]
    assert all(len(group) == 1 for group in groups[2:])


# ---- what goes wrong ---------------------------------------------------------------------------------


def only(monkeypatch: pytest.MonkeyPatch, run: Callable[[Run], None], name: str = "exact") -> None:
    monkeypatch.setattr(gpu_run, "SECTIONS", (gpu_run.Section(name, run, 1, is_judge=True),))


def test_a_kernel_whose_bits_follow_its_company_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_exact.matmul
    monkeypatch.setattr(gpu_exact, "matmul", lambda x, w: right(x, w) * (1.0 if len(x) != 17 else 1.01))
    name = "a row's bits in any company"
    monkeypatch.setattr(gpu_exact, "CHECKS", {name: gpu_exact.rows_alone})
    done = invoke(tmp_path, "--only", "exact")
    (found,) = sections_of(tmp_path)["exact"]["rows"]
    assert done.exit_code == 1 and found["what"] == name and found["holds"] is False
    assert found["value"].startswith("2 differ: q4, rows 49 to 66: ")


def test_a_kernel_with_wrong_values_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_values.rmsnorm
    monkeypatch.setattr(gpu_values, "rmsnorm", lambda x, w, eps: right(x, w, eps) * 1.01)
    monkeypatch.setattr(gpu_values, "KERNELS", {name: gpu_values.KERNELS[name] for name in ("rmsnorm", "swiglu")})
    assert invoke(tmp_path, "--only", "values").exit_code == 1
    norm, gate = sections_of(tmp_path)["values"]["rows"]
    assert norm["holds"] is False and norm["value"].startswith("1 of 3 cases wrong") and gate["holds"] is True


def test_a_number_that_is_none_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_values, "KERNELS", {"k": lambda run: iter([("nan", float("nan"), 1.0), ("fine", 0, 0)])})
    run = dry(tmp_path)
    gpu_values.values(run)
    assert run.rows[0]["holds"] is False and "nan of 1 allowed: nan" in run.rows[0]["value"]


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

    for judge in ("facts", "exact", "values", "model", "memory", "tests"):
        assert holds(judge, True) and holds(judge, None) and not holds(judge, False)
    assert holds("matmul", False) and holds("exact", True, "out of time")
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


def child(folder: Path, name: str, script: str, seconds: float = 30) -> gpu_run.Child:
    """A section whose process is a script; part: where it keeps what it finds."""
    part = folder / f"{name}.json"
    said = json.dumps({"rows": [row("before", True)], "found": {"n": 1}})
    code = f"import os, signal, subprocess, sys, time\npart, said = {str(part)!r}, {said!r}\n" + textwrap.dedent(script)
    process = Process([sys.executable, "-S", "-c", code], folder / f"{name}.log", seconds)
    return gpu_run.Child(gpu_run.Section(name, lambda run: None, 1), process, part)


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


def test_a_section_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    shared = Run(tmp_path, tmp_path, False, time.monotonic() + 100)
    gpu_run.run_on_gpu(gpu_run.SECTIONS[:1], results_in(tmp_path), shared, ["--dry"], lambda line: None)
    found = sections_of(tmp_path)["machine"]
    assert found["status"] == "done" and found["rows"][0]["what"] == "GPU" and found["found"]["versions"]["torch"]


def test_no_section_starts_without_time_for_it(tmp_path: Path) -> None:
    shared = Run(tmp_path, tmp_path, False, time.monotonic() + 20)
    gpu_run.run_on_gpu(gpu_run.SECTIONS[:2], results_in(tmp_path), shared, [], lambda line: None)
    assert {section["status"] for section in sections_of(tmp_path).values()} == {"no time left"}


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
    (folder / "torchao-0.17.0-py3-none-any.whl").write_text("no zip")
    paths = list(sys.path)
    assert invoke(out, "--only", "machine", "--wheels", str(folder)).exit_code == 0
    assert sys.path == paths
    sections = sections_of(out)
    installed = {found["what"]: found["value"] for found in sections["wheels"]["rows"]}
    assert installed.pop(good.name) == "installed" and next(iter(installed.values())).startswith("refused: ")
    said = {found["what"]: found["value"] for found in sections["machine"]["rows"]}
    assert said["peers here"] == "humming-kernels 0.1.20"
    absent = "gemlite 0.6.0.post2, flashinfer-python 0.5.3, torchao 0.17.0"
    assert said["peers absent, not compared with"] == absent


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
    "speed": {"found": {"decode tokens/s": {"file": {"1": 300.0, "8": 2000.0}}}},
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
    assert gpu_plots._source(results) == "NVIDIA H200, torch 2.11.0, 2026-01-01"
    assert gpu_plots._source({**results, "dry": True}).startswith("dry run: ")


def test_without_matplotlib_a_row_says_where_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert invoke(tmp_path, "--only", "machine").exit_code == 0
    (found,) = sections_of(tmp_path)["plots"]["rows"]
    assert found["value"] == f"no matplotlib here: python tools/gpu_run.py --plots {tmp_path / 'results.json'}"
    assert found["holds"] is None


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


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, ("nothing found", True)),
        ("========= ERROR SUMMARY: 3 errors", 86, ("3 found", False)),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", 86, ("1 found", False)),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, ("nothing found", True)),
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
    assert [found["holds"] for found in run.rows] == [False, False] and run.rows[0]["value"] == "2 found"
    assert f"--tool memcheck --error-exitcode 86 {sys.executable} {gpu_memory.__file__}" in run.found["memcheck"]


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
    assert list(gpu_model.PROMISES[promise](hosted, "file")) == []
    monkeypatch.setattr(Session, "append", lambda self, ids: right(self, [*ids[:-1], ids[-1] ^ (next(calls) % 3 == 2)]))
    assert list(gpu_model.PROMISES[promise](hosted, "file"))


def test_drafts_that_change_tokens_are_found(hosted: gpu_model.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Engine.generate

    def wrong(self: Engine, model: str, **options: Any) -> Any:
        made = right(self, model, **options)
        return replace(made, tokens=[*made.tokens[:-1], 7]) if options["draft"] == "ngram" else made

    monkeypatch.setattr(Engine, "generate", wrong)
    found = list(gpu_model.drafted(hosted, "file"))
    assert len(found) == 2 and all(problem.startswith("ngram") for problem in found)


def test_an_absent_model_holds_nothing(tmp_path: Path) -> None:
    for section in (gpu_model.model, gpu_model.speed):
        run = dry(tmp_path, dry=False, model=tmp_path / "none")
        section(run)
        (found,) = run.rows
        assert found["value"].startswith("absent: ") and str(tmp_path / "none") in found["value"]
        assert found["holds"] is None
