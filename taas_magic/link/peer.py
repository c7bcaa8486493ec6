"""One conversation with another machine: messages in order, and the memory files that go with them.

A message that has no files overtakes those that wait for theirs to be sent: a stop must not wait for gigabytes.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from taas_magic.channel import decoder_of
from taas_magic.link.files import ID_BYTES, File, FileStore
from taas_magic.link.reliable import BrokenStreamError, Frames, ReliableStream
from taas_magic.wire_base import Message

M = TypeVar("M")
_CHUNK_BYTES = 512 * 1024
#: So much of files may be on its way: what is said meanwhile comes behind it.
_WINDOW_BYTES = 4 * 2**20
_MESSAGE, _ANNOUNCE, _CHUNK, _FORGET = b"m", b"a", b"c", b"f"
_SIZE = struct.Struct("<Q")


@dataclass
class _Job:
    """A message that waits until its files have been sent."""

    message: Message
    files: list[File]
    #: Files that the other side does not have yet.
    missing: deque[File]
    sent_bytes: int = 0
    tell: Callable[[int, int], None] | None = None
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.total_bytes = sum(file.size_bytes for file in self.missing)


class Peer(Generic[M]):
    """This side of a conversation.

    Args:
        receives: The union of messages that may come.
        transmit: Hands frames to the transport.
        store: The files that both sides know.
        now: The time, as in all methods: seconds of one monotonic clock.
        forgets: Whether this side decides which files both forget, by its store's budget. The other one must not: it
            might forget what is just being spoken of.
    """

    def __init__(
        self, receives: Any, transmit: Callable[[Frames], None], store: FileStore, now: float, *, forgets: bool
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = decoder_of(receives)
        self._transmit = transmit
        self._forgets = forgets
        self.store = store
        self._stream = ReliableStream(now)
        self._jobs: deque[_Job] = deque()
        #: Files that the other side has: all of them, or as far as they have been sent.
        self._there: dict[bytes, int] = {}

    @property
    def heard_at(self) -> float:
        """When the other side was heard last."""
        return self._stream.heard_at

    @property
    def waits_bytes(self) -> int:
        """Bytes that were said, and that the other side has not said to have."""
        return self._stream.unacknowledged_bytes

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, message: Message, now: float) -> None:
        """Say something at once."""
        self._say([_MESSAGE, msgspec.msgpack.encode(message)], now)

    def send_with_files(
        self, message: Message, files: Sequence[File], now: float, tell: Callable[[int, int], None] | None = None
    ) -> None:
        """Say something when its files are there, and everything that was to be said like this before it.

        Args:
            message: What to say. In its memory files, ``fd`` is the place of the file in ``files``.
            files: Of this conversation's store.
            now: The time.
            tell: Told how many bytes have been sent, and how many are to be.
        """
        new = [file for file in dict.fromkeys(files) if not self._is_there(file) and not self._is_queued(file)]
        self._jobs.append(_Job(message, list(files), deque(new), tell=tell))
        self._pump(now)

    def _is_there(self, file: File) -> bool:
        return self._there.get(file.id, -1) >= file.size_bytes

    def _is_queued(self, file: File) -> bool:
        return any(file is each for job in self._jobs for each in job.missing)

    def withdraw(self, is_meant: Callable[[Message], bool]) -> bool:
        """Take back a message that waits for its files; returns whether there was one."""
        for job in self._jobs:
            if is_meant(job.message):
                self._jobs.remove(job)
                return True
        return False

    def _pump(self, now: float) -> None:
        while self._jobs and self._stream.unacknowledged_bytes < _WINDOW_BYTES:
            job = self._jobs[0]
            if job.missing:
                self._send_chunk(job, now)
                continue
            self._jobs.popleft()
            self._say([_MESSAGE, msgspec.msgpack.encode(job.message), *(file.id for file in job.files)], now)
            if self._forgets:
                self.forget(self.store.shrink([file for each in self._jobs for file in each.files] + job.files), now)

    def forget(self, file_ids: Sequence[bytes], now: float) -> None:
        """Have the other side forget files that this one has let go of."""
        known = [file_id for file_id in file_ids if self._there.pop(file_id, None) is not None]
        if known:
            self._say([_FORGET, *known], now)

    def _send_chunk(self, job: _Job, now: float) -> None:
        file = job.missing[0]
        if file.id not in self._there:
            self._there[file.id] = 0
            self._say([_ANNOUNCE, file.id, _SIZE.pack(file.size_bytes)], now)
        offset = self._there[file.id]
        data = os.pread(file.fd, min(_CHUNK_BYTES, file.size_bytes - offset), offset)
        if data:
            self._there[file.id] += len(data)
            job.sent_bytes += len(data)
            self._say([_CHUNK, file.id, data], now)
            if job.tell is not None:
                job.tell(job.sent_bytes, job.total_bytes)
        if self._there[file.id] >= file.size_bytes or not data:
            job.missing.popleft()

    def _say(self, parts: Frames, now: float) -> None:
        self._transmit(self._stream.send(parts, now))

    # -- receiving -----------------------------------------------------------------------------------------------

    def receive(self, frames: Sequence[bytes], now: float) -> list[tuple[M, list[File]]]:
        """Take what the transport brings; returns messages, each with its files.

        Raises:
            BrokenStreamError: if the conversation has broken.
            OSError: if there is no memory for what comes.
        """
        packets, answers = self._stream.receive(frames, now)
        for answer in answers:
            self._transmit(answer)
        found = []
        for parts in packets:
            message = self._take(parts)
            if message is not None:
                found.append(message)
        self._pump(now)
        return found

    def _take(self, parts: Frames) -> tuple[M, list[File]] | None:
        try:
            kind, first = parts[0], parts[1]
            if kind == _MESSAGE:
                return self._decoder.decode(first), [self._file(file_id) for file_id in parts[2:]]
            if kind == _ANNOUNCE:
                self._expect(first, _SIZE.unpack(parts[2])[0])
            elif kind == _CHUNK:
                self._take_chunk(self._file(first), parts[2])
            elif kind == _FORGET:
                for file_id in parts[1:]:
                    self._there.pop(file_id, None)
                    self.store.drop(file_id)
            else:
                raise BrokenStreamError("a packet of no known kind")
        except (IndexError, struct.error, msgspec.MsgspecError) as error:
            raise BrokenStreamError(f"what came is no message: {error}") from error
        return None

    def _expect(self, file_id: bytes, size_bytes: int) -> None:
        if len(file_id) != ID_BYTES or file_id in self.store.files:
            raise BrokenStreamError("a file that is there already")
        self.store.add(File.expected(file_id, size_bytes))
        # It came from there.
        self._there[file_id] = size_bytes

    def _file(self, file_id: bytes) -> File:
        file = self.store.get(file_id)
        if file is None:
            raise BrokenStreamError("a file that never came")
        return file

    @staticmethod
    def _take_chunk(file: File, data: bytes) -> None:
        if file.have_bytes + len(data) > file.size_bytes:
            raise BrokenStreamError("more of a file than it has")
        view = memoryview(data)
        while view:
            written = os.pwrite(file.fd, view, file.have_bytes)
            file.have_bytes += written
            view = view[written:]

    def tick(self, now: float) -> None:
        """Look at the clock: acknowledge, and say now and then that this side is there."""
        for frames in self._stream.tick(now):
            self._transmit(frames)
        self._pump(now)
