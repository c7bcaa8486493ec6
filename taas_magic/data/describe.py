"""What kind of loader something is, as far as delivery is concerned."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any


def is_data_loader(loader: Any) -> bool:
    """Whether it is a DataLoader that iterates as torch's own does, so that its parts say all about it."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is None or not isinstance(loader, torch_data.DataLoader):
        return False
    kind, base = type(loader), torch_data.DataLoader
    return kind.__iter__ is base.__iter__ and kind._get_iterator is base._get_iterator


def is_map(loader: Any) -> bool:
    """Whether a sampler says what its elements are made of."""
    torch_data = sys.modules.get("torch.utils.data")
    return (
        is_data_loader(loader) and torch_data is not None and not isinstance(loader.dataset, torch_data.IterableDataset)
    )


def num_shards(loader: Any, *, is_exact: bool) -> int:
    """Logical workers that each go through a part of it in order; 0 where elements can be made one by one."""
    if not is_data_loader(loader):
        return 1
    if is_map(loader) and not is_exact:
        return 0
    return max(1, int(loader.num_workers))


def num_elements(loader: Any) -> int | None:
    """How many elements an epoch has; None where that is not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def batch_size(loader: Any) -> int | None:
    """How many samples an element has; None where it is no batch, or batches differ."""
    if not is_data_loader(loader):
        return None
    size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    return size if isinstance(size, int) else None


def samplers_of(loader: Any) -> Iterator[Any]:
    """The samplers of a DataLoader, from the outside in."""
    seen: list[Any] = []
    inner = getattr(loader, "batch_sampler", None)
    if inner is None:
        # Beside a batch sampler of one's own there is another one, which is not asked.
        inner = getattr(loader, "sampler", None)
    while inner is not None and not any(inner is each for each in seen):
        seen.append(inner)
        yield inner
        inner = getattr(inner, "sampler", None)


def distributed_sampler(loader: Any) -> Any | None:
    """The DistributedSampler of a loader, if it has one."""
    return distributed_sampler_among(samplers_of(loader)) if is_data_loader(loader) else None


def distributed_sampler_among(samplers: Iterable[Any]) -> Any | None:
    """The DistributedSampler among some samplers."""
    module = sys.modules.get("torch.utils.data.distributed")
    if module is None:
        return None
    return next((each for each in samplers if isinstance(each, module.DistributedSampler)), None)


def sampler_with_epoch(loader: Any) -> Any | None:
    """The sampler that wants to be told of each epoch, if there is one."""
    if not is_data_loader(loader):
        return None
    return next((each for each in samplers_of(loader) if callable(getattr(each, "set_epoch", None))), None)


def can_be_iterated(loader: Any) -> bool:
    """Whether it can be iterated more than once in principle."""
    return isinstance(loader, Iterable) or hasattr(type(loader), "__getitem__")
