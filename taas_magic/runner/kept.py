"""Ranks that stay between cells: watched while they wait, given the next cell, and ended."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.runner.run import Run, Source
from taas_magic.units import format_exit, format_seconds
from taas_magic.wire import Exit
from taas_magic.wire_zygote import AgentExited, EndRun, FromRunZygote, RankExited, RunOver

if TYPE_CHECKING:
    from taas_magic.runner.parts import RemoteChannel

#: From the permission to end until what is left is killed: functions that run at exit take their time.
_EXIT_PATIENCE_S = 5.0


@dataclass
class KeptRanks:
    """The ranks of a run that is over.

    Attributes:
        last: The run; it takes what the ranks still write.
        ended: Why they have ended, or are ending; "" while they wait.
    """

    last: Run
    ended: str = ""
    is_gone: bool = False
    #: The kernel asked for their end, and waits until what they had is free.
    is_asked_for: bool = False
    _exited: set[int] = field(default_factory=set)
    _since: float = field(default_factory=time.monotonic)
    _ending_since: float | None = None

    def __post_init__(self) -> None:
        for part in self.last.link.parts:
            part.listener = self

    @property
    def id(self) -> str:
        """The id by which the kernel knows them."""
        return self.last.directory.name

    @property
    def remaining_s(self) -> float:
        """Seconds until they end by themselves."""
        return max(0.0, self._since + self.last.idle_s - time.monotonic())

    def sources(self) -> Iterator[Source]:
        """Everything that can become readable."""
        if self.is_gone:
            return
        yield Source(self.last.link.channel.fileno(), lambda: self.hear_zygote(self.last.link.channel))
        yield from self.last.rank_sources()

    def tick(self) -> None:
        """Look at the clock."""
        if not self.ended and self.remaining_s == 0:
            self.release(f"no cell came for {format_seconds(self.last.idle_s)}")
        if self._ending_since is not None and time.monotonic() > self._ending_since + _EXIT_PATIENCE_S:
            self.last.link.send(EndRun())

    def release(self, reason: str) -> None:
        """Let the ranks end."""
        if self.ended:
            return
        self.ended, self._ending_since = reason, time.monotonic()
        for rank in self.last.link.ranks:
            rank.send(Exit())

    def kill(self) -> None:
        """End them at once."""
        self.last.link.send(EndRun())

    def hear_rank(self, rank: int) -> None:
        """Take what a rank on another machine says."""
        self.last.hear_rank(rank)

    def take_output(self, rank: int, kind: str, data: bytes) -> None:
        """Take what a rank on another machine has written."""
        self.last.take_output(rank, kind, data)

    def take_notice(self, text: str) -> None:
        """Pass on what the user should know of another machine's part."""
        self.last.take_notice(text)

    def hear_zygote(self, channel: Channel[FromRunZygote] | RemoteChannel) -> None:
        """Take what a run zygote says, of this machine or of another."""
        try:
            for message, _ in channel.receive_available():
                if isinstance(message, RankExited):
                    self._note_exit(message)
                elif isinstance(message, AgentExited) and self._ending_since is None:
                    self._lose("their agent ended")
                elif isinstance(message, RunOver):
                    self._part_over(channel)
        except (ChannelClosedError, msgspec.MsgspecError):
            self._part_over(channel)

    def _part_over(self, channel: Channel[FromRunZygote] | RemoteChannel) -> None:
        link = self.last.link
        for part in link.parts:
            if part.zygote is channel:
                part.is_over = True
                self._lose(part.lost or f"their processes on {part.machine} ended")
        if channel is link.channel:
            for part in link.parts:
                part.close()
            self._finish()

    def _note_exit(self, message: RankExited) -> None:
        self._exited.add(message.rank)
        if self._ending_since is None:
            self._lose(f"rank {message.rank} {format_exit(message.exit_code)} between two cells")
        elif len(self._exited) == self.last.num_ranks:
            self.last.link.send(EndRun())

    def _lose(self, reason: str) -> None:
        """One of them has ended: the others are of no use without it."""
        if not self.ended:
            self.ended = reason
        self.last.link.send(EndRun())

    def _finish(self) -> None:
        self.ended = self.ended or "their processes ended"
        if not self.is_gone:
            self.is_gone = True
            self.last.link.close()
            with contextlib.suppress(OSError):
                shutil.rmtree(self.last.directory)
