"""Agents that share a prompt and take turns: what each way to serve them prefills, and how long it takes.

`session`: one model, four arms. A, naive: every turn prefills its whole context. B: a session for each agent, decoded
one after another. C: the prompt once, its clones in a batch. D: requests, all agents at once, over the prefix cache.
What agents say is what the model chooses after a first token of their own.
`siblings`: an agent on each of five models, with what they have in common taken over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polymodel.batch import Batch
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.config import PAGE_TOKENS, ModelConfig
from polymodel.engine import Engine
from polymodel.errors import InvalidRequest
from polymodel.events import token_layers
from polymodel.sample import greedy
from polymodel.sequence import LogitsProcessor
from polymodel.session import Session
from polymodel.workloads.report import (
    Report,
    Setting,
    Watch,
    Workload,
    device_of,
    lcg,
    next_id,
    open_engine,
    spread,
)

MODEL = "m"
MIN_DISTINCT = 3  # tokens that the agents choose, or their being equal proves nothing


@dataclass(frozen=True, slots=True)
class Shape:
    """Agents that begin with the same prefix; a turn decodes, and between two turns each reads a result of its own."""

    turns: int
    agents: int
    prefix: int  # tokens of the shared prompt
    decode: int  # tokens said in a turn
    result: int  # tokens read between two turns

    def __str__(self) -> str:
        return f"T={self.turns} C={self.agents} P={self.prefix} D={self.decode} R={self.result}"

    @property
    def context(self) -> int:
        """Tokens of an agent at the end."""
        return self.prefix + self.turns * self.decode + (self.turns - 1) * self.result

    @property
    def results(self) -> int:
        """Tokens read by all agents together; every arm but A prefills them once."""
        return self.agents * (self.turns - 1) * self.result

    def starts(self) -> list[int]:
        """Tokens of an agent before it decodes, turn by turn."""
        return [self.prefix + turn * (self.decode + self.result) for turn in range(self.turns)]

    def prefill_tokens(self) -> dict[str, int]:
        """By arm. A request of D also computes the row of its last token, whose logits it needs and whose keys and
        values nobody has cached: that of the prompt for all agents but the first, and that of the answer afterwards."""
        rows = self.agents - 1 + self.agents * (self.turns - 1)
        return {
            "a": self.agents * sum(self.starts()),
            "b": self.agents * self.prefix + self.results,
            "c": self.prefix + self.results,
            "d": self.prefix + self.results + rows,
        }

    def in_whole_pages(self) -> int:
        """Prefill tokens of D by a cache that shares whole pages alone: every turn computes part of one again."""
        first = self.starts()[0] - (self.prefix - 1) // PAGE_TOKENS * PAGE_TOKENS
        later = sum(start - (start - self.result - 1) // PAGE_TOKENS * PAGE_TOKENS for start in self.starts()[1:])
        return self.prefix + (self.agents - 1) * first + self.agents * later

    def token_layers(self, num_layers: int, shared: int) -> int:
        """Prefill work of an agent on each of as many models, of which the lower `shared` layers are the same."""
        whole = self.prefix * num_layers + (self.agents - 1) * self.prefix * (num_layers - shared)
        return whole + self.results * num_layers


ENVELOPE = Shape(turns=50, agents=5, prefix=2048, decode=32, result=64)
ENVELOPE_TOKENS = {"a": 1_100_000, "b": 25_920, "c": 17_728, "d": 17_977}
SHAPES = {
    "small": Shape(turns=3, agents=3, prefix=128, decode=4, result=16),
    "scaled": Shape(turns=8, agents=4, prefix=512, decode=24, result=48),
    "envelope": ENVELOPE,
}


class Script:
    """Who says and reads what: the same tokens in every arm. What is said is prescribed until somebody chooses it."""

    def __init__(self, shape: Shape, vocab: int) -> None:
        self.shape, self.prefix = shape, lcg(shape.prefix, 1, vocab)
        self.results = [
            [lcg(shape.result, 50_000 + 1000 * turn + 97 * agent, vocab) for turn in range(shape.turns - 1)]
            for agent in range(shape.agents)
        ]
        self.said = [list(self._answers(first, vocab)) for first in lcg(shape.agents, 991, vocab)]

    def _answers(self, token: int, vocab: int) -> Iterator[list[int]]:
        for _ in range(self.shape.turns):
            answer = []
            for _ in range(self.shape.decode):
                answer.append(token)
                token = next_id(token, vocab)
            yield answer

    def context(self, agent: int, turn: int) -> list[int]:
        """The agent's tokens before it decodes in a turn; at turn `turns`, without a result behind it, all of them."""
        ids = list(self.prefix)
        for t in range(turn):
            ids += self.said[agent][t]
            ids += self.results[agent][t] if t < self.shape.turns - 1 else []
        return ids


