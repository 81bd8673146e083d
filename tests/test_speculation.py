"""Speculation is lossless: whoever drafts, in whatever company, tokens, logits and pages are plain decoding's."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import write_tiny, write_tokenizer
from torch import Tensor

from polymodel import Engine, EngineConfig, errors, lane
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.config import Draft
from polymodel.model import Model
from polymodel.output import Metrics, Output
from polymodel.sequence import Sequence as Request

VOCAB = 300
NUM_NEW = 28
CROWD_NEW = 9  # of the others of a batch
PROMPTS = [torch.randint(3, 259, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (41, 61, 33, 70)]
# grouped queries; qk_norm; a sliding window of 8, which every prompt exceeds
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (2, {"num_hidden_layers": 2}),
    "qwen3": (2, {"num_hidden_layers": 2}),
    "gemma3": (
        2,
        {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,  # a tied head repeats itself
        },
    ),
}
STRANGERS = {"llama": "qwen3", "qwen3": "gemma3", "gemma3": "llama"}  # a drafter of another geometry
CONFIG = EngineConfig(kv_borrows=False, host_budget=4 << 20, quantum=1)
PLAIN: dict[str, Any] = {"max_new_tokens": NUM_NEW, "stop_at_eos": False, "draft": None}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 0.8, "seed": 1},
    "nucleus": {"temperature": 0.8, "seed": 2, "top_k": 40, "top_p": 0.95},
    "penalised": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3},
    "greedy, penalised": {"repetition_penalty": 1.3},
}
MODEL_DRAFTERS = ("twin q4", "twin q8", "near", "stranger")
SCRIPTED = ("perfect", "adversary", "partial", "cyclic", "empty", "strange ids", "branches")
DRAFTERS = (*MODEL_DRAFTERS, *SCRIPTED, "ngram", "pair", "trio")
HISTORIES = ("fresh", "prefix hit", "swap", "recompute", "reload")
HOOKS = ("none", "rows", "grammar")
AXES: dict[str, Sequence[Any]] = {
    "drafter": DRAFTERS,
    "tokens": (1, 2, 4, 8, 16),
    "width": (1, 2, 3, 4),
    "sampling": tuple(SAMPLINGS),
    "history": HISTORIES,
    "hook": HOOKS,
    "model": tuple(KINDS),
    "company": ("alone", "eight"),
}
PAIRED = ("twin q4", "near", "branches", "pair", "trio")  # by default these in any two circumstances, the others once
FEWER = AXES | {"drafter": PAIRED, "tokens": (1, 3, 6), "width": (1, 3)}
OTHERS = AXES | {"drafter": [drafter for drafter in DRAFTERS if drafter not in PAIRED]}


@dataclass(frozen=True)
class Case:
    drafter: str
    tokens: int
    width: int
    sampling: str
    history: str
    hook: str
    model: str
    company: str
    prompt: int = 0

    def __str__(self) -> str:
        values = (self.drafter, self.tokens, self.width, self.sampling, self.history, self.hook, self.model)
        return "-".join(str(value).replace(" ", "_").replace(",", "") for value in (*values, self.company))


def covering(axes: dict[str, Sequence[Any]], strength: int) -> list[Case]:
    """Few cases in which any values of so many axes meet."""
    left = dict.fromkeys(
        frozenset(zip(names, values, strict=True))
        for names in itertools.combinations(axes, strength)
        for values in itertools.product(*(axes[name] for name in names))
    )
    cases = []
    while left:
        chosen: dict[str, Any] = dict(next(iter(left)))
        for name in axes:
            if name not in chosen:
                known = list(itertools.combinations(chosen.items(), strength - 1))
                turn = len(cases) % len(axes[name]) if name != "company" else 0  # so that ties fall to each in turn
                gains = {
                    value: sum(frozenset({(name, value), *some}) in left for some in known)
                    for value in [*axes[name][turn:], *axes[name][:turn]]
                }
                chosen[name] = max(gains, key=lambda value: gains[value])
        for some in itertools.combinations(chosen.items(), strength):
            left.pop(frozenset(some), None)
        cases.append(Case(**chosen))
    return cases


class Watch:
    """A logits_processor that keeps what it is called with; `is_grammar`: it allows a quarter of the tokens."""

    def __init__(self, is_grammar: bool) -> None:
        self.is_grammar = is_grammar
        self.calls: list[list[int]] = []
        self.rows: list[Tensor] = []

    def __call__(self, tokens: list[int], logits: Tensor) -> Tensor:
        self.calls.append(list(tokens))
        self.rows.append(logits.clone())
        if self.is_grammar:
            ids = torch.arange(len(logits))
            logits = logits.masked_fill((ids + len(tokens)) % 4 != 0, -torch.inf)
        return logits


def watch(hook: str) -> Watch | None:
    return None if hook == "none" else Watch(hook == "grammar")


@dataclass(frozen=True)
class Run:
    """What a request gave."""

    tokens: list[int]  # prompt and output
    calls: list[list[int]]
    rows: list[Tensor]
    pages: Tensor
    metrics: Metrics


class Script:
    """A user's drafter that knows what plain decoding gives, and is told how much of it to get right."""

    def __init__(self, full: list[int], good: Callable[[int, int], int]) -> None:
        self.full = full
        self.good = good  # round, count -> tokens that are right
        self.counts: list[int] = []

    def right(self, tokens: list[int], count: int) -> list[int]:
        assert list(tokens) == self.full[: len(tokens)]
        self.counts.append(count)
        return self.full[len(tokens) :][:count]

    def propose(self, tokens: list[int], count: int) -> Any:
        good = self.good(len(self.counts), count)
        return [token if i < good else (token + 1) % VOCAB for i, token in enumerate(self.right(tokens, count))]


