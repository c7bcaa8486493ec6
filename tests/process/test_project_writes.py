"""Writes of ranks to the project: rank 0's work, the others' are left out, waited for, or refused with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process.kernel import Notebook, ranks, value, warm_notebook

from taas_magic.rank import landlock

needs_landlock = pytest.mark.skipif(landlock.abi_version() == 0, reason="this kernel has no Landlock that can be used")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, private_temp: Path, started_once: None) -> Iterator[Notebook]:
    """In a project below the temporary directory, where ranks may write everywhere else."""
    with warm_notebook(tmp_path_factory.mktemp("project")) as notebook:
        notebook.run("import torch").ok()
        yield notebook


@pytest.fixture
def project(notebook: Notebook) -> Path:
    return notebook.directory


def test_a_save_without_a_guard_works_and_is_reported_once(notebook: Notebook, project: Path) -> None:
    notebook.run("model = torch.nn.Linear(2, 2)").ok()
    cell = ranks(
        notebook,
        "import torch\nfor epoch in range(3): torch.save({'epoch': epoch, 'model': model.state_dict()}, 'model.pt')",
        num_ranks=3,
    ).ok()
    assert value(notebook, "torch.load('model.pt')['epoch']") == "2"
    notices = [line for line in cell.output.splitlines() if "was left out" in line]
    assert len(notices) == 1
    assert "torch.save('model.pt')" in notices[0]
    assert "2 ranks" in notices[0]
    assert "--writes all" in notices[0]
    assert [path.name for path in project.glob("*.pt")] == ["model.pt"]


REFUSED = {
    "open": "open('out.txt', 'w')",
    "a new directory": "import os; os.mkdir('newdir')",
    "removing": "import os; os.remove('kept.txt')",
    "renaming": "import os; os.rename('kept.txt', 'out.txt')",
    "Path": "from pathlib import Path; Path('out.txt').write_text('x')",
}


@needs_landlock
@pytest.mark.parametrize("write", REFUSED.values(), ids=REFUSED.keys())
def test_a_write_of_another_rank_is_refused_with_the_way_out(notebook: Notebook, project: Path, write: str) -> None:
    (project / "kept.txt").write_text("kept")
    cell = ranks(notebook, f"import taas\nif taas.rank() == 1:\n    {write}")
    assert cell.error_name == "PermissionError"
    for said in ("rank 1", "taas.rank() == 0", "--writes all", str(project)):
        assert said in cell.traceback_text
    assert (project / "kept.txt").read_text() == "kept"
    assert not (project / "out.txt").exists()
    assert not (project / "newdir").exists()


@needs_landlock
def test_neither_a_subprocess_nor_cpp_gets_around_it(notebook: Notebook, project: Path) -> None:
    cell = ranks(
        notebook,
        """
import subprocess, taas, torch
tries = {}
if taas.rank() == 1:
    tries["shell"] = subprocess.run("echo x > out.txt", shell=True, capture_output=True).returncode
    try: torch._C.PyTorchFileWriter("out.pt")
    except RuntimeError as error: tries["writer"] = "refused"
    print(tries)
""",
        flags="--show 1",
    ).ok()
    assert "'writer': 'refused'" in cell.stdout
    assert "'shell': 0" not in cell.stdout
    assert not (project / "out.txt").exists()
    assert not (project / "out.pt").exists()


def test_every_rank_may_write_with_writes_all(notebook: Notebook, project: Path) -> None:
    cell = ranks(
        notebook,
        "import taas, torch\nopen(f'shard-{taas.rank()}.txt', 'w').write('x')\n"
        "torch.save(taas.rank(), f'shard-{taas.rank()}.pt')",
        flags="--writes all",
    ).ok()
    names = sorted(path.name for path in project.glob("shard-*"))
    assert names == ["shard-0.pt", "shard-0.txt", "shard-1.pt", "shard-1.txt"]
    assert "left out" not in cell.output


def test_what_rank_0_writes_is_seen_by_the_others_at_once(notebook: Notebook) -> None:
    cell = ranks(
        notebook,
        """
import os, taas, torch.distributed as dist
dist.init_process_group("gloo")
seen_before = os.path.exists("fresh.txt")
dist.barrier()
if taas.rank() == 0:
    with open("fresh.txt", "w") as file: file.write("written by 0")
dist.barrier()
print(f"{seen_before} {open('fresh.txt').read()}")
""",
        flags="--show all",
    ).ok()
    assert cell.stdout.count("False written by 0") == 2


def test_making_a_directory_waits_for_rank_0(notebook: Notebook, project: Path) -> None:
    cell = ranks(
        notebook,
        """
import os, taas, torch
from pathlib import Path
os.makedirs("runs/one", exist_ok=True)
Path("runs/two").mkdir(parents=True, exist_ok=True)
torch.save(taas.rank(), "runs/one/model.pt")
print(f"{os.path.isdir('runs/one')} {os.path.isdir('runs/two')}")
""",
        flags="--show all",
    ).ok()
    assert cell.stdout.count("True True") == 2
    assert value(notebook, "torch.load('runs/one/model.pt')") == "0"
    assert (project / "runs" / "two").is_dir()


def test_temporary_files_caches_and_shared_memory_are_open_to_all(notebook: Notebook) -> None:
    cell = ranks(
        notebook,
        """
import os, taas, tempfile
from multiprocessing import shared_memory
from pathlib import Path
with tempfile.NamedTemporaryFile() as file: file.write(b"x")
with tempfile.TemporaryDirectory() as directory: Path(directory, "a").write_text("x")
cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / f"taas-test-{taas.rank()}"
cache.write_text("x"); cache.unlink()
block = shared_memory.SharedMemory(create=True, size=16); block.close(); block.unlink()
print(tempfile.gettempdir())
""",
        flags="--show all",
    ).ok()
    places = {line.removeprefix("[rank 1] ").strip() for line in cell.stdout.splitlines()}
    assert len(places) == 2  # each rank has its own


def test_rank_0_writes_as_ever(notebook: Notebook, project: Path) -> None:
    ranks(
        notebook,
        "import taas\nfrom pathlib import Path\n"
        "if taas.rank() == 0:\n    Path('log.csv').write_text('loss\\n1\\n')\n    Path('log.csv').rename('moved.csv')",
    ).ok()
    assert (project / "moved.csv").read_text() == "loss\n1\n"
