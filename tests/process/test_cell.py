"""A pragma cell is a cell: what it sees, what it can do, what it leaves in the notebook."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.kernel import Notebook, ranks, value, warm_notebook
from process.watch import await_condition, titled

#: What an inherited environment may hold when a notebook runs on a cluster.
CLUSTER = {
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "RANK": "7",
    "MASTER_ADDR": "elsewhere",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, private_temp: Path) -> Path:
    directory = tmp_path_factory.mktemp("project")
    (directory / "helper.py").write_text("calls = []\ndef double(x):\n    return 2 * x\n")
    (directory / "run.env").write_text("FROM_FILE=yes\nOMP_NUM_THREADS=1\n")
    return directory


@pytest.fixture(scope="module")
def notebook(project: Path, started_once: None) -> Iterator[Notebook]:
    with warm_notebook(project, CLUSTER) as notebook:
        yield notebook


@pytest.fixture(autouse=True)
def settled(notebook: Notebook) -> Iterator[None]:
    """Cells that import or change variables have a new zygote preloaded; wait until the one before it has gone."""
    yield
    zygotes = "taas: zygote (preloaded)"
    await_condition(lambda: len(titled(notebook.pid, zygotes)) <= 1, "the end of the old preloaded zygote", 30)


# ---- the cell as a text


def test_magics_shell_lines_and_await(notebook: Notebook) -> None:
    notebook.run("path = '.'").ok()
    cell = ranks(
        notebook, "import asyncio\nawait asyncio.sleep(0)\n!ls {path}\nfiles = !ls {path}\n%time total = sum(range(10))"
    )
    assert "helper.py" in cell.ok().stdout
    assert "Wall time" in cell.stdout
    assert value(notebook, "'helper.py' in files, total") == "(True, 45)"


@pytest.mark.parametrize("source", ["%%time\n#pragma taas --gpus 2\na = 5", "#pragma taas --gpus 2\n%%time\na = 5"])
def test_a_cell_magic_may_stand_before_and_after_the_pragma(notebook: Notebook, source: str) -> None:
    notebook.run("a = 0").ok()
    cell = notebook.run(source).ok()
    assert "Wall time" in cell.stdout
    assert value(notebook, "a") == "5"


def test_captured_output_comes_home(notebook: Notebook) -> None:
    cell = ranks(notebook, "%%capture caught\nprint('inside')").ok()
    assert "inside" not in cell.stdout
    assert value(notebook, "caught.stdout") == "'inside\\n'"


def test_the_last_expression_is_the_result(notebook: Notebook) -> None:
    cell = ranks(notebook, "import taas\n[taas.rank(), taas.world_size()]").ok()
    assert cell.result == "[0, 2]"
    assert value(notebook, f"_, Out[{cell.execution_count}]") == "([0, 2], [0, 2])"


def test_a_semicolon_hides_the_result(notebook: Notebook) -> None:
    assert ranks(notebook, "6 * 7;").ok().result is None
    assert ranks(notebook, "x = 6 * 7").ok().result is None


def test_display_and_figures_of_rank_0_are_shown_once(notebook: Notebook) -> None:
    cell = ranks(
        notebook, "from IPython.display import HTML, Markdown\ndisplay(HTML('<b>bold</b>'), Markdown('*m*'))"
    ).ok()
    assert [data.get("text/html") or data.get("text/markdown") for data in cell.displays] == ["<b>bold</b>", "*m*"]
    cell = ranks(notebook, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()").ok()
    pictures = [base64.b64decode(data["image/png"]) for data in cell.displays if "image/png" in data]
    assert len(pictures) == 1
    assert pictures[0].startswith(b"\x89PNG")


def test_a_display_is_updated_in_place(notebook: Notebook) -> None:
    source = "handle = display('one', display_id=True)\nhandle.update('two')"
    assert [data["text/plain"] for data in ranks(notebook, source).ok().displays] == ["'two'"]


def test_input_is_forwarded(notebook: Notebook) -> None:
    cell = notebook.run("#pragma taas --gpus 1\nname = input('who? ')", answers=["me"]).ok()
    assert cell.status == "ok"
    assert value(notebook, "name") == "'me'"


def test_the_cell_magic_is_the_same(notebook: Notebook) -> None:
    assert notebook.run("%%taas --gpus 2\nimport taas\ntaas.world_size()").ok().result == "2"


# ---- pragma errors: nothing runs


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("#pragma taas --gpu 2\nran = True", "--gpus"),
        ("#pragma taas --gpus 0\nran = True", "--gpus"),
        ("#pragma taas --gpus 2 --gpus 2\nran = True", "a second time"),
        ("ran = True\n#pragma taas --gpus 2", "first"),
        ("#pragma taas --gpus 2 --with nothing_such\nran = True", "nothing_such"),
    ],
)
def test_a_wrong_pragma_is_an_error_and_nothing_runs(notebook: Notebook, source: str, said: str) -> None:
    notebook.run("ran = False").ok()
    cell = notebook.run(source)
    assert cell.status == "error"
    assert said in cell.traceback_text
    assert value(notebook, "ran") == "False"


def test_a_syntax_error_is_one_and_nothing_runs(notebook: Notebook) -> None:
    notebook.run("ran = False").ok()
    cell = ranks(notebook, "ran = True\nx = = 1")
    assert cell.error_name == "SyntaxError"
    assert "x = = 1" in cell.traceback_text
    assert value(notebook, "ran") == "False"


# ---- what ranks are


def test_ranks_have_the_whole_contract_of_torchrun_and_nothing_stale(notebook: Notebook) -> None:
    ranks(
        notebook,
        """
