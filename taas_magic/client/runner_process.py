"""Starts the local runner and speaks with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

import taas_magic
from taas_magic.errors import RunnerLostError, VersionMismatchError
from taas_magic.namespace.process_state import scrubbed
from taas_magic.units import format_exit
from taas_magic.versions import own_versions
from taas_magic.wire import Denied, Hello, ImportsDone, KeptEnded, Ready, Shutdown, ToKernel, Welcome
from taas_magic.wire_base import Message

_HANDSHAKE_S = 30.0
_SHUTDOWN_S = 5.0


class RunnerProcess:
    """A runner of our own: a process, a private directory, and a connection.

    Everything that another user could reach lies in a directory of mode 0700; the token additionally tells the runner
    that it is us who speaks.
    """

    def __init__(self) -> None:
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
        #: Modules that the runner was asked to have imported, and has not answered for.
        self.pending_imports: list[str] = []
        #: Why kept ranks have ended, by their id.
        self.kept_ended: dict[str, str] = {}
        #: CUDA_VISIBLE_DEVICES as the zygote counts its GPUs by.
        self.cuda_visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = scrubbed(dict(os.environ))
        # The package may be imported from a checkout that only this process's sys.path knows.
        home = str(Path(taas_magic.__file__).resolve().parent.parent)
        inherited = environment.get("PYTHONPATH")
        # Last, so that it changes nothing about where anything else is found.
        environment["PYTHONPATH"] = f"{inherited}{os.pathsep}{home}" if inherited else home
        process = subprocess.Popen(
            # -P: a `random.py` in the project must not become the runner's `random`.
            [sys.executable, "-P", "-m", "taas_magic.runner", str(self.directory), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Jupyter interrupts the kernel's whole process group; a run is interrupted by message.
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._token.encode() + b"\n")
            process.stdin.close()
        return process

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
