"""Bytes and operations declared beside the kernels, and the floors of kernels and steps that follow from them."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import roofline
import torch
from roofline import GPUS, STEP_PARTS, decoder, prefill_floor, step_floor
from typer.testing import CliRunner

import csrc_triton
from csrc_triton import attention, fused, pages, qgemm, qmatmul, quant, t64, tree, w8a8
from csrc_triton.pages import KVLayout
from polymodel.checkpoint import open_checkpoint
from polymodel.packing import plan_weights

SOURCES = sorted(Path(csrc_triton.__file__).parent.glob("*.py"))
# launchers whose bytes are another's: the same product, whichever kernel computes it
SAME = dict.fromkeys(("dequant_matmul", "decode", "matmul", "prefill_gemm", "prefill"), "matmul_bytes")
SAME |= {"paged_attention": "attention_bytes"}


# ---- declared beside the kernels ---------------------------------------------------------------------


def launchers(path: Path) -> set[str]:
    """Public functions of a file that launch a kernel, themselves or by the file's other functions."""
    functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    functions = {name: node for name, node in functions.items() if not name.endswith("_kernel")}
    calls = {
        name: {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in functions}
        for name, node in functions.items()
    }
    found = {
        name
        for name, node in functions.items()
        for n in ast.walk(node)
        if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name) and n.value.id.endswith("_kernel")
    }
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return {name for name in found if not name.startswith("_")}


def test_every_launcher_declares_its_bytes_in_its_file() -> None:
    found = {(path.stem, name) for path in SOURCES for name in launchers(path)}
    assert {"dequant_matmul", "w8a8_matmul", "rmsnorm", "top_k", "append_kv", "commit_path"} <= {n for _, n in found}
    for stem, name in found:
        home = qmatmul if (named := SAME.get(name)) == "matmul_bytes" else getattr(csrc_triton, stem, None)
        home = home or __import__(f"csrc_triton.{stem}", fromlist=[stem])
        declared = getattr(home, named or f"{name}_bytes", None)
        assert declared is not None and declared.__doc__, f"{stem}.{name} declares no bytes"


def test_what_launchers_declare_is_exported_with_them() -> None:
    for name in csrc_triton.__all__:
        if (declared := f"{name}_bytes") in vars(fused) | vars(pages) | vars(tree) | vars(w8a8) | vars(qmatmul):
            assert declared in csrc_triton.__all__


def test_bytes_of_row_wise_kernels_are_those_of_their_operands() -> None:
    x, weight = torch.randn(6, 128), torch.randn(128)
    size = x.element_size()

    def moved(*tensors: torch.Tensor) -> int:
        return sum(t.nbytes for t in tensors)

    assert fused.rmsnorm_bytes(6, 128, size) == moved(x, weight, fused.rmsnorm(x, weight, 1e-5))
    assert fused.add_rmsnorm_bytes(6, 128, size) == moved(x, x, weight, *fused.add_rmsnorm(x, x, weight, 1e-5))
    assert fused.quantize_rows_bytes(6, 128, size) == moved(x, *fused.quantize_rows(x))
    expected = moved(x, weight, *fused.rmsnorm_quantize(x, weight, 1e-5))
    assert fused.rmsnorm_quantize_bytes(6, 128, size) == expected
    assert fused.swiglu_bytes(6, 64, size) == moved(x, fused.swiglu(x))
    assert fused.argmax_bytes(6, 128) == moved(x, fused.argmax(x))
    assert fused.top_k_bytes(6, 128, 5) == moved(x, *fused.top_k(x, 5))


def test_bytes_and_operations_of_products() -> None:
    assert qmatmul.matmul_flops(3, 5, 7) == 210
    assert qmatmul.matmul_bytes(3, 5, 7, 1000) == 1000 + 2 * 21 + 2 * 15
    assert qmatmul.matmul_bytes(3, 5, 7, 1000, 1, 4) == 1000 + 21 + 60
    assert qmatmul.fold_bytes(2, 10, 3) == 20 * 14
    assert qmatmul.matmul_rmsnorm_bytes(3, 5, 7, 1000) == 1000 + 2 * (3 * 7 + 3 * 3 * 5 + 5)
    assert qmatmul.swiglu_matmul_bytes(3, 5, 7, 1000) == 1000 + 2 * 21 + 2 * 15
    assert qmatmul.lm_head_argmax_bytes(3, 7, 1000) == 1000 + 2 * 21 + 8 * 3
    assert w8a8.w8a8_matmul_bytes(3, 5, 7, 1000) == 1000 + 3 * (7 + 4) + 2 * 15
    w = t64.pack_t64(quant.quantize(torch.randn(130, 256), "q4"))
    assert qgemm.written_out_bytes(130, 256, w.nbytes) == w.nbytes + 192 * 256 * 2


