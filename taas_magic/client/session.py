"""The kernel's side of taas: keeps a runner at hand and runs cells on it."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from taas_magic.client.run import ActiveRun, RunOutcome, RunRequest, View
from taas_magic.client.runner_process import RunnerProcess
from taas_magic.errors import DeliveryError, KeptRanksLostError, PlacementError, RunnerLostError, TaasError
from taas_magic.namespace.blocks import Parcel
from taas_magic.namespace.mirror import Mirror
from taas_magic.namespace.store import BlockStore
from taas_magic.pragma import Pragma
from taas_magic.settings import Settings
from taas_magic.units import format_bytes, plural
from taas_magic.wire import Denied, KeptEnded, LogPiece, Preload, ReadLog, ReadStatus, Ready, ReleaseKept, Status
from taas_magic.wire_base import MemoryFile
from taas_magic.wire_data import (
    CancelDelivery,
    DeliveryFailed,
    DeliveryProgress,
    DeliveryTask,
    PrepareDelivery,
)

_WARM_UP_S = 300.0
_ANSWER_S = 10.0
#: Ranks can import for themselves; they are not kept waiting for longer.
_IMPORTS_S = 60.0
_SAY_SOMETHING_AFTER_S = 0.7
_BAR_CELLS = 20


@dataclass
class Kept:
    """Ranks that stay between cells.

    Attributes:
        id: By which the runner knows them.
        runner: The runner that has them.
        place: How many there are, and whether they rehearse.
        writes: Who of them may write in the project.
        mirror: What they and the notebook have in common.
        cell_number: The cell that started them.
    """

    id: str
    runner: RunnerProcess
    place: Place
    writes: str
    mirror: Mirror
    cell_number: int


@dataclass(frozen=True)
class Place:
    """Where a run goes: how many ranks, and whether they rehearse on CPU for want of GPUs."""

    num_ranks: int
    rehearse: bool
    #: How many ranks each machine of a pool has; empty where all are on this machine.
    ranks_of_machines: tuple[int, ...] = ()

    @property
    def notice(self) -> str:
        """What to say of it at the head of the output; "" where there is nothing to say."""
        if not self.rehearse:
            return ""
        return f"no GPU here: rehearsing {plural(self.num_ranks, 'rank')} on CPU; 'nccl' is answered by 'gloo'"


class Session:
    """One notebook's connection to its local runner; a lost runner is replaced at the next run.

    Args:
        store: What was sent, so that it need not be sent again; it is there for as long as the kernel.
    """

    def __init__(self, store: BlockStore | None = None) -> None:
        self._runner: RunnerProcess | None = None
        self.store = BlockStore(0) if store is None else store
        self._kept: Kept | None = None
        #: Held by the thread that talks with the runner; its connection is for one at a time.
        self._lock = threading.Lock()

    # -- the runner ----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Start the runner in the background, unless one is there. Costs a process start and no waiting."""
        if self._runner is None or not self._runner.is_alive:
            self.close()
            self._runner = self._new_runner()

    def _new_runner(self) -> RunnerProcess:
        return RunnerProcess()

    def ready_runner(self, view: View) -> tuple[RunnerProcess, Ready]:
        """The connected runner with a warm zygote; waits for it, and says so where that takes long.

        Raises:
            RunnerLostError: if the runner cannot be started.
            VersionMismatchError: if versions differ.
        """
        self.warm_up()
        runner = self._runner
        assert runner is not None
        try:
            runner.connect()
            self._await_zygote(runner, view)
        except RunnerLostError:
            self.close()
            raise
        assert runner.ready is not None
        return runner, runner.ready

    def _await_zygote(self, runner: RunnerProcess, view: View) -> None:
        started = time.monotonic()
        has_said = False
        shown = ""
        while runner.ready is None:
            for message in runner.receive(0.05):
                if isinstance(message, Denied):
                    raise RunnerLostError.of(message.reason, do="fix what it says, then run the cell again")
            if runner.waits_for != shown:
                shown = runner.waits_for
                view.progress(shown)
            waited = time.monotonic() - started
            if waited > _SAY_SOMETHING_AFTER_S and not has_said and not shown and runner.ready is None:
                has_said = True
                view.notice("warming up: importing torch once, for all runs of this notebook ...")
            if waited > _WARM_UP_S:
                raise RunnerLostError.of(f"the zygote did not get warm within {_WARM_UP_S:.0f} s\n{runner.log_tail()}")
        if shown:
            view.progress("")

    def preload(self, modules: list[str], environment: dict[str, str]) -> None:
        """Let the runner import what the notebook has imported; does not wait."""
        if self._runner is None or not self._runner.is_alive or not self._lock.acquire(blocking=False):
            return
        try:
            self._runner.greet()
            self._runner.send(Preload(modules, environment))
            self._runner.pending_imports = modules
        finally:
            self._lock.release()

    def await_imports(self, packages: Collection[str], runner: RunnerProcess, view: View) -> None:
        """Wait while the runner imports one of these packages: each rank would have to do it again by itself."""
        with self._alone("run a cell"):
            runner.take_notice()
            started = time.monotonic()
            has_said = False
            while time.monotonic() < started + _IMPORTS_S:
                awaited = {name.partition(".")[0] for name in runner.pending_imports}.intersection(packages)
                if not awaited:
                    return
                if time.monotonic() > started + _SAY_SOMETHING_AFTER_S and not has_said:
                    has_said = True
                    view.notice(f"importing {', '.join(sorted(awaited))} once, for all ranks ...")
                runner.take_notice(0.05)

    def close(self) -> None:
        """End the runner and everything it started."""
        if self._runner is not None:
            self._runner.stop()
            self._runner = None

    # -- kept ranks ----------------------------------------------------------------------------------------------

    @property
    def kept(self) -> Kept | None:
        """The ranks that stay, as far as is known without asking."""
        return self._kept

    def keep(self, kept: Kept | None) -> None:
        """Note which ranks stay."""
        self._kept = kept

    def live_kept(self) -> Kept | None:
        """The ranks that stay, if they are still there.

        Raises:
            KeptRanksLostError: if they have ended; once, and then there are none.
        """
        kept = self._kept
        if kept is None:
            return None
        reason = self._why_ended(kept)
        if not reason:
            return kept
        self._kept = None
        raise KeptRanksLostError.of(
            f"the {plural(kept.place.num_ranks, 'rank')} that were kept since cell [{kept.cell_number}] have ended: "
            f"{reason}. Their own variables are gone; the notebook has rank 0's",
            do="run the cell again: it starts new ranks",
        )

    def _why_ended(self, kept: Kept) -> str:
        runner = kept.runner
        if self._runner is not runner or not runner.is_alive:
            return "their runner has ended"
        with self._alone("ask its runner"):
            runner.take_notice()
        return runner.kept_ended.get(kept.id, "")

    def release(self) -> Kept | None:
        """End the ranks that stay; returns which they were, None where there were none."""
        kept, self._kept = self._kept, None
        if kept is None or self._why_ended(kept):
            return kept
        runner = kept.runner
        with self._alone("release its ranks"):
            runner.connect()
            runner.send(ReleaseKept(kept.id))
            with contextlib.suppress(RunnerLostError):
                runner.wait_for((KeptEnded,), _ANSWER_S)
        return kept

    # -- data ----------------------------------------------------------------------------------------------------

    def prepare(self, task: DeliveryTask, parcel: Parcel, view: View, runner: RunnerProcess) -> None:
        """Have producers prepare data, and wait until the ranks may start.

        Raises:
            DeliveryError: if they cannot.
            RunnerLostError: if the runner ends first.
            KeyboardInterrupt: if the user stops it; nothing is left of it then.
        """
        pid = os.getpid()
        order = PrepareDelivery(
            task,
            MemoryFile(pid, parcel.fd, parcel.size_bytes),
            [MemoryFile(pid, segment.fd, segment.size_bytes) for segment in parcel.segments],
        )
        with self._alone("run a cell"):
            shown = ""
            try:
                runner.send(order)
                while True:
                    for message in runner.receive(0.1):
                        progress = _progress_of(message, task.id)
                        if progress is None:
                            continue
                        text = describe_preparation(progress)
                        if text != shown and (shown or not progress.is_ready):
                            shown = text
                            view.progress(text)
                        if progress.is_ready:
                            return
            except BaseException:
                self.cancel(task.id, runner)
                raise
            finally:
                if shown:
                    view.progress("")

    @staticmethod
    def cancel(delivery_id: str, runner: RunnerProcess) -> None:
        """Let go of what was prepared; nothing happens where a run has it."""
        with contextlib.suppress(Exception):
            runner.send(CancelDelivery(delivery_id))

    # -- runs ----------------------------------------------------------------------------------------------------

    def run(self, request: RunRequest, main: dict[str, Any], view: View, runner: RunnerProcess) -> RunOutcome:
        """Run a request to its end; see :class:`ActiveRun`.

        Raises:
            TaasError: if another thread (a kernel's subshell) follows a run: both would take each other's messages.
        """
        with self._alone("run a cell"):
            try:
                return ActiveRun(runner, request, main, view).drive()
            except RunnerLostError:
                # It may still be there, on its way to its end; the next run must not meet it.
                self.close()
                self._kept = None
                raise
            except BaseException:
                # What the ranks have been given, and what not, is not known.
                if request.kept_id:
                    self._kept = None
                    runner.send(ReleaseKept(request.kept_id))
                raise

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise TaasError.of(
                f"a run is active, so this notebook cannot {what} now", do="wait for its end, or stop it"
            )
        try:
            yield
        finally:
            self._lock.release()

    # -- questions -----------------------------------------------------------------------------------------------

    def status(self) -> Status | None:
        """What the runner is doing; None where there is none."""
        runner = self._runner
        if runner is None or not runner.is_alive:
            return None
        with self._alone("ask its runner"):
            runner.connect()
            runner.send(ReadStatus())
            answer: Status = runner.wait_for((Status,), _ANSWER_S)
        return answer

    def read_log(self, rank: int, run_id: str = "") -> Iterator[tuple[str, bytes]]:
        """Yield the pieces ("stdout" or "stderr", bytes) that a rank wrote in a kept run; "" is the latest.

        Raises:
            TaasError: if no such run or rank is kept.
        """
        runner = self._runner
        if runner is None or not runner.is_alive:
            raise TaasError.of("there is no runner, and so no log", do="run a cell with a pragma first")
        with self._alone("read a log"):
            runner.connect()
            runner.send(ReadLog(run_id, rank))
            while True:
                piece = runner.wait_for((LogPiece, Denied), _ANSWER_S)
                if isinstance(piece, Denied):
                    raise TaasError.of(piece.reason)
                if piece.last:
                    return
                yield piece.kind, piece.data


