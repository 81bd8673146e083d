"""Sampling against its definitions in float64, and its random numbers against what random numbers must be."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polymodel import sample
from polymodel.errors import InvalidRequest, NonFiniteLogits
from polymodel.sample import (
    Sampler,
    Sampling,
    adjusted,
    greedy_one,
    kept,
    likeliest,
    noise,
    random_bits,
    shares,
    top1,
    uniform,
    weights,
)

NAN, INF = math.nan, math.inf
TEN = torch.tensor([1.0, 0.5, -0.25, 2.0, 2.0, -3.0, 0.0, 1.5, -1.0, 0.75])


def p_value(seen: Any, expected: Any) -> float:
    """Of Pearson's chi-square: the upper regularised gamma function, by the series of the lower one."""
    seen, expected = np.asarray(seen, np.float64), np.asarray(expected, np.float64)
    seen, expected = seen[expected > 0], expected[expected > 0]
    a, x = (len(seen) - 1) / 2, float(((seen - expected) ** 2 / expected).sum()) / 2
    term = total = 1.0
    n = 0
    while term > 1e-17 * total:
        n += 1
        term *= x / (a + n)
        total += term
    return 1 - total * math.exp(a * math.log(x) - x - math.lgamma(a + 1)) if x else 1.0


def pooled(seen: np.ndarray, expected: np.ndarray) -> tuple[list[float], list[float]]:
    """What is expected less than five times counts together, as the test wants it."""
    rare = (expected < 5) & (expected > 0)
    counts = [[*x[~rare], *([x[rare].sum()] if rare.any() else [])] for x in (seen, expected)]
    return counts[0], counts[1]


def assert_distributed(tokens: list[int], probs: np.ndarray, what: object) -> None:
    counts = np.bincount(tokens, minlength=len(probs))
    assert not counts[probs == 0].any(), f"{what}: {counts}, what has no probability came up"
    p = p_value(*pooled(counts, probs * len(tokens)))
    print(f"{what}: p = {p:.4f}")
    assert p > 1e-4, f"{what}: {counts} of {len(tokens)}, expected {probs * len(tokens)}"


def reference(logits: Tensor, s: Sampling) -> dict[int, float]:
    """Token -> probability of what the filters leave, in the order of their logits."""
    x = logits.double().numpy() / s.temperature
    order = np.argsort(-x, kind="stable")[: s.top_k or None].tolist()
    p = np.exp(x[order] - x.max())
    p /= p.sum()
    num_kept = min(int((p.cumsum() < s.top_p).sum()) + 1, int((p >= s.min_p * p[0]).sum()))
    p = p[:num_kept] / p[:num_kept].sum()
    return dict(zip(order, p.tolist(), strict=False))


def dense(probs: dict[int, float], size: int) -> np.ndarray:
    found = np.zeros(size)
    found[[*probs]] = [*probs.values()]
    return found


COUNTS = pytest.mark.parametrize("count", (250, pytest.param(10_000, marks=pytest.mark.slow)))
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_k": 99},
    {"top_p": 0.8},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 7, "min_p": 0.3},
    {"top_p": 0.93, "min_p": 0.1},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.15},
]

# ---- what is asked for --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", bad) for bad in (-0.5, NAN, INF, 1e-9, 1e9, True, "1", None, 10**400)),
        *(("top_k", bad) for bad in (-1, 2.0, True, None)),
        *(("top_p", bad) for bad in (0, 0.0, 1.0001, -0.1, NAN, True)),
        *(("min_p", bad) for bad in (-0.01, 1.1, NAN, False)),
        *(("repetition_penalty", bad) for bad in (0, -1, INF, NAN, True, 10**400)),
        *((name, bad) for name in ("presence_penalty", "frequency_penalty") for bad in (INF, -INF, NAN, True, 10**400)),
        *(("logit_bias", bad) for bad in ([1], None, {-1: 1}, {True: 1}, {"1": 1}, {1: NAN}, {1: INF}, {1: True})),
        *(("seed", bad) for bad in (1.0, True, None, "a")),
        *(("acceptance", bad) for bad in ("typical", None, 1)),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"Sampling\.{field}\b") as refused:
        Sampling(**{field: value})
    assert len(str(refused.value)) < 300
    assert any(word in str(refused.value) for word in ("must be", "must map", "expected"))


