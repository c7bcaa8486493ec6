"""The pickler for both directions: cloudpickle, with memory taken out of the stream.

What differs from cloudpickle:

- tensors, storages and arrays become references to blocks, so that their bytes are copied once, views and
  tied storages keep sharing, and gradients, hooks and attributes of tensors travel too;
- a function of the notebook refers to the one shared namespace instead of carrying its globals; the global names it
  uses are reported to ``on_function``;
- what only looks picklable is refused (an open file, which cloudpickle would replace by its contents), and what
  only looks unpicklable is let through (a DataLoader that was iterated with persistent workers).
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import cloudpickle
from cloudpickle import cloudpickle as cloudpickle_internals

from taas_magic.namespace import large_bytes, rebuild
from taas_magic.namespace.blocks import OutgoingBlocks, has_lost_its_memory, reach_of, span_of_tensor
from taas_magic.namespace.bulk import address_of

#: Finds the block of the receiver in which memory (address, bytes) of this process lies: (number, offset from the
#: owner's start).
Locate = Callable[[int, int], "tuple[int, int] | None"]


class HasLargeBytesError(BaseException):
    """The stream would hold a large ``bytes``; no error of the value, so nothing else catches it."""


class StreamWithoutLargeBytes(io.BytesIO):
    """Where a pickle goes that is not to hold large ``bytes``. Most hold none, and then looking for them would cost."""

    def write(self, data: Any) -> int:
        """See the base class."""
        if large_bytes.is_large(data):
            raise HasLargeBytesError
        return super().write(data)


class MainGlobals:
    """Stands for the shared namespace in a stream; there is one instance."""

    def __reduce__(self) -> tuple[Callable[[], dict[str, Any]], tuple[()]]:
        return rebuild.main_globals, ()


MAIN = MainGlobals()


class Refused(TypeError):  # noqa: N818 - it reads as what it is where it is raised
    """An object that has a pickle but must not travel; the text says why."""


class NamespacePickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined, unused-ignore]
    """Pickles values of one namespace.

    Args:
        file: Where the stream goes.
        main: The namespace whose functions share their globals: ``shell.user_ns``, or ``__main__`` of a rank.
        blocks: Collects the memory that stays out of the stream.
        on_function: Called with every function that is pickled by value and has ``main`` as its globals.
        locate: Where the receiver has some of this process's memory already; see :data:`Locate`.
    """

    def __init__(
        self,
        file: Any,
        main: dict[str, Any],
        blocks: OutgoingBlocks,
        *,
        on_function: Callable[[types.FunctionType], None] | None = None,
        locate: Locate | None = None,
    ) -> None:
        self.out_of_band: list[int] = []
        # One dict: cloudpickle chains two, and asks both, in Python, about every object.
        self.dispatch_table = {**copyreg.dispatch_table, **cloudpickle.Pickler._dispatch_table}
        # Not the method itself: pickler and method would refer to each other, and keep all that was pickled alive.
        this = weakref.ref(self)
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: this()._take_buffer(buffer))  # type: ignore[union-attr]
        self._main = main
        self._blocks = blocks
        self._on_function = on_function
        self._locate = locate
        self._storages: dict[int, StorageEntry] = {}
        #: What was pickled and is of no builtin type.
        self._instances: list[Any] = []
        self._reducers: dict[type, Callable[[Any], Any]] = {}
        #: Ids of arrays whose memory several data frames may share until one of them writes.
        self._copied_on_write: set[int] = set()

    def close(self) -> None:
        """Let go of all that was pickled; the reducers refer back here, so it would wait for a collection."""
        self.clear_memo()
        self._reducers.clear()
        self._storages.clear()
        self._instances.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- dispatch ------------------------------------------------------------------------------------------------

    def reducer_override(self, obj: Any) -> Any:
        """See :class:`pickle.Pickler`."""
        kind = type(obj)
        reducer = self._reducers.get(kind)
        if reducer is None:
            reducer = self._reducers[kind] = self._choose_reducer(kind)
        self._instances.append(obj)
        return reducer(obj)

    def large_bytes_id(self, obj: bytes) -> tuple[int, ...]:
        """The persistent id of a large ``bytes``: the reference of its block."""
        address, nbytes = large_bytes.place_of(obj)
        located = self._locate(address, nbytes) if self._locate is not None else None
        if located is not None:
            return (-1 - located[0],)
        number = self._blocks.enter(address, nbytes, obj, writable=False)
        self._blocks.blocks[number].use(0, nbytes)
        return (number,)

    def attribute_dicts(self) -> set[int]:
        """The ids of the dicts that hold the attributes of what was pickled; to be asked once, at the end."""
        found = set()
        for obj in self._instances:
            try:
                attributes = object.__getattribute__(obj, "__dict__")
            except AttributeError:
                continue
            if type(attributes) is dict:
                found.add(id(attributes))
        self._instances.clear()
        return found

    def _choose_reducer(self, kind: type) -> Callable[[Any], Any]:  # noqa: C901, PLR0912 - a table of types
        """Pick the reducer for a type once; instances then cost one dict lookup."""
        if issubclass(kind, type):
            return self._reduce_class
        if issubclass(kind, types.FunctionType):
            return super().reducer_override  # type: ignore[no-any-return, unused-ignore]
        if kind is types.CodeType:
            return _reduce_code
        if kind is types.CellType:
            return _reduce_cell
        if kind is weakref.ref:
            return _reduce_weak_reference
        if kind in _REDUCERS_OF_NAMED:
            return _REDUCERS_OF_NAMED[kind]
        if kind is functools.cached_property:
            return _reduce_cached_property
        if kind.__module__ == "pandas.core.internals.blocks":
            return self._reduce_pandas_block
        if kind in rebuild.FILE_KINDS or issubclass(kind, io.TextIOWrapper):
            return self._reduce_file
        if issubclass(kind, types.ModuleType):
            return self._reduce_module
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and issubclass(kind, numpy.ndarray):
            return self._reduce_array if kind in (numpy.ndarray, numpy.memmap) else _default
        if torch is not None:
            special = self._choose_torch_reducer(kind, torch)
            if special is not None:
                return special
        return self._reduce_stream if hasattr(kind, "write") and hasattr(kind, "flush") else _default

    def _choose_torch_reducer(self, kind: type, torch: Any) -> Callable[[Any], Any] | None:
        if issubclass(kind, torch.Tensor):
            return self._reduce_tensor
        if kind is torch.UntypedStorage:
            return self._reduce_storage
        if kind is torch.storage.TypedStorage:
            return self._reduce_typed_storage
        if kind is torch.Generator:
            return _reduce_generator
        optim = sys.modules.get("torch.optim")
        has_default_pickle = kind.__reduce_ex__ is object.__reduce_ex__  # type: ignore[comparison-overlap]
        if optim is not None and issubclass(kind, optim.Optimizer) and has_default_pickle:
            return _reduce_optimizer
        data = sys.modules.get("torch.utils.data")
        if data is not None and issubclass(kind, data.DataLoader):
            return _reduce_loader
        return None

    # -- functions, classes and modules --------------------------------------------------------------------------

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        if func.__globals__ is not self._main:
            return super()._dynamic_function_reduce(func)
        if self._on_function is not None:
            self._on_function(func)
        code, _, name, defaults, _ = self._function_getnewargs(func)
        state, slots = cloudpickle_internals._function_getstate(func)
        # cloudpickle would give every function cells of its own, but functions may share the variables in them.
        slots["__globals__"], slots["__closure__"] = {}, None
        arguments = (code, MAIN, name, defaults, func.__closure__)
        return (
            cloudpickle_internals._make_function,
            arguments,
            (state, slots),
            None,
            None,
            cloudpickle_internals._function_setstate,
        )

    def _reduce_class(self, cls: type) -> Any:
        reduced = _without_slot_names(super().reducer_override(cls))
        # A tuple's class has no slots of its own, and typing.NamedTuple refuses to be told so.
        if "__slots__" not in vars(cls) or issubclass(cls, tuple) or reduced is NotImplemented:
            return reduced
        build, arguments, *rest = reduced
        if build is not cloudpickle_internals._make_skeleton_class:
            return reduced
        # cloudpickle 3.1 gives the class its slots when it is made already, too late to have an effect.
        constructor, name, bases, namespace, *others = arguments
        return build, (constructor, name, bases, {**namespace, "__slots__": cls.__dict__["__slots__"]}, *others), *rest

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if vars(module) is self._main:
            return __import__, ("__main__",)
        return NotImplemented

    # -- files ---------------------------------------------------------------------------------------------------

    def _reduce_stream(self, stream: Any) -> Any:
        for name in ("stdout", "stderr"):
            if stream is getattr(sys, name) or stream is getattr(sys, f"__{name}__"):
                return rebuild.stream_of_sys, (name,)
        return NotImplemented

    def _reduce_file(self, file: Any) -> Any:
        reduced = self._reduce_stream(file)
        if reduced is NotImplemented and file.closed and type(file) in rebuild.FILE_KINDS:
            return rebuild.closed_file, (type(file), getattr(file, "name", ""), getattr(file, "mode", "r"))
        if reduced is NotImplemented:
            raise Refused(f"an open file ({getattr(file, 'name', '?')!r}) belongs to the process that opened it")
        return reduced

    # -- memory --------------------------------------------------------------------------------------------------

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Take an out-of-band buffer (pandas, Arrow, array subclasses) as a block; False tells pickle it is taken."""
        raw = buffer.raw()
        number = self._blocks.enter(address_of(raw), raw.nbytes, raw, writable=not raw.readonly)
        self._blocks.blocks[number].use(0, raw.nbytes)
        self.out_of_band.append(number)
        return False

    def _reference(self, address: int, nbytes: int, owner: Any, *, writable: bool = True) -> tuple[int, int]:
        """The block reference for an owner's memory, and what to add to offsets from its start."""
        if self._locate is not None and nbytes:
            located = self._locate(address, nbytes)
            if located is not None:
                return -1 - located[0], located[1]
        return self._blocks.enter_part(address, nbytes, owner, writable=writable)

    def _use(self, reference: int, low: int, high: int) -> None:
        if reference >= 0:
            self._blocks.blocks[reference].use(low, high)

    def _reduce_array(self, array: Any) -> Any:
        if array.dtype.hasobject:
            return NotImplemented
        owner = _owner_of(array)
        low, high = reach_of(array.shape, array.strides, array.itemsize)
        start, nbytes = owner.ctypes.data, owner.nbytes
        if not (owner.flags.c_contiguous or owner.flags.f_contiguous):
            # A view of what is no array, of a buffer say: the memory that it reaches stands for its owner's.
            reach = reach_of(owner.shape, owner.strides, owner.itemsize)
            start, nbytes = start + reach[0], reach[1] - reach[0]
        offset = array.ctypes.data - start if array.size else 0
        if not 0 <= offset + low <= nbytes - high + low:
            return NotImplemented
        writable = bool(owner.flags.writeable or owner.flags.owndata) and id(owner) not in self._copied_on_write
        reference, shift = self._reference(start, nbytes, owner, writable=writable)
        if reference >= 0 and not writable:
            self._blocks.blocks[reference].writable = False
        self._use(reference, offset + shift + low, offset + shift + high)
        where = (reference, offset + shift, array.shape, array.strides)
        return rebuild.array, (*where, array.dtype, bool(array.flags.writeable))

    def _reduce_pandas_block(self, block: Any) -> Any:
        """Note the memory of a data frame's columns, which others may share that must not see a change of this one."""
        numpy, pandas = sys.modules["numpy"], sys.modules["pandas"]
        if int(pandas.__version__.split(".")[0]) >= 3 or pandas.get_option("mode.copy_on_write") is True:
            parts = [getattr(block.values, name, None) for name in ("_ndarray", "_data", "_mask")]
            arrays = [part for part in (block.values, *parts) if isinstance(part, numpy.ndarray)]
            self._copied_on_write.update(id(_owner_of(array)) for array in arrays)
        return NotImplemented

    def _storage(self, storage: Any) -> StorageEntry:
        """The entry for a storage: one for the same memory every time, so that the memo sees it as one."""
        entry = self._storages.get(storage._cdata)
        if entry is None:
            on_cpu = storage if storage.device.type == "cpu" else storage.cpu()
            nbytes = on_cpu.nbytes()
            reference, shift = self._reference(on_cpu.data_ptr() if nbytes else 0, nbytes, on_cpu)
            entry = self._storages[storage._cdata] = self._entry_of(storage, reference, shift)
        return entry

    @staticmethod
    def _entry_of(storage: Any, reference: int, shift: int) -> StorageEntry:
        return StorageEntry(storage, reference, shift)

    def _reduce_storage(self, storage: Any) -> Any:
        entry, nbytes = self._storage(storage), storage.nbytes()
        self._use(entry.reference, entry.shift, entry.shift + nbytes)
        if entry.shift:
            return rebuild.part_of_block, (entry.reference, entry.shift, nbytes)
        return rebuild.identity, (entry,)

    def _reduce_typed_storage(self, typed: Any) -> Any:
        return rebuild.typed_storage, (typed._untyped_storage, typed.dtype)

    def _reduce_tensor(self, tensor: Any) -> Any:
        import torch

        kind = _tensor_kind(tensor, torch)
        if kind is None:
            return NotImplemented
        state = _tensor_state(tensor)
        tail = (state, None, None, rebuild.set_tensor_state) if state else ()
        # The graph behind a non-leaf stays where it was built; a leaf that still claimed to need a gradient
        # would let backward() run and reach nothing.
        requires_grad = tensor.requires_grad and tensor.is_leaf
        size, stride = tuple(tensor.shape), tensor.stride()
        if tensor.device.type == "meta":
            return rebuild.meta_tensor, (kind, tensor.dtype, size, stride, requires_grad), *tail
        entry = self._storage(tensor.untyped_storage())
        offset = tensor.storage_offset() * tensor.itemsize
        if tensor.numel():
            if has_lost_its_memory(tensor):
                raise Refused("a tensor whose storage has been given up, or made smaller than it is")
            start = offset + entry.shift
            self._use(entry.reference, start, start + span_of_tensor(size, stride) * tensor.itemsize)
        where = (entry.reference, entry, tensor.dtype, offset + entry.shift, size, stride)
        return rebuild.tensor, (kind, *where, requires_grad), *tail


