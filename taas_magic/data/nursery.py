"""Forks the coordinator and the producers of a delivery.

The *nursery* has loaded the registered loaders and done nothing else with them, in one thread. So each producer
begins with the same, shares the memory of it, and is there in milliseconds; a new one takes the place of one that was
killed just as quickly. Where loading starts threads, forking is not safe any more: then each child loads for itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import setproctitle

from taas_magic import processes
from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.data.checking import findings
from taas_magic.namespace import process_state
from taas_magic.namespace.pack import cache_sources, load_namespace
from taas_magic.wire_data import (
    DeliveryTask,
    ForkChecker,
    ForkProducer,
    FromNursery,
    KillProducer,
    LoaderFinding,
    ProducerExited,
    ToNursery,
)

#: How long a process may be stopped (SIGSTOP) until it counts as dead.
_FROZEN_S = 1.5
_LOOK_S = 0.25
#: A forked child has this long to be ready to be forked again: what a library starts at import may end by itself.
_THREAD_END_S = 0.5


@dataclass
class Loaded:
    """What the parcel holds."""

    loaders: list[Any]
    #: Numbers that ranks know classes and functions by, by their ``id`` here.
    shared: dict[int, int] = field(default_factory=dict)
    #: Keeps what the ids are of.
    objects: dict[int, Any] = field(default_factory=dict)


def load(task: DeliveryTask, parcel_fds: list[int], main: dict[str, Any]) -> Loaded:
    """Load the loaders into this process.

    Raises:
        Exception: whatever loading them raises.
    """
    received = load_namespace(parcel_fds, main, before_names=process_state.apply)
    cache_sources(received.sources)
    loaders = [received.values[loader.label] for loader in task.loaders]
    objects = received.common.objects
    shared = {id(objects[own]): theirs for own, theirs in task.shared if own in objects}
    return Loaded(loaders, shared, {own: objects[own] for own, _ in task.shared if own in objects})


class Nursery:
    """The process that all others of a delivery are forked from.

    Args:
        task: What the delivery has to do.
        parcel_fds: The loaders, packed.
        coordinator_socket: The coordinator's end of its connection to the runner.
        main: The namespace to load into.
    """

    def __init__(
        self, task: DeliveryTask, parcel_fds: list[int], coordinator_socket: socket.socket, main: dict[str, Any]
    ) -> None:
        self._task = task
        self._parcel_fds = parcel_fds
        self._coordinator_socket: socket.socket | None = coordinator_socket
        self._main = main
        self._loaded: Loaded | None = None
        self._producers: dict[int, int] = {}
        self._frozen_since: dict[int, float] = {}
        self._coordinator_pid = 0

    def serve(self, *, loads_here: bool) -> bool:
        """Load, fork, and look after what was forked until the coordinator ends.

        Args:
            loads_here: Load before anything is forked; otherwise each child loads for itself.

        Returns:
            Whether it served: after loading, a process may have threads, and then must not be forked.
        """
        setproctitle.setproctitle("taas: delivery")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        process_state.set_environment({**self._task.environment, "OMP_NUM_THREADS": "1"})
        if loads_here and not self._load():
            return False
        self._watch = processes.ChildWatch()
        ours, theirs = Channel.pair()
        self._channel: Channel[ToNursery] = Channel(ours, ToNursery)
        self._coordinator_pid = self._fork(lambda: self._be_coordinator(theirs))
        theirs.close()
        assert self._coordinator_socket is not None
        self._coordinator_socket.close()
        self._coordinator_socket = None
        while self._coordinator_pid:
            ready = select.select([self._channel.fileno(), self._watch.fileno()], [], [], _LOOK_S)[0]
            if self._watch.fileno() in ready:
                self._note_exits()
            if self._channel.fileno() in ready:
                self._hear()
            self._look_for_frozen()
        return True

    def _load(self) -> bool:
        """Load here; returns whether this process may be forked afterwards."""
        self._loaded = load(self._task, self._parcel_fds, self._main)
        deadline = time.monotonic() + _THREAD_END_S
        while processes.count_threads() > 1:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        gc.collect()
        gc.freeze()
        return True

    def _hear(self) -> None:
        try:
            for message, fds in self._channel.receive_available():
                if isinstance(message, ForkProducer):
                    self._fork_producer(message, fds)
                elif isinstance(message, ForkChecker):
                    self._fork(lambda order=message: self._be_checker(order))  # type: ignore[misc]
                else:
                    self._kill_producer(message)
        except ChannelClosedError:
            self._channel.close()
            if self._coordinator_pid:
                os.waitpid(self._coordinator_pid, 0)
            self._coordinator_pid = 0

    def _fork_producer(self, order: ForkProducer, fds: list[int]) -> None:
        self._producers[order.producer] = self._fork(lambda: self._be_producer(order, fds))
        for fd in fds:
            os.close(fd)

    def _kill_producer(self, order: KillProducer) -> None:
        pid = self._producers.get(order.producer)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _note_exits(self) -> None:
        self._watch.clear()
        for pid, exit_code in processes.reap():
            if pid == self._coordinator_pid:
                self._coordinator_pid = 0
                continue
            number = next((number for number, its_pid in self._producers.items() if its_pid == pid), None)
            if number is not None:
                del self._producers[number]
                message: FromNursery = ProducerExited(number, exit_code)
                with contextlib.suppress(ChannelClosedError):
                    self._channel.send(message)

    def _look_for_frozen(self) -> None:
        """Kill what has been stopped for long: others can do its work, and nobody would get its memory back."""
        now = time.monotonic()
        pids = {*self._producers.values(), self._coordinator_pid} - {0}
        frozen = {pid for pid in pids if _is_stopped(pid)}
        self._frozen_since = {pid: self._frozen_since.get(pid, now) for pid in frozen}
        for pid, since in self._frozen_since.items():
            if now > since + _FROZEN_S:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # -- children ------------------------------------------------------------------------------------------------

    def _fork(self, body: Callable[[], None]) -> int:
        parent = os.getpid()

        def be_child() -> None:
            self._watch.close()
            processes.die_with_parent(parent)
            body()

        return processes.fork(be_child)

    def _in_child(self) -> Loaded:
        if self._loaded is None:
            self._loaded = load(self._task, self._parcel_fds, self._main)
        for fd in self._parcel_fds:
            os.close(fd)
        return self._loaded

    def _be_coordinator(self, nursery_socket: socket.socket) -> None:
        from taas_magic.data.coordinator import run_coordinator

        self._channel.close()
        assert self._coordinator_socket is not None
        run_coordinator(self._task, self._in_child, self._coordinator_socket, nursery_socket)

    def _be_producer(self, order: ForkProducer, fds: list[int]) -> None:
        from taas_magic.data.producer import run_producer

        self._channel.close()
        loaded = self._in_child()
        arena_fd = fds[1] if len(fds) > 1 else -1
        run_producer(order, socket.socket(fileno=fds[0]), arena_fd, loaded, self._task)

    def _be_checker(self, order: ForkChecker) -> None:
        setproctitle.setproctitle("taas: delivery check")
        # What the data set prints is printed when it is used, and not once more.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(nowhere, fd)
        for text in findings(self._in_child().loaders, self._task.loaders, order.first_keys):
            self._channel.send(LoaderFinding(text))


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