class Empty(Script):
    """Nothing at all."""

    def propose(self, tokens: list[int], count: int) -> Any:
        return self.right(tokens, count)[:0]


class Strange(Script):
    """Ids that are no tokens, after a right one or at once."""

    def propose(self, tokens: list[int], count: int) -> Any:
        right = self.right(tokens, count)
        strange = (VOCAB, -1, 10**30, -(2**63), 2**31)[len(self.counts) % 5]
        return [strange, *right] if len(self.counts) % 3 == 0 else [*right[:1], strange, *right[2:]]


class Branches(Script):
    """Trees of wrong tokens with a part of the right path in them, at random places."""

    def __init__(self, full: list[int], seed: int = 0, width: int = 3) -> None:
        super().__init__(full, lambda *_: 0)
        self.rng = random.Random(seed)
        self.width = width
        self.longest: list[int] = []  # the right path in each round's tree

    def propose(self, tokens: list[int], count: int) -> Any:
        rng, right = self.rng, self.right(tokens, count)
        good = rng.randint(0, len(right))
        ids: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        last, path = -1, 0
        while path < good or rng.random() < 0.7:
            if path < good and rng.random() < 0.4:
                ids.append(right[path])
                parents.append(last)
                last, path = len(ids) - 1, path + 1
            else:
                parents.append(rng.randint(max(-1, len(ids) - self.width - 1), len(ids) - 1))
                depth = 1 + (depths[parents[-1]] if parents[-1] >= 0 else 0)
                ids.append((right[min(depth, len(right)) - 1] + rng.randint(1, VOCAB - 1)) % VOCAB)
            depths.append(1 + (depths[parents[-1]] if parents[-1] >= 0 else 0))
        self.longest.append(good)
        return ids, parents


def drafter_of(case: Case, full: list[int]) -> tuple[str, Draft]:
    """The target's name, and who drafts for it."""
    scripts: dict[str, Callable[[], Script]] = {
        "perfect": lambda: Script(full, lambda _, count: count),
        "adversary": lambda: Script(full, lambda *_: 0),
        "partial": lambda: Script(full, lambda *_: 1),
        "cyclic": lambda: Script(full, lambda number, count: number % (count + 1)),
        "empty": lambda: Empty(full, lambda *_: 0),
        "strange ids": lambda: Strange(full, lambda *_: 0),
        "branches": lambda: Branches(full, case.tokens, case.width),
    }
    start = len(full) - NUM_NEW
    quoted = tuple((token + (i % 5 == 4)) % VOCAB for i, token in enumerate(full[start - 4 :]))
    by: Any = {
        "twin q4": "twin",
        "twin q8": "twin",
        "ngram": "ngram",
        "pair": ("twin", "ngram"),
        "trio": ("near", "ngram", scripts["partial"]()),
    }.get(case.drafter, case.drafter)
    if case.drafter in scripts:
        by = scripts[case.drafter]()
    target = "m8" if case.drafter == "twin q8" else "m"
    width = case.width if case.drafter in MODEL_DRAFTERS else 1
    reading: dict[str, Any] = {"min_n": 1, "references": (quoted,)} if case.drafter in ("ngram", "pair", "trio") else {}
    return target, Draft(by, tokens=case.tokens, width=width, **reading)


# ---- engines, and what plain decoding gives ------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the module's fixtures, as for its tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Paths = dict[str, Path]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    root = tmp_path_factory.mktemp("speculation")
    paths = {
        kind: write_tokenizer(write_tiny(root / kind, kind, seed, **fields)) for kind, (seed, fields) in KINDS.items()
    }
    fields = KINDS["llama"][1] | {"max_position_embeddings": 64}
    paths["short"] = write_tokenizer(write_tiny(root / "short", "llama", KINDS["llama"][0], **fields))
    return paths


def make_engine(paths: Paths, kind: str = "llama", config: EngineConfig = CONFIG, budget: str = "24MiB") -> Engine:
    """m and m8, the same model with its two twins; near, one of nearby weights; and a stranger."""
    engine = Engine(kv_budget=budget, config=config)
    engine.add("m", paths[kind], twin="q4")
    engine.add("m8", paths[kind], twin="q8")
    engine.add("near", perturbed(open_checkpoint(paths[kind]), 0, 1))
    engine.add("stranger", paths[STRANGERS[kind]])
    return engine


