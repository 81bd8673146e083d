"""A decode step on a CPU: one fused call a layer with the bits of two, and how many torch calls a layer costs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from test_model import load
from tiny import write_tiny

from csrc_triton.attention import paged_attention
from csrc_triton.cpu_attention import self_attention_cpu
from csrc_triton.fused import argmax, rope_table
from csrc_triton.pages import append_kv, layer_scales, layer_view
from polymodel.config import Weights
from polymodel.kv import Arena, PageList, pack_rows, pack_tables
from polymodel.model import Panel, forward

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

from bench_decode import python_seconds, torch_calls

HQ, HKV = 6, 2
LENGTHS = (0, 5, 63, 64, 130, 600)  # tokens stored before; the list of the last but one has lost a span


def stored(arena: Arena, dim: int, dtype: torch.dtype) -> list[PageList]:
    lists = []
    layout = arena.layout(1, HKV, dim, dtype)
    for length in LENGTHS:
        pages = PageList(arena, layout)
        pages.reserve(length)
        pages.commit(length)
        lists.append(pages)
    lists[4].evict(20, 50)
    return lists


@pytest.mark.parametrize(
    ("dim", "rot_dim", "factor", "dtype"),
    [
        (64, 64, 1.0, torch.float32),
        (64, 32, 1.0, torch.float32),
        (20, 20, 1.3, torch.float32),
        (64, 64, 1.0, torch.bfloat16),
        (64, 64, 1.0, torch.int8),
    ],
)
@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1, 1), (0, 1, 0, 0, 0, 0), (2, 1, 3, 1, 40, 130)], ids=str)
@pytest.mark.parametrize("window", [None, 48])
def test_storing_and_attending_at_once_gives_the_bits_of_one_after_the_other(
    dim: int, rot_dim: int, factor: float, dtype: torch.dtype, counts: tuple[int, ...], window: int | None
) -> None:
    gen = torch.Generator().manual_seed(0)
    rope = rope_table([10000 ** (-2 * j / rot_dim) for j in range(rot_dim // 2)], 1024, factor=factor)
    arena = Arena(64 << 20, 8 << 20)
    lists = stored(arena, dim, dtype)
    layout = lists[0].layout
    for pages in lists:  # what was stored before, and whatever in the slots that hold no token
        view = layout.view(arena.bytes, 0)
        view[pages.pages] = (
            torch.randn(view[pages.pages].shape, generator=gen).mul_(20 if layout.scaled else 1).to(dtype)
        )
        if layout.scaled:
            layout.scales(arena.bytes, 0)[pages.pages] = 0.05
    for pages, count in zip(lists, counts, strict=True):
        pages.reserve(count)
    table = pack_tables(lists, counts)
    position, page, slot = pack_rows(lists, counts, table)
    cu_rows = torch.tensor([0, *counts]).cumsum(0).int()
    total = sum(counts)
    q, k, v = (torch.randn(total, heads, dim, generator=gen) for heads in (HQ, HKV, HKV))
    k[0, 0, 0], v[0, 0, 0], v[0, 1, 1] = torch.inf, torch.nan, -torch.inf  # what the first row sees may be a NaN
    qk, start = torch.cat((q, k), 1), arena.bytes.clone()

    append_kv(k, v, arena.bytes, layout, 0, page, slot, slot, rope)
    wanted = paged_attention(q, arena.bytes, layout, 0, table, cu_rows, position, rope, scale=0.2, window=window)
    bytes_wanted = arena.bytes.clone()
    arena.bytes.copy_(start)
    space = arena.workspace(layout)
    for _ in range(2):  # a second layer finds the scratch of the first
        y = self_attention_cpu(
            qk.clone(), v, layer_view(arena.bytes, layout, 0, space),
            layer_scales(arena.bytes, layout, 0, space) if layout.scaled else None,
            table, cu_rows, position, page, slot, rope, scale=0.2, window=window, workspace=space,
        )  # fmt: skip
        assert torch.equal(arena.bytes, bytes_wanted)
        torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    assert float(wanted.nan_to_num(0.0).abs().mean()) > 0.01


def test_a_position_beyond_the_rope_table_is_refused_before_anything_is_stored(tmp_path: Path) -> None:
    model, arena = load(write_tiny(tmp_path, "llama", num_hidden_layers=1))
    last = model.ropes[0].max_position
    pages = PageList(arena, model.layout)
    pages.reserve(last + 1)
    pages.commit(last + 1)
    before = arena.bytes.clone()
    with pytest.raises(ValueError, match=f"position {last + 1} is beyond the rope table, which ends at {last}"):
        forward(model, arena, Panel([pages], [[5]]))
    assert len(pages) == last + 1 and torch.equal(arena.bytes, before)


@pytest.mark.parametrize(("weights", "most"), [("q8", 60), ("w8a8", 95)])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_layer_of_a_step_takes_few_torch_calls(tmp_path: Path, weights: Weights, most: int, batch: int) -> None:
    """47 and 82 were counted, and for every sequence one more: its unused slots are zeroed."""
    counts = []
    for layers in (1, 3):
        options = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": layers}
        model, arena = load(write_tiny(tmp_path / str(layers), "llama", **options), weights)
        lists = [PageList(arena, model.layout) for _ in range(batch)]
        forward(model, arena, Panel(lists, [[3, 4, 5 + i] for i in range(batch)]))
        panel = Panel(lists, [[7]] * batch)
        counts.append(len(torch_calls(lambda: forward(model, arena, panel))))  # noqa: B023
    assert 30 < (counts[1] - counts[0]) / 2 <= most + batch


def test_python_time_is_what_torch_does_not_take() -> None:
    x = torch.randn(300, 300)

    def busy() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    def step(*, idle: bool = False) -> None:
        for _ in range(20):
            x.mm(x)
        if not idle:
            busy()

    assert len(torch_calls(step)) == 20
    assert 0.01 < python_seconds(step, 5) < 0.04
    assert python_seconds(lambda: step(idle=True), 5) < 0.01


def test_argmax_takes_the_first_of_ties_and_none_of_a_row_with_a_nan() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [torch.nan, 9.0, 9.0], [2.0, 2.0, 2.0], [0.0, -1.0, torch.inf]])
    assert argmax(logits).tolist() == [1, -1, 0, 2]
    assert argmax(logits[1:2]).tolist() == [-1]
    assert argmax(logits[:0]).tolist() == []
