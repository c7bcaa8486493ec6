"""Which of several failures began it."""

from __future__ import annotations

import pytest

from taas_magic.runner.cause import choose_cause, is_consequence, uneven_hint
from taas_magic.wire import Death, FailureReport

PEER_GONE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:554] Connection closed by peer [127.0.0.1]:4711",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:4711: Connection reset by peer",
    "NCCL communicator was aborted on rank 3.",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
)


def report(rank: int, message: str, at_s: float, *, is_interrupt: bool = False) -> FailureReport:
    return FailureReport(rank, at_s, "RuntimeError", message, [], "", is_interrupt=is_interrupt)


def test_the_first_failure_is_the_cause() -> None:
    late, early = report(0, "late", 2.0), report(1, "early", 1.0)
    assert choose_cause([late, early], []) == (early, None, [late], [])


@pytest.mark.parametrize("message", PEER_GONE)
def test_a_broken_collective_is_a_consequence_however_early_it_was_reported(message: str) -> None:
    broken, cause = report(0, message, 1.0), report(1, "bad batch", 1.5)
    assert is_consequence(broken)
    assert choose_cause([broken, cause], []) == (cause, None, [broken], [])


@pytest.mark.parametrize("message", ["bad batch", "", "CUDA error: an illegal memory access was encountered"])
def test_what_an_error_says_of_itself_is_no_consequence(message: str) -> None:
    assert not is_consequence(report(0, message, 0.0))


def test_a_death_explains_broken_collectives() -> None:
    broken, death = report(0, PEER_GONE[0], 1.0), Death(1, -9)
    assert choose_cause([broken], [death]) == (None, death, [broken], [])


def test_an_exception_comes_before_a_death_that_it_may_have_led_to() -> None:
    cause, death = report(0, "bad batch", 1.0), Death(1, -6)
    assert choose_cause([cause], [death]) == (cause, None, [], [death])


def test_the_first_death_noticed_is_the_cause() -> None:
    first, second = Death(2, -11), Death(0, 1)
    assert choose_cause([], [first, second]) == (None, first, [], [second])


def test_only_broken_collectives_leave_the_earliest_as_the_cause() -> None:
    early, late = report(3, PEER_GONE[1], 1.0), report(0, PEER_GONE[0], 2.0)
    assert choose_cause([late, early], []) == (early, None, [late], [])


def test_interrupts_are_consequences() -> None:
    interrupt, cause = report(0, "", 1.0, is_interrupt=True), report(1, "bad batch", 2.0)
    assert choose_cause([interrupt, cause], []) == (cause, None, [], [])


def test_among_interrupts_alone_the_lowest_rank_speaks() -> None:
    interrupts = [report(rank, "", 1.0, is_interrupt=True) for rank in (2, 0, 1)]
    assert choose_cause(interrupts, []) == (interrupts[1], None, [], [])


def test_nothing_has_no_cause() -> None:
    assert choose_cause([], []) == (None, None, [], [])


def test_who_was_through_is_named_where_a_collective_broke() -> None:
    broken = report(1, "Connection closed by peer [127.0.0.1]:1", 0.0)
    assert uneven_hint(broken, {0}).startswith("rank 0 was through with the cell by then")
    assert uneven_hint(broken, {2, 0}).startswith("ranks 0, 2 were through")
    assert uneven_hint(broken, ()) == ""
    assert uneven_hint(report(1, "boo", 0.0), {0}) == ""
    assert uneven_hint(None, {0}) == ""
