"""Runs that go on without the notebook: taken up again by another kernel, left again, and stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import leaks
import pytest
from process.kernel import Notebook, value

pytestmark = pytest.mark.module_leak_check

GONE_S = 30.0


@pytest.fixture(autouse=True)
def nothing_left(private_temp: Path, started_once: None) -> Iterator[None]:
    """The leak check of a test here, whose processes have more time: those that nobody waits for end by and by."""
    before = leaks.Snapshot.take()
    yield
    left = leaks.wait_until_gone(before, deadline_s=GONE_S)
    assert not left, "\n".join(left)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "home"
    home.mkdir()
    names = {"XDG_CONFIG_HOME": "config", "XDG_CACHE_HOME": "cache", "XDG_STATE_HOME": "state"}
    return {"HOME": str(home), **{name: str(home / directory) for name, directory in names.items()}}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    return directory


def leave(notebook: Notebook, source: str, num_ranks: int = 2) -> str:
    """Start a run and leave it; returns its id."""
    cell = notebook.run(f"#pragma taas --gpus {num_ranks} --detach\n{source}").ok()
    found = re.search(r"run (\S+) goes on without this notebook", cell.stderr)
    assert found, cell.output
    return found[1]


TRAIN = """
import os, time
for step in range(3):
    print("step", step, flush=True)
    time.sleep(0.5)
model.weight.data.fill_(3.0)
box["loss"] = [0.5, 0.25]
report = "by rank " + os.environ["RANK"]
if os.environ["RANK"] == "0":
    with open("made.txt", "w") as file:
        file.write("x" * 100)
len(constant)
"""


def test_a_run_goes_on_when_its_kernel_has_gone(project: Path, environment: dict[str, str]) -> None:
    with Notebook(project, environment, extension=True) as notebook:
        notebook.run("import torch\nmodel = torch.nn.Linear(2, 2)\nbox, constant = {}, list(range(7))").ok()
        run_id = leave(notebook, TRAIN)
        assert run_id in notebook.run("%taas runs").ok().stdout
    with Notebook(project, environment, extension=True) as notebook:
        assert "on local, 2 ranks" in notebook.run("%taas runs").ok().stdout
        cell = notebook.run("%taas attach").ok()
        assert cell.stdout == "step 0\nstep 1\nstep 2\n"
        assert cell.result == "7"
        assert value(notebook, "model.weight.tolist(), box, report") == (
            "([[3.0, 3.0], [3.0, 3.0]], {'loss': [0.5, 0.25]}, 'by rank 0')"
        )
        # What the run has not changed does not come, however large it is.
        assert value(notebook, "'constant' in globals()") == "False"
        assert (project / "made.txt").read_text() == "x" * 100
        assert notebook.run("%taas runs").ok().stdout == "no run goes on by itself\n"
        again = notebook.run(f"%taas attach {run_id}")
        assert again.error_name == "PlacementError"
        assert f"there is no run {run_id}" in again.error_value


def test_a_run_that_is_taken_up_can_be_left_and_stopped(project: Path, environment: dict[str, str]) -> None:
    with Notebook(project, environment, extension=True) as notebook:
        run_id = leave(notebook, "import time\nkept = 'so far'\nprint('begun', flush=True)\ntime.sleep(600)")
        notebook.start("%taas attach")
        notebook.wait_for_output("begun")
        notebook.interrupt()
        assert "KeyboardInterrupt" in notebook.wait(30).error_name
        assert run_id in notebook.run("%taas runs").ok().stdout
        cell = notebook.run(f"%taas stop {run_id}", timeout=60)
        assert cell.error_name == "KeyboardInterrupt"
        assert value(notebook, "kept") == "'so far'"
        assert notebook.run("%taas runs").ok().stdout == "no run goes on by itself\n"


def test_an_exception_is_raised_when_it_is_taken_up(project: Path, environment: dict[str, str]) -> None:
    with Notebook(project, environment, extension=True) as notebook:
        leave(notebook, "import os\nprint('trying')\nif os.environ['RANK'] == '1':\n    raise ValueError('no luck')")
        cell = notebook.run("%taas attach")
        assert (cell.error_name, cell.error_value) == ("ValueError", "no luck")
        assert "[rank 1] of 2 failed" in cell.traceback_text
        assert cell.stdout == "trying\n"


@pytest.mark.parametrize("flag", ["--keep", "--rank-results", "--cpus 1"])
def test_what_needs_somebody_there_is_refused(project: Path, environment: dict[str, str], flag: str) -> None:
    with Notebook(project, environment, extension=True) as notebook:
        cell = notebook.run(f"#pragma taas --gpus 1 --detach {flag}\n1")
        assert cell.error_name == "PragmaError"
        assert f"--detach with {flag.split(maxsplit=1)[0]}" in cell.error_value
        assert notebook.run("%taas attach").error_name == "PlacementError"
