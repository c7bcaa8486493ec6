"""What the sampler says, once for all ranks: in torch's own order where that is wanted, else by the seed alone."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from taas_magic.data import seeds
from taas_magic.data.planner import Planner


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Growing(Sampler[int]):
    """Draws from everything there is, keeps count of epochs, and has random states of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs = 0
        self.own = random.Random(5)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        drawn = (self.own.random(), random.random(), float(np.random.rand()), float(torch.rand(())))
        offset = int(1000 * sum(drawn)) + self.epochs
        return iter([(index + offset) % self.size for index in range(self.size)])


@pytest.fixture(autouse=True)
def kept_random_states() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def states() -> tuple[Any, ...]:
    legacy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), legacy[1].tolist(), legacy[2:]


def planner(loader: Any, num_ranks: int = 1, *, is_eval: bool = False, is_exact: bool = False) -> Planner:
    return Planner(copy.deepcopy(loader), num_ranks, is_eval=is_eval, is_exact=is_exact)


def epoch_of(
    plan: Planner, epoch: int = 0, seed: int = 3, sampler_epoch: int | None = None, at_once: int = 7
) -> list[Any]:
    """All tasks of an epoch, asked for bit by bit."""
    plan.begin(epoch, seed, sampler_epoch)
    tasks, is_last = [], False
    while not is_last:
        more, is_last = plan.take(at_once)
        assert len(more) <= at_once
        tasks += [pickle.loads(task) for task in more]
    return tasks


def batches(loader: Any) -> list[list[int]]:
    """What a loader over :class:`Numbers` gives here."""
    return [batch.tolist() for batch in loader]


def with_shuffle(generator: Any) -> dict[str, Any]:
    return {"shuffle": True, "generator": generator}


def with_replacement(generator: Any) -> dict[str, Any]:
    return {"sampler": RandomSampler(Numbers(20), replacement=True, num_samples=33, generator=generator)}


def with_weights(generator: Any) -> dict[str, Any]:
    return {"sampler": WeightedRandomSampler([0.1] * 10 + [1.0] * 10, 15, generator=generator), "generator": generator}


def with_subset(generator: Any) -> dict[str, Any]:
    return {"sampler": SubsetRandomSampler(range(3, 17), generator=generator)}


def with_some_of_a_permutation(generator: Any) -> dict[str, Any]:
    return {"sampler": RandomSampler(Numbers(20), num_samples=50, generator=generator), "generator": generator}


@pytest.mark.parametrize("is_own", [True, False], ids=["a generator of its own", "the notebook's random state"])
@pytest.mark.parametrize(
    "make", [with_shuffle, with_replacement, with_weights, with_subset, with_some_of_a_permutation]
)
def test_the_exact_order_is_torchs_epoch_after_epoch(make: Any, is_own: bool) -> None:
    torch.manual_seed(11)
    loader = DataLoader(Numbers(20), batch_size=3, **make(torch.Generator().manual_seed(4) if is_own else None))
    exact = planner(loader, is_exact=True)
    planned = [epoch_of(exact, epoch) for epoch in range(3)]
    assert planned == [batches(loader) for _ in range(3)]


@given(size=st.integers(0, 40), batch_size=st.integers(1, 9), drop_last=st.booleans(), first=st.integers(0, 3))
@settings(deadline=None)
def test_an_exact_order_may_be_taken_up_at_any_epoch(size: int, batch_size: int, drop_last: bool, first: int) -> None:
    generator = torch.Generator().manual_seed(4)
    sampler = RandomSampler(range(size), generator=generator) if size else range(0)
    loader: Any = DataLoader(Numbers(size), batch_size, sampler=sampler, drop_last=drop_last, generator=generator)
    exact = planner(loader, is_exact=True)
    planned = [epoch_of(exact, epoch) for epoch in (first, first + 1)]
    epochs = [batches(loader) for _ in range(first + 2)]
    assert planned == epochs[first:]


@given(size=st.integers(1, 60), batch_size=st.integers(1, 9), at_once=st.integers(1, 70))
@settings(deadline=None)
def test_it_does_not_matter_by_how_many_it_is_asked(size: int, batch_size: int, at_once: int) -> None:
    loader = DataLoader(Numbers(size), batch_size=batch_size, shuffle=True)
    plan = planner(loader)
    whole = epoch_of(plan, at_once=1000)
    assert sorted(index for batch in whole for index in batch) == list(range(size))
    assert epoch_of(plan, at_once=at_once) == whole
    plan.begin(0, 3, None)
    skipped = min(at_once, len(whole))
    tasks, is_last = plan.take(1000, skipped)
    assert [pickle.loads(task) for task in tasks] == whole[skipped:]
    assert is_last


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    loader = DataLoader(Numbers(50), batch_size=4, shuffle=True)
    torch.manual_seed(1)
    one = planner(loader)
    torch.manual_seed(2)
    other = planner(loader)
    torch.rand(9)
    epochs = [epoch_of(one, epoch) for epoch in range(3)]
    assert [epoch_of(other, epoch) for epoch in (2, 0, 1)] == [epochs[2], epochs[0], epochs[1]]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epoch_of(one, 0, seed=4) != epochs[0]


