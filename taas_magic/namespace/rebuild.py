"""What the pickle streams of a parcel call when they are loaded.

The pickles name these functions, so their signatures are part of the protocol between kernel and ranks. They find the
memory they refer to in the :class:`Loading` that is active while a stream is read.

A *block reference* is an int: ``n >= 0`` is block n of the parcel that is being read; ``-1 - k`` is block k of those
that both sides have, so the reader's own memory.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from taas_magic.namespace import large_bytes
from taas_magic.namespace.blocks import IncomingBlocks, span_of_tensor
from taas_magic.namespace.common import CommonMemory


class Loading:
    """The context in which a stream is read: its blocks, the reader's own blocks, and the global namespace."""

    def __init__(
        self,
        incoming: IncomingBlocks,
        main: dict[str, Any],
        own: CommonMemory | None = None,
        *,
        copy_below_bytes: int = 0,
        maps_bytes: bool = False,
    ) -> None:
        self.incoming = incoming
        self.main = main
        self.own = own or CommonMemory()
        self._copy_below_bytes = copy_below_bytes
        self._maps_bytes = maps_bytes
        self._copies: dict[int, memoryview] = {}
        self._own_storages: dict[int, Any] = {}

    def view(self, reference: int) -> memoryview:
        """The bytes of an incoming block; a copy of a small one, which then does not keep the whole parcel mapped."""
        view = self.incoming.view(reference)
        if len(view) >= self._copy_below_bytes:
            return view
        return self._copies.setdefault(reference, memoryview(bytearray(view)))

    def large_bytes(self, reference: int) -> bytes:
        """The ``bytes`` object of a block: a rank's lies where the block is mapped, another process gets a copy."""
        if reference < 0:
            own = self.own.blocks[-1 - reference]
            obj: bytes = own.owner if isinstance(own.owner, bytes) else large_bytes.copied_out(own.view)
            return obj
        if not self._maps_bytes:
            return large_bytes.copied_out(self.incoming.view(reference))
        return self.incoming.bytes_over(reference)

    @property
    def buffers(self) -> list[memoryview]:
        """What serves the pickle's out-of-band buffers, in the order of the stream."""
        return [self.view(number) for number in self.incoming.manifest.out_of_band]

    def memory(self, reference: int) -> tuple[memoryview, int]:
        """The bytes of a block and the offset, from its owner's start, of the first of them."""
        if reference >= 0:
            return self.view(reference), self.incoming.extent(reference).start
        block = self.own.blocks[-1 - reference]
        return block.view, block.start

    def start_of_storage(self, reference: int) -> int:
        """Where, in its owner, what :meth:`storage` returns begins."""
        if reference >= 0:
            return self.incoming.extent(reference).start
        block = self.own.blocks[-1 - reference]
        return 0 if _is_storage(block.owner) else block.start

    def storage(self, reference: int) -> Any:
        """The untyped storage over a block; the reader's own storage where the block is its own."""
        import torch

        if reference >= 0:
            view = self.view(reference)
            return torch.frombuffer(view, dtype=torch.uint8).untyped_storage() if len(view) else torch.UntypedStorage(0)
        storage = self._own_storages.get(reference)
        if storage is None:
            owner = self.own.blocks[-1 - reference].owner
            if not _is_storage(owner):
                owner = torch.frombuffer(self.memory(reference)[0], dtype=torch.uint8).untyped_storage()
            storage = self._own_storages[reference] = owner
        return storage


class ParcelUnpickler(pickle.Unpickler):
    """Loads the streams of parcels; ``objects`` are those that both sides have."""

    def __init__(self, context: Loading, objects: Mapping[int, Any] = MappingProxyType({})) -> None:
        super().__init__(io.BytesIO(context.incoming.stream), buffers=context.buffers)
        self._context = context
        self._objects = objects

    def persistent_load(self, number: Any) -> Any:
        """See :class:`pickle.Unpickler`; a number in a tuple is that of a block."""
        if isinstance(number, tuple):
            return self._context.large_bytes(number[0])
        try:
            return self._objects[number]
        except KeyError:
            raise LookupError(f"object {number}, which the other side takes for known, is not known here") from None


