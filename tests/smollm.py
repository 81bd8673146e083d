"""The demo model, loaded once a process and weights option, for tests that ask for demo_model_path."""

from __future__ import annotations

import functools
from pathlib import Path

from polymodel import Engine
from polymodel.config import Weights
from polymodel.residency import Hosted


@functools.cache
def demo_engine(path: Path) -> Engine:
    return Engine(budget="4GiB", kv_budget="160MiB")


def hosted(path: Path, weights: Weights) -> Hosted:
    """The model with these weights, resident, under their name."""
    engine = demo_engine(path)
    if weights not in engine:
        engine.add(weights, path, weights=weights)
    return engine.residency[weights]
