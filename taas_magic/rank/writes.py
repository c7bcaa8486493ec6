"""What a rank other than 0 does so that code written for one GPU works, though it may not write to the project.

The kernel refuses the writes (:mod:`taas_magic.rank.landlock`). Around that, :class:`WriteGuard` leaves out
``torch.save`` into the project, lets ``makedirs(exist_ok=True)`` wait for rank 0's directory, remembers what it left
out, and says of a refused write what to do about it. Where there is no Landlock it also refuses, as far as Python can.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pathlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taas_magic.rank.refusal import Territory

#: Where libraries that run in ranks keep caches and state, by the variable that moves it. Their defaults are beneath
#: the cache directory unless `_HOME_STATE` names them.
_CACHE_VARIABLES = (
    "CUDA_CACHE_PATH",
    "HF_DATASETS_CACHE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "IPYTHONDIR",
    "MPLCONFIGDIR",
    "NUMBA_CACHE_DIR",
    "PYTHONPYCACHEPREFIX",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
)
_HOME_STATE = (".triton", ".nv", ".ipython", ".config/matplotlib")

_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.05


def default_writable(environ: Mapping[str, str], home: Path) -> list[Path]:
    """Directories that every rank must be able to write, even where they lie in the project or are new.

    The cache directory (``XDG_CACHE_HOME``, else ``~/.cache``) is made if missing, and ``~/.triton`` where Triton is
    installed, since what comes into being later beneath a closed home could not be opened. Of the others those that
    exist are given.

    Args:
        environ: The environment that ranks will have, with their ``TMPDIR``.
        home: The home directory.
    """
    cache = _cache_directory(environ, home)
    triton = home / ".triton"
    for directory in (cache, triton) if _has_triton() else (cache,):
        with contextlib.suppress(OSError):  # a home that cannot be written has no caches to keep
            directory.mkdir(parents=True, exist_ok=True)
    moved = (Path(environ[name]).expanduser() for name in _CACHE_VARIABLES if environ.get(name))
    temporary = (Path(environ.get("TMPDIR") or "/tmp"), Path("/dev/shm"))  # noqa: S108  nothing is made there
    candidates = (cache, *moved, *(home / name for name in _HOME_STATE), *temporary)
    return list(dict.fromkeys(path for path in candidates if path.exists()))


@functools.cache
def _has_triton() -> bool:
    """Looked up once, in the zygote."""
    return importlib.util.find_spec("triton") is not None


def writable_for_all(environ: Mapping[str, str], more: Sequence[str], run_dirs: Path) -> list[Path]:
    """What every rank may write, wherever the project is.

    Args:
        environ: The environment that ranks will have.
        more: What the settings name.
        run_dirs: Where the directories of runs are made, and the ranks' own temporary ones in them.
    """
    home = Path(environ.get("HOME") or Path.home())
    return [*default_writable({**environ, "TMPDIR": str(run_dirs)}, home), *map(Path, more), run_dirs]


def _cache_directory(environ: Mapping[str, str], home: Path) -> Path:
    configured = Path(environ.get("XDG_CACHE_HOME", ""))
    return configured if configured.is_absolute() else home / ".cache"  # the XDG specification ignores relative ones


def degraded_notice() -> str:
    """What to tell the user, once a run, where Landlock does not hold the project."""
    return (
        "this system has no Landlock that can be used (Linux 5.19 or newer has), so ranks other than 0 are kept from "
        "writing to the project by Python alone: what their C++ code and subprocesses write there is not refused"
    )


@dataclass(frozen=True)
class LeftOut:
    """A write of the cell that a rank left out because rank 0 does it.

    Attributes:
        what: The function, such as ``torch.save``.
        path: The path as the cell gave it.
        count: How many times, at least 1.
    """

    what: str
    path: str
    count: int


class WriteGuard:
    """Makes this process behave as a rank that may not write to the project. One for the life of a process."""

    def __init__(self, *, writable: Sequence[Path] = (), directory_wait_s: float = 60.0) -> None:
        """Prepare, and change nothing yet.

        Args:
            writable: What is not the project's even where it lies in it: the same that the ruleset was built with.
            directory_wait_s: How many seconds to wait for a directory that rank 0 is to make.
        """
        if directory_wait_s < 0:
            raise ValueError(f"directory_wait_s is {directory_wait_s}; expected: seconds, 0 or more")
        self._writable = tuple(writable)
        self._directory_wait_s = directory_wait_s
        self._territory: Territory | None = None
        self._left_out: list[tuple[str, str]] = []

    def install(self, rank: int, project: Path, *, enforced: bool) -> None:
        """Take effect in this process and those that it forks. Does nothing on rank 0.

        Install it before the cell's namespace is unpacked: a function such as ``torch.save`` that travels with the
        namespace is then the guarded one. It holds until the process ends.

        Args:
            rank: The global rank.
            project: The directory that only rank 0 writes to.
            enforced: Whether Landlock holds the project. If not, Python refuses what it can.
        """
        if rank == 0:
            return
        self._territory = Territory.of(rank, project, self._writable, enforced=enforced)
        self._guard_torch_save(self._territory)
        self._guard_directories(self._territory)
        if not enforced:
            from taas_magic.rank import audit_writes

            audit_writes.install(self._territory)

    def left_out(self) -> list[LeftOut]:
        """What was left out so far, in the order in which it first was."""
        return [LeftOut(what, path, count) for (what, path), count in Counter(self._left_out).items()]

    def take_left_out(self) -> list[LeftOut]:
        """The same, and begin anew: a kept rank is asked once a cell."""
        found = self.left_out()
        self._left_out.clear()
        return found

    def explain(self, error: BaseException) -> str | None:
        """The note to add to an exception that ended the cell, if a refused write is behind it; else None.

        Looks through causes, contexts and groups. The note names the rank, the path where the error tells it, and the
        two ways out.
        """
        return self._territory.explain(error) if self._territory else None

    def _guard_torch_save(self, territory: Territory) -> None:
        import torch

        original = torch.save

        @functools.wraps(original)
        def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            if territory.holds(f):
                self._left_out.append(("torch.save", os.fsdecode(f)))
            else:
                original(obj, f, *args, **kwargs)

        torch.save = torch.serialization.save = save

    def _guard_directories(self, territory: Territory) -> None:
        # Path.mkdir calls os.mkdir, and os.makedirs itself, through these same names, so each has to bear the others.
        make_one, make_all, make_path = os.mkdir, os.makedirs, pathlib.Path.mkdir

        @functools.wraps(make_one)
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            with _clear_refusal(territory, path):
                make_one(path, *args, **kwargs)

        @functools.wraps(make_all)
        def makedirs(name: Any, mode: int = 0o777, exist_ok: bool = False) -> None:
            if exist_ok and territory.holds(name):
                self._await_directory(territory, name)
            make_all(name, mode, exist_ok)

        @functools.wraps(make_path)
        def path_mkdir(self_: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
            if exist_ok and territory.holds(self_):
                self._await_directory(territory, self_)
            make_path(self_, mode, parents, exist_ok)

        os.mkdir, os.makedirs = mkdir, makedirs
        pathlib.Path.mkdir = path_mkdir  # type: ignore[method-assign,assignment]

    def _await_directory(self, territory: Territory, path: Any) -> None:
        """Return when there is something at ``path``; the original function then finds it, and judges what it is."""
        deadline = time.monotonic() + self._directory_wait_s
        pause_s = _FIRST_POLL_S
        while not os.path.lexists(path):
            if time.monotonic() >= deadline:
                found = f"rank 0 did not make this directory within {self._directory_wait_s:g} s"
                raise territory.refusal(path, found)
            # Polled, because inotify is not told of what another machine makes on a shared file system.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)


@contextlib.contextmanager
def _clear_refusal(territory: Territory, path: Any) -> Iterator[None]:
    """Say in a PermissionError about ``path`` what the kernel's own words leave out, if it is the project's."""
    try:
        yield
    except PermissionError as error:
        if not territory.holds(path, follow=False):
            raise
        raise territory.refusal(path) from error
