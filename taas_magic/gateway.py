"""Stands for a pool of machines on the notebook's own: to the kernel, it is a runner like any.

Started by the kernel as ``python -m taas_magic.gateway DIRECTORY KERNEL_PID``, with a token and a
:class:`GatewayOrder` on standard input. It starts runners over ssh where the pool says so, opens a session with the
first machine of the pool, the head, and hands on what is said between kernel and head. Memory files of the kernel are
sent to the head, and memory files come from there; what was sent once is not sent again.

It ends with the kernel, and takes down what it has started.
"""

from __future__ import annotations

import hmac
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import setproctitle
import zmq

from taas_magic.channel import decoder_of
from taas_magic.errors import TaasError
from taas_magic.link.code_sender import CodeSender
from taas_magic.link.connection import Connection
from taas_magic.link.files import File, FileStore, as_received, files_of, to_send
from taas_magic.machines.ssh import RemoteProcess, SshOptions, close_all, leave_all, start_all
from taas_magic.units import format_bytes, plural
from taas_magic.versions import own_versions
from taas_magic.wire import (
    PROTOCOL_VERSION,
    Abandon,
    AttachRun,
    Denied,
    Detached,
    Hello,
    Interrupt,
    Notice,
    PoolMachine,
    PoolReady,
    RunEnded,
    Shutdown,
    Submit,
    ToRunner,
    Waiting,
    Welcome,
)
from taas_magic.wire_base import Message
from taas_magic.wire_data import CancelDelivery, PrepareDelivery
from taas_magic.wire_machines import (
    CloseSession,
    CodeReady,
    CodeWanted,
    FilesHome,
    FromMachine,
    GatewayOrder,
    LeaveSession,
    MachineAddress,
    MachineFree,
    MachineLost,
    OpenSession,
    SessionEnded,
    SessionOpened,
    SshMachine,
)

_TICK_MS = 100
_START_S = 60.0
_GOODBYE_S = 1.0
_MANY = 2**16
#: When to say that nothing is heard of the head, and when it counts as lost.
_SILENT_S, _LOST_S = 3.0, 9.0
_FILES_BYTES = 4 * 2**30
#: From so much on, it is said how far the sending of state is.
_TELL_BYTES = 32 * 2**20


