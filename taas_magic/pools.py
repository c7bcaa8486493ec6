"""Which pool a cell means, and which of its machines a run takes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from taas_magic.errors import PlacementError, SettingsError
from taas_magic.settings import PoolSettings, Settings
from taas_magic.units import plural

LOCAL = "local"


def find_pool(settings: Settings, name: str) -> PoolSettings:
    """The pool of a name; ``local`` is there always. Where no pools are set up, any name means this machine.

    Raises:
        PlacementError: if there is no such pool.
        SettingsError: if it cannot be used.
    """
    pools = settings.pools
    if name not in pools:
        if not pools or name == LOCAL:
            return PoolSettings(name=name)
        # Names are short: one letter of two makes a near one.
        nearest = next(iter(difflib.get_close_matches(name, pools, n=1, cutoff=0.5)), "")
        raise PlacementError.of(
            f"there is no pool `{name}`",
            expected=", ".join(sorted({*pools, LOCAL})),
            do=f"write #!{nearest}.N" if nearest else f"choose one of them, or add [pools.{name}] to taas.toml",
        )
    pool = pools[name]
    if pool.engine == "ray":
        raise SettingsError.of(
            f"pool `{name}` has engine ray, which this release does not have yet",
            expected="local, ssh or runner",
            do="choose another engine",
        )
    if pool.engine == "ssh" and not pool.machines:
        raise _no_machines(pool, "machines, a list, or machine_list, the path of a file with one a line")
    if pool.engine == "runner" and not pool.runners:
        raise _no_machines(pool, "runners, a list of their addresses and keys")
    return pool


def _no_machines(pool: PoolSettings, expected: str) -> SettingsError:
    return SettingsError.of(
        f"pool `{pool.name}` has no machines for engine {pool.engine}",
        expected=expected,
        do=f"add them to [pools.{pool.name}]",
    )


def place(pool: PoolSettings, gpus: int, gpus_per_machine: int | None, machine_gpus: Sequence[int]) -> list[int]:
    """How many ranks each machine gets.

    Args:
        pool: The pool.
        gpus: How many ranks there are to be.
        gpus_per_machine: On each machine of several; None for as many as a machine has.
        machine_gpus: How many ranks each machine can hold; 0 where it cannot be used.

    Raises:
        PlacementError: if the machines cannot hold them. The first one must be usable: it is the head.
    """
    if pool.budget is not None and gpus > pool.budget:
        raise PlacementError.of(
            f"--gpus {gpus}, and one run may take {pool.budget} of pool `{pool.name}`",
            expected=f"--gpus 1 to {pool.budget}",
            do=f"write --gpus {pool.budget}, or raise `budget` in [pools.{pool.name}]",
        )
    counts = [0] * len(machine_gpus)
    left = gpus
    for number, has in enumerate(machine_gpus):
        wanted = min(left, gpus_per_machine or has)
        if has and wanted <= has:
            counts[number] = wanted
            left -= wanted
        if left == 0 and not counts[0]:
            raise PlacementError.of(
                f"pool `{pool.name}`: its first machine, the head, can hold {plural(machine_gpus[0], 'rank')}, "
                f"and is to have {min(gpus, gpus_per_machine or gpus)}",
                expected="rank 0 on the head",
                do="name a machine first that has enough, or write a smaller size",
            )
        if left == 0:
            return counts
    held = gpus - left
    size = f" with {gpus_per_machine} each" if gpus_per_machine else ""
    usable = [has for has in machine_gpus if has and has >= min(gpus, gpus_per_machine or 1)]
    found = f"{plural(len(usable), 'machine')}{size}" if gpus_per_machine else plural(sum(machine_gpus), "GPU")
    raise PlacementError.of(
        f"--gpus {gpus}, and pool `{pool.name}` can hold {held} now: it has {found} "
        f"of {plural(len(machine_gpus), 'machine')} ({', '.join(map(str, machine_gpus))} GPUs)",
        expected=f"--gpus 1 to {held}" if held else "a machine that can be used",
        do=f"write --gpus {held}" if held else "`%taas pools` says what is wrong with the machines",
    )
