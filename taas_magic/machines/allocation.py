"""Who has which of a machine's GPUs, and who waits for some. No I/O.

First come, first served: whoever waits for many is not overtaken by those who want few, or would wait for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grant:
    """An owner has these GPUs from now on."""

    owner: Hashable
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Queued:
    """An owner waits, and ``place`` - 1 others go before it."""

    owner: Hashable
    place: int


class TooManyError(ValueError):
    """More GPUs are asked for than the machine has."""


class Allocation:
    """One machine's GPUs.

    Args:
        gpus: What the machine has, in its order.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self.gpus = tuple(gpus)
        self._free = list(range(len(self.gpus)))
        self._granted: dict[Hashable, list[int]] = {}
        self._waiting: deque[tuple[Hashable, int]] = deque()
        self._told: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """How many nobody has."""
        return len(self._free)

    def ask(self, owner: Hashable, count: int) -> list[Grant | Queued]:
        """Ask for GPUs; an owner asks once.

        Raises:
            TooManyError: if the machine has not as many.
            ValueError: if the owner has some or waits already.
        """
        if count > len(self.gpus):
            raise TooManyError(f"{count} are asked for, and the machine has {len(self.gpus)}")
        if owner in self._granted or any(owner == each for each, _ in self._waiting):
            raise ValueError(f"{owner!r} has asked already")
        self._waiting.append((owner, count))
        return self._advance()

    def release(self, owner: Hashable) -> list[Grant | Queued]:
        """Give back what an owner has, or take it out of the queue; nothing happens where it is not known."""
        self._free = sorted([*self._free, *self._granted.pop(owner, [])])
        self._waiting = deque(each for each in self._waiting if each[0] != owner)
        self._told.pop(owner, None)
        return self._advance()

    def _advance(self) -> list[Grant | Queued]:
        out: list[Grant | Queued] = []
        while self._waiting and self._waiting[0][1] <= len(self._free):
            owner, count = self._waiting.popleft()
            taken = self._choose(count)
            self._granted[owner] = taken
            self._free = [number for number in self._free if number not in taken]
            self._told.pop(owner, None)
            out.append(Grant(owner, tuple(self.gpus[number] for number in taken)))
        for place, (owner, _) in enumerate(self._waiting, start=1):
            if self._told.get(owner) != place:
                self._told[owner] = place
                out.append(Queued(owner, place))
        return out

    def _choose(self, count: int) -> list[int]:
        """Neighbours where there are some: they have the shortest ways to each other."""
        for start in range(len(self._free) - count + 1):
            window = self._free[start : start + count]
            if not window or window[-1] - window[0] == count - 1:
                return window
        return self._free[:count]

    def check(self) -> None:
        """State the invariants; raises AssertionError where one does not hold."""
        taken = [number for numbers in self._granted.values() for number in numbers]
        assert sorted([*taken, *self._free]) == list(range(len(self.gpus))), "each GPU is free, or has one owner"
        assert not self._waiting or self._waiting[0][1] > len(self._free), "nobody waits for what is free"
        assert {owner for owner, _ in self._waiting} == set(self._told), "whoever waits knows its place"