@pytest.mark.parametrize("make", [with_shuffle, with_replacement, with_weights, with_subset])
def test_a_generator_of_the_sampler_is_seeded_too(make: Any) -> None:
    loader = DataLoader(Numbers(20), batch_size=3, **make(torch.Generator().manual_seed(4)))
    used = DataLoader(Numbers(20), batch_size=3, **make(torch.Generator().manual_seed(99)))
    one, other = planner(loader), planner(used)
    assert [epoch_of(one, epoch) for epoch in range(2)] == [epoch_of(other, epoch) for epoch in range(2)]
    assert epoch_of(one, 1) != epoch_of(one, 0)


def test_a_sampler_with_states_of_its_own_is_brought_to_where_it_would_be() -> None:
    loader = DataLoader(Numbers(30), batch_size=None, sampler=Growing(30))
    one, other = planner(loader), planner(loader)
    epochs = [epoch_of(one, epoch) for epoch in range(4)]
    assert epoch_of(other, 3) == epochs[3]
    assert epoch_of(other, 1) == epochs[1]
    assert epoch_of(one, 2) == epochs[2]
    assert len({str(epoch) for epoch in epochs}) == 4
    for epoch in epochs:
        assert sorted(epoch) == list(range(30))


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_planner_draws_from_states_of_its_own(is_exact: bool) -> None:
    torch.manual_seed(8)
    random.seed(8)
    np.random.seed(8)
    plan = planner(DataLoader(Numbers(30), batch_size=2, sampler=Growing(30)), is_exact=is_exact)
    before = states()
    epoch_of(plan, 0)
    epoch_of(plan, 1)
    plan.base_seed(2)
    assert states() == before


@pytest.mark.parametrize("is_own", [True, False])
def test_the_base_seed_is_the_one_that_torchs_workers_would_have(is_own: bool) -> None:
    torch.manual_seed(21)
    generator = torch.Generator().manual_seed(6) if is_own else None
    loader = DataLoader(Numbers(9), batch_size=2, shuffle=True, generator=generator)
    exact = planner(loader, is_exact=True)
    epoch_of(exact, 0)
    epoch_of(exact, 1)
    expected = []
    for _ in range(2):
        iterator: Any = iter(loader)
        expected.append(iterator._base_seed)
        for _ in iterator:
            pass
    assert [exact.base_seed(0), exact.base_seed(1)] == expected


def test_a_batch_sampler_of_ones_own_is_asked() -> None:
    by_length = BatchSampler(SubsetRandomSampler([5, 3, 1]), 2, drop_last=False)
    loader = DataLoader(Numbers(9), batch_sampler=by_length)
    tasks = epoch_of(planner(loader))
    assert sorted(index for batch in tasks for index in batch) == [1, 3, 5]
    assert [len(batch) for batch in tasks] == [2, 1]
    torch.manual_seed(5)
    exact = planner(loader, is_exact=True)
    assert [epoch_of(exact, epoch) for epoch in range(2)] == [batches(loader) for _ in range(2)]


# ---- DistributedSampler


@given(
    size=st.integers(1, 60),
    num_ranks=st.integers(1, 5),
    batch_size=st.one_of(st.none(), st.integers(1, 7)),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    drop_batch=st.booleans(),
    epoch=st.integers(0, 3),
    is_eval=st.booleans(),
    is_exact=st.booleans(),
)
@settings(deadline=None)
def test_each_rank_gets_what_its_own_distributed_sampler_gives(  # noqa: PLR0917 - what is drawn
    size: int,
    num_ranks: int,
    batch_size: int | None,
    shuffle: bool,
    drop_last: bool,
    drop_batch: bool,
    epoch: int,
    is_eval: bool,
    is_exact: bool,
) -> None:
    def loader_of(rank: int) -> Any:
        numbers = Numbers(size)
        sampler: Any = DistributedSampler(numbers, num_ranks, rank, shuffle, seed=9, drop_last=drop_last)
        if batch_size is None:
            return DataLoader(numbers, batch_size=None, sampler=sampler)
        return DataLoader(numbers, batch_size=batch_size, sampler=sampler, drop_last=drop_batch)

    tasks = epoch_of(planner(loader_of(0), num_ranks, is_eval=is_eval, is_exact=is_exact), 0, sampler_epoch=epoch)
    for rank in range(num_ranks):
        own = loader_of(rank)
        own.sampler.set_epoch(epoch)
        assert tasks[rank::num_ranks] == list(own.sampler if batch_size is None else own.batch_sampler)


