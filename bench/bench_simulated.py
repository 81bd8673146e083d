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

QUIET = Setting(progress=lambda line: None)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_workload(benchmark: Any, workload: Workload) -> None:
    report = workload.run(QUIET)
    assert report.passed, str(report)
    again = benchmark.pedantic(lambda: workload.run(QUIET), rounds=1)
    assert again.rows == report.rows
    benchmark.extra_info |= {"source": report.source, "rows": report.rows}
