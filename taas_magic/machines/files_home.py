"""Files that a run makes or changes in its copy of the project come to the notebook's machine.

There nothing is lost: a file that was changed on both sides stays as it is, and the run's is put beside it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import msgspec

from taas_magic.machines.code_scan import FileEntry, digest_of, is_left_out
from taas_magic.machines.code_store import STATE_NAME, UntrustedPathError, inside, written
from taas_magic.units import format_bytes


class FileChange(msgspec.Struct, frozen=True, array_like=True):
    """A file that a run has made, changed or, with an empty digest, deleted."""

    path: str
    digest: bytes
    size_bytes: int
    is_executable: bool = False
    #: The digest that it had when the notebook knew it last; empty where it did not.
    before: bytes = b""


@dataclass
class Watcher:
    """Sees what changes in a copy of a project.

    Args:
        target: The copy.
        entries: What it was made of.
        limit_bytes: A file that is larger stays on the machine.
    """

    target: Path
    entries: Sequence[FileEntry]
    limit_bytes: int
    #: Of each file: (size, time, inode) when it was looked at last, and its digest as far as the notebook knows it.
    _seen: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    _known: dict[str, bytes] = field(default_factory=dict)
    _checked: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    #: Files that stay, and why.
    left: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = {entry.path: entry.digest for entry in self.entries if not entry.link}
        links = {entry.path for entry in self.entries if entry.link}
        for path, status in self._files():
            if path in self._known or path in links:
                self._checked[path] = _mark(status)
            else:
                # What an earlier run has made: it came home then.
                self._checked[path] = _mark(status)
                with contextlib.suppress(OSError):
                    self._known[path] = digest_of(self.target / path)

    def changes(self, *, final: bool = False) -> list[FileChange]:
        """What has changed since it was asked last.

        Args:
            final: Report also what has changed since the last look only, and may still be being written.
        """
        found: list[FileChange] = []
        now = dict(self._files())
        for path, status in now.items():
            mark = _mark(status)
            if self._checked.get(path) == mark:
                continue
            is_quiet = self._seen.get(path) == mark
            self._seen[path] = mark
            if is_quiet or final:
                change = self._look(path, status, mark)
                if change is not None:
                    found.append(change)
        for path in [path for path in self._known if path not in now and not (self.target / path).is_symlink()]:
            before = self._known.pop(path)
            self._checked.pop(path, None)
            found.append(FileChange(path, b"", 0, before=before))
        return found

    def _look(self, path: str, status: os.stat_result, mark: tuple[int, int, int]) -> FileChange | None:
        if status.st_size > self.limit_bytes:
            self.left[path] = f"{format_bytes(status.st_size)} is more than {format_bytes(self.limit_bytes)}"
            self._checked[path] = mark
            return None
        try:
            digest = digest_of(self.target / path)
        except OSError as error:
            self.left[path] = str(error.strerror or error)
            return None
        self._checked[path] = mark
        before = self._known.get(path, b"")
        if before == digest:
            return None
        self._known[path] = digest
        return FileChange(path, digest, status.st_size, bool(status.st_mode & stat.S_IXUSR), before)

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        for root, names, files in os.walk(self.target):
            names[:] = [name for name in names if not is_left_out(name)]
            for name in files:
                full = Path(root, name)
                path = full.relative_to(self.target).as_posix()
                if path == STATE_NAME or is_left_out(path):
                    continue
                with contextlib.suppress(OSError):
                    status = full.lstat()
                    if stat.S_ISREG(status.st_mode):
                        yield path, status


def _mark(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


@dataclass
class HomeFiles:
    """The project on the notebook's machine, which files come to.

    Args:
        directory: The project.
        known: The digests of its files as the machines have them, by path; "" for none.
    """

    directory: Path
    known: dict[str, bytes]

    def apply(self, change: FileChange, content: bytes, run_id: str) -> str:
        """Bring a change home; returns what the user should know of it, "" for nothing.

        Raises:
            UntrustedPathError: if its path leads out of the project.
            OSError: if it cannot be written.
        """
        path = inside(self.directory, change.path)
        if is_left_out(change.path) or path.is_symlink():
            raise UntrustedPathError(f"a path that nothing is written to: {change.path!r}")
        here = digest_of(path) if path.is_file() else b""
        is_ours = here in (self.known.get(change.path, change.before), change.digest)
        if not change.digest:
            return self._delete(path, change.path, is_ours=is_ours)
        if here == change.digest:
            self.known[change.path] = change.digest
            return ""
        if not is_ours:
            name = PurePosixPath(change.path)
            beside = path.with_name(f"{name.stem}.from-run-{run_id}{name.suffix}")
            self._write(beside, change, content)
            return f"{change.path} was changed here, too: the run's is in {beside.name} beside it"
        self._write(path, change, content)
        self.known[change.path] = change.digest
        return ""

    def _delete(self, path: Path, name: str, *, is_ours: bool) -> str:
        if path.exists() and not is_ours:
            return f"{name} was deleted by the run, and changed here: it stays"
        self.known.pop(name, None)
        path.unlink(missing_ok=True)
        return ""

    @staticmethod
    def _write(path: Path, change: FileChange, content: bytes) -> None:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory here")
        path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | (0o111 if change.is_executable else 0))