def test_all_good_values_are_taken() -> None:
    bias = {0: 1, 5: -INF, 9: -2.5}
    sampling = Sampling(1, 3, 1, 1, 0.5, -2, 2, bias, -(10**30), "rejection")
    bias[77] = 1.0
    assert isinstance(sampling.temperature, float)
    assert sampling.logit_bias == {0: 1, 5: -INF, 9: -2.5}
    sampling.check_vocab(10)
    with pytest.raises(InvalidRequest, match=r"token 9, expected ids in 0\.\.8"):
        sampling.check_vocab(9)
    Sampling().check_vocab(1)


def test_argmax_alone_is_enough_only_where_nothing_changes_the_logits() -> None:
    assert Sampling().is_argmax and Sampling(top_k=3, top_p=0.5, min_p=0.1, seed=4, acceptance="rejection").is_argmax
    more = {"temperature": 0.1, "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": -1}
    assert not any(Sampling(**{name: value}).is_argmax for name, value in [*more.items(), ("logit_bias", {1: 0.5})])


# ---- logits -------------------------------------------------------------------------------------------


def test_bias_and_penalties_have_exact_values() -> None:
    s = Sampling(
        repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.125, logit_bias={0: 1.0, 6: -INF, 8: 2.0}
    )
    row = adjusted(TEN, s, seen={0: 1, 2: 3, 5: 1, 8: 2, 4: 0}, output={2: 2, 8: 1, 4: 0})
    expected = [2.0 / 1.25, 0.5, -0.25 * 1.25 - 0.75, 2.0, 2.0, -3.0 * 1.25, -INF, 1.5, 1.0 / 1.25 - 0.625, 0.75]
    assert row.dtype == torch.float32 and row.tolist() == torch.tensor(expected).tolist()
    assert TEN[0] == 1.0, "the logits are the caller's"


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        ({"repetition_penalty": 4.0}, 7),  # 3 is in the prompt, 4 in the output
        ({"presence_penalty": 1.0}, 3),  # only 4 is in the output
        ({"frequency_penalty": 1.0, "logit_bias": {3: -2.0}}, 7),  # 4 is there once, 7 not at all
        ({"frequency_penalty": 0.25, "logit_bias": {3: -2.0}}, 4),
        ({"frequency_penalty": -5.0}, 4),
        ({"presence_penalty": 10**300, "logit_bias": {3: -(10**300)}}, 7),
        ({"logit_bias": {9: 1.25}}, 3),  # 2.0 thrice
        ({"logit_bias": {9: 1.26}}, 9),
    ],
)
def test_at_temperature_0_the_adjusted_logits_decide(penalties: dict[str, Any], expected: int) -> None:
    assert Sampler(Sampling(**penalties), num_prompt=2).choose(TEN, [3, 0, 4]) == expected


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("grid", (0.0, 0.5))
def test_filters_keep_what_their_definitions_say(filters: dict[str, Any], grid: float) -> None:
    for seed in range(40):
        logits = torch.randn(24, generator=torch.Generator().manual_seed(seed)) * 2
        logits = (logits / grid).round() * grid if grid else logits  # ties
        s = Sampling(temperature=(0.5, 1.0, 1.7)[seed % 3], **filters)
        ids = kept(logits, float(logits.max()), s)
        expected = reference(logits, s)
        assert sorted(range(24) if ids is None else ids.tolist()) == sorted(expected), seed
        probs = shares(weights(logits, float(logits.max()), s))
        np.testing.assert_allclose(probs.numpy(), dense(expected, 24), atol=1e-11, rtol=0)


def test_top_p_is_reached_and_the_first_token_always_in() -> None:
    four = torch.zeros(4)
    for top_p, num_kept in ((1e-300, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)):
        assert kept(four, 0.0, Sampling(temperature=1.0, top_p=top_p)).tolist() == [*range(num_kept)]


def test_filters_keep_the_same_of_a_large_vocabulary() -> None:
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 3
    for filters in FILTERS[1:]:
        s = Sampling(temperature=0.8, **filters)
        ids = kept(logits, float(logits.max()), s)
        assert ids is not None and sorted(ids.tolist()) == sorted(reference(logits, s)), filters


