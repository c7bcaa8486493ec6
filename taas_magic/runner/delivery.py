"""A delivery of data in the runner: started before its run, connected to the ranks, and ended with the run."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.runner.run import Source
from taas_magic.runner.zygote_link import PreloadedZygote, RankLink, ZygoteLink
from taas_magic.units import format_bytes, format_seconds
from taas_magic.wire_base import Message
from taas_magic.wire_data import (
    BeginDelivery,
    ConnectDelivery,
    ConnectRank,
    DeliveryDescriptors,
    DeliveryFailed,
    DeliveryNotice,
    DeliveryProgress,
    DeliveryStatus,
    DeliveryTask,
    FromCoordinator,
    LoaderState,
    Prepared,
    StartDelivery,
)

_READ_BYTES = 64 * 1024
#: Of what producers write before there is a run to show it in.
_KEPT_OUTPUT_BYTES = 2**20


class Delivery:
    """One delivery.

    Args:
        task: What it has to do.
        parcel_fds: The loaders, packed; they stay the caller's.
        zygote: What to fork it from.
        preloaded: The zygote with more imports, if that is to be taken.
        send: Sends a message to the kernel.

    Raises:
        OSError: if the machine lacks something for it.
    """

    def __init__(
        self,
        task: DeliveryTask,
        parcel_fds: list[int],
        zygote: ZygoteLink,
        preloaded: PreloadedZygote | None,
        send: Callable[[Message], None],
    ) -> None:
        self.task = task
        self._send = send
        self.is_ready = False
        #: Why it has ended; "" while it has not.
        self.ended = ""
        self.is_closed = False
        self.summary: list[str] = []
        self._states: list[LoaderState] = []
        self._arena_fd = -1
        self._fds: dict[int, str] = {}
        self._output: deque[tuple[str, bytes]] = deque()
        self._output_bytes = 0
        #: What takes output and notices of the run; None before there is one.
        self.take_output: Callable[[str, bytes], None] | None = None
        self.take_notice: Callable[[str], None] | None = None
        self.take_end: Callable[[str], None] | None = None
        self._notices: list[str] = []
        ours, theirs = Channel.pair()
        self._keeper: Channel[FromCoordinator] = Channel(ours, FromCoordinator)
        coordinator_ours, coordinator_theirs = Channel.pair()
        self._coordinator: Channel[FromCoordinator] | None = Channel(coordinator_ours, FromCoordinator)
        with contextlib.ExitStack() as closing:
            closing.callback(coordinator_theirs.close)
            source = zygote.channel if preloaded is None else preloaded.channel
            source.send(StartDelivery(), (theirs.fileno(),))
            theirs.close()
            writers = [self._pipe(kind, closing) for kind in ("stdout", "stderr")]
            self._keeper.send(DeliveryDescriptors(), (coordinator_theirs.fileno(), *writers))
            self._keeper.send(BeginDelivery(task), parcel_fds)

    def _pipe(self, kind: str, closing: contextlib.ExitStack) -> int:
        reader, writer = os.pipe()
        closing.callback(os.close, writer)
        os.set_blocking(reader, False)
        self._fds[reader] = kind
        return writer

    # -- what is heard -------------------------------------------------------------------------------------------

    def sources(self) -> Iterator[Source]:
        """Everything that can become readable."""
        if self._coordinator is not None:
            yield Source(self._coordinator.fileno(), self._hear)
        for fd in list(self._fds):
            yield Source(fd, lambda fd=fd: self._read(fd))  # type: ignore[misc]

    def _hear(self) -> None:
        if self._coordinator is None:
            return
        try:
            for message, fds in self._coordinator.receive_available():
                self._take(message, fds)
        except (ChannelClosedError, msgspec.MsgspecError):
            self._end("the coordinator of the data delivery ended unexpectedly")

    def _take(self, message: FromCoordinator, fds: list[int]) -> None:
        if isinstance(message, Prepared):
            self.is_ready = True
            self._arena_fd = fds[0]
            self._send(DeliveryProgress(self.task.id, self._states, 1.0, is_ready=True))
        elif isinstance(message, DeliveryStatus):
            self.summary, self._states = message.summary, message.loaders
            if not self.is_ready:
                self._send(DeliveryProgress(self.task.id, message.loaders, message.share))
        elif isinstance(message, DeliveryNotice):
            if self.take_notice is not None:
                self.take_notice(message.text)
            else:
                self._notices.append(message.text)
        else:
            self._end(message.reason)

    def _end(self, reason: str) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None
        if self.ended:
            return
        for fd in list(self._fds):
            self._read(fd)
        self.ended = reason
        if self.take_end is not None:
            self.take_end(reason)
        elif not self.is_closed:
            said = b"".join(data for _, data in self._output).decode(errors="replace").strip()
            tail = "\n".join(said.splitlines()[-15:])
            self._send(DeliveryFailed(self.task.id, reason + (f"\nits last words:\n{tail}" if tail else "")))
        self.close()

    def _read(self, fd: int) -> None:
        for _ in range(16):
            if fd not in self._fds:
                return
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                os.close(fd)
                del self._fds[fd]
                return
            if self.take_output is not None:
                self.take_output(self._fds[fd], data)
            elif self._output_bytes < _KEPT_OUTPUT_BYTES:
                self._output.append((self._fds[fd], data))
                self._output_bytes += len(data)

    # -- the run -------------------------------------------------------------------------------------------------

    def connect(self, ranks: list[RankLink]) -> None:
        """Connect the ranks of the run that it was prepared for; before they are given their task.

        Raises:
            OSError: if it has ended.
        """
        if self._coordinator is None:
            raise ChannelClosedError(self.ended)
        shared = [theirs for _, theirs in self.task.shared]
        taking_part = [rank for rank in ranks if not self.task.ranks or rank.rank in self.task.ranks]
        for place, rank in enumerate(taking_part):
            ours, theirs = Channel.pair()
            with contextlib.closing(ours), contextlib.closing(theirs):
                self._coordinator.send(ConnectRank(place), (ours.fileno(),))
                if rank.channel is None:
                    raise ChannelClosedError(f"rank {rank.rank} has ended")
                connect = ConnectDelivery(self.task.loaders, shared, self.task.num_ranks)
                rank.channel.send(connect, (theirs.fileno(), self._arena_fd))

    def follow(
        self,
        take_output: Callable[[str, bytes], None],
        take_notice: Callable[[str], None],
        take_end: Callable[[str], None],
    ) -> None:
        """Have a run take what comes from here, and what has come."""
        self.take_output, self.take_notice, self.take_end = take_output, take_notice, take_end
        while self._output:
            take_output(*self._output.popleft())
        for text in self._notices:
            take_notice(text)
        self._notices.clear()

    def final_summary(self) -> list[str]:
        """What there is to say at the end of the run."""
        self._hear()
        return self.summary

    def describe(self) -> list[str]:
        """How far it is, a line a loader."""
        lines = []
        for state in self._states:
            ready = f"{state.ready} ready ({format_bytes(state.ready_bytes)})"
            line = f"{state.name}: {state.taken} taken, {ready}"
            if state.iterating_s:
                line += f", ranks waited {format_seconds(state.waited_s)} of {format_seconds(state.iterating_s)}"
            lines.append(line + (f"; {state.advice}" if state.advice else ""))
        return lines

    def close(self) -> None:
        """End it, and all its processes."""
        self.is_closed = True
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None
        self._keeper.close()
        if self._arena_fd >= 0:
            os.close(self._arena_fd)
            self._arena_fd = -1
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
