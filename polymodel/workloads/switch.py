"""The time to the first token of a model that is on the device, in the host's memory, in its file, or not added yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polymodel.checkpoint import open_checkpoint
from polymodel.config import Weights
from polymodel.engine import Engine
from polymodel.sim import H200
from polymodel.workloads.report import Limit, Report, Setting, Watch, Workload, lcg, open_engine, spread

MODEL = "m"
PROMPT = 16  # tokens
STATES = ("device", "host", "disk", "cold")


@dataclass(frozen=True, slots=True)
class Switch:
    seconds: float  # to the logits of the first token
    num_bytes: int  # of weights that were not there
    logits: Tensor


class Switcher:
    """One model of an engine, sent away and asked for."""

    def __init__(self, engine: Engine, path: Path, weights: Weights, vocab: int) -> None:
        self.engine, self.path, self.weights, self.prompt = engine, path, weights, lcg(PROMPT, 1, vocab)
        self._add()

    def _add(self) -> None:
        self.engine.add(MODEL, self.path, weights=self.weights)

    def send(self, state: str) -> None:
        """To where it is to come from."""
        if state == "host":
            budget = self.engine.budget
            self.engine.budget = 0
            self.engine.budget = budget
        elif state == "disk":
            self.engine.unload(MODEL)
        elif state == "cold":
            self.engine.remove(MODEL)

    @property
    def state(self) -> str:
        return self.engine.residency.state(MODEL) if MODEL in self.engine else "cold"

    def first_token(self) -> Switch:
        """Ask for it, wherever it is; it stays on the device."""
        watch, events = Watch(self.engine.device), self.engine.events
        events.clear()
        with watch.of("all"):
            if MODEL not in self.engine:
                self._add()
            session = self.engine.session(MODEL)
            logits = session.append(self.prompt)
        session.close()
        num_bytes = sum(event.num_bytes for event in events.of("admit", "page_in"))
        return Switch(watch.seconds["all"], num_bytes, logits)


def run_switch(setting: Setting) -> Report:
    """W8, the four in turns, `repetitions` times or as often as there is time for.

    The file is in the page cache. A load is what a first token takes longer than from the device: no byte moves in it
    where a CPU's model is in host memory, which is the device's.
    """
    limit = Limit(setting.seconds)
    with setting.source() as path, open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        with open_engine(setting, config, 4 * PROMPT, prefix_cache=False, host_budget=1 << 40) as engine:
            switcher, device = Switcher(engine, path, setting.weights, config.vocab_size), engine.device
            nbytes = engine[MODEL].nbytes
            first = switcher.first_token()
            runs: dict[str, list[Switch]] = {state: [] for state in STATES}
            found: list[str] = []
            turn = 0.0
            for repetition in range(setting.repetitions):
                if repetition and limit.used + turn > limit.seconds:
                    break
                setting.progress(f"switch: run {repetition + 1} of {setting.repetitions}")
                before = limit.used
                for state in STATES:
                    switcher.send(state)
                    found.append(switcher.state)
                    runs[state].append(switcher.first_token())
                turn = limit.used - before
    count = len(runs["device"])
    shape = {"prompt": PROMPT, "weights": setting.weights, "bytes": nbytes, "file": "in the page cache"}
    report = Report("switch", "measured", shape | {"device": str(device), "runs": count})
    report.equal("where the model was", found, list(STATES) * count)
    least = {state: min(run.seconds for run in of) for state, of in runs.items()}
    for state, of in runs.items():
        expected = 0 if state == "device" else nbytes
        report.equal(f"{state}: bytes that were not there", sorted({run.num_bytes for run in of}), [expected])
        differing = sum(not torch.equal(run.logits, first.logits) for run in of)
        report.equal(f"{state}: runs whose logits differ from those of before", differing, 0)
        load = least[state] - least["device"]
        moves = state != "device" and (state != "host" or device.type == "cuda")
        report.rows.append(
            {
                "from": state,
                "first_token_ms": 1e3 * least[state],
                "spread": spread([run.seconds for run in of]),
                "bytes_needed": of[0].num_bytes,
                "load_ms": None if state == "device" else 1e3 * load,
                "gb_per_sec": of[0].num_bytes / load / 1e9 if moves and load > 0 else None,
            }
        )
    return report


# ---- simulated ---------------------------------------------------------------------------------------

SIZES = {"0.6B": 0.6e9, "1.7B": 1.7e9, "4B": 4e9, "8B": 8e9, "14B": 14e9, "32B": 32e9, "70B": 70e9}
WEIGHT_BYTES = {"bf16": 2, "8 bit": 1}
KNOWN = {("8B", "bf16"): 0.32, ("32B", "8 bit"): 0.64, ("32B", "bf16"): 1.28, ("70B", "8 bit"): 1.40}  # seconds


def run_switch_h200(setting: Setting) -> Report:
    """W8 as computed from an H200's speeds: nothing is run."""
    shape = {"hardware": H200.name, "prompt": PROMPT, "host_gb_per_sec": H200.host_bandwidth / 1e9}
    report = Report("switch-h200", "simulated", shape | {"disk_gb_per_sec": H200.disk_bandwidth / 1e9})
    for model, params in SIZES.items():
        for weights, width in WEIGHT_BYTES.items():
            nbytes = int(params * width)
            first = max(H200.decode_seconds(nbytes, 0), H200.prefill_seconds(params, PROMPT))
            host, disk = (H200.page_in_seconds(nbytes, from_host) for from_host in (True, False))
            if (model, weights) in KNOWN:
                report.equal(f"{model} {weights}: seconds from host memory", round(host, 9), KNOWN[model, weights])
            report.rows.append(
                {
                    "model": model,
                    "weights": weights,
                    "bytes": nbytes,
                    "device_ms": 1e3 * first,
                    "host_ms": 1e3 * (host + first),
                    "disk_ms": 1e3 * (disk + first),
                }
            )
    return report


WORKLOADS = (
    Workload(
        "switch", "time to the first token of a model: on the device, in host memory, on disk, not added", run_switch
    ),
    Workload("switch-h200", "the same for 0.6B to 70B by an H200's speeds, simulated", run_switch_h200),
)
