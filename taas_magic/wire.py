"""The messages between kernel, runner, zygotes and ranks.

One class a message, one tagged union a direction. New fields get defaults, types never change. Payloads that would have
to be unpickled are plain ``bytes`` here, or descriptors of memory files: nothing in this module ever unpickles.
``docs/protocol.md`` describes every message; a test holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from taas_magic.wire_base import MemoryFile, Message, NumRanks, Rank, SizeBytes
from taas_magic.wire_data import (
    CancelDelivery,
    ConnectDelivery,
    DeliveryFailed,
    DeliveryProgress,
    PrepareDelivery,
)

#: Raised when a message changes its meaning. Kernel and runner must agree on it.
PROTOCOL_VERSION = 1

#: 1 interrupts, 2 terminates, 3 kills.
StopLevel = Annotated[int, msgspec.Meta(ge=1, le=3)]
StreamKind = Literal["stdout", "stderr"]
DisplayKind = Literal["display", "update", "clear", "result", "comm"]


class Versions(msgspec.Struct, frozen=True):
    """What must agree between the two ends before anything is unpickled."""

    protocol: int
    taas: str
    python: str
    cloudpickle: str
    torch: str


# -- what a run is ---------------------------------------------------------------------------------------------------


class CellTask(msgspec.Struct, frozen=True):
    """What a rank executes, and how."""

    run_id: str
    source: str
    execution_count: int
    num_ranks: NumRanks
    #: The directory in which only rank 0 may write, with what stays writable in it.
    project: str
    writable: list[str]
    writes: str
    environment: dict[str, str]
    #: Names that the notebook has and that did not travel, for the hint in a NameError.
    other_names: list[str]
    #: Names that the notebook's shell provides.
    ignored_names: list[str]
    left_out: dict[str, str] = {}
    colors: str = "nocolor"
    traceback_mode: str = "Context"
    #: No GPU here: answer NCCL with gloo.
    rehearse: bool = False
    #: Every rank sends the value of its last expression.
    rank_results: bool = False
    #: A directory that lives as long as the run, made by the runner; ranks other than 0 have their TMPDIR in it.
    run_dir: str = ""
    #: The ranks stay when the cell is over, and wait for another.
    keep: bool = False
    #: Which of the kept ranks run the cell, in order; all of them where it is empty. The others take the parcel only.
    ranks: list[Rank] = []
    #: ``environment`` is only what the notebook has set: it is added to what the machine has.
    adds_to_environment: bool = False
    #: Nobody waits for the run: what comes home must be whole without what the notebook has.
    is_detached: bool = False
    #: Where the notebook's directories are on this machine: (there, here).
    moved: list[tuple[str, str]] = []


class FailureReport(msgspec.Struct, frozen=True):
    """An exception that ended a rank's cell."""

    rank: Rank
    #: ``time.monotonic`` of the rank's machine.
    at_s: float
    type_name: str
    message: str
    #: Lines for a notebook, as IPython formats them.
    traceback: list[str]
    #: The same as the interpreter would print it.
    plain_traceback: str
    #: The exception by cloudpickle; empty where it has no pickle.
    pickled: bytes = b""
    is_interrupt: bool = False


class Death(msgspec.Struct, frozen=True):
    """A rank's process that ended without finishing the cell."""

    rank: Rank
    exit_code: int
    hint: str = ""


class LeftOut(msgspec.Struct, frozen=True):
    """Writes that a rank other than 0 left out because rank 0 makes them."""

    rank: Rank
    what: str
    path: str
    count: int


# -- kernel to runner ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Opens a connection. ``token`` was given to the runner when it was started."""

    token: str
    versions: Versions


class Submit(Message, frozen=True):
    """Starts a run."""

    task: CellTask
    parcel: MemoryFile
    #: Ranks whose output is wanted as it comes; None for all.
    show: list[int] | None
    grace_s: float
    timeout_s: float | None = None
    #: Files of earlier parcels that this one refers to, in order.
    segments: list[MemoryFile] = []
    #: The kept ranks to run in; "" for new ones.
    kept_id: str = ""
    #: Kept ranks end by themselves when they have waited for so long.
    idle_s: float = 0.0
    #: The delivery of data that was prepared for it; "" without one.
    delivery_id: str = ""
    #: How many ranks each machine of the pool has, the runner's own first; empty for all of them here.
    ranks_of_machines: list[Rank] = []
    #: What the ranks of the runner's own machine get in addition to the environment of the task.
    environment_here: dict[str, str] = {}


class Interrupt(Message, frozen=True):
    """Stops a run: 1 interrupts, 2 terminates, 3 kills."""

    run_id: str
    level: StopLevel


class OutputTaken(Message, frozen=True):
    """The kernel has shown this many bytes more; the runner may send as many."""

    run_id: str
    size_bytes: SizeBytes


class HomeTaken(Message, frozen=True):
    """The kernel has applied what came home; rank 0 may end."""

    run_id: str
    #: What ranks that stay need in order to know what came home, for :class:`Settle`.
    adoptions: bytes = b""


