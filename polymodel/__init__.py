"""Host many models, share the prefill, decode one: tens of models warm in one process under one byte budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymodel.config import EngineConfig as EngineConfig
    from polymodel.engine import Engine as Engine
    from polymodel.engine import Output as Output
    from polymodel.session import Session as Session
    from polymodel.share import Verdict as Verdict
    from polymodel.share import can_share as can_share

__version__ = "0.1.0"
_HOME = {
    "Engine": "engine",
    "Output": "engine",
    "Session": "session",
    "EngineConfig": "config",
    "Verdict": "share",
    "can_share": "share",
}
__all__ = ["Engine", "EngineConfig", "Output", "Session", "Verdict", "can_share", "errors"]


def __getattr__(name: str) -> Any:
    """Nothing is loaded before it is asked for, so importing costs no more than torch does."""
    if name == "errors":
        return import_module("polymodel.errors")
    if name in _HOME:
        return getattr(import_module(f"polymodel.{_HOME[name]}"), name)
    raise AttributeError(f"module 'polymodel' has no attribute {name!r}")
