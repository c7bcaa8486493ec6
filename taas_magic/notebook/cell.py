"""Runs one pragma cell: from its text to what the notebook holds afterwards."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell

from taas_magic.client.failures import describe_exit, exception_of
from taas_magic.client.run import RunOutcome, RunRequest
from taas_magic.client.session import Place, Session, new_run_id, place_locally, visible_gpus
from taas_magic.envfile import read_env_file
from taas_magic.errors import CannotTravelError, PragmaError
from taas_magic.namespace import process_state
from taas_magic.namespace.names import CellNames, names_of_cell
from taas_magic.namespace.pack import PackedNamespace, Selection, pack_namespace
from taas_magic.notebook.plan import describe_plan
from taas_magic.notebook.view import NotebookView
from taas_magic.pragma import ParsedCell, Pragma
from taas_magic.settings import Settings, load_settings
from taas_magic.units import plural
from taas_magic.wire import CellTask

#: IPython's own names; they travel only where the user has bound them to something else.
_SHELL_NAMES = ("In", "Out", "exit", "quit", "get_ipython", "open", "_ih", "_oh", "_dh", "_i", "_ii", "_iii")
#: How many of the things that stayed on rank 0 for one reason are named.
_NAMED_PATHS = 3


def run_cell(shell: InteractiveShell, session: Session, parsed: ParsedCell, transform: Callable[[str], str]) -> None:
    """Run a parsed cell on ranks and bring home what rank 0 made.

    Args:
        shell: The notebook's shell.
        session: The connection to the runner.
        parsed: The pragma and the code.
        transform: ``shell.transform_cell`` without our own transformation.

    Raises:
        TaasError: if the run cannot be started, or its processes are lost.
        BaseException: whatever the cell raised.
    """
    pragma = parsed.pragma
    _refuse_unsupported(pragma)
    settings = load_settings(Path.cwd(), os.environ)
    environment = _environment(pragma)
    session.warm_up()
    # IPython's transformation takes milliseconds a magic, and is asked for more than once.
    transform = functools.cache(transform)
    names = _names(shell, parsed.code, transform)
    # Packed before the zygote is waited for: what cannot travel is said at once.
    packed = _pack(shell, names, pragma, environment)
    view = NotebookView(shell)
    try:
        if pragma.dry_run:
            print(describe_plan(packed, sorted(names.bound)))
            return
        runner, ready = session.ready_runner(view)
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        num_gpus = visible_gpus(ready.num_gpus, runner.cuda_visible_devices, visible)
        place = place_locally(pragma, num_gpus, settings)
        request = _request(shell, parsed, packed, place, settings, environment)
        if place.notice:
            view.notice(place.notice)
        _remember_source(shell, transform(parsed.code))
        outcome = session.run(request, shell.user_ns, view, runner)
    finally:
        packed.parcel.close()
    # The traceback of what is raised next may live long; it must not keep alive all that travelled.
    del packed, request
    _conclude(view, outcome, pragma, settings)


def _names(shell: InteractiveShell, source: str, transform: Callable[[str], str]) -> CellNames:
    try:
        return names_of_cell(source, transform)
    except SyntaxError as error:
        # Shown as the kernel shows that of a plain cell: with the cell's number and the line.
        error.filename = _remember_source(shell, transform(source))
        raise


def _remember_source(shell: InteractiveShell, python: str) -> str:
    """Keep the cell's text under the name that ranks give it, for tracebacks of functions that come home from there."""
    number = number_of_cell(shell)
    # The compiler of ranks is the plain one; a kernel's own names cells otherwise.
    name = CachingCompiler().cache(python, number)
    getattr(shell.compile, "_filename_map", {})[name] = number
    return name


def number_of_cell(shell: InteractiveShell) -> int:
    """The number in front of the running cell.

    ``execution_count`` is that number in older IPython, and from IPython 9 on the next cell's; the history agrees in
    all.
    """
    history = shell.history_manager
    return shell.execution_count if history is None else len(history.input_hist_raw) - 1


def _refuse_unsupported(pragma: Pragma) -> None:
    if pragma.cpus is not None or pragma.units is not None:
        flag = "--cpus" if pragma.cpus is not None else "--units"
        raise PragmaError.of(
            f"{flag}: this release has no data delivery yet, so no machine would prepare the data",
            expected="a pragma without --cpus and --units",
            do=f"leave {flag} out; the DataLoader then works in the ranks, as it is",
        )


def rank_environment() -> dict[str, str]:
    """The environment that ranks get, before an environment file and torchrun's variables are added."""
    environment = process_state.scrubbed(dict(os.environ))
    # The ranks of one machine need no interface that others can reach.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Front ends know colours and carriage returns. rich's live displays move the cursor up: every frame would stay.
    environment.setdefault("TTY_INTERACTIVE", "0")
    return environment


