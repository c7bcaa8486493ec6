"""The leak check sees each kind of thing that a test can leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import leaks
import pytest

pytestmark = pytest.mark.process

WAITS = "import sys; sys.stdin.read()"
LEAVES_AN_ORPHAN = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {WAITS!r}], stdin=0, stdout=subprocess.DEVNULL).pid)
"""


@contextlib.contextmanager
def a_process() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE) as child:
        yield f"process {child.pid} "
        child.communicate()


@contextlib.contextmanager
def an_orphan() -> Iterator[str]:
    reading, writing = os.pipe()
    made = subprocess.run([sys.executable, "-c", LEAVES_AN_ORPHAN], stdin=reading, stdout=subprocess.PIPE, check=True)
    yield f"process {int(made.stdout)} "
    os.kill(int(made.stdout), signal.SIGKILL)
    os.close(reading)
    os.close(writing)


@contextlib.contextmanager
def a_thread() -> Iterator[str]:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="left")
    thread.start()
    yield "thread left"
    go_on.set()
    thread.join()


@contextlib.contextmanager
def a_descriptor() -> Iterator[str]:
    descriptor = os.memfd_create("left")
    yield f"descriptor {descriptor}: /memfd:left"
    os.close(descriptor)


@contextlib.contextmanager
def shared_memory() -> Iterator[str]:
    memory = SharedMemory(create=True, size=1)
    memory.close()
    yield f"shared memory /dev/shm/{memory.name}"
    memory.unlink()


@contextlib.contextmanager
def a_temporary_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="taas-") as directory:
        yield f"temporary {directory}"


@pytest.mark.parametrize("leave", [a_process, an_orphan, a_thread, a_descriptor, shared_memory, a_temporary_directory])
def test_what_is_left_is_named_and_what_went_is_not(leave: Callable[[], AbstractContextManager[str]]) -> None:
    before = leaks.Snapshot.take()
    with leave() as named:
        left = leaks.wait_until_gone(before, deadline_s=0)
        assert any(what.startswith(named) for what in left), left
    assert leaks.wait_until_gone(before) == []


CHECKS_WHILE_ASKED = """
import leaks
before = leaks.Snapshot.take()
print("looked", flush=True)
input()
print(leaks.wait_until_gone(before, deadline_s=0))
"""


def test_shared_memory_that_another_program_holds_is_not_the_tests() -> None:
    # The checking process is below this one, so this one is another program to it.
    with subprocess.Popen(
        [sys.executable, "-c", CHECKS_WHILE_ASKED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(leaks.__file__).parent)},
    ) as checking:
        assert checking.stdout is not None
        assert checking.stdout.readline() == "looked\n"
        memory = SharedMemory(create=True, size=1)
        try:
            said, _ = checking.communicate("\n")
        finally:
            memory.close()
            memory.unlink()
    assert said == "[]\n"