Engines = Callable[[str, str], Engine]  # kind of model, preemption


@pytest.fixture(scope="module")
def engines(paths: Paths) -> Iterator[Engines]:
    made: dict[tuple[str, str], Engine] = {}

    def engine(kind: str, preemption: Any) -> Engine:
        if (kind, preemption) not in made:
            made[kind, preemption] = make_engine(paths, kind, replace(CONFIG, preemption=preemption))
        return made[kind, preemption]

    yield engine
    for one in made.values():
        one.close()


Plains = Callable[..., Run]


@pytest.fixture(scope="module")
def plain(paths: Paths) -> Iterator[Plains]:
    """What a request gives that is alone, without drafts, prefixes or preemption; 20 distinct tokens at least."""
    known: dict[tuple[str, int, str, str, int], Run] = {}
    engines: dict[str, Engine] = {}

    def run(kind: str, prompt: int, sampling: str = "greedy", hook: str = "rows", num_new: int = NUM_NEW) -> Run:
        if hook == "none":  # "rows" only looks on
            return replace(run(kind, prompt, sampling, "rows", num_new), calls=[], rows=[])
        key = kind, prompt, sampling, hook, num_new
        if key not in known:
            if kind not in engines:
                engines[kind] = Engine(kv_budget="16MiB", config=replace(CONFIG, prefix_cache=False))
                engines[kind].add("m", paths[kind])
            with engines[kind].lane.exclusive():
                request = Running(engines[kind], "m", prompt, hook, **SAMPLINGS[sampling], max_new_tokens=num_new)
                engines[kind].run()
                known[key] = request.result()
            full = known[key].tokens
            lengths = range(len(full) - num_new, len(full))
            assert known[key].calls == [full[:n] for n in lengths]
            assert len(set(known[key].tokens[-num_new:])) >= 20 or num_new < NUM_NEW
        return known[key]

    yield run
    for engine in engines.values():
        engine.close()


class Running:
    """A request on its way, in a lane that is held."""

    def __init__(self, engine: Engine, model: str, prompt: int, hook: str = "none", **options: Any) -> None:
        self.engine = engine
        self.watch = watch(hook)
        options = PLAIN | options
        self.request: Request = engine.submit(model, prompt_ids=PROMPTS[prompt], logits_processor=self.watch, **options)
        self.pages: list[Tensor] = []
        retire = self.request.on_done
        assert retire is not None

        def on_done(request: Request) -> None:
            pages = request.pages.clone()
            pages.rollback(max(len(pages) - len(request.tokens) + 1, 0))  # drafts beyond a stop token
            self.pages.append(pages.dump())
            pages.free()
            retire(request)

        self.request.on_done = on_done

    def result(self) -> Run:
        seen = self.watch or Watch(False)
        metrics = self.engine.output(self.request).metrics
        return Run(self.request.tokens, seen.calls, seen.rows, self.pages[0], metrics)


def assert_same(run: Run, expected: Run) -> None:
    """Tokens, pages, and of a processor each call and each row of logits."""
    assert run.tokens == expected.tokens
    assert torch.equal(run.pages, expected.pages)
    assert run.calls == expected.calls
    assert all(map(torch.equal, run.rows, expected.rows))
    m, num_new = run.metrics, run.metrics.num_output_tokens
    assert sum(m.acceptance_histogram) == m.num_draft_rounds <= m.num_target_forwards <= num_new - 1
    assert sum(i * n for i, n in enumerate(m.acceptance_histogram)) == m.num_accepted <= m.num_drafted
    assert m.num_accepted + m.num_target_forwards == num_new - 1


def draft_bytes(engine: Engine) -> int:
    engine.lane.account()
    return engine.ledger.total("draft_kv")


def turn(engine: Engine) -> bool:
    """A turn of the lane leaves nothing provisional."""
    worked = engine.lane.turn()
    assert engine.lane.num_open_spans == 0
    return worked


def assert_clean(engine: Engine, domain: str = "default") -> None:
    """Nothing is held that should not be; what is cached for the domain goes first."""
    engine.drop_domain(domain)
    with engine.lane.exclusive():
        assert draft_bytes(engine) == 0 and not engine.ledger.of("host_kv")
        engine.arena.check()
        engine.residency.check()
        assert not engine.lane.live and engine.arena.num_pages_used == 0
        assert not bool(engine.arena.bytes[: engine.arena.nbytes].any())


@contextmanager
def no_pages(engine: Engine, name: str = "m") -> Iterator[Callable[[], None]]:
    """For the block, no page of this model's geometry is free; nor once more when called."""
    arena, layout = engine.arena, engine.residency[name].layout
    taken: list[int] = []

    def take() -> None:
        with arena.spare_only():
            taken.extend(arena.allocate(layout, arena.num_free(layout)))

    take()
    try:
        yield take
    finally:
        arena.release(layout, taken)