@dataclass(slots=True)
class StorageEntry:
    """A storage in the stream. It pickles as one over its block, whose hull the tensors that use it widen."""

    storage: Any
    reference: int
    shift: int

    def __reduce__(self) -> Any:
        return rebuild.storage, (self.reference, self.storage.device.type)


class Nowhere:
    """A file for picklers that are only there to look: it keeps nothing."""

    def write(self, data: Any) -> int:
        """See :meth:`io.RawIOBase.write`."""
        return len(data)


class LargeBytesPickler(NamespacePickler):
    """Takes large ``bytes`` out of the stream, for which it has to look at every object."""

    def persistent_id(self, obj: Any) -> Any:
        """See :class:`pickle.Pickler`."""
        return self.large_bytes_id(obj) if large_bytes.is_large(obj) else None


def _without_slot_names(reduced: Any) -> Any:
    """Leave out of a class what copyreg remembers of it in this process."""
    if reduced is NotImplemented or reduced[0] is not cloudpickle_internals._make_skeleton_class:
        return reduced
    build, arguments, (attributes, slots), *rest = reduced
    attributes = {name: value for name, value in attributes.items() if name != "__slotnames__"}
    return build, arguments, (attributes, slots), *rest


def _default(obj: Any) -> Any:
    return NotImplemented


