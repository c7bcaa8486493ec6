"""Follows, in rank 0, what became of the namespace that arrived, and packs what has to come home.

Every object in the unpickler's memo is one that the kernel has too, under the same number: an *origin*. Those that can
change are noted shallowly on arrival. At the end each is compared with its note; what differs is sent as an update of
that number, and wherever else an origin is met, its number is sent in its place. So the kernel's own objects are
updated in place, and everything that refers to them still does.

The kernel follows its objects in the same way between two cells of ranks that are kept (see
:mod:`taas_magic.namespace.mirror`).
"""

from __future__ import annotations

import bisect
import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from taas_magic.namespace import rebuild
from taas_magic.namespace.aspects import (
    KEPT,
    SAME,
    Aspect,
    Kinds,
    aspects_of,
    has_own_state,
    place_of_tensor,
)
from taas_magic.namespace.blocks import (
    Contents,
    OutgoingBlock,
    OutgoingBlocks,
    Parcel,
    view_of_memory,
    write_parcel,
)
from taas_magic.namespace.bulk import address_of
from taas_magic.namespace.collection import no_collection
from taas_magic.namespace.common import Common, CommonBlock
from taas_magic.namespace.large_bytes import is_large
from taas_magic.namespace.pack import Selection, is_content, load_order, origins_of, reached_by
from taas_magic.namespace.pickler import Locate, MainGlobals, NamespacePickler, Refused
from taas_magic.namespace.store import Segment


@dataclass(frozen=True, slots=True)
class NotHome:
    """Something that stays on rank 0: the expression that reaches it, and why."""

    path: str
    reason: str


@dataclass
class HomeParcel:
    """What comes home: the parcel, and what could not be packed into it."""

    parcel: Parcel
    not_home: list[NotHome]
    unwrapped: list[str]
    #: What both sides have in common once the receiver has taken it; only where that was asked for.
    sent: Sent | None = None


@dataclass
class Sent:
    """What a parcel adds to what both sides have."""

    first_object: int
    objects: dict[int, Any]
    num_numbers: int
    first_block: int
    blocks: list[OutgoingBlock]
    #: (number of a block that both have, place in the parcel of its new content).
    changed: list[tuple[int, int]]
    parcel: Parcel

    def enter(self, common: Common) -> None:
        """Note that the receiver has taken it."""
        common.add_objects(self.first_object, self.objects, self.num_numbers)
        memory, segment = common.memory, self.parcel.own
        number_of = {place: number for number, place in self.changed}
        for place, block in enumerate(self.blocks):
            pristine = self.parcel.pristine_address(place)
            if place in number_of:
                known = memory.blocks[number_of[place]]
                known.pristine, known.source = pristine, segment
                continue
            start, nbytes = block.hull
            memory.add(
                self.first_block + place,
                CommonBlock(
                    block.address + start,
                    nbytes,
                    start,
                    block.owner,
                    block.writable,
                    pristine,
                    segment,
                    block.is_shared,
                ),
            )
        memory.next_number = max(memory.next_number, self.first_block + len(self.blocks))


@dataclass(slots=True)
class _Followed:
    number: int
    obj: Any
    notes: list[tuple[Aspect, Any]]
    #: Only its pickle can tell whether it changed.
    is_opaque: bool = False
    digest: Any = None


class _Digest:
    """Stands in a note for a sub-object that identity does not cover: what its pickle was."""

    __slots__ = ("obj", "pickled")

    def __init__(self, obj: Any, pickled: Any) -> None:
        self.obj, self.pickled = obj, pickled


