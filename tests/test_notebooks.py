"""The notebooks can be read as they are stored, and their cells run."""

from __future__ import annotations

import base64
import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parent.parent / "tools" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_SECONDS = 60
MOST_PICTURE = 60 << 10  # bytes


def load(name: str) -> ModuleType:
    """A module of the notebooks' folder, whose names are too common for the path."""
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run, pictures = load("run"), load("pictures")
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def notebook(folder: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    path = folder / "some.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def pngs(path: Path) -> Iterator[bytes]:
    for cell in run.read(path).cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                yield base64.b64decode(output["data"]["image/png"])


def test_the_notebooks_are_numbered_from_1() -> None:
    assert [int(path.stem.split("_")[0]) for path in NOTEBOOKS] == list(range(1, len(NOTEBOOKS) + 1))


@each
def test_a_stored_notebook_shows_everything_without_running(path: Path) -> None:
    stored = run.read(path)
    assert run.problems(stored) == []
    assert stored.cells[0].cell_type == "markdown" and stored.cells[0].source.startswith("# ")
    assert stored.metadata == run.METADATA and all(not cell.metadata for cell in stored.cells)
    assert all(len(png) <= MOST_PICTURE for png in pngs(path))


@each
@pytest.mark.demo_model
def test_a_notebook_runs(path: Path, demo_model_path: Path) -> None:
    executed, seconds = run.execute(path)
    assert run.problems(executed) == []
    assert run.broken(run.read(path), executed) == []
    assert seconds < MOST_SECONDS


def test_a_notebook_runs_in_this_python_and_in_its_folder(tmp_path: Path) -> None:
    executed, _ = run.execute(
        notebook(tmp_path, "import os, sys\nprint(sys.executable, flush=True)\nprint(os.getcwd())")
    )
    (output,) = executed.cells[0].outputs
    assert output.text.split() == [sys.executable, str(FOLDER)]
    assert run.problems(executed) == ["there is no picture"]


def test_a_cell_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run.execute(notebook(tmp_path, "1 / 0"))


def test_what_was_not_run_or_failed_or_shows_nothing_is_a_problem(tmp_path: Path) -> None:
    fresh = run.read(notebook(tmp_path, "1"))
    missing = ["there are no outputs", "there is no picture"]
    assert run.problems(fresh) == ["the cells were not executed in order in a fresh kernel", *missing]
    (cell,) = fresh.cells
    cell.execution_count = 1
    assert run.problems(fresh) == missing
    cell.outputs = [nbformat.v4.new_output("error", ename="KeyError", evalue="'a'", traceback=[])]
    assert run.problems(fresh) == ["a cell ended with KeyError: 'a'", "there is no picture"]
    cell.outputs = [nbformat.v4.new_output("display_data", data={"image/png": "AAAA"})]
    assert run.problems(fresh) == []


def test_a_truth_value_that_is_not_the_stored_one_is_a_broken_promise(tmp_path: Path) -> None:
    path = notebook(tmp_path, "print('same bits:', 1 == 1, flush=True)", "{'kept': 2 > 1, 'ms': 3.5}")
    executed, _ = run.execute(path)
    assert run.truths(executed) == [["True"], ["True"]] and run.broken(executed, executed) == []
    stored = copy.deepcopy(executed)
    stored.cells[1].outputs[0].data["text/plain"] = "{'kept': False, 'ms': 9.9}"
    assert run.broken(stored, executed) == ["code cell 2 shows True, stored False"]
    stored.cells[1].outputs[0].data["text/plain"] = "{'kept': True, 'ms': 9.9}"
    assert run.broken(stored, executed) == []
    stored.cells[0].outputs = []
    assert run.broken(stored, executed) == ["code cell 1 shows True, stored "]


def test_a_token_belongs_to_the_drafters_that_had_it_and_else_to_the_model() -> None:
    """A prefill's token; two of a and one of b stand and one draft goes; nobody drafts; all three of a are wrong."""
    marks = [(0, {}), *[(1, {"a": 2, "b": 1})] * 3, (1, {"a": 2, "b": 1}), (4, {"a": 2, "b": 1})]
    pieces = pictures.attribute("uvwxyz", marks)
    assert [piece.by for piece in pieces] == [(), ("a", "b"), ("a",), (), (), ()]
    assert [piece.num_dropped for piece in pieces] == [0, 0, 0, 1, 0, 3]
    assert "".join(piece.text for piece in pieces) == "uvwxyz"


def test_a_table_is_text_and_html() -> None:
    table = pictures.Table([{"name": "a<b", "seconds": 1.23456}, {"name": "c", "seconds": 2}])
    assert repr(table) == "name  seconds\na<b   1.23\nc     2"
    assert "<td>a&lt;b</td><td>1.23</td>" in table._repr_html_()


def test_a_picture_is_a_small_png() -> None:
    picture = pictures.stacked("Bytes", [("now", {"a": 1.0, "b": 2.0})], "MiB", [4.0])
    assert repr(picture) == "<picture: Bytes>"
    png = picture._repr_png_()
    assert png.startswith(b"\x89PNG") and len(png) < MOST_PICTURE
    assert png == picture._repr_png_()
