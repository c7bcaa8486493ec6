"""Stop, in all its ways: by the user, by time, and by the death of one of our own processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process.kernel import CellResult, KernelGoneError, Notebook, warm_notebook
from process.watch import await_condition, await_gone, below, kill, only, title, titled

#: From an interrupt to SIGTERM, here; small, so that what has to be moved on by force does not take long.
GRACE_S = 1.0
#: How long a rank may take to go, on a loaded machine.
SOON_S = 10.0
#: What is promised where our own processes are killed.
GONE_S = 5.0

HELPERS = """
import os, signal, subprocess, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

weight = torch.zeros(3)

class Slow:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.01)
        return index

def detached_child():
    "A child of nobody: of a process that has gone, in a session of its own."
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(0)
    os.wait()
"""

BUSY_LOOP = "while True:\n    pass"
SLEEP = "time.sleep(1000)"
COLLECTIVE = """
dist.init_process_group("nccl")
if dist.get_rank() == 0:
    print("waiting", flush=True); dist.all_reduce(torch.ones(1))
else:
    {other}
"""
SWALLOWS = """
while True:
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        pass
"""
WITH_CHILDREN = """
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], start_new_session=True)
detached_child()
for index in DataLoader(Slow(), num_workers=2):
    if index == 2:
        print("loading", flush=True)
