"""The runner's side of the zygote: starting it, and the sockets and pipes of a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.wire import Begin, CellTask, FromRank
from taas_magic.wire_base import Message
from taas_magic.wire_zygote import (
    ForkPreloaded,
    FromRunZygote,
    FromZygote,
    GuardedProject,
    PrepareRun,
    RankDescriptors,
    RunBegins,
    StartRun,
)

if TYPE_CHECKING:
    from taas_magic.runner.parts import RemoteChannel, RemotePart

#: From how much on output does not gather in a rank's pipes: a pipe holds 64 KiB.
_LITTLE_BYTES = 32 * 1024
#: A warm zygote has ended what descends from it by then.
_END_S = 4.0


class ZygoteLink:
    """A running zygote.

    Attributes:
        process: Its process.
        channel: Its socket; it ends when the zygote does.
    """

    def __init__(self) -> None:
        ours, theirs = Channel.pair()
        environment = {
            **os.environ,
            # numpy's OpenBLAS starts a thread at import otherwise, and the zygote must not have a second one.
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "taas_magic.rank.zygote", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self.channel: Channel[FromZygote] = Channel(ours, FromZygote)

    def fork_preloaded(self, modules: list[str], environment: dict[str, str]) -> PreloadedZygote:
        """Fork a zygote that imports more."""
        ours, theirs = Channel.pair()
        self.channel.send(ForkPreloaded(modules, environment), (theirs.fileno(),))
        theirs.close()
        return PreloadedZygote(Channel(ours, FromZygote), modules, environment)

    def close(self, *, is_warm: bool) -> None:
        """End the zygote and wait for that; one that still imports would not notice that it is to end."""
        self.channel.close()
        if not is_warm:
            self.process.kill()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def prepare_run(
        self,
        num_ranks: int,
        preloaded: PreloadedZygote | None = None,
        guarded: GuardedProject | None = None,
        meeting: Meeting | None = None,
    ) -> RunLink:
        """Fork a run zygote, and by it an agent and ranks that wait for their task.

        Args:
            num_ranks: How many ranks are to be on this machine.
            preloaded: The zygote to fork from, if not this one.
            guarded: Where ranks other than 0 are not to write.
            meeting: Where the run's ranks of several machines meet.

        Raises:
            OSError: if the machine lacks something for it.
        """
        meeting = meeting or Meeting()
        ours, theirs = Channel.pair()
        zygote = self.channel if preloaded is None else preloaded.channel
        zygote.send(StartRun(), (theirs.fileno(),))
        theirs.close()
        run = RunLink(Channel(ours, FromRunZygote), [])
        try:
            for rank in range(meeting.first_rank, meeting.first_rank + num_ranks):
                run.ranks.append(_connect_rank(run.channel, rank))
            order = PrepareRun(
                num_ranks,
                guarded=guarded,
                node_rank=meeting.node_rank,
                num_nodes=meeting.num_nodes,
                master_addr=meeting.address,
                master_port=meeting.port,
                project=meeting.project,
                run_dir=meeting.run_dir,
                environment=meeting.environment,
            )
            run.channel.send(order, meeting.listener)
        except OSError:
            run.close()
            raise
        return run


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a run meet that has several machines, and this machine's place among those.

    Attributes:
        listener: The descriptor of the socket that listens there, on the first machine.
    """

    address: str = ""
    port: int = 0
    node_rank: int = 0
    num_nodes: int = 1
    first_rank: int = 0
    project: str = ""
    run_dir: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    listener: tuple[int, ...] = ()


@dataclass
class PreloadedZygote:
    """A zygote with more imports; ``is_ready`` once they are done."""

    channel: Channel[FromZygote]
    modules: list[str]
    environment: dict[str, str]
    is_ready: bool = False
    #: All modules that it has, once it is ready.
    loaded: frozenset[str] = frozenset()


