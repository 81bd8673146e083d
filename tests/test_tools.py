"""The tools that choose tiles, model times, run on a GPU and measure: what of them can be checked without one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton.language")

import autotune
import bench_attention
import bench_fused
import bench_matmul
import gpu_run
import harness
import roofline
import sass
from autotune import ATTENTION, TUNABLES, Trial, Tunable
from interpreter import interpreted
from roofline import MODELLED, Kernel, Launch, bytes_in_flight, predict
from typer.testing import CliRunner

from csrc_triton import attention, launch, t64
from csrc_triton.attention_plan import PAGE
from csrc_triton.launch import TILES, Tile, kernels_on_cpu
from csrc_triton.qmatmul import matmul_ref

TABLES = {int(path.stem[3:]): path for path in sorted(TILES.glob("sm_*.json"))}
OTHERS = (89, 100, 120)  # architectures that take another's table
DECODE = TUNABLES[0]
MATMULS = [tunable for tunable in TUNABLES if tunable is not ATTENTION]
FEW = (Tile(16, 64, 4, 3), Tile(16, 64, 4, 4))

pytestmark = pytest.mark.filterwarnings("ignore:no tile table for sm_:UserWarning")


def small(tiles: Callable[[int], Any] = lambda bucket: FEW, buckets: tuple[int, ...] = (16,)) -> Tunable:
    """Decode of one kind of weight at a few tiles."""
    return replace(DECODE, buckets=buckets, tiles=tiles, ranked=("q4",), kinds=("q4",))


# ---- tables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", TABLES)
def test_tables_are_whole_and_change_no_bits(arch: int) -> None:
    table = json.loads(TABLES[arch].read_text())
    assert launch.check_tiles(table, "") == arch
    assert {t.key for t in TUNABLES} <= set(table["tiles"])
    assert table["source"] and table["date"] and table["triton"]
    assert table["gpu"] is not None or table["source"] == autotune.STATIC
    for key, buckets in table["tiles"].items():
        assert all(autotune.keeps_bits(Tile(**entry)) for entry in buckets.values()), key
        general = table["tiles"][key.split("/")[0]]
        assert set(general) <= set(buckets), f"{key} hides buckets of the more general entry"


@cache
def form_and_bytes(kind: str) -> tuple[str, float]:
    """A weight's form, and bytes that its codes take of a column of a row."""
    _, w = DECODE.operands(kind, 256, 512, 1, "cpu", None)
    codes = [w.parts[name] for name in ("weight", "codes", "high") if name in w.parts]
    return autotune.form_name(w), sum(part.nbytes for part in codes) / (256 * 512)


def operand_bytes(tunable: Tunable, kind: str, tile: Tile, arch: int) -> int:
    """Shared memory of the pipelined operands: one stage fewer than named, of wgmma one more of the activations."""
    itemsize = {"bf16": 2, "int8": 1, "f32": 4}[tunable.product]
    weight = form_and_bytes(kind)[1] * (2 if tunable.product == "f32" and kind == "dense" else 1)
    x = tile.rows * t64.COLS * itemsize
    extra = x if arch == 90 and tunable.product == "bf16" else 0
    return int((tile.stages - 1) * (weight * tile.cols * t64.COLS + x)) + extra


def served(arch: int) -> list[tuple[Tunable, str, int, Tile]]:
    """Every matmul, kind of weight and bucket with the tile that a launch on an architecture takes."""
    return [
        (t, kind, bucket, launch.tile_for(arch, t.key, form_and_bytes(kind)[0], 8192, 8192, bucket))
        for t in MATMULS
        for kind in t.kinds
        for bucket in t.buckets
    ]


def pages_served(arch: int) -> list[tuple[str, int, Tile]]:
    """Every kind of pages and bucket with the tile that a launch on an architecture takes."""
    found = []
    for kind in ATTENTION.kinds:
        q, w = ATTENTION.operands(kind, 1, 64, 1, "cpu", None)
        with kernels_on_cpu(arch):
            found += [(kind, bucket, attention.tile_of(q, w.pages.layout, bucket)) for bucket in ATTENTION.buckets]
    return found


