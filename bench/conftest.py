"""`pytest bench`: what all benches share, and after a run its rows beside those recorded on such a machine.

    pytest bench [--record] [--results DIR] [--benchmark-json FILE]

--record writes the rows of each file whose benches all passed; the record names the command. Without it they are
compared, and a recorded count that changed fails the run (see records.py).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("bench", "tools"))

import records
from harness import ROOT, console, environment, has_gpu, machine_folder, rows_table

FAILED = pytest.StashKey[set[str]]()  # files with a bench that failed
LINES = pytest.StashKey[list[Any]]()  # what is printed in the end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="write the rows to bench/results/<machine>/<bench file>.json"
    )
    parser.addoption("--results", metavar="DIR", help="where records lie, in place of bench/results/<machine>")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: takes minutes; left out unless asked for")
    config.stash[FAILED], config.stash[LINES] = set(), []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not has_gpu():
        skip = pytest.mark.skip(reason="measures on a CUDA device, and there is none")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.config.stash[FAILED].add(item.path.stem)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    measured, here = _measured(config), environment()
    folder = Path(config.getoption("--results") or ROOT / "bench" / "results" / machine_folder())
    lines, record = config.stash[LINES], config.getoption("--record")
    for stem, rows in measured.items():
        path = folder / f"{stem}.json"
        known = records.read(path)
        if isinstance(known, str):
            lines += [] if record else [f"{path.name}: {known}"]
        else:
            found, unknown = records.compare_all(rows, known.rows)
            lines.append(rows_table(f"{stem} beside {path.name}", [c.row() for c in found], records.COLUMNS))
            lines += [f"{stem}: not recorded: {', '.join(unknown)}"] if unknown else []
            lines += [f"{stem}: {change}" for change in records.changes(here, known.environment)]
            if not record and any(c.must and not c.agrees for c in found):
                lines.append(f"{stem}: a count differs from the recorded one")
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        if record and stem in config.stash[FAILED]:
            lines.append(f"{path.name}: not written, a bench of it failed")
        elif record:
            command = shlex.join(["pytest", *config.invocation_params.args])
            records.write(path, command, here, rows)
            lines.append(f"{path.name}: {len(rows)} rows written")


def _measured(config: pytest.Config) -> dict[str, list[dict[str, Any]]]:
    """Rows of the benches that ran, by file."""
    found: dict[str, list[dict[str, Any]]] = {}
    session = getattr(config, "_benchmarksession", None)
    for bench in session.benchmarks if session is not None else ():
        if not bench.has_error and bench.stats.data:
            stem = Path(bench.fullname.split("::")[0]).stem
            found.setdefault(stem, []).append(records.row_of(bench.name, bench.stats.data, bench.extra_info))
    return found


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(config: pytest.Config) -> None:
    screen = console()
    for line in config.stash[LINES]:
        screen.print(line, markup=False)
