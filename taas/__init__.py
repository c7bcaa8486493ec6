"""What a cell needs of taas: who am I, how many are we, where do I compute.

The same names work in a plain notebook cell: rank 0 of 1, on the default device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taas import _place

if TYPE_CHECKING:
    import torch

__all__ = ["device", "rank", "world_size"]


def rank() -> int:
    """The global rank of this process, 0 in a plain notebook cell. Rank 0 is the one that may write in the project."""
    return _place.current.rank


def world_size() -> int:
    """The number of ranks of this run, 1 in a plain notebook cell."""
    return _place.current.world_size


def device() -> torch.device:
    """The device of this rank: its own GPU (``cuda:<local rank>``), or the CPU where the place has no GPU.

    In a plain notebook cell: the first GPU, else torch's default device.
    """
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", _place.current.local_rank)
    return torch.get_default_device()
