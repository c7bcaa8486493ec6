"""``%taas``: what the runner does, what ranks wrote, starting afresh; and ``%%taas``, the pragma as a cell magic."""

from __future__ import annotations

import codecs
import difflib
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from taas_magic.client.detached import runs
from taas_magic.errors import PragmaError
from taas_magic.units import format_seconds, plural

if TYPE_CHECKING:
    from taas_magic.notebook.extension import Extension

_HELP = """\
%taas                        what the runner is doing
%taas logs [--rank N] [--run ID]   all that a rank wrote, by default rank 0 of the latest run
%taas plan                   at the head of a pragma cell: run nothing, list what would travel
%taas pull NAME [--rank RANKS]     the value that ranks that were kept have under a name; a list with `--rank all`
%taas push NAME [NAME ...]   give the notebook's values to all ranks that were kept, in place of theirs
%taas auto FLAGS             run plain cells on ranks from here on, with these flags; `%taas auto off` ends that
%taas runs                   the runs that go on by themselves (`--detach`)
%taas attach [ID]            take one up: its output, and what it has made; by default the latest
%taas stop ID                stop one, and bring home what it has made
%taas pools                  the pools of the settings, their machines, and what is free
%taas connect ADDRESS KEY    run cells that name no place on the machine whose runner listens there; `off` ends that
%taas release                end the ranks that were kept
%taas restart                end the runner and start a new one
%taas help                   this text
%%taas --gpus N ...          run the cell on N ranks; the flags are those of `#pragma taas`"""


def make_magics(extension: Extension) -> tuple[Callable[[str], Any], Callable[[str, str], None]]:
    """The functions behind ``%taas`` and ``%%taas``."""

    def line_magic(line: str) -> Any:
        """Ask about taas; ``%taas help`` lists what."""
        with extension.errors_without_frames():
            return _command(extension, line)

    def cell_magic(line: str, cell: str) -> None:
        """Run the cell on ranks; see ``%taas help``."""
        extension.run_magic_cell(line, cell)

    return line_magic, cell_magic


def _command(extension: Extension, line: str) -> Any:
    words = _words(line)
    name, arguments = (words[0], words[1:]) if words else ("status", [])
    commands: dict[str, Callable[[Extension, list[str]], Any]] = {
        "status": _status,
        "logs": _logs,
        "plan": _plan,
        "auto": lambda _, __: _auto(extension, line),
        "pull": _pull,
        "push": _push,
        "runs": lambda _, __: print("\n".join(map(str, runs())) or "no run goes on by itself"),
        "attach": lambda extension, arguments: extension.attach(arguments[0] if arguments else ""),
        "stop": _stop,
        "connect": _connect,
        "pools": lambda extension, _: print(extension.describe_pools()),
        "release": _release,
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
    return commands[name](extension, arguments)


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
        for line in status.delivery:
            print(f"  {line}")
    if extension.plain_cells is not None:
        print(f"plain cells run on {plural(extension.plain_cells.gpus, 'rank')}, until `%taas auto off`")
    kept = extension.session.kept
    if status.kept_pids and kept is not None:
        ranks = plural(len(status.kept_pids), "rank")
        print(f"kept since cell [{kept.cell_number}]: {ranks}, for {format_seconds(status.kept_for_s)} without a cell")
        for rank, pid in enumerate(status.kept_pids):
            print(f"  rank {rank}: resting, pid {pid}")
    if status.kept:
        print("kept output: " + ", ".join(f"{run_id} ({plural(ranks, 'rank')})" for run_id, ranks in status.kept))


def _logs(extension: Extension, arguments: list[str]) -> None:
    options = _options("logs [--rank N] [--run ID]", arguments, {"--rank": "0", "--run": ""})
    if not options["--rank"].isdigit():
        raise PragmaError.of(f"--rank {options['--rank']}", expected="a rank, 0 or more", do="`%taas logs --rank 3`")
    decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in ("stdout", "stderr")}
    for stream, data in extension.session.read_log(int(options["--rank"]), options["--run"]):
        (sys.stdout if stream == "stdout" else sys.stderr).write(decoders[stream].decode(data))


def _options(usage: str, arguments: list[str], defaults: dict[str, str]) -> dict[str, str]:
    options = dict(defaults)
    words = [part for word in arguments for part in word.split("=", 1)]
    for name, value in zip(words[::2], [*words[1::2], ""], strict=False):
        if name not in options or not value:
            raise PragmaError.of(f"%taas {usage.split(maxsplit=1)[0]} {' '.join(arguments)}", expected=f"%taas {usage}")
        options[name] = value
    return options


def _plan(extension: Extension, arguments: list[str]) -> None:
    raise PragmaError.of(
        "%taas plan is not at the head of a cell with a pragma",
        expected="`%taas plan` as a line above `#pragma taas --gpus N`, or below it, before the first statement",
        do="put it into the cell that it is about",
    )


def _pull(extension: Extension, arguments: list[str]) -> Any:
    usage = "pull NAME [--rank RANKS]"
    if not arguments or not arguments[0].isidentifier():
        raise PragmaError.of(f"%taas pull {' '.join(arguments)}", expected=f"%taas {usage}")
    name, options = arguments[0], _options(usage, arguments[1:], {"--rank": "0"})
    return extension.pull(name, options["--rank"])


def _push(extension: Extension, arguments: list[str]) -> None:
    if not arguments or not all(word.isidentifier() for word in arguments):
        raise PragmaError.of(f"%taas push {' '.join(arguments)}", expected="%taas push NAME [NAME ...]")
    extension.push(arguments)


def _auto(extension: Extension, line: str) -> None:
    flags = line.strip().removeprefix("auto").strip()
    if flags == "off":
        extension.run_plain_cells_with(None)
        print("plain cells run in the kernel")
        return
    extension.run_plain_cells_with(flags)
    pragma = extension.plain_cells
    assert pragma is not None
    print(f"plain cells run on {plural(pragma.gpus, 'rank')} from here on; `%taas auto off` ends that")


def _connect(extension: Extension, arguments: list[str]) -> None:
    address, key = (*arguments, "", "")[:2]
    extension.connect("" if address == "off" else address or " ", key)
    where = "this machine" if address == "off" else address
    print(f"cells that name no place run on {where}")


def _stop(extension: Extension, arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise PragmaError.of("%taas stop", expected="%taas stop ID", do="`%taas runs` lists the runs")
    extension.attach(arguments[0], stops=True)


def _release(extension: Extension, arguments: list[str]) -> None:
    kept = extension.session.release()
    if kept is None:
        print("no ranks are kept")
    else:
        print(f"{plural(kept.place.num_ranks, 'rank')} ended, kept since cell [{kept.cell_number}]")


def _restart(extension: Extension, arguments: list[str]) -> None:
    extension.session.close()
    extension.session.warm_up()
    print("the runner was ended, a new one is warming up")
