"""Logits -> tokens: the largest logit, or a draw whose random numbers are a function of seed, position and token id."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import UnionType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from csrc_triton.fused import argmax
from polymodel.config import is_number
from polymodel.errors import InvalidRequest, NonFiniteLogits, brief

Acceptance = Literal["identity", "rejection"]
ACCEPTANCES: tuple[Acceptance, ...] = ("identity", "rejection")
Probs: TypeAlias = Tensor  # [V] int64, in proportion to the probabilities of tokens; 0 for those filtered out
CHOOSE, DRAFT, ACCEPT, RESIDUAL = range(4)  # streams of random numbers
GOLDEN, FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64's
LAST_32, LAST_63, LAST_64 = (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1
MAX_UNIFORM = 1 - 2.0**-53
MARGIN = 1.0001  # far above what float32 rounds off a ratio
WEIGHT_BITS = 40  # of the likeliest token's weight; a token 2**41 times less likely has none


def greedy(logits: Tensor) -> list[int]:
    """logits [M, V] float32 -> M ids; -1 for a row with a NaN, which is that row's misfortune and no other's."""
    ids: list[int] = argmax(logits).tolist()
    return ids


def greedy_one(logits: Tensor, name: str) -> int:
    """logits [V] float32 -> id; `name` says whose they are, for the error."""
    (token,) = greedy(logits[None])
    if token < 0:
        raise NonFiniteLogits.of(name)
    return token


def top1(logits: Tensor) -> list[tuple[float, float]]:
    """logits [M, V] float32 -> by how much each row's largest leads, and its probability; NaN for a row with NaN."""
    found = []
    for row in logits:
        best, second = [*row.topk(min(2, len(row))).values.tolist(), -math.inf][:2]
        row, peak = _peak(row)
        total = math.nan if math.isnan(peak) else int(_weights(row, peak, 1.0).sum())
        found.append((best - second, 2.0**WEIGHT_BITS / total))
    return found


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. In this order: logit bias, penalties, temperature, top-k, top-p, min-p.

    Whatever is out of its range is refused with InvalidRequest.
    """

    temperature: float = 0.0  # 0: the largest logit
    top_k: int = 0  # tokens; 0: all
    top_p: float = 1.0  # the fewest tokens whose probability reaches this
    min_p: float = 0.0  # of the largest probability
    repetition_penalty: float = 1.0  # of tokens of prompt and output: divides a logit above 0, multiplies one below
    presence_penalty: float = 0.0  # of tokens of the output, once
    frequency_penalty: float = 0.0  # of tokens of the output, for each time
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # -inf forbids a token
    seed: int = 0  # modulo 2**64
    acceptance: Acceptance = "identity"  # of drafts: they change no token, or not the distribution of tokens

    def __post_init__(self) -> None:
        for name, (kind, is_right, expected) in _EXPECTED.items():
            value = getattr(self, name)
            if not (is_number(value, kind) and is_right(value)):
                raise InvalidRequest(f"Sampling.{name} must be {expected}, got {brief(value)}")
            if kind == _REAL:
                object.__setattr__(self, name, float(value))
        if self.acceptance not in ACCEPTANCES:
            raise InvalidRequest(f"Sampling.acceptance={brief(self.acceptance)}, expected one of {ACCEPTANCES}")
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"Sampling.logit_bias must map token ids to numbers, got {brief(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not (is_number(token, int) and token >= 0):
                raise InvalidRequest(f"Sampling.logit_bias names token {brief(token)}, expected an id from 0 on")
            if not (is_number(bias) and (_is_finite(bias) or bias == -math.inf)):
                raise InvalidRequest(
                    f"Sampling.logit_bias[{token}] must be a finite number, or -inf to forbid it, got {brief(bias)}"
                )
        object.__setattr__(self, "logit_bias", {token: float(bias) for token, bias in self.logit_bias.items()})

    def check_vocab(self, vocab_size: int) -> None:
        """Refuses a logit bias for a token that is not there."""
        if self.logit_bias and (token := max(self.logit_bias)) >= vocab_size:
            raise InvalidRequest(f"Sampling.logit_bias names token {token}, expected ids in 0..{vocab_size - 1}")

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_argmax(self) -> bool:
        """Whether the largest of the logits as they are is the token."""
        return self.temperature == 0 and not self.has_penalties and not self.logit_bias


def _is_finite(value: float) -> bool:
    return abs(value) <= sys.float_info.max  # true of no integer that a float cannot hold


_REAL = int | float
_EXPECTED: dict[str, tuple[type | UnionType, Callable[[float], bool], str]] = {
    "temperature": (_REAL, lambda v: v == 0 or 1e-6 <= v <= 1e6, "0 (the largest logit) or in 1e-6..1e6"),
    "top_k": (int, lambda v: v >= 0, "an integer from 0 (all) on"),
    "top_p": (_REAL, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "min_p": (_REAL, lambda v: 0 <= v <= 1, "in 0..1"),
    "repetition_penalty": (_REAL, lambda v: v > 0 and _is_finite(v), "finite and above 0"),
    "presence_penalty": (_REAL, _is_finite, "a finite number"),
    "frequency_penalty": (_REAL, _is_finite, "a finite number"),
    "seed": (int, lambda v: True, "an integer"),
}


class Sampler:
    """Chooses the tokens of one request.

    A token is a function of the sampling, the logits and the tokens before it: not of what was asked before, of
    other requests, or of where the logits lie. Only the counts that penalties need are kept from call to call.
    Everywhere, logits are [V] float32, those after `tokens`: the prompt, the output, and drafts that may not stand.
    A NaN among them gives -1.
    """

    def __init__(self, sampling: Sampling, num_prompt: int) -> None:
        self.sampling = sampling
        self._num_prompt = num_prompt
        self._counted: list[int] = []
        self._seen: Counter[int] = Counter()  # of prompt and output
        self._output: Counter[int] = Counter()

    @property
    def is_rejection(self) -> bool:
        """Whether drafts stand by rejection sampling; else a draft stands if it is what `choose` gives."""
        return self.sampling.acceptance == "rejection" and self.sampling.temperature > 0

    def choose(self, logits: Tensor, tokens: Sequence[int]) -> int:
        """The next token."""
        row, peak = _peak(self._adjusted(logits, tokens))
        if math.isnan(peak):
            return -1
        if self.sampling.temperature == 0:
            return greedy(row[None])[0]
        ids = kept(row, peak, self.sampling)
        return likeliest(row, peak, self.sampling.temperature, ids, self._bits(tokens, CHOOSE))

    def draft(self, logits: Tensor, tokens: Sequence[int]) -> tuple[int, Probs | None]:
        """What a model with these logits proposes, and for rejection sampling its distribution.

        For identity the random numbers are those of `choose`, so two models that nearly agree mostly draw the same.
        """
        if not self.is_rejection:
            return self.choose(logits, tokens), None
        row, peak = _peak(self._adjusted(logits, tokens))
        if math.isnan(peak):
            return -1, None
        probs = weights(row, peak, self.sampling)
        return drawn(probs, self._bits(tokens, DRAFT)), probs

    def accept(self, logits: Tensor, tokens: Sequence[int], drafted: int, probs: Probs | None = None) -> int:
        """The next token, with the target's logits: the drafted one if it stands.

        probs: what `draft` gave with it; None: nothing else could have been drafted. By rejection sampling
        (Leviathan et al. 2023, Chen et al. 2023) `drafted` stands with probability min(1, p / q); else the token is
        drawn from max(p - q, 0), in which it has no part. So it has distribution p, whatever q is.
        """
        if not self.is_rejection:
            return self.choose(logits, tokens)
        row, peak = _peak(self._adjusted(logits, tokens))
        if math.isnan(peak):
            return -1
        target = weights(row, peak, self.sampling)
        p, q = shares(target), torch.zeros_like(target, dtype=torch.float64)
        is_there = 0 <= drafted < len(p)
        if probs is not None:
            q[: len(probs)] = shares(probs)[: len(q)]  # padding rows may differ in number
        elif is_there:
            q[drafted] = 1
        if is_there and uniform(self._bits(tokens, ACCEPT)) * float(q[drafted]) < float(p[drafted]):
            return drafted
        rest = ((p - q).clamp_(min=0) * 2.0**52).round_().long()
        return drawn(rest if rest.any() else target, self._bits(tokens, RESIDUAL))  # none: equal but for rounding

    def _bits(self, tokens: Sequence[int], stream: int) -> int:
        return random_bits(self.sampling.seed, len(tokens), stream)

    def _adjusted(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        if self.sampling.has_penalties:
            self._count(tokens)
        return adjusted(logits, self.sampling, self._seen, self._output)

    def _count(self, tokens: Sequence[int]) -> None:
        """Brings the counts from the tokens of the last call to these."""
        same = len(self._counted)
        if list(tokens[:same]) != self._counted:
            pairs = enumerate(zip(self._counted, tokens, strict=False))
            same = next((at for at, (old, new) in pairs if old != new), min(same, len(tokens)))
        in_output = max(same, self._num_prompt)
        self._seen.subtract(self._counted[same:])
        self._output.subtract(self._counted[in_output:])
        self._counted[same:] = tokens[same:]
        self._seen.update(self._counted[same:])
        self._output.update(self._counted[in_output:])


def adjusted(logits: Tensor, sampling: Sampling, seen: Mapping[int, int], output: Mapping[int, int]) -> Tensor:
    """logits [V] float32 with bias and penalties, rounded once; seen and output: token -> times it is there.

    The repetition penalty is that of CTRL (Keskar et al. 2019), made to lower a logit of either sign.
    """
    if not (sampling.logit_bias or sampling.has_penalties):
        return logits
    row = logits.double()
    if bias := [pair for pair in sampling.logit_bias.items() if pair[0] < len(row)]:  # a drafter may have fewer rows
        ids, biases = row.new_tensor(bias).unbind(1)
        row[ids.long()] += biases
    if sampling.repetition_penalty != 1:
        ids, _ = _times(seen, row)
        some, penalty = row[ids], sampling.repetition_penalty
        row[ids] = torch.where(some > 0, some / penalty, some * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        ids, times = _times(output, row)
        row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return row.float()


def _times(counts: Mapping[int, int], row: Tensor) -> tuple[Tensor, Tensor]:
    """Ids int64 that were counted and have a place in the row, and how often, in the row's dtype."""
    some = {token: times for token, times in counts.items() if times > 0 and token < len(row)}
    return torch.tensor([*some], dtype=torch.int64, device=row.device), row.new_tensor([*some.values()])