def preempt(engine: Engine, request: Request) -> None:
    """Sessions ask for pages until the last in line has given up its own."""
    sessions = []
    with no_pages(engine) as take:
        while not request.num_preempted:
            assert not request.is_over
            sessions.append(engine.session("m", domain="other"))
            sessions[-1].append([3 + len(sessions), *range(3, 63)])
            take()
    for session in sessions:
        session.close()
    engine.drop_domain("other")


def run_case(case: Case, engines: Engines, plain: Plains) -> Run:
    """Beside others that draft and do not, and after what the case's history says; all are held to plain decoding."""
    engine = engines(case.model, "recompute" if case.history == "recompute" else "swap")
    expected = plain(case.model, case.prompt, case.sampling, case.hook)
    target, by = drafter_of(case, expected.tokens)
    options = SAMPLINGS[case.sampling] | {"domain": "case"}
    others: list[tuple[Running, Run]] = []
    with engine.lane.exclusive():
        if case.history == "prefix hit":
            ids = PROMPTS[case.prompt][:30] + PROMPTS[1][:10]
            engine.generate(target, prompt_ids=ids, **PLAIN | {"domain": "case", "max_new_tokens": 2})
        if case.company == "eight":
            crowd: list[tuple[str | Draft | None, str]] = [
                (None, "greedy"),
                (Draft("near", tokens=3, width=2), "greedy"),
                ("ngram", "penalised"),
                (Draft(("near", "stranger"), tokens=2), "warm"),
                (None, "warm"),
                (Draft("twin", tokens=5), "nucleus"),
                ("auto", "greedy"),
            ]
            for i, (other, sampling) in enumerate(crowd):
                prompt, hook = 1 + i % 3, HOOKS[i % 3]
                options_of = SAMPLINGS[sampling] | {"domain": "case", "draft": other, "max_new_tokens": CROWD_NEW}
                running = Running(engine, target, prompt, hook, **options_of)
                others.append((running, plain(case.model, prompt, sampling, hook, CROWD_NEW)))
        running = Running(engine, target, case.prompt, case.hook, **options, draft=by)
        request = running.request
        while len(request.output) < 2:
            turn(engine)
        assert not request.is_over
        if case.company == "alone" and case.history == "fresh":
            has_pages = case.drafter in ("near", "stranger", "trio")
            assert (draft_bytes(engine) > 0) == has_pages
        if case.history in ("swap", "recompute"):
            preempt(engine, request)
            assert bool(request.swapped) == (case.history == "swap")
        elif case.history == "reload":
            engine.unload(target)
            assert engine.residency[target].model is None
        if case.company == "eight":
            greedy = plain(case.model, 2).tokens[len(PROMPTS[2]) :]
            with engine.session(target, domain="other") as session, engine.batch(target, 2, domain="other") as batch:
                session.append(PROMPTS[2])
                assert session.generate(4) == greedy[:4]
                assert batch.generate([PROMPTS[2]] * 2, 3, stop_at_eos=False) == [greedy[:3]] * 2
        while turn(engine):
            pass
        result = running.result()
        assert_same(result, expected)
        for other_running, other_expected in others:
            assert_same(other_running.result(), other_expected)
        m = result.metrics
        assert m.num_accepted + m.num_target_forwards == NUM_NEW - 1
        assert m.num_preemptions == (case.history in ("swap", "recompute"))
        assert m.num_cached_tokens >= 30 or case.history != "prefix hit"
    engine.drop_domain("other")
    assert_clean(engine, "case")
    return result


def assert_not_vacuous(case: Case, m: Metrics) -> None:
    """Drafts were accepted and rejected, where the drafter is such."""
    rejected = m.num_drafted - m.num_accepted
    is_scripted = case.drafter in (*SCRIPTED, "ngram", "trio")
    if case.drafter == "empty":
        assert m.num_drafted == 0
    elif case.drafter == "adversary":
        assert m.num_accepted == 0 and rejected >= NUM_NEW - 3
    elif case.drafter == "perfect":
        assert rejected == 0 and m.num_accepted > 0
    elif is_scripted or (case.hook != "grammar" and case.drafter != "stranger"):
        assert m.num_accepted > 0
    if case.drafter in ("cyclic", "branches") or (case.drafter in ("partial", "ngram", "trio") and case.tokens > 1):
        assert rejected > 0
    if case.drafter in MODEL_DRAFTERS and (case.width > 1 or case.hook == "grammar" or case.drafter == "stranger"):
        assert rejected > 0


