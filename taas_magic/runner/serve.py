"""Starts the runner of a machine: ``taas runner``, and what a notebook starts over ssh."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import setproctitle
import zmq

from taas_magic.errors import SettingsError, TaasError
from taas_magic.machines.keys import new_keys, own_keys, read_authorized_keys
from taas_magic.runner.machine import MachineRunner, Order
from taas_magic.runner.place import Place
from taas_magic.units import plural
from taas_magic.versions import own_versions

#: Where there is no GPU, ranks rehearse on CPU; so many at a time.
_PLACES_ON_CPU = 64
_ASK_TIMEOUT_S = 60.0
_ORDER_BYTES = 1024 * 1024
_log = logging.getLogger("taas.runner")
_ASK_GPUS = (
    "import json, torch; n = torch.cuda.device_count(); "
    "print(json.dumps(['GPU-' + str(torch.cuda.get_device_properties(i).uuid) for i in range(n)]))"
)


def add_parser(commands: Any) -> None:
    """Add ``taas runner`` to the command line."""
    parser = commands.add_parser("runner", help="serve notebooks of other machines on this one")
    parser.add_argument("--listen", action="append", metavar="ADDRESS", help="tcp://0.0.0.0:7777 (the default)")
    parser.add_argument(
        "--authorized-keys", type=Path, required=True, metavar="FILE", help="public keys of who may come in, one a line"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="places for ranks; default: the GPUs that torch sees")
    parser.add_argument("--role", choices=["gpu", "cpu"], default="gpu", help="cpu: for producers of data, no ranks")
    parser.add_argument("--address", help="by which other machines of a pool reach this one")
    parser.add_argument("--name", default=socket.gethostname(), help="what to call this machine (its host name)")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    _log_to_stderr()
    listen = arguments.listen or ["tcp://0.0.0.0:7777"]
    keys = own_keys("runner")
    path = arguments.authorized_keys
    read_authorized_keys(path)  # what is wrong with it is said now
    gpus, has_cuda = find_gpus(arguments.gpus)
    place = Place(
        arguments.name,
        arguments.address or own_address(),
        (keys.public, keys.secret),
        has_cuda,
        gpus if arguments.role == "gpu" else [],
        projects_directory(),
    )
    runner = _started(Order(listen, place.keys, _Authorized(path), place))
    for address in runner.addresses:
        _log.info("listening on %s", address)
    _log.info("%s; its key: %s", plural(len(gpus), "GPU" if has_cuda else "place"), keys.public)
    runner.serve()
    return 0


class _Authorized:
    """Looks a key up in a file, which may be changed while the runner serves."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, key: str) -> bool:
        try:
            return key in read_authorized_keys(self._path)
        except TaasError as error:
            _log.error("nobody is let in: %s", error)
            return False


def serve_from_stdin() -> None:
    """Entry of ``python -m taas_magic.runner.machine --from-stdin``; see :mod:`taas_magic.machines.ssh`."""
    setproctitle.setproctitle("taas: machine")
    order = json.loads(_read_line(sys.stdin.fileno()))
    if order.get("attach"):
        _lead_to_run(order)
        return
    # What goes on by itself must not end with the login.
    with contextlib.suppress(PermissionError):
        os.setsid()
    # Whatever is printed from here on is no answer.
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    _log_to_stderr()
    keys = new_keys()
    gpus, has_cuda = find_gpus(order.get("gpus"))
    address = order.get("address") or own_address()
    place = Place(
        order.get("name") or socket.gethostname(),
        address,
        (keys.public, keys.secret),
        has_cuda,
        gpus,
        projects_directory(),
    )
    authorized = frozenset(order["authorized"])
    listen = []
    if order.get("listen"):
        listen.append(_private(order["listen"]))
    if order.get("tcp", True):
        listen.append(f"tcp://{'[::]' if ':' in address else '0.0.0.0'}:*")  # noqa: S104 - keys keep others out
    runner = _started(Order(listen, place.keys, authorized.__contains__, place, end_fd=sys.stdin.fileno()))
    answer = {
        "marker": order.get("marker", ""),
        "address": _reachable(runner.addresses, address),
        "key": keys.public,
        "machine": place.name,
        "gpus": gpus,
        "pid": os.getpid(),
        "versions": {name: getattr(own_versions(), name) for name in own_versions().__struct_fields__},
    }
    _answer(answer_fd, answer)
    os.close(answer_fd)
    try:
        runner.serve()
    finally:
        if order.get("listen"):
            shutil.rmtree(Path(order["listen"].removeprefix("ipc://")).parent, ignore_errors=True)


