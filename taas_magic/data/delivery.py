"""The delivery of a run as a state machine without I/O: events in, instructions out.

The shell around it is :mod:`taas_magic.data.coordinator`. Events only note what is the case; :meth:`Delivery.advance`
then says what to do, for all that was noted. Four things are decided here: what is planned, which producer makes what,
who gets memory, and what is handed to which rank.

Nothing is lost and nothing is doubled, since an element is not bound to who makes it: it is made of its place in the
stream alone. Whatever a producer had when it ended is given to others. What lies ready and is not handed out may be
given up for want of memory, and is made again when it is due.

Memory: a rank that waits goes before everything else. What is farthest from being needed is given up for it, and where
even that is not enough, the memory grows. So no rank waits for another one's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from taas_magic.data.extents import Extents, round_up
from taas_magic.data.instructions import (
    AnswerRoom,
    EndProducer,
    Fail,
    Grow,
    HandOut,
    HandTrouble,
    Instruction,
    Plan,
    Say,
    SendOrders,
    StartProducer,
    TellEnd,
)
from taas_magic.data.iteration import Candidate, Iteration, StreamSpec
from taas_magic.data.leases import Lease, Producer, Workshop
from taas_magic.data.stream import Stream
from taas_magic.wire_data import Delivered, MadeElement, Order, Position, ShardJob, Trouble

#: How many rounds of tasks the sampler is asked for at a time, at least, and how many candidates.
_PLAN_AT_ONCE = 256
#: Elements that may lie ready beyond need, however small they are.
_MAX_AHEAD = 4096
#: What a producer has to do at a time: elements for so long, so that small ones are ordered by many.
_ORDER_S = 0.004
_MIN_ORDERS, _MAX_ORDERS = 2, 64
#: An element that takes so much longer than others is given to another producer, too.
_LATE_FACTOR, _LATE_S = 8.0, 10.0
_MAX_KILLS = 3
#: Rounds of a loader that no rank has opened and perhaps none will soon.
_LAZY_ROUNDS = 2
#: A rank is handed small elements ahead of need.
_HANDED_AHEAD, _HANDED_AHEAD_BYTES = 64, 2**20
_MIN_HANDED = 2
_GROW_BYTES = 64 * 2**20


class Delivery:
    """All loaders of a run.

    Args:
        specs: The loaders.
        num_ranks: The number of ranks.
        num_producers: How many producers make whatever there is.
        memory_bytes: The most memory that elements may take, unless ranks would have to wait for ever.
    """

    def __init__(self, specs: list[StreamSpec], num_ranks: int, num_producers: int, memory_bytes: int) -> None:
        self.num_ranks = num_ranks
        self.memory_bytes = memory_bytes
        self.streams = [Stream(spec, number, num_ranks) for number, spec in enumerate(specs)]
        self.workshop = Workshop()
        self.extents = Extents(0)
        #: Memory that ranks have: (rank, offset) by ticket.
        self.held: dict[int, tuple[int, int]] = {}
        self._num_wanted = num_producers
        #: Producers in a row that ended without having made anything.
        self._stillborn = 0
        #: Requests for room that are not answered: ticket and size.
        self._room_requests: deque[tuple[int, int]] = deque()
        self._out: list[Instruction] = []

    # -- events of producers -------------------------------------------------------------------------------------

    def made(self, producer: int, element: MadeElement) -> None:
        """An element lies where its lease says."""
        lease = self._end_lease(producer, element.ticket)
        if lease is None:
            return
        candidate, iteration = lease.candidate, lease.iteration
        stream = self.streams[iteration.loader]
        stream.note_made(element)
        if candidate.is_void or candidate.is_taken or candidate.offset >= 0 or lease.offset < 0:
            # Nobody wants it any more, or another was faster.
            self._free(lease)
            iteration.want(candidate)
            return
        self.extents.trim(lease.offset, element.size_bytes)
        candidate.offset, candidate.size_bytes, candidate.ticket = lease.offset, element.size_bytes, lease.ticket
        if not candidate.is_made:
            candidate.is_made, candidate.units = True, element.units
        stream.note_ready(candidate)

    def needs_room(self, producer: int, ticket: int, size_bytes: int) -> None:
        """An element is larger than the room that its order gave it."""
        lease = self.workshop.get(producer, ticket)
        if lease is None:
            return
        self._free(lease)
        self._room_requests.append((ticket, size_bytes))

    def not_made(self, producer: int, ticket: int, trouble: Trouble | None) -> None:
        """An element could not be made; without a trouble its shard has ended before it."""
        lease = self._end_lease(producer, ticket)
        if lease is None:
            return
        self._free(lease)
        candidate, iteration = lease.candidate, lease.iteration
        if candidate.is_void or candidate.is_taken or candidate.offset >= 0:
            return
        if trouble is None:
            if candidate.epoch == iteration.epoch:
                iteration.shard_ended(candidate.element)
            return
        self._fail_candidate(lease, trouble)

    def _fail_candidate(self, lease: Lease, trouble: Trouble) -> None:
        candidate, stream = lease.candidate, self.streams[lease.iteration.loader]
        if stream.spec.skips_errors:
            candidate.is_void = True
            line = trouble.message.splitlines()[0] if trouble.message else trouble.type_name
            lease.iteration.skips.append(f"element {candidate.element} of epoch {candidate.epoch} is skipped: {line}")
        else:
            candidate.trouble = trouble

    def producer_exited(self, number: int, how: str) -> None:
        """A producer's process has ended; what it had to make is made by others."""
        producer = self.workshop.leave(number)
        if producer is None:
            return
        for place, ticket in enumerate(list(producer.orders)):
            lease = self.workshop.leases.pop(ticket)
            lease.candidate.leases -= 1
            self._free(lease)
            if place == 0 and not producer.is_asked_to_end:
                self._note_kill(lease, how)
            lease.iteration.want(lease.candidate)
        if not producer.is_asked_to_end and not producer.has_made_some:
            self._stillborn += 1
            if self._stillborn >= max(_MAX_KILLS, 2 * self._num_wanted) and not producer.orders:
                self._out.append(Fail(f"producers end before they have made anything: the last one {how}"))

    def _note_kill(self, lease: Lease, how: str) -> None:
        candidate = lease.candidate
        candidate.kills += 1
        if candidate.kills >= _MAX_KILLS and not candidate.is_settled:
            name = self.streams[lease.iteration.loader].spec.name
            text = (
                f"element {candidate.element} of epoch {candidate.epoch} of `{name}` ended {candidate.kills} producers"
            )
            self._fail_candidate(lease, Trouble("PoisonElementError", f"{text}; the last one {how}", ""))

    # -- events of the sampler -----------------------------------------------------------------------------------

    def planned(self, plan: Plan, tasks: list[bytes], *, is_last: bool) -> None:
        """The sampler has said more of an epoch."""
        iteration = self._iteration(plan.loader, plan.iteration)
        if iteration is None or (iteration.serial, iteration.epoch) != (plan.serial, plan.epoch) or iteration.has_ended:
            return
        spec = iteration.spec
        if spec.num_shards:
            iteration.history += tasks
        # What was taken before the stream was taken up again is planned only for logical workers to get past it.
        past = max(0, min(len(tasks), iteration.start.element - plan.first)) if plan.is_first else 0
        iteration.plan(tasks[past:], is_last=is_last)

    def sampler_failed(self, plan: Plan, trouble: Trouble) -> None:
        """The sampler has raised."""
        iteration = self._iteration(plan.loader, plan.iteration)
        if iteration is None or iteration.serial != plan.serial:
            return
        iteration.fail_planning(trouble)

    # -- events of ranks -----------------------------------------------------------------------------------------

    def opened(
        self, rank: int, loader: int, index: int, sampler_epoch: int | None = None, start: Position | None = None
    ) -> None:
        """A rank begins an iteration."""
        stream = self.streams[loader]
        iteration = stream.open(index)
        if not iteration.is_wanted:
            if start is not None or (sampler_epoch is not None and iteration.sampler_epoch != sampler_epoch):
                # What was prepared is not what the cell wants, nor is what was prepared for later.
                for later in [each for each in stream.iterations.values() if each.index >= index]:
                    self._drop(later)
                iteration = stream.restart(index, start or iteration.start, sampler_epoch)
            if sampler_epoch is not None:
                stream.expect_epoch(sampler_epoch)
        view = iteration.ranks[rank]
        view.is_open = view.is_waiting = True
        for earlier in [each for each in stream.iterations.values() if each.index < index - 1 and each.is_left]:
            self._empty(earlier)
            stream.retire(earlier.index)

    def asked(self, rank: int, loader: int, index: int, taken: int, released: list[int], *, is_waiting: bool) -> None:
        """A rank has taken so many elements of an iteration in all."""
        self._release(rank, released)
        iteration = self._iteration(loader, index)
        if iteration is not None:
            self._take(iteration, rank, taken)
            iteration.ranks[rank].is_waiting = is_waiting

    def closed(self, rank: int, loader: int, index: int, taken: int, released: list[int]) -> None:
        """A rank is through with an iteration."""
        self._release(rank, released)
        iteration = self._iteration(loader, index)
        if iteration is None:
            return
        self._take(iteration, rank, taken)
        view = iteration.ranks[rank]
        view.is_closed, view.is_waiting = True, False
        for candidate in view.dealt:
            self._give_up(iteration, candidate)
            candidate.is_void = True
        view.dealt.clear()
        view.due.clear()
        if iteration.is_finished:
            self._drop(iteration)

    def _take(self, iteration: Iteration, rank: int, taken: int) -> None:
        view = iteration.ranks[rank]
        while view.taken < min(taken, view.pushed) and view.dealt:
            candidate = view.dealt.popleft()
            candidate.is_taken = True
            view.taken += 1

    def _release(self, rank: int, tickets: list[int]) -> None:
        for ticket in tickets:
            holder, offset = self.held.get(ticket, (-1, 0))
            if holder == rank:
                del self.held[ticket]
                self.extents.give_back(offset)

    # -- iterations ----------------------------------------------------------------------------------------------

    def _iteration(self, loader: int, index: int) -> Iteration | None:
        return self.streams[loader].iterations.get(index)

    def _drop(self, iteration: Iteration) -> None:
        """Forget an iteration."""
        self._empty(iteration)
        iterations = self.streams[iteration.loader].iterations
        if iterations.get(iteration.index) is iteration:
            del iterations[iteration.index]

    def _empty(self, iteration: Iteration) -> None:
        """Give up all that is left of an iteration."""
        for candidate in self._candidates(iteration):
            self._give_up(iteration, candidate)
            candidate.is_void = True
        for producer in self.workshop.of_iteration(iteration):
            self._dismiss(producer)

    @staticmethod
    def _candidates(iteration: Iteration) -> Iterator[Candidate]:
        yield from iteration.undealt
        for view in iteration.ranks:
            yield from view.dealt

    def _give_up(self, iteration: Iteration, candidate: Candidate) -> None:
        """Free what lies ready of a candidate that is not handed out."""
        if candidate.offset >= 0 and not candidate.is_pushed:
            self.streams[iteration.loader].note_gone(candidate)
            self.extents.give_back(candidate.offset)
            candidate.offset = -1

    # -- what to do ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Instruction]:
        """Say what is to be done now, in order."""
        for stream in self.streams:
            if stream.wants_next:
                stream.open(stream.next_iteration)
            for iteration in stream.iterations.values():
                self._plan(iteration)
                iteration.deal()
                for candidate in iteration.voided:
                    self._give_up(iteration, candidate)
                iteration.voided.clear()
                stream.note_progress(iteration)
                for text in stream.notices(iteration):
                    self._say(text)
                self._hand_out(iteration)
        self._answer_room_requests()
        self._start_producers()
        self._order(now)
        self._hedge(now)
        out, self._out = self._out, []
        return out

    def _say(self, text: str) -> None:
        self._out.append(Say(text))

    def _plan(self, iteration: Iteration) -> None:
        if iteration.has_ended or iteration.is_planning or iteration.is_planned_out:
            return
        count = max(_PLAN_AT_ONCE, 2 * self.num_ranks)
        if iteration.num_planned >= count:
            return
        if not iteration.spec.is_map:
            iteration.plan_stream(min(count, 4 * iteration.spec.num_shards * self.num_ranks))
            return
        begins_at = iteration.start.element if iteration.epoch == iteration.start.epoch else 0
        is_first = iteration.next_element == begins_at
        # Logical workers have to get past what was taken before, so they need to be told of it.
        past = begins_at if is_first and iteration.spec.num_shards else 0
        iteration.is_planning = True
        self._out.append(
            Plan(
                iteration.loader,
                iteration.index,
                iteration.serial,
                iteration.epoch,
                iteration.seed,
                count + past,
                is_first,
                iteration.next_element - past,
                iteration.said_epoch,
            )
        )

    def _hand_out(self, iteration: Iteration) -> None:
        for rank, view in enumerate(iteration.ranks):
            if not view.is_open or view.is_closed:
                continue
            self._hand_to(iteration, rank)
            if iteration.has_ended and not view.end_is_told and view.pushed == view.steps:
                view.end_is_told = True
                position = self._position_behind(iteration)
                self._out.append(
                    TellEnd(rank, iteration.loader, iteration.index, view.steps, position, iteration.is_used_up)
                )

    @staticmethod
    def _position_behind(iteration: Iteration) -> Position:
        return Position(iteration.seed, iteration.epoch + 1, 0, iteration.units)

    def _hand_to(self, iteration: Iteration, rank: int) -> None:
        view, stream = iteration.ranks[rank], self.streams[iteration.loader]
        handed: list[Delivered] = []
        ahead = view.pushed - view.taken
        ahead_bytes = sum(view.dealt[place].size_bytes for place in range(min(ahead, len(view.dealt))))
        while ahead < len(view.dealt):
            candidate = view.dealt[ahead]
            is_small = ahead < _HANDED_AHEAD and ahead_bytes + candidate.size_bytes <= _HANDED_AHEAD_BYTES
            has_time = ahead < _MIN_HANDED and self._is_roomy()
            if ahead and not is_small and not has_time:
                break
            if candidate.trouble is not None and candidate.offset < 0:
                if ahead:
                    break
                candidate.is_pushed = True
                view.pushed += 1
                if handed:
                    self._out.append(HandOut(rank, iteration.loader, iteration.index, handed, iteration.seed))
                    handed = []
                self._out.append(HandTrouble(rank, iteration.loader, iteration.index, candidate.trouble))
                view.is_waiting = False
                break
            if candidate.offset < 0:
                break
            self.held[candidate.ticket] = (rank, candidate.offset)
            behind = candidate.behind
            assert behind is not None
            handed.append(
                Delivered(
                    candidate.ticket, candidate.offset, candidate.size_bytes, behind.epoch, behind.element, behind.units
                )
            )
            candidate.is_pushed = True
            stream.note_gone(candidate)
            view.pushed += 1
            ahead += 1
            ahead_bytes += candidate.size_bytes
        if handed:
            view.is_waiting = False
            self._out.append(HandOut(rank, iteration.loader, iteration.index, handed, iteration.seed))

    def _is_roomy(self) -> bool:
        """Whether elements that are handed out ahead of need could not keep a rank that waits from getting memory."""
        return self.extents.taken_bytes - sum(stream.ready_bytes for stream in self.streams) <= self.memory_bytes // 2

    # -- orders --------------------------------------------------------------------------------------------------

    def _order(self, now: float) -> None:
        orders: dict[int, list[Order]] = {}
        blocked: set[int] = set()
        while True:
            choice = self._choose(blocked)
            if choice is None:
                break
            iteration, candidate, ahead = choice
            producer = self._producer_for(iteration, candidate)
            if producer is None:
                blocked.add(id(iteration))
                continue
            lease = self._lease(iteration, candidate, producer, ahead, now)
            if lease is None:
                blocked.add(id(iteration))
                continue
            orders.setdefault(producer.number, []).extend(self._orders_for(lease, producer))
        for number, batch in orders.items():
            if not self.workshop.producers[number].is_asked_to_end:
                self._out.append(SendOrders(number, batch))

    def _choose(self, blocked: set[int]) -> tuple[Iteration, Candidate, int] | None:
        """What is needed soonest, of all iterations for which something can be done."""
        best: tuple[Iteration, Candidate, int] | None = None
        for stream in self.streams:
            for iteration in stream.iterations.values():
                wanted = None if id(iteration) in blocked else iteration.next_wanted()
                if wanted is None:
                    continue
                ahead, candidate = wanted
                if not iteration.is_wanted:
                    ahead += self._rounds_before(stream, iteration) + stream.spec.is_lazy
                    if stream.spec.is_lazy and ahead > _LAZY_ROUNDS:
                        continue
                is_sooner = best is None or ahead < best[2]
                if is_sooner and ahead * self.num_ranks <= _MAX_AHEAD:
                    best = iteration, candidate, ahead
        return best

    def _rounds_before(self, stream: Stream, iteration: Iteration) -> int:
        """Rounds that the ranks have to take before they come to an iteration, as far as they are dealt."""
        others = (each for each in stream.iterations.values() if each is not iteration)
        return sum(len(view.dealt) for each in others for view in each.ranks) // self.num_ranks

    def _producer_for(self, iteration: Iteration, candidate: Candidate) -> Producer | None:
        stream = self.streams[iteration.loader]
        limit = _MIN_ORDERS
        if stream.num_made == 0:
            limit = 1
        elif stream.element_s > 0:
            limit = max(_MIN_ORDERS, min(_MAX_ORDERS, 2 * int(_ORDER_S / stream.element_s)))
        if iteration.spec.num_shards:
            producer = self._shard_producer(iteration, candidate)
        else:
            producer = self.workshop.least_busy()
        return producer if producer is not None and len(producer.orders) < limit else None

    def _shard_producer(self, iteration: Iteration, candidate: Candidate) -> Producer | None:
        shards = iteration.spec.num_shards
        key = (iteration.loader, iteration.index, candidate.epoch, candidate.element % shards)
        producer = self.workshop.of_shard(key)
        if producer is not None and producer.next_element > candidate.element:
            # It is past that already. It cannot go back: another begins again, when it has done what it was told.
            if producer.orders:
                return None
            self._dismiss(producer)
            producer = None
        if producer is None:
            producer = self.workshop.hire(key)
            job = ShardJob(
                iteration.loader, candidate.epoch, key[3], shards, iteration.seed, sampler_epoch=iteration.said_epoch
            )
            self._out.append(StartProducer(producer.number, job))
        return producer

    def _orders_for(self, lease: Lease, producer: Producer) -> list[Order]:
        candidate, iteration = lease.candidate, lease.iteration
        orders = []
        if producer.shard is not None:
            shards = iteration.spec.num_shards
            if iteration.history and candidate.epoch == iteration.epoch:
                # Its worker draws random numbers, or changes its data set, from element to element.
                orders = [
                    Order(
                        -1,
                        iteration.loader,
                        candidate.epoch,
                        element,
                        iteration.seed,
                        iteration.history[element],
                        is_discarded=True,
                    )
                    for element in range(producer.next_element, candidate.element, shards)
                ]
            producer.next_element = candidate.element + shards
        orders.append(
            Order(
                lease.ticket,
                iteration.loader,
                candidate.epoch,
                candidate.element,
                iteration.seed,
                candidate.keys,
                max(0, lease.offset),
                lease.room,
            )
        )
        return orders

    def _lease(
        self, iteration: Iteration, candidate: Candidate, producer: Producer, ahead: int, now: float
    ) -> Lease | None:
        stream = self.streams[iteration.loader]
        offset, room = -1, 0
        if stream.usual_bytes:
            found = self._room_for(stream.usual_bytes, iteration, candidate, ahead)
            if found is None:
                return None
            offset, room = found, round_up(stream.usual_bytes)
        iteration.take_wanted(candidate)
        lease = self.workshop.enter(iteration, candidate, producer, now)
        lease.offset, lease.room = offset, room
        return lease

    def _end_lease(self, producer: int, ticket: int) -> Lease | None:
        """Take an order off a producer that has carried it out; None where it has no such order."""
        lease = self.workshop.end(producer, ticket)
        if lease is not None:
            self.workshop.producers[producer].has_made_some, self._stillborn = True, 0
        return lease

    def _free(self, lease: Lease) -> None:
        if lease.offset >= 0:
            self.extents.give_back(lease.offset)
            lease.offset, lease.room = -1, 0

    # -- memory --------------------------------------------------------------------------------------------------

    def _is_urgent(self, iteration: Iteration, candidate: Candidate) -> bool:
        """Whether a rank can do nothing until it has this."""
        if candidate.rank >= 0:
            view = iteration.ranks[candidate.rank]
            return view.is_open and view.pushed == view.taken and candidate.step <= view.taken
        return iteration.is_in_next_round(candidate) and any(
            view.is_open and not view.is_closed and view.taken == view.steps for view in iteration.ranks
        )

    def _room_for(self, size_bytes: int, iteration: Iteration, candidate: Candidate, ahead: int) -> int | None:
        """Find memory for an element; at the cost of others where it is needed sooner."""
        offset = self.extents.take(size_bytes)
        if offset is None and self._grow(size_bytes, self.memory_bytes):
            offset = self.extents.take(size_bytes)
        is_urgent = offset is None and self._is_urgent(iteration, candidate)
        while offset is None and (is_urgent or ahead < 2):
            victim = self._farthest(ahead, is_urgent=is_urgent)
            if victim is None:
                break
            self._give_up(*victim)
            victim[0].want(victim[1])
            offset = self.extents.take(size_bytes)
        if offset is None and is_urgent and self._grow(size_bytes, None):
            offset = self.extents.take(size_bytes)
        return offset

    def _grow(self, size_bytes: int, limit_bytes: int | None) -> bool:
        """Make the memory larger by what one more element takes, and by more where that is allowed."""
        now_bytes = self.extents.size_bytes
        least = now_bytes + round_up(size_bytes) + 4096
        if limit_bytes is None:
            target = least
        else:
            # Room for some elements of this size at once: by and by memory would be made larger for each.
            target = min(limit_bytes, max(least, now_bytes + max(_GROW_BYTES, 8 * size_bytes)))
            if target < least:
                return False
        target = -(-target // 4096) * 4096
        self._out.append(Grow(target))
        self.extents.grow(target)
        return True

    def _farthest(self, ahead: int, *, is_urgent: bool) -> tuple[Iteration, Candidate] | None:
        """What lies ready and is needed last; None where nothing is needed later than ``ahead`` rounds from now."""
        best: tuple[int, int, Iteration, Candidate] | None = None
        for stream in self.streams:
            for iteration in stream.iterations.values():
                for candidate in self._candidates(iteration):
                    if candidate.offset < 0 or candidate.is_pushed:
                        continue
                    distance = iteration.distance(candidate) + (0 if iteration.is_wanted else 2)
                    # Of a shard it can only be had again by going through it all.
                    if iteration.spec.num_shards and distance <= ahead + 3:
                        continue
                    rank = (0 if iteration.spec.num_shards else 1, distance)
                    if best is None or rank > best[:2]:
                        best = (*rank, iteration, candidate)
        if best is None or (best[1] <= ahead + 1 and not (is_urgent and best[1] > ahead)):
            return None
        return best[2], best[3]

    def _answer_room_requests(self) -> None:
        while self._room_requests:
            ticket, size_bytes = self._room_requests.popleft()
            lease = self.workshop.leases.get(ticket)
            if lease is None:
                continue
            candidate, iteration = lease.candidate, lease.iteration
            stream = self.streams[iteration.loader]
            stream.usual_bytes = max(stream.usual_bytes, size_bytes)
            offset = None
            if not candidate.is_void:
                ahead = iteration.distance(candidate)
                offset = self._room_for(size_bytes, iteration, candidate, ahead)
            if offset is None:
                # It is made again when there is room.
                self.workshop.end(lease.producer, ticket)
                self._out.append(AnswerRoom(lease.producer, ticket, 0, 0))
                if not candidate.is_void and self._is_urgent(iteration, candidate):
                    self._fail_candidate(lease, _no_memory(stream.spec.name, size_bytes, self.extents.size_bytes))
                iteration.want(candidate)
                continue
            lease.offset, lease.room = offset, round_up(size_bytes)
            self._out.append(AnswerRoom(lease.producer, ticket, offset, lease.room))

    # -- producers -----------------------------------------------------------------------------------------------

    def _start_producers(self) -> None:
        if all(stream.spec.num_shards for stream in self.streams):
            return
        for _ in range(self._num_wanted - self.workshop.num_for_all):
            self._out.append(StartProducer(self.workshop.hire().number))

    def _dismiss(self, producer: Producer) -> None:
        self.workshop.dismiss(producer)
        self._out.append(EndProducer(producer.number))

    def _hedge(self, now: float) -> None:
        """Have what takes suspiciously long made by another producer as well; whoever is first delivers."""
        idle = [each for each in self.workshop.producers.values() if each.is_for_all and not each.orders]
        for lease in list(self.workshop.leases.values()) if idle else []:
            candidate, iteration = lease.candidate, lease.iteration
            late_s = max(_LATE_S, _LATE_FACTOR * self.streams[iteration.loader].element_s)
            is_late = now > lease.since + late_s and candidate.leases == 1 and not candidate.is_void
            if is_late and not iteration.spec.num_shards and idle:
                other = idle.pop()
                again = self.workshop.enter(iteration, candidate, other, now)
                self._out.append(SendOrders(other.number, self._orders_for(again, other)))

    def give_up_all(self) -> None:
        """Nothing will be handed out any more: only what ranks have keeps its memory."""
        for lease in self.workshop.leases.values():
            self._free(lease)
        for stream in self.streams:
            for iteration in stream.iterations.values():
                for candidate in self._candidates(iteration):
                    self._give_up(iteration, candidate)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being made or planned, once :meth:`advance` has said what could be."""
        return not self.workshop.leases and not any(
            iteration.is_planning for stream in self.streams for iteration in stream.iterations.values()
        )

    def check(self) -> None:
        """State the invariants: all memory that is taken belongs to somebody, and to one only."""
        self.extents.check()
        self.workshop.check()
        offsets: list[int] = [offset for _, offset in self.held.values()]
        offsets += [lease.offset for lease in self.workshop.leases.values() if lease.offset >= 0]
        for stream in self.streams:
            candidates = [c for iteration in stream.iterations.values() for c in self._candidates(iteration)]
            ready = [candidate for candidate in candidates if candidate.offset >= 0 and not candidate.is_pushed]
            assert stream.num_ready == len(ready), (stream.num_ready, len(ready))
            assert stream.ready_bytes == sum(candidate.size_bytes for candidate in ready)
            offsets += [candidate.offset for candidate in ready]
        assert sorted(offsets) == sorted(self.extents.taken)


def _no_memory(name: str, size_bytes: int, arena_bytes: int) -> Trouble:
    gib = 2**30
    return Trouble(
        "MemoryError",
        f"an element of `{name}` takes {size_bytes / gib:.2f} GiB, and this machine has no memory for it beside "
        f"{arena_bytes / gib:.2f} GiB of elements that are in use\n"
        "to do: make batches smaller, or use fewer ranks",
        "",
    )
