"""The ways in which an object can change, and how each is brought into another process's copy of it.

An *aspect* is one of them: a dict's items, an instance's attributes, a tensor's place in memory. ``take`` notes the
aspect's value shallowly, ``diff`` compares and returns what to send (or ``SAME``), ``apply`` carries that out on the
other copy. Sub-objects are compared by identity: those that can change have aspects of their own.
"""

from __future__ import annotations

import copyreg
import datetime as dt
import decimal
import enum
import fractions
import functools
import pathlib
import re
import sys
import types
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cloudpickle import cloudpickle as cloudpickle_internals

from taas_magic.namespace.blocks import has_lost_its_memory

SAME = object()

#: Types whose instances never change, or that a pickle holds by name.
_IMMUTABLE = (
    int, float, complex, str, bytes, bool, type(None), range, slice, type(Ellipsis), type(NotImplemented),
    dt.date, dt.time, dt.timedelta, dt.tzinfo, decimal.Decimal, fractions.Fraction, uuid.UUID,
    pathlib.PurePath, re.Pattern, enum.Enum, types.ModuleType, types.CodeType, types.BuiltinFunctionType,
    types.MethodType, types.GetSetDescriptorType, types.MemberDescriptorType, types.MappingProxyType, property,
    staticmethod, classmethod, functools.partial, weakref.ref, types.GenericAlias,
)  # fmt: skip

_CLASS_INTERNALS = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__module__",
        "__doc__",
        "_abc_impl",
        "__abstractmethods__",
        "__annotations_cache__",
        # What copyreg remembers of a class once an instance of it has been pickled.
        "__slotnames__",
    }
)


class View(Protocol):
    """What an aspect may ask about sub-objects; see :class:`taas_magic.namespace.track.Tracker`."""

    def note(self, value: Any) -> Any:
        """Note a sub-object for a later :meth:`differs`."""

    def differs(self, noted: Any, value: Any) -> bool:
        """Whether the sub-object is another one now, or the same and not to be recognised by identity."""

    def has_arrived(self, address: int) -> bool:
        """Whether the memory at an address came with the namespace."""


@dataclass(frozen=True)
class Aspect:
    """One way to change. ``take(obj, view)``, ``diff(obj, taken, view)``, ``apply(obj, payload)``."""

    name: str
    take: Callable[[Any, View], Any]
    diff: Callable[[Any, Any, View], Any]
    apply: Callable[[Any, Any], None]


# -- containers ------------------------------------------------------------------------------------------------------


def _take_sequence(obj: Iterable[Any], view: View) -> list[Any]:
    return [view.note(value) for value in list(obj)]


def _diff_sequence(obj: Iterable[Any], taken: list[Any], view: View) -> Any:
    values = list(obj)
    if len(values) == len(taken) and not any(map(view.differs, taken, values)):
        return SAME
    return values


def _apply_list(obj: list[Any], values: list[Any]) -> None:
    list.__setitem__(obj, slice(None), values)


def _apply_deque(obj: deque[Any], values: list[Any]) -> None:
    deque.clear(obj)
    deque.extend(obj, values)


def _take_dict(obj: dict[Any, Any], view: View) -> list[tuple[Any, Any]]:
    return [(view.note(key), view.note(value)) for key, value in _items_of(obj)]