def _progress_of(message: Any, delivery_id: str) -> DeliveryProgress | None:
    """What a message says of a preparation; None where it is about something else.

    Raises:
        DeliveryError: if the preparation has ended.
        RunnerLostError: if the runner has.
    """
    if isinstance(message, Denied):
        raise RunnerLostError.of(message.reason, do="run the cell again: it starts a new runner")
    if getattr(message, "delivery_id", "") != delivery_id:
        return None
    if isinstance(message, DeliveryFailed):
        raise DeliveryError.of(message.reason, do="correct what it says; nothing has run on the ranks")
    return message if isinstance(message, DeliveryProgress) else None


def describe_preparation(progress: DeliveryProgress) -> str:
    """How far a preparation is, as a bar and in numbers."""
    filled = round(_BAR_CELLS * progress.share)
    bar = "█" * filled + "·" * (_BAR_CELLS - filled)
    parts = [f"{each.name} {each.ready} ready, {format_bytes(each.ready_bytes)}" for each in progress.loaders]
    return f"preparing data {bar} {100 * progress.share:.0f} %: {'; '.join(parts)}"


def visible_gpus(num_gpus: int, at_start: str | None, now: str | None) -> int:
    """GPUs that ranks will see: as counted, unless CUDA_VISIBLE_DEVICES has been changed since the runner started.

    Args:
        num_gpus: What the zygote counted.
        at_start: The variable when the runner was started; None where it was not set.
        now: The variable in the environment that ranks get.
    """
    if now == at_start or now is None:
        return num_gpus
    entries = [entry.strip() for entry in now.split(",")]
    # As CUDA reads it: the first entry that is no device ends the list.
    return len(list(itertools.takewhile(lambda entry: entry not in ("", "-1"), entries)))


