"""A runner that is up, which several notebooks use: each gets its GPUs when it is its turn, and only its own runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import leaks
import pytest
from process.kernel import Notebook
from runners import Runner, started

from taas_magic.machines.keys import own_keys

pytestmark = pytest.mark.module_leak_check

SLEEP = "#pragma taas --gpus 2\nimport time\nprint('begun', flush=True)\ntime.sleep({seconds})"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "notebook"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


@pytest.fixture
def runner(tmp_path: Path, environment: dict[str, str], private_temp: Path, started_once: None) -> Iterator[Runner]:
    before = leaks.Snapshot.take()
    with started(tmp_path, num_gpus=2, keys=own_keys("notebook", {**os.environ, **environment})) as made:
        yield made
    left = leaks.wait_until_gone(before, deadline_s=20)
    assert not left, "\n".join(left)


def connected(notebook: Notebook, runner: Runner) -> None:
    cell = notebook.run(f"%taas connect {runner.address} {runner.key}").ok()
    assert runner.address in cell.stdout


def test_two_notebooks_take_turns(runner: Runner, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with (
        Notebook(tmp_path / "one", environment, extension=True) as one,
        Notebook(tmp_path / "two", environment, extension=True) as two,
    ):
        for notebook in (one, two):
            connected(notebook, runner)
            notebook.run("#pragma taas --gpus 1\n1").ok()
        one.start(SLEEP.format(seconds=4))
        one.wait_for_output("begun")
        waiting = two.start(SLEEP.format(seconds=0))
        two.wait_for_output("waiting for 2 GPUs: 0 of 2 are free")
        assert "begun" not in waiting.stdout
        one.wait(30).ok()
        assert two.wait(30).ok().stdout == "begun\n"
        # Who waits can be stopped.
        one.start(SLEEP.format(seconds=600))
        one.wait_for_output("begun")
        two.start(SLEEP.format(seconds=0))
        two.wait_for_output("waiting for 2 GPUs")
        two.interrupt()
        assert two.wait(10).error_name == "KeyboardInterrupt"
        one.interrupt()
        assert one.wait(30).error_name == "KeyboardInterrupt"
        assert "here" in two.run("#pragma taas --gpus 2\nprint('here')").ok().stdout
        # Nobody finds the other's runs.
        assert two.run("%taas logs --rank 0").ok().stdout == "here\n"
