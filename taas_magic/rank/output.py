"""A rank's standard streams: pipes at the descriptor level, so that C, C++ and subprocesses are captured too."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import io
import os
import sys
import termios
import time

_libc = ctypes.CDLL(None)
_ORDER_WAIT_S = 0.02
_POLL_S = 0.0001


def redirect(stdout_fd: int, stderr_fd: int) -> None:
    """Make the pipes this process's standard streams; standard input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(source, target)
        os.close(source)
    last: list[int] = [1]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = _stream(1, last)
    sys.stderr = _stream(2, last)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def flush() -> None:
    """Send on what Python and C hold back; a process that ends by ``os._exit`` would lose it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _libc.fflush(None)


def _stream(fd: int, last: list[int]) -> io.TextIOWrapper:
    raw = _OrderedWriter(fd, last)
    # Every print arrives at once, as it would in a kernel.
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[arg-type]


class _OrderedWriter(io.RawIOBase):
    """Writes to one of two pipes, after what was written to the other one has been taken out.

    The runner reads two pipes and could not tell in which order a program wrote to them. So whoever changes from one to
    the other waits, for a moment at most, until the runner has caught up.
    """

    def __init__(self, fd: int, last: list[int]) -> None:
        super().__init__()
        self._fd = fd
        self._last = last

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        if self._last[0] != self._fd:
            _await_empty(self._last[0])
            self._last[0] = self._fd
        done = 0
        while done < len(view):
            done += os.write(self._fd, view[done:])
        return len(view)


def _await_empty(pipe_fd: int) -> None:
    unread = array.array("i", [0])
    deadline = time.monotonic() + _ORDER_WAIT_S
    while True:
        fcntl.ioctl(pipe_fd, termios.FIONREAD, unread)
        if unread[0] == 0 or time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)
