"""What a run of benches gave beside what was recorded on such a machine: bench/results/<machine>/<bench file>.json.

A record is {command, unit, environment, rows: [{name, min, median, spread, rounds, extra_info}]}, in seconds. A row
that an earlier run gave has that one's {command, date, commit} as "earlier". Spread: from the least round to the
longest, of ten rounds and more without the slowest tenth; null of one. A time agrees if its median lies there; a ratio
(named "x ..", "times ..", or with "ratio" or "speedup" in its name) if it is as near to the recorded one as that
allows; of what was taken once neither is told. Both only inform. Integers, truth values and lists of them must be
equal: they are counts, the same whenever they are taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import write_json

RATIO = re.compile(r"(^|: )(x|times)[ _]|ratio|speed-?up")
FORM = ("command", "environment", "rows")
Row = Mapping[str, Any]


def row_of(name: str, seconds: Sequence[float], extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a record, from the seconds of each round."""
    times = sorted(seconds)
    middle = (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2
    slow = len(times) // 10  # rounds that do not count: something else ran
    spread = times[-1 - slow] - times[0] if len(times) > 1 else None
    return {
        "name": name,
        "min": times[0],
        "median": middle,
        "spread": spread,
        "rounds": len(times),
        "extra_info": json.loads(json.dumps(extra_info)),  # as it will be read
    }


def write(path: Path, command: str, environment: Mapping[str, Any], rows: Sequence[Row]) -> None:
    write_json(path, {"command": command, "unit": "s", "environment": environment, "rows": rows})


@dataclass(frozen=True, slots=True)
class Record:
    command: str
    environment: Mapping[str, Any]
    rows: Mapping[str, Row]  # by name

    def kept(self, names: Collection[str]) -> list[dict[str, Any]]:
        """Rows of these names, for another run's record."""
        run = {"command": self.command, **{name: self.environment.get(name) for name in ("date", "commit")}}
        return [{"earlier": run, **row} for name, row in self.rows.items() if name in names]


def read(path: Path) -> Record | str:
    """What was recorded, or in words why there is nothing."""
    if not path.exists():
        return "nothing recorded"
    try:
        record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        return f"no JSON: {error}"
    if not isinstance(record, dict) or not set(FORM) <= set(record) or not isinstance(record["rows"], list):
        return f"not compared: of another form, expected {', '.join(FORM)} with a list of rows"
    return Record(record["command"], record["environment"], {row["name"]: row for row in record["rows"]})


def changes(now: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """What decides times and is not as it was when they were recorded."""
    named = ("cpu", "gpu", "threads", "cpu_capability", "python", "versions")
    pairs = [(name, now.get(name), recorded.get(name)) for name in named]
    return [f"{name} now {here}, recorded {there}" for name, here, there in pairs if here != there]


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of a row beside the recorded one."""

    bench: str
    what: str
    now: Any
    recorded: Any
    ratio: float | None
    agrees: bool | None  # None where a time was taken once
    must: bool = False  # agree

    def row(self) -> dict[str, Any]:
        shown = {"bench": self.bench, "what": self.what, "now": self.now, "recorded": self.recorded}
        within = "once" if self.agrees is None else "yes" if self.agrees else "CHANGED" if self.must else "no"
        return shown | {"ratio": self.ratio, "within": within}


COLUMNS = ("bench", "what", "now", "recorded", "ratio", "within")


def compare(now: Row, recorded: Row) -> Iterator[Compared]:
    """The time, the ratios, and every count that is not the recorded one."""
    name, least, spread = now["name"], recorded["min"], recorded["spread"]
    ratio = now["median"] / recorded["median"]
    within = None if spread is None else least <= now["median"] <= least + spread
    yield Compared(name, "median ms", 1e3 * now["median"], 1e3 * recorded["median"], ratio, within)
    there, before = flat(now["extra_info"]), flat(recorded["extra_info"])
    for key in (key for key in before if key not in there):
        if is_count(before[key]):
            yield Compared(name, key, None, before[key], None, False, True)
    for key, value in there.items():
        if key not in before:
            continue
        if is_count(value) or is_count(before[key]):
            if value != before[key]:
                yield Compared(name, key, value, before[key], None, False, True)
        elif RATIO.search(key) and isinstance(value, float) and isinstance(before[key], float) and before[key]:
            ratio = value / before[key]
            near = None if spread is None else abs(ratio - 1) <= spread / least
            yield Compared(name, key, value, before[key], ratio, near)


def flat(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Mappings within, by names such as "batch 8: tokens"."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{at}{name}: ") if isinstance(value, dict) else {at + name: value}
    return found


def is_count(value: Any) -> bool:
    """An integer, a truth value, or a list of them."""
    return all(map(is_count, value)) if isinstance(value, list) and value else isinstance(value, int)


def compare_all(now: Iterable[Row], recorded: Mapping[str, Row]) -> tuple[list[Compared], list[str], list[str]]:
    """Numbers that are recorded, the names of rows that are not, and of recorded ones that did not run."""
    rows = {row["name"]: row for row in now}
    found = [one for name, row in rows.items() if name in recorded for one in compare(row, recorded[name])]
    return found, [name for name in rows if name not in recorded], [name for name in recorded if name not in rows]
