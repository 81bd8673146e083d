"""Many models in the simulated pool and lane, beside known figures. Needs neither a GPU nor a model.

    pip install '.[bench]' && pytest bench/bench_simulated.py [--benchmark-json FILE]

A row is a workload of polymodel.workloads.simulated at its small size; its gates are checked first. The time is that of
simulating it; what it simulates is in extra_info. At full size: polymodel bench --workload popularity --size full.
"""

from __future__ import annotations

from typing import Any

import pytest

from polymodel.workloads.report import Setting, Workload
from polymodel.workloads.simulated import WORKLOADS

NAMES = ("requests", "alpha", "trace", "swap_s", "requests_a_second", "policy", "lane", "flooded", "max_wait")
QUIET = Setting(progress=lambda line: None)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_workload(benchmark: Any, workload: Workload) -> None:
    report = workload.run(QUIET)
    assert report.passed, str(report)
    again = benchmark.pedantic(lambda: workload.run(QUIET), rounds=1)
    assert again.rows == report.rows and len({named(row) for row in report.rows}) == len(report.rows)
    benchmark.extra_info |= {"source": report.source, "rows": {named(row): row for row in report.rows}}


def named(row: dict[str, Any]) -> str:
    """What tells a row from the others: by these its counts are found again."""
    return ", ".join(str(row[key]) for key in NAMES if key in row)
