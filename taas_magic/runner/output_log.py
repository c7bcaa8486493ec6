"""The kept output of a run: every piece, in the order in which it came, readable again at any time.

Pieces lie in an unlinked temporary file; an index of them in memory. What is sent to the kernel is read from here, as
fast as the kernel takes it, so that a slow notebook costs disk and never a rank's time.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from taas_magic.wire import DisplayKind, StreamKind

_COALESCE_BYTES = 64 * 1024
_STREAMS: tuple[str, ...] = get_args(StreamKind)
_KINDS: tuple[str, ...] = (*_STREAMS, *get_args(DisplayKind))


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of output of one rank; ``kind`` is a stream or a kind of display."""

    rank: int
    #: Any is one of :data:`taas_magic.wire.StreamKind` and :data:`taas_magic.wire.DisplayKind`.
    kind: Any
    data: bytes

    @property
    def is_stream(self) -> bool:
        """Whether it was written to a stream, and not displayed."""
        return self.kind in _STREAMS


class OutputLog:
    """An append-only log of pieces. One writer; any number of readers.

    Args:
        directory: Where the file is; it never has a name there.
    """

    def __init__(self, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - lives as long as the log
        self._fd = self._file.fileno()
        self._directory = directory
        self._end = 0
        #: Bytes that there was no room for.
        self.lost_bytes = 0
        # One column a field: a log may have millions of pieces.
        self._ranks, self._kinds, self._offsets, self._sizes = array("H"), array("B"), array("Q"), array("Q")
        #: What the log itself has to say, by position; it is not in the file.
        self._notices: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self._sizes)

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return self._end

    def append(self, rank: int, kind: str, data: bytes, *, sealed: int) -> None:
        """Add a piece; small ones of a stream join the last piece unless that is before ``sealed`` (already sent).

        Where the disk has no room the piece is lost, and the log says so once: a rank is never held up by that.
        """
        try:
            self._write(data)
        except OSError as error:
            self._lose(rank, len(data), error)
            return
        code = _KINDS.index(kind)
        if self._joins_last(rank, code, len(data), sealed):
            self._sizes[-1] += len(data)
        else:
            self._enter(rank, code, self._end, len(data))
        self._end += len(data)

    def _write(self, data: bytes) -> None:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], self._end + done)

    def _joins_last(self, rank: int, code: int, size_bytes: int, sealed: int) -> bool:
        last = len(self._sizes) - 1
        return (
            last >= sealed
            and code < len(_STREAMS)
            and self._ranks[last] == rank
            and self._kinds[last] == code
            and last not in self._notices
            and self._sizes[last] + size_bytes <= _COALESCE_BYTES
        )

    def _enter(self, rank: int, code: int, offset: int, size_bytes: int) -> None:
        self._ranks.append(rank)
        self._kinds.append(code)
        self._offsets.append(offset)
        self._sizes.append(size_bytes)

    def _lose(self, rank: int, size_bytes: int, error: OSError) -> None:
        if not self.lost_bytes:
            notice = (
                f"taas: output is being lost, since it cannot be kept in {self._directory}: {error.strerror}\n"
            ).encode()
            self._notices[len(self._sizes)] = notice
            self._enter(rank, _KINDS.index("stderr"), 0, len(notice))
        self.lost_bytes += size_bytes

    def rank_of(self, index: int) -> int:
        """Whose the piece at a position is."""
        return self._ranks[index]

    def read(self, index: int) -> Piece:
        """The piece at a position."""
        data = self._notices.get(index)
        if data is None:
            data = os.pread(self._fd, self._sizes[index], self._offsets[index])
        return Piece(self._ranks[index], _KINDS[self._kinds[index]], data)

    def of_rank(self, rank: int) -> Iterator[Piece]:
        """All pieces of a rank that are there now."""
        for index in range(len(self._sizes)):
            if self._ranks[index] == rank:
                yield self.read(index)

    def tail(self, rank: int, num_lines: int, max_bytes: int = 256 * 1024) -> str:
        """The last lines that a rank wrote to its streams; of a line longer than ``max_bytes``, its end."""
        collected: list[bytes] = []
        size_bytes = num_breaks = 0
        for index in range(len(self._sizes) - 1, -1, -1):
            if self._ranks[index] != rank or self._kinds[index] >= len(_STREAMS):
                continue
            data = self.read(index).data
            collected.append(data)
            size_bytes += len(data)
            num_breaks += data.count(b"\n")
            if size_bytes >= max_bytes or num_breaks > num_lines:
                break
        text = b"".join(reversed(collected))[-max_bytes:].decode("utf-8", "replace")
        lines = text.rstrip("\n").split("\n")
        return "\n".join(lines[max(0, len(lines) - num_lines) :])

    def close(self) -> None:
        """Let the file go."""
        self._file.close()
