"""The kept output of a run: every piece, in the order in which it came, readable again at any time.

Pieces lie in an unlinked temporary file; an index of them in memory. What is sent to the kernel is read from here, as fast as
the kernel takes it, so that a slow notebook costs disk and never a rank's time.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COALESCE_BYTES = 64 * 1024
_KINDS = ("stdout", "stderr", "display", "update", "clear", "result", "comm")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of output of one rank; ``kind`` is a stream or a kind of display."""

    rank: int
    kind: str
    data: bytes

    @property
    def is_stream(self) -> bool:
        return self.kind in ("stdout", "stderr")


class OutputLog:
    """An append-only log of pieces. One writer; any number of cursors."""

    def __init__(self, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - lives as long as the log
        self._fd = self._file.fileno()
        self._end = 0
        # One column a field: a log may have millions of pieces.
        self._ranks, self._kinds, self._offsets, self._sizes = array("H"), array("B"), array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def size_bytes(self) -> int:
        return self._end

    def append(self, rank: int, kind: str, data: bytes, *, sealed: int) -> None:
        """Add a piece; small ones of a stream join the last piece unless that is before ``sealed`` (already sent)."""
        os.pwrite(self._fd, data, self._end)
        code = _KINDS.index(kind)
        last = len(self._sizes) - 1
        joins = (
            last >= sealed
            and code < 2
            and self._ranks[last] == rank
            and self._kinds[last] == code
            and self._sizes[last] + len(data) <= _COALESCE_BYTES
        )
        if joins:
            self._sizes[last] += len(data)
        else:
            self._ranks.append(rank)
            self._kinds.append(code)
            self._offsets.append(self._end)
            self._sizes.append(len(data))
        self._end += len(data)

    def rank_of(self, index: int) -> int:
        return self._ranks[index]

    def read(self, index: int) -> Piece:
        """The piece at a position."""
        data = os.pread(self._fd, self._sizes[index], self._offsets[index])
        return Piece(self._ranks[index], _KINDS[self._kinds[index]], data)

    def of_rank(self, rank: int) -> Iterator[Piece]:
        """All pieces of a rank that are there now."""
        for index in range(len(self._sizes)):
            if self._ranks[index] == rank:
                yield self.read(index)

    def tail(self, rank: int, num_lines: int, max_bytes: int = 256 * 1024) -> str:
        """The last lines that a rank wrote to its streams."""
        collected: list[bytes] = []
        size = 0
        for index in range(len(self._sizes) - 1, -1, -1):
            if self._ranks[index] == rank and self._kinds[index] < 2:
                collected.append(self.read(index).data)
                size += len(collected[-1])
                if size >= max_bytes or sum(part.count(b"\n") for part in collected) > num_lines:
                    break
        text = b"".join(reversed(collected)).decode("utf-8", "replace")
        return "\n".join(text.rstrip("\n").split("\n")[-num_lines:])

    def close(self) -> None:
        self._file.close()
