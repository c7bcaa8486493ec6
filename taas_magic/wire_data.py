"""The messages of data delivery: between kernel, runner, the delivery's processes, producers and ranks.

They follow the rules of :mod:`taas_magic.wire`, and ``docs/protocol.md`` describes them beside those. Elements never
travel in a message: they lie in a memory file that producers and ranks map, and messages say where.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from taas_magic.wire_base import MemoryFile, Message, NumRanks, Rank, SizeBytes

Role = Literal["train", "eval"]
Tail = Literal["drop", "pad"]
OnError = Literal["raise", "skip"]
Determinism = Literal["seeded", "exact"]
Transport = Literal["shared", "tcp"]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Position(msgspec.Struct, frozen=True):
    """Where a stream is: what is before it has been taken by the ranks, and nothing else is said."""

    #: What all random numbers of the stream come from.
    seed: int
    #: How often the loader has been gone through.
    epoch: Count
    #: Elements of the epoch that are before it, those left out or skipped counted.
    element: Count
    #: Units that have been used in all.
    units: Count = 0


class LoaderTask(msgspec.Struct, frozen=True):
    """A registered loader that a run uses, and how it is delivered."""

    #: The number by which the ranks know the loader.
    number: int
    #: The record of the delivery's parcel that has it.
    label: str
    #: What to call it.
    name: str
    role: Role = "train"
    tail: Tail = "drop"
    on_error: OnError = "raise"
    determinism: Determinism = "seeded"
    #: The most units to deliver, None without a bound.
    units: int | None = None
    #: With ``units``: one iteration goes on through as many epochs as that takes.
    cycles: bool = True
    #: Where to begin.
    start: Position | None = None


class DeliveryTask(msgspec.Struct, frozen=True):
    """What a delivery has to do."""

    id: str
    num_ranks: NumRanks
    num_producers: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    loaders: list[LoaderTask]
    environment: dict[str, str]
    #: The most memory for elements.
    memory_bytes: SizeBytes
    #: Elements are prepared until they take so much, or for so long; then the ranks start.
    prepare_bytes: SizeBytes
    prepare_s: float
    #: Classes and functions by their number in the delivery's parcel, and the one that the ranks know them by.
    shared: list[tuple[int, int]] = []
    #: The ranks that take part, in order; all of them where it is empty.
    ranks: list[Rank] = []
    #: The directory that producers must not write in; "" where they may.
    project: str = ""
    writable: list[str] = []
    run_dirs: str = ""
    transport: Transport = "shared"


class Trouble(msgspec.Struct, frozen=True):
    """An exception in a producer."""

    type_name: str
    message: str
    traceback: str
    #: The exception as a rank can load it; empty where it has no pickle.
    pickled: bytes = b""


class LoaderState(msgspec.Struct, frozen=True):
    """How far the delivery of one loader is."""

    name: str
    #: Elements that lie ready, and what they take.
    ready: Count
    ready_bytes: SizeBytes
    #: Elements that the ranks have taken.
    taken: Count
    #: Seconds that the ranks waited for elements, and how long they have been iterating, on average over the ranks.
    waited_s: float
    iterating_s: float
    #: Seconds that it takes to make one element, on average; 0 where that is not known.
    element_s: float
    #: What to do about it, in words; "" where there is nothing to do.
    advice: str = ""


# -- kernel to runner ------------------------------------------------------------------------------------------------


class PrepareDelivery(Message, frozen=True):
    """Kernel to runner: start producers; answered by :class:`DeliveryProgress`, the last of which says ready."""

    task: DeliveryTask
    parcel: MemoryFile
    segments: list[MemoryFile] = []


class CancelDelivery(Message, frozen=True):
    """Kernel to runner: no run will come for it."""

    delivery_id: str


# -- runner to kernel ------------------------------------------------------------------------------------------------


class DeliveryProgress(Message, frozen=True):
    """Runner to kernel: how far the preparation is."""

    delivery_id: str
    loaders: list[LoaderState] = []
    #: Of the preparation, 0 to 1.
    share: float = 0.0
    is_ready: bool = False


class DeliveryFailed(Message, frozen=True):
    """Runner to kernel: the delivery ended before a run had begun."""

    delivery_id: str
    reason: str


# -- runner and the delivery's processes -----------------------------------------------------------------------------


class StartDelivery(Message, frozen=True):
    """Runner to zygote: fork the process that a delivery descends from; its control socket comes as a descriptor."""


class DeliveryDescriptors(Message, frozen=True):
    """Runner to delivery: the coordinator's socket, stdout and stderr come as descriptors."""


class BeginDelivery(Message, frozen=True):
    """Runner to delivery: what to do; the parcel and its segments come as descriptors."""

    task: DeliveryTask


class ConnectRank(Message, frozen=True):
    """Runner to coordinator: a rank's socket comes as a descriptor."""

    rank: Rank


class Prepared(Message, frozen=True):
    """Coordinator to runner: the ranks may start; the memory file of the elements comes as a descriptor."""


class DeliveryStatus(Message, frozen=True):
    """Coordinator to runner: how far it is."""

    loaders: list[LoaderState]
    share: float = 1.0
    #: What to say of it at the end of the run.
    summary: list[str] = []


class DeliveryNotice(Message, frozen=True):
    """Coordinator to runner: something that the user should know."""

    text: str


class DeliveryEnded(Message, frozen=True):
    """Coordinator to runner, before it ends: it cannot go on, and why."""

    reason: str


ToDelivery = DeliveryDescriptors | BeginDelivery
ToCoordinator = ConnectRank
FromCoordinator = Prepared | DeliveryStatus | DeliveryNotice | DeliveryEnded