# ---- the matrix ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*covering(FEWER, 2), *covering(OTHERS, 1)], ids=str)
def test_drafting_changes_nothing(case: Case, engines: Engines, plain: Plains) -> None:
    assert_not_vacuous(case, run_case(case, engines, plain).metrics)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_drafting_changes_nothing_in_any_three_circumstances(kind: str, engines: Engines, plain: Plains) -> None:
    for case in covering(AXES, 3):
        if case.model == kind:
            assert_not_vacuous(case, run_case(case, engines, plain).metrics)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_of_drafts_changes_nothing(kind: str, sampling: str, engines: Engines, plain: Plains) -> None:
    """Chains of 1..16 and trees of each width and depth, by each drafter."""
    for drafter, tokens, width in itertools.product(DRAFTERS, (*range(1, 9), 16), range(1, 5)):
        if width == 1 or drafter in MODEL_DRAFTERS or drafter == "branches":
            case = Case(drafter, tokens, width, sampling, "fresh", "rows", kind, "alone")
            assert_not_vacuous(case, run_case(case, engines, plain).metrics)


# ---- rounds, exactly -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uncached(paths: Paths) -> Iterator[Engine]:
    with make_engine(paths, config=replace(CONFIG, prefix_cache=False)) as engine:
        yield engine


@pytest.fixture
def engine(uncached: Engine) -> Iterator[Engine]:
    """Everybody who could draft; no events yet."""
    uncached.events.clear()
    yield uncached
    assert_clean(uncached)


class Decoys(Script):
    """At each level of the tree a wrong token first, and the right one after it."""

    def propose(self, tokens: list[int], count: int) -> Any:
        right = self.right(tokens, count)
        ids = [one for token in right for one in ((token + 1) % VOCAB, token)]
        return ids, [parent for level in range(len(right)) for parent in [2 * level - 1] * 2]


@pytest.mark.parametrize(
    ("kind", "good", "num_new", "forwards", "drafted", "histogram"),
    [
        (Script, 4, 26, 5, 20, (0, 0, 0, 0, 5)),
        (Script, 4, 25, 5, 19, (0, 0, 0, 1, 4)),  # the last round needs no fourth
        (Script, 2, 25, 8, 7 * 4 + 2, (0, 0, 8)),
        (Script, 0, 25, 24, 20 * 4 + 3 + 2 + 1, (23,)),
        (Empty, 0, 25, 24, 0, ()),
        (Decoys, 4, 26, 5, 40, (0, 0, 0, 0, 5)),
    ],
    ids=["perfect", "perfect, cut short", "two right", "wrong", "none", "decoys first"],
)
def test_rounds_are_as_many_as_the_drafter_is_right(
    engine: Engine, plain: Plains, kind: Any, good: int, num_new: int, forwards: int, drafted: int, histogram: Any
) -> None:
    """Drafts of four; the mean is of tokens after the first, which is the prefill's."""
    full = plain("llama", 0).tokens
    by = kind(full, lambda *_: good)
    out = engine.generate(
        "m", prompt_ids=PROMPTS[0], **PLAIN | {"max_new_tokens": num_new, "draft": Draft(by, tokens=4)}
    )
    assert out.tokens == full[len(PROMPTS[0]) :][:num_new]
    m = out.metrics
    assert (m.num_target_forwards, m.num_drafted, m.acceptance_histogram) == (forwards, drafted, histogram)
    assert m.num_accepted == sum(i * n for i, n in enumerate(histogram)) == num_new - 1 - forwards
    assert m.mean_acceptance_length == (num_new - 1) / forwards
    verified = [event.tokens for kind in ("verify", "decode") for event in engine.events.of(kind)]
    assert len(verified) == forwards and sum(verified) == forwards + drafted


@pytest.mark.parametrize(
    ("drafter", "width"), [("twin q4", 1), ("near", 3), ("adversary", 1), ("trio", 1), ("branches", 1)]
)
def test_a_round_is_one_forward_of_the_target(
    engine: Engine, plain: Plains, monkeypatch: pytest.MonkeyPatch, drafter: str, width: int
) -> None:
    """With an adversary as many as plain decoding, and never more."""
    case = Case(drafter, 4, width, "greedy", "fresh", "none", "llama", "alone")
    name, by = drafter_of(case, plain("llama", 0).tokens)
    calls: Counter[int] = Counter()
    forward = lane.forward

    def counted(model: Model, *args: Any) -> Tensor:
        calls[id(model)] += 1
        return forward(model, *args)

    monkeypatch.setattr(lane, "forward", counted)
    m = engine.generate(name, prompt_ids=PROMPTS[0], **PLAIN | {"draft": by}).metrics
    assert calls == {id(engine.residency[name].model): m.num_target_forwards}
    assert m.num_accepted + m.num_target_forwards == NUM_NEW - 1
    if drafter == "adversary":
        assert m.num_target_forwards == NUM_NEW - 1
    else:
        assert m.num_target_forwards < NUM_NEW - 5


