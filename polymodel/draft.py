"""Who proposes tokens for a request, and how many: idle residents, its low-bit twin, lookup, or the user's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from polymodel.config import MAX_DRAFT, MAX_NODES, Draft, Drafter, DrafterName
from polymodel.control import CostTable, Option, Plan, Throttle, depth_gate, plan_round
from polymodel.errors import (
    CorruptCheckpoint,
    InvalidRequest,
    KVFull,
    UnknownModel,
    UnsupportedModel,
    VocabMismatch,
    brief,
)
from polymodel.growth import Line, Tree, grow_chains, grow_trees, read, tree_shape
from polymodel.kv import PageList
from polymodel.lookup import Lookup
from polymodel.model import Model, Panel, forward
from polymodel.prefix import common_length
from polymodel.proposal import Proposal, checked, merge
from polymodel.provisional import Provisional
from polymodel.residency import Hosted
from polymodel.sample import Probs
from polymodel.sequence import Drafts, PagesSink, Sequence, Work, fail_by_hook
from polymodel.trials import AUTO_FACTOR, Trials, synchronize

LEVEL_NODES = 3  # nodes of a tree for each of its levels, unless Draft.nodes says otherwise
PAUSE = 16  # forwards without drafts after pages ran short
PROBE = 16  # rounds after which a throttle that stopped lets one token be drafted
THROTTLE_START = 4  # tokens
LOOKUPS = 8  # indexes of references that are kept
SEEN = 2  # tokens a drafter has not read after a round it took part in: the last that stood, and the target's own
TOKENS_A_ROUND = 2  # that are expected, to divide the cost of catching up
UNTESTED = 4  # tokens of what was looked up and is not verified that are compared with what comes
GATE_ERROR, GATE_LEAST = 0.15, 0.3  # of policy "gate": how far rates may lie apart, and the survival worth drafting


@dataclass(eq=False)
class Part:
    """One sequence's share of a round."""

    proposal: Proposal = field(default_factory=Proposal.none)
    span: Provisional | None = None
    chains: dict[str, list[int]] = field(default_factory=dict)  # what each drafter proposed, but for trees
    keys: dict[str, str] = field(default_factory=dict)  # drafter -> whose record it goes to, if not its own
    lines: dict[str, Line] = field(default_factory=dict)  # of models
    tree: Tree | None = None
    probs: list[Probs | None] = field(default_factory=list)  # what each token of the chain was drawn from


@dataclass(eq=False)
class Round:
    """What is to be verified together."""

    parts: list[Part]
    streamed: int = 0  # bytes of the drafters' weights


