"""GPUs that several runners of one machine share: each GPU is a file, and who has locked it has the GPU.

Runners that notebooks start over ssh know nothing of each other. Locks (flock(2)) are the machine's, and end with the
process that has them, however it ends. Who waits has a ticket, a locked file whose name says when it came: the first
ticket that is still locked goes first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: For all users of the machine, as the GPUs are.
SHARED = Path("/tmp/taas-gpus")  # noqa: S108 - on purpose; what others do there can keep GPUs back, and nothing else


@dataclass
class Ticket:
    """Somebody's place in the queue."""

    path: Path
    fd: int


@dataclass
class GpuLocks:
    """One process's hold on the machine's GPUs.

    Args:
        directory: Where the files are.
        gpus: The GPUs, by their UUIDs.
    """

    directory: Path
    gpus: Sequence[str]
    _held: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for directory in (self.directory, self.directory / "queue"):
            with contextlib.suppress(FileExistsError):
                directory.mkdir(parents=True)
                # Others may add files, and delete their own.
                directory.chmod(0o1777)

    def queue(self) -> Ticket:
        """Take a ticket."""
        path = self.directory / "queue" / f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        # Written beside, and moved when it is locked: nobody sees a ticket of the living unlocked.
        temporary = path.with_name(f".{path.name}")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX)
        temporary.rename(path)
        return Ticket(path, fd)

    def place_of(self, ticket: Ticket) -> int:
        """The place in the queue, from 1 on; tickets of those who have ended are taken away."""
        place = 1
        for path in sorted(self.directory.glob("queue/[0-9]*")):
            if path == ticket.path:
                return place
            if _is_locked(path):
                place += 1
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
        return place

    def give_up(self, ticket: Ticket) -> None:
        """Leave the queue."""
        with contextlib.suppress(OSError):
            ticket.path.unlink()
        os.close(ticket.fd)

    def take(self, count: int) -> list[str] | None:
        """Lock so many GPUs, in their order; None where not as many are free."""
        taken: list[str] = []
        for gpu in self.gpus:
            if len(taken) == count:
                break
            if gpu not in self._held and self._lock(gpu):
                taken.append(gpu)
        if len(taken) < count:
            self.release(taken)
            return None
        return taken

    def release(self, gpus: Sequence[str]) -> None:
        """Unlock GPUs."""
        for gpu in gpus:
            fd = self._held.pop(gpu, -1)
            if fd >= 0:
                os.close(fd)

    @property
    def num_free(self) -> int:
        """How many nobody has."""
        return sum(gpu not in self._held and not _is_locked(self._path(gpu)) for gpu in self.gpus)

    def _path(self, gpu: str) -> Path:
        return self.directory / f"{gpu.replace('/', '_')}.lock"

    def _lock(self, gpu: str) -> bool:
        path = self._path(gpu)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:
            # Another user's file, in a directory where Linux lets nobody else open it to create (protected_regular).
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._held[gpu] = fd
        return True


def _is_locked(path: Path) -> bool:
    """Whether somebody has locked a file; one that is not there is not locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
