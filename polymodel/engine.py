"""Engine: the models, the arena and the lane behind a few verbs."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

import torch

from csrc_triton.cpu import release_threads
from polymodel.batch import Batch, check_size
from polymodel.checkpoint import Checkpoint, open_checkpoint, resolve
from polymodel.config import (
    DEFAULT_DOMAIN,
    LOW_BITS,
    PUBLIC_DOMAIN,
    Draft,
    DrafterName,
    DynamicPrecision,
    EngineConfig,
    KVKey,
    LowBit,
    ModelConfig,
    Weights,
    is_number,
)
from polymodel.control import CostTable
from polymodel.errors import (
    CorruptCheckpoint,
    InvalidRequest,
    NotExact,
    NotShareable,
    TooLarge,
    UnsupportedModel,
    brief,
)
from polymodel.events import Events, max_concurrent
from polymodel.kv import Arena
from polymodel.lane import Lane
from polymodel.ledger import Ledger, format_bytes, parse_bytes
from polymodel.output import Metrics, Output, Pieces, output_of
from polymodel.prefix import Lease, common_length
from polymodel.residency import Hosted, Progress, Residency
from polymodel.sample import Acceptance, Sampler, Sampling
from polymodel.schedule import check_weight
from polymodel.sequence import Context, Feed, LogitsProcessor
from polymodel.sequence import Sequence as Request
from polymodel.session import Session, check_ids, listed
from polymodel.share import Verdict, can_share
from polymodel.sim import H200, Hardware, Plan, plan
from polymodel.stop import StopStrings, checked_stops
from polymodel.tokenizer import Tokenizer


class Options(TypedDict, total=False):
    """What `Engine.submit`, which explains them, takes beside model and prompt; and so do the verbs made of it."""

    prompt_ids: Sequence[int] | None
    messages: Sequence[Mapping[str, str]] | None
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int
    acceptance: Acceptance
    stop_at_eos: bool
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    draft: Draft | DrafterName | tuple[DrafterName, ...] | None
    precision: DynamicPrecision | None
    domain: str
    priority: int
    deadline: float | None
    logits_processor: LogitsProcessor | None
    on_token: Callable[[int], None] | None


class Engine:
    """Hosts models under one byte budget and decodes one at a time.

    Its verbs may be called from any thread. Requests run in a thread of the engine's own, which is there while there
    is work; `close`, or leaving the engine's with-block, ends it.

    Args:
        device: "cpu", "cuda" or "cuda:1"; "auto" is the CPU until the kernels have been measured on a GPU.
        budget: bytes of weights in memory, a number or a string such as "2GiB".
        kv_budget: bytes of KV pages, reserved when the engine starts.
        host_budget: bytes of host memory for the weights of models that left the device, and for the pages of preempted
            requests. On a CPU it is the same memory, and comes on top of the budget.
        config: everything else; budgets given here stand over it. POLYMODEL=off in the environment turns multi_model
            off: the same outputs, without drafting or sharing between models.
        costs: for models, by name, a CostTable to go by instead of what is measured here.

    `table()` shows the models; `prefixes.stats` what the prefix cache holds and did; `ledger.of(kind)` bytes by owner,
    of the classes in `polymodel.ledger.CLASSES`; `events` what happened when.
    """

    def __init__(
        self,
        device: str = "auto",
        budget: int | str | None = None,
        kv_budget: int | str | None = None,
        host_budget: int | str | None = None,
        config: EngineConfig | None = None,
        costs: Mapping[str, CostTable] | None = None,
    ) -> None:
        self.device = _device(device)
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidRequest(f"config={brief(config)}, expected an EngineConfig, such as EngineConfig(max_batch=8)")
        self.config = config or EngineConfig()
        if os.environ.get("POLYMODEL", "").strip().lower() == "off":
            self.config = replace(self.config, multi_model=False)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        config = self.config
        self.events = Events()
        self.ledger = Ledger()
        weight_bytes = _bytes("budget", budget, config.budget)
        kv_bytes = _bytes("kv_budget", kv_budget, config.kv_budget)
        # memory of a CPU is there when it is touched, so that pages can take over what idle weights leave
        most = kv_bytes + weight_bytes if config.kv_borrows and self.device.type == "cpu" else kv_bytes
        self.arena = Arena(kv_bytes, device=self.device, max_bytes=min(most, max(kv_bytes, _physical_bytes())))
        self.residency = Residency(
            weight_bytes,
            self.arena,
            self.ledger,
            self.events,
            self.device,
            share=config.multi_model,
            host_budget=_bytes("host_budget", host_budget, config.host_budget),
            policy=config.pool_policy,
            ttl=config.ttl,
            host_ttl=config.host_ttl,
            weight_check=config.weight_check,
        )
        self.lane = Lane(config, self.residency, self.arena, self.events, _costs(costs))
        self.prefixes = self.lane.prefill.cache
        self._public: list[tuple[KVKey, list[int], Lease | None]] = []  # prefixes open to all

    # ---- models

    def add(
        self,
        name: str,
        source: str | Path | Checkpoint,
        *,
        weights: Weights = "file",
        twin: LowBit | None = None,
        pin: bool = False,
        lane_share: float = 1.0,
        ttl: float | None = None,
        progress: Progress | None = None,
    ) -> ModelHandle:
        """Host a model: a GGUF file, a safetensors folder, a pulled name, or an open checkpoint.

        weights: "file" keeps the checkpoint's own formats; "q8", "q4", "w8a8", "bf16" and "f32" convert.
        twin: host the same model in other weights as well, "q4", "q8" or "w8a8", as f"{name}:{twin}", such as
            "smol:q4". It drafts for this one in this one's own pages, so it has none and need not catch up; it is what
            `precision=` of a request lets decode. It goes when this one goes. Worth its bytes (see `table`) where its
            step is much cheaper. TooLarge unless the budget has room for both.
        lane_share: its part of the lane beside the other models', where lane_policy is "byte-drr".
        ttl: seconds of idleness after which it leaves the device, over EngineConfig.ttl.
        TooLarge, PinnedNoRoom and every checkpoint error leave the engine as it was.
        """
        self.lane.check_open()
        if not isinstance(pin, bool):
            raise InvalidRequest(f"pin={brief(pin)}, expected True or False")
        check_weight("lane_share", lane_share)
        if not isinstance(source, str | Path | Checkpoint):
            raise InvalidRequest(f"add: {brief(source)} is no model, expected a path, a name or an open checkpoint")
        if twin is not None and (twin not in LOW_BITS or twin == weights):
            raise InvalidRequest(
                f"twin={brief(twin)} of weights={weights!r}, expected another one of {', '.join(LOW_BITS)}, or None"
            )
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(resolve(source))
        try:
            with self.lane.exclusive():
                hosted = self.residency.sized(name, checkpoint, weights, ttl)
                hosted.owns_checkpoint = checkpoint is not source
                if twin is not None:  # refused before anything is read
                    self.residency.sized(f"{name}:{twin}", checkpoint, twin, ttl)
            self._bring_in(hosted, pin, lane_share, progress)
            if twin is not None:
                self._add_twin(hosted, twin, lane_share, progress)
        except BaseException:
            if checkpoint is not source:
                checkpoint.close()
            raise
        return self[name]

    def _add_twin(self, hosted: Hosted, weights: LowBit, lane_share: float, progress: Progress | None) -> None:
        """Without it the model does not stay either."""
        name = f"{hosted.name}:{weights}"
        try:
            with self.lane.exclusive():
                twin = self.residency.sized(name, hosted.checkpoint, weights, hosted.ttl)
                twin.owns_checkpoint = hosted.owns_checkpoint
            both = sum((hosted.sizes() | twin.sizes()).values())
            if both > self.budget:
                raise TooLarge(
                    f"{hosted.name!r} and its twin {name!r} take {both:,} bytes, the whole budget is {self.budget:,}"
                )
            self._bring_in(twin, False, lane_share, progress)
        except BaseException:
            hosted.owns_checkpoint = False  # whoever called closes it
            self.remove(hosted.name)
            raise
        hosted.twin = name

    def _bring_in(self, hosted: Hosted, pin: bool, lane_share: float, progress: Progress | None) -> None:
        """The lane goes on while the newcomer is read."""
        self.residency.compare(hosted)
        try:
            with self._settled():
                self.lane.check_open()
                load = self.residency.begin(hosted, pin)
            with suppress(CorruptCheckpoint, UnsupportedModel):  # whose first request says so; ids alone are taken
                hosted.vocab_digest  # noqa: B018  # with the tokenizer, made while the weights are read
            load.join(progress)
            with self.lane.exclusive():
                self.lane.check_open()
                self.residency.finish(load)
                self.lane.scheduler.set_weight(hosted.name, lane_share)
        except BaseException as error:
            with self.lane.exclusive():
                self.residency.abort(hosted, error)
            raise

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """The lane to oneself, and no model on its way in: what would wait for it does so while the lane goes on."""
        while True:
            self.residency.join()
            with self.lane.exclusive():
                if not self.residency.is_loading:
                    yield
                    return

    def __getitem__(self, name: str) -> ModelHandle:
        hosted = self.residency[_name(name)]
        return ModelHandle(hosted, self.lane.prefill.policy(hosted))

    def __contains__(self, name: str) -> bool:
        return _name(name) in self.residency.hosted

    def __iter__(self) -> Iterator[str]:
        """Names of the models."""
        return iter(self.residency.hosted)

    def __len__(self) -> int:
        return len(self.residency.hosted)

    def __bool__(self) -> bool:
        """An engine without models is one too."""
        return True

    def pin(self, name: str) -> None:
        """Keep a model on the device, loading it if it is not there, until `unpin`."""
        with self._settled():
            self.residency.set_pinned(_name(name), True)

    def unpin(self, name: str) -> None:
        """Let a model make room for others again; it stays while there is room."""
        with self.lane.exclusive():
            self.residency.set_pinned(_name(name), False)

    def unload(self, name: str) -> None:
        """Give a model's memory back; it loads again when it is asked for."""
        with self._settled():
            self.residency.unload(_name(name))

    def remove(self, name: str) -> None:
        """Forget a model and its twin; its requests are cancelled, its sessions' later verbs raise Forgotten."""
        with self._settled():
            twin = self.residency[_name(name)].twin
            gone = [one for one in (twin, name) if one in self.residency.hosted]
            for one in gone:
                self.residency.unload(one)  # or it is refused before anything is ended
            for one in gone:
                self.lane.remove(one)
                self.residency.remove(one)

    @property
    def budget(self) -> int:
        """Bytes of weights; some of them may be lent to KV pages (`residency.lent`)."""
        return self.residency.pool.budget + self.residency.lent

    @budget.setter
    def budget(self, size: int | str) -> None:
        """Shrinking gives up the coldest models; PinnedNoRoom changes nothing."""
        if size is None:
            raise InvalidRequest("budget=None, expected a number of bytes or a string such as '2GiB'")
        with self._settled():
            self.residency.resize(_bytes("budget", size, 0))

    # ---- requests

    def generate(self, model: str, prompt: str | None = None, **options: Unpack[Options]) -> Output:
        """Run one request to its end. Options as in `submit`."""
        _check_options("generate", options)
        request = self.submit(model, prompt, **options)
        try:
            self.wait(request)
        except BaseException:
            self.cancel(request)
            raise
        return self.output(request)

    def stream(self, model: str, prompt: str | None = None, **options: Unpack[Options]) -> Iterator[str]:
        """Pieces of text as they come; concatenated they are generate's text. Closing it cancels the request.

        The lane does not wait for whoever reads: pieces that were not read yet are kept. Options as in `submit`.
        """
        _check_options("stream", options)
        pieces = self._pieces(self.submit(model, prompt, **options))
        next(pieces)  # begun, so that closing it reaches the request even before the first piece
        return pieces

    async def agenerate(self, model: str, prompt: str | None = None, **options: Unpack[Options]) -> Output:
        """`generate` for asyncio; cancelling the task cancels the request."""
        _check_options("agenerate", options)
        request = self.submit(model, prompt, **options)
        try:
            await self._until(request, lambda: request.is_over)
        finally:
            self.lane.abandon(request)
        if request.error is not None:
            raise request.error
        return self.output(request)

    async def astream(self, model: str, prompt: str | None = None, **options: Unpack[Options]) -> AsyncIterator[str]:
        """`stream` for asyncio."""
        _check_options("astream", options)
        request = self.submit(model, prompt, **options)
        pieces = Pieces(request)
        try:
            while not pieces.is_over:
                await self._until(request, pieces.is_ready)
                for piece in pieces.take():
                    yield piece
            if request.error is not None:
                raise request.error
        finally:
            self.lane.abandon(request)

    def submit(
        self,
        model: str,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int = 0,
        acceptance: Acceptance = "identity",
        stop_at_eos: bool = True,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        draft: Draft | DrafterName | tuple[DrafterName, ...] | None = "auto",
        precision: DynamicPrecision | None = None,
        domain: str = DEFAULT_DOMAIN,
        priority: int = 0,
        deadline: float | None = None,
        logits_processor: LogitsProcessor | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Request:
        """Queue a request, which runs by itself; `wait`, `output` and `cancel` take it.

        Exactly one of prompt (plain text: special tokens in it are text), prompt_ids and messages (through the
        model's chat template).

        Args:
            temperature: 0.0 takes the likeliest token; else the logits are divided by it and one is drawn.
            top_k, top_p, min_p: draw among the likeliest k (0: all), the fewest whose probabilities reach p, those at
                least so probable as a part of the likeliest; in this order.
            repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output;
                presence_penalty and frequency_penalty are subtracted for tokens of the output, once and as often.
            logit_bias: token id -> added to its logit, before everything else.
            seed: what is drawn depends on it, the position and the logits alone: not on batch, drafts or preemption.
            acceptance: "identity": drafted or not, the tokens are the same; "rejection": standard rejection sampling of
                one drafter's chains, which accepts more, and promises the distribution only.
            stop: texts that end the request; the text ends before the first of them. stop_ids: tokens that do.
            draft: "auto": whoever promises most tokens a second, or nobody; the name of a hosted model of the same
                vocabulary, "twin", "ngram", several of these, or a Draft that says more; None: nobody. The tokens are
                the same.
            precision: let the model's twin decode where it is sure (see DynamicPrecision); the tokens are then not
                those of the model alone, and nobody drafts.
            domain: whose request it is; nothing cached passes from one domain to another. A front sets it from its
                caller's credentials.
            priority: larger goes first among this model's requests, and before other models' under
                lane_policy="priority"; the last in line is the first to be preempted.
            deadline: seconds from now; DeadlineExceeded if it passes before the last token.
            logits_processor: called with the tokens so far and the logits [vocab] float32 after them, gives logits.
            on_token: called with each token. Both are called by the lane and must not wait for it; what they raise
                ends this request and no other.
        """
        self.lane.check_open()
        hosted = self.residency[_name(model)]
        tokenizer = hosted.tokenizer  # a checkpoint without one is refused before any work
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias or {},
            seed=seed,
            acceptance=acceptance,
        )
        sampling.check_vocab(hosted.config.vocab_size)
        if not is_number(max_new_tokens, int) or max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens={brief(max_new_tokens)}, expected a number of at least 1")
        if not is_number(priority, int):
            raise InvalidRequest(f"priority={brief(priority)}, expected an integer")
        if deadline is not None and not is_number(deadline):
            raise InvalidRequest(f"deadline={brief(deadline)}, expected seconds from now, or None")
        if draft is not None and not isinstance(draft, Draft | tuple | list) and not hasattr(draft, "propose"):
            _name(
                draft, "draft", ", 'auto', 'ngram', 'twin', an object with `propose`, several of these, a Draft or None"
            )
        if precision is not None and not isinstance(precision, DynamicPrecision):
            raise InvalidRequest(f"precision={brief(precision)}, expected a DynamicPrecision, or None")
        for name, hook in (("logits_processor", logits_processor), ("on_token", on_token)):
            if hook is not None and not callable(hook):
                raise InvalidRequest(f"{name}={brief(hook)}, expected something to call, or None")
        ids = check_ids(_prompt_ids(hosted, prompt, prompt_ids, messages), hosted.config, 0, max_new_tokens)
        drafts = self.lane.drafting.resolve(draft if precision is None or draft != "auto" else None, hosted)
        if precision is not None:
            self._check_precision(hosted, drafts is not None)
        if sampling.acceptance == "rejection" and drafts is not None and drafts.makes_trees:
            raise InvalidRequest(f"draft={brief(draft)}: acceptance='rejection' takes chains of one drafter, no trees")
        ends = listed(stop_ids, "stop_ids are")
        request = Request(
            model=model,
            hosted=hosted,
            domain=check_domain(domain),
            tokens=ids,
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(check_ids(ends, hosted.config, 0) if ends else ())
            | frozenset(tokenizer.stop_ids if stop_at_eos else ()),
            stop=StopStrings(tokenizer, stops) if (stops := checked_stops(stop)) else None,
            sampler=Sampler(sampling, len(ids)),
            drafts=drafts,
            precision=precision,
            pages=self.lane.prefill.new_pages(model),
            priority=priority,
            deadline=math.inf if deadline is None else time.perf_counter() + deadline,
            logits_processor=logits_processor,
            on_token=on_token,
        )
        self.lane.submit(request)
        return request

    def _check_precision(self, hosted: Hosted, is_drafted: bool) -> None:
        if hosted.twin not in self.residency.hosted:
            raise InvalidRequest(
                f"precision: {hosted.name!r} has no low-bit twin, expected one to be added with it: add(.., twin='q4')"
            )
        if self.residency[hosted.twin].layout != hosted.layout:
            raise InvalidRequest(f"precision: {hosted.twin!r} stores keys and values otherwise than {hosted.name!r}")
        if is_drafted:
            raise InvalidRequest("precision= and draft=: give one of them; under dynamic precision nobody drafts")

    def run(self) -> None:
        """Wait until no request is left."""
        while requests := self.lane.requests:
            for request in requests:
                self.lane.wait(request)

    def wait(self, request: Request) -> None:
        """Wait until this request is over; raise what it failed with."""
        self.lane.wait(_request("wait", request))
        if request.error is not None:
            raise request.error

    def cancel(self, request: Request) -> None:
        """End a request at the lane's next step; what is over stays what it was."""
        self.lane.cancel(_request("cancel", request))

    def _pieces(self, request: Request) -> Iterator[str]:
        pieces = Pieces(request)
        try:
            yield ""
            while not pieces.is_over:
                self.lane.wait_until(request, pieces.is_ready)
                yield from pieces.take()
            if request.error is not None:
                raise request.error
        finally:
            self.lane.abandon(request)

    async def _until(self, request: Request, done: Callable[[], bool]) -> None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        release_threads()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(changed.set)

        with request.signal.listening(wake):
            while not done():
                await changed.wait()
                changed.clear()

    def output(self, request: Request) -> Output:
        """The result of a request that is over."""
        if not _request("output", request).is_over:
            raise InvalidRequest("output: the request is still running; wait for it first")
        return output_of(request, self.lane.prefill.facts(request.hosted))

    def verify_exact(self, output: Output) -> None:
        """Decode an output's request again, plainly and from nothing cached; NotExact at the first other token.

        InvalidRequest where no tokens were promised, as under dynamic precision and rejection sampling, and where
        machine, threads, torch or weights in its receipt are not those of now. A logits_processor is called again.
        """
        if not isinstance(output, Output):
            raise InvalidRequest(f"verify_exact: expected an output, as `generate` gives, got {brief(output)}")
        settings, facts = output.settings, self.receipt(output.model)
        if settings.precision is not None or settings.sampling.acceptance == "rejection":
            how = "dynamic precision" if settings.precision is not None else "acceptance='rejection'"
            raise InvalidRequest(f"verify_exact: the output was made with {how}, which promises no tokens")
        if other := [key for key in facts if output.receipt.get(key) != facts[key]]:
            raise InvalidRequest(
                f"verify_exact: {other[0]} is {facts[other[0]]!r}, was {output.receipt.get(other[0])!r}: other bits"
            )
        if not output.tokens:
            return
        domain = f"verify_exact {os.urandom(8).hex()}"
        with self.lane.exclusive():
            again = self.submit(
                output.model,
                prompt_ids=output.prompt_ids,
                max_new_tokens=len(output.tokens),
                draft=None,
                domain=domain,
                **settings.options(),
            )
            again.has_begun = True  # it takes nothing over, not even what is open to all
        try:
            self.wait(again)
        finally:
            self.cancel(again)
            self.drop_domain(domain)
        at = common_length(again.output, output.tokens)
        if at < len(output.tokens):
            found = again.output[at] if at < len(again.output) else f"the end ({again.finish_reason})"
            raise NotExact(
                f"token {at} of the output is {output.tokens[at]}, plain decoding of {output.model!r} gives {found}"
            )

    def receipt(self, model: str) -> dict[str, str]:
        """The facts that decide bits, and their digest."""
        return self.lane.prefill.facts(self.residency[_name(model)])

    def batch(self, model: str, size: int, *, domain: str = DEFAULT_DOMAIN) -> Batch:
        """`size` empty sequences in the caller's hands that prefill and decode together."""
        count = check_size(size)
        with self.lane.exclusive():
            self.lane.check_open()
            self.residency[_name(model)]
            return Batch([Session(self.lane, model, check_domain(domain)) for _ in range(count)])

    def session(self, model: str, *, prefix: Session | None = None, domain: str | None = None) -> Session:
        """A sequence in the caller's hands, empty or going on from another session's tokens.

        prefix: of a model that shares layers with this one, or of the same; what is shared is not computed again, as
        far as the hidden states were kept that the layers above go on from.
        NotShareable where they share no layer or the domains differ, Contaminated where the prefix is.
        """
        if prefix is not None and not isinstance(prefix, Session):
            raise InvalidRequest(f"prefix={brief(prefix)}, expected a session or None")
        self.lane.check_open()
        self.residency[_name(model)]
        if prefix is not None:
            return self._session_from(model, prefix, prefix.domain if domain is None else check_domain(domain))
        with self.lane.exclusive():
            return Session(self.lane, model, check_domain(DEFAULT_DOMAIN if domain is None else domain))

    def _session_from(self, model: str, prefix: Session, domain: str) -> Session:
        ours, theirs = self[model], self[prefix.model]
        verdict = can_share(replace(theirs, domain=prefix.domain), replace(ours, domain=domain))
        if not verdict:
            raise NotShareable(f"session({model!r}): nothing of {prefix.model!r} can be shared: {verdict.reason}")
        with self.lane.exclusive():
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

        def publish(lease: Lease | None) -> None:
            self._public.append((self.lane.prefill.key(model, PUBLIC_DOMAIN), ids, lease))

        self._cache("share_prefix", model, ids, PUBLIC_DOMAIN, publish)
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
        self._cache("warm", model, ids, check_domain(domain))
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
        with self.lane.exclusive():
            return self._forget_public(model, ids)

    def drop_domain(self, domain: str) -> int:
        """Free what is cached for a domain, and end its requests and sessions; cached tokens freed."""
        return self.lane.drop_domain(check_domain(domain))

    def _cache(
        self, verb: str, model: str, ids: list[int], domain: str, publish: Callable[[Lease | None], None] | None = None
    ) -> None:
        """Prefill a prefix for nobody yet. publish takes the lease that keeps it; without, it is the first to go."""
        if not self.config.prefix_cache:
            raise InvalidRequest(f"{verb}: nothing is cached with EngineConfig.prefix_cache=False")
        context = Context(model=model, domain=domain, tokens=ids, pages=self.lane.prefill.new_pages(model))
        feed = Feed(into=context, kind="prefill")
        try:
            self.lane.enter([feed])
            self.lane.wait_for([feed])
            with self.lane.exclusive():
                self.lane.prefill.keep(context, warm=publish is None)
                if publish is not None:
                    publish(context.lease)
                    context.lease = None
        finally:
            with self.lane.exclusive():
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
        hosted = self.residency[_name(model)]
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

    @property
    def costs(self) -> dict[str, CostTable]:
        """By model: seconds of a forward by tokens in flight, as far as they were measured until now."""
        with self.lane.exclusive():
            tables = self.lane.drafting.trials.costs.items()
            return {name: CostTable.of(table.as_dict()) for name, table in tables if table.is_known}

    def measure_costs(self, model: str, rows: Sequence[int] = (1, 2, 3, 5, 9, 17), repetitions: int = 5) -> CostTable:
        """Time forwards of so many rows now, while nothing else runs; the model's table."""
        counts = listed(rows, "measure_costs: the rows are", "numbers of rows")
        self.lane.refuse_in_step("measure_costs")
        with self.lane.exclusive():
            self.lane.check_open()
            self.lane.drafting.trials.measure(_name(model), counts, repetitions)
        return self.costs[model]

    def table(self) -> Table:
        """One row a model."""
        with self.lane.exclusive():
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
                    "state": self.residency.state(name),
                    "pinned": is_in and self.residency.pool[name].pinned,
                    "row_by_row": list(hosted.notes),
                    "shares": self._shares(hosted),
                    "twin": hosted.twin or "-",
                    "requests": sum(r.model == name for r in self.lane.requests),
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
        return max_concurrent(self.events.of("decode", "verify"))

    def plan(
        self, trace: Iterable[str | tuple[float, str]], budget: int | str | None = None, hardware: Hardware = H200
    ) -> Plan:
        """What serving this trace of model names would cost in misses and stall, simulated, and nothing is loaded.

        It begins with what is in memory now. budget: of weights, by default the engine's. hardware: what the seconds
        are computed from, by default a GPU's.
        """
        if not isinstance(hardware, Hardware):
            raise InvalidRequest(f"hardware={brief(hardware)}, expected a polymodel.sim.Hardware")
        with self.lane.exclusive():
            sizes, pool = self.residency.plan_pieces(), self.residency.pool
            there = sorted((name for name in sizes if name in pool), key=lambda name: pool[name].stamp)
        pinned = [name for name in there if pool[name].pinned]
        warm = [name for name in there if name not in pinned]
        budget = _bytes("budget", budget, self.budget)
        policy, host = self.config.pool_policy, self.residency.host_budget
        return plan(sizes, trace, budget, policy=policy, pinned=pinned, warm=warm, hardware=hardware, host_budget=host)

    def close(self) -> None:
        """Fail what is running and give the weights' memory back; the KV pages' goes with the engine."""
        self.lane.close()
        with self.lane.exclusive():
            self.prefixes.clear()
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

    def __repr__(self) -> str:
        where = "on the device" if self.hosted.model is not None else "not on the device"
        size = f"{self.config.num_layers} layers, {format_bytes(self.nbytes)}"
        return f"<model {self.name!r}: {self.config.arch}, {size}, {where}>"

    @property
    def kv_dtype(self) -> str:
        """What its keys and values are stored as."""
        return str(self.hosted.layout.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        """What the engine's verbs call it."""
        return self.hosted.name

    @property
    def config(self) -> ModelConfig:
        """Architecture and sizes, by the checkpoint."""
        return self.hosted.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Text <-> ids; UnsupportedModel or CorruptCheckpoint where the checkpoint has none that can be read."""
        return self.hosted.tokenizer

    @property
    def nbytes(self) -> int:
        """Of its weights on the device, with those that it shares."""
        return self.hosted.plan.nbytes

    @property
    def vocab_digest(self) -> str:
        """Equal for two models whose tokens are the same."""
        return self.hosted.vocab_digest

    @property
    def band_digests(self) -> tuple[str, ...]:
        """Digest of the embedding, then with each layer more."""
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


def _name(model: str, what: str = "model", otherwise: str = "") -> str:
    """The argument of a verb, if it is a name."""
    if isinstance(model, str):
        return model
    hint = f"; use {model.name!r}" if isinstance(model, ModelHandle) else ""
    got = f"got a {type(model).__name__}{hint}" if hint else f"got {brief(model)}"
    raise InvalidRequest(f"{what}: expected a model's name{otherwise}, {got}")


def _request(verb: str, request: Request) -> Request:
    if not isinstance(request, Request):
        raise InvalidRequest(f"{verb}: expected a request, as `submit` gives, got {brief(request)}")
    return request


def _check_options(verb: str, options: Options) -> None:
    if unknown := sorted(options.keys() - Options.__annotations__.keys()):
        raise TypeError(
            f"{verb}() got an unexpected option {unknown[0]!r}; there are {', '.join(Options.__annotations__)}"
        )


def _costs(costs: Mapping[str, CostTable] | None) -> Mapping[str, CostTable]:
    if costs is None:
        return {}
    if not isinstance(costs, Mapping) or not all(isinstance(table, CostTable) for table in costs.values()):
        raise InvalidRequest(f"costs={brief(costs)}, expected a CostTable for each model's name")
    return costs


def _device(name: str) -> torch.device:
    try:
        device = torch.device("cpu" if name == "auto" else name) if isinstance(name, str) else None
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device={brief(name)}, expected 'cpu', 'cuda', 'cuda:N' or 'auto'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(f"device={name!r}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")
    return device


def _physical_bytes() -> int:
    """Of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _bytes(name: str, size: int | str | None, default: int) -> int:
    if size is None:
        return default
    if not isinstance(size, str) and not is_number(size, int):
        raise InvalidRequest(f"{name}={brief(size)}, expected a number of bytes or a string such as '2GiB'")
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}") from None


def check_domain(domain: str) -> str:
    if not isinstance(domain, str) or not domain or domain == PUBLIC_DOMAIN:
        raise InvalidRequest(
            f"domain={brief(domain)}, expected a name; {PUBLIC_DOMAIN!r} is what share_prefix opened to all"
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
        if not _are_messages(messages):
            raise InvalidRequest(f'messages={brief(messages)}, expected a list of {{"role": ..., "content": ...}}')
        return hosted.tokenizer.apply_chat_template(messages, add_generation_prompt=is_asked)
    if not isinstance(prompt, str):
        raise InvalidRequest(f"the prompt is {brief(prompt)}, expected text; token ids are given as prompt_ids")
    return hosted.tokenizer.encode(prompt)


def _are_messages(messages: Sequence[Mapping[str, str]]) -> bool:
    """By their shape; the tokenizer looks at what is in them."""
    return (
        not isinstance(messages, str | bytes)
        and isinstance(messages, Sequence)
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages)
    )


__all__ = ["Engine", "Metrics", "ModelHandle", "Output", "Table", "Verdict"]
