"""How runs on several machines compare with those on one: hosts in network namespaces of this machine, reached by ssh.

See README.md. Needs root, `ip`, `tc` and sshd.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from launch import write_between_marks
from launching.notebook import Notebook, NotebookError
from launching.report import hardware

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hosts import Hosts, hosts

from taas_magic.processes import become_subreaper

_LIMIT_S = 180.0
_NUM_HOSTS, _RANKS_A_HOST = 3, 4
_STATE_BYTES = 256 * 2**20
_LINES_A_SECOND, _PRINT_S = 10_000, 5.0
_ROOT = Path(__file__).resolve().parents[1]

_EMPTY = "#pragma taas --gpus 12\npass"
_MARK = """\
#pragma taas --gpus {ranks}
import os, time
with open({path!r} + os.environ["RANK"], "w") as file:
    file.write(repr(time.monotonic()))
"""
_PRINT = """\
import time
begun = time.monotonic()
for line in range({lines}):
    print("epoch 3, step", line, "loss 0.1234567, 123.4 samples a second, 0.12 s a step", flush=line % 20 == 0)
    if line % 20 == 0:
        time.sleep(max(0, begun + line / {rate} - time.monotonic()))
"""


@dataclass
class Figures:
    """Seconds, and bytes a second, of each round."""

    local: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    state: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument("--mbit", type=int, default=400, help="rate of the links, Mbit/s (default: 400)")
    parser.add_argument("--output", type=Path, nargs="+", default=[], help="Markdown files to write the table into")
    arguments = parser.parse_args()
    become_subreaper()
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="taas-bench-") as directory, hosts(_NUM_HOSTS) as made:
        measure(Path(directory), made, arguments, figures)
    text = report(arguments, figures)
    print(text)
    for path in arguments.output:
        write_between_marks(path, text, "machines")


def measure(directory: Path, made: Hosts, arguments: argparse.Namespace, figures: Figures) -> None:
    """Take all figures, interleaved."""
    (directory / "project").mkdir()
    # Beside the project, where every rank may write.
    marks = directory / "marks"
    marks.mkdir()
    pool = {
        "engine": '"ssh"',
        "machines": str(list(made.names)).replace("'", '"'),
        "gpus": str(_RANKS_A_HOST),
        "ssh_config": f'"{made.ssh_config}"',
        "python": f'"{sys.executable}"',
    }
    lines = ["[pools.g2]", *(f"{key} = {value}" for key, value in pool.items())]
    (directory / "project" / "taas.toml").write_text("\n".join(lines), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")])),
        "XDG_CONFIG_HOME": str(directory / "config"),
    }
    notebook = Notebook(sys.executable, directory / "notebook.log", environment)
    try:
        run(notebook, f"import os; os.chdir({str(directory / 'project')!r})\n%load_ext taas_magic\nimport torch")
        # Both places are up, and know what they will need.
        for _ in range(2):
            run(notebook, _EMPTY)
            run(notebook, f"#!g2.{_RANKS_A_HOST}\n{_EMPTY}")
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            figures.local.append(launch(notebook, marks / f"local-{number}-", ""))
            figures.spread.append(launch(notebook, marks / f"spread-{number}-", f"#!g2.{_RANKS_A_HOST}\n"))
        made.shape(arguments.mbit)
        for number in range(arguments.rounds):
            print(f"state, round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            figures.bare.append(bare_rate(made))
            figures.state.append(send_state(notebook, marks / f"state-{number}-"))
        made.unshape()
        for number in range(min(3, arguments.rounds)):
            print(f"output, round {number + 1}", file=sys.stderr, flush=True)
            figures.cpu.append(cpu_of_output(notebook, made))
    finally:
        notebook.close()


def run(notebook: Notebook, source: str) -> tuple[float, float]:
    cell = notebook.run(source, _LIMIT_S)
    if cell.error is not None:
        raise NotebookError(f"{cell.error}; it had printed: {notebook.log_tail()}")
    return cell.submitted_at, cell.idle_at


def launch(notebook: Notebook, path: Path, place: str) -> float:
    """Seconds from submit to the first line of user code on the last of 12 ranks."""
    time.sleep(1)  # as a person does; what is forked ahead is forked by then
    submitted_at, _ = run(notebook, place + _MARK.format(ranks=_NUM_HOSTS * _RANKS_A_HOST, path=str(path)))
    marks = [float(each.read_text(encoding="utf-8")) for each in path.parent.glob(path.name + "*")]
    assert len(marks) == _NUM_HOSTS * _RANKS_A_HOST, len(marks)
    return max(marks) - submitted_at


def send_state(notebook: Notebook, path: Path) -> float:
    """Seconds that new state of 256 MiB adds to the way to user code on all ranks of all hosts."""
    run(notebook, f"state = torch.randint(0, 255, ({_STATE_BYTES},), dtype=torch.uint8)")
    source = f"#!g2.{_RANKS_A_HOST}\n" + _MARK.format(ranks=_NUM_HOSTS * _RANKS_A_HOST, path=str(path)) + "state\n"
    submitted_at, _ = run(notebook, source)
    marks = [float(each.read_text(encoding="utf-8")) for each in path.parent.glob(path.name + "*")]
    return max(marks) - submitted_at


def bare_rate(made: Hosts) -> float:
    """Seconds that a bare socket takes for as much, from this machine to one host."""
    port = 7171
    source = (
        "import socket\nserver = socket.create_server(('', 7171))\nprint('up', flush=True)\nsock, _ = server.accept()\n"
        "got = 0\nwhile data := sock.recv(2**20):\n    got += len(data)\nsock.sendall(b'x')\n"
    )
    host = made.names[0]
    receiver = made.exec(host, [sys.executable, "-c", source], stdout=-1)
    try:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        begun = time.monotonic()
        with socket.create_connection((made.address(host), port)) as sock:
            sock.sendall(bytes(_STATE_BYTES))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)
        return time.monotonic() - begun
    finally:
        receiver.kill()
        receiver.wait()
        if receiver.stdout is not None:
            receiver.stdout.close()


def cpu_of_output(notebook: Notebook, made: Hosts) -> float:
    """Share of a core that the head's runner takes while 8 ranks print 10,000 lines a second."""
    ranks = 8
    rate = _LINES_A_SECOND / ranks
    body = _PRINT.format(lines=int(rate * _PRINT_S), rate=rate)
    used: list[float] = []

    def watch() -> None:
        time.sleep(1.5)
        pids = [pid for pid in made.pids(made.names[0]) if _title(pid) in ("taas: machine", "taas: runner")]
        before, begun = sum(map(_cpu_s, pids)), time.monotonic()
        time.sleep(_PRINT_S - 2.5)
        used.append((sum(map(_cpu_s, pids)) - before) / (time.monotonic() - begun))

    watcher = threading.Thread(target=watch)
    watcher.start()
    run(notebook, f"#!g2.{_RANKS_A_HOST}\n#pragma taas --gpus {ranks}\n{body}")
    watcher.join()
    return used[0]


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").strip("\0 ")
    return ""


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def report(arguments: argparse.Namespace, figures: Figures) -> str:
    """The table, and the targets."""
    local, spread = statistics.median(figures.local), statistics.median(figures.spread)
    state, bare = statistics.median(figures.state), statistics.median(figures.bare)
    cpu = statistics.median(figures.cpu)
    met = {True: "met", False: "NOT met"}
    return f"""\
Medians (least to most) of {arguments.rounds} interleaved rounds; three hosts in network namespaces of one machine.

| | |
| --- | --- |
| user code on all of 12 ranks, on this machine | {_range(figures.local)} s |
| user code on all of 12 ranks, 4 on each host | {_range(figures.spread)} s |
| a bare socket, 256 MiB to one host, links of {arguments.mbit} Mbit/s | {_range(figures.bare)} s |
| 256 MiB of new state, to user code on all 12 ranks of the three hosts | {_range(figures.state)} s |
| the head's runner, while 8 ranks print 10,000 lines a second | {_range(figures.cpu)} of a core |

Targets:

- three hosts: launch in at most twice the time of one: {met[spread <= 2 * local]} ({spread / local:.2f})
- state to three hosts: at least 0.80 of what the link carries: {met[bare / state >= 0.8]} ({bare / state:.2f})
- output: at most 0.05 of a core of the head's: {met[cpu <= 0.05]} ({cpu:.3f})

Measured on {hardware()}, load {os.getloadavg()[2]:.1f} (15 min);
Python {platform.python_version()}.
Command: `python benchmarks/machines.py --rounds {arguments.rounds} --mbit {arguments.mbit}`
"""


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