@pytest.mark.parametrize("sampling", (Sampling(), *(Sampling(temperature=0.7, **f) for f in FILTERS)), ids=str)
def test_a_nan_gives_no_token(sampling: Sampling) -> None:
    for s in (sampling, Sampling(**{**asdict(sampling), "repetition_penalty": 1.5, "logit_bias": {2: 1.0}})):
        row = TEN.clone()
        row[7] = NAN
        sampler = Sampler(s, 1)
        assert sampler.choose(row, [1, 2]) == -1 and sampler.draft(row, [1, 2]) == (-1, None)
        rejecting = Sampler(Sampling(**{**asdict(s), "acceptance": "rejection"}), 1)
        assert rejecting.draft(row, [1, 2]) == (-1, None) and rejecting.accept(row, [1, 2], 3) == -1
        assert rejecting.accept(TEN, [1, 2], 3) >= 0


def asdict(s: Sampling) -> dict[str, Any]:
    return {name: getattr(s, name) for name in s.__slots__}


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_infinite_logits_are_certain_or_impossible(filters: dict[str, Any]) -> None:
    sampler = Sampler(Sampling(temperature=0.9, **filters), 0)
    none = torch.full((10,), -INF)
    one, two = none.clone(), none.clone()
    one[6] = -40.0
    two[[2, 8]] = INF
    two[5] = 1e30
    assert {sampler.choose(one, range(n)) for n in range(50)} == {6}
    assert {sampler.choose(two, range(n)) for n in range(50)} <= {2, 8}
    assert all(0 <= sampler.choose(none, range(n)) < 10 for n in range(50))


# ---- random numbers -----------------------------------------------------------------------------------


def uniforms(seed: int, position: int, stream: int = 0, size: int = 4096) -> np.ndarray:
    salts = sample._salts(size, torch.device("cpu"))
    return noise(salts, random_bits(seed, position, stream)).double().numpy() * 2.0**-63


def test_the_random_numbers_of_ids_are_uniform_and_independent() -> None:
    keys = [(seed, position, stream) for seed in (0, 1, -1) for position in (0, 1, 2, 64) for stream in (0, 1)]
    rows = np.stack([uniforms(*key) for key in keys])
    assert rows.min() > 0 and rows.max() < 1 and len(np.unique(rows)) == rows.size
    for key, row in zip(keys, rows, strict=True):
        assert p_value(np.bincount((row * 64).astype(int), minlength=64), np.full(64, 64)) > 1e-4, key
        pairs = (row[::2] * 8).astype(int) * 8 + (row[1::2] * 8).astype(int)
        assert p_value(np.bincount(pairs, minlength=64), np.full(64, 32)) > 1e-4, key
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert abs(correlations).max() < 5 / math.sqrt(4096)
    assert abs(correlations.mean()) < 5 / math.sqrt(4096 * len(correlations))
    for lag in (1, 2, 3, 64):  # one key's numbers are not another's in another order
        moved = np.corrcoef(rows, np.roll(rows, lag, 1))[: len(rows), len(rows) :]
        assert abs(moved).max() < 5.5 / math.sqrt(4096)


def test_the_random_numbers_of_positions_are_uniform_and_independent() -> None:
    salts = sample._salts(7, torch.device("cpu"))
    of_ids = np.stack([noise(salts, random_bits(5, n, 0)).double().numpy() * 2.0**-63 for n in range(4096)], 1)
    alone = np.array([[uniform(random_bits(seed, n, 2)) for n in range(4096)] for seed in (5, 6, 7)])
    rows = np.concatenate([of_ids, alone, of_ids[:, ::-1], np.roll(of_ids, 1, 1)])
    for row in rows:
        assert p_value(np.bincount((row * 64).astype(int), minlength=64), np.full(64, 64)) > 1e-4
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert abs(correlations).max() < 5 / math.sqrt(4096)


def test_each_bit_of_the_key_and_of_the_salt_turns_half_of_the_bits() -> None:
    gen = np.random.default_rng(0)
    x = torch.from_numpy(gen.integers(-(2**62), 2**62, 2000))
    for bit in range(64):
        salted, keyed = x ^ sample._signed(1 << bit), noise(x, 12345 ^ 1 << bit)
        for other in (noise(salted, 12345), keyed):
            turned = (noise(x, 12345) ^ other) >> 53  # the highest ten, as good as all that decides a token
            share = np.mean([(turned >> i & 1).double().mean().item() for i in range(10)])
            assert abs(share - 0.5) < 0.05, bit


