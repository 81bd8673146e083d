"""What a model is (ModelConfig), how an engine runs (EngineConfig), and what decides the bits (POLICY)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import index
from types import UnionType
from typing import Literal, Protocol, TypeAlias

from polymodel.errors import InvalidRequest, brief

PAGE_TOKENS = 64  # slots in a KV page, and the keys of one attention tile

Arch = Literal["llama", "qwen2", "qwen3", "gemma3"]
Activation = Literal["silu", "gelu_tanh"]
Weights = Literal["file", "f32", "bf16", "q8", "q4", "w8a8"]
WEIGHTS: tuple[Weights, ...] = ("file", "f32", "bf16", "q8", "q4", "w8a8")
Eviction = Literal["lru", "cost"]  # which cached prefix goes first
EVICTIONS: tuple[Eviction, ...] = ("lru", "cost")
PoolPolicy = Literal["lru", "lru+backout", "gdsf"]  # which idle model goes first
POOL_POLICIES: tuple[PoolPolicy, ...] = ("lru", "lru+backout", "gdsf")
LanePolicy = Literal["byte-drr", "round-robin", "priority", "fcfs", "batch-by-model"]  # whose turn it is
LANE_POLICIES: tuple[LanePolicy, ...] = ("byte-drr", "round-robin", "priority", "fcfs", "batch-by-model")
Preemption = Literal["swap", "recompute"]
PREEMPTIONS: tuple[Preemption, ...] = ("swap", "recompute")
WeightCheck = Literal["sampled", "full", "off"]
WEIGHT_CHECKS: tuple[WeightCheck, ...] = ("sampled", "full", "off")
DraftPolicy = Literal["fixed", "throttle", "gate"]  # how many tokens a fixed drafter proposes
DRAFT_POLICIES: tuple[DraftPolicy, ...] = ("fixed", "throttle", "gate")
LowBit = Literal["q4", "q8", "w8a8"]
LOW_BITS: tuple[LowBit, ...] = ("q4", "q8", "w8a8")  # weights of a twin
MAX_DRAFT = 63  # levels of a tree below the pending token
MAX_NODES = 255  # and its nodes; of all that is drafted in a round as well
RESERVED_NAMES = ("auto", "ngram", "twin")  # that no model can have
DEFAULT_DOMAIN = "default"  # of an engine whose callers name none
PUBLIC_DOMAIN = "*"  # of prefixes that the operator opened to all


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding: angle of pair j at distance d is d * inv_freq[j] (see csrc_triton.fused.rope_table)."""

    theta: float
    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_context: int = 0  # llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn; multiplies q and k once each
    truncate: bool = True  # yarn: correction range rounded to whole pairs


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Every scalar that enters a forward. Norm weights multiply as stored (gemma's +1 is already in them)."""

    arch: Arch
    vocab_size: int  # rows of the embedding, padding rows included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int  # tokens
    norm_eps: float
    rope: RopeConfig  # layers that see everything
    rope_local: RopeConfig | None = None  # layers with a window, where it differs
    window: int | None = None  # keys a windowed layer's query sees, itself included
    windowed_layers: tuple[bool, ...] = ()  # one flag a layer; empty: none has a window
    attn_scale: float = 0.0  # multiplies q.k; 0 means head_dim ** -0.5
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # gemma3: norms after attention and after the MLP, before the residual
    embed_scale: float = 1.0  # gemma3: sqrt(hidden_size), rounded to the checkpoint's dtype by HF
    activation: Activation = "silu"
    tied_head: bool = True
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        return self.attn_scale or self.head_dim**-0.5

    def layer_window(self, layer: int) -> int | None:
        return self.window if self.windowed_layers and self.windowed_layers[layer] else None

    def layer_rope(self, layer: int) -> RopeConfig:
        if self.rope_local is not None and self.layer_window(layer) is not None:
            return self.rope_local
        return self.rope

    @property
    def num_params(self) -> int:
        """Weights of all matrices and norms; a tied head counts once."""
        return sum(rows * cols for rows, cols in tensor_shapes(self).values())


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Canonical tensor name -> (rows, cols) of everything the forward reads; vectors are (1, n)."""
    hidden, inter = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"embed": (config.vocab_size, hidden), "norm": (1, hidden)}
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        at = f"layers.{i}."
        shapes |= {
            at + "attn_norm": (1, hidden),
            at + "q": (q_rows, hidden),
            at + "k": (kv_rows, hidden),
            at + "v": (kv_rows, hidden),
            at + "o": (hidden, q_rows),
            at + "mlp_norm": (1, hidden),
            at + "gate": (inter, hidden),
            at + "up": (inter, hidden),
            at + "down": (hidden, inter),
        }
        if config.qkv_bias:
            shapes |= {at + "q_bias": (1, q_rows), at + "k_bias": (1, kv_rows), at + "v_bias": (1, kv_rows)}
        if config.qk_norm:
            shapes |= {at + "q_norm": (1, config.head_dim), at + "k_norm": (1, config.head_dim)}
        if config.post_norms:
            shapes |= {at + "post_attn_norm": (1, hidden), at + "post_mlp_norm": (1, hidden)}
    return shapes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs. Bytes are plain integers here; Engine also takes strings such as "2GiB". Times in seconds."""

    budget: int = 2 << 30  # bytes of weights
    kv_budget: int = 256 << 20  # bytes of KV pages
    host_budget: int = 0  # bytes of host memory for idle weights and for the pages of preempted requests
    threads: int | None = None  # CPU threads; None leaves torch's own setting
    pool_policy: PoolPolicy = "lru"
    ttl: float | None = None  # idle time after which an unpinned model leaves the device; None: never
    host_ttl: float | None = None  # and after which it leaves the host's memory
    weight_check: WeightCheck = "sampled"  # of what is loaded again, against the digests of the first time
    lane_policy: LanePolicy = "byte-drr"
    quantum: int = 8  # decode steps of one model before the lane looks at the others
    max_wait: float | None = None  # then a request is overtaken once at most; None: 12 swaps, at least 5 s; inf: never
    prefill_chunk: int = 512  # prompt tokens in one forward
    max_batch: int = 64  # sequences of one model in a decode step
    max_queue: int = 1024  # waiting requests
    preemption: Preemption = "swap"  # swap while host_budget has room, else compute again
    kv_borrows: bool = True  # where pages run short, they may take over the bytes of idle weights (on a CPU)
    draft_tokens: int = 4  # tokens a drafter proposes per round
    multi_model: bool = True  # drafting and sharing between models
    prefix_cache: bool = True  # keep the pages of prompts and outputs for those that begin alike
    prefix_budget: int | None = None  # bytes of KV pages it may hold; None: three quarters of kv_budget
    prefix_tokens: int | None = None  # tokens it may hold, beside the bytes; None: no bound
    prefix_eviction: Eviction = "lru"
    prefix_min_match: int = 8  # a shorter match is not worth the copy of a page
    prefix_flight: int = 32  # a prompt waits for another one's prefill if that saves at least so many tokens

    def __post_init__(self) -> None:
        for name, expected in _NAMED.items():
            if (value := getattr(self, name)) not in expected:
                raise InvalidRequest(f"EngineConfig.{name}={value!r}, expected one of {', '.join(expected)}")
        for name in ("multi_model", "prefix_cache", "kv_borrows"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"EngineConfig.{name} must be True or False, got {getattr(self, name)!r}")
        for name in _SECONDS:
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value >= 0):
                raise InvalidRequest(f"EngineConfig.{name} must be seconds from 0 on, or None, got {value!r}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not is_number(value, int):
                raise InvalidRequest(f"EngineConfig.{name} must be an integer, got {value!r}")
            if value < least:
                raise InvalidRequest(f"EngineConfig.{name} must be at least {least}, got {value}")
        if self.draft_tokens > MAX_DRAFT:
            raise InvalidRequest(f"EngineConfig.draft_tokens must be in 1..{MAX_DRAFT}, got {self.draft_tokens}")


_NAMED: dict[str, tuple[str, ...]] = {
    "prefix_eviction": EVICTIONS,
    "pool_policy": POOL_POLICIES,
    "lane_policy": LANE_POLICIES,
    "preemption": PREEMPTIONS,
    "weight_check": WEIGHT_CHECKS,
}
_SECONDS = ("ttl", "host_ttl", "max_wait")
_LEAST = {
    **dict.fromkeys(("budget", "kv_budget", "threads", "quantum", "prefill_chunk", "max_batch", "max_queue"), 1),
    **dict.fromkeys(("draft_tokens", "prefix_min_match", "prefix_flight"), 1),
    **dict.fromkeys(("host_budget", "prefix_budget", "prefix_tokens"), 0),
}
_OPTIONAL = ("threads", "prefix_budget", "prefix_tokens")


class Drafter(Protocol):
    """Something of the user's own that proposes tokens. Called by the lane, for which it must not wait."""

    def propose(self, tokens: Sequence[int], count: int) -> Iterable[int] | tuple[Iterable[int], Sequence[int]]:
        """At most `count` tokens that may come after `tokens`; or (ids, parents), a tree: parents[i] < i, -1: a root.

        An id that is no token ends what is drafted there. What it raises ends its request and no other.
        """


DrafterName: TypeAlias = str | Drafter


@dataclass(frozen=True, slots=True)
class Draft:
    """Who drafts for a request, and how much. Whatever is drafted, the tokens are those of plain decoding.

    by: "auto": whoever promises most tokens a second, by measured costs and acceptance, or nobody; the name of a hosted
        model; "twin": the model's own low-bit twin; "ngram": what followed the last tokens where they came before, in
        the request or in `references`; an object with `propose(tokens, count)` (see `Drafter`; what it raises ends the
        request); or a tuple or list of these, whose chains become one tree.
    tokens: the most that is drafted in a row; None: EngineConfig.draft_tokens (for "auto": four times as many).
    width: above 1, one model drafts a tree: at each node its likeliest next tokens, at most so many.
    nodes: of a tree, the most that are verified at once; None: three for each level.
    policy: "fixed": always `tokens`; "throttle": shorter while few are accepted, none after a while, and one token now
        and then to see; "gate": as far as this request bears out what others of the pair have shown.
    min_n, max_n: of "ngram" and "auto", the fewest and the most last tokens that have to agree, in 1..8.
    references: of "ngram" and "auto", texts to look in as well, as token ids: [tokenizer.encode(text), ..].
    """

    by: DrafterName | tuple[DrafterName, ...] = "auto"
    tokens: int | None = None
    width: int = 1
    nodes: int | None = None
    policy: DraftPolicy = "fixed"
    min_n: int = 2
    max_n: int = 5
    references: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.by, list):
            object.__setattr__(self, "by", tuple(self.by))
        object.__setattr__(self, "references", _texts(self.references))
        if not self.drafters or not all(map(_is_drafter, self.drafters)):
            raise InvalidRequest(
                f"Draft.by={brief(self.by)}, expected 'auto', 'ngram', 'twin', a model's name, an object with "
                "`propose`, or several of these"
            )
        if len(self.drafters) > 1 and "auto" in self.drafters:
            raise InvalidRequest(f"Draft.by={brief(self.by)}: 'auto' chooses by itself, expected it alone")
        if self.policy not in DRAFT_POLICIES:
            raise InvalidRequest(f"Draft.policy={brief(self.policy)}, expected one of {', '.join(DRAFT_POLICIES)}")
        for name, most in (("tokens", MAX_DRAFT), ("nodes", MAX_NODES), ("width", 16)):
            value = getattr(self, name)
            if not (value is None and name != "width") and not (is_number(value, int) and 1 <= value <= most):
                raise InvalidRequest(f"Draft.{name}={brief(value)}, expected a number in 1..{most}")
        if self.is_auto and (self.policy != "fixed" or self.nodes is not None):
            raise InvalidRequest("Draft.policy and Draft.nodes are for drafters that are named; 'auto' decides itself")
        if self.references and not (self.is_auto or "ngram" in self.drafters):
            raise InvalidRequest(f"Draft.references are for 'ngram' and 'auto', not for {brief(self.by)}")
        if not (is_number(self.min_n, int) and is_number(self.max_n, int) and 1 <= self.min_n <= self.max_n <= 8):
            raise InvalidRequest(
                f"Draft.min_n={brief(self.min_n)}, max_n={brief(self.max_n)}, expected 1 <= min_n <= max_n <= 8"
            )
        if len({one if isinstance(one, str) else id(one) for one in self.drafters}) < len(self.drafters):
            raise InvalidRequest(f"Draft.by={brief(self.by)} names a drafter twice")
        if self.width > 1 and (self.is_auto or len(self.drafters) > 1):
            raise InvalidRequest(
                f"Draft.width={self.width} by {brief(self.by)}: one model drafts a tree, expected its name"
            )

    @property
    def is_auto(self) -> bool:
        return self.drafters == ("auto",)

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        return self.by if isinstance(self.by, tuple) else (self.by,)


