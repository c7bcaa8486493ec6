"""From what a run reported to the exception that the cell raises."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from taas_magic.client.failures import RankTracebackError, describe_exit, exception_of
from taas_magic.errors import RankDiedError, RankFailedError, RunnerLostError, RunTimeoutError, TaasError
from taas_magic.rank.failure import report_failure
from taas_magic.wire import Death, FailureReport, RunEnded


class NeedsTwoError(Exception):
    """Its constructor cannot be called with its ``args``."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")
        self.path, self.line = path, line


@dataclass(frozen=True)
class FrozenError(Exception):
    """Nothing can be set on it."""

    code: int


class ExitWithError(SystemExit):
    """A builtin kind whose fields are set by the builtin's constructor."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(code)
        self.what = what


class HoldsALockError(Exception):
    """It cannot be pickled."""

    def __init__(self) -> None:
        import threading

        super().__init__("locked")
        self.lock = threading.Lock()


class LoudError(Exception):
    """It raises whenever it is looked at."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class WontLoadError(Exception):
    """It loads in no process."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("not here")


def raised(error: BaseException, rank: int = 1) -> FailureReport:
    """The report of a rank that really raised it."""
    try:
        raise error
    except BaseException as caught:
        return report_failure(rank, caught, lambda e: ["Cell In[3], line 7", f"{type(e).__name__}"])


def ended(outcome: str = "failed", **fields: Any) -> RunEnded:
    return RunEnded("run", outcome, 1.0, **fields)


def failed(error: BaseException, num_ranks: int = 4, **fields: Any) -> BaseException:
    result = exception_of(ended(failure=raised(error), **fields), num_ranks, None)
    assert result is not None
    return result


def rendered(error: BaseException) -> str:
    render: Callable[[], list[str]] = error._render_traceback_  # type: ignore[attr-defined]
    return "\n".join(render())


def test_a_run_that_went_well_raises_nothing() -> None:
    assert exception_of(ended("ok"), 4, None) is None


# -- the rank's own exception ----------------------------------------------------------------------------------------


def test_the_cell_fails_with_the_ranks_own_exception() -> None:
    error = failed(ValueError("bad batch", 7))
    assert type(error) is ValueError
    assert error.args == ("bad batch", 7)
    text = rendered(error)
    assert text.startswith("[rank 1] of 4 failed:")
    assert "Cell In[3], line 7" in text
    printed = "".join(traceback.format_exception(error))
    assert "[rank 1] raised this" in printed
    assert "raise error\nValueError: ('bad batch', 7)" in printed, "the traceback in the rank is its cause"


def test_a_single_rank_is_not_named() -> None:
    error = failed(ValueError("bad batch"), num_ranks=1)
    assert not getattr(error, "__notes__", [])
    assert "rank" not in rendered(error)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("loss"),
        FileNotFoundError(2, "No such file or directory", "/data/digits"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        StopIteration(3),
        SystemExit(2),
        AssertionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_builtin_exceptions_come_back_as_they_were(error: BaseException) -> None:
    result = failed(error)
    assert type(result) is type(error)
    assert result.args == error.args
    assert str(result) == str(error)


def test_torch_exceptions_come_back_as_they_were() -> None:
    torch = pytest.importorskip("torch")
    result = failed(torch.OutOfMemoryError("CUDA out of memory"))
    assert isinstance(result, torch.OutOfMemoryError)


def test_an_exception_whose_constructor_wants_more_comes_back() -> None:
    result = failed(NeedsTwoError("a.py", 3))
    assert isinstance(result, NeedsTwoError)
    assert (str(result), result.path, result.line) == ("a.py:3", "a.py", 3)


def test_an_exception_on_which_nothing_can_be_set_comes_back() -> None:
    result = failed(FrozenError(5))
    assert isinstance(result, FrozenError)
    assert result.code == 5
    assert "[rank 1] of 4" in rendered(result)
    assert isinstance(result.__cause__, RankTracebackError)


def test_an_exception_of_a_builtin_kind_with_a_constructor_of_its_own_keeps_what_the_builtin_knows() -> None:
    result = failed(ExitWithError("disk", code=3))
    assert isinstance(result, ExitWithError)
    assert (result.code, result.what) == (3, "disk")


def test_groups_and_notes_come_back() -> None:
    group = ExceptionGroup("two shards", [ValueError("a"), OSError(5, "b")])
    group.add_note("shard 3 of 8")
    result = failed(group)
    assert isinstance(result, ExceptionGroup)
    assert [type(each) for each in result.exceptions] == [ValueError, OSError]
    assert result.__notes__[0] == "shard 3 of 8"
    matching, rest = result.split(ValueError)
    assert matching is not None
    assert rest is not None
    assert [type(each) for each in rest.exceptions] == [OSError]


@pytest.mark.parametrize("error", [HoldsALockError(), WontLoadError("x")], ids=lambda error: type(error).__name__)
def test_what_cannot_be_rebuilt_is_stood_in_for(error: BaseException) -> None:
    result = failed(error)
    assert isinstance(result, RankFailedError)
    assert result.rank == 1
    assert result.type_name.endswith(type(error).__name__)
    assert str(result) == f"{result.type_name}: {error}"
    assert "Cell In[3], line 7" in rendered(result)


def test_an_exception_without_a_text_is_reported() -> None:
    report = raised(LoudError())
    assert report.message == "<LoudError whose text could not be made>"
    assert isinstance(exception_of(ended(failure=report), 2, None), LoudError)


def test_a_pickle_that_holds_no_exception_is_not_raised() -> None:
    report = FailureReport(0, 0.0, "ValueError", "boo", [], "", pickle.dumps("a string"))
    result = exception_of(ended(failure=report), 2, None)
    assert isinstance(result, RankFailedError)


def test_an_explanation_that_fails_does_not_hide_the_failure() -> None:
    def explode(error: BaseException) -> str:
        raise RuntimeError

    report = report_failure(0, ValueError("boo"), lambda _: [], [explode, lambda _: "guard the write"])
    result = exception_of(ended(failure=report), 1, None)
    assert isinstance(result, ValueError)
    assert result.__notes__ == ["guard the write"]


def test_ipython_shows_the_ranks_traceback_and_none_of_our_frames(capsys: pytest.CaptureFixture[str]) -> None:
    shell = InteractiveShell()
    try:
        raise failed(ValueError("boo"))
    except ValueError:
        shell.showtraceback(sys.exc_info())  # type: ignore[arg-type]  # IPython's hint forbids what it documents
    shown = capsys.readouterr().out
    assert "[rank 1] of 4 failed" in shown
    assert "Cell In[3], line 7" in shown
    assert "failures.py" not in shown


# -- the other ranks -------------------------------------------------------------------------------------------------


def test_the_same_error_of_other_ranks_is_said_once() -> None:
    others = [raised(ValueError("boo"), rank) for rank in (3, 2)]
    text = rendered(failed(ValueError("boo"), other_failures=others))
    assert "ranks 2 to 3: the same error" in text
    assert text.count("ValueError") == 1


def test_different_errors_of_other_ranks_are_listed() -> None:
    others = [
        raised(KeyError("x"), 7),
        raised(OSError("a\nb"), 2),
        raised(KeyError("x"), 3),
        raised(KeyboardInterrupt(), 4),
    ]
    text = rendered(failed(ValueError("boo"), 8, other_failures=others, other_deaths=[Death(5, -11)]))
    assert "ranks 3, 7: KeyError: 'x'" in text
    assert "rank 2: OSError: a\n" in text
    assert "rank 5 was killed by SIGSEGV" in text
    assert "rank 4" not in text, "it was interrupted by us"


def test_the_last_lines_of_a_rank_that_was_not_shown_are_quoted() -> None:
    tail = "\n".join(f"step {step}" for step in range(30))
    text = rendered(failed(ValueError("boo"), tail=tail))
    assert "the last lines of rank 1:\n  [rank 1] step 10\n" in text
    assert "step 9\n" not in text


# -- deaths, stops, losses -------------------------------------------------------------------------------------------


def test_a_death_names_rank_exit_and_cause() -> None:
    error = exception_of(ended(death=Death(2, -9, "out of memory")), 4, None)
    assert isinstance(error, RankDiedError)
    assert (error.rank, error.exit_code) == (2, -9)
    text = str(error)
    assert "rank 2 of 4 was killed by SIGKILL" in text
    assert "likely cause: out of memory" in text
    assert "%taas logs --rank 2" in text
    assert text in rendered(error)


def test_a_death_without_a_known_cause_claims_none() -> None:
    assert "likely" not in str(exception_of(ended(death=Death(0, -40)), 4, None))


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(0, "exited with code 0"), (3, "exited with code 3"), (-11, "SIGSEGV"), (-15, "SIGTERM"), (-40, "signal 40")],
)
def test_exits_in_words(exit_code: int, words: str) -> None:
    assert words in describe_exit(exit_code)


def test_a_stopped_run_raises_keyboard_interrupt_where_rank_0_was() -> None:
    reports = [raised(KeyboardInterrupt(), rank) for rank in (1, 0)]
    error = exception_of(ended("interrupted", failure=reports[0], other_failures=[reports[1]]), 2, None)
    assert type(error) is KeyboardInterrupt
    assert "Cell In[3], line 7" in rendered(error)


def test_a_run_that_was_stopped_before_any_rank_could_say_where() -> None:
    error = exception_of(ended("interrupted"), 2, None)
    assert type(error) is KeyboardInterrupt
    assert "the run was stopped" in rendered(error)


def test_a_timeout_names_the_flag() -> None:
    error = exception_of(ended("timeout", failure=raised(KeyboardInterrupt(), 0)), 2, 90)
    assert isinstance(error, RunTimeoutError)
    assert isinstance(error, TimeoutError)
    assert "--timeout" in str(error)
    assert "1 min 30 s" in str(error)
    assert "[rank 0] was here" in rendered(error)


def test_a_lost_run_says_why() -> None:
    error = exception_of(ended("lost", detail="the agent ended (-9)"), 2, None)
    assert isinstance(error, RunnerLostError)
    assert isinstance(error, TaasError)
    assert "the agent ended (-9)" in str(error)
