"""Memory while elements are delivered for minutes: does any process grow?"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from delivering.contestants import Ours
from delivering.measure import Bench, run_cell
from taas_magic.processes import children_of

_EVERY_S = 5.0
#: What comes before is growth that ends: memory for elements, caches, the first epoch.
_WARM_UP = 0.2
_MIB = 2**20
_MOST_MIB_A_MINUTE = 0.5
#: What a process calls itself, and what it is called here. The rank says who it is.
_TITLES = (
    (re.compile("taas: coordinator"), "coordinator"),
    (re.compile("taas: producer .*"), "producers"),
    (re.compile("taas: delivery"), "nursery"),
    (re.compile("taas: runner"), "runner"),
)
#: Both loaders end and begin again many times.
_REGISTER = """\
import os, time, taas
from pathlib import Path
from torch.utils.data import DataLoader, Subset
from delivering.torch_loaders import Blocks, Small
blocks = DataLoader(Subset(Blocks(), range(3000)), batch_size=None, shuffle=True)
small = DataLoader(Subset(Small(), range(20_000)), batch_size=None, shuffle=True)
taas.register(blocks)
taas.register(small)
"""
_TAKE = """\
#pragma taas --gpus 1 --cpus 1
def stream(until):
    taken = [0, 0]
    while True:
        for place, loader in enumerate((blocks, small)):
            for element in loader:
                taken[place] += 1
                if time.monotonic() > until:
                    return taken
Path({pid!r}).write_text(str(os.getpid()))
Path({out!r}).write_text(repr(stream(time.monotonic() + {seconds})))
"""


@dataclass
class Growth:
    """The memory of one kind of process: (seconds since the beginning, MiB), PSS and what of it is not shared."""

    pss: list[tuple[float, float]] = field(default_factory=list)
    own: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Streamed:
    """What came of it."""

    minutes: float
    growth: dict[str, Growth]
    num_blocks: int
    num_small: int

    def lines(self) -> Iterator[str]:
        """A table, and the targets."""
        yield f"### Memory in {self.minutes:g} minutes of streaming"
        yield ""
        yield f"{self.num_blocks:,} batches of 9.6 MB and {self.num_small:,} elements of 1 kB, in epochs of 3,000 and "
        yield f"20,000, shuffled. MiB, sampled every {_EVERY_S:.0f} s; the first {_WARM_UP:.0%} is warm-up."
        yield ""
        yield "| | PSS at first | PSS at most | PSS at last | of that its own, at last | its own, MiB a minute |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for name, growth in self.growth.items():
            pss = [mebibytes for _, mebibytes in growth.pss]
            texts = [f"{value:.1f}" for value in (pss[0], max(pss), pss[-1], growth.own[-1][1])]
            slope = self.slope(name)
            yield f"| {name} | {' | '.join(texts)} | {'' if slope is None else f'{slope:+.2f}'} |"
        yield ""
        for name in self.growth:
            slope = self.slope(name)
            verdict = "not measured"
            if slope is not None:
                verdict = f"{'met' if slope < _MOST_MIB_A_MINUTE else 'NOT met'} ({slope:+.2f})"
            yield f"- memory of {name}: less than {_MOST_MIB_A_MINUTE} MiB more a minute: {verdict}"
        yield ""

    def slope(self, name: str) -> float | None:
        """MiB a minute behind the warm-up, of the processes' own memory: the shared one is whose it happens to be."""
        points = [(at, mebibytes) for at, mebibytes in self.growth[name].own if at > _WARM_UP * 60 * self.minutes]
        if len(points) < 3:
            return None
        return 60 * statistics.linear_regression(*zip(*points, strict=True)).slope


def stream(bench: Bench, minutes: float) -> Streamed:
    """Stream for so long.

    Raises:
        NotebookError: if that fails.
    """
    pid_path, out = bench.directory / "rank.pid", bench.directory / "taken"
    with bench.notebook(Ours("blocks", 2, 512), _REGISTER) as notebook:
        watch = _Watch(pid_path)
        seconds = 60 * minutes
        source = _TAKE.format(pid=str(pid_path), out=str(out), seconds=seconds)
        run_cell(notebook, source, seconds + 60, watch.look)
    num_blocks, num_small = map(int, out.read_text(encoding="utf-8").strip("[]").split(","))
    return Streamed(minutes, watch.growth, num_blocks, num_small)


class _Watch:
    def __init__(self, rank_pid: Path) -> None:
        self._rank_pid = rank_pid
        self._begun: float | None = None
        self._due = 0.0
        self.growth: dict[str, Growth] = {}

    def look(self) -> None:
        now = time.monotonic()
        if now < self._due or not self._rank_pid.exists():
            return
        self._begun = self._begun or now
        self._due = now + _EVERY_S
        totals: dict[str, list[float]] = {}
        for pid, name in self._processes():
            memory = _memory_of(pid)
            if memory is not None:
                total = totals.setdefault(name, [0.0, 0.0])
                total[0] += memory[0]
                total[1] += memory[1]
        for name, (pss, own) in totals.items():
            growth = self.growth.setdefault(name, Growth())
            growth.pss.append((now - self._begun, pss))
            growth.own.append((now - self._begun, own))

    def _processes(self) -> Iterator[tuple[int, str]]:
        rank = self._rank_pid.read_text(encoding="utf-8")
        for pid in _descendants(os.getpid()):
            if str(pid) == rank:
                yield pid, "rank"
                continue
            title = _title_of(pid)
            yield from ((pid, name) for pattern, name in _TITLES if pattern.fullmatch(title))


def _descendants(pid: int) -> Iterator[int]:
    for child in children_of(pid):
        yield child
        yield from _descendants(child)


def _title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").strip("\0 ")
    except OSError:
        return ""


def _memory_of(pid: int) -> tuple[float, float] | None:
    """MiB: the process's share of its memory, and of that what is not shared memory."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    fields = {name: float(rest.split()[0]) / 1024 for name, _, rest in (line.partition(":") for line in lines)}
    if "Pss" not in fields:
        return None
    return fields["Pss"], fields["Pss"] - fields.get("Pss_Shmem", 0.0)
