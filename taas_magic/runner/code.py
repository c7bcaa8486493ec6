"""The copy of the project on a machine: made as the notebook has it, passed on to the other machines, and watched."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from taas_magic.machines.code_scan import FileEntry
from taas_magic.machines.code_store import CodeStore
from taas_magic.machines.files_home import FileChange, Watcher
from taas_magic.wire_base import MemoryFile, Message
from taas_magic.wire_machines import CodeContents, CodeReady, CodeWanted, FilesHome, Members, SyncCode

_LOOK_S = 2.0
#: A file that is larger does not come home by itself.
_MAX_FILE_BYTES = 4 * 2**30


class CodeCopy:
    """A session's copy of its notebook's project.

    Args:
        send: Sends a message to the runner of this machine, which hands it on.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self.members = Members("")
        self._entries: list[FileEntry] = []
        self._sync = -1
        self._awaited: set[int] = set()
        self._problems: list[str] = []
        #: What was sent last, by machine: whoever sends it on has to open it first.
        self._files: dict[int, int] = {}
        self._homecoming: Homecoming | None = None

    @property
    def _store(self) -> CodeStore:
        return CodeStore(Path(self.members.project).parent.parent / "contents")

    def take(self, message: SyncCode | CodeWanted | CodeContents | CodeReady) -> None:
        """Take what is said of the project's files."""
        if isinstance(message, CodeWanted):
            self._give(message)
        elif isinstance(message, CodeReady):
            self._note_ready(message)
        elif isinstance(message, SyncCode):
            self._sync, self._entries, self._problems = message.sync, message.entries, []
            missing = self._store.missing(message.entries)
            if missing:
                self._send(CodeWanted(message.sync, missing))
            else:
                self._make()
        elif message.sync == self._sync:
            self._keep(message)

    def _keep(self, message: CodeContents) -> None:
        fd = message.file.open()
        try:
            at = 0
            for digest, size in message.contents:
                self._store.put(digest, os.pread(fd, size, at))
                at += size
        except (OSError, ValueError) as error:
            self._send(CodeReady(self._sync, f"the project's files cannot be kept: {error}"))
            return
        finally:
            os.close(fd)
        self._make()

    def _make(self) -> None:
        try:
            self._store.materialise(self._entries, Path(self.members.project))
            self._store.shrink()
        except (OSError, ValueError) as error:
            self._send(CodeReady(self._sync, f"no copy of the project can be made: {error}"))
            return
        self._awaited = set(range(1, len(self.members.machines) + 1))
        for machine in self._awaited:
            self._send(SyncCode(self._sync, self._entries, machine))
        self._tell_if_ready()

    def _give(self, wanted: CodeWanted) -> None:
        """Give another machine what it has not."""
        contents, fd = [], os.memfd_create("taas-code", os.MFD_CLOEXEC)
        for digest in wanted.digests:
            data = self._store.get(digest)
            os.write(fd, data) if data else None
            contents.append((digest, len(data)))
        old = self._files.pop(wanted.machine, -1)
        if old >= 0:
            os.close(old)
        self._files[wanted.machine] = fd
        file = MemoryFile(os.getpid(), fd, os.fstat(fd).st_size)
        self._send(CodeContents(wanted.sync, contents, file, wanted.machine))

    def _note_ready(self, ready: CodeReady) -> None:
        if ready.sync == self._sync and ready.machine in self._awaited:
            self._awaited.remove(ready.machine)
            if ready.problem:
                self._problems.append(f"{self.members.machines[ready.machine - 1]}: {ready.problem}")
            self._tell_if_ready()

    def _tell_if_ready(self) -> None:
        if not self._awaited:
            self._send(CodeReady(self._sync, "; ".join(self._problems)))

    # -- what runs make ------------------------------------------------------------------------------------------

    def watch(self, run_id: str) -> None:
        """Have what a run makes in the copy go home while it runs."""
        if self.members.project and self._sync >= 0:
            self._homecoming = Homecoming(run_id, Path(self.members.project), self._entries)

    @property
    def fileno(self) -> int | None:
        """What to poll for :meth:`send_home`."""
        return None if self._homecoming is None else self._homecoming.fileno()

    def send_home(self) -> None:
        """Send what was found."""
        if self._homecoming is not None:
            for message in self._homecoming.found():
                self._send(message)

    def pause(self, *, paused: bool) -> None:
        """Do not look while nobody is there to take what is found."""
        if self._homecoming is not None:
            self._homecoming.is_paused = paused

    def finish(self) -> None:
        """Send the rest; waits for it."""
        if self._homecoming is not None:
            self._homecoming.finish()
            self.send_home()
            self._homecoming = None

    def close(self) -> None:
        """Let go of everything."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


class Homecoming:
    """Looks for changes in a thread of its own: reading large files takes its time."""

    def __init__(self, run_id: str, project: Path, entries: list[FileEntry]) -> None:
        self._run_id = run_id
        self._project = project
        self._entries = entries
        self._messages: queue.SimpleQueue[FilesHome] = queue.SimpleQueue()
        self._end = threading.Event()
        self.is_paused = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._fds: list[int] = []
        self._thread = threading.Thread(target=self._run, name="taas files", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """What to poll."""
        return self._reader

    def found(self) -> list[FilesHome]:
        """What was found since this was asked."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        found = []
        while not self._messages.empty():
            found.append(self._messages.get())
        return found

    def finish(self) -> None:
        """Look once more, and end."""
        self._end.set()
        self._thread.join()
        os.close(self._writer)

    def _run(self) -> None:
        watcher = Watcher(self._project, self._entries, _MAX_FILE_BYTES)
        while not self._end.wait(_LOOK_S):
            if self.is_paused:
                continue
            self._report(watcher, watcher.changes())
        self._report(watcher, watcher.changes(final=True))

    def _report(self, watcher: Watcher, changes: list[FileChange]) -> None:
        left, watcher.left = list(watcher.left.items()), {}
        if not changes and not left:
            return
        fd = os.memfd_create("taas-files", os.MFD_CLOEXEC)
        sent = [
            change
            for change in changes
            if not change.digest or _copy(self._project / change.path, change.size_bytes, fd)
        ]
        self._fds.append(fd)
        file = MemoryFile(os.getpid(), fd, os.fstat(fd).st_size)
        self._messages.put(FilesHome(self._run_id, sent, file, left))
        os.write(self._writer, b".")


def _copy(path: Path, size_bytes: int, fd: int) -> bool:
    """Append a file's content; False where it has gone, or changed, since: then it comes later."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    if len(data) != size_bytes:
        return False
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return True
