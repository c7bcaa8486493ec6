"""Lets a rank leave its process group and enter a new one, as often as it likes.

The ranks of a run meet at one store, the agent's. Torch writes the addresses of a group under the same keys every time,
so a second ``init_process_group`` would read those of the first group, which are dead: it hangs, or is refused a
connection (torch 2.13; torchrun has the same trouble, and so have Lightning's and Accelerate's second run in one
process). Here every meeting has a part of the store for itself.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

_Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def number_meetings() -> None:
    """Give each meeting of this process at the agent's store a prefix of its own; all ranks count alike."""
    # The package has a function of the module's name, which hides it from an ordinary import.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, _Handler] = module._rendezvous_handlers
    for scheme in ("env", "tcp"):
        handlers[scheme] = _numbered(handlers[scheme])


def begin_cell(run_id: str) -> None:
    """Count anew: in a cell that failed, some ranks may have met once more than others."""
    _Meetings.run_id, _Meetings.numbers = run_id, itertools.count()


class _Meetings:
    """The cell in which ranks meet, and how often they have."""

    run_id = ""
    numbers = itertools.count()


def _numbered(handler: _Handler) -> _Handler:
    def numbered(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        prefix = f"meeting-{_Meetings.run_id}-{next(_Meetings.numbers)}"
        for store, rank, world_size in handler(url, **options):
            yield dist.PrefixStore(prefix, store), rank, world_size

    return numbered
