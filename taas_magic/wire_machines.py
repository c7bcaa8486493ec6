"""The messages between machines: of sessions of notebooks on them, and of parts of runs that others hold.

See :mod:`taas_magic.wire`, which says what holds for all messages.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from taas_magic.machines.code_scan import FileEntry
from taas_magic.machines.files_home import FileChange
from taas_magic.wire import ToKernel, ToRunner, Versions
from taas_magic.wire_base import MemoryFile, Message, NumRanks, Rank
from taas_magic.wire_zygote import GuardedProject

PartNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
Port = Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
#: What goes back and forth with a rank, or, where the rank is -1, with its run zygote.
PartStream = Literal["stdout", "stderr", "channel"]


class MachineAddress(msgspec.Struct, frozen=True):
    """Where a machine's runner is found."""

    name: str
    #: As ZeroMQ has it: ``tcp://host:port``, or ``ipc://path``.
    address: str
    #: The public key of the runner there.
    key: str


class MachineState(msgspec.Struct, frozen=True):
    """What a machine has."""

    name: str
    #: The GPUs by their UUIDs, or places for ranks on CPU by their numbers.
    gpus: list[str]
    has_cuda: bool
    #: Where its processes find the notebook's project.
    directory: str = ""
    #: Why it cannot be used; "" where it can.
    lost: str = ""
    #: How many of the GPUs nobody has.
    free: int = 0


class SshMachine(msgspec.Struct, frozen=True):
    """A machine on which a runner is started over ssh; None is what the ssh configuration says."""

    name: str
    host: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    address: str | None = None


class GatewayOrder(msgspec.Struct, frozen=True):
    """Kernel to its gateway, as JSON on standard input: which machines the pool has, and how to get to them."""

    pool: str
    owner: str
    lease_s: float
    #: The notebook's public and secret key.
    keys: tuple[str, str]
    #: Machines whose runners are up.
    machines: list[MachineAddress] = []
    #: Machines where runners are to be started.
    ssh: list[SshMachine] = []
    python: str | None = None
    tunnel: bool = False
    gpus: int | None = None
    #: The ssh configuration to use in place of the user's; "" for that.
    ssh_config: str = ""
    project: str = ""
    project_id: str = ""
    #: The run to take up, which goes on by itself.
    attach: str = ""
    #: The most that is sent of the project.
    code_limit_bytes: int = 100 * 2**20


# -- a session -------------------------------------------------------------------------------------------------------


class OpenSession(Message, frozen=True):
    """Opens a session on a machine: for a notebook, or for a part of the runs of another machine's session."""

    versions: Versions
    #: Whose it is, for people.
    owner: str
    #: A machine that was not heard of the other side for so long ends the session.
    lease_s: float
    #: The other machines of the pool; the runs of this session may have parts there.
    members: list[MachineAddress] = []
    #: The public and secret key by which those let this machine in; None: its own.
    member_keys: tuple[str, str] | None = None
    #: By which the project's directory is known on machines; "" where there is none.
    project_id: str = ""
    #: By which the other machines reach this one; "" for what it thinks itself.
    address: str = ""
    #: Take up the session in which this run goes on by itself, in place of a new one.
    attach: str = ""


class SessionOpened(Message, frozen=True):
    """Answers :class:`OpenSession`: the machine itself, and the other ones of the pool."""

    versions: Versions
    machines: list[MachineState]


class SessionEnded(Message, frozen=True):
    """A session is over, or never was, and why; of the machine that is named."""

    reason: str
    machine: str = ""


class MachineLost(Message, frozen=True):
    """The head to the notebook: another machine of the pool is lost; runs that have ranks there fail."""

    machine: str
    reason: str


class MachineFree(Message, frozen=True):
    """How many GPUs of a machine nobody has just now."""

    free: int
    #: Which of the other machines of the pool; "" for the one that says it.
    machine: str = ""


class RanksGone(Message, frozen=True):
    """A session's process to its runner: of a run that goes on by itself no rank is left; its GPUs are free."""

    run_id: str


class Members(Message, frozen=True):
    """A machine's runner to the session that it has begun: where it is, and which other machines there are."""

    #: How others reach this machine.
    address: str
    #: Where the notebook's project is on this machine; "" where it is where it always is.
    project: str = ""
    #: The names of the other machines, in the order of the pool.
    machines: list[str] = []


