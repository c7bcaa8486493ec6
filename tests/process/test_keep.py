"""Ranks that stay between cells: their variables, process group and ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.kernel import CellResult, Notebook, value, warm_notebook
from process.watch import await_condition, await_gone, kill, titled

SOON_S = 10.0
BEGIN = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("nccl")
mine = 10 * dist.get_rank()
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory, private_temp: Path, started_once: None) -> Iterator[Notebook]:
    with warm_notebook(tmp_path_factory.mktemp("project")) as notebook:
        notebook.run("import os, time, torch, torch.distributed as dist").ok()
        yield notebook


@pytest.fixture
def notebook(kernel: Notebook) -> Iterator[Notebook]:
    """A notebook with two ranks that are kept, which are released afterwards."""
    kept(kernel, BEGIN, "--keep").ok()
    yield kernel
    kernel.run("%taas release").ok()
    await_condition(lambda: not ranks_of(kernel), "the end of the ranks", SOON_S)


def kept(notebook: Notebook, source: str, flags: str = "") -> CellResult:
    return notebook.run(f"#pragma taas --gpus 2 {flags}\n{source}")


def ranks_of(notebook: Notebook) -> list[int]:
    return titled(notebook.pid, "taas: rank")


# ---- what stays


def test_variables_and_process_group_stay(notebook: Notebook) -> None:
    cell = kept(notebook, "total = torch.tensor(mine)\ndist.all_reduce(total)\nprint(mine, total.item())", "--show all")
    assert "[rank 1] 10 10" in cell.ok().stdout
    assert value(notebook, "mine, total.item()") == "(0, 10)"


def test_it_is_said_beforehand_how_long_they_stay(kernel: Notebook) -> None:
    first = kept(kernel, "a = 1", "--keep").ok()
    assert "the 2 ranks stay after this cell: until `%taas release`" in first.stderr
    assert "1 h 00 min without a cell" in first.stderr
    assert "stay" not in kept(kernel, "a").ok().stderr
    status = kernel.run("%taas").ok().stdout
    assert re.search(r"kept since cell \[\d+\]: 2 ranks, for (59 min|1 h)", status)
    assert status.count("resting, pid") == 2
    assert "2 ranks ended" in kernel.run("%taas release").ok().stdout
    assert "no ranks are kept" in kernel.run("%taas release").ok().stdout


def test_a_cell_on_some_of_them(notebook: Notebook) -> None:
    cell = kept(notebook, "mine += 1; print('here', mine)\nmine", "--rank 1").ok()
    assert "[rank 1] here 11" in cell.stdout
    assert "here 0" not in cell.stdout
    assert value(notebook, "mine") == "0", "rank 0 took no part"
    assert kept(notebook, "mine", "--rank-results").ok().result == "[0, 11]"
    assert kept(notebook, "mine", "--rank-results --rank 1").ok().result == "[11]"
    # The rank that took no part was told what the notebook had changed meanwhile.
    notebook.run("factor = 7").ok()
    kept(notebook, "mine = factor", "--rank 1").ok()
    assert kept(notebook, "(mine, factor)", "--rank-results").ok().result == "[(0, 7), (7, 7)]"


def test_pull_and_push(notebook: Notebook) -> None:
    assert value(notebook, "%taas pull mine --rank all") == "[0, 10]"
    assert value(notebook, "%taas pull mine --rank 1") == "10"
    assert value(notebook, "%taas pull mine") == "0"
    notebook.run("got = %taas pull mine --rank 0-1").ok()
    assert value(notebook, "got") == "[0, 10]"
    notebook.run("mine = 5; model = torch.nn.Linear(2, 2)\n%taas push mine model").ok()
    assert value(notebook, "%taas pull mine --rank all") == "[5, 5]"
    same = kept(notebook, "float(model.weight.detach().sum())", "--rank-results").ok()
    assert same.result is not None
    first, second = re.findall(r"[-\d.e]+", same.result)
    assert first == second
    missing = notebook.run("%taas pull nothing_of_that_name --rank all")
    assert missing.error_name == "NameError"
    assert kept(notebook, "mine").ok().result == "5", "they are still there"


def test_what_the_notebook_changes_reaches_them(notebook: Notebook) -> None:
    kept(notebook, "model = torch.nn.Linear(2, 2); sgd = torch.optim.SGD(model.parameters(), lr=1.0)").ok()
    notebook.run("model.eval(); sgd.param_groups[0]['lr'] = 0.25; extra = [1]").ok()
    check = "(model.training, sgd.param_groups[0]['lr'], sgd.param_groups[0]['params'][0] is model.weight, extra)"
    assert kept(notebook, check, "--rank-results").ok().result == "[(False, 0.25, True, [1]), (False, 0.25, True, [1])]"


def test_plain_cells_run_on_them_where_that_is_asked_for(notebook: Notebook) -> None:
    assert "on 2 ranks from here on" in notebook.run("%taas auto --gpus 2 --show all").ok().stdout
    try:
        cell = notebook.run("# a comment\nmine += 1\nprint('rank has', mine)\nboom = 1").ok()
        assert "rank has 1" in cell.stdout
        assert "[rank 1] rank has 11" in cell.stdout
        failed = notebook.run("a = 1\nraise LookupError('line two')")
        assert "----> 2 raise LookupError('line two')" in failed.traceback_text
        # Lines of taas are the kernel's.
        assert value(notebook, "%taas pull mine --rank all") == "[1, 11]"
        assert "shell" in notebook.run("%%bash\necho shell").ok().stdout
        assert "until `%taas auto off`" in notebook.run("%taas").ok().stdout
        assert "--gpu is not a flag" in notebook.run("%taas auto --gpu 2").error_value
    finally:
        notebook.run("%taas auto off").ok()
    assert value(notebook, "mine") == "1"
    assert kept(notebook, "mine", "--rank-results").ok().result == "[1, 11]"


def test_training_goes_on_from_cell_to_cell(notebook: Notebook) -> None:
    kept(
        notebook,
        """
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
data = torch.randn(64, 4); target = data.sum(1, keepdim=True)
def step():
    optimizer.zero_grad()
    loss = (parallel(data) - target).pow(2).mean()
    loss.backward(); optimizer.step()
    return loss.item()