def _lead_to_run(order: dict[str, Any]) -> None:
    """Say where a run is found that goes on by itself on this machine, and lead there while somebody wants that."""
    marker = order.get("marker", "")
    path = projects_directory().parent / "runs" / f"{order['attach']}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        os.kill(found["pid"], 0)
    except (OSError, ValueError, KeyError):
        problem = f"there is no run {order['attach']} on {socket.gethostname()}, or not any more"
        _answer(1, {"marker": marker, "problem": problem})
        return
    address = order.get("address") or own_address()
    if order.get("listen"):
        threading.Thread(target=_relay, args=(_private(order["listen"]), found["addresses"][0]), daemon=True).start()
    _answer(1, {"marker": marker, "address": _reachable(found["addresses"], address), "key": found["key"]})
    try:
        while os.read(sys.stdin.fileno(), 4096):
            pass
    finally:
        if order.get("listen"):
            shutil.rmtree(Path(order["listen"].removeprefix("ipc://")).parent, ignore_errors=True)


def _relay(listen: str, to: str) -> None:
    """Lead connections to a Unix socket on to where a runner listens; what they carry is encrypted."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(listen.removeprefix("ipc://"))
        listener.listen()
        while True:
            here, _ = listener.accept()
            there = _connected(to)
            for source, target in ((here, there), (there, here)):
                threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _connected(address: str) -> socket.socket:
    if address.startswith("ipc://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("ipc://"))
        return sock
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host.strip("[]").replace("0.0.0.0", "127.0.0.1"), int(port)))  # noqa: S104


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(256 * 1024):
            target.sendall(data)
    for sock in (source, target):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _answer(fd: int, answer: dict[str, Any]) -> None:
    os.write(fd, json.dumps(answer).encode() + b"\n")


def _read_line(fd: int) -> bytes:
    """The first line of a descriptor, and not a byte beyond it."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _ORDER_BYTES:
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def _started(order: Order) -> MachineRunner:
    try:
        runner = MachineRunner(order)
    except zmq.ZMQError as error:
        raise SettingsError.of(
            f"cannot listen at {', '.join(order.listen)}: {error}",
            expected="a free address, such as tcp://0.0.0.0:7777",
            do="choose another port with --listen",
        ) from error

    def stop(*_: object) -> None:
        runner.is_stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return runner


def _private(address: str) -> str:
    """Make the directory of an ``ipc://`` socket, for nobody else."""
    directory = Path(address.removeprefix("ipc://")).parent
    directory.mkdir(mode=0o700)
    return address


def _reachable(addresses: list[str], host: str) -> str:
    """The address for other machines; "" where there is none."""
    for address in addresses:
        if address.startswith("tcp://"):
            port = address.rpartition(":")[2]
            return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return ""


def own_address() -> str:
    """By which other machines reach this one: where ssh came in, or what the host's name stands for."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        return connection[2]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def find_gpus(wanted: int | None) -> tuple[list[str], bool]:
    """The GPUs by their UUIDs, and whether they are some; without any, places for ranks on CPU.

    Args:
        wanted: How many to offer at most; None for all.

    Raises:
        SettingsError: if there are GPUs, but fewer.
    """
    found: list[str] = []
    if Path("/dev/nvidiactl").exists():
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_GPUS], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
        if done.returncode == 0:
            found = json.loads(done.stdout.splitlines()[-1])
    if not found:
        return [str(number) for number in range(wanted or _PLACES_ON_CPU)], False
    if wanted is not None and wanted > len(found):
        raise SettingsError.of(f"--gpus {wanted}, and torch sees {len(found)} here", do="give fewer, or leave it out")
    return found[:wanted], True


def projects_directory() -> Path:
    """Where copies of projects are."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "taas" / "projects"


def _log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
