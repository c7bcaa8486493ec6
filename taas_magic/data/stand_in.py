"""What stands for a registered loader in a cell: it is iterated as ever, and what it yields comes from the producers.

The loader is the object that came with the cell's names, wherever the cell meets it. For the time of the cell it gets
another class, which answers for its parts as before, and iterates over what is delivered. It is no ``DataLoader`` then:
libraries that take a DataLoader apart, to make one of their own of it, leave it alone.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from taas_magic.data.delivered import Connection, DeliveredIterator, LoaderView
from taas_magic.wire_data import LoaderTask, Position

T = TypeVar("T")
_STATE_VERSION = 1
#: Special methods that every object has, and that may be asked of a loader.
_COMPARED = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__"}

_views: dict[int, LoaderView] = {}
_kinds: dict[type, type] = {}
_twin_kinds: dict[type, type] = {}


class DeliveredLoader(Generic[T]):
    """What a registered DataLoader is in a cell: its parts are as they were, its elements come from producers."""

    _taas_stands_for: type = object

    def __iter__(self) -> Iterator[T]:
        return _iterate(self)

    def __len__(self) -> int:
        return _views[id(self)].num_steps()

    def __getattr__(self, name: str) -> Any:
        """What the loader's own class has: methods and properties find in ``self`` what they look for."""
        if name.startswith("__"):
            raise AttributeError(f"{type(self)._taas_stands_for.__name__!r} object has no attribute {name!r}")
        return getattr(_views[id(self)].self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_views[id(self)].self, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_views[id(self)].self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a loader of its own, which nobody has registered."""
        return _reduce(self, protocol)

    def __repr__(self) -> str:
        return f"<delivered {type(self)._taas_stands_for.__name__} {_views[id(self)].task.name}>"

    def state_dict(self) -> dict[str, Any]:
        """Where the delivery of this loader is, for :meth:`load_state_dict`; nothing that was prepared is in it."""
        return _state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration begin where a :meth:`state_dict` says, with whatever number of ranks.

        Raises:
            ValueError: if it is no such state.
        """
        _views[id(self)].start = position_of(state)


def _iterate(loader: Any) -> DeliveredIterator:
    return DeliveredIterator(_views[id(loader)])


def _state_dict(loader: Any) -> dict[str, Any]:
    view = _views[id(loader)]
    position = view.start or view.position
    if position is None:
        return {"version": _STATE_VERSION}
    return {
        "version": _STATE_VERSION,
        "seed": position.seed,
        "epoch": position.epoch,
        "element": position.element,
        "units": position.units,
    }


def position_of(state: Mapping[str, Any]) -> Position | None:
    """The position that a state says; None for that of a loader that had not been iterated.

    Raises:
        ValueError: if it is no such state.
    """
    names = ("seed", "epoch", "element", "units")
    if not hasattr(state, "get") or state.get("version") != _STATE_VERSION:
        raise ValueError(
            f"not a state of a delivered loader: {state!r}\n"
            f"expected: what its state_dict() gave, with version {_STATE_VERSION}"
        )
    if not any(name in state for name in names):
        return None
    values = [state.get(name) for name in names]
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError(f"a state of a delivered loader that is not whole: {state!r}\nexpected: {', '.join(names)}")
    return Position(*values)  # type: ignore[arg-type]


def kind_for(kind: type, *, is_data_loader: bool) -> type:
    """The class that stands for a loader's own while a cell runs.

    Raises:
        TypeError: if there can be none.
    """
    if kind not in _kinds:
        if is_data_loader:
            members = {"_taas_stands_for": kind, **{name: _forwarded(name) for name in _own_operators(kind)}}
            _twin_kinds[kind] = _twin_kind(kind)
            _kinds[kind] = type(DeliveredLoader.__name__, (DeliveredLoader,), members)
        else:
            members = {
                name: DeliveredLoader.__dict__[name]
                for name in ("__iter__", "__reduce_ex__", "state_dict", "load_state_dict")
            }
            if hasattr(kind, "__len__"):
                members["__len__"] = DeliveredLoader.__dict__["__len__"]
            if not kind.__flags__ & 1 << 9:
                # Neither its instances nor what stands for it can have another class (Py_TPFLAGS_HEAPTYPE).
                raise TypeError(f"a {kind.__name__} cannot be delivered")
            _kinds[kind] = type(kind)(kind.__name__, (kind,), {**members, "__slots__": (), "_taas_stands_for": kind})
    return _kinds[kind]


def _own_operators(kind: type) -> set[str]:
    """Special methods that the user's class has beyond those of a DataLoader: they are looked up in the class alone."""
    base = sys.modules["torch.utils.data"].DataLoader
    found: set[str] = set()
    for each in kind.__mro__[: kind.__mro__.index(base)]:
        found.update(name for name, value in each.__dict__.items() if name.startswith("__") and callable(value))
    return (found - set(dir(object)) - set(DeliveredLoader.__dict__) - {"__setstate__"}) | (found & _COMPARED)


def _forwarded(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        view = _views[id(self)]
        return getattr(view.kind, name)(view.self, *args, **kwargs)

    forward.__name__ = name
    return forward


def _twin_kind(kind: type) -> type:
    """A class of objects that are of a DataLoader's class, have its attributes, and yield what is delivered.

    Methods get such a *twin* as ``self``: ``super()`` wants an object of their class. So whatever they do with it has
    to be as with the loader.
    """

    def iterate(twin: Any) -> Any:
        loader = twin._taas_loader
        return _iterate(loader) if id(loader) in _views else kind.__iter__(twin)  # type: ignore[attr-defined]

    members = {
        "__module__": kind.__module__,
        "__slots__": ("_taas_loader",),
        "__iter__": iterate,
        "__len__": lambda twin: len(twin._taas_loader),
        "__reduce_ex__": lambda twin, _: (_itself, (twin._taas_loader,)),
    }
    return type(kind)(kind.__name__, (kind,), members)


def _twin_of(loader: Any, kind: type) -> Any:
    twin: Any = object.__new__(_twin_kinds[kind])
    object.__setattr__(twin, "__dict__", loader.__dict__)
    object.__setattr__(twin, "_taas_loader", loader)
    return twin


def _itself(loader: Any) -> Any:
    return loader


def _reduce(loader: Any, protocol: Any) -> Any:
    """As the loader's own class would have itself pickled and copied."""
    kind = type(loader)._taas_stands_for
    view = _views.get(id(loader))
    own = loader if view is None else view.self
    reduced = kind.__reduce_ex__(own, protocol)
    if isinstance(reduced, str):
        return reduced
    function, args, *rest = reduced
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Pickling it by that name compares classes.
        function = _new
    return (_kind_for(function, own, kind), tuple(_kind_for(each, own, kind) for each in args), *rest)


def _kind_for(value: Any, own: Any, kind: type) -> Any:
    return kind if value is type(own) else value


def _new(kind: Any, *args: Any) -> Any:
    return kind.__new__(kind, *args)


def attach(connection: Connection, tasks: list[LoaderTask], objects: Mapping[int, Any], num_ranks: int) -> None:
    """Have the loaders of a cell deliver what comes over a connection."""
    for index, task in enumerate(tasks):
        loader = objects[task.number]
        view = LoaderView(loader, index, task, connection, num_ranks)
        stands_for_it = kind_for(view.kind, is_data_loader=view.is_data_loader)
        if view.is_data_loader:
            view.self = _twin_of(loader, view.kind)
        _views[id(loader)] = view
        object.__setattr__(loader, "__class__", stands_for_it)


def detach() -> None:
    """Have the loaders be what they were."""
    connections = {id(view.connection): view.connection for view in _views.values()}
    for view in _views.values():
        object.__setattr__(view.loader, "__class__", view.kind)
    _views.clear()
    for connection in connections.values():
        connection.close()


def delivered_loaders() -> list[Any]:
    """The loaders that are delivered to this process."""
    return [view.loader for view in _views.values()]