"""


@pytest.fixture(scope="module")
def notebook(private_temp: Path, started_once: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    directory = tmp_path_factory.mktemp("stop")
    (directory / "taas.toml").write_text(f"[stop]\ngrace_s = {GRACE_S}\n")
    with warm_notebook(directory) as notebook:
        notebook.run(HELPERS).ok()
        notebook.await_preloaded()
        yield notebook


@pytest.fixture
def trained(notebook: Notebook) -> Iterator[Callable[[CellResult], None]]:
    """Binds a weight that a cell may train to 7; gives what asserts that the trained one came home."""
    notebook.run("weight = torch.zeros(3)\nalias = weight").ok()

    def assert_home(cell: CellResult) -> None:
        assert "nothing came home" not in cell.stderr, cell.output
        assert notebook.run("weight.tolist(), alias is weight, epoch").ok().result == "([7.0, 7.0, 7.0], True, 3)"

    yield assert_home
    assert notebook.run("#pragma taas --gpus 2\nafter = 1 + 1\nafter").ok().result == "2"


def start_run(notebook: Notebook, body: str, *, flags: str = "", ready: str = "trained") -> set[int]:
    """Start a cell on two ranks that trains and then does ``body``; returns the processes of the run."""
    # What waits for the next cell becomes the run.
    waits = ("taas: standby", "taas: agent")
    before = {pid for pid in below(notebook.pid) if not title(pid).startswith(waits)}
    # Said by another thread, a moment later: by then the main thread is in the body, where an interrupt is to hit it.
    say = "import threading; threading.Timer(0.1, print, ['trained'], {'flush': True}).start()"
    start = f"import taas\nweight += 7\nepoch = 3\n{say}"
    notebook.start(f"#pragma taas --gpus 2 {flags}\n{start}\n{body}")
    notebook.wait_for_output(ready)
    ranks = {"taas: rank 0", "taas: rank 1"}  # a loader's workers bear the title of their rank
    await_condition(lambda: {title(pid) for pid in titled(notebook.pid, "taas: rank")} == ranks, "two ranks")
    return set(below(notebook.pid)) - before


def assert_interrupted(cell: CellResult) -> None:
    assert (cell.status, cell.error_name) == ("error", "KeyboardInterrupt"), cell.output


@pytest.mark.parametrize(
    ("body", "line"),
    [
        pytest.param(BUSY_LOOP, "pass", id="busy loop"),
        pytest.param(SLEEP, SLEEP, id="sleep"),
        pytest.param(COLLECTIVE.format(other=SLEEP), "dist.all_reduce", id="collective, the other sleeps"),
        pytest.param(
            COLLECTIVE.format(other="while True: pass"), "dist.all_reduce", id="collective, the other computes"
        ),
    ],
)
def test_an_interrupt(notebook: Notebook, trained: Callable[[CellResult], None], body: str, line: str) -> None:
    run = start_run(notebook, body, ready="waiting" if "waiting" in body else "trained")
    notebook.interrupt()
    cell = notebook.wait(SOON_S)
    assert_interrupted(cell)
    assert line in cell.traceback_text
    await_gone(run, SOON_S)
    trained(cell)


def test_a_cell_that_swallows_the_interrupt_is_moved_on(
    notebook: Notebook, trained: Callable[[CellResult], None]
) -> None:
    run = start_run(notebook, SWALLOWS)
    notebook.interrupt()
    cell = notebook.wait(2 * GRACE_S + SOON_S)
    assert_interrupted(cell)
    await_gone(run, SOON_S)
    trained(cell)


def test_loader_workers_and_children_of_any_kind_go_along(
    notebook: Notebook, trained: Callable[[CellResult], None]
) -> None:
    run = start_run(notebook, WITH_CHILDREN, ready="loading")
    sleepers = titled(notebook.pid, "sleep 1000")
    assert len(sleepers) >= 3
    notebook.interrupt()
    cell = notebook.wait(2 * GRACE_S + SOON_S)
    assert_interrupted(cell)
    await_gone({*run, *sleepers}, SOON_S)
    trained(cell)


def test_children_do_not_outlive_a_cell_that_ends_well(notebook: Notebook) -> None:
    before = set(below(notebook.pid))
    cell = notebook.run("#pragma taas --gpus 2\ndetached_child()\nchild = subprocess.Popen(['sleep', '1000']).pid")
    cell.ok()

    def newcomers() -> set[str]:
        """Titles of what is there now, without the processes that wait for the next cell."""
        titles = {title(pid) for pid in set(below(notebook.pid)) - before}
        return {each for each in titles if not each.startswith(("taas: standby", "taas: agent"))}

    await_condition(lambda: not newcomers(), "the cell's children to go")


@pytest.fixture
def long_grace(notebook: Notebook) -> Iterator[None]:
    """Such a grace time that only further interrupts end a run that ignores the first."""
    settings = notebook.directory / "taas.toml"
    usual = settings.read_text()
    settings.write_text("[stop]\ngrace_s = 60\n")
    yield
    settings.write_text(usual)


def test_a_second_interrupt_does_not_wait_for_the_grace_time(
    notebook: Notebook, long_grace: None, trained: Callable[[CellResult], None]
) -> None:
    run = start_run(notebook, SWALLOWS.replace("pass", "print('ignored', flush=True)"))
    notebook.interrupt()
    notebook.wait_for_output("ignored")
    notebook.interrupt()
    cell = notebook.wait(SOON_S)
    assert_interrupted(cell)
    assert "stopping harder" in cell.stderr
    await_gone(run, SOON_S)
    trained(cell)


def test_a_third_interrupt_kills(notebook: Notebook, long_grace: None) -> None:
    """Rank 0 cannot even pack: what it computes in C never lets go of the interpreter."""
    notebook.run("epoch = 0").ok()
    ignoring = SWALLOWS.replace("pass", "print('ignored', flush=True)").replace("\n", "\n    ")
    sticks = "print('stuck', flush=True); sum(range(10**13))"
    sticks = f"while True:\n        try: {sticks}\n        except KeyboardInterrupt: pass"
    body = f"if taas.rank() == 0:\n    {sticks}\nelse:{ignoring}"
    run = start_run(notebook, body, flags="--show all", ready="[rank 1] trained")
    notebook.wait_for_output("stuck")
    notebook.interrupt()
    notebook.wait_for_output("ignored")
    notebook.interrupt()
    notebook.wait_for_output("stopping harder")
    notebook.interrupt()
    cell = notebook.wait(SOON_S)
    assert_interrupted(cell)
    assert "nothing came home, the notebook is as it was before the cell" in cell.stderr
    assert notebook.run("epoch").result == "0"
    await_gone(run, SOON_S)


def test_a_timeout(notebook: Notebook, trained: Callable[[CellResult], None]) -> None:
    run = start_run(notebook, SLEEP, flags="--timeout 1s")
    cell = notebook.wait(SOON_S)
    assert cell.error_name == "RunTimeoutError"
    assert "--timeout" in cell.error_value
    assert SLEEP in cell.traceback_text
    await_gone(run, SOON_S)
    trained(cell)


def test_the_end_of_the_agent(notebook: Notebook, trained: Callable[[CellResult], None]) -> None:
    """It hosts the store: no rank could meet another one any more."""
    run = start_run(notebook, SLEEP)
    kill(only(titled(notebook.pid, "taas: agent")))
    cell = notebook.wait(SOON_S)
    assert cell.error_name == "RunnerLostError", cell.output
    assert "agent" in cell.error_value
    await_gone(run, SOON_S)
    trained(cell)


def test_the_end_of_the_run_zygote(notebook: Notebook) -> None:
    notebook.run("epoch = 0").ok()
    run = start_run(notebook, WITH_CHILDREN, ready="loading")
    kill(only(titled(notebook.pid, "taas: run ")))
    cell = notebook.wait(SOON_S)
    assert cell.error_name == "RunnerLostError", cell.output
    assert "nothing came home" in cell.stderr
    await_gone(run, SOON_S)
    assert notebook.run("epoch").result == "0"
    notebook.run("#pragma taas --gpus 2\npass").ok()


class TestWhatNeedsANewRunner:
    """Each test has a runner of its own, and ends with the extension unloaded and nothing of it left."""

    @pytest.fixture
    def runner(self, notebook: Notebook) -> Iterator[int]:
        notebook.run("%unload_ext taas_magic").ok()
        notebook.run("%load_ext taas_magic").ok()
        notebook.run("#pragma taas --gpus 1\nepoch = 0").ok()
        yield only(titled(notebook.pid, "taas: runner"))
        notebook.run("%unload_ext taas_magic").ok()
        assert below(notebook.pid) == []

    def test_the_end_of_the_runner_during_a_run(self, notebook: Notebook, runner: int) -> None:
        run = start_run(notebook, WITH_CHILDREN, ready="loading") | set(below(runner))
        kill(runner)
        cell = notebook.wait(GONE_S)
        assert cell.error_name == "RunnerLostError", cell.output
        assert f"the runner (pid {runner}) was killed by signal 9" in cell.error_value
        assert "run the cell again: it starts a new runner" in cell.error_value
        await_gone(run, GONE_S)
        assert notebook.run("epoch").result == "0"
        notebook.run("#pragma taas --gpus 2\nepoch = 5").ok()
        assert notebook.run("epoch").result == "5"
        assert only(titled(notebook.pid, "taas: runner")) != runner

    def test_the_end_of_the_runner_between_runs(self, notebook: Notebook, runner: int) -> None:
        zygotes = below(runner)
        kill(runner)
        await_gone(zygotes, GONE_S)
        notebook.run("#pragma taas --gpus 2\nepoch = 5").ok()
        assert notebook.run("epoch").result == "5"

    def test_the_end_of_the_zygote_between_runs(self, notebook: Notebook, runner: int) -> None:
        everything = [runner, *below(runner)]
        kill(only([pid for pid in titled(runner, "taas: zygote") if title(pid) == "taas: zygote"]))
        await_gone(everything, GONE_S)
        notebook.run("#pragma taas --gpus 2\nepoch = 5").ok()
        assert notebook.run("epoch").result == "5"

    def test_the_end_of_the_zygote_during_a_run(self, notebook: Notebook, runner: int) -> None:
        """The run zygote is a process of its own: what happens to the run is told, and nothing of it stays."""
        run = start_run(notebook, SLEEP) | set(below(runner))
        kill(only([pid for pid in titled(runner, "taas: zygote") if title(pid) == "taas: zygote"]))
        cell = notebook.wait(SOON_S)
        assert cell.error_name in ("RunnerLostError", "TaasError"), cell.output
        assert "zygote" in cell.error_value
        await_gone(run, GONE_S)
        notebook.run("#pragma taas --gpus 2\nepoch = 5").ok()
        assert notebook.run("epoch").result == "5"

    def test_the_kernels_own_children_are_left_alone(self, notebook: Notebook, runner: int) -> None:
        """A process and a pool of the notebook live through a stop, and through the end of the extension."""
        notebook.run("""
