"""The command ``taas``: what is installed here, and whether this machine can run cells."""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taas_magic._version import __version__
from taas_magic.errors import TaasError
from taas_magic.machines.keys import keys_directory, own_keys
from taas_magic.namespace.blocks import available_memory_bytes
from taas_magic.rank import landlock
from taas_magic.runner import serve
from taas_magic.units import format_bytes, plural

_TORCH_S = 180.0
#: DataLoader workers hand batches over in /dev/shm; containers often give it 64 MiB.
_SMALL_SHM_BYTES = 256 * 2**20
_SMALL_MEMORY_BYTES = 2 * 2**30
#: Three descriptors a rank in the runner, and room for the libraries.
_FEW_DESCRIPTORS = 1024
_SHM = "/dev/shm"  # noqa: S108 - it is looked at, not written to
_OR_ALLOW = "or newer, and allow the call in the container's seccomp profile"
_ASK_TORCH = """
import json, torch, torch.distributed as dist
devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": devices,
    "distributed": dist.is_available(),
    "backends": [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()],
}))
"""


class Verdict(enum.Enum):
    """What a finding means for running cells."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and what to do where it is not as it should be."""

    verdict: Verdict
    text: str
    do: str = ""

    def __str__(self) -> str:
        lines = [f"{self.verdict.value:<5} {self.text}"]
        if self.do:
            lines.append(f"      to do: {self.do}")
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``taas``; returns the exit code: 0, 1 where ``doctor`` found what prevents runs, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="taas", description="Run notebook cells on N torch.distributed ranks.")
    parser.add_argument("--version", action="version", version=f"taas {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("doctor", help="say whether this machine can run cells, and what to do where it cannot")
    _add_keys_parser(commands)
    serve.add_parser(commands)
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        if given.command == "keys":
            return show_keys(is_runners=given.runner)
        return serve.run(given) if given.command == "runner" else doctor()
    except TaasError as error:
        print(f"taas: {error}", file=sys.stderr)
        return 1


def _add_keys_parser(commands: Any) -> None:
    parser = commands.add_parser("keys", help="show your public key; it is made where there is none")
    parser.add_argument("--runner", action="store_true", help="that of this machine's runner, not that of notebooks")


def show_keys(*, is_runners: bool) -> int:
    """Print a public key, and what to do with it."""
    keys = own_keys("runner" if is_runners else "notebook")
    directory = keys_directory(os.environ)
    print(keys.public)
    if is_runners:
        use = 'in a pool\'s `runners`: { address = "tcp://HOST:7777", key = "..." }; and, for runs on several machines,'
        use += "\nin the --authorized-keys file of the other machines' runners"
    else:
        use = "a line in the file that a machine's `taas runner --authorized-keys FILE` reads"
    print(f"\nwhere it goes: {use}\nthe secret key beside it: {directory}", file=sys.stderr)
    return 0


def doctor() -> int:
    """Print a finding a line as they come; 1 if one of them prevents runs."""
    print(f"taas {__version__}")
    num_failures = 0
    for finding in examine():
        print(finding, flush=True)
        num_failures += finding.verdict is Verdict.FAIL
    print(f"\n{plural(num_failures, 'thing')} to put right" if num_failures else "\ncells can run here")
    return 1 if num_failures else 0


def examine() -> Iterator[Finding]:
    """Look at everything that a run needs of this machine."""
    yield _python()
    yield from _torch(ask_torch())
    for check in (_memory_files, _process_handles, _process_tree, _landlock, _memory, _shared_memory):
        yield check()
    for check in (_descriptors, _loopback, _private_directory):
        yield check()


def ask_torch() -> dict[str, Any] | str:
    """What torch says of itself, asked in a process of its own; the reason as text where it cannot be asked."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing it took more than {_TORCH_S:.0f} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"its process ended with code {done.returncode}"
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# -- what is looked at -----------------------------------------------------------------------------------------------


def _python() -> Finding:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.release()}"
    if sys.platform != "linux":
        return Finding(Verdict.FAIL, text, "use Linux: ranks are forked, and watched through its process descriptors")
    return Finding(Verdict.OK, text)


def _torch(answer: dict[str, Any] | str) -> Iterator[Finding]:
    if isinstance(answer, str):
        yield Finding(Verdict.FAIL, f"torch cannot be imported: {answer}", "pip install torch")
        return
    name = f"torch {answer['version']}"
    if not answer["distributed"] or "gloo" not in answer["backends"]:
        yield Finding(Verdict.FAIL, f"{name} has no torch.distributed with gloo", "install a torch built with both")
        return
    yield Finding(Verdict.OK, f"{name} with {' and '.join(answer['backends'])}")
    yield _devices(answer)


def _devices(answer: dict[str, Any]) -> Finding:
    devices = answer["devices"]
    if devices:
        kinds = ", ".join(f"{devices.count(kind)} x {kind}" for kind in dict.fromkeys(devices))
        if "nccl" not in answer["backends"]:
            return Finding(Verdict.FAIL, f"{kinds}, but this torch has no NCCL", "install a torch built with NCCL")
        return Finding(Verdict.OK, kinds)
    if Path("/dev/nvidiactl").exists():
        why = "was built without CUDA" if answer["cuda"] is None else "finds none of this machine's GPUs"
        todo = "install a torch that is built for the driver that `nvidia-smi` shows; check CUDA_VISIBLE_DEVICES"
        return Finding(Verdict.NOTE, f"no CUDA device, though there is a driver: torch {why}", todo)
    return Finding(Verdict.NOTE, "no CUDA device: cells rehearse on the CPU, 'nccl' is answered by 'gloo'")


def _memory_files() -> Finding:
    return _works(
        "memory files (memfd_create)", lambda: os.close(os.memfd_create("taas-doctor")), f"use Linux 3.17 {_OR_ALLOW}"
    )


def _process_handles() -> Finding:
    return _works(
        "process descriptors (pidfd_open)", lambda: os.close(os.pidfd_open(os.getpid())), f"use Linux 5.3 {_OR_ALLOW}"
    )


def _process_tree() -> Finding:
    children = Path("/proc/thread-self/children")
    return _works(
        "lists of child processes in /proc",
        children.read_bytes,
        "mount /proc; a Linux built with CONFIG_PROC_CHILDREN is needed",
    )


def _works(what: str, attempt: Callable[[], object], remedy: str) -> Finding:
    try:
        attempt()
    except (OSError, AttributeError) as error:
        return Finding(Verdict.FAIL, f"no {what}: {error}", remedy)
    return Finding(Verdict.OK, what)


def _landlock() -> Finding:
    abi = landlock.abi_version()
    if abi:
        return Finding(Verdict.OK, f"Landlock, ABI {abi}: ranks other than 0 cannot write in the project")
    return Finding(
        Verdict.NOTE,
        "no Landlock: ranks other than 0 are kept from writing in the project by Python alone",
        "use Linux 5.19 or newer with `landlock` among the lsm= of its boot parameters, and allow it in the container",
    )


def _memory() -> Finding:
    available = available_memory_bytes()
    text = f"{format_bytes(available)} of memory free"
    if available < _SMALL_MEMORY_BYTES:
        return Finding(Verdict.NOTE, text, "close other notebooks: each rank needs some hundred MiB of its own")
    return Finding(Verdict.OK, text)


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError as error:
        return Finding(Verdict.NOTE, f"no {_SHM} ({error}): DataLoader workers will fail", "mount a tmpfs there")
    text = f"{_SHM} with {format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    if usage.free < _SMALL_SHM_BYTES:
        return Finding(Verdict.NOTE, f"{text}: DataLoader workers may run out of it", "docker run --shm-size=8g")
    return Finding(Verdict.OK, text)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FEW_DESCRIPTORS:
        todo = f"ulimit -n {_FEW_DESCRIPTORS * 4} before Jupyter is started (at most {hard} here)"
        return Finding(Verdict.NOTE, f"{soft} open files allowed", todo)
    return Finding(Verdict.OK, "open files: " + ("any number" if soft < 0 else str(soft)))


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            pass
    except OSError as error:
        return Finding(Verdict.FAIL, f"no loopback network: {error}", "ip link set lo up")
    return Finding(Verdict.OK, "loopback network, on which ranks meet")


def _private_directory() -> Finding:
    try:
        with (
            tempfile.TemporaryDirectory(prefix="taas-") as directory,
            contextlib.closing(socket.socket(socket.AF_UNIX)) as sock,
        ):
            sock.bind(f"{directory}/runner.sock")
            free = shutil.disk_usage(directory).free
    except OSError as error:
        parent = tempfile.gettempdir()
        return Finding(
            Verdict.FAIL, f"no socket can be made below {parent}: {error}", "set TMPDIR to a short local path"
        )
    return Finding(Verdict.OK, f"private directories below {tempfile.gettempdir()}, {format_bytes(free)} free")


if __name__ == "__main__":
    sys.exit(main())