@dataclass(slots=True)
class Arm:
    """What one run of an arm gave."""

    seconds: dict[str, float]  # by part: prefill, clone, decode; of D, all
    prefill_tokens: int
    decode_tokens: int
    decode_forwards: int
    logits: list[Tensor]  # after each agent's last token
    said: list[list[list[int]]]  # of D, as it was said

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Runner:
    """Runs the arms on one hosted model; each in domains of its own, so that none finds what another has cached."""

    def __init__(self, engine: Engine, script: Script) -> None:
        self.engine, self.script, self.shape = engine, script, script.shape
        script.said = self._rehearse()

    def _rehearse(self) -> list[list[list[int]]]:
        """What each agent says, turn by turn: its prescribed first token, then those that the model chooses.

        It is C without a clock, after which everything is warm.
        """
        said: list[list[list[int]]] = [[] for _ in range(self.shape.agents)]
        ids = [turns[0][0] for turns in self.script.said]
        with self.engine.session(MODEL, domain="c") as first:
            first.append(self.script.prefix)
            with Batch.from_prefix(first, self.shape.agents) as batch:
                for turn in range(self.shape.turns):
                    steps = []
                    for _ in range(self.shape.decode):
                        steps.append(ids)
                        ids = greedy(batch.step(ids))
                    for agent, answer in enumerate(zip(*steps, strict=True)):
                        said[agent].append(list(answer))
                    if turn < self.shape.turns - 1:
                        ids = greedy(batch.prefill_each([results[turn] for results in self.script.results]))
        self.engine.drop_domain("c")
        return said

    def naive(self) -> Arm:
        """A, for the first agent alone: each turn a new session with all that was said before, then the last turn."""
        with self._arm("a") as (watch, arm):
            for turn in range(self.shape.turns):
                with self.engine.session(MODEL, domain="a") as session:
                    with watch.of("prefill"):
                        session.append(self.script.context(0, turn))
                    if turn == self.shape.turns - 1:
                        arm.logits = [_say(Batch([session]), [self.script.said[0][turn]])[0]]
                self.engine.drop_domain("a")
        return arm

    def persistent(self) -> Arm:
        """B."""
        with self._arm(*(f"b{agent}" for agent in range(self.shape.agents))) as (watch, arm), ExitStack() as stack:
            agents = []
            for agent in range(self.shape.agents):
                session = stack.enter_context(self.engine.session(MODEL, domain=f"b{agent}"))
                agents.append(Batch([session]))  # of one row: a session itself decodes what it chooses
                with watch.of("prefill"):
                    session.append(self.script.prefix)
            for turn in range(self.shape.turns):
                with watch.of("decode"):
                    arm.logits = [
                        _say(one, [said[turn]])[0] for one, said in zip(agents, self.script.said, strict=True)
                    ]
                for agent, one in enumerate(agents if turn < self.shape.turns - 1 else []):
                    with watch.of("prefill"):
                        one[0].append(self.script.results[agent][turn])
        return arm

    def cloned(self) -> Arm:
        """C."""
        with self._arm("c") as (watch, arm), self.engine.session(MODEL, domain="c") as first:
            with watch.of("prefill"):
                first.append(self.script.prefix)
            with watch.of("clone"):
                batch = Batch.from_prefix(first, self.shape.agents)
            with batch:
                for turn in range(self.shape.turns):
                    with watch.of("decode"):
                        arm.logits = list(_say(batch, [said[turn] for said in self.script.said]))
                    if turn < self.shape.turns - 1:
                        with watch.of("prefill"):
                            batch.prefill_each([results[turn] for results in self.script.results])
        return arm

    def requests(self) -> Arm:
        """D, by greedy requests. Those of the first turn begin with the prescribed token by a logits processor."""
        with self._arm("d") as (watch, arm):
            with watch.of("all"):
                for turn in range(self.shape.turns):
                    requests = [
                        self.engine.submit(
                            MODEL,
                            prompt_ids=(context := self.script.context(agent, turn)),
                            max_new_tokens=self.shape.decode,
                            stop_at_eos=False,
                            draft=None,
                            domain="d",
                            logits_processor=None if turn else _begin(self.script.said[agent][0][0], len(context)),
                        )
                        for agent in range(self.shape.agents)
                    ]
                    self.engine.run()
                    arm.said.append([self.engine.output(request).tokens for request in requests])
            self._count(arm)
            for agent in range(self.shape.agents):
                with self.engine.session(MODEL, domain="d") as session:
                    arm.logits.append(session.append(self.script.context(agent, self.shape.turns)))
        return arm

    @contextmanager
    def _arm(self, *domains: str) -> Iterator[tuple[Watch, Arm]]:
        self.engine.events.clear()
        watch, arm = Watch(self.engine.device), Arm({}, 0, 0, 0, [], [])
        yield watch, arm
        arm.seconds = dict(watch.seconds)
        if not arm.prefill_tokens:
            self._count(arm)
        for domain in domains:
            self.engine.drop_domain(domain)

    def _count(self, arm: Arm) -> None:
        events = self.engine.events
        arm.prefill_tokens = sum(event.tokens for event in events.of("prefill"))
        arm.decode_tokens = sum(event.tokens for event in events.of("decode"))
        arm.decode_forwards = len(events.of("decode"))


