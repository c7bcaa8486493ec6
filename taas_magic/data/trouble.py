"""From an exception in a producer to what the rank that was to get the element can raise."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from typing import Any

from taas_magic.data.elements import Encoder
from taas_magic.wire_data import Order, Trouble

_MAX_PICKLE_BYTES = 2**20
_MAX_KEYS_CHARACTERS = 400


def describe_trouble(error: BaseException, place: str, encoder: Encoder, project: str = "") -> Trouble:
    """Describe an exception that the user's code has raised.

    Args:
        error: The exception; it loses its traceback.
        place: Where that was: see :func:`place_of`.
        encoder: What the elements of this process are encoded with.
        project: The directory that producers must not write in; "" where they may.
    """
    notes = [place]
    if isinstance(error, PermissionError) and project and _is_in(error.filename, project):
        notes.append("producers may not write in the project directory; `--writes all` lets them, and all ranks")
    # Past what the exception's own class says to that: it may be a frozen dataclass.
    BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), *notes])
    kind = type(error)
    is_plain = kind.__module__ in ("builtins", "__main__")
    text = "".join(traceback.format_exception(kind, error, _without_own_frames(error)))
    return Trouble(
        kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}",
        _message(error),
        text,
        _pickle(error, encoder),
    )


def place_of(name: str, order: Order) -> str:
    """What was being made, in words: an element of the loader that is called ``name``."""
    text = f"in a producer of `{name}`, for element {order.element} of epoch {order.epoch}"
    if not order.keys:
        return text
    keys = repr(pickle.loads(order.keys))
    if len(keys) > _MAX_KEYS_CHARACTERS:
        keys = f"{keys[:_MAX_KEYS_CHARACTERS]} ..."
    return f"{text}, made of {keys}"


def _is_in(filename: Any, project: str) -> bool:
    return isinstance(filename, str) and Path(filename).absolute().is_relative_to(project)


def _without_own_frames(error: BaseException) -> Any:
    """The traceback from where the user's code, or torch's, was entered."""
    own = str(Path(__file__).parent)
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None and entry.tb_frame.f_code.co_filename.startswith(own):
        entry = entry.tb_next
    return entry


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's code
        return f"<{type(error).__name__} whose text could not be made>"


def _pickle(error: BaseException, encoder: Encoder) -> bytes:
    """The exception alone; its traceback and causes are in the text."""
    try:
        BaseException.with_traceback(error, None)
        BaseException.__setattr__(error, "__cause__", None)
        BaseException.__setattr__(error, "__context__", None)
        pickled = encoder.encode(error).to_bytes()
    except Exception:  # noqa: BLE001 - it is told in words, then
        return b""
    return pickled if len(pickled) <= _MAX_PICKLE_BYTES else b""
