"""Keeps a notebook's namespace and those of kept ranks together, from cell to cell.

Ranks that are kept have variables of their own, and the notebook has rank 0's. After each cell the kernel notes what
both sides have (with the same :class:`taas_magic.namespace.track.Tracker` by which rank 0 finds what has to come home).
When the next cell is submitted, what the notebook has changed since is sent to every rank: names that were bound anew,
and changes of objects in place, by the numbers that both sides know them by.

An object that came home from rank 0 has a number there and in the notebook only. So when a cell is over, the other
ranks *adopt* it: kernel and ranks go through the same names in the same order, and where they find objects of the same
types, they number them alike. Then `model.eval()` in the notebook reaches the model of each rank, with each rank's own
weights. Where a rank has something else under a name, all forget those numbers; if the notebook changes such an object,
its value takes the place of what the ranks have.
"""

from __future__ import annotations

import bisect
import hashlib
import sys
import types
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from cloudpickle import cloudpickle as cloudpickle_internals

from taas_magic.errors import CannotTravelError
from taas_magic.namespace import rebuild
from taas_magic.namespace.aspects import BY_NAME, Kinds, place_of_tensor
from taas_magic.namespace.blocks import OutgoingBlocks, bounds_of_array, span_of_tensor
from taas_magic.namespace.bulk import address_of
from taas_magic.namespace.code_names import globals_of_code
from taas_magic.namespace.common import Common
from taas_magic.namespace.home import Homecoming
from taas_magic.namespace.large_bytes import is_large
from taas_magic.namespace.pack import (
    DELETE_RECORD,
    SYNC_RECORD,
    UPDATE_RECORD,
    PackedNamespace,
    ReceivedNamespace,
    Selection,
    is_content,
    load_namespace,
    origins_of,
    pack_namespace,
)
from taas_magic.namespace.pickler import NamespacePickler, Nowhere, StorageEntry
from taas_magic.namespace.store import BlockStore, Segment
from taas_magic.namespace.track import NotHome, Sent, Tracker, can_be_followed, is_ddp


class Adoption(msgspec.Struct, frozen=True):
    """Objects under a name that are to be known by their number on every rank."""

    name: str
    #: Of the types that are found under it, in order.
    digest: bytes
    #: (place in that order, number).
    numbers: list[tuple[int, int]]


_adoptions_decoder = msgspec.msgpack.Decoder(list[Adoption])


# -- the kernel's side -----------------------------------------------------------------------------------------------


