"""Do bits depend on company? Every way to prefill, to leave memory and to decode, against one plain sequence alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import combinations, zip_longest
from random import Random
from typing import Any

import torch
from torch import Tensor

from polymodel.batch import Batch
from polymodel.config import Draft, LowBit
from polymodel.engine import Engine
from polymodel.selfcheck import Scripted
from polymodel.session import Session
from polymodel.workloads.report import Limit, Report, Setting, Workload

MODEL = "model"
LENGTHS = (3, 24, 50, 64, 66)  # tokens of the prompts: within a page, up to its end, over it
NEW_TOKENS = 20
MIN_TOKENS = 100_000  # of the full matrix
MAX_SECONDS = 300.0  # of a full matrix on a given model: what has not begun by then is left out
MIN_DISTINCT = 16  # tokens that the references have among them, or equality would say little
TEMPERATURES = (0.0, 1.0)
CHUNKS = (1, 7, 64, None)  # prompt tokens in a forward; None: all of them
# miss: the request prefills its own prompt; else it goes on from a session's pages, after what is named
PREFIXES = ("miss", "hit", "clone", "rollback", "evict and repair", "page out", "swap")
CHAINS = tuple(f"chain {k}" for k in range(1, 17))
OTHERS = ("tree", "twin chain", "twin tree")
FULL: dict[str, Sequence[Any]] = {
    "decode": ("plain", *CHAINS, *OTHERS),
    "rows": (1, 2, 3, 8, 17, 33, 64),
    "prefix": PREFIXES,
    "chunk": CHUNKS,
    "temperature": TEMPERATURES,
}
SMALL = FULL | {"decode": ("plain", "chain 1", "chain 5", "chain 16", *OTHERS), "rows": (1, 2, 5)}


@dataclass(frozen=True, slots=True)
class Case:
    decode: str  # "plain", "chain K", "tree", "twin chain" or "twin tree"
    rows: int  # requests that decode together
    prefix: str
    chunk: int | None
    temperature: float


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few choices of a value for each axis, in which every two values of two axes meet at least once."""
    ends = [(axis, i) for axis, values in axes.items() for i in range(len(values))]
    missing = {frozenset(pair) for pair in combinations(ends, 2) if pair[0][0] != pair[1][0]}
    found: list[dict[str, Any]] = []
    for seed in [pair for pair in combinations(ends, 2) if frozenset(pair) in missing]:
        if frozenset(seed) not in missing:
            continue
        chosen = dict(seed)
        for axis, values in axes.items():
            if axis not in chosen:
                gains = [_met(missing, chosen, (axis, i)) for i in range(len(values))]
                best = [i for i, gain in enumerate(gains) if gain == max(gains)]
                chosen[axis] = best[len(found) % len(best)]  # among equals each in its turn
        missing -= {frozenset(pair) for pair in combinations(chosen.items(), 2)}
        found.append({axis: values[chosen[axis]] for axis, values in axes.items()})
    return found


def _met(missing: set[frozenset[tuple[str, int]]], chosen: dict[str, int], end: tuple[str, int]) -> int:
    """How many missing pairs a choice for one more axis completes."""
    return sum(frozenset((end, other)) in missing for other in chosen.items())


def cases(size: str) -> list[Case]:
    """small: every two values of two axes meet, and once 64 rows; full: that, and a seeded sample of the product."""
    if size == "small":
        return [Case("chain 3", 64, "hit", 7, 1.0), *(Case(**choice) for choice in pairwise(SMALL))]
    found = [Case(**choice) for choice in pairwise(FULL)]
    random = Random(0)
    while sum(case.rows for case in found) * NEW_TOKENS < MIN_TOKENS:
        found.append(Case(**{axis: random.choice(values) for axis, values in FULL.items()}))
    return found


def differing(ours: Tensor, theirs: Tensor) -> int:
    """Bytes that differ; the signs of zeros and NaNs count."""
    ours, theirs = (x.contiguous().view(torch.uint8) for x in (ours, theirs))
    return int((ours != theirs).sum()) if ours.shape == theirs.shape else max(ours.numel(), theirs.numel())


