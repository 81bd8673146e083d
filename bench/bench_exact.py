"""Ways to prefill, to leave memory and to decode, each against one request alone, on the demo model.

    pip install '.[bench]' && polymodel pull smollm2 && pytest bench/bench_exact.py [--benchmark-json FILE]

A row is a case of polymodel.workloads.exact: sessions, then requests that go on from them. Tokens, logits, keys and
values that differ by a bit void it. The time is that of the whole check, comparisons and all: it says how long the
matrix takes, not how fast the engine is. The whole matrix: polymodel bench smollm2 --workload exact [--size full].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pytest
from harness import demo_model

from polymodel.workloads.exact import Case, Matrix, Tally, hosting
from polymodel.workloads.report import Setting

CASES = [
    Case("plain", 1, "miss", None, 0.0),
    Case("plain", 8, "page out", 7, 1.0),
    Case("chain 4", 4, "rollback", 64, 0.0),
    Case("chain 16", 2, "swap", None, 1.0),
    Case("tree", 2, "clone", 7, 0.0),
    Case("twin chain", 4, "evict and repair", None, 0.0),
    Case("twin tree", 2, "hit", 64, 1.0),
]


@pytest.fixture(scope="module")
def matrix(device: str) -> Iterator[Matrix]:
    with ExitStack() as stack:
        yield Matrix(hosting(Setting(model=demo_model(), device=device), stack))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.decode}-{case.rows}-{case.prefix}".replace(" ", "_"))
def test_case(benchmark: Any, matrix: Matrix, case: Case) -> None:
    matrix.tallies.clear()
    benchmark.pedantic(lambda: matrix.run(case), rounds=1)
    tally: Tally = matrix.tallies[case.decode]
    assert (tally.tokens_differing, tally.logits_bytes_differing, tally.kv_bytes_differing) == (0, 0, 0)
    assert bool(tally.drafted) == (case.decode != "plain") and tally.most_rows == case.rows
    benchmark.extra_info |= asdict(tally)
