"""A run in the runner, with real pipes and sockets, and ranks that say what no rank should say."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.runner.run import Run
from taas_magic.runner.zygote_link import RankLink, RunLink
from taas_magic.wire import (
    Abandon,
    CellFailed,
    CellFinished,
    CellStarted,
    CellTask,
    FailureReport,
    FromRank,
    HomeArrived,
    HomeRefused,
    HomeTaken,
    InputReply,
    Interrupt,
    Output,
    OutputTaken,
    PackAgain,
    RankHome,
    RankInput,
    RunEnded,
    RunStarted,
    Submit,
    ToRank,
)
from taas_magic.wire_base import MemoryFile, Message
from taas_magic.wire_zygote import (
    EndRun,
    FromRunZygote,
    RankExited,
    RankForked,
    RunOver,
    SignalRanks,
    ToRunZygote,
)

M = TypeVar("M")
TASK = CellTask(
    run_id="r",
    source="",
    execution_count=1,
    num_ranks=2,
    project="/nowhere",
    writable=[],
    writes="rank0",
    environment={},
    other_names=[],
    ignored_names=[],
)


class Other:
    """The other ends of a run: its zygote, its ranks, and the kernel that is told things."""

    def __init__(self, directory: Path) -> None:
        ours, theirs = Channel.pair()
        self.zygote: Channel[ToRunZygote] = Channel(theirs, ToRunZygote)
        self.sockets: list[socket.socket] = []
        self.ranks: list[Channel[ToRank]] = []
        self.writers: list[int] = []
        link = RunLink(Channel(ours, FromRunZygote), [self._rank(rank) for rank in range(TASK.num_ranks)])
        self.told: list[Message] = []
        run_directory = directory / "run-r"
        run_directory.mkdir()
        submit = Submit(TASK, MemoryFile(1, 1, 1), show=[0], grace_s=5.0)
        self.run = Run(submit, link, run_directory, self.told.append)

    def _rank(self, rank: int) -> RankLink:
        ours, theirs = Channel.pair()
        self.sockets.append(theirs)
        self.ranks.append(Channel(theirs, ToRank))
        readers = []
        for _ in range(2):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            readers.append(reader)
            self.writers.append(writer)
        stdout_fd, stderr_fd = readers
        return RankLink(rank, stdout_fd, stderr_fd, Channel(ours, FromRank))

    def turn(self) -> None:
        """One turn of the runner's loop."""
        for source in list(self.run.sources()):
            source.ready()
        self.run.tick()

    def say(self, rank: int, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        self.ranks[rank].send(message, descriptors)
        self.turn()

    def start(self) -> None:
        for rank in range(TASK.num_ranks):
            self.zygote.send(RankForked(rank, 1000 + rank))
        self.turn()
        for rank in range(TASK.num_ranks):
            self.say(rank, CellStarted())

    def ordered(self, kind: type[M]) -> list[M]:
        """What the run zygote was ordered to do."""
        return [message for message, _ in self.zygote.receive_available() if isinstance(message, kind)]

    def told_of(self, kind: type[M]) -> list[M]:
        return [message for message in self.told if isinstance(message, kind)]

    def answered(self, rank: int) -> list[ToRank]:
        return [message for message, _ in self.ranks[rank].receive_available()]

    def close(self) -> None:
        self.run._finish()
        self.run.log.close()
        self.zygote.close()
        for channel in self.ranks:
            channel.close()
        for fd in self.writers:
            os.close(fd)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    before = open_descriptors()
    other = Other(tmp_path)
    yield other
    other.close()
    assert open_descriptors() == before
    assert not list(tmp_path.iterdir())


def report(rank: int) -> FailureReport:
    return FailureReport(rank, 0.0, "ValueError", "boo", [], "")


def parcel() -> int:
    return os.memfd_create("test")


def test_a_run_from_start_to_end(other: Other) -> None:
    other.start()
    assert other.told == [RunStarted("r", [1000, 1001])]
    os.write(other.writers[0], b"hello\n")
    os.write(other.writers[2], b"not shown\n")
    other.say(0, CellFinished())
    other.say(1, CellFinished())
    assert other.told_of(Output) == [Output("r", 0, "stdout", b"hello\n")]
    fd = parcel()
    other.say(0, RankHome(3), (fd,))
    os.close(fd)
    (arrived,) = other.told_of(HomeArrived)
    os.close(arrived.parcel.open())
    other.run.obey(HomeTaken("r"))
    for rank in range(2):
        other.zygote.send(RankExited(rank, 0))
    other.turn()
    assert other.ordered(EndRun) == [EndRun()]
    (ended,) = other.told_of(RunEnded)
    assert (ended.outcome, ended.home) == ("ok", True)
    assert other.told[-1] == ended


# -- what no rank should say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [b"hello, world", b"\xff" * 100, b"\x01\x00\x00\x00\x00\x00\xc1", b"\x00\x00\x00\x00\x00\x00"],
    ids=["text", "a size without end", "a frame that is no message", "an empty frame"],
)
def test_garbage_from_a_rank_is_that_ranks_end_alone(other: Other, garbage: bytes) -> None:
    other.start()
    other.sockets[1].sendall(garbage)
    other.turn()
    with pytest.raises(ChannelClosedError):
        other.ranks[1].receive()
    assert "sent what is no message" in other.run.log.tail(1, 1)
    other.say(0, CellFinished())
    assert other.run.state.phases[0].value == "finished"


