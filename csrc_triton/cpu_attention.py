"""The CPU path of pages and attention, fast and exact.

    out = softmax(scale q k^T + mask) v

Plain torch changes a row's bits with the number of rows and keys in the call. Here rows are padded to tiles of
16 and keys to whole chunks of 512 (or to tails measured to agree with them), which holds them still.

Memory: pages as in csrc_triton.pages; keys are stored rotated by slot and rotated here, once, by the
position of their page. Promise: row r of a result depends on row r and its own page list alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from csrc_triton.cpu import ROW_TILE, from_pairs, pairs, rotation, turn_

if TYPE_CHECKING:
    from csrc_triton.attention import PageTable
    from csrc_triton.fused import RopeTable
    from csrc_triton.tree import Tails, Tree

KEY_CHUNK = 512  # keys after which torch's attention folds its running softmax
PAGE = 64
_flash = torch._scaled_dot_product_flash_attention_for_cpu
FLOAT32_MAX = torch.finfo(torch.float32).max


class Workspace(dict[Any, Any]):
    """Scratch of one forward over one page table: what all layers share is computed once. Owned by the caller.

    It knows whose it is by the tensors it was made for: given others, it forgets what it kept and begins anew.
    """

    scratch: Tensor | None = None  # uint8, for kernels to leave sums in; allocated where there is none

    def begin(self, kind: str, *inputs: Any) -> None:
        """Called with what the layers of a forward share."""
        known = self.get(("of", kind))
        if known is None or len(known) != len(inputs) or any(a is not b for a, b in zip(known, inputs, strict=True)):
            if known is not None:
                self.clear()
            self["of", kind] = inputs


# ---- what this machine's torch holds still -----------------------------------------------------------


@functools.cache
def key_tails(head_dim: int, threads: int) -> tuple[int, ...]:
    """Padded lengths a last, partial chunk of keys may have so that its sums keep their order; 512 is last."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, head_dim, generator=gen) for n in (48, KEY_CHUNK, KEY_CHUNK))

    def attend(rows: int, keys: int, padded: int) -> Tensor:
        bias = torch.zeros(1, 1, rows, padded)
        bias[..., keys:] = -math.inf
        live = (torch.arange(padded) < keys)[:, None]
        kk, vv = (t[:, :, :padded] * live for t in (k, v))
        y, lse = _flash(q[:, :, :rows], kk, vv, 0.0, False, attn_mask=bias)
        return torch.cat((y, lse[..., None]), -1)

    good = []
    for tail in range(PAGE, KEY_CHUNK, PAGE):
        cases = [(rows, keys) for rows in (16, 48) for keys in (tail - 63, tail - 20, tail)]
        if all(torch.equal(attend(r, n, tail), attend(r, n, KEY_CHUNK)) for r, n in cases):
            good.append(tail)
    return (*good, KEY_CHUNK)


def padded_keys(keys: int, head_dim: int) -> int:
    """Key count to pad to: whole chunks, then the shortest tail that holds."""
    full, rest = divmod(max(keys, 1), KEY_CHUNK)
    if rest == 0:
        return full * KEY_CHUNK
    return full * KEY_CHUNK + next(t for t in key_tails(head_dim, torch.get_num_threads()) if t >= rest)


# ---- pages -------------------------------------------------------------------------------------------


def _turn(space: Workspace, name: str, rope: RopeTable, distance: Tensor, head_dim: int) -> Tensor:
    """[T, 1, D / 2], YaRN's factor included."""
    key = (name, id(rope))
    if key not in space:  # the table is kept too: its id would name another one after its end
        space[key] = rope, rotation(rope, distance.long(), head_dim, rope.factor)[:, None]
    turn: Tensor = space[key][1]
    return turn


# the largest code of the dtypes that are stored with a scale per token and head
CODE_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def largest_stored(dtype: torch.dtype) -> float:
    """What numbers saturate to; a code times the scale of this one is finite, of float32's largest it is not."""
    return torch.finfo(torch.bfloat16 if dtype in CODE_MAX else dtype).max


