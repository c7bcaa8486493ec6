"""What the ranks run, and how they say when: each writes its times to a file of its own."""

from __future__ import annotations

import contextlib
import socket
import textwrap
from dataclasses import dataclass
from pathlib import Path

#: Runs first in every job: the first line of user code, the process group, the first all_reduce.
_HEAD = """\
import time
user_at = time.monotonic()
import os
from pathlib import Path
import torch
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
reduced_at = time.monotonic()
assert total.item() == dist.get_world_size() == {num_ranks}

def stamp(*times):
    path = Path({directory!r}, str(dist.get_rank()))
    path.with_suffix(".part").write_text(" ".join(map(repr, times)))
    path.with_suffix(".part").rename(path)
"""

_BODIES = {
    "empty": "pass\n",
    "launch": _HEAD + "stamp(user_at, reduced_at)\n",
    "failure": _HEAD
    + """
if dist.get_rank() == 1:
    stamp(time.monotonic())
    raise ValueError("on purpose")
dist.barrier()
""",
    "stop": _HEAD
    + """
stamp(time.monotonic())
time.sleep(600)
""",
}
KINDS = tuple(_BODIES)


@dataclass(frozen=True)
class Job:
    """One launch: ``kind`` on ``num_ranks`` ranks, with an empty directory of its own."""

    kind: str
    num_ranks: int
    directory: Path

    @property
    def body(self) -> str:
        """The Python code that each rank runs."""
        if self.kind == "empty":
            return _BODIES["empty"]
        return _BODIES[self.kind].format(num_ranks=self.num_ranks, directory=str(self._stamps))

    @property
    def script(self) -> Path:
        """A file with that code, for launchers that start scripts."""
        path = self.directory / "script.py"
        path.write_text(self.body)
        return path

    @property
    def module(self) -> Path:
        """A module whose function ``train`` runs that code, for launchers that pickle a function by its name."""
        path = self.directory / f"job_{self.directory.name.replace('-', '_')}.py"
        path.write_text(self.function("train"))
        return path

    def function(self, name: str) -> str:
        """The definition of a function that runs that code."""
        return f"def {name}():\n{textwrap.indent(self.body, '    ')}"

    # -- what the ranks said -------------------------------------------------------------------------------------

    @property
    def _stamps(self) -> Path:
        path = self.directory / "stamps"
        path.mkdir(exist_ok=True)
        return path

    def stamps(self) -> list[tuple[float, ...]]:
        """The times of each rank that has written them so far."""
        found = []
        for path in self._stamps.iterdir():
            with contextlib.suppress(OSError):  # renamed meanwhile
                if not path.suffix:
                    found.append(tuple(map(float, path.read_text().split())))
        return found


def free_port() -> int:
    """A port that is free now; peers that want a number cannot be given the bound socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
