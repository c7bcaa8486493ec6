"""Which installed modules the notebook uses, so that ranks can have them imported before they start."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterable, Mapping
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


def packages_of(values: Iterable[Any], python: str) -> set[str]:
    """The packages that values of the notebook belong to, and those that a cell imports by itself.

    Args:
        values: What the cell uses.
        python: The cell as Python.
    """
    found: set[Any] = set()
    for value in values:
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        found.update(getattr(kind, "__module__", None) for kind in kinds)
        found.add(value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None))
    for node in ast.walk(ast.parse(python)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return {name.partition(".")[0] for name in found if isinstance(name, str)}


def _is_installed(name: str) -> bool:
    package = name.split(".", maxsplit=1)[0]
    if package in _KERNEL_PACKAGES or package in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and ("site-packages" in file or "dist-packages" in file)
