"""Turns an exception that ended a rank's cell into what the kernel can show and raise."""

from __future__ import annotations

import io
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from taas_magic.data.delivered import ProducerTracebackError
from taas_magic.namespace.pickler import reduce_exception
from taas_magic.wire import FailureReport

#: Looks at an exception and returns what a user should know about it, or None.
Explain = Callable[[BaseException], "str | None"]


def report_failure(
    rank: int,
    error: BaseException,
    structured: Callable[[BaseException], list[str]],
    explanations: Iterable[Explain] = (),
) -> FailureReport:
    """Describe ``error``; the notes that ``explanations`` find become part of it."""
    at = time.monotonic()
    _drop_signal_handler(error)
    if isinstance(error.__cause__, ProducerTracebackError):
        # What explains exceptions of this rank says nothing of those that came from elsewhere.
        explanations = ()
    for explain in explanations:
        note = _quietly(explain, error)
        if note:
            # Past what the exception's own class says to that: it may be a frozen dataclass.
            BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), note])
    try:
        lines = structured(error)
    except Exception:  # noqa: BLE001 - formatting runs the user's code too
        lines = traceback.format_exception(error)
    kind = type(error)
    is_plain = kind.__module__ in ("builtins", "__main__")
    return FailureReport(
        rank=rank,
        at_s=at,
        type_name=kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}",
        message=_message(error),
        traceback=lines,
        plain_traceback="".join(traceback.format_exception(error)),
        pickled=_pickle_exception(error),
        is_interrupt=isinstance(error, KeyboardInterrupt),
    )


def _drop_signal_handler(error: BaseException) -> None:
    """End the traceback of an interrupt where the user's code was, not in the handler that raised it."""
    before, last = None, error.__traceback__
    while last is not None and last.tb_next is not None:
        before, last = last, last.tb_next
    if before is not None and last is not None and last.tb_frame.f_code.co_name == "on_interrupt":
        before.tb_next = None
    if isinstance(error, KeyboardInterrupt):
        # What it interrupted, a collective that was broken off to let it through, says nothing about the cell.
        error.__suppress_context__ = True


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's code
        return f"<{type(error).__name__} whose text could not be made>"


def _quietly(explain: Explain, error: BaseException) -> str | None:
    try:
        return explain(error)
    except Exception:  # noqa: BLE001 - a hint must not hide the error
        return None


def _pickle_exception(error: BaseException) -> bytes:
    """The exception alone: without its traceback and causes, which the text has."""
    stream = io.BytesIO()
    try:
        _pickler(stream).dump(error)
    except Exception:  # noqa: BLE001 - a pickle runs the user's code
        return b""
    return stream.getvalue() if stream.tell() < _MAX_PICKLE_BYTES else b""


_MAX_PICKLE_BYTES = 16 * 2**20


def _pickler(stream: io.BytesIO) -> Any:
    """A pickler that names what the notebook has under the same name; only the rest goes by value.

    Loading a notebook's class by value would give the notebook's own class other methods, with other globals.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined, unused-ignore]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, types.FunctionType)) and _is_in_main(obj):
                return obj.__qualname__
            reduced = reduce_exception(obj) if isinstance(obj, BaseException) else None
            return reduced or super().reducer_override(obj)

    return Pickler(stream, protocol=5)


def _is_in_main(obj: Any) -> bool:
    found: Any = sys.modules["__main__"]
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return obj.__module__ == "__main__" and found is obj


def missing_name_hint(other_names: Iterable[str], left_out: Mapping[str, str]) -> Explain:
    """Explain a NameError, or a KeyError of ``globals()``, for a name that the notebook has and that stayed there."""
    names = frozenset(other_names)

    def explain(error: BaseException) -> str | None:
        name = error.name if isinstance(error, NameError) else None
        if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
            name = error.args[0]
        if name is None:
            return None
        if name in left_out:
            return f"`{name}` is in the notebook but cannot be sent to the ranks: {left_out[name]}"
        if name not in names:
            return None
        return (
            f"`{name}` is in the notebook, but the cell's text does not show that it is used, so it was not sent\n"
            f"to do: add `--with {name}` to the pragma, or name `{name}` in the cell"
        )

    return explain
