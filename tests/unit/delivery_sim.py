"""A delivery without processes: producers, sampler, memory and ranks are played by a seeded random source."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from taas_magic.data.delivery import Delivery
from taas_magic.data.instructions import (
    AnswerRoom,
    EndProducer,
    Fail,
    Grow,
    HandOut,
    HandTrouble,
    Plan,
    Say,
    SendOrders,
    StartProducer,
    TellEnd,
)
from taas_magic.data.iteration import StreamSpec
from taas_magic.wire_data import MadeElement, Order, Position, Trouble


@dataclass
class Source:
    """What a loader yields: the elements of each epoch, or the lengths of its shards."""

    num_elements: int = 0
    shard_lengths: tuple[int, ...] = ()
    #: Elements that cannot be made.
    bad: frozenset[int] = frozenset()
    #: Elements that end whoever makes them.
    poison: frozenset[int] = frozenset()

    def exists(self, element: int) -> bool:
        if not self.shard_lengths:
            return element < self.num_elements
        shards = len(self.shard_lengths)
        return element // shards < self.shard_lengths[element % shards]


@dataclass
class SimRank:
    """One rank: what it was handed, and what it has taken, by loader and iteration."""

    got: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    waiting: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    ended: dict[tuple[int, int], TellEnd] = field(default_factory=dict)
    to_release: list[int] = field(default_factory=list)
    behind: dict[tuple[int, int], Position] = field(default_factory=dict)


class Sim:
    """Plays a delivery."""

    def __init__(
        self,
        specs: list[StreamSpec],
        sources: list[Source],
        *,
        num_ranks: int = 2,
        num_producers: int = 3,
        memory_bytes: int = 2**20,
        sizes: tuple[int, int] = (1, 3000),
        seed: int = 0,
        kill_rate: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.sizes_of = sizes
        self.specs, self.sources = specs, sources
        self.kill_rate = kill_rate
        self.delivery = Delivery(specs, num_ranks, num_producers, memory_bytes)
        self.ranks = [SimRank() for _ in range(num_ranks)]
        self.queues: dict[int, list[Order]] = {}
        self.jobs: dict[int, Any] = {}
        self.progress: dict[int, int] = {}
        self.plans: list[Plan] = []
        self.asking_room: dict[int, Order] = {}
        self.said: list[str] = []
        self.failed = ""
        self.now = 0.0
        #: What lies where: offset -> (loader, epoch, element).
        self.memory: dict[int, tuple[int, int, int]] = {}
        self.makings = 0
        self.kills: Counter[Any] = Counter()

    def size_of(self, loader: int, epoch: int, element: int) -> int:
        return random.Random(hash((loader, epoch, element))).randint(*self.sizes_of)

    # -- instructions ----------------------------------------------------------------------------------------

    def advance(self) -> None:  # noqa: C901, PLR0912 - a table of instructions
        self.now += 0.01
        for each in self.delivery.advance(self.now):
            if isinstance(each, Plan):
                self.plans.append(each)
            elif isinstance(each, SendOrders):
                self.queues[each.producer] += each.orders
            elif isinstance(each, StartProducer):
                self.queues[each.producer], self.jobs[each.producer] = [], each.job
                if each.job is not None:
                    self.progress[each.producer] = each.job.shard
            elif isinstance(each, EndProducer):
                self._exit(each.producer)
            elif isinstance(each, AnswerRoom):
                order = self.asking_room.pop(each.producer, None)
                if order is not None and each.room:
                    self._place(each.producer, order, each.offset, each.room)
                elif order is not None:
                    self.queues[each.producer].pop(0)
            elif isinstance(each, Grow):
                assert each.size_bytes >= 0
            elif isinstance(each, HandOut):
                key = each.loader, each.iteration
                for element in each.elements:
                    what = self.memory[element.offset]
                    place = Position(0, element.epoch, element.element, element.units)
                    self.ranks[each.rank].waiting.setdefault(key, []).append((element.ticket, what, place))
            elif isinstance(each, HandTrouble):
                key = each.loader, each.iteration
                self.ranks[each.rank].waiting.setdefault(key, []).append((-1, each.trouble.type_name, None))
            elif isinstance(each, TellEnd):
                self.ranks[each.rank].ended[each.loader, each.iteration] = each
            elif isinstance(each, Say):
                self.said.append(each.text)
            elif isinstance(each, Fail):
                self.failed = each.reason
        self.delivery.check()

    # -- producers -------------------------------------------------------------------------------------------

    def _exit(self, producer: int) -> None:
        self.queues.pop(producer, None)
        self.asking_room.pop(producer, None)
        self.delivery.producer_exited(producer, "was killed")

    def _place(self, producer: int, order: Order, offset: int, room: int) -> None:
        size = self.size_of(order.loader, order.epoch, order.element)
        assert size <= room
        self.memory[offset] = (order.loader, order.epoch, order.element)
        self.queues[producer].pop(0)
        self.delivery.made(producer, MadeElement(order.ticket, size, 0.001))

    def step_producer(self, producer: int) -> None:  # noqa: C901 - all that may happen to one
        queue = self.queues[producer]
        if self.kill_rate and self.random.random() < self.kill_rate:
            suspect = (queue[0].loader, queue[0].epoch, queue[0].element) if queue else None
            self.kills[suspect] += 1
            # The third one would be taken for the element's doing.
            if suspect is None or self.kills[suspect] < 3:
                self._exit(producer)
                return
        if not queue or producer in self.asking_room:
            return
        order, source, job = queue[0], self.sources[queue[0].loader], self.jobs[producer]
        if job is not None:
            assert order.element % job.num_shards == job.shard
            assert order.element >= self.progress[producer]
            if self.specs[order.loader].is_map:
                # Nothing is passed over: what is between was ordered to be made and thrown away.
                assert order.element == self.progress[producer], (order, self.progress[producer])
            self.progress[producer] = order.element + job.num_shards
        if order.ticket < 0:
            assert order.is_discarded
            queue.pop(0)
            return
        self.makings += 1
        if order.element in source.poison:
            self._exit(producer)
            return
        if not source.exists(order.element):
            assert not self.specs[order.loader].is_map
            queue.pop(0)
            self.delivery.not_made(producer, order.ticket, None)
        elif order.element in source.bad:
            queue.pop(0)
            self.delivery.not_made(producer, order.ticket, Trouble("ValueError", "bad", ""))
        elif self.size_of(order.loader, order.epoch, order.element) > order.room:
            self.asking_room[producer] = order
            size = self.size_of(order.loader, order.epoch, order.element)
            self.delivery.needs_room(producer, order.ticket, size)
        else:
            self._place(producer, order, order.offset, order.room)

    def step_sampler(self) -> None:
        if not self.plans:
            return
        plan = self.plans.pop(0)
        total = self.sources[plan.loader].num_elements
        last = min(total, plan.first + plan.count)
        tasks = [b"%d" % element for element in range(plan.first, last)]
        self.delivery.planned(plan, tasks, is_last=last == total)

    # -- ranks -----------------------------------------------------------------------------------------------

    def iterate(
        self, rank: int, loader: int, index: int, *, limit: int | None = None, start: Position | None = None
    ) -> Any:
        """A generator: each step is one thing that a rank does; it ends when the iteration does."""
        key, state = (loader, index), self.ranks[rank]
        got = state.got.setdefault(key, [])
        self.delivery.opened(rank, loader, index, start=start)
        held: list[int] = []
        while limit is None or len(got) < limit:
            while not state.waiting.get(key):
                end = state.ended.get(key)
                if end is not None and end.steps == len(got):
                    self.delivery.closed(rank, loader, index, len(got), held)
                    return
                self.delivery.asked(rank, loader, index, len(got), held, is_waiting=True)
                held = []
                yield
            ticket, what, place = state.waiting[key].pop(0)
            got.append(what)
            if place is not None:
                state.behind[key] = place
            if ticket >= 0:
                held.append(ticket)
            if self.random.random() < 0.5:
                yield
        left = [ticket for ticket, _, _ in state.waiting.pop(key, []) if ticket >= 0]
        self.delivery.closed(rank, loader, index, len(got), held + left)

    def run(self, *programs: Any, max_steps: int = 20_000) -> None:
        """Let ranks, producers and sampler take steps at random until the programs are through."""
        active = list(programs)
        for _ in range(max_steps):
            self.advance()
            if self.failed or not active:
                return
            choice = self.random.random()
            if choice < 0.35:
                program = self.random.choice(active)
                if next(program, "end") == "end":
                    active.remove(program)
            elif choice < 0.45:
                self.step_sampler()
            elif self.queues:
                self.step_producer(self.random.choice(list(self.queues)))
        raise AssertionError("it does not come to an end")
