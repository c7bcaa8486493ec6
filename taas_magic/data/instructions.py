"""What the delivery's state machine says is to be done; :mod:`taas_magic.data.coordinator` does it."""

from __future__ import annotations

from dataclasses import dataclass

from taas_magic.wire_data import Delivered, Order, Position, ShardJob, Trouble


@dataclass(frozen=True)
class Plan:
    """Ask the sampler of a loader for more; ``skip`` of the epoch are not needed any more."""

    loader: int
    iteration: int
    serial: int
    epoch: int
    seed: int
    count: int
    #: This is the first time that it is asked in this epoch; elements before ``first`` have been taken before.
    is_first: bool
    first: int
    sampler_epoch: int | None


@dataclass(frozen=True)
class SendOrders:
    """Have a producer make elements."""

    producer: int
    orders: list[Order]


@dataclass(frozen=True)
class AnswerRoom:
    """Tell a producer where to put an element that was too large; nowhere where ``room`` is 0."""

    producer: int
    ticket: int
    offset: int
    room: int


@dataclass(frozen=True)
class StartProducer:
    """Fork a producer."""

    producer: int
    job: ShardJob | None = None


@dataclass(frozen=True)
class EndProducer:
    """End a producer."""

    producer: int


@dataclass(frozen=True)
class Grow:
    """Make the memory of elements larger; it is so at once."""

    size_bytes: int


@dataclass(frozen=True)
class HandOut:
    """Give a rank its next elements."""

    rank: int
    loader: int
    iteration: int
    elements: list[Delivered]
    seed: int


@dataclass(frozen=True)
class HandTrouble:
    """Give a rank an exception in place of its next element."""

    rank: int
    loader: int
    iteration: int
    trouble: Trouble


@dataclass(frozen=True)
class TellEnd:
    """Tell a rank where an iteration ends."""

    rank: int
    loader: int
    iteration: int
    steps: int
    position: Position
    is_used_up: bool


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class Fail:
    """The delivery cannot go on."""

    reason: str


Instruction = (
    Plan | SendOrders | AnswerRoom | StartProducer | EndProducer | Grow | HandOut | HandTrouble | TellEnd | Say | Fail
)
