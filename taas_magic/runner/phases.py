"""Where a rank is, where rank 0's changes are, and how a run is stopped: the tables and times of the state machine.

:mod:`taas_magic.runner.run_state` moves along them; ``docs/states.md`` shows them, and a test holds the two together.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass


class RankPhase(enum.Enum):
    """Where a rank is. The order is the order of life."""

    PLANNED = "planned"  # it has no process yet
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    RESTING = "resting"  # kept, and without a cell
    EXITED = "exited"


class RankEvent(enum.Enum):
    """What can be heard of a rank."""

    FORKED = "forked"
    STARTED = "started"
    DONE = "done"
    RAISED = "raised"
    RESTED = "rested"
    GONE = "gone"


#: Where an event takes a rank. What is not here changes nothing: it was said too late, or twice.
RANK_TRANSITIONS: dict[tuple[RankPhase, RankEvent], RankPhase] = {
    (RankPhase.PLANNED, RankEvent.FORKED): RankPhase.STARTING,
    # A rank has a socket of its own: what it says may overtake what its parent says of it.
    (RankPhase.PLANNED, RankEvent.STARTED): RankPhase.RUNNING,
    (RankPhase.PLANNED, RankEvent.RAISED): RankPhase.FAILED,
    (RankPhase.STARTING, RankEvent.STARTED): RankPhase.RUNNING,
    (RankPhase.STARTING, RankEvent.RAISED): RankPhase.FAILED,
    (RankPhase.STARTING, RankEvent.GONE): RankPhase.EXITED,
    (RankPhase.RUNNING, RankEvent.DONE): RankPhase.FINISHED,
    (RankPhase.RUNNING, RankEvent.RAISED): RankPhase.FAILED,
    (RankPhase.RUNNING, RankEvent.GONE): RankPhase.EXITED,
    (RankPhase.FINISHED, RankEvent.RESTED): RankPhase.RESTING,
    (RankPhase.FINISHED, RankEvent.GONE): RankPhase.EXITED,
    (RankPhase.FAILED, RankEvent.RESTED): RankPhase.RESTING,
    (RankPhase.FAILED, RankEvent.GONE): RankPhase.EXITED,
    (RankPhase.RESTING, RankEvent.GONE): RankPhase.EXITED,
}


class HomePhase(enum.Enum):
    """Where rank 0's changes are."""

    AWAITED = "awaited"
    ASKED = "asked"
    ARRIVED = "arrived"
    TAKEN = "taken"
    LOST = "lost"


class HomeEvent(enum.Enum):
    """What can become of rank 0's changes."""

    ASK = "ask"
    ARRIVE = "arrive"
    TAKE = "take"
    REFUSE = "refuse"
    LOSE = "lose"
    GIVE_UP = "give up"


#: Where an event takes what comes home. Refused means: some record cannot be loaded, rank 0 packs again without it.
HOME_TRANSITIONS: dict[tuple[HomePhase, HomeEvent], HomePhase] = {
    (HomePhase.AWAITED, HomeEvent.ASK): HomePhase.ASKED,
    (HomePhase.AWAITED, HomeEvent.ARRIVE): HomePhase.ARRIVED,
    (HomePhase.AWAITED, HomeEvent.LOSE): HomePhase.LOST,
    (HomePhase.ASKED, HomeEvent.ARRIVE): HomePhase.ARRIVED,
    (HomePhase.ASKED, HomeEvent.LOSE): HomePhase.LOST,
    (HomePhase.ARRIVED, HomeEvent.TAKE): HomePhase.TAKEN,
    (HomePhase.ARRIVED, HomeEvent.REFUSE): HomePhase.ASKED,
    # What has arrived outlives rank 0; only the notebook can give it up.
    (HomePhase.AWAITED, HomeEvent.GIVE_UP): HomePhase.LOST,
    (HomePhase.ASKED, HomeEvent.GIVE_UP): HomePhase.LOST,
    (HomePhase.ARRIVED, HomeEvent.GIVE_UP): HomePhase.LOST,
}

#: Working on the cell; through with it; having a process.
BUSY = (RankPhase.STARTING, RankPhase.RUNNING)
DONE = (RankPhase.FINISHED, RankPhase.FAILED, RankPhase.RESTING)
ALIVE = (*BUSY, *DONE)


class StopCause(enum.Enum):
    """Why a run is being stopped before all ranks are through."""

    FAILURE = "failed"
    INTERRUPT = "interrupted"
    TIMEOUT = "timeout"
    LOST = "lost"


@dataclass(frozen=True)
class StopTimes:
    """Seconds from the start of a stop to each of its steps."""

    abort_s: float
    rescue_s: float
    terminate_s: float
    kill_s: float


#: After a failure: the others are down within two seconds.
FAILURE_TIMES = StopTimes(abort_s=0.4, rescue_s=0.9, terminate_s=1.3, kill_s=1.6)
#: The same where the ranks are kept: what ends one ends all, so they get time to heed the interrupt.
KEPT_FAILURE_TIMES = StopTimes(abort_s=0.4, rescue_s=2.0, terminate_s=4.0, kill_s=5.0)
#: A rank that is done waits this long for the others, so that its exit does not break their last collective.
LINGER_S = 2.0
#: Once a run is being stopped, rank 0 gets this long to pack what comes home, from when it began to or was asked to.
HOME_PATIENCE_S = 120.0
#: A kept rank that is done has so long to be ready for another cell, from when what came home is taken or lost.
REST_PATIENCE_S = 15.0
#: From the permission to exit until a rank that is still there is killed (atexit functions take their time).
EXIT_PATIENCE_S = 15.0
#: What each level of stopping sends; the numbers are those of :class:`taas_magic.wire.Interrupt`.
SIGNAL_OF_LEVEL = {1: signal.SIGINT, 2: signal.SIGTERM, 3: signal.SIGKILL}


def interrupt_times(grace_s: float) -> StopTimes:
    """After an interrupt or a timeout: ``grace_s`` between the steps."""
    return StopTimes(min(0.7, grace_s), rescue_s=grace_s, terminate_s=grace_s + 0.5, kill_s=2 * grace_s + 0.5)
