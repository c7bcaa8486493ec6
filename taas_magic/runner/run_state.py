"""The life of a run as a state machine without I/O: an event in, instructions out.

The shell around it (:mod:`taas_magic.runner.run`) turns messages, signals and the clock into events, and carries the
instructions out. Two tables (:mod:`taas_magic.runner.phases`) say where a rank and what comes home can go; the rest is
the stop. ``docs/states.md`` shows both, and :meth:`RunState.check` states the invariants.

How a run is stopped: the ranks that are still busy are interrupted (``KeyboardInterrupt``); a rank whose Python code
has not seen that shortly after waits in a collective, which is then broken off; rank 0 is asked for what it has; what
still lives after the grace time is terminated, then killed. When a rank has failed, the grace is short and the failed
rank is kept alive until the others have stopped, so that no peer fails because of it and hides the cause.

Where the ranks are kept, they are not let go: the run is over when all of them rest. If one has ended, or the agent
has, the others are of no use any more, and the run ends as any other.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

from taas_magic.runner.phases import (
    ALIVE,
    BUSY,
    DONE,
    EXIT_PATIENCE_S,
    FAILURE_TIMES,
    HOME_PATIENCE_S,
    HOME_TRANSITIONS,
    KEPT_FAILURE_TIMES,
    LINGER_S,
    RANK_TRANSITIONS,
    REST_PATIENCE_S,
    SIGNAL_OF_LEVEL,
    HomeEvent,
    HomePhase,
    RankEvent,
    RankPhase,
    StopCause,
    StopTimes,
    interrupt_times,
)
from taas_magic.wire import Death, FailureReport, LeftOut

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
class PackHomeAgain:
    """Ask rank 0 to pack once more, without what was refused."""


@dataclass(frozen=True)
class SettleRanks:
    """Tell all ranks, which are to stay, that the cell is over everywhere."""


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


Instruction = Signal | Abort | RescueHome | PackHomeAgain | SettleRanks | Release | AnnounceStarted | Conclude


@dataclass
class RunState:
    """One run.

    Times are seconds on one monotonic clock, given by the caller, which calls :meth:`tick` when :meth:`next_deadline`
    says so. Each event returns what is to be done now, in order.
    """

    num_ranks: int
    grace_s: float
    started_at: float
    timeout_s: float | None = None
    #: The ranks are to stay when the cell is over.
    keep: bool = False
    #: The ranks were kept from an earlier run.
    is_resumed: bool = False
    #: Where each rank is.
    phases: list[RankPhase] = field(init=False)
    #: When each rank finished or failed.
    done_at: dict[int, float] = field(default_factory=dict)
    #: When each rank was let go.
    released_at: dict[int, float] = field(default_factory=dict)
    failures: dict[int, FailureReport] = field(default_factory=dict)
    #: Ranks that ended of themselves before their work was done, in the order in which that was noticed.
    deaths: dict[int, Death] = field(default_factory=dict)
    #: Ranks whose process went badly when their cell had run to its end.
    late_deaths: list[Death] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    home: HomePhase = HomePhase.AWAITED
    #: Why nothing came home, where it is known.
    home_detail: str = ""
    stop_cause: StopCause | None = None
    stop_started_at: float = 0.0
    #: The highest level at which the user has stopped the run: 0 to 3.
    interrupts: int = 0
    concluded: bool = False
    #: Why the run was lost.
    detail: str = ""
    #: Whether ranks that are planned may still get a process.
    _expects_forks: bool = True
    _agent_has_gone: bool = False
    #: When kept ranks were told that the cell is over everywhere.
    _rest_since: float | None = None
    _has_missed_rest: bool = False
    _is_out_of_step: bool = False
    _has_stayed: bool = False
    #: The highest level of stopping that each rank has been sent.
    _sent: dict[int, int] = field(default_factory=dict)
    #: When rank 0 began to pack, or was asked to.
    _packing_since: float = 0.0
    _announced: bool = False
    _aborted: bool = False

    def __post_init__(self) -> None:
        self.phases = [RankPhase.STARTING if self.is_resumed else RankPhase.PLANNED] * self.num_ranks
        self._expects_forks = not self.is_resumed

    # -- events of ranks -----------------------------------------------------------------------------------------

    def rank_forked(self, rank: int, now: float) -> list[Instruction]:
        """A rank has a process."""
        self._move(rank, RankEvent.FORKED)
        return self.tick(now)

    def rank_started(self, rank: int, now: float) -> list[Instruction]:
        """A rank begins the cell's own code."""
        if not self._move(rank, RankEvent.STARTED):
            return self.tick(now)
        if self._sent.get(rank) == 1:
            # It may not have been ready for an interrupt yet when the others were.
            del self._sent[rank]
        out: list[Instruction] = []
        if (
            not self._announced
            and self.stop_cause is None
            and not self._ranks_in(RankPhase.PLANNED, RankPhase.STARTING)
        ):
            self._announced = True
            out.append(AnnounceStarted())
        return out + self.tick(now)

    def rank_finished(self, rank: int, left_out: list[LeftOut], now: float) -> list[Instruction]:
        """A rank ran the cell to its end."""
        if self._move(rank, RankEvent.DONE):
            self._note_done(rank, left_out, now)
        return self.tick(now)

    def rank_failed(self, report: FailureReport, left_out: list[LeftOut], now: float) -> list[Instruction]:
        """A rank's cell ended with an exception, or could not begin."""
        had_begun = self.phases[report.rank] is RankPhase.RUNNING
        if self._move(report.rank, RankEvent.RAISED):
            # How much it has of what it was sent is not known, so nobody could say what to send it next.
            self._is_out_of_step = self._is_out_of_step or not had_begun
            self._note_done(report.rank, left_out, now)
            self.failures[report.rank] = report
            self._stop(StopCause.FAILURE, now)
        return self.tick(now)

    def rank_rested(self, rank: int, now: float) -> list[Instruction]:
        """A kept rank is through with the cell and waits for another."""
        self._move(rank, RankEvent.RESTED)
        return self.tick(now)

    def rank_exited(self, rank: int, exit_code: int, hint: str, now: float) -> list[Instruction]:
        """A rank's process has gone."""
        was_busy, had_finished = self.phases[rank] in BUSY, self.phases[rank] is RankPhase.FINISHED
        has_deserted = self.phases[rank] is RankPhase.RESTING and rank not in self.released_at
        if not self._move(rank, RankEvent.GONE):
            return self.tick(now)
        owed_home = rank == 0 and self._lose_home(
            "rank 0 was killed first" if self._sent.get(0, 0) > 1 else "rank 0's process ended first"
        )
        if (was_busy or (owed_home and rank not in self.failures)) and not self._has_caused(rank, exit_code):
            self.deaths[rank] = Death(rank, exit_code, hint)
            self._stop(StopCause.FAILURE, now)
        elif (had_finished and exit_code != 0) or has_deserted:
            self._note_late_death(rank, exit_code, hint)
        return self.tick(now)

    def agent_exited(self, exit_code: int, now: float) -> list[Instruction]:
        """The agent has gone: no rank will be started any more, and the store that ranks meet at has gone with it."""
        self._expects_forks = False
        self._agent_has_gone = True
        if not self.concluded and self._ranks_in(RankPhase.PLANNED, *BUSY):
            self.detail = self.detail or f"the agent, which starts the ranks and hosts their store, ended ({exit_code})"
            self._stop(StopCause.LOST, now)
        return self.tick(now)

    def delivery_lost(self, reason: str, now: float) -> list[Instruction]:
        """What delivers the ranks' data has ended."""
        if not self.concluded and self._ranks_in(RankPhase.PLANNED, *BUSY):
            self.detail = self.detail or reason
            self._stop(StopCause.LOST, now)
        return self.tick(now)

    def processes_lost(self, reason: str, now: float) -> list[Instruction]:
        """No process of the run is left, and nobody had asked for that."""
        if self.concluded:
            return []
        self.phases = [RankPhase.EXITED] * self.num_ranks
        self._lose_home(reason)
        self.detail = self.detail or reason
        self._stop(StopCause.LOST, now)
        return self.tick(now)

    # -- events of what comes home -------------------------------------------------------------------------------

    @property
    def awaits_home(self) -> bool:
        """Whether rank 0's changes would still be taken."""
        return self.home in (HomePhase.AWAITED, HomePhase.ASKED) and not self.concluded

    def home_arrived(self, now: float) -> list[Instruction]:
        """Rank 0's changes are here."""
        self._move_home(HomeEvent.ARRIVE)
        return self.tick(now)

    def home_taken(self, now: float) -> list[Instruction]:
        """The kernel has applied them."""
        self._move_home(HomeEvent.TAKE)
        return self.tick(now)

    def home_refused(self, now: float) -> list[Instruction]:
        """The kernel cannot load all of them: rank 0 has to pack again, if it is still there."""
        out: list[Instruction] = []
        if self._move_home(HomeEvent.REFUSE):
            self._packing_since = now
            if self.phases[0] is RankPhase.EXITED:
                self._lose_home("the notebook cannot load all of it, and rank 0 has gone")
            else:
                out.append(PackHomeAgain())
        return out + self.tick(now)

    def home_failed(self, reason: str, now: float) -> list[Instruction]:
        """Rank 0 cannot pack anything."""
        self._lose_home(reason)
        return self.tick(now)

    # -- events of the user --------------------------------------------------------------------------------------

    def interrupt(self, level: int, now: float) -> list[Instruction]:
        """The user stops the run: 1 interrupts, 2 terminates, 3 kills."""
        self.interrupts = max(self.interrupts, min(3, max(1, level)))
        self._stop(StopCause.INTERRUPT, now)
        return self.tick(now)

    def abandoned(self, now: float) -> list[Instruction]:
        """Nobody follows the run any more: it is over at once."""
        self._move_home(HomeEvent.GIVE_UP)
        return self.processes_lost("the notebook gave the run up", now)

    def tick(self, now: float) -> list[Instruction]:
        """Look at the clock and at what has changed."""
        if self.concluded:
            return []
        if self.timeout_s is not None and now >= self.started_at + self.timeout_s:
            self._stop(StopCause.TIMEOUT, now)
        if self.stop_cause is not None and self._home_is_being_packed() and now >= self._home_due_at():
            self._lose_home(f"rank 0 did not pack it within {HOME_PATIENCE_S:.0f} s")
        out = [*self._settle(now), *self._rescue(now), *self._abort(now), *self._signals(now), *self._release(now)]
        has_ended = not self._ranks_in(*ALIVE) and not self._awaits_forks(now) and self.home is not HomePhase.ARRIVED
        if has_ended or self.stays:
            out += self._conclude()
        return out

    @property
    def stays(self) -> bool:
        """Whether the cell is over, and all ranks wait for another one."""
        if self.concluded:
            return self._has_stayed
        return self._may_stay and self._home_is_settled and all(phase is RankPhase.RESTING for phase in self.phases)

    @property
    def _home_is_settled(self) -> bool:
        """Whether what rank 0 made has been taken, or never will be."""
        return self.home in (HomePhase.TAKEN, HomePhase.LOST)

    @property
    def _may_stay(self) -> bool:
        has_lost_some = self._agent_has_gone or bool(self._ranks_in(RankPhase.EXITED))
        has_lost_some = has_lost_some or self._has_missed_rest or self._is_out_of_step
        # Whoever was sent more than an interrupt may still heed it.
        return self.keep and not has_lost_some and max(self._sent.values(), default=0) < 2

    def _settle(self, now: float) -> Iterator[Instruction]:
        """Have ranks that are to stay get ready for more; where one never does, they do not stay."""
        if not self._may_stay or not self._home_is_settled or self._ranks_in(RankPhase.PLANNED, *BUSY):
            return
        if self._rest_since is None:
            self._rest_since = now
            yield SettleRanks()
        self._has_missed_rest = self._has_missed_rest or (now >= self._rest_since + REST_PATIENCE_S and not self.stays)

    @property
    def group_is_broken(self) -> bool:
        """Whether collectives were broken off, so that the process group is no more."""
        return self._aborted

    def next_deadline(self, now: float) -> float | None:
        """Seconds until :meth:`tick` has something to do by the clock alone; None where nothing is due."""
        if self.concluded:
            return None
        due = [moment - now for moment in self._moments() if moment > now]
        return min(due, default=None)

    def _moments(self) -> Iterator[float]:
        if self.stop_cause is not None:
            times = self._times
            for seconds in (times.abort_s, times.rescue_s, times.terminate_s, times.kill_s):
                yield self.stop_started_at + seconds
            yield self._home_due_at()
        elif self.timeout_s is not None:
            yield self.started_at + self.timeout_s
        if self._rest_since is not None:
            yield self._rest_since + REST_PATIENCE_S
        for rank, moment in self.done_at.items():
            if rank not in self.released_at:
                yield moment + LINGER_S
        for moment in self.released_at.values():
            yield moment + EXIT_PATIENCE_S

    # -- where things are ----------------------------------------------------------------------------------------

    def _move(self, rank: int, event: RankEvent) -> bool:
        """Take a rank where an event leads; False where it leads nowhere."""
        target = RANK_TRANSITIONS.get((self.phases[rank], event))
        if target is None or self.concluded:
            return False
        self.phases[rank] = target
        return True

    def _move_home(self, event: HomeEvent) -> bool:
        target = HOME_TRANSITIONS.get((self.home, event))
        if target is None or self.concluded:
            return False
        self.home = target
        return True

    def _lose_home(self, reason: str) -> bool:
        is_new = self._move_home(HomeEvent.LOSE)
        if is_new:
            self.home_detail = reason
        return is_new

    def _note_done(self, rank: int, left_out: list[LeftOut], now: float) -> None:
        self.left_out += left_out
        self.done_at[rank] = now
        if rank == 0 and self.home is HomePhase.AWAITED:
            self._packing_since = now

    def _ranks_in(self, *phases: RankPhase) -> tuple[int, ...]:
        return tuple(rank for rank, phase in enumerate(self.phases) if phase in phases)

    def _awaits_forks(self, now: float) -> bool:
        """Whether a planned rank may still come. Once others would be killed, it is not waited for."""
        return self._expects_forks and bool(self._ranks_in(RankPhase.PLANNED)) and self._level(now) < 3

    def _note_late_death(self, rank: int, exit_code: int, hint: str) -> None:
        if self._has_caused(rank, exit_code):
            if self.interrupts >= 3:
                return
            hint = f"it had not ended {EXIT_PATIENCE_S:.0f} s after it was let go, and was killed"
        self.late_deaths.append(Death(rank, exit_code, hint))

    def _has_caused(self, rank: int, exit_code: int) -> bool:
        """Whether we ended a rank: its exit is a consequence of the stop."""
        level = self._sent.get(rank, 0)
        return level > 1 or (level == 1 and exit_code in (-signal.SIGINT, 128 + signal.SIGINT))

    # -- stopping ------------------------------------------------------------------------------------------------

    @property
    def _times(self) -> StopTimes:
        if self.stop_cause not in (StopCause.FAILURE, StopCause.LOST):
            return interrupt_times(self.grace_s)
        return KEPT_FAILURE_TIMES if self._may_stay else FAILURE_TIMES

    def _stop(self, cause: StopCause, now: float) -> None:
        if self.stop_cause is None:
            self.stop_cause, self.stop_started_at = cause, now

    def _is_due(self, seconds: float, now: float) -> bool:
        return self.stop_cause is not None and now >= self.stop_started_at + seconds

    def _level(self, now: float) -> int:
        """How hard the run is being stopped by now: 0 not at all, then as :data:`SIGNAL_OF_LEVEL`."""
        if self.stop_cause is None:
            return 0
        by_clock = 1 + self._is_due(self._times.terminate_s, now) + self._is_due(self._times.kill_s, now)
        return max(by_clock, self.interrupts)

    def _home_is_being_packed(self) -> bool:
        """Rank 0 is at it: it was asked to, or is done with its cell and does it unasked."""
        return self.home is HomePhase.ASKED or (self.home is HomePhase.AWAITED and self.phases[0] in DONE)

    def _home_due_at(self) -> float:
        return max(self._packing_since, self.stop_started_at) + HOME_PATIENCE_S

    def _rescue(self, now: float) -> Iterator[Instruction]:
        is_time = self._is_due(self._times.rescue_s, now) or self.interrupts >= 2
        if is_time and self.interrupts < 3 and self.phases[0] is RankPhase.RUNNING and self._move_home(HomeEvent.ASK):
            self._packing_since = now
            yield RescueHome()

    def _abort(self, now: float) -> Iterator[Instruction]:
        is_time = self._is_due(self._times.abort_s, now) and self.interrupts < 2
        if is_time and not self._aborted and self._ranks_in(*BUSY):
            self._aborted = True
            yield Abort(self._ranks_in(*ALIVE))

    def _signals(self, now: float) -> Iterator[Instruction]:
        """Bring every rank to the level of stopping that is due for it."""
        targets: dict[int, list[int]] = {}
        for rank in self._ranks_in(*ALIVE):
            level = self._level_for(rank, now)
            if level > self._sent.get(rank, 0):
                self._sent[rank] = level
                targets.setdefault(level, []).append(rank)
        for level in sorted(targets):
            yield Signal(tuple(targets[level]), SIGNAL_OF_LEVEL[level])

    def _level_for(self, rank: int, now: float) -> int:
        if self.interrupts >= 3:
            return 3
        if self.phases[rank] in DONE:
            overdue = rank in self.released_at and now >= self.released_at[rank] + EXIT_PATIENCE_S
            return 3 if overdue else 0
        is_spared = rank == 0 and (self._home_is_being_packed() or self.home is HomePhase.ARRIVED)
        return min(1, self._level(now)) if is_spared else self._level(now)

    # -- letting go ----------------------------------------------------------------------------------------------

    def _release(self, now: float) -> Iterator[Instruction]:
        """Let ranks end whose work is done: all together, or alone when the others take long."""
        all_done = not self._ranks_in(*BUSY) and not self._awaits_forks(now)
        ready = tuple(rank for rank in self._ranks_in(*DONE) if self._may_go(rank, now, all_done=all_done))
        self.released_at.update(dict.fromkeys(ready, now))
        if ready:
            yield Release(ready)

    def _may_go(self, rank: int, now: float, *, all_done: bool) -> bool:
        if self._may_stay or rank in self.released_at or (rank == 0 and not self._home_is_settled):
            return False
        return all_done or (self.phases[rank] is RankPhase.FINISHED and now >= self.done_at[rank] + LINGER_S)

    def _conclude(self) -> list[Instruction]:
        if self.concluded:
            return []
        self._lose_home("rank 0 was never started")
        self._has_stayed, self.concluded = self.stays, True
        return [Conclude()]

    # -- the outcome ---------------------------------------------------------------------------------------------

    @property
    def outcome(self) -> str:
        """What the run came to: "ok", or the value of the cause that stopped it."""
        return "ok" if self.stop_cause is None else self.stop_cause.value

    def check(self) -> None:
        """State the invariants; raises AssertionError where one does not hold."""
        assert len(self.phases) == self.num_ranks
        assert set(self.released_at) <= set(self.done_at)
        assert not (self.stays and self.released_at), "who stays is not let go"
        assert self._home_is_settled or 0 not in self.released_at, "rank 0 stays until what it made is safe"
        assert not (self.phases[0] is RankPhase.EXITED and self.awaits_home), "nobody is left to pack"
        assert not self.concluded or (self._home_is_settled and (self.stays or not self._ranks_in(*ALIVE)))
        assert not (self.failures.keys() & self.deaths.keys()), "who failed in good order has not died"
        assert self.stop_cause is not None or not (self.failures or self.deaths), "a failure stops the run"
        assert self.stop_cause is not StopCause.FAILURE or self.failures or self.deaths, "a failed run has a cause"
        assert self.stop_cause is not None or not self.interrupts
        assert self.stop_cause is not None or set(self._sent) <= set(self.released_at), "who may work is not signalled"
