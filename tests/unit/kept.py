"""A notebook with two kept ranks, which are real processes, without runner and shells."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from unit.forking import MAX_MESSAGE_BYTES, ask, warm_process

from taas_magic.namespace.home import load_homecoming
from taas_magic.namespace.mirror import Mirror
from taas_magic.namespace.names import names_of_cell
from taas_magic.namespace.pack import PackedNamespace, Selection, pack_namespace
from taas_magic.namespace.store import BlockStore

_CHILD = Path(__file__).with_name("kept_child.py")


class KeptNotebook:
    """A namespace with plain cells (:meth:`run`) and cells on two kept ranks (:meth:`cell`)."""

    def __init__(self, ranks: list[socket.socket]) -> None:
        self._ranks = ranks
        self._mirror: Mirror | None = None
        self.store = BlockStore(2**30)
        self.names: dict[str, Any] = {"__name__": "__main__"}
        #: Of the latest cell: bytes of its parcels, objects that the ranks do not have alike, what could not come home.
        self.sent_bytes = self.home_bytes = 0
        self.forgotten: set[int] = set()
        self.not_home: list[tuple[str, str]] = []

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def run(self, source: str) -> None:
        """Run a plain cell here."""
        exec(compile(source, "<notebook>", "exec"), self.names)

    def cell(self, source: str, *with_names: str, anew: frozenset[str] = frozenset(), fails: bool = False) -> None:
        """Run a cell on both ranks, and bring home what rank 0 did."""
        packed = self._pack(source, with_names, anew)
        self.sent_bytes = packed.parcel.size_bytes
        for rank in self._ranks:
            socket.send_fds(rank, [source.encode() or b" "], packed.parcel.fds)
        packed.parcel.close()
        if self._mirror is None:
            self._mirror = Mirror(packed, self.names, ())
        else:
            self._mirror.sent(packed)
        reports = [self._bring_home(packed), json.loads(self._ranks[1].recv(MAX_MESSAGE_BYTES))]
        errors = [report["error"] for report in reports]
        assert all(bool(error) == fails for error in errors), "\n".join(errors)
        self.not_home = [tuple(each) for each in reports[0]["not_home"]]
        self.forgotten = set()
        for rank in self._ranks:
            rank.send(b" " + self._adoptions)
        for rank in self._ranks:
            self.forgotten.update(json.loads(rank.recv(MAX_MESSAGE_BYTES)))
        self._mirror.note(self.forgotten)

    @property
    def num_blocks(self) -> int:
        """How many blocks the notebook has in common with the ranks."""
        assert self._mirror is not None
        return len(self._mirror.common.memory.blocks)

    def plan(self, source: str) -> PackedNamespace:
        """Pack what a cell needs, and do not send it."""
        packed = self._pack(source, (), frozenset())
        packed.parcel.close()
        return packed

    def _pack(self, source: str, with_names: tuple[str, ...], anew: frozenset[str]) -> PackedNamespace:
        names = names_of_cell(source, TransformerManager().transform_cell)
        selection = Selection((*names.needed, *with_names, *anew), names.maybe, anew)
        if self._mirror is None:
            return pack_namespace(self.names, selection, store=self.store)
        return self._mirror.pack(selection, process_state=None, hidden={}, cell_numbers={}, store=self.store)

    def _bring_home(self, packed: PackedNamespace) -> dict[str, Any]:
        message, fds, _, _ = socket.recv_fds(self._ranks[0], MAX_MESSAGE_BYTES, 1)
        assert fds, "rank 0 ended before its cell came home; its traceback is in the captured stderr"
        report: dict[str, Any] = json.loads(message)
        assert self._mirror is not None
        home = load_homecoming(fds[0], packed, self.names)
        assert home.apply(packed, self.names) == []
        self.home_bytes = os.fstat(fds[0]).st_size
        kept = self.store.keep(fds[0], self.home_bytes, home.blocks_here(packed.common))
        self._adoptions = self._mirror.came_home(home, kept)
        os.close(fds[0])
        return report


class KeptRanks:
    """The warm process that ranks are forked from. Use :func:`warm_ranks`."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests

    @contextlib.contextmanager
    def notebook(self) -> Iterator[KeptNotebook]:
        """Start two ranks, and end them."""
        with contextlib.ExitStack() as ending:
            ranks = []
            for rank in range(2):
                talk = ask(self._requests, str(rank).encode(), [])
                ending.callback(talk.close)
                ranks.append(talk)
            yield KeptNotebook(ranks)


@contextlib.contextmanager
def warm_ranks() -> Iterator[KeptRanks]:
    """Start the process that ranks are forked from, and end it."""
    with warm_process(_CHILD) as requests:
        yield KeptRanks(requests)
