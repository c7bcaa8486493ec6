"""Says who holds whom up: the ranks that wait for data, or the producers that wait for room."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: Producers that one data machine runs: `c1.4` has four cores.
PRODUCERS_A_MACHINE = 4
#: Less waiting than this is none.
_NEGLIGIBLE_SHARE = 0.05
_NEGLIGIBLE_S = 0.5
MAX_MACHINES = 8


@dataclass
class WaitingTimes:
    """How long the ranks waited for one loader, by iteration and rank, in seconds."""

    waited: dict[tuple[int, int], float] = field(default_factory=dict)
    iterating: dict[tuple[int, int], float] = field(default_factory=dict)
    taken: dict[tuple[int, int], int] = field(default_factory=dict)

    def note(self, iteration: int, rank: int, waited_s: float, iterating_s: float, taken: int) -> None:
        """Note what a rank says; it says all of an iteration each time."""
        key = iteration, rank
        self.waited[key], self.iterating[key], self.taken[key] = waited_s, iterating_s, taken

    def _mean(self, values: dict[tuple[int, int], float]) -> float:
        ranks = {rank for _, rank in values}
        return sum(values.values()) / len(ranks) if ranks else 0.0

    @property
    def waited_s(self) -> float:
        """Seconds that a rank waited, on average."""
        return self._mean(self.waited)

    @property
    def iterating_s(self) -> float:
        """Seconds that a rank was iterating, on average: waiting and working on what it got."""
        return self._mean(self.iterating)

    @property
    def num_taken(self) -> int:
        """Elements that were taken, by all ranks."""
        return sum(self.taken.values())

    @property
    def share(self) -> float:
        """Of the time that they iterated, what the ranks waited."""
        return self.waited_s / self.iterating_s if self.iterating_s else 0.0


def advice(  # noqa: PLR0917 - everything that tells who waits for whom
    name: str, times: WaitingTimes, element_s: float, num_producers: int, num_cores: int, busy_cores: float
) -> str:
    """What to do about the waiting; "" where there is nothing to do.

    Args:
        name: The loader.
        times: How long the ranks waited for it.
        element_s: Seconds that one producer takes for one element.
        num_producers: Producers that there are.
        num_cores: Processors of the machine that they are on.
        busy_cores: How many of those were at work on it, on average.
    """
    if times.waited_s < _NEGLIGIBLE_S or times.share < _NEGLIGIBLE_SHARE or not times.num_taken:
        return ""
    said = f"ranks waited {100 * times.share:.0f} % of the time for `{name}`"
    working_s = times.iterating_s - times.waited_s
    machines = -(-num_producers // PRODUCERS_A_MACHINE)
    if busy_cores > 0.85 * num_cores:
        return f"{said}: all {num_cores} cores of this machine are at work, so more producers would not help here"
    # So many elements a second would be taken if none had to be waited for; a tenth more, since they come unevenly.
    wanted = 1.1 * times.num_taken / max(working_s, 1e-3) * element_s
    needed = min(MAX_MACHINES, max(machines + 1, math.ceil(wanted / PRODUCERS_A_MACHINE)))
    if machines >= MAX_MACHINES:
        return f"{said}: with --cpus {machines} there are as many producers as there can be"
    return f"{said}: try --cpus {needed}"
