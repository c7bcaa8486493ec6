"""Large ``bytes`` objects as blocks: copied once a machine, and in a rank an object over the memory that all map.

Nothing in Python can make a ``bytes`` over memory that is there. But CPython lays one out as a head and the bytes
behind it, and large blocks have room for a head before them; a rank only has to write it, in a page of its own.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from typing import Any

#: Smaller ones go into the pickle.
MIN_BYTES = 2**20
#: Reference count, type, size, hash; behind the bytes themselves comes a zero.
_HEAD_BYTES = bytes.__basicsize__ - 1
#: What is free before a block of at least :data:`MIN_BYTES`.
HEADROOM_BYTES = 64
_IS_LAID_OUT_SO = (
    sys.implementation.name == "cpython"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
    and 4 * ctypes.sizeof(ctypes.c_ssize_t) == _HEAD_BYTES
)


class _Head(ctypes.Structure):
    _fields_ = (
        ("references", ctypes.c_ssize_t),
        ("type", ctypes.c_void_p),
        ("size", ctypes.c_ssize_t),
        ("hash", ctypes.c_ssize_t),
    )


def is_large(obj: Any) -> bool:
    """Whether an object travels as a block for being a large ``bytes``."""
    return type(obj) is bytes and len(obj) >= MIN_BYTES and _IS_LAID_OUT_SO


def place_of(obj: bytes) -> tuple[int, int]:
    """Where the bytes lie, with the zero behind them: address and number."""
    return id(obj) + _HEAD_BYTES, len(obj) + 1


def copied_out(view: memoryview) -> bytes:
    """An ordinary object with the bytes of a block."""
    return bytes(view[:-1])


def write_head(address: int, nbytes: int) -> None:
    """Make an object of a block that is mapped privately; it must not be unmapped while :func:`is_used`."""
    head = _Head.from_address(address - _HEAD_BYTES)
    # One reference of nobody's, so that it is never taken for an object that could be freed.
    head.references, head.type, head.size, head.hash = 1, id(bytes), nbytes - 1, -1


def object_at(address: int) -> bytes:
    """The object whose head :func:`write_head` has written."""
    obj: bytes = ctypes.cast(address - _HEAD_BYTES, ctypes.py_object).value
    return obj


def is_used(address: int) -> bool:
    """Whether somebody refers to that object."""
    return bool(_Head.from_address(address - _HEAD_BYTES).references > 1)
