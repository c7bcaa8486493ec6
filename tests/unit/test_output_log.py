"""The kept output of a run."""

from __future__ import annotations

import os
import resource
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas_magic.runner.output_log import OutputLog, Piece
from taas_magic.wire import DisplayKind, StreamKind

KINDS = [*StreamKind.__args__, *DisplayKind.__args__]  # type: ignore[attr-defined]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[OutputLog]:
    log = OutputLog(tmp_path)
    yield log
    log.close()


def pieces(log: OutputLog) -> list[Piece]:
    return [log.read(index) for index in range(len(log))]


def test_pieces_are_read_as_they_were_written(log: OutputLog) -> None:
    for kind in KINDS:
        log.append(3, kind, kind.encode(), sealed=len(log))
    assert pieces(log) == [Piece(3, kind, kind.encode()) for kind in KINDS]
    assert [piece.is_stream for piece in pieces(log)] == [kind in ("stdout", "stderr") for kind in KINDS]


def test_small_pieces_of_one_stream_join(log: OutputLog) -> None:
    for text in (b"a", b"b", b"c"):
        log.append(0, "stdout", text, sealed=0)
    assert pieces(log) == [Piece(0, "stdout", b"abc")]


def test_what_was_sent_is_not_added_to(log: OutputLog) -> None:
    log.append(0, "stdout", b"a", sealed=0)
    log.append(0, "stdout", b"b", sealed=1)
    log.append(0, "stdout", b"c", sealed=1)
    assert [piece.data for piece in pieces(log)] == [b"a", b"bc"]


def test_ranks_streams_and_displays_do_not_join(log: OutputLog) -> None:
    for rank, kind in ((0, "stdout"), (1, "stdout"), (1, "stderr"), (1, "display"), (1, "display")):
        log.append(rank, kind, b"x", sealed=0)
    assert len(log) == 5


def test_pieces_do_not_join_without_bound(log: OutputLog) -> None:
    for _ in range(100):
        log.append(0, "stdout", b"x" * 4000, sealed=0)
    assert 1 < len(log) < 20
    assert max(len(piece.data) for piece in pieces(log)) <= 64 * 1024


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(KINDS), st.binary(max_size=9) | st.just(b"y" * 70_000), st.booleans()
        ),
        max_size=40,
    )
)
def test_whatever_is_written_is_read_in_order(written: list[tuple[int, str, bytes, bool]]) -> None:
    log, sealed = OutputLog(Path("/tmp")), 0
    for rank, kind, data, sends in written:
        log.append(rank, kind, data, sealed=sealed)
        if sends:
            sealed = len(log)
    for rank in range(3):
        of_rank = list(log.of_rank(rank))
        for kind in KINDS[:2]:
            expected = b"".join(data for r, k, data, _ in written if (r, k) == (rank, kind))
            assert b"".join(piece.data for piece in of_rank if piece.kind == kind) == expected
        displayed = [(kind, data) for r, kind, data, _ in written if r == rank and kind not in KINDS[:2]]
        assert [(piece.kind, piece.data) for piece in of_rank if not piece.is_stream] == displayed
    order = [(rank, kind) for rank, kind, data, _ in written]
    read = [(piece.rank, piece.kind) for piece in pieces(log)]
    assert [each for each, before in zip(order, [None, *order], strict=False) if each != before] == [
        each for each, before in zip(read, [None, *read], strict=False) if each != before
    ]
    assert log.size_bytes == sum(len(data) for _, _, data, _ in written)
    log.close()


# -- the tail --------------------------------------------------------------------------------------------------------


def test_the_tail_is_the_last_lines_of_one_rank(log: OutputLog) -> None:
    for step in range(50):
        log.append(step % 2, "stdout", b"step %d\n" % step, sealed=len(log))
        log.append(1, "display", b"{}", sealed=len(log))
    log.append(1, "stderr", b"Segmentation fault", sealed=len(log))
    assert log.tail(1, 3) == "step 47\nstep 49\nSegmentation fault"
    assert log.tail(0, 2) == "step 46\nstep 48"
    assert log.tail(7, 3) == ""
    assert log.tail(1, 0) == ""


def test_the_tail_of_a_line_without_an_end_is_bounded(log: OutputLog) -> None:
    for _ in range(20):
        log.append(0, "stdout", b"x" * 50_000, sealed=len(log))
    assert len(log.tail(0, 20, max_bytes=100_000)) == 100_000


def test_the_tail_of_what_is_no_text(log: OutputLog) -> None:
    log.append(0, "stdout", b"\xff\xfe\n\xc3", sealed=0)
    assert log.tail(0, 2) == "\ufffd\ufffd\n\ufffd"


# -- much, and too much ----------------------------------------------------------------------------------------------


def test_a_million_pieces_cost_some_bytes_each(log: OutputLog) -> None:
    num_pieces = 200_000
    tracemalloc.start()
    for index in range(num_pieces):
        log.append(index % 8, "stdout", b"a\n", sealed=len(log))
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(log) == num_pieces
    assert size_bytes < 40 * num_pieces
    assert log.tail(0, 2) == "a\na"
    assert sum(1 for _ in log.of_rank(3)) == num_pieces // 8


@pytest.fixture
def full_disk() -> Iterator[int]:
    """A file may not get larger than this; writing more fails as on a full disk, since the signal is ignored."""
    import signal

    limit = 100_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_said_once_and_nobody_is_held_up(log: OutputLog, full_disk: int) -> None:
    log.append(0, "stdout", b"before\n", sealed=0)
    for _ in range(5):
        log.append(1, "stdout", b"x" * 60_000, sealed=len(log))
    log.append(2, "stderr", b"small things still fit\n", sealed=len(log))
    read = pieces(log)
    notices = [piece for piece in read if b"output is being lost" in piece.data]
    assert len(notices) == 1
    assert notices[0].kind == "stderr"
    assert os.strerror(27).encode() in notices[0].data
    assert log.lost_bytes == 4 * 60_000
    assert read[0].data == b"before\n"
    assert read[-1].data == b"small things still fit\n"
    assert log.size_bytes <= full_disk
    assert "output is being lost" in log.tail(1, 5)


def test_the_file_has_no_name_and_goes_with_the_log(tmp_path: Path) -> None:
    log = OutputLog(tmp_path)
    log.append(0, "stdout", b"x", sealed=0)
    assert not list(tmp_path.iterdir())
    log.close()
    assert sys.getsizeof(log)
