"""Memory files that travel beside messages, and what each side has of them."""

from __future__ import annotations

import errno
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from taas_magic.namespace.blocks import available_memory_bytes
from taas_magic.units import format_bytes
from taas_magic.wire_base import MemoryFile, Message

ID_BYTES = 16


@dataclass(eq=False)
class File:
    """A memory file that is, or was, or will be on other machines, too.

    Attributes:
        id: By which all machines know it.
        fd: The file here; owned by this object.
        size_bytes: Its size.
        have_bytes: How much of it is here, from its beginning.
    """

    id: bytes
    fd: int
    size_bytes: int
    have_bytes: int

    @classmethod
    def of(cls, fd: int, size_bytes: int) -> File:
        """A file that is here."""
        return cls(secrets.token_bytes(ID_BYTES), fd, size_bytes, size_bytes)

    @classmethod
    def expected(cls, file_id: bytes, size_bytes: int) -> File:
        """A file that will come.

        Raises:
            OSError: if there is no memory for it.
        """
        available = available_memory_bytes()
        if size_bytes > available:
            # Asked for all the same, the system would end processes to find it.
            text = f"{format_bytes(size_bytes)} are to come, and {format_bytes(available)} of memory are free"
            raise OSError(errno.ENOMEM, text)
        fd = os.memfd_create("taas-file", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size_bytes) if size_bytes else None
        except OSError:
            os.close(fd)
            raise
        return cls(file_id, fd, size_bytes, 0)

    def close(self) -> None:
        """Let go of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class FileStore:
    """The files that a conversation knows, most recently used last; those that were not used for long go first."""

    budget_bytes: int
    files: OrderedDict[bytes, File] = field(default_factory=OrderedDict)
    _by_inode: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def add(self, file: File) -> File:
        """Keep a file."""
        self.files[file.id] = file
        self._by_inode[_inode_of(file.fd)] = file.id
        return file

    def opened(self, fd: int, size_bytes: int) -> File:
        """The file that a descriptor is of; takes the descriptor."""
        known = self.files.get(self._by_inode.get(_inode_of(fd), b""))
        if known is None:
            return self.add(File.of(fd, size_bytes))
        os.close(fd)
        self.files.move_to_end(known.id)
        return known

    def get(self, file_id: bytes) -> File | None:
        """A file that is kept."""
        file = self.files.get(file_id)
        if file is not None:
            self.files.move_to_end(file_id)
        return file

    def shrink(self, needed: Iterable[File] = ()) -> list[bytes]:
        """Let go of what is beyond the budget; returns the ids."""
        spared = {file.id for file in needed}
        gone = []
        total = sum(file.size_bytes for file in self.files.values())
        for file_id, file in list(self.files.items()):
            if total <= self.budget_bytes:
                break
            if file_id not in spared:
                total -= file.size_bytes
                self.drop(file_id)
                gone.append(file_id)
        return gone

    def drop(self, file_id: bytes) -> None:
        """Let go of a file."""
        file = self.files.pop(file_id, None)
        if file is not None:
            self._by_inode.pop(_inode_of(file.fd), None)
            file.close()

    def close(self) -> None:
        """Let go of all."""
        for file_id in list(self.files):
            self.drop(file_id)


def _inode_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def with_files(message: Any, change: Callable[[MemoryFile], MemoryFile]) -> Any:
    """A message with all its memory files changed: those in its fields, and in lists that are fields."""
    changes: dict[str, Any] = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, MemoryFile):
            changes[name] = change(value)
        elif isinstance(value, list) and value and isinstance(value[0], MemoryFile):
            changes[name] = [change(each) for each in value]
    return msgspec.structs.replace(message, **changes) if changes else message


def to_send(message: Any, store: FileStore) -> tuple[Any, list[File]]:
    """A message of this machine as it is said to another: its memory files are places in a list of files.

    Raises:
        OSError: if whoever holds a file has gone.
    """
    places: dict[bytes, int] = {}
    files: list[File] = []

    def sent(file: MemoryFile) -> MemoryFile:
        here = store.opened(file.open(), file.size_bytes)
        if here.id not in places:
            places[here.id] = len(files)
            files.append(here)
        return MemoryFile(0, places[here.id], file.size_bytes)

    return with_files(message, sent), files


def as_received(message: Any, files: Sequence[File]) -> Any:
    """The reverse of :func:`to_send`, on the other machine.

    Raises:
        IndexError: if the message names files that did not come with it.
    """
    pid = os.getpid()
    return with_files(message, lambda file: MemoryFile(pid, files[file.fd].fd, file.size_bytes))


def files_of(message: Message) -> list[MemoryFile]:
    """The memory files of a message, in order."""
    found: list[MemoryFile] = []

    def note(file: MemoryFile) -> MemoryFile:
        found.append(file)
        return file

    with_files(message, note)
    return found
