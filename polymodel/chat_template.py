"""A chat template, rendered in a child process that can neither run away nor open a file.

A template is code from whoever made the checkpoint, and nothing inside an interpreter stops
`'a' * 10 ** 11` or a loop in a filter. So jinja2's sandbox runs in a child under limits of the
kernel: CPU, wall clock, memory, no new file or socket. The child starts at the first render (0.1 s)
and serves until its owner is gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CPU_SECONDS = 1.0  # for one render() call
WALL_SECONDS = 20.0  # the same, for a machine so loaded that a second of CPU takes longer
MEMORY_BYTES = 1 << 30  # address space of the child
MAX_CHARS = 4 << 20  # of one rendered conversation


class ChatTemplate:
    """A template's source and, from the first render on, its child process. Any thread may call."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end_child: Callable[[], object] | None = None

    def render(self, conversations: Sequence[Sequence[Mapping[str, str]]], **variables: object) -> list[str]:
        """One text for each conversation.

        Raises InvalidRequest if the template calls raise_exception, UnsupportedModel if it does not
        compile, fails in another way or meets a limit.
        """
        # not at the top: the child runs this file by its path and has no use for the package
        from polymodel.errors import InvalidRequest, UnsupportedModel

        request = {"text": self.text, "conversations": conversations, "variables": variables}
        with self._lock:
            reply = self._ask(json.dumps(request).encode() + b"\n")
        if "texts" in reply:
            return list(reply["texts"])
        kind = InvalidRequest if reply["refused"] else UnsupportedModel
        raise kind(f"{self.source}: chat template: {reply['why']}")

    def _ask(self, request: bytes) -> dict[str, Any]:
        if self._child is None or self._child.poll() is not None:
            # -P: this directory's module names must not hide those of the standard library
            self._child = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._end_child = weakref.finalize(self, _end, self._child)
        child, end_child = self._child, self._end_child
        assert child.stdin is not None and child.stdout is not None and end_child is not None
        line = b""
        try:
            child.stdin.write(request)
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if not line.endswith(b"\n"):  # it died, or an interrupt leaves it a reply ahead
                self._child = None
                end_child()
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        limits = f"{CPU_SECONDS:g} s of CPU, {WALL_SECONDS:g} s in all, {MEMORY_BYTES >> 20} MiB"
        return {"refused": False, "why": f"stopped at a limit ({limits}); exit {child.returncode}"}


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()  # closes the pipes and waits


def _serve() -> None:
    """The child: a request a line on stdin, a reply a line on stdout, until stdin ends."""
    import resource
    import signal
    import time
    from functools import lru_cache

    import jinja2.debug  # noqa: F401  else imported at the first error, when no file can be opened
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Refused(Exception):
        """Raised by the template itself."""

    def raise_exception(message: object) -> None:
        raise Refused(message)

    def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson  # jinja2's own escapes for HTML
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": time.strftime}
    compiled = lru_cache(1)(environment.from_string)

    def render(text: str, messages: Any, variables: dict[str, Any]) -> str:
        parts, size = [], 0
        for part in compiled(text).generate(messages=messages, **variables):
            parts.append(part)
            size += len(part)
            if size > MAX_CHARS:
                raise MemoryError(f"wrote more than {MAX_CHARS} characters")
        text = "".join(parts)
        text.encode()  # a lone surrogate is an error, too
        return text

    # whatever is imported or read late is read now
    render("{% for x in 'ab' %}{% break %}{% endfor %}{{ strftime_now('%d') | tojson }}", [], {})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's affair
    # neither of these is handled: the kernel ends the process, even inside one long C call
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # inherited from whichever thread started us
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        reply: dict[str, Any]
        try:
            ask = json.loads(line)
            texts = [render(ask["text"], chat, ask["variables"]) for chat in ask["conversations"]]
            reply = {"texts": texts}
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:500]}"
            reply = {"refused": isinstance(error, Refused), "why": why}
        answer = json.dumps(reply)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
