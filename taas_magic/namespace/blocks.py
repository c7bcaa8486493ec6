"""Blocks: memory that travels beside the pickle, copied once and mapped by every rank.

A *parcel* is one anonymous file (``memfd``) that holds a pickle stream and the blocks it refers to::

    magic 8 bytes | manifest offset u64 | manifest size u64 | stream | blocks ... | manifest

A block is the part of one owner's memory (a tensor's storage, an array's buffer) that is really used: the hull of
all the views that were sent. Offsets in the stream count from the owner's start, so they stay right however small the
hull is. Ranks map the file ``MAP_PRIVATE``: they read the same pages until they write.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from taas_magic.errors import CannotTravelError
from taas_magic.units import format_bytes

_MAGIC = b"taasprc1"
_HEADER = struct.Struct("<8sQQ")
_SMALL_BYTES = 64 * 1024
_ALIGNMENT = 64
_WRITE_CHUNK_BYTES = 256 * 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class BlockExtent(msgspec.Struct, frozen=True, array_like=True):
    """Where a block lies: ``nbytes`` at ``file_offset``, taken from byte ``start`` of its owner's memory."""

    file_offset: int
    start: int
    nbytes: int
    #: Whether changed bytes may be written back into the owner's memory.
    writable: bool = True


class Manifest(msgspec.Struct, frozen=True):
    """What a parcel holds. ``records`` are (label, offset in the stream), in order."""

    stream_offset: int
    stream_size: int
    records: list[tuple[str, int]]
    blocks: list[BlockExtent]
    #: Numbers of the blocks that serve the pickle's out-of-band buffers, in the order of the stream.
    out_of_band: list[int]
    #: Memo numbers of objects that only existed while the sender pickled (what a ``__getstate__`` made, say).
    temporaries: list[int] = []


@dataclass(slots=True)
class OutgoingBlock:
    """One owner's memory while a parcel is being packed.

    ``address`` and ``nbytes`` are the whole owner's; ``low`` and ``high`` bound what is used of it, in bytes from its
    start.
    """

    address: int
    nbytes: int
    #: Keeps the memory alive until the parcel is written, and afterwards as the target of what comes home.
    owner: Any
    low: int = -1
    high: int = 0
    #: False where nothing may ever be written back: a read-only buffer.
    writable: bool = True

    def use(self, start: int, stop: int) -> None:
        """Widen the hull by the bytes ``start:stop`` of the owner."""
        if stop > start:
            self.low = start if self.low < 0 else min(self.low, start)
            self.high = max(self.high, stop)

    @property
    def hull(self) -> tuple[int, int]:
        """(start, nbytes) of what is used; the start is aligned so that views of any dtype still fit on it."""
        start = max(self.low, 0) // _ALIGNMENT * _ALIGNMENT
        return start, max(0, self.high - start)


@dataclass
class OutgoingBlocks:
    """All blocks of a parcel being packed; an owner's memory is entered once, whoever refers to it."""

    #: Memory (address, nbytes) that several owners share in parts: one block each. Sorted, and apart from each other.
    regions: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[OutgoingBlock] = field(default_factory=list)
    _by_memory: dict[tuple[int, int], int] = field(default_factory=dict)

    def enter(self, address: int, nbytes: int, owner: Any, *, writable: bool = True) -> int:
        """Return the number of the block for this memory, entering it when it is new."""
        key = (address, nbytes)
        number = self._by_memory.get(key)
        if number is None:
            number = self._by_memory[key] = len(self.blocks)
            self.blocks.append(OutgoingBlock(address, nbytes, owner, writable=writable))
        return number

    def enter_part(self, address: int, nbytes: int, owner: Any, *, writable: bool = True) -> tuple[int, int]:
        """Enter memory that may be part of one of the ``regions``: (number, what to add to offsets from its start)."""
        at = bisect.bisect_right(self.regions, (address, sys.maxsize)) - 1
        if at >= 0 and nbytes:
            start, size = self.regions[at]
            if address + nbytes <= start + size:
                number = self.enter(start, size, [], writable=writable)
                self.blocks[number].owner.append(owner)
                return number, address - start
        return self.enter(address, nbytes, owner, writable=writable), 0

    def overlapping(self) -> list[tuple[int, int]]:
        """The regions (address, nbytes), sorted, in which several blocks overlap.

        Memory is only shared at the other end where it is one block; so whoever finds any has to pack again, with
        these.
        """
        regions: list[tuple[int, int]] = []
        start = stop = num_blocks = 0
        for address, nbytes in sorted((block.address, block.nbytes) for block in self.blocks if block.nbytes):
            if address < stop:
                stop, num_blocks = max(stop, address + nbytes), num_blocks + 1
                continue
            if num_blocks > 1:
                regions.append((start, stop - start))
            start, stop, num_blocks = address, address + nbytes, 1
        return [*regions, (start, stop - start)] if num_blocks > 1 else regions

    @property
    def total_bytes(self) -> int:
        """What the blocks take together."""
        return sum(block.hull[1] for block in self.blocks)


def view_of_memory(address: int, nbytes: int, owner: Any = None) -> memoryview:
    """A writable byte view of raw memory. It keeps ``owner`` alive; without one, the caller sees to that."""
    if nbytes == 0:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    memory.owner = owner
    return memoryview(memory).cast("B")