def store_budget_bytes(settings: Settings) -> int:
    """How much of what was sent is kept, in bytes."""
    if settings.state.budget_gib is not None:
        return int(settings.state.budget_gib * 2**30)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def place_locally(pragma: Pragma, num_gpus: int, settings: Settings) -> Place:
    """Decide where the ranks of a run go on this machine.

    Raises:
        PlacementError: if it cannot hold them.
    """
    wanted = pragma.gpus
    if num_gpus == 0:
        if wanted > settings.local.max_ranks:
            raise PlacementError.of(
                f"--gpus {wanted}: this machine has no GPU, and rehearses "
                f"at most {settings.local.max_ranks} ranks on CPU",
                do="ask for fewer, or raise `max_ranks` in table [local] of taas.toml",
            )
        return Place(wanted, rehearse=True)
    if wanted > num_gpus:
        raise PlacementError.of(
            f"--gpus {wanted}, and this machine has {num_gpus}",
            expected=f"--gpus 1 to {num_gpus}",
            do=f"write `#pragma taas --gpus {num_gpus}`; "
            "to rehearse on CPU, set CUDA_VISIBLE_DEVICES='' before %load_ext",
        )
    return Place(wanted, rehearse=False)


def new_run_id() -> str:
    """A short id that no other run of this notebook has."""
    return f"{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"
