"""csrc_triton/launch.py: where a kernel runs, how it is cut, and that no import needs a GPU or Triton."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from csrc_triton import launch
from csrc_triton.launch import (
    TILES,
    Tile,
    arch_of,
    asm_arch,
    check_tiles,
    joins_planes,
    kernels_on_cpu,
    load_tiles,
    runs_kernel,
    tile_for,
    tile_table,
    tiles_from,
    triton_dtype,
)

ROOT = Path(__file__).parent.parent
X = torch.zeros(1)


def entry(rows: int, **changes: Any) -> dict[str, Any]:
    return {"rows": rows, "cols": 64, "warps": 4, "stages": 2} | changes


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No table of a test stays behind, and none was loaded before it."""
    monkeypatch.setattr(launch, "_tables", {})
    launch._buckets.cache_clear()
    yield
    launch._buckets.cache_clear()


def load(tmp_path: Path, tiles: dict[str, Any], arch: Any = 90) -> int:
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"arch": arch, "tiles": tiles}))
    return load_tiles(path)


# ---- where a kernel runs -----------------------------------------------------------------------------


def test_cpu_tensors_take_kernels_only_where_told() -> None:
    assert not runs_kernel(X)
    with kernels_on_cpu(90):
        assert runs_kernel(X) and arch_of(X) == 90 and asm_arch(90) == 90
        with kernels_on_cpu(80, plain=True):
            assert arch_of(X) == 80 and asm_arch(80) == 0
        assert arch_of(X) == 90 and asm_arch(90) == 90
    assert not runs_kernel(X) and asm_arch(80) == 80


def test_a_failure_inside_puts_back_what_was() -> None:
    with kernels_on_cpu(90):
        with pytest.raises(KeyError), kernels_on_cpu(80, plain=True):
            raise KeyError
        assert arch_of(X) == 90 and asm_arch(90) == 90
    assert not runs_kernel(X)


def test_planes_are_joined_where_there_is_wgmma() -> None:
    assert [arch for arch in (80, 86, 89, 90, 100, 103, 120) if joins_planes(arch)] == [90, 100, 103]


