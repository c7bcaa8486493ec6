"""Producers and what each of them has to make. No I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from taas_magic.data.iteration import Candidate, Iteration

#: (loader, iteration, epoch, shard).
ShardKey = tuple[int, int, int, int]


@dataclass(slots=True)
class Lease:
    """A producer's order to make a candidate, and the memory that was set aside for it."""

    ticket: int
    candidate: Candidate
    iteration: Iteration
    producer: int
    since: float
    offset: int = -1
    room: int = 0


@dataclass(slots=True)
class Producer:
    """A process that makes elements."""

    number: int
    #: What it is for; None where it makes whatever there is.
    shard: ShardKey | None = None
    #: Tickets of its orders, the one that it works on first.
    orders: deque[int] = field(default_factory=deque)
    #: The element of its shard that comes next.
    next_element: int = 0
    has_made_some: bool = False
    is_asked_to_end: bool = False

    @property
    def is_for_all(self) -> bool:
        """Whether it can be given whatever there is to be made."""
        return self.shard is None and not self.is_asked_to_end


class Workshop:
    """All producers and their orders."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.producers: dict[int, Producer] = {}
        self._shards: dict[ShardKey, int] = {}
        self._next_ticket = 0
        self._next_producer = 0

    def hire(self, shard: ShardKey | None = None) -> Producer:
        """A new producer."""
        producer = Producer(self._next_producer, shard)
        self._next_producer += 1
        self.producers[producer.number] = producer
        if shard is not None:
            self._shards[shard] = producer.number
            producer.next_element = shard[3]
        return producer

    def of_shard(self, key: ShardKey) -> Producer | None:
        """The producer that goes through a shard."""
        number = self._shards.get(key)
        return None if number is None else self.producers[number]

    def of_iteration(self, iteration: Iteration) -> list[Producer]:
        """The producers that go through shards of an iteration."""
        keys = [key for key in self._shards if key[:2] == (iteration.loader, iteration.index)]
        return [self.producers[self._shards[key]] for key in keys]

    def dismiss(self, producer: Producer) -> None:
        """Note that a producer is to end; it has its orders until it has."""
        producer.is_asked_to_end = True
        self._forget_shard(producer)

    def leave(self, number: int) -> Producer | None:
        """Note that a producer's process has ended; None where that was known."""
        producer = self.producers.pop(number, None)
        if producer is not None:
            self._forget_shard(producer)
        return producer

    def _forget_shard(self, producer: Producer) -> None:
        if producer.shard is not None and self._shards.get(producer.shard) == producer.number:
            del self._shards[producer.shard]

    def least_busy(self) -> Producer | None:
        """The producer with the fewest orders among those that make whatever there is."""
        there = (producer for producer in self.producers.values() if producer.is_for_all)
        return min(there, key=lambda each: len(each.orders), default=None)

    @property
    def num_for_all(self) -> int:
        """How many make whatever there is."""
        return sum(producer.is_for_all for producer in self.producers.values())

    def enter(self, iteration: Iteration, candidate: Candidate, producer: Producer, now: float) -> Lease:
        """Give a producer an order."""
        lease = Lease(self._next_ticket, candidate, iteration, producer.number, now)
        self._next_ticket += 1
        self.leases[lease.ticket] = lease
        candidate.leases += 1
        producer.orders.append(lease.ticket)
        return lease

    def get(self, producer: int, ticket: int) -> Lease | None:
        """A producer's order; None where it has no such order."""
        lease = self.leases.get(ticket)
        return lease if lease is not None and lease.producer == producer else None

    def end(self, producer: int, ticket: int) -> Lease | None:
        """Take an order off a producer; None where it has no such order."""
        lease = self.get(producer, ticket)
        if lease is None:
            return None
        del self.leases[ticket]
        lease.candidate.leases -= 1
        orders = self.producers[producer].orders
        if orders and orders[0] == ticket:
            orders.popleft()
        else:
            orders.remove(ticket)
        return lease

    def check(self) -> None:
        """State the invariants."""
        for producer in self.producers.values():
            assert all(self.leases[ticket].producer == producer.number for ticket in producer.orders)
        assert sum(len(producer.orders) for producer in self.producers.values()) == len(self.leases)
        assert all(self.producers[number].shard == key for key, number in self._shards.items())
