"""The same cell on other machines: three hosts in namespaces of their own, to which a notebook gets by ssh."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import leaks
import pytest
from hosts import Hosts, three_hosts
from process.kernel import Notebook, value
from process.watch import await_condition

__all__ = ["three_hosts"]

pytestmark = pytest.mark.module_leak_check

GONE_S = 15.0
DEFINITIONS = """
import os, socket, time
import torch
import torch.distributed as dist
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
def everywhere(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
"""
THREE = "#!g2.2\n#pragma taas --gpus 6"
JOIN = "dist.init_process_group('nccl', init_method='env://')\n"


def write_settings(project: Path, hosts: Hosts, **changes: str) -> None:
    pool = {
        "engine": '"ssh"',
        "machines": str(list(hosts.names)).replace("'", '"'),
        "gpus": "2",
        "ssh_config": f'"{hosts.ssh_config}"',
        "python": f'"{sys.executable}"',
        **changes,
    }
    (project / "taas.toml").write_text("\n".join(["[pools.g2]", *(f"{key} = {text}" for key, text in pool.items())]))


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "XDG_STATE_HOME": str(home / ".state")}


def of_taas(hosts: Hosts) -> dict[str, list[str]]:
    """What runs on the hosts that a notebook has started, by their titles."""
    found = {}
    for name in hosts.names:
        titles = []
        for pid in hosts.pids(name):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_text().strip("\0").replace("\0", " ")
            except OSError:
                continue
            if title.startswith("taas:") or "-m taas_magic" in title:
                titles.append(f"{pid} {title}")
        found[name] = titles
    return found


def await_nothing_beyond(hosts: Hosts, before: dict[str, list[str]]) -> None:
    """Wait until nothing runs on the hosts but what did before."""

    def is_gone() -> bool:
        return all(set(titles) <= set(before[name]) for name, titles in of_taas(hosts).items())

    try:
        await_condition(is_gone, "the end of what was started on the hosts", GONE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; left: {of_taas(hosts)}, of which before: {before}") from None


@pytest.fixture(scope="module", autouse=True)
def nothing_left(three_hosts: Hosts, private_temp: Path, started_once: None) -> Iterator[None]:
    """The leak check of all tests here: a notebook's runners stay from one to the next."""
    before = leaks.Snapshot.take()
    yield
    left = leaks.wait_until_gone(before)
    assert not left, "\n".join(left)


@pytest.fixture(scope="module")
def notebook(three_hosts: Hosts, tmp_path_factory: pytest.TempPathFactory, nothing_left: None) -> Iterator[Notebook]:
    project, home = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("home")
    write_settings(project, three_hosts)
    with Notebook(project, environment(home), extension=True) as opened:
        opened.run(DEFINITIONS).ok()
        yield opened
    await_nothing_beyond(three_hosts, {name: [] for name in three_hosts.names})


def test_a_cell_runs_on_three_machines_and_its_work_comes_home(notebook: Notebook, three_hosts: Hosts) -> None:
    notebook.run("model = Net()\nmodel.weight.data.fill_(1)\nalias = model\nseen = []").ok()
    cell = notebook.run(
        f"{THREE}\n{JOIN}"
        """
seen.append(everywhere((socket.gethostname(), int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"]))))
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
model.weight.data += total
print("done on", dist.get_world_size())
total.item()
"""
    ).ok()
    assert cell.stdout == "done on 6\n"
    assert cell.result == "15.0"
    assert "on g2: host0 (2), host1 (2), host2 (2)" in cell.stderr
    assert value(notebook, "alias is model and model.weight[0, 0].item()") == "16.0"
    places = [(name, local, place) for place, name in enumerate(three_hosts.names) for local in range(2)]
    assert value(notebook, f"seen == {[places]}") == "True"


def test_one_machine_is_taken_where_it_is_enough(notebook: Notebook) -> None:
    cell = notebook.run("#!g2.2\n#pragma taas --gpus 2 --rank-results\nsocket.gethostname()").ok()
    assert cell.result == "['host0', 'host0']"


def test_an_exception_on_another_machine_is_raised_here(notebook: Notebook) -> None:
    cell = notebook.run(
        f"{THREE}\nprint('begun')\nif os.environ['RANK'] == '5':\n    raise KeyError('on ' + socket.gethostname())"
    )
    assert cell.error_name == "KeyError"
    assert "[rank 5] of 6 failed" in cell.traceback_text
    assert "raise KeyError('on ' + socket.gethostname())" in cell.traceback_text
    assert "on host2" in cell.error_value


def test_ranks_stay_on_three_machines(notebook: Notebook) -> None:
    notebook.run(f"{THREE} --keep\n{JOIN}counter = dist.get_rank()").ok()
    notebook.run("#pragma taas --gpus 6\ncounter += 10").ok()
    assert notebook.run("%taas pull counter --rank all").ok().result == "[10, 11, 12, 13, 14, 15]"
    notebook.run("weights = torch.arange(3.)\n%taas push weights").ok()
    assert notebook.run("%taas pull weights.sum().item() --rank 4").output
    notebook.run("%taas release").ok()


def test_a_cell_is_stopped_on_all_machines(notebook: Notebook, three_hosts: Hosts) -> None:
    notebook.start(f"{THREE}\nkept = 'before'\nprint('sleeping', flush=True)\ntime.sleep(600)")
    notebook.wait_for_output("sleeping")
    notebook.interrupt()
    cell = notebook.wait(30)
    assert cell.error_name == "KeyboardInterrupt"
    assert value(notebook, "kept") == "'before'"
    await_condition(
        lambda: not any("rank" in title for titles in of_taas(three_hosts).values() for title in titles),
        "the end of the ranks",
        GONE_S,
    )


def test_the_projects_modules_travel_and_what_rank_0_writes_comes_home(notebook: Notebook) -> None:
    project = notebook.directory
    (project / "mine").mkdir()
    (project / "mine" / "__init__.py").write_text("def answer(): return 41\n")
    (project / "data.txt").write_text("some data")
    notebook.run("import mine").ok()
    source = f"{THREE} --rank-results\nimport mine\n(mine.answer(), open('data.txt').read())"
    notebook.run(source).ok()
    assert value(notebook, "_ == [(41, 'some data')] * 6") == "True"
    (project / "mine" / "__init__.py").write_text("def answer(): return 42\n")
    assert notebook.run(f"{THREE} --rank-results\nimport mine\nmine.answer()").ok().result == repr([42] * 6)
    cell = notebook.run(f"""{THREE} --show all
import pathlib
if os.environ["RANK"] == "0":
    pathlib.Path("out").mkdir(exist_ok=True)
    torch.save(torch.arange(5), "out/weights.pt")
try:
    open("by_" + os.environ["RANK"], "w").write("x")
except PermissionError:
    print("refused")
""").ok()
    assert cell.stdout.count("refused") == 5
    assert value(notebook, "torch.load('out/weights.pt').tolist()") == "[0, 1, 2, 3, 4]"
    assert sorted(path.name for path in project.glob("by_*")) == ["by_0"]


def test_a_file_that_was_changed_here_meanwhile_is_kept(notebook: Notebook) -> None:
    project = notebook.directory
    (project / "notes.txt").write_text("first")
    notebook.start(f"""{THREE}
open("notes.txt", "a").write(" and more") if os.environ["RANK"] == "0" else None
print("written", flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
    if os.environ["RANK"] != "0": break
    open("go", "w").close()
""")
    notebook.wait_for_output("written")
    (project / "notes.txt").write_text("changed here")
    cell = notebook.wait(60).ok()
    assert (project / "notes.txt").read_text() == "changed here"
    (beside,) = project.glob("notes.from-run-*.txt")
    assert beside.read_text() == "first and more"
    assert "notes.txt was changed here, too" in cell.stderr


def test_what_is_large_is_sent_once(notebook: Notebook) -> None:
    notebook.run("large = torch.ones(8, 2**20)").ok()
    for number in range(2):
        cell = notebook.run(f"{THREE} --rank-results\nlarge.sum().item() + {number}").ok()
        assert cell.result == repr([8 * 2**20 + number + 0.0] * 6)
    notebook.run("large[0] = 2").ok()
    cell = notebook.run(f"{THREE} --rank-results\nlarge.sum().item()").ok()
    assert cell.result == repr([9 * 2**20 + 0.0] * 6)


def test_a_machine_that_is_lost_ends_the_cell_and_is_named(notebook: Notebook, three_hosts: Hosts) -> None:
    notebook.start(f"{THREE}\nprint('sleeping', flush=True)\ntime.sleep(600)")
    notebook.wait_for_output("sleeping")
    for title in of_taas(three_hosts)["host1"]:
        os.kill(int(title.split()[0]), signal.SIGKILL)
    # 8 s of silence, and then what it takes; twice that is for a machine that is busy.
    cell = notebook.wait(20)
    assert cell.status == "error"
    assert "host1" in cell.output
    # It is started anew for the next cell.
    assert notebook.run(f"{THREE} --rank-results\nsocket.gethostname()").ok().result == repr(
        ["host0", "host0", "host1", "host1", "host2", "host2"]
    )


def test_a_cable_may_be_out_for_a_while(notebook: Notebook, three_hosts: Hosts) -> None:
    notebook.start(f"{THREE} --show all\nprint('sleeping', flush=True)\ntime.sleep(7)\nprint('awake')\nanswer = 7")
    notebook.wait_for_output("sleeping")
    three_hosts.cut("host1")
    try:
        time.sleep(5)  # as long as the cable is out
    finally:
        three_hosts.restore("host1")
    cell = notebook.wait(40).ok()
    assert cell.stdout.count("awake") == 6
    assert value(notebook, "answer") == "7"


def test_a_machine_that_is_cut_off_is_lost(notebook: Notebook, three_hosts: Hosts) -> None:
    notebook.start(f"{THREE}\nprint('sleeping', flush=True)\ntime.sleep(600)")
    notebook.wait_for_output("sleeping")
    three_hosts.cut("host2")
    try:
        cell = notebook.wait(20)
        assert cell.status == "error"
        assert "host2" in cell.output
        assert cell.seconds < 600
    finally:
        three_hosts.restore("host2")


def test_too_many_gpus_are_counted(notebook: Notebook) -> None:
    cell = notebook.run("#!g2.2\n#pragma taas --gpus 8\n1")
    assert cell.error_name == "PlacementError"
    assert "--gpus 8, and pool `g2` can hold 6" in cell.error_value
    cell = notebook.run("#!g3.2\n#pragma taas --gpus 8\n1")
    assert cell.error_name == "PlacementError"
    assert "there is no pool `g3`" in cell.error_value
    assert "g2, local" in cell.error_value


def test_a_machine_that_cannot_be_reached_is_named_and_the_others_go_on(
    three_hosts: Hosts, tmp_path: Path, private_temp: Path
) -> None:
    before = of_taas(three_hosts)
    write_settings(tmp_path, three_hosts, machines='["host0", "nowhere", "host2"]')
    (tmp_path / "home").mkdir()
    with Notebook(tmp_path, environment(tmp_path / "home"), extension=True) as notebook:
        cell = notebook.run("#!g2.2\n#pragma taas --gpus 4 --rank-results\nimport socket\nsocket.gethostname()").ok()
        assert cell.result == "['host0', 'host0', 'host2', 'host2']"
        cell = notebook.run("#!g2.2\n#pragma taas --gpus 6\n1")
        assert cell.error_name == "PlacementError"
        assert "nowhere" in cell.output
        assert "resolve" in cell.output
    await_nothing_beyond(three_hosts, before)


def test_through_a_tunnel_and_when_the_kernel_dies(three_hosts: Hosts, tmp_path: Path, private_temp: Path) -> None:
    before = of_taas(three_hosts)
    write_settings(tmp_path, three_hosts, machines='["host0"]', tunnel="true")
    (tmp_path / "home").mkdir()
    with Notebook(tmp_path, environment(tmp_path / "home"), extension=True) as notebook:
        cell = notebook.run("#!g2.2\n#pragma taas --gpus 2 --rank-results\nimport socket\nsocket.gethostname()").ok()
        assert cell.result == "['host0', 'host0']"
        notebook.start("#!g2.2\n#pragma taas --gpus 2\nimport time\nprint('sleeping', flush=True)\ntime.sleep(600)")
        notebook.wait_for_output("sleeping")
        os.kill(notebook.pid, signal.SIGKILL)
        await_nothing_beyond(three_hosts, before)


def test_a_run_on_three_machines_goes_on_alone(three_hosts: Hosts, tmp_path: Path, private_temp: Path) -> None:
    before = of_taas(three_hosts)
    write_settings(tmp_path, three_hosts)
    (tmp_path / "home").mkdir()
    source = """
import socket, time, torch.distributed as dist
dist.init_process_group("nccl")
time.sleep(3)
hosts = [None] * 6
dist.all_gather_object(hosts, socket.gethostname())
print("together")
"""
    with Notebook(tmp_path, environment(tmp_path / "home"), extension=True) as notebook:
        assert "goes on without this notebook" in notebook.run(f"{THREE} --detach\n{source}").ok().stderr
    with Notebook(tmp_path, environment(tmp_path / "home"), extension=True) as notebook:
        assert notebook.run("%taas attach", timeout=60).ok().stdout == "together\n"
        assert value(notebook, "hosts") == repr([name for name in three_hosts.names for _ in range(2)])
    await_nothing_beyond(three_hosts, before)


def test_a_machine_list_says_how_many_ranks_and_by_which_address(three_hosts: Hosts, tmp_path: Path) -> None:
    before = of_taas(three_hosts)
    listed = tmp_path / "machines.txt"
    listed.write_text(f"# ours\nhost1 slots=1 address={three_hosts.address('host1')}\nhost2\n")
    write_settings(tmp_path, three_hosts, machine_list='"machines.txt"')
    lines = (tmp_path / "taas.toml").read_text().splitlines()
    (tmp_path / "taas.toml").write_text("\n".join(line for line in lines if not line.startswith("machines =")))
    (tmp_path / "home").mkdir()
    with Notebook(tmp_path, environment(tmp_path / "home"), extension=True) as notebook:
        notebook.run("import os, socket").ok()
        source = "#!g2.1\n#pragma taas --gpus 2 --rank-results\n(socket.gethostname(), os.environ['MASTER_ADDR'])"
        found = notebook.run(source).ok().result
        assert found == repr([("host1", three_hosts.address("host1")), ("host2", three_hosts.address("host1"))])
        cell = notebook.run("#!g2.2\n#pragma taas --gpus 2\n1")
        assert "its first machine, the head, can hold 1 rank, and is to have 2" in cell.error_value
    await_nothing_beyond(three_hosts, before)
