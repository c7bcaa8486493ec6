"""Packs what a cell needs of the notebook into one parcel: one graph, one record a name.

Records are pickled one after the other with a shared memo, so objects that several names reach stay one object. The
memo numbers are kept: they are how kernel and rank speak of the same object later (see
:mod:`taas_magic.namespace.track`).
"""

from __future__ import annotations

import heapq
import io
import linecache
import operator
import pickle
import sys
import types
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from taas_magic.errors import CannotTravelError
from taas_magic.namespace.blocks import Contents, IncomingBlocks, OutgoingBlocks, Parcel, write_parcel
from taas_magic.namespace.code_names import globals_of_code
from taas_magic.namespace.collection import no_collection
from taas_magic.namespace.common import Common
from taas_magic.namespace.culprit import Culprit, find_culprit
from taas_magic.namespace.pickler import (
    HasLargeBytesError,
    LargeBytesPickler,
    NamespacePickler,
    Nowhere,
    StreamWithoutLargeBytes,
)
from taas_magic.namespace.rebuild import Loading, ParcelUnpickler, loading, without_warnings
from taas_magic.namespace.store import BlockStore

#: Labels of the records that are not names of the notebook; a NUL can be in no identifier.
STATE_RECORD = "\0state"
SOURCES_RECORD = "\0sources"
#: First of a parcel for ranks that have a namespace already: numbers of objects and blocks that the kernel has no more.
SYNC_RECORD = "\0sync"
UPDATE_RECORD, DELETE_RECORD = "\0update ", "\0delete "
#: In front of what a value is called that is under no name of the notebook.
VALUE_RECORD = "\0value "


@dataclass(frozen=True)
class TravelItem:
    """One name that travels: its type, what it adds in bytes, and the path of names that leads from the cell to it."""

    name: str
    type_name: str
    size_bytes: int
    why: str


@dataclass
class PackedNamespace:
    """A packed namespace as the kernel keeps it until the run has come home.

    Attributes:
        parcel: What the ranks map.
        common: The kernel's objects and memory by the numbers that the ranks know them by.
        items: What travels, in order.
        left_out: Names that were perhaps needed and cannot travel, with the reason.
    """

    parcel: Parcel
    common: Common
    items: list[TravelItem]
    left_out: dict[str, str]
    #: The names that the functions of each name use.
    uses: dict[str, set[str]] = field(default_factory=dict)


def is_content(label: str) -> bool:
    """Whether a record is a change of a tensor or an array: its bytes go into memory that the receiver has."""
    return label.removeprefix("\0").startswith("update ") and label.endswith((" tensor", " array"))


@dataclass(frozen=True)
class Selection:
    """Which names to pack: ``needed`` must travel, ``maybe`` travel if they can.

    Where ranks have names already, only those travel that they do not have as they are; ``anew`` travel in any case.
    """

    needed: tuple[str, ...]
    maybe: tuple[str, ...] = ()
    anew: frozenset[str] = frozenset()


class Sender(Protocol):
    """What decides how a namespace is packed for ranks that have one already."""

    common: Common

    def pickler(
        self, stream: Any, blocks: OutgoingBlocks, on_function: Callable[[types.FunctionType], None]
    ) -> NamespacePickler:
        """The pickler that leaves out what the ranks have."""

    def begin_record(self, label: str) -> None:
        """Called before each record."""

    def uses_of(self, name: str) -> set[str] | None:
        """What a name that the ranks have as it is uses of others; None where it has to be sent."""

    def head(self) -> tuple[str, Any]:
        """The record that comes first."""

    def tail(self, left_out: Container[str]) -> Iterable[tuple[str, Any]]:
        """The records behind those of the names; ``left_out`` are names that cannot be sent."""

    def refusal(self, label: str, error: BaseException) -> CannotTravelError:
        """What to tell of such a record that cannot be sent."""


class _RecordError(Exception):
    """The record of a name could not be pickled."""

    def __init__(self, name: str, why: str, error: BaseException) -> None:
        super().__init__(name)
        self.name, self.why, self.error = name, why, error


class _TailError(Exception):
    """A record behind those of the names could not be pickled."""

    def __init__(self, label: str, error: BaseException) -> None:
        super().__init__(label)
        self.label, self.error = label, error


