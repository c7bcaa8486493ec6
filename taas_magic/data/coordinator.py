"""The coordinator of a delivery: the shell around :class:`taas_magic.data.delivery.Delivery`.

It is one process a run. It runs the samplers, orders elements from producers, and tells ranks where their elements
lie. The elements themselves do not pass through it, except those that come over a connection. Samplers run in a
thread of their own: a permutation of a hundred million indices must not keep ranks from getting what is ready.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import secrets
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import setproctitle

from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.data import describe
from taas_magic.data import instructions as do
from taas_magic.data.arena import Arena, ArenaMap
from taas_magic.data.delivery import Delivery
from taas_magic.data.elements import Encoder
from taas_magic.data.iteration import StreamSpec
from taas_magic.data.planner import Planner
from taas_magic.data.seeds import derive_int
from taas_magic.data.stream import Stream
from taas_magic.data.transports import ArenaSource, Listener, Source, TcpSource
from taas_magic.data.trouble import describe_trouble
from taas_magic.data.waiting import WaitingTimes, advice
from taas_magic.namespace.blocks import available_memory_bytes
from taas_magic.units import format_exit
from taas_magic.wire_data import (
    AskElements,
    CloseIteration,
    Deliver,
    DeliveryEnded,
    DeliveryNotice,
    DeliveryStatus,
    DeliveryTask,
    ElementFailed,
    ForkChecker,
    ForkProducer,
    FromDataRank,
    FromNursery,
    FromProducer,
    IterationEnds,
    KillProducer,
    LoaderState,
    LoaderTask,
    Made,
    Make,
    NeedRoom,
    NotMade,
    OpenIteration,
    Position,
    Prepared,
    ProducerExited,
    Room,
    ToCoordinator,
    Trouble,
)

if TYPE_CHECKING:
    from taas_magic.data.nursery import Loaded

_STATUS_S = 0.25
#: While ranks run, they are told of waiting when so much time has passed, and each time that twice as much has.
_FIRST_ADVICE_S = 20.0


def run_coordinator(
    task: DeliveryTask, loaded: Callable[[], Loaded], runner_socket: socket.socket, nursery_socket: socket.socket
) -> None:
    """Be the coordinator in this freshly forked process, until the runner has no use for it any more."""
    setproctitle.setproctitle("taas: coordinator")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runner: Channel[ToCoordinator] = Channel(runner_socket, ToCoordinator)
    try:
        coordinator = _Coordinator(task, loaded(), runner, Channel(nursery_socket, FromNursery))
        try:
            coordinator.serve()
        except ChannelClosedError:
            # The run is over, or the nursery.
            coordinator.give_memory_back()
    except BaseException as error:  # noqa: BLE001 - it is told, and this process ends
        traceback.print_exc()
        text = traceback.format_exception_only(error)[-1].strip()
        with contextlib.suppress(Exception):
            runner.send(DeliveryEnded(f"the coordinator of the data delivery failed: {text}"))
    os._exit(0)


class _Coordinator:
    def __init__(
        self, task: DeliveryTask, loaded: Loaded, runner: Channel[ToCoordinator], nursery: Channel[FromNursery]
    ) -> None:
        self._task = task
        self._runner, self._nursery = runner, nursery
        self._arena = Arena()
        self._map = ArenaMap(os.dup(self._arena.fd))
        self._planners = [
            Planner(
                loader,
                task.num_ranks,
                is_eval=each.role == "eval",
                is_exact=each.determinism == "exact",
            )
            for loader, each in zip(loaded.loaders, task.loaders, strict=True)
        ]
        specs = [
            _spec(number, loader, each, task.num_ranks)
            for number, (loader, each) in enumerate(zip(loaded.loaders, task.loaders, strict=True))
        ]
        self._state = Delivery(specs, task.num_ranks, task.num_producers, task.memory_bytes)
        self._sources: dict[int, Source] = {}
        self._ranks: dict[int, Channel[FromDataRank]] = {}
        self._times = [WaitingTimes() for _ in task.loaders]
        encoder = Encoder(loaded.shared)
        self._sampling = _SamplerThread(self._planners, [each.name for each in task.loaders], encoder)
        self._first_keys = [b""] * len(task.loaders)
        self._selector = selectors.DefaultSelector()
        self._listener: Listener | None = None
        self._secret = b""
        if task.transport == "tcp":
            self._secret = secrets.token_bytes(32)
            self._listener = Listener(self._secret)
        self._started_at = time.monotonic()
        self._is_prepared = False
        self._status_due = 0.0
        self._next_advice_s = _FIRST_ADVICE_S
        self._first_taken_at = 0.0
        self._busy_before = _cpu_seconds()

    def serve(self) -> None:
        self._watch(self._runner, self._hear_runner)
        self._watch(self._nursery, self._hear_nursery)
        self._watch(self._sampling, self._take_plans)
        if self._listener is not None:
            self._watch(self._listener, self._accept)
        self._do(self._state.advance(time.monotonic()))
        while True:
            for key, _ in self._selector.select(_STATUS_S):
                key.data()
            # What is done may free or fill what was waited for: once more, until nothing new comes of it.
            self._do(self._state.advance(time.monotonic()))
            self._look_at_clock()

    def give_memory_back(self) -> None:
        """Leave nothing in memory but what the ranks still have: ranks that stay keep the arena mapped for that."""
        self._state.give_up_all()
        for start, end in self._state.extents.free:
            self._arena.give_back(start, end)

    def _watch(self, what: Any, handler: Callable[[], None]) -> None:
        self._selector.register(what.fileno(), selectors.EVENT_READ, handler)

    # -- what is heard -------------------------------------------------------------------------------------------

    def _hear_runner(self) -> None:
        for message, fds in self._runner.receive_available():
            channel: Channel[FromDataRank] = Channel(socket.socket(fileno=fds[0]), FromDataRank)
            self._ranks[message.rank] = channel
            self._watch(channel, lambda rank=message.rank: self._hear_rank(rank))  # type: ignore[misc]

    def _hear_nursery(self) -> None:
        for message, _ in self._nursery.receive_available():
            if isinstance(message, ProducerExited):
                self._lose_producer(message)
            else:
                self._runner.send(DeliveryNotice(message.text))

    def _lose_producer(self, message: ProducerExited) -> None:
        source = self._sources.pop(message.producer, None)
        if source is not None:
            # What it said before its end counts.
            self._hear_source(message.producer, source)
            self._forget(source)
            source.close()
        self._state.producer_exited(message.producer, format_exit(message.exit_code))

    def _forget(self, what: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(what.fileno())

    def _hear_producer(self, number: int) -> None:
        source = self._sources.get(number)
        if source is not None and not self._hear_source(number, source):
            # Its exit is told by the nursery; one that only cannot be understood has to be ended.
            self._forget(source)
            self._nursery.send(KillProducer(number))

    def _hear_source(self, number: int, source: Source) -> bool:
        try:
            for message in source.receive():
                self._take_from_producer(number, message)
        except (ChannelClosedError, msgspec.MsgspecError, OSError):
            return False
        return True

    def _take_from_producer(self, number: int, message: FromProducer) -> None:
        if isinstance(message, Made):
            for element in message.elements:
                self._state.made(number, element)
        elif isinstance(message, NeedRoom):
            self._state.needs_room(number, message.ticket, message.size_bytes)
        elif isinstance(message, NotMade):
            self._state.not_made(number, message.ticket, message.trouble)

    def _hear_rank(self, rank: int) -> None:
        channel = self._ranks.get(rank)
        if channel is None:
            return
        try:
            for message, _ in channel.receive_available():
                self._take_from_rank(rank, message)
        except (ChannelClosedError, msgspec.MsgspecError):
            self._forget(channel)
            channel.close()
            del self._ranks[rank]

    def _take_from_rank(self, rank: int, message: FromDataRank) -> None:
        state, loader, iteration = self._state, message.loader, message.iteration
        if isinstance(message, OpenIteration):
            self._first_taken_at = self._first_taken_at or time.monotonic()
            state.opened(rank, loader, iteration, message.sampler_epoch, message.start)
            return
        self._times[loader].note(iteration, rank, message.waited_s, message.iterating_s, message.taken)
        if isinstance(message, AskElements):
            state.asked(rank, loader, iteration, message.taken, message.released, is_waiting=message.is_waiting)
        elif isinstance(message, CloseIteration):
            state.closed(rank, loader, iteration, message.taken, message.released)
            self._status_due = 0.0

    def _take_plans(self) -> None:
        for plan, tasks, is_last, trouble in self._sampling.results():
            if tasks and not self._first_keys[plan.loader]:
                self._first_keys[plan.loader] = tasks[0]
            if trouble is not None:
                self._state.sampler_failed(plan, trouble)
            else:
                self._state.planned(plan, tasks, is_last=is_last)

    def _accept(self) -> None:
        assert self._listener is not None
        accepted = self._listener.accept()
        if accepted is None:
            return
        number, sock = accepted
        if number not in self._state.workshop.producers or isinstance(self._sources.get(number), TcpSource):
            sock.close()
            return
        source = TcpSource(sock, lambda ticket, size: self._place(number, ticket, size))
        waiting = self._sources.get(number)
        self._sources[number] = source
        if isinstance(waiting, _NotConnected):
            for message in waiting.messages:
                source.send(message)
        self._watch(source, lambda: self._hear_producer(number))

    def _place(self, producer: int, ticket: int, size_bytes: int) -> memoryview | None:
        """Where the bytes of an element go that comes over a connection."""
        lease = self._state.workshop.get(producer, ticket)
        if lease is None or lease.offset < 0 or lease.room < size_bytes:
            return None
        self._map.reach(lease.offset + size_bytes)
        assert self._map.buffer is not None
        return memoryview(self._map.buffer)[lease.offset : lease.offset + size_bytes]

    # -- what is to be done --------------------------------------------------------------------------------------

    def _do(self, instructions: list[do.Instruction]) -> None:  # noqa: C901 - a table of instructions
        for each in instructions:
            if isinstance(each, do.Plan):
                self._sampling.ask(each)
            elif isinstance(each, do.SendOrders):
                self._send_to_producer(each.producer, Make(each.orders))
            elif isinstance(each, do.AnswerRoom):
                self._send_to_producer(each.producer, Room(each.ticket, each.offset, each.room))
            elif isinstance(each, do.StartProducer):
                self._start_producer(each)
            elif isinstance(each, do.EndProducer):
                self._nursery.send(KillProducer(each.producer))
            elif isinstance(each, do.Grow):
                self._grow(each.size_bytes)
            elif isinstance(each, do.HandOut):
                self._send_to_rank(each.rank, Deliver(each.loader, each.iteration, each.elements, each.seed))
            elif isinstance(each, do.HandTrouble):
                self._send_to_rank(each.rank, ElementFailed(each.loader, each.iteration, each.trouble))
            elif isinstance(each, do.TellEnd):
                end = IterationEnds(each.loader, each.iteration, each.steps, each.position, each.is_used_up)
                self._send_to_rank(each.rank, end)
            elif isinstance(each, do.Say):
                self._runner.send(DeliveryNotice(each.text))
            elif isinstance(each, do.Fail):
                self._runner.send(DeliveryEnded(each.reason))
                raise ChannelClosedError(each.reason)

    def _send_to_producer(self, number: int, message: Any) -> None:
        source = self._sources.get(number)
        if source is not None:
            source.send(message)

    def _send_to_rank(self, rank: int, message: Any) -> None:
        channel = self._ranks.get(rank)
        if channel is not None:
            with contextlib.suppress(ChannelClosedError):
                channel.send(message)

    def _start_producer(self, order: do.StartProducer) -> None:
        job = order.job
        if job is not None and self._task.loaders[job.loader].determinism == "exact":
            job = msgspec.structs.replace(job, base_seed=self._planners[job.loader].base_seed(job.epoch))
        ours, theirs = Channel.pair()
        address = "" if self._listener is None else self._listener.address
        fork = ForkProducer(order.producer, job, address, self._secret)
        fds = (theirs.fileno(), self._arena.fd) if self._listener is None else (theirs.fileno(),)
        self._nursery.send(fork, fds)
        theirs.close()
        if self._listener is not None:
            ours.close()
            self._sources[order.producer] = _NotConnected()
            return
        source = ArenaSource(Channel(ours, FromProducer))
        self._sources[order.producer] = source
        self._watch(source, lambda: self._hear_producer(order.producer))

    def _grow(self, size_bytes: int) -> None:
        try:
            self._arena.grow(size_bytes)
        except MemoryError as error:
            # Orders that name places behind the end are on their way out of the same list: nobody may follow them.
            raise _OutOfMemoryError(
                f"no memory for prepared data: {error}; {self._arena.size_bytes} bytes are in use for it"
            ) from error

    # -- the clock -----------------------------------------------------------------------------------------------

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        share = self._share(now)
        if not self._is_prepared and share >= 1:
            self._is_prepared = True
            self._tell_status(share)
            self._runner.send(Prepared(), (self._arena.fd,))
            # Beside the run, so that nothing waits for it.
            self._nursery.send(ForkChecker(self._first_keys))
        if now >= self._status_due:
            self._status_due = now + (_STATUS_S if not self._is_prepared else 1.0)
            self._tell_status(share)
            # What others on this machine need is not there for data that is only prepared.
            room = self._arena.size_bytes + available_memory_bytes() // 2
            self._state.memory_bytes = min(self._task.memory_bytes, room)
        if self._first_taken_at and now > self._first_taken_at + self._next_advice_s:
            self._next_advice_s *= 2
            for text in self._summary():
                self._runner.send(DeliveryNotice(f"so far, {text}"))

    def _share(self, now: float) -> float:
        """How much of the preparation is done."""
        task = self._task
        if self._state.is_idle:
            return 1.0
        by_size = self._state.extents.taken_bytes / max(1, task.prepare_bytes)
        by_time = (now - self._started_at) / max(1e-3, task.prepare_s)
        return min(1.0, max(by_size, by_time))

    def _tell_status(self, share: float) -> None:
        self._runner.send(DeliveryStatus(self._loader_states(), share, self._summary() + self._skipped()))

    def _loader_states(self) -> list[LoaderState]:
        states = []
        for loader, times in zip(self._state.streams, self._times, strict=True):
            states.append(
                LoaderState(
                    loader.spec.name,
                    loader.num_ready,
                    loader.ready_bytes,
                    times.num_taken,
                    times.waited_s,
                    times.iterating_s,
                    loader.element_s,
                    self._advice(loader, times),
                )
            )
        return states

    def _advice(self, loader: Stream, times: WaitingTimes) -> str:
        elapsed = max(1e-3, time.monotonic() - self._started_at)
        num_cores = len(os.sched_getaffinity(0))
        busy = (_cpu_seconds() - self._busy_before) / elapsed
        num_producers = loader.spec.num_shards or self._task.num_producers
        text = advice(loader.spec.name, times, loader.element_s, num_producers, num_cores, busy)
        if text and loader.spec.num_shards and "try" in text:
            workers = loader.spec.num_shards
            return (
                f"{text.rpartition(':')[0]}: its {workers} logical workers go in order, so give it more `num_workers`"
            )
        return text

    def _summary(self) -> list[str]:
        states = [self._advice(loader, times) for loader, times in zip(self._state.streams, self._times, strict=True)]
        return [text for text in states if text]

    def _skipped(self) -> list[str]:
        return [
            f"`{loader.spec.name}`: {loader.num_skipped} elements could not be made and were skipped"
            for loader in self._state.streams
            if loader.num_skipped
        ]


class _OutOfMemoryError(Exception):
    """The machine has no memory for what was promised."""


class _NotConnected:
    """Keeps what is to be said to a producer that has not connected yet."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def fileno(self) -> int:
        return -1

    def receive(self) -> list[FromProducer]:
        return []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def close(self) -> None:
        self.messages.clear()


