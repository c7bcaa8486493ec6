"""Runners of machines for tests, on this machine."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import taas_magic
from taas_magic.link.connection import Connection
from taas_magic.link.files import FileStore
from taas_magic.machines.keys import KeyPair, new_keys
from taas_magic.wire_machines import MachineAddress

SOON_S = 60.0


@dataclass
class Runner:
    """A runner that is up."""

    process: subprocess.Popen[str]
    port: int
    key: str
    authorized: KeyPair

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def session(self) -> Connection:
        machine = MachineAddress("here", self.address, self.key)
        return Connection(machine, (self.authorized.public, self.authorized.secret), FileStore(0))

    @property
    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.contextmanager
def started(directory: Path, *, num_gpus: int, keys: KeyPair | None = None) -> Iterator[Runner]:
    """A runner as `taas runner` starts it, with its own keys and caches below a directory.

    Args:
        directory: For its files.
        num_gpus: How many ranks it offers places for.
        keys: Whose public key it lets in; new ones where none are given.
    """
    keys = keys or new_keys()
    (directory / "authorized").write_text(f"{keys.public} tests\n")
    home = str(Path(taas_magic.__file__).resolve().parent.parent)
    command = [
        sys.executable,
        "-m",
        "taas_magic.cli",
        "runner",
        "--listen",
        "tcp://127.0.0.1:*",
        "--gpus",
        str(num_gpus),
    ]
    environment = {
        **os.environ,
        "XDG_CONFIG_HOME": str(directory / "config"),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH", "")])),
    }
    log = directory / "runner.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                *command,
                "--authorized-keys",
                str(directory / "authorized"),
                "--address",
                "127.0.0.1",
            ],
            stderr=output,
            env=environment,
            text=True,
        )
    try:
        deadline = time.monotonic() + SOON_S
        while "its key: " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            select.select([], [], [], 0.05)
        text = log.read_text()
        port = int(text.split("listening on tcp://")[1].split()[0].rpartition(":")[2])
        yield Runner(process, port, text.split("its key: ")[1].split()[0], keys)
    finally:
        process.terminate()
        process.wait(30)
