"""Which of several failures began it."""

from __future__ import annotations

from collections.abc import Collection

from taas_magic.wire import Death, FailureReport


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


def uneven_hint(failure: FailureReport | None, finished: Collection[int]) -> str:
    """What to say where a collective broke because a peer was through with the cell; "" where that is not the case."""
    if failure is None or not is_consequence(failure) or not finished:
        return ""
    ranks = sorted(finished)
    who = f"rank {ranks[0]} was" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} were"
    return f"{who} through with the cell by then: not all ranks make the same collective calls (uneven batches?)"
