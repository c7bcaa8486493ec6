"""From what a run reported to the exception that the cell raises."""

from __future__ import annotations

import contextlib
import pickle
import re
import signal
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from taas_magic.errors import RankDiedError, RankFailedError, RunnerLostError, RunTimeoutError
from taas_magic.units import format_exit, format_seconds
from taas_magic.wire import Death, FailureReport, RunEnded

E = TypeVar("E", bound=BaseException)


class RankTracebackError(Exception):
    """The cause of an exception that came from a rank: its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def exception_of(
    ended: RunEnded, num_ranks: int, timeout_s: float | None, *, tail_lines: int = 20
) -> BaseException | None:
    """The exception with which the cell fails; None where the run went well.

    Args:
        ended: The runner's last word.
        num_ranks: How many ranks there were.
        timeout_s: What ``--timeout`` said, in seconds.
        tail_lines: How many lines of a guilty rank's output to quote, where that was not shown.
    """
    if ended.outcome == "ok":
        return None
    others = [*([ended.hint] if ended.hint else []), *_describe_others(ended)]
    if ended.outcome == "timeout":
        error: BaseException = RunTimeoutError.of(
            f"the run took longer than --timeout allows ({format_seconds(timeout_s or 0)}) and was stopped",
            do="give it more time, or none of that flag",
        )
        return _with_rendering(error, lambda: [_stb_line(error), *_traceback_of(ended.failure), *others])
    if ended.outcome == "interrupted":
        return _interrupt(ended, others)
    if ended.outcome == "lost":
        return _lost(ended, others)
    if ended.death is not None:
        return _died(ended.death, num_ranks, [*_quote_tail(ended.death.rank, ended.tail, tail_lines), *others])
    if ended.failure is not None:
        return _failed(ended.failure, num_ranks, [*_quote_tail(ended.failure.rank, ended.tail, tail_lines), *others])
    return _lost(ended, others)


def _lost(ended: RunEnded, others: list[str]) -> RunnerLostError:
    error = RunnerLostError.of(f"the run could not go on: {ended.detail}", do="run the cell again")
    return _with_rendering(error, lambda: [_stb_line(error), *_traceback_of(ended.failure), *others])


def _failed(report: FailureReport, num_ranks: int, after: list[str]) -> BaseException:
    error = _rebuild(report)
    where = f"[rank {report.rank}]"
    if num_ranks > 1:
        _add_note(error, f"{where} raised this; the other ranks were stopped")
    _set(error, "__cause__", RankTracebackError(report.plain_traceback))
    head = [f"{where} of {num_ranks} failed:"] if num_ranks > 1 else []
    return _with_rendering(error, lambda: [*head, *report.traceback, *after])


def _rebuild(report: FailureReport) -> BaseException:
    """The rank's own exception; one that stands for it where this process cannot rebuild it."""
    if report.pickled:
        try:
            error = pickle.loads(report.pickled)  # from a rank of our own run
        except Exception:  # noqa: BLE001 - a constructor of the user's may raise anything
            error = None
        if isinstance(error, BaseException):
            return error
    stand_in = RankFailedError(f"{report.type_name}: {report.message}")
    stand_in.rank, stand_in.type_name = report.rank, report.type_name
    return stand_in


def _interrupt(ended: RunEnded, others: list[str]) -> BaseException:
    error = KeyboardInterrupt()
    interrupted = [ended.failure, *ended.other_failures]
    report = next((r for r in interrupted if r is not None and r.rank == 0), ended.failure)
    if report is None:
        return _with_rendering(error, lambda: ["KeyboardInterrupt: the run was stopped"])
    return _with_rendering(error, lambda: [*report.traceback])


def _died(death: Death, num_ranks: int, after: list[str]) -> RankDiedError:
    how = describe_exit(death.exit_code)
    error = RankDiedError.of(
        f"rank {death.rank} of {num_ranks} {how} before it had finished the cell",
        expected=f"likely cause: {death.hint}" if death.hint else "",
        do=f"`%taas logs --rank {death.rank}` shows all it wrote",
    )
    error.args = (str(error).replace("expected: likely", "likely"),)
    error.rank, error.exit_code = death.rank, death.exit_code
    return _with_rendering(error, lambda: [_stb_line(error), *after])


def describe_exit(exit_code: int) -> str:
    """Say how a process ended: ``was killed by SIGSEGV``, ``exited with code 3``."""
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-exit_code).name}"
    return format_exit(exit_code)


def _describe_others(ended: RunEnded) -> Iterable[str]:
    """One line for each different failure among the other ranks."""
    main = ended.failure
    groups: dict[tuple[str, str], list[int]] = {}
    for report in ended.other_failures:
        if not report.is_interrupt:
            groups.setdefault((report.type_name, report.message), []).append(report.rank)
    for (type_name, message), ranks in groups.items():
        first_line = message.splitlines()[0] if message else ""
        is_same = main is not None and (type_name, message) == (main.type_name, main.message)
        what = "the same error" if is_same else f"{type_name}: {first_line}"
        yield f"{_ranks(ranks)}: {what}"
    for death in ended.other_deaths:
        yield f"rank {death.rank} {describe_exit(death.exit_code)}"


def _ranks(ranks: list[int]) -> str:
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return "ranks " + ", ".join(map(str, ordered))


def _traceback_of(report: FailureReport | None) -> list[str]:
    return [] if report is None else [f"[rank {report.rank}] was here:", *report.traceback]


#: Lines of a crash's stack that belong to what runs the cell, not to the cell.
_OUR_FRAMES = re.compile(r"""\s*File "[^"]*(/taas_magic/rank/|/IPython/core/|<frozen runpy>)""")


def _quote_tail(rank: int, tail: str, num_lines: int) -> list[str]:
    lines = [line for line in tail.splitlines() if line.strip() and not _OUR_FRAMES.match(line)][-num_lines:]
    if not lines:
        return []
    return [f"the last lines of rank {rank}:", *(f"  [rank {rank}] {line}" for line in lines)]


def _stb_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _with_rendering(error: E, lines: Callable[[], list[str]]) -> E:
    """Let IPython show the rank's traceback in place of the frames of this package."""
    _set(error, "_render_traceback_", lines)
    return error


def _add_note(error: BaseException, note: str) -> None:
    _set(error, "__notes__", [*getattr(error, "__notes__", ()), note])


def _set(error: BaseException, name: str, value: Any) -> None:
    """Set an attribute past what the exception's own class says to that: it may be a frozen dataclass."""
    BaseException.__setattr__(error, name, value)