import multiprocessing
def ignore_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts the kernel's whole process group
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pool = multiprocessing.get_context("fork").Pool(2, ignore_interrupts)
""").ok()
        workers = "sorted(process.pid for process in pool._pool)"
        before = notebook.run(workers).ok().result
        run = start_run(notebook, SLEEP)
        notebook.interrupt()
        assert_interrupted(notebook.wait(SOON_S))
        await_gone(run, SOON_S)
        ours = [runner, *below(runner)]
        notebook.run("%unload_ext taas_magic").ok()
        await_gone(ours, SOON_S)
        alive = notebook.run(f"child.poll(), pool.map(abs, [-1, -2]), {workers} == {before}").result
        assert alive == "(None, [1, 2], True)"
        notebook.run("child.kill()\nchild.wait()\npool.terminate()\npool.join()\ndel pool").ok()


def test_the_end_of_the_kernel(notebook: Notebook, tmp_path: Path) -> None:
    """Runner, zygotes, ranks and all that these have started go with the kernel."""
    with Notebook(tmp_path, extension=True) as victim:
        victim.run(HELPERS).ok()
        start_run(victim, WITH_CHILDREN, ready="loading")
        everything = below(victim.pid)
        assert len(titled(victim.pid, "sleep 1000")) >= 3
        kill(victim.pid)
        await_gone(everything, GONE_S)
        with pytest.raises(KernelGoneError):
            victim.wait()
