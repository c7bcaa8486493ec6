"""Messages and descriptors over a Unix stream socket.

A frame is a header (size of the message, number of descriptors), then the message by msgpack. The descriptors come with
the frame's first bytes. Whoever cannot be understood is not listened to any further: a stream cannot be entered again
in the middle.
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from taas_magic.wire_base import Message

M = TypeVar("M")
_HEADER = struct.Struct("<IH")
#: More in one message is refused by both sides. Large things travel as memory files.
MAX_FRAME_BYTES = 2**30
_MAX_DESCRIPTORS = 16
_CHUNK_BYTES = 256 * 1024
#: What is read at once before the caller gets to handle it: a loud sender neither holds it up nor fills its memory.
_READ_AHEAD_BYTES = 16 * 2**20


@functools.cache
def decoder_of(messages: Any) -> msgspec.msgpack.Decoder[Any]:
    """The decoder for a union of messages; building one takes about a millisecond, and forks inherit it."""
    return msgspec.msgpack.Decoder(messages)


class ChannelClosedError(ConnectionError):
    """The other end of a channel has gone."""


class Channel(Generic[M]):
    """One end of a connection between two of our processes.

    Args:
        sock: A connected ``AF_UNIX`` stream socket; owned from now on.
        receives: The union of messages that may arrive.

    Sending is safe from several threads; receiving is for one thread, which owns the descriptors that it receives.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[M] = decoder_of(receives)
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._descriptors: list[int] = []

    @classmethod
    def pair(cls) -> tuple[socket.socket, socket.socket]:
        """Two connected sockets, one for each end."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def reading(self, receives: Any) -> Channel[Any]:
        """This channel, with what arrives from now on read as another union of messages."""
        other: Channel[Any] = self
        other._decoder = decoder_of(receives)
        return other

    def fileno(self) -> int:
        """What to poll; -1 once it is closed."""
        return self._sock.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, waiting while the other end's buffer is full; descriptors are duplicated into it.

        Raises:
            ChannelClosedError: if the other end has gone.
            ValueError: if the message is larger, or its descriptors are more, than the other end accepts.
        """
        data = self._frame(message, descriptors)
        with self._lock:
            self._transmit(data, descriptors)

    def send_if_free(self, message: Message) -> bool:
        """Send a message unless another is just being sent; for finalizers, which may come in the midst of that.

        Raises:
            ChannelClosedError: if the other end has gone.
        """
        data = self._frame(message)
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._transmit(data)
        finally:
            self._lock.release()
        return True

    @staticmethod
    def _frame(message: Message, descriptors: Sequence[int] = ()) -> memoryview:
        payload = msgspec.msgpack.encode(message)
        if len(payload) > MAX_FRAME_BYTES or len(descriptors) > _MAX_DESCRIPTORS:
            raise ValueError(
                f"{type(message).__name__} has {len(payload)} bytes and {len(descriptors)} descriptors; "
                f"expected at most {MAX_FRAME_BYTES} and {_MAX_DESCRIPTORS}"
            )
        return memoryview(_HEADER.pack(len(payload), len(descriptors)) + payload)

    def _transmit(self, data: memoryview, descriptors: Sequence[int] = ()) -> None:
        try:
            sent = socket.send_fds(self._sock, [data], list(descriptors)) if descriptors else self._sock.send(data)
            if sent < len(data):
                self._sock.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError("the other process has ended") from error

    def receive(self) -> tuple[M, list[int]]:
        """Wait for one message and its descriptors.

        Raises:
            ChannelClosedError: at the end of the stream.
            msgspec.MsgspecError: if what came is no message; the channel is then good for nothing but :meth:`close`.
        """
        while True:
            message = self._next()
            if message is not None:
                return message
            if not self._read(0):
                raise ChannelClosedError("the other process has ended")

    def receive_available(self) -> Iterable[tuple[M, list[int]]]:
        """Yield what has arrived, without waiting.

        Raises:
            ChannelClosedError: at the end of the stream, after the last message.
            msgspec.MsgspecError: as :meth:`receive`.
        """
        open_ended = True
        budget_bytes = _READ_AHEAD_BYTES
        with contextlib.suppress(BlockingIOError):
            while open_ended and budget_bytes > 0:
                before = len(self._pending)
                open_ended = self._read(socket.MSG_DONTWAIT)
                budget_bytes -= len(self._pending) - before
        while (message := self._next()) is not None:
            yield message
        if not open_ended:
            raise ChannelClosedError("the other process has ended")

    def close(self) -> None:
        """Close the socket, and descriptors that nobody took."""
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()
        self._sock.close()

    def _read(self, flags: int) -> bool:
        try:
            data, descriptors = _receive_with_descriptors(self._sock, flags)
        except ConnectionResetError:
            return False
        self._pending += data
        self._descriptors += descriptors
        return bool(data)

    def _next(self) -> tuple[M, list[int]] | None:
        if len(self._pending) < _HEADER.size:
            return None
        size, num_descriptors = _HEADER.unpack_from(self._pending)
        if size > MAX_FRAME_BYTES:
            raise msgspec.DecodeError(f"a frame of {size} bytes; expected at most {MAX_FRAME_BYTES}")
        end = _HEADER.size + size
        if len(self._pending) < end:
            return None
        if len(self._descriptors) < num_descriptors:
            # Either they were never sent, or this process has no room for more.
            raise msgspec.DecodeError(f"{num_descriptors} descriptors announced, {len(self._descriptors)} came")
        message = self._decoder.decode(memoryview(self._pending)[_HEADER.size : end].tobytes())
        del self._pending[:end]
        descriptors, self._descriptors = self._descriptors[:num_descriptors], self._descriptors[num_descriptors:]
        return message, descriptors


def _receive_with_descriptors(sock: socket.socket, flags: int) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * descriptors.itemsize)
    data, ancillary, _, _ = sock.recvmsg(_CHUNK_BYTES, space, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)
