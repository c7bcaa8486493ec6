"""A ruleset that was built in advance is taken where it is right, and built anew where it is not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_magic.rank import landlock, rulesets

pytestmark = pytest.mark.skipif(landlock.abi_version() == 0, reason="this kernel has no Landlock that can be used")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "above" / "project"
    project.mkdir(parents=True)
    # Nothing may have changed in the tick of the clock in which it is looked at; /tmp changes all the time.
    time.sleep(0.1)
    return project


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The projects that rulesets were built for."""
    projects: list[Path] = []
    build = landlock.build_ruleset

    def note(project: Path, writable: list[Path]) -> int:
        projects.append(project)
        return build(project, writable)

    monkeypatch.setattr(landlock, "build_ruleset", note)
    monkeypatch.setattr(rulesets, "_prepared", [])
    # Only the directories of the test are looked at: others on this machine are not this test's to keep quiet.
    stamps = rulesets._stamps
    monkeypatch.setattr(rulesets, "_stamps", lambda project: stamps(project)[:3])
    yield projects
    for prepared in rulesets._prepared:
        os.close(prepared.fd)


def take(project: Path, *writable: Path) -> None:
    os.close(rulesets.ruleset_for(project, writable))


def test_it_is_built_once(project: Path, built: list[Path]) -> None:
    rulesets.prepare(project, [])
    for _ in range(3):
        take(project)
    assert built == [project]


def test_another_one_is_built_for_other_paths(project: Path, built: list[Path]) -> None:
    rulesets.prepare(project, [])
    take(project.parent)
    take(project, project / "cache")
    assert built == [project, project.parent, project]


def test_another_one_is_built_when_something_has_come_beside_the_project(project: Path, built: list[Path]) -> None:
    rulesets.prepare(project, [])
    (project / "inside").mkdir()
    take(project)
    assert len(built) == 1, "what is in the project does not matter"
    (project.parent / "beside").mkdir()
    take(project)
    assert len(built) == 2


def test_another_one_is_built_when_the_project_is_another_directory(project: Path, built: list[Path]) -> None:
    rulesets.prepare(project, [])
    project.rename(project.with_name("old"))
    project.mkdir()
    take(project)
    assert len(built) == 2


def test_none_is_prepared_while_things_change(project: Path, built: list[Path]) -> None:
    (project.parent / "just now").mkdir()
    rulesets.prepare(project, [])
    assert built == []
