"""A run as the kernel sees it: submit, show what comes, bring home what rank 0 made."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from taas_magic.client.interrupts import Interrupts, counted_interrupts
from taas_magic.client.progress import Progress
from taas_magic.client.runner_process import RunnerProcess
from taas_magic.errors import CannotTravelError, RunnerLostError, TaasError
from taas_magic.namespace.home import Homecoming, HomeLoadError, load_homecoming
from taas_magic.namespace.mirror import Mirror
from taas_magic.namespace.pack import PackedNamespace, load_value
from taas_magic.namespace.process_state import apply_random
from taas_magic.namespace.store import BlockStore
from taas_magic.wire import (
    Abandon,
    CellTask,
    Denied,
    Detached,
    Display,
    HomeArrived,
    HomeRefused,
    HomeTaken,
    InputReply,
    InputRequest,
    Interrupt,
    Notice,
    Output,
    OutputTaken,
    ResultArrived,
    ResultTaken,
    RunEnded,
    Submit,
    TransferProgress,
    Waiting,
)
from taas_magic.wire_base import MemoryFile

_POLL_S = 0.1
#: The outcome of a run that goes on by itself.
DETACHED = "detached"
#: Records that are no names of the notebook, as people call them.
_WORDS = {"result": "the value of the last line", "random": "the random states"}
_UNANSWERED_KILL_S = 3.0
_MAX_HOME_ATTEMPTS = 50


class View(Protocol):
    """What shows a run to the user; implemented by the notebook."""

    def write(self, rank: int, stream: str, text: str) -> None:
        """Show a piece of a rank's "stdout" or "stderr"."""

    def tick(self) -> None:
        """Called now and then while nothing comes."""

    def finish(self) -> None:
        """Called when no more output will come."""

    def display(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        """Show something rich; ``kind`` as in :class:`taas_magic.wire.Display`."""

    def notice(self, text: str) -> None:
        """Show a line of our own."""

    def progress(self, text: str) -> None:
        """Show how far something is, in place of what was shown before; "" ends the line."""

    def ask(self, prompt: str, *, password: bool) -> str | None:
        """Ask the user for a line; None where nobody can be asked."""


@dataclass
class RunRequest:
    """What to run: the task, the packed namespace and how to stop."""

    task: CellTask
    packed: PackedNamespace
    show: list[int] | None
    grace_s: float
    timeout_s: float | None
    store: BlockStore
    #: The kept ranks to run in; "" for new ones.
    kept_id: str = ""
    #: How long ranks that are to stay wait for another cell.
    idle_s: float = 0.0
    #: What is to be told of all that comes home, where ranks stay.
    mirror: Mirror | None = None
    #: The delivery of data that was prepared for it; "" without one.
    delivery_id: str = ""
    #: How many ranks each machine of the pool has; empty for all on this machine.
    ranks_of_machines: tuple[int, ...] = ()

    @property
    def ranks(self) -> list[int]:
        """The ranks that run the cell, in order."""
        return list(self.task.ranks) or list(range(self.task.num_ranks))


@dataclass
class RunOutcome:
    """How a run ended, and what came home from it.

    Attributes:
        ended: The runner's last word.
        has_result: Whether the value of the last expression came home.
        result: That value.
        not_home: (expression, reason) of what stayed on rank 0.
        unwrapped: Names of DDP wrappers that came home as the module inside.
    """

    ended: RunEnded
    has_result: bool = False
    result: Any = None
    #: Whether ranks that had been kept, or were to be, should still be there.
    was_to_stay: bool = False
    #: What every rank's last expression gave, where that was asked for.
    rank_results: list[Any] | None = None
    not_home: list[tuple[str, str]] = field(default_factory=list)
    unwrapped: list[str] = field(default_factory=list)


class ActiveRun:
    """Drives one run to its end. Use :meth:`drive` once."""

    def __init__(self, runner: RunnerProcess, request: RunRequest, main: dict[str, Any], view: View) -> None:
        self._runner = runner
        self._request = request
        self._main = main
        self._view = view
        self._id = request.task.run_id
        self._decoders: dict[tuple[int, str], codecs.IncrementalDecoder] = {}
        self._home = Homecoming()
        self._refused: list[tuple[str, str]] = []
        #: Values of ranks other than 0.
        self._results: dict[int, Any] = {}
        self._outcome: RunOutcome | None = None
        self._arrived: HomeArrived | None = None
        self._adoptions = b""
        self._sent_interrupts = 0
        self._last_interrupt_at = 0.0
        self._has_failed_to_show = False
        self._packing = Progress(view.progress, "rank 0 packs what comes home", after_s=0)

    def drive(self) -> RunOutcome:
        """Submit and follow the run.

        Raises:
            RunnerLostError: if the runner ends first.
            TaasError: if the runner refuses the run.
        """
        request = self._request
        parcel = request.packed.parcel
        pid = os.getpid()
        submit = Submit(
            task=request.task,
            parcel=MemoryFile(pid, parcel.fd, parcel.size_bytes),
            show=request.show,
            grace_s=request.grace_s,
            timeout_s=request.timeout_s,
            segments=[MemoryFile(pid, segment.fd, segment.size_bytes) for segment in parcel.segments],
            kept_id=request.kept_id,
            idle_s=request.idle_s,
            delivery_id=request.delivery_id,
            ranks_of_machines=list(request.ranks_of_machines),
        )
        with counted_interrupts() as interrupts:
            if request.kept_id and request.mirror is not None:
                request.mirror.sent(request.packed)
            self._runner.send(submit)
            try:
                self._follow(interrupts)
                assert self._outcome is not None
                if request.mirror is not None and self._outcome.ended.kept_id:
                    self._home = Homecoming()
                    # Here, where an interrupt is only counted: half noted, what the ranks have would not be known.
                    request.mirror.note(self._outcome.ended.forgotten)
            except RunnerLostError as error:
                if self._arrived is None:
                    raise
                raise RunnerLostError.of(
                    f"{error}\nwhat rank 0 had made and changed has come home all the same",
                ) from error
            except BaseException:
                # Whatever went wrong here: nobody follows the run any more, and the next one needs the place.
                with contextlib.suppress(Exception):
                    self._runner.send(Abandon(self._id))
                raise
            finally:
                parcel.close()
        return self._outcome

    def _follow(self, interrupts: Interrupts) -> None:
        """Take what comes until the run has ended."""
        while self._outcome is None:
            for message in self._runner.receive(_POLL_S):
                self._take(message)
            self._show(self._view.tick)
            self._pass_on(interrupts)
        self._show(self._view.finish)

    # -- interrupts ----------------------------------------------------------------------------------------------

    def _pass_on(self, interrupts: Interrupts) -> None:
        now = time.monotonic()
        if interrupts.count > self._sent_interrupts:
            self._sent_interrupts = interrupts.count
            self._last_interrupt_at = now
            level = min(3, interrupts.count)
            if level == 2:
                self._view.notice("stopping harder: terminating the ranks (once more kills them)")
            self._runner.send(Interrupt(self._id, level))
        elif self._sent_interrupts >= 3 and now - self._last_interrupt_at > _UNANSWERED_KILL_S:
            self._runner.kill()
            raise RunnerLostError.of(
                "the runner did not answer three interrupts and was killed, its ranks with it; "
                "what the cell changed did not come home",
                do="run the cell again: it starts a new runner",
            )

    # -- messages ------------------------------------------------------------------------------------------------

    def _take(self, message: Any) -> None:
        if isinstance(message, Denied):
            self._take_denial(message)
        elif getattr(message, "run_id", self._id) == self._id:
            self._take_own(message)

    def _take_denial(self, message: Denied) -> None:
        if not message.run_id:
            raise RunnerLostError.of(
                f"{message.reason}\nthe ranks that it had started are gone",
                do="run the cell again: it starts a new runner",
            )
        if message.run_id == self._id:
            raise TaasError.of(f"the runner refused the run: {message.reason}", do="`%taas restart` starts a new one")

    def _take_own(self, message: Any) -> None:  # noqa: C901 - a table of messages
        """Take a message about this run."""
        if isinstance(message, Output):
            piece = self._decode(message)
            self._show(lambda: self._view.write(message.rank, message.kind, piece))
            self._runner.send(OutputTaken(self._id, len(message.data)))
        elif isinstance(message, Display):
            self._show(lambda: self._view.display(message.rank, message.kind, json.loads(message.content)))
            self._runner.send(OutputTaken(self._id, len(message.content)))
        elif isinstance(message, InputRequest):
            text = self._view.ask(message.prompt, password=message.password)
            self._runner.send(InputReply(self._id, message.rank, text))
        elif isinstance(message, HomeArrived):
            self._bring_home(message)
        elif isinstance(message, ResultArrived):
            self._take_result(message)
        elif isinstance(message, RunEnded):
            self._finish(message)
        elif isinstance(message, Detached):
            self._outcome = RunOutcome(RunEnded(self._id, DETACHED, 0.0))
        elif isinstance(message, TransferProgress):
            self._show(lambda: self._packing.tell(message.done_bytes, message.total_bytes))
        elif isinstance(message, Waiting):
            self._show(lambda: self._view.progress(message.text))
        elif isinstance(message, Notice):
            self._show(lambda: self._view.notice(message.text))

    def _show(self, show: Callable[[], None]) -> None:
        """Show something; that a front end cannot is no reason to give up what the ranks have worked for."""
        try:
            show()
        except Exception as error:  # noqa: BLE001 - what the user's classes raise
            if not self._has_failed_to_show:
                self._has_failed_to_show = True
                with contextlib.suppress(Exception):
                    self._view.notice(f"some output could not be shown: {type(error).__name__}: {error}")

    def _decode(self, message: Output) -> str:
        key = message.rank, message.kind
        decoder = self._decoders.get(key)
        if decoder is None:
            decoder = self._decoders[key] = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(message.data)

    def _bring_home(self, message: HomeArrived) -> None:
        """Load and apply; where a record cannot be loaded here, have rank 0 pack the rest again."""
        self._packing.end()
        fd = message.parcel.open()
        try:
            self._home = load_homecoming(fd, self._request.packed, self._main)
            problems = self._apply(fd, message)
        except HomeLoadError as error:
            if len(self._refused) >= _MAX_HOME_ATTEMPTS:
                raise
            self._refused.append((error.label, error.reason))
            self._runner.send(HomeRefused(self._id, [label for label, _ in self._refused]))
            return
        finally:
            os.close(fd)
        self._refused += [("", problem) for problem in problems]
        if "random" in self._home.extra:
            with contextlib.suppress(Exception):
                apply_random(self._home.extra["random"], only_imported=True)
        self._runner.send(HomeTaken(self._id, self._adoptions))

    def _apply(self, fd: int, message: HomeArrived) -> list[str]:
        """Bring what has come into the notebook; returns what could not be, one line each."""
        self._arrived = message
        home, request = self._home, self._request
        progress = Progress(lambda text: self._show(lambda: self._view.progress(text)), "bringing home")
        problems = home.apply(request.packed, self._main, progress.tell)
        progress.end()
        # What came is what the next cell will find here, unless somebody changes it: it need not be sent back.
        kept = request.store.keep(fd, message.parcel.size_bytes, home.blocks_here(request.packed.common))
        if request.mirror is not None:
            self._adoptions = request.mirror.came_home(home, kept)
        return problems

    def _take_result(self, message: ResultArrived) -> None:
        """Load the value of a rank other than 0; an error stands for what cannot be loaded."""
        reason = message.reason
        if message.parcel is not None:
            try:
                fd = message.parcel.open()
                try:
                    self._results[message.rank] = load_value(fd, self._main)
                finally:
                    os.close(fd)
            except Exception as error:  # noqa: BLE001 - whatever it was, it is said in the value's place
                reason = f"{type(error).__name__}: {error}"
            self._runner.send(ResultTaken(self._id, message.rank))
        if reason:
            self._results[message.rank] = CannotTravelError.of(
                f"the value of rank {message.rank} cannot come to the notebook: {reason}"
            )

    def _finish(self, ended: RunEnded) -> None:
        outcome = RunOutcome(ended, was_to_stay=self._request.task.keep)
        if "result" in self._home.extra:
            outcome.has_result, outcome.result = True, self._home.extra["result"]
        if self._request.task.rank_results and ended.outcome == "ok":
            results = {**self._results, 0: outcome.result}
            outcome.rank_results = [results.get(rank) for rank in self._request.ranks]
        if self._arrived is not None:
            outcome.not_home += self._arrived.not_home
            outcome.unwrapped += self._arrived.unwrapped
        for label, reason in self._refused:
            kind, _, name = label.partition(" ")
            outcome.not_home.append((name if kind == "bind" else label or reason, reason))
        outcome.not_home = [(_WORDS.get(path, path), reason) for path, reason in outcome.not_home]
        self._outcome = outcome