def test_a_parcel_that_did_not_come_is_that_ranks_end_alone(other: Other) -> None:
    other.start()
    other.say(0, RankHome(3))
    assert not other.told_of(HomeArrived)
    other.say(1, CellFinished())
    assert other.run.state.phases[1].value == "finished"


def test_only_rank_0_brings_home(other: Other) -> None:
    other.start()
    fd = parcel()
    other.say(1, RankHome(3), (fd,))
    os.close(fd)
    assert not other.told_of(HomeArrived)


def test_descriptors_that_nobody_asked_for_are_closed(other: Other) -> None:
    other.start()
    before = open_descriptors()
    fd = parcel()
    for _ in range(10):
        other.say(0, RankInput("?"), (fd,))
    os.close(fd)
    assert open_descriptors() == before


def test_a_rank_speaks_for_itself_alone(other: Other) -> None:
    other.start()
    other.say(1, CellFailed(report(rank=0)))
    assert list(other.run.state.failures) == [1]
    other.say(1, CellFailed(report(rank=60_000)))
    assert list(other.run.state.failures) == [1]


def test_only_rank_0_asks_the_user(other: Other) -> None:
    other.start()
    other.say(1, RankInput("name?"))
    (answer,) = other.answered(1)
    assert getattr(answer, "text", "") is None


# -- what no kernel should say ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [InputReply("r", 60_000, "x"), HomeTaken("r"), HomeRefused("r", []), OutputTaken("r", 2**40)],
    ids=lambda message: type(message).__name__,
)
def test_an_answer_to_nothing_is_harmless(other: Other, message: Message) -> None:
    other.start()
    other.run.obey(message)
    other.turn()
    assert other.run.state.stop_cause is None


def test_home_that_is_refused_is_packed_again_without_it(other: Other) -> None:
    other.start()
    fd = parcel()
    other.say(0, CellFinished())
    other.say(0, RankHome(3), (fd,))
    other.run.obey(HomeRefused("r", ["bind model"]))
    assert PackAgain(["bind model"]) in other.answered(0)
    other.say(0, RankHome(2), (fd,))
    os.close(fd)
    assert len(other.told_of(HomeArrived)) == 2


def test_a_run_that_the_kernel_gave_up_is_ended_and_not_told_of(other: Other) -> None:
    other.start()
    other.run.obey(Abandon("r"))
    assert other.ordered(EndRun) == [EndRun()]
    assert other.run.is_told
    assert not other.told_of(RunEnded)


# -- the end of the processes ----------------------------------------------------------------------------------------


def leave(zygote: Channel[ToRunZygote]) -> None:
    zygote.close()


def report_the_end(zygote: Channel[ToRunZygote]) -> None:
    zygote.send(RunOver())


def talk_garbage(zygote: Channel[ToRunZygote]) -> None:
    zygote._sock.sendall(b"\xff" * 100)


@pytest.mark.parametrize("end", [leave, report_the_end, talk_garbage])
def test_a_run_zygote_that_ends_unasked(other: Other, end: Callable[[Channel[ToRunZygote]], None]) -> None:
    other.start()
    end(other.zygote)
    other.turn()
    assert other.run.over
    (ended,) = other.told_of(RunEnded)
    assert ended.outcome == "lost"
    assert other.run.is_told


def test_what_a_rank_said_last_counts_when_everything_ends(other: Other) -> None:
    other.start()
    other.ranks[1].send(CellFailed(report(1)))
    os.write(other.writers[0], b"last words\n")
    other.zygote.send(RunOver())
    other.turn()
    (ended,) = other.told_of(RunEnded)
    assert (ended.outcome, ended.failure) == ("failed", report(1))
    assert other.told_of(Output) == [Output("r", 0, "stdout", b"last words\n")]


def test_levels_of_interrupts_become_signals(other: Other) -> None:
    other.start()
    for level in (1, 3):
        other.run.obey(Interrupt("r", level))
    assert [order.signal for order in other.ordered(SignalRanks)] == [2, 9]


def test_a_slow_notebook_is_sent_what_it_can_take_and_the_end_last(other: Other) -> None:
    other.start()
    for _ in range(40):
        os.write(other.writers[0], b"x" * 60_000)
        other.turn()
    sent = sum(len(output.data) for output in other.told_of(Output))
    assert 2**20 <= sent < 2 * 2**20
    other.run.obey(Interrupt("r", 3))
    for rank in range(2):
        other.zygote.send(RankExited(rank, -9))
    other.turn()
    assert not other.told_of(RunEnded), "the output comes first"
    other.run.obey(OutputTaken("r", sent))
    other.run.obey(OutputTaken("r", 2**20))
    assert sum(len(output.data) for output in other.told_of(Output)) == 40 * 60_000
    assert isinstance(other.told[-1], RunEnded)
