"""Runs a loader's sampler: once, whatever the number of ranks and producers, and apart from all other random draws."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

from taas_magic.data import describe, seeds
from taas_magic.data.rounds import interleave, with_even_tail


class Planner:
    """One loader's epochs, as lists of keys.

    Args:
        loader: The loader, in a copy that nobody else uses.
        num_ranks: The number of ranks.
        is_eval: The last batches are cut so that each rank has as many, instead of being dropped.
        is_exact: Random numbers are drawn as by torch, and not derived from a seed.
    """

    def __init__(self, loader: Any, num_ranks: int, *, is_eval: bool, is_exact: bool) -> None:
        self._loader = loader
        self._num_ranks = num_ranks
        self._is_eval = is_eval
        self._is_exact = is_exact
        #: What is drawn here is drawn from the state that the notebook had, and by nothing else.
        self._random = seeds.RandomStates()
        self._tasks: Iterator[bytes] = iter(())
        self._pending: bytes | None = None
        #: Epochs that the sampler has been gone through, where what it does depends on that.
        self._epochs_begun = 0
        self._pristine: Any = None
        self._base_seed: dict[int, int] = {}

    def base_seed(self, epoch: int) -> int:
        """The base seed of torch's workers in an epoch; drawn where that has not been done."""
        with self._random.active():
            while epoch not in self._base_seed:
                self._draw_base_seed(self._epochs_begun)
                self._epochs_begun += 1
        return self._base_seed[epoch]

    def begin(self, epoch: int, seed: int, sampler_epoch: int | None) -> None:
        """Begin an epoch."""
        self._pending = None
        with self._random.active():
            if not self._is_exact:
                seeds.set_seeds(seed, epoch, 0, b"sampler")
                for number, generator in enumerate(self._generators()):
                    generator.manual_seed(seeds.derive_int(seed, epoch, number, b"generator"))
                self._replay_others(epoch)
            else:
                while self._epochs_begun < epoch:
                    self._draw_base_seed(self._epochs_begun)
                    self._epochs_begun += 1
                    for _ in self._keys():
                        pass
            sampler = describe.sampler_with_epoch(self._loader)
            if sampler is not None:
                sampler.set_epoch(epoch if sampler_epoch is None else sampler_epoch)
            keys = self._keys()
            if self._is_exact:
                # As torch does: the sampler's iterator is made first, and draws when it is first asked.
                self._draw_base_seed(epoch)
            self._epochs_begun = epoch + 1
            self._tasks = (pickle.dumps(task, protocol=5) for task in keys)

    def take(self, count: int, skip: int = 0) -> tuple[list[bytes], bool]:
        """The next tasks of the epoch, after passing over some; and whether these are the last.

        Raises:
            Exception: whatever the sampler raises.
        """
        with self._random.active():
            for _ in itertools.islice(self._tasks, skip):
                pass
            tasks = [] if self._pending is None else [self._pending]
            # One more, to know whether there is one.
            tasks += itertools.islice(self._tasks, count + 1 - len(tasks))
        is_last = len(tasks) <= count
        self._pending = None if is_last else tasks.pop()
        return tasks, is_last

    def _draw_base_seed(self, epoch: int) -> None:
        import torch

        drawn = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        self._base_seed[epoch] = int(drawn.item())

    def _generators(self) -> list[Any]:
        import torch

        holders = [self._loader, *describe.samplers_of(self._loader)]
        found: list[Any] = []
        for holder in holders:
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is each for each in found):
                found.append(generator)
        return found

    def _replay_others(self, epoch: int) -> None:
        """Bring a sampler that is not torch's to where it is when it has been gone through ``epoch`` times.

        It may have random states of its own, which nothing here can set.
        """
        samplers = list(describe.samplers_of(self._loader))
        if all(type(each).__module__.startswith("torch.") for each in samplers):
            return
        if self._pristine is None:
            try:
                self._pristine = copy.deepcopy((self._loader.batch_sampler, self._loader.sampler))
            except Exception:  # noqa: BLE001 - it is iterated as it is, then
                return
        if epoch == self._epochs_begun:
            return
        batch_sampler, sampler = copy.deepcopy(self._pristine)
        # DataLoader refuses that its samplers are set anew.
        object.__setattr__(self._loader, "batch_sampler", batch_sampler)
        object.__setattr__(self._loader, "sampler", sampler)
        for _ in range(epoch):
            for _ in self._keys():
                pass

    def _keys(self) -> Iterator[Any]:
        """What the sampler says, in the order in which it goes to the ranks."""
        loader = self._loader
        is_batched = loader.batch_sampler is not None
        index_sampler = loader.batch_sampler if is_batched else loader.sampler
        distributed = describe.distributed_sampler(loader)
        if distributed is not None:
            return interleave([_of_rank(index_sampler, distributed, rank) for rank in range(self._num_ranks)])
        keys = iter(index_sampler)
        if self._is_eval and is_batched and self._num_ranks > 1:
            return with_even_tail(keys, self._num_ranks)
        plain: Iterator[Any] = keys
        return plain


def _of_rank(sampler: Any, distributed: Any, rank: int) -> Any:
    """A sampler as it is on a rank; ``distributed`` is the one inside it that tells ranks apart."""
    own = copy.copy(sampler)
    if sampler is distributed:
        own.rank = rank
    else:
        own.sampler = _of_rank(sampler.sampler, distributed, rank)
    return own
