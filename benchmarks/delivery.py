"""How fast data gets from producers to ranks, beside what else delivers data and what the machine can do.

See README.md.
"""

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

from delivering import report
from delivering.contestants import CONTESTANTS, MEASURES, Contestant, Program
from delivering.measure import Bench, Samples
from delivering.streaming import Streamed, stream
from launch import write_between_marks
from launching.report import hardware

from taas_magic._version import __version__
from taas_magic.processes import become_subreaper

#: A distribution may come under several names.
_NAMES = {"torch": ["torch"], "ray": ["ray"], "tensorflow": ["tensorflow", "tensorflow-cpu"]}
_ASK_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def main() -> None:
    arguments = _parse()
    become_subreaper()
    # An exception, so that the notebook and the processes of the moment are ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    versions = _versions(arguments)
    streamed: Streamed | None = None
    with tempfile.TemporaryDirectory(prefix="taas-bench-") as directory:
        bench = Bench(_pythons(arguments), Path(directory), arguments.warm_up, arguments.window)
        results, rounds = _measure(arguments, bench, versions)
        if arguments.stream_minutes:
            streamed = stream(bench, arguments.stream_minutes)
    text = _document(arguments, results, rounds, streamed, versions)
    print(text)
    for path in arguments.output:
        write_between_marks(path, text, "delivery")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    keys = [measure.key for measure in MEASURES]
    parser.add_argument("--rounds", type=int, default=3, help="visits to each contestant, in turn (default: 3)")
    parser.add_argument("--window", type=float, default=2.0, help="seconds that are measured, a visit (default: 2)")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before that (default: 1)")
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, metavar="KEY", help=f"of {', '.join(keys)}")
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter that has Ray installed")
    parser.add_argument("--tf-python", help="one that has TensorFlow (default: that of --peers-python)")
    parser.add_argument("--stream-minutes", type=float, default=0.0, help="stream for so long, and watch the memory")
    parser.add_argument("--output", type=Path, nargs="+", default=[], help="Markdown files to write the tables into")
    return parser.parse_args()


def _pythons(arguments: argparse.Namespace) -> dict[str, str]:
    peers = arguments.peers_python
    return {"ours": sys.executable, "peers": peers, "tf": arguments.tf_python or peers}


def _measure(
    arguments: argparse.Namespace, bench: Bench, versions: dict[str, dict[str, str]]
) -> tuple[report.Results, str]:
    """Visit everyone in turn; an interrupt ends that, and what was measured until then counts.

    Returns:
        The samples, and how many rounds they are of.
    """
    chosen = [contestant for contestant in CONTESTANTS if contestant.measure in arguments.only and arguments.rounds]
    results: report.Results = {(each.measure, each.key): Samples() for each in chosen}
    for each in chosen:
        results[each.measure, each.key].unavailable = _why_unavailable(each, versions)
    rounds = "no round"
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(arguments.rounds):
            rounds = f"{number} interleaved rounds and a part of another, which was interrupted"
            for each in chosen:
                what = f"round {number + 1} of {arguments.rounds}: {each.measure}, {each.key}"
                print(f"{what} (load {os.getloadavg()[0]:.1f})", file=sys.stderr, flush=True)
                bench.visit(each, number, results[each.measure, each.key])
        rounds = f"{arguments.rounds} interleaved rounds"
    return results, rounds


def _why_unavailable(contestant: Contestant, versions: dict[str, dict[str, str]]) -> str | None:
    how = contestant.how
    if not isinstance(how, Program) or any(name in versions[how.python] for name in _NAMES[how.needs]):
        return None
    option = {"ours": "this script", "peers": "--peers-python", "tf": "--tf-python"}[how.python]
    return f"{how.needs} is not installed for the interpreter of {option}"


def _versions(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """What is installed, by whose interpreter."""
    names = {
        "ours": ["ipython", "numpy", *_NAMES["torch"]],
        "peers": [*_NAMES["ray"], "pyarrow"],
        "tf": _NAMES["tensorflow"],
    }
    versions = {}
    for whose, python in _pythons(arguments).items():
        command = [python, "-c", _ASK_VERSIONS, *names[whose]]
        versions[whose] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    # Ours may be imported from a checkout, which no package manager knows.
    versions["ours"]["taas-magic"] = __version__
    return versions


def _document(
    arguments: argparse.Namespace,
    results: report.Results,
    rounds: str,
    streamed: Streamed | None,
    versions: dict[str, dict[str, str]],
) -> str:
    all_versions = {name: version for each in versions.values() for name, version in each.items()}
    installed = ", ".join(f"{name} {version}" for name, version in sorted(all_versions.items()))
    parts = []
    if results:
        parts.append(f"""\
Median (least to most) of one run: {rounds}, each of {arguments.window:g} s behind {arguments.warm_up:g} s that are not
counted. One rank, which does nothing but take. Nothing is prepared before it begins, and it gets what lies ready sooner
than that is counted. The ratio is the median of those of the rounds.

{report.tables(results)}
Targets:

{report.targets(results)}
""")
    if streamed is not None:
        parts.append("\n".join(streamed.lines()))
    return (
        "\n".join(parts)
        + f"""
Measured on {hardware()}, load {os.getloadavg()[2]:.1f} (15 min);
Python {platform.python_version()}, {installed}.
Command: `python benchmarks/delivery.py {_options(arguments)}`
"""
    )


def _options(arguments: argparse.Namespace) -> str:
    options = f"--rounds {arguments.rounds} --window {arguments.window:g} --warm-up {arguments.warm_up:g}"
    if arguments.only != [measure.key for measure in MEASURES]:
        options += f" --only {' '.join(arguments.only)}"
    if arguments.peers_python != sys.executable:
        options += " --peers-python PEERS"
    if arguments.tf_python:
        options += " --tf-python TF"
    if arguments.stream_minutes:
        options += f" --stream-minutes {arguments.stream_minutes:g}"
    return options


if __name__ == "__main__":
    main()
