"""What pages promise: how many there are, whose they are, and that nobody can tell where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import write_tiny, write_tokenizer
from torch import Tensor

from csrc_triton.pages import KVLayout
from polymodel import Engine, EngineConfig
from polymodel.errors import InvalidRequest
from polymodel.kv import Arena, PageList
from polymodel.session import Session

IDS = torch.randint(3, 300, (700,), generator=torch.Generator().manual_seed(8)).tolist()
LENGTHS = [320, 96, 512, 1024, 200, 448, 768, 130]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {a: write_tokenizer(write_tiny(tmp_path_factory.mktemp(a), a)) for a in ("llama", "gemma3")}


@pytest.fixture
def engine(paths: dict[str, Path]) -> Iterator[Engine]:
    """It caches nothing, so every page is a session's, and each run computes everything."""
    with Engine(kv_budget="16MiB", config=EngineConfig(prefix_cache=False)) as engine:
        for arch, path in paths.items():
            engine.add(arch, path)
        yield engine
        engine.arena.check()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8 << 20, 2 << 20)
    yield arena
    arena.check()


def new_list(arena: Arena, length: int = 0, layers: int = 4) -> PageList:
    pages = PageList(arena, arena.layout(layers, 2, 16))
    write(pages, torch.randn(layers, length, 2, 2, 16))
    return pages


def write(pages: PageList, rows: Tensor) -> None:
    """Append rows [layers, tokens, k and v, kv heads, head dim] as they are."""
    start, count = len(pages), rows.shape[1]
    pages.reserve(count)
    page, slot = pages.places(start, start + count)
    for layer, numbers in enumerate(rows):
        pages.layout.view(pages.arena.bytes, layer)[page, :, :, slot] = numbers
    pages.commit(count)


def gather(pages: PageList, order: list[int] | None = None) -> Tensor:
    """[layers, tokens, k and v, kv heads, head dim] of a clean list, its pages one after another, each whole."""
    views = [
        pages.layout.view(pages.arena.bytes, layer)[order or pages.pages] for layer in range(pages.layout.num_layers)
    ]
    return torch.stack(views).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)[:, : len(pages)]


def shuffle(arena: Arena, layout: KVLayout, count: int) -> list[int]:
    """Free pages so that the next ones handed out lie in no order; a page that keeps its superblock in use."""
    first, *pages = arena.allocate(layout, count + 1)
    arena.release(layout, pages[::2] + pages[1::2][::-1])
    return [first]


def fresh(engine: Engine, ids: list[int], model: str = "llama") -> Session:
    session = engine.session(model)
    session.append(ids)
    return session


def assert_equal(one: Session, other: Session) -> None:
    """Every key and value, the logits, and the next tokens."""
    assert one.tokens == other.tokens and torch.equal(one.pages.dump(), other.pages.dump())
    assert one.logits is not None and other.logits is not None and torch.equal(one.logits, other.logits)
    assert [one.step() for _ in range(4)] == [other.step() for _ in range(4)]


# ---- how many --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "count"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (100, 2), (256, 4)])
def test_a_list_has_the_pages_that_its_tokens_need(arena: Arena, length: int, count: int) -> None:
    """n tokens take ceil(n / 64) pages, and give all of them back."""
    pages = new_list(arena, length)
    assert len(pages.pages) == arena.num_pages_used == count
    pages.free()
    assert arena.num_pages_used == 0


def test_aggregate_overhead(arena: Arena) -> None:
    """Lists of mixed lengths waste at most 5 % of their slots, where one size for all would waste more than half."""
    for length in LENGTHS:
        new_list(arena, length)
    overhead = arena.num_pages_used * 64 / sum(LENGTHS) - 1
    assert arena.num_pages_used == 57 and 0.04 < overhead <= 0.05
    assert len(LENGTHS) * max(LENGTHS) / sum(LENGTHS) - 1 > 1


def test_reserve(arena: Arena) -> None:
    """What is reserved changes no length and no contents, and the tokens that come then take no further page."""
    pages = new_list(arena, 100)
    before = gather(pages)
    pages.reserve(150)
    assert (len(pages), len(pages.pages)) == (100, 4) and torch.equal(gather(pages), before)
    write(pages, rows := torch.randn(4, 150, 2, 2, 16))
    assert len(pages.pages) == arena.num_pages_used == 4
    assert torch.equal(gather(pages), torch.cat((before, rows), dim=1))


# ---- what is in them -------------------------------------------------------------------------------------


def test_gather_exact(arena: Arena) -> None:
    """Pages that lie in any order, gathered in the list's, are the tokens that were written, bit for bit."""
    shuffle(arena, arena.layout(4, 2, 16), 6)
    pages, rows = new_list(arena), torch.randn(4, 300, 2, 2, 16)
    for part in torch.split(rows, [40, 24, 1, 235], dim=1):
        write(pages, part)
    assert pages.pages != sorted(pages.pages)
    assert torch.equal(gather(pages), rows) and not torch.equal(gather(pages, sorted(pages.pages)), rows)


def test_reuse(arena: Arena) -> None:
    """Pages that were given back serve the next list: nothing grows, and nothing of the former owner can be seen."""
    pages = new_list(arena, 200)
    layout, ids, free = pages.layout, set(pages.pages), arena.num_free(pages.layout)
    assert bool(gather(pages).any())
    pages.free()
    pages.reserve(200)
    assert set(pages.pages) == ids and arena.num_free(layout) == free
    assert not bool(layout.blocks(arena.bytes)[pages.pages].any())


