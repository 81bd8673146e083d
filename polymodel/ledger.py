"""Bytes by class, against what each class may hold. The one place that says how much memory is in use."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

Class = Literal["weights", "kv", "draft_kv", "band_states", "workspace", "graphs", "host_weights", "host_kv"]
CLASSES: tuple[Class, ...] = (
    *("weights", "kv", "draft_kv", "band_states", "workspace", "graphs"),  # on the device
    *("host_weights", "host_kv"),  # swapped out of it
)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class Ledger:
    """Who holds how many bytes of which class.

    kv, draft_kv and band_states are the parts of one arena. Scratch lives for one forward and graphs are not captured
    yet, so nobody holds any.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[Class, str], int] = {}

    def set(self, kind: Class, owner: str, num_bytes: int) -> None:
        """State what an owner holds now; 0 strikes the entry out."""
        if num_bytes < 0:
            raise ValueError(f"Ledger.set: {kind} of {owner!r} cannot be {num_bytes} bytes")
        if num_bytes:
            self._entries[kind, owner] = num_bytes
        else:
            self._entries.pop((kind, owner), None)

    def of(self, kind: Class) -> dict[str, int]:
        """Owner -> bytes of one class."""
        return {owner: held for (k, owner), held in tuple(self._entries.items()) if k == kind}

    def total(self, kind: Class | None = None) -> int:
        return sum(held for (k, _), held in tuple(self._entries.items()) if kind in (None, k))


def parse_bytes(size: int | str) -> int:
    """A count of bytes, or a string such as "24GiB", "1.5 GB" or "4096"."""
    with suppress(KeyError, ValueError, OverflowError):
        if (num_bytes := _num_bytes(size)) >= 0:
            return num_bytes
    raise ValueError(
        f"{size!r} is not a size; expected a whole number of bytes from 0 on, "
        f"or text with such a number and one of {', '.join(filter(None, _UNITS))}"
    )


def _num_bytes(size: object) -> int:
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    if not isinstance(size, str):
        raise ValueError
    text = size.strip()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(digits) :].strip().upper()
    return int(float(digits) * _UNITS[unit])


def format_bytes(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
