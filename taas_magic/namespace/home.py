"""Applies in the kernel what came home from rank 0.

The parcel is read completely before anything of the notebook is touched. An origin's number in it *is* the kernel's
object, so updates happen in place and aliases hold.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

from taas_magic.namespace.aspects import BY_NAME
from taas_magic.namespace.blocks import IncomingBlocks, view_of_memory
from taas_magic.namespace.pack import PackedNamespace
from taas_magic.namespace.rebuild import Loading, loading, without_warnings

#: Smaller blocks are copied out of the parcel. One that is not keeps all of the parcel in memory, and a descriptor
#: open, for as long as it lives: it has to be large, and most of the parcel.
_COPY_BELOW_BYTES = 64 * 2**20


class HomeLoadError(Exception):
    """A record cannot be loaded in this process; rank 0 has to leave it out.

    Attributes:
        label: The record, as :meth:`taas_magic.namespace.track.Tracker.pack_changes` names it.
        reason: What went wrong.
    """

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(f"{label}: {reason}")
        self.label, self.reason = label, reason


@dataclass
class Homecoming:
    """A parcel from rank 0, read and ready to be applied.

    Attributes:
        bindings: Names to bind.
        deleted: Names to delete.
        extra: Records that are neither ("result", "random").
    """

    bindings: dict[str, Any] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    _updates: list[tuple[int, str, Any]] = field(default_factory=list)
    _blocks: list[tuple[int, int]] = field(default_factory=list)
    _incoming: IncomingBlocks | None = None

    def apply(self, packed: PackedNamespace, main: dict[str, Any]) -> list[str]:
        """Bring everything into the notebook; returns what could not be, one line each."""
        problems: list[str] = []
        assert self._incoming is not None
        for number, home_number in self._blocks:
            block = packed.blocks[number]
            view = self._incoming.view(home_number)
            target = view_of_memory(block.address, block.nbytes)
            start = block.hull[0]
            target[start : start + len(view)] = view
        for number, aspect, payload in self._updates:
            origin = packed.origins[number]
            try:
                BY_NAME[aspect].apply(origin, payload)
            except Exception as error:  # noqa: BLE001 - the user's classes may raise anything
                problems.append(f"a change of a {type(origin).__name__} ({error})")
        main.update(self.bindings)
        for name in self.deleted:
            main.pop(name, None)
        return problems


def load_homecoming(fd: int, packed: PackedNamespace, main: dict[str, Any]) -> Homecoming:
    """Read a parcel from rank 0.

    Raises:
        HomeLoadError: if a record cannot be loaded here. Nothing has been changed.
    """
    incoming = IncomingBlocks(fd)
    home = Homecoming(_incoming=incoming)
    copy_below_bytes = max(_COPY_BELOW_BYTES, len(incoming.buffer) // 2)
    context = Loading(incoming, main, packed.blocks, copy_below_bytes=copy_below_bytes)
    unpickler = _HomeUnpickler(io.BytesIO(incoming.stream), packed.origins, context.buffers)
    with loading(context):
        for label, _ in incoming.manifest.records:
            try:
                with without_warnings():
                    value = unpickler.load()
            except Exception as error:
                raise HomeLoadError(label, f"{type(error).__name__}: {error}") from error
            _sort_in(home, label, value)
    return home


def _sort_in(home: Homecoming, label: str, value: Any) -> None:
    kind, _, rest = label.partition(" ")
    if kind == "blocks":
        home._blocks = value
    elif kind == "bind":
        home.bindings[rest] = value
    elif kind == "delete":
        home.deleted.append(rest)
    elif kind == "update":
        number, aspect = rest.split(" ")
        home._updates.append((int(number), aspect, value))
    else:
        home.extra[label] = value


class _HomeUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, origins: dict[int, Any], buffers: list[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._origins = origins

    def persistent_load(self, number: Any) -> Any:
        return self._origins[number]
