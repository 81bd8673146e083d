"""What prompts take over from what was computed before: the same bits, fewer rows, and nothing of other domains."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import write_tiny, write_tokenizer

from csrc_triton.pages import KVLayout
from polymodel import Engine, EngineConfig
from polymodel.checkpoint import Checkpoint, open_checkpoint, perturbed
from polymodel.errors import Forgotten, InvalidRequest, KVFull, NonFiniteLogits
from polymodel.events import token_layers
from polymodel.kv import PageList, check_lists
from polymodel.output import Output
from polymodel.prefill import Prefill
from polymodel.prefix import PrefixCache
from polymodel.sample import greedy
from polymodel.sequence import Context
from polymodel.sequence import Sequence as Request
from polymodel.session import Session

LAYERS = 3
IDS = torch.randint(3, 259, (460,), generator=torch.Generator().manual_seed(8)).tolist()
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "stop_at_eos": False, "draft": None}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_tiny(tmp_path_factory.mktemp("prefill"), "llama"))


def sibling(path: Path, first_layer: int, seed: int = 1) -> Checkpoint:
    """The model with its layers from first_layer on changed enough to say other things."""
    return perturbed(open_checkpoint(path), first_layer, seed)


def new_engine(path: Path, **config: Any) -> Engine:
    """m; twin, the same under another name; low and high, which differ from layer 1 and layer 2 on."""
    engine = Engine(kv_budget="24MiB", config=EngineConfig(kv_borrows=False, **config))
    engine.add("m", path)
    engine.add("same", path)
    engine.add("low", sibling(path, 1))
    engine.add("high", sibling(path, 2))
    return engine


def assert_sound(engine: Engine) -> None:
    """Every owner of a page is the cache or something live, and the ledger says what the arena's bytes are for."""
    engine.lane.turn()  # buries what sessions left
    engine.arena.check()
    engine.prefixes.check()
    engine.residency.check()
    contexts = [*engine.lane.live, *(s._context for s in engine.lane.sessions)]
    lists = [context.pages for context in contexts]
    lists += [pages for c in contexts if (drafts := getattr(c, "drafts", None)) for pages in drafts.pages.values()]
    for pages in lists:
        pages.check()
    held = [page for node in engine.prefixes._nodes() for page in node.pages]
    check_lists(engine.arena, lists, held)
    leases = [context.lease for context in contexts] + [lease for _, _, lease in engine._public]
    assert engine.prefixes.stats.leases == sum(
        lease is not None and lease._node is not None and lease._node.is_alive for lease in leases
    )
    assert engine.ledger.of("kv").get("prefixes", 0) == engine.prefixes.nbytes
    assert engine.ledger.total("band_states") == engine.arena.state_bytes
    assert sum(engine.ledger.total(kind) for kind in ("kv", "draft_kv", "band_states")) == engine.arena.nbytes
    assert engine.lane.num_open_spans == 0


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with new_engine(path, prefill_chunk=96) as engine:
        yield engine
        with engine.lane.exclusive():
            assert_sound(engine)


@pytest.fixture
def held(engine: Engine) -> Iterator[None]:
    """The test drives the lane itself, turn by turn."""
    with engine.lane.exclusive():
        yield


@pytest.fixture(scope="module")
def uncached(path: Path) -> Iterator[Engine]:
    """The same models, each of whose runs computes everything."""
    with new_engine(path, prefix_cache=False) as engine:
        yield engine


def fresh(uncached: Engine, model: str, ids: Sequence[int]) -> Session:
    session = uncached.session(model)
    session.append(ids)
    return session


def assert_equal(one: Session, other: Session) -> None:
    assert one.tokens == other.tokens and len(one) == len(one.pages) == len(other.pages)
    assert torch.equal(one.pages.dump(), other.pages.dump())
    assert one.logits is not None and other.logits is not None and torch.equal(one.logits, other.logits)


def run(engine: Engine, model: str, ids: Sequence[int], **options: Any) -> Output:
    return engine.generate(model, prompt_ids=ids, **OPTIONS | options)


def cost(out: Output) -> tuple[int, int, int]:
    return out.metrics.num_cached_tokens, out.metrics.num_resumed_tokens, out.metrics.num_prefill_token_layers


# ---- pages taken over ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [9, 63, 64, 65, 128, 200])
def test_an_equal_prompt_computes_one_row(engine: Engine, uncached: Engine, count: int) -> None:
    expected = run(uncached, "m", IDS[:count])
    first, second = run(engine, "m", IDS[:count]), run(engine, "m", IDS[:count])
    assert first.tokens == second.tokens == expected.tokens and len(set(first.tokens)) > 6
    assert cost(first) == (0, 0, LAYERS * count)
    assert cost(second) == (count - 1, 0, LAYERS)


@pytest.mark.parametrize("shared", [8, 63, 64, 65, 130])
def test_what_begins_alike_takes_the_common_tokens_over(engine: Engine, uncached: Engine, shared: int) -> None:
    run(engine, "m", IDS[:200])
    prompt = IDS[:shared] + IDS[300:360]
    out = run(engine, "m", prompt)
    assert out.tokens == run(uncached, "m", prompt).tokens
    assert cost(out) == (shared, 0, LAYERS * 60)