class Mirror:
    """The notebook's side of a namespace that kept ranks have.

    Args:
        packed: What the ranks were sent first.
        main: The notebook's namespace.
        ignored: Names that the shell itself provides.
    """

    def __init__(self, packed: PackedNamespace, main: dict[str, Any], ignored: Iterable[str]) -> None:
        self.common = packed.common
        self._main = main
        self._ignored = frozenset(ignored)
        self._names = {item.name for item in packed.items}
        self._uses = dict(packed.uses)
        #: Names that functions use which came with changes of objects: under no name that could be told.
        self._used_in_updates: set[str] = set()
        #: Objects that are gone here, for the ranks to forget.
        self._forgotten: set[int] = set()
        #: The same for blocks.
        self._forgotten_blocks: set[int] = set()
        self._tracker: Tracker | None = None
        self._changed_names: frozenset[str] = frozenset()
        #: Names that are sent whatever the ranks have, and whether one of them is being written.
        self._anew: frozenset[str] = frozenset()
        self._writes_anew = False
        #: What is being written is the content of a tensor or an array.
        self._writes_content = False
        #: Payloads of updates by label.
        self._updates: dict[str, Any] = {}
        self._deleted: list[str] = []
        self._withdrawn: list[str] = []
        #: (expression, reason) of what the notebook changed and could not send last.
        self.unsent: list[tuple[str, str]] = []
        #: First and last address, and the object, of tensors and arrays that the ranks have too; None when not known.
        self._owners: list[tuple[int, int, Any]] | None = None

    # -- with a cell -----------------------------------------------------------------------------------------

    def sent(self, packed: PackedNamespace) -> None:
        """Note that the ranks are given a parcel; one that they are not given has no effect."""
        self.common = packed.common
        self._names.update(item.name for item in packed.items)
        self._uses.update(packed.uses)
        for label, names in packed.uses.items():
            if label.startswith(UPDATE_RECORD):
                self._used_in_updates |= names
        self._names.difference_update(self._deleted, self._withdrawn)
        self.common.memory.forget(self._rebase(packed))
        self._forgotten.clear()
        self._forgotten_blocks.clear()

    def _rebase(self, packed: PackedNamespace) -> list[int]:
        """Note what both sides have now in memory that the notebook changed.

        Returns:
            The numbers of the blocks by which that was sent: content of older ones, they need none of their own.
        """
        if self._tracker is None:
            return []
        memory = self.common.memory
        first = memory.next_number - len(packed.parcel.extents)
        latest = {(block.address, block.nbytes): number for number, block in memory.blocks.items() if number >= first}
        superseded = []
        for number, block in memory.blocks.items():
            if number >= first or not block.pristine or not self._tracker.is_rewritten(block.address):
                continue
            same = latest.get((block.address, block.nbytes))
            if same is not None and memory.blocks[same].pristine and not memory.blocks[same].is_shared:
                superseded.append(same)
                block.source, block.pristine = memory.blocks[same].source, memory.blocks[same].pristine
            else:
                block.source = bytes(block.view)
                block.pristine = address_of(block.source)
        return superseded

    def came_home(self, home: Homecoming, kept: Segment) -> bytes:
        """Note what came home and was applied.

        Returns:
            What the ranks other than 0 need in order to know it too, for :meth:`KeptNamespace.settle`.
        """
        numbers = home.note(self.common, kept)
        self._names |= home.bindings.keys()
        self._names.difference_update(home.deleted)
        looks = {name: look_at(self._main, self._main.get(name)) for name in sorted(home.bindings)}
        self._uses.update((name, look.uses) for name, look in looks.items())
        return msgspec.msgpack.encode(self._adoptions_of(numbers, looks))

    def _adoptions_of(self, numbers: set[int], looks: dict[str, Look]) -> list[Adoption]:
        """Find names that lead to the objects; those to which none does are forgotten, since no other rank has them.

        ``looks`` are at the values of those names that are likely to.
        """
        common, main, kinds = self.common, self._main, Kinds()
        number_of = {
            id(obj): number
            for number in numbers
            if can_be_followed(obj := common.objects[number], main, kinds) and not is_ddp(type(obj))
        }
        adoptions = []
        for name in dict.fromkeys((*looks, *sorted(self._names))):
            if not number_of:
                break
            if name not in main:
                continue
            look = looks.get(name) or look_at(main, main[name])
            found = [(place, number_of.pop(id(obj))) for place, obj in enumerate(look.objects) if id(obj) in number_of]
            if found:
                adoptions.append(Adoption(name, look.digest, found))
        adopted = {number for adoption in adoptions for _, number in adoption.numbers}
        common.forget(numbers - adopted)
        self._forgotten |= numbers - adopted
        return adoptions

    def note(self, forgotten: Iterable[int]) -> None:
        """Note what both sides have, when a cell is over; ``forgotten`` is what some rank has no more."""
        self._tracker = self._owners = None
        self._updates, self._deleted, self._withdrawn = {}, [], []
        # The other ranks may still have them.
        self._forgotten.update(forgotten)
        self.common.forget(self._forgotten)
        objects, blocks = self.common.prune()
        self._forgotten.update(objects)
        self._forgotten_blocks.update(blocks)
        self._tracker = Tracker(self.common, self._main, self._ignored, names=self._names, shares_memory=False)

    # -- before the next ---------------------------------------------------------------------------------------

    def pack(
        self,
        selection: Selection,
        *,
        process_state: Any,
        hidden: dict[str, Any],
        cell_numbers: dict[str, int],
        store: BlockStore | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> PackedNamespace:
        """Pack what the cell needs and the ranks do not have, and all that the notebook has changed of what they have.

        Raises:
            CannotTravelError: if something that the cell needs cannot be sent.
        """
        tracker = self._tracker
        assert tracker is not None
        self._owners = None
        # What has other memory here by now must come home by its content: the ranks are told before they change it.
        self._forgotten_blocks.update(self.common.memory.prune())
        self._updates, self._deleted, changed = {}, [], []
        unseen: list[NotHome] = []
        for label, payload in tracker.changes(unseen):
            kind, _, rest = label.partition(" ")
            if kind == "update":
                self._updates[UPDATE_RECORD + rest] = payload
            elif kind == "bind":
                changed.append(rest)
            else:
                self._deleted.append(rest)
        self.unsent = [(item.path, item.reason) for item in unseen]
        self._changed_names, self._anew = frozenset(changed), selection.anew
        maybe = tuple(dict.fromkeys((*selection.maybe, *changed, *sorted(self._used_in_updates))))
        return pack_namespace(
            self._main,
            Selection(selection.needed, maybe, selection.anew),
            process_state=process_state,
            hidden=hidden,
            cell_numbers=cell_numbers,
            store=store,
            progress=progress,
            sender=self,
        )

    # -- what `pack_namespace` asks ------------------------------------------------------------------------------

    def pickler(
        self, stream: Any, blocks: OutgoingBlocks, on_function: Callable[[types.FunctionType], None]
    ) -> NamespacePickler:
        """See :class:`taas_magic.namespace.pack.Sender`."""
        return _UpdatePickler(self, stream, self._main, blocks, on_function=on_function)

    def number_of(self, obj: Any) -> int | None:
        """The number by which the ranks know an object; None where it is sent by value."""
        assert self._tracker is not None
        return None if self._writes_anew else self._tracker.number_of(obj)

    def owner_of(self, low: int, high: int) -> tuple[Any, int] | None:
        """The tensor or array that the ranks have too and in whose memory these addresses lie, with its start.

        A new view of it becomes a view of each rank's own, wherever the memory of that is by now.
        """
        assert self._tracker is not None
        if self._writes_anew or self._writes_content:
            return None
        if self._owners is None:
            self._owners = sorted(self._tracker.contiguous_memory(), key=lambda entry: (entry[0], -entry[1]))
            # What lies in another has no views that the other has not.
            end = 0
            self._owners = [entry for entry in self._owners if entry[1] > end and (end := max(end, entry[1]))]
        at = bisect.bisect_right(self._owners, low, key=lambda entry: entry[0]) - 1
        if at < 0 or high > self._owners[at][1]:
            return None
        return self._owners[at][2], self._owners[at][0]

    def begin_record(self, label: str) -> None:
        """See :class:`taas_magic.namespace.pack.Sender`."""
        self._writes_anew = label in self._anew
        self._writes_content = is_content(label)

    def uses_of(self, name: str) -> set[str] | None:
        """See :class:`taas_magic.namespace.pack.Sender`."""
        if name not in self._names or name in self._changed_names:
            return None
        return self._uses.get(name, set())

    def head(self) -> tuple[str, Any]:
        """See :class:`taas_magic.namespace.pack.Sender`."""
        return SYNC_RECORD, (sorted(self._forgotten), sorted(self._forgotten_blocks))

    def tail(self, left_out: Container[str]) -> Iterable[tuple[str, Any]]:
        """See :class:`taas_magic.namespace.pack.Sender`."""
        yield from self._updates.items()
        # What the notebook has under a name now and cannot send: the ranks must not go on with what it had before.
        self._withdrawn = [name for name in sorted(self._changed_names) if name in left_out]
        for name in (*self._deleted, *self._withdrawn):
            yield f"{DELETE_RECORD}{name}", None

    def refusal(self, label: str, error: BaseException) -> CannotTravelError:
        """See :class:`taas_magic.namespace.pack.Sender`."""
        assert self._tracker is not None
        record = f"update {label.removeprefix(UPDATE_RECORD)}"
        _, lost = self._tracker.without_failing_parts(record, self._updates[label], error)
        what = ", ".join(f"`{item.path}` ({item.reason})" for item in lost)
        # Sent without that, it would come home without that.
        return CannotTravelError.of(
            f"the notebook has changed what the kept ranks have, and cannot send {what}",
            expected="values that can be pickled; nothing was started",
            do="take it out of there again, or end the ranks with `%taas release`",
        )


class _UpdatePickler(NamespacePickler):
    """Writes what all ranks have as its number."""

    def __init__(self, mirror: Mirror, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._mirror = mirror

    def persistent_id(self, obj: Any) -> Any:
        return self.large_bytes_id(obj) if is_large(obj) else self._mirror.number_of(obj)

    def _reduce_array(self, array: Any) -> Any:
        reduced = super()._reduce_array(array)
        if reduced is NotImplemented or not array.size:
            return reduced
        _, _, shape, strides, dtype, writeable = reduced[1]
        found = self._mirror.owner_of(*bounds_of_array(array))
        if found is None:
            return reduced
        where = (found[0], array.ctypes.data - found[1], shape, strides)
        return rebuild.array_over, (*where, dtype, writeable)

    def _reduce_tensor(self, tensor: Any) -> Any:
        address = place_of_tensor(tensor)
        nbytes = span_of_tensor(tensor.shape, tensor.stride()) * tensor.itemsize if address else 0
        found = self._mirror.owner_of(address, address + nbytes) if address else None
        reduced = super()._reduce_tensor(tensor)
        if found is None or reduced is NotImplemented:
            return reduced
        kind, _, _, dtype, _, size, stride, requires_grad = reduced[1]
        where = (found[0], address - found[1], size, stride)
        return rebuild.tensor_over, (kind, *where, dtype, requires_grad), *reduced[2:]


# -- a rank's side ---------------------------------------------------------------------------------------------------


@dataclass
class KeptNamespace:
    """A kept rank's namespace.

    Attributes:
        common: What it has in common with the notebook.
        main: The namespace itself.
        pending: What was packed to come home, until it is known whether the notebook has taken it.
    """

    common: Common
    main: dict[str, Any]
    pending: Sent | None = None
    #: What of the latest parcel could not be applied.
    problems: list[str] = field(default_factory=list)

    def load(self, fds: list[int], before_names: Callable[[Any], None]) -> ReceivedNamespace:
        """Bring it up to date with a parcel from :meth:`Mirror.pack`."""
        self.problems = []
        return load_namespace(fds, self.main, before_names=before_names, receiver=self)

    def settle(self, adoptions: bytes, *, home_taken: bool) -> list[int]:
        """Enter what the notebook has taken home into what both sides have.

        Returns:
            The numbers of objects that this rank has no more, or never had.
        """
        missing: list[int] = []
        if self.pending is not None and home_taken:
            # This is rank 0, where all that came from.
            self.pending.enter(self.common)
        elif adoptions:
            for adoption in _adoptions_decoder.decode(adoptions):
                missing += self._adopt(adoption)
        self.pending = None
        return [*missing, *self.common.prune()[0]]

    def _adopt(self, adoption: Adoption) -> list[int]:
        """Number the objects under a name; returns the numbers where this rank has something else there."""
        if adoption.name in self.main:
            look = look_at(self.main, self.main[adoption.name])
            if look.digest == adoption.digest:
                for place, number in adoption.numbers:
                    self.common.objects[number] = look.objects[place]
                    self.common.next_object = max(self.common.next_object, number + 1)
                return []
        return [number for _, number in adoption.numbers]

    def take_sync(self, forgotten: tuple[list[int], list[int]]) -> None:
        """See :class:`taas_magic.namespace.pack.Receiver`."""
        objects, blocks = forgotten
        self.common.forget(objects)
        self.common.memory.stop_sharing(blocks)

    def take_update(self, number: int, aspect: str, payload: Any) -> None:
        """See :class:`taas_magic.namespace.pack.Receiver`."""
        obj = self.common.objects.get(number, _MISSING)
        if obj is _MISSING:
            return
        try:
            BY_NAME[aspect].apply(obj, payload)
        except Exception as error:  # noqa: BLE001 - the user's classes may raise anything
            self.problems.append(f"a {type(obj).__name__} that the notebook changed stays as it is here: {error}")


_MISSING = object()


# -- looking at values without sending them --------------------------------------------------------------------------


class _LookingPickler(NamespacePickler):
    """Goes through a value as a pickler does, and copies no memory, neither on this machine nor from a GPU."""

    def _storage(self, storage: Any) -> Any:
        entry = self._storages.get(storage._cdata)
        if entry is None:
            entry = self._storages[storage._cdata] = self._entry_of(storage, 0, 0)
        return entry

    def _use(self, reference: int, low: int, high: int) -> None:
        pass

    def _reference(self, address: int, nbytes: int, owner: Any, *, writable: bool = True) -> tuple[int, int]:
        self._blocks.enter(0, 0, owner)
        return 0, 0

    def _choose_reducer(self, kind: type) -> Any:
        if is_ddp(kind):
            return lambda wrapper: (_same, (wrapper.module,))
        return super()._choose_reducer(kind)


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Look:
    """What is to be seen of a value.

    Attributes:
        digest: Of the types of the objects, in order.
        objects: Those under it that can change, in an order that depends on nothing but their types and places.
        uses: The global names that functions in it use.
    """

    digest: bytes = b""
    objects: list[Any] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)


def look_at(main: dict[str, Any], value: Any) -> Look:
    """Go through a value without sending it."""
    uses: set[str] = set()

    def note(func: types.FunctionType) -> None:
        uses.update(globals_of_code(func.__code__))

    with _LookingPickler(Nowhere(), main, OutgoingBlocks(), on_function=note) as pickler:
        try:
            pickler.dump(value)
        except Exception:  # noqa: BLE001 - what cannot be pickled is not sent, nor has it a shape that two could agree on
            return Look()
        origins = origins_of(pickler).objects
    objects = [obj for _, obj in sorted(origins.items(), key=lambda pair: pair[0])]
    kinds = Kinds()
    objects = [
        obj for obj in objects if can_be_followed(obj, main, kinds) and not is_ddp(type(obj)) and not _is_by_name(obj)
    ]
    names = "\n".join(f"{type(obj).__module__}.{type(obj).__qualname__} {_form_of(obj)}" for obj in objects)
    return Look(hashlib.blake2b(names.encode(), digest_size=16).digest(), objects, uses)


def _form_of(obj: Any) -> str:
    """What else than its type must agree for two processes to have the same object each for itself."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(obj, torch.Tensor):
        is_plain = obj.layout is torch.strided and not obj.is_nested and not torch.nn.parameter.is_lazy(obj)
        return f"{obj.dtype} {tuple(obj.shape)} {obj.stride()}" if is_plain else str(obj.dtype)
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return f"{obj.dtype} {obj.shape} {obj.strides}"
    if isinstance(obj, dict):
        # Of the keys those that have a text which is the same everywhere.
        return repr([key if isinstance(key, (str, int)) else type(key).__name__ for key in obj])
    return ""


def _is_by_name(obj: Any) -> bool:
    """Whether an object is there for the pickle, or known by its name: how a value is pickled may differ."""
    if isinstance(obj, (types.FunctionType, type)):
        return cloudpickle_internals._lookup_module_and_qualname(obj) is not None
    return isinstance(obj, StorageEntry)
