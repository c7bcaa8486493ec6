"""How elements get from a producer to the memory that the ranks map: through shared memory, or over a connection.

A *sink* is the producer's end, a *source* the coordinator's. Both kinds of them speak the same messages; they differ
in where the bytes of an element go. On one machine the producer writes them where they stay. Over a connection they
follow the message that tells of them, and the coordinator receives them where they stay.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from taas_magic.channel import Channel, ChannelClosedError, decoder_of
from taas_magic.data.arena import ArenaMap
from taas_magic.data.elements import Encoded
from taas_magic.wire_base import Message
from taas_magic.wire_data import FromProducer, Made, ToProducer

_FRAME = struct.Struct("<I")
_GREETING = struct.Struct("<32sI")
_MAX_MESSAGE_BYTES = 2**28
_BUFFER_BYTES = 4 * 2**20


class Sink(Protocol):
    """A producer's end."""

    def receive(self, *, wait: bool) -> Iterable[Message]:
        """What the coordinator has said; waits for something if asked to.

        Raises:
            ConnectionError: if the coordinator has gone.
        """

    def send(self, message: Message) -> None:
        """Say something to the coordinator."""

    def place(self, encoded: Encoded, offset: int) -> None:
        """Bring an element where it belongs, or make that possible."""

    def tell(self, made: Made, encoded: Sequence[Encoded]) -> None:
        """Tell of elements that were placed."""


class ArenaSink:
    """Writes elements to the memory that the ranks map."""

    def __init__(self, channel: Channel[ToProducer], arena_fd: int) -> None:
        self._channel = channel
        self._map = ArenaMap(arena_fd)

    def receive(self, *, wait: bool) -> Iterable[Message]:
        """See :class:`Sink`."""
        if wait:
            yield self._channel.receive()[0]
        for message, _ in self._channel.receive_available():
            yield message

    def send(self, message: Message) -> None:
        """See :class:`Sink`."""
        self._channel.send(message)

    def place(self, encoded: Encoded, offset: int) -> None:
        """See :class:`Sink`."""
        encoded.write(self._map.address(offset, encoded.size_bytes))

    def tell(self, made: Made, encoded: Sequence[Encoded]) -> None:
        """See :class:`Sink`."""
        self._channel.send(made)


class TcpSink:
    """Sends elements over a connection, behind the message that tells of them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pending = bytearray()

    @classmethod
    def connect(cls, address: str, secret: bytes, producer: int) -> TcpSink:
        """Connect to the coordinator and say who this is.

        Raises:
            OSError: if nobody listens there.
        """
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=10)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        sock.sendall(_GREETING.pack(secret, producer))
        return cls(sock)

    def receive(self, *, wait: bool) -> Iterator[Message]:
        """See :class:`Sink`."""
        while True:
            while (message := self._next()) is not None:
                wait = False
                yield message
            if not wait and not select.select([self._sock], [], [], 0)[0]:
                return
            data = self._sock.recv(256 * 1024)
            if not data:
                raise ChannelClosedError("the coordinator has ended")
            self._pending += data

    def _next(self) -> Message | None:
        if len(self._pending) < _FRAME.size:
            return None
        (size,) = _FRAME.unpack_from(self._pending)
        end = _FRAME.size + size
        if len(self._pending) < end:
            return None
        message: Message = decoder_of(ToProducer).decode(bytes(self._pending[_FRAME.size : end]))
        del self._pending[:end]
        return message

    def send(self, message: Message) -> None:
        """See :class:`Sink`."""
        payload = msgspec.msgpack.encode(message)
        self._sock.sendall(_FRAME.pack(len(payload)) + payload)

    def place(self, encoded: Encoded, offset: int) -> None:
        """See :class:`Sink`."""

    def tell(self, made: Made, encoded: Sequence[Encoded]) -> None:
        """See :class:`Sink`."""
        payload = msgspec.msgpack.encode(made)
        pieces: list[Any] = [_FRAME.pack(len(payload)) + payload]
        for element in encoded:
            pieces += _pieces_of(element)
        _send_all(self._sock, pieces)


def _pieces_of(encoded: Encoded) -> Iterator[Any]:
    """The bytes of an element, in order, as they lie."""
    import ctypes

    yield encoded.head
    at = len(encoded.head)
    for offset, address, nbytes in encoded.buffers:
        if offset > at:
            yield bytes(offset - at)
        if nbytes:
            yield memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        at = offset + nbytes


def _send_all(sock: socket.socket, pieces: list[Any]) -> None:
    queue = deque(memoryview(piece) for piece in pieces)
    while queue:
        sent = sock.sendmsg(list(queue)[:512])
        while queue and sent >= len(queue[0]):
            sent -= len(queue.popleft())
        if queue and sent:
            queue[0] = queue[0][sent:]


# -- the coordinator's ends ------------------------------------------------------------------------------------------

#: Where the bytes of an element that has been told of go; None where nobody wants them.
Place = Callable[[int, int], "memoryview | None"]


class Source(Protocol):
    """The coordinator's end of a connection to a producer."""

    def fileno(self) -> int:
        """What to poll."""

    def receive(self) -> Iterable[FromProducer]:
        """What has come, without waiting.

        Raises:
            ChannelClosedError: if the producer has gone.
            msgspec.MsgspecError: if it sent what is no message.
        """

    def send(self, message: Message) -> None:
        """Say something to the producer, if it is still there."""

    def close(self) -> None:
        """Let it go."""


