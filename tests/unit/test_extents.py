"""The shares of the elements' memory, against a model that knows each byte's owner."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from taas_magic.data.extents import LINE_BYTES, PAGE_BYTES, Extents, round_up

SIZES = st.one_of(st.integers(0, 300), st.integers(300, 20_000), st.sampled_from([64, 4095, 4096, 4097, 8192]))


class ExtentsMachine(RuleBasedStateMachine):
    """Takes and gives back at random."""

    @initialize(size=st.integers(0, 40).map(lambda pages: pages * PAGE_BYTES))
    def begin(self, size: int) -> None:
        self.extents = Extents(size)
        #: (size, what was asked for) by start.
        self.taken: dict[int, int] = {}

    def _gaps(self) -> list[tuple[int, int]]:
        at, gaps = 0, []
        for start, size in sorted(self.taken.items()):
            gaps.append((at, start))
            at = start + size
        return [*gaps, (at, self.extents.size_bytes)]

    @rule(size=SIZES)
    def take(self, size: int) -> None:
        need = round_up(size)
        assert need >= max(1, size)
        unit = PAGE_BYTES if need >= PAGE_BYTES else LINE_BYTES
        fitting = [-(-low // unit) * unit for low, high in self._gaps() if -(-low // unit) * unit + need <= high]
        start = self.extents.take(size)
        # The lowest that fits, and one wherever there is one.
        assert start == (min(fitting) if fitting else None)
        if start is not None:
            self.taken[start] = need

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        self.extents.give_back(start)
        del self.taken[start]

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), size=SIZES)
    def trim(self, data: st.DataObject, size: int) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        self.extents.trim(start, size)
        self.taken[start] = min(self.taken[start], round_up(size))

    @rule(size=st.integers(0, 60).map(lambda pages: pages * PAGE_BYTES))
    def grow(self, size: int) -> None:
        before = self.extents.size_bytes
        self.extents.grow(size)
        assert self.extents.size_bytes == max(before, size)

    @invariant()
    def it_is_consistent(self) -> None:
        if not hasattr(self, "extents"):
            return
        self.extents.check()
        assert sorted(self.extents.taken) == sorted(self.taken)
        assert self.extents.taken_bytes == sum(self.taken.values())

    def teardown(self) -> None:
        for start in list(getattr(self, "taken", ())):
            self.extents.give_back(start)
        if hasattr(self, "extents"):
            self.extents.check()
            assert self.extents.taken_bytes == 0
            # All of it is one range again.
            whole = self.extents.size_bytes
            assert self.extents.take(whole) == (0 if whole else None)


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(deadline=None, max_examples=150, stateful_step_count=60)


def test_large_elements_begin_at_pages_and_small_ones_at_lines() -> None:
    extents = Extents(10 * PAGE_BYTES)
    assert extents.take(10) == 0
    assert extents.take(10) == LINE_BYTES
    assert extents.take(PAGE_BYTES) == PAGE_BYTES
    # What is left before the page is not lost.
    assert extents.take(10) == 2 * LINE_BYTES
    assert extents.take(0) == 3 * LINE_BYTES


def test_what_is_too_large_has_no_place_until_there_is_more() -> None:
    extents = Extents(PAGE_BYTES)
    assert extents.take(2 * PAGE_BYTES) is None
    extents.grow(3 * PAGE_BYTES)
    assert extents.take(2 * PAGE_BYTES) == 0
    extents.check()
