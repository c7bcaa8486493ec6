"""The parts of a run that are on other machines: the head's side, and the side of those.

To the run, a rank is what sends output, says messages and is told some, wherever it is. What a rank's socket carries
goes through the connections between machines as it is; its descriptors, which are memory files all, go as files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from taas_magic.channel import Channel, ChannelClosedError, decoder_of
from taas_magic.runner.run import Source
from taas_magic.runner.zygote_link import RankLink, RunLink
from taas_magic.wire import FromRank
from taas_magic.wire_base import MemoryFile, Message
from taas_magic.wire_data import ConnectDelivery
from taas_magic.wire_machines import EndPart, PartData, PartEnded, PartStream
from taas_magic.wire_zygote import EndRun, FromRunZygote, RankExited

#: What is read of a pipe at a time, and how often at once.
_READ_BYTES = 256 * 1024
_READS_AT_ONCE = 8
#: How long output gathers here before it is sent.
_GATHER_S = 0.1
_RUN_ZYGOTE = -1
#: The exit code of ranks whose machine was lost.
LOST = -9

Send = Callable[[Message], None]


class Listener(Protocol):
    """Who takes what a part on another machine says; the run, or the kept ranks of one."""

    def hear_zygote(self, channel: RemoteChannel) -> None:
        """A run zygote has said something."""

    def hear_rank(self, rank: int) -> None:
        """A rank has said something."""

    def take_output(self, rank: int, kind: PartStream, data: bytes) -> None:
        """A rank has written something."""

    def take_notice(self, text: str) -> None:
        """The user should know something."""


class RemoteChannel:
    """Stands for a :class:`Channel` whose other end is on another machine."""

    def __init__(self, receives: Any, tell: Callable[[bytes, list[MemoryFile]], None]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = decoder_of(receives)
        self._tell = tell
        self._came: deque[tuple[bytes, list[int]]] = deque()
        self._held: dict[tuple[int, int], int] = {}
        self._is_closed = False

    def fileno(self) -> int:
        """There is nothing to poll."""
        return -1

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message; its descriptors have to be memory files.

        Raises:
            ChannelClosedError: if the other end has gone.
            OSError: if data is to be delivered, which several machines cannot share yet.
        """
        if self._is_closed:
            raise ChannelClosedError("the other machine's process has ended")
        if isinstance(message, ConnectDelivery):
            raise OSError("--cpus delivers to the ranks of one machine, and this run has several")
        self._tell(msgspec.msgpack.encode(message), [self._file(fd) for fd in descriptors])

    def _file(self, fd: int) -> MemoryFile:
        """A memory file that stays open until this channel closes: whoever sends it on has to open it first."""
        status = os.fstat(fd)
        inode = status.st_dev, status.st_ino
        if inode not in self._held:
            self._held[inode] = os.dup(fd)
        return MemoryFile(os.getpid(), self._held[inode], status.st_size)

    def take(self, data: bytes, descriptors: list[int]) -> None:
        """Note what the other machine's process says."""
        self._came.append((data, descriptors))

    def end(self) -> None:
        """Note that the other end has gone."""
        self._is_closed = True

    def receive_available(self) -> Iterator[tuple[Any, list[int]]]:
        """As :meth:`Channel.receive_available`.

        Raises:
            ChannelClosedError: at the end, after the last message.
            msgspec.MsgspecError: if what came is no message.
        """
        while self._came:
            data, descriptors = self._came.popleft()
            yield self._decoder.decode(data), descriptors
        if self._is_closed:
            raise ChannelClosedError("the other machine's process has ended")

    def close(self) -> None:
        """Let go of what was sent, and of what came and nobody took."""
        self._is_closed = True
        for _, descriptors in self._came:
            for fd in descriptors:
                os.close(fd)
        self._came.clear()
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()


class RemotePart:
    """The head's side of a part.

    Args:
        number: By which both sides know the part.
        machine: The name of its machine.
        first_rank: Its first rank, of all the run's.
        num_ranks: How many it has.
        send: Sends a message towards the machine.
    """

    def __init__(self, number: int, machine: str, first_rank: int, num_ranks: int, send: Send) -> None:
        self.number, self.machine = number, machine
        self._send = send
        self.zygote = self._channel(_RUN_ZYGOTE, FromRunZygote)
        self._channels = {rank: self._channel(rank, FromRank) for rank in range(first_rank, first_rank + num_ranks)}
        self.ranks = [RankLink(rank, -1, -1, channel) for rank, channel in self._channels.items()]
        self.listener: Listener | None = None
        self.is_over = False
        #: Why it was lost; "" where it was not.
        self.lost = ""

    def _channel(self, rank: int, receives: Any) -> RemoteChannel:
        def tell(data: bytes, files: list[MemoryFile]) -> None:
            self._send(PartData(self.number, rank, "channel", data, files))

        return RemoteChannel(receives, tell)

    def take(self, message: PartData, descriptors: list[int]) -> None:
        """Take what the part says."""
        listener = self.listener
        if message.stream != "channel":
            if listener is not None and message.rank in self._channels:
                listener.take_output(message.rank, message.stream, message.data)
            return
        channel = self.zygote if message.rank == _RUN_ZYGOTE else self._channels.get(message.rank)
        if channel is None or listener is None:
            for fd in descriptors:
                os.close(fd)
            return
        if message.is_closed:
            channel.end()
        else:
            channel.take(message.data, descriptors)
        if message.rank == _RUN_ZYGOTE:
            listener.hear_zygote(channel)
        else:
            listener.hear_rank(message.rank)

    def end(self, reason: str) -> None:
        """Note that nothing is left of the part, or that its machine is lost."""
        if self.is_over:
            return
        self.is_over, self.lost = True, reason
        for channel in self._channels.values():
            channel.end()
        if reason:
            for rank in self._channels:
                self.zygote.take(msgspec.msgpack.encode(RankExited(rank, LOST)), [])
        self.zygote.end()
        if self.listener is not None:
            self.listener.hear_zygote(self.zygote)

    def close(self) -> None:
        """Have whatever is left of it ended."""
        if not self.is_over:
            self.is_over = True
            self._send(EndPart(self.number))
        self.zygote.close()
        for channel in self._channels.values():
            channel.close()