class LeaveSession(Message, frozen=True):
    """The notebook goes; runs that go on by themselves go on, and the rest ends."""


class CloseSession(Message, frozen=True):
    """The session is not needed any more."""


# -- parts of a run --------------------------------------------------------------------------------------------------


class BeginPart(Message, frozen=True):
    """Head to another machine: fork this part of a run's ranks, which then wait for their task."""

    part: PartNumber
    #: Which of the other machines it goes to, by its place in :class:`Members`.
    machine: PartNumber
    run_id: str
    num_ranks: NumRanks
    first_rank: Rank
    world_size: NumRanks
    node_rank: PartNumber
    num_nodes: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    #: Where the ranks meet.
    master_addr: str
    master_port: Port
    guarded: GuardedProject | None = None
    environment: dict[str, str] = {}
    #: What its ranks get on that machine in addition; that machine's runner says it.
    environment_here: dict[str, str] = {}
    #: The run goes on by itself, and so does the part.
    is_detached: bool = False


class PartData(Message, frozen=True):
    """Something that a rank of a part, or its run zygote, says or is told; files come with it."""

    part: PartNumber
    #: -1 is the run zygote.
    rank: Annotated[int, msgspec.Meta(ge=-1, lt=2**16)]
    stream: PartStream
    data: bytes = b""
    files: list[MemoryFile] = []
    #: Nothing more comes from there.
    is_closed: bool = False


class EndPart(Message, frozen=True):
    """Head to another machine: end whatever is left of a part."""

    part: PartNumber


class PartNotice(Message, frozen=True):
    """To the head: something that the user should know of a part, such as what it waits for."""

    part: PartNumber
    text: str


class PartEnded(Message, frozen=True):
    """To the head: nothing is left of a part. Where that was not to be expected, ``reason`` says why."""

    part: PartNumber
    reason: str = ""


# -- the project's files ---------------------------------------------------------------------------------------------


class SyncCode(Message, frozen=True):
    """The files that the project has now; a machine makes its copy like that."""

    sync: int
    entries: list[FileEntry]
    #: From and to the process of a session: which of the other machines is meant, from 1 on; 0: whoever is spoken with.
    machine: PartNumber = 0


class CodeWanted(Message, frozen=True):
    """Answers :class:`SyncCode`: contents that are not there, by their digests."""

    sync: int
    digests: list[bytes]
    #: See :class:`SyncCode`.
    machine: PartNumber = 0


class CodeContents(Message, frozen=True):
    """Answers :class:`CodeWanted`."""

    sync: int
    #: Digests and sizes of contents, as they follow each other in the file.
    contents: list[tuple[bytes, int]]
    file: MemoryFile
    #: See :class:`SyncCode`.
    machine: PartNumber = 0


class CodeReady(Message, frozen=True):
    """Answers :class:`SyncCode`: the copies are as they are to be, or why they are not."""

    sync: int
    problem: str = ""
    #: See :class:`SyncCode`.
    machine: PartNumber = 0


class FilesHome(Message, frozen=True):
    """What a run has made, changed or deleted in the head's copy of the project."""

    run_id: str
    changes: list[FileChange]
    #: The contents, one behind the other; None where there are none.
    file: MemoryFile | None = None
    #: Files that stay on the machine: (path, why).
    left: list[tuple[str, str]] = []


# -- unions ----------------------------------------------------------------------------------------------------------

#: To a machine's runner, from a notebook or from the head of its runs.
ToMachine = (
    OpenSession | LeaveSession | CloseSession | ToRunner | BeginPart | PartData | EndPart | SyncCode | CodeContents
)
FromMachine = (
    SessionOpened
    | SessionEnded
    | MachineLost
    | MachineFree
    | ToKernel
    | PartData
    | PartNotice
    | PartEnded
    | CodeWanted
    | CodeReady
    | FilesHome
)
#: To the process of a session from the runner of its machine, and back.
ToSession = (
    ToRunner
    | Members
    | LeaveSession
    | BeginPart
    | PartData
    | EndPart
    | PartNotice
    | PartEnded
    | SyncCode
    | CodeWanted
    | CodeContents
    | CodeReady
)
FromSession = (
    ToKernel
    | BeginPart
    | PartData
    | EndPart
    | PartEnded
    | SyncCode
    | CodeWanted
    | CodeContents
    | CodeReady
    | FilesHome
    | RanksGone
)