def test_a_distributed_sampler_within_another_is_found() -> None:
    numbers = Numbers(20)
    within = BatchSampler(DistributedSampler(numbers, 2, 0, shuffle=True), 3, drop_last=False)
    plan = planner(DataLoader(numbers, batch_sampler=within), 2)
    tasks = epoch_of(plan, 0, sampler_epoch=4)
    for rank in range(2):
        own: Any = DistributedSampler(numbers, 2, rank, shuffle=True)
        own.set_epoch(4)
        assert tasks[rank::2] == list(BatchSampler(own, 3, drop_last=False))


def test_a_sampler_that_nobody_told_of_an_epoch_is_told_of_the_streams() -> None:
    numbers = Numbers(20)
    plan = planner(DataLoader(numbers, batch_size=None, sampler=DistributedSampler(numbers, 1, 0)), 1)
    own: Any = DistributedSampler(numbers, 1, 0)
    own.set_epoch(2)
    assert epoch_of(plan, 2) == list(own)


# ---- the tail of an evaluation


@given(
    size=st.integers(0, 90),
    batch_size=st.integers(2, 9),
    num_ranks=st.integers(1, 5),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
@settings(deadline=None)
def test_an_evaluation_loses_and_doubles_nothing_and_is_even(
    size: int, batch_size: int, num_ranks: int, drop_last: bool, shuffle: bool
) -> None:
    loader = DataLoader(Numbers(size), batch_size=batch_size, shuffle=shuffle and size > 0, drop_last=drop_last)
    tasks = epoch_of(planner(loader, num_ranks, is_eval=True))
    plain = epoch_of(planner(loader, num_ranks))
    samples = [index for batch in tasks for index in batch]
    assert samples == [index for batch in plain for index in batch]
    if not drop_last:
        assert sorted(samples) == list(range(size))
    if len(samples) >= num_ranks:
        assert len(tasks) % num_ranks == 0
    assert all(len(batch) <= batch_size for batch in tasks)


def test_without_batches_an_evaluation_is_what_the_sampler_says() -> None:
    assert epoch_of(planner(DataLoader(Numbers(7), batch_size=None), 3, is_eval=True)) == list(range(7))


# ---- seeds


@given(
    seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(0, 2**40), element=st.integers(0, 2**40), other=st.binary()
)
@settings(deadline=None)
def test_a_place_has_random_numbers_of_its_own(seed: int, epoch: int, element: int, other: bytes) -> None:
    def draw(seed: int, epoch: int, element: int) -> tuple[float, float, float]:
        random.seed(other)
        torch.manual_seed(len(other))
        seeds.set_seeds(seed, epoch, element)
        return random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))

    here = draw(seed, epoch, element)
    assert draw(seed, epoch, element) == here
    for elsewhere in (draw(seed ^ 1, epoch, element), draw(seed, epoch + 1, element), draw(seed, epoch, element + 1)):
        assert not set(elsewhere) & set(here)


def test_random_states_are_put_away_while_something_else_draws() -> None:
    torch.manual_seed(3)
    random.seed(3)
    own = seeds.RandomStates()
    expected = [(float(torch.rand(())), random.random()) for _ in range(2)]
    here = float(torch.rand(()))
    torch.manual_seed(3)
    random.seed(3)
    for _ in range(2):
        torch.rand(())
        random.random()
    drawn = []
    for _ in range(2):
        with own.active():
            drawn.append((float(torch.rand(())), random.random()))
    assert drawn == expected
    assert float(torch.rand(())) == here


class Failing(Sampler[int]):
    """Says some numbers, and raises."""

    def __init__(self, says: int) -> None:
        self.says = says

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[int]:
        yield from range(self.says)
        raise ValueError("no more")


@pytest.mark.parametrize("says", [0, 1, 4, 5, 7])
def test_what_a_sampler_says_before_it_raises_is_not_lost(says: int) -> None:
    plan = planner(DataLoader(Numbers(100), batch_size=None, sampler=Failing(says)))
    plan.begin(0, 3, None)
    found: list[int] = []
    while len(found) < says:
        tasks, is_last = plan.take(4)
        assert not is_last
        found += [pickle.loads(task) for task in tasks]
    assert found == list(range(says))
    with pytest.raises(ValueError, match="no more"):
        plan.take(4)


class Interrupted(Growing):
    """Draws for each number, so that it matters how far it was gone through."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield self.own.randrange(self.size)


def test_an_epoch_that_was_left_early_does_not_change_the_next_one() -> None:
    loader = DataLoader(Numbers(30), batch_size=None, sampler=Interrupted(30))
    one, other = planner(loader), planner(loader)
    epochs = [epoch_of(one, epoch) for epoch in range(3)]
    for epoch in range(2):
        other.begin(epoch, 3, None)
        other.take(5)
    assert epoch_of(other, 2) == epochs[2]


def test_what_never_ends_is_not_gone_through_to_its_end() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield random.randrange(9)

    plan = planner(DataLoader(Numbers(30), batch_size=None, sampler=Endless()))
    for epoch in (0, 4, 1):
        plan.begin(epoch, 3, None)
        assert len(plan.take(5)[0]) == 5
