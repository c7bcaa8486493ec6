"""Processes on other machines, over real sshds: how they start and end, what they say, and why they do not start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import hosts
import pytest
from hosts import Hosts
from process.watch import await_condition, await_gone, is_alive

from taas_magic.machines.ssh import RemoteProcess, SshOptions, start, start_all
from taas_magic.machines.ssh_failures import MachineStartError

#: A fixture is found by its name in the module.
three_hosts = hosts.three_hosts
SOON_S = 45.0

#: In place of a runner: answers, keeps a log, echoes what comes over its socket, and ends when its stdin does.
STAND_IN = r"""
import json, os, shutil, socket, sys, threading

def echo(server):
    while True:
        connection = server.accept()[0]
        connection.sendall(connection.recv(100))
        connection.close()

order = json.loads(sys.stdin.readline())
answer = {"marker": order["marker"], "pid": os.getpid(), "host": socket.gethostname(), "order": order}
directory = os.path.dirname(order.get("listen", "").removeprefix("ipc://"))
if directory:
    os.mkdir(directory, 0o700)
    server = socket.socket(socket.AF_UNIX)
    server.bind(order["listen"].removeprefix("ipc://"))
    server.listen()
    threading.Thread(target=echo, args=[server], daemon=True).start()
print(json.dumps(answer), flush=True)
print("said on stdout", flush=True)
print("said on stderr", file=sys.stderr, flush=True)
sys.stdin.read()
if directory:
    shutil.rmtree(directory)
