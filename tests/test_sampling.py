"""Sampling through the engine: a seed's own stream in any company, options that do what they say, and the odds."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_lane import few_pages
from test_sample import p_value, pooled
from tiny import tiny_model, write_tiny, write_tokenizer
from torch import Tensor

from polymodel import Draft, Engine, EngineConfig, errors
from polymodel.sample import Sampler, Sampling
from polymodel.sequence import Sequence as Request

UNCACHED = EngineConfig(prefix_cache=False, kv_borrows=False)
SMALL: dict[str, Any] = {"num_hidden_layers": 1}
NUM_NEW = 12
PROMPTS = [
    torch.randint(3, 259, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (7, 62, 1, 100, 33)
]
PLAIN: dict[str, Any] = {"max_new_tokens": NUM_NEW, "stop_at_eos": False, "draft": None}
OPTIONS: list[dict[str, Any]] = [  # one for each request of a batch
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 9},
    {"temperature": 1.3, "seed": 3, "top_p": 0.5, "frequency_penalty": 0.5},
    {},
    {"temperature": 0.3, "seed": 5, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 6, "min_p": 0.1, "logit_bias": {40: 3.0, 41: -math.inf}},
    {"presence_penalty": 4.0},
    {"temperature": 0.2, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.7},
]
DRAFTS = ("twin", "other", "ngram", Draft(by="twin", width=2, tokens=3), "m again", Draft(by=("twin", "ngram")))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the module's fixtures, as for its tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sampling")
    kinds = {"m": 0, "other": 1}
    paths = {name: write_tokenizer(write_tiny(root / name, "llama", seed, **SMALL)) for name, seed in kinds.items()}
    loops = tiny_model("llama", 2, **SMALL)
    for layer in loops.model.layers:  # blind to what came before, so that it says the same again and again
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    loops.save_pretrained(root / "loops")
    return paths | {"loops": write_tokenizer(root / "loops")}


@pytest.fixture(scope="module")
def engine(paths: dict[str, Path]) -> Iterator[Engine]:
    """A model with its twin, itself under another name, and a model that is always wrong."""
    with Engine(kv_budget="32MiB", config=UNCACHED) as engine:
        add_all(engine, paths)
        engine.add("loops", paths["loops"])
        yield engine


def add_all(engine: Engine, paths: dict[str, Path]) -> None:
    engine.add("m", paths["m"], twin="q4")
    engine.add("m again", paths["m"])
    engine.add("other", paths["other"])


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[int]]:
    """What each of OPTIONS gives by itself, undrafted."""
    streams = [generate(engine, i, **options) for i, options in enumerate(OPTIONS)]
    assert len(set(chain(*streams))) >= 60 and all(len(stream) == NUM_NEW for stream in streams)
    return streams


def submit(engine: Engine, i: int = 0, **options: Any) -> Request:
    return engine.submit("m", prompt_ids=PROMPTS[i % len(PROMPTS)], **PLAIN | options)


def generate(engine: Engine, i: int = 0, model: str = "m", **options: Any) -> list[int]:
    return engine.generate(model, prompt_ids=PROMPTS[i % len(PROMPTS)], **PLAIN | options).tokens


def together(engine: Engine, several: Sequence[dict[str, Any]], i: int = 0, model: str = "m") -> list[list[int]]:
    """What a prompt gives with each of several options, as one batch."""
    with engine.lane.exclusive():
        requests = [engine.submit(model, prompt_ids=PROMPTS[i], **PLAIN | options) for options in several]
        engine.run()
    assert all(request.error is None for request in requests)
    return [request.output for request in requests]


class Says:
    """A drafter that knows one text by heart."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return self.tokens[len(tokens) : len(tokens) + count]


# ---- a seed's stream


@pytest.mark.parametrize(("size", "is_drafted"), [(3, True), (8, True), (8, False)])
def test_a_request_has_its_stream_in_any_company(
    engine: Engine, alone: list[list[int]], size: int, is_drafted: bool
) -> None:
    """Every request of the batch with a sampling, a seed and a drafter of its own."""
    num_drafted = num_accepted = 0
    for start in range(0, len(OPTIONS), size):
        batch = list(range(start, min(start + size, len(OPTIONS))))
        with engine.lane.exclusive():
            drafts = [DRAFTS[(i + size) % len(DRAFTS)] if is_drafted else None for i in batch]
            requests = [submit(engine, i, draft=draft, **OPTIONS[i]) for i, draft in zip(batch, drafts, strict=True)]
            engine.run()
        assert [request.output for request in requests] == [alone[i] for i in batch]
        num_drafted += sum(request.num_drafted for request in requests)
        num_accepted += sum(request.num_accepted for request in requests)
    assert 0 < num_accepted < num_drafted if is_drafted else num_drafted == 0


