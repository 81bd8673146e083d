"""The README's code runs, and its table is the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.demo_model
def test_the_examples_run(demo_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = ("The capital of France is Paris.", "Verdict(layers=24, num_layers=30, ", " ", "auto ")
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for code, beginning in zip(examples, begin, strict=True):
        exec(compile(code, "README.md", "exec"), {})
        assert capsys.readouterr().out.startswith(beginning)


def test_the_table_names_every_file_in_its_order() -> None:
    for package in ("csrc_triton", "polymodel"):
        table = re.search(rf"\| {package} \|.*?\n\n", README, re.DOTALL)
        assert table is not None
        named = re.findall(r"^\| `(\w+)\.py`", table[0], re.MULTILINE)
        assert set(named) == {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}


def test_the_tests_it_names_are_there() -> None:
    named = set(re.findall(r"test_\w+\.py", README))
    assert named and all((ROOT / "tests" / name).is_file() for name in named)
