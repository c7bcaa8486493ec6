"""What two processes have in common: objects and blocks of memory that both know by the same numbers.

Whoever sends a parcel and whoever loads it number its objects alike: by their place in the pickle's memo, and the
blocks by their place in the parcel. So an object can be spoken of by its number, for as long as both sides remember it.
"""

from __future__ import annotations

import bisect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from taas_magic.namespace.blocks import IncomingBlocks, OutgoingBlock, Parcel, bounds_of_array, view_of_memory
from taas_magic.namespace.bulk import differing


@dataclass(slots=True)
class CommonBlock:
    """Memory that the other side has too.

    Attributes:
        address: Of its first byte here.
        nbytes: Its size.
        start: Where it begins in its owner's memory; the same on both sides.
        owner: Keeps the memory alive; where it is a torch storage, it is the whole owner.
        writable: Whether changes of the bytes are brought to the other side.
        pristine: Where the bytes lie that both sides had last; 0 where that is not known here.
        source: Keeps those alive.
        is_shared: Whether the other side's objects use its memory under this number, so that bytes and references
            can be sent as such. Otherwise a change of its bytes is a change of each object over it.
    """

    address: int
    nbytes: int
    start: int
    owner: Any
    writable: bool = True
    pristine: int = 0
    source: Any = None
    is_shared: bool = True

    @property
    def owners(self) -> list[Any]:
        """All owners, of which a region has several."""
        return self.owner if isinstance(self.owner, list) else [self.owner]

    @property
    def is_there(self) -> bool:
        """Whether the memory is where it was: its owner may have been given other memory, of another size."""
        return _has_memory(self.owner, self.address, self.address + self.nbytes)

    @property
    def view(self) -> memoryview:
        """Its bytes here."""
        return view_of_memory(self.address, self.nbytes, self.owner)


def _has_memory(owner: Any, low: int, high: int) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if isinstance(owner, list):
        # One block for the memory of several: each of them must have its part.
        return all(_has_memory(each, *_span_of(each, low, high)) for each in owner)
    if torch is not None and isinstance(owner, torch.UntypedStorage):
        start = owner.data_ptr()
        return bool(start <= low and high <= start + owner.nbytes())
    if numpy is not None and isinstance(owner, numpy.ndarray):
        start, end = bounds_of_array(owner)
        return start <= low and high <= end
    # Mapped files, and what cannot be resized while there is a view of it.
    return True


