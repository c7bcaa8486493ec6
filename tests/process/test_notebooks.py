"""What new users follow does what it says: the notebooks and the tutorial, from end to end in a real kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from process.kernel import Notebook

import taas_magic

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
#: A cell of the tutorial, and the output below it where that is shown.
STEP = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Executed:
    """A notebook after it ran; cells are known by their ids."""

    def __init__(self, notebook: NotebookNode, directory: Path) -> None:
        self.directory = directory
        self._cells = {cell["id"]: cell for cell in notebook.cells}

    def text(self, cell_id: str) -> str:
        """What a cell wrote to its streams."""
        outputs = self._cells[cell_id]["outputs"]
        return "".join(output["text"] for output in outputs if output["output_type"] == "stream")

    def of_type(self, cell_id: str, output_type: str) -> list[NotebookNode]:
        return [output for output in self._cells[cell_id]["outputs"] if output["output_type"] == output_type]

    def accuracy(self) -> float:
        """The accuracy that the cell "accuracy" states."""
        match = re.search(r"([\d.]+)% of \d+ held-out digits", self.text("accuracy"))
        assert match is not None, self.text("accuracy")
        return float(match[1]) / 100


def execute(name: str, directory: Path) -> Executed:
    """Run a notebook in ``directory``, as ``jupyter nbconvert --execute`` does: nbclient, in a process of its own.

    A cell that fails without being allowed to fails the test.
    """
    shutil.copy(NOTEBOOKS / name, directory)
    command = ["nbconvert", "--to", "notebook", "--execute", "--output", "executed", str(directory / name)]
    with tempfile.TemporaryDirectory(prefix="nb-") as private:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=directory,
            env=environment(private),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(directory / "executed.ipynb", as_version=4)
    nbformat.validate(notebook)
    return Executed(notebook, directory)


def environment(private: str) -> dict[str, str]:
    """The kernel imports the package that is under test, and keeps its own state out of the user's home."""
    package = str(Path(taas_magic.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    own = dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"), private)
    return {**os.environ, **own, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize("name", ["quickstart.ipynb", "lightning.ipynb", "data_delivery.ipynb"])
def test_no_output_has_a_path_of_who_ran_it(name: str) -> None:
    text = (NOTEBOOKS / name).read_text()
    assert not re.findall(r"(?:/(?:home|root|usr|tmp)/|site-packages)\S*", text)


def test_quickstart_trains_a_classifier(tmp_path: Path) -> None:
    executed = execute("quickstart.ipynb", tmp_path)
    assert executed.accuracy() > 0.95
    training = executed.text("train")
    assert "rank 0 of 2" in training
    assert "rank 1 of 2" not in training
    assert "torch.save('digits.pt') was left out on rank 1" in training
    assert (tmp_path / "digits.pt").is_file()
    assert "rank 1 of 2" in executed.text("logs")
    assert any("image/png" in output["data"] for output in executed.of_type("curve", "display_data"))
    (error,) = executed.of_type("error", "error")
    assert error["ename"] == "ValueError"
    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["traceback"]))
    assert "[rank 1] of 2 failed" in shown
    assert 'raise ValueError("this rank has had enough")' in shown
    assert "taas_magic" not in shown
    (attempts,) = executed.of_type("attempts", "execute_result")
    assert attempts["data"]["text/plain"] == "1"


def test_lightning_notebook_trains_a_classifier(tmp_path: Path) -> None:
    executed = execute("lightning.ipynb", tmp_path)
    assert executed.accuracy() > 0.95
    assert "epoch 4: accuracy" in executed.text("fit")
    assert "4 epochs" in executed.text("after-fit")
    # The second fit went on where the first had stopped.
    assert "epoch 5: accuracy" in executed.text("more")
    assert "epoch 1: accuracy" not in executed.text("more")
    assert len(list((tmp_path / "checkpoints").glob("*.ckpt"))) == 1


def test_data_delivery_notebook_shows_the_wait_before_and_after(tmp_path: Path) -> None:
    executed = execute("data_delivery.ipynb", tmp_path)
    before, after = (float(re.findall(r"waited ([\d.]+) s", executed.text(cell))[0]) for cell in ("before", "after"))
    assert after < before / 2
    assert "preparing data" in executed.text("after")
    assert any("image/png" in output["data"] for output in executed.of_type("plot", "display_data"))
    # Both ranks took 25 of the 50 batches.
    (units,) = executed.of_type("units", "execute_result")
    assert units["data"]["text/plain"] == "25"
    assert "the units are used up: 50 of 50" in executed.text("units")


def test_each_step_of_the_tutorial_works(tmp_path: Path) -> None:
    steps = STEP.findall((ROOT / "docs/tutorial.md").read_text())
    assert len(steps) > 8
    with Notebook(tmp_path) as notebook:
        for source, expected in steps:
            cell = notebook.run(source, timeout=120)
            if "raise ValueError" in source:
                assert (cell.error_name, cell.error_value) == ("ValueError", "not me")
                continue
            cell.ok()
            # Whether it rehearses depends on the machine.
            shown = [line for line in expected.splitlines() if not line.startswith("taas: no GPU here")]
            assert all(line in cell.output for line in shown)
        # The last cell of them that prints states how well the model does.
        assert notebook.run("accuracy > 0.88").ok().result == "True"
    assert (tmp_path / "digits.pt").is_file()
