"""The life of a run as a state machine without I/O: an event in, instructions out.

The shell around it (:mod:`taas_magic.runner.server`) turns messages, signals and the clock into events, and carries the
instructions out. ``docs/states.md`` shows the phases; :meth:`RunState.check` states the invariants.

How a run is stopped: the ranks that are still busy are interrupted (``KeyboardInterrupt``); a rank whose Python code has not
seen that shortly after waits in a collective, which is then broken off; rank 0 is asked for what it has; what still lives after
the grace time is terminated, then killed. When a rank has failed, the grace is short and the failed rank is kept alive until
the others have stopped, so that no peer fails because of it and hides the cause.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field

from taas_magic.wire import Death, FailureReport, LeftOut


class RankPhase(enum.Enum):
    """Where a rank is. The order is the order of life."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    EXITED = "exited"


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
#: A rank that is done waits this long for the others, so that its exit does not break their last collective.
LINGER_S = 2.0
#: Rank 0 gets this long to pack what comes home, beyond the time at which it would be killed.
HOME_PATIENCE_S = 120.0
#: From the permission to exit until a rank that is still there is killed (atexit functions take their time).
EXIT_PATIENCE_S = 15.0


def interrupt_times(grace_s: float) -> StopTimes:
    """After an interrupt or a timeout: ``grace_s`` between the steps."""
    return StopTimes(min(0.7, grace_s), rescue_s=grace_s, terminate_s=grace_s + 0.5, kill_s=2 * grace_s + 0.5)


# -- instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signal:
    """Send a signal to the processes of these ranks."""

    ranks: tuple[int, ...]
    signum: signal.Signals


@dataclass(frozen=True)
class Abort:
    """Have these ranks break off collectives: their own if they wait in one, their peers' if they are through."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RescueHome:
    """Ask rank 0 to pack what it has, whatever its cell is doing."""


@dataclass(frozen=True)
class Release:
    """Let these ranks end."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class AnnounceStarted:
    """Tell the kernel that all ranks run the cell."""


@dataclass(frozen=True)
class Conclude:
    """Tell the kernel how the run ended, and clear away what is left of it."""


Instruction = Signal | Abort | RescueHome | Release | AnnounceStarted | Conclude


class HomePhase(enum.Enum):
    """Where rank 0's changes are."""

    AWAITED = "awaited"
    ASKED = "asked"
    ARRIVED = "arrived"
    TAKEN = "taken"
    LOST = "lost"