def page_bytes(kind: str, tile: Tile) -> int:
    """Shared memory of the pages under way: a buffer for five stages' second, and one more for each two."""
    _, w = ATTENTION.operands(kind, 1, 64, 1, "cpu", None)
    layout = w.pages.layout
    keys = PAGE if layout.head_dim <= 128 else PAGE // 2
    return max(1, (tile.stages - 1) // 2) * 2 * keys * layout.head_dim * layout.dtype.itemsize


@pytest.mark.parametrize("arch", sorted({*TABLES, *OTHERS}))
def test_operands_of_every_tile_fit_into_shared_memory(arch: int) -> None:
    limit = sass.LIMITS[arch].shared_per_block
    for tunable, kind, bucket, tile in served(arch):
        assert operand_bytes(tunable, kind, tile, arch) <= limit, (tunable.key, kind, bucket, tile)
    for kind, bucket, tile in pages_served(arch):
        assert page_bytes(kind, tile) <= limit, (kind, bucket, tile)


@pytest.mark.aot
@pytest.mark.parametrize("arch", OTHERS)
def test_largest_tile_compiles_for_architectures_without_a_table(arch: int) -> None:
    """The dry run raises what the loader would where a block asks for more shared memory than there is."""
    tunable, kind, bucket, tile = max(served(arch), key=lambda case: operand_bytes(*case[:2], case[3], arch))
    main, _ = autotune.compiled(tunable, autotune.Point(kind, *tunable.shapes[0], bucket), tile, arch)
    shared = main.shared
    assert operand_bytes(tunable, kind, tile, arch) <= shared <= sass.LIMITS[arch].shared_per_block


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("arch", sorted({*TABLES, *OTHERS}))
def test_every_tile_compiles(arch: int) -> None:
    """Within shared memory, and without spills for the architecture that the table was made for."""
    for tunable, kind, bucket, tile in served(arch):
        main, _ = autotune.compiled(tunable, autotune.Point(kind, *tunable.shapes[0], bucket), tile, arch)
        case = (tunable.key, kind, bucket, tile)
        assert main.shared <= sass.LIMITS[arch].shared_per_block, case
        assert arch not in TABLES or sass.resources(main.asm["cubin"]).stack == 0, case
    for kind, bucket, tile in pages_served(arch):
        for run in (ATTENTION.run, *ATTENTION.also):
            point = autotune.Point(kind, *ATTENTION.shapes[0], bucket)
            main, _ = autotune.compiled(ATTENTION, point, tile, arch, run)
            assert main.shared <= sass.LIMITS[arch].shared_per_block, (kind, bucket, tile)
            assert arch not in TABLES or sass.resources(main.asm["cubin"]).stack == 0, (kind, bucket, tile)


# ---- autotune ----------------------------------------------------------------------------------------


def test_tiles_that_could_change_bits_are_refused_before_they_compile() -> None:
    for tile in (Tile(8, 64, 4, 3), Tile(16, 32, 4, 3), Tile(16, 64, 2, 3)):
        assert not autotune.keeps_bits(tile)
        assert autotune.examined(DECODE, "q4", 16, tile, 90) == "another MMA: bits could change"
    for tunable in TUNABLES:
        assert all(
            autotune.keeps_bits(t) for bucket in tunable.buckets for t in (*tunable.tiles(bucket), tunable.default)
        )


@pytest.mark.aot
def test_a_tile_that_overflows_shared_memory_is_refused() -> None:
    why = autotune.examined(small(), "q4", 64, Tile(64, 128, 8, 8), 86)
    assert isinstance(why, str) and "shared memory" in why


def test_the_narrowest_of_equally_fast_tiles_is_taken() -> None:
    narrow, wide, other = Tile(16, 64, 4, 5), Tile(16, 128, 8, 5), Tile(16, 64, 4, 3)
    assert autotune.ordered({wide: 10.0, narrow: 10.5, other: 10.5}, 0.1) == [narrow, other, wide]
    assert autotune.ordered({wide: 10.0, narrow: 11.5}, 0.1) == [wide, narrow]
    assert autotune.ordered({}, 0.1) == []


def test_an_entry_of_a_form_keeps_the_buckets_of_the_kernel() -> None:
    tiles = {"decode": {"16": 1, "64": 2}, "decode/w4-k/64x128": {"16": 5}, "decode/w4-k": {"64": 3}}
    autotune.fill_buckets(tiles)
    assert tiles["decode/w4-k"] == {"16": 1, "64": 3}
    assert tiles["decode/w4-k/64x128"] == {"16": 5, "64": 3}


def test_trials_survive_being_cut_short_and_those_of_other_sources_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "trials"
    made: list[str] = []

    def trial(journal: autotune.Journal, key: str) -> Trial:
        return journal.trial(key, lambda: (made.append(key), Trial(1.5, key))[1])

    first = autotune.Journal(path, "these sources")
    trial(first, "a"), trial(first, "a"), trial(first, "b")
    path.write_text(path.read_text() + '{"context": "these so')
    again = autotune.Journal(path, "these sources")
    assert trial(again, "a") == Trial(1.5, "a") and made == ["a", "b"]
    trial(autotune.Journal(path, "others"), "a")
    assert made == ["a", "b", "a"]


@pytest.mark.aot
def test_a_run_that_is_cut_short_goes_on_and_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tried = tmp_path / "mine.json", []
    examine = autotune.examined
    monkeypatch.setattr(autotune, "examined", lambda *args: (tried.append(args[3]), examine(*args))[1])

    def stop(bucket: int) -> tuple[Tile, ...]:
        if bucket > 16:
            raise KeyboardInterrupt
        return FEW

    with pytest.raises(KeyboardInterrupt):
        autotune.make_table(90, None, path, (small(stop, (16, 32)),))
    assert set(tried) == set(FEW) and not path.exists()
    assert not autotune.make_table(90, None, path, (small(lambda bucket: [Tile(16, 64, 4, 6)]),), minutes=0)
    assert not path.exists()
    tried.clear()
    assert autotune.make_table(90, None, path, (small(),))
    assert tried == []  # all from the trials kept
    table = json.loads(path.read_text())
    assert table.get("sources", {}).get("decode", table["source"]) == autotune.STATIC and table["gpu"] is None
    assert table.get("sources", {}).get("w8a8", table["source"]) == launch.tile_table(90)["source"]
    assert Tile(**table["tiles"]["decode"]["16"]) == FEW[1]  # nearest to the usual number of stages
    assert [p.name for p in tmp_path.iterdir()] == ["mine.json"]
    with launch.tiles_from(table):
        assert launch.tile_for(90, "decode", "w4-block", 64, 128, 3) == FEW[1]
        assert launch.tile_for(90, "prefill", "w4-block", 64, 128, 3)  # the rest is the package's


@pytest.mark.slow
@pytest.mark.aot
def test_attention_tiles_are_judged_as_split_and_as_whole() -> None:
    tile = Tile(16, 64, 4, 5)
    kernel = autotune.examined(ATTENTION, "bf16-128", 16, tile, 90)
    assert isinstance(kernel, Kernel) and kernel.stages == 2 and kernel.instructions > 300
    assert autotune.predicted(ATTENTION, autotune.Point("bf16-128", 32, 4096, 16), tile, kernel).us > 100
    split, fold = autotune.compiled(ATTENTION, autotune.Point("bf16-128", 2, 1100, 16), tile, 90)
    whole, nothing = autotune.compiled(ATTENTION, autotune.Point("bf16-128", 2, 1100, 16), tile, 90, ATTENTION.also[0])
    assert split.grid == (6, 8, 1) and fold == 1  # three chunks of two sequences
    assert whole.grid == (2, 8, 1) and nothing == 0


def test_form_of_pages_is_that_of_the_launcher() -> None:
    entry = {"rows": 16, "cols": 64, "warps": 4, "stages": 3}
    for kind in ATTENTION.kinds:
        q, w = ATTENTION.operands(kind, 1, 64, 1, "cpu", None)
        table = {"arch": 90, "tiles": {f"attention/{ATTENTION.form(w)}": {"16": entry}}}
        with launch.tiles_from(table), kernels_on_cpu(90):
            assert attention.tile_of(q, w.pages.layout, 1) == Tile(**entry)


def test_results_at_an_attention_tile_are_checked() -> None:
    small = replace(ATTENTION, run=ATTENTION.also[0], also=(), checked=((3, 1100), (1, 66)))
    wrong = replace(small, reference=lambda q, w: 2 * ATTENTION.reference(q, w))
    assert "against float64" in str(autotune.check_winner(wrong, "bf16-32", 16, Tile(16, 64, 4, 3), 90, gpu=False))


# ---- the model ---------------------------------------------------------------------------------------

KERNEL = Kernel(90, registers=71, shared=36864, warps=4, stages=5, blocks_per_sm=6, instructions=193.0, per_weight=1.4)


def launch_of(m: int, n: int, k: int, **changes: Any) -> Launch:
    w = harness.made_up_weight("q4", n, k, seed=None)
    return replace(autotune.described(DECODE, w, m, Tile(16, 64, 4, 5)), **changes)


def test_bytes_and_flops_are_those_of_the_formulas() -> None:
    w = harness.made_up_weight("q4", 8192, 8192, seed=None)
    assert w.nbytes == 8192 * 8192 // 2 + 4 * 8192 * 64  # nibbles, and a float32 scale for each 128
    work = launch_of(16, 8192, 8192)
    assert work.dram_bytes == w.nbytes + 2 * 16 * 8192 * 2 and work.side_bytes == 16 * 8192 * (4 * w.segments + 2)
    assert (work.programs, work.blocks) == (128 * w.segments, 64 / w.segments)
    assert work.programs * work.blocks * work.weight_block_bytes == w.nbytes


def test_a_time_is_never_less_than_any_of_its_parts() -> None:
    gpu = MODELLED[90]
    for m, n, k in ((1, 8192, 8192), (16, 4096, 4096), (16, 576, 1536), (16, 28672, 4096)):
        expected = predict(KERNEL, launch_of(m, n, k), gpu)
        assert expected.us > max(expected.parts.values()) and expected.bound in (*roofline.PARTS, "latency")
        assert expected.parts["memory"] >= launch_of(m, n, k).dram_bytes / gpu.copy_gbs / 1e3


def test_more_work_or_fewer_loads_under_way_take_longer() -> None:
    gpu, work = MODELLED[90], launch_of(16, 8192, 8192)
    base = predict(KERNEL, work, gpu).us
    assert predict(replace(KERNEL, instructions=2 * KERNEL.instructions), work, gpu).us > base
    assert predict(KERNEL, replace(work, dram_bytes=2 * work.dram_bytes), gpu).us > base
    assert predict(replace(KERNEL, stages=2), work, gpu).us > base
    assert predict(KERNEL, launch_of(16, 576, 1536), gpu).bound == "latency"
    assert bytes_in_flight(KERNEL, work, gpu) == pytest.approx(2 * 4 * work.weight_block_bytes)


def test_occupancy_limits_the_loads_under_way() -> None:
    alone = replace(KERNEL, blocks_per_sm=1)
    work = launch_of(16, 28672, 4096)
    assert bytes_in_flight(alone, work, MODELLED[90]) * 4 == bytes_in_flight(KERNEL, work, MODELLED[90])


def test_attention_bytes_and_flops_are_those_of_the_formulas() -> None:
    cases = {case.name: case for case in bench_attention.CASES}
    decode, prefill = cases[bench_attention.LLAMA], cases["prefill 2048"]
    assert bench_attention.case_bytes(decode) == 32 * 4096 * 2 * 8 * 128 * 2 + 2 * 32 * 32 * 128 * 2
    assert decode.pairs == 32 * 4096 and prefill.pairs == 2048 * 2049 // 2
    assert cases["chain of 8"].pairs == 32 * (8 * 4096 - 28)
    assert cases["cascade"].tokens == 32768 + 128 * 256
    node_pairs = 8 * 1 + 16 * 2 + 32 * 3 + 8 * 4
    assert cases["tree of 64"].pairs == 8 * (8170 * 64 + node_pairs)
    work = roofline.attention_launch(
        256, 2048, tile_rows=16, kv_heads=8, dim=128, token_bytes=4096, dram_bytes=32 * 4096 * 4096
    )
    assert (work.programs, work.blocks) == (2048, 8)
    assert work.programs * work.blocks * work.weight_block_bytes == work.dram_bytes
    folded = roofline.with_fold(work, slots=256, most=8, heads=32, dim=128)
    assert predict(KERNEL, folded, MODELLED[90]).us > predict(KERNEL, work, MODELLED[90]).us


# ---- benches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*harness.KINDS, "q4_k-glu"])
def test_made_up_weights_are_packed_as_real_ones(kind: str) -> None:
    w = harness.made_up_weight(kind, 130, 512)
    assert w.shape == (130, 512) and w.nbytes == harness.made_up_weight(kind, 130, 512, seed=None).nbytes
    if kind == "scratch":
        assert w.parts["weight"].shape == (192, 512)
        return
    tiles = 4 if kind.endswith("-glu") else 3
    assert kind == "dense" or w.parts["codes"].shape[0] == tiles
    y = matmul_ref(harness.made_up_rows(8, 512), w)
    assert y.shape == (8, 130) and 0.3 < y.std() < 4
    assert not torch.equal(y, matmul_ref(harness.made_up_rows(8, 512), harness.made_up_weight(kind, 130, 512, seed=1)))


def test_copies_of_a_weight_exceed_the_second_level_cache() -> None:
    l2 = 60 << 20
    assert harness.num_copies(8192 * 8192, l2) == harness.MIN_COPIES
    for nbytes in (8_700_000, 500_000):
        assert harness.num_copies(nbytes, l2) * nbytes >= 2 * l2
    assert harness.num_copies(10, l2) == harness.MAX_COPIES


def test_targets_stand_beside_their_cases() -> None:
    assert bench_matmul.target_of("q4", 8192, 8192, 1) == "11.5 us, 3.00x"
    assert bench_matmul.target_of("q4", 8192, 8192, 64) == "2.00x"
    assert bench_matmul.target_of("q4", 28672, 4096, 2048) == "0.75x"
    assert bench_matmul.target_of("q4", 576, 1536, 2048) is None
    assert bench_matmul.target_of("q8-row", 8192, 8192, 16) == "19.5 us"
    assert gpu_run.meets({"us": 11.0, "x cuBLAS": 3.1, "target": "11.5 us, 3.00x"})
    assert not gpu_run.meets({"us": 11.0, "x cuBLAS": 2.9, "target": "11.5 us, 3.00x"})


@pytest.mark.aot
@pytest.mark.skipif(harness.has_gpu(), reason="on a GPU the bench measures")
def test_without_a_gpu_the_bench_prints_the_model_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    arguments = ["--weights", "q4", "--shape", "4096x4096", "--rows", "1", "--json", str(path)]
    done = CliRunner().invoke(bench_matmul.app, arguments)
    assert done.exit_code == 0, done.output
    assert bench_matmul.MODEL in done.output and "4096x4096" in done.output and "4.0 us" in done.output
    row = json.loads(path.read_text())["matmul"]["rows"][0]
    assert row["source"] == bench_matmul.MODEL and row["us"] > 2.0
    assert row["flops"] == 2 * 4096 * 4096 and row["instr/weight"] < 2.1
    assert row["floor us"] == pytest.approx(row["bytes"] / 4.3e6) and row["x floor"] == row["us"] / row["floor us"] > 1


def test_attention_targets_stand_beside_their_cases() -> None:
    names = [case.name for case in bench_attention.CASES]
    assert len(set(names)) == len(names) and set(bench_attention.TARGETS) <= {*names, *bench_attention.move_bytes()}
    for n, case in enumerate(bench_attention.CASES):
        assert case.base is None or case.base in names[:n], f"{case.name} comes before its base"
    target = bench_attention.TARGETS[bench_attention.LLAMA]
    assert str(target) == "<= 149 us, >= 3600 GB/s"
    assert target.holds({"us": 149.0, "GB/s": 3600.0}) and not target.holds({"us": 149.0, "GB/s": 3599.0})
    cascade = bench_attention.TARGETS["cascade"]
    assert cascade.holds({"us": 1.0}) is None and cascade.holds({"us": 1.0, "x base": 0.12})
    nbytes = bench_attention.case_bytes(bench_attention.CASES[0])
    assert math.isclose(nbytes / 149 / 1e3, 3600, rel_tol=0.01)  # both say the same


@pytest.mark.aot
def test_without_a_gpu_the_attention_bench_prints_the_model_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = CliRunner().invoke(bench_attention.app, ["--static", "--case", "chain of 4", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert bench_attention.MODEL in done.output
    decode, chain = json.loads(path.read_text())["attention"]["rows"]  # a case brings its base along
    assert (decode["what"], chain["what"]) == (bench_attention.LLAMA, "chain of 4")
    assert chain["source"] == bench_attention.MODEL and chain["holds"] is True
    assert chain["floor us"] == pytest.approx(chain["bytes"] / 4.3e6) and chain["x floor"] > 1
    assert chain["bytes"] > decode["bytes"] and 1 < chain["x base"] == chain["us"] / decode["us"] < 1.15
    assert CliRunner().invoke(bench_attention.app, ["--case", "none"]).exit_code == 2


def test_made_up_pages_are_lists_of_the_layout() -> None:
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        pages = harness.made_up_pages([130, 200, 128], 2, 32, dtype=dtype, layers=2, shared=2, spare=3)
        assert pages.table.n.tolist() == [3, 4, 2]
        used = pages.table.ids[pages.table.ids > 0].tolist()
        assert len(set(used)) == 2 + 1 + 2 + 0 and not set(used) & set(pages.spare.tolist()) and len(pages.spare) == 3
        assert (pages.table.ids[:, :2] == pages.table.ids[0, :2]).all()
        stored = pages.layout.view(pages.arena, 1)[used].float()
        scale = pages.layout.scales(pages.arena, 1)[used][..., None] if pages.layout.scaled else 1.0
        assert (stored * scale).isfinite().all() and 0.3 < (stored * scale).std() < 3
    assert harness.num_layers(400 << 20) == 2 and harness.num_layers(1 << 30) == 1


@pytest.mark.parametrize("name", ["decode", "tree", "int8"])
def test_the_attention_bench_checks_its_cases(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"lengths": (66,), "rows": 3, "heads": 2, "kv_heads": 1, "dim": 32}
    parent, dtype = (-1, 0, 0) if name == "tree" else (), torch.int8 if name == "int8" else torch.bfloat16
    case = bench_attention.Case(name, parent=parent, dtype=dtype, **sizes)
    with interpreted(90, races=False):
        made = bench_attention.Sequences(case, "cpu", layers=2)
        made.check()
        exact = made._chosen()[1]
        monkeypatch.setattr(made, "_chosen", lambda: (exact * 1.1, exact))
        with pytest.raises(AssertionError, match="against float64"):
            made.check()


@pytest.mark.parametrize("scheme", bench_matmul.CPU_SCHEMES)
def test_the_cpu_bench_of_products_checks_its_rows(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_matmul, "last_cache_bytes", lambda: 1 << 15)
    weights = bench_matmul.CpuWeights(scheme, 64, 128)
    assert sum(w.nbytes for w in weights.ours) >= 1 << 16 and len(weights.dense) == 2
    x = harness.made_up_rows(3, 128, torch.float32)
    assert weights.check(x) <= weights.allowed
    weights.stored = replace(
        weights.stored, parts=weights.stored.parts | {"scale": 1.1 * weights.stored.parts["scale"]}
    )
    with pytest.raises(AssertionError, match="against float64"):
        weights.check(x)


@pytest.mark.parametrize("case", bench_attention.CPU_CASES, ids=lambda case: case.name)
def test_the_cpu_bench_of_attention_checks_its_cases(
    case: bench_attention.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench_attention.Sequences(case, "cpu", layers=1)
    made.check()
    actual, exact = made._chosen()
    monkeypatch.setattr(made, "_chosen", lambda: (1.0001 * actual, exact))
    with pytest.raises(AssertionError, match="against float64"):
        made.check()
    assert [call().shape for call in bench_attention._sdpa_cpu(case, 1)] == [
        (len(case.lengths), case.heads, case.rows, case.dim)
    ]


@pytest.mark.parametrize("name", [*bench_fused.CASES, *bench_fused.LOGIT_CASES])
def test_the_bench_of_row_wise_operations_checks_and_counts_them(name: str) -> None:
    case = (bench_fused.CASES | bench_fused.LOGIT_CASES)[name]
    width = 128
    inputs = case.inputs(bench_fused.Rows("cpu", torch.float32), 3, width)
    bench_fused.check(case, inputs)
    outputs = bench_fused._tensors(case.kernel(*inputs))
    assert case.nbytes(3, width, 4) == sum(t.nbytes for t in (*inputs, *outputs))
    wrong = replace(case, kernel=lambda *x: tuple(t + 1 for t in outputs))
    with pytest.raises(AssertionError, match="error"):
        bench_fused.check(wrong, inputs)