def _say(batch: Batch, said: list[list[int]]) -> Tensor:
    """Feed each row its tokens, one a step; the last logits."""
    for ids in zip(*said, strict=True):
        logits = batch.step(ids)
    return logits


def _begin(token: int, start: int) -> LogitsProcessor:
    """Whoever has `start` tokens says this one."""

    def processor(tokens: list[int], logits: Tensor) -> Tensor:
        if len(tokens) == start:
            logits = torch.full_like(logits, -torch.inf)
            logits[token] = 0.0
        return logits

    return processor


def run_session(setting: Setting) -> Report:
    """W1. B, C and D are timed in turns, `repetitions` times; A is one agent's turns, once, times the agents.

    The whole envelope is run once on the random model: it is the counts that matter there.
    """
    whole = SHAPES[_scale(setting)]
    repetitions = 1 if setting.model is None and whole is ENVELOPE else setting.repetitions
    with _source(setting) as path, open_checkpoint(path) as checkpoint:
        shape = fitted(whole, checkpoint.config)
        script = Script(shape, checkpoint.config.vocab_size)
        tokens = shape.agents * (shape.context + 2 * PAGE_TOKENS) + shape.context
        with open_engine(setting, checkpoint.config, 2 * tokens) as engine:
            engine.add(MODEL, path, weights=setting.weights)
            setting.progress("session: what the model says, and warming up")
            runner = Runner(engine, script)
            setting.progress("session: arm A, one agent")
            naive = runner.naive()
            runs: dict[str, list[Arm]] = {"b": [], "c": [], "d": []}
            for repetition in range(repetitions):
                setting.progress(f"session: arms B, C and D, run {repetition + 1} of {repetitions}")
                for arm, run in zip("bcd", (runner.persistent, runner.cloned, runner.requests), strict=True):
                    runs[arm].append(run())
    report = Report("session", "measured", asdict(shape) | {"weights": setting.weights, "runs": repetitions})
    report.shape |= _cut(whole, shape)
    _gate_session(report, script, naive, runs)
    _session_rows(report, shape, naive, runs)
    return report


def _scale(setting: Setting) -> str:
    """The whole envelope where that takes minutes: on the random model and on a GPU."""
    if setting.size == "small":
        return "small"
    return "envelope" if setting.model is None or device_of(setting).type == "cuda" else "scaled"


def fitted(shape: Shape, config: ModelConfig) -> Shape:
    """With a prefix no longer than the model's context leaves room for."""
    prefix = shape.prefix - max(shape.context - config.max_context, 0)
    if prefix < PAGE_TOKENS:
        raise InvalidRequest(f"{shape}: {shape.context:,} tokens, too many for a context of {config.max_context:,}")
    return replace(shape, prefix=prefix)


def _cut(whole: Shape, shape: Shape) -> dict[str, int]:
    """What a report says where the prefix was cut to the model's context."""
    return {} if shape == whole else {"prefix_before_cut": whole.prefix}