def _items_of(obj: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The items, whatever a subclass makes of ``items``; an OrderedDict keeps its order apart from its dict's."""
    return list(OrderedDict.items(obj) if isinstance(obj, OrderedDict) else dict.items(obj))


def _diff_dict(obj: dict[Any, Any], taken: list[tuple[Any, Any]], view: View) -> Any:
    items = _items_of(obj)
    if len(items) == len(taken) and not any(
        view.differs(old_key, key) or view.differs(old, value)
        for (old_key, old), (key, value) in zip(taken, items, strict=True)
    ):
        return SAME
    return items


class Kept:
    """Stands in an update of a dict for a value that could not be sent: the receiver keeps its own."""

    def __reduce__(self) -> str:
        return "KEPT"


KEPT = Kept()


def _apply_dict(obj: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    # A subclass may mean something else by update: a Counter counts.
    kind = OrderedDict if isinstance(obj, OrderedDict) else dict
    before = dict(kind.items(obj))
    kind.clear(obj)
    for key, value in items:
        if value is not KEPT:
            kind.__setitem__(obj, key, value)
        elif key in before:
            kind.__setitem__(obj, key, before[key])


def _take_set(obj: set[Any], view: View) -> set[Any]:
    return set(obj)


def _diff_set(obj: set[Any], taken: set[Any], view: View) -> Any:
    return SAME if set(obj) == taken else list(obj)


def _apply_set(obj: set[Any], members: list[Any]) -> None:
    set.clear(obj)
    set.update(obj, members)


def _apply_bytearray(obj: bytearray, contents: bytes) -> None:
    obj[:] = contents


def _take_cell(obj: types.CellType, view: View) -> Any:
    return _take_sequence(_contents(obj), view)


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _apply_cell(obj: types.CellType, contents: list[Any]) -> None:
    if contents:
        obj.cell_contents = contents[0]
    elif _contents(obj):
        del obj.cell_contents


# -- attributes ------------------------------------------------------------------------------------------------------


def attributes_of(obj: Any) -> dict[str, Any] | None:
    """The attributes of an instance that take part in its pickle; None where its ``__getstate__`` transforms them.

    A ``__getstate__`` that only leaves attributes out, or sets them to None, is honoured.
    """
    if isinstance(obj, type):
        return {name: value for name, value in vars(obj).items() if name not in _CLASS_INTERNALS}
    attributes = dict(getattr(obj, "__dict__", None) or {})
    for name in copyreg._slotnames(type(obj)):  # type: ignore[attr-defined]
        if hasattr(obj, name):
            attributes[name] = getattr(obj, name)
    has_default_state = type(obj).__getstate__ is object.__getstate__  # type: ignore[comparison-overlap]
    if isinstance(obj, types.FunctionType) or has_default_state:
        return attributes
    state = obj.__getstate__()
    if isinstance(state, tuple) and len(state) == 2:
        state = {**(state[0] or {}), **(state[1] or {})}
    if not isinstance(state, dict):
        return None
    kept = {name: value for name, value in state.items() if name in attributes and attributes[name] is value}
    transformed = any(value is not None for name, value in state.items() if name not in kept)
    return None if transformed else kept


def _diff_class(obj: Any, taken: Any, view: View) -> Any:
    # A class by which FSDP shards a module means nothing without the module's shards, which stay in the ranks.
    # What stands for a class while a cell runs is not meant to stay.
    kind = getattr(type(obj), "_taas_stands_for", type(obj))
    is_same = kind is taken or any(kind.__name__ == "FSDPModule" for kind in type(obj).__mro__)
    return SAME if is_same else type(obj)


def _apply_class(obj: Any, kind: type) -> None:
    obj.__class__ = kind


def _take_attributes(obj: Any, view: View) -> dict[str, Any]:
    return {name: view.note(value) for name, value in (attributes_of(obj) or {}).items()}


def _diff_attributes(obj: Any, taken: dict[str, Any], view: View) -> Any:
    attributes = attributes_of(obj) or {}
    changed = {
        name: value for name, value in attributes.items() if name not in taken or view.differs(taken[name], value)
    }
    present = attributes if isinstance(obj, type) else {**attributes, **(getattr(obj, "__dict__", None) or {})}
    removed = [name for name in taken if name not in present]
    if isinstance(obj, _data_loader_type()):
        changed.pop("_iterator", None)
    return (changed, removed) if changed or removed else SAME


def _apply_attributes(obj: Any, payload: tuple[dict[str, Any], list[str]]) -> None:
    changed, removed = payload
    own = None if isinstance(obj, type) else getattr(obj, "__dict__", None)
    for name, value in changed.items():
        if own is not None and not _is_slot(type(obj), name):
            own[name] = value
        elif isinstance(obj, type):
            type.__setattr__(obj, name, value)
        else:
            object.__setattr__(obj, name, value)
    for name in removed:
        if own is not None and name in own:
            del own[name]
        elif isinstance(obj, type):
            type.__delattr__(obj, name)
        else:
            object.__delattr__(obj, name)


def has_own_state(obj: Any) -> bool:
    """Whether ``__getstate__`` transforms the attributes: such an object is compared and updated by that state."""
    return _has_default_pickle(type(obj)) and not _is_pandas_column(obj)


def _is_pandas_column(obj: Any) -> bool:
    """Whether it may be shared by several frames until one writes to it: never updated in place, but replaced."""
    extensions = sys.modules.get("pandas.api.extensions")
    return extensions is not None and isinstance(obj, extensions.ExtensionArray)


def _apply_state(obj: Any, state: Any) -> None:
    """Do what unpickling does with a state, on an object that exists."""
    set_state = getattr(obj, "__setstate__", None)
    if set_state is not None:
        set_state(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    for name, value in {**(attributes or {}), **(slots or {})}.items():
        object.__setattr__(obj, name, value)


def _is_slot(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), types.MemberDescriptorType)


def _data_loader_type() -> tuple[type, ...]:
    data = sys.modules.get("torch.utils.data")
    return (data.DataLoader,) if data is not None else ()


# -- memory ----------------------------------------------------------------------------------------------------------


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad


def place_of_tensor(tensor: Any) -> int:
    """The address of a tensor's first element; 0 where it has none in this process's memory."""
    if not _is_plain_strided(tensor) or tensor.device.type != "cpu" or not tensor.numel():
        return 0
    return int(tensor.data_ptr())


def _take_tensor(obj: Any, view: View) -> Any:
    if not _is_plain_strided(obj):
        return None
    grad = view.note(obj.grad if obj.is_leaf else None)
    return (_layout(obj), _content_on_device(obj)), grad, _take_attributes(obj, view)


def _content_on_device(tensor: Any) -> Any:
    """What tells whether memory of a GPU has changed; None for other memory, which is compared, or always sent."""
    return content_digest(tensor) if tensor.device.type == "cuda" else None


#: How many bytes are summed up at once: what that takes besides is a few times as much.
_DIGEST_PIECE_BYTES = 32 * 2**20


def content_digest(tensor: Any) -> tuple[int, int]:
    """Two sums over a tensor's bytes, plain and weighted by place, made where the tensor is.

    Any change of one or two numbers changes them, and any other but for a chance of 1 in 2**64.
    """
    torch = sys.modules["torch"]
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // 4 * 4
    pieces = [flat[at : min(at + _DIGEST_PIECE_BYTES, whole)] for at in range(0, whole, _DIGEST_PIECE_BYTES)]
    numbers = [piece.view(torch.int32) for piece in pieces] + [flat[whole:]]
    plain = weighted = at = 0
    for piece in numbers:
        values = piece.to(torch.int64)
        places = torch.arange(at, at + len(values), dtype=torch.int64, device=values.device)
        plain += int(values.sum())
        # An odd factor: different places have different weights, modulo 2**64 too.
        weighted += int((values * (places * 0x5851F42D4C957F2D + 1)).sum())
        at += len(values)
    return plain % 2**64, weighted % 2**64


def _diff_tensor(obj: Any, taken: Any, view: View) -> Any:
    """A dict of what changed: "tensor" is a new tensor with the content, "grad", "attributes"."""
    changed: dict[str, Any] = {}
    if _is_plain_strided(obj) and has_lost_its_memory(obj):
        return SAME
    if taken is None or not _is_plain_strided(obj):
        return {"tensor": obj.detach().clone(), "requires_grad": obj.requires_grad}
    (layout, content), grad, attributes = taken
    is_on_host = obj.device.type == "cpu"
    if layout != _layout(obj) or (not is_on_host and (content is None or content != _content_on_device(obj))):
        # Other memory that the kernel has may be overwritten before this is read from it: two may have been swapped.
        is_the_kernels = obj.device.type == "cpu" and view.has_arrived(obj.data_ptr())
        changed["tensor"] = obj.detach().clone() if is_the_kernels else obj.detach()
        changed["requires_grad"] = obj.requires_grad and obj.is_leaf
    new_grad = obj.grad if obj.is_leaf else None
    if view.differs(grad, new_grad):
        changed["grad"] = new_grad
    changed_attributes = _diff_attributes(obj, attributes, view)
    if changed_attributes is not SAME:
        changed["attributes"] = changed_attributes
    return changed or SAME


def _is_plain_strided(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    if torch.nn.parameter.is_lazy(tensor):
        return False
    plain: bool = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return plain


def _apply_tensor(obj: Any, payload: dict[str, Any]) -> None:
    torch = sys.modules["torch"]
    if "tensor" in payload:
        new = payload["tensor"]
        with torch.no_grad():
            if new.shape == obj.shape and new.dtype == obj.dtype and _stays(obj, new):
                obj.data.copy_(new)
            else:
                obj.data = new
        if obj.is_leaf and obj.requires_grad != payload["requires_grad"]:
            obj.requires_grad_(payload["requires_grad"])
    if "grad" in payload:
        obj.grad = payload["grad"]
    if "attributes" in payload:
        _apply_attributes(obj, payload["attributes"])


def _stays(old: Any, new: Any) -> bool:
    """Whether new content goes into the old memory; a model that the cell moved to the GPU is moved here too."""
    return bool(new.device == old.device or new.device.type == "cpu")


def _array_layout(array: Any) -> tuple[Any, ...]:
    return array.ctypes.data, array.dtype, array.shape, array.strides


def _take_array(obj: Any, view: View) -> Any:
    return _array_layout(obj)


def _diff_array(obj: Any, taken: Any, view: View) -> Any:
    return SAME if taken == _array_layout(obj) else obj.view()


def _apply_array(obj: Any, new: Any) -> None:
    if new.shape != obj.shape or new.dtype != obj.dtype:
        obj.dtype = new.dtype
        obj.resize(new.shape, refcheck=False)
    obj[...] = new


def _apply_generator(obj: Any, state: Any) -> None:
    obj.set_state(state)


def _diff_generator(obj: Any, taken: Any, view: View) -> Any:
    state = obj.get_state()
    return SAME if bool((state == taken).all()) else state


ITEMS = Aspect("items", _take_dict, _diff_dict, _apply_dict)
ELEMENTS = Aspect("elements", _take_sequence, _diff_sequence, _apply_list)
DEQUE = Aspect("deque", _take_sequence, _diff_sequence, _apply_deque)
MEMBERS = Aspect("members", _take_set, _diff_set, _apply_set)
BYTES = Aspect(
    "bytes",
    lambda obj, view: bytes(obj),
    lambda obj, taken, view: SAME if obj == taken else bytes(obj),
    _apply_bytearray,
)
CELL = Aspect("cell", _take_cell, lambda obj, taken, view: _diff_sequence(_contents(obj), taken, view), _apply_cell)
#: Before all others: lazy modules and their parameters become other ones, and can hold more then.
CLASS = Aspect("class", lambda obj, view: type(obj), _diff_class, _apply_class)
ATTRIBUTES = Aspect("attributes", _take_attributes, _diff_attributes, _apply_attributes)
TENSOR = Aspect("tensor", _take_tensor, _diff_tensor, _apply_tensor)
ARRAY = Aspect("array", _take_array, _diff_array, _apply_array)
#: Only carried out: whether the state changed is found by its pickle, like that of objects without any aspect.
STATE = Aspect("state", lambda obj, view: None, lambda obj, taken, view: SAME, _apply_state)
GENERATOR = Aspect("generator", lambda obj, view: obj.get_state(), _diff_generator, _apply_generator)

BY_NAME: Mapping[str, Aspect] = {
    aspect.name: aspect
    for aspect in (CLASS, ITEMS, ELEMENTS, DEQUE, MEMBERS, BYTES, CELL, ATTRIBUTES, STATE, TENSOR, ARRAY, GENERATOR)
}


def is_immutable(obj: Any) -> bool:
    """Whether the object itself cannot change (a tuple may still hold what can)."""
    if isinstance(obj, _IMMUTABLE):
        return True
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, (numpy.generic, numpy.dtype, numpy.ufunc)):
        return True
    return torch is not None and isinstance(obj, (torch.dtype, torch.device, torch.layout, torch.memory_format))


def is_dynamic_class(obj: Any) -> bool:
    """Whether a class is pickled by value: it was defined in the notebook or in a function."""
    try:
        return obj in cloudpickle_internals._DYNAMIC_CLASS_TRACKER_BY_CLASS
    except TypeError:
        return False


def aspects_of(obj: Any) -> tuple[Aspect, ...] | None:
    """The aspects in which an object is followed; None where only its pickle can tell whether it changed."""
    kind = type(obj)
    known = _ASPECTS_OF_TYPE.get(kind)
    if known is not None:
        return known
    if isinstance(obj, type):
        return (ATTRIBUTES,) if is_dynamic_class(obj) else ()
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(obj, torch.Tensor):
        return (TENSOR,) if kind is torch.Tensor else (CLASS, TENSOR)
    if torch is not None and isinstance(obj, torch.Generator):
        return (GENERATOR,)
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return (ARRAY,) if not obj.dtype.hasobject else None
    if _is_pandas_column(obj):
        return None
    content = next((aspect for base, aspect in _CONTENT_OF_BASE if isinstance(obj, base)), None)
    if content is not None:
        return (content, ATTRIBUTES) if _has_attributes(obj) else (content,)
    if (_has_default_pickle(kind) or isinstance(obj, types.SimpleNamespace)) and attributes_of(obj) is not None:
        return (CLASS, ATTRIBUTES)
    return None


def _has_default_pickle(kind: type) -> bool:
    return (
        kind.__reduce_ex__ is object.__reduce_ex__  # type: ignore[comparison-overlap]
        and kind.__reduce__ is object.__reduce__  # type: ignore[comparison-overlap]
        and kind not in copyreg.dispatch_table
        and not kind.__flags__ & _IS_C_TYPE_WITHOUT_STATE
    )


#: Immutable (static) types hold state that attributes do not show; heap types made by ``class`` do not have the flag.
_IS_C_TYPE_WITHOUT_STATE = 1 << 8

_ASPECTS_OF_TYPE: dict[type, tuple[Aspect, ...]] = {
    dict: (ITEMS,),
    list: (ELEMENTS,),
    set: (MEMBERS,),
    bytearray: (BYTES,),
    types.CellType: (CELL,),
    types.FunctionType: (ATTRIBUTES,),
}
_CONTENT_OF_BASE: tuple[tuple[type, Aspect], ...] = (
    (dict, ITEMS),
    (list, ELEMENTS),
    (set, MEMBERS),
    (bytearray, BYTES),
    (deque, DEQUE),
)


def _has_attributes(obj: Any) -> bool:
    return hasattr(obj, "__dict__") or bool(copyreg._slotnames(type(obj)))  # type: ignore[attr-defined]


class Kinds:
    """Remembers what was found out about types, while many objects of few types are looked at."""

    def __init__(self) -> None:
        self._immutable: dict[type, bool] = {}
        self._aspects: dict[type, tuple[Aspect, ...]] = {}

    def is_immutable(self, obj: Any) -> bool:
        """See :func:`is_immutable`."""
        kind = type(obj)
        known = self._immutable.get(kind)
        if known is None:
            known = self._immutable[kind] = is_immutable(obj)
        return known

    def aspects_of(self, obj: Any) -> tuple[Aspect, ...] | None:
        """See :func:`aspects_of`."""
        kind = type(obj)
        known = self._aspects.get(kind)
        if known is not None:
            return known
        aspects = aspects_of(obj)
        has_default_state = kind.__getstate__ is object.__getstate__  # type: ignore[comparison-overlap]
        if aspects == (CLASS, ATTRIBUTES) and has_default_state:
            self._aspects[kind] = aspects
        return aspects