def _environment(pragma: Pragma) -> dict[str, str]:
    environment = rank_environment()
    if pragma.env_file is not None:
        environment.update(read_env_file(Path(pragma.env_file).expanduser(), environment))
    return environment


def _pack(shell: InteractiveShell, names: CellNames, pragma: Pragma, environment: dict[str, str]) -> PackedNamespace:
    missing = [name for name in pragma.with_names if name not in shell.user_ns]
    if missing:
        raise CannotTravelError.of(
            f"--with {','.join(missing)}: the notebook has no such name",
            do="define it in an earlier cell, or leave it out",
        )
    selection = Selection(tuple(dict.fromkeys((*names.needed, *pragma.with_names))), names.maybe)
    numbers = getattr(shell.compile, "_filename_map", {})
    return pack_namespace(
        shell.user_ns,
        selection,
        process_state=process_state.capture(environment),
        hidden=_hidden(shell),
        cell_numbers=numbers,
    )


def _hidden(shell: InteractiveShell) -> dict[str, Any]:
    hidden = dict(shell.user_ns_hidden)
    for name in _SHELL_NAMES:
        if name in shell.user_ns:
            hidden.setdefault(name, shell.user_ns[name])
    return hidden


def _request(  # noqa: PLR0917 - everything that a request is made of
    shell: InteractiveShell,
    parsed: ParsedCell,
    packed: PackedNamespace,
    place: Place,
    settings: Settings,
    environment: dict[str, str],
) -> RunRequest:
    pragma = parsed.pragma
    sent = {item.name for item in packed.items}
    others = [name for name in shell.user_ns if name not in sent and not name.startswith("_")]
    task = CellTask(
        run_id=new_run_id(),
        source=parsed.code,
        execution_count=number_of_cell(shell),
        num_ranks=place.num_ranks,
        project=str(settings.project.directory),
        writable=[str(path) for path in settings.project.writable],
        writes=pragma.writes,
        environment=environment,
        other_names=others,
        ignored_names=list(_SHELL_NAMES),
        left_out=packed.left_out,
        colors=str(shell.colors),
        traceback_mode=str(getattr(shell.InteractiveTB, "mode", "Context")),
        rehearse=place.rehearse,
        rank_results=pragma.rank_results,
    )
    show = None if pragma.show == "all" else sorted(pragma.show)
    return RunRequest(task, packed, show, settings.stop.grace_s, pragma.timeout_s)


def _conclude(view: NotebookView, outcome: RunOutcome, pragma: Pragma, settings: Settings) -> None:
    if outcome.rank_results is not None:
        view.show_value(outcome.rank_results)
    elif outcome.has_result:
        view.keep_result(outcome.result)
    for notice in _notices(outcome):
        view.notice(notice)
    error = exception_of(outcome.ended, pragma.gpus, pragma.timeout_s, tail_lines=settings.output.tail_lines)
    if error is not None:
        raise error


def _notices(outcome: RunOutcome) -> list[str]:
    notices = []
    if outcome.unwrapped:
        names = ", ".join(f"`{name}`" for name in outcome.unwrapped)
        notices.append(f"{names} came home as the module inside (a DDP wrapper needs its process group)")
    if outcome.not_home:
        lines = [f"  {paths}: {reason}" for paths, reason in _by_reason(outcome.not_home)]
        notices.append("\n".join(["stayed on rank 0, the notebook keeps what it had:", *lines]))
    if not outcome.ended.home:
        reason = outcome.ended.detail or "rank 0 could not be reached"
        notices.append(f"nothing came home, the notebook is as it was before the cell: {reason}")
    for death in outcome.ended.late_deaths:
        how = f"rank {death.rank} {describe_exit(death.exit_code)} at its end, after the cell had finished"
        notices.append(f"{how}: {death.hint}" if death.hint else how)
    for what, path, ranks in _left_out(outcome):
        notices.append(f"{what}({path!r}) was left out on {ranks}: rank 0 writes it (--writes all lets every rank)")
    return notices


def _by_reason(not_home: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One line for all that stayed away for the same reason."""
    groups: dict[str, list[str]] = {}
    for path, reason in not_home:
        groups.setdefault(reason, []).append(path)
    lines = []
    for reason, paths in groups.items():
        more = f" and {len(paths) - _NAMED_PATHS} more" if len(paths) > _NAMED_PATHS else ""
        lines.append((", ".join(paths[:_NAMED_PATHS]) + more, reason))
    return lines


def _left_out(outcome: RunOutcome) -> list[tuple[str, str, str]]:
    groups: dict[tuple[str, str], set[int]] = {}
    for entry in outcome.ended.left_out:
        groups.setdefault((entry.what, entry.path), set()).add(entry.rank)
    return [
        (what, path, plural(len(ranks), "rank") if len(ranks) > 1 else f"rank {min(ranks)}")
        for (what, path), ranks in groups.items()
    ]