import os, sys, torch.distributed as dist
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
         "TORCHELASTIC_RESTART_COUNT",
         "TORCHELASTIC_MAX_RESTARTS"]
mine = {name: os.environ.get(name) for name in names}
dist.init_process_group("nccl", init_method="env://")
contract = [None, None]
dist.all_gather_object(contract, mine)
stale = [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]
interactive = hasattr(sys, "ps1"), bool(sys.flags.interactive), __name__
""",
    ).ok()
    assert value(notebook, "[c['RANK'] + c['LOCAL_RANK'] for c in contract]") == "['00', '11']"
    assert value(notebook, "[name for name in names if not contract[1][name]]") == "[]"
    assert (
        value(notebook, "{c['WORLD_SIZE'] + c['LOCAL_WORLD_SIZE'] + c['ROLE_WORLD_SIZE'] for c in contract}")
        == "{'222'}"
    )
    assert (
        value(notebook, "len({(c['MASTER_ADDR'], c['MASTER_PORT'], c['TORCHELASTIC_RUN_ID']) for c in contract})")
        == "1"
    )
    assert value(notebook, "contract[0]['MASTER_ADDR'] == 'elsewhere', stale") == "(False, [])"
    assert value(notebook, "interactive") == "(False, False, '__main__')"


def test_taas_answers_in_ranks_and_in_the_notebook(notebook: Notebook) -> None:
    source = "import taas\nanswer = taas.rank(), taas.world_size(), str(taas.device())"
    cell = ranks(notebook, source + "\nprint(f'{taas.rank()} of {taas.world_size()}')", flags="--show all").ok()
    assert "0 of 2" in cell.stdout
    assert "1 of 2" in cell.stdout
    assert value(notebook, "answer") == "(0, 2, 'cpu')"
    notebook.run(source).ok()
    assert value(notebook, "answer") == "(0, 1, 'cpu')"


def test_the_rehearsal_is_announced_once_a_run(notebook: Notebook) -> None:
    cell = ranks(notebook, "import torch.distributed as dist\ndist.init_process_group('nccl')").ok()
    assert cell.output.count("rehearsing") == 1


# ---- what the cell sees


def test_functions_and_cell_share_one_namespace(notebook: Notebook) -> None:
    notebook.run(
        "step, log = 0, []\nalias = log\n"
        "def advance():\n    global step\n    step += 1\n    note()\n"
        "def note(): log.append(step)"
    ).ok()
    ranks(notebook, "advance(); advance(); step += 10; advance(); seen = step").ok()
    assert value(notebook, "step, seen, alias is log, log") == "(13, 13, True, [1, 2, 13])"


def test_modules_of_the_project(notebook: Notebook) -> None:
    notebook.run("def use(x):\n    import helper\n    return helper.double(x)").ok()
    assert ranks(notebook, "import helper\nuse(2) + helper.double(1)").ok().result == "6"


def test_directory_path_and_environment_hold(notebook: Notebook, project: Path) -> None:
    (project / "sub").mkdir(exist_ok=True)
    notebook.run("import os, sys\nos.chdir('sub'); sys.path.insert(0, '/nowhere/lib'); os.environ['MINE'] = 'x'").ok()
    source = (
        "import os, sys\n"
        "found = os.path.basename(os.getcwd()), sys.path[0], os.environ['MINE'], os.environ.get('FROM_FILE')"
    )
    ranks(notebook, source).ok()
    assert value(notebook, "found") == "('sub', '/nowhere/lib', 'x', None)"
    notebook.run("os.chdir('..'); sys.path.pop(0); del os.environ['MINE']").ok()
    ranks(notebook, source.replace("environ['MINE']", "environ.get('MINE')"), flags="--env-file run.env").ok()
    assert value(notebook, "found[2:]") == "(None, 'yes')"


def test_random_states_are_the_notebooks_and_come_home(notebook: Notebook) -> None:
    seeds = "import random, numpy as np, torch\nrandom.seed(5); np.random.seed(5); torch.manual_seed(5)"
    draw = "[random.random(), float(np.random.rand()), torch.rand(1).item()]"
    notebook.run(f"{seeds}\nexpected = {draw} + {draw}\n{seeds}").ok()
    ranks(notebook, f"import random, numpy as np, torch\ngot = {draw}").ok()
    assert value(notebook, f"got + {draw} == expected") == "True"


def test_a_name_that_is_reached_dynamically_is_hinted_at(notebook: Notebook) -> None:
    notebook.run("hidden_value = 41").ok()
    source = "name = 'hidden_' + 'value'\nfound = eval(name) + 1"
    cell = ranks(notebook, source)
    assert cell.error_name == "NameError"
    assert "--with hidden_value" in cell.traceback_text
    ranks(notebook, source, flags="--with hidden_value").ok()
    assert value(notebook, "found") == "42"


def test_what_cannot_travel_is_said_before_anything_starts(notebook: Notebook) -> None:
    notebook.run(
        "class Data:\n    def __init__(self): self._file = open('helper.py')\n"
        "class Loader:\n    def __init__(self): self.dataset = Data()\n"
        "loader = Loader(); ran = False"
    ).ok()
    cell = ranks(notebook, "ran = True\nfor batch in loader: pass")
    assert cell.error_name == "CannotTravelError"
    assert "loader.dataset._file" in cell.traceback_text
    assert "_io.TextIOWrapper" in cell.traceback_text
    assert value(notebook, "ran") == "False"
    ranks(notebook, "ran = True").ok()  # a bystander now
    assert value(notebook, "ran") == "True"
    notebook.run("loader.dataset._file.close(); del loader").ok()


# ---- what comes home


def test_a_trained_model_is_in_the_notebook(notebook: Notebook) -> None:
    notebook.run(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "before = model.weight.detach().clone(); held, weight = model, model.weight"
    ).ok()
    cell = ranks(
        notebook,
        """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
