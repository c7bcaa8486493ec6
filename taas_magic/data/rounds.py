"""Which element goes to which rank: plain values in, plain values out.

Element k of an epoch goes to rank k mod ranks, in step k div ranks. The elements of one step are a *round*; ranks are
only ever given complete rounds, so all of them see the same number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar

T = TypeVar("T")
_NOTHING = object()


def interleave(streams: Sequence[Iterable[T]]) -> Iterator[T]:
    """One item of each stream in turn; a stream that has ended is passed over."""
    for items in zip_longest(*streams, fillvalue=_NOTHING):
        yield from (item for item in items if item is not _NOTHING)  # type: ignore[misc]


def split_tail(tasks: Sequence[Sequence[T]], num_ranks: int) -> list[list[T]]:
    """Cut the batches of an incomplete last round so that every rank has one, and no sample is lost or doubled.

    The longest batch is halved until there are enough. Where there are too few samples for that, the batches of the
    round before, which are then to be among ``tasks``, give theirs.

    Args:
        tasks: The last batches of the epoch, as lists of keys: those of the incomplete round, or of the last two.
        num_ranks: The number of ranks.

    Returns:
        The batches in order, as many as fill complete rounds; unchanged where there are too few samples.
    """
    missing = -len(tasks) % num_ranks
    batches = [list(task) for task in tasks]
    if not missing or sum(map(len, batches)) < len(batches) + missing:
        return batches
    for _ in range(missing):
        at = max(range(len(batches)), key=lambda index: len(batches[index]))
        half = (len(batches[at]) + 1) // 2
        batches[at : at + 1] = [batches[at][:half], batches[at][half:]]
    return batches


def with_even_tail(tasks: Iterable[Sequence[T]], num_ranks: int) -> Iterator[list[T]]:
    """The batches of an epoch, the last ones cut by :func:`split_tail`; two rounds are looked ahead."""
    window: list[list[T]] = []
    for task in tasks:
        window.append(list(task))
        if len(window) > 3 * num_ranks:
            yield from window[:num_ranks]
            del window[:num_ranks]
    # All before the window were complete rounds.
    tail = len(window) % num_ranks
    if not tail:
        yield from window
        return
    for num_last in (tail, tail + num_ranks):
        if num_last > len(window):
            break
        cut = split_tail(window[-num_last:], num_ranks)
        if len(cut) % num_ranks == 0:
            yield from window[:-num_last]
            yield from cut
            return
    yield from window


def num_rounds(num_elements: int, num_ranks: int, *, drops_tail: bool) -> int:
    """Steps of an epoch on each rank."""
    return num_elements // num_ranks if drops_tail else -(-num_elements // num_ranks)