class _SamplerThread:
    """Runs samplers, one after the other, beside the loop that serves ranks and producers."""

    def __init__(self, planners: list[Planner], names: list[str], encoder: Encoder) -> None:
        self._planners, self._names, self._encoder = planners, names, encoder
        self._questions: queue.SimpleQueue[do.Plan] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[do.Plan, list[bytes], bool, Trouble | None]] = queue.SimpleQueue()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        threading.Thread(target=self._run, name="taas samplers", daemon=True).start()

    def fileno(self) -> int:
        return self._reader

    def ask(self, plan: do.Plan) -> None:
        self._questions.put(plan)

    def results(self) -> list[tuple[do.Plan, list[bytes], bool, Trouble | None]]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._answers.get_nowait())
        return found

    def _run(self) -> None:
        while True:
            plan = self._questions.get()
            try:
                planner = self._planners[plan.loader]
                if plan.is_first:
                    planner.begin(plan.epoch, plan.seed, plan.sampler_epoch)
                tasks, is_last = planner.take(plan.count, plan.first if plan.is_first else 0)
                self._answers.put((plan, tasks, is_last, None))
            except BaseException as error:  # noqa: BLE001 - it is raised on the ranks
                place = f"in the sampler of `{self._names[plan.loader]}`, for epoch {plan.epoch}"
                trouble = describe_trouble(error, place, self._encoder)
                self._answers.put((plan, [], True, trouble))
            os.write(self._writer, b".")


