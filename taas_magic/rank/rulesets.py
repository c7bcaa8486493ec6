"""The Landlock ruleset of a run, built once for all of its ranks, and where possible before the run is there.

To build one takes some microseconds for each entry beside the project, and there may be thousands. So the run zygote
builds it before it forks the ranks, for the project that the run most likely has; a rank whose run has another, or
beside whose project something has come or gone meanwhile, builds its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from taas_magic.rank import landlock

#: Times of directories are those of the last tick of the kernel's clock: what changed in this one may not show.
_TICK_NS = 50_000_000

#: (path, inode, time of change) of a directory.
_Stamp = tuple[str, int, int]


@dataclass(frozen=True)
class _Prepared:
    project: str
    writable: tuple[str, ...]
    stamps: list[_Stamp]
    mounts: bytes
    fd: int


_prepared: list[_Prepared] = []


def prepare(project: Path, writable: Sequence[Path]) -> None:
    """Build a ruleset for processes that are forked from this one; see :func:`landlock.build_ruleset`.

    Raises:
        OSError: if it cannot be built.
    """
    stamps, mounts = _stamps(project), _mounts()
    now = time.time_ns()
    if any(changed > now - _TICK_NS for _, _, changed in stamps):
        return
    fd = landlock.build_ruleset(project, writable)
    _prepared.append(_Prepared(str(project), tuple(map(str, writable)), stamps, mounts, fd))


def ruleset_for(project: Path, writable: Sequence[Path]) -> int:
    """The ruleset that was prepared, if it is right still, or a new one; the caller closes it.

    Raises:
        OSError: as :func:`landlock.build_ruleset`.
    """
    for each in _prepared:
        is_same = (each.project, each.writable) == (str(project), tuple(map(str, writable)))
        if is_same and each.stamps == _stamps(project) and each.mounts == _mounts():
            return os.dup(each.fd)
    return landlock.build_ruleset(project, writable)


def _stamps(project: Path) -> list[_Stamp]:
    """What tells whether an entry has come or gone in the directories above the project."""
    root = Path(os.path.realpath(project, strict=True))
    stamps = []
    for directory in (root, *root.parents):
        status = directory.stat()
        # Of the project itself only where it is matters, not what is in it.
        stamps.append((str(directory), status.st_ino, 0 if directory == root else status.st_mtime_ns))
    return stamps


def _mounts() -> bytes:
    try:
        return Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return b""
