"""Host many models, share the prefill, decode one: tens of models warm in one process under one byte budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymodel.batch import Batch as Batch
    from polymodel.config import Draft as Draft
    from polymodel.config import Drafter as Drafter
    from polymodel.config import DynamicPrecision as DynamicPrecision
    from polymodel.config import EngineConfig as EngineConfig
    from polymodel.control import CostTable as CostTable
    from polymodel.engine import Engine as Engine
    from polymodel.events import Event as Event
    from polymodel.events import chrome_trace as chrome_trace
    from polymodel.events import timeline as timeline
    from polymodel.output import Output as Output
    from polymodel.session import Session as Session
    from polymodel.share import Verdict as Verdict
    from polymodel.share import can_share as can_share
    from polymodel.sim import Plan as Plan

__version__ = "0.1.0"
_HOME = {
    "Batch": "batch",
    "CostTable": "control",
    "Draft": "config",
    "Drafter": "config",
    "DynamicPrecision": "config",
    "Engine": "engine",
    "Output": "output",
    "Session": "session",
    "EngineConfig": "config",
    "Event": "events",
    "Plan": "sim",
    "Verdict": "share",
    "can_share": "share",
    "chrome_trace": "events",
    "timeline": "events",
}
__all__ = [
    "Batch",
    "CostTable",
    "Draft",
    "Drafter",
    "DynamicPrecision",
    "Engine",
    "EngineConfig",
    "Event",
    "Output",
    "Plan",
    "Session",
    "Verdict",
    "can_share",
    "chrome_trace",
    "errors",
    "timeline",
]


def __getattr__(name: str) -> Any:
    """Nothing is loaded before it is asked for, so importing costs no more than torch does."""
    if name == "errors":
        return import_module("polymodel.errors")
    if name in _HOME:
        return getattr(import_module(f"polymodel.{_HOME[name]}"), name)
    raise AttributeError(f"module 'polymodel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
