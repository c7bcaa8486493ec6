"""Applies in the kernel what came home from rank 0.

The parcel is read completely before anything of the notebook is touched. An origin's number in it *is* the kernel's
object, so updates happen in place and aliases hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from taas_magic.namespace.aspects import BY_NAME
from taas_magic.namespace.blocks import IncomingBlocks
from taas_magic.namespace.bulk import address_of, copy_memory
from taas_magic.namespace.common import Common, CommonBlock
from taas_magic.namespace.pack import PackedNamespace
from taas_magic.namespace.rebuild import Loading, ParcelUnpickler, loading, without_warnings
from taas_magic.namespace.store import Segment

#: Smaller blocks are copied out of the parcel. One that is not keeps all of the parcel in memory, and a descriptor
#: open, for as long as it lives: it has to be large, and most of the parcel.
_COPY_BELOW_BYTES = 64 * 2**20


class HomeLoadError(Exception):
    """A record cannot be loaded in this process; rank 0 has to leave it out.

    Attributes:
        label: The record, as :meth:`taas_magic.namespace.track.Tracker.pack_changes` names it.
        reason: What went wrong.
    """

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(f"{label}: {reason}")
        self.label, self.reason = label, reason


@dataclass
class Homecoming:
    """A parcel from rank 0, read and ready to be applied.

    Attributes:
        bindings: Names to bind.
        deleted: Names to delete.
        extra: Records that are neither ("result", "random").
    """

    bindings: dict[str, Any] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    _updates: list[tuple[int, str, Any]] = field(default_factory=list)
    #: Numbers of blocks that both sides have, by the place in the parcel of their new content.
    _changed: dict[int, int] = field(default_factory=dict)
    _incoming: IncomingBlocks | None = None
    _context: Loading | None = None
    _memo: Callable[[], dict[int, Any]] = dict

    def note(self, common: Common, kept: Segment) -> set[int]:
        """Enter what has come into what both sides have, and what both have in memory now.

        Args:
            common: What both sides have.
            kept: The parcel's file.

        Returns:
            The numbers of the new objects, which only rank 0 knows.
        """
        assert self._incoming is not None
        assert self._context is not None
        manifest, memory = self._incoming.manifest, common.memory
        memo, temporaries = self._memo(), set(manifest.temporaries)
        objects = {place: obj for place, obj in memo.items() if place not in temporaries}
        common.add_objects(manifest.first_object, objects, len(memo))
        for place, extent in enumerate(manifest.blocks):
            pristine = kept.base + extent.file_offset
            if place in self._changed:
                block = memory.blocks[self._changed[place]]
                block.pristine, block.source = pristine, kept
                continue
            view = self._context.view(place)
            owner = view if isinstance(view.obj, bytearray) else self._incoming
            block = CommonBlock(
                address_of(view), extent.nbytes, extent.start, owner, extent.writable, pristine, kept, extent.is_shared
            )
            memory.add(manifest.first_block + place, block)
        memory.next_number = max(memory.next_number, manifest.first_block + len(manifest.blocks))
        return {manifest.first_object + place for place in objects}

    def blocks_here(self, common: Common) -> list[tuple[int, int, int]]:
        """(address here or 0, offset in the parcel, bytes) of the blocks that came."""
        assert self._incoming is not None
        return [
            (
                common.memory.blocks[self._changed[place]].address if place in self._changed else 0,
                extent.file_offset,
                extent.nbytes,
            )
            for place, extent in enumerate(self._incoming.manifest.blocks)
        ]

    def apply(
        self,
        packed: PackedNamespace,
        main: dict[str, Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[str]:
        """Bring everything into the notebook; returns what could not be, one line each.

        ``progress`` is called with the bytes that are copied, and all that will be.
        """
        problems: list[str] = []
        assert self._incoming is not None
        total_bytes, done_bytes = sum(self._incoming.extent(place).nbytes for place in self._changed), 0
        for place, number in self._changed.items():
            if progress is not None:
                progress(done_bytes, total_bytes)
            done_bytes += self._incoming.extent(place).nbytes
            block = packed.common.memory.blocks.get(number)
            if block is None or not block.is_there:
                # Nothing here lies in that memory any more.
                continue
            copy_memory(block.view, self._incoming.view(place))
        for number, aspect, payload in self._updates:
            if number not in packed.common.objects:
                problems.append("a change of an object that not all ranks have")
                continue
            origin = packed.common.objects[number]
            try:
                BY_NAME[aspect].apply(origin, payload)
            except Exception as error:  # noqa: BLE001 - the user's classes may raise anything
                problems.append(f"a change of a {type(origin).__name__} ({error})")
        main.update(self.bindings)
        for name in self.deleted:
            main.pop(name, None)
        return problems


def load_homecoming(fd: int, packed: PackedNamespace, main: dict[str, Any]) -> Homecoming:
    """Read a parcel from rank 0.

    Raises:
        HomeLoadError: if a record cannot be loaded here. Nothing has been changed.
    """
    incoming = IncomingBlocks([fd])
    copy_below_bytes = max(_COPY_BELOW_BYTES, len(incoming.buffer) // 2)
    context = Loading(incoming, main, packed.common.memory, copy_below_bytes=copy_below_bytes)
    home = Homecoming(_incoming=incoming, _context=context)
    unpickler = ParcelUnpickler(context, packed.common.objects)
    with loading(context), _restored(main) as bind:
        for label, _ in incoming.manifest.records:
            try:
                with without_warnings():
                    value = unpickler.load()
            except Exception as error:
                raise HomeLoadError(label, f"{type(error).__name__}: {error}") from error
            _sort_in(home, label, value)
            if label.startswith("bind "):
                # Loading an object runs its class's code, which may need names that have come before.
                bind(label.removeprefix("bind "), value)
    home._memo = unpickler.memo.copy
    return home


@contextlib.contextmanager
def _restored(main: dict[str, Any]) -> Iterator[Callable[[str, Any], None]]:
    """Bind names for a while."""
    before: dict[str, Any] = {}

    def bind(name: str, value: Any) -> None:
        before[name] = main.get(name, _ABSENT)
        main[name] = value

    try:
        yield bind
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                del main[name]
            else:
                main[name] = value


_ABSENT = object()


def _sort_in(home: Homecoming, label: str, value: Any) -> None:
    kind, _, rest = label.partition(" ")
    if kind == "blocks":
        home._changed = {place: number for number, place in value}
    elif kind == "bind":
        home.bindings[rest] = value
    elif kind == "delete":
        home.deleted.append(rest)
    elif kind == "update":
        number, aspect = rest.split(" ")
        home._updates.append((int(number), aspect, value))
    else:
        home.extra[label] = value