def test_tokens_are_what_they_were() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=11), 0)
    flat = torch.zeros(1000)
    assert [sampler.choose(flat, range(n)) for n in range(8)] == [665, 347, 633, 176, 284, 77, 819, 309]
    assert sampler.choose(flat[:5], range(3)) == likeliest(flat, 0.0, 1.0, torch.arange(5), random_bits(11, 3, 0))


@pytest.mark.parametrize("seed", (1, -1, 2**63, 10**30))
def test_seeds_give_streams_of_their_own(seed: int) -> None:
    flat = torch.zeros(1000)
    mine, other = Sampler(Sampling(temperature=1.0, seed=seed), 0), Sampler(Sampling(temperature=1.0), 0)
    same = sum(mine.choose(flat, range(n)) == other.choose(flat, range(n)) for n in range(200))
    assert same <= 4
    again = Sampler(Sampling(temperature=1.0, seed=seed), 0)
    assert [mine.choose(flat, range(n)) for n in range(20)] == [again.choose(flat, range(n)) for n in range(20)]


# ---- choose -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", (1e-6, 0.01, 0.3, 0.8, 2.0, 1e6))
@pytest.mark.parametrize("spread", (0.0, 1e-3, 2.0, 30.0))
def test_the_token_is_the_argmax_of_logits_and_noise_over_all_that_are_kept(temperature: float, spread: float) -> None:
    gen = torch.Generator().manual_seed(3)
    for position in range(40):
        logits = torch.randn(300, generator=gen) * spread
        number, peak = random_bits(0, position, 0), float(logits.max())
        some = torch.randperm(300, generator=gen)[:40]
        some = torch.cat([some, logits.argmax()[None]]).unique()
        gumbel = -np.log(-np.log1p(-uniforms(0, position, size=300)))
        score = (logits.double().numpy() - peak) / temperature + gumbel
        assert likeliest(logits, peak, temperature, None, number) == score.argmax()
        assert likeliest(logits, peak, temperature, some, number) == some[score[some].argmax()]


def test_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_salts", lambda size, device: torch.zeros(size, dtype=torch.int64))
    sampler = Sampler(Sampling(temperature=0.8), 0)
    assert {sampler.choose(TEN, range(n)) for n in range(20)} == {3}
    assert likeliest(TEN, 2.0, 0.8, torch.tensor([7, 4, 3]), 5) == 3
    assert Sampler(Sampling(logit_bias={1: 1.5}), 0).choose(TEN, []) == 1
    assert kept(TEN, 2.0, Sampling(temperature=1.0, top_k=1)).tolist() == [3]


@pytest.mark.parametrize(
    "fields",
    [
        *FILTERS,
        {"temperature": 0.4, "logit_bias": {3: -1.5, 5: 4.0}},
        {"repetition_penalty": 1.5, "presence_penalty": 0.4, "top_p": 0.9},
    ],
    ids=str,
)
@COUNTS
def test_tokens_are_distributed_as_the_filtered_softmax(fields: dict[str, Any], count: int) -> None:
    s = Sampling(**{"temperature": 0.8, "seed": 9, **fields})
    sampler, path = Sampler(s, 1), [3, 7, 7, 0]
    row = adjusted(TEN, s, Counter(path), Counter(path[1:]))
    number = [random_bits(s.seed, n, 0) for n in range(count)]
    if s.has_penalties:  # the path stays, so that what is penalised does
        tokens = [likeliest(row, float(row.max()), s.temperature, kept(row, float(row.max()), s), n) for n in number]
        assert sampler.choose(TEN, path) == tokens[len(path)]
    else:
        tokens = [sampler.choose(TEN, range(n)) for n in range(count)]
    assert_distributed(tokens, dense(reference(row, s), 10), fields)