def _is_storage(owner: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(owner, torch.UntypedStorage)


_active: list[Loading] = []


@contextlib.contextmanager
def loading(context: Loading) -> Iterator[Loading]:
    """Make ``context`` the one that the functions of this module use."""
    _active.append(context)
    try:
        yield context
    finally:
        _active.pop()


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence what loading an object warns of: a class that its library deprecates is no doing of the cell.

    Unlike ``warnings.catch_warnings`` it keeps the filters that modules add which are imported meanwhile.
    """
    entry = ("ignore", None, Warning, None, 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        warnings.filters[:] = [other for other in warnings.filters if other is not entry]  # type: ignore[index]


def main_globals() -> dict[str, Any]:
    """The one namespace that the cell and the notebook's functions share."""
    return _active[-1].main


def identity(value: Any) -> Any:
    """Return the value: what was wrapped travels without its wrapper."""
    return value


def code(build: Callable[..., types.CodeType], arguments: tuple[Any, ...], file_name: str) -> types.CodeType:
    """A code object that says which file, or cell, it is from."""
    return build(*arguments).replace(co_filename=file_name)


def exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception as it was, past the constructor of its class, which may want other arguments than ``args``."""
    error = kind.__new__(kind, *args)
    constructors = (vars(base).get("__init__") for base in kind.__mro__)
    native = next(each for each in constructors if isinstance(each, types.WrapperDescriptorType))
    native(error, *args)
    return error


def exception_state(error: BaseException, state: dict[str, Any]) -> None:
    """Restore what :func:`exception` leaves out; past ``__setattr__``, since an exception may be a frozen dataclass."""
    error.__dict__.update(state)


def cell() -> types.CellType:
    """An empty variable of a closure."""
    return types.CellType()


def set_cell(cell: types.CellType, contents: tuple[Any]) -> None:
    """Give a variable of a closure its value."""
    (cell.cell_contents,) = contents


class _Dead:
    """Something to refer to weakly that is gone at once."""


def cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """A function with ``functools.lru_cache``, which has remembered nothing yet."""
    return functools.lru_cache(**parameters)(function)


def weak_reference(obj: Any, callback: Callable[[Any], Any] | None) -> weakref.ref[Any]:
    """A weak reference; to nothing where the sender's was dead."""
    return weakref.ref(_Dead() if obj is None else obj, callback)


#: What ``open`` returns.
FILE_KINDS = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)


def closed_file(kind: type, name: Any, mode: str) -> Any:
    """A file that is closed, as the sender's was: ``with open(...) as f`` leaves one."""
    raw = io.FileIO(os.devnull, "r+")
    raw.name = name
    file: Any = raw
    if kind in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom):
        file = kind(raw)
    elif kind is io.TextIOWrapper:
        file = io.TextIOWrapper(io.BufferedRandom(raw))
        file.mode = mode
    file.close()
    return file


def stream_of_sys(name: str) -> Any:
    """``sys.stdout`` or ``sys.stderr`` of the reading process."""
    return getattr(sys, name)


def array(  # noqa: PLR0917 - pickles call it
    reference: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, writeable: bool
) -> Any:
    """A numpy array over a block, ``offset`` bytes from its owner's start to the first element."""
    import numpy as np

    memory, start = _active[-1].memory(reference)
    result: Any = np.ndarray(shape, dtype, buffer=memory, offset=offset - start, strides=strides)
    if not writeable:
        result.flags.writeable = False
    return result


def storage(reference: int, device: str) -> Any:
    """An untyped torch storage over a block, on ``device`` ("cpu" or "cuda") where this process has such."""
    import torch

    result = _active[-1].storage(reference)
    if device == "cuda" and torch.cuda.is_available() and result.device.type == "cpu":
        flat = torch.empty(0, dtype=torch.uint8).set_(result)
        result = flat.to("cuda").untyped_storage()
    return result


def part_of_block(reference: int, offset: int, nbytes: int) -> Any:
    """An untyped torch storage over ``nbytes`` of a block, ``offset`` bytes from its owner's start."""
    import torch

    memory, start = _active[-1].memory(reference)
    part = memory[offset - start : offset - start + nbytes]
    return torch.frombuffer(part, dtype=torch.uint8).untyped_storage()


