"""A notebook kernel without a front end: cells come in as JSON lines, and for each goes out when it began and ended.

Run as a program it is the kernel; :class:`Notebook` is the other side of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.02
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class CellRun:
    """What one cell did; times are of ``time.monotonic``, which all processes of a machine share, in seconds."""

    submitted_at: float
    idle_at: float
    error: str | None


class NotebookError(Exception):
    """The notebook did not do what a measurement needs; the text says what happened instead."""


class Notebook:
    """An IPython shell in a process and session of its own, as Jupyter starts its kernels.

    Args:
        python: The interpreter.
        log: Where everything that the cells print goes.
        environment: The process's environment.
    """

    def __init__(self, python: str, log: Path, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        theirs.close()
        self._socket = ours
        self._received = b""
        self.is_usable = True

    def run(self, source: str, limit_s: float, meanwhile: Callable[[], None] = lambda: None) -> CellRun:
        """Run a cell to its end; ``meanwhile`` is called again and again until then.

        Raises:
            NotebookError: if the cell takes longer than ``limit_s`` or the notebook ends; it cannot be used afterwards.
        """
        self.is_usable = False
        self._socket.sendall(json.dumps(source).encode() + b"\n")
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._received:
            meanwhile()
            if time.monotonic() > deadline:
                raise NotebookError(f"not over after {limit_s:.0f} s")
            if select.select([self._socket], [], [], _POLL_S)[0]:
                data = self._socket.recv(65536)
                if not data:
                    raise NotebookError(f"the notebook ended; it had printed: {self.log_tail()}")
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        self.is_usable = True
        return CellRun(**json.loads(line))

    def interrupt(self) -> None:
        """Interrupt the running cell as Jupyter does: the whole process group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def log_tail(self, num_characters: int = 300) -> str:
        """The end of what was printed."""
        text = _COLOURS.sub("", self._log.read_text(errors="replace"))
        return text[-num_characters:].replace("\n", " ")

    def close(self) -> None:
        """End the notebook's own process; what it has started becomes this process's to end."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.is_usable:
                self._process.wait(timeout=10)
        self._process.kill()
        self._process.wait()


def _serve(channel: socket.socket) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False  # type: ignore[union-attr]
    with channel, channel.makefile("rw", encoding="utf-8") as stream:
        for line in stream:
            source = json.loads(line)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            submitted_at = time.monotonic()
            result = shell.run_cell(source, store_history=True)
            idle_at = time.monotonic()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            error = result.error_before_exec or result.error_in_exec
            text = None if error is None else f"{type(error).__name__}: {error}"
            stream.write(json.dumps({"submitted_at": submitted_at, "idle_at": idle_at, "error": text}) + "\n")
            stream.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])))
