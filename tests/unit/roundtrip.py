"""A notebook's namespace whose cells go through a real child process and come back, without runner and ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from unit.forking import MAX_MESSAGE_BYTES, ask, warm_process

from taas_magic.namespace.home import Homecoming, HomeLoadError, load_homecoming
from taas_magic.namespace.names import names_of_cell
from taas_magic.namespace.pack import PackedNamespace, Selection, pack_namespace

_CHILD = Path(__file__).with_name("roundtrip_child.py")


class Child:
    """The warm process that cells are forked from. Use :func:`warm_child`."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests

    def send(self, parcel_fds: list[int], source: str) -> socket.socket:
        """Start a cell on a parcel; what it has to say comes through the socket that is returned."""
        return ask(self._requests, source.encode(), parcel_fds)


@contextlib.contextmanager
def warm_child() -> Iterator[Child]:
    """Start the process that cells are forked from, and end it."""
    with warm_process(_CHILD) as requests:
        yield Child(requests)


@dataclass
class Trip:
    """What one cell brought home.

    Attributes:
        error: The traceback of the exception that ended the cell, or "".
        not_home: (expression, reason) of what could not come.
        unwrapped: Names of DDP wrappers.
        problems: What could not be applied.
        home: What came.
        packed: What had been sent.
        home_bytes: Size of the parcel that came.
    """

    error: str
    not_home: dict[str, str]
    unwrapped: list[str]
    problems: list[str]
    home: Homecoming
    packed: PackedNamespace
    home_bytes: int
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def result(self) -> Any:
        """What the cell called ``result``, as a record of its own."""
        return self.home.extra["result"]

    @property
    def sent_bytes(self) -> int:
        """Size of the parcel that was sent."""
        return self.packed.parcel.size_bytes


class Notebook:
    """A namespace with plain cells (:meth:`run`) and cells that run elsewhere (:meth:`cell`)."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def run(self, source: str) -> None:
        """Run a plain cell here."""
        exec(compile(source, "<notebook>", "exec"), self.names)

    def cell(self, source: str, *with_names: str, fails: bool = False) -> Trip:
        """Run a cell in a child process, and bring home what it did."""
        packed = self.pack(source, *with_names)
        try:
            with self._child.send(packed.parcel.fds, source) as talk:
                trip = self._come_home(talk, packed)
        finally:
            packed.parcel.close()
        assert bool(trip.error) == fails, trip.error
        return trip

    def pack(self, source: str, *with_names: str) -> PackedNamespace:
        """Pack what a cell needs."""
        names = names_of_cell(source, TransformerManager().transform_cell)
        selection = Selection((*names.needed, *with_names), names.maybe)
        return pack_namespace(self.names, selection)

    def _come_home(self, talk: socket.socket, packed: PackedNamespace) -> Trip:
        refused: dict[str, str] = {}
        while True:
            message, fds, _, _ = socket.recv_fds(talk, MAX_MESSAGE_BYTES, 1)
            assert fds, "the child ended before its cell came home; its traceback is in the captured stderr"
            report = json.loads(message)
            try:
                home = load_homecoming(fds[0], packed, self.names)
            except HomeLoadError as error:
                if error.label in refused:
                    raise
                refused[error.label] = error.reason
                talk.send(json.dumps(list(refused)).encode())
                continue
            finally:
                home_bytes = os.fstat(fds[0]).st_size
                os.close(fds[0])
            problems = home.apply(packed, self.names)
            return Trip(
                error=report["error"],
                not_home=dict(report["not_home"]),
                unwrapped=report["unwrapped"],
                problems=problems,
                home=home,
                packed=packed,
                home_bytes=home_bytes,
                refused=refused,
            )
