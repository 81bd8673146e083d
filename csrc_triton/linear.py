"""A Linear layer with a quantised weight, and the walk that puts it where a model has nn.Linear.

    y[..., :] = x[..., :] . W^T + bias          W quantised once, by `quantize` or a file

Memory: a layer's buffers are the parts of its weight, always without loss: in layout "rows" as made, or on a GPU,
from the first use on, in T64 instead. A CPU multiplies by a copy made at first use (float32 [N, K], or the
int8 or int4 form that fits the format), which a move, a load or a pickle of the layer drops.

Promise: a row of y depends on that row of x alone, bit for bit: not on how many rows a call has.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from csrc_triton import cpu, launch, ops, t64
from csrc_triton.files import SAVED, SAVED_FIELDS, SAVED_VERSION, part_problem, saved_header
from csrc_triton.operands import FLOATS
from csrc_triton.qmatmul import matmul
from csrc_triton.quant import (
    DENSE,
    QTensor,
    dequantize,
    num_segments,
    quantize,
)

HEADER = "_extra_state"  # torch's name for what a state dict holds beside tensors; here a tensor too
EXPECTED_GROUP = "expected a multiple of 32, or None for a whole row"


class QLinear(nn.Module):
    """nn.Linear with a quantised weight, for inference: `QLinear.from_linear(linear)`, or QLinear(qtensor, bias).

    x [..., in_features] -> [..., out_features] in x's dtype. On a GPU x is float32, bfloat16 or float16 and computed
    in; a CPU computes in float32 and converts the others on the way in and out. ValueError where x requires grad.
    """

    bias: Tensor | None
    _ready: QTensor | None  # what the device multiplies by: the stored weight in T64, or a CPU's copy

    def __init__(self, weight: QTensor, bias: Tensor | None = None) -> None:
        super().__init__()
        _check_weight(weight)
        self.out_features, self.in_features = weight.shape
        if bias is not None and (tuple(bias.shape) != (self.out_features,) or not bias.is_floating_point()):
            raise ValueError(f"QLinear: bias must be floats [{self.out_features}], got {bias.dtype} {list(bias.shape)}")
        self._hold(weight)
        self.register_buffer("bias", None if bias is None else bias.detach().contiguous())

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        fmt: str = "q4",
        group: int | None = 128,
        symmetric: bool = True,
        clip_search: int = 0,
    ) -> QLinear:
        """`quantize` of the layer's weight; its bias is copied. A layer on the meta device gives one to load into."""
        n, k = linear.weight.shape
        if group and group < k and group % 32:
            raise ValueError(f"QLinear: groups of {group} columns of {k}: {EXPECTED_GROUP}")
        weight = linear.weight.detach()
        if weight.is_meta:
            q = quantize(torch.zeros(1, k), fmt, group, symmetric)
            parts = {name: part.new_empty(n, *part.shape[1:], device="meta") for name, part in q.parts.items()}
            q = replace(q, shape=(n, k), segments=num_segments(n, k), parts=parts)
        else:
            q = quantize(weight, fmt, group, symmetric, clip_search=clip_search)
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(q, bias).train(linear.training)

    # ---- the product ---------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"QLinear: x must be [..., {self.in_features}], got {list(x.shape)}")
        if x.device != self.device:
            raise ValueError(f"QLinear: x is on {x.device} and the layer on {self.device}")
        weight = self._ready if self._ready is not None else self.pack()
        rows = (x if x.ndim == 2 else x.reshape(-1, self.in_features)).contiguous()
        multiply = ops.matmul if torch.compiler.is_compiling() else matmul
        bias = self.bias
        if weight.layout == "t64":
            y = multiply(rows, weight, bias=bias)
        else:
            if x.dtype not in FLOATS:
                raise ValueError(f"QLinear: x must be float32, bfloat16 or float16, got {x.dtype}")
            y = multiply(rows.float(), weight, bias=None if bias is None else bias.float()).to(x.dtype)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.out_features)

    @torch.compiler.disable
    def pack(self, scheme: str | None = None) -> QTensor:
        """Make what the layer's device multiplies by, as the first call does; -> that weight.

        Before torch.compile it spares the break of the graph at this point. scheme: one of the CPU's, instead of
        int8 or int4 where they fit the format and float32 elsewhere; "f16" halves the memory, but cannot be compiled.
        """
        stored = self.weight_as_stored()
        if stored.device.type == "meta":
            raise ValueError("QLinear: the layer is on the meta device; load a state dict into it first")
        if launch.runs_kernel(next(iter(stored.parts.values()))):
            if scheme is not None:
                raise ValueError(f"QLinear: scheme {scheme!r} is one of the CPU's; on {stored.device} expected None")
            if stored.layout == "rows":
                self._hold(t64.pack_t64(stored))
            self._ready = self.weight_as_stored()
        else:
            rows = stored if stored.layout == "rows" else t64.unpacked(stored)
            if scheme is None:
                best = cpu.scheme_for(rows.fmt, rows.group, rows.shape, "zero" not in rows.parts)
                scheme = best if best in ("i8", "i4") else "f32"
            with torch.no_grad():
                self._ready = cpu.checked(cpu.pack(rows, scheme))
        return self._ready

    def __getattr__(self, name: str) -> Any:
        if name == "weight":  # read by some of torch's own fast paths
            raise AttributeError("QLinear holds no float `weight`; `dequantize()` makes one")
        return super().__getattr__(name)

    # ---- the weight ----------------------------------------------------------------------------------

    def weight_as_stored(self) -> QTensor:
        """The weight that the buffers are, in layout "rows" or "t64"."""
        return QTensor(**self._fields, parts={name: self._part(name) for name in self._parts})

    @property
    def device(self) -> torch.device:
        return self._part(self._parts[0]).device

    def dequantize(self) -> Tensor:
        """W as float32 [N, K]."""
        q = self.weight_as_stored()
        return dequantize(q) if q.layout == "rows" else t64.dequantize_t64(q)

    def _part(self, name: str) -> Tensor:
        part = self._buffers[name]
        assert part is not None
        return part

    def _hold(self, q: QTensor) -> None:
        for name in getattr(self, "_parts", ()):
            del self._buffers[name]
        self._fields = {field: getattr(q, field) for field in SAVED_FIELDS}
        self._parts = tuple(q.parts)
        self._ready = None
        for name, part in q.parts.items():
            self.register_buffer(name, part)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QLinear:
        """Moves what a module's moves move; half() and to(dtype) cast the bias alone."""
        parts = {name: self._part(name) for name in self._parts}
        super()._apply(fn, recurse)
        for name, part in parts.items():
            moved = self._part(name)
            if moved.dtype != part.dtype:
                self._buffers[name] = part.to(moved.device)
        self._ready = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None}

    # ---- state dicts ---------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """What the parts are, as the bytes of JSON: a tensor, so that files of tensors alone can hold it."""
        text = json.dumps({"version": SAVED_VERSION, "weights": {"": {**self._fields, "parts": self._parts}}})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing: `_load_from_state_dict` has read it, before the parts."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """The layer takes the format and the layout of what it loads."""
        if prefix + HEADER in state_dict:
            try:
                q = self._described_by(state_dict, prefix)
            except ValueError as error:
                error_msgs.append(f"{prefix.rstrip('.') or 'QLinear'}: {error}")
                return
            place = None if self.device.type == "meta" else self.device  # None: where the loaded part is
            self._hold(replace(q, parts={name: torch.empty_like(part, device=place) for name, part in q.parts.items()}))
            bias = state_dict.get(prefix + "bias")
            if self.bias is not None and self.bias.is_meta and isinstance(bias, Tensor):
                self.bias = torch.empty_like(self.bias, device=bias.device)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._ready = None

    def _described_by(self, state_dict: Mapping[str, Any], prefix: str) -> QTensor:
        header = state_dict[prefix + HEADER]
        if not isinstance(header, Tensor) or header.dtype != torch.uint8:
            raise ValueError(f"{HEADER} does not describe a quantised weight")
        entry = saved_header("state dict", {SAVED: bytes(header.flatten().tolist()).decode()}).get("", {})
        if missing := [name for name in entry.get("parts", [HEADER]) if prefix + name not in state_dict]:
            raise ValueError(f"part {missing[0]!r} of the weight is missing")
        fields = {field: entry[field] for field in SAVED_FIELDS}
        parts = {name: state_dict[prefix + name] for name in entry["parts"]}
        q = QTensor(**{**fields, "shape": tuple(entry["shape"])}, parts=parts)
        if q.shape != (self.out_features, self.in_features):
            raise ValueError(f"weight is {list(q.shape)}, expected {[self.out_features, self.in_features]}")
        _check_weight(q)
        if problem := part_problem(q):
            raise ValueError(f"weight {q.fmt} {list(q.shape)} in layout {q.layout!r}: {problem}")
        return q

    def extra_repr(self) -> str:
        size = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{size}, fmt={self._fields['fmt']!r}, group={self._fields['group']}"


def _check_weight(q: QTensor) -> None:
    if q.fmt in DENSE or q.layout not in ("rows", "t64"):
        raise ValueError(
            f"QLinear: weight {q.fmt} {list(q.shape)} in layout {q.layout!r}: expected a quantised one in layout "
            "'rows' or 't64'"
        )
    if q.fmt in ("q4", "q8") and q.group < q.shape[1] and q.group % 32:
        raise ValueError(f"QLinear: groups of {q.group} columns of {q.shape[1]}: {EXPECTED_GROUP}")


# ---- the walk ----------------------------------------------------------------------------------------


def quantize_module(
    model: nn.Module,
    fmt: str = "q4",
    group: int | None = 128,
    *,
    symmetric: bool = True,
    clip_search: int = 0,
    skip: Iterable[str] = (),
    filter: Callable[[str, nn.Linear], bool] | None = None,
    progress: Callable[[str, str], None] | None = None,
) -> nn.Module:
    """Put a QLinear where the model has an nn.Linear, in place; -> the model.

    skip: names of layers, or of modules with all that is below them. filter(name, linear): which of the rest.
    progress(name, what became of it) is called for every nn.Linear. A layer that stands in several places
    stays one layer. Subclasses of nn.Linear stay; so do, with a warning, layers that have hooks and layers whose weight
    another layer or an embedding uses too. All layers are made before the first is put in its place: where one
    cannot be, ValueError names it and the model is as it was.
    """
    if isinstance(model, nn.Linear):
        raise ValueError("quantize_module: the model is itself a Linear; use QLinear.from_linear")
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    skip = {skip} if isinstance(skip, str) else set(skip)
    if unknown := skip.difference(*names.values()):
        raise ValueError(f"quantize_module: skip names {sorted(unknown)}, which the model does not have")
    owners = Counter(id(p) for module in names for p in module._parameters.values())
    told = progress or (lambda *_: None)
    made: dict[nn.Module, QLinear] = {}
    for linear, (name, *others) in names.items():
        if type(linear) is not nn.Linear:
            continue
        above = {part for path in (name, *others) for part in _and_above(path)}
        if above & skip or (filter is not None and not filter(name, linear)):
            told(name, "kept: not asked for")
        elif reason := _why_kept(linear, owners):
            warnings.warn(f"quantize_module: {name} stays as it is: {reason}", stacklevel=2)
            told(name, f"kept: {reason}")
        else:
            try:
                made[linear] = layer = QLinear.from_linear(linear, fmt, group, symmetric, clip_search)
            except ValueError as error:
                raise ValueError(f"quantize_module: {name}: {error}") from error
            before, after = linear.weight.nbytes, layer.weight_as_stored().nbytes
            told(name, f"{fmt} {linear.out_features}x{linear.in_features}, {before:,} -> {after:,} bytes")
    for module in names:
        for key, child in module._modules.items():
            if child in made:
                module._modules[key] = made[child]
    return model


def _and_above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _why_kept(linear: nn.Linear, owners: Counter[int]) -> str | None:
    if owners[id(linear.weight)] > 1:
        return "another module uses its weight too"
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return "it has hooks" if any(hooks) or "forward" in linear.__dict__ else None
