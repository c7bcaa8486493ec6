"""Hosts to test with: network namespaces of this machine, each with an address, a name and an sshd of its own.

``hosts(3)`` joins three of them by a bridge. The notebook's place is the root namespace, which has an address on that
bridge. With ``bastion=True`` it reaches host 0 only, and the others through it::

    root namespace ─ bridge ─┬─ host0              root namespace ─ bridge ─ host0 ─ bridge ─┬─ host1
                             ├─ host1                                                        └─ host2
                             └─ host2

Processes, users and files are those of this machine, so a test sees a remote process by its pid. Each host has a home
and a temporary directory of its own. Everything carries the pid of the test run in its name, and the next run removes
what one that was killed has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from process.watch import await_condition

#: Short, since sockets lie below it, and their paths may have 107 characters.
PLACE = Path("/run/taas-hosts")
#: Daemons and network tools lie there, which a user's PATH need not have.
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
PROGRAMS = ("ip", "sshd", "ssh", "ssh-keygen", "unshare", "hostname")
#: What one ``hosts()`` owns: a bridge, the bridge's ends of the cables, namespaces. 15 characters at most.
OWNED = re.compile(r"(taas(\d+)x\d)(b|v\d|-\d)")
OUTER, INNER = 10, 130  # the last number of the first host's address, before and behind a bastion
READY_S = 20.0
GONE_S = 10.0


class CannotShapeError(Exception):
    """This machine's kernel has no token bucket filter (``sch_tbf``); the text is what tc says."""


def why_not() -> str | None:
    """Why this machine can have no such hosts; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in PROGRAMS if shutil.which(program, path=SEARCHED) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: Its alias in the ssh client's configuration, and what ``hostname`` says there.
        namespace: The network namespace that it is.
        address: Its own, behind a bastion one that the root namespace does not reach.
        directory: Its files: keys, logs, ``home`` and ``tmp``.
        switch: The namespace of the bridge that it is plugged into; "" is the root namespace.
        port: The bridge's end of its cable.
    """

    name: str
    namespace: str
    address: str
    directory: Path
    switch: str
    port: str

    @property
    def home(self) -> Path:
        """``$HOME`` of who logs in there."""
        return self.directory / "home"

    @property
    def temporary(self) -> Path:
        """``$TMPDIR`` of who logs in there."""
        return self.directory / "tmp"

    @property
    def environment(self) -> dict[str, str]:
        """What who logs in finds set; the package that is under test here is the one that is imported there."""
        environment = {"HOME": str(self.home), "TMPDIR": str(self.temporary)}
        return environment | {name: os.environ[name] for name in ("PYTHONPATH",) if os.environ.get(name)}