def pack_namespace(
    main: dict[str, Any],
    selection: Selection,
    *,
    process_state: Any = None,
    hidden: Mapping[str, Any] | None = None,
    cell_numbers: Mapping[str, int] | None = None,
    store: BlockStore | None = None,
    progress: Callable[[int, int], None] | None = None,
    sender: Sender | None = None,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> PackedNamespace:
    """Pack the selected names of ``main`` and all that they reach.

    Args:
        main: The notebook's namespace.
        selection: The names that the cell reads.
        process_state: A picklable record of process-wide state (directory, environment, random states).
        hidden: Names that the shell itself provides; they travel only where the user rebound them.
        cell_numbers: Execution counts by code file name, for tracebacks of functions of earlier cells.
        store: Has what was sent before, and keeps what is sent now.
        progress: Called with the bytes that are copied, and all that will be.
        sender: For ranks that have a namespace already.
        values: More that has to travel, by what it is called; see :attr:`ReceivedNamespace.values`.

    Raises:
        CannotTravelError: naming the variable, the path to the culprit, its type, and what to do.
    """
    left_out: dict[str, str] = {}
    first: dict[str, str] = {}
    regions: list[tuple[int, int]] = []
    has_large_bytes = False
    with no_collection():
        while True:
            packing = _Packing(
                main, selection, hidden or {}, left_out, cell_numbers or {}, first, regions, sender, has_large_bytes
            )
            packing.values = {f"{VALUE_RECORD}{name}": value for name, value in values.items()}
            try:
                packing.write_records(process_state)
            except HasLargeBytesError:
                has_large_bytes = True
                continue
            except _TailError as failure:
                assert sender is not None
                raise sender.refusal(failure.label, failure.error) from failure.error
            except _RecordError as failure:
                if failure.name in packing.needed_names:
                    raise _cannot_travel(main, failure, values) from failure.error
                left_out[failure.name] = str(failure.error).splitlines()[0] if str(failure.error) else "no pickle"
                continue
            overlapping = packing.overlapping()
            if overlapping and not regions:
                regions = overlapping
                continue
            names = packing.names_to_load_first() if packing.late_names and not first else {}
            if not names:
                return packing.finish(store, progress)
            # Loading a record may call methods (__setstate__, __hash__), and those of some use names that came later.
            first = names


@dataclass
class _Packing:
    """One attempt to pack."""

    main: dict[str, Any]
    selection: Selection
    hidden: Mapping[str, Any]
    left_out: dict[str, str]
    cell_numbers: Mapping[str, int]
    #: Names that go before all others, with what leads to them.
    first: Mapping[str, str]
    #: Memory that several owners share in parts, see :class:`OutgoingBlocks`.
    regions: list[tuple[int, int]] = field(default_factory=list)
    sender: Sender | None = None
    has_large_bytes: bool = False
    needed_names: set[str] = field(default_factory=set)
    #: Names that a value's methods use, and that came behind the value.
    late_names: set[str] = field(default_factory=set)
    #: What travels under no name of the notebook, by label.
    values: Mapping[str, Any] = field(default_factory=dict)

    def write_records(self, process_state: Any) -> None:
        """Write everything up to the last record."""
        self._stream = io.BytesIO() if self.has_large_bytes else StreamWithoutLargeBytes()
        self._blocks = OutgoingBlocks(self.regions)
        if self.sender is None:
            kind = LargeBytesPickler if self.has_large_bytes else NamespacePickler
            self._pickler = kind(self._stream, self.main, self._blocks, on_function=self._saw_function)
        else:
            self._pickler = self.sender.pickler(self._stream, self._blocks, self._saw_function)
        self._records: list[tuple[str, int]] = []
        self._sources: dict[str, tuple[str, int | None]] = {}
        self._queue: list[tuple[int, int, str]] = []
        self._num_queued = 0
        self._why = ""
        self._whys: dict[str, str] = {}
        self._recorded: set[str] = set()
        self._items: list[TravelItem] = []
        self._uses: dict[str, set[str]] = {}
        # By itself, so that nobody follows what becomes of its parts.
        self._record(STATE_RECORD, pickle.dumps(process_state))
        if self.sender is not None:
            self._record(*self.sender.head())
        for name, why in self.first.items():
            self._enqueue((name,), why, in_functions=True)
        self._enqueue((*self.values, *self.selection.needed), "the cell")
        self._write_queue(is_needed=True)
        self._enqueue(self.selection.maybe, "the cell")
        self._write_queue(is_needed=False)
        if self.sender is not None:
            for label, payload in self.sender.tail(self.left_out):
                self._why = "what the notebook changed"
                num_blocks = len(self._blocks.blocks)
                try:
                    self._record(label, payload)
                except Exception as error:
                    raise _TailError(label, error) from error
                if is_content(label):
                    self._blocks.mark_as_content(num_blocks)
            # Functions in what was changed use names, too.
            self._write_queue(is_needed=False)
        self._record(SOURCES_RECORD, self._sources)

    def _write_queue(self, *, is_needed: bool) -> None:
        """Write the names that are queued, and those that they lead to."""
        while self._queue:
            _, _, name = heapq.heappop(self._queue)
            if name in self._recorded:
                continue
            self._recorded.add(name)
            self._why = self._whys[name]
            if is_needed:
                self.needed_names.add(name)
            uses = None
            if self.sender is not None and name not in self.selection.anew:
                uses = self.sender.uses_of(name)
            if uses is None:
                self._items.append(self._pack_name(name))
            else:
                self._enqueue(sorted(uses), f"{self._why} → {name}", in_functions=True)

    def reached(self) -> set[int]:
        """The ids of what was pickled."""
        found = {id(obj) for _, obj in self._pickler.memo.copy().values()}
        self._pickler.close()
        return found

    def overlapping(self) -> list[tuple[int, int]]:
        """The memory that several of the blocks share in parts."""
        return self._blocks.overlapping()

    def finish(self, store: BlockStore | None, progress: Callable[[int, int], None] | None) -> PackedNamespace:
        """Write the parcel."""
        origins = origins_of(self._pickler)
        # A copy: whether the ranks ever get this parcel is not known yet.
        common = Common() if self.sender is None else self.sender.common.copy()
        contents = Contents(
            self._stream.getbuffer(),
            self._records,
            self._pickler.out_of_band,
            origins.temporaries,
            common.next_object,
            common.memory.next_number,
        )
        parcel = write_parcel(contents, self._blocks, store=store, progress=progress)
        self._pickler.close()
        common.add_objects(common.next_object, origins.objects, origins.num_places)
        common.memory.add_sent(self._blocks.blocks, parcel)
        return PackedNamespace(parcel, common, self._items, dict(self.left_out), self._uses)

    def names_to_load_first(self) -> dict[str, str]:
        """What functions and methods use, of that which surely travels, with what leads to it."""
        names = self.late_names.union(name for name in self._whys if self._load_order(name) < _VALUE)
        return {name: why for name, why in self._whys.items() if name in self.needed_names and name in names}

    def _load_order(self, name: str, *, in_functions: bool = False) -> int:
        order = load_order(self.main.get(name))
        return _USED_IN_FUNCTIONS if order == _VALUE and in_functions else order

    def _enqueue(self, names: Iterable[str], why: str, *, in_functions: bool = False) -> None:
        for name in names:
            if name in self._recorded or name in self.left_out or not self._travels(name):
                continue
            self._whys.setdefault(name, why)
            # A name that is queued already may have to come sooner now.
            self._num_queued += 1
            order = self._load_order(name, in_functions=in_functions)
            heapq.heappush(self._queue, (order, self._num_queued, name))

    def _travels(self, name: str) -> bool:
        if name in self.values:
            return True
        if name not in self.main or name.startswith("__"):
            return False
        return not (name in self.hidden and self.hidden[name] is self.main[name])

    def _pack_name(self, name: str) -> TravelItem:
        value = self.values[name] if name in self.values else self.main[name]
        stream_before, blocks_before = self._stream.tell(), self._blocks.total_bytes
        why = self._why
        try:
            self._record(name, value)
        except Exception as error:
            raise _RecordError(name, why, error) from error
        size = self._stream.tell() - stream_before + self._blocks.total_bytes - blocks_before
        return TravelItem(name, type(value).__name__, size, why)

    def _record(self, label: str, value: Any) -> None:
        if self.sender is not None:
            self.sender.begin_record(label)
        self._records.append((label, self._stream.tell()))
        self._current = label
        self._pickler.dump((label, value))

    def _saw_function(self, func: types.FunctionType) -> None:
        self._note_source(func.__code__)
        names = sorted(globals_of_code(func.__code__))
        self._uses.setdefault(self._current, set()).update(names)
        self._enqueue(names, f"{self._why} → {self._current}", in_functions=True)
        if self._load_order(self._current) == _VALUE:
            self.late_names.update(name for name in names if name in self._whys and name not in self._recorded)

    def _note_source(self, code: types.CodeType) -> None:
        """Send the source of notebook code along, for tracebacks and ``inspect.getsource`` in the ranks."""
        name = code.co_filename
        entry = linecache.cache.get(name)
        if name in self._sources or entry is None or len(entry) < 4 or entry[1] is not None:
            return
        self._sources[name] = ("".join(entry[2]), self.cell_numbers.get(name))


#: In which order names are best loaded: what runs code when it is loaded comes last.
_MODULE, _DEFINITION, _USED_IN_FUNCTIONS, _VALUE = range(4)


def load_order(value: Any) -> int:
    """Where a value is best loaded among others."""
    if isinstance(value, types.ModuleType):
        return _MODULE
    return _DEFINITION if isinstance(value, (type, types.FunctionType)) else _VALUE


def reached_by(main: dict[str, Any], selection: Selection, hidden: Mapping[str, Any]) -> set[int]:
    """The ids of all objects that the selected names reach, by what they would be pickled with; nothing is copied."""
    left_out: dict[str, str] = {}
    with no_collection():
        while True:
            packing = _Packing(main, selection, hidden, left_out, {}, {}, has_large_bytes=True)
            try:
                packing.write_records(None)
            except _RecordError as failure:
                left_out[failure.name] = ""
                continue
            return packing.reached()


class Origins(NamedTuple):
    """What a pickler has met, by its place in the memo."""

    objects: dict[int, Any]
    #: Places of what was there for the pickle only: dicts of attributes, and what nothing but the memo holds.
    temporaries: list[int]
    num_places: int


def origins_of(pickler: NamespacePickler) -> Origins:
    """Take a pickler's memo apart; values of the plainest types are left out, since they never change.

    A container has a lower number than what it holds, so one pass in order also finds the parts of such objects.
    """
    # An instance takes its attributes out of the dict that travels: what arrives is a dict that nobody uses.
    attribute_dicts = pickler.attribute_dicts()
    pairs = sorted(pickler.memo.copy().values(), key=_place_of, reverse=True)
    pickler.clear_memo()
    num_places = len(pairs)
    origins = {}
    temporaries = []
    take, count, limit = pairs.pop, sys.getrefcount, _REFERENCES_OF_A_TEMPORARY
    while pairs:
        number, obj = take()
        if type(obj) in _PLAIN:
            continue
        if count(obj) <= limit or id(obj) in attribute_dicts:
            temporaries.append(number)
        else:
            origins[number] = obj
    return Origins(origins, temporaries, num_places)


_PLAIN = frozenset({str, bytes, int, float, complex, bool, types.CodeType})
_place_of = operator.itemgetter(0)


def _references_of_a_temporary() -> int:
    """What ``getrefcount`` says in :func:`origins_of` of what nothing else holds; Python's versions differ."""
    pairs = [(0, object())]
    while pairs:
        _, obj = pairs.pop()
        count = sys.getrefcount(obj)
    return count


_REFERENCES_OF_A_TEMPORARY = _references_of_a_temporary()


def _cannot_travel(main: dict[str, Any], failure: _RecordError, values: Mapping[str, Any]) -> CannotTravelError:
    name = failure.name.removeprefix(VALUE_RECORD)
    culprit = diagnose(main, name, values[name] if name != failure.name else main[name])
    used_by = failure.why.removeprefix("the cell").removeprefix(" → ")
    reached = f" (used by {used_by.replace(' → ', ', then ')})" if used_by else ""
    if culprit is None:
        return CannotTravelError.of(
            f"`{name}`{reached} cannot be sent to the ranks: {failure.error}",
            do=f"create `{name}` in the cell",
        )
    return CannotTravelError.of(
        f"`{name}`{reached} cannot be sent to the ranks: {culprit.describe()}",
        expected="values that can be pickled; nothing was started",
        do=culprit.advice,
    )


def diagnose(
    main: dict[str, Any], name: str, value: Any, pickler: type[NamespacePickler] = NamespacePickler
) -> Culprit | None:
    """The object that keeps ``value``, known as ``name``, from travelling, or None where it can travel."""
    if try_pickle(main, value, pickler) is None:
        return None
    return find_culprit(name, value, lambda obj: try_pickle(main, obj, pickler))


def try_pickle(main: dict[str, Any], obj: Any, kind: type[NamespacePickler] = NamespacePickler) -> BaseException | None:
    """Pickle ``obj`` alone, keeping nothing; the error, or None."""
    try:
        with kind(Nowhere(), main, OutgoingBlocks()) as pickler:
            pickler.dump(obj)
    except Exception as error:  # noqa: BLE001 - whatever keeps it from being pickled
        return error
    return None


def pack_value(main: dict[str, Any], value: Any) -> Parcel:
    """Pack one value by itself; :func:`load_value` is the other side."""
    stream, blocks = io.BytesIO(), OutgoingBlocks()
    with LargeBytesPickler(stream, main, blocks) as pickler:
        pickler.dump(value)
        return write_parcel(Contents(stream.getbuffer(), [("value", 0)], pickler.out_of_band), blocks)


def load_value(fd: int, main: dict[str, Any]) -> Any:
    """Load the value of a parcel from :func:`pack_value`."""
    incoming = IncomingBlocks([fd])
    with loading(Loading(incoming, main)) as context, without_warnings():
        return ParcelUnpickler(context).load()


@dataclass
class ReceivedNamespace:
    """A parcel as a rank has it after loading.

    Attributes:
        common: The objects and blocks that came.
        sources: Source text and execution count by code file name.
        values: What came under no name of the notebook, by what it is called.
    """

    common: Common
    sources: dict[str, tuple[str, int | None]]
    values: dict[str, Any] = field(default_factory=dict)


class Receiver(Protocol):
    """What takes the records of a parcel for ranks that have a namespace already."""

    common: Common

    def take_sync(self, sync: Any) -> None:
        """Take the first record: the numbers of objects, and of blocks, that the kernel has no more."""

    def take_update(self, number: int, aspect: str, payload: Any) -> None:
        """Bring an object up to date."""


def cache_sources(sources: dict[str, tuple[str, int | None]]) -> None:
    """Let tracebacks and ``inspect.getsource`` find the text of the notebook's cells."""
    for name, (text, _) in sources.items():
        # No modification time: linecache then never looks for the file.
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def load_namespace(
    fds: Sequence[int], main: dict[str, Any], *, before_names: Any = None, receiver: Receiver | None = None
) -> ReceivedNamespace:
    """Map and load a parcel; names are bound in ``main`` as they come, since later ones may run code that needs them.

    Args:
        fds: The parcel, and the segments that go with it.
        main: The namespace that the notebook's functions get as their globals.
        before_names: Called with the process state before the first name is loaded: ``sys.path`` must be right by then.
        receiver: For a parcel that brings up to date what was loaded before.
    """
    incoming = IncomingBlocks(fds)
    common = Common() if receiver is None else receiver.common
    context = Loading(incoming, main, common.memory, maps_bytes=True)
    unpickler = ParcelUnpickler(context, common.objects)
    sources: dict[str, tuple[str, int | None]] = {}
    values: dict[str, Any] = {}
    with loading(context), no_collection():
        for label, _ in incoming.manifest.records:
            try:
                with without_warnings():
                    _, value = unpickler.load()
            except BaseException as error:
                where = "a producer" if label.startswith(VALUE_RECORD) else "the rank"
                error.add_note(f"while `{label.removeprefix(VALUE_RECORD)}` of the notebook was loaded in {where}")
                raise
            if label == STATE_RECORD:
                if before_names is not None:
                    before_names(pickle.loads(value))
            elif label == SOURCES_RECORD:
                sources = value
            elif label == SYNC_RECORD and receiver is not None:
                receiver.take_sync(value)
            elif label.startswith(UPDATE_RECORD) and receiver is not None:
                number, aspect = label.removeprefix(UPDATE_RECORD).split(" ")
                receiver.take_update(int(number), aspect, value)
            elif label.startswith(DELETE_RECORD):
                main.pop(label.removeprefix(DELETE_RECORD), None)
            elif label.startswith(VALUE_RECORD):
                values[label.removeprefix(VALUE_RECORD)] = value
            else:
                main[label] = value
    memo = unpickler.memo.copy()
    temporaries = set(incoming.manifest.temporaries)
    objects = {number: obj for number, obj in memo.items() if number not in temporaries}
    common.add_objects(incoming.manifest.first_object, objects, len(memo))
    common.memory.add_received(incoming)
    return ReceivedNamespace(common, sources, values)
