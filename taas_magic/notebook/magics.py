"""``%taas``: what the runner does, what ranks wrote, starting afresh; and ``%%taas``, the pragma as a cell magic."""

from __future__ import annotations

import codecs
import difflib
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from taas_magic.errors import PragmaError
from taas_magic.units import format_seconds, plural

if TYPE_CHECKING:
    from taas_magic.notebook.extension import Extension

_HELP = """\
%taas                        what the runner is doing
%taas logs [--rank N] [--run ID]   all that a rank wrote, by default rank 0 of the latest run
%taas restart                end the runner and start a new one
%taas help                   this text
%%taas --gpus N ...          run the cell on N ranks; the flags are those of `#pragma taas`"""


def make_magics(extension: Extension) -> tuple[Callable[[str], None], Callable[[str, str], None]]:
    """The functions behind ``%taas`` and ``%%taas``."""

    def line_magic(line: str) -> None:
        """Ask about taas; ``%taas help`` lists what."""
        with extension.errors_without_frames():
            _command(extension, line)

    def cell_magic(line: str, cell: str) -> None:
        """Run the cell on ranks; see ``%taas help``."""
        extension.run_magic_cell(line, cell)

    return line_magic, cell_magic


def _command(extension: Extension, line: str) -> None:
    words = _words(line)
    name, arguments = (words[0], words[1:]) if words else ("status", [])
    commands: dict[str, Callable[[Extension, list[str]], None]] = {
        "status": _status,
        "logs": _logs,
        "restart": _restart,
        "help": lambda _, __: print(_HELP),
    }
    if name not in commands:
        nearest = difflib.get_close_matches(name, commands, n=1)
        raise PragmaError.of(
            f"%taas {name}: there is no such command",
            expected=", ".join(commands),
            do=f"write `%taas {nearest[0]}`" if nearest else "`%taas help`",
        )
    commands[name](extension, arguments)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise PragmaError.of(f"%taas {line}: {error}", do="close the quote") from error


def _status(extension: Extension, arguments: list[str]) -> None:
    status = extension.session.status()
    if status is None:
        print("no runner; the next pragma cell starts one")
        return
    state = "warm" if status.is_warm else "warming up"
    gpus = plural(status.num_gpus, "GPU") if status.num_gpus else "no GPU, so ranks rehearse on CPU"
    print(f"runner: pid {status.pid}, {state}; {gpus}")
    if status.run_id:
        print(f"run {status.run_id}: {format_seconds(status.seconds)}")
        for rank, (phase, pid) in enumerate(status.ranks):
            print(f"  rank {rank}: {phase}, pid {pid}")
    if status.kept:
        print("kept output: " + ", ".join(f"{run_id} ({plural(ranks, 'rank')})" for run_id, ranks in status.kept))


def _logs(extension: Extension, arguments: list[str]) -> None:
    options = _options(arguments, {"--rank": "0", "--run": ""})
    if not options["--rank"].isdigit():
        raise PragmaError.of(f"--rank {options['--rank']}", expected="a rank, 0 or more", do="`%taas logs --rank 3`")
    decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in ("stdout", "stderr")}
    for stream, data in extension.session.read_log(int(options["--rank"]), options["--run"]):
        (sys.stdout if stream == "stdout" else sys.stderr).write(decoders[stream].decode(data))


def _options(arguments: list[str], defaults: dict[str, str]) -> dict[str, str]:
    options = dict(defaults)
    words = [part for word in arguments for part in word.split("=", 1)]
    for name, value in zip(words[::2], [*words[1::2], ""], strict=False):
        if name not in options or not value:
            raise PragmaError.of(f"%taas logs {' '.join(arguments)}", expected="[--rank N] [--run ID]")
        options[name] = value
    return options


def _restart(extension: Extension, arguments: list[str]) -> None:
    extension.session.close()
    extension.session.warm_up()
    print("the runner was ended, a new one is warming up")