class Hosts:
    """Some hosts that run; see :func:`hosts`.

    Attributes:
        names: ``host0``, ``host1``, ...; all methods take such a name.
        notebook_address: Of the root namespace, as the hosts see it.
        ssh_config: For ``ssh -F``: an alias a host, the key to come in with, the hosts' true keys.
        known_hosts: The hosts' true keys.
        identity: The private key that comes in.
    """

    def __init__(self, tag: str, subnet: str, num_hosts: int, *, bastion: bool, client_alive_s: int) -> None:
        self._directory = PLACE / tag
        self._subnet = subnet
        self._bastion = bastion
        self._client_alive_s = client_alive_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._hosts = {f"host{index}": self._plan(tag, index) for index in range(num_hosts)}
        self.names = tuple(self._hosts)
        self.notebook_address = f"{subnet}.1"
        self.ssh_config = self._directory / "ssh_config"
        self.known_hosts = self._directory / "known_hosts"
        self.identity = self._directory / "identity"

    def _plan(self, tag: str, index: int) -> Host:
        is_behind = self._bastion and index > 0
        return Host(
            name=f"host{index}",
            namespace=f"{tag}-{index}",
            address=f"{self._subnet}.{(INNER if is_behind else OUTER) + index}",
            directory=self._directory / f"host{index}",
            switch=f"{tag}-0" if is_behind else "",
            port=f"{tag}v{index}",
        )

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    # -- what a test does ----------------------------------------------------------------------------------------

    def address(self, name: str) -> str:
        """The host's address."""
        return self[name].address

    def cut(self, name: str) -> None:
        """Pull the host's cable: what is on its way is lost, and nobody is told."""
        ip("link", "set", self[name].port, "down", namespace=self[name].switch)

    def restore(self, name: str) -> None:
        """Plug the cable in again."""
        ip("link", "set", self[name].port, "up", namespace=self[name].switch)

    def shape(self, mbit_per_s: float) -> None:
        """Have all cables carry no more than this, in either direction.

        Raises:
            CannotShapeError: if the kernel has no token bucket filter.
        """
        burst_bytes = max(64 * 1024, int(mbit_per_s * 1e6 / 8 / 100))  # what goes out between two ticks of the clock
        rate = ["rate", f"{int(mbit_per_s * 1e6)}bit", "burst", str(burst_bytes), "latency", "400ms"]
        for namespace, interface in self._cable_ends():
            shaped = _tc(namespace, "replace", interface, "tbf", *rate)
            if shaped.returncode:
                raise CannotShapeError(shaped.stderr.strip())

    def unshape(self) -> None:
        """Have all cables carry what they can."""
        for namespace, interface in self._cable_ends():
            _tc(namespace, "del", interface)

    def _cable_ends(self) -> Iterator[tuple[str, str]]:
        for host in self._hosts.values():
            yield host.switch, host.port
            yield host.namespace, "eth0"

    def exec(self, name: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process on a host; ``options`` are those of ``Popen``. It ends with the hosts at the latest."""
        host = self[name]
        inside = ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
        options.setdefault("env", {**os.environ, **host.environment, "PATH": SEARCHED})
        process = subprocess.Popen([*inside, name, *argv], **options)
        self._processes.append(process)
        return process

    def pids(self, name: str) -> list[int]:
        """All processes on a host, its sshd among them."""
        return _pids(self[name].namespace)

    def sshd_log(self, name: str) -> str:
        """What the host's sshd has said so far."""
        return (self[name].directory / "sshd.log").read_text(errors="replace")

    # -- making and removing -------------------------------------------------------------------------------------

    def make(self) -> None:
        """Plug everything together and start the sshds; the bridge of the root namespace is there."""
        _make_key(self.identity)
        for host in self._hosts.values():
            self._plug_in(host)
            self._write_files(host)
            _make_key(host.directory / "host_key")
        self.known_hosts.write_text("".join(f"{host.address} {_public(host)}\n" for host in self._hosts.values()))
        self.ssh_config.write_text("\n".join(self._client_configuration()))
        for name in self.names:
            self._start_sshd(name)

    def _bridge(self, host: Host) -> str:
        return "inner" if host.switch else host.port.rpartition("v")[0] + "b"

    def _plug_in(self, host: Host) -> None:
        ip("netns", "add", host.namespace)
        cable = f"link add {host.port} type veth peer name eth0 netns {host.namespace}"
        ip(*cable.split(), namespace=host.switch)
        ip("link", "set", host.port, "master", self._bridge(host), "up", namespace=host.switch)
        # Half of the subnet where there is a bastion: the other half is behind it, for the bastion itself too.
        prefix = 25 if self._bastion else 24
        ip("address", "add", f"{host.address}/{prefix}", "dev", "eth0", namespace=host.namespace)
        ip("link", "set", "lo", "up", namespace=host.namespace)
        ip("link", "set", "eth0", "up", namespace=host.namespace)
        if self._bastion and host.name == "host0":
            _add_bridge("inner", f"{self._subnet}.{INNER - 1}/25", namespace=host.namespace)

    def _write_files(self, host: Host) -> None:
        for directory in (host.home, host.temporary, _etc(host.namespace)):
            directory.mkdir(parents=True)
        # ip-netns(8) shows it as /etc/hosts in the namespace: programs look up the name of the host that they are on.
        (_etc(host.namespace) / "hosts").write_text(
            "".join(f"{self._seen_from(host, other)} {other.name}\n" for other in self._hosts.values())
            + "127.0.0.1 localhost\n"
        )
        (host.directory / "sshd_config").write_text("\n".join(self._server_configuration(host)))

    def _seen_from(self, host: Host, other: Host) -> str:
        return f"{self._subnet}.{INNER - 1}" if host.switch and other.name == "host0" else other.address

    def _server_configuration(self, host: Host) -> Iterator[str]:
        yield f"HostKey {host.directory / 'host_key'}"
        yield f"PidFile {host.directory / 'sshd.pid'}"
        yield f"AuthorizedKeysFile {self.identity}.pub"
        yield "SetEnv " + " ".join(f'"{name}={value}"' for name, value in host.environment.items())
        yield "LogLevel VERBOSE"
        yield "PermitRootLogin yes"
        # What this machine's own users have set up is not to matter.
        yield "StrictModes no\nUsePAM no\nPermitUserRC no\nPrintMotd no\nUseDNS no"
        yield "PasswordAuthentication no\nKbdInteractiveAuthentication no"
        yield f"ClientAliveInterval {self._client_alive_s}\nClientAliveCountMax 2"
        yield "MaxStartups 100\nMaxSessions 100"
        if _sshd_has_penalties():
            yield "PerSourcePenalties no"  # tests are refused often, and all come from one address
        yield ""

    def _client_configuration(self) -> Iterator[str]:
        for host in self._hosts.values():
            yield f"Host {host.name}\n  HostName {host.address}"
            if host.switch:
                yield "  ProxyJump host0"
        yield "Host *\n  User root\n  Port 22\n  BatchMode yes\n  StrictHostKeyChecking yes"
        yield f"  IdentityFile {self.identity}\n  IdentitiesOnly yes\n  IdentityAgent none"
        yield f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"

    def _start_sshd(self, name: str) -> None:
        host = self[name]
        log = host.directory / "sshd.log"
        with log.open("wb") as file:
            server = self.exec(
                name,
                [_program("sshd"), "-D", "-e", "-f", str(host.directory / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        await_condition(
            lambda: b"Server listening" in log.read_bytes() or server.poll() is not None, f"{name}'s sshd", READY_S
        )
        assert server.poll() is None, f"sshd did not start: {log.read_text()}"

    def end(self) -> None:
        """End the processes that were started here; what they have started is left to :func:`_remove`."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(GONE_S)


@contextlib.contextmanager
def hosts(num_hosts: int, *, bastion: bool = False, client_alive_s: int = 0) -> Iterator[Hosts]:
    """Run some hosts for a while; skips the test where this machine can have none.

    Args:
        num_hosts: How many; ten at most.
        bastion: Let the root namespace reach only host 0, and the others through it (``ProxyJump`` in the
            configuration).
        client_alive_s: sshd's ``ClientAliveInterval``. 0 is its default: a host that has lost its client does not
            notice, and what the client started goes on.
    """
    reason = why_not()
    if reason:
        pytest.skip(reason)
    assert 0 < num_hosts <= 10
    with _claimed() as (tag, subnet):
        made = Hosts(tag, subnet, num_hosts, bastion=bastion, client_alive_s=client_alive_s)
        try:
            made.make()
            yield made
        finally:
            made.end()


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Hosts]:
    """Three hosts that see each other; a test that cuts or stops something restores it."""
    with hosts(3) as made:
        yield made


# -- names and addresses, one test run beside the other --------------------------------------------------------------


@contextlib.contextmanager
def _claimed() -> Iterator[tuple[str, str]]:
    """A name and the first three numbers of a subnet that nobody else has; the bridge that says so is there."""
    # sshd gives up its privileges in there; a package's service makes it where there is a service manager.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    PLACE.mkdir(exist_ok=True)
    with (PLACE / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tags = _tags_in_use()
        for tag in [tag for tag, pid in tags.items() if not Path(f"/proc/{pid}").exists()]:
            _remove(tag)
        tag = next(tag for tag in (f"taas{os.getpid()}x{serial}" for serial in range(10)) if tag not in tags)
        subnet = _free_subnet()
        (PLACE / tag).mkdir()
        # The whole subnet is on this bridge for the root namespace, so that nothing for it goes elsewhere.
        _add_bridge(f"{tag}b", f"{subnet}.1/24")
    try:
        yield tag, subnet
    finally:
        _remove(tag)


def _tags_in_use() -> dict[str, int]:
    """The tags of all test runs that have something here, with their pids."""
    links = [link["ifname"] for link in json.loads(ip("-json", "link"))]
    places = [
        path.name for place in (Path("/run/netns"), Path("/etc/netns")) if place.exists() for path in place.iterdir()
    ]
    directories = [f"{path.name}b" for path in PLACE.iterdir()]
    found = [match for name in (*links, *places, *directories) if (match := OWNED.fullmatch(name))]
    return {match[1]: int(match[2]) for match in found}


def _free_subnet() -> str:
    taken = " ".join(entry["dst"] for entry in json.loads(ip("-json", "route", "show", "table", "all")))
    free = (f"10.77.{number}" for number in range(1, 255))
    return next(subnet for subnet in free if f"{subnet}." not in taken)


def _remove(tag: str) -> None:
    """Remove everything of a tag, processes first; does nothing where nothing is left."""
    links = [link["ifname"] for link in json.loads(ip("-json", "link"))]
    for link in links:
        if (match := OWNED.fullmatch(link)) and match[1] == tag:
            ip("link", "delete", link)
    for place in Path("/run/netns").glob(f"{tag}-*"):
        _kill_all(place.name)
        ip("netns", "delete", place.name)
    for place in Path("/etc/netns").glob(f"{tag}-*"):
        shutil.rmtree(place)
    shutil.rmtree(PLACE / tag, ignore_errors=True)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", namespace).split()]


def _kill_all(namespace: str) -> None:
    """Kill all processes of a namespace: whatever is in there was started by its tests."""
    deadline = time.monotonic() + GONE_S
    while pids := _pids(namespace):
        assert time.monotonic() < deadline, f"{namespace} still has processes {pids}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [], GONE_S)
                os.close(handle)
            with contextlib.suppress(ChildProcessError):  # an orphan becomes a child of this process, or of init
                os.waitpid(pid, os.WNOHANG)


# -- programs --------------------------------------------------------------------------------------------------------


def _program(name: str) -> str:
    found = shutil.which(name, path=SEARCHED)
    assert found is not None, name
    return found


def ip(*arguments: str, namespace: str = "") -> str:
    """Run ``ip`` on a namespace, "" for the root's."""
    inside = ["-netns", namespace] if namespace else []
    ran = subprocess.run([_program("ip"), *inside, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"ip {' '.join(arguments)}: {ran.stderr}"
    return ran.stdout


def _tc(namespace: str, action: str, interface: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    inside = ["-netns", namespace] if namespace else []
    command = [_program("tc"), *inside, "qdisc", action, "dev", interface, "root", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _add_bridge(name: str, address: str, namespace: str = "") -> None:
    # A bridge that has no address of its own takes one of its ports', and another when that port goes.
    hardware_address = "02:" + ":".join(f"{byte:02x}" for byte in os.urandom(5))
    ip("link", "add", name, "address", hardware_address, "type", "bridge", namespace=namespace)
    ip("address", "add", address, "dev", name, namespace=namespace)
    ip("link", "set", name, "up", namespace=namespace)


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)


def _public(host: Host) -> str:
    return (host.directory / "host_key.pub").read_text().strip()


def _etc(namespace: str) -> Path:
    return Path("/etc/netns") / namespace


def _sshd_has_penalties() -> bool:
    """Whether this sshd shuts out addresses that were refused (OpenSSH 9.8 and later)."""
    tried = subprocess.run(
        [_program("sshd"), "-G", "-f", "/dev/null", "-o", "PerSourcePenalties=no"], capture_output=True, check=False
    )
    return tried.returncode == 0
