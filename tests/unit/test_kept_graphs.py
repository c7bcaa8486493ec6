"""Random object graphs on kept ranks and in the notebook, changed here and there in turn: all must agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.kept import KeptRanks, warm_ranks
from unit.test_namespace_graphs import DEFINITIONS, changes, graphs, written_down

rounds = st.lists(st.tuples(st.sampled_from(["ranks", "notebook"]), changes), min_size=1, max_size=4)
BUILD = """
held = build(graph)
reached = [held[i % len(held)] for i in graph['reached']]
first, mirror = reached[0], reached
"""
CHANGE = "change(reached, moves); last = reached[-1]; both = [first, last]"
NAMES = ("reached", "first", "last", "both", "mirror", "held")


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptRanks]:
    with warm_ranks() as ranks:
        yield ranks


def after_all_here(graph: dict[str, Any], story: list[tuple[str, list[Any]]]) -> tuple[Any, Any]:
    names: dict[str, Any] = {"__name__": "__main__", "graph": graph, "last": None, "both": None}
    exec(DEFINITIONS + BUILD, names)
    for _, moves in story:
        names["moves"] = moves
        exec(CHANGE, names)
    exec("import copy; copied = copy.deepcopy([reached, first, mirror])", names)
    return written_down([names[name] for name in NAMES]), written_down(names["copied"])


def after_here_and_there(
    ranks: KeptRanks, graph: dict[str, Any], story: list[tuple[str, list[Any]]]
) -> tuple[Any, Any]:
    with ranks.notebook() as notebook:
        notebook.run(DEFINITIONS)
        notebook.names.update(graph=graph, last=None, both=None)
        notebook.run(BUILD)
        notebook.cell("import copy", "reached", "first", "mirror", "held", "change", "num_made", "last", "both")
        for where, moves in story:
            notebook.names["moves"] = moves
            if where == "ranks":
                notebook.cell(CHANGE)
            else:
                notebook.run(CHANGE)
        # What the ranks have, as new objects: the notebook knows nothing of them.
        notebook.cell("copied = copy.deepcopy([reached, first, mirror])")
        assert notebook.not_home == []
        return written_down([notebook[name] for name in NAMES]), written_down(notebook["copied"])


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(graph=graphs, story=rounds)
def test_notebook_and_ranks_agree_after_any_changes(
    ranks: KeptRanks, graph: dict[str, Any], story: list[tuple[str, list[Any]]]
) -> None:
    assert after_here_and_there(ranks, graph, story) == after_all_here(graph, story)
