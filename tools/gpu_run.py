"""One run on a GPU: the machine and its ceilings, hardware facts, every kernel by value and bit, a model, the benches.

    python tools/gpu_run.py [--minutes 8.5] [--out DIR] [--only facts --only matmul] [--model FOLDER] [--wheels FOLDER]
    python tools/gpu_run.py --dry        no GPU: every section in small, by interpreter, dry run and static model
    python tools/gpu_run.py --plots DIR/results.json

Every section is a process of its own, so that a fault or a hang costs one section. Those that only judge values and
bits run side by side, as the compiler is what they wait for; those that time anything have the GPU to themselves. Time
is shared out by what each needs; what one leaves goes to those after it. DIR/results.json is written anew whenever
something is known, so that a run cut short, or killed, leaves all of it; a table at the end says what held, and what
was not judged. Needs no network and no install; FOLDER of --model is one of tools/cut_model.py, that of --wheels holds
wheels of peers (PEERS).

A section is an entry of SECTIONS: a name, its share of the time, and a function from a Run to rows of
{"what", "value", "target", "holds"}; whatever else it finds it puts into run.found. Rows that it should have and has
not are "not reached". The exit status is 1 where a value or a bit does not hold, or a section fails.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "bench", "tests"))

import autotune
import bench_attention
import bench_matmul
import gpu_exact
import gpu_facts
import gpu_memory
import gpu_model
import gpu_plots
import gpu_values
import torch
import typer
from dryrun import dryrun
from gpu_section import (
    DRY_ARCH,
    NOT_REACHED,
    POLL_SECONDS,
    TO_BE_KNOWN,
    Process,
    Row,
    Run,
    Stopped,
    born,
    finished,
    stoppable,
)
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
from polymodel.selfcheck import selfcheck
from polymodel.workloads.batch import run_batch
from polymodel.workloads.report import Setting
from polymodel.workloads.switch import run_switch

COPY_GBS, CUBLAS_TFLOPS = 4300.0, 788.0  # of an H200
START_SECONDS, LATE_SECONDS = 15, 8  # of a section's process: its imports, and what it may be late by
MIN_SECONDS = 10  # that a section needs to be of use
RESERVED_SECONDS = 20  # of the run: for its pictures and its table
JUDGES = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}  # they share the cores
TEST_FILES = ("tests/test_gpu.py",)
TEST_WORKERS = 8
# packages to carry as wheels, by version; what the benches know of them is timed beside ours
PEERS = dict([*bench_matmul.PACKAGES.values(), *bench_attention.PACKAGES.values()])

# ---- machine -------------------------------------------------------------------------------------------


def machine(run: Run) -> None:
    """Environment, and the ceilings that rates are compared with."""
    run.found |= environment()
    run.found["commit"] = run.commit or run.found["commit"]
    run.row("commit", run.found["commit"] or "unknown: no .git here, and no --commit")
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

# of pytest -v: by a worker of xdist, and alone
BY_WORKER = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (\S+::.*?) *$", re.MULTILINE)
ALONE = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b.*\[ *\d+%\]$", re.MULTILINE)


def tests(run: Run) -> None:
    """`pytest -m gpu`; in a dry run only that the files are there."""
    if run.dry:
        missing = [name for name in TEST_FILES if not (ROOT / name).exists()]
        run.row(TESTS, f"{', '.join(missing) or 'none'} missing", "none missing", not missing)
        return
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    command += ["-n", str(TEST_WORKERS)] if find_spec("xdist") is not None else []
    log, code = finished([*command, *TEST_FILES], run.left())
    outcomes = outcomes_of(log)
    run.found |= {"exit": code, "log": log[-6000:]}
    run.found["failed"] = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    run.row(TESTS, *tests_judged(outcomes, log, code))


TESTS = "pytest -m gpu"


def outcomes_of(log: str) -> dict[str, str]:
    """Test -> what became of it, as far as pytest -v got."""
    found = {match[1]: match[2] for match in ALONE.finditer(log)}
    return found | {match[2]: match[1] for match in BY_WORKER.finditer(log)}


def tests_judged(outcomes: dict[str, str], log: str, code: int | None) -> tuple[str, str, bool | None]:
    """Value, target and whether it holds; code: None where time ran out."""
    said = list(outcomes.values())
    bad, passed = said.count("FAILED") + said.count("ERROR"), said.count("PASSED")
    value = f"{passed} pass, {bad} fail, {said.count('SKIPPED')} skipped"
    if code is None:
        return f"out of time: {value}", "all pass", False if bad else None
    if code and not bad:
        return f"exit {code}: {(log.strip().splitlines() or [''])[-1][:160]}; {value}", "all pass", False
    return value, "all pass", bad == 0 and passed > 0


# ---- benches ---------------------------------------------------------------------------------------------


def matmul_bench(run: Run) -> None:
    """bench/bench_matmul.py: ours, cuBLAS and peers, what is most telling first."""
    if run.dry:
        run.found |= bench_matmul.static(("q4",), ((4096, 4096),), (1,))
        run.row(f"q4 4096x4096, 1 row, us ({bench_matmul.MODEL})", run.found["rows"][0]["us"])
        return

    def progress(result: dict[str, Any]) -> None:
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
        run.save()

    _bench(run, bench_matmul.measure(deadline=run.deadline, progress=progress), progress)


def _bench(run: Run, result: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> None:
    """The end of one: rows that a failed check has voided fail it."""
    progress(result)
    if result["void"]:
        name, why = next(iter(result["void"].items()))
        raise RuntimeError(f"{len(result['void'])} void rows: {name}: {why}")


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
        for row in result["rows"]:
            if "target" in row:
                rates = (("GB/s", "{:.0f} GB/s"), ("TFLOP/s", "{:.0f} TFLOP/s"), ("x base", "{:.2f}x"))
                shown = [text.format(row[name]) for name, text in rates if name in row]
                run.row(row["what"], ", ".join([f"{row['us']:.1f} us", *shown]), row["target"], row["holds"])
        if result["tax"]:
            worst = max(result["tax"], key=lambda row: row["tax %"])
            holds = worst["tax %"] <= 100 * bench_attention.TAX_TARGET
            run.row("our plans cost at most", f"{worst['tax %']:.1f} % ({worst['what']})", worst["target"], holds)
        run.save()

    _bench(run, bench_attention.measure(deadline=run.deadline, progress=progress), progress)


def fused_bench(run: Run) -> None:
    """bench/bench_fused.py: the row-wise kernels beside torch."""
    if run.dry:
        with dryrun(DRY_ARCH) as launches:
            rmsnorm(made_up_rows(2, 576), torch.ones(576, dtype=torch.bfloat16), 1e-5)
        run.row("rmsnorm compiles, registers", launches[0].registers)
        return
    report = run.scratch / "fused.json"
    command = [sys.executable, "-m", "pytest", "-q", "bench/bench_fused.py", f"--benchmark-json={report}", "-m", "gpu"]
    log, code = finished([*command, "-W", "default", "-p", "no:cacheprovider"], run.left())
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


# ---- the engine ------------------------------------------------------------------------------------------


def checks(run: Run) -> None:
    """`polymodel selfcheck`, on a small random model; in a dry run its first checks."""
    for check in itertools.islice(selfcheck(device=run.device), 1 if run.dry else None):
        run.row(check.name, "yes" if check.passed else check.detail, "yes", check.passed)


def workloads(run: Run) -> None:
    """The batch curve, then the switch, of the cut model; of a small random one where there is none."""
    folder = gpu_model.folder_of(run)
    path = folder if folder is None or not (folder / gpu_model.MODEL).exists() else folder / gpu_model.MODEL
    setting = Setting(path, "small" if run.dry else "full", device=run.device, progress=lambda line: None)
    for name, work, share in (("batch", run_batch, 0.7), ("switch", run_switch, 0.9)):
        if run.left() < 0:
            return
        report = work(replace(setting, seconds=share * run.left(), repetitions=1 if run.dry else 3))
        run.found[name] = report.as_dict()
        broken = [str(gate) for gate in report.gates if not gate.holds]
        of = "" if folder is not None else ", of a random model"
        run.row(name, f"{len(broken)} of {len(report.gates)} gates broken{of}", "0 broken", report.passed)
        for row in report.rows if report.passed else ():
            if "batch" in row and "peak" not in row:
                value = f"{row['agg_tok_per_sec']:.0f}, {row['speedup_vs_b1']:.2f}x a session alone"
                run.row(f"batch of {row['batch']}, tokens/s", value)
            elif "from" in row:
                run.row(f"first token from {row['from']}, ms", f"{row['first_token_ms']:.1f}")


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    run: Callable[[Run], None]
    share: float  # of the time, beside those of the others
    is_judge: bool = False  # what does not hold fails the run
    is_alone: bool = False  # as it times something
    expected: Sequence[str] = ()  # rows that it should have on a GPU


SECTIONS = (
    Section("machine", machine, 0.4, is_alone=True),
    Section("facts", gpu_facts.facts, 3.6, is_judge=True, expected=gpu_facts.fact_names()),
    *(
        Section(f"exact-{name}", partial(gpu_exact.exact, of), 3.6, is_judge=True, expected=tuple(of))
        for name, of in (("matmul", gpu_exact.MATMUL), ("attention", gpu_exact.ATTENTION), ("tiles", gpu_exact.TILES))
    ),
    *(
        Section(f"values-{name}", partial(gpu_values.values, of), 3.6, is_judge=True, expected=tuple(of))
        for name, of in (("matmul", gpu_values.MATMUL), ("attention", gpu_values.ATTENTION))
    ),
    Section("model", gpu_model.model, 3.6, is_judge=True, expected=gpu_model.judged()),
    Section("selfcheck", checks, 3.6, is_judge=True),
    Section("memory", gpu_memory.memory, 3.6, is_judge=True, expected=tuple(gpu_memory.TOOLS)),
    Section("tests", tests, 3.6, is_judge=True, expected=(TESTS,)),
    Section("attention", attention_bench, 1.1, is_alone=True),
    Section("matmul", matmul_bench, 1.3, is_alone=True),
    Section("workloads", workloads, 0.8, is_judge=True, is_alone=True, expected=("batch", "switch")),
    Section("speed", gpu_model.speed, 0.4, is_alone=True),
    Section("fused", fused_bench, 0.5, is_alone=True),
    Section("tiles", tiles, 0.3, is_alone=True),
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


def with_unreached(section: Section, known: dict[str, Any]) -> dict[str, Any]:
    """What is known of a section that is over, and a row for each that it should have and has not."""
    there = {row["what"] for row in known["rows"]}
    rows = [
        {"what": what, "value": NOT_REACHED, "target": "to be judged", "holds": None}
        for what in section.expected
        if what not in there
    ]
    return {**known, "rows": [*known["rows"], *rows]}


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
            for child in waiting:
                if (known := child.news()) is not None:
                    results.note(child.section.name, known, "running")
            over = [child for child in waiting if child.process.is_over()]
            for child in over:  # all are asked before one is waited for
                child.process.ask()
            for child in over:
                child.process.end()
                waiting.remove(child)
                _conclude(child, results, child.status(), say)
    except BaseException:
        for child in waiting:
            child.process.ask()
        for child in waiting:
            child.process.end()
            _conclude(child, results, "stopped", say)
        raise


def _conclude(child: Child, results: Results, status: str, say: Callable[[str], None]) -> None:
    seconds, known = round(time.monotonic() - child.began, 1), child.known()
    log = {} if status == "done" else {"log": child.process.log[-3000:]}
    results.note(child.section.name, with_unreached(child.section, known) | log, status, seconds=seconds)
    say(f"{child.section.name}: {status}, {seconds} s")


def steps(sections: Sequence[Section]) -> Iterator[list[Section]]:
    """Those that follow each other and may have company go together, all others alone."""
    group: list[Section] = []
    for section in sections:
        if group and (section.is_alone or group[-1].is_alone):
            yield group
            group = []
        group.append(section)
    if group:
        yield group


def seconds_for(groups: Sequence[Sequence[Section]], left: float) -> float | None:
    """Of the time that is left, what the first group gets; None where that is too little to start it."""
    if left < START_SECONDS + MIN_SECONDS:
        return None
    each = [max(section.share for section in group) for group in groups]
    part = each[0] / sum(each) * (left - START_SECONDS * len(groups))
    return min(left, START_SECONDS + max(MIN_SECONDS, part))


def run_on_gpu(
    sections: Sequence[Section], results: Results, shared: Run, arguments: Sequence[str], say: Callable[[str], None]
) -> None:
    groups = list(steps(sections))
    for i, group in enumerate(groups):
        children, seconds = [], seconds_for(groups[i:], shared.left())
        for section in group:
            if seconds is None:
                nothing = with_unreached(section, {"rows": [], "found": {}})
                results.note(section.name, nothing, "no time left")
                continue
            part = shared.scratch / f"{section.name}.json"
            command = [sys.executable, str(Path(__file__)), "--section", section.name, "--part", str(part)]
            command += ["--out", str(shared.out), "--deadline", str(time.monotonic() + seconds), *arguments]
            log = shared.scratch / f"{section.name}.log"
            process = Process(command, log, seconds + LATE_SECONDS, {} if section.is_alone else JUDGES)
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


def _named_by(only: str) -> list[Section]:
    return [s for s in SECTIONS if s.name == only or s.name.startswith(f"{only}-")]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(help="in all, from the start of the process")] = 8.5,
    dry: Annotated[bool, typer.Option("--dry", help="no GPU: everything in small")] = False,
    out: Annotated[Path | None, typer.Option(help="folder; bench/results/<gpu> where not given")] = None,
    only: Annotated[list[str] | None, typer.Option(help="only these sections; exact is all exact-*")] = None,
    model: Annotated[Path | None, typer.Option(help="of tools/cut_model.py; build/smollm2-12 where not given")] = None,
    wheels: Annotated[Path | None, typer.Option(help="folder of wheels to install for this run")] = None,
    commit: Annotated[str | None, typer.Option(help="what runs, where there is no .git to tell")] = None,
    plots: Annotated[Path | None, typer.Option(help="draw this results.json beside it, and nothing else")] = None,
    section: Annotated[str | None, typer.Option(hidden=True, help="run this section here")] = None,
    deadline: Annotated[float | None, typer.Option(hidden=True, help="its own, of time.monotonic()")] = None,
    part: Annotated[Path | None, typer.Option(hidden=True, help="where the section keeps what it finds")] = None,
) -> None:
    """Run the sections and write results.json."""
    if deadline is None:
        deadline = born() + 60 * minutes - RESERVED_SECONDS
    if plots is not None:
        print(", ".join(gpu_plots.draw(json.loads(plots.read_text()), plots.parent)) or "nothing to draw")
        return
    if not dry and not has_gpu():
        raise typer.BadParameter("no CUDA device; --dry goes through the sections without one")
    names = [s.name for s in SECTIONS]
    if unknown := [o for o in (*(only or ()), *([section] if section else ())) if not _named_by(o)]:
        raise typer.BadParameter(f"unknown section {unknown}; there are {names}")
    if out is None:
        name = None if dry else torch.cuda.get_device_name()
        out = Path(tempfile.mkdtemp(prefix="gpu_run-")) if dry else ROOT / "bench" / "results" / gpu_folder(name)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu_run-") as scratch:
        shared = Run(out, Path(scratch), dry, deadline, model, commit)
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

        chosen = [s for s in SECTIONS if not only or any(s in _named_by(o) for o in only)]
        stopped = ""
        try:
            with stoppable(), wheels_installed(wheels, results):
                if dry:
                    run_dry(chosen, results, shared, say)
                else:
                    given = {"--model": model, "--commit": commit}
                    arguments = [word for name, value in given.items() if value for word in (name, str(value))]
                    run_on_gpu(chosen, results, shared, arguments, say)
        except Stopped as signal_name:
            stopped = results.content["stopped"] = str(signal_name)
        add_plots(results)
        title = f"{command}: {path}" + (f" (stopped by {stopped})" if stopped else "")
        screen.print(rows_table(title, summary(content), ("section", "what", "value", "target", "holds")))
        say(verdict(content))
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


def _judged(content: dict[str, Any]) -> list[Row]:
    """Rows of values and bits."""
    judges = {s.name for s in SECTIONS if s.is_judge}
    return [row for name, section in content["sections"].items() if name in judges for row in section["rows"]]


def verdict(content: dict[str, Any]) -> str:
    """In one line: how much holds, how much does not, and how much nobody knows."""
    rows = [row for row in _judged(content) if row["target"] not in (None, TO_BE_KNOWN)]
    holds = [row["holds"] for row in rows]
    unknown = [row["what"] for row in rows if row["holds"] is None]
    named = f" ({', '.join(unknown[:5])}{', ...' * (len(unknown) > 5)})" if unknown else ""
    return f"{holds.count(True)} hold, {holds.count(False)} do not; not judged: {len(unknown)}{named}"


def all_hold(content: dict[str, Any]) -> bool:
    """Values and bits, those of what is timed too; a missed target of speed is no failure, nor what was cut short."""
    sections = content["sections"].values()
    failed = any(s["status"].startswith(("failed", "died")) or s.get("found", {}).get("void") for s in sections)
    return not failed and all(row["holds"] is not False for row in _judged(content))


if __name__ == "__main__":
    app()
