"""One iteration of a loader: what is planned, what is dealt to which rank, and how far each rank has come. No I/O.

A *candidate* is an element that is to be made. Candidates come in the order of the epoch; they are dealt to the ranks
by complete rounds. Where it is known beforehand that a candidate will be an element, it is dealt when it is planned;
where only making it tells (streams of unknown length, elements that may be skipped, units that elements say), when it
has been made.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from taas_magic.wire_data import Position, Trouble

_BEGINNING = Position(0, 0, 0)


@dataclass(frozen=True)
class StreamSpec:
    """How one loader is delivered.

    Attributes:
        is_map: Its sampler says what the elements are made of; otherwise only iterating tells.
        num_shards: Logical workers that each go through their part in order; 0 where any producer makes any element.
    """

    name: str
    is_map: bool
    num_shards: int = 0
    drops_tail: bool = True
    pads_tail: bool = False
    skips_errors: bool = False
    units: int | None = None
    cycles: bool = False
    #: It is not prepared further than its first rounds before a rank wants it.
    is_lazy: bool = False
    start: Position = _BEGINNING

    @property
    def is_dealt_early(self) -> bool:
        """Whether a planned candidate surely is an element, of one unit."""
        return self.is_map and not self.skips_errors and self.units is None


@dataclass(slots=True, eq=False)
class Candidate:
    """An element that is to be made, is there, or was taken."""

    #: Its place among all candidates of the iteration.
    place: int
    epoch: int
    element: int
    keys: bytes
    #: The same number finds it among what a producer was told.
    is_void: bool = False
    is_made: bool = False
    #: Where it lies; -1 while it does not.
    offset: int = -1
    size_bytes: int = 0
    units: int = 1
    #: The lease under which it lies where it does.
    ticket: int = -1
    leases: int = 0
    trouble: Trouble | None = None
    #: How many producers have ended while they made it.
    kills: int = 0
    rank: int = -1
    step: int = -1
    is_pushed: bool = False
    is_taken: bool = False
    #: The position behind the round that it was dealt in.
    behind: Position | None = None

    @property
    def is_settled(self) -> bool:
        """Whether what becomes of it is known: it has been made at least once, or cannot be made."""
        return self.is_made or self.trouble is not None

    @property
    def wants_content(self) -> bool:
        """Whether somebody has to make it."""
        return not (
            self.is_void
            or self.offset >= 0
            or self.leases
            or self.is_taken
            or self.is_pushed
            or self.trouble is not None
        )


@dataclass(slots=True)
class RankView:
    """How far a rank is in an iteration."""

    is_open: bool = False
    is_closed: bool = False
    is_waiting: bool = False
    #: Elements that it has taken, and how many were sent to it.
    taken: int = 0
    pushed: int = 0
    end_is_told: bool = False
    #: What was dealt to it and is not taken, in order.
    dealt: deque[Candidate] = field(default_factory=deque)
    #: Of those, what has to be made, by step.
    due: list[tuple[int, int, Candidate]] = field(default_factory=list)
    steps: int = 0


_serials = itertools.count()


class Iteration:
    """One iteration of a loader on all ranks."""

    def __init__(
        self, spec: StreamSpec, loader: int, index: int, num_ranks: int, start: Position, *, units_left: int | None
    ) -> None:
        #: No other iteration has it, not even one in the same place.
        self.serial = next(_serials)
        self.spec, self.loader, self.index, self.num_ranks = spec, loader, index, num_ranks
        self.start = start
        self.epoch = start.epoch
        self.seed = start.seed
        self.units = start.units
        self.units_left = self.units_left_at_start = units_left
        self.ranks = [RankView() for _ in range(num_ranks)]
        #: What was planned and not dealt, in order; and what of that has to be made.
        self.undealt: deque[Candidate] = deque()
        self.fresh: list[tuple[int, int, Candidate]] = []
        #: The sampler has said all of the epoch; a shard has ended there.
        self.is_planned_out = False
        self.is_planning = False
        self.shard_ends: dict[int, int] = {}
        self.next_element = start.element
        self.rounds = 0
        self.rounds_of_epoch = 0
        #: No more will be dealt.
        self.has_ended = False
        self.is_used_up = False
        self.dropped = 0
        #: Uneven: some ranks have one step less than others.
        self.is_uneven = False
        #: What the sampler was told on the ranks.
        self.sampler_epoch: int | None = None
        #: Keys by place of the epoch, for logical workers that have to begin again.
        self.history: list[bytes] = []
        #: The first elements of the epoch, to fill up its last round with.
        self._padding: list[Candidate] = []
        self._num_candidates = 0
        #: What nobody wants any more; some of it may lie ready.
        self.voided: list[Candidate] = []
        #: Elements that were skipped and are not counted yet, in words.
        self.skips: list[str] = []

    @property
    def said_epoch(self) -> int | None:
        """What the sampler is to be told of the epoch that is planned."""
        return None if self.sampler_epoch is None else self.sampler_epoch + self.epoch - self.start.epoch

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, tasks: list[bytes], *, is_last: bool) -> None:
        """Note what the sampler says."""
        for keys in tasks:
            self._add(keys)
        self.is_planning = False
        self.is_planned_out = self.is_planned_out or is_last

    def fail_planning(self, trouble: Trouble) -> None:
        """Note that the sampler has raised, behind what it has said."""
        in_part = sum(not candidate.is_void for candidate in self.undealt) % self.num_ranks
        # A whole round of it, so that it reaches all ranks, and what is missing to a whole round before that.
        count = (self.num_ranks - in_part) % self.num_ranks + self.num_ranks
        self.plan([b""] * count, is_last=True)
        for candidate in itertools.islice(reversed(self.undealt), count):
            candidate.trouble = trouble

    def plan_stream(self, how_many: int) -> None:
        """Plan that shards are gone through further, where no sampler says what there is."""
        shards = self.spec.num_shards
        while how_many and len(self.shard_ends) < shards:
            shard = self.next_element % shards
            if shard in self.shard_ends:
                self.next_element += 1
                continue
            self._add(b"")
            how_many -= 1

    def _add(self, keys: bytes) -> None:
        candidate = self._new(self.epoch, self.next_element, keys)
        self.next_element += 1
        self.undealt.append(candidate)
        if not self.spec.is_dealt_early:
            heapq.heappush(self.fresh, (candidate.place, 0, candidate))

    def _new(self, epoch: int, element: int, keys: bytes) -> Candidate:
        self._num_candidates += 1
        return Candidate(self._num_candidates, epoch, element, keys)

    def shard_ended(self, element: int) -> None:
        """Note that there is no such element, nor any further one of its shard."""
        shards = self.spec.num_shards
        shard = element % shards
        self.shard_ends[shard] = min(element, self.shard_ends.get(shard, element))
        for candidate in self.undealt:
            if candidate.epoch == self.epoch and candidate.element % shards == shard and candidate.element >= element:
                self._void(candidate)
        if len(self.shard_ends) == shards:
            self.is_planned_out = True

    # -- dealing -------------------------------------------------------------------------------------------------

    def deal(self) -> None:
        """Deal all rounds that are complete; at the end of an epoch begin the next one where there is to be one."""
        while not self.has_ended:
            if self._deal_round():
                continue
            if not (self.is_planned_out and self._is_settled_out()):
                return
            self._end_epoch()

    def _is_settled_out(self) -> bool:
        """Whether what is left undealt of the epoch is known, all of it."""
        return all(c.is_void or self.spec.is_dealt_early or c.is_settled for c in self.undealt)

    def _deal_round(self) -> bool:
        self._drop_void()
        chosen: list[Candidate] = []
        for candidate in self.undealt:
            if candidate.is_void:
                continue
            if not self.spec.is_dealt_early and not candidate.is_settled:
                return False
            chosen.append(candidate)
            if len(chosen) == self.num_ranks:
                break
        else:
            return False
        units = sum(candidate.units for candidate in chosen)
        if self.units_left is not None and units > self.units_left:
            self.end(is_used_up=True)
            return True
        while self.undealt and (self.undealt[0].is_void or self.undealt[0].place <= chosen[-1].place):
            self.undealt.popleft()
        self._hand_out(chosen, units)
        return True

    def _hand_out(self, chosen: list[Candidate], units: int) -> None:
        self.units += units
        if self.units_left is not None:
            self.units_left -= units
        behind = Position(self.seed, self.epoch, chosen[-1].element + 1, self.units)
        for rank, candidate in enumerate(chosen):
            view = self.ranks[rank]
            candidate.rank, candidate.step, candidate.behind = rank, self.rounds, behind
            view.dealt.append(candidate)
            view.steps += 1
            self.want(candidate)
        if self.spec.pads_tail and not self.rounds_of_epoch:
            self._padding = chosen
        self.rounds += 1
        self.rounds_of_epoch += 1
        if self.units_left == 0:
            self.end(is_used_up=True)

    def _end_epoch(self) -> None:
        self._drop_void()
        left = [candidate for candidate in self.undealt if not candidate.is_void]
        if left and self.spec.pads_tail and not self._padding:
            self._padding = left
        if left and self.spec.pads_tail:
            missing = self.num_ranks - len(left)
            fill = [self._padding[index % len(self._padding)] for index in range(missing)]
            for original in fill:
                candidate = self._new(original.epoch, original.element, original.keys)
                candidate.is_made = original.is_made
                candidate.units, candidate.trouble = original.units, original.trouble
                left.append(candidate)
            units = sum(candidate.units for candidate in left)
            self.undealt.clear()
            if self.units_left is not None and units > self.units_left:
                self.end(is_used_up=True)
                return
            self._hand_out(left, units)
        elif left and self.spec.drops_tail:
            self.dropped += len(left)
            for candidate in left:
                self._void(candidate)
            self.undealt.clear()
        elif left:
            self.is_uneven = True
            self.undealt.clear()
            self._hand_out(left, sum(candidate.units for candidate in left))
        if self.has_ended:
            return
        if self.spec.cycles and self.units_left and self.rounds_of_epoch:
            self._begin_epoch()
        else:
            self.end(is_used_up=False)

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.next_element = self.rounds_of_epoch = 0
        self.is_planned_out = self.is_planning = False
        self.shard_ends.clear()
        self.history.clear()
        self._padding = []

    def end(self, *, is_used_up: bool) -> None:
        """Deal no more."""
        self.has_ended, self.is_used_up = True, is_used_up
        for candidate in self.undealt:
            self._void(candidate)
        self.fresh.clear()

    def _void(self, candidate: Candidate) -> None:
        candidate.is_void = True
        self.voided.append(candidate)

    def _drop_void(self) -> None:
        while self.undealt and self.undealt[0].is_void:
            self.undealt.popleft()

    # -- what is to be made --------------------------------------------------------------------------------------

    def want(self, candidate: Candidate) -> None:
        """Have a candidate made, again where it had been."""
        if not candidate.wants_content:
            return
        if candidate.rank >= 0:
            heapq.heappush(self.ranks[candidate.rank].due, (candidate.step, candidate.place, candidate))
        elif not self.has_ended:
            heapq.heappush(self.fresh, (candidate.place, 0, candidate))

    def next_wanted(self) -> tuple[int, Candidate] | None:
        """The candidate that is wanted first, and how many rounds it is ahead of the rank that is to get it."""
        best: tuple[int, Candidate] | None = None
        foremost = max(view.taken for view in self.ranks)
        for view in self.ranks:
            candidate = _first(view.due)
            if candidate is None:
                continue
            ahead = candidate.step - view.taken + self._lag(view, foremost)
            if best is None or ahead < best[0]:
                best = ahead, candidate
        fresh = _first(self.fresh)
        if fresh is not None:
            ahead = self.distance(fresh)
            if best is None or ahead < best[0]:
                best = ahead, fresh
        return best

    def _lag(self, view: RankView, foremost: int) -> int:
        """Rounds by which what a rank is dealt may wait: one that stays behind the others may never come.

        What goes through shards in order is not kept waiting: it would have to begin again.
        """
        return 0 if view.is_waiting or self.spec.num_shards else foremost - view.taken

    def take_wanted(self, candidate: Candidate) -> None:
        """Note that somebody makes it now."""
        heap = self.ranks[candidate.rank].due if candidate.rank >= 0 else self.fresh
        # Something that is needed sooner may have come before it meanwhile; it is passed over later, then.
        if heap and heap[0][2] is candidate:
            heapq.heappop(heap)

    def distance(self, candidate: Candidate) -> int:
        """How many rounds it is ahead of the rank that is to get it; of the slowest where that is not known."""
        if candidate.rank >= 0:
            view = self.ranks[candidate.rank]
            return candidate.step - view.taken + self._lag(view, max(each.taken for each in self.ranks))
        slowest = min(view.taken for view in self.ranks)
        before = candidate.place - self.undealt[0].place if self.undealt else 0
        return self.rounds - slowest + max(0, before) // self.num_ranks

    def is_in_next_round(self, candidate: Candidate) -> bool:
        """Whether it is among the first of what is not dealt yet."""
        there = (each for each in self.undealt if not each.is_void)
        return any(each is candidate for each in itertools.islice(there, self.num_ranks))

    @property
    def num_planned(self) -> int:
        """Candidates that are planned and not begun."""
        return (
            len(self.fresh)
            + sum(len(view.due) for view in self.ranks)
            + (len(self.undealt) if self.spec.is_dealt_early else 0)
        )

    @property
    def is_finished(self) -> bool:
        """Whether every rank has been through it."""
        return all(view.is_closed for view in self.ranks)

    @property
    def is_left(self) -> bool:
        """Whether all ranks that have opened it are through with it."""
        return self.is_wanted and all(view.is_closed for view in self.ranks if view.is_open)

    @property
    def is_wanted(self) -> bool:
        """Whether some rank has opened it."""
        return any(view.is_open for view in self.ranks)


def _first(heap: list[tuple[int, int, Candidate]]) -> Candidate | None:
    while heap and not heap[0][2].wants_content:
        heapq.heappop(heap)
    return heap[0][2] if heap else None
