"""Waiting prompts -> pages and first tokens, in chunks; and what a prompt takes over from what was computed before.

A prompt that begins like a cached one of its domain takes that one's pages over: no bytes move. Where a sibling has
cached more of it and the lower layers are equal, their keys and values are copied, the hidden states kept with the
sibling's pages enter the first layer that differs, and only the layers above run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import groupby
from weakref import WeakKeyDictionary

import torch

from polymodel.config import PAGE_TOKENS, POLICY, PUBLIC_DOMAIN, EngineConfig, KVKey
from polymodel.errors import Contaminated, KVFull
from polymodel.events import Events
from polymodel.kv import Arena, PageList
from polymodel.model import Model, Panel, backend_facts, forward
from polymodel.prefix import Match, PrefixCache, common_length
from polymodel.residency import Hosted, Residency
from polymodel.sequence import Context, Sequence, State, Work
from polymodel.share import kv_key


@dataclass(frozen=True, slots=True)
class Rows:
    """The next tokens of a context to go through a forward, from a layer on."""

    work: Work
    ids: list[int]
    first_layer: int

    @property
    def context(self) -> Context:
        return self.work.context

    @property
    def is_last(self) -> bool:
        return len(self.context.pages) + len(self.ids) == len(self.context.tokens)


def next_rows(work: Work, room: int) -> Rows:
    """At most `room` tokens; those with a sibling's lower layers go first, as long as the hidden states are there."""
    context = work.context
    done = len(context.pages)
    if done == len(context.tokens):  # interrupted before its logits were used: the last row gives them again
        context.pages.rollback(1)
        context.resume_until = 0
        done -= 1
    if done < context.resume_until:
        stop = min(context.resume_until, done + room)
        if context.pages.states_at(context.resume_layer, done, stop) is not None:
            return Rows(work, context.tokens[done:stop], context.resume_layer)
        context.resume_until = 0  # given up meanwhile, so all layers run
        context.pages.rollback(0)
    return Rows(work, context.tokens[done : done + room], 0)


