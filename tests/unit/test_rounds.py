"""Which element goes to which rank: rounds, and the tail of an epoch."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas_magic.data.rounds import interleave, num_rounds, split_tail, with_even_tail

RANKS = st.integers(1, 7)
BATCHES = st.lists(st.lists(st.none(), min_size=1, max_size=6), max_size=40)


def numbered(batches: list[list[None]]) -> list[list[int]]:
    """Batches of the same sizes, whose samples are told apart."""
    numbers = itertools.count()
    return [[next(numbers) for _ in batch] for batch in batches]


def epoch(num_samples: int, batch_size: int) -> list[list[int]]:
    """What a batch sampler says of an epoch."""
    return [
        list(range(first, min(first + batch_size, num_samples))) for first in range(0, num_samples, max(1, batch_size))
    ]


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_streams_are_taken_in_turn_and_one_that_has_ended_is_passed_over(lengths: list[int]) -> None:
    streams = [[(number, step) for step in range(length)] for number, length in enumerate(lengths)]
    expected = [
        (number, step) for step in range(max(lengths)) for number, length in enumerate(lengths) if step < length
    ]
    assert list(interleave(streams)) == expected


def test_none_is_an_item_of_a_stream_as_any_other() -> None:
    streams: list[list[int | None]] = [[None, 1], [None]]
    assert list(interleave(streams)) == [None, None, 1]


@given(batches=BATCHES, num_ranks=RANKS)
def test_an_even_tail_loses_and_doubles_nothing_and_keeps_the_order(batches: list[list[None]], num_ranks: int) -> None:
    tasks = numbered(batches)
    even = list(with_even_tail(iter(tasks), num_ranks))
    assert flat(even) == flat(tasks)
    assert all(even)
    assert len(even) == len(tasks) or len(even) % num_ranks == 0
    assert len(even) <= len(tasks) + num_ranks - 1


@given(num_samples=st.integers(0, 300), batch_size=st.integers(2, 9), num_ranks=RANKS)
def test_every_rank_has_as_many_batches_wherever_there_are_enough_samples(
    num_samples: int, batch_size: int, num_ranks: int
) -> None:
    tasks = epoch(num_samples, batch_size)
    even = list(with_even_tail(tasks, num_ranks))
    if num_samples >= num_ranks or not num_samples:
        assert len(even) == -(-len(tasks) // num_ranks) * num_ranks
    else:
        assert even == tasks
    # Only the last two rounds are touched.
    untouched = max(0, len(tasks) // num_ranks - 1) * num_ranks
    assert even[:untouched] == tasks[:untouched]


@given(batches=BATCHES, num_ranks=RANKS)
def test_split_tail_completes_the_round_or_leaves_it(batches: list[list[None]], num_ranks: int) -> None:
    tasks = numbered(batches)
    cut = split_tail(tasks, num_ranks)
    rounds = -(-len(tasks) // num_ranks) * num_ranks
    assert flat(cut) == flat(tasks)
    assert len(cut) == (rounds if len(flat(tasks)) >= rounds else len(tasks))


def test_split_tail_halves_the_longest_batch() -> None:
    assert split_tail([[0, 1, 2, 3, 4], [5, 6]], 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert split_tail([[0, 1, 2, 3]], 4) == [[0], [1], [2], [3]]


def test_the_round_before_gives_samples_where_the_last_has_too_few() -> None:
    even = list(with_even_tail(epoch(9, 4), 2))
    assert len(even) == 4
    assert max(map(len, even)) <= 4
    assert flat(even) == list(range(9))


@given(batch_size=st.integers(1, 4), num_ranks=RANKS)
def test_an_endless_epoch_is_begun_at_once(batch_size: int, num_ranks: int) -> None:
    asked = itertools.count()
    endless = ([number] * batch_size for number in asked)
    first = list(itertools.islice(with_even_tail(endless, num_ranks), 20))
    assert first == [[number] * batch_size for number in range(20)]
    assert next(asked) <= 20 + 4 * num_ranks + 2


@pytest.mark.parametrize(
    ("num_elements", "num_ranks", "dropped", "kept"), [(0, 3, 0, 0), (1, 3, 0, 1), (6, 3, 2, 2), (7, 3, 2, 3)]
)
def test_steps_of_an_epoch(num_elements: int, num_ranks: int, dropped: int, kept: int) -> None:
    assert num_rounds(num_elements, num_ranks, drops_tail=True) == dropped
    assert num_rounds(num_elements, num_ranks, drops_tail=False) == kept
