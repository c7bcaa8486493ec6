"""The contents of files by their digests, and copies of projects made of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from taas_magic.machines.code_scan import FileEntry

#: Beside the files: what was made, so that it can be told from what runs have made.
STATE_NAME = ".taas-manifest.json"


class UntrustedPathError(ValueError):
    """A path that leads out of the project."""


@dataclass(frozen=True)
class CodeStore:
    """Contents by digest, in a directory that several processes may use at once.

    Args:
        directory: Where they are.
        budget_bytes: The most that is kept; what was not used for long goes first.
    """

    directory: Path
    budget_bytes: int = 2 * 2**30

    def missing(self, entries: Iterable[FileEntry]) -> list[bytes]:
        """The digests of contents that are not here."""
        digests = dict.fromkeys(entry.digest for entry in entries if not entry.link)
        return [digest for digest in digests if not self._path(digest).exists()]

    def put(self, digest: bytes, content: bytes) -> None:
        """Keep a content.

        Raises:
            ValueError: if it is not what its digest says.
        """
        if hashlib.blake2b(content, digest_size=32).digest() != digest:
            raise ValueError("a content that does not have its digest")
        path = self._path(digest)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with written(path) as file:
            file.write(content)

    def get(self, digest: bytes) -> bytes:
        """A content.

        Raises:
            OSError: if it is not here.
        """
        return self._path(digest).read_bytes()

    def shrink(self) -> None:
        """Let go of what is beyond the budget."""
        found = []
        for path in self.directory.glob("??/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.budget_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def materialise(self, entries: Sequence[FileEntry], target: Path) -> None:
        """Make a directory hold the files of a project as they are; what runs have made in it stays.

        Raises:
            UntrustedPathError: if a path leads out of it.
            OSError: if a content is not here, or the disk is full.
        """
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = _state_of(target)
        for gone in before.keys() - {entry.path for entry in entries}:
            with contextlib.suppress(OSError):
                inside(target, gone).unlink()
        now = {}
        for entry in entries:
            path = inside(target, entry.path)
            if before.get(entry.path) != _made_of(entry, path):
                self._make(entry, path, target)
                _make_newer(path, before.get(entry.path))
            now[entry.path] = _made_of(entry, path)
        with written(target / STATE_NAME) as file:
            file.write(json.dumps(now).encode())

    def _make(self, entry: FileEntry, path: Path, target: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        if entry.link:
            inside(target, str(PurePosixPath(entry.path).parent / entry.link))
            path.unlink(missing_ok=True)
            path.symlink_to(entry.link)
            return
        source = self._path(entry.digest)
        # It is in use: it goes later than others.
        os.utime(source)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            # A copy, and no link: ranks may write in it.
            shutil.copyfile(source, temporary)
            temporary.chmod(0o755 if entry.is_executable else 0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.directory / name[:2] / name[2:]


def _made_of(entry: FileEntry, path: Path) -> list[object]:
    """What is noted of a file that was made; its time tells whether a run has changed it since."""
    changed_at = 0
    with contextlib.suppress(OSError):
        changed_at = path.lstat().st_mtime_ns
    return [entry.digest.hex(), entry.size_bytes, entry.is_executable, entry.link, changed_at]


def _make_newer(path: Path, before: list[object] | None) -> None:
    """Give a file another second than it had: Python takes compiled code for current by second and size."""
    last = before[-1] if before else 0
    status = path.lstat()
    if isinstance(last, int) and status.st_mtime_ns < last + 10**9 and not path.is_symlink():
        os.utime(path, ns=(status.st_atime_ns, last + 10**9))


def _state_of(target: Path) -> dict[str, list[object]]:
    with contextlib.suppress(OSError, ValueError):
        state: dict[str, list[object]] = json.loads((target / STATE_NAME).read_text(encoding="utf-8"))
        return state
    return {}


def inside(target: Path, path: str) -> Path:
    """A path of the project.

    Raises:
        UntrustedPathError: if it leads out, by itself or by a link.
    """
    parts = PurePosixPath(os.path.normpath(path)).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise UntrustedPathError(f"a path that leads out of the project: {path!r}")
    here = target
    for part in parts[:-1]:
        here /= part
        if here.is_symlink():
            if not here.resolve().is_relative_to(target.resolve()):
                raise UntrustedPathError(f"a path that leads out of the project by a link: {path!r}")
        elif here.exists() and not here.is_dir():
            here.unlink()
    return here / parts[-1]


@contextlib.contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file that is whole when it is there."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