@dataclass
class RankLink:
    """The runner's ends of one rank's pipes and socket; -1 and None once they have ended.

    Of a rank on another machine, output comes with the rest of what it says.
    """

    rank: int
    stdout_fd: int
    stderr_fd: int
    channel: Channel[FromRank] | RemoteChannel | None
    #: Until then its output gathers in the pipes: to take each line by itself costs more than the line.
    quiet_until: float = 0.0

    @property
    def has_pipes(self) -> bool:
        """Whether output may still come from it."""
        return self.stdout_fd >= 0 or self.stderr_fd >= 0

    def note_read(self, size_bytes: int, now: float, gather_s: float) -> None:
        """Note how much has just been read; where it is little, more may gather before the next look."""
        self.quiet_until = now + gather_s if 0 < size_bytes < _LITTLE_BYTES else 0.0

    def send(self, message: Message) -> None:
        """Send to the rank, if it is still there."""
        if self.channel is not None:
            with contextlib.suppress(ChannelClosedError):
                self.channel.send(message)

    def close(self) -> None:
        """Close what is still open."""
        for fd in (self.stdout_fd, self.stderr_fd):
            if fd >= 0:
                os.close(fd)
        self.stdout_fd = self.stderr_fd = -1
        if self.channel is not None:
            self.channel.close()
            self.channel = None


@dataclass
class RunLink:
    """The runner's ends of everything that belongs to a run."""

    channel: Channel[FromRunZygote]
    ranks: list[RankLink]
    #: The run's parts on other machines, in the order of their ranks.
    parts: list[RemotePart] = field(default_factory=list)

    @property
    def own_ranks(self) -> list[RankLink]:
        """The ranks of this machine."""
        return self.ranks[: len(self.ranks) - sum(len(part.ranks) for part in self.parts)]

    def add(self, part: RemotePart) -> None:
        """Have another machine's ranks behind those there are."""
        self.parts.append(part)
        self.ranks += part.ranks

    def begin(self, task: CellTask, parcel_fds: list[int]) -> None:
        """Give the ranks their task; those that are not forked yet find it when they are.

        Raises:
            ChannelClosedError: if the run's processes have ended.
        """
        begins = RunBegins(task.run_id, guards_writes=task.writes != "all" and task.num_ranks > 1)
        self.channel.send(begins)
        for part in self.parts:
            part.zygote.send(begins)
        for rank in self.ranks:
            if rank.channel is None:
                raise ChannelClosedError(f"rank {rank.rank} has ended")
            rank.channel.send(Begin(task), parcel_fds)

    def send(self, message: Message) -> None:
        """Send to the run zygotes, as far as they are still there."""
        channels: list[Channel[FromRunZygote] | RemoteChannel] = [self.channel, *(part.zygote for part in self.parts)]
        for channel in channels:
            with contextlib.suppress(ChannelClosedError, OSError):
                channel.send(message)

    def close(self) -> None:
        """Close everything; the run zygote ends its run when it finds that."""
        for rank in self.ranks:
            rank.close()
        self.channel.close()
        for part in self.parts:
            part.close()


def _connect_rank(channel: Channel[FromRunZygote], rank: int) -> RankLink:
    """Make a rank's pipes and socket and hand one end of each over; all of them or, with an OSError, none."""
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        stdout_reader, stdout_writer = _pipe(ours, theirs)
        stderr_reader, stderr_writer = _pipe(ours, theirs)
        our_socket, their_socket = Channel.pair()
        ours.callback(our_socket.close)
        theirs.callback(their_socket.close)
        channel.send(RankDescriptors(rank), (stdout_writer, stderr_writer, their_socket.fileno()))
        ours.pop_all()
        return RankLink(rank, stdout_reader, stderr_reader, Channel(our_socket, FromRank))


def _pipe(reader_closes: contextlib.ExitStack, writer_closes: contextlib.ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    reader_closes.callback(os.close, reader)
    writer_closes.callback(os.close, writer)
    os.set_blocking(reader, False)
    return reader, writer
