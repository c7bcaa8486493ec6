"""Blocks: memory that travels beside the pickle, copied once and mapped by every rank.

A *parcel* is one anonymous file (``memfd``) that holds a pickle stream and the blocks it refers to::

    magic 8 bytes | manifest offset u64 | manifest size u64 | stream | blocks ... | manifest

A block is the part of one owner's memory (a tensor's storage, an array's buffer) that is really used: the hull of
all the views that were sent. Offsets in the stream count from the owner's start, so they stay right however small the
hull is. Blocks that were sent before, and are the same still, lie in the files of earlier parcels (*segments*), which
go along. Ranks map the files ``MAP_PRIVATE``: they read the same pages until they write. Once it is written, a file is
sealed: nobody can change what others rely on.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from taas_magic.errors import CannotTravelError
from taas_magic.namespace.bulk import address_of, write_out
from taas_magic.namespace.large_bytes import HEADROOM_BYTES, MIN_BYTES, is_used, object_at, write_head
from taas_magic.units import format_bytes

if TYPE_CHECKING:
    from taas_magic.namespace.store import BlockStore, Region, Segment

_MAGIC = b"taasprc2"
_HEADER = struct.Struct("<8sQQ")
_SMALL_BYTES = 64 * 1024
_ALIGNMENT = 64
#: Linux 5.1: existing writable mappings and descriptors are no way around it. Python has no name for it.
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE


class BlockExtent(msgspec.Struct, frozen=True, array_like=True):
    """Where a block lies: ``nbytes`` at ``file_offset``, taken from byte ``start`` of its owner's memory."""

    file_offset: int
    start: int
    nbytes: int
    #: Whether changed bytes may be written back into the owner's memory.
    writable: bool = True
    #: In which file: 0 is the parcel, 1 the first of the segments that go with it.
    segment: int = 0
    #: Whether the receiver's objects use this very memory; False for content that only goes into memory they have.
    is_shared: bool = True


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
    #: What to add to memo numbers, and to the numbers of blocks, for those that both sides know them by.
    first_object: int = 0
    first_block: int = 0


_manifest_decoder = msgspec.msgpack.Decoder(Manifest)


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
    #: See :class:`BlockExtent`.
    is_shared: bool = True

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

    def mark_as_content(self, first: int) -> None:
        """Note that the blocks from this number on only go into memory that the receiver has."""
        for block in self.blocks[first:]:
            block.is_shared = False

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


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into a parcel beside the blocks; see :class:`Manifest`."""

    stream: bytes | memoryview
    records: list[tuple[str, int]]
    out_of_band: list[int]
    temporaries: list[int] = field(default_factory=list)
    first_object: int = 0
    first_block: int = 0


def write_parcel(
    contents: Contents,
    outgoing: OutgoingBlocks,
    *,
    store: BlockStore | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Parcel:
    """Write stream and blocks into a new memfd.

    Args:
        contents: What else than blocks.
        outgoing: The blocks.
        store: Has earlier parcels, whose blocks are not written again, and keeps this one.
        progress: Called with the bytes that are written, and all that will be.

    Raises:
        CannotTravelError: if the machine lacks the memory for it.
    """
    places = [(block.address + block.hull[0], block.hull[1]) for block in outgoing.blocks]
    kept: Sequence[Region | None] = [None] * len(places) if store is None else store.match(places)
    segments: dict[int, Segment] = {}
    position = _HEADER.size + len(contents.stream)
    extents: list[BlockExtent] = []
    for block, region in zip(outgoing.blocks, kept, strict=True):
        start, nbytes = block.hull
        if region is not None:
            segments.setdefault(id(region.segment), region.segment)
            number = 1 + list(segments).index(id(region.segment))
            extents.append(BlockExtent(region.offset, start, nbytes, block.writable, number, block.is_shared))
            continue
        position = _aligned(position, nbytes)
        extents.append(BlockExtent(position, start, nbytes, block.writable, 0, block.is_shared))
        position += nbytes
    manifest = msgspec.msgpack.encode(
        Manifest(
            _HEADER.size,
            len(contents.stream),
            contents.records,
            extents,
            contents.out_of_band,
            contents.temporaries,
            contents.first_object,
            contents.first_block,
        )
    )
    total = position + len(manifest)
    if store is not None:
        store.note_use(segments.values())
        store.make_room(total)
    check_memory(total)
    fd = os.memfd_create("taas-parcel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total)
        new = [
            (extent.file_offset, view_of_memory(address, nbytes))
            for extent, (address, nbytes) in zip(extents, places, strict=True)
            if nbytes and not extent.segment
        ]
        head = memoryview(_HEADER.pack(_MAGIC, position, len(manifest)))
        stream = (_HEADER.size, memoryview(contents.stream))
        write_out(fd, [(0, head), stream, *new, (position, memoryview(manifest))], progress)
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        own = None
        if store is not None:
            written = [
                (address, extent.file_offset, nbytes)
                for extent, (address, nbytes) in zip(extents, places, strict=True)
                if not extent.segment
            ]
            own = store.keep(fd, total, written)
    except BaseException:
        os.close(fd)
        raise
    return Parcel(fd, total, list(segments.values()), extents, own)


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
    headroom = HEADROOM_BYTES if nbytes >= MIN_BYTES else 0
    return -(-position // alignment) * alignment + headroom


@dataclass(slots=True)
class Parcel:
    """An open parcel: the descriptor of its memfd (owned) and its size in bytes.

    Attributes:
        segments: Files of earlier parcels that go along with it.
        extents: Where its blocks lie.
    """

    fd: int
    size_bytes: int
    segments: list[Segment] = field(default_factory=list)
    extents: list[BlockExtent] = field(default_factory=list)
    #: The parcel's own file as it is kept, where it is.
    own: Segment | None = None

    def pristine_address(self, number: int) -> int:
        """Where a block can be read as it was sent, as long as the segments are held; 0 where it is not kept."""
        extent = self.extents[number]
        segment = self.segments[extent.segment - 1] if extent.segment else self.own
        return 0 if segment is None else segment.base + extent.file_offset

    @property
    def fds(self) -> list[int]:
        """What has to be handed to whoever is to read it."""
        return [self.fd, *(segment.fd for segment in self.segments)]

    @property
    def mapped_bytes(self) -> int:
        """What a reader sees: the parcel, and the blocks that were sent before."""
        return self.size_bytes + sum(extent.nbytes for extent in self.extents if extent.segment)

    def close(self) -> None:
        """Let the parcel go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(slots=True)
