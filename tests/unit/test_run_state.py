"""Stories of runs, told to the state machine: what happens, and what is to be done about it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from taas_magic.runner.phases import (
    EXIT_PATIENCE_S,
    FAILURE_TIMES,
    HOME_PATIENCE_S,
    LINGER_S,
    HomePhase,
    RankPhase,
    StopCause,
    interrupt_times,
)
from taas_magic.runner.run_state import (
    Abort,
    AnnounceStarted,
    Conclude,
    Instruction,
    PackHomeAgain,
    Release,
    RescueHome,
    RunState,
    Signal,
)
from taas_magic.wire import Death, FailureReport, LeftOut

T = TypeVar("T")
GRACE_S = 5.0
INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


def report(rank: int, message: str = "boo", *, at_s: float = 0.0, is_interrupt: bool = False) -> FailureReport:
    kind = "KeyboardInterrupt" if is_interrupt else "ValueError"
    return FailureReport(rank, at_s, kind, message, [], "", is_interrupt=is_interrupt)


class Story:
    """A run and a clock. Every event is followed by a look at the invariants."""

    def __init__(self, num_ranks: int = 3, *, timeout_s: float | None = None) -> None:
        self.now = 1000.0
        self.state = RunState(num_ranks, GRACE_S, self.now, timeout_s)
        self.done: list[Instruction] = []

    def __getattr__(self, event: str) -> Callable[..., list[Instruction]]:
        def happen(*args: object) -> list[Instruction]:
            instructions: list[Instruction] = getattr(self.state, event)(*args, self.now)
            self.done += instructions
            self.state.check()
            return instructions

        return happen

    def wait(self, seconds: float) -> list[Instruction]:
        """Let time pass, and look at the clock whenever the state has asked for that."""
        until, instructions = self.now + seconds, []
        while True:
            due = self.state.next_deadline(self.now)
            if due is None or self.now + due > until:
                break
            # As a poll does: it wakes a little late, never early.
            self.now += due + 1e-6
            instructions += self.tick()
        self.now = max(until, self.now)
        return instructions + self.tick()

    def start(self) -> None:
        for rank in range(self.state.num_ranks):
            self.rank_forked(rank)
        for rank in range(self.state.num_ranks):
            self.rank_started(rank)

    def finish(self, *ranks: int) -> None:
        for rank in ranks:
            self.rank_finished(rank, [])

    def exit(self, *ranks: int, code: int = 0) -> None:
        for rank in ranks:
            self.rank_exited(rank, code, "")

    def raise_interrupt(self, *ranks: int) -> None:
        for rank in ranks:
            self.rank_failed(report(rank, "", is_interrupt=True), [])


def only(kind: type[T], instructions: list[Instruction]) -> list[T]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def signals(instructions: list[Instruction]) -> list[tuple[tuple[int, ...], signal.Signals]]:
    return [(each.ranks, each.signum) for each in only(Signal, instructions)]


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.fixture(params=range(3))
def running(request: pytest.FixtureRequest) -> Iterator[Story]:
    """Three ranks in the midst of the cell, heard of in one order or another."""
    story = Story()
    order = [(0, 1, 2), (2, 1, 0), (1, 0, 2)][request.param]
    for rank in order:
        story.rank_forked(rank)
    for rank in order:
        story.rank_started(rank)
    story.done.clear()
    yield story
    story.state.check()


# -- a run that goes well --------------------------------------------------------------------------------------------


def test_all_finish(story: Story) -> None:
    story.start()
    assert only(AnnounceStarted, story.done) == [AnnounceStarted()]
    story.finish(0, 1, 2)
    assert only(Release, story.done) == [Release((1, 2))], "rank 0 has work to bring home"
    story.home_arrived()
    assert story.home_taken() == [Release((0,))]
    story.exit(1, 2)
    assert not story.state.concluded
    story.exit(0)
    assert story.done[-1] == Conclude()
    assert (story.state.outcome, story.state.home) == ("ok", HomePhase.TAKEN)
    assert not signals(story.done)


def test_a_single_rank(story: Story) -> None:
    story = Story(1)
    story.start()
    story.finish(0)
    story.home_arrived()
    story.home_taken()
    story.exit(0)
    assert story.state.concluded
    assert story.state.outcome == "ok"


def test_ranks_that_are_through_leave_together(running: Story) -> None:
    running.finish(1, 2)
    assert not running.done
    running.rank_finished(0, [])
    assert only(Release, running.done) == [Release((1, 2))]


def test_a_rank_that_is_through_first_leaves_after_it_has_lingered(running: Story) -> None:
    running.finish(2)
    assert not running.wait(LINGER_S / 2)
    assert running.wait(LINGER_S) == [Release((2,))]
    running.exit(2)
    assert not running.state.concluded
    assert running.state.stop_cause is None


def test_rank_0_does_not_leave_before_the_notebook_has_what_it_made(running: Story) -> None:
    running.finish(0)
    running.home_arrived()
    assert not running.wait(10 * LINGER_S)
    assert running.home_taken() == [Release((0,))]
    running.exit(0)
    running.finish(1, 2)
    assert only(Release, running.done)[-1] == Release((1, 2))


def test_ranks_that_are_slow_to_exit_are_killed_each_in_its_time(running: Story) -> None:
    running.finish(1)
    running.wait(LINGER_S + EXIT_PATIENCE_S / 2)
    assert not signals(running.done)
    running.wait(EXIT_PATIENCE_S)
    assert signals(running.done) == [((1,), KILL)]
    running.exit(1, code=-9)
    running.finish(2)
    running.wait(LINGER_S + EXIT_PATIENCE_S + 1)
    assert signals(running.done) == [((1,), KILL), ((2,), KILL)]
    running.exit(2, code=-9)
    assert not running.state.deaths, "their work was done"
    assert running.state.stop_cause is None


def test_what_ranks_left_out_is_collected(running: Story) -> None:
    entry = LeftOut(1, "torch.save", "a.pt", 2)
    running.rank_finished(1, [entry])
    running.rank_finished(1, [entry])
    assert running.state.left_out == [entry], "a rank finishes once"


def test_rank_0_that_can_pack_nothing_is_let_go(running: Story) -> None:
    running.finish(0, 1, 2)
    assert running.home_failed("MemoryError") == [Release((0,))]
    running.exit(0, 1, 2)
    assert running.state.concluded
    assert (running.state.outcome, running.state.home_detail) == ("ok", "MemoryError")


# -- a rank fails ----------------------------------------------------------------------------------------------------


def test_a_rank_fails(running: Story) -> None:
    instructions = running.rank_failed(report(1), [])
    assert signals(instructions) == [((0, 2), INT)], "the others are told at once"
    running.raise_interrupt(0, 2)
    assert only(Release, running.done) == [Release((1, 2))]
    running.home_arrived()
    running.home_taken()
    running.exit(0, 1, 2, code=1)
    assert running.state.concluded
    assert (running.state.outcome, running.state.home) == ("failed", HomePhase.TAKEN)
    assert not running.state.deaths


def test_the_failed_rank_stays_until_the_others_have_stopped(running: Story) -> None:
    running.rank_failed(report(1), [])
    running.wait(FAILURE_TIMES.abort_s - 0.1)
    assert not only(Release, running.done)
    running.raise_interrupt(0)
    assert not only(Release, running.done)
    running.raise_interrupt(2)
    assert only(Release, running.done) == [Release((1, 2))]


def test_a_rank_waits_in_a_collective_for_the_one_that_failed(running: Story) -> None:
    running.rank_failed(report(1), [])
    running.raise_interrupt(0)
    assert only(Abort, running.wait(FAILURE_TIMES.abort_s)) == [Abort((0, 1, 2))]
    assert not only(Abort, running.wait(0.1)), "once is enough"
    running.raise_interrupt(2)
    assert not signals(running.wait(1)), "nobody is left to be signalled"


def test_ranks_that_stop_for_nothing_are_killed_within_two_seconds(running: Story) -> None:
    running.rank_failed(report(1), [])
    running.home_failed("nothing to save")
    running.wait(2.0)
    assert signals(running.done) == [((0, 2), INT), ((0, 2), TERM), ((0, 2), KILL)]
    running.exit(0, 2, code=-9)
    assert only(Release, running.done) == [Release((1,))]
    running.exit(1, code=1)
    assert running.state.concluded
    assert not running.state.deaths, "who is killed by us has not died of itself"


def test_rank_0_is_stuck_and_rescued(running: Story) -> None:
    running.rank_failed(report(1), [])
    running.raise_interrupt(2)
    instructions = running.wait(FAILURE_TIMES.kill_s + 10)
    assert only(RescueHome, instructions) == [RescueHome()]
    assert not signals(instructions), "it is packing"
    running.home_arrived()
    assert not signals(running.wait(1)), "the notebook may ask it to pack again"
    assert signals(running.home_taken()) == [((0,), KILL)]
    running.exit(0, code=-9)
    running.exit(1, 2, code=1)
    assert running.state.concluded
    assert running.state.home is HomePhase.TAKEN
    assert not running.state.deaths


def test_rank_0_does_not_answer_in_time(running: Story) -> None:
    running.rank_failed(report(1), [])
    running.raise_interrupt(2)
    running.wait(FAILURE_TIMES.rescue_s + HOME_PATIENCE_S - 1)
    assert signals(running.done) == [((0, 2), INT)]
    assert signals(running.wait(2)) == [((0,), KILL)]
    assert running.state.home is HomePhase.LOST
    running.exit(0, code=-9)
    running.exit(1, 2, code=1)
    assert running.state.concluded
    assert "120" in running.state.home_detail


def test_rank_0_fails_and_hangs_while_it_packs(running: Story) -> None:
    running.rank_failed(report(0), [])
    running.raise_interrupt(1, 2)
    running.exit(1, 2, code=1)
    assert not running.wait(HOME_PATIENCE_S - 1)
    assert running.wait(2) == [Release((0,))]
    assert signals(running.wait(EXIT_PATIENCE_S)) == [((0,), KILL)]
    running.exit(0, code=-9)
    assert running.state.concluded
    assert not running.state.deaths


def test_what_arrives_after_it_was_given_up_is_not_taken(running: Story) -> None:
    running.rank_failed(report(1), [])
    running.wait(FAILURE_TIMES.rescue_s + HOME_PATIENCE_S + 1)
    assert not running.state.awaits_home
    running.home_arrived()
    assert running.state.home is HomePhase.LOST


def test_a_rank_fails_before_the_others_have_started(story: Story) -> None:
    for rank in range(3):
        story.rank_forked(rank)
    assert signals(story.rank_failed(report(2), [])) == [((0, 1), INT)]
    assert signals(story.rank_started(0)) == [((0,), INT)], "it may not have been ready when it was told first"
    assert not only(AnnounceStarted, story.done)


# -- a rank dies -----------------------------------------------------------------------------------------------------


def test_a_rank_dies(running: Story) -> None:
    instructions = running.rank_exited(1, -11, "a crash")
    assert signals(instructions) == [((0, 2), INT)]
    assert running.state.deaths == {1: Death(1, -11, "a crash")}
    running.raise_interrupt(0, 2)
    running.home_arrived()
    running.home_taken()
    running.exit(0, 2, code=1)
    assert (running.state.outcome, running.state.home) == ("failed", HomePhase.TAKEN)


def test_a_rank_leaves_without_a_word(running: Story) -> None:
    running.rank_exited(2, 0, "os._exit")
    assert running.state.deaths == {2: Death(2, 0, "os._exit")}
    assert running.state.outcome == "failed"


def test_rank_0_dies(running: Story) -> None:
    running.rank_exited(0, -9, "memory")
    running.raise_interrupt(1, 2)
    running.exit(1, 2, code=1)
    assert running.state.concluded
    assert (running.state.home, running.state.home_detail) == (HomePhase.LOST, "rank 0's process ended first")


def test_rank_0_dies_while_it_packs_what_the_cell_made(running: Story) -> None:
    running.finish(0, 1, 2)
    running.rank_exited(0, -9, "memory")
    assert running.state.deaths == {0: Death(0, -9, "memory")}, "the cell's work is lost, and that is a failure"
    assert running.state.outcome == "failed"


def test_rank_0_dies_when_its_work_is_safe(running: Story) -> None:
    running.finish(0, 1, 2)
    running.home_arrived()
    running.rank_exited(0, -11, "a crash")
    assert not running.state.concluded, "the notebook has still to take it"
    running.exit(1, 2)
    running.home_taken()
    assert running.state.concluded
    assert (running.state.outcome, running.state.home) == ("ok", HomePhase.TAKEN)


def test_who_dies_of_our_interrupt_has_not_failed(running: Story) -> None:
    running.interrupt(1)
    running.exit(1, code=-INT)
    running.exit(2, code=130)
    assert not running.state.deaths
    running.exit(0, code=-11)
    assert list(running.state.deaths) == [0], "a crash is no answer to an interrupt"
    assert running.state.outcome == "interrupted"


def test_a_rank_that_was_noticed_late_to_have_died_is_still_named(running: Story) -> None:
    running.rank_failed(report(0, "Connection closed by peer"), [])
    running.rank_exited(1, -9, "memory")
    assert list(running.state.deaths) == [1]


# -- the user stops the run ------------------------------------------------------------------------------------------


def test_first_interrupt(running: Story) -> None:
    assert running.interrupt(1) == [Signal((0, 1, 2), INT)]
    running.raise_interrupt(0, 1, 2)
    running.home_arrived()
    running.home_taken()
    running.exit(0, 1, 2, code=1)
    assert running.state.concluded
    assert (running.state.outcome, running.state.home) == ("interrupted", HomePhase.TAKEN)
    assert signals(running.done) == [((0, 1, 2), INT)]


def test_a_rank_that_ignores_the_first_interrupt_is_moved_on(running: Story) -> None:
    running.interrupt(1)
    times = interrupt_times(GRACE_S)
    assert only(Abort, running.wait(times.abort_s)) == [Abort((0, 1, 2))]
    running.raise_interrupt(0, 2)
    running.home_arrived()
    running.home_taken()
    assert not signals(running.wait(times.terminate_s - times.abort_s - 0.1))
    assert signals(running.wait(0.2)) == [((1,), TERM)]
    assert not signals(running.wait(GRACE_S - 0.2))
    assert signals(running.wait(0.2)) == [((1,), KILL)]


def test_second_interrupt(running: Story) -> None:
    running.interrupt(1)
    running.wait(0.1)
    assert running.interrupt(2) == [RescueHome(), Signal((1, 2), TERM)]
    running.exit(1, 2, code=-TERM)
    running.home_arrived()
    assert signals(running.home_taken()) == [((0,), TERM)]
    running.exit(0, code=-TERM)
    assert running.state.concluded
    assert (running.state.outcome, running.state.home) == ("interrupted", HomePhase.TAKEN)
    assert not running.state.deaths


def test_second_interrupt_before_rank_0_has_anything(story: Story) -> None:
    for rank in range(3):
        story.rank_forked(rank)
    story.interrupt(1)
    assert story.interrupt(2) == [Signal((0, 1, 2), TERM)]


def test_third_interrupt(running: Story) -> None:
    running.interrupt(1)
    running.interrupt(2)
    assert running.interrupt(3) == [Signal((0, 1, 2), KILL)], "rank 0 too"
    running.exit(0, 1, 2, code=-9)
    assert running.state.concluded
    assert (running.state.home, running.state.home_detail) == (HomePhase.LOST, "rank 0 was killed first")
    assert not running.state.deaths


def test_third_interrupt_while_the_notebook_takes_what_came(running: Story) -> None:
    running.finish(0)
    running.home_arrived()
    running.interrupt(3)
    running.exit(0, 1, 2, code=-9)
    assert not running.state.concluded, "it is in the notebook's hands"
    running.home_taken()
    assert running.state.concluded
    assert running.state.home is HomePhase.TAKEN


def test_interrupt_while_rank_0_packs(running: Story) -> None:
    running.finish(0, 1, 2)
    running.interrupt(1)
    running.interrupt(2)
    assert not signals(running.done), "it is done with the cell, and packing"
    assert signals(running.interrupt(3)) == [((0, 1, 2), KILL)]


def test_interrupt_during_the_start(story: Story) -> None:
    story.rank_forked(0)
    assert signals(story.interrupt(1)) == [((0,), INT)], "who has no process is not signalled"
    assert signals(story.rank_forked(1)) == [((1,), INT)], "but as soon as it has one"
    assert signals(story.rank_started(1)) == [((1,), INT)], "and once more when it surely hears it"
    story.wait(GRACE_S + 1)
    assert signals(story.rank_forked(2)) == [((2,), TERM)]
    assert not only(AnnounceStarted, story.done)


def test_a_stop_does_not_wait_for_ranks_that_never_get_a_process(story: Story) -> None:
    story.interrupt(1)
    story.wait(interrupt_times(GRACE_S).kill_s - 0.1)
    assert not story.state.concluded
    story.wait(0.2)
    assert story.state.concluded
    assert story.state.outcome == "interrupted"


def test_an_interrupt_of_an_unknown_level_counts_as_the_nearest(running: Story) -> None:
    assert signals(running.interrupt(7)) == [((0, 1, 2), KILL)]


def test_an_interrupt_during_a_stop_after_a_failure(running: Story) -> None:
    running.rank_failed(report(1), [])
    running.interrupt(1)
    assert running.state.stop_cause is StopCause.FAILURE
    assert signals(running.interrupt(2)) == [((2,), TERM)]


def test_timeout() -> None:
    story = Story(2, timeout_s=60)
    story.start()
    assert not signals(story.wait(59.9))
    assert signals(story.wait(0.2)) == [((0, 1), INT)]
    story.raise_interrupt(0, 1)
    story.home_arrived()
    story.home_taken()
    story.exit(0, 1, code=1)
    assert (story.state.outcome, story.state.home) == ("timeout", HomePhase.TAKEN)


# -- what comes home -------------------------------------------------------------------------------------------------


def test_home_is_refused_and_packed_again(running: Story) -> None:
    running.finish(0, 1, 2)
    running.home_arrived()
    assert running.home_refused() == [PackHomeAgain()]
    assert running.state.awaits_home
    running.home_arrived()
    assert running.home_taken() == [Release((0,))]


def test_home_is_refused_when_rank_0_has_gone(running: Story) -> None:
    running.finish(0, 2)
    running.home_arrived()
    running.exit(0, code=-9)
    assert not running.home_refused()
    assert running.state.home is HomePhase.LOST
    assert "gone" in running.state.home_detail
    running.finish(1)
    running.exit(1, 2)
    assert running.state.concluded


def test_rank_0_dies_while_it_packs_again(running: Story) -> None:
    running.finish(0, 1, 2)
    running.home_arrived()
    running.home_refused()
    running.exit(0, code=-9)
    assert running.state.home is HomePhase.LOST


def test_answers_that_nobody_waits_for_change_nothing(running: Story) -> None:
    running.home_taken()
    running.home_refused()
    assert running.state.home is HomePhase.AWAITED
    assert not running.done


# -- the processes around the ranks ----------------------------------------------------------------------------------


def test_the_agent_dies_before_it_has_started_all_ranks(story: Story) -> None:
    story.rank_forked(0)
    story.rank_started(0)
    assert signals(story.agent_exited(-9)) == [((0,), INT)]
    story.raise_interrupt(0)
    story.home_arrived()
    story.home_taken()
    story.exit(0, code=1)
    assert story.state.concluded
    assert story.state.outcome == "lost"
    assert "agent" in story.state.detail


def test_the_agent_dies_before_it_has_started_any_rank(story: Story) -> None:
    assert story.agent_exited(1) == [Conclude()]
    assert (story.state.outcome, story.state.home) == ("lost", HomePhase.LOST)


def test_the_agent_dies_while_ranks_work(running: Story) -> None:
    assert signals(running.agent_exited(-9)) == [((0, 1, 2), INT)], "its store is what they meet at"
    assert running.state.outcome == "lost"


def test_the_agent_ends_after_its_ranks(running: Story) -> None:
    running.finish(0, 1, 2)
    running.home_arrived()
    running.home_taken()
    running.exit(0, 1, 2)
    assert not running.agent_exited(0)
    assert running.state.outcome == "ok"


def test_everything_ends_at_once(running: Story) -> None:
    assert running.processes_lost("the machine is short of memory") == [Conclude()]
    assert (running.state.outcome, running.state.detail) == ("lost", "the machine is short of memory")
    assert not running.processes_lost("again")


def test_everything_ends_when_home_has_arrived(running: Story) -> None:
    running.finish(0, 1, 2)
    running.home_arrived()
    assert not running.processes_lost("killed"), "what arrived can still be taken"
    assert running.home_taken() == [Conclude()]


def test_the_notebook_gives_the_run_up(running: Story) -> None:
    assert running.abandoned() == [Conclude()]
    running.exit(0, 1, 2, code=-9)
    assert running.done == [Conclude()]


def test_the_notebook_gives_up_what_has_arrived(running: Story) -> None:
    running.finish(0)
    running.home_arrived()
    assert running.abandoned() == [Conclude()]


def test_what_a_rank_says_may_overtake_what_its_parent_says(story: Story) -> None:
    for rank in range(3):
        story.rank_started(rank)
    assert story.done == [AnnounceStarted()]
    for rank in range(3):
        story.rank_forked(rank)
    assert story.state.phases == [RankPhase.RUNNING] * 3


def test_nothing_happens_after_the_end(running: Story) -> None:
    running.interrupt(3)
    running.exit(0, 1, 2, code=-9)
    assert running.state.concluded
    running.done.clear()
    running.interrupt(3)
    running.rank_failed(report(1), [])
    running.agent_exited(1)
    running.home_arrived()
    running.rank_started(2)
    assert not running.done
    assert running.state.next_deadline(running.now) is None