@pytest.mark.parametrize("drafter", ["near", "stranger", "twin q4"])
def test_a_drafter_reads_each_token_once(engine: Engine, plain: Plains, drafter: str) -> None:
    """Those that stood, whether drafted or not; beside these it computes its own rejected drafts. A twin reads none."""
    case = Case(drafter, 4, 1, "greedy", "fresh", "none", "llama", "alone")
    name, by = drafter_of(case, plain("llama", 0).tokens)
    with engine.lane.exclusive():
        running = Running(engine, name, 0, draft=by)
        lengths = [len(PROMPTS[0]) + 1]
        while turn(engine):
            lengths.append(len(running.request.tokens))
    assert_same(running.result(), plain("llama", 0, "greedy", "none"))
    rounds = [event.tokens - 1 for event in engine.events.of("verify")]  # tokens drafted in each
    read = sum(event.tokens for event in engine.events.of("draft"))
    assert len(rounds) > 6
    if drafter == "twin q4":
        assert read == sum(rounds)
        return
    starts = lengths[: len(rounds)]
    fed = [count - 1 for count in rounds]
    stood = [min(after - before - 1, n) for before, after, n in zip(starts, lengths[1:], fed, strict=False)]
    assert read == starts[-1] + stood[-1] + sum(fed) - sum(stood)
    assert sum(stood) > 0 or drafter == "stranger"
    record = running.request.drafts.records[drafter]
    assert record.num_catch_up == len(PROMPTS[0]) + 1


def test_trees_of_a_model_read_nothing_twice(engine: Engine, plain: Plains) -> None:
    out = engine.generate("m", prompt_ids=PROMPTS[0], **PLAIN | {"draft": Draft("near", tokens=4, width=3)})
    assert out.tokens == plain("llama", 0).tokens[len(PROMPTS[0]) :]
    assert out.metrics.drafters["near"].num_catch_up == len(PROMPTS[0]) + 1
    rounds = len(engine.events.of("verify"))
    firsts = [event.tokens for event in engine.events.of("draft")]
    assert firsts[0] == len(PROMPTS[0]) + 1 and sum(firsts[1:]) <= rounds * (2 + 3 * 4) and rounds > 5


def test_a_drafter_that_is_behind_catches_up_by_chunks(paths: Paths, plain: Plains) -> None:
    """Of 16: the prompt's 70 and a token more in each of four rounds, then the other 11 with the first draft."""
    config = replace(CONFIG, prefix_cache=False, prefill_chunk=16)
    with make_engine(paths, config=config) as engine, engine.lane.exclusive():
        running = Running(engine, "m", 3, draft=Draft("near", tokens=4))
        request = running.request
        while not request.num_drafted:
            turn(engine)
        assert [event.tokens for event in engine.events.of("draft")] == [16, 16, 16, 16, 11, 1, 1, 1]
        assert request.drafts is not None and request.drafts.records["near"].num_catch_up == 75
        while turn(engine):
            pass
        assert_same(running.result(), plain("llama", 3, "greedy", "none"))
        assert request.drafts.records["near"].num_catch_up == 75
        assert_clean(engine)


# ---- where a request ends ------------------------------------------------------------------------------


ENDERS: dict[str, Callable[[list[int]], Draft]] = {
    "perfect": lambda full: Draft(Script(full, lambda _, count: count), tokens=12),
    "branches": lambda full: Draft(Branches(full, 5), tokens=6),
    "twin": lambda _: Draft("twin", tokens=4),
    "tree": lambda _: Draft("twin", tokens=4, width=3),
}


Stopped = list[tuple[dict[str, Any], Output]]


@pytest.fixture
def stopped(engine: Engine, plain: Plains) -> Stopped:
    """Stop ids and stop strings, and what plain decoding gives with them."""
    new = plain("llama", 0).tokens[len(PROMPTS[0]) :]
    text = engine["m"].tokenizer.decode(new)
    distinct = [i for i, token in enumerate(new) if new.index(token) == i]
    stops: list[dict[str, Any]] = [{"stop_ids": [new[distinct[1]]]}, {"stop_ids": [new[distinct[9]]]}]
    stops += [{"stop": (text[5:7],)}, {"stop": ("no such text", text[12:15])}]
    given = [(stop, engine.generate("m", prompt_ids=PROMPTS[0], **PLAIN | stop)) for stop in stops]
    for _, out in given:
        assert len(out.tokens) < NUM_NEW and out.tokens == new[: len(out.tokens)] and out.finish_reason == "stop"
    return given


@pytest.mark.parametrize("ender", ENDERS)
def test_a_stop_in_an_accepted_run_ends_the_request_as_plain_decoding_does(
    engine: Engine, plain: Plains, stopped: Stopped, ender: str
) -> None:
    for stop, expected in stopped:
        options = PLAIN | stop | {"draft": ENDERS[ender](plain("llama", 0).tokens)}
        out = engine.generate("m", prompt_ids=PROMPTS[0], **options)
        assert (out.tokens, out.text, out.finish_reason) == (expected.tokens, expected.text, "stop")
    if ender in ("perfect", "tree"):
        options["draft"] = ENDERS[ender](plain("llama", 0).tokens)
        assert "".join(engine.stream("m", prompt_ids=PROMPTS[0], **options)) == expected.text


