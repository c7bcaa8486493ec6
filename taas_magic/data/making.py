"""Makes elements as a DataLoader's worker would: from keys, or by going through a part of a stream."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from taas_magic.data import describe, seeds
from taas_magic.wire_data import Order, ShardJob

_END = object()


class ShardEndedError(Exception):
    """There is no such element in the shard, nor any behind it."""


class Maker:
    """Makes whatever element it is asked for, each from its keys and its place alone."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_initialised = False
        self._info = _worker_info(0, 1, 0, loader.dataset)

    def make(self, order: Order) -> Any:
        """Make one element.

        Raises:
            Exception: whatever the data set raises.
        """
        if not self._is_initialised:
            self._is_initialised = True
            if self._loader.worker_init_fn is not None:
                seeds.set_seeds(order.seed, 0, 0, b"worker")
                with _being_worker(self._info):
                    self._loader.worker_init_fn(0)
        seeds.set_seeds(order.seed, order.epoch, order.element)
        return _fetch(self._loader, pickle.loads(order.keys), self._info)


class ShardMaker:
    """Goes through one logical worker's part of a loader, from its first element on."""

    def __init__(self, loader: Any, job: ShardJob) -> None:
        self._loader, self._job = loader, job
        self._next = job.shard
        self._stream: Iterator[Any] | None = None
        self._has_ended = False
        dataset = loader.dataset if describe.is_data_loader(loader) else loader
        seed = job.seed if job.base_seed is None else job.base_seed + job.shard
        self._info = _worker_info(job.shard, job.num_shards, seed, dataset)
        self._is_map = describe.is_map(loader)
        self._is_initialised = False

    def make(self, order: Order) -> Any:
        """Make an element, and before it those of the shard that come before it.

        Raises:
            ShardEndedError: if there is none.
            Exception: whatever the data set raises.
        """
        if not self._is_initialised:
            self._is_initialised = True
            self._begin()
        element: Any = None
        while self._next <= order.element:
            place, self._next = self._next, self._next + self._job.num_shards
            element = self._make_at(place, order)
        return element

    def seed_for(self, place: int) -> None:
        """Set the random states for an element."""
        seeds.set_seeds(self._job.seed, self._job.epoch, place)

    def _begin(self) -> None:
        job, loader = self._job, self._loader
        if job.base_seed is None:
            seeds.set_seeds(job.seed, job.epoch, job.shard, b"shard")
        else:
            _seed_as_torch(job.base_seed, job.shard)
        if describe.is_data_loader(loader):
            if loader.worker_init_fn is not None:
                with _being_worker(self._info):
                    loader.worker_init_fn(job.shard)
            if not self._is_map:
                with _being_worker(self._info):
                    self._stream = iter(loader.dataset)
        else:
            if job.sampler_epoch is not None and callable(getattr(loader, "set_epoch", None)):
                loader.set_epoch(job.sampler_epoch)
            with _being_worker(self._info):
                self._stream = iter(loader)

    def _make_at(self, place: int, order: Order) -> Any:
        job, loader = self._job, self._loader
        if self._has_ended:
            raise ShardEndedError
        if job.base_seed is None:
            self.seed_for(place)
        if self._is_map:
            return _fetch(loader, pickle.loads(order.keys), self._info)
        assert self._stream is not None
        if not describe.is_data_loader(loader):
            with _being_worker(self._info):
                return self._ended_if_none(next(self._stream, _END))
        if loader.batch_size is None:
            with _being_worker(self._info):
                sample = self._ended_if_none(next(self._stream, _END))
            return _collate(loader, sample, self._info)
        with _being_worker(self._info):
            samples = list(itertools.islice(self._stream, loader.batch_size))
        if not samples or (loader.drop_last and len(samples) < loader.batch_size):
            self._has_ended = True
            raise ShardEndedError
        return _collate(loader, samples, self._info)

    def _ended_if_none(self, sample: Any) -> Any:
        if sample is _END:
            self._has_ended = True
            raise ShardEndedError
        return sample


def units_of(element: Any) -> int:
    """How many units an element is: what its ``hints`` say, else one.

    Raises:
        ValueError: if they say what is no number of units.
    """
    hints = element.get("hints") if isinstance(element, Mapping) else getattr(element, "hints", None)
    if not isinstance(hints, Mapping) or "units" not in hints:
        return 1
    units = hints["units"]
    try:
        number = int(units)
    except (TypeError, ValueError):
        number = -1
    if number < 0 or number != units:
        raise ValueError(
            f'the hints of an element say "units": {units!r}\nexpected: a whole number, 0 or more\n'
            'to do: correct `hints["units"]` where the data set makes it'
        )
    return number


def _fetch(loader: Any, keys: Any, info: Any) -> Any:
    dataset = loader.dataset
    with _being_worker(info):
        if loader.batch_sampler is None:
            samples = dataset[keys]
        elif hasattr(dataset, "__getitems__") and dataset.__getitems__:
            samples = dataset.__getitems__(keys)
        else:
            samples = [dataset[key] for key in keys]
    return _collate(loader, samples, info)


def _collate(loader: Any, samples: Any, info: Any) -> Any:
    collate = loader.collate_fn
    if getattr(collate, "__module__", "") == "torch.utils.data._utils.collate":
        # Told that it is in a worker, it would make each tensor in shared memory of its own (torch 2.13).
        return collate(samples)
    with _being_worker(info):
        return collate(samples)


def _worker_info(worker: int, num_workers: int, seed: int, dataset: Any) -> Any:
    from torch.utils.data._utils.worker import WorkerInfo

    return WorkerInfo(id=worker, num_workers=num_workers, seed=seed, dataset=dataset)


@contextlib.contextmanager
def _being_worker(info: Any) -> Iterator[None]:
    from torch.utils.data._utils import worker

    worker._worker_info = info
    try:
        yield
    finally:
        worker._worker_info = None


def _seed_as_torch(base_seed: int, worker: int) -> None:
    """Seed as a worker of torch's does (``_worker_loop`` in torch/utils/data/_utils/worker.py)."""
    import torch
    from torch.utils.data._utils.worker import _generate_state

    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(_generate_state(base_seed, worker))
