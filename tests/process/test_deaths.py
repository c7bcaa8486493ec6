"""The table of ways to die: what ends a rank, when and which, and what the notebook then says and has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from process.kernel import CellResult, Notebook, warm_notebook

#: Ranks are stopped within two seconds; what a loaded machine adds is not held against them.
STOPPED_WITHIN_S = 8.0

#: Defined in the notebook: ways to end a process, and objects that take them.
HELPERS = """
import os
import torch
import torch.distributed as dist
from pathlib import Path
from torch.utils.data import DataLoader

def die(way):
    import faulthandler, os, signal, sys
    if way == "raise":
        raise ValueError("boom")
    elif way == "sys.exit":
        sys.exit(3)
    elif way == "os._exit":
        os._exit(3)
    elif way == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "SIGSEGV":
        faulthandler._sigsegv()
    elif way == "SIGABRT":
        os.abort()
    elif way == "MemoryError":
        bytearray(1 << 62)

def die_on(rank, way):
    if os.environ.get("RANK") == str(rank):
        die(way)

class DiesWhenLoaded:
    def __init__(self, rank, way):
        self.rank, self.way = rank, way
    def __reduce__(self):
        return _load, (self.rank, self.way)

def _load(rank, way):
    die_on(rank, way)
    return DiesWhenLoaded(rank, way)

class DiesWhenPacked:
    def __init__(self, way):
        self.way = way
    def __reduce__(self):
        die_on(0, self.way)
        return DiesWhenPacked, (self.way,)

class DeadlyDataset:
    def __init__(self, way):
        self.way = way
    def __len__(self):
        return 8
    def __getitem__(self, index):
        die(self.way)
"""

FIRST = """
import time, taas
before = {nonce}
if taas.rank() == 0:
    Path("bound").touch()
if taas.rank() == {rank}:
    while not Path("bound").exists():
        time.sleep(0.01)
    die({way!r})
time.sleep(100)
"""

IN_COLLECTIVE = """
import taas
dist.init_process_group("nccl")
before = {nonce}
word = torch.zeros(1)
if taas.rank() == {rank}:
    dist.recv(word, src=1 - {rank})
    die({way!r})
else:
    dist.send(word, dst={rank})
dist.{collective}
"""

IN_LOADER_WORKER = """
import time, taas
before = {nonce}
if taas.rank() == 0:
    Path("bound").touch()
if taas.rank() == {rank}:
    while not Path("bound").exists():
        time.sleep(0.01)
    for batch in DataLoader(DeadlyDataset({way!r}), num_workers=1):
        pass
time.sleep(100)
"""

AT_EXIT = """
import atexit, taas
before = {nonce}
if taas.rank() == {rank}:
    atexit.register(die, {way!r})
"""


@dataclass(frozen=True)
class Way:
    """A way to die, the exception that it is, or the words for how the process went and why."""

    name: str
    exception: str = ""
    exit: str = ""
    cause: str = ""

    @property
    def error_name(self) -> str:
        return self.exception or "RankDiedError"


WAYS = [
    Way("raise", exception="ValueError"),
    Way("sys.exit", exception="SystemExit"),
    Way("MemoryError", exception="MemoryError"),
    Way("os._exit", exit="exited with code 3", cause="os._exit"),
    Way("SIGKILL", exit="was killed by SIGKILL", cause="kill"),
    Way("SIGSEGV", exit="was killed by SIGSEGV", cause="native code"),
    Way("SIGABRT", exit="was killed by SIGABRT", cause="native code gave up"),
]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
ranks = pytest.mark.parametrize("rank", [0, 1])
nonces = itertools.count(1000)


@pytest.fixture(scope="module")
def notebook(private_temp: Path, started_once: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with warm_notebook(tmp_path_factory.mktemp("deaths")) as notebook:
        notebook.run(HELPERS).ok()
        notebook.await_preloaded()
        yield notebook


@pytest.fixture(autouse=True)
def nonce(notebook: Notebook) -> Iterator[int]:
    """A number that only this test's cell binds; after it, the notebook still runs cells on ranks."""
    number = next(nonces)
    notebook.run("before = 0").ok()
    (notebook.directory / "bound").unlink(missing_ok=True)
    yield number
    after = notebook.run("#pragma taas --gpus 2\nafter = 1 + 1\nafter")
    assert after.ok().result == "2"


def on_two(notebook: Notebook, source: str) -> CellResult:
    cell = notebook.run(f"#pragma taas --gpus 2\n{source}")
    assert cell.seconds < STOPPED_WITHIN_S, cell.output
    return cell


