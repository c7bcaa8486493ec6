"""How long until a cell runs on N ranks, beside what else launches ranks from a notebook. See README.md."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from launching import report
from launching.contestants import CONTESTANTS, Contestant
from launching.measure import Bench, Samples

from taas_magic._version import __version__
from taas_magic.processes import become_subreaper

_ASK_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def main() -> None:
    arguments = _parse()
    become_subreaper()
    # An exception, so that the notebook and the ranks of the moment are ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    versions = _versions(arguments)
    results, rounds = _measure(arguments, versions)
    text = _document(arguments, results, rounds, versions)
    print(text)
    for path in arguments.output:
        write_between_marks(path, text, "measured")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    keys = [contestant.key for contestant in CONTESTANTS]
    parser.add_argument("--rounds", type=int, default=3, help="visits to each contestant, in turn (default: 3)")
    parser.add_argument("--launches", type=int, default=3, help="launches a visit, of those that warm up (default: 3)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="numbers of ranks (default: 2 8)")
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, metavar="KEY", help=f"of {', '.join(keys)}")
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter that has the peers installed")
    parser.add_argument("--output", type=Path, nargs="+", default=[], help="Markdown files to write the tables into")
    return parser.parse_args()


def _measure(arguments: argparse.Namespace, versions: dict[str, str | None]) -> tuple[report.Results, str]:
    """Visit everyone in turn; an interrupt ends that, and what was measured until then counts.

    Returns:
        The samples, and how many rounds they are of.
    """
    chosen = [contestant for contestant in CONTESTANTS if contestant.key in arguments.only]
    results: report.Results = {(each.key, ranks): Samples() for each in chosen for ranks in arguments.ranks}
    for (key, _), samples in results.items():
        needs = next(contestant.needs for contestant in chosen if contestant.key == key)
        if versions[needs] is None:
            samples.unavailable = f"{needs} is not installed for the interpreter of --peers-python"
    rounds = "no round"
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="taas-bench-") as directory:
        bench = Bench(sys.executable, arguments.peers_python, Path(directory), arguments.launches)
        for number in range(arguments.rounds):
            rounds = f"{number} interleaved rounds and a part of another, which was interrupted"
            for contestant in chosen:
                for ranks in arguments.ranks:
                    _visit(bench, contestant, ranks, results, f"round {number + 1} of {arguments.rounds}")
        rounds = f"{arguments.rounds} interleaved rounds"
    return results, rounds


def _visit(bench: Bench, contestant: Contestant, ranks: int, results: report.Results, what: str) -> None:
    print(f"{what}: {contestant.key}, {ranks} ranks (load {os.getloadavg()[0]:.1f})", file=sys.stderr, flush=True)
    bench.visit(contestant, ranks, results[contestant.key, ranks])


def _versions(arguments: argparse.Namespace) -> dict[str, str | None]:
    # Ours may be imported from a checkout, which no package manager knows.
    versions: dict[str, str | None] = {"taas-magic": __version__}
    for python, is_peer in ((sys.executable, False), (arguments.peers_python, True)):
        names = {contestant.needs for contestant in CONTESTANTS if contestant.is_peer == is_peer}
        names = names - {"taas-magic"} | (set() if is_peer else {"ipython"})
        command = [python, "-c", _ASK_VERSIONS, *sorted(names)]
        versions |= json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return versions


def _document(
    arguments: argparse.Namespace, results: report.Results, rounds: str, versions: dict[str, str | None]
) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if version is not None)
    options = f"--rounds {arguments.rounds} --launches {arguments.launches}"
    options += f" --ranks {' '.join(map(str, arguments.ranks))}"
    if arguments.only != [contestant.key for contestant in CONTESTANTS]:
        options += f" --only {' '.join(arguments.only)}"
    if arguments.peers_python != sys.executable:
        options += " --peers-python PEERS"
    return f"""\
Seconds, as median (least to most) of one run: {rounds}; {arguments.launches} launches a round of those
that warm up, 1 of the others. Ranks on CPU, gloo.

{report.tables(results)}
Targets:

{report.targets(results)}

Measured on {report.hardware()}, load {os.getloadavg()[2]:.1f} (15 min);
Python {platform.python_version()}, {installed}.
Command: `python benchmarks/launch.py {options}`
"""


def write_between_marks(path: Path, text: str, name: str) -> None:
    """Replace what stands between the marks of that name, or append it with the marks where there are none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if begin in old:
        head, _, rest = old.partition(begin)
        tail = rest.partition(end)[2]
    else:
        head, tail = (old + "\n" if old else ""), "\n"
    path.write_text(f"{head}{begin}\n{text}{end}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