def test_bytes_and_operations_of_attention_and_pages() -> None:
    assert attention.visible_pairs(10, 1) == 10 and attention.visible_pairs(4, 4) == 1 + 2 + 3 + 4
    assert attention.visible_pairs(10, 4, window=8) == 4 * 8 - 1  # the first of them stands at 6 and sees 7
    assert attention.attention_flops(3, 5, 7) == 4 * 3 * 5 * 7
    assert attention.attention_bytes(100, 4096, 2, 32, 128) == 100 * 4096 + 2 * 2 * 32 * 128 * 2
    made = tree.token_tree([-1, 0, 0, 2], num_stored=1)
    assert tree.tree_pairs(100, made) == 3 * 100 + 2 + 2 + 3
    assert tree.tree_attention_bytes(100, 4, 4096, 3, 32, 128) == 104 * 4096 + 2 * 3 * 32 * 128 * 2
    plain, coded = (KVLayout(4, 8, 128, dtype) for dtype in (torch.bfloat16, torch.int8))
    assert plain.token_bytes == 2 * 8 * 128 * 2 and coded.token_bytes == 2 * 8 * (128 + 4)
    assert pages.append_kv_bytes(coded, 3) == 3 * (2 * 8 * 128 * 2 + 2 * 8 * 132)
    assert pages.copy_pages_bytes(plain, 2) == 2 * 2 * 64 * 4 * plain.token_bytes
    assert pages.commit_path_bytes(plain, 5) == 2 * 5 * 4 * plain.token_bytes


# ---- floors ------------------------------------------------------------------------------------------


def test_a_floor_is_the_slower_of_memory_and_products() -> None:
    gpu = GPUS["H200 SXM"]
    assert roofline.floor(4_300_000, 0, gpu) == roofline.Floor(1.0, "memory", 4_300_000, 0)
    assert roofline.floor(1000, 788_000_000, gpu).us == pytest.approx(1.0)
    assert roofline.floor(1000, 788_000_000, gpu).bound == "mma"
    assert roofline.floor(1000, 788_000_000, gpu, "int8").us == pytest.approx(788 / 1500)


def test_a_step_of_8b_in_q4_is_what_a_pencil_gives() -> None:
    layers, copy, launch = 36, 4.3e6, 1.2  # bytes and microseconds of an H200
    found = step_floor("8B", "q4", "H200 SXM", 1, 4096)
    bits = 0.5 + 4 / 128  # bytes of a weight: a nibble, and a float32 scale for each 128
    expected = {
        "qkv": layers * (6144 * 4096 * bits + 2 * 4096 + 2 * 6144) / copy,
        "o": layers * (4096 * 4096 * bits + 2 * 4096 * 2) / copy,
        "gate_up": layers * (24576 * 4096 * bits + 2 * 4096 + 2 * 12288) / copy,
        "down": layers * (4096 * 12288 * bits + 2 * 12288 + 2 * 4096) / copy,
        # keys and values of 4096 tokens; q and the result; a token read and stored
        "attention": layers * (4096 * 4096 + 2 * 4096 * 2 + 2 * 4096) / copy,
        "norms": (73 * 3 * 4096 * 2 + layers * (2 * 32 + 1 + 2 * 8 + 1) * 128 * 2) / copy,
        # eight bits a weight and a float32 scale a row; float32 logits written, and read again for the largest
        "head": (151936 * 4100 + 2 * 4096 + 4 * 151936 + 4 * 151936 + 8) / copy,
        # embedding, norm; qkv, o, down, norms of q and k by two, gate and up, append, attention; head, argmax by two
        "launches": (2 + layers * 11 + 3) * launch,
    }
    assert found.parts == pytest.approx(expected)
    assert found.us == pytest.approx(sum(expected.values())) and found.bound == "weights"
    assert found.tokens_per_second == pytest.approx(1e6 / found.us)
    weights = decoder("8B", "q4").weight_bytes
    assert weights == layers * 192_937_984 * bits + 151936 * 4100
    assert found.shares["weights"] == pytest.approx(weights / copy)
    assert found.shares["kv"] == pytest.approx(layers * 4096 * 4096 / copy)