def _is_drafter(one: object) -> bool:
    return isinstance(one, str) or (hasattr(one, "propose") and not isinstance(one, type))


def _texts(given: object) -> tuple[tuple[int, ...], ...]:
    """Draft.references as tuples of ints."""
    with suppress(TypeError):
        return tuple(tuple(index(token) for token in text) for text in given)  # type: ignore[attr-defined]  # or TypeError
    raise InvalidRequest(f"Draft.references={brief(given)}, expected token ids of texts: [tokenizer.encode(text), ..]")


@dataclass(frozen=True, slots=True)
class DynamicPrecision:
    """Let the model's low-bit twin decode each step first, in the same pages; the model decodes where it is not sure.

    A step of the twin is kept if its largest logit leads the second by at least `min_margin` and has a probability of
    at least `min_prob`; with both 0, the default, every step is. The tokens are then not the model's own: they enter no
    prefix cache, and `verify_exact` refuses such outputs. It needs a twin (`add(.., twin="q4")`) that is in memory,
    else the model decodes; and nobody drafts.
    """

    min_margin: float = 0.0
    min_prob: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (("min_margin", float("inf")), ("min_prob", 1.0)):
            if not (is_number(value := getattr(self, name)) and 0.0 <= value <= most):
                raise InvalidRequest(f"DynamicPrecision.{name}={brief(value)}, expected a number in 0..{most:g}")