def test_a_short_match_is_counted_and_not_taken(engine: Engine) -> None:
    run(engine, "m", IDS[:100])
    before = engine.prefixes.stats
    assert cost(run(engine, "m", IDS[:7] + IDS[200:230])) == (0, 0, LAYERS * 37)
    assert cost(run(engine, "m", IDS[200:230])) == (0, 0, LAYERS * 30)
    after = engine.prefixes.stats
    assert (after.too_short, after.no_prefix) == (before.too_short + 1, before.no_prefix + 1)


def test_outputs_are_cached_as_well(engine: Engine, uncached: Engine) -> None:
    """A conversation goes on from prompt and answer; the pending token alone was never in the pages."""
    answer = run(engine, "m", IDS[:50]).tokens
    turn = IDS[:50] + answer + IDS[200:220]
    out = run(engine, "m", turn)
    assert cost(out) == (50 + 11, 0, LAYERS * 21)
    assert out.tokens == run(uncached, "m", turn).tokens


def test_drafting_caches_the_same_tokens(path: Path) -> None:
    """Hits are equal with a drafter and without, and so are the tokens."""
    costs = []
    for writer, reader in itertools.product((None, "same", "low"), repeat=2):
        with new_engine(path) as engine:
            one = run(engine, "m", IDS[:90], draft=writer)
            two = run(engine, "m", IDS[:90] + one.tokens + IDS[:30], draft=reader)
            assert writer is None or one.metrics.num_drafted > 0
            costs.append((one.tokens, two.tokens, cost(two), engine.prefixes.num_tokens))
            assert_sound(engine)
    assert all(c == costs[0] for c in costs)


def test_equal_models_share_a_cache_and_an_equal_one_of_other_layers_does_not(engine: Engine) -> None:
    run(engine, "m", IDS[:100])
    assert cost(run(engine, "same", IDS[:100])) == (99, 0, LAYERS)
    assert cost(run(engine, "high", IDS[:100]))[0] == 0


def test_a_session_takes_over_when_it_grows(engine: Engine, uncached: Engine) -> None:
    run(engine, "m", IDS[:200])
    session = engine.session("m")
    session.append(IDS[:30])
    assert session.num_cached == 29
    session.append(IDS[30:180])
    assert session.num_cached == 29 + 149
    assert_equal(session, fresh(uncached, "m", IDS[:180]))


def test_taking_over_moves_no_bytes(engine: Engine) -> None:
    run(engine, "m", IDS[:130])
    session = engine.session("m")
    match = engine.prefixes.peek(engine.lane.prefill._keys("m", "default"), IDS[:129])
    before, copied = engine.arena.bytes[: engine.arena.nbytes].clone(), engine.arena.bytes_copied
    session.pages.splice(match.pages, match.length)
    assert torch.equal(engine.arena.bytes[: engine.arena.nbytes], before) and engine.arena.bytes_copied == copied
    session.pages.free()