def assert_names(cell: CellResult, way: Way, rank: int) -> None:
    """The cell failed with what happened, and on which rank."""
    assert cell.error_name == way.error_name, cell.output
    if way.exception:
        assert f"[rank {rank}]" in cell.traceback_text
    else:
        assert f"rank {rank} of 2 {way.exit}" in cell.error_value
        assert "likely cause: " in cell.error_value
        assert way.cause in cell.error_value


def assert_home(notebook: Notebook, cell: CellResult, nonce: int, *, reachable: bool) -> None:
    """What rank 0 had bound is in the notebook; or it is said that nothing is."""
    bound = notebook.run("before").ok().result
    if reachable:
        assert bound == str(nonce), cell.output
        assert "nothing came home" not in cell.stderr
    else:
        assert bound == "0"
        assert "nothing came home, the notebook is as it was before the cell" in cell.stderr


@ways
@ranks
def test_while_the_namespace_loads(notebook: Notebook, nonce: int, rank: int, way: Way) -> None:
    notebook.run(f"deadly = DiesWhenLoaded({rank}, {way.name!r})").ok()
    cell = on_two(notebook, f"deadly, before\nbefore = {nonce}\nimport time\ntime.sleep(100)")
    assert_names(cell, way, rank)
    if way.exception:
        assert "while `deadly` of the notebook was loaded" in cell.traceback_text
    if rank == 0:
        assert_home(notebook, cell, nonce, reachable=False)


@ways
@ranks
def test_first_statement(notebook: Notebook, nonce: int, rank: int, way: Way) -> None:
    cell = on_two(notebook, FIRST.format(rank=rank, way=way.name, nonce=nonce))
    assert_names(cell, way, rank)
    assert_home(notebook, cell, nonce, reachable=rank == 1 or bool(way.exception))


@ways
@ranks
def test_in_a_collective_of_the_others(notebook: Notebook, nonce: int, rank: int, way: Way) -> None:
    collective = "barrier()" if rank == 0 else "all_reduce(word)"
    source = IN_COLLECTIVE.format(rank=rank, way=way.name, nonce=nonce, collective=collective)
    cell = on_two(notebook, source)
    assert_names(cell, way, rank)
    assert_home(notebook, cell, nonce, reachable=rank == 1 or bool(way.exception))


@ways
@ranks
def test_in_a_loader_worker(notebook: Notebook, nonce: int, rank: int, way: Way) -> None:
    cell = on_two(notebook, IN_LOADER_WORKER.format(rank=rank, way=way.name, nonce=nonce))
    # The rank itself lives, and torch tells of its worker: by the exception, or by its pid and signal.
    expected = way.exception if way.name in ("raise", "MemoryError") else "RuntimeError"
    assert cell.error_name == expected, cell.output
    assert "DataLoader worker" in cell.error_value
    assert f"[rank {rank}]" in cell.traceback_text
    assert_home(notebook, cell, nonce, reachable=True)


@ways
def test_while_changes_are_packed(notebook: Notebook, nonce: int, way: Way) -> None:
    notebook.run("deadly = 'old'").ok()
    cell = on_two(notebook, f"before = {nonce}\ndeadly = DiesWhenPacked({way.name!r})")
    if way.exception:
        # One object that cannot be packed costs neither the cell nor the other names.
        assert cell.status == "ok", cell.output
        assert "stayed on rank 0, the notebook keeps what it had:\n        deadly: " in cell.stderr
        assert_home(notebook, cell, nonce, reachable=True)
    else:
        assert_names(cell, way, 0)
        assert_home(notebook, cell, nonce, reachable=False)
    assert notebook.run("deadly").ok().result == "'old'"


@ways
@ranks
def test_at_exit(notebook: Notebook, nonce: int, rank: int, way: Way) -> None:
    cell = on_two(notebook, AT_EXIT.format(rank=rank, way=way.name, nonce=nonce))
    # The cell's work was done by then, and is home; that a process went badly is said all the same.
    assert cell.status == "ok", cell.output
    assert_home(notebook, cell, nonce, reachable=True)
    if way.exit:
        assert f"rank {rank} {way.exit} at its end, after the cell had finished" in cell.stderr


def test_a_process_that_ends_well_in_the_middle_has_died_too(notebook: Notebook) -> None:
    cell = on_two(notebook, "import time, taas\nif taas.rank() == 1:\n    os._exit(0)\ntime.sleep(100)")
    assert cell.error_name == "RankDiedError"
    assert "rank 1 of 2 exited with code 0 before it had finished the cell" in cell.error_value


def test_a_death_shows_the_last_lines_of_its_rank(notebook: Notebook) -> None:
    body = "if os.environ['RANK'] == '1':\n    print('on the brink')\n    die('SIGKILL')"
    cell = on_two(notebook, f"import time\n{body}\ntime.sleep(100)")
    assert "[rank 1] on the brink" in cell.traceback_text


