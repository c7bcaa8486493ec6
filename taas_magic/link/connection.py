"""A connection to another machine's runner, from the side that opens it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

import zmq

from taas_magic.link.curve import connected_socket
from taas_magic.link.files import File, FileStore
from taas_magic.link.peer import Peer
from taas_magic.link.reliable import BrokenStreamError
from taas_magic.wire_base import Message
from taas_magic.wire_machines import FromMachine, MachineAddress

_LOOK_MS = 50


class Connection:
    """Speaks with one machine's runner.

    Args:
        machine: Which, and where.
        keys: The own public and secret key.
        store: The files that both sides know.
    """

    def __init__(self, machine: MachineAddress, keys: tuple[str, str], store: FileStore) -> None:
        self.machine = machine
        self.socket = connected_socket(
            zmq.Context.instance(), machine.address, machine.key, keys, secrets.token_bytes(16)
        )
        self._peer: Peer[FromMachine] = Peer(FromMachine, self._transmit, store, time.monotonic(), forgets=True)
        #: Why it has broken; "" while it has not.
        self.broken = ""

    def _transmit(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    @property
    def silent_s(self) -> float:
        """How long nothing has been heard, in seconds."""
        return time.monotonic() - self._peer.heard_at

    def send(self, message: Message) -> None:
        """Say something at once."""
        self._peer.send(message, time.monotonic())

    def send_with_files(
        self, message: Message, files: Sequence[File], tell: Callable[[int, int], None] | None = None
    ) -> None:
        """Say something once its files are there; see :meth:`Peer.send_with_files`."""
        self._peer.send_with_files(message, files, time.monotonic(), tell)

    def withdraw(self, is_meant: Callable[[Message], bool]) -> bool:
        """Take back what waits for its files; returns whether something did."""
        return self._peer.withdraw(is_meant)

    def forget(self, file_ids: Sequence[bytes]) -> None:
        """Have the other side forget files."""
        self._peer.forget(file_ids, time.monotonic())

    def receive(self) -> list[tuple[FromMachine, list[File]]]:
        """What has come; nothing once it has broken."""
        found: list[tuple[FromMachine, list[File]]] = []
        while not self.broken:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                found += self._peer.receive(frames, time.monotonic())
            except zmq.Again:
                break
            except BrokenStreamError as error:
                self.broken = str(error)
            except OSError as error:
                self.broken = f"no memory for what it sends: {error}"
        return found

    def tick(self) -> None:
        """Look at the clock."""
        if not self.broken:
            self._peer.tick(time.monotonic())

    def flush(self, timeout_s: float) -> None:
        """Wait until the other side has all that was said, but not for longer than that."""
        deadline = time.monotonic() + timeout_s
        while self._peer.waits_bytes and not self.broken and time.monotonic() < deadline:
            self.socket.poll(_LOOK_MS)
            self.receive()

    def close(self) -> None:
        """Say no more; what was said is still sent."""
        self.socket.close()