class Drafting:
    """Proposes for the sequences of a round and learns from it. All calls but `resolve` come from the lane."""

    def __init__(self, trials: Trials) -> None:
        self.trials = trials
        self.config, self.residency = trials.config, trials.residency
        self.arena, self.events = trials.arena, trials.events
        self._plans: dict[str, Plan] = {}  # the last round's, by target
        self._lookups_lock = Lock()  # requests are resolved by whoever submits them
        self._vocabularies: WeakKeyDictionary[Hosted, str] = WeakKeyDictionary()
        self._lookups: dict[tuple[int, int, tuple[tuple[int, ...], ...]], Lookup] = {}

    # ---- who

    def resolve(self, draft: Draft | DrafterName | tuple[DrafterName, ...] | None, hosted: Hosted) -> Drafts | None:
        """What a request asks for; None: plain decoding.

        UnknownModel, VocabMismatch naming the first token that differs, InvalidRequest.
        """
        if draft is None:
            return None
        spec = draft if isinstance(draft, Draft) else Draft(by=draft)
        for token in (token for text in spec.references for token in text):
            if not 0 <= token < hosted.config.vocab_size:
                most = hosted.config.vocab_size - 1
                raise InvalidRequest(f"Draft.references: token {token}, expected ids in 0..{most} of {hosted.name!r}")
        found = Drafts(spec=spec, names=[], is_auto=spec.is_auto, pages={})
        for drafter in spec.drafters:
            if not isinstance(drafter, str):
                kind = type(drafter).__name__
                name = kind if kind not in (*found.own, *self.residency.hosted) else f"{kind} {len(found.own)}"
                found.own[name] = drafter
                found.names.append(name)
            elif drafter != "auto":
                self._resolve_name(drafter, hosted, found)
        if spec.width > 1 and not (found.pages or found.names == [hosted.twin]):
            raise InvalidRequest(f"Draft.width={spec.width}: a model drafts a tree, expected one, not {brief(spec.by)}")
        if found.is_auto or "ngram" in found.names:
            found.lookup = self._lookup_of(spec.min_n, spec.max_n, spec.references)
        for name in found.names:
            found.record(name)  # so that who never drafted is shown, too
        return found if self.config.multi_model else None

    def _resolve_name(self, name: str, hosted: Hosted, found: Drafts) -> None:
        if name in ("ngram", "twin"):
            if name == "twin" and hosted.twin not in self.residency.hosted:
                raise InvalidRequest(
                    f"draft='twin': {hosted.name!r} has no low-bit twin, expected one to be added with it: "
                    "add(name, source, twin='q4')"
                )
            found.names.append(hosted.twin if name == "twin" else name)
            return self._make_pages(found.names[-1], hosted.name, found)
        if name not in self.residency.hosted:
            models = ", ".join(self.residency.hosted)
            raise UnknownModel(
                f"draft={name!r}: nobody of this name; there are auto, ngram, twin and the models {models}"
            )
        if name == hosted.name:
            raise InvalidRequest(f"draft={name!r}: a model cannot draft for itself; name another one")
        drafter = self.residency[name]
        if hosted.vocab_digest != drafter.vocab_digest:
            first = hosted.tokenizer.first_difference(drafter.tokenizer)
            raise VocabMismatch(
                f"{name!r} cannot draft for {hosted.name!r}: their vocabularies differ, first at id {first}"
            )
        found.names.append(name)
        self._make_pages(name, hosted.name, found)

    def _make_pages(self, name: str, target: str, drafts: Drafts) -> None:
        if name in self.residency.hosted and name not in drafts.pages and not self._is_in_place(name, target):
            drafts.pages[name] = PageList(self.arena, self.residency[name].layout)

    def _is_in_place(self, drafter: str, target: str) -> bool:
        """A twin drafts in the target's own pages; verifying writes them anew."""
        hosted = self.residency[target]
        return drafter == hosted.twin and self.residency[drafter].layout == hosted.layout

    def _lookup_of(self, min_n: int, max_n: int, references: tuple[tuple[int, ...], ...]) -> Lookup:
        """Requests with the same references share their index, the last few of them."""
        key = min_n, max_n, references
        with self._lookups_lock:
            shared = self._lookups.pop(key, None) or Lookup(*key)
            self._lookups[key] = shared
            while len(self._lookups) > LOOKUPS:
                del self._lookups[next(iter(self._lookups))]
        return shared.for_another()

    def mates(self, target: str) -> list[str]:
        """Models on the device that could draft for this one."""
        hosted = self.residency[target]
        return [
            name
            for name, other in self.residency.hosted.items()
            if name != target and other.model is not None and self._vocabulary(other) == self._vocabulary(hosted) != ""
        ]

    def _vocabulary(self, hosted: Hosted) -> str:
        """Digest of a model's tokens, "" where its checkpoint has none that can be read."""
        if hosted not in self._vocabularies:
            self._vocabularies[hosted] = ""
            with suppress(CorruptCheckpoint, UnsupportedModel):
                self._vocabularies[hosted] = hosted.vocab_digest
        return self._vocabularies[hosted]

    def forget(self, name: str) -> None:
        """A model is gone."""
        self.trials.forget(name)
        self._plans.pop(name, None)

    # ---- a round

    def propose(self, target: str, works: Seq[Work], stack: ExitStack) -> Round:
        """What each is to verify in this round. Spans, leases and scratch pages end with the stack."""
        parts = [Part() for _ in works]
        pairs = zip(works, parts, strict=True)
        mine = {work: part for work, part in pairs if isinstance(work, Sequence) and work.drafts is not None}
        if not mine:
            return Round(parts)
        wishes, streamed = self._wishes(target, mine, len(works))
        asked: dict[str, dict[Sequence, int]] = {}  # by model
        for sequence, wish in wishes.items():
            if wish and not sequence.is_over:
                mine[sequence].span = self._open_span(sequence, stack)
                self._propose_free(sequence, mine[sequence], wish)
                for name, count in wish.items():
                    if _is_model(name, sequence):
                        asked.setdefault(name, {})[sequence] = count
        for drafter, counts in asked.items():
            counts = {sequence: count for sequence, count in counts.items() if not sequence.is_over}
            streamed += self._propose_by(drafter, target, counts, mine, stack)
        drafted = [part for sequence, part in mine.items() if not sequence.is_over and self._join(sequence, part)]
        if sum(len(part.proposal) for part in drafted) > MAX_NODES:  # rows of logits cost memory
            for part in drafted:
                part.proposal = part.proposal.first(max(MAX_NODES // len(drafted), 1))
        return Round(parts, streamed)

    def _open_span(self, sequence: Sequence, stack: ExitStack) -> Provisional:
        """What a round with drafts writes: the pending token and they, in the target's pages and the drafters'."""
        lists = [sequence.pages, *_drafts(sequence).pages.values()]
        return stack.enter_context(sequence.spans.open([PagesSink(pages, len(sequence.pages)) for pages in lists]))

    def _wishes(
        self, target: str, mine: Mapping[Sequence, Part], num_rows: int
    ) -> tuple[dict[Sequence, dict[str, int]], int]:
        """Of each sequence, how many tokens each drafter is to propose; and bytes streamed to know it."""
        wishes: dict[Sequence, dict[str, int]] = {}
        auto: dict[Sequence, int] = {}
        for sequence in mine:
            drafts, wish = _drafts(sequence), wishes.setdefault(sequence, {})
            most = self._most(sequence, drafts)
            if drafts.is_auto:
                self._judge_untested(sequence, drafts)
                auto[sequence] = most
                continue
            for name in tuple(drafts.names):
                if not _is_model(name, sequence) or self._is_usable(name, sequence, drafts):
                    wish[name] = self._length(name, sequence, drafts, most)
            wishes[sequence] = {name: count for name, count in wish.items() if count > 0}
            num_rows += sum(wish.values())
        return wishes, self._plan(target, auto, mine, wishes, num_rows) if auto else 0

    def _most(self, sequence: Sequence, drafts: Drafts) -> int:
        """A round yields one more than it accepts, and never more than are wanted; none where pages ran short."""
        if sequence.num_forwards < drafts.paused_until:
            return 0
        default = self.config.draft_tokens * (AUTO_FACTOR if drafts.is_auto else 1)
        return min(drafts.spec.tokens or default, sequence.num_left - 1, MAX_DRAFT)

    def _length(self, name: str, sequence: Sequence, drafts: Drafts, most: int) -> int:
        """By the policy that the request names."""
        if drafts.spec.policy == "throttle":
            longest = drafts.spec.tokens or self.config.draft_tokens
            throttle = drafts.throttles.setdefault(name, Throttle(most=longest, start=min(longest, THROTTLE_START)))
            drafts.num_idle[name] = 0 if throttle.length else drafts.num_idle[name] + 1
            probe = drafts.num_idle[name] % PROBE == 0
            return min(throttle.length or probe, most)
        if drafts.spec.policy == "gate" and most > 0:
            pair = self.trials.pair(sequence.model, name)
            observed = [row["rate"] for row in drafts.record(name).profile()]
            return depth_gate([pair.rate(i) for i in range(most)], observed, GATE_ERROR, GATE_LEAST, most, most)
        return most

    def _is_usable(self, name: str, sequence: Sequence, drafts: Drafts) -> bool:
        """Whether this model can draft now; only those on the device do, as far as their own context reaches."""
        record = drafts.records.get(name)
        if name not in self.residency.hosted or (record is not None and record.error):
            return False
        hosted, pages = self.residency[name], drafts.pages.get(name)
        if pages is not None and pages.layout != hosted.layout:  # another model of this name
            drafts.drop(name)
            return False
        if hosted.model is None:
            drafts.record(name).num_absent += 1
            return False
        return len(sequence.tokens) < hosted.config.max_context and self.trials.can_read(
            name, sequence.model, sequence.tokens, 0 if pages is None else len(pages)
        )

    # ---- "auto"

    def _plan(
        self,
        target: str,
        auto: Mapping[Sequence, int],
        mine: Mapping[Sequence, Part],
        wishes: dict[Sequence, dict[str, int]],
        num_rows: int,
    ) -> int:
        """Whoever promises most tokens a second; decoding plainly is always one of the choices."""
        mates = self.mates(target)
        streamed = self.trials.explore(target, mates, list(auto))
        options = [self._options(target, sequence, most, mates, mine[sequence]) for sequence, most in auto.items()]
        steps: dict[str, CostTable | None] = {"ngram": None} | {name: self.trials.cost(name) for name in mates}
        plan = plan_round(self.trials.cost(target), num_rows, options, steps, self._plans.get(target))
        self._plans[target] = plan
        for sequence, (drafter, count) in zip(auto, plan.choices, strict=True):
            if drafter != "ngram":
                self._keep_untested(sequence, mine[sequence])
            if count:
                wishes[sequence][drafter] = count
                self._make_pages(drafter, target, _drafts(sequence))
        return streamed

    def _options(self, target: str, sequence: Sequence, most: int, mates: Seq[str], part: Part) -> list[Option]:
        drafts, found = _drafts(sequence), []
        if most <= 0:
            return []
        if ids := self._look_up(sequence, part, most):
            rates = self.trials.rates(target, drafts, part.keys["ngram"])
            found.append(Option("ngram", rates.survival(len(ids))))
        for name in mates:  # those that were tried
            if (target, name) in self.trials.pairs and self._is_usable(name, sequence, drafts):
                rates = self.trials.rates(target, drafts, name)
                found.append(Option(name, rates.survival(most), self._catch_up_seconds(name, sequence, drafts)))
        return found

    def _catch_up_seconds(self, name: str, sequence: Sequence, drafts: Drafts) -> float:
        """A round's part of what it takes a drafter to read what it has not seen."""
        missing = len(sequence.tokens) - (len(drafts.pages[name]) if name in drafts.pages else 0)
        if missing <= SEEN or self._is_in_place(name, sequence.model):
            return 0.0
        return self.trials.cost(name).seconds(missing) / max(sequence.num_left / TOKENS_A_ROUND, 1.0)

    def _keep_untested(self, sequence: Sequence, part: Part) -> None:
        """What was looked up and is not verified is compared with the tokens that come."""
        if (ids := part.chains.pop("ngram", None)) and _drafts(sequence).untested is None:
            _drafts(sequence).untested = part.keys["ngram"], len(sequence.tokens), ids[:UNTESTED]

    def _judge_untested(self, sequence: Sequence, drafts: Drafts) -> None:
        if drafts.untested is None:
            return
        key, start, ids = drafts.untested
        came = sequence.tokens[start : start + len(ids)]
        stood = common_length(came, ids)
        if stood < len(came) or len(came) == len(ids):
            self.trials.observe(sequence.model, drafts, key, min(stood + 1, len(ids)), stood)
            drafts.untested = None

    # ---- lookup, and the user's own

    def _look_up(self, sequence: Sequence, part: Part, count: int) -> list[int]:
        lookup = _drafts(sequence).lookup
        assert lookup is not None
        ids, n = lookup.propose(sequence.tokens, count)
        if ids:
            part.chains["ngram"], part.keys["ngram"] = ids, f"ngram {n}"  # a longer match is right more often
        return ids

    def _propose_free(self, sequence: Sequence, part: Part, wish: Mapping[str, int]) -> None:
        own = _drafts(sequence).own
        for name, count in wish.items():
            if name in own:
                try:
                    self._propose_own(name, own[name], sequence, part, count)
                except BaseException as error:
                    return fail_by_hook(sequence, error)
            elif name == "ngram":
                ids = part.chains.get(name) or self._look_up(sequence, part, count)
                del ids[count:]

    def _propose_own(self, name: str, drafter: Drafter, sequence: Sequence, part: Part, count: int) -> None:
        drafts, start = _drafts(sequence), time.perf_counter()
        ids, parents = _given(drafter.propose(list(sequence.tokens), count))
        try:
            made = checked(ids, parents, sequence.hosted.config.vocab_size)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name} proposed no chain and no tree: {error}") from error
        drafts.record(name).seconds += time.perf_counter() - start
        tree = _fitted(*made, name, count, drafts.spec.nodes or MAX_NODES)
        if tree.is_chain:
            part.chains[name] = list(tree.ids)
        elif len(drafts.names) > 1 or sequence.sampler.is_rejection:
            raise InvalidRequest(
                f"{name} proposed a tree, expected a chain beside other drafters and with acceptance='rejection'"
            )
        else:
            part.proposal = tree

    # ---- models

    def _propose_by(
        self,
        drafter: str,
        target: str,
        asked: Mapping[Sequence, int],
        mine: Mapping[Sequence, Part],
        stack: ExitStack,
    ) -> int:
        """One model for all that ask it; bytes streamed. Where pages run short, the last in line goes without."""
        passes: list[float] = []
        lengths = {sequence: len(sequence.pages) for sequence in asked}
        left = sorted(asked, key=lambda sequence: sequence.rank)
        while left:
            inner = stack.enter_context(ExitStack())
            try:
                model = inner.enter_context(self.residency.lease(drafter))
                with self.arena.spare_only():
                    self._draft(drafter, model, {s: asked[s] for s in left}, mine, passes, inner)
                break
            except KVFull:
                gone = [left.pop()]
                self.pause(gone)
            except Exception as error:  # nobody's tokens depend on it
                gone, left = left, []
                for sequence in gone:
                    _drafts(sequence).record(drafter).error = repr(error)
            finally:
                for sequence in asked:
                    pages = _drafts(sequence).pages.get(drafter, sequence.pages)
                    if pages is sequence.pages:  # a twin's rows go before the target writes its own
                        pages.rollback(max(len(pages) - lengths[sequence], 0))
            inner.close()
            for sequence in asked:
                mine[sequence].lines.pop(drafter, None)
                mine[sequence].tree = None
                if (own := _drafts(sequence).pages.get(drafter)) is not None:
                    excess = len(own) if sequence in gone else len(own) - len(sequence.tokens) + 1
                    own.rollback(max(excess, 0))
        for sequence in asked:
            _drafts(sequence).record(drafter).seconds += sum(passes) / len(asked)
        return len(passes) * self.residency[drafter].plan.nbytes

    def pause(self, works: Seq[Work]) -> None:
        """Pages ran short: for some forwards these draft nothing."""
        for work in works:
            if isinstance(work, Sequence) and work.drafts is not None:
                work.drafts.paused_until = work.num_forwards + PAUSE

    def _draft(
        self,
        name: str,
        model: Model,
        asked: Mapping[Sequence, int],
        mine: Mapping[Sequence, Part],
        passes: list[float],
        stack: ExitStack,
    ) -> None:
        def run(panel: Panel) -> Tensor:
            return self._forward(name, model, panel, passes)

        lines = self._lines(name, model, asked, run)
        if not lines:
            return
        sequences, missing = list(lines), {s: len(s.tokens) - len(line.pages) for s, line in lines.items()}
        logits = read(list(lines.values()), run)
        for sequence, line in lines.items():
            mine[sequence].lines[name] = line
            if missing[sequence] > SEEN:
                _drafts(sequence).record(name).num_catch_up += missing[sequence]
        grown = [i for i, sequence in enumerate(sequences) if _drafts(sequence).spec.width > 1]
        if chains := [i for i in range(len(sequences)) if i not in grown]:
            grow_chains([lines[sequences[i]] for i in chains], logits[chains], run)
        if grown:
            trees = [self._tree(name, sequences[i], lines[sequences[i]]) for i in grown]
            for i, tree in zip(grown, trees, strict=True):
                mine[sequences[i]].tree = tree
            grow_trees(trees, logits[grown], run, stack)

    def _lines(
        self, name: str, model: Model, asked: Mapping[Sequence, int], run: Callable[[Panel], Tensor]
    ) -> dict[Sequence, Line]:
        """Of those whose drafter is not behind, or by no more than a chunk has room for; the others catch up by it."""
        lines: dict[Sequence, Line] = {}
        behind: dict[Sequence, tuple[PageList, list[int]]] = {}
        room = self.config.prefill_chunk
        for sequence, count in asked.items():
            self._make_pages(name, sequence.model, _drafts(sequence))
            own = _drafts(sequence).pages.get(name)
            pages = sequence.pages if own is None else own
            missing = len(sequence.tokens) - len(pages)
            if SEEN < missing > room:
                if room:
                    behind[sequence] = pages, sequence.tokens[len(pages) : len(pages) + room]
                room = 0
                continue
            room -= missing if missing > SEEN else 0
            count = min(count, model.config.max_context - len(sequence.tokens))
            vocab_size = sequence.hosted.config.vocab_size
            lines[sequence] = Line(sequence.tokens, sequence.sampler, pages, own is not None, count, vocab_size)
        if behind:
            run(Panel([pages for pages, _ in behind.values()], [ids for _, ids in behind.values()], "none"))
            for sequence, (_, ids) in behind.items():
                _drafts(sequence).record(name).num_catch_up += len(ids)
        return lines

    def _tree(self, name: str, sequence: Sequence, line: Line) -> Tree:
        spec = _drafts(sequence).spec
        known = self.trials.ranks.setdefault((sequence.model, name), [])
        nodes = spec.nodes or min(LEVEL_NODES * line.count, MAX_NODES)
        return Tree(line, tree_shape(known, line.count, spec.width, nodes))

    def _forward(self, name: str, model: Model, panel: Panel, passes: list[float]) -> Tensor:
        tokens, layers = sum(map(len, panel.ids)), model.config.num_layers
        start = time.perf_counter()
        with self.events.span("draft", name, tokens=tokens, sequences=len(panel.lists), layers=layers):
            logits = forward(model, self.arena, panel)
            synchronize(logits)
        passes.append(time.perf_counter() - start)
        self.trials.observe_cost(name, tokens, passes[-1])
        return logits

    # ---- what is verified

    def _join(self, sequence: Sequence, part: Part) -> bool:
        """One proposal of all that was drafted; whether there is any."""
        drafts = _drafts(sequence)
        for name, line in tuple(part.lines.items()):
            if not line.is_sound:
                drafts.drop(name)
                del part.lines[name]
                part.tree = None
            elif part.tree is None:
                part.chains[name], part.probs = line.chain, line.probs
        if part.tree is not None:
            ((name, line),) = part.lines.items()
            made = checked(part.tree.ids, part.tree.parents, line.vocab_size)
            part.proposal = _fitted(*made, name, line.count, MAX_NODES)
            if len(part.proposal) < len(part.tree.ids):  # its nodes have other numbers now
                part.tree = None
        chains = {name: ids for name, ids in part.chains.items() if ids}
        if len(chains) == 1:
            ((name, ids),) = chains.items()
            part.proposal = Proposal.chain(ids, name)
        elif chains:
            rated = [
                (name, chains[name], self._survival(sequence, part, name, len(chains[name])))
                for name in drafts.names
                if name in chains
            ]
            part.proposal = merge(rated, drafts.spec.nodes or MAX_NODES)
        return bool(part.proposal.ids)

    def _survival(self, sequence: Sequence, part: Part, name: str, count: int) -> tuple[float, ...]:
        key = part.keys.get(name, name)
        return self.trials.rates(sequence.model, _drafts(sequence), key).survival(count)

    # ---- what it taught

    def settle(self, sequence: Sequence, part: Part, path: Seq[int], gained: Seq[int]) -> None:
        """After the verdict: nodes that stand, and the tokens gained. Drafters keep what they read of these."""
        proposal = part.proposal
        if not proposal.ids:
            return
        drafts = _drafts(sequence)
        sequence.num_draft_rounds += 1
        sequence.num_drafted += len(proposal.ids)
        sequence.num_accepted += len(path)
        histogram = sequence.acceptance_histogram
        histogram += [0] * (len(path) + 1 - len(histogram))
        histogram[len(path)] += 1
        for name, chain in part.chains.items():
            if chain:
                self._settle_chain(sequence, drafts, part, name, chain, gained)
        if not part.chains:
            name, reached = proposal.by[0][0], min(proposal.depth, len(path) + 1)
            drafts.record(name).count(len(proposal.ids), len(path), reached, len(path))
            if name in drafts.throttles:
                drafts.throttles[name].record(len(path), proposal.depth)
            self.trials.observe(sequence.model, drafts, name, reached, len(path))
            if part.tree is not None:
                part.tree.learn(self.trials.ranks[sequence.model, name], gained)
                if name in drafts.pages:
                    with suppress(KVFull), self.arena.spare_only():  # without room they are read again
                        part.tree.keep(path)

    def _settle_chain(
        self, sequence: Sequence, drafts: Drafts, part: Part, name: str, chain: list[int], gained: Seq[int]
    ) -> None:
        stood = common_length(chain, gained)
        verified = sum(name in by for by in part.proposal.by)
        reached = min(stood + 1, len(chain), len(gained))
        drafts.record(name).count(verified, min(stood, verified), reached, stood)
        self.trials.observe(sequence.model, drafts, part.keys.get(name, name), reached, stood)
        if name in drafts.throttles:
            drafts.throttles[name].record(min(stood, verified), verified)
        if name in drafts.pages and name in part.lines:
            pages, valid = drafts.pages[name], part.lines[name].base + min(stood, len(chain) - 1)
            pages.rollback(max(len(pages) - valid, 0))


def _drafts(sequence: Sequence) -> Drafts:
    """Of a sequence that has some."""
    assert sequence.drafts is not None
    return sequence.drafts


def _given(proposed: Any) -> tuple[Any, Any]:
    """Ids and parents, None for a chain; a pair of numbers is a chain of two."""
    if isinstance(proposed, tuple) and len(proposed) == 2:
        first = proposed[0]
        if getattr(first, "ndim", int(isinstance(first, Iterable))):
            return proposed
    return proposed, None


def _is_model(name: str, sequence: Sequence) -> bool:
    """Whether this drafter of a sequence is a hosted model, by name."""
    return name != "ngram" and name not in _drafts(sequence).own


def _fitted(ids: Seq[int], parents: Seq[int], name: str, depth: int, most: int) -> Proposal:
    """As much of a tree as may be verified: nodes down to a depth, the first so many."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    kept = [i for i in range(len(ids)) if depths[i] <= depth][:most]
    number = {node: i for i, node in enumerate(kept)} | {-1: -1}
    by = tuple((name,) for _ in kept)
    return Proposal(tuple(ids[i] for i in kept), tuple(number[parents[i]] for i in kept), by)