class Prefill:
    """Brings prompts into pages, and looks up and keeps what can be shared."""

    def __init__(self, config: EngineConfig, residency: Residency, arena: Arena, events: Events) -> None:
        self.config = config
        self.residency = residency
        self.arena = arena
        self.events = events
        budget = arena.nbytes // 4 * 3 if config.prefix_budget is None else config.prefix_budget
        self.cache = PrefixCache(
            arena,
            max_bytes=budget,
            max_tokens=config.prefix_tokens,
            policy=config.prefix_eviction,
            min_match=config.prefix_min_match,
        )
        self.on_forward: Callable[[str, int, float], None] | None = None  # told a model, the tokens and their seconds
        self._policies: dict[tuple[torch.dtype, int], str] = {}  # by dtype of the pages and threads
        self._known: WeakKeyDictionary[Hosted, KVKey] = WeakKeyDictionary()
        self._proved: WeakKeyDictionary[Hosted, dict[int, str]] = WeakKeyDictionary()  # first layer -> `why_off`

    # ---- keys and lists

    def new_pages(self, name: str) -> PageList:
        hosted = self.residency[name]
        states = self.arena.state_layout(hosted.config.hidden_size, hosted.plan.dtype) if hosted.boundaries else None
        return PageList(self.arena, hosted.layout, hosted.boundaries, states)

    def key(self, name: str, domain: str) -> KVKey:
        """What a model's keys and values are cached under: every model has its own where nothing is shared."""
        hosted = self.residency[name]
        policy = self.policy(hosted)
        key = self._known.get(hosted)
        if key is None or key.policy != policy:
            key = self._known[hosted] = kv_key(hosted, policy, domain)
        band = key.band if self.config.multi_model else f"{key.band} of {name}"
        return replace(key, band=band, domain=domain)

    def facts(self, hosted: Hosted) -> dict[str, str]:
        """What decides a model's bits, and the digest of it and POLICY."""
        schemes = sorted({matrix.scheme for matrix in hosted.plan.matrices.values()})
        facts = backend_facts(self.residency.device, hosted.layout.dtype)
        facts |= {"schemes": ",".join(schemes + hosted.notes), "weights": hosted.plan.weights}
        facts["model"] = hosted.band_digests[-1]
        return facts | {"policy": POLICY.digest(**facts)}

    def policy(self, hosted: Hosted) -> str:
        """The digest of what computes, whichever model."""
        at = hosted.layout.dtype, torch.get_num_threads()
        if at not in self._policies:
            self._policies[at] = POLICY.digest(**backend_facts(self.residency.device, hosted.layout.dtype))
        return self._policies[at]

    def _keys(self, name: str, domain: str) -> list[KVKey]:
        """What a caller of the domain may read."""
        return [self.key(name, of) for of in dict.fromkeys((domain, PUBLIC_DOMAIN))]

    # ---- taking over

    def begin(self, context: Context) -> None:
        """Take over what is cached of the tokens, but for the last one's row, which gives the logits."""
        context.has_begun = True
        if self.config.prefix_cache and context.pages.clean == len(context.pages):
            self._take_pages(context)
            self._take_band(context)

    def _take_pages(self, context: Context) -> None:
        before = len(context.pages)
        match = self.cache.match(self._keys(context.model, context.domain), context.tokens[:-1])
        if match.length <= before:
            self._release(match)
            return
        context.pages.splice(match.pages, match.length)
        self.leave(context)
        context.lease = match.lease
        context.num_cached += match.length - before

    def _release(self, match: Match) -> None:
        if match.lease is not None:
            self.cache.release(match.lease)

    def leave(self, context: Context) -> None:
        """Give the context's lease back."""
        if context.lease is not None:
            self.cache.release(context.lease)
            context.lease = None

    def _take_band(self, context: Context) -> None:
        """From the sibling that saves most."""
        most = 0
        for name, layers in self._siblings(context.model):
            found = self.cache.peek(self._keys(name, context.domain), context.tokens)
            gain = found.length - len(context.pages)
            if gain >= self.config.prefix_min_match and gain * layers > most:
                most, match, partner, common = gain * layers, found, self.residency[name], layers
        if most:
            self.take_band(context, match, partner, common)

    def take_band(self, context: Context, match: Match, partner: Hosted, layers: int) -> None:
        """Take the lower layers of the matched tokens over, as far as the partner's hidden states were kept.

        Where there is no room for the copies beside what they are made from, nothing is taken over.
        """
        self.arena.share(match.pages)  # what is reserved for the copies reclaims other pages than these
        try:
            if self._is_proved(context, match, partner, layers):
                context.resume_until = context.pages.take_band(match.pages, partner.layout, layers, match.length)
                context.resume_layer = layers
        except KVFull:
            context.resume_until = 0
        finally:
            self.arena.release(partner.layout, match.pages)

    def take(self, context: Context, other: Context) -> None:
        """All that an empty context can take over from another one with the same tokens."""
        if other.pages.clean < len(other.tokens):
            raise Contaminated(f"the prefix is clean up to token {other.pages.clean} of {len(other.tokens)} only")
        pages, length = other.pages.pages, len(other.tokens)
        if self.key(context.model, context.domain) == self.key(other.model, other.domain):
            context.pages.splice(pages[: -(-length // PAGE_TOKENS)], length)
            context.num_cached += length
            return
        if self.config.prefix_cache:
            self._take_pages(context)
        if layers := dict(self._siblings(context.model)).get(other.model, 0):
            self.take_band(context, Match(length, pages, None, None), self.residency[other.model], layers)

    def _siblings(self, name: str) -> list[tuple[str, int]]:
        """Models of other upper layers, and how many lower ones they have in common; equal models share a key."""
        hosted = self.residency[name]
        return [
            (partner, layers)
            for partner, layers in hosted.partners.items()
            if layers < max(hosted.config.num_layers, self.residency[partner].config.num_layers)
        ]

    def _is_proved(self, context: Context, match: Match, partner: Hosted, layers: int) -> bool:
        """Whether resuming gives this model's own bits here: tried once a model and layer, on the first page."""
        proved = self._proved.setdefault(self.residency[context.model], {})
        if layers not in proved:
            ids = context.tokens[: min(PAGE_TOKENS, match.length)]
            direct, resumed = self.new_pages(context.model), self.new_pages(context.model)
            try:
                if resumed.take_band(match.pages, partner.layout, layers, len(ids)) < len(ids):
                    return False
                with self.residency.lease(context.model) as model, self.events.span("prove", context.model):
                    above = forward(model, self.arena, Panel([resumed], [ids], first_layer=layers))
                    whole = forward(model, self.arena, Panel([direct], [ids]))
                same = torch.equal(whole, above) and torch.equal(direct.dump(), resumed.dump())
                proved[layers] = "" if same else f"resuming at layer {layers} changes bits on this machine"
            finally:
                direct.free()
                resumed.free()
        return not proved[layers]

    def why_off(self, name: str, layers: int) -> str:
        """Why no prompt of a model takes over so many lower layers, "" if they do or none has tried."""
        return self._proved.get(self.residency[name], {}).get(layers, "")

    # ---- keeping

    def keep(self, context: Context, stop: int | None = None, *, warm: bool = False) -> None:
        """Cache the clean tokens before `stop`, by default all; only whole pages while more are on their way."""
        stop = len(context.tokens) if stop is None else stop
        count = min(context.pages.clean, stop)
        if count < stop:
            count -= count % PAGE_TOKENS
        if not self.config.prefix_cache or count <= 0:
            return
        pages = context.pages.pages[: -(-count // PAGE_TOKENS)]
        key = self.key(context.model, context.domain)
        context.lease = self.cache.insert(
            key, context.pages.layout, context.tokens[:count], pages, context.lease, warm=warm
        )

    def retire(self, sequence: Sequence) -> None:
        """Keep what a request computed, if all went well, and give its lease back."""
        if sequence.error is None and sequence.has_begun:
            self.keep(sequence, len(sequence.tokens) - 1)  # the pending token is in the pages only if it was drafted
        self.leave(sequence)

    def drop(self, context: Context) -> None:
        """Give the lease and the pages back."""
        self.leave(context)
        context.pages.free()
        context.resume_until = 0

    def forget(self, name: str, tokens: Seq[int], domain: str, keep: int = 0) -> int:
        """Strike everything that begins with these tokens out of the cache, of all models with this vocabulary.

        What leads to them goes as far as nothing else needs it, but for the first `keep` tokens.
        """
        tokenizer = self.key(name, domain).tokenizer
        keys = [key for key in self.cache.keys if (key.tokenizer, key.domain) == (tokenizer, domain)]
        return sum(self.cache.forget(key, tokens, keep) for key in keys)

    # ---- the lane's part

    def next_chunk(self, waiting: Seq[Work], live: Seq[Work], room: int) -> list[Rows]:
        """The next prompt tokens of the first in line, at most `room` in all.

        A prompt whose beginning another one is just computing waits for that one.
        """
        chunk: list[Rows] = []
        leaders = [s for s in live if isinstance(s, Sequence) and len(s.pages) and s.state is State.WAITING]
        for work in waiting:
            if room <= 0:
                break
            context = work.context
            if not context.has_begun:
                if self._waits(context, leaders):
                    continue
                self.begin(context)
                if isinstance(work, Sequence):
                    leaders.append(work)
            rows = next_rows(work, room)
            chunk.append(rows)
            room -= len(rows.ids)
        # a later one's pages may have cost an earlier one its hidden states
        return [next_rows(r.work, len(r.ids)) if r.first_layer else r for r in chunk]

    def _waits(self, context: Context, leaders: Seq[Context]) -> bool:
        """Whether a prompt on its way will have cached more of these tokens than is cached now."""
        flight = self.config.prefix_flight
        cached: dict[str, int] = {}  # by model
        for leader in leaders if self.config.prefix_cache else ():
            there = len(leader.pages) // PAGE_TOKENS * PAGE_TOKENS  # cached already
            most = min(len(context.tokens), len(leader.tokens)) - there
            if leader.domain != context.domain or most < flight or not self._helps(leader, context):
                continue
            common = common_length(context.tokens, leader.tokens)
            if common - there < flight:
                continue
            if leader.model not in cached:
                keys = self._keys(leader.model, leader.domain)
                cached[leader.model] = self.cache.peek(keys, context.tokens).length
            if common - cached[leader.model] >= flight:
                return True
        return False

    def _helps(self, leader: Context, context: Context) -> bool:
        """Whether one's pages are of use to the other: those of an equal model, or of a sibling that keeps states."""
        if self.key(leader.model, leader.domain) == self.key(context.model, context.domain):
            return True
        return dict(self._siblings(context.model)).get(leader.model, 0) in leader.pages.keep

    def run(self, model: Model, name: str, chunk: Seq[Rows]) -> Iterator[tuple[list[Work], torch.Tensor]]:
        """The forwards of a chunk; after each, whose prompts are complete, and their logits [n, vocab].

        Rows go together that begin at one layer.
        """
        for first, group in groupby(sorted(chunk, key=lambda r: -r.first_layer), key=lambda r: r.first_layer):
            rows = [r for r in group if not r.work.is_over]  # a hook may end others
            if not rows:
                continue
            complete = [i for i, r in enumerate(rows) if r.is_last]
            wanted = "last" if complete else "none"
            panel = Panel([r.context.pages for r in rows], [r.ids for r in rows], wanted, first)
            tokens, layers = sum(len(r.ids) for r in rows), model.config.num_layers - first
            start = time.perf_counter()
            with self.events.span("prefill", name, tokens=tokens, sequences=len(rows), layers=layers):
                logits = forward(model, self.arena, panel)
            if self.on_forward is not None and not first and not logits.is_cuda:  # there it is only launched yet
                self.on_forward(name, tokens, time.perf_counter() - start)
            for r in rows:
                r.context.num_token_layers += len(r.ids) * layers
                r.context.num_resumed += len(r.ids) if first else 0
            yield [rows[i].work for i in complete], logits[complete]
            for r in rows:
                if isinstance(r.work, Sequence) and not r.work.is_over:
                    self.keep(r.work, r.work.num_prompt)
