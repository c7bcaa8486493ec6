"""What a rank gets of a registered loader: elements that come from the producers, one iteration after the other.

How the loader itself comes to yield them is in :mod:`taas_magic.data.stand_in`.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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

#: Smaller elements are copied out: the copy costs less than keeping account of them.
_COPY_BELOW_BYTES = 64 * 1024
#: So many are taken before the coordinator is told, where they are small.
_TELL_AFTER = 16


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
        #: What the methods of the loader's class get as ``self``.
        self.self: Any = loader
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
        length = int(self.kind.__len__(self.self))
        distributed = describe.distributed_sampler_among(describe.samplers_of(self.loader))
        task = self.task
        drops_tail = task.role == "train" and task.tail == "drop"
        steps = length if distributed else num_rounds(length, self.num_ranks, drops_tail=drops_tail)
        if task.units is None or task.role != "train":
            return steps
        most = task.units // self.num_ranks
        return most if task.cycles and steps else min(steps, most)

    def draw_as_local(self) -> Callable[[], None]:
        """Move the random states of this process as beginning to iterate a DataLoader with workers would.

        Returns:
            What moves them as going on to the end would.
        """
        import torch

        loader = self.loader
        if not self.is_data_loader:
            return _nothing
        torch.empty((), dtype=torch.int64).random_(generator=getattr(loader, "generator", None))
        sampler = list(describe.samplers_of(loader))[-1]
        kind = type(sampler)
        if kind.__module__ != "torch.utils.data.sampler" or kind.__name__ == "SequentialSampler":
            return _nothing
        if kind.__name__ != "RandomSampler":
            next(iter(sampler), None)
            return _nothing
        generator = sampler.generator
        if generator is None:
            torch.empty((), dtype=torch.int64).random_()
            return _nothing
        # Its iterator would keep the whole permutation for as long as the epoch takes.
        drawn = sampler.num_samples // (32 if sampler.replacement else len(sampler.data_source))
        if sampler.replacement or not drawn:
            keys = iter(sampler)
            next(keys, None)
            return lambda: deque(keys, maxlen=0).clear() if sampler.replacement else None
        torch.randperm(len(sampler.data_source), generator=generator)

        def draw_rest() -> None:
            for _ in range(drawn):
                torch.randperm(len(sampler.data_source), generator=generator)

        return draw_rest


def _nothing() -> None:
    """Do nothing."""


class DeliveredIterator(Iterator[Any]):
    """One iteration over what is delivered; it asks for nothing before it is asked."""

    def __init__(self, view: LoaderView) -> None:
        self._view = view
        self._draw_rest = view.draw_as_local()
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
            self._draw_rest()
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
    if isinstance(error, StopIteration | StopAsyncIteration):
        # It would end the iteration on this rank alone, without a word (as PEP 479 has it for generators).
        error = RuntimeError(f"the data set raised {type(error).__name__}")
    if trouble.traceback:
        BaseException.__setattr__(error, "__cause__", ProducerTracebackError(trouble.traceback))
    return error  # type: ignore[no-any-return]
