"""The versions that must agree between kernel and runner, read without importing what they belong to."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

from taas_magic._version import __version__
from taas_magic.wire import PROTOCOL_VERSION, Versions


@functools.cache
def own_versions() -> Versions:
    """The versions of this process's environment."""
    return Versions(
        protocol=PROTOCOL_VERSION,
        taas=__version__,
        python=platform.python_version(),
        cloudpickle=_installed("cloudpickle"),
        torch=_installed("torch"),
    )


def mismatch(kernel: Versions, runner: Versions) -> str:
    """What differs so that pickles of one side may not load on the other; "" where nothing does.

    Python must agree in major and minor, torch and cloudpickle too, taas in its protocol.
    """
    problems = []
    if kernel.protocol != runner.protocol:
        problems.append(f"protocol {kernel.protocol} (taas {kernel.taas}) and {runner.protocol} (taas {runner.taas})")
    for name in ("python", "cloudpickle", "torch"):
        ours, theirs = getattr(kernel, name), getattr(runner, name)
        if _minor(ours) != _minor(theirs):
            problems.append(f"{name} {ours} and {theirs}")
    return "; ".join(problems)


def _minor(version: str) -> list[str]:
    return version.partition("+")[0].split(".")[:2]


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
