"""A producer: makes elements as it is told, and puts them where there is room for them."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

import setproctitle

from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.data.elements import Encoded, Encoder
from taas_magic.data.making import Maker, ShardEndedError, ShardMaker, units_of
from taas_magic.data.transports import ArenaSink, Sink, TcpSink
from taas_magic.data.trouble import describe_trouble, place_of
from taas_magic.wire_data import (
    DeliveryTask,
    ForkProducer,
    Made,
    MadeElement,
    Make,
    NeedRoom,
    NotMade,
    Order,
    Room,
    ToProducer,
)

if TYPE_CHECKING:
    from taas_magic.data.nursery import Loaded

#: What is made is told of after so long at the latest; small elements are told of together.
_TELL_S = 0.002
_LARGE_BYTES = 256 * 1024


def run_producer(
    order: ForkProducer,
    sock: socket.socket,
    arena_fd: int,
    loaded: Loaded,
    task: DeliveryTask,
) -> None:
    """Be a producer in this freshly forked process, until nobody is there to make elements for.

    Args:
        order: Which one, and for what.
        sock: Its end of the connection to the coordinator.
        arena_fd: The memory file of the elements; -1 where they go over a network.
        loaded: The loaders, in copies of this process's own.
        task: How they are delivered.
    """
    job = order.job
    part = f", part {job.shard} of {task.loaders[job.loader].name}" if job is not None else ""
    setproctitle.setproctitle(f"taas: producer {order.producer}{part}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A crash in native code leaves the Python line that led to it in the run's output.
    faulthandler.enable(all_threads=False)
    _use_one_thread()
    sink: Sink
    if order.address:
        sock.close()
        sink = TcpSink.connect(order.address, order.secret, order.producer)
    else:
        sink = ArenaSink(Channel(sock, ToProducer), arena_fd)
    producer = _Producer(order, sink, loaded, task)
    try:
        producer.serve()
    except (ChannelClosedError, BrokenPipeError, ConnectionError):
        pass
    finally:
        _flush()
    os._exit(0)


class _Producer:
    def __init__(self, order: ForkProducer, sink: Sink, loaded: Loaded, task: DeliveryTask) -> None:
        self._job = order.job
        self._sink = sink
        self._loaders, self._task = loaded.loaders, task
        self._encoder = Encoder(loaded.shared)
        self._makers: dict[int, Maker | ShardMaker] = {}
        self._orders: deque[Order] = deque()
        self._rooms: dict[int, Room] = {}
        #: What is made and not told of, and since when.
        self._made: list[tuple[MadeElement, Encoded]] = []
        self._made_since = 0.0

    def serve(self) -> None:
        while True:
            self._hear(wait=not self._orders)
            while self._orders:
                order = self._orders.popleft()
                self._carry_out(order)
                if self._made and (not self._orders or time.monotonic() > self._made_since + _TELL_S):
                    self._tell()

    def _hear(self, *, wait: bool) -> None:
        for message in self._sink.receive(wait=wait):
            if isinstance(message, Make):
                self._orders.extend(message.orders)
            elif isinstance(message, Room):
                self._rooms[message.ticket] = message

    def _carry_out(self, order: Order) -> None:
        started = time.monotonic()
        try:
            element = self._maker(order.loader).make(order)
            if order.is_discarded:
                return
            units = units_of(element)
            encoded = self._encoder.encode(element)
        except ShardEndedError:
            self._tell()
            if not order.is_discarded:
                self._sink.send(NotMade(order.ticket))
            return
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code; told where it matters
            self._tell()
            if not order.is_discarded:
                name = self._task.loaders[order.loader].name
                trouble = describe_trouble(error, place_of(name, order), self._encoder, self._task.project)
                self._sink.send(NotMade(order.ticket, trouble))
            return
        del element
        room: Room | None = Room(order.ticket, order.offset, order.room)
        if encoded.size_bytes > order.room:
            room = self._ask_for_room(order, encoded.size_bytes)
        if room is None:
            return
        self._sink.place(encoded, room.offset)
        if not self._made:
            self._made_since = time.monotonic()
        made = MadeElement(order.ticket, encoded.size_bytes, time.monotonic() - started, units)
        self._made.append((made, encoded))
        if encoded.size_bytes > _LARGE_BYTES:
            self._tell()

    def _ask_for_room(self, order: Order, size_bytes: int) -> Room | None:
        """Ask for room, and wait for the answer; None where the element is not wanted, or there is none now."""
        self._tell()
        self._sink.send(NeedRoom(order.ticket, size_bytes))
        while order.ticket not in self._rooms:
            self._hear(wait=True)
        room = self._rooms.pop(order.ticket)
        return room if room.room else None

    def _tell(self) -> None:
        if self._made:
            made, self._made = self._made, []
            self._sink.tell(Made([element for element, _ in made]), [encoded for _, encoded in made])

    def _maker(self, loader: int) -> Maker | ShardMaker:
        maker = self._makers.get(loader)
        if maker is None:
            what = self._loaders[loader]
            maker = self._makers[loader] = Maker(what) if self._job is None else ShardMaker(what, self._job)
        return maker


def _use_one_thread() -> None:
    """As a DataLoader's worker: there is one for each processor already."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001, S112 - nobody reads any more
            continue
