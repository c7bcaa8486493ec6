"""One run in the runner: the shell around :class:`RunState` that does its input and output."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.runner.cause import choose_cause, uneven_hint
from taas_magic.runner.hints import death_hint, oom_kills
from taas_magic.runner.output_log import OutputLog
from taas_magic.runner.phases import ALIVE, HomePhase, StopCause
from taas_magic.runner.run_state import (
    Abort,
    AnnounceStarted,
    Conclude,
    Instruction,
    PackHomeAgain,
    Release,
    RescueHome,
    RunState,
    SettleRanks,
    Signal,
)
from taas_magic.runner.zygote_link import RankLink, RunLink
from taas_magic.wire import (
    Abandon,
    AbortCollectives,
    CellFailed,
    CellFinished,
    CellStarted,
    Display,
    Exit,
    HomeArrived,
    HomeFailed,
    HomeProgress,
    HomeRefused,
    HomeTaken,
    InputLine,
    InputReply,
    InputRequest,
    Interrupt,
    Notice,
    Output,
    OutputTaken,
    PackAgain,
    RankDisplay,
    RankHome,
    RankInput,
    RankResting,
    RankResult,
    Rescue,
    ResultArrived,
    ResultTaken,
    RunEnded,
    RunStarted,
    Settle,
    Submit,
    TransferProgress,
    Waiting,
)
from taas_magic.wire_base import MemoryFile, Message
from taas_magic.wire_machines import RanksGone
from taas_magic.wire_zygote import (
    AgentExited,
    EndRun,
    FromRunZygote,
    RankExited,
    RankForked,
    RunNotice,
    RunOver,
    SignalRanks,
)

if TYPE_CHECKING:
    from taas_magic.runner.delivery import Delivery
    from taas_magic.runner.parts import RemoteChannel

#: Output that the kernel may have waiting, unseen.
_WINDOW_BYTES = 1024 * 1024
_READ_BYTES = 256 * 1024
_READS_AT_ONCE = 16
#: How long output gathers before it is taken: of ranks that are shown, and of others.
_GATHER_S, _GATHER_UNSEEN_S = 0.03, 0.2
#: How many lines of a failed rank's output are handed on; the kernel quotes a choice of them.
_TAIL_LINES = 200


@dataclass(frozen=True)
class Source:
    """Something to poll: a descriptor and what to do when it can be read."""

    fd: int
    ready: Callable[[], None]


class Run:
    """A run, from its submission to its last message.

    Args:
        submit: What was asked for.
        link: The pipes and sockets of its processes.
        directory: The run's own directory; removed at the end.
        send: Sends a message to the kernel that submitted it.
        pids: Of the ranks that are forked already.
        is_resumed: Whether the ranks were kept from an earlier run.
    """

    def __init__(
        self,
        submit: Submit,
        link: RunLink,
        directory: Path,
        send: Callable[[Message], None],
        *,
        pids: Mapping[int, int] = MappingProxyType({}),
        is_resumed: bool = False,
    ) -> None:
        self.id = submit.task.run_id
        self.num_ranks = submit.task.num_ranks
        #: Ranks that are kept and do not run this cell.
        self._bystanders = set(range(self.num_ranks)).difference(submit.task.ranks or range(self.num_ranks))
        self.state = RunState(
            self.num_ranks,
            submit.grace_s,
            time.monotonic(),
            submit.timeout_s,
            keep=submit.task.keep,
            is_resumed=is_resumed,
        )
        self.log = OutputLog(directory.parent)
        self.pids = [0] * self.num_ranks
        #: Somebody takes what comes; nobody may, while a run goes on by itself.
        self.is_attached = not submit.task.is_detached
        self.is_detached = submit.task.is_detached
        #: What came home while nobody was there.
        self._home: HomeArrived | None = None
        self._arrived: HomeArrived | None = None
        #: No process of the run is left.
        self.over = False
        #: The kernel has been sent the end of the run, and all output before it.
        self.is_told = False
        self.link = link
        self.directory = directory
        #: How long kept ranks wait, in seconds.
        self.idle_s = submit.idle_s
        self._forgotten: set[int] = set()
        self._adoptions = b""
        self._send = send
        self._shown = None if submit.show is None else frozenset(submit.show)
        self._cursor = 0
        self._unseen_bytes = 0
        self._ended: RunEnded | None = None
        self._parcel_fd = -1
        #: Parcels of values that the kernel has not loaded yet, by rank.
        self._result_fds: dict[int, int] = {}
        #: Records that the kernel cannot load.
        self._excluded: list[str] = []
        self._oom_kills = oom_kills()
        #: What prepares its data, if something does.
        self.delivery: Delivery | None = None
        self._own_zygote_is_over = False
        for part in link.parts:
            part.listener = self
        for rank, pid in pids.items():
            self._forked(rank, pid)

    # -- what to poll --------------------------------------------------------------------------------------------

    def sources(self) -> Iterator[Source]:
        """Everything that can become readable."""
        if self.over:
            return
        if not self._own_zygote_is_over:
            yield Source(self.link.channel.fileno(), lambda: self.hear_zygote(self.link.channel))
        yield from self.rank_sources()
        if self.delivery is not None:
            yield from self.delivery.sources()

    def deliver(self, delivery: Delivery) -> None:
        """Take over the delivery that was prepared for it: from here on it ends with the run."""
        self.delivery = delivery
        delivery.follow(
            lambda kind, data: self.log.append(
                0, "stdout" if kind == "stdout" else "stderr", data, sealed=self._cursor
            ),
            lambda text: self._send(Notice(self.id, text)),
            lambda reason: self._do(self.state.delivery_lost(reason, time.monotonic())),
        )

    def _end_delivery(self) -> list[str]:
        """End the delivery; returns what there is to say of it."""
        if self.delivery is None:
            return []
        delivery, self.delivery = self.delivery, None
        summary = delivery.final_summary()
        delivery.close()
        return summary

    def rank_sources(self) -> Iterator[Source]:
        """What comes from the ranks themselves."""
        now = time.monotonic()
        for rank in self.link.ranks:
            if rank.quiet_until > now and not self.state.concluded:
                if rank.channel is not None and rank.channel.fileno() >= 0:
                    yield Source(rank.channel.fileno(), lambda rank=rank: self._hear_rank(rank))  # type: ignore[misc]
                continue
            if rank.stdout_fd >= 0:
                yield Source(rank.stdout_fd, lambda rank=rank: self._read_pipes(rank))  # type: ignore[misc]
            if rank.stderr_fd >= 0:
                yield Source(rank.stderr_fd, lambda rank=rank: self._read_pipes(rank))  # type: ignore[misc]
            if rank.channel is not None and rank.channel.fileno() >= 0:
                yield Source(rank.channel.fileno(), lambda rank=rank: self._hear_rank(rank))  # type: ignore[misc]

    def deadline(self) -> float | None:
        """Seconds until :meth:`tick` is due, or output has gathered for long enough."""
        now = time.monotonic()
        gathered = [rank.quiet_until - now for rank in self.link.ranks if rank.quiet_until > now and rank.has_pipes]
        due = self.state.next_deadline(now)
        return min(gathered if due is None else [due, *gathered], default=None)

    def tick(self) -> None:
        """Look at the clock."""
        self._do(self.state.tick(time.monotonic()))

    # -- the kernel ----------------------------------------------------------------------------------------------

    def obey(self, message: Message) -> None:
        """Take a message of the kernel that is about this run."""
        now = time.monotonic()
        if isinstance(message, Interrupt):
            self._do(self.state.interrupt(message.level, now))
        elif isinstance(message, OutputTaken):
            self._unseen_bytes = max(0, self._unseen_bytes - message.size_bytes)
            self.send_output()
        elif isinstance(message, HomeTaken):
            self._close_parcel()
            self._adoptions = message.adoptions
            self._do(self.state.home_taken(now))
        elif isinstance(message, HomeRefused):
            self._close_parcel()
            self._excluded = message.exclude
            self._do(self.state.home_refused(now))
        elif isinstance(message, ResultTaken):
            self._close_result(message.rank)
        elif isinstance(message, InputReply):
            self._tell((message.rank,), InputLine(message.text))
        elif isinstance(message, Abandon):
            # Nobody takes output any more, and nobody is told how it ended.
            self.is_told = True
            for rank in list(self._result_fds):
                self._close_result(rank)
            self._do(self.state.abandoned(now))

    def send_output(self) -> None:
        """Send what the kernel has room for, then the end of the run."""
        if self.is_told or not self.is_attached:
            # Nobody is there; or a process that outlived the run still writes: that is kept, and not shown.
            return
        while self._cursor < len(self.log) and self._unseen_bytes < _WINDOW_BYTES:
            index, self._cursor = self._cursor, self._cursor + 1
            rank = self.log.rank_of(index)
            if self._shown is not None and rank not in self._shown:
                continue
            piece = self.log.read(index)
            self._unseen_bytes += len(piece.data)
            kind: type[Output | Display] = Output if piece.is_stream else Display
            self._send(kind(self.id, rank, piece.kind, piece.data))
        if self._ended is not None and self._cursor == len(self.log):
            self._send(self._ended)
            self._ended, self.is_told = None, True

    # -- processes -----------------------------------------------------------------------------------------------

    def hear_zygote(self, channel: Channel[FromRunZygote] | RemoteChannel) -> None:
        """Take what a run zygote says, of this machine or of another."""
        if self.over:
            return
        try:
            for message, _ in channel.receive_available():
                if isinstance(message, RankForked):
                    self._forked(message.rank, message.pid)
                elif isinstance(message, RankExited):
                    self._rank_exited(message)
                elif isinstance(message, AgentExited):
                    self._agent_exited(message, channel)
                elif isinstance(message, RunNotice):
                    self._send(Notice(self.id, message.text))
                elif isinstance(message, RunOver):
                    self._part_over(channel)
        except (ChannelClosedError, msgspec.MsgspecError):
            self._part_over(channel)

    def hear_rank(self, rank: int) -> None:
        """Take what a rank on another machine says."""
        self._hear_rank(self.link.ranks[rank])

    def take_output(self, rank: int, kind: str, data: bytes) -> None:
        """Take what a rank on another machine has written."""
        self.log.append(rank, "stdout" if kind == "stdout" else "stderr", data, sealed=self._cursor)
        self.send_output()

    def take_notice(self, text: str) -> None:
        """Pass on what the user should know of another machine's part."""
        self._send(Waiting(text, self.id))

    def _agent_exited(self, message: AgentExited, channel: Channel[FromRunZygote] | RemoteChannel) -> None:
        part = next((part for part in self.link.parts if part.zygote is channel), None)
        ranks = self.link.own_ranks if part is None else part.ranks
        # On another machine than the first, it may be through before others are.
        if part is None or message.exit_code or any(self.state.phases[each.rank] in ALIVE for each in ranks):
            self._do(self.state.agent_exited(message.exit_code, time.monotonic()))

    def _part_over(self, channel: Channel[FromRunZygote] | RemoteChannel) -> None:
        """No process of the run is left on a machine."""
        if channel is self.link.channel:
            self._own_zygote_is_over = True
        else:
            for part in self.link.parts:
                if part.zygote is channel:
                    part.is_over = True
        if self._own_zygote_is_over:
            # Where the ranks meet is gone; what is left elsewhere is of no use.
            for part in self.link.parts:
                part.close()
        if self._own_zygote_is_over and all(part.is_over for part in self.link.parts):
            self._finish()
        elif not self.state.concluded:
            self._do(self.state.processes_lost("the processes of the run ended", time.monotonic()))

    def _forked(self, rank: int, pid: int) -> None:
        self.pids[rank] = pid
        self._do(self.state.rank_forked(rank, time.monotonic()))

    def _rank_exited(self, message: RankExited) -> None:
        rank = self.link.ranks[message.rank]
        # What it said before its end counts: it may have failed, or be done, in good order.
        self._hear_rank(rank)
        self._read_pipes(rank)
        part = next((part for part in self.link.parts if any(each is rank for each in part.ranks)), None)
        if part is None:
            hint = death_hint(message.exit_code, oom_kills() - self._oom_kills)
        else:
            hint = part.lost or f"on {part.machine}"
        self._do(self.state.rank_exited(message.rank, message.exit_code, hint, time.monotonic()))

    # -- ranks ---------------------------------------------------------------------------------------------------

    def _read_pipes(self, rank: RankLink) -> None:
        """Take what is in a rank's pipes; a bounded amount, so that one loud rank does not keep the others waiting."""
        size = 0
        for name, kind in (("stdout_fd", "stdout"), ("stderr_fd", "stderr")):
            for _ in range(_READS_AT_ONCE):
                fd = getattr(rank, name)
                if fd < 0:
                    break
                try:
                    data = os.read(fd, _READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    os.close(fd)
                    setattr(rank, name, -1)
                    break
                size += len(data)
                self.log.append(rank.rank, kind, data, sealed=self._cursor)
        is_shown = self._shown is None or rank.rank in self._shown
        rank.note_read(size, time.monotonic(), _GATHER_S if is_shown else _GATHER_UNSEEN_S)
        self.send_output()

    def _hear_rank(self, rank: RankLink) -> None:
        if rank.channel is None:
            # Something that was handled earlier in the same turn has closed it.
            return
        channel: Channel[object] = rank.channel  # type: ignore[assignment]
        try:
            for message, descriptors in channel.receive_available():
                self._take(rank, message, descriptors)
                for fd in descriptors:
                    os.close(fd)
        except ChannelClosedError:
            channel.close()
            rank.channel = None
        except msgspec.MsgspecError as error:
            self._stop_listening(rank, error)

    def _stop_listening(self, rank: RankLink, error: Exception) -> None:
        """Give up a rank whose code wrote into the socket that is ours; it ends when it finds the socket closed."""
        text = f"taas: rank {rank.rank} sent what is no message ({error}); it is not listened to any further\n"
        self.log.append(rank.rank, "stderr", text.encode(), sealed=self._cursor)
        if rank.channel is not None:
            rank.channel.close()
            rank.channel = None

    def _take(self, rank: RankLink, message: object, descriptors: list[int]) -> None:
        """Carry out what a rank says; takes the descriptors that it keeps off the list."""
        now = time.monotonic()
        if isinstance(message, RankDisplay):
            # The rank has waited until its pipes were empty; what is in them now was written afterwards.
            self.log.append(rank.rank, message.kind, message.content, sealed=self._cursor)
            self.send_output()
        elif isinstance(message, CellStarted):
            self._do(self.state.rank_started(rank.rank, now))
        elif isinstance(message, CellFinished):
            self._read_pipes(rank)
            self._do(self.state.rank_finished(rank.rank, message.left_out, now))
        elif isinstance(message, CellFailed):
            self._read_pipes(rank)
            report = msgspec.structs.replace(message.report, rank=rank.rank)
            self._do(self.state.rank_failed(report, message.left_out, now))
        elif rank.rank == 0:
            self._take_from_rank_0(rank, message, descriptors)
        elif isinstance(message, RankResult):
            self._announce_result(rank.rank, message, descriptors)
        elif isinstance(message, RankResting):
            self._note_rest(rank.rank, message)
        elif isinstance(message, RankInput):
            # Which rank asks could not be seen in a front end; the rank raises EOFError.
            rank.send(InputLine(None))

    def _take_from_rank_0(self, rank: RankLink, message: object, descriptors: list[int]) -> None:
        """Carry out what only rank 0 has a say in."""
        if isinstance(message, RankInput) and (self.state.concluded or not self.is_attached):
            rank.send(InputLine(None))
        elif isinstance(message, RankInput):
            self._read_pipes(rank)
            self._send(InputRequest(self.id, rank.rank, message.prompt, message.password))
        elif isinstance(message, HomeFailed):
            self._do(self.state.home_failed(message.reason, time.monotonic()))
        elif isinstance(message, HomeProgress):
            self._send(TransferProgress(self.id, message.done_bytes, message.total_bytes))
        elif isinstance(message, RankResting):
            self._note_rest(0, message)
        elif isinstance(message, RankHome) and descriptors and self.state.awaits_home:
            self._announce_home(message, descriptors.pop(0))

    def _note_rest(self, rank: int, message: RankResting) -> None:
        self._forgotten.update(message.forgotten)
        self._do(self.state.rank_rested(rank, time.monotonic()))

    def _announce_home(self, message: RankHome, parcel_fd: int) -> None:
        self._close_parcel()
        self._parcel_fd = parcel_fd
        parcel = MemoryFile(os.getpid(), parcel_fd, message.size_bytes)
        arrived = HomeArrived(self.id, parcel, message.not_home, message.unwrapped)
        now = time.monotonic()
        self._do(self.state.home_arrived(now))
        self._arrived = arrived
        if self.is_attached:
            self._send(arrived)
        else:
            # It is safe here, so rank 0 may go.
            self._home = arrived
            self._do(self.state.home_taken(now))

    def leave(self) -> None:
        """Nobody takes what comes any more; the run goes on."""
        self.is_attached = False
        if self.state.home is HomePhase.ARRIVED:
            self._home = self._arrived
            self._do(self.state.home_taken(time.monotonic()))

    def attach(self) -> None:
        """Have somebody take what comes from now on, and all that has come."""
        self.is_attached, self._cursor, self._unseen_bytes = True, 0, 0
        if self._home is not None:
            self._send(self._home)
        self.send_output()

    def _announce_result(self, rank: int, message: RankResult, descriptors: list[int]) -> None:
        self._close_result(rank)
        parcel = None
        if descriptors:
            self._result_fds[rank] = descriptors.pop(0)
            parcel = MemoryFile(os.getpid(), self._result_fds[rank], message.size_bytes)
        self._send(ResultArrived(self.id, rank, parcel, message.reason))

    def _close_result(self, rank: int) -> None:
        fd = self._result_fds.pop(rank, -1)
        if fd >= 0:
            os.close(fd)

    @property
    def is_done(self) -> bool:
        """Whether nothing of the run is left to do: its processes are gone, and the kernel has everything."""
        return self.over and self.is_told and not self._result_fds

    def _close_parcel(self) -> None:
        if self._parcel_fd >= 0:
            os.close(self._parcel_fd)
            self._parcel_fd = -1

    # -- instructions --------------------------------------------------------------------------------------------

    def _do(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Signal):
                self.link.send(SignalRanks(list(instruction.ranks), int(instruction.signum)))
            elif isinstance(instruction, Abort):
                self._tell(instruction.ranks, AbortCollectives())
            elif isinstance(instruction, SettleRanks):
                settle = Settle(self.state.home is HomePhase.TAKEN, self._adoptions)
                self._tell(tuple(range(self.num_ranks)), settle)
            elif isinstance(instruction, Release):
                self._tell(instruction.ranks, Exit())
            elif isinstance(instruction, RescueHome):
                self._tell((0,), Rescue())
            elif isinstance(instruction, PackHomeAgain):
                self._tell((0,), PackAgain(self._excluded))
            elif isinstance(instruction, AnnounceStarted):
                self._send(RunStarted(self.id, self.pids))
            elif isinstance(instruction, Conclude):
                self._conclude()

    def _tell(self, ranks: tuple[int, ...], message: Message) -> None:
        for rank in ranks:
            if 0 <= rank < self.num_ranks:
                self.link.ranks[rank].send(message)

    def _conclude(self) -> None:
        delivery = self._end_delivery()
        if self.state.stays:
            self.over = True
            self._close_parcel()
        else:
            self.link.send(EndRun())
        for rank in self.link.ranks:
            self._read_pipes(rank)
        state = self.state
        failure, death, failures, deaths = choose_cause(list(state.failures.values()), list(state.deaths.values()))
        if state.stop_cause in (StopCause.INTERRUPT, StopCause.TIMEOUT):
            # Whoever died while it was being stopped is no cause. Where rank 0 was tells most.
            failure, death = state.failures.get(0, failure), None
            failures, deaths = [], list(state.deaths.values())
        guilty = failure.rank if failure is not None else death.rank if death is not None else None
        is_hidden = guilty is not None and self._shown is not None and guilty not in self._shown
        self._ended = RunEnded(
            run_id=self.id,
            outcome=state.outcome,
            seconds=time.monotonic() - state.started_at,
            failure=failure,
            death=death,
            other_failures=failures,
            other_deaths=deaths,
            late_deaths=state.late_deaths,
            left_out=state.left_out,
            tail=self.log.tail(guilty, _TAIL_LINES) if is_hidden and guilty is not None else "",
            home=state.home.value == "taken",
            detail=state.detail or state.home_detail,
            hint=uneven_hint(failure, set(state.done_at) - set(state.failures) - self._bystanders),
            kept_id=self.directory.name if state.stays else "",
            group_is_broken=state.group_is_broken,
            forgotten=sorted(self._forgotten),
            delivery=delivery,
        )
        if not self.is_attached:
            self._send(RanksGone(self.id))
        self.send_output()

    def abandon(self) -> None:
        """The kernel has gone: end everything at once."""
        self._end_delivery()
        self.link.send(EndRun())

    def _finish(self) -> None:
        """All processes have gone."""
        if not self.over:
            for rank in self.link.ranks:
                self._hear_rank(rank)
                self._read_pipes(rank)
            # Nothing happens where the run had been concluded, as it should have been.
            self._do(self.state.processes_lost("the processes of the run ended", time.monotonic()))
            self.over = True
            if self._home is None:
                self._close_parcel()
            self.link.close()
            with contextlib.suppress(OSError):
                shutil.rmtree(self.directory)
            self.send_output()