def test_triton_has_the_three_floats() -> None:
    tl = pytest.importorskip("triton.language")
    types = [triton_dtype(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert types == [tl.float32, tl.float16, tl.bfloat16]


# ---- tiles -------------------------------------------------------------------------------------------


def test_the_closest_key_and_the_smallest_bucket_that_holds_the_rows(tmp_path: Path) -> None:
    tiles = {
        "decode": {"64": entry(64), "16": entry(16), "32": entry(32)},
        "decode/w4-half": {"16": entry(16, cols=128)},
        "decode/w4-half/576x1536": {"16": entry(16, cols=256), "128": entry(128, cols=256)},
    }
    assert load(tmp_path, tiles) == 90

    def chosen(fmt: str, n: int, k: int, rows: int) -> tuple[int, int]:
        tile = tile_for(90, "decode", fmt, n, k, rows)
        return tile.rows, tile.cols

    assert [chosen("w8-block", 576, 1536, rows)[0] for rows in (1, 16, 17, 32, 33, 64, 65, 5000)] == [
        *(16, 16, 32, 32, 64, 64, 64, 64)
    ]
    assert chosen("w4-half", 576, 1537, 1) == chosen("w4-half", 1536, 576, 100) == (16, 128)
    assert chosen("w4-half", 576, 1536, 16) == (16, 256)
    assert chosen("w4-half", 576, 1536, 17) == (128, 256)
    with pytest.raises(ValueError, match="tile table of sm_90 has no 'prefill'"):
        tile_for(90, "prefill", "w4-half", 576, 1536, 16)


def test_a_tile_gives_the_options_of_a_launch() -> None:
    assert Tile(16, 64, 4, 3).options == {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}


@pytest.mark.parametrize("path", sorted(TILES.glob("*.json")), ids=lambda path: path.stem)
def test_tables_of_the_package_are_sound(path: Path) -> None:
    table = json.loads(path.read_text())
    assert path.stem == f"sm_{check_tiles(table, path.name)}"
    assert table["source"]  # what produced it
    for name in ("decode", "decode-f32", "prefill", "prefill-fold", "prefill-f32", "dense", "dense-fold", "w8a8"):
        assert name in table["tiles"], f"{path.name} has no {name!r}"
        for tile in table["tiles"][name].values():
            # dot takes at least 16 tokens, a program whole row tiles of a weight
            assert tile["rows"] >= 16 and tile["cols"] % 64 == 0


def test_a_gpu_without_a_table_takes_the_nearest_older_one_and_says_so_once() -> None:
    with pytest.warns(UserWarning, match=re.escape("no tile table for sm_89: taking sm_86's; tools/autotune.py")):
        assert tile_table(89) == tile_table(86)
    with pytest.warns(UserWarning, match="no tile table for sm_100: taking sm_90's"):
        assert tile_table(100)["arch"] == 90
    # newer than sm_90, but its MMA and its shared memory are those of sm_86
    with pytest.warns(UserWarning, match="no tile table for sm_120: taking sm_86's"):
        assert tile_table(120)["arch"] == 86
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tile_for(89, "decode", "w4-half", 64, 64, 1) == tile_for(86, "decode", "w4-half", 64, 64, 1)


def test_a_table_for_a_while(tmp_path: Path) -> None:
    load(tmp_path, {"decode": {"16": entry(16, stages=7)}})
    with tiles_from({"arch": 90, "tiles": {"decode": {"16": entry(16, stages=5)}}}):
        assert tile_for(90, "decode", "dense", 1, 1, 1).stages == 5
        with (
            pytest.raises(ValueError, match="tiles_from: decode: expected"),
            tiles_from({"arch": 90, "tiles": {"decode": {}}}),
        ):
            pass
        assert tile_for(90, "decode", "dense", 1, 1, 1).stages == 5
    assert tile_for(90, "decode", "dense", 1, 1, 1).stages == 7


def test_a_loaded_table_replaces_that_of_its_architecture_alone(tmp_path: Path) -> None:
    before = tile_for(80, "decode", "dense", 1, 1, 1)
    assert load(tmp_path, {"decode": {"16": entry(16, stages=7)}}) == 90
    assert tile_for(90, "decode", "dense", 1, 1, 1).stages == 7
    assert tile_for(80, "decode", "dense", 1, 1, 1) == before
    assert load(tmp_path, {"decode": {"16": entry(16, stages=6)}}, arch=89) == 89
    assert tile_for(89, "decode", "dense", 1, 1, 1).stages == 6


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], r"expected \{'arch': int, 'tiles'"),
        ({"tiles": {}}, r"expected \{'arch': int"),
        ({"arch": "90", "tiles": {}}, r"expected \{'arch': int"),
        ({"arch": 90, "tiles": []}, r"expected \{'arch': int"),
        ({"arch": 90, "tiles": {"decode": {}}}, r"decode: expected \{row bucket: tile\}, got \{\}"),
        ({"arch": 90, "tiles": {"decode": [1]}}, "decode: expected"),
        ({"arch": 90, "tiles": {"decode": {"few": entry(16)}}}, "decode: expected .* got .*'few'"),
        ({"arch": 90, "tiles": {"decode": {"-1": entry(16)}}}, "decode: expected"),
        ({"arch": 90, "tiles": {"decode": {"16": 3}}}, "decode/16: expected rows, cols, warps and stages, got 3"),
        ({"arch": 90, "tiles": {"decode": {"16": {"rows": 16}}}}, "decode/16: expected rows, cols, warps and stages"),
        ({"arch": 90, "tiles": {"decode": {"16": entry(16, ctas=2)}}}, "decode/16: expected rows"),
        ({"arch": 90, "tiles": {"decode": {"16": entry(16, stages=0)}}}, "decode/16: expected rows"),
        ({"arch": 90, "tiles": {"decode": {"16": entry(16, warps=4.0)}}}, "decode/16: expected rows"),
        ({"arch": 90, "tiles": {"decode": {"16": entry(24)}}}, "decode/16: rows, cols and warps must be powers of two"),
        ({"arch": 90, "tiles": {"decode": {"16": entry(16, cols=96)}}}, ".*must be powers of two, got .*96"),
        ({"arch": 90, "tiles": {"decode": {"16": entry(16, warps=3)}}}, ".*must be powers of two"),
        ({"arch": 90, "tiles": {"decode": {"16": entry(8)}}}, "decode/16: expected at least 16 rows, 64 cols and 4 w"),
        ({"arch": 90, "tiles": {"decode": {"16": entry(16, cols=32)}}}, "decode/16: expected at least 16 rows, 64 c"),
        ({"arch": 90, "tiles": {"decode": {"16": entry(16, warps=2)}}}, "decode/16: expected at least 16 rows, 64 c"),
    ],
)
def test_a_bad_table_is_named_and_not_used(table: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=f"mine.json: {message}"):
        load_tiles(path)
    assert tile_table(90) == json.loads((TILES / "sm_90.json").read_text())


