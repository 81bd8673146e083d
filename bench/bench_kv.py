"""What the verbs of pages, the prefix cache and sharing between models cost, beside doing without them.

    pip install '.[bench]' && polymodel pull smollm2 && pytest bench/bench_kv.py [--benchmark-json FILE]

The verbs run on pages of one layer and one head, so that what is timed is the list and not the zeroing of pages; they
edit lists, and should cost about the same at 64K tokens as at 1K. A prefix of the demo model is prefilled, taken over
from the cache, and resumed by a sibling that has 24 of its 30 layers; the tokens are checked first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import demo_model

from polymodel import Engine, EngineConfig
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.config import KVKey
from polymodel.kv import Arena, PageList
from polymodel.prefix import PrefixCache
from polymodel.session import Session

LENGTHS = (1024, 65536)  # tokens
NODES, TOKENS = 10_000, 100  # of the cache that is looked up, and of a request
PREFIX = 256  # tokens of the demo model
KEY = KVKey("band", "tokenizer", "rope", "policy", "domain")


def new_list(arena: Arena, length: int) -> PageList:
    pages = PageList(arena, arena.layout(1, 1, 2))
    pages.reserve(length)
    pages.commit(length)
    return pages


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("verb", ["clone", "clone, both freed", "rollback", "evict", "splice"])
def test_verb(benchmark: Any, verb: str, length: int) -> None:
    arena = Arena(64 << 20)
    pages = new_list(arena, length)

    def setup() -> tuple[tuple[PageList], dict[str, int]]:
        return (PageList(arena, pages.layout) if verb == "splice" else pages.clone(),), {}

    verbs: dict[str, Callable[[PageList], object]] = {
        "clone": lambda twin: twin.clone(),
        "clone, both freed": lambda twin: (twin.clone().free(), twin.free()),
        "rollback": lambda twin: twin.rollback(7),
        "evict": lambda twin: twin.evict(length // 2, length // 2 + 100),
        "splice": lambda twin: twin.splice(pages.pages, length),
    }
    benchmark.pedantic(verbs[verb], setup=setup, rounds=200)


class Filled:
    """A cache of some ten thousand nodes, and requests that it holds and does not."""

    def __init__(self) -> None:
        self.arena = Arena(64 << 20)
        self.cache = PrefixCache(self.arena, max_bytes=1 << 40)
        self.random = random.Random(0)
        self.known = [self.tokens() for _ in range(NODES // 2)]
        for tokens in self.known:
            self.insert(tokens)
            self.insert([*tokens[:70], *self.tokens()[:30]])

    def tokens(self) -> list[int]:
        return [self.random.randrange(1000) for _ in range(TOKENS)]

    def insert(self, tokens: list[int]) -> None:
        pages = new_list(self.arena, len(tokens))
        self.cache.release(self.cache.insert(KEY, pages.layout, tokens, pages.pages))
        pages.free()


@pytest.fixture(scope="module")
def filled() -> Filled:
    return Filled()


@pytest.mark.parametrize("act", ["match", "peek", "insert", "a plain dict for each token"])
def test_cache(benchmark: Any, filled: Filled, act: str) -> None:
    cache, pages = filled.cache, new_list(filled.arena, TOKENS)
    assert cache.num_nodes >= NODES
    trie: dict[int, Any] = {}
    for tokens in filled.known:
        at = trie
        for token in tokens:
            at = at.setdefault(token, {})

    def walk(tokens: list[int]) -> None:
        at = trie
        for token in tokens:
            at = at[token]

    def match(tokens: list[int]) -> None:
        lease = cache.match([KEY], tokens).lease
        assert lease is not None
        cache.release(lease)

    acts: dict[str, Callable[[list[int]], object]] = {
        "match": match,
        "peek": lambda tokens: cache.peek([KEY], tokens),
        "insert": lambda tokens: cache.release(cache.insert(KEY, pages.layout, tokens, pages.pages)),
        "a plain dict for each token": walk,
    }

    def setup() -> tuple[tuple[list[int]], dict[str, int]]:
        return (filled.tokens() if act == "insert" else filled.random.choice(filled.known),), {}

    benchmark.pedantic(acts[act], setup=setup, rounds=500)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    path = demo_model()
    with Engine(budget="1GiB", kv_budget="256MiB", config=EngineConfig(prefill_chunk=PREFIX)) as engine:
        engine.add("m", path)
        engine.add("sibling", perturbed(open_checkpoint(path), 24, seed=0))
        yield engine


@pytest.mark.parametrize("how", ["computed", "from the cache", "resumed by a sibling", "computed by the sibling"])
def test_prefix(benchmark: Any, engine: Engine, how: str) -> None:
    ids = [1000 + 7 * i for i in range(PREFIX)]
    first = engine.session("m", domain="known")
    first.append(ids)
    model = "m" if how in ("computed", "from the cache") else "sibling"
    domain = "known" if how in ("from the cache", "resumed by a sibling") else "unknown"

    def setup() -> tuple[tuple[Session], dict[str, int]]:
        engine.drop_domain("unknown")
        if how == "resumed by a sibling":  # else it would find what it resumed before
            engine.drop_domain("known")
            engine.session("m", domain="known").append(ids)
        return (engine.session(model, domain=domain),), {}

    logits = setup()[0][0].append(ids)
    expected = engine.session(model, domain="another")
    expected.append(ids)
    assert expected.logits is not None and torch.equal(logits, expected.logits)
    engine.drop_domain("another")
    benchmark.pedantic(lambda session: session.append(ids), setup=setup, rounds=9)
