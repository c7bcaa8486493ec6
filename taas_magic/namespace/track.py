"""Follows, in rank 0, what became of the namespace that arrived, and packs what has to come home.

Every object in the unpickler's memo is one that the kernel has too, under the same number: an *origin*. Those that can
change are noted shallowly on arrival. At the end each is compared with its note; what differs is sent as an update of
that number, and wherever else an origin is met, its number is sent in its place. So the kernel's own objects are
updated in place, and everything that refers to them still does.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from taas_magic.namespace import rebuild
from taas_magic.namespace.aspects import KEPT, SAME, Aspect, aspects_of, has_own_state, is_immutable
from taas_magic.namespace.blocks import OutgoingBlocks, Parcel, address_of, view_of_memory, write_parcel
from taas_magic.namespace.pack import ReceivedNamespace
from taas_magic.namespace.pickler import MainGlobals, NamespacePickler, Refused


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
        received: The namespace as it was loaded, before the cell runs.
        main: The namespace that the cell runs in.
        ignored: Names that are the shell's own.
    """

    def __init__(self, received: ReceivedNamespace, main: dict[str, Any], ignored: Iterable[str] = ()) -> None:
        self._incoming = received.incoming
        self._main = main
        self._ignored = frozenset(ignored)
        temporaries = set(received.incoming.manifest.temporaries)
        self._origins = {
            number: obj
            for number, obj in received.memo.items()
            if number not in temporaries and self._can_be_followed(obj)
        }
        self._number_of = {id(obj): number for number, obj in self._origins.items()}
        #: Ids of opaque origins that changed: they come home by value, so whatever holds them has to be sent.
        self._changed_opaque: set[int] = set()
        #: Those that are updated by their state instead.
        self._changed_states: list[_Followed] = []
        self._followed = [self._follow(number, obj) for number, obj in self._origins.items()]
        self._names = {name: self.note(value) for name, value in main.items() if self._is_notebook_name(name)}

    def _can_be_followed(self, obj: Any) -> bool:
        is_by_value = isinstance(obj, (tuple, frozenset, MainGlobals)) or obj is self._main
        return not is_by_value and not is_immutable(obj)

    # -- noting --------------------------------------------------------------------------------------------------

    def _follow(self, number: int, obj: Any) -> _Followed:
        try:
            aspects = aspects_of(obj)
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
        located = self._incoming.locate(obj.ctypes.data)
        return located is not None and not self._incoming.extent(located[0]).writable

    def has_arrived(self, address: int) -> bool:
        """See :class:`taas_magic.namespace.aspects.View`."""
        return self._incoming.locate(address) is not None

    def note(self, value: Any) -> Any:
        """See :class:`taas_magic.namespace.aspects.View`."""
        if id(value) in self._number_of or self._is_safe(value):
            return value
        return _Digest(value, self._digest(value))

    def _is_safe(self, value: Any) -> bool:
        """Whether identity tells all about a value: it cannot change, or is followed."""
        if isinstance(value, (tuple, frozenset)):
            return all(id(item) in self._number_of or self._is_safe(item) for item in value)
        return is_immutable(value) or (isinstance(value, type) and not aspects_of(value))

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
        pickler = _DigestPickler(self, stream, OutgoingBlocks(), by_value=id(obj))
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

    def pack_changes(self, extra: dict[str, Any] | None = None, exclude: Iterable[str] = ()) -> HomeParcel:
        """Pack every binding, deletion and update, and the ``extra`` records ("result", "random").

        Args:
            extra: More records by label.
            exclude: Labels that the kernel could not load.
        """
        self._find_changed_opaque()
        not_home: list[NotHome] = []
        records = dict(self._records(not_home))
        records.update(extra or {})
        skipped = set(exclude)
        while True:
            packing = _Packing(self, {label: value for label, value in records.items() if label not in skipped})
            try:
                parcel = packing.run()
            except _RecordError as failure:
                label = failure.label
                records[label], lost = self._without_failing_parts(label, records[label], failure.error)
                not_home.extend(lost)
                if records[label] is SAME:
                    skipped.add(label)
                continue
            return HomeParcel(parcel, not_home, packing.unwrapped)

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

    def _records(self, not_home: list[NotHome]) -> Iterable[tuple[str, Any]]:  # noqa: C901 - one loop a kind of record
        for item in self._followed:
            for aspect, taken in item.notes:
                try:
                    payload = aspect.diff(item.obj, taken, self)
                except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                    not_home.append(NotHome(self._path_of(item.number), _reason(error)))
                    continue
                if payload is not SAME:
                    yield f"update {item.number} {aspect.name}", payload
        for item in self._changed_states:
            try:
                yield f"update {item.number} state", item.obj.__getstate__()
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                not_home.append(NotHome(self._path_of(item.number), _reason(error)))
        for name, value in list(self._main.items()):
            if self._is_notebook_name(name) and (name not in self._names or self.differs(self._names[name], value)):
                yield f"bind {name}", value
        for name in self._names:
            if self._is_notebook_name(name) and name not in self._main:
                yield f"delete {name}", None

    def _is_notebook_name(self, name: str) -> bool:
        return name not in self._ignored and not name.startswith("__")

    def _without_failing_parts(self, label: str, payload: Any, error: BaseException) -> tuple[Any, list[NotHome]]:
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
            _HomePickler(self, io.BytesIO(), OutgoingBlocks()).dump(value)
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
    unwrapped: list[str] = field(default_factory=list)

    def run(self, regions: list[tuple[int, int]] | None = None) -> Parcel:
        """Pack; ``regions`` are those of overlapping memory, which the first attempt finds."""
        stream = io.BytesIO()
        blocks = OutgoingBlocks(regions or [])
        self.unwrapped.clear()
        incoming = self.tracker._incoming
        changed: list[tuple[int, int]] = []
        for number in incoming.changed():
            view = incoming.view(number)
            address = incoming.address(number)
            block = blocks.enter(address, len(view), incoming)
            blocks.blocks[block].use(0, len(view))
            changed.append((number, block))
        pickler = _HomePickler(self.tracker, stream, blocks)
        offsets: list[tuple[str, int]] = []
        for label, value in {"blocks": changed, **self.records}.items():
            offsets.append((label, stream.tell()))
            wrapped = len(pickler.unwrapped)
            try:
                pickler.dump(value)
            except BaseException as error:
                raise _RecordError(label, error) from error
            if len(pickler.unwrapped) > wrapped and label.startswith("bind "):
                self.unwrapped.append(label.removeprefix("bind "))
        found = blocks.overlapping() if regions is None else []
        if found:
            return self.run(found)
        return write_parcel(stream.getbuffer(), offsets, blocks, pickler.out_of_band)


class _HomePickler(NamespacePickler):
    """Writes origins as their numbers, and memory that arrived as the kernel's own."""

    def __init__(self, tracker: Tracker, file: Any, blocks: OutgoingBlocks, *, by_value: int = 0) -> None:
        super().__init__(file, tracker._main, blocks, locate=tracker._incoming.locate)
        self._tracker = tracker
        self._by_value = by_value
        self.unwrapped: list[str] = []

    def persistent_id(self, obj: Any) -> int | None:
        if id(obj) == self._by_value:
            return None
        return self._tracker.number_of(obj)

    def _choose_reducer(self, kind: type) -> Any:
        if kind.__name__ == "DistributedDataParallel" and kind.__module__.startswith("torch."):
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
        located = self._locate(address) if self._locate is not None and address else None
        if located is not None and self._tracker._incoming.extent(located[0]).writable:
            self.buffer_digests.append((*located, raw.nbytes))
        else:
            self.buffer_digests.append(_hash(raw))
        return False

    def block_digests(self) -> list[bytes]:
        return [_hash(view_of_memory(b.address + b.hull[0], b.hull[1])) for b in self._blocks.blocks]


def _hash(view: memoryview) -> bytes:
    return hashlib.blake2b(view, digest_size=16).digest()
