"""What the notebook has imported is imported once for all ranks, and a cell that needs it waits for that."""

from __future__ import annotations

from pathlib import Path

from process.kernel import ranks, value, warm_notebook

#: Slow to import, and an import of the cell itself.
CELL = """
import sys
was_there = "sklearn.linear_model" in sys.modules
import sklearn.linear_model
"""


def test_a_cell_waits_for_an_import_that_has_just_begun(tmp_path: Path, private_temp: Path) -> None:
    with warm_notebook(tmp_path) as notebook:
        notebook.run("import sklearn.linear_model\nfrom sklearn.linear_model import LogisticRegression").ok()
        cell = ranks(notebook, CELL)
        assert value(notebook, "was_there") == "True", cell.output


def test_a_cell_that_needs_none_of_it_does_not_wait(tmp_path: Path, private_temp: Path) -> None:
    with warm_notebook(tmp_path) as notebook:
        notebook.run("import sklearn.linear_model as lm").ok()
        cell = ranks(notebook, "import sys\nwas_there = 'sklearn.linear_model' in sys.modules\nplain = 1").ok()
        assert "importing" not in cell.stderr
        assert value(notebook, "plain") == "1"