# ---- where a launch goes ------------------------------------------------------------------------------


def test_a_launch_goes_to_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    current, launched = [0], []

    @contextmanager
    def device(wanted: int) -> Iterator[None]:
        before, current[0] = current[0], wanted
        yield
        current[0] = before

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append((kernel, current[0], options["grid"]))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(triton.JITFunction, "run", run)

    @launch.jit
    def kernel(w, x_ptr):
        pass

    with FakeTensorMode():
        tensors = [torch.empty(2, device=name) for name in ("cuda:1", "cuda:0", "cpu")]
    for tensor in tensors:
        kernel[(3,)]((None, 1), tensor)
    assert launched == [(kernel, index, (3,)) for index in (1, 0, 0)] and current == [0]


# ---- imports -----------------------------------------------------------------------------------------

MODULES = ", ".join(f"csrc_triton.{path.stem}" for path in sorted((ROOT / "csrc_triton").glob("[a-z]*.py")))

NO_GPU_QUERY = f"""
import torch
def refuse(*args, **kwargs):
    raise AssertionError("an import asks for a GPU")
for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties",
             "get_device_name", "init", "_lazy_init", "is_bf16_supported"):
    setattr(torch.cuda, name, refuse)
from triton.runtime import driver
type(driver).active = property(refuse)
import {MODULES}
x, w = torch.ones(3, 64), csrc_triton.quant.quantize(torch.ones(64, 64), "q8", None)
assert csrc_triton.qmatmul.matmul(x, csrc_triton.t64.pack(w)).shape == (3, 64)
"""

WITHOUT_TRITON = f"""
import sys
sys.modules["triton"] = None
import torch
import {MODULES}
from csrc_triton import argmax, launch, matmul, pack, prefill_gemm, quantize, rmsnorm, swiglu_matmul, t64
torch.set_grad_enabled(False)
assert launch.triton is None and not any(name.startswith("triton.") for name in sys.modules)
gen = torch.Generator().manual_seed(0)
w, x = torch.randn(128, 64, generator=gen), torch.randn(3, 64, generator=gen)
for fmt, group in (("q8", None), ("q4", 32)):
    q = quantize(w, fmt, group)
    y = matmul(x, pack(q))
    assert torch.equal(y[1:2], matmul(x[1:2], pack(q))) and torch.equal(y, prefill_gemm(x, pack(q)))
    exact = x.double() @ csrc_triton.quant.dequantize(q).double().T
    assert (y - exact).norm() < 0.02 * exact.norm()
    assert torch.equal(t64.dequantize_t64(t64.pack_t64(q)), csrc_triton.quant.dequantize(q))
assert swiglu_matmul(x, pack(q)).shape == (3, 64)
assert rmsnorm(x, torch.ones(64), 1e-5).shape == (3, 64) and argmax(y).shape == (3,)
try:
    launch._device_arch(0)
except RuntimeError as error:
    assert "Triton, which is not installed" in str(error)
else:
    raise AssertionError("a kernel without Triton")
"""


@pytest.mark.parametrize("code", [NO_GPU_QUERY, WITHOUT_TRITON], ids=["no GPU query", "without Triton"])
def test_imports_need_no_gpu_and_the_cpu_path_no_triton(code: str) -> None:
    if code is NO_GPU_QUERY:
        pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