def is_number(value: object, kind: type | UnionType = int | float) -> bool:
    """A number that can be compared; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool) and value == value


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices that decide bits. Changing any of them changes the digest."""

    page_tokens: int = PAGE_TOKENS
    chunk_pages: int = 8
    k_block: int = 128
    segment_target: int = 264
    row_tile: int = 16
    key_rotation: str = "slot"
    sampling: str = "argmax, or Gumbel noise by splitmix64 of (seed, position, id); ties to the lowest id"

    def digest(self, **facts: str) -> str:
        """blake2b of the policy with what else decides bits: backend, scheme, threads, versions."""
        body = json.dumps({**asdict(self), **facts}, sort_keys=True).encode()
        return hashlib.blake2b(body, digest_size=16).hexdigest()


POLICY = Policy()


@dataclass(frozen=True, slots=True)
class KVKey:
    """Keys and values of equal tokens are interchangeable where all of this is equal; digests, but for the domain."""

    band: str  # embedding, all layers, and every scalar that enters them
    tokenizer: str  # id -> bytes
    rope: str
    policy: str  # POLICY with backend, threads, dtypes and versions
    domain: str  # whose tokens they are

    def differences(self, other: KVKey) -> list[str]:
        """Names of the fields that differ, in this order."""
        return [name for name in self.__slots__ if getattr(self, name) != getattr(other, name)]

    @property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()
