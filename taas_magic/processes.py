"""What the zygotes and ranks ask of the operating system about processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_DEADLINE_S = 3.0


def count_threads() -> int:
    """Threads of this process, including those that Python does not know."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - the names are all that is wanted


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose own parent ends (prctl(2))."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when its parent's forking thread ends; ends at once if that has happened already."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def outlive_parent() -> None:
    """Undo :func:`die_with_parent`."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def fork(body: Callable[[], None]) -> int:
    """Fork a process that runs ``body`` and ends: with 0, 1 after an exception, or what ``sys.exit`` says.

    Returns:
        The pid of the new process.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        body()
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        os._exit(status)


def children_of(pid: int) -> list[int]:
    """Pids of the direct children of a process; empty once it has gone."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - the names are all that is wanted
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                children += map(int, file.read().split())
    return children


def kill_descendants(spare: Collection[int] = ()) -> None:
    """Kill all that descends from this process, which must be a subreaper for those that lost their parent.

    A killed process's children become children of this one, so the tree is gone when no child is left.

    Args:
        spare: Children that live on, with what descends from them.
    """
    deadline = time.monotonic() + _KILL_DEADLINE_S
    killed: set[int] = set()
    while time.monotonic() < deadline:
        children = [child for child in children_of(os.getpid()) if child not in spare]
        if not children and not reap():
            break
        killed.update(children)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
    _remove_shared_memory(killed)


def _remove_shared_memory(pids: Collection[int]) -> None:
    """Remove what killed processes left in /dev/shm.

    Torch's loader workers name a segment and take the name away at once (torch 2.13, ``torch_<pid>_...``); who is
    killed in between leaves it for ever.
    """
    if not pids:
        return
    with contextlib.suppress(OSError):
        for segment in Path("/dev/shm").glob("torch_*"):  # noqa: S108 - nothing is made there
            if segment.name.split("_")[1] in map(str, pids):
                segment.unlink(missing_ok=True)


class ChildWatch:
    """A descriptor that can be read when a child has ended. A process has one at most; its forks close theirs."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for fd in (self._reader, self._writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def fileno(self) -> int:
        """What to poll."""
        return self._reader

    def clear(self) -> None:
        """Take note of what has been signalled; children that end from now on are signalled again."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def close(self) -> None:
        """Watch no more."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)


def reap() -> list[tuple[int, int]]:
    """Collect the children that have ended: (pid, exit code as ``subprocess`` has it)."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))