class Through(Watch):
    """A processor that is through with its text: it raises when it is asked for more than so many tokens."""

    def __init__(self, length: int) -> None:
        super().__init__(False)
        self.length = length

    def __call__(self, tokens: list[int], logits: Tensor) -> Tensor:
        if len(tokens) >= self.length:
            raise ValueError(f"asked after {len(tokens)} tokens")
        return super().__call__(tokens, logits)


@pytest.mark.parametrize("ender", ["perfect", "branches", "twin"])
def test_a_processor_is_not_asked_beyond_the_end(engine: Engine, plain: Plains, stopped: Stopped, ender: str) -> None:
    full, num_accepted = plain("llama", 0).tokens, 0
    for stop, expected in stopped:
        processor = Through(len(PROMPTS[0]) + len(expected.tokens))
        options = PLAIN | stop | {"draft": ENDERS[ender](full), "logits_processor": processor}
        out = engine.generate("m", prompt_ids=PROMPTS[0], **options)
        assert (out.tokens, out.text, out.finish_reason) == (expected.tokens, expected.text, "stop")
        assert processor.calls == plain("llama", 0).calls[: len(out.tokens)]
        num_accepted += out.metrics.num_accepted
    assert num_accepted > 8


def test_a_budget_is_hit_in_the_middle_of_a_run(engine: Engine, plain: Plains) -> None:
    full = plain("llama", 0).tokens
    for num_new in (1, 2, 3, 5, 6, 7, 11):
        by = Script(full, lambda _, count: count)
        options = PLAIN | {"max_new_tokens": num_new}
        expected = engine.generate("m", prompt_ids=PROMPTS[0], **options)
        out = engine.generate("m", prompt_ids=PROMPTS[0], **options | {"draft": Draft(by, tokens=4)})
        assert (out.tokens, out.text, out.finish_reason) == (expected.tokens, expected.text, "length")
        lefts = range(num_new - 1, 0, -5)  # before each round
        assert by.counts == [min(left - 1, 4) for left in lefts if left > 1]
        assert out.metrics.num_drafted == out.metrics.num_accepted == sum(by.counts)


# ---- the user's own drafters ---------------------------------------------------------------------------


class Says:
    """A drafter that always says the same, or raises it."""

    def __init__(self, says: Any) -> None:
        self.says = says

    def propose(self, tokens: list[int], count: int) -> Any:
        if isinstance(self.says, BaseException):
            raise self.says
        return self.says


def test_drafters_that_fail_fail_their_own_requests(engine: Engine, plain: Plains) -> None:
    wrong: list[tuple[Any, type[BaseException]]] = [
        (ValueError("mine"), ValueError),
        (SystemExit("mine"), SystemExit),
        (([5, 6], [-1, 1]), errors.InvalidRequest),
        (([5, 6], [-1, 2]), errors.InvalidRequest),
        (([5, 6], [-2, 0]), errors.InvalidRequest),
        (([5, 6], [-1]), errors.InvalidRequest),
        (([5, 6], 3), errors.InvalidRequest),
        (None, errors.InvalidRequest),
        (7, errors.InvalidRequest),
    ]
    with engine.lane.exclusive():
        failing = [Running(engine, "m", 0, draft=Draft(Says(says), tokens=4)).request for says, _ in wrong]
        other = Running(engine, "m", 1, draft=Draft("ngram", tokens=4, min_n=1))
        while turn(engine):
            pass
    assert [type(request.error) for request in failing] == [error for _, error in wrong]
    assert {request.finish_reason for request in failing} == {"error"}
    assert_same(other.result(), plain("llama", 1, "greedy", "none"))


def test_more_than_was_asked_for_is_cut(engine: Engine, plain: Plains) -> None:
    """In depth, and in nodes; what is left of a tree still has its right path."""
    full = plain("llama", 0).tokens

    class Greedy(Script):
        def propose(self, tokens: list[int], count: int) -> Any:
            return self.right(tokens, count + 7)

    class Bushy(Script):
        def propose(self, tokens: list[int], count: int) -> Any:
            right = self.right(tokens, count + 7)
            return [*right, *right], [*range(-1, len(right) - 1), *[-1] * len(right)]

    for kind, drafts, drafted, accepted in (
        (Greedy, {"tokens": 3}, 3, 3),
        (Bushy, {"tokens": 3}, 3 + 10, 3),  # a chain of three of its ten, and ten roots
        (Bushy, {"tokens": 3, "nodes": 5}, 5, 3),
        (Bushy, {"tokens": 3, "nodes": 2}, 2, 2),
    ):
        by = Draft(kind(full, lambda *_: 0), **drafts)
        with engine.lane.exclusive():
            running = Running(engine, "m", 0, "rows", draft=by)
            turn(engine)
            assert (running.request.num_drafted, running.request.num_accepted) == (drafted, accepted)
            while turn(engine):
                pass
            assert_same(running.result(), plain("llama", 0))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), tokens=st.integers(1, 10), width=st.integers(0, 8), sampled=st.booleans())