first = step()
""",
    ).ok()
    for _ in range(3):
        kept(notebook, "for _ in range(20): last = step()").ok()
    assert value(notebook, "last < first / 4, optimizer.param_groups[0]['params'][0] is model.weight") == "(True, True)"
    equal = kept(notebook, "model.weight.tolist()", "--rank-results").ok()
    assert equal.result is not None
    assert value(notebook, "_[0] == _[1]") == "True"


def test_random_states_directory_and_environment(notebook: Notebook, tmp_path: Path) -> None:
    kept(notebook, "torch.manual_seed(mine); os.environ['OF_RANK'] = str(mine)").ok()
    notebook.run(
        f"os.makedirs({str(tmp_path / 'd')!r}); os.chdir({str(tmp_path / 'd')!r}); os.environ['NEW'] = 'yes'"
    ).ok()
    cell = kept(
        notebook,
        "(int(torch.randint(10**6, ())), os.environ['OF_RANK'], os.getcwd()[-2:], os.environ['NEW'])",
        "--rank-results",
    )
    assert cell.ok().result is not None
    assert (
        value(notebook, "_[0][0] != _[1][0], _[0][1:], _[1][1:]") == "(True, ('0', '/d', 'yes'), ('10', '/d', 'yes'))"
    )
    notebook.run(f"os.chdir({str(notebook.directory)!r})").ok()


# ---- what goes wrong


def test_a_cell_that_fails_in_python_leaves_the_group_as_it_was(notebook: Notebook) -> None:
    failed = kept(notebook, "if mine: raise ValueError('no')\ntime.sleep(60)")
    assert (failed.error_name, failed.error_value) == ("ValueError", "no")
    assert failed.seconds < 5
    assert "broken off" not in failed.stderr
    assert "[rank 1] 10" in kept(notebook, "dist.barrier(); print(mine)", "--show all").ok().stdout


def test_a_cell_that_fails_beside_a_collective_says_that_the_group_is_gone(notebook: Notebook) -> None:
    failed = kept(notebook, "if mine: raise ValueError('no')\ndist.barrier()")
    assert (failed.error_name, failed.error_value) == ("ValueError", "no")
    assert "the ranks stay with their variables, but their process group had to be broken off" in failed.stderr
    assert kept(notebook, "(mine, dist.is_initialized())", "--rank-results").ok().result == "[(0, False), (10, False)]"
    again = kept(notebook, "dist.init_process_group('nccl'); dist.barrier(); print('met')", "--show all").ok()
    assert again.stdout.count("met") == 2


def test_stop_leaves_them(notebook: Notebook) -> None:
    notebook.start("#pragma taas --gpus 2\nprint('on it', flush=True)\ntime.sleep(60)")
    notebook.wait_for_output("on it")
    notebook.interrupt()
    assert notebook.wait().error_name == "KeyboardInterrupt"
    assert kept(notebook, "dist.barrier(); mine", "--rank-results").ok().result == "[0, 10]"


def test_a_rank_that_dies_takes_the_others_along(kernel: Notebook) -> None:
    kept(kernel, BEGIN, "--keep").ok()
    died = kept(kernel, "if mine: os._exit(3)\ntime.sleep(60)")
    assert died.error_name == "RankDiedError"
    assert "the ranks could not stay" in died.stderr
    await_condition(lambda: not ranks_of(kernel), "the end of the ranks", SOON_S)
    assert kept(kernel, "'mine' in globals()", "--rank-results").ok().result == "[False, False]"


def test_a_rank_that_dies_between_cells_is_told_of_once(kernel: Notebook) -> None:
    kept(kernel, BEGIN, "--keep").ok()
    pids = ranks_of(kernel)
    kill(pids[1])
    await_gone(pids, SOON_S)
    lost = kept(kernel, "mine")
    assert lost.error_name == "KeptRanksLostError"
    assert "was killed by signal 9 between two cells" in lost.error_value
    assert kept(kernel, "mine").ok().result == "0", "the notebook has rank 0's"


def test_they_end_when_no_cell_comes(kernel: Notebook) -> None:
    settings = kernel.directory / "taas.toml"
    settings.write_text("[keep]\nidle_s = 1.5\n")
    try:
        cell = kept(kernel, "alive = 1", "--keep").ok()
        assert "or 1.5 s without a cell" in cell.stderr
        pids = ranks_of(kernel)
        await_gone(pids, SOON_S)
        lost = kept(kernel, "alive")
        assert (lost.error_name, "no cell came for 1.5 s" in lost.error_value) == ("KeptRanksLostError", True)
    finally:
        settings.unlink()


def test_what_does_not_fit_them_is_refused(notebook: Notebook) -> None:
    other = notebook.run("#pragma taas --gpus 3\nran = True")
    assert other.error_name == "PlacementError"
    assert "--gpus 3, and 2 ranks are kept since cell" in other.error_value
    writes = kept(notebook, "ran = True", "--writes all")
    assert "have given up their right to write" in writes.error_value
    assert value(notebook, "'ran' in globals()") == "False"


def test_rank_wants_ranks_that_are_kept(kernel: Notebook) -> None:
    cell = kept(kernel, "ran = True", "--rank 1")
    assert "--rank chooses among ranks that were kept, and none are" in cell.error_value
    assert "no such" not in kernel.run("%taas pull x").error_value
    assert "there are no ranks to pull from" in kernel.run("%taas pull x").error_value


def test_they_end_with_runner_and_kernel(tmp_path: Path, private_temp: Path) -> None:
    with warm_notebook(tmp_path) as notebook:
        kept(notebook, "mine = 1", "--keep").ok()
        notebook.run("%taas restart").ok()
        assert "their runner has ended" in kept(notebook, "mine").error_value
        assert kept(notebook, "mine", "--keep").ok().result == "1"
        pids = ranks_of(notebook)
        assert len(pids) == 2
        notebook.close(now=True)
        await_gone(pids, 5.0)


# ---- what is sent again


def test_what_is_unchanged_is_sent_once(kernel: Notebook) -> None:
    kernel.run("big = torch.ones(2**26)").ok()
    first = kernel.run("#pragma taas --gpus 1 --dry-run\nbig.sum()").ok().stdout
    assert "256.0 MiB, of which 256.0 MiB are new" in first
    second = kernel.run("%taas plan\n#pragma taas --gpus 1\ntotal = big.sum()").ok().stdout
    assert re.search(r"256\.0 MiB, of which \d+ (B|KiB)|256\.0 MiB, of which \d+\.\d KiB are new", second), second
    assert "total" in second
    kernel.run("del big").ok()


def test_plan_belongs_to_a_pragma(kernel: Notebook) -> None:
    assert "%taas plan is not at the head of a cell with a pragma" in kernel.run("%taas plan").error_value
