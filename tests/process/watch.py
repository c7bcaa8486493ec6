"""What tests look at from outside: processes of a kernel, their titles, and when they have gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from leaks import Process


def below(pid: int) -> list[int]:
    """All living processes that descend from ``pid``."""
    by_parent: dict[int, list[int]] = {}
    for process in Process.all():
        if process.state != "Z":
            by_parent.setdefault(process.parent, []).append(process.pid)
    found: list[int] = []
    generation = by_parent.get(pid, [])
    while generation:
        found += generation
        generation = [child for parent in generation for child in by_parent.get(parent, [])]
    return found


def title(pid: int) -> str:
    """What ``ps`` shows of a process; "" once it has gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return ""


def titled(pid: int, start: str) -> list[int]:
    """The descendants of ``pid`` whose title starts with ``start``."""
    return [found for found in below(pid) if title(found).startswith(start)]


def only(found: list[int]) -> int:
    """The single process of a list."""
    assert len(found) == 1, [title(pid) for pid in found]
    return found[0]


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended (one that waits to be reaped has)."""
    with contextlib.suppress(OSError):
        return Process._parse(Path(f"/proc/{pid}/stat").read_text()).state != "Z"
    return False


def await_gone(pids: Iterable[int], timeout: float) -> None:
    """Wait until processes have ended.

    Raises:
        AssertionError: naming those that live on.
    """
    deadline = time.monotonic() + timeout
    left = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
                left.append(f"{pid} {title(pid)}")
            os.close(handle)
    assert not left, f"still there after {timeout} s: {left}"


def await_condition(condition: Callable[[], bool], what: str, timeout: float = 10.0) -> None:
    """Wait for what nothing signals, by looking again and again.

    Raises:
        AssertionError: if it does not come in time.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for: {what}"
        select.select([], [], [], 0.02)


def kill(pid: int) -> None:
    """SIGKILL one process."""
    os.kill(pid, signal.SIGKILL)