def _gate_session(report: Report, script: Script, naive: Arm, runs: dict[str, list[Arm]]) -> None:
    shape, expected = script.shape, script.shape.prefill_tokens()
    report.equal("prefill tokens of the 50 x 5 envelope, by formula", ENVELOPE.prefill_tokens(), ENVELOPE_TOKENS)
    report.equal("prefill tokens, A", naive.prefill_tokens * shape.agents, expected["a"])
    for arm, of in runs.items():
        report.equal(f"prefill tokens, {arm.upper()}", sorted({run.prefill_tokens for run in of}), [expected[arm]])
    steps = shape.turns * shape.decode
    report.equal("decode steps, B", sorted({run.decode_forwards for run in runs["b"]}), [shape.agents * steps])
    report.equal("decode steps, C", sorted({run.decode_forwards for run in runs["c"]}), [steps])
    for arm, count in (("b", steps), ("c", steps), ("d", steps - shape.turns)):  # a request's last token is not fed
        found = sorted({run.decode_tokens for run in runs[arm]})
        report.equal(f"tokens decoded, {arm.upper()}", found, [shape.agents * count])
    most = shape.turns * (shape.decode - 1 + shape.agents - 1)  # who has read its prompt need not wait for the others
    steps_d = sorted({run.decode_forwards for run in runs["d"]})
    report.that("decode steps, D", steps_d, f"at most {most:,}", steps_d[-1] <= most)
    said = [[answers[turn] for answers in script.said] for turn in range(shape.turns)]
    report.equal("runs of D that said other tokens than C's", sum(run.said != said for run in runs["d"]), 0)
    distinct = len({token for answers in script.said for token in chain.from_iterable(answers[1:])})  # all chosen
    report.that("distinct tokens that they choose", distinct, f"at least {MIN_DISTINCT}", distinct >= MIN_DISTINCT)
    one = runs["c"][0].logits
    everyone = [run.logits for of in runs.values() for run in of]
    differing = sum(not torch.equal(*both) for logits in everyone for both in zip(logits, one, strict=True))
    report.equal("last logits of B, C and D that differ from C's", differing, 0)
    report.equal("last logits of A that differ from C's", int(not torch.equal(naive.logits[0], one[0])), 0)
    same = sum(torch.equal(one[i], one[j]) for i in range(len(one)) for j in range(i))
    report.equal("agents whose last logits are another's", same, 0)


ARMS = {
    "A": "each turn prefills all again (one agent's x agents, B's decode)",
    "B": "a session for each agent, one after another",
    "C": "prompt once, clones in a batch",
    "D": "requests over the prefix cache (the first tokens by a logits processor)",
}


def _session_rows(report: Report, shape: Shape, naive: Arm, runs: dict[str, list[Arm]]) -> None:
    best = {arm: min(of, key=lambda run: run.total) for arm, of in runs.items()}
    counted = {"a": naive.prefill_tokens * shape.agents} | {arm: of[0].prefill_tokens for arm, of in runs.items()}
    prefill = {"a": naive.seconds["prefill"] * shape.agents}
    for arm, of in best.items():
        if arm != "d":
            prefill[arm] = of.seconds["prefill"]
    decode = {"a": best["b"].seconds["decode"]} | {arm: best[arm].seconds["decode"] for arm in "bc"}
    total = {"a": prefill["a"] + decode["a"]} | {arm: of.total for arm, of in best.items()}
    for key, what in ARMS.items():
        arm = key.lower()
        report.rows.append(
            {
                "arm": key,
                "what": what,
                "prefill_tokens": counted[arm],
                "prefill_ms": _ms(prefill.get(arm)),
                "clone_ms": _ms(best[arm].seconds.get("clone") if arm in best else None),
                "decode_ms": _ms(decode.get(arm)),
                "total_ms": _ms(total[arm]),
                "spread": spread([run.total for run in runs[arm]]) if arm in runs else None,
                "said_tok_per_sec": shape.agents * shape.turns * shape.decode / total[arm],
                "live": arm in runs,
            }
        )
    for name, of_shape, tokens in (
        ("this, counted", shape, counted),
        ("50 x 5 envelope, by formula", ENVELOPE, ENVELOPE.prefill_tokens()),
    ):
        report.rows.append(
            {"shape": name, **tokens}
            | {"d_in_whole_pages_by_formula": of_shape.in_whole_pages()}
            | {"a_over_c": tokens["a"] / tokens["c"], "b_over_c": tokens["b"] / tokens["c"]}
        )
    ratios = {f"{x}_over_{y}": total[x] / total[y] for x, y in ("ab", "ac", "bc", "dc")}
    report.rows.append({"ratios_of": "total_ms", **ratios})


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


