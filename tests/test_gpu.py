"""What only a GPU can show: the kernels as compiled, by value and by their bits. tools/gpu_run.py runs these."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_no_worse, assert_same_bits, random_weight
from harness import F16_FIELDS, made_up_weight
from torch import Tensor

from csrc_triton import attention, launch, qgemm, t64
from csrc_triton.attention import PageTable, page_table, paged_attention, paged_attention_ref, read_ref
from csrc_triton.attention_plan import PAGE, make_plan
from csrc_triton.cpu import pack as pack_for_cpu
from csrc_triton.cpu_attention import Workspace
from csrc_triton.fused import (
    RopeTable,
    add_rmsnorm,
    argmax,
    quantize_rows,
    rmsnorm,
    rmsnorm_ref,
    rope_table,
    swiglu,
    swiglu_ref,
    top_k,
)
from csrc_triton.launch import kernels_on_cpu
from csrc_triton.linear import QLinear
from csrc_triton.pages import KVLayout, append_kv, append_kv_ref, commit_path, copy_pages
from csrc_triton.qgemm import prefill_gemm
from csrc_triton.qmatmul import (
    dequant_matmul,
    lm_head_argmax,
    matmul,
    matmul_ref,
    matmul_rmsnorm,
    matmul_workspace_nbytes,
    swiglu_matmul,
)
from csrc_triton.quant import QTensor, dense, quantize
from csrc_triton.tree import rotation_slots, token_tree, tree_attention, tree_attention_ref
from csrc_triton.w8a8 import w8a8_matmul
from polymodel import Draft, Engine
from polymodel.checkpoint import open_checkpoint, perturbed
from polymodel.selfcheck import write_random_model

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FORMATS = ("q4 128", "q4", "q4 zero", "q8", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "dense")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65, 130, 257)


def weight(fmt: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> QTensor:
    if fmt == "dense":
        return dense(torch.randn(n, k, dtype=dtype, device="cuda"))
    if fmt in F16_FIELDS:
        return made_up_weight(fmt, n, k, device="cuda")
    stored = quantize(torch.randn(n, k), "q4", 128) if fmt == "q4 128" else random_weight(fmt, n, k)
    return t64.pack_t64(stored.to("cuda"))


def rows(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, k, device="cuda").to(dtype)


def table(q: QTensor) -> Tensor:
    return q.parts["weight"].float() if "weight" in q.parts else t64.dequantize_t64(q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_values(fmt: str, dtype: torch.dtype) -> None:
    """No worse than torch in the same dtype, for every count of rows."""
    for n, k in ((130, 512), (1536, 1024)):
        w, x = weight(fmt, n, k, dtype), rows(max(ROWS), k, dtype)
        exact, same = matmul_ref(x, w), x @ table(w).to(dtype).T
        for m in ROWS:
            assert_no_worse(matmul(x[:m], w), exact[:m], same[:m], slack=float(exact.abs().max()) * 1e-6)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (65, 65), (576, 1536), (300, 576)])
def test_odd_shapes(n: int, k: int) -> None:
    w = t64.pack_t64(quantize(torch.randn(n, k), "q4", 128).to("cuda"))
    for m in (1, 17, 130):
        x = rows(m, k)
        same = x @ table(w).bfloat16().T
        assert_no_worse(matmul(x, w), matmul_ref(x, w), same, slack=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_rows_bits_are_its_own(fmt: str, dtype: torch.dtype) -> None:
    w, x = weight(fmt, 320, 1024, dtype), rows(257, 1024, dtype)
    whole = matmul(x, w)
    assert len(whole.unique()) > 1000
    for m in ROWS:
        assert_same_bits(matmul(x[:m], w), whole[:m], f"{m} rows")
    for r in (0, 63, 64, 128, 256):
        assert_same_bits(dequant_matmul(x[r : r + 1], w), whole[r : r + 1], f"row {r}")
    order = torch.randperm(257, device="cuda")
    assert_same_bits(matmul(x[order], w), whole[order])
    for _ in range(20):
        assert_same_bits(matmul(x[:16], w), whole[:16])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("fmt", FORMATS[:-1])
def test_assembly_is_its_plain_twin(fmt: str, dtype: torch.dtype) -> None:
    w, x = weight(fmt, 192, 512), rows(70, 512, dtype)
    fast = matmul(x[:5], w), matmul(x, w)
    with kernels_on_cpu(90, plain=True):
        plain = matmul(x[:5], w), matmul(x, w)
    for a, b in zip(fast, plain, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("fmt", ["q4 128", "q4_0", "q4_k", "q8"])
def test_written_out_or_made_in_registers(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = weight(fmt, 320, 1024), rows(2048, 1024)
    direct = prefill_gemm(x, w)
    monkeypatch.setattr(qgemm, "SCRATCH_ROWS", 2048)
    assert_same_bits(prefill_gemm(x, w), direct)
    assert_same_bits(matmul(x[:9], w), direct[:9])


@pytest.mark.parametrize("segments", [1, 4])
def test_fused_products_are_their_parts(segments: int) -> None:
    gate, up = (quantize(torch.randn(200, 512), "q4", 128).to("cuda") for _ in range(2))
    both, x = replace(t64.pack_gate_up(gate, up), segments=segments), rows(70, 512)
    a, b = (replace(t64.pack_t64(q), segments=segments) for q in (gate, up))
    expected = swiglu(torch.cat((matmul(x, a), matmul(x, b)), 1), block=200)
    assert_same_bits(swiglu_matmul(x, both).contiguous(), expected.contiguous())
    assert_same_bits(swiglu_matmul(x[:5], both).contiguous(), expected[:5].contiguous())
    head = replace(t64.pack_t64(quantize(torch.randn(1000, 512), "q8", None).to("cuda")), segments=segments)
    assert_same_bits(lm_head_argmax(x[:33], head), argmax(matmul(x[:33], head, out_dtype=torch.float32)))
    norm, residual = torch.rand(200, device="cuda"), rows(6, 200)
    y, normed = matmul_rmsnorm(x[:6], a, norm, 1e-5, residual=residual)
    assert_same_bits(y.contiguous(), matmul(x[:6], a, residual=residual))
    assert_same_bits(normed, rmsnorm(y, norm, 1e-5))


def test_eight_bit_products_are_the_cpus() -> None:
    stored, x = quantize(torch.randn(96, 576), "q8", None), torch.randn(70, 576)
    w = t64.pack_t64(stored.to("cuda"), "t64-int8")
    on_cpu = w8a8_matmul(x, pack_for_cpu(stored, "w8a8"))
    assert_same_bits(w8a8_matmul(x.cuda(), w).cpu(), on_cpu)
    assert_same_bits(w8a8_matmul(x[:3].cuda(), w).cpu(), on_cpu[:3])


@pytest.mark.parametrize("width", [64, 576, 4096, 12000])
def test_row_kernels(width: int) -> None:
    x, residual, norm = rows(33, width), rows(33, width), torch.rand(width, device="cuda")
    wide = rmsnorm_ref(x, norm, 1e-5)
    assert_no_worse(rmsnorm(x, norm, 1e-5), wide, wide.bfloat16())
    stream, normed = add_rmsnorm(x, residual, norm, 1e-5)
    assert_same_bits(stream, x + residual)
    assert_same_bits(normed, rmsnorm(stream, norm, 1e-5))
    assert_same_bits(rmsnorm(x[7:8], norm, 1e-5), rmsnorm(x, norm, 1e-5)[7:8])
    exact = swiglu_ref(x)
    assert_no_worse(swiglu(x), exact, exact.bfloat16(), slack=1e-3)
    codes, scale = quantize_rows(x)
    assert ((codes * scale[:, None] - x.float()).abs() <= scale[:, None] * 0.51).all()
    logits = rows(5, width, torch.float32)
    values, ids = top_k(logits, 8)
    assert_same_bits(values, logits.sort(1, descending=True).values[:, :8].contiguous())
    assert_same_bits(ids[:, 0], argmax(logits))
    assert_same_bits(ids[:, 0], logits.argmax(1))


def test_in_a_graph() -> None:
    w, x = weight("q4 128", 1024, 1024), rows(4, 1024)
    space = torch.empty(matmul_workspace_nbytes(4, w), dtype=torch.uint8, device="cuda")
    expected = matmul(x, w, workspace=space)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = matmul(x, w, workspace=space)
    x.copy_(rows(4, 1024))
    graph.replay()
    assert_same_bits(y, matmul(x, w))
    assert not torch.equal(y, expected)


def test_a_layer() -> None:
    linear = torch.nn.Linear(1024, 512, device="cuda", dtype=torch.bfloat16)
    layer, x = QLinear.from_linear(linear), rows(70, 1024)
    with torch.no_grad():
        y = layer(x)
        assert (y - linear(x)).norm() < 0.2 * linear(x).norm()
        for m in (0, 33, 69):
            assert_same_bits(layer(x[m : m + 1]), y[m : m + 1])
        compiled = torch.compile(layer)
        assert_same_bits(compiled(x), y)


# ---- attention and pages -----------------------------------------------------------------------------

LENGTHS = (1, 63, 64, 65, 511, 512, 513, 1328, 2011)
# of rows whose queries, weights and results are rounded once each, against float64 of what is stored
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
GEOMETRIES = ((4, 4, 64), (8, 2, 128), (5, 1, 80), (9, 3, 96), (14, 2, 64), (32, 8, 128), (8, 2, 256), (4, 2, 8))
PAGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn)


def rope_of(rot_dim: int, factor: float = 1.0, device: str = DEVICE) -> RopeTable:
    made = rope_table([10000 ** (-2 * j / rot_dim) for j in range(rot_dim // 2)], 4096, factor=factor)
    return replace(made, cos=made.cos.to(device), sin=made.sin.to(device))


@dataclass
class Stored:
    """Sequences as append_kv stores them, every other byte of the arena of NaNs, and a query for every token."""

    q: list[Tensor]  # [L, Hq, D]
    k: list[Tensor]  # [L, Hkv, D]
    v: list[Tensor]
    ids: Tensor  # [B, E]
    spare: list[int]  # pages that are nobody's
    arena: Tensor
    layout: KVLayout
    rope: RopeTable

    def call(self, *parts: tuple[int, int, int]) -> tuple[Tensor, PageTable, Tensor, Tensor]:
        """Rows start to stop of sequences, each seeing the tokens before stop."""
        q = torch.cat([self.q[s][start:stop] for s, start, stop in parts])
        stops = torch.tensor([stop for _, _, stop in parts], dtype=torch.int32)
        counts = torch.tensor([0, *(stop - start for _, start, stop in parts)])
        at = torch.cat([torch.arange(start, stop) for _, start, stop in parts])
        return q, page_table(self.ids[[s for s, _, _ in parts]], stops), counts.cumsum(0).int(), at.int()

    def run(self, *parts: tuple[int, int, int], **options: Any) -> list[Tensor]:
        q, *rest = self.call(*parts)
        y = paged_attention(q, self.arena, self.layout, 0, *rest, self.rope, **{"scale": q.shape[2] ** -0.5, **options})
        return list(y.split([stop - start for _, start, stop in parts]))

    def exact(self, *parts: tuple[int, int, int], **options: Any) -> Tensor:
        q, *rest = self.call(*parts)
        scale = q.shape[2] ** -0.5
        arena, rope = self.arena.cpu(), on_cpu(self.rope)
        return paged_attention_ref(q.cpu(), arena, self.layout, 0, *rest, rope, scale=scale, by_kernels=True, **options)

    @property
    def ends(self) -> list[tuple[int, int, int]]:
        """Up to 130 rows at the end of every sequence."""
        return [(s, max(0, len(q) - 130), len(q)) for s, q in enumerate(self.q)]


def on_cpu(rope: RopeTable) -> RopeTable:
    return replace(rope, cos=rope.cos.cpu(), sin=rope.sin.cpu())


def stored(
    lengths: Sequence[int],
    heads: tuple[int, int, int] = (8, 2, 128),
    dtype: torch.dtype = torch.bfloat16,
    *,
    rope: RopeTable | None = None,
    shared: int = 0,
    spare: int = 0,
    layers: int = 1,
    device: str = DEVICE,
) -> Stored:
    """shared: pages that all sequences begin with. Keys and values of all layers are the same."""
    hq, hkv, dim = heads
    own = [-(-n // PAGE) - shared for n in lengths]
    count = 1 + shared + sum(own) + spare
    layout = KVLayout(layers, hkv, dim, dtype, pages_per_superblock=count)
    arena = torch.full((count * layout.page_bytes,), 255, dtype=torch.uint8, device=device)
    arena[: layout.block_bytes] = 0
    free = layout.page_ids(1 + torch.randperm(count - 1)).tolist()
    common = [free.pop() for _ in range(shared)]
    ids = torch.zeros(len(lengths), shared + max(own), dtype=torch.int32)
    for s, pages in enumerate(own):
        ids[s, : shared + pages] = torch.tensor([*common, *(free.pop() for _ in range(pages))], dtype=torch.int32)
    kept = torch.bfloat16 if layout.scaled else dtype
    q = [torch.randn(n, hq, dim, device=device).to(kept) for n in lengths]
    k, v = ([torch.randn(n, hkv, dim, device=device).to(kept) for n in lengths] for _ in range(2))
    made = Stored(q, k, v, ids, free, arena, layout, rope or rope_of(dim, device=device))
    for s, length in enumerate(lengths):
        first = shared * PAGE if s else 0
        k[s][:first], v[s][:first] = k[0][:first], v[0][:first]
        at = torch.arange(first, length, dtype=torch.int32)
        for layer in range(layers):
            append(made, k[s][first:], v[s][first:], ids[s][at.long() // PAGE], at % PAGE, layer)
    return made


def append(
    made: Stored, k: Tensor, v: Tensor, page: Tensor, slot: Tensor, layer: int = 0, rot_slot: Tensor | None = None
) -> None:
    append_kv(k, v, made.arena, made.layout, layer, page, slot, slot if rot_slot is None else rot_slot, made.rope)


def assert_close_rows(y: Tensor, exact: Tensor, what: str = "") -> None:
    error = (y.double().cpu() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1).clamp_min(1e-30)
    assert error.max() <= TOLERANCE[y.dtype], f"{what}: relative error {float(error.max()):.2g}"


def skip_without_fp8(dtype: torch.dtype) -> None:
    if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8_e4m3fn needs sm_89")


@pytest.mark.parametrize("dtype", PAGE_DTYPES, ids=str)
@pytest.mark.parametrize("heads", GEOMETRIES, ids=str)
def test_attention_values(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    skip_without_fp8(dtype)
    made = stored(LENGTHS, heads, dtype)
    parts = [(s, max(0, n - 2), n) for s, n in enumerate(LENGTHS)]
    assert_close_rows(torch.cat(made.run(*parts)), made.exact(*parts))


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 64}, {"window": 128}, {"softcap": 5.0}, {"sinks": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_attention_variants(options: dict[str, Any], dtype: torch.dtype) -> None:
    if "sinks" in options:
        options = {"sinks": torch.randn(8, device=DEVICE)}
    made = stored((65, 513, 1328), dtype=dtype, rope=rope_of(64, 1.2))
    parts = [(0, 60, 65), (1, 510, 513), (2, 1327, 1328)]
    y, on_host = torch.cat(made.run(*parts, **options)), {k: v.cpu() if k == "sinks" else v for k, v in options.items()}
    assert_close_rows(y, made.exact(*parts, **on_host))


@pytest.mark.parametrize("dtype", PAGE_DTYPES, ids=str)
def test_what_is_stored(dtype: torch.dtype) -> None:
    skip_without_fp8(dtype)
    made = stored((100,), (4, 2, 96), dtype, rope=rope_of(64, 1.3))
    at = torch.arange(100)
    page, slot = made.ids[0][at // PAGE].long(), at % PAGE
    found = read_ref(made.arena.cpu(), made.layout, 0, page, slot, on_cpu(made.rope), True)
    exact = append_kv_ref(made.k[0].cpu(), made.v[0].cpu(), slot, on_cpu(made.rope))
    for x, y in zip(found, exact, strict=True):
        step = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}.get(dtype)
        allowed = y.abs() * step if step else y.abs().amax(-1, keepdim=True) / (200 if dtype == torch.int8 else 20)
        assert ((x - y).abs() <= allowed + 1e-6).all()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", PAGE_DTYPES, ids=str)
def test_attention_bits_in_any_company(dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in a batch, in a chain, in chunks of a prompt; chunks split or folded; again and again."""
    skip_without_fp8(dtype)
    made = stored(LENGTHS, (8, 2, dim), dtype)
    whole = made.run(*made.ends)
    assert len(torch.cat(whole).unique()) > 1000
    assert_close_rows(whole[7][-2:], made.exact((7, LENGTHS[7] - 2, LENGTHS[7])))
    for count in (1, 2, 5, 8, 16, 64, 100):
        for (s, first, end), expected in zip(made.ends, whole, strict=True):
            for start in {first, (first + end) // 2, max(first, end // PAGE * PAGE - 1), max(first, end - count)}:
                stop = min(start + count, end)
                (y,) = made.run((s, start, stop))
                assert_same_bits(y, expected[start - first : stop - first], f"rows {start} to {stop} of {end}")
    for a, b in zip(made.run(*made.ends[::-1]), whole[::-1], strict=True):
        assert_same_bits(a, b)
    for longest in (0, 2, 10**9):
        with monkeypatch.context() as patch:
            patch.setattr(attention, "make_plan", partial(make_plan, longest_whole=longest))
            assert_same_bits(torch.cat(made.run(*made.ends)), torch.cat(whole), f"whole up to {longest}")
    for _ in range(10):
        assert_same_bits(torch.cat(made.run(*made.ends)), torch.cat(whole))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_bits_at_every_tile(dtype: torch.dtype) -> None:
    made = stored(LENGTHS, dtype=dtype)
    whole = torch.cat(made.run(*made.ends))
    arch = launch.arch_of(made.arena)
    for rows in (16, 32):
        for stages in (2, 3, 5):
            entry = {"rows": rows, "cols": 64, "warps": 4, "stages": stages}
            with launch.tiles_from({"arch": arch, "tiles": {"attention": {"16": entry}}}):
                assert_same_bits(torch.cat(made.run(*made.ends)), whole, str(entry))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_cascade_on_or_off(dtype: torch.dtype) -> None:
    lengths = (1100, 1030, 1026, 1500, 2100)
    made = stored(lengths, dtype=dtype, shared=16)
    for rows in (1, 5, 80):
        parts = [(s, max(0, n - rows), n) for s, n in enumerate(lengths)]
        on, off = made.run(*parts, cascade=True), made.run(*parts, cascade=False)
        assert_same_bits(torch.cat(on), torch.cat(off), f"{rows} rows")
    assert_close_rows(on[0][-2:], made.exact((0, lengths[0] - 2, lengths[0])))


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 448, 470, 505, 511, 512, 1328])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_a_node_is_decoding_of_its_path(dtype: torch.dtype, prefix: int) -> None:
    """Keys of siblings are large: a mask that leaked would show."""
    made, rng, count = stored((max(prefix, 1), 700), dtype=dtype, spare=8), random.Random(prefix), 24
    prefixes = (prefix, 700)
    parents = [[rng.randint(max(-1, i - rng.choice((1, 2, 8))), i - 1) for i in range(count)] for _ in prefixes]
    trees = [token_tree(parent) for parent in parents]
    table = page_table(made.ids, torch.tensor(prefixes, dtype=torch.int32))
    q, k, v = (torch.randn(2 * count, h, 128, device=DEVICE).bfloat16() for h in (8, 2, 2))
    k = 3 * k
    page = torch.tensor([made.spare[s] for s in (0, 1) for _ in range(count)], dtype=torch.int32)
    slot = torch.stack([torch.randperm(PAGE)[:count] for _ in prefixes]).flatten().int()
    append(made, k, v, page, slot, rot_slot=rotation_slots(table, trees))
    options: dict[str, Any] = {"scale": 128**-0.5}
    y = tree_attention(q, made.arena, made.layout, 0, table, trees, page, slot, made.rope, **options)
    exact = tree_attention_ref(
        *(q.cpu(), made.arena.cpu(), made.layout, 0, table, parents, page, slot, on_cpu(made.rope)),
        **options,
        by_kernels=True,
    )
    assert_close_rows(y, exact)
    for s, length in enumerate(prefixes):
        full = length // PAGE
        for path in trees[s].paths:
            nodes = s * count + torch.from_numpy(path[path >= 0]).long()
            stop = length + len(nodes)
            ids = torch.tensor([[*made.ids[s, :full].tolist(), *made.spare[2 : 2 + -(-stop // PAGE) - full]]]).int()
            if length % PAGE:
                copy_pages(made.arena, made.layout, int(made.ids[s, full]), int(ids[0, full]))
            at = torch.arange(length, stop, dtype=torch.int32)
            append(made, k[nodes], v[nodes], ids[0][at.long() // PAGE], at % PAGE)
            lists = page_table(ids, torch.tensor([stop], dtype=torch.int32))
            cu_rows = torch.tensor([0, len(nodes)], dtype=torch.int32)
            plain = paged_attention(q[nodes], made.arena, made.layout, 0, lists, cu_rows, at, made.rope, **options)
            assert_same_bits(y[nodes], plain, f"prefix {length}, path {nodes.tolist()}")


@pytest.mark.parametrize("dtype", PAGE_DTYPES, ids=str)
def test_pages_and_rows_that_move(dtype: torch.dtype) -> None:
    skip_without_fp8(dtype)
    made = stored((500, 130), dtype=dtype, layers=3, spare=20)
    parts = [(s, len(q) - 3, len(q)) for s, q in enumerate(made.q)]
    before = torch.cat(made.run(*parts))
    used = made.ids > 0
    src, dst = made.ids[used].tolist(), made.spare[: int(used.sum())]
    copy_pages(made.arena, made.layout, src, dst)
    blocks = made.layout.blocks(made.arena)
    assert torch.equal(blocks[dst], blocks[src])
    there = replace(made, ids=made.ids.masked_scatter(used, torch.tensor(dst, dtype=torch.int32)))
    assert_same_bits(torch.cat(there.run(*parts)), before)
    fresh = made.spare[-1]
    rows = [(int(made.ids[0, i]), 5 * i) for i in range(7)]
    commit_path(made.arena, made.layout, rows, [(fresh, 60 - i) for i in range(7)])
    for layer in range(3):
        for part in (made.layout.view, *([made.layout.scales] if made.layout.scaled else [])):
            x = part(made.arena, layer)
            for i, (page, slot) in enumerate(rows):
                same = x[page, :, :, slot].float().nan_to_num(7.0), x[fresh, :, :, 60 - i].float().nan_to_num(7.0)
                assert torch.equal(*same)


def test_offsets_beyond_31_bits() -> None:
    """Pages whose elements, and bytes, lie further than 2^31 into the arena."""
    near = stored((700,), (32, 8, 128))
    layout = replace(near.layout, pages_per_superblock=1)
    count = 2**32 // layout.block_bytes + 64
    if torch.cuda.mem_get_info()[0] < 1.2 * count * layout.block_bytes:
        pytest.skip("too little free memory")
    arena = torch.empty(count * layout.block_bytes, dtype=torch.uint8, device=DEVICE)
    arena[: near.arena.numel()] = near.arena
    ids = layout.page_ids(torch.arange(count - near.ids.numel(), count))
    far = replace(near, arena=arena, layout=layout)
    copy_pages(arena, layout, near.ids[0].tolist(), ids.tolist())
    expected = torch.cat(near.run((0, 600, 700)))
    far.ids = ids[None]
    assert_same_bits(torch.cat(far.run((0, 600, 700))), expected)
    at = torch.arange(700, dtype=torch.int32)
    arena[ids.long().min() * 4096 :] = 0
    append(far, far.k[0], far.v[0], ids[at.long() // PAGE], at % PAGE)
    assert_same_bits(torch.cat(far.run((0, 600, 700))), expected)
    commit_path(arena, layout, [(int(near.ids[0, 1]), 3)], [(int(ids[-1]), 63)])
    view = layout.view(arena, 0)
    assert torch.equal(view[int(ids[-1]), :, :, 63], view[int(near.ids[0, 1]), :, :, 3])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_a_device_that_is_not_current() -> None:
    made = stored((700, 65))
    expected = torch.cat(made.run(*made.ends))
    rope = replace(made.rope, cos=made.rope.cos.to("cuda:1"), sin=made.rope.sin.to("cuda:1"))
    there = replace(made, q=[q.to("cuda:1") for q in made.q], arena=made.arena.to("cuda:1"), rope=rope)
    assert torch.cuda.current_device() == 0
    assert_same_bits(torch.cat(there.run(*made.ends)).to("cuda:0"), expected)


def test_attention_in_a_graph() -> None:
    """A workspace made before holds the plan; other queries replay over it."""
    made, space = stored((700, 65, 512)), Workspace()
    q, *rest = made.call(*((s, len(q) - 1, len(q)) for s, q in enumerate(made.q)))
    run = partial(paged_attention, q, made.arena, made.layout, 0, *rest, made.rope, scale=128**-0.5)
    expected = run(workspace=space)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(workspace=space)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert_same_bits(y, run())
    assert not torch.equal(y, expected)


# ---- the engine --------------------------------------------------------------------------------------


def wide_model(folder: Path) -> Path:
    write_random_model(folder, hidden_size=256, intermediate_size=256, num_hidden_layers=3)
    return folder


@pytest.mark.parametrize("weights", ["file", "q4", "w8a8"])
@pytest.mark.parametrize("count", [9, 64, 200])
def test_what_an_engine_takes_over_has_the_bits_of_a_direct_prefill(tmp_path: Path, weights: str, count: int) -> None:
    """A prefix from the cache, a sibling's lower layers, a session from the host and one from a file."""
    path = wide_model(tmp_path)
    ids = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(8)).tolist()
    with Engine(device=DEVICE, budget=1 << 30, kv_budget=64 << 20) as engine:
        engine.add("m", path, weights=weights)
        engine.add("high", perturbed(open_checkpoint(path), 2, 1), weights=weights)
        engine.generate("m", prompt_ids=ids, max_new_tokens=2, stop_at_eos=False)
        for model, resumed in (("m", 0), ("high", count)):
            shared, direct = engine.session(model), engine.session(model, domain="direct")
            shared.append(ids)
            direct.append(ids)
            assert (shared.num_cached, shared.num_resumed) == (count - 1 if model == "m" else 0, resumed)
            shared.save(tmp_path / f"{model}.session")
            loaded = engine.session(model)
            loaded.load(tmp_path / f"{model}.session")
            shared.swap_out()
            shared.swap_in()
            for one in (shared, loaded):
                assert_same_bits(one.pages.dump(), direct.pages.dump())
                assert one.logits is not None and direct.logits is not None
                assert_same_bits(one.logits.cpu(), direct.logits.cpu())
            tokens = direct.generate(20)
            assert shared.generate(20) == tokens == loaded.generate(20) and len(set(tokens)) > 5


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 1}], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "draft", ["twin", "ngram", Draft("twin", tokens=4, width=3), Draft(("ngram", "twin"), tokens=6)], ids=str
)
def test_drafting_changes_no_token_and_a_replay_proves_it(
    tmp_path: Path, draft: str | Draft, options: dict[str, Any]
) -> None:
    path = wide_model(tmp_path)
    ids = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(0)).tolist() * 2
    ask: dict[str, Any] = {"prompt_ids": ids, "max_new_tokens": 48, "stop_at_eos": False, **options}
    with Engine(device=DEVICE, budget=1 << 30, kv_budget=64 << 20) as engine:
        engine.add("m", path, weights="q8", twin="q4")
        plain, drafted = engine.generate("m", draft=None, **ask), engine.generate("m", draft=draft, **ask)
        assert drafted.tokens == plain.tokens
        assert drafted.metrics.num_target_forwards <= plain.metrics.num_target_forwards
        engine.verify_exact(drafted)
