"""Runs one pragma cell: from its text to what the notebook holds afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell

from taas_magic.client.detached import AttachedSession, DetachedRun, forget, write_down
from taas_magic.client.failures import describe_exit, exception_of
from taas_magic.client.pools import PoolSession
from taas_magic.client.progress import Progress
from taas_magic.client.run import DETACHED, RunOutcome, RunRequest
from taas_magic.client.runner_process import RunnerProcess
from taas_magic.client.session import (
    Kept,
    Place,
    Session,
    new_run_id,
    place_locally,
    store_budget_bytes,
    visible_gpus,
)
from taas_magic.data.registry import Registration, registrations
from taas_magic.envfile import read_env_file
from taas_magic.errors import CannotTravelError, DeliveryError, PlacementError
from taas_magic.namespace import process_state
from taas_magic.namespace.mirror import Mirror
from taas_magic.namespace.names import CellNames, names_of_cell
from taas_magic.namespace.pack import PackedNamespace, Selection, pack_namespace, reached_by
from taas_magic.namespace.store import BlockStore
from taas_magic.notebook.delivery import describe_delivery, loaders_of_cell, nothing_registered, plan_delivery
from taas_magic.notebook.imports import packages_of
from taas_magic.notebook.plan import describe_plan
from taas_magic.notebook.view import NotebookView
from taas_magic.pragma import ParsedCell, Pragma
from taas_magic.settings import Settings, load_settings
from taas_magic.units import format_seconds, plural
from taas_magic.wire import CellTask

#: IPython's own names; they travel only where the user has bound them to something else.
_SHELL_NAMES = ("In", "Out", "exit", "quit", "get_ipython", "open", "_ih", "_oh", "_dh", "_i", "_ii", "_iii")
#: How many of the things that stayed on rank 0 for one reason are named.
_NAMED_PATHS = 3


def run_cell_for_value(  # noqa: PLR0917 - what run_cell takes
    shell: InteractiveShell,
    session: Session,
    pragma: Pragma,
    source: str,
    transform: Callable[[str], str],
    anew: frozenset[str] = frozenset(),
) -> list[Any]:
    """Run a line on kept ranks, and return what it gives on each, in place of showing it; see :func:`run_cell`."""
    values: list[Any] = []
    run_cell(shell, session, ParsedCell(pragma, source), transform, anew=anew, take_results=values.extend)
    return values


def require_kept(session: Session, what: str) -> Kept:
    """The kept ranks.

    Raises:
        PlacementError: if there are none.
        KeptRanksLostError: if they have ended.
    """
    kept = session.live_kept()
    if kept is None:
        raise PlacementError.of(f"there are no ranks to {what}", do="run a cell with `#pragma taas --gpus N --keep`")
    return kept


def run_cell(
    shell: InteractiveShell,
    session: Session,
    parsed: ParsedCell,
    transform: Callable[[str], str],
    *,
    anew: frozenset[str] = frozenset(),
    take_results: Callable[[list[Any]], None] | None = None,
) -> None:
    """Run a parsed cell on ranks and bring home what rank 0 made.

    Args:
        shell: The notebook's shell.
        session: The connection to the runner.
        parsed: The pragma and the code.
        transform: ``shell.transform_cell`` without our own transformation.
        anew: Names that kept ranks get in any case.
        take_results: Gets what ``--rank-results`` asks for, in place of the cell's output.

    Raises:
        TaasError: if the run cannot be started, or its processes are lost.
        BaseException: whatever the cell raised.
    """
    pragma = parsed.pragma
    settings = load_settings(Path.cwd(), os.environ)
    environment = _environment(pragma, session)
    session.warm_up()
    kept = _kept_for(session, pragma)
    # IPython's transformation takes milliseconds a magic, and is asked for more than once.
    transform = functools.cache(transform)
    names = _names(shell, parsed.code, transform)
    view = NotebookView(shell)
    session.store.budget_bytes = store_budget_bytes(settings)
    # Packed before the zygote is waited for: what cannot travel is said at once.
    packed = _pack(shell, names, pragma, environment, session, view, kept, anew)
    try:
        loaders = _registered_loaders(shell, names, pragma, packed, kept)
        if pragma.dry_run:
            print(describe_plan(packed, sorted(names.bound)))
            if pragma.cpus is not None:
                print(describe_delivery(loaders, pragma, settings.delivery.processes))
            return
        runner, place = _runner_and_place(session, pragma, settings, environment, view, kept)
        request = _request(shell, parsed, packed, place, settings, environment, session, kept)
        for notice in _first_notices(place, pragma, settings, kept):
            view.notice(notice)
        _remember_source(shell, transform(parsed.code))
        if kept is None and runner.pending_imports:
            values = [shell.user_ns.get(item.name) for item in packed.items]
            session.await_imports(packages_of(values, transform(parsed.code)), runner, view)
        if kept is not None and kept.mirror.unsent:
            lines = [f"  {paths}: {reason}" for paths, reason in _by_reason(kept.mirror.unsent)]
            view.notice("\n".join(["cannot be sent, the ranks keep what they had:", *lines]))
        _deliver(shell, loaders, packed, pragma, settings, request, session, view, runner)
        try:
            outcome = session.run(request, shell.user_ns, view, runner)
        finally:
            if request.delivery_id:
                # A run that was never started would leave it.
                session.cancel(request.delivery_id, runner)
    finally:
        packed.parcel.close()
    if outcome.ended.outcome == DETACHED:
        _say_detached(view, session, parsed, request)
        return
    mirror = request.mirror
    # The traceback of what is raised next may live long; it must not keep alive all that travelled.
    del packed, request
    if mirror is not None:
        cell_number = kept.cell_number if kept is not None else number_of_cell(shell)
        staying = Kept(outcome.ended.kept_id, runner, place, _writes(pragma, kept), mirror, cell_number)
        _keep_ranks(session, outcome, staying)
    if take_results is not None:
        take_results(outcome.rank_results or [])
        outcome.rank_results = None
    _conclude(view, outcome, pragma, settings)


def _runner_and_place(  # noqa: PLR0917 - everything that a place depends on
    session: Session,
    pragma: Pragma,
    settings: Settings,
    environment: dict[str, str],
    view: NotebookView,
    kept: Kept | None,
) -> tuple[RunnerProcess, Place]:
    """What runs the cell, and where its ranks go.

    Raises:
        RunnerLostError: if it cannot be reached.
        PlacementError: if the place cannot hold the run.
    """
    if isinstance(session, PoolSession) and kept is None:
        return session.ready_for(pragma, view)
    runner, ready = session.ready_runner(view)
    if kept is not None:
        return runner, kept.place
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    num_gpus = visible_gpus(ready.num_gpus, runner.cuda_visible_devices, visible)
    return runner, place_locally(pragma, num_gpus, settings)


def _say_detached(view: NotebookView, session: Session, parsed: ParsedCell, request: RunRequest) -> None:
    """Write down where the run goes on, and say how to get back to it."""
    assert isinstance(session, PoolSession)
    run_id, num_ranks = request.task.run_id, request.task.num_ranks
    lines = [line.strip() for line in parsed.code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    write_down(DetachedRun(run_id, session.order(), lines[0] if lines else "", num_ranks, time.time()))
    view.notice(f"run {run_id} goes on without this notebook, which may be closed: `%taas attach {run_id}` takes it up")


def _kept_for(session: Session, pragma: Pragma) -> Kept | None:
    """The kept ranks that the cell runs in; None where it gets new ones.

    Raises:
        PlacementError: if ranks are kept that do not fit the cell.
        KeptRanksLostError: if they have ended.
    """
    if pragma.dry_run and session.kept is None:
        # It asks for nothing that would have to be there.
        return None
    kept = session.live_kept()
    if kept is None:
        if pragma.rank != "all":
            raise PlacementError.of(
                "--rank chooses among ranks that were kept, and none are",
                expected="an earlier cell with --keep",
                do="leave --rank out, or run a cell with --keep first",
            )
        return None
    num_ranks = kept.place.num_ranks
    if pragma.gpus != num_ranks:
        raise PlacementError.of(
            f"--gpus {pragma.gpus}, and {plural(num_ranks, 'rank')} are kept since cell [{kept.cell_number}]",
            expected=f"--gpus {num_ranks}, which runs in them; --rank chooses some of them",
            do="`%taas release` ends them",
        )
    if pragma.writes == "all" and kept.writes != "all":
        raise PlacementError.of(
            "--writes all, and the ranks that are kept have given up their right to write in the project",
            expected="a cell without --writes",
            do="`%taas release`, then start them with --writes all",
        )
    return kept


def _first_notices(place: Place, pragma: Pragma, settings: Settings, kept: Kept | None) -> Iterator[str]:
    if kept is not None:
        return
    if place.notice:
        yield place.notice
    if pragma.keep:
        ranks = plural(place.num_ranks, "rank")
        idle = format_seconds(settings.keep.idle_s)
        yield f"the {ranks} stay after this cell: until `%taas release`, the kernel's end, or {idle} without a cell"


def _writes(pragma: Pragma, kept: Kept | None) -> str:
    return pragma.writes if kept is None else kept.writes


def _keep_ranks(session: Session, outcome: RunOutcome, kept: Kept) -> None:
    """Note that the ranks stay, and what both sides have then; or that they do not."""
    if not kept.id:
        session.keep(None)
        return
    session.keep(kept)


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


def _registered_loaders(
    shell: InteractiveShell, names: CellNames, pragma: Pragma, packed: PackedNamespace, kept: Kept | None
) -> list[tuple[int, Registration]]:
    """The registered loaders that the cell uses; none without ``--cpus``."""
    if pragma.cpus is None or not registrations():
        return []
    if kept is None:
        return loaders_of_cell(packed.common)
    # Kept ranks know loaders of earlier cells, too.
    selection = Selection(tuple(dict.fromkeys((*names.needed, *pragma.with_names))), names.maybe)
    return loaders_of_cell(packed.common, reached_by(shell.user_ns, selection, _hidden(shell)))


def _deliver(  # noqa: PLR0917 - everything that a delivery depends on
    shell: InteractiveShell,
    loaders: list[tuple[int, Registration]],
    packed: PackedNamespace,
    pragma: Pragma,
    settings: Settings,
    request: RunRequest,
    session: Session,
    view: NotebookView,
    runner: RunnerProcess,
) -> None:
    """Have what registered loaders yield prepared, before the ranks start."""
    if pragma.cpus is None:
        return
    if not loaders:
        view.notice(nothing_registered())
        return
    task = request.task
    if sum(count > 0 for count in request.ranks_of_machines) > 1:
        raise DeliveryError.of(
            "--cpus delivers to the ranks of one machine, and this run has ranks on several",
            do="leave --cpus out, and give the loaders workers; or run on one machine",
        )
    delivery = plan_delivery(
        shell.user_ns, loaders, packed.common, pragma, settings, task.environment, session.store, task.run_id
    )
    try:
        for notice in delivery.notices:
            view.notice(notice)
        session.prepare(delivery.task, delivery.packed.parcel, view, runner)
    finally:
        delivery.packed.parcel.close()
    request.delivery_id = delivery.task.id


def rank_environment() -> dict[str, str]:
    """The environment that ranks get, before an environment file and torchrun's variables are added."""
    environment = process_state.scrubbed(dict(os.environ))
    # Front ends know colours and carriage returns. rich's live displays move the cursor up: every frame would stay.
    environment.setdefault("TTY_INTERACTIVE", "0")
    return environment


