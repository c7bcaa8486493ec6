"""The run zygote: parent of one run's agent and ranks, subreaper of everything they start.

It has one thread and only waits: for orders of the runner (signals, the end), for orders of the agent (fork a rank),
and for children that end. When the runner goes, so does all that descends from here.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import setproctitle

from taas_magic import processes
from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.rank import landlock, rulesets
from taas_magic.rank.writes import degraded_notice, writable_for_all
from taas_magic.wire_base import Message
from taas_magic.wire_zygote import (
    AgentExited,
    EndRun,
    FromAgent,
    GuardedProject,
    PrepareRun,
    RankDescriptors,
    RankExited,
    RankForked,
    RunBegins,
    RunNotice,
    RunOver,
    SignalRanks,
    Spawn,
    StopRanks,
    ToRunZygote,
)


def serve(control: socket.socket) -> None:
    """Serve one run; returns when it is over and no process of it is left."""
    setproctitle.setproctitle("taas: standby")
    processes.become_subreaper()
    zygote = _RunZygote(Channel(control, ToRunZygote))
    try:
        zygote.loop()
    finally:
        processes.kill_descendants()
        with contextlib.suppress(ChannelClosedError):
            zygote.runner.send(RunOver())


def _prepare_ruleset(guarded: GuardedProject) -> None:
    writable = writable_for_all(guarded.environment, guarded.writable, Path(guarded.run_dirs))
    # Whatever is wrong with it, a rank that needs it will say.
    with contextlib.suppress(OSError):
        rulesets.prepare(Path(guarded.project), writable)


@dataclass
class _RunZygote:
    runner: Channel[ToRunZygote]
    agent: Channel[FromAgent] | None = None
    agent_pid: int = 0
    #: stdout, stderr and control socket of each rank.
    descriptors: dict[int, list[int]] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    ended: bool = False

    def loop(self) -> None:
        self._child_watch = processes.ChildWatch()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.runner.fileno(), selectors.EVENT_READ, self._hear_runner)
        self._selector.register(self._child_watch, selectors.EVENT_READ, self._hear_children)
        while not self.ended:
            for key, _ in self._selector.select():
                key.data()

    # -- the runner ----------------------------------------------------------------------------------------------

    def _hear_runner(self) -> None:
        try:
            for message, descriptors in self.runner.receive_available():
                self._obey(message, descriptors)
        except ChannelClosedError:
            self.ended = True

    def _obey(self, message: ToRunZygote, descriptors: list[int]) -> None:
        if isinstance(message, RankDescriptors):
            self.descriptors[message.rank] = descriptors
        elif isinstance(message, PrepareRun):
            if message.guarded is not None and landlock.abi_version() > 0:
                _prepare_ruleset(message.guarded)
            self._fork_agent(message, descriptors)
        elif isinstance(message, RunBegins):
            setproctitle.setproctitle(f"taas: run {message.run_id}")
            if message.guards_writes and landlock.abi_version() == 0:
                self.runner.send(RunNotice(degraded_notice()))
        elif isinstance(message, SignalRanks):
            for rank in message.ranks:
                if rank in self.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self.pids[rank], message.signal)
        elif isinstance(message, EndRun):
            self.ended = True

    # -- the agent -----------------------------------------------------------------------------------------------

    def _fork_agent(self, order: PrepareRun, listener: list[int]) -> None:
        ours, theirs = Channel.pair()
        self.agent_pid = self._fork(lambda: self._run_agent(order, theirs, listener))
        theirs.close()
        for fd in listener:
            os.close(fd)
        self.agent = Channel(ours, FromAgent)
        self._selector.register(self.agent.fileno(), selectors.EVENT_READ, self._hear_agent)

    def _run_agent(self, order: PrepareRun, sock: socket.socket, listener: list[int]) -> None:
        from taas_magic.rank.agent import run_agent

        self._close_descriptors()
        run_agent(order, sock, listener)

    def _hear_agent(self) -> None:
        assert self.agent is not None
        try:
            for message, _ in self.agent.receive_available():
                if isinstance(message, Spawn):
                    self._fork_rank(message)
                elif isinstance(message, StopRanks):
                    for pid in self.pids.values():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
        except ChannelClosedError:
            self._selector.unregister(self.agent.fileno())

    def _fork_rank(self, spawn: Spawn) -> None:
        self.pids[spawn.rank] = self._fork(lambda: self._run_rank(spawn))
        self._tell(RankForked(spawn.rank, self.pids[spawn.rank]))

    def _run_rank(self, spawn: Spawn) -> None:
        from taas_magic.rank import entry

        stdout, stderr, control = self.descriptors.pop(spawn.rank)
        self._close_descriptors()
        if self.agent is not None:
            self.agent.close()
        entry.run_rank(spawn, stdout, stderr, socket.socket(fileno=control))

    def _fork(self, body: Callable[[], None]) -> int:
        """Fork a process of the run, which has nothing of ours but what ``body`` uses."""
        parent = os.getpid()

        def be_child() -> None:
            self._child_watch.close()
            self._selector.close()
            processes.die_with_parent(parent)
            self.runner.close()
            body()

        return processes.fork(be_child)

    def _close_descriptors(self) -> None:
        """Close the ends that belong to other processes of the run."""
        for fds in self.descriptors.values():
            for fd in fds:
                os.close(fd)

    # -- children ------------------------------------------------------------------------------------------------

    def _hear_children(self) -> None:
        self._child_watch.clear()
        for pid, exit_code in processes.reap():
            if pid == self.agent_pid:
                self.runner.send(AgentExited(exit_code))
                continue
            rank = next((rank for rank, its_pid in self.pids.items() if its_pid == pid), None)
            if rank is not None:
                del self.pids[rank]
                self._tell(RankExited(rank, exit_code))

    def _tell(self, message: Message) -> None:
        for channel in (self.runner, self.agent):
            if channel is not None:
                with contextlib.suppress(ChannelClosedError, OSError):
                    channel.send(message)