def test_the_cache_gives_way_to_who_needs_pages(path: Path, uncached: Engine) -> None:
    """Prompt after prompt, in pages for a few of them: the oldest prefixes go, no request fails."""
    with Engine(kv_budget="10MiB", config=EngineConfig(kv_borrows=False, prefix_budget=1 << 40)) as engine:
        engine.add("m", path)
        room = engine.arena.num_free(engine.residency["m"].layout)
        prompts = [IDS[i : i + 400] for i in range(room // 7 + 5)]
        outs = [run(engine, "m", prompt) for prompt in prompts]
        assert engine.prefixes.stats.evictions > 0
        assert [out.tokens for out in outs[:2]] == [run(uncached, "m", prompt).tokens for prompt in prompts[:2]]
        with pytest.raises(KVFull):
            held = [engine.session("m") for _ in range(room)]
            for session in held:
                session.append(IDS[:400])
        for session in held:
            session.close()
        assert_sound(engine)


def test_the_cache_stays_within_its_bounds(path: Path) -> None:
    with Engine(
        kv_budget="24MiB", config=EngineConfig(kv_borrows=False, prefix_tokens=150, prefix_budget=3 << 20)
    ) as engine:
        engine.add("m", path)
        for i in range(8):
            run(engine, "m", IDS[i : i + 90])
            assert engine.prefixes.num_tokens <= 150 and engine.prefixes.nbytes <= 3 << 20
        assert engine.prefixes.stats.evictions >= 6
        assert_sound(engine)


@pytest.mark.usefixtures("held")
def test_numbers_that_are_none_are_not_cached(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymodel.lane.greedy", lambda logits: [-1] * len(logits))
    with pytest.raises(NonFiniteLogits):
        run(engine, "m", IDS[:50])
    assert engine.prefixes.num_tokens == 0


@pytest.mark.usefixtures("held")
def test_a_cancelled_prompt_leaves_its_whole_pages(engine: Engine) -> None:
    request = engine.submit("m", prompt_ids=IDS[:300], **OPTIONS)
    engine.lane.turn()
    engine.lane.cancel(request)
    assert request.finish_reason == "cancelled" and engine.prefixes.num_tokens == 64
    assert cost(run(engine, "m", IDS[:300]))[0] == 64


def test_without_a_cache_nothing_is_opened_or_warmed(uncached: Engine) -> None:
    for verb in ("share_prefix", "warm"):
        with pytest.raises(InvalidRequest, match=f"{verb}: nothing is cached"):
            getattr(uncached, verb)("m", prompt_ids=IDS[:20])
    with pytest.raises(InvalidRequest, match="token ids are given as prompt_ids"):
        uncached.forget("m", IDS[:20])  # type: ignore[arg-type]


def test_messages_that_others_go_on_from_are_their_prefix(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the header of an answer, which the next message would not have in its place."""
    headers = []

    def render(self: Any, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
        headers.append(add_generation_prompt)
        return IDS[: 20 * len(messages)] + [7] * add_generation_prompt

    monkeypatch.setattr(type(engine["m"].tokenizer), "apply_chat_template", render)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert engine.share_prefix("m", messages=chat[:1]) == 20
    assert engine.warm("m", messages=chat) == 41
    assert engine.generate("m", messages=chat, **OPTIONS).metrics.num_cached_tokens == 40
    assert engine.forget("m", messages=chat[:1]) > 41
    assert headers == [False, True, True, False]


def test_warm_prefixes_are_found_and_are_the_first_to_go(engine: Engine) -> None:
    run(engine, "m", IDS[:60])
    assert engine.warm("m", prompt_ids=IDS[100:200]) == 100
    assert engine.prefixes.stats.warm_tokens == 100
    assert cost(run(engine, "m", IDS[100:200]))[0] == 99
    assert engine.prefixes.stats.warm_tokens < 100
    engine.warm("m", prompt_ids=IDS[200:300])
    engine.prefixes.max_tokens = engine.prefixes.num_tokens - 1
    run(engine, "m", IDS[:60])
    assert cost(run(engine, "m", IDS[200:300]))[0] == 0


# ---- one prefill for prompts in flight -------------------------------------------------------------------


def submit(engine: Engine, model: str, ids: Sequence[int], **options: Any) -> Request:
    return engine.submit(model, prompt_ids=ids, **OPTIONS | options)


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("models", [("m", "m", "m"), ("m", "same", "m")])
def test_prompts_in_flight_that_begin_alike_are_prefilled_once(
    engine: Engine, uncached: Engine, models: tuple[str, ...]
) -> None:
    prompts = [IDS[:250] + IDS[300 + 20 * i : 320 + 20 * i] for i in range(3)]
    requests = [submit(engine, m, ids) for m, ids in zip(models, prompts, strict=True)]
    engine.run()
    assert [r.output for r in requests] == [
        run(uncached, m, ids).tokens for m, ids in zip(models, prompts, strict=True)
    ]
    assert [r.num_token_layers for r in requests] == [LAYERS * 270, LAYERS * 20, LAYERS * 20]


@pytest.mark.usefixtures("held")
def test_siblings_in_flight_run_the_lower_layers_once(engine: Engine, uncached: Engine) -> None:
    requests = [submit(engine, m, IDS[:300]) for m in ("m", "high", "low")]
    engine.run()
    assert [r.output for r in requests] == [run(uncached, r.model, IDS[:300]).tokens for r in requests]
    assert [r.num_token_layers for r in requests] == [300 * LAYERS, 300 * 1, 300 * 2]


@pytest.mark.usefixtures("held")
def test_followers_go_on_alone_if_their_leader_fails(engine: Engine, uncached: Engine) -> None:
    leader, follower = submit(engine, "m", IDS[:300]), submit(engine, "m", [*IDS[:280], 7, 8])
    engine.lane.turn()
    assert len(leader.pages) == 96 and not follower.has_begun
    leader.finish("error", RuntimeError("gone"))
    engine.run()
    assert follower.output == run(uncached, "m", follower.tokens[:282]).tokens
    assert follower.num_cached == 64 and follower.num_token_layers == LAYERS * (282 - 64)


@pytest.mark.usefixtures("held")
def test_many_that_wait_cost_a_look_each(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [submit(engine, "m", IDS[:300], max_new_tokens=1) for _ in range(40)]
    engine.lane.turn()
    looks = []
    peek = PrefixCache.peek
    monkeypatch.setattr(PrefixCache, "peek", lambda *args: looks.append(1) or peek(*args))
    engine.lane.turn()
    assert len(looks) <= 40
    looks.clear()
    engine.run()
    assert all(len(r.output) == 1 for r in requests) and len({tuple(r.output) for r in requests}) == 1
    assert len(looks) < 6 * 40


@pytest.mark.usefixtures("held")
def test_a_short_common_beginning_is_not_waited_for(engine: Engine) -> None:
    requests = [submit(engine, "m", IDS[:31] + IDS[100 * i : 100 * i + 40]) for i in (1, 2)]
    engine.lane.turn()
    assert all(r.has_begun for r in requests)
    engine.run()


@pytest.mark.usefixtures("held")
def test_other_domains_prompts_are_not_waited_for(engine: Engine) -> None:
    requests = [submit(engine, "m", IDS[:300], domain=d) for d in ("a", "b")]
    engine.run()
    assert [r.num_token_layers for r in requests] == [300 * LAYERS] * 2


# ---- lower layers taken over -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [9, 63, 64, 65, 200])
@pytest.mark.parametrize(("model", "equal"), [("low", 1), ("high", 2)])
def test_a_sibling_runs_only_the_layers_that_differ(
    engine: Engine, uncached: Engine, model: str, equal: int, count: int
) -> None:
    one = engine.session("m")
    one.append(IDS[:count])
    copied = engine.arena.bytes_copied
    two = engine.session(model)
    two.append(IDS[:count])
    assert (two.num_cached, two.num_resumed) == (0, count)
    assert two._context.num_token_layers == count * (LAYERS - equal)
    assert engine.arena.bytes_copied > copied
    assert_equal(two, fresh(uncached, model, IDS[:count]))
    assert two.generate(10) == fresh(uncached, model, IDS[:count]).generate(10)
    assert not torch.equal(two.pages.dump(), one.pages.dump())


def test_siblings_chain(engine: Engine, uncached: Engine) -> None:
    """high resumes from m, low from high: hidden states come along with pages that were themselves resumed."""
    for model, done in (("m", LAYERS), ("high", 1)):
        session = engine.session(model)
        session.append(IDS[:150])
        assert session._context.num_token_layers == 150 * done
        session.close()
    engine.lane.forget("m", IDS[:1], "default")
    session = engine.session("high")
    session.append(IDS[:150])
    session.close()
    third = engine.session("m")
    third.append(IDS[:150])
    assert third.num_resumed == 150 and third._context.num_token_layers == 150
    assert_equal(third, fresh(uncached, "m", IDS[:150]))


def test_the_longer_of_own_prefix_and_siblings_layers_is_taken(engine: Engine, uncached: Engine) -> None:
    run(engine, "high", IDS[:70])
    run(engine, "m", IDS[:200])
    out = run(engine, "high", IDS[:230])
    assert out.tokens == run(uncached, "high", IDS[:230]).tokens
    assert out.metrics.num_cached_tokens == 70 and out.metrics.num_resumed_tokens == 130
    assert out.metrics.num_prefill_token_layers == 130 * 1 + 30 * LAYERS


def test_what_was_computed_before_the_sibling_came_has_no_states(path: Path, uncached: Engine) -> None:
    with Engine(kv_budget="24MiB") as engine:
        engine.add("m", path)
        early = engine.session("m")
        early.append(IDS[:100])
        engine.add("high", sibling(path, 2))
        early.append(IDS[100:200])
        session = engine.session("high", prefix=early)
        assert (session.num_resumed, session._context.num_token_layers) == (0, 200 * LAYERS)
        assert_equal(session, fresh(uncached, "high", IDS[:200]))
        late = engine.session("m", domain="late")
        late.append(IDS[:200])
        session = engine.session("high", prefix=late)
        assert session.num_resumed == 200
        assert_sound(engine)


def test_own_pages_and_a_siblings_layers_go_together_in_a_session(engine: Engine, uncached: Engine) -> None:
    """What this model has cached comes first, the rest of the prefix from the session; its cache may be gone."""
    one = engine.session("m")
    one.append(IDS[:200])
    for clear in (False, True):
        own = engine.session("high", domain="default")
        own.append(IDS[:90])
        own.close()
        if clear:
            engine.prefixes.forget(engine.lane.prefill.key("m", "default"), IDS[:1])
        two = engine.session("high", prefix=one)
        assert (two.num_cached, two.num_resumed) == (90, 110)
        assert_equal(two, fresh(uncached, "high", IDS[:200]))
        engine.prefixes.forget(engine.lane.prefill.key("high", "default"), IDS[:1])


@pytest.mark.usefixtures("held")
def test_what_is_decoded_is_kept_for_siblings_too(engine: Engine, uncached: Engine) -> None:
    one = engine.session("m")
    one.append(IDS[:60])
    one.generate(40)
    two = engine.session("high", prefix=one)
    assert two.num_resumed == 100
    assert_equal(two, fresh(uncached, "high", one.tokens))
    request = submit(engine, "m", IDS[200:260], max_new_tokens=40)
    engine.run()
    answer = request.tokens[:-1]
    assert cost(run(engine, "low", answer + IDS[:5])) == (0, 99, 99 * 2 + 5 * LAYERS)


@pytest.mark.parametrize("proved", [False, True])
def test_without_room_beside_the_siblings_prefix_that_one_goes_and_all_layers_run(
    path: Path, uncached: Engine, proved: bool
) -> None:
    """Room for either, were the states not in the way: what copies are made from is not reclaimed for them."""
    with Engine(kv_budget="12MiB", config=EngineConfig(kv_borrows=False, prefix_budget=1 << 40)) as engine:
        engine.add("m", path)
        engine.add("high", sibling(path, 2))
        layout = engine.residency["m"].layout
        if proved:
            run(engine, "m", IDS[400:420])
            run(engine, "high", IDS[400:420])
            engine.prefixes.clear()
        run(engine, "m", IDS[:300])
        engine.arena.reclaimers = engine.arena.reclaimers[2:]  # neither drafts nor states
        filler = PageList(engine.arena, layout)
        filler.reserve(64 * (engine.arena.num_free(layout) - 1))
        out = run(engine, "high", IDS[:300])
        assert out.tokens == run(uncached, "high", IDS[:300]).tokens
        assert cost(out) == (0, 0, 300 * LAYERS) and engine.prefixes.stats.evictions > 0
        filler.rollback(0)
        assert_sound(engine)


@pytest.mark.usefixtures("held")
def test_states_given_up_midway_mean_a_whole_prefill(engine: Engine, uncached: Engine) -> None:
    run(engine, "m", IDS[:300])
    request = submit(engine, "high", IDS[:300])
    for _ in range(10):
        if request.pages is not None and len(request.pages) == 96:
            break
        engine.lane.turn()
    assert request.num_resumed == 96
    assert engine.arena.drop_states() > 0
    engine.run()
    assert request.output == run(uncached, "high", IDS[:300]).tokens
    assert request.num_resumed == 96 and request.num_token_layers == 96 + (300 - 96) * LAYERS


def test_a_session_that_resumed_is_a_session_like_any_other(engine: Engine, uncached: Engine) -> None:
    """What it took over once is not looked for again after a cut."""
    one = engine.session("m")
    one.append(IDS[:200])
    cuts: list[Callable[[Session], Any]] = [
        lambda s: s.rollback(150),
        lambda s: s.quarantine(slice(70, None)),
        lambda s: s.evict(slice(60, None)),
    ]
    for prefix, cut in itertools.product((None, one), cuts):
        engine.prefixes.forget(engine.lane.prefill.key("high", "default"), IDS[:1])
        engine.lane.prefill.keep(one._context)  # quarantine struck it out for all models
        session = engine.session("high", prefix=prefix)
        if prefix is None:
            session.append(IDS[:200])
        assert session.num_resumed == 200
        cut(session)
        length = len(session)
        assert_equal(session, fresh(uncached, "high", IDS[:length]))
        session.append(IDS[300:340])
        assert_equal(session, fresh(uncached, "high", IDS[:length] + IDS[300:340]))
        session.step()
        session.close()


@pytest.mark.usefixtures("held")
def test_states_given_up_for_the_next_prompt_of_a_chunk_mean_a_whole_prefill(
    engine: Engine, uncached: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in (0, 100):
        run(engine, "m", IDS[start : start + 40])
    begin = Prefill.begin

    def drop(self: Prefill, context: Context) -> None:
        if not context.pages.length and context.tokens[0] == IDS[100]:
            engine.arena.drop_states()
        begin(self, context)

    monkeypatch.setattr(Prefill, "begin", drop)
    requests = [submit(engine, "high", IDS[start : start + 40]) for start in (0, 100)]
    engine.run()
    assert [r.output for r in requests] == [run(uncached, "high", IDS[s : s + 40]).tokens for s in (0, 100)]
    assert [r.num_resumed for r in requests] == [0, 0]


@pytest.mark.usefixtures("held")
def test_a_prompt_interrupted_before_its_first_token_goes_on(
    engine: Engine, uncached: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = submit(engine, "m", IDS[:64])
    with monkeypatch.context() as patch:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("polymodel.lane.greedy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.lane.turn()
    assert len(request.pages) == 64 and not request.output
    engine.run()
    assert request.output == run(uncached, "m", IDS[:64]).tokens


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("model", ["m", "high"])
@pytest.mark.parametrize("after", [0, 1], ids=["prefill", "decode"])
def test_a_request_interrupted_between_a_forward_and_its_tokens_goes_on(
    engine: Engine, uncached: Engine, monkeypatch: pytest.MonkeyPatch, after: int, model: str
) -> None:
    """Prefilled whole or resumed, in the prompt's last forward or in a decode."""
    run(engine, "m", IDS[:128])
    request = submit(engine, model, IDS[:128], draft=None)
    with monkeypatch.context() as patch:

        def interrupt(logits: torch.Tensor) -> list[int]:
            if len(request.output) == after:
                raise KeyboardInterrupt
            return greedy(logits)

        patch.setattr("polymodel.lane.greedy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            while True:
                engine.lane.turn()
    engine.run()
    assert request.output == run(uncached, model, IDS[:128]).tokens
    assert_sound(engine)


def test_states_are_given_up_before_prefixes(path: Path) -> None:
    with Engine(kv_budget="12MiB", config=EngineConfig(kv_borrows=False, prefix_budget=1 << 40)) as engine:
        engine.add("m", path)
        engine.add("high", sibling(path, 2))
        run(engine, "m", IDS[:200])
        assert engine.arena.state_bytes > 0 and engine.prefixes.nbytes > 0
        layout = engine.residency["m"].layout
        fillers = []
        while engine.arena.state_bytes:
            fillers.append(engine.session("m", domain="other"))
            fillers[-1].append(IDS[300:302])
        assert engine.prefixes.stats.evictions == 0
        while not engine.prefixes.stats.evictions:
            fillers.append(engine.session("m", domain="other"))
            fillers[-1].append(IDS[300:302])
        assert engine.arena.num_free(layout) >= 0
        assert_sound(engine)


def test_resuming_is_tried_once_and_is_off_where_it_changes_bits(
    engine: Engine, uncached: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine, "m", IDS[:100])
    before = PageList.take_band

    def wrong(pages: PageList, source: Sequence[int], layout: KVLayout, num_layers: int, stop: int) -> int:
        reach = before(pages, source, layout, num_layers, stop)
        states = pages.states_at(num_layers, len(pages), reach)
        assert states is not None
        layout = pages.arena.state_layout(64, torch.float32)
        pages.arena.write_states(layout, *states, pages.arena.read_states(layout, *states) + 1e-6)
        return reach

    monkeypatch.setattr(PageList, "take_band", wrong)
    for _ in range(2):
        out = run(engine, "high", IDS[:100])
        assert out.metrics.num_resumed_tokens == 0
        assert out.tokens == run(uncached, "high", IDS[:100]).tokens
    assert len(engine.events.of("prove")) == 1
    assert engine.lane.prefill.why_off("high", 2) == "resuming at layer 2 changes bits on this machine"
    assert not engine.lane.prefill.why_off("low", 1)
    assert "2 with m (off: resuming at layer 2 changes bits on this machine)" in engine.table().rows[3]["shares"]
    assert "(off: " in str(engine.table())
    monkeypatch.undo()
    engine.remove("high")
    engine.add("high", sibling(path, 2))  # tried anew
    run(engine, "m", IDS[200:300])
    assert cost(run(engine, "high", IDS[200:300]))[1] == 100


def test_a_deeper_sibling_resumes_above_all_layers_of_the_shallow_one(path: Path, tmp_path: Path) -> None:
    """The same seed gives the same lower layers."""
    deeper = write_tokenizer(write_tiny(tmp_path / "deeper", "llama", num_hidden_layers=5))
    with Engine(kv_budget="24MiB") as engine, Engine(kv_budget="24MiB") as alone:
        engine.add("m", path)
        engine.add("deeper", deeper)
        alone.add("deeper", deeper)
        out = run(engine, "m", IDS[:150])
        two = engine.session("deeper")
        two.append(IDS[:150])
        assert two.num_resumed == 150 and two._context.num_token_layers == 150 * 2
        assert_equal(two, fresh(alone, "deeper", IDS[:150]))
        assert out.metrics.num_prefill_token_layers == 150 * 3
        assert_sound(engine)


def test_with_sharing_between_models_off_everything_is_computed_and_the_same(path: Path, uncached: Engine) -> None:
    with new_engine(path, multi_model=False) as engine:
        for model in ("m", "same", "high"):
            out = run(engine, model, IDS[:100])
            assert cost(out) == (0, 0, 100 * LAYERS) and out.tokens == run(uncached, model, IDS[:100]).tokens
        assert cost(run(engine, "m", IDS[:100])) == (99, 0, LAYERS)  # within a model
        assert [row["shares"] for row in engine.table()] == [[]] * 4
        assert engine.arena.state_bytes == 0
        assert_sound(engine)


def test_a_model_that_is_gone_is_nobodys_sibling(engine: Engine) -> None:
    run(engine, "m", IDS[:100])
    engine.remove("m")
    engine.remove("same")
    assert cost(run(engine, "high", IDS[:100])) == (0, 0, 100 * LAYERS)


# ---- domains ---------------------------------------------------------------------------------------------


def test_domains_share_nothing_but_what_was_opened_to_all(engine: Engine, uncached: Engine) -> None:
    run(engine, "m", IDS[:100], domain="a")
    assert cost(run(engine, "m", IDS[:100], domain="b")) == (0, 0, 100 * LAYERS)
    assert cost(run(engine, "high", IDS[:100], domain="c")) == (0, 0, 100 * LAYERS)
    assert engine.share_prefix("m", prompt_ids=IDS[200:300]) == 100
    for domain in ("a", "d"):
        prompt = IDS[200:300] + IDS[:40]
        out = run(engine, "m", prompt, domain=domain)
        assert cost(out)[0] == 100 and out.tokens == run(uncached, "m", prompt).tokens
    assert cost(run(engine, "m", IDS[200:300] + IDS[:40], domain="e"))[0] == 100  # not the 140 that a and d have
    assert cost(run(engine, "high", IDS[200:280], domain="f"))[1] == 80


def test_a_prefix_opened_to_all_stays_whatever_else_is_cached(path: Path) -> None:
    with Engine(kv_budget="24MiB", config=EngineConfig(kv_borrows=False, prefix_tokens=130)) as engine:
        engine.add("m", path)
        engine.share_prefix("m", prompt_ids=IDS[:100])
        for i in range(5):
            run(engine, "m", IDS[200 + i : 240 + i])
        assert cost(run(engine, "m", IDS[:100]))[0] == 99
        assert engine.forget("m", prompt_ids=IDS[:50], domain="*") == 100
        assert engine.forget("m", prompt_ids=IDS[:1], domain="*") == 0
        assert_sound(engine)


@pytest.mark.parametrize("domain", ["", "*", 5, b"a", ["a"]])
def test_a_domain_has_a_name_of_its_own(engine: Engine, domain: Any) -> None:
    acts: list[Callable[[], Any]] = [
        lambda: engine.session("m", domain=domain),
        lambda: engine.generate("m", "x", domain=domain),
        lambda: engine.warm("m", "x", domain=domain),
        lambda: engine.drop_domain(domain),
        lambda: engine.forget("m", "x", domain=domain if domain != "*" else ""),
    ]
    for act in acts:
        with pytest.raises(InvalidRequest, match="expected a name"):
            act()
    with pytest.raises(InvalidRequest, match="expected a session"):
        engine.session("m", prefix=domain)


def test_public_prefixes_stay_when_others_are_forgotten(engine: Engine) -> None:
    for ids in (IDS[:150], IDS[:100], IDS[200:260]):
        engine.share_prefix("m", prompt_ids=ids)
    assert engine.forget("m", prompt_ids=IDS[:120], domain="*") == 50
    assert cost(run(engine, "m", IDS[:150], domain="x"))[0] == 100
    engine.prefixes.reclaim(engine.residency["m"].layout, 1 << 20)
    assert cost(run(engine, "m", IDS[:150], domain="y"))[0] == 100  # leased again
    engine.remove("m")  # its equal keeps them
    assert engine.forget("same", prompt_ids=IDS[:100], domain="*") == 100
    assert cost(run(engine, "same", IDS[200:260], domain="y"))[0] == 59


@pytest.mark.usefixtures("held")
def test_a_prefix_that_cannot_be_opened_leaves_no_lease(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.share_prefix("m", prompt_ids=IDS[:100])
    with monkeypatch.context() as patch:
        patch.setattr("polymodel.prefill.forward", lambda *_: 1 / 0)
        for act in (engine.share_prefix, engine.warm):
            with pytest.raises(ZeroDivisionError):
                act("m", prompt_ids=IDS[:150])
    assert engine.prefixes.stats.leases == 1


@pytest.mark.usefixtures("held")
def test_dropping_a_domain_ends_what_lives_in_it_and_frees_its_pages(engine: Engine) -> None:
    run(engine, "m", IDS[:200], domain="a")
    run(engine, "m", IDS[:100], domain="b")
    session = engine.session("m", domain="a")
    session.append(IDS[:50])
    others = engine.session("m", domain="b")
    others.append(IDS[:20])
    request = submit(engine, "m", IDS[:300], domain="a")
    used = engine.arena.num_pages_used
    assert engine.drop_domain("a") == 211
    assert engine.arena.num_pages_used < used
    assert {key.domain for key in engine.prefixes.keys} == {"b"}
    with pytest.raises(Forgotten, match="the domain 'a' was dropped"):
        engine.wait(request)
    with pytest.raises(Forgotten, match="append: the domain 'a' was dropped"):
        session.append([5])
    session.close()
    assert len(others.generate(3)) == 3
    assert engine.drop_domain("nobody") == 0


@pytest.mark.usefixtures("held")
def test_forgetting_a_prefix_reaches_live_forks_of_all_models_and_spares_the_others(engine: Engine) -> None:
    for model in ("m", "high"):
        run(engine, model, IDS[:100])
    fork = engine.session("high")
    fork.append(IDS[:80])
    twin = fork.clone()
    spared = engine.session("m")
    spared.append([*IDS[:39], 5, *IDS[40:80]])
    request = submit(engine, "same", IDS[:250])
    assert engine.forget("m", prompt_ids=IDS[:40]) == 72 + 111  # m's from where another went on
    for lost in (fork, twin):
        with pytest.raises(Forgotten, match="its first 40 tokens were forgotten"):
            lost.step()
    with pytest.raises(Forgotten):
        engine.wait(request)
    assert len(spared.generate(4)) == 4
    assert cost(run(engine, "m", IDS[:100]))[0] == 39


def area_under_curve(hits: Sequence[float], misses: Sequence[float]) -> float:
    """Probability that a hit costs less than a miss (Fawcett 2006, section 7), a tie counting half."""
    pairs = [(h < m) + (h == m) / 2 for h in hits for m in misses]
    return sum(pairs) / len(pairs)


def probe(engine: Engine, guess: Sequence[int], domain: str) -> int:
    """Pages that an attacker's request makes the engine compute: what its time to first token follows."""
    engine.events.clear()
    run(engine, "m", guess, domain=domain, max_new_tokens=1)
    return sum(-(-event.tokens // 64) for event in engine.events.of("prefill"))


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(("attacker", "least", "most"), [("mallory", 0.45, 0.55), ("alice", 0.95, 1.0)])
def test_the_first_token_does_not_tell_another_domains_prefix(
    engine: Engine, attacker: str, least: float, most: float
) -> None:
    """Half of the guesses were said by alice before; within her own domain they show, so the measure measures."""
    secrets = [IDS[i : i + 140] for i in range(0, 120, 10)]
    for secret in secrets[::2]:
        run(engine, "m", secret, domain="alice", max_new_tokens=1)
    pages = [probe(engine, secret, attacker) for secret in secrets]
    assert least <= area_under_curve(pages[::2], pages[1::2]) <= most


@pytest.mark.slow
@pytest.mark.parametrize(("attacker", "least", "most"), [("mallory", 0.45, 0.55), ("alice", 0.75, 1.0)])
def test_nor_does_the_time_to_it(path: Path, attacker: str, least: float, most: float) -> None:
    """Enough guesses that the area's own deviation is 0.015 (Hanley and McNeil 1982): 800 of each kind, interleaved.

    What else runs on the machine blurs what shows within a domain.
    """
    with new_engine(path, prefix_tokens=1 << 20) as engine:
        times: tuple[list[float], list[float]] = ([], [])
        for i in range(1600):
            guess = [3 + (i * 7919 + j * 104729) % 251 for j in range(140)]
            if i % 2:
                run(engine, "m", guess, domain="alice", max_new_tokens=1)
            else:
                run(engine, "m", guess[::-1], domain="alice", max_new_tokens=1)
            out = run(engine, "m", guess, domain=attacker, max_new_tokens=1)
            times[i % 2].append(out.metrics.time_to_first_token)
        assert least <= area_under_curve(times[1], times[0]) <= most


# ---- all of it at once -----------------------------------------------------------------------------------


Ask = tuple[str, int, int, int, str, str | None]
ASKS = st.lists(
    st.tuples(
        st.sampled_from(["m", "same", "low", "high"]),
        st.sampled_from([0, 0, 0, 100]),
        st.integers(1, 150),
        st.integers(0, 40),
        st.sampled_from(["a", "a", "b"]),
        st.sampled_from([None, None, "low"]),
    ),
    min_size=1,
    max_size=6,
)
tokens_alone: dict[tuple[str, tuple[int, ...]], list[int]] = {}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asks=ASKS, chunk=st.sampled_from([20, 64, 512]), states=st.booleans())
def test_nothing_that_is_shared_changes_a_token(
    path: Path, uncached: Engine, asks: list[Ask], chunk: int, states: bool
) -> None:
    with new_engine(path, prefill_chunk=chunk, quantum=2) as engine:
        requests = []
        for model, start, length, tail, domain, draft in asks:
            prompt = IDS[start : start + length] + IDS[400 : 400 + tail]
            requests.append(submit(engine, model, prompt, domain=domain, draft=draft if draft != model else None))
            engine.lane.turn()
            if not states:
                engine.arena.drop_states()
        engine.run()
        for request in requests:
            key = (request.model, tuple(request.tokens[: request.num_prompt]))
            if key not in tokens_alone:
                tokens_alone[key] = run(uncached, request.model, key[1]).tokens
            assert request.output == tokens_alone[key]
        assert_sound(engine)


def test_work_is_counted_as_it_was_done(engine: Engine) -> None:
    outs = [run(engine, model, IDS[:n]) for model, n in (("m", 200), ("high", 150), ("m", 230), ("low", 64))]
    counted = sum(out.metrics.num_prefill_token_layers for out in outs)
    assert counted == token_layers(engine.events.of("prefill")) == 200 * 3 + 150 * 1 + 30 * 3 + 64 * 2
    assert token_layers(engine.events.of("decode")) == 4 * 11 * LAYERS


@pytest.mark.parametrize(
    ("prefix", "turns", "result"),
    [(512, 3, 16), pytest.param(8192, 10, 64, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("shared", [30, 24])
def test_five_models_prefill_a_long_prefix_once(
    tmp_path: Path, prefix: int, turns: int, result: int, shared: int
) -> None:
    """Five agents of 30 layers each on a model of their own, of which the lower 24 or all are equal.

    The longer one is the workload of 11,072 tokens against 43,840 of five caches, one for each model.
    """
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    path = write_tokenizer(
        write_tiny(tmp_path / "m", "llama", num_hidden_layers=30, max_position_embeddings=16384, **shape)
    )
    own = 5 * (turns - 1) * result  # tokens that only one agent has
    apart = 5 * prefix + own
    assert (prefix, apart, prefix + own) in ((512, 2720, 672), (8192, 43_840, 11_072))
    with Engine(kv_budget="256MiB") as engine:
        for i in range(5):
            engine.add(f"m{i}", perturbed(open_checkpoint(path), shared, i) if i else path)
        first = engine.session("m0")
        first.append([3 + i * 7 % 250 for i in range(prefix)])
        agents = [first, *(engine.session(f"m{i}", prefix=first) for i in range(1, 5))]
        for turn in range(1, turns):
            for i, agent in enumerate(agents):
                agent.append([3 + (turn * 31 + i * 7 + j) % 250 for j in range(result)])
        done = engine.events.of("prefill")
        assert token_layers(done) == prefix * 30 + 4 * prefix * (30 - shared) + own * 30
        if shared == 30:
            assert sum(event.tokens for event in done) == prefix + own
        assert [agent.num_resumed for agent in agents] == [0, *[prefix if shared < 30 else 0] * 4]
        assert_sound(engine)


@pytest.mark.usefixtures("held")
def test_sessions_left_to_the_collector_give_their_pages_back(engine: Engine) -> None:
    session = engine.session("m")
    session.append(IDS[:100])
    session.swap_out()
    other = engine.session("m")
    other.append(IDS[200:300])
    assert engine.ledger.total("host_kv") > 0
    del session, other
    engine.lane.turn()
    assert engine.ledger.total("host_kv") == 0
    assert engine.arena.num_pages_used == engine.prefixes.num_pages + len(set(engine.arena.attached))


def test_two_names_of_one_open_checkpoint(path: Path) -> None:
    """The file stays open for the one that is left."""
    with Engine(kv_budget="24MiB") as engine:
        checkpoint = open_checkpoint(path)
        engine.add("a", checkpoint)
        engine.add("b", checkpoint)
        expected = run(engine, "a", IDS[:20]).tokens
        engine.remove("a")
        engine.unload("b")
        assert run(engine, "b", IDS[:20]).tokens == expected


@pytest.mark.usefixtures("held")
def test_a_request_cancelled_in_the_midst_of_a_forward_ends_after_it(
    engine: Engine, uncached: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the collector does with a stream that nobody reads any more."""
    requests = [submit(engine, "m", IDS[:20]), submit(engine, "m", IDS[40:60])]
    from polymodel import model

    attention = model._attention

    def cancel(*args: Any) -> Any:
        engine.lane.cancel(requests[0])
        return attention(*args)

    with monkeypatch.context() as patch:
        patch.setattr(model, "_attention", cancel)
        engine.lane.turn()
    assert requests[0].finish_reason == "cancelled"
    engine.run()
    assert requests[1].output == run(uncached, "m", IDS[40:60]).tokens


def test_requests_from_many_threads(engine: Engine, uncached: Engine) -> None:
    outs: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        outs[i] = run(engine, ("m", "high")[i % 2], IDS[: 100 + 10 * (i % 3)]).tokens

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, tokens in outs.items():
        assert tokens == run(uncached, ("m", "high")[i % 2], IDS[: 100 + 10 * (i % 3)]).tokens
    assert len(outs) == 6


def test_the_configuration_is_checked() -> None:
    for field, value in (
        ("prefix_min_match", 0),
        ("prefix_flight", 0),
        ("prefix_budget", -1),
        ("prefix_tokens", -1),
        ("prefix_eviction", "fifo"),
    ):
        with pytest.raises(InvalidRequest, match=f"EngineConfig.{field}"):
            replace(EngineConfig(), **{field: value})
