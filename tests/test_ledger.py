from __future__ import annotations

import math
import re
from typing import Any

import pytest

from polymodel.ledger import CLASSES, Ledger, format_bytes, parse_bytes


def test_totals_are_the_sum_of_what_owners_hold() -> None:
    ledger = Ledger()
    ledger.set("weights", "a", 100)
    ledger.set("weights", "b", 20)
    ledger.set("kv", "a", 3)
    assert ledger.of("weights") == {"a": 100, "b": 20} and ledger.of("kv") == {"a": 3}
    assert (ledger.total("weights"), ledger.total("kv"), ledger.total()) == (120, 3, 123)


def test_every_byte_has_a_class_on_the_device_or_on_the_host() -> None:
    device, host = CLASSES[:6], CLASSES[6:]
    assert device == ("weights", "kv", "draft_kv", "band_states", "workspace", "graphs")
    assert host == ("host_weights", "host_kv")
    ledger = Ledger()
    for i, kind in enumerate(CLASSES):
        ledger.set(kind, "a", 1 << i)
    assert [ledger.total(kind) for kind in CLASSES] == [1 << i for i in range(8)] and ledger.total() == 255


def test_stating_again_replaces_and_zero_strikes_out() -> None:
    ledger = Ledger()
    ledger.set("weights", "a", 100)
    ledger.set("weights", "a", 60)
    assert ledger.total() == 60
    ledger.set("weights", "a", 0)
    ledger.set("weights", "never", 0)
    assert ledger.of("weights") == {} and ledger.total() == 0


def test_less_than_nothing_is_refused() -> None:
    ledger = Ledger()
    ledger.set("kv", "arena", 5)
    with pytest.raises(ValueError, match="kv of 'arena' cannot be -1 bytes"):
        ledger.set("kv", "arena", -1)
    assert ledger.total() == 5


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("24GiB", 24 << 30),
        ("1.5 GB", 1_500_000_000),
        (" 2 kib ", 2048),
        ("0.5MiB", 1 << 19),
        ("7B", 7),
        ("3KB", 3000),
        ("1e3", 1000),
    ],
)
def test_sizes(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "size",
    [
        *("", "GiB", "12 parsecs", "1.2.3MB", "inf", "nan GiB", "1 TiB x", "-5", "-1 GiB"),
        *(-1, True, 2e9, math.nan, None, b"5", [5]),
    ],
)
def test_what_is_no_size_says_so(size: Any) -> None:
    expected = f"{size!r} is not a size; expected a whole number of bytes from 0 on, or text with such a number"
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse_bytes(size)


def test_sizes_are_shown_in_the_largest_unit_below() -> None:
    shown = [format_bytes(n) for n in (0, 1023, 1024, 1536, 5 << 20, 3 << 30, 2000 << 30)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 MiB", "3.00 GiB", "2000.00 GiB"]
