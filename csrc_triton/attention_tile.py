"""Inside an attention kernel: the rows of a tile, the keys and values of a page, and the softmax between them.

    out = sum_j exp(s_j) v_j / sum_j exp(s_j),   s = scale * q . k, or softcap * tanh(scale * q . k / softcap)

Order of summation: a tile of keys is a page (half a page at head dim 256), a chunk 8 list entries. Within a chunk an
online softmax (Milakov and Gimelshein 2018) over its tiles, the products of each a fresh sum; chunks are folded left to
right, the first onto nothing or onto the head's sink. Row sums are products with ones, so that they have the order of
the products. Scores, weights and sums are float32; rotated queries and the weights are rounded once, to the dtype of
the products.
Promise: `attend` is the one body that every row goes through. A tile of which a row sees nothing changes nothing of its
state, to the bit; so does such a chunk. What a row gets depends on no other row of the tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from csrc_triton import cpu
from csrc_triton.attention_plan import PAGE
from csrc_triton.dequant import byte_planes, fp8_planes
from csrc_triton.fused import row_at, turned
from csrc_triton.launch import constexpr, constexpr_function, jit, tl

SLOTS = constexpr(PAGE)
NEAREST = constexpr(cpu.MIN_DISTANCE)
# columns of the row sums' product: more than rows in a tile, or the compiler lays the warps along the rows and has
# each of them do all of it
ONES = constexpr(64)
LOG2E = constexpr(math.log2(math.e))
LARGEST = constexpr(torch.finfo(torch.float32).max)  # of a sink, so that of an infinite one all else is 0


# ---- what kernels are given --------------------------------------------------------------------------


class Stored(NamedTuple):
    """Pages of one layer."""

    data: Any  # the arena in the layout's dtype; int16, two codes each, where they are scaled
    scales: Any  # the arena in float32, or None


class Entries(NamedTuple):
    """Page lists [B, E]."""

    ids: Any
    base: Any
    span: Any


class Turns(NamedTuple):
    """A RopeTable; factor None where it is 1."""

    cos: Any
    sin: Any
    factor: Any


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    ratio: Any  # query heads of a kv head
    kv_heads: Any
    dim: Any
    half: Any  # dim / 2, padded to a power of two
    part: Any  # columns of a piece of values, padded: a value is one piece or, of codes, its two halves
    turned: Any  # pairs that rotate
    codes: Any  # "", "int8" or "fp8"
    dtype: Any  # of the products
    keys: Any  # of a tile
    tiles: Any  # of a page
    chunk: Any  # tiles of a chunk
    windowed: Any
    capped: Any
    arch: Any


class Query(NamedTuple):
    """The rows of a tile, turned by R(p mod 64)."""

    a: Any  # [BLOCK_M, half] float32, firsts of the pairs
    b: Any
    position: Any  # [BLOCK_M]; -1 where there is no row
    block: Any  # position less position mod 64: one for the tile, or [BLOCK_M, 1]
    token: Any  # [BLOCK_M] int64
    head: Any  # [BLOCK_M]
    alive: Any  # [BLOCK_M]


class State(NamedTuple):
    """Of a softmax under way."""

    m: Any  # [rows] largest score times log2 e
    sums: Any  # [rows, ONES] or [rows]: of exp2(score - m)
    acc: Any  # a tuple of pieces [rows, part]: sum of exp2(score - m) value


# ---- the query ---------------------------------------------------------------------------------------


@jit
def turns_at(rope, distance, SHAPE: tl.constexpr):
    """Cosines and sines of the pairs at a distance, [1, half], or at one a row, [rows, half]."""
    j = tl.arange(0, SHAPE.half)[None, :]
    at = (distance - NEAREST) * SHAPE.turned + j
    if SHAPE.half == SHAPE.turned:
        return tl.load(rope.cos + at), tl.load(rope.sin + at)
    else:
        turns = tl.broadcast_to(j < SHAPE.turned, at.shape)
        return tl.load(rope.cos + at, mask=turns, other=1.0), tl.load(rope.sin + at, mask=turns, other=0.0)


@jit
def load_query(
    q_ptr, q_stride, rows_ptr, position_ptr, rope, SHARED: tl.constexpr, ROWS: tl.constexpr, SHAPE: tl.constexpr
):
    """SHARED: rows of several sequences, whose blocks differ."""
    HALF: tl.constexpr = SHAPE.dim // 2
    row = tl.load(rows_ptr + tl.arange(0, ROWS))
    alive = row >= 0
    row = tl.maximum(row, 0)
    token = (row // SHAPE.ratio).to(tl.int64)
    head = tl.program_id(1) * SHAPE.ratio + row % SHAPE.ratio
    position = tl.load(position_ptr + token, mask=alive, other=-1)
    j = tl.arange(0, SHAPE.half)[None, :]
    mask = alive[:, None] & (j < HALF)
    start = (row_at(q_ptr, token, q_stride) + head * SHAPE.dim)[:, None]
    if SHAPE.turned == HALF:
        first, second = j, j + HALF
    else:  # what does not rotate is paired half with half, as append_kv does
        first, second = (
            tl.where(j < SHAPE.turned, j, j + SHAPE.turned),
            tl.where(j < SHAPE.turned, j + SHAPE.turned, j + HALF),
        )
    a = tl.load(start + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(start + second, mask=mask, other=0.0).to(tl.float32)
    block = position // SLOTS * SLOTS
    cos, sin = turns_at(rope, tl.where(alive, position % SLOTS, 0)[:, None], SHAPE)
    if rope.factor is not None:
        factor = tl.where(j < SHAPE.turned, rope.factor, 1.0)
        cos, sin = cos * factor, sin * factor
    a, b = turned(a, b, cos, sin)
    if SHARED:
        return Query(a, b, position, block[:, None], token, head, alive)
    else:
        return Query(a, b, position, tl.max(block, 0), token, head, alive)


# ---- keys and values ---------------------------------------------------------------------------------


@constexpr_function
def head_units(shape):
    """Elements of Stored.data from a head to the next; a slot's codes and its scale of 4 bytes are two a word."""
    return PAGE * shape.dim if shape.codes == "" else PAGE * (shape.dim + 4) // 2