def append_kv_cpu(
    k: Tensor,  # [T, Hkv, D] normed, unrotated
    v: Tensor,  # [T, Hkv, D]
    view: Tensor,  # [pages, 2, Hkv, 64, D], one layer of the arena
    page_id: Tensor,  # [T] int32
    store_slot: Tensor,  # [T] int32
    rot_slot: Tensor,  # [T] int32
    rope: RopeTable,
    workspace: Workspace | None = None,
    scales: Tensor | None = None,  # [pages, 2, Hkv, 64] of a scaled layout
) -> None:
    """Rotate keys by their slot, saturate, store."""
    space = Workspace() if workspace is None else workspace
    turn = _turn(space, "slot", rope, rot_slot, k.shape[-1])
    largest = largest_stored(view.dtype)
    k = k.float().clamp(-largest, largest)  # an infinity would turn into NaN
    _store(from_pairs(turn_(pairs(k, rope.rot_dim), turn)), v, view, scales, page_id, store_slot, space)


def _coded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, Hkv, D] -> codes' bytes as int8, scales [T, Hkv]."""
    units = torch.tensor(CODE_MAX[dtype])
    largest = x.abs().amax(-1)
    per_unit = torch.div(units, largest)  # one rounding: a number over a tensor takes two
    per_unit.masked_fill_(per_unit == math.inf, 0.0)
    codes = torch.mul(x, per_unit[..., None]).nan_to_num_(0.0)
    if dtype == torch.int8:
        codes.round_()
    return codes.to(dtype).view(torch.int8), torch.div(largest, units)


def _store(
    k: Tensor,  # [T, Hkv, D] rotated
    v: Tensor,
    view: Tensor,
    scales: Tensor | None,
    page_id: Tensor,
    slot: Tensor,
    space: Workspace,
) -> None:
    """Saturate both and put them into the places of this forward's tokens."""
    key = ("store", *k.shape)
    if key not in space:
        every, one = slice(None), len(k) == 1
        where = (int(page_id), every, every, int(slot)) if one else (page_id.long(), every, every, slot.long())
        both = torch.empty(len(k), 2, *k.shape[1:])
        space[key] = where, both, both[:, 0], both[:, 1]
    where, both, keys, values = space[key]
    largest = largest_stored(view.dtype)
    torch.clamp(k, -largest, largest, out=keys)
    torch.nan_to_num(v.float(), 0.0, out=values)  # a NaN times the weight 0 of a row that does not see it
    if largest < FLOAT32_MAX:
        values.clamp_(-largest, largest)
    if scales is not None:
        both, scale = _coded(both, view.dtype)
        scales[where] = scale
        view = view.view(torch.int8)  # bytes: not every operation knows float8
    view[where] = both.to(view.dtype)


# ---- attention ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Score:
    """What becomes of a row's products with keys."""

    scale: float
    softcap: float | None
    sinks: Tensor | None  # [Hq] float32


