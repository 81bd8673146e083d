"""Quantised weights in safetensors files, and what the parts of each layout must be.

One JSON entry of the file's metadata describes every weight; its parts are the file's tensors, "name.part".
Promise: a file whose description contradicts its tensors is refused, so that no kernel reads past them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from csrc_triton.quant import (
    DENSE,
    EIGHT_BITS,
    GGUF,
    SIX_BITS,
    TILE_ROWS,
    QTensor,
    check_plain,
    perm_problem,
)

SAVED = "qtensors"  # key of the file's metadata
SAVED_VERSION = 1
SAVED_FIELDS = ("fmt", "shape", "group", "segments", "layout")


def save_qtensors(path: str | os.PathLike[str], weights: Mapping[str, QTensor]) -> None:
    """Write weights of any layout that is made of tensors to a safetensors file; a file there is replaced whole."""
    from safetensors.torch import save_file

    header, tensors, storages = {}, {}, set()
    for name, q in weights.items():
        check_plain(q, f"save {name!r} with its")
        if problem := part_problem(q):
            raise ValueError(f"cannot save {name!r}, {q.fmt} {q.shape}: {problem}")
        header[name] = {field: getattr(q, field) for field in SAVED_FIELDS} | {"parts": list(q.parts)}
        for part, tensor in q.parts.items():
            storage = (tensor.device, tensor.untyped_storage().data_ptr())
            # safetensors takes no two views of one storage
            is_view = storage in storages or not tensor.is_contiguous()
            tensors[f"{name}.{part}"] = tensor.clone(memory_format=torch.contiguous_format) if is_view else tensor
            storages.add(storage)
    partial = Path(f"{os.fspath(path)}.partial")
    try:
        save_file(tensors, partial, {SAVED: json.dumps({"version": SAVED_VERSION, "weights": header})})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_qtensors(path: str | os.PathLike[str]) -> dict[str, QTensor]:
    """The weights that `save_qtensors` wrote, bit for bit, in memory of their own."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            header = saved_header(path, file.metadata())
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118  the file is no mapping
    except SafetensorError as error:
        raise ValueError(f"{path}: no sound safetensors file: {error}") from error
    weights = {}
    for name, entry in header.items():
        where = f"{path}: weight {name!r}"
        if missing := [part for part in entry["parts"] if f"{name}.{part}" not in tensors]:
            raise ValueError(f"{where}: part {missing[0]!r} is missing")
        parts = {part: tensors.pop(f"{name}.{part}") for part in entry["parts"]}
        fields = {field: entry[field] for field in SAVED_FIELDS}
        weights[name] = q = QTensor(**{**fields, "shape": tuple(entry["shape"])}, parts=parts)
        if problem := part_problem(q):
            raise ValueError(f"{where}, {q.fmt} {q.shape}: {problem}")
    if tensors:
        raise ValueError(f"{path}: tensor {min(tensors)!r} belongs to no weight")
    return weights


def saved_header(path: object, metadata: Mapping[str, str] | None) -> dict[str, dict[str, Any]]:
    """Each weight's fields, their types checked."""
    where = f"{path}: metadata {SAVED!r}"
    try:
        saved = json.loads((metadata or {})[SAVED])
    except KeyError:
        raise ValueError(f"{where} is missing: not a file of save_qtensors") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not readable as JSON: {error}") from error
    if not isinstance(saved, dict) or not isinstance(weights := saved.get("weights"), dict):
        raise ValueError(f"{where} holds no weights")
    if (version := saved.get("version")) != SAVED_VERSION:
        raise ValueError(f"{where} is of version {version!r}, expected {SAVED_VERSION}")

    def is_count(value: object, least: int = 1) -> bool:
        return type(value) is int and value >= least

    is_good: dict[str, Callable[[Any], bool]] = {
        "fmt": lambda v: isinstance(v, str) and (v in GGUF or v in ("q4", "q8")),
        "shape": lambda v: isinstance(v, list) and len(v) == 2 and all(map(is_count, v)),
        "group": lambda v: is_count(v, 0),
        "segments": is_count,
        "layout": lambda v: isinstance(v, str),
        "parts": lambda v: isinstance(v, list) and bool(v) and all(isinstance(part, str) for part in v),
    }
    for name, entry in weights.items():
        for field, check in is_good.items():
            if not isinstance(entry, dict) or field not in entry:
                raise ValueError(f"{where}: weight {name!r} has no {field!r}")
            if not check(entry[field]) or (field == "parts" and len(set(entry[field])) < len(entry[field])):
                raise ValueError(f"{where}: weight {name!r} has {field!r} {entry[field]!r}")
    return weights


