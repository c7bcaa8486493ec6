"""A rank's side of its control socket: a thread that obeys the runner while the cell runs."""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.namespace.mirror import KeptNamespace
from taas_magic.namespace.pack import Selection, pack_namespace
from taas_magic.namespace.process_state import capture_random
from taas_magic.namespace.track import Tracker, is_ddp
from taas_magic.rank import output
from taas_magic.wire import (
    AbortCollectives,
    Begin,
    CellTask,
    Exit,
    HomeFailed,
    HomeProgress,
    InputLine,
    PackAgain,
    RankDisplay,
    RankHome,
    RankInput,
    Rescue,
    Settle,
    ToRank,
)
from taas_magic.wire_base import Message
from taas_magic.wire_data import ConnectDelivery

#: How often rank 0 says how far it is with packing.
_PROGRESS_S = 0.3


class Control:
    """The control socket of a rank.

    Attributes:
        home: What packs rank 0's changes; None in other ranks, and before the namespace is loaded.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._channel: Channel[ToRank] = Channel(sock, ToRank)
        #: What to do when the cell is over.
        self._next: queue.SimpleQueue[tuple[Begin | Settle | Exit, list[int]]] = queue.SimpleQueue()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._interrupt_reached_python = False
        self._is_sending = False
        self._interrupt_waits = False
        self.home: Homebringer | None = None
        #: Whether this rank may close connections to free its peers and itself; rank 0 may not, it has work to save.
        self.may_close_connections = False
        self.cell_is_over = False
        #: How to get at the data that is delivered, with the descriptors for it; None where none is.
        self.delivery: tuple[ConnectDelivery, list[int]] | None = None

    def has_message(self) -> bool:
        """Whether the runner has said something that is not read yet."""
        return bool(select.select([self._channel.fileno()], [], [], 0)[0])

    def await_task(self) -> tuple[CellTask, list[int]]:
        """Wait for the task and its parcel's files. A rank on standby may wait long, and ends when it is not needed."""
        try:
            message, descriptors = self._channel.receive()
        except ChannelClosedError:
            os._exit(0)
        if isinstance(message, ConnectDelivery):
            self.delivery = message, descriptors
            return self.await_task()
        if not isinstance(message, Begin):
            raise TypeError(f"a rank's first message must be Begin, not {type(message).__name__}")
        return message.task, descriptors

    def start(self) -> None:
        """Start the thread that obeys the runner."""
        # Not by `threading.Thread`, whose start waits until the new thread has run: that is milliseconds.
        _thread.start_new_thread(self._obey, ())

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send to the runner; without a runner there is nothing left to do here.

        An interrupt waits until the message is sent: after half a message nothing of this rank would be understood.
        """
        is_interruptible = threading.current_thread() is threading.main_thread() and not self._is_sending
        if is_interruptible:
            self._is_sending = True
        try:
            self._channel.send(message, descriptors)
        except ChannelClosedError:
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            if is_interruptible:
                self._is_sending = False
                if self._interrupt_waits and not self.cell_is_over:
                    self._interrupt_waits = False
                    raise KeyboardInterrupt

    def display(self, message: RankDisplay) -> None:
        """Send what is to be displayed, in its place among what the streams hold."""
        with output.in_order(self._channel.fileno()):
            self.send(message)

    def ask(self, request: RankInput) -> str:
        """Ask the user for a line.

        Raises:
            EOFError: where the front end has nobody to ask.
        """
        self.send(request)
        line = self._lines.get()
        if line is None:
            raise EOFError("input() has nobody to ask: only rank 0 of a notebook run can, and only with a front end")
        return line

    def on_interrupt(self, signum: int, frame: Any) -> None:
        """The signal handler for SIGINT: as Python's own, and notes that Python code has seen it."""
        self._interrupt_reached_python = True
        if self._is_sending:
            self._interrupt_waits = True
        elif not self.cell_is_over:
            raise KeyboardInterrupt

    def await_next(self) -> tuple[Begin | Settle | Exit, list[int]]:
        """Wait until the runner has everything of this rank: for another cell if ranks are kept, else for the end."""
        return self._next.get()

    def begin_cell(self) -> None:
        """Forget what was of the cell before."""
        self.home = None
        # An answer that came when nobody asked any more.
        self._lines = queue.SimpleQueue()
        self._interrupt_reached_python = self._interrupt_waits = False
        self.cell_is_over = False

    def _obey(self) -> None:
        while True:
            try:
                message, descriptors = self._channel.receive()
            except ChannelClosedError:
                # The runner has gone. The run zygote ends this process; do not wait for it.
                os.kill(os.getpid(), signal.SIGKILL)
                return
            try:
                if isinstance(message, (Begin, Settle, Exit)):
                    self._next.put((message, descriptors))
                elif isinstance(message, ConnectDelivery):
                    # Before the cell that it is for, which is then found in the queue.
                    self.delivery = message, descriptors
                else:
                    self._carry_out(message)
            except Exception:  # noqa: BLE001 - said, and obeyed on
                traceback.print_exc()

    def _carry_out(self, message: ToRank) -> None:
        if isinstance(message, InputLine):
            self._lines.put(message.text)
        elif isinstance(message, AbortCollectives):
            # Where Python has seen the interrupt and the cell goes on, the cell is cleaning up; leave it alone.
            if self.cell_is_over or not self._interrupt_reached_python:
                abort_collectives(close_connections=self.may_close_connections)
        elif isinstance(message, Rescue):
            if self.home is None:
                self.send(HomeFailed("the notebook's names had not been loaded yet"))
            else:
                self.home.pack_once()
        elif isinstance(message, PackAgain) and self.home is not None:
            self.home.pack(message.exclude)


