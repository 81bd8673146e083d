"""One decoder forward for prefill, decode and verify: (weights, pages, tokens) -> logits."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch import Tensor

from csrc_triton import cpu
from csrc_triton.attention import PageTable, paged_attention
from csrc_triton.cpu_attention import Workspace, self_attention_cpu
from csrc_triton.fused import RopeTable, rmsnorm, rope_table, swiglu
from csrc_triton.launch import runs_kernel
from csrc_triton.pages import KVLayout, append_kv, check_places, layer_scales, layer_view
from csrc_triton.qmatmul import matmul, matmul_rmsnorm, swiglu_matmul
from csrc_triton.quant import QTensor, take_rows
from csrc_triton.tree import Tree, computed_nodes, rotation_slots, tree_attention
from polymodel.config import ModelConfig, RopeConfig
from polymodel.errors import KVFull
from polymodel.kv import Arena, PageList, append_nodes, pack_rows, pack_tables


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights; vectors float32, matrices packed for the device."""

    attn_norm: Tensor  # [hidden]
    qkv: tuple[QTensor, ...]  # [(heads + 2 kv heads) * head_dim, hidden] in all, rows in this order
    qkv_bias: Tensor | None  # [(heads + 2 kv heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: QTensor  # [hidden, heads * head_dim]
    post_attn_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: QTensor  # [2 * intermediate, hidden]: all gate rows, then all up rows; t64-glu alternates tiles of them
    down: QTensor  # [hidden, intermediate]
    post_mlp_norm: Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True)
class Model:
    config: ModelConfig
    dtype: torch.dtype  # of activations and the residual stream
    embed: QTensor  # [vocab, hidden], storage layout
    layers: list[Layer]
    norm: Tensor  # [hidden]
    head: QTensor  # [vocab, hidden], packed
    ropes: list[RopeTable]  # one a layer; layers of one base share theirs
    layout: KVLayout

    def weights(self) -> Iterator[tuple[str, QTensor]]:
        """The packed matrices with their names."""
        for i, layer in enumerate(self.layers):
            for part in layer.qkv:
                yield f"layers.{i}.qkv", part
            for name in ("o", "gate_up", "down"):
                yield f"layers.{i}.{name}", getattr(layer, name)
        yield "head", self.head


@dataclass(frozen=True, slots=True)
class Panel:
    """The rows of one forward: for each sequence its pages and the tokens to append to them.

    Over trees nothing is appended before `commit_paths`: ids are those of a tree's nodes that are not stored yet, their
    keys and values go to `nodes`.
    """

    lists: Sequence[PageList]
    ids: Sequence[Sequence[int]]
    wanted: str = "last"  # logits of each sequence's last row, of "all" rows, or "none"
    first_layer: int = 0  # layers below it are in the pages already, and its inputs in their state pages
    is_exact: bool = True  # what is appended is what the lists' own model gives; no states are kept of anything else
    trees: Sequence[Tree] = ()  # one for each list; a root is a child of its last token
    nodes: tuple[Tensor, Tensor] | None = None  # page ids and slots, int32, of all nodes of all trees
    states: dict[int, Tensor] = field(default_factory=dict)  # boundary -> [T, hidden], left here by one over trees


