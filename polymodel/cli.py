"""The command `polymodel`: pull, ps, run, chat, share, plan, demo, selfcheck, bench."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from typer.core import TyperGroup

import polymodel
from polymodel.config import PoolPolicy, Weights
from polymodel.errors import DuplicateId, FetchFailed, InvalidRequest, PolymodelError, PromptTooLong
from polymodel.ledger import format_bytes, parse_bytes

if TYPE_CHECKING:
    from polymodel.engine import Engine
    from polymodel.sequence import Sequence as Request

INTERRUPTED = 130  # what a shell reports for Ctrl-C


class Commands(TyperGroup):
    """Errors that polymodel raises on purpose become one message and exit code 1, Ctrl-C exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolymodelError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    help="Host many models under one byte budget, share the prefill, decode one at a time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help="GGUF file, safetensors folder, or the name of a pulled model.")]
WeightsOption = Annotated[str, typer.Option(help="file, q8, q4, w8a8, bf16 or f32; 'file' keeps the checkpoint's own.")]
TokensOption = Annotated[int, typer.Option(help="Tokens to generate at most.")]
BudgetOption = Annotated[str | None, typer.Option(help="Bytes for weights, such as 2GiB.")]
KvBudgetOption = Annotated[str | None, typer.Option(help="Bytes for KV pages, such as 256MiB.")]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the likeliest token; else one is drawn.")]
TopPOption = Annotated[float, typer.Option(help="Draw among the fewest tokens whose probabilities reach this.")]
SeedOption = Annotated[int, typer.Option(help="What is drawn depends on it, the position and the logits alone.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polymodel {polymodel.__version__}")
        raise typer.Exit


VersionOption = typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)


@app.callback()
def options(version: Annotated[bool, VersionOption] = False) -> None:
    """What stands before a command."""


@app.command()
def pull(
    source: Annotated[str, typer.Argument(help="A named model (see ps), organisation/model of a hub, or a path.")],
    as_json: JsonOption = False,
) -> None:
    """Fetch a model into the cache and check it; a path is only checked."""
    from polymodel.console import progress
    from polymodel.pull import describe
    from polymodel.pull import pull as fetch

    with progress(f"pulling {source}") as bar:
        found = describe(fetch(source, progress=bar))
    if as_json:
        return _print_json(found)
    size, params = format_bytes(found["bytes"]), found["params"] / 1e6
    typer.echo(f"{found['path']}: {found['arch']}, {found['layers']} layers, {params:.0f}M parameters, {size}")


@app.command()
def ps(as_json: JsonOption = False) -> None:
    """List the models of the cache. No server runs in this version, so nothing stays loaded between commands."""
    from polymodel.pull import pulled

    rows = pulled()
    if as_json:
        return _print_json({"models": rows})
    width = max(len(row["model"]) for row in rows)
    for row in rows:
        typer.echo(f"{row['model'].ljust(width)}  {row['state']:10}  {format_bytes(row['bytes']):>10}  {row['path']}")


@app.command()
def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to answer.")],
    weights: WeightsOption = "file",
    max_new_tokens: TokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    draft: Annotated[
        str,
        typer.Option(help="Who drafts: auto, ngram, twin (the model in fewer bits), a model's path or name, or none."),
    ] = "auto",
    draft_weights: Annotated[
        str, typer.Option(help="Weights of the drafter, as --weights, or of the twin: q4, q8 or w8a8.")
    ] = "q4",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt, without the chat template.")] = False,
    budget: BudgetOption = None,
    kv_budget: KvBudgetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt; the text streams to stdout, what it cost goes to stderr."""
    is_named = draft not in ("auto", "ngram", "twin", "none")
    with _hosting({"model": (model, weights)}, budget, kv_budget, draft_weights if draft == "twin" else None) as engine:
        if is_named:
            _add(engine, "drafter", draft, draft_weights)
        is_chat = not raw and engine["model"].tokenizer.chat_template is not None
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        drafter = "drafter" if is_named else None if draft == "none" else draft
        sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
        request = engine.submit("model", max_new_tokens=max_new_tokens, draft=drafter, **sampling, **asked)
        if as_json:
            engine.wait(request)
            return _print_json(engine.output(request).report() | {"model": model})
        _stream(engine, request)
        metrics = engine.output(request).metrics
        drafted = f", {metrics.num_accepted} of {metrics.num_drafted} drafted" if metrics.num_drafted else ""
        if not drafted and draft not in ("auto", "none"):
            drafted = ", nobody drafted"
        typer.echo(
            f"{metrics.num_output_tokens} tokens, {metrics.tokens_per_second:.1f}/s, "
            f"first after {metrics.time_to_first_token:.2f} s{drafted}",
            err=True,
        )


@app.command()
def chat(
    model: Model,
    weights: WeightsOption = "file",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    budget: BudgetOption = None,
    kv_budget: KvBudgetOption = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D ends, /new forgets what was said."""
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    with _hosting({"model": (model, weights)}, budget, kv_budget) as engine:
        for said in _lines():
            if said == "/new":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": said})
            try:
                sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
                request = engine.submit("model", messages=messages, max_new_tokens=max_new_tokens, **sampling)
                answer = _stream(engine, request, keep_going=True)
            except PolymodelError as error:
                hint = " (/new forgets what was said)" if isinstance(error, PromptTooLong) else ""
                typer.echo(f"error: {error}{hint}", err=True)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})