def differing_tokens(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Places at which two outputs differ; those that only one of them has count."""
    return sum(a != b for a, b in zip_longest(ours, theirs))


# ---- what is expected --------------------------------------------------------------------------------


@dataclass(slots=True)
class Reference:
    """One request, plainly and alone; its keys and values from prefills in a single forward."""

    prompt: list[int]
    tokens: list[int]
    logits: list[Tensor]  # that chose each token
    prompt_kv: Tensor
    kv: Tensor  # of all tokens but the last

    @property
    def known(self) -> list[int]:
        return self.prompt + self.tokens


def reference(engine: Engine, model: str, prompt: list[int], options: Mapping[str, Any], domain: str) -> Reference:
    """By requests and sessions that take nothing over from each other."""
    logits: list[Tensor] = []

    def keep(_: Sequence[int], row: Tensor) -> Tensor:
        logits.append(row.clone())
        return row

    out = engine.generate(
        model, prompt_ids=prompt, draft=None, domain=f"{domain} tokens", logits_processor=keep, **options
    )
    kv = []
    for part, ids in (("prompt", prompt), ("all", prompt + out.tokens[:-1])):
        with engine.session(model, domain=f"{domain} {part}") as session:
            session.append(ids)
            kv.append(session.pages.dump())
    for part in ("tokens", "prompt", "all"):
        engine.drop_domain(f"{domain} {part}")
    return Reference(prompt, out.tokens, logits, *kv)


# ---- what is compared --------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Of some cases: what was compared, and what of it differed from the reference."""

    cases: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    most_rows: int = 0  # of one forward
    argmax_requests: int = 0  # that chose without a look at their logits
    logits_rows: int = 0
    logits_bytes: int = 0
    kv_bytes: int = 0
    kv_tokens: int = 0  # whose pages a session took over from a request that was over
    tokens_differing: int = 0
    logits_bytes_differing: int = 0
    kv_bytes_differing: int = 0

    def add_logits(self, ours: Tensor, theirs: Tensor) -> None:
        self.logits_rows += 1
        self.logits_bytes += theirs.nbytes
        self.logits_bytes_differing += differing(ours, theirs)

    def add_kv(self, ours: Tensor, theirs: Tensor) -> None:
        self.kv_bytes += theirs.nbytes
        self.kv_bytes_differing += differing(ours, theirs)


@dataclass(slots=True)
class Taken:
    """Of the cases of one prefix: what it moved, and what requests took over from it."""

    rows: int = 0
    prompt_tokens: int = 0
    cacheable: int = 0  # of these, but for the last, whose row gives the logits, and prompts that are too short
    cached: int = 0  # whose pages requests took over
    page_ins: int = 0
    swapped_rows: int = 0  # that gave their pages to the host


@dataclass(slots=True)
class Matrix:
    """Runs cases on an engine that hosts the model and its twin."""

    engine: Engine
    references: dict[float, list[Reference]] = field(default_factory=dict)  # by temperature
    tallies: dict[str, Tally] = field(default_factory=dict)  # by how it was decoded
    taken: dict[str, Taken] = field(default_factory=dict)  # by prefix
    ran: list[Case] = field(default_factory=list)

    def __post_init__(self) -> None:
        vocab_size = self.engine[MODEL].config.vocab_size
        random = Random(1)
        prompts = [[random.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]
        for temperature in TEMPERATURES:
            self.references[temperature] = [
                reference(self.engine, MODEL, ids, _options(temperature, i), f"reference {temperature} {i}")
                for i, ids in enumerate(prompts)
            ]

    def run(self, case: Case) -> None:
        """Sessions prefill in chunks; requests that go on from them, or begin anew, decode together."""
        self.ran.append(case)
        number = len(self.ran)
        tally, taken = self.tallies.setdefault(case.decode, Tally()), self.taken.setdefault(case.prefix, Taken())
        tally.cases += 1
        taken.rows += case.rows
        chosen = [(number + row) % len(LENGTHS) for row in range(case.rows)]
        wanted = [self.references[case.temperature][i] for i in chosen]
        domains = [f"case {number} row {row}" for row in range(case.rows)]  # each computes its own
        self.sessions(case, tally, taken, wanted, domains)
        if case.prefix == "miss":
            for domain in domains:
                self.engine.drop_domain(domain)
        self.requests(case, tally, taken, wanted, chosen, domains)
        for domain in domains:
            self.engine.drop_domain(domain)

    def sessions(
        self, case: Case, tally: Tally, taken: Taken, wanted: Sequence[Reference], domains: Sequence[str]
    ) -> None:
        """Prompts in chunks, with what the case names halfway, and two steps; the cache then has the prompts."""
        junk = [one.prompt[4::-1] for one in wanted]
        halves = [(one.prompt[: len(one.prompt) // 2], one.prompt[len(one.prompt) // 2 :]) for one in wanted]
        self.engine.events.clear()
        with ExitStack() as stack:
            rows = [stack.enter_context(self.engine.session(MODEL, domain=domain)) for domain in domains]
            feed(rows, [half for half, _ in halves], case.chunk)
            match case.prefix:
                case "clone":
                    clones = [stack.enter_context(row.clone()) for row in rows]
                    feed(rows, junk, case.chunk)  # so that the clones' last pages are written beside them
                    rows = clones
                case "rollback":
                    feed(rows, junk, case.chunk)
                    for row, ids in zip(rows, junk, strict=True):
                        row.rollback(len(ids))
                case "evict and repair":
                    feed(rows, junk, case.chunk)
                case "page out":
                    self.engine.unload(MODEL)
                case "swap":
                    taken.swapped_rows += sum(row.swap_out() > 0 for row in rows)
                    for row in reversed(rows):
                        row.swap_in()
            feed(rows, [half for _, half in halves], case.chunk)
            if case.prefix == "evict and repair":
                for row, (half, _), ids in zip(rows, halves, junk, strict=True):
                    row.evict(slice(len(half), len(half) + len(ids)))
                    row.repair()
            for row, one in zip(rows, wanted, strict=True):
                assert row.logits is not None
                tally.add_logits(row.logits, one.logits[0])
                tally.add_kv(row.pages.dump(), one.prompt_kv)
            batch = Batch(rows)
            for step in range(2):
                logits = batch.step([one.tokens[step] for one in wanted])
                for ours, one in zip(logits, wanted, strict=True):
                    tally.add_logits(ours, one.logits[step + 1])
            for row in rows:
                row.rollback(2)
        taken.page_ins += sum(event.model == MODEL for event in self.engine.events.of("page_in"))

    def requests(
        self,
        case: Case,
        tally: Tally,
        taken: Taken,
        wanted: Sequence[Reference],
        seeds: Sequence[int],
        domains: Sequence[str],
    ) -> None:
        """Every second greedy one chooses as requests do that nobody looks at, without a logits_processor."""
        engine = self.engine
        vocab_size = engine[MODEL].config.vocab_size
        is_seen = [case.temperature > 0 or (len(self.ran) + row) % 2 == 0 for row in range(case.rows)]
        tally.argmax_requests += case.rows - sum(is_seen)
        engine.events.clear()
        with engine.lane.exclusive():  # so that they begin together
            requests = [
                engine.submit(
                    MODEL,
                    prompt_ids=one.prompt,
                    draft=drafter(case.decode, one.known, vocab_size),
                    domain=domain,
                    logits_processor=Comparing(one, tally) if seen else None,
                    **_options(case.temperature, seed),
                )
                for one, seed, domain, seen in zip(wanted, seeds, domains, is_seen, strict=True)
            ]
        for request, one, domain in zip(requests, wanted, domains, strict=True):
            engine.wait(request)
            out = engine.output(request)
            tally.tokens += len(one.tokens)
            tally.tokens_differing += differing_tokens(out.tokens, one.tokens)
            tally.drafted += out.metrics.num_drafted
            tally.accepted += out.metrics.num_accepted
            taken.prompt_tokens += len(one.prompt)
            before = len(one.prompt) - 1
            taken.cacheable += before if before >= engine.config.prefix_min_match else 0
            taken.cached += out.metrics.num_cached_tokens
            with engine.session(MODEL, domain=domain) as session:  # what the request left in the cache
                session.append(one.known[:-1])
                tally.kv_tokens += session.num_cached
                tally.add_kv(session.pages.dump(), one.kv)
        widths = [event.sequences for event in engine.events.of("decode", "verify")]
        tally.most_rows = max([tally.most_rows, *widths])


@dataclass(slots=True)
class Comparing:
    """A logits_processor that compares and changes nothing."""

    reference: Reference
    tally: Tally

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        self.tally.add_logits(logits, self.reference.logits[len(tokens) - len(self.reference.prompt)])
        return logits


def feed(rows: Sequence[Session], prompts: Sequence[Sequence[int]], chunk: int | None) -> None:
    """Append the prompts, all rows together, so many tokens of each in a forward."""
    size = chunk or max(map(len, prompts))
    for start in range(0, max(map(len, prompts)), size):
        parts = {row: ids[start : start + size] for row, ids in zip(rows, prompts, strict=True) if len(ids) > start}
        Batch(list(parts)).prefill_each(list(parts.values()))


def _options(temperature: float, seed: int) -> dict[str, Any]:
    return {
        "max_new_tokens": NEW_TOKENS,
        "stop_at_eos": False,
        "temperature": temperature,
        "top_p": 0.95 if temperature else 1.0,
        "seed": seed,
    }


# ---- drafters ----------------------------------------------------------------------------------------


class Forked(Scripted):
    """Proposes a wrong token beside each of its own, as a tree."""

    def propose(self, tokens: Sequence[int], count: int) -> Any:
        ids = super().propose(tokens, count)
        nodes = [node for token in ids for node in ((token + 1) % self.vocab_size, token)]
        return nodes, [-1 if i < 2 else (i - i % 2) - 1 for i in range(len(nodes))]


def drafter(decode: str, known: Sequence[int], vocab_size: int) -> Draft | None:
    """Right about what is known, but for every fifth token; or the twin."""
    name, _, count = decode.partition(" ")
    if name == "plain":
        return None
    if name == "twin":
        return Draft("twin", tokens=4, width=3 if count == "tree" else 1)
    kind = Forked if name == "tree" else Scripted
    return Draft(kind(known, vocab_size, lambda at, _: at % 5 == 4), tokens=int(count) if count else 4)


# ---- the report --------------------------------------------------------------------------------------


def hosting(setting: Setting, stack: ExitStack) -> Engine:
    """An engine with the model and its low-bit twin."""
    source = stack.enter_context(setting.source())
    engine = stack.enter_context(Engine(setting.device, budget="64GiB", kv_budget="1GiB"))
    twin: LowBit = "q8" if setting.weights == "q4" else "q4"
    engine.add(MODEL, source, weights=setting.weights, twin=twin)
    return engine


def run(setting: Setting, chosen: Iterable[Case] | None = None) -> Report:
    """The matrix, and that its comparisons would notice a difference.

    On a given model the full one is the small one, then a seeded order of the rest for as long as MAX_SECONDS allow.
    """
    todo = cases(setting.size) if chosen is None else list(chosen)
    limit, at_least = Limit(MAX_SECONDS), len(todo)
    if setting.size == "full" and setting.model is not None:
        first = cases("small")
        rest = [case for case in todo if case not in first]
        todo, at_least = first + Random(0).sample(rest, len(rest)), len(first)
    with ExitStack() as stack:
        matrix = Matrix(hosting(setting, stack))
        for number, case in enumerate(todo):
            if number >= at_least and limit.used > limit.seconds:
                break
            if number % 10 == 0:
                setting.progress(f"exact: case {number + 1} of {len(todo)}")
            matrix.run(case)
        shape = {"cases": len(matrix.ran), "of": len(todo), "prompts": LENGTHS, "new_tokens": NEW_TOKENS}
        report = Report("exact", "counted", shape | {"weights": setting.weights})
        report.rows = [{"decode": decode, **asdict(tally)} for decode, tally in matrix.tallies.items()]
        report.rows += [{"prefix": prefix, **asdict(taken)} for prefix, taken in matrix.taken.items()]
        _add_gates(report, matrix)
        _add_controls(report, matrix)
    return report


def _add_gates(report: Report, matrix: Matrix) -> None:
    tallies, ran = matrix.tallies.values(), matrix.ran

    def total(name: str) -> int:
        return sum(getattr(tally, name) for tally in tallies)

    for what in ("tokens", "logits_bytes", "kv_bytes"):
        compared = f"{what.replace('_', ' ')} that differ, of {total(what):,}"
        report.equal(compared, total(f"{what}_differing"), 0)
    distinct = len({token for some in matrix.references.values() for one in some for token in one.tokens})
    report.that("distinct tokens", distinct, f"at least {MIN_DISTINCT}", distinct >= MIN_DISTINCT)
    rows = sum(case.rows for case in ran)
    report.equal("tokens compared", total("tokens"), rows * NEW_TOKENS)
    report.equal(
        "rows of logits compared", total("logits_rows"), rows * (3 + NEW_TOKENS) - total("argmax_requests") * NEW_TOKENS
    )
    taken = matrix.taken
    prompt_tokens = sum(one.prompt_tokens for one in taken.values())
    # of prompt and output, but for the last token, which has none, and the one before, whose row gives the logits
    report.equal("tokens whose pages are a request's own", total("kv_tokens"), prompt_tokens + rows * (NEW_TOKENS - 2))
    report.equal("rows of the widest decode step", max(t.most_rows for t in tallies), max(case.rows for case in ran))
    for prefix, one in taken.items():
        expected = 0 if prefix == "miss" else one.cacheable
        report.equal(f"{prefix}: prompt tokens taken over", one.cached, expected)
        page_ins = sum(case.prefix == prefix == "page out" for case in ran)
        moved = one.page_ins, one.swapped_rows
        report.equal(f"{prefix}: page-ins, rows swapped out", moved, (page_ins, one.rows if prefix == "swap" else 0))
    if any(case.decode != "plain" for case in ran):
        drafted, accepted = total("drafted"), total("accepted")
        report.that("drafted tokens accepted", accepted, f"some of {drafted:,}, not all", 0 < accepted < drafted)


def _add_controls(report: Report, matrix: Matrix) -> None:
    """What is not equal must be seen to differ."""
    engine, one = matrix.engine, matrix.references[0.0][2]
    half = len(one.prompt) // 2
    with engine.session(MODEL, domain="control") as session:
        session.append([*one.prompt[:half], *one.prompt[5::-1], *one.prompt[half:]])
        session.evict(slice(half, half + 6))
        late = differing(session.append(one.tokens[:1]), one.logits[1])
        report.that("control: logits bytes that differ after a late eviction", late, "some", late > 0)
    engine.drop_domain("control")
    with engine.session(MODEL, domain="control") as session:
        session.append(one.prompt)
        layout = session.pages.layout
        value = layout.view(engine.arena.bytes, 0)[session.pages.pages[0], 1, 0, 0, :1]
        with engine.lane.exclusive():
            value.neg_()  # one bit
        report.equal(
            "control: bytes that differ where one bit of a value was flipped",
            differing(session.pages.dump(), one.prompt_kv),
            1,
        )
        flipped = differing(session.append(one.tokens[:1]), one.logits[1])
        report.that("control: logits bytes that differ after it", flipped, "some", flipped > 0)
    engine.drop_domain("control")


WORKLOADS = (
    Workload("exact", "bits of tokens, logits, keys and values in any company, beside one request alone", run),
)
