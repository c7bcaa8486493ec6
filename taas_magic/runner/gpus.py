"""Gives out a machine's GPUs to the runs of its sessions, first come, first served."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from taas_magic.machines.allocation import Allocation, Grant, Queued
from taas_magic.machines.gpu_locks import SHARED, GpuLocks, Ticket
from taas_magic.runner.place import Place
from taas_magic.units import plural

#: Who waits longer than that for GPUs is told so: what is just being ended is free in a moment.
_PATIENCE_S = 1.0
_LOOK_S = 0.2


class Gpus:
    """What a session asks for the machine's GPUs."""

    def ask(self, owner: object, count: int, granted: Callable[[list[str]], None], told: Callable[[str], None]) -> None:
        """Ask for GPUs: now or later ``granted`` gets them; until then ``told`` gets the place in the queue."""
        raise NotImplementedError

    def release(self, owner: object) -> None:
        """Give GPUs back, or ask no more."""
        raise NotImplementedError

    def tick(self) -> None:
        """Look at the clock."""
        raise NotImplementedError

    @property
    def num_free(self) -> int:
        """How many nobody has."""
        raise NotImplementedError


@dataclass
class _Asked:
    count: int
    granted: Callable[[list[str]], None]
    told: Callable[[str], None]
    since: float = field(default_factory=time.monotonic)
    #: Its place in the queue, 0 while it is not known, and the one that was told.
    place: int = 0
    told_place: int = 0

    def tell(self, num_free: int, num_gpus: int) -> None:
        """Say where it stands."""
        self.told_place = self.place
        before = f", behind {plural(self.place - 1, 'other run')}" if self.place > 1 else ""
        self.told(f"waiting for {plural(self.count, 'GPU')}{before}: {num_free} of {num_gpus} are free")


@dataclass
class OwnGpus(Gpus):
    """Places that only this runner gives out."""

    allocation: Allocation
    asked: dict[object, _Asked] = field(default_factory=dict)

    def ask(self, owner: object, count: int, granted: Callable[[list[str]], None], told: Callable[[str], None]) -> None:
        """See :class:`Gpus`."""
        self.asked[owner] = _Asked(count, granted, told)
        self._carry_out(self.allocation.ask(owner, count))

    def release(self, owner: object) -> None:
        """See :class:`Gpus`."""
        if self.asked.pop(owner, None) is not None:
            self._carry_out(self.allocation.release(owner))

    @property
    def num_free(self) -> int:
        """See :class:`Gpus`."""
        return self.allocation.num_free

    def _carry_out(self, instructions: Any) -> None:
        for each in instructions:
            asked = self.asked.get(each.owner)
            if asked is None:
                continue
            if isinstance(each, Grant):
                asked.place = 0
                asked.granted(list(each.gpus))
            elif isinstance(each, Queued):
                asked.place = each.place

    def tick(self) -> None:
        """Tell those who wait for long where they stand: what is just being ended is free in a moment."""
        for asked in self.asked.values():
            if asked.place != asked.told_place and time.monotonic() > asked.since + _PATIENCE_S:
                asked.tell(self.allocation.num_free, len(self.allocation.gpus))


@dataclass
class _Waiting:
    asked: _Asked
    ticket: Ticket


@dataclass
class LockedGpus(Gpus):
    """GPUs that other runners of the machine give out, too."""

    locks: GpuLocks
    _waiting: dict[object, _Waiting] = field(default_factory=dict)
    _granted: dict[object, list[str]] = field(default_factory=dict)
    _look_due: float = 0.0

    def ask(self, owner: object, count: int, granted: Callable[[list[str]], None], told: Callable[[str], None]) -> None:
        """See :class:`Gpus`."""
        self._waiting[owner] = _Waiting(_Asked(count, granted, told), self.locks.queue())
        self._look_due = 0.0
        self.tick()

    def release(self, owner: object) -> None:
        """See :class:`Gpus`."""
        waiting = self._waiting.pop(owner, None)
        if waiting is not None:
            self.locks.give_up(waiting.ticket)
        self.locks.release(self._granted.pop(owner, []))
        self._look_due = 0.0

    def tick(self) -> None:
        """See :class:`Gpus`."""
        now = time.monotonic()
        if now < self._look_due:
            return
        self._look_due = now + _LOOK_S
        for owner, waiting in list(self._waiting.items()):
            asked = waiting.asked
            asked.place = self.locks.place_of(waiting.ticket)
            gpus = self.locks.take(asked.count) if asked.place == 1 else None
            if gpus is not None:
                del self._waiting[owner]
                self.locks.give_up(waiting.ticket)
                self._granted[owner] = gpus
                asked.granted(gpus)
            elif asked.place != asked.told_place and now > asked.since + _PATIENCE_S:
                asked.tell(self.num_free, len(self.locks.gpus))

    @property
    def num_free(self) -> int:
        """See :class:`Gpus`."""
        return self.locks.num_free


def gpus_of(place: Place) -> Gpus:
    """What gives out a machine's GPUs."""
    if place.has_cuda:
        return LockedGpus(GpuLocks(SHARED, place.gpus))
    return OwnGpus(Allocation(place.gpus))