def tensor(  # noqa: PLR0917 - pickles call it
    kind: str | type,
    reference: int,
    storage: Any,
    dtype: Any,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Any:
    """A strided tensor over a storage.

    ``kind`` is "tensor", "parameter", or a subclass; ``offset`` counts bytes from the owner's start.
    """
    import torch

    start = _active[-1].start_of_storage(reference)
    result = torch.empty(0, dtype=dtype, device=storage.device)
    result.set_(storage, (offset - start) // dtype.itemsize, size, stride)
    return _dress(kind, result, requires_grad)


def tensor_over(  # noqa: PLR0917 - pickles call it
    kind: str | type,
    base: Any,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: Any,
    requires_grad: bool,
) -> Any:
    """A tensor over the memory of another, or of an array, ``offset`` bytes from its start."""
    import torch

    whole = torch.from_numpy(base) if not isinstance(base, torch.Tensor) else base.detach()
    needed_bytes = offset + span_of_tensor(size, stride) * dtype.itemsize
    _require_room(whole.is_contiguous(), whole.numel() * whole.itemsize, needed_bytes)
    flat = whole.reshape(-1).view(torch.uint8)
    result = torch.empty(0, dtype=dtype, device=flat.device)
    result.set_(flat.untyped_storage(), (flat.storage_offset() + offset) // dtype.itemsize, size, stride)
    return _dress(kind, result, requires_grad)


def _require_room(is_contiguous: bool, nbytes: int, needed_bytes: int) -> None:
    if not is_contiguous or needed_bytes > nbytes:
        raise ValueError(
            "a view that the notebook made does not fit on what this rank has in place of the tensor or array by now"
        )


def array_over(  # noqa: PLR0917 - pickles call it
    base: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, writeable: bool
) -> Any:
    """An array over the memory of another, or of a tensor, ``offset`` bytes from its start."""
    import numpy as np

    whole = base if isinstance(base, np.ndarray) else base.detach().cpu().numpy()
    _require_room(whole.flags.c_contiguous, whole.nbytes, offset)
    result: Any = np.ndarray(shape, dtype, buffer=whole.reshape(-1).view(np.uint8), offset=offset, strides=strides)
    if not writeable:
        result.flags.writeable = False
    return result


def meta_tensor(
    kind: str | type, dtype: Any, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> Any:
    """A tensor on the meta device: shape without memory."""
    import torch

    return _dress(kind, torch.empty_strided(size, stride, dtype=dtype, device="meta"), requires_grad)


def _dress(kind: str | type, plain: Any, requires_grad: bool) -> Any:
    import torch

    if kind == "parameter":
        return torch.nn.Parameter(plain, requires_grad)
    if kind == "tensor":
        return plain.requires_grad_() if requires_grad else plain
    return torch.Tensor._make_subclass(kind, plain, requires_grad)  # type: ignore[arg-type]


def set_tensor_state(tensor: Any, state: dict[str, Any]) -> None:
    """Give a tensor its gradient, hooks and attributes."""
    if "grad" in state:
        tensor.grad = state["grad"]
    if "hooks" in state:
        tensor._backward_hooks = state["hooks"]
    tensor.__dict__.update(state.get("attributes", {}))


def set_optimizer_state(optimizer: Any, state: tuple[Any, bool, bool]) -> None:
    """Restore an optimizer, with the wrapper around ``step`` by which schedulers see that it was called."""
    pickled, is_wrapped, was_called = state
    optimizer.__setstate__(pickled)
    if was_called:
        optimizer._opt_called = True
    if is_wrapped:
        step = type(optimizer).step

        @functools.wraps(step)
        def step_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._opt_called = True
            return step(self, *args, **kwargs)

        step_and_note._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step_and_note, optimizer)


def typed_storage(untyped: Any, dtype: Any) -> Any:
    """The typed wrapper in which torch's own reducers (sparse, quantised) hand on a storage."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def generator(state: Any, device: str) -> Any:
    """A ``torch.Generator`` in the state of the one that was sent."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("a CUDA random generator cannot be rebuilt in a process without CUDA")
    result = torch.Generator(device=device)
    result.set_state(state)
    return result


def loader_without_iterator(rebuild: Callable[..., Any], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """A DataLoader as it was before its first iteration: its worker processes belong to the sender."""
    result = rebuild(*args)
    result.__dict__.update(state)
    result.__dict__["_iterator"] = None
    return result
