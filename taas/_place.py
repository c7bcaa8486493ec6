"""Where this process stands in its run. The rank's entry sets it; elsewhere it says "alone"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Global rank, number of ranks, and rank on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    is_in_run: bool = False


current = Place()