class ArenaSource:
    """Elements lie where they belong when they are told of."""

    def __init__(self, channel: Channel[FromProducer]) -> None:
        self._channel = channel

    def fileno(self) -> int:
        """See :class:`Source`."""
        return self._channel.fileno()

    def receive(self) -> Iterator[FromProducer]:
        """See :class:`Source`."""
        for message, _ in self._channel.receive_available():
            yield message

    def send(self, message: Message) -> None:
        """See :class:`Source`."""
        try:
            self._channel.send(message)
        except ChannelClosedError:
            return

    def close(self) -> None:
        """See :class:`Source`."""
        self._channel.close()


class TcpSource:
    """Receives elements where they belong; a message that tells of some is passed on when they are there.

    Args:
        sock: The connection, which has said who it is.
        place: Says where an element goes, by ticket and size.
    """

    #: What is received at once, before others get their turn.
    _TURN_BYTES = 8 * 2**20

    def __init__(self, sock: socket.socket, place: Place) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._place = place
        self._head = bytearray()
        self._payload: bytearray | None = None
        #: The message whose elements are being received, those that are still to come, and what has come of the first.
        self._made: Made | None = None
        self._left: deque[tuple[int, int]] = deque()
        self._target: memoryview | None = None
        self._got = 0
        self._buffer = memoryview(bytearray(2**20))
        self._out = bytearray()

    def fileno(self) -> int:
        """See :class:`Source`."""
        return self._sock.fileno()

    def receive(self) -> Iterator[FromProducer]:
        """See :class:`Source`."""
        budget = self._TURN_BYTES
        while budget > 0:
            try:
                if self._left:
                    got = self._receive_element()
                else:
                    got = self._receive_message()
                    message = self._complete()
                    if message is not None:
                        yield message
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                got = 0
            if not got:
                raise ChannelClosedError("the producer has ended")
            budget -= got
            if self._made is not None and not self._left:
                made, self._made = self._made, None
                yield made

    def _receive_element(self) -> int:
        ticket, size = self._left[0]
        if self._target is None and not self._got:
            self._target = self._place(ticket, size)
        if self._target is not None:
            got = self._sock.recv_into(self._target[self._got : size])
        else:
            got = self._sock.recv_into(self._buffer[: min(len(self._buffer), size - self._got)])
        self._got += got
        if self._got == size:
            self._left.popleft()
            self._target, self._got = None, 0
        return got

    def _receive_message(self) -> int:
        # No further than the message: behind it there may be elements, which go elsewhere.
        if len(self._head) < _FRAME.size:
            data = self._sock.recv(_FRAME.size - len(self._head))
            self._head += data
            return len(data)
        (size,) = _FRAME.unpack(self._head)
        if size > _MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"a message of {size} bytes; expected at most {_MAX_MESSAGE_BYTES}")
        if self._payload is None:
            self._payload = bytearray()
        data = self._sock.recv(size - len(self._payload))
        self._payload += data
        return len(data)

    def _complete(self) -> FromProducer | None:
        if self._payload is None or len(self._payload) < _FRAME.unpack(self._head)[0]:
            return None
        message: FromProducer = decoder_of(FromProducer).decode(bytes(self._payload))
        self._head.clear()
        self._payload = None
        if isinstance(message, Made):
            self._made = message
            self._left.extend((element.ticket, element.size_bytes) for element in message.elements)
            return None
        return message

    def send(self, message: Message) -> None:
        """See :class:`Source`."""
        payload = msgspec.msgpack.encode(message)
        data = memoryview(_FRAME.pack(len(payload)) + payload)
        try:
            while data:
                try:
                    data = data[self._sock.send(data) :]
                except BlockingIOError:
                    select.select([], [self._sock], [], 1)
        except OSError:
            return

    def close(self) -> None:
        """See :class:`Source`."""
        self._sock.close()


class Listener:
    """Where producers of other machines connect; who does not know the secret is not listened to."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._sock = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._sock.setblocking(False)
        host, port = self._sock.getsockname()[:2]
        self.address = f"{host}:{port}"

    def fileno(self) -> int:
        """What to poll."""
        return self._sock.fileno()

    def accept(self) -> tuple[int, socket.socket] | None:
        """Take a connection, and the number of the producer at its other end; None where it does not say the secret."""
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return None
        try:
            sock.settimeout(2)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = b""
            while len(greeting) < _GREETING.size:
                data = sock.recv(_GREETING.size - len(greeting))
                if not data:
                    raise ConnectionError
                greeting += data
            secret, producer = _GREETING.unpack(greeting)
            if not hmac.compare_digest(secret, self._secret):
                raise ConnectionError
        except OSError:
            sock.close()
            return None
        return producer, sock

    def close(self) -> None:
        """Listen no more."""
        self._sock.close()
