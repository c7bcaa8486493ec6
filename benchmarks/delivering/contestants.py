"""Who delivers what: for each measure ours, the peers, and what the machine itself does."""

from __future__ import annotations

from dataclasses import dataclass

from delivering.workloads import BATCH_SIZE, BLOCK_BYTES, READ_S, SMALL_BYTES


@dataclass(frozen=True)
class Measure:
    """One table.

    Attributes:
        key: What ``--only`` takes, and the program of a contestant.
        title: What is delivered.
        unit: Of the figures.
        units_an_element: How many of them an element is.
    """

    key: str
    title: str
    unit: str
    units_an_element: float


@dataclass(frozen=True)
class Ours:
    """A cell on one rank, and what ``taas.toml`` says of its delivery."""

    measure: str
    num_processes: int
    memory_mib: int
    transport: str = "shared"


@dataclass(frozen=True)
class Program:
    """A module that is run with an interpreter, and told what to do and with how many processes.

    Attributes:
        module: The module.
        argument: What to do.
        num_processes: How many processes, or threads, do it.
        python: Whose interpreter: ``ours``, or that of ``peers`` or ``tf``.
        needs: The distribution that must be installed there.
    """

    module: str
    argument: str
    num_processes: int
    python: str = "ours"
    needs: str = "torch"


@dataclass(frozen=True)
class Contestant:
    """One row of a measure's table."""

    measure: str
    key: str
    title: str
    how: Ours | Program


MEASURES = (
    Measure(
        "blocks",
        f"Batches of {BLOCK_BYTES / 1e6:.1f} MB that cost nothing to make, on one machine",
        "GB/s",
        BLOCK_BYTES / 1e9,
    ),
    Measure("transform", f"Images made ready for training, in batches of {BATCH_SIZE}", "samples/s", BATCH_SIZE),
    Measure("storage", f"Items that take {1000 * READ_S:.0f} ms to read", "items/s", 1),
    Measure(
        "tcp", f"Batches of {BLOCK_BYTES / 1e6:.1f} MB over TCP, on the loopback interface", "GB/s", BLOCK_BYTES / 1e9
    ),
    Measure("small", f"Elements of {SMALL_BYTES / 1e3:.0f} kB that cost nothing to make", "elements/s", 1),
)

#: Of large batches so much memory is filled in a moment; of small elements so much is some hundred.
_BLOCKS_MIB, _SMALL_MIB = 256, 1


def _ray(argument: str) -> Program:
    return Program("ray_peer", argument, 2, python="peers", needs="ray")


def _tf(measure: str) -> Program:
    return Program("tf_peer", measure, 2, python="tf", needs="tensorflow")


_OURS, _LOADER = "**taas**", "DataLoader, 2 workers"
_RAY, _TF = "Ray Data `streaming_split`, `iter_batches`", "tf.data service, 2 workers"

CONTESTANTS = (
    Contestant("blocks", "taas", f"{_OURS}, 2 producers", Ours("blocks", 2, _BLOCKS_MIB)),
    Contestant("blocks", "dataloader", _LOADER, Program("torch_loaders", "blocks", 2)),
    Contestant("blocks", "ray", _RAY, _ray("blocks")),
    Contestant("blocks", "tf-data", _TF, _tf("blocks")),
    Contestant("blocks", "copy", "*limit:* a copy in memory, one thread", Program("limits", "copy", 1)),
    Contestant("blocks", "copy-2", "*limit:* copies in memory, two threads", Program("limits", "copy", 2)),
    Contestant("transform", "taas", f"{_OURS}, 2 producers", Ours("transform", 2, _BLOCKS_MIB)),
    Contestant("transform", "dataloader", _LOADER, Program("torch_loaders", "transform", 2)),
    Contestant("transform", "ray", _RAY, _ray("transform")),
    Contestant("transform", "tf-data", _TF, _tf("transform")),
    Contestant("storage", "taas", f"{_OURS}, 8 producers", Ours("storage", 8, _SMALL_MIB)),
    Contestant("storage", "taas-1", f"{_OURS}, one producer", Ours("storage", 1, _SMALL_MIB)),
    Contestant("storage", "dataloader", "DataLoader, 8 workers", Program("torch_loaders", "storage", 8)),
    Contestant("tcp", "taas", f"{_OURS}, one producer", Ours("tcp", 1, _BLOCKS_MIB, "tcp")),
    Contestant("tcp", "taas-2", f"{_OURS}, 2 producers", Ours("tcp", 2, _BLOCKS_MIB, "tcp")),
    Contestant("tcp", "socket", "*limit:* a bare socket, one sender", Program("limits", "socket", 1)),
    Contestant("small", "taas", f"{_OURS}, 2 producers", Ours("small", 2, _SMALL_MIB)),
    Contestant("small", "dataloader", _LOADER, Program("torch_loaders", "small", 2)),
    Contestant("small", "ray", _RAY, _ray("small")),
    Contestant("small", "ray-rows", "Ray Data `streaming_split`, `iter_rows`", _ray("small-rows")),
    Contestant("small", "tf-data", _TF, _tf("small")),
)


@dataclass(frozen=True)
class Target:
    """Ours is to be so many times as fast as another of the measure."""

    measure: str
    text: str
    other: str
    times: float
    #: More than the other, and not only as much.
    is_strict: bool = False

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio of ours to theirs is enough."""
        return ratio > self.times if self.is_strict else ratio >= self.times


TARGETS = (
    Target("blocks", "large batches: at least 0.60 of a copy in memory", "copy", 0.60),
    Target("blocks", "large batches: at least twice a DataLoader", "dataloader", 2),
    Target("blocks", "large batches: ahead of Ray Data", "ray", 1, is_strict=True),
    Target("blocks", "large batches: ahead of the tf.data service", "tf-data", 1, is_strict=True),
    Target("transform", "transforms: at least 0.98 of a DataLoader", "dataloader", 0.98),
    Target("transform", "transforms: ahead of Ray Data", "ray", 1, is_strict=True),
    Target("transform", "transforms: ahead of the tf.data service", "tf-data", 1, is_strict=True),
    Target("storage", "slow storage: 8 producers at least 7.5 times one", "taas-1", 7.5),
    Target("tcp", "TCP: at least 0.90 of a bare socket", "socket", 0.90),
    Target("small", "small elements: at least as many as a DataLoader", "dataloader", 1),
    Target("small", "small elements: ahead of Ray Data, by batches of one", "ray", 1, is_strict=True),
    Target("small", "small elements: ahead of Ray Data, by rows", "ray-rows", 1, is_strict=True),
    Target("small", "small elements: ahead of the tf.data service", "tf-data", 1, is_strict=True),
)
