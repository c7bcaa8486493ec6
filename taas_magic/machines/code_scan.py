"""Which files are a project's: what git would take, and what is never meant."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from taas_magic.errors import PlacementError
from taas_magic.units import format_bytes, plural

#: Never sent, whatever git says of them.
LEFT_OUT = frozenset(
    {".git", "__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".tox"}
)
_LEFT_OUT_SUFFIXES = (".pyc", ".pyo")
_GIT_TIMEOUT_S = 30.0
_READ_BYTES = 1024 * 1024
_NUM_NAMED = 5


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """One file of a project."""

    #: Relative to the project's directory, with slashes.
    path: str
    digest: bytes
    size_bytes: int
    is_executable: bool = False
    #: Where a symbolic link points to, within the project; "" for a file.
    link: str = ""


@dataclass(frozen=True)
class Manifest:
    """All files of a project, sorted by path."""

    entries: tuple[FileEntry, ...]
    #: What cannot be sent, and why.
    problems: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(entry.size_bytes for entry in self.entries)


@dataclass
class Scanner:
    """Looks a project through, and reads again only what has changed since.

    Args:
        directory: The project's directory.
        limit_bytes: The most that all files may have.
    """

    directory: Path
    limit_bytes: int
    _digests: dict[tuple[str, int, int, int], bytes] = field(default_factory=dict)

    def scan(self) -> Manifest:
        """Find the project's files.

        Raises:
            PlacementError: if they are more than may be sent; it names the largest.
        """
        entries: list[FileEntry] = []
        problems: list[str] = []
        known: dict[tuple[str, int, int, int], bytes] = {}
        sizes: list[tuple[int, str]] = []
        for path in sorted(set(_listed(self.directory))):
            try:
                entry = self._entry(path, known, sizes)
            except (OSError, UnicodeEncodeError) as error:
                problems.append(f"{path!r}: {getattr(error, 'strerror', None) or error}")
                continue
            if isinstance(entry, FileEntry):
                entries.append(entry)
            elif entry:
                problems.append(f"{path}: {entry}")
            self._require_within_limit(sizes)
        self._digests = known
        return Manifest(tuple(entries), tuple(problems))

    def _entry(
        self, path: str, known: dict[tuple[str, int, int, int], bytes], sizes: list[tuple[int, str]]
    ) -> FileEntry | str | None:
        """The entry of a file; why it cannot be sent; None where it is nothing to send."""
        path.encode()
        full = self.directory / path
        status = full.lstat()
        if stat.S_ISLNK(status.st_mode):
            target = str(full.readlink())
            inside = (full.parent / target).resolve().is_relative_to(self.directory.resolve())
            return FileEntry(path, b"", 0, link=target) if inside and not target.startswith("/") else "a link out of it"
        if not stat.S_ISREG(status.st_mode):
            return None
        sizes.append((status.st_size, path))
        self._require_within_limit(sizes)
        key = path, status.st_size, status.st_mtime_ns, status.st_ino
        digest = known[key] = self._digests.get(key) or digest_of(full)
        return FileEntry(path, digest, status.st_size, bool(status.st_mode & stat.S_IXUSR))

    def _require_within_limit(self, sizes: list[tuple[int, str]]) -> None:
        total = sum(size for size, _ in sizes)
        if total <= self.limit_bytes:
            return
        largest = sorted(sizes, reverse=True)[:_NUM_NAMED]
        named = ", ".join(f"{path} ({format_bytes(size)})" for size, path in largest)
        raise PlacementError.of(
            f"the project {self.directory} has more than {format_bytes(self.limit_bytes)} to send "
            f"({plural(len(sizes), 'file')} so far); the largest: {named}",
            expected="the code and what it reads; data has its own place on the machines",
            do="add what is not needed there to .gitignore, set `code_dir` of the pool, or raise its `code_limit_mib`",
        )


def digest_of(path: Path) -> bytes:
    """The digest of a file's content."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.digest()


def is_left_out(path: str) -> bool:
    """Whether a path is never sent, in neither direction."""
    parts = path.split("/")
    return any(part in LEFT_OUT for part in parts) or parts[-1].endswith(_LEFT_OUT_SUFFIXES)


def _listed(directory: Path) -> Iterator[str]:
    listed = _by_git(directory)
    if listed is None:
        yield from _by_walking(directory)
        return
    for path in listed:
        if not is_left_out(path):
            yield path


def _by_git(directory: Path) -> list[str] | None:
    """What git has and would take; None where it cannot say."""
    command = ["git", "-C", str(directory), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    paths = [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]
    # Deleted files are still listed, and of a submodule only its directory is.
    found = [path for path in paths if (directory / path).is_symlink() or (directory / path).is_file()]
    for path in paths:
        if (directory / path).is_dir() and not (directory / path).is_symlink():
            inner = _by_git(directory / path) or []
            found += [f"{path.rstrip('/')}/{name}" for name in inner]
    return found


def _by_walking(directory: Path) -> Iterator[str]:
    """As git would, as far as `.gitignore` files say."""
    import pathspec

    specs: dict[str, list[tuple[str, pathspec.GitIgnoreSpec]]] = {"": []}
    for root, names, files in os.walk(directory):
        here = os.path.relpath(root, directory).replace(os.sep, "/")
        here = "" if here == "." else here
        inherited = specs.pop(here, [])
        if ".gitignore" in files:
            lines = (Path(root) / ".gitignore").read_text(errors="replace").splitlines()
            inherited = [*inherited, (here, pathspec.GitIgnoreSpec.from_lines(lines))]
        if "pyvenv.cfg" in files and here:
            names.clear()
            continue
        for name in list(names):
            path = f"{here}/{name}" if here else name
            if name in LEFT_OUT or _is_ignored(f"{path}/", inherited) or (Path(root) / name).is_symlink():
                names.remove(name)
            else:
                specs[path] = inherited
        for name in files:
            path = f"{here}/{name}" if here else name
            if not is_left_out(path) and not _is_ignored(path, inherited):
                yield path


def _is_ignored(path: str, specs: Sequence[tuple[str, Any]]) -> bool:
    """Whether `.gitignore` files leave a path out; what is nearer to it counts."""
    for base, spec in reversed(specs):
        inner = path[len(base) + 1 :] if base else path
        result = spec.check_file(inner)
        if result.include is not None:
            return bool(result.include)
    return False
