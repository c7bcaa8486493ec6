"""The runner of a machine: it lets in whoever has an authorised key, and has a process for each session.

Started by hand or by a service manager as ``taas runner --listen tcp://0.0.0.0:7777 --authorized-keys FILE``, or over
ssh as ``python -m taas_magic.runner.machine --from-stdin``: then it is told on standard input what it needs to know,
answers on standard output, and ends when its standard input does.

It imports no torch and unpickles nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from taas_magic.link import reliable
from taas_magic.link.curve import Authenticator, listening_socket
from taas_magic.link.peer import Peer
from taas_magic.link.reliable import BrokenStreamError
from taas_magic.runner.gpus import gpus_of
from taas_magic.runner.place import Place
from taas_magic.runner.session import Session, new_store, refusal
from taas_magic.runner.session_process import SessionProcess
from taas_magic.wire_machines import OpenSession, SessionEnded, ToMachine

_log = logging.getLogger("taas.runner")
_TICK_MS = 100
#: Conversations that have not opened a session by then are forgotten.
_OPEN_S = 30.0
_MAX_STRANGERS = 64


@dataclass
class Order:
    """What a machine's runner is to do.

    Attributes:
        listen: The addresses to listen at.
        keys: Its public and secret key.
        is_authorized: Says of a public key whether it may come in.
        place: The machine, as sessions see it.
        end_fd: A descriptor at whose end it ends; -1 for none.
    """

    listen: list[str]
    keys: tuple[str, str]
    is_authorized: Callable[[str], bool]
    place: Place
    end_fd: int = -1


@dataclass(eq=False)
class _Stranger:
    """A conversation that has no session yet."""

    peer: Peer[ToMachine]
    key: str
    since: float


@dataclass(eq=False)
class _Guest:
    """A conversation that has one."""

    session: Session
    key: str
    routing_id: bytes


class MachineRunner:
    """Serves until it is told to end."""

    def __init__(self, order: Order) -> None:
        self._order = order
        context: zmq.Context[Any] = zmq.Context.instance()
        self._authenticator = Authenticator(context, order.is_authorized)
        self._sockets = [listening_socket(context, address, order.keys) for address in order.listen]
        self._strangers: dict[tuple[int, bytes], _Stranger] = {}
        self._guests: dict[tuple[int, bytes], _Guest] = {}
        self._leaving: list[Session] = []
        self._gpus = gpus_of(order.place)
        #: A process for the next session, which has imported what takes long.
        self._spare: SessionProcess | None = SessionProcess()
        self._tick_due = 0.0
        self._ends_when_idle = False
        #: Runs that go on by themselves, and the files that say where they are found.
        self._run_files: dict[str, Path] = {}
        self.is_stopped = False

    @property
    def addresses(self) -> list[str]:
        """Where it listens."""
        return [sock.getsockopt_string(zmq.LAST_ENDPOINT) for sock in self._sockets]

    def serve(self) -> None:
        """Serve until the end."""
        try:
            while not self.is_stopped:
                self._turn()
        finally:
            self._close()

    def _turn(self) -> None:
        poller = zmq.Poller()
        handlers: dict[Any, Callable[[], None]] = {self._authenticator.socket: self._authenticator.answer}
        for number, sock in enumerate(self._sockets):
            handlers[sock] = lambda number=number: self._hear(number)  # type: ignore[misc]
        if self._order.end_fd >= 0:
            handlers[self._order.end_fd] = self._hear_end
        for guest in self._guests.values():
            handlers.update(guest.session.sockets())
        for what in handlers:
            poller.register(what, zmq.POLLIN)
        for what, _ in poller.poll(_TICK_MS):
            # What came before may have ended it.
            if not getattr(what, "closed", False):
                handlers[what]()
        if time.monotonic() >= self._tick_due:
            self._tick_due = time.monotonic() + _TICK_MS / 1000
            self._tick()

    def _hear_end(self) -> None:
        """Whoever has started this has gone: it ends, unless runs go on by themselves."""
        if os.read(self._order.end_fd, 4096):
            return
        self._order.end_fd = -1
        if any(guest.session.goes_on for guest in self._guests.values()):
            self._ends_when_idle = True
            _log_to_file(self._order.place.projects.parent / "logs")
            _log.info("going on alone, for the runs that were left")
        else:
            self.is_stopped = True

    # -- conversations -------------------------------------------------------------------------------------------

    def _hear(self, number: int) -> None:
        sock = self._sockets[number]
        for _ in range(1000):
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                key = str(frames[-1].get("User-Id"))
            except zmq.ZMQError:
                continue
            routing_id = frames[0].bytes
            self._take((number, routing_id), key, [frame.bytes for frame in frames[1:]])

    def _take(self, who: tuple[int, bytes], key: str, frames: list[bytes]) -> None:
        guest, stranger = self._guests.get(who), self._strangers.get(who)
        known = guest or stranger
        if known is None:
            if not reliable.begins(frames) or len(self._strangers) >= _MAX_STRANGERS:
                self._transmit(who, reliable.reset())
                return
            stranger = self._strangers[who] = self._new_stranger(who, key)
        elif known.key != key:
            # Somebody else's routing id: it is not listened to.
            return
        try:
            self._take_from(who, guest, stranger, frames)
        except (BrokenStreamError, OSError, IndexError) as error:
            self._transmit(who, reliable.reset())
            self._strangers.pop(who, None)
            if guest is not None:
                guest.session.end(f"the connection broke: {error}")

    def _take_from(
        self, who: tuple[int, bytes], guest: _Guest | None, stranger: _Stranger | None, frames: list[bytes]
    ) -> None:
        now = time.monotonic()
        if guest is not None:
            for message, files in guest.session.peer.receive(frames, now):
                guest.session.obey(message, files)
            return
        assert stranger is not None
        for message, _ in stranger.peer.receive(frames, now):
            if isinstance(message, OpenSession):
                self._open(who, stranger, message)
                return

    def _new_stranger(self, who: tuple[int, bytes], key: str) -> _Stranger:
        now = time.monotonic()

        def transmit(frames: list[bytes]) -> None:
            self._transmit(who, frames)

        return _Stranger(Peer(ToMachine, transmit, new_store(), now, forgets=False), key, now)

    def _transmit(self, who: tuple[int, bytes], frames: list[bytes]) -> None:
        number, routing_id = who
        # One that has gone is not written to.
        with contextlib.suppress(zmq.ZMQError):
            self._sockets[number].send_multipart([routing_id, *frames], zmq.NOBLOCK)

    def _open(self, who: tuple[int, bytes], stranger: _Stranger, order: OpenSession) -> None:
        del self._strangers[who]
        reason = refusal(order)
        if reason:
            stranger.peer.send(SessionEnded(reason, self._order.place.name), time.monotonic())
            return
        if order.attach:
            self._attach(who, stranger, order)
            return
        process, self._spare = self._spare or SessionProcess(), None
        session = Session(order, stranger.peer, process, self._order.place, self._gpus)
        self._guests[who] = _Guest(session, stranger.key, who[1])
        _log.info(f"session opened: {order.owner}")

    def _attach(self, who: tuple[int, bytes], stranger: _Stranger, order: OpenSession) -> None:
        """Give a notebook the session in which a run of the same key has gone on."""
        for old, guest in list(self._guests.items()):
            if order.attach in guest.session.detached and guest.key == stranger.key:
                del self._guests[old]
                self._guests[who] = _Guest(guest.session, stranger.key, who[1])
                guest.session.take_up(stranger.peer, order)
                return
        reason = f"there is no run {order.attach} here, or not any more"
        stranger.peer.send(SessionEnded(reason, self._order.place.name), time.monotonic())

    # -- the clock -----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        self._gpus.tick()
        for who, stranger in list(self._strangers.items()):
            stranger.peer.tick(now)
            if now > stranger.since + _OPEN_S:
                del self._strangers[who]
        for who, guest in list(self._guests.items()):
            guest.session.tick()
            if guest.session.ended is not None:
                del self._guests[who]
                self._leaving.append(guest.session)
                why = f": {guest.session.ended.splitlines()[0]}" if guest.session.ended else ""
                _log.info(f"session ended: {guest.session.order.owner}{why}")
        for session in list(self._leaving):
            # Its GPUs are free when its processes have gone, and not before.
            if session.process.has_ended:
                session.close()
                self._leaving.remove(session)
        self._keep_run_files()
        if self._ends_when_idle and not self._guests and not self._leaving:
            self.is_stopped = True
        if self._spare is None or self._spare.has_ended:
            if self._spare is not None:
                _log.info(self._spare.last_words())
                self._spare.close()
            self._spare = SessionProcess()

    def _keep_run_files(self) -> None:
        """Write down where runs that go on by themselves are found: a notebook that comes over ssh looks there."""
        runs = {run for guest in self._guests.values() for run in guest.session.detached if not run.startswith("part ")}
        for run in runs - self._run_files.keys():
            path = run_file(self._order.place, run)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            text = json.dumps({"addresses": self.addresses, "key": self._order.keys[0], "pid": os.getpid()})
            path.write_text(text, encoding="utf-8")
            self._run_files[run] = path
        for run in self._run_files.keys() - runs:
            self._run_files.pop(run).unlink(missing_ok=True)

    def _close(self) -> None:
        for path in self._run_files.values():
            path.unlink(missing_ok=True)
        for guest in self._guests.values():
            guest.session.end(f"the runner on {self._order.place.name} was ended")
        sessions = [*(guest.session for guest in self._guests.values()), *self._leaving]
        for session in sessions:
            session.close_now()
        if self._spare is not None:
            self._spare.kill()
        for sock in self._sockets:
            sock.close()
        self._authenticator.close()


def _log_to_file(directory: Path) -> None:
    """Write what is said to a file from now on: nobody reads it elsewhere."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(directory / f"runner-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)


def run_file(place: Place, run_id: str) -> Path:
    """Where it stands which runner has a run that goes on by itself."""
    return place.projects.parent / "runs" / f"{run_id}.json"


if __name__ == "__main__":
    from taas_magic.runner.serve import serve_from_stdin

    serve_from_stdin()