class HomeRefused(Message, frozen=True):
    """A record cannot be loaded in the kernel; rank 0 is to pack again without those."""

    run_id: str
    exclude: list[str]


class Abandon(Message, frozen=True):
    """The kernel no longer follows a run (an error on its side): it is ended at once, and nothing comes home."""

    run_id: str


class ResultTaken(Message, frozen=True):
    """The kernel has loaded a rank's value."""

    run_id: str
    rank: Rank


class InputReply(Message, frozen=True):
    """What the user typed for an :class:`InputRequest`; None where there is nobody to ask."""

    run_id: str
    rank: Rank
    text: str | None


class ReleaseKept(Message, frozen=True):
    """Ends kept ranks; answered by :class:`KeptEnded`."""

    kept_id: str


class ReadLog(Message, frozen=True):
    """Asks for the kept output of a run; an empty ``run_id`` is the latest."""

    run_id: str = ""
    rank: Rank = 0


class AttachRun(Message, frozen=True):
    """Takes a run up that goes on by itself: all of its output is sent, and what came of it."""

    run_id: str


class ReadStatus(Message, frozen=True):
    """Asks what the runner is doing."""


class Preload(Message, frozen=True):
    """Names modules that the notebook has imported from installed packages: ranks will want them imported already."""

    modules: list[str]
    #: The kernel's environment, as ranks would get it; a preloaded zygote serves only runs with the same one.
    environment: dict[str, str]


class Shutdown(Message, frozen=True):
    """Ends the runner and everything it started."""


ToRunner = (
    Hello
    | Submit
    | Interrupt
    | OutputTaken
    | HomeTaken
    | HomeRefused
    | ResultTaken
    | Abandon
    | InputReply
    | ReleaseKept
    | ReadLog
    | ReadStatus
    | AttachRun
    | Preload
    | PrepareDelivery
    | CancelDelivery
    | Shutdown
)

# -- runner to kernel ------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answers :class:`Hello`."""

    versions: Versions
    pid: int


class Denied(Message, frozen=True):
    """Answers what the runner will not do: a wrong token, a version, a run it cannot place."""

    reason: str
    run_id: str = ""


class Ready(Message, frozen=True):
    """The zygote is warm: a run starts at once from now on."""

    num_gpus: int
    seconds: float


class Waiting(Message, frozen=True):
    """What is waited for before a run can start, for people; "" once it is there."""

    text: str
    run_id: str = ""


class Detached(Message, frozen=True):
    """A run that was submitted so goes on by itself from here on."""

    run_id: str


class PoolMachine(msgspec.Struct, frozen=True):
    """A machine of a pool: what it is called, how many ranks it can hold, and why it cannot be used, if it cannot."""

    name: str
    num_gpus: int
    has_cuda: bool
    lost: str = ""
    #: How many of its GPUs nobody has; -1 where it has not said so.
    free: int = -1


class PoolReady(Message, frozen=True):
    """Gateway to kernel: the machines of the pool are ready for runs, the head first."""

    machines: list[PoolMachine]


class ImportsDone(Message, frozen=True):
    """Answers :class:`Preload`, once what it names is imported, or cannot be, or was before."""


class RunStarted(Message, frozen=True):
    """All ranks run the cell's own code."""

    run_id: str
    pids: list[int]


class Notice(Message, frozen=True):
    """Something that the user should know of the place where the run is."""

    run_id: str
    text: str


class Output(Message, frozen=True):
    """A piece of what a rank wrote."""

    run_id: str
    rank: Rank
    kind: StreamKind
    data: bytes


class Display(Message, frozen=True):
    """Something to display; ``content`` is JSON."""

    run_id: str
    rank: Rank
    kind: DisplayKind
    content: bytes


class InputRequest(Message, frozen=True):
    """Rank 0 asks the user for a line."""

    run_id: str
    rank: Rank
    prompt: str
    password: bool = False


class HomeArrived(Message, frozen=True):
    """Rank 0's changes, for the kernel to apply."""

    run_id: str
    parcel: MemoryFile
    #: (expression, reason) of what could not be packed.
    not_home: list[tuple[str, str]] = []
    #: Names of DDP wrappers whose inner module came instead.
    unwrapped: list[str] = []


class TransferProgress(Message, frozen=True):
    """How far rank 0 is with packing what comes home."""

    run_id: str
    done_bytes: SizeBytes
    total_bytes: SizeBytes


class ResultArrived(Message, frozen=True):
    """The value of a rank's last expression, other than rank 0's; ``reason`` says why there is no parcel."""

    run_id: str
    rank: Rank
    parcel: MemoryFile | None = None
    reason: str = ""