@jit
def _planes(words, SHAPE: tl.constexpr):
    """Two codes a word -> the first ones and the second ones, exact in the compute dtype."""
    HALVES: tl.constexpr = tl.bfloat16 if SHAPE.dtype == tl.float32 else SHAPE.dtype
    if SHAPE.codes == "int8":
        a, b = byte_planes(words, HALVES, SHAPE.arch)
    else:
        a, b = fp8_planes(words, HALVES, SHAPE.arch)
    return a.to(SHAPE.dtype), b.to(SHAPE.dtype)


@jit
def load_keys(rows, SHAPE: tl.constexpr):
    """rows [keys] pointers -> keys [half, keys], the firsts and the seconds of their pairs."""
    HALF: tl.constexpr = SHAPE.dim // 2
    j = tl.arange(0, SHAPE.half)[:, None]
    if SHAPE.codes == "":
        if SHAPE.half == HALF:
            return tl.load(rows[None, :] + j), tl.load(rows[None, :] + (j + HALF))
        else:
            a = tl.load(rows[None, :] + j, mask=j < HALF, other=0.0)
            return a, tl.load(rows[None, :] + (j + HALF), mask=j < HALF, other=0.0)
    else:
        if SHAPE.half == HALF:
            words = tl.load(rows[None, :] + j)
        else:
            words = tl.load(rows[None, :] + j, mask=j < HALF, other=0)
        return _planes(words, SHAPE)


@jit
def load_values(rows, valid, SHAPE: tl.constexpr):
    """rows [keys] pointers -> a tuple of pieces [keys, part], zero where not valid."""
    WIDTH: tl.constexpr = SHAPE.dim if SHAPE.codes == "" else SHAPE.dim // 2
    d = tl.arange(0, SHAPE.part)[None, :]
    mask = valid[:, None]
    if SHAPE.part != WIDTH:
        mask = mask & (d < WIDTH)
    words = tl.load(rows[:, None] + d, mask=mask, other=0)
    if SHAPE.codes == "":
        return (words,)
    else:
        return _planes(words, SHAPE)


# ---- the softmax -------------------------------------------------------------------------------------


@jit
def new_state(ROWS: tl.constexpr, SHAPE: tl.constexpr):
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.full((ROWS, ONES), 0.0, tl.float32)
    acc = tl.full((ROWS, SHAPE.part), 0.0, tl.float32)
    if SHAPE.codes == "":
        return State(m, sums, (acc,))
    else:
        return State(m, sums, (acc, acc))


@jit
def _fma(x, factor, rest):
    return tl.fma(x, tl.broadcast_to(factor, x.shape), rest)


@jit
def _tanh(x):
    """1 - 2 / (exp(2 x) + 1), which overflows for no x; where that would cancel, the series of tanh."""
    y = x * x
    series = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(y < 0.0625, series, 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2E)) + 1.0))


@jit
def attend(state, query, turns, keys, values, k_scale, v_scale, seen, scale, cap, SHAPE: tl.constexpr):
    """One tile of keys: the one body that every row of every kind of call goes through.

    keys and values as loaded, their scales [keys] or None; seen [rows, keys]. scale is times log2 e or, where scores
    are capped, over cap; cap is times log2 e.
    """
    DTYPE: tl.constexpr = SHAPE.dtype
    cos, sin = turns
    a, b = turned(query.a, query.b, tl.broadcast_to(cos, query.a.shape), tl.broadcast_to(sin, query.a.shape))
    score = tl.dot(a.to(DTYPE), keys[0], input_precision="ieee")
    score = tl.dot(b.to(DTYPE), keys[1], score, input_precision="ieee")
    if SHAPE.codes != "":
        score = score * k_scale[None, :]
    score = score * scale
    if SHAPE.capped:
        score = cap * _tanh(score)
    score = tl.where(seen, score, float("-inf"))
    m = tl.maximum(state.m, tl.max(score, 1))
    base = tl.where(m == float("-inf"), 0.0, m)
    p = tl.exp2(score - base[:, None])
    before = tl.exp2(state.m - base)[:, None]
    weights = p.to(DTYPE)
    ones = tl.full((SHAPE.keys, ONES), 1.0, DTYPE)
    sums = _fma(state.sums, before, tl.dot(weights, ones, input_precision="ieee"))
    if SHAPE.codes == "":
        return State(m, sums, (_fma(state.acc[0], before, tl.dot(weights, values[0], input_precision="ieee")),))
    else:
        weights = (p * v_scale[None, :]).to(DTYPE)
        first = _fma(state.acc[0], before, tl.dot(weights, values[0], input_precision="ieee"))
        second = _fma(state.acc[1], before, tl.dot(weights, values[1], input_precision="ieee"))
        return State(m, sums, (first, second))