def added_in_this_process(environment: dict[str, str]) -> dict[str, str]:
    """What the notebook has set, in contrast to what the kernel was started with: other machines have their own."""
    before = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/environ").read_bytes().split(b"\0"):
            name, _, value = os.fsdecode(entry).partition("=")
            before[name] = value
    return {name: value for name, value in environment.items() if before.get(name) != value}


def _environment(pragma: Pragma, session: Session) -> dict[str, str]:
    environment = rank_environment()
    if isinstance(session, PoolSession):
        whole, environment = environment, added_in_this_process(environment)
        if session.pool.env_file is not None:
            environment.update(read_env_file(session.pool.env_file, whole))
    if pragma.env_file is not None:
        environment.update(read_env_file(Path(pragma.env_file).expanduser(), rank_environment()))
    return environment


def _pack(  # noqa: PLR0917 - everything that packing depends on
    shell: InteractiveShell,
    names: CellNames,
    pragma: Pragma,
    environment: dict[str, str],
    session: Session,
    view: NotebookView,
    kept: Kept | None,
    anew: frozenset[str] = frozenset(),
) -> PackedNamespace:
    missing = [name for name in pragma.with_names if name not in shell.user_ns]
    if missing:
        raise CannotTravelError.of(
            f"--with {','.join(missing)}: the notebook has no such name",
            do="define it in an earlier cell, or leave it out",
        )
    selection = Selection(tuple(dict.fromkeys((*names.needed, *pragma.with_names))), names.maybe, anew)
    progress = Progress(view.progress, "copying the cell's state")
    pack = functools.partial(pack_namespace, shell.user_ns) if kept is None else kept.mirror.pack
    try:
        return pack(
            selection,
            process_state=process_state.capture(environment),
            hidden=_hidden(shell),
            cell_numbers=getattr(shell.compile, "_filename_map", {}),
            store=session.store,
            progress=progress.tell,
        )
    finally:
        progress.end()


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
    session: Session,
    kept: Kept | None,
) -> RunRequest:
    pragma = parsed.pragma
    sent = {item.name for item in packed.items}
    others = [name for name in shell.user_ns if name not in sent and not name.startswith("_")]
    task = CellTask(
        run_id=new_run_id(),
        source=parsed.code,
        execution_count=number_of_cell(shell),
        num_ranks=place.num_ranks,
        project=str(session.project if isinstance(session, PoolSession) else settings.project.directory),
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
        keep=pragma.keep or kept is not None,
        ranks=[] if pragma.rank == "all" else sorted(pragma.rank),
        adds_to_environment=isinstance(session, PoolSession),
        is_detached=pragma.detach,
    )
    mirror = kept.mirror if kept is not None else None
    if pragma.keep and kept is None:
        mirror = Mirror(packed, shell.user_ns, {*_SHELL_NAMES, *_hidden(shell)})
    return RunRequest(
        task,
        packed,
        _shown_ranks(pragma),
        settings.stop.grace_s,
        pragma.timeout_s,
        session.store,
        kept_id=kept.id if kept is not None else "",
        idle_s=settings.keep.idle_s,
        mirror=mirror,
        ranks_of_machines=place.ranks_of_machines,
    )


