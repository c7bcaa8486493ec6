"""A transfer is spoken of when it takes long, and its line is ended."""

from __future__ import annotations

import pytest

from taas_magic.client.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("taas_magic.client.progress.time.monotonic", lambda: now[0])
    return now


def test_nothing_is_said_of_a_short_one(clock: list[float]) -> None:
    said: list[str] = []
    transfer = Progress(said.append, "sending")
    for done in range(10):
        clock[0] += 0.09
        transfer.tell(done, 10)
    transfer.end()
    assert said == []


def test_a_long_one_is_told_now_and_then(clock: list[float]) -> None:
    said: list[str] = []
    transfer = Progress(said.append, "sending")
    for done in range(0, 2**30 + 1, 2**26):
        clock[0] += 0.15
        transfer.tell(done, 2**30)
    transfer.end()
    assert said[0] == "sending: 37 % of 1.0 GiB"
    assert 3 < len(said) < 8
    assert said[-1] == ""
