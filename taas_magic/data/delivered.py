"""A registered loader on a rank: it is iterated as ever, and what it yields comes from the producers.

The loader is the object that came with the cell's names, wherever the cell meets it. For the time of the cell it gets
another
class, which answers for its parts as before, and iterates over what is delivered. It is no ``DataLoader`` then:
libraries that take a DataLoader apart, to make one of their own of it, leave it alone.
"""

from __future__ import annotations

import contextlib
import copyreg
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.data import describe
from taas_magic.data.arena import ArenaMap
from taas_magic.data.elements import decode
from taas_magic.data.rounds import num_rounds
from taas_magic.errors import DeliveryLostError, PoisonElementError, ProducerFailedError
from taas_magic.wire_data import (
    AskElements,
    CloseIteration,
    Deliver,
    Delivered,
    ElementFailed,
    IterationEnds,
    LoaderTask,
    OpenIteration,
    Position,
    ToDataRank,
    Trouble,
)

T = TypeVar("T")
#: Smaller elements are copied out: the copy costs less than keeping account of them.
_COPY_BELOW_BYTES = 64 * 1024
#: So many are taken before the coordinator is told, where they are small.
_TELL_AFTER = 16
_STATE_VERSION = 1


class Connection:
    """A rank's connection to the coordinator, and the memory in which elements lie."""

    def __init__(self, channel: Channel[ToDataRank], arena_fd: int, num_ranks: int, objects: Mapping[int, Any]) -> None:
        self._channel = channel
        self._map = ArenaMap(arena_fd)
        self._num_ranks = num_ranks
        self.objects = objects
        self.iterations: dict[tuple[int, int], DeliveredIterator] = {}
        #: Tickets of elements whose memory nobody uses any more.
        self._released: deque[int] = deque()
        self._held: dict[int, tuple[Any, int]] = {}
        self._held_bytes = 0
        self._pinned: list[Any] = []
        self._to_tell: deque[CloseIteration] = deque()

    def send(self, message: Any) -> None:
        """Say something to the coordinator.

        Raises:
            DeliveryLostError: if it has gone.
        """
        __tracebackhide__ = True
        try:
            while self._to_tell:
                self._channel.send(self._to_tell.popleft())
            self._channel.send(message)
        except (ChannelClosedError, OSError) as error:
            raise _lost() from error

    def send_last(self, message: CloseIteration) -> None:
        """Tell that an iteration is over, from wherever that is noticed; later, where nothing can be said just now."""
        try:
            if not self._channel.send_if_free(message):
                self._to_tell.append(message)
        except (ChannelClosedError, OSError):
            return

    def receive(self, *, wait: bool) -> None:
        """Take what the coordinator says.

        Raises:
            DeliveryLostError: if it has gone.
        """
        __tracebackhide__ = True
        try:
            if wait:
                self._take(self._channel.receive()[0])
            for message, _ in self._channel.receive_available():
                self._take(message)
        except (ChannelClosedError, OSError) as error:
            raise _lost() from error

    def _take(self, message: ToDataRank) -> None:
        iteration = self.iterations.get((message.loader, message.iteration))
        if iteration is not None:
            iteration.take(message)
        elif isinstance(message, Deliver):
            # For one that was closed meanwhile.
            self._released.extend(element.ticket for element in message.elements)

    def take_released(self) -> list[int]:
        """The tickets whose memory is free since this was asked last."""
        released = []
        with contextlib.suppress(IndexError):
            while True:
                ticket = self._released.popleft()
                _, size = self._held.pop(ticket, (None, 0))
                self._held_bytes -= size
                released.append(ticket)
        return released

    def release(self, ticket: int) -> None:
        """Note that the memory of an element is not used here."""
        self._released.append(ticket)

    def load(self, element: Delivered, *, pins: bool) -> Any:
        """The element; tensors and arrays lie where the producer has written them, unless too many do already."""
        import numpy as np

        self._map.reach(element.offset + element.size_bytes)
        if pins:
            self._pin()
        assert self._map.buffer is not None
        in_place = np.frombuffer(self._map.buffer, np.uint8, element.size_bytes, element.offset)
        is_small = element.size_bytes < _COPY_BELOW_BYTES and not pins
        limit = max(2 * element.size_bytes, self._map.mapped_bytes // (4 * self._num_ranks))
        if is_small or self._held_bytes + element.size_bytes > limit:
            copied = in_place.copy()
            self._released.append(element.ticket)
            return decode(copied, self.objects)
        ticket, released = element.ticket, self._released
        # Called when the last tensor or array over it is gone, in whichever thread that is.
        held = weakref.ref(in_place, lambda _: released.append(ticket))
        self._held[ticket] = held, element.size_bytes
        self._held_bytes += element.size_bytes
        return decode(in_place, self.objects)

    def _pin(self) -> None:
        """Have the GPU reach the memory directly: once for all elements in it."""
        buffer = self._map.buffer
        if any(buffer is each for each in self._pinned):
            return
        # Tried once for each map; where the GPU cannot have it, elements are as those of a loader that does not pin.
        self._pinned.append(buffer)
        torch = sys.modules["torch"]
        torch.cuda.cudart().cudaHostRegister(self._map.address(0, 0), self._map.mapped_bytes, 0)

    def close(self) -> None:
        """Let go of the coordinator, and of memory that nothing here uses."""
        for iteration in list(self.iterations.values()):
            iteration.end()
        if self._pinned:
            torch = sys.modules["torch"]
            from taas_magic.namespace.bulk import address_of

            for buffer in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(address_of(buffer))
        self._channel.close()
        self._map.close()


def _lost() -> DeliveryLostError:
    return DeliveryLostError.of(
        "the data delivery of this run has ended: its coordinator is gone",
        do="run the cell again; `%taas logs` shows what it wrote",
    )


class LoaderView:
    """What a rank knows of one registered loader.

    Args:
        loader: The loader.
        index: Its place among those of the run.
        task: How it is delivered.
    """

    def __init__(self, loader: Any, index: int, task: LoaderTask, connection: Connection, num_ranks: int) -> None:
        self.loader, self.index, self.task, self.connection = loader, index, task, connection
        self.num_ranks = num_ranks
        self.kind = type(loader)
        self.is_data_loader = describe.is_data_loader(loader)
        self.num_iterations = 0
        self.position: Position | None = task.start
        #: Where the next iteration is to begin, if the cell says so.
        self.start: Position | None = None
        self.pins = self.is_data_loader and bool(loader.pin_memory) and sys.modules["torch"].cuda.is_available()

    def sampler_epoch(self) -> int | None:
        """What the sampler was told of the epoch here."""
        holder = self.loader
        if self.is_data_loader:
            samplers = describe.samplers_of(self.loader)
            holder = next((each for each in samplers if callable(getattr(each, "set_epoch", None))), None)
        elif not callable(getattr(holder, "set_epoch", None)):
            return None
        epoch = getattr(holder, "epoch", None)
        return epoch if isinstance(epoch, int) and epoch >= 0 else None

    def num_steps(self) -> int:
        """Steps of an iteration on each rank.

        Raises:
            TypeError: if the loader has no length.
        """
        length = int(self.kind.__len__(self.loader))
        distributed = describe.distributed_sampler_among(describe.samplers_of(self.loader))
        task = self.task
        drops_tail = task.role == "train" and task.tail == "drop"
        steps = length if distributed else num_rounds(length, self.num_ranks, drops_tail=drops_tail)
        if task.units is None or task.role != "train":
            return steps
        most = task.units // self.num_ranks
        return most if task.cycles and steps else min(steps, most)

    def draw_as_local(self) -> None:
        """Move the random states of this process as iterating a DataLoader with workers would."""
        import torch

        loader = self.loader
        if not self.is_data_loader:
            return
        torch.empty((), dtype=torch.int64).random_(generator=getattr(loader, "generator", None))
        sampler = list(describe.samplers_of(loader))[-1:] or [None]
        kind = type(sampler[0])
        if kind.__module__ != "torch.utils.data.sampler":
            return
        if kind.__name__ == "RandomSampler" and sampler[0].generator is None:
            torch.empty((), dtype=torch.int64).random_()
        elif kind.__name__ != "SequentialSampler":
            next(iter(sampler[0]), None)


class DeliveredIterator(Iterator[Any]):
    """One iteration over what is delivered; it asks for nothing before it is asked."""

    def __init__(self, view: LoaderView) -> None:
        self._view = view
        self._connection = view.connection
        self._index = -1
        self._ready: deque[Delivered | Trouble] = deque()
        self._taken = 0
        self._told = 0
        self._end: IterationEnds | None = None
        self._is_over = False
        self._waited_s = 0.0
        self._began_at = 0.0
        self._bytes_untold = 0
        self._seed = 0

    def __iter__(self) -> DeliveredIterator:
        return self

    def __next__(self) -> Any:
        __tracebackhide__ = True
        if self._is_over:
            raise StopIteration
        if self._index < 0:
            self._open()
        if not self._ready:
            self._wait()
        elif self._taken - self._told >= _TELL_AFTER or self._bytes_untold > _COPY_BELOW_BYTES:
            self._ask(is_waiting=False)
        if not self._ready:
            self._view.position = self._end.position if self._end is not None else self._view.position
            self.end()
            raise StopIteration
        element = self._ready.popleft()
        self._taken += 1
        if isinstance(element, Trouble):
            raise _exception_of(element, self._connection.objects)
        self._bytes_untold += element.size_bytes
        self._view.position = Position(self._seed, element.epoch, element.element, element.units)
        return self._connection.load(element, pins=self._view.pins)

    def _open(self) -> None:
        view = self._view
        self._index = view.num_iterations
        view.num_iterations += 1
        self._began_at = time.monotonic()
        self._connection.iterations[view.index, self._index] = self
        start, view.start = view.start, None
        self._connection.send(OpenIteration(view.index, self._index, view.sampler_epoch(), start))

    def _wait(self) -> None:
        """Wait for the next element, or the end."""
        __tracebackhide__ = True
        connection = self._connection
        connection.receive(wait=False)
        if self._ready:
            self._ask(is_waiting=False)
            return
        started = time.monotonic()
        self._ask(is_waiting=True)
        while not self._ready and not (self._end is not None and self._end.steps == self._taken):
            connection.receive(wait=True)
        self._waited_s += time.monotonic() - started

    def _ask(self, *, is_waiting: bool) -> None:
        __tracebackhide__ = True
        self._told, self._bytes_untold = self._taken, 0
        self._connection.send(
            AskElements(
                self._view.index,
                self._index,
                self._taken,
                self._connection.take_released(),
                self._waited_s,
                time.monotonic() - self._began_at,
                is_waiting,
            )
        )

    def take(self, message: Deliver | ElementFailed | IterationEnds) -> None:
        """Take what the coordinator says of this iteration."""
        if isinstance(message, Deliver):
            if message.seed is not None:
                self._seed = message.seed
            self._ready.extend(message.elements)
        elif isinstance(message, ElementFailed):
            self._ready.append(message.trouble)
        else:
            self._end = message

    def end(self) -> None:
        """Want no more."""
        if self._is_over:
            return
        self._is_over = True
        if self._index < 0:
            return
        connection = self._connection
        connection.iterations.pop((self._view.index, self._index), None)
        for element in self._ready:
            if isinstance(element, Delivered):
                connection.release(element.ticket)
        self._ready.clear()
        connection.send_last(
            CloseIteration(
                self._view.index,
                self._index,
                self._taken,
                connection.take_released(),
                self._waited_s,
                time.monotonic() - self._began_at,
            )
        )

    def __del__(self) -> None:
        # After a `break` nobody refers to it any more.
        with contextlib.suppress(Exception):
            self.end()


# -- the loader's class ----------------------------------------------------------------------------------------------

_views: dict[int, LoaderView] = {}
_kinds: dict[type, type] = {}


class DeliveredLoader(Generic[T]):
    """What a registered DataLoader is in a cell: its parts are as they were, its elements come from producers."""

    _taas_stands_for: type = object

    def __iter__(self) -> Iterator[T]:
        return _iterate(self)

    def __len__(self) -> int:
        return _views[id(self)].num_steps()

    def __getattr__(self, name: str) -> Any:
        """What the loader's own class has: methods and properties find in it what they look for."""
        kind = type(self)._taas_stands_for
        for each in kind.__mro__:
            if name in each.__dict__ and not name.startswith("__"):
                value = each.__dict__[name]
                return value.__get__(self, kind) if hasattr(type(value), "__get__") else value
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a loader of its own, which nobody has registered."""
        return copyreg.__newobj__, (type(self)._taas_stands_for,), dict(self.__dict__)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        view = _views.get(id(self))
        return f"<delivered {type(self)._taas_stands_for.__name__} {view.task.name if view is not None else ''}>"

    def state_dict(self) -> dict[str, Any]:
        """Where the delivery of this loader is, for :meth:`load_state_dict`; nothing that was prepared is in it."""
        return _state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration begin where a :meth:`state_dict` says, with whatever number of ranks.

        Raises:
            ValueError: if it is no such state.
        """
        _views[id(self)].start = position_of(state)


def _iterate(loader: Any) -> DeliveredIterator:
    view = _views[id(loader)]
    view.draw_as_local()
    return DeliveredIterator(view)


def _state_dict(loader: Any) -> dict[str, Any]:
    view = _views[id(loader)]
    position = view.start or view.position
    if position is None:
        return {"version": _STATE_VERSION}
    return {
        "version": _STATE_VERSION,
        "seed": position.seed,
        "epoch": position.epoch,
        "element": position.element,
        "units": position.units,
    }


def position_of(state: Mapping[str, Any]) -> Position | None:
    """The position that a state says; None for that of a loader that had not been iterated.

    Raises:
        ValueError: if it is no such state.
    """
    names = ("seed", "epoch", "element", "units")
    if not hasattr(state, "get") or state.get("version") != _STATE_VERSION:
        raise ValueError(
            f"not a state of a delivered loader: {state!r}\n"
            f"expected: what its state_dict() gave, with version {_STATE_VERSION}"
        )
    if not any(name in state for name in names):
        return None
    values = [state.get(name) for name in names]
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError(f"a state of a delivered loader that is not whole: {state!r}\nexpected: {', '.join(names)}")
    return Position(*values)  # type: ignore[arg-type]


def kind_for(kind: type, *, is_data_loader: bool) -> type:
    """The class that stands for a loader's own while a cell runs.

    Raises:
        TypeError: if there can be none.
    """
    if kind not in _kinds:
        if is_data_loader:
            _kinds[kind] = type(DeliveredLoader.__name__, (DeliveredLoader,), {"_taas_stands_for": kind})
        else:
            members = {
                name: DeliveredLoader.__dict__[name]
                for name in ("__iter__", "__reduce_ex__", "state_dict", "load_state_dict")
            }
            if hasattr(kind, "__len__"):
                members["__len__"] = DeliveredLoader.__dict__["__len__"]
            if not kind.__flags__ & 1 << 9:
                # Neither its instances nor what stands for it can have another class (Py_TPFLAGS_HEAPTYPE).
                raise TypeError(f"a {kind.__name__} cannot be delivered")
            _kinds[kind] = type(kind)(kind.__name__, (kind,), {**members, "__slots__": (), "_taas_stands_for": kind})
    return _kinds[kind]


def attach(connection: Connection, tasks: list[LoaderTask], objects: Mapping[int, Any], num_ranks: int) -> None:
    """Have the loaders of a cell deliver what comes over a connection."""
    for index, task in enumerate(tasks):
        loader = objects[task.number]
        view = LoaderView(loader, index, task, connection, num_ranks)
        _views[id(loader)] = view
        object.__setattr__(loader, "__class__", kind_for(view.kind, is_data_loader=view.is_data_loader))


def detach() -> None:
    """Have the loaders be what they were."""
    connections = {id(view.connection): view.connection for view in _views.values()}
    for view in _views.values():
        object.__setattr__(view.loader, "__class__", view.kind)
    _views.clear()
    for connection in connections.values():
        connection.close()


def delivered_loaders() -> list[Any]:
    """The loaders that are delivered to this process."""
    return [view.loader for view in _views.values()]


# -- exceptions ------------------------------------------------------------------------------------------------------


class ProducerTracebackError(Exception):
    """The cause of an exception that came from a producer: its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _exception_of(trouble: Trouble, objects: Mapping[int, Any]) -> BaseException:
    """The producer's own exception; one that stands for it where this process cannot rebuild it."""
    error: Any = None
    if trouble.pickled:
        import numpy as np

        with contextlib.suppress(Exception):
            error = decode(np.frombuffer(bytearray(trouble.pickled), np.uint8), objects)
    if trouble.type_name == "PoisonElementError":
        return PoisonElementError.of(
            trouble.message,
            expected="elements that can be made",
            do='look at what the data set does there (native code? memory?), or register with on_error="skip"',
        )
    if not isinstance(error, Exception):
        error = (
            MemoryError(trouble.message)
            if trouble.type_name == "MemoryError"
            else ProducerFailedError(f"{trouble.type_name}: {trouble.message}")
        )
    if trouble.traceback:
        BaseException.__setattr__(error, "__cause__", ProducerTracebackError(trouble.traceback))
    return error  # type: ignore[no-any-return]