class Gateway:
    """Hands on what is said between one kernel and the head of its pool.

    Args:
        directory: A directory of mode 0700 for the socket; it is removed at the end.
        token: What the kernel must say to be served.
        kernel_pid: The process to live as long as.
        order: The pool.
    """

    def __init__(self, directory: Path, token: str, kernel_pid: int, order: GatewayOrder) -> None:
        self._directory = directory
        self._token = token
        self._order = order
        self._kernel = os.pidfd_open(kernel_pid)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(f"ipc://{directory}/runner.sock")
        self._decoder: msgspec.msgpack.Decoder[ToRunner] = decoder_of(ToRunner)
        self._client: bytes | None = None
        self._store = FileStore(_FILES_BYTES)
        self._head: Connection | None = None
        self._started: list[RemoteProcess] = []
        self._starting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = os.pipe()
        #: What the kernel is told as soon as it is there.
        self._to_tell: list[Message] = []
        self._names = [each.name for each in order.machines] + [each.name for each in order.ssh]
        #: The most ranks that the pool puts on each.
        self._slots = {each.name: each.slots or _MANY for each in order.ssh} | {
            each.name: _MANY for each in order.machines
        }
        #: By which the machines reach the head, where the pool says that.
        self._head_address = ""
        self._not_started: list[tuple[str, str]] = []
        self._code = CodeSender(
            Path(order.project),
            order.code_limit_bytes,
            self._send_code,
            lambda text: self._tell(Waiting(text, self._run_id)),
        )
        self._machines: list[PoolMachine] = []
        #: What waits until the machines have the project's files.
        self._held: list[Submit | PrepareDelivery] = []
        self._run_id = ""
        self._is_silent = False
        self._is_lost = False
        #: A run goes on by itself, which it must be left to do.
        self._leaves_run = False
        self._stop = False

    def serve(self) -> None:
        """Serve until the kernel ends or says so."""
        try:
            self._begin()
            while not self._stop:
                self._turn()
        except Exception:
            traceback.print_exc()
            raise
        finally:
            if self._head is not None:
                self._head.send(LeaveSession() if self._leaves_run else CloseSession())
                if not self._is_lost:
                    # The way there may end with this process.
                    self._head.flush(_GOODBYE_S)
                self._head.close()
            if self._leaves_run:
                leave_all(self._started)
            else:
                close_all(self._started)
            self._store.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _turn(self) -> None:
        poller = zmq.Poller()
        handlers: dict[Any, Callable[[], None]] = {
            self._socket: self._hear_kernel,
            self._kernel: self._kernel_ended,
            self._wake_reader: self._take_started,
        }
        if self._head is not None and not self._is_lost:
            handlers[self._head.socket] = self._hear_head
        for what in handlers:
            poller.register(what, zmq.POLLIN)
        for what, _ in poller.poll(_TICK_MS):
            handlers[what]()
        if self._head is not None and not self._is_lost:
            self._look_after(self._head)

    def _kernel_ended(self) -> None:
        self._stop = True

    # -- the pool ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._order.ssh:
            machines = list(self._order.machines)
            self._connect(machines[:1] if self._order.attach else machines)
            return
        names = ", ".join(self._names)
        self._tell(Waiting(f"starting {plural(len(self._names), 'runner')} over ssh: {names} ..."))
        threading.Thread(target=self._start_machines, name="taas ssh", daemon=True).start()

    def _start_machines(self) -> None:
        """Start all runners, beside the loop; it is woken with what came of it."""
        order, options = self._order, self._options()
        what: dict[str, Any] = {
            "attach": order.attach,
            "authorized": [order.keys[0]],
            "gpus": order.gpus,
            "tcp": len(order.ssh) > 1 or not order.tunnel,
        }
        try:
            # A run that is taken up is found on the head; that knows the other machines.
            machines = order.ssh[:1] if order.attach else order.ssh
            started, failed = start_all(machines, what, options=options, timeout_s=_START_S)
            self._starting.put(lambda: self._machines_started(started, failed))
        except Exception as error:  # noqa: BLE001 - it is told
            text = f"{type(error).__name__}: {error}"
            self._starting.put(lambda: self._lose(text))
        os.write(self._wake_writer, b".")

    def _options(self) -> SshOptions:
        order = self._order
        return SshOptions(
            config_file=Path(order.ssh_config) if order.ssh_config else None, python=order.python, tunnel=order.tunnel
        )

    def _take_started(self) -> None:
        os.read(self._wake_reader, 100)
        while not self._starting.empty():
            self._starting.get()()

    def _machines_started(self, started: list[RemoteProcess], failed: list[tuple[SshMachine, str]]) -> None:
        place_of = {each.name: place for place, each in enumerate(self._order.ssh)}
        self._started = sorted(started, key=lambda process: place_of[process.machine.name])
        self._not_started = [(machine.name, reason) for machine, reason in failed]
        if not started:
            lines = [f"  {name}: {reason}" for name, reason in self._not_started]
            self._lose("\n".join([f"no machine of pool `{self._order.pool}` can be reached:", *lines]))
            return
        problems = [process.answer["problem"] for process in self._started if process.answer.get("problem")]
        if problems:
            self._lose("; ".join(problems))
            return
        self._head_address = getattr(self._started[0].machine, "address", None) or ""
        addresses = []
        for place, process in enumerate(self._started):
            there = _address_of(process)
            here = process.local_address if place == 0 and process.local_address else there
            addresses.append(MachineAddress(process.machine.name, here, process.answer["key"]))
        self._connect(addresses)

    def _connect(self, machines: list[MachineAddress]) -> None:
        """Open a session with the first machine, in which the others take part."""
        order = self._order
        head, *others = machines
        self._tell(Waiting(f"connecting to {head.name} ..."))
        self._head = Connection(head, order.keys, self._store)
        self._head.send(
            OpenSession(
                own_versions(),
                order.owner,
                order.lease_s,
                others,
                # Runners that are up let each other in by their own keys; those that were started here, by ours.
                order.keys if order.ssh else None,
                order.project_id,
                self._head_address,
                order.attach,
            )
        )

    def _look_after(self, head: Connection) -> None:
        head.tick()
        silent_s, name = head.silent_s, head.machine.name
        if head.broken:
            self._lose(f"{name}: {head.broken}")
        elif silent_s > _LOST_S:
            self._lose(f"{name}: nothing was heard of it for {_LOST_S:.0f} s, at {head.machine.address}")
        elif (silent_s > _SILENT_S) != self._is_silent:
            self._is_silent = not self._is_silent
            text = f"nothing is heard of {name}; it may come back" if self._is_silent else ""
            self._tell(Waiting(text, self._run_id))

    def _lose(self, reason: str) -> None:
        """The head is lost, or never was there; the kernel starts another gateway for its next run."""
        self._is_lost = True
        self._tell(Denied(f"pool `{self._order.pool}`: {reason}"))

    # -- the head ------------------------------------------------------------------------------------------------

    def _hear_head(self) -> None:
        assert self._head is not None
        for message, files in self._head.receive():
            self._take_from_head(message, files)

    def _take_from_head(self, message: FromMachine, files: list[File]) -> None:
        if isinstance(message, SessionOpened):
            machines = [
                PoolMachine(name, min(len(each.gpus), self._slots[name]), each.has_cuda, each.lost, each.free)
                for name, each in zip(self._present(), message.machines, strict=False)
            ]
            machines += [PoolMachine(name, 0, has_cuda=False, lost=reason) for name, reason in self._not_started]
            self._machines = machines
            self._tell(Waiting(""))
            self._tell(PoolReady(machines))
        elif isinstance(message, MachineLost):
            self._note(message.machine, lost=message.reason)
        elif isinstance(message, MachineFree):
            self._note(message.machine or self._present()[0], free=message.free)
        elif isinstance(message, CodeWanted | CodeReady):
            self._code.take(message)
        elif isinstance(message, FilesHome):
            for text in self._code.bring_home(as_received(message, files)):
                self._tell(Notice(message.run_id, text))
        elif isinstance(message, SessionEnded):
            self._lose(f"{message.machine}: {message.reason}" if message.machine else message.reason)
        else:
            if isinstance(message, Detached):
                self._leaves_run = True
            if isinstance(message, RunEnded):
                self._run_id = ""
                self._leaves_run = False
            self._tell(as_received(message, files))

    def _note(self, machine: str, **changes: Any) -> None:
        self._machines = [
            msgspec.structs.replace(each, **changes) if each.name == machine else each for each in self._machines
        ]
        self._tell(PoolReady(self._machines))

    def _present(self) -> list[str]:
        """The names of the machines that take part, in order."""
        absent = {name for name, _ in self._not_started}
        return [name for name in self._names if name not in absent]

    # -- the kernel ----------------------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        if self._client is None:
            self._to_tell.append(message)
        else:
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

    def _obey(self, sender: bytes, message: ToRunner) -> None:
        if isinstance(message, Hello):
            self._welcome(sender, message)
        elif sender != self._client:
            self._answer(sender, Denied("not authorised: say the token first"))
        elif isinstance(message, Shutdown):
            self._stop = True
        elif self._head is None or self._is_lost:
            self._answer(sender, Denied(f"pool `{self._order.pool}` is not there", getattr(message, "run_id", "")))
        else:
            self._hand_on(message, self._head)

    def _send_code(self, message: Message) -> None:
        assert self._head is not None
        changed, files = to_send(message, self._store)
        self._head.send_with_files(changed, files, self._progress())

    def _welcome(self, sender: bytes, hello: Hello) -> None:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            self._answer(sender, Denied("not authorised: wrong token"))
            return
        self._client = sender
        self._answer(sender, Welcome(own_versions(), os.getpid()))
        for message in self._to_tell:
            self._answer(sender, message)
        self._to_tell.clear()

    def _hand_on(self, message: Any, head: Connection) -> None:
        if isinstance(message, Interrupt | Abandon) and self._take_back(message, head):
            return
        if isinstance(message, CancelDelivery):
            head.withdraw(lambda each: isinstance(each, PrepareDelivery) and each.task.id == message.delivery_id)
        if isinstance(message, AttachRun):
            self._run_id, self._leaves_run = message.run_id, True
        if isinstance(message, Submit | PrepareDelivery):
            self._hand_on_with_code(message, head)
            return
        self._hand_on_now(message, head)

    def _hand_on_with_code(self, message: Submit | PrepareDelivery, head: Connection) -> None:
        """Hand a message on when the machines have the project as it is."""
        if isinstance(message, Submit):
            self._run_id = message.task.run_id
        self._held.append(message)

        def go_on(problem: str) -> None:
            if problem:
                self._tell(Notice(self._run_id, f"the project's files: {problem}"))
            if message in self._held:
                self._held.remove(message)
                self._hand_on_now(message, head)

        try:
            self._code.sync(go_on)
        except TaasError as error:
            self._held.remove(message)
            self._tell(Denied(str(error), self._run_id))

    def _hand_on_now(self, message: Any, head: Connection) -> None:
        if not files_of(message):
            head.send(message)
            return
        try:
            changed, files = to_send(message, self._store)
        except OSError as error:
            self._tell(Denied(f"the cell's state cannot be read: {error}", self._run_id))
            return
        head.send_with_files(changed, files, self._progress())

    def _take_back(self, message: Interrupt | Abandon, head: Connection) -> bool:
        """Stop a run whose state is still being sent."""
        run_id = message.run_id
        held = [each for each in self._held if isinstance(each, Submit) and each.task.run_id == run_id]
        for each in held:
            self._held.remove(each)
        if not held and not head.withdraw(lambda each: isinstance(each, Submit) and each.task.run_id == run_id):
            return False
        if isinstance(message, Interrupt):
            detail = "it was stopped while its state was being sent"
            self._tell(RunEnded(run_id, "interrupted", 0.0, detail=detail))
        return True

    def _progress(self) -> Callable[[int, int], None]:
        """Tells the kernel how far the sending is, where it is much."""
        run_id, pool = self._run_id, self._order.pool
        told_at = time.monotonic()

        def tell(done_bytes: int, total_bytes: int) -> None:
            nonlocal told_at
            if total_bytes < _TELL_BYTES or time.monotonic() < told_at + 0.3:
                return
            told_at = time.monotonic()
            is_done = done_bytes >= total_bytes
            text = "" if is_done else f"to {pool}: {format_bytes(done_bytes)} of {format_bytes(total_bytes)} sent"
            self._tell(Waiting(text, run_id))

        return tell


def _address_of(process: RemoteProcess) -> str:
    """Where other machines reach a runner: what the pool says, or what it says itself."""
    said: str = process.answer["address"]
    given = getattr(process.machine, "address", None)
    if not given:
        return said
    return f"tcp://[{given}]:{said.rpartition(':')[2]}" if ":" in given else f"tcp://{given}:{said.rpartition(':')[2]}"


def main() -> None:
    """Entry of ``python -m taas_magic.gateway DIRECTORY KERNEL_PID``; token and order come on standard input."""
    setproctitle.setproctitle("taas: gateway")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    directory, kernel_pid = Path(sys.argv[1]), int(sys.argv[2])
    token = sys.stdin.readline().strip()
    order = msgspec.json.decode(sys.stdin.readline(), type=GatewayOrder)
    try:
        gateway = Gateway(directory, token, kernel_pid, order)
    except ProcessLookupError:
        shutil.rmtree(directory, ignore_errors=True)
        return
    gateway.serve()


if __name__ == "__main__":
    main()
