"""The notebooks run, and what they show is what they print.

The cells of each are run in order by a plain interpreter of its own, with warnings as errors: standard output, then the
value of a last expression as its text and as its HTML. That is what a Jupyter kernel shows of such cells, without a
kernel, its dozen packages and its sockets in the tests. So notebooks must do without magics and rich display calls. The
first one runs with the thorough tests, the others with ``-m slow``.

`MEMSIZE_GOLDEN=write pytest tests/test_notebook.py -m ""` writes the outputs into the notebooks; review the difference.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIRST = ROOT / "notebooks" / "why_didnt_it_shrink.ipynb"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WRITE = os.environ.get("MEMSIZE_GOLDEN") == "write"

Cell = dict[str, Any]


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(sources: list[str]) -> list[list[Cell]]:
    """The outputs of each cell, in the notebook's own format."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [outputs(source, number, names) for number, source in enumerate(sources, 1)]


def outputs(source: str, number: int, names: dict[str, Any]) -> list[Cell]:
    body = ast.parse(source)
    last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(body, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    found: list[Cell] = []
    if printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None:
        found.append({"data": drawn(value), "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return found


def drawn(value: Any) -> dict[str, list[str]]:
    page = {"text/html": lines(value._repr_html_())} if hasattr(value, "_repr_html_") else {}
    return page | {"text/plain": lines(repr(value).rstrip("\n"))}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path == FIRST else pytest.mark.slow, id=path.stem) for path in NOTEBOOKS],
)
def test_shows_what_it_prints(path: Path) -> None:
    notebook = read(path)
    around = f"{path.parent}{os.pathsep}{ROOT}"  # a kernel looks for modules beside the notebook
    environment = os.environ | {"PYTHONPATH": around, "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", __file__],
        input=json.dumps(["".join(cell["source"]) for cell in code_cells(notebook)]),
        cwd=path.parent,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fresh = json.loads(done.stdout)
    if WRITE:
        for number, (cell, shown) in enumerate(zip(code_cells(notebook), fresh, strict=True), 1):
            cell |= {"execution_count": number, "outputs": shown}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [cell["outputs"] for cell in code_cells(notebook)] == fresh
    assert done.stderr == ""


def test_holds_the_figures_of_the_question() -> None:
    text = json.dumps([cell["outputs"] for cell in code_cells(read(FIRST))])
    for figure in ("9223901", "35.19", "18,447,802 bytes, 17.59 MiB", "36.90 MB", "18.45 MB", "26803609"):
        assert figure in text
    assert "PyTorch 25,317,952   memsize 25,317,952" in text
    assert "PyTorch 31,103,176   memsize 31,103,176" in text


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
