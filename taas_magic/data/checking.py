"""Looks, beside a run, whether a data set keeps what delivery counts on, by making some elements twice.

An element is to depend on its place in the stream alone. One that draws from a generator of its own depends on what was
made before, in the process where it is made. And logical workers that all read everything give each element several
times.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from taas_magic.data import describe, seeds
from taas_magic.data.elements import Encoder
from taas_magic.data.making import Maker, ShardEndedError, ShardMaker
from taas_magic.wire_data import LoaderTask, Order, ShardJob

_NICE = 10
#: Elements of a shard that have to be the same until two shards count as the same.
_SAME_ELEMENTS = 2


def findings(loaders: Sequence[Any], tasks: Sequence[LoaderTask], first_keys: Sequence[bytes]) -> Iterator[str]:
    """What the user should know of the loaders, one text each; what raises is left to the run itself.

    Args:
        loaders: The loaders, which nobody else uses.
        tasks: How they are delivered.
        first_keys: What the sampler says first, pickled; empty where none does.
    """
    os.nice(_NICE)
    encoder = Encoder({})
    for number, (loader, task, keys) in enumerate(zip(loaders, tasks, first_keys, strict=True)):
        shards = describe.num_shards(loader, is_exact=task.determinism == "exact")
        if not shards and keys:
            yield from _look_at_map(number, loader, task, keys, encoder)
        elif shards > 1 and not describe.is_map(loader):
            yield from _look_at_shards(number, loader, task, shards, encoder)


def _look_at_map(number: int, loader: Any, task: LoaderTask, keys: bytes, encoder: Encoder) -> Iterator[str]:
    order = Order(0, number, 0, 0, 0, keys)
    maker = Maker(loader)
    try:
        made = [encoder.encode(maker.make(order)).to_bytes() for _ in range(2)]
    except Exception:  # noqa: BLE001 - the run meets it where it is raised
        return
    if made[0] != made[1]:
        kind = type(loader.dataset).__name__
        yield (
            f"`{task.name}`: making the same element twice gave two results, so the stream depends on which producer "
            f"makes what. Does `{kind}` draw from a generator of its own?\n"
            "to do: draw from `random`, `numpy.random` or torch's default generator, which are seeded for each element"
        )


def _look_at_shards(number: int, loader: Any, task: LoaderTask, shards: int, encoder: Encoder) -> Iterator[str]:
    try:
        parts = [_first_of_shard(number, loader, shard, shards, encoder) for shard in range(2)]
    except Exception:  # noqa: BLE001 - the run meets it where it is raised
        return
    if parts[0] and parts[0] == parts[1]:
        kind = type(loader.dataset).__name__
        yield (
            f"`{task.name}`: its logical workers yield the same elements, so each comes {shards} times: `{kind}` does "
            "not ask which part it is to read\n"
            "to do: read part `id` of `num_workers` that taas.get_worker_info() says, or set num_workers=0"
        )


def _first_of_shard(number: int, loader: Any, shard: int, shards: int, encoder: Encoder) -> list[bytes]:
    """The first elements of a shard, with the same random numbers for each shard."""
    maker = _AlikeMaker(loader, ShardJob(number, 0, shard, shards, 0))
    found = []
    for place in range(_SAME_ELEMENTS):
        try:
            element = maker.make(Order(0, number, 0, shard + place * shards, 0))
        except ShardEndedError:
            break
        found.append(encoder.encode(element).to_bytes())
    return found


class _AlikeMaker(ShardMaker):
    """Goes through a shard with the random numbers of the first one."""

    def seed_for(self, place: int) -> None:
        seeds.set_seeds(self._job.seed, self._job.epoch, place // self._job.num_shards)