def _spec(number: int, loader: Any, task: LoaderTask, num_ranks: int) -> StreamSpec:
    is_exact = task.determinism == "exact"
    start = task.start or Position(_base_seed(number, loader), 0, 0)
    return StreamSpec(
        name=task.name,
        is_map=describe.is_map(loader),
        num_shards=describe.num_shards(loader, is_exact=is_exact),
        drops_tail=task.role == "train" and task.tail == "drop",
        pads_tail=task.role == "train" and task.tail == "pad",
        skips_errors=task.on_error == "skip",
        units=task.units if task.role == "train" else None,
        cycles=task.cycles and task.units is not None and task.role == "train",
        is_lazy=task.role == "eval",
        start=start,
    )


def _base_seed(number: int, loader: Any) -> int:
    """What all random numbers of a stream come from: the loader's generator, or the notebook's torch state."""
    import torch

    generator = getattr(loader, "generator", None)
    if isinstance(generator, torch.Generator):
        copy = torch.Generator()
        copy.set_state(generator.get_state())
        return int(torch.empty((), dtype=torch.int64).random_(generator=copy).item())
    copy = torch.Generator()
    copy.set_state(torch.get_rng_state())
    drawn = int(torch.empty((), dtype=torch.int64).random_(generator=copy).item())
    # Two loaders that have no generator would be shuffled alike.
    return derive_int(drawn, 0, number, b"loader")


def _cpu_seconds() -> float:
    """Processor time of this machine's processes that is spent, in seconds."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/stat", encoding="ascii") as stat:
            fields = [int(value) for value in stat.readline().split()[1:9]]
        user, nice, system, _, _, irq, soft, _ = fields
        return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