def test_of_any_tree_the_longest_right_path_stands(
    engines: Engines, plain: Plains, seed: int, tokens: int, width: int, sampled: bool
) -> None:
    engine = engines("llama", "swap")
    expected = plain("llama", 0, "warm" if sampled else "greedy")
    by = Branches(expected.tokens, seed, width)
    with engine.lane.exclusive():
        options = SAMPLINGS["warm" if sampled else "greedy"] | {"draft": Draft(by, tokens=tokens), "domain": "case"}
        running = Running(engine, "m", 0, "rows", **options)
        while turn(engine):
            pass
        result = running.result()
        assert_same(result, expected)
        assert result.metrics.num_accepted == sum(by.longest)
        counts = Counter(i for i, n in enumerate(result.metrics.acceptance_histogram) for _ in range(n))
        assert counts[0] <= by.longest.count(0) and all(counts[i] == by.longest.count(i) for i in range(1, 11))
    assert_clean(engine, "case")


# ---- memory, and drafters that go ----------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["near", "twin q4", "branches"])
def test_a_tree_without_room_is_a_plain_step(engine: Engine, plain: Plains, drafter: str) -> None:
    """Where not even scratch pages are left, and drafts again once they are."""
    case = Case(drafter, 3, 3, "greedy", "fresh", "none", "llama", "alone", 2)
    expected = plain("llama", 2, "greedy", "none")
    _, by = drafter_of(case, expected.tokens)
    by = replace(by, tokens=2)
    with engine.lane.exclusive():
        running = Running(engine, "m", 2, draft=by)
        request = running.request
        turn(engine)
        drafted, length = request.num_drafted, len(request.tokens)
        assert drafted > 0
        assert (draft_bytes(engine) > 0) == (drafter == "near")
        with no_pages(engine):
            for i in range(1, 4):
                turn(engine)
                assert (request.num_drafted, len(request.tokens)) == (drafted, length + i)
                assert draft_bytes(engine) == 0
        while turn(engine):
            pass
        assert request.num_drafted > drafted and request.num_preempted == 0
        assert_same(running.result(), expected)


@pytest.mark.parametrize("width", [1, 3])
def test_drafts_are_the_first_to_give_up_their_pages(engine: Engine, plain: Plains, width: int) -> None:
    with engine.lane.exclusive():
        running = Running(engine, "m", 0, draft=Draft("near", tokens=2, width=width))
        turn(engine)
        held = draft_bytes(engine)
        assert held == engine.residency["near"].layout.page_bytes
        with no_pages(engine):
            session = engine.session("m")
            session.append([5])  # needs a page, and there is the drafter's
            assert draft_bytes(engine) == 0 and running.request.num_preempted == 0
            session.close()
        while turn(engine):
            pass
        assert_same(running.result(), plain("llama", 0, "greedy", "none"))


@pytest.mark.parametrize(
    ("others", "how"),
    [
        ((), "remove"),
        (("ngram",), "unload"),
        (("stranger", "twin"), "remove"),
        (("stranger", "twin"), "unload"),
    ],
    ids=str,
)
def test_the_others_draft_on_when_one_is_gone(paths: Paths, plain: Plains, others: tuple[str, ...], how: str) -> None:
    """In an engine of its own, where nobody is known to be the better yet."""
    expected = plain("llama", 0, "greedy", "none")
    references = (tuple(expected.tokens),) if "ngram" in others else ()
    by = Draft(("near", *others), tokens=3, min_n=1, references=references)
    with make_engine(paths, config=replace(CONFIG, prefix_cache=False)) as engine, engine.lane.exclusive():
        running = Running(engine, "m", 0, draft=by)
        turn(engine)
        request = running.request
        assert request.drafts is not None and request.drafts.records["near"].num_drafted > 0
        before, mine = request.num_drafted, request.drafts.records["near"].num_drafted
        engine.remove("near") if how == "remove" else engine.unload("near")
        while turn(engine):
            pass
        assert_same(running.result(), expected)
        assert request.drafts.records["near"].num_drafted == mine
        assert (request.num_drafted > before) == bool(others)
        assert how == "remove" or engine.residency["near"].model is None
        assert_clean(engine)


@pytest.mark.parametrize("width", [1, 2])
def test_a_drafter_drafts_as_far_as_its_own_context_reaches(
    engine: Engine, paths: Paths, plain: Plains, width: int
) -> None:
    """41 tokens of a prompt and 28 new ones, by a model of the target's weights that knows 64 positions."""
    engine.add("short", paths["short"])
    with engine.lane.exclusive():
        running = Running(engine, "m", 0, draft=Draft("short", tokens=4, width=width))
        known = 0
        while turn(engine):
            if running.request.num_drafted > known:
                known, last = running.request.num_drafted, len(running.request.tokens)
        assert engine.residency["short"].config.max_context == 64
    engine.remove("short")
    assert_same(running.result(), plain("llama", 0, "greedy", "none"))
    assert 60 < last <= 65
    m = running.result().metrics
    assert m.num_accepted > 12 and (m.num_accepted == m.num_drafted) == (width == 1)
