"""The memory in which elements lie: one memory file, which producers write and ranks map.

It has no name, so it is gone with the last process that has it open. Its pages are allocated before they are given
out: where the machine has no memory for them, that is an error here, and not a bus error in whoever touches them
first.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from taas_magic.namespace.blocks import available_memory_bytes
from taas_magic.namespace.bulk import address_of

_libc = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
#: Left to everything else on the machine.
_RESERVE_BYTES = 128 * 2**20


class Arena:
    """The coordinator's side: it makes the file, and makes it larger."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("taas elements", os.MFD_CLOEXEC)
        self.size_bytes = 0

    def grow(self, size_bytes: int) -> None:
        """Make the file larger.

        Raises:
            MemoryError: if the machine has no memory for it.
        """
        more = size_bytes - self.size_bytes
        if more <= 0:
            return
        if available_memory_bytes() < more + _RESERVE_BYTES:
            raise MemoryError(f"{more} bytes more for elements")
        try:
            os.posix_fallocate(self.fd, self.size_bytes, more)
        except OSError as error:
            raise MemoryError(f"{more} bytes more for elements: {error}") from error
        self.size_bytes = size_bytes

    def give_back(self, start: int, end: int) -> None:
        """Give the memory of a range back to the machine; who has the file mapped finds zeros there."""
        _libc.fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_long(start), ctypes.c_long(end - start))


class ArenaMap:
    """The file as one process has it mapped; what lies behind the end of an earlier map is mapped when it is needed.

    An earlier map stays for as long as something refers to it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.mapped_bytes = 0
        self.buffer: mmap.mmap | None = None
        self._address = 0

    def reach(self, end: int) -> bool:
        """Have the first ``end`` bytes mapped; returns whether the map is a new one."""
        if end <= self.mapped_bytes:
            return False
        size = os.fstat(self._fd).st_size
        self.buffer = mmap.mmap(self._fd, size)
        self.mapped_bytes = size
        self._address = address_of(self.buffer)
        return True

    def address(self, offset: int, size_bytes: int) -> int:
        """Where a range lies in this process."""
        self.reach(offset + size_bytes)
        return self._address + offset

    def close(self) -> None:
        """Let the file go; what refers to its memory may go on."""
        self.buffer = None
        os.close(self._fd)