@jit
def row_sums(state):
    """The state with sums [rows]: all columns of the product with ones are alike."""
    return State(state.m, tl.max(state.sums, 1), state.acc)


@jit
def fold(total, chunk):
    """The state of all chunks so far and that of the next one; sums are [rows] in both."""
    m = tl.maximum(total.m, chunk.m)
    base = tl.where(m == float("-inf"), 0.0, m)
    before, now = tl.exp2(total.m - base), tl.exp2(chunk.m - base)
    sums = tl.fma(chunk.sums, now, total.sums * before)
    before, now = before[:, None], now[:, None]
    first = _fma(chunk.acc[0], now, total.acc[0] * before)
    if len(chunk.acc) == 1:
        return State(m, sums, (first,))
    else:
        return State(m, sums, (first, _fma(chunk.acc[1], now, total.acc[1] * before)))


@jit
def first_state(sinks_ptr, head, alive, SHAPE: tl.constexpr):
    """What chunks are folded onto: nothing, or the head's sink."""
    ROWS: tl.constexpr = head.shape[0]
    acc = tl.full((ROWS, SHAPE.part), 0.0, tl.float32)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.full((ROWS,), 0.0, tl.float32)
    if sinks_ptr is not None:
        m = tl.minimum(tl.load(sinks_ptr + head, mask=alive, other=0.0) * LOG2E, LARGEST)
        sums = tl.full((ROWS,), 1.0, tl.float32)
    if SHAPE.codes == "":
        return State(m, sums, (acc,))
    else:
        return State(m, sums, (acc, acc))


@jit
def _store_pieces(at, acc, alive, SHAPE: tl.constexpr):
    """at [rows] pointers to rows of dim elements."""
    WIDTH: tl.constexpr = SHAPE.dim // len(acc)
    d = tl.arange(0, SHAPE.part)[None, :]
    mask = alive[:, None] & (d < WIDTH)
    for i in tl.static_range(len(acc)):
        tl.store(at[:, None] + (d + i * WIDTH), acc[i].to(at.dtype.element_ty), mask=mask)


@jit
def store_rows(out_ptr, out_stride, total, token, head, alive, SHAPE: tl.constexpr):
    """acc / sums, or 0. Adding 0.0 leaves one kind of zero: a tile without effect may turn the sign of one."""
    sums = tl.where(total.sums == 0.0, 1.0, total.sums)[:, None]
    at = row_at(out_ptr, token, out_stride) + head * SHAPE.dim
    if len(total.acc) == 1:
        _store_pieces(at, (total.acc[0] / sums + 0.0,), alive, SHAPE)
    else:
        _store_pieces(at, (total.acc[0] / sums + 0.0, total.acc[1] / sums + 0.0), alive, SHAPE)


class Slots(NamedTuple):
    """Where states of chunks wait to be folded: [slots, heads] each."""

    acc: Any  # [..., dim] float32
    m_sum: Any  # [..., 2] float32


@jit
def store_slot(slots, slot, state, head, alive, SHAPE: tl.constexpr):
    """slot [rows] int64."""
    at = slot * (SHAPE.kv_heads * SHAPE.ratio) + head
    tl.store(slots.m_sum + at * 2, state.m, mask=alive)
    tl.store(slots.m_sum + at * 2 + 1, state.sums, mask=alive)
    _store_pieces(slots.acc + at * SHAPE.dim, state.acc, alive, SHAPE)


@jit
def load_slot(slots, slot, head, alive, SHAPE: tl.constexpr):
    """The state of a slot, sums [rows]."""
    at = slot * (SHAPE.kv_heads * SHAPE.ratio) + head
    m = tl.load(slots.m_sum + at * 2, mask=alive, other=float("-inf"))
    sums = tl.load(slots.m_sum + at * 2 + 1, mask=alive, other=0.0)
    WIDTH: tl.constexpr = SHAPE.dim if SHAPE.codes == "" else SHAPE.dim // 2
    d = tl.arange(0, SHAPE.part)[None, :]
    acc = (slots.acc + at * SHAPE.dim)[:, None] + d
    mask = alive[:, None] & (d < WIDTH)
    if SHAPE.codes == "":
        return State(m, sums, (tl.load(acc, mask=mask, other=0.0),))
    else:
        return State(m, sums, (tl.load(acc, mask=mask, other=0.0), tl.load(acc + WIDTH, mask=mask, other=0.0)))
