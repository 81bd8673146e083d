"""Long random use leaves nothing behind, and a process that is killed leaves files that can be read."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny, write_tokenizer

from polymodel import Engine, EngineConfig, errors
from polymodel.residency import model_nbytes
from polymodel.session import Session

NUM_MODELS = 10
PROMPTS = [torch.randint(3, 259, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 62, 66, 20, 1)]
PLAIN: dict[str, Any] = {"max_new_tokens": 6, "stop_at_eos": False, "draft": None}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the module's fixtures, as for its tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("soak")
    archs = ("llama", "qwen3", "gemma3", "llama", "qwen2")
    return [
        write_tokenizer(write_tiny(root / str(i), archs[i % len(archs)], i, num_hidden_layers=2))
        for i in range(NUM_MODELS)
    ]


@pytest.fixture(scope="module")
def alone(paths: list[Path]) -> dict[tuple[int, int], list[int]]:
    """What each model answers to each prompt."""
    tokens = {}
    with Engine(kv_budget="32MiB", config=EngineConfig(prefix_cache=False, kv_borrows=False)) as engine:
        for m, path in enumerate(paths):
            engine.add(f"m{m}", path)
            for i, ids in enumerate(PROMPTS):
                tokens[m, i] = engine.generate(f"m{m}", prompt_ids=ids, **PLAIN).tokens
    return tokens


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Soak:
    """One engine, and a user who does whatever comes to mind."""

    def __init__(self, paths: list[Path], alone: dict[tuple[int, int], list[int]], seed: int) -> None:
        self.rng, self.paths, self.alone = random.Random(seed), paths, alone
        config = EngineConfig(host_budget=1 << 20, quantum=3, prefill_chunk=48, ttl=0.5, host_ttl=0.5, max_queue=64)
        self.engine = Engine(budget=1 << 62, kv_budget="24MiB", config=config)
        sizes = [self.engine.add(f"m{m}", path).nbytes for m, path in enumerate(paths)]
        self.budget = sum(sorted(sizes)[-4:])
        self.engine.budget = self.budget
        self.sessions: list[Session] = []
        self.actions = (
            *(self.generate, self.generate, self.submit, self.submit, self.stream, self.stream),
            *(self.session, self.go_on, self.go_on, self.drop, self.swap, self.cancel, self.cancel),
            *(self.unload, self.remove, self.pin, self.unpin, self.resize, self.collect, self.forget),
        )
        self.requests: list[tuple[tuple[int, int], Any]] = []

    def cycle(self) -> None:
        try:
            self.rng.choice(self.actions)()
        except (errors.PinnedNoRoom, errors.KVFull, errors.TooLarge, errors.QueueFull):
            """What a full engine may say."""

    def model(self) -> tuple[int, str]:
        m = self.rng.randrange(NUM_MODELS)
        if f"m{m}" not in self.engine:
            self.engine.add(f"m{m}", self.paths[m], pin=self.rng.random() < 0.1)
        return m, f"m{m}"

    def options(self) -> tuple[int, dict[str, Any]]:
        i = self.rng.randrange(len(PROMPTS))
        return i, PLAIN | {"prompt_ids": PROMPTS[i], "max_new_tokens": self.rng.choice((1, 6))}

    def generate(self) -> None:
        (m, name), (i, options) = self.model(), self.options()
        out = self.engine.generate(name, **options)
        assert out.tokens == self.alone[m, i][: len(out.tokens)]

    def submit(self) -> None:
        (m, name), (i, options) = self.model(), self.options()
        self.requests.append(((m, i), self.engine.submit(name, priority=self.rng.choice((0, 1)), **options)))

    def stream(self) -> None:
        (_, name), (_, options) = self.model(), self.options()
        pieces = self.engine.stream(name, **options)
        for _ in range(self.rng.randrange(4)):  # and then it is dropped
            next(pieces, None)

    def session(self) -> None:
        _, name = self.model()
        self.sessions.append(self.engine.session(name))
        self.sessions[-1].append(self.rng.choice(PROMPTS))

    def go_on(self) -> None:
        if self.sessions:
            session = self.rng.choice(self.sessions)
            try:
                session.append([7, 8]) if self.rng.random() < 0.5 else session.generate(3)
            except (errors.Forgotten, errors.InvalidRequest, errors.PromptTooLong):
                self.sessions.remove(session)

    def swap(self) -> None:
        if self.sessions:
            try:
                self.rng.choice(self.sessions).swap_out()
            except errors.Forgotten:
                return

    def drop(self) -> None:
        if self.sessions:
            session = self.sessions.pop(self.rng.randrange(len(self.sessions)))
            if self.rng.random() < 0.5:
                session.close()

    def cancel(self) -> None:
        if self.requests:
            self.engine.cancel(self.rng.choice(self.requests)[1])

    def collect(self) -> None:
        """Those that are over have told the truth."""
        gc.collect()
        for (m, i), request in [pair for pair in self.requests if pair[1].is_over]:
            assert request.output == self.alone[m, i][: len(request.output)]
            assert request.error is None or isinstance(request.error, errors.PolymodelError), request.error
        self.requests = [pair for pair in self.requests if not pair[1].is_over]

    def unload(self) -> None:
        self.engine.unload(self.model()[1])

    def remove(self) -> None:
        self.engine.remove(self.model()[1])

    def pin(self) -> None:
        self.engine.pin(self.model()[1])

    def unpin(self) -> None:
        for name in list(self.engine.residency.hosted):
            self.engine.unpin(name)

    def resize(self) -> None:
        self.engine.budget = int(self.budget * self.rng.uniform(0.6, 1.0))

    def forget(self) -> None:
        _, name = self.model()
        self.engine.forget(name, prompt_ids=self.rng.choice(PROMPTS)[:3])

    def check(self) -> None:
        """What must hold at any time."""
        with self.engine.lane.exclusive():
            self.engine.arena.check()
            self.engine.prefixes.check()
            self.engine.residency.check()
            inside = [h.model for h in self.engine.residency.hosted.values() if h.model is not None]
            if self.engine.residency._flight is None:
                assert self.engine.ledger.total("weights") == model_nbytes(*inside)
            assert self.engine.ledger.total("weights") <= self.engine.residency.pool.budget

    def end(self) -> None:
        """Everything goes, and is gone."""
        self.engine.run()
        self.collect()
        for session in self.sessions:
            session.close()
        self.sessions.clear()
        gc.collect()
        engine = self.engine
        with engine.lane.exclusive():
            self.check()
            engine.prefixes.drop("default")
            assert not engine.lane.live and engine.arena.num_pages_used == 0 and not bool(engine.arena.bytes.any())
            assert not engine.ledger.of("host_kv") and not engine.ledger.of("draft_kv")
            assert engine.residency.pool.budget + engine.residency.lent == engine.budget
            host = engine.residency.host
            assert host.budget == engine.residency.host_budget and not engine.lane.orphans
        engine.close()
        assert all(not engine.ledger.total(kind) for kind in ("weights", "host_weights", "host_kv", "band_states"))
        assert engine.ledger.of("kv") == {"arena": engine.arena.nbytes}


@pytest.mark.parametrize("cycles", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_use_leaves_nothing_behind(
    paths: list[Path], alone: dict[tuple[int, int], list[int]], cycles: int
) -> None:
    threads, files = set(threading.enumerate()), num_files()
    soak = Soak(paths, alone, cycles)
    try:
        for cycle in range(cycles):
            soak.cycle()
            if cycle % 10 == 0:
                soak.check()
        soak.end()
    finally:
        soak.engine.close()
    del soak
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert num_files() == files


WORKER = """
import sys, itertools, torch
from pathlib import Path
torch.set_num_threads(1)
from polymodel import Engine
model, folder = sys.argv[1], Path(sys.argv[2])
engine = Engine(kv_budget="24MiB")
engine.add("m", model)
session = engine.session("m")
session.append([5, 6, 7])
for i in itertools.count():
    engine.submit("m", prompt_ids=[5 + i % 9], max_new_tokens=40, stop_at_eos=False)
    session.rollback(len(session) - 3)
    session.generate(5)
    session.save(folder / f"{i % 4}.safetensors")
    print(i, flush=True)
"""


@pytest.mark.parametrize("num_kills", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_files_that_can_be_read(paths: list[Path], tmp_path: Path, num_kills: int) -> None:
    for kill in range(num_kills):
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(paths[0]), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        for line in worker.stdout:
            if int(line) >= 5:
                break
        time.sleep(0.003 * kill)
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=60)
        assert worker.returncode == -signal.SIGKILL
        with Engine(kv_budget="24MiB", config=EngineConfig(prefix_cache=False)) as engine:
            engine.add("m", paths[0])
            with engine.session("m") as fresh:
                fresh.append([5, 6, 7])
                expected = fresh.generate(8)
            for i in range(4):
                with engine.session("m") as session:
                    session.load(tmp_path / f"{i}.safetensors")
                    assert session.tokens == [5, 6, 7, *expected[:5]]
                    assert session.generate(3) == expected[5:]
