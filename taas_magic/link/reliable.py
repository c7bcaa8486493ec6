"""Packets in order over a transport that may lose some when it connects anew. No I/O, and no clock of its own.

ZeroMQ connects again by itself, but what was on its way when a connection broke is gone. So packets have numbers, the
other side says up to which it has all, and what it has not is sent once more. Whoever begins to speak in the middle (a
process that was started anew) is told so, since it cannot know what the other side counts on.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Sequence

#: Kind, number of the packet, number of the first packet that is missing here.
_HEAD = struct.Struct("<BQQ")
_PING_S = 1.0
#: Sooner than that, nobody asks twice for the same.
_ASK_AGAIN_S = 0.5
#: What has come is acknowledged after so much of it, or with the next tick.
_ACKNOWLEDGE_BYTES = 256 * 1024

Frames = list[bytes]


class Kind(enum.IntEnum):
    """What a packet is."""

    DATA = 0
    #: Nothing but what its head says; ``number`` is that of the next packet to be sent.
    PING = 1
    #: Asks for everything that the head says is missing.
    MISSING = 2
    #: The sender knows nothing of this conversation.
    RESET = 3


class BrokenStreamError(Exception):
    """The conversation cannot be gone on with: the other side has been started anew, or sends what is no packet."""


def reset() -> Frames:
    """The answer to a packet from the middle of a conversation that nobody here knows."""
    return [_HEAD.pack(Kind.RESET, 0, 0)]


def begins(frames: Sequence[bytes]) -> bool:
    """Whether these frames are the first packet of a conversation."""
    return bool(frames) and len(frames[0]) == _HEAD.size and _HEAD.unpack(frames[0])[:2] == (Kind.DATA, 0)


class ReliableStream:
    """Both directions of a conversation. What methods return is to be transmitted, in order."""

    def __init__(self, now: float) -> None:
        self._next_out = 0
        self._next_in = 0
        self._kept: deque[tuple[int, Frames, int]] = deque()
        #: Bytes that were sent, and that the other side has not said to have.
        self.unacknowledged_bytes = 0
        #: When the other side was heard last.
        self.heard_at = now
        self._spoke_at = now
        self._asked: tuple[int, float] = (-1, 0.0)
        self._owed_bytes = 0
        self._owes = False

    def send(self, parts: Frames, now: float) -> Frames:
        """Number a packet."""
        number, self._next_out = self._next_out, self._next_out + 1
        size = sum(len(part) for part in parts)
        self._kept.append((number, parts, size))
        self.unacknowledged_bytes += size
        return self._packet(Kind.DATA, number, parts, now)

    def receive(self, frames: Sequence[bytes], now: float) -> tuple[list[Frames], list[Frames]]:
        """Take what the transport brings.

        Returns:
            Packets for the layer above, and what is to be transmitted.

        Raises:
            BrokenStreamError: if the conversation has broken.
        """
        if not frames or len(frames[0]) != _HEAD.size:
            raise BrokenStreamError("what came is no packet")
        kind, number, missing = _HEAD.unpack(frames[0])
        if kind == Kind.RESET:
            raise BrokenStreamError("the other side was started anew")
        if missing > self._next_out:
            raise BrokenStreamError("the other side has what was never sent")
        self.heard_at = now
        self._acknowledged(missing)
        if kind == Kind.DATA:
            return self._take(number, list(frames[1:]), now)
        if kind == Kind.MISSING:
            return [], [self._packet(Kind.DATA, n, parts, now) for n, parts, _ in self._kept]
        # What it has sent last may have been lost.
        return [], self._ask(now) if number > self._next_in else []

    def tick(self, now: float) -> list[Frames]:
        """Say what is owed, and now and then that this side is there."""
        if self._owes or now >= self._spoke_at + _PING_S:
            return [self._packet(Kind.PING, self._next_out, [], now)]
        return []

    def _take(self, number: int, parts: Frames, now: float) -> tuple[list[Frames], list[Frames]]:
        if number > self._next_in:
            return [], self._ask(now)
        self._owes = True
        if number < self._next_in:
            return [], []
        self._next_in += 1
        self._owed_bytes += sum(len(part) for part in parts)
        answer = [self._packet(Kind.PING, self._next_out, [], now)] if self._owed_bytes >= _ACKNOWLEDGE_BYTES else []
        return [parts], answer

    def _ask(self, now: float) -> list[Frames]:
        number, since = self._asked
        if number == self._next_in and now < since + _ASK_AGAIN_S:
            return []
        self._asked = (self._next_in, now)
        return [self._packet(Kind.MISSING, self._next_out, [], now)]

    def _acknowledged(self, missing: int) -> None:
        while self._kept and self._kept[0][0] < missing:
            self.unacknowledged_bytes -= self._kept.popleft()[2]

    def _packet(self, kind: Kind, number: int, parts: Frames, now: float) -> Frames:
        self._spoke_at, self._owes, self._owed_bytes = now, False, 0
        return [_HEAD.pack(kind, number, self._next_in), *parts]
