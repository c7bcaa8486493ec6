"""docs/states.md shows the tables and times that the runner goes by."""

from __future__ import annotations

import enum
import re
from pathlib import Path

import pytest

from taas_magic.runner import phases
from taas_magic.runner.phases import (
    FAILURE_TIMES,
    HOME_TRANSITIONS,
    RANK_TRANSITIONS,
    HomeEvent,
    HomePhase,
    RankEvent,
    RankPhase,
    StopCause,
    interrupt_times,
)

PAGE = (Path(__file__).parents[2] / "docs/states.md").read_text()
TEXT = " ".join(PAGE.split())


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def tables(title: str) -> list[list[list[str]]]:
    """The tables of a section, each a list of rows, without their heads."""
    blocks = re.findall(r"(?:^\|.*\n)+", section(title), re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in each.splitlines()[2:]] for each in blocks
    ]


@pytest.mark.parametrize(
    ("title", "transitions"), [("A rank", RANK_TRANSITIONS), ("What comes home", HOME_TRANSITIONS)]
)
def test_the_transitions_are_those_of_the_code(
    title: str, transitions: dict[tuple[enum.Enum, enum.Enum], enum.Enum]
) -> None:
    shown = {(row[0], row[1]): row[2] for row in tables(title)[0]}
    assert len(shown) == len(tables(title)[0]), "one row a transition"
    assert shown == {(phase.value, event.value): target.value for (phase, event), target in transitions.items()}


@pytest.mark.parametrize(("title", "events"), [("A rank", RankEvent), ("What comes home", HomeEvent)])
def test_every_event_is_told(title: str, events: type[enum.Enum]) -> None:
    assert [row[0] for row in tables(title)[1]] == [event.value for event in events]


@pytest.mark.parametrize(
    ("title", "words"),
    [("A rank", [RankPhase, RankEvent]), ("What comes home", [HomePhase, HomeEvent])],
)
def test_the_diagram_names_every_phase_and_event(title: str, words: list[type[enum.Enum]]) -> None:
    diagram = section(title).split("```")[1]
    missing = [each.value for kind in words for each in kind if not re.search(rf"\b{each.value}\b", diagram)]
    assert not missing


def test_every_phase_is_reached_and_left() -> None:
    for transitions, first, last in (
        (RANK_TRANSITIONS, {RankPhase.PLANNED}, {RankPhase.EXITED}),
        (HOME_TRANSITIONS, {HomePhase.AWAITED}, {HomePhase.TAKEN, HomePhase.LOST}),
    ):
        kind = type(next(iter(first)))
        assert set(transitions.values()) | first == set(kind)
        assert {phase for phase, _ in transitions} | last == set(kind)


def test_the_causes_are_those_of_the_code() -> None:
    assert {row[0]: row[1] for row in tables("A stop")[0]} == {cause.name: cause.value for cause in StopCause}


def test_the_steps_after_a_failure_are_those_of_the_code() -> None:
    times = FAILURE_TIMES
    shown = [float(row[1]) for row in tables("A stop")[1]]
    assert shown == [0, times.abort_s, times.rescue_s, times.terminate_s, times.kill_s]
    assert times.kill_s < 2


@pytest.mark.parametrize("grace_s", [0.2, 5.0, 60.0])
def test_the_steps_after_an_interrupt_are_those_of_the_code(grace_s: float) -> None:
    times = interrupt_times(grace_s)
    formulas = [row[2] for row in tables("A stop")[1]]
    assert formulas == ["0", "0.7, at most grace", "grace", "grace + 0.5", "2 grace + 0.5"]
    steps = [times.abort_s, times.rescue_s, times.terminate_s, times.kill_s]
    assert steps == [min(0.7, grace_s), grace_s, grace_s + 0.5, 2 * grace_s + 0.5]


def test_the_signals_are_those_of_the_code() -> None:
    named = [row[0] for row in tables("A stop")[1] if row[0].startswith("SIG")]
    assert named == [phases.SIGNAL_OF_LEVEL[level].name for level in (1, 2, 3)]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (phases.LINGER_S, "{:g} s after it finished"),
        (phases.EXIT_PATIENCE_S, "still there {:g} s after it was let go"),
        (phases.HOME_PATIENCE_S, "It has {:g} s to pack"),
    ],
)
def test_patience_is_as_in_the_code(seconds: float, words: str) -> None:
    assert words.format(seconds) in TEXT
