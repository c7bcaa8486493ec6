"""The runner: it starts the zygote, takes runs from one kernel, and keeps their output.

It imports no torch and unpickles nothing. Its one loop polls the kernel's socket, the zygote and the pipes of the
active run. It ends when its kernel does.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import shutil
import signal
import sys
import time
import traceback
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import setproctitle
import zmq

from taas_magic.channel import ChannelClosedError
from taas_magic.places import in_directory
from taas_magic.runner.code import CodeCopy
from taas_magic.runner.delivery import Delivery
from taas_magic.runner.kept import KeptRanks
from taas_magic.runner.members import Parts, spans_machines
from taas_magic.runner.output_log import OutputLog
from taas_magic.runner.preloading import Preloading
from taas_magic.runner.run import Run, Source
from taas_magic.runner.standby import Standby
from taas_magic.runner.zygote_link import Meeting, ZygoteLink
from taas_magic.versions import mismatch, own_versions
from taas_magic.wire import (
    PROTOCOL_VERSION,
    AttachRun,
    CellTask,
    Denied,
    Detached,
    Hello,
    ImportsDone,
    KeptEnded,
    LogPiece,
    Preload,
    ReadLog,
    ReadStatus,
    Ready,
    ReleaseKept,
    RunEnded,
    Shutdown,
    Status,
    Submit,
    Welcome,
)
from taas_magic.wire_base import Message
from taas_magic.wire_data import CancelDelivery, DeliveryFailed, PrepareDelivery
from taas_magic.wire_machines import (
    BeginPart,
    CodeContents,
    CodeReady,
    CodeWanted,
    EndPart,
    LeaveSession,
    Members,
    PartData,
    PartEnded,
    PartNotice,
    SyncCode,
    ToSession,
)
from taas_magic.wire_zygote import GuardedProject, Warm

_KEPT_RUNS = 20
_KEPT_BYTES = 2 * 2**30


class Server:
    """The runner of one kernel.

    Args:
        directory: A directory of mode 0700 for the socket, logs and temporary files; it is removed at the end.
        token: What the kernel must say to be served.
        kernel_pid: The process to live as long as.
    """

    def __init__(self, directory: Path, token: str, kernel_pid: int) -> None:
        self._directory = directory
        self._token = token
        self._kernel = os.pidfd_open(kernel_pid)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(f"ipc://{directory}/runner.sock")
        self._decoder: msgspec.msgpack.Decoder[ToSession] = msgspec.msgpack.Decoder(ToSession)
        #: The connection that has said the token; the only one that is listened to.
        self._client: bytes | None = None
        self._zygote = ZygoteLink()
        self._zygote_is_heard = True
        self._preloading = Preloading(self._zygote)
        self._standby = Standby(self._zygote)
        self._parts = Parts(self._zygote, directory, self._send)
        self._code = CodeCopy(self._send)
        self._ready: Ready | None = None
        self._run: Run | None = None
        self._ending: list[Run] = []
        #: What is being prepared for the next run.
        self._delivery: Delivery | None = None
        #: Ranks that wait for another cell, and those that are on their way to their end.
        self._kept: KeptRanks | None = None
        self._leaving: list[KeptRanks] = []
        self._logs: OrderedDict[str, tuple[OutputLog, int]] = OrderedDict()
        #: A wish for imports has not been answered yet.
        self._owes_imports = False
        self._stop = False
        self._kernel_has_ended = False

    def serve(self) -> None:
        """Serve until the kernel ends or says so."""
        keep_directory = False
        try:
            while not self._stop:
                self._turn()
        except Exception:
            # The kernel reads the log, shows its end and removes the directory.
            traceback.print_exc()
            keep_directory = not self._kernel_has_ended
            raise
        finally:
            for run in [*self._ending, *([self._run] if self._run else [])]:
                run.abandon()
            for kept in [*self._leaving, *([self._kept] if self._kept else [])]:
                kept.kill()
            self._close_delivery()
            self._parts.close()
            self._code.close()
            self._zygote.close(is_warm=self._ready is not None)
            if not keep_directory:
                shutil.rmtree(self._directory, ignore_errors=True)

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        handlers: dict[int, Any] = {}
        for source in self._sources():
            poller.register(source.fd, zmq.POLLIN)
            handlers[source.fd] = source.ready
        due = [self._parts.deadline(), self._run.deadline() if self._run is not None else None]
        deadline = min((each for each in due if each is not None), default=1.0)
        timeout_ms = max(1, min(1000, int(deadline * 1000) + 1))
        for what, _ in poller.poll(timeout_ms):
            if what is self._socket:
                self._hear_kernel()
            elif what in handlers:
                handlers[what]()
        if self._run is not None:
            self._run.tick()
            if self._run.state.concluded:
                self._ending.append(self._run)
                self._kept = KeptRanks(self._run) if self._run.state.stays else None
                self._run = None
        self._ending = [run for run in self._ending if not run.is_done]
        self._parts.tick()
        self._look_after_kept()
        has_ranks = self._run is not None or self._kept is not None or self._parts.are_here
        if self._ready is not None and not has_ranks and not self._stop:
            self._preloading.advance(is_idle=not self._ending)
            if self._owes_imports and self._preloading.is_settled:
                self._owes_imports = False
                self._send(ImportsDone())
            self._standby.advance(self._preloading.ready)

    def _look_after_kept(self) -> None:
        if self._kept is not None:
            self._kept.tick()
            if self._kept.ended:
                if not self._kept.is_asked_for:
                    self._send(KeptEnded(self._kept.id, self._kept.ended))
                self._leaving.append(self._kept)
                self._kept = None
        for kept in self._leaving:
            kept.tick()
            if kept.is_gone and kept.is_asked_for:
                self._send(KeptEnded(kept.id, kept.ended))
        self._leaving = [kept for kept in self._leaving if not kept.is_gone]

    def _sources(self) -> list[Source]:
        sources = [Source(self._kernel, self._kernel_ended)]
        if self._zygote_is_heard:
            sources.append(Source(self._zygote.channel.fileno(), self._hear_zygote))
        if self._preloading.fileno is not None:
            sources.append(Source(self._preloading.fileno, self._preloading.hear))
        if self._standby.fileno is not None:
            sources.append(Source(self._standby.fileno, self._standby.hear))
        if self._code.fileno is not None:
            sources.append(Source(self._code.fileno, self._code.send_home))
        for run in (self._run, *self._ending, self._kept, *self._leaving, self._delivery, self._parts):
            if run is not None:
                sources += run.sources()
        return sources

    def _kernel_ended(self) -> None:
        self._stop = self._kernel_has_ended = True

    # -- the zygote ----------------------------------------------------------------------------------------------

    def _hear_zygote(self) -> None:
        try:
            for message, _ in self._zygote.channel.receive_available():
                if isinstance(message, Warm):
                    self._ready = Ready(message.num_gpus, message.seconds)
                    self._send(self._ready)
        except (ChannelClosedError, msgspec.MsgspecError):
            self._zygote_is_heard = False
            self._ready = None
            self._zygote.channel.close()
            code = self._zygote.process.wait()
            self._send(Denied(f"the zygote ended with code {code}; what it wrote:\n{self._own_log_tail()}"))
            self._stop = True

    def _own_log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join((self._directory / "runner.log").read_text(errors="replace").splitlines()[-30:])
        return ""

    # -- the kernel ----------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if isinstance(message, RunEnded):
            # What the run has made is at home before its end is told.
            self._code.finish()
        if self._client is not None:
            self._answer(self._client, message)

    def _answer(self, sender: bytes, message: Message) -> None:
        self._socket.send_multipart([sender, msgspec.msgpack.encode(message)])

    def _hear_kernel(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                continue
            try:
                message = self._decoder.decode(frames[1])
            except msgspec.MsgspecError as error:
                self._answer(frames[0], Denied(f"not a message of protocol {PROTOCOL_VERSION}: {error}"))
                continue
            self._obey(frames[0], message)

    def _obey(self, sender: bytes, message: ToSession) -> None:  # noqa: C901, PLR0912 - a table of messages
        if isinstance(message, Hello):
            self._welcome(sender, message)
        elif sender != self._client:
            self._answer(sender, Denied("not authorised: say the token first"))
        elif isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, ReadLog):
            self._send_log(message)
        elif isinstance(message, ReadStatus):
            self._send(self._status())
        elif isinstance(message, ReleaseKept):
            if self._kept is not None and self._kept.id == message.kept_id:
                self._kept.is_asked_for = True
                self._kept.release("they were released")
        elif isinstance(message, Preload):
            self._preloading.want(message)
            self._owes_imports = True
        elif isinstance(message, PrepareDelivery):
            self._prepare(message)
        elif isinstance(message, CancelDelivery):
            if self._delivery is not None and self._delivery.task.id == message.delivery_id:
                self._close_delivery()
        elif isinstance(message, AttachRun):
            self._attach(message.run_id)
        elif isinstance(message, LeaveSession):
            for run in (self._run, *self._ending):
                if run is not None and run.is_detached:
                    run.leave()
                    self._code.pause(paused=True)
        elif isinstance(message, Shutdown):
            self._stop = True
        elif isinstance(message, Members):
            self._parts.members = self._code.members = message
        elif isinstance(message, SyncCode | CodeWanted | CodeContents | CodeReady):
            self._code.take(message)
        elif isinstance(message, BeginPart):
            self._parts.begin(message, self._preloading.fit_for(message.environment))
        elif isinstance(message, PartData | PartNotice | PartEnded | EndPart):
            self._parts.take(message)
        else:
            for run in (self._run, *self._ending):
                if run is not None and run.id == message.run_id:
                    run.obey(message)

    def _welcome(self, sender: bytes, hello: Hello) -> None:
        """Listen to a connection from now on: first its token, then its versions have to be right."""
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            self._answer(sender, Denied("not authorised: wrong token"))
            return
        difference = mismatch(hello.versions, own_versions())
        if difference:
            self._answer(sender, Denied(f"versions differ: {difference}"))
            return
        self._client = sender
        self._send(Welcome(own_versions(), os.getpid()))
        if self._ready is not None:
            self._send(self._ready)

    # -- data ----------------------------------------------------------------------------------------------------

    def _prepare(self, order: PrepareDelivery) -> None:
        """Start producers for a run that will come."""
        self._close_delivery()
        task = msgspec.structs.replace(order.task, run_dirs=str(self._directory))
        with contextlib.ExitStack() as closing:
            try:
                fds = []
                for file in (order.parcel, *order.segments):
                    fds.append(file.open())
                    closing.callback(os.close, fds[-1])
                preloaded = self._preloading.fit_for(task.environment)
                self._delivery = Delivery(task, fds, self._zygote, preloaded, self._send)
            except OSError as error:
                self._send(DeliveryFailed(task.id, f"no data can be prepared: {error}"))

    def _close_delivery(self) -> None:
        if self._delivery is not None:
            self._delivery.close()
            self._delivery = None

    def _close_untaken(self, delivery: Delivery) -> None:
        if self._run is None or self._run.delivery is not delivery:
            delivery.close()

    def _take_delivery(self, submit: Submit) -> Delivery | None:
        """The delivery that was prepared for a run.

        Raises:
            OSError: if it has ended.
        """
        delivery, self._delivery = self._delivery, None
        if submit.delivery_id and (delivery is None or delivery.task.id != submit.delivery_id or delivery.ended):
            raise ProcessLookupError(delivery.ended if delivery is not None else "its data is not prepared any more")
        if delivery is not None and not submit.delivery_id:
            delivery.close()
            return None
        return delivery

    def _submit(self, submit: Submit) -> None:
        run_id = submit.task.run_id
        if self._run is not None:
            self._send(Denied("another run is active", run_id))
            return
        if self._ready is None:
            self._send(Denied("the zygote is not warm yet", run_id))
            return
        with contextlib.ExitStack() as closing:
            try:
                parcel_fds = []
                for file in (submit.parcel, *submit.segments):
                    parcel_fds.append(file.open())
                    closing.callback(os.close, parcel_fds[-1])
            except OSError as error:
                self._send(Denied(f"the cell's state cannot be read: {error}", run_id))
                return
            try:
                delivery = self._take_delivery(submit)
                if delivery is not None:
                    # Until a run has taken it over.
                    closing.callback(self._close_untaken, delivery)
                start = self._resume if submit.kept_id else self._start
                self._run = start(submit, parcel_fds, delivery)
            except OSError as error:
                # No descriptors, no disk, the same id again, a zygote that has just ended.
                self._send(Denied(f"the run cannot be started: {error}", run_id))
                return
        self._keep(self._run)
        self._code.watch(run_id)
        if submit.task.is_detached:
            self._send(Detached(run_id))

    def _resume(self, submit: Submit, parcel_fds: list[int], delivery: Delivery | None) -> Run:
        """Run a cell in ranks that were kept.

        Raises:
            OSError: if they have ended.
        """
        kept = self._kept
        if kept is None or kept.id != submit.kept_id or kept.ended:
            raise ProcessLookupError("the ranks that were kept have ended")
        last = kept.last
        task = self._here(submit.task, last.directory)
        pids = dict(enumerate(last.pids))
        run = Run(submit, last.link, last.directory, self._send, pids=pids, is_resumed=True)
        try:
            if delivery is not None:
                delivery.connect(last.link.ranks)
                run.deliver(delivery)
            last.link.begin(task, parcel_fds)
        except OSError:
            kept.release("a rank had ended")
            raise
        self._kept = None
        return run

    def _start(self, submit: Submit, parcel_fds: list[int], delivery: Delivery | None) -> Run:
        """Start the processes of a run.

        Raises:
            OSError: if the machine lacks something for it; nothing is left behind then.
        """
        run_directory = self._directory / f"run-{submit.task.run_id}"
        run_directory.mkdir(mode=0o700)
        task = self._here(submit.task, run_directory)
        if self._kept is not None:
            # The kernel has let go of them, or would have named them.
            self._kept.release("another run was started")
        preloaded = self._preloading.fit_for(task.environment)
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, run_directory, ignore_errors=True)
            if spans_machines(submit):
                self._standby.discard()
                link, pids = self._parts.start(submit, preloaded, self._guarded_by(task)), dict[int, int]()
            else:
                meeting = Meeting(environment=submit.environment_here)
                link, pids = self._standby.take(task.num_ranks, preloaded, self._guarded_by(task), meeting)
            undo.callback(link.close)
            if delivery is not None:
                delivery.connect(link.ranks)
            link.begin(task, parcel_fds)
            run = Run(submit, link, run_directory, self._send, pids=pids)
            if delivery is not None:
                run.deliver(delivery)
            undo.pop_all()
        return run

    def _here(self, task: CellTask, run_directory: Path) -> CellTask:
        """A task with the directories of this machine."""
        task = msgspec.structs.replace(task, run_dir=str(run_directory))
        project = self._parts.members.project
        return in_directory(task, project) if project else task

    def _guarded_by(self, task: CellTask) -> GuardedProject | None:
        if task.writes == "all" or task.num_ranks == 1:
            return None
        return GuardedProject(task.project, task.writable, task.environment, str(self._directory))

    def _attach(self, run_id: str) -> None:
        """Have the notebook take a run up that has gone on by itself."""
        for run in (self._run, *self._ending):
            if run is not None and run.id == run_id:
                self._code.pause(paused=False)
                run.attach()
                return
        self._send(Denied(f"there is no run {run_id} here any more", run_id))

    def _keep(self, run: Run) -> None:
        self._logs[run.id] = (run.log, run.num_ranks)
        while len(self._logs) > _KEPT_RUNS or (
            len(self._logs) > 1 and sum(log.size_bytes for log, _ in self._logs.values()) > _KEPT_BYTES
        ):
            _, (log, _) = self._logs.popitem(last=False)
            log.close()

    def _send_log(self, request: ReadLog) -> None:
        run_id = request.run_id or next(reversed(self._logs), "")
        if run_id not in self._logs:
            self._send(Denied(f"no run {run_id!r} is kept; kept are: {', '.join(self._logs) or 'none'}", run_id))
            return
        log, num_ranks = self._logs[run_id]
        if not 0 <= request.rank < num_ranks:
            self._send(Denied(f"run {run_id} has ranks 0 to {num_ranks - 1}, not {request.rank}", run_id))
            return
        for piece in log.of_rank(request.rank):
            if piece.is_stream:
                self._send(LogPiece(run_id, piece.rank, piece.kind, piece.data))
        self._send(LogPiece(run_id, request.rank, "stdout", b"", last=True))

    def _status(self) -> Status:
        run = self._run
        ranks = [] if run is None else [(p.value, pid) for p, pid in zip(run.state.phases, run.pids, strict=True)]
        return Status(
            pid=os.getpid(),
            is_warm=self._ready is not None,
            num_gpus=self._ready.num_gpus if self._ready else 0,
            run_id=run.id if run else "",
            seconds=time.monotonic() - run.state.started_at if run else 0.0,
            ranks=ranks,
            kept=[(run_id, num_ranks) for run_id, (_, num_ranks) in self._logs.items()],
            kept_pids=self._kept.last.pids if self._kept else [],
            kept_for_s=self._kept.remaining_s if self._kept else 0.0,
            delivery=run.delivery.describe() if run and run.delivery else [],
        )


def main() -> None:
    """Entry of ``python -m taas_magic.runner DIRECTORY KERNEL_PID``; the token comes on standard input."""
    setproctitle.setproctitle("taas: runner")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # an orderly end: what serves cleans up
    directory, kernel_pid = Path(sys.argv[1]), int(sys.argv[2])
    token = sys.stdin.readline().strip()
    try:
        server = Server(directory, token, kernel_pid)
    except ProcessLookupError:
        shutil.rmtree(directory, ignore_errors=True)
        return
    server.serve()