"""
#: Notes that it is there, and never answers.
SILENT = r"""
import os, sys
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
print("thinking", flush=True)
sys.stdin.read()
"""
STANDS_IN = (sys.executable, "-c", STAND_IN)


@dataclass(frozen=True)
class Machine:
    """A machine of a list."""

    host: str
    user: str | None = None
    port: int | None = None

    @property
    def name(self) -> str:
        return f"the {self.host}"


@pytest.fixture
def options(three_hosts: Hosts) -> SshOptions:
    return SshOptions(config_file=three_hosts.ssh_config, command=STANDS_IN)


@contextlib.contextmanager
def started(host: str, options: SshOptions) -> Iterator[RemoteProcess]:
    process = start(Machine(host), {"what": "to do"}, options=options, timeout_s=SOON_S)
    try:
        yield process
    finally:
        process.close()


def failure(machine: Machine, options: SshOptions, timeout_s: float = SOON_S) -> str:
    """The text of the error that starting ends with."""
    with pytest.raises(MachineStartError) as caught:
        start(machine, {}, options=options, timeout_s=timeout_s)
    text = str(caught.value)
    assert text.startswith(f"machine {machine.name!r}: ")
    assert "\nto do: " in text
    return text


def with_configuration(
    options: SshOptions, path: Path, *, before: str = "", swap: tuple[str, str] = ("", "")
) -> SshOptions:
    """Options whose ssh configuration begins with other lines, or has something exchanged."""
    assert options.config_file
    text = options.config_file.read_text()
    path.write_text(before + (text.replace(*swap) if swap[0] else text))
    return replace(options, config_file=path)


# -- what starts -------------------------------------------------------------------------------------------------------


def test_it_starts_there_and_answers(three_hosts: Hosts, options: SshOptions) -> None:
    with started("host1", options) as process:
        assert process.answer["host"] == "host1"
        assert process.answer["order"]["what"] == "to do"
        assert process.answer["pid"] in three_hosts.pids("host1")
        assert "marker" not in process.answer
        assert process.is_alive
        assert process.local_address is None


def test_what_both_streams_say_is_the_log(options: SshOptions) -> None:
    with started("host1", options) as process:
        await_condition(lambda: {"said on stdout", "said on stderr"} <= set(process.log_tail().splitlines()), "the log")
        assert len(process.log_tail(1).splitlines()) == 1


def test_what_a_login_prints_is_no_answer(options: SshOptions) -> None:
    banner = ("sh", "-c", 'echo "{Welcome}"; echo; printf "ready> "; exec "$@"', "sh", *STANDS_IN)
    with started("host1", replace(options, command=banner)) as process:
        assert process.answer["host"] == "host1"
        assert process.log_tail().splitlines()[:2] == ["{Welcome}", "ready>"]


def test_a_login_that_echoes_has_not_answered(options: SshOptions) -> None:
    echo = 'read -r order; echo "$order"; echo "$order" | exec "$@"'
    with started("host1", replace(options, command=("sh", "-c", echo, "sh", *STANDS_IN))) as process:
        assert process.answer["host"] == "host1"


def test_settings_that_are_for_terminals_do_not_matter(three_hosts: Hosts, options: SshOptions, tmp_path: Path) -> None:
    control = three_hosts["host1"].directory / "control"  # a socket's path, which is to be short
    configuration = f"RemoteCommand top\nRequestTTY yes\nControlMaster auto\nControlPath {control}\nControlPersist 60\n"
    with started("host1", with_configuration(options, tmp_path / "config", before=configuration)) as process:
        assert process.answer["host"] == "host1"
        assert not control.exists()


def test_a_tunnel_carries_connections_to_its_socket(options: SshOptions) -> None:
    with started("host1", replace(options, tunnel=True)) as process:
        there = Path(process.answer["order"]["listen"].removeprefix("ipc://"))
        assert len(str(there)) <= 100
        assert stat.S_IMODE(there.parent.stat().st_mode) == 0o700
        assert process.local_address is not None
        here = Path(process.local_address.removeprefix("ipc://"))
        assert here != there
        assert stat.S_IMODE(here.parent.stat().st_mode) == 0o700
        assert echoed(here, b"through") == b"through"
    assert not here.parent.exists()
    await_condition(lambda: not there.parent.exists(), "the end of the socket there")


def test_a_shared_connection_is_used(three_hosts: Hosts, options: SshOptions, tmp_path: Path) -> None:
    control = tmp_path / "control"
    shared = with_configuration(options, tmp_path / "config", before=f"ControlPath {control}\n")
    with subprocess.Popen(["ssh", "-F", str(three_hosts.ssh_config), "-MNS", str(control), "host1"]) as master:
        await_condition(control.exists, "the shared connection", SOON_S)
        connections = three_hosts.sshd_log("host1").count("Accepted publickey")
        with started("host1", replace(shared, tunnel=True)) as process:
            assert process.local_address is not None
            assert echoed(Path(process.local_address.removeprefix("ipc://")), b"through") == b"through"
        assert three_hosts.sshd_log("host1").count("Accepted publickey") == connections
        await_gone([process.answer["pid"]], SOON_S)
        master.terminate()


def echoed(path: Path, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SOON_S)
        connection.connect(str(path))
        connection.sendall(data)
        return connection.recv(100)


def test_this_machine_needs_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with started("localhost", SshOptions(command=STANDS_IN, tunnel=True)) as process:
        assert process.answer["pid"] == process.pid
        assert process.local_address == process.answer["order"]["listen"]
    assert not is_alive(process.pid)


# -- what ends ---------------------------------------------------------------------------------------------------------


def test_closing_ends_it(options: SshOptions) -> None:
    with started("host1", options) as process:
        process.close()
        await_gone([process.answer["pid"]], SOON_S)
        assert not process.is_alive
        assert process.exit_code == 0  # it has seen the end of its input, and was not broken off
        process.close()


def test_what_does_not_end_by_itself_is_broken_off(options: SshOptions) -> None:
    stubborn = ("sh", "-c", '"$@"; while sleep 0.1; do echo "not yet"; done', "sh", *STANDS_IN)
    with started("host1", replace(options, command=stubborn)) as process:
        process.close(grace_s=0.5)
        assert not process.is_alive
        assert process.exit_code != 0


def test_it_ends_when_ssh_is_killed(options: SshOptions) -> None:
    with started("host1", options) as process:
        os.kill(process.pid, signal.SIGKILL)
        await_gone([process.answer["pid"]], SOON_S)
        assert process.exit_code == -signal.SIGKILL


def test_it_ends_when_it_is_forgotten(options: SshOptions) -> None:
    process = start(Machine("host1"), {}, options=options, timeout_s=SOON_S)
    pid = process.answer["pid"]
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        del process
    await_gone([pid], SOON_S)


def test_a_fork_of_the_notebook_does_not_keep_it(options: SshOptions) -> None:
    reading, writing = os.pipe()
    with started("host1", options) as process:
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        process.close()
        assert process.exit_code == 0
    os.close(reading)
    os.close(writing)
    os.waitpid(child, 0)


STARTS_AND_WAITS = """
import sys
from pathlib import Path
from process.test_ssh import Machine, STANDS_IN
from taas_magic.machines.ssh import SshOptions, start

