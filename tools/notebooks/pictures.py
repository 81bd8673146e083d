"""What the notebooks show: tables, and pictures that can be told apart in grey and without red and green.

Takes names, numbers, texts and events, and knows no engine. A picture is a small PNG, so that notebooks stay small.
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

from polymodel.events import Event

WIDTH, DPI = 8.0, 90  # inches of a picture, dots an inch
NUM_COLOURS = 64  # that are stored, with the shades at edges
# Okabe and Ito's colours, with hatches, dashes and markers that stand for them in grey
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
MARKERS = "osD^vP"
KINDS = {  # of the timeline -> colour and hatch; forwards and movements hide the turn that they belong to
    "turn": ("#DDDDDD", ""),
    "prefill": ("#56B4E9", "//"),
    "decode": ("#0072B2", ""),
    "verify": ("#009E73", "xx"),
    "draft": ("#F0E442", "//"),
    "page_in": ("#D55E00", "++"),
}
LINE = 76  # characters of a line of text
FONT = 10.0  # points of a text
ADVANCE = 0.602  # of a monospaced character, in its font size
DROPPED = ("dropped",)
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure that a notebook shows as PNG, and as its title where there is no picture."""

    figure: Figure
    title: str

    def _repr_png_(self) -> bytes:
        drawn, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(drawn, format="png", dpi=DPI, bbox_inches="tight")
        Image.open(drawn).convert("RGB").quantize(NUM_COLOURS).save(small, format="png", optimize=True)
        return small.getvalue()

    def __repr__(self) -> str:
        return f"<picture: {self.title}>"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one set of columns: HTML in a notebook, aligned text elsewhere."""

    rows: Sequence[Mapping[str, Any]]

    def _cells(self) -> list[list[str]]:
        return [list(self.rows[0]), *([_shown(value) for value in row.values()] for row in self.rows)]

    def __repr__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)

    def _repr_html_(self) -> str:
        head, *lines = ([html.escape(cell) for cell in line] for line in self._cells())
        parts = [f"<tr><th>{'</th><th>'.join(head)}</th></tr>"]
        parts += [f"<tr><td>{'</td><td>'.join(line)}</td></tr>" for line in lines]
        return "\n".join(["<table>", *parts, "</table>"])


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _axes(title: str, height: float, width: float = WIDTH) -> tuple[Picture, Axes]:
    figure = Figure(figsize=(width, height))
    axes = figure.subplots()
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return Picture(figure, title), axes


def _legend(axes: Axes, **options: Any) -> None:
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), **options)


# ---- amounts -----------------------------------------------------------------------------------------


def stacked(
    title: str, rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, budgets: Sequence[float] = ()
) -> Picture:
    """A bar for each row, of parts that add up; budgets: where each row must end at the latest."""
    picture, axes = _axes(title, 0.7 + 0.3 * len(rows), 6.5)
    parts = list(dict.fromkeys(part for _, row in rows for part in row))
    places = range(len(rows), 0, -1)
    for i, part in enumerate(parts):
        lefts = [sum(row.get(before, 0) for before in parts[:i]) for _, row in rows]
        widths = [row.get(part, 0) for _, row in rows]
        style = {"color": COLOURS[i % len(COLOURS)], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white"}
        axes.barh(places, widths, left=lefts, height=0.7, label=part, **style)
    for place, budget in zip(places, budgets, strict=bool(budgets)):
        label = "budget" if place == len(rows) else None
        axes.plot([budget, budget], [place - 0.45, place + 0.45], color="black", label=label)
    axes.set_yticks(places, [label for label, _ in rows])
    axes.set_xlabel(unit, fontsize=8)
    _legend(axes)
    return picture


def ledger(title: str, steps: Sequence[tuple[str, Mapping[str, int]]], budgets: Sequence[int] = ()) -> Picture:
    """Bytes by owner or class after each step, and the budget."""
    rows = [(label, {owner: held / MIB for owner, held in held.items()}) for label, held in steps]
    return stacked(title, rows, "MiB", [budget / MIB for budget in budgets])


def bars(title: str, series: Mapping[str, Mapping[str, float]], xlabel: str, ylabel: str) -> Picture:
    """For each category a bar of each series."""
    picture, axes = _axes(title, 2.4, 6.5)
    categories = list(dict.fromkeys(category for values in series.values() for category in values))
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = [at + (i - (len(series) - 1) / 2) * width for at in range(len(categories))]
        style = {"color": COLOURS[i % len(COLOURS)], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white"}
        axes.bar(places, [values.get(category, 0) for category in categories], width, label=name, **style)
    leaning = {"rotation": 25, "ha": "right"} if sum(map(len, categories)) > 60 else {}  # characters side by side
    axes.set_xticks(range(len(categories)), categories, **leaning)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    _legend(axes)
    return picture


def lines(
    title: str,
    series: Mapping[str, Mapping[float, float]],
    xlabel: str,
    ylabel: str,
    levels: Mapping[str, float] | None = None,
    marks: bool = True,
) -> Picture:
    """x -> y of each series; levels: horizontal lines, such as what is to be beaten."""
    picture, axes = _axes(title, 2.8, 6.5)
    for i, (name, points) in enumerate(series.items()):
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
        axes.plot(
            points.keys(), points.values(), label=name, marker=MARKERS[i % len(MARKERS)] if marks else "", **style
        )
    for i, (name, level) in enumerate((levels or {}).items()):
        axes.axhline(level, color="black", linewidth=1.2, linestyle=DASHES[i], label=name)
    axes.set_ylim(bottom=0)
    if all(isinstance(x, int) for points in series.values() for x in points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    _legend(axes)
    return picture


def matrix(title: str, names: Sequence[str], values: Sequence[Sequence[float]], most: float) -> Picture:
    """A number between every two names, darker where it is larger."""
    picture, axes = _axes(title, 0.8 + 0.42 * len(names), 1.6 + 0.7 * len(names))
    axes.imshow(values, cmap="Blues", vmin=0, vmax=1.4 * most, aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            axes.text(column, row, f"{value:g}", ha="center", va="center", fontsize=9)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    return picture


# ---- time --------------------------------------------------------------------------------------------


def timeline(title: str, events: Iterable[Event], kinds: Sequence[str] = tuple(KINDS)) -> Picture:
    """A row for each model: when it had the lane, and what it did."""
    log = sorted((event for event in events if event.kind in kinds), key=lambda event: event.start)
    models = list(dict.fromkeys(event.model for event in log))
    picture, axes = _axes(title, 0.8 + 0.4 * len(models))
    there = [kind for kind in KINDS if any(event.kind == kind for event in log)]
    for kind in there:
        colour, hatch = KINDS[kind]
        for row, model in enumerate(models):
            spans = [(e.start - log[0].start, e.stop - e.start) for e in log if (e.kind, e.model) == (kind, model)]
            height = 0.9 if kind == "turn" else 0.6
            style = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}
            axes.broken_barh(spans, (row - height / 2, height), **style)
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()
    axes.set_xlabel("seconds", fontsize=8)
    _legend(axes, handles=[Patch(facecolor=KINDS[k][0], hatch=KINDS[k][1], edgecolor="white", label=k) for k in there])
    return picture


# ---- drafted text ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, who had drafted it, and how many drafts were dropped before it."""

    text: str
    by: tuple[str, ...] = ()
    num_dropped: int = 0


