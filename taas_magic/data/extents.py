"""Shares out the memory of elements: which bytes are taken, and where there is room. It holds no memory itself."""

from __future__ import annotations

import bisect
import itertools

#: Elements begin at multiples of a page, small ones of a cache line.
PAGE_BYTES = 4096
LINE_BYTES = 64


def round_up(size_bytes: int) -> int:
    """What an element of this size takes."""
    unit = LINE_BYTES if size_bytes < PAGE_BYTES else PAGE_BYTES
    return -(-max(1, size_bytes) // unit) * unit


class Extents:
    """Free and taken ranges of ``[0, size_bytes)``; the lowest range that fits is given out first.

    So what is taken stays in the front, whose pages have been touched before.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.taken_bytes = 0
        #: Starts of the free ranges, sorted, with their ends.
        self._starts: list[int] = [0] if size_bytes else []
        self._ends: list[int] = [size_bytes] if size_bytes else []
        #: Sizes of the taken ranges by their start.
        self._taken: dict[int, int] = {}

    def take(self, size_bytes: int) -> int | None:
        """Take a range; None where none is large enough."""
        need = round_up(size_bytes)
        unit = PAGE_BYTES if need >= PAGE_BYTES else LINE_BYTES
        for index, start in enumerate(self._starts):
            aligned = -(-start // unit) * unit
            if self._ends[index] - aligned >= need:
                self._cut(index, aligned, aligned + need)
                self._taken[aligned] = need
                self.taken_bytes += need
                return aligned
        return None

    def trim(self, start: int, size_bytes: int) -> None:
        """Give back what is behind the first ``size_bytes`` of a taken range."""
        had, keep = self._taken[start], round_up(size_bytes)
        if keep < had:
            self._taken[start] = keep
            self.taken_bytes -= had - keep
            self._put_back(start + keep, start + had)

    def give_back(self, start: int) -> None:
        """Give a taken range back."""
        size = self._taken.pop(start)
        self.taken_bytes -= size
        self._put_back(start, start + size)

    @property
    def taken(self) -> list[int]:
        """Where the taken ranges begin."""
        return list(self._taken)

    def grow(self, size_bytes: int) -> None:
        """Note that the memory is larger now."""
        if size_bytes > self.size_bytes:
            before, self.size_bytes = self.size_bytes, size_bytes
            self._put_back(before, size_bytes)

    @property
    def free(self) -> list[tuple[int, int]]:
        """The free ranges: where each begins and ends."""
        return list(zip(self._starts, self._ends, strict=True))

    def check(self) -> None:
        """State the invariants: the ranges cover the memory, none overlap, and free neighbours are one."""
        ranges = sorted(
            [(s, e, "free") for s, e in zip(self._starts, self._ends, strict=True)]
            + [(s, s + n, "taken") for s, n in self._taken.items()]
        )
        at = 0
        for start, end, _ in ranges:
            assert start == at < end, ranges
            at = end
        assert at == self.size_bytes
        assert all(not (a[2] == b[2] == "free") for a, b in itertools.pairwise(ranges))
        assert self.taken_bytes == sum(self._taken.values())

    def _cut(self, index: int, start: int, end: int) -> None:
        low, high = self._starts[index], self._ends[index]
        pieces = [(a, b) for a, b in ((low, start), (end, high)) if a < b]
        self._starts[index : index + 1] = [a for a, _ in pieces]
        self._ends[index : index + 1] = [b for _, b in pieces]

    def _put_back(self, start: int, end: int) -> None:
        index = bisect.bisect_left(self._starts, start)
        if index and self._ends[index - 1] == start:
            index -= 1
            start = self._starts.pop(index)
            self._ends.pop(index)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends.pop(index)
            self._starts.pop(index)
        self._starts.insert(index, start)
        self._ends.insert(index, end)
