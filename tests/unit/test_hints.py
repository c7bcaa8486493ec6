"""Why a process may have died: every way to die has its words, and none is claimed without ground."""

from __future__ import annotations

import signal

import pytest

from taas_magic.runner.hints import death_hint, oom_kills


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "os._exit"),
        (1, "without an exception"),
        (-signal.SIGSEGV, "native code"),
        (-signal.SIGABRT, "native code"),
        (-signal.SIGBUS, "/dev/shm"),
        (-signal.SIGILL, "another"),
        (-signal.SIGFPE, "division"),
        (-signal.SIGTERM, "SIGTERM"),
        (-signal.SIGKILL, "from outside"),
    ],
)
def test_a_likely_cause(exit_code: int, words: str) -> None:
    assert words in death_hint(exit_code, new_oom_kills=0)


def test_the_memory_killer_is_named_only_where_it_has_been_at_work() -> None:
    assert "memory" in death_hint(-signal.SIGKILL, new_oom_kills=1)
    assert "memory" not in death_hint(-signal.SIGKILL, new_oom_kills=0)
    assert "memory killer" not in death_hint(-signal.SIGSEGV, new_oom_kills=1)


def test_an_unknown_signal_gets_no_cause() -> None:
    assert not death_hint(-int(signal.SIGRTMIN) - 5, new_oom_kills=0)


def test_kills_are_counted_and_never_less() -> None:
    first = oom_kills()
    assert first >= 0
    assert oom_kills() >= first
