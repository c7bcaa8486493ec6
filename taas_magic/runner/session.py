"""A session on a machine: a notebook's, or that of a head whose runs have parts here.

The session's own process does the work. This hands on what is said between it, the other side and the other machines
of the pool, gives its runs the machine's GPUs when it is their turn, and knows what was sent already.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from taas_magic.link.connection import Connection
from taas_magic.link.files import File, FileStore, as_received, files_of, to_send
from taas_magic.link.peer import Peer
from taas_magic.runner.gpus import Gpus
from taas_magic.runner.place import Place
from taas_magic.runner.session_process import SessionProcess
from taas_magic.versions import mismatch, own_versions
from taas_magic.wire import (
    Abandon,
    Denied,
    Interrupt,
    KeptEnded,
    Ready,
    RunEnded,
    Submit,
    Waiting,
    Welcome,
)
from taas_magic.wire_machines import (
    BeginPart,
    CloseSession,
    CodeContents,
    CodeReady,
    CodeWanted,
    EndPart,
    FromMachine,
    LeaveSession,
    MachineFree,
    MachineLost,
    MachineState,
    Members,
    OpenSession,
    PartData,
    PartEnded,
    PartNotice,
    RanksGone,
    SessionEnded,
    SessionOpened,
    SyncCode,
    ToMachine,
)

#: A machine that is not heard of for so long is lost. A cable may be out for less.
LOST_S = 8.0
_OPEN_S = 60.0
#: What a run that went on by itself has made is kept for so long.
_KEPT_RESULT_S = 24 * 3600.0
#: Begins the names of parts among those of runs.
_PART = "part "
#: Files that were sent are kept up to so much.
_FILES_BYTES = 8 * 2**30


@dataclass(eq=False)
class Member:
    """Another machine of the pool, as the head sees it."""

    connection: Connection
    since: float = field(default_factory=time.monotonic)
    state: MachineState | None = None
    lost: str = ""


class Session:
    """One session.

    Args:
        order: What was asked for.
        peer: The other side.
        process: The session's process.
        place: The machine.
        gpus: Gives out the machine's GPUs.
    """

    def __init__(
        self, order: OpenSession, peer: Peer[ToMachine], process: SessionProcess, place: Place, gpus: Gpus
    ) -> None:
        self.order = order
        self.peer = peer
        self.process = process
        self._place = place
        self._gpus = gpus
        #: Where the notebook's project is on this machine; "" for where it always is.
        self._project = place.project_of(order.project_id)
        #: Why it is over; None while it is not.
        self.ended: str | None = None
        self._has_opened = False
        keys = order.member_keys or place.keys
        self._members = [Member(Connection(address, keys, peer.store)) for address in order.members]
        #: Of runs: who is asked of the GPUs, by run id; of parts here, by number.
        self._owners: dict[str, object] = {}
        #: Runs in ranks that were kept, and the run that has started those.
        self._resumed: dict[str, str] = {}
        self._part_machines: dict[int, Member] = {}
        #: What is to be said to parts here once they have begun.
        self._queued_parts: dict[int, list[PartData]] = {}
        self._is_ready = False
        #: Runs, and parts of runs, that go on by themselves.
        self.detached: set[str] = set()
        self.is_left = False
        self._left_at = 0.0
        self._store = peer.store
        self._told_free = -1
        for member in self._members:
            member.connection.send(msgspec.structs.replace(order, members=[], lease_s=LOST_S, address=""))
        process.send(Members(order.address or place.address, self._project, [each.name for each in order.members]))

    # -- what to poll --------------------------------------------------------------------------------------------

    def sockets(self) -> Iterator[tuple[Any, Callable[[], None]]]:
        """Everything that can become readable, and what to do then."""
        yield self.process.socket, self.hear_process
        for member in self._members:
            if not member.lost:
                yield member.connection.socket, functools.partial(self._hear_member, member)

    def tick(self) -> None:
        """Look at the clock."""
        now = time.monotonic()
        self.peer.tick(now)
        for member in self._members:
            member.connection.tick()
            if not member.lost:
                self._look_after(member, now)
        self._open_when_ready()
        if self._has_opened and self._gpus.num_free != self._told_free:
            self._told_free = self._gpus.num_free
            self._say(MachineFree(self._told_free))
        if self.ended is None and not self.is_left and now > self.peer.heard_at + self.order.lease_s:
            self._leave(f"nothing was heard of the other side for {self.order.lease_s:.0f} s")
        if self.ended is None and self.is_left and now > self._left_at + _KEPT_RESULT_S:
            self.end("nobody came for what its runs have made")
        if self.ended is None and self.process.has_ended:
            self.end(self.process.last_words())

    def _look_after(self, member: Member, now: float) -> None:
        connection = member.connection
        if connection.broken:
            self._lose(member, connection.broken)
        elif member.state is None and now > member.since + _OPEN_S:
            self._lose(member, f"it did not answer within {_OPEN_S:.0f} s at {connection.machine.address}")
        elif member.state is not None and connection.silent_s > LOST_S:
            self._lose(member, f"nothing was heard of it for {LOST_S:.0f} s")

    # -- the other side ------------------------------------------------------------------------------------------

    def obey(self, message: ToMachine, files: list[File]) -> None:
        """Take what the other side says."""
        if isinstance(message, CloseSession):
            self.end("")
            return
        if isinstance(message, LeaveSession):
            self._leave("")
            return
        if isinstance(message, OpenSession):
            return
        here = as_received(message, files)
        if isinstance(here, Submit):
            self._submit(here)
        elif isinstance(here, BeginPart):
            self._begin_part(here)
        elif isinstance(here, PartData | EndPart) and here.part in self._queued_parts:
            self._hold(here)
        elif isinstance(here, Interrupt | Abandon) and here.run_id in self._owners and self._is_queued(here.run_id):
            self._give_up(here.run_id)
        else:
            self.process.send(here)

    def _say(self, message: Any) -> None:
        """Say something to the other side, with its files, if it has some; nobody hears it while it is left."""
        if not self.is_left:
            self._hand_on(message, self.peer)

    # -- runs that go on by themselves ---------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Whether a run goes on by itself, or has, and nobody has taken up what came of it."""
        return bool(self.detached)

    def _leave(self, reason: str) -> None:
        """Go on alone, if there is something to go on with; a part of a run is nothing without its head."""
        if any(not each.startswith(_PART) for each in self.detached):
            self.is_left, self._left_at = True, time.monotonic()
            self.process.send(LeaveSession())
        else:
            self.end(reason)

    def take_up(self, peer: Peer[ToMachine], order: OpenSession) -> None:
        """Let a notebook have it again."""
        peer.store.close()
        peer.store = self._store
        self.peer, self.order, self.is_left = peer, order, False
        self._has_opened = False
        self._open_when_ready()

    def _hand_on(self, message: Any, to: Peer[ToMachine] | Connection) -> None:
        try:
            message, files = to_send(message, self._store)
        except OSError:
            # Whoever had it has ended meanwhile, and with it the run.
            return
        if isinstance(to, Connection):
            to.send_with_files(message, files) if self._keeps_order(message) else to.send(message)
        elif self._keeps_order(message):
            to.send_with_files(message, files, time.monotonic())
        else:
            to.send(message, time.monotonic())

    @staticmethod
    def _keeps_order(message: Any) -> bool:
        """Whether a message must not overtake those that wait for their files."""
        return bool(files_of(message)) or isinstance(message, RunEnded | BeginPart | PartData | PartEnded | SyncCode)

    # -- runs ----------------------------------------------------------------------------------------------------

    def _submit(self, submit: Submit) -> None:
        run_id = submit.task.run_id
        if submit.task.is_detached:
            self.detached.add(run_id)
        if submit.kept_id:
            # Its ranks have their GPUs.
            self._resumed[run_id] = _run_of(submit.kept_id)
            self.process.send(submit)
            return
        lost = next((member for member in self._used_by(submit) if member.lost), None)
        if lost is not None:
            self._say(Denied(f"{lost.connection.machine.name} is lost: {lost.lost}", run_id))
            return
        count = submit.ranks_of_machines[0] if submit.ranks_of_machines else submit.task.num_ranks
        owner = self._owners[run_id] = _Owner(submit)

        def granted(gpus: list[str]) -> None:
            owner.is_queued = False
            self._say(Waiting("", run_id))
            self.process.send(msgspec.structs.replace(submit, environment_here=self._environment(gpus)))

        self._gpus.ask(owner, count, granted, lambda text: self._say(Waiting(text, run_id)))

    def _used_by(self, submit: Submit) -> list[Member]:
        counts = submit.ranks_of_machines[1:]
        return [member for member, count in zip(self._members, counts, strict=False) if count]

    def _environment(self, gpus: list[str]) -> dict[str, str]:
        """What ranks need to know to use these GPUs, and no others."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if self._place.has_cuda else {}

    def _is_queued(self, run_id: str) -> bool:
        owner = self._owners.get(run_id)
        return isinstance(owner, _Owner) and owner.is_queued

    def _give_up(self, run_id: str) -> None:
        """End a run that has not begun."""
        self._release(run_id)
        self._say(RunEnded(run_id, "interrupted", 0.0, detail="it was stopped while it waited for GPUs"))

    def _release(self, key: str) -> None:
        owner = self._owners.pop(key, None)
        if owner is not None:
            self._gpus.release(owner)

    def _begin_part(self, order: BeginPart) -> None:
        owner = self._owners[f"{_PART}{order.part}"] = object()
        if order.is_detached:
            self.detached.add(f"{_PART}{order.part}")
        held = self._queued_parts[order.part] = []

        def granted(gpus: list[str]) -> None:
            del self._queued_parts[order.part]
            self._say(PartNotice(order.part, ""))
            self.process.send(msgspec.structs.replace(order, environment_here=self._environment(gpus)))
            for message in held:
                self.process.send(message)

        def told(text: str) -> None:
            self._say(PartNotice(order.part, f"{self._place.name}: {text}"))

        self._gpus.ask(owner, order.num_ranks, granted, told)

    def _hold(self, message: PartData | EndPart) -> None:
        """Keep what is said to a part that has not begun, for want of GPUs."""
        if isinstance(message, EndPart):
            del self._queued_parts[message.part]
            self._release(f"{_PART}{message.part}")
            self._say(PartEnded(message.part))
        else:
            self._queued_parts[message.part].append(message)

    # -- the session's process -----------------------------------------------------------------------------------

    def hear_process(self) -> None:
        """Take what the session's process says."""
        try:
            messages = self.process.receive()
        except msgspec.MsgspecError as error:
            self.end(f"the session's process said what is no message: {error}")
            return
        for message in messages:
            if isinstance(message, Welcome):
                continue
            if isinstance(message, Ready):
                self._is_ready = True
                self._open_when_ready()
                continue
            if isinstance(message, RanksGone):
                self._release(message.run_id)
                continue
            if isinstance(message, BeginPart):
                self._hand_to_member(message, self._members[message.machine])
                continue
            if isinstance(message, PartData | EndPart) and message.part in self._part_machines:
                self._hand_to_member(message, self._part_machines[message.part])
                continue
            if isinstance(message, SyncCode | CodeContents) and message.machine:
                self._code_to_member(message)
                continue
            self._note(message)
            self._say(message)

    def _hand_to_member(self, message: BeginPart | PartData | EndPart, member: Member) -> None:
        self._part_machines[message.part] = member
        if member.lost:
            if not isinstance(message, EndPart):
                self.process.send(PartEnded(message.part, f"{member.connection.machine.name} is lost: {member.lost}"))
            return
        self._hand_on(message, member.connection)

    def _code_to_member(self, message: SyncCode | CodeContents) -> None:
        member = self._members[message.machine - 1]
        if member.lost:
            self.process.send(CodeReady(message.sync, "", message.machine))
            return
        self._hand_on(msgspec.structs.replace(message, machine=0), member.connection)

    def _note(self, message: Any) -> None:
        """See which GPUs are free again."""
        if isinstance(message, RunEnded):
            # Told: somebody has taken it up.
            self.detached.discard(message.run_id)
            started_as = self._resumed.pop(message.run_id, message.run_id)
            if not message.kept_id:
                self._release(started_as)
        elif isinstance(message, KeptEnded):
            self._release(_run_of(message.kept_id))
        elif isinstance(message, Denied) and message.run_id:
            self._release(message.run_id)
        elif isinstance(message, PartEnded):
            self._release(f"{_PART}{message.part}")
            self.detached.discard(f"{_PART}{message.part}")

    # -- other machines ------------------------------------------------------------------------------------------

    def _hear_member(self, member: Member) -> None:
        for message, files in member.connection.receive():
            self._take_from_member(member, message, files)

    def _take_from_member(self, member: Member, message: FromMachine, files: list[File]) -> None:
        if isinstance(message, SessionOpened):
            member.state = message.machines[0]
            self._open_when_ready()
        elif isinstance(message, SessionEnded):
            self._lose(member, message.reason or "it has ended the session")
        elif isinstance(message, PartData | PartNotice | PartEnded):
            self.process.send(as_received(message, files))
        elif isinstance(message, MachineFree):
            if member.state is not None:
                member.state = msgspec.structs.replace(member.state, free=message.free)
            if self._has_opened:
                self._say(MachineFree(message.free, member.connection.machine.name))
        elif isinstance(message, CodeWanted | CodeReady):
            machine = self._members.index(member) + 1
            self.process.send(msgspec.structs.replace(message, machine=machine))
        elif isinstance(message, Denied):
            self._lose(member, message.reason)

    def _lose(self, member: Member, reason: str) -> None:
        member.lost = reason
        name = member.connection.machine.name
        for part, its_machine in self._part_machines.items():
            if its_machine is member:
                self.process.send(PartEnded(part, f"{name} is lost: {reason}"))
        member.connection.close()
        if self._has_opened:
            self._say(MachineLost(name, reason))
        else:
            self._open_when_ready()

    def _open_when_ready(self) -> None:
        """Say that the session is open, once the machine and all others are ready, or will not be."""
        if self._has_opened or not self._is_ready or any(not (each.state or each.lost) for each in self._members):
            return
        self._has_opened = True
        self._told_free = self._gpus.num_free
        place = self._place
        own = MachineState(place.name, place.gpus, place.has_cuda, self._project, free=self._told_free)
        others = [
            each.state or MachineState(each.connection.machine.name, [], has_cuda=False, lost=each.lost)
            for each in self._members
        ]
        self._say(SessionOpened(own_versions(), [own, *others]))

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """End the session, and say why."""
        if self.ended is not None:
            return
        self.ended = reason
        self._say(SessionEnded(reason, self._place.name))
        for member in self._members:
            if not member.lost:
                with contextlib.suppress(Exception):
                    member.connection.send(CloseSession())
                member.connection.close()
                member.lost = "the session is over"
        self.process.end()

    def close_now(self) -> None:
        """Let go of everything at once; what its process has started ends with it."""
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Let go of everything; its process has ended."""
        for key in list(self._owners):
            self._release(key)
        self._store.close()
        self.process.close()


@dataclass(eq=False)
class _Owner:
    submit: Submit
    is_queued: bool = True


def _run_of(kept_id: str) -> str:
    """The run that started ranks that are kept."""
    return kept_id.removeprefix("run-")


def refusal(order: OpenSession) -> str:
    """Why a session cannot be opened, as far as versions say; "" where it can."""
    difference = mismatch(order.versions, own_versions())
    return f"versions differ: {difference}" if difference else ""


def new_store() -> FileStore:
    """For the files of a session."""
    return FileStore(_FILES_BYTES)
