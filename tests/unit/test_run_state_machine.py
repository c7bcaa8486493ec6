"""The state machine against a world that does what it likes: whatever happens, its promises hold and the run ends."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from taas_magic.runner.cause import choose_cause
from taas_magic.runner.phases import (
    BUSY,
    EXIT_PATIENCE_S,
    FAILURE_TIMES,
    HOME_PATIENCE_S,
    KEPT_FAILURE_TIMES,
    REST_PATIENCE_S,
    HomePhase,
    RankPhase,
    StopCause,
    interrupt_times,
)
from taas_magic.runner.run_state import (
    AnnounceStarted,
    Conclude,
    Instruction,
    PackHomeAgain,
    Release,
    RescueHome,
    RunState,
    Signal,
)
from taas_magic.wire import FailureReport

RANKS = st.integers(0, 3)
SECONDS = st.one_of(st.floats(0, 3), st.floats(0, 300))
MESSAGES = st.sampled_from(["boo", "Connection closed by peer"])
EXIT_CODES = st.sampled_from([0, 1, -2, -9, -11, -15, 130])


class World(RuleBasedStateMachine):
    """Ranks, an agent, a kernel and a clock, as a run may meet them. Signals other than SIGKILL may be ignored."""

    @initialize(
        num_ranks=st.integers(1, 4),
        grace_s=st.sampled_from([0.0, 0.3, 5.0]),
        timeout_s=st.sampled_from([None, None, 4.0, 100.0]),
        keep=st.sampled_from(["no", "from now on", "still"]),
    )
    def submit(self, num_ranks: int, grace_s: float, timeout_s: float | None, keep: str) -> None:
        self.now = 5000.0
        is_resumed = keep == "still"
        self.state = RunState(num_ranks, grace_s, self.now, timeout_s, keep=keep != "no", is_resumed=is_resumed)
        #: The ranks that have a process, and the signals that each has got.
        self.signals: dict[int, list[signal.Signals]] = {rank: [] for rank in range(num_ranks) if is_resumed}
        self.exited: set[int] = set()
        self.released: set[int] = set()
        self.packing_since: float | None = None
        self.kernel_holds_home = False
        self.level = 0
        self.num_concluded = self.num_announced = 0
        self.agent_is_there = True

    # -- carrying out what the state says ----------------------------------------------------------------------------

    def do(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            assert not self.num_concluded, f"{each} after the end"
            if isinstance(each, Signal):
                self.deliver(each)
            elif isinstance(each, Release):
                self.release(each.ranks)
            elif isinstance(each, (RescueHome, PackHomeAgain)):
                assert 0 in self.alive()
                self.packing_since = self.now
            elif isinstance(each, AnnounceStarted):
                assert self.state.stop_cause is None
                self.num_announced += 1
            elif isinstance(each, Conclude):
                self.num_concluded += 1
                self.alive_at_the_end = self.alive()
        assert self.num_concluded <= 1
        assert self.num_announced <= 1

    def deliver(self, order: Signal) -> None:
        assert order.ranks
        for rank in order.ranks:
            assert rank in self.signals, "who has no process yet is not signalled"
            assert rank not in self.exited, "who has gone is not signalled"
            if order.signum != signal.SIGINT and rank == 0:
                self.may_strike_rank_0()
            if self.state.stop_cause is None:
                assert order.signum == signal.SIGKILL
                assert rank in self.released
            assert order.signum not in self.signals[rank] or order.signum == signal.SIGINT
            self.signals[rank].append(order.signum)

    def may_strike_rank_0(self) -> None:
        if self.level == 3 or 0 in self.released:
            return
        assert not self.kernel_holds_home, "the kernel may still want it packed again"
        assert self.packing_since is None or self.now >= self.packing_since + HOME_PATIENCE_S

    def release(self, ranks: tuple[int, ...]) -> None:
        assert ranks
        assert not self.released & set(ranks)
        if 0 in ranks:
            assert self.state.home in (HomePhase.TAKEN, HomePhase.LOST)
        self.released |= set(ranks)

    def alive(self) -> set[int]:
        return self.signals.keys() - self.exited

    def in_phase(self, *phases: RankPhase) -> set[int]:
        return {rank for rank in self.alive() if self.state.phases[rank] in phases}

    def pick(self, among: set[int], wish: int) -> int | None:
        return sorted(among)[wish % len(among)] if among else None

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule()
    def fork(self) -> None:
        rank = len(self.signals)
        # After the end the whole tree is killed, whoever is in it.
        if rank < self.state.num_ranks and self.agent_is_there and not self.num_concluded:
            self.signals[rank] = []
            self.do(self.state.rank_forked(rank, self.now))

    @rule(wish=RANKS)
    def start(self, wish: int) -> None:
        rank = self.pick(self.in_phase(RankPhase.STARTING), wish)
        if rank is not None:
            self.do(self.state.rank_started(rank, self.now))
            if self.state.stop_cause is not None:
                assert self.signals[rank], "it begins while the others are being stopped"

    @rule()
    def start_all(self) -> None:
        for _ in range(self.state.num_ranks):
            self.fork()
        for rank in sorted(self.in_phase(RankPhase.STARTING)):
            self.do(self.state.rank_started(rank, self.now))

    @rule(wish=RANKS)
    def finish(self, wish: int) -> None:
        rank = self.pick(self.in_phase(RankPhase.RUNNING), wish)
        if rank is not None:
            self.note_packing(rank)
            self.do(self.state.rank_finished(rank, [], self.now))

    @rule(wish=RANKS, message=MESSAGES, is_interrupt=st.booleans())
    def fail(self, wish: int, message: str, is_interrupt: bool) -> None:
        rank = self.pick(self.in_phase(*BUSY), wish)
        if rank is None:
            return
        self.note_packing(rank)
        report = FailureReport(rank, self.now, "ValueError", message, [], "", is_interrupt=is_interrupt)
        was_calm = self.state.stop_cause is None
        others = self.in_phase(*BUSY) - {rank}
        self.do(self.state.rank_failed(report, [], self.now))
        if was_calm:
            assert all(self.signals[other] for other in others), "the others are told at once"

    @precondition(lambda self: self.state.keep)
    @rule(wish=RANKS)
    def rest(self, wish: int) -> None:
        rank = self.pick(self.in_phase(RankPhase.FINISHED, RankPhase.FAILED) - self.who_packs(), wish)
        if rank is not None:
            self.do(self.state.rank_rested(rank, self.now))

    @precondition(lambda self: self.state.keep)
    @rule()
    def all_do_well_and_rest(self) -> None:
        self.start_all()
        for rank in sorted(self.in_phase(RankPhase.RUNNING)):
            self.note_packing(rank)
            self.do(self.state.rank_finished(rank, [], self.now))
        if self.packing_since is not None:
            self.answer_home(works=True)
        for rank in sorted(self.in_phase(RankPhase.FINISHED, RankPhase.FAILED) - self.who_packs()):
            self.do(self.state.rank_rested(rank, self.now))

    @rule(wish=RANKS, code=EXIT_CODES)
    def die(self, wish: int, code: int) -> None:
        rank = self.pick(self.alive(), wish)
        if rank is not None:
            self.exit(rank, code)

    @precondition(lambda self: any(signal.SIGKILL in self.signals[rank] for rank in self.alive()))
    @rule()
    def end_who_was_killed(self) -> None:
        for rank in sorted(self.alive()):
            if signal.SIGKILL in self.signals[rank]:
                self.exit(rank, -9)

    @rule(level=st.integers(1, 3))
    def interrupt(self, level: int) -> None:
        if not self.num_concluded:
            self.level = max(self.level, level)
        self.do(self.state.interrupt(level, self.now))

    @precondition(lambda self: self.packing_since is not None)
    @rule(works=st.booleans())
    def answer_home(self, works: bool) -> None:
        if 0 not in self.alive():
            return
        self.packing_since = None
        if works and self.state.awaits_home:
            self.kernel_holds_home = True
            self.do(self.state.home_arrived(self.now))
        else:
            self.do(self.state.home_failed("no memory", self.now))

    @precondition(lambda self: self.kernel_holds_home)
    @rule(takes=st.booleans())
    def answer_of_the_kernel(self, takes: bool) -> None:
        self.kernel_holds_home = False
        self.do(self.state.home_taken(self.now) if takes else self.state.home_refused(self.now))

    @rule(code=EXIT_CODES)
    def agent_dies(self, code: int) -> None:
        self.agent_is_there = False
        self.do(self.state.agent_exited(code, self.now))

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.advance(self.now + seconds)

    # -- the world's own rules ---------------------------------------------------------------------------------------

    def who_packs(self) -> set[int]:
        return set() if self.packing_since is None else {0}

    def note_packing(self, rank: int) -> None:
        if rank == 0 and self.state.home is HomePhase.AWAITED:
            self.packing_since = self.now

    def exit(self, rank: int, code: int) -> None:
        self.exited.add(rank)
        if rank == 0:
            self.packing_since = None
        was_busy = self.state.phases[rank] in BUSY
        was_calm = self.state.stop_cause is None
        self.do(self.state.rank_exited(rank, code, "", self.now))
        if was_busy and was_calm and not self.num_concluded:
            assert self.state.stop_cause is StopCause.FAILURE
            assert rank in self.state.deaths

    def advance(self, until: float) -> None:
        """Let time pass; the state is asked when it wants to be."""
        while (due := self.state.next_deadline(self.now)) is not None and self.now + due <= until:
            assert due > 0
            self.now += due + 1e-6
            self.do(self.state.tick(self.now))
        self.now = max(self.now, until)
        self.do(self.state.tick(self.now))

    # -- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def the_state_is_sound(self) -> None:
        self.state.check()
        assert self.state.concluded == bool(self.num_concluded)

    @invariant()
    def nobody_is_left_at_the_end(self) -> None:
        if self.num_concluded and self.alive_at_the_end:
            assert self.state.stays
            assert self.alive_at_the_end == set(range(self.state.num_ranks))
            assert not self.released
            assert not any(signal.SIGTERM in sent or signal.SIGKILL in sent for sent in self.signals.values())

    @invariant()
    def who_does_not_stop_is_killed_in_time(self) -> None:
        cause = self.state.stop_cause
        if cause is None or self.num_concluded:
            return
        after_failure = KEPT_FAILURE_TIMES if self.state.keep else FAILURE_TIMES
        is_broken = cause in (StopCause.FAILURE, StopCause.LOST)
        times = after_failure if is_broken else interrupt_times(self.state.grace_s)
        assert FAILURE_TIMES.kill_s <= 2
        if self.now < self.state.stop_started_at + times.kill_s:
            return
        for rank in self.in_phase(*BUSY):
            is_spared = rank == 0 and (self.packing_since is not None or self.kernel_holds_home)
            assert is_spared or signal.SIGKILL in self.signals[rank]

    @invariant()
    def the_cause_is_among_what_was_seen(self) -> None:
        failures, deaths = list(self.state.failures.values()), list(self.state.deaths.values())
        failure, death, others, other_deaths = choose_cause(failures, deaths)
        assert failure is None or death is None
        assert (failure is None and death is None) == (not failures and not deaths)
        if self.state.stop_cause is StopCause.FAILURE:
            assert failure or death
        assert {each.rank for each in [failure, *others] if each} <= {each.rank for each in failures}
        assert sorted(d.rank for d in [death, *other_deaths] if d) == sorted(self.state.deaths)

    # -- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Whatever has happened: a run that is being stopped ends in bounded time, though ranks obey SIGKILL only."""
        if not hasattr(self, "state"):
            return
        started = self.now
        if self.state.stop_cause is None and not self.num_concluded:
            self.interrupt(1)
        while not self.num_concluded:
            if self.kernel_holds_home:
                self.answer_of_the_kernel(takes=True)
                continue
            if any(signal.SIGKILL in self.signals[rank] for rank in self.alive()):
                self.end_who_was_killed()
                continue
            due = self.state.next_deadline(self.now)
            assert due is not None, f"nothing will ever happen: {self.state}"
            self.advance(self.now + due)
            self.state.check()
        patience = REST_PATIENCE_S if self.state.keep else 0
        longest = max(interrupt_times(self.state.grace_s).kill_s, KEPT_FAILURE_TIMES.kill_s)
        longest += HOME_PATIENCE_S + EXIT_PATIENCE_S + patience
        assert self.now - started <= longest + 1
        self.state.check()


TestWorld = World.TestCase
TestWorld.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
