"""From ``--cpus`` and ``--units`` to what producers have to do: which registered loaders a cell uses, and how much."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from taas_magic.data import describe, registry
from taas_magic.data.rounds import num_rounds
from taas_magic.data.waiting import PRODUCERS_A_MACHINE
from taas_magic.errors import DeliveryError
from taas_magic.namespace import process_state
from taas_magic.namespace.common import Common
from taas_magic.namespace.pack import PackedNamespace, Selection, pack_namespace
from taas_magic.namespace.store import BlockStore
from taas_magic.pragma import Pragma
from taas_magic.settings import Settings
from taas_magic.units import plural
from taas_magic.wire_data import DeliveryTask, LoaderTask

#: The most memory for elements, unless the settings say otherwise: this part of the machine's.
_MEMORY_SHARE = 8
_MAX_MEMORY_BYTES = 4 * 2**30
_PREPARE_BYTES = 256 * 2**20


@dataclass
class Delivery:
    """What is to be delivered to a run, and the loaders, packed."""

    task: DeliveryTask
    packed: PackedNamespace
    #: What the units mean, a line a loader.
    notices: list[str]


def loaders_of_cell(common: Common, used: set[int] | None = None) -> list[tuple[int, registry.Registration]]:
    """The registered loaders that the ranks know, by their number there.

    Args:
        common: What notebook and ranks have in common.
        used: The ids of what the cell reaches; None where all that the ranks know is what it reaches.
    """
    number_of = {id(obj): number for number, obj in common.objects.items()}
    found = []
    for each in registry.registrations():
        key = id(each.loader)
        if key in number_of and (used is None or key in used):
            found.append((number_of[key], each))
    return found


def plan_delivery(  # noqa: PLR0917 - everything that a delivery depends on
    main: dict[str, Any],
    loaders: list[tuple[int, registry.Registration]],
    common: Common,
    pragma: Pragma,
    settings: Settings,
    environment: dict[str, str],
    store: BlockStore,
    run_id: str,
) -> Delivery:
    """Pack the loaders and say what is to be done with them.

    Raises:
        DeliveryError: if it cannot be done, with the reason.
        CannotTravelError: if a loader cannot be sent.
    """
    assert pragma.cpus is not None
    ranks = [] if pragma.rank == "all" else sorted(pragma.rank)
    num_ranks = len(ranks) or pragma.gpus
    tasks, values = [], {}
    for place, (number, each) in enumerate(loaders):
        _require_right_sampler(each, num_ranks)
        label = f"{place} {each.name}"
        values[label] = each.loader
        tasks.append(
            LoaderTask(
                number,
                label,
                registry.name_of(each.loader, main) or each.name,
                each.role,
                each.tail,
                each.on_error,
                each.determinism,
                pragma.units if each.role == "train" else None,
                each.cycles,
                each.start,
            )
        )
    packed = pack_namespace(
        main, Selection(()), process_state=process_state.capture(environment), store=store, values=values
    )
    memory_bytes = _memory_bytes(settings)
    task = DeliveryTask(
        id=run_id,
        num_ranks=num_ranks,
        num_producers=pragma.cpus * settings.delivery.processes,
        loaders=tasks,
        environment=environment,
        memory_bytes=memory_bytes,
        prepare_bytes=_prepare_bytes(settings, memory_bytes),
        prepare_s=settings.delivery.prepare_s,
        shared=_shared(packed.common, common),
        ranks=ranks,
        project="" if pragma.writes == "all" else str(settings.project.directory),
        writable=[str(path) for path in settings.project.writable],
        transport=settings.delivery.transport,
    )
    names = [each.name for each in tasks]
    return Delivery(task, packed, list(_unit_notices(loaders, names, pragma, num_ranks)))


def _memory_bytes(settings: Settings) -> int:
    if settings.delivery.memory_mib is not None:
        return int(settings.delivery.memory_mib * 2**20)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_MAX_MEMORY_BYTES, total // _MEMORY_SHARE)


def _prepare_bytes(settings: Settings, memory_bytes: int) -> int:
    wanted = settings.delivery.prepare_mib
    return min(memory_bytes, _PREPARE_BYTES if wanted is None else int(wanted * 2**20))


def _shared(own: Common, ranks: Common) -> list[tuple[int, int]]:
    """Classes and functions that producers and ranks both have: by their number here, and there."""
    theirs = {id(obj): number for number, obj in ranks.objects.items() if isinstance(obj, (type, types.FunctionType))}
    return [(number, theirs[id(obj)]) for number, obj in own.objects.items() if id(obj) in theirs]


def _require_right_sampler(each: registry.Registration, num_ranks: int) -> None:
    sampler = describe.distributed_sampler(each.loader)
    if sampler is not None and sampler.num_replicas != num_ranks:
        raise DeliveryError.of(
            f"`{each.name}` has a DistributedSampler for {plural(sampler.num_replicas, 'rank')}, "
            f"and the cell runs on {num_ranks}",
            expected=f"num_replicas={num_ranks}, or a plain sampler: elements are dealt to the ranks in any case",
            do="make the loader with `shuffle=True` in place of the DistributedSampler, and register that",
        )


def _unit_notices(
    loaders: list[tuple[int, registry.Registration]], names: list[str], pragma: Pragma, num_ranks: int
) -> Iterator[str]:
    if pragma.units is None:
        return
    for (_, each), name in zip(loaders, names, strict=True):
        if each.role != "train":
            continue
        parts = [plural(pragma.units, "element")]
        size = describe.batch_size(each.loader)
        if size is not None:
            parts.append(f"{plural(pragma.units * size, 'sample')} in batches of {size}")
        length = describe.num_elements(each.loader)
        if length is not None:
            an_epoch = num_rounds(length, num_ranks, drops_tail=each.tail == "drop") * num_ranks
            if describe.distributed_sampler(each.loader) is not None:
                an_epoch = length * num_ranks
            if an_epoch:
                parts.append(f"{pragma.units / an_epoch:.3g} epochs of {an_epoch}")
        yield f"`{name}`: --units {pragma.units} is {', '.join(parts)}"


def describe_delivery(loaders: list[tuple[int, registry.Registration]], pragma: Pragma, processes: int) -> str:
    """What would be delivered, for a plan."""
    assert pragma.cpus is not None
    if not loaders:
        return _NOTHING_REGISTERED
    names = ", ".join(f"`{each.name}`" for _, each in loaders)
    return f"delivered by {plural(pragma.cpus * processes, 'producer')}: {names}"


_NOTHING_REGISTERED = (
    "--cpus has nothing to do: the cell uses no registered loader\n"
    "to do: taas.register(loader) in a cell before, for each loader that producers are to prepare"
)


def nothing_registered() -> str:
    """What to say where ``--cpus`` has nothing to do."""
    return _NOTHING_REGISTERED


__all__ = [
    "PRODUCERS_A_MACHINE",
    "Delivery",
    "describe_delivery",
    "loaders_of_cell",
    "nothing_registered",
    "plan_delivery",
]