def _peak(row: Tensor) -> tuple[Tensor, float]:
    """row [V] and its largest logit; an infinite one counts as 0, and all that are less as -inf."""
    peak = float(row.amax())
    if math.isinf(peak):
        return torch.where(row == peak, 0.0, -math.inf), 0.0
    return row, peak


def kept(row: Tensor, peak: float, sampling: Sampling) -> Tensor | None:
    """Ids of row [V] that top-k, top-p and min-p leave, ties to the lower ids; None: all of them."""
    ids = None
    if 0 < sampling.top_k < len(row):
        least = row.topk(sampling.top_k).values[-1]
        ids = _descending(row, (row >= least).nonzero().flatten())[: sampling.top_k]
    if sampling.top_p < 1:
        some = _weights(row if ids is None else row[ids], peak, sampling.temperature)
        total = int(some.sum())
        wanted = math.ceil(sampling.top_p * total)
        # what is lighter is not needed: all of it together weighs no more than what top-p leaves out
        heavy = (some >= max((total - wanted) // len(some), 1)).nonzero().flatten()
        ids = _descending(row, heavy if ids is None else ids[heavy])
        reached = _weights(row[ids], peak, sampling.temperature).cumsum(0)
        ids = ids[: int((reached < wanted).sum()) + 1]
    if sampling.min_p > 0:
        least_logit = peak + math.log(sampling.min_p) * sampling.temperature
        ids = (row >= least_logit).nonzero().flatten() if ids is None else ids[row[ids] >= least_logit]
    return ids


def _descending(row: Tensor, ids: Tensor) -> Tensor:
    """Ascending ids by their logits."""
    return ids[row[ids].argsort(descending=True, stable=True)]


def weights(row: Tensor, peak: float, sampling: Sampling) -> Probs:
    """Of row [V], filtered."""
    ids = kept(row, peak, sampling)
    if ids is None:
        return _weights(row, peak, sampling.temperature)
    some = _weights(row[ids], peak, sampling.temperature)
    return some.new_zeros(len(row)).index_copy_(0, ids, some)


def shares(probs: Probs) -> Tensor:
    """[V] float64, of a sum of 1."""
    return probs.double() / int(probs.sum())


def _weights(logits: Tensor, peak: float, temperature: float) -> Tensor:
    """exp((logits - peak) / temperature) in units of 2**-40, int64: a sum has no order in which it is rounded."""
    return ((logits.double() - peak) / temperature).exp_().mul_(2.0**WEIGHT_BITS).round_().long()


def drawn(probs: Probs, number: int) -> int:
    """The id that a random number of 64 bits falls on."""
    ends = probs.cumsum(0)
    return int((ends <= (number * int(ends[-1]) >> 64)).sum())


def likeliest(row: Tensor, peak: float, temperature: float, ids: Tensor | None, number: int) -> int:
    """Argmax of row [V] / temperature + Gumbel noise over ids (None: all): a draw from their softmax.

    With u uniform in (0, 1) and E = -log(1 - u), the noise is -log E, so the token is the one whose E / w is
    smallest, w = exp((row - peak) / temperature). As u <= E, E / u rises with u, and w <= 1: if r is the smallest
    u / w, that of the token is at most -log(1 - r). Float32 and a margin find the few of which that is true,
    float64 the one among them. Ties go to the lowest id.
    """
    salts = _salts(len(row), row.device)
    if ids is not None:
        row, salts = row[ids], salts[ids]
    bits = noise(salts, number)
    ratios = bits.float().mul_(2.0**-63).div_(((row - peak) / temperature).exp_())
    least = min(float(ratios.amin()) * MARGIN, MAX_UNIFORM)
    few = (ratios <= -math.log1p(-least) * MARGIN).nonzero().flatten()
    gumbels = [-math.log(-math.log1p(-some * 2.0**-63)) for some in bits[few].tolist()]
    scores = [(logit - peak) / temperature + gumbel for logit, gumbel in zip(row[few].tolist(), gumbels, strict=True)]
    best = max(scores)
    tokens: list[int] = (few if ids is None else ids[few]).tolist()
    return min(token for token, score in zip(tokens, scores, strict=True) if score == best)


def noise(salts: Tensor, number: int) -> Tensor:
    """A uniform number for every salt (int64), in units of 2**-63: an odd multiple of 2**-53, exact in float64."""
    return _scrambled(salts, number).bitwise_and_(-1 << 11 & LAST_63).bitwise_or_(1 << 10)


@lru_cache(maxsize=4)
def _salts(vocab_size: int, device: torch.device) -> Tensor:
    """[V] int64, the same for an id in every vocabulary."""
    return _scrambled(torch.arange(vocab_size, device=device), GOLDEN)


def _scrambled(x: Tensor, number: int) -> Tensor:
    """x int64 under a key of 64 bits: two rounds of it are a hash, with the multipliers of splitmix64."""
    x = (x ^ _signed(number)).mul_(_signed(FACTORS[0]))
    return x.bitwise_xor_((x >> 32).bitwise_and_(LAST_32)).mul_(_signed(FACTORS[1]))


def _signed(number: int) -> int:
    return number - (number >> 63 << 64)


def random_bits(seed: int, position: int, stream: int) -> int:
    """64 random bits of a position."""
    number = seed
    for more in (0, position, stream):
        number = _splitmix(number ^ more)
    return number


def _splitmix(x: int) -> int:
    """splitmix64 (Steele, Lea and Flood 2014): a bijection of 64 bits."""
    x = x + GOLDEN & LAST_64
    x = (x ^ x >> 30) * FACTORS[0] & LAST_64
    x = (x ^ x >> 27) * FACTORS[1] & LAST_64
    return x ^ x >> 31


def uniform(number: int) -> float:
    """64 random bits as a float64 in (0, 1)."""
    return ((number >> 12) + 0.5) * 2.0**-52