def _reduce_code(code: types.CodeType) -> Any:
    """Keep the name of the file, which cloudpickle drops: tracebacks find the source of earlier cells by it."""
    build, arguments, *_ = cloudpickle_internals._code_reduce(code)
    return rebuild.code, (build, arguments, code.co_filename)


def _reduce_cell(cell: types.CellType) -> Any:
    """Fill the cell when it is there already: what it holds may lead back to the function that it belongs to."""
    try:
        contents = (cell.cell_contents,)
    except ValueError:
        return rebuild.cell, ()
    return rebuild.cell, (), contents, None, None, rebuild.set_cell


def _reduce_cached(function: Any) -> Any:
    """A function with a cache says that its pickle is its name, which no other process's notebook has yet."""
    if cloudpickle_internals._lookup_module_and_qualname(function) is not None:
        return NotImplemented
    return rebuild.cached, (function.__wrapped__, function.cache_parameters())


def _reduce_new_type(kind: Any) -> Any:
    if cloudpickle_internals._lookup_module_and_qualname(kind) is not None:
        return NotImplemented
    return typing.NewType, (kind.__name__, kind.__supertype__), vars(kind)


def _reduce_parameters(parameters: Any) -> Any:
    if cloudpickle_internals._lookup_module_and_qualname(parameters) is not None:
        return NotImplemented
    return type(parameters), (parameters.__name__,)


