"""What it costs to bring state to the ranks and home, beside a copy of it and what others do. See README.md."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from launch import write_between_marks
from launching.contestants import CONTESTANTS
from launching.measure import Bench, Samples
from launching.notebook import Notebook
from launching.report import hardware

from taas_magic._version import __version__
from taas_magic.processes import become_subreaper, kill_descendants

GIB = 2**30
_LIMIT_S = 600.0
_SETUP = """\
%load_ext taas_magic
import cloudpickle, dataclasses, gc, mmap, pickle, statistics, time
import numpy as np, torch
from pathlib import Path

def first_touch_copy(arrays):
    "Copy arrays into memory that nobody has touched yet: what one copy of them costs."
    begun = time.monotonic()
    memory = mmap.mmap(-1, sum(array.nbytes for array in arrays))
    flat, at = np.frombuffer(memory, np.uint8), 0
    for array in arrays:
        flat[at:at + array.nbytes] = array.view(np.uint8).reshape(-1)
        at += array.nbytes
    seconds = time.monotonic() - begun
    del flat
    memory.close()
    return seconds

def tell(seconds):
    Path(out).write_text(repr(seconds))
"""
_MAKE_STATE = """\
state = [torch.rand({mebibytes} * 2**18 // {parts}) for _ in range({parts})]
"""
_REFERENCE = """\
tell(first_touch_copy([tensor.numpy() for tensor in state]))
"""
_CELL = """\
import time
user_at = time.monotonic()
import os, pathlib
{work}
done_at = time.monotonic()
pathlib.Path(stamps, os.environ["RANK"]).write_text(f"{{user_at}} {{done_at}}")
"""
_OBJECTS = """\
@dataclasses.dataclass
class Point:
    number: int
    name: str
    tags: list
    weight: float
points = {number: Point(number, str(number), [number], number / 3) for number in range(10_000)}
"""
_PLAIN_OBJECTS = """\
begun = time.monotonic()
loaded = pickle.loads(cloudpickle.dumps(points))
tell(time.monotonic() - begun)
del loaded
"""
_OUR_OBJECTS = """\
from taas_magic.namespace.pack import Selection, load_namespace, pack_namespace
begun = time.monotonic()
packed = pack_namespace(globals(), Selection(("points",)))
loaded = {}
received = load_namespace(packed.parcel.fds, loaded)
tell(time.monotonic() - begun)
packed.parcel.close()
del packed, loaded, received
"""
_NAIVE = """\
begun = time.monotonic()
data = cloudpickle.dumps(state)
packed_at = time.monotonic()
loaded = pickle.loads(data)
tell((packed_at - begun, time.monotonic() - packed_at))
del data, loaded
"""


def main() -> None:
    arguments = _parse()
    become_subreaper()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="taas-bench-") as directory:
        text = _Measuring(arguments, Path(directory)).report()
    print(text)
    for path in arguments.output:
        write_between_marks(path, text, "state")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each, interleaved (default: 3)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 1024, 4096], help="MiB of tensors")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8, 16], help="numbers of ranks")
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter that has ipyparallel")
    parser.add_argument("--output", type=Path, nargs="+", default=[], help="Markdown files to write the tables into")
    return parser.parse_args()


class _Measuring:
    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self._arguments = arguments
        self._directory = directory
        self._out = directory / "out"
        self._stamps = directory / "stamps"

    def report(self) -> str:
        sizes = [self._size_row(size, 8) for size in self._arguments.sizes]
        ranks = [self._size_row(1024, number) for number in self._arguments.ranks if number != 8]
        gibibyte = next((row for row in sizes if row["MiB"] == 1024), None)
        naive, objects = self._others()
        kept = self._kept()
        lines = [
            f"Medians of {self._arguments.rounds} samples, interleaved, in seconds. Ranks on CPU.",
            "",
            "### Tensors to the ranks and home, beside one copy into untouched memory",
            "",
            *_table(sizes + ranks),
            "",
            f"Plain cloudpickle of 1 GiB of tensors: {naive[0]:.2f} s to pack, {naive[1]:.2f} s to load, in each rank.",
            "",
            "### 10,000 small objects",
            "",
            f"A dict of dataclasses, packed and loaded: {objects[0]:.3f} s, plain cloudpickle {objects[1]:.3f} s.",
            "",
            "### A cell on ranks that are up",
            "",
            "| | user code on all 8 ranks |",
            "| --- | --- |",
            *(f"| {title} | {_seconds(seconds)} |" for title, seconds in kept.values()),
            "",
            "Targets:",
            "",
            *self._targets(gibibyte, objects, kept),
            "",
            f"Measured on {hardware()}, load {os.getloadavg()[2]:.1f} (15 min);",
            f"Python {platform.python_version()}, taas-magic {__version__}.",
            f"Command: `python benchmarks/state.py {self._options()} --peers-python PEERS`",
            "",
        ]
        return "\n".join(lines)

    def _options(self) -> str:
        sizes, ranks = (" ".join(map(str, numbers)) for numbers in (self._arguments.sizes, self._arguments.ranks))
        return f"--rounds {self._arguments.rounds} --sizes {sizes} --ranks {ranks}"

    def _targets(
        self,
        gibibyte: dict[str, float] | None,
        objects: tuple[float, float],
        kept: dict[str, tuple[str, list[float]]],
    ) -> Iterator[str]:
        if gibibyte is not None:
            for column in ("new state", "home"):
                ratio = gibibyte[column] / gibibyte["copy"]
                yield _verdict(f"1 GiB, 8 ranks: {column} at most 1.5 copies", ratio <= 1.5, f"{ratio:.2f}")
            yield _verdict("1 GiB unchanged: less than 1 MiB sent", gibibyte["KiB again"] < 1024, "")
        ratio = objects[0] / objects[1]
        yield _verdict("10,000 objects: at most 1.5 times plain cloudpickle", ratio <= 1.5, f"{ratio:.2f}")
        ours, theirs = kept["taas-kept"][1], kept["ipyparallel-steady"][1]
        if ours and theirs:
            difference = statistics.median(ours) - statistics.median(theirs)
            text = f"{1000 * difference:+.0f} ms"
            yield _verdict("a kept cell: at most 20 ms more than %%px", difference <= 0.02, text)

    # -- tensors -------------------------------------------------------------------------------------------------

    def _size_row(self, mebibytes: int, num_ranks: int) -> dict[str, float]:
        """How long a state takes; what a cell takes without any is taken off."""
        samples: dict[str, list[float]] = {name: [] for name in ("copy", "none", "new", "again", "home", "no home")}
        with self._notebook() as run:
            run(_SETUP + f"out = {str(self._out)!r}; stamps = {str(self._stamps)!r}\n")
            run(_MAKE_STATE.format(mebibytes=mebibytes, parts=min(16, mebibytes)))
            self._cell(run, num_ranks, "pass")
            sent_kib = 0.0
            for number in range(self._arguments.rounds + 1):
                copy = self._told(run, _REFERENCE)
                none, no_home = self._cell(run, num_ranks, "pass")
                run("for tensor in state:\n    tensor.add_(1)")
                new, _ = self._cell(run, num_ranks, "state")
                again, _ = self._cell(run, num_ranks, "state")
                sent_kib = self._sent_kib(run, num_ranks)
                _, home = self._cell(run, num_ranks, "if os.environ['RANK'] == '0':\n    for t in state: t.add_(1)")
                if number:  # the first round warms up
                    for name, seconds in zip(samples, (copy, none, new, again, home, no_home), strict=True):
                        samples[name].append(seconds)
        median = {name: statistics.median(values) for name, values in samples.items()}
        row: dict[str, float] = {"MiB": mebibytes, "ranks": num_ranks, "copy": median["copy"]}
        row["new state"] = max(0.0, median["new"] - median["none"])
        row["unchanged"] = max(0.0, median["again"] - median["none"])
        row["home"] = max(0.0, median["home"] - median["no home"])
        row["KiB again"] = sent_kib
        return row

    def _cell(self, run: Callable[[str], tuple[float, float]], num_ranks: int, work: str) -> tuple[float, float]:
        """Seconds from submit to user code on all ranks, and from the end of rank 0's work to idle."""
        self._stamps.mkdir(exist_ok=True)
        for stamp in self._stamps.iterdir():
            stamp.unlink()
        # Time for the next run's processes to be forked, as a person leaves.
        run("time.sleep(1)")
        submitted_at, idle_at = run(f"#pragma taas --gpus {num_ranks}\n" + _CELL.format(work=work))
        times = {stamp.name: tuple(map(float, stamp.read_text().split())) for stamp in self._stamps.iterdir()}
        assert len(times) == num_ranks, f"{len(times)} of {num_ranks} ranks ran"
        return max(user_at for user_at, _ in times.values()) - submitted_at, idle_at - times["0"][1]

    def _sent_kib(self, run: Callable[[str], tuple[float, float]], num_ranks: int) -> float:
        run(
            "from taas_magic.namespace.pack import Selection, pack_namespace\n"
            "from taas_magic.notebook.extension import _extensions\n"
            "(extension,) = _extensions.values()\n"
            "packed = pack_namespace(globals(), Selection(('state',)), store=extension.session.store)\n"
            "Path(out).write_text(repr(packed.parcel.size_bytes / 1024)); packed.parcel.close(); del packed"
        )
        return float(self._out.read_text())

    # -- the rest ------------------------------------------------------------------------------------------------

    def _others(self) -> tuple[tuple[float, float], tuple[float, float]]:
        naive: list[tuple[float, float]] = []
        objects: list[tuple[float, float]] = []
        with self._notebook() as run:
            run(_SETUP + f"out = {str(self._out)!r}\n" + _MAKE_STATE.format(mebibytes=1024, parts=16))
            for _ in range(self._arguments.rounds):
                run(_NAIVE)
                pack_s, load_s = self._out.read_text().strip("()").split(",")
                naive.append((float(pack_s), float(load_s)))
            run("del state")
            run(_OBJECTS)
            for number in range(5 * self._arguments.rounds):
                pair = self._told(run, _OUR_OBJECTS), self._told(run, _PLAIN_OBJECTS)
                if number:
                    objects.append(pair)
        medians = [statistics.median(values) for values in (*zip(*naive, strict=True), *zip(*objects, strict=True))]
        return (medians[0], medians[1]), (medians[2], medians[3])

    def _kept(self) -> dict[str, tuple[str, list[float]]]:
        """A cell on ranks, or engines, that are up: (title, seconds from submit to user code on all)."""
        keys = ("taas-kept", "ipyparallel-steady", "nbdistributed-steady")
        chosen = {each.key: each for each in CONTESTANTS if each.key in keys}
        results = {key: Samples() for key in chosen}
        bench = Bench(sys.executable, self._arguments.peers_python, self._directory, launches=5, kinds=("launch",))
        for _ in range(self._arguments.rounds):
            for key, contestant in chosen.items():
                bench.visit(contestant, 8, results[key])
        return {key: (chosen[key].title, samples.seconds.get("user", [])) for key, samples in results.items()}

    def _told(self, run: Callable[[str], tuple[float, float]], cell: str) -> float:
        run(cell)
        return float(self._out.read_text())

    @contextlib.contextmanager
    def _notebook(self) -> Iterator[Callable[[str], tuple[float, float]]]:
        environment = {**os.environ, "TMPDIR": str(self._directory), "PYTHONUNBUFFERED": "1"}
        notebook = Notebook(sys.executable, self._directory / "notebook.log", environment)

        def run(cell: str) -> tuple[float, float]:
            result = notebook.run(cell, _LIMIT_S)
            if result.error is not None:
                raise RuntimeError(f"{result.error}; it had printed: {notebook.log_tail(2000)}")
            return result.submitted_at, result.idle_at

        try:
            yield run
        finally:
            notebook.close()
            kill_descendants()


def _table(rows: list[dict[str, float]]) -> Iterator[str]:
    titles = (
        "MiB",
        "ranks",
        "one copy",
        "new state, to user code",
        "unchanged state",
        "changed state, home",
        "KiB sent again",
    )
    yield f"| {' | '.join(titles)} |"
    yield "| --- |" * 1 + " --- |" * (len(titles) - 1)
    for row in rows:
        numbers = [f"{row['MiB']:.0f}", f"{row['ranks']:.0f}"]
        numbers += [f"{row[name]:.3f}" for name in ("copy", "new state", "unchanged", "home")]
        numbers.append(f"{row['KiB again']:.0f}")
        yield f"| {' | '.join(numbers)} |"


def _seconds(values: list[float]) -> str:
    if not values:
        return "not installed"
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _verdict(text: str, is_met: bool, figure: str) -> str:
    return f"- {text}: {'met' if is_met else 'NOT met'}" + (f" ({figure})" if figure else "")


if __name__ == "__main__":
    main()