wrapped = DistributedDataParallel(model)
for _ in range(2):
    optimizer.zero_grad()
    wrapped(torch.full((4, 2), 1.0 + dist.get_rank())).pow(2).mean().backward()
    optimizer.step()
sums = [torch.zeros(1) for _ in range(2)]
dist.all_gather(sums, model.weight.detach().sum().reshape(1))
""",
    ).ok()
    assert value(notebook, "bool(sums[0] == sums[1]), bool((model.weight != before).all())") == "(True, True)"
    assert (
        value(notebook, "model is held and model.weight is weight and optimizer.param_groups[0]['params'][0] is weight")
        == "True"
    )
    assert value(notebook, "wrapped is model") == "True"
    assert "`wrapped` came home as the module inside" in cell.output


def test_what_a_failing_cell_had_done_comes_home(notebook: Notebook) -> None:
    notebook.run("losses = []; alias = losses").ok()
    cell = ranks(
        notebook, "for epoch in range(3):\n    losses.append(epoch)\n    if epoch == 1: raise RuntimeError('diverged')"
    )
    assert cell.error_name == "RuntimeError"
    assert value(notebook, "alias, epoch") == "([0, 1], 1)"


def test_what_cannot_come_home_is_said_and_the_rest_comes(notebook: Notebook) -> None:
    notebook.run("lock, table = 'old', {}").ok()
    cell = ranks(notebook, "import threading\nlock = threading.Lock(); table['ok'] = 1; table['lock'] = lock").ok()
    assert "table['lock'], lock: cannot pickle" in cell.output
    assert value(notebook, "lock, table") == "('old', {'ok': 1})"


# ---- with and without the extension


def test_the_pragma_is_a_comment_until_the_cell_that_loads_the_extension(project: Path) -> None:
    with Notebook(project) as notebook:
        source = "#!g2.8\n#pragma taas --gpus 2\nimport taas\nbefore = taas.world_size()\nbefore"
        assert notebook.run(source).ok().result == "1"
        cell = notebook.run(f"%load_ext taas_magic\n{source}", timeout=120)
        assert cell.ok().result == "2"
        assert notebook.run(source).ok().result == "2"
        notebook.run("%unload_ext taas_magic").ok()
        assert notebook.run(source).ok().result == "1"


def test_the_values_of_all_ranks_come_as_a_list(notebook: Notebook) -> None:
    cell = ranks(notebook, "import taas, torch\n(taas.rank(), torch.ones(2) * taas.rank())", 3, "--rank-results").ok()
    assert cell.result is not None
    assert cell.result.replace("\n", "").startswith("[(0, tensor([0., 0.])), (1, tensor([1., 1.]))")
    assert value(notebook, "[rank for rank, _ in _], _[2][1].tolist()") == "([0, 1, 2], [2.0, 2.0])"


def test_a_value_that_cannot_travel_is_an_error_in_its_place(notebook: Notebook) -> None:
    source = "import taas, threading\nthreading.Lock() if taas.rank() == 1 else taas.rank()"
    ranks(notebook, source, 3, "--rank-results").ok()
    assert (
        value(notebook, "_[0], type(_[1]).__name__, 'rank 1' in str(_[1]), _[2]") == "(0, 'CannotTravelError', True, 2)"
    )
