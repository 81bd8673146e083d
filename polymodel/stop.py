"""Stop strings: where the text of a request ends, and how much of it may be shown before that is known."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from polymodel.errors import InvalidRequest, brief
from polymodel.tokenizer import Tokenizer

MAX_STOPS = 16
MAX_CHARACTERS = 256  # of a stop string


def checked_stops(stops: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several; InvalidRequest for what is none, is empty, or is too much."""
    some = (stops,) if isinstance(stops, str) else stops
    if not isinstance(some, Sequence):
        raise InvalidRequest(f"stop strings must be a string or a list of strings, got {brief(stops)}")
    if len(some) > MAX_STOPS:
        raise InvalidRequest(f"stop strings: {len(some)} given, at most {MAX_STOPS} expected")
    for at, stop in enumerate(some):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_CHARACTERS:
            size = f" of {len(stop)} characters" if isinstance(stop, str) else ""
            raise InvalidRequest(
                f"stop string {at}{size} must be a string of 1..{MAX_CHARACTERS} characters, got {brief(stop)}"
            )
    return tuple(some)


class StopStrings:
    """The text of a request, as `Tokenizer.decode_stream(continues=True)` shows it, up to the first stop string.

    One thread pushes tokens; others may read `text`, which only ever grows.
    """

    def __init__(self, tokenizer: Tokenizer, stops: str | Sequence[str]) -> None:
        self.stops = checked_stops(stops)
        self._longest = max(map(len, self.stops), default=1)
        self._stream = tokenizer.decode_stream(continues=True)
        self._shown: list[str] = []
        self._held = ""  # may become a stop string
        self.is_found = False

    @property
    def text(self) -> str:
        """What may be shown: all that comes before the stop string, or before what may yet become one."""
        return "".join(self._shown)

    def push(self, token: int) -> bool:
        """Takes a token; whether the text contains a stop string now. What comes after one is left out."""
        if not self.is_found:
            self._take(self._stream.push(token))
        return self.is_found

    def would_find(self, tokens: Sequence[int]) -> bool:
        """Whether the text would contain a stop string if these came next; nothing is taken."""
        return any(map(self.copy().push, tokens))

    def copy(self) -> StopStrings:
        """One that goes on from here by itself, without the text so far."""
        twin = copy(self)
        twin._shown, twin._stream = [], self._stream.copy()
        return twin

    def flush(self) -> None:
        """No token comes any more: what was held back may be shown, too."""
        if not self.is_found:
            self._take(self._stream.flush())
            if not self.is_found:
                self._shown.append(self._held)
            self._held = ""

    def _take(self, piece: str) -> None:
        text = self._held + piece
        starts = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.is_found = bool(starts)
        end = min(starts) if starts else self._first_hope(text)
        self._shown.append(text[:end])
        self._held = text[end:]

    def _first_hope(self, text: str) -> int:
        """Where the longest suffix begins with which a stop string begins."""
        last = range(max(len(text) - self._longest + 1, 0), len(text))
        return next((at for at in last if any(stop.startswith(text[at:]) for stop in self.stops)), len(text))