def test_neither_chunks_nor_turns_nor_cached_prefixes_change_a_stream(
    paths: dict[str, Path], alone: list[list[int]]
) -> None:
    with Engine(kv_budget="32MiB", config=EngineConfig(prefill_chunk=5, quantum=1, max_batch=3)) as engine:
        add_all(engine, paths)
        for draft in (None, "twin"):
            with engine.lane.exclusive():
                requests = [submit(engine, i, draft=draft, **options) for i, options in enumerate(OPTIONS)]
                engine.run()
            assert [request.output for request in requests] == alone
        assert max(event.tokens for event in engine.events.of("prefill")) <= 5
        assert all(request.num_cached for request in requests if request.num_prompt > 8)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_changes_no_stream(paths: dict[str, Path], alone: list[list[int]], preemption: Any) -> None:
    config = replace(UNCACHED, preemption=preemption)
    with Engine(kv_budget="32MiB", host_budget="32MiB", config=config) as engine:
        add_all(engine, paths)
        with engine.lane.exclusive(), few_pages(engine, 4, "m"):
            requests = [submit(engine, i, draft=DRAFTS[i % 3], **options) for i, options in enumerate(OPTIONS)]
            engine.run()
        assert [request.output for request in requests] == alone
        assert sum(request.num_preempted for request in requests) >= 1
        assert bool(engine.events.of("resume")) == (preemption == "swap")


def test_other_seeds_give_other_streams_and_the_same_seed_the_same(engine: Engine) -> None:
    seeds = [0, 1, 2, 3, 2**32, 2**64 - 1]
    streams = [generate(engine, temperature=0.8, seed=seed) for seed in seeds]
    assert len(set(map(tuple, streams))) == len(seeds)
    assert generate(engine, temperature=0.8, seed=-1) == streams[-1]  # modulo 2**64
    assert generate(engine, seed=1) == generate(engine, seed=2)  # nothing is drawn at temperature 0


def test_every_position_is_drawn_anew(engine: Engine) -> None:
    def flat(tokens: list[int], logits: Tensor) -> Tensor:
        return torch.zeros_like(logits)

    assert len(set(generate(engine, temperature=1.0, logits_processor=flat))) > NUM_NEW // 2
    assert generate(engine, logits_processor=flat) == [0] * NUM_NEW


def test_equal_prompts_with_equal_seeds_are_drawn_alike_beside_each_other(engine: Engine) -> None:
    with engine.lane.exclusive():
        requests = [submit(engine, 1, temperature=1.0, seed=seed) for seed in (4, 5, 4)]
        engine.run()
    first, other, third = (request.output for request in requests)
    assert first == third != other


# ---- what options do


@pytest.mark.parametrize("i", range(len(OPTIONS)))
def test_every_token_is_what_the_sampler_chooses_from_the_logits(
    engine: Engine, alone: list[list[int]], i: int
) -> None:
    """Position, prompt and output are told apart rightly: the logits are recorded, and drawn from again."""
    seen: list[tuple[list[int], Tensor]] = []

    def record(tokens: list[int], logits: Tensor) -> Tensor:
        seen.append((list(tokens), logits.clone()))
        return logits

    tokens = generate(engine, i, logits_processor=record, **OPTIONS[i])
    prompt = PROMPTS[i % len(PROMPTS)]
    assert [so_far for so_far, _ in seen] == [prompt + tokens[:n] for n in range(NUM_NEW)]
    sampling = Sampling(**OPTIONS[i])
    chosen = [Sampler(sampling, len(prompt)).choose(logits, so_far) for so_far, logits in seen]
    assert chosen == tokens == alone[i]


