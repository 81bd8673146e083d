"""The demo model cut to its first layers, and what it gives in float32 on a CPU: what tools/gpu_run.py takes to a GPU.

    python tools/cut_model.py [--layers 12] [--out build/smollm2-12]

Writes model.gguf (tensors as in the file, tokenizer included) and reference.safetensors: for each prompt its token ids,
float32 logits at a few of its positions, and the tokens that follow greedily with their margins, the likeliest logit
less the next. Beside the weights of the file the logits at the last position are also there for weights that are
rounded to q8 and q4 as a GPU stores them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

from csrc_triton.quant import dequantize, from_gguf, quantize
from polymodel import Engine
from polymodel.checkpoint import Checkpoint, open_checkpoint, resolve
from polymodel.config import EngineConfig
from polymodel.packing import GPU_GROUP

ROOT = Path(__file__).resolve().parents[1]
MODEL, REFERENCE = "model.gguf", "reference.safetensors"
ROUNDED = ("q8", "q4")
PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village between two rivers, there lived a clockmaker who",
)
NUM_TOKENS = 32  # after each prompt


# ---- the model -----------------------------------------------------------------------------------------


def cut(source: Path, target: Path, layers: int) -> None:
    """The first layers of a GGUF file, everything else as it is."""
    import gguf

    with open_checkpoint(source) as whole:
        arch, most = whole.config.arch, whole.config.num_layers
    if layers > most:
        raise typer.BadParameter(f"--layers {layers}: {source} has {most} layers")
    reader, writer, count = gguf.GGUFReader(source), gguf.GGUFWriter(target, arch), f"{arch}.block_count"
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, layers if name == count else field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        part = tensor.name.split(".")
        if part[0] != "blk" or int(part[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- the reference -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model gives for a prompt, in float32 on a CPU."""

    ids: list[int]
    positions: list[int]  # of `logits`, as tokens before and including them
    logits: dict[str, Tensor]  # weights -> [positions, vocab]; of rounded ones the last position alone
    tokens: list[int]  # greedily
    margins: list[float]


def read_reference(folder: Path) -> list[Prompt]:
    """As `write_reference` left it."""
    parts = load_file(folder / REFERENCE)
    found = []
    for i in range(sum(name.startswith("ids.") for name in parts)):
        logits = {weights: parts[f"{weights}.{i}"] for weights in ("file", *ROUNDED)}
        numbers = (parts[f"{name}.{i}"].tolist() for name in ("ids", "positions", "tokens", "margins"))
        ids, positions, tokens, margins = numbers
        found.append(Prompt(ids, positions, logits, tokens, margins))
    return found


def write_reference(
    source: Path, folder: Path, *, prompts: Sequence[str] = PROMPTS, count: int = NUM_TOKENS, group: int = GPU_GROUP
) -> None:
    """group: of weights="q4", which depends on the device."""
    parts: dict[str, Tensor] = {}
    for weights in ("file", *ROUNDED):
        with _in_float32(source, weights, group) as engine:
            for i, prompt in enumerate(prompts):
                ids = engine["m"].tokenizer.encode(prompt)
                with engine.session("m") as session:
                    middle = session.append(ids[: len(ids) // 2])
                    last = session.append(ids[len(ids) // 2 :])
                    if weights != "file":
                        parts[f"{weights}.{i}"] = last[None]
                        continue
                    parts[f"file.{i}"] = torch.stack((middle, last))
                    parts[f"ids.{i}"] = torch.tensor(ids)
                    parts[f"positions.{i}"] = torch.tensor([len(ids) // 2, len(ids)])
                    tokens, margins = [], []
                    for _ in range(count):
                        top, at = last.topk(2)
                        tokens.append(int(at[0]))
                        margins.append(float(top[0] - top[1]))
                        last = session.append(tokens[-1:])
                    parts[f"tokens.{i}"], parts[f"margins.{i}"] = torch.tensor(tokens), torch.tensor(margins)
    save_file(parts, folder / REFERENCE)


@contextmanager
def _in_float32(source: Path, weights: str, group: int) -> Iterator[Engine]:
    checkpoint = open_checkpoint(source)
    with Engine(device="cpu", budget="8GiB", config=EngineConfig(prefix_cache=False)) as engine:
        engine.add("m", checkpoint if weights == "file" else _Rounded(checkpoint, weights, group), weights="f32")
        yield engine
    checkpoint.close()


class _Rounded(Checkpoint):
    """A checkpoint whose matrices have been rounded, embedding and head to q8, and are stored as float32."""

    def __init__(self, base: Checkpoint, weights: str, group: int) -> None:
        super().__init__(base.path, base.format, base.config, base.metadata, dict(base._stored))
        self._kinds = {name: info.kind for name, info in self.tensors.items()}
        self._weights, self._group = weights, group
        self.tensors = {
            name: replace(info, kind="F32", nbytes=4 * info.shape[0] * info.shape[1])
            for name, info in self.tensors.items()
        }

    def raw(self, name: str) -> Tensor:
        info = self.tensors[name]
        w = dequantize(from_gguf(super().raw(name), self._kinds[name], info.shape))
        if not name.endswith(("norm", "bias")):
            low = self._weights == "q4" and name not in ("embed", "head")
            w = dequantize(quantize(w, "q4", self._group) if low else quantize(w, "q8", None))
        return w.view(torch.uint8).view(info.shape[0], -1)


# ---- the command ---------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    layers: Annotated[int, typer.Option(min=1, help="how many are kept")] = 12,
    out: Annotated[Path | None, typer.Option(help="folder; build/smollm2-LAYERS where not given")] = None,
    source: Annotated[str, typer.Option(help="a GGUF file, or the name of a pulled model")] = "smollm2",
) -> None:
    """Write the cut model and its reference."""
    out = out or ROOT / "build" / f"smollm2-{layers}"
    out.mkdir(parents=True, exist_ok=True)
    cut(resolve(source), out / MODEL, layers)
    write_reference(out / MODEL, out)
    sizes = {out / name: (out / name).stat().st_size / 2**20 for name in (MODEL, REFERENCE)}
    for path, size in sizes.items():
        print(f"{path}: {size:.1f} MiB")
    print(f"to carry: {sum(sizes.values()):.1f} MiB")


if __name__ == "__main__":
    app()