@app.command()
def share(
    model: Model,
    other: Annotated[str, typer.Argument(help="The model that would go on from its prefixes: path or name.")],
    weights: WeightsOption = "file",
    other_weights: Annotated[str, typer.Option(help="The other model's weights, as --weights.")] = "file",
    budget: BudgetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how many lower layers of a prefix two models have in common, and why not more."""
    from polymodel.share import can_share

    with _hosting({"model": (model, weights), "other": (other, other_weights)}, budget, None) as engine:
        verdict = can_share(engine["model"], engine["other"])
        shared = engine.residency.shared_bytes("other")
    if as_json:
        return _print_json(asdict(verdict) | {"bytes_stored_once": shared})
    typer.echo(f"{verdict.layers} of {verdict.num_layers} layers: {verdict.reason}")
    typer.echo(f"{format_bytes(shared)} of their weights are stored once")


@app.command()
def plan(
    trace: Annotated[str, typer.Argument(help="Requests in order: a name a line, or JSON lines; - reads stdin.")],
    model: Annotated[list[str], typer.Option(help="NAME=BYTES or NAME=PATH, once a model.")],
    budget: Annotated[str, typer.Option(help="Bytes for weights, such as 24GiB.")],
    policy: Annotated[str, typer.Option(help="Who makes room: lru, lru+backout or gdsf.")] = "lru",
    pin: Annotated[list[str] | None, typer.Option(help="A model that stays; once a model.")] = None,
    host_budget: Annotated[str, typer.Option(help="Bytes of host memory for models that made room.")] = "0",
    hardware: Annotated[str | None, typer.Option(help="JSON file of measured speeds; without it, an H200's.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace of requests: which would find their model in memory. Simulated; nothing is loaded."""
    from polymodel import sim

    found = sim.plan(
        _sizes(model),
        sim.read_trace(_lines_of(trace)),
        _bytes("--budget", budget),
        policy=cast(PoolPolicy, policy),
        pinned=pin or (),
        hardware=sim.H200 if hardware is None else sim.Hardware.from_json(hardware),
        host_budget=_bytes("--host-budget", host_budget),
    )
    if as_json:
        return _print_json(found.as_dict())
    typer.echo(str(found))


@app.command()
def demo(
    max_new_tokens: TokensOption = 48,
    budget: Annotated[str, typer.Option(help="Bytes for weights; the three models take under 500 MiB.")] = "640MiB",
    as_json: JsonOption = False,
) -> None:
    """Three models of one checkpoint answer six prompts on one lane; then the ledger, the turns and the speed."""
    from polymodel.checkpoint import resolve
    from polymodel.console import progress
    from polymodel.demo import run_demo, show_nothing, show_on
    from polymodel.pull import pull as fetch

    try:
        path = resolve("smollm2")
    except FetchFailed:
        with progress("pulling smollm2") as bar:
            path = fetch("smollm2", progress=bar)
    done = run_demo(path, budget, max_new_tokens, show_nothing if as_json else show_on(sys.stdout))
    if as_json:
        _print_json(done.as_dict())
    else:
        done.print(sys.stdout)
    if not done.is_good:
        raise typer.Exit(1)


@app.command()
def selfcheck(
    model: Annotated[str | None, typer.Argument(help="Path or name; without it, a small random model.")] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Check the promises here: budgets, one decode at a time, equal bits, forgetting, sharing, lossless drafting."""
    from polymodel.selfcheck import selfcheck as run_checks

    checks = []
    for check in run_checks(model, device):
        checks.append(check)
        if not as_json:
            typer.echo(f"{'ok  ' if check.passed else 'FAIL'}  {check.name} ({check.detail})")
    passed = all(check.passed for check in checks)
    if as_json:
        _print_json({"passed": passed, "checks": [asdict(check) for check in checks]})
    if not passed:
        raise typer.Exit(1)


@app.command()
def bench(
    model: Annotated[str | None, typer.Argument(help="Path or name; without it, a small random model.")] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="A name of --list, once a workload; all without it.")
    ] = None,
    size: Annotated[str, typer.Option(help="small or full.")] = "small",
    weights: WeightsOption = "file",
    device: DeviceOption = "auto",
    repetitions: Annotated[int, typer.Option(min=1, help="Of what is timed.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Write the JSON here too, anew after each workload.", dir_okay=False)
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Name the workloads and run none.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run workloads and say of each number what it must be; exit code 1 where one is not, or a workload fails."""
    from polymodel import workloads
    from polymodel.checkpoint import resolve
    from polymodel.workloads.report import Setting, device_of

    if show_list:
        return _print_list({one.name: one.about for one in workloads.WORKLOADS.values()}, as_json)
    if size not in ("small", "full"):
        raise InvalidRequest(f"--size {size!r}: expected small or full")
    setting = Setting(
        model=None if model is None else resolve(model),
        size=cast(Literal["small", "full"], size),
        weights=cast(Weights, weights),
        device=device,
        repetitions=repetitions,
    )
    environment = workloads.environment(device_of(setting))
    found: dict[str, Any] = {"environment": environment, "model": model, "size": size, "weights": weights}
    found |= {"passed": True, "reports": []}
    for report in workloads.run(workload or (), setting):
        found["passed"] &= report.passed
        found["reports"].append(report.as_dict())
        if out is not None:
            _write_json(out, found)
        if not as_json:
            typer.echo(f"{report}\n")
    if as_json:
        _print_json(found)
    if not found["passed"]:
        raise typer.Exit(1)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """At once, so that a run cut short leaves a whole file."""
    try:
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(value, indent=1) + "\n")
        fresh.replace(path)
    except OSError as error:
        raise InvalidRequest(f"--out {path}: {error}") from error


def _print_list(about: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        return _print_json(about)
    width = max(map(len, about))
    for name, line in about.items():
        typer.echo(f"{name.ljust(width)}  {line}")


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InvalidRequest(f"{option}: {error}") from error


def _lines_of(trace: str) -> list[str]:
    if trace == "-":
        return sys.stdin.read().splitlines()
    try:
        return Path(trace).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"no trace can be read from {trace}: {error}") from error


def _sizes(models: Sequence[str]) -> dict[str, int | dict[Hashable, int]]:
    """Name -> its bytes, or the pieces of a file, so that a file under two names counts once."""
    sizes: dict[str, int | dict[Hashable, int]] = {}
    for given in models:
        name, _, size = given.partition("=")
        if not (name and size):
            raise InvalidRequest(f"--model {given!r}: expected NAME=BYTES or NAME=PATH")
        if name in sizes:
            raise DuplicateId(f"--model {given!r}: a model named {name!r} is already there")
        try:
            sizes[name] = parse_bytes(size)
        except ValueError as error:
            if size.startswith("-"):
                raise InvalidRequest(f"--model {given!r}: model {name!r} cannot have {size} bytes") from error
            sizes[name] = _pieces_of(size)
    return sizes


def _pieces_of(source: str) -> dict[Hashable, int]:
    """Exact bytes by the file's headers, for the whole of the model's context."""
    from polymodel.checkpoint import open_checkpoint, resolve
    from polymodel.packing import plan_weights

    path = resolve(source)
    with open_checkpoint(path) as checkpoint:
        planned = plan_weights(checkpoint, "file", checkpoint.config.max_context - 1)
    return {(str(path), name): piece.nbytes for name, piece in planned.pieces.items()}


@contextmanager
def _hosting(
    models: Mapping[str, tuple[str, str]], budget: str | None, kv_budget: str | None, twin: str | None = None
) -> Iterator[Engine]:
    """An engine with these models: name -> (path or name, weights); twin: weights of the twins added with them."""
    from polymodel.config import EngineConfig
    from polymodel.engine import Engine

    # one model at a time, so a turn may be a single step: the text then comes token by token
    with Engine(budget=budget, kv_budget=kv_budget, config=EngineConfig(quantum=1)) as engine:
        for name, (source, weights) in models.items():
            _add(engine, name, source, weights, twin)
        yield engine


def _add(engine: Engine, name: str, source: str, weights: Any, twin: Any = None) -> None:
    from polymodel.console import progress

    with progress(f"loading {source}") as bar:
        engine.add(name, source, weights=weights, twin=twin, progress=bar)


def _stream(engine: Engine, request: Request, keep_going: bool = False) -> str:
    """Print a request's text as it comes and return it; keep_going: Ctrl-C ends the text and not the program."""
    from polymodel.console import follow, interruptible, printable

    said = []
    with ExitStack() as stack:
        is_stopped = stack.enter_context(interruptible()) if keep_going else lambda: False
        for _, piece in follow(engine, [request], is_stopped):
            said.append(piece)
            typer.echo(printable(piece), nl=False)
            sys.stdout.flush()
    typer.echo()
    return "".join(said)


def _lines() -> Iterator[str]:
    """What is typed, line by line, without the empty ones; Ctrl-D ends it, Ctrl-C drops the line."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo("\n(Ctrl-D ends)")
            continue
        if line:
            yield line


def _print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    typer.echo(json.dumps(value))


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know every character of a text
    app()


if __name__ == "__main__":
    main()