def test_what_leaves_one_token_is_greedy(engine: Engine) -> None:
    several: list[dict[str, Any]] = [
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 2.0, "min_p": 1.0},
        {"temperature": 2.0, "top_p": 1e-9},
        {"temperature": 1e-6},
        {"acceptance": "rejection"},
        {"logit_bias": {5: 0.0}},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.5},
    ]
    greedy = generate(engine)
    for draft in (None, "twin"):
        assert together(engine, [options | {"draft": draft} for options in several]) == [greedy] * len(several)


def test_each_option_alone_changes_the_stream(engine: Engine) -> None:
    base: dict[str, Any] = {"temperature": 0.3, "seed": 3, "max_new_tokens": 40}
    several: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"temperature": 1.2},
        {"repetition_penalty": 5.0},
        {"presence_penalty": 9.0},
        {"frequency_penalty": 9.0},
        {"logit_bias": {70: 9.0}},
    ]
    plain, *others = together(engine, [base | more for more in ({}, *several)], 4, "loops")
    same = [more for more, other in zip(several, others, strict=True) if other == plain]
    assert not same and len(plain) == 40


def test_a_bias_forbids_and_forces_tokens(engine: Engine) -> None:
    greedy = generate(engine)
    forbidden = dict.fromkeys(greedy, -math.inf)
    for draft in (None, "twin"):
        others = generate(engine, logit_bias=forbidden, draft=draft)
        assert not set(others) & set(greedy)
        sampled = generate(engine, logit_bias=forbidden, temperature=1.0, draft=draft)
        assert not set(sampled) & set(greedy)
        assert generate(engine, logit_bias={77: 1e6}, draft=draft) == [77] * NUM_NEW


def test_penalties_keep_tokens_from_coming_again(engine: Engine) -> None:
    """The repetition penalty knows the prompt, the others the output alone."""
    several: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 1e4},
        {"frequency_penalty": 1e4},
        {"repetition_penalty": 1e6},
        {"frequency_penalty": -1e4},
    ]
    options = [{"max_new_tokens": 50} | one for one in several]
    prompt, (greedy, present, frequent, fresh, loved) = set(PROMPTS[3]), together(engine, options, 3, "loops")
    assert len(set(greedy)) < 40
    assert len(set(present)) == 50 and set(present) & prompt
    assert frequent == present
    assert len(set(fresh)) == 50 and not set(fresh) & prompt
    assert len(set(loved)) == 1  # once said, always said


# ---- where a request ends


