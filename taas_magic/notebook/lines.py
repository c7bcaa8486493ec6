"""Keeps the lines of ranks whole that write at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: How long a rank's text waits at most for another rank to finish its line.
PATIENCE_S = 0.25


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of what a rank wrote to "stdout" or "stderr"."""

    rank: int
    stream: str
    text: str


class LineOrder:
    """Puts texts into an order in which no rank comes between the parts of another rank's line.

    ``print(a, b)`` is several writes, and a piece may end anywhere. So while a line of one rank is unfinished, texts of
    others wait; but never long, since a progress bar may not finish its line for hours.
    """

    def __init__(self) -> None:
        #: The rank whose line is unfinished; None where the last line is complete.
        self.unfinished: int | None = None
        self._waiting: list[tuple[float, Text]] = []

    def put(self, piece: Text, now: float) -> Iterator[Text]:
        """Take a piece; yields what is to be shown now, in order. ``now`` is in seconds on any steady clock."""
        is_behind = any(waiting.rank == piece.rank for _, waiting in self._waiting)
        if is_behind or self.unfinished not in (None, piece.rank):
            self._waiting.append((now, piece))
            yield from self.tick(now)
            return
        yield from self._show(piece)
        if self.unfinished is None:
            yield from self._release()

    def tick(self, now: float) -> Iterator[Text]:
        """Yield what has waited too long, with all that waits behind it."""
        while self._waiting and now - self._waiting[0][0] >= PATIENCE_S:
            self.unfinished = None
            yield from self._release()

    def end(self) -> Iterator[Text]:
        """Yield all that waits."""
        while self._waiting:
            self.unfinished = None
            yield from self._release()

    def _show(self, piece: Text) -> Iterator[Text]:
        whole, newline, rest = piece.text.rpartition("\n")
        if newline and rest and self._waiting:
            # Whoever waits gets the place between the lines; the begun line goes on behind them.
            self.unfinished = None
            yield Text(piece.rank, piece.stream, whole + newline)
            self._waiting.append((self._waiting[-1][0], Text(piece.rank, piece.stream, rest)))
            return
        self.unfinished = piece.rank if rest else None
        yield piece

    def _release(self) -> Iterator[Text]:
        """Yield waiting texts in order, as far as no line is left unfinished by another rank."""
        has_shown = True
        while has_shown:
            has_shown = False
            waiting, self._waiting = self._waiting, []
            for since, piece in waiting:
                if self.unfinished in (None, piece.rank) and not any(p.rank == piece.rank for _, p in self._waiting):
                    self.unfinished = None if piece.text.endswith("\n") else piece.rank
                    has_shown = True
                    yield piece
                else:
                    self._waiting.append((since, piece))