# ---- siblings ----------------------------------------------------------------------------------------

SIBLINGS = {  # one token said a turn in place of 32 where whole: what is prefilled does not depend on it
    "small": {"W2": Shape(3, 5, 128, 2, 16), "W2L": Shape(2, 5, 320, 2, 16)},
    "scaled": {"W2": Shape(4, 5, 512, 4, 48), "W2L": Shape(2, 5, 1024, 4, 48)},
    "envelope": {"W2": replace(ENVELOPE, decode=1), "W2L": Shape(10, 5, 8192, 1, 64)},
}
WHOLE, BAND = 32, 24  # layers, and how many of them are shared
# at these, tokens x layers over layers; "apart" is what each model's own cache leaves to compute
KNOWN = {
    "W2": {"apart": 25_920, "same": 17_728, "band": 19_776, "unrelated": 25_920},
    "W2L": {"apart": 43_840, "same": 11_072, "band": 19_264, "unrelated": 43_840},
}


def run_siblings(setting: Setting) -> Report:
    """W2 and W2L: prefill work of five agents on five models, in tokens times layers; time to their first tokens.

    The models have the same weights under several names, a band of lower layers in common, or nothing but their shape.
    """
    whole = SIBLINGS[_scale(setting)]
    report = Report("siblings", "measured", {"weights": setting.weights, "runs": setting.repetitions})
    for form, known in KNOWN.items():
        shape = SIBLINGS["envelope"][form]
        work = {what: shape.token_layers(WHOLE, layers) / WHOLE for what, layers in _shared(WHOLE).items()}
        report.equal(f"{form}, {BAND} of {WHOLE} layers, by formula: token layers / layers", work, known)
    with _source(setting, deep=True) as path, open_checkpoint(path) as checkpoint:
        shapes = {form: fitted(shape, checkpoint.config) for form, shape in whole.items()}
        for form, shape in shapes.items():
            report.shape |= {form: str(shape)} | {f"{form}_{key}": of for key, of in _cut(whole[form], shape).items()}
        for what in ("same", "band", "unrelated"):
            _run_models(report, setting, path, what, shapes)
    return report