class _File:
    """A file of a parcel as it is mapped here: to work on, and as it arrived."""

    private: mmap.mmap
    pristine: mmap.mmap
    base: int
    pristine_base: int
    size: int

    @classmethod
    def map(cls, fd: int) -> _File:
        size = os.fstat(fd).st_size
        private = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        pristine = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return cls(private, pristine, address_of(private), address_of(pristine), size)

    def close_if_unused(self) -> None:
        """Unmap it, unless somebody has a view of it."""
        # An array over it holds a reference and no more: `close` alone would take its memory away.
        if not self.private.closed and sys.getrefcount(self.private) <= _REFERENCES_OF_AN_ATTRIBUTE:
            with contextlib.suppress(BufferError):
                self.private.close()
                self.pristine.close()


def _references_of_an_attribute() -> int:
    """What ``getrefcount`` says of an object that only an attribute holds; Python's versions differ."""
    holder = _File.__new__(_File)
    holder.private = object()  # type: ignore[assignment]
    return sys.getrefcount(holder.private)


_REFERENCES_OF_AN_ATTRIBUTE = _references_of_an_attribute()


#: Nothing that Python counts keeps a parcel mapped for the sake of the objects that lie in it.
_parcels_with_bytes: dict[int, IncomingBlocks] = {}


class IncomingBlocks:
    """A parcel mapped copy-on-write: the stream, and the blocks at their addresses.

    Args:
        fds: The parcel, and the segments that came along; they may be closed afterwards.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self._files = [_File.map(fd) for fd in fds]
        self.buffer = memoryview(self._files[0].private)
        #: Objects that lie in the parcel itself: their addresses by block.
        self._bytes_objects: dict[int, int] = {}
        magic, manifest_offset, manifest_size = _HEADER.unpack_from(self.buffer, 0)
        if magic != _MAGIC:
            raise ValueError(f"not a parcel: it starts with {magic!r}, expected {_MAGIC!r}")
        manifest_bytes = self.buffer[manifest_offset : manifest_offset + manifest_size]
        self.manifest = _manifest_decoder.decode(manifest_bytes)

    @property
    def stream(self) -> memoryview:
        """The pickle stream."""
        start = self.manifest.stream_offset
        return self.buffer[start : start + self.manifest.stream_size]

    def close_unused(self) -> None:
        """Unmap the files over which nothing in this process has memory."""
        with contextlib.suppress(BufferError):
            self.buffer.release()
        if any(is_used(address) for address in self._bytes_objects.values()):
            return
        _parcels_with_bytes.pop(id(self), None)
        self._bytes_objects.clear()
        for file in self._files:
            file.close_if_unused()

    def is_mapped(self, address: int) -> bool:
        """Whether an address lies in a file that is mapped still."""
        return any(file.base <= address < file.base + file.size and not file.private.closed for file in self._files)

    def extent(self, number: int) -> BlockExtent:
        """Where a block lies."""
        return self.manifest.blocks[number]

    def view(self, number: int) -> memoryview:
        """The block's bytes, writable."""
        extent = self.manifest.blocks[number]
        buffer = memoryview(self._files[extent.segment].private)
        return buffer[extent.file_offset : extent.file_offset + extent.nbytes]

    def address(self, number: int) -> int:
        """Where the block's first byte lies in this process."""
        extent = self.manifest.blocks[number]
        return self._files[extent.segment].base + extent.file_offset

    def bytes_over(self, number: int) -> bytes:
        """The ``bytes`` object that a block is."""
        if number not in self._bytes_objects:
            # What is in the map may go when nobody refers to it, and only then.
            _parcels_with_bytes[id(self)] = self
            address = self._bytes_objects[number] = self.address(number)
            write_head(address, self.extent(number).nbytes)
        return object_at(self._bytes_objects[number])

    def pristine_address(self, number: int) -> int:
        """Where the block lies as it arrived, whatever this process does to it."""
        extent = self.manifest.blocks[number]
        return self._files[extent.segment].pristine_base + extent.file_offset


def reach_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """The bytes (low, high) that an array reaches, relative to its first element; strides in units of ``itemsize``."""
    if 0 in shape:
        return 0, 0
    low = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True) if stride < 0)
    high = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True) if stride > 0)
    return low, high + itemsize


def bounds_of_array(array: Any) -> tuple[int, int]:
    """The addresses between which an array's elements lie."""
    low, high = reach_of(array.shape, array.strides, array.itemsize)
    return array.ctypes.data + low, array.ctypes.data + high


def span_of_tensor(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements of its storage lie between a tensor's first one and its last, both counted."""
    return reach_of(size, stride, 1)[1]


def has_lost_its_memory(tensor: Any) -> bool:
    """Whether a tensor's storage was made smaller than it is, or given up, so that it has no content."""
    if not tensor.numel():
        return False
    last = tensor.storage_offset() + span_of_tensor(tensor.shape, tensor.stride())
    return bool(last * tensor.itemsize > tensor.untyped_storage().nbytes())
