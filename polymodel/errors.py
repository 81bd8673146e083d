"""Typed errors. Each message carries the numbers that decided it; a refused call changes nothing."""

from __future__ import annotations

MOST_SHOWN = 120  # characters of an argument in a message


class PolymodelError(Exception):
    """Base of every error that polymodel raises on purpose."""


class TooLarge(PolymodelError):
    """The model alone is larger than the whole budget."""


class PinnedNoRoom(PolymodelError):
    """What is pinned leaves too little room, so nothing can be given up for the newcomer."""


class Leased(PolymodelError):
    """The model has work in flight and cannot be moved or removed."""


class EmptyId(PolymodelError):
    """A model's name is empty."""


class DuplicateId(PolymodelError):
    """A model of this name is already there."""


class UnknownModel(PolymodelError):
    """No model of this name is there."""


class VocabMismatch(PolymodelError):
    """Two models' vocabularies differ, so one cannot draft for the other."""


class NotShareable(PolymodelError):
    """Two models' prefixes cannot be shared; the message names every axis that failed."""


class Contaminated(PolymodelError):
    """The tokens asked for attended something that was evicted since."""


class Busy(PolymodelError):
    """The session already runs a request."""


class KVFull(PolymodelError):
    """No KV page is free and none can be reclaimed."""


class QueueFull(PolymodelError):
    """The bounded queue of waiting requests is full."""


class DeadlineExceeded(PolymodelError, TimeoutError):
    """The request's deadline passed before its last token."""


class PromptTooLong(PolymodelError):
    """Prompt and new tokens together exceed the model's context."""


class InvalidRequest(PolymodelError, ValueError):
    """An argument of a request is wrong; the message says which and what was expected."""


class NonFiniteLogits(PolymodelError):
    """A forward gave NaN, so no token can be chosen."""

    @classmethod
    def of(cls, model: str) -> NonFiniteLogits:
        return cls(f"{model}: a logit is NaN; the weights or the KV pages hold no finite numbers")


class NotExact(PolymodelError):
    """A plain replay gave another token than the output has."""


class EngineClosed(PolymodelError):
    """The engine was closed, or its lane died; the cause is chained."""


class CorruptCheckpoint(PolymodelError):
    """A checkpoint's bytes contradict themselves or the file ends early."""


class CorruptSession(PolymodelError):
    """A saved or swapped-out session's bytes contradict themselves, or the file ends early."""


class Forgotten(PolymodelError):
    """The tokens were forgotten by `Engine.forget`, and with them everything that had them as its prefix."""


class UnsupportedModel(PolymodelError):
    """The checkpoint is sound, but its architecture, tensor type or scaling is not supported."""


class FetchFailed(PolymodelError):
    """A named model could not be fetched or did not match its checksum."""


def brief(value: object) -> str:
    """An argument in a message: its repr on one line, cut where it is long."""
    text = " ".join(line.strip() for line in repr(value).splitlines())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
