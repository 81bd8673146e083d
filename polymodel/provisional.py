"""Provisional spans: what several sinks wrote since a span was opened is kept by all of them or dropped by all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from types import TracebackType
from typing import Generic, Literal, Protocol, SupportsIndex, TypeVar

from polymodel.errors import InvalidRequest

T = TypeVar("T")
Outcome = Literal["open", "promoted", "rolled back"]
SINK_PARTS = ("open", "prepare", "commit", "rollback", "close")


class Sink(Protocol):
    """Something that holds what a span wrote and can keep or drop it. An open that raises has changed nothing."""

    def open(self, epoch: int) -> None:
        """The span begins here, inside those that are open."""

    def prepare(self, epoch: int, kept: int | None) -> None:
        """Refuse by raising, or make ready to keep the span's first `kept` tokens, None: all.

        Nothing visible changes. A later prepare of the same epoch replaces this one.
        """

    def commit(self, epoch: int) -> None:
        """Keep what was prepared, drop the rest."""

    def rollback(self, epoch: int) -> None:
        """Drop all of the span and what was kept inside it; also after prepare, and after commit until close."""

    def close(self, epoch: int) -> None:
        """The span is decided: forget it."""


class Spans:
    """The open spans of one owner, each inside the one before. No epoch is used twice."""

    def __init__(self) -> None:
        self._open: list[Provisional] = []
        self._num_epochs = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self, sinks: Sequence[Sink]) -> Provisional:
        """A span inside the innermost open one. If a sink refuses, those before it drop and forget the span.

        A span decides for its own sinks: an outer rollback does not reach a sink that only an inner span had.
        """
        if len({id(sink) for sink in sinks}) < len(sinks):
            raise InvalidRequest(f"open: one of {len(sinks)} sinks is there twice, expected each once")
        span = Provisional(self, self._num_epochs, self._open[-1].epoch if self._open else None, tuple(sinks))
        self._num_epochs += 1
        for i, sink in enumerate(sinks):
            try:
                sink.open(span.epoch)
            except BaseException as error:
                _undo(sinks[:i], span.epoch, error)
                raise
        self._open.append(span)
        return span


class Provisional:
    """One span, to be promoted or rolled back once; a with-block that leaves it open rolls it back."""

    def __init__(self, spans: Spans, epoch: int, parent: int | None, sinks: tuple[Sink, ...]) -> None:
        self.epoch = epoch
        self.parent = parent
        self.outcome: Outcome = "open"
        self._spans = spans
        self._sinks = sinks

    def promote(self, path: Sequence[int] | SupportsIndex | None = None) -> None:
        """Keep the tokens on the path (the first so many, None: all) in every sink.

        If a sink does not prepare, the span stays open; if one does not commit, the span is rolled back.
        """
        if self._is_decided("promote", "promoted"):
            return
        kept = _num_kept(path)
        inner = self._spans._open[-1]
        if inner is not self:
            raise InvalidRequest(
                f"promote: epoch {inner.epoch} is still open inside epoch {self.epoch}, expected it to be decided first"
            )
        for sink in self._sinks:
            sink.prepare(self.epoch, kept)
        try:
            for sink in self._sinks:
                sink.commit(self.epoch)
        except BaseException as error:
            self._leave("rolled back")
            _undo(self._sinks, self.epoch, error)
            raise
        self._leave("promoted")
        if (failure := _call_all((sink.close for sink in self._sinks), self.epoch)) is not None:
            raise failure

    def rollback(self) -> None:
        """Drop the span in every sink, and the spans inside it first. The first error is raised when all is done."""
        if not self._is_decided("rollback", "rolled back") and (failure := self._roll_back(None)) is not None:
            raise failure

    def _is_decided(self, verb: str, outcome: Outcome) -> bool:
        if self.outcome not in ("open", outcome):
            raise InvalidRequest(f"{verb}: the span of epoch {self.epoch} was {self.outcome} already")
        return self.outcome == outcome

    def _leave(self, outcome: Outcome) -> None:
        self._spans._open.pop().outcome = outcome

    def _roll_back(self, failure: BaseException | None) -> BaseException | None:
        while self.outcome == "open":
            inner = self._spans._open[-1]
            inner._leave("rolled back")
            failure = _undo(inner._sinks, inner.epoch, failure)
        return failure

    def __enter__(self) -> Provisional:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = self._roll_back(error)
        if failure is not None and failure is not error:
            raise failure


def _num_kept(path: Sequence[int] | SupportsIndex | None) -> int | None:
    if path is None:
        return None
    if isinstance(path, Sequence):
        if list(path) != list(range(len(path))):
            raise InvalidRequest(f"promote: the path is {list(path)}, expected the span's first tokens: 0, 1, ..")
        return len(path)
    kept = -1
    with suppress(TypeError):
        kept = index(path)
    if kept < 0:
        raise InvalidRequest(
            f"promote: the path is {path!r}, expected a number of tokens from 0 on, or their positions"
        )
    return kept


def _undo(sinks: Sequence[Sink], epoch: int, failure: BaseException | None) -> BaseException | None:
    """Roll every sink back, the last one first, then close all."""
    failure = _call_all((sink.rollback for sink in reversed(sinks)), epoch, failure)
    return _call_all((sink.close for sink in sinks), epoch, failure)


def _call_all(
    calls: Iterable[Callable[[int], None]], epoch: int, failure: BaseException | None = None
) -> BaseException | None:
    """Make every call, whichever raises; the first failure, with the others as its notes."""
    for call in calls:
        try:
            call(epoch)
        except BaseException as error:
            if failure is None:
                failure = error
            else:
                failure.add_note(f"epoch {epoch}, {getattr(call, '__qualname__', call)}: {error!r}")
    return failure


@dataclass(slots=True)
class _Staged(Generic[T]):
    effects: list[T]
    into: list[T]  # what a commit extends: the outer span's effects, or those that all see
    committed_at: int | None = None


class BufferSink(Generic[T]):
    """Effects that nobody sees until the outermost span around them is promoted; a partial promote keeps them all."""

    def __init__(self) -> None:
        self.effects: list[T] = []
        self._open: dict[int, _Staged[T]] = {}  # by epoch, the innermost last

    def stage(self, effect: T) -> None:
        """Let `effect` be seen once the innermost open span, and all around it, are promoted."""
        if not self._open:
            raise InvalidRequest(f"stage({effect!r}): no span is open")
        self._innermost.append(effect)

    @property
    def _innermost(self) -> list[T]:
        return next(reversed(self._open.values())).effects if self._open else self.effects

    def open(self, epoch: int) -> None:
        self._open[epoch] = _Staged([], self._innermost)

    def prepare(self, epoch: int, kept: int | None) -> None:
        """Never refuses: effects are no tokens."""

    def commit(self, epoch: int) -> None:
        span = self._open[epoch]
        span.committed_at = len(span.into)
        span.into += span.effects

    def rollback(self, epoch: int) -> None:
        span = self._open[epoch]
        if span.committed_at is not None:
            del span.into[span.committed_at :]

    def close(self, epoch: int) -> None:
        del self._open[epoch]
