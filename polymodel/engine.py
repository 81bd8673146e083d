"""Engine: the models, the arena and the lane behind a few verbs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from polymodel.checkpoint import Checkpoint, open_checkpoint, resolve
from polymodel.config import DEFAULT_DOMAIN, PUBLIC_DOMAIN, EngineConfig, KVKey, ModelConfig, Weights
from polymodel.control import pick_drafter
from polymodel.errors import InvalidRequest, NotShareable
from polymodel.events import Events, max_concurrent
from polymodel.kv import Arena, PageList
from polymodel.lane import Lane
from polymodel.ledger import Ledger, format_bytes, parse_bytes
from polymodel.prefix import Lease, common_length
from polymodel.residency import Hosted, Progress, Residency
from polymodel.sequence import Context
from polymodel.sequence import Sequence as Request
from polymodel.session import Session, check_ids
from polymodel.share import Verdict, can_share
from polymodel.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a request cost. Times in seconds; counts of tokens."""

    time_to_first_token: float
    decode_seconds: float  # first token to last
    tokens_per_second: float  # after the first token; 0.0 if there was only one
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt: their pages were taken over
    num_resumed_tokens: int  # of the prompt: a sibling's lower layers were taken over
    num_prefill_token_layers: int  # tokens prefilled, times the layers that each went through
    num_output_tokens: int
    num_target_forwards: int  # after the prefill
    num_drafted: int
    num_accepted: int
    draft_acceptance_rate: float
    mean_acceptance_length: float  # tokens a target forward yielded
    acceptance_histogram: tuple[int, ...]  # rounds by number of accepted tokens


@dataclass(frozen=True, slots=True)
class Output:
    model: str
    prompt_ids: list[int]
    tokens: list[int]  # the stop token included
    text: str
    finish_reason: str  # "stop" or "length"
    metrics: Metrics
    receipt: dict[str, str]  # what decided the bits


