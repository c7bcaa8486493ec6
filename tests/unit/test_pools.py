"""Pools in the settings, machine lists, and which machines a run takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from taas_magic.errors import PlacementError, SettingsError
from taas_magic.machines.machine_list import Machine, MachineError, parse_machine, read_machine_list
from taas_magic.pools import find_pool, place
from taas_magic.settings import PoolSettings, RunnerAddress, Settings, load_settings

KEY = "a" * 40
RUNNER = f'{{ name = "a", address = "tcp://a:7777", key = "{KEY}" }}'


def load(directory: Path, text: str, user: str = "") -> Settings:
    (directory / "taas.toml").write_text(text)
    config = directory / "config" / "taas"
    config.mkdir(parents=True, exist_ok=True)
    (config / "config.toml").write_text(user)
    return load_settings(directory, {"XDG_CONFIG_HOME": str(directory / "config"), "HOME": str(directory)})


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        ("node1", Machine("node1")),
        ("me@node1:2222", Machine("node1", "me", 2222)),
        ("10.0.0.3 slots=4 address=10.1.0.3", Machine("10.0.0.3", None, None, 4, "10.1.0.3")),
        ("[fe80::1]:22", Machine("fe80::1", None, 22)),
    ],
)
def test_a_machine_is_read(text: str, machine: Machine) -> None:
    assert parse_machine(text) == machine


@pytest.mark.parametrize(
    "text",
    ["", "a b", "node:", "node:99999", "@node", "node slots=0", "node slots=x", "node slots", "a slots=1 slots=2"],
)
def test_what_is_no_machine_is_refused(text: str) -> None:
    with pytest.raises(MachineError):
        parse_machine(text)


def test_a_machine_list_has_comments_and_errors_a_line(tmp_path: Path) -> None:
    path = tmp_path / "machines"
    path.write_text("# ours\n\nnode1 # the first\nnode2:2222 slots=4\n")
    assert read_machine_list(path) == (Machine("node1"), Machine("node2", None, 2222, 4))
    path.write_text("node1\nnode2 slot=4\n")
    with pytest.raises(SettingsError, match=r"line 2: 'slot=4' in 'node2 slot=4'"):
        read_machine_list(path)
    path.write_text("node1\nnode2\nnode1\n")
    with pytest.raises(SettingsError, match="line 3: node1 stands in line 1 already"):
        read_machine_list(path)
    path.write_text("# nothing\n")
    with pytest.raises(SettingsError, match="names no machine"):
        read_machine_list(path)


def test_pools_are_read_and_the_projects_count_before_the_users(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("node7\n")
    settings = load(
        tmp_path,
        '[pools.g2]\nengine = "ssh"\nmachines = ["node1", "me@node2"]\ntunnel = true\n'
        '[pools.c1]\nengine = "ssh"\nmachine_list = "list"\nrole = "cpu"\n',
        '[pools.g2]\nengine = "runner"\nlease_s = 90\n'
        f'[pools.far]\nengine = "runner"\nrunners = [{{ address = "tcp://far:7777", key = "{KEY}" }}]\n',
    )
    g2 = settings.pools["g2"]
    assert (g2.name, g2.engine, g2.tunnel, g2.lease_s) == ("g2", "ssh", True, 90.0)
    assert g2.machines == (Machine("node1"), Machine("node2", "me"))
    assert settings.pools["c1"].machines == (Machine("node7"),)
    assert settings.pools["far"].runners == (RunnerAddress("far:7777", "tcp://far:7777", KEY),)


@pytest.mark.parametrize(
    ("project", "user", "host"),
    [
        ('machine_list = "list"', 'machines = ["theirs"]', "listed"),
        ('machines = ["ours"]', 'machine_list = "../../list"', "ours"),
        ("tunnel = true", 'machines = ["theirs"]', "theirs"),
    ],
)
def test_machines_of_the_project_replace_the_users_however_they_are_given(
    tmp_path: Path, project: str, user: str, host: str
) -> None:
    (tmp_path / "list").write_text("listed\n")
    settings = load(tmp_path, f"[pools.g2]\n{project}\n", f"[pools.g2]\n{user}\n")
    assert settings.pools["g2"].machines == (Machine(host),)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[pools.g2]\nengine = "slurm"\n', r'line 2: pools.g2.engine is .slurm.\nexpected: "local", "ssh" or "runner"'),
        ('[pools.g2]\nmachine = ["a"]\n', r"line 2: machine is not a key of \[pools.g2\]\n.*\nto do: write machines"),
        ('[pools.g2]\nmachines = ["a", "a"]\n', "line 2: pools.g2.machines"),
        ('[pools.g2]\nmachines = ["a b"]\n', "line 2: pools.g2.machines"),
        ("[pools]\ng2 = 3\n", "line 2: g2 is no pool"),
        ('[pools."g 2"]\n', "g 2 is no pool"),
        ("pools = 3\n", "pools is no pool"),
        ('[pools.g2]\nrunners = [{ address = "node", key = "x" }]\n', "line 2: pools.g2.runners"),
        (f"[pools.g2]\nrunners = [{RUNNER}, {RUNNER}]\n", "line 2: pools.g2.runners"),
        (f"[pools.g2]\nrunners = [{RUNNER}, {RUNNER.replace('7777', '7778')}]\n", "line 2: pools.g2.runners"),
        ('[pools.g2]\nmachines = ["a slots=²"]\n', "line 2: pools.g2.machines"),
        ('[pools.g2]\nmachines = ["a"]\nmachine_list = "list"\n', "line 3: .* has machines and machine_list"),
        ("[pools.g2]\nlease_s = 1\n", "line 2: pools.g2.lease_s"),
        ("[pools.g2]\ntunnel = 1\n", "line 2: pools.g2.tunnel"),
    ],
)
def test_what_does_not_fit_is_named_with_its_line(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(SettingsError, match=error):
        load(tmp_path, text)


def test_an_unknown_pool_is_told_which_there_are(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        '[pools.g2]\nengine = "ssh"\nmachines = ["a"]\n[pools.old]\nengine = "ray"\n[pools.no]\nengine = "ssh"\n',
    )
    assert find_pool(settings, "g2").name == "g2"
    assert find_pool(settings, "local").engine == "local"
    with pytest.raises(PlacementError, match=r"there is no pool `g3`\nexpected: g2, local, no, old\nto do: write #!g2"):
        find_pool(settings, "g3")
    with pytest.raises(SettingsError, match="engine ray, which this release does not have yet"):
        find_pool(settings, "old")
    with pytest.raises(SettingsError, match="has no machines for engine ssh"):
        find_pool(settings, "no")
    astray = load(
        tmp_path, f'[pools.a]\nengine = "ssh"\nrunners = [{RUNNER}]\n[pools.b]\nengine = "runner"\nmachines = ["a"]\n'
    )
    with pytest.raises(SettingsError, match="has no machines for engine ssh"):
        find_pool(astray, "a")
    with pytest.raises(SettingsError, match=r"for engine runner\nexpected: runners"):
        find_pool(astray, "b")
    assert find_pool(load(tmp_path, ""), "g2").engine == "local"


@pytest.mark.parametrize(
    ("gpus", "size", "has", "counts"),
    [
        (8, 8, [8, 8, 8, 8], [8, 0, 0, 0]),
        (16, 8, [8, 8, 8, 8], [8, 8, 0, 0]),
        (32, 8, [8, 8, 8, 8], [8, 8, 8, 8]),
        (3, 8, [8, 8], [3, 0]),
        (16, 8, [8, 4, 8], [8, 0, 8]),
        (12, None, [8, 0, 8], [8, 0, 4]),
        (8, 4, [8, 8], [4, 4]),
    ],
)
def test_a_run_takes_whole_machines(gpus: int, size: int | None, has: list[int], counts: list[int]) -> None:
    assert place(PoolSettings(name="g2"), gpus, size, has) == counts


def test_the_head_has_ranks() -> None:
    with pytest.raises(PlacementError, match="its first machine, the head, can hold 2 ranks, and is to have 4"):
        place(PoolSettings(name="g2"), 4, 4, [2, 8])
    with pytest.raises(PlacementError, match="the head, can hold 0 ranks"):
        place(PoolSettings(name="g2"), 4, None, [0, 8])


def test_too_few_machines_are_counted() -> None:
    pool = PoolSettings(name="g2", budget=16)
    with pytest.raises(PlacementError, match=r"--gpus 16, and pool `g2` can hold 8 now: it has 1 machine with 8 each"):
        place(pool, 16, 8, [8, 4])
    with pytest.raises(PlacementError, match="a machine that can be used"):
        place(pool, 8, 8, [0, 0])
    with pytest.raises(PlacementError, match="one run may take 16 of pool `g2`"):
        place(pool, 24, 8, [8, 8, 8])
