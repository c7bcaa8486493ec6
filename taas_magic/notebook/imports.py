"""Which installed modules the notebook uses, so that ranks can have them imported before they start."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

#: What a kernel imports for itself; ranks have no use for it.
_KERNEL_PACKAGES = frozenset(
    [
        "IPython",
        "ipykernel",
        "jupyter_client",
        "jupyter_core",
        "traitlets",
        "zmq",
        "tornado",
        "debugpy",
        "taas",
        "taas_magic",
    ]
)


def installed_modules(namespace: Mapping[str, Any]) -> list[str]:
    """Names of modules, from installed packages, to which values of ``namespace`` belong; sorted.

    The project's own modules are not among them: they may be edited between two cells.
    """
    names: set[Any] = set()
    for value in list(namespace.values()):
        if isinstance(value, types.ModuleType):
            names.add(value.__name__)
        else:
            names.add(getattr(value, "__module__", None) or type(value).__module__)
            names.add(type(value).__module__)
    return sorted(name for name in names if isinstance(name, str) and _is_installed(name))


def _is_installed(name: str) -> bool:
    package = name.split(".", maxsplit=1)[0]
    if package in _KERNEL_PACKAGES or package in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and ("site-packages" in file or "dist-packages" in file)
