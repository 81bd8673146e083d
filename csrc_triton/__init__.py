"""Kernels for quantised matmul and paged attention whose bits do not depend on the batch they run in.

Import from the files (`from csrc_triton.qmatmul import dequant_matmul`) or from here; nothing is loaded
before a name is asked for, and nothing asks for a GPU. `x_bytes` and `x_flops` beside a launcher `x` are, for
rooflines, a call's operands and results, each counted once, and its operations; `matmul_bytes` and `matmul_flops` are
those of every product by a quantised weight.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "QTensor": "quant",
    "quantize": "quant",
    "dequantize": "quant",
    "from_gguf": "quant",
    "take_rows": "quant",
    "save_qtensors": "files",
    "load_qtensors": "files",
    "from_awq": "importers",
    "from_gptq": "importers",
    "load_awq_layer": "importers",
    "load_gptq_layer": "importers",
    "load_tiles": "launch",
    "pack": "t64",
    "pack_gate_up": "t64",
    "dequant_matmul": "qmatmul",
    "matmul": "qmatmul",
    "swiglu_matmul": "qmatmul",
    "lm_head_argmax": "qmatmul",
    "matmul_rmsnorm": "qmatmul",
    "matmul_workspace_nbytes": "qmatmul",
    "w8a8_matmul": "w8a8",
    "add_rmsnorm": "fused",
    "quantize_rows": "fused",
    "rmsnorm_quantize": "fused",
    "top_k": "fused",
    "QLinear": "linear",
    "quantize_module": "linear",
    "prefill_gemm": "qgemm",
    "PageTable": "attention",
    "page_table": "attention",
    "paged_attention": "attention",
    "attention_workspace_nbytes": "attention",
    "Workspace": "cpu_attention",
    "Tree": "tree",
    "TreeError": "tree",
    "token_tree": "tree",
    "rotation_slots": "tree",
    "tree_attention": "tree",
    "tree_attention_workspace_nbytes": "tree",
    "KVLayout": "pages",
    "append_kv": "pages",
    "copy_pages": "pages",
    "commit_path": "pages",
    "RopeTable": "fused",
    "rope_table": "fused",
    "rmsnorm": "fused",
    "swiglu": "fused",
    "argmax": "fused",
    "matmul_bytes": "qmatmul",
    "matmul_flops": "qmatmul",
    "matmul_rmsnorm_bytes": "qmatmul",
    "swiglu_matmul_bytes": "qmatmul",
    "lm_head_argmax_bytes": "qmatmul",
    "w8a8_matmul_bytes": "w8a8",
    "attention_bytes": "attention",
    "attention_flops": "attention",
    "visible_pairs": "attention",
    "tree_attention_bytes": "tree",
    "tree_pairs": "tree",
    "append_kv_bytes": "pages",
    "copy_pages_bytes": "pages",
    "commit_path_bytes": "pages",
    "rmsnorm_bytes": "fused",
    "add_rmsnorm_bytes": "fused",
    "quantize_rows_bytes": "fused",
    "rmsnorm_quantize_bytes": "fused",
    "swiglu_bytes": "fused",
    "argmax_bytes": "fused",
    "top_k_bytes": "fused",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"csrc_triton.{_HOME[name]}"), name)
    raise AttributeError(f"module 'csrc_triton' has no attribute {name!r}")
