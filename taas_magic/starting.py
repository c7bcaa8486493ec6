"""Starts a runner's process: one that serves a kernel, or a session of another machine's kernel."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import taas_magic
from taas_magic.namespace.process_state import scrubbed


def start_runner(
    directory: Path, token: str, log: IO[bytes], module: str = "taas_magic.runner", more: str = ""
) -> subprocess.Popen[bytes]:
    """Start a process that serves on ``directory/runner.sock`` whoever says the token, for as long as this one lives.

    Args:
        directory: A directory of mode 0700.
        token: What has to be said there.
        log: Where the process writes what is not for anybody else.
        module: What to run.
        more: Further lines for its standard input.
    """
    environment = scrubbed(dict(os.environ))
    # The package may be imported from a checkout that only this process's sys.path knows.
    home = str(Path(taas_magic.__file__).resolve().parent.parent)
    inherited = environment.get("PYTHONPATH")
    # Last, so that it changes nothing about where anything else is found.
    environment["PYTHONPATH"] = f"{inherited}{os.pathsep}{home}" if inherited else home
    process = subprocess.Popen(
        # -P: a `random.py` in the project must not become the runner's `random`.
        [sys.executable, "-P", "-m", module, str(directory), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        # Jupyter interrupts the kernel's whole process group; a run is interrupted by message.
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{token}\n{more}".encode())
        process.stdin.close()
    return process