class TestErrorsOfSeveralRanks:
    def test_equal_ones_are_collated(self, notebook: Notebook) -> None:
        # Who is interrupted meanwhile raises it all the same, so that all four do.
        source = """
import time
try:
    time.sleep(0 if os.environ["RANK"] == "2" else 100)
except KeyboardInterrupt:
    pass
raise ValueError("boom") from None
"""
        cell = notebook.run(f"#pragma taas --gpus 4\n{source}")
        assert (cell.error_name, cell.error_value.splitlines()[0]) == ("ValueError", "boom")
        assert cell.traceback_text.count("Traceback (most recent call last)") == 1
        assert "[rank 2] of 4 failed" in cell.traceback_text
        assert "ranks 0, 1, 3: the same error" in cell.traceback_text

    def test_different_ones_are_listed_after_the_first(self, notebook: Notebook) -> None:
        source = """
import time
rank = int(os.environ["RANK"])
try:
    time.sleep(0 if rank == 1 else 100)
except KeyboardInterrupt:
    pass
raise (ValueError, LookupError, OSError)[rank](f"of rank {rank}") from None
"""
        cell = notebook.run(f"#pragma taas --gpus 3\n{source}")
        assert (cell.error_name, cell.error_value.splitlines()[0]) == ("LookupError", "of rank 1")
        assert "rank 0: ValueError: of rank 0" in cell.traceback_text
        assert "rank 2: OSError: of rank 2" in cell.traceback_text

    def test_a_peer_that_lost_its_connection_is_not_the_cause(self, notebook: Notebook) -> None:
        source = """
dist.init_process_group("nccl")
if dist.get_rank() == 2:
    die("SIGKILL")
dist.all_reduce(torch.ones(1))
"""
        cell = notebook.run(f"#pragma taas --gpus 4\n{source}")
        assert cell.error_name == "RankDiedError", cell.output
        assert "rank 2 of 4 was killed by SIGKILL" in cell.error_value


class TestCatching:
    def test_a_builtin_exception(self, notebook: Notebook) -> None:
        notebook.run("""
try:
    get_ipython().run_cell_magic("taas", "--gpus 2", "raise ValueError('boom')")
except ValueError as error:
    caught = str(error)
""").ok()
        assert notebook.run("caught").result == "'boom'"

    def test_an_exception_class_of_the_notebook(self, notebook: Notebook) -> None:
        notebook.run("""
class Diverged(ArithmeticError):
    def __init__(self, step, loss):
        super().__init__(f"step {step}: {loss}")
        self.step, self.loss = step, loss
    def __reduce__(self):
        return Diverged, (self.step, self.loss)

try:
    get_ipython().run_cell_magic("taas", "--gpus 2", "raise Diverged(7, float('inf'))")
except Diverged as error:
    caught = error.step, error.loss
""").ok()
        assert notebook.run("caught").result == "(7, inf)"

    def test_an_exception_class_that_the_cell_itself_defines(self, notebook: Notebook) -> None:
        cell = on_two(notebook, "class Fresh(Exception): pass\nraise Fresh('boom')")
        assert cell.error_name == "Fresh", cell.output
        assert notebook.run("import sys\nisinstance(sys.last_value, Fresh)").result == "True"

    def test_an_exception_that_has_no_pickle(self, notebook: Notebook) -> None:
        source = "import threading\nerror = ValueError('boom')\nerror.lock = threading.Lock()\nraise error"
        cell = on_two(notebook, source)
        assert cell.error_name == "RankFailedError", cell.output
        assert "ValueError: boom" in cell.error_value

    def test_a_death(self, notebook: Notebook) -> None:
        notebook.run("""
from taas_magic.errors import RankDiedError
try:
    get_ipython().run_cell_magic("taas", "--gpus 2", "die_on(1, 'SIGSEGV')")
except RankDiedError as error:
    caught = error.rank, error.exit_code
""").ok()
        assert notebook.run("caught").result == "(1, -11)"

    def test_run_all_stops(self, notebook: Notebook) -> None:
        """Cells that a front end has queued behind a failed one are aborted."""
        notebook.start("#pragma taas --gpus 2\nraise ValueError('boom')")
        next_id = notebook.client.execute("reached = True")
        assert notebook.wait().error_name == "ValueError"
        reply = notebook.client.get_shell_msg(timeout=30)
        assert reply["parent_header"]["msg_id"] == next_id
        assert reply["content"]["status"] == "aborted"
        assert notebook.run("'reached' in globals()").result == "False"