@pytest.fixture(scope="module")
def spoken(engine: Engine) -> Any:
    """An output whose text has two plain characters in a row in its second half, and these."""
    for seed in range(100):
        out = engine.generate("m", prompt_ids=PROMPTS[0], **PLAIN | {"max_new_tokens": 40}, temperature=1.0, seed=seed)
        text = out.text
        pairs = (text[at : at + 2] for at in range(len(text) // 2, len(text) - 4))
        stop = next((pair for pair in pairs if pair.isascii() and pair.isprintable() and text.count(pair) == 1), None)
        if stop is not None:
            return out, stop, {"temperature": 1.0, "seed": seed, "max_new_tokens": 40}
    pytest.fail("no stream has such a text")


@pytest.mark.parametrize("draft", [None, "twin", "ngram", "by heart"])
def test_a_stop_string_ends_the_text_before_it(engine: Engine, spoken: Any, draft: str | None) -> None:
    whole, stop, options = spoken
    drafter: Any = Says(whole.prompt_ids + whole.tokens) if draft == "by heart" else draft
    out = engine.generate("m", prompt_ids=PROMPTS[0], **PLAIN | options | {"draft": drafter}, stop=stop)
    assert (out.text, out.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert out.tokens == whole.tokens[: len(out.tokens)]
    decode = engine["m"].tokenizer.decode
    assert stop in decode(out.tokens) and stop not in decode(out.tokens[:-1])
    assert out.settings.stop == (stop,)


def test_streams_show_what_comes_before_a_stop_string_only(engine: Engine, spoken: Any) -> None:
    whole, stop, options = spoken
    text = whole.text[: whole.text.index(stop)]
    arguments = PLAIN | options | {"stop": ["never said", stop]}
    for draft in (None, Says(whole.prompt_ids + whole.tokens)):
        pieces = list(engine.stream("m", prompt_ids=PROMPTS[0], **arguments | {"draft": draft}))
        assert "".join(pieces) == text and all(pieces)

    async def asked() -> tuple[str, str]:
        parts = [piece async for piece in engine.astream("m", prompt_ids=PROMPTS[0], **arguments)]
        return "".join(parts), (await engine.agenerate("m", prompt_ids=PROMPTS[0], **arguments)).text

    assert asyncio.run(asked()) == (text, text)


def test_the_first_of_several_stop_strings_counts_and_what_never_comes_stops_nothing(
    engine: Engine, spoken: Any
) -> None:
    whole, stop, options = spoken
    arguments = PLAIN | options
    earlier = next(c for c in whole.text if c.isascii() and c.isprintable())
    out = engine.generate("m", prompt_ids=PROMPTS[0], **arguments, stop=[stop, earlier])
    assert out.text == whole.text[: whole.text.index(earlier)] and len(out.tokens) < 40
    held = engine.generate("m", prompt_ids=PROMPTS[0], **arguments, stop=[whole.text[-1] + "never"])
    assert (held.tokens, held.text, held.finish_reason) == (whole.tokens, whole.text, "length")


@pytest.mark.parametrize("draft", [None, "twin", "by heart"])
@pytest.mark.parametrize("end", [0, 3, NUM_NEW - 1])
def test_a_stop_id_ends_a_request_even_within_an_accepted_run(engine: Engine, draft: str | None, end: int) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    whole = generate(engine, **options)
    end = whole.index(whole[end])
    drafter: Any = Draft(by=Says(PROMPTS[0] + whole), tokens=8) if draft == "by heart" else draft
    out = engine.generate(
        "m", prompt_ids=PROMPTS[0], **PLAIN | options | {"draft": drafter}, stop_ids=[whole[end], 299]
    )
    assert out.tokens == whole[: end + 1] and out.finish_reason == "stop"
    assert out.text == engine["m"].tokenizer.decode(whole[:end])
    if draft == "by heart" and end == 3:
        assert out.metrics.num_target_forwards == 1


# ---- the user's own code


def test_a_processor_decides_drafted_or_not(engine: Engine) -> None:
    def only_odd(tokens: list[int], logits: Tensor) -> Tensor:
        logits[::2] = -math.inf
        return logits

    both: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]
    for options in both:
        plain = generate(engine, logits_processor=only_odd, **options)
        assert all(token % 2 for token in plain) and plain != generate(engine, **options)
        draft: Any = Draft(by="twin", width=3) if options else "m again"
        assert generate(engine, logits_processor=only_odd, draft=draft, **options) == plain


def test_a_processor_that_fails_ends_its_own_request_alone(engine: Engine, alone: list[list[int]]) -> None:
    def raises(tokens: list[int], logits: Tensor) -> Tensor:
        raise ZeroDivisionError(f"after {len(tokens)} tokens")

    def is_nan(tokens: list[int], logits: Tensor) -> Tensor:
        logits[7] = math.nan
        return logits

    wrong: list[tuple[Any, str]] = [
        (raises, "after 7 tokens"),
        (is_nan, "logits_processor gave a NaN"),
        (lambda tokens, logits: logits[:-1], r"gave a tensor of \[299\], expected a tensor of \[300\]"),
        (lambda tokens, logits: None, r"gave None, expected a tensor of \[300\]"),
    ]
    with engine.lane.exclusive():
        good = [submit(engine, i, draft="twin", **OPTIONS[i]) for i in range(2)]
        bad = [submit(engine, logits_processor=one) for one, _ in wrong]
        engine.run()
    assert [request.output for request in good] == alone[:2]
    for request, (_, message) in zip(bad, wrong, strict=True):
        with pytest.raises((ZeroDivisionError, errors.InvalidRequest), match=message):
            engine.wait(request)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be .*, got -0.1"),
        ({"temperature": math.nan}, "temperature must be .*, got nan"),
        ({"temperature": True}, "temperature must be .*, got True"),
        ({"temperature": "1"}, "temperature must be .*, got '1'"),
        ({"temperature": math.inf}, "temperature must be .*, got inf"),
        ({"top_k": -1}, "top_k must be an integer from 0 .*, got -1"),
        ({"top_k": 2.0}, r"top_k must be .*, got 2\.0"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.01}, r"top_p must be .*, got 1\.01"),
        ({"min_p": -0.5}, r"min_p must be in 0..1, got -0\.5"),
        ({"min_p": 2}, "min_p must be in 0..1, got 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be finite and above 0, got 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be .*, got inf"),
        ({"presence_penalty": math.nan}, "presence_penalty must be a finite number, got nan"),
        ({"frequency_penalty": None}, "frequency_penalty must be a finite number, got None"),
        ({"logit_bias": {300: 1.0}}, "logit_bias names token 300, expected ids in 0..299"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names token -1"),
        ({"logit_bias": {4: math.inf}}, r"logit_bias\[4\] must be a finite number, or -inf to forbid it, got inf"),
        ({"logit_bias": [4]}, r"logit_bias must map token ids to numbers, got \[4\]"),
        ({"seed": 1.5}, r"seed must be an integer, got 1\.5"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"acceptance": "always"}, "acceptance='always', expected one of .*identity.*rejection"),
        ({"stop": ""}, "stop string 0 of 0 characters must be a string of 1..256 characters, got ''"),
        ({"stop": ["a", 7]}, "stop string 1 must be a string of 1..256 characters, got 7"),
        ({"stop": ["a"] * 17}, "stop strings: 17 given, at most 16 expected"),
        ({"stop": 5}, "stop strings must be a string or a list of strings, got 5"),
        ({"stop_ids": [300]}, "is 300, expected an id in 0..299"),
        ({"stop_ids": "ab"}, "stop_ids are 'ab', expected a sequence of"),
        ({"logits_processor": 5}, "logits_processor=5, expected something to call, or None"),
        ({"draft": Draft(by="twin", width=2), "acceptance": "rejection"}, "acceptance='rejection' takes chains of one"),
        ({"draft": Draft(by=("twin", "ngram")), "acceptance": "rejection"}, "takes chains of one drafter, no trees"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_nothing_is_queued(
    engine: Engine, options: dict[str, Any], message: str
) -> None:
    with engine.lane.exclusive():
        with pytest.raises(errors.InvalidRequest, match=message):
            submit(engine, **options)
        assert not engine.lane.live and engine.arena.num_pages_used == 0


def test_rejection_takes_no_tree_of_the_users_own_either(engine: Engine) -> None:
    class Grows:
        def propose(self, tokens: Sequence[int], count: int) -> tuple[list[int], list[int]]:
            return [5, 6], [-1, -1]

    with pytest.raises(errors.InvalidRequest, match="Grows proposed a tree, expected a chain"):
        generate(engine, draft=Grows(), temperature=1.0, acceptance="rejection")
    assert generate(engine, draft=Grows()) == generate(engine)


# ---- the odds

ODDS: dict[str, Any] = {"temperature": 1.5, "top_k": 4}
NUM_ODDS = 4  # tokens; of these the second and the third are drafted, the last is the target's own after them
Shares = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def odds(engine: Engine) -> Shares:
    """The probability of each beginning of up to four tokens, from the logits that the engine gives."""
    found: dict[tuple[int, ...], Tensor] = {}

    def record(tokens: list[int], logits: Tensor) -> Tensor:
        found[tuple(tokens[len(PROMPTS[0]) :])] = logits.double()
        return logits

    shares: Shares = {(): 1.0}
    for length in range(NUM_ODDS):
        before = [tokens for tokens in shares if len(tokens) == length]
        for tokens in before:
            ids = PROMPTS[0] + list(tokens)
            engine.submit("m", prompt_ids=ids, logits_processor=record, **PLAIN | {"max_new_tokens": 1})
        found.clear()
        engine.run()
        for tokens in before:
            top, likely = found[tokens].topk(ODDS["top_k"])
            probs = (top / ODDS["temperature"]).softmax(0).tolist()
            shares |= {(*tokens, i): shares[tokens] * p for i, p in zip(likely.tolist(), probs, strict=True)}
    return shares


def _drawn(engine: Engine, num_seeds: int, **options: Any) -> list[Request]:
    requests = []
    for start in range(0, num_seeds, 200):
        with engine.lane.exclusive():
            batch = range(start, min(start + 200, num_seeds))
            requests += [submit(engine, seed=seed, **ODDS | {"max_new_tokens": NUM_ODDS} | options) for seed in batch]
            engine.run()
    return requests


def assert_odds(requests: Sequence[Request], odds: Shares, what: str) -> None:
    """Each beginning is as frequent as it is probable; p-values are printed."""
    lengths = [length for length in range(1, NUM_ODDS + 1) if len(requests) >= 4 * ODDS["top_k"] ** length]
    for length in lengths:
        cells = [tokens for tokens in odds if len(tokens) == length]
        seen = Counter(tuple(request.output[:length]) for request in requests)
        assert set(seen) <= set(cells), "a token that top-k leaves out was drawn"
        counts, expected = (np.array([of[tokens] for tokens in cells]) for of in (seen, odds))
        p = p_value(*pooled(counts, expected * len(requests)))
        rate = sum(r.num_accepted for r in requests) / max(sum(r.num_drafted for r in requests), 1)
        print(f"{what}: {length} tokens, {len(requests)} seeds, accepted {rate:.2f}, p = {p:.3f}")
        assert p > 1e-4


def _quoting(odds: Shares) -> Draft:
    """Lookup that always finds something: what may come, quoted after the prompt's last token."""
    likely = sorted((tokens for tokens in odds if len(tokens) == 3), key=lambda tokens: -odds[tokens])
    texts = {tokens[0]: (PROMPTS[0][-1], *tokens) for tokens in reversed(likely)}
    return Draft(by="ngram", references=tuple(texts.values()))


NUM_SEEDS = (260, pytest.param(10_000, marks=pytest.mark.slow))
RATES = {"twin": (0.05, 0.95), "m again": (1.0, 1.0), "other": (0.0, 0.05), "quoted": (0.1, 0.9)}


@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
@pytest.mark.parametrize(
    "draft",
    [
        "twin",
        "quoted",
        pytest.param("other", marks=pytest.mark.slow),
        pytest.param("m again", marks=pytest.mark.slow),
    ],
)
def test_rejection_sampling_draws_from_the_targets_distribution(
    engine: Engine, odds: Shares, draft: str, num_seeds: int
) -> None:
    """Whoever drafts: nearly right, exactly right, never right, or without a distribution of its own."""
    drafter: Any = _quoting(odds) if draft == "quoted" else draft
    requests = _drawn(engine, num_seeds, draft=drafter, acceptance="rejection")
    assert_odds(requests, odds, f"rejection by {draft}")
    drafted, accepted = sum(r.num_drafted for r in requests), sum(r.num_accepted for r in requests)
    low, high = RATES[draft]
    assert drafted >= num_seeds and low <= accepted / drafted <= high


@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
def test_plain_draws_have_the_softmaxs_distribution_and_drafts_change_none(
    engine: Engine, odds: Shares, num_seeds: int
) -> None:
    plain = _drawn(engine, num_seeds)
    assert_odds(plain, odds, "plain")
    drafted = _drawn(engine, num_seeds // 2, draft="twin")
    assert [request.output for request in drafted] == [request.output for request in plain[: num_seeds // 2]]
    assert 0 < sum(r.num_accepted for r in drafted) < sum(r.num_drafted for r in drafted)
    print(f"identity accepted {sum(r.num_accepted for r in drafted) / sum(r.num_drafted for r in drafted):.2f}")


def test_rejection_gives_other_tokens_than_identity_and_the_same_for_a_seed(engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_k": 4, "draft": "twin"}
    runs: dict[str, list[list[int]]] = {}
    for acceptance in ("identity", "rejection", "rejection"):
        with engine.lane.exclusive():
            requests = [submit(engine, i, seed=i, acceptance=acceptance, **options) for i in range(4)]
            engine.run()
        outputs = [request.output for request in requests]
        assert runs.setdefault(acceptance, outputs) == outputs
    assert runs["identity"] != runs["rejection"]
    assert runs["identity"] == [generate(engine, i, seed=i, **options | {"draft": None}) for i in range(4)]


def test_the_odds_are_those_of_four_tokens_in_a_row(odds: Shares) -> None:
    sums = [sum(p for tokens, p in odds.items() if len(tokens) == length) for length in range(NUM_ODDS + 1)]
    assert sums == pytest.approx([1.0] * 5) and len(odds) == sum(4**length for length in range(5))
    assert all(odds[tokens] > 0.01 for tokens in odds if len(tokens) == 1)
    assert len({tokens[1] for tokens in odds if len(tokens) == 2}) > 4  # what follows depends on it
