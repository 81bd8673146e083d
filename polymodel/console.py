"""What a person sees of an engine at work: text as it comes, one panel a request, progress of long steps."""

from __future__ import annotations

import signal
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from polymodel.engine import Engine
from polymodel.output import Pieces
from polymodel.sequence import Sequence as Request

POLL = 0.1  # seconds between two looks at what would stop the text

if TYPE_CHECKING:
    from rich.console import Group


def follow(
    engine: Engine, requests: Sequence[Request], is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, str]]:
    """(index of the request, new text) as it comes. Leaving it cancels what still runs."""
    texts, changed = [Pieces(request) for request in requests], threading.Event()
    with ExitStack() as stack:
        for request in requests:
            stack.callback(engine.cancel, request)
            stack.enter_context(request.signal.listening(changed.set))
        is_last = False
        while not is_last and not is_stopped():
            is_last = all(request.is_over for request in requests)  # before looking: nothing comes after it
            for i, text in enumerate(texts):
                if new := "".join(text.take()):
                    yield i, new
            if not is_last:
                changed.wait(POLL)
                changed.clear()
        for request in requests:
            if request.error is not None:
                raise request.error


def printable(text: str) -> str:
    """The text without characters that steer a terminal; a model may produce any."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for as long as the block runs; one line where stderr is no terminal."""
    if not sys.stderr.isatty():
        print(f"{label} ...", file=sys.stderr, flush=True)
        yield lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, a first Ctrl-C only makes the yielded function true; a second one interrupts as always."""
    is_hit = threading.Event()

    def hit(number: int, frame: FrameType | None) -> None:
        if is_hit.is_set():
            signal.default_int_handler(number, frame)
        is_hit.set()

    if threading.current_thread() is not threading.main_thread():
        yield is_hit.is_set
        return
    before = signal.signal(signal.SIGINT, hit)
    try:
        yield is_hit.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def show_streams(titles: Sequence[str], pieces: Iterator[tuple[int, str]], out: TextIO) -> None:
    """Texts that grow side by side: panels on a terminal, elsewhere a line for what each turn brought."""
    if out.isatty():
        _show_panels(titles, pieces, out)
        return
    width = max(map(len, titles), default=0)
    for i, piece in pieces:
        print(f"{titles[i].ljust(width)} | {printable(piece).replace(chr(10), ' / ')}", file=out, flush=True)


def _show_panels(titles: Sequence[str], pieces: Iterator[tuple[int, str]], out: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live

    texts = [""] * len(titles)
    # the block restores the cursor however it is left
    with Live(_panels(titles, texts), console=Console(file=out), auto_refresh=False) as live:
        for i, piece in pieces:
            texts[i] += printable(piece)
            live.update(_panels(titles, texts), refresh=True)


def _panels(titles: Sequence[str], texts: Sequence[str]) -> Group:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text as Styled

    rows = zip(titles, texts, strict=True)
    return Group(*(Panel(Styled(text), title=Styled(title), title_align="left") for title, text in rows))