def abort_collectives(*, close_connections: bool) -> None:
    """Break off the collective in which the main thread waits.

    NCCL's communicators can be aborted. Gloo's cannot (in torch 2.13 ``abort`` returns and the wait goes on), but it
    gives up when a connection ends, and so do the peers.
    """
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is not None and distributed.is_initialized():
        with contextlib.suppress(Exception):
            _aborted_groups.extend(distributed._world.pg_map)
            distributed._abort_process_group()
    if close_connections:
        _shut_connections()


#: Kept for the life of the process. Should a DDP reducer hold the last reference to a gloo group, its destructor joins
#: threads while it holds the GIL, which these need to end (torch 2.13): the process would hang and bring nothing home.
_aborted_groups: list[Any] = []


def _shut_connections() -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115 - what it says is no path
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    # Raises for a socket that listens: gloo ends the process when its listener fails.
                    sock.getpeername()
                    sock.shutdown(socket.SHUT_RDWR)


class Homebringer:
    """Packs rank 0's changes and sends them to the runner: once, whichever thread comes first."""

    def __init__(
        self,
        control: Control,
        tracker: Tracker,
        extra: Callable[[], dict[str, Any]],
        kept: KeptNamespace | None = None,
        *,
        is_detached: bool = False,
    ) -> None:
        self._is_detached = is_detached
        self._control = control
        self._tracker = tracker
        self._extra = extra
        self._kept = kept
        self._said_at = time.monotonic()
        self._lock = threading.Lock()
        self._is_packed = False

    def pack_once(self) -> None:
        """Pack and send, unless that has been done."""
        with self._lock:
            if self._is_packed:
                return
            self._is_packed = True
            self._pack(())

    def pack(self, exclude: list[str]) -> None:
        """Pack and send again, without some records."""
        with self._lock:
            self._pack(exclude)

    def _pack(self, exclude: list[str] | tuple[str, ...]) -> None:
        self._said_at = time.monotonic()
        if self._is_detached:
            self._pack_whole()
            return
        extra = {**self._extra(), "random": capture_random()}
        try:
            packed = self._tracker.pack_changes(
                extra, exclude, keep=self._kept is not None, progress=self._tell_progress
            )
        except Exception as error:  # noqa: BLE001 - said, and obeyed on
            self._control.send(HomeFailed(f"{type(error).__name__}: {error}"))
            return
        not_home = [(item.path, item.reason) for item in packed.not_home]
        message = RankHome(packed.parcel.size_bytes, not_home, packed.unwrapped)
        if self._kept is not None:
            self._kept.pending = packed.sent
        self._control.send(message, (packed.parcel.fd,))
        packed.parcel.close()

    def _pack_whole(self) -> None:
        """Pack names as they are, for a notebook that may have nothing of what was sent."""
        try:
            names, lost = self._tracker.changed_names()
            main = sys.modules["__main__"].__dict__
            values = {name: getattr(main[name], "module", main[name]) for name in names if is_ddp(type(main[name]))}
            whole = {**main, **values}
            packed = pack_namespace(whole, Selection((), tuple(names)), values=self._extra())
        except Exception as error:  # noqa: BLE001 - said, and obeyed on
            self._control.send(HomeFailed(f"{type(error).__name__}: {error}"))
            return
        not_home = [(item.path, item.reason) for item in lost] + list(packed.left_out.items())
        self._control.send(RankHome(packed.parcel.size_bytes, not_home, list(values)), (packed.parcel.fd,))
        packed.parcel.close()

    def _tell_progress(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._said_at > _PROGRESS_S:
            self._said_at = now
            self._control.send(HomeProgress(done_bytes, total_bytes))