@dataclass
class RunState:
    """One run. Times are seconds on one monotonic clock, given by the caller."""

    num_ranks: int
    grace_s: float
    started_at: float
    timeout_s: float | None = None
    phases: list[RankPhase] = field(init=False)
    #: When each rank finished or failed.
    done_at: dict[int, float] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    failures: dict[int, FailureReport] = field(default_factory=dict)
    deaths: dict[int, Death] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    home: HomePhase = HomePhase.AWAITED
    home_detail: str = ""
    stop_cause: StopCause | None = None
    stop_started_at: float = 0.0
    interrupts: int = 0
    concluded: bool = False
    detail: str = ""
    #: Steps of the stop that have been taken.
    _steps: set[str] = field(default_factory=set)
    _announced: bool = False
    _release_started_at: float | None = None
    #: Ranks that we killed; their deaths are consequences.
    _killed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.phases = [RankPhase.STARTING] * self.num_ranks

    # -- events --------------------------------------------------------------------------------------------------

    def rank_started(self, rank: int, now: float) -> list[Instruction]:
        """A rank begins the cell's own code."""
        self._advance(rank, RankPhase.RUNNING)
        out: list[Instruction] = []
        if not self._announced and RankPhase.STARTING not in self.phases:
            self._announced = True
            out.append(AnnounceStarted())
        if self.stop_cause is not None:
            # It was not ready to be interrupted yet when the others were.
            out.append(Signal((rank,), signal.SIGINT))
        return out + self.tick(now)

    def rank_finished(self, rank: int, left_out: list[LeftOut], now: float) -> list[Instruction]:
        """A rank ran the cell to its end."""
        self._advance(rank, RankPhase.FINISHED)
        self.left_out += left_out
        self.done_at[rank] = now
        return self.tick(now)

    def rank_failed(self, report: FailureReport, left_out: list[LeftOut], now: float) -> list[Instruction]:
        """A rank's cell ended with an exception."""
        self._advance(report.rank, RankPhase.FAILED)
        self.left_out += left_out
        self.done_at[report.rank] = now
        self.failures[report.rank] = report
        return self._stop(StopCause.FAILURE, now) + self.tick(now)

    def rank_exited(self, rank: int, exit_code: int, hint: str, now: float) -> list[Instruction]:
        """A rank's process has gone."""
        was = self.phases[rank]
        self.phases[rank] = RankPhase.EXITED
        out: list[Instruction] = []
        if rank == 0 and self.home in (HomePhase.AWAITED, HomePhase.ASKED):
            self.home = HomePhase.LOST
            self.home_detail = self.home_detail or "rank 0's process ended first"
        if was in (RankPhase.STARTING, RankPhase.RUNNING):
            if rank not in self._killed:
                self.deaths[rank] = Death(rank, exit_code, hint)
            out += self._stop(StopCause.FAILURE, now)
        return out + self.tick(now)

    def home_arrived(self, now: float) -> list[Instruction]:
        """Rank 0's changes are here."""
        if self.home in (HomePhase.AWAITED, HomePhase.ASKED):
            self.home = HomePhase.ARRIVED
        return self.tick(now)

    def home_taken(self, now: float) -> list[Instruction]:
        """The kernel has applied them."""
        self.home = HomePhase.TAKEN
        return self.tick(now)

    def home_failed(self, reason: str, now: float) -> list[Instruction]:
        """Rank 0 cannot pack anything."""
        if self.home in (HomePhase.AWAITED, HomePhase.ASKED):
            self.home, self.home_detail = HomePhase.LOST, reason
        return self.tick(now)

    def interrupt(self, level: int, now: float) -> list[Instruction]:
        """The user stops the run: 1 interrupts, 2 terminates, 3 kills."""
        self.interrupts = max(self.interrupts, level)
        out = self._stop(StopCause.INTERRUPT, now)
        if level >= 2:
            self._steps |= {"abort"}
            out += self._rescue()
            out += self._signal_once("terminate", signal.SIGTERM, spare_rank_0=True)
        if level >= 3:
            out += self._kill()
        return out + self.tick(now)

    def start_failed(self, reason: str, now: float) -> list[Instruction]:
        """The agent or the run zygote ended while ranks were still expected from it."""
        if self.concluded:
            return []
        for rank, phase in enumerate(self.phases):
            if phase is not RankPhase.EXITED:
                self.phases[rank] = RankPhase.EXITED
        if self.home in (HomePhase.AWAITED, HomePhase.ASKED):
            self.home, self.home_detail = HomePhase.LOST, reason
        self.detail = reason
        if self.stop_cause is None:
            self.stop_cause = StopCause.LOST
        return self.tick(now)

    def tick(self, now: float) -> list[Instruction]:
        """Look at the clock and at what has changed."""
        if self.concluded:
            return []
        out: list[Instruction] = []
        if self.stop_cause is None and self.timeout_s is not None and now - self.started_at >= self.timeout_s:
            out += self._stop(StopCause.TIMEOUT, now)
        out += self._stop_steps(now)
        out += self._release(now)
        if all(phase is RankPhase.EXITED for phase in self.phases) and self.home is not HomePhase.ARRIVED:
            self.concluded = True
            out.append(Conclude())
        return out

    def next_deadline(self, now: float) -> float | None:
        """Seconds until :meth:`tick` has something to do by the clock alone; None where nothing is due."""
        if self.concluded:
            return None
        moments: list[float] = []
        if self.stop_cause is not None:
            times = self._times
            moments += [self.stop_started_at + s for s in (times.abort_s, times.rescue_s, times.terminate_s, times.kill_s)]
            moments.append(self.stop_started_at + times.kill_s + HOME_PATIENCE_S)
        elif self.timeout_s is not None:
            moments.append(self.started_at + self.timeout_s)
        moments += [at + LINGER_S for rank, at in self.done_at.items() if rank not in self.released]
        if self._release_started_at is not None:
            moments.append(self._release_started_at + EXIT_PATIENCE_S)
        due = [moment - now for moment in moments if moment > now]
        return min(due, default=None)

    # -- stopping ------------------------------------------------------------------------------------------------

    @property
    def _times(self) -> StopTimes:
        return FAILURE_TIMES if self.stop_cause is StopCause.FAILURE else interrupt_times(self.grace_s)

    def _busy(self) -> tuple[int, ...]:
        return tuple(
            rank for rank, phase in enumerate(self.phases) if phase in (RankPhase.STARTING, RankPhase.RUNNING)
        )

    def _stop(self, cause: StopCause, now: float) -> list[Instruction]:
        if self.stop_cause is not None:
            return []
        self.stop_cause, self.stop_started_at = cause, now
        busy = self._busy()
        return [Signal(busy, signal.SIGINT)] if busy else []

    def _stop_steps(self, now: float) -> list[Instruction]:
        if self.stop_cause is None:
            return []
        elapsed, times, busy = now - self.stop_started_at, self._times, self._busy()
        out: list[Instruction] = []
        if elapsed >= times.abort_s and busy and "abort" not in self._steps:
            self._steps.add("abort")
            out.append(Abort(tuple(r for r, phase in enumerate(self.phases) if phase is not RankPhase.EXITED)))
        if elapsed >= times.rescue_s and 0 in busy:
            out += self._rescue()
        if elapsed >= times.terminate_s:
            out += self._signal_once("terminate", signal.SIGTERM, spare_rank_0=self._home_is_on_its_way())
        if elapsed >= times.kill_s:
            out += self._signal_once("kill", signal.SIGKILL, spare_rank_0=self._home_is_on_its_way())
        if self.interrupts >= 2 and 0 in busy and self.home in (HomePhase.TAKEN, HomePhase.LOST):
            out += self._kill()
        is_overdue = elapsed >= times.kill_s + HOME_PATIENCE_S
        if 0 in self._busy() and elapsed >= times.kill_s and (not self._home_is_on_its_way() or is_overdue):
            if self.home is HomePhase.ASKED:
                self.home, self.home_detail = HomePhase.LOST, "rank 0 did not answer"
            out += self._kill()
        return out

    def _home_is_on_its_way(self) -> bool:
        return self.home in (HomePhase.ASKED, HomePhase.ARRIVED)

    def _rescue(self) -> list[Instruction]:
        if self.home is not HomePhase.AWAITED or self.phases[0] is not RankPhase.RUNNING:
            return []
        self.home = HomePhase.ASKED
        return [RescueHome()]

    def _signal_once(self, step: str, signum: signal.Signals, *, spare_rank_0: bool) -> list[Instruction]:
        if step in self._steps:
            return []
        self._steps.add(step)
        targets = tuple(rank for rank in self._busy() if rank != 0 or not spare_rank_0)
        self._killed |= set(targets)
        return [Signal(targets, signum)] if targets else []

    def _kill(self) -> list[Instruction]:
        if "kill all" in self._steps:
            return []
        self._steps.add("kill all")
        targets = tuple(rank for rank, phase in enumerate(self.phases) if phase is not RankPhase.EXITED)
        self._killed |= set(targets)
        return [Signal(targets, signal.SIGKILL)] if targets else []

    # -- letting go ----------------------------------------------------------------------------------------------

    def _release(self, now: float) -> list[Instruction]:
        """Let ranks end whose work is done: all together, or alone when the others take long."""
        all_done = not self._busy()
        ready = []
        for rank, phase in enumerate(self.phases):
            if phase not in (RankPhase.FINISHED, RankPhase.FAILED) or rank in self.released:
                continue
            if rank == 0 and self.home in (HomePhase.AWAITED, HomePhase.ASKED, HomePhase.ARRIVED):
                continue
            lingered = phase is RankPhase.FINISHED and now - self.done_at[rank] >= LINGER_S
            if all_done or lingered:
                ready.append(rank)
        self.released |= set(ready)
        out: list[Instruction] = [Release(tuple(ready))] if ready else []
        waiting_for_exit = self.released - {r for r, phase in enumerate(self.phases) if phase is RankPhase.EXITED}
        if not waiting_for_exit:
            self._release_started_at = None
        elif self._release_started_at is None or ready:
            self._release_started_at = now
        elif now - self._release_started_at >= EXIT_PATIENCE_S and "exit" not in self._steps:
            self._steps.add("exit")
            out.append(Signal(tuple(sorted(waiting_for_exit)), signal.SIGKILL))
        return out

    def _advance(self, rank: int, phase: RankPhase) -> None:
        if self.phases[rank] is not RankPhase.EXITED:
            self.phases[rank] = phase

    # -- the outcome ---------------------------------------------------------------------------------------------

    @property
    def outcome(self) -> str:
        """ "ok", or the value of the cause that stopped the run."""
        return "ok" if self.stop_cause is None else self.stop_cause.value

    def check(self) -> None:
        """State the invariants; raises AssertionError where one does not hold."""
        assert len(self.phases) == self.num_ranks
        assert self.released <= set(self.done_at)
        assert not (self.failures.keys() & self.deaths.keys())
        assert not self.concluded or all(phase is RankPhase.EXITED for phase in self.phases)
        assert not (0 in self.released and self.home in (HomePhase.AWAITED, HomePhase.ARRIVED))
        assert self.stop_cause is not None or not (self.failures or self.deaths)