def _shown_ranks(pragma: Pragma) -> list[int] | None:
    if pragma.show == "all":
        return None
    if pragma.rank != "all" and pragma.show == {0}:
        # Who chooses ranks wants to see what they write.
        return sorted(pragma.rank)
    return sorted(pragma.show)


def attach(shell: InteractiveShell, run: DetachedRun, store: BlockStore, *, stops: bool) -> None:
    """Take a run up that goes on by itself: show all it has written and will, and bring home what it has made.

    Raises:
        TaasError: if it cannot be reached.
        BaseException: whatever the run raised.
    """
    view = NotebookView(shell)
    settings = load_settings(Path.cwd(), os.environ)
    session = AttachedSession(run, store)
    try:
        outcome = session.follow(run, shell.user_ns, view, stops=stops)
    finally:
        session.close()
    forget(run.id)
    if outcome.has_result:
        view.keep_result(outcome.result)
    for notice in _notices(outcome):
        view.notice(notice)
    error = exception_of(outcome.ended, run.num_ranks, None, tail_lines=settings.output.tail_lines)
    if error is not None:
        raise error


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
    notices = list(outcome.ended.delivery)
    if outcome.unwrapped:
        names = ", ".join(f"`{name}`" for name in outcome.unwrapped)
        notices.append(f"{names} came home as the module inside (a DDP wrapper needs its process group)")
    if outcome.not_home:
        lines = [f"  {paths}: {reason}" for paths, reason in _by_reason(outcome.not_home)]
        notices.append("\n".join(["stayed on rank 0, the notebook keeps what it had:", *lines]))
    if not outcome.ended.home:
        reason = outcome.ended.detail or "rank 0 could not be reached"
        notices.append(f"nothing came home, the notebook is as it was before the cell: {reason}")
    if outcome.ended.kept_id and outcome.ended.group_is_broken:
        notices.append(
            "the ranks stay with their variables, but their process group had to be broken off: "
            "call init_process_group again before the next collective"
        )
    if outcome.was_to_stay and not outcome.ended.kept_id:
        notices.append("the ranks could not stay: all have ended, and their own variables with them")
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
