"""What all messages are made of; see :mod:`taas_magic.wire`."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec

#: A global rank. What is no rank at all is refused when a message is read.
Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
NumRanks = Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
SizeBytes = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages; the tag is the class name."""


class MemoryFile(msgspec.Struct, frozen=True):
    """A parcel that another process of the same user holds open; it is read through ``/proc/<pid>/fd/<fd>``."""

    pid: int
    fd: int
    size_bytes: SizeBytes

    def open(self) -> int:
        """Open the file; the caller owns the descriptor.

        Raises:
            OSError: if the holder has gone.
        """
        return os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