class ShardJob(msgspec.Struct, frozen=True):
    """One pass of one logical worker through a loader, which a producer of its own does from the first element on."""

    loader: int
    epoch: Count
    shard: int
    num_shards: int
    seed: int
    #: The base seed of torch's workers, where they are reproduced; None for seeds of our own.
    base_seed: int | None = None
    #: Passes that the sampler was told of.
    sampler_epoch: int | None = None


class ForkProducer(Message, frozen=True):
    """Coordinator to nursery: fork a producer; its socket comes as a descriptor, and the elements' memory file."""

    producer: int
    job: ShardJob | None = None
    #: Where to connect to, where elements do not go through shared memory.
    address: str = ""
    secret: bytes = b""


class ForkChecker(Message, frozen=True):
    """Coordinator to nursery: fork a process that looks whether the loaders keep what delivery counts on."""

    #: What the samplers say first, a loader each, pickled.
    first_keys: list[bytes]


class KillProducer(Message, frozen=True):
    """Coordinator to nursery: end a producer."""

    producer: int


class ProducerExited(Message, frozen=True):
    """Nursery to coordinator: a producer's process ended; ``exit_code`` as ``subprocess`` has it."""

    producer: int
    exit_code: int


class LoaderFinding(Message, frozen=True):
    """Nursery to coordinator: something that the user should know of a loader."""

    text: str


ToNursery = ForkProducer | ForkChecker | KillProducer
FromNursery = ProducerExited | LoaderFinding

# -- coordinator and producers ---------------------------------------------------------------------------------------


class Order(msgspec.Struct, frozen=True, array_like=True):
    """One element to be made."""

    ticket: int
    loader: int
    epoch: int
    #: Its place in the epoch.
    element: int
    seed: int
    #: What the sampler said, pickled; empty for a shard, which knows.
    keys: bytes = b""
    #: Where in the elements' memory there is room for it, and how much; none where that is 0.
    offset: int = 0
    room: int = 0
    #: It is made only to get past it.
    is_discarded: bool = False


class Make(Message, frozen=True):
    """Coordinator to producer: make these, in order."""

    orders: list[Order]


class Room(Message, frozen=True):
    """Coordinator to producer: answers :class:`NeedRoom`; where there is none, ``room`` is 0."""

    ticket: int
    offset: int
    room: int


class MadeElement(msgspec.Struct, frozen=True, array_like=True):
    """One element that lies in the elements' memory."""

    ticket: int
    size_bytes: int
    seconds: float
    units: int = 1


class Made(Message, frozen=True):
    """Producer to coordinator: these are done. Over a network their bytes follow, in the same order."""

    elements: list[MadeElement]


class NeedRoom(Message, frozen=True):
    """Producer to coordinator: the element takes more than there is room for; answered by :class:`Room`."""

    ticket: int
    size_bytes: SizeBytes


class NotMade(Message, frozen=True):
    """Producer to coordinator: the element could not be made, or the shard is over (no trouble)."""

    ticket: int
    trouble: Trouble | None = None


ToProducer = Make | Room
FromProducer = Made | NeedRoom | NotMade

# -- runner and ranks ------------------------------------------------------------------------------------------------


class ConnectDelivery(Message, frozen=True):
    """Runner to rank, before its task: its socket to the coordinator and the elements' memory file are attached."""

    loaders: list[LoaderTask]
    #: Numbers of classes and functions that elements may name.
    shared: list[int] = []
    #: How many ranks take part.
    num_ranks: NumRanks = 1


# -- coordinator and ranks -------------------------------------------------------------------------------------------


class OpenIteration(Message, frozen=True):
    """Rank to coordinator: ``iter()`` of a loader; the n-th on each rank is one iteration."""

    loader: int
    iteration: Count
    #: What the sampler's ``set_epoch`` was told on this rank, where it has one.
    sampler_epoch: int | None = None
    #: Begin there, and not where the last one ended.
    start: Position | None = None


class AskElements(Message, frozen=True):
    """Rank to coordinator: it has taken so many of an iteration in all, and wants more."""

    loader: int
    iteration: Count
    taken: Count
    #: Tickets whose memory it does not need any more.
    released: list[int] = []
    waited_s: float = 0.0
    iterating_s: float = 0.0
    is_waiting: bool = False


class CloseIteration(Message, frozen=True):
    """Rank to coordinator: it wants no more of an iteration."""

    loader: int
    iteration: Count
    taken: Count
    released: list[int] = []
    waited_s: float = 0.0
    iterating_s: float = 0.0


class Delivered(msgspec.Struct, frozen=True, array_like=True):
    """One element for a rank."""

    ticket: int
    offset: int
    size_bytes: int
    #: The position when all ranks have taken the round that it belongs to: epoch, element, units.
    epoch: int
    element: int
    units: int


class Deliver(Message, frozen=True):
    """Coordinator to rank: the next elements of an iteration, in order."""

    loader: int
    iteration: Count
    elements: list[Delivered]
    #: What all random numbers of the stream come from; with the first elements of an iteration.
    seed: int | None = None


class ElementFailed(Message, frozen=True):
    """Coordinator to rank: in place of the next element."""

    loader: int
    iteration: Count
    trouble: Trouble


class IterationEnds(Message, frozen=True):
    """Coordinator to rank: after ``steps`` elements in all the iteration is over."""

    loader: int
    iteration: Count
    steps: Count
    #: Where the next one begins.
    position: Position | None = None
    #: Units are used up, so that no other iteration will give any.
    is_used_up: bool = False


FromDataRank = OpenIteration | AskElements | CloseIteration
ToDataRank = Deliver | ElementFailed | IterationEnds