class RunEnded(Message, frozen=True):
    """The last message of a run. ``outcome`` is "ok", "failed", "interrupted", "timeout" or "lost"."""

    run_id: str
    outcome: str
    seconds: float
    #: The failure or death that ended the run; the others follow.
    failure: FailureReport | None = None
    death: Death | None = None
    other_failures: list[FailureReport] = []
    other_deaths: list[Death] = []
    left_out: list[LeftOut] = []
    #: The last lines of the failed rank's own output, where it was not shown.
    tail: str = ""
    home: bool = False
    detail: str = ""
    #: What else is known of why the failure came.
    hint: str = ""
    #: Ranks whose process went badly after their cell had run to its end.
    late_deaths: list[Death] = []
    #: Under which id the ranks stay; "" where they have ended.
    kept_id: str = ""
    #: A collective was broken off, and the process group with it: those of the ranks that stay have none now.
    group_is_broken: bool = False
    #: Objects that some rank does not have, by the numbers that both sides knew them by.
    forgotten: list[int] = []
    #: What there is to say of the delivery of data.
    delivery: list[str] = []


class KeptEnded(Message, frozen=True):
    """Kept ranks have ended, and why."""

    kept_id: str
    reason: str


class LogPiece(Message, frozen=True):
    """A piece of a kept log; ``last`` ends it."""

    run_id: str
    rank: Rank
    kind: StreamKind
    data: bytes
    last: bool = False


class Status(Message, frozen=True):
    """What the runner is doing, in words and numbers."""

    pid: int
    is_warm: bool
    num_gpus: int
    #: The active run, or "".
    run_id: str
    seconds: float
    #: Phase and pid of each rank of the active run.
    ranks: list[tuple[str, int]]
    #: (run id, number of ranks) of the runs whose output is kept, latest last.
    kept: list[tuple[str, int]]
    #: Process ids of the ranks that wait for another cell.
    kept_pids: list[int] = []
    #: Seconds until they end by themselves.
    kept_for_s: float = 0.0
    #: How far the delivery of data is, a line a loader.
    delivery: list[str] = []


ToKernel = (
    Welcome
    | Denied
    | Ready
    | Waiting
    | PoolReady
    | Detached
    | ImportsDone
    | RunStarted
    | Notice
    | Output
    | Display
    | InputRequest
    | HomeArrived
    | ResultArrived
    | RunEnded
    | KeptEnded
    | TransferProgress
    | LogPiece
    | Status
    | DeliveryProgress
    | DeliveryFailed
)

# -- ranks -----------------------------------------------------------------------------------------------------------


class CellStarted(Message, frozen=True):
    """Rank to runner: the cell's own code begins."""


class CellFinished(Message, frozen=True):
    """Rank to runner: the cell ran to its end."""

    left_out: list[LeftOut] = []


class CellFailed(Message, frozen=True):
    """Rank to runner: the cell ended with an exception."""

    report: FailureReport
    left_out: list[LeftOut] = []


class RankDisplay(Message, frozen=True):
    """Rank to runner: see :class:`Display`."""

    kind: DisplayKind
    content: bytes


class RankInput(Message, frozen=True):
    """Rank to runner: see :class:`InputRequest`."""

    prompt: str
    password: bool = False


class RankHome(Message, frozen=True):
    """Rank 0 to runner: what comes home; the parcel comes as a descriptor."""

    size_bytes: SizeBytes
    not_home: list[tuple[str, str]] = []
    unwrapped: list[str] = []


class RankResult(Message, frozen=True):
    """Rank other than 0 to runner: the value of its last expression; a parcel comes, or a ``reason`` why not."""

    size_bytes: SizeBytes = 0
    reason: str = ""


class HomeFailed(Message, frozen=True):
    """Rank 0 to runner: nothing can come home, and why."""

    reason: str


class HomeProgress(Message, frozen=True):
    """Rank 0 to runner: see :class:`TransferProgress`."""

    done_bytes: SizeBytes
    total_bytes: SizeBytes


class RankResting(Message, frozen=True):
    """Rank to runner, after :class:`Settle`: it waits for another cell."""

    #: See :class:`RunEnded`.
    forgotten: list[int] = []


FromRank = (
    CellStarted
    | CellFinished
    | CellFailed
    | RankDisplay
    | RankInput
    | RankHome
    | RankResult
    | HomeProgress
    | HomeFailed
    | RankResting
)


class Begin(Message, frozen=True):
    """Runner to rank: what to do; the parcel and the segments that it refers to come as descriptors."""

    task: CellTask


class Settle(Message, frozen=True):
    """Runner to a rank that stays: the cell is over everywhere; answered by :class:`RankResting`."""

    #: Whether the kernel has what rank 0 packed.
    home_taken: bool
    #: See :class:`HomeTaken`.
    adoptions: bytes = b""


class Exit(Message, frozen=True):
    """Runner to rank: everything is said, end."""


class AbortCollectives(Message, frozen=True):
    """Runner to rank: whatever collective the cell waits in will not complete; break it off."""


class Rescue(Message, frozen=True):
    """Runner to rank 0: pack what comes home now, whatever the cell is doing."""


class PackAgain(Message, frozen=True):
    """Runner to rank 0: see :class:`HomeRefused`."""

    exclude: list[str]


class InputLine(Message, frozen=True):
    """Runner to rank: see :class:`InputReply`."""

    text: str | None


ToRank = Begin | ConnectDelivery | Settle | Exit | AbortCollectives | Rescue | PackAgain | InputLine