def _span_of(owner: Any, low: int, high: int) -> tuple[int, int]:
    """The part of a region that an owner has, at least its first byte where it is there at all."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(owner, torch.UntypedStorage):
        start, end = owner.data_ptr(), owner.data_ptr() + owner.nbytes()
    elif numpy is not None and isinstance(owner, numpy.ndarray):
        start, end = bounds_of_array(owner)
    else:
        return low, low
    is_inside = low <= start < end <= high
    return (start, end) if is_inside else (low, high)


@dataclass
class CommonMemory:
    """The blocks by number."""

    blocks: dict[int, CommonBlock] = field(default_factory=dict)
    #: The number that the next block gets.
    next_number: int = 0
    #: Addresses of the shared blocks that have a size, sorted, with their numbers; None when it has to be made anew.
    _places: tuple[list[int], list[int]] | None = None

    def add(self, number: int, block: CommonBlock) -> None:
        """Note a block."""
        self.blocks[number] = block
        self.next_number = max(self.next_number, number + 1)
        self._places = None

    def add_sent(self, blocks: list[OutgoingBlock], parcel: Parcel) -> None:
        """Note the blocks of a parcel that this process has made."""
        kept = [*parcel.segments, parcel.own]
        base = self.next_number
        for index, block in enumerate(blocks):
            start, nbytes = block.hull
            address, pristine = block.address + start, parcel.pristine_address(index)
            self.add(
                base + index,
                CommonBlock(address, nbytes, start, block.owner, block.writable, pristine, kept, block.is_shared),
            )

    def add_received(self, incoming: IncomingBlocks) -> None:
        """Note the blocks that have come."""
        for index, extent in enumerate(incoming.manifest.blocks):
            address, pristine = incoming.address(index), incoming.pristine_address(index)
            self.add(
                incoming.manifest.first_block + index,
                CommonBlock(
                    address,
                    extent.nbytes,
                    extent.start,
                    incoming,
                    extent.writable,
                    pristine,
                    incoming,
                    extent.is_shared,
                ),
            )

    def locate(self, address: int, nbytes: int = 1) -> tuple[int, int] | None:
        """Find the shared block that holds these bytes: (number, offset of the first from the owner's start), or None.

        A changed block that may not be written back is none: its bytes are nothing that the other side will have.
        """
        if self._places is None:
            pairs = sorted(
                (block.address, number) for number, block in self.blocks.items() if block.nbytes and block.is_shared
            )
            self._places = [place for place, _ in pairs], [number for _, number in pairs]
        places, numbers = self._places
        at = bisect.bisect_right(places, address) - 1
        if at < 0:
            return None
        block = self.blocks[numbers[at]]
        inside = address - block.address
        if inside + nbytes > block.nbytes or (not block.writable and self._is_changed(numbers[at])):
            return None
        return numbers[at], inside + block.start

    def changed(self) -> Iterator[int]:
        """Yield the numbers of the writable blocks whose bytes are not those that both sides had last."""
        known = [
            (number, block)
            for number, block in self.blocks.items()
            if block.nbytes and block.writable and block.pristine and block.is_there
        ]
        other = differing([(block.address, block.pristine, block.nbytes) for _, block in known])
        for index, (number, _) in enumerate(known):
            if index in other:
                yield number

    def stop_sharing(self, numbers: Iterable[int]) -> None:
        """Note that the other side has these blocks no more. Objects over them may be known there all the same."""
        for number in numbers:
            if number in self.blocks:
                self.blocks[number].is_shared = False
        self._places = None

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop blocks; what lies in them is sent as other memory is."""
        for number in numbers:
            self.blocks.pop(number, None)
        self._places = None

    def prune(self) -> list[int]:
        """Drop the blocks whose memory nothing else in this process uses; returns their numbers."""
        for owner in {id(block.owner): block.owner for block in self.blocks.values()}.values():
            if isinstance(owner, IncomingBlocks):
                owner.close_unused()
        # One owner may have several blocks, of several parcels.
        counts = Counter(id(owner) for block in self.blocks.values() for owner in block.owners)
        dropped = [
            number
            for number, block in self.blocks.items()
            if block.nbytes
            and (not block.is_there or all(_is_only_ours(block, place, counts) for place in range(len(block.owners))))
        ]
        self.forget(dropped)
        return dropped

    def _is_changed(self, number: int) -> bool:
        block = self.blocks[number]
        if not block.pristine:
            return False
        return not block.is_there or bool(differing([(block.address, block.pristine, block.nbytes)]))


def _is_only_ours(block: CommonBlock, place: int, counts: Counter[int]) -> bool:
    """Whether nothing but blocks refers to one of a block's owners; False where that cannot be told."""
    owner = block.owners[place]
    if isinstance(owner, IncomingBlocks):
        return not owner.is_mapped(block.address)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(owner, torch.UntypedStorage):
        count = getattr(torch._C, "_storage_Use_Count", None)
        return count is not None and bool(count(owner._cdata) <= 1)
    num_others = sys.getrefcount(owner) - counts[id(owner)]
    if isinstance(owner, memoryview) and isinstance(owner.obj, bytearray):
        # Tensors refer to the view, arrays to what it is a view of.
        is_viewed = num_others > _REFERENCES_OF_AN_OWNER
        return not is_viewed and sys.getrefcount(owner.obj) <= _REFERENCES_OF_WHAT_IS_VIEWED
    is_counted = isinstance(owner, bytes) or (numpy is not None and isinstance(owner, numpy.ndarray))
    return is_counted and num_others <= _REFERENCES_OF_AN_OWNER


@dataclass
class Common:
    """All that two processes have in common."""

    #: This side's objects by number.
    objects: dict[int, Any] = field(default_factory=dict)
    memory: CommonMemory = field(default_factory=CommonMemory)
    #: The number that the first object of the next parcel gets.
    next_object: int = 0

    def copy(self) -> Common:
        """The same, to which more can be added without an effect on this one."""
        memory = CommonMemory(dict(self.memory.blocks), self.memory.next_number)
        return Common(dict(self.objects), memory, self.next_object)

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop objects; wherever one of them is met again, it is sent by value."""
        for number in numbers:
            self.objects.pop(number, None)

    def prune(self) -> tuple[list[int], list[int]]:
        """Drop objects and blocks that nothing else in this process uses; returns their numbers.

        An array is known as an object, and as the owner of a block: that is no use of either.
        """
        owners = Counter(id(owner) for block in self.memory.blocks.values() for owner in block.owners)
        return self._prune_objects(owners), self.memory.prune()

    def _prune_objects(self, owners: Counter[int]) -> list[int]:
        """Drop the objects that nothing else refers to; ``owners`` are those that blocks refer to, and how often.

        What holds others has a lower number than they, mostly, so one pass finds both.
        """
        dropped = []
        # One object may have several numbers.
        others = Counter(map(id, self.objects.values()))
        for number in sorted(self.objects):
            obj = self.objects.pop(number)
            others[id(obj)] -= 1
            if sys.getrefcount(obj) - others[id(obj)] - owners[id(obj)] > _REFERENCES_OF_A_LOCAL:
                others[id(obj)] += 1
                self.objects[number] = obj
            else:
                dropped.append(number)
        self.objects = dict(sorted(self.objects.items()))
        return dropped

    def add_objects(self, first: int, objects: dict[int, Any], num_numbers: int) -> None:
        """Note the objects of a parcel by their place in its memo, which has ``num_numbers`` places."""
        self.objects.update(objects if first == 0 else {first + place: obj for place, obj in objects.items()})
        self.next_object = max(self.next_object, first + num_numbers)


def _references_of_a_local() -> int:
    """What ``getrefcount`` says of an object that only a local variable holds; Python's versions differ."""
    objects = {0: object()}
    obj = objects.pop(0)
    return sys.getrefcount(obj)


_REFERENCES_OF_A_LOCAL = _references_of_a_local()


def _references_of_an_owner() -> int:
    """What ``getrefcount`` says in :func:`_is_only_ours` of an owner that only its block holds, less that one."""
    block = CommonBlock(0, 0, 0, object())
    owner = block.owners[0]
    return sys.getrefcount(owner) - 1


def _references_of_what_is_viewed() -> int:
    """The same of what a view holds that nothing else does."""
    view = memoryview(bytearray(1))
    return sys.getrefcount(view.obj)


_REFERENCES_OF_AN_OWNER = _references_of_an_owner()
_REFERENCES_OF_WHAT_IS_VIEWED = _references_of_what_is_viewed()
