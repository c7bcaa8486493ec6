"""The messages between a runner and the zygotes of its machine, and between a run zygote and its agent.

See :mod:`taas_magic.wire`, which says what holds for all messages.
"""

from __future__ import annotations

import msgspec

from taas_magic.wire_base import Message, Rank
from taas_magic.wire_data import StartDelivery

# -- runner and zygotes ----------------------------------------------------------------------------------------------


class Warm(Message, frozen=True):
    """Zygote to runner: imports are done."""

    num_gpus: int
    seconds: float


class StartRun(Message, frozen=True):
    """Runner to zygote: fork a run zygote; its control socket comes as a descriptor."""


class ForkPreloaded(Message, frozen=True):
    """Runner to zygote: fork a zygote with more imports; its socket comes as a descriptor."""

    modules: list[str]
    environment: dict[str, str]


class Preloaded(Message, frozen=True):
    """Preloaded zygote to runner: its imports are done."""

    modules: list[str]
    seconds: float
    #: All modules that it has now, those included that others brought along.
    loaded: list[str] = []


class PreloadRefused(Message, frozen=True):
    """Preloaded zygote to runner, before it ends: this module makes a process that cannot be forked safely."""

    module: str
    reason: str


class GuardedProject(msgspec.Struct, frozen=True):
    """A project that ranks other than 0 are not to write in, and what they need to write all the same."""

    project: str
    writable: list[str]
    environment: dict[str, str]
    #: Where the directories of runs are made.
    run_dirs: str


class PrepareRun(Message, frozen=True):
    """Runner to run zygote: fork the agent, and by it the ranks, which then wait for :class:`Begin`."""

    num_ranks: int
    max_restarts: int = 0
    #: Of the run that is expected; another may come.
    guarded: GuardedProject | None = None
    #: What ranks get on this machine in addition to what their task says.
    environment: dict[str, str] = {}
    #: Where the notebook's project is on this machine, and where the run has its own directory; "" where the task says.
    project: str = ""
    run_dir: str = ""
    #: The machine's place among those of the run, and where they meet; "" where it is alone. The first one of several
    #: gets the socket to listen on as a descriptor.
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = ""
    master_port: int = 0


class RunBegins(Message, frozen=True):
    """Runner to run zygote: the ranks have been given their task."""

    run_id: str
    #: Whether ranks other than 0 are to be kept from writing in the project.
    guards_writes: bool


class RankDescriptors(Message, frozen=True):
    """Runner to run zygote: stdout, stderr and control socket of one rank come as descriptors."""

    rank: Rank


class SignalRanks(Message, frozen=True):
    """Runner to run zygote: send a signal to ranks that are still alive."""

    ranks: list[Rank]
    signal: int


class EndRun(Message, frozen=True):
    """Runner to run zygote: kill whatever is left of the run, and end."""


ToZygote = StartRun | ForkPreloaded | StartDelivery
ToRunZygote = PrepareRun | RankDescriptors | RunBegins | SignalRanks | EndRun


class RankForked(Message, frozen=True):
    """Run zygote to runner and agent: a rank has a process."""

    rank: Rank
    pid: int


class RankExited(Message, frozen=True):
    """Run zygote to runner and agent: a rank's process ended; ``exit_code`` as ``subprocess`` has it."""

    rank: Rank
    exit_code: int


class AgentExited(Message, frozen=True):
    """Run zygote to runner: the agent ended."""

    exit_code: int


class RunNotice(Message, frozen=True):
    """Run zygote to runner: something that the user should know of the place where the run is."""

    text: str


class RunOver(Message, frozen=True):
    """Run zygote to runner: no process of the run is left."""


FromZygote = Warm | Preloaded | PreloadRefused
FromRunZygote = RankForked | RankExited | AgentExited | RunNotice | RunOver


class Spawn(Message, frozen=True):
    """Agent to run zygote: fork a rank with this environment (torchrun's contract)."""

    local_rank: Rank
    rank: Rank
    environment: dict[str, str]


class StopRanks(Message, frozen=True):
    """Agent to run zygote: a generation is over, end its ranks; answered by their :class:`RankExited`."""


FromAgent = Spawn | StopRanks
ToAgent = RankForked | RankExited
