"""One run on a GPU: the machine and its ceilings, hardware facts, every kernel by value and bit, a model, the benches.

    python tools/gpu_run.py [--minutes 9.5] [--out DIR] [--only facts --only matmul] [--model FOLDER] [--wheels FOLDER]
    python tools/gpu_run.py --dry        no GPU: every section in small, by interpreter, dry run and static model
    python tools/gpu_run.py --plots DIR/results.json

Every section is a process of its own, so that a fault or a hang costs one section. Those that only judge values and
bits run side by side, as the compiler is what they wait for; those that time anything have the GPU to themselves.
DIR/results.json is written anew whenever something is known, so that a run cut short, or killed, leaves all of it; a
table at the end says what held. Needs no network; FOLDER of --model is one of tools/cut_model.py, that of --wheels
holds wheels of peers (PEERS) and of packages that the tests need.

A section is an entry of SECTIONS: a name, its share of the time, and a function from a Run to rows of
{"what", "value", "target", "holds"}; whatever else it finds it puts into run.found.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("bench", "tests"))

import autotune
import bench_attention
import bench_matmul
import gpu_plots
import torch
import typer
from dryrun import dryrun
from gpu_exact import exact
from gpu_facts import facts
from gpu_memory import memory
from gpu_model import model, speed
from gpu_section import DRY_ARCH, POLL_SECONDS, Process, Row, Run, Stopped, finished, stoppable
from gpu_values import values
from harness import (
    ROOT,
    console,
    copy_gbs,
    cublas_tflops,
    environment,
    gpu_folder,
    has_gpu,
    installed,
    made_up_rows,
    rows_table,
    write_json,
)

from csrc_triton import launch
from csrc_triton.fused import rmsnorm

COPY_GBS, CUBLAS_TFLOPS = 4300.0, 788.0  # of an H200
START_SECONDS = 15  # of a section's process
# packages to carry as wheels, by version; what the benches know of them is timed beside ours
PEERS = {
    "gemlite": "0.6.0.post2",
    "humming-kernels": "0.1.20",
    "flashinfer-python": "0.5.3",
    "torchao": "0.17.0",
}

# ---- machine -------------------------------------------------------------------------------------------


def machine(run: Run) -> None:
    """Environment, and the ceilings that rates are compared with."""
    run.found |= environment()
    run.row("GPU", run.found["gpu"] or "none: dry run")
    here = {name: version for name in PEERS if (version := installed(name)) is not None}
    run.found["peers"] = here
    absent = [f"{name} {version}" for name, version in PEERS.items() if name not in here]
    run.row("peers here", ", ".join(f"{name} {version}" for name, version in here.items()) or "none")
    run.row("peers absent, not compared with", ", ".join(absent) or "none")
    if run.dry:
        return
    copy = run.found["copy GB/s"] = copy_gbs()
    run.row("copy, GB/s", copy, f"{COPY_GBS:.0f}", copy > 0.9 * COPY_GBS)
    tflops = run.found["cuBLAS TFLOP/s"] = cublas_tflops()
    run.row("cuBLAS bfloat16 8192^3, TFLOP/s", tflops, f"{CUBLAS_TFLOPS:.0f}", tflops > 0.9 * CUBLAS_TFLOPS)


# ---- tests -----------------------------------------------------------------------------------------------


def tests(run: Run) -> None:
    """`pytest -m gpu`; in a dry run only the tests that there would be."""
    files = [str(p) for p in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in p.read_text()]
    run.found["files"] = [Path(file).name for file in files]
    if run.dry:
        run.row("test files with GPU tests", len(files))
        return
    if not files:
        run.row("GPU tests", "none", None, None)
        return
    if find_spec("gguf") is None:
        run.row("pytest -m gpu", "absent: the tests need the package gguf, as a wheel in the folder of --wheels")
        return
    report = run.scratch / "gpu-tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", "-p", "no:cacheprovider"]
    log, code = finished([*command, *files], run.left())
    run.found |= {"exit": code, "log": log[-6000:]}
    if not report.exists():
        run.row("pytest -m gpu", "out of time" if code is None else f"exit {code}", "all pass", False)
        return
    suite = next(ElementTree.parse(report).iter("testsuite"))
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{c.get('classname')}::{c.get('name')}" for c in suite.iter("testcase") if len(c) and c[0].tag != "skipped"
    ]
    run.found |= {"counts": count, "failed": failed}
    bad = count["failures"] + count["errors"]
    passed = count["tests"] - bad - count["skipped"]
    run.row(
        "pytest -m gpu", f"{passed} pass, {bad} fail, {count['skipped']} skipped", "all pass", bad == 0 and passed > 0
    )


# ---- benches ---------------------------------------------------------------------------------------------


def matmul_bench(run: Run) -> None:
    """bench/bench_matmul.py: ours, cuBLAS and peers, what is most telling first."""
    if run.dry:
        run.found |= bench_matmul.static(("q4",), ((4096, 4096),), (1,))
        run.row(f"q4 4096x4096, 1 row, us ({bench_matmul.MODEL})", run.found["rows"][0]["us"])
        return

    def progress(result: dict[str, Any]) -> None:
        run.found |= result
        run.save()

    result = bench_matmul.measure(deadline=run.deadline, progress=progress)
    run.found |= result
    for row in result["rows"]:
        if row["target"]:
            value = f"{row['us']:.2f} us, {row['x cuBLAS']:.2f}x"
            run.row(f"{row['weights']} {row['shape']}, {row['M']} rows", value, row["target"], meets(row))
    if result["tax"]:
        worst = max(result["tax"], key=lambda row: row["tax %"])
        value = f"{worst['tax %']:.1f} % ({worst['weights']} {worst['shape']}, {worst['M']} rows)"
        holds = worst["tax %"] <= 100 * bench_matmul.TAX_TARGET
        run.row("a fixed order of summation costs at most", value, worst["target"], holds)


def meets(row: Row) -> bool:
    """Whether a measured row meets all its targets."""
    parts = str(row["target"]).split(", ")
    return all(
        row["us"] <= float(part[:-3]) if part.endswith(" us") else row["x cuBLAS"] >= float(part[:-1]) for part in parts
    )


def attention_bench(run: Run) -> None:
    """bench/bench_attention.py: decode, prompts, chains, trees, cascades and page moves, the most telling first."""
    if run.dry:
        few = [case for case in bench_attention.CASES if case.name == bench_attention.LLAMA]
        run.found |= bench_attention.static(few)
        row = run.found["rows"][0]
        run.row(f"{row['what']}, us ({bench_attention.MODEL})", row["us"], row["target"], row["holds"])
        return

    def progress(result: dict[str, Any]) -> None:
        run.found |= result
        run.save()

    result = bench_attention.measure(deadline=run.deadline, progress=progress)
    run.found |= result
    for row in result["rows"]:
        if "target" in row:
            rates = (("GB/s", "{:.0f} GB/s"), ("TFLOP/s", "{:.0f} TFLOP/s"), ("x base", "{:.2f}x"))
            shown = [text.format(row[name]) for name, text in rates if name in row]
            run.row(row["what"], ", ".join([f"{row['us']:.1f} us", *shown]), row["target"], row["holds"])
    if result["tax"]:
        worst = max(result["tax"], key=lambda row: row["tax %"])
        holds = worst["tax %"] <= 100 * bench_attention.TAX_TARGET
        run.row("our plans cost at most", f"{worst['tax %']:.1f} % ({worst['what']})", worst["target"], holds)


def fused_bench(run: Run) -> None:
    """bench/bench_fused.py: the row-wise kernels beside torch."""
    if run.dry:
        with dryrun(DRY_ARCH) as launches:
            rmsnorm(made_up_rows(2, 576), torch.ones(576, dtype=torch.bfloat16), 1e-5)
        run.row("rmsnorm compiles, registers", launches[0].registers)
        return
    report = run.scratch / "fused.json"
    command = [sys.executable, "-m", "pytest", "-q", "bench/bench_fused.py", f"--benchmark-json={report}", "-m", "gpu"]
    log, code = finished([*command, "-p", "no:cacheprovider"], run.left())
    run.found |= {"exit": code, "log": log[-3000:]}
    if report.exists():
        made = json.loads(report.read_text())["benchmarks"]
        run.found["rows"] = [{"name": b["name"], **b["extra_info"]} for b in made]
        ratios = [row["x torch"] for row in run.found["rows"] if "x torch" in row]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            run.row(f"row-wise kernels, x torch ({len(ratios)} cases)", f"{mean:.2f}, least {min(ratios):.2f}")
    if code is None:
        run.row("bench_fused", "out of time")
    elif code:
        raise RuntimeError(f"bench_fused: exit {code}: {(log.strip().splitlines() or [''])[-1]}")


def tiles(run: Run) -> None:
    """tools/autotune.py with the time that is left; go on with --only tiles."""
    if run.dry:
        few = autotune.TUNABLES[0].tiles(16)[:2]
        cut = replace(autotune.TUNABLES[0], buckets=(16,), tiles=lambda bucket: few, ranked=("q4",), kinds=("q4",))
        written = autotune.make_table(DRY_ARCH, None, run.out / f"sm_{DRY_ARCH}.json", (cut,))
        run.row("a tile table is written", "yes" if written else "no", "yes", written)
        return
    arch = launch.arch_of(torch.empty(1, device="cuda"))
    path, name = run.out / f"sm_{arch}.json", torch.cuda.get_device_name()
    written = autotune.make_table(arch, name, path, minutes=run.left() / 60)
    run.row("tile table", str(path) if written else "out of time; --only tiles goes on")


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    run: Callable[[Run], None]
    minutes: float  # at most
    is_judge: bool = False  # of values and bits alone: beside others, and what does not hold fails the run


SECTIONS = (
    Section("machine", machine, 0.5),
    Section("facts", facts, 2, is_judge=True),
    Section("exact", exact, 4, is_judge=True),
    Section("values", values, 4, is_judge=True),
    Section("model", model, 3, is_judge=True),
    Section("memory", memory, 3, is_judge=True),
    Section("tests", tests, 4, is_judge=True),
    Section("speed", speed, 1),
    Section("attention", attention_bench, 2),
    Section("matmul", matmul_bench, 3),
    Section("fused", fused_bench, 1),
    Section("tiles", tiles, 10),
)


# ---- the run ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Results:
    """All that is known; in the file as soon as it is."""

    path: Path
    content: dict[str, Any]

    def note(self, section: str, known: dict[str, Any], status: str, **more: Any) -> None:
        self.content["sections"][section] = {"status": status, **more, **known}
        write_json(self.path, self.content)


def run_section(section: Section, run: Run) -> str:
    """ "done", or what went wrong."""
    try:
        section.run(run)
    except Exception as error:  # the other sections go on
        status = f"failed: {type(error).__name__}: {error}".splitlines()[0][:300]
    else:
        status = "done" if run.left() > 0 else "cut short"
    run.save()
    return status


@dataclass(slots=True)
class Child:
    """A section in a process of its own. What it knows is in a file, which it writes anew with every row."""

    section: Section
    process: Process
    part: Path
    began: float = field(default_factory=time.monotonic)
    seen: float = 0.0  # the file's time

    def known(self) -> dict[str, Any]:
        return json.loads(self.part.read_text()) if self.part.exists() else {"rows": [], "found": {}}

    def news(self) -> dict[str, Any] | None:
        """What is known, if it is more than last time."""
        with suppress(FileNotFoundError):
            if (now := self.part.stat().st_mtime) != self.seen:
                self.seen = now
                return self.known()
        return None

    def status(self) -> str:
        """Of a process that is over."""
        code, last = self.process.code, (self.process.log.strip().splitlines() or [""])[-1][:300]
        if code is None:
            return "out of time"
        if code == 0:
            return self.known().get("status", "done")
        return last if last.startswith("failed: ") else f"died with {_named(code)}: {last}"


def _named(code: int) -> str:
    with suppress(ValueError):
        return signal.Signals(-code).name if code < 0 else f"exit {code}"
    return f"exit {code}"


def watch(children: Sequence[Child], results: Results, say: Callable[[str], None]) -> None:
    """Until all are over; what they find is noted as it comes, whatever ends them."""
    waiting = list(children)
    for child in waiting:
        results.note(child.section.name, child.known(), "running")
    try:
        while waiting:
            time.sleep(POLL_SECONDS)
            for child in list(waiting):
                if (known := child.news()) is not None:
                    results.note(child.section.name, known, "running")
                if child.process.is_over():
                    child.process.end()
                    waiting.remove(child)
                    _conclude(child, results, child.status(), say)
    except BaseException:
        for child in waiting:
            child.process.end()
            _conclude(child, results, "stopped", say)
        raise


def _conclude(child: Child, results: Results, status: str, say: Callable[[str], None]) -> None:
    seconds, known = round(time.monotonic() - child.began, 1), child.known()
    log = {} if status == "done" else {"log": child.process.log[-3000:]}
    results.note(child.section.name, known | log, status, seconds=seconds)
    say(f"{child.section.name}: {status}, {seconds} s")


def steps(sections: Sequence[Section]) -> Iterator[list[Section]]:
    """Judges that follow each other go together, all others alone."""
    group: list[Section] = []
    for section in sections:
        if group and not (section.is_judge and group[-1].is_judge):
            yield group
            group = []
        group.append(section)
    if group:
        yield group


def run_on_gpu(
    sections: Sequence[Section], results: Results, shared: Run, arguments: Sequence[str], say: Callable[[str], None]
) -> None:
    for group in steps(sections):
        children = []
        for section in group:
            seconds = min(shared.left() - START_SECONDS, 60 * section.minutes)
            if seconds < START_SECONDS:
                results.note(section.name, {"rows": [], "found": {}}, "no time left")
                continue
            part = shared.scratch / f"{section.name}.json"
            command = [sys.executable, str(Path(__file__)), "--section", section.name, "--part", str(part)]
            command += ["--out", str(shared.out), "--minutes", str(seconds / 60), *arguments]
            process = Process(command, shared.scratch / f"{section.name}.log", seconds + START_SECONDS)
            children.append(Child(section, process, part))
        watch(children, results, say)


def run_dry(sections: Sequence[Section], results: Results, shared: Run, say: Callable[[str], None]) -> None:
    """One after the other, here."""
    for section in sections:
        began, name = time.monotonic(), section.name
        run = replace(shared, keep=lambda known, name=name: results.note(name, known, "running"), found={}, rows=[])
        try:
            status = run_section(section, run)
        except Stopped:
            results.note(name, run.known, "stopped")
            raise
        seconds = round(time.monotonic() - began, 1)
        results.note(name, run.known, status, seconds=seconds)
        say(f"{name}: {status}, {seconds} s")


@contextmanager
def wheels_installed(folder: Path | None, results: Results) -> Iterator[None]:
    """The wheels of a folder, in a temporary one that is searched first; a row for each that pip refuses."""
    if folder is None:
        yield
        return
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise typer.BadParameter(f"--wheels: no wheels in {folder}")
    with tempfile.TemporaryDirectory(prefix="wheels-") as target:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        rows: list[Row] = []
        for wheel in wheels:
            log, code = finished([*pip, "--disable-pip-version-check", "--target", target, str(wheel)], 120)
            value = "installed" if code == 0 else f"refused: {(log.strip().splitlines() or ['no output'])[-1][:160]}"
            rows.append({"what": wheel.name, "value": value, "target": None, "holds": None})
        results.note("wheels", {"rows": rows, "found": {}}, "done")
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([target, *([before] if before else [])])
        sys.path.insert(0, target)
        try:
            yield
        finally:
            sys.path.remove(target)
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before


def add_plots(results: Results) -> None:
    try:
        value = ", ".join(gpu_plots.draw(results.content, results.path.parent)) or "nothing to draw"
    except ImportError:
        value = f"no matplotlib here: python tools/gpu_run.py --plots {results.path}"
    row = {"what": "pictures", "value": value, "target": None, "holds": None}
    results.note("plots", {"rows": [row], "found": {}}, "done")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(help="in all")] = 9.5,
    dry: Annotated[bool, typer.Option("--dry", help="no GPU: everything in small")] = False,
    out: Annotated[Path | None, typer.Option(help="folder; bench/results/<gpu> where not given")] = None,
    only: Annotated[list[str] | None, typer.Option(help="only these sections")] = None,
    model: Annotated[Path | None, typer.Option(help="of tools/cut_model.py; build/smollm2-12 where not given")] = None,
    wheels: Annotated[Path | None, typer.Option(help="folder of wheels to install for this run")] = None,
    plots: Annotated[Path | None, typer.Option(help="draw this results.json beside it, and nothing else")] = None,
    section: Annotated[str | None, typer.Option(hidden=True, help="run this section here")] = None,
    part: Annotated[Path | None, typer.Option(hidden=True, help="where the section keeps what it finds")] = None,
) -> None:
    """Run the sections and write results.json."""
    start = time.monotonic()
    if plots is not None:
        print(", ".join(gpu_plots.draw(json.loads(plots.read_text()), plots.parent)) or "nothing to draw")
        return
    if not dry and not has_gpu():
        raise typer.BadParameter("no CUDA device; --dry goes through the sections without one")
    names = [s.name for s in SECTIONS]
    if unknown := {*(only or ()), *([section] if section else ())} - set(names):
        raise typer.BadParameter(f"unknown section {sorted(unknown)}; there are {names}")
    if out is None:
        name = None if dry else torch.cuda.get_device_name()
        out = Path(tempfile.mkdtemp(prefix="gpu_run-")) if dry else ROOT / "bench" / "results" / gpu_folder(name)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu_run-") as scratch:
        shared = Run(out, Path(scratch), dry, start + 60 * minutes, model)
        if section is not None:
            _in_process(section, part or out / f"{section}.json", shared)
            return
        command = " ".join(["python", "tools/gpu_run.py", *sys.argv[1:]])
        content: dict[str, Any] = {"command": command, "dry": dry, "sections": {}}
        path, screen = out / "results.json", console()
        if only and path.exists():
            content = json.loads(path.read_text()) | {"command": command}
        results = Results(path, content)

        def say(line: str) -> None:
            screen.print(line, highlight=False, markup=False)

        chosen = [s for s in SECTIONS if not only or s.name in only]
        stopped = ""
        try:
            with stoppable(), wheels_installed(wheels, results):
                if dry:
                    run_dry(chosen, results, shared, say)
                else:
                    run_on_gpu(chosen, results, shared, ["--model", str(model)] if model else [], say)
        except Stopped as signal_name:
            stopped = results.content["stopped"] = str(signal_name)
        add_plots(results)
        title = f"{command}: {path}" + (f" (stopped by {stopped})" if stopped else "")
        screen.print(rows_table(title, summary(content), ("section", "what", "value", "target", "holds")))
        raise typer.Exit(128 + signal.Signals[stopped] if stopped else int(not all_hold(content)))


def _in_process(name: str, part: Path, run: Run) -> None:
    """A child's main: its section, what it finds in `part`; 1 where it failed."""
    run.keep = lambda known: write_json(part, known)
    try:
        with stoppable():
            status = run_section(next(s for s in SECTIONS if s.name == name), run)
    except Stopped:
        raise typer.Exit(1) from None
    if status.startswith("failed"):
        print(status)
        raise typer.Exit(1)
    write_json(part, run.known | {"status": status})


def summary(content: dict[str, Any]) -> list[Row]:
    rows = []
    for name, section in content["sections"].items():
        more = [] if section["status"] == "done" else [{"what": section["status"]}]
        rows += [{"section": name, **row} for row in [*section["rows"], *more]]
    return rows


def all_hold(content: dict[str, Any]) -> bool:
    """Values and bits; a missed target of speed is no failure, nor is what was cut short."""
    judges = {s.name for s in SECTIONS if s.is_judge}
    rows = [row for name, section in content["sections"].items() if name in judges for row in section["rows"]]
    failed = any(s["status"].startswith(("failed", "died")) for s in content["sections"].values())
    return not failed and all(row["holds"] is not False for row in rows)


if __name__ == "__main__":
    app()
