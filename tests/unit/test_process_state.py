"""What of a process's state travels to the ranks, beside names."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from taas_magic.namespace import process_state

LIBRARY = """
import warnings

class LibraryWarning(UserWarning):
    pass

warnings.simplefilter("error", LibraryWarning)
"""

#: What a rank does with the state: it has not imported the library, and its filter has to hold all the same.
RANK = """
import pickle, sys, warnings
from taas_magic.namespace import process_state
state = pickle.load(sys.stdin.buffer)
process_state.apply(state)
assert "library_of_filters" not in sys.modules, "the filter has imported the library"
import library_of_filters
warnings.filters[:] = state.warning_filters  # without the one that the import has added
warnings.warn("another kind", UserWarning)
try:
    warnings.warn("of the library", library_of_filters.LibraryWarning)
except library_of_filters.LibraryWarning:
    print("the filter holds")
"""


def test_a_warning_filter_holds_in_ranks_and_imports_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library_of_filters.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import library_of_filters  # type: ignore[import-not-found]

        assert issubclass(library_of_filters.LibraryWarning, UserWarning)
        state = pickle.dumps(process_state.capture({}))
    # In a process of its own: here, the library is imported.
    ran = subprocess.run([sys.executable, "-c", RANK], input=state, capture_output=True, check=False)
    assert ran.stdout.decode().strip() == "the filter holds", ran.stderr.decode()
    monkeypatch.delitem(sys.modules, "library_of_filters")
