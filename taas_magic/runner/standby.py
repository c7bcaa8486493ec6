"""Keeps the processes of the next run forked and waiting, so that a cell does not wait for forks.

The next run most likely has as many ranks as the last one. Its run zygote, agent and ranks are forked while nothing
runs; they cost a few megabytes each, since they share the zygote's memory. If another run comes, they are let go.
"""

from __future__ import annotations

import msgspec

from taas_magic.channel import ChannelClosedError
from taas_magic.runner.zygote_link import Meeting, PreloadedZygote, RunLink, ZygoteLink
from taas_magic.wire_zygote import EndRun, GuardedProject, RankForked


class Standby:
    """The processes of a run that may come."""

    def __init__(self, zygote: ZygoteLink) -> None:
        self._zygote = zygote
        self._link: RunLink | None = None
        self._source: PreloadedZygote | None = None
        self._pids: dict[int, int] = {}
        #: How many ranks the next run is expected to have; 0 before the first.
        self._expected_ranks = 0
        #: The project of the last run.
        self._guarded: GuardedProject | None = None
        #: What its ranks were to get besides their task.
        self._meeting = Meeting()

    @property
    def fileno(self) -> int | None:
        """What to poll for :meth:`hear`."""
        return None if self._link is None else self._link.channel.fileno()

    def hear(self) -> None:
        """Note what the waiting processes say of themselves; any that ends makes them useless."""
        if self._link is None:
            return
        try:
            for message, _ in self._link.channel.receive_available():
                if not isinstance(message, RankForked):
                    self.discard()
                    return
                self._pids[message.rank] = message.pid
        except (ChannelClosedError, msgspec.MsgspecError):
            self.discard()

    def take(
        self, num_ranks: int, source: PreloadedZygote | None, guarded: GuardedProject | None, meeting: Meeting
    ) -> tuple[RunLink, dict[int, int]]:
        """Processes for a run: those that wait, if they fit, else new ones; with the pids that are known.

        Raises:
            OSError: if new ones cannot be had.
        """
        fits = self._meeting == meeting and self._source is source
        self._expected_ranks, self._guarded, self._meeting = num_ranks, guarded, meeting
        self.hear()
        link, pids = self._link, self._pids
        if link is not None and len(link.ranks) == num_ranks and fits:
            self._link, self._pids = None, {}
            return link, pids
        self.discard()
        return self._zygote.prepare_run(num_ranks, source, guarded, meeting), {}

    def advance(self, source: PreloadedZygote | None) -> None:
        """Called while nothing runs: have processes wait that are forked from ``source``."""
        if self._link is not None and self._source is not source:
            self.discard()
        if self._link is None and self._expected_ranks:
            try:
                self._link = self._zygote.prepare_run(self._expected_ranks, source, self._guarded, self._meeting)
                self._source = source
            except OSError:
                # It was only to save time. The run that comes will say what is lacking.
                self._expected_ranks = 0

    def discard(self) -> None:
        """Let the waiting processes go."""
        if self._link is not None:
            self._link.send(EndRun())
            self._link.close()
        self._link, self._pids = None, {}
