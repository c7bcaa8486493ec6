"""Which paths are the project's, and what to say when a rank was refused a write there."""

# An audit hook resolves paths here at every open, and they may be bytes.
# ruff: noqa: PTH118, PTH120

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

#: How libraries put a refused write whose exception carries no file name: HDF5, Arrow, Rust's io::Error, a subprocess's
#: stderr, PyTorch's C++ writers.
_REFUSED_WORDS = re.compile(r"permission denied|errno\s*=?\s*13\b|os error 13\b|cannot be opened", re.IGNORECASE)
#: The same from those who never say which file: PyTorchFileWriter and SQLite.
_PATHLESS_WORDS = re.compile(
    r"open file failed with strerror: permission denied|readonly database|unable to open database file", re.IGNORECASE
)
_QUOTED = re.compile(r"""(['"])([^'"\n]+)\1""")
_BARE = re.compile(r"(?<![\w.:'\"/])/[^\s'\",:;]+")

#: Landlock leaves these open always; a refusal there has another cause.
_SYSTEM = ("/dev", "/proc", "/sys")


@dataclass(frozen=True)
class Territory:
    """The project as one rank sees it.

    Attributes:
        rank: The global rank.
        project: The directory that only rank 0 writes to, symbolic links resolved.
        writable: Paths, resolved, that are not the project's even where they lie in it.
        enforced: Whether Landlock holds the project, which also refuses what is new beside it.
    """

    rank: int
    project: str
    writable: tuple[str, ...]
    enforced: bool

    @classmethod
    def of(cls, rank: int, project: Path, writable: Sequence[Path], *, enforced: bool) -> Self:
        """Resolve the paths. A writable path that is the project or above it is dropped, as Landlock's rules do."""
        root = os.path.realpath(project)
        resolved = (os.path.realpath(path) for path in writable)
        return cls(rank, root, tuple(path for path in resolved if not _within(root, path)), enforced)

    def holds(self, path: object, *, follow: bool = True) -> bool:
        """Whether writing to ``path`` would write in the project.

        Args:
            path: str, bytes or PathLike, relative to the current directory. Anything else (a descriptor, an open
                file) is not a path and never in the project.
            follow: Whether a symbolic link at the end counts as where it leads (to open) or as itself (to remove).
        """
        resolved = _resolved(path, follow=follow)
        return resolved is not None and self.holds_resolved(resolved)

    def holds_resolved(self, path: str) -> bool:
        """As :meth:`holds`, for an absolute path without symbolic links."""
        return _within(path, self.project) and not any(_within(path, free) for free in self.writable)

    def refusal(self, path: object, found: str = "") -> PermissionError:
        """The error for a write to ``path``; ``found`` goes before the rule where there is more to say."""
        rule = f"rank {self.rank} may not write to the project, only rank 0 may"
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else path
        return PermissionError(errno.EACCES, f"{found}: {rule}" if found else rule, name)

    def explain(self, error: BaseException) -> str | None:
        """The note for an exception that a refused write caused, directly or through others; None for any other.

        A permission that the file itself withholds, to rank 0 as well, is not our refusal and gets no note.
        """
        for link in _chain(error):
            named, mentioned = list(_named_paths(link)), list(_mentioned_paths(link))
            # Of the two ends of a rename, the one in the project is what the refusal is about.
            candidates = [path for path in (*named, *mentioned) if self._inside(path)]
            candidates += [path for path in named if self._shut_out(path)]
            for path in filter(_permitted_by_mode, candidates):
                return self._note(path)
            if not mentioned and _PATHLESS_WORDS.search(_text(link)):
                return self._note(None)
        return None

    def _inside(self, path: str) -> bool:
        """Whether a write named ``path`` may have met the project, be it at the link itself or where it leads."""
        return self.holds(path, follow=False) or self.holds(path)

    def _shut_out(self, path: str) -> bool:
        """Whether ``path`` lies where Landlock's rules open only what stood there when they were made."""
        return self.enforced and not any(_within(path, free) for free in (*_SYSTEM, self.project, *self.writable))

    def _note(self, path: str | None) -> str:
        if path is not None and not self._inside(path):
            return (
                f"rank {self.rank} was refused a write to {path!r}, which is outside the project {self.project!r}.\n"
                "The kernel's rule leaves open what stood beside the project when the run began, not what is new.\n"
                "to do: make the directory before the cell runs, or name it in `project.writable` of the settings,\n"
                "       or run the cell with `--writes all`"
            )
        which = "probably refused a write (the error names no path)" if path is None else f"refused a write to {path!r}"
        return (
            f"rank {self.rank} was {which}. Only rank 0 writes to the project {self.project!r}.\n"
            "to do: guard the write with `if taas.rank() == 0:`,\n"
            "       or run the cell with `--writes all`, which sharded checkpoints need (every rank writes its part)"
        )


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _resolved(path: object, *, follow: bool) -> str | None:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    try:
        text = os.path.join(os.getcwd(), os.fsdecode(path))
        parent, name = os.path.split(text.rstrip("/"))
        if follow or name in ("", ".", ".."):
            return os.path.realpath(text)
        return os.path.join(os.path.realpath(parent), name)
    except (OSError, ValueError):  # no current directory; a null character. The write itself will say so.
        return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, its causes and contexts, and the members of groups, each once."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        link = todo.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += [link.__cause__, None if link.__suppress_context__ else link.__context__]
        if isinstance(link, BaseExceptionGroup):
            todo += link.exceptions


