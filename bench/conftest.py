"""`pytest bench`: what all benches share, and after a run its rows beside those recorded on such a machine.

    pytest bench [--device cuda] [--record] [--results DIR] [--benchmark-json FILE]

--device is where workloads run; kernels marked "gpu" run where there is one. --record writes the rows of each file
whose benches all passed, and keeps those that it had of benches that did not run; the record names the command. Without
it they are compared, and a recorded count that changed fails the run (see records.py).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("bench", "tools"))

import records
from harness import ROOT, console, environment, has_gpu, machine_folder, rows_table

Place = tuple[str, str]  # device and bench file: of a record
FAILED = pytest.StashKey[set[str]]()  # files with a bench that failed
PLACES = pytest.StashKey[dict[str, Place]]()  # of each bench, deselected ones too
LINES = pytest.StashKey[list[Any]]()  # what is printed in the end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where workloads run")
    parser.addoption(
        "--record", action="store_true", help="write the rows to bench/results/<machine>/<bench file>.json"
    )
    parser.addoption("--results", metavar="DIR", help="where records lie, in place of bench/results")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: takes minutes; left out unless asked for")
    config.stash[FAILED], config.stash[PLACES], config.stash[LINES] = set(), {}, []
    if config.getoption("--device") == "cuda" and not has_gpu():
        raise pytest.UsageError("--device cuda: there is no CUDA device")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where a workload runs."""
    chosen: str = pytestconfig.getoption("--device")
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="measures on a CUDA device, and there is none")
    for item in items:
        device = config.getoption("--device") if "device" in getattr(item, "fixturenames", ()) else "cpu"
        if item.get_closest_marker("gpu"):
            device = "cuda"
            if not has_gpu():
                item.add_marker(skip)
        config.stash[PLACES][item.nodeid] = device, item.path.stem


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.config.stash[FAILED].add(item.path.stem)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    lines, record = config.stash[LINES], config.getoption("--record")
    for (device, stem), rows in _measured(config).items():
        here = environment(device)
        path = Path(config.getoption("--results") or ROOT / "bench" / "results", machine_folder(device), f"{stem}.json")
        known = records.read(path)
        absent: list[str] = []  # recorded, and not run
        if isinstance(known, str):
            lines += [] if record else [f"{path.name}: {known}"]
        else:
            found, unknown, absent = records.compare_all(rows, known.rows)
            lines.append(rows_table(f"{stem} beside {path.name}", [c.row() for c in found], records.COLUMNS))
            lines += [f"{stem}: not recorded: {_some(unknown)}"] if unknown else []
            lines += [f"{stem}: not run: {_some(absent)}"] if absent else []
            lines += [f"{stem}: {change}" for change in records.changes(here, known.environment)]
            if not record and any(c.must and not c.agrees for c in found):
                lines.append(f"{stem}: a count differs from the recorded one")
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        if not record:
            continue
        if stem in config.stash[FAILED]:
            lines.append(f"{path.name}: not written, a bench of it failed")
            continue
        kept = [] if isinstance(known, str) else known.kept(_still_there(config, (device, stem), absent))
        if kept and (changes := records.changes(here, known.environment)):
            lines.append(f"{path.name}: not written, not all of its rows ran, and {'; '.join(changes)}")
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
            continue
        records.write(path, shlex.join(["pytest", *config.invocation_params.args]), here, [*rows, *kept])
        lines.append(f"{path.name}: {len(rows)} rows written, {len(kept)} kept")


def _still_there(config: pytest.Config, place: Place, names: Sequence[str]) -> list[str]:
    """Those of a file's benches that it still has; all of them where the file was not read whole."""
    if any("::" in arg for arg in config.args):
        return [*names]
    known = {nodeid.split("::", 1)[1] for nodeid, other in config.stash[PLACES].items() if other == place}
    return [name for name in names if name in known]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _measured(config: pytest.Config) -> dict[Place, list[dict[str, Any]]]:
    """Rows of the benches that ran, by the record they belong to."""
    found: dict[Place, list[dict[str, Any]]] = {}
    session = getattr(config, "_benchmarksession", None)
    for bench in session.benchmarks if session is not None else ():
        if not bench.has_error and bench.stats.data:
            row = records.row_of(bench.name, bench.stats.data, bench.extra_info)
            found.setdefault(config.stash[PLACES][bench.fullname], []).append(row)
    return found


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(config: pytest.Config) -> None:
    screen = console()
    for line in config.stash[LINES]:
        screen.print(line, markup=not isinstance(line, str))