def _shared(num_layers: int) -> dict[str, int]:
    """Lower layers that the models have in common."""
    return {"apart": 0, "same": num_layers, "band": num_layers * BAND // WHOLE, "unrelated": 0}


def _run_models(report: Report, setting: Setting, path: Path, what: str, shapes: dict[str, Shape]) -> None:
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        num_layers, shared = config.num_layers, _shared(config.num_layers)[what]
        kv_tokens = max(_kv_tokens(shape, config) for shape in shapes.values())
        with open_engine(setting, config, kv_tokens, prefix_cache=False) as engine:
            names = [f"m{i}" for i in range(max(shape.agents for shape in shapes.values()))]
            for i, name in enumerate(names):
                is_first = i == 0 or what == "same"
                engine.add(name, path if is_first else perturbed(checkpoint, shared, seed=i), weights=setting.weights)
            for form, shape in shapes.items():
                setting.progress(f"siblings: {form}, {what}")
                agents = Agents(engine, names, Script(shape, config.vocab_size), is_shared=shared > 0)
                agents.run()
                agents.measure(setting.repetitions)
                _add_models(report, f"{form}, {what}", agents, shape, num_layers, shared)


def _add_models(report: Report, title: str, agents: Agents, shape: Shape, num_layers: int, shared: int) -> None:
    apart, expected = shape.token_layers(num_layers, 0), shape.token_layers(num_layers, shared)
    report.equal(f"{title}: token layers of the prefill", agents.token_layers, expected)
    report.equal(f"{title}: models whose bits differ from a direct prefill", agents.differing, [])
    form, what = title.split(", ")
    report.rows.append(
        {
            "form": form,
            "models": what,
            "layers_shared": f"{shared} of {num_layers}",
            "token_layers": agents.token_layers,
            "apart": apart,
            "times_less": apart / agents.token_layers,
            "first_token_ms": _ms(min(agents.waits)),
            "spread": spread(agents.waits),
            "first_token_ms_apart": _ms(min(agents.waits_apart)),
            "spread_apart": spread(agents.waits_apart),
        }
    )


def _kv_tokens(shape: Shape, config: ModelConfig) -> int:
    """Of all agents and a direct run, with their hidden states."""
    states = config.hidden_size / (2 * config.num_layers * config.num_kv_heads * config.head_dim)
    return int(2 * (shape.agents + 1) * (shape.context + PAGE_TOKENS) * (1 + states))


class Agents:
    """One on each model of an engine without a prefix cache; all but the first go on from what the first has read."""

    def __init__(self, engine: Engine, names: list[str], script: Script, is_shared: bool) -> None:
        self.engine, self.names, self.script, self.is_shared = engine, names, script, is_shared
        self.waits: list[float] = []  # for the second agent's first token
        self.waits_apart: list[float] = []  # and where nothing can be taken over
        self.token_layers = 0
        self.differing: list[str] = []  # models whose keys, values or logits are not those of a direct prefill

    def run(self) -> None:
        """All turns, counted and compared."""
        shape, script = self.script.shape, self.script
        self.engine.events.clear()
        with ExitStack() as stack:
            first = stack.enter_context(self.engine.session(self.names[0]))
            first.append(script.prefix)
            sessions = [first, *(stack.enter_context(self.follow(name, first)) for name in self.names[1:])]
            for turn in range(shape.turns):
                for session, said, results in zip(sessions, script.said, script.results, strict=True):
                    _say(Batch([session]), [said[turn]])
                    if turn < shape.turns - 1:
                        session.append(results[turn])
            self.token_layers = token_layers(self.engine.events.of("prefill"))
            for name, session in zip(self.names, sessions, strict=True):
                self._compare(name, session)

    def measure(self, repetitions: int) -> None:
        """The second agent's first token, in turns with the same computed from nothing; after `run` all is warm."""
        name = self.names[1]
        with self.engine.session(self.names[0]) as first:
            first.append(self.script.prefix)
            for _ in range(repetitions):
                with self.engine.session(name) as direct, self.timed(self.waits_apart):
                    direct.append(self.script.prefix)
                with self.timed(self.waits):
                    session = self.follow(name, first)
                session.close()

    def follow(self, name: str, first: Session) -> Session:
        """A session with the tokens of the first, and its logits."""
        if self.is_shared:
            session = self.engine.session(name, prefix=first)
        else:
            session = self.engine.session(name)
            session.append(first.tokens)
        assert session.logits is not None  # computed where they were not kept
        return session

    def _compare(self, name: str, session: Session) -> None:
        """With one that computes the same tokens from nothing."""
        with self.engine.session(name) as direct:
            logits = direct.append(session.tokens)
            is_same = session.logits is not None and torch.equal(session.logits, logits)
            if not (is_same and torch.equal(session.pages.dump(), direct.pages.dump())):
                self.differing.append(name)

    @contextmanager
    def timed(self, times: list[float]) -> Iterator[None]:
        watch = Watch(self.engine.device)
        with watch.of("all"):
            yield
        times.append(watch.seconds["all"])


# ---- what they run on --------------------------------------------------------------------------------


@contextmanager
def _source(setting: Setting, deep: bool = False) -> Iterator[Path]:
    """The setting's model, or the random one with a context of 16,384 tokens; deep: with its layers twice."""
    with setting.source() as path:
        if setting.model is None:
            _change_config(path, max_position_embeddings=16_384)
            if deep:
                _double(path)
        yield path


def _double(path: Path) -> None:
    file = path / "model.safetensors"
    tensors, num_layers = load_file(file), open_checkpoint(path).config.num_layers
    upper = {
        name.replace(f".{i}.", f".{num_layers + i}."): tensor.clone()
        for name, tensor in tensors.items()
        for i in range(num_layers)
        if f".{i}." in name
    }
    save_file(tensors | upper, file)
    _change_config(path, num_hidden_layers=2 * num_layers)


def _change_config(path: Path, **changes: int) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


WORKLOADS = (
    Workload("session", "agents that share a prompt: naive, a session each, clones in a batch, requests", run_session),
    Workload("siblings", "an agent on each of five models that have layers in common", run_siblings),
)