options = SshOptions(config_file=Path(sys.argv[1]), command=STANDS_IN)
print(start(Machine("host1"), {}, options=options, timeout_s=20).answer["pid"], flush=True)
sys.stdin.read()
"""


def test_it_ends_when_the_notebook_is_killed(three_hosts: Hosts) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_AND_WAITS, str(three_hosts.ssh_config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as notebook:
        assert notebook.stdout
        pid = int(notebook.stdout.readline())
        notebook.kill()
        await_gone([pid], SOON_S)


def test_its_own_end_is_noticed(options: SshOptions) -> None:
    with started("host1", options) as process:
        os.kill(process.answer["pid"], signal.SIGKILL)
        await_condition(lambda: not process.is_alive, "the end of ssh", SOON_S)
        assert process.exit_code == 255


def test_a_machine_that_is_cut_off_is_noticed(three_hosts: Hosts, options: SshOptions) -> None:
    with started("host1", replace(options, alive_interval_s=1)) as process:
        three_hosts.cut("host1")
        try:
            await_condition(lambda: not process.is_alive, "ssh to give up", SOON_S)
            process.close()
            assert "not responding" in process.last_words()
            assert is_alive(process.answer["pid"])  # nobody has told it
        finally:
            three_hosts.restore("host1")
        await_gone([process.answer["pid"]], SOON_S)


# -- what does not start -----------------------------------------------------------------------------------------------


def test_a_closed_port(options: SshOptions) -> None:
    text = failure(Machine("host1", port=2222), options)
    assert "port 2222: Connection refused" in text
    assert "sshd" in text


def test_a_name_is_no_option(options: SshOptions, tmp_path: Path) -> None:
    failure(Machine(f"-oProxyCommand=touch {tmp_path}/made"), options)
    assert not list(tmp_path.iterdir())


def test_an_unknown_host_key(three_hosts: Hosts, options: SshOptions, tmp_path: Path) -> None:
    swap = (str(three_hosts.known_hosts), str(tmp_path / "knows_none"))
    text = failure(Machine("host1"), with_configuration(options, tmp_path / "config", swap=swap))
    assert "Host key verification failed." in text
    assert f"`ssh -F {tmp_path / 'config'} host1 true`" in text
    assert not (tmp_path / "knows_none").exists()


def test_another_host_key(three_hosts: Hosts, options: SshOptions, tmp_path: Path) -> None:
    address, other = three_hosts.address("host1"), three_hosts["host2"].directory / "host_key.pub"
    (tmp_path / "knows_another").write_text(f"{address} {other.read_text()}")
    swap = (str(three_hosts.known_hosts), str(tmp_path / "knows_another"))
    text = failure(Machine("host1"), with_configuration(options, tmp_path / "config", swap=swap))
    assert "Host key verification failed." in text
    assert "ssh-keygen -R" in text


def test_a_key_that_does_not_let_in(three_hosts: Hosts, options: SshOptions, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    swap = (str(three_hosts.identity), str(tmp_path / "other"))
    text = failure(Machine("host1"), with_configuration(options, tmp_path / "config", swap=swap))
    assert "Permission denied (publickey)" in text
    assert "ssh-copy-id" in text


def test_a_machine_that_is_cut_off(three_hosts: Hosts, options: SshOptions) -> None:
    three_hosts.cut("host1")
    try:
        text = failure(Machine("host1"), replace(options, connect_timeout_s=1))
    finally:
        three_hosts.restore("host1")
    assert "timed out" in text or "No route to host" in text


def test_a_program_that_does_not_answer(options: SshOptions, tmp_path: Path) -> None:
    silent = replace(options, command=(sys.executable, "-c", SILENT, str(tmp_path)))
    text = failure(Machine("host1"), silent, timeout_s=3)
    assert "no answer within 3.0 s; the last words were: thinking" in text
    await_gone(pids_in(tmp_path), SOON_S)


def pids_in(directory: Path) -> list[int]:
    return [int(path.name) for path in directory.iterdir()]


def test_a_python_that_is_not_there(three_hosts: Hosts, options: SshOptions) -> None:
    text = failure(Machine("host1"), replace(options, command=(), python="~/no where/python3"))
    assert "`~/no where/python3` cannot be run there" in text
    assert f"{three_hosts['host1'].home}/no where/python3" in text  # as the shell there understood it
    assert "python = " in text


@pytest.mark.parametrize("host", ["host1", "localhost"])
def test_a_python_without_us(host: str, options: SshOptions, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    text = failure(Machine(host), replace(options, command=(), python=str(python)))
    assert f"`{python}` there has no taas_magic" in text
    assert f"`{python} -m pip install --upgrade taas-magic`" in text


def test_programs_of_this_machine_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "`no-python` cannot be run here" in failure(Machine("localhost"), SshOptions(python="no-python"))
    monkeypatch.setenv("PATH", "")
    assert "OpenSSH" in failure(Machine("host1"), SshOptions(tunnel=True))


def test_an_order_that_is_too_large(options: SshOptions) -> None:
    with pytest.raises(ValueError, match="bytes"):
        start(Machine("host1"), {"much": "x" * 100_000}, options=replace(options, tunnel=True), timeout_s=SOON_S)


# -- several -----------------------------------------------------------------------------------------------------------


def test_two_of_three_can_be_reached(three_hosts: Hosts, options: SshOptions) -> None:
    machines = [Machine(name) for name in three_hosts.names]
    three_hosts.cut("host1")
    try:
        quick = replace(options, tunnel=True, connect_timeout_s=1)
        processes, failed = start_all(machines, {}, options=quick, timeout_s=SOON_S)
    finally:
        three_hosts.restore("host1")
    assert [process.answer["host"] for process in processes] == ["host0", "host2"]
    ((machine, reason),) = failed
    assert machine is machines[1]
    assert len(reason.splitlines()) == 1
    assert "timed out" in reason or "No route to host" in reason
    assert "(to do: " in reason
    for process in processes:
        process.close()


def test_an_interrupt_ends_all(three_hosts: Hosts, options: SshOptions, tmp_path: Path) -> None:
    silent = (sys.executable, "-c", SILENT, str(tmp_path))
    machines = [Machine(name) for name in three_hosts.names]

    def interrupt_once_they_run() -> None:
        await_condition(lambda: len(pids_in(tmp_path)) == 3, "three processes", SOON_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt_once_they_run)
    # What a shell starts in the background ignores interrupts, and so would these tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            start_all(machines, {}, options=replace(options, command=silent, tunnel=True), timeout_s=60)
        interrupter.join()
    finally:
        signal.signal(signal.SIGINT, before)
    await_gone(pids_in(tmp_path), SOON_S)


# -- behind a bastion --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def behind_bastion() -> Iterator[Hosts]:
    with hosts.hosts(2, bastion=True) as made:
        yield made


def test_a_machine_behind_a_bastion(behind_bastion: Hosts) -> None:
    options = SshOptions(config_file=behind_bastion.ssh_config, command=STANDS_IN, tunnel=True)
    with started("host1", options) as process:
        assert process.answer["host"] == "host1"
        assert process.local_address is not None
        assert echoed(Path(process.local_address.removeprefix("ipc://")), b"through") == b"through"
    await_gone([process.answer["pid"]], SOON_S)


def test_a_closed_port_behind_a_bastion(behind_bastion: Hosts) -> None:
    options = SshOptions(config_file=behind_bastion.ssh_config, command=STANDS_IN)
    assert "Connection refused" in failure(Machine("host1", port=2222), options)