def test_attention_of_many_rows_is_counted_at_the_rate_of_any_product() -> None:
    h200, slow = GPUS["H200 SXM"], replace(GPUS["H200 SXM"], tflops={**GPUS["H200 SXM"].tflops, "bf16 by warp": 1.0})
    found = prefill_floor("8B", "q4", h200, 1024, chunk=1024)
    assert found == prefill_floor("8B", "q4", slow, 1024, chunk=1024)
    append = 36 * pages.append_kv_bytes(KVLayout(1, 8, 128, torch.bfloat16), 1024) / 4.3e6
    assert found.parts["attention"] == pytest.approx(append + 36 * 4 * 32 * 128 * (1024 * 1025 // 2) / 788e6)


def test_a_step_whose_weights_keys_and_values_exceed_the_memory_does_not_fit() -> None:
    assert not step_floor("70B", "bf16", "H100 SXM", 1, 64).fits and step_floor("70B", "q4", "H100 SXM", 1, 64).fits
    made = decoder("8B", "q4")
    tokens = (GPUS["L4"].memory_bytes - made.weight_bytes) // made.token_bytes
    assert [step_floor(made, "q4", "L4", 1, tokens + more).fits for more in (0, 1)] == [True, False]
    assert not step_floor(made, "q4", "L4", 1, tokens, drafts=1).fits
    assert [prefill_floor(made, "q4", "L4", tokens + more, chunk=tokens + 1).fits for more in (0, 1)] == [True, False]
    code, text = run("--model", "8B", "--gpu", "L4", "--batch", "1", "64", "--json")
    content = json.loads(text)
    assert code == 0 and [row["fits"] for row in content["rows"]] == [True, False] and content["prefill"]["fits"]
    rows = [line for line in run("--model", "8B", "--gpu", "L4", "1", "64")[1].splitlines() if line.startswith("│")]
    assert [roofline.DOES_NOT_FIT in row for row in rows] == [False, True]
    assert "ms, does not fit" in run("--model", "70B", "--gpu", "L4", "1")[1]


@pytest.mark.parametrize("floor", [partial(step_floor, batch=1, context=64), partial(prefill_floor, tokens=64)])
def test_weights_other_than_those_a_decoder_was_made_with_are_refused(floor: Any) -> None:
    made = decoder("0.6B", "q8")
    assert floor(made, "q8", gpu="L4") == floor("0.6B", "q8", gpu="L4")
    with pytest.raises(ValueError, match=r"weights 'q4': the decoder of 0\.6B was made with 'q8'"):
        floor(made, "q4", gpu="L4")


@pytest.mark.parametrize("weights", roofline.FORMATS)
@pytest.mark.parametrize("model", roofline.MODELS)
def test_parts_and_shares_add_up_to_the_step(model: str, weights: str) -> None:
    found = step_floor(model, weights, "A100 SXM 80 GB", 8, 1000, drafts=3)
    assert tuple(found.parts) == STEP_PARTS and all(us > 0 for us in found.parts.values())
    assert sum(found.parts.values()) == pytest.approx(sum(found.shares.values())) == pytest.approx(found.us)
    assert found.num_launches * 1.3 == pytest.approx(found.parts["launches"]) and found.tokens == 32


def test_a_floor_grows_with_batch_context_drafts_and_bits() -> None:
    for axis in ("batch", "context", "drafts"):
        counts = {"batch": 1, "context": 64, "drafts": 0}
        steps = [step_floor("4B", "q4", "L4", **(counts | {axis: n})) for n in (1, 2, 8, 64, 65, 256, 1024)]
        assert all(a.us - a.parts["launches"] < b.us - b.parts["launches"] for a, b in pairwise(steps)), axis
    formats = [step_floor("4B", weights, "L4", 1, 64).us for weights in ("q4", "q8", "bf16")]
    assert formats == sorted(formats)
    assert step_floor("4B", "q4", "H200 SXM", 1, 64).us < step_floor("4B", "q4", "H100 SXM", 1, 64).us


def test_keys_and_values_are_read_once_a_sequence_and_weights_once() -> None:
    one, many = (step_floor("70B", "q4", "H200 SXM", batch, 8192) for batch in (1, 16))
    token = 80 * 2 * 8 * 128 * 2
    assert decoder("70B").token_bytes == token
    assert one.shares["kv"] == pytest.approx(8192 * token / 4.3e6)
    assert many.shares["kv"] == pytest.approx(16 * one.shares["kv"])
    assert many.shares["weights"] == pytest.approx(one.shares["weights"])


def test_what_bounds_a_step_follows_batch_and_context() -> None:
    bounds = [step_floor("8B", "q4", "H200 SXM", *counts).bound for counts in ((1, 512), (64, 8192), (1024, 16))]
    assert bounds == ["weights", "kv", "mma"]
    assert step_floor("0.6B", "q4", "H200 SXM", 1, 64).bound == "launches"


def test_a_prompt_is_bound_by_products_and_a_chunk_of_one_is_a_step() -> None:
    found = prefill_floor("8B", "bf16", "H200 SXM", 4096)
    params = 36 * 192_937_984
    flops = 2 * 4096 * params + 2 * 151936 * 4096 + 36 * 4 * 32 * 128 * (4096 * 4097 // 2)
    assert found.flops == flops and found.bound == "mma" and found.tokens == 4096
    assert found.us > flops / 788e6
    assert prefill_floor("8B", "q4", "L4", 1).us == pytest.approx(step_floor("8B", "q4", "L4", 1, 1).us)
    small, large = (prefill_floor("8B", "q4", "L4", 1024, chunk=chunk).us for chunk in (64, 1024))
    assert small > large


@pytest.mark.demo_model
@pytest.mark.parametrize("weights", ["file", "q4", "w8a8"])
def test_a_checkpoints_weights_are_those_of_its_plan(demo_model_path: Path, weights: str) -> None:
    with open_checkpoint(demo_model_path) as checkpoint:
        plan = plan_weights(checkpoint, weights, 64, "cuda")
    made = decoder(str(demo_model_path), weights)
    assert made.weight_bytes == sum(matrix.nbytes for matrix in plan.matrices.values())
    assert len(made.layers) == 30 and made.token_bytes == 30 * 2 * 3 * 64 * 2
    found = step_floor(made, weights, "H200 SXM", 1, 64)
    assert found.shares["weights"] == pytest.approx(made.weight_bytes / 4.3e6)


# ---- the command -------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(roofline.app, arguments)
    return done.exit_code, done.output


def test_the_command_prints_a_row_for_each_batch() -> None:
    code, text = run("--model", "8B", "--gpu", "H200 SXM", "--batch", "1", "8", "64", "--context", "4096")
    assert code == 0 and roofline.FLOOR in text
    assert all(part in text for part in (*STEP_PARTS, "step ms", "tokens/s", "bound", "prefill of 4096 tokens"))
    rows = [line.split()[1] for line in text.splitlines() if line.startswith("│")]
    assert rows == ["1", "8", "64"]


def test_the_command_gives_json_of_the_same_floors() -> None:
    code, text = run("--model", "0.6B", "--weights", "w8a8", "--gpu", "L4", "--batch", "2", "--draft", "4", "--json")
    content = json.loads(text)
    plain, verify = content["rows"]
    assert code == 0 and content["source"] == roofline.FLOOR
    assert (plain["drafts"], verify["drafts"]) == (0, 4)
    expected = step_floor("0.6B", "w8a8", "L4", 2, 4096, drafts=4)
    assert math.isclose(verify["step ms"], expected.us / 1e3) and verify["parts us"] == pytest.approx(expected.parts)
    assert content["prefill"]["tokens/s"] == pytest.approx(prefill_floor("0.6B", "w8a8", "L4", 4096).tokens_per_second)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "9B"], "'9B' is no file"),
        (["--model", "9B"], "0.6B, 1.7B, 4B, 8B"),
        (["--gpu", "TPU"], "H200 SXM, H100 SXM"),
        (["--weights", "q3"], "q4, q8, w8a8, bf16"),
        (["--batch", "0"], "batch is 0, expected at least 1"),
        (["--context", "0"], "context is 0"),
        (["--draft", "-1"], "drafts is -1, expected at least 0"),
    ],
)
def test_the_command_refuses_in_one_line_that_names_the_choices(arguments: list[str], named: str) -> None:
    code, text = run(*arguments)
    assert code == 2 and named in text.splitlines()[-1]