Mark = tuple[int, Mapping[str, int]]  # drafts dropped so far, and those that stood so far by drafter


def attribute(texts: Sequence[str], marks: Sequence[Mark]) -> list[Piece]:
    """Who had drafted each token, from the counts at the moment it came.

    The tokens of one round come with the same counts: first those that were drafted, then the model's own.
    """
    pieces: list[Piece] = []
    before: Mark = (0, {})
    for (dropped, stood), group in groupby(zip(marks, texts, strict=True), key=itemgetter(0)):
        gained = {name: count - before[1].get(name, 0) for name, count in stood.items()}
        for i, (_, text) in enumerate(group):
            by = tuple(name for name, count in gained.items() if i < count)
            is_own = i == max(gained.values(), default=0)
            pieces.append(Piece(text, by, dropped - before[0] if is_own else 0))
        before = dropped, stood
    return pieces


def drafted_text(title: str, texts: Mapping[str, Sequence[Piece]]) -> Picture:
    """Texts whose tokens are coloured and underlined by who had drafted them."""
    drafters = list(dict.fromkeys(piece.by for pieces in texts.values() for piece in pieces if piece.by))
    cells = {name: list(_laid_out(pieces)) for name, pieces in texts.items()}
    num_lines = sum(cell[1] + 2 for line in cells.values() for cell in line[-1:])
    width, height = LINE * ADVANCE * FONT / 72, num_lines * 1.9 * FONT / 72
    picture, axes = _axes(title, height, width)
    axes.set_position((0, 0, 1, 1))  # a unit of x is as wide as a character
    axes.set(xlim=(0, LINE), ylim=(num_lines, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    first = 0
    for name, laid in cells.items():
        axes.text(0, first + 0.6, name, fontsize=FONT, weight="bold", va="center")
        for column, line, text, piece in laid:
            _draw_piece(axes, column, first + 1 + line, text, piece, drafters)
        first += laid[-1][1] + 2 if laid else 1
    shown = [Patch(color=_tint(i), label=" and ".join(by)) for i, by in enumerate(drafters)]
    shown += [Patch(facecolor="white", edgecolor="grey", label="the model itself")]
    axes.legend(handles=shown, fontsize=8, frameon=False, ncols=len(shown), loc="upper left", bbox_to_anchor=(0.0, 0.0))
    return picture


def _laid_out(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, str, Piece]]:
    """Column, line and text of each piece, and of each part of one that goes on in the next line."""
    column = line = 0
    for piece in pieces:
        parts = [
            (part, piece)
            for part in piece.text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n").split("\n")
        ]
        if piece.num_dropped:
            mark = f"-{piece.num_dropped}"
            parts = [(mark, Piece(mark, DROPPED)), *parts]
        for i, (part, owner) in enumerate(parts):
            is_break = i > 0 and parts[i - 1][1].by != DROPPED
            if is_break or column + len(part) > LINE:
                column, line = 0, line + 1
            if part:
                yield column, line, part, owner
            column += len(part)


def _draw_piece(
    axes: Axes, column: int, line: int, text: str, piece: Piece, drafters: Sequence[tuple[str, ...]]
) -> None:
    if piece.by == DROPPED:
        axes.text(column, line + 0.3, text, fontsize=FONT - 3, family="monospace", va="center", color="#D55E00")
        return
    if piece.by:
        i = drafters.index(piece.by)
        axes.add_patch(Rectangle((column, line + 0.08), len(text), 0.84, facecolor=_tint(i), linewidth=0))
        axes.plot([column + 0.15, column + len(text) - 0.15], [line + 0.88] * 2, color=COLOURS[i], linestyle=DASHES[i])
    ink = text.lstrip()  # spaces at its left would have no width
    left = column + len(text) - len(ink)
    axes.text(left, line + 0.5, ink.replace("$", r"\$"), fontsize=FONT, family="monospace", va="center")


def _tint(i: int) -> str:
    """A drafter's colour, light enough for text on it."""
    red, green, blue = (int(COLOURS[i][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * 0.35):02X}" for part in (red, green, blue))