def _reduce_cached_property(cached: Any) -> Any:
    """Before Python 3.12 it has a lock."""
    return type(cached), (cached.func,), {name: value for name, value in vars(cached).items() if name != "lock"}


#: For what pickles as its name in a module, even in one that only the notebook has.
_REDUCERS_OF_NAMED: dict[type, Callable[[Any], Any]] = {
    functools._lru_cache_wrapper: _reduce_cached,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_parameters,
    typing.TypeVarTuple: _reduce_parameters,
}


def _reduce_weak_reference(reference: weakref.ref[Any]) -> Any:
    return rebuild.weak_reference, (reference(), reference.__callback__)


def _owner_of(array: Any) -> Any:
    """The array at the end of the chain of views: the one that owns the memory or got it from elsewhere."""
    numpy = sys.modules["numpy"]
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array


def _tensor_kind(tensor: Any, torch: Any) -> str | type | None:
    """How to rebuild a tensor over its storage, or None where torch's own reduction has to do it."""
    if torch.nn.parameter.is_lazy(tensor):
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.device.type not in ("cpu", "cuda", "meta") or tensor.is_nested:
        return None
    kind = type(tensor)
    if kind is torch.Tensor:
        return "tensor"
    if kind is torch.nn.Parameter:
        return "parameter"
    own_reduction = kind.__reduce_ex__ not in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
    if own_reduction or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    return kind