def choose_cause(
    failures: list[FailureReport], deaths: list[Death]
) -> tuple[FailureReport | None, Death | None, list[FailureReport], list[Death]]:
    """The failure or death that began it, then the others.

    A process that died comes first: it broke its peers' collectives at once, while its own end was noticed a moment
    later. Then the earliest exception that is not merely a broken collective; interrupts are never a cause here.
    """
    own = [report for report in failures if not report.is_interrupt]
    by_time = sorted(own, key=lambda report: (is_consequence(report), report.at_s))
    if deaths and (not by_time or is_consequence(by_time[0])):
        return None, deaths[0], by_time, deaths[1:]
    if by_time:
        return by_time[0], None, by_time[1:], deaths
    if failures:
        first = min(failures, key=lambda report: report.rank)
        return first, None, [], deaths
    return None, None, [], []


#: What gloo, NCCL and the store say when a peer has gone.
_PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "nccl communicator was aborted",
    "remote process has",
    "failed to recv",
    "application timeout caused pair closure",
    "timed out waiting",
    "[/pytorch/third_party/gloo",
    "third_party/gloo/gloo/transport",
    "ncclremoteerror",
)


def is_consequence(report: FailureReport) -> bool:
    """Whether an exception says no more than that a peer has gone."""
    text = report.message.lower()
    return any(sign in text for sign in _PEER_GONE)
