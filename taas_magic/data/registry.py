"""Which loaders the notebook has registered for delivery. Registering leaves the loader itself as it is."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from taas_magic.errors import CannotTravelError, RegistrationError
from taas_magic.wire_data import Determinism, OnError, Position, Role, Tail


class WorkerInfo(NamedTuple):
    """Which part of a data set is to be read here: part ``id`` of ``num_workers``."""

    id: int
    num_workers: int


@dataclass(frozen=True)
class Registration:
    """How a loader is to be delivered."""

    name: str
    role: Role
    tail: Tail
    on_error: OnError
    determinism: Determinism
    cycles: bool
    start: Position | None
    reference: Any

    @property
    def loader(self) -> Any:
        """The loader; None when it is gone."""
        return self.reference()


#: By the loader's id.
_registrations: dict[int, Registration] = {}
_CHOICES: dict[str, tuple[str, ...]] = {
    "role": ("train", "eval"),
    "tail": ("drop", "pad"),
    "on_error": ("raise", "skip"),
    "determinism": ("seeded", "exact"),
}


def register(
    loader: Any,
    *,
    role: Role = "train",
    name: str = "",
    tail: Tail = "drop",
    on_error: OnError = "raise",
    determinism: Determinism = "seeded",
    cycles: bool = True,
    resume: Mapping[str, Any] | None = None,
) -> None:
    """Register a loader; see :func:`taas.register`."""
    __tracebackhide__ = True
    _require_kernel("register")
    for key, value in (("role", role), ("tail", tail), ("on_error", on_error), ("determinism", determinism)):
        if value not in _CHOICES[key]:
            raise RegistrationError.of(
                f"{key}={value!r}", expected=" or ".join(f"{key}={choice!r}" for choice in _CHOICES[key])
            )
    main = sys.modules["__main__"].__dict__
    name = name or name_of(loader, main) or type(loader).__name__
    if id(loader) in _registrations:
        raise RegistrationError.of(
            f"`{name}` is registered already", do=f"taas.unregister({name}) before, to register it in another way"
        )
    _require_deliverable(loader, name, main)
    start = None
    if resume is not None:
        from taas_magic.data.stand_in import position_of

        start = position_of(resume)
    _registrations[id(loader)] = Registration(
        name, role, tail, on_error, determinism, cycles, start, _reference(loader)
    )


def unregister(loader: Any) -> None:
    """Take a registration back; see :func:`taas.unregister`."""
    __tracebackhide__ = True
    _require_kernel("unregister")
    if id(loader) not in _registrations:
        name = name_of(loader, sys.modules["__main__"].__dict__) or type(loader).__name__
        there = ", ".join(f"`{each.name}`" for each in _registrations.values()) or "none"
        raise RegistrationError.of(f"`{name}` is not registered", expected=f"one of those that are: {there}")
    del _registrations[id(loader)]


def registrations() -> list[Registration]:
    """What is registered, in the order in which it was."""
    return [each for each in _registrations.values() if each.loader is not None]


def registered() -> list[Any]:
    """The registered loaders; see :func:`taas.registered`."""
    if _is_rank():
        from taas_magic.data.stand_in import delivered_loaders

        return delivered_loaders()
    return [each.loader for each in registrations()]


def is_registered(loader: Any) -> bool:
    """Whether this very object is registered; see :func:`taas.is_registered`."""
    return any(each is loader for each in registered())


def get_worker_info() -> WorkerInfo:
    """See :func:`taas.get_worker_info`."""
    torch_data = sys.modules.get("torch.utils.data")
    info = torch_data.get_worker_info() if torch_data is not None else None
    return WorkerInfo(0, 1) if info is None else WorkerInfo(info.id, info.num_workers)


def name_of(loader: Any, main: Mapping[str, Any]) -> str:
    """The name under which the notebook has it; "" where it has none."""
    names = [name for name, value in list(main.items()) if value is loader and not name.startswith("_")]
    return names[0] if names else ""


def _is_rank() -> bool:
    from taas import _place

    return _place.current.is_in_run


def _require_kernel(what: str) -> None:
    __tracebackhide__ = True
    if _is_rank():
        raise RegistrationError.of(
            f"taas.{what}() in a cell that runs on ranks: its producers have started before it",
            expected=f"taas.{what}() in a cell without a pragma, before this one",
        )


def _reference(loader: Any) -> Any:
    key = id(loader)
    try:
        return weakref.ref(loader, lambda _: _registrations.pop(key, None))
    except TypeError:
        # It knows nothing of weak references, and stays until it is unregistered.
        return lambda: loader


def _require_deliverable(loader: Any, name: str, main: dict[str, Any]) -> None:
    """Check at once what a run would find: that it can be iterated elsewhere, and delivered here.

    Raises:
        CannotTravelError: naming the path to what cannot be sent.
        RegistrationError: if it is nothing that could be delivered.
    """
    __tracebackhide__ = True
    from taas_magic.data import describe
    from taas_magic.data.stand_in import kind_for
    from taas_magic.namespace.pack import diagnose
    from taas_magic.namespace.pickler import NamespacePickler, Refused

    class _ProducerPickler(NamespacePickler):
        def _reduce_tensor(self, tensor: Any) -> Any:
            if tensor.device.type not in ("cpu", "meta"):
                raise Refused(f"it is on {tensor.device}, and producers have no GPU")
            return super()._reduce_tensor(tensor)

    if not describe.can_be_iterated(loader):
        raise RegistrationError.of(
            f"`{name}` is a {type(loader).__name__}, which cannot be iterated", expected="a DataLoader, or any iterable"
        )
    culprit = diagnose(main, name, loader, _ProducerPickler)
    if culprit is not None:
        raise CannotTravelError.of(
            f"`{name}` cannot be sent to producers: {culprit.describe()}",
            expected="a loader that can be pickled, with all that it reaches; it is not registered",
            do=culprit.advice,
        )
    try:
        kind_for(type(loader), is_data_loader=describe.is_data_loader(loader))
    except TypeError:
        raise RegistrationError.of(
            f"`{name}` is a {type(loader).__name__}: there is nothing to prepare, and no other object can stand for it",
            expected="a DataLoader, or an object of a class of your own that can be iterated",
            do="make a DataLoader of it, with batch_size=None to get the same elements, and register that",
        ) from None