class Tracker:
    """Notes the arrived namespace, and packs its changes.

    Args:
        common: What both sides have, as it was loaded, before the cell runs.
        main: The namespace that the cell runs in.
        ignored: Names that are the shell's own.
        names: The names to follow; all that are the notebook's where it is None.
        shares_memory: Whether the receiver's memory can be spoken of by the numbers of blocks.
    """

    def __init__(
        self,
        common: Common,
        main: dict[str, Any],
        ignored: Iterable[str] = (),
        *,
        names: Iterable[str] | None = None,
        shares_memory: bool = True,
    ) -> None:
        self._common = common
        self._memory = common.memory
        self.locate: Locate | None = common.memory.locate if shares_memory else None
        self._followed_names = None if names is None else frozenset(names)
        self._main = main
        self._ignored = frozenset(ignored)
        self._kinds = Kinds()
        self._origins = {
            number: obj for number, obj in common.objects.items() if can_be_followed(obj, main, self._kinds)
        }
        self._number_of = {id(obj): number for number, obj in self._origins.items()}
        #: Ids of opaque origins that changed: they come home by value, so whatever holds them has to be sent.
        self._changed_opaque: set[int] = set()
        #: Those that are updated by their state instead.
        self._changed_states: list[_Followed] = []
        with no_collection():
            self._followed = [self._follow(number, obj) for number, obj in self._origins.items()]
        self._names = {name: self.note(value) for name, value in main.items() if self._is_notebook_name(name)}

    # -- noting --------------------------------------------------------------------------------------------------

    def _follow(self, number: int, obj: Any) -> _Followed:
        try:
            aspects = self._kinds.aspects_of(obj)
            if aspects is not None and not self._is_not_written_back(obj):
                return _Followed(number, obj, [(aspect, aspect.take(obj, self)) for aspect in aspects])
        except Exception:  # noqa: BLE001, S110 - a class's own code failed: no reason not to run the cell
            pass
        return _Followed(number, obj, [], True, self._digest(obj))

    def _is_not_written_back(self, obj: Any) -> bool:
        """Whether an array's memory belongs to others too, in the kernel; if it changes, another takes its place."""
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(obj, numpy.ndarray) or not obj.nbytes:
            return False
        located = self._memory.locate(obj.ctypes.data)
        return located is not None and not self._memory.blocks[located[0]].writable

    def has_arrived(self, address: int) -> bool:
        """See :class:`taas_magic.namespace.aspects.View`."""
        return self._memory.locate(address) is not None

    def note(self, value: Any) -> Any:
        """See :class:`taas_magic.namespace.aspects.View`."""
        if self._kinds.is_immutable(value) or id(value) in self._number_of or self._is_safe(value):
            return value
        return _Digest(value, self._digest(value))

    def _is_safe(self, value: Any) -> bool:
        """Whether identity tells all about a value: it cannot change, or is followed."""
        if isinstance(value, (tuple, frozenset)):
            return all(id(item) in self._number_of or self._is_safe(item) for item in value)
        return self._kinds.is_immutable(value) or (isinstance(value, type) and not aspects_of(value))

    def differs(self, noted: Any, value: Any) -> bool:
        """See :class:`taas_magic.namespace.aspects.View`."""
        if isinstance(noted, _Digest):
            return noted.obj is not value or noted.pickled != self._digest(value)
        return noted is not value or (bool(self._changed_opaque) and self._holds_changed_opaque(value))

    def _holds_changed_opaque(self, value: Any) -> bool:
        if isinstance(value, (tuple, frozenset)):
            return any(self._holds_changed_opaque(item) for item in value)
        return id(value) in self._changed_opaque

    def _digest(self, obj: Any) -> Any:
        """The pickle of an object with its buffers, in which other origins are only numbers; None if it has none."""
        stream = io.BytesIO()
        with _DigestPickler(self, stream, OutgoingBlocks(), by_value=id(obj)) as pickler:
            try:
                pickler.dump(obj)
            except BaseException:  # noqa: BLE001 - an object's own code may call sys.exit
                return None
            return stream.getvalue(), pickler.buffer_digests, pickler.block_digests()

    def number_of(self, obj: Any) -> int | None:
        """The memo number under which the kernel has an object; None where it comes home by value."""
        number = self._number_of.get(id(obj))
        return None if number is None or id(obj) in self._changed_opaque else number

    # -- packing -------------------------------------------------------------------------------------------------

    def pack_changes(
        self,
        extra: dict[str, Any] | None = None,
        exclude: Iterable[str] = (),
        *,
        keep: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> HomeParcel:
        """Pack every binding, deletion and update, and the ``extra`` records ("result", "random").

        Args:
            extra: More records by label.
            exclude: Labels that the kernel could not load.
            keep: Return what both sides have in common afterwards, too.
            progress: Called with the bytes that are copied, and all that will be.
        """
        not_home: list[NotHome] = []
        records = dict(self.changes(not_home))
        records.update(extra or {})
        skipped = set(exclude)
        while True:
            chosen = {label: value for label, value in records.items() if label not in skipped}
            packing = _Packing(self, chosen, keep, progress)
            try:
                parcel = packing.run()
            except _RecordError as failure:
                label = failure.label
                records[label], lost = self.without_failing_parts(label, records[label], failure.error)
                not_home.extend(lost)
                if records[label] is SAME:
                    skipped.add(label)
                continue
            return HomeParcel(parcel, not_home, packing.unwrapped, packing.sent)

    def changed_names(self) -> tuple[list[str], list[NotHome]]:
        """The names that the cell has bound, or that lead to something that it has changed; nothing can be asked after.

        For whoever brings them to a notebook that has nothing of what was sent.
        """
        # The notebook that gets them shares no memory.
        self.locate = None
        not_home: list[NotHome] = []
        bound: list[str] = []
        touched: set[int] = set()
        for label, _ in self.changes(not_home):
            kind, _, rest = label.partition(" ")
            if kind == "bind":
                bound.append(rest)
            elif kind == "update":
                touched.add(id(self._origins[int(rest.split()[0])]))
        touched |= self._changed_opaque
        for name in self._names:
            is_there = name in self._main and name not in bound and self._is_notebook_name(name)
            if touched and is_there and reached_by(self._main, Selection((name,)), {}) & touched:
                bound.append(name)
        return bound, not_home

    def changes(self, not_home: list[NotHome]) -> Iterator[tuple[str, Any]]:
        """Yield a label and a payload for all that has changed; what cannot be looked at is added to ``not_home``."""
        self._find_changed_memory()
        self._find_changed_opaque()
        if self.locate is None:
            self._find_reshaped_arrays()
        yield from self._records(not_home)

    def _find_changed_memory(self) -> None:
        """Find the shared blocks that changed, and the places of others that did: objects over those are sent anew."""
        self.changed_blocks: list[int] = []
        self._rewritten: list[tuple[int, int]] = []
        for number in self._memory.changed():
            block = self._memory.blocks[number]
            if block.is_shared and self.locate is not None:
                self.changed_blocks.append(number)
            else:
                self._rewritten.append((block.address, block.address + block.nbytes))
        self._rewritten.sort()

    def contiguous_memory(self) -> Iterator[tuple[int, int, Any]]:
        """The tensors and arrays that both sides have and that lie in one piece: addresses of start and end, object."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        for number, obj in self._origins.items():
            if self.number_of(obj) != number:
                continue
            if numpy is not None and isinstance(obj, numpy.ndarray):
                if obj.flags.c_contiguous and obj.nbytes and not obj.dtype.hasobject:
                    yield obj.ctypes.data, obj.ctypes.data + obj.nbytes, obj
            elif torch is not None and isinstance(obj, torch.Tensor):
                address = place_of_tensor(obj)
                if address and obj.is_contiguous():
                    yield address, address + obj.numel() * obj.itemsize, obj

    def is_rewritten(self, address: int) -> bool:
        """Whether an address is in memory that has changed and is not sent as a block; after :meth:`changes`."""
        at = bisect.bisect_right(self._rewritten, (address, sys.maxsize)) - 1
        return at >= 0 and address < self._rewritten[at][1]

    def _with_content(self, aspect: Aspect, obj: Any, payload: Any) -> Any:
        """Add the content of a tensor or an array to what is sent of it, where that is in no block that is sent."""
        if aspect.name == "array" and payload is SAME and self.is_rewritten(obj.ctypes.data):
            return obj.view()
        if aspect.name == "tensor" and (payload is SAME or "tensor" not in payload):
            address = place_of_tensor(obj)
            if address and self.is_rewritten(address):
                content: Any = {} if payload is SAME else payload
                return {**content, "tensor": obj.detach(), "requires_grad": obj.requires_grad and obj.is_leaf}
        return payload

    def _find_changed_opaque(self) -> None:
        """Find the opaque origins whose pickle is another one now; who holds one of those by value has changed too."""
        self._changed_opaque, self._changed_states = set(), []
        unchanged = [item for item in self._followed if item.is_opaque]
        found = unchanged
        while found:
            found = [item for item in unchanged if self._digest(item.obj) != item.digest]
            seen = {item.number for item in found}
            unchanged = [item for item in unchanged if item.number not in seen]
            self._changed_states += [item for item in found if has_own_state(item.obj)]
            self._changed_opaque |= {id(item.obj) for item in found if not has_own_state(item.obj)}

    def _find_reshaped_arrays(self) -> None:
        """Find arrays of another shape or type now: several processes have them, and not all can change theirs."""
        for item in self._followed:
            for aspect, taken in item.notes:
                if aspect.name == "array" and taken[1:3] != (item.obj.dtype, item.obj.shape):
                    self._changed_opaque.add(id(item.obj))

    def _records(self, not_home: list[NotHome]) -> Iterable[tuple[str, Any]]:  # noqa: C901 - one loop a kind of record
        for item in self._followed:
            for aspect, taken in item.notes if id(item.obj) not in self._changed_opaque else ():
                try:
                    payload = aspect.diff(item.obj, taken, self)
                except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                    not_home.append(NotHome(self._path_of(item.number), _reason(error)))
                    continue
                if self._rewritten:
                    payload = self._with_content(aspect, item.obj, payload)
                if payload is not SAME:
                    yield f"update {item.number} {aspect.name}", payload
        for item in self._changed_states:
            try:
                yield f"update {item.number} state", item.obj.__getstate__()
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                not_home.append(NotHome(self._path_of(item.number), _reason(error)))
        changed = [
            (name, value)
            for name, value in list(self._main.items())
            if self._is_notebook_name(name) and (name not in self._names or self.differs(self._names[name], value))
        ]
        # Loading an object runs its class's code, which may use the other names.
        for name, value in sorted(changed, key=lambda pair: load_order(pair[1])):
            yield f"bind {name}", value
        for name in self._names:
            if self._is_notebook_name(name) and name not in self._main:
                yield f"delete {name}", None

    def _is_notebook_name(self, name: str) -> bool:
        is_followed = self._followed_names is None or name in self._followed_names
        return is_followed and name not in self._ignored and not name.startswith("__")

    def without_failing_parts(self, label: str, payload: Any, error: BaseException) -> tuple[Any, list[NotHome]]:
        """Leave out of a record what cannot be pickled; (SAME, ...) where nothing remains."""
        kind, _, rest = label.partition(" ")
        if kind != "update":
            return SAME, [NotHome(rest or kind, _reason(error))]
        number, aspect_name = rest.split(" ")
        path = self._path_of(int(number))
        lost: list[NotHome] = []
        if aspect_name == "items":
            kept_items = []
            for key, value in payload:
                problem = self._problem((key, value))
                if problem is not None:
                    lost.append(NotHome(f"{path}[{key!r}]", _reason(problem)))
                    if self._problem(key) is not None:
                        continue
                kept_items.append((key, value if problem is None else KEPT))
            return (kept_items, lost) if lost else (SAME, [NotHome(path, _reason(error))])
        if aspect_name == "attributes":
            changed, removed = payload
            kept = {}
            for name, value in changed.items():
                problem = self._problem(value)
                if problem is None:
                    kept[name] = value
                else:
                    lost.append(NotHome(f"{path}.{name}", _reason(problem)))
            return ((kept, removed), lost) if lost else (SAME, [NotHome(path, _reason(error))])
        return SAME, [NotHome(path, _reason(error))]

    def _problem(self, value: Any) -> BaseException | None:
        try:
            with _HomePickler(self, io.BytesIO(), OutgoingBlocks()) as pickler:
                pickler.dump(value)
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            return error
        return None

    def _path_of(self, number: int) -> str:
        """An expression for an origin, from the notebook's names; its type where none is near."""
        target = self._origins[number]
        for name, value in self._main.items():
            if value is target:
                return name
        for name, value in self._main.items():
            for attribute, part in list(getattr(value, "__dict__", {}).items() if not isinstance(value, type) else ()):
                if part is target:
                    return f"{name}.{attribute}"
        return f"a {type(target).__name__}"


def can_be_followed(obj: Any, main: dict[str, Any], kinds: Kinds) -> bool:
    """Whether an object can change, and so has a number of its own on both sides."""
    if kinds.is_immutable(obj):
        return False
    return not isinstance(obj, (tuple, frozenset, MainGlobals)) and obj is not main


def is_ddp(kind: type) -> bool:
    """Whether it wraps a module for a process group, and so stands for the module in a process without one."""
    return kind.__name__ == "DistributedDataParallel" and kind.__module__.startswith("torch.")


def _reason(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return text or type(error).__name__


class _RecordError(Exception):
    def __init__(self, label: str, error: BaseException) -> None:
        super().__init__(label)
        self.label, self.error = label, error


@dataclass
class _Packing:
    """One attempt to pack the records of a homecoming."""

    tracker: Tracker
    records: dict[str, Any]
    keep: bool = False
    progress: Callable[[int, int], None] | None = None
    unwrapped: list[str] = field(default_factory=list)
    sent: Sent | None = None

    def run(self, regions: list[tuple[int, int]] | None = None) -> Parcel:
        """Pack; ``regions`` are those of overlapping memory, which the first attempt finds."""
        stream = io.BytesIO()
        blocks = OutgoingBlocks(regions or [])
        self.unwrapped.clear()
        memory = self.tracker._memory
        changed: list[tuple[int, int]] = []
        for number in self.tracker.changed_blocks:
            common = memory.blocks[number]
            index = blocks.enter(common.address, common.nbytes, common.owner)
            blocks.blocks[index].use(0, common.nbytes)
            changed.append((number, index))
        pickler = _HomePickler(self.tracker, stream, blocks)
        offsets: list[tuple[str, int]] = []
        for label, value in {"blocks": changed, **self.records}.items():
            offsets.append((label, stream.tell()))
            wrapped, num_blocks = len(pickler.unwrapped), len(blocks.blocks)
            try:
                pickler.dump(value)
            except BaseException as error:
                pickler.close()
                raise _RecordError(label, error) from error
            if is_content(label):
                blocks.mark_as_content(num_blocks)
            if len(pickler.unwrapped) > wrapped and label.startswith("bind "):
                self.unwrapped.append(label.removeprefix("bind "))
        found = blocks.overlapping() if regions is None else []
        if found:
            pickler.close()
            return self.run(found)
        contents = Contents(stream.getbuffer(), offsets, pickler.out_of_band)
        try:
            if not self.keep:
                return write_parcel(contents, blocks, progress=self.progress)
            return self._write_kept(contents, pickler, blocks, changed)
        finally:
            pickler.close()

    def _write_kept(
        self, contents: Contents, pickler: _HomePickler, blocks: OutgoingBlocks, changed: list[tuple[int, int]]
    ) -> Parcel:
        common = self.tracker._common
        objects, temporaries, num_numbers = origins_of(pickler)
        wrappers = [place for place, obj in objects.items() if is_ddp(type(obj))]
        for place in wrappers:
            del objects[place]
        contents = replace(
            contents,
            temporaries=[*temporaries, *wrappers],
            first_object=common.next_object,
            first_block=common.memory.next_number,
        )
        parcel = write_parcel(contents, blocks, progress=self.progress)
        parcel.own = Segment(parcel.fd, parcel.size_bytes)
        self.sent = Sent(
            common.next_object,
            objects,
            num_numbers,
            common.memory.next_number,
            blocks.blocks,
            changed,
            parcel,
        )
        return parcel


class _HomePickler(NamespacePickler):
    """Writes origins as their numbers, and memory that arrived as the kernel's own."""

    def __init__(self, tracker: Tracker, file: Any, blocks: OutgoingBlocks, *, by_value: int = 0) -> None:
        super().__init__(file, tracker._main, blocks, locate=tracker.locate)
        self._tracker = tracker
        self._by_value = by_value
        self.unwrapped: list[str] = []

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) == self._by_value:
            return None
        return self.large_bytes_id(obj) if is_large(obj) else self._tracker.number_of(obj)

    def _choose_reducer(self, kind: type) -> Any:
        if is_ddp(kind):
            return self._reduce_ddp
        if kind.__name__ == "DTensor" and kind.__module__.startswith("torch."):
            return self._refuse_shard
        if kind.__name__ == "DeviceMesh" or kind.__name__.startswith("ProcessGroup"):
            return self._refuse_group
        return super()._choose_reducer(kind)

    def _refuse_shard(self, tensor: Any) -> Any:
        raise Refused("rank 0 has one shard only of a DTensor: gather it in the cell, with `.full_tensor()`")

    def _refuse_group(self, group: Any) -> Any:
        raise Refused("it holds the process group of the ranks, which ends with the cell")

    def _reduce_ddp(self, wrapper: Any) -> Any:
        """A DDP wrapper cannot exist without its process group; the module in it can."""
        self.unwrapped.append(type(wrapper).__name__)
        return rebuild.identity, (wrapper.module,)


class _DigestPickler(_HomePickler):
    """Pickles for comparison only: memory that arrived counts as unchanged, since blocks are compared by themselves."""

    def __init__(self, tracker: Tracker, file: Any, blocks: OutgoingBlocks, *, by_value: int = 0) -> None:
        super().__init__(tracker, file, blocks, by_value=by_value)
        self.buffer_digests: list[Any] = []

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        address = address_of(raw)
        located = self._locate(address, raw.nbytes) if self._locate is not None and address else None
        if located is not None and self._tracker._memory.blocks[located[0]].writable:
            self.buffer_digests.append((*located, raw.nbytes))
        else:
            self.buffer_digests.append(_hash(raw))
        return False

    def block_digests(self) -> list[bytes]:
        return [_hash(view_of_memory(b.address + b.hull[0], b.hull[1])) for b in self._blocks.blocks]


def _hash(view: memoryview) -> bytes:
    return hashlib.blake2b(view, digest_size=16).digest()
