"""What a test left behind: processes, threads, descriptors, shared memory, temporary directories.

A :class:`Snapshot` says what this process has at one moment, and :func:`wait_until_gone` what is there beyond it, once
it has had time to go. Orphans count: :func:`become_subreaper` makes them children of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SHARED_MEMORY = Path("/dev/shm")
#: How the project names its temporary directories.
TEMPORARY = "taas-*"


def become_subreaper() -> None:
    """Have orphaned descendants become children of this process, where they can be seen."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@dataclass(frozen=True)
class Process:
    """One process as /proc has it; the start time tells two that had the same number apart."""

    pid: int
    parent: int
    state: str
    started_ticks: int

    @classmethod
    def all(cls) -> Iterator[Process]:
        """Every process of the system that can be read."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # ended meanwhile
                    yield cls._parse((entry / "stat").read_text())

    @classmethod
    def _parse(cls, stat: str) -> Process:
        pid, _, rest = stat.partition(" ")
        fields = rest.rpartition(")")[2].split()  # the name before it may hold anything
        return cls(pid=int(pid), parent=int(fields[1]), state=fields[0], started_ticks=int(fields[19]))

    def describe(self) -> str:
        """Its number and command line."""
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return f"process {self.pid} ({self.state}): {command.strip()[:200] or '?'}"
        return f"process {self.pid}"


def descendants() -> set[Process]:
    """All processes below this one."""
    by_parent: dict[int, list[Process]] = {}
    for process in Process.all():
        by_parent.setdefault(process.parent, []).append(process)
    found: set[Process] = set()
    generation = [os.getpid()]
    while generation:
        children = [child for parent in generation for child in by_parent.get(parent, [])]
        found.update(children)
        generation = [child.pid for child in children]
    return found


def _key(process: Process) -> tuple[int, int]:
    return process.pid, process.started_ticks


def _descriptors() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            found[int(entry.name)] = str(entry.readlink())
    return found


def _temporary() -> set[Path]:
    places = {Path(tempfile.gettempdir()), Path(os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir()))}
    return {path for place in places for path in place.glob(TEMPORARY)}


def _used_elsewhere(entry: Path) -> bool:
    """Whether a process that is not below this one holds a piece of shared memory: then it is not this test's."""
    ours = {os.getpid()} | {process.pid for process in descendants()}
    for process in Process.all():
        if process.pid in ours:
            continue
        with contextlib.suppress(OSError):
            if str(entry) in Path(f"/proc/{process.pid}/maps").read_text():
                return True
            if any(link.readlink() == entry for link in Path(f"/proc/{process.pid}/fd").iterdir()):
                return True
    return False


@dataclass(frozen=True)
class Snapshot:
    """What this process has at one moment."""

    processes: frozenset[tuple[int, int]]
    threads: frozenset[int]
    descriptors: dict[int, str]
    shared_memory: frozenset[Path]
    temporary: frozenset[Path]

    @classmethod
    def take(cls) -> Snapshot:
        """Look now."""
        return cls(
            processes=frozenset(_key(process) for process in descendants()),
            threads=frozenset(id(thread) for thread in threading.enumerate()),
            descriptors=_descriptors(),
            shared_memory=frozenset(SHARED_MEMORY.iterdir()),
            temporary=frozenset(_temporary()),
        )

    def beyond(self) -> list[str]:
        """What is there now and was not then, described; ended children are reaped on the way."""
        return [
            *self._processes_beyond(),
            *(f"thread {t.name}" for t in threading.enumerate() if id(t) not in self.threads),
            *(
                f"descriptor {number}: {target}"
                for number, target in _descriptors().items()
                if number not in self.descriptors
            ),
            *(f"shared memory {path}" for path in SHARED_MEMORY.iterdir() if path not in self.shared_memory),
            *(f"temporary {path}" for path in _temporary() - self.temporary),
        ]

    def _processes_beyond(self) -> Iterator[str]:
        now = descendants()
        for process in now:
            if _key(process) in self.processes or self._is_renewed_zygote(process, now) or _is_on_standby(process, now):
                continue
            if process.state == "Z" and process.parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            else:
                yield process.describe()

    def _is_renewed_zygote(self, process: Process, now: set[Process]) -> bool:
        """Whether it is the one preloaded zygote of a zygote that was there: a new one comes as imports grow."""
        parents = {each.pid for each in now if _key(each) in self.processes}
        siblings = [each for each in now if each.parent == process.parent and _is_preloaded_zygote(each)]
        return process.parent in parents and siblings == [process]


def _is_preloaded_zygote(process: Process) -> bool:
    return _title(process).startswith("taas: zygote (preloaded)")


def _is_on_standby(process: Process, now: set[Process]) -> bool:
    """Whether it belongs to the one run that a living zygote keeps waiting, in place of the one that was taken."""
    by_pid = {each.pid: each for each in now}
    while _title(process) != "taas: standby":
        if process.parent not in by_pid:
            return False
        process = by_pid[process.parent]
    parent = by_pid.get(process.parent)
    siblings = [each for each in now if each.parent == process.parent and _title(each) == "taas: standby"]
    return parent is not None and _title(parent).startswith("taas: zygote") and len(siblings) == 1


def _title(process: Process) -> str:
    with contextlib.suppress(OSError):  # ended meanwhile
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0 ").decode(errors="replace")
    return ""


def wait_until_gone(since: Snapshot, *, deadline_s: float = 10.0) -> list[str]:
    """What is there beyond ``since`` and does not go within the deadline; empty where all went."""
    until = time.monotonic() + deadline_s
    while left := since.beyond():
        gc.collect()  # what only a cycle holds is no leak
        remaining_s = until - time.monotonic()
        if remaining_s <= 0:
            break
        # Nothing signals that the last of several kinds of things went; so look again, soon.
        select.select([], [], [], min(0.02, remaining_s))
    return [what for what in left if not _is_anothers(what)]


def _is_anothers(what: str) -> bool:
    kind, _, name = what.partition("shared memory ")
    return not kind and _used_elsewhere(Path(name))
