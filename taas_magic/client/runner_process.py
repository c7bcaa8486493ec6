"""Starts the local runner and speaks with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from taas_magic.errors import RunnerLostError, VersionMismatchError
from taas_magic.starting import start_runner
from taas_magic.units import format_exit
from taas_magic.versions import own_versions
from taas_magic.wire import (
    Denied,
    Hello,
    ImportsDone,
    KeptEnded,
    PoolMachine,
    PoolReady,
    Ready,
    Shutdown,
    ToKernel,
    Waiting,
    Welcome,
)
from taas_magic.wire_base import Message

_HANDSHAKE_S = 30.0
_SHUTDOWN_S = 5.0


class RunnerProcess:
    """A runner of our own: a process, a private directory, and a connection.

    Everything that another user could reach lies in a directory of mode 0700; the token additionally tells the runner
    that it is us who speaks.
    """

    #: What serves; a gateway does so on behalf of another machine.
    _module = "taas_magic.runner"

    def __init__(self, more: str = "") -> None:
        base = os.environ.get("XDG_RUNTIME_DIR")
        # A socket's path may have 107 characters; a runtime directory is short, a TMPDIR need not be.
        parent = base if base and os.access(base, os.W_OK) and len(base) < 60 else None
        self.directory = Path(tempfile.mkdtemp(prefix="taas-", dir=parent))
        self._token = secrets.token_hex(32)
        self._socket: Any = None
        self._is_welcome = False
        self._decoder: msgspec.msgpack.Decoder[ToKernel] = msgspec.msgpack.Decoder(ToKernel)
        self._log: IO[bytes] = (self.directory / "runner.log").open("wb")
        self.ready: Ready | None = None
        #: The machines of its pool, where it stands for one.
        self.machines: list[PoolMachine] = []
        #: What it says that is waited for.
        self.waits_for = ""
        #: Modules that the runner was asked to have imported, and has not answered for.
        self.pending_imports: list[str] = []
        #: Why kept ranks have ended, by their id.
        self.kept_ended: dict[str, str] = {}
        #: CUDA_VISIBLE_DEVICES as the zygote counts its GPUs by.
        self.cuda_visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.process = start_runner(self.directory, self._token, self._log, self._module, more)

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self.process.poll() is None

    # -- messages ------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open the connection and compare versions; does nothing when that is done.

        Raises:
            RunnerLostError: if the runner does not answer.
            VersionMismatchError: if the two sides could not read each other's pickles.
        """
        if self._is_welcome:
            return
        self.greet()
        answer = self.wait_for((Welcome, Denied), _HANDSHAKE_S)
        if isinstance(answer, Denied):
            if answer.reason.startswith("versions differ"):
                raise VersionMismatchError.of(
                    f"{answer.reason} (kernel, runner)",
                    expected="the same minor versions on both sides, so that each can read the other's pickles",
                    do="restart the kernel if packages were upgraded while it ran",
                )
            raise RunnerLostError.of(f"the runner refused the connection: {answer.reason}")
        self._is_welcome = True

    def greet(self) -> None:
        """Open the connection without waiting for the answer."""
        if self._socket is not None:
            return
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(f"ipc://{self.directory}/runner.sock")
        self.send(Hello(self._token, own_versions()))

    def send(self, message: Message) -> None:
        """Send a message; it is queued, and never waits."""
        self._socket.send(msgspec.msgpack.encode(message))

    def take_notice(self, timeout_s: float = 0) -> None:
        """Take what comes and is only to be noted; raises as :meth:`receive` does."""
        for _ in self.receive(timeout_s):
            pass

    def receive(self, timeout_s: float) -> Iterator[Any]:
        """Yield what comes within ``timeout_s``; ends early once something has come and nothing more is there.

        Raises:
            RunnerLostError: if the runner has ended and nothing more will come.
        """
        import zmq

        if not self._socket.poll(int(timeout_s * 1000)) and not self.is_alive and not self._socket.poll(0):
            raise self._lost()
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decoder.decode(data)
            if isinstance(message, Ready):
                self.ready = message
            elif isinstance(message, PoolReady):
                self.machines = message.machines
                self.ready = Ready(0, 0.0)
            elif isinstance(message, Waiting) and not message.run_id:
                self.waits_for = message.text
            elif isinstance(message, ImportsDone):
                self.pending_imports = []
            elif isinstance(message, KeptEnded):
                self.kept_ended[message.kept_id] = message.reason
            elif isinstance(message, Welcome):
                # Noted here, since an interrupt may keep whoever waits for it from seeing it.
                self._is_welcome = True
            yield message

    def wait_for(self, kinds: tuple[type, ...], timeout_s: float) -> Any:
        """Wait for a message of one of these kinds; others that come meanwhile are passed over.

        Raises:
            RunnerLostError: if the runner ends or the time runs out.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for message in self.receive(0.1):
                if isinstance(message, kinds):
                    return message
        raise RunnerLostError.of(
            f"the runner (pid {self.process.pid}) did not answer within {timeout_s:.0f} s",
            do="`%taas restart`, then run the cell again",
        )

    def _lost(self) -> RunnerLostError:
        text = f"the runner (pid {self.process.pid}) {format_exit(self.process.poll())}"
        tail = self.log_tail()
        return RunnerLostError.of(
            f"{text}; the ranks it had started are gone" + (f"\nits last words:\n{tail}" if tail else ""),
            do="run the cell again: it starts a new runner",
        )

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines that the runner and the zygote wrote."""
        with contextlib.suppress(OSError):
            return "\n".join((self.directory / "runner.log").read_text(errors="replace").splitlines()[-num_lines:])
        return ""

    # -- the end -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the runner and all it started; waits until it has gone."""
        if self.is_alive and self._socket is not None:
            with contextlib.suppress(Exception):
                self.send(Shutdown())
        elif self.is_alive:
            self.process.terminate()
        try:
            self.process.wait(_SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._clean_up()

    def kill(self) -> None:
        """End the runner without its consent; the zygotes then end what they started."""
        self.process.kill()
        self.process.wait()
        self._clean_up()

    def _clean_up(self) -> None:
        self._log.close()
        if self._socket is not None:
            self._socket.close(linger=0)
        shutil.rmtree(self.directory, ignore_errors=True)
