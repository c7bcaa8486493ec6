"""The hosts that other tests run on: that they are what those tests take them for, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from hosts import CannotShapeError, Hosts
from process.watch import await_condition, await_gone

#: A fixture is found by its name in the module.
three_hosts = hosts.three_hosts
SENT_BYTES = 1_000_000


def run(made: Hosts, host: str, *argv: str) -> str:
    with made.exec(host, argv, stdout=subprocess.PIPE) as process:
        assert process.stdout
        return process.stdout.read().decode()


def answers(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=1) as connection:
        return connection.recv(4) == b"SSH-"
    return False


def belongings(pid: int) -> list[str]:
    """What the hosts of a process have outside of it."""
    places = [Path(place) for place in ("/run/netns", "/etc/netns", "/sys/class/net", hosts.PLACE)]
    return [str(path) for place in places if place.exists() for path in place.iterdir() if f"taas{pid}x" in path.name]


def test_each_has_a_name_and_an_address_and_knows_the_others(three_hosts: Hosts) -> None:
    for name in three_hosts.names:
        assert run(three_hosts, name, "hostname").strip() == name
        assert three_hosts.address(name) in run(three_hosts, name, "ip", "-brief", "address")
        assert f"{three_hosts.address('host2')} host2" in run(three_hosts, name, "cat", "/etc/hosts")


def test_they_see_each_other_and_the_notebook(three_hosts: Hosts) -> None:
    with socket.create_server((three_hosts.notebook_address, 0)) as server:
        connect = f"import socket; socket.create_connection({server.getsockname()!r}).close()"
        run(three_hosts, "host1", sys.executable, "-c", connect)
        server.settimeout(10)
        connection, (address, _) = server.accept()
        connection.close()
    assert address == three_hosts.address("host1")
    reads = "import socket; print(socket.create_connection(('host2', 22)).recv(3))"
    assert "SSH" in run(three_hosts, "host1", sys.executable, "-c", reads)


def test_a_cut_host_does_not_answer_until_it_is_restored(three_hosts: Hosts) -> None:
    three_hosts.cut("host1")
    try:
        assert not answers(three_hosts.address("host1"))
        assert answers(three_hosts.address("host2"))
    finally:
        three_hosts.restore("host1")
    await_condition(lambda: answers(three_hosts.address("host1")), "the host to be back")


def test_shaped_cables_are_slow(three_hosts: Hosts) -> None:
    try:
        three_hosts.shape(10)
    except CannotShapeError as error:
        pytest.skip(str(error))
    try:
        slow_s = seconds_to_send(three_hosts)
    finally:
        three_hosts.unshape()
    assert slow_s > 0.6 * SENT_BYTES * 8 / 10e6  # a first burst passes unhindered
    assert seconds_to_send(three_hosts) < slow_s / 2


def seconds_to_send(made: Hosts) -> float:
    sends = f"import socket; socket.create_connection(('{made.notebook_address}', %d)).sendall(bytes({SENT_BYTES}))"
    with socket.create_server((made.notebook_address, 0)) as server:
        server.settimeout(10)
        with made.exec("host1", [sys.executable, "-c", sends % server.getsockname()[1]]):
            connection, _ = server.accept()
            began = time.monotonic()
            while connection.recv(65536):
                pass
            connection.close()
    return time.monotonic() - began


@pytest.fixture(scope="module")
def behind_bastion() -> Iterator[Hosts]:
    with hosts.hosts(3, bastion=True) as made:
        yield made


def test_behind_a_bastion_they_are_reached_through_it_only(behind_bastion: Hosts) -> None:
    assert answers(behind_bastion.address("host0"))
    assert not answers(behind_bastion.address("host1"))
    reads = "import socket; print(socket.create_connection(('host1', 22)).recv(3))"
    assert "SSH" in run(behind_bastion, "host0", sys.executable, "-c", reads)
    assert "SSH" in run(behind_bastion, "host2", sys.executable, "-c", reads)
    command = ["ssh", "-F", str(behind_bastion.ssh_config), "host1", "hostname"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "host1"


def test_nothing_stays_and_nothing_runs_on_after_a_failure() -> None:
    before = belongings(os.getpid())
    processes = []

    def fail() -> None:
        with hosts.hosts(2) as made:
            processes.append(made.exec("host1", ["sleep", "60"]))
            assert len(belongings(os.getpid())) > len(before)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert processes[0].poll() is not None
    assert belongings(os.getpid()) == before


MAKES_HOSTS = """
import sys
from hosts import hosts
with hosts(2) as made:
    made.exec("host1", ["sleep", "60"])
    print(*made.pids("host0"), *made.pids("host1"), flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_run_has_left_goes_with_the_next() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", MAKES_HOSTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as killed:
        assert killed.stdout
        pids = [int(pid) for pid in killed.stdout.readline().split()]
        assert pids
        killed.kill()
    assert belongings(killed.pid)
    with hosts.hosts(1):
        assert not belongings(killed.pid)
        await_gone(pids, 10)