@dataclass(frozen=True)
class _Kind:
    """What layers must agree in to share a plan."""

    rope: RopeTable
    window: int | None
    capped: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def key(self) -> tuple[int | None, bool, int]:
        """Within one model, which has one number of heads."""
        return self.window, self.capped, id(self.rope)

    @property
    def ratio(self) -> int:
        return self.num_heads // self.num_kv_heads

    def padded(self, keys: int) -> int:
        return -(-max(keys, 1) // KEY_CHUNK) * KEY_CHUNK if self.capped else padded_keys(keys, self.head_dim)


@dataclass
class _Source:
    """Lists that are gathered together, equally long after padding."""

    pages: Tensor  # [S * E] int64, zero page where a sequence has fewer
    gathered: Tensor  # [2, Hkv, S * E, 64, D] float32 scratch, which every layer fills
    keys: Tensor  # [S, Hkv, keys, D], a view of it
    values: Tensor
    unused: list[Tensor]  # views of the slots that hold no token
    turn: Tensor | None  # [S * E, 1, D / 2] complex: rotation by page position; None where all stand at 0
    turned: Tensor  # [Hkv, S * E, 64, D / 2] complex, a view of the gathered keys


@dataclass
class _Group:
    """Sequences with equally many rows and chunks: one gather, one attention call a block of rows."""

    rows: Tensor | slice  # rows of q, sequence-major
    num_seqs: int
    num_rows: int  # rows a sequence
    source: _Source
    blocks: list[_Block] = field(default_factory=list)


@dataclass
class _Block:
    start: int  # first row of each sequence
    stop: int
    tile: _Tile
    keys: Tensor  # [num_seqs, Hkv, keys, D], those that some row sees
    values: Tensor
    bias: Tensor  # [num_seqs, 1, padded rows, keys]: 0 where visible, else -inf
    dead: Tensor | None  # [num_seqs, rows] True where a row sees nothing


@dataclass
class _Tile:
    """Scratch for the queries of some rows, [S, Hkv, padded rows, D], padding rows zero."""

    padded: Tensor
    rows: Tensor  # [S, Hkv, rows, G, D], a view of it

    @classmethod
    def of(cls, num_seqs: int, num_rows: int, kind: _Kind) -> _Tile:
        count = num_rows * kind.ratio
        padded = torch.zeros(num_seqs, kind.num_kv_heads, _tiled(count), kind.head_dim)
        return cls(padded, padded[:, :, :count].unflatten(2, (-1, kind.ratio)))


BLOCK_ROWS = 128  # tokens of one attention call; later rows see more keys, so shorter calls skip more


def _plan_groups(table: PageTable, cu_rows: Tensor, row_pos: Tensor, kind: _Kind) -> list[_Group]:
    """Which sequences go together, and what every layer with this window and rope shares."""
    starts, num_pages = cu_rows.tolist(), table.n.tolist()
    by_shape: dict[tuple[int, int], list[int]] = {}
    for s in range(len(num_pages)):
        rows = starts[s + 1] - starts[s]
        if rows and num_pages[s]:
            chunks = -(-num_pages[s] * PAGE // KEY_CHUNK)
            by_shape.setdefault((rows, chunks), []).append(s)
    return [_plan_group(seqs, rows, starts, table, row_pos, kind) for (rows, _), seqs in by_shape.items()]


def _plan_group(
    seqs: list[int], num_rows: int, starts: list[int], table: PageTable, row_pos: Tensor, kind: _Kind
) -> _Group:
    pick = torch.tensor(seqs)
    used = int(table.n[pick].max())
    pos = torch.stack([row_pos[starts[s] : starts[s + 1]] for s in seqs]).long()  # [S, R]
    ids, base, span = (t[pick, :used].long() for t in (table.ids, table.base, table.span))
    live = torch.arange(used) < table.n[pick].long()[:, None]
    entries = (ids * live, base * live, (span & 255) * live, (span >> 8) * live)
    first = _first_visible_chunk(base, entries[3], pos, kind.window)
    source, key_pos, valid = _plan_source([t[:, first:] for t in entries], kind)
    contiguous = seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    rows = (
        slice(starts[seqs[0]], starts[seqs[-1] + 1])
        if contiguous
        else torch.cat([torch.arange(starts[s], starts[s + 1]) for s in seqs])
    )
    group = _Group(rows, len(seqs), num_rows, source)
    for start in range(0, num_rows, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, num_rows)
        bias, dead = _plan_bias(pos[:, start:stop], key_pos, valid, kind)
        keys, values = (t[:, :, : bias.shape[3]] for t in (source.keys, source.values))
        tile = _Tile.of(len(seqs), stop - start, kind)
        group.blocks.append(_Block(start, stop, tile, keys, values, bias, dead if bool(dead.any()) else None))
    return group


def _first_visible_chunk(base: Tensor, hi: Tensor, pos: Tensor, window: int | None) -> int:
    """Entries before this one lie in whole chunks that no row sees; skipping them changes nothing."""
    if window is None:
        return 0
    oldest = pos.min(dim=1).values - window + 1
    seen = (base + hi > oldest[:, None]) & (hi > 0)
    first = int(torch.where(seen.any(1), seen.int().argmax(1), base.shape[1] - 1).min())
    return first // (KEY_CHUNK // PAGE) * (KEY_CHUNK // PAGE)


def _plan_source(entries: Sequence[Tensor], kind: _Kind) -> tuple[_Source, Tensor, Tensor]:
    """Entries (ids, base, lo, hi: [S, E] int64) -> their gather; keys' positions and which are there, [S, keys]."""
    num_seqs, used = entries[0].shape
    ids, base, lo, hi = (F.pad(t, (0, kind.padded(used * PAGE) // PAGE - used)) for t in entries)
    slot = torch.arange(PAGE)
    key_pos = (base[:, :, None] + slot).flatten(1)
    valid = ((slot >= lo[:, :, None]) & (slot < hi[:, :, None])).flatten(1)
    gathered = torch.empty(2, kind.num_kv_heads, ids.numel(), PAGE, kind.head_dim)
    unused = []
    for i, (page, a, b) in enumerate(zip(*(t.flatten().tolist() for t in (ids, lo, hi)), strict=True)):
        if page and b < PAGE:
            unused.append(gathered[:, :, i, b:])
        if page and a > 0:
            unused.append(gathered[:, :, i, :a])
    turn = rotation(kind.rope, base.flatten(), kind.head_dim)[:, None] if bool((base != 0).any()) else None
    heads = gathered.view(2, kind.num_kv_heads, num_seqs, -1, kind.head_dim).transpose(1, 2)
    turned = gathered[0].view(torch.complex64)
    return _Source(ids.flatten(), gathered, heads[0], heads[1], unused, turn, turned), key_pos, valid


def _plan_bias(pos: Tensor, key_pos: Tensor, valid: Tensor, kind: _Kind) -> tuple[Tensor, Tensor]:
    """Rows at pos [S, rows] -> bias [S, 1, padded rows, padded keys], dead [S, rows]; a dead row's bias is 0."""
    seen = valid[:, None] & (key_pos[:, None] <= pos[:, :, None])  # [S, rows, keys]
    if kind.window is not None:
        seen &= pos[:, :, None] - key_pos[:, None] < kind.window
    last = int(seen.any(0).any(0).nonzero().max()) + 1 if bool(seen.any()) else 1
    seen = seen[:, :, : kind.padded(last)]
    dead = ~seen.any(2)
    num_seqs, rows, keys = seen.shape
    bias = torch.zeros(num_seqs, _tiled(rows * kind.ratio), keys)
    hidden = ~(seen | dead[:, :, None])
    bias[:, : rows * kind.ratio].masked_fill_(hidden.repeat_interleave(kind.ratio, 1), -math.inf)
    return bias[:, None], dead


def _tiled(rows: int) -> int:
    return -(-rows // ROW_TILE) * ROW_TILE


def paged_attention_cpu(
    q: Tensor,  # [T, Hq, D] normed, unrotated
    view: Tensor,  # [pages, 2, Hkv, 64, D], one layer of the arena
    table: PageTable,
    cu_rows: Tensor,
    row_pos: Tensor,
    rope: RopeTable,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq] float32
    scales: Tensor | None = None,  # [pages, 2, Hkv, 64] float32, where the pages hold codes
    workspace: Workspace | None = None,
) -> Tensor:
    """-> [T, Hq, D] float32."""
    space = Workspace() if workspace is None else workspace
    hq, dim = q.shape[1:]
    kind = _Kind(rope, window, softcap is not None, hq, view.shape[2], dim)
    key = ("groups", *kind.key)
    if key not in space:
        space[key] = _plan_groups(table, cu_rows, row_pos, kind)
    q = from_pairs(turn_(pairs(q, rope.rot_dim), _turn(space, "position", rope, row_pos, dim)))
    return _attend_all(q, view, scales, space[key], _Score(scale, softcap, sinks))


@dataclass
class _Heads:
    """Scratch for the queries and keys of a forward's rows, which every layer with this rope fills and turns."""

    pairs: Tensor  # [T, Hq + Hkv, D / 2] complex
    queries: Tensor  # [T, Hq, D / 2], a view of it
    keys: Tensor
    query_turn: Tensor  # [T, 1, D / 2]: rotation by position
    key_turn: Tensor  # by slot
    q: Tensor  # [T, Hq, D] float32, a view
    k: Tensor


def self_attention_cpu(
    qk: Tensor,  # [T, Hq + Hkv, D] normed, unrotated; its keys are overwritten
    v: Tensor,  # [T, Hkv, D]
    view: Tensor,  # [pages, 2, Hkv, 64, D], one layer of the arena
    scales: Tensor | None,
    table: PageTable,
    cu_rows: Tensor,
    row_pos: Tensor,
    page_id: Tensor,  # [T] int32
    slot: Tensor,  # [T] int32
    rope: RopeTable,
    *,
    scale: float,
    window: int | None,
    workspace: Workspace,
) -> Tensor:
    """`append_kv_cpu` of the keys and values, then `paged_attention_cpu` of the queries: [T, Hq, D], the same bits."""
    space, (hkv, dim) = workspace, v.shape[1:]
    hq = qk.shape[1] - hkv
    kind = _Kind(rope, window, False, hq, hkv, dim)
    if ("heads", id(rope)) not in space:
        if len(qk) and int(row_pos.max()) > rope.max_position:
            last = int(row_pos.max())
            raise ValueError(f"position {last} is beyond the rope table, which ends at {rope.max_position}")
        turns = _turn(space, "position", rope, row_pos, dim), _turn(space, "slot", rope, slot, dim)
        z = torch.empty(*qk.shape[:2], dim // 2, dtype=torch.complex64)
        both = z.view(torch.float32)
        space["heads", id(rope)] = _Heads(z, z[:, :hq], z[:, hq:], *turns, both[:, :hq], both[:, hq:])
    if ("groups", *kind.key) not in space:
        space["groups", *kind.key] = _plan_groups(table, cu_rows, row_pos, kind)
    heads: _Heads = space["heads", id(rope)]
    largest = largest_stored(view.dtype)
    qk[:, hq:].clamp_(-largest, largest)  # an infinity would turn into NaN
    if rope.rot_dim == dim:
        torch.complex(qk[..., : dim // 2], qk[..., dim // 2 :], out=heads.pairs)
    else:
        heads.pairs.copy_(pairs(qk, rope.rot_dim))
    turn_(heads.queries, heads.query_turn)
    turn_(heads.keys, heads.key_turn)
    _store(heads.k, v, view, scales, page_id, slot, space)
    return _attend_all(heads.q, view, scales, space["groups", *kind.key], _Score(scale, None, None))


def _attend_all(q: Tensor, view: Tensor, scales: Tensor | None, groups: list[_Group], score: _Score) -> Tensor:
    """Rotated q [T, Hq, D] -> the same shape."""
    if len(groups) == 1 and isinstance(groups[0].rows, slice) and groups[0].rows == slice(0, len(q)):
        return _attend(q, view, scales, groups[0], score)
    out = q.new_zeros(q.shape)
    for group in groups:
        out[group.rows] = _attend(q[group.rows], view, scales, group, score)
    return out


def _attend(q: Tensor, view: Tensor, scales: Tensor | None, group: _Group, score: _Score) -> Tensor:
    """q [S * R, Hq, D] of one group -> the same shape."""
    seqs, rows, (hq, dim) = group.num_seqs, group.num_rows, q.shape[1:]
    hkv = view.shape[2]
    _gather(view, scales, group.source)
    q = q.view(seqs, rows, hkv, hq // hkv, dim).transpose(1, 2)  # [S, Hkv, R, G, D]
    out = q.new_empty(seqs, rows, hkv, hq // hkv, dim) if len(group.blocks) > 1 else None
    for block in group.blocks:
        part = q if out is None else q[:, :, block.start : block.stop]
        y = _attend_rows(part, block.tile, block.keys, block.values, block.bias, score)
        if block.dead is not None:
            y = y.masked_fill(block.dead[:, :, None, None, None], 0.0)
        if out is None:
            return y.reshape(seqs * rows, hq, dim).contiguous()  # the view of one row has strides of the padded ones
        out[:, block.start : block.stop] = y
    assert out is not None
    return out.view(seqs * rows, hq, dim)


def _attend_rows(q: Tensor, tile: _Tile, keys: Tensor, values: Tensor, bias: Tensor, score: _Score) -> Tensor:
    """q [S, Hkv, rows, G, D] -> [S, rows, Hkv, G, D]."""
    rows, ratio = q.shape[2:4]
    count = rows * ratio
    tile.rows.copy_(q)
    if score.softcap is None:
        # by its own name: F.scaled_dot_product_attention may choose another algorithm, with other bits
        y, lse = _flash(tile.padded, keys, values, 0.0, False, attn_mask=bias, scale=score.scale)
    else:
        y, lse = _capped(tile.padded, keys, values, bias, score.scale, score.softcap)
    y = y[:, :, :count].unflatten(2, (-1, ratio))
    if score.sinks is not None:
        sink = score.sinks.view(-1, 1, ratio)
        y = y / (sink - lse[:, :, :count].unflatten(2, (-1, ratio))).exp_().add_(1.0)[..., None]
    return y.transpose(1, 2)


def _capped(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """_flash with scores s -> softcap * tanh(s / softcap), in products of 16 rows and whole chunks of keys."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for s in range(q.shape[0]):
        for h in range(q.shape[1]):
            top, total, acc = (
                q.new_full((q.shape[2], 1), -math.inf),
                q.new_zeros(q.shape[2], 1),
                torch.zeros_like(q[s, h]),
            )
            for start in range(0, keys.shape[2], KEY_CHUNK):
                chunk = slice(start, start + KEY_CHUNK)
                p = _by_tiles(q[s, h], keys[s, h, chunk].t())
                p.mul_(scale / softcap).tanh_().mul_(softcap).add_(bias[s, 0, :, chunk])
                new_top = torch.maximum(top, p.amax(1, keepdim=True))
                finite = new_top.masked_fill(new_top == -math.inf, 0.0)  # a row may see nothing of its first chunks
                p.sub_(finite).exp_()
                factor = (top - finite).exp_()
                total = total.mul_(factor).add_(p.sum(1, keepdim=True))
                acc.mul_(factor).add_(_by_tiles(p, values[s, h, chunk]))
                top = new_top
            torch.div(acc, total, out=out[s, h])
            lse[s, h] = total.log_().add_(top).flatten()
    return out, lse


def _by_tiles(x: Tensor, w: Tensor) -> Tensor:
    """x [R, K] . w [K, N], 16 rows a product."""
    y = x.new_empty(x.shape[0], w.shape[1])
    for start in range(0, x.shape[0], ROW_TILE):
        torch.mm(x[start : start + ROW_TILE], w, out=y[start : start + ROW_TILE])
    return y


def _gather(view: Tensor, scales: Tensor | None, source: _Source) -> None:
    """Pages -> the source's keys, in the frame of position 0, and values."""
    pages = view.permute(1, 2, 0, 3, 4)
    if view.dtype == torch.float32:
        torch.index_select(pages, 2, source.pages, out=source.gathered)
    else:
        source.gathered.copy_(pages.index_select(2, source.pages))
    if scales is not None:
        source.gathered.mul_(scales.permute(1, 2, 0, 3).index_select(2, source.pages)[..., None])
    for slots in source.unused:  # they may hold anything, NaN included
        slots.zero_()
    if source.turn is not None:
        turn_(source.turned, source.turn)


# ---- trees -------------------------------------------------------------------------------------------


@dataclass
class _Committed:
    """A sequence whose committed pages are gathered once, and every path of its tree laid behind them in turn.

    Which keys a node sees follows from its depth, so all paths share the mask of one chain.
    """

    rows: slice  # of q
    source: _Source
    page: Tensor  # [P] int64, where the key and value of a node lie, stored or computed
    slot: Tensor
    turn: Tensor | None  # [P, D / 2] complex: rotation by the position of the page a node would stand in
    tail: slice  # keys that the longest path takes
    bias: Tensor  # [1, 1, rows of a chain, keys]
    paths: list[_Path]


@dataclass
class _Path:
    nodes: Tensor  # [levels] int64 in the tail's order, P beyond the leaf
    own: Tensor  # [n] int64, the tree's rows of the path's last nodes: computed ones that no earlier path holds
    depth: int  # of the first of them
    tile: _Tile


def _plan_trees(
    table: PageTable,
    trees: Sequence[Tree],
    tails: Tails,
    nodes: tuple[Tensor, Tensor],
    kind: _Kind,
) -> list[_Committed]:
    """What every layer with this window and rope shares; nodes: page and slot of each."""
    row, node, plans = 0, 0, []
    for s, tree in enumerate(trees):
        rows, every = slice(row, row + tree.num_rows), slice(node, node + len(tree.parent))
        leaf = tails.leaf[row]
        entry, base = int(tails.entry[leaf]), int(tails.base[leaf])
        first = int(tails.position[row]) - int(tree.depth[tree.num_stored])
        n = int(table.n[s])
        entries = [t[s, :n].long() for t in (table.ids, table.base, table.span & 255, table.span >> 8)]
        plan = _plan_tree(entries, (entry, base, first), tree, kind)
        page, slot = (t[every].long() for t in nodes)
        plans.append(_Committed(rows, plan[0], page, slot, *plan[1:], _plan_paths(tree, kind)))
        row, node = rows.stop, every.stop
    return plans


def _plan_tree(
    entries: list[Tensor],
    where: tuple[int, int, int],
    tree: Tree,
    kind: _Kind,
) -> tuple[_Source, Tensor | None, slice, Tensor]:
    """where: the tail's entry, the position of its slot 0 and that of the first node -> source, turn, tail, bias."""
    entry, base, first = where
    start = entry * PAGE + first - base
    count = -(-(start + tree.num_levels) // PAGE)
    ids, bases, lo, hi = (F.pad(t, (0, count - len(t))) for t in entries)
    bases[entry:] = base + PAGE * torch.arange(count - entry)
    reach = hi.clone()
    reach[entry:] = PAGE
    pos = first + torch.arange(tree.num_levels + ROW_TILE)[None]  # the last of them pad a tile
    skipped = _first_visible_chunk(bases[None], reach[None], pos, kind.window)
    source, key_pos, valid = _plan_source([t[None, skipped:] for t in (ids, bases, lo, hi)], kind)
    start -= skipped * PAGE
    tail = slice(start, start + tree.num_levels)
    valid[:, tail] = True
    turn = None if source.turn is None else source.turn[(start + torch.from_numpy(tree.depth).long()) // PAGE, 0]
    return source, turn, tail, _plan_bias(pos, key_pos, valid, kind)[0]


def _plan_paths(tree: Tree, kind: _Kind) -> list[_Path]:
    paths, owner = [], torch.from_numpy(tree.owner)
    for leaf, path in enumerate(torch.from_numpy(tree.paths).long()):
        own = path[(path >= tree.num_stored) & (owner[path] == leaf)]
        if len(own):
            nodes, depth = path.where(path >= 0, len(tree.parent)), int(tree.depth[int(own[0])])
            paths.append(_Path(nodes, own - tree.num_stored, depth, _Tile.of(1, len(own), kind)))
    return paths


def tree_attention_cpu(
    q: Tensor,  # [T, Hq, D] normed, unrotated, the computed nodes of every tree in its order
    view: Tensor,  # [pages, 2, Hkv, 64, D], one layer of the arena
    table: PageTable,
    trees: Sequence[Tree],
    tails: Tails,
    node_page: Tensor,  # [nodes] int32, stored ones included
    node_slot: Tensor,  # [nodes] int32
    rope: RopeTable,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq] float32
    scales: Tensor | None = None,  # [pages, 2, Hkv, 64] float32, where the pages hold codes
    workspace: Workspace | None = None,
) -> Tensor:
    """-> [T, Hq, D] float32."""
    space = Workspace() if workspace is None else workspace
    dim = q.shape[2]
    kind = _Kind(rope, window, softcap is not None, q.shape[1], view.shape[2], dim)
    key = ("trees", *kind.key)
    if key not in space:
        space[key] = _plan_trees(table, trees, tails, (node_page, node_slot), kind)
    q = from_pairs(turn_(pairs(q, rope.rot_dim), _turn(space, "position", rope, tails.position, dim)))
    out, score = torch.empty_like(q), _Score(scale, softcap, sinks)
    plans: list[_Committed] = space[key]
    for plan in plans:
        out[plan.rows] = _attend_tree(q[plan.rows], view, scales, plan, score)
    return out


def _attend_tree(q: Tensor, view: Tensor, scales: Tensor | None, plan: _Committed, score: _Score) -> Tensor:
    """q [rows, Hq, D] -> the same shape."""
    hkv, dim = view.shape[2], view.shape[4]
    ratio = q.shape[1] // hkv
    _gather(view, scales, plan.source)
    keys, values = plan.source.keys, plan.source.values
    node_keys, node_values = _gather_nodes(view, scales, plan)
    q = q.view(-1, hkv, ratio, dim)
    out = torch.empty_like(q)
    for path in plan.paths:
        keys[0, :, plan.tail] = node_keys[:, path.nodes]
        values[0, :, plan.tail] = node_values[:, path.nodes]
        bias = plan.bias[:, :, path.depth * ratio :][:, :, : path.tile.padded.shape[2]]
        seen = slice(bias.shape[3])
        part = q[path.own].transpose(0, 1)[None]
        out[path.own] = _attend_rows(part, path.tile, keys[:, :, seen], values[:, :, seen], bias, score)[0]
    return out.flatten(1, 2)


def _gather_nodes(view: Tensor, scales: Tensor | None, plan: _Committed) -> tuple[Tensor, Tensor]:
    """-> keys in the frame of position 0 and values, [Hkv, P + 1, D] float32, the last of them zeros."""
    nodes = view[plan.page, :, :, plan.slot].float()  # [P, 2, Hkv, D]
    if scales is not None:
        nodes.mul_(scales[plan.page, :, :, plan.slot][..., None])
    keys, values = (F.pad(nodes[:, i].transpose(0, 1), (0, 0, 0, 1)) for i in (0, 1))
    if plan.turn is not None:
        turn_(torch.view_as_complex(keys[:, :-1].unflatten(-1, (-1, 2))), plan.turn)
    return keys, values
