"""Fixtures of all tests, and what surrounds those that start processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import leaks
import pytest

PROCESS_TESTS = Path(__file__).parent / "process"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes, and skip what this machine cannot run."""
    has_gpu = Path("/dev/nvidiactl").exists()
    has_browser = any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    for item in items:
        if PROCESS_TESTS in item.path.parents:
            item.add_marker(pytest.mark.process)
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("browser") and not has_browser:
            item.add_marker(pytest.mark.skip(reason="no Chromium"))


@pytest.fixture(scope="session")
def private_temp() -> Iterator[Path]:
    """A temporary directory that no other run on this machine uses; what tests start inherits it.

    Its name is short, since paths of sockets may have 107 bytes only.
    """
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    directory = tempfile.mkdtemp(prefix="t-")
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    yield Path(directory)
    tempfile.tempdir = before[1]
    os.environ.pop("TMPDIR")
    if before[0] is not None:
        os.environ["TMPDIR"] = before[0]
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def started_once() -> None:
    """Start what starts at first use and stays for the life of the process: it is no test's leak."""
    from multiprocessing import resource_tracker

    import zmq
    from jupyter_core.utils import ensure_event_loop

    leaks.become_subreaper()
    ensure_event_loop()
    resource_tracker.ensure_running()
    zmq.Context.instance().socket(zmq.PAIR).close()


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a process test that leaves a process, thread, descriptor, shared memory or temporary directory.

    Fixtures of a wider scope are set up before it, so what they start belongs to the time before the test.
    """
    if request.node.get_closest_marker("process") is None or request.node.get_closest_marker("module_leak_check"):
        yield
        return
    request.getfixturevalue("private_temp")
    request.getfixturevalue("started_once")
    before = leaks.Snapshot.take()
    yield
    left = leaks.wait_until_gone(before)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)
