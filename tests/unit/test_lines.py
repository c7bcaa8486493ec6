"""Lines of ranks that write at the same time: whole, complete, in order, and never held for long."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from taas_magic.notebook.lines import PATIENCE_S, LineOrder, Text


def shown(order: LineOrder, *pieces: tuple[int, str], now: float = 0.0) -> str:
    return "".join(piece.text for rank, text in pieces for piece in order.put(Text(rank, "stdout", text), now))


def test_parts_of_a_line_are_not_torn_apart() -> None:
    assert shown(LineOrder(), (0, "a "), (1, "b "), (0, "a\n"), (1, "b\n")) == "a a\nb b\n"


def test_who_waits_comes_between_two_lines_of_a_loud_rank() -> None:
    assert shown(LineOrder(), (0, "a1\na"), (1, "b1\n"), (0, "2\na"), (0, "3\n")) == "a1\na2\nb1\na3\n"


def test_a_line_that_does_not_end_holds_nobody_for_long() -> None:
    order = LineOrder()
    assert shown(order, (0, "50%"), (1, "hello\n")) == "50%"
    assert list(order.tick(PATIENCE_S / 2)) == []
    assert [piece.text for piece in order.tick(PATIENCE_S)] == ["hello\n"]


def test_a_bar_that_keeps_growing_holds_nobody_either() -> None:
    order = LineOrder()
    assert shown(order, (0, "50%"), (1, "hello\n")) == "50%"
    assert "hello\n" in shown(order, (2, "x"), now=PATIENCE_S)


WRITES = st.lists(st.tuples(st.integers(0, 3), st.text("xy\n", min_size=1, max_size=6), st.floats(0, 0.2)), max_size=40)


@given(WRITES)
def test_nothing_is_lost_doubled_or_reordered_within_a_rank(writes: list[tuple[int, str, float]]) -> None:
    order, now = LineOrder(), 0.0
    out: list[Text] = []
    for rank, text, pause in writes:
        now += pause
        out += order.put(Text(rank, "stdout", text), now)
        out += order.tick(now)
    out += order.end()
    came: dict[int, str] = defaultdict(str)
    went: dict[int, str] = defaultdict(str)
    for rank, text, _ in writes:
        went[rank] += text
    for piece in out:
        came[piece.rank] += piece.text
    assert came == went


@given(st.lists(st.tuples(st.integers(0, 3), st.text("xy\n", min_size=1, max_size=6)), max_size=40))
def test_without_delays_no_line_is_shared(writes: list[tuple[int, str]]) -> None:
    order = LineOrder()
    out = [piece for rank, text in writes for piece in order.put(Text(rank, "stdout", text), 0.0)]
    for before, after in itertools.pairwise(out):
        assert before.rank == after.rank or before.text.endswith("\n")
