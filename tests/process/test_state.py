"""Big state: one copy a machine, no copy where nothing changed, and home the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.kernel import Notebook, ranks, value, warm_notebook

MIB = 2**20


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, private_temp: Path, started_once: None) -> Iterator[Notebook]:
    with warm_notebook(tmp_path_factory.mktemp("project")) as notebook:
        notebook.run("import os, torch, torch.distributed as dist").ok()
        yield notebook


def new_bytes(notebook: Notebook, cell: str) -> float:
    """How much of what a cell uses would be copied, in MiB."""
    plan = notebook.run(f"%taas plan\n#pragma taas --gpus 2\n{cell}").ok().stdout
    found = re.search(r"of which ([\d.]+) (B|KiB|MiB|GiB) are new", plan)
    assert found is not None, plan
    return float(found[1]) * {"B": 1 / MIB, "KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[found[2]]


def test_many_ranks_share_one_copy(notebook: Notebook) -> None:
    notebook.run("state = [torch.ones(2**22) for _ in range(8)]").ok()
    cell = ranks(
        notebook,
        """
dist.init_process_group("gloo")
total = sum(float(part.sum()) for part in state)  # reads every page
dist.barrier()
sizes, fields = {"Pss": 0, "Private_Dirty": 0}, None
for line in open("/proc/self/smaps"):
    words = line.split()
    if "-" in words[0] and not words[0].endswith(":"):
        is_parcel = "taas-parcel" in line
    elif is_parcel and words[0].rstrip(":") in sizes:
        sizes[words[0].rstrip(":")] += int(words[1])
dist.barrier()
sizes["Pss"], sizes["Private_Dirty"]
""",
        num_ranks=6,
        flags="--rank-results",
    )
    cell.ok()
    notebook.run("shares, written = zip(*_)").ok()
    # 128 MiB of state; each rank's share of it, and what it has of its own.
    assert int(value(notebook, "sum(shares)")) <= 1.1 * 128 * 1024
    assert int(value(notebook, "max(written)")) < 1024


def test_a_write_of_one_rank_is_seen_by_nobody_else(notebook: Notebook) -> None:
    notebook.run("mine = torch.zeros(2**20)").ok()
    cell = ranks(
        notebook,
        """
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    mine.fill_(5)
dist.barrier()
int(mine.sum())
""",
        flags="--rank-results",
    )
    assert cell.ok().result == f"[0, {5 * 2**20}]"
    assert value(notebook, "int(mine.sum())") == "0"


def test_what_did_not_change_is_not_sent_again(notebook: Notebook) -> None:
    notebook.run("data, model = torch.rand(2**23), torch.nn.Linear(1024, 1024)").ok()
    assert new_bytes(notebook, "data, model") > 35
    # To know that, it had to be packed; so it is there for the run that follows.
    assert new_bytes(notebook, "data, model") < 1
    notebook.run("model.weight.data += 1").ok()
    assert 3.9 < new_bytes(notebook, "data, model") < 4.5, "only the model is new"
    ranks(notebook, "with torch.no_grad():\n    model.weight += data[0]").ok()
    assert new_bytes(notebook, "data, model") < 1, "what came home need not be sent back"
    notebook.run("data[7] = 1").ok()
    assert new_bytes(notebook, "data, model") > 30


def test_a_plan_says_what_and_why_and_runs_nothing(notebook: Notebook) -> None:
    notebook.run("weights = torch.zeros(2**20)\ndef score(): return weights.sum()").ok()
    plan = notebook.run("#pragma taas --gpus 2\n%taas plan\nranked = score()").ok().stdout
    assert re.search(r"weights +Tensor +4\.0 MiB +the cell → score", plan)
    assert "ranked" in plan.splitlines()[-1]
    assert value(notebook, "'ranked' in globals()") == "False"


def test_the_budget_is_a_setting(tmp_path: Path, private_temp: Path) -> None:
    (tmp_path / "taas.toml").write_text("[state]\nbudget_gib = 0\n")
    with warm_notebook(tmp_path) as notebook:
        notebook.run("import torch; data = torch.rand(2**20)").ok()
        ranks(notebook, "data.sum()").ok()
        assert new_bytes(notebook, "data") > 3.9
