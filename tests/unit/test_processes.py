"""Forking, and what is done with the processes that are left of a run; each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run(source: str) -> str:
    prelude = "import os, sys, time\nfrom pathlib import Path\nfrom taas_magic import processes\n"
    code = prelude + textwrap.dedent(source)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(
    ("body", "exit_code"),
    [("None", 0), ("1 / 0", 1), ("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1)],
)
def test_a_fork_ends_with_what_its_body_says(body: str, exit_code: int) -> None:
    shown = run(
        f"""
        pid = processes.fork(lambda: {body})
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    assert shown == f"{exit_code}\n"


def test_the_shared_memory_of_killed_processes_goes_with_them() -> None:
    shown = run(
        """
        processes.become_subreaper()
        reader, writer = os.pipe()

        def be_worker():
            segment = Path(f"/dev/shm/torch_{os.getpid()}_1_1")
            segment.touch()
            os.write(writer, str(segment).encode())
            time.sleep(1000)

        processes.fork(be_worker)
        segment = Path(os.read(reader, 200).decode())
        others = Path(f"/dev/shm/torch_{os.getpid()}_1_1")
        others.touch()
        assert segment.exists()
        processes.kill_descendants()
        print(segment.exists(), others.exists())
        others.unlink()
        """
    )
    assert shown == "False True\n"
