"""Executes the notebooks of this folder, each in a fresh kernel of the Python that runs this.

    pip install '.[notebooks]' && polymodel pull smollm2
    python tools/notebooks/run.py [NAME ...] [--write]

Reports the seconds of each; exit status 1 if a cell fails, a notebook shows nothing, or a truth value in its outputs is
not the stored one. With --write the outputs are stored in the notebooks, without the metadata of cells and kernel, so
that a later run differs where the outputs do. Where other work runs beside it, say OMP_WAIT_POLICY=PASSIVE, or threads
that wait by spinning take several times as long.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import nbformat
import typer
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parent
TIMEOUT = 120  # seconds a cell
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class ThisPython(AsyncKernelManager):
    """Whatever kernel a notebook names, it gets the running interpreter, not one that is installed elsewhere."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def notebooks() -> list[Path]:
    """All of them, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def execute(path: Path) -> tuple[NotebookNode, float]:
    """A notebook with new outputs, and the seconds it took; CellExecutionError where a cell fails."""
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with TemporaryDirectory() as sockets:
        client = NotebookClient(
            notebook,
            kernel_manager_class=ThisPython,
            config=Config({"ThisPython": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
            timeout=TIMEOUT,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(FOLDER)}},
        )
        start = time.perf_counter()
        client.execute()
        seconds = time.perf_counter() - start
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    nbformat.validate(notebook)
    return notebook, seconds


def problems(notebook: NotebookNode) -> list[str]:
    """What keeps a notebook from being read without running it."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs: list[dict[str, Any]] = [output for cell in cells for output in cell.outputs]
    found = [f"a cell ended with {o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("the cells were not executed in order in a fresh kernel")
    if not outputs:
        found.append("there are no outputs")
    if not any("image/png" in output.get("data", {}) for output in outputs):
        found.append("there is no picture")
    return found


def truths(notebook: NotebookNode) -> list[list[str]]:
    """The truth values that the text of each code cell's outputs shows."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
            found.append(re.findall(r"\b(?:True|False|yes|no)\b", "\n".join(texts)))
    return found


def broken(stored: NotebookNode, executed: NotebookNode) -> list[str]:
    """Code cells whose truth values are others than the stored ones."""
    pairs = enumerate(zip(truths(stored), truths(executed), strict=True), 1)
    return [f"code cell {i} shows {' '.join(now)}, stored {' '.join(old)}" for i, (old, now) in pairs if old != now]


def chosen(names: list[str]) -> list[Path]:
    """Notebooks by stem, or by its number; all if none is named."""
    known = {path.stem: path for path in notebooks()}
    found = []
    for name in names:
        matching = [path for stem, path in known.items() if name.removesuffix(".ipynb") in (stem, stem.split("_")[0])]
        if not matching:
            raise typer.BadParameter(f"{name!r}: no such notebook; there are {', '.join(known)}")
        found += matching
    return found or list(known.values())


def main(
    names: Annotated[list[str] | None, typer.Argument(help="stems or numbers, such as 01; default: all")] = None,
    write: Annotated[bool, typer.Option("--write", help="store the outputs in the notebooks")] = False,
) -> None:
    """Execute notebooks and report their seconds."""
    is_good = True
    for path in chosen(names or []):
        print(f"{path.name} ...", end=" ", flush=True, file=sys.stderr)
        try:
            notebook, seconds = execute(path)
            wrong = problems(notebook) + ([] if write else broken(read(path), notebook))
        except CellExecutionError as error:
            wrong, seconds = [f"a cell ended with {error.ename}: {error.evalue}"], float("nan")
        except (CellTimeoutError, DeadKernelError) as error:
            wrong, seconds = [str(error)], float("nan")
        print(f"{seconds:.1f} s", *wrong, sep="\n  " if wrong else "", file=sys.stderr)
        is_good &= not wrong
        if write and not wrong:
            nbformat.write(notebook, path)
    raise typer.Exit(code=int(not is_good))


if __name__ == "__main__":
    typer.run(main)
