"""Names the object that keeps something from travelling, and the path to it: ``loader.dataset._file``.

Runs only after a pickle has failed, so it may be slow: it follows the children of the failing object, each time into
the first child that fails alone too, until no child fails.
"""

from __future__ import annotations

import io
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_MAX_DEPTH = 60
_MAX_CHILDREN = 2000

#: How a failing object is tried alone: returns the exception, or None if it can travel.
Trial = Callable[[Any], "BaseException | None"]


@dataclass(frozen=True)
class Culprit:
    """What cannot travel: the expression that reaches it, its type, and why."""

    path: str
    type_name: str
    reason: str
    advice: str

    def describe(self) -> str:
        """Say what it is and how it is reached."""
        return f"{self.path} is a {self.type_name}: {self.reason}"


def find_culprit(name: str, value: Any, trial: Trial) -> Culprit:
    """Follow ``value``, known as ``name``, down to the object that cannot travel."""
    path, obj = name, value
    error = trial(value)
    seen = {id(value)}
    for _ in range(_MAX_DEPTH):
        for child_path, child in _children(path, obj):
            if id(child) in seen or _never_fails(child):
                continue
            seen.add(id(child))
            child_error = trial(child)
            if child_error is not None:
                path, obj, error = child_path, child, child_error
                break
        else:
            break
    type_name = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    reason = str(error).splitlines()[0] if error is not None and str(error) else type(error).__name__
    return Culprit(path, type_name, reason, _advice(obj, path, name))


def _never_fails(obj: Any) -> bool:
    return isinstance(obj, (int, float, complex, str, bytes, bool, type(None), types.ModuleType))


def _children(path: str, obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object with the expressions that reach them."""
    yield from _items(path, obj)
    if isinstance(obj, types.FunctionType):
        yield from _function_parts(path, obj)
    if isinstance(obj, types.MethodType):
        yield f"{path}.__self__", obj.__self__
    if isinstance(obj, type):
        return
    state = _state_of(obj)
    for attribute, value in state.items():
        yield f"{path}.{attribute}", value


def _items(path: str, obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        for key, value in list(obj.items())[:_MAX_CHILDREN]:
            yield f"{path}[{key!r}]", value
    elif isinstance(obj, (list, tuple)):
        for index, value in enumerate(obj[:_MAX_CHILDREN]):
            yield f"{path}[{index}]", value
    elif isinstance(obj, (set, frozenset)):
        for value in list(obj)[:_MAX_CHILDREN]:
            yield f"{path} (an element)", value


def _function_parts(path: str, func: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        try:
            yield f"{path} (its variable {name!r})", cell.cell_contents
        except ValueError:
            continue
    for index, value in enumerate(func.__defaults__ or ()):
        yield f"{path} (default {index})", value
    for name, value in (func.__kwdefaults__ or {}).items():
        yield f"{path} (default {name!r})", value


def _state_of(obj: Any) -> dict[str, Any]:
    """The attributes that a pickle of the object would hold."""
    if type(obj).__getstate__ is not object.__getstate__:  # type: ignore[comparison-overlap]
        try:
            state = obj.__getstate__()
        except Exception:  # noqa: BLE001 - the user's code may raise anything
            state = None
        if isinstance(state, dict):
            return {str(name): value for name, value in state.items()}
    attributes = dict(getattr(obj, "__dict__", {}) or {})
    for kind in type(obj).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(obj, slot):
                attributes[slot] = getattr(obj, slot)
    return attributes


def _advice(obj: Any, path: str, name: str) -> str:
    """What to do about an object of this kind."""
    kind = type(obj)
    full_name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(obj, io.IOBase):
        return f"open the file where it is used: in the cell, or in the object on first use; or `del {name}`"
    if isinstance(obj, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return "create it in the cell, or make a list or a class with `__iter__` of it"
    if kind.__module__ in ("_thread", "threading", "multiprocessing.synchronize", "asyncio.locks"):
        return "create it in the cell, or leave it out of the object's pickle with `__getstate__`"
    if kind.__module__.split(".")[0] in ("sqlite3", "h5py", "lmdb", "psycopg", "psycopg2", "socket", "_socket", "ssl"):
        return "connect or open it on first use in each process (a lazy property), and leave it out of `__getstate__`"
    if "ProcessGroup" in full_name:
        return "call `torch.distributed.init_process_group` in the cell: a group belongs to its processes"
    if full_name.startswith("torch.cuda."):
        return "create it in the cell: CUDA streams, events and graphs belong to their process"
    return f"create {path} in the cell, or leave it out of the object's pickle with `__getstate__`"