def test_a_token_does_not_depend_on_where_its_logits_lie() -> None:
    x = torch.randn(64, 1001, generator=torch.Generator().manual_seed(0)) * 3
    for fields in ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.01}, {"repetition_penalty": 1.2}):
        s = Sampling(temperature=0.8, **fields)
        tokens = [Sampler(s, 1).choose(row, [1, 2, 3, n]) for n, row in enumerate(x)]
        assert len(set(tokens)) >= 20
        wide = torch.full((64 * 1005,), NAN)
        shifted = wide[3 : 3 + 64 * 1002].view(64, 1002)[:, :1001].copy_(x)
        assert [Sampler(s, 1).choose(row, [1, 2, 3, n]) for n, row in enumerate(shifted)] == tokens
        columns = x.T.contiguous().T
        assert [Sampler(s, 1).choose(row, [1, 2, 3, n]) for n, row in enumerate(columns)] == tokens


def test_threads_change_neither_a_token_nor_a_probability() -> None:
    before = torch.get_num_threads()
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(0)) * 0.5  # flat: every token weighs
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            s = Sampler(Sampling(temperature=1.1, top_p=0.98, min_p=1e-4, acceptance="rejection"), 0)
            tokens = [s.choose(x, range(n)) for n in range(3)]
            token, probs = s.draft(x, range(5))
            assert probs is not None
            found.append((tokens, token, probs, s.accept(x.neg(), range(5), token, probs), top1(x[None])))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert other[:2] == found[0][:2] and other[3:] == found[0][3:] and torch.equal(other[2], found[0][2])


def test_a_token_does_not_depend_on_what_was_asked_before() -> None:
    gen = np.random.default_rng(0)
    for fields in ({"repetition_penalty": 3.0}, {"presence_penalty": 3.0}, {"frequency_penalty": 2.0}):
        s = Sampling(temperature=0.3, **fields)
        kept_one, path, changed = Sampler(s, 3), [1, 2, 3], 0
        for _ in range(150):
            keep = int(gen.integers(0, len(path) + 1)) if gen.random() < 0.3 else len(path)  # into the prompt, too
            path = path[:keep] + gen.integers(0, 10, gen.integers(0, 4)).tolist()
            asked = tuple(path) if gen.random() < 0.5 else list(path)
            token = kept_one.choose(TEN, asked)
            assert token == Sampler(s, 3).choose(TEN, path)
            changed += token != Sampler(Sampling(temperature=0.3), 3).choose(TEN, path)
        assert changed > 25


# ---- drafts -------------------------------------------------------------------------------------------


def test_equal_logits_draft_the_token_that_is_chosen() -> None:
    gen = torch.Generator().manual_seed(1)
    for fields in ({}, {"top_p": 0.9}, {"presence_penalty": 1.0}, {"temperature": 0.0}):
        sampler = Sampler(Sampling(**{"temperature": 1.0, **fields}), 0)
        for n in range(100):
            logits, path = torch.randn(50, generator=gen) * 2, [n % 7] * n
            token = sampler.choose(logits, path)
            assert sampler.draft(logits, path) == (token, None)
            assert sampler.accept(logits, path, token) == token == sampler.accept(logits, path, token + 1)


def test_a_close_drafter_agrees_far_more_often_than_chance() -> None:
    gen = torch.Generator().manual_seed(2)
    sampler, agreed, chance, limit = Sampler(Sampling(temperature=1.0), 0), 0, 0.0, 0.0
    for n in range(500):
        logits = torch.randn(100, generator=gen) * 1.5
        near = logits + torch.randn(100, generator=gen) * 0.2
        p, q = logits.softmax(0), near.softmax(0)
        chance += float((p * q).sum())
        limit += float(torch.minimum(p, q).sum())
        agreed += sampler.choose(logits, range(n)) == sampler.draft(near, range(n))[0]
    print(f"agreed {agreed / 500:.3f}, chance {chance / 500:.3f}, the most that any coupling could {limit / 500:.3f}")
    assert agreed / 500 > 0.8 > 10 * chance / 500


REJECTING: dict[str, Tensor | int] = {
    "close": TEN + torch.tensor([0.3, -0.2, 0.1, 0.4, -0.5, 0.2, 0.0, -0.1, 0.3, 0.1]),
    "far": TEN.neg() * 1.5,
    "equal": TEN,
    "disjoint": torch.where(TEN > 1, -INF, 0.0),
    "fewer rows": TEN[:6],
    "more rows": torch.cat([TEN, torch.tensor([3.0, 1.0])]),
    "certain of a likely token": 3,
    "certain of an unlikely token": 5,
    "certain of a token that is filtered out": 2,
    "certain of what is no token": 77,
}


