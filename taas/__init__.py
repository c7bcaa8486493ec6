"""What a cell needs of taas: who am I, how many are we, where do I compute; and which data is delivered.

The same names work in a plain notebook cell: rank 0 of 1, on the default device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from taas import _place

if TYPE_CHECKING:
    import torch

    from taas_magic.data.registry import WorkerInfo
    from taas_magic.wire_data import Determinism, OnError, Role, Tail

__all__ = [
    "device",
    "get_worker_info",
    "is_registered",
    "rank",
    "register",
    "registered",
    "unregister",
    "world_size",
]


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


def register(
    loader: Any,
    *,
    role: Role = "train",
    name: str = "",
    tail: Tail = "drop",
    on_error: OnError = "raise",
    determinism: Determinism = "seeded",
    cycles: bool = True,
    resume: Mapping[str, Any] | None = None,
) -> None:
    """Have producers make what a loader yields, in cells with ``--cpus``; the loader itself stays as it is.

    Args:
        loader: A ``DataLoader``, or any object of a class of your own that can be iterated.
        role: ``"train"``, or ``"eval"`` for a loader of which nothing may be lost or doubled, and which ``--units``
            does not bound.
        name: What to call it in messages; the notebook's name for it by default.
        tail: What to do with the last elements of an epoch that make no full round on all ranks: ``"drop"`` them, or
            ``"pad"`` the round with the first ones of the epoch. With ``role="eval"`` neither is done.
        on_error: ``"raise"`` what the data set raises on the rank that was to get the element, or ``"skip"`` it.
        determinism: ``"seeded"``: each element is made with random states of its own, whoever makes it. ``"exact"``:
            bit by bit what ``DataLoader(num_workers=W)`` gives, by W logical workers.
        cycles: With ``--units``: one iteration goes on through as many epochs as that takes. False ends each
            iteration with its epoch.
        resume: Begin where this ``state_dict()`` of the delivered loader says.

    Raises:
        ValueError: if it is registered already, cannot be delivered, or an argument is none of those above.
        TypeError: if something in it cannot be pickled; the text names the path to that.
    """
    from taas_magic.data import registry

    __tracebackhide__ = True
    registry.register(
        loader,
        role=role,
        name=name,
        tail=tail,
        on_error=on_error,
        determinism=determinism,
        cycles=cycles,
        resume=resume,
    )


def unregister(loader: Any) -> None:
    """Take back :func:`register`.

    Raises:
        ValueError: if the loader is not registered.
    """
    from taas_magic.data import registry

    __tracebackhide__ = True
    registry.unregister(loader)


def registered() -> list[Any]:
    """The registered loaders, in the order in which they were registered; on a rank those that are delivered to it."""
    from taas_magic.data import registry

    return registry.registered()


def is_registered(loader: Any) -> bool:
    """Whether this very object is registered; on a rank, whether it is delivered."""
    from taas_magic.data import registry

    return registry.is_registered(loader)


def get_worker_info() -> WorkerInfo:
    """Inside a data set that shards itself: which part of it to read here, as (``id``, ``num_workers``).

    It is (0, 1) where there is only one part, so also in the notebook; in a worker of torch's, that worker's.
    """
    from taas_magic.data import registry

    return registry.get_worker_info()
