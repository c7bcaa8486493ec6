"""Fixtures of unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from unit.roundtrip import Child, Notebook, warm_child


@pytest.fixture(scope="session")
def child() -> Iterator[Child]:
    """The process that the cells of all tests are forked from."""
    with warm_child() as child:
        yield child


@pytest.fixture
def notebook(child: Child) -> Notebook:
    """An empty notebook."""
    return Notebook(child)
