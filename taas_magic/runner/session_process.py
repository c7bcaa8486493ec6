"""The process of a session: it serves one notebook, or one head, and nobody else is served by it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from taas_magic.channel import decoder_of
from taas_magic.starting import start_runner
from taas_magic.units import format_exit
from taas_magic.versions import own_versions
from taas_magic.wire import Hello, Shutdown
from taas_magic.wire_base import Message
from taas_magic.wire_machines import FromSession

_SHUTDOWN_S = 10.0
_LOG_LINES = 20


class SessionProcess:
    """A runner of the same machine that this one has started, and speaks with."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="taas-"))
        token = secrets.token_hex(32)
        with (self.directory / "runner.log").open("wb") as log:
            self._process = start_runner(self.directory, token, log)
        self.pidfd = os.pidfd_open(self._process.pid)
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(f"ipc://{self.directory}/runner.sock")
        self._decoder: msgspec.msgpack.Decoder[FromSession] = decoder_of(FromSession)
        self._ending_since: float | None = None
        self.send(Hello(token, own_versions()))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Say something to it."""
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> list[Any]:
        """What it has said."""
        found: list[Any] = []
        with contextlib.suppress(zmq.Again):
            while True:
                found.append(self._decoder.decode(self.socket.recv(zmq.NOBLOCK)))
        return found

    def end(self) -> None:
        """Have it end, and all it has started."""
        if self._ending_since is None:
            self._ending_since = time.monotonic()
            self.send(Shutdown())

    @property
    def has_ended(self) -> bool:
        """Whether it is gone; one that was told to end and does not is killed."""
        if self._ending_since is not None and time.monotonic() > self._ending_since + _SHUTDOWN_S:
            self._process.kill()
        return self._process.poll() is not None

    def wait(self) -> None:
        """Wait until it is gone; it was told to end."""
        try:
            self._process.wait(_SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """How it ended, and what it wrote last."""
        tail = ""
        with contextlib.suppress(OSError):
            lines = (self.directory / "runner.log").read_text(errors="replace").splitlines()
            tail = "\n".join(lines[-_LOG_LINES:])
        text = f"the process of the session {format_exit(self._process.poll())}"
        return f"{text}\nits last words:\n{tail}" if tail else text

    def close(self) -> None:
        """Let go of what is left of it."""
        self.socket.close(linger=0)
        os.close(self.pidfd)
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        self.close()
