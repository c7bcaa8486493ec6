"""The notebook's side of a project's copies: sends what has changed before a run, brings home what runs make."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from taas_magic.machines.code_scan import FileEntry, Scanner
from taas_magic.machines.code_store import UntrustedPathError
from taas_magic.machines.files_home import HomeFiles
from taas_magic.units import format_bytes, plural
from taas_magic.wire_base import MemoryFile, Message
from taas_magic.wire_machines import CodeContents, CodeReady, CodeWanted, FilesHome, SyncCode

_MAX_TOLD = 5


class CodeSender:
    """Keeps the copies of one project as it is here.

    Args:
        directory: The project.
        limit_bytes: The most that is sent of it.
        send: Sends a message to the head, with its files.
        tell: Shows what is being done; "" when it is done.
    """

    def __init__(
        self, directory: Path, limit_bytes: int, send: Callable[[Message], None], tell: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._scanner = Scanner(directory, limit_bytes)
        self._send = send
        self._tell = tell
        self._sync = 0
        self._there: tuple[FileEntry, ...] | None = None
        self._sending: tuple[FileEntry, ...] = ()
        self._fd = -1
        self._home = HomeFiles(directory, {})
        self._waiting: list[Callable[[str], None]] = []

    @property
    def is_busy(self) -> bool:
        """Whether copies are being made."""
        return bool(self._waiting)

    def sync(self, then: Callable[[str], None]) -> None:
        """Have the copies be as the project is, and go on; ``then`` gets what went wrong, "" for nothing.

        Raises:
            PlacementError: if it is too large.
        """
        if self._waiting:
            self._waiting.append(then)
            return
        manifest = self._scanner.scan()
        if manifest.entries == self._there:
            then("")
            return
        self._sync += 1
        self._sending = manifest.entries
        self._waiting.append(then)
        self._send(SyncCode(self._sync, list(manifest.entries)))

    def take(self, message: CodeWanted | CodeReady) -> None:
        """Take what the head says."""
        if message.sync != self._sync:
            return
        if isinstance(message, CodeWanted):
            self._give(message.digests)
            return
        self._tell("")
        self._there = None if message.problem else self._sending
        self._home.known.update({entry.path: entry.digest for entry in self._sending})
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(message.problem)

    def _give(self, digests: list[bytes]) -> None:
        path_of = {entry.digest: entry.path for entry in self._sending}
        contents = []
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.memfd_create("taas-code", os.MFD_CLOEXEC)
        for digest in digests:
            # What has changed since has another digest: the head will say that it is not what it should be.
            data = (self._directory / path_of[digest]).read_bytes() if digest in path_of else b""
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            contents.append((digest, len(data)))
        size = os.fstat(self._fd).st_size
        self._tell(f"sending {plural(len(digests), 'file')} of the project, {format_bytes(size)} ...")
        self._send(CodeContents(self._sync, contents, MemoryFile(os.getpid(), self._fd, size)))

    def bring_home(self, message: FilesHome) -> list[str]:
        """Bring home what a run has made; returns what there is to say of it."""
        told = [f"{path} stays on the machine: {why}" for path, why in message.left]
        fd = message.file.open() if message.file is not None else -1
        at = 0
        try:
            for change in message.changes:
                content = b""
                if change.digest:
                    content = os.pread(fd, change.size_bytes, at)
                    at += change.size_bytes
                try:
                    text = self._home.apply(change, content, message.run_id)
                except (OSError, UntrustedPathError) as error:
                    text = f"{change.path} could not be brought home: {error}"
                if text:
                    told.append(text)
        finally:
            if fd >= 0:
                os.close(fd)
        if len(told) > _MAX_TOLD:
            told = [*told[:_MAX_TOLD], f"and {len(told) - _MAX_TOLD} more files"]
        return told
