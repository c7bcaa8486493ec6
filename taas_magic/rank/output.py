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
from collections.abc import Iterator

_libc = ctypes.CDLL(None)
_ORDER_WAIT_S = 0.02
#: The same for what is displayed, which is rarer.
_DISPLAY_WAIT_S = 0.2
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
    flush_python()
    _libc.fflush(None)


def flush_python() -> None:
    """Send on what Python holds back; the cell may have put streams of its own in place of ours."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


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
            _await_taken(self._last[0], termios.FIONREAD, _ORDER_WAIT_S)
            self._last[0] = self._fd
        done = 0
        while done < len(view):
            done += os.write(self._fd, view[done:])
        return len(view)


@contextlib.contextmanager
def in_order(socket_fd: int) -> Iterator[None]:
    """Send something over a socket in its place between what is written before it and after it.

    As with two pipes, the runner could not tell the order: what was printed behind ``clear_output()`` would be cleared.
    """
    with contextlib.suppress(OSError):
        for pipe_fd in (1, 2):
            _await_taken(pipe_fd, termios.FIONREAD, _DISPLAY_WAIT_S)
    yield
    with contextlib.suppress(OSError):
        _await_taken(socket_fd, termios.TIOCOUTQ, _DISPLAY_WAIT_S)


def _await_taken(fd: int, request: int, seconds: float) -> None:
    """Wait until the runner has taken all out of a pipe or socket, but no longer than this.

    Raises:
        OSError: the descriptor is of another kind.
    """
    untaken = array.array("i", [0])
    deadline = time.monotonic() + seconds
    while True:
        fcntl.ioctl(fd, request, untaken)
        if untaken[0] == 0 or time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)