def part_problem(q: QTensor) -> str | None:
    """What in q's fields and parts contradicts its format, as far as its layout is known here; None if nothing."""
    (n, k), held = q.shape, set(q.parts) - {"perm"}
    if q.segments > math.ceil(k / 128):
        return f"{q.segments} segments, expected at most {math.ceil(k / 128)}"
    if "perm" in q.parts and (problem := perm_problem(q)):
        return problem
    group = GGUF[q.fmt].group if q.fmt in GGUF else q.group
    if q.group != group or (q.fmt not in GGUF and not 1 <= group <= k):
        return f"group {q.group}, expected {group if q.fmt in GGUF else f'1..{k}'}"
    if q.layout in (*TILE_ROWS, "t64-glu"):
        return _tiles_problem(q)
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    if q.layout.startswith("cpu-"):
        expected, whole = _cpu_parts(q)
        if not expected:
            return None
        if n % whole[0] or k % whole[1]:
            return f"layout {q.layout!r} needs multiples of {whole[0]} rows and {whole[1]} columns"
    elif q.layout != "rows":
        return None
    elif q.fmt in DENSE:
        expected = {"weight": (DENSE[q.fmt], (n, k))}
    elif q.fmt in GGUF:
        form = GGUF[q.fmt]
        if k % form.weights:
            return f"expected K in multiples of {form.weights}"
        expected = {"blocks": (torch.uint8, (n, k // form.weights * form.nbytes))}
    else:
        per_group = (n, math.ceil(k / group))
        expected = {"scale": (torch.float32, per_group)}
        expected["codes"] = (torch.uint8, (n, math.ceil(k / 2))) if q.fmt == "q4" else (torch.int8, (n, k))
        if "zero" in held:
            expected["zero"] = (torch.float32, per_group)
        elif "zero_point" in held and q.fmt == "q4":
            expected["zero_point"] = (torch.uint8, per_group)
    if held != set(expected):
        return f"parts {sorted(held)}, expected {sorted(expected)}"
    for name, (dtype, shape) in expected.items():
        part = q.parts[name]
        if part.dtype != dtype or tuple(part.shape) != shape:
            return f"{name!r} is {part.dtype} {list(part.shape)}, expected {dtype} {list(shape)}"
    return None


def _cpu_parts(q: QTensor) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], tuple[int, int]]:
    """Parts of a weight packed for a CPU (see cpu.py), and what N and K must be multiples of: torch checks neither."""
    n, k = q.shape
    match q.layout.split("-")[1]:
        case "f32":
            return {"weight": (torch.float32, (n, k))}, (1, 1)
        case "i8":
            return {"codes": (torch.int8, (n, k)), "scale": (torch.bfloat16, (n,))}, (1, 64)
        case "i4":
            scales = (torch.bfloat16, (k // 32, n, 2))
            return {"nibbles": (torch.uint8, (n, k // 2)), "scale_bias": scales}, (64, 64)
        case "w8a8":
            return {"codes": (torch.int8, (n, k)), "scale": (torch.float32, (n,))}, (1, 1)
    return {}, (1, 1)


def _tiles_problem(q: QTensor) -> str | None:
    """What in the parts of a weight in tiles (see t64.py) a kernel would misread, or read past their ends."""
    (n, k), is_glu = q.shape, q.layout == "t64-glu"
    tiles = 2 * math.ceil(n / 128) if is_glu else math.ceil(n / 64)
    blocks = math.ceil(k / 128)
    if q.fmt in DENSE or (is_glu and n % 2) or k % (GGUF[q.fmt].weights if q.fmt in GGUF else 1):
        return f"{q.fmt} {n}x{k} has no such layout"
    held = {name: (part.dtype, tuple(part.shape)) for name, part in q.parts.items() if name != "perm"}
    scale = held.get("scale", (None, ()))
    bits = 6 if q.fmt in SIX_BITS else 8 if q.fmt in EIGHT_BITS else 4
    inner = {4: (64, 32), 6: (2, 64, 16), 8: (2, 64, 32)}[bits]
    expected: dict[str, tuple[Any, tuple[int, ...]]] = {"codes": (torch.int16, (tiles, blocks, *inner)), "scale": scale}
    if bits == 6:
        expected["high"] = (torch.int16, (tiles, blocks, 64, 16))
    half = (torch.int32, (tiles, blocks, 2, 64))
    floats = [(torch.float32, (tiles, blocks, groups, 64)) for groups in (1, 2, 4)]
    whole = [(torch.float32, (tiles, count, 64)) for count in (1, blocks)]
    zero = [(torch.int32, (tiles, count, 64)) for count in (1, blocks) if q.fmt == "q4"]
    if q.layout == "t64-int8":
        expected = {"codes": (torch.int8, (tiles, blocks, 64, 128)), "scale": (torch.float32, (tiles, 1, 64))}
        if q.fmt != "q8":
            return f"{q.fmt} has no such layout"
    elif q.fmt in ("q4_k", "q5_k", "q6_k"):
        expected |= {"scale": half, "extra": (torch.int32, (tiles, math.ceil(blocks / 2), 64))}
    elif scale not in ([half] if q.fmt in GGUF else [half, *floats, *whole, *zero]):
        return f"its scale is {scale[0]} {list(scale[1])}"
    elif q.fmt in ("q4_1", "q5_1") or ("extra" in held and q.fmt not in GGUF and scale not in (*whole, *zero)):
        expected["extra"] = scale
    if held != expected:
        return f"parts {held}, expected {expected}"
    strided = [name for name, part in q.parts.items() if not part.is_contiguous()]
    return f"{strided[0]!r} is not contiguous" if strided else None
