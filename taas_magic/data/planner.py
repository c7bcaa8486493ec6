"""Runs a loader's sampler: once, whatever the number of ranks and producers, and apart from all other random draws."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import deque
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
        self._error: BaseException | None = None
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
        """Begin an epoch.

        Raises:
            Exception: whatever the sampler raises.
        """
        self._pending = None
        self._error = None
        with self._random.active():
            if self._is_exact:
                for earlier in range(self._epochs_begun, epoch):
                    self._draw_base_seed(earlier)
                    _exhaust(self._keys())
                self._set_epoch(epoch, epoch, sampler_epoch)
                keys = self._keys()
                # As torch does: the sampler's iterator is made first, and draws when it is first asked.
                self._draw_base_seed(epoch)
            else:
                for earlier in self._epochs_to_replay(epoch):
                    self._seed(earlier, seed)
                    self._set_epoch(earlier, epoch, sampler_epoch)
                    _exhaust(self._keys())
                self._seed(epoch, seed)
                self._set_epoch(epoch, epoch, sampler_epoch)
                keys = self._keys()
            self._epochs_begun = epoch + 1
            self._tasks = (pickle.dumps(task, protocol=5) for task in keys)

    def take(self, count: int, skip: int = 0) -> tuple[list[bytes], bool]:
        """The next tasks of the epoch, after passing over some; and whether these are the last.

        Raises:
            Exception: whatever the sampler raises; what it said before that has been returned then.
        """
        with self._random.active():
            for _ in itertools.islice(self._tasks, skip):
                pass
            tasks = [] if self._pending is None else [self._pending]
            self._pending = None
            # One more, to know whether there is one.
            while self._error is None and len(tasks) <= count:
                try:
                    tasks.append(next(self._tasks))
                except StopIteration:
                    return tasks, True
                except (Exception, SystemExit) as error:  # noqa: BLE001 - what it said before goes first
                    self._error = error
        if self._error is None:
            self._pending = tasks.pop()
        elif not tasks:
            raise self._error
        return tasks, False

    def _seed(self, epoch: int, seed: int) -> None:
        seeds.set_seeds(seed, epoch, 0, b"sampler")
        for number, generator in enumerate(self._generators()):
            generator.manual_seed(seeds.derive_int(seed, epoch, number, b"generator"))

    def _set_epoch(self, epoch: int, latest: int, said: int | None) -> None:
        """Tell the sampler of an epoch; for the latest one, ``said`` is what the ranks were told."""
        sampler = describe.sampler_with_epoch(self._loader)
        if sampler is not None:
            sampler.set_epoch(max(0, epoch if said is None else said - latest + epoch))

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

    def _epochs_to_replay(self, epoch: int) -> range:
        """Epochs that a sampler has to be gone through first, so that it is where it would be.

        One that is not torch's may have states of its own, which nothing here can set: so it is gone through each
        epoch to its end, in order, and set back where an epoch comes again.
        """
        sampler = self._loader.batch_sampler
        sampler = self._loader.sampler if sampler is None else sampler
        is_torchs = all(type(each).__module__.startswith("torch.") for each in describe.samplers_of(self._loader))
        # What has no length may have no end.
        if is_torchs or describe.num_elements(sampler) is None:
            return range(0)
        if self._pristine is None:
            try:
                self._pristine = copy.deepcopy((self._loader.batch_sampler, self._loader.sampler))
            except Exception:  # noqa: BLE001 - it is iterated as it is, then
                return range(0)
        if epoch == self._epochs_begun:
            _exhaust(self._tasks)
            return range(0)
        batch_sampler, sampler = copy.deepcopy(self._pristine)
        # DataLoader refuses that its samplers are set anew.
        object.__setattr__(self._loader, "batch_sampler", batch_sampler)
        object.__setattr__(self._loader, "sampler", sampler)
        return range(epoch)

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


def _exhaust(keys: Iterator[Any]) -> None:
    deque(keys, maxlen=0)


def _of_rank(sampler: Any, distributed: Any, rank: int) -> Any:
    """A sampler as it is on a rank; ``distributed`` is the one inside it that tells ranks apart."""
    own = copy.copy(sampler)
    if sampler is distributed:
        own.rank = rank
    else:
        own.sampler = _of_rank(sampler.sampler, distributed, rank)
    return own