def _named_paths(error: BaseException) -> Iterator[str]:
    """The paths in the file names of an OSError that Landlock, or our audit hook, can have raised.

    Those are EACCES and EXDEV only; EPERM and EROFS come from modes, flags and mounts and meet rank 0 as well.
    """
    if not isinstance(error, OSError) or _is_failed_exec(error):
        return
    # The second name of a rename or a link is where something new would have come to be, so it goes first.
    names = (error.filename2, error.filename)
    paths = [path for name in names if (path := _resolved(name, follow=False)) is not None]
    if error.errno == errno.EACCES or (error.errno == errno.EXDEV and _on_one_device(paths)):
        yield from paths


def _mentioned_paths(error: BaseException) -> Iterator[str]:
    """What looks like a path in a message that says that something was refused, where nothing names one."""
    if isinstance(error, OSError) and error.filename is not None:
        return
    text = _text(error)
    if not _REFUSED_WORDS.search(text):
        return
    words = [match[2] for match in _QUOTED.finditer(text)]
    words = [word for word in words if "/" in word or "." in word or os.path.lexists(word)]
    words += [match[0] for match in _BARE.finditer(text)]
    yield from (path for word in words if (path := _resolved(word, follow=False)) is not None)


def _is_failed_exec(error: OSError) -> bool:
    """Whether ``error`` is about starting a program: its EACCES says that a file is not executable."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_code.co_name in ("_execute_child", "_execvpe")


def _on_one_device(paths: list[str]) -> bool:
    """Whether all of ``paths`` are on one file system: EXDEV has its plain meaning where they are not."""
    try:
        return len({os.lstat(os.path.dirname(path)).st_dev for path in paths}) == 1
    except OSError:
        return False


def _text(error: BaseException) -> str:
    """The message, with what a subprocess that failed wrote to its captured stderr."""
    stderr = getattr(error, "stderr", None)
    if isinstance(stderr, bytes):
        stderr = stderr.decode(errors="replace")
    return f"{error}\n{stderr}" if isinstance(stderr, str) else str(error)


def _permitted_by_mode(path: str) -> bool:
    """Whether the file's own permissions allow the write, so that it was a rule of ours that refused it.

    Landlock does not take part in access(2), so the answer is the one that rank 0 would get.
    """
    parent = os.path.dirname(path)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.lexists(path):
        return os.access(parent, os.W_OK | os.X_OK)
    if os.access(path, os.W_OK):
        return True
    return os.access(path, os.R_OK) and os.access(parent, os.W_OK | os.X_OK)