class HeldPart:
    """The side of the machine that has the part: hands on what its processes say, and what they are told.

    Args:
        number: The part.
        link: Its processes.
        directory: The part's own directory; removed at the end.
        send: Sends a message to the head.
        environment: What its ranks get besides what the notebook says.
    """

    def __init__(self, number: int, link: RunLink, directory: Path, send: Send) -> None:
        self.number = number
        self._link = link
        self._directory = directory
        self._send = send
        self._raw: dict[int, Channel[msgspec.Raw]] = {_RUN_ZYGOTE: _unread(link.channel)}
        for rank in link.ranks:
            assert isinstance(rank.channel, Channel)
            self._raw[rank.rank] = _unread(rank.channel)
        #: What was handed on, until the part ends: whoever sends it has to open it first.
        self._files: dict[tuple[int, int], int] = {}
        self.is_over = False

    def sources(self) -> Iterable[Source]:
        """Everything that can become readable."""
        for rank, channel in self._raw.items():
            yield Source(channel.fileno(), lambda rank=rank: self._hear(rank))  # type: ignore[misc]
        now = time.monotonic()
        for link in self._link.ranks:
            for fd in (link.stdout_fd, link.stderr_fd):
                if fd >= 0 and link.quiet_until <= now:
                    yield Source(fd, lambda link=link: self._read(link))  # type: ignore[misc]

    def take(self, message: PartData, descriptors: list[int]) -> None:
        """Hand on what the head says."""
        channel = self._raw.get(message.rank)
        if channel is not None:
            with contextlib.suppress(ChannelClosedError, OSError):
                channel.send(msgspec.Raw(message.data), descriptors)  # type: ignore[arg-type]

    def end(self) -> None:
        """End what is left of it."""
        self._link.send(EndRun())

    def _hear(self, rank: int) -> None:
        channel = self._raw.get(rank)
        if channel is None:
            return
        for link in self._link.ranks:
            # What was written before it was said comes before it.
            if rank in (link.rank, _RUN_ZYGOTE):
                self._read(link)
        try:
            for message, descriptors in channel.receive_available():
                files = [self._keep(fd) for fd in descriptors]
                self._send(PartData(self.number, rank, "channel", bytes(message), files))
        except (ChannelClosedError, msgspec.MsgspecError):
            channel.close()
            del self._raw[rank]
            self._send(PartData(self.number, rank, "channel", is_closed=True))
            if rank == _RUN_ZYGOTE:
                self._finish()

    def _keep(self, fd: int) -> MemoryFile:
        status = os.fstat(fd)
        inode = status.st_dev, status.st_ino
        if inode in self._files:
            os.close(fd)
        else:
            self._files[inode] = fd
        return MemoryFile(os.getpid(), self._files[inode], status.st_size)

    def deadline(self) -> float | None:
        """Seconds until some output has gathered for long enough."""
        now = time.monotonic()
        waiting = [link.quiet_until - now for link in self._link.ranks if link.quiet_until > now and link.has_pipes]
        return min(waiting, default=None)

    def _read(self, link: RankLink) -> None:
        size = 0
        for name, kind in (("stdout_fd", "stdout"), ("stderr_fd", "stderr")):
            for _ in range(_READS_AT_ONCE):
                fd = getattr(link, name)
                if fd < 0:
                    break
                try:
                    data = os.read(fd, _READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    os.close(fd)
                    setattr(link, name, -1)
                    break
                size += len(data)
                self._send(PartData(self.number, link.rank, kind, data))  # type: ignore[arg-type]
        link.note_read(size, time.monotonic(), _GATHER_S)

    def _finish(self) -> None:
        """All processes have gone."""
        for rank in list(self._raw):
            self._hear(rank)
        for link in self._link.ranks:
            self._read(link)
        self.is_over = True
        self._send(PartEnded(self.number))

    def close(self) -> None:
        """Let go of everything; its processes end when they find that."""
        self._link.close()
        self._raw.clear()
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        shutil.rmtree(self._directory, ignore_errors=True)


def _unread(channel: Channel[Any]) -> Channel[msgspec.Raw]:
    """The same channel, whose messages are handed on as they are."""
    return channel.reading(msgspec.Raw)