def _tensor_state(tensor: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if tensor.is_leaf and tensor.grad is not None:
        state["grad"] = tensor.grad
    if tensor._backward_hooks:
        state["hooks"] = tensor._backward_hooks
    if tensor.__dict__:
        state["attributes"] = tensor.__dict__
    return state


def reduce_exception(error: BaseException) -> Any:
    """Past a constructor written in Python, which need not take ``args``; None where pickle's own way will do."""
    kind = type(error)
    is_default = kind.__reduce__ is BaseException.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
    if is_default and any(isinstance(each, types.FunctionType) for each in (kind.__init__, kind.__setattr__)):
        return rebuild.exception, (kind, error.args), error.__dict__, None, None, rebuild.exception_state
    return None


def _reduce_generator(generator: Any) -> Any:
    return rebuild.generator, (generator.get_state(), generator.device.type)


def _reduce_optimizer(optimizer: Any) -> Any:
    """Keep what a scheduler did to ``step``: the optimizer's own pickle drops it, and the scheduler then warns."""
    build, args, state, *_ = optimizer.__reduce_ex__(5)
    is_wrapped = hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")
    was_called = bool(getattr(optimizer, "_opt_called", False))
    return build, args, (state, is_wrapped, was_called), None, None, rebuild.set_optimizer_state


def _reduce_loader(loader: Any) -> Any:
    if getattr(loader, "_iterator", None) is None:
        return NotImplemented
    build, args, *rest = loader.__reduce_ex__(5)
    state = {name: value for name, value in (rest[0] or {}).items() if name != "_iterator"}
    return rebuild.loader_without_iterator, (build, args, state)