@pytest.mark.parametrize("drafter", REJECTING)
@pytest.mark.parametrize("filters", ({}, {"top_k": 6, "top_p": 0.95}), ids=str)
@COUNTS
def test_rejection_gives_the_targets_distribution_whoever_drafts(
    drafter: str, filters: dict[str, Any], count: int
) -> None:
    s = Sampling(temperature=0.9, seed=21, acceptance="rejection", **filters)
    sampler, given = Sampler(s, 0), REJECTING[drafter]
    assert sampler.is_rejection
    drafts = [(given, None) if isinstance(given, int) else sampler.draft(given, range(n)) for n in range(count)]
    tokens = [sampler.accept(TEN, range(n), *drafts[n]) for n in range(count)]
    p = dense(reference(TEN, s), 12)
    assert_distributed(tokens, p, (drafter, filters))
    q = np.eye(100)[given][:12] if isinstance(given, int) else dense(reference(given, s), 12)
    if not isinstance(given, int):
        assert_distributed([token for token, _ in drafts], q, "drafted")
    stood = sum(token == drafted for token, (drafted, _) in zip(tokens, drafts, strict=True))
    expected = np.minimum(p, q).sum() * count
    assert abs(stood - expected) <= 4 * math.sqrt(expected * max(1 - expected / count, 0)) + 1e-6


def test_rejection_has_streams_of_its_own() -> None:
    s = Sampler(Sampling(temperature=1.0, acceptance="rejection"), 0)
    flat = torch.zeros(8)
    rows = [[s.choose(flat, range(n)) for n in range(512)], [s.draft(flat, range(n))[0] for n in range(512)]]
    rows.append([s.accept(flat, range(n), 77) for n in range(512)])
    stands = [s.accept(flat, range(n), 3) == 3 for n in range(512)]
    for one in range(3):
        for other in range(one):
            pairs = np.array(rows[one]) * 8 + np.array(rows[other])
            assert p_value(np.bincount(pairs, minlength=64), np.full(64, 8)) > 1e-4
        when = np.bincount(np.array(rows[one])[stands], minlength=8)
        assert p_value(when, np.full(8, when.sum() / 8)) > 1e-4


def test_what_is_rejected_is_not_drawn_again() -> None:
    s = Sampler(Sampling(temperature=1.0, acceptance="rejection"), 0)
    probs = torch.tensor([0, 1 << 40, 0, 1 << 40])
    target = torch.tensor([0.0, -1.0, 0.0, 5.0])
    found = [s.accept(target, range(n), 1, probs) for n in range(300)]
    assert Counter(found).keys() == {0, 1, 2, 3}  # 1 where it stood
    p = torch.softmax(target.double(), 0)
    assert_distributed([t for t in found if t != 1], residual(p, probs / probs.sum()), "residual")


def residual(p: Tensor, q: Tensor) -> np.ndarray:
    rest = (p - q).clamp(min=0).numpy()
    return rest / rest.sum()


def test_at_temperature_0_a_draft_stands_if_it_is_the_argmax() -> None:
    sampler = Sampler(Sampling(acceptance="rejection", logit_bias={9: 5.0}), 0)
    assert not sampler.is_rejection and sampler.draft(TEN, []) == (9, None)
    assert sampler.accept(TEN, [], 9) == sampler.accept(TEN, [], 3) == 9


# ---- of a batch ---------------------------------------------------------------------------------------


def test_top1_tells_the_lead_and_the_probability() -> None:
    rows = torch.stack([TEN, TEN * 2, torch.full((10,), NAN)])
    rows[1, 3] = 6.0
    (lead, prob), (lead_2, prob_2), none = top1(rows)
    assert (lead, lead_2) == (0.0, 2.0) and all(map(math.isnan, none))
    assert prob == pytest.approx(TEN.double().softmax(0)[3].item(), rel=1e-10)
    assert prob_2 == pytest.approx(rows[1].double().softmax(0)[3].item(), rel=1e-10)
    assert top1(torch.tensor([[-3.0]])) == [(INF, 1.0)]


def test_greedy_one_names_the_model_of_a_nan() -> None:
    assert greedy_one(TEN, "m") == 3
    with pytest.raises(NonFiniteLogits, match="m: a logit is NaN"):
        greedy_one(torch.tensor([0.0, NAN]), "m")