def write_parcel(
    stream: bytes | memoryview,
    records: list[tuple[str, int]],
    outgoing: OutgoingBlocks,
    out_of_band: list[int],
    temporaries: list[int] | None = None,
) -> Parcel:
    """Write stream and blocks into a new memfd.

    Raises:
        CannotTravelError: if the machine lacks the memory for it.
    """
    stream_offset = _HEADER.size
    position = stream_offset + len(stream)
    extents: list[BlockExtent] = []
    for block in outgoing.blocks:
        start, nbytes = block.hull
        position = _aligned(position, nbytes)
        extents.append(BlockExtent(position, start, nbytes, block.writable))
        position += nbytes
    contents = Manifest(stream_offset, len(stream), records, extents, out_of_band, temporaries or [])
    manifest = msgspec.msgpack.encode(contents)
    total = position + len(manifest)
    check_memory(total)
    fd = os.memfd_create("taas-parcel", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, total)
        _write_all(fd, memoryview(_HEADER.pack(_MAGIC, position, len(manifest))), 0)
        _write_all(fd, memoryview(stream), stream_offset)
        for block, extent in zip(outgoing.blocks, extents, strict=True):
            if extent.nbytes:
                _write_all(fd, view_of_memory(block.address + extent.start, extent.nbytes), extent.file_offset)
        _write_all(fd, memoryview(manifest), position)
    except BaseException:
        os.close(fd)
        raise
    return Parcel(fd, total)


def check_memory(needed_bytes: int) -> None:
    """Refuse what the machine has no memory for, before a page of it is touched."""
    available = available_memory_bytes()
    if needed_bytes > available:
        raise CannotTravelError.of(
            f"the cell's state takes {format_bytes(needed_bytes)}, and {format_bytes(available)} of memory are free",
            expected="room for one copy of what travels, which all ranks then share",
            do="free memory in the notebook (`del` what is not needed), or use less of it in the cell",
        )


def available_memory_bytes() -> int:
    """Free memory that a new allocation can really have: the machine's, or less where a cgroup (v2) caps it."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit_file:
            limit = limit_file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as current_file:
            current = int(current_file.read())
        if limit != "max":
            available = min(available, max(0, int(limit) - current + _reclaimable_bytes()))
    return available


def _reclaimable_bytes() -> int:
    """What the cgroup's usage counts and gives back on demand: files that were read, a dataset say."""
    with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as stat:
        fields = dict(line.split() for line in stat)
    return int(fields["inactive_file"]) + int(fields["active_file"])


def _aligned(position: int, nbytes: int) -> int:
    alignment = _ALIGNMENT if nbytes < _SMALL_BYTES else mmap.PAGESIZE
    return -(-position // alignment) * alignment


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _WRITE_CHUNK_BYTES], offset + done)


@dataclass(slots=True)
class Parcel:
    """An open parcel: the descriptor of its memfd (owned) and its size in bytes."""

    fd: int
    size_bytes: int

    def close(self) -> None:
        """Let the parcel go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class IncomingBlocks:
    """A parcel mapped copy-on-write: the stream, and the blocks at their addresses."""

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        # What arrived, unchanged by this process: the measure of what the cell wrote.
        self._pristine = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.buffer = memoryview(self._map)
        magic, manifest_offset, manifest_size = _HEADER.unpack_from(self._map, 0)
        if magic != _MAGIC:
            raise ValueError(f"not a parcel: it starts with {magic!r}, expected {_MAGIC!r}")
        manifest_bytes = self.buffer[manifest_offset : manifest_offset + manifest_size]
        self.manifest = msgspec.msgpack.decode(manifest_bytes, type=Manifest)
        self._base, self._pristine_base = address_of(self._map), address_of(self._pristine)
        blocks = [(extent.file_offset, number) for number, extent in enumerate(self.manifest.blocks) if extent.nbytes]
        blocks.sort()
        self._offsets = [offset for offset, _ in blocks]
        self._numbers = [number for _, number in blocks]

    @property
    def stream(self) -> memoryview:
        """The pickle stream."""
        start = self.manifest.stream_offset
        return self.buffer[start : start + self.manifest.stream_size]

    def extent(self, number: int) -> BlockExtent:
        """Where a block lies."""
        return self.manifest.blocks[number]

    def view(self, number: int) -> memoryview:
        """The block's bytes, writable."""
        extent = self.manifest.blocks[number]
        return self.buffer[extent.file_offset : extent.file_offset + extent.nbytes]

    def address(self, number: int) -> int:
        """Where the block's first byte lies in this process."""
        return self._base + self.manifest.blocks[number].file_offset

    def locate(self, address: int) -> tuple[int, int] | None:
        """Find the block that holds ``address``: (number, offset from the owner's start), or None.

        A changed block that may not be written back is none: its bytes are nothing that the sender has, or will have.
        """
        offset = address - self._base
        at = bisect.bisect_right(self._offsets, offset) - 1
        if at < 0:
            return None
        number = self._numbers[at]
        extent = self.manifest.blocks[number]
        inside = offset - extent.file_offset
        if inside >= extent.nbytes or (not extent.writable and self._is_changed(extent)):
            return None
        return number, inside + extent.start

    def changed(self) -> Iterator[int]:
        """Yield the numbers of the writable blocks whose bytes differ from what arrived."""
        for number, extent in enumerate(self.manifest.blocks):
            if extent.nbytes and extent.writable and self._is_changed(extent):
                yield number

    def _is_changed(self, extent: BlockExtent) -> bool:
        here, there = self._base + extent.file_offset, self._pristine_base + extent.file_offset
        return bool(_libc.memcmp(here, there, extent.nbytes))


def address_of(buffer: Any) -> int:
    """Where a contiguous buffer lies; 0 for an empty one. ctypes by itself refuses to point at what is read-only."""
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), 0)
    try:
        return int(view.buf or 0) if view.len else 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer`` (stable ABI since 3.11)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )
