"""A rank's life, from the fork to its exit: set up, load, run the cell, report, bring home, end."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import setproctitle

import taas._place
from taas_magic.channel import Channel
from taas_magic.data import delivered, stand_in
from taas_magic.namespace import process_state
from taas_magic.namespace.mirror import KeptNamespace
from taas_magic.namespace.pack import Selection, load_namespace, pack_namespace, pack_value
from taas_magic.namespace.track import Tracker
from taas_magic.rank import comms, landlock, meeting, output, rehearse, rulesets, shell
from taas_magic.rank.control import Control, Homebringer
from taas_magic.rank.failure import Explain, missing_name_hint, report_failure
from taas_magic.rank.identity import on_this_machine, rank_environment
from taas_magic.rank.writes import WriteGuard, writable_for_all
from taas_magic.wire import (
    CellFailed,
    CellFinished,
    CellStarted,
    CellTask,
    Exit,
    HomeFailed,
    LeftOut,
    RankDisplay,
    RankInput,
    RankResting,
    RankResult,
    Settle,
)
from taas_magic.wire_data import ToDataRank
from taas_magic.wire_zygote import Spawn


def run_rank(spawn: Spawn, stdout_fd: int, stderr_fd: int, control_socket: socket.socket) -> None:
    """Be a rank in this freshly forked process: wait for the task, and do it.

    Never returns: the process ends with 0 if the cell did its work.
    """
    setproctitle.setproctitle(f"taas: standby rank {spawn.rank}")
    output.redirect(stdout_fd, stderr_fd)
    # A crash in native code leaves the Python line that led to it in the rank's output.
    faulthandler.enable(all_threads=False)
    control = Control(control_socket)
    if not control.has_message():
        # Time to spare: the pages that every cell writes are copied from the zygote's now, not when the cell is there.
        shell.RankShell.instance().run_empty_cell()
        _load_nothing()
    task, parcel_fds = control.await_task()
    succeeded = _Rank(spawn, control).serve(task, parcel_fds)
    _end(0 if succeeded else 1)


def prepare() -> None:
    """Do in the zygote what every rank would do: make what :func:`_load_nothing` loads."""
    state = process_state.capture(dict(os.environ))
    _nothing.append(pack_namespace({}, Selection(()), process_state=state).parcel.fd)
    _load_nothing()


def _load_nothing() -> None:
    """Load a namespace without names, for what loading one touches."""
    main: dict[str, Any] = {}
    received = load_namespace(_nothing, main, before_names=process_state.apply)
    Tracker(received.common, main)
    process_state.set_environment(dict(os.environ))


#: The parcel of a namespace without names.
_nothing: list[int] = []


class _Rank:
    """One rank: it is set up once, and runs one cell, or, where ranks are kept, one after the other."""

    def __init__(self, spawn: Spawn, control: Control) -> None:
        self._spawn = spawn
        self._control = control
        self._main: dict[str, Any] = sys.modules["__main__"].__dict__
        self._own_names = set(self._main)
        self._shell: Any = shell.RankShell.instance()
        self._guard: WriteGuard | None = None
        self._kept: KeptNamespace | None = None
        self._lasting_explanations: list[Explain] = []
        #: What the notebook and this rank have in common, until registered loaders are found among it.
        self._objects: dict[int, Any] = {}
        self._task: CellTask

    def serve(self, task: CellTask, parcel_fds: list[int]) -> bool:
        """Run the cell, and others as long as they come; returns whether the last one went well."""
        self._task = on_this_machine(task, self._spawn)
        self._set_up()
        succeeded = self._run(parcel_fds)
        while True:
            order, fds = self._control.await_next()
            if isinstance(order, Exit):
                return succeeded
            if isinstance(order, Settle):
                self._settle(order)
                continue
            previous, self._task = self._task, on_this_machine(order.task, self._spawn)
            self._take_over_environment(previous.environment)
            self._control.begin_cell()
            succeeded = self._run(fds)

    def _set_up(self) -> None:
        control = self._control
        self._set_identity()
        self._guard_writes()
        self._prepare_torch()
        signal.signal(signal.SIGINT, control.on_interrupt)
        shell.configure(
            self._shell,
            send_display=lambda kind, content: control.display(RankDisplay(kind, content)),
            ask=lambda prompt, password: control.ask(RankInput(prompt, password)),
        )
        comms.install(lambda kind, content: control.send(RankDisplay(kind, content)))
        control.may_close_connections = self._spawn.rank != 0
        control.start()

    def _run(self, parcel_fds: list[int]) -> bool:
        control, task = self._control, self._task
        signal.signal(signal.SIGINT, control.on_interrupt)
        shell.set_style(self._shell, colors=task.colors, traceback_mode=task.traceback_mode)
        meeting.begin_cell(task.run_id)
        self._explanations = [missing_name_hint(task.other_names, task.left_out), *self._lasting_explanations]
        try:
            self._load(control, parcel_fds)
            self._attach_loaders()
            error = self._run_cell(control)
            # From here on an interrupt has nothing to interrupt; it could only keep the cell's work from coming home.
            control.cell_is_over = True
        except BaseException as failure:  # noqa: BLE001 - whatever it was, it is reported
            control.cell_is_over = True
            # Loading failed, or an interrupt came between: nothing of the cell has run.
            error = failure
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._detach_loaders()
        output.flush()
        self._report(control, error)
        if control.home is not None:
            control.home.pack_once()
        elif self._spawn.rank == 0:
            control.send(HomeFailed("the notebook's names could not be loaded in rank 0"))
        return error is None

    def _settle(self, order: Settle) -> None:
        """Get ready for another cell."""
        # What noted the cell's objects would keep them alive.
        self._control.home = None
        missing = [] if self._kept is None else self._kept.settle(order.adoptions, home_taken=order.home_taken)
        self._control.send(RankResting(missing))

    # -- setting up ----------------------------------------------------------------------------------------------

    def _set_identity(self) -> None:
        rank, local_rank = self._spawn.rank, self._spawn.local_rank
        world_size = int(self._spawn.environment["WORLD_SIZE"])
        setproctitle.setproctitle(f"taas: rank {rank}")
        taas._place.current = taas._place.Place(rank, world_size, local_rank, is_in_run=True)
        environment = rank_environment(self._task, self._spawn)
        threads = max(1, (os.cpu_count() or 1) // int(self._spawn.environment["LOCAL_WORLD_SIZE"]))
        threads = int(environment.setdefault("OMP_NUM_THREADS", str(threads)) or threads)
        process_state.set_environment(environment)
        if rank != 0:
            own_temporary = Path(self._task.run_dir) / f"rank-{rank}"
            own_temporary.mkdir(exist_ok=True)
            os.environ["TMPDIR"] = str(own_temporary)
        tempfile.tempdir = None
        self._num_threads = threads

    def _guard_writes(self) -> None:
        """Take the right to write in the project while this process has one thread: Landlock works by thread."""
        if self._spawn.rank == 0 or self._task.writes == "all":
            return
        project, run_dirs = Path(self._task.project), Path(self._task.run_dir).parent
        writable = writable_for_all(os.environ, self._task.writable, run_dirs)
        is_enforced = landlock.abi_version() > 0
        if is_enforced:
            ruleset_fd = rulesets.ruleset_for(project, writable)
            landlock.restrict(ruleset_fd)
            os.close(ruleset_fd)
        self._guard = WriteGuard(writable=writable)
        self._guard.install(self._spawn.rank, project, enforced=is_enforced)
        self._lasting_explanations.append(self._guard.explain)

    def _prepare_torch(self) -> None:
        import torch

        meeting.number_meetings()
        torch.set_num_threads(self._num_threads)
        # Asking for GPUs may start threads, so it comes after the write guard, which needs a single one.
        if not self._task.rehearse and torch.cuda.is_available():
            local_rank = self._spawn.local_rank
            # `cuda` alone means this rank's GPU from the moment that CUDA is initialised, and no sooner.
            torch.cuda._lazy_call(lambda: torch.cuda.set_device(local_rank))
        if self._task.rehearse:
            rehearse.install()
            self._lasting_explanations.append(rehearse.explain)

    def _load(self, control: Control, parcel_fds: list[int]) -> None:
        task = self._task
        if self._kept is not None:
            # A kept rank's random states and settings are its own.
            received = self._kept.load(parcel_fds, functools.partial(process_state.apply_place, moved=task.moved))
            for problem in self._kept.problems:
                sys.stderr.write(f"taas: rank {self._spawn.rank}: {problem}\n")
        else:
            apply = functools.partial(process_state.apply, moved=task.moved)
            received = load_namespace(parcel_fds, self._main, before_names=apply)
            if self._task.keep:
                self._kept = KeptNamespace(received.common, self._main)
        for fd in parcel_fds:
            os.close(fd)
        shell.add_sources(self._shell, received.sources)
        self._objects = received.common.objects if control.delivery is not None else {}
        if self._spawn.rank == 0:
            tracker = Tracker(received.common, self._main, self._own_names.union(self._task.ignored_names))
            control.home = Homebringer(control, tracker, self._last_value, self._kept, is_detached=task.is_detached)

    def _detach_loaders(self) -> None:
        """Have them be what they were; a cell that could not begin has not taken its delivery either."""
        stand_in.detach()
        if self._control.delivery is not None:
            for fd in self._control.delivery[1]:
                os.close(fd)
            self._control.delivery, self._objects = None, {}

    def _attach_loaders(self) -> None:
        """Have the registered loaders deliver what producers make, for as long as the cell runs."""
        if self._control.delivery is None:
            return
        (message, (socket_fd, arena_fd)), self._control.delivery = self._control.delivery, None
        objects, self._objects = self._objects, {}
        channel: Channel[ToDataRank] = Channel(socket.socket(fileno=socket_fd), ToDataRank)
        shared = {number: objects[number] for number in message.shared if number in objects}
        connection = delivered.Connection(channel, arena_fd, message.num_ranks, shared)
        stand_in.attach(connection, message.loaders, objects, message.num_ranks)

    def _take_over_environment(self, before: dict[str, str]) -> None:
        """Set the variables that the notebook has changed since the cell before; the ranks' own changes stay."""
        now = self._task.environment
        for name in before.keys() - now.keys():
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in now.items() if before.get(name) != value})

    def _last_value(self) -> dict[str, Any]:
        hook = self._shell.displayhook
        return {"result": hook.result} if hook.has_result else {}

    # -- the cell ------------------------------------------------------------------------------------------------

    def _run_cell(self, control: Control) -> BaseException | None:
        control.send(CellStarted())
        self._shell.current_source = self._task.source
        hook = self._shell.displayhook
        hook.result, hook.has_result, hook.is_shown = None, False, not self._task.rank_results
        if not self._takes_part:
            return None
        result = self._shell.run_source(self._task.source, self._task.execution_count)
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        return error

    @property
    def _takes_part(self) -> bool:
        """Whether the cell runs on this rank; a kept rank may only be told what the notebook has changed."""
        return not self._task.ranks or self._spawn.rank in self._task.ranks

    def _report(self, control: Control, error: BaseException | None) -> None:
        left_out = self._left_out()
        if error is None:
            if self._task.rank_results and self._spawn.rank != 0 and self._takes_part:
                self._send_result(control)
            control.send(CellFinished(left_out))
            return
        report = report_failure(self._spawn.rank, error, self._shell.structured_traceback, self._explanations)
        control.send(CellFailed(report, left_out))

    def _send_result(self, control: Control) -> None:
        try:
            parcel = pack_value(self._main, self._shell.displayhook.result)
        except Exception as error:  # noqa: BLE001 - an object's own pickling may raise anything
            control.send(RankResult(reason=f"{type(error).__name__}: {error}"))
            return
        control.send(RankResult(parcel.size_bytes), (parcel.fd,))
        parcel.close()

    def _left_out(self) -> list[LeftOut]:
        if self._guard is None:
            return []
        return [
            LeftOut(self._spawn.rank, entry.what, str(entry.path), entry.count) for entry in self._guard.take_left_out()
        ]


def _end(status: int) -> None:
    """End the process as the interpreter would, without taking its memory apart first."""
    for step in _last_steps(succeeded=status == 0):
        with contextlib.suppress(BaseException):
            step()
    os._exit(status)


def _last_steps(*, succeeded: bool) -> list[Callable[[], Any]]:
    import torch.distributed as dist

    steps: list[Callable[[], Any]] = []
    # After a failure the peers may be gone, and taking a group apart would wait for them.
    if succeeded and dist.is_available() and dist.is_initialized():
        steps.append(dist.destroy_process_group)
    return [*steps, _end_child_processes, atexit._run_exitfuncs, output.flush]


def _end_child_processes() -> None:
    """End what the cell started by multiprocessing and left: its exit function would wait for it, perhaps for ever."""
    for child in multiprocessing.active_children():
        child.terminate()