class Engine:
    """Hosts models under one byte budget and decodes one at a time.

    Args:
        device: "cpu", "cuda" or "cuda:1"; "auto" is the CPU until the kernels have been measured on a GPU.
        budget: bytes of weights in memory, a number or a string such as "2GiB".
        kv_budget: bytes of KV pages, reserved when the engine starts.
        config: everything else; budget and kv_budget given here stand over it. POLYMODEL=off in the environment
            turns multi_model off: the same outputs, without drafting or sharing between models.

    `table()` shows the models; `prefixes.stats` what the prefix cache holds and did; `ledger.of(kind)` bytes by owner,
    of "weights", "kv", "band_states" and "host_kv"; `events` what happened when.
    """

    def __init__(
        self,
        device: str = "auto",
        budget: int | str | None = None,
        kv_budget: int | str | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.device = _device(device)
        self.config = config or EngineConfig()
        if os.environ.get("POLYMODEL", "").strip().lower() == "off":
            self.config = replace(self.config, multi_model=False)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self.events = Events()
        self.ledger = Ledger()
        self.arena = Arena(_bytes("kv_budget", kv_budget, self.config.kv_budget), device=self.device)
        self.ledger.set("kv", "arena", self.arena.nbytes)
        weight_bytes = _bytes("budget", budget, self.config.budget)
        share = self.config.multi_model
        self.residency = Residency(weight_bytes, self.arena, self.ledger, self.events, self.device, share=share)
        self.lane = Lane(self.config, self.residency, self.arena, self.events)
        self.prefixes = self.lane.prefill.cache
        self.prefixes.on_change = self.arena.on_states = self._account
        self._public: list[tuple[KVKey, list[int], Lease | None]] = []  # prefixes open to all

    def _account(self) -> None:
        """What the arena's bytes are for."""
        cached, states = self.prefixes.nbytes, self.arena.state_bytes
        self.ledger.set("kv", "prefixes", cached)
        self.ledger.set("kv", "arena", self.arena.nbytes - cached - states)
        self.ledger.set("band_states", "arena", states)

    # ---- models

    def add(
        self,
        name: str,
        source: str | Path | Checkpoint,
        *,
        weights: Weights = "file",
        pin: bool = False,
        progress: Progress | None = None,
    ) -> ModelHandle:
        """Host a model: a GGUF file, a safetensors folder, a pulled name, or an open checkpoint.

        weights: "file" keeps the checkpoint's own formats; "q8", "q4", "w8a8", "bf16" and "f32" convert.
        TooLarge, PinnedNoRoom and every checkpoint error leave the engine as it was.
        """
        with self.lane.lock:
            self.lane.check_open()
            checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(resolve(source))
            try:
                self.residency.add(name, checkpoint, weights, pin, progress)
            except BaseException:
                if checkpoint is not source:
                    checkpoint.close()
                raise
        return self[name]

    def __getitem__(self, name: str) -> ModelHandle:
        hosted = self.residency[name]
        return ModelHandle(hosted, self.lane.prefill.policy(hosted))

    def __contains__(self, name: str) -> bool:
        return name in self.residency.hosted

    def pin(self, name: str) -> None:
        with self.lane.lock:
            self.residency.set_pinned(name, True)

    def unpin(self, name: str) -> None:
        with self.lane.lock:
            self.residency.set_pinned(name, False)

    def unload(self, name: str) -> None:
        """Give a model's memory back; it loads again when it is asked for."""
        with self.lane.lock:
            self.residency.unload(name)

    def remove(self, name: str) -> None:
        """Forget a model; its running requests are cancelled, its sessions' later verbs raise Forgotten."""
        with self.lane.lock:
            self.residency[name]
            self.lane.remove(name)
            self.residency.remove(name)

    @property
    def budget(self) -> int:
        return self.residency.pool.budget

    @budget.setter
    def budget(self, size: int | str) -> None:
        """Shrinking gives up the coldest models; PinnedNoRoom changes nothing."""
        with self.lane.lock:
            self.residency.resize(_bytes("budget", size, 0))

    # ---- requests

    def generate(self, model: str, prompt: str | None = None, **options: Any) -> Output:
        """Run one request to its end. Options as in `submit`."""
        request = self.submit(model, prompt, **options)
        self.wait(request)
        return self.output(request)

    def stream(self, model: str, prompt: str | None = None, **options: Any) -> Iterator[str]:
        """Pieces of text as they come; concatenated they are generate's text. Closing it cancels the request."""
        pieces = self._pieces(self.submit(model, prompt, **options))
        next(pieces)  # begun, so that closing it reaches the request even before the first piece
        return pieces

    def submit(
        self,
        model: str,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        stop_at_eos: bool = True,
        draft: str | None = "auto",
        domain: str = DEFAULT_DOMAIN,
    ) -> Request:
        """Queue a request; `wait`, `output` and `run` bring it on.

        Exactly one of prompt (plain text: special tokens in it are text), prompt_ids and messages (through the
        model's chat template). draft: another hosted model of the same vocabulary, None, or "auto", which does not
        draft in this version. domain: whose
        request it is; nothing cached passes from one domain to another. A front sets it from its caller's credentials.
        """
        self.lane.check_open()
        hosted = self.residency[model]
        tokenizer = hosted.tokenizer  # a checkpoint without one is refused before any work
        if temperature != 0.0:
            raise InvalidRequest(f"temperature={temperature}: this version decodes greedily, expected 0.0")
        if max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens={max_new_tokens}, expected at least 1")
        ids = check_ids(_prompt_ids(hosted, prompt, prompt_ids, messages), hosted.config, 0, max_new_tokens)
        drafter = pick_drafter(draft, model, self.residency, self.config.multi_model)
        request = Request(
            model=model,
            domain=check_domain(domain),
            tokens=ids,
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(tokenizer.stop_ids) if stop_at_eos else frozenset(),
            pages=self.lane.prefill.new_pages(model),
            drafter=drafter,
            draft_pages=PageList(self.arena, self.residency[drafter].layout) if drafter else None,
        )
        self.lane.submit(request)
        return request

    def run(self) -> None:
        """Work until no request is left."""
        while self.lane.turn():
            pass

    def wait(self, request: Request) -> None:
        """Work until this request is over; raise what it failed with."""
        while not request.is_over:
            self.lane.turn()
        if request.error is not None:
            raise request.error

    def _pieces(self, request: Request) -> Iterator[str]:
        text = self.residency[request.model].tokenizer.decode_stream(continues=True)
        sent = 0
        try:
            yield ""
            while True:
                is_over = request.is_over  # before looking at the tokens: none come after it
                shown = _shown(request)
                for token in shown[sent:]:
                    if piece := text.push(token):
                        yield piece
                sent = len(shown)
                if is_over:
                    break
                if sent == len(_shown(request)):
                    self.lane.turn()
            if request.error is not None:
                raise request.error
            if piece := text.flush():
                yield piece
        finally:
            self.lane.cancel(request)

    def output(self, request: Request) -> Output:
        """The result of a request that is over."""
        if not request.is_over:
            raise InvalidRequest("output: the request is still running; wait for it first")
        hosted = self.residency[request.model]
        return Output(
            model=request.model,
            prompt_ids=request.tokens[: request.num_prompt],
            tokens=request.output,
            text=_text(hosted.tokenizer, _shown(request)),
            finish_reason=request.finish_reason,
            metrics=_metrics(request),
            receipt=self.receipt(request.model),
        )

    def receipt(self, model: str) -> dict[str, str]:
        """The facts that decide bits, and their digest."""
        return self.lane.prefill.facts(model)

    def session(self, model: str, *, prefix: Session | None = None, domain: str | None = None) -> Session:
        """A sequence in the caller's hands, empty or going on from another session's tokens.

        prefix: of a model that shares layers with this one, or of the same; what is shared is not computed again, as
        far as the hidden states were kept that the layers above go on from.
        NotShareable where they share no layer or the domains differ, Contaminated where the prefix is.
        """
        if prefix is not None and not isinstance(prefix, Session):
            raise InvalidRequest(f"prefix={prefix!r}, expected a session or None")
        with self.lane.lock:
            self.lane.check_open()
            self.residency[model]
            if prefix is None:
                return Session(self.lane, model, check_domain(DEFAULT_DOMAIN if domain is None else domain))
            return self._session_from(model, prefix, prefix.domain if domain is None else check_domain(domain))

    def _session_from(self, model: str, prefix: Session, domain: str) -> Session:
        ours, theirs = self[model], self[prefix.model]
        verdict = can_share(replace(theirs, domain=prefix.domain), replace(ours, domain=domain))
        if not verdict:
            raise NotShareable(f"session({model!r}): nothing of {prefix.model!r} can be shared: {verdict.reason}")
        session = Session(self.lane, model, domain)
        try:
            session.continue_from(prefix)
        except BaseException:
            session.close()
            raise
        return session

    # ---- prefixes

    def share_prefix(
        self,
        model: str,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
    ) -> int:
        """Open a prefix to all domains and keep it cached; its tokens.

        It stays until `forget` with domain="*". Only what an operator declares passes between domains.
        """
        ids = self._prefix_ids(model, prompt, prompt_ids, messages)
        with self.lane.lock:
            lease = self._cache("share_prefix", model, ids, PUBLIC_DOMAIN)
            self._public.append((self.lane.prefill.key(model, PUBLIC_DOMAIN), ids, lease))
        return len(ids)

    def warm(
        self,
        model: str,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        domain: str = DEFAULT_DOMAIN,
    ) -> int:
        """Prefill a prompt that may be asked for, and cache it as the first to go; its tokens."""
        ids = self._prefix_ids(model, prompt, prompt_ids, messages, is_asked=True)
        with self.lane.lock:
            self._cache("warm", model, ids, check_domain(domain), warm=True)
        return len(ids)

    def forget(
        self,
        model: str,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        domain: str = DEFAULT_DOMAIN,
    ) -> int:
        """Strike a prefix out of the cache, and whatever begins with it, cached or live; cached tokens freed.

        It holds for all models of this vocabulary. Requests fail with Forgotten, and so do the later verbs of sessions.
        Tokens are compared, not characters: a text that ends within a token of what is cached is not its prefix.
        """
        ids = self._prefix_ids(model, prompt, prompt_ids, messages)
        if domain != PUBLIC_DOMAIN:
            return self.lane.forget(model, ids, check_domain(domain))
        with self.lane.lock:
            return self._forget_public(model, ids)

    def drop_domain(self, domain: str) -> int:
        """Free what is cached for a domain, and end its requests and sessions; cached tokens freed."""
        return self.lane.drop_domain(check_domain(domain))

    def _cache(self, verb: str, model: str, ids: list[int], domain: str, warm: bool = False) -> Lease | None:
        """Prefill a prefix for nobody yet; the lease that keeps it cached."""
        if not self.config.prefix_cache:
            raise InvalidRequest(f"{verb}: nothing is cached with EngineConfig.prefix_cache=False")
        context = Context(model=model, domain=domain, tokens=ids, pages=self.lane.prefill.new_pages(model))
        try:
            self.lane.extend(context, "prefill")
            self.lane.prefill.keep(context, warm=warm)
            lease, context.lease = context.lease, None
            return lease
        finally:
            self.lane.prefill.drop(context)

    def _prefix_ids(
        self,
        model: str,
        prompt: str | None,
        prompt_ids: Sequence[int] | None,
        messages: Sequence[Mapping[str, str]] | None,
        is_asked: bool = False,
    ) -> list[int]:
        """The tokens of a prefix; is_asked: with the header of the answer, as the request itself will have it."""
        self.lane.check_open()
        hosted = self.residency[model]
        return check_ids(_prompt_ids(hosted, prompt, prompt_ids, messages, is_asked), hosted.config, 0)

    def _forget_public(self, model: str, ids: list[int]) -> int:
        """Other public prefixes stay, with leases on what is left of their edges."""
        tokenizer, kept = self.lane.prefill.key(model, PUBLIC_DOMAIN).tokenizer, []
        for key, tokens, lease in self._public:
            if lease is not None:
                self.prefixes.release(lease)
            if key.tokenizer != tokenizer or tokens[: len(ids)] != ids:
                kept.append((key, tokens))
        keep = max((common_length(ids, tokens) for _, tokens in kept), default=0)
        freed = self.lane.forget(model, ids, PUBLIC_DOMAIN, keep)
        self._public = [(key, tokens, self.prefixes.hold(key, tokens)) for key, tokens in kept]
        return freed

    # ---- what there is

    def table(self) -> Table:
        """One row a model."""
        with self.lane.lock:
            return self._table()

    def _table(self) -> Table:
        rows = []
        for name, hosted in self.residency.hosted.items():
            is_in = hosted.model is not None
            schemes = sorted({m.scheme for m in hosted.plan.matrices.values()})
            rows.append(
                {
                    "model": name,
                    "arch": hosted.config.arch,
                    "layers": hosted.config.num_layers,
                    "params": hosted.config.num_params,
                    "weights": hosted.plan.weights,
                    "computed": "+".join(schemes),
                    "bytes": hosted.plan.nbytes,
                    "shared_bytes": self.residency.shared_bytes(name),
                    "state": "memory" if is_in else "disk",
                    "pinned": is_in and self.residency.pool[name].pinned,
                    "row_by_row": list(hosted.notes),
                    "shares": self._shares(hosted),
                    "requests": sum(r.model == name for r in self.lane.live),
                }
            )
        return Table(rows)

    def _shares(self, hosted: Hosted) -> list[str]:
        """Lower layers in common with other models, or why they are not used."""
        why_off = self.lane.prefill.why_off
        return [
            f"{layers} with {partner}" + (f" (off: {why})" if (why := why_off(hosted.name, layers)) else "")
            for partner, layers in hosted.partners.items()
        ]

    def max_concurrent_decode(self) -> int:
        """Decode steps that overlapped in time, from the recorded intervals."""
        return max_concurrent(self.events.of("decode"))

    def close(self) -> None:
        """Fail what is running, give all memory back."""
        self.lane.close()
        with self.lane.lock:
            for name in list(self.residency.hosted):
                self.residency.remove(name)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ModelHandle:
    """What `eng[name]` shows of a hosted model."""

    hosted: Hosted
    policy: str  # digest of POLICY and what computes
    domain: str = DEFAULT_DOMAIN

    @property
    def kv_dtype(self) -> str:
        return str(self.hosted.layout.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        return self.hosted.name

    @property
    def config(self) -> ModelConfig:
        return self.hosted.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self.hosted.tokenizer

    @property
    def nbytes(self) -> int:
        return self.hosted.plan.nbytes

    @property
    def vocab_digest(self) -> str:
        return self.hosted.vocab_digest

    @property
    def band_digests(self) -> tuple[str, ...]:
        return self.hosted.band_digests


@dataclass(frozen=True, slots=True)
class Table:
    """Rows as dicts; printed, a table."""

    rows: list[dict[str, Any]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no models"
        cells = [[key.upper() for key in self.rows[0]]]
        for row in self.rows:
            sizes = {name: format_bytes(row[name]) for name in ("bytes", "shared_bytes")}
            shown = row | sizes | {"params": f"{row['params'] / 1e6:.0f}M"}
            cells.append([", ".join(v) or "-" if isinstance(v, list) else str(v) for v in shown.values()])
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device("cpu" if name == "auto" else name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device={name!r}, expected 'cpu', 'cuda', 'cuda:N' or 'auto'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(f"device={name!r}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")
    return device


def _bytes(name: str, size: int | str | None, default: int) -> int:
    if size is None:
        return default
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}") from None


def check_domain(domain: str) -> str:
    if not isinstance(domain, str) or not domain or domain == PUBLIC_DOMAIN:
        raise InvalidRequest(
            f"domain={domain!r}, expected a name; {PUBLIC_DOMAIN!r} is what share_prefix opened to all"
        )
    return domain


def _prompt_ids(
    hosted: Hosted,
    prompt: str | None,
    prompt_ids: Sequence[int] | None,
    messages: Sequence[Mapping[str, str]] | None,
    is_asked: bool = True,
) -> Sequence[int]:
    """is_asked: of messages, with the header of the answer."""
    given = [
        name
        for name, value in (("prompt", prompt), ("prompt_ids", prompt_ids), ("messages", messages))
        if value is not None
    ]
    if len(given) != 1:
        raise InvalidRequest(f"expected exactly one of prompt, prompt_ids and messages, got {given or 'none'}")
    if prompt_ids is not None:
        return prompt_ids
    if messages is not None:
        return hosted.tokenizer.apply_chat_template(messages, add_generation_prompt=is_asked)
    if not isinstance(prompt, str):
        raise InvalidRequest(f"the prompt is {prompt!r}, expected text; token ids are given as prompt_ids")
    return hosted.tokenizer.encode(prompt)


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What streaming these ids would have shown."""
    stream = tokenizer.decode_stream(continues=True)
    return "".join(map(stream.push, ids)) + stream.flush()


def _shown(request: Request) -> list[int]:
    """Output tokens without the stop token that ended them."""
    output = request.output
    return output[:-1] if output and output[-1] in request.stop_ids else output


def _metrics(request: Request) -> Metrics:
    count = len(request.output)
    seconds = max(request.finished - request.first_token, 0.0) if request.first_token else 0.0
    forwards = request.num_forwards
    return Metrics(
        time_to_first_token=(request.first_token or time.perf_counter()) - request.submitted,
        decode_seconds=seconds,
        tokens_per_second=(count - 1) / seconds if count > 1 and seconds else 0.0,
        num_prompt_tokens=request.num_prompt,
        num_cached_tokens=request.num_cached,
        num_resumed_tokens=request.num_resumed,
        num_prefill_token_layers=request.num_token_layers,
        num_output_tokens=count,
        num_target_forwards=forwards,
        num_drafted=request.num_drafted,
        num_accepted=request.num_accepted,
        draft_acceptance_rate=request.num_accepted / request.num_drafted if request.num_drafted else 0.0,
        mean_acceptance_length=(count - 1) / forwards if forwards else 0.0,
        acceptance_histogram=tuple(request.acceptance_histogram),
    )


__all__ = ["Engine", "Metrics", "ModelHandle", "Output", "Table", "Verdict"]
