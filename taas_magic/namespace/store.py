"""Keeps what was sent, so that what is the same the next time is not sent again.

Every parcel's memory file stays open as a *segment*. When the next parcel is packed, each block is compared with what
lay at the same place, or with what looks the same, in the segments that are kept: byte by byte, which takes a fraction
of a copy, and cannot be wrong as a digest could. What is equal becomes a reference into the old segment.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from taas_magic.namespace.blocks import available_memory_bytes, view_of_memory
from taas_magic.namespace.bulk import address_of, differing

#: Smaller blocks are sent each time: to look for them would cost more.
MIN_BLOCK_BYTES = 4096
#: A parcel refers to at most as many segments: their descriptors travel in one message.
MAX_SEGMENTS = 12
#: More are not kept, however small: each takes two descriptors.
_MAX_KEPT = 64
_SAMPLES, _SAMPLE_BYTES = 8, 64
_MAX_TRIES = 2


class Segment:
    """A memory file as this process keeps it: open, and mapped to be read.

    Attributes:
        fd: Owned.
        size_bytes: Of the file.
        base: Where it is mapped.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = os.dup(fd)
        self.size_bytes = size_bytes
        self._map = mmap.mmap(self.fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.base = address_of(self._map)
        self.used_at = 0
        #: Of what it holds, what lies elsewhere in a newer version.
        self.superseded_bytes = 0

    def __del__(self) -> None:
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Where a block's bytes lie in a segment."""

    segment: Segment
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Where it can be read."""
        return self.segment.base + self.offset


@dataclass
class BlockStore:
    """The segments that are kept, least recently used first, and what they hold.

    Args:
        budget_bytes: More than this is not kept.
    """

    budget_bytes: int
    _segments: list[Segment] = field(default_factory=list)
    #: The latest content of a place (address, size) of this process's memory.
    _by_place: dict[tuple[int, int], Region] = field(default_factory=dict)
    _by_look: dict[bytes, list[Region]] = field(default_factory=dict)
    _clock: int = 0

    @property
    def size_bytes(self) -> int:
        """What is kept."""
        return sum(segment.size_bytes for segment in self._segments)

    def match(self, places: list[tuple[int, int]]) -> list[Region | None]:
        """For each (address, size) of this process's memory, where the same bytes are kept; None where nowhere.

        No region is given twice: two blocks that happen to be equal must not become one.
        """
        found: list[Region | None] = [None] * len(places)
        if not self._segments:
            return found
        claimed: set[int] = set()
        open_places = [index for index, (_, nbytes) in enumerate(places) if nbytes >= MIN_BLOCK_BYTES]
        for find in (self._at_place, *[self._looking_alike] * _MAX_TRIES):
            candidates: list[tuple[int, Region]] = []
            for index in open_places:
                region = find(*places[index], claimed)
                if region is not None:
                    claimed.add(id(region))
                    candidates.append((index, region))
            other = differing([(places[index][0], region.address, region.nbytes) for index, region in candidates])
            for number, (index, region) in enumerate(candidates):
                if number not in other:
                    found[index] = region
            open_places = [index for index in open_places if found[index] is None]
        return self._of_few_segments(found)

    def _at_place(self, address: int, nbytes: int, claimed: set[int]) -> Region | None:
        region = self._by_place.get((address, nbytes))
        return None if region is None or id(region) in claimed else region

    def _looking_alike(self, address: int, nbytes: int, claimed: set[int]) -> Region | None:
        regions = self._by_look.get(_look_of(view_of_memory(address, nbytes)), ())
        return next((region for region in regions if id(region) not in claimed), None)

    def _of_few_segments(self, found: list[Region | None]) -> list[Region | None]:
        """Without what lies in segments that are mostly old versions, and in more segments than can be sent."""
        matched: dict[int, int] = {}
        for region in found:
            if region is not None:
                matched[id(region.segment)] = matched.get(id(region.segment), 0) + region.nbytes
        mostly_old = {id(each) for each in self._segments if each.superseded_bytes > each.size_bytes // 2}
        ranked = sorted(matched.keys() - mostly_old, key=lambda segment: -matched[segment])
        allowed = set(ranked[:MAX_SEGMENTS])
        return [region if region is not None and id(region.segment) in allowed else None for region in found]

    def keep(self, fd: int, size_bytes: int, blocks: Iterable[tuple[int, int, int]]) -> Segment:
        """Keep a memory file that nobody writes to any more; blocks are (address here, offset in it, bytes).

        An address of 0 is memory that is not here; its bytes are found by how they look.
        """
        segment = Segment(fd, size_bytes)
        large = [block for block in blocks if block[2] >= MIN_BLOCK_BYTES]
        if not large:
            return segment
        self._segments.append(segment)
        self.note_use([segment])
        for address, offset, nbytes in large:
            region = Region(segment, offset, nbytes)
            if address:
                before = self._by_place.get((address, nbytes))
                if before is not None:
                    before.segment.superseded_bytes += nbytes
                self._by_place[address, nbytes] = region
            look = _look_of(view_of_memory(region.address, nbytes))
            self._by_look.setdefault(look, []).append(region)
        self.shrink(self.budget_bytes)
        return segment

    def note_use(self, segments: Iterable[Segment]) -> None:
        """Note that segments are in use now."""
        self._clock += 1
        for segment in segments:
            segment.used_at = self._clock

    def make_room(self, needed_bytes: int) -> None:
        """Drop what is kept, all but what is in use now, where the machine has no memory left for what is to come."""
        lacking = needed_bytes - available_memory_bytes()
        if lacking > 0:
            in_use = sum(segment.size_bytes for segment in self._segments if segment.used_at == self._clock)
            self.shrink(max(in_use, self.size_bytes - lacking))

    def shrink(self, size_bytes: int) -> None:
        """Drop segments, least recently used first, until no more than this is kept."""
        dropped: set[int] = set()
        self._segments.sort(key=lambda segment: segment.used_at)
        while self._segments and (self.size_bytes > size_bytes or len(self._segments) > _MAX_KEPT):
            dropped.add(id(self._segments.pop(0)))
        if dropped:
            self._by_place = {
                place: region for place, region in self._by_place.items() if id(region.segment) not in dropped
            }
            self._by_look = {
                look: kept
                for look, regions in self._by_look.items()
                if (kept := [region for region in regions if id(region.segment) not in dropped])
            }


def _look_of(view: memoryview) -> bytes:
    """A digest of samples: what looks alike is worth a comparison."""
    step = max(1, (len(view) - _SAMPLE_BYTES) // (_SAMPLES - 1))
    samples = b"".join(view[at * step : at * step + _SAMPLE_BYTES] for at in range(_SAMPLES))
    return hashlib.blake2b(samples, digest_size=16, salt=len(view).to_bytes(16, "little")).digest()
