"""Training as a service, from a notebook cell: ``%load_ext taas_magic``.

Importing this package costs next to nothing; what it needs is imported when it is used, torch never in the kernel's
name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taas_magic._version import __version__

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Entry of ``%load_ext taas_magic``."""
    from taas_magic.notebook import extension

    extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Entry of ``%unload_ext taas_magic``: undoes all that loading did, and ends the runner."""
    from taas_magic.notebook import extension

    extension.unload(shell)
