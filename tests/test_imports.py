"""Who imports whom, what an import loads and costs, and that nothing reads the environment: read from the source."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import polymodel

ROOT = Path(__file__).parent.parent
ORDER = {
    "csrc_triton": """
        launch quant files importers cpu cpu_attention t64 dequant fused operands pages
        attention_plan attention_tile attention tree w8a8 qgemm qmatmul ops linear
    """,
    "polymodel": """
        errors events ledger config header gguf safetensors checkpoint chat_template tokenizer_spec tokenizer stop kv
        model prefix share pool schedule sim packing residency provisional accept proposal lookup control sample
        sequence prefill growth trials draft lane session_file session batch output engine pull console demo selfcheck
        workloads cli
    """,
    "polymodel/workloads": "report session radix batch switch exact adversary speculation simulated __init__",
}
FILES = [
    (package, name)
    for package, names in ORDER.items()
    for name in names.split()
    if not (ROOT / package / name).is_dir()
]
NO_TORCH = [
    *("errors", "events", "ledger", "pool", "schedule", "sim", "provisional"),
    *("accept", "proposal", "lookup", "control"),
]
SWITCH = "POLYMODEL"  # the one documented environment variable
HEAVY = ["torch", "triton", "tokenizers", "jinja2", "transformers", "gguf", "numpy", "rich", "typer"]


def tree_of(package: str, name: str) -> ast.Module:
    return ast.parse((ROOT / package / f"{name}.py").read_text())


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs; what only a type checker reads is left out."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from nodes(other)
            continue
        yield child
        yield from nodes(child)


def imported(tree: ast.AST) -> set[str]:
    """Modules named in imports, those inside functions too."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def lines_above(package: str, name: str) -> list[str]:
    names = ORDER[package].split()
    return names[: names.index(name)]


def test_every_file_has_its_place_in_the_order() -> None:
    for package in ORDER:
        there = {path.stem for path in (ROOT / package).glob("*.py")}
        there |= {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        assert there - {"__init__"} == set(ORDER[package].split()) - {"__init__"}


@pytest.mark.parametrize(("package", "name"), FILES, ids=lambda part: part)
def test_a_file_imports_only_from_lines_above(package: str, name: str) -> None:
    above = lines_above(package, name)
    top_package, _, part = package.partition("/")
    outer = lines_above(top_package, part) if part else above
    for module in imported(tree_of(package, name)):
        top, target, inner = [*module.split("."), "", ""][:3]
        if top == "polymodel":
            assert top_package == "polymodel", f"{name} imports {module}: kernels know nothing of polymodel"
            is_above = inner in above if part and target == part else target in outer
            assert is_above or (name == "cli" and target == ""), f"{name} imports {module}"
        elif top == "csrc_triton" and package == "csrc_triton":
            assert target in above, f"{name} imports {module}"
        assert top not in ("tests", "bench", "tools")


@pytest.mark.parametrize("name", NO_TORCH)
def test_pure_files_know_no_torch(name: str) -> None:
    seen, todo = set(), [name]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        for module in imported(tree_of("polymodel", current)):
            assert module.partition(".")[0] not in ("torch", "numpy", "triton", "csrc_triton"), f"{current}: {module}"
            if module.startswith("polymodel."):
                todo.append(module.split(".")[1])


def test_nothing_reads_the_environment_but_the_switch() -> None:
    reads = []
    for path in sorted(path for package in ORDER for path in (ROOT / package).glob("*.py")):
        for node in nodes(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                reads += [(path.name, alias.name) for alias in node.names if "env" in alias.name]
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb"):
                reads.append((path.name, node.attr))
    assert reads in ([], [("engine.py", "environ")])
    if reads:
        assert f'os.environ.get("{SWITCH}"' in (ROOT / "polymodel" / "engine.py").read_text()


def loaded_by(module: str) -> set[str]:
    code = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout))


def test_importing_polymodel_loads_nothing_heavy() -> None:
    assert not loaded_by("polymodel") & set(HEAVY)
    assert not loaded_by("csrc_triton") & set(HEAVY)


def test_what_polymodel_lists_is_what_it_gives() -> None:
    assert dir(polymodel) == sorted(polymodel.__all__)
    assert all(getattr(polymodel, name) is not None for name in polymodel.__all__)


def test_importing_the_engine_loads_what_a_forward_needs_and_no_more() -> None:
    loaded = loaded_by("polymodel.engine")
    assert "torch" in loaded
    assert not loaded & (set(HEAVY) - {"torch", "triton", "numpy"})


def test_importing_the_cli_loads_no_torch() -> None:
    assert not loaded_by("polymodel.cli") & {"torch", "triton", "tokenizers", "numpy"}


def test_import_adds_little_to_torch_and_triton() -> None:
    """A share of what torch and triton take in the same process, so that a slow machine is no failure."""
    code = (
        "import time; start = time.perf_counter(); import torch, triton.language; middle = time.perf_counter(); "
        "import polymodel.engine; print((time.perf_counter() - middle) / (middle - start))"
    )
    shares = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
        shares.append(float(done.stdout))
    assert min(shares) < 0.3


def test_import_asks_for_no_gpu() -> None:
    code = (
        "import torch; torch.cuda.is_available = torch.cuda.device_count = lambda: 1 / 0\n"
        "import polymodel.engine, csrc_triton.cpu, csrc_triton.qmatmul, csrc_triton.attention, csrc_triton.linear"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
