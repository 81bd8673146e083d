"""Streaming: the pieces are the text, leaving cancels, and no text steers the terminal."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from polymodel import Engine, EngineConfig
from polymodel.console import follow, interruptible, printable, progress, show_streams
from polymodel.errors import EngineClosed
from polymodel.selfcheck import write_random_model

# forwards of a model this small only wait for a second thread
pytestmark = pytest.mark.parametrize("threads", [1], indirect=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    write_random_model(tmp_path)
    with Engine(config=EngineConfig(prefix_cache=False)) as engine:
        engine.add("a", tmp_path)
        engine.add("b", tmp_path)
        yield engine


def test_pieces_of_interleaved_requests_are_their_texts(engine: Engine) -> None:
    requests = [engine.submit(name, prompt, max_new_tokens=40) for prompt in ("x", "another") for name in ("a", "b")]
    texts, order = [""] * len(requests), []
    for i, piece in follow(engine, requests):
        texts[i] += piece
        order.append(requests[i].model)
    assert texts == [engine.output(request).text for request in requests] and all(texts)
    assert order != sorted(order), "the models took turns"


def test_leaving_or_stopping_cancels_what_runs(engine: Engine) -> None:
    requests = [engine.submit("a", "x", max_new_tokens=100), engine.submit("b", "x", max_new_tokens=100)]
    pieces = follow(engine, requests)
    next(pieces)
    pieces.close()
    stopped = engine.submit("a", "x", max_new_tokens=100)
    assert list(follow(engine, [stopped], lambda: True)) == []
    assert [r.finish_reason for r in (*requests, stopped)] == ["cancelled"] * 3
    assert engine.arena.num_pages_used == 0


def test_the_error_of_a_request_is_raised(engine: Engine) -> None:
    request = engine.submit("a", "x")
    request.finish("error", EngineClosed("gone"))
    with pytest.raises(EngineClosed):
        list(follow(engine, [request]))


def test_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\rc\x07\x9bd\x7f") == "a\ufffd[2Jb\ufffdc\ufffd\ufffdd\ufffd"
    assert printable("\n\té\U0001f600") == "\n\té\U0001f600"


def test_elsewhere_than_on_a_terminal_a_line_shows_a_turn() -> None:
    out = io.StringIO()
    show_streams(["one", "third"], iter([(1, "a\nb"), (0, "\x1b[1m")]), out)
    assert out.getvalue() == "third | a / b\none   | \ufffd[1m\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_panels_grow_and_the_cursor_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")

    def interrupted() -> Iterator[tuple[int, str]]:
        yield 0, "[bold]no markup[/bold]"
        raise KeyboardInterrupt

    out = Terminal()
    with pytest.raises(KeyboardInterrupt):
        show_streams(["title"], interrupted(), out)
    shown = out.getvalue()
    assert "title" in shown and "[bold]no markup[/bold]" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def test_progress_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("loading x") as bar:
        bar(1, 2)
    assert capsys.readouterr() == ("", "loading x ...\n")


def test_the_first_interrupt_is_a_flag_the_second_an_exception() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as is_hit:
        assert not is_hit()
        os.kill(os.getpid(), signal.SIGINT)
        assert is_hit()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
