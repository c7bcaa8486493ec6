"""One registered loader over a run: its iterations, one after the other, and what is known of its elements. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from taas_magic.data.iteration import Candidate, Iteration, StreamSpec
from taas_magic.wire_data import MadeElement, Position

#: What an element is expected to take goes down by so much with each that is smaller.
_DECAY = 0.995
_MIN_WEIGHT = 0.02
_TOLD_SKIPS = 3


class Stream:
    """The elements of one loader."""

    def __init__(self, spec: StreamSpec, number: int, num_ranks: int) -> None:
        self.spec, self.number, self.num_ranks = spec, number, num_ranks
        self.iterations: dict[int, Iteration] = {}
        #: The iteration that no rank has opened yet and nobody has prepared.
        self.next_iteration = 0
        self._next_epoch = spec.start.epoch
        self._first_element = spec.start.element
        self._seed = spec.start.seed
        self._units = spec.start.units
        self.units_left = None if spec.units is None else max(0, spec.units - spec.start.units)
        #: What ``set_epoch`` is expected to be told next, and what a rank said last.
        self._expected_epoch = spec.start.epoch
        self._said_epoch: int | None = None
        #: Of the elements that it yields: bytes to set aside for the next one, and seconds to make one.
        self.usual_bytes = 0
        self.element_s = 0.0
        self.num_made = 0
        self.num_skipped = 0
        #: What lies ready and is not handed out.
        self.num_ready = 0
        self.ready_bytes = 0
        #: Iterations that begin again if a rank still comes for them.
        self._retired: dict[int, Iteration] = {}
        self._has_told_of_tail = False
        self._has_told_of_units = False

    # -- iterations ----------------------------------------------------------------------------------------------

    def open(self, index: int) -> Iteration:
        """An iteration; a new one begins where the one before it ends, as far as that is known."""
        iteration = self.iterations.get(index)
        if index in self._retired:
            iteration = self.iterations[index] = self._retired.pop(index)
        if iteration is None:
            start = Position(self._seed, self._next_epoch, self._first_element, self._units)
            iteration = self._add(index, start, self._expected_epoch)
            if self._said_epoch is None or self._expected_epoch != self._said_epoch:
                self._expected_epoch += 1
            self._next_epoch += 1
            self._first_element = 0
            self.next_iteration = max(self.next_iteration, index + 1)
        return iteration

    def retire(self, index: int) -> None:
        """Put an iteration away that ranks have left behind: those that have not been there may never come."""
        iteration = self.iterations.pop(index)
        again = Iteration(
            self.spec, self.number, index, self.num_ranks, iteration.start, units_left=iteration.units_left_at_start
        )
        again.sampler_epoch = iteration.sampler_epoch
        for view, before in zip(again.ranks, iteration.ranks, strict=True):
            view.is_open, view.is_closed = before.is_open, before.is_closed
        self._retired[index] = again

    def restart(self, index: int, start: Position, sampler_epoch: int | None) -> Iteration:
        """Put another iteration in the place of one that was dropped."""
        self._seed, self._units = start.seed, start.units
        self._next_epoch = start.epoch + 1
        self.next_iteration = index + 1
        if self.spec.units is not None:
            self.units_left = max(0, self.spec.units - start.units)
        return self._add(index, start, sampler_epoch)

    def _add(self, index: int, start: Position, sampler_epoch: int | None) -> Iteration:
        iteration = Iteration(self.spec, self.number, index, self.num_ranks, start, units_left=self.units_left)
        iteration.sampler_epoch = sampler_epoch
        self.iterations[index] = iteration
        if self.units_left == 0:
            iteration.end(is_used_up=True)
        return iteration

    def expect_epoch(self, said: int) -> None:
        """A cell that tells its sampler of each epoch does so for the next one, and one that does not, does not."""
        self._expected_epoch = said + (said != self._said_epoch)
        self._said_epoch = said

    @property
    def wants_next(self) -> bool:
        """Whether the next iteration is to be prepared: at the start, and when the latest one is planned to its end."""
        if self.units_left == 0 and self.iterations:
            return False
        latest = self.iterations.get(self.next_iteration - 1)
        is_planned_out = latest is not None and latest.has_ended and latest.is_wanted and not latest.num_planned
        return not self.next_iteration or is_planned_out

    def note_progress(self, iteration: Iteration) -> None:
        """Note how far an iteration is dealt: the next one begins behind that."""
        if self.units_left is not None and iteration.index == self.next_iteration - 1:
            self.units_left = iteration.units_left
        self._units = max(self._units, iteration.units)
        self._next_epoch = max(self._next_epoch, iteration.epoch + 1)

    # -- elements ------------------------------------------------------------------------------------------------

    def note_made(self, element: MadeElement) -> None:
        """Learn from an element what the next ones will be like."""
        self.num_made += 1
        self.element_s += (element.seconds - self.element_s) * max(_MIN_WEIGHT, 1 / self.num_made)
        self.usual_bytes = max(element.size_bytes, int(self.usual_bytes * _DECAY))

    def note_ready(self, candidate: Candidate) -> None:
        """Note that an element lies ready."""
        self.num_ready += 1
        self.ready_bytes += candidate.size_bytes

    def note_gone(self, candidate: Candidate) -> None:
        """Note that an element that lay ready does no more: it was handed out, or given up."""
        self.num_ready -= 1
        self.ready_bytes -= candidate.size_bytes

    # -- what to tell --------------------------------------------------------------------------------------------

    def notices(self, iteration: Iteration) -> Iterator[str]:
        """What the user should know of an iteration, once."""
        name = self.spec.name
        if iteration.dropped and not self._has_told_of_tail:
            self._has_told_of_tail = True
            count = iteration.dropped
            what = "element of an epoch is" if count == 1 else f"{count} elements of an epoch are"
            yield (
                f"`{name}`: the last {what} dropped: that is no full round on {self.num_ranks} ranks; "
                '`tail="pad"` fills it instead'
            )
        if iteration.is_uneven and not self._has_told_of_tail:
            self._has_told_of_tail = True
            yield (
                f"`{name}`: the last round has too few samples for {self.num_ranks} ranks, so some end one step "
                "earlier; a collective in that step would wait for them"
            )
        if iteration.is_wanted:
            # What is only prepared may never be wanted, or be made once more for another iteration.
            for text in iteration.skips:
                self.num_skipped += 1
                if self.num_skipped <= _TOLD_SKIPS or self.num_skipped % 100 == 0:
                    yield f"`{name}`: {text}"
            iteration.skips.clear()
        is_over = iteration.is_used_up and iteration.is_wanted and not iteration.num_planned
        if is_over and not self._has_told_of_units:
            self._has_told_of_units = True
            yield f"`{name}`: the units are used up: {iteration.units} of {self.spec.units}"