@torch.inference_mode()
def forward(
    model: Model,
    arena: Arena,
    panel: Panel,
    on_layer: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Store the panel's tokens in their pages, or their trees' nodes; return logits [rows wanted, vocab] float32.

    Pages are reserved before and committed after everything, so an error leaves every list's length as it was.
    Where a page has state pages, the residual stream is kept in them as it enters their layers. For trees a token a
    level is reserved, and nothing committed: `commit_paths` does that.
    """
    config, counts = model.config, [len(ids) for ids in panel.ids]
    _reserve(panel.lists, [tree.num_levels for tree in panel.trees] or counts)
    kept, kept_later = _kept_states(panel, counts), _kept_later(panel)
    place = _place(panel, counts, model, arena)
    x = _states(panel, counts, model, arena) if panel.first_layer else _embedded(place.ids, model)
    run = KERNELS if runs_kernel(x) else CPU
    norms = [layer.attn_norm for layer in model.layers] + [model.norm]
    h = run.rmsnorm(x, norms[panel.first_layer], config.norm_eps)
    for i, layer in enumerate(model.layers[panel.first_layer :], panel.first_layer):
        y = _attention(run, h, i, layer, model, arena, place)
        x, h = _add(run, x, y, layer.o, layer.post_attn_norm, layer.mlp_norm, config.norm_eps)
        y = _mlp(run, h, layer, config)
        x, h = _add(run, x, y, layer.down, layer.post_mlp_norm, norms[i + 1], config.norm_eps)
        if i + 1 in kept:
            rows, states, slots = kept[i + 1]
            arena.write_states(state_layout(model, arena), states, slots, x[rows.to(x.device)])
        if i + 1 in kept_later:
            panel.states[i + 1] = x
        if on_layer is not None:
            on_layer(i + 1, len(model.layers))
    if panel.wanted == "none":
        logits = x.new_empty(0, config.vocab_size)
    else:
        logits = run.matmul(h[place.last] if panel.wanted == "last" else h, model.head, None, torch.float32)
    if not panel.trees:
        for pages, count in zip(panel.lists, counts, strict=True):
            pages.commit(count, panel.is_exact)
    return logits


@torch.inference_mode()
def commit_paths(model: Model, arena: Arena, panel: Panel, paths: Sequence[Sequence[int]]) -> None:
    """Append accepted nodes of each tree, from a root down, to its list: afterwards it is as if it had decoded them.

    Hidden states are known of computed nodes only, so a list whose tree had stored ones must keep none. What was
    reserved beyond the path goes back.
    """
    assert panel.nodes is not None
    place, node, row, src = torch.stack(panel.nodes, 1), 0, 0, []
    for pages, tree, path in zip(panel.lists, panel.trees, paths, strict=True):
        at = torch.tensor(path, dtype=torch.int64)
        assert tree.parent[at.numpy()].tolist() == [-1, *path][:-1], "a path goes from a root from node to child"
        src.append(place[node + at])
        kept = pages.place_states(len(pages), len(pages) + len(path)) if panel.is_exact else {}
        assert not (kept and tree.num_stored), "hidden states of stored nodes are not known"
        for boundary, (rows, states, slots) in kept.items():
            x = panel.states[boundary]
            arena.write_states(state_layout(model, arena), states, slots, x[(row + at[rows]).to(x.device)])
        node, row = node + len(tree.parent), row + tree.num_rows
    append_nodes(panel.lists, src, panel.is_exact)
    for pages in panel.lists:
        pages.unreserve()


def _reserve(lists: Sequence[PageList], counts: Sequence[int]) -> None:
    """As many tokens of each list, or KVFull and no list has more reserved than before."""
    before = [pages.reserved for pages in lists]
    try:
        for pages, count in zip(lists, counts, strict=True):
            pages.reserve(count)
    except KVFull:
        for pages, count in zip(lists, before, strict=True):
            pages.unreserve(count)
        raise


def _embedded(ids: Tensor, model: Model) -> Tensor:
    x = take_rows(model.embed, ids)
    if model.config.embed_scale != 1.0:
        x = x.mul_(model.config.embed_scale)
    return x.to(model.dtype)


def state_layout(model: Model, arena: Arena) -> KVLayout:
    """Of pages that hold the residual stream, [64, hidden] a page."""
    return arena.state_layout(model.config.hidden_size, model.dtype)


def _kept_states(panel: Panel, counts: list[int]) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Boundary -> rows of the panel, page ids and slots: where the residual stream is kept as it enters that layer."""
    if panel.trees or not panel.is_exact:
        return {}
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    start = 0
    for pages, count in zip(panel.lists, counts, strict=True):
        places = pages.place_states(len(pages), len(pages) + count, panel.first_layer)
        for boundary, (rows, ids, slots) in places.items():
            found.setdefault(boundary, []).append((rows + start, ids, slots))
        start += count
    return {boundary: _cat(parts) for boundary, parts in found.items()}


def _kept_later(panel: Panel) -> set[int]:
    """Boundaries at which `commit_paths` may have to know the residual stream."""
    if not panel.is_exact:
        return set()
    reach = [(pages, len(pages) + tree.num_levels) for pages, tree in zip(panel.lists, panel.trees, strict=False)]
    return set().union(*(pages.state_boundaries(stop) for pages, stop in reach))


def _states(panel: Panel, counts: list[int], model: Model, arena: Arena) -> Tensor:
    """The residual stream as it enters the panel's first layer [T, hidden]."""
    places = []
    for pages, count in zip(panel.lists, counts, strict=True):
        place = pages.states_at(panel.first_layer, len(pages), len(pages) + count)
        assert place is not None, "hidden states were given up under a forward"
        places.append(place)
    ids, slots = (torch.cat(part) for part in zip(*places, strict=True))
    return arena.read_states(state_layout(model, arena), ids, slots)


def _cat(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    rows, ids, slots = (torch.cat(part) for part in zip(*parts, strict=True))
    return rows, ids, slots


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the panel's rows stand: computed once, read by every layer."""

    ids: Tensor  # [T] int64
    position: Tensor  # [T] int32
    page: Tensor  # [T] int32
    slot: Tensor  # [T] int32
    rot_slot: Tensor  # [T] int32: the slot in plain decoding
    cu_rows: Tensor  # [B + 1] int32
    last: Tensor  # [B] int64
    tables: PageTable
    trees: Sequence[Tree]
    nodes: tuple[Tensor, Tensor] | None
    space: Workspace


def _place(panel: Panel, counts: list[int], model: Model, arena: Arena) -> _Place:
    space = arena.workspace(model.layout)
    if panel.nodes is not None:
        trees, rows = panel.trees, computed_nodes(panel.trees)
        assert [tree.num_rows for tree in trees] == counts and not panel.first_layer
        table = pack_tables(panel.lists, [0] * len(counts))
        starts = torch.tensor([len(pages) for pages in panel.lists], dtype=torch.int32)
        depth = torch.cat([torch.from_numpy(tree.depth[tree.num_stored :]) for tree in trees])
        position = starts.repeat_interleave(torch.tensor(counts)) + depth
        page, slot = (t[rows] for t in panel.nodes)
        rot_slot = rotation_slots(table, trees)
    else:
        table = pack_tables(panel.lists, counts)
        position, page, slot = pack_rows(panel.lists, counts, table)
        rot_slot = slot
    check_places(model.layout.num_ids(arena.bytes), (page, slot, rot_slot), space)
    ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return _Place(
        ids=torch.tensor([token for ids in panel.ids for token in ids], dtype=torch.int64, device=model.embed.device),
        position=position,
        page=page,
        slot=slot,
        rot_slot=rot_slot,
        cu_rows=ends,
        last=ends[1:].long() - 1,
        tables=table,
        trees=panel.trees,
        nodes=panel.nodes,
        space=space,
    )


class _Run(NamedTuple):
    """What computes a forward: the launchers, or the CPU path without their checks: its operands are the forward's."""

    matmul: Callable[[Tensor, QTensor, Tensor | None, torch.dtype | None], Tensor]  # x, w, bias, out_dtype
    matmul_rmsnorm: Callable[[Tensor, QTensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]  # .., eps, residual
    rmsnorm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, str, int], Tensor]


def _matmul_rmsnorm_cpu(x: Tensor, w: QTensor, norm: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    y = cpu.matmul_cpu(x, w, None, residual)
    return y, cpu.rmsnorm_cpu(y, norm, eps)


KERNELS = _Run(
    matmul=lambda x, w, bias, out_dtype: matmul(x, w, bias=bias, out_dtype=out_dtype),
    matmul_rmsnorm=lambda x, w, norm, eps, residual: matmul_rmsnorm(x, w, norm, eps, residual=residual),
    rmsnorm=rmsnorm,
    swiglu=swiglu,
)
CPU = _Run(
    matmul=lambda x, w, bias, out_dtype: cpu.matmul_cpu(x, w, bias),
    matmul_rmsnorm=_matmul_rmsnorm_cpu,
    rmsnorm=cpu.rmsnorm_cpu,
    swiglu=cpu.swiglu_cpu,
)


def _add(
    run: _Run, x: Tensor, y: Tensor, w: QTensor, post_norm: Tensor | None, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual stream x plus y . W^T, normed first where the model does, and the norm that the next block reads."""
    if post_norm is None:
        return run.matmul_rmsnorm(y, w, norm, eps, x)
    x = run.rmsnorm(run.matmul(y, w, None, None), post_norm, eps).add_(x)
    return x, run.rmsnorm(x, norm, eps)


def _attention(run: _Run, h: Tensor, i: int, layer: Layer, model: Model, arena: Arena, place: _Place) -> Tensor:
    config = model.config
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = _stacked_matmul(run, h, layer.qkv, layer.qkv_bias).view(len(h), heads + 2 * kv_heads, dim)
    if run is CPU and not place.trees:
        return _attention_cpu(qkv, i, layer, model, arena, place)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = (_head_norm(t, w, config.norm_eps) for t, w in ((q, layer.q_norm), (k, layer.k_norm)))
    rope = model.ropes[i]
    append_kv(k, v, arena.bytes, model.layout, i, place.page, place.slot, place.rot_slot, rope, workspace=place.space)
    keys, window, space = (q, arena.bytes, model.layout, i, place.tables), config.layer_window(i), place.space
    if place.nodes is None:
        rows = place.cu_rows, place.position
        y = paged_attention(*keys, *rows, rope, scale=config.scale, window=window, workspace=space)
    else:
        y = tree_attention(*keys, place.trees, *place.nodes, rope, scale=config.scale, window=window, workspace=space)
    return y.view(len(qkv), heads * dim)


def _attention_cpu(qkv: Tensor, i: int, layer: Layer, model: Model, arena: Arena, place: _Place) -> Tensor:
    """qkv [T, heads + 2 kv heads, head_dim] -> [T, heads * head_dim]; the same bits in fewer operations."""
    config, layout, space = model.config, model.layout, place.space
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qk = qkv[:, : heads + kv_heads]
    if layer.q_norm is not None and layer.k_norm is not None:
        parts = (qk[:, :heads], layer.q_norm), (qk[:, heads:], layer.k_norm)
        qk = torch.cat([_head_norm(x, weight, config.norm_eps) for x, weight in parts], 1)
    y = self_attention_cpu(
        qk,
        qkv[:, heads + kv_heads :],
        layer_view(arena.bytes, layout, i, space),
        layer_scales(arena.bytes, layout, i, space) if layout.scaled else None,
        place.tables,
        place.cu_rows,
        place.position,
        place.page,
        place.slot,
        model.ropes[i],
        scale=config.scale,
        window=config.layer_window(i),
        workspace=space,
    )
    return y.view(len(qkv), heads * config.head_dim)


def _stacked_matmul(run: _Run, x: Tensor, weights: Sequence[QTensor], bias: Tensor | None) -> Tensor:
    """x times the rows of all weights [T, sum of rows]."""
    if len(weights) == 1:
        return run.matmul(x, weights[0], bias, None)
    sizes = [w.shape[0] for w in weights]
    biases: Sequence[Tensor | None] = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
    return torch.cat([run.matmul(x, w, b, None) for w, b in zip(weights, biases, strict=True)], dim=1)


def _head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, heads, head_dim], normed head by head."""
    return rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


def _mlp(run: _Run, h: Tensor, layer: Layer, config: ModelConfig) -> Tensor:
    if layer.gate_up.layout == "t64-glu":
        return swiglu_matmul(h, layer.gate_up, activation=config.activation)
    return run.swiglu(run.matmul(h, layer.gate_up, None, None), config.activation, config.intermediate_size)


def backend_facts(device: torch.device, kv_dtype: torch.dtype) -> dict[str, str]:
    """What decides a forward's bits beside its weights and POLICY: what computes, with which versions."""
    if device.type == "cpu":
        backend = f"cpu {torch.backends.cpu.get_cpu_capability()} {platform.machine()}"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        backend = f"{torch.cuda.get_device_name(device)} sm_{major}{minor} triton {version('triton')}"
    return {
        "backend": backend,
        "threads": str(torch.get_num_threads()),
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }


def rope_tables(config: ModelConfig, max_position: int, device: torch.device | str = "cpu") -> list[RopeTable]:
    """Each layer's rotations for positions 0..max_position."""
    made: dict[RopeConfig, RopeTable] = {}
    for i in range(config.num_layers):
        rope = config.layer_rope(i)
        if rope not in made:
            freq = inverse_frequencies(rope, config.head_dim)
            made[rope] = rope_table(freq, max_position, factor=rope.attention_factor, device=device)
    return [made[config.layer_rope(i)] for i in range(config.num_layers)]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> list[float]:
    """Radians per token of each pair, float64.

    theta^(-2j/D) (Su et al. 2021); llama3 scaling as in Llama 3.1's reference code; YaRN: Peng et al. 2023, eq. 23.
    """
    freq = [rope.theta ** (-2 * j / head_dim) for j in range(head_dim // 2)]
    if rope.kind == "linear":
        return [f / rope.factor for f in freq]
    if rope.kind == "llama3":
        return [_llama3(f, rope) for f in freq]
    if rope.kind == "yarn":
        return _yarn(freq, rope, head_dim)
    return freq


def _llama3(freq: float, rope: RopeConfig) -> float:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    turns = rope.original_context * freq / (2 * math.pi)
    if turns < rope.low_freq_factor:
        return freq / rope.factor
    if turns > rope.high_freq_factor:
        return freq
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * freq / rope.factor + smooth * freq


def _yarn(freq: list[float], rope: RopeConfig, head_dim: int) -> list[float]:
    def pair_with(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    blend = [min(max((j - low) / width, 0.0), 1.0) for j in range(len(freq))]
    return [f / rope.factor * b + f * (1 - b) for f, b in zip(freq, blend, strict=True)]