@pytest.mark.parametrize("length", [150, 128])
def test_copy_on_write_of_one_page(engine: Engine, length: int) -> None:
    """A fork costs nothing; its first token costs one page, a copy if that page was begun; the parent's bits stay."""
    parent = fresh(engine, IDS[:length])
    arena, before = engine.arena, parent.pages.dump()
    used, copied = arena.num_pages_used, arena.bytes_copied
    fork = parent.clone()
    assert arena.num_pages_used == used
    fork.append(IDS[300:301])
    assert arena.num_pages_used == used + 1 < used + len(fork.pages.pages)
    assert arena.bytes_copied - copied == (parent.pages.layout.page_bytes if length % 64 else 0)
    whole = length // 64
    assert fork.pages.pages[:whole] == parent.pages.pages[:whole] and fork.pages.pages[-1] not in parent.pages.pages
    assert torch.equal(parent.pages.dump(), before)
    assert_equal(fork, fresh(engine, [*IDS[:length], IDS[300]]))
    assert_equal(parent, fresh(engine, IDS[:length]))


# ---- evict -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_evict_on_a_shuffled_table(engine: Engine, model: str) -> None:
    """Where its pages lie changes nothing of what a list gives, before and after evictions."""
    ordered, layout = fresh(engine, IDS[:300], model), engine.residency[model].layout
    anchor = shuffle(engine.arena, layout, 8)
    shuffled = fresh(engine, IDS[:300], model)
    assert shuffled.pages.pages != sorted(shuffled.pages.pages) and ordered.pages.pages == sorted(ordered.pages.pages)
    for span in (slice(64, 128), slice(30, 101), slice(5, 9)):
        for session in (ordered, shuffled):
            session.evict(span)
            session.append(IDS[300:303])
        assert ordered.logits is not None and shuffled.logits is not None
        assert torch.equal(ordered.logits, shuffled.logits)
    assert ordered.generate(6) == shuffled.generate(6)
    for layer in range(layout.num_layers):
        one, other = (
            layout.view(engine.arena.bytes, layer)[page, :, :, slot]
            for page, slot in (session.pages.places(0, len(session)) for session in (ordered, shuffled))
        )
        assert torch.equal(one, other)
    engine.arena.release(layout, anchor)


@pytest.mark.parametrize("span", [slice(10, 80), slice(0, 64), slice(140, None)])
def test_evict_leaves_the_parent_of_a_fork(engine: Engine, span: slice) -> None:
    """A fork that evicts, and writes where the span was, changes no bit of its parent."""
    parent = fresh(engine, IDS[:150])
    before, entries = parent.pages.dump(), parent.pages.entries.tolist()
    fork = parent.clone()
    fork.evict(span)
    fork.append(IDS[200:260])
    assert parent.tokens != fork.tokens
    assert torch.equal(parent.pages.dump(), before) and parent.pages.entries.tolist() == entries
    assert_equal(parent, fresh(engine, IDS[:150]))


# ---- leaving memory, and other geometries ----------------------------------------------------------------


def test_swap_and_restore(engine: Engine) -> None:
    """What went to the host comes back bit for bit, though in other pages and after others have used its own."""
    session = fresh(engine, IDS[:150])
    before, pages = session.pages.dump(), session.pages.pages
    session.swap_out()
    assert len(session.pages) == 0 and not bool(session.pages.layout.blocks(engine.arena.bytes)[pages].any())
    other = fresh(engine, IDS[300:450])
    assert set(other.pages.pages) == set(pages)
    session.swap_in()
    assert not set(session.pages.pages) & set(pages) and torch.equal(session.pages.dump(), before)
    assert_equal(session, fresh(engine, IDS[:150]))


def test_geometry_errors(arena: Arena) -> None:
    """Pages of one geometry never pass for another's, nor too few or too many for a length: nothing changes."""
    pages, other = new_list(arena, 100), new_list(arena, layers=3)
    twin = pages.clone()
    data, swapped, used = pages.dump(), twin.swap_out(), arena.num_pages_used
    with pytest.raises(InvalidRequest, match=r"num_layers=4.*expected those of.*num_layers=3"):
        other.swap_in(swapped)
    for wrong, length in ((data, 100), (data[:3], 64), (data[:3], 129), (data[:3, :, :-1], 100), (data[:3].int(), 100)):
        with pytest.raises(InvalidRequest, match=r"load: .* expected torch\.uint8 \(3, "):
            other.load(wrong, length)
    with pytest.raises(InvalidRequest, match=r"splice\(2 pages, 129\)"):
        other.splice(pages.pages, 129)
    assert (len(other), other.pages, arena.num_pages_used) == (0, [], used)
    other.load(data[:3], 100)
    assert torch.equal(gather(other), gather(pages)[:3])


# ---- shared by a cache -----------------------------------------------------------------------------------


def test_radix_footprint(paths: dict[str, Path]) -> None:
    """Six requests of 128 common tokens and 80 of their own occupy 608 positions, in 896 slots.

    With a whole prefix in every node it would be 1376.
    """
    with Engine(kv_budget="16MiB") as engine:
        engine.add("llama", paths["llama"])
        for i in range(6):
            tail = [3 + i, *IDS[200 + 79 * i : 279 + 79 * i]]
            engine.generate("llama", prompt_ids=IDS[:128] + tail, max_new_tokens=1)
        stats = engine.prefixes.stats
        assert stats.tokens_matched == 5 * 128
        assert stats.tokens == 128 + 6 * 80 == 608
        assert stats.pages * 64 == 896 and engine.arena.num_pages_used == stats.pages
        assert stats.nbytes == stats.pages * engine.residency["llama"].layout.page_bytes
        assert sum(node.stop for node in engine.prefixes._nodes()) == 128 + 6 * 208 == 1376
